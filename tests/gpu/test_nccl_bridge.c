/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_bridge.c - bridges over NCCL on 2, 4 or 8 ranks: the unit cases that fit, seeded
 * layouts on one communicator, COLLECTIVE, other batches on a bridge that is there. == on every
 * byte against the oracle, the bytes between the elements included. Streams, CUDA graphs and what a
 * bridge takes: test_nccl_streams.c.
 */
#include "gpu/pairs.h"

#include "core/error.h"

static int32_t gpus; /* ranks of this run */

static bool fits(const t_case_t *c)
{
    return t_case_world(c) <= gpus;
}

/* ---- unit cases ---- */

static colo_status_t unit_cases(t_gpu_rank_t *r, void *arg)
{
    int32_t ran = 0;
    for (size_t i = 0; i < T_PAIRS; i++)
        for (int k = 0; k < 4; k++) {
            t_case_t c = t_unit_case(i, (size_t)k);
            if (!fits(&c))
                continue;
            rank_try(t_gpu_case(r, &c));
            ran++;
        }
    if (r->rank == 0)
        *(int32_t *)arg = ran;
    return COLO_OK;
}

T_CASE(unit_cases_arrive_on_gpus)
{
    int32_t ran = 0;
    t_share(&ran, sizeof ran);
    assert_ok(t_gpus_run(gpus, false, unit_cases, &ran));
    t_unshare(&ran);
    print_message("%d unit cases on %d GPUs\n", ran, gpus);
    assert_true(ran >= (gpus == 8 ? 180 : gpus == 4 ? 100 : 36));
}

/* ---- messages of several MiB ---- */

T_CASE_ON_GPUS(gpus, boxes_of_several_mebibytes_arrive)
{
    for (int k = 0; k < 6; k++) { /* each goes in two halves */
        t_case_t c = {.src = t_side_ordered(0, 1, 1, gpus, true),
                      .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                      .shape = {gpus > 4 ? gpus : 4, 2048, 512},
                      .output = k % 2 ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED,
                      .grad = COLO_GRAD_PARTIAL,
                      .dtype = COLO_F32,
                      .axes = t_axes[k / 2],
                      .stride = k == 5 ? T_PADDED : T_TIGHT};
        rank_try(t_gpu_case(r, &c));
    }
    return COLO_OK;
}

/* Two ranks exchange 2 MiB each way. Rank 0 packs what it sends and what it gets, for which it has
 * staging in halves; rank 1 needs none. */
T_CASE_ON_GPUS(2, a_rank_that_packs_exchanges_with_one_that_does_not)
{
    t_case_t c = t_between("tp=1,dp=2", "tp=1,cp=2,dp=1", 4, 256, 1024);
    c.world = 2;
    c.stride = r->rank == 0 ? T_PADDED : T_TIGHT;
    return t_gpu_case(r, &c);
}

/* ---- seeded layouts ---- */

T_CASE_ON_GPUS(gpus, seeded_layouts_arrive_on_one_comm)
{
    return t_seeded_cases(r, NULL);
}

/* ---- COLLECTIVE ---- */

static colo_status_t collective_cases(t_gpu_rank_t *r, void *arg)
{
    int32_t ran = 0;
    for (size_t i = 0; i < T_PAIRS; i++)
        for (int k = 0; k < 3; k++) {
            t_case_t c =
                t_between(t_pairs[i].src, t_pairs[i].dst, t_pairs[i].b, t_pairs[i].n, t_pairs[i].h);
            c.output = k == 1 ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
            c.grad = COLO_GRAD_PARTIAL;
            c.algo = COLO_ALGO_COLLECTIVE;
            c.dtype = k == 2 ? COLO_BF16 : COLO_F32;
            c.axes = t_axes[k];
            c.stride = (t_stride_t)(i % T_STRIDE_COUNT);
            if (!fits(&c))
                continue;
            colo_status_t st = t_gpu_case(r, &c);
            /* no pair for COLLECTIVE: every rank says so before anything moves */
            if ((st == COLO_ERR_LAYOUT || st == COLO_ERR_SHAPE) &&
                colo_comm_check(r->gpus) == COLO_OK)
                continue;
            rank_try(st);
            ran++;
        }
    if (r->rank == 0)
        *(int32_t *)arg = ran;
    return COLO_OK;
}

T_CASE(collective_way_gives_the_same)
{
    int32_t ran = 0;
    t_share(&ran, sizeof ran);
    assert_ok(t_gpus_run(gpus, false, collective_cases, &ran));
    t_unshare(&ran);
    print_message("%d COLLECTIVE cases on %d GPUs\n", ran, gpus);
    assert_true(ran >= 9);
}

/* ---- reshape ---- */

T_CASE_ON_GPUS(gpus, a_bridge_takes_other_batches)
{
    /* 1 and 3 samples do not divide: other ranks are tied together, some have nothing */
    static const int64_t samples[] = {4, 8, 1, 3, 4, 2, 7};
    t_case_t c =
        t_between(gpus >= 4 ? "dp=4" : "dp=2", gpus >= 4 ? "tp=1,cp=2,dp=2" : "tp=2,dp=1", 4, 8, 3);
    c.dtype = COLO_F32;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    rank_try(t_gpu_bridge(r, &c, &bridge));
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) {
        c.shape.b = samples[i];
        colo_shape_t shape = {samples[i], 8, 3, 0};
        rank_try(colo_bridge_reshape(bridge, &shape));
        rank_try(t_gpu_pass(r, bridge, &c, (int64_t)i, false));
        rank_try(t_gpu_pass(r, bridge, &c, (int64_t)i, true));
    }
    return COLO_OK;
}

/* ---- the wrong memory ---- */

T_CASE_ON_GPUS(gpus, a_bridge_of_the_other_memory_is_refused_and_the_comm_lives)
{
    t_case_t c = t_between("dp=2", "tp=2,dp=1", 4, 3, 2);
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    if (r->rank > 1) /* in neither grid */
        return COLO_OK;
    rank_try(t_case_config(&c, &src, &dst, &config));
    rank_check(colo_bridge_create(&bridge, &config, r->gpus) < 0 && !bridge);
    rank_check(colo_comm_check(r->gpus) == COLO_OK);
    config.mem = COLO_MEM_CUDA;
    rank_check(colo_bridge_create(&bridge, &config, r->host) < 0 && !bridge);
    return colo_comm_check(r->host);
}

/* ---- a caller's allocator ---- */

static colo_status_t device_bytes(t_gpu_rank_t *r, size_t *bytes)
{
    size_t total;
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemGetInfo(bytes, &total));
    rank_try(colo_comm_barrier(r->host, NULL));
    return COLO_OK;
}

T_CASE_ON_GPUS(gpus, what_a_bridge_owns_is_from_the_caller_s_allocator_and_goes_back_to_it)
{
    /* GPUs take something by themselves, and 2 MiB at a time */
    const size_t seen = getenv("FAKE_DEVICES") ? 0 : 16 << 20;
    for (int k = 0; k < 2; k++) {
        t_case_t c = {.src = t_side_ordered(0, 1, 1, gpus, true),
                      .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                      .shape = {gpus, 64, 64},
                      .output = COLO_OUTPUT_FULL_SEQ,
                      .grad = COLO_GRAD_PARTIAL,
                      .dtype = COLO_F32,
                      .algo = k ? COLO_ALGO_COLLECTIVE : COLO_ALGO_EXACT};
        const size_t part = (size_t)2 * 64 * 64 * 4; /* of a destination rank: two samples */
        t_gpu_owner_t o = {.live = 0};
        colo_bridge_t *bridge = NULL;
        T_GPU_CALL(call);
        size_t before, after;
        /* or the first call allocates */
        rank_try(t_gpu_owned(r, &c, &o, COLO_TRANSPORT_NCCL, &bridge));
        rank_check(o.asked == colo_bridge_workspace_size(bridge));
        rank_check(o.asked >= (k ? 2 * part : part));
        if (k) /* the first sum takes memory of the comm */
            rank_try(t_gpu_pass(r, bridge, &c, 0, true));
        rank_try(device_bytes(r, &before));
        for (int64_t salt = 0; salt < 2; salt++) {
            rank_try(t_gpu_pass(r, bridge, &c, salt, false));
            rank_try(t_gpu_pass(r, bridge, &c, salt, true));
            rank_check(o.asked == colo_bridge_workspace_size(bridge));
        }
        rank_try(device_bytes(r, &after));
        rank_check(before <= after + seen);
        rank_try(t_gpu_call_make(&call, r, &c, 0, true));
        rank_try(t_gpu_owner_late(r, &o));
        rank_try(t_gpu_call_run(&call, bridge, r->stream));
        colo_bridge_destroy(&bridge);
        rank_check(o.live == 0 && !o.early);
        rank_try(t_gpu_quiet(r));
    }
    return COLO_OK;
}

T_CASE_ON_GPUS(gpus, an_allocator_without_memory_is_an_error_on_all_ranks)
{
    static const char *const words[] = {
        "config.allocator returned NULL, expected ",
        "config.allocator: what it returned is 8 past a multiple of 256 bytes",
        "config.allocator: release is NULL, expected both functions or none"};
    t_case_t c = {.src = t_side_ordered(0, 1, 1, gpus, true),
                  .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                  .shape = {gpus, 8, 4},
                  .output = COLO_OUTPUT_FULL_SEQ,
                  .grad = COLO_GRAD_PARTIAL,
                  .dtype = COLO_F32};
    for (int k = 0; k < 3; k++) {
        const bool fails = r->rank == 1;
        t_gpu_owner_t o = {.refuses = k == 0 && fails,
                           .misplaces = k == 1 && fails,
                           .no_release = k == 2 && fails};
        colo_bridge_t *bridge = NULL;
        const colo_status_t st = t_gpu_owned(r, &c, &o, COLO_TRANSPORT_NCCL, &bridge);
        rank_check(st == (!fails ? COLO_ERR_PEER : k == 0 ? COLO_ERR_NOMEM : COLO_ERR_ARG));
        rank_check(!bridge && o.live == 0 && strstr(colo_last_error(), words[k]));
        rank_try(colo_comm_check(r->gpus));
    }
    return COLO_OK;
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(), "gpu/nccl_bridge")
