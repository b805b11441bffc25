/* What the parts of the dry device share: a CUDA device that is simulated as far as a host program can see it.
 *
 * Kernels do nothing. Device memory is address space without pages behind it: uploads are dropped and what is read back is
 * zeros. Everything else, above all what is refused and with which code, is as a real device does it. A comment says where
 * a code was measured (on an H200, driver 580, CUDA 13.0: tests/data/h200_calls.txt) and where it was not.
 *
 * The entry points of libcudart, libcublas and libcuda (cudart.c, cublas.c, driver.c) are thin; all state is here, behind
 * one lock that `dry_enter` takes. Functions return an `enum cuda_error`; `dry_refuse` notes the sentence that goes with it.
 */
#ifndef ISOLATE_DRY_H
#define ISOLATE_DRY_H

#include "../cuda_abi.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DRY_API __attribute__((visibility("default")))
/* The stand-ins are other libraries than the rest. */
#pragma GCC visibility push(default)
#define DRY_MOST_DEVICES 16

/* More of `enum cuda_error`: what only a simulated device has to know. */
enum dry_error {
    DRY_NOT_INITIALIZED = 3,
    DRY_INVALID_SYMBOL = 13,
    DRY_PEER_UNSUPPORTED = 217,
    DRY_ILLEGAL_STATE = 401,
    DRY_PEER_NOT_ENABLED = 705,
    DRY_ALREADY_REGISTERED = 712,
    DRY_NOT_REGISTERED = 713,
    DRY_CAPTURE_MERGE = 902,
    DRY_CAPTURE_UNJOINED = 904,
    DRY_CAPTURE_ISOLATION = 905,
    DRY_CAPTURE_IMPLICIT = 906,
    DRY_CAPTURED_EVENT = 907,
    DRY_CAPTURE_WRONG_THREAD = 908
};

/* ---- configuration (config.c): the devices, and the code each of them runs of every kernel */

/* A device's limits, in CUDA's units; where they come from is in isolate/trace/gpus.json. What it does not have, caches and
 * clocks, no launch depends on. */
struct dry_gpu {
    char name[256];
    int capability; /* 90 for 9.0 */
    uint64_t memory, context_memory;
    int processors, threads_per_processor, blocks_per_processor, registers_per_processor, registers_per_block;
    size_t shared_per_processor, shared_per_block, shared_per_block_optin, shared_reserved;
    int integrated, cluster_launch, peer_access;
};

struct dry_code {
    const char *name;
    uint64_t container; /* where its fat binary is in the library */
    const char *library;
    int capability;     /* of the device that runs it */
    bool exists, from_ptx;
    int ptx, binary;    /* what cudaFuncAttributes calls ptxVersion and binaryVersion */
    unsigned max_threads, max_cluster; /* 0: not said */
    struct cuda_dim required, cluster; /* x 0: not said */
    int registers;
    bool registers_known; /* else the most its launch bounds leave it */
    size_t shared, local;
    struct dry_code *next;
};

struct dry_configuration {
    int devices;
    struct dry_gpu gpu[DRY_MOST_DEVICES];
    int driver_version;
};

extern struct dry_configuration dry;
/* A call of the runtime, or cuInit, was made. */
extern bool dry_initialized;
/* Reads the configuration that ISOLATE_DRY names, once. No devices where there is none. */
void dry_configured(void);
/* NULL: the table does not have this kernel. */
const struct dry_code *dry_code(const char *library, uint64_t container, const char *name, int capability);

/* ---- errors (error.c) */

/* Take the lock; what the calling thread's device already fails with, or 0. */
int dry_enter(void);
/* Give the lock back; keep the code as the thread's last error, as the runtime does. */
int dry_leave(int code);
/* The same for the driver's and cuBLAS's calls, which keep no last error. */
int dry_leave_quietly(int code);
/* Note why, and return the code. */
int dry_refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int dry_last_error(bool reset);
const char *dry_error_name(int code);
const char *dry_error_text(int code);
/* A kernel failed on the device: the next synchronizing call says so, and every call after it. */
void dry_device_fault(int device, int code, const char *why);
/* What a call that waits for the device returns. */
int dry_synchronized(int device);

#define RUN(call)                                                                                               \
    do {                                                                                                        \
        int code_ = dry_enter();                                                                                \
        return dry_leave(code_ ? code_ : (call));                                                               \
    } while (0)

/* ---- devices (device.c) */

struct dry_thread {
    int device, last;
    int capture_mode;
    char message[1024];
};
extern _Thread_local struct dry_thread dry_thread;

int dry_set_device(int device);
int dry_attribute(int attribute, int device, int *value);
int dry_can_access_peer(int *can, int device, int peer);
int dry_enable_peer(int peer, unsigned flags);
int dry_disable_peer(int peer);

/* ---- memory (memory.c, copy.c, virtual.c) */

enum dry_memory { DRY_DEVICE, DRY_MANAGED, DRY_PINNED, DRY_REGISTERED, DRY_VIRTUAL };

struct dry_range {
    uintptr_t start;
    size_t bytes;
    enum dry_memory kind;
    int device;
    void *handle;    /* DRY_VIRTUAL: what is mapped here */
    bool accessible; /* DRY_VIRTUAL: cuMemSetAccess was called */
};

int dry_malloc(void **pointer, size_t bytes);
int dry_malloc_managed(void **pointer, size_t bytes);
int dry_malloc_host(void **pointer, size_t bytes);
int dry_free(void *pointer);
int dry_free_host(void *pointer);
int dry_host_register(void *pointer, size_t bytes);
int dry_host_unregister(void *pointer);
int dry_host_device_pointer(void **device, void *host);
void dry_memory_info(int device, size_t *free, size_t *total);
/* Counts memory as used; false where the device has not so much left. */
bool dry_take(int device, size_t bytes);
void dry_give(int device, size_t bytes);
/* The range an address is in, or NULL. */
struct dry_range *dry_range_of(uintptr_t address);
int dry_add_range(const struct dry_range *range);
void dry_remove_range(struct dry_range *range);
bool dry_overlaps(uintptr_t start, size_t bytes);
/* Address space with no pages, aligned; 0 where there is none. */
uintptr_t dry_reserve(size_t bytes, size_t alignment);
/* Checks that `bytes` from an address lie in one allocation; `what` continues "cudaMemcpy: its destination". */
int dry_check_span(uintptr_t address, size_t bytes, const char *call, const char *what);
/* Fills a buffer with a sentence about an address that is in no allocation. */
void dry_describe_address(uintptr_t address, char *text, size_t size);

struct dry_copy {
    const char *call;
    void *destination;
    const void *source;
    size_t destination_pitch, source_pitch, width, height; /* bytes; height 1 for a plain copy */
    int direction;
    bool waits; /* the host sees it done when the call returns */
};
int dry_copy(const struct dry_copy *copy, void *stream);
int dry_set(const char *call, void *pointer, size_t pitch, int value, size_t width, size_t height, void *stream);
void dry_do_copy(const struct dry_copy *copy);

/* ---- streams, events, capture, graphs (stream.c, capture.c, graph.c) */

struct dry_graph;
struct dry_capture;
struct dry_kernel;

struct dry_stream {
    int device;
    unsigned flags;
    int priority;
    struct dry_capture *capture; /* NULL: not capturing */
    int *frontier;               /* the graph's nodes that the next one comes after */
    size_t frontier_count;
    struct dry_stream *next;
};

struct dry_launch {
    struct dry_kernel *kernel;
    void **arguments; /* until the call returns */
    struct cuda_dim grid, block, cluster;
    size_t shared;
    bool cooperative;
};

enum dry_node_kind { DRY_NODE_KERNEL = 0, DRY_NODE_COPY = 1, DRY_NODE_SET = 2, DRY_NODE_HOST = 3, DRY_NODE_CHILD = 4 };

struct dry_node {
    enum dry_node_kind kind;
    int *after; /* numbers of the nodes it comes after */
    size_t after_count;
    struct dry_copy copy;
    void (*host)(void *);
    void *data;
};

/* The stream of a handle; NULL and a sentence where it is none. */
struct dry_stream *dry_stream(void *handle);
/* Work in the legacy stream while a stream it waits for captures. */
int dry_legacy_conflict(const struct dry_stream *stream, const char *call);
int dry_stream_create(void **stream, unsigned flags, int priority);
int dry_stream_destroy(void *stream);
int dry_stream_synchronize(void *stream);
int dry_stream_query(void *stream);
int dry_device_synchronize(void);
int dry_event_create(void **event, unsigned flags);
int dry_event_destroy(void *event);
int dry_event_record(void *event, void *stream);
int dry_event_synchronize(void *event);
int dry_event_query(void *event);
int dry_event_elapsed(float *milliseconds, void *start, void *end);
int dry_stream_wait(void *stream, void *event);
int dry_host_function(void *stream, void (*function)(void *), void *data);
/* The streams that exist, to be walked by `next`. */
struct dry_stream *dry_streams(void);

/* Adds a node to the graph a stream captures into: 0, the code of a refusal, or that it does not capture. */
#define DRY_NOT_CAPTURING (-1)
int dry_into_graph(struct dry_stream *stream, const struct dry_node *node, const char *call);
void dry_invalidate(struct dry_capture *capture);
int dry_capture_begin(void *stream, int mode);
int dry_capture_end(void *stream, void **graph);
void dry_capture_abandon(struct dry_stream *stream);
int dry_capture_status(void *stream, int *status);
int dry_exchange_capture_mode(int *mode);
/* A call that must not be made while something captures, by the rules of the thread's mode. */
int dry_unsafe_call(const char *call);
bool dry_capturing(const struct dry_stream *stream);
/* 0 where it captures nothing. */
unsigned long long dry_capture_id(const struct dry_stream *stream);
struct dry_capture *dry_capture_alive(unsigned long long id);
/* Joins a stream to a capture at a recorded event. */
int dry_join(struct dry_stream *stream, struct dry_capture *capture, const int *frontier, size_t count);

struct dry_graph *dry_graph_new(void);
int dry_graph_add(struct dry_graph *graph, const struct dry_node *node);
bool dry_graph_reaches(const struct dry_graph *graph, const int *from, size_t from_count, int node);
int dry_graph_create(void **graph);
int dry_graph_destroy(void *graph);
int dry_graph_instantiate(void **executable, void *graph);
int dry_graph_exec_destroy(void *executable);
/* `result`: why not, cudaGraphExecUpdateResult. */
int dry_graph_update(void *executable, void *graph, int *result);
int dry_graph_launch(void *executable, void *stream);
/* Runs host functions that were queued while the lock was held. */
void dry_run_host_functions(void);
void dry_queue_host_function(void (*function)(void *), void *data);

/* ---- kernels (module.c, launch.c, occupancy.c) */

struct dry_module;

struct dry_kernel {
    const void *host;
    char *name;
    struct dry_module *module;
    struct {
        bool looked_up;
        const struct dry_code *code; /* NULL: no code for this device, or unknown */
        size_t max_dynamic_shared;
        int carveout;
        bool non_portable_cluster;
        struct cuda_dim cluster;
        bool cluster_must_be_set;
    } on[DRY_MOST_DEVICES];
    struct dry_kernel *next;
};

void **dry_register_binary(const void *wrapper);
void dry_unregister_binary(void **handle);
void dry_register_function(void **handle, const void *host, const char *name);
void dry_register_variable(void **handle, const void *host, const char *name, size_t bytes);
int dry_symbol(const void *host, void **address, size_t *bytes);
/* The kernel of a host function or a handle of __cudaGetKernel, ready for a device; 0 or the code of a refusal. */
int dry_kernel(const void *function, int device, struct dry_kernel **kernel);
int dry_kernel_name(const void *function, const char **name);

int dry_launch(const void *function, const struct dry_launch *launch, void *stream);
/* Bytes of cudaFuncAttributes in CUDA 12 and 13. */
#define DRY_FUNCTION_ATTRIBUTES 144
int dry_function_attributes(struct cuda_function_attributes *attributes, const void *function);
int dry_set_function_attribute(const void *function, int attribute, int value);
/* The most threads a block of the kernel may have on the device. */
unsigned dry_most_threads(const struct dry_code *code, const struct dry_gpu *gpu);
/* Blocks that fit on one multiprocessor. `count_estimate`: also where the registers are not known for certain. */
int dry_occupancy(const struct dry_kernel *kernel, int device, unsigned threads, size_t dynamic, bool count_estimate);
int dry_occupancy_of(int *blocks, const void *function, int threads, size_t dynamic);

/* ---- what the host reads of results (experts.c) */

void dry_note_sort(const struct dry_launch *launch);
/* Fills the destination, if the source is where indices were sorted to. */
bool dry_read_sort(const struct dry_copy *copy);

/* ---- virtual memory (virtual.c) */

int dry_granularity(size_t *granularity, const struct cuda_allocation_properties *properties);
int dry_address_reserve(uint64_t *address, size_t bytes, size_t alignment);
int dry_address_free(uint64_t address, size_t bytes);
int dry_memory_create(uint64_t *handle, size_t bytes, const struct cuda_allocation_properties *properties);
int dry_memory_release(uint64_t handle);
int dry_memory_map(uint64_t address, size_t bytes, size_t offset, uint64_t handle);
int dry_memory_unmap(uint64_t address, size_t bytes);
int dry_memory_access(uint64_t address, size_t bytes, const struct cuda_memory_access *access, size_t count);

#pragma GCC visibility pop

#endif
