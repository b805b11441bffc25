/* What the stand-ins of CUDA's libraries share: calls that fail on demand.
 *
 * STANDIN_FAIL is a list of NAME:NTH:CODE: the NTH call of NAME returns CODE. With a trailing `!` the call returns 0, and
 * CODE comes from the next synchronize on and stays, as when a kernel broke the device. */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct count {
    const char *name;
    _Atomic unsigned calls;
};

static inline int demanded(struct count *count, bool *later) {
    unsigned turn = atomic_fetch_add(&count->calls, 1) + 1;
    size_t length = strlen(count->name);
    const char *item = getenv("STANDIN_FAIL");
    while (item && *item) {
        unsigned nth;
        int code, used = 0;
        if (!strncmp(item, count->name, length) && sscanf(item + length, ":%u:%d%n", &nth, &code, &used) == 2
            && nth == turn) {
            *later = item[length + (size_t)used] == '!';
            return code;
        }
        item = strchr(item, ',');
        item = item ? item + 1 : NULL;
    }
    return 0;
}

#endif
