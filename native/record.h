/* The recording: what a program called of libllama, written before each call and after it.
 *
 * A file of records one after the other. Each is written with one write to a descriptor opened for appending, so that
 * threads do not mix and what was written is there however the process ends. Read by isolate/serve/recording.py. */
#ifndef ISOLATE_RECORD_H
#define ISOLATE_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ISOLATE_API __attribute__((visibility("default")))
#define ISOLATE_RECORD_MAGIC 0x31524f53u /* "SOR1" */

enum isolate_call_kind {
    RECORD_OPENED = 1, /* data: path of the program */
    RECORD_END,        /* number: of the call that ended; a: result, hash of a state, its size */
    RECORD_MODEL,      /* data: path */
    RECORD_CONTEXT,    /* a: model; data: the bytes of llama_context_params and more; its end has n_ctx for a hash */
    RECORD_FREE,       /* a: context */
    RECORD_MEMORY,     /* a: memory, context it belongs to */
    RECORD_DECODE,     /* a: context, function (enum isolate_decode), tokens; data: struct isolate_token each */
    RECORD_STATE_GET,  /* a: context, sequence, flags, size */
    RECORD_STATE_SET,  /* a: context, sequence, flags, size, hash */
    RECORD_FILE_SAVE,  /* a: context, sequence; data: path */
    RECORD_FILE_LOAD,  /* a: context, sequence; data: path */
    RECORD_SEQ_RM,     /* a: memory, sequence, p0, p1 */
    RECORD_SEQ_CP,     /* a: memory, sequence, into, p0, p1 */
    RECORD_SEQ_KEEP,   /* a: memory, sequence */
    RECORD_SEQ_ADD,    /* a: memory, sequence, p0, p1, delta */
    RECORD_CLEAR,      /* a: memory, data */
    RECORD_OTHER,      /* a: context or memory; data: name of a call that a case has no step for */
    RECORD_LIBRARY     /* data: path of the libllama that is called */
};

enum isolate_decode { RECORD_LLAMA_DECODE, RECORD_LLAMA_ENCODE, RECORD_LLAMA_PROCESS };

struct isolate_token {
    int32_t token;    /* -1: an embedding */
    int32_t position; /* -1: left to the library */
    int32_t sequence;
    int32_t output;    /* 1: logits are wanted, -1: left to the library */
    int32_t sequences; /* how many it belongs to; the first is `sequence` */
};

struct isolate_recorded {
    uint32_t magic;
    uint32_t bytes; /* with the data behind it */
    uint32_t process, thread;
    uint32_t kind;
    uint32_t size; /* of the data */
    uint64_t number;
    int64_t a[6];
};

/* Nested calls are the library's own and not recorded. Every record_enter is followed by a record_leave. */
bool record_enter(void);
void record_leave(void);
/* Writes a record and returns its number; 0 where nothing is recorded. */
uint64_t record_write(enum isolate_call_kind kind, const int64_t *a, int count, const void *data, size_t size);
void record_end(uint64_t number, int64_t result, uint64_t hash, int64_t size);
uint64_t record_hash(const void *data, size_t size);
/* The library's own function of that name; the process ends where there is none. */
void *record_real(const char *name);

/* A variable of that name is the library's own function, asked for once. */
#define RECORD_REAL_AS(variable_, type_, name_)                           \
    static __typeof__(type_) variable_;                                   \
    if (!variable_) {                                                     \
        variable_ = (__typeof__(variable_))(uintptr_t)record_real(name_); \
    }
#define RECORD_REAL(type_, name_) RECORD_REAL_AS(real, type_, name_)

#endif
