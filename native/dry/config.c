/* The configuration: lines of words with tabs between, written by isolate/trace/dry.py.
 *
 *   isolate dry device <format>
 *   driver <version>
 *   gpu                       then one line a limit: <limit> <value>
 *   library <path>            of the kernels that follow
 *   capability <90>           of the device that runs them
 *   kernel <container> <name> none
 *   kernel <container> <name> <ptx|cubin> <ptx version> <binary version> <max threads> <required x y z>
 *          <registers> <known> <static shared> <local> <cluster x y z> <max cluster>
 */
#define _GNU_SOURCE
#include "dry.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FORMAT "1"
#define MOST_BYTES ((off_t)1 << 30)
#define MOST_WORDS 20

struct dry_configuration dry;

static pthread_mutex_t configuring = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool configured;
static struct dry_code **buckets;
static size_t bucket_count;

static size_t bucket(uint64_t container, const char *name, int capability) {
    uint64_t hash = 14695981039346656037u ^ container ^ ((uint64_t)capability << 32);
    for (; *name; name++) {
        hash = (hash ^ (unsigned char)*name) * 1099511628211u;
    }
    return (size_t)(hash ^ hash >> 29) & (bucket_count - 1);
}

const struct dry_code *dry_code(const char *library, uint64_t container, const char *name, int capability) {
    if (bucket_count == 0) {
        return NULL;
    }
    struct dry_code *code = buckets[bucket(container, name, capability)];
    while (code && (code->container != container || code->capability != capability || strcmp(code->name, name) ||
                    strcmp(code->library, library))) {
        code = code->next;
    }
    return code;
}

/* Splits a line at its tabs, in place. */
static size_t split(char *line, char *words[MOST_WORDS]) {
    size_t count = 0;
    while (line && count < MOST_WORDS) {
        words[count++] = line;
        line = strchr(line, '\t');
        if (line) {
            *line++ = 0;
        }
    }
    return count;
}

static uint64_t number(const char *word) {
    return strtoull(word, NULL, 0);
}

static bool gpu_limit(struct dry_gpu *gpu, const char *limit, const char *value) {
    const struct {
        const char *name;
        int *place;
    } integers[] = {
        {"capability", &gpu->capability},
        {"processors", &gpu->processors},
        {"threads_per_processor", &gpu->threads_per_processor},
        {"blocks_per_processor", &gpu->blocks_per_processor},
        {"registers_per_processor", &gpu->registers_per_processor},
        {"registers_per_block", &gpu->registers_per_block},
        {"integrated", &gpu->integrated},
        {"cluster_launch", &gpu->cluster_launch},
        {"peer_access", &gpu->peer_access},
    };
    const struct {
        const char *name;
        size_t *place;
    } sizes[] = {
        {"shared_per_processor", &gpu->shared_per_processor},
        {"shared_per_block", &gpu->shared_per_block},
        {"shared_per_block_optin", &gpu->shared_per_block_optin},
        {"shared_reserved", &gpu->shared_reserved},
        {"memory", &gpu->memory},
        {"context_memory", &gpu->context_memory},
    };
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++) {
        if (!strcmp(limit, integers[i].name)) {
            *integers[i].place = (int)number(value);
            return true;
        }
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (!strcmp(limit, sizes[i].name)) {
            *sizes[i].place = number(value);
            return true;
        }
    }
    if (!strcmp(limit, "name")) {
        snprintf(gpu->name, sizeof gpu->name, "%s", value);
        return true;
    }
    return false;
}

static bool add_kernel(char *words[], size_t count, const char *library, int capability) {
    struct dry_code *code = calloc(1, sizeof *code);
    if (!code || !library || count < 4) {
        free(code);
        return false;
    }
    code->container = number(words[1]);
    code->name = words[2];
    code->library = library;
    code->capability = capability;
    if (count >= 18) {
        code->exists = true;
        code->from_ptx = !strcmp(words[3], "ptx");
        code->ptx = (int)number(words[4]);
        code->binary = (int)number(words[5]);
        code->max_threads = (unsigned)number(words[6]);
        code->required = (struct cuda_dim){(unsigned)number(words[7]), (unsigned)number(words[8]), (unsigned)number(words[9])};
        code->registers = (int)number(words[10]);
        code->registers_known = number(words[11]) != 0;
        code->shared = number(words[12]);
        code->local = number(words[13]);
        code->cluster = (struct cuda_dim){(unsigned)number(words[14]), (unsigned)number(words[15]), (unsigned)number(words[16])};
        code->max_cluster = (unsigned)number(words[17]);
    } else if (strcmp(words[3], "none")) {
        free(code);
        return false;
    }
    size_t place = bucket(code->container, code->name, capability);
    code->next = buckets[place];
    buckets[place] = code;
    return true;
}

/* Takes one line into account; false where it is none of ours. */
static bool take(char *words[], size_t count, const char **library, int *capability) {
    struct dry_gpu *gpu = dry.devices ? &dry.gpu[dry.devices - 1] : NULL;
    if (!strcmp(words[0], "kernel")) {
        return add_kernel(words, count, *library, *capability);
    }
    if (!strcmp(words[0], "gpu") && dry.devices < DRY_MOST_DEVICES) {
        memset(&dry.gpu[dry.devices++], 0, sizeof dry.gpu[0]);
        return true;
    }
    if (count < 2) {
        return false;
    }
    if (!strcmp(words[0], "library")) {
        *library = words[1];
    } else if (!strcmp(words[0], "capability") && *library) {
        *capability = (int)number(words[1]);
    } else if (!strcmp(words[0], "driver")) {
        dry.driver_version = (int)number(words[1]);
    } else {
        return gpu && gpu_limit(gpu, words[0], words[1]);
    }
    return true;
}

static int parse(const char *path, char *text) {
    const char *library = NULL;
    int capability = 0;
    size_t line_number = 0, kernels = 0;
    for (const char *at = text; (at = strstr(at, "\nkernel\t")); at++) {
        kernels++;
    }
    for (bucket_count = 1024; bucket_count < 2 * kernels; bucket_count *= 2) {
    }
    buckets = calloc(bucket_count, sizeof *buckets);
    if (!buckets) {
        bucket_count = 0;
        return ENOMEM;
    }
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *words[MOST_WORDS];
        size_t count = split(line, words);
        bool good = line_number++ ? take(words, count, &library, &capability)
                                  : count == 2 && !strcmp(words[0], "isolate dry device") && !strcmp(words[1], FORMAT);
        if (!good) {
            dry_refuse(CUDA_ERROR_NO_DEVICE, "%s is not a configuration of the dry device: line %zu says '%s'", path,
                       line_number, words[0]);
            dry.devices = 0;
            return EINVAL;
        }
    }
    return 0;
}

static int configure(const char *path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status)) {
        int failed = errno;
        dry_refuse(CUDA_ERROR_NO_DEVICE, "cannot read the configuration of the dry device, %s: %s", path, strerror(failed));
        if (file >= 0) {
            close(file);
        }
        return failed;
    }
    /* Kept for good: names in the table point into it. */
    char *text = status.st_size < MOST_BYTES ? malloc((size_t)status.st_size + 1) : NULL;
    size_t have = 0;
    for (ssize_t got = 1; text && got > 0 && have < (size_t)status.st_size; have += got > 0 ? (size_t)got : 0) {
        got = pread(file, text + have, (size_t)status.st_size - have, (off_t)have);
    }
    close(file);
    if (!text) {
        return ENOMEM;
    }
    text[have] = 0;
    return parse(path, text);
}

void dry_configured(void) {
    if (configured) {
        return;
    }
    pthread_mutex_lock(&configuring);
    if (!configured) {
        const char *path = getenv("ISOLATE_DRY");
        if (path && *path) {
            configure(path);
        } else {
            dry_refuse(CUDA_ERROR_NO_DEVICE, "the dry device has no configuration: ISOLATE_DRY names none");
        }
        configured = true;
    }
    pthread_mutex_unlock(&configuring);
}

/* Instead of ISOLATE_DRY, before the first CUDA call. Returns 0 or an errno. */
DRY_API int isolate_dry_configure(const char *path) {
    pthread_mutex_lock(&configuring);
    int failed = configured ? EALREADY : configure(path);
    configured = true;
    pthread_mutex_unlock(&configuring);
    return failed;
}
