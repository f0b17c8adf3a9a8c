/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm-cblas.c - products of gemm.h by a CBLAS, in blocks of which it can tell no two
 * apart.
 *
 * The bits that a GEMM gives a row depend on how many rows it is called with, on where the row is
 * among them, on strides and addresses: kernels differ at edges, and threads split by size. They
 * must not depend on the chunk here. So every call has ROWS rows, and row r of the pass is row
 * r % ROWS of its block; rows of other chunks are zeros and their results dropped. d_W sums over
 * DEPTH rows a call, with zeros after the last. All operands are copied to the same places of the
 * workspace first, which makes them fp32 (fp64 of f64 heads), too. What is left of a shape at its
 * edges, columns and hidden, is the head's and the same for every chunk.
 *
 * A chunk that is no multiple of ROWS thus computes some zeros. Blocks of k are added in fp64, as
 * gemm-loops.c adds them, with the same bound on the error.
 */
#include "loss/host/cblas.h"
#include "loss/host/gemm.h"
#include "loss/scalar.h"

#include <string.h>

enum { ROWS = 128, DEPTH = 128, COLUMNS = 512, ALIGN = 256 };

/* @n of @all elements, after @before zeros, and zeros after them */
struct span {
    int64_t from, n, before, all;
};

static int64_t aligned(int64_t bytes)
{
    return (bytes + ALIGN - 1) & ~(int64_t)(ALIGN - 1);
}

int64_t colo_host_cblas_columns(int64_t most)
{
    return most < 1 ? 1 : most < COLUMNS ? most : COLUMNS;
}

/* a, b, c and the sums */
static int64_t lay_out(int64_t columns, int64_t elem, int64_t offset[4])
{
    const int64_t bytes[4] = {ROWS * DEPTH * elem, DEPTH * columns * elem, ROWS * columns * elem,
                              ROWS * columns * (int64_t)sizeof(double)};
    int64_t n = 0;
    for (int i = 0; i < 4; i++) {
        offset[i] = n;
        n += aligned(bytes[i]);
    }
    return n;
}

int64_t colo_host_cblas_workspace(int64_t columns, bool wide)
{
    int64_t offset[4];
    return lay_out(columns, wide ? 8 : 4, offset);
}

COLO_INLINE void narrow_each(colo_dtype_t dtype, float *to, const void *from, int64_t first,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)colo_scalar_get(dtype, from, first + i);
}

/* to = n elements of @x from @offset on, as float, or double of f64 */
static void widen(void *to, const struct colo_host_operand *x, int64_t offset, int64_t n)
{
    if (x->dtype == COLO_F64)
        memcpy(to, (const double *)x->data + offset, (size_t)n * sizeof(double));
    else
        COLO_FOR_FLOAT(x->dtype, narrow_each, to, x->data, offset, n)
}

/* Rows of memory of @x, @pitch elements apart in @to. */
static void pack(void *to, int64_t pitch, const struct colo_host_operand *x, struct span lines,
                 struct span k)
{
    const size_t elem = x->dtype == COLO_F64 ? sizeof(double) : sizeof(float);
    const struct span outer = x->by_k ? k : lines, inner = x->by_k ? lines : k;
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
static void multiply(const colo_cblas_t *lib, const struct colo_host_product *product, char *memory,
                     const int64_t offset[4], int64_t m, int64_t n, int64_t k, int64_t columns,
                     bool first)
{
    void *a = memory + offset[0], *b = memory + offset[1], *c = memory + offset[2];
    double *sum = (double *)(void *)(memory + offset[3]);
    const int op_a = product->a.by_k ? COLO_CBLAS_TRANS : COLO_CBLAS_NO_TRANS,
              op_b = product->b.by_k ? COLO_CBLAS_NO_TRANS : COLO_CBLAS_TRANS;
    const int64_t lda = product->a.by_k ? ROWS : DEPTH, ldb = product->b.by_k ? columns : DEPTH;
    if (product->wide) {
        lib->dgemm(COLO_CBLAS_ROW_MAJOR, op_a, op_b, m, n, k, 1, a, lda, b, ldb, 0, c, columns);
        add_f64(sum, c, m, n, columns, first);
    } else {
        lib->sgemm(COLO_CBLAS_ROW_MAJOR, op_a, op_b, m, n, k, 1, a, lda, b, ldb, 0, c, columns);
        add_f32(sum, c, m, n, columns, first);
    }
}

void colo_host_cblas_run(const colo_cblas_t *lib, const struct colo_host_product *product,
                         int64_t columns, void *workspace)
{
    int64_t offset[4];
    lay_out(columns, product->wide ? 8 : 4, offset);
    char *memory = workspace;
    double *sum = (double *)(void *)(memory + offset[3]);
    for (int64_t i = product->sums_rows ? 0 : -(product->first % ROWS); i < product->m; i += ROWS) {
        const int64_t lo = i < 0 ? 0 : i, hi = product->m - i < ROWS ? product->m : i + ROWS;
        const struct span rows = {lo, hi - lo, lo - i, product->sums_rows ? hi - lo : ROWS};
        for (int64_t j = 0; j < product->n; j += columns) {
            const int64_t n = product->n - j < columns ? product->n - j : columns;
            if (product->k == 0)
                memset(sum, 0, (size_t)(ROWS * columns) * sizeof *sum);
            for (int64_t from = 0; from < product->k; from += DEPTH) {
                struct span k = {from, product->k - from < DEPTH ? product->k - from : DEPTH, 0, 0};
                k.all = product->sums_rows ? DEPTH : k.n;
                pack(memory + offset[0], product->a.by_k ? ROWS : DEPTH, &product->a, rows, k);
                pack(memory + offset[1], product->b.by_k ? columns : DEPTH, &product->b,
                     (struct span){j, n, 0, n}, k);
                multiply(lib, product, memory, offset, rows.all, n, k.all, columns, from == 0);
            }
            colo_host_product_store(product, lo, hi - lo, j, n, sum + rows.before * columns,
                                    columns);
        }
    }
}
