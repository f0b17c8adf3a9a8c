/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_ragged.c - ragged batches over NCCL on 2, 4 or 8 ranks: random ones against the oracle,
 * the uniform bridge's bits, batches with other tables outstanding together, memory that a bridge
 * with max_rows has from create on.
 */
#include "gpu/nccl_ranks.h"
#include "gpu/ragged_gpu.h"

#include "core/error.h"

static int32_t gpus; /* ranks of this run */

/* ---- tensors of a rank ---- */

static colo_status_t put(void *arg, const void *from, size_t bytes, void **at)
{
    (void)arg;
    rank_cuda(cudaMalloc(at, bytes));
    rank_cuda(t_to_device(*at, from, bytes));
    return COLO_OK;
}

static colo_status_t get(void *arg, void *to, const void *at, size_t bytes)
{
    (void)arg;
    rank_cuda(cudaMemcpy(to, at, bytes, cudaMemcpyDeviceToHost));
    return COLO_OK;
}

static void drop(void *arg, void *at)
{
    (void)arg;
    cudaFree(at);
}

static colo_status_t quiet(void *arg)
{
    return t_gpu_quiet(arg);
}

static t_ragged_where_t where(t_gpu_rank_t *r)
{
    return (t_ragged_where_t){.arg = r,
                              .device = r->device,
                              .stream = r->stream,
                              .put = put,
                              .get = get,
                              .drop = drop,
                              .quiet = quiet};
}

/* ---- random batches ---- */

static colo_status_t random_batches(t_gpu_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    const uint64_t seed = t_seed();
    for (int64_t i = 0, n = *(int64_t *)arg; i < n; i++) {
        t_ragged_t t;
        uint64_t s = seed + (uint64_t)i;
        t_ragged_random(&t, s, gpus);
        const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&s, T_RAGGED_TENSORS),
                                      .ranks_per_node = t_below(&s, 4),
                                      .max_rows = t_below(&s, 4) ? 0 : 1000,
                                      .gap = t_below(&s, 3),
                                      .where = &w};
        rank_try(colo_comm_set_check(r->gpus, (int32_t)t_below(&s, 3)));
        const colo_status_t st = t_ragged_on(&t, &o, r->gpus);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_ragged_text(&t));
        t_ragged_free(&t);
    }
    return COLO_OK;
}

T_CASE(random_batches_over_nccl_arrive_as_the_oracle_says)
{
    int64_t n = t_scaled(300);
    (void)t_seed();
    assert_ok(t_gpus_run(gpus, false, random_batches, &n));
}

/* ---- uniform tables ---- */

static colo_status_t uniform(t_gpu_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    int32_t ran = 0;
    rank_try(t_uniform_pairs(r->gpus, &w, &ran));
    if (r->rank == 0)
        *(int32_t *)arg = ran;
    return COLO_OK;
}

T_CASE(uniform_tables_over_nccl_give_the_bits_of_the_uniform_bridge)
{
    int32_t ran = 0;
    t_share(&ran, sizeof ran);
    assert_ok(t_gpus_run(gpus, false, uniform, &ran));
    t_unshare(&ran);
    assert_int_equal(ran, gpus >= 4 ? 24 : 12);
}

/* ---- outstanding batches, and memory ---- */

static colo_status_t outstanding(t_gpu_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    return t_outstanding(r->gpus, &w, *(bool *)arg);
}

T_CASE(batches_on_gpus_with_other_tables_are_outstanding_together)
{
    bool reserves = false;
    assert_ok(t_gpus_run(gpus, false, outstanding, &reserves));
}

T_CASE(workspace_of_a_bridge_with_max_rows_stays_as_large_as_at_create)
{
    bool reserves = true;
    assert_ok(t_gpus_run(gpus, false, outstanding, &reserves));
}

static colo_status_t captured(t_gpu_rank_t *r, void *arg)
{
    const t_ragged_where_t w = where(r);
    (void)arg;
    return t_captured(r->gpus, &w);
}

T_CASE(replays_of_a_ragged_batch_over_nccl_give_its_bits)
{
    assert_ok(t_gpus_run(gpus, false, captured, NULL));
}

int main(void)
{
    if (!t_gpus_enough(2))
        return T_EXIT_SKIP;
    gpus = t_gpu_ranks();
    return t_main("gpu/nccl_ragged");
}
