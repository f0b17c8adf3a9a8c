/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pointers.c - what a call on device memory asks CUDA: once for the device, once for the
 * stream, once about each pointer. And lists of a support that no kernel can read are refused,
 * forward and backward.
 */
#include "fake.h"
#include "harness/harness.h"

#include "core/device.h"

enum { T = 2, V = 4, COUNT = 3 };

static void *on_device(const void *from, size_t bytes)
{
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, bytes), cudaSuccess);
    if (from)
        assert_int_equal(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static colo_tensor_t tensor(void *p, colo_dtype_t dtype, int64_t rows, int64_t columns)
{
    return colo_tensor_cuda(p, dtype, 0, columns ? 2 : 1, (int64_t[]){rows, columns});
}

/* ---- what is asked ---- */

/* All calls of the runtime and all launches since @before. */
static void expect(int64_t before, int64_t want)
{
    assert_int_equal(fake_calls(0) - before, want);
}

/* Fifteen pointers: logits, targets, temperature, workspace, stats, and ten outputs. Backward:
 * logits, their gradient, targets, stats, and four gradients of outputs. */
T_CASE(loss_with_all_outputs_asks_once_about_each_pointer)
{
    enum { BYTES = 1024 };
    const colo_logprob_config_t cfg = {
        COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V,      .want_entropy = true, .want_loss = true,
        .want_correct = true,     .want_argmax = true,    .want_lse = true,     .want_sum_p2 = true,
        .want_mean_logits = true, .has_temperature = true};
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT};
    enum { POINTERS = 19 };
    void *p[POINTERS];
    for (int i = 0; i < POINTERS; i++) {
        p[i] = on_device(NULL, BYTES);
        assert_int_equal(cudaMemset(p[i], 0, BYTES), cudaSuccess);
    }
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT,
                                    .logp = T_GIVEN(tensor(p[0], COLO_F32, T, 0)),
                                    .entropy = T_GIVEN(tensor(p[1], COLO_F32, T, 0)),
                                    .loss = T_GIVEN(tensor(p[2], COLO_F32, T, 0)),
                                    .correct = T_GIVEN(tensor(p[3], COLO_U8, T, 0)),
                                    .n_valid = T_GIVEN(tensor(p[4], COLO_I64, 1, 0)),
                                    .n_invalid = T_GIVEN(tensor(p[5], COLO_I64, 1, 0)),
                                    .argmax = T_GIVEN(tensor(p[13], COLO_I64, T, 0)),
                                    .lse = T_GIVEN(tensor(p[14], COLO_F32, T, 0)),
                                    .sum_p2 = T_GIVEN(tensor(p[15], COLO_F32, T, 0)),
                                    .mean_logits = T_GIVEN(tensor(p[16], COLO_F32, T, 0))};
    const colo_logprob_upstream_t d = {COLO_LOGPROB_UPSTREAM_INIT,
                                       .d_logp = T_GIVEN(tensor(p[6], COLO_F32, T, 0)),
                                       .d_entropy = T_GIVEN(tensor(p[7], COLO_F32, T, 0)),
                                       .d_loss = T_GIVEN(tensor(p[8], COLO_F32, T, 0)),
                                       .d_lse = T_GIVEN(tensor(p[17], COLO_F32, T, 0))};
    const colo_tensor_t z = tensor(p[9], COLO_F32, T, V), d_z = tensor(p[10], COLO_F32, T, V),
                        targets = tensor(on_device(p[9], BYTES), COLO_I64, T, 0);
    const colo_tensor_t temperature = tensor(p[18], COLO_F32, T, 0);
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &z, .targets = &targets,
                                        .temperature = &temperature};
    colo_comm_t *self = t_self();
    int64_t before = fake_calls(0);
    assert_ok(colo_logprob_forward(&cfg, &batch, self, &out, &saved, p[11], p[12], NULL));
    expect(before, 1 + 15 + 2); /* of the device, pointers, launches */
    before = fake_calls(0);
    assert_ok(colo_logprob_backward(&saved, &d, &d_z, NULL));
    expect(before, 1 + 8 + 1);
    assert_int_equal(cudaFree(targets.data), cudaSuccess);
    for (int i = 0; i < POINTERS; i++)
        assert_int_equal(cudaFree(p[i]), cudaSuccess);
}

/* As a bridge and the partition helper check a call: the stream, and a pointer a side. */
T_CASE(checks_of_one_call_ask_once_for_device_and_stream)
{
    const colo_device_t *device = NULL;
    void *x = on_device(NULL, 4), *y = on_device(NULL, 4);
    bool capturing = true;
    colo_queries_t q = {0};
    assert_ok(colo_device_for(COLO_MEM_CUDA, &device));
    const int64_t before = fake_calls(0);
    assert_ok(device->stream_check(&q, NULL, &capturing));
    assert_false(capturing);
    assert_ok(device->pointer_check(&q, x, 0, "x"));
    assert_ok(device->pointer_check(&q, y, 0, "y"));
    assert_ok(device->pointer_check(&q, x, -1, "x"));
    assert_int_equal(q.device, 0);
    expect(before, 1 + 1 + 2); /* of the device, the stream, pointers */
    assert_fails(device->pointer_check(&q, x, 1, "x"), COLO_ERR_ARG, "a tensor of device 1");
    assert_int_equal(cudaFree(x), cudaSuccess);
    assert_int_equal(cudaFree(y), cudaSuccess);
}

/* ---- class weights and lists ---- */

T_CASE(class_weights_in_host_memory_are_refused)
{
    static const float host[T * V];
    const int64_t targets[T] = {0, 1};
    const colo_logprob_config_t cfg = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V,
                                       .want_loss = true, .label_smoothing = 0.1,
                                       .has_class_weight = true};
    colo_comm_t *self = t_self();
    size_t stats_bytes, workspace_bytes;
    assert_ok(colo_logprob_saved_size(&cfg, COLO_F32, T, &stats_bytes));
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, T, 1, &workspace_bytes));
    void *p[] = {on_device(host, sizeof host),      on_device(targets, sizeof targets),
                 on_device(host, V * sizeof *host), on_device(host, T * sizeof *host),
                 on_device(host, T * sizeof *host), on_device(NULL, stats_bytes),
                 on_device(NULL, workspace_bytes)};
    const colo_tensor_t z = tensor(p[0], COLO_F32, T, V), t = tensor(p[1], COLO_I64, T, 0),
                        loss = tensor(p[3], COLO_F32, T, 0);
    colo_tensor_t w = tensor(p[2], COLO_F32, V, 0), weight = tensor(p[4], COLO_F32, T, 0);
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &z, .targets = &t,
                                        .class_weight = &w};
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .loss = &loss, .weight = &weight};
    const colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT, .d_loss = &loss};
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT};
    w.data = (void *)host;
    assert_fails(colo_logprob_forward(&cfg, &batch, self, &out, &saved, p[5], p[6], NULL),
                 COLO_ERR_ARG, "class_weight: ");
    w.data = p[2];
    weight.data = (void *)host;
    assert_fails(colo_logprob_forward(&cfg, &batch, self, &out, &saved, p[5], p[6], NULL),
                 COLO_ERR_ARG, "weight: ");
    weight.data = p[4];
    assert_ok(colo_logprob_forward(&cfg, &batch, self, &out, &saved, p[5], p[6], NULL));
    colo_logprob_saved_t moved = saved;
    moved.class_weight.data = (void *)host;
    assert_fails(colo_logprob_backward(&moved, &up, &z, NULL), COLO_ERR_ARG, "class_weight: ");
    assert_ok(colo_logprob_backward(&saved, &up, &z, NULL));
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        assert_int_equal(cudaFree(p[i]), cudaSuccess);
}

T_CASE(lists_in_host_memory_are_refused)
{
    static const float host[T * V];
    int64_t targets[T] = {0, 1}, ids[COUNT] = {0, 1, 2}, begin[T] = {0, 2}, end[T] = {2, COUNT};
    void *lists[] = {ids, begin, end};
    static const char *const words[] = {"support: ids: ", "support: begin: ", "support: end: "};
    colo_logprob_config_t cfg = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V};
    colo_comm_t *self = NULL;
    size_t stats_bytes, workspace_bytes;
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_logprob_saved_size(&cfg, COLO_F32, T, &stats_bytes));
    assert_ok(colo_logprob_workspace_size(&cfg, COLO_F32, T, 1, &workspace_bytes));
    void *z = on_device(host, sizeof host), *t = on_device(targets, sizeof targets),
         *stats = on_device(NULL, stats_bytes), *workspace = on_device(NULL, workspace_bytes);
    void *kept[] = {on_device(ids, sizeof ids), on_device(begin, sizeof begin),
                    on_device(end, sizeof end)};
    float *logp = on_device(host, T * sizeof *logp);
    const colo_tensor_t of_logp = tensor(logp, COLO_F32, T, 0);
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &of_logp};
    const colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &of_logp};
    const colo_tensor_t zt = tensor(z, COLO_F32, T, V), tt = tensor(t, COLO_I64, T, 0);
    colo_tensor_t of[] = {tensor(kept[0], COLO_I64, COUNT, 0), tensor(kept[1], COLO_I64, T, 0),
                          tensor(kept[2], COLO_I64, T, 0)};
    const colo_support_t support = {&of[0], &of[1], &of[2]};
    const colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &zt, .targets = &tt,
                                        .support = &support};
    colo_logprob_saved_t saved = {COLO_LOGPROB_SAVED_INIT};
    for (int i = 0; i < 3; i++) {
        of[i].data = lists[i];
        assert_fails(colo_logprob_forward(&cfg, &batch, self, &out, &saved, stats, workspace, NULL),
                     COLO_ERR_ARG, words[i]);
        of[i].data = kept[i];
    }
    assert_ok(colo_logprob_forward(&cfg, &batch, self, &out, &saved, stats, workspace, NULL));
    for (int i = 0; i < 3; i++) {
        colo_logprob_saved_t moved = saved;
        colo_tensor_t *list[] = {&moved.support.ids, &moved.support.begin, &moved.support.end};
        list[i]->data = lists[i];
        assert_fails(colo_logprob_backward(&moved, &up, &zt, NULL), COLO_ERR_ARG, words[i]);
    }
    assert_ok(colo_logprob_backward(&saved, &up, &zt, NULL));
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    colo_comm_destroy(&self);
    void *all[] = {z, t, stats, workspace, kept[0], kept[1], kept[2], logp};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        assert_int_equal(cudaFree(all[i]), cudaSuccess);
}

T_MAIN("fake/pointers")
