/* Facts of the CUDA ABI that isolate needs, so that no CUDA header is needed to build it.
 *
 * Source: CUDA Runtime, Driver and cuBLAS API references; the same in CUDA 12 and 13. Handles (streams, events, graphs,
 * kernels, cuBLAS contexts) are opaque pointers, every enumeration is an int, a CUdeviceptr is 64 bits. */
#ifndef ISOLATE_CUDA_ABI_H
#define ISOLATE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

/* dim3: passed by value. */
struct cuda_dim {
    unsigned x, y, z;
};

enum cuda_error {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_INVALID_CONFIGURATION = 9,
    CUDA_ERROR_INVALID_DEVICE_FUNCTION = 98,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_NO_KERNEL_IMAGE = 209,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_SYMBOL_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_GRAPH_EXEC_UPDATE = 910,
    CUDA_ERROR_INVALID_CLUSTER_SIZE = 912,
    CUDA_ERROR_UNKNOWN = 999
};

enum cuda_copy {
    CUDA_COPY_HOST_TO_HOST = 0,
    CUDA_COPY_HOST_TO_DEVICE = 1,
    CUDA_COPY_DEVICE_TO_HOST = 2,
    CUDA_COPY_DEVICE_TO_DEVICE = 3,
    CUDA_COPY_DEFAULT = 4
};

/* Of cudaDeviceGetAttribute and cuDeviceGetAttribute alike. */
enum cuda_device_attribute {
    CUDA_DEVICE_MAX_THREADS_PER_BLOCK = 1,
    CUDA_DEVICE_MAX_BLOCK_X = 2,
    CUDA_DEVICE_MAX_BLOCK_Y = 3,
    CUDA_DEVICE_MAX_BLOCK_Z = 4,
    CUDA_DEVICE_MAX_GRID_X = 5,
    CUDA_DEVICE_MAX_GRID_Y = 6,
    CUDA_DEVICE_MAX_GRID_Z = 7,
    CUDA_DEVICE_SHARED_PER_BLOCK = 8,
    CUDA_DEVICE_TOTAL_CONSTANT = 9,
    CUDA_DEVICE_WARP_SIZE = 10,
    CUDA_DEVICE_REGISTERS_PER_BLOCK = 12,
    CUDA_DEVICE_CLOCK_RATE = 13,
    CUDA_DEVICE_PROCESSORS = 16,
    CUDA_DEVICE_INTEGRATED = 18,
    CUDA_DEVICE_L2_CACHE = 38,
    CUDA_DEVICE_THREADS_PER_PROCESSOR = 39,
    CUDA_DEVICE_MAJOR = 75,
    CUDA_DEVICE_MINOR = 76,
    CUDA_DEVICE_SHARED_PER_PROCESSOR = 81,
    CUDA_DEVICE_REGISTERS_PER_PROCESSOR = 82,
    CUDA_DEVICE_COOPERATIVE_LAUNCH = 95,
    CUDA_DEVICE_SHARED_PER_BLOCK_OPTIN = 97,
    CUDA_DEVICE_VIRTUAL_MEMORY = 102,
    CUDA_DEVICE_BLOCKS_PER_PROCESSOR = 106,
    CUDA_DEVICE_SHARED_RESERVED = 111,
    CUDA_DEVICE_CLUSTER_LAUNCH = 120
};

/* cudaFuncAttributes, as far as it has the same meaning since CUDA 11; the whole is never longer than this. */
struct cuda_function_attributes {
    size_t shared, constant, local; /* bytes */
    int max_threads, registers;
    int ptx, binary;                /* 10 * major + minor */
    int cache_mode_ca;
    int max_dynamic_shared;         /* bytes */
    int carveout;
    int cluster_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy;
    char rest[256];
};

enum cuda_function_attribute {
    CUDA_FUNCTION_MAX_DYNAMIC_SHARED = 8,
    CUDA_FUNCTION_CARVEOUT = 9,
    CUDA_FUNCTION_CLUSTER_MUST_BE_SET = 10,
    CUDA_FUNCTION_CLUSTER_WIDTH = 11,
    CUDA_FUNCTION_CLUSTER_HEIGHT = 12,
    CUDA_FUNCTION_CLUSTER_DEPTH = 13,
    CUDA_FUNCTION_NON_PORTABLE_CLUSTER = 14
};

/* cudaLaunchAttribute */
struct cuda_launch_attribute {
    int id;
    int reserved;
    union {
        struct cuda_dim cluster;
        char bytes[64];
    } value;
};

enum cuda_launch_attribute_id {
    CUDA_LAUNCH_COOPERATIVE = 2,
    CUDA_LAUNCH_CLUSTER_DIMENSION = 4,
    CUDA_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6
};

/* cudaLaunchConfig_t */
struct cuda_launch_configuration {
    struct cuda_dim grid, block;
    size_t shared; /* dynamic, bytes */
    void *stream;
    const struct cuda_launch_attribute *attributes;
    unsigned attribute_count;
};

enum cuda_capture_mode {
    CUDA_CAPTURE_GLOBAL = 0,
    CUDA_CAPTURE_THREAD_LOCAL = 1,
    CUDA_CAPTURE_RELAXED = 2
};

enum cuda_capture_status {
    CUDA_CAPTURE_NONE = 0,
    CUDA_CAPTURE_ACTIVE = 1,
    CUDA_CAPTURE_STATUS_INVALIDATED = 2
};

/* CUmemLocation */
struct cuda_memory_location {
    int type; /* 1: a device */
    int id;
};

/* CUmemAllocationProp */
struct cuda_allocation_properties {
    int type; /* 1: pinned */
    int handle_types;
    struct cuda_memory_location location;
    void *meta;
    unsigned char flags[8];
};

/* CUmemAccessDesc */
struct cuda_memory_access {
    struct cuda_memory_location location;
    int flags; /* 3: read and write */
};

_Static_assert(sizeof(struct cuda_dim) == 12, "dim3");
_Static_assert(sizeof(struct cuda_launch_attribute) == 72, "cudaLaunchAttribute");
_Static_assert(sizeof(struct cuda_launch_configuration) == 56, "cudaLaunchConfig_t");
_Static_assert(sizeof(struct cuda_allocation_properties) == 32, "CUmemAllocationProp");
_Static_assert(sizeof(struct cuda_memory_access) == 12, "CUmemAccessDesc");

#endif
