/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_check.c - what happens if ranks stay away: which rank gets which status. And the
 * statistics: one exchange a direction, of exactly the plan's bytes. test_call_faults.c has calls
 * with wrong tensors, test_bridge_order.c different calls.
 */
#include "harness/harness.h"

#include <time.h>

#include "harness/bridge_case.h"

#define ODD_RANK 2

/* One node, also if the ranks run on two hosts: a direction is one exchange. */
static t_case_t make(const char *src, const char *dst, int64_t b, int64_t n, int64_t h)
{
    return T_BETWEEN(src, dst, b, n, h, .ranks_per_node = 8);
}

static t_case_t usual(void)
{
    return make("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3);
}

/* World rank 0, on grids that begin at rank 1. */
T_CASE(a_rank_that_owns_nothing_is_told_to_pass_null)
{
    float value[4] = {0};
    colo_comm_t *self = t_self();
    colo_layout_t layout;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    const colo_tensor_t x = colo_tensor_host(value, COLO_F32, 3, (int64_t[]){1, 2, 2});
    assert_ok(t_layout_of("dp=1@1", true, &layout));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = &layout, .dst = &layout,
                                   .shape = {1, 2, 2, 0}};
    assert_ok(colo_bridge_create(&bridge, &config, self));
    assert_fails(colo_bridge_forward(bridge, &x, NULL, NULL), COLO_ERR_SHAPE,
                 "x is [1, 2, 2], expected [0, 0, 0] (axes bsh); this rank owns nothing of it");
}

/* ---- staying away ---- */

T_CASE_ON(8, a_rank_that_skips_the_call_is_a_timeout_with_both_sequence_numbers)
{
    const t_case_t c = usual();
    T_STAND(s);
    rank_try(colo_comm_set_check(world, 0)); /* nothing is agreed: the first exchange is number 1 */
    rank_try(colo_comm_set_timeout(world, 300));
    rank_try(t_stand_make(&s, &c, world));
    rank_try(t_stand_step(&s, 0)); /* operations 1 and 2 */
    colo_status_t st = COLO_OK;
    if (s.rank == ODD_RANK)
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    else
        st = t_stand_call(&s, COLO_FORWARD);
    if (s.rank == 0) { /* the peer of rank 2 */
        rank_check(st == COLO_ERR_TIMEOUT);
        rank_check(says("rank 2") && says("#3") && says("#2") && says("exchange"));
        rank_check(colo_comm_check(world) == COLO_ERR_TIMEOUT);
        rank_check(t_stand_call(&s, COLO_FORWARD) == COLO_ERR_TIMEOUT); /* dead */
        rank_check(says("bridge forward: comm 'world' is dead: ") && says("#3"));
    } else if (s.rank != ODD_RANK) {
        rank_check(st == COLO_OK || st == COLO_ERR_TIMEOUT || st == COLO_ERR_PEER);
    }
    return COLO_OK;
}

/* ---- communicators that are not the world ---- */

static colo_status_t sub_rank(colo_comm_t *world, void *arg)
{
    const t_case_t *c = arg;
    T_ENDS(colo_comm_destroy) colo_comm_t *sub = NULL;
    int64_t rank = colo_comm_rank(world);
    /* ranks 4..7 in descending order: comm rank 0 is world rank 7 */
    rank_try(colo_comm_split_color(world, rank >= 4 ? 1 : -1, -rank, &sub));
    if (rank < 4)
        return COLO_OK;
    rank_check(colo_comm_world_rank(sub, 0) == 7);
    colo_status_t st = t_case_on(sub, c);
    return st;
}

T_CASE(a_bridge_needs_only_a_comm_of_its_ranks_in_any_order)
{
    static const char *const specs[][2] = {{"tp=2,dp=2@4", "cp=2,tp=1,dp=2@4"},
                                           {"dp=4@4", "cp=4@4"},
                                           {"tp=1,dp=4@4", "tp=4,dp=1@4"},
                                           {"tp=4,dp=1@4", "tp=1,dp=4@4"}};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        for (int kind = 0; kind < 3; kind++) {
            t_case_t c = make(specs[i][0], specs[i][1], 4, 8, 2);
            c.output = kind ? COLO_FULL_SEQ : COLO_SHARDED;
            c.grad = kind == 1 ? COLO_PARTIAL : COLO_DISJOINT;
            for (int check = 1; check <= 2; check++) {
                c.check = check;
                c.algo = COLO_EXACT;
                assert_ok(t_run_ranks(8, sub_rank, &c, sizeof c));
                c.algo = COLO_COLLECTIVE;
                if (i != 1) /* COLLECTIVE wants a tp dim */
                    assert_ok(t_run_ranks(8, sub_rank, &c, sizeof c));
            }
        }
}

T_CASE(a_peer_outside_the_comm_is_missing)
{
    t_case_t c = make("tp=2,dp=2", "tp=4,dp=1", 4, 4, 2); /* 0 needs 2, 1 needs 3 */
    assert_ok(t_run_ranks(4, t_case_lacking_rank, &c, sizeof c));
}

/* ---- the statistics ---- */

typedef struct counted {
    t_case_t c;
    int32_t check;
} counted_t;

/* all operations of all owners but the checks, less one kind */
static uint64_t others(const colo_comm_stats_t *l)
{
    uint64_t n = 0;
    for (int kind = 0; kind < COLO_OP_COUNT; kind++)
        for (int owner = 0; owner < COLO_CATEGORY_COUNT; owner++)
            if (owner != COLO_CATEGORY_CHECK)
                n += l->ops[kind][owner];
    return n - l->ops[COLO_OP_EXCHANGE][COLO_CATEGORY_BRIDGE];
}

static bool has_checks(const colo_comm_stats_t *l)
{
    uint64_t n = 0;
    for (int kind = 0; kind < COLO_OP_COUNT; kind++)
        n += l->ops[kind][COLO_CATEGORY_CHECK];
    return n > 0;
}

static colo_status_t counted_rank(colo_comm_t *world, void *arg)
{
    const counted_t *a = arg;
    colo_comm_stats_t l;
    const int X = COLO_OP_EXCHANGE, B = COLO_CATEGORY_BRIDGE;
    T_STAND(s);
    rank_try(colo_comm_set_check(world, a->check));
    rank_try(t_stand_make(&s, &a->c, world));
    colo_comm_stats(world, &l);
    rank_check(l.ops[X][B] == 0 && others(&l) == 0);
    rank_check(has_checks(&l) == (a->check > 0)); /* agreement, unless switched off */
    for (int i = 0; i < 6; i++) {
        const colo_pass_t pass = (colo_pass_t)(i % 2);
        colo_comm_stats_reset(world);
        rank_try(t_stand_call(&s, pass));
        colo_comm_stats(world, &l);
        colo_plan_bytes_t bytes = colo_plan_bytes(colo_bridge_plan(s.bridge), pass);
        rank_check(l.ops[X][B] == 1 && others(&l) == 0);
        rank_check((int64_t)l.sent_bytes[X][B] == bytes.send);
        rank_check((int64_t)l.recv_bytes[X][B] == bytes.recv);
        rank_check(has_checks(&l) == (a->check == 2));
    }
    return COLO_OK;
}

T_CASE(each_direction_is_one_exchange_of_the_plans_bytes)
{
    static const char *const specs[][2] = {
        {"tp=2,dp=4", "tp=2,cp=2,dp=2"}, {"tp=4,dp=2", "tp=1,cp=2,dp=4"},
        {"tp=2,dp=3", "tp=3,dp=2"},      {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2"},
        {"tp=2,dp=2", "tp=2,dp=2"},      {"tp=2,pp=2,dp=2", "pp=2,cp=2,dp=2"}};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        for (int kind = 0; kind < 3; kind++)
            for (int check = 0; check <= 2; check++) {
                counted_t a = {make(specs[i][0], specs[i][1], 6, 8, 3), check};
                a.c.output = kind ? COLO_FULL_SEQ : COLO_SHARDED;
                a.c.grad = kind == 1 ? COLO_PARTIAL : COLO_DISJOINT;
                if (t_run_ranks(t_case_world(&a.c), counted_rank, &a, sizeof a) < 0)
                    fail_msg("%s check %d: %s", t_case_text(&a.c), check, colo_last_error());
            }
}

T_CASE_ON(8, only_partial_sums_need_workspace)
{
    t_case_t c = usual();
    for (int kind = 0; kind < 3; kind++) {
        T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
        c.output = kind ? COLO_FULL_SEQ : COLO_SHARDED;
        c.grad = kind == 1 ? COLO_PARTIAL : COLO_DISJOINT;
        rank_try(t_case_bridge(&bridge, &c, world, COLO_HOST));
        rank_check((colo_bridge_workspace_size(bridge) > 0) == (kind == 1));
    }
    return COLO_OK;
}

T_MAIN("bridge/check")
