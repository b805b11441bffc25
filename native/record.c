/* Where records go, what tells the program's calls from the library's own, and how a state is known again. */
#define _GNU_SOURCE
#include "record.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int file = -1;
static _Atomic uint64_t next_number = 1;
static _Thread_local int depth;
static _Thread_local uint32_t this_thread;

static void put(struct isolate_recorded *record, const void *data, size_t size) {
    static const char padding[8];
    if (file < 0) {
        return;
    }
    if (!this_thread) {
        this_thread = (uint32_t)syscall(SYS_gettid);
    }
    size_t rest = (8 - size % 8) % 8;
    record->magic = ISOLATE_RECORD_MAGIC;
    record->bytes = (uint32_t)(sizeof *record + size + rest);
    record->process = (uint32_t)getpid();
    record->thread = this_thread;
    record->size = (uint32_t)size;
    struct iovec parts[] = {{record, sizeof *record}, {(void *)(uintptr_t)data, size}, {(void *)(uintptr_t)padding, rest}};
    int before = errno;
    while (writev(file, parts, 3) < 0 && errno == EINTR) {
    }
    errno = before;
}

__attribute__((constructor)) static void open_file(void) {
    const char *path = getenv("ISOLATE_RECORD");
    if (!path) {
        return;
    }
    file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    char program[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program);
    record_write(RECORD_OPENED, NULL, 0, program, length > 0 ? (size_t)length : 0);
}

bool record_enter(void) {
    return depth++ == 0;
}

void record_leave(void) {
    depth--;
}

uint64_t record_write(enum isolate_call_kind kind, const int64_t *a, int count, const void *data, size_t size) {
    struct isolate_recorded record = {.kind = kind, .number = atomic_fetch_add(&next_number, 1)};
    if (file < 0) {
        return 0;
    }
    for (int i = 0; i < count; i++) {
        record.a[i] = a[i];
    }
    put(&record, data, size);
    return record.number;
}

void record_end(uint64_t number, int64_t result, uint64_t hash, int64_t size) {
    struct isolate_recorded record = {.kind = RECORD_END, .number = number, .a = {result, (int64_t)hash, size}};
    if (number) {
        put(&record, NULL, 0);
    }
}

/* Four lanes of multiply and rotate: states are told apart, nobody is kept from making two alike on purpose. */
uint64_t record_hash(const void *data, size_t size) {
    const uint8_t *bytes = data;
    uint64_t lane[4] = {1, 2, 3, 4};
    size_t place = 0;
    for (; place + 32 <= size; place += 32) {
        for (int i = 0; i < 4; i++) {
            uint64_t word;
            memcpy(&word, bytes + place + 8 * i, 8);
            lane[i] = (lane[i] ^ word) * 0x9e3779b97f4a7c15u;
            lane[i] ^= lane[i] >> 29;
        }
    }
    for (; place < size; place++) {
        lane[place % 4] = (lane[place % 4] ^ bytes[place]) * 0x9e3779b97f4a7c15u;
    }
    uint64_t hash = size;
    for (int i = 0; i < 4; i++) {
        hash = (hash ^ lane[i]) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return hash;
}

void *record_real(const char *name) {
    void *real = dlsym(RTLD_NEXT, name);
    if (!real) {
        fprintf(stderr, "isolate record: the program calls %s, and no library behind it has that\n", name);
        abort();
    }
    static atomic_flag said = ATOMIC_FLAG_INIT;
    Dl_info from;
    if (file >= 0 && !atomic_flag_test_and_set(&said) && dladdr(real, &from) && from.dli_fname) {
        record_write(RECORD_LIBRARY, NULL, 0, from.dli_fname, strlen(from.dli_fname));
    }
    return real;
}
