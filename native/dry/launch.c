/* Launches: what the driver refuses before a kernel runs, with the code it gives. */
#include "dry.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PORTABLE_CLUSTER 8u
#define LARGEST_CLUSTER 16u

/* "compute_80" or "sm_90": what a bound was compiled for. */
static const char *compiled(const struct dry_code *code, char text[16]) {
    snprintf(text, 16, "%s_%d", code->from_ptx ? "compute" : "sm", code->from_ptx ? code->ptx : code->binary);
    return text;
}

static uint64_t volume(struct cuda_dim dim) {
    return (uint64_t)dim.x * dim.y * dim.z;
}

static int check_grid(const struct dry_launch *launch, const char *name) {
    struct cuda_dim grid = launch->grid, block = launch->block;
    if (volume(grid) == 0 || volume(block) == 0) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: a dimension is 0: grid (%u,%u,%u), block (%u,%u,%u)", name, grid.x, grid.y,
                          grid.z, block.x, block.y, block.z);
    }
    if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: grid (%u,%u,%u) is over the limit of (2147483647,65535,65535)", name,
                          grid.x, grid.y, grid.z);
    }
    if (block.x > 1024 || block.y > 1024 || block.z > 64) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: block (%u,%u,%u) is over the limit of (1024,1024,64)", name, block.x,
                          block.y, block.z);
    }
    if (volume(block) > 1024) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %" PRIu64 " threads a block, a device can have 1024", name, volume(block));
    }
    return CUDA_SUCCESS;
}

static int check_threads(const struct dry_launch *launch, const struct dry_code *code, const struct dry_gpu *gpu) {
    char text[16];
    uint64_t threads = volume(launch->block);
    if (code->required.x && memcmp(&code->required, &launch->block, sizeof launch->block)) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: block (%u,%u,%u), it must be (%u,%u,%u)", code->name, launch->block.x,
                          launch->block.y, launch->block.z, code->required.x, code->required.y, code->required.z);
    }
    if (code->max_threads && threads > code->max_threads) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %" PRIu64 " threads a block, its launch bound is %u (compiled for %s)",
                          code->name, threads, code->max_threads, compiled(code, text));
    }
    if (threads > dry_most_threads(code, gpu)) {
        return dry_refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                          "%s: %" PRIu64 " threads of %d registers each, a block can have %d registers, which is %u threads",
                          code->name, threads, code->registers, gpu->registers_per_block, dry_most_threads(code, gpu));
    }
    return CUDA_SUCCESS;
}

static int check_shared(const struct dry_launch *launch, int device) {
    const struct dry_kernel *kernel = launch->kernel;
    const struct dry_code *code = kernel->on[device].code;
    const struct dry_gpu *gpu = &dry.gpu[device];
    if (launch->shared > kernel->on[device].max_dynamic_shared) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE,
                          "%s: %zu bytes of dynamic shared memory, %zu are allowed (cudaFuncSetAttribute allows up to %zu on %s)",
                          code->name, launch->shared, kernel->on[device].max_dynamic_shared,
                          gpu->shared_per_block_optin - (code->shared < gpu->shared_per_block_optin ? code->shared : 0), gpu->name);
    }
    if (code->shared + launch->shared > gpu->shared_per_block_optin) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %zu bytes of static and %zu of dynamic shared memory, a block can have %zu",
                          code->name, code->shared, launch->shared, gpu->shared_per_block_optin);
    }
    return CUDA_SUCCESS;
}

static int check_cluster(struct dry_launch *launch, int device) {
    const struct dry_kernel *kernel = launch->kernel;
    const struct dry_code *code = kernel->on[device].code;
    const struct dry_gpu *gpu = &dry.gpu[device];
    struct cuda_dim fixed = code->cluster.x ? code->cluster : kernel->on[device].cluster;
    if (fixed.x && !launch->cluster.x) {
        launch->cluster = fixed;
    }
    struct cuda_dim cluster = launch->cluster;
    if (!cluster.x) {
        return kernel->on[device].cluster_must_be_set
                   ? dry_refuse(CUDA_ERROR_INVALID_CLUSTER_SIZE, "%s: must be launched with a cluster", code->name)
                   : CUDA_SUCCESS;
    }
    if (!gpu->cluster_launch && volume(cluster) != 1) {
        return dry_refuse(CUDA_ERROR_INVALID_CLUSTER_SIZE, "%s: clusters of blocks, which %s does not have", code->name, gpu->name);
    }
    if (code->cluster.x && memcmp(&cluster, &code->cluster, sizeof cluster)) {
        return dry_refuse(CUDA_ERROR_INVALID_CLUSTER_SIZE, "%s: cluster (%u,%u,%u), it was compiled for (%u,%u,%u)", code->name,
                          cluster.x, cluster.y, cluster.z, code->cluster.x, code->cluster.y, code->cluster.z);
    }
    if (volume(cluster) == 0 || launch->grid.x % cluster.x || launch->grid.y % cluster.y || launch->grid.z % cluster.z) {
        return dry_refuse(CUDA_ERROR_INVALID_CLUSTER_SIZE, "%s: cluster (%u,%u,%u) does not divide grid (%u,%u,%u)", code->name,
                          cluster.x, cluster.y, cluster.z, launch->grid.x, launch->grid.y, launch->grid.z);
    }
    uint64_t most = code->max_cluster ? code->max_cluster
                    : kernel->on[device].non_portable_cluster ? LARGEST_CLUSTER
                                                              : PORTABLE_CLUSTER;
    if (volume(cluster) > most) {
        return dry_refuse(CUDA_ERROR_INVALID_CLUSTER_SIZE, "%s: %" PRIu64 " blocks a cluster, %" PRIu64 " are allowed", code->name,
                          volume(cluster), most);
    }
    return CUDA_SUCCESS;
}

static int check_cooperative(const struct dry_launch *launch, int device) {
    const struct dry_gpu *gpu = &dry.gpu[device];
    /* An estimate must not be why a launch is refused. */
    int blocks = dry_occupancy(launch->kernel, device, (unsigned)volume(launch->block), launch->shared, false);
    uint64_t most = (uint64_t)blocks * (uint64_t)gpu->processors;
    if (volume(launch->grid) > most) {
        return dry_refuse(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
                          "%s: a cooperative grid of %" PRIu64 " blocks, %" PRIu64 " can run at once (%d on each of %d multiprocessors)",
                          launch->kernel->name, volume(launch->grid), most, blocks, gpu->processors);
    }
    return CUDA_SUCCESS;
}

static int check(struct dry_launch *launch, int device) {
    const struct dry_code *code = launch->kernel->on[device].code;
    int refused = check_grid(launch, code->name);
    if (!refused) {
        refused = check_cluster(launch, device);
    }
    if (!refused) {
        refused = check_threads(launch, code, &dry.gpu[device]);
    }
    if (!refused && launch->cooperative) {
        refused = check_cooperative(launch, device);
    }
    if (!refused) {
        refused = check_shared(launch, device);
    }
    return refused;
}

int dry_launch(const void *function, const struct dry_launch *asked, void *handle) {
    struct dry_launch launch = *asked;
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->device != dry_thread.device) {
        /* CUDA C++ Programming Guide, "Stream and Event Behavior"; not measured. */
        return dry_refuse(CUDA_ERROR_INVALID_HANDLE, "cudaLaunchKernel: the stream is of device %d, device %d is current",
                          stream->device, dry_thread.device);
    }
    int code = dry_legacy_conflict(stream, "cudaLaunchKernel");
    if (!code) {
        code = dry_kernel(function, stream->device, &launch.kernel);
    }
    if (code) {
        return code;
    }
    code = check(&launch, stream->device);
    if (code) {
        /* Measured: this ends the capture, a kernel without code does not. */
        dry_invalidate(stream->capture);
        return code;
    }
    code = dry_into_graph(stream, &(struct dry_node){.kind = DRY_NODE_KERNEL}, launch.kernel->name);
    if (code != DRY_NOT_CAPTURING) {
        return code;
    }
    dry_note_sort(&launch);
    return CUDA_SUCCESS;
}

int dry_function_attributes(struct cuda_function_attributes *attributes, const void *function) {
    struct dry_kernel *kernel;
    int device = dry_thread.device;
    int refused = dry_kernel(function, device, &kernel);
    if (refused) {
        return refused;
    }
    const struct dry_code *code = kernel->on[device].code;
    /* The runtime's structure ends where CUDA 12 and 13 have 16 reserved words; not a byte beyond may be written. */
    memset(attributes, 0, DRY_FUNCTION_ATTRIBUTES);
    attributes->shared = code->shared;
    attributes->local = code->local;
    attributes->max_threads = (int)dry_most_threads(code, &dry.gpu[device]);
    attributes->registers = code->registers_known ? code->registers : 0; /* an estimate is not for showing */
    attributes->ptx = code->ptx;
    attributes->binary = code->binary;
    attributes->max_dynamic_shared = (int)kernel->on[device].max_dynamic_shared;
    attributes->carveout = kernel->on[device].carveout;
    attributes->cluster_width = (int)code->cluster.x;
    attributes->cluster_height = (int)code->cluster.y;
    attributes->cluster_depth = (int)code->cluster.z;
    return CUDA_SUCCESS;
}

int dry_set_function_attribute(const void *function, int attribute, int value) {
    struct dry_kernel *kernel;
    int device = dry_thread.device;
    int refused = dry_kernel(function, device, &kernel);
    if (refused) {
        return refused;
    }
    const struct dry_gpu *gpu = &dry.gpu[device];
    const struct dry_code *code = kernel->on[device].code;
    switch (attribute) {
    case CUDA_FUNCTION_MAX_DYNAMIC_SHARED:
        if (value < 0 || code->shared + (size_t)value > gpu->shared_per_block_optin) {
            return dry_refuse(CUDA_ERROR_INVALID_VALUE,
                              "%s: cudaFuncSetAttribute to %d bytes of dynamic shared memory: with %zu of static a block of %s can "
                              "have %zu", code->name, value, code->shared, gpu->name, gpu->shared_per_block_optin);
        }
        kernel->on[device].max_dynamic_shared = (size_t)value;
        return CUDA_SUCCESS;
    case CUDA_FUNCTION_CARVEOUT:
        if (value < -1 || value > 100) {
            return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: a carveout of %d percent", code->name, value);
        }
        kernel->on[device].carveout = value;
        return CUDA_SUCCESS;
    case CUDA_FUNCTION_CLUSTER_MUST_BE_SET:
        kernel->on[device].cluster_must_be_set = value != 0;
        return CUDA_SUCCESS;
    case CUDA_FUNCTION_CLUSTER_WIDTH:
        kernel->on[device].cluster.x = (unsigned)value;
        return CUDA_SUCCESS;
    case CUDA_FUNCTION_CLUSTER_HEIGHT:
        kernel->on[device].cluster.y = (unsigned)value;
        return CUDA_SUCCESS;
    case CUDA_FUNCTION_CLUSTER_DEPTH:
        kernel->on[device].cluster.z = (unsigned)value;
        return CUDA_SUCCESS;
    case CUDA_FUNCTION_NON_PORTABLE_CLUSTER:
        kernel->on[device].non_portable_cluster = value != 0;
        return CUDA_SUCCESS;
    default:
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: there is no function attribute %d", code->name, attribute);
    }
}
