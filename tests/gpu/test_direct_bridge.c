/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_bridge.c - bridges over peers' memory: the unit layouts, seeded ones, boxes of
 * several tiles, tensors that begin at any element, other shapes, memory that ranks destroy in
 * orders of their own. == on every byte against the oracle, the bytes between the elements
 * included. Four ranks, and eight, on however many GPUs there are; T_RANKS=sockets: as processes.
 */
#include "gpu/pairs.h"

#include "core/error.h"

enum { RANKS = 4, MANY = 8 };

/* ---- unit layouts ---- */

static colo_status_t unit_cases(t_gpu_rank_t *r, void *arg)
{
    for (size_t i = 0; i < T_PAIRS; i++)
        for (int k = 0; k < 4; k++) {
            t_case_t c = t_unit_case(i, (size_t)k);
            if (t_case_world(&c) > r->size || (r->size == MANY && t_case_world(&c) <= RANKS))
                continue;
            c.world = r->size;
            if (t_scaled(100) < 100 && (i * 4 + (size_t)k) % 7 != 0)
                continue; /* under a checker */
            rank_try(t_gpu_case(r, &c));
        }
    return COLO_OK;
}

T_CASE(unit_layouts_arrive)
{
    assert_ok(t_peers_run(RANKS, false, unit_cases, NULL, 0));
}

/* A checker wants a GPU a rank. */
static bool has_memory_for_many(void)
{
    return !getenv("T_CHECKED") || t_peers_enough(MANY);
}

T_CASE(unit_layouts_of_eight_ranks_arrive)
{
    if (!has_memory_for_many())
        skip();
    assert_ok(t_peers_run(MANY, false, unit_cases, NULL, 0));
}

/* ---- several tiles, more tiles than blocks ---- */

T_CASE_ON_PEERS(RANKS, boxes_of_many_tiles_arrive)
{
    const int64_t rows = t_scaled(100) < 100 ? 64 : 512;
    for (int k = 0; k < 10; k++) {
        t_case_t c =
            t_between(k < 6 ? "tp=1,dp=4" : "tp=2,dp=2",
                      k < 6 ? "tp=1,cp=2,dp=2" : "tp=1,cp=4,dp=1", 4, rows, k % 3 ? 512 : 129);
        c.output = k % 2 ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
        c.grad = k == 3 ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL;
        c.dtype = k % 4 == 1 ? COLO_BF16 : COLO_F32;
        c.axes = t_axes[k % 3];
        c.world = RANKS;
        c.stride = k == 5 ? T_PADDED : T_TIGHT;
        rank_try(t_gpu_case(r, &c));
    }
    return COLO_OK;
}

static colo_status_t two_ranks(t_gpu_rank_t *r, void *arg)
{
    for (int k = 0; k < 4; k++) {
        const int64_t rows = t_scaled(100) < 100 ? 64 : 512;
        t_case_t c = t_between("tp=1,dp=2", "tp=1,cp=2,dp=1", 4, rows, k % 2 ? 250 : 77);
        c.dtype = COLO_F32;
        c.axes = t_axes[k % 3];
        rank_try(t_gpu_case(r, &c));
    }
    return COLO_OK;
}

static void with_blocks(const char *blocks)
{
    setenv("COLO_PEER_BLOCKS", blocks, 1);
    const colo_status_t st = t_peers_run(2, false, two_ranks, NULL, 0);
    unsetenv("COLO_PEER_BLOCKS");
    assert_ok(st);
}

T_CASE(a_call_of_more_tiles_than_blocks_arrives)
{
    with_blocks("1");
}

/* More than a warp looks at once, if each rank has a GPU. */
T_CASE(a_call_of_a_part_per_block_arrives)
{
    with_blocks("128");
}

/* ---- seeded layouts ---- */

T_CASE_ON_PEERS(RANKS, seeded_layouts_arrive)
{
    return t_seeded_cases(r, NULL);
}

T_CASE(seeded_layouts_of_eight_ranks_arrive)
{
    if (!has_memory_for_many())
        skip();
    assert_ok(t_peers_run(MANY, false, t_seeded_cases, NULL, 0));
}

/* ---- tensors that begin at any element ---- */

T_CASE_ON_PEERS(RANKS, tensors_that_begin_at_any_element_arrive)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    for (int k = 0; k < 12; k++) {
        t_case_t c = t_between("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 5);
        c.output = k % 2 ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
        c.grad = COLO_GRAD_PARTIAL;
        c.dtype = dtypes[k % 4];
        c.axes = t_axes[k % 3];
        c.world = RANKS;
        r->shift = (1 + (size_t)((k + r->rank) % 3)) * colo_dtype_size(c.dtype);
        rank_try(t_gpu_case(r, &c));
    }
    return COLO_OK;
}

/* ---- another shape ---- */

static colo_status_t reshaped(t_gpu_rank_t *r, void *arg)
{
    for (int k = 0; k < 2; k++) {
        t_case_t c = t_between("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 4);
        c.output = k ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
        c.grad = COLO_GRAD_PARTIAL;
        c.dtype = COLO_F32;
        c.world = RANKS;
        colo_bridge_t *bridge = NULL;
        rank_try(t_gpu_bridge(r, &c, &bridge));
        for (int64_t i = 0; i < 6; i++) {
            /* with 1 sample most ranks hold nothing and have no partner */
            c.shape =
                (ref_shape_t){i % 3 == 1 ? 1 : 4 + 4 * i, 8 * (1 + i % 2), i == 3 ? 0 : 4 + i};
            colo_shape_t shape = {c.shape.b, c.shape.n, c.shape.h, 0};
            rank_try(colo_bridge_reshape(bridge, &shape)); /* while kernels wait: no allocation */
            rank_try(t_gpu_pass(r, bridge, &c, i, false));
            rank_try(t_gpu_pass(r, bridge, &c, i, true));
        }
        rank_try(t_gpu_end(r, &bridge));
    }
    return COLO_OK;
}

/* A shape without features is peer-to-peer only if nothing else is allowed. */
T_CASE(a_bridge_takes_other_shapes)
{
    const char *was = getenv("COLO_TRANSPORT");
    char earlier[16];
    snprintf(earlier, sizeof earlier, "%s", was ? was : "auto");
    for (int peer = 0; peer < 2; peer++) {
        setenv("COLO_TRANSPORT", peer ? "peer" : "auto", 1);
        const colo_status_t st = t_peers_run(RANKS, false, reshaped, NULL, 0);
        setenv("COLO_TRANSPORT", earlier, 1);
        assert_ok(st);
    }
}

/* Each rank keeps another memory while new memory is made, which CUDA likes to put where the old
 * was: what a rank has open of a peer's that is gone must not be taken for it. */
T_CASE_ON_BARE_PEERS(RANKS, ranks_destroy_memory_in_orders_of_their_own)
{
    enum { STEPS = 4, MADE = 3 };
    const t_case_t c = {.src = t_side("tp=1,dp=4", true),
                        .dst = t_side("tp=1,cp=2,dp=2", false),
                        .shape = {8, 8, 4},
                        .world = RANKS};
    for (int step = 0; step < STEPS; step++) {
        colo_memory_t *m[MADE + 1] = {NULL};
        for (int i = 0; i <= MADE; i++) {
            if (i == MADE) { /* destroyed: all but one, which is another one on each rank */
                rank_try(colo_comm_barrier(r->host, NULL));
                for (int k = 1; k < MADE; k++) {
                    colo_memory_t **gone = &m[(r->rank + step + k) % MADE];
                    const char *data = colo_memory_data(*gone);
                    colo_memory_destroy(gone);
                    rank_check(!*gone && !colo_memory_find(r->gpus, data, 1));
                }
            }
            rank_try(colo_memory_alloc(r->gpus, T_ARENA, &m[i]));
            rank_check(colo_memory_is_p2p(m[i]));
            t_gpu_lie_in(r, m[i]);
            rank_try(t_gpu_case(r, &c));
        }
        rank_try(colo_comm_barrier(r->host, NULL));
        for (int k = 0; k <= MADE; k++)
            colo_memory_destroy(&m[r->rank % 2 ? k : MADE - k]);
    }
    return COLO_OK;
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/direct_bridge")
