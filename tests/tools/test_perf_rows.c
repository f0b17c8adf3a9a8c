/* SPDX-License-Identifier: Apache-2.0 */
/* test_perf_rows.c - one row of colo-perf bridge: the columns of nccl-tests and the documented
 * keys. */
#include "harness/harness.h"

#include "perf/perf.h"

#include <unistd.h>

const char tool_name[] = "colo-perf";

static const perf_pair_t pair = {.src_name = "tp=1,dp=4", .dst_name = "tp=1,cp=2,dp=2"};

static perf_t asked(bool json)
{
    return (perf_t){.shape = {16, 8192, 4096, 0},
                    .dtype = COLO_BF16,
                    .output = COLO_OUTPUT_SHARDED,
                    .warmup = 5,
                    .iters = 20,
                    .json = json};
}

static perf_row_t row(bool view)
{
    return (perf_row_t){.pair = &pair,
                        .axes = "bsh",
                        .pass = "backward",
                        .op = "exact-nccl",
                        .shape = {16, 8192, 4096, 0},
                        .bytes = 512000000,
                        .arrive = 128000000,
                        .local = 64000000,
                        .us = 500,
                        .best = 480,
                        .limit = 400,
                        .wrong = 3,
                        .view = view};
}

static void make(perf_t *p)
{
    char *argv[] = {(char *)"x", (char *)"bridge", (char *)"--layouts", (char *)"a->b", NULL};
    assert_int_equal(perf_doc(p, "a device", 4, "13.0", 4, argv), TOOL_OK);
}

T_CASE(keys_are_the_documented_ones_with_their_values)
{
    static const char *const text[][2] = {{"src", "tp=1,dp=4"},  {"dst", "tp=1,cp=2,dp=2"},
                                          {"axes", "bsh"},       {"dtype", "bf16"},
                                          {"output", "sharded"}, {"grad", "partial"},
                                          {"way", "backward"},   {"op", "exact-nccl"}};
    static const struct {
        const char *key;
        double value;
    } number[] = {{"batch", 16},
                  {"seq", 8192},
                  {"hidden", 4096},
                  {"bytes", 512000000},
                  {"arrive_bytes", 128000000},
                  {"local_bytes", 64000000},
                  {"time_us", 500},
                  {"best_us", 480},
                  {"limit_us", 400},
                  {"algbw_gbs", 1024},
                  {"busbw_gbs", 256},
                  {"percent", 80},
                  {"wrong", 3}};
    perf_t p = asked(true);
    const perf_row_t r = row(false);
    make(&p);
    assert_int_equal(perf_bridge_row(&p, &r), TOOL_OK);
    assert_string_equal(json_string_value(json_object_get(p.doc, "command")),
                        "colo-perf bridge --layouts 'a->b'");
    assert_int_equal(json_integer_value(json_object_get(p.doc, "gpus")), 4);
    const json_t *o = json_array_get(json_object_get(p.doc, "bridge"), 0);
    for (size_t i = 0; i < sizeof text / sizeof text[0]; i++)
        assert_string_equal(json_string_value(json_object_get(o, text[i][0])), text[i][1]);
    for (size_t i = 0; i < sizeof number / sizeof number[0]; i++)
        assert_true(json_number_value(json_object_get(o, number[i].key)) == number[i].value);
    assert_true(json_is_false(json_object_get(o, "replayed")));
    assert_true(json_is_false(json_object_get(o, "view")));
    assert_int_equal(json_object_size(o), 8 + 13 + 2); /* and no other */
    assert_int_equal(p.wrong, 3);
    json_decref(p.doc);
}

/* What perf_bridge_row() prints. */
static void printed(char *line, size_t cap, bool view)
{
    perf_t p = asked(false);
    const perf_row_t r = row(view);
    FILE *file = tmpfile();
    assert_non_null(file);
    make(&p);
    fflush(stdout);
    int keep = dup(STDOUT_FILENO);
    dup2(fileno(file), STDOUT_FILENO);
    const int rc = perf_bridge_row(&p, &r);
    fflush(stdout);
    dup2(keep, STDOUT_FILENO);
    close(keep);
    rewind(file);
    line[fread(line, 1, cap - 1, file)] = '\0';
    fclose(file);
    json_decref(p.doc);
    assert_int_equal(rc, TOOL_OK);
}

T_CASE(columns_are_those_of_nccl_tests)
{
    char line[400], type[8], way[16], op[24];
    long long size, count, seq, wrong;
    double us, alg, bus, percent;
    for (int view = 0; view < 2; view++) {
        printed(line, sizeof line, view);
        assert_int_equal(sscanf(line, "%lld %lld %7s %lld %15s %23s %lf %lf %lf %lf %lld", &size,
                                &count, type, &seq, way, op, &us, &alg, &bus, &percent, &wrong),
                         11);
        assert_int_equal(size, 512000000);
        assert_int_equal(count, 256000000);
        assert_string_equal(type, "bf16");
        assert_int_equal(seq, 8192);
        assert_string_equal(op, view ? "exact-nccl(v)" : "exact-nccl");
        assert_true(us == 500 && alg == 1024 && bus == 256 && percent == (view ? 0 : 80));
        assert_int_equal(wrong, 3);
    }
}

T_MAIN("tools/perf_rows")
