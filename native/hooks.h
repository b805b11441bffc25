/* What a hook is made of: a function with the name and the parameters of one CUDA call, which records it and makes it. */
#ifndef ISOLATE_HOOKS_H
#define ISOLATE_HOOKS_H

#include "cuda_abi.h"
#include "ring.h"

#include <stdbool.h>

enum isolate_hook_flag {
    CHECKED = 1, /* cudaPeekAtLastError before and after: the call can fail without saying so */
    QUEUES = 2   /* gives the device work: synchronized after it in the modes that do that */
};

struct isolate_hook {
    struct isolate_name name;
    void *_Atomic real; /* what the build would have called without us */
    enum isolate_kind kind;
    int flags; /* enum isolate_hook_flag */
};

struct isolate_call {
    struct isolate_hook *hook;
    struct isolate_record record;
    uint64_t number;
    int32_t answer; /* of an injected fault */
    bool locked;
};

/* What one thread knows. */
struct isolate_thread {
    bool inside;     /* a hook is at work: calls made below it are not the build's */
    int32_t device;  /* current, as last set */
    int32_t known;   /* what cudaPeekAtLastError should say after the calls seen so far */
    bool sure;       /* `known` is what it says: it was asked, and no call after that returned an error */
    int32_t pending; /* what the build must read as the last error although the runtime does not have it */
};

extern ISOLATE_THREAD_LOCAL struct isolate_thread isolate_this;
extern _Atomic uint32_t isolate_mode; /* enum isolate_mode */
/* Every CUDA call that the loaded libraries import has a hook, as isolate_trace_live found: no other can leave an error. */
extern _Atomic bool isolate_all_hooked;

/* The function of that name in the loaded CUDA runtime, driver or cuBLAS; NULL where there is none. */
void *isolate_find(const char *name);
/* The same, looked up once for each place that asks. */
static inline void *isolate_find_once(const char *name, void *_Atomic *kept) {
    void *found = atomic_load_explicit(kept, memory_order_acquire);
    if (!found) {
        found = isolate_find(name);
        atomic_store_explicit(kept, found, memory_order_release);
    }
    return found;
}
#define FIND(name, ...)                                                                                         \
    ({                                                                                                          \
        static void *_Atomic kept;                                                                              \
        (int (*)(__VA_ARGS__)) isolate_find_once(name, &kept);                                                  \
    })
/* The same for a hook; a function that returns CUDA_ERROR_SYMBOL_NOT_FOUND where there is none. */
void *isolate_find_real(struct isolate_hook *hook);
static inline void *isolate_real(struct isolate_hook *hook) {
    void *real = atomic_load_explicit(&hook->real, memory_order_acquire);
    return real ? real : isolate_find_real(hook);
}

void isolate_enter(struct isolate_call *call, struct isolate_hook *hook);
/* False: the call is not to be made, `answer` is what it returns. */
bool isolate_before(struct isolate_call *call);
int isolate_after(struct isolate_call *call, int code);

/* Whether the stream is being captured, and whether synchronizing it now could spoil anybody's capture. */
bool isolate_capturing(void *stream);
bool isolate_may_synchronize(void *stream);
/* What is known of captures without asking the runtime. */
void isolate_capture_begins(void *stream, int mode);
void isolate_capture_ends(const void *stream);
bool isolate_captured(const void *stream);
bool isolate_any_capture(void);
/* Whether the mode wants a synchronize after this call. */
bool isolate_synchronizes(uint32_t mode, const struct isolate_record *record);

/* The name of a kernel by its host function or handle, as the build registered it; NULL where nobody knows. */
struct isolate_name *isolate_function(const void *function);
/* Keeps a copy of the name. */
void isolate_name_function(const void *function, const char *name);
/* What is launched, for the record. */
void isolate_launched(struct isolate_call *call, const void *function, struct cuda_dim grid, struct cuda_dim block,
                      size_t shared, const void *stream);

/* Device memory, by the memory modes that are on. */
int isolate_allocate(int (*real)(void **, size_t), void **pointer, size_t bytes);
int isolate_release(int (*real)(void *), void *pointer);
/* Fills fresh device memory with NaN bytes where that mode is on. */
void isolate_poison(void *pointer, size_t bytes);

/* Counted for isolate_trace_counts. bytes 0: what begins at `pointer`, else all that begins in that range. */
void isolate_count_allocation(uint64_t pointer, size_t bytes);
void isolate_count_release(uint64_t pointer, size_t bytes);
void isolate_count_graphs(int made);
void isolate_count_graph_launch(void);

/* What the runtime, or an injected fault, has as the last error. */
int isolate_peek(void);
/* Reads what explains a failed call into the trace; leaves the last error as it was. ask: CUDA may be called now. */
void isolate_explain(const struct isolate_record *record, bool ask);

/* Makes a hook of a call that is made all the time and cannot hang: a record only where it fails, no injected faults. */
#define QUIET_HOOK(name_, parameters, arguments, kind_, before)                                                 \
    ISOLATE_API int name_ parameters {                                                                          \
        static struct isolate_hook hook = {{#name_, 0}, NULL, kind_, 0};                                        \
        int (*real) parameters = isolate_real(&hook);                                                           \
        int code = real arguments;                                                                              \
        isolate_this.sure = isolate_this.sure && !code;                                                         \
        if (code && code != CUDA_ERROR_NOT_READY && !isolate_this.inside) {                                     \
            struct isolate_call call;                                                                           \
            isolate_enter(&call, &hook);                                                                        \
            before;                                                                                             \
            call.number = isolate_begin(&call.record);                                                          \
            isolate_after(&call, code);                                                                         \
        }                                                                                                       \
        return code;                                                                                            \
    }

/* Makes one hook. `invoke` is what to do instead of calling `real` with `arguments`; `before` and `after` are expressions
 * that may use `call`, and `after` also `code`. */
#define HOOK_AS(name_, parameters, arguments, kind_, flags_, before, invoke, after)                            \
    ISOLATE_API int name_ parameters {                                                                          \
        static struct isolate_hook hook = {{#name_, 0}, NULL, kind_, flags_};                                   \
        int (*real) parameters = isolate_real(&hook);                                                           \
        if (isolate_this.inside) {                                                                              \
            return real arguments;                                                                              \
        }                                                                                                       \
        struct isolate_call call;                                                                               \
        isolate_enter(&call, &hook);                                                                            \
        before;                                                                                                 \
        int code = isolate_before(&call) ? (invoke) : call.answer;                                              \
        after;                                                                                                  \
        return isolate_after(&call, code);                                                                      \
    }

#define HOOK(name, parameters, arguments, kind, flags, before, after)                                           \
    HOOK_AS(name, parameters, arguments, kind, flags, before, real arguments, after)

#define NOTHING (void)0

#endif
