/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_device.c - CUDA memory is libcolobridge-cuda.so's alone: objects on one device work if the
 * folder of backends has no other library.
 *
 * T_BACKENDS is a folder with a libcolobridge-cuda.so whose device is the host (cuda_is_host.c),
 * and nothing else. tests/gpu runs the programs of one GPU without the other backends, too.
 */
#include "harness/harness.h"

#include "core/tape_node.h"
#include "loss/loss_alone.h"

#include "core/backend.h"
#include "core/memory.h"

enum { N = 6 };

T_CASE(device_memory_without_any_backend_names_the_cuda_one) /* loads none */
{
    void *p = state;
    assert_int_equal(setenv("COLO_BACKEND_DIR", "/nonexistent", 1), 0);
    assert_fails(colo_mem_alloc(COLO_MEM_CUDA, 64, &p), COLO_ERR_UNBUILT, "backend 'cuda'");
    assert_null(p);
    assert_fails(colo_mem_zero(COLO_MEM_CUDA, state, 64, NULL), COLO_ERR_UNBUILT, "backend 'cuda'");
}

/* Mutants run without the folder. */
#define T_CASE_WITHOUT_NCCL(name) T_CASE_IF(getenv("T_BACKENDS"), name)

static void without_nccl(void)
{
    const colo_backend_t *b = NULL;
    assert_int_equal(setenv("COLO_BACKEND_DIR", getenv("T_BACKENDS"), 1), 0);
    assert_fails(colo_backend_load("nccl", &b), COLO_ERR_UNBUILT, "libcolobridge-nccl.so");
}

static colo_tensor_t on_device(void *data, colo_dtype_t dtype, int32_t ndim, const int64_t *shape)
{
    colo_tensor_t t = colo_tensor_host(data, dtype, ndim, shape);
    t.mem = COLO_MEM_CUDA;
    return t;
}

T_CASE_WITHOUT_NCCL(device_memory_without_nccl_is_aligned_and_zeroed)
{
    without_nccl();
    static const unsigned char zeros[1000];
    void *p = NULL;
    assert_ok(colo_mem_alloc(COLO_MEM_CUDA, sizeof zeros, &p));
    assert_int_equal((uintptr_t)p % 256, 0);
    memset(p, 0xa5, sizeof zeros);
    assert_ok(colo_mem_zero(COLO_MEM_CUDA, p, sizeof zeros, NULL));
    assert_memory_equal(p, zeros, sizeof zeros);
    colo_mem_free(COLO_MEM_CUDA, p);
    colo_mem_free(COLO_MEM_CUDA, NULL);
}

/* d_in = d_out for both inputs */
static colo_status_t add(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                         int32_t nin, void *arg)
{
    for (int32_t i = 0; i < nin; i++)
        memcpy(d_in[i].data, d_out[0].data, N * sizeof(double));
    return COLO_OK;
}

T_CASE_WITHOUT_NCCL(tape_without_nccl_adds_gradients_in_device_memory)
{
    without_nccl();
    double x[N] = {0}, seed[N] = {1, -2, 3, 5, 8, -13};
    colo_tensor_t t = on_device(x, COLO_F64, 1, (int64_t[]){N}), d = t, g;
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    colo_value_t a, b, c;
    d.data = seed;
    assert_ok(colo_tape_create(&tape));
    assert_ok(colo_tape_leaf(tape, &t, NULL, &a));
    assert_ok(t_node(tape, "b", (colo_value_t[]){a, a}, 2, &t, &b, add, NULL, NULL));
    assert_ok(t_node(tape, "c", (colo_value_t[]){b, a}, 2, &t, &c, add, NULL, NULL));
    assert_ok(colo_tape_backward(tape, c, &d));
    assert_ok(colo_tape_gradient(tape, a, &g));
    for (int i = 0; i < N; i++)
        assert_true(((double *)g.data)[i] == 3 * seed[i]);
}

T_CASE_WITHOUT_NCCL(bridge_without_nccl_carries_device_memory)
{
    without_nccl();
    float x[24], y[24], d_x[24]; /* [2, 3, 4] */
    colo_layout_t src, dst;
    colo_comm_t *self = t_self();
    assert_ok(t_layouts("tp=1,dp=1", "tp=1,dp=1", &src, &dst));
    for (int algo = 0; algo < 2; algo++) {
        const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT,
                                             .src = &src,
                                             .dst = &dst,
                                             .shape = {2, 3, 4, 0},
                                             .mem = COLO_MEM_CUDA,
                                             .algo = algo ? COLO_ALGO_COLLECTIVE : COLO_ALGO_EXACT};
        T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
        for (int i = 0; i < 24; i++)
            x[i] = (float)(i + 100 * algo);
        const colo_tensor_t in = on_device(x, COLO_F32, 3, (int64_t[]){2, 3, 4}),
                            out = on_device(y, COLO_F32, 3, (int64_t[]){2, 3, 4}),
                            back = on_device(d_x, COLO_F32, 3, (int64_t[]){2, 3, 4});
        assert_ok(colo_bridge_create(&bridge, &config, self));
        assert_ok(colo_bridge_forward(bridge, &in, &out, NULL));
        assert_memory_equal(y, x, sizeof x);
        assert_ok(colo_bridge_backward(bridge, &out, &back, NULL));
        assert_memory_equal(d_x, x, sizeof x);
    }
}

T_CASE_WITHOUT_NCCL(losses_without_nccl_run_in_device_memory)
{
    without_nccl();
    for (loss_t loss = 0; loss < LOSSES; loss++) {
        alone_t host, device;
        alone_init(&host, loss);
        alone_init(&device, loss);
        colo_tensor_t *const tensors[] = {
            &device.logits,       &device.target,     &device.masked,    &device.d_logits,
            &device.of_logp,      &device.of_entropy, &device.of_losses, &device.of_ce,
            &device.of_kl,        &device.of_correct, &device.of_chosen, &device.of_n_valid,
            &device.of_n_invalid, &device.of_up};
        for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
            tensors[i]->mem = COLO_MEM_CUDA;
        assert_ok(alone_forward(&host));
        assert_ok(alone_forward(&device));
        if (loss != SAMPLING) {
            assert_ok(alone_backward(&host));
            assert_ok(alone_backward(&device));
        }
        assert_memory_equal(device.logp, host.logp, sizeof host.logp);
        assert_memory_equal(device.kl, host.kl, sizeof host.kl);
        assert_memory_equal(device.dz, host.dz, sizeof host.dz);
    }
}

T_MAIN("core/device")
