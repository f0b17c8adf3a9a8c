/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm-loops.c - products of gemm.h without a library.
 *
 * An element's sum has one order whatever block it falls into, so that a token's logits do not
 * depend on the other tokens. A block of C is summed in fp64 over blocks of K, each of which is
 * summed in fp32 (fp64 for f64 operands) from operands packed as such: the rounding error grows
 * with the block of K, not with K.
 */
#include "loss/host/gemm.h"
#include "loss/scalar.h"

#include <string.h>

enum { BLOCK = 64, DEPTH = 128, TALL = 4, WIDE = 8 };

/* What the workspace holds. */
struct panels {
    double sum[BLOCK * BLOCK];
    union {
        float f32[DEPTH * BLOCK];
        double f64[DEPTH * BLOCK];
    } a, b; /* [k][i], [k][j]; zeros outside the matrix */
};

/* @n of BLOCK lines from @offset, @depth of DEPTH elements from @from */
static void pack_panel(const struct colo_host_operand *x, int64_t offset, int64_t n, int64_t from,
                       int64_t depth, bool wide, void *to)
{
    const int64_t across = x->by_k ? 1 : x->stride, along = x->by_k ? x->stride : 1;
    for (int64_t k = 0; k < depth; k++)
        for (int64_t i = 0; i < BLOCK; i++) {
            double v = 0;
            if (i < n)
                v = colo_scalar_get(x->dtype, x->data, (offset + i) * across + (from + k) * along);
            if (wide)
                ((double *)to)[k * BLOCK + i] = v;
            else
                ((float *)to)[k * BLOCK + i] = (float)v;
        }
}

#define MULTIPLY(name, real)                                                        \
    static void name(const real *a, const real *b, int64_t depth, double *sum)      \
    {                                                                               \
        for (int i = 0; i < BLOCK; i += TALL)                                       \
            for (int j = 0; j < BLOCK; j += WIDE) {                                 \
                real c[TALL][WIDE] = {{0}};                                         \
                for (int64_t k = 0; k < depth; k++)                                 \
                    for (int y = 0; y < TALL; y++)                                  \
                        for (int x = 0; x < WIDE; x++)                              \
                            c[y][x] += a[k * BLOCK + i + y] * b[k * BLOCK + j + x]; \
                for (int y = 0; y < TALL; y++)                                      \
                    for (int x = 0; x < WIDE; x++)                                  \
                        sum[(i + y) * BLOCK + j + x] += (double)c[y][x];            \
            }                                                                       \
    }
MULTIPLY(multiply_f32, float)
MULTIPLY(multiply_f64, double)

int64_t colo_host_loops_workspace(void)
{
    return (int64_t)sizeof(struct panels);
}

void colo_host_loops_run(const struct colo_host_product *product, void *workspace)
{
    struct panels *panels = workspace;
    for (int64_t i = 0; i < product->m; i += BLOCK)
        for (int64_t j = 0; j < product->n; j += BLOCK) {
            int64_t tall = product->m - i < BLOCK ? product->m - i : BLOCK;
            int64_t wide = product->n - j < BLOCK ? product->n - j : BLOCK;
            memset(panels->sum, 0, sizeof panels->sum);
            for (int64_t k = 0; k < product->k; k += DEPTH) {
                int64_t depth = product->k - k < DEPTH ? product->k - k : DEPTH;
                pack_panel(&product->a, i, tall, k, depth, product->wide, &panels->a);
                pack_panel(&product->b, j, wide, k, depth, product->wide, &panels->b);
                if (product->wide)
                    multiply_f64(panels->a.f64, panels->b.f64, depth, panels->sum);
                else
                    multiply_f32(panels->a.f32, panels->b.f32, depth, panels->sum);
            }
            colo_host_product_store(product, i, tall, j, wide, panels->sum, BLOCK);
        }
}
