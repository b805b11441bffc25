/* The memory modes: allocations between unmapped pages, fresh memory full of NaN. */
#include "hooks.h"

#include <pthread.h>
#include <stdlib.h>

#define ALIGNMENT 16 /* of a fenced address: so many bytes less one may be left unguarded behind an allocation */
#define DEVICES 64

struct fenced {
    void *pointer;
    uint64_t base, handle;
    size_t mapped, reserved;
};

static struct fenced *allocations;
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

/* The device itself, and every device that can reach it: what cudaMalloc and peer access give together. */
static int grant(uint64_t pointer, size_t bytes, int device) {
    int (*set_access)(uint64_t, size_t, const void *, size_t) =
        FIND("cuMemSetAccess", uint64_t, size_t, const void *, size_t);
    int (*get_count)(int *) = FIND("cudaGetDeviceCount", int *);
    int (*can_reach)(int *, int, int) = FIND("cudaDeviceCanAccessPeer", int *, int, int);
    struct cuda_memory_access access[DEVICES];
    size_t granted = 0;
    int devices = device + 1;
    if (get_count) {
        get_count(&devices);
    }
    for (int other = 0; other < devices && granted < DEVICES; other++) {
        int can = other == device;
        if (can || (can_reach && !can_reach(&can, other, device) && can)) {
            access[granted++] = (struct cuda_memory_access){{1, other}, 3};
        }
    }
    return set_access ? set_access(pointer, bytes, access, granted) : CUDA_ERROR_NOT_SUPPORTED;
}

static bool keep(const struct fenced *allocation) {
    pthread_mutex_lock(&lock);
    if (count == room) {
        size_t more = room ? 2 * room : 64;
        struct fenced *grown = realloc(allocations, more * sizeof *grown);
        if (!grown) {
            pthread_mutex_unlock(&lock);
            return false;
        }
        allocations = grown;
        room = more;
    }
    allocations[count++] = *allocation;
    pthread_mutex_unlock(&lock);
    return true;
}

/* [unmapped page | mapped | unmapped page], the allocation at the end of what is mapped or at its beginning. */
static int allocate_fenced(void **pointer, size_t bytes, bool at_the_beginning) {
    int (*granularity)(size_t *, const void *, int) =
        FIND("cuMemGetAllocationGranularity", size_t *, const void *, int);
    int (*create)(uint64_t *, size_t, const void *, unsigned long long) =
        FIND("cuMemCreate", uint64_t *, size_t, const void *, unsigned long long);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long) =
        FIND("cuMemAddressReserve", uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long) =
        FIND("cuMemMap", uint64_t, size_t, size_t, uint64_t, unsigned long long);
    int (*unmap)(uint64_t, size_t) = FIND("cuMemUnmap", uint64_t, size_t);
    int (*release)(uint64_t) = FIND("cuMemRelease", uint64_t);
    int (*give_back)(uint64_t, size_t) = FIND("cuMemAddressFree", uint64_t, size_t);
    int (*make_context)(void *) = FIND("cudaFree", void *);
    if (!granularity || !create || !reserve || !map || !unmap || !release || !give_back || !make_context) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    int device = isolate_this.device;
    struct cuda_allocation_properties properties = {.type = 1, .location = {1, device}};
    struct fenced allocation = {0};
    size_t page;
    int code = make_context(NULL);
    code = code ? code : granularity(&page, &properties, 0);
    if (code) {
        return code;
    }
    allocation.mapped = round_up(bytes, page);
    allocation.reserved = allocation.mapped + 2 * page;
    code = create(&allocation.handle, allocation.mapped, &properties, 0);
    if (code) {
        return code;
    }
    code = reserve(&allocation.base, allocation.reserved, 0, 0, 0);
    if (code) {
        release(allocation.handle);
        return code;
    }
    uint64_t start = allocation.base + page;
    code = map(start, allocation.mapped, 0, allocation.handle, 0);
    if (!code) {
        code = grant(start, allocation.mapped, device);
        uint64_t place = at_the_beginning ? start : start + allocation.mapped - round_up(bytes, ALIGNMENT);
        allocation.pointer = (void *)(uintptr_t)place;
        if (!code && !keep(&allocation)) {
            code = CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (code) {
            unmap(start, allocation.mapped);
        }
    }
    if (code) {
        give_back(allocation.base, allocation.reserved);
        release(allocation.handle);
        return code;
    }
    *pointer = allocation.pointer;
    return 0;
}

/* cudaFree waits for what is still at work on the memory, and so must this. */
static int release_fenced(const struct fenced *allocation) {
    int (*synchronize)(void) = FIND("cudaDeviceSynchronize", void);
    int (*unmap)(uint64_t, size_t) = FIND("cuMemUnmap", uint64_t, size_t);
    int (*release)(uint64_t) = FIND("cuMemRelease", uint64_t);
    int (*give_back)(uint64_t, size_t) = FIND("cuMemAddressFree", uint64_t, size_t);
    int code = synchronize && isolate_may_synchronize(NULL) ? synchronize() : 0;
    size_t page = (allocation->reserved - allocation->mapped) / 2;
    int unmapped = unmap(allocation->base + page, allocation->mapped);
    code = code ? code : unmapped;
    release(allocation->handle);
    give_back(allocation->base, allocation->reserved);
    return code;
}

void isolate_poison(void *pointer, size_t bytes) {
    int (*fill)(void *, int, size_t) = FIND("cudaMemset", void *, int, size_t);
    int (*synchronize)(void) = FIND("cudaDeviceSynchronize", void);
    /* A stream that does not wait for the default stream must not see the memory before it is full. */
    if (atomic_load(&isolate_mode) & ISOLATE_MODE_POISON && fill && synchronize && isolate_may_synchronize(NULL)
        && !fill(pointer, 0xff, bytes)) {
        synchronize();
    }
}

int isolate_allocate(int (*real)(void **, size_t), void **pointer, size_t bytes) {
    uint32_t mode = atomic_load(&isolate_mode);
    bool fence = bytes && mode & (ISOLATE_MODE_FENCE | ISOLATE_MODE_FENCE_BEFORE);
    int code = fence ? allocate_fenced(pointer, bytes, mode & ISOLATE_MODE_FENCE_BEFORE) : real(pointer, bytes);
    if (!code && bytes) {
        isolate_poison(*pointer, bytes);
    }
    return code;
}

int isolate_release(int (*real)(void *), void *pointer) {
    struct fenced found = {0};
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        if (allocations[i].pointer == pointer) {
            found = allocations[i];
            allocations[i] = allocations[--count];
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return found.pointer ? release_fenced(&found) : real(pointer);
}
