/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_outside.c - ranks of a comm that are in neither grid: they need not call, whatever the kind
 * of the bridge, and bridges on disjoint ranks work side by side. What arrives is compared with the
 * oracle's position-coded values; a rank that waited for one that does not call would wait until
 * the deadline, which is short.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "harness/bridge_case.h"
#include "harness/bridge_random.h"
#include "harness/packed_case.h"
#include "harness/ragged_run.h"

enum { RANKS = 8, CASES = 120 };

static bool is_in(const ref_side_t *src, const ref_side_t *dst, int64_t rank)
{
    return (rank >= src->offset && rank < src->offset + ref_side_size(src)) ||
           (rank >= dst->offset && rank < dst->offset + ref_side_size(dst));
}

/* Ranks outside go on to the next case at once, and call by turns. */
static bool comes(const ref_side_t *src, const ref_side_t *dst, const colo_comm_t *world, int64_t i)
{
    return is_in(src, dst, colo_comm_rank(world)) || i % 4 == 3;
}

static colo_status_t uniform_cases(colo_comm_t *world, void *arg)
{
    const uint64_t seed = *(const uint64_t *)arg;
    rank_try(colo_comm_set_timeout(world, t_long_wait()));
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++) {
        int64_t tables[2][T_RANDOM_TABLE];
        t_shares_t shares = {0};
        t_case_t c = t_random_case(seed + (uint64_t)i, RANKS - 2, tables[0], tables[1], &shares);
        c.src.offset += i % 3;
        c.dst.offset += i % 3;
        rank_try(colo_comm_set_check(world, (int32_t)(i % 3)));
        if (!comes(&c.src, &c.dst, world, i))
            continue;
        const colo_status_t st = t_case_on(world, &c);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_case_text(&c));
    }
    return colo_comm_check(world);
}

T_CASE(uniform_bridges_concern_the_ranks_of_their_grids)
{
    uint64_t seed = t_seed();
    assert_ok(t_run_ranks(RANKS, uniform_cases, &seed, sizeof seed));
}

T_CASE_ON(RANKS, collective_bridges_concern_the_ranks_of_their_grids)
{
    static const char *const pairs[][2] = {{"tp=1,dp=4@2", "tp=2,cp=1,dp=2@2"},
                                           {"tp=2,dp=2@1", "tp=1,dp=4@1"},
                                           {"tp=2,dp=1", "tp=1,cp=2,dp=1"}};
    rank_try(colo_comm_set_timeout(world, t_long_wait()));
    for (int64_t i = 0; i < 3; i++) {
        const t_case_t c = t_collective(pairs[i][0], pairs[i][1], 4, 8, 3);
        if (comes(&c.src, &c.dst, world, 0))
            rank_try(t_case_on(world, &c));
    }
    return colo_comm_check(world);
}

static colo_status_t ragged_cases(colo_comm_t *world, void *arg)
{
    const uint64_t seed = *(const uint64_t *)arg;
    rank_try(colo_comm_set_timeout(world, t_long_wait()));
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        t_ragged_random(&t, seed + (uint64_t)i, RANKS);
        const t_ragged_options_t o = {.tensors = 1 + (int32_t)(i % T_RAGGED_FEW)};
        rank_try(colo_comm_set_check(world, (int32_t)(i % 3)));
        if (!comes(&t.c.src, &t.c.dst, world, i))
            continue;
        const colo_status_t st = t_ragged_on(&t, &o, world);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_ragged_text(&t));
    }
    return colo_comm_check(world);
}

T_CASE(ragged_bridges_concern_the_ranks_of_their_grids)
{
    uint64_t seed = t_seed();
    assert_ok(t_run_ranks(RANKS, ragged_cases, &seed, sizeof seed));
}

static colo_status_t packed_cases(colo_comm_t *world, void *arg)
{
    const uint64_t seed = *(const uint64_t *)arg;
    rank_try(colo_comm_set_timeout(world, t_long_wait()));
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++) {
        t_packed_t t;
        t_packed_random(&t, seed + (uint64_t)i, RANKS);
        rank_try(colo_comm_set_check(world, (int32_t)(i % 3)));
        if (!comes(&t.side[0].grid, &t.side[1].grid, world, i))
            continue;
        const colo_status_t st = t_packed_on(&t, world);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_packed_text(&t));
    }
    return colo_comm_check(world);
}

T_CASE(packed_bridges_concern_the_ranks_of_their_grids)
{
    uint64_t seed = t_seed();
    assert_ok(t_run_ranks(RANKS, packed_cases, &seed, sizeof seed));
}

/* Pairs of ranks with as many calls as their number says, and then one of all. */
T_CASE_ON(RANKS, pairs_on_disjoint_ranks_work_side_by_side)
{
    const int32_t pair = colo_comm_rank(world) / 2;
    rank_try(colo_comm_set_timeout(world, t_long_wait()));
    rank_try(colo_comm_set_check(world, 1));
    for (int64_t i = 0; i <= pair; i++) {
        t_case_t c = t_between("dp=2", "cp=2,dp=1", 2 + 2 * pair, 4, 3);
        c.src.offset = c.dst.offset = 2 * pair;
        rank_try(t_case_on(world, &c));
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        t_ragged_uniform(&t, &c.src, &c.dst, (ref_shape_t){1 + pair, 4, 3});
        t.dtype = "f32";
        rank_try(t_ragged_on(&t, &(t_ragged_options_t){.tensors = 1}, world));
    }
    const t_case_t all = t_between("dp=8", "tp=2,cp=2,dp=2", 8, 8, 3);
    return t_case_on(world, &all);
}

/* ---- parts ---- */

T_CASE_ON(4, a_part_is_made_of_its_ranks_alone_and_once)
{
    const int64_t rank = colo_comm_rank(world), all[] = {3, 1, 0, 2};
    const int64_t some[2][2] = {{3, 1}, {1, 3}};
    colo_comm_t *part = NULL, *again = NULL;
    rank_try(colo_comm_part(world, all, 4, &part));
    rank_check(part == world);
    if (rank % 2 == 0)
        return COLO_OK; /* while the others go on */
    rank_try(colo_comm_set_timeout(world, t_long_wait()));
    rank_try(colo_comm_part(world, some[0], 2, &part));
    rank_try(colo_comm_part(world, some[1], 2, &again));
    rank_check(part == again && part != world && colo_comm_size(part) == 2);
    rank_check(colo_comm_world_rank(part, 0) == 1 && colo_comm_world_rank(part, 1) == 3);
    int64_t got[2] = {0};
    colo_comm_stats_t stats;
    rank_try(colo_comm_all_gather(part, &rank, got, 1, COLO_I64, NULL));
    rank_check(got[0] == 1 && got[1] == 3);
    t_comm_stats(world, &stats); /* with those of its parts */
    rank_check(stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_USER] == 1);
    colo_comm_stats_reset(world);
    t_comm_stats(part, &stats);
    rank_check(stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_USER] == 0);
    rank_try(colo_comm_set_timeout(world, 1234));
    rank_try(colo_comm_set_check(world, 2));
    rank_check(colo_comm_timeout(part) == 1234 && colo_comm_check_level(part) == 2);
    return COLO_OK;
}

T_CASE_ON(4, ranks_that_make_no_part_are_named)
{
    const int64_t rank = colo_comm_rank(world);
    const int64_t missing[] = {rank, 4}, twice[] = {rank, rank}, others[] = {(rank + 1) % 4};
    colo_comm_t *part = NULL;
    rank_fails(colo_comm_part(world, missing, 2, &part), COLO_ERR_MISSING,
               "part: world rank 4 is not in comm 'world' of 4 ranks");
    rank_fails(colo_comm_part(world, twice, 2, &part), COLO_ERR_ARG, "twice, expected it once");
    rank_fails(colo_comm_part(world, others, 1, &part), COLO_ERR_ARG, "lacks this rank");
    rank_fails(colo_comm_part(world, others, 0, &part), COLO_ERR_ARG,
               "part: 0 ranks, expected 1..4");
    rank_fails(colo_comm_part(world, NULL, 1, &part), COLO_ERR_ARG, "part: world_ranks is NULL");
    rank_fails(colo_comm_part(world, others, 1, NULL), COLO_ERR_ARG, "part: part is NULL");
    rank_check(!part);
    return colo_comm_check(world);
}

T_MAIN("bridge/outside")
