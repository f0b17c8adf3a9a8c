/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.h (private) - products of loss/linear/linear.h in host memory: which file makes them and
 * how.
 *
 * host/gemm.c turns each of the three into one form and chooses; gemm-loops.c and
 * gemm-cblas.c compute it.
 */
#ifndef COLO_LOSS_PRODUCT_HOST_H
#define COLO_LOSS_PRODUCT_HOST_H

#include "loss/host/cblas.h"
#include "loss/linear/linear.h"

/* Lines are rows of A, columns of B. In memory a line is contiguous over k and lines are @stride
 * elements apart; by_k: lines are contiguous, their k-th elements a row of @stride elements. */
struct colo_host_operand {
    const void *data;
    colo_dtype_t dtype;
    int64_t stride;
    bool by_k;
};

/* C [m, n] = scale * sum over k of A(i, k) B(k, j), plus bias(j), plus what is in C if add. */
struct colo_host_product {
    struct colo_host_operand a, b;
    int64_t m, n, k;
    int64_t first;  /* line 0 of A, or k = 0, is this row of the pass */
    bool sums_rows; /* k runs over rows; otherwise lines of A are rows */
    const struct colo_linear_matrix *c;
    const void *bias; /* [n] of bias_dtype */
    colo_dtype_t bias_dtype;
    double scale;
    bool add;
    bool wide; /* f64 operands */
};

/* Rows [i0, i0 + m), columns [j0, j0 + n) of C from sums of @pitch a row, which are overwritten. */
void colo_host_product_store(const struct colo_host_product *product, int64_t i0, int64_t m,
                             int64_t j0, int64_t n, double *sum, int64_t pitch);

/* gemm-loops.c */
int64_t colo_host_loops_workspace(void);
void colo_host_loops_run(const struct colo_host_product *product, void *workspace);

/* gemm-cblas.c; @columns: of a block, for products of at most @most columns */
int64_t colo_host_cblas_columns(int64_t most);
int64_t colo_host_cblas_workspace(int64_t columns, bool wide);
void colo_host_cblas_run(const colo_cblas_t *lib, const struct colo_host_product *product,
                         int64_t columns, void *workspace);

#endif
