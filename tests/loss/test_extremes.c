/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_extremes.c - sizes at the ends of what 64 bits hold, to every call that takes sizes and
 * computes others of them: refused with words, or a size that is right. The reruns under UBSan say
 * where a sum or a product wraps on the way.
 */
#include "harness/harness.h"

#include <colobridge/partition.h>

static const int64_t sizes[] = {
    0,
    1,
    2,
    7,
    64,
    33 * 256 * 129 - 1, /* columns, of which backward makes 130 blocks */
    INT64_C(1) << 31,
    (INT64_C(1) << 40) + 1,
    (INT64_C(1) << 60) + 1,
    (INT64_C(1) << 61) - 15,
    INT64_C(1) << 61,
    INT64_C(1) << 62,
    INT64_MAX - 64,
    INT64_MAX - 1,
    INT64_MAX,
    -1,
    INT64_MIN,
};
enum { SIZES = sizeof sizes / sizeof sizes[0] };
__extension__ typedef __int128 wide_t;

static const colo_dtype_t floats[] = {COLO_F32, COLO_F64, COLO_BF16};

/* It has words if it is refused; true if it is taken. */
static bool taken(colo_status_t st)
{
    if (st < 0 && !colo_last_error()[0])
        fail_msg("refused without words");
    return st == COLO_OK;
}

/* Else a product has wrapped. @least: bytes that it must have */
static void expect_at_least(const char *what, size_t bytes, wide_t least)
{
    if ((wide_t)bytes < least || bytes > INT64_MAX)
        fail_msg("%s: %zu bytes, expected at least %lld thousand millions", what, bytes,
                 (long long)(least / 1000000000));
}

T_CASE(head_of_any_size_is_refused_or_has_room_for_its_weight)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    assert_ok(colo_comm_create_self(&world));
    for (int r = 0; r < SIZES; r++)
        for (int h = 0; h < SIZES; h++)
            for (int kind = 0; kind < 6; kind++) {
                const colo_dtype_t dtype = floats[kind / 2];
                colo_lm_head_config_t c = {COLO_LM_HEAD_CONFIG_INIT, .rows = sizes[r],
                                           .hidden = sizes[h], .dtype = dtype,
                                           .has_bias = kind % 2};
                colo_tensor_t like = {.dtype = COLO_F32};
                colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, .d_weight = &like};
                colo_lm_head_t *head = NULL;
                if (!taken(colo_lm_head_create(&head, &c, world)))
                    continue;
                const wide_t weight = (wide_t)sizes[r] * sizes[h];
                expect_at_least("gathered_size", colo_lm_head_gathered_size(head),
                                weight * (wide_t)colo_dtype_size(dtype));
                (void)colo_lm_head_reduce_size(head, &grads);
                colo_lm_head_destroy(&head);
            }
}

static int made; /* of ask_linear() */

static void ask_linear(const colo_linear_logprob_config_t *config, const colo_lm_head_t *head,
                       colo_comm_t *world, wide_t width)
{
    colo_linear_logprob_t *linear = NULL;
    if (!taken(colo_linear_logprob_create(&linear, config, (colo_lm_head_t *)head, world)))
        return;
    made++;
    for (int t = 0; t < SIZES; t++)
        for (int v = 0; v < SIZES; v += 3)
            for (int pass = 0; pass < 3; pass++) {
                size_t bytes = 0, saved = 0;
                (void)colo_linear_logprob_chunk(linear, sizes[v]);
                if (taken(colo_linear_logprob_workspace_size(
                        linear, (colo_linear_logprob_pass_t)pass, sizes[t], sizes[v], &bytes)))
                    expect_at_least("workspace", bytes, 8 * (wide_t)sizes[t]);
                if (taken(colo_linear_logprob_saved_size(linear, sizes[t], sizes[v], &saved)))
                    expect_at_least("saved", saved, 0);
            }
    colo_linear_logprob_destroy(&linear);
}

T_CASE(linear_of_any_size_is_refused_or_has_room_for_its_tokens)
{
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    assert_ok(colo_comm_create_self(&world));
    for (int r = 1; r < SIZES; r++)
        for (int h = 1; h < SIZES; h += 2)
            for (int mode = 0; mode < 5; mode++) {
                colo_lm_head_config_t c = {COLO_LM_HEAD_CONFIG_INIT, .rows = sizes[r],
                                           .hidden = sizes[h], .dtype = floats[mode % 3]};
                T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
                if (!taken(colo_lm_head_create(&head, &c, NULL)))
                    continue;
                for (int options = 0; options < 48; options++) {
                    colo_linear_logprob_config_t config = {
                        COLO_LINEAR_LOGPROB_CONFIG_INIT,
                        .mode = (colo_linear_logprob_mode_t)mode,
                        .logits_dtype = floats[mode % 3],
                        .budget = (const size_t[]){0, 1, SIZE_MAX}[options % 3],
                        .frozen_hidden = options / 24,
                        .share_d_weight =
                            mode == COLO_LINEAR_LOGPROB_EARLY && options / 12 % 2 == 0};
                    config.d_weight_add = options / 12 % 2;
                    config.d_weight_dtype = c.dtype == COLO_F64 ? COLO_F64 : COLO_F32;
                    config.logprob.logits.vocab = sizes[r];
                    config.logprob.want_entropy = config.logprob.want_loss = true;
                    config.logprob.chunk_size =
                        (const int64_t[]){0, 1, 3, INT64_MAX}[options / 3 % 4];
                    config.logprob.segment = options % 5 == 4 ? 16 : 0;
                    ask_linear(&config, head, world, sizes[r]);
                }
            }
    assert_true(made > 100);
}

T_CASE(workspace_of_any_loss_is_refused_or_has_room_for_its_tokens)
{
    for (int v = 0; v < SIZES; v++)
        for (int t = 0; t < SIZES; t++)
            for (int k = 0; k < SIZES; k += 2)
                for (int64_t all = 1; all < INT32_MAX; all = 1023 * all + 1) {
                    const int32_t ranks = (int32_t)all;
                    colo_logprob_config_t logprob = {COLO_LOGPROB_CONFIG_INIT};
                    colo_topk_config_t topk = {COLO_TOPK_CONFIG_INIT, .k = sizes[k] % 300};
                    colo_distill_config_t distill = {COLO_DISTILL_CONFIG_INIT};
                    colo_sampling_config_t sampling = {COLO_SAMPLING_CONFIG_INIT};
                    logprob.logits.vocab = topk.logits.vocab = distill.logits.vocab =
                        sampling.logits.vocab = sizes[v];
                    logprob.chunk_size = sizes[k];
                    logprob.segment = sizes[k] < 0 ? 0 : sizes[k] / 16 * 16;
                    const int64_t tokens = sizes[t];
                    size_t bytes = 0;
                    if (taken(colo_logprob_workspace_size(&logprob, COLO_F64, tokens, ranks,
                                                          &bytes)) &&
                        ranks > 1)
                        expect_at_least("logprob", bytes, 24 * (wide_t)tokens * ranks);
                    if (taken(colo_logprob_saved_size(&logprob, COLO_F64, tokens, &bytes)))
                        expect_at_least("logprob saved", bytes, 24 * (wide_t)tokens);
                    if (taken(colo_topk_workspace_size(&topk, COLO_F32, tokens, ranks, &bytes)) &&
                        ranks > 1)
                        expect_at_least("topk", bytes, 8 * (wide_t)tokens * ranks);
                    if (taken(colo_topk_saved_size(&topk, tokens, &bytes)))
                        expect_at_least("topk saved", bytes, (40 + 16 * topk.k) * (wide_t)tokens);
                    if (taken(colo_distill_workspace_size(&distill, COLO_F32, tokens, ranks,
                                                          &bytes)) &&
                        ranks > 1)
                        expect_at_least("distill", bytes, 8 * (wide_t)tokens * ranks);
                    if (taken(colo_distill_saved_size(&distill, tokens, &bytes)))
                        expect_at_least("distill saved", bytes, 40 * (wide_t)tokens);
                    if (taken(colo_sampling_workspace_size(&sampling, COLO_F32, tokens, ranks,
                                                           &bytes)))
                        expect_at_least("sampling", bytes, 0);
                    (void)colo_loss_weighted_workspace_size(ranks);
                }
}

T_CASE(sequence_of_any_size_is_refused_or_has_room_for_its_elements)
{
    for (int b = 0; b < SIZES; b++)
        for (int p = 0; p < SIZES; p++)
            for (int q = 0; q < SIZES; q++)
                for (int c = 0; c < SIZES; c++) {
                    const colo_sequence_t seq = {.struct_size = sizeof seq,
                                                 .batch = sizes[b],
                                                 .positions = sizes[p],
                                                 .padded = sizes[q],
                                                 .cp = sizes[c]};
                    size_t bytes = 0;
                    const int64_t count = colo_sequence_count(&seq);
                    if (taken(colo_sequence_check(&seq)) && count < 0)
                        fail_msg("%lld elements", (long long)count);
                    if (taken(colo_sequence_workspace_size(&seq, COLO_F64, &bytes)))
                        expect_at_least("sequence", bytes, 8 * (wide_t)count * sizes[c]);
                }
}

T_CASE(packed_sequence_of_any_ends_is_refused_or_counted)
{
    for (int x = 0; x < SIZES; x++)
        for (int y = 0; y < SIZES; y++)
            for (int c = 0; c < SIZES; c++) {
                const int64_t cu[] = {c % 2 ? 0 : INT64_MIN, sizes[x], sizes[y]},
                              lengths[] = {0, 1};
                const colo_sequence_t seq = {.struct_size = sizeof seq,
                                             .batch = 2,
                                             .positions = 64,
                                             .lengths = lengths,
                                             .cu_padded = cu,
                                             .cp = sizes[c]};
                const colo_partition_t part = {COLO_PARTITION_INIT, .cp = sizes[c],
                                               .tp = sizes[y],      .positions = sizes[x],
                                               .segments = 2,       .cu_padded = cu};
                int64_t padded[3], whole = 0;
                size_t bytes;
                (void)colo_sequence_count(&seq);
                (void)taken(colo_sequence_check(&seq));
                (void)taken(colo_sequence_workspace_size(&seq, COLO_F64, &bytes));
                (void)taken(colo_partition_check(&part));
                (void)taken(colo_sequence_pack(cu, 2, sizes[c], sizes[y], y % 2, padded));
                (void)taken(colo_partition_padded(sizes[x], sizes[y], sizes[c], x % 2, &whole));
            }
}

T_CASE(tensor_of_any_shape_is_refused_or_counted)
{
    static double data[1];
    for (int x = 0; x < SIZES; x++)
        for (int y = 0; y < SIZES; y++)
            for (int s = 0; s < SIZES; s++)
                for (int z = 0; z < SIZES; z += 3) {
                    const int64_t shape[] = {sizes[x], sizes[y]};
                    colo_tensor_t t = colo_tensor_host(data, COLO_F64, 2, shape);
                    (void)taken(colo_tensor_check(&t, "t"));
                    t.shape[0] = sizes[x];
                    t.shape[1] = sizes[y];
                    t.ndim = 2;
                    t.stride[0] = sizes[s];
                    t.stride[1] = sizes[z];
                    const int64_t count = colo_tensor_count(&t);
                    if (taken(colo_tensor_check(&t, "t")) &&
                        (wide_t)count != (wide_t)sizes[x] * sizes[y])
                        fail_msg("%lld elements", (long long)count);
                    (void)colo_tensor_narrow(t, 0, sizes[s], sizes[z]);
                }
}

T_CASE(plan_of_any_shape_is_refused_or_made)
{
    for (int x = 0; x < SIZES; x++)
        for (int y = 0; y < SIZES; y++)
            for (int z = 0; z < SIZES; z++) {
                colo_grid_t from, to;
                colo_layout_t src, dst;
                assert_ok(colo_grid_parse(&from, "tp=2,dp=2", 4));
                assert_ok(colo_grid_parse(&to, "cp=2,dp=2", 4));
                assert_ok(colo_layout_init_src(&src, &from));
                assert_ok(colo_layout_init_dst(&dst, &to));
                colo_plan_config_t c = {
                    COLO_PLAN_CONFIG_INIT, .src = &src, .dst = &dst,
                    .shape = {sizes[x], sizes[y], sizes[z], sizes[(x + y) % SIZES]},
                    .dtype = COLO_F64};
                T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
                (void)taken(colo_layout_map_offset(&src, sizes[x], sizes[z]));
                if (taken(colo_plan_create(&plan, &c, z % 4)))
                    for (int pass = 0; pass < 2; pass++) {
                        const colo_plan_bytes_t b = t_plan_bytes(plan, (colo_pass_t)pass);
                        if (b.recv < b.minimum || b.minimum < 0)
                            fail_msg("%lld bytes, minimum %lld", (long long)b.recv,
                                     (long long)b.minimum);
                    }
            }
}

T_MAIN("loss/extremes")
