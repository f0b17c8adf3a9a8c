/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the three products of the lm_head path by cuBLASLt.
 *
 * cuBLASLt counts columns first, so a matrix of ours with contiguous columns is its transpose
 * there:
 *   LOGITS    zT = w hT      m columns, n rows, k hidden
 *   D_HIDDEN  hT = wT zT     m hidden, n rows, k columns
 *   D_WEIGHT  wT += hT z     m hidden, n columns, k rows
 *
 * Which of its kernels runs is asked for ROWS rows, whatever the number at hand, and kept: a row of
 * LOGITS and D_HIDDEN then has the same bits in a chunk of 2048 rows and in one of 3. These two may
 * not split their sum over blocks either, which would depend on the number of rows. Where the
 * kernel cannot do the extents at hand, one that can is asked for.
 *
 * A pinned product has the extents of one segment of the vocabulary whatever the number of ranks.
 * It is asked for with strides and alignments that do not depend on that number either, and there
 * is no second choice.
 *
 * A bias that no kernel can add is laid into z before, which then is added to.
 */
#include "loss/linear/linear.h"

#include "cuda/device.h"
#include "cuda/cublas.h"

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 2048, CACHE = 16, WORKSPACE = 32 << 20 };

struct key {
    int32_t product, bias, beta, dtype[3], scaled;
    int32_t align[4];
    int64_t ld[3], m, n, k; /* of n or k, whichever is rows: ROWS */
};

typedef struct colo_product {
    const colo_cublas_t *lib;
    cublasLtHandle_t handle;
    bool pinned;
    int32_t used, next;
    struct {
        struct key key;
        cublasLtMatmulAlgo_t algo;
        bool none; /* no kernel does this */
    } cache[CACHE];
} colo_product_t;

static colo_status_t failed(const colo_product_t *product, const char *what, cublasStatus_t status)
{
    return colo_fail(COLO_ERR_CUDA, "lm_head: %s: cuBLASLt says %s", what,
                     product->lib->name(status));
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    colo_product_t *product = calloc(1, sizeof *product);
    COLO_FAIL_IF(!product, COLO_ERR_NOMEM, "lm_head: %zu bytes", sizeof *product);
    colo_status_t st = colo_cublas_find(&product->lib);
    if (st == COLO_OK) {
        cublasStatus_t status = product->lib->create(&product->handle);
        if (status != CUBLAS_STATUS_SUCCESS)
            st = failed(product, "create", status);
    }
    if (st < 0) {
        free(product);
        return st;
    }
    product->pinned = shape->pinned;
    *made = product;
    return COLO_OK;
}

static void destroy(void *made)
{
    colo_product_t *product = made;
    if (!product)
        return;
    product->lib->destroy(product->handle);
    free(product);
}

static int64_t workspace(const void *made)
{
    return WORKSPACE;
}

static cudaDataType_t type_of(colo_dtype_t dtype)
{
    switch (dtype) {
    case COLO_F64:
        return CUDA_R_64F;
    case COLO_BF16:
        return CUDA_R_16BF;
    case COLO_F16:
        return CUDA_R_16F;
    default:
        return CUDA_R_32F;
    }
}

/* ---- one product as cuBLASLt sees it ---- */

struct call {
    const struct colo_linear_matrix *a, *b, *d;
    bool ta, tb;
    int64_t m, n, k;
    bool bias; /* added by the kernel */
    double beta;
    const float *scale; /* of linear.h: factors are on the device then */
    bool pinned;
};

static int64_t ld_of(const struct colo_linear_matrix *x, int64_t extent)
{
    return x->stride > extent ? x->stride : extent; /* one row may have any stride */
}

static struct call call_of(const struct colo_linear_gemm *gemm)
{
    const struct colo_linear_form form = colo_linear_form_of(gemm);
    return (struct call){.a = form.b,
                         .b = form.a,
                         .d = form.c,
                         .ta = !form.b_by_k,
                         .tb = form.a_by_k,
                         .m = form.n,
                         .n = form.m,
                         .k = form.k,
                         .bias = gemm->bias != NULL,
                         .beta = gemm->beta,
                         .scale = gemm->scale};
}

/* Pinned: no more than what the first column of a segment has. */
static int32_t align_of(const struct call *call, const void *pointer)
{
    const uintptr_t low = (uintptr_t)pointer & -(uintptr_t)pointer, most = call->pinned ? 16 : 256;
    return low == 0 || low > most ? (int32_t)most : (int32_t)low;
}

/* The first failure, to return */
#define LT_TRY(expr)                           \
    do {                                       \
        const cublasStatus_t result_ = (expr); \
        if (result_ != CUBLAS_STATUS_SUCCESS)  \
            return result_;                    \
    } while (0)

struct descs {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d;
};

static cublasStatus_t describe(const colo_product_t *product, const struct call *call,
                               const void *bias, struct descs *descs)
{
    const colo_cublas_t *lib = product->lib;
    const bool wide = call->a->dtype == COLO_F64;
    const int32_t t = CUBLAS_OP_T, epilogue = CUBLASLT_EPILOGUE_BIAS,
                  bias_type = type_of(call->a->dtype), device = CUBLASLT_POINTER_MODE_DEVICE;
    const int64_t am = call->ta ? call->k : call->m, an = call->ta ? call->m : call->k,
                  bm = call->tb ? call->n : call->k, bn = call->tb ? call->k : call->n;
    LT_TRY(lib->desc_init(&descs->op, sizeof descs->op,
                          wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                          wide ? CUDA_R_64F : CUDA_R_32F));
    if (call->ta)
        LT_TRY(lib->desc_set(&descs->op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t));
    if (call->tb)
        LT_TRY(lib->desc_set(&descs->op, CUBLASLT_MATMUL_DESC_TRANSB, &t, sizeof t));
    if (call->scale)
        LT_TRY(
            lib->desc_set(&descs->op, CUBLASLT_MATMUL_DESC_POINTER_MODE, &device, sizeof device));
    if (call->bias) {
        LT_TRY(
            lib->desc_set(&descs->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
        LT_TRY(lib->desc_set(&descs->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
        LT_TRY(lib->desc_set(&descs->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type,
                             sizeof bias_type));
    }
    LT_TRY(lib->layout_init(&descs->a, sizeof descs->a, type_of(call->a->dtype), (uint64_t)am,
                            (uint64_t)an, ld_of(call->a, am)));
    LT_TRY(lib->layout_init(&descs->b, sizeof descs->b, type_of(call->b->dtype), (uint64_t)bm,
                            (uint64_t)bn, ld_of(call->b, bm)));
    LT_TRY(lib->layout_init(&descs->d, sizeof descs->d, type_of(call->d->dtype), (uint64_t)call->m,
                            (uint64_t)call->n, ld_of(call->d, call->m)));
    return CUBLAS_STATUS_SUCCESS;
}

/* The first kernel that does @call. Parts of a 16-bit result are added up before they are rounded;
 * @none where there is none. */
static cublasStatus_t ask(const colo_product_t *product, const struct call *call, const void *bias,
                          bool may_split, cublasLtMatmulAlgo_t *algo, bool *none)
{
    struct descs descs;
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found[1];
    int n = 0;
    const uint64_t bytes = WORKSPACE;
    const bool narrow = call->d->dtype == COLO_BF16 || call->d->dtype == COLO_F16;
    const uint32_t scheme = !may_split ? CUBLASLT_REDUCTION_SCHEME_NONE
                            : narrow   ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                       : CUBLASLT_REDUCTION_SCHEME_MASK;
    const uint32_t a = (uint32_t)align_of(call, call->a->data),
                   b = (uint32_t)align_of(call, call->b->data),
                   d = (uint32_t)align_of(call, call->d->data);
    const colo_cublas_t *lib = product->lib;
    LT_TRY(describe(product, call, bias, &descs));
    LT_TRY(lib->pref_init(&pref, sizeof pref));
    LT_TRY(lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    LT_TRY(
        lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme, sizeof scheme));
    LT_TRY(lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a));
    LT_TRY(lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b));
    LT_TRY(lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d, sizeof d));
    LT_TRY(lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d, sizeof d));
    const cublasStatus_t result = lib->heuristic(product->handle, &descs.op, &descs.a, &descs.b,
                                                 &descs.d, &descs.d, &pref, 1, found, &n);
    *none = result != CUBLAS_STATUS_SUCCESS || n == 0 || found[0].state != CUBLAS_STATUS_SUCCESS;
    if (!*none)
        *algo = found[0].algo;
    return CUBLAS_STATUS_SUCCESS;
}

static struct key key_of(const struct colo_linear_gemm *gemm, const struct call *call,
                         const void *bias)
{
    struct key key;
    memset(&key, 0, sizeof key); /* compared as bytes */
    key.product = (int32_t)gemm->product;
    key.bias = call->bias;
    key.beta = call->beta != 0;
    key.scaled = call->scale != NULL;
    key.dtype[0] = (int32_t)call->a->dtype;
    key.dtype[1] = (int32_t)call->b->dtype;
    key.dtype[2] = (int32_t)call->d->dtype;
    key.align[0] = align_of(call, call->a->data);
    key.align[1] = align_of(call, call->b->data);
    key.align[2] = align_of(call, call->d->data);
    key.align[3] = call->bias ? align_of(call, bias) : 0;
    key.ld[0] = call->a->stride;
    key.ld[1] = call->b->stride;
    key.ld[2] = call->d->stride;
    key.m = call->m;
    key.n = gemm->product == COLO_LINEAR_D_WEIGHT ? call->n : ROWS;
    key.k = gemm->product == COLO_LINEAR_D_WEIGHT ? ROWS : call->k;
    return key;
}

/* The kernel for @call, from the cache or asked for. */
static cublasStatus_t choose(colo_product_t *product, const struct colo_linear_gemm *gemm,
                             const struct call *call, const void *bias, cublasLtMatmulAlgo_t *algo,
                             bool *none)
{
    const struct key k = key_of(gemm, call, bias);
    for (int32_t i = 0; i < product->used; i++)
        if (memcmp(&product->cache[i].key, &k, sizeof k) == 0) {
            *algo = product->cache[i].algo;
            *none = product->cache[i].none;
            return CUBLAS_STATUS_SUCCESS;
        }
    struct call usual = *call;
    struct colo_linear_matrix z = gemm->z; /* as if its rows had one segment */
    const int64_t step = 128;
    z.stride = (gemm->columns + step - 1) / step * step;
    if (product->pinned && gemm->product == COLO_LINEAR_LOGITS)
        usual.d = &z;
    else if (product->pinned)
        usual.b = &z;
    usual.n = k.n;
    usual.k = k.k;
    LT_TRY(ask(product, &usual, bias, gemm->product == COLO_LINEAR_D_WEIGHT && !product->pinned,
               algo, none));
    int32_t entry = product->next++ % CACHE;
    product->used = product->used < CACHE ? product->used + 1 : CACHE;
    product->cache[entry].key = k;
    product->cache[entry].none = *none;
    if (!*none)
        product->cache[entry].algo = *algo;
    return CUBLAS_STATUS_SUCCESS;
}

static const char *const product_names[] = {"logits", "d_hidden", "d_weight"};

/* Products of nothing: the sum is 0. (LOGITS has hidden > 0.) */
static colo_status_t nothing(const struct call *call, const char *name, cudaStream_t stream)
{
    const size_t elem = call->d->dtype == COLO_F64 ? 8 : call->d->dtype == COLO_F32 ? 4 : 2;
    if (call->m == 0 || call->n == 0 || call->beta != 0)
        return COLO_OK;
    return colo_cuda_report(cudaMemset2DAsync(call->d->data, (size_t)ld_of(call->d, call->m) * elem,
                                              0, (size_t)call->m * elem, (size_t)call->n, stream),
                            name);
}

static colo_status_t run(void *made, const struct colo_linear_gemm *gemm, colo_stream_t stream)
{
    colo_product_t *product = made;
    const char *name = product_names[gemm->product];
    struct call call = call_of(gemm);
    call.pinned = product->pinned;
    cublasLtMatmulAlgo_t algo;
    bool none = false;
    if (call.m == 0 || call.n == 0 || call.k == 0)
        return nothing(&call, name, stream);
    const void *bias = gemm->bias;
    cublasStatus_t result = choose(product, gemm, &call, bias, &algo, &none);
    if (!result && none && call.bias) {
        call.bias = false;
        call.beta = 1;
        COLO_TRY(colo_cuda_report(colo_k_rows_convert(call.d->data, call.d->stride, call.d->dtype,
                                                      bias, 0, call.a->dtype, gemm->rows,
                                                      gemm->columns, stream),
                                  name));
        result = choose(product, gemm, &call, NULL, &algo, &none);
    }
    struct descs descs;
    cublasLtMatmulHeuristicResult_t fits;
    if (!result)
        result = describe(product, &call, bias, &descs);
    if (!result && !none)
        none = product->lib->check(product->handle, &descs.op, &descs.a, &descs.b, &descs.d,
                                   &descs.d, &algo, &fits) ||
               fits.workspaceSize > WORKSPACE;
    if (!result && none) {
        if (!product->pinned)
            result = ask(product, &call, bias, gemm->product == COLO_LINEAR_D_WEIGHT, &algo, &none);
        COLO_FAIL_IF(!result && none, COLO_ERR_CUDA,
                     "lm_head: cuBLASLt has no kernel for %s of %lld rows, %lld "
                     "columns, hidden %lld at these strides and alignments",
                     name, (long long)gemm->rows, (long long)gemm->columns,
                     (long long)gemm->hidden);
    }
    if (!result) {
        const float one_f = 1, beta_f = (float)call.beta;
        const double one_d = 1;
        const bool wide = call.a->dtype == COLO_F64;
        const void *alpha = wide ? (const void *)&one_d : &one_f,
                   *beta = wide ? (const void *)&call.beta : &beta_f;
        if (call.scale) { /* of 16-bit heads; then the 0 and the 1 */
            alpha = call.scale;
            beta = call.scale + (call.beta != 0 ? 2 : 1);
        }
        result =
            product->lib->matmul(product->handle, &descs.op, alpha, call.a->data, &descs.a,
                                 call.b->data, &descs.b, beta, call.d->data, &descs.d, call.d->data,
                                 &descs.d, &algo, gemm->workspace, WORKSPACE, stream);
    }
    return result ? failed(product, name, result) : COLO_OK;
}

const colo_gemm_ops_t colo_gemm_cuda = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .run = run,
};
