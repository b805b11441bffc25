/* The trace: a file mapped in memory that outlives the process that writes it.
 *
 * Written before a call and completed after it, lock-free, from any number of threads; read by isolate/trace/ring.py,
 * which mirrors this layout. All integers are little endian; sizes are bytes.
 *
 *   header (ISOLATE_HEADER_BYTES) | strings (strings_bytes) | records (capacity * record_bytes)
 */
#ifndef ISOLATE_TRACE_H
#define ISOLATE_TRACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define ISOLATE_TRACE_MAGIC "ISOTRACE"
#define ISOLATE_TRACE_VERSION 1
#define ISOLATE_HEADER_BYTES 32768
#define ISOLATE_FAILURES 32
#define ISOLATE_FRAMES 24

enum isolate_kind {
    ISOLATE_STEP = 1,   /* a step of the case: call = its kind */
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

enum isolate_mode {
    ISOLATE_MODE_SYNC = 1,         /* synchronize the stream after each launch */
    ISOLATE_MODE_WINDOW = 2,       /* ... only between two launch numbers */
    ISOLATE_MODE_NO_VMM = 4,       /* answer that the device has no virtual memory management */
    ISOLATE_MODE_FENCE = 8,        /* each allocation ends at an unmapped page */
    ISOLATE_MODE_POISON = 16,      /* fresh device memory is filled with NaN bytes */
    ISOLATE_MODE_FENCE_BEFORE = 32 /* each allocation begins after an unmapped page instead */
};

/* Parameters of a call. Which member holds depends on `kind`; `words` for the kinds not named. */
union isolate_detail {
    struct {
        uint32_t grid[3], block[3], cluster[3];
        uint32_t reserved;
        uint64_t shared;         /* dynamic shared memory, bytes */
        uint64_t function;       /* the handle that was launched */
    } launch;
    struct {
        uint64_t bytes, destination, source; /* of an allocation or a free: destination is its address */
        int32_t direction;       /* cudaMemcpyKind, -1 where the call has none */
        int32_t value;           /* of a memset */
    } copy;
    struct {
        uint32_t op, type;       /* offsets of their names in strings */
        int32_t index;           /* place in the step, in order of evaluation, from 0 */
        uint32_t source[4];      /* offsets of the sources' names, 0 = none */
        int64_t shape[4];
    } node;
    uint64_t words[10];
};

struct isolate_record {
    /* record number + 1; 0 = never used; ISOLATE_FILLING while it is filled; with ISOLATE_COMPLETING set, the end is
     * being written and the rest holds */
    _Atomic uint64_t number;
    uint32_t done;               /* 1 once the call returned */
    uint16_t kind;               /* enum isolate_kind */
    uint8_t capturing;
    uint8_t injected;            /* 1: a fault injected by a test, the call was not made */
    uint64_t begin_ns, end_ns;   /* CLOCK_MONOTONIC, to about a microsecond */
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

#define ISOLATE_FILLING UINT64_MAX
#define ISOLATE_COMPLETING (UINT64_C(1) << 63)

/* What the hooks read where a call failed. Values are -1 where they could not be read. */
struct isolate_evidence {
    struct isolate_record record;       /* a copy, so that a wrapped ring still has it */
    int64_t attributes[16];             /* enum isolate_attribute */
    int64_t limits[16];                 /* enum isolate_limit */
    uint32_t frames[ISOLATE_FRAMES];    /* host backtrace, innermost first: offsets of `module+0xoffset symbol` */
    uint32_t driver_log;                /* offset of the driver's own words, 0 = none */
    uint32_t reserved;
};

/* Of a kernel, by cudaFuncGetAttributes. */
enum isolate_attribute {
    ISOLATE_KERNEL_SHARED_STATIC,
    ISOLATE_KERNEL_CONSTANT,
    ISOLATE_KERNEL_LOCAL,
    ISOLATE_KERNEL_MAX_THREADS,
    ISOLATE_KERNEL_REGISTERS,
    ISOLATE_KERNEL_PTX,
    ISOLATE_KERNEL_BINARY,
    ISOLATE_KERNEL_SHARED_DYNAMIC_MAX
};

/* Of a device, by cudaDeviceGetAttribute. */
enum isolate_limit {
    ISOLATE_DEVICE_MAX_THREADS,
    ISOLATE_DEVICE_BLOCK_X,
    ISOLATE_DEVICE_BLOCK_Y,
    ISOLATE_DEVICE_BLOCK_Z,
    ISOLATE_DEVICE_GRID_X,
    ISOLATE_DEVICE_GRID_Y,
    ISOLATE_DEVICE_GRID_Z,
    ISOLATE_DEVICE_SHARED,
    ISOLATE_DEVICE_SHARED_OPTIN,
    ISOLATE_DEVICE_REGISTERS,
    ISOLATE_DEVICE_WARP,
    ISOLATE_DEVICE_MAJOR,
    ISOLATE_DEVICE_MINOR,
    ISOLATE_DEVICE_PROCESSORS
};

struct isolate_header {
    char magic[8];               /* written last when a trace is opened */
    uint32_t version, header_bytes, record_bytes, capacity, strings_bytes;
    _Atomic uint32_t mode;       /* enum isolate_mode */
    uint64_t start_ns;
    _Atomic uint64_t next;       /* records ever begun */
    _Atomic uint64_t launches;   /* launches ever begun */
    _Atomic uint64_t strings_used;
    _Atomic int64_t step;        /* the step in flight, -1 before the first */
    _Atomic uint64_t ended;      /* changes when a record ends; a count where one thread is traced */
    _Atomic uint64_t lost;       /* records dropped because another thread was in their place */
    _Atomic uint64_t failed;     /* records that failed, ever */
    _Atomic uint32_t aborted;    /* 1 once abort_text is complete */
    uint32_t abort_thread;       /* gettid() of the thread that aborted */
    uint64_t abort_record;       /* records begun before the abort */
    uint64_t window_first, window_last; /* launch numbers, of mode WINDOW */
    _Atomic uint64_t first;      /* records before this one are of an earlier case */
    _Atomic uint32_t step_kind;  /* offset of the kind of the step in flight */
    _Atomic uint32_t routine;    /* offset of the name of the library call that the step is in */
    char abort_text[2048];       /* ggml's abort message: file:line and the expression */
    /* The first half of ISOLATE_FAILURES and the latest half */
    struct isolate_evidence failures[ISOLATE_FAILURES];
};

/* Opens (creates, empties) a trace and makes it the one this process writes. `path` may be /proc/self/fd/N; no other
 * thread may be in a traced call. capacity: a power of two. Returns 0, or errno. */
int isolate_trace_open(const char *path, uint32_t capacity, uint32_t strings_bytes);
void isolate_trace_close(void);
/* Forgets what was traced so far: launches count from 1 again. No other thread may be in a traced call. */
void isolate_trace_restart(void);

/* The step in flight, from the engine. Returns the record's number for isolate_step_end. */
uint64_t isolate_step_begin(int64_t step, const char *kind);
void isolate_step_end(uint64_t record, int32_t code);
/* The library call that the step in flight makes now. */
void isolate_step_routine(const char *name);

/* A graph node about to be computed: returns the record's number for isolate_node_end. sources: NULL after the last. */
uint64_t isolate_node_begin(const char *op, const char *name, const char *type, const int64_t shape[4],
                            const char *const sources[4]);
void isolate_node_end(uint64_t record);

/* For ggml_set_abort_callback: keeps the message where the parent finds it. */
void isolate_on_abort(const char *message);
/* For llama_log_set and ggml_log_set: `user` is a file descriptor. */
void isolate_on_log(int level, const char *text, void *user);
/* Lines below this ggml_log_level are dropped; at first 3, warnings. */
void isolate_log_level(int level);

/* The hooks of the CUDA runtime, driver and cuBLAS. mode: enum isolate_mode; first, last: launch numbers of WINDOW. */
void isolate_trace_mode(uint32_t mode, uint64_t first, uint64_t last);
/* For measuring what the hooks cost: while `pass` is true they hand this thread's calls on and do nothing else. */
void isolate_trace_pass(bool pass);
/* Records by CUPTI's callbacks instead of the hooks. library: path or name of libcupti. Returns 0, -1 where that is not
 * a CUPTI, or a CUptiResult: another tool has subscribed already, the driver does not allow it. */
int isolate_trace_cupti(const char *library);
/* For tests: the call of that kind and number is not made and returns `code` instead. Launches are numbered as in the
 * trace, the other kinds from 1 since this call. code 0: no more. */
void isolate_trace_inject(int kind, uint64_t number, int32_t code);

/* How the CUDA calls of the loaded libraries are bound. */
struct isolate_live {
    uint32_t libraries;  /* that have device code and call a shared CUDA runtime */
    uint32_t hooked;     /* imports bound to a hook */
    uint32_t unrecorded; /* imports without a hook that cannot fail: registration, names of errors */
    uint32_t uncovered;  /* imports without a hook; each is named in a NOTE of the trace */
    uint32_t elsewhere;  /* imports bound past their hook; each is named in a NOTE of the trace */
    uint32_t unresolved; /* imports that are not bound before they are called first */
};
void isolate_trace_live(struct isolate_live *live);

/* What this process did so far, and what it has in use. CUDA is only counted where the hooks stand in front of it. */
struct isolate_counts {
    int64_t computations;   /* ggml graphs that libllama had computed: one a ubatch */
    int64_t launches;       /* kernel launches since the trace began anew */
    int64_t graph_launches; /* launches of CUDA graphs */
    int64_t graphs;         /* CUDA graphs instantiated and not destroyed */
    int64_t allocations;    /* of device, managed and pinned memory, not freed; a mapping of virtual memory is one */
    int64_t bytes;          /* of them */
};
void isolate_trace_counts(struct isolate_counts *counts);

#endif
