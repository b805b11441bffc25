/* libcuda.so.1: the calls of the CUDA driver that ggml-cuda imports, for the memory pool above all. */
#include "dry.h"

/* Measured: before cuInit or the first call of the runtime nothing works. */
#define RUN_DRIVER(call)                                                                                        \
    do {                                                                                                        \
        int code_ = dry_enter();                                                                                \
        return dry_leave_quietly(code_ ? code_ : !dry_initialized ? DRY_NOT_INITIALIZED : (call));              \
    } while (0)

DRY_API int cuInit(unsigned flags) {
    (void)flags;
    dry_enter();
    dry_initialized = dry.devices > 0;
    return dry_leave_quietly(dry_initialized ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}

DRY_API int cuDriverGetVersion(int *version) {
    dry_configured();
    *version = dry.driver_version;
    return CUDA_SUCCESS;
}

DRY_API int cuDeviceGetCount(int *count) {
    dry_configured();
    *count = dry.devices;
    return CUDA_SUCCESS;
}

DRY_API int cuDeviceGet(int *device, int ordinal) {
    int unused;
    *device = ordinal;
    RUN_DRIVER(dry_attribute(CUDA_DEVICE_MAJOR, ordinal, &unused));
}

DRY_API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    RUN_DRIVER(dry_attribute(attribute, device, value));
}

DRY_API int cuGetErrorString(int code, const char **text) {
    *text = dry_error_text(code);
    return CUDA_SUCCESS;
}

DRY_API int cuGetErrorName(int code, const char **name) {
    *name = dry_error_name(code);
    return CUDA_SUCCESS;
}

DRY_API int cuMemGetAllocationGranularity(size_t *granularity, const struct cuda_allocation_properties *properties, int option) {
    (void)option;
    RUN_DRIVER(dry_granularity(granularity, properties));
}

DRY_API int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wish, unsigned long long flags) {
    (void)wish, (void)flags;
    RUN_DRIVER(dry_address_reserve(address, bytes, alignment));
}

DRY_API int cuMemAddressFree(uint64_t address, size_t bytes) {
    RUN_DRIVER(dry_address_free(address, bytes));
}

DRY_API int cuMemCreate(uint64_t *handle, size_t bytes, const struct cuda_allocation_properties *properties,
                        unsigned long long flags) {
    (void)flags;
    RUN_DRIVER(dry_memory_create(handle, bytes, properties));
}

DRY_API int cuMemRelease(uint64_t handle) {
    RUN_DRIVER(dry_memory_release(handle));
}

DRY_API int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)flags;
    RUN_DRIVER(dry_memory_map(address, bytes, offset, handle));
}

DRY_API int cuMemUnmap(uint64_t address, size_t bytes) {
    RUN_DRIVER(dry_memory_unmap(address, bytes));
}

DRY_API int cuMemSetAccess(uint64_t address, size_t bytes, const struct cuda_memory_access *access, size_t count) {
    RUN_DRIVER(dry_memory_access(address, bytes, access, count));
}
