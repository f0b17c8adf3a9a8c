/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_ranks.c - the lm_head path on W x D ranks with NCCL: the vocabulary over W, tokens
 * and a sharded head over D. Runs the worlds that fit the GPUs that are there, 2 ranks at least; a
 * world connects once for all of its cases.
 */
#include "gpu/linear_gpu.h"
#include "gpu/gpu_ranks.h"
#include "loss/linear_distill_case.h"

static uint64_t rng;
static int gpus;

enum { CASES = 12 };

static void free_all(linear_case_t *c, int n)
{
    for (int i = 0; i < n; i++)
        linear_case_free(&c[i]);
}

T_CASE(all_options_agree_on_every_world_that_fits)
{
    static const int32_t worlds[][2] = {{2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4},
                                        {3, 1}, {8, 1}, {1, 8}, {2, 4}, {4, 2}};
    static linear_case_t c[CASES];
    int ran = 0;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        const int32_t W = worlds[w][0], D = worlds[w][1];
        if (W * D > gpus)
            continue;
        ran++;
        for (int i = 0; i < CASES; i++)
            linear_gpu_case(&c[i], (1u << LINEAR_OPTIONS) - 1 - (i % 2 ? LINEAR_SHARDED : 0), i % 3,
                            W, D, i + (int)w, 1 + 7 * (i % 4), &rng);
        linear_case_judge(c, CASES, "all options");
        free_all(c, CASES);
    }
    print_message("%d worlds of %d cases\n", ran, (int)CASES);
    assert_true(ran >= 2); /* 2 x 1 and 1 x 2 fit any that came here */
}

T_CASE(d_hidden_is_summed_where_asked)
{
    static linear_case_t c[6];
    for (int i = 0; i < 6; i++) {
        linear_case_init(&c[i], 2, 1, 48, 61, 24, COLO_F32, &rng);
        linear_case_options(&c[i], WITH_ENTROPY);
        linear_case_mode(&c[i], i % 3);
        c[i].config.d_hidden = i / 3 ? COLO_D_HIDDEN_REDUCE_SCATTER : COLO_D_HIDDEN_ALL_REDUCE;
        c[i].config.logprob.chunk_size = 20;
    }
    linear_case_judge(c, 6, "d_hidden summed");
    free_all(c, 6);
}

/* Bit for bit: gathering and scattering add nothing of their own. */
T_CASE(a_sharded_head_gives_the_bits_of_a_resident_one)
{
    static linear_case_t c[6];
    for (int i = 0; i < 6; i++) {
        uint64_t same = 5;
        linear_case_init(&c[i], 1, 2, 50, 67, 24, COLO_BF16, &same);
        linear_case_options(&c[i], LINEAR_BIAS | (i % 2 ? LINEAR_SHARDED : 0));
        linear_case_mode(&c[i], i / 2);
        c[i].start_early = i % 2;
    }
    linear_case_judge(c, 6, "sharded and resident");
    for (int mode = 0; mode < 3; mode++)
        if (!linear_case_same(&c[2 * mode], &c[2 * mode + 1], true))
            fail_msg("mode %d: sharded and resident differ", mode);
    free_all(c, 6);
}

/* As tests/loss/test_linear_special.c has it; the first call of a head looks. */
T_CASE(a_whole_head_on_every_gpu_is_refused)
{
    for (int mode = 0; mode < 3; mode++) {
        const int64_t each = 16, hidden = 24;
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 2, 1, 48, 2 * each, hidden, COLO_BF16, &rng);
        linear_case_options(&c, WITH_ENTROPY);
        linear_case_mode(&c, mode);
        linear_case_shard(&c, SHARD_EVEN);
        c.config.logprob.chunk_size = 20;
        for (int64_t k = each * hidden; k < 2 * each * hidden; k++)
            c.w[k] = c.w[k - each * hidden];
        for (int64_t t = 0; t < c.tokens; t++)
            c.targets[0][t] %= each;
        assert_fails(linear_case_run(&c), COLO_ERR_MISMATCH,
                     "linear: these are the same logits on 2 ranks; pass tp_group=None");
    }
}

static void distill(int32_t ranks, int32_t replicas, int i)
{
    static const colo_dtype_t dtypes[][2] = {
        {COLO_F32, COLO_BF16}, {COLO_BF16, COLO_BF16}, {COLO_F16, COLO_F32}, {COLO_F64, COLO_F64}};
    T_ENDS(linear_distill_free) linear_distill_case_t c;
    linear_distill_init(&c, ranks, replicas, 2 * (1 + i % 5), 23 + i % 6, (int64_t[]){12, 7},
                        dtypes[i % 4], &rng);
    linear_distill_shard(&c, (shard_kind_t)(i % SHARD_KINDS));
    c.way = (way_t)((i + i / 4) % WAYS);
    if (c.dtype[0] == COLO_F64 && c.way == BY_EARLY)
        c.way = BY_LOSS;
    c.config.distill.divergence = i % 5;
    c.config.distill.beta = 0.3;
    c.config.distill.logits.softcap = i % 3 ? 0 : 3;
    c.config.chunk_size = i % 4;
    c.config.d_hidden = i % 2 ? COLO_D_HIDDEN_ALL_REDUCE : COLO_D_HIDDEN_REDUCE_SCATTER;
    for (int s = 0; s < 2; s++) {
        c.bias[s] = i / 2 % 2;
        c.lora[s] = i / (2 + s) % 2;
        c.sharded[s] = replicas > 1 && i / (1 + s) % 2;
    }
    if (i % 2)
        linear_distill_mask(&c);
    assert_ok(linear_distill_run(&c));
    linear_distill_compare(&c, t_text("distillation %d, W %d D %d", i, (int)ranks, (int)replicas));
}

T_CASE(distillation_over_a_shared_vocabulary_agrees_with_the_oracle)
{
    for (int i = 0; i < (int)t_scaled(40); i++)
        distill(2, 1, i);
}

T_CASE(distillation_from_sharded_heads_agrees_with_the_oracle)
{
    for (int i = 0; i < (int)t_scaled(20); i++)
        distill(1, 2, i);
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, (gpus = t_gpu_count(), rng = t_seed()),
             "gpu/linear_ranks")
