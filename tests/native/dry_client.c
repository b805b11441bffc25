/* Makes CUDA calls that a script on standard input names, one a line, and prints each with the code it returned.
 *
 * Runs against any CUDA, a real one too: functions are looked up by name. The kernels are those of the fat binaries that
 * were linked in (`client_fatbins`, NULL after the last); their names are the first argument, with commas between them and
 * a semicolon between fat binaries; one with an @ before it is a variable. Addresses in a script are NAME, NAME+BYTES or a number. */
#define _GNU_SOURCE
#include "cuda_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 256

struct wrapper {
    int magic, version;
    const void *data;
    void *more;
};

extern const void *const client_fatbins[];
static struct wrapper wrappers[16];

static struct {
    char name[64];
    uint64_t value;
} variables[MOST];
static size_t variable_count;
static char kernel_stubs[MOST];
static char *words[32];
static int word_count;
static void *libraries[3];

static void *find(const char *name) {
    for (size_t i = 0; i < 3; i++) {
        void *found = libraries[i] ? dlsym(libraries[i], name) : NULL;
        if (found) {
            return found;
        }
    }
    fprintf(stderr, "no function %s\n", name);
    exit(3);
}

#define CALL(name, parameters, ...) ((int (*) parameters)find(#name))(__VA_ARGS__)

static uint64_t *variable(const char *name) {
    for (size_t i = 0; i < variable_count; i++) {
        if (!strcmp(variables[i].name, name)) {
            return &variables[i].value;
        }
    }
    snprintf(variables[variable_count].name, sizeof variables[0].name, "%s", name);
    return &variables[variable_count++].value;
}

/* NAME, NAME+BYTES, NAME-BYTES or a number */
static uint64_t value(int word) {
    char name[64];
    const char *text = word < word_count ? words[word] : "0";
    if (*text >= '0' && *text <= '9') {
        return strtoull(text, NULL, 0);
    }
    size_t length = strcspn(text, "+-");
    snprintf(name, sizeof name, "%.*s", (int)length, text);
    return *variable(name) + (text[length] ? (uint64_t)strtoll(text + length, NULL, 0) : 0);
}

static void *pointer(int word) {
    return (void *)(uintptr_t)value(word);
}

static struct cuda_dim dim(int word) {
    return (struct cuda_dim){(unsigned)value(word), (unsigned)value(word + 1), (unsigned)value(word + 2)};
}

static void host_function(void *data) {
    ++*(int *)data;
}

static int host_calls;

/* What a call has to say beside its code. */
static char extra[256];

static int configured_launch(void) {
    struct cuda_launch_attribute attributes[2];
    memset(attributes, 0, sizeof attributes);
    struct cuda_launch_configuration configuration = {.grid = dim(2), .block = dim(5), .shared = value(8), .stream = pointer(9)};
    if (value(10)) {
        attributes[configuration.attribute_count].id = CUDA_LAUNCH_CLUSTER_DIMENSION;
        attributes[configuration.attribute_count++].value.cluster = dim(10);
    }
    if (value(13)) {
        attributes[configuration.attribute_count].id = CUDA_LAUNCH_COOPERATIVE;
        attributes[configuration.attribute_count++].value.bytes[0] = 1;
    }
    configuration.attributes = attributes;
    uint64_t argument = 0;
    void *arguments[] = {&argument};
    return CALL(cudaLaunchKernelExC, (const void *, const void *, void **), &configuration, pointer(1), arguments);
}

static int launch(const char *name) {
    uint64_t values[] = {value(10), value(11), value(12)};
    void *arguments[] = {&values[0], &values[1], &values[2]};
    return ((int (*)(const void *, struct cuda_dim, struct cuda_dim, void **, size_t, void *))find(name))(
        pointer(1), dim(2), dim(5), arguments, value(8), pointer(9));
}

static int function_attributes(void) {
    struct cuda_function_attributes a;
    memset(&a, 0, sizeof a);
    int code = CALL(cudaFuncGetAttributes, (void *, const void *), &a, pointer(1));
    snprintf(extra, sizeof extra, "threads %d shared %zu ptx %d binary %d dynamic %d carveout %d cluster %d %d %d", a.max_threads,
             a.shared, a.ptx, a.binary, a.max_dynamic_shared, a.carveout, a.cluster_width, a.cluster_height, a.cluster_depth);
    return code;
}

static int registers(void) {
    struct cuda_function_attributes a;
    memset(&a, 0, sizeof a);
    int code = CALL(cudaFuncGetAttributes, (void *, const void *), &a, pointer(1));
    snprintf(extra, sizeof extra, "%d", a.registers);
    return code;
}

static int memory_info(void) {
    size_t free = 0, total = 0;
    int code = CALL(cudaMemGetInfo, (size_t *, size_t *), &free, &total);
    /* `taken NAME` is how much less is free than when NAME was noted */
    if (word_count > 1 && *variable(words[1])) {
        snprintf(extra, sizeof extra, "%lld", (long long)(*variable(words[1]) - free));
    } else if (word_count > 1) {
        *variable(words[1]) = free;
    } else {
        snprintf(extra, sizeof extra, "%zu %zu", free, total);
    }
    return code;
}

static int pointer_attributes(void) {
    struct {
        int type, device;
        void *device_pointer, *host_pointer;
        long reserved[16];
    } a;
    memset(&a, 0, sizeof a);
    int code = CALL(cudaPointerGetAttributes, (void *, const void *), &a, pointer(1));
    snprintf(extra, sizeof extra, "type %d device %d", a.type, a.device);
    return code;
}

static struct cuda_allocation_properties on_device(int device) {
    return (struct cuda_allocation_properties){.type = 1, .location = {1, device}};
}

static int run(void) {
    const char *command = words[0];
    void *place = NULL;
    int number = 0, code;
    extra[0] = 0;
#define IS(name) (!strcmp(command, name))
#define NEW(call_) (code = (call_), *variable(words[1]) = (uintptr_t)place, code)
#define NUMBER(call_) (code = (call_), snprintf(extra, sizeof extra, "%d", number), code)
    if (IS("malloc")) return NEW(CALL(cudaMalloc, (void **, size_t), &place, value(2)));
    if (IS("managed")) return NEW(CALL(cudaMallocManaged, (void **, size_t, unsigned), &place, value(2), 1));
    if (IS("pinned")) return NEW(CALL(cudaMallocHost, (void **, size_t), &place, value(2)));
    if (IS("host")) return (place = malloc(value(2)), memset(place, 0xaa, value(2)), *variable(words[1]) = (uintptr_t)place, 0);
    if (IS("byte")) return snprintf(extra, sizeof extra, "%d", *(unsigned char *)pointer(1)), 0;
    if (IS("free")) return CALL(cudaFree, (void *), pointer(1));
    if (IS("freehost")) return CALL(cudaFreeHost, (void *), pointer(1));
    if (IS("register")) return CALL(cudaHostRegister, (void *, size_t, unsigned), pointer(1), value(2), 0);
    if (IS("unregister")) return CALL(cudaHostUnregister, (void *), pointer(1));
    if (IS("devicepointer")) return CALL(cudaHostGetDevicePointer, (void **, void *, unsigned), &place, pointer(1), 0);
    if (IS("pointer")) return pointer_attributes();
    if (IS("aligned")) return snprintf(extra, sizeof extra, "%d", value(1) % value(2) == 0), 0;
    if (IS("distance")) return snprintf(extra, sizeof extra, "%lld", (long long)(value(2) - value(1))), 0;
    if (IS("copy")) return CALL(cudaMemcpy, (void *, void *, size_t, int), pointer(1), pointer(2), value(3), (int)value(4));
    if (IS("copyasync"))
        return CALL(cudaMemcpyAsync, (void *, void *, size_t, int, void *), pointer(1), pointer(2), value(3), (int)value(4), pointer(5));
    if (IS("copy2d"))
        return CALL(cudaMemcpy2DAsync, (void *, size_t, void *, size_t, size_t, size_t, int, void *), pointer(1), value(2), pointer(3),
                    value(4), value(5), value(6), (int)value(7), pointer(8));
    if (IS("peer"))
        return CALL(cudaMemcpyPeerAsync, (void *, int, void *, int, size_t, void *), pointer(1), (int)value(2), pointer(3),
                    (int)value(4), value(5), pointer(6));
    if (IS("set")) return CALL(cudaMemset, (void *, int, size_t), pointer(1), 0x55, value(2));
    if (IS("setasync")) return CALL(cudaMemsetAsync, (void *, int, size_t, void *), pointer(1), 0x55, value(2), pointer(3));
    if (IS("stream")) return NEW(CALL(cudaStreamCreateWithFlags, (void **, unsigned), &place, (unsigned)value(2)));
    if (IS("destroy")) return CALL(cudaStreamDestroy, (void *), pointer(1));
    if (IS("sync")) return CALL(cudaStreamSynchronize, (void *), pointer(1));
    if (IS("query")) return CALL(cudaStreamQuery, (void *), pointer(1));
    if (IS("devicesync")) return CALL(cudaDeviceSynchronize, (void));
    if (IS("event")) return NEW(CALL(cudaEventCreateWithFlags, (void **, unsigned), &place, (unsigned)value(2)));
    if (IS("record")) return CALL(cudaEventRecord, (void *, void *), pointer(1), pointer(2));
    if (IS("wait")) return CALL(cudaStreamWaitEvent, (void *, void *, unsigned), pointer(1), pointer(2), 0);
    if (IS("eventsync")) return CALL(cudaEventSynchronize, (void *), pointer(1));
    if (IS("eventquery")) return CALL(cudaEventQuery, (void *), pointer(1));
    if (IS("eventdestroy")) return CALL(cudaEventDestroy, (void *), pointer(1));
    if (IS("elapsed")) {
        float milliseconds;
        return CALL(cudaEventElapsedTime, (float *, void *, void *), &milliseconds, pointer(1), pointer(2));
    }
    if (IS("hostfunction")) return CALL(cudaLaunchHostFunc, (void *, void (*)(void *), void *), pointer(1), host_function, &host_calls);
    if (IS("hostcalls")) return snprintf(extra, sizeof extra, "%d", host_calls), 0;
    if (IS("begin")) return CALL(cudaStreamBeginCapture, (void *, int), pointer(1), (int)value(2));
    if (IS("end")) return code = CALL(cudaStreamEndCapture, (void *, void **), pointer(1), &place), *variable(words[2]) = (uintptr_t)place, code;
    if (IS("capturing")) return NUMBER(CALL(cudaStreamIsCapturing, (void *, int *), pointer(1), &number));
    if (IS("mode")) return number = (int)value(1), NUMBER(CALL(cudaThreadExchangeStreamCaptureMode, (int *), &number));
    if (IS("instantiate")) return NEW(CALL(cudaGraphInstantiate, (void **, void *, unsigned long long), &place, pointer(2), 0));
    if (IS("update")) {
        struct {
            int result;
            void *node, *from;
        } result = {-1, NULL, NULL};
        code = CALL(cudaGraphExecUpdate, (void *, void *, void *), pointer(1), pointer(2), &result);
        snprintf(extra, sizeof extra, "%d", result.result);
        return code;
    }
    if (IS("graphlaunch")) return CALL(cudaGraphLaunch, (void *, void *), pointer(1), pointer(2));
    if (IS("graphdestroy")) return CALL(cudaGraphDestroy, (void *), pointer(1));
    if (IS("execdestroy")) return CALL(cudaGraphExecDestroy, (void *), pointer(1));
    if (IS("launch")) return launch("cudaLaunchKernel");
    if (IS("cooperative")) return launch("cudaLaunchCooperativeKernel");
    if (IS("launchex")) return configured_launch();
    if (IS("attributes")) return function_attributes();
    if (IS("registers")) return registers();
    if (IS("attribute")) return CALL(cudaFuncSetAttribute, (const void *, int, int), pointer(1), (int)value(2), (int)value(3));
    if (IS("occupancy"))
        return NUMBER(CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *, const void *, int, size_t), &number, pointer(1),
                           (int)value(2), value(3)));
    if (IS("peek")) return CALL(cudaPeekAtLastError, (void));
    if (IS("last")) return CALL(cudaGetLastError, (void));
    if (IS("count")) return NUMBER(CALL(cudaGetDeviceCount, (int *), &number));
    if (IS("device")) return CALL(cudaSetDevice, (int), (int)value(1));
    if (IS("current")) return NUMBER(CALL(cudaGetDevice, (int *), &number));
    if (IS("deviceattribute"))
        return NUMBER(CALL(cudaDeviceGetAttribute, (int *, int, int), &number, (int)value(1), (int)value(2)));
    if (IS("memory")) return memory_info();
    if (IS("canpeer")) return NUMBER(CALL(cudaDeviceCanAccessPeer, (int *, int, int), &number, (int)value(1), (int)value(2)));
    if (IS("enablepeer")) return CALL(cudaDeviceEnablePeerAccess, (int, unsigned), (int)value(1), 0);
    if (IS("disablepeer")) return CALL(cudaDeviceDisablePeerAccess, (int), (int)value(1));
    if (IS("granularity")) {
        struct cuda_allocation_properties properties = on_device((int)value(1));
        size_t bytes = 0;
        code = CALL(cuMemGetAllocationGranularity, (size_t *, const void *, int), &bytes, &properties, 0);
        snprintf(extra, sizeof extra, "%zu", bytes);
        return code;
    }
    if (IS("reserve"))
        return CALL(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long), variable(words[1]), value(2), 0, 0, 0);
    if (IS("unreserve")) return CALL(cuMemAddressFree, (uint64_t, size_t), value(1), value(2));
    if (IS("create")) {
        struct cuda_allocation_properties properties = on_device((int)value(3));
        return CALL(cuMemCreate, (uint64_t *, size_t, const void *, unsigned long long), variable(words[1]), value(2), &properties, 0);
    }
    if (IS("release")) return CALL(cuMemRelease, (uint64_t), value(1));
    if (IS("map")) return CALL(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long), value(1), value(2), 0, value(3), 0);
    if (IS("unmap")) return CALL(cuMemUnmap, (uint64_t, size_t), value(1), value(2));
    if (IS("access")) {
        struct cuda_memory_access access = {{1, (int)value(3)}, 3};
        return CALL(cuMemSetAccess, (uint64_t, size_t, const void *, size_t), value(1), value(2), &access, 1);
    }
    if (IS("blas")) return NEW(CALL(cublasCreate_v2, (void **), &place));
    if (IS("blasdestroy")) return CALL(cublasDestroy_v2, (void *), pointer(1));
    if (IS("blasstream")) return CALL(cublasSetStream_v2, (void *, void *), pointer(1), pointer(2));
    if (IS("gemm")) {
        float one = 1, zero = 0;
        return CALL(cublasSgemm_v2,
                    (void *, int, int, int, int, int, const float *, const void *, int, const void *, int, const float *, void *, int),
                    pointer(1), 1, 0, (int)value(2), (int)value(3), (int)value(4), &one, pointer(5), (int)value(6), pointer(7),
                    (int)value(8), &zero, pointer(9), (int)value(10));
    }
    if (IS("tosymbol"))
        return CALL(cudaMemcpyToSymbol, (const void *, const void *, size_t, size_t, int), pointer(1), pointer(2), value(3), value(4), 1);
    if (IS("fromsymbol"))
        return CALL(cudaMemcpyFromSymbol, (void *, const void *, size_t, size_t, int), pointer(2), pointer(1), value(3), value(4), 2);
    if (IS("symbol")) {
        size_t bytes = 0;
        code = CALL(cudaGetSymbolSize, (size_t *, const void *), &bytes, pointer(1));
        snprintf(extra, sizeof extra, "%zu", bytes);
        return code ? code : CALL(cudaGetSymbolAddress, (void **, const void *), &place, pointer(1));
    }
    if (IS("message")) {
        const char *(*last)(void) = dlsym(libraries[0], "isolate_dry_last_message");
        return snprintf(extra, sizeof extra, "%s", last ? last() : "none"), 0;
    }
    fprintf(stderr, "no command %s\n", command);
    exit(3);
}

static void *open_library(const char *name, const char *major) {
    char file[256];
    snprintf(file, sizeof file, "%s%s", name, major);
    void *library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
    }
    return library;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    const char *major = argc > 2 ? argv[2] : "13";
    libraries[0] = open_library("libcudart.so.", major);
    libraries[1] = open_library("libcuda.so.", "1");
    libraries[2] = open_library("libcublas.so.", major);
    char *rest = NULL, *next = NULL, *names = argc > 1 ? strtok_r(argv[1], ";", &next) : NULL;
    size_t kernels = 0;
    for (size_t i = 0; client_fatbins[i] && names; i++, names = strtok_r(NULL, ";", &next)) {
        wrappers[i] = (struct wrapper){0x466243b1, 1, client_fatbins[i], NULL};
        void **binary = ((void **(*)(const void *))find("__cudaRegisterFatBinary"))(&wrappers[i]);
        for (char *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
            const void *stub = &kernel_stubs[kernels++];
            *variable(name) = (uintptr_t)stub;
            if (*name == '@') { /* a variable of 64 bytes */
                ((void (*)(void **, const void *, const char *, const char *, int, size_t, int, int))find("__cudaRegisterVar"))(
                    binary, stub, name + 1, name + 1, 0, 64, 0, 0);
                continue;
            }
            ((void (*)(void **, const void *, const char *, const char *, int, void *, void *, void *, void *, int *))find(
                "__cudaRegisterFunction"))(binary, stub, name, name, -1, NULL, NULL, NULL, NULL, NULL);
        }
        ((void (*)(void **))find("__cudaRegisterFatBinaryEnd"))(binary);
    }
    char line[512], copy[512];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        snprintf(copy, sizeof copy, "%s", line);
        word_count = 0;
        for (char *word = strtok_r(copy, " ", &rest); word && word_count < 32; word = strtok_r(NULL, " ", &rest)) {
            words[word_count++] = word;
        }
        if (word_count == 0 || words[0][0] == '#') {
            continue;
        }
        int code = run();
        printf("%s -> %d%s%s\n", line, code, extra[0] ? " " : "", extra);
    }
    return 0;
}
