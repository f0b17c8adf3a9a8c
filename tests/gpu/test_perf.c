/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_perf.c - colo-perf on GPUs: what it measures is right. Figures are not judged here; that
 * they are there, and that their results were checked, is. What needs no GPU is in tests/tools/.
 */
#include "gpu/gpu.h"

#include "tools/tool.h"

#include <jansson.h>

static int gpus;

static json_t *rows_of(const char *const *args, const char *key, const char *inner)
{
    tool_output_t s = tool_run(args);
    if (s.exit != 0)
        fail_msg("exit %d: %s", s.exit, s.err);
    json_t *doc = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(doc);
    json_t *rows = json_object_get(doc, key);
    rows = json_incref(inner ? json_object_get(rows, inner) : rows);
    json_decref(doc);
    assert_true(json_is_array(rows));
    return rows;
}

static void check_rows(json_t *rows, size_t count, const char *bandwidth)
{
    size_t i;
    json_t *row;
    assert_int_equal(json_array_size(rows), count);
    json_array_foreach(rows, i, row)
    {
        assert_true(json_real_value(json_object_get(row, "time_us")) > 0);
        assert_true(json_real_value(json_object_get(row, bandwidth)) > 0);
        assert_true(json_is_integer(json_object_get(row, "wrong")));
        assert_int_equal(json_integer_value(json_object_get(row, "wrong")), 0);
    }
    json_decref(rows);
}

T_CASE(link_measures_four_ways_at_each_size)
{
    check_rows(rows_of((const char *[]){"link", "-g", "1", "-b", "64K", "-e", "1M", "-f", "4", "-n",
                                        "3", "--json", NULL},
                       "link", NULL),
               12, "algbw_gbs");
}

T_CASE(logprob_is_checked_against_fp64)
{
    check_rows(rows_of((const char *[]){"logprob", "--tokens", "100", "--vocab", "5003", "-n", "3",
                                        "--entropy", "--json", NULL},
                       "logprob", "rows"),
               5, "gbs");
}

T_CASE(links_are_measured_in_every_group)
{
    const int groups = gpus > 4 ? 3 : gpus > 2 ? 2 : 1; /* 2, 4, all; pairs from 4 on */
    if (gpus < 2)
        skip();
    json_t *rows = rows_of((const char *[]){"link", "-b", "64K", "-e", "1M", "-f", "16", "-n", "2",
                                            "-w", "1", "--json", NULL},
                           "link", NULL);
    assert_true(json_array_size(rows) >= (size_t)(2 * 4 + groups * 2 * 2));
    check_rows(rows, json_array_size(rows), "algbw_gbs");
}

/* Every way, both outputs, both gradients, axes and dtypes: a wrong element is exit 1. */
T_CASE(every_way_of_a_bridge_is_right)
{
    static const char *const pairs[][4] = {
        {"tp=1,dp=2->tp=1,cp=2,dp=1", "tp=2,dp=1->tp=1,cp=2,dp=1", "tp=2,dp=1->tp=1,dp=2", NULL},
        {"tp=1,dp=4->tp=1,cp=2,dp=2", "tp=4,dp=1->tp=1,cp=2,dp=2", "tp=1,dp=4->tp=2,cp=2,dp=1",
         NULL}};
    static const char *const more[][6] = {{"--output", "sharded", "--dtype", "bf16", NULL},
                                          {"--output", "full", "--grad", "partial", NULL},
                                          {"--output", "full", "--grad", "disjoint", NULL},
                                          {"--output", "full", "--dtype", "f32", NULL},
                                          {"--output", "sharded", "--dtype", "f16", NULL}};
    if (gpus < 2)
        skip();
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        const char *args[40] = {"bridge", "--batch", "8",  "--seq", "24", "--hidden", "40",
                                "--axes", "both",    "-n", "2",     "-w", "1",        "--json"};
        int n = 14;
        for (int k = 0; more[i][k]; k++)
            args[n++] = more[i][k];
        args[n++] = "--layouts";
        for (int k = 0; pairs[gpus >= 4][k]; k++)
            args[n++] = pairs[gpus >= 4][k];
        json_t *rows = rows_of(args, "bridge", NULL);
        /* 3 pairs, 2 orders, 2 ways; launched and in a graph: exact, collective, reference, tuned
         */
        assert_true(json_array_size(rows) >= 3 * 2 * 2 * 4 * 2);
        check_rows(rows, json_array_size(rows), "algbw_gbs");
    }
}

int main(int argc, char **argv)
{
    int rc = gpu_need(1);
    if (rc)
        return rc;
    if (!tool_path(argc, argv, "COLO_PERF") || cudaGetDeviceCount(&gpus) != cudaSuccess)
        return 2;
    return t_main("gpu/perf");
}
