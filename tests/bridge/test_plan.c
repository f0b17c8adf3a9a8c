/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan.c - plans as integers: exactly once, mirrored, minimal, balanced, for every
 * pair of layouts of up to 16 ranks; byte totals by closed form; the worked examples.
 */
#include "harness/harness.h"

#include "harness/plan_world.h"

static t_case_t pair_case(const t_pair_t *p, int src_order, int dst_order, int kind)
{
    t_case_t c = t_pair_case(p, src_order, dst_order);
    t_case_kind(&c, kind);
    c.dtype = COLO_BF16;
    c.shape.b += c.shape.b > 2; /* one more than divides */
    return c;
}

T_CASE(every_pair_of_layouts_of_16_ranks_delivers_exactly_once)
{
    int64_t pairs = 0;
    T_EACH_PAIR (p, 1, 16) {
        for (int kind = 0; kind < 3; kind++) {
            t_case_t c = pair_case(&p, 0, 0, kind);
            if (p.nth % 3 == kind || !t_left_out(3 * p.nth + kind)) /* one kind, or more */
                t_plans_check(&c);
        }
        pairs++;
    }
    assert_int_equal(pairs, 1100);
}

T_CASE(every_dim_order_of_8_ranks_delivers_exactly_once)
{
    int64_t pairs = 0;
    T_EACH_PAIR (p, 1, 8) {
        for (int a = 0; a < T_ORDERS; a++)
            for (int b = 0; b < T_ORDERS; b++) {
                t_case_t c = pair_case(&p, a, b, b % 3);
                if (!T_LEFT_OUT({p.nth, 254}, {a, T_ORDERS}, {b, T_ORDERS}))
                    t_plans_check(&c);
            }
        pairs++;
    }
    assert_int_equal(pairs, 254);
}

T_CASE(sequence_parallel_features_and_position_maps_deliver_exactly_once)
{
    static const int64_t table[6] = {1, 2, 9, 14, 15, 20};
    for (int variant = 0; variant < 64; variant++)
        for (int kind = 0; kind < 3; kind++) {
            t_case_t c = t_between("tp=2,cp=2,dp=3", "dp=2,tp=2,cp=3", 5, 6, 3);
            t_case_kind(&c, kind);
            c.src.positions = c.dst.positions = 24;
            if (variant & 1)
                t_side_split(&c.src, 1, "tp", REF_BLOCK, false);
            if (variant & 2)
                t_side_split(&c.dst, 1, "tp", REF_BLOCK, false);
            if ((variant & 5) == 4)
                t_side_split(&c.src, 2, "tp", REF_BLOCK, false);
            if ((variant & 10) == 8)
                t_side_split(&c.dst, 2, "tp", REF_BLOCK, false);
            if (variant & 16) {
                c.dst.map = REF_OFFSET;
                c.dst.map_offset = 10;
            }
            if (variant & 32) {
                c.src.map = REF_TABLE;
                c.src.table = table;
            }
            t_plans_check(&c);
        }
}

T_CASE(empty_batches_rows_and_widths_plan_to_nothing)
{
    for (int e = 0; e < 3; e++)
        for (int kind = 0; kind < 3; kind++) {
            t_case_t c = t_between("tp=2,dp=4", "tp=2,cp=2,dp=2", e == 0 ? 0 : 4, e == 1 ? 0 : 4,
                                   e == 2 ? 0 : 4);
            t_case_kind(&c, kind);
            t_plans_check(&c);
            int64_t src, dst;
            T_PLANS(w, &c);
            colo_plan_rows(w.plan[0], &src, &dst);
            assert_int_equal(src, 0);
            assert_int_equal(dst, 0);
        }
}

/* ---- balance ---- */

/* Overlaps of 64 KiB and more: rows of 128 KiB times the ranks that may share one. */
T_CASE(within_a_node_no_rank_sends_more_than_the_largest_receive)
{
    int64_t plans = 0;
    T_EACH_PAIR (p, 1, 16) {
        const int orders = p.n <= 8 ? T_ORDERS : 1;
        for (int i = 0; i < 3 * orders * orders; i++) {
            if (t_left_out(plans++))
                continue;
            t_case_t c = pair_case(&p, i / 3 % orders, i / 3 / orders, i % 3);
            c.shape.n *= 720720; /* rows divide by every number of candidates up to 16 */
            c.shape.h = 64;
            c.shape.b = t_lcm(p.src[2], p.dst[2]); /* equal parts: a larger one has one source */
            T_PLANS(w, &c);
            for (int pass = 0; pass < 2; pass++)
                if (!t_plans_balanced(&w, (colo_pass_t)pass))
                    fail_msg("%s: %s", t_case_text(&c), w.why);
        }
    }
    assert_int_equal(plans, (1100 - 254 + 254 * 36) * 3);
}

/* ---- closed forms ---- */

typedef struct totals {
    int64_t cases, fan_in, fan_out, equal, collective;
} totals_t;

static void expect_bytes(const t_case_t *c, const t_plans_t *w, int32_t r, colo_pass_t pass,
                         int64_t num, int64_t den, int64_t vd)
{
    int64_t got = t_plan_bytes(w->plan[r], pass).recv;
    assert_int_equal(num * vd % den, 0);
    if (got != num * vd / den)
        fail_msg("%s: rank %d receives %lld bytes %s, closed form %lld/%lld of %lld",
                 t_case_text(c), r, (long long)got, pass ? "backward" : "forward", (long long)num,
                 (long long)den, (long long)vd);
}

static void closed_form(const t_pair_t *p, totals_t *t)
{
    int64_t ds = p->src[2], dd = p->dst[2], c = p->dst[1];
    int64_t big = ds > dd ? ds : dd, k = big / (ds < dd ? ds : dd);
    if (p->src[1] != 1 || big % (ds < dd ? ds : dd))
        return;
    for (int order = 0; order < 4; order += 2) /* dp slowest: tp,cp,dp and cp,tp,dp */
        for (int kind = 0; kind < 3; kind++) {
            t_case_t tc = pair_case(p, order, order, kind);
            tc.shape = (ref_shape_t){big, 2 * c * k, 2};
            T_PLANS(w, &tc);
            int64_t vd = tc.shape.b * tc.shape.n * tc.shape.h * 2 / dd;
            bool sharded = tc.output == COLO_OUTPUT_SHARDED;
            colo_direction_t want = ds > dd   ? COLO_DIRECTION_FAN_IN
                                    : ds < dd ? COLO_DIRECTION_FAN_OUT
                                              : COLO_DIRECTION_EQUAL;
            for (int32_t r = 0; r < p->n; r++) {
                assert_int_equal(colo_plan_direction(w.plan[r]), want);
                assert_int_equal(colo_plan_scale(w.plan[r]), k);
                int64_t ring_f = want == COLO_DIRECTION_FAN_IN ? (k - 1) * vd / k : 0;
                int64_t ring_b =
                    2 * (c - 1) * vd / c + (want == COLO_DIRECTION_FAN_OUT ? (k - 1) * vd : 0);
                assert_int_equal(t_plan_bytes(w.plan[r], COLO_PASS_FORWARD).collective_recv,
                                 ring_f);
                assert_int_equal(t_plan_bytes(w.plan[r], COLO_PASS_BACKWARD).collective_recv,
                                 ring_b);
                t->collective++;
                expect_bytes(&tc, &w, r, COLO_PASS_FORWARD,
                             want == COLO_DIRECTION_FAN_IN ? k - 1 : 0, k * (sharded ? c : 1), vd);
                if (kind == 2)
                    continue; /* the closed forms of backward are for owned rows */
                if (want == COLO_DIRECTION_FAN_OUT)
                    expect_bytes(&tc, &w, r, COLO_PASS_BACKWARD, k * c - 1, c, vd);
                else
                    expect_bytes(&tc, &w, r, COLO_PASS_BACKWARD, c - 1, c * k, vd);
            }
            t->cases++;
            t->fan_in += want == COLO_DIRECTION_FAN_IN;
            t->fan_out += want == COLO_DIRECTION_FAN_OUT;
            t->equal += want == COLO_DIRECTION_EQUAL;
        }
}

T_CASE(byte_totals_are_the_closed_forms)
{
    totals_t t = {0};
    T_EACH_PAIR (p, 1, 16)
        closed_form(&p, &t);
    assert_true(t.fan_in > 200 && t.fan_out > 200 && t.equal > 200 && t.collective > 1000);
}

T_CASE(the_scale_is_zero_and_the_ring_is_refused_where_dp_does_not_divide)
{
    t_case_t c = t_between("tp=2,dp=3", "tp=3,dp=2", 6, 4, 2);
    T_PLANS(w, &c);
    assert_int_equal(colo_plan_scale(w.plan[0]), 0);
    assert_int_equal(colo_plan_direction(w.plan[0]), COLO_DIRECTION_FAN_IN);
    for (int32_t r = 0; r < 6; r++)
        for (int pass = 0; pass < 2; pass++)
            assert_int_equal(t_plan_bytes(w.plan[r], (colo_pass_t)pass).collective_recv, -1);
    assert_string_equal(colo_direction_name(COLO_DIRECTION_FAN_IN), "fan_in");
    assert_string_equal(colo_direction_name(COLO_DIRECTION_FAN_OUT), "fan_out");
    assert_string_equal(colo_direction_name(COLO_DIRECTION_EQUAL), "equal");
}

/* ---- worked examples: [from][to] bytes in units of V / @unit; the rest is zero ---- */

static void expect_matrix(const t_case_t *c, colo_pass_t pass, int64_t unit, const int64_t *want)
{
    T_PLANS(w, c);
    int64_t v = c->shape.b * c->shape.n * c->shape.h * (int64_t)colo_dtype_size(c->dtype);
    for (int32_t from = 0; from < w.n; from++)
        for (int32_t to = 0; to < w.n; to++) {
            int64_t got = t_plans_bytes(&w, pass, from, to),
                    expected = want[from * w.n + to] * v / unit;
            if (got != expected)
                fail_msg("%s: %s %d -> %d is %lld bytes, expected %lld", t_case_text(c),
                         pass ? "backward" : "forward", from, to, (long long)got,
                         (long long)expected);
        }
}

T_CASE(worked_example_fan_in)
{
    int64_t want[64] = {0};
    static const int pair[4][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}};
    for (int i = 0; i < 4; i++)
        want[pair[i][0] * 8 + pair[i][1]] = want[pair[i][1] * 8 + pair[i][0]] = 1;
    t_case_t c = T_BETWEEN("tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 4, .output = COLO_OUTPUT_SHARDED);
    expect_matrix(&c, COLO_PASS_FORWARD, 8, want);
    expect_matrix(&c, COLO_PASS_BACKWARD, 8, want);
    c.output = COLO_OUTPUT_FULL_SEQ;
    c.grad = COLO_GRAD_DISJOINT;
    expect_matrix(&c, COLO_PASS_BACKWARD, 8, want);
}

T_CASE(worked_example_fan_out)
{
    int64_t want[64] = {0}, none[64] = {0};
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            want[i * 8 + j] = i != j && i / 4 == j / 4;
    t_case_t c = T_BETWEEN("tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 4, .output = COLO_OUTPUT_SHARDED);
    expect_matrix(&c, COLO_PASS_FORWARD, 8, none);
    expect_matrix(&c, COLO_PASS_BACKWARD, 8, want);
}

T_CASE(worked_example_without_a_divisor)
{
    static const int64_t want[2][6][6] = {
        [COLO_PASS_FORWARD] =
            {[0][2] = 2, [2][0] = 1, [2][5] = 1, [3][1] = 1, [3][4] = 1, [4][3] = 2},
        [COLO_PASS_BACKWARD] = {[1][3] = 1, [3][2] = 1}};
    t_case_t c = T_BETWEEN("tp=2,dp=3", "tp=3,dp=2", 6, 4, 4, .output = COLO_OUTPUT_SHARDED);
    for (int pass = 0; pass < 2; pass++)
        expect_matrix(&c, (colo_pass_t)pass, 6, want[pass][0]);
}

T_CASE(partial_gradients_move_every_addend_but_the_own_one)
{
    t_case_t c = T_BETWEEN("tp=2,dp=2", "cp=2,tp=1,dp=2", 4, 4, 2, .grad = COLO_GRAD_PARTIAL);
    T_PLANS(w, &c);
    int64_t v = 4 * 4 * 2 * 4;
    for (int32_t r = 0; r < 4; r++) {
        assert_int_equal(colo_plan_addends(w.plan[r]), 2);
        assert_int_equal(t_plan_bytes(w.plan[r], COLO_PASS_BACKWARD).recv, v / 2);
        assert_int_equal(t_plans_bytes(&w, COLO_PASS_BACKWARD, r ^ 1, r), v / 2);
    }
    c.grad = COLO_GRAD_DISJOINT;
    T_PLANS(disjoint, &c);
    assert_int_equal(colo_plan_addends(disjoint.plan[0]), 1);
    c.grad = COLO_GRAD_PARTIAL;
    c.no_grad = true;
    T_PLANS(none, &c);
    for (int32_t r = 0; r < 4; r++) {
        int32_t n;
        colo_plan_recvs(none.plan[r], COLO_PASS_BACKWARD, &n);
        assert_int_equal(n, 0);
        colo_plan_sends(none.plan[r], COLO_PASS_BACKWARD, &n);
        assert_int_equal(n, 0);
        assert_int_equal(t_plan_bytes(none.plan[r], COLO_PASS_BACKWARD).minimum, 0);
    }
}

T_MAIN("bridge/plan")
