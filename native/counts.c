/* What the process has in use and has done so far, counted where the calls pass: CUDA memory and graphs, graph computations. */
#include "hooks.h"

#include <pthread.h>
#include <stdlib.h>

struct allocation {
    uint64_t pointer;
    size_t bytes;
};

static struct allocation *allocations;
static size_t count, room;
static int64_t bytes_in_use;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int64_t computations, graphs, graph_launches;

void isolate_count_allocation(uint64_t pointer, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (count == room) {
        size_t more = room ? 2 * room : 64;
        struct allocation *grown = realloc(allocations, more * sizeof *grown);
        if (!grown) {
            pthread_mutex_unlock(&lock);
            return;
        }
        allocations = grown;
        room = more;
    }
    allocations[count++] = (struct allocation){pointer, bytes};
    bytes_in_use += (int64_t)bytes;
    pthread_mutex_unlock(&lock);
}

void isolate_count_release(uint64_t pointer, size_t bytes) {
    pthread_mutex_lock(&lock);
    /* What is given back was mostly made lately. One call may unmap what several have mapped. */
    for (size_t i = count; i-- > 0;) {
        if (allocations[i].pointer >= pointer && allocations[i].pointer - pointer < (bytes ? bytes : 1)) {
            bytes_in_use -= (int64_t)allocations[i].bytes;
            allocations[i] = allocations[--count];
            if (!bytes) {
                break;
            }
        }
    }
    pthread_mutex_unlock(&lock);
}

void isolate_count_graphs(int made) {
    atomic_fetch_add_explicit(&graphs, made, memory_order_relaxed);
}

void isolate_count_graph_launch(void) {
    atomic_fetch_add_explicit(&graph_launches, 1, memory_order_relaxed);
}

/* libllama computes each ubatch by one call of this function, and nothing else by it but a pending shift or copy. */
ISOLATE_API int ggml_backend_sched_graph_compute_async(void *scheduler, void *graph) {
    int (*real)(void *, void *) = FIND("ggml_backend_sched_graph_compute_async", void *, void *);
    atomic_fetch_add_explicit(&computations, 1, memory_order_relaxed);
    return real ? real(scheduler, graph) : -1; /* GGML_STATUS_FAILED */
}

ISOLATE_API void isolate_trace_counts(struct isolate_counts *counts) {
    struct isolate_header *header = isolate_trace();
    counts->computations = atomic_load(&computations);
    counts->launches = header ? (int64_t)atomic_load(&header->launches) : 0;
    counts->graph_launches = atomic_load(&graph_launches);
    counts->graphs = atomic_load(&graphs);
    pthread_mutex_lock(&lock);
    counts->allocations = (int64_t)count;
    counts->bytes = bytes_in_use;
    pthread_mutex_unlock(&lock);
}
