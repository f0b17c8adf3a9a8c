/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_packed_random.c - 3,000 seeded batches of packings, on 1 to 12 ranks, against the oracle.
 *
 * Every split on either side, features and rows cut over tp, replicas that differ, sequences of
 * length 0, context ranks without a piece, nodes of several sizes, all check levels. Forward and
 * exact gradients are compared bit for bit, sums in whole numbers; the bytes are the least there
 * can be, in one message per pair of ranks. A failure prints the seed of its case.
 */
#include "harness/harness.h"

#include "core/error.h"
#include "harness/packed_case.h"

#define CASES 3000
#define ON_PROCESSES 300

typedef struct job {
    t_packed_t t;
    int32_t check;
} job_t;

static colo_status_t on_rank(colo_comm_t *comm, void *arg)
{
    const job_t *j = arg;
    rank_try(colo_comm_set_check(comm, j->check));
    const colo_status_t st = t_packed_on(&j->t, comm);
    return st < 0 ? colo_fail_prefix(st, "%s", t_packed_text(&j->t)) : st;
}

static void after(void *arg, colo_status_t st)
{
    free(arg);
    assert_ok(st);
}

T_CASE(random_packings_arrive_as_the_oracle_says)
{
    const uint64_t seed = t_seed();
    const int64_t n = t_scaled(t_ranks_are_threads() ? CASES : ON_PROCESSES);
    int64_t pair[4][4] = {{0}}, sums = 0, parts = 0, own = 0, heads = 0, moved = 0;
    for (int64_t i = 0; i < n; i++) {
        job_t *j = malloc(sizeof *j);
        uint64_t r = seed + (uint64_t)i;
        assert_non_null(j);
        t_packed_random(&j->t, seed + (uint64_t)i, t_ranks_are_threads() ? 12 : 8);
        j->check = (int32_t)t_below(&r, 3);
        const ref_packed_t *s = j->t.side;
        pair[s[0].p.cut][s[1].p.cut]++;
        sums += t_packed_sums(&j->t);
        parts += s[0].sp || s[1].sp;
        own += s[0].p.cp || s[1].p.cp;
        heads += s[0].features == REF_CP || s[1].features == REF_CP;
        for (int64_t k = 0; k < j->t.world; k++)
            if (t_packed_receives(&j->t, k, COLO_FORWARD)) {
                moved++;
                break;
            }
        t_run_later(j->t.world, on_rank, j, 0, after);
    }
    t_run_rest();
    for (int a = 0; a < 16 && n >= 300; a++) /* of fewer, chance leaves some pair out */
        assert_true(64 * pair[a / 4][a % 4] > n);
    assert_true(32 * sums > n && 16 * parts > n && 8 * own > n && 8 * heads > n && 2 * moved > n);
}

T_MAIN("bridge/packed_random")
