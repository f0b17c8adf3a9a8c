/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_packed.c - packed sequences on both sides over peers' memory: random cuts against the
 * oracle, captured graphs. Four ranks, and eight, on however many GPUs there are.
 */
#include "gpu/gpu_ranks.h"
#include "gpu/ragged_gpu.h"

#include "harness/packed_case.h"

enum { RANKS = 4, MANY = 8 };

static colo_status_t random_batch(t_gpu_rank_t *r, uint64_t seed)
{
    const t_ragged_where_t w = t_where(r);
    t_packed_t t;
    t_packed_random(&t, seed, r->size);
    t.where = &w;
    r->used = 0;
    r->shift = 8 * (size_t)t_below(&seed, 3); /* not always 16 bytes */
    rank_try(colo_comm_set_check(r->gpus, (int32_t)t_below(&seed, 3)));
    const colo_status_t st = t_packed_on(&t, r->gpus);
    return st < 0 ? colo_fail_prefix(st, "%s", t_packed_text(&t)) : st;
}

static colo_status_t random_batches(t_gpu_rank_t *r, void *arg)
{
    const uint64_t seed = t_seed();
    for (int64_t i = 0; i < t_scaled(300); i++)
        rank_try(random_batch(r, seed + (uint64_t)i));
    return COLO_OK;
}

T_CASE_ON_PEERS(RANKS, random_packings_over_peers_arrive_as_the_oracle_says)
{
    return random_batches(r, NULL);
}

T_CASE(random_packings_of_eight_ranks_arrive_as_the_oracle_says)
{
    if (getenv("T_CHECKED") && !t_peers_enough(MANY))
        skip();
    assert_ok(t_peers_run(MANY, false, random_batches, NULL, 0));
}

/* Zigzag to contiguous, to whole and to halos, whose gradients are sums, and to heads. */
T_CASE_ON_PEERS(RANKS, replays_of_a_packed_batch_over_peers_give_its_bits)
{
    static const int64_t len[] = {64, 16, 32}, cp[] = {4, 2, 1}, first[] = {0, 2, 1};
    static const colo_packing_split_t split[] = {COLO_PACKING_BLOCK, COLO_PACKING_WHOLE,
                                                 COLO_PACKING_WHOLE, COLO_PACKING_CONTIGUOUS};
    const colo_packing_t src = {COLO_PACKING_INIT,  .nseqs = 3,
                                .seq_len = len,     .seq_cp = cp,
                                .seq_first = first, .split = COLO_PACKING_ZIGZAG};
    const t_ragged_where_t w = t_where(r);
    for (int i = 0; i < 4; i++) {
        const colo_packing_t dst = {COLO_PACKING_INIT, .nseqs = 3, .seq_len = len,
                                    .split = split[i], .halo_before = i == 3 ? 5 : 0};
        const int64_t h[] = {8, i == 2 ? 2 : 8};
        colo_grid_t grid;
        colo_layout_t from, to;
        colo_bridge_t *bridge = NULL;
        colo_batch_t *batch = NULL;
        rank_try(colo_grid_parse(&grid, "cp=4", 0));
        rank_try(colo_layout_init_dst(&from, &grid));
        to = from;
        if (i == 2) {
            colo_layout_clear(&to, COLO_AXIS_ROWS);
            rank_try(colo_layout_split(&to, COLO_AXIS_FEATURES, "cp", COLO_SPLIT_BLOCK));
        }
        const colo_bridge_config_t c = {
            COLO_BRIDGE_CONFIG_INIT, .src = &from,         .dst = &to,    .shape = {.features = 8},
            .dtype = COLO_F32,       .mem = COLO_MEM_CUDA, .packed = true};
        rank_try(colo_bridge_create(&bridge, &c, r->gpus));
        rank_try(colo_bridge_set_packing(bridge, &src, &dst, &batch));
        r->used = 0;
        rank_try(t_replayed(bridge, batch, h, &w));
    }
    return COLO_OK;
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/direct_packed")
