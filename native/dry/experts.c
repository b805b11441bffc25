/* The one result of a kernel that ggml's host code acts on: which experts a row is given to.
 *
 * Where a mixture of experts has no kernel for all of them, ggml reads the sorted indices back and makes a product for each
 * expert that has rows; zeros would be one expert several times, which it asserts cannot be. So the kernels that sort are
 * known by name, and what they would write reads as 0, 1, 2, ... in each row: as if row after row chose the first experts. */
#include "dry.h"

#include <stdlib.h>
#include <string.h>

#define MOST_SORTED 64

static const struct {
    const char *part; /* of the mangled name */
    int destination;  /* the argument that says where the indices go */
    int columns;      /* the argument that says how many a row has; -1: the number that follows in the name */
} sorts[] = {
    {"17k_argsort_f32_i32", 1, 2},
    {"13topk_moe_cudaILi", 2, -1},
};

static struct {
    uintptr_t start;
    size_t bytes;
    unsigned columns;
} sorted[MOST_SORTED];
static size_t sorted_count;

void dry_note_sort(const struct dry_launch *launch) {
    const char *name = launch->kernel->name;
    for (size_t i = 0; i < sizeof sorts / sizeof *sorts && launch->arguments; i++) {
        const char *part = strstr(name, sorts[i].part);
        if (!part) {
            continue;
        }
        uintptr_t start;
        int columns;
        memcpy(&start, launch->arguments[sorts[i].destination], sizeof start);
        if (sorts[i].columns < 0) {
            columns = (int)strtol(part + strlen(sorts[i].part), NULL, 10);
        } else {
            memcpy(&columns, launch->arguments[sorts[i].columns], sizeof columns);
        }
        size_t rows = (size_t)launch->grid.x * launch->grid.y * launch->block.y, place = sorted_count++ % MOST_SORTED;
        sorted[place].start = start;
        sorted[place].columns = columns > 0 ? (unsigned)columns : 1;
        sorted[place].bytes = rows * sorted[place].columns * sizeof(int);
        return;
    }
}

bool dry_read_sort(const struct dry_copy *copy) {
    for (size_t back = 1; back <= sorted_count && back <= MOST_SORTED; back++) {
        size_t place = (sorted_count - back) % MOST_SORTED;
        if (sorted[place].start != (uintptr_t)copy->source || copy->height != 1 || copy->width > sorted[place].bytes) {
            continue;
        }
        for (size_t i = 0; i < copy->width / sizeof(int); i++) {
            int index = (int)(i % sorted[place].columns);
            memcpy((char *)copy->destination + i * sizeof index, &index, sizeof index);
        }
        return true;
    }
    return false;
}
