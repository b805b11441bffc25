/* The trace: a file mapped in memory that outlives the process that writes it.
 *
 * Written before a call and completed after it, lock-free, from any number of threads; read by isolate/trace/ring.py,
 * which mirrors this layout. All integers are little endian; sizes are bytes.
 *
 *   header (4096) | strings (strings_bytes) | records (capacity * record_bytes)
 */
#ifndef ISOLATE_TRACE_H
#define ISOLATE_TRACE_H

#include <stdatomic.h>
#include <stdint.h>

#define ISOLATE_TRACE_MAGIC "ISOTRACE"
#define ISOLATE_TRACE_VERSION 1

enum isolate_kind {
    ISOLATE_STEP = 1,   /* a step of the case: call = its kind, step = its number */
    ISOLATE_NODE = 2,   /* a graph node, written before it is computed */
    ISOLATE_LAUNCH = 3, /* a kernel launch */
    ISOLATE_GRAPH = 4,  /* graph capture, instantiation, update, launch */
    ISOLATE_COPY = 5,
    ISOLATE_SET = 6,    /* memset */
    ISOLATE_MEMORY = 7, /* allocation, free, registration, virtual memory */
    ISOLATE_SYNC = 8,   /* a synchronize */
    ISOLATE_STREAM = 9, /* streams and events */
    ISOLATE_QUERY = 10, /* attributes, properties, devices, peer access */
    ISOLATE_BLAS = 11,
    ISOLATE_NOTE = 12   /* something isolate itself has to say: an import that no hook covers */
};

/* Parameters of a call. Which member holds depends on `kind`. */
union isolate_detail {
    struct {
        uint32_t grid[3], block[3], cluster[3];
        uint32_t blocks_of;      /* reserved, 0 */
        uint64_t shared;         /* dynamic shared memory, bytes */
        uint64_t function;       /* the handle that was launched */
    } launch;
    struct {
        uint64_t bytes, destination, source;
        int32_t direction;       /* cudaMemcpyKind */
        int32_t value;           /* of a memset */
    } copy;
    struct {
        uint32_t op, type;       /* offsets of their names in strings */
        int32_t index;           /* place in the graph, in order of evaluation */
        uint32_t source[4];      /* offsets of the sources' names, 0 = none */
        int64_t shape[4];
    } node;
    uint64_t words[10];
};

struct isolate_record {
    _Atomic uint64_t number;     /* record number + 1; 0 while the record is being filled */
    _Atomic uint32_t done;       /* 1 once the call returned */
    uint16_t kind;               /* enum isolate_kind */
    uint8_t capturing;
    uint8_t reserved;
    uint64_t begin_ns, end_ns;   /* CLOCK_MONOTONIC */
    int64_t step;                /* the step in flight, -1 before the first */
    uint64_t launch;             /* launch number from 1 for kind LAUNCH, else number of launches begun before */
    uint64_t stream;
    uint32_t thread;             /* gettid() */
    int32_t device;
    uint32_t call, name;         /* offsets in strings: the call; the kernel (mangled), tensor or file */
    int32_t code;                /* what the call returned */
    int32_t before, after;       /* cudaPeekAtLastError before and after, -1 where not read */
    int32_t sync;                /* what the synchronize after it returned, -1 where none was made */
    union isolate_detail detail;
};

struct isolate_header {
    char magic[8];
    uint32_t version, header_bytes, record_bytes, capacity, strings_bytes;
    uint32_t mode;               /* bit 0 sync, 1 window, 2 no_vmm, 3 fence, 4 poison, 5 fence before */
    uint64_t start_ns;
    _Atomic uint64_t next;       /* records ever begun */
    _Atomic uint64_t launches;   /* launches ever begun */
    _Atomic uint64_t strings_used;
    _Atomic int64_t step;        /* the step in flight, -1 before the first */
    _Atomic uint64_t progress;   /* changes whenever anything begins or ends: the watchdog reads it */
    _Atomic uint64_t fault;      /* number + 1 of the first record that failed, 0 = none */
    struct isolate_record first; /* its copy, so that a wrapped ring still has it */
    _Atomic uint32_t aborted;    /* 1 once abort_text is complete */
    char abort_text[1020];       /* ggml's abort message: file:line and the expression */
};

/* Opens (creates, truncates) a trace and makes it the one this process writes. `path` may be /proc/self/fd/N.
 * capacity: a power of two. Returns 0, or errno. */
int isolate_trace_open(const char *path, uint32_t capacity, uint32_t strings_bytes);
void isolate_trace_close(void);

/* The step in flight, from the engine. Returns the record's number for isolate_step_end. */
uint64_t isolate_step_begin(int64_t step, const char *kind);
void isolate_step_end(uint64_t record, int32_t code);

/* A graph node about to be computed. sources: up to 4 names, NULL after the last. */
void isolate_node(int32_t index, const char *op, const char *name, const char *type, const int64_t shape[4],
                  const char *const sources[4]);

/* For ggml_set_abort_callback: keeps the message where the parent finds it. */
void isolate_on_abort(const char *message);
/* For llama_log_set and ggml_log_set: user is a file descriptor; lines below `level` are dropped. */
void isolate_on_log(int level, const char *text, void *user);

#endif
