/* SPDX-License-Identifier: Apache-2.0 */
/* ref_support.h - ref_logprob.h of some columns of a row: those of a list, and the target. */
#ifndef TESTS_REF_SUPPORT_H
#define TESTS_REF_SUPPORT_H

#include "ref/ref_logprob.h"

/* @in [V]: is a column in the list? NULL: all are. */
void ref_support(const ref_logprob_opts_t *o, const double *z, int64_t vocab, const uint8_t *in,
                 int64_t target, ref_logprob_row_t *row);
void ref_support_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                      const uint8_t *in, int64_t target, double g_logp, double g_entropy,
                      double g_loss, double *dz);

#endif
