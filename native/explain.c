/* What is read where a call failed: the kernel's attributes, the device's limits, the host's way there. */
#define _GNU_SOURCE
#include "hooks.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const int limits[] = {
    [ISOLATE_DEVICE_MAX_THREADS] = CUDA_DEVICE_MAX_THREADS_PER_BLOCK,
    [ISOLATE_DEVICE_BLOCK_X] = CUDA_DEVICE_MAX_BLOCK_X,
    [ISOLATE_DEVICE_BLOCK_Y] = CUDA_DEVICE_MAX_BLOCK_Y,
    [ISOLATE_DEVICE_BLOCK_Z] = CUDA_DEVICE_MAX_BLOCK_Z,
    [ISOLATE_DEVICE_GRID_X] = CUDA_DEVICE_MAX_GRID_X,
    [ISOLATE_DEVICE_GRID_Y] = CUDA_DEVICE_MAX_GRID_Y,
    [ISOLATE_DEVICE_GRID_Z] = CUDA_DEVICE_MAX_GRID_Z,
    [ISOLATE_DEVICE_SHARED] = CUDA_DEVICE_SHARED_PER_BLOCK,
    [ISOLATE_DEVICE_SHARED_OPTIN] = CUDA_DEVICE_SHARED_PER_BLOCK_OPTIN,
    [ISOLATE_DEVICE_REGISTERS] = CUDA_DEVICE_REGISTERS_PER_BLOCK,
    [ISOLATE_DEVICE_WARP] = CUDA_DEVICE_WARP_SIZE,
    [ISOLATE_DEVICE_MAJOR] = CUDA_DEVICE_MAJOR,
    [ISOLATE_DEVICE_MINOR] = CUDA_DEVICE_MINOR,
    [ISOLATE_DEVICE_PROCESSORS] = CUDA_DEVICE_PROCESSORS,
};

static void read_attributes(const void *function, int64_t *into) {
    struct cuda_function_attributes read;
    int (*get)(void *, const void *) = FIND("cudaFuncGetAttributes", void *, const void *);
    memset(&read, 0, sizeof read);
    if (!get || get(&read, function)) {
        return;
    }
    into[ISOLATE_KERNEL_SHARED_STATIC] = (int64_t)read.shared;
    into[ISOLATE_KERNEL_CONSTANT] = (int64_t)read.constant;
    into[ISOLATE_KERNEL_LOCAL] = (int64_t)read.local;
    into[ISOLATE_KERNEL_MAX_THREADS] = read.max_threads;
    into[ISOLATE_KERNEL_REGISTERS] = read.registers;
    into[ISOLATE_KERNEL_PTX] = read.ptx;
    into[ISOLATE_KERNEL_BINARY] = read.binary;
    into[ISOLATE_KERNEL_SHARED_DYNAMIC_MAX] = read.max_dynamic_shared;
}

static void read_limits(int device, int64_t *into) {
    int (*get)(int *, int, int) = FIND("cudaDeviceGetAttribute", int *, int, int);
    for (size_t i = 0; get && i < sizeof limits / sizeof *limits; i++) {
        int value;
        if (!get(&value, limits[i], device)) {
            into[i] = value;
        }
    }
}

/* Frames of isolate itself are left out. The addresses are of the calls, not of what follows them. */
static void read_frames(uint32_t *into) {
    void *frames[64];
    int count = backtrace(frames, sizeof frames / sizeof *frames);
    Dl_info self, info;
    dladdr((void *)read_frames, &self);
    size_t kept = 0;
    for (int i = 0; i < count && kept < ISOLATE_FRAMES; i++) {
        char text[4096];
        const char *address = (const char *)frames[i] - 1;
        if (!dladdr(address, &info) || !info.dli_fname || info.dli_fbase == self.dli_fbase) {
            continue;
        }
        snprintf(text, sizeof text, "%s+0x%zx %s", info.dli_fname, (size_t)(address - (const char *)info.dli_fbase),
                 info.dli_sname ? info.dli_sname : "");
        into[kept++] = isolate_string(text);
    }
}

/* CUDA 12.9 and newer log why they refused a call. The end of that log, whole lines. */
static uint32_t read_driver_log(void) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char buffer[25601];
    int (*dump)(unsigned *, char *, size_t *, unsigned) =
        FIND("cuLogsDumpToMemory", unsigned *, char *, size_t *, unsigned);
    size_t size = sizeof buffer - 1;
    uint32_t offset = 0;
    if (!dump || pthread_mutex_trylock(&lock)) {
        return 0;
    }
    memset(buffer, 0, sizeof buffer);
    if (!dump(NULL, buffer, &size, 0)) {
        size_t length = strlen(buffer);
        const char *end = length > 1000 ? strchr(buffer + length - 1000, '\n') : NULL;
        offset = isolate_string(end ? end + 1 : buffer);
    }
    pthread_mutex_unlock(&lock);
    return offset;
}

void isolate_explain(const struct isolate_record *record, bool ask) {
    struct isolate_evidence *evidence = isolate_evidence_begin(record);
    if (!evidence) {
        return;
    }
    read_frames(evidence->frames);
    if (!ask) {
        isolate_evidence_done(evidence);
        return;
    }
    int (*clear)(void) = FIND("cudaGetLastError", void);
    int before = isolate_peek();
    if (record->kind == ISOLATE_LAUNCH) {
        read_attributes((const void *)(uintptr_t)record->detail.launch.function, evidence->attributes);
    }
    read_limits(record->device, evidence->limits);
    evidence->driver_log = read_driver_log();
    /* The build must find the last error as it was. */
    int after = isolate_peek();
    if (after != before && clear) {
        clear();
        isolate_this.pending = before;
    }
    isolate_evidence_done(evidence);
}
