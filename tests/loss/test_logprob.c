/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_logprob.c - outputs and gradients against the fp64 oracle: every combination of options, all
 * dtypes, all ways to cut the vocabulary. The tolerance is derived in loss_case.c.
 */
#include "loss/gather_case.h"

enum { EVERY = 255 | WITH_LSE | WITH_MORE | WITH_HEAT };
static const int32_t worlds[] = {1, 2, 3, 4, 8};
static const char *const kinds[] = {"even", "uneven", "empty", "padded"};

static loss_case_t made(int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype,
                        double spread, shard_kind_t kind, unsigned bits, uint64_t *rng)
{
    loss_case_t c;
    loss_case_init(&c, ranks, tokens, vocab, dtype, spread, rng);
    loss_case_shard(&c, kind);
    loss_options(&c.config, bits);
    return c;
}

static void describe(loss_case_t *c, const char *what)
{
    snprintf(c->label, sizeof c->label, "%s (W=%d T=%d V=%d %s)", what, c->ranks, (int)c->tokens,
             (int)c->vocab, colo_dtype_name(c->dtype));
}

/* Also: one gather forward, and none backward */
static void compare(loss_case_t *c)
{
    loss_case_compare(c, c->label);
    gather_check(c, c->label);
}

static void run_and_compare(loss_case_t *c, const char *what)
{
    describe(c, what);
    assert_ok(loss_case_run(c));
    compare(c);
}

static void compare_later(loss_case_t *c, const char *what)
{
    describe(c, what);
    loss_case_later(c, compare);
}

T_CASE(every_combination_of_options_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    for (unsigned bits = 0; bits < 256; bits++)
        for (size_t w = 0; w < 5; w++) {
            shard_kind_t kind = (bits + w) % SHARD_KINDS;
            const unsigned more = (bits + w) % 4 / 2 * WITH_LSE | (bits + w) % 3 / 2 * WITH_MORE |
                                  (bits + w) % 5 / 3 * WITH_HEAT;
            loss_case_t c =
                made(worlds[w], 5, 23, loss_dtypes[(bits / 4 + w) % 2], 3, kind, bits | more, &rng);
            compare_later(&c, t_text("options %02x, %s shards", bits, kinds[kind]));
        }
    t_run_rest();
}

T_CASE(every_way_to_cut_the_vocabulary_works_for_every_dtype)
{
    uint64_t rng = t_seed() + 1;
    for (size_t w = 0; w < 5; w++)
        for (size_t d = 0; d < 4; d++)
            for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                loss_case_t c =
                    made(worlds[w], 6, 41, loss_dtypes[d], 4, kind, EVERY & ~WITH_TAU, &rng);
                c.row_gap = 3;
                compare_later(&c, kinds[kind]);
            }
    t_run_rest();
}

T_CASE(a_vocabulary_smaller_than_the_group_leaves_ranks_empty)
{
    uint64_t rng = t_seed() + 2;
    for (int64_t vocab = 1; vocab <= 3; vocab++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            T_ENDS(loss_case_free)
            loss_case_t c = made(8, 4, vocab, COLO_F64, 2, kind,
                                 EVERY & ~(vocab == 1 ? WITH_MEGATRON : 0), &rng);
            run_and_compare(&c, "tiny vocabulary");
        }
}

T_CASE(rows_longer_than_a_tile_rescale_as_the_maximum_grows)
{
    uint64_t rng = t_seed() + 3;
    for (size_t d = 0; d < 4; d++) {
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, 2, 3, 2311, loss_dtypes[d], 1, &rng);
        for (int64_t j = 0; j < c.vocab;
             j++) /* row 0 climbs, row 1 falls, row 2 jumps at the end */
            for (int64_t t = 0; t < 3; t++) {
                double drift = (double)j / 100, jump = j > 2300 ? 40 : 0;
                double *z = &c.z[t * c.vocab + j];
                *z = loss_round(c.dtype, *z + (t == 0 ? drift : t == 1 ? -drift : jump));
            }
        loss_options(&c.config, EVERY & ~WITH_CAP);
        run_and_compare(&c, "long rows");
        /* the cap makes ties in fp32 that fp64 does not have */
        loss_options(&c.config, 255 & ~WITH_CORRECT);
        run_and_compare(&c, "long rows, capped");
    }
}

T_CASE(ignored_and_invalid_targets_are_counted_and_contained)
{
    uint64_t rng = t_seed() + 4;
    static const int64_t odd[] = {-100, 19, -1, 1000, -100, INT64_MAX, INT64_MIN, 18, 0};
    for (size_t w = 0; w < 5; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            T_ENDS(loss_case_free)
            loss_case_t c = made(worlds[w], 9, 19, COLO_F32, 3, kind, EVERY, &rng);
            memcpy(c.targets, odd, sizeof odd);
            run_and_compare(&c, "odd targets");
            assert_int_equal(c.n_valid[0], 2);
            assert_int_equal(c.n_invalid[0], 5);
        }
}

T_CASE(an_invalid_target_leaves_the_entropy_gradient_alone)
{
    uint64_t rng = t_seed() + 5;
    T_ENDS(loss_case_free)
    loss_case_t c = made(2, 3, 12, COLO_F64, 3, SHARD_EVEN, WITH_ENTROPY | WITH_LOSS, &rng);
    c.targets[1] = 12;
    c.no_up[0] = c.no_up[2] = true;
    run_and_compare(&c, "entropy only");
}

T_CASE(lenient_targets_have_no_target_term)
{
    uint64_t rng = t_seed() + 7;
    static const int64_t odd[] = {-100, 19, -1, 1000, -100, INT64_MAX, INT64_MIN, 18, 0};
    static const int64_t ignored[] = {-100, 18, INT64_MIN};
    for (size_t w = 0; w < 5; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
            for (int dtype = COLO_F32; dtype <= COLO_F16; dtype++) {
                loss_case_t c = made(worlds[w], 9, 19, (colo_dtype_t)dtype, 3, kind,
                                     EVERY & ~(kind & 1 ? 0 : WITH_CAP), &rng);
                memcpy(c.targets, odd, sizeof odd);
                c.config.lenient_targets = true;
                c.config.ignore_index = ignored[kind % 3];
                compare_later(&c, "lenient targets");
            }
    t_run_rest();
}

/* (3000 + z) / 0.7 is not on the grid of fp32, in which M is rounded. */
T_CASE(lenient_targets_stand_at_the_maximum_before_it_is_rounded)
{
    uint64_t rng = t_seed() + 9;
    for (size_t w = 0; w < 5; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            T_ENDS(loss_case_free)
            loss_case_t c =
                made(worlds[w], 6, 19, COLO_F32, 3, kind, WITH_ENTROPY | WITH_LOSS, &rng);
            for (int64_t i = 0; i < 6 * 19; i++)
                c.z[i] = floor(c.z[i] * 2048) / 2048 + 3000;
            c.targets[1] = -1;
            c.targets[4] = 19;
            c.config.lenient_targets = true;
            c.config.logits.temperature = 0.7;
            run_and_compare(&c, "lenient targets at an offset");
        }
}

/* NaN is not forgiven. */
T_CASE(leniency_forgives_targets_only)
{
    uint64_t rng = t_seed() + 8;
    T_ENDS(loss_case_free)
    loss_case_t c = made(2, 3, 12, COLO_F32, 3, SHARD_EVEN, WITH_ENTROPY | WITH_LOSS, &rng);
    c.targets[1] = -1;
    c.z[1 * 12 + 7] = NAN;
    c.config.lenient_targets = true;
    assert_int_equal(loss_case_run(&c), COLO_OK);
    for (int k = 0; k < 3; k++)
        assert_true(isnan(c.out[0][k][1]) && !isnan(c.out[0][k][0]));
    assert_true(isnan(c.dz[12]) && !isnan(c.dz[0]));
}

T_CASE(an_ignore_index_inside_the_vocabulary_is_ignored)
{
    uint64_t rng = t_seed() + 6;
    for (int64_t index = 0; index < 4; index++) {
        T_ENDS(loss_case_free) loss_case_t c = made(3, 8, 10, COLO_F32, 3, SHARD_EVEN, 255, &rng);
        for (int t = 0; t < 8; t++)
            c.targets[t] = t % 4;
        c.config.ignore_index = index;
        run_and_compare(&c, "pad token");
        assert_int_equal(c.n_valid[2], 6);
    }
}

T_CASE(nothing_valid_and_nothing_at_all_still_join_the_gather)
{
    uint64_t rng = t_seed() + 7;
    for (int64_t tokens = 0; tokens <= 4; tokens += 4) {
        T_ENDS(loss_case_free)
        loss_case_t c = made(4, tokens, 16, COLO_F32, 3, SHARD_EVEN, 255, &rng);
        for (int t = 0; t < tokens; t++)
            c.targets[t] = -100;
        run_and_compare(&c, "n_valid = 0");
    }
}

T_CASE(gradients_that_are_left_out_count_as_zero)
{
    uint64_t rng = t_seed() + 8;
    for (unsigned left = 0; left < 1u << LOSS_UPS; left++) {
        T_ENDS(loss_case_free) loss_case_t c = made(2, 4, 15, COLO_F64, 3, SHARD_EVEN, EVERY, &rng);
        for (int k = 0; k < LOSS_UPS; k++)
            c.no_up[k] = left >> k & 1;
        run_and_compare(&c, "left out");
    }
}

T_CASE(the_gradient_in_place_has_the_bits_of_the_one_apart)
{
    uint64_t rng = t_seed() + 9;
    for (size_t d = 0; d < 4; d++) {
        T_ENDS(loss_case_free)
        loss_case_t c = made(3, 5, 20, loss_dtypes[d], 3, SHARD_PADDED, 255, &rng);
        c.row_gap = 2;
        run_and_compare(&c, "apart");
        T_ENDS(loss_case_free) loss_case_t in_place;
        loss_case_take(&in_place, &c, 0, 5);
        in_place.in_place = true;
        run_and_compare(&in_place, "in place");
        loss_case_same(&in_place, &c, 0, "in place");
    }
}

T_CASE(a_tie_is_won_by_the_lowest_index_on_any_rank)
{
    uint64_t rng = t_seed() + 10;
    for (size_t w = 0; w < 5; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            T_ENDS(loss_case_free)
            loss_case_t c =
                made(worlds[w], 4, 16, COLO_F32, 1, kind, WITH_CORRECT | WITH_MORE, &rng);
            for (int t = 0; t < 4; t++)
                c.z[t * 16 + 5] = c.z[t * 16 + 6] = c.z[t * 16 + 13] = 9;
            c.targets[0] = 5;
            c.targets[1] = 6;
            c.targets[2] = 13;
            c.targets[3] = 0;
            assert_ok(loss_case_run(&c));
            for (int r = 0; r < worlds[w]; r++) {
                assert_int_equal(c.correct[r][0], 1);
                assert_int_equal(c.correct[r][1] + c.correct[r][2] + c.correct[r][3], 0);
                for (int t = 0; t < 4; t++)
                    assert_int_equal(c.argmax[r][t], 5);
            }
        }
}

T_CASE(a_negative_scale_turns_the_argmax_round)
{
    uint64_t rng = t_seed() + 11;
    T_ENDS(loss_case_free) loss_case_t c = made(2, 30, 6, COLO_F64, 2, SHARD_EVEN, EVERY, &rng);
    c.config.logits.scale = -0.8;
    run_and_compare(&c, "negative scale");
}

T_CASE(a_temperature_of_each_token_is_that_of_all_where_they_are_alike)
{
    uint64_t rng = t_seed() + 31;
    for (size_t d = 0; d < 4; d++)
        for (int cap = 0; cap < 2; cap++) {
            T_ENDS(loss_case_free)
            loss_case_t c = made(2, 5, 40, loss_dtypes[d], 3, SHARD_UNEVEN,
                                 EVERY & ~(WITH_TAU | (cap ? 0 : WITH_CAP)), &rng);
            for (int t = 0; t < 5; t++)
                c.temperature[t] = 0.5;
            run_and_compare(&c, "each token's");
            T_ENDS(loss_case_free) loss_case_t all;
            loss_case_take(&all, &c, 0, 5);
            all.config.has_temperature = false;
            all.config.logits.temperature = 0.5;
            assert_ok(loss_case_run(&all));
            loss_case_same(&all, &c, 0, "that of all");
        }
}

/* On a GPU the host does not look at them: the row is NaN. */
T_CASE(a_temperature_that_is_none_is_refused)
{
    static const double none[] = {0, -1, INFINITY, NAN};
    uint64_t rng = t_seed() + 32;
    for (int i = 0; i < 4; i++) {
        T_ENDS(loss_case_free) loss_case_t c = made(1, 3, 12, COLO_F32, 3, SHARD_EVEN, EVERY, &rng);
        c.targets[2] = -100;
        c.temperature[2] = none[i]; /* of a token that is ignored nothing is read */
        assert_ok(loss_case_run(&c));
        assert_true(c.out[0][0][2] == 0 && all_of(IS_ZERO, c.dz + 24, 12));
        assert_true(all_of(IS_FINITE, c.dz, 24));
        c.temperature[1] = none[i];
        if (where.mem == COLO_MEM_HOST) {
            assert_fails(loss_case_run(&c), COLO_ERR_ARG,
                         t_text("temperature: token 1 has %g, expected finite and > 0", none[i]));
        } else {
            assert_ok(loss_case_run(&c));
            for (int t = 0; t < 3; t++)
                assert_true(isnan(c.out[0][0][t]) == (t == 1) && isnan(c.dz[t * 12]) == (t == 1));
        }
    }
}

T_CASE(ranks_with_other_temperatures_are_told)
{
    uint64_t rng = t_seed() + 33;
    T_ENDS(loss_case_free) loss_case_t c = made(3, 4, 12, COLO_F32, 3, SHARD_EVEN, EVERY, &rng);
    c.odd_rank = true;
    if (where.mem == COLO_MEM_HOST)
        assert_fails(loss_case_run(&c), COLO_ERR_MISMATCH,
                     "rank 2 has other targets or temperatures of tokens than rank 0");
}

T_CASE(megatron_smoothing_is_not_pytorch_smoothing)
{
    uint64_t rng = t_seed() + 12;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 2, 1, 8, COLO_F64, 2, &rng);
    loss_options(&c.config, WITH_LOSS | WITH_SMOOTH);
    assert_ok(loss_case_run(&c));
    double pytorch = c.out[0][2][0];
    loss_options(&c.config, WITH_LOSS | WITH_SMOOTH | WITH_MEGATRON);
    assert_ok(loss_case_run(&c));
    double megatron = c.out[0][2][0], logp = c.out[0][0][0];
    /* loss is affine in e, and loss(0) = -logp: e' / e = V / (V - 1) = 8 / 7 */
    double ratio = (megatron + logp) / (pytorch + logp);
    assert_true(ratio > 8.0 / 7 - 1e-9 && ratio < 8.0 / 7 + 1e-9);
}

/* logp <= 0, entropy >= 0 and loss >= 0, and no -0 of the last two. */
static void signs_are_kept(loss_case_t *c)
{
    for (int64_t t = 0; t < c->tokens; t++) {
        const double logp = c->out[0][0][t], h = c->out[0][1][t], loss = c->out[0][2][t];
        if (!(logp <= 0 && h >= 0 && loss >= 0) || signbit(h) || signbit(loss))
            fail_msg("%s, %s, W %d, V %d: logp %.9g, entropy %.9g, loss %.9g", c->label,
                     colo_dtype_name(c->dtype), (int)c->ranks, (int)c->vocab, logp, h, loss);
    }
}

/* Targets of a probability near 1: rounding errors of the outputs are on both sides of 0. */
T_CASE(outputs_at_probability_one_keep_their_sign)
{
    static const int64_t vocabs[] = {1, 2, 16};
    static const struct {
        double offset, temperature, softcap, smoothing, z_loss;
    } options[] = {{0, 1, 0, 0, 0},        {0, 0.7, 0, 0.1, 0},      {5000, 1.3, 0, 0, 0.01},
                   {-5000, 0.7, 30, 0, 0}, {0, 1e-3, 50, 0.3, 0.01}, {30000, 1.3, 0, 0.1, 0}};
    uint64_t rng = t_seed() + 9;
    for (int i = 0; i < 360; i++) {
        const int option = i / 60 % 6;
        loss_case_t c;
        loss_case_init(&c, worlds[i % 5], 64, vocabs[i / 20 % 3], loss_dtypes[i % 4], 40, &rng);
        loss_case_shard(&c, (shard_kind_t)(i % 7 % SHARD_KINDS));
        snprintf(c.label, sizeof c.label, "case %d", i);
        c.config.want_entropy = c.config.want_loss = true;
        c.config.logits.temperature = options[option].temperature;
        c.config.logits.softcap = options[option].softcap;
        c.config.label_smoothing = options[option].smoothing;
        c.config.z_loss = options[option].z_loss;
        for (int64_t k = 0; k < c.tokens * c.vocab; k++) {
            int64_t *target = &c.targets[k / c.vocab];
            c.z[k] = loss_round(c.dtype, c.z[k] + options[option].offset);
            if (k % c.vocab == 0 || c.z[k] > c.z[k / c.vocab * c.vocab + *target])
                *target = k % c.vocab;
        }
        loss_case_later(&c, signs_are_kept);
    }
    t_run_rest();
}

/* In Megatron-LM's words: the losses of @rank and, by d_loss alone, the gradient of its columns. */
static void is_smoothed_alone(const loss_case_t *c, int rank)
{
    const ref_logprob_opts_t o = loss_case_opts(c, -1);
    const int64_t lo = c->start[rank],
                  end = lo + c->columns[rank] < c->vocab ? lo + c->columns[rank] : c->vocab;
    const double n = (double)(end - lo), e = c->config.label_smoothing * n / (n - 1);
    for (int64_t t = 0; t < c->tokens; t++) {
        const double *z = c->z + t * c->vocab, g = c->up[2][t];
        double mean = 0;
        ref_logprob_row_t ref;
        ref_logprob(&o, z, c->vocab, c->targets[t], &ref);
        for (int64_t j = lo; j < end; j++)
            mean += (z[j] - ref.lse) / n; /* of log p */
        const double want = (1 - e) * (ref.lse - z[c->targets[t]]) - e * mean;
        /* as in loss_case_compare(), where the loss is one of several outputs */
        const double u = c->dtype == COLO_F64 ? ((double)c->vocab + 16) * 0x1p-53 : 0x1p-24;
        const double tol = 4 * u * (1 + log((double)c->vocab) + ref.range + ref.top);
        if (!(fabs(c->out[rank][2][t] - want) <= tol + u * fabs(want)))
            fail_msg("rank %d, token %d: loss is %.12g, expected %.12g", rank, (int)t,
                     c->out[rank][2][t], want);
        for (int64_t j = lo; j < end; j++) {
            const double hit = j == c->targets[t] ? 1 - e : 0;
            const double dz = g * (exp(z[j] - ref.lse) - hit - e / n);
            if (!(fabs(c->dz[t * c->vocab + j] - dz) <= tol * fabs(g)))
                fail_msg("rank %d, token %d, column %d: gradient is %.12g, expected %.12g", rank,
                         (int)t, (int)j, c->dz[t * c->vocab + j], dz);
        }
    }
}

/* Also with smoothing 1 (WITH_ZLOSS), where the weight of the target is that of the z-loss alone */
T_CASE(class_weights_agree_with_the_oracle)
{
    uint64_t rng = t_seed() + 11;
    static const int64_t odd[] = {-100, 3, -1, 40, 8, 39};
    static const unsigned left_out[] = {0, WITH_SMOOTH, WITH_ZLOSS, WITH_CAP | WITH_ENTROPY,
                                        WITH_MEGATRON | WITH_TAU | WITH_CORRECT};
    for (size_t w = 0; w < 5; w++)
        for (size_t d = 0; d < 4; d++)
            for (int i = 0; i < 20; i++) {
                const shard_kind_t kind = (shard_kind_t)i % SHARD_KINDS;
                loss_case_t c = made(worlds[w], 6, 40, loss_dtypes[d], 4, kind,
                                     (255 | WITH_WEIGHTS) & ~left_out[i / 4], &rng);
                memcpy(c.targets, odd, sizeof odd); /* of 3 and 8 the weight is 0 */
                c.row_gap = i % 3;
                c.in_place = i % 2;
                compare_later(&c, t_text("weights, %s shards", kinds[kind]));
            }
    t_run_rest();
}

/* Whole runs of the device's kernels, and what is before and behind them */
T_CASE(class_weights_of_long_rows)
{
    uint64_t rng = t_seed() + 13;
    for (size_t d = 0; d < 4; d++)
        for (int cap = 0; cap < 2; cap++) {
            loss_case_t c =
                made(2, 3, 21011, loss_dtypes[d], 3, SHARD_UNEVEN,
                     WITH_SMOOTH | WITH_LOSS | WITH_WEIGHTS | (cap ? WITH_CAP : 0), &rng);
            c.targets[1] = 21010;
            c.row_gap = cap ? 3 : 0;
            compare_later(&c, "weights of long rows");
        }
    t_run_rest();
}

T_CASE(class_weights_of_1_change_no_bit_of_logp_and_entropy_and_0_leave_nothing)
{
    uint64_t rng = t_seed() + 12;
    for (size_t w = 0; w < 5; w++) {
        T_ENDS(loss_case_free)
        loss_case_t c = made(worlds[w], 5, 23, COLO_F32, 3, SHARD_UNEVEN, 255 & ~WITH_CAP, &rng);
        assert_ok(loss_case_run(&c));
        double logp[5], entropy[5];
        memcpy(logp, c.out[0][0], sizeof logp);
        memcpy(entropy, c.out[0][1], sizeof entropy);
        c.config.has_class_weight = true;
        for (int j = 0; j < 23; j++)
            c.class_weight[j] = 1;
        run_and_compare(&c, "weights of 1");
        assert_memory_equal(logp, c.out[0][0], sizeof logp);
        assert_memory_equal(entropy, c.out[0][1], sizeof entropy);
        memset(c.class_weight, 0, 23 * sizeof *c.class_weight);
        c.no_up[0] = c.no_up[1] = true;
        for (int j = 7; j < 20; j++) /* nor does -inf matter to what has no weight */
            c.z[j] = -INFINITY;
        c.targets[0] = 8;
        assert_ok(loss_case_run(&c));
        assert_true(all_of(IS_ZERO, c.out[0][2], 5) && all_of(IS_ZERO, c.weight[0], 5) &&
                    all_of(IS_ZERO, c.dz, 5 * 23));
    }
}

T_CASE(local_smoothing_is_over_a_ranks_own_columns)
{
    uint64_t rng = t_seed() + 10;
    for (int i = 0; i < 24; i++) {
        T_ENDS(loss_case_free) loss_case_t c;
        loss_case_init(&c, worlds[i % 3], 7, 60, i / 3 % 2 ? COLO_F64 : COLO_F32, 3, &rng);
        loss_case_shard(&c, i / 6 % 2 ? SHARD_PADDED : SHARD_UNEVEN);
        c.config.want_loss = c.config.local_smoothing = true;
        c.config.megatron_smoothing = i / 12;
        c.config.label_smoothing = 0.1;
        c.no_up[0] = c.no_up[1] = true;
        assert_ok(loss_case_run(&c));
        for (int r = 0; r < c.ranks; r++)
            is_smoothed_alone(&c, r);
    }
}

T_MAIN_IF(where.need(), "loss/logprob")
