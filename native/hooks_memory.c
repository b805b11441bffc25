/* Hooks of copies, memsets, allocations and frees. */
#include "hooks.h"

/* cudaMemcpy3DPeerParms */
struct peer_copy {
    void *source_array;
    size_t source_position[3];
    struct {
        void *pointer;
        size_t pitch, width, height;
    } source;
    int source_device;
    void *destination_array;
    size_t destination_position[3];
    struct {
        void *pointer;
        size_t pitch, width, height;
    } destination;
    int destination_device;
    size_t extent[3];
};

static void copied(struct isolate_call *call, const void *destination, const void *source, size_t bytes, int direction,
                   const void *stream) {
    struct isolate_record *record = &call->record;
    record->stream = (uint64_t)(uintptr_t)stream;
    record->detail.copy.bytes = bytes;
    record->detail.copy.destination = (uint64_t)(uintptr_t)destination;
    record->detail.copy.source = (uint64_t)(uintptr_t)source;
    record->detail.copy.direction = direction;
}

static void filled(struct isolate_call *call, const void *destination, int value, size_t bytes, const void *stream) {
    copied(call, destination, NULL, bytes, -1, stream);
    call->record.detail.copy.value = value;
}

static void placed(struct isolate_call *call, void *const *pointer, int code) {
    call->record.detail.copy.destination = code ? 0 : (uint64_t)(uintptr_t)*pointer;
}

static void allocated(struct isolate_call *call, void *const *pointer, int code) {
    placed(call, pointer, code);
    if (!code && *pointer) {
        isolate_count_allocation((uint64_t)(uintptr_t)*pointer, call->record.detail.copy.bytes);
    }
}

static void released(const void *pointer, int code) {
    if (!code && pointer) {
        isolate_count_release((uint64_t)(uintptr_t)pointer, 0);
    }
}

HOOK(cudaMemcpy, (void *to, const void *from, size_t bytes, int direction), (to, from, bytes, direction), ISOLATE_COPY,
     QUEUES, copied(&call, to, from, bytes, direction, NULL), NOTHING)

HOOK(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, int direction, void *stream),
     (to, from, bytes, direction, stream), ISOLATE_COPY, QUEUES, copied(&call, to, from, bytes, direction, stream),
     NOTHING)

HOOK(cudaMemcpy2DAsync,
     (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int direction,
      void *stream),
     (to, to_pitch, from, from_pitch, width, height, direction, stream), ISOLATE_COPY, QUEUES,
     copied(&call, to, from, width * height, direction, stream), NOTHING)

HOOK(cudaMemcpyPeerAsync, (void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream),
     (to, to_device, from, from_device, bytes, stream), ISOLATE_COPY, QUEUES,
     copied(&call, to, from, bytes, CUDA_COPY_DEVICE_TO_DEVICE, stream), NOTHING)

HOOK(cudaMemcpy3DPeerAsync, (const struct peer_copy *copy, void *stream), (copy, stream), ISOLATE_COPY, QUEUES,
     copied(&call, copy->destination.pointer, copy->source.pointer,
            copy->extent[0] * copy->extent[1] * copy->extent[2], CUDA_COPY_DEVICE_TO_DEVICE, stream),
     NOTHING)

HOOK(cudaMemcpyToSymbol, (const void *symbol, const void *from, size_t bytes, size_t offset, int direction),
     (symbol, from, bytes, offset, direction), ISOLATE_COPY, QUEUES, copied(&call, symbol, from, bytes, direction, NULL),
     NOTHING)

HOOK(cudaMemcpyFromSymbol, (void *to, const void *symbol, size_t bytes, size_t offset, int direction),
     (to, symbol, bytes, offset, direction), ISOLATE_COPY, QUEUES, copied(&call, to, symbol, bytes, direction, NULL),
     NOTHING)

HOOK(cudaMemset, (void *to, int value, size_t bytes), (to, value, bytes), ISOLATE_SET, QUEUES,
     filled(&call, to, value, bytes, NULL), NOTHING)

HOOK(cudaMemsetAsync, (void *to, int value, size_t bytes, void *stream), (to, value, bytes, stream), ISOLATE_SET,
     QUEUES, filled(&call, to, value, bytes, stream), NOTHING)

HOOK_AS(cudaMalloc, (void **pointer, size_t bytes), (pointer, bytes), ISOLATE_MEMORY, 0,
        copied(&call, NULL, NULL, bytes, -1, NULL), isolate_allocate(real, pointer, bytes),
        allocated(&call, pointer, code))

HOOK(cudaMallocManaged, (void **pointer, size_t bytes, unsigned flags), (pointer, bytes, flags), ISOLATE_MEMORY, 0,
     copied(&call, NULL, NULL, bytes, -1, NULL), allocated(&call, pointer, code))

HOOK(cudaMallocHost, (void **pointer, size_t bytes), (pointer, bytes), ISOLATE_MEMORY, 0,
     copied(&call, NULL, NULL, bytes, -1, NULL), allocated(&call, pointer, code))

HOOK(cudaHostAlloc, (void **pointer, size_t bytes, unsigned flags), (pointer, bytes, flags), ISOLATE_MEMORY, 0,
     copied(&call, NULL, NULL, bytes, -1, NULL), allocated(&call, pointer, code))

HOOK_AS(cudaFree, (void *pointer), (pointer), ISOLATE_MEMORY, 0, copied(&call, pointer, NULL, 0, -1, NULL),
        isolate_release(real, pointer), released(pointer, code))

HOOK(cudaFreeHost, (void *pointer), (pointer), ISOLATE_MEMORY, 0, copied(&call, pointer, NULL, 0, -1, NULL),
     released(pointer, code))

HOOK(cudaHostRegister, (void *pointer, size_t bytes, unsigned flags), (pointer, bytes, flags), ISOLATE_MEMORY, 0,
     copied(&call, pointer, NULL, bytes, -1, NULL), NOTHING)

HOOK(cudaHostUnregister, (void *pointer), (pointer), ISOLATE_MEMORY, 0, copied(&call, pointer, NULL, 0, -1, NULL),
     NOTHING)

HOOK(cudaHostGetDevicePointer, (void **device, void *host, unsigned flags), (device, host, flags), ISOLATE_MEMORY, 0,
     copied(&call, NULL, host, 0, -1, NULL), placed(&call, device, code))

/* The last parameter is an int in CUDA 12 and a cudaMemLocation, two ints, in CUDA 13: one register either way. */
HOOK(cudaMemAdvise, (const void *pointer, size_t bytes, int advice, uint64_t location),
     (pointer, bytes, advice, location), ISOLATE_MEMORY, 0, copied(&call, pointer, NULL, bytes, -1, NULL), NOTHING)

QUIET_HOOK(cudaMemGetInfo, (size_t *free_bytes, size_t *bytes), (free_bytes, bytes), ISOLATE_QUERY, NOTHING)
