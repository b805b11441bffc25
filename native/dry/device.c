/* Devices: which one is current, what they say of themselves, and which may read each other's memory. */
#include "dry.h"

static bool peers[DRY_MOST_DEVICES][DRY_MOST_DEVICES];

static int bad_device(int device) {
    if (dry.devices == 0) {
        return dry_refuse(CUDA_ERROR_NO_DEVICE, "there is no device");
    }
    return dry_refuse(CUDA_ERROR_INVALID_DEVICE, "there is no device %d, only 0 to %d", device, dry.devices - 1);
}

int dry_set_device(int device) {
    if (device < 0 || device >= dry.devices) {
        return bad_device(device);
    }
    dry_thread.device = device;
    return CUDA_SUCCESS;
}

int dry_attribute(int attribute, int device, int *value) {
    if (device < 0 || device >= dry.devices) {
        return bad_device(device);
    }
    if (attribute < 1 || attribute > 200) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaDeviceGetAttribute: there is no attribute %d", attribute);
    }
    const struct dry_gpu *gpu = &dry.gpu[device];
    /* Numbers of cudaDeviceAttr; those that have no name here never differ between devices that ggml runs on. */
    switch (attribute) {
    case CUDA_DEVICE_MAX_THREADS_PER_BLOCK:
    case CUDA_DEVICE_MAX_BLOCK_X:
    case CUDA_DEVICE_MAX_BLOCK_Y: *value = 1024; break;
    case CUDA_DEVICE_MAX_BLOCK_Z: *value = 64; break;
    case CUDA_DEVICE_MAX_GRID_X: *value = 2147483647; break;
    case CUDA_DEVICE_MAX_GRID_Y:
    case CUDA_DEVICE_MAX_GRID_Z: *value = 65535; break;
    case CUDA_DEVICE_SHARED_PER_BLOCK: *value = (int)gpu->shared_per_block; break;
    case CUDA_DEVICE_TOTAL_CONSTANT: *value = 65536; break;
    case CUDA_DEVICE_WARP_SIZE: *value = 32; break;
    case 11: *value = 2147483647; break;  /* the largest pitch */
    case CUDA_DEVICE_REGISTERS_PER_BLOCK: *value = gpu->registers_per_block; break;
    case 14: *value = 512; break;         /* alignment of textures */
    case 30: *value = 512; break;         /* and of surfaces */
    case 51: *value = 32; break;          /* and of a texture's pitch */
    case 15: *value = 1; break;           /* copies and kernels overlap */
    case 40: *value = 3; break;           /* copy engines, of an H200 */
    case CUDA_DEVICE_PROCESSORS: *value = gpu->processors; break;
    case CUDA_DEVICE_INTEGRATED: *value = gpu->integrated; break;
    case 33: *value = device + 1; break;  /* PCI bus */
    case CUDA_DEVICE_THREADS_PER_PROCESSOR: *value = gpu->threads_per_processor; break;
    case CUDA_DEVICE_MAJOR: *value = gpu->capability / 10; break;
    case CUDA_DEVICE_MINOR: *value = gpu->capability % 10; break;
    case CUDA_DEVICE_SHARED_PER_PROCESSOR: *value = (int)gpu->shared_per_processor; break;
    case CUDA_DEVICE_REGISTERS_PER_PROCESSOR: *value = gpu->registers_per_processor; break;
    case CUDA_DEVICE_SHARED_PER_BLOCK_OPTIN: *value = (int)gpu->shared_per_block_optin; break;
    case CUDA_DEVICE_BLOCKS_PER_PROCESSOR: *value = gpu->blocks_per_processor; break;
    case CUDA_DEVICE_SHARED_RESERVED: *value = (int)gpu->shared_reserved; break;
    case CUDA_DEVICE_CLUSTER_LAUNCH: *value = gpu->cluster_launch; break;
    case CUDA_DEVICE_COOPERATIVE_LAUNCH:
    case CUDA_DEVICE_VIRTUAL_MEMORY:
    case 19: /* host memory can be mapped */
    case 31: /* kernels run side by side */
    case 41: /* one address space */
    case 78: /* streams have priorities */
    case 79: /* caches of global and local memory */
    case 80:
    case 83: /* managed memory */
    case 89:
    case 90: /* compute preemption */
    case 91:
    case 99: /* host registration */
    case 115: /* memory pools */ *value = 1; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

int dry_can_access_peer(int *can, int device, int peer) {
    if (device < 0 || device >= dry.devices || peer < 0 || peer >= dry.devices) {
        return bad_device(device < 0 || device >= dry.devices ? device : peer);
    }
    *can = device != peer && dry.gpu[device].peer_access && dry.gpu[peer].peer_access;
    return CUDA_SUCCESS;
}

int dry_enable_peer(int peer, unsigned flags) {
    int device = dry_thread.device, can;
    if (flags) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaDeviceEnablePeerAccess: flags are 0, not %u", flags);
    }
    int code = dry_can_access_peer(&can, device, peer);
    if (code) {
        return code;
    }
    if (!can) {
        return dry_refuse(DRY_PEER_UNSUPPORTED, "device %d cannot have access to device %d", device, peer);
    }
    if (peers[device][peer]) {
        return dry_refuse(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "device %d has access to device %d already", device, peer);
    }
    peers[device][peer] = true;
    return CUDA_SUCCESS;
}

int dry_disable_peer(int peer) {
    if (peer < 0 || peer >= dry.devices) {
        return bad_device(peer);
    }
    if (!peers[dry_thread.device][peer]) {
        return dry_refuse(DRY_PEER_NOT_ENABLED, "device %d has no access to device %d", dry_thread.device, peer);
    }
    peers[dry_thread.device][peer] = false;
    return CUDA_SUCCESS;
}
