/* Registration: which host function is which kernel of which fat binary, and which code the current device runs of it. */
#define _GNU_SOURCE
#include "dry.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS 16384

/* What nvcc's host code passes to __cudaRegisterFatBinary (fatbinary_section.h). */
struct wrapper {
    int magic, version;
    const void *data;
    void *more;
};

struct dry_module {
    char *library; /* real path */
    uint64_t container;
    struct dry_module *next;
};

struct variable {
    const void *host;
    struct dry_module *module;
    size_t bytes;
    void *place[DRY_MOST_DEVICES];
    struct variable *next;
};

/* Registration comes before main, from the thread that loads the library: it has a lock of its own. */
static pthread_mutex_t registering = PTHREAD_MUTEX_INITIALIZER;
static struct dry_module *modules;
static struct dry_kernel *kernels[BUCKETS];
static struct variable *variables;

static size_t bucket(const void *host) {
    return ((uintptr_t)host >> 4) % BUCKETS;
}

void **dry_register_binary(const void *data) {
    const struct wrapper *wrapper = data;
    struct dry_module *module = calloc(1, sizeof *module);
    Dl_info info;
    struct link_map *map = NULL;
    if (!module) {
        return NULL;
    }
    if (dladdr1(wrapper->data, &info, (void **)&map, RTLD_DL_LINKMAP) && map) {
        module->library = realpath(map->l_name[0] ? map->l_name : "/proc/self/exe", NULL);
        module->container = (uintptr_t)wrapper->data - map->l_addr;
    }
    pthread_mutex_lock(&registering);
    module->next = modules;
    modules = module;
    pthread_mutex_unlock(&registering);
    return (void **)module;
}

void dry_register_function(void **handle, const void *host, const char *name) {
    struct dry_kernel *kernel = calloc(1, sizeof *kernel);
    char *copy = strdup(name);
    if (!kernel || !copy) {
        free(kernel);
        free(copy);
        return;
    }
    kernel->host = host;
    kernel->name = copy;
    kernel->module = (struct dry_module *)handle;
    pthread_mutex_lock(&registering);
    kernel->next = kernels[bucket(host)];
    kernels[bucket(host)] = kernel;
    pthread_mutex_unlock(&registering);
}

void dry_register_variable(void **handle, const void *host, const char *name, size_t bytes) {
    (void)name;
    struct variable *variable = calloc(1, sizeof *variable);
    if (!variable) {
        return;
    }
    *variable = (struct variable){.host = host, .module = (struct dry_module *)handle, .bytes = bytes};
    pthread_mutex_lock(&registering);
    variable->next = variables;
    variables = variable;
    pthread_mutex_unlock(&registering);
}

void dry_unregister_binary(void **handle) {
    struct dry_module *module = (struct dry_module *)handle;
    pthread_mutex_lock(&registering);
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct dry_kernel **place = &kernels[i]; *place;) {
            struct dry_kernel *kernel = *place;
            if (kernel->module == module) {
                *place = kernel->next;
                free(kernel->name);
                free(kernel);
            } else {
                place = &kernel->next;
            }
        }
    }
    for (struct variable **place = &variables; *place;) {
        struct variable *variable = *place;
        if (variable->module == module) {
            *place = variable->next;
            free(variable);
        } else {
            place = &variable->next;
        }
    }
    for (struct dry_module **place = &modules; *place; place = &(*place)->next) {
        if (*place == module) {
            *place = module->next;
            free(module->library);
            free(module);
            break;
        }
    }
    pthread_mutex_unlock(&registering);
}

static struct dry_kernel *find(const void *function) {
    pthread_mutex_lock(&registering);
    struct dry_kernel *kernel = kernels[bucket(function)];
    while (kernel && kernel->host != function) {
        kernel = kernel->next;
    }
    pthread_mutex_unlock(&registering);
    return kernel;
}

int dry_kernel(const void *function, int device, struct dry_kernel **found) {
    struct dry_kernel *kernel = find(function);
    if (!kernel) {
        return dry_refuse(CUDA_ERROR_INVALID_DEVICE_FUNCTION, "%p is not a kernel that was registered", function);
    }
    if (dry.devices == 0) {
        return dry_refuse(CUDA_ERROR_NO_DEVICE, "%s: there is no device", kernel->name);
    }
    const struct dry_gpu *gpu = &dry.gpu[device];
    if (!kernel->on[device].looked_up) {
        const char *library = kernel->module->library;
        kernel->on[device].code = library ? dry_code(library, kernel->module->container, kernel->name, gpu->capability) : NULL;
        kernel->on[device].max_dynamic_shared = gpu->shared_per_block;
        if (kernel->on[device].code && kernel->on[device].code->exists) {
            size_t fixed = kernel->on[device].code->shared;
            kernel->on[device].max_dynamic_shared = fixed < gpu->shared_per_block ? gpu->shared_per_block - fixed : 0;
        }
        kernel->on[device].carveout = -1;
        kernel->on[device].looked_up = true;
    }
    const struct dry_code *code = kernel->on[device].code;
    if (!code) {
        return dry_refuse(CUDA_ERROR_INVALID_DEVICE_FUNCTION,
                          "%s of %s (fat binary at %#" PRIx64 ") is not in the kernel table for compute capability %d.%d",
                          kernel->name, kernel->module->library ? kernel->module->library : "an unknown library",
                          kernel->module->container, gpu->capability / 10, gpu->capability % 10);
    }
    if (!code->exists) {
        return dry_refuse(CUDA_ERROR_NO_KERNEL_IMAGE,
                          "%s: the build has no code for compute capability %d.%d (%s): neither machine code for %d.x up to it "
                          "nor PTX up to it", kernel->name, gpu->capability / 10, gpu->capability % 10, gpu->name,
                          gpu->capability / 10);
    }
    *found = kernel;
    return CUDA_SUCCESS;
}

int dry_kernel_name(const void *function, const char **name) {
    struct dry_kernel *kernel = find(function);
    if (!kernel || !name) {
        return dry_refuse(CUDA_ERROR_INVALID_DEVICE_FUNCTION, "%p is not a kernel that was registered", function);
    }
    *name = kernel->name;
    return CUDA_SUCCESS;
}

int dry_symbol(const void *host, void **address, size_t *bytes) {
    pthread_mutex_lock(&registering);
    struct variable *variable = variables;
    while (variable && variable->host != host) {
        variable = variable->next;
    }
    pthread_mutex_unlock(&registering);
    if (!variable) {
        return dry_refuse(DRY_INVALID_SYMBOL, "%p is not a device variable that was registered", host);
    }
    int device = dry_thread.device;
    if (address && !variable->place[device]) {
        int code = dry_malloc(&variable->place[device], variable->bytes);
        if (code) {
            return code;
        }
    }
    if (address) {
        *address = variable->place[device];
    }
    if (bytes) {
        *bytes = variable->bytes;
    }
    return CUDA_SUCCESS;
}
