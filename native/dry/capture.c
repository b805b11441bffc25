/* Capture: a stream's work becomes the nodes of a graph instead of being done. */
#define _GNU_SOURCE
#include "dry.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct dry_capture {
    unsigned long long id;
    int mode;
    pthread_t thread;
    struct dry_stream *origin;
    struct dry_graph *graph;
    bool invalid;
    struct dry_capture *next;
};

static struct dry_capture *captures;
static unsigned long long last_id;

bool dry_capturing(const struct dry_stream *stream) {
    return stream->capture != NULL;
}

void dry_invalidate(struct dry_capture *capture) {
    if (capture) {
        capture->invalid = true;
    }
}

unsigned long long dry_capture_id(const struct dry_stream *stream) {
    return stream->capture ? stream->capture->id : 0;
}

struct dry_capture *dry_capture_alive(unsigned long long id) {
    struct dry_capture *capture = captures;
    while (capture && capture->id != id) {
        capture = capture->next;
    }
    return capture;
}

static bool set_frontier(struct dry_stream *stream, const int *nodes, size_t count) {
    int *frontier = NULL;
    if (count) {
        frontier = malloc(count * sizeof *frontier);
        if (!frontier) {
            return false;
        }
        memcpy(frontier, nodes, count * sizeof *frontier);
    }
    free(stream->frontier);
    stream->frontier = frontier;
    stream->frontier_count = count;
    return true;
}

static int invalidated(const char *call) {
    return dry_refuse(CUDA_ERROR_CAPTURE_INVALIDATED, "%s: an earlier error ended the capture", call);
}

int dry_into_graph(struct dry_stream *stream, const struct dry_node *node, const char *call) {
    if (!stream->capture) {
        return DRY_NOT_CAPTURING;
    }
    if (stream->capture->invalid) {
        return invalidated(call);
    }
    struct dry_node placed = *node;
    placed.after = stream->frontier;
    placed.after_count = stream->frontier_count;
    int number = dry_graph_add(stream->capture->graph, &placed);
    if (number < 0 || !set_frontier(stream, &number, 1)) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a graph");
    }
    return CUDA_SUCCESS;
}

int dry_capture_begin(void *handle, int mode) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (mode < CUDA_CAPTURE_GLOBAL || mode > CUDA_CAPTURE_RELAXED) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaStreamBeginCapture: there is no mode %d", mode);
    }
    if ((uintptr_t)handle <= 1) {
        return dry_refuse(CUDA_ERROR_CAPTURE_UNSUPPORTED, "cudaStreamBeginCapture: the legacy stream cannot capture");
    }
    if (stream->capture) {
        return dry_refuse(DRY_ILLEGAL_STATE, "cudaStreamBeginCapture: the stream is capturing already");
    }
    struct dry_capture *capture = calloc(1, sizeof *capture);
    struct dry_graph *graph = dry_graph_new();
    if (!capture || !graph) {
        free(capture);
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a graph");
    }
    *capture = (struct dry_capture){
        .id = ++last_id, .mode = mode, .thread = pthread_self(), .origin = stream, .graph = graph, .next = captures};
    captures = capture;
    stream->capture = capture;
    set_frontier(stream, NULL, 0);
    return CUDA_SUCCESS;
}

int dry_join(struct dry_stream *stream, struct dry_capture *capture, const int *frontier, size_t count) {
    if (capture->invalid) {
        return invalidated("cudaStreamWaitEvent");
    }
    if (stream->capture && stream->capture != capture) {
        dry_invalidate(stream->capture);
        dry_invalidate(capture);
        return dry_refuse(DRY_CAPTURE_MERGE, "cudaStreamWaitEvent: the event and the stream are in different captures");
    }
    stream->capture = capture;
    int *both = malloc((stream->frontier_count + count + 1) * sizeof *both);
    if (!both) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a graph");
    }
    size_t total = 0;
    for (size_t i = 0; i < stream->frontier_count; i++) {
        both[total++] = stream->frontier[i];
    }
    for (size_t i = 0; i < count; i++) {
        bool there = false;
        for (size_t j = 0; j < total; j++) {
            there |= both[j] == frontier[i];
        }
        if (!there) {
            both[total++] = frontier[i];
        }
    }
    bool kept = set_frontier(stream, both, total);
    free(both);
    return kept ? CUDA_SUCCESS : dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a graph");
}

/* Takes a stream out of the capture it is in; false where it did work that the origin does not come after. */
static bool leave(struct dry_stream *stream, struct dry_capture *capture) {
    if (stream->capture != capture) {
        return true;
    }
    bool joined = true;
    for (size_t i = 0; i < stream->frontier_count; i++) {
        joined &= dry_graph_reaches(capture->graph, capture->origin->frontier, capture->origin->frontier_count, stream->frontier[i]);
    }
    stream->capture = NULL;
    return joined;
}

static void forget(struct dry_capture *capture) {
    struct dry_capture **place = &captures;
    while (*place != capture) {
        place = &(*place)->next;
    }
    *place = capture->next;
    free(capture);
}

int dry_capture_end(void *handle, void **graph) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    struct dry_capture *capture = stream->capture;
    if (!capture || !graph) {
        return dry_refuse(graph ? DRY_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE, "cudaStreamEndCapture: the stream is not capturing");
    }
    *graph = NULL;
    if (capture->mode != CUDA_CAPTURE_RELAXED && !pthread_equal(capture->thread, pthread_self())) {
        return dry_refuse(DRY_CAPTURE_WRONG_THREAD, "cudaStreamEndCapture: another thread began this capture");
    }
    if (capture->origin != stream) {
        dry_invalidate(capture);
        return dry_refuse(CUDA_ERROR_CAPTURE_UNMATCHED, "cudaStreamEndCapture: the capture began in another stream");
    }
    bool joined = true;
    for (struct dry_stream *other = dry_streams(); other; other = other->next) {
        if (other != stream) {
            joined &= leave(other, capture);
        }
    }
    stream->capture = NULL;
    bool invalid = capture->invalid;
    struct dry_graph *captured = capture->graph;
    forget(capture);
    if (invalid || !joined) {
        dry_graph_destroy(captured);
        return invalid ? invalidated("cudaStreamEndCapture")
                       : dry_refuse(DRY_CAPTURE_UNJOINED, "cudaStreamEndCapture: another stream of the capture was not waited for");
    }
    *graph = captured;
    return CUDA_SUCCESS;
}

/* A stream goes away while it captures: the capture cannot be ended any more. */
void dry_capture_abandon(struct dry_stream *stream) {
    struct dry_capture *capture = stream->capture;
    if (!capture || capture->origin != stream) {
        dry_invalidate(capture);
        return;
    }
    for (struct dry_stream *other = dry_streams(); other; other = other->next) {
        if (other->capture == capture) {
            other->capture = NULL;
        }
    }
    dry_graph_destroy(capture->graph);
    forget(capture);
}

int dry_capture_status(void *handle, int *status) {
    struct dry_stream *stream = dry_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    struct dry_capture *capture = stream->capture;
    *status = !capture ? CUDA_CAPTURE_NONE : capture->invalid ? CUDA_CAPTURE_STATUS_INVALIDATED : CUDA_CAPTURE_ACTIVE;
    return CUDA_SUCCESS;
}

int dry_exchange_capture_mode(int *mode) {
    if (!mode || *mode < CUDA_CAPTURE_GLOBAL || *mode > CUDA_CAPTURE_RELAXED) {
        return dry_refuse(CUDA_ERROR_INVALID_VALUE, "cudaThreadExchangeStreamCaptureMode: there is no such mode");
    }
    int before = dry_thread.capture_mode;
    dry_thread.capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

int dry_unsafe_call(const char *call) {
    /* CUDA Runtime API, cudaThreadExchangeStreamCaptureMode: who may make an unsafe call while something captures. */
    for (struct dry_capture *capture = captures; capture; capture = capture->next) {
        bool mine = pthread_equal(capture->thread, pthread_self());
        bool forbidden = capture->mode == CUDA_CAPTURE_GLOBAL ? dry_thread.capture_mode == CUDA_CAPTURE_GLOBAL ||
                                                                    (mine && dry_thread.capture_mode != CUDA_CAPTURE_RELAXED)
                         : capture->mode == CUDA_CAPTURE_THREAD_LOCAL ? mine && dry_thread.capture_mode != CUDA_CAPTURE_RELAXED
                                                                      : false;
        if (forbidden) {
            dry_invalidate(capture);
            return dry_refuse(CUDA_ERROR_CAPTURE_UNSUPPORTED, "%s: not while a stream is capturing", call);
        }
    }
    return CUDA_SUCCESS;
}
