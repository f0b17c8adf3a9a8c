/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_ranks.c - the lm_head path on W x D GPUs with NCCL: the vocabulary over W, tokens and
 * a sharded head over D. Runs what fits the GPUs that are there, 2 at least.
 */
#include "gpu/linear_gpu.h"

static uint64_t rng;
static int gpus; /* t_gpu_count() forks, which is too late once CUDA has been asked here */

static void all_options_agree_on_every_world_that_fits(void **state)
{
    static const int32_t worlds[][2] = {{2, 1}, {1, 2}, {2, 2}, {4, 1}, {1, 4},
                                        {3, 1}, {8, 1}, {1, 8}, {2, 4}, {4, 2}};
    int ran = 0;
    (void)state;
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        if (worlds[w][0] * worlds[w][1] > gpus)
            continue;
        ran++;
        for (int i = 0; i < 12; i++)
            linear_gpu_one((1u << LINEAR_OPTIONS) - 1 - (i % 2 ? LINEAR_SHARDED : 0), i % 3,
                           worlds[w][0], worlds[w][1], i + (int)w, 1 + 7 * (i % 4), &rng);
    }
    assert_true(ran >= 2); /* 2 x 1 and 1 x 2 fit any that came here */
}

static void d_hidden_is_summed_where_asked(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        linear_case_t c;
        linear_case_init(&c, 2, 1, 48, 61, 24, COLO_F32, &rng);
        linear_gpu_options(&c, LINEAR_ENTROPY, i % 3);
        c.config.d_hidden = i / 3 ? COLO_D_HIDDEN_REDUCE_SCATTER : COLO_D_HIDDEN_ALL_REDUCE;
        c.config.logprob.chunk_size = 20;
        linear_gpu_run(&c, "d_hidden summed");
        linear_case_free(&c);
    }
}

/* Bit for bit: gathering and scattering add nothing of their own. */
static void a_sharded_head_gives_the_bits_of_a_resident_one(void **state)
{
    (void)state;
    for (int mode = 0; mode < 3; mode++) {
        linear_case_t c[2];
        for (int k = 0; k < 2; k++) {
            uint64_t same = 5;
            linear_case_init(&c[k], 1, 2, 50, 67, 24, COLO_BF16, &same);
            linear_gpu_options(&c[k], LINEAR_BIAS | (k ? LINEAR_SHARDED : 0), mode);
            c[k].start_early = k;
            c[k].place = linear_gpu_place();
            if (linear_case_run(&c[k]) != COLO_OK)
                fail_msg("%s", colo_last_error());
        }
        if (!linear_case_same(&c[0], &c[1], true))
            fail_msg("mode %d: sharded and resident differ", mode);
        linear_case_free(&c[0]);
        linear_case_free(&c[1]);
    }
}

int main(void)
{
    int rc = gpu_need(2);
    if (rc)
        return rc;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess)
        return 1;
    rng = t_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_options_agree_on_every_world_that_fits),
        cmocka_unit_test(d_hidden_is_summed_where_asked),
        cmocka_unit_test(a_sharded_head_gives_the_bits_of_a_resident_one),
    };
    return cmocka_run_group_tests_name("gpu/linear_ranks", tests, NULL, NULL);
}
