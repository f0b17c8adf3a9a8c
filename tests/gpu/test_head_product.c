/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_head_product.c - the product that makes statistics of logits, and writes them or does not
 * (kernels/head-product.cu): sizes that fill no tile, ranks with a part of the columns, special
 * values, every chunk size; and that forward then has no memory for logits. Oracle and tolerances
 * are those of tests/loss/linear_case.h. On other GPUs than it runs on, the same cases go through
 * logits, and the case about memory is skipped.
 */
#include "gpu/linear_gpu.h"

static uint64_t rng;

static bool has_it(void)
{
    struct cudaDeviceProp prop;
    return cudaGetDeviceProperties(&prop, 0) == cudaSuccess && prop.major == 9 && prop.minor == 0;
}

/* @i: in turn two dtypes, logits of two, the four modes and no backward, two budgets */
static void make(linear_case_t *c, int32_t ranks, int64_t tokens, int64_t vocab, int64_t hidden,
                 int i)
{
    linear_case_init(c, ranks, 1, tokens, vocab, hidden, i % 2 ? COLO_F16 : COLO_BF16, &rng);
    linear_case_mode(c, i % 5 % 4);
    c->no_saved = i % 5 == 4;
    c->config.logits_dtype = i / 2 % 2 ? c->dtype : COLO_F32;
    c->config.without_logits = i / 4 % 2 ? 1 : 64 << 20; /* 1: chunks as small as they get */
}

T_CASE(sizes_that_fill_no_tile_agree_with_the_oracle)
{
    static const int64_t size[][3] = {{1, 1, 8},      {2, 255, 64},   {63, 256, 72},
                                      {64, 257, 128}, {129, 511, 136}, {257, 515, 200},
                                      {300, 1030, 264}, {520, 770, 64}};
    for (int i = 0; i < 40; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        const int64_t *n = size[i % 8];
        make(&c, 1, n[0], n[1], n[2], i);
        linear_case_options(&c, i % 3 ? WITH_ENTROPY | LINEAR_IGNORED : 0);
        linear_case_judge(&c, 1, t_text("%d tokens, %d words, hidden %d, %d", (int)n[0], (int)n[1],
                                        (int)n[2], i));
    }
}

/* Also those that it leaves to logits: class weights, and a hidden size that is no multiple of 8. */
T_CASE(every_option_and_pair_agrees_with_the_oracle)
{
    int nth = 0;
    for (int i = 0; i < LINEAR_OPTIONS; i++)
        for (int j = i; j < LINEAR_OPTIONS; j++, nth++) {
            T_ENDS(linear_case_free) linear_case_t c;
            make(&c, 1, 37 + nth % 40, 257 + nth, nth % 7 ? 48 : 44, nth);
            linear_case_options(&c, 1u << i | 1u << j);
            linear_case_judge(&c, 1, t_text("options %d and %d, %d", i, j, nth));
        }
}

T_CASE(ranks_with_a_part_of_the_columns_agree_with_the_oracle)
{
    for (int i = 0; i < 20; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        make(&c, 2 + i % 3, 70 + i, 600 + 11 * i, 64, i);
        linear_case_shard(&c, (shard_kind_t)(i % SHARD_KINDS));
        linear_case_options(&c, WITH_ENTROPY | LINEAR_IGNORED | LINEAR_BIAS |
                                    (i % 4 == 3 ? WITH_LOSS | WITH_SMOOTH | WITH_CORRECT : 0));
        linear_case_judge(&c, 1, t_text("%d ranks, %d", 2 + i % 3, i));
    }
}

T_CASE(chunks_change_no_bit)
{
    static const int64_t chunks[] = {520, 256, 200, 7, 0};
    for (int i = 0; i < 10; i++) {
        linear_case_t first;
        const uint64_t same = rng;
        for (int k = 0; k < 5; k++) {
            linear_case_t c;
            rng = same;
            make(&c, 1, 520, 300, 64, 2 * i);
            linear_case_options(&c, WITH_ENTROPY | LINEAR_IGNORED);
            c.config.logprob.chunk_size = chunks[k];
            if (linear_case_run(&c) != COLO_OK)
                fail_msg("chunk %d: %s", (int)chunks[k], colo_last_error());
            if (k == 0)
                first = c;
            else if (!linear_case_same(&first, &c, false))
                fail_msg("case %d: chunks of %d rows give other bits than one", i, (int)chunks[k]);
            if (k > 0)
                linear_case_free(&c);
        }
        linear_case_free(&first);
    }
}

/* A bias puts an infinity into a column of every row; hidden states of one token put it into a row.
 * The columns of rank 1 of 2 begin within no tile of rank 0. */
enum { T = 140, V = 700, H = 64 };

static void special(linear_case_t *c, int i)
{
    make(c, 2, T, V, H, i);
    c->has_bias = true;
    c->config.logprob.want_entropy = true;
    for (int64_t t = 0; t < T; t++)
        c->targets[0][t] = t * 5;
}

T_CASE(minus_infinity_next_to_the_target_adds_nothing)
{
    for (int i = 0; i < 20; i++) {
        T_ENDS(linear_case_free) linear_case_t c, without;
        const uint64_t same = rng;
        special(&c, i);
        rng = same;
        special(&without, i);
        for (int64_t v = 257; v < V; v++) /* tiles, and the whole of a rank's columns */
            if (v % 5) {
                c.b[v] = -INFINITY;
                without.b[v] = -2e4; /* e^-20000 is 0, too */
            }
        assert_ok(linear_case_run(&c));
        assert_ok(linear_case_run(&without));
        assert_true(linear_case_same(&c, &without, true));
    }
}

T_CASE(a_tile_or_a_rank_of_minus_infinity_adds_nothing)
{
    for (int i = 0; i < 20; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        special(&c, i);
        for (int64_t t = 0; t < T; t++)
            c.targets[0][t] = t;
        for (int64_t v = 256; v < V; v++)
            c.b[v] = -INFINITY;
        assert_ok(linear_case_run(&c));
        assert_true(all_of(IS_FINITE, c.out[0][0], T) && all_of(IS_FINITE, c.out[1][1], T));
        c.targets[0][3] = 300;
        assert_ok(linear_case_run(&c));
        assert_true(c.out[0][0][3] == -INFINITY && isfinite(c.out[0][1][3]));
    }
}

T_CASE(a_nan_row_is_nan_on_all_ranks_and_stays_a_row)
{
    static const double bad[] = {NAN, INFINITY};
    for (int i = 0; i < 20; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        special(&c, i);
        c.h[0][77 * H] = bad[i / 5 % 2]; /* column 0 of W has both signs: +inf somewhere */
        assert_ok(linear_case_run(&c));
        for (int r = 0; r < 2; r++)
            for (int64_t t = 0; t < T; t++) {
                assert_true(isnan(c.out[r][0][t]) == (t == 77));
                assert_true(isnan(c.out[r][1][t]) == (t == 77));
            }
    }
}

T_CASE(targets_outside_the_vocabulary_are_counted_and_nan)
{
    for (int i = 0; i < 20; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        special(&c, i);
        c.targets[0][1] = V;
        c.targets[0][40] = -7;
        c.targets[0][139] = -100;
        assert_ok(linear_case_run(&c));
        for (int r = 0; r < 2; r++) {
            assert_int_equal(c.n_valid[r], T - 3);
            assert_int_equal(c.n_invalid[r], 2);
            for (int64_t t = 0; t < T; t++) {
                assert_true(isnan(c.out[r][0][t]) == (t == 1 || t == 40));
                assert_true(isfinite(c.out[r][1][t]));
            }
            assert_true(c.out[r][0][139] == 0 && c.out[r][1][139] == 0);
        }
    }
}

/* ---- memory ---- */

typedef struct object {
    colo_comm_t *self;
    colo_lm_head_t *head;
    colo_linear_logprob_t *linear;
} object_t;

static void object_free(object_t *o)
{
    colo_linear_logprob_destroy(&o->linear);
    colo_lm_head_destroy(&o->head);
    colo_comm_destroy(&o->self);
}

static void object_make(object_t *o, int64_t hidden, size_t without_logits)
{
    const colo_lm_head_config_t head = {COLO_LM_HEAD_CONFIG_INIT, .rows = 150000, .hidden = hidden,
                                        .dtype = COLO_BF16, .mem = COLO_MEM_CUDA};
    colo_linear_logprob_config_t config = {COLO_LINEAR_LOGPROB_CONFIG_INIT};
    config.logprob.logits.vocab = 150000;
    config.mode = COLO_LINEAR_LOGPROB_LOGPROB;
    config.without_logits = without_logits;
    assert_ok(colo_comm_create_self(&o->self));
    assert_ok(colo_lm_head_create(&o->head, &head, NULL));
    assert_ok(colo_linear_logprob_create(&o->linear, &config, o->head, o->self));
}

static size_t workspace(int64_t hidden, size_t without_logits, colo_linear_logprob_pass_t pass)
{
    T_ENDS(object_free) object_t o = {NULL};
    size_t bytes;
    object_make(&o, hidden, without_logits);
    assert_ok(colo_linear_logprob_workspace_size(o.linear, pass, 65536, -1, &bytes));
    return bytes;
}

T_CASE_IF(has_it(), forward_without_logits_has_memory_for_tiles_alone)
{
    const size_t budget = 64 << 20, most = 72 << 20; /* numbers of each token come besides */
    assert_true(workspace(2048, budget, COLO_LINEAR_LOGPROB_INFERENCE) < most);
    assert_true(workspace(2048, budget, COLO_LINEAR_LOGPROB_FORWARD) < most);
    assert_true(workspace(2048, 0, COLO_LINEAR_LOGPROB_FORWARD) > (size_t)512 << 20);
    assert_true(workspace(2044, budget, COLO_LINEAR_LOGPROB_FORWARD) > (size_t)512 << 20);
    assert_true(workspace(2048, budget, COLO_LINEAR_LOGPROB_BACKWARD) > budget);
}

/* Nothing is enqueued, so the addresses need be none. */
T_CASE_IF(has_it(), without_logits_what_needs_them_is_refused)
{
    T_ENDS(object_free) object_t o = {NULL};
    object_make(&o, 64, 1 << 20);
    const int64_t rows[] = {150000, 64}, one[] = {1, 64};
    GPU_AUTOFREE void *memory = gpu_put(NULL, 1 << 20);
    const colo_tensor_t weight = colo_tensor_cuda((char *)memory + 2, COLO_BF16, 0, 2, rows),
                        hidden = colo_tensor_cuda(memory, COLO_BF16, 0, 2, one),
                        targets = colo_tensor_cuda(memory, COLO_I64, 0, 1, one),
                        logp = colo_tensor_cuda(memory, COLO_F32, 0, 1, one);
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &logp};
    const colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &hidden, &targets, -1,
                                               NULL, NULL};
    assert_ok(colo_lm_head_bind(o.head, &weight, NULL, NULL));
    assert_fails(colo_linear_logprob_forward(o.linear, &batch, &out, NULL, NULL, memory, NULL),
                 COLO_ERR_ARG, "expected both to be multiples of 16 bytes");
}

T_MAIN_AFTER(gpu_need(1), rng = t_seed(), "gpu/head_product")
