/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged.c - ragged batches on one GPU: random ones, and the uniform bridge's bits.
 */
#include "gpu/gpu.h"

#include "core/error.h"
#include "gpu/ragged_gpu.h"

static colo_status_t cuda(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? COLO_OK
                            : colo_fail(COLO_ERR_CUDA, "%s: %s", what, cudaGetErrorString(e));
}

static colo_status_t put(void *arg, const void *from, size_t bytes, void **at)
{
    (void)arg;
    rank_try(cuda(cudaMalloc(at, bytes), "malloc"));
    return cuda(t_to_device(*at, from, bytes), "copy");
}

static colo_status_t quiet(void *arg)
{
    return cuda(cudaStreamSynchronize(*(cudaStream_t *)arg), "synchronize");
}

static colo_status_t get(void *arg, void *to, const void *at, size_t bytes)
{
    rank_try(quiet(arg));
    return cuda(cudaMemcpy(to, at, bytes, cudaMemcpyDeviceToHost), "copy");
}

static void drop(void *arg, void *at)
{
    (void)arg;
    cudaFree(at);
}

static cudaStream_t stream;
static const t_ragged_where_t *here(void)
{
    static t_ragged_where_t w = {
        .arg = &stream, .device = 0, .put = put, .get = get, .drop = drop, .quiet = quiet};
    if (!stream)
        assert_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    w.stream = stream;
    return &w;
}

T_CASE(random_batches_on_one_gpu_arrive_as_the_oracle_says)
{
    const uint64_t seed = t_seed();
    colo_comm_t *self = NULL;
    assert_ok(colo_comm_create_self(&self));
    for (int64_t i = 0, n = t_scaled(300); i < n; i++) {
        t_ragged_t t;
        uint64_t r = seed + (uint64_t)i;
        t_ragged_random(&t, r, 1);
        const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&r, T_RAGGED_TENSORS),
                                      .max_rows = t_below(&r, 4) ? 0 : 10000,
                                      .gap = t_below(&r, 3),
                                      .where = here()};
        assert_ok(colo_comm_set_check(self, (int32_t)t_below(&r, 3)));
        const colo_status_t st = t_ragged_on(&t, &o, self);
        if (st < 0)
            fail_msg("%s: %s: %s", t_ragged_text(&t), colo_status_name(st), colo_last_error());
        t_ragged_free(&t);
    }
    colo_comm_destroy(&self);
}

T_CASE(uniform_tables_on_one_gpu_give_the_bits_of_the_uniform_bridge)
{
    colo_comm_t *self = NULL;
    int32_t ran = 0;
    assert_ok(colo_comm_create_self(&self));
    assert_ok(t_uniform_pairs(self, here(), &ran));
    assert_int_equal(ran, 3);
    colo_comm_destroy(&self);
}

int main(void)
{
    int rc = gpu_need(1);
    if (rc)
        return rc;
    return t_main("gpu/ragged");
}
