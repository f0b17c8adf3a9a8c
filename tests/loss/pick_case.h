/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pick_case.h - k picks a token on W ranks: whole logits go in, every rank's outputs and the
 * gradient put together from the shards come out. Fixed sizes: a case is one piece of memory.
 */
#ifndef TESTS_LOSS_PICK_CASE_H
#define TESTS_LOSS_PICK_CASE_H

#include "loss/loss_case.h"
#include "ref/ref_pick.h"

enum { PICK_TOKENS = 9, PICK_VOCAB = 70, PICK_K = 70 };

typedef struct pick_case {
    loss_case_t shape; /* ranks, dtype, start, columns, pad, row_gap, in_place; no memory of it */
    int64_t tokens, vocab;
    colo_pick_config_t config;
    bool masked, forward_only;
    double z[PICK_TOKENS * PICK_VOCAB];
    int64_t ids[PICK_TOKENS * PICK_K]; /* [T, k] */
    uint8_t mask[PICK_TOKENS];
    double up[PICK_TOKENS * PICK_K];

    double logp[LOSS_RANKS][PICK_TOKENS * PICK_K];
    int64_t got[LOSS_RANKS][PICK_TOKENS * PICK_K];
    int64_t n_invalid[LOSS_RANKS];
    double dz[PICK_TOKENS * PICK_VOCAB];
    double pad_worst[LOSS_RANKS]; /* of padding columns; written gaps count as inf */
    colo_ledger_t after_forward[LOSS_RANKS], after_backward[LOSS_RANKS];
} pick_case_t;

/* Draws logits of standard deviation @spread, ids (a row may repeat one) and upstream gradients. */
void pick_case_init(pick_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, int64_t k,
                    bool topk, colo_dtype_t dtype, double spread, uint64_t *rng);
colo_status_t pick_case_run(pick_case_t *c);
ref_logprob_opts_t pick_case_opts(const pick_case_t *c);
/* Rows whose logits are finite, against the oracle; the ledger: one gather, none backward. */
void pick_case_compare(const pick_case_t *c, const char *label);

#endif
