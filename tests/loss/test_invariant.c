/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_invariant.c - with segments, outputs and gradients have the same bits for any number of
 * ranks, for any chunk, and for any tokens that a token shares a call with. Bits are compared; that
 * the values are right, the fp64 oracle says.
 */
#include "loss/loss_case.h"
#include "loss/where.h"

enum { GROUPS = 3 };

static const int32_t worlds[] = {1, 2, 4, 8};

/* As @c's segment has it: whole segments, as many on each rank. */
static void shard(loss_case_t *c)
{
    const int64_t segments = (c->vocab - 1) / c->config.segment + 1,
                  each = ((segments - 1) / c->ranks + 1) * c->config.segment;
    for (int r = 0; r < c->ranks; r++) {
        c->start[r] = r * each;
        c->columns[r] = each;
    }
}

/* Tokens [lo, hi) of @one on @ranks give its bits. */
static void again(const loss_case_t *one, int32_t ranks, int64_t lo, int64_t hi, int64_t chunk)
{
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_t from = *one;
    from.ranks = ranks;
    loss_case_take(&c, &from, lo, hi);
    shard(&c);
    c.config.chunk_size = chunk;
    assert_ok(loss_case_run(&c));
    loss_case_same(&c, one, lo, "segments");
}

static void check(loss_case_t *one)
{
    const int64_t cuts[GROUPS + 1] = {0, 1, one->tokens / 2, one->tokens};
    shard(one);
    assert_ok(loss_case_run(one));
    loss_case_compare(one, "segments");
    for (int w = 0; w < 4; w++) {
        again(one, worlds[w], 0, one->tokens, w);
        for (int g = 0; g < GROUPS; g++)
            again(one, worlds[w], cuts[g], cuts[g + 1], 0);
    }
    loss_case_free(one);
}

T_CASE_IF(where.mem == COLO_MEM_HOST, logits_in_segments_give_the_same_bits_on_1_2_4_and_8_ranks)
{
    static const int64_t vocabs[] = {256, 300};
    uint64_t rng = t_seed();
    for (int d = 0; d < 4; d++)
        for (int v = 0; v < 2; v++)
            for (int plain = 0; plain < 2; plain++) {
                loss_case_t c;
                loss_case_init(&c, 1, 13, vocabs[v], loss_dtypes[d], 3, &rng);
                c.targets[3] = -100;
                c.config.segment = v ? 48 : 32; /* 300 columns: 7 segments, the last with 12 */
                c.config.has_class_weight = v;
                c.config.want_entropy = c.config.want_loss = c.config.want_correct = true;
                c.config.want_argmax = c.config.want_lse = c.config.want_sum_p2 = true;
                c.config.want_mean_logits = !v || plain;
                c.config.has_temperature = !plain;
                if (!plain) {
                    c.config.logits.temperature = 0.7;
                    c.config.logits.softcap = 30;
                    c.config.label_smoothing = 0.1;
                    c.config.z_loss = 0.01;
                }
                check(&c);
            }
}

/* Long enough for whole runs of the kernels on one rank and too short for them on eight. */
T_CASE_IF(where.mem == COLO_MEM_CUDA, long_rows_in_segments_give_the_same_bits_on_a_gpu)
{
    uint64_t rng = t_seed() + 1;
    loss_case_t c;
    loss_case_init(&c, 1, 37, 8 * 2064 - 40, COLO_BF16, 3, &rng);
    c.targets[3] = -100;
    c.config.segment = 2064;
    c.config.want_entropy = c.config.want_loss = c.config.has_class_weight = true;
    c.config.label_smoothing = 0.1;
    check(&c);
}

static void refused(int32_t ranks, int64_t vocab, int64_t columns, int64_t segment,
                    colo_status_t status, const char *text)
{
    uint64_t rng = 3;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, ranks, 2, vocab, COLO_F32, 1, &rng);
    c.config.segment = segment;
    for (int r = 0; r < ranks; r++) {
        c.start[r] = r * columns;
        c.columns[r] = columns;
    }
    assert_fails(loss_case_run(&c), status, text);
}

T_CASE(shards_that_cut_a_segment_are_refused_with_the_size_to_pad_to)
{
    refused(1, 100, 100, 24, COLO_ERR_ARG, "segment is 24, expected 0 (off) or a multiple of 16");
    refused(1, 2000, 2000, 16, COLO_ERR_ARG,
            "a multiple of 16 of at least 32, for a vocabulary of 2000");
    refused(1, 100, 100, -16, COLO_ERR_ARG, "segment is -16");
    refused(2, 256, 128, 48, COLO_ERR_SHAPE, " in segments of 48, expected [");
    refused(2, 65, 33, 16, COLO_ERR_SHAPE, "give each rank 64"); /* 5 segments: 4 of a rank */
}

T_CASE(segments_with_smoothing_per_rank_are_refused)
{
    colo_logprob_config_t c = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = 64, .segment = 16,
                               .local_smoothing = true};
    assert_fails(colo_logprob_config_check(&c), COLO_ERR_ARG,
                 "local_smoothing with segment 16: it depends on the number of ranks");
}

T_MAIN_IF(where.need(), "loss/invariant")
