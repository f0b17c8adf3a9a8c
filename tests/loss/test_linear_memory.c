/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_memory.c - the calls of a training step allocate nothing, whatever the mode: not a
 * byte, so in particular nothing of the size of all logits. This program's allocator counts; under
 * a sanitizer, which brings its own, the test is skipped.
 */
#include "harness/harness.h"

#include "harness/allocations.h"

enum { T = 96, V = 500, H = 16, CHUNK = 32 };

static float hidden_at[T * H], weight_at[V * H], d_hidden_at[T * H], d_weight_at[V * H];
static float logp_at[T], entropy_at[T];
static int64_t targets_at[T];

/* Bytes that one training step allocates. */
static size_t step(colo_linear_mode_t mode, bool loss_mode)
{
    colo_comm_t *self = t_self();
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .mode = mode};
    lc.logprob.logits.vocab = V;
    lc.logprob.chunk_size = CHUNK;
    lc.logprob.want_entropy = true;
    assert_ok(colo_lm_head_create(&head, &hc, self)); /* of a group of one: gathers to itself */
    assert_ok(colo_linear_logprob_create(&linear, &lc, head, self));
    size_t bytes[3], kept, capacity = 0;
    for (int p = 0; p < 3; p++) {
        assert_ok(
            colo_linear_logprob_workspace_size(linear, (colo_linear_pass_t)p, T, -1, &bytes[p]));
        capacity = bytes[p] > capacity ? bytes[p] : capacity;
    }
    assert_ok(colo_linear_logprob_saved_size(linear, T, -1, &kept));
    unsigned char *work = aligned_alloc(256, (capacity + 255) / 256 * 256);
    unsigned char *buffer = aligned_alloc(256, (kept + 255) / 256 * 256);
    unsigned char *gathered =
        aligned_alloc(256, (colo_lm_head_gathered_size(head) + 255) / 256 * 256);
    colo_tensor_t hidden = colo_tensor_host(hidden_at, COLO_F32, 2, (int64_t[]){T, H});
    colo_tensor_t targets = colo_tensor_host(targets_at, COLO_I64, 1, (int64_t[]){T});
    colo_tensor_t weight = colo_tensor_host(weight_at, COLO_F32, 2, (int64_t[]){V, H});
    colo_tensor_t d_hidden = colo_tensor_host(d_hidden_at, COLO_F32, 2, (int64_t[]){T, H});
    colo_tensor_t d_weight = colo_tensor_host(d_weight_at, COLO_F32, 2, (int64_t[]){V, H});
    colo_linear_batch_t batch = {&hidden, &targets, -1, NULL};
    colo_logprob_out_t out = {.logp = logp_at, .entropy = entropy_at};
    colo_linear_upstream_t up = {.logp = -1, .entropy = 0.1, .mean = true};
    colo_linear_grads_t grads = {&d_hidden, &d_weight, NULL};
    colo_linear_logprob_saved_t saved = {.valid = false};
    assert_ok(colo_lm_head_bind(head, &weight, NULL, gathered));

    atomic_store(&allocated, 0);
    atomic_store(&counting, true);
    colo_status_t st =
        loss_mode ? colo_linear_logprob_loss(linear, &batch, &up, &out, &grads, work, NULL)
                  : colo_linear_logprob_forward(linear, &batch, &out, &saved, buffer, work, NULL);
    if (st == COLO_OK && !loss_mode)
        st = colo_linear_logprob_backward(linear, &saved, &up, &grads, work, NULL);
    atomic_store(&counting, false);
    assert_ok(st);
    free(work);
    free(buffer);
    free(gathered);
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    return atomic_load(&allocated);
}

T_CASE(a_step_allocates_nothing)
{
    for (int64_t t = 0; t < T; t++)
        targets_at[t] = t % 5 ? t : -100;
    for (int mode = 0; mode < 3; mode++) {
        size_t bytes = step(mode == 1 ? COLO_LINEAR_KEEP : COLO_LINEAR_LOGPROB, mode == 2);
        if (bytes)
            fail_msg("mode %d: %zu bytes were allocated (one-hot targets: %zu)", mode, bytes,
                     (size_t)T * V * sizeof(int64_t));
    }
}

/* An allocator that is not asked would count nothing, too. */
T_CASE(the_allocator_counts)
{
    atomic_store(&allocated, 0);
    atomic_store(&counting, true);
    void *volatile p = malloc(100);
    void *volatile q = calloc(3, 7);
    atomic_store(&counting, false);
    free(p);
    free(q);
    assert_int_equal(atomic_load(&allocated), 121);
}

int main(void)
{
#ifdef SANITIZED
    return T_EXIT_SKIP;
#endif
    return t_main("loss/linear_memory");
}
