/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob_special.c - infinities, NaN, large offsets, rows that must not be read. What each
 * case must give is stated here, as PyTorch does it, and is the same on every rank and for every
 * way to cut the vocabulary.
 */
#include "loss/loss_case.h"

static const int32_t worlds[] = {1, 2, 3, 4, 8};

enum { V = 16 };

/* Runs @check over dtypes, worlds and shards on one case of @tokens tokens that @prepare filled. */
static void everywhere(int64_t tokens, void (*prepare)(loss_case_t *), void (*check)(loss_case_t *))
{
    uint64_t rng = t_seed();
    for (size_t d = 0; d < 4; d++)
        for (size_t w = 0; w < 5; w++)
            for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                loss_case_t c;
                loss_case_init(&c, worlds[w], tokens, V, loss_dtypes[d], 2, &rng);
                loss_case_shard(&c, kind);
                c.pad = NAN;
                c.config.want_entropy = c.config.want_loss = c.config.want_correct = true;
                c.config.want_argmax = c.config.want_lse = c.config.want_sum_p2 =
                    c.config.want_mean_logits = true;
                prepare(&c);
                loss_case_later(&c, check);
            }
    t_run_rest();
}

/* The rows of one case. Those of poison have it in each column in turn. */
enum {
    NANS,
    INFINITIES = NANS + V,
    NAN_AMONG = INFINITIES + V, /* infinities of both signs */
    ALL_MINUS,
    IGNORED, /* NaN */
    IGNORED_TOO,
    TWO, /* -inf but in columns 3 and 12 */
    TWO_MASKED,
    MASKED, /* the target alone is -inf */
    PLAIN,
    ROWS
};

static void special_rows(loss_case_t *c)
{
    for (int64_t t = NANS; t < NAN_AMONG; t++)
        c->z[t * V + t % V] = t < INFINITIES ? NAN : INFINITY;
    c->targets[NANS + 4] = c->targets[INFINITIES + 4] = 4; /* also as the target */
    c->targets[NANS + 5] = c->targets[ALL_MINUS] = -1;     /* what the argmax of no maximum is */
    for (int j = 0; j < V; j++) {
        c->z[NAN_AMONG * V + j] = j == 7 ? NAN : j % 2 ? -INFINITY : INFINITY;
        c->z[ALL_MINUS * V + j] = -INFINITY;
        c->z[IGNORED * V + j] = NAN;
        c->z[IGNORED_TOO * V + j] = INFINITY;
        if (j != 3 && j != 12)
            c->z[TWO * V + j] = c->z[TWO_MASKED * V + j] = -INFINITY;
    }
    c->targets[IGNORED] = c->targets[IGNORED_TOO] = -100;
    c->targets[TWO] = 12;
    c->targets[TWO_MASKED] = 5;
    c->targets[MASKED] = 9;
    c->z[MASKED * V + 9] = -INFINITY;
    for (int k = 0; k < LOSS_UPS; k++) {
        c->up[k][TWO] = c->up[k][TWO_MASKED] = (const double[LOSS_UPS]){1, 0.5, 1}[k];
        c->up[k][MASKED] = k == 0;
    }
}

static void row_is(numbers_t what, const loss_case_t *c, int64_t t)
{
    for (int r = 0; r < c->ranks; r++) {
        for (int k = 0; k < LOSS_OUTS; k++)
            assert_true(all_of(what, &c->out[r][k][t], 1));
        assert_true(what == IS_FINITE ? c->argmax[r][t] >= 0 : c->argmax[r][t] == -1);
        assert_true(what == IS_FINITE || c->correct[r][t] == 0);
    }
    assert_true(all_of(what, c->dz + t * V, V));
}

/* Masked logits add nothing, whole shards of them are skipped: as if the vocabulary were two. */
static void row_is_of_two(const loss_case_t *c, int64_t t)
{
    const double half = c->dtype == COLO_BF16 ? 0x1p-8 : c->dtype == COLO_F16 ? 0x1p-10 : 1e-6;
    double a = c->z[t * V + 3], b = c->z[t * V + 12];
    double pb = 1 / (1 + exp(a - b)), pa = 1 - pb, h = -pa * log(pa) - pb * log(pb);
    for (int r = 0; r < c->ranks; r++) {
        const bool masked = t == TWO_MASKED;
        assert_true(fabs(c->out[r][1][t] - h) < 1e-6);
        assert_true(near(c->out[r][0][t], masked ? -INFINITY : log(pb), 2e-6));
        assert_true(near(c->out[r][2][t], masked ? INFINITY : -log(pb), 2e-6));
        assert_int_equal(c->correct[r][t], !masked && b > a);
        assert_int_equal(c->argmax[r][t], b > a ? 12 : 3);
        assert_true(near(c->out[r][3][t], log(exp(a) + exp(b)), 2e-6));
        assert_true(near(c->out[r][4][t], pa * pa + pb * pb, 2e-6));
        assert_true(c->out[r][5][t] == -INFINITY); /* a mean over the vocabulary */
    }
    /* logp and loss cancel (1 - 1); the entropy's share is -p (log p + h) / 2 */
    for (int j = 0; j < V; j++) {
        double p = j == 3 ? pa : j == 12 ? pb : 0;
        double want = p > 0 ? -0.5 * p * (log(p) + h) : 0;
        assert_true(near(c->dz[t * V + j], want, p > 0 ? 1e-6 + half * fabs(want) : 0));
    }
}

static void rows_are_as_documented(loss_case_t *c)
{
    for (int64_t t = NANS; t <= ALL_MINUS; t++)
        row_is(IS_NAN, c, t);
    row_is(IS_ZERO, c, IGNORED);
    row_is(IS_ZERO, c, IGNORED_TOO);
    row_is(IS_FINITE, c, PLAIN);
    row_is_of_two(c, TWO);
    row_is_of_two(c, TWO_MASKED);
    for (int r = 0; r < c->ranks; r++) {
        assert_true(c->out[r][0][MASKED] == -INFINITY);
        assert_true(isfinite(c->out[r][1][MASKED]));
        assert_true(c->out[r][2][MASKED] == INFINITY);
        assert_true(isfinite(c->out[r][3][MASKED]) && isfinite(c->out[r][4][MASKED]));
        assert_true(c->out[r][5][MASKED] == -INFINITY);
    }
    /* d logp / dz_j = 1[j = t] - p_j with p_t = 0 */
    double sum = 0;
    for (int j = 0; j < V; j++) {
        const double dz = c->dz[MASKED * V + j];
        assert_true(j == 9 ? dz == 1 : isfinite(dz) && dz < 0);
        sum += dz;
    }
    assert_true(fabs(sum) < 0.02);
}

T_CASE(special_rows_are_as_documented)
{
    everywhere(ROWS, special_rows, rows_are_as_documented);
}

static void smoothing_over_minus_infinity(loss_case_t *c)
{
    c->targets[0] = 2;
    c->z[9] = -INFINITY;
    c->config.label_smoothing = 0.1;
}

/* As PyTorch: the mean of log p is -inf, so the loss is +inf; gradients stay finite. */
static void the_smoothed_loss_is_infinite(loss_case_t *c)
{
    for (int r = 0; r < c->ranks; r++) {
        assert_true(isfinite(c->out[r][0][0]));
        assert_true(c->out[r][2][0] == INFINITY);
    }
    assert_true(all_of(IS_FINITE, c->dz, V));
}

T_CASE(smoothing_over_a_masked_column_is_infinite)
{
    everywhere(1, smoothing_over_minus_infinity, the_smoothed_loss_is_infinite);
}

static void nothing_but_smoothing(loss_case_t *c)
{
    c->targets[0] = 2;
    c->z[2] = -INFINITY;
    c->config.label_smoothing = 1;
}

/* As PyTorch: 0 times infinity. */
static void the_loss_is_nan(loss_case_t *c)
{
    for (int r = 0; r < c->ranks; r++)
        assert_true(c->out[r][0][0] == -INFINITY && isnan(c->out[r][2][0]));
    assert_true(all_of(IS_FINITE, c->dz, V));
}

T_CASE(a_masked_target_of_weight_0_is_nan)
{
    everywhere(1, nothing_but_smoothing, the_loss_is_nan);
}

static void softcap_of_infinities(loss_case_t *c)
{
    c->config.logits.softcap = 4;
    c->z[1] = INFINITY;  /* x = 4 */
    c->z[2] = -INFINITY; /* x = -4 */
    c->targets[0] = 1;
}

static void softcap_makes_infinities_finite(loss_case_t *c)
{
    row_is(IS_FINITE, c, 0);
    assert_true(c->dz[1] == 0); /* tanh is flat there */
    assert_true(c->dz[2] == 0);
}

T_CASE(with_softcap_an_infinite_logit_is_a_finite_x)
{
    everywhere(1, softcap_of_infinities, softcap_makes_infinities_finite);
}

/* ---- extremes ---- */

/* p near 1: the target's gradient 1 - p is small, and must not come out as 0 in fp64 */
T_CASE(the_targets_gradient_survives_a_probability_near_one)
{
    uint64_t rng = t_seed() + 5;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 2, 1, 4, COLO_F64, 0, &rng);
    c.targets[0] = 2;
    c.z[2] = 30;
    c.up[0][0] = 1;
    assert_ok(loss_case_run(&c));
    double expected = 3 * exp(-30.0) / (1 + 3 * exp(-30.0)); /* 2.8e-13 */
    assert_true(fabs(c.dz[2] - expected) < 5e-16);
    assert_true(c.dz[2] > 0);
}

/* Below -88 every exp(x) underflows in fp32, below -745 in fp64: a running maximum that starts at 0
 * gives log 0 here. */
T_CASE(all_logits_far_below_zero_are_ordinary)
{
    uint64_t rng = t_seed() + 1;
    for (size_t d = 0; d < 2; d++)
        for (size_t w = 0; w < 5; w++) {
            T_ENDS(loss_case_free) loss_case_t c;
            loss_case_init(&c, worlds[w], 4, V, loss_dtypes[d], 1, &rng);
            for (int i = 0; i < 4 * V; i++)
                c.z[i] = loss_round(loss_dtypes[d], c.z[i] - 2000);
            c.config.want_entropy = c.config.want_loss = true;
            assert_ok(loss_case_run(&c));
            loss_case_compare(&c, "far below zero");
        }
}

/* The same row at offset 0 and at 5000. fp32 holds 5000 + x in steps of 2^-11, so the values are
 * chosen on that grid: the shifted row is exactly the row, and so must the results be. The raw
 * forms (lse - x_t, log p from lse) lose 2e-4 here. */
T_CASE(an_offset_of_5000_costs_no_digit)
{
    uint64_t rng = t_seed() + 2;
    for (size_t w = 0; w < 5; w++)
        for (int smooth = 0; smooth < 2; smooth++) {
            T_ENDS(loss_case_free) loss_case_t c;
            loss_case_init(&c, worlds[w], 6, V, COLO_F32, 3, &rng);
            c.config.want_entropy = c.config.want_loss = true;
            c.config.label_smoothing = smooth ? 0.1 : 0;
            for (int i = 0; i < 6 * V; i++)
                c.z[i] = floor(c.z[i] * 2048) / 2048;
            assert_ok(loss_case_run(&c));
            loss_case_compare(&c, "offset 0");
            T_ENDS(loss_case_free) loss_case_t shifted;
            loss_case_take(&shifted, &c, 0, 6);
            for (int i = 0; i < 6 * V; i++)
                shifted.z[i] += 5000;
            assert_ok(loss_case_run(&shifted));
            loss_case_same(&shifted, &c, 0, "offset 5000");
        }
}

/* Differences of finite f64 logits overflow: 0 * inf must not appear. */
T_CASE(the_largest_doubles_make_a_one_hot_row)
{
    uint64_t rng = t_seed() + 3;
    for (size_t w = 0; w < 5; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            T_ENDS(loss_case_free) loss_case_t c;
            loss_case_init(&c, worlds[w], 1, V, COLO_F64, 0, &rng);
            loss_case_shard(&c, kind);
            c.config.want_entropy = true;
            for (int j = 0; j < V; j++)
                c.z[j] = j == 6 ? 1.7e308 : -1.7e308;
            c.targets[0] = 6;
            assert_ok(loss_case_run(&c));
            for (int r = 0; r < worlds[w]; r++) {
                assert_true(c.out[r][0][0] == 0);
                assert_true(c.out[r][1][0] == 0);
            }
            assert_true(all_of(IS_ZERO, c.dz, V));
        }
}

/* x beyond the range of the statistics counts as infinite, on both sides. */
T_CASE(an_x_that_overflows_fp32_is_infinite)
{
    uint64_t rng = t_seed() + 4;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 2, 4, 4, COLO_F32, 0, &rng);
    c.config.want_entropy = c.config.want_loss = true;
    c.config.label_smoothing = 0.1; /* over a column at -inf: +inf */
    c.config.logits.scale = 100;
    c.z[1] = loss_round(COLO_F32, 1e38);
    c.z[4 + 1] = loss_round(COLO_F32, -1e38);
    for (int j = 0; j < 4; j++) {
        c.z[12 + j] = loss_round(COLO_F32, -1e38); /* a whole row */
        if (j > 1)
            c.z[8 + j] = loss_round(COLO_F32, -1e38); /* a whole shard */
    }
    for (int t = 0; t < 4; t++)
        c.targets[t] = 0;
    assert_ok(loss_case_run(&c));
    for (int r = 0; r < 2; r++) {
        assert_true(isnan(c.out[r][0][0]) && isnan(c.out[r][1][0]));
        assert_true(fabs(c.out[r][0][1] + log(3)) < 1e-6 && fabs(c.out[r][1][1] - log(3)) < 1e-6);
        assert_true(fabs(c.out[r][0][2] + log(2)) < 1e-6 && fabs(c.out[r][1][2] - log(2)) < 1e-6);
        assert_true(isnan(c.out[r][0][3]) && isnan(c.out[r][1][3]));
        assert_true(c.out[r][2][1] == INFINITY && c.out[r][2][2] == INFINITY);
    }

    assert_true(isnan(c.dz[1]) && isnan(c.dz[12]));
    assert_true(all_of(IS_FINITE, c.dz + 4, 8));
}

/* The largest x is 1.4e10, which fp32 holds to 1,024: neither 0 nor infinity may come out in its
 * place. */
T_CASE(an_x_that_rounds_by_more_than_exponentials_hold_is_nan)
{
    for (int w = 0; w < 3; w++) {
        uint64_t rng = t_seed() + 5;
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, worlds[w], 2, 4, COLO_F32, 0, &rng);
        c.config.want_entropy = c.config.want_loss = c.config.want_argmax = c.config.want_lse =
            true;
        c.config.logits.scale = 0.7;
        c.z[1] = loss_round(COLO_F32, 2e10 + 2048);
        c.z[4 + 1] = loss_round(COLO_F32, 1e7); /* held to 1/2 */
        c.targets[0] = c.targets[1] = 1;
        assert_ok(loss_case_run(&c));
        for (int r = 0; r < worlds[w]; r++) {
            for (int k = 0; k < 3; k++)
                assert_true(isnan(c.out[r][k][0]) && c.out[r][k][1] == 0);
            assert_true(c.argmax[r][0] == -1 && c.argmax[r][1] == 1);
        }
        assert_true(all_of(IS_NAN, c.dz, 4) && all_of(IS_FINITE, c.dz + 4, 4));
    }
}

/* Of what fp32 holds to 128 or to 256 sums of e^(x - m) x and of e^(2 (x - m)) overflow before that
 * of e^(x - m) does. */
T_CASE(what_an_x_that_rounds_far_leaves_is_right_or_nan)
{
    for (int i = 0; i < 6; i++)
        for (double z = 1e9; z < 2e10; z *= pow(10, 1.0 / 32)) {
            const int w = i / 2;
            uint64_t rng = t_seed() + 6;
            T_ENDS(loss_case_free) loss_case_t c;
            loss_case_init(&c, worlds[w], 1, 4, COLO_F32, 0, &rng);
            c.config.want_entropy = c.config.want_sum_p2 = true;
            c.config.logits.temperature = i % 2 ? 1.7 : 3;
            for (int j = 0; j < 4; j++)
                c.z[j] = j < 2 ? loss_round(COLO_F32, z) : 0;
            c.targets[0] = 1;
            assert_ok(loss_case_run(&c));
            for (int r = 0; r < worlds[w]; r++) {
                const double h = c.out[r][1][0], p2 = c.out[r][4][0];
                assert_true(isnan(h) || fabs(h - log(2)) < 1e-4);
                assert_true(isnan(p2) || fabs(p2 - 0.5) < 1e-4);
                assert_true(z > 1.5e9 || !isnan(h));
            }
        }
}

T_MAIN("loss/logprob_special")
