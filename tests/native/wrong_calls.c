// A library that does something wrong, in front of a right libllama: WRONG says what.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { VOCABULARY = 128 };

static void * next(const char * name) {
    return dlsym(RTLD_NEXT, name);
}

static bool wrong(const char * what) {
    const char * wanted = getenv("WRONG");
    return wanted && strcmp(wanted, what) == 0;
}

int32_t llama_memory_seq_pos_max(void * memory, int32_t slot) {
    int32_t (*right)(void *, int32_t) = (int32_t (*)(void *, int32_t)) next("llama_memory_seq_pos_max");
    return right(memory, slot) - wrong("positions");
}

// Only in a context of several slots: one with one slot is what it is compared with.
float * llama_get_logits_ith(void * context, int32_t row) {
    static float changed[VOCABULARY];
    float * (*right)(void *, int32_t) = (float * (*)(void *, int32_t)) next("llama_get_logits_ith");
    float * logits = right(context, row);
    uint32_t (*slots)(void *) = (uint32_t (*)(void *)) next("llama_n_seq_max");
    if (slots(context) == 1 || !(wrong("logits") || wrong("nan"))) {
        return logits;
    }
    memcpy(changed, logits, sizeof(changed));
    changed[7] = wrong("nan") ? NAN : changed[7] + 1;
    return changed;
}

size_t llama_state_seq_set_data_ext(void * context, const uint8_t * data, size_t size, int32_t slot, uint32_t flags) {
    size_t (*right)(void *, const uint8_t *, size_t, int32_t, uint32_t) =
        (size_t (*)(void *, const uint8_t *, size_t, int32_t, uint32_t)) next("llama_state_seq_set_data_ext");
    void * (*memory)(void *) = (void * (*)(void *)) next("llama_get_memory");
    bool (*remove)(void *, int32_t, int32_t, int32_t) = (bool (*)(void *, int32_t, int32_t, int32_t)) next("llama_memory_seq_rm");
    const size_t moved = right(context, data, size, slot, flags);
    if (wrong("cells")) {
        remove(memory(context), slot, 3, 4);
    }
    return moved;
}
