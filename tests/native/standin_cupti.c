/* A stand-in CUPTI, and a CUDA runtime linked into the program, whose calls it reports. */
#include <stdint.h>
#include <stddef.h>

struct callback {
    int site;
    const char *function;
    const void *parameters;
    const int *result;
    const char *kernel;
    void *context;
    uint32_t context_number;
    uint64_t *correlation;
    uint32_t correlation_number;
};

static void (*subscribed)(void *, int, uint32_t, const struct callback *);
static unsigned enabled;

int cuptiSubscribe(void **subscriber, void (*callback)(void *, int, uint32_t, const struct callback *), void *user) {
    (void)user;
    if (subscribed) {
        return 39; /* CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED */
    }
    *subscriber = &subscribed;
    subscribed = callback;
    return 0;
}

int cuptiEnableDomain(uint32_t enable, void *subscriber, int domain) {
    (void)subscriber;
    enabled |= enable << domain;
    return 0;
}

static void report(int domain, int site, const char *function, const void *parameters, int result, const char *kernel) {
    struct callback data = {site, function, parameters, &result, kernel, NULL, 0, NULL, 0};
    if (enabled >> domain & 1) {
        subscribed(NULL, domain, 0, &data);
    }
}

/* nvcc 13's launch: CUPTI knows no parameters of it. driver: whether it comes as far as the driver. */
void launch(const char *kernel, unsigned x, unsigned threads, int code, int driver) {
    struct {
        void *function;
        unsigned grid[3], block[3], shared;
        void *stream;
    } parameters = {NULL, {x, 1, 1}, {threads, 1, 1}, 128, (void *)77};
    report(2, 0, "__cudaLaunchKernel", NULL, 0, kernel);
    if (driver) {
        report(1, 0, "cuLaunchKernel", &parameters, 0, kernel);
        report(1, 1, "cuLaunchKernel", &parameters, code, kernel);
    }
    report(2, 1, "__cudaLaunchKernel", NULL, code, kernel);
}

/* A launch through cuLaunchKernelEx with no runtime above it. */
void launch_by_driver(const char *kernel, unsigned x, unsigned threads, int code) {
    struct {
        unsigned grid[3], block[3], shared;
        void *stream, *attributes;
        unsigned count;
    } configuration = {{x, 2, 3}, {threads, 1, 1}, 0, (void *)78, NULL, 0};
    struct {
        const void *configuration;
        void *function, *values, *extra;
    } parameters = {&configuration, NULL, NULL, NULL};
    report(1, 0, "cuLaunchKernelEx", &parameters, 0, kernel);
    report(1, 1, "cuLaunchKernelEx", &parameters, code, kernel);
}

void call(const char *function, int code) {
    struct {
        void *stream;
        int mode;
    } parameters = {(void *)77, 2};
    report(2, 0, function, &parameters, 0, NULL);
    report(2, 1, function, &parameters, code, NULL);
}

void set_device(int device) {
    report(2, 0, "cudaSetDevice", &device, 0, NULL);
    report(2, 1, "cudaSetDevice", &device, 0, NULL);
}
