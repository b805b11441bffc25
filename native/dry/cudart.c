/* libcudart.so.12 and .13: the entry points of the CUDA runtime that ggml-cuda imports, and those that tools around it use.
 * Here registration, errors, devices and kernels; the rest is in cudart_memory.c and cudart_stream.c.
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
