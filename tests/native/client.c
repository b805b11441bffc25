/* Makes the CUDA calls that its arguments name, as ggml-cuda makes them, and prints what each returned. */
#include "cuda_abi.h"
#include "trace.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
int __cudaGetKernel(void **, const void *);
int __cudaLaunchKernel(void *, struct cuda_dim, struct cuda_dim, void **, size_t, void *);
int cudaLaunchKernel(const void *, struct cuda_dim, struct cuda_dim, void **, size_t, void *);
int cudaLaunchKernelExC(const struct cuda_launch_configuration *, const void *, void **);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemset(void *, int, size_t);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaStreamSynchronize(void *);
int cudaEventSynchronize(void *);
int cudaDeviceSynchronize(void);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamDestroy(void *);
int cudaStreamBeginCapture(void *, int);
int cudaStreamEndCapture(void *, void **);
int cudaGraphInstantiate(void **, void *, unsigned long long);
int cudaGraphExecUpdate(void *, void *, void *);
int cudaGraphLaunch(void *, void *);
int cudaSetDevice(int);
int cudaGetLastError(void);
int cudaPeekAtLastError(void);
int cudaInventedCall(void);
int cudaStreamQuery(void *);
const char *cudaGetErrorString(int);
int cublasCreate_v2(void **);
int cublasSetStream_v2(void *, void *);
int cublasSgemm_v2(void *, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                   void *, int);
int cuDeviceGetAttribute(int *, int, int);

static char host_functions[16];
static void *stream, *graph, *executable, *blas, *memory;
static long turns;

static int launch(long kernel, void *on) {
    struct cuda_dim grid = {(unsigned)kernel + 1, 2, 3}, block = {32, (unsigned)kernel + 1, 1};
    return cudaLaunchKernel(&host_functions[kernel], grid, block, NULL, (size_t)(kernel * 100), on);
}

static int launch_by_handle(long kernel) {
    struct cuda_dim grid = {(unsigned)kernel + 1, 2, 3}, block = {32, (unsigned)kernel + 1, 1};
    void *handle;
    int code = __cudaGetKernel(&handle, &host_functions[kernel]);
    return code ? code : __cudaLaunchKernel(handle, grid, block, NULL, 0, stream);
}

static int launch_cluster(long kernel) {
    struct cuda_launch_attribute attribute = {CUDA_LAUNCH_CLUSTER_DIMENSION, 0, {.cluster = {4, 2, 1}}};
    struct cuda_launch_configuration configuration = {{8, 8, 1}, {64, 1, 1}, 512, stream, &attribute, 1};
    return cudaLaunchKernelExC(&configuration, &host_functions[kernel], NULL);
}

/* Each thread has a kernel, a device and a stream of its own. */
static void *work(void *argument) {
    long self = (long)(intptr_t)argument;
    void *own;
    cudaSetDevice((int)self);
    cudaStreamCreateWithFlags(&own, 1);
    for (long i = 0; i < turns; i++) {
        launch(self, own);
        cudaGetLastError();
    }
    cudaStreamDestroy(own);
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

static void *wait_for_event(void *event) {
    cudaEventSynchronize(event);
    return NULL;
}

/* One thread begins to wait, then another launches. */
static int launch_while_waiting(long kernel) {
    static _Atomic int event;
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_event, (void *)&event);
    while (!event) {
    }
    int code = launch(kernel, stream);
    pthread_join(thread, NULL);
    return code;
}

static int read_at(long offset) {
    return ((volatile char *)memory)[offset] & 1;
}

static int live(void) {
    struct isolate_live bound;
    isolate_trace_live(&bound);
    printf("libraries=%u hooked=%u unrecorded=%u uncovered=%u elsewhere=%u unresolved=%u\n", bound.libraries,
           bound.hooked, bound.unrecorded, bound.uncovered, bound.elsewhere, bound.unresolved);
    return 0;
}

static int perform(const char *call, long value, long second) {
    int number;
#define IS(name) !strcmp(call, name)
    if (IS("launch")) return launch(value, stream);
    if (IS("launch-while-waiting")) return launch_while_waiting(value);
    if (IS("handle")) return launch_by_handle(value);
    if (IS("cluster")) return launch_cluster(value);
    if (IS("unnamed")) return cudaLaunchKernel(&turns, (struct cuda_dim){1, 1, 1}, (struct cuda_dim){1, 1, 1}, NULL, 0, stream);
    if (IS("copy")) return cudaMemcpyAsync(memory, memory, (size_t)value, CUDA_COPY_DEVICE_TO_DEVICE, stream);
    if (IS("set")) return cudaMemset(memory, (int)second, (size_t)value);
    if (IS("malloc")) return cudaMalloc(&memory, (size_t)value);
    if (IS("free")) return cudaFree(memory);
    if (IS("synchronize")) return cudaStreamSynchronize(stream);
    if (IS("device-synchronize")) return cudaDeviceSynchronize();
    if (IS("stream")) return cudaStreamCreateWithFlags(&stream, 1);
    if (IS("begin-capture")) return cudaStreamBeginCapture(stream, (int)value);
    if (IS("end-capture")) return cudaStreamEndCapture(stream, &graph);
    if (IS("instantiate")) return cudaGraphInstantiate(&executable, graph, 0);
    if (IS("update")) return cudaGraphExecUpdate(executable, graph, NULL);
    if (IS("graph")) return cudaGraphLaunch(executable, stream);
    if (IS("device")) return cudaSetDevice((int)value);
    if (IS("last")) return cudaGetLastError();
    if (IS("peek")) return cudaPeekAtLastError();
    if (IS("blas")) return cublasCreate_v2(&blas) | cublasSetStream_v2(blas, stream);
    if (IS("gemm")) return cublasSgemm_v2(blas, 0, 0, 2, 3, 4, NULL, NULL, 2, NULL, 4, NULL, NULL, 2);
    if (IS("vmm")) return cuDeviceGetAttribute(&number, CUDA_DEVICE_VIRTUAL_MEMORY, 0) ? -1 : number;
#ifndef ALL_HOOKED
    if (IS("invented")) return cudaInventedCall();
#endif
    if (IS("query")) return cudaStreamQuery(stream);
    if (IS("text")) return !cudaGetErrorString((int)value);
    if (IS("turns")) return turns = value, 0;
    if (IS("threads")) return run_threads(value);
    if (IS("read")) return read_at(value);
    if (IS("poisoned")) return ((unsigned char *)memory)[value] == 0xff;
    if (IS("live")) return live();
    if (IS("pass")) return isolate_trace_pass(value), 0;
    if (IS("mode")) return isolate_trace_mode((uint32_t)value, 0, 0), 0;
    if (IS("inject-launch")) return isolate_trace_inject(ISOLATE_LAUNCH, (uint64_t)value, (int32_t)second), 0;
    if (IS("inject-copy")) return isolate_trace_inject(ISOLATE_COPY, (uint64_t)value, (int32_t)second), 0;
    if (IS("inject-graph")) return isolate_trace_inject(ISOLATE_GRAPH, (uint64_t)value, (int32_t)second), 0;
    if (IS("inject-blas")) return isolate_trace_inject(ISOLATE_BLAS, (uint64_t)value, (int32_t)second), 0;
    if (IS("abort")) return isolate_on_abort("file.cu:12: CUDA error"), abort(), 0;
    fprintf(stderr, "no such call: %s\n", call);
    exit(2);
}

int main(int count, char **arguments) {
    static char names[16][32];
    void **binary = __cudaRegisterFatBinary(NULL);
    for (int i = 0; i < 16; i++) {
        snprintf(names[i], sizeof names[i], "_Z7kernel%xIfEvPfi", i);
        __cudaRegisterFunction(binary, &host_functions[i], names[i], names[i], -1, NULL, NULL, NULL, NULL, NULL);
    }
    for (int i = 1; i < count; i++) {
        char call[64];
        long value = 0, second = 0;
        sscanf(arguments[i], "%63[^:]:%ld:%ld", call, &value, &second);
        printf("%s %d\n", arguments[i], perform(call, value, second));
        fflush(stdout);
    }
    free(stream);
    return 0;
}
