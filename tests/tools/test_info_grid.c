/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_info_grid.c - colo-info about grids, bridges and ranks, against pages written by hand, and
 * what it says to topologies, grids and options that cannot be.
 *
 * How golden/ was derived. Compact binding puts rank l of a host on core l.
 *   one package:   all ranks are on it.
 *   four nodes:    ranks 4 apart are on another NUMA node, 8 apart on another package. tp and cp
 *                  are 1 and 2 apart, dp 4: 4 groups {j, j + 4, j + 8, j + 12}, all across both.
 *   two packages:  dp 1, tp 4 apart: {j, j + 4, j + 8, j + 12} has both sides of 8. With tp first
 *                  it is {4 j .. 4 j + 3}. Scattered, odd ranks are on the other package.
 *   hosts:         012 345 67. tp pairs 01 23 45 67: one is split. cp pairs 02 13 46 57: three. dp
 *                  pairs 04 15 26 37: all. The bridge (docs/plan.md): 0 and 1 get theirs from 2, 2
 *                  from 0 or 1, on their host; 3 to 7 have no source there. 4 and 5 need the same,
 *                  and so do 6 and 7: 3 of 8 eighths of 1024 cross hosts, and two are passed on.
 */
#include "harness/harness.h"

#include "markup.h"
#include "tool.h"

#include <jansson.h>
#include <unistd.h>

#define HOSTS                                                                                \
    "--ranks-per-node 3 --src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 16 --seq 8 --hidden 4 " \
    "--dtype bf16 --output sharded"

static const char *page(const char *name)
{
    const char *path = t_text("%s/%s", GOLDEN, name);
    const char *text = markup_read(path);
    assert_non_null(text);
    return text;
}

static void text_is_as_written(void **state)
{
    static const struct {
        const char *page, *topology, *line;
    } cases[] = {
        {"info-one-package.txt", "package:1 core:8 pu:1", "--topology %s --grid tp=2,cp=2,dp=2"},
        {"info-four-nodes.txt", "package:2 numa:2 core:4 pu:1",
         "--topology %s --grid tp=2,cp=2,dp=4"},
        {"info-two-packages.txt", "package:2 core:8 pu:1", "--topology %s --grid dp=4,tp=4"},
        {"info-gpus.txt", NULL, "--topology two-packages-four-gpus.xml --bind " HOSTS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tool_output_t s = tool_run(words(cases[i].line, cases[i].topology));
        assert_string_equal(s.err, "");
        assert_int_equal(s.exit, 0);
        assert_string_equal(s.out, page(cases[i].page));
    }
}

static void json_is_as_written(void **state)
{
    static const struct {
        const char *page, *topology, *line;
    } cases[] = {
        {"info-two-packages.json", "package:2 core:8 pu:1",
         "--topology %s --grid dp=4,tp=4 --json"},
        {"info-hosts.json", "package:1 core:4 pu:1",
         "--topology %s --grid tp=2,cp=2,dp=2 --json --bind " HOSTS},
        {"info-package.json", "package:2 numa:2 core:2 pu:1",
         "--topology %s --bind --ranks-per-node 2 --policy package --json"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tool_output_t s = tool_run(words(cases[i].line, cases[i].topology));
        assert_string_equal(s.err, "");
        assert_int_equal(s.exit, 0);
        json_auto_t *got = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL);
        json_auto_t *want = json_loads(page(cases[i].page), JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(got);
        assert_non_null(want);
        if (!json_equal(got, want))
            fail_msg("%s: found %s", cases[i].page, s.out);
    }
}

static void the_machine_is_in_the_plain_page(void **state)
{
    const char *const *args = words("--topology two-packages-four-gpus.xml --json");
    tool_output_t s = tool_run(args);
    assert_int_equal(s.exit, 0);
    json_t *doc = json_loads(s.out, 0, NULL), *t = json_object_get(doc, "topology");
    assert_string_equal(json_string_value(json_object_get(t, "source")), args[1]);
    assert_int_equal(json_integer_value(json_object_get(t, "processors")), 16);
    json_t *d = json_array_get(json_object_get(t, "devices"), 3);
    assert_string_equal(json_string_value(json_object_get(d, "kind")), "gpu");
    assert_string_equal(json_string_value(json_object_get(d, "name")), "cuda2");
    assert_string_equal(json_string_value(json_object_get(d, "bus")), "0000:9b:00.0");
    assert_int_equal(json_integer_value(json_object_get(d, "numa")), 1);
    assert_int_equal(json_integer_value(json_object_get(d, "package")), 1);
    assert_true(json_is_null(json_object_get(doc, "topology_error")));
    assert_true(json_is_true(json_object_get(json_object_get(doc, "backends"), "hwloc")));
    assert_string_equal(
        json_string_value(json_object_get(json_object_get(doc, "libraries"), "hwloc")),
        colo_topology_version());
    json_decref(doc);
}

/* ---- refused ---- */

static void what_cannot_be_is_one_line_and_exit_2(void **state)
{
    static const struct {
        const char *error_message, *topology, *line;
    } cases[] = {
        {"line 2: no hwloc topology", NULL, "--topology broken.xml --grid tp=2"},
        {"line 2: no hwloc topology", NULL, "--topology broken.xml"},
        {"'huge.xml': 17825792 bytes, at most 16777216", NULL, "--topology huge.xml --grid tp=2"},
        {"No such file or directory", NULL, "--topology missing.xml --grid tp=2"},
        {"not a regular file", NULL, "--topology ./ --grid tp=2"},
        {"neither a file", NULL, "--topology socket:eight --grid tp=2"},
        {"neither a file", NULL, "--topology  --grid tp=2"},
        {"more than 16384 processors", "core:999999 pu:9", "--topology %s --grid tp=2"},
        {"16 ranks on a host, the machine has 8 processors", "package:2 core:4 pu:1",
         "--topology %s --grid tp=4,dp=4"},
        {"9 ranks on a host, the machine has 8 processors", "package:2 core:4 pu:1",
         "--topology %s --grid tp=4,dp=40 --ranks-per-node 9"},
        {"--grid: ", "core:8 pu:1", "--topology %s --grid tp=2,tp=2"},
        {"--grid: 33554432 ranks", "core:8 pu:1", "--topology %s --grid tp=33554432"},
        {"--policy: bind: 'gpu' is none of", NULL, "--grid tp=2 --policy gpu"},
        {"--policy: no ranks are named", NULL, "--policy core"},
        {"--bind: the number of ranks is missing", NULL, "--bind"},
        {"--bind: 8192 ranks; up to 4096", NULL, "--bind --grid dp=8192 --ranks-per-node 8"},
        {"--dst is missing; --src needs it", NULL, "--src tp=2"},
        {"--src is missing; --dtype needs it", NULL, "--grid tp=2 --dtype bf16"},
        {"--hidden is missing", NULL, "--src tp=2 --dst dp=2 --batch 2 --seq 2"},
        {"--dtype: ", NULL, "--src tp=2 --dst dp=2 --batch 2 --seq 2 --hidden 2 --dtype bf17"},
        {"--ranks-per-node: \"x\" is no whole number", NULL, "--grid tp=2 --ranks-per-node x"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        tool_refuses("colo-info", words(cases[i].line, cases[i].topology), 2,
                     cases[i].error_message);
    /* layouts that do not fit are found, not misused */
    tool_refuses(
        "colo-info",
        words("--topology %s --src dp=2 --dst cp=2 --batch 2 --seq 3 --hidden 2 --grad disjoint",
              "core:8 pu:1"),
        1, "3");
}

static void a_stdout_that_is_full_is_a_problem(void **state)
{
    tool_refused(tool_run_closed(words("--topology %s --grid tp=2", "core:8 pu:1")), "colo-info", 1,
                 "standard output");
    tool_output_t s = tool_run_closed(words("--topology %s --grid tp=2 --json", "core:8 pu:1"));
    assert_int_equal(s.exit, 1);
}

static void without_hwloc_grids_are_a_problem_with_a_remedy(void **state)
{
    tool_refuses("colo-info", words("--topology %s --grid tp=2", "core:8 pu:1"), 1,
                 "configure with -Dhwloc=enabled");
    tool_output_t s = tool_run(words("--json")); /* the rest is there all the same */
    assert_int_equal(s.exit, 0);
    json_auto_t *doc = json_loads(s.out, 0, NULL);
    assert_true(json_is_null(json_object_get(doc, "topology")));
    assert_non_null(strstr(json_string_value(json_object_get(doc, "topology_error")), "no hwloc"));
    assert_true(json_is_null(json_object_get(json_object_get(doc, "libraries"), "hwloc")));
    assert_true(json_is_false(json_object_get(json_object_get(doc, "backends"), "hwloc")));
}

/* A folder with the good file, a broken one and a huge one, to be in while the tool runs. */
static int enter(void **state)
{
    if (tool_folder_enter(state) != 0)
        return 1;
    tool_write("broken.xml", "<?xml version=\"1.0\"?>\n<topology>");
    tool_write("huge.xml", "");
    return truncate("huge.xml", 17 << 20) == 0
               ? symlink(TOPOLOGIES "/two-packages-four-gpus.xml", "two-packages-four-gpus.xml")
               : 1;
}

int main(int argc, char **argv)
{
    if (!tool_path(argc, argv, "COLO_INFO"))
        return T_EXIT_SKIP;
    const struct CMUnitTest without[] = {
        cmocka_unit_test(without_hwloc_grids_are_a_problem_with_a_remedy),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_as_written),
        cmocka_unit_test(json_is_as_written),
        cmocka_unit_test(the_machine_is_in_the_plain_page),
        cmocka_unit_test(what_cannot_be_is_one_line_and_exit_2),
        cmocka_unit_test(a_stdout_that_is_full_is_a_problem),
    };
    return colo_topology_version()
               ? cmocka_run_group_tests_name("tools/info_grid", tests, enter, tool_folder_leave)
               : cmocka_run_group_tests_name("tools/info_grid", without, NULL, NULL);
}
