/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the three products of linear.h in host memory: in blocks, each by a CBLAS, or by loops
 * where there is none or the object is pinned; which, is decided once an object.
 *
 * The bits that a GEMM gives a row depend on how many rows it is called with, on where the row is
 * among them, on strides and addresses: kernels differ at edges, and threads split by size. They
 * must not depend on the chunk here. So a CBLAS can tell no two blocks apart: every call has ROWS
 * rows, and row r of all is row r % ROWS of its block; rows of other chunks are zeros and
 * their results dropped. d_W sums over DEPTH rows a call, with zeros after the last. All operands
 * are copied to the same places of the workspace first, which makes them fp32 (fp64 of f64 heads),
 * too. What is left of a shape at its edges, columns and hidden, is the head's and the same for
 * every chunk. A chunk that is no multiple of ROWS thus computes some zeros.
 *
 * The loops give an element's sum one order whatever block it falls into, and need no zeros.
 *
 * A block of C is summed in fp64 over blocks of k, each of which is summed in fp32 (fp64 of f64
 * heads): the rounding error grows with the block of k, not with k.
 */
#include "loss/host/cblas.h"

#include "core/error.h"
#include "core/memory.h"
#include "loss/linear/linear.h"
#include "loss/scalar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 128, DEPTH = 128, COLUMNS = 512, TALL = 4, WIDE = 8 };

/* What create makes. */
struct products {
    colo_cblas_t lib;
    bool by_loops, wide;
    int64_t columns;          /* of a block */
    int64_t b, c, sum, bytes; /* where they are in the workspace, behind a; its size */
};

/* @n of @all elements, after @before zeros, and zeros after them */
struct span {
    int64_t from, n, before, all;
};

/* ---- loops in a CBLAS's place ---- */

/* @k <= DEPTH. TALL rows of a and WIDE columns of b are copied, so that what is added up lies in
 * one line. */
#define LOOPS(name, real)                                                                        \
    static void name(int order, int op_a, int op_b, int64_t m, int64_t n, int64_t k, real alpha, \
                     const real *a, int64_t lda, const real *b, int64_t ldb, real beta, real *c, \
                     int64_t ldc)                                                                \
    {                                                                                            \
        const int64_t a_i = op_a == COLO_CBLAS_TRANS ? 1 : lda,                                  \
                      a_k = op_a == COLO_CBLAS_TRANS ? lda : 1,                                  \
                      b_j = op_b == COLO_CBLAS_TRANS ? ldb : 1,                                  \
                      b_k = op_b == COLO_CBLAS_TRANS ? 1 : ldb;                                  \
        real left[DEPTH][TALL], right[DEPTH][WIDE];                                              \
        for (int64_t j = 0; j < n; j += WIDE) {                                                  \
            for (int64_t l = 0; l < k; l++)                                                      \
                for (int64_t x = 0; x < WIDE; x++)                                               \
                    right[l][x] = j + x < n ? b[(j + x) * b_j + l * b_k] : 0;                    \
            for (int64_t i = 0; i < m; i += TALL) {                                              \
                real sum[TALL][WIDE] = {{0}};                                                    \
                for (int64_t l = 0; l < k; l++)                                                  \
                    for (int64_t y = 0; y < TALL; y++)                                           \
                        left[l][y] = i + y < m ? a[(i + y) * a_i + l * a_k] : 0;                 \
                for (int64_t l = 0; l < k; l++)                                                  \
                    for (int y = 0; y < TALL; y++)                                               \
                        for (int x = 0; x < WIDE; x++)                                           \
                            sum[y][x] += left[l][y] * right[l][x];                               \
                for (int y = 0; y < TALL && i + y < m; y++)                                      \
                    for (int x = 0; x < WIDE && j + x < n; x++)                                  \
                        c[(i + y) * ldc + j + x] = sum[y][x];                                    \
            }                                                                                    \
        }                                                                                        \
    }
LOOPS(loops_f32, float)
LOOPS(loops_f64, double)

/* ---- a block ---- */

COLO_INLINE void narrow_each(colo_dtype_t dtype, float *to, const void *from, int64_t first,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)colo_scalar_get(dtype, from, first + i);
}

/* to = n elements of @x from @offset on, as float, or double of f64 */
static void widen(void *to, const struct colo_linear_matrix *x, int64_t offset, int64_t n)
{
    if (x->dtype == COLO_F64)
        memcpy(to, (const double *)x->data + offset, (size_t)n * sizeof(double));
    else
        COLO_FOR_FLOAT(x->dtype, narrow_each, to, x->data, offset, n)
}

/* Rows of memory of @x, @pitch elements apart in @to. */
static void pack(void *to, int64_t pitch, const struct colo_linear_matrix *x, bool by_k,
                 struct span lines, struct span k)
{
    const size_t elem = x->dtype == COLO_F64 ? sizeof(double) : sizeof(float);
    const struct span outer = by_k ? k : lines, inner = by_k ? lines : k;
    for (int64_t y = 0; y < outer.all; y++) {
        char *row = (char *)to + (size_t)(y * pitch) * elem;
        const int64_t from = y - outer.before;
        if (from < 0 || from >= outer.n) {
            memset(row, 0, (size_t)inner.all * elem);
            continue;
        }
        memset(row, 0, (size_t)inner.before * elem);
        widen(row + (size_t)inner.before * elem, x, (outer.from + from) * x->stride + inner.from,
              inner.n);
        memset(row + (size_t)(inner.before + inner.n) * elem, 0,
               (size_t)(inner.all - inner.before - inner.n) * elem);
    }
}

/* sum [m, n] = c, or += c */
#define ADD(name, real)                                                                           \
    static void name(double *sum, const real *c, int64_t m, int64_t n, int64_t pitch, bool first) \
    {                                                                                             \
        for (int64_t i = 0; i < m; i++, sum += pitch, c += pitch)                                 \
            for (int64_t j = 0; j < n; j++)                                                       \
                sum[j] = first ? (double)c[j] : sum[j] + (double)c[j];                            \
    }
ADD(add_f32, float)
ADD(add_f64, double)

/* One block of k: c = a b, and into the sums. */
static void multiply(const struct products *own, const struct colo_linear_form *form, char *a,
                     int64_t m, int64_t n, int64_t k, bool first)
{
    void *b = a + own->b, *c = a + own->c;
    double *sum = (double *)(void *)(a + own->sum);
    const int op_a = form->a_by_k ? COLO_CBLAS_TRANS : COLO_CBLAS_NO_TRANS,
              op_b = form->b_by_k ? COLO_CBLAS_NO_TRANS : COLO_CBLAS_TRANS;
    const int64_t lda = form->a_by_k ? ROWS : DEPTH, ldb = form->b_by_k ? own->columns : DEPTH,
                  ldc = own->columns;
    if (own->wide) {
        own->lib.dgemm(COLO_CBLAS_ROW_MAJOR, op_a, op_b, m, n, k, 1, (const void *)a, lda, b, ldb,
                       0, c, ldc);
        add_f64(sum, c, m, n, ldc, first);
    } else {
        own->lib.sgemm(COLO_CBLAS_ROW_MAJOR, op_a, op_b, m, n, k, 1, (const void *)a, lda, b, ldb,
                       0, c, ldc);
        add_f32(sum, c, m, n, ldc, first);
    }
}

/* Rows [@i, @i + @m), columns [@j, @j + @n) of what is written, from sums of @pitch a row, which
 * are overwritten: scale, bias, what was there before, one rounding. */
static void store(const struct colo_linear_gemm *gemm, const struct colo_linear_matrix *to,
                  int64_t i, int64_t m, int64_t j, int64_t n, double *sum, int64_t pitch)
{
    const double scale = gemm->factor * (gemm->scale ? (double)*gemm->scale : 1);
    for (int64_t y = 0; y < m; y++, sum += pitch) {
        const int64_t offset = (i + y) * to->stride + j;
        for (int64_t x = 0; x < n; x++)
            sum[x] *= scale;
        for (int64_t x = 0; gemm->bias && x < n; x++)
            sum[x] += colo_scalar_get(gemm->h.dtype, gemm->bias, j + x);
        for (int64_t x = 0; gemm->beta != 0 && x < n; x++)
            sum[x] += colo_scalar_get(to->dtype, to->data, offset + x);
        COLO_FOR_FLOAT(to->dtype, colo_scalar_put_each, to->data, offset, sum, n)
    }
}

colo_status_t colo_gemm_describe(colo_gemm_t gemm, char *text, size_t cap)
{
    colo_cblas_t lib;
    char why[COLO_CBLAS_WHY];
    bool found;
    COLO_FAIL_IF(!text || cap == 0, COLO_ERR_ARG, "gemm_describe: %s",
                 text ? "cap is 0" : "text is NULL");
    COLO_FAIL_IF((unsigned)gemm > COLO_GEMM_LOOPS, COLO_ERR_ARG,
                 "gemm_describe: gemm %d is unknown", (int)gemm);
    COLO_TRY(colo_cblas_find(gemm, &lib, &found, why));
    snprintf(text, cap, "%s", why);
    return COLO_OK;
}

/* ---- the table ---- */

static colo_status_t run(void *made, const struct colo_linear_gemm *gemm, colo_stream_t stream)
{
    const struct products *own = made;
    const struct colo_linear_form form = colo_linear_form_of(gemm);
    const bool sums_rows = gemm->product == COLO_LINEAR_D_WEIGHT, /* else lines of A are rows */
        exact = sums_rows || own->by_loops;
    char *a = gemm->workspace;
    double *sum = (double *)(void *)(a + own->sum);
    for (int64_t i = exact ? 0 : -(gemm->first % ROWS); i < form.m; i += ROWS) {
        const int64_t lo = i < 0 ? 0 : i, hi = form.m - i < ROWS ? form.m : i + ROWS;
        const struct span rows = {lo, hi - lo, lo - i, exact ? hi - lo : ROWS};
        for (int64_t j = 0; j < form.n; j += own->columns) {
            const int64_t n = form.n - j < own->columns ? form.n - j : own->columns;
            if (form.k == 0)
                memset(sum, 0, (size_t)(ROWS * own->columns) * sizeof *sum);
            for (int64_t from = 0; from < form.k; from += DEPTH) {
                struct span k = {from, form.k - from < DEPTH ? form.k - from : DEPTH, 0, 0};
                k.all = sums_rows && !own->by_loops ? DEPTH : k.n;
                pack(a, form.a_by_k ? ROWS : DEPTH, form.a, form.a_by_k, rows, k);
                pack(a + own->b, form.b_by_k ? own->columns : DEPTH, form.b, form.b_by_k,
                     (struct span){j, n, 0, n}, k);
                multiply(own, &form, a, rows.all, n, k.all, from == 0);
            }
            store(gemm, form.c, lo, hi - lo, j, n, sum + rows.before * own->columns, own->columns);
        }
    }
    return COLO_OK;
}

/* Appends @bytes at a multiple of COLO_ALIGNMENT; returns where. */
static int64_t append(struct products *own, int64_t bytes)
{
    const int64_t offset = own->bytes;
    (void)colo_mem_round_ok(offset + bytes, &own->bytes);
    return offset;
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    const int64_t most = shape->columns > shape->hidden ? shape->columns : shape->hidden;
    struct products own = {.wide = shape->dtype == COLO_F64};
    char why[COLO_CBLAS_WHY];
    bool found;
    *made = NULL;
    COLO_TRY(colo_cblas_find(shape->gemm, &own.lib, &found, why));
    own.by_loops = !found || shape->pinned; /* a CBLAS's bits of a row depend on its place */
    if (own.by_loops)
        own.lib = (colo_cblas_t){loops_f32, loops_f64};
    own.columns = most < 1 ? 1 : most < COLUMNS ? most : COLUMNS;
    const int64_t elem = own.wide ? sizeof(double) : sizeof(float);
    (void)append(&own, ROWS * DEPTH * elem);
    own.b = append(&own, DEPTH * own.columns * elem);
    own.c = append(&own, ROWS * own.columns * elem);
    own.sum = append(&own, ROWS * own.columns * (int64_t)sizeof(double));
    struct products *kept = malloc(sizeof *kept);
    COLO_FAIL_IF(!kept, COLO_ERR_NOMEM, "linear: %zu bytes", sizeof *kept);
    *kept = own;
    *made = kept;
    return COLO_OK;
}

static void destroy(void *made)
{
    free(made);
}

static int64_t workspace(const void *made)
{
    return ((const struct products *)made)->bytes;
}

const colo_gemm_backend_t colo_gemm_host = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .run = run,
};
