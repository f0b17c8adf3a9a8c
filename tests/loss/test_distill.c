/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_distill.c - cross entropy, KL and other divergences from sharded targets against the fp64
 * oracle, over worlds, shards, dtypes and options; known values; special values; central
 * differences.
 */
#include "loss/distill_case.h"

static const int32_t worlds[] = {1, 2, 4, 8};

static distill_case_t c; /* large */

static colo_status_t run(void)
{
    return gather_run(&c, sizeof c);
}

static void draw_options(uint64_t *rng)
{
    if (t_below(rng, 2))
        c.config.logits.temperature = 0.5 + 2 * t_uniform(rng);
    if (t_below(rng, 2))
        c.config.target_temperature = 0.5 + 2 * t_uniform(rng);
    if (t_below(rng, 3) == 0)
        c.config.target_scale = 0.5;
    if (c.config.targets == COLO_DISTILL_LOGITS && t_below(rng, 3) == 0)
        c.config.target_softcap = 5;
    c.masked = gather_draw(&c.shape, &c.config.logits, c.mask, rng);
    if (c.config.targets == COLO_DISTILL_LOGITS)
        distill_case_diverge(&c, (colo_divergence_t)t_below(rng, 5), 0.1 + 0.8 * t_uniform(rng));
    const int64_t heats = t_below(rng, 6);
    distill_case_heat(&c, heats & 1 && heats < 4,
                      heats & 2 && heats < 4 && c.config.targets == COLO_DISTILL_LOGITS);
    c.no_ce = t_below(rng, 4) == 0;
    c.no_kl = t_below(rng, 4) == 0;
}

static void compare(loss_case_t *shape)
{
    const distill_case_t *a = (const distill_case_t *)shape;
    distill_case_compare(a, a->shape.label);
}

T_CASE(every_option_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(3); step++)
        for (int w = 0; w < 4; w++)
            for (int d = 0; d < 4; d++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
                    for (int i = 0; i < 4; i++) {
                        const bool probs = i % 2;
                        const colo_dtype_t other = i / 2 ? COLO_F32 : loss_dtypes[d];
                        distill_case_init(&c, worlds[w], 6, 23 + 8 * step, probs, loss_dtypes[d],
                                          other, 3, &rng);
                        loss_case_shard(&c.shape, kind);
                        draw_options(&rng);
                        snprintf(c.shape.label, sizeof c.shape.label,
                                 "W %d, %s from %s %s, shard %d", worlds[w],
                                 colo_dtype_name(loss_dtypes[d]), colo_dtype_name(other),
                                 probs ? "probabilities" : "logits", (int)kind);
                        gather_later(&c, sizeof c, compare);
                    }
    t_run_rest();
}

T_CASE_IF(where.mem == COLO_MEM_HOST, temperatures_that_are_none_or_differ_are_refused)
{
    static const double none[] = {0, -1, INFINITY, NAN};
    static const char *const names[] = {"temperature", "target_temperature"};
    uint64_t rng = t_seed() + 9;
    for (int i = 0; i < 8; i++) {
        distill_case_init(&c, 2, 3, 12, false, COLO_F32, COLO_F32, 2, &rng);
        distill_case_heat(&c, i % 2 == 0, i % 2);
        c.heat[i % 2][1] = none[i / 2];
        assert_fails(run(), COLO_ERR_ARG, t_text("%s: token 1 has ", names[i % 2]));
        c.masked = true;
        c.mask[1] = 0;
        assert_ok(run());
        c.other_heat[i % 2] = true;
        assert_fails(run(), COLO_ERR_MISMATCH, "");
        c.mask[0] = 0;
        assert_ok(run());
        distill_case_compare(&c, "temperatures of masked rows");
    }
}

/* p = q: ce is the entropy, kl and the gradient vanish, on every cut. */
T_CASE(a_student_that_is_its_teacher_has_no_kl)
{
    uint64_t rng = t_seed() + 1;
    for (int w = 0; w < 4; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            distill_case_init(&c, worlds[w], 4, 40, false, COLO_F32, COLO_F32, 3, &rng);
            loss_case_shard(&c.shape, kind);
            memcpy(c.w, c.z, sizeof c.w);
            c.config.logits.temperature = c.config.target_temperature = 1.7;
            assert_ok(run());
            distill_case_compare(&c, "its own teacher");
            for (int t = 0; t < 4; t++)
                assert_true(fabs(c.out[0][1][t]) < 1e-6);
            for (int i = 0; i < 4 * 40; i++)
                assert_true(fabs(c.dz[i]) < 1e-6);
        }
}

enum { NEAR = 64 };

/* Of z and w, of which all columns differ by less than rho, in long double. @slope [V]: dD/dx */
static double near_divergence(int64_t t, long double *slope)
{
    const double *z = c.z + t * NEAR, *w = c.w + t * NEAR;
    const long double beta = c.config.beta;
    long double sum = 0, sum_v = 0, d = 0, mean = 0;
    for (int j = 0; j < NEAR; j++) {
        sum += expl(z[j]);
        sum_v += expl(w[j]);
    }
    for (int pass = 0; pass < 2; pass++)
        for (int j = 0; j < NEAR; j++) {
            const long double p = expl(z[j]) / sum, q = expl(w[j]) / sum_v,
                              log_ratio = z[j] - w[j] - logl(sum / sum_v),
                              m = beta * q + (1 - beta) * p,
                              kinds[] = {-q * log_ratio, p * log_ratio,
                                         -beta * q * logl(m / q) - (1 - beta) * p * logl(m / p),
                                         fabsl(p - q) / 2, fabsl(p - q) / 2},
                              by_logp[] = {-q, p * log_ratio, -(1 - beta) * p * logl(m / p),
                                           p * ((p > q) - (p < q)) / 2,
                                           p * ((p > q) - (p < q)) / 2};
            if (pass == 0) {
                d += kinds[c.config.divergence];
                mean += by_logp[c.config.divergence];
            } else {
                slope[j] = by_logp[c.config.divergence] - p * mean;
                if (c.config.divergence == COLO_DIVERGENCE_ACCEPTANCE)
                    slope[j] /= 1 - d;
            }
        }
    return c.config.divergence == COLO_DIVERGENCE_ACCEPTANCE ? -log1pl(-d) : d;
}

/* Statistics are off by u rho^2 in g and by u rho in e, where rho bounds |r| of all columns, and so
 * is a shift of the merge. KL and JSD are of second order in r: within 16 u rho^2, where each is
 * about rho^2 / 8 here; TV is of first order. The device makes r from numbers of fp32, each within
 * u |x - max| <= 16 u: eta. It costs KL 2 eta sqrt(2 D) and TV eta. */
T_CASE(a_divergence_near_0_keeps_its_digits)
{
    uint64_t rng = t_seed() + 22;
    const double u = where.slack * 0x1p-24, eta = where.mem == COLO_MEM_HOST ? 0 : 32 * u;
    for (int w = 0; w < 4; w++)
        for (colo_divergence_t kind = COLO_DIVERGENCE_FORWARD_KL;
             kind <= COLO_DIVERGENCE_ACCEPTANCE; kind++)
            for (int bits = 8; bits < 20; bits += 4) {
                const double rho = 2 * ldexp(1, -bits);
                distill_case_init(&c, worlds[w], 4, NEAR, false, COLO_F32, COLO_F32, 2, &rng);
                distill_case_diverge(&c, kind, 0.3);
                c.no_ce = true;
                for (int i = 0; i < 4 * NEAR; i++) {
                    c.z[i] = floor(c.z[i] * 0x1p14) / 0x1p14;
                    c.w[i] = c.z[i] + ldexp((double)t_below(&rng, 17) / 8 - 1, -bits) * 1;
                    c.w[i] = loss_round(COLO_F32, c.w[i]);
                }
                assert_ok(run());
                for (int t = 0; t < 4; t++) {
                    long double slope[NEAR];
                    const double want = (double)near_divergence(t, slope);
                    const bool first = kind >= COLO_DIVERGENCE_TV;
                    const double tol =
                        first ? 16 * u * rho + eta : 16 * u * rho * rho + 2 * eta * sqrt(2 * want);
                    for (int r = 0; r < worlds[w]; r++)
                        if (!(fabs(c.out[r][1][t] - want) <= tol))
                            fail_msg("W %d, divergence %d, 2^-%d: %.9g, expected %.9g within %g",
                                     worlds[w], (int)kind, bits, c.out[r][1][t], want, tol);
                    for (int j = 0; j < NEAR && !first && kind; j++)
                        if (!(fabs(c.dz[t * NEAR + j] - c.up[1][t] * (double)slope[j]) <=
                              fabs(c.up[1][t]) * (16 * u * rho + 2 * eta)))
                            fail_msg("W %d, divergence %d, 2^-%d: gradient %.9g, expected %.9g",
                                     worlds[w], (int)kind, bits, c.dz[t * NEAR + j],
                                     c.up[1][t] * (double)slope[j]);
                }
            }
}

static void never_below_0(loss_case_t *shape)
{
    const distill_case_t *a = (const distill_case_t *)shape;
    const bool probs = a->config.targets == COLO_DISTILL_PROBS;
    for (int t = 0; t < DISTILL_TOKENS; t++)
        if (!(a->out[0][0][t] >= 0) || !(probs || a->out[0][1][t] >= 0))
            fail_msg("%s: ce is %.9g, kl %.9g", a->shape.label, a->out[0][0][t], a->out[0][1][t]);
}

/* Rounding errors of a divergence of 0, and of a cross entropy of 0, are on both sides. */
T_CASE(divergence_and_cross_entropy_are_never_below_0)
{
    uint64_t rng = t_seed() + 21;
    for (int i = 0; i < 192; i++) {
        const int64_t vocab = 1 + i % 3 % 2 * 15;
        const bool probs = i / 96;
        const colo_dtype_t dtype = loss_dtypes[i / 24 % 4];
        distill_case_init(&c, worlds[i / 6 % 4], DISTILL_TOKENS, vocab, probs, dtype,
                          dtype == COLO_F64 ? COLO_F64 : COLO_F32, 40, &rng);
        for (int64_t j = 0; j < DISTILL_TOKENS * vocab; j++) {
            c.z[j] = loss_round(dtype, c.z[j] + (i % 2 ? 3000 : 0));
            c.w[j] = probs ? vocab == 1 : loss_round(COLO_F32, c.z[j] * (1 + 0x1p-21));
        }
        c.config.logits.temperature = c.config.target_temperature = i % 5 ? 0.7 : 1.3;
        if (probs)
            c.config.target_temperature = 1;
        else
            distill_case_diverge(&c, (colo_divergence_t)(i % 7 % 5), 0.5);
        snprintf(c.shape.label, sizeof c.shape.label, "case %d", i);
        gather_later(&c, sizeof c, never_below_0);
    }
    t_run_rest();
}

/* Soft labels of one column are hard labels: ce = kl = -logp of it. */
T_CASE(a_one_hot_target_is_the_log_probability)
{
    uint64_t rng = t_seed() + 2;
    for (int w = 0; w < 4; w++) {
        distill_case_init(&c, worlds[w], 5, 32, true, COLO_F64, COLO_F32, 3, &rng);
        for (int t = 0; t < 5; t++)
            for (int j = 0; j < 32; j++)
                c.w[t * 32 + j] = j == 7 * t % 32;
        assert_ok(run());
        for (int t = 0; t < 5; t++) {
            double sum = 0, target = c.z[t * 32 + 7 * t % 32];
            for (int j = 0; j < 32; j++)
                sum += exp(c.z[t * 32 + j] - target);
            assert_true(fabs(c.out[0][0][t] - log(sum)) < 1e-12);
            assert_true(fabs(c.out[0][1][t] - log(sum)) < 1e-12);
        }
    }
}

/* Twice the soft labels are twice the loss and the gradient; none at all are 0. */
T_CASE(probabilities_are_not_normalised)
{
    uint64_t rng = t_seed() + 3;
    static double first[DISTILL_TOKENS * DISTILL_VOCAB], ce[4];
    distill_case_init(&c, 4, 4, 30, true, COLO_F64, COLO_F64, 2, &rng);
    c.no_kl = true;
    assert_ok(run());
    memcpy(first, c.dz, sizeof first);
    memcpy(ce, c.out[0][0], sizeof ce);
    for (int i = 0; i < 4 * 30; i++)
        c.w[i] = i < 30 ? 0 : 2 * c.w[i];
    assert_ok(run());
    for (int t = 1; t < 4; t++)
        assert_true(fabs(c.out[0][0][t] - 2 * ce[t]) < 1e-12);
    for (int i = 30; i < 4 * 30; i++)
        assert_true(fabs(c.dz[i] - 2 * first[i]) < 1e-12);
    assert_true(c.out[0][0][0] == 0 && c.out[0][1][0] == 0);
    assert_true(all_of(IS_ZERO, c.dz, 30));
}

/* 5000 + z and 5000 + w on the grid of fp32: the same bits */
T_CASE(an_offset_of_5000_costs_no_digit)
{
    uint64_t rng = t_seed() + 4;
    double first[2][5];
    for (int w = 0; w < 4; w++) {
        distill_case_init(&c, worlds[w], 5, 32, false, COLO_F32, COLO_F32, 3, &rng);
        for (int i = 0; i < 5 * 32; i++) {
            c.z[i] = floor(c.z[i] * 2048) / 2048;
            c.w[i] = floor(c.w[i] * 2048) / 2048;
        }
        assert_ok(run());
        for (int k = 0; k < 2; k++)
            memcpy(first[k], c.out[0][k], sizeof first[k]);
        for (int i = 0; i < 5 * 32; i++) {
            c.z[i] += 5000;
            c.w[i] -= 5000;
        }
        assert_ok(run());
        for (int k = 0; k < 2; k++)
            for (int t = 0; t < 5; t++)
                assert_true(c.out[0][k][t] == first[k][t]);
    }
}

/* (5000 + z) / 0.7 is not on the grid of fp32, which has steps of 5e-4 there. The device makes x in
 * fp32. */
T_CASE_IF(where.mem == COLO_MEM_HOST, an_offset_that_fp32_cannot_hold_costs_no_digit)
{
    uint64_t rng = t_seed() + 9;
    for (int w = 0; w < 4; w++)
        for (int probs = 0; probs < 2; probs++) {
            distill_case_init(&c, worlds[w], 5, 32, probs, COLO_F32, COLO_F32, 3, &rng);
            c.config.logits.temperature = 0.7;
            if (!probs)
                c.config.target_temperature = 1.3;
            for (int i = 0; i < 5 * 32; i++) {
                c.z[i] = floor(c.z[i] * 2048) / 2048 + 5000;
                c.w[i] = probs ? c.w[i] : floor(c.w[i] * 2048) / 2048 - 5000;
            }
            assert_ok(run());
            distill_case_compare(&c, probs ? "probabilities" : "logits");
        }
}

enum { FAR = 16 }; /* columns of the rows that follow */

/* p and q are 1 and 1/16 in one column, 0 and 1/16 in the others, or the other way round. */
static double far_jsd(void)
{
    const double one = 17.0 / 32, other = 1.0 / 32;
    return 0.5 * (-log(one) + log(1 / 16.0 / one) / 16 + 15 / 16.0 * log(1 / 16.0 / other));
}

/* A teacher or a student of one column, as far above the others as fp32 goes, beside one that has
 * all columns alike. */
T_CASE(one_sides_offset_of_any_size_costs_no_digit)
{
    uint64_t rng = t_seed() + 30;
    const double wanted[] = {far_jsd(), 15 / 16.0, log(16)};
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 3; d++)
            for (int kind = 0; kind < 3; kind++)
                for (int side = 0; side < 2; side++)
                    for (double offset = 1e3; offset < 1e38; offset *= 1e5) {
                        const colo_dtype_t dtype = loss_dtypes[d];
                        if (dtype == COLO_F16)
                            continue;
                        distill_case_init(&c, worlds[w], 1, FAR, false, dtype, dtype, 0, &rng);
                        distill_case_diverge(&c, COLO_DIVERGENCE_JSD + (colo_divergence_t)kind,
                                             0.5);
                        c.no_ce = true;
                        for (int j = 0; j < FAR; j++)
                            c.z[j] = c.w[j] = -100;
                        (side ? c.z : c.w)[5] = loss_round(dtype, offset);
                        assert_ok(run());
                        for (int r = 0; r < worlds[w]; r++)
                            if (!(fabs(c.out[r][1][0] - wanted[kind]) < 1e-6 * where.slack))
                                fail_msg("W %d, divergence %d, %s at %g: %.9g, expected %.9g",
                                         worlds[w], 2 + kind, side ? "student" : "teacher", offset,
                                         c.out[r][1][0], wanted[kind]);
                    }
}

/* Of column j the gradient is -p_j P (p > q) / alpha where p < q, and p_j P (p < q) / alpha where p
 * > q: each has the digits of its own sum. */
T_CASE(a_draft_that_is_rarely_accepted_has_its_gradient)
{
    uint64_t rng = t_seed() + 31;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int far = 4; far < 60; far += 8) {
                double p[FAR], q[FAR], sum = 0, sum_q = 0, more = 0, less = 0, alpha = 0;
                distill_case_init(&c, worlds[w], 1, FAR, false, loss_dtypes[d], loss_dtypes[d], 0,
                                  &rng);
                distill_case_diverge(&c, COLO_DIVERGENCE_ACCEPTANCE, 0);
                c.no_ce = true;
                c.up[1][0] = 1;
                for (int j = 0; j < FAR; j++) {
                    c.z[j] = j % 4 == 0 ? 0.25 * j : -far - j % 3;
                    c.w[j] = j % 4 == 1 ? 0.125 * (j - 1) : -far - 2 - j % 5;
                    sum += exp(c.z[j]);
                    sum_q += exp(c.w[j]);
                }
                for (int j = 0; j < FAR; j++) {
                    p[j] = exp(c.z[j]) / sum;
                    q[j] = exp(c.w[j]) / sum_q;
                    *(p[j] > q[j] ? &more : &less) += p[j];
                    alpha += fmin(p[j], q[j]);
                }
                assert_ok(run());
                for (int j = 0; j < FAR; j++) {
                    const double want = p[j] * (p[j] > q[j] ? less : -more) / alpha,
                                 tol = fabs(want) * (ldexp(1, d == 2   ? -7
                                                              : d == 3 ? -9
                                                                       : -18)) +
                                       (d == 3 ? 0x1p-24 : 1e-37);
                    if (!(fabs(c.dz[j] - want) <= tol * where.slack))
                        fail_msg("W %d, %s, alpha %g, column %d: %.9g, expected %.9g", worlds[w],
                                 colo_dtype_name(loss_dtypes[d]), alpha, j, c.dz[j], want);
                }
            }
}

/* Of a maximum that fp32 holds to 256 what may come out is NaN, or right. */
T_CASE(a_maximum_that_fp32_holds_too_coarsely_is_nan)
{
    enum { ALL = 4 * 5 * 7 * 2 * 2, STEP = 37 /* which visits all of them, in a mixed order */ };
    static const double temperatures[] = {3, 1.7};
    uint64_t rng = t_seed() + 32;
    for (int n = 0; n < (int)t_scaled(ALL); n++) {
        const int i = n * STEP % ALL, w = worlds[i % 4];
        const colo_divergence_t kind = COLO_DIVERGENCE_FORWARD_KL + i / 4 % 5;
        const double offset = 1e9 * pow(10, i / 20 % 7 / 2.0),
                     temperature = temperatures[i / 140 % 2];
        const bool student = i / 280 % 2;
        distill_case_init(&c, w, 1, FAR, false, COLO_F32, COLO_F32, 0, &rng);
        distill_case_diverge(&c, kind, 0.5);
        c.no_ce = true;
        c.config.logits.temperature = c.config.target_temperature = temperature;
        for (int j = 0; j < FAR; j++)
            c.z[j] = c.w[j] = -100;
        (student ? c.z : c.w)[5] = loss_round(COLO_F32, offset);
        assert_ok(run());
        const bool far =
            kind <= COLO_DIVERGENCE_REVERSE_KL && student == (kind == COLO_DIVERGENCE_FORWARD_KL);
        const double got = c.out[0][1][0], want = far ? offset / temperature * 15 / 16
                                                  : kind == COLO_DIVERGENCE_JSD ? far_jsd()
                                                  : kind == COLO_DIVERGENCE_TV  ? 15 / 16.0
                                                                                : log(16);
        if (!isnan(got) && !(fabs(got - want) <= 1e-5 * where.slack * want))
            fail_msg("W %d, divergence %d, %s at %g: %.9g, expected %.9g", w, (int)kind,
                     student ? "student" : "teacher", offset, got, want);
        assert_true(!isnan(got) || all_of(IS_NAN, c.dz, FAR));
    }
}

/* ---- special values ---- */

enum { Z_NAN, Z_PLUS, Z_MINUS, W_NAN, W_PLUS, W_MINUS, MASKED, GAPS, PLAIN, ROWS };

T_CASE(special_rows_are_as_documented)
{
    uint64_t rng = t_seed() + 5;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int probs = 0; probs < 2; probs++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                    distill_case_init(&c, worlds[w], ROWS, V, probs, loss_dtypes[d], loss_dtypes[d],
                                      2, &rng);
                    loss_case_shard(&c.shape, kind);
                    for (int j = 0; j < V; j++) {
                        c.z[Z_MINUS * V + j] = -INFINITY;
                        c.w[W_MINUS * V + j] = probs ? -1 : -INFINITY;
                        c.z[MASKED * V + j] = NAN;
                        c.w[MASKED * V + j] = NAN;
                    }
                    c.z[Z_NAN * V + 11] = c.w[W_NAN * V + 1] = NAN;
                    c.z[Z_PLUS * V + 3] = c.w[W_PLUS * V + 14] = INFINITY;
                    /* no probability in 5, and there x = -inf; whole shards of both at W = 8 */
                    for (int j = 4; j < 8; j++) {
                        c.z[GAPS * V + j] = -INFINITY;
                        c.w[GAPS * V + j] = probs ? 0 : -INFINITY;
                    }
                    c.masked = true;
                    c.mask[MASKED] = 0;
                    assert_ok(run());
                    for (int r = 0; r < worlds[w]; r++)
                        for (int k = 0; k < 2; k++) {
                            assert_true(all_of(IS_NAN, c.out[r][k] + Z_NAN, W_MINUS - Z_NAN + 1));
                            assert_true(c.out[r][k][MASKED] == 0);
                            assert_true(isfinite(c.out[r][k][GAPS]));
                            assert_true(isfinite(c.out[r][k][PLAIN]));
                        }
                    assert_true(all_of(IS_NAN, c.dz + Z_NAN * V, (W_MINUS - Z_NAN + 1) * V));
                    assert_true(all_of(IS_ZERO, c.dz + MASKED * V, V));
                    assert_true(all_of(IS_FINITE, c.dz + GAPS * V, V));
                    assert_true(all_of(IS_FINITE, c.dz + PLAIN * V, V));
                    /* the row without its columns 4..7, serially */
                    double z[V], q[V], ce[2] = {c.out[0][0][GAPS], c.out[0][1][GAPS]};
                    ref_distill_row_t row;
                    ref_distill_opts_t o = distill_case_opts(&c);
                    int n = 0;
                    for (int j = 0; j < V; j++)
                        if (j < 4 || j > 7) {
                            z[n] = c.z[GAPS * V + j];
                            q[n++] = c.w[GAPS * V + j];
                        }
                    ref_distill(&o, z, q, n, &row);
                    assert_true(fabs(ce[0] - row.ce) < 1e-5 && fabs(ce[1] - row.kl) < 1e-5);
                }
}

T_CASE(a_target_where_the_student_has_none_is_infinite)
{
    uint64_t rng = t_seed() + 6;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int probs = 0; probs < 2; probs++) {
            distill_case_init(&c, worlds[w], 1, V, probs, COLO_F32, COLO_F32, 2, &rng);
            for (int j = 2; j < 6; j++)
                c.z[j] = -INFINITY;
            c.w[4] = 0.25; /* as a logit or a probability: some mass is there */
            assert_ok(run());
            assert_true(c.out[0][0][0] == INFINITY && c.out[0][1][0] == INFINITY);
            assert_true(all_of(IS_FINITE, c.dz, V));
            assert_true(c.dz[4] != 0);
        }
}

/* Rows of the other divergences */
enum { NO_TEACHER, NO_STUDENT, NEITHER, APART, NAN_ROW, LEFT_OUT, SPECIAL };

/* Columns that are -inf for the student, next to each other, and so far below the teacher's largest
 * that their q is 0: by themselves, as a thread or a rank has them, they are of an infinite cross
 * entropy. */
T_CASE(a_column_whose_q_underflows_costs_nothing)
{
    uint64_t rng = t_seed() + 33;
    enum { V = 64, FROM = 16, TO = 32 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++) {
            double sum = 0, sum_q = 0, ce = 0, kl = 0;
            distill_case_init(&c, worlds[w], 1, V, false, loss_dtypes[d], loss_dtypes[d], 2, &rng);
            for (int j = FROM; j < TO; j++) {
                c.z[j] = -INFINITY;
                c.w[j] = -2048;
            }
            for (int j = 0; j < V; j++) {
                sum += exp(c.z[j]);
                sum_q += exp(c.w[j]);
            }
            for (int j = 0; j < V; j++) {
                const double p = exp(c.z[j]) / sum, q = exp(c.w[j]) / sum_q;
                ce -= q > 0 ? q * log(p) : 0;
                kl += q > 0 ? q * log(q / p) : 0;
            }
            assert_ok(run());
            for (int r = 0; r < worlds[w]; r++) {
                assert_true(fabs(c.out[r][0][0] - ce) <= 1e-5 * where.slack);
                assert_true(fabs(c.out[r][1][0] - kl) <= 1e-5 * where.slack);
            }
            assert_true(all_of(IS_FINITE, c.dz, V) && all_of(IS_ZERO, c.dz + FROM, TO - FROM));
        }
}

T_CASE(a_column_that_only_one_side_has_is_as_documented)
{
    uint64_t rng = t_seed() + 23;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (colo_divergence_t kind = COLO_DIVERGENCE_FORWARD_KL;
                 kind <= COLO_DIVERGENCE_ACCEPTANCE; kind++) {
                distill_case_init(&c, worlds[w], SPECIAL, V, false, loss_dtypes[d], loss_dtypes[d],
                                  2, &rng);
                distill_case_diverge(&c, kind, 0.25);
                for (int j = 4; j < 8; j++) {
                    c.w[NO_TEACHER * V + j] = c.w[NEITHER * V + j] = -INFINITY;
                    c.z[NO_STUDENT * V + j] = c.z[NEITHER * V + j] = -INFINITY;
                }
                for (int j = 0; j < V; j++) /* alpha = 0 */
                    (j < 8 ? c.z : c.w)[APART * V + j] = -INFINITY;
                c.z[NAN_ROW * V + 9] = NAN;
                c.z[LEFT_OUT * V + 9] = NAN;
                c.masked = true;
                c.mask[LEFT_OUT] = 0;
                for (int t = 0; t < SPECIAL; t++)
                    c.up[0][t] = 0, c.up[1][t] = 1;
                assert_ok(run());
                const bool forward = kind == COLO_DIVERGENCE_FORWARD_KL,
                           reverse = kind == COLO_DIVERGENCE_REVERSE_KL,
                           finite = kind == COLO_DIVERGENCE_JSD || kind == COLO_DIVERGENCE_TV;
                for (int r = 0; r < worlds[w]; r++) {
                    const double *got = c.out[r][1];
                    assert_true(reverse ? got[NO_TEACHER] == INFINITY : isfinite(got[NO_TEACHER]));
                    assert_true(forward ? got[NO_STUDENT] == INFINITY : isfinite(got[NO_STUDENT]));
                    assert_true(isfinite(got[NEITHER]));
                    assert_true(finite ? isfinite(got[APART]) : got[APART] == INFINITY);
                    assert_true(isnan(got[NAN_ROW]) && got[LEFT_OUT] == 0);
                    /* 0.25 log 1/0.25 + 0.75 log 1/0.75; sums are of numbers of the stat dtype */
                    if (finite)
                        assert_true(fabs(got[APART] -
                                         (kind == COLO_DIVERGENCE_TV ? 1 : 0.56233514461880829)) <
                                    1e-6 * where.slack);
                }
                assert_true(all_of(reverse ? IS_NAN : IS_FINITE, c.dz + NO_TEACHER * V, V));
                assert_true(all_of(IS_FINITE, c.dz + NO_STUDENT * V, V));
                assert_true(all_of(forward ? IS_FINITE : IS_ZERO, c.dz + NO_STUDENT * V + 4, 4));
                assert_true(all_of(IS_FINITE, c.dz + NEITHER * V, V));
                assert_true(all_of(IS_ZERO, c.dz + NEITHER * V + 4, 4));
                assert_true(all_of(forward ? IS_FINITE : IS_ZERO, c.dz + APART * V, 8));
                assert_true(
                    all_of(forward || finite ? IS_FINITE : IS_NAN, c.dz + APART * V + 8, V - 8));
                assert_true(all_of(IS_NAN, c.dz + NAN_ROW * V, V));
                assert_true(all_of(IS_ZERO, c.dz + LEFT_OUT * V, V));
            }
}

/* From column 2 on both sides have e^-800 of the largest, which is 0; there student or teacher have
 * nothing in some columns. What is left is alike. */
T_CASE(shards_without_mass_add_nothing)
{
    uint64_t rng = t_seed() + 25;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (colo_divergence_t kind = COLO_DIVERGENCE_FORWARD_KL;
                 kind <= COLO_DIVERGENCE_ACCEPTANCE; kind++) {
                distill_case_init(&c, worlds[w], 2, V, false, loss_dtypes[d], loss_dtypes[d], 2,
                                  &rng);
                distill_case_diverge(&c, kind, 0.25);
                for (int i = 0; i < 2 * V; i++)
                    c.z[i] = c.w[i] = i % V < 2 ? 0 : -800;
                for (int j = 3; j < V; j += 2)
                    c.z[j] = c.w[V + j] = -INFINITY;
                c.no_ce = true;
                assert_ok(run());
                for (int r = 0; r < worlds[w]; r++)
                    for (int t = 0; t < 2; t++)
                        if (c.out[r][1][t] != 0)
                            fail_msg("W %d, %s, divergence %d, token %d: %.9g, expected 0",
                                     worlds[w], colo_dtype_name(loss_dtypes[d]), (int)kind, t,
                                     c.out[r][1][t]);
                assert_true(all_of(IS_ZERO, c.dz, 2 * V));
            }
}

/* The divergence is infinite and has no gradient; without an upstream gradient of it that costs the
 * cross entropy, which is finite, nothing. */
T_CASE(an_infinite_divergence_leaves_the_gradient_of_cross_entropy)
{
    uint64_t rng = t_seed() + 26;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int none = 0; none < 2; none++) {
                distill_case_init(&c, worlds[w], 1, V, false, loss_dtypes[d], loss_dtypes[d], 2,
                                  &rng);
                distill_case_diverge(&c, COLO_DIVERGENCE_REVERSE_KL, 0.5);
                c.w[5] = -INFINITY;
                c.no_kl = none;
                c.up[0][0] = 1;
                c.up[1][0] = 0;
                assert_ok(run());
                assert_true(isfinite(c.out[0][0][0]) && c.out[0][1][0] == INFINITY);
                assert_true(all_of(IS_FINITE, c.dz, V));
                assert_true(c.dz[5] > 0);
            }
}

/* One side has columns 0 and 1 alone, the other all four. With b the small one of beta and 1 -
 * beta, to first order in b: where the side that m is almost all of lacks two columns, m is b / 4
 * there, D = b (log(1/b) + log(1/2) + 1) / 2; else D = b log 2. */
T_CASE(a_beta_next_to_0_or_1_keeps_its_digits)
{
    uint64_t rng = t_seed() + 27;
    enum { V = 4 };
    for (int w = 0; w < 3; w++)
        for (int d = 0; d < 4; d++)
            for (int i = 0; i < 4; i++) {
                const bool near_1 = i % 2, student = i / 2; /* who has two columns */
                const double b = near_1 ? 0x1p-53 : 0x1p-60, beta = near_1 ? 1 - b : b;
                distill_case_init(&c, worlds[w], 1, V, false, loss_dtypes[d], loss_dtypes[d], 2,
                                  &rng);
                distill_case_diverge(&c, COLO_DIVERGENCE_JSD, beta);
                for (int j = 0; j < V; j++) {
                    c.z[j] = student && j >= 2 ? -INFINITY : 0;
                    c.w[j] = !student && j >= 2 ? -INFINITY : 0;
                }
                c.no_ce = true;
                c.up[1][0] = 1;
                assert_ok(run());
                const double want =
                    student != near_1 ? b * (log(1 / b) + log(0.5) + 1) / 2 : b * log(2);
                if (!(fabs(c.out[0][1][0] - want) <= 1e-5 * want))
                    fail_msg("W %d, %s, beta %g, %s has two columns: %.9g, expected %.9g",
                             worlds[w], colo_dtype_name(loss_dtypes[d]), beta,
                             student ? "student" : "teacher", c.out[0][1][0], want);
                assert_true(all_of(IS_FINITE, c.dz, V));
            }
}

T_CASE(a_student_that_is_its_teacher_diverges_by_0)
{
    uint64_t rng = t_seed() + 24;
    for (int w = 0; w < 4; w++)
        for (colo_divergence_t kind = COLO_DIVERGENCE_FORWARD_KL;
             kind <= COLO_DIVERGENCE_ACCEPTANCE; kind++)
            for (shard_kind_t shard = 0; shard < SHARD_KINDS; shard++) {
                distill_case_init(&c, worlds[w], 4, 40, false, COLO_BF16, COLO_BF16, 3, &rng);
                loss_case_shard(&c.shape, shard);
                distill_case_diverge(&c, kind, 0.5);
                memcpy(c.w, c.z, sizeof c.w);
                c.no_ce = true;
                assert_ok(run());
                for (int t = 0; t < 4; t++)
                    assert_true(c.out[0][1][t] == 0);
                assert_true(kind == COLO_DIVERGENCE_FORWARD_KL || all_of(IS_ZERO, c.dz, 4 * 40));
            }
}

T_CASE(no_tokens_still_join_the_gather)
{
    uint64_t rng = t_seed() + 7;
    for (int w = 0; w < 4; w++)
        for (int kind = 0; kind < 3; kind++) {
            distill_case_init(&c, worlds[w], 0, 10, false, COLO_F32, COLO_F32, 2, &rng);
            distill_case_diverge(&c, (colo_divergence_t)kind, 0.5);
            assert_ok(run());
            distill_case_compare(&c, "no tokens");
        }
}

/* ---- gradient ---- */

static double weighted(int64_t t)
{
    return c.up[c.no_ce][t] * c.out[0][c.no_ce][t];
}

T_CASE(the_gradient_is_the_central_difference)
{
    uint64_t rng = t_seed() + 8;
    for (int probs = 0; probs < 2; probs++)
        for (int which = 0; which < 2; which++) {
            distill_case_init(&c, 2, 3, 12, probs, COLO_F64, COLO_F64, 2, &rng);
            loss_case_shard(&c.shape, SHARD_UNEVEN);
            c.config.logits.softcap = 3;
            c.config.logits.temperature = 0.7;
            distill_case_heat(&c, true, !probs);
            c.no_ce = which;
            c.no_kl = !which;
            gather_central(&c.shape, c.z, c.dz, run, weighted);
        }
    for (colo_divergence_t kind = COLO_DIVERGENCE_REVERSE_KL; kind <= COLO_DIVERGENCE_ACCEPTANCE;
         kind++) {
        distill_case_init(&c, 2, 3, 12, false, COLO_F64, COLO_F64, 2, &rng);
        distill_case_diverge(&c, kind, 0.2);
        loss_case_shard(&c.shape, SHARD_UNEVEN);
        c.config.target_temperature = 1.3;
        distill_case_heat(&c, kind % 2, kind != COLO_DIVERGENCE_JSD);
        c.no_ce = true;
        gather_central(&c.shape, c.z, c.dz, run, weighted);
    }
}

T_MAIN_IF(where.need(), "loss/distill")
