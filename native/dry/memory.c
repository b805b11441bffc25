/* Memory: which ranges exist, of which kind and size, and how much of a device is used.
 *
 * A device's memory is one reservation of address space with nothing behind it, so an address says which device it belongs
 * to, also after it was freed. Host memory that CUDA hands out is real, because the host writes it.
 */
#define _GNU_SOURCE
#include "dry.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Measured: allocations are 512 bytes apart and up to 1 MiB share blocks of 2 MiB, larger ones have their own. */
#define ALIGNMENT ((size_t)512)
#define BLOCK ((size_t)2 << 20)
#define LARGEST_SHARED ((size_t)1 << 20)
#define MOST_FREED 256

static struct dry_range *ranges; /* sorted by start, none overlap */
static size_t range_count, range_space;

static struct {
    uintptr_t start;
    size_t bytes;
    const char *what;
} freed[MOST_FREED];
static size_t freed_count;

static struct {
    uintptr_t start;
    size_t bytes;
    uint64_t used, small; /* bytes in blocks of their own; bytes of small allocations */
} arena[DRY_MOST_DEVICES];

/* The first range that starts beyond an address. */
static size_t above(uintptr_t address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

struct dry_range *dry_range_of(uintptr_t address) {
    size_t next = above(address);
    if (next == 0) {
        return NULL;
    }
    struct dry_range *range = &ranges[next - 1];
    return address - range->start < range->bytes ? range : NULL;
}

bool dry_overlaps(uintptr_t start, size_t bytes) {
    size_t next = above(start);
    return (next < range_count && ranges[next].start - start < bytes) || dry_range_of(start);
}

int dry_add_range(const struct dry_range *range) {
    if (range_count == range_space) {
        size_t space = range_space ? 2 * range_space : 256;
        struct dry_range *more = realloc(ranges, space * sizeof *ranges);
        if (!more) {
            return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left to note an allocation in");
        }
        ranges = more;
        range_space = space;
    }
    size_t place = above(range->start);
    memmove(&ranges[place + 1], &ranges[place], (range_count - place) * sizeof *ranges);
    ranges[place] = *range;
    range_count++;
    return CUDA_SUCCESS;
}

static const char *const kind_names[] = {
    [DRY_DEVICE] = "device memory",
    [DRY_MANAGED] = "managed memory",
    [DRY_PINNED] = "pinned host memory",
    [DRY_REGISTERED] = "registered host memory",
    [DRY_VIRTUAL] = "mapped device memory",
};

void dry_remove_range(struct dry_range *range) {
    freed[freed_count % MOST_FREED].start = range->start;
    freed[freed_count % MOST_FREED].bytes = range->bytes;
    freed[freed_count++ % MOST_FREED].what = kind_names[range->kind];
    size_t place = (size_t)(range - ranges);
    range_count--;
    memmove(range, range + 1, (range_count - place) * sizeof *ranges);
}

void dry_describe_address(uintptr_t address, char *text, size_t size) {
    for (size_t back = 1; back <= freed_count && back <= MOST_FREED; back++) {
        size_t place = (freed_count - back) % MOST_FREED;
        if (address - freed[place].start < freed[place].bytes) {
            snprintf(text, size, "%#" PRIxPTR " is in %s of %zu bytes that was freed", address, freed[place].what,
                     freed[place].bytes);
            return;
        }
    }
    size_t next = above(address);
    if (next > 0 && address - ranges[next - 1].start < ranges[next - 1].bytes + BLOCK) {
        const struct dry_range *near = &ranges[next - 1];
        snprintf(text, size, "%#" PRIxPTR " is %zu bytes beyond the end of %s of %zu bytes", address,
                 (size_t)(address - near->start - near->bytes), kind_names[near->kind], near->bytes);
        return;
    }
    snprintf(text, size, "%#" PRIxPTR " is in no allocation", address);
}

int dry_check_span(uintptr_t address, size_t bytes, const char *call, const char *what) {
    struct dry_range *range = dry_range_of(address);
    size_t left = range->bytes - (address - range->start);
    /* Mappings that touch are one piece of memory, as ggml's pool uses them. */
    while (left < bytes && range->kind == DRY_VIRTUAL) {
        struct dry_range *next = dry_range_of(address + left);
        if (!next || next->kind != DRY_VIRTUAL || !next->accessible) {
            break;
        }
        left += next->bytes;
    }
    if (left >= bytes && (range->kind != DRY_VIRTUAL || range->accessible)) {
        return CUDA_SUCCESS;
    }
    if (left >= bytes) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %s is mapped memory that no device was given access to", call, what);
    }
    return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %zu bytes at byte %zu of %s, which is %s of %zu bytes", call, bytes,
                      (size_t)(address - range->start), what, kind_names[range->kind], range->bytes);
}

uintptr_t dry_reserve(size_t bytes, size_t alignment) {
    if (bytes > SIZE_MAX / 2) {
        return 0;
    }
    void *place = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) {
        return 0;
    }
    uintptr_t start = ((uintptr_t)place + alignment - 1) & ~(alignment - 1);
    if (start > (uintptr_t)place) {
        munmap(place, start - (uintptr_t)place);
    }
    munmap((void *)(start + bytes), (uintptr_t)place + alignment - start);
    return start;
}

static uint64_t available(int device) {
    const struct dry_gpu *gpu = &dry.gpu[device];
    uint64_t small = (arena[device].small + BLOCK - 1) / BLOCK * BLOCK;
    uint64_t used = arena[device].used + small + gpu->context_memory;
    return used < gpu->memory ? gpu->memory - used : 0;
}

bool dry_take(int device, size_t bytes) {
    size_t whole = (bytes + BLOCK - 1) / BLOCK * BLOCK;
    if (bytes <= LARGEST_SHARED) {
        uint64_t room = (arena[device].small + BLOCK - 1) / BLOCK * BLOCK - arena[device].small;
        if (bytes > room && available(device) < BLOCK) {
            return false;
        }
        arena[device].small += bytes;
        return true;
    }
    if (whole < bytes || available(device) < whole) {
        return false;
    }
    arena[device].used += whole;
    return true;
}

void dry_give(int device, size_t bytes) {
    if (bytes <= LARGEST_SHARED) {
        arena[device].small -= bytes;
    } else {
        arena[device].used -= (bytes + BLOCK - 1) / BLOCK * BLOCK;
    }
}

void dry_memory_info(int device, size_t *free, size_t *total) {
    *free = available(device);
    *total = dry.gpu[device].memory;
}

/* First fit in the device's address space; 0 where nothing fits. */
static uintptr_t place_in_arena(int device, size_t bytes) {
    if (!arena[device].start) {
        /* Twice the memory, so that holes between allocations never use up the addresses before the memory. */
        arena[device].bytes = 2 * dry.gpu[device].memory + BLOCK;
        arena[device].start = dry_reserve(arena[device].bytes, BLOCK);
        if (!arena[device].start) {
            arena[device].bytes = 0;
            return 0;
        }
    }
    size_t align = bytes <= LARGEST_SHARED ? ALIGNMENT : BLOCK;
    uintptr_t start = arena[device].start, end = start + arena[device].bytes;
    for (size_t next = above(start); start + bytes <= end; next++) {
        if (next > 0 && ranges[next - 1].start + ranges[next - 1].bytes > start) {
            start = (ranges[next - 1].start + ranges[next - 1].bytes + align - 1) & ~(align - 1);
        }
        if (next >= range_count || ranges[next].start >= start + bytes) {
            break;
        }
    }
    return start + bytes <= end ? start : 0;
}

int dry_malloc(void **pointer, size_t bytes) {
    int device = dry_thread.device;
    if (!pointer) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaMalloc: nowhere to put the address");
    }
    if (dry.devices == 0) {
        return dry_refuse(CUDA_ERROR_NO_DEVICE, "cudaMalloc: there is no device");
    }
    *pointer = NULL;
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    size_t whole = bytes < SIZE_MAX - ALIGNMENT ? (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1) : bytes;
    if (!dry_take(device, whole)) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cudaMalloc: %zu bytes do not fit in device %d (%s): %" PRIu64 " of %" PRIu64
                          " bytes are free", bytes, device, dry.gpu[device].name, available(device), dry.gpu[device].memory);
    }
    uintptr_t start = place_in_arena(device, whole);
    if (!start) {
        dry_give(device, whole);
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cudaMalloc: this process has no address space for %zu bytes", bytes);
    }
    struct dry_range range = {.start = start, .bytes = bytes, .kind = DRY_DEVICE, .device = device};
    int code = dry_add_range(&range);
    if (code) {
        dry_give(device, whole);
        return code;
    }
    *pointer = (void *)start;
    return CUDA_SUCCESS;
}

static int host_memory(void **pointer, size_t bytes, enum dry_memory kind, const char *call) {
    if (!pointer) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: nowhere to put the address", call);
    }
    if (dry.devices == 0) {
        return dry_refuse(CUDA_ERROR_NO_DEVICE, "%s: there is no device", call);
    }
    *pointer = NULL;
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    void *place = bytes > SIZE_MAX / 2 ? MAP_FAILED
                                       : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "%s: the machine has no %zu bytes", call, bytes);
    }
    struct dry_range range = {.start = (uintptr_t)place, .bytes = bytes, .kind = kind, .device = dry_thread.device};
    int code = dry_add_range(&range);
    if (code) {
        munmap(place, bytes);
        return code;
    }
    *pointer = place;
    return CUDA_SUCCESS;
}

int dry_malloc_managed(void **pointer, size_t bytes) {
    return host_memory(pointer, bytes, DRY_MANAGED, "cudaMallocManaged");
}

int dry_malloc_host(void **pointer, size_t bytes) {
    return host_memory(pointer, bytes, DRY_PINNED, "cudaMallocHost");
}

/* The range that starts at an address and is of one of two kinds, for a call that ends it. */
static int range_to_free(void *pointer, enum dry_memory kind, enum dry_memory other, const char *call, struct dry_range **found) {
    uintptr_t address = (uintptr_t)pointer;
    struct dry_range *range = dry_range_of(address);
    if (!range) {
        char text[256];
        dry_describe_address(address, text, sizeof text);
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %s", call, text);
    }
    if (range->kind != kind && range->kind != other) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %p is %s of %zu bytes, which another call frees", call, pointer,
                          kind_names[range->kind], range->bytes);
    }
    if (range->start != address) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %p is byte %zu of %s of %zu bytes, not its start", call, pointer,
                          (size_t)(address - range->start), kind_names[range->kind], range->bytes);
    }
    *found = range;
    return CUDA_SUCCESS;
}

int dry_free(void *pointer) {
    struct dry_range *range;
    if (!pointer) {
        return CUDA_SUCCESS;
    }
    int code = range_to_free(pointer, DRY_DEVICE, DRY_MANAGED, "cudaFree", &range);
    if (code) {
        return code;
    }
    if (range->kind == DRY_DEVICE) {
        dry_give(range->device, (range->bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1));
    } else {
        munmap(pointer, range->bytes);
    }
    dry_remove_range(range);
    return CUDA_SUCCESS;
}

int dry_free_host(void *pointer) {
    struct dry_range *range;
    if (!pointer) {
        return CUDA_SUCCESS;
    }
    int code = range_to_free(pointer, DRY_PINNED, DRY_PINNED, "cudaFreeHost", &range);
    if (code) {
        return code;
    }
    munmap(pointer, range->bytes);
    dry_remove_range(range);
    return CUDA_SUCCESS;
}

int dry_host_register(void *pointer, size_t bytes) {
    uintptr_t start = (uintptr_t)pointer;
    const struct dry_range *there = dry_range_of(start);
    if (!pointer || bytes == 0 || start + bytes < start || (there && there->kind != DRY_REGISTERED)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaHostRegister: %zu bytes at %p%s%s", bytes, pointer, there ? ", which is " : "",
                          there ? kind_names[there->kind] : "");
    }
    if (dry_overlaps(start, bytes)) {
        return dry_refuse(DRY_ALREADY_REGISTERED, "cudaHostRegister: part of the %zu bytes at %p is known to CUDA already", bytes,
                          pointer);
    }
    struct dry_range range = {.start = start, .bytes = bytes, .kind = DRY_REGISTERED, .device = dry_thread.device};
    return dry_add_range(&range);
}

int dry_host_unregister(void *pointer) {
    struct dry_range *range = dry_range_of((uintptr_t)pointer);
    if (!range || range->kind != DRY_REGISTERED || range->start != (uintptr_t)pointer) {
        /* Measured: the first code where CUDA knows the memory, but not like this. */
        return dry_refuse(range ? CUDA_ERROR_INVALID_VALUE : DRY_NOT_REGISTERED, "cudaHostUnregister: nothing was registered at %p",
                          pointer);
    }
    dry_remove_range(range);
    return CUDA_SUCCESS;
}

int dry_host_device_pointer(void **device, void *host) {
    struct dry_range *range = dry_range_of((uintptr_t)host);
    if (!device || !range || (range->kind != DRY_PINNED && range->kind != DRY_REGISTERED)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaHostGetDevicePointer: %p is neither pinned nor registered", host);
    }
    *device = host;
    return CUDA_SUCCESS;
}
