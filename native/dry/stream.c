/* Streams and events. The device does everything at once, so a stream is never busy; what is kept is what the host can ask:
 * handles, capture, the time of events. */
#define _GNU_SOURCE
#include "dry.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NON_BLOCKING 1u
#define DISABLE_TIMING 2u

struct dry_event {
    int device;
    unsigned flags;
    bool recorded;
    double milliseconds;
    unsigned long long capture; /* the capture it was recorded in, 0 for none */
    int *frontier;
    size_t frontier_count;
    struct dry_event *next;
};

struct host_call {
    void (*function)(void *);
    void *data;
    struct host_call *next;
};

static struct dry_stream *streams;
static struct dry_event *events;
static struct dry_stream standard[DRY_MOST_DEVICES], per_thread[DRY_MOST_DEVICES];
static _Thread_local struct host_call *host_calls;

static bool is_standard(const struct dry_stream *stream) {
    return stream >= standard && stream < standard + DRY_MOST_DEVICES;
}

struct dry_stream *dry_streams(void) {
    return streams;
}

struct dry_stream *dry_stream(void *handle) {
    int device = dry_thread.device;
    /* The runtime's own numbers: 0 and 1 are the legacy stream, 2 the thread's. */
    if ((uintptr_t)handle <= 2) {
        struct dry_stream *stream = (uintptr_t)handle == 2 ? &per_thread[device] : &standard[device];
        stream->device = device;
        return stream;
    }
    for (struct dry_stream *stream = streams; stream; stream = stream->next) {
        if (stream == handle) {
            return stream;
        }
    }
    dry_refuse(CUDA_ERROR_INVALID_HANDLE, "%p is not a stream, or is one that was destroyed", handle);
    return NULL;
}

int dry_stream_create(void **handle, unsigned flags, int priority) {
    if (!handle || flags & ~NON_BLOCKING) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaStreamCreate: flags %#x", flags);
    }
    if (dry.devices == 0) {
        return dry_refuse(CUDA_ERROR_NO_DEVICE, "cudaStreamCreate: there is no device");
    }
    struct dry_stream *stream = calloc(1, sizeof *stream);
    if (!stream) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a stream");
    }
    *stream = (struct dry_stream){.device = dry_thread.device, .flags = flags, .priority = priority, .next = streams};
    streams = stream;
    *handle = stream;
    return CUDA_SUCCESS;
}

int dry_stream_destroy(void *handle) {
    for (struct dry_stream **place = &streams; *place; place = &(*place)->next) {
        struct dry_stream *stream = *place;
        if (stream == handle) {
            *place = stream->next;
            dry_capture_abandon(stream);
            free(stream->frontier);
            free(stream);
            return CUDA_SUCCESS;
        }
    }
    return dry_refuse(CUDA_ERROR_INVALID_HANDLE, "cudaStreamDestroy: %p is not a stream, or is one that was destroyed", handle);
}

/* A legacy stream waits for the blocking ones; while one of them captures, that cannot be. */
int dry_legacy_conflict(const struct dry_stream *stream, const char *call) {
    if (!is_standard(stream)) {
        return CUDA_SUCCESS;
    }
    for (struct dry_stream *other = streams; other; other = other->next) {
        if (other->device == stream->device && !(other->flags & NON_BLOCKING) && dry_capturing(other)) {
            dry_invalidate(other->capture);
            return dry_refuse(DRY_CAPTURE_IMPLICIT, "%s: the legacy stream would wait for a stream that is capturing", call);
        }
    }
    return CUDA_SUCCESS;
}

int dry_stream_synchronize(void *handle) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (dry_capturing(stream)) {
        dry_invalidate(stream->capture);
        return dry_refuse(CUDA_ERROR_CAPTURE_UNSUPPORTED, "cudaStreamSynchronize: the stream is capturing");
    }
    int code = dry_legacy_conflict(stream, "cudaStreamSynchronize");
    return code ? code : dry_synchronized(stream->device);
}

int dry_stream_query(void *handle) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (dry_capturing(stream)) {
        dry_invalidate(stream->capture);
        return dry_refuse(CUDA_ERROR_CAPTURE_UNSUPPORTED, "cudaStreamQuery: the stream is capturing");
    }
    return dry_synchronized(stream->device);
}

int dry_device_synchronize(void) {
    for (struct dry_stream *stream = streams; stream; stream = stream->next) {
        if (stream->device == dry_thread.device && dry_capturing(stream)) {
            dry_invalidate(stream->capture);
            return dry_refuse(CUDA_ERROR_CAPTURE_UNSUPPORTED, "cudaDeviceSynchronize: a stream is capturing");
        }
    }
    return dry_synchronized(dry_thread.device);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

static struct dry_event *event_of(void *handle) {
    for (struct dry_event *event = events; event; event = event->next) {
        if (event == handle) {
            return event;
        }
    }
    dry_refuse(CUDA_ERROR_INVALID_HANDLE, "%p is not an event, or is one that was destroyed", handle);
    return NULL;
}

int dry_event_create(void **handle, unsigned flags) {
    if (!handle || flags > 7) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaEventCreateWithFlags: flags %#x", flags);
    }
    struct dry_event *event = calloc(1, sizeof *event);
    if (!event) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for an event");
    }
    *event = (struct dry_event){.device = dry_thread.device, .flags = flags, .next = events};
    events = event;
    *handle = event;
    return CUDA_SUCCESS;
}

int dry_event_destroy(void *handle) {
    for (struct dry_event **place = &events; *place; place = &(*place)->next) {
        struct dry_event *event = *place;
        if (event == handle) {
            *place = event->next;
            free(event->frontier);
            free(event);
            return CUDA_SUCCESS;
        }
    }
    return dry_refuse(CUDA_ERROR_INVALID_HANDLE, "cudaEventDestroy: %p is not an event, or is one that was destroyed", handle);
}

int dry_event_record(void *handle, void *stream_handle) {
    struct dry_event *event = event_of(handle);
    struct dry_stream *stream = dry_stream(stream_handle);
    if (!event || !stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->device != stream->device) {
        return dry_refuse(CUDA_ERROR_INVALID_HANDLE, "cudaEventRecord: the event is of device %d, the stream of device %d",
                          event->device, stream->device);
    }
    free(event->frontier);
    event->frontier = NULL;
    event->frontier_count = 0;
    event->capture = dry_capture_id(stream);
    if (event->capture && stream->frontier_count) {
        event->frontier = malloc(stream->frontier_count * sizeof *event->frontier);
        if (!event->frontier) {
            return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for an event");
        }
        memcpy(event->frontier, stream->frontier, stream->frontier_count * sizeof *event->frontier);
        event->frontier_count = stream->frontier_count;
    }
    event->recorded = true;
    event->milliseconds = now();
    return CUDA_SUCCESS;
}

static int captured_event(struct dry_event *event, const char *call) {
    struct dry_capture *capture = dry_capture_alive(event->capture);
    if (capture) {
        dry_invalidate(capture);
        return dry_refuse(DRY_CAPTURED_EVENT, "%s: the event was last recorded in a stream that is capturing", call);
    }
    return CUDA_SUCCESS;
}

int dry_event_synchronize(void *handle) {
    struct dry_event *event = event_of(handle);
    if (!event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    int code = captured_event(event, "cudaEventSynchronize");
    return code ? code : dry_synchronized(event->device);
}

int dry_event_query(void *handle) {
    struct dry_event *event = event_of(handle);
    if (!event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    int code = captured_event(event, "cudaEventQuery");
    return code ? code : dry_synchronized(event->device);
}

int dry_event_elapsed(float *milliseconds, void *start_handle, void *end_handle) {
    struct dry_event *start = event_of(start_handle), *end = event_of(end_handle);
    if (!start || !end) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!milliseconds || (start->flags | end->flags) & DISABLE_TIMING || !start->recorded || !end->recorded) {
        return dry_refuse(CUDA_ERROR_INVALID_HANDLE, "cudaEventElapsedTime: an event has no time, or was never recorded");
    }
    *milliseconds = (float)(end->milliseconds - start->milliseconds);
    return CUDA_SUCCESS;
}

int dry_stream_wait(void *stream_handle, void *event_handle) {
    struct dry_stream *stream = dry_stream(stream_handle);
    struct dry_event *event = event_of(event_handle);
    if (!stream || !event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    struct dry_capture *capture = dry_capture_alive(event->capture);
    if (capture) {
        return dry_join(stream, capture, event->frontier, event->frontier_count);
    }
    if (dry_capturing(stream) && event->recorded) {
        dry_invalidate(stream->capture);
        return dry_refuse(DRY_CAPTURE_ISOLATION, "cudaStreamWaitEvent: the stream is capturing, the event was recorded outside");
    }
    return CUDA_SUCCESS;
}

void dry_queue_host_function(void (*function)(void *), void *data) {
    struct host_call *call = malloc(sizeof *call);
    if (!call) {
        return;
    }
    *call = (struct host_call){function, data, NULL};
    struct host_call **place = &host_calls;
    while (*place) {
        place = &(*place)->next;
    }
    *place = call;
}

void dry_run_host_functions(void) {
    while (host_calls) {
        struct host_call *call = host_calls;
        host_calls = call->next;
        call->function(call->data);
        free(call);
    }
}

int dry_host_function(void *handle, void (*function)(void *), void *data) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!function) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaLaunchHostFunc: no function");
    }
    int code = dry_into_graph(stream, &(struct dry_node){.kind = DRY_NODE_HOST, .host = function, .data = data}, "cudaLaunchHostFunc");
    if (code == DRY_NOT_CAPTURING) {
        dry_queue_host_function(function, data);
        return CUDA_SUCCESS;
    }
    return code;
}
