/* SPDX-License-Identifier: Apache-2.0 */
/* test_colo_info.c - colo-info lists the version and every environment variable, wherever its value
 * comes from. */
#include "harness/harness.h"

#include "tool.h"

#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

static json_t *info_exit(int expected)
{
    const char *args[] = {"--json", NULL};
    tool_output_t s = tool_run(args);
    assert_int_equal(s.exit, expected);
    assert_int_equal(s.err_size == 0, expected == 0);
    json_t *doc = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(doc);
    return doc;
}

static json_t *info(void)
{
    return info_exit(0);
}

static const char *of_variable(json_t *doc, const char *name, const char *key)
{
    size_t i;
    json_t *k;
    json_array_foreach(json_object_get(doc, "environment_variables"), i,
                       k) if (strcmp(json_string_value(json_object_get(k, "name")), name) ==
                              0) return json_string_value(json_object_get(k, key));
    fail_msg("no environment variable %s", name);
    return NULL;
}

T_CASE(a_variable_shows_its_value_and_where_it_comes_from)
{
    unsetenv("COLO_CHECK");
    json_t *doc = info();
    assert_string_equal(json_string_value(json_object_get(doc, "version")), "0.1.0");
    assert_string_equal(json_string_value(json_object_get(doc, "header_version")), "0.1.0");
    assert_string_equal(of_variable(doc, "COLO_CHECK", "value"), "1");
    assert_string_equal(of_variable(doc, "COLO_CHECK", "source"), "default");
    assert_string_equal(of_variable(doc, "COLO_TIMEOUT_MS", "default"), "600000");
    json_decref(doc);

    setenv("COLO_CHECK", "2", 1);
    doc = info();
    assert_string_equal(of_variable(doc, "COLO_CHECK", "value"), "2");
    assert_string_equal(of_variable(doc, "COLO_CHECK", "source"), "environment");
    assert_string_equal(of_variable(doc, "COLO_CHECK", "default"), "1");
    json_decref(doc);

    setenv("COLO_CHECK", "\xff", 1); /* no UTF-8: still one JSON document */
    doc = info_exit(1);
    assert_string_equal(of_variable(doc, "COLO_CHECK", "value"), "\"\\xff\"");
    json_decref(doc);
    unsetenv("COLO_CHECK");
}

/* Ranks as threads and over sockets need nothing; what needs a library may not be there. */
T_CASE(every_backend_is_listed)
{
    static const char *const names[] = {"threads", "sockets", "ucx", "nccl", "cuda", "hwloc"};
    const char *args[] = {NULL};
    json_t *doc = info(), *list = json_object_get(doc, "backends");
    tool_output_t s = tool_run(args);
    assert_int_equal(json_object_size(list), sizeof names / sizeof *names);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        json_t *built = json_object_get(list, names[i]);
        assert_true(json_is_boolean(built));
        assert_true(i > 1 || json_is_true(built));
        const char *line = t_text("\n  %-8s %-4s ", names[i], json_is_true(built) ? "yes" : "no");
        assert_non_null(strstr(s.out, line));
    }
    json_decref(doc);
}

T_CASE(value_that_is_not_allowed_is_found_and_exit_1)
{
    const char *args[2][2] = {{NULL}, {"--json", NULL}};
    setenv("COLO_CHECK", "3", 1);
    for (int i = 0; i < 2; i++) {
        tool_output_t s = tool_run(args[i]);
        assert_int_equal(s.exit, 1);
        assert_string_equal(s.err, "colo-info: COLO_CHECK is '3', expected a number from 0 to 2\n");
        assert_non_null(strstr(s.out, i ? "\"allowed\": false" : "not allowed"));
    }
    unsetenv("COLO_CHECK");
}

T_CASE(the_text_has_a_line_for_every_variable)
{
    const char *args[] = {NULL};
    json_t *doc = info(), *k;
    tool_output_t s = tool_run(args);
    size_t i;
    assert_int_equal(s.exit, 0);
    assert_true(json_array_size(json_object_get(doc, "environment_variables")) >= 4);
    json_array_foreach(json_object_get(doc, "environment_variables"), i, k)
        assert_non_null(strstr(s.out, json_string_value(json_object_get(k, "name"))));
    json_decref(doc);
}

T_CASE(wrong_use_is_one_line_and_exit_2)
{
    static const char *const cases[][3] = {{"--grid"}, {"--json=1"}, {"--json", "--json"}, {"x"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        tool_refuses("colo-info", cases[i], 2, "");
}

/* ---- --world ---- */

/* Rank 0 of @size in @folder, without the other ranks. */
static tool_output_t world(const char *folder, const char *size)
{
    const char *args[] = {"--world", folder, NULL};
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", size, 1);
    setenv("COLO_TIMEOUT_MS", "100", 1);
    tool_output_t s = tool_run(args);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("COLO_TIMEOUT_MS");
    return s;
}

T_CASE(world_that_waits_says_for_which_rank)
{
    char folder[] = "/tmp/colo-world-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    tool_output_t s = world(folder, "2");
    assert_int_equal(s.exit, 1);
    assert_non_null(strstr(s.err, "rank 0 of 2 waits for the file of rank 1, 100 ms at most\n"));
    assert_non_null(strstr(s.err, "rank 1 has left no file after 100 ms\n"));
    snprintf(path, sizeof path, "%s/colo-info-rank-0", folder);
    assert_true(unlink(path) == 0 && rmdir(folder) == 0);
}

/* The folder may be another user's. */
T_CASE(world_follows_no_link)
{
    char folder[] = "/tmp/colo-world-XXXXXX", other[64], part[64];
    struct stat was;
    assert_non_null(mkdtemp(folder));
    snprintf(other, sizeof other, "%s/other", folder);
    snprintf(part, sizeof part, "%s/colo-info-rank-0.part", folder);
    FILE *f = fopen(other, "w");
    assert_true(f && fclose(f) == 0 && symlink(other, part) == 0);
    tool_output_t s = world(folder, "1");
    assert_int_equal(s.exit, 1);
    assert_non_null(strstr(s.err, "expected a new folder for each run"));
    assert_true(stat(other, &was) == 0 && was.st_size == 0);
    assert_true(unlink(part) == 0 && unlink(other) == 0 && rmdir(folder) == 0);
}

T_CASE(world_refuses_a_folder_whose_name_is_empty_or_too_long)
{
    char name[482];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    for (int i = 0; i < 2; i++) {
        tool_output_t s = world(i ? name : "", "1");
        assert_int_equal(s.exit, 2);
        assert_non_null(strstr(s.err, "--world: the name of the folder has "));
    }
}

T_TOOL_MAIN("COLO_INFO", "tools/colo_info")
