/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill_case.h - a target distribution on W ranks: whole logits and targets go in, every rank's
 * outputs and the gradient put together from the shards come out.
 */
#ifndef TESTS_LOSS_DISTILL_CASE_H
#define TESTS_LOSS_DISTILL_CASE_H

#include "loss/gather_case.h"

enum { DISTILL_TOKENS = GATHER_TOKENS, DISTILL_VOCAB = GATHER_VOCAB };

typedef struct distill_case {
    loss_case_t shape;
    colo_dtype_t target_dtype;
    colo_distill_config_t config;
    bool masked, no_ce, no_kl; /* no_: upstream is NULL */
    bool other_heat[2];        /* rank 1 has another temperature of token 0 */
    double z[DISTILL_TOKENS * DISTILL_VOCAB], w[DISTILL_TOKENS * DISTILL_VOCAB];
    uint8_t mask[DISTILL_TOKENS];
    double heat[2][DISTILL_TOKENS]; /* temperatures of tokens, of student and teacher */
    double up[2][DISTILL_TOKENS];

    double out[LOSS_RANKS][2][DISTILL_TOKENS]; /* ce, kl */
    double dz[DISTILL_TOKENS * DISTILL_VOCAB];
} distill_case_t;

/* Draws logits of standard deviation @spread and targets that are near them. */
void distill_case_init(distill_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, bool probs,
                       colo_dtype_t dtype, colo_dtype_t target_dtype, double spread, uint64_t *rng);
/* Of targets that are logits */
void distill_case_diverge(distill_case_t *c, colo_divergence_t divergence, double beta);
/* Temperatures of tokens for either side; NaN for rows that are masked */
void distill_case_heat(distill_case_t *c, bool student, bool teacher);
/* Of all tokens */
ref_distill_opts_t distill_case_opts(const distill_case_t *c);
/* Against the oracle, all values finite; the statistics: one gather, or two, none backward. */
void distill_case_compare(const distill_case_t *c, const char *label);

#endif
