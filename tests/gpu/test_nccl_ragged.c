/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_ragged.c - ragged batches over NCCL on 2, 4 or 8 ranks: random ones against the oracle,
 * packings, too, the uniform bridge's bits, batches with other tables outstanding together, memory
 * that a bridge with max_rows has from create on.
 */
#include "gpu/gpu_ranks.h"
#include "gpu/ragged_gpu.h"

#include "harness/packed_case.h"

static int32_t gpus; /* ranks of this run */

T_CASE_ON_GPUS(gpus, random_batches_over_nccl_arrive_as_the_oracle_says)
{
    return t_ragged_batches(r, &(int64_t){300});
}

T_CASE_ON_GPUS(gpus, random_packings_over_nccl_arrive_as_the_oracle_says)
{
    const t_ragged_where_t w = t_where(r);
    const uint64_t seed = t_seed();
    for (int64_t i = 0; i < t_scaled(200); i++) {
        t_packed_t t;
        t_packed_random(&t, seed + (uint64_t)i, r->size);
        t.where = &w;
        rank_try(colo_comm_set_check(r->gpus, (int32_t)(i % 3)));
        const colo_status_t st = t_packed_on(&t, r->gpus);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_packed_text(&t));
    }
    return COLO_OK;
}

T_CASE(uniform_tables_over_nccl_give_the_bits_of_the_uniform_bridge)
{
    assert_ok(t_gpus_run(gpus, false, t_ragged_tables, NULL));
}

T_CASE(batches_on_gpus_with_other_tables_are_outstanding_together)
{
    assert_ok(t_gpus_run(gpus, false, t_ragged_outstanding, &(bool){false}));
}

T_CASE(workspace_of_a_bridge_with_max_rows_stays_as_large_as_at_create)
{
    assert_ok(t_gpus_run(gpus, false, t_ragged_outstanding, &(bool){true}));
}

/* Bytes of the bridge's memory for addends. */
static size_t partials_of(const colo_bridge_t *bridge)
{
    return bridge->memory.partials.size;
}

T_CASE_ON_GPUS(gpus, sums_of_large_regions_copy_no_gradient_of_the_rank_itself)
{
    const t_ragged_where_t w = t_where(r);
    return t_ragged_large(r->gpus, &w, partials_of);
}

T_CASE(replays_of_a_ragged_batch_over_nccl_give_its_bits)
{
    assert_ok(t_gpus_run(gpus, false, t_ragged_captured, NULL));
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(), "gpu/nccl_ragged")
