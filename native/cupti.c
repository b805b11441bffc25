/* CUPTI's callbacks, where the hooks cannot stand before the CUDA runtime: it is linked into the build, or was loaded
 * before them. The same records, from less: no cuBLAS statuses, no bytes of copies, and launches inside cuBLAS are seen.
 *
 * The callback API of CUDA 12 and 13 (cupti_callbacks.h). In a callback only synchronizing calls are allowed, so nothing
 * is asked there. nvcc 13's launch has no parameters that CUPTI knows: geometry is read from the driver's call below it. */
#define _GNU_SOURCE
#include "hooks.h"

#include <dlfcn.h>
#include <string.h>

enum { DRIVER = 1, RUNTIME = 2 };
enum { ENTER = 0, EXIT = 1 };

/* CUpti_CallbackData */
struct callback {
    int site;
    const char *function;
    const void *parameters;
    const int *result;
    const char *kernel; /* mangled, of a launch */
    void *context;
    uint32_t context_number;
    uint64_t *correlation;
    uint32_t correlation_number;
};

/* cuLaunchKernel_params, cuLaunchCooperativeKernel_params */
struct launch_parameters {
    void *function;
    unsigned grid[3], block[3], shared;
    void *stream;
};

/* CUlaunchConfig, first in cuLaunchKernelEx_params */
struct launch_configuration {
    unsigned grid[3], block[3], shared;
    void *stream;
    const struct cuda_launch_attribute *attributes;
    unsigned attribute_count;
};

/* The outermost call of this thread. */
static _Thread_local struct {
    int depth;
    bool launch, begun;
    bool direct; /* the driver's launch without the runtime's */
    uint64_t number;
    struct isolate_record record;
} open_call;

static bool begins(const char *name, const char *prefix) {
    return !strncmp(name, prefix, strlen(prefix));
}

static bool is_launch(const char *name) {
    return strstr(name, "LaunchKernel") || strstr(name, "LaunchCooperativeKernel");
}

static bool is_quiet(const char *name) {
    return begins(name, "cudaGetLastError") || begins(name, "cudaPeekAtLastError") || begins(name, "cudaGetDevice")
        || begins(name, "cudaStreamIsCapturing") || begins(name, "cudaDeviceGetAttribute")
        || begins(name, "cudaFuncGet") || begins(name, "cudaOccupancy") || begins(name, "cudaGetError")
        || begins(name, "__cudaGetKernel") || begins(name, "cudaEventQuery") || begins(name, "cudaStreamQuery");
}

static enum isolate_kind kind_of(const char *name) {
    if (is_launch(name)) {
        return ISOLATE_LAUNCH;
    }
    if (strstr(name, "Graph") || strstr(name, "Capture")) {
        return ISOLATE_GRAPH;
    }
    if (strstr(name, "Synchronize")) {
        return ISOLATE_SYNC;
    }
    if (begins(name, "cudaMemcpy")) {
        return ISOLATE_COPY;
    }
    if (begins(name, "cudaMemset")) {
        return ISOLATE_SET;
    }
    if (begins(name, "cudaMalloc") || begins(name, "cudaFree") || begins(name, "cudaHost")) {
        return ISOLATE_MEMORY;
    }
    return begins(name, "cudaStream") || begins(name, "cudaEvent") ? ISOLATE_STREAM : ISOLATE_QUERY;
}

static void begin(void) {
    open_call.number = isolate_begin(&open_call.record);
    open_call.begun = true;
}

static void enter(const struct callback *data) {
    if (open_call.depth++) {
        return;
    }
    open_call.launch = is_launch(data->function);
    open_call.begun = false;
    open_call.number = ISOLATE_NO_RECORD;
    isolate_blank(&open_call.record, kind_of(data->function));
    open_call.record.call = isolate_string(data->function);
    open_call.record.device = isolate_this.device;
    if (begins(data->function, "cudaGraphLaunch")) {
        open_call.record.stream = (uint64_t)(uintptr_t)((void *const *)data->parameters)[1];
    }
    if (!open_call.launch && !is_quiet(data->function)) {
        begin();
    }
}

static void read_launch(const struct callback *data) {
    struct isolate_record *record = &open_call.record;
    const struct launch_configuration *configuration = data->parameters;
    struct launch_configuration copied = {0};
    if (begins(data->function, "cuLaunchKernelEx")) {
        configuration = *(const struct launch_configuration *const *)data->parameters;
    } else {
        const struct launch_parameters *parameters = data->parameters;
        memcpy(copied.grid, parameters->grid, sizeof copied.grid);
        memcpy(copied.block, parameters->block, sizeof copied.block);
        copied.shared = parameters->shared;
        copied.stream = parameters->stream;
        configuration = &copied;
    }
    memcpy(record->detail.launch.grid, configuration->grid, sizeof configuration->grid);
    memcpy(record->detail.launch.block, configuration->block, sizeof configuration->block);
    record->detail.launch.shared = configuration->shared;
    record->stream = (uint64_t)(uintptr_t)configuration->stream;
    record->name = isolate_string(data->kernel);
    record->capturing = isolate_captured(configuration->stream);
}

static void leave(const struct callback *data) {
    int (*synchronize)(void *) = FIND("cuStreamSynchronize", void *);
    struct isolate_record *record = &open_call.record;
    if (--open_call.depth) {
        return;
    }
    uint32_t mode = atomic_load_explicit(&isolate_mode, memory_order_relaxed);
    record->code = data->result ? *data->result : 0;
    if (open_call.launch && !open_call.begun) {
        record->name = isolate_string(data->kernel);
        begin(); /* refused before it came to the driver */
    }
    bool queued = open_call.launch || begins(data->function, "cudaGraphLaunch");
    if (queued && !record->code && synchronize && isolate_synchronizes(mode, record) && !isolate_any_capture()) {
        record->sync = synchronize((void *)(uintptr_t)record->stream);
    }
    if (record->code && !open_call.begun) {
        begin();
    }
    isolate_end(open_call.number, record);
    bool messenger = begins(data->function, "cudaGetLastError") || begins(data->function, "cudaPeekAtLastError");
    if ((record->code && !messenger) || record->sync > 0) {
        isolate_explain(record, false);
    }
}

static void follow(const struct callback *data) {
    if (data->site != EXIT || (data->result && *data->result)) {
        return;
    }
    if (begins(data->function, "cudaSetDevice") && !begins(data->function, "cudaSetDeviceFlags")) {
        isolate_this.device = *(const int *)data->parameters;
    } else if (begins(data->function, "cudaStreamBeginCapture")) {
        isolate_capture_begins(*(void *const *)data->parameters, CUDA_CAPTURE_RELAXED);
    } else if (begins(data->function, "cudaStreamEndCapture")) {
        isolate_capture_ends(*(void *const *)data->parameters);
    }
}

static void on_driver_launch(const struct callback *data) {
    if (data->site == ENTER) {
        if (!open_call.depth) {
            enter(data);
            open_call.direct = true;
        }
        if (open_call.launch && !open_call.begun) {
            read_launch(data);
            begin();
        }
    } else if (open_call.direct) {
        open_call.direct = false;
        leave(data);
    }
}

static void on_call(void *user, int domain, uint32_t number, const struct callback *data) {
    (void)user, (void)number;
    if (domain == DRIVER) {
        if (is_launch(data->function)) {
            on_driver_launch(data);
        }
        return;
    }
    follow(data);
    if (data->site == ENTER) {
        enter(data);
    } else if (open_call.depth) {
        leave(data);
    }
}

ISOLATE_API int isolate_trace_cupti(const char *library) {
    static void *subscriber;
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        return -1;
    }
    int (*subscribe)(void **, void (*)(void *, int, uint32_t, const struct callback *), void *) =
        (int (*)(void **, void (*)(void *, int, uint32_t, const struct callback *), void *))dlsym(handle, "cuptiSubscribe");
    int (*enable)(uint32_t, void *, int) = (int (*)(uint32_t, void *, int))dlsym(handle, "cuptiEnableDomain");
    if (!subscribe || !enable) {
        return -1;
    }
    int code = subscribe(&subscriber, on_call, NULL);
    code = code ? code : enable(1, subscriber, RUNTIME);
    return code ? code : enable(1, subscriber, DRIVER);
}
