/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_logprob.h - log-probability, entropy and loss of one token over the whole vocabulary, serial,
 * in fp64. The oracle of every implementation of the logits path; shares no code with src/.
 */
#ifndef TESTS_REF_LOGPROB_H
#define TESTS_REF_LOGPROB_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ref_logprob_opts {
    double temperature, scale, softcap, smoothing, z_loss;
    bool megatron, lenient;
    int64_t ignore_index;
} ref_logprob_opts_t;

typedef struct ref_logprob_row {
    double logp, entropy, loss;
    double lse, range; /* of x: log-sum-exp, and max - min: what tolerances are made of */
    double top;        /* max |x| */
    bool correct, valid, ignored;
} ref_logprob_row_t;

/* z [V], all finite */
void ref_logprob(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                 ref_logprob_row_t *row);

/* dz [V] from upstream gradients of logp, entropy and loss, in closed form */
void ref_logprob_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                      double g_logp, double g_entropy, double g_loss, double *dz);

#endif
