/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_topk.c - the k largest and k given columns against the fp64 oracle, over worlds, shards,
 * dtypes and options; ties; special values; central differences.
 */
#include "loss/topk_case.h"

static const int32_t worlds[] = {1, 2, 4, 8};
static const int64_t ks[] = {1, 2, 5, 20};

static topk_case_t c; /* large */

static colo_status_t run(void)
{
    return gather_run(&c, sizeof c);
}

static void draw_options(uint64_t *rng)
{
    if (t_below(rng, 2))
        c.config.logits.temperature = 0.5 + t_uniform(rng);
    c.masked = gather_draw(&c.shape, &c.config.logits, c.mask, rng);
}

static void compare(loss_case_t *shape)
{
    const topk_case_t *a = (const topk_case_t *)shape;
    topk_case_compare(a, a->shape.label);
}

T_CASE(every_option_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(3); step++)
        for (int w = 0; w < 4; w++)
            for (int d = 0; d < 4; d++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
                    for (int i = 0; i < 8; i++) {
                        bool topk = i % 2;
                        topk_case_init(&c, worlds[w], 6, 23 + 8 * step, ks[i / 2], topk,
                                       loss_dtypes[d], 3, &rng);
                        loss_case_shard(&c.shape, kind);
                        draw_options(&rng);
                        if (!topk && t_below(&rng, 2))
                            topk_case_tail(&c, &rng);
                        if (!topk && t_below(&rng, 3) == 0)
                            topk_case_heat(&c);
                        if (!topk && t_below(&rng, 2))
                            c.ids[t_below(&rng, 6 * c.config.k)] = -100;
                        snprintf(c.shape.label, sizeof c.shape.label,
                                 "W %d, %s, shard %d, k %d, %s", worlds[w],
                                 colo_dtype_name(loss_dtypes[d]), (int)kind, (int)c.config.k,
                                 topk ? "largest" : "given");
                        gather_later(&c, sizeof c, compare);
                    }
    t_run_rest();
}

T_CASE_IF(where.mem == COLO_MEM_HOST, temperatures_that_are_none_or_differ_are_refused)
{
    static const double none[] = {0, -1, INFINITY, NAN};
    uint64_t rng = t_seed() + 10;
    for (int i = 0; i < 4; i++) {
        topk_case_init(&c, 2, 3, 12, 2, false, COLO_F32, 2, &rng);
        topk_case_heat(&c);
        c.heat[1] = none[i];
        assert_fails(run(), COLO_ERR_ARG, "temperature: token 1 has ");
    }
    topk_case_init(&c, 2, 3, 12, 2, false, COLO_F32, 2, &rng);
    topk_case_heat(&c);
    c.other_heat = true;
    assert_fails(run(), COLO_ERR_MISMATCH, "");
}

/* ---- order ---- */

/* Few distinct values, so that every pick is among ties; ranks hold the vocabulary backwards. */
T_CASE(of_equal_logits_the_lowest_id_is_first_on_any_cut)
{
    uint64_t rng = t_seed() + 1;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int backwards = 0; backwards < 2; backwards++) {
                topk_case_init(&c, worlds[w], 8, 40, 13, true, loss_dtypes[d], 1, &rng);
                for (int i = 0; i < 8 * 40; i++)
                    c.z[i] = (double)t_below(&rng, 3) - 1;
                for (int32_t r = 0; r < worlds[w] && backwards; r++)
                    c.shape.start[r] = (worlds[w] - 1 - r) * c.shape.columns[r];
                assert_ok(run());
                topk_case_compare(&c, "ties");
            }
}

T_CASE(all_columns_can_be_asked_for)
{
    uint64_t rng = t_seed() + 2;
    for (int w = 0; w < 4; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            topk_case_init(&c, worlds[w], 3, 30, 30, true, COLO_F32, 2, &rng);
            loss_case_shard(&c.shape, kind);
            assert_ok(run());
            topk_case_compare(&c, "all columns");
        }
}

T_CASE(a_scale_of_zero_makes_all_equal)
{
    uint64_t rng = t_seed() + 3;
    topk_case_init(&c, 4, 2, 20, 5, true, COLO_F32, 2, &rng);
    c.config.logits.scale = 0;
    assert_ok(run());
    topk_case_compare(&c, "scale 0");
    assert_int_equal(c.got[3][4], 4);
}

static void never_above_0(loss_case_t *shape)
{
    const topk_case_t *a = (const topk_case_t *)shape;
    for (int64_t i = 0; i < a->shape.tokens * a->config.k; i++)
        if (!(a->logp[0][i] <= 0))
            fail_msg("%s: logp is %.9g", a->shape.label, a->logp[0][i]);
}

/* 5000 + x on the grid of fp32: the same ids and the same bits as at offset 0 */
/* Rounding errors of probability 1 are on both sides. */
T_CASE(log_probabilities_are_never_above_0)
{
    uint64_t rng = t_seed() + 21;
    for (int i = 0; i < 96; i++) {
        const int64_t vocab = i % 2 ? 1 : 2;
        const colo_dtype_t dtype =
            (colo_dtype_t[]){COLO_F32, COLO_F64, COLO_BF16, COLO_F16}[i / 2 % 4];
        topk_case_init(&c, i / 8 % 3 ? 2 : 1, TOPK_TOKENS, vocab, vocab, i / 24 % 2, dtype, 40,
                       &rng);
        c.config.logits.temperature = i / 48 ? 1.3 : 0.7;
        for (int64_t t = 0; t < TOPK_TOKENS * vocab; t++)
            c.z[t] = loss_round(dtype, c.z[t] + 3000);
        snprintf(c.shape.label, sizeof c.shape.label, "case %d", i);
        gather_later(&c, sizeof c, never_above_0);
    }
    t_run_rest();
}

T_CASE(an_offset_of_5000_costs_no_digit)
{
    uint64_t rng = t_seed() + 4;
    static double first[TOPK_TOKENS * TOPK_K];
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 5, 32, 6, true, COLO_F32, 3, &rng);
        for (int i = 0; i < 5 * 32; i++)
            c.z[i] = floor(c.z[i] * 2048) / 2048;
        assert_ok(run());
        memcpy(first, c.logp[0], sizeof first);
        for (int i = 0; i < 5 * 32; i++)
            c.z[i] += 5000;
        assert_ok(run());
        for (int i = 0; i < 5 * 6; i++)
            assert_true(c.logp[0][i] == first[i]);
    }
}

/* ---- special values ---- */

enum { NAN_ROW, PLUS_ROW, MINUS_ROW, SOME_MINUS, MASKED, PLAIN, ROWS };

T_CASE(special_rows_are_as_documented)
{
    uint64_t rng = t_seed() + 5;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int topk = 0; topk < 2; topk++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                    enum { V = 16, K = 6 };
                    topk_case_init(&c, worlds[w], ROWS, V, K, topk, loss_dtypes[d], 2, &rng);
                    loss_case_shard(&c.shape, kind);
                    c.shape.pad = NAN;
                    c.z[NAN_ROW * V + 11] = NAN;
                    c.z[PLUS_ROW * V + 3] = INFINITY;
                    for (int j = 0; j < V; j++) {
                        c.z[MINUS_ROW * V + j] = -INFINITY;
                        if (j != 2 && j != 9) /* two that count, the rest is picked after them */
                            c.z[SOME_MINUS * V + j] = -INFINITY;
                        c.z[MASKED * V + j] = j % 2 ? NAN : INFINITY;
                    }
                    c.masked = true;
                    c.mask[MASKED] = 0;
                    for (int i = 0; i < K; i++)
                        c.ids[SOME_MINUS * K + i] = (int64_t[]){2, 9, 0, 1, 2, 15}[i];
                    c.shape.pad = 1000; /* gaps and padding are compared with == */
                    assert_ok(run());
                    for (int r = 0; r < worlds[w]; r++)
                        for (int i = 0; i < K; i++) {
                            for (int t = NAN_ROW; t <= MINUS_ROW; t++) {
                                assert_true(isnan(c.logp[r][t * K + i]));
                                assert_true(!topk || c.got[r][t * K + i] == -1);
                            }
                            assert_true(c.logp[r][MASKED * K + i] == 0);
                            assert_true(!topk || c.got[r][MASKED * K + i] == -1);
                        }
                    assert_true(all_of(IS_NAN, c.dz + NAN_ROW * V, (MINUS_ROW - NAN_ROW + 1) * V));
                    assert_true(all_of(IS_ZERO, c.dz + MASKED * V, V));
                    assert_true(all_of(IS_FINITE, c.dz + SOME_MINUS * V, V));
                    assert_true(all_of(IS_FINITE, c.dz + PLAIN * V, V));
                    const double *z = c.z + SOME_MINUS * V;
                    const int64_t hi = z[2] >= z[9] ? 2 : 9, order[K] = {hi, 11 - hi, 0, 1, 3, 4};
                    for (int r = 0; r < worlds[w]; r++)
                        for (int i = 0; i < K; i++) {
                            const int index = SOME_MINUS * K + i;
                            const int64_t id = topk ? c.got[r][index] : c.ids[index];
                            if (topk)
                                assert_int_equal(id, order[i]);
                            if (id != 2 && id != 9)
                                assert_true(c.logp[r][index] == -INFINITY);
                            else
                                assert_true(fabs(c.logp[r][index] +
                                                 log(1 + exp(z[11 - id] - z[id]))) < 1e-5);
                        }
                    /* a picked -inf: its gradient is its own g, for its p is 0 */
                    if (topk)
                        assert_true(fabs(c.dz[SOME_MINUS * V + 3] - c.up[SOME_MINUS * K + 4]) <
                                    0.01);
                }
}

T_CASE(an_invalid_id_is_counted_and_spoils_its_row_only)
{
    uint64_t rng = t_seed() + 6;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 5, 20, 3, false, COLO_F32, 2, &rng);
        c.ids[1 * 3 + 2] = 20;
        c.ids[2 * 3 + 0] = -1;
        c.ids[2 * 3 + 1] = INT64_MIN; /* what rows use themselves */
        c.ids[3 * 3 + 1] = -100;
        c.ids[4 * 3 + 0] = c.ids[4 * 3 + 1] = c.ids[4 * 3 + 2] = -100; /* nothing is asked for */
        for (int j = 0; j < 20; j++)
            c.z[4 * 20 + j] = NAN;
        assert_ok(run());
        assert_int_equal(c.n_invalid[0], 3);
        assert_true(all_of(IS_ZERO, c.dz + 4 * 20, 20));
        c.shape.tokens = 4; /* the last row is not for the oracle */
        topk_case_compare(&c, "invalid");
    }
}

T_CASE(an_id_that_occurs_twice_counts_twice)
{
    uint64_t rng = t_seed() + 7;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 4, 10, 20, false, COLO_F64, 2, &rng); /* 20 of 10: many do */
        assert_ok(run());
        topk_case_compare(&c, "twice");
    }
}

/* Peaked: 1 - sum p is 0 in fp32, and p_tail is e^-60. */
T_CASE(a_small_tail_keeps_its_digits)
{
    uint64_t rng = t_seed() + 10;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 4, 40, 3, false, COLO_F32, 2, &rng);
        topk_case_tail(&c, &rng);
        for (int t = 0; t < 4; t++)
            c.z[t * 40 + c.ids[t * 3 + t % 3]] = 60;
        assert_ok(run());
        topk_case_compare(&c, "a small tail");
        for (int t = 0; t < 4; t++)
            assert_true(c.tail[0][t] < -50 && isfinite(c.tail[0][t]));
    }
}

enum { TWICE, NO_TAIL, NOTHING_ASKED, TAIL_MASKED, TAIL_NAN, TAIL_PLAIN, TAIL_ROWS };

T_CASE(special_tails_are_as_documented)
{
    uint64_t rng = t_seed() + 11;
    enum { V = 16, K = 3 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++) {
            topk_case_init(&c, worlds[w], TAIL_ROWS, V, K, false, loss_dtypes[d], 2, &rng);
            topk_case_tail(&c, &rng);
            c.ids[TWICE * K + 2] = c.ids[TWICE * K];
            for (int j = 0; j < V; j++) {
                bool in = false;
                for (int i = 0; i < K; i++)
                    in = in || c.ids[NO_TAIL * K + i] == j;
                if (!in)
                    c.z[NO_TAIL * V + j] = -INFINITY;
            }
            for (int i = 0; i < K; i++)
                c.ids[NOTHING_ASKED * K + i] = -100;
            c.z[TAIL_NAN * V + 5] = c.z[TAIL_MASKED * V + 5] = NAN;
            c.masked = true;
            c.mask[TAIL_MASKED] = 0;
            assert_ok(run());
            for (int r = 0; r < worlds[w]; r++) {
                assert_true(isnan(c.tail[r][TWICE]) && isnan(c.tail[r][TAIL_NAN]));
                assert_true(c.tail[r][NO_TAIL] == -INFINITY);
                assert_true(c.tail[r][NOTHING_ASKED] == 0 && c.tail[r][TAIL_MASKED] == 0);
                assert_true(c.tail[r][TAIL_PLAIN] < 0 && isfinite(c.tail[r][TAIL_PLAIN]));
            }
            assert_true(all_of(IS_NAN, c.dz + TWICE * V, V));
            assert_true(all_of(IS_FINITE, c.dz + NO_TAIL * V, V));
            for (int j = 0; j < V; j++)
                assert_true(c.z[NO_TAIL * V + j] > -INFINITY || c.dz[NO_TAIL * V + j] == 0);
            assert_true(all_of(IS_ZERO, c.dz + NOTHING_ASKED * V, 2 * V));
            assert_true(all_of(IS_NAN, c.dz + TAIL_NAN * V, V));
            assert_true(all_of(IS_FINITE, c.dz + TAIL_PLAIN * V, V));
        }
}

T_CASE(no_tokens_still_join_the_gather)
{
    uint64_t rng = t_seed() + 8;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 0, 10, 2, true, COLO_F32, 2, &rng);
        assert_ok(run());
        topk_case_compare(&c, "no tokens");
    }
}

/* ---- gradient ---- */

static double weighted(int64_t t)
{
    double f = 0;
    for (int64_t i = t * c.config.k; i < (t + 1) * c.config.k; i++)
        f += c.up[i] * c.logp[0][i];
    return c.config.want_tail ? f + c.up_tail[t] * c.tail[0][t] : f;
}

T_CASE(the_gradient_is_the_central_difference)
{
    uint64_t rng = t_seed() + 9;
    for (int i = 0; i < 3; i++) {
        const bool topk = i == 1;
        topk_case_init(&c, 2, 3, 12, 3, topk, COLO_F64, 2, &rng);
        if (i == 2)
            topk_case_tail(&c, &rng);
        loss_case_shard(&c.shape, SHARD_UNEVEN);
        c.config.logits.softcap = topk ? 3 : 0.9;
        c.config.logits.temperature = 0.7;
        if (!topk)
            topk_case_heat(&c);
        gather_central(&c.shape, c.z, c.dz, run, weighted);
    }
}

T_MAIN_IF(where.need(), "loss/topk")
