/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_early.c - memory of mode early: how much, and a d_weight whose memory holds gradients
 * of logits. What else the mode does is in test_linear.c.
 */
#include "loss/linear_alone.h"

T_CASE(shared_d_weight_agrees_with_the_oracle)
{
    uint64_t rng = t_seed() + 15;
    for (int i = 0; i < 36; i++) {
        if (t_left_out(i))
            continue;
        T_ENDS(linear_case_free) linear_case_t c;
        linear_case_shared(&c, 1 + i % 2, i, &rng);
        assert_ok(linear_case_run(&c));
        linear_case_compare(&c, "shared");
    }
}

T_CASE(shared_d_weight_is_where_forward_left_it_and_read_once)
{
    enum { WORDS = 3000, ROWS = 16, H = 3 };
    size_t bytes, whole;
    T_ENDS(alone_free) alone_t a;
    alone_init(&a, ROWS, WORDS, H, NULL);
    a.config.mode = COLO_LINEAR_LOGPROB_EARLY;
    a.config.logprob.want_loss = true;
    a.config.d_weight_add = false;
    alone_make(&a);
    assert_ok(colo_linear_logprob_saved_size(a.linear, ROWS, -1, &whole));
    a.config.share_d_weight = true;
    alone_make(&a);
    assert_ok(colo_linear_logprob_saved_size(a.linear, ROWS, -1, &bytes));
    assert_true(bytes < whole);
    a.dw.data = a.d_w + H;
    a.out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .loss = &a.of_logp};
    a.up = (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .loss = 1};
    assert_ok(alone_bind(&a));
    assert_fails(alone_early(&a), COLO_ERR_ARG, "saved.d_weight is NULL");
    a.saved.d_weight = a.d_w;
    assert_ok(alone_early(&a));
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "without gaps: it holds gradients of logits");
    a.dw.data = a.d_w;
    assert_ok(alone_backward(&a));
    assert_fails(alone_backward(&a), COLO_ERR_STATE, "a backward in place ended it");
}

enum { V = 152064, H = 4096, T = 8192 };

/* A whole head of bf16, which the caller destroys. */
static colo_linear_logprob_config_t make_large(colo_lm_head_t **head)
{
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H,
                                .dtype = COLO_BF16};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    lc.logprob.logits.vocab = V;
    assert_ok(colo_lm_head_create(head, &hc, NULL));
    return lc;
}

/* Bytes that a step of mode early takes beyond its inputs: T 8192, H 4096, V 152,064, bf16. First
 * the gradient of the weight is main_grad, which does not count, then a bf16 one, which does, and
 * then logits are bf16, too. Two chunks of logits are 512 rows of f32 or 1,024 of bf16 each. */
T_CASE(early_of_a_large_vocabulary_takes_at_most_3_GiB)
{
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_linear_logprob_config_t lc = make_large(&head);
    lc.mode = COLO_LINEAR_LOGPROB_EARLY;
    for (int i = 0; i < 3; i++) {
        const bool shared = i > 0;
        lc.logits_dtype = i > 1 ? COLO_BF16 : COLO_F32;
        lc.share_d_weight = shared;
        lc.d_weight_add = !shared;
        lc.d_weight_dtype = shared ? COLO_BF16 : COLO_F32;
        T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
        assert_ok(colo_linear_logprob_create(&linear, &lc, head, t_self()));
        for (int pass = COLO_LINEAR_LOGPROB_FORWARD; pass <= COLO_LINEAR_LOGPROB_BACKWARD; pass++) {
            const size_t products = 32 << 20, d_weight = shared ? (size_t)V * H * 2 : 0,
                         d_hidden = pass == COLO_LINEAR_LOGPROB_BACKWARD ? (size_t)T * H * 2 : 0,
                         logits = pass == COLO_LINEAR_LOGPROB_FORWARD ? (size_t)2 * 512 * V * 4 : 0;
            size_t saved, work;
            assert_ok(colo_linear_logprob_saved_size(linear, T, -1, &saved));
            assert_ok(colo_linear_logprob_workspace_size(linear, (colo_linear_logprob_pass_t)pass,
                                                         T, -1, &work));
            assert_true(saved + work + products + d_weight + d_hidden <= (size_t)3 << 30);
            assert_true(work >= logits);
        }
    }
}

/* The loss pass adds to main_grad, which does not count. f32 logits of two chunks, and gradients of
 * 2,048 rows, or bf16 logits in place of 4,096 rows, are 1.16 GiB each. */
T_CASE(loss_of_a_large_vocabulary_takes_at_most_1_3_GiB)
{
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_linear_logprob_config_t lc = make_large(&head);
    for (int i = 0; i < 2; i++) {
        const size_t products = 32 << 20, d_hidden = (size_t)T * H * 2, row = (size_t)V * 2;
        size_t work;
        lc.logits_dtype = i ? COLO_BF16 : COLO_F32;
        T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
        assert_ok(colo_linear_logprob_create(&linear, &lc, head, t_self()));
        assert_int_equal(colo_linear_logprob_chunk(linear, T), i ? 4096 : 512);
        assert_ok(
            colo_linear_logprob_workspace_size(linear, COLO_LINEAR_LOGPROB_LOSS, T, -1, &work));
        assert_true(work + products + d_hidden <= (size_t)13 * (1 << 30) / 10);
        assert_true(work >= 4096 * row);
    }
}

T_MAIN("loss/linear_early")
