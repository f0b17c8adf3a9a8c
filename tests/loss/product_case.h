/* SPDX-License-Identifier: Apache-2.0 */
/*
 * product_case.h - one product of the lm_head path, where the memory of the test is, and what it
 * must give by its formula, in fp64.
 */
#ifndef TESTS_LOSS_PRODUCT_CASE_H
#define TESTS_LOSS_PRODUCT_CASE_H

#include "loss/linear/linear.h"
#include "loss/loss_case.h"
#include "loss/where.h"

typedef struct product_case {
    struct colo_linear_gemm g;
    double *h, *w, *z, *bias;      /* what the matrices hold, [., stride]; bias: NULL if none */
    double scale;                  /* what g.scale holds; 1 */
    struct colo_linear_matrix *to; /* what is written, [rows, columns], of sums of so many terms */
    const double *was;             /* what it holds before */
    int64_t rows, columns, terms;
} product_case_t;

/* @n numbers that @dtype holds exactly; *data: their memory. */
double *product_draw(colo_dtype_t dtype, int64_t n, uint64_t *rng, void **data);

/* Matrices of @dtype, but what is written is of @to. @n: rows, columns, hidden. Rows of hidden and
 * of the weight are @gap elements apart, those of logits begin each @z_stride. */
void product_case_init(product_case_t *p, enum colo_linear_product what, colo_dtype_t dtype,
                       colo_dtype_t to, const int64_t n[3], int64_t gap, int64_t z_stride,
                       bool bias, uint64_t *rng);
void product_case_free(product_case_t *p);
/* What was written is within @u times the sum of magnitudes, and one rounding to its dtype; gaps
 * are as they were; fails the running test. @twice: a product of 16 bits may be rounded before it is
 * added to what is there or to a bias, and the sum again. */
void product_case_compare(const product_case_t *p, double u, bool twice, const char *label);

#endif
