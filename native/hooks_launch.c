/* Hooks of kernel launches, and of what a kernel is asked and told before it is launched. */
#include "hooks.h"

void isolate_launched(struct isolate_call *call, const void *function, struct cuda_dim grid, struct cuda_dim block,
                      size_t shared, const void *stream) {
    struct isolate_record *record = &call->record;
    struct isolate_name *name = isolate_function(function);
    record->name = name ? isolate_name_offset(name) : 0;
    record->stream = (uint64_t)(uintptr_t)stream;
    record->detail.launch.grid[0] = grid.x;
    record->detail.launch.grid[1] = grid.y;
    record->detail.launch.grid[2] = grid.z;
    record->detail.launch.block[0] = block.x;
    record->detail.launch.block[1] = block.y;
    record->detail.launch.block[2] = block.z;
    record->detail.launch.shared = shared;
    record->detail.launch.function = (uint64_t)(uintptr_t)function;
}

static void configured(struct isolate_call *call, const struct cuda_launch_configuration *configuration,
                       const void *function) {
    isolate_launched(call, function, configuration->grid, configuration->block, configuration->shared,
                     configuration->stream);
    for (unsigned i = 0; i < configuration->attribute_count; i++) {
        if (configuration->attributes[i].id == CUDA_LAUNCH_CLUSTER_DIMENSION) {
            struct cuda_dim cluster = configuration->attributes[i].value.cluster;
            call->record.detail.launch.cluster[0] = cluster.x;
            call->record.detail.launch.cluster[1] = cluster.y;
            call->record.detail.launch.cluster[2] = cluster.z;
        }
    }
}

static void about(struct isolate_call *call, const void *function, uint64_t first, uint64_t second) {
    struct isolate_name *name = isolate_function(function);
    call->record.name = name ? isolate_name_offset(name) : 0;
    call->record.detail.words[0] = first;
    call->record.detail.words[1] = second;
}

/* nvcc 12 and older */
HOOK(cudaLaunchKernel,
     (const void *function, struct cuda_dim grid, struct cuda_dim block, void **values, size_t shared, void *stream),
     (function, grid, block, values, shared, stream), ISOLATE_LAUNCH, CHECKED | QUEUES,
     isolate_launched(&call, function, grid, block, shared, stream), NOTHING)

/* nvcc 13 */
HOOK(__cudaLaunchKernel,
     (void *kernel, struct cuda_dim grid, struct cuda_dim block, void **values, size_t shared, void *stream),
     (kernel, grid, block, values, shared, stream), ISOLATE_LAUNCH, CHECKED | QUEUES,
     isolate_launched(&call, kernel, grid, block, shared, stream), NOTHING)

HOOK(cudaLaunchKernelExC,
     (const struct cuda_launch_configuration *configuration, const void *function, void **values),
     (configuration, function, values), ISOLATE_LAUNCH, CHECKED | QUEUES, configured(&call, configuration, function),
     NOTHING)

HOOK(cudaLaunchCooperativeKernel,
     (const void *function, struct cuda_dim grid, struct cuda_dim block, void **values, size_t shared, void *stream),
     (function, grid, block, values, shared, stream), ISOLATE_LAUNCH, CHECKED | QUEUES,
     isolate_launched(&call, function, grid, block, shared, stream), NOTHING)

QUIET_HOOK(cudaFuncGetAttributes, (void *attributes, const void *function), (attributes, function), ISOLATE_QUERY,
           about(&call, function, 0, 0))

HOOK(cudaFuncSetAttribute, (const void *function, int attribute, int value), (function, attribute, value),
     ISOLATE_QUERY, 0, about(&call, function, (uint64_t)attribute, (uint64_t)value), NOTHING)

QUIET_HOOK(cudaOccupancyMaxActiveBlocksPerMultiprocessor,
           (int *blocks, const void *function, int size, size_t shared), (blocks, function, size, shared),
           ISOLATE_QUERY, about(&call, function, (uint64_t)size, shared))

QUIET_HOOK(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
           (int *blocks, const void *function, int size, size_t shared, unsigned flags),
           (blocks, function, size, shared, flags), ISOLATE_QUERY, about(&call, function, (uint64_t)size, shared))
