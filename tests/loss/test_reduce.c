/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_reduce.c - (num, den) over dp x cp on 8 ranks against one serial sum, with counted tokens
 * spread unevenly over cp ranks; and what the usual mistake, reducing over dp only, would give.
 */
#include "harness/harness.h"

#include <math.h>
#include <stdatomic.h>
#include <unistd.h>

/* tp 2, cp 2, dp 2. The tokens of (cp, dp) hold values k / 8, exact in f32, so sums are exact. */
enum { TOKENS = 12 };

static double value_of(int cp, int dp, int i)
{
    return (double)(1 + i + 20 * cp + 7 * dp) / 8;
}

static uint8_t counts(int cp, int dp, int i)
{
    return cp == 0 ? i % 5 == dp : i > 1 + dp; /* 2 or 3 tokens on cp 0, 9 or 10 on cp 1 */
}

static void serial(double *num, int64_t *den)
{
    *num = 0;
    *den = 0;
    for (int dp = 0; dp < 2; dp++)
        for (int cp = 0; cp < 2; cp++)
            for (int i = 0; i < TOKENS; i++)
                if (counts(cp, dp, i)) {
                    *num += value_of(cp, dp, i);
                    ++*den;
                }
}

typedef struct world {
    const char *group;
    colo_dtype_t dtype;
    bool empty; /* nothing counts anywhere */
    colo_reduced_t got[8];
    uint64_t gathers[8];
} world_t;

static colo_status_t reduce_on_rank(colo_comm_t *world, void *arg)
{
    world_t *w = arg;
    const int r = colo_comm_rank(world), cp = r / 2 % 2, dp = r / 4;
    colo_grid_t grid;
    colo_comm_t *group = NULL;
    double f64[TOKENS];
    float f32[TOKENS];
    uint8_t mask[TOKENS];
    colo_comm_stats_t stats;
    rank_try(colo_grid_parse(&grid, "tp=2,cp=2,dp=2", 8));
    rank_try(colo_comm_split(world, &grid, w->group, &group));
    for (int i = 0; i < TOKENS; i++) {
        mask[i] = !w->empty && counts(cp, dp, i);
        f64[i] = mask[i] ? value_of(cp, dp, i) : NAN; /* must not be read */
        f32[i] = (float)f64[i];
    }
    colo_status_t st = colo_loss_reduce(w->dtype == COLO_F64 ? (void *)f64 : (void *)f32, w->dtype,
                                        mask, TOKENS, group, &w->got[r], NULL);
    colo_comm_stats(group, &stats);
    w->gathers[r] = stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
    colo_comm_destroy(&group);
    return st;
}

T_CASE(the_sum_over_dp_and_cp_is_the_serial_sum)
{
    double num;
    int64_t den;
    serial(&num, &den);
    for (int d = 0; d < 2; d++) {
        world_t w = {.group = "dp-cp", .dtype = d ? COLO_F64 : COLO_F32};
        assert_ok(t_run_ranks(8, reduce_on_rank, &w, sizeof w));
        for (int r = 0; r < 8; r++) {
            assert_true(w.got[r].num == num);
            assert_int_equal(w.got[r].den, den);
            assert_true(w.got[r].value == num / (double)den);
            assert_int_equal(w.gathers[r], 1);
        }
    }
}

T_CASE(the_sum_over_dp_only_is_another_value)
{
    double num;
    int64_t den;
    world_t w = {.group = "dp", .dtype = COLO_F64};
    serial(&num, &den);
    assert_ok(t_run_ranks(8, reduce_on_rank, &w, sizeof w));
    double mean_of_means = (w.got[0].value + w.got[2].value) / 2;
    for (int r = 0; r < 8; r++) {
        assert_true(fabs(w.got[r].value - num / (double)den) > 0.1);
        assert_true(w.got[r].den < den);
    }
    assert_true(fabs(mean_of_means - num / (double)den) > 0.1);
}

T_CASE(no_counted_token_anywhere_gives_zero)
{
    world_t w = {.group = "dp-cp", .dtype = COLO_F32, .empty = true};
    assert_ok(t_run_ranks(8, reduce_on_rank, &w, sizeof w));
    for (int r = 0; r < 8; r++) {
        assert_true(w.got[r].num == 0 && w.got[r].value == 0);
        assert_int_equal(w.got[r].den, 0);
    }
}

static colo_status_t asymmetric(colo_comm_t *world, void *arg)
{
    const double values[3] = {1.5, 2.5, 3.5};
    colo_reduced_t *got = arg;
    int r = colo_comm_rank(world); /* rank 0 has no token, 1 has one ... and no mask */
    return colo_loss_reduce(r ? values : NULL, COLO_F64, NULL, r, world, &got[r], NULL);
}

T_CASE(ranks_without_tokens_join_and_no_mask_counts_all)
{
    colo_reduced_t got[4] = {{0}};
    assert_ok(t_run_ranks(4, asymmetric, got, sizeof got));
    for (int r = 0; r < 4; r++) {
        assert_true(got[r].num == 1.5 + 4 + 7.5);
        assert_int_equal(got[r].den, 6);
    }
}

T_CASE(nan_that_counts_is_not_hidden)
{
    const float values[2] = {NAN, 1};
    colo_comm_t *self = NULL;
    colo_reduced_t got;
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_loss_reduce(values, COLO_F32, NULL, 2, self, &got, NULL));
    assert_true(isnan(got.num) && isnan(got.value) && got.den == 2);
    colo_comm_destroy(&self);
}

static atomic_int peer_is_back;

/* The rank that failed stays: only the mark on the group can wake the other before its deadline. */
static colo_status_t one_rank_errs(colo_comm_t *world, void *arg)
{
    const double v = 1;
    colo_reduced_t got = {.num = 7, .den = 7};
    int r = colo_comm_rank(world);
    colo_status_t *st = arg;
    rank_try(colo_comm_set_timeout(world, 3000));
    st[r] = colo_loss_reduce(&v, COLO_F64, NULL, r ? -1 : 1, world, &got, NULL);
    rank_check(got.num == 7 && got.den == 7);
    if (r == 0)
        atomic_store(&peer_is_back, 1);
    for (int i = 0; i < 6000 && !atomic_load(&peer_is_back); i++)
        usleep(1000);
    return st[r];
}

T_CASE(bad_arguments_are_refused_and_wake_the_peers)
{
    const double v = 1;
    colo_comm_t *self = NULL;
    colo_reduced_t got = {.num = 7, .den = 7, .value = 7};
    colo_status_t st[2];
    assert_ok(colo_comm_create_self(&self));
    assert_fails(colo_loss_reduce(&v, COLO_F64, NULL, 1, NULL, &got, NULL), COLO_ERR_ARG,
                 "group is NULL, expected the dp x cp group");
    assert_fails(colo_loss_reduce(&v, COLO_BF16, NULL, 1, self, &got, NULL), COLO_ERR_ARG,
                 "dtype bf16, expected f32 or f64");
    assert_fails(colo_loss_reduce(&v, COLO_F64, NULL, -1, self, &got, NULL), COLO_ERR_ARG,
                 "count is -1");
    assert_fails(colo_loss_reduce(NULL, COLO_F64, NULL, 5, self, &got, NULL), COLO_ERR_ARG,
                 "values is NULL for 5 tokens");
    assert_fails(colo_loss_reduce(&v, COLO_F64, NULL, 1, self, NULL, NULL), COLO_ERR_ARG,
                 "out is NULL");
    assert_true(got.num == 7 && got.den == 7 && got.value == 7);
    colo_comm_destroy(&self);
    assert_true(colo_comm_threads_run(2, one_rank_errs, st) < 0);
    assert_int_equal(st[1], COLO_ERR_ARG);
    assert_int_equal(st[0], COLO_ERR_PEER);
}

/* Rank 2 weighs the values that the others count. */
T_CASE_ON_THREADS(3, ranks_that_weigh_and_ranks_that_count_are_a_mismatch)
{
    static const char said[] =
        "found a weighted sum on rank 2 and a mean or sum by count on rank 0";
    const int64_t count = 2;
    double v[2] = {1, 2}, value, num, den, factor, again = 0;
    _Alignas(COLO_ALIGNMENT) double workspace[16];
    colo_weighted_t sum;
    const colo_tensor_t values = colo_tensor_host(v, COLO_F64, 1, &count);
    const colo_loss_mean_t mean = {
        .value_f64 = &value, .num = &num, .den = &den, .factor = &factor};
    colo_status_t st =
        colo_comm_rank(world) == 2
            ? colo_loss_weighted_sum(&values, &values, NULL, world, &sum, NULL, workspace, NULL)
            : colo_loss_mean_forward(&values, &count, true, world, &mean, workspace, NULL);
    rank_check(st == COLO_ERR_MISMATCH);
    rank_check(strstr(colo_last_error(), said) != NULL);
    rank_try(colo_comm_all_reduce(world, v, &again, 1, COLO_F64, COLO_SUM, NULL)); /* it lives on */
    rank_check(again == 3);
    return COLO_OK;
}

T_MAIN("loss/reduce")
