/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk_case.h - k picks a token on W ranks: whole logits go in, every rank's outputs and the
 * gradient put together from the shards come out.
 */
#ifndef TESTS_LOSS_TOPK_CASE_H
#define TESTS_LOSS_TOPK_CASE_H

#include "loss/gather_case.h"
#include "ref/ref_topk.h"

enum { TOPK_TOKENS = GATHER_TOKENS, TOPK_VOCAB = GATHER_VOCAB, TOPK_K = GATHER_VOCAB };

typedef struct topk_case {
    loss_case_t shape;
    colo_topk_config_t config;
    bool masked, other_heat; /* rank 1 has another temperature of token 0 */
    double z[TOPK_TOKENS * TOPK_VOCAB];
    int64_t ids[TOPK_TOKENS * TOPK_K]; /* [T, k] */
    uint8_t mask[TOPK_TOKENS];
    double heat[TOPK_TOKENS]; /* temperatures, with config.has_temperature; NaN where masked */
    double up[TOPK_TOKENS * TOPK_K], up_tail[TOPK_TOKENS];

    double logp[LOSS_RANKS][TOPK_TOKENS * TOPK_K], tail[LOSS_RANKS][TOPK_TOKENS];
    int64_t got[LOSS_RANKS][TOPK_TOKENS * TOPK_K];
    int64_t n_invalid[LOSS_RANKS];
    double dz[TOPK_TOKENS * TOPK_VOCAB];
} topk_case_t;

/* Draws logits of standard deviation @spread, ids (a row may repeat one) and upstream gradients. */
void topk_case_init(topk_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, int64_t k,
                    bool topk, colo_dtype_t dtype, double spread, uint64_t *rng);
/* Asks for the tail of given columns: ids of a row differ then. */
void topk_case_tail(topk_case_t *c, uint64_t *rng);
void topk_case_heat(topk_case_t *c);
/* Of all tokens */
ref_logprob_opts_t topk_case_opts(const topk_case_t *c);
/* Rows whose logits are finite, against the oracle; the statistics: one gather, none backward. */
void topk_case_compare(const topk_case_t *c, const char *label);

#endif
