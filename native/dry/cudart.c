/* libcudart.so.12 and .13: the entry points of the CUDA runtime that ggml-cuda imports, and those that tools around it use.
 *
 * Compiled once for each major version, which differ in cudaDeviceProp and in a few names. */
#define _GNU_SOURCE
#include "dry.h"
#include "properties.h"

#include <stdio.h>
#include <string.h>

/* For calls that a broken device does not keep from working (measured). */
#define RUN_ANYWAY(call)                                                                                       \
    do {                                                                                                        \
        int code_ = dry_enter();                                                                                \
        (void)code_;                                                                                            \
        return dry_leave(call);                                                                                 \
    } while (0)

/* ---- registration, called by what nvcc adds to a program */

DRY_API void **__cudaRegisterFatBinary(void *wrapper) {
    return dry_register_binary(wrapper);
}

DRY_API void __cudaRegisterFatBinaryEnd(void **handle) {
    (void)handle;
}

DRY_API void __cudaUnregisterFatBinary(void **handle) {
    dry_unregister_binary(handle);
}

DRY_API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread,
                                    void *block, void *block_dim, void *grid_dim, int *warp) {
    (void)device, (void)limit, (void)thread, (void)block, (void)block_dim, (void)grid_dim, (void)warp;
    dry_register_function(handle, host, name);
}

DRY_API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                               int constant, int global) {
    (void)device, (void)external, (void)constant, (void)global;
    dry_register_variable(handle, host, name, bytes);
}

DRY_API char __cudaInitModule(void **handle) {
    (void)handle;
    return 0;
}

static _Thread_local struct {
    struct cuda_dim grid, block;
    size_t shared;
    void *stream;
} configuration;

DRY_API unsigned __cudaPushCallConfiguration(struct cuda_dim grid, struct cuda_dim block, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

DRY_API int __cudaPopCallConfiguration(struct cuda_dim *grid, struct cuda_dim *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return CUDA_SUCCESS;
}

/* A handle is the host function itself. */
DRY_API int __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return CUDA_SUCCESS;
}

/* ---- errors */

DRY_API int cudaGetLastError(void) {
    return dry_last_error(true);
}

DRY_API int cudaPeekAtLastError(void) {
    return dry_last_error(false);
}

DRY_API const char *cudaGetErrorName(int code) {
    return dry_error_name(code);
}

DRY_API const char *cudaGetErrorString(int code) {
    return dry_error_text(code);
}

/* ---- devices */

DRY_API int cudaRuntimeGetVersion(int *version) {
    *version = CUDART_MAJOR * 1000;
    return CUDA_SUCCESS;
}

DRY_API int cudaDriverGetVersion(int *version) {
    dry_configured();
    *version = dry.driver_version;
    return CUDA_SUCCESS;
}

DRY_API int cudaGetDeviceCount(int *count) {
    dry_configured();
    *count = dry.devices;
    RUN_ANYWAY(dry.devices ? CUDA_SUCCESS : dry_refuse(CUDA_ERROR_NO_DEVICE, "there is no device"));
}

DRY_API int cudaGetDevice(int *device) {
    *device = dry_thread.device;
    return CUDA_SUCCESS;
}

DRY_API int cudaSetDevice(int device) {
    RUN_ANYWAY(dry_set_device(device));
}

DRY_API int cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
    (void)device_flags, (void)flags;
    RUN(dry_set_device(device));
}

DRY_API int cudaSetDeviceFlags(unsigned flags) {
    (void)flags;
    RUN(CUDA_SUCCESS);
}

DRY_API int cudaGetDeviceFlags(unsigned *flags) {
    *flags = 0;
    RUN(CUDA_SUCCESS);
}

DRY_API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    RUN_ANYWAY(dry_attribute(attribute, device, value));
}

static int attribute(int number, int device) {
    int value = 0;
    dry_attribute(number, device, &value);
    return value;
}

static int properties_of(struct cuda_properties *properties, int device) {
    int code, unused;
    if ((code = dry_attribute(CUDA_DEVICE_MAJOR, device, &unused))) {
        return code;
    }
    const struct dry_gpu *gpu = &dry.gpu[device];
    *properties = (struct cuda_properties){
        .memory = gpu->memory,
        .shared_per_block = gpu->shared_per_block,
        .registers_per_block = gpu->registers_per_block,
        .warp = 32,
        .pitch = 2147483647,
        .threads_per_block = 1024,
        .block = {1024, 1024, 64},
        .grid = {2147483647, 65535, 65535},
        .constant = 65536,
        .major = gpu->capability / 10,
        .minor = gpu->capability % 10,
        .texture_alignment = 512,
        .texture_pitch_alignment = 32,
        .processors = gpu->processors,
        .integrated = gpu->integrated,
        .maps_host_memory = 1,
        .surface_alignment = 512,
        .concurrent_kernels = 1,
        .pci_bus = attribute(33, device),
        .copy_engines = attribute(40, device),
        .unified_addressing = 1,
        .threads_per_processor = gpu->threads_per_processor,
        .stream_priorities = 1,
        .global_cache = 1,
        .local_cache = 1,
        .shared_per_processor = gpu->shared_per_processor,
        .registers_per_processor = gpu->registers_per_processor,
        .managed_memory = 1,
        .concurrent_managed_access = 1,
        .preemption = 1,
        .registered_host_pointer = 1,
        .cooperative_launch = 1,
        .shared_per_block_optin = gpu->shared_per_block_optin,
        .blocks_per_processor = gpu->blocks_per_processor,
        .shared_reserved = gpu->shared_reserved,
        .host_register = 1,
        .memory_pools = 1,
        .cluster_launch = gpu->cluster_launch,
#if CUDART_MAJOR == 12
        .overlap = 1,
#endif
    };
    memcpy(properties->name, gpu->name, sizeof properties->name);
    properties->uuid[0] = (char)(device + 1);
    return CUDA_SUCCESS;
}

#if CUDART_MAJOR == 12
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#endif
DRY_API int cudaGetDeviceProperties(struct cuda_properties *properties, int device) {
    RUN(properties_of(properties, device));
}

static int bus_id(char *text, int bytes, int device) {
    int bus, code = dry_attribute(33, device, &bus);
    if (!code && snprintf(text, (size_t)bytes, "00000000:%02X:00.0", bus) >= bytes) {
        code = dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaDeviceGetPCIBusId: %d bytes are too few", bytes);
    }
    return code;
}

DRY_API int cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    RUN(bus_id(text, bytes, device));
}

DRY_API int cudaDeviceSynchronize(void) {
    RUN(dry_device_synchronize());
}

DRY_API int cudaDeviceReset(void) {
    RUN(CUDA_SUCCESS);
}

DRY_API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    RUN_ANYWAY(dry_can_access_peer(can, device, peer));
}

DRY_API int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    RUN(dry_enable_peer(peer, flags));
}

DRY_API int cudaDeviceDisablePeerAccess(int peer) {
    RUN(dry_disable_peer(peer));
}

static int priorities(int *least, int *greatest) {
    *least = 0;
    *greatest = -5; /* measured */
    return CUDA_SUCCESS;
}

DRY_API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    RUN(priorities(least, greatest));
}

/* ---- memory */

#define SAFELY(call_name, call) (dry_unsafe_call(call_name) ? CUDA_ERROR_CAPTURE_UNSUPPORTED : (call))

DRY_API int cudaMalloc(void **pointer, size_t bytes) {
    RUN(SAFELY("cudaMalloc", dry_malloc(pointer, bytes)));
}

DRY_API int cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    RUN(SAFELY("cudaMallocManaged", dry_malloc_managed(pointer, bytes)));
}

DRY_API int cudaMallocHost(void **pointer, size_t bytes) {
    RUN(SAFELY("cudaMallocHost", dry_malloc_host(pointer, bytes, 0)));
}

DRY_API int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    RUN(SAFELY("cudaHostAlloc", dry_malloc_host(pointer, bytes, flags)));
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
    RUN(SAFELY("cudaHostRegister", dry_host_register(pointer, bytes, flags)));
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

/* ---- streams and events */

DRY_API int cudaStreamCreate(void **stream) {
    RUN(dry_stream_create(stream, 0, 0));
}

DRY_API int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    RUN(dry_stream_create(stream, flags, 0));
}

DRY_API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    RUN(dry_stream_create(stream, flags, priority));
}

DRY_API int cudaStreamDestroy(void *stream) {
    RUN(dry_stream_destroy(stream));
}

DRY_API int cudaStreamSynchronize(void *stream) {
    RUN(dry_stream_synchronize(stream));
}

DRY_API int cudaStreamQuery(void *stream) {
    RUN(dry_stream_query(stream));
}

DRY_API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    RUN(dry_stream_wait(stream, event));
}

DRY_API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    RUN(dry_host_function(stream, function, data));
}

DRY_API int cudaStreamBeginCapture(void *stream, int mode) {
    RUN(dry_capture_begin(stream, mode));
}

DRY_API int cudaStreamEndCapture(void *stream, void **graph) {
    RUN(dry_capture_end(stream, graph));
}

DRY_API int cudaStreamIsCapturing(void *stream, int *status) {
    RUN(dry_capture_status(stream, status, NULL, NULL));
}

DRY_API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    RUN(dry_exchange_capture_mode(mode));
}

DRY_API int cudaEventCreate(void **event) {
    RUN(dry_event_create(event, 0));
}

DRY_API int cudaEventCreateWithFlags(void **event, unsigned flags) {
    RUN(dry_event_create(event, flags));
}

DRY_API int cudaEventDestroy(void *event) {
    RUN(dry_event_destroy(event));
}

DRY_API int cudaEventRecord(void *event, void *stream) {
    RUN(dry_event_record(event, stream));
}

DRY_API int cudaEventSynchronize(void *event) {
    RUN(dry_event_synchronize(event));
}

DRY_API int cudaEventQuery(void *event) {
    RUN(dry_event_query(event));
}

DRY_API int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
    RUN(dry_event_elapsed(milliseconds, start, end));
}

/* ---- graphs */

DRY_API int cudaGraphCreate(void **graph, unsigned flags) {
    (void)flags;
    RUN(dry_graph_create(graph));
}

DRY_API int cudaGraphDestroy(void *graph) {
    RUN(dry_graph_destroy(graph));
}

DRY_API int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    RUN(dry_graph_instantiate(executable, graph));
}

DRY_API int cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    RUN(dry_graph_instantiate(executable, graph));
}

DRY_API int cudaGraphExecDestroy(void *executable) {
    RUN(dry_graph_exec_destroy(executable));
}

struct update_result {
    int result;
    void *node, *from;
};

DRY_API int cudaGraphExecUpdate(void *executable, void *graph, struct update_result *result) {
    int unused;
    if (result) {
        *result = (struct update_result){0};
    }
    RUN(dry_graph_update(executable, graph, result ? &result->result : &unused));
}

DRY_API int cudaGraphLaunch(void *executable, void *stream) {
    RUN(dry_graph_launch(executable, stream));
}

/* ---- kernels */

DRY_API int cudaLaunchKernel(const void *function, struct cuda_dim grid, struct cuda_dim block, void **arguments, size_t shared,
                             void *stream) {
    RUN(dry_launch(function, &(struct dry_launch){.arguments = arguments, .grid = grid, .block = block, .shared = shared}, stream));
}

DRY_API int __cudaLaunchKernel(const void *kernel, struct cuda_dim grid, struct cuda_dim block, void **arguments, size_t shared,
                               void *stream) {
    RUN(dry_launch(kernel, &(struct dry_launch){.arguments = arguments, .grid = grid, .block = block, .shared = shared}, stream));
}

DRY_API int cudaLaunchCooperativeKernel(const void *function, struct cuda_dim grid, struct cuda_dim block, void **arguments,
                                        size_t shared, void *stream) {
    RUN(dry_launch(function, &(struct dry_launch){.arguments = arguments, .grid = grid, .block = block, .shared = shared, .cooperative = true}, stream));
}

static int configured_launch(const struct cuda_launch_configuration *asked, const void *function, void **arguments) {
    if (!asked) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaLaunchKernelExC: no configuration");
    }
    struct dry_launch launch = {.arguments = arguments, .grid = asked->grid, .block = asked->block, .shared = asked->shared};
    for (unsigned i = 0; i < asked->attribute_count; i++) {
        if (asked->attributes[i].id == CUDA_LAUNCH_CLUSTER_DIMENSION) {
            launch.cluster = asked->attributes[i].value.cluster;
        } else if (asked->attributes[i].id == CUDA_LAUNCH_COOPERATIVE) {
            int cooperative;
            memcpy(&cooperative, &asked->attributes[i].value, sizeof cooperative);
            launch.cooperative = cooperative != 0;
        }
    }
    return dry_launch(function, &launch, asked->stream);
}

DRY_API int cudaLaunchKernelExC(const struct cuda_launch_configuration *asked, const void *function, void **arguments) {
    RUN(configured_launch(asked, function, arguments));
}

DRY_API int cudaFuncGetAttributes(struct cuda_function_attributes *attributes, const void *function) {
    RUN(dry_function_attributes(attributes, function));
}

DRY_API int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    RUN(dry_set_function_attribute(function, attribute, value));
}

DRY_API int cudaFuncSetCacheConfig(const void *function, int configuration) {
    (void)configuration;
    struct dry_kernel *kernel;
    RUN(dry_kernel(function, dry_thread.device, &kernel));
}

DRY_API int cudaFuncGetName(const char **name, const void *function) {
    RUN(dry_kernel_name(function, name));
}

DRY_API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    RUN(dry_occupancy_of(blocks, function, threads, shared));
}

DRY_API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                                   unsigned flags) {
    (void)flags;
    RUN(dry_occupancy_of(blocks, function, threads, shared));
}
