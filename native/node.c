/* The eval callback of ggml's scheduler: names each graph node in the trace before it is computed.
 *
 * ggml_tensor is not declared here: isolate/trace/node.py measures where its fields are in the build at hand. */
#include "ring.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* Mirrored by isolate/trace/node.py. */
struct isolate_tensor_layout {
    uint64_t type, ne, src; /* offsets of the fields, bytes */
    const char *(*name)(const void *tensor);
    const char *(*op)(const void *tensor);
    const char *(*type_name)(int type);
};

static struct isolate_tensor_layout layout;
static _Thread_local uint64_t in_flight = ISOLATE_NO_RECORD;

ISOLATE_API void isolate_tensor_layout(const struct isolate_tensor_layout *measured) {
    layout = *measured;
}

static void read_field(void *value, const void *tensor, uint64_t offset, size_t bytes) {
    memcpy(value, (const char *)tensor + offset, bytes);
}

/* ggml_backend_sched_eval_callback. Asked for, every node is computed alone and synchronized before the next. */
ISOLATE_API bool isolate_on_node(void *tensor, bool ask, void *user) {
    (void)user;
    if (!ask) {
        isolate_node_end(in_flight);
        return true;
    }
    int type;
    int64_t shape[4];
    const void *source[4];
    const char *sources[4] = {0};
    read_field(&type, tensor, layout.type, sizeof type);
    read_field(shape, tensor, layout.ne, sizeof shape);
    read_field(source, tensor, layout.src, sizeof source);
    for (int i = 0; i < 4 && source[i]; i++) {
        sources[i] = layout.name(source[i]);
    }
    in_flight = isolate_node_begin(layout.op(tensor), layout.name(tensor), layout.type_name(type), shape, sources);
    return true;
}
