/* A stand-in CUDA runtime: see standin.h. */
#include "cuda_abi.h"
#include "standin.h"

static _Thread_local int last, device;
static _Atomic int sticky, pending, capturing;

static int answer(struct count *count) {
    bool later = false;
    int code = demanded(count, &later);
    if (later) {
        pending = code;
        code = 0;
    }
    code = sticky ? sticky : code;
    last = code ? code : last;
    return code;
}

static int synchronize(struct count *count) {
    if (pending) {
        sticky = pending;
    }
    return answer(count);
}

#define CALL(name, parameters, result, ...)             \
    int name parameters {                                \
        static struct count count = {#name, 0};          \
        __VA_ARGS__;                                     \
        return result(&count);                           \
    }

static char *kernels[64];

void __cudaRegisterFunction(void **binary, const char *host, char *dev, const char *name, int threads, void *a, void *b,
                            void *c, void *d, int *e) {
    (void)binary, (void)host, (void)dev, (void)name, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
}

void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    return (void **)kernels;
}

CALL(__cudaGetKernel, (void **kernel, const void *host), answer, *kernel = (void *)((uintptr_t)host + 4096))
CALL(cudaFuncGetName, (const char **name, const void *function), answer, (void)function; *name = "_Z7unnamedv")
CALL(cudaLaunchKernel,
     (const void *f, struct cuda_dim grid, struct cuda_dim block, void **values, size_t shared, void *stream), answer,
     (void)f; (void)grid; (void)block; (void)values; (void)shared; (void)stream)
CALL(__cudaLaunchKernel,
     (void *f, struct cuda_dim grid, struct cuda_dim block, void **values, size_t shared, void *stream), answer,
     (void)f; (void)grid; (void)block; (void)values; (void)shared; (void)stream)
CALL(cudaLaunchKernelExC, (const void *configuration, const void *f, void **values), answer, (void)configuration;
     (void)f; (void)values)
CALL(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, int direction, void *stream), answer, (void)to;
     (void)from; (void)bytes; (void)direction; (void)stream)
CALL(cudaMemset, (void *to, int value, size_t bytes), answer, memset(to, value, bytes))
CALL(cudaMalloc, (void **pointer, size_t bytes), answer, *pointer = calloc(1, bytes))
CALL(cudaFree, (void *pointer), answer, free(pointer))
/* Not ready for some time, and that is the last error then. */
int cudaStreamQuery(void *stream) {
    static struct count count = {"cudaStreamQuery", 0};
    static _Thread_local int asked;
    (void)stream;
    if (++asked % 3) {
        return last = CUDA_ERROR_NOT_READY;
    }
    return synchronize(&count);
}

/* The event, an _Atomic int, is set when the wait begins, which ends when the device is broken. */
CALL(cudaEventSynchronize, (void *event), answer, *(_Atomic int *)event = 1; while (!sticky) {})
CALL(cudaStreamSynchronize, (void *stream), synchronize, (void)stream)
CALL(cudaDeviceSynchronize, (void), synchronize, (void)0)
CALL(cudaStreamCreateWithFlags, (void **stream, unsigned flags), answer, (void)flags; *stream = malloc(1))
CALL(cudaStreamDestroy, (void *stream), answer, free(stream))
CALL(cudaStreamBeginCapture, (void *stream, int mode), answer, (void)stream; (void)mode; capturing = 1)
CALL(cudaStreamEndCapture, (void *stream, void **graph), answer, (void)stream; *graph = kernels; capturing = 0)
CALL(cudaStreamIsCapturing, (void *stream, int *status), answer, (void)stream; *status = capturing)
CALL(cudaGraphInstantiate, (void **executable, void *graph, unsigned long long flags), answer, (void)graph; (void)flags;
     *executable = kernels)
CALL(cudaGraphExecUpdate, (void *executable, void *graph, void *result), answer, (void)executable; (void)graph;
     (void)result)
CALL(cudaGraphLaunch, (void *executable, void *stream), answer, (void)executable; (void)stream)
CALL(cudaGetDeviceCount, (int *count_), answer, *count_ = 2)
CALL(cudaSetDevice, (int ordinal), answer, device = ordinal)
CALL(cudaGetDevice, (int *ordinal), answer, *ordinal = device)
CALL(cudaDeviceCanAccessPeer, (int *can, int a, int b), answer, (void)a; (void)b; *can = 0)

int cudaFuncGetAttributes(struct cuda_function_attributes *attributes, const void *function) {
    static struct count count = {"cudaFuncGetAttributes", 0};
    (void)function;
    attributes->shared = 4096;
    attributes->max_threads = 160;
    attributes->registers = 42;
    attributes->ptx = 80;
    attributes->binary = 90;
    attributes->max_dynamic_shared = 49152;
    return answer(&count);
}

int cudaDeviceGetAttribute(int *value, int attribute, int ordinal) {
    static struct count count = {"cudaDeviceGetAttribute", 0};
    (void)ordinal;
    *value = attribute == CUDA_DEVICE_MAJOR ? 9 : attribute == CUDA_DEVICE_MINOR ? 0 : 1000 + attribute;
    return answer(&count);
}

int cudaGetLastError(void) {
    int code = last;
    last = 0;
    return code;
}

int cudaPeekAtLastError(void) {
    return last;
}

const char *cudaGetErrorString(int code) {
    return code ? "an error" : "no error";
}

/* Not in any toolkit: for a build that imports what no hook covers. */
CALL(cudaInventedCall, (void), answer, (void)0)
