/* Hooks of streams, events, synchronizes and CUDA graphs, and which streams are being captured. */
#include "hooks.h"

#include <pthread.h>

#define CAPTURES 64

static struct {
    void *stream;
    int mode;
} captures[CAPTURES];
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
/* Streams being captured, and those among them in a mode that forbids other threads to synchronize. */
static _Atomic int capturing, strict;

void isolate_capture_begins(void *stream, int mode) {
    pthread_mutex_lock(&capture_lock);
    for (int i = 0; i < CAPTURES; i++) {
        if (!captures[i].stream) {
            captures[i].stream = stream;
            captures[i].mode = mode;
            atomic_fetch_add(&capturing, 1);
            atomic_fetch_add(&strict, mode == CUDA_CAPTURE_GLOBAL);
            break;
        }
    }
    pthread_mutex_unlock(&capture_lock);
}

void isolate_capture_ends(const void *stream) {
    pthread_mutex_lock(&capture_lock);
    for (int i = 0; stream && i < CAPTURES; i++) {
        if (captures[i].stream == stream) {
            captures[i].stream = NULL;
            atomic_fetch_sub(&capturing, 1);
            atomic_fetch_sub(&strict, captures[i].mode == CUDA_CAPTURE_GLOBAL);
            break;
        }
    }
    pthread_mutex_unlock(&capture_lock);
}

bool isolate_captured(const void *stream) {
    bool found = false;
    pthread_mutex_lock(&capture_lock);
    for (int i = 0; stream && i < CAPTURES; i++) {
        found = found || captures[i].stream == stream;
    }
    pthread_mutex_unlock(&capture_lock);
    return found;
}

bool isolate_any_capture(void) {
    return atomic_load_explicit(&capturing, memory_order_relaxed) > 0;
}

static void capture_begins(void *stream, int mode, int code) {
    if (!code) {
        isolate_capture_begins(stream, mode);
    }
}

/* An injected fault did not end it; where the runtime refuses, it is over all the same. */
static void capture_ends(const struct isolate_call *call, const void *stream) {
    if (!call->record.injected) {
        isolate_capture_ends(stream);
    }
}

/* The default stream cannot be captured, and asking about it during a capture is an error. */
bool isolate_capturing(void *stream) {
    if (!isolate_any_capture() || !stream) {
        return false;
    }
    int (*ask)(void *, int *) = FIND("cudaStreamIsCapturing", void *, int *);
    int status = CUDA_CAPTURE_NONE;
    return ask && !ask(stream, &status) && status != CUDA_CAPTURE_NONE;
}

bool isolate_may_synchronize(void *stream) {
    return !isolate_any_capture()
        || (stream && !atomic_load(&strict) && !isolate_capturing(stream));
}

static void on(struct isolate_call *call, const void *stream, const void *other) {
    call->record.stream = (uint64_t)(uintptr_t)stream;
    call->record.detail.words[0] = (uint64_t)(uintptr_t)other;
}

static void made(struct isolate_call *call, void *const *handle, int code) {
    call->record.detail.words[0] = code ? 0 : (uint64_t)(uintptr_t)*handle;
}

HOOK(cudaStreamCreate, (void **stream), (stream), ISOLATE_STREAM, 0, NOTHING, made(&call, stream, code))
HOOK(cudaStreamCreateWithFlags, (void **stream, unsigned flags), (stream, flags), ISOLATE_STREAM, 0, NOTHING,
     made(&call, stream, code))
HOOK(cudaStreamCreateWithPriority, (void **stream, unsigned flags, int priority), (stream, flags, priority),
     ISOLATE_STREAM, 0, NOTHING, made(&call, stream, code))
HOOK(cudaStreamDestroy, (void *stream), (stream), ISOLATE_STREAM, 0, on(&call, stream, NULL), NOTHING)
HOOK(cudaStreamWaitEvent, (void *stream, void *event, unsigned flags), (stream, event, flags), ISOLATE_STREAM, 0,
     on(&call, stream, event), NOTHING)
QUIET_HOOK(cudaStreamQuery, (void *stream), (stream), ISOLATE_STREAM, on(&call, stream, NULL))
HOOK(cudaLaunchHostFunc, (void *stream, void *function, void *data), (stream, function, data), ISOLATE_STREAM, 0,
     on(&call, stream, function), NOTHING)

HOOK(cudaEventCreate, (void **event), (event), ISOLATE_STREAM, 0, NOTHING, made(&call, event, code))
HOOK(cudaEventCreateWithFlags, (void **event, unsigned flags), (event, flags), ISOLATE_STREAM, 0, NOTHING,
     made(&call, event, code))
HOOK(cudaEventDestroy, (void *event), (event), ISOLATE_STREAM, 0, on(&call, NULL, event), NOTHING)
HOOK(cudaEventRecord, (void *event, void *stream), (event, stream), ISOLATE_STREAM, 0, on(&call, stream, event),
     NOTHING)
HOOK(cudaEventRecordWithFlags, (void *event, void *stream, unsigned flags), (event, stream, flags), ISOLATE_STREAM, 0,
     on(&call, stream, event), NOTHING)
QUIET_HOOK(cudaEventQuery, (void *event), (event), ISOLATE_STREAM, on(&call, NULL, event))
QUIET_HOOK(cudaEventElapsedTime, (float *milliseconds, void *start, void *end), (milliseconds, start, end),
           ISOLATE_STREAM, on(&call, NULL, end))

HOOK(cudaEventSynchronize, (void *event), (event), ISOLATE_SYNC, 0, on(&call, NULL, event), NOTHING)
HOOK(cudaStreamSynchronize, (void *stream), (stream), ISOLATE_SYNC, 0, on(&call, stream, NULL), NOTHING)
HOOK(cudaDeviceSynchronize, (void), (), ISOLATE_SYNC, 0, NOTHING, NOTHING)

QUIET_HOOK(cudaStreamIsCapturing, (void *stream, int *status), (stream, status), ISOLATE_GRAPH,
           on(&call, stream, NULL))
HOOK(cudaStreamBeginCapture, (void *stream, int mode), (stream, mode), ISOLATE_GRAPH, CHECKED, on(&call, stream, NULL),
     capture_begins(stream, mode, code))
HOOK(cudaStreamEndCapture, (void *stream, void **graph), (stream, graph), ISOLATE_GRAPH, CHECKED,
     on(&call, stream, NULL), capture_ends(&call, stream))
HOOK(cudaGraphInstantiate, (void **executable, void *graph, unsigned long long flags), (executable, graph, flags),
     ISOLATE_GRAPH, CHECKED, on(&call, NULL, graph), isolate_count_graphs(!code))
HOOK(cudaGraphInstantiateWithFlags, (void **executable, void *graph, unsigned long long flags),
     (executable, graph, flags), ISOLATE_GRAPH, CHECKED, on(&call, NULL, graph), isolate_count_graphs(!code))
HOOK(cudaGraphExecUpdate, (void *executable, void *graph, void *result), (executable, graph, result), ISOLATE_GRAPH,
     CHECKED, on(&call, NULL, executable), NOTHING)
HOOK(cudaGraphLaunch, (void *executable, void *stream), (executable, stream), ISOLATE_GRAPH, CHECKED | QUEUES,
     on(&call, stream, executable), isolate_count_graph_launch())
HOOK(cudaGraphDestroy, (void *graph), (graph), ISOLATE_GRAPH, 0, on(&call, NULL, graph), NOTHING)
HOOK(cudaGraphExecDestroy, (void *executable), (executable), ISOLATE_GRAPH, 0, on(&call, NULL, executable),
     isolate_count_graphs(code ? 0 : -1))
/* llama.cpp before 2025-05 edited the nodes of a graph. */
QUIET_HOOK(cudaGraphGetNodes, (void *graph, void **nodes, size_t *count), (graph, nodes, count), ISOLATE_GRAPH,
           on(&call, NULL, graph))
QUIET_HOOK(cudaGraphNodeGetType, (void *node, int *type), (node, type), ISOLATE_GRAPH, on(&call, NULL, node))
QUIET_HOOK(cudaGraphKernelNodeGetParams, (void *node, void *values), (node, values), ISOLATE_GRAPH,
           on(&call, NULL, node))
QUIET_HOOK(cudaGraphKernelNodeSetParams, (void *node, const void *values), (node, values), ISOLATE_GRAPH,
           on(&call, NULL, node))
