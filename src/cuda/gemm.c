/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the three products of the lm_head path by cuBLASLt, each also of a LoRA's extents.
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
 * A pass of few rows has few tiles of D_HIDDEN, and each has a sum over all columns: most
 * multiprocessors would have none. So the columns are cut into parts, a batch of products whose
 * fp32 results are added in order. How many is decided by the rows of the whole pass, not of a
 * chunk.
 *
 * A pinned product has the extents of one segment of the vocabulary whatever the number of ranks.
 * It is asked for with strides and alignments that do not depend on that number either, and there
 * is no second choice.
 *
 * A bias that no kernel can add is laid into z before, which then is added to. Of a product that
 * is added to 16 bits, cuBLASLt's documents do not say that it is rounded once, with what it is
 * added to: tests allow that it is rounded before, too (tests/loss/product_case.h).
 *
 * LOGITS that are to leave statistics are not cuBLASLt's but kernels/head-product.cu's, on GPUs
 * that run it, and D_WEIGHT is kernels/weight-product.cu's there if its tiles have work for all.
 *
 * Which cuBLASLt: the one in the process already (inside PyTorch, PyTorch's), else libcublasLt.so
 * of the CUDA major version that this was built with. Not linked, for it is hundreds of megabytes
 * that only the lm_head path needs.
 */
#include "loss/linear/linear.h"

#include "cuda/device.h"

#include "core/library.h"
#include "core/lock.h"
#include "kernels.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 2048, CACHE = 40, WORKSPACE = 32 << 20 };
/* Of parts: their results, the tiles of a product, what a part has at least, and is a multiple of
 */
enum { PARTS = 8, PARTS_BYTES = 20 << 20, TILE_M = 128, TILE_N = 256, LEAST = 1024, GRAIN = 64 };
/* Columns, and of hidden, of a cluster of blocks of weight-product.cu */
enum { WEIGHT_TILE = 256 };

/* ---- the library ---- */

/* The first is looked for in the process. */
#define FUNCTIONS(X)                                    \
    X(matmul, cublasLtMatmul)                           \
    X(create, cublasLtCreate)                           \
    X(destroy, cublasLtDestroy)                         \
    X(desc_init, cublasLtMatmulDescInit_internal)       \
    X(desc_set, cublasLtMatmulDescSetAttribute)         \
    X(layout_init, cublasLtMatrixLayoutInit_internal)   \
    X(layout_set, cublasLtMatrixLayoutSetAttribute)     \
    X(pref_init, cublasLtMatmulPreferenceInit_internal) \
    X(pref_set, cublasLtMatmulPreferenceSetAttribute)   \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic)        \
    X(check, cublasLtMatmulAlgoCheck)                   \
    X(name, cublasLtGetStatusName)
#define MEMBER(member, function) __typeof__(function) *member;
#define WANTED(member, function) {#function, &lt.member},
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static struct {
    FUNCTIONS(MEMBER)
} lt;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static colo_status_t find_library(void)
{
    static bool found;
    static const colo_library_t cublas = {
        "lm_head", "cuBLASLt", "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR),
        "; it comes with CUDA, put its folder into LD_LIBRARY_PATH",
        ", expected version " TEXT(CUBLAS_VER_MAJOR)};
    static const colo_library_symbol_t want[] = {FUNCTIONS(WANTED)};
    COLO_HOLD(&lock);
    if (!found)
        COLO_TRY(colo_library_find(&cublas, want, sizeof want / sizeof want[0]));
    found = true;
    return COLO_OK;
}

/* ---- the object ---- */

struct key {
    int32_t product, bias, beta, dtype[3], scaled, batch;
    int32_t align[4];
    int64_t ld[3], step[3], m, n, k; /* of n or k, whichever is rows: ROWS; of a batch all rows */
};

typedef struct colo_product {
    cublasLtHandle_t handle;
    bool pinned;
    int32_t clusters; /* of colo_k_head_fit(); 0: no product makes statistics */
    int32_t multiprocessors;
    int32_t used, next;
    struct {
        struct key key;
        cublasLtMatmulAlgo_t algo;
        bool none; /* no kernel does this */
    } cache[CACHE];
} colo_product_t;

static colo_status_t failed(const char *what, cublasStatus_t status)
{
    return colo_fail(COLO_ERR_CUDA, "lm_head: %s: cuBLASLt says %s", what, lt.name(status));
}

/* Rows of 16-byte words: what the copy engine takes */
static bool is_tiled(const struct colo_linear_shape *shape)
{
    return (shape->dtype == COLO_BF16 || shape->dtype == COLO_F16) && !shape->pinned &&
           shape->hidden % 8 == 0 && shape->columns <= INT32_MAX - COLO_LOGPROB_TILE;
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    colo_product_t *product = calloc(1, sizeof *product);
    COLO_FAIL_IF(!product, COLO_ERR_NOMEM, "lm_head: %zu bytes", sizeof *product);
    product->pinned = shape->pinned;
    colo_status_t st = find_library();
    if (st == COLO_OK && is_tiled(shape))
        st = colo_cuda_report(colo_k_head_fit(&product->clusters), "lm_head: create");
    COLO_THEN(
        st, colo_cuda_report(cudaDeviceGetAttribute(&product->multiprocessors,
                                                    cudaDevAttrMultiProcessorCount, shape->device),
                             "lm_head: create"));
    const cublasStatus_t status = st < 0 ? CUBLAS_STATUS_SUCCESS : lt.create(&product->handle);
    if (status != CUBLAS_STATUS_SUCCESS)
        st = failed("create", status);
    if (st < 0)
        free(product);
    else
        *made = product;
    return st;
}

static void destroy(void *made)
{
    lt.destroy(((colo_product_t *)made)->handle);
    free(made);
}

static int64_t workspace(const void *made)
{
    return WORKSPACE;
}

static bool reduces(const void *made)
{
    return ((const colo_product_t *)made)->clusters > 0;
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
    const struct colo_linear_matrix *x[3]; /* a, b, d */
    bool ta, tb;
    int64_t m, n, k;
    bool bias; /* added by the kernel */
    double beta;
    const float *scale; /* of linear.h: factors are on the device then */
    bool pinned;
    int32_t batch; /* so many products; operands of the next are step elements further on */
    int64_t step[3];
    void *workspace;
    uint64_t bytes;
};

static int64_t ld_of(const struct colo_linear_matrix *x, int64_t extent)
{
    return x->stride > extent ? x->stride : extent; /* one row may have any stride */
}

static struct call call_of(const struct colo_linear_gemm *gemm)
{
    const struct colo_linear_form form = colo_linear_form_of(gemm);
    return (struct call){.x = {form.b, form.a, form.c},
                         .ta = !form.b_by_k,
                         .tb = form.a_by_k,
                         .m = form.n,
                         .n = form.m,
                         .k = form.k,
                         .bias = gemm->bias != NULL,
                         .beta = gemm->beta,
                         .scale = gemm->scale,
                         .batch = 1,
                         .workspace = gemm->workspace,
                         .bytes = WORKSPACE};
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

#define LT_SET(set, desc, attribute, value) LT_TRY(lt.set(desc, attribute, &(value), sizeof(value)))

struct descs {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t x[3];
};

static cublasStatus_t describe(const struct call *call, const void *bias, struct descs *descs)
{
    const bool wide = call->x[0]->dtype == COLO_F64;
    const int32_t t = CUBLAS_OP_T, epilogue = CUBLASLT_EPILOGUE_BIAS,
                  bias_type = type_of(call->x[0]->dtype), device = CUBLASLT_POINTER_MODE_DEVICE;
    const int64_t rows[3] = {call->ta ? call->k : call->m, call->tb ? call->n : call->k, call->m},
                  columns[3] = {call->ta ? call->m : call->k, call->tb ? call->k : call->n,
                                call->n};
    LT_TRY(lt.desc_init(&descs->op, sizeof descs->op,
                        wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                        wide ? CUDA_R_64F : CUDA_R_32F));
    if (call->ta)
        LT_SET(desc_set, &descs->op, CUBLASLT_MATMUL_DESC_TRANSA, t);
    if (call->tb)
        LT_SET(desc_set, &descs->op, CUBLASLT_MATMUL_DESC_TRANSB, t);
    if (call->scale)
        LT_SET(desc_set, &descs->op, CUBLASLT_MATMUL_DESC_POINTER_MODE, device);
    if (call->bias) {
        LT_SET(desc_set, &descs->op, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        LT_SET(desc_set, &descs->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        LT_SET(desc_set, &descs->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
    }
    for (int i = 0; i < 3; i++)
        LT_TRY(lt.layout_init(&descs->x[i], sizeof descs->x[i], type_of(call->x[i]->dtype),
                              (uint64_t)rows[i], (uint64_t)columns[i], ld_of(call->x[i], rows[i])));
    for (int i = 0; i < 3 && call->batch > 1; i++) {
        LT_SET(layout_set, &descs->x[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, call->batch);
        LT_SET(layout_set, &descs->x[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
               call->step[i]);
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* The first kernel that does @call. Parts of a 16-bit result are added up before they are rounded;
 * @none where there is none. */
static cublasStatus_t ask(const colo_product_t *product, const struct call *call, const void *bias,
                          bool may_split, cublasLtMatmulAlgo_t *algo, bool *none)
{
    static const cublasLtMatmulPreferenceAttributes_t least[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES};
    struct descs descs;
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found[1];
    int n = 0;
    const bool narrow = call->x[2]->dtype == COLO_BF16 || call->x[2]->dtype == COLO_F16;
    const uint32_t scheme = !may_split ? CUBLASLT_REDUCTION_SCHEME_NONE
                            : narrow   ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                       : CUBLASLT_REDUCTION_SCHEME_MASK;
    LT_TRY(describe(call, bias, &descs));
    LT_TRY(lt.pref_init(&pref, sizeof pref));
    LT_SET(pref_set, &pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, call->bytes);
    LT_SET(pref_set, &pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme);
    for (int i = 0; i < 4; i++) { /* c is d */
        const uint32_t align = (uint32_t)align_of(call, call->x[i < 2 ? i : 2]->data);
        LT_SET(pref_set, &pref, least[i], align);
    }
    const cublasStatus_t result = lt.heuristic(product->handle, &descs.op, &descs.x[0], &descs.x[1],
                                               &descs.x[2], &descs.x[2], &pref, 1, found, &n);
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
    for (int i = 0; i < 3; i++) {
        key.dtype[i] = (int32_t)call->x[i]->dtype;
        key.align[i] = align_of(call, call->x[i]->data);
        key.ld[i] = call->x[i]->stride;
        key.step[i] = call->step[i];
    }
    key.batch = call->batch;
    key.align[3] = call->bias ? align_of(call, bias) : 0;
    key.m = call->m;
    key.n = gemm->product == COLO_LINEAR_D_WEIGHT ? call->n : call->batch > 1 ? gemm->all : ROWS;
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
    const int64_t unit = 128;
    z.stride = (gemm->columns + unit - 1) / unit * unit;
    if (product->pinned && gemm->product == COLO_LINEAR_LOGITS)
        usual.x[2] = &z;
    else if (product->pinned)
        usual.x[1] = &z;
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
    const size_t elem = colo_dtype_size(call->x[2]->dtype);
    if (call->m == 0 || call->n == 0 || call->beta != 0)
        return COLO_OK;
    return colo_cuda_report(cudaMemset2DAsync(call->x[2]->data,
                                              (size_t)ld_of(call->x[2], call->m) * elem, 0,
                                              (size_t)call->m * elem, (size_t)call->n, stream),
                            name);
}

static colo_status_t reduce(const colo_product_t *product, const struct colo_linear_gemm *gemm,
                            colo_stream_t stream)
{
    const struct colo_linear_tiled tiled = {.h = gemm->h,
                                            .w = gemm->w,
                                            .z = gemm->z,
                                            .bias = gemm->bias,
                                            .hidden = gemm->hidden,
                                            .stats = gemm->stats,
                                            .clusters = product->clusters};
    return colo_cuda_report(colo_k_head_product(&tiled, stream), "lm_head: logits");
}

/* @call is @gemm's, or of a batch of such. */
static colo_status_t multiply(colo_product_t *product, const struct colo_linear_gemm *gemm,
                              struct call call, colo_stream_t stream)
{
    const char *name = product_names[gemm->product];
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
        const struct colo_linear_convert convert = {
            *call.x[2], {(void *)(uintptr_t)bias, 0, call.x[0]->dtype}, gemm->rows, gemm->columns};
        COLO_TRY(colo_cuda_report(colo_k_rows_convert(&convert, stream), name));
        result = choose(product, gemm, &call, NULL, &algo, &none);
    }
    struct descs descs;
    cublasLtMatmulHeuristicResult_t fits;
    if (!result)
        result = describe(&call, bias, &descs);
    if (!result && !none)
        none = lt.check(product->handle, &descs.op, &descs.x[0], &descs.x[1], &descs.x[2],
                        &descs.x[2], &algo, &fits) ||
               fits.workspaceSize > call.bytes;
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
        const float factor_f = (float)gemm->factor, beta_f = (float)call.beta;
        const bool wide = call.x[0]->dtype == COLO_F64;
        const void *alpha = wide ? (const void *)&gemm->factor : &factor_f,
                   *beta = wide ? (const void *)&call.beta : &beta_f;
        if (call.scale) { /* of 16-bit heads; then the 0 and the 1 */
            alpha = call.scale;
            beta = call.scale + (call.beta != 0 ? 2 : 1);
        }
        result = lt.matmul(product->handle, &descs.op, alpha, call.x[0]->data, &descs.x[0],
                           call.x[1]->data, &descs.x[1], beta, call.x[2]->data, &descs.x[2],
                           call.x[2]->data, &descs.x[2], &algo, call.workspace, call.bytes, stream);
    }
    return result ? failed(name, result) : COLO_OK;
}

/* ---- sums in parts ---- */

static int32_t parts_of(const colo_product_t *product, const struct colo_linear_gemm *gemm)
{
    const bool narrow = gemm->z.dtype == COLO_BF16 || gemm->z.dtype == COLO_F16;
    if (gemm->product != COLO_LINEAR_D_HIDDEN || product->pinned || !narrow || gemm->all <= 0 ||
        gemm->all > (int64_t)TILE_N * product->multiprocessors ||
        gemm->hidden > (int64_t)TILE_M * product->multiprocessors)
        return 1;
    const int64_t tiles = ((gemm->hidden - 1) / TILE_M + 1) * ((gemm->all - 1) / TILE_N + 1),
                  bytes = gemm->all * gemm->hidden * (int64_t)sizeof(float);
    int64_t parts = product->multiprocessors / tiles;
    parts = parts < gemm->columns / LEAST ? parts : gemm->columns / LEAST;
    parts = parts < PARTS_BYTES / bytes ? parts : PARTS_BYTES / bytes;
    return (int32_t)(parts < 1 ? 1 : parts < PARTS ? parts : PARTS);
}

/* What is beyond parts of one size is added to the first. */
static colo_status_t multiply_parts(colo_product_t *product, const struct colo_linear_gemm *gemm,
                                    int32_t parts, colo_stream_t stream)
{
    const int64_t each = gemm->columns / parts / GRAIN * GRAIN, step = gemm->all * gemm->hidden;
    struct colo_linear_gemm part = *gemm;
    part.columns = each;
    part.h = (struct colo_linear_matrix){gemm->workspace, gemm->hidden, COLO_F32};
    part.beta = 0;
    part.factor = 1;
    part.scale = NULL;
    struct call call = call_of(&part);
    call.batch = parts;
    call.step[0] = each * gemm->w.stride;
    call.step[1] = each;
    call.step[2] = step;
    call.workspace = (char *)gemm->workspace + PARTS_BYTES;
    call.bytes = WORKSPACE - PARTS_BYTES;
    COLO_TRY(multiply(product, &part, call, stream));
    part.columns = gemm->columns - parts * each;
    part.w.data = colo_linear_element(gemm->w.data, gemm->w.dtype, parts * call.step[0]);
    part.z.data = colo_linear_element(gemm->z.data, gemm->z.dtype, parts * call.step[1]);
    part.beta = 1;
    call = call_of(&part);
    call.workspace = (char *)gemm->workspace + PARTS_BYTES;
    call.bytes = WORKSPACE - PARTS_BYTES;
    COLO_TRY(multiply(product, &part, call, stream));
    const struct colo_linear_fold fold = {.to = gemm->h,
                                          .parts = gemm->workspace,
                                          .count = parts,
                                          .step = step,
                                          .rows = gemm->rows,
                                          .columns = gemm->hidden,
                                          .beta = gemm->beta,
                                          .factor = gemm->factor,
                                          .scale = gemm->scale};
    return colo_cuda_report(colo_k_rows_fold(&fold, stream), product_names[gemm->product]);
}

/* ---- d_weight ---- */

static bool is_aligned(const struct colo_linear_matrix *x)
{
    const int64_t pitch = x->stride * (int64_t)colo_dtype_size(x->dtype);
    return (uintptr_t)x->data % 16 == 0 && pitch % 16 == 0 && pitch < INT64_C(1) << 40;
}

static bool is_summed(const colo_product_t *product, const struct colo_linear_gemm *gemm)
{
    const colo_dtype_t dtype = gemm->z.dtype, to = gemm->w.dtype;
    return gemm->product == COLO_LINEAR_D_WEIGHT && product->clusters > 0 && gemm->rows > 0 &&
           (dtype == COLO_BF16 || dtype == COLO_F16) &&
           (to == COLO_F32 || (to == dtype && gemm->beta == 0)) && gemm->hidden >= WEIGHT_TILE &&
           gemm->columns <= INT32_MAX - WEIGHT_TILE &&
           gemm->columns / WEIGHT_TILE >= product->clusters / (gemm->hidden / WEIGHT_TILE) &&
           is_aligned(&gemm->z) && is_aligned(&gemm->h) && is_aligned(&gemm->w);
}

static colo_status_t sum(const colo_product_t *product, const struct colo_linear_gemm *gemm,
                         colo_stream_t stream)
{
    const struct colo_linear_summed summed = {.h = gemm->h,
                                              .w = gemm->w,
                                              .z = gemm->z,
                                              .rows = gemm->rows,
                                              .columns = gemm->columns,
                                              .hidden = gemm->hidden,
                                              .adds = gemm->beta != 0,
                                              .factor = gemm->factor,
                                              .scale = gemm->scale,
                                              .clusters = product->clusters};
    return colo_cuda_report(colo_k_weight_product(&summed, stream), "lm_head: d_weight");
}

static colo_status_t run(void *made, const struct colo_linear_gemm *gemm, colo_stream_t stream)
{
    colo_product_t *product = made;
    const int32_t parts = parts_of(product, gemm);
    if (gemm->stats)
        return reduce(product, gemm, stream);
    if (is_summed(product, gemm))
        return sum(product, gemm, stream);
    return parts > 1 ? multiply_parts(product, gemm, parts, stream)
                     : multiply(product, gemm, call_of(gemm), stream);
}

const colo_gemm_backend_t colo_gemm_cuda = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .reduces = reduces,
    .run = run,
};
