/* A stand-in driver: its virtual memory is the process's own, so that a read past a fence is a SIGSEGV here. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    (void)properties, (void)option;
    *bytes = 1 << 16;
    return 0;
}

int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, unsigned long long flags) {
    (void)properties, (void)flags;
    *handle = bytes;
    return 0;
}

int cuMemRelease(uint64_t handle) {
    (void)handle;
    return 0;
}

int cuMemAddressReserve(uint64_t *pointer, size_t bytes, size_t alignment, uint64_t wish, unsigned long long flags) {
    (void)alignment, (void)wish, (void)flags;
    void *place = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *pointer = (uint64_t)(uintptr_t)place;
    return place == MAP_FAILED ? 2 : 0;
}

int cuMemAddressFree(uint64_t pointer, size_t bytes) {
    return munmap((void *)(uintptr_t)pointer, bytes) ? 1 : 0;
}

int cuMemMap(uint64_t pointer, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)pointer, (void)offset, (void)flags;
    return bytes == handle ? 0 : 1;
}

int cuMemUnmap(uint64_t pointer, size_t bytes) {
    return mprotect((void *)(uintptr_t)pointer, bytes, PROT_NONE) ? 1 : 0;
}

int cuMemSetAccess(uint64_t pointer, size_t bytes, const void *access, size_t count) {
    (void)access;
    return count != 1 || mprotect((void *)(uintptr_t)pointer, bytes, PROT_READ | PROT_WRITE) ? 1 : 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 1;
    return 0;
}

int cuLogsDumpToMemory(unsigned *iterator, char *buffer, size_t *size, unsigned flags) {
    (void)iterator, (void)flags;
    strncpy(buffer, "[12:00][Error] the driver's own words", *size);
    return 0;
}
