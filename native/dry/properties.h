/* cudaDeviceProp of CUDA 12 and of CUDA 13, which differ (driver_types.h of both toolkits). */
#ifndef ISOLATE_DRY_PROPERTIES_H
#define ISOLATE_DRY_PROPERTIES_H

#include <stddef.h>

#ifndef CUDART_MAJOR
#error "CUDART_MAJOR is 12 or 13"
#endif

struct cuda_properties {
    char name[256];
    char uuid[16], luid[8];
    unsigned luid_node_mask;
    size_t memory, shared_per_block;
    int registers_per_block, warp;
    size_t pitch;
    int threads_per_block, block[3], grid[3];
#if CUDART_MAJOR == 12
    int clock;
#endif
    size_t constant;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
#if CUDART_MAJOR == 12
    int overlap;
#endif
    int processors;
#if CUDART_MAJOR == 12
    int timeout;
#endif
    int integrated, maps_host_memory;
#if CUDART_MAJOR == 12
    int compute_mode;
#endif
    int texture_1d, texture_1d_mipmap;
#if CUDART_MAJOR == 12
    int texture_1d_linear;
#endif
    int textures[23];
    int surfaces[13];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified_addressing;
#if CUDART_MAJOR == 12
    int memory_clock;
#endif
    int memory_bus, l2_cache, persisting_l2_cache, threads_per_processor, stream_priorities, global_cache, local_cache;
    size_t shared_per_processor;
    int registers_per_processor, managed_memory, multi_gpu_board, multi_gpu_board_group, host_native_atomics;
#if CUDART_MAJOR == 12
    int single_to_double;
#endif
    int pageable_access, concurrent_managed_access, preemption, registered_host_pointer, cooperative_launch;
#if CUDART_MAJOR == 12
    int cooperative_multi_device_launch;
#endif
    size_t shared_per_block_optin;
    int host_page_tables, direct_managed_access, blocks_per_processor, access_policy_window;
    size_t shared_reserved;
    int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, memory_pools, gpu_direct;
    unsigned gpu_direct_flush;
    int gpu_direct_ordering;
    unsigned memory_pool_handles;
    int deferred_arrays, ipc_events, cluster_launch, unified_function_pointers;
#if CUDART_MAJOR == 12
    int reserved[63];
#else
    int numa_config, numa_id, mps, host_numa_id;
    unsigned pci_device_id, pci_subsystem_id;
    int host_numa_ipc;
    int reserved[56];
#endif
};

#if CUDART_MAJOR == 12
_Static_assert(sizeof(struct cuda_properties) == 1032, "cudaDeviceProp of CUDA 12");
_Static_assert(offsetof(struct cuda_properties, processors) == 388, "cudaDeviceProp of CUDA 12");
_Static_assert(offsetof(struct cuda_properties, shared_per_block_optin) == 696, "cudaDeviceProp of CUDA 12");
#else
_Static_assert(sizeof(struct cuda_properties) == 1008, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(struct cuda_properties, processors) == 384, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(struct cuda_properties, shared_per_block_optin) == 672, "cudaDeviceProp of CUDA 13");
#endif

#endif
