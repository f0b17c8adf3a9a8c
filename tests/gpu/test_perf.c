/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_perf.c - colo-perf: refuses what it cannot measure, and what it measures is right. Figures
 * are not judged here; that they are there, and that their results were checked, is.
 */
#include "gpu/gpu.h"

#include "tools/tool.h"

#include <jansson.h>

static bool have_gpu;

static void expect(const char *const *args, int code, const char *text)
{
    said_t s = tool_run(args);
    if (s.exit != code || !strstr(code ? s.err : s.out, text))
        fail_msg("exit %d, expected %d and \"%s\": %s%s", s.exit, code, text, s.out, s.err);
    said_free(&s);
}

static void wrong_use_is_exit_2_with_the_option(void **state)
{
    (void)state;
    expect((const char *[]){NULL}, 2, "nothing is no subcommand");
    expect((const char *[]){"lnk", NULL}, 2, "\"lnk\" is no subcommand");
    expect((const char *[]){"link", "-b", "8X", NULL}, 2, "-b: \"8X\" is no size");
    expect((const char *[]){"link", "-b", "3", NULL}, 2, "-b: \"3\" is no size");
    expect((const char *[]){"link", "-b", "2M", "-e", "1M", NULL}, 2, "-b 2097152 is larger");
    expect((const char *[]){"link", "-f", "1", NULL}, 2, "-f: \"1\" is outside");
    expect((const char *[]){"link", "-g", "2", NULL}, 2, "measures one GPU");
    expect((const char *[]){"logprob", "--vocab", "x", NULL}, 2, "--vocab: ");
    expect((const char *[]){"--help", NULL}, 0, "usage: colo-perf");
    expect((const char *[]){"--version", NULL}, 0, "colo-perf 0.1.0");
}

static void no_gpu_is_exit_1_and_says_so(void **state)
{
    (void)state;
    expect((const char *[]){"link", NULL}, 1, "no CUDA device");
}

static json_t *rows_of(const char *const *args, const char *key, const char *inner)
{
    said_t s = tool_run(args);
    if (s.exit != 0)
        fail_msg("exit %d: %s", s.exit, s.err);
    json_t *doc = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(doc);
    said_free(&s);
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

static void link_measures_four_ways_at_each_size(void **state)
{
    (void)state;
    check_rows(rows_of((const char *[]){"link", "-b", "64K", "-e", "1M", "-f", "4", "-n", "3",
                                        "--json", NULL},
                       "link", NULL),
               12, "algbw_gbs");
}

static void logprob_is_checked_against_fp64(void **state)
{
    (void)state;
    check_rows(rows_of((const char *[]){"logprob", "--tokens", "100", "--vocab", "5003", "-n", "3",
                                        "--entropy", "--json", NULL},
                       "logprob", "rows"),
               5, "gbs");
}

int main(int argc, char **argv)
{
    int n = 0;
    if (!tool_path(argc, argv, "COLO_PERF"))
        return 2;
    have_gpu = cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
    const struct CMUnitTest without[] = {
        cmocka_unit_test(wrong_use_is_exit_2_with_the_option),
        cmocka_unit_test(no_gpu_is_exit_1_and_says_so),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_use_is_exit_2_with_the_option),
        cmocka_unit_test(link_measures_four_ways_at_each_size),
        cmocka_unit_test(logprob_is_checked_against_fp64),
    };
    return have_gpu ? cmocka_run_group_tests_name("gpu/perf", tests, NULL, NULL)
                    : cmocka_run_group_tests_name("gpu/perf", without, NULL, NULL);
}
