/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_validate.c - what is read of device memory on the host's behalf: hashes that see every bit
 * and no gap, the first element that is not zero, masked sums; and which pointers and streams are
 * refused.
 */
#include "gpu/gpu.h"

#include "core/device.h"

#include <math.h>

/* [3, 5, 7] of @elem bytes, innermost axis @step apart, from byte @shift on */
static colo_box_t box_on(void *p, int64_t step, size_t shift)
{
    return (colo_box_t){(char *)p + shift, {3, 5, 7}, {5 * 7 * step + 3, 7 * step, step}};
}

T_CASE(a_hash_sees_every_element_and_no_gap)
{
    static const size_t elems[] = {1, 2, 4, 8};
    unsigned char h[8 * 400];
    uint64_t s = 5, first, now;
    for (size_t i = 0; i < sizeof h; i++)
        h[i] = (unsigned char)t_rand(&s);
    for (int e = 0; e < 4; e++)
        for (size_t shift = 0; shift < elems[e]; shift += elems[e] / 2 + 1) {
            const size_t elem = elems[e];
            GPU_AUTOFREE void *p = gpu_put(h, sizeof h);
            colo_box_t b = box_on(p, 3, shift);
            assert_ok(gpu_device()->box_hash(&b, elem, &first, NULL));
            for (int64_t offset = 0; offset < 3 * (5 * 21 + 3);
                 offset++) { /* also what lies between */
                const size_t byte = shift + (size_t)offset * elem + elem - 1;
                const int64_t i = offset / (5 * 21 + 3), in = offset % (5 * 21 + 3);
                const bool element = in < 5 * 21 && in % 3 == 0 && i < 3;
                unsigned char flipped = h[byte] ^ 0x10;
                assert_cuda(t_to_device((char *)p + byte, &flipped, 1));
                assert_ok(gpu_device()->box_hash(&b, elem, &now, NULL));
                if ((now != first) != element)
                    fail_msg("%zu bytes, element %lld: %d", elem, (long long)offset, now != first);
                assert_cuda(t_to_device((char *)p + byte, &h[byte], 1));
            }
        }
}

T_CASE(a_hash_sees_places_and_not_strides)
{
    uint32_t a[6] = {1, 2, 3, 4, 5, 6}, apart[12], turned[6] = {2, 1, 3, 4, 5, 6};
    uint64_t h[3];
    for (int i = 0; i < 12; i++)
        apart[i] = i % 2 ? 77u : a[i / 2];
    GPU_AUTOFREE void *p = gpu_put(a, sizeof a), *q = gpu_put(apart, sizeof apart);
    GPU_AUTOFREE void *r = gpu_put(turned, sizeof turned);
    colo_box_t dense = {p, {1, 2, 3}, {6, 3, 1}}, gaps = {q, {1, 2, 3}, {12, 6, 2}};
    colo_box_t other = {r, {1, 2, 3}, {6, 3, 1}};
    assert_ok(gpu_device()->box_hash(&dense, 4, &h[0], NULL));
    assert_ok(gpu_device()->box_hash(&gaps, 4, &h[1], NULL));
    assert_ok(gpu_device()->box_hash(&other, 4, &h[2], NULL));
    assert_true(h[0] == h[1]);
    assert_true(h[0] != h[2]);
}

T_CASE(the_first_element_that_is_not_zero_is_found)
{
    for (int d = 0; d < COLO_DTYPE_COUNT; d++) {
        const colo_dtype_t dtype = (colo_dtype_t)d;
        const size_t elem = colo_dtype_size(dtype);
        unsigned char h[8 * 400] = {0};
        int64_t offset;
        if (colo_dtype_is_float(dtype)) /* -0.0 everywhere */
            for (size_t i = elem - 1; i < sizeof h; i += elem)
                h[i] = 0x80;
        GPU_AUTOFREE void *p = gpu_put(h, sizeof h);
        colo_box_t b = box_on(p, 3, 0);
        assert_cuda(cudaMemset((char *)p + elem, 1, 1)); /* in a gap: not in the box */
        assert_ok(gpu_device()->box_nonzero(&b, dtype, &offset, NULL));
        assert_int_equal(offset, -1);
        static const int64_t places[][3] = {{2, 4, 6}, {2, 0, 0}, {1, 3, 2}, {0, 0, 0}};
        for (int k = 0; k < 4; k++) {
            const int64_t *i = places[k];
            assert_cuda(cudaMemset(
                (char *)b.data +
                    (size_t)(i[0] * b.stride[0] + i[1] * b.stride[1] + i[2] * b.stride[2]) * elem,
                1, 1));
            assert_ok(gpu_device()->box_nonzero(&b, dtype, &offset, NULL));
            assert_int_equal(offset, (i[0] * 5 + i[1]) * 7 + i[2]);
        }
    }
}

T_CASE(masked_sums_are_those_of_the_host)
{
    static const int64_t counts[] = {0, 1, 1023, 1025, 100003};
    for (int d = 0; d < 2; d++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            const int64_t n = counts[c];
            const colo_dtype_t dtype = d ? COLO_F64 : COLO_F32;
            COLO_AUTOFREE float *f = malloc(sizeof *f * (size_t)(n + 1));
            double *g = malloc(sizeof *g * (size_t)(n + 1)), num, want;
            COLO_AUTOFREE uint8_t *m = malloc((size_t)n + 1);
            int64_t den, tokens;
            uint64_t s = 9;
            for (int64_t i = 0; i < n; i++) { /* multiples of 1/8: every order gives the same */
                m[i] = t_below(&s, 3) != 0;
                g[i] = m[i] ? (double)t_below(&s, 1000) / 8 : NAN; /* must not be read */
                f[i] = (float)g[i];
            }
            GPU_AUTOFREE void *v = gpu_put(d ? (void *)g : (void *)f, (size_t)n * (d ? 8 : 4));
            GPU_AUTOFREE void *mask = gpu_put(m, (size_t)n);
            assert_ok(colo_device_host.masked_sum(d ? (void *)g : (void *)f, dtype, m, n, &want,
                                                  &tokens, NULL));
            assert_ok(gpu_device()->masked_sum(v, dtype, mask, n, &num, &den, NULL));
            assert_true(num == want);
            assert_int_equal(den, tokens);
            assert_ok(gpu_device()->masked_sum(v, dtype, NULL, n < 2 ? 0 : 2, &num, &den, NULL));
            assert_int_equal(den, n < 2 ? 0 : 2);
            free(g);
        }
}

T_CASE(what_no_kernel_can_use_is_refused)
{
    int32_t here = 0, n = 0;
    double num, on_stack[2] = {0};
    int64_t den;
    bool capturing;
    cudaStream_t stream;
    GPU_AUTOFREE void *p = gpu_put(NULL, 64);
    assert_ok(gpu_device()->pointer_check(&(colo_queries_t){0}, p, 0, "x"));
    assert_ok(gpu_device()->pointer_check(&(colo_queries_t){0}, NULL, 0, "x"));
    assert_fails(gpu_device()->pointer_check(&(colo_queries_t){0}, &here, 0, "x"), COLO_ERR_ARG,
                 "is host memory");
    assert_fails(gpu_device()->masked_sum(on_stack, COLO_F64, NULL, 2, &num, &den, NULL),
                 COLO_ERR_ARG, "values: ");
    assert_fails(gpu_device()->masked_sum((char *)p + 4, COLO_F64, NULL, 2, &num, &den, NULL),
                 COLO_ERR_ARG, "no multiple of 8 bytes");
    assert_cuda(cudaGetDeviceCount(&n));
    assert_fails(gpu_device()->pointer_check(&(colo_queries_t){0}, p, 1, "x"), COLO_ERR_ARG,
                 "a tensor of device 1");
    assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    assert_ok(gpu_device()->stream_check(&(colo_queries_t){0}, stream, &capturing));
    assert_false(capturing);
    if (n > 1) {
        assert_cuda(cudaSetDevice(1));
        assert_fails(gpu_device()->pointer_check(&(colo_queries_t){0}, p, -1, "x"), COLO_ERR_ARG,
                     "memory of device 0");
        assert_fails(gpu_device()->stream_check(&(colo_queries_t){0}, stream, &capturing),
                     COLO_ERR_ARG, "the stream is one of device 0");
        assert_cuda(cudaSetDevice(0));
    }
    cudaGraph_t graph;
    assert_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_ok(gpu_device()->stream_check(&(colo_queries_t){0}, stream, &capturing));
    assert_true(capturing);
    assert_fails(gpu_device()->masked_sum(p, COLO_F64, NULL, 2, &num, &den, stream), COLO_ERR_STATE,
                 "cannot be captured");
    assert_cuda(cudaStreamEndCapture(stream, &graph));
    assert_cuda(cudaGraphDestroy(graph));
    assert_cuda(cudaStreamDestroy(stream));
}

T_MAIN_IF(gpu_need(1), "gpu/validate")
