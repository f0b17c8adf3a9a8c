/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged.c - ragged batches on one GPU: random ones, and the uniform bridge's bits.
 */
#include "gpu/gpu.h"
#include "gpu/ragged_gpu.h"

static colo_status_t on_one(t_gpu_fn fn, void *arg)
{
    t_gpu_rank_t r = {.size = 1};
    rank_try(colo_comm_create_self(&r.host));
    r.gpus = r.host;
    rank_cuda(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    const colo_status_t st = fn(&r, arg);
    cudaStreamDestroy(r.stream);
    colo_comm_destroy(&r.host);
    return st;
}

T_CASE(random_batches_on_one_gpu_arrive_as_the_oracle_says)
{
    assert_ok(on_one(t_ragged_batches, &(int64_t){300}));
}

T_CASE(uniform_tables_on_one_gpu_give_the_bits_of_the_uniform_bridge)
{
    assert_ok(on_one(t_ragged_tables, NULL));
}

T_MAIN_IF(gpu_need(1), "gpu/ragged")
