/* Writes the trace from many threads at once: argv = path, capacity, threads, records a thread. */
#include "ring.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static int records;

/* Every field of a record follows from its thread and turn, so that a mix of two records shows. */
static void *write_records(void *argument) {
    uint64_t self = (uint64_t)(uintptr_t)argument;
    char name[32];
    static struct isolate_name call = {"launch", 0};
    for (int turn = 0; turn < records; turn++) {
        struct isolate_record record;
        isolate_blank(&record, ISOLATE_LAUNCH);
        snprintf(name, sizeof name, "kernel-%d-%d", (int)self, turn % 7);
        record.call = isolate_name_offset(&call);
        record.name = isolate_string(name);
        record.stream = self;
        record.device = (int32_t)self;
        record.detail.launch.grid[0] = (uint32_t)turn;
        record.detail.launch.shared = self * 1000000 + (uint64_t)turn;
        record.detail.launch.function = record.detail.launch.shared;
        uint64_t number = isolate_begin(&record);
        record.code = turn % 100 == 99 ? (int32_t)self + 1 : 0;
        isolate_end(number, &record);
        if (record.code) {
            struct isolate_evidence *evidence = isolate_evidence_begin(&record);
            if (evidence) {
                evidence->attributes[ISOLATE_KERNEL_REGISTERS] = (int64_t)self;
                isolate_evidence_done(evidence);
            }
        }
    }
    return NULL;
}

int main(int count, char **values) {
    enum { MOST = 64 };
    pthread_t threads[MOST];
    if (count != 5 || atoi(values[3]) > MOST) {
        return 2;
    }
    int error = isolate_trace_open(values[1], (uint32_t)atoi(values[2]), 1 << 16);
    if (error) {
        fprintf(stderr, "open: %d\n", error);
        return 1;
    }
    records = atoi(values[4]);
    for (int i = 0; i < atoi(values[3]); i++) {
        pthread_create(&threads[i], NULL, write_records, (void *)(uintptr_t)i);
    }
    for (int i = 0; i < atoi(values[3]); i++) {
        pthread_join(threads[i], NULL);
    }
    isolate_trace_close();
    return 0;
}
