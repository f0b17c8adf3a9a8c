/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear.c - the lm_head path on GPUs: the cases of tests/loss/linear_case.h, whose oracle is
 * fp64 and whose tolerances are derived there. One GPU here;
 * W x D of them with NCCL in test_linear_ranks.c.
 */
#include "gpu/linear_gpu.h"

static uint64_t rng;

static void one(unsigned bits, int mode, int dtypes, int64_t chunk)
{
    T_ENDS(linear_case_free) linear_case_t c;
    linear_gpu_case(&c, bits, mode, 1, 1, dtypes, chunk, &rng);
    linear_case_judge(&c, 1, t_text("options %03x, mode %d, dtypes %d", bits, mode, dtypes));
}

T_CASE(every_option_and_pair_agrees_with_the_oracle)
{
    int nth = 0;
    for (int i = 0; i < LINEAR_OPTIONS; i++)
        for (int j = i; j < LINEAR_OPTIONS; j++, nth++)
            one(1u << i | 1u << j, nth % 4, nth / 4, 1 + nth % 9);
}

T_CASE(all_options_at_once_agree_in_every_mode_and_dtype)
{
    for (int i = 0; i < 64; i++)
        one((1u << LINEAR_OPTIONS) - 1, i % 4, i / 4, 1 + i % 40);
}

/* As tests/loss/test_linear.c has them. */
T_CASE(upstream_gradients_of_any_size_are_right_in_half_precision)
{
    for (int i = 0; i < 48; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_upstream(&c, 1, i, &rng);
        linear_case_judge(&c, 1, "upstream far from 1");
    }
}

T_CASE(without_tokens_gradients_of_the_head_are_0)
{
    for (int i = 0; i < 12; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_empty(&c, 1, i, &rng);
        linear_case_judge(&c, 1, "no tokens");
    }
}

T_CASE(a_support_takes_the_vocabularys_place)
{
    for (int i = 0; i < 24; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_listed(&c, 1, 1, i, &rng);
        linear_case_judge(&c, 1, "lists");
    }
}

/* Chunks of many rows, as products of real sizes have them; in the loss pass joined ones, with
 * gradients in memory of their own and over the logits. */
T_CASE(long_chunks_agree_with_the_oracle)
{
    for (int i = 0; i < 8; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 1, 1, 2500, 640, 32, COLO_BF16, &rng);
        linear_case_options(&c, WITH_ENTROPY | LINEAR_IGNORED | (i % 3 ? LINEAR_LORA : 0));
        linear_case_mode(&c, i % 4);
        c.config.logits_dtype = i < 4 ? COLO_F32 : COLO_BF16;
        c.config.budget = 1;
        linear_case_judge(&c, 1, "long chunks");
    }
}

/* Vocabularies that backward makes in blocks of columns, in every dtype, and logits in both. */
T_CASE(blocks_of_columns_agree_with_the_oracle)
{
    for (int i = 0; i < 64; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_init(&c, 1, 1, 24, 20011, 16, linear_gpu_head(i / 4), &rng);
        linear_gpu_ask(&c,
                       WITH_ENTROPY | WITH_LOSS | WITH_SMOOTH | LINEAR_BIAS | LINEAR_IGNORED |
                           (i % 3 == 1 ? LINEAR_LORA : 0),
                       i % 4, i / 4);
        c.config.keep_in_place = i % 4 == 1 && c.config.logits_dtype == c.dtype;
        c.config.logprob.chunk_size = i / 32 * 7; /* 16 rows of blocks, or all */
        linear_case_judge(&c, 1, "blocks of columns");
    }
}

T_CASE(shared_d_weight_agrees_with_the_oracle)
{
    for (int i = 0; i < 36; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_shared(&c, 1, i, &rng);
        linear_case_judge(&c, 1, "shared");
    }
}

T_CASE(chunks_change_no_bit_of_outputs_and_d_hidden)
{
    static const int64_t chunks[] = {2200, 700, 64, 1, 0}; /* 0: from the budget */
    for (int i = 0; i < 8; i++) {
        linear_case_t first, c;
        for (int k = 0; k < 5; k++) {
            uint64_t same = 77 + (uint64_t)i;
            linear_case_init(&c, 1, 1, 2200, 300, 40, i % 2 ? COLO_BF16 : COLO_F32, &same);
            linear_case_options(&c, WITH_ENTROPY | WITH_LOSS | WITH_SMOOTH);
            linear_case_mode(&c, i / 2);
            c.config.logprob.chunk_size = chunks[k];
            c.config.budget = 1;
            if (linear_case_run(&c) != COLO_OK)
                fail_msg("chunk %d: %s", (int)chunks[k], colo_last_error());
            if (k == 0)
                first = c;
            else if (!linear_case_same(&first, &c, false))
                fail_msg("case %d: chunks of %d rows give other bits than of %d", i, (int)chunks[k],
                         (int)chunks[0]);
            if (k > 0)
                linear_case_free(&c);
        }
        linear_case_free(&first);
    }
}

/* ---- graphs ---- */

enum { T = 300, V = 130, H = 48 };

enum { HIDDEN, TARGETS, WEIGHT, OUT, D_HIDDEN, D_WEIGHT, ARRAYS };
static const size_t bytes_of[] = {T * H * 4, T * 8, V *H * 4, T * 4, T *H * 4, V *H * 4};

typedef struct step {
    void *at[ARRAYS], *work;
    colo_linear_logprob_t *linear;
    colo_lm_head_t *head;
} step_t;

static void step_inputs(const step_t *s)
{
    float h[T * H];
    int64_t targets[T];
    for (int i = 0; i < T * H; i++)
        h[i] = (float)(2 * t_uniform(&rng) - 1);
    for (int i = 0; i < T; i++)
        targets[i] = t_below(&rng, 4) ? t_below(&rng, V) : -100;
    assert_cuda(t_to_device(s->at[HIDDEN], h, sizeof h));
    assert_cuda(t_to_device(s->at[TARGETS], targets, sizeof targets));
}

static colo_status_t step_run(const step_t *s, cudaStream_t stream)
{
    colo_tensor_t hidden = colo_tensor_cuda(s->at[HIDDEN], COLO_F32, 0, 2, (int64_t[]){T, H});
    colo_tensor_t targets = colo_tensor_cuda(s->at[TARGETS], COLO_I64, 0, 1, (int64_t[]){T});
    colo_tensor_t d_h = colo_tensor_cuda(s->at[D_HIDDEN], COLO_F32, 0, 2, (int64_t[]){T, H});
    colo_tensor_t d_w = colo_tensor_cuda(s->at[D_WEIGHT], COLO_F32, 0, 2, (int64_t[]){V, H});
    colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &hidden, &targets, -1,
                                         NULL};
    colo_linear_logprob_upstream_t up = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = -1,
                                         .mean = true};
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT,
                              .logp = T_CUDA_TENSOR(s->at[OUT], COLO_F32, 0, T)};
    colo_linear_logprob_grads_t grads = {COLO_LINEAR_LOGPROB_GRADS_INIT, &d_h, &d_w, NULL};
    return colo_linear_logprob_loss(s->linear, &batch, &up, &out, &grads, s->work, stream);
}

T_CASE(a_captured_loss_follows_its_inputs)
{
    step_t s;
    size_t bytes;
    float w[V * H];
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int i = 0; i < V * H; i++)
        w[i] = (float)(2 * t_uniform(&rng) - 1);
    for (int i = 0; i < ARRAYS; i++)
        s.at[i] = gpu_put(i == WEIGHT ? w : NULL, bytes_of[i]);
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H,
                                .mem = COLO_MEM_CUDA};
    hc.device = 0;
    assert_ok(colo_lm_head_create(&s.head, &hc, NULL));
    colo_tensor_t weight = colo_tensor_cuda(s.at[WEIGHT], COLO_F32, 0, 2, (int64_t[]){V, H});
    assert_ok(colo_lm_head_bind(s.head, &weight, NULL, NULL));
    colo_linear_logprob_config_t config = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    config.logprob.logits.vocab = V;
    config.logprob.chunk_size = 64;
    config.d_weight_add = false;
    assert_ok(colo_linear_logprob_create(&s.linear, &config, s.head, t_self()));
    assert_ok(
        colo_linear_logprob_workspace_size(s.linear, COLO_LINEAR_LOGPROB_LOSS, T, -1, &bytes));
    s.work = gpu_put(NULL, bytes);
    assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    step_inputs(&s);
    assert_ok(step_run(&s, stream)); /* cuBLAS sets itself up */
    assert_cuda(cudaStreamSynchronize(stream));
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_ok(step_run(&s, stream));
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int nth = 0; nth < 20; nth++) {
        static unsigned char eager[ARRAYS][V * H * 4 + T * H * 4],
            replayed[ARRAYS][sizeof eager[0]];
        step_inputs(&s);
        assert_cuda(cudaGraphLaunch(exec, stream));
        for (int k = OUT; k < ARRAYS; k++) {
            gpu_get(replayed[k], s.at[k], bytes_of[k]);
            assert_cuda(cudaMemset(s.at[k], 0xff, bytes_of[k]));
        }
        assert_ok(step_run(&s, stream));
        for (int k = OUT; k < ARRAYS; k++) {
            gpu_get(eager[k], s.at[k], bytes_of[k]);
            if (memcmp(eager[k], replayed[k], bytes_of[k]) != 0)
                fail_msg("replay %d: output %d differs from a launched call's", nth, k - OUT);
        }
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    colo_linear_logprob_destroy(&s.linear);
    colo_lm_head_destroy(&s.head);
    for (int i = 0; i < ARRAYS; i++)
        gpu_free(s.at[i]);
    gpu_free(s.work);
}

T_MAIN_AFTER(gpu_need(1), rng = t_seed(), "gpu/linear")
