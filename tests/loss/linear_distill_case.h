/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_distill_case.h - one distillation from hidden states on W x D in-process ranks: W share
 * the vocabulary, D replicas have tokens of their own, and sharded heads are sharded over them.
 * World rank = r + W d. Hidden states and heads of both sides go in; what every rank got comes out.
 */
#ifndef TESTS_LOSS_LINEAR_DISTILL_CASE_H
#define TESTS_LOSS_LINEAR_DISTILL_CASE_H

#include "loss/loss_case.h"
#include "loss/where.h"

enum { DISTILL_RANK = 3 /* of a LoRA */, STUDENT = 0, TEACHER = 1 };
typedef enum { BY_LOGPROB, BY_EARLY, BY_LOSS, BY_INFERENCE, WAYS } way_t;

typedef struct linear_distill_case {
    int32_t ranks, replicas;
    int64_t tokens, vocab, hidden[2];
    colo_dtype_t dtype[2];
    colo_linear_distill_config_t config; /* vocabulary and lora are filled in */
    way_t way;
    bool bias[2], lora[2], sharded[2], masked, mean, arrays, twice;
    int64_t max_valid; /* < 0: T */
    int64_t start[LOSS_RANKS], columns[LOSS_RANKS];
    int64_t more[LOSS_RANKS]; /* rows of the teacher's head beyond those of the vocabulary */
    double factor, prefill;   /* of the upstream gradient; what d_weight and d_bias hold before */

    void *memory; /* what follows points into these @bytes */
    size_t bytes;
    double *h[2][LOSS_RANKS];            /* [T, H] of each side and replica, exact in the dtype */
    double *w[2], *b[2], *a[2], *low[2]; /* [V, H], [V], [DISTILL_RANK, H], [V, DISTILL_RANK] */
    double *up[LOSS_RANKS], *mask[LOSS_RANKS]; /* [T] of each replica */

    /* results, by world rank; d_w, d_b and d_low are this rank's columns of [V, ..], the others 0
     */
    double *loss[LOSS_RANKS], *d_h[LOSS_RANKS], *d_w[LOSS_RANKS], *d_b[LOSS_RANKS],
        *d_a[LOSS_RANKS], *d_low[LOSS_RANKS];
    int64_t n_valid[LOSS_RANKS], n_invalid[LOSS_RANKS];
    bool second_differs[LOSS_RANKS];
    colo_comm_stats_t forward[LOSS_RANKS], all[LOSS_RANKS]; /* of the vocabulary group */
} linear_distill_case_t;

void linear_distill_init(linear_distill_case_t *c, int32_t ranks, int32_t replicas, int64_t tokens,
                         int64_t vocab, const int64_t hidden[2], const colo_dtype_t dtype[2],
                         uint64_t *rng);
void linear_distill_free(linear_distill_case_t *c);
void linear_distill_shard(linear_distill_case_t *c, shard_kind_t kind);
/* A third of the tokens is left out, whose hidden states must not be read. */
void linear_distill_mask(linear_distill_case_t *c);
colo_status_t linear_distill_run(linear_distill_case_t *c);
/* Against the oracle, within the tolerance stated in linear_distill_case.c; fails the running test.
 */
void linear_distill_compare(const linear_distill_case_t *c, const char *label);

#endif
