/* Graphs: nodes with what they come after, their executable copies, and what of an executable an update may change. */
#include "dry.h"

#include <stdlib.h>
#include <string.h>

struct dry_graph {
    struct dry_node *nodes;
    size_t count, space;
    bool executable;
    struct dry_graph *next;
};

/* cudaGraphExecUpdateResult */
enum { UPDATED = 0, TOPOLOGY_CHANGED = 2, NODE_TYPE_CHANGED = 3, PARAMETERS_CHANGED = 5 };

static struct dry_graph *graphs;

struct dry_graph *dry_graph_new(void) {
    struct dry_graph *graph = calloc(1, sizeof *graph);
    if (graph) {
        graph->next = graphs;
        graphs = graph;
    }
    return graph;
}

static struct dry_graph *find(void *handle, bool executable, const char *call) {
    struct dry_graph *graph = graphs;
    while (graph && (graph != handle || graph->executable != executable)) {
        graph = graph->next;
    }
    if (!graph) {
        dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: %p is not %s", call, handle, executable ? "an executable graph" : "a graph");
    }
    return graph;
}

int dry_graph_add(struct dry_graph *graph, const struct dry_node *node) {
    if (graph->count == graph->space) {
        size_t space = graph->space ? 2 * graph->space : 64;
        struct dry_node *more = realloc(graph->nodes, space * sizeof *more);
        if (!more) {
            return -1;
        }
        graph->nodes = more;
        graph->space = space;
    }
    struct dry_node *place = &graph->nodes[graph->count];
    *place = *node;
    place->after = NULL;
    if (node->after_count) {
        place->after = malloc(node->after_count * sizeof *place->after);
        if (!place->after) {
            return -1;
        }
        memcpy(place->after, node->after, node->after_count * sizeof *place->after);
    }
    return (int)graph->count++;
}

bool dry_graph_reaches(const struct dry_graph *graph, const int *from, size_t from_count, int node) {
    /* Nodes come after nodes with smaller numbers only, so one pass from the end finds all that is before. */
    bool *before = calloc(graph->count + 1, 1);
    if (!before) {
        return false;
    }
    for (size_t i = 0; i < from_count; i++) {
        before[from[i]] = true;
    }
    for (size_t i = graph->count; i-- > 0;) {
        for (size_t j = 0; before[i] && j < graph->nodes[i].after_count; j++) {
            before[graph->nodes[i].after[j]] = true;
        }
    }
    bool reached = before[node];
    free(before);
    return reached;
}

static int destroy(void *handle, bool executable, const char *call) {
    struct dry_graph *graph = find(handle, executable, call);
    if (!graph) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct dry_graph **place = &graphs;
    while (*place != graph) {
        place = &(*place)->next;
    }
    *place = graph->next;
    for (size_t i = 0; i < graph->count; i++) {
        free(graph->nodes[i].after);
    }
    free(graph->nodes);
    free(graph);
    return CUDA_SUCCESS;
}

int dry_graph_create(void **handle) {
    *handle = dry_graph_new();
    return *handle ? CUDA_SUCCESS : dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a graph");
}

int dry_graph_destroy(void *handle) {
    return destroy(handle, false, "cudaGraphDestroy");
}

int dry_graph_exec_destroy(void *handle) {
    return destroy(handle, true, "cudaGraphExecDestroy");
}

static bool copy_nodes(struct dry_graph *to, const struct dry_graph *from) {
    for (size_t i = 0; i < from->count; i++) {
        if (dry_graph_add(to, &from->nodes[i]) < 0) {
            return false;
        }
    }
    return true;
}

int dry_graph_instantiate(void **executable, void *handle) {
    struct dry_graph *graph = find(handle, false, "cudaGraphInstantiate");
    if (!graph || !executable) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct dry_graph *copy = dry_graph_new();
    if (!copy || !copy_nodes(copy, graph)) {
        return dry_refuse(CUDA_ERROR_OUT_OF_MEMORY, "no host memory is left for a graph");
    }
    copy->executable = true;
    *executable = copy;
    return CUDA_SUCCESS;
}

static int difference(const struct dry_node *old, const struct dry_node *new) {
    if (old->kind != new->kind) {
        return NODE_TYPE_CHANGED;
    }
    if (old->after_count != new->after_count || (old->after_count && memcmp(old->after, new->after, old->after_count * sizeof *old->after))) {
        return TOPOLOGY_CHANGED;
    }
    /* CUDA Runtime API, cudaGraphExecUpdate: a copy must stay between the same kinds of memory. */
    if (old->kind == DRY_NODE_COPY && old->copy.direction != new->copy.direction) {
        return PARAMETERS_CHANGED;
    }
    return UPDATED;
}

int dry_graph_update(void *executable, void *handle, int *result) {
    struct dry_graph *old = find(executable, true, "cudaGraphExecUpdate"), *new = find(handle, false, "cudaGraphExecUpdate");
    if (!old || !new) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *result = old->count == new->count ? UPDATED : TOPOLOGY_CHANGED;
    for (size_t i = 0; *result == UPDATED && i < old->count; i++) {
        *result = difference(&old->nodes[i], &new->nodes[i]);
    }
    if (*result != UPDATED) {
        return dry_refuse(CUDA_ERROR_GRAPH_EXEC_UPDATE, "cudaGraphExecUpdate: the graph has %s than the executable one",
                          *result == TOPOLOGY_CHANGED    ? "other nodes or dependencies"
                          : *result == NODE_TYPE_CHANGED ? "a node of another type"
                                                         : "a copy between other kinds of memory");
    }
    for (size_t i = 0; i < old->count; i++) {
        int *after = old->nodes[i].after;
        old->nodes[i] = new->nodes[i];
        old->nodes[i].after = after;
    }
    return CUDA_SUCCESS;
}

int dry_graph_launch(void *executable, void *handle) {
    struct dry_graph *graph = find(executable, true, "cudaGraphLaunch");
    struct dry_stream *stream = dry_stream(handle);
    if (!graph || !stream) {
        return graph ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    }
    int code = dry_into_graph(stream, &(struct dry_node){.kind = DRY_NODE_CHILD}, "cudaGraphLaunch");
    if (code != DRY_NOT_CAPTURING) {
        return code;
    }
    for (size_t i = 0; i < graph->count; i++) {
        const struct dry_node *node = &graph->nodes[i];
        if (node->kind == DRY_NODE_COPY) {
            dry_do_copy(&node->copy);
        } else if (node->kind == DRY_NODE_HOST) {
            dry_queue_host_function(node->host, node->data);
        }
    }
    return CUDA_SUCCESS;
}
