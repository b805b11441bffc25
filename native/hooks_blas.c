/* Hooks of cuBLAS: its statuses; the launches it makes are its own and not seen. */
#include "hooks.h"

#define HANDLES 64

static struct {
    void *_Atomic handle;
    void *_Atomic stream;
} streams[HANDLES];

/* What a handle works on, from cublasSetStream. */
static void *stream_of(void *handle) {
    for (int i = 0; i < HANDLES; i++) {
        if (atomic_load_explicit(&streams[i].handle, memory_order_acquire) == handle) {
            return atomic_load(&streams[i].stream);
        }
    }
    return NULL;
}

static void set_stream(void *handle, void *stream, int code) {
    for (int i = 0; i < HANDLES && !code; i++) {
        void *there = NULL;
        if (atomic_load(&streams[i].handle) == handle
            || atomic_compare_exchange_strong(&streams[i].handle, &there, handle)) {
            atomic_store(&streams[i].stream, stream);
            return;
        }
    }
}

static void forget(void *handle) {
    for (int i = 0; i < HANDLES; i++) {
        void *there = handle;
        if (atomic_compare_exchange_strong(&streams[i].handle, &there, NULL)) {
            return;
        }
    }
}

static void multiplied(struct isolate_call *call, void *handle, int m, int n, int k, int batch) {
    call->record.stream = (uint64_t)(uintptr_t)stream_of(handle);
    call->record.detail.words[0] = (uint64_t)m;
    call->record.detail.words[1] = (uint64_t)n;
    call->record.detail.words[2] = (uint64_t)k;
    call->record.detail.words[3] = (uint64_t)batch;
}

static void types(struct isolate_call *call, int a, int b, int c, int compute) {
    call->record.detail.words[4] = (uint64_t)a;
    call->record.detail.words[5] = (uint64_t)b;
    call->record.detail.words[6] = (uint64_t)c;
    call->record.detail.words[7] = (uint64_t)compute;
}

HOOK(cublasCreate_v2, (void **handle), (handle), ISOLATE_BLAS, CHECKED, NOTHING, NOTHING)
HOOK(cublasDestroy_v2, (void *handle), (handle), ISOLATE_BLAS, 0, forget(handle), NOTHING)
HOOK(cublasSetMathMode, (void *handle, int mode), (handle, mode), ISOLATE_BLAS, 0, NOTHING, NOTHING)
HOOK(cublasSetStream_v2, (void *handle, void *stream), (handle, stream), ISOLATE_BLAS, 0,
     call.record.stream = (uint64_t)(uintptr_t)stream, set_stream(handle, stream, code))
HOOK(cublasSetWorkspace_v2, (void *handle, void *workspace, size_t bytes), (handle, workspace, bytes), ISOLATE_BLAS, 0,
     call.record.detail.words[0] = bytes, NOTHING)

HOOK(cublasSgemm_v2,
     (void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b,
      int ldb, const void *beta, void *c, int ldc),
     (handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), ISOLATE_BLAS, CHECKED | QUEUES,
     multiplied(&call, handle, m, n, k, 1), NOTHING)

HOOK(cublasGemmEx,
     (void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda,
      const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int compute, int algorithm),
     (handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algorithm),
     ISOLATE_BLAS, CHECKED | QUEUES,
     (multiplied(&call, handle, m, n, k, 1), types(&call, a_type, b_type, c_type, compute)), NOTHING)

HOOK(cublasGemmBatchedEx,
     (void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *const *a, int a_type, int lda,
      const void *const *b, int b_type, int ldb, const void *beta, void *const *c, int c_type, int ldc, int batch,
      int compute, int algorithm),
     (handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, batch, compute, algorithm),
     ISOLATE_BLAS, CHECKED | QUEUES,
     (multiplied(&call, handle, m, n, k, batch), types(&call, a_type, b_type, c_type, compute)), NOTHING)

HOOK(cublasGemmStridedBatchedEx,
     (void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda,
      long long a_stride, const void *b, int b_type, int ldb, long long b_stride, const void *beta, void *c, int c_type,
      int ldc, long long c_stride, int batch, int compute, int algorithm),
     (handle, ta, tb, m, n, k, alpha, a, a_type, lda, a_stride, b, b_type, ldb, b_stride, beta, c, c_type, ldc, c_stride,
      batch, compute, algorithm),
     ISOLATE_BLAS, CHECKED | QUEUES,
     (multiplied(&call, handle, m, n, k, batch), types(&call, a_type, b_type, c_type, compute)), NOTHING)

HOOK(cublasSgemmBatched,
     (void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *const *a, int lda,
      const void *const *b, int ldb, const void *beta, void *const *c, int ldc, int batch),
     (handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, batch), ISOLATE_BLAS, CHECKED | QUEUES,
     multiplied(&call, handle, m, n, k, batch), NOTHING)

HOOK(cublasSgemmStridedBatched,
     (void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, long long a_stride,
      const void *b, int ldb, long long b_stride, const void *beta, void *c, int ldc, long long c_stride, int batch),
     (handle, ta, tb, m, n, k, alpha, a, lda, a_stride, b, ldb, b_stride, beta, c, ldc, c_stride, batch), ISOLATE_BLAS,
     CHECKED | QUEUES, multiplied(&call, handle, m, n, k, batch), NOTHING)

HOOK(cublasStrsmBatched,
     (void *handle, int side, int uplo, int transposed, int diagonal, int m, int n, const void *alpha,
      const void *const *a, int lda, void *const *b, int ldb, int batch),
     (handle, side, uplo, transposed, diagonal, m, n, alpha, a, lda, b, ldb, batch), ISOLATE_BLAS, CHECKED | QUEUES,
     multiplied(&call, handle, m, n, 0, batch), NOTHING)
