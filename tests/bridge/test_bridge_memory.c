/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bridge_memory.c - after its first one, a call of a bridge allocates nothing: not a byte,
 * with either algorithm, also for rows that a position table scatters. This program's allocator
 * counts; under a sanitizer, which brings its own, the test is skipped.
 */
#include "ragged_example.h"

#include "harness/allocations.h"

enum { RANKS = 4, SAMPLES = 4, ROWS = 160, FEATURES = 3 };

typedef struct memory_case {
    const char *src, *dst;
    colo_algo_t algo;
    colo_output_t output;
    colo_grad_t grad;
    float y[RANKS][SAMPLES * ROWS * FEATURES], d_x[RANKS][SAMPLES * ROWS * FEATURES];
} memory_case_t;

static int64_t table[ROWS]; /* neighbours in a sample are 77 positions apart: a run each */

static colo_status_t calling_rank(colo_comm_t *world, void *arg)
{
    memory_case_t *m = arg;
    const int32_t rank = colo_comm_rank(world);
    colo_layout_t src, dst;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    float x[SAMPLES * ROWS * FEATURES];
    int64_t xs[3], ys[3];
    rank_try(t_layouts(m->src, m->dst, &src, &dst));
    rank_try(colo_layout_map_table(&dst, table, ROWS, ROWS));
    colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT,
                                   .src = &src,
                                   .dst = &dst,
                                   .shape = {SAMPLES, ROWS, FEATURES, 0},
                                   .dtype = COLO_F32,
                                   .output = m->output,
                                   .grad = m->grad,
                                   .algo = m->algo};
    rank_try(colo_bridge_create(&bridge, &config, world));
    colo_bridge_src_shape(bridge, xs);
    colo_bridge_dst_shape(bridge, ys);
    for (int i = 0; i < SAMPLES * ROWS * FEATURES; i++)
        x[i] = (float)(rank * 10000 + i);
    colo_tensor_t in = colo_tensor_host(x, COLO_F32, 3, xs);
    colo_tensor_t out = colo_tensor_host(m->y[rank], COLO_F32, 3, ys), back = in;
    back.data = m->d_x[rank];
    for (int rep = 0; rep < 3; rep++) {
        if (rep == 1) { /* what grows has grown */
            rank_try(colo_comm_barrier(world, NULL));
            atomic_store(&counting, true);
            rank_try(colo_comm_barrier(world, NULL));
        }
        rank_try(colo_bridge_forward(bridge, &in, &out, NULL));
        rank_try(colo_bridge_backward(bridge, &out, &back, NULL));
    }
    rank_try(colo_comm_barrier(world, NULL));
    atomic_store(&counting, false);
    rank_try(colo_comm_barrier(world, NULL));
    return COLO_OK;
}

T_CASE(calls_allocate_nothing_whatever_the_algorithm)
{
    static const char *const specs[][2] = {{"tp=1,dp=4", "tp=1,cp=2,dp=2"},
                                           {"tp=2,dp=2", "tp=1,cp=2,dp=2"},
                                           {"tp=4,dp=1", "tp=1,cp=2,dp=2"}};
    static memory_case_t exact, collective;
    for (int i = 0; i < ROWS; i++)
        table[i] = i * 77 % ROWS;
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        for (int output = 0; output < 2; output++) {
            exact = (memory_case_t){
                .src = specs[i][0], .dst = specs[i][1], .output = (colo_output_t)output};
            collective = exact;
            collective.algo = COLO_ALGO_COLLECTIVE;
            atomic_store(&allocated, 0);
            assert_ok(colo_comm_threads_run(RANKS, calling_rank, &exact));
            assert_int_equal(atomic_load(&allocated), 0);
            assert_ok(colo_comm_threads_run(RANKS, calling_rank, &collective));
            assert_int_equal(atomic_load(&allocated), 0);
            assert_memory_equal(exact.y, collective.y, sizeof exact.y);
            assert_memory_equal(exact.d_x, collective.d_x, sizeof exact.d_x);
        }
}

enum { CALLS = 500 }; /* so many that what each of them took from the batch would not fit in it */

static colo_status_t ragged_rank(colo_comm_t *world, void *arg)
{
    const options_t o = {.output = COLO_OUTPUT_SHARDED, .placement = COLO_PLACEMENT_MERGED};
    STAND(d);
    rank_try(stand_up(&d, &o, &worked, world));
    for (int rep = 0; rep < CALLS; rep++) {
        if (rep == 1) {
            rank_try(colo_comm_barrier(world, NULL));
            atomic_store(&counting, true);
        }
        rank_try(colo_batch_forward(d.batch, &d.tx, &d.ty, 1, NULL));
    }
    rank_try(colo_comm_barrier(world, NULL));
    atomic_store(&counting, false);
    rank_try(colo_comm_barrier(world, NULL));
    return COLO_OK;
}

T_CASE(calls_of_a_batch_allocate_nothing_after_the_first)
{
    atomic_store(&allocated, 0);
    assert_ok(colo_comm_threads_run(2, ragged_rank, NULL));
    assert_int_equal(atomic_load(&allocated), 0);
}

T_MAIN_IF(T_NEED_OWN_MALLOC, "bridge/bridge_memory")
