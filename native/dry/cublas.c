/* libcublas.so.12 and .13: the calls that ggml-cuda imports. Matrices are checked, not multiplied: wrong sizes give the status
 * that the cuBLAS reference lists, memory that is not there breaks the device as it would on a real one. */
#include "dry.h"

#include <stdio.h>
#include <stdlib.h>

enum status { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };

#define RUN_BLAS(call)                                                                                          \
    do {                                                                                                        \
        int code_ = dry_enter();                                                                                \
        return dry_leave_quietly(code_ ? EXECUTION_FAILED : (call));                                            \
    } while (0)

struct blas {
    int device;
    void *stream;
    struct blas *next;
};

struct matrix {
    const void *place;
    int type, leading;
    long long stride;
};

static struct blas *handles;

static struct blas *find(const void *handle) {
    struct blas *blas = handles;
    while (blas && blas != handle) {
        blas = blas->next;
    }
    return blas;
}

static int create(void **handle) {
    struct blas *blas = handle && dry.devices ? calloc(1, sizeof *blas) : NULL;
    if (!blas) {
        return handle ? NOT_INITIALIZED : INVALID_VALUE;
    }
    *blas = (struct blas){.device = dry_thread.device, .next = handles};
    handles = blas;
    *handle = blas;
    return SUCCESS;
}

DRY_API int cublasCreate_v2(void **handle) {
    RUN_BLAS(create(handle));
}

static int destroy(void *handle) {
    for (struct blas **place = &handles; *place; place = &(*place)->next) {
        struct blas *blas = *place;
        if (blas == handle) {
            *place = blas->next;
            free(blas);
            return SUCCESS;
        }
    }
    return NOT_INITIALIZED;
}

DRY_API int cublasDestroy_v2(void *handle) {
    RUN_BLAS(destroy(handle));
}

static int set_stream(void *handle, void *stream) {
    struct blas *blas = find(handle);
    if (!blas) {
        return NOT_INITIALIZED;
    }
    blas->stream = stream;
    return SUCCESS;
}

DRY_API int cublasSetStream_v2(void *handle, void *stream) {
    RUN_BLAS(set_stream(handle, stream));
}

DRY_API int cublasSetMathMode(void *handle, int mode) {
    (void)mode;
    RUN_BLAS(find(handle) ? SUCCESS : NOT_INITIALIZED);
}

DRY_API int cublasSetWorkspace_v2(void *handle, void *workspace, size_t bytes) {
    (void)workspace, (void)bytes;
    RUN_BLAS(find(handle) ? SUCCESS : NOT_INITIALIZED);
}

DRY_API int cublasLoggerConfigure(int on, int to_output, int to_error, const char *file) {
    (void)on, (void)to_output, (void)to_error, (void)file;
    return SUCCESS;
}

DRY_API const char *cublasGetStatusString(int status) {
    switch (status) {
    case SUCCESS: return "success";
    case NOT_INITIALIZED: return "the library was not initialized";
    case ALLOC_FAILED: return "the resource allocation failed";
    case INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case 8: return "the function requires an architectural feature absent from the device";
    case 11: return "an access to GPU memory space failed";
    case EXECUTION_FAILED: return "the function failed to launch on the GPU";
    case 14: return "an internal operation failed";
    case NOT_SUPPORTED: return "the requested functionality is not supported";
    default: return "unrecognized status";
    }
}

/* Bytes of an element of a cudaDataType; 0 where ggml uses none such. */
static size_t element(int type) {
    switch (type) {
    case 0: case 10: return 4;  /* R_32F, R_32I */
    case 1: return 8;           /* R_64F */
    case 2: case 14: return 2;  /* R_16F, R_16BF */
    case 3: case 8: case 28: case 29: return 1; /* 8-bit integers and floats */
    default: return 0;
    }
}

static void check_memory(const struct blas *blas, const char *call, const char *what, const struct matrix *matrix, long long rows,
                         long long columns, int batches) {
    size_t bytes = (size_t)((columns - 1) * matrix->leading + rows + (batches - 1) * matrix->stride) * element(matrix->type);
    char why[512];
    if (!dry_range_of((uintptr_t)matrix->place)) {
        char text[256];
        dry_describe_address((uintptr_t)matrix->place, text, sizeof text);
        snprintf(why, sizeof why, "%s: matrix %s, %s", call, what, text);
        dry_device_fault(blas->device, CUDA_ERROR_ILLEGAL_ADDRESS, why);
    } else if (dry_check_span((uintptr_t)matrix->place, bytes, call, what)) {
        snprintf(why, sizeof why, "%s: matrix %s of %zu bytes ends beyond its memory", call, what, bytes);
        dry_device_fault(blas->device, CUDA_ERROR_ILLEGAL_ADDRESS, why);
    }
}

/* Puts the work into the stream: into its graph, where it captures. */
static int queue(const struct blas *blas, const char *call) {
    struct dry_stream *stream = dry_stream(blas->stream);
    if (!stream) {
        return EXECUTION_FAILED;
    }
    int code = dry_into_graph(stream, &(struct dry_node){.kind = DRY_NODE_KERNEL}, call);
    return code > 0 ? EXECUTION_FAILED : SUCCESS;
}

struct product {
    const char *call;
    int transpose_a, transpose_b, m, n, k, batches;
    struct matrix a, b, c;
    bool pointers; /* a, b and c are lists of matrices, in device memory */
};

static int multiply(void *handle, const struct product *p) {
    const struct blas *blas = find(handle);
    if (!blas) {
        dry_refuse(CUDA_ERROR_INVALID_HANDLE, "%s: %p is not a cuBLAS handle", p->call, handle);
        return NOT_INITIALIZED;
    }
    int rows_a = p->transpose_a ? p->k : p->m, columns_a = p->transpose_a ? p->m : p->k;
    int rows_b = p->transpose_b ? p->n : p->k, columns_b = p->transpose_b ? p->k : p->n;
    if (p->m < 0 || p->n < 0 || p->k < 0 || p->batches < 0 || p->a.leading < (rows_a > 1 ? rows_a : 1) ||
        p->b.leading < (rows_b > 1 ? rows_b : 1) || p->c.leading < (p->m > 1 ? p->m : 1)) {
        dry_refuse(CUDA_ERROR_INVALID_VALUE, "%s: m %d, n %d, k %d, leading dimensions %d, %d, %d, %d matrices", p->call, p->m, p->n,
                   p->k, p->a.leading, p->b.leading, p->c.leading, p->batches);
        return INVALID_VALUE;
    }
    if (!element(p->a.type) || !element(p->b.type) || !element(p->c.type)) {
        dry_refuse(CUDA_ERROR_NOT_SUPPORTED, "%s: data types %d, %d, %d", p->call, p->a.type, p->b.type, p->c.type);
        return NOT_SUPPORTED;
    }
    if (p->m == 0 || p->n == 0 || p->batches == 0) {
        return SUCCESS;
    }
    if (!p->pointers) {
        if (p->k) {
            check_memory(blas, p->call, "A", &p->a, rows_a, columns_a, p->batches);
            check_memory(blas, p->call, "B", &p->b, rows_b, columns_b, p->batches);
        }
        check_memory(blas, p->call, "C", &p->c, p->m, p->n, p->batches);
    }
    return queue(blas, p->call);
}

DRY_API int cublasSgemm_v2(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const float *alpha, const float *a,
                           int lda, const float *b, int ldb, const float *beta, float *c, int ldc) {
    (void)alpha, (void)beta;
    RUN_BLAS(multiply(handle, &(struct product){"cublasSgemm", transpose_a, transpose_b, m, n, k, 1, {a, 0, lda, 0}, {b, 0, ldb, 0},
                                                {c, 0, ldc, 0}, false}));
}

DRY_API int cublasGemmEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a,
                         int type_a, int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc,
                         int compute, int algorithm) {
    (void)alpha, (void)beta, (void)compute, (void)algorithm;
    RUN_BLAS(multiply(handle, &(struct product){"cublasGemmEx", transpose_a, transpose_b, m, n, k, 1, {a, type_a, lda, 0},
                                                {b, type_b, ldb, 0}, {c, type_c, ldc, 0}, false}));
}

DRY_API int cublasSgemmStridedBatched(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const float *alpha,
                                      const float *a, int lda, long long stride_a, const float *b, int ldb, long long stride_b,
                                      const float *beta, float *c, int ldc, long long stride_c, int count) {
    (void)alpha, (void)beta;
    RUN_BLAS(multiply(handle, &(struct product){"cublasSgemmStridedBatched", transpose_a, transpose_b, m, n, k, count,
                                                {a, 0, lda, stride_a}, {b, 0, ldb, stride_b}, {c, 0, ldc, stride_c}, false}));
}

DRY_API int cublasGemmStridedBatchedEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                                       const void *a, int type_a, int lda, long long stride_a, const void *b, int type_b, int ldb,
                                       long long stride_b, const void *beta, void *c, int type_c, int ldc, long long stride_c,
                                       int count, int compute, int algorithm) {
    (void)alpha, (void)beta, (void)compute, (void)algorithm;
    RUN_BLAS(multiply(handle, &(struct product){"cublasGemmStridedBatchedEx", transpose_a, transpose_b, m, n, k, count,
                                                {a, type_a, lda, stride_a}, {b, type_b, ldb, stride_b}, {c, type_c, ldc, stride_c},
                                                false}));
}

DRY_API int cublasSgemmBatched(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const float *alpha,
                               const float *const a[], int lda, const float *const b[], int ldb, const float *beta,
                               float *const c[], int ldc, int count) {
    (void)alpha, (void)beta;
    RUN_BLAS(multiply(handle, &(struct product){"cublasSgemmBatched", transpose_a, transpose_b, m, n, k, count, {a, 0, lda, 0},
                                                {b, 0, ldb, 0}, {c, 0, ldc, 0}, true}));
}

DRY_API int cublasGemmBatchedEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                                const void *const a[], int type_a, int lda, const void *const b[], int type_b, int ldb,
                                const void *beta, void *const c[], int type_c, int ldc, int count, int compute, int algorithm) {
    (void)alpha, (void)beta, (void)compute, (void)algorithm;
    RUN_BLAS(multiply(handle, &(struct product){"cublasGemmBatchedEx", transpose_a, transpose_b, m, n, k, count, {a, type_a, lda, 0},
                                                {b, type_b, ldb, 0}, {c, type_c, ldc, 0}, true}));
}

DRY_API int cublasStrsmBatched(void *handle, int side, int fill, int transpose, int diagonal, int m, int n, const float *alpha,
                               const float *const a[], int lda, float *const b[], int ldb, int count) {
    (void)fill, (void)transpose, (void)diagonal, (void)alpha;
    int order = side ? n : m; /* CUBLAS_SIDE_RIGHT is 1 */
    RUN_BLAS(multiply(handle, &(struct product){"cublasStrsmBatched", 0, 0, m, n, order, count, {a, 0, side ? lda + m : lda, 0},
                                                {b, 0, side ? ldb + n : ldb, 0}, {b, 0, ldb, 0}, true}));
}
