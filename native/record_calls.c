/* The calls of libllama that make a context, take and set states, and change the memory: each stands before the real one. */
#include "record.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A struct that is passed by value lies in the caller's frame. Its size is the build's own affair: more is passed on than
 * any build has, and each reads what it knows. */
struct params {
    uint8_t bytes[512];
};

#define SEQUENCE_SIZE "llama_state_seq_get_size"
#define POINTER(value_) ((int64_t)(intptr_t)(value_))
#define BEGIN(kind_, data_, size_, ...)                                                                     \
    const int64_t a[] = {__VA_ARGS__};                                                                      \
    uint64_t number = record_enter() ? record_write(kind_, a, (int)(sizeof a / sizeof *a), data_, size_) : 0
#define END(result_, hash_, size_)               \
    record_end(number, (int64_t)(result_), hash_, (int64_t)(size_)); \
    record_leave()

ISOLATE_API void *llama_model_load_from_file(const char *path, struct params params) {
    RECORD_REAL(void *(*)(const char *, struct params), "llama_model_load_from_file");
    BEGIN(RECORD_MODEL, path, strlen(path), 0);
    void *model = real(path, params);
    END(POINTER(model), 0, 0);
    return model;
}

ISOLATE_API void *llama_model_load_from_splits(const char **paths, size_t count, struct params params) {
    RECORD_REAL(void *(*)(const char **, size_t, struct params), "llama_model_load_from_splits");
    BEGIN(RECORD_MODEL, count ? paths[0] : "", count ? strlen(paths[0]) : 0, 0);
    void *model = real(paths, count, params);
    END(POINTER(model), 0, 0);
    return model;
}

/* Contexts made and freed so far. */
static _Atomic uint64_t contexts_changed;

ISOLATE_API void *llama_init_from_model(void *model, struct params params) {
    RECORD_REAL(void *(*)(void *, struct params), "llama_init_from_model");
    BEGIN(RECORD_CONTEXT, &params, sizeof params, POINTER(model));
    void *context = real(model, params);
    RECORD_REAL_AS(size_of, uint32_t(*)(const void *), "llama_n_ctx");
    END(POINTER(context), context ? size_of(context) : 0, 0);
    atomic_fetch_add(&contexts_changed, 1);
    return context;
}

ISOLATE_API void llama_free(void *context) {
    RECORD_REAL(void (*)(void *), "llama_free");
    BEGIN(RECORD_FREE, NULL, 0, POINTER(context));
    real(context);
    END(0, 0, 0);
    atomic_fetch_add(&contexts_changed, 1);
}

ISOLATE_API void *llama_get_memory(const void *context) {
    RECORD_REAL(void *(*)(const void *), "llama_get_memory");
    static _Thread_local const void *last_context;
    static _Thread_local void *last;
    static _Thread_local uint64_t last_change;
    bool outermost = record_enter();
    void *memory = real(context);
    /* A new context and its memory may lie where one that was freed did. */
    uint64_t change = atomic_load(&contexts_changed);
    if (outermost && (context != last_context || memory != last || change != last_change)) {
        const int64_t a[] = {POINTER(memory), POINTER(context)};
        record_write(RECORD_MEMORY, a, 2, NULL, 0);
        last_context = context;
        last = memory;
        last_change = change;
    }
    record_leave();
    return memory;
}

/* -- states */

ISOLATE_API size_t llama_state_seq_get_data_ext(void *context, uint8_t *data, size_t size, int32_t sequence, uint32_t flags) {
    RECORD_REAL(size_t(*)(void *, uint8_t *, size_t, int32_t, uint32_t), "llama_state_seq_get_data_ext");
    BEGIN(RECORD_STATE_GET, NULL, 0, POINTER(context), sequence, flags, (int64_t)size);
    size_t moved = real(context, data, size, sequence, flags);
    END(moved, number && moved <= size ? record_hash(data, moved) : 0, moved);
    return moved;
}

ISOLATE_API size_t llama_state_seq_get_data(void *context, uint8_t *data, size_t size, int32_t sequence) {
    RECORD_REAL(size_t(*)(void *, uint8_t *, size_t, int32_t), "llama_state_seq_get_data");
    BEGIN(RECORD_STATE_GET, NULL, 0, POINTER(context), sequence, 0, (int64_t)size);
    size_t moved = real(context, data, size, sequence);
    END(moved, number && moved <= size ? record_hash(data, moved) : 0, moved);
    return moved;
}

ISOLATE_API size_t llama_state_seq_set_data_ext(void *context, const uint8_t *data, size_t size, int32_t sequence, uint32_t flags) {
    RECORD_REAL(size_t(*)(void *, const uint8_t *, size_t, int32_t, uint32_t), "llama_state_seq_set_data_ext");
    BEGIN(RECORD_STATE_SET, NULL, 0, POINTER(context), sequence, flags, (int64_t)size, (int64_t)record_hash(data, size));
    size_t moved = real(context, data, size, sequence, flags);
    END(moved, 0, moved);
    return moved;
}

ISOLATE_API size_t llama_state_seq_set_data(void *context, const uint8_t *data, size_t size, int32_t sequence) {
    RECORD_REAL(size_t(*)(void *, const uint8_t *, size_t, int32_t), "llama_state_seq_set_data");
    BEGIN(RECORD_STATE_SET, NULL, 0, POINTER(context), sequence, 0, (int64_t)size, (int64_t)record_hash(data, size));
    size_t moved = real(context, data, size, sequence);
    END(moved, 0, moved);
    return moved;
}

ISOLATE_API size_t llama_state_seq_save_file(void *context, const char *path, int32_t sequence, const int32_t *tokens, size_t count) {
    RECORD_REAL(size_t(*)(void *, const char *, int32_t, const int32_t *, size_t), "llama_state_seq_save_file");
    BEGIN(RECORD_FILE_SAVE, path, strlen(path), POINTER(context), sequence);
    size_t moved = real(context, path, sequence, tokens, count);
    END(moved, 0, moved);
    return moved;
}

ISOLATE_API size_t llama_state_seq_load_file(void *context, const char *path, int32_t sequence, int32_t *tokens, size_t capacity,
                                             size_t *count) {
    RECORD_REAL(size_t(*)(void *, const char *, int32_t, int32_t *, size_t, size_t *), "llama_state_seq_load_file");
    if (!tokens) { /* only asks how many tokens the file has (llama.h) */
        return real(context, path, sequence, tokens, capacity, count);
    }
    BEGIN(RECORD_FILE_LOAD, path, strlen(path), POINTER(context), sequence);
    size_t moved = real(context, path, sequence, tokens, capacity, count);
    END(moved, 0, moved);
    return moved;
}

/* What they answer changes nothing, but they can die: a case then ends with the state itself. */
ISOLATE_API size_t llama_state_seq_get_size_ext(void *context, int32_t sequence, uint32_t flags) {
    RECORD_REAL(size_t(*)(void *, int32_t, uint32_t), "llama_state_seq_get_size_ext");
    BEGIN(RECORD_OTHER, SEQUENCE_SIZE, strlen(SEQUENCE_SIZE), POINTER(context), sequence, flags);
    size_t bytes = real(context, sequence, flags);
    END(bytes, 0, 0);
    return bytes;
}

ISOLATE_API size_t llama_state_seq_get_size(void *context, int32_t sequence) {
    RECORD_REAL(size_t(*)(void *, int32_t), "llama_state_seq_get_size");
    BEGIN(RECORD_OTHER, SEQUENCE_SIZE, strlen(SEQUENCE_SIZE), POINTER(context), sequence, 0);
    size_t bytes = real(context, sequence);
    END(bytes, 0, 0);
    return bytes;
}

/* The state of a whole context has no step in a case. */
#define OTHER(name_) BEGIN(RECORD_OTHER, name_, strlen(name_), POINTER(context))

ISOLATE_API size_t llama_state_get_size(void *context) {
    RECORD_REAL(size_t(*)(void *), "llama_state_get_size");
    OTHER("llama_state_get_size");
    size_t bytes = real(context);
    END(bytes, 0, 0);
    return bytes;
}

ISOLATE_API size_t llama_state_get_data(void *context, uint8_t *data, size_t size) {
    RECORD_REAL(size_t(*)(void *, uint8_t *, size_t), "llama_state_get_data");
    OTHER("llama_state_get_data");
    size_t moved = real(context, data, size);
    END(moved, 0, moved);
    return moved;
}

ISOLATE_API size_t llama_state_set_data(void *context, const uint8_t *data, size_t size) {
    RECORD_REAL(size_t(*)(void *, const uint8_t *, size_t), "llama_state_set_data");
    OTHER("llama_state_set_data");
    size_t moved = real(context, data, size);
    END(moved, 0, moved);
    return moved;
}

ISOLATE_API bool llama_state_save_file(void *context, const char *path, const int32_t *tokens, size_t count) {
    RECORD_REAL(bool (*)(void *, const char *, const int32_t *, size_t), "llama_state_save_file");
    OTHER("llama_state_save_file");
    bool done = real(context, path, tokens, count);
    END(done, 0, 0);
    return done;
}

ISOLATE_API bool llama_state_load_file(void *context, const char *path, int32_t *tokens, size_t capacity, size_t *count) {
    RECORD_REAL(bool (*)(void *, const char *, int32_t *, size_t, size_t *), "llama_state_load_file");
    OTHER("llama_state_load_file");
    bool done = real(context, path, tokens, capacity, count);
    END(done, 0, 0);
    return done;
}

/* -- memory */

ISOLATE_API void llama_memory_clear(void *memory, bool data) {
    RECORD_REAL(void (*)(void *, bool), "llama_memory_clear");
    BEGIN(RECORD_CLEAR, NULL, 0, POINTER(memory), data);
    real(memory, data);
    END(1, 0, 0);
}

ISOLATE_API bool llama_memory_seq_rm(void *memory, int32_t sequence, int32_t p0, int32_t p1) {
    RECORD_REAL(bool (*)(void *, int32_t, int32_t, int32_t), "llama_memory_seq_rm");
    BEGIN(RECORD_SEQ_RM, NULL, 0, POINTER(memory), sequence, p0, p1);
    bool done = real(memory, sequence, p0, p1);
    END(done, 0, 0);
    return done;
}

ISOLATE_API void llama_memory_seq_cp(void *memory, int32_t sequence, int32_t into, int32_t p0, int32_t p1) {
    RECORD_REAL(void (*)(void *, int32_t, int32_t, int32_t, int32_t), "llama_memory_seq_cp");
    BEGIN(RECORD_SEQ_CP, NULL, 0, POINTER(memory), sequence, into, p0, p1);
    real(memory, sequence, into, p0, p1);
    END(1, 0, 0);
}

ISOLATE_API void llama_memory_seq_keep(void *memory, int32_t sequence) {
    RECORD_REAL(void (*)(void *, int32_t), "llama_memory_seq_keep");
    BEGIN(RECORD_SEQ_KEEP, NULL, 0, POINTER(memory), sequence);
    real(memory, sequence);
    END(1, 0, 0);
}

ISOLATE_API void llama_memory_seq_add(void *memory, int32_t sequence, int32_t p0, int32_t p1, int32_t delta) {
    RECORD_REAL(void (*)(void *, int32_t, int32_t, int32_t, int32_t), "llama_memory_seq_add");
    BEGIN(RECORD_SEQ_ADD, NULL, 0, POINTER(memory), sequence, p0, p1, delta);
    real(memory, sequence, p0, p1, delta);
    END(1, 0, 0);
}

ISOLATE_API void llama_memory_seq_div(void *memory, int32_t sequence, int32_t p0, int32_t p1, int divisor) {
    RECORD_REAL(void (*)(void *, int32_t, int32_t, int32_t, int), "llama_memory_seq_div");
    BEGIN(RECORD_OTHER, "llama_memory_seq_div", 20, POINTER(memory));
    real(memory, sequence, p0, p1, divisor);
    END(1, 0, 0);
}
