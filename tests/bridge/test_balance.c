/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_balance.c - colo_segments_balance() against a plain loop written from its rule, and its
 * refusals.
 */
#include "harness/harness.h"

#include <math.h>

#define MOST 64

/* Segments one after the other: the dearest left, to the replica that the rule names. */
static void plain(int64_t *assign, const int64_t *cost, int64_t count, int64_t n,
                  const int64_t *current, double stick)
{
    int64_t load[MOST] = {0}, total = 0;
    bool done[MOST] = {false};
    for (int64_t e = 0; e < count; e++)
        total += cost[e];
    for (int64_t nth = 0; nth < count; nth++) {
        int64_t e = -1, to = 0;
        for (int64_t i = 0; i < count; i++)
            if (!done[i] && (e < 0 || cost[i] > cost[e]))
                e = i;
        for (int64_t b = 1; b < n; b++)
            if (load[b] < load[to])
                to = b;
        if (current &&
            (double)(load[current[e]] + cost[e]) <= (1.0 + stick) * ((double)total / (double)n))
            to = current[e];
        load[to] += cost[e];
        assign[e] = to;
        done[e] = true;
    }
}

T_CASE(random_costs_are_assigned_by_the_rule)
{
    uint64_t r = t_seed();
    for (int i = 0; i < 3000; i++) {
        int64_t cost[MOST], current[MOST], got[MOST], want[MOST];
        const int64_t count = t_below(&r, MOST), n = 1 + t_below(&r, 12),
                      most = 1 + t_below(&r, 40);
        const double stick = (double)t_below(&r, 8) / 4;
        const bool placed = t_below(&r, 2);
        for (int64_t e = 0; e < count; e++) {
            cost[e] = t_below(&r, most);
            current[e] = t_below(&r, n);
        }
        plain(want, cost, count, n, placed ? current : NULL, stick);
        assert_ok(colo_segments_balance(got, cost, count, n, placed ? current : NULL, stick));
        assert_memory_equal(got, want, (size_t)count * sizeof *got);
        if (placed) { /* in place */
            assert_ok(colo_segments_balance(current, cost, count, n, current, stick));
            assert_memory_equal(current, want, (size_t)count * sizeof *want);
        }
    }
}

T_CASE(the_dearest_goes_first_and_a_segment_that_stays_counts_with_its_bin)
{
    static const int64_t cost[6] = {3, 7, 3, 5, 0, 6}, current[6] = {1, 1, 1, 0, 2, 0};
    /* 7 to 0, 6 to 1, 5 to 2, 3 to 2 (8), 3 to 1 (9), 0 to 0 */
    static const int64_t fresh[6] = {2, 0, 1, 2, 0, 1};
    /* mean 8: 7 stays in 1 (7); 6 stays in 0 (6); 5 would make 11 in 0: to 2 (5);
     * 3 would make 10 in 1: to 2 (8); 3 again: to the lowest of 7, 8, 6: 0 (9); 0 stays in 2 */
    static const int64_t strict[6] = {2, 1, 0, 2, 2, 0};
    /* up to 10: 5 would make 11: to 2; 3 stays in 1 (10); 3 would make 13: to 2 (8); 0 stays */
    static const int64_t within[6] = {1, 1, 2, 2, 2, 0};
    const struct {
        const int64_t *current, *want;
        double stick;
    } rows[] = {
        {NULL, fresh, 0}, {current, strict, 0}, {current, within, 0.25}, {current, current, 9}};
    for (size_t i = 0; i < 4; i++) {
        int64_t got[6];
        assert_ok(colo_segments_balance(got, cost, 6, 3, rows[i].current, rows[i].stick));
        assert_memory_equal(got, rows[i].want, sizeof got);
    }
}

T_CASE(segments_of_no_cost_stay_however_large_stick_is)
{
    const int64_t cost[2] = {0, 0}, current[2] = {1, 1};
    const double stick[3] = {0, 1e300, INFINITY};
    for (int i = 0; i < 3; i++) {
        int64_t got[2] = {-1, -1};
        assert_ok(colo_segments_balance(got, cost, 2, 2, current, stick[i]));
        assert_int_equal(got[0], 1);
        assert_int_equal(got[1], 1);
    }
}

T_CASE(wrong_arguments_are_refused_with_their_numbers)
{
    int64_t got[3] = {-7, -7, -7}, cost[3] = {1, -4, 1};
    static const int64_t fine[3] = {1, 2, 3}, current[3] = {0, 1, 2}, large[3] = {1, INT64_MAX, 1};
    assert_fails(colo_segments_balance(got, cost, 3, 2, NULL, 0), COLO_ERR_ARG,
                 "segment 1 costs -4");
    assert_fails(colo_segments_balance(got, large, 3, 2, NULL, 0), COLO_ERR_ARG,
                 "segment 1 exceed 63 bits");
    assert_fails(colo_segments_balance(got, fine, 3, 2, current, 0), COLO_ERR_ARG,
                 "segment 2 is on replica 2, expected 0..1");
    assert_fails(colo_segments_balance(got, fine, 3, 2, fine, -1), COLO_ERR_ARG, "stick is -1");
    assert_fails(colo_segments_balance(got, fine, -1, 2, NULL, 0), COLO_ERR_ARG, "count is -1");
    assert_fails(colo_segments_balance(got, fine, 3, 0, NULL, 0), COLO_ERR_ARG, "n is 0");
    assert_fails(colo_segments_balance(NULL, fine, 3, 2, NULL, 0), COLO_ERR_ARG, "assign is NULL");
    assert_fails(colo_segments_balance(got, NULL, 3, 2, NULL, 0), COLO_ERR_ARG, "cost is NULL");
    assert_true(got[0] == -7 && got[1] == -7 && got[2] == -7);
    assert_ok(colo_segments_balance(NULL, NULL, 0, 1, NULL, 0));
}

T_MAIN("bridge/balance")
