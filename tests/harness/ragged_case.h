/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged_case.h - random ragged batches, uniform batches as tables, and tables made wrong.
 *
 * Every case comes from one seed, which t_ragged_text() prints. Expectations come from
 * tests/ref/ref_ragged.h only.
 */
#ifndef TESTS_HARNESS_RAGGED_CASE_H
#define TESTS_HARNESS_RAGGED_CASE_H

#include "ref/ref_ragged.h"

typedef struct t_ragged {
    ref_ragged_t c; /* its tables point to the lists below */
    uint64_t seed;
    const char *dtype; /* as in ref_bridge.h; PARTIAL has floats only */
    int32_t world;     /* ranks, both grids and sometimes one outside of them */
    int64_t *rows, *src_dp, *seq, *pos, *row_pos, *seq_len, *seq_dp;
    int64_t capacity; /* entries of row_pos in memory */
} t_ragged_t;

/* A valid case of at most @most ranks: dims in any order with extra ones, P and D that differ,
 * rows, ranks and replicas that are empty, uneven lengths, scattered rows. */
void t_ragged_random(t_ragged_t *t, uint64_t seed, int64_t most);
/* One segment per sample of @shape, at the positions that the destination's map says; the replicas
 * are those of BLOCK. The caller sets full, merged, partial and dtype. */
void t_ragged_uniform(t_ragged_t *t, const ref_side_t *src, const ref_side_t *dst,
                      ref_shape_t shape);
void t_ragged_free(t_ragged_t *t);

/* Makes the tables of a valid case wrong in one way of @kind; false, and nothing changed, if this
 * case has nothing that can be wrong so. Other refusals may follow from it. */
bool t_ragged_break(t_ragged_t *t, ref_refusal_kind_t kind, uint64_t *state);
/* Changes one entry of one table at random, to something that may be right or wrong. */
void t_ragged_mutate(t_ragged_t *t, uint64_t *state);

/* The case in words, its seed among them; static storage of the calling thread. */
const char *t_ragged_text(const t_ragged_t *t);

#endif
