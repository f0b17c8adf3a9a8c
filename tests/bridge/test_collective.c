/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_collective.c - COLLECTIVE, by all-gather and all-reduce: equal to EXACT and to the oracle
 * wherever it is accepted, with the groups of the worked maps and exactly the collectives that the
 * reference runs; ranks that go wrong.
 */
#include "harness/harness.h"

#include <stdatomic.h>
#include <time.h>

#include "bridge/run/run.h" /* private: the groups and their statistics */
#include "harness/bridge_case.h"

static const char *const accepted[][2] = {
    {"tp=2,dp=4", "tp=2,cp=2,dp=2"},      {"tp=4,dp=2", "tp=1,cp=2,dp=4"},
    {"tp=4,dp=2", "tp=2,dp=4"},           {"tp=2,dp=4", "tp=4,dp=2"},
    {"tp=4,dp=2", "tp=2,cp=2,dp=2"},      {"tp=1,dp=8", "tp=2,cp=4,dp=1"},
    {"tp=1,dp=8", "cp=2,tp=4,dp=1"},      {"tp=8,dp=1", "tp=1,dp=8"},
    {"tp=2,dp=2@4", "tp=1,dp=4@4"},       {"tp=2,dp=4@3", "tp=2,cp=2,dp=2@3"},
    {"tp=2,dp=3", "tp=2,cp=3,dp=1"},      {"tp=6,dp=1", "tp=1,cp=3,dp=2"},
    {"tp=2,pp=1,dp=4", "cp=4,tp=1,dp=2"}, {"tp=2,dp=2", "tp=2,dp=2"},
};
#define ACCEPTED (sizeof accepted / sizeof accepted[0])

static int64_t batch_of(const t_case_t *c)
{
    int64_t a = ref_side_dp(&c->src), b = ref_side_dp(&c->dst);
    return a > b ? a : b;
}

T_CASE(both_ways_are_what_the_oracle_says)
{
    static const char *const axes[] = {"bsh", "sbh", "th", "hbs"};
    for (size_t i = 0; i < ACCEPTED; i++)
        for (int k = 0; k < 3; k++)
            for (int a = 0; a < 4; a++)
                for (int stride = 0; stride < T_STRIDE_COUNT; stride++) {
                    if (T_LEFT_OUT({(int64_t)i, ACCEPTED}, {k, 3}, {a, 4},
                                   {stride, T_STRIDE_COUNT}))
                        continue;
                    t_case_t c = t_collective(accepted[i][0], accepted[i][1], 0, 24, 2);
                    c.shape.b = batch_of(&c) * (1 + stride % 2);
                    t_case_kind(&c, k);
                    c.axes = axes[a];
                    c.stride = (t_stride_t)stride;
                    c.steps = 2;
                    t_case_later(&c);
                }
    t_run_rest();
}

T_CASE(every_float_dtype_sums_and_every_dtype_moves)
{
    for (int dtype = 0; dtype < COLO_DTYPE_COUNT; dtype++)
        for (size_t i = 0; i < ACCEPTED; i++) {
            t_case_t c = t_collective(accepted[i][0], accepted[i][1], 8, 24, 3);
            c.shape.b = batch_of(&c);
            c.dtype = (colo_dtype_t)dtype;
            c.no_grad = !colo_dtype_is_float(c.dtype);
            t_case_later(&c);
            c.output = COLO_OUTPUT_SHARDED;
            t_case_later(&c);
        }
    t_run_rest();
}

T_CASE(an_empty_batch_is_carried)
{
    for (size_t i = 0; i < ACCEPTED; i++)
        for (int k = 0; k < 3; k++) {
            t_case_t c = t_collective(accepted[i][0], accepted[i][1], 0, 24, 2);
            t_case_kind(&c, k);
            t_case_later(&c);
        }
    t_run_rest();
}

/* ---- the same bits as EXACT, on sums whose value depends on their order ---- */

static float noise(int64_t rank, int64_t i)
{
    uint64_t s = (uint64_t)(rank * 1000003 + i * 7919 + 5);
    float v = (float)(t_uniform(&s) - 0.5);
    return i % 3 ? v : v * 4096;
}

static colo_status_t compare_rank(colo_comm_t *world, void *arg)
{
    t_case_t c = *(const t_case_t *)arg;
    T_ENDS(ref_part_free) ref_part_t part = {0}, own = {0};
    T_STAND(exact);
    T_STAND(collective);
    t_stand_t *const both[] = {&exact, &collective};
    const int64_t rank = colo_comm_rank(world);
    ref_part_make(&part, &c.dst, c.shape, rank, c.output == COLO_OUTPUT_FULL_SEQ);
    ref_part_make(&own, &c.dst, c.shape, rank, false);
    bool disjoint = c.output == COLO_OUTPUT_FULL_SEQ && c.grad == COLO_GRAD_DISJOINT;
    for (int algo = 0; algo < 2; algo++) {
        c.algo = (colo_algo_t)algo;
        rank_try(t_stand_make(both[algo], &c, world));
        for (int64_t b = 0; b < part.nb; b++)
            for (int64_t s = 0; s < part.ns; s++)
                for (int64_t h = 0; h < part.nh; h++) {
                    /* the same on tp replicas, other on every context rank */
                    int64_t id = (part.b[b] * c.shape.n + part.s[s]) * c.shape.h + part.h[h];
                    float v = noise(part.addend, id);
                    if (disjoint && !ref_list_has(own.s, own.ns, part.s[s]))
                        v = 0;
                    memcpy(t_buffer_at(&both[algo]->t[T_DY], c.axes, part.ns, b, s, h), &v,
                           sizeof v);
                }
        rank_try(t_stand_call(both[algo], COLO_PASS_BACKWARD));
    }
    const t_buffer_t *one = &exact.t[T_DX], *other = &collective.t[T_DX];
    rank_check(one->bytes == other->bytes && memcmp(one->raw, other->raw, one->bytes) == 0);
    return COLO_OK;
}

T_CASE(collective_and_exact_give_the_same_bits)
{
    for (size_t i = 0; i < ACCEPTED; i++)
        for (int k = 0; k < 3; k++) {
            t_case_t c = t_collective(accepted[i][0], accepted[i][1], 0, 24, 3);
            c.shape.b = batch_of(&c);
            t_case_kind(&c, k);
            c.ranks_per_node = t_case_world(&c); /* several nodes add up in another order */
            if (t_run_ranks(t_case_world(&c), compare_rank, &c, sizeof c) < 0)
                fail_msg("%s: %s", t_case_text(&c), colo_last_error());
        }
}

/* ---- groups and the statistics ---- */

typedef struct expect {
    t_case_t c;
    const int64_t (*gather)[2]; /* groups of two, NULL: none */
    int ngather;
    int gathers[2], reduces[2]; /* collectives of forward, backward */
} expect_t;

static uint64_t ops_of(const colo_comm_t *c, colo_op_kind_t kind)
{
    colo_comm_stats_t l;
    if (!c)
        return 0;
    t_comm_stats(c, &l);
    return l.ops[kind][COLO_CATEGORY_USER];
}

/* collectives of the bridge on all its comms; anything but gathers and reduces counts as a gather
 * too many */
static int count_gathers(const colo_bridge_t *b)
{
    uint64_t n = 0;
    const colo_comm_t *comms[] = {b->coll.gather, b->coll.cp, b->comm};
    for (int i = 0; i < 3; i++)
        n += ops_of(comms[i], COLO_OP_ALL_GATHER) + ops_of(comms[i], COLO_OP_REDUCE_SCATTER) +
             ops_of(comms[i], COLO_OP_BROADCAST) + ops_of(comms[i], COLO_OP_BARRIER) +
             ops_of(comms[i], COLO_OP_EXCHANGE);
    return (int)n;
}

static int count_reduces(const colo_bridge_t *b)
{
    return (int)(ops_of(b->coll.gather, COLO_OP_ALL_REDUCE) +
                 ops_of(b->coll.cp, COLO_OP_ALL_REDUCE) + ops_of(b->comm, COLO_OP_ALL_REDUCE));
}

static colo_status_t stats_rank(colo_comm_t *world, void *arg)
{
    const expect_t *e = arg;
    const t_case_t *c = &e->c;
    T_STAND(s);
    rank_try(t_stand_make(&s, c, world));
    const colo_bridge_t *b = s.bridge;
    rank_check((b->coll.gather != NULL) == (e->gather != NULL));
    rank_check((b->coll.cp != NULL) == (ref_side_extent(&c->dst, "cp") > 1));
    bool found = !e->gather;
    for (int i = 0; i < e->ngather; i++)
        for (int j = 0; j < 2; j++)
            if (e->gather[i][j] == s.rank) {
                found = true;
                rank_check(colo_comm_size(b->coll.gather) == 2);
                rank_check(colo_comm_world_rank(b->coll.gather, 0) == e->gather[i][0]);
                rank_check(colo_comm_world_rank(b->coll.gather, 1) == e->gather[i][1]);
            }
    rank_check(found);
    for (int pass = 0; pass < 2; pass++) {
        const int gathers = count_gathers(b), reduces = count_reduces(b);
        rank_try(t_stand_call(&s, (colo_pass_t)pass));
        rank_check(count_gathers(b) - gathers == e->gathers[pass]);
        rank_check(count_reduces(b) - reduces == e->reduces[pass]);
    }
    return COLO_OK;
}

T_CASE(the_groups_and_collectives_are_those_of_the_worked_maps)
{
    static const int64_t pairs[4][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}};
    expect_t e[] = {
        {t_collective("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2), pairs, 4, {1, 0}, {0, 1}},
        {t_collective("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 2), pairs, 4, {0, 1}, {0, 1}},
        {t_collective("tp=4,dp=2", "tp=2,dp=4", 8, 8, 2), pairs, 4, {0, 1}, {0, 0}},
        {t_collective("tp=4,dp=2", "tp=2,cp=2,dp=2", 8, 8, 2), NULL, 0, {0, 0}, {0, 1}},
        {t_collective("tp=2,dp=2", "tp=2,dp=2", 8, 8, 2), NULL, 0, {0, 0}, {0, 0}},
    };
    for (size_t i = 0; i < sizeof e / sizeof e[0]; i++)
        for (int k = 0; k < 3; k++) {
            t_case_kind(&e[i].c, k);
            if (t_run_ranks(t_case_world(&e[i].c), stats_rank, &e[i], sizeof e[i]) < 0)
                fail_msg("%s: %s", t_case_text(&e[i].c), colo_last_error());
        }
}

T_CASE_FOR(8, reshape_keeps_the_groups_and_refuses_odd_batches, int, kind, 0, 1, 2)
{
    static const colo_shape_t next[] = {{16, 4, 5, 0}, {4, 8, 1, 0}}, odd = {6, 8, 2, 0};
    for (int wide = 0; wide < 2; wide++) {
        t_case_t c = wide ? t_collective("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 3)
                          : t_collective("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3);
        T_STAND(s);
        t_case_kind(&c, kind);
        rank_try(t_stand_make(&s, &c, world));
        rank_try(t_stand_step(&s, 0));
        rank_check(colo_bridge_reshape(s.bridge, &odd) == COLO_ERR_SHAPE);
        rank_try(t_stand_step(&s, 1)); /* the old shape stays */
        for (int i = 0; i < 2; i++) {
            rank_try(colo_bridge_reshape(s.bridge, &next[i]));
            c.shape = (ref_shape_t){next[i].samples, next[i].rows, next[i].features};
            rank_try(t_stand_step(&s, 2 + i));
        }
    }
    return COLO_OK;
}

T_CASE(a_rank_outside_the_grids_takes_part_in_create_only)
{
    t_case_t c = t_collective("tp=2,dp=2@1", "cp=2,tp=1,dp=2@1", 4, 8, 2);
    c.world = 7;
    c.steps = 2;
    assert_ok(t_case_run(&c));
    c = t_collective("tp=1,dp=4@2", "tp=2,dp=2@2", 4, 8, 2);
    c.world = 8;
    c.steps = 2;
    assert_ok(t_case_run(&c));
}

T_CASE(positions_shard_as_in_exact)
{
    static const int64_t shuffled[6] = {9, 2, 14, 3, 8, 0};
    t_case_t c = t_collective("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 6, 2);
    c.output = COLO_OUTPUT_SHARDED;
    c.dst.map = REF_TABLE;
    c.dst.table = shuffled;
    c.dst.positions = 16;
    assert_ok(t_case_run(&c));
    c.dst.map = REF_OFFSET;
    c.dst.map_offset = 5;
    assert_ok(t_case_run(&c));
    c = t_collective("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 6, 2);
    c.output = COLO_OUTPUT_SHARDED;
    c.dst.map = REF_TABLE;
    c.dst.table = shuffled;
    c.dst.positions = 16;
    assert_ok(t_case_run(&c));
}

/* ---- communicators that are not the world, ranks that go wrong ---- */

/* Stays until rank 2 is done: only marks on communicators may wake it, not our leaving. */
static _Atomic int is_back;

static void stay(void)
{
    for (int i = 0; i < 20000 && !atomic_load(&is_back); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

T_CASE(a_sibling_outside_the_comm_is_missing)
{
    /* groups {0, 2} and {1, 3}, gathered in forward or in backward; cp groups {0, 2} and {1, 3} */
    static const char *const specs[][2] = {
        {"tp=2,dp=2", "tp=4,dp=1"}, {"tp=4,dp=1", "tp=2,dp=2"}, {"tp=4,dp=1", "tp=2,cp=2,dp=1"}};
    for (size_t i = 0; i < 3; i++) {
        t_case_t c = t_collective(specs[i][0], specs[i][1], 4, 4, 2);
        assert_ok(colo_comm_threads_run(4, t_case_lacking_rank, &c));
    }
}

typedef struct wrong {
    t_case_t c;
    bool absent; /* rank 3 does not call at all; else with a bad tensor */
    bool backward;
} wrong_t;

static colo_status_t wrong_on(colo_comm_t *sub, const wrong_t *w)
{
    const colo_pass_t pass = w->backward ? COLO_PASS_BACKWARD : COLO_PASS_FORWARD;
    T_STAND(s);
    rank_try(colo_comm_set_timeout(sub, w->absent ? 200 : 10000));
    rank_try(colo_comm_set_check(sub, 1));
    rank_try(t_stand_make(&s, &w->c, sub));
    rank_try(colo_comm_barrier(sub, NULL));
    t_stand_in(&s, pass)->t.shape[2] += s.rank == 3;
    const colo_status_t st = s.rank == 3 && w->absent ? COLO_OK : t_stand_call(&s, pass);
    if (s.rank == 2) { /* the sibling of rank 3 */
        colo_status_t dead = colo_comm_check(sub);
        atomic_store(&is_back, 1);
        rank_check(st == (w->absent ? COLO_ERR_TIMEOUT : COLO_ERR_PEER));
        rank_check(dead < 0 && untouched(t_stand_out(&s, pass)));
    }
    stay();
    rank_check(s.rank != 3 || st == (w->absent ? COLO_OK : COLO_ERR_SHAPE));
    return COLO_OK;
}

static colo_status_t wrong_rank(colo_comm_t *world, void *arg)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *sub = NULL;
    int64_t rank = colo_comm_rank(world);
    rank_try(colo_comm_split_color(world, rank < 4 ? 0 : -1, rank, &sub));
    const colo_status_t st = rank < 4 ? wrong_on(sub, arg) : COLO_OK;
    return st;
}

T_CASE(a_rank_that_fails_or_stays_away_does_not_leave_its_siblings_waiting)
{
    static const char *const specs[][2] = {{"tp=1,dp=4", "tp=2,dp=2"},      /* gather {2, 3} */
                                           {"tp=2,dp=2", "tp=1,dp=4"},      /* gather {2, 3} */
                                           {"tp=2,dp=2", "cp=2,tp=1,dp=2"}, /* cp {2, 3} */
                                           {"tp=1,dp=4", "cp=2,tp=1,dp=2"}};
    static const bool backward[] = {false, true, true, false};
    for (size_t i = 0; i < 4; i++)
        for (int absent = 0; absent < 2; absent++) {
            wrong_t w = {t_collective(specs[i][0], specs[i][1], 4, 4, 2), absent, backward[i]};
            atomic_store(&is_back, 0);
            if (colo_comm_threads_run(6, wrong_rank, &w) < 0)
                fail_msg("%zu, absent %d: %s", i, absent, colo_last_error());
        }
}

T_CASE_ON_THREADS(8, ranks_with_other_axes_would_gather_nonsense_and_are_a_mismatch)
{
    t_case_t given = t_collective("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 2);
    const t_case_t *c = &given;
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *b = NULL;
    rank_try(t_case_config(c, &src, &dst, &config));
    if (colo_comm_rank(world) == 2)
        config.axes = "sbh";
    rank_check(colo_bridge_create(&b, &config, world) == COLO_ERR_MISMATCH && !b);
    rank_check(says("rank 2"));
    return t_case_on(world, c);
}

T_MAIN("bridge/collective")
