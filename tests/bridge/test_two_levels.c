/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_two_levels.c - what several ranks of a node need enters the node once: plans of 2 to 4 nodes
 * by brute force, and bridges on such nodes, bit for bit.
 */
#include "harness/harness.h"
#include "harness/plan_world.h"

#include <time.h>

/* The case of pair @nth: all orders of dims and kinds in turn, uneven samples. */
static t_case_t nth_case(const t_pair_t *p, int64_t nth)
{
    t_case_t c = t_pair_case(p, nth, nth / T_ORDERS);
    t_case_kind(&c, (int)(nth % 3));
    c.shape.b += nth % 2;
    c.shape.h = 3;
    return c;
}

/* Every other one is wide enough to be cut. */
static void judge_pair(const t_pair_t *p, int64_t nth, const int32_t *node, int64_t per_node)
{
    t_case_t c = nth_case(p, nth);
    if (t_left_out(nth))
        return;
    c.shape.h = nth % 2 ? 3 : 1 << 19;
    c.dtype = nth % 2 ? COLO_F32 : COLO_BF16;
    c.two_levels = true;
    c.node = node;
    c.ranks_per_node = per_node;
    t_plans_check(&c);
}

T_CASE(bytes_into_each_of_2_to_4_nodes_are_the_minimum)
{
    int64_t pairs = 0;
    for (int64_t nodes = 2; nodes <= 4; nodes++)
        for (int64_t per = 2; per <= 8; per++)
            T_EACH_PAIR (p, nodes * per, nodes * per)
                judge_pair(&p, pairs++, NULL, per);
    assert_true(pairs > 2000);
}

T_CASE(bytes_into_uneven_scattered_nodes_are_the_minimum)
{
    static const int32_t node[] = {0, 1, 1, 0, 1, 1, 0, 1, 2, 0, 1, 2};
    int64_t pairs = 0;
    T_EACH_PAIR (p, 6, 12)
        judge_pair(&p, pairs++, node, 0);
    assert_true(pairs > 200);
}

/* tp8,dp4 to tp4,cp4,dp2: each of 8 ranks of a node lacks the other half of the batch. */
T_CASE(eight_ranks_that_lack_the_same_half_bring_it_in_once)
{
    t_case_t c = T_BETWEEN("tp=8,dp=4", "tp=4,cp=4,dp=2", 4, 64, 1 << 14, .dtype = COLO_BF16,
                           .ranks_per_node = 8);
    int64_t in[2] = {0};
    for (int two = 0; two < 2; two++) {
        c.two_levels = two;
        T_PLANS(w, &c);
        for (int32_t r = 0; r < 8; r++)
            in[two] += t_plan_node_bytes(w.plan[r], COLO_PASS_FORWARD).in;
    }
    assert_int_equal(in[1], 64 * (1 << 14) * 2); /* one sample */
    assert_int_equal(in[0], 8 * in[1]);
}

T_CASE(small_runs_enter_at_different_ranks_of_a_node)
{
    t_case_t c =
        T_BETWEEN("tp=4,dp=8", "tp=4,dp=8", 8, 16, 4, .ranks_per_node = 4, .two_levels = true);
    /* each node of 4 ranks needs 8 samples and holds one; a run is a sample of 256 bytes */
    c.dst = t_side("tp=32", false);
    T_PLANS(w, &c);
    for (int32_t r = 0; r < w.n; r++) {
        const int64_t in = t_plan_node_bytes(w.plan[r], COLO_PASS_FORWARD).in;
        assert_true(in == 256 || in == 512);
    }
}

T_CASE(one_level_and_one_node_have_no_second_exchange)
{
    t_case_t c = T_BETWEEN("tp=8,dp=4", "tp=4,cp=4,dp=2", 4, 64, 16, .dtype = COLO_BF16);
    static const int64_t per[] = {8, 0, 32, 8};
    for (int i = 0; i < 4; i++) {
        int32_t n = 0, all = 0;
        c.ranks_per_node = per[i];
        c.two_levels = i > 0;
        T_PLANS(w, &c);
        for (int32_t r = 0; r < w.n; r++)
            for (int pass = 0; pass < 2; pass++) {
                (void)colo_plan_relays(w.plan[r], (colo_pass_t)pass, true, &n);
                all += n;
            }
        assert_true(i == 3 ? all > 0 : all == 0);
    }
}

/* ---- bridges ---- */

T_CASE(values_on_two_and_three_nodes_are_those_of_the_oracle)
{
    int64_t nth = -1;
    T_EACH_PAIR (p, 4, 12) {
        if (p.n % 2 || t_left_out(++nth))
            continue;
        t_case_t c = nth_case(&p, nth);
        c.shape.h = nth % 24 ? 3 : 6000;
        c.dtype = nth % 6 == 2 ? COLO_BF16 : COLO_F32;
        c.stride = (t_stride_t)(nth % T_STRIDE_COUNT);
        c.ranks_per_node = p.n % 3 == 0 && nth % 2 ? p.n / 3 : p.n / 2;
        t_case_later(&c);
    }
    t_run_rest();
    assert_true(nth > 300);
}

/* ---- failures ---- */

enum { AWAY = 5 };

/* Each other rank waits for it, in the first exchange or, for its gateway, in the second. */
T_CASE_FOR(8, rank_that_stays_away_is_a_timeout_on_all_ranks_of_both_nodes, int, check, 0, 1, 2)
{
    const t_case_t c = T_BETWEEN("tp=4,dp=2", "tp=4,cp=2,dp=1", 2, 8, 1 << 13, .ranks_per_node = 4);
    T_STAND(s);
    rank_try(colo_comm_set_check(world, check));
    rank_try(t_stand_make(&s, &c, world));
    rank_try(t_stand_step(&s, 0));
    rank_try(colo_comm_set_timeout(world, 500));
    if (s.rank == AWAY) {
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        return COLO_OK;
    }
    const colo_status_t st = t_stand_call(&s, COLO_PASS_FORWARD);
    rank_check(st == COLO_ERR_TIMEOUT || st == COLO_ERR_PEER);
    rank_check(colo_comm_check(world) < 0); /* dead */
    rank_check(check < 2 || untouched(&s.t[T_Y]));
    return COLO_OK;
}

T_MAIN("bridge/two_levels")
