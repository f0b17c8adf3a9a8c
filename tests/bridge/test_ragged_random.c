/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged_random.c - 3,000 seeded ragged batches of 1 to 12 ranks against the oracle.
 *
 * Both placements, all gradients, one to three tensors a call, calls in one or started and
 * finished, gaps in memory, nodes of several sizes, all check levels, ranks and replicas without
 * rows. A failure prints the seed of its case.
 */
#include "harness/harness.h"

#include "core/error.h"
#include "harness/ragged_run.h"

#define CASES 3000
#define ON_PROCESSES 1500 /* of which they run a fifth */

typedef struct job {
    t_ragged_t t;
    t_ragged_options_t o;
    int32_t check;
} job_t;

static colo_status_t on_rank(colo_comm_t *comm, void *arg)
{
    const job_t *j = arg;
    rank_try(colo_comm_set_check(comm, j->check));
    const colo_status_t st = t_ragged_on(&j->t, &j->o, comm);
    return st < 0 ? colo_fail_prefix(st, "%s", t_ragged_text(&j->t)) : st;
}

static void after(void *arg, colo_status_t st)
{
    job_t *j = arg;
    t_ragged_free(&j->t);
    free(j);
    assert_ok(st);
}

T_CASE(random_batches_arrive_as_the_oracle_says)
{
    const uint64_t seed = t_seed();
    const int64_t n = t_scaled(t_ranks_are_threads() ? CASES : ON_PROCESSES);
    int64_t several = 0, merged = 0, partial = 0, nodes = 0, scattered = 0, features = 0,
            stages = 0, offsets = 0, parts = 0, none = 0;
    for (int64_t i = 0; i < n; i++) {
        job_t *j = malloc(sizeof *j);
        uint64_t r = seed + (uint64_t)i;
        t_ragged_random(&j->t, seed + (uint64_t)i, t_ranks_are_threads() ? 12 : 8);
        j->o = (t_ragged_options_t){.tensors = 1 + (int32_t)t_below(&r, T_RAGGED_FEW),
                                    .ranks_per_node = t_below(&r, 4),
                                    .max_rows = t_below(&r, 4) ? 0 : 10000,
                                    .gap = t_below(&r, 3)};
        j->check = (int32_t)t_below(&r, 3);
        j->o.tickets = t_below(&r, 2);
        several += j->o.tensors > 1;
        merged += j->t.c.merged;
        partial += j->t.c.partial && ref_ragged_addends(&j->t.c) > 1;
        nodes += j->o.ranks_per_node > 0;
        const ref_side_t *src = &j->t.c.src, *dst = &j->t.c.dst;
        scattered += j->t.c.table.row_pos != NULL;
        features += src->nsplits[2] || dst->nsplits[2];
        stages += src->stage_dim || dst->stage_dim;
        offsets += src->offset || dst->offset;
        parts += ref_ragged_parts(src) != ref_ragged_parts(dst);
        none += ref_ragged_total(&j->t.c) == 0;
        t_run_later((int32_t)j->t.world, on_rank, j, 0, after);
    }
    t_run_rest();
    assert_true(4 * several > n && 4 * merged > n && 64 * partial > n && 2 * nodes > n);
    assert_true(8 * scattered > n && 16 * features > n && 16 * stages > n && 16 * offsets > n);
    assert_true(4 * parts > n && 100 * none > n);
}

T_MAIN("bridge/ragged_random")
