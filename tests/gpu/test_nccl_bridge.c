/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_bridge.c - bridges over NCCL on 2, 4 or 8 ranks: the unit cases that fit, seeded
 * layouts on one communicator, COLLECTIVE, other batches on a bridge that is there. == on every
 * byte against the oracle, the bytes between the elements included. Streams, CUDA graphs and what a
 * bridge takes: test_nccl_streams.c.
 */
#include "gpu/gpu_ranks.h"
#include "gpu/pairs.h"

#include "core/error.h"

static int32_t gpus; /* ranks of this run */

static bool fits(const t_case_t *c)
{
    return t_case_world(c) <= gpus;
}

static colo_status_t run_one(t_gpu_rank_t *r, const t_case_t *c)
{
    colo_status_t st = t_gpu_case(r, c);
    return st < 0 ? colo_fail_prefix(st, "%s", t_case_text(c)) : st;
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
            rank_try(run_one(r, &c));
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

static colo_status_t large_cases(t_gpu_rank_t *r, void *arg)
{
    for (int k = 0; k < 6; k++) { /* each goes in two halves */
        t_case_t c = {.src = t_side_ordered(0, 1, 1, gpus, true),
                      .dst = t_side_ordered(0, 1, 2, gpus / 2, false),
                      .shape = {gpus > 4 ? gpus : 4, 2048, 512},
                      .output = k % 2 ? COLO_FULL_SEQ : COLO_SHARDED,
                      .grad = COLO_PARTIAL,
                      .dtype = COLO_F32,
                      .axes = t_axes[k / 2],
                      .stride = k == 5 ? T_PADDED : T_TIGHT};
        rank_try(run_one(r, &c));
    }
    return COLO_OK;
}

T_CASE(boxes_of_several_mebibytes_arrive)
{
    assert_ok(t_gpus_run(gpus, false, large_cases, NULL));
}

/* ---- seeded layouts ---- */

static colo_status_t random_cases(t_gpu_rank_t *r, void *arg)
{
    uint64_t s = t_seed();
    for (int64_t i = 0, n = *(int64_t *)arg; i < n; i++) {
        const t_case_t c = t_seeded_case(&s, gpus);
        rank_try(run_one(r, &c));
    }
    return COLO_OK;
}

T_CASE(seeded_layouts_arrive_on_one_comm)
{
    int64_t n = t_scaled(250);
    (void)t_seed();
    assert_ok(t_gpus_run(gpus, false, random_cases, &n));
}

/* ---- COLLECTIVE ---- */

static colo_status_t collective_cases(t_gpu_rank_t *r, void *arg)
{
    int32_t ran = 0;
    for (size_t i = 0; i < T_PAIRS; i++)
        for (int k = 0; k < 3; k++) {
            t_case_t c =
                t_between(t_pairs[i].src, t_pairs[i].dst, t_pairs[i].b, t_pairs[i].n, t_pairs[i].h);
            c.output = k == 1 ? COLO_SHARDED : COLO_FULL_SEQ;
            c.grad = COLO_PARTIAL;
            c.algo = COLO_COLLECTIVE;
            c.dtype = k == 2 ? COLO_BF16 : COLO_F32;
            c.axes = t_axes[k];
            c.stride = (t_stride_t)(i % T_STRIDE_COUNT);
            if (!fits(&c))
                continue;
            colo_status_t st = run_one(r, &c);
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

static colo_status_t reshapes(t_gpu_rank_t *r, void *arg)
{
    /* 1 and 3 samples do not divide: other ranks are tied together, some have nothing */
    static const int64_t samples[] = {4, 8, 1, 3, 4, 2, 7};
    t_case_t c =
        t_between(gpus >= 4 ? "dp=4" : "dp=2", gpus >= 4 ? "tp=1,cp=2,dp=2" : "tp=2,dp=1", 4, 8, 3);
    c.dtype = COLO_F32;
    colo_bridge_t *bridge = NULL;
    rank_try(t_gpu_bridge(r, &c, &bridge));
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) {
        c.shape.b = samples[i];
        colo_shape_t shape = {samples[i], 8, 3, 0};
        rank_try(colo_bridge_reshape(bridge, &shape));
        rank_try(t_gpu_pass(r, bridge, &c, (int64_t)i, false));
        rank_try(t_gpu_pass(r, bridge, &c, (int64_t)i, true));
    }
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(a_bridge_takes_other_batches)
{
    assert_ok(t_gpus_run(gpus, false, reshapes, NULL));
}

/* ---- the wrong memory ---- */

static colo_status_t host_bridge(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = t_between("dp=2", "tp=2,dp=1", 4, 3, 2);
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    rank_try(t_case_config(&c, &src, &dst, &config));
    rank_check(colo_bridge_create(&bridge, &config, r->gpus) < 0 && !bridge);
    rank_check(colo_comm_check(r->gpus) == COLO_OK);
    config.mem = COLO_CUDA;
    rank_check(colo_bridge_create(&bridge, &config, r->host) < 0 && !bridge);
    return colo_comm_check(r->host);
}

T_CASE(a_bridge_of_the_other_memory_is_refused_and_the_comm_lives)
{
    assert_ok(t_gpus_run(gpus, false, host_bridge, NULL));
}

T_MAIN_AFTER(t_gpus_enough(2) ? 0 : T_EXIT_SKIP, gpus = t_gpu_ranks(), "gpu/nccl_bridge")
