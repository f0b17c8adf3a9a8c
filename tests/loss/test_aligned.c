/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_aligned.c - workspace and saved memory begin at a multiple of 256 bytes in every call of a
 * loss, and every size query gives a multiple of 256, so that they can follow each other.
 */
#include "harness/harness.h"

enum { T = 3, V = 5, CAPACITY = 4096 };

static colo_comm_t *alone;
static _Alignas(COLO_ALIGNMENT) unsigned char saved_memory[CAPACITY], work_memory[CAPACITY];
static double z[T * V], d[T * V], line[T], other[T];
static int64_t ids[T] = {0, 1, 2};
static colo_tensor_t logits, d_logits, targets, values, column;

static colo_status_t logprob(void *saved, void *work)
{
    const colo_logprob_config_t config = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V};
    colo_logprob_saved_t state;
    return colo_logprob_forward(
        &config, &(colo_logprob_batch_t){.logits = &logits, .targets = &targets}, alone,
        &(colo_logprob_out_t){.logp_f64 = line}, saved ? &state : NULL, saved, work, NULL);
}

static colo_status_t topk(void *saved, void *work)
{
    const colo_topk_config_t config = {COLO_TOPK_CONFIG_INIT, .logits.vocab = V, .k = 1};
    colo_topk_saved_t state;
    return colo_topk_forward(&config, &(colo_topk_batch_t){.logits = &logits, .ids = &column},
                             alone, &(colo_topk_out_t){.logp_f64 = line}, saved ? &state : NULL,
                             saved, work, NULL);
}

static colo_status_t distill(void *saved, void *work)
{
    const colo_distill_config_t config = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = V};
    colo_distill_saved_t state;
    return colo_distill_forward(
        &config, &(colo_distill_batch_t){.logits = &logits, .targets = &d_logits}, alone,
        &(colo_distill_out_t){.kl_f64 = line}, saved ? &state : NULL, saved, work, NULL);
}

static const colo_sequence_t sequence = {COLO_SEQUENCE_INIT, .batch = 1, .positions = T};

static colo_status_t gather(void *saved, void *work)
{
    const colo_tensor_t out = colo_tensor_host(other, COLO_F64, 2, (int64_t[]){1, T - 1});
    return colo_sequence_gather(&sequence, &values, &out, alone, work, NULL);
}

static colo_status_t gather_backward(void *saved, void *work)
{
    const colo_tensor_t d_out = colo_tensor_host(other, COLO_F64, 2, (int64_t[]){1, T - 1});
    return colo_sequence_gather_backward(&sequence, COLO_SEQUENCE_SUM, &d_out, &values, alone, work,
                                         NULL);
}

static colo_status_t weighted(void *saved, void *work)
{
    colo_weighted_t out;
    return colo_loss_weighted_sum(&values, NULL, NULL, alone, &out, NULL, work, NULL);
}

static colo_status_t mean(void *saved, void *work)
{
    double out[4];
    const int64_t n_valid = T;
    return colo_loss_mean_forward(
        &values, &n_valid, true, alone,
        &(colo_loss_mean_t){.value_f64 = out, .num = out + 1, .den = out + 2, .factor = out + 3},
        work, NULL);
}

static const struct {
    const char *name;
    colo_status_t (*call)(void *saved, void *work);
    bool saves;
} calls[] = {
    {"logprob", logprob, true},           {"topk", topk, true},
    {"distill", distill, true},           {"sequence", gather, false},
    {"sequence", gather_backward, false}, {"weighted sum", weighted, false},
    {"loss mean", mean, false},
};

T_CASE(memory_past_a_multiple_of_256_is_refused)
{
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        assert_ok(calls[i].call(calls[i].saves ? saved_memory : NULL, work_memory));
        for (int past = 8; past < COLO_ALIGNMENT; past *= 2) {
            char text[96];
            snprintf(text, sizeof text, "%s: workspace is %d past a multiple of 256 bytes, ",
                     calls[i].name, past);
            assert_fails(calls[i].call(NULL, work_memory + past), COLO_ERR_ARG, text);
            snprintf(text, sizeof text, "%s: saved memory is %d past a multiple of 256 bytes, ",
                     calls[i].name, past);
            if (calls[i].saves)
                assert_fails(calls[i].call(saved_memory + past, work_memory), COLO_ERR_ARG, text);
        }
    }
}

T_CASE(sizes_are_multiples_of_256)
{
    const colo_logprob_config_t l = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V};
    const colo_topk_config_t k = {COLO_TOPK_CONFIG_INIT, .logits.vocab = V, .k = 1};
    const colo_distill_config_t t = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = V};
    for (int64_t tokens = 0; tokens < 40; tokens++)
        for (int32_t ranks = 1; ranks < 4; ranks++) {
            const colo_sequence_t s = {COLO_SEQUENCE_INIT, .batch = tokens, .positions = 2};
            size_t bytes[8];
            assert_ok(colo_logprob_saved_size(&l, COLO_F32, tokens, &bytes[0]));
            assert_ok(colo_logprob_workspace_size(&l, COLO_F32, tokens, ranks, &bytes[1]));
            assert_ok(colo_topk_saved_size(&k, tokens, &bytes[2]));
            assert_ok(colo_topk_workspace_size(&k, COLO_F32, tokens, ranks, &bytes[3]));
            assert_ok(colo_distill_saved_size(&t, tokens, &bytes[4]));
            assert_ok(colo_distill_workspace_size(&t, COLO_F32, tokens, ranks, &bytes[5]));
            assert_ok(colo_sequence_workspace_size(&s, COLO_F64, &bytes[6]));
            bytes[7] = colo_loss_weighted_workspace_size(ranks);
            for (int i = 0; i < 8; i++)
                if (bytes[i] % 256)
                    fail_msg("query %d gives %zu bytes for %d tokens", i, bytes[i], (int)tokens);
        }
}

static int setup(void **state)
{
    logits = colo_tensor_host(z, COLO_F64, 2, (int64_t[]){T, V});
    d_logits = colo_tensor_host(d, COLO_F64, 2, (int64_t[]){T, V});
    targets = colo_tensor_host(ids, COLO_I64, 1, (int64_t[]){T});
    column = colo_tensor_host(ids, COLO_I64, 2, (int64_t[]){T, 1});
    values = colo_tensor_host(line, COLO_F64, 1, (int64_t[]){T});
    assert_ok(colo_comm_create_self(&alone));
    assert_ok(colo_comm_set_check(alone, 1));
    return 0;
}

static int teardown(void **state)
{
    colo_comm_destroy(&alone);
    return 0;
}

int main(void)
{
    return t_main_around("loss/aligned", setup, teardown);
}
