/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_logprob.h - log-probability, entropy and loss of one token over the whole vocabulary or a
 * list of it, cross entropy and KL against a distribution, serial, in fp64. The oracle of every
 * implementation of the logits path; shares no code with src/.
 */
#ifndef TESTS_REF_REF_LOGPROB_H
#define TESTS_REF_REF_LOGPROB_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ref_logprob_opts {
    double temperature, scale, softcap, smoothing, z_loss;
    bool megatron, lenient;
    int64_t ignore_index;
    const double *class_weight; /* [V], or NULL: each is 1 */
} ref_logprob_opts_t;

typedef struct ref_logprob_row {
    double logp, entropy, loss, weight, sum_p2, mean;
    double lse, range; /* of x: log-sum-exp, and max - min: what tolerances are made of */
    double top;        /* max |x| */
    int64_t best;      /* of the largest x, the first one */
    bool correct, valid, ignored;
} ref_logprob_row_t;

/* z [V], all finite */
void ref_logprob(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                 ref_logprob_row_t *row);

/* dz [V] from upstream gradients of logp, entropy, loss and lse, in closed form */
enum { REF_UPS = 4 };
void ref_logprob_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                      const double g[REF_UPS], double *dz);

/* The same of some columns of a row, those of a list and the target. @in [V]: is a column in the
 * list? NULL: all are. */
void ref_support(const ref_logprob_opts_t *o, const double *z, int64_t vocab, const uint8_t *in,
                 int64_t target, ref_logprob_row_t *row);
void ref_support_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                      const uint8_t *in, int64_t target, const double g[REF_UPS], double *dz);

typedef struct ref_distill_opts {
    ref_logprob_opts_t logits; /* temperature, scale, softcap */
    bool probs;
    double target_temperature, target_scale, target_softcap;
    enum { REF_FORWARD, REF_REVERSE, REF_JSD, REF_TV, REF_ACCEPTANCE } divergence;
    double beta;
} ref_distill_opts_t;

typedef struct ref_distill_row {
    double ce, kl; /* kl: the divergence */
    double alpha;  /* sum min(p, q) */
    double equal;  /* sum p of columns where |log(p/q)| < 1e-5 */
    double range, target_range; /* max - min of x, and of log q where q > 0 */
    double top, target_top;     /* largest |x|, |target_scale w / target_temperature| */
    double mass;                /* sum of q */
} ref_distill_row_t;

/* z, w [V], all finite */
void ref_distill(const ref_distill_opts_t *o, const double *z, const double *w, int64_t vocab,
                 ref_distill_row_t *row);
/* dz [V] from the upstream gradients of ce and kl */
void ref_distill_grad(const ref_distill_opts_t *o, const double *z, const double *w, int64_t vocab,
                      double g_ce, double g_kl, double *dz);

#endif
