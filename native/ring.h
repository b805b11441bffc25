/* The ring as the other native files of isolate write it. */
#ifndef ISOLATE_RING_H
#define ISOLATE_RING_H

#include "trace.h"

#define ISOLATE_API __attribute__((visibility("default")))
#define ISOLATE_NO_RECORD UINT64_MAX

/* A name that is written often: its offset in the strings is kept for the trace it was found in. */
struct isolate_name {
    const char *text;
    _Atomic uint64_t kept; /* generation << 32 | offset */
};

/* The open trace, or NULL. */
struct isolate_header *isolate_trace(void);

/* A record with the number, thread, time and step filled in and everything else 0 or -1. */
struct isolate_record isolate_blank(enum isolate_kind kind);
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

uint64_t isolate_clock(void);

#endif
