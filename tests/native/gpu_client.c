/* Makes the CUDA calls that its arguments name on a real GPU, and prints what each returned: kernels that work, that read
 * or write where they should not, that trap, that are bounded. PTX text, so that no CUDA compiler is needed. */
#include "cuda_abi.h"
#include "trace.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaLibraryLoadData(void **, const void *, void *, void **, unsigned, void *, void **, unsigned);
int cudaLibraryGetKernel(void **, void *, const char *);
int __cudaLaunchKernel(void *, struct cuda_dim, struct cuda_dim, void **, size_t, void *);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemsetAsync(void *, int, size_t, void *);
int cudaStreamSynchronize(void *);
int cudaDeviceSynchronize(void);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamBeginCapture(void *, int);
int cudaStreamEndCapture(void *, void **);
int cudaGraphInstantiate(void **, void *, unsigned long long);
int cudaGraphExecUpdate(void *, void *, void *);
int cudaGraphLaunch(void *, void *);
int cudaSetDevice(int);
int cudaGetDeviceCount(int *);
int cudaGetLastError(void);
int cuDeviceGetAttribute(int *, int, int);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
int cuMemCreate(uint64_t *, size_t, const void *, unsigned long long);
int cuMemMap(uint64_t, size_t, size_t, uint64_t, unsigned long long);
int cuMemSetAccess(uint64_t, size_t, const void *, size_t);

static const char ptx[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry good(.param .u64 p, .param .u64 offset, .param .u32 write) { ret; }\n"
    ".visible .entry other(.param .u64 p, .param .u64 offset, .param .u32 write) { ret; }\n"
    ".visible .entry fall(.param .u64 p, .param .u64 offset, .param .u32 write) { trap; }\n"
    ".visible .entry bounded(.param .u64 p, .param .u64 offset, .param .u32 write) .maxntid 160, 1, 1 { ret; }\n"
    ".visible .entry touch(.param .u64 p, .param .u64 offset, .param .u32 write) {\n"
    "  .reg .b64 %a, %o;\n  .reg .b32 %w, %v;\n  .reg .pred %read;\n"
    "  ld.param.u64 %a, [p];\n  ld.param.u64 %o, [offset];\n  ld.param.u32 %w, [write];\n"
    "  cvta.to.global.u64 %a, %a;\n  add.s64 %a, %a, %o;\n  setp.eq.u32 %read, %w, 0;\n"
    "  @%read bra READ;\n  st.volatile.global.u8 [%a], %w;\n  ret;\n"
    "READ:\n  ld.volatile.global.u8 %v, [%a];\n  ret;\n}\n";

static void *library, *stream, *graph, *executable, *memory;
static long turns;

static int launch(const char *name, unsigned threads, long offset, unsigned write, void *on) {
    void *kernel = NULL, *address = memory;
    void *values[] = {&address, &offset, &write};
    int code = cudaLibraryGetKernel(&kernel, library, name);
    return code ? code
                : __cudaLaunchKernel(kernel, (struct cuda_dim){1, 1, 1}, (struct cuda_dim){threads, 1, 1}, values, 0, on);
}

/* As ggml's pool gives it: out of one piece of virtual memory where the device has that, else an allocation of its own. */
static int take_from_pool(size_t bytes) {
    enum { POOL = 256 << 20, ALIGNMENT = 128 };
    static uint64_t pool, used;
    struct cuda_allocation_properties properties = {.type = 1, .location = {1, 0}};
    struct cuda_memory_access access = {{1, 0}, 3};
    uint64_t handle;
    int virtual_memory = 0, code = cuDeviceGetAttribute(&virtual_memory, CUDA_DEVICE_VIRTUAL_MEMORY, 0);
    if (code || !virtual_memory) {
        return code ? code : cudaMalloc(&memory, bytes);
    }
    if (!pool) {
        code = cuMemAddressReserve(&pool, POOL, 0, 0, 0);
        code = code ? code : cuMemCreate(&handle, POOL, &properties, 0);
        code = code ? code : cuMemMap(pool, POOL, 0, handle, 0);
        code = code ? code : cuMemSetAccess(pool, POOL, &access, 1);
    }
    memory = (void *)(uintptr_t)(pool + used);
    used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return code;
}

static void *work(void *argument) {
    long self = (long)(intptr_t)argument;
    void *own;
    int devices = 1;
    cudaGetDeviceCount(&devices);
    cudaSetDevice((int)(self % devices));
    cudaStreamCreateWithFlags(&own, 1);
    for (long i = 0; i < turns; i++) {
        launch("good", (unsigned)self + 1, 0, 0, own);
    }
    cudaStreamSynchronize(own);
    return NULL;
}

static int run_threads(long count) {
    pthread_t threads[8];
    for (long i = 0; i < count; i++) {
        pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i);
    }
    for (long i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}

/* Many faults in one process: each turn is a trace of its own, of which `number` is the launch to fail. Prints a line a
 * turn: the launch to fail, the launch that the trace has as failed, its code. */
static int campaign(long count, long seed) {
    static const int codes[] = {1, 2, 9, 98, 209, 701, 720};
    srand((unsigned)seed);
    for (long turn = 0; turn < count; turn++) {
        int launches = 2 + rand() % 60, number = 1 + rand() % launches, late = rand() % 10;
        int code = codes[(size_t)rand() % (sizeof codes / sizeof *codes)], left = 0;
        bool really = rand() % 2;
        isolate_trace_restart();
        isolate_trace_inject(ISOLATE_LAUNCH, (uint64_t)number, really ? 0 : code);
        for (int i = 1; i <= launches && !left; i++) {
            launch(really && i == number ? "bounded" : "good", really && i == number ? 192 : 32, 0, 0, stream);
            if (i % 3 == 0) {
                cudaMemsetAsync(memory, 0, 64, stream);
            }
            left = i >= number + late || i == launches ? cudaGetLastError() : 0;
        }
        isolate_trace_inject(ISOLATE_LAUNCH, 0, 0);
        printf("turn %d %d\n", number, left);
        fflush(stdout);
        getchar(); /* the parent reads the trace now */
    }
    return 0;
}

static int perform(const char *call, long value, long second) {
#define IS(name) !strcmp(call, name)
    if (IS("good") || IS("other") || IS("fall")) return launch(call, 32, 0, 0, stream);
    if (IS("bounded")) return launch(call, (unsigned)value, 0, 0, stream);
    if (IS("read")) return launch("touch", 1, value, 0, stream);
    if (IS("write")) return launch("touch", 1, value, 1, stream);
    if (IS("malloc")) return cudaMalloc(&memory, (size_t)value);
    if (IS("pool")) return take_from_pool((size_t)value);
    if (IS("free")) return cudaFree(memory);
    if (IS("copy-past")) return cudaMemcpyAsync(memory, (char *)memory + (1l << 40), (size_t)value, CUDA_COPY_DEVICE_TO_DEVICE, stream);
    if (IS("set")) return cudaMemsetAsync(memory, (int)second, (size_t)value, stream);
    if (IS("synchronize")) return cudaStreamSynchronize(stream);
    if (IS("device-synchronize")) return cudaDeviceSynchronize();
    if (IS("begin-capture")) return cudaStreamBeginCapture(stream, (int)value);
    if (IS("end-capture")) return cudaStreamEndCapture(stream, &graph);
    if (IS("instantiate")) return cudaGraphInstantiate(&executable, graph, 0);
    if (IS("update")) return cudaGraphExecUpdate(executable, graph, (char[64]){0});
    if (IS("graph")) return cudaGraphLaunch(executable, stream);
    if (IS("last")) return cudaGetLastError();
    if (IS("turns")) return turns = value, 0;
    if (IS("threads")) return run_threads(value);
    if (IS("campaign")) return campaign(value, second);
    if (IS("abort")) return isolate_on_abort("file.cu:12: CUDA error"), abort(), 0;
    fprintf(stderr, "no such call: %s\n", call);
    exit(2);
}

int main(int count, char **arguments) {
    if (cudaLibraryLoadData(&library, ptx, NULL, NULL, 0, NULL, NULL, 0) || cudaStreamCreateWithFlags(&stream, 1)) {
        fprintf(stderr, "the device cannot be used\n");
        return 3;
    }
    for (int i = 1; i < count; i++) {
        char call[64];
        long value = 0, second = 0;
        sscanf(arguments[i], "%63[^:]:%ld:%ld", call, &value, &second);
        printf("%s %d\n", arguments[i], perform(call, value, second));
        fflush(stdout);
    }
    return 0;
}
