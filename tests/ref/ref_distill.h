/* SPDX-License-Identifier: Apache-2.0 */
/* ref_distill.h - cross entropy and KL of one token over the whole vocabulary, serial, in fp64. */
#ifndef TESTS_REF_DISTILL_H
#define TESTS_REF_DISTILL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct ref_distill_opts {
    double temperature, scale, softcap;
    bool probs;
    double target_temperature, target_scale;
} ref_distill_opts_t;

typedef struct ref_distill_row {
    double ce, kl;
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
