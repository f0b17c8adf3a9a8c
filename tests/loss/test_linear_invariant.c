/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_invariant.c - with segments, the lm_head path gives the same bits on any number of
 * ranks, for any chunk, and per token whatever tokens share its call. That the values are right,
 * the fp64 oracle says.
 */
#include "loss/linear_case.h"

enum { TOKENS = 11, HIDDEN = 20, VOCAB = 120, SEGMENT = 16, MODES = 4 };

/* Of a head of 8 segments, the last with columns of padding. */
typedef struct sizes {
    int64_t tokens, vocab, hidden, segment;
} sizes_t;

static const int32_t worlds[] = {1, 2, 4, 8};

/* Tokens [lo, hi) of @from. */
static void take(linear_case_t *c, const linear_case_t *from, int32_t ranks, int64_t lo, int64_t hi)
{
    uint64_t rng = 1;
    const size_t n = (size_t)(hi - lo), h = (size_t)from->hidden;
    linear_case_init(c, ranks, 1, hi - lo, from->vocab, from->hidden, from->dtype, &rng);
    c->config = from->config;
    c->has_bias = from->has_bias;
    c->loss_mode = from->loss_mode;
    c->start_early = from->start_early;
    c->arrays = from->arrays;
    c->prefill = from->prefill;
    memcpy(c->factor, from->factor, sizeof c->factor);
    for (int r = 0; r < ranks; r++) {
        c->columns[r] = 8 * from->config.logprob.segment / ranks;
        c->start[r] = r * c->columns[r];
    }
    memcpy(c->h[0], from->h[0] + lo * from->hidden, n * h * sizeof(double));
    memcpy(c->w, from->w, (size_t)from->vocab * h * sizeof(double));
    memcpy(c->b, from->b, (size_t)from->vocab * sizeof(double));
    memcpy(c->lora_a, from->lora_a, LINEAR_RANK * h * sizeof(double));
    memcpy(c->lora_b, from->lora_b, LINEAR_RANK * (size_t)from->vocab * sizeof(double));
    memcpy(c->targets[0], from->targets[0] + lo, n * sizeof(int64_t));
    for (int k = 0; k < 3; k++)
        memcpy(c->up[0][k], from->up[0][k] + lo, n * sizeof(double));
}

/* @c, whose tokens are those from @lo on of @whole. */
static void same_bits(const linear_case_t *c, const linear_case_t *whole, int64_t lo, int mode)
{
    const size_t n = (size_t)c->tokens, h = (size_t)c->hidden, v = (size_t)c->vocab;
    for (int r = 0; r < c->ranks; r++) {
        for (int k = 0; k < 3; k++)
            if (memcmp(c->out[r][k], whole->out[0][k] + lo, n * sizeof(double)) != 0)
                fail_msg("%s, mode %d, W %d, rank %d, tokens from %d: output %d differs",
                         colo_dtype_name(c->dtype), mode, (int)c->ranks, r, (int)lo, k);
        const bool part = c->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER;
        const size_t rows = part ? n / (size_t)c->ranks : n;
        if (memcmp(c->d_h[r], whole->d_h[0] + (lo + (part ? (int64_t)rows * r : 0)) * c->hidden,
                   rows * h * sizeof(double)) != 0)
            fail_msg("%s, mode %d, W %d, rank %d, tokens from %d: d_hidden differs",
                     colo_dtype_name(c->dtype), mode, (int)c->ranks, r, (int)lo);
        const size_t from = LINEAR_RANK * (size_t)c->start[r],
                     own = LINEAR_RANK * (size_t)(c->columns[r]);
        if (c->tokens == whole->tokens &&
            (memcmp(c->d_lora_a[r], whole->d_lora_a[0], LINEAR_RANK * h * sizeof(double)) != 0 ||
             memcmp(c->d_lora_b[r] + from, whole->d_lora_b[0] + from,
                    (from + own < LINEAR_RANK * v ? own : LINEAR_RANK * v - from) *
                        sizeof(double)) != 0))
            fail_msg("%s, mode %d, W %d, rank %d: d_lora_a or d_lora_b differs",
                     colo_dtype_name(c->dtype), mode, (int)c->ranks, r);
    }
    if (c->tokens == whole->tokens && (memcmp(c->d_w, whole->d_w, v * h * sizeof(double)) != 0 ||
                                       memcmp(c->d_b, whole->d_b, v * sizeof(double)) != 0))
        fail_msg("%s, mode %d, W %d: d_weight or d_bias differs", colo_dtype_name(c->dtype), mode,
                 (int)c->ranks);
}

/* 0 logprob, 1 keep, 2 loss, 3 early */
static void draw(linear_case_t *c, const sizes_t *of, colo_dtype_t dtype, int mode, unsigned more,
                 uint64_t *rng)
{
    T_ENDS(linear_case_free) linear_case_t drawn;
    linear_case_init(&drawn, 1, 1, of->tokens, of->vocab, of->hidden, dtype, rng);
    linear_case_options(&drawn, WITH_TAU | WITH_SMOOTH | WITH_WEIGHTS | WITH_ENTROPY | WITH_LOSS |
                                    LINEAR_BIAS | LINEAR_IGNORED | more);
    linear_case_mode(&drawn, mode % 3);
    if (mode == 3) {
        drawn.config.mode = COLO_LINEAR_LOGPROB_EARLY;
        drawn.start_early = true;
    }
    drawn.config.logprob.segment = of->segment;
    drawn.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
    take(c, &drawn, 1, 0, of->tokens);
}

static void begin(linear_case_t *c, int64_t tokens, colo_dtype_t dtype, int mode, uint64_t *rng)
{
    draw(c, &(sizes_t){tokens, VOCAB, HIDDEN, SEGMENT}, dtype, mode, 0, rng);
}

/* Tokens [lo, hi) of @one give its bits on @ranks. */
static void again(const linear_case_t *one, int32_t ranks, int64_t lo, int64_t hi, int64_t chunk,
                  colo_d_hidden_t how, int mode)
{
    T_ENDS(linear_case_free) linear_case_t c;
    take(&c, one, ranks, lo, hi);
    c.config.logprob.chunk_size = chunk;
    c.config.d_hidden = how;
    assert_ok(linear_case_run(&c));
    same_bits(&c, one, lo, mode);
}

T_CASE_IF(where.mem == COLO_MEM_HOST, a_head_in_segments_gives_the_same_bits_on_1_2_4_and_8_ranks)
{
    static const int64_t cuts[] = {0, 1, 5, TOKENS};
    uint64_t rng = t_seed();
    for (int d = 0; d < 4; d++)
        for (int mode = 0; mode < MODES; mode++) {
            if (mode == 3 && loss_dtypes[d] == COLO_F64)
                continue;
            T_ENDS(linear_case_free) linear_case_t one;
            begin(&one, TOKENS, loss_dtypes[d], mode, &rng);
            assert_ok(linear_case_run(&one));
            linear_case_compare(&one, "segments");
            for (int w = 0; w < 4; w++) {
                again(&one, worlds[w], 0, TOKENS, 3 * w, COLO_D_HIDDEN_ALL_REDUCE, mode);
                for (int g = 0; g < 3 && loss_dtypes[d] != COLO_F16; g++)
                    again(&one, worlds[w], cuts[g], cuts[g + 1], 0, COLO_D_HIDDEN_ALL_REDUCE, mode);
            }
        }
}

/* Gradients of its A are a sum over segments, too, and every rank has the same. */
T_CASE_IF(where.mem == COLO_MEM_HOST, a_lora_in_segments_gives_the_same_bits_on_1_2_4_and_8_ranks)
{
    static const sizes_t sizes = {TOKENS, VOCAB, HIDDEN, SEGMENT};
    uint64_t rng = t_seed() + 5;
    for (int i = 0; i < 4 * MODES; i++) {
        const colo_dtype_t dtype = loss_dtypes[i / MODES];
        const int mode = i % MODES;
        if (mode == 3 && dtype == COLO_F64)
            continue;
        T_ENDS(linear_case_free) linear_case_t one;
        draw(&one, &sizes, dtype, mode, LINEAR_LORA, &rng);
        one.config.frozen_hidden = i % 3 == 1;
        one.config.frozen_lora = i % 3 == 2;
        one.config.frozen_weight = i % 2;
        assert_ok(linear_case_run(&one));
        linear_case_compare(&one, "segments and a LoRA");
        for (int w = 0; w < 4; w++) {
            again(&one, worlds[w], 0, TOKENS, 3 * w, COLO_D_HIDDEN_ALL_REDUCE, mode);
            if (dtype != COLO_F16) /* whose gradients are scaled by the largest of the call */
                again(&one, worlds[w], 1, 9, 0, COLO_D_HIDDEN_REDUCE_SCATTER, mode);
        }
    }
}

T_CASE_IF(where.mem == COLO_MEM_HOST, slices_of_d_hidden_in_segments_are_those_of_one_rank)
{
    uint64_t rng = t_seed() + 1;
    for (int mode = 0; mode < MODES; mode++) {
        T_ENDS(linear_case_free) linear_case_t one;
        begin(&one, 8, COLO_BF16, mode, &rng);
        assert_ok(linear_case_run(&one));
        for (int w = 1; w < 4; w++)
            again(&one, worlds[w], 0, 8, 0, COLO_D_HIDDEN_REDUCE_SCATTER, mode);
    }
}

/* Long enough for whole runs of the kernels on one rank and too short for them on eight. */
T_CASE_IF(where.mem == COLO_MEM_CUDA, long_segments_give_the_same_bits_on_ranks_that_share_a_gpu)
{
    static const sizes_t sizes = {37, 8 * 2064 - 40, 72, 2064};
    static const int64_t cuts[] = {0, 1, 12, 37};
    uint64_t rng = t_seed() + 4;
    for (int mode = 0; mode < MODES; mode++) {
        T_ENDS(linear_case_free) linear_case_t one;
        draw(&one, &sizes, COLO_BF16, mode, mode % 2 ? LINEAR_LORA : 0, &rng);
        one.config.logits_dtype = COLO_BF16;
        assert_ok(linear_case_run(&one));
        linear_case_compare(&one, "long segments");
        for (int w = 0; w < 4; w++) {
            again(&one, worlds[w], 0, 37, 5 * w, COLO_D_HIDDEN_ALL_REDUCE, mode);
            for (int g = 0; g < 3; g++)
                again(&one, worlds[w], cuts[g], cuts[g + 1], 0, COLO_D_HIDDEN_ALL_REDUCE, mode);
        }
    }
}

/* More rows than a chunk of the loss pass, and than one of backward. */
T_CASE_IF(where.mem == COLO_MEM_HOST,
          sums_over_tokens_in_segments_do_not_depend_on_ranks_or_chunk_size)
{
    uint64_t rng = t_seed() + 2;
    for (int mode = 0; mode < 3; mode += 2) {
        T_ENDS(linear_case_free) linear_case_t one;
        draw(&one, &(sizes_t){mode == 2 ? 2100 : 8300, VOCAB, HIDDEN, SEGMENT}, COLO_BF16, mode,
             LINEAR_LORA, &rng);
        assert_ok(linear_case_run(&one));
        again(&one, 4, 0, one.tokens, 700, COLO_D_HIDDEN_ALL_REDUCE, mode);
    }
}

T_CASE(heads_that_segments_do_not_fill_and_partial_sums_are_refused)
{
    uint64_t rng = t_seed() + 3;
    linear_case_t c;
    begin(&c, 2, COLO_F32, 0, &rng);
    c.columns[0] = VOCAB;
    assert_fails(linear_case_run(&c), COLO_ERR_SHAPE,
                 "the head has 120 rows here, expected 128 with segments of 16 on 1 ranks; pad it");
    linear_case_free(&c);
    begin(&c, 2, COLO_F32, 0, &rng);
    T_ENDS(linear_case_free) linear_case_t two;
    take(&two, &c, 2, 0, 2);
    two.config.d_hidden = COLO_D_HIDDEN_PARTIAL;
    assert_fails(linear_case_run(&two), COLO_ERR_ARG, "d_hidden is partial with segments");
    linear_case_free(&c);
}

/* A CBLAS that gives a row other bits in another place, as OpenBLAS does on some processors, must
 * make no product of a segment. */
static void choose_cblas(void)
{
    static char odd[1000];
    if (getenv("T_CBLAS_DIR")) {
        snprintf(odd, sizeof odd, "%s/libodd_cblas.so", getenv("T_CBLAS_DIR"));
        setenv("COLO_GEMM", odd, 1);
    }
}

T_MAIN_AFTER(where.need(), choose_cblas(), "loss/linear_invariant")
