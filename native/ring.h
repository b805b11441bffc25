/* The ring as the other native files of isolate write it. */
#ifndef ISOLATE_RING_H
#define ISOLATE_RING_H

#include "trace.h"

#define ISOLATE_API __attribute__((visibility("default")))
#define ISOLATE_NO_RECORD UINT64_MAX

/* What a thread keeps, read in every call: at a fixed distance from the thread's pointer. These few bytes fit what glibc
 * keeps free for libraries that are loaded late; others might not. */
#ifdef __GLIBC__
#define ISOLATE_THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define ISOLATE_THREAD_LOCAL _Thread_local
#endif

/* A name that is written often: its offset in the strings is kept for the trace it was found in. */
struct isolate_name {
    const char *text;
    _Atomic uint64_t kept; /* generation << 32 | offset */
};

/* The open trace, or NULL. */
struct isolate_header *isolate_trace(void);

/* Makes a record with the thread and step filled in and everything else 0 or -1. */
void isolate_blank(struct isolate_record *record, enum isolate_kind kind);
/* Writes `record` before its call; returns its number, or ISOLATE_NO_RECORD. */
uint64_t isolate_begin(struct isolate_record *record);
/* Writes what is known after the call: end, code, after, sync, copy detail. */
void isolate_end(uint64_t number, struct isolate_record *record);

/* Keeps a copy of a failed record; the caller fills the rest before isolate_evidence_done. NULL: no room. */
struct isolate_evidence *isolate_evidence_begin(const struct isolate_record *record);
void isolate_evidence_done(struct isolate_evidence *evidence);

/* Offset of a string in the trace, the same for the same text; 0 for NULL, "" and when the strings are full. */
uint32_t isolate_string(const char *text);
uint32_t isolate_name_offset(struct isolate_name *name);

/* CLOCK_MONOTONIC in nanoseconds; never goes back within a thread. */
uint64_t isolate_clock(void);

#endif
