/* What every hook does around the call it stands in front of. */
#define _GNU_SOURCE
#include "hooks.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ISOLATE_THREAD_LOCAL struct isolate_thread isolate_this;
_Atomic uint32_t isolate_mode;
_Atomic bool isolate_all_hooked;

static _Atomic uint64_t window_first, window_last;
/* In the modes that synchronize, a launch and the synchronize after it are one: else another thread's error could show
 * in between. */
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static struct {
    _Atomic int kind; /* 0: nothing is injected */
    _Atomic uint64_t number, seen;
    _Atomic int32_t code;
} injection;

/* Libraries are found by the SONAME that a build needs. dlsym(RTLD_NEXT) does not reach a library that was opened
 * RTLD_LOCAL, as the dependencies of a Python extension or of a backend are. */
struct library {
    const char *prefix; /* of its functions */
    const char *file;   /* how its file begins */
    const char *names[6];
    void *_Atomic handle;
};

static struct library libraries[] = {
    {"cublas", "libcublas.so", {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11", NULL}, NULL},
    {"cuda", "libcudart", {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", NULL}, NULL},
    {"__cuda", "libcudart", {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", NULL}, NULL},
    {"cu", "libcuda.so", {"libcuda.so.1", "libcuda.so", NULL}, NULL},
    {"ggml", "libggml-base", {"libggml-base.so.0", "libggml-base.so", NULL}, NULL},
    {"ggml", "libllama", {"libllama.so.0", "libllama.so", NULL}, NULL}, /* with ggml linked into it */
};

struct search {
    const char *file;
    void *handle;
};

static int open_by_file(struct dl_phdr_info *info, size_t size, void *argument) {
    (void)size;
    struct search *search = argument;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *file = slash ? slash + 1 : info->dlpi_name;
    if (!strncmp(file, search->file, strlen(search->file))) {
        search->handle = dlopen(info->dlpi_name, RTLD_NOLOAD | RTLD_LAZY);
    }
    return search->handle != NULL;
}

static void *handle_of(struct library *library) {
    void *handle = atomic_load(&library->handle);
    for (int i = 0; !handle && library->names[i]; i++) {
        handle = dlopen(library->names[i], RTLD_NOLOAD | RTLD_LAZY);
    }
    if (!handle) {
        struct search search = {library->file, NULL};
        dl_iterate_phdr(open_by_file, &search);
        handle = search.handle;
    }
    atomic_store(&library->handle, handle);
    return handle;
}

void *isolate_find(const char *name) {
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++) {
        if (!strncmp(name, libraries[i].prefix, strlen(libraries[i].prefix))) {
            void *handle = handle_of(&libraries[i]);
            void *found = handle ? dlsym(handle, name) : NULL;
            if (found) {
                return found;
            }
        }
    }
    return NULL;
}

static int not_there(void) {
    return CUDA_ERROR_SYMBOL_NOT_FOUND;
}

void *isolate_find_real(struct isolate_hook *hook) {
    void *real = isolate_find_once(hook->name.text, &hook->real);
    return real ? real : (void *)not_there;
}

int isolate_peek(void) {
    int (*peek)(void) = FIND("cudaPeekAtLastError", void);
    return isolate_this.pending ? isolate_this.pending : peek ? peek() : 0;
}

/* A server that was started with the hooks preloaded says by its environment where the trace goes. Only a process that
 * makes a CUDA call opens it: the shell that started the server has the same environment. */
static void open_from_environment(void) {
    static const struct {
        const char *word;
        uint32_t bit;
    } modes[] = {
        {"sync", ISOLATE_MODE_SYNC},     {"no-vmm", ISOLATE_MODE_NO_VMM},
        {"fence", ISOLATE_MODE_FENCE},   {"fence-before", ISOLATE_MODE_FENCE_BEFORE},
        {"poison", ISOLATE_MODE_POISON},
    };
    const char *path = getenv("ISOLATE_TRACE");
    if (!path || isolate_trace()) {
        return;
    }
    int error = isolate_trace_open(path, 1 << 16, 1 << 22);
    if (error) {
        fprintf(stderr, "isolate: the trace %s cannot be written: %s\n", path, strerror(error));
        return;
    }
    uint32_t mode = 0;
    uint64_t first = 0, last = 0;
    char words[128], *rest = words;
    const char *wanted = getenv("ISOLATE_TRACE_MODE"), *window = getenv("ISOLATE_TRACE_WINDOW");
    snprintf(words, sizeof words, "%s", wanted ? wanted : "");
    for (char *word; (word = strtok_r(rest, ",", &rest));) {
        for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
            mode |= strcmp(word, modes[i].word) ? 0 : modes[i].bit;
        }
    }
    if (window && sscanf(window, "%lu-%lu", &first, &last) == 2) {
        mode |= ISOLATE_MODE_WINDOW;
    }
    isolate_trace_mode(mode, first, last);
}

ISOLATE_API void isolate_trace_mode(uint32_t mode, uint64_t first, uint64_t last) {
    struct isolate_header *header = isolate_trace();
    atomic_store(&window_first, first);
    atomic_store(&window_last, last);
    atomic_store(&isolate_mode, mode);
    if (header) {
        header->window_first = first;
        header->window_last = last;
        atomic_store(&header->mode, mode);
    }
}

ISOLATE_API void isolate_trace_inject(int kind, uint64_t number, int32_t code) {
    atomic_store(&injection.kind, 0);
    atomic_store(&injection.number, number);
    atomic_store(&injection.code, code);
    atomic_store(&injection.seen, 0);
    atomic_store(&injection.kind, code ? kind : 0);
}

static bool injected(const struct isolate_record *record) {
    if (atomic_load_explicit(&injection.kind, memory_order_relaxed) != record->kind) {
        return false;
    }
    uint64_t number = record->kind == ISOLATE_LAUNCH ? record->launch : atomic_fetch_add(&injection.seen, 1) + 1;
    return number == atomic_load(&injection.number);
}

bool isolate_synchronizes(uint32_t mode, const struct isolate_record *record) {
    return mode & ISOLATE_MODE_SYNC
        || (mode & ISOLATE_MODE_WINDOW && record->launch >= atomic_load(&window_first)
            && record->launch <= atomic_load(&window_last));
}

void isolate_enter(struct isolate_call *call, struct isolate_hook *hook) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!isolate_trace()) {
        pthread_once(&once, open_from_environment);
    }
    isolate_this.inside = true;
    call->hook = hook;
    isolate_blank(&call->record, hook->kind);
    call->record.call = isolate_name_offset(&hook->name);
    call->record.device = isolate_this.device;
    call->number = ISOLATE_NO_RECORD;
    call->answer = 0;
    call->locked = false;
}

/* Gives the device work that can break it. A copy from or to the host past the end of an allocation is refused by the call
 * itself (seen on an H200), and most are followed by a synchronize of ggml's own. */
static bool can_break(const struct isolate_call *call) {
    int direction = call->record.detail.copy.direction;
    bool with_host = direction == CUDA_COPY_HOST_TO_DEVICE || direction == CUDA_COPY_DEVICE_TO_HOST;
    return call->hook->flags & QUEUES && !(call->record.kind == ISOLATE_COPY && with_host);
}

bool isolate_before(struct isolate_call *call) {
    struct isolate_record *record = &call->record;
    uint32_t mode = atomic_load_explicit(&isolate_mode, memory_order_relaxed);
    int flags = call->hook->flags;
    void *stream = (void *)(uintptr_t)record->stream;
    record->capturing = flags & QUEUES && isolate_capturing(stream);
    if (flags & CHECKED) {
        /* Asking costs as much as writing the record does. */
        bool clean = isolate_this.sure && !isolate_this.known
                  && atomic_load_explicit(&isolate_all_hooked, memory_order_relaxed);
        record->before = clean ? 0 : isolate_peek();
    }
    if (mode & (ISOLATE_MODE_SYNC | ISOLATE_MODE_WINDOW) && can_break(call) && isolate_may_synchronize(stream)) {
        pthread_mutex_lock(&one_at_a_time);
        call->locked = true;
    }
    call->number = isolate_begin(record);
    if (call->locked && mode & ISOLATE_MODE_WINDOW && record->kind == ISOLATE_LAUNCH
        && record->launch == atomic_load(&window_first)) {
        /* What broke before the window must not be laid at its first launch. */
        int (*synchronize)(void) = FIND("cudaDeviceSynchronize", void);
        int code = synchronize ? synchronize() : 0;
        record->before = code ? code : record->before;
    }
    if (injected(record)) {
        record->injected = 1;
        call->answer = atomic_load(&injection.code);
    }
    return !record->injected;
}

/* The driver and cuBLAS have no last error. */
static bool is_runtime(const struct isolate_hook *hook) {
    return strstr(hook->name.text, "cuda") != NULL;
}

/* Waits for what the stream has to do. Most kernels are over in microseconds: asking again and again sees that sooner than
 * cudaStreamSynchronize, which is for the long ones. */
static int wait_for(void *stream) {
    enum { ASKED = 200 };
    int (*query)(void *) = FIND("cudaStreamQuery", void *);
    int (*synchronize)(void *) = FIND("cudaStreamSynchronize", void *);
    int (*forget)(void) = FIND("cudaGetLastError", void);
    int code = CUDA_ERROR_NOT_READY;
    bool waited = false;
    for (int i = 0; query && forget && i < ASKED && code == CUDA_ERROR_NOT_READY; i++) {
        code = query(stream);
        waited = waited || code == CUDA_ERROR_NOT_READY;
    }
    if (waited) {
        forget(); /* that the stream was not ready must not be read as an error; there was no other before */
    }
    return code != CUDA_ERROR_NOT_READY ? code : synchronize ? synchronize(stream) : 0;
}

ISOLATE_API void isolate_trace_pass(bool pass) {
    isolate_this.inside = pass;
    isolate_this.sure = false;
}

int isolate_after(struct isolate_call *call, int code) {
    struct isolate_record *record = &call->record;
    uint32_t mode = atomic_load_explicit(&isolate_mode, memory_order_relaxed);
    record->code = code;
    if (record->injected && is_runtime(call->hook)) {
        isolate_this.pending = code;
    }
    if (call->hook->flags & CHECKED) {
        record->after = isolate_peek();
    }
    if (call->locked) {
        if (!code && record->after <= 0 && isolate_synchronizes(mode, record)) {
            record->sync = wait_for((void *)(uintptr_t)record->stream);
        }
        pthread_mutex_unlock(&one_at_a_time);
    }
    bool stale = record->before > 0 && record->before != isolate_this.known;
    bool left_behind = record->after > 0 && record->after != record->before;
    bool failed = code || record->sync > 0 || left_behind || stale;
    isolate_end(call->number, record);
    if (failed) {
        isolate_explain(record, true);
    }
    isolate_this.sure = call->hook->flags & CHECKED ? record->sync <= 0 : isolate_this.sure && !code;
    if (record->sync > 0) {
        isolate_this.known = record->sync;
    } else if (call->hook->flags & CHECKED) {
        isolate_this.known = record->after;
    } else if (code && is_runtime(call->hook)) {
        isolate_this.known = code;
    }
    isolate_this.inside = false;
    return code;
}
