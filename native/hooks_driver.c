/* Hooks of the driver's virtual memory calls: how ggml's memory pool grows. */
#include "hooks.h"

static void mapped(struct isolate_call *call, uint64_t pointer, size_t bytes) {
    call->record.detail.copy.destination = pointer;
    call->record.detail.copy.bytes = bytes;
    call->record.detail.copy.direction = -1;
}

static void asked(struct isolate_call *call, int64_t first, int64_t second) {
    call->record.detail.words[0] = (uint64_t)first;
    call->record.detail.words[1] = (uint64_t)second;
}

static void reserved(struct isolate_call *call, const uint64_t *pointer, int code) {
    call->record.detail.copy.destination = code ? 0 : *pointer;
}

/* ggml keeps a pool per device by virtual memory where there is any; without, each buffer is a cudaMalloc of its own. */
static void hide_virtual_memory(int *value, int attribute, int code) {
    uint32_t modes = ISOLATE_MODE_NO_VMM | ISOLATE_MODE_FENCE | ISOLATE_MODE_FENCE_BEFORE;
    if (!code && attribute == CUDA_DEVICE_VIRTUAL_MEMORY && atomic_load(&isolate_mode) & modes) {
        *value = 0;
    }
}

static void poison_mapped(uint64_t pointer, size_t bytes, int code) {
    if (!code) {
        isolate_poison((void *)(uintptr_t)pointer, bytes);
    }
}

QUIET_HOOK(cuDeviceGet, (int *device, int ordinal), (device, ordinal), ISOLATE_QUERY, asked(&call, ordinal, 0))
HOOK(cuDeviceGetAttribute, (int *value, int attribute, int device), (value, attribute, device), ISOLATE_QUERY, 0,
     asked(&call, attribute, device), hide_virtual_memory(value, attribute, code))
HOOK(cuMemGetAllocationGranularity, (size_t *bytes, const void *properties, int option), (bytes, properties, option),
     ISOLATE_QUERY, 0, NOTHING, NOTHING)
HOOK(cuMemCreate, (uint64_t *handle, size_t bytes, const void *properties, unsigned long long flags),
     (handle, bytes, properties, flags), ISOLATE_MEMORY, 0, mapped(&call, 0, bytes), NOTHING)
HOOK(cuMemRelease, (uint64_t handle), (handle), ISOLATE_MEMORY, 0, mapped(&call, 0, 0), NOTHING)
HOOK(cuMemAddressReserve, (uint64_t *pointer, size_t bytes, size_t alignment, uint64_t wish, unsigned long long flags),
     (pointer, bytes, alignment, wish, flags), ISOLATE_MEMORY, 0, mapped(&call, 0, bytes),
     reserved(&call, pointer, code))
HOOK(cuMemAddressFree, (uint64_t pointer, size_t bytes), (pointer, bytes), ISOLATE_MEMORY, 0,
     mapped(&call, pointer, bytes), NOTHING)
HOOK(cuMemMap, (uint64_t pointer, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags),
     (pointer, bytes, offset, handle, flags), ISOLATE_MEMORY, 0, mapped(&call, pointer, bytes),
     code ? NOTHING : isolate_count_allocation(pointer, bytes))
HOOK(cuMemUnmap, (uint64_t pointer, size_t bytes), (pointer, bytes), ISOLATE_MEMORY, 0, mapped(&call, pointer, bytes),
     code ? NOTHING : isolate_count_release(pointer, bytes))
HOOK(cuMemSetAccess, (uint64_t pointer, size_t bytes, const void *access, size_t count),
     (pointer, bytes, access, count), ISOLATE_MEMORY, 0, mapped(&call, pointer, bytes),
     poison_mapped(pointer, bytes, code))
