/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tape.c - gradients in device memory: seed, zeros, sums and the caller's own, on a stream.
 *
 * A node only copies its d_out, so every number of a result is a count of paths, and exact.
 */
#include "gpu/gpu.h"

#include "core/tape_node.h"

enum { N = 1000 };

static cudaStream_t stream;

/* y = x0 + x1 + ...: each input's gradient is the output's. Of two outputs, that of the second. */
static colo_status_t spread(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                            int32_t nin, void *state)
{
    for (int32_t i = 0; i < nin; i++)
        if (d_in[i].data &&
            cudaMemcpyAsync(d_in[i].data, d_out[nout - 1].data,
                            (size_t)colo_tensor_count(&d_in[i]) * colo_dtype_size(d_in[i].dtype),
                            cudaMemcpyDeviceToDevice, stream) != cudaSuccess)
            return COLO_ERR_CUDA;
    return COLO_OK;
}

static colo_tensor_t tensor(void *p)
{
    return colo_tensor_cuda(p, COLO_F32, 0, 1, (int64_t[]){N});
}

static void expect(const colo_tensor_t *g, float factor, float plus)
{
    float got[N];
    assert_int_equal(g->mem, COLO_MEM_CUDA);
    assert_int_equal(g->device, 0);
    gpu_get(got, g->data, sizeof got);
    for (int i = 0; i < N; i++)
        assert_true(got[i] == factor * (float)i + plus);
}

/* b = a + a, c = a + b, out = b + c + c: 8 paths from out to a, of which the leaf's own gradient
 * already holds 5. Twice, so that buffers are used again with what the first step left in them. */
T_CASE(paths_are_counted_in_device_memory)
{
    float count[N], five[N];
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    for (int i = 0; i < N; i++)
        count[i] = (float)i, five[i] = 5;
    GPU_AUTOFREE void *x = gpu_put(count, sizeof count), *d_x = gpu_put(five, sizeof five);
    colo_tensor_t t = tensor(x), d_t = tensor(d_x), g;
    assert_ok(colo_tape_create(&tape));
    colo_tape_set_stream(tape, stream);
    for (int step = 1; step <= 2; step++) {
        colo_value_t a, b, c, out;
        assert_ok(colo_tape_leaf(tape, &t, &d_t, &a));
        assert_ok(t_node(tape, "b", (colo_value_t[]){a, a}, 2, &t, &b, spread, NULL, NULL));
        assert_ok(t_node(tape, "c", (colo_value_t[]){a, b}, 2, &t, &c, spread, NULL, NULL));
        assert_ok(t_node(tape, "out", (colo_value_t[]){b, c, c}, 3, &t, &out, spread, NULL, NULL));
        assert_ok(colo_tape_retain_gradient(tape, b));
        assert_ok(colo_tape_backward(tape, out, &t));
        assert_ok(colo_tape_gradient(tape, b, &g));
        expect(&g, 3, 0);
        assert_ok(colo_tape_gradient(tape, a, &g));
        assert_ptr_equal(g.data, d_x);
        expect(&g, 8.0f * (float)step, 5);
        colo_tape_reset(tape);
    }
}

/* The second output, which no node consumed, brings zeros, also into a buffer that held numbers; a
 * value on the host may be on the same tape. */
T_CASE(what_no_node_consumed_is_zeros)
{
    float count[N], one = 1;
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    for (int i = 0; i < N; i++)
        count[i] = (float)i;
    GPU_AUTOFREE void *x = gpu_put(count, sizeof count);
    colo_tensor_t t = tensor(x), outs[] = {t, t}, g;
    colo_tensor_t host = colo_tensor_host(&one, COLO_F32, 1, (int64_t[]){1});
    assert_ok(colo_tape_create(&tape));
    colo_tape_set_stream(tape, stream);
    for (int step = 0; step < 2; step++) {
        colo_value_t a, pair[2], h;
        assert_ok(colo_tape_leaf(tape, &host, NULL, &h));
        assert_ok(colo_tape_leaf(tape, &t, NULL, &a));
        assert_ok(
            colo_tape_record(tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, "pair", &a, 1, outs,
                                                         2, pair, NULL, 0, spread, NULL, NULL}));
        assert_ok(colo_tape_backward(tape, pair[step ? 0 : 1], &t));
        assert_ok(colo_tape_gradient(tape, a, &g));
        expect(&g, step ? 0 : 1, 0);
        colo_tape_reset(tape);
    }
}

/* w and b have seven consumers each: 7 x 129 is 903, or 904 in bf16; rounded each time it would be
 * 900. In fp16 7 x 1025 is 7175, or 7176; rounded each time it would be 7172. */
T_CASE(halves_add_in_fp32_in_device_memory)
{
    static const struct {
        colo_dtype_t dtype;
        uint16_t seed, sum;
        float exact, rounded;
    } of[2] = {{COLO_BF16, 0x4301, 0x4462, 903, 904}, {COLO_F16, 0x6401, 0x6f02, 7175, 7176}};
    for (int d = 0; d < 2; d++) {
        uint16_t seed[N], got[N];
        float five[N], main[N];
        T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
        colo_value_t a, w, b, in[14], out;
        for (int i = 0; i < N; i++)
            seed[i] = of[d].seed, five[i] = 5;
        GPU_AUTOFREE void *x = gpu_put(seed, sizeof seed), *d_a = gpu_put(five, sizeof five),
                          *d_w = gpu_put(five, sizeof five);
        colo_tensor_t t = tensor(x), t_a = tensor(d_a), t_w = tensor(d_w), g;
        t.dtype = of[d].dtype;
        assert_ok(colo_tape_create(&tape));
        colo_tape_set_stream(tape, stream);
        assert_ok(colo_tape_leaf(tape, &t, &t_a, &a));
        assert_ok(colo_tape_leaf(tape, &t, &t_w, &w));
        assert_ok(t_node(tape, "b", &a, 1, &t, &b, spread, NULL, NULL));
        assert_ok(colo_tape_retain_gradient(tape, b));
        for (int i = 0; i < 14; i++)
            in[i] = i % 2 ? b : w;
        assert_ok(t_node(tape, "out", in, 14, &t, &out, spread, NULL, NULL));
        assert_ok(colo_tape_backward(tape, out, &t));
        assert_ok(colo_tape_gradient(tape, b, &g));
        gpu_get(got, g.data, sizeof got);
        for (int i = 0; i < N; i++)
            assert_int_equal(got[i], of[d].sum);
        gpu_get(main, d_a, sizeof main); /* one consumer, whose gradient is b's */
        for (int i = 0; i < N; i++)
            assert_true(main[i] == 5 + of[d].rounded);
        gpu_get(main, d_w, sizeof main);
        for (int i = 0; i < N; i++)
            assert_true(main[i] == 5 + of[d].exact);
    }
}

T_MAIN_AFTER(gpu_need(1), assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)),
             "gpu/tape")
