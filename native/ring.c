/* Writes the trace: claims a record with one atomic exchange, fills it, publishes it; never waits for another thread. */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <x86intrin.h>
#endif

_Static_assert(sizeof(struct isolate_record) == 168, "isolate/trace/ring.py mirrors this layout");
_Static_assert(sizeof(struct isolate_evidence) == 528, "isolate/trace/ring.py mirrors this layout");
_Static_assert(offsetof(struct isolate_header, failures) == 2192, "isolate/trace/ring.py mirrors this layout");
_Static_assert(sizeof(struct isolate_header) <= ISOLATE_HEADER_BYTES, "the header has outgrown its place");

#define INTERNED 65536 /* places in the table of strings; a power of two */
#define PROBES 64

static struct {
    struct isolate_header *_Atomic header;
    char *strings;
    struct isolate_record *records;
    uint32_t mask;
    uint64_t bytes;
    _Atomic uint32_t generation;         /* counts opens: what isolate_name keeps is of one generation */
    _Atomic uint32_t interned[INTERNED]; /* offsets in strings, by hash; 0 = free */
} trace;

static _Atomic int log_level = 3;
static _Atomic int32_t nodes; /* begun in the step in flight */
static ISOLATE_THREAD_LOCAL uint32_t thread_id;

static void forget_thread(void) {
    thread_id = 0;
}

static uint32_t this_thread(void) {
    if (!thread_id) {
        thread_id = (uint32_t)syscall(SYS_gettid);
    }
    return thread_id;
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_thread);
}

static uint64_t monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#ifdef __x86_64__
/* CPUID: the time stamp counter runs at one rate in all states of the processor. */
static bool has_even_counter(void) {
    unsigned a, b, c, d = 0;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) && d & 1u << 8;
}

/* Between two looks at the clock the time comes from the counter, at a third of the price. A look about every
 * millisecond keeps the error below a microsecond, whatever becomes of the counter. */
#define LOOK_TICKS (UINT64_C(1) << 22)
#define TIGHT_TICKS 1024 /* a look that took longer was interrupted: it says nothing of the counter */

static ISOLATE_THREAD_LOCAL struct {
    uint64_t ticks, ns;  /* read together */
    uint64_t rate;       /* nanoseconds << 32 a tick; 0 = not known yet */
    uint64_t latest;
} look;

static uint64_t look_again(void) {
    uint64_t before = __rdtsc(), now = monotonic(), since = before - look.ticks;
    if (since >= LOOK_TICKS && __rdtsc() - before < TIGHT_TICKS) {
        bool known = look.ns && (look.rate || has_even_counter());
        look.rate = known ? (uint64_t)((double)(now - look.ns) / (double)since * 4294967296.0) : 0;
        look.ticks = before;
        look.ns = now;
    }
    return now;
}

uint64_t isolate_clock(void) {
    uint64_t since = __rdtsc() - look.ticks;
    uint64_t now = since < LOOK_TICKS && look.rate ? look.ns + (since * look.rate >> 32) : look_again();
    look.latest = now > look.latest ? now : look.latest;
    return look.latest;
}
#else
uint64_t isolate_clock(void) {
    return monotonic();
}
#endif

struct isolate_header *isolate_trace(void) {
    return atomic_load_explicit(&trace.header, memory_order_acquire);
}

/* Gives the file its size with nothing in it. A memfd of the parent is sealed against shrinking, so that a reader which
 * maps it cannot fault: such a file is emptied by punching a hole. */
static int empty_file(int file, uint64_t bytes) {
    struct stat status;
    if (fstat(file, &status)) {
        return errno;
    }
    if ((uint64_t)status.st_size == bytes
        && !fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes)) {
        return 0;
    }
    return ftruncate(file, 0) || ftruncate(file, (off_t)bytes) ? errno : 0;
}

ISOLATE_API int isolate_trace_open(const char *path, uint32_t capacity, uint32_t strings_bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!capacity || capacity & (capacity - 1) || !strings_bytes || strings_bytes % 8) {
        return EINVAL;
    }
    isolate_trace_close();
    pthread_once(&once, watch_forks);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) {
        return errno;
    }
    uint64_t bytes = ISOLATE_HEADER_BYTES + (uint64_t)strings_bytes + (uint64_t)capacity * sizeof(struct isolate_record);
    int error = empty_file(file, bytes);
    void *map = error ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map == MAP_FAILED) {
        error = error ? error : errno;
        close(file);
        return error;
    }
    close(file);

    struct isolate_header *header = map;
    header->version = ISOLATE_TRACE_VERSION;
    header->header_bytes = ISOLATE_HEADER_BYTES;
    header->record_bytes = sizeof(struct isolate_record);
    header->capacity = capacity;
    header->strings_bytes = strings_bytes;
    header->start_ns = isolate_clock();
    atomic_store(&header->strings_used, 1); /* offset 0 is the empty string */
    atomic_store(&header->step, -1);
    atomic_thread_fence(memory_order_release);
    memcpy(header->magic, ISOLATE_TRACE_MAGIC, sizeof header->magic);

    trace.strings = (char *)map + ISOLATE_HEADER_BYTES;
    trace.records = (struct isolate_record *)(void *)(trace.strings + strings_bytes);
    trace.mask = capacity - 1;
    trace.bytes = bytes;
    for (size_t i = 0; i < INTERNED; i++) {
        atomic_store_explicit(&trace.interned[i], 0, memory_order_relaxed);
    }
    atomic_fetch_add(&trace.generation, 1);
    atomic_store_explicit(&trace.header, header, memory_order_release);
    return 0;
}

ISOLATE_API void isolate_trace_close(void) {
    struct isolate_header *header = atomic_exchange(&trace.header, NULL);
    if (header) {
        munmap(header, trace.bytes);
    }
}

ISOLATE_API void isolate_trace_restart(void) {
    struct isolate_header *header = isolate_trace();
    if (!header) {
        return;
    }
    atomic_store(&header->first, atomic_load(&header->next));
    atomic_store(&header->launches, 0);
    atomic_store(&header->step_kind, 0);
    atomic_store(&header->step, -1);
    atomic_store(&header->lost, 0);
    atomic_store(&header->failed, 0);
    atomic_store(&header->aborted, 0);
    for (size_t i = 0; i < ISOLATE_FAILURES; i++) {
        atomic_store(&header->failures[i].record.number, 0);
    }
}

static uint64_t hash(const char *text, size_t length) {
    uint64_t value = UINT64_C(14695981039346656037); /* FNV-1a */
    for (size_t i = 0; i < length; i++) {
        value = (value ^ (unsigned char)text[i]) * UINT64_C(1099511628211);
    }
    return value ^ value >> 32;
}

uint32_t isolate_string(const char *text) {
    struct isolate_header *header = isolate_trace();
    if (!header || !text || !*text) {
        return 0;
    }
    size_t length = strnlen(text, 4095);
    uint64_t place = hash(text, length);
    uint32_t fresh = 0;
    for (int probe = 0; probe < PROBES; probe++, place++) {
        _Atomic uint32_t *slot = &trace.interned[place & (INTERNED - 1)];
        uint32_t offset = atomic_load_explicit(slot, memory_order_acquire);
        if (!offset) {
            if (!fresh) {
                uint64_t used = atomic_load(&header->strings_used);
                do {
                    if (used + length + 1 > header->strings_bytes) {
                        return 0;
                    }
                } while (!atomic_compare_exchange_weak(&header->strings_used, &used, used + length + 1));
                memcpy(trace.strings + used, text, length);
                fresh = (uint32_t)used;
            }
            if (atomic_compare_exchange_strong_explicit(slot, &offset, fresh, memory_order_release,
                                                        memory_order_acquire)) {
                return fresh;
            }
        }
        if (!strncmp(trace.strings + offset, text, length) && !trace.strings[offset + length]) {
            return offset;
        }
    }
    return fresh;
}

uint32_t isolate_name_offset(struct isolate_name *name) {
    uint64_t generation = atomic_load_explicit(&trace.generation, memory_order_relaxed);
    uint64_t kept = atomic_load_explicit(&name->kept, memory_order_relaxed);
    if (kept >> 32 != generation || !kept) {
        kept = generation << 32 | isolate_string(name->text);
        atomic_store_explicit(&name->kept, kept, memory_order_relaxed);
    }
    return (uint32_t)kept;
}

/* Claims the place of record `number` for filling. False: another thread is in it, or went past it. */
static int claim(struct isolate_record *place, uint64_t number) {
    uint64_t there = atomic_load_explicit(&place->number, memory_order_relaxed);
    return !(there & ISOLATE_COMPLETING) && there <= number
        && atomic_compare_exchange_strong_explicit(&place->number, &there, ISOLATE_FILLING, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* Copies all of a record but its number, which is written apart and last. */
static void fill(struct isolate_record *place, const struct isolate_record *record) {
    memcpy((char *)place + sizeof place->number, (const char *)record + sizeof record->number,
           sizeof *record - sizeof record->number);
}

void isolate_blank(struct isolate_record *record, enum isolate_kind kind) {
    struct isolate_header *header = isolate_trace();
    atomic_store_explicit(&record->number, 0, memory_order_relaxed);
    record->done = 0;
    record->kind = (uint16_t)kind;
    record->capturing = record->injected = 0;
    record->begin_ns = record->end_ns = 0;
    record->step = header ? atomic_load_explicit(&header->step, memory_order_relaxed) : -1;
    record->launch = record->stream = 0;
    record->thread = this_thread();
    record->device = -1;
    record->call = record->name = 0;
    record->code = 0;
    record->before = record->after = record->sync = -1;
    memset(&record->detail, 0, sizeof record->detail);
}

/* Asks for the memory of a record that will be written soon: the ring is larger than the processor's caches. */
static void prefetch(uint64_t number) {
    enum { LINE = 64 };
    const char *place = (const char *)&trace.records[number & trace.mask];
    for (size_t offset = 0; offset < sizeof(struct isolate_record) + LINE - 1; offset += LINE) {
        __builtin_prefetch(place + offset, 1);
    }
}

uint64_t isolate_begin(struct isolate_record *record) {
    struct isolate_header *header = isolate_trace();
    if (!header) {
        return ISOLATE_NO_RECORD;
    }
    record->launch = record->kind == ISOLATE_LAUNCH ? atomic_fetch_add(&header->launches, 1) + 1
                                                    : atomic_load_explicit(&header->launches, memory_order_relaxed);
    record->begin_ns = isolate_clock();
    uint64_t number = atomic_fetch_add(&header->next, 1);
    prefetch(number + 1);
    atomic_store_explicit(&record->number, number + 1, memory_order_relaxed);
    struct isolate_record *place = &trace.records[number & trace.mask];
    if (!claim(place, number)) {
        atomic_fetch_add_explicit(&header->lost, 1, memory_order_relaxed);
        return ISOLATE_NO_RECORD;
    }
    fill(place, record);
    atomic_store_explicit(&place->number, number + 1, memory_order_release);
    return number;
}

/* Shows the parent that something goes on. Two threads at once may count as one, which is enough for that. */
static void count_end(struct isolate_header *header) {
    uint64_t ended = atomic_load_explicit(&header->ended, memory_order_relaxed);
    atomic_store_explicit(&header->ended, ended + 1, memory_order_relaxed);
}

void isolate_end(uint64_t number, struct isolate_record *record) {
    struct isolate_header *header = isolate_trace();
    if (!header) {
        return;
    }
    record->end_ns = isolate_clock();
    record->done = 1;
    count_end(header);
    if (number == ISOLATE_NO_RECORD) {
        return;
    }
    struct isolate_record *place = &trace.records[number & trace.mask];
    uint64_t mine = number + 1;
    if (atomic_compare_exchange_strong_explicit(&place->number, &mine, mine | ISOLATE_COMPLETING, memory_order_acquire,
                                                memory_order_relaxed)) {
        place->end_ns = record->end_ns;
        place->code = record->code;
        place->before = record->before;
        place->after = record->after;
        place->sync = record->sync;
        place->injected = record->injected;
        if (record->kind == ISOLATE_MEMORY || record->kind == ISOLATE_STREAM) {
            place->detail = record->detail; /* the address or the handle that the call returned */
        }
        place->done = 1;
        atomic_store_explicit(&place->number, number + 1, memory_order_release);
    }
}

struct isolate_evidence *isolate_evidence_begin(const struct isolate_record *record) {
    struct isolate_header *header = isolate_trace();
    if (!header) {
        return NULL;
    }
    uint64_t order = atomic_fetch_add(&header->failed, 1);
    uint64_t half = ISOLATE_FAILURES / 2;
    struct isolate_evidence *evidence = &header->failures[order < half ? order : half + order % half];
    uint64_t there = atomic_load(&evidence->record.number);
    if (there & ISOLATE_COMPLETING
        || !atomic_compare_exchange_strong(&evidence->record.number, &there, ISOLATE_FILLING)) {
        return NULL;
    }
    fill(&evidence->record, record);
    memset(evidence->attributes, 0xff, sizeof evidence->attributes);
    memset(evidence->limits, 0xff, sizeof evidence->limits);
    memset(evidence->frames, 0, sizeof evidence->frames);
    evidence->driver_log = 0;
    /* The copy stands from here on, should reading the rest end the process. */
    uint64_t number = atomic_load_explicit(&record->number, memory_order_relaxed);
    atomic_store_explicit(&evidence->record.number, number | ISOLATE_COMPLETING, memory_order_release);
    return evidence;
}

void isolate_evidence_done(struct isolate_evidence *evidence) {
    uint64_t number = atomic_load_explicit(&evidence->record.number, memory_order_relaxed);
    atomic_store_explicit(&evidence->record.number, number & ~ISOLATE_COMPLETING, memory_order_release);
}

ISOLATE_API uint64_t isolate_step_begin(int64_t step, const char *kind) {
    struct isolate_header *header = isolate_trace();
    if (!header) {
        return ISOLATE_NO_RECORD;
    }
    uint32_t call = isolate_string(kind);
    atomic_store(&header->step_kind, call);
    atomic_store(&header->routine, 0);
    atomic_store(&header->step, step);
    atomic_store(&nodes, 0);
    struct isolate_record record;
    isolate_blank(&record, ISOLATE_STEP);
    record.call = call;
    return isolate_begin(&record);
}

ISOLATE_API void isolate_step_routine(const char *name) {
    struct isolate_header *header = isolate_trace();
    if (header) {
        atomic_store(&header->routine, isolate_string(name));
    }
}

ISOLATE_API void isolate_step_end(uint64_t number, int32_t code) {
    struct isolate_record record;
    isolate_blank(&record, ISOLATE_STEP);
    record.code = code;
    isolate_end(number, &record);
}

ISOLATE_API uint64_t isolate_node_begin(const char *op, const char *name, const char *type, const int64_t shape[4],
                                        const char *const sources[4]) {
    struct isolate_record record;
    isolate_blank(&record, ISOLATE_NODE);
    record.name = isolate_string(name);
    record.detail.node.op = isolate_string(op);
    record.detail.node.type = isolate_string(type);
    record.detail.node.index = atomic_fetch_add(&nodes, 1);
    memcpy(record.detail.node.shape, shape, sizeof record.detail.node.shape);
    for (int i = 0; i < 4 && sources[i]; i++) {
        record.detail.node.source[i] = isolate_string(sources[i]);
    }
    return isolate_begin(&record);
}

ISOLATE_API void isolate_node_end(uint64_t number) {
    struct isolate_record record;
    isolate_blank(&record, ISOLATE_NODE);
    isolate_end(number, &record);
}

ISOLATE_API void isolate_on_abort(const char *message) {
    struct isolate_header *header = isolate_trace();
    if (!header || atomic_load(&header->aborted)) {
        return;
    }
    snprintf(header->abort_text, sizeof header->abort_text, "%s", message ? message : "");
    header->abort_thread = this_thread();
    header->abort_record = atomic_load(&header->next);
    atomic_store_explicit(&header->aborted, 1, memory_order_release);
}

ISOLATE_API void isolate_log_level(int level) {
    atomic_store(&log_level, level);
}

ISOLATE_API void isolate_on_log(int level, const char *text, void *user) {
    enum { CONTINUED = 5 }; /* GGML_LOG_LEVEL_CONT: belongs to the line before it */
    static _Thread_local int line_level;
    if (level != CONTINUED) {
        line_level = level;
    }
    size_t left = text ? strlen(text) : 0;
    while (line_level >= atomic_load(&log_level) && left) {
        ssize_t written = write((int)(intptr_t)user, text, left);
        if (written < 0 && errno != EINTR) {
            return;
        }
        if (written > 0) {
            text += written;
            left -= (size_t)written;
        }
    }
}
