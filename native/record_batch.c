/* Batches: llama_batch is recorded as it stands, a llama_batch_ext is followed while the program fills it. */
#include "record.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* llama.h, the same in every release since 2023-10 */
struct llama_batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
};

struct llama_embd {
    const float *data;
    size_t n_rows, n_embd;
};

struct followed {
    const void *batch;
    struct isolate_token *tokens;
    int32_t count, capacity;
    struct followed *next;
};

static struct followed *all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A batch is filled by one thread at a time; only the list of batches is shared. */
static struct followed *follow(const void *batch) {
    static _Thread_local struct followed *latest;
    static _Thread_local const void *latest_batch;
    if (latest && latest_batch == batch && latest->batch == batch) {
        return latest;
    }
    pthread_mutex_lock(&lock);
    struct followed *found = all;
    while (found && found->batch != batch) {
        found = found->next;
    }
    if (!found && (found = calloc(1, sizeof *found))) {
        found->batch = batch;
        found->next = all;
        all = found;
    }
    pthread_mutex_unlock(&lock);
    latest = found;
    latest_batch = batch;
    return found;
}

static void added(const void *batch, int32_t place, int32_t token, int32_t sequence) {
    struct followed *found = follow(batch);
    if (!found || place < 0) {
        return;
    }
    if (place >= found->capacity) {
        int32_t capacity = place < 256 ? 512 : 2 * place;
        struct isolate_token *tokens = realloc(found->tokens, (size_t)capacity * sizeof *tokens);
        if (!tokens) {
            return;
        }
        found->tokens = tokens;
        found->capacity = capacity;
    }
    found->tokens[place] = (struct isolate_token){token, -1, sequence, 0, 1};
    found->count = place + 1;
}

static struct isolate_token *at(const void *batch, int32_t place) {
    struct followed *found = follow(batch);
    return found && place >= 0 && place < found->count ? &found->tokens[place] : NULL;
}

ISOLATE_API void *llama_batch_ext_init(void *context) {
    RECORD_REAL(void *(*)(void *), "llama_batch_ext_init");
    void *batch = real(context);
    struct followed *found = follow(batch);
    if (found) {
        found->count = 0;
    }
    return batch;
}

ISOLATE_API void llama_batch_ext_clear(void *batch) {
    RECORD_REAL(void (*)(void *), "llama_batch_ext_clear");
    real(batch);
    struct followed *found = follow(batch);
    if (found) {
        found->count = 0;
    }
}

ISOLATE_API int32_t llama_batch_ext_add(void *batch, int32_t sequence) {
    RECORD_REAL(int32_t(*)(void *, int32_t), "llama_batch_ext_add");
    int32_t place = real(batch, sequence);
    added(batch, place, -1, sequence);
    return place;
}

ISOLATE_API int32_t llama_batch_ext_add_token(void *batch, int32_t sequence, int32_t token) {
    RECORD_REAL(int32_t(*)(void *, int32_t, int32_t), "llama_batch_ext_add_token");
    int32_t place = real(batch, sequence, token);
    added(batch, place, token, sequence);
    return place;
}

ISOLATE_API int32_t llama_batch_ext_add_embd(void *batch, int32_t sequence, struct llama_embd embedding) {
    RECORD_REAL(int32_t(*)(void *, int32_t, struct llama_embd), "llama_batch_ext_add_embd");
    int32_t place = real(batch, sequence, embedding);
    added(batch, place, -1, sequence);
    return place;
}

ISOLATE_API bool llama_batch_ext_add_seq(void *batch, int32_t place, int32_t sequence) {
    RECORD_REAL(bool (*)(void *, int32_t, int32_t), "llama_batch_ext_add_seq");
    bool done = real(batch, place, sequence);
    struct isolate_token *token = at(batch, place);
    if (done && token) {
        token->sequences++;
    }
    return done;
}

ISOLATE_API bool llama_batch_ext_set_pos(void *batch, int32_t place, const int32_t *position) {
    RECORD_REAL(bool (*)(void *, int32_t, const int32_t *), "llama_batch_ext_set_pos");
    bool done = real(batch, place, position);
    struct isolate_token *token = at(batch, place);
    if (done && token) {
        token->position = *position;
    }
    return done;
}

ISOLATE_API bool llama_batch_ext_set_output_logits(void *batch, int32_t place, bool wanted) {
    RECORD_REAL(bool (*)(void *, int32_t, bool), "llama_batch_ext_set_output_logits");
    bool done = real(batch, place, wanted);
    struct isolate_token *token = at(batch, place);
    if (done && token) {
        token->output = wanted;
    }
    return done;
}

static uint64_t begin(void *context, enum isolate_decode function, const struct isolate_token *tokens, int32_t count) {
    const int64_t a[] = {(int64_t)(intptr_t)context, function, count};
    return record_write(RECORD_DECODE, a, 3, tokens, (size_t)count * sizeof *tokens);
}

static uint64_t begin_plain(void *context, enum isolate_decode function, const struct llama_batch *batch) {
    int32_t count = batch->n_tokens > 0 ? batch->n_tokens : 0;
    struct isolate_token *tokens = calloc((size_t)count + 1, sizeof *tokens);
    if (!tokens) {
        return 0;
    }
    for (int32_t i = 0; i < count; i++) {
        tokens[i].token = batch->token ? batch->token[i] : -1;
        tokens[i].position = batch->pos ? batch->pos[i] : -1;
        tokens[i].sequences = batch->n_seq_id ? batch->n_seq_id[i] : 1;
        tokens[i].sequence = batch->seq_id && tokens[i].sequences > 0 ? batch->seq_id[i][0] : 0;
        tokens[i].output = batch->logits ? batch->logits[i] != 0 : -1;
    }
    uint64_t number = begin(context, function, tokens, count);
    free(tokens);
    return number;
}

ISOLATE_API int32_t llama_decode(void *context, struct llama_batch batch) {
    RECORD_REAL(int32_t(*)(void *, struct llama_batch), "llama_decode");
    uint64_t number = record_enter() ? begin_plain(context, RECORD_LLAMA_DECODE, &batch) : 0;
    int32_t code = real(context, batch);
    record_end(number, code, 0, 0);
    record_leave();
    return code;
}

ISOLATE_API int32_t llama_encode(void *context, struct llama_batch batch) {
    RECORD_REAL(int32_t(*)(void *, struct llama_batch), "llama_encode");
    uint64_t number = record_enter() ? begin_plain(context, RECORD_LLAMA_ENCODE, &batch) : 0;
    int32_t code = real(context, batch);
    record_end(number, code, 0, 0);
    record_leave();
    return code;
}

ISOLATE_API int32_t llama_process(void *context, int type, void *batch) {
    RECORD_REAL(int32_t(*)(void *, int, void *), "llama_process");
    uint64_t number = 0;
    if (record_enter()) {
        const struct followed *found = follow(batch);
        number = begin(context, RECORD_LLAMA_PROCESS, found ? found->tokens : NULL, found ? found->count : 0);
    }
    int32_t code = real(context, type, batch);
    record_end(number, code, 0, 0);
    record_leave();
    return code;
}
