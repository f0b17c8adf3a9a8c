/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_linear.h - lm_head and loss together, serial, in fp64, by the definitions: z = W h + b, the
 * textbook outputs and gradients of ref_logprob.h, and the chain rule in plain loops.
 */
#ifndef TESTS_REF_REF_LINEAR_H
#define TESTS_REF_REF_LINEAR_H

#include "ref/ref_logprob.h"

typedef struct ref_linear {
    ref_logprob_opts_t opts;
    int64_t tokens, vocab, hidden;
    const double *h, *w, *b;   /* [T, H], [V, H], [V] or NULL */
    const int64_t *targets;    /* [T] */
    const uint8_t *support;    /* [T, V] as ref_support()'s, or NULL */
    const double *g[REF_UPS];  /* [T] each: upstream of logp, entropy, loss, lse; NULL = 0 */
    const double *temperature; /* [T], multiplies that of opts; or NULL */
} ref_linear_t;

typedef struct ref_linear_result {
    ref_logprob_row_t *rows; /* [T] */
    double *z, *dz;          /* [T, V] */
    double *d_h, *d_w, *d_b; /* written: [T, H]; added to: [V, H], [V] */
} ref_linear_result_t;

void ref_linear_alloc(const ref_linear_t *in, ref_linear_result_t *out); /* zeros */
void ref_linear_free(ref_linear_result_t *out);
void ref_linear(const ref_linear_t *in, ref_linear_result_t *out);

#endif
