/* libcudart: memory, copies and sets. */
#include "dry.h"

#define SAFELY(call_name, call) (dry_unsafe_call(call_name) ? CUDA_ERROR_CAPTURE_UNSUPPORTED : (call))

DRY_API int cudaMalloc(void **pointer, size_t bytes) {
    RUN(SAFELY("cudaMalloc", dry_malloc(pointer, bytes)));
}

DRY_API int cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    RUN(SAFELY("cudaMallocManaged", dry_malloc_managed(pointer, bytes)));
}

DRY_API int cudaMallocHost(void **pointer, size_t bytes) {
    RUN(SAFELY("cudaMallocHost", dry_malloc_host(pointer, bytes)));
}

DRY_API int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    RUN(SAFELY("cudaHostAlloc", dry_malloc_host(pointer, bytes)));
}

DRY_API int cudaFree(void *pointer) {
    RUN(SAFELY("cudaFree", dry_free(pointer)));
}

DRY_API int cudaFreeHost(void *pointer) {
    RUN(SAFELY("cudaFreeHost", dry_free_host(pointer)));
}

DRY_API int cudaMallocAsync(void **pointer, size_t bytes, void *stream) {
    RUN(dry_stream(stream) ? dry_malloc(pointer, bytes) : CUDA_ERROR_INVALID_HANDLE);
}

DRY_API int cudaFreeAsync(void *pointer, void *stream) {
    RUN(dry_stream(stream) ? dry_free(pointer) : CUDA_ERROR_INVALID_HANDLE);
}

DRY_API int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    RUN(SAFELY("cudaHostRegister", dry_host_register(pointer, bytes)));
}

DRY_API int cudaHostUnregister(void *pointer) {
    RUN(SAFELY("cudaHostUnregister", dry_host_unregister(pointer)));
}

DRY_API int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    (void)flags;
    RUN(dry_host_device_pointer(device, host));
}

static int memory_info(size_t *free, size_t *total) {
    if (dry.devices == 0) {
        return dry_refuse(CUDA_ERROR_NO_DEVICE, "cudaMemGetInfo: there is no device");
    }
    dry_memory_info(dry_thread.device, free, total);
    return CUDA_SUCCESS;
}

DRY_API int cudaMemGetInfo(size_t *free, size_t *total) {
    RUN(memory_info(free, total));
}

struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
};

static int pointer_attributes(struct pointer_attributes *attributes, const void *pointer) {
    static const int types[] = {[DRY_DEVICE] = 2, [DRY_MANAGED] = 3, [DRY_PINNED] = 1, [DRY_REGISTERED] = 1, [DRY_VIRTUAL] = 2};
    const struct dry_range *range = dry_range_of((uintptr_t)pointer);
    int type = range ? types[range->kind] : 0;
    *attributes = (struct pointer_attributes){
        .type = type,
        .device = range ? range->device : -2, /* measured: memory that CUDA does not know */
        .device_pointer = range ? (void *)pointer : NULL,
        .host_pointer = type == 2 ? NULL : (void *)pointer,
    };
    return CUDA_SUCCESS;
}

DRY_API int cudaPointerGetAttributes(struct pointer_attributes *attributes, const void *pointer) {
    RUN(pointer_attributes(attributes, pointer));
}

/* Both versions pass where in registers that nothing here reads. */
DRY_API int cudaMemAdvise(const void *pointer, size_t bytes, int advice, uint64_t location) {
    (void)advice, (void)location, (void)bytes;
    RUN(dry_range_of((uintptr_t)pointer) ? CUDA_SUCCESS : dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaMemAdvise: %p", pointer));
}

/* ---- copies */

static int plain_copy(const char *call, void *to, const void *from, size_t bytes, int direction, bool waits, void *stream) {
    return dry_copy(&(struct dry_copy){call, to, from, bytes, bytes, bytes, 1, direction, waits}, stream);
}

DRY_API int cudaMemcpy(void *to, const void *from, size_t bytes, int direction) {
    RUN(plain_copy("cudaMemcpy", to, from, bytes, direction, true, NULL));
}

DRY_API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, void *stream) {
    RUN(plain_copy("cudaMemcpyAsync", to, from, bytes, direction, false, stream));
}

DRY_API int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         int direction) {
    RUN(dry_copy(&(struct dry_copy){"cudaMemcpy2D", to, from, to_pitch, from_pitch, width, height, direction, true}, NULL));
}

DRY_API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              int direction, void *stream) {
    RUN(dry_copy(&(struct dry_copy){"cudaMemcpy2DAsync", to, from, to_pitch, from_pitch, width, height, direction, false}, stream));
}

static int peer_copy(const char *call, void *to, int to_device, const void *from, int from_device, size_t bytes, bool waits,
                     void *stream) {
    int unused, code = dry_attribute(CUDA_DEVICE_MAJOR, to_device, &unused);
    if (!code) {
        code = dry_attribute(CUDA_DEVICE_MAJOR, from_device, &unused);
    }
    return code ? code : plain_copy(call, to, from, bytes, CUDA_COPY_DEVICE_TO_DEVICE, waits, stream);
}

DRY_API int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    RUN(peer_copy("cudaMemcpyPeer", to, to_device, from, from_device, bytes, true, NULL));
}

DRY_API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
    RUN(peer_copy("cudaMemcpyPeerAsync", to, to_device, from, from_device, bytes, false, stream));
}

/* cudaMemcpy3DPeerParms, of which ggml uses the pointers and not the arrays. */
struct copy_3d {
    void *from_array;
    size_t from_position[3];
    struct {
        char *pointer;
        size_t pitch, width, height;
    } from;
    int from_device;
    void *to_array;
    size_t to_position[3];
    struct {
        char *pointer;
        size_t pitch, width, height;
    } to;
    int to_device;
    size_t width, height, depth;
};

static int copy_3d(const struct copy_3d *copy, void *stream) {
    if (copy->from_array || copy->to_array) {
        return dry_refuse(CUDA_ERROR_NOT_SUPPORTED, "cudaMemcpy3DPeerAsync: the dry device has no arrays");
    }
    int code = CUDA_SUCCESS;
    for (size_t z = 0; z < copy->depth && !code; z++) {
        struct dry_copy slice = {
            .call = "cudaMemcpy3DPeerAsync",
            .destination = copy->to.pointer + copy->to_position[0] + (copy->to_position[1] + (copy->to_position[2] + z) * copy->to.height) * copy->to.pitch,
            .source = copy->from.pointer + copy->from_position[0] + (copy->from_position[1] + (copy->from_position[2] + z) * copy->from.height) * copy->from.pitch,
            .destination_pitch = copy->to.pitch,
            .source_pitch = copy->from.pitch,
            .width = copy->width,
            .height = copy->height,
            .direction = CUDA_COPY_DEVICE_TO_DEVICE,
        };
        code = dry_copy(&slice, stream);
    }
    return code;
}

DRY_API int cudaMemcpy3DPeerAsync(const struct copy_3d *copy, void *stream) {
    RUN(copy_3d(copy, stream));
}

static int symbol_copy(const char *call, void *other, const void *symbol, size_t bytes, size_t offset, int direction, bool waits,
                       void *stream) {
    char *address = NULL;
    void *place;
    int code = dry_symbol(symbol, &place, NULL);
    if (code) {
        return code;
    }
    address = (char *)place + offset;
    return direction == CUDA_COPY_HOST_TO_DEVICE ? plain_copy(call, address, other, bytes, direction, waits, stream)
                                                 : plain_copy(call, other, address, bytes, direction, waits, stream);
}

DRY_API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int direction) {
    (void)direction;
    RUN(symbol_copy("cudaMemcpyToSymbol", (void *)from, symbol, bytes, offset, CUDA_COPY_HOST_TO_DEVICE, true, NULL));
}

DRY_API int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, int direction) {
    (void)direction;
    RUN(symbol_copy("cudaMemcpyFromSymbol", to, symbol, bytes, offset, CUDA_COPY_DEVICE_TO_HOST, true, NULL));
}

DRY_API int cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t bytes, size_t offset, int direction, void *stream) {
    (void)direction;
    RUN(symbol_copy("cudaMemcpyToSymbolAsync", (void *)from, symbol, bytes, offset, CUDA_COPY_HOST_TO_DEVICE, false, stream));
}

DRY_API int cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t bytes, size_t offset, int direction, void *stream) {
    (void)direction;
    RUN(symbol_copy("cudaMemcpyFromSymbolAsync", to, symbol, bytes, offset, CUDA_COPY_DEVICE_TO_HOST, false, stream));
}

DRY_API int cudaGetSymbolAddress(void **address, const void *symbol) {
    RUN(dry_symbol(symbol, address, NULL));
}

DRY_API int cudaGetSymbolSize(size_t *bytes, const void *symbol) {
    RUN(dry_symbol(symbol, NULL, bytes));
}

DRY_API int cudaMemset(void *pointer, int value, size_t bytes) {
    RUN(dry_set("cudaMemset", pointer, bytes, value, bytes, 1, NULL));
}

DRY_API int cudaMemsetAsync(void *pointer, int value, size_t bytes, void *stream) {
    RUN(dry_set("cudaMemsetAsync", pointer, bytes, value, bytes, 1, stream));
}

DRY_API int cudaMemset2D(void *pointer, size_t pitch, int value, size_t width, size_t height) {
    RUN(dry_set("cudaMemset2D", pointer, pitch, value, width, height, NULL));
}

DRY_API int cudaMemset2DAsync(void *pointer, size_t pitch, int value, size_t width, size_t height, void *stream) {
    RUN(dry_set("cudaMemset2DAsync", pointer, pitch, value, width, height, stream));
}
