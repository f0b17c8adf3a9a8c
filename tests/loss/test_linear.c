/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear.c - the lm_head path against the fp64 oracle: every option, every pair of them, all
 * modes, dtypes, ways to cut the vocabulary and the head. Tolerances are derived in
 * linear_compare.c. First the oracle itself, and with it that of logits, against its own outputs.
 */
#include "loss/linear_case.h"

static const char *const modes[] = {"logprob", "keep", "loss", "early"};
enum { MODES = 4 };

/* ---- the oracle ---- */

/* What the upstream gradients weigh. */
static double objective(const ref_linear_t *in)
{
    ref_linear_result_t r;
    ref_linear_alloc(in, &r);
    ref_linear(in, &r);
    const double sum = *in->g[0] * r.rows->logp + *in->g[1] * r.rows->entropy +
                       *in->g[2] * r.rows->loss + *in->g[3] * r.rows->lse;
    ref_linear_free(&r);
    return sum;
}

/* A central difference of step s errs by s^2/6 times the third derivative, here at most 1000 or so,
 * plus eps |f| / s, with |f| of order 100: some 2e-8 + 2e-9 of 1e-6. */
static bool is_slope(const ref_linear_t *in, double *x, double gradient)
{
    const double was = *x, step = 1e-5;
    *x = was + step;
    const double above = objective(in);
    *x = was - step;
    const double slope = (above - objective(in)) / (2 * step);
    *x = was;
    return fabs(slope - gradient) <= 1e-6 * (1 + fabs(gradient));
}

/* By options alone and together, and by one output and all. With one token d_bias is the gradient
 * of the logits, which is that of ref_logprob.h. */
T_CASE(the_oracle_is_its_own_central_difference)
{
    enum { WORDS = 11, HIDDEN = 3 };
    static const double weights[WORDS] = {0.5, 0, 2, 1, 0.25, 3, 0, 1.5, 0.75, 1, 2.5};
    static const ref_logprob_opts_t options[] = {
        {.temperature = 1, .scale = 1},
        {.temperature = 0.6, .scale = 1},
        {.temperature = 1, .scale = -1.7},
        {.temperature = 1, .scale = 1, .softcap = 2.5},
        {.temperature = 0.6, .scale = 1.3, .softcap = 2.5},
        {.temperature = 1, .scale = 1, .smoothing = 0.2},
        {.temperature = 1, .scale = 1, .smoothing = 0.2, .megatron = true},
        {.temperature = 1, .scale = 1, .z_loss = 0.05},
        {0.8, 1.2, 3, .smoothing = 0.1, .z_loss = 0.03, .megatron = true},
        {.temperature = 1, .scale = 1, .smoothing = 0.2, .z_loss = 0.05, .class_weight = weights},
    };
    static const double up[5][REF_UPS] = {
        {1}, {0, 1}, {0, 0, 1}, {0, 0, 0, 1}, {0.7, -1.3, 0.9, 0.4}};
    uint64_t rng = t_seed();
    for (int i = 0; i < 50; i++) {
        double h[HIDDEN], w[WORDS * HIDDEN], b[WORDS], *all[] = {h, w, b};
        const int64_t n[] = {HIDDEN, WORDS * HIDDEN, WORDS}, target = t_below(&rng, WORDS);
        const double *g = up[i % 5];
        ref_linear_t in = {options[i / 5],
                           1,
                           WORDS,
                           HIDDEN,
                           h,
                           w,
                           b,
                           &target,
                           NULL,
                           {&g[0], &g[1], &g[2], &g[3]},
                           NULL};
        ref_linear_result_t r;
        in.opts.ignore_index = -100;
        for (int k = 0; k < 3; k++)
            for (int64_t j = 0; j < n[k]; j++)
                all[k][j] = loss_normal(&rng);
        ref_linear_alloc(&in, &r);
        ref_linear(&in, &r);
        for (int k = 0; k < 3; k++)
            for (int64_t j = 0; j < n[k]; j++)
                if (!is_slope(&in, &all[k][j], (const double *[]){r.d_h, r.d_w, r.d_b}[k][j]))
                    fail_msg("options %d, output %d: element %d of %s", i / 5, i % 5, (int)j,
                             (const char *[]){"d_h", "d_w", "d_b"}[k]);
        ref_linear_free(&r);
    }
}

/* ---- the library ---- */

static void one(unsigned bits, int mode, int32_t ranks, int32_t replicas, colo_dtype_t dtype,
                shard_kind_t kind, int64_t chunk, uint64_t *rng)
{
    T_ENDS(linear_case_free) linear_case_t c;
    linear_case_init(&c, ranks, replicas, 7, 19, 5, dtype, rng);
    linear_case_shard(&c, kind);
    linear_case_options(&c, bits);
    linear_case_mode(&c, mode);
    c.config.logprob.chunk_size = chunk;
    c.prefill = 0.5;
    linear_case_judge(&c, 1, t_text("options %03x, %s, shards %d", bits, modes[mode], (int)kind));
}

T_CASE(every_option_and_pair_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    int nth = 0;
    for (int i = 0; i < LINEAR_OPTIONS; i++)
        for (int j = i; j < LINEAR_OPTIONS; j++)
            for (int mode = 0; mode < MODES; mode++, nth++) {
                /* of fewer, each option alone: the next case has all pairs in all modes */
                if ((i != j || mode != i % MODES) && t_left_out(nth))
                    continue;
                one(1u << i | 1u << j, mode, 1 << nth % 3, 2, nth / 3 % 2 ? COLO_F64 : COLO_F32,
                    nth % SHARD_KINDS, 1 + nth % 4, &rng);
            }
}

/* 1 / temperature is 2048 and 1/8, so that fp16 could hold neither gradient of logits times what
 * the other needs. */
T_CASE(temperatures_far_apart_cost_16_bits_no_digits)
{
    uint64_t rng = t_seed() + 12;
    for (int i = 0; i < 24; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 1 + i % 2, 1, 9, 40, 5, i / 2 % 2 ? COLO_F16 : COLO_BF16, &rng);
        linear_case_options(&c, WITH_LOSS | WITH_HEAT | LINEAR_IGNORED);
        linear_case_mode(&c, i / 4 % MODES);
        c.config.logprob.chunk_size = i < 16 ? 4 : 0;
        for (int t = 0; t < 9; t++)
            c.temperature[t] = t % 2 ? 8 : 0x1p-11;
        for (int k = 0; k < 9 * 5; k++) /* p is not 0 or 1 all the same */
            c.h[0][k] = loss_round(c.dtype, c.h[0][k] * (k / 5 % 2 ? 4 : 0x1p-9));
        linear_case_judge(&c, 1, t_text("temperatures far apart, %s", modes[i / 4 % MODES]));
    }
}

T_CASE(without_tokens_gradients_of_the_head_are_0)
{
    uint64_t rng = t_seed() + 11;
    for (int i = 0; i < 12; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_empty(&c, 1 + i % 2, i, &rng);
        linear_case_judge(&c, 1, "no tokens");
    }
}

T_CASE(all_options_at_once_agree_on_every_world)
{
    static const int32_t worlds[][2] = {{1, 1}, {2, 1}, {4, 1}, {8, 1},
                                        {1, 8}, {2, 4}, {4, 2}, {3, 2}};
    uint64_t rng = t_seed() + 1;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
            for (int mode = 0; mode < MODES; mode++)
                if (!T_LEFT_OUT({(int64_t)w, sizeof worlds / sizeof *worlds}, {kind, SHARD_KINDS},
                                {mode, MODES}))
                    one((1u << LINEAR_OPTIONS) - 1, mode, worlds[w][0], worlds[w][1], COLO_F32,
                        kind, 2, &rng);
}

/* Half-precision heads, with logits in either dtype and gradients stored or added. */
T_CASE(every_dtype_agrees_in_every_mode)
{
    uint64_t rng = t_seed() + 2;
    for (int d = 0; d < 4; d++)
        for (int bits = 0; bits < 8; bits++)
            for (int mode = 0; mode < MODES; mode++) {
                if (T_LEFT_OUT({d, 4}, {bits & 1, 2}, {bits >> 1 & 1, 2}, {bits >> 2, 2},
                               {mode, MODES}))
                    continue;
                T_ENDS(linear_case_free) linear_case_t c;
                linear_case_init(&c, 1 + bits % 3, 2, 9, 21, 6, loss_dtypes[d], &rng);
                linear_case_shard(&c, bits % SHARD_KINDS);
                linear_case_options(&c, WITH_ENTROPY | WITH_LOSS | LINEAR_BIAS | LINEAR_IGNORED |
                                            (bits & 1 ? LINEAR_SHARDED : 0));
                linear_case_mode(&c, mode);
                c.config.logprob.chunk_size = 4;
                if (bits & 2)
                    c.config.logits_dtype = loss_dtypes[d];
                if (bits & 4) {
                    c.config.d_weight_dtype = loss_dtypes[d];
                    c.config.d_weight_add = false;
                    c.prefill = 7; /* replaced */
                }
                linear_case_judge(&c, 1, bits & 4 ? "stored gradients" : "added gradients");
            }
}

T_CASE(upstream_gradients_of_any_size_are_right_in_half_precision)
{
    uint64_t rng = t_seed() + 13;
    for (int i = 0; i < 48; i++) {
        if (T_LEFT_OUT({i % 2, 2}, {i / 2 % MODES, MODES}, {i / 8 % 3, 3}, {i / 24, 2}))
            continue;
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_upstream(&c, 2, i, &rng);
        linear_case_judge(&c, 1, "upstream far from 1");
    }
}

/* With a LoRA: whatever begins where, in every dtype, also over blocks of columns and joined
 * chunks. */
T_CASE(a_lora_agrees_with_the_oracle_in_every_mode)
{
    static const int64_t sizes[][3] = {{9, 21, 6}, {5, 20011, 3}, {1500, 7, 3}};
    uint64_t rng = t_seed() + 15;
    for (int i = 0; i < 3 * 4 * MODES; i++) {
        const int mode = i % MODES, d = i / MODES % 4, size = i / MODES / 4;
        if (T_LEFT_OUT({size, 3}, {d, 4}, {mode, MODES}))
            continue;
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 1 + (i + size) % 2, 1, sizes[size][0], sizes[size][1], sizes[size][2],
                         loss_dtypes[d], &rng);
        linear_case_options(&c,
                            WITH_ENTROPY | WITH_LOSS | LINEAR_BIAS | LINEAR_IGNORED | LINEAR_LORA);
        linear_case_mode(&c, mode);
        c.config.d_hidden = (colo_d_hidden_t)(i % 2);
        c.config.frozen_weight = i / 2 % 2;
        c.config.d_weight_add = i / 4 % 2;
        c.config.d_weight_dtype = c.config.d_weight_add ? c.config.d_weight_dtype : c.dtype;
        if (size == 0)
            c.config.logprob.chunk_size = 4;
        if (size == 2)
            c.config.budget = 1; /* chunks of 512 rows */
        if (d % 2)
            c.config.logits_dtype = c.dtype;
        linear_case_judge(&c, 1, t_text("a LoRA, %s", modes[mode]));
    }
}

T_CASE(d_hidden_is_summed_as_asked)
{
    uint64_t rng = t_seed() + 3;
    for (int32_t w = 1; w <= 4; w *= 2) {
        linear_case_t c[6 * MODES];
        int n = 0;
        for (int how = COLO_D_HIDDEN_PARTIAL; how <= COLO_D_HIDDEN_REDUCE_SCATTER; how++)
            for (int mode = 0; mode < MODES; mode++)
                for (int d = 0; d < 2; d++, n++) {
                    linear_case_init(&c[n], w, 2, 8, 19, 5, d ? COLO_BF16 : COLO_F32, &rng);
                    linear_case_shard(&c[n], SHARD_UNEVEN);
                    linear_case_options(&c[n], LINEAR_IGNORED | WITH_ENTROPY | LINEAR_SHARDED);
                    linear_case_mode(&c[n], mode);
                    c[n].config.logprob.chunk_size = 3;
                    c[n].config.d_hidden = (colo_d_hidden_t)how;
                }
        linear_case_judge(c, n, "d_hidden");
        for (int i = 0; i < n; i++) {
            const colo_d_hidden_t how = c[i].config.d_hidden;
            for (int r = 0; r < 2 * w; r++)
                assert_int_equal(
                    c[i].tp_all[r].ops[how == COLO_D_HIDDEN_ALL_REDUCE
                                           ? COLO_OP_ALL_REDUCE
                                           : COLO_OP_REDUCE_SCATTER][COLO_CATEGORY_LOSS],
                    how != COLO_D_HIDDEN_PARTIAL);
            linear_case_free(&c[i]);
        }
    }
}

T_CASE(a_support_takes_the_vocabularys_place)
{
    uint64_t rng = t_seed() + 14;
    for (int i = 0; i < 36; i++) {
        if (T_LEFT_OUT({i % 4, 4}, {i / 4 % MODES, MODES}, {i / 12, 3}))
            continue;
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_listed(&c, 1 + i % 3, 2, i, &rng);
        linear_case_judge(&c, 1, "lists");
    }
}

T_CASE(what_is_frozen_gets_no_gradient)
{
    uint64_t rng = t_seed() + 4;
    for (int bits = 1; bits < 8; bits++)
        for (int mode = 0; mode < MODES; mode++)
            for (int sharded = 0; sharded < 2; sharded++) {
                T_ENDS(linear_case_free) linear_case_t c;
                linear_case_init(&c, 2, 2, 8, 19, 5, COLO_F32, &rng);
                linear_case_options(&c, LINEAR_BIAS | LINEAR_LORA | (sharded ? LINEAR_SHARDED : 0));
                linear_case_mode(&c, mode);
                c.config.logprob.chunk_size = 3;
                c.config.frozen_hidden = bits & 1;
                c.config.frozen_weight = bits & 2;
                c.config.frozen_lora = bits & 4;
                c.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
                linear_case_judge(&c, 1, "frozen");
                for (int r = 0; r < 4; r++)
                    assert_int_equal(c.head_all[r].ops[COLO_OP_REDUCE_SCATTER][COLO_CATEGORY_HEAD],
                                     sharded && !(bits & 2));
                for (int r = 0; r < 4; r++) /* of hidden, and of A */
                    assert_int_equal(c.tp_all[r].ops[COLO_OP_ALL_REDUCE][COLO_CATEGORY_LOSS],
                                     !(bits & 1) + !(bits & 4));
            }
}

/* Four of nine tokens count: products over 9, 6 or 4 rows give the same bits. */
T_CASE(a_bound_on_valid_tokens_changes_no_bit)
{
    static const int64_t bounds[] = {-1, 9, 6, 4};
    uint64_t seed = t_seed() + 5;
    for (int mode = 0; mode < MODES; mode++) {
        linear_case_t all[4];
        for (int i = 0; i < 4; i++) {
            uint64_t rng = seed;
            linear_case_init(&all[i], 2, 1, 9, 19, 5, COLO_F32, &rng);
            linear_case_options(&all[i], WITH_ENTROPY | WITH_LOSS | LINEAR_BIAS | WITH_CORRECT);
            linear_case_mode(&all[i], mode);
            for (int64_t t = 0; t < 9; t++)
                if (t != 1 && t != 3 && t != 4 && t != 8)
                    all[i].targets[0][t] = -100;
            all[i].max_valid = bounds[i];
            linear_case_judge(&all[i], 1, "max_valid");
            assert_true(linear_case_same(&all[0], &all[i], true));
        }
        for (int i = 0; i < 4; i++)
            linear_case_free(&all[i]);
    }
}

/* One case over modes and chunk sizes; d_weight is summed by chunk, so only there bits may move.
 * Also over more rows than products take at once. */
static void modes_and_chunks(int k)
{
    enum { CHUNKS = 5 };
    static const struct {
        colo_dtype_t dtype;
        int32_t ranks;
        int64_t tokens, vocab, hidden, chunks[CHUNKS];
    } of[] = {
        {COLO_F32, 1, 11, 150, 140, {0, 1, 3, 4, 11}},
        {COLO_F32, 2, 11, 150, 140, {0, 1, 3, 4, 11}},
        {COLO_F64, 1, 11, 150, 140, {0, 1, 3, 4, 11}},
        {COLO_F64, 2, 11, 150, 140, {0, 1, 3, 4, 11}},
        {COLO_BF16, 1, 11, 150, 140, {0, 1, 3, 4, 11}},
        {COLO_BF16, 2, 11, 150, 140, {0, 1, 3, 4, 11}},
        {COLO_F32, 1, 150, 19, 12, {0, 7, 60, 128, 129}},
    };
    uint64_t seed = t_seed() + 6;
    for (; k < 7; k++) {
        linear_case_t c[CHUNKS * MODES];
        if (t_scaled(100) < 100 && k % 4 != 2)
            continue;
        for (int i = 0; i < CHUNKS * MODES; i++) {
            uint64_t rng = seed;
            linear_case_init(&c[i], of[k].ranks, 1, of[k].tokens, of[k].vocab, of[k].hidden,
                             of[k].dtype, &rng);
            linear_case_shard(&c[i], SHARD_UNEVEN);
            linear_case_options(&c[i], 255 | LINEAR_BIAS | LINEAR_IGNORED);
            linear_case_mode(&c[i], i / CHUNKS);
            c[i].config.logprob.chunk_size = of[k].chunks[i % CHUNKS];
        }
        linear_case_judge(c, CHUNKS * MODES, "modes and chunks");
        for (int i = 0; i < CHUNKS * MODES; i++)
            assert_true(linear_case_same(&c[0], &c[i], i % CHUNKS == 0));
        for (int i = 0; i < CHUNKS * MODES; i++)
            linear_case_free(&c[i]);
    }
}

T_CASE(modes_and_chunks_change_no_bit_but_those_of_d_weight)
{
    modes_and_chunks(0);
}

/* Products of gradients take three chunks of 512 rows, then two; chunks of f64 or 16-bit logits
 * have as many bytes. With a chunk size they take one each, and so they do on one rank where d_logits
 * are over the logits. */
T_CASE(joined_chunks_change_no_bit_but_those_of_d_weight)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_BF16};
    uint64_t seed = t_seed() + 13;
    for (int i = 0; i < 8; i++) {
        linear_case_t c[2];
        for (int k = 0; k < 2; k++) {
            uint64_t rng = seed;
            linear_case_init(&c[k], 1 + i % 2, 1, 2300, 7, 3, dtypes[i / 2], &rng);
            linear_case_options(&c[k], LINEAR_BIAS | LINEAR_IGNORED | WITH_ENTROPY |
                                           (i == 1 ? LINEAR_SHARDED : 0));
            linear_case_mode(&c[k], 2);
            c[k].config.logits_dtype = i / 2 == 3 ? COLO_BF16 : c[k].config.logits_dtype;
            c[k].config.budget = 1;
            c[k].config.logprob.chunk_size = k ? 600 : 0;
            c[k].prefill = 0.5;
        }
        linear_case_judge(c, 2, "joined chunks");
        assert_int_equal(c[0].chunks[0], i % 2 == 0 && i / 2 != 2 ? 2
                                         : i / 2 == 1             ? 9
                                         : i / 2 == 3             ? 3
                                                                  : 5);
        assert_true(linear_case_same(&c[0], &c[1], false));
        linear_case_free(&c[0]);
        linear_case_free(&c[1]);
    }
}

T_CASE(a_sharded_head_gives_the_bits_of_a_resident_one)
{
    uint64_t seed = t_seed() + 7;
    for (int32_t dp = 1; dp <= 8; dp++) { /* 13 rows over 8 ranks: two each, one, none */
        linear_case_t c[16 * MODES];
        if (t_scaled(100) < 100 && dp > 3 && dp < 8)
            continue;
        for (int i = 0; i < 16 * MODES; i++) {
            const int bits = i / 2 % 8, mode = i / 16;
            uint64_t rng = seed;
            linear_case_init(&c[i], 1, dp, 6, 13, 5, bits & 4 ? COLO_BF16 : COLO_F32, &rng);
            linear_case_options(&c[i], WITH_ENTROPY | LINEAR_IGNORED |
                                           (bits & 1 ? LINEAR_BIAS : 0) |
                                           (i % 2 ? LINEAR_SHARDED : 0));
            linear_case_mode(&c[i], mode);
            c[i].config.logprob.chunk_size = 4;
            c[i].start_early = i % 2 && bits & 2;
            c[i].checkpoint = bits & 2 && mode != 2;
        }
        linear_case_judge(c, 16 * MODES, "resident and sharded");
        for (int i = 0; i < 16 * MODES; i += 2) {
            assert_true(linear_case_same(&c[i], &c[i + 1], true));
            linear_case_free(&c[i]);
            linear_case_free(&c[i + 1]);
        }
    }
}

T_CASE(auto_keeps_logits_that_fit_the_budget)
{
    uint64_t rng = t_seed() + 8;
    colo_comm_t *self = t_self();
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    size_t bytes = 0;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = 1000, .hidden = 8};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true,
                                       .budget = 100 * 4096};
    T_ENDS(linear_case_free) linear_case_t c;
    lc.logprob.logits.vocab = 1000; /* 4096 bytes a row */
    assert_ok(colo_lm_head_create(&head, &hc, NULL));
    assert_ok(colo_linear_logprob_create(&linear, &lc, head, self));
    assert_int_equal(colo_linear_logprob_mode(linear, 100), COLO_LINEAR_LOGPROB_KEEP);
    assert_int_equal(colo_linear_logprob_mode(linear, 101), COLO_LINEAR_LOGPROB_LOGPROB);
    /* never below 2048 by itself; above, chunks of about the same size */
    assert_int_equal(colo_linear_logprob_chunk(linear, 2000), 2000);
    assert_int_equal(colo_linear_logprob_chunk(linear, 8192), 2048);
    assert_int_equal(colo_linear_logprob_chunk(linear, 4100), 1408); /* three: 1367, rounded up */
    assert_int_equal(colo_linear_logprob_chunk(linear, INT64_MAX), 2048); /* no sum overflows */
    lc.logprob.chunk_size = 4;
    colo_linear_logprob_t *small = NULL;
    assert_ok(colo_linear_logprob_create(&small, &lc, head, self));
    assert_int_equal(colo_linear_logprob_chunk(small, 5), 4);
    assert_int_equal(colo_linear_logprob_chunk(small, 1), 1);
    assert_int_equal(colo_linear_logprob_chunk(small, 0), 0);
    colo_linear_logprob_destroy(&small);
    for (int pass = 0; pass < 4; pass++)
        assert_fails(colo_linear_logprob_workspace_size(linear, (colo_linear_logprob_pass_t)pass,
                                                        INT64_MAX, -1, &bytes),
                     COLO_ERR_ARG, "passes 2^63 bytes");
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    linear_case_init(&c, 2, 1, 7, 19, 5, COLO_F32, &rng);
    c.config.mode = COLO_LINEAR_LOGPROB_AUTO;
    linear_case_judge(&c, 1, "auto");
}

/* Replicas of one sharded head are in the same pass, whatever each has to multiply. */
T_CASE(replicas_that_keep_and_that_do_not_gather_alike)
{
    uint64_t rng = t_seed() + 11;
    for (int frozen = 0; frozen < 2; frozen++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 1, 2, 9, 19, 5, COLO_F32, &rng);
        linear_case_options(&c, WITH_ENTROPY | LINEAR_BIAS | LINEAR_SHARDED);
        c.config.mode = COLO_LINEAR_LOGPROB_AUTO;
        c.config.budget = 4 * 128; /* logits of four tokens, a row of 19 columns is 128 bytes */
        c.config.frozen_hidden = frozen;
        for (int64_t t = 3; t < 9; t++)
            c.targets[0][t] = -100;
        c.most_valid[0] = 3; /* keeps; the other one has 9 tokens and does not */
        linear_case_judge(&c, 1, frozen ? "frozen hidden" : "both gradients");
        assert_int_equal(c.head_all[0].ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_HEAD],
                         c.head_all[1].ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_HEAD]);
    }
}

/* Vocabularies that backward makes in blocks of columns, the last of them shorter. */
T_CASE(blocks_of_columns_agree_with_the_oracle)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    uint64_t rng = t_seed() + 14;
    for (int i = 0; i < 8 * MODES; i++) {
        const int mode = i % MODES, nth = i / MODES;
        if (T_LEFT_OUT({nth / 4, 2}, {nth % 4, 4}, {mode, MODES}))
            continue;
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 1 + nth / 4 % 2, 1, 5, 20011, 3, dtypes[nth % 4], &rng);
        linear_case_options(&c,
                            WITH_ENTROPY | WITH_LOSS | WITH_SMOOTH | LINEAR_BIAS | LINEAR_IGNORED);
        linear_case_mode(&c, mode);
        c.config.d_weight_add = (nth / 4 + nth) % 2;
        c.config.d_weight_dtype = c.config.d_weight_add ? c.config.d_weight_dtype : c.dtype;
        c.config.keep_in_place = mode == 1 && nth / 4 % 2 && c.config.logits_dtype == c.dtype;
        c.config.logprob.chunk_size = nth / 4 % 2; /* two rows of blocks, or all */
        linear_case_judge(&c, 1, modes[mode]);
    }
}

/* A 16-bit d_weight whose tokens fit into one pass is written as it is: no workspace has sums of
 * it. */
T_CASE(a_narrow_d_weight_needs_no_sums_of_its_size)
{
    enum { V = 50000, H = 64, T = 8 };
    static const colo_linear_logprob_mode_t kinds[] = {
        COLO_LINEAR_LOGPROB_LOGPROB, COLO_LINEAR_LOGPROB_KEEP, COLO_LINEAR_LOGPROB_EARLY};
    colo_comm_t *self = t_self();
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H,
                                .dtype = COLO_BF16};
    assert_ok(colo_lm_head_create(&head, &hc, NULL));
    for (int i = 0; i < 3; i++) {
        T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
        colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true,
                                           .mode = kinds[i]};
        size_t bytes = 0;
        lc.logprob.logits.vocab = V;
        lc.d_weight_dtype = COLO_BF16;
        lc.d_weight_add = false;
        assert_ok(colo_linear_logprob_create(&linear, &lc, head, self));
        assert_ok(colo_linear_logprob_workspace_size(linear, COLO_LINEAR_LOGPROB_BACKWARD, T, -1,
                                                     &bytes));
        assert_true(bytes < (size_t)V * H * sizeof(float) / 2);
    }
}

T_CASE(no_tokens_and_no_valid_token_are_legal)
{
    uint64_t rng = t_seed() + 9;
    for (int mode = 0; mode < MODES; mode++)
        for (int64_t tokens = 0; tokens <= 5; tokens += 5)
            for (int bits = 0; bits < 2; bits++) {
                T_ENDS(linear_case_free) linear_case_t c;
                linear_case_init(&c, 2, 2, tokens, 19, 5, COLO_F32, &rng);
                linear_case_options(&c, WITH_ENTROPY | LINEAR_BIAS | LINEAR_MEAN | LINEAR_SHARDED);
                linear_case_mode(&c, mode);
                for (int64_t t = 0; t < tokens; t++)
                    c.targets[0][t] = c.targets[1][t] = -100;
                c.max_valid = bits ? 0 : -1;
                c.config.d_weight_add = bits;
                linear_case_judge(&c, 1, "nothing counts");
                assert_true(all_of(IS_ZERO, c.d_w, 19 * 5));
            }
}

T_CASE(uniform_upstream_needs_no_arrays)
{
    uint64_t rng = t_seed() + 10;
    for (int mode = 0; mode < MODES; mode++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 2, 1, 9, 19, 5, COLO_F64, &rng);
        linear_case_options(&c, WITH_ENTROPY | WITH_LOSS | WITH_SMOOTH | WITH_ZLOSS |
                                    LINEAR_IGNORED | LINEAR_MEAN);
        linear_case_mode(&c, mode);
        c.arrays = false;
        c.factor[0] = 0;
        c.factor[1] = -0.25;
        c.factor[2] = 3;
        linear_case_judge(&c, 1, "uniform upstream");
    }
}

/* A CBLAS that gives a row other bits in other company, where it can: odd_cblas.c. */
T_CASE(a_cblas_that_tells_rows_apart_changes_no_bit)
{
    char was[1000], odd[1000];
    if (!getenv("T_CBLAS_DIR"))
        skip();
    snprintf(was, sizeof was, "%s", getenv("COLO_GEMM") ? getenv("COLO_GEMM") : "auto");
    snprintf(odd, sizeof odd, "%s/libodd_cblas.so", getenv("T_CBLAS_DIR"));
    setenv("COLO_GEMM", odd, 1);
    a_bound_on_valid_tokens_changes_no_bit(state);
    modes_and_chunks(6);
    setenv("COLO_GEMM", was, 1);
}

T_MAIN("loss/linear")
