/* The names of kernels: host functions and kernel handles, to the mangled name that the build registered. */
#define _GNU_SOURCE
#include "hooks.h"

#include <pthread.h>
#include <string.h>

#define PLACES 65536 /* a power of two; a build has about 7,000 kernels, each known by two handles */

static struct {
    const void *_Atomic function;
    struct isolate_name name;
} table[PLACES];

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

/* The place of a function, or the free one where it would be; PLACES when the table is full. */
static size_t place_of(const void *function) {
    size_t start = (size_t)(((uintptr_t)function >> 3) * UINT64_C(0x9E3779B97F4A7C15) >> 48);
    for (size_t i = 0; i < PLACES; i++) {
        size_t place = (start + i) & (PLACES - 1);
        const void *there = atomic_load_explicit(&table[place].function, memory_order_acquire);
        if (!there || there == function) {
            return place;
        }
    }
    return PLACES;
}

void isolate_name_function(const void *function, const char *name) {
    if (!function || !name) {
        return;
    }
    pthread_mutex_lock(&writing);
    size_t place = place_of(function);
    if (place < PLACES && !atomic_load(&table[place].function)) {
        table[place].name.text = strdup(name);
        atomic_store_explicit(&table[place].function, function, memory_order_release);
    }
    pthread_mutex_unlock(&writing);
}

struct isolate_name *isolate_function(const void *function) {
    size_t place = place_of(function);
    if (place < PLACES && !atomic_load_explicit(&table[place].function, memory_order_acquire)) {
        const char *name = NULL;
        int (*get_name)(const char **, const void *) = FIND("cudaFuncGetName", const char **, const void *);
        if (get_name && !get_name(&name, function)) {
            isolate_name_function(function, name);
        }
    }
    return place < PLACES && atomic_load(&table[place].function) == function ? &table[place].name : NULL;
}

ISOLATE_API void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int threads,
                                        void *thread, void *block, void *block_size, void *grid_size, int *warp) {
    void (*real)(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) =
        isolate_find("__cudaRegisterFunction");
    isolate_name_function(host, name);
    if (real) {
        real(binary, host, device, name, threads, thread, block, block_size, grid_size, warp);
    }
}

static void named(void *const *kernel, const void *host, int code) {
    struct isolate_name *name = isolate_function(host);
    if (!code && name) {
        isolate_name_function(*kernel, name->text);
    }
}

/* nvcc 13 launches by this handle. */
HOOK(__cudaGetKernel, (void **kernel, const void *host), (kernel, host), ISOLATE_QUERY, 0, NOTHING,
     named(kernel, host, code))
