/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_aligned.c - workspace and saved memory begin at a multiple of 256 bytes in every call of a
 * loss, and every size query gives a multiple of 256, so that they can follow each other.
 */
#include "loss/loss_alone.h"

enum { CAPACITY = 4096 };

static colo_comm_t *alone;
static _Alignas(COLO_ALIGNMENT) unsigned char saved_memory[CAPACITY], work_memory[CAPACITY];
static double line[T], other[T];
static colo_tensor_t values;

static colo_status_t of_logits(loss_t loss, void *saved, void *work)
{
    alone_t a;
    alone_init(&a, loss);
    a.arg.no_saved = !saved;
    a.arg.stats = saved;
    a.arg.workspace = work;
    return alone_forward(&a);
}

static const colo_sequence_t sequence = {COLO_SEQUENCE_INIT, .batch = 1, .positions = T};

static colo_status_t gather(void *work)
{
    const colo_tensor_t out = colo_tensor_host(other, COLO_F64, 2, (int64_t[]){1, T - 1});
    return colo_sequence_gather(&sequence, &values, &out, alone, work, NULL);
}

static colo_status_t gather_backward(void *work)
{
    const colo_tensor_t d_out = colo_tensor_host(other, COLO_F64, 2, (int64_t[]){1, T - 1});
    return colo_sequence_gather_backward(&sequence, COLO_SEQUENCE_SUM, &d_out, &values, alone, work,
                                         NULL);
}

static colo_status_t weighted(void *work)
{
    colo_weighted_t out;
    return colo_loss_weighted_sum(&values, NULL, NULL, alone, &out, NULL, work, NULL);
}

static colo_status_t mean(void *work)
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
    colo_status_t (*call)(void *work); /* NULL: @loss */
    loss_t loss;
} calls[] = {
    {"logprob", NULL, LOGPROB},       {"topk", NULL, GIVEN},
    {"distill", NULL, DISTILL},       {"sequence", gather, 0},
    {"sequence", gather_backward, 0}, {"weighted sum", weighted, 0},
    {"loss mean", mean, 0},
};

static colo_status_t call(size_t i, void *saved, void *work)
{
    return calls[i].call ? calls[i].call(work) : of_logits(calls[i].loss, saved, work);
}

T_CASE(memory_past_a_multiple_of_256_is_refused)
{
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        assert_ok(call(i, saved_memory, work_memory));
        for (int past = 8; past < COLO_ALIGNMENT; past *= 2) {
            char text[96];
            snprintf(text, sizeof text, "%s: workspace is %d past a multiple of 256 bytes, ",
                     calls[i].name, past);
            assert_fails(call(i, NULL, work_memory + past), COLO_ERR_ARG, text);
            snprintf(text, sizeof text, "%s: saved memory is %d past a multiple of 256 bytes, ",
                     calls[i].name, past);
            if (!calls[i].call)
                assert_fails(call(i, saved_memory + past, work_memory), COLO_ERR_ARG, text);
        }
    }
}

T_CASE(sizes_are_multiples_of_256)
{
    for (int64_t tokens = 0; tokens < 40; tokens++)
        for (int32_t ranks = 1; ranks < 4; ranks++) {
            const colo_sequence_t s = {COLO_SEQUENCE_INIT, .batch = tokens, .positions = 2};
            size_t bytes[2 * LOSSES + 2] = {0};
            int n = 0;
            for (int l = 0; l < LOSSES; l++) {
                alone_t a;
                alone_init(&a, (loss_t)l);
                if (l != SAMPLING)
                    assert_ok(alone_saved_size(&a, COLO_F32, tokens, &bytes[n++]));
                assert_ok(alone_workspace_size(&a, COLO_F32, tokens, ranks, &bytes[n++]));
            }
            assert_ok(colo_sequence_workspace_size(&s, COLO_F64, &bytes[n++]));
            bytes[n++] = colo_loss_weighted_workspace_size(ranks);
            for (int i = 0; i < n; i++)
                if (bytes[i] % 256)
                    fail_msg("query %d gives %zu bytes for %d tokens", i, bytes[i], (int)tokens);
        }
}

static int setup(void **state)
{
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

T_MAIN_AROUND("loss/aligned", setup, teardown)
