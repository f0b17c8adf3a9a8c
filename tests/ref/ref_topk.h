/* SPDX-License-Identifier: Apache-2.0 */
/* ref_topk.h - the k largest columns of a whole row, and what k log-probabilities give back. */
#ifndef TESTS_REF_REF_TOPK_H
#define TESTS_REF_REF_TOPK_H

#include "ref/ref_logprob.h"

/* ids [k]: by scale * z descending, equal ones by column ascending */
void ref_topk_largest(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t k,
                      int64_t *ids);
/* dz [V] = sum over i of g[i] times the derivative of log p of column ids[i]; ids < 0 add nothing
 */
void ref_topk_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab, const int64_t *ids,
                   const double *g, int64_t k, double *dz);
/* log of the sum of p over the columns that are not among ids [k]; adds @g times its gradient to dz
 * [V], if that is not NULL */
double ref_topk_tail(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                     const int64_t *ids, int64_t k, double g, double *dz);

#endif
