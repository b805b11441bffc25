/* libcudart: streams, events, capture and graphs. */
#include "dry.h"

DRY_API int cudaStreamCreate(void **stream) {
    RUN(dry_stream_create(stream, 0, 0));
}

DRY_API int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    RUN(dry_stream_create(stream, flags, 0));
}

DRY_API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    RUN(dry_stream_create(stream, flags, priority));
}

DRY_API int cudaStreamDestroy(void *stream) {
    RUN(dry_stream_destroy(stream));
}

DRY_API int cudaStreamSynchronize(void *stream) {
    RUN(dry_stream_synchronize(stream));
}

DRY_API int cudaStreamQuery(void *stream) {
    RUN(dry_stream_query(stream));
}

DRY_API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    RUN(dry_stream_wait(stream, event));
}

DRY_API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    RUN(dry_host_function(stream, function, data));
}

DRY_API int cudaStreamBeginCapture(void *stream, int mode) {
    RUN(dry_capture_begin(stream, mode));
}

DRY_API int cudaStreamEndCapture(void *stream, void **graph) {
    RUN(dry_capture_end(stream, graph));
}

DRY_API int cudaStreamIsCapturing(void *stream, int *status) {
    RUN(dry_capture_status(stream, status));
}

DRY_API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    RUN(dry_exchange_capture_mode(mode));
}

DRY_API int cudaEventCreate(void **event) {
    RUN(dry_event_create(event, 0));
}

DRY_API int cudaEventCreateWithFlags(void **event, unsigned flags) {
    RUN(dry_event_create(event, flags));
}

DRY_API int cudaEventDestroy(void *event) {
    RUN(dry_event_destroy(event));
}

DRY_API int cudaEventRecord(void *event, void *stream) {
    RUN(dry_event_record(event, stream));
}

DRY_API int cudaEventSynchronize(void *event) {
    RUN(dry_event_synchronize(event));
}

DRY_API int cudaEventQuery(void *event) {
    RUN(dry_event_query(event));
}

DRY_API int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
    RUN(dry_event_elapsed(milliseconds, start, end));
}

DRY_API int cudaGraphCreate(void **graph, unsigned flags) {
    (void)flags;
    RUN(dry_graph_create(graph));
}

DRY_API int cudaGraphDestroy(void *graph) {
    RUN(dry_graph_destroy(graph));
}

DRY_API int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    RUN(dry_graph_instantiate(executable, graph));
}

DRY_API int cudaGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    (void)flags;
    RUN(dry_graph_instantiate(executable, graph));
}

DRY_API int cudaGraphExecDestroy(void *executable) {
    RUN(dry_graph_exec_destroy(executable));
}

struct update_result {
    int result;
    void *node, *from;
};

DRY_API int cudaGraphExecUpdate(void *executable, void *graph, struct update_result *result) {
    int unused;
    if (result) {
        *result = (struct update_result){0};
    }
    RUN(dry_graph_update(executable, graph, result ? &result->result : &unused));
}

DRY_API int cudaGraphLaunch(void *executable, void *stream) {
    RUN(dry_graph_launch(executable, stream));
}
