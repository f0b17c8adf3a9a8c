/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_queries.c - what a call on CUDA memory asks the driver: once for the device, once for the
 * stream, once about each pointer. COLO_BACKEND_DIR has a libcolobridge-cuda.so on a driver that
 * counts (counted-cuda/driver.c); no GPU is needed, and nothing is computed.
 */
#include "harness/harness.h"

#include "core/backend.h"

#include <dlfcn.h>

enum { T = 4, V = 8, DEVICE = 0, STREAM = 1, POINTERS = 2, AGAIN = 3 };

static int *asked;

static int find_counters(void **state)
{
    const colo_backend_t *b = NULL;
    const char *path = t_text("%s/libcolobridge-cuda.so", getenv("COLO_BACKEND_DIR"));
    assert_ok(colo_backend_load("cuda", &b));
    void *so = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    asked = so ? dlsym(so, "colo_test_asked") : NULL;
    return asked ? 0 : -1;
}

static void expect(int device, int stream, int pointers)
{
    assert_int_equal(asked[DEVICE], device);
    assert_int_equal(asked[STREAM], stream);
    assert_int_equal(asked[POINTERS], pointers);
    assert_int_equal(asked[AGAIN], 0);
    memset(asked, 0, 4 * sizeof *asked);
}

static colo_tensor_t on_device(void *data, colo_dtype_t dtype, int32_t ndim, const int64_t *shape)
{
    colo_tensor_t t = colo_tensor_host(data, dtype, ndim, shape);
    t.mem = COLO_CUDA;
    return t;
}

/* Ten pointers: logits, targets, workspace, stats, and six outputs. Backward: logits, their
 * gradient, targets, stats, and three gradients of outputs. */
T_CASE(loss_with_all_outputs_asks_once_about_each_pointer)
{
    static float z[T * V], d_z[T * V], logp[T], entropy[T], loss[T], up[3][T];
    static int64_t target[T], n_valid, n_invalid;
    static uint8_t correct[T];
    static _Alignas(COLO_ALIGNMENT) double stats[1024], workspace[1024];
    T_ENDS(colo_comm_destroy) colo_comm_t *self = NULL;
    colo_logprob_config_t config = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V, .want_loss = true,
                                    .want_entropy = true, .want_correct = true};
    colo_logprob_saved_t saved;
    const colo_logprob_out_t out = {.logp = logp,
                                    .entropy = entropy,
                                    .loss = loss,
                                    .correct = correct,
                                    .n_valid = &n_valid,
                                    .n_invalid = &n_invalid};
    const colo_logprob_upstream_t d = {.d_logp = up[0], .d_entropy = up[1], .d_loss = up[2]};
    const colo_tensor_t logits = on_device(z, COLO_F32, 2, (int64_t[]){T, V}),
                        targets = on_device(target, COLO_I64, 1, (int64_t[]){T}),
                        d_logits = on_device(d_z, COLO_F32, 2, (int64_t[]){T, V});
    size_t bytes;
    assert_ok(colo_logprob_saved_size(&config, COLO_F32, T, &bytes));
    assert_true(bytes <= sizeof stats);
    assert_ok(colo_logprob_workspace_size(&config, COLO_F32, T, 1, &bytes));
    assert_true(bytes <= sizeof workspace);
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_logprob_forward(&config,
                                   &(colo_logprob_batch_t){.logits = &logits, .targets = &targets},
                                   self, &out, &saved, stats, workspace, NULL));
    expect(1, 0, 10);
    assert_ok(colo_logprob_backward(&saved, &d, &d_logits, NULL));
    expect(1, 0, 7);
}

/* As a bridge and the partition helper check a call: the stream, and a pointer a side. */
T_CASE(checks_of_one_call_ask_once_for_device_and_stream)
{
    static float x[4], y[4];
    const colo_ops_t *ops = NULL;
    bool capturing = true;
    colo_queries_t q = {0};
    assert_ok(colo_ops_for(COLO_CUDA, &ops));
    assert_ok(ops->stream_check(&q, NULL, &capturing));
    assert_false(capturing);
    assert_ok(ops->pointer_check(&q, x, 0, "x"));
    assert_ok(ops->pointer_check(&q, y, 0, "y"));
    assert_ok(ops->pointer_check(&q, x, -1, "x"));
    assert_int_equal(q.device, 0);
    expect(1, 1, 2);
    assert_fails(ops->pointer_check(&q, x, 1, "x"), COLO_ERR_ARG, "a tensor of device 1");
}

T_MAIN_AROUND("core/queries", find_counters, NULL)
