/* Virtual memory management: addresses, memory and the mapping of one to the other, as ggml's memory pool uses them. */
#include "dry.h"

#include <stdlib.h>
#include <sys/mman.h>

#define GRANULARITY ((size_t)2 << 20)

struct reservation {
    uintptr_t start;
    size_t bytes;
    struct reservation *next;
};

struct handle {
    int device;
    size_t bytes;
    unsigned users; /* its owner and its mappings */
    bool released;
    struct handle *next;
};

static struct reservation *reservations;
static struct handle *handles;

int dry_granularity(size_t *granularity, const struct cuda_allocation_properties *properties) {
    /* Measured: any number of a device will do. */
    if (!granularity || !properties || properties->location.type != 1) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemGetAllocationGranularity: not memory of a device");
    }
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

int dry_address_reserve(uint64_t *address, size_t bytes, size_t alignment) {
    if (!address || bytes == 0 || bytes % GRANULARITY || alignment & (alignment - 1)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressReserve: %zu bytes are no multiple of %zu", bytes, GRANULARITY);
    }
    struct reservation *reservation = calloc(1, sizeof *reservation);
    uintptr_t start = reservation ? dry_reserve(bytes, alignment > GRANULARITY ? alignment : GRANULARITY) : 0;
    if (!start) {
        free(reservation);
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAddressReserve: this process has no address space for %zu bytes", bytes);
    }
    *reservation = (struct reservation){start, bytes, reservations};
    reservations = reservation;
    *address = start;
    return CUDA_SUCCESS;
}

int dry_address_free(uint64_t address, size_t bytes) {
    for (struct reservation **place = &reservations; *place; place = &(*place)->next) {
        struct reservation *reservation = *place;
        if (reservation->start == address && reservation->bytes == bytes) {
            if (dry_overlaps(reservation->start, reservation->bytes)) {
                break;
            }
            munmap((void *)reservation->start, reservation->bytes);
            *place = reservation->next;
            free(reservation);
            return CUDA_SUCCESS;
        }
    }
    return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressFree: %zu bytes at %#llx are not one whole reservation without mappings",
                      bytes, (unsigned long long)address);
}

static const struct reservation *reservation_of(uint64_t address) {
    const struct reservation *reservation = reservations;
    while (reservation && address - reservation->start >= reservation->bytes) {
        reservation = reservation->next;
    }
    return reservation;
}

static struct handle *find(uint64_t number) {
    struct handle *handle = handles;
    while (handle && ((uintptr_t)handle != number || handle->released)) {
        handle = handle->next;
    }
    return handle;
}

static void drop(struct handle *handle) {
    if (--handle->users) {
        return;
    }
    struct handle **place = &handles;
    while (*place != handle) {
        place = &(*place)->next;
    }
    *place = handle->next;
    dry_give(handle->device, handle->bytes);
    free(handle);
}

int dry_memory_create(uint64_t *number, size_t bytes, const struct cuda_allocation_properties *properties) {
    size_t granularity;
    int code = dry_granularity(&granularity, properties);
    if (code) {
        return code;
    }
    int device = properties->location.id;
    if (device < 0 || device >= dry.devices) {
        return dry_refuse(CUDA_ERROR_INVALID_DEVICE, "cuMemCreate: there is no device %d", device);
    }
    if (!number || bytes == 0 || bytes % GRANULARITY) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemCreate: %zu bytes are no multiple of %zu", bytes, GRANULARITY);
    }
    struct handle *handle = calloc(1, sizeof *handle);
    if (!handle || !dry_take(device, bytes)) {
        size_t left, total;
        free(handle);
        dry_memory_info(device, &left, &total);
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate: %zu bytes do not fit in device %d (%s): %zu of %zu bytes are free",
                          bytes, device, dry.gpu[device].name, left, total);
    }
    *handle = (struct handle){.device = device, .bytes = bytes, .users = 1, .next = handles};
    handles = handle;
    *number = (uintptr_t)handle;
    return CUDA_SUCCESS;
}

int dry_memory_release(uint64_t number) {
    struct handle *handle = find(number);
    if (!handle) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemRelease: %#llx is not memory of cuMemCreate",
                          (unsigned long long)number);
    }
    handle->released = true;
    drop(handle);
    return CUDA_SUCCESS;
}

int dry_memory_map(uint64_t address, size_t bytes, size_t offset, uint64_t number) {
    struct handle *handle = find(number);
    const struct reservation *reservation = reservation_of(address);
    if (!handle || offset || bytes != handle->bytes) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: %zu bytes at offset %zu of memory of %zu bytes", bytes, offset,
                          handle ? handle->bytes : 0);
    }
    if (!reservation || bytes > reservation->bytes - (address - reservation->start) || address % GRANULARITY) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: %zu bytes at %#llx are not inside a reservation of %zu bytes", bytes,
                          (unsigned long long)address, reservation ? reservation->bytes : 0);
    }
    if (dry_overlaps(address, bytes)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: something is mapped in the %zu bytes at %#llx already", bytes,
                          (unsigned long long)address);
    }
    struct dry_range range = {.start = address, .bytes = bytes, .kind = DRY_VIRTUAL, .device = handle->device, .handle = handle};
    int code = dry_add_range(&range);
    if (!code) {
        handle->users++;
    }
    return code;
}

/* Whether the mappings in a range fill it exactly. */
static bool mapped(uint64_t address, size_t bytes) {
    uint64_t at = address;
    while (at < address + bytes) {
        const struct dry_range *range = dry_range_of(at);
        if (!range || range->kind != DRY_VIRTUAL || range->start != at || range->bytes > address + bytes - at) {
            return false;
        }
        at += range->bytes;
    }
    return bytes > 0;
}

int dry_memory_unmap(uint64_t address, size_t bytes) {
    /* Measured: where nothing is mapped there is nothing to complain of. */
    if (reservation_of(address) && bytes % GRANULARITY == 0 && !dry_overlaps(address, bytes)) {
        return CUDA_SUCCESS;
    }
    if (!mapped(address, bytes)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemUnmap: %zu bytes at %#llx are not whole mappings", bytes,
                          (unsigned long long)address);
    }
    for (uint64_t at = address; at < address + bytes;) {
        struct dry_range *range = dry_range_of(at);
        at += range->bytes;
        drop(range->handle);
        dry_remove_range(range);
    }
    return CUDA_SUCCESS;
}

int dry_memory_access(uint64_t address, size_t bytes, const struct cuda_memory_access *access, size_t count) {
    if (!mapped(address, bytes)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cuMemSetAccess: %zu bytes at %#llx are not whole mappings", bytes,
                          (unsigned long long)address);
    }
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != 1 || access[i].location.id < 0 || access[i].location.id >= dry.devices) {
            return dry_refuse(CUDA_ERROR_INVALID_DEVICE, "cuMemSetAccess: there is no device %d", access[i].location.id);
        }
    }
    for (uint64_t at = address; at < address + bytes;) {
        struct dry_range *range = dry_range_of(at);
        at += range->bytes;
        for (size_t i = 0; i < count; i++) {
            if (access[i].location.id == range->device) {
                range->accessible = access[i].flags != 0;
            }
        }
    }
    return CUDA_SUCCESS;
}
