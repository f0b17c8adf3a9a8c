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
    int32_t used, next;
    struct {
        struct key key;
        cublasLtMatmulAlgo_t algo;
        bool none; /* no kernel does this */
    } cache[CACHE];
} colo_product_t;

static colo_status_t failed(const colo_product_t *p, const char *what, cublasStatus_t s)
{
    return colo_fail(COLO_ERR_CUDA, "lm_head: %s: cuBLASLt says %s", what, p->lib->name(s));
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    colo_product_t *p = calloc(1, sizeof *p);
    if (!p)
        return colo_fail(COLO_ERR_NOMEM, "lm_head: %zu bytes", sizeof *p);
    colo_status_t st = colo_cublas_find(&p->lib);
    if (st == COLO_OK) {
        cublasStatus_t s = p->lib->create(&p->handle);
        if (s != CUBLAS_STATUS_SUCCESS)
            st = failed(p, "create", s);
    }
    if (st < 0) {
        free(p);
        return st;
    }
    *made = p;
    return COLO_OK;
}

static void destroy(void *made)
{
    colo_product_t *p = made;
    if (!p)
        return;
    p->lib->destroy(p->handle);
    free(p);
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
    int64_t *rows; /* which of the three counts rows */
    bool bias;     /* added by the kernel */
    double beta;
    const float *scale; /* of linear.h: factors are on the device then */
    bool pinned;
};

static int64_t ld_of(const struct colo_linear_matrix *x, int64_t extent)
{
    return x->stride > extent ? x->stride : extent; /* one row may have any stride */
}

static struct call call_of(const struct colo_linear_gemm *g)
{
    switch (g->product) {
    case COLO_LINEAR_LOGITS:
        return (struct call){.a = &g->w,
                             .b = &g->h,
                             .d = &g->z,
                             .ta = true,
                             .m = g->columns,
                             .n = g->rows,
                             .k = g->hidden};
    case COLO_LINEAR_D_HIDDEN:
        return (struct call){.a = &g->w,
                             .b = &g->z,
                             .d = &g->h,
                             .m = g->hidden,
                             .n = g->rows,
                             .k = g->columns,
                             .beta = g->beta,
                             .scale = g->scale};
    default:
        return (struct call){.a = &g->h,
                             .b = &g->z,
                             .d = &g->w,
                             .tb = true,
                             .m = g->hidden,
                             .n = g->columns,
                             .k = g->rows,
                             .beta = g->beta,
                             .scale = g->scale};
    }
}

/* Pinned: no more than what the first column of a segment has. */
static int32_t align_of(const struct call *c, const void *p)
{
    const uintptr_t low = (uintptr_t)p & -(uintptr_t)p, most = c->pinned ? 16 : 256;
    return low == 0 || low > most ? (int32_t)most : (int32_t)low;
}

struct descs {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d;
};

static cublasStatus_t describe(const colo_product_t *p, const struct call *c, const void *bias,
                               struct descs *s)
{
    const colo_cublas_t *lib = p->lib;
    const bool wide = c->a->dtype == COLO_F64;
    const int32_t t = CUBLAS_OP_T, epilogue = CUBLASLT_EPILOGUE_BIAS,
                  bias_type = type_of(c->a->dtype), device = CUBLASLT_POINTER_MODE_DEVICE;
    const int64_t am = c->ta ? c->k : c->m, an = c->ta ? c->m : c->k, bm = c->tb ? c->n : c->k,
                  bn = c->tb ? c->k : c->n;
    cublasStatus_t r =
        lib->desc_init(&s->op, sizeof s->op, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                       wide ? CUDA_R_64F : CUDA_R_32F);
    if (!r && c->ta)
        r = lib->desc_set(&s->op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
    if (!r && c->tb)
        r = lib->desc_set(&s->op, CUBLASLT_MATMUL_DESC_TRANSB, &t, sizeof t);
    if (!r && c->scale)
        r = lib->desc_set(&s->op, CUBLASLT_MATMUL_DESC_POINTER_MODE, &device, sizeof device);
    if (!r && c->bias) {
        r = lib->desc_set(&s->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        if (!r)
            r = lib->desc_set(&s->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
        if (!r)
            r = lib->desc_set(&s->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type,
                              sizeof bias_type);
    }
    if (!r)
        r = lib->layout_init(&s->a, sizeof s->a, type_of(c->a->dtype), (uint64_t)am, (uint64_t)an,
                             ld_of(c->a, am));
    if (!r)
        r = lib->layout_init(&s->b, sizeof s->b, type_of(c->b->dtype), (uint64_t)bm, (uint64_t)bn,
                             ld_of(c->b, bm));
    if (!r)
        r = lib->layout_init(&s->d, sizeof s->d, type_of(c->d->dtype), (uint64_t)c->m,
                             (uint64_t)c->n, ld_of(c->d, c->m));
    return r;
}

/* The first kernel that does @c. Parts of a 16-bit result are added up before they are rounded;
 * @none where there is none. */
static cublasStatus_t ask(const colo_product_t *p, const struct call *c, const void *bias,
                          bool may_split, cublasLtMatmulAlgo_t *algo, bool *none)
{
    struct descs s;
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found[1];
    int n = 0;
    const uint64_t bytes = WORKSPACE;
    const bool narrow = c->d->dtype == COLO_BF16 || c->d->dtype == COLO_F16;
    const uint32_t scheme = !may_split ? CUBLASLT_REDUCTION_SCHEME_NONE
                            : narrow   ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                       : CUBLASLT_REDUCTION_SCHEME_MASK;
    const uint32_t a = (uint32_t)align_of(c, c->a->data), b = (uint32_t)align_of(c, c->b->data),
                   d = (uint32_t)align_of(c, c->d->data);
    const colo_cublas_t *lib = p->lib;
    cublasStatus_t r = describe(p, c, bias, &s);
    if (!r)
        r = lib->pref_init(&pref, sizeof pref);
    if (!r)
        r = lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    if (!r)
        r = lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme,
                          sizeof scheme);
    if (!r)
        r = lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a);
    if (!r)
        r = lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b);
    if (!r)
        r = lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d, sizeof d);
    if (!r)
        r = lib->pref_set(&pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d, sizeof d);
    if (r)
        return r;
    r = lib->heuristic(p->handle, &s.op, &s.a, &s.b, &s.d, &s.d, &pref, 1, found, &n);
    *none = r != CUBLAS_STATUS_SUCCESS || n == 0 || found[0].state != CUBLAS_STATUS_SUCCESS;
    if (!*none)
        *algo = found[0].algo;
    return CUBLAS_STATUS_SUCCESS;
}

static struct key key_of(const struct colo_linear_gemm *g, const struct call *c, const void *bias)
{
    struct key k;
    memset(&k, 0, sizeof k); /* compared as bytes */
    k.product = (int32_t)g->product;
    k.bias = c->bias;
    k.beta = c->beta != 0;
    k.scaled = c->scale != NULL;
    k.dtype[0] = (int32_t)c->a->dtype;
    k.dtype[1] = (int32_t)c->b->dtype;
    k.dtype[2] = (int32_t)c->d->dtype;
    k.align[0] = align_of(c, c->a->data);
    k.align[1] = align_of(c, c->b->data);
    k.align[2] = align_of(c, c->d->data);
    k.align[3] = c->bias ? align_of(c, bias) : 0;
    k.ld[0] = c->a->stride;
    k.ld[1] = c->b->stride;
    k.ld[2] = c->d->stride;
    k.m = c->m;
    k.n = g->product == COLO_LINEAR_D_WEIGHT ? c->n : ROWS;
    k.k = g->product == COLO_LINEAR_D_WEIGHT ? ROWS : c->k;
    return k;
}

/* The kernel for @c, from the cache or asked for. */
static cublasStatus_t choose(colo_product_t *p, const struct colo_linear_gemm *g,
                             const struct call *c, const void *bias, cublasLtMatmulAlgo_t *algo,
                             bool *none)
{
    const struct key k = key_of(g, c, bias);
    for (int32_t i = 0; i < p->used; i++)
        if (memcmp(&p->cache[i].key, &k, sizeof k) == 0) {
            *algo = p->cache[i].algo;
            *none = p->cache[i].none;
            return CUBLAS_STATUS_SUCCESS;
        }
    struct call usual = *c;
    struct colo_linear_matrix z = g->z; /* as if its rows had one segment */
    const int64_t step = 128;
    z.stride = (g->columns + step - 1) / step * step;
    if (g->pinned && g->product == COLO_LINEAR_LOGITS)
        usual.d = &z;
    else if (g->pinned)
        usual.b = &z;
    usual.n = k.n;
    usual.k = k.k;
    cublasStatus_t r =
        ask(p, &usual, bias, g->product == COLO_LINEAR_D_WEIGHT && !g->pinned, algo, none);
    if (r)
        return r;
    int32_t entry = p->next++ % CACHE;
    p->used = p->used < CACHE ? p->used + 1 : CACHE;
    p->cache[entry].key = k;
    p->cache[entry].none = *none;
    if (!*none)
        p->cache[entry].algo = *algo;
    return CUBLAS_STATUS_SUCCESS;
}

static const char *const product_names[] = {"logits", "d_hidden", "d_weight"};

/* Products of nothing: the sum is 0. (LOGITS has hidden > 0.) */
static colo_status_t nothing(const struct call *c, const char *name, cudaStream_t stream)
{
    const size_t elem = c->d->dtype == COLO_F64 ? 8 : c->d->dtype == COLO_F32 ? 4 : 2;
    if (c->m == 0 || c->n == 0 || c->beta != 0)
        return COLO_OK;
    return colo_cuda_report(cudaMemset2DAsync(c->d->data, (size_t)ld_of(c->d, c->m) * elem, 0,
                                              (size_t)c->m * elem, (size_t)c->n, stream),
                            name);
}

static colo_status_t run(void *made, const struct colo_linear_gemm *g, colo_stream_t stream)
{
    colo_product_t *p = made;
    const char *name = product_names[g->product];
    struct call c = call_of(g);
    c.pinned = g->pinned;
    cublasLtMatmulAlgo_t algo;
    bool none = false;
    if (c.m == 0 || c.n == 0 || c.k == 0)
        return nothing(&c, name, stream);
    const void *bias = g->product == COLO_LINEAR_LOGITS ? g->bias : NULL;
    c.bias = bias != NULL;
    cublasStatus_t r = choose(p, g, &c, bias, &algo, &none);
    if (!r && none && c.bias) {
        c.bias = false;
        c.beta = 1;
        COLO_TRY(colo_cuda_report(colo_k_rows_convert(c.d->data, c.d->stride, c.d->dtype, bias, 0,
                                                      c.a->dtype, g->rows, g->columns, stream),
                                  name));
        r = choose(p, g, &c, NULL, &algo, &none);
    }
    struct descs s;
    cublasLtMatmulHeuristicResult_t fits;
    if (!r)
        r = describe(p, &c, bias, &s);
    if (!r && !none)
        none = p->lib->check(p->handle, &s.op, &s.a, &s.b, &s.d, &s.d, &algo, &fits) ||
               fits.workspaceSize > WORKSPACE;
    if (!r && none) {
        if (!g->pinned)
            r = ask(p, &c, bias, g->product == COLO_LINEAR_D_WEIGHT, &algo, &none);
        if (!r && none)
            return colo_fail(COLO_ERR_CUDA,
                             "lm_head: cuBLASLt has no kernel for %s of %lld rows, %lld "
                             "columns, hidden %lld at these strides and alignments",
                             name, (long long)g->rows, (long long)g->columns, (long long)g->hidden);
    }
    if (!r) {
        const float one_f = 1, beta_f = (float)c.beta;
        const double one_d = 1;
        const bool wide = c.a->dtype == COLO_F64;
        const void *alpha = wide ? (const void *)&one_d : &one_f,
                   *beta = wide ? (const void *)&c.beta : &beta_f;
        if (c.scale) { /* of 16-bit heads; then the 0 and the 1 */
            alpha = c.scale;
            beta = c.scale + (c.beta != 0 ? 2 : 1);
        }
        r = p->lib->matmul(p->handle, &s.op, alpha, c.a->data, &s.a, c.b->data, &s.b, beta,
                           c.d->data, &s.d, c.d->data, &s.d, &algo, g->workspace, WORKSPACE,
                           stream);
    }
    return r ? failed(p, name, r) : COLO_OK;
}

const colo_gemm_ops_t colo_gemm_cuda = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .run = run,
};
