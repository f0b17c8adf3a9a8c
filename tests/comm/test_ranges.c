/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ranges.c - with COLO_NVTX=1 a tool that NVTX loads sees each public operation by its name,
 * also those that fail, and each range ends; without it the tool sees nothing.
 */
#include "harness/harness.h"

#include <dlfcn.h>

static long (*ranges_open)(void), (*ranges_of)(const char *name);

static colo_status_t operate(colo_comm_t *world, void *arg)
{
    colo_grid_t grid;
    colo_layout_t layouts[2];
    colo_bridge_t *bridge = NULL;
    colo_comm_t *all = NULL;
    float x[2] = {1, 2}, y[2];
    int32_t one = 1, sum;
    (void)arg;
    rank_try(colo_grid_parse(&grid, "dp=2", 2));
    rank_try(colo_layout_init_src(&layouts[0], &grid));
    rank_try(colo_layout_init_dst(&layouts[1], &grid));
    const colo_bridge_config_t config = {COLO_BRIDGE_CONFIG_INIT, .src = layouts,
                                         .dst = layouts + 1, .shape = {4, 1, 1, 0},
                                         .dtype = COLO_F32};
    const colo_tensor_t in = colo_tensor_host(x, COLO_F32, 3, (int64_t[]){2, 1, 1});
    const colo_tensor_t out = colo_tensor_host(y, COLO_F32, 3, (int64_t[]){2, 1, 1});
    rank_try(colo_comm_split(world, &grid, "dp", &all));
    rank_try(colo_bridge_create(&bridge, &config, all));
    rank_try(colo_bridge_forward(bridge, &in, &out, NULL));
    rank_try(colo_bridge_backward(bridge, &in, &out, NULL));
    colo_bridge_destroy(&bridge);
    rank_try(colo_comm_all_reduce(all, &one, &sum, 1, COLO_I32, COLO_REDOP_SUM, NULL));
    rank_try(colo_comm_barrier(all, NULL));
    colo_comm_destroy(&all);
    rank_check(colo_comm_all_reduce(world, &one, &sum, -1, COLO_I32, COLO_REDOP_SUM, NULL) < 0);
    return COLO_OK;
}

static const char *const names[] = {"colo_comm_split",     "colo_bridge_create",
                                    "colo_bridge_forward", "colo_bridge_backward",
                                    "colo_comm_barrier",   "colo_comm_all_reduce"};
enum { NAMES = sizeof names / sizeof *names };

T_CASE(operations_without_colo_nvtx_are_no_ranges)
{
    unsetenv("COLO_NVTX");
    assert_ok(colo_comm_threads_run(2, operate, NULL));
    for (int i = 0; i < NAMES; i++)
        assert_int_equal(ranges_of(names[i]), 0);
}

T_CASE(operations_with_colo_nvtx_are_ranges_of_their_names)
{
    setenv("COLO_NVTX", "1", 1);
    assert_ok(colo_comm_threads_run(2, operate, NULL));
    for (int i = 0; i < NAMES; i++) /* on each of two ranks; the last one twice, and fails once */
        assert_int_equal(ranges_of(names[i]), i + 1 < NAMES ? 2 : 4);
    assert_int_equal(ranges_open(), 0);
}

T_CASE(a_colo_nvtx_that_is_no_number_is_refused)
{
    setenv("COLO_NVTX", "yes", 1);
    assert_fails(colo_comm_threads_run(2, operate, NULL), COLO_ERR_ARG,
                 "COLO_NVTX is 'yes', expected a number from 0 to 1");
    unsetenv("COLO_NVTX");
}

int main(void)
{
    void *tool = dlopen(getenv("NVTX_INJECTION64_PATH"), RTLD_NOW | RTLD_GLOBAL);
    *(void **)&ranges_open = tool ? dlsym(tool, "t_ranges_open") : NULL;
    *(void **)&ranges_of = tool ? dlsym(tool, "t_ranges_of") : NULL;
    if (!ranges_open || !ranges_of)
        return fprintf(stderr, "test: %s\n", dlerror()), 1;
    return t_main("comm/ranges");
}
