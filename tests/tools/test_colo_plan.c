/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_colo_plan.c - colo-plan from outside: the worked examples of the bridge's rules as whole
 * JSON documents and whole tables, written down by hand from the rules (docs/plan.md); the tables
 * are golden/plan-*.txt.
 */
#include "harness/harness.h"

#include "markup.h"
#include "tool.h"

#include <jansson.h>
#include <sys/resource.h>

/* ---- worked examples ---- */

typedef struct move {
    int from, to;
    const char *boxes; /* JSON */
} move_t;

typedef struct example {
    const char *args[24];
    int world;
    const char *direction, *output;
    int scale; /* 0: null */
    const char *src_dims[4], *dst_dims[4];
    int src[8][3], dst[8][3]; /* coordinates in the order of the dims */
    int row_bytes;            /* of one row of one sample: bytes = rows of the boxes x this */
    const move_t *forward, *backward; /* by receiver, then sender; from == to ends the list */
    int totals[2][5];                 /* recv max, recv total, send max, local max, collective (-1) */
} example_t;

#define END        \
    {              \
        0, 0, NULL \
    }
#define SIZES(b, s, h) "--batch", b, "--seq", s, "--hidden", h, "--dtype", "f32", "--json"

/* A: TP2/DP4 -> TP2/DP2/CP2, 8 samples, 8 rows, 16 bytes a row: V = 1024. cp 0 owns rows 0-1 and
 * 6-7, cp 1 owns rows 2-5. Pairs 0-2, 1-3, 4-6, 5-7, V/8 each way. */
#define OUTER(lo, hi) "[{\"b\":[" #lo "," #hi "],\"s\":[0,2]},{\"b\":[" #lo "," #hi "],\"s\":[6,8]}]"
#define INNER(lo, hi) "[{\"b\":[" #lo "," #hi "],\"s\":[2,6]}]"
#define ALL8(lo, hi) "[{\"b\":[" #lo "," #hi "],\"s\":[0,8]}]"
static const move_t a_forward[] = {
    {2, 0, OUTER(2, 4)}, {3, 1, OUTER(2, 4)}, {0, 2, INNER(0, 2)}, {1, 3, INNER(0, 2)},
    {6, 4, OUTER(6, 8)}, {7, 5, OUTER(6, 8)}, {4, 6, INNER(4, 6)}, {5, 7, INNER(4, 6)}, END};
static const move_t a_forward_full[] = {
    {2, 0, ALL8(2, 4)}, {3, 1, ALL8(2, 4)}, {0, 2, ALL8(0, 2)}, {1, 3, ALL8(0, 2)},
    {6, 4, ALL8(6, 8)}, {7, 5, ALL8(6, 8)}, {4, 6, ALL8(4, 6)}, {5, 7, ALL8(4, 6)}, END};
static const move_t a_backward[] = {
    {2, 0, INNER(0, 2)}, {3, 1, INNER(0, 2)}, {0, 2, OUTER(2, 4)}, {1, 3, OUTER(2, 4)},
    {6, 4, INNER(4, 6)}, {7, 5, INNER(4, 6)}, {4, 6, OUTER(6, 8)}, {5, 7, OUTER(6, 8)}, END};

/* B: TP4/DP2 -> TP1/DP4/CP2, the same tensor. Forward nothing; backward every rank of 0-3 (and of
 * 4-7) owns another quarter of what all four need. */
static const move_t none[] = {END};
static const move_t b_backward[] = {
    {1, 0, INNER(0, 2)}, {2, 0, OUTER(2, 4)}, {3, 0, INNER(2, 4)},
    {0, 1, OUTER(0, 2)}, {2, 1, OUTER(2, 4)}, {3, 1, INNER(2, 4)},
    {0, 2, OUTER(0, 2)}, {1, 2, INNER(0, 2)}, {3, 2, INNER(2, 4)},
    {0, 3, OUTER(0, 2)}, {1, 3, INNER(0, 2)}, {2, 3, OUTER(2, 4)},
    {5, 4, INNER(4, 6)}, {6, 4, OUTER(6, 8)}, {7, 4, INNER(6, 8)},
    {4, 5, OUTER(4, 6)}, {6, 5, OUTER(6, 8)}, {7, 5, INNER(6, 8)},
    {4, 6, OUTER(4, 6)}, {5, 6, INNER(4, 6)}, {7, 6, INNER(6, 8)},
    {4, 7, OUTER(4, 6)}, {5, 7, INNER(4, 6)}, {6, 7, OUTER(6, 8)}, END};

/* C: TP2/DP3 -> TP3/DP2, 6 samples. Source dp owns 2 samples each, destination dp 3 each.
 * Sample 2 is held by ranks 2, 3 and lacked by 0, 1 (2 divides 2: by ordinal 0, 1); sample 3 is held
 * by 2, 3 and lacked by 4, 5 (ordinals 1, 2 of the replicas 3, 4, 5). Samples 0-1 are held by 0, 1
 * and lacked by 2 alone, samples 4-5 by 4, 5 and lacked by 3 alone: one destination, two candidates, below
 * 64 KiB: the candidate of the piece's ordinal, which is 0. Backward sample 3 is lacked by 2 and held
 * by 3, 4, 5: the first piece of samples 3-5, so candidate 0 of 3. Sample 2 is lacked by 3 and held by
 * 0, 1, 2: the second piece of samples 0-2, so candidate 1 of 3. */
static const move_t c_forward[] = {
    {2, 0, ALL8(2, 3)}, {3, 1, ALL8(2, 3)}, {0, 2, ALL8(0, 2)},
    {4, 3, ALL8(4, 6)}, {3, 4, ALL8(3, 4)}, {2, 5, ALL8(3, 4)}, END};
static const move_t c_backward[] = {{3, 2, ALL8(3, 4)}, {1, 3, ALL8(2, 3)}, END};

/* The same with 9 rows of 16 KiB: pieces of 144 KiB and more are cut evenly where ordinals tie. */
#define ROWS(b0, b1, s0, s1) "[{\"b\":[" #b0 "," #b1 "],\"s\":[" #s0 "," #s1 "]}]"
static const move_t c_forward_large[] = {
    {2, 0, ROWS(2, 3, 0, 9)}, {3, 1, ROWS(2, 3, 0, 9)},
    {0, 2, ROWS(0, 1, 0, 9)}, {1, 2, ROWS(1, 2, 0, 9)},
    {4, 3, ROWS(4, 5, 0, 9)}, {5, 3, ROWS(5, 6, 0, 9)},
    {3, 4, ROWS(3, 4, 0, 9)}, {2, 5, ROWS(3, 4, 0, 9)}, END};
static const move_t c_backward_large[] = {
    {3, 2, ROWS(3, 4, 0, 3)}, {4, 2, ROWS(3, 4, 3, 6)}, {5, 2, ROWS(3, 4, 6, 9)},
    {0, 3, ROWS(2, 3, 0, 3)}, {1, 3, ROWS(2, 3, 3, 6)}, {2, 3, ROWS(2, 3, 6, 9)}, END};

#define A_COORDS                                                                              \
    .src_dims = {"tp", "dp"}, .dst_dims = {"tp", "cp", "dp"},                                 \
    .src = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}, {0, 3}, {1, 3}},                  \
    .dst = {{0, 0, 0}, {1, 0, 0}, {0, 1, 0}, {1, 1, 0}, {0, 0, 1}, {1, 0, 1}, {0, 1, 1}, {1, 1, 1}}
#define C_COORDS                                                                              \
    .src_dims = {"tp", "dp"}, .dst_dims = {"tp", "dp"},                                       \
    .src = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}},                                  \
    .dst = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}, {2, 1}}

static const example_t examples[] = {
    {.args = {"--src", "tp=2,dp=4", "--dst", "tp=2,cp=2,dp=2", SIZES("8", "8", "4"), "--output",
              "sharded"},
     .world = 8, .direction = "fan_in", .scale = 2, .output = "sharded", A_COORDS,
     .row_bytes = 16, .forward = a_forward, .backward = a_backward,
     .totals = {{128, 1024, 128, 128, 256}, {128, 1024, 128, 128, 512}}},
    {.args = {"--src", "tp=2,dp=4", "--dst", "tp=2,cp=2,dp=2", SIZES("8", "8", "4"), "--grad",
              "disjoint"},
     .world = 8, .direction = "fan_in", .scale = 2, .output = "full", A_COORDS,
     .row_bytes = 16, .forward = a_forward_full, .backward = a_backward,
     .totals = {{256, 2048, 256, 256, 256}, {128, 1024, 128, 128, 512}}},
    {.args = {"--src", "tp=4,dp=2", "--dst", "tp=1,cp=2,dp=4", SIZES("8", "8", "4"),
              "--output=sharded"},
     .world = 8, .direction = "fan_out", .scale = 2, .output = "sharded",
     .src_dims = {"tp", "dp"}, .dst_dims = {"tp", "cp", "dp"},
     .src = {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {0, 1}, {1, 1}, {2, 1}, {3, 1}},
     .dst = {{0, 0, 0}, {0, 1, 0}, {0, 0, 1}, {0, 1, 1}, {0, 0, 2}, {0, 1, 2}, {0, 0, 3}, {0, 1, 3}},
     .row_bytes = 16, .forward = none, .backward = b_backward,
     .totals = {{0, 0, 0, 128, 0}, {384, 3072, 384, 128, 512}}},
    {.args = {"--src", "tp=2,dp=3", "--dst", "tp=3,dp=2", SIZES("6", "8", "4")},
     .world = 6, .direction = "fan_in", .scale = 0, .output = "full", C_COORDS,
     .row_bytes = 16, .forward = c_forward, .backward = c_backward,
     .totals = {{256, 1024, 256, 256, -1}, {128, 256, 128, 256, -1}}},
    {.args = {"--src", "tp2-dp3", "--dst", "tp3-dp2", SIZES("6", "9", "4096")},
     .world = 6, .direction = "fan_in", .scale = 0, .output = "full", C_COORDS,
     .row_bytes = 16384, .forward = c_forward_large, .backward = c_backward_large,
     .totals = {{294912, 1179648, 294912, 294912, -1}, {147456, 294912, 49152, 294912, -1}}},
};

static json_t *coords(const char *const *dims, const int *c)
{
    json_t *o = json_object();
    for (int i = 0; i < 4 && dims[i]; i++)
        json_object_set_new(o, dims[i], json_integer(c[i]));
    return o;
}

static json_t *messages(const example_t *e, const move_t *moves, int rank, bool recv)
{
    json_t *list = json_array();
    for (int peer = 0; peer < e->world; peer++)
        for (const move_t *m = moves; m->from != m->to; m++) {
            if (m->to != (recv ? rank : peer) || m->from != (recv ? peer : rank))
                continue;
            json_t *boxes = json_loads(m->boxes, 0, NULL), *box;
            size_t i;
            int rows = 0, b0, b1, s0, s1;
            json_array_foreach(boxes, i, box) {
                assert_int_equal(json_unpack(box, "{s:[ii],s:[ii]}", "b", &b0, &b1, "s", &s0, &s1), 0);
                rows += (b1 - b0) * (s1 - s0);
            }
            json_array_append_new(list, json_pack("{s:i,s:i,s:o}", "peer", peer, "bytes",
                                                  rows * e->row_bytes, "boxes", boxes));
        }
    return list;
}

static json_t *expected(const example_t *e)
{
    static const char *const key[] = {"recv_bytes_max", "recv_bytes_total", "send_bytes_max",
                                      "local_bytes_max", "collective_recv_bytes_max"};
    json_t *ranks = json_array();
    for (int r = 0; r < e->world; r++)
        json_array_append_new(
            ranks, json_pack("{s:i,s:o,s:o,s:{s:o,s:o},s:{s:o,s:o}}", "rank", r, "src",
                             coords(e->src_dims, e->src[r]), "dst", coords(e->dst_dims, e->dst[r]),
                             "forward", "recv", messages(e, e->forward, r, true), "send",
                             messages(e, e->forward, r, false), "backward", "recv",
                             messages(e, e->backward, r, true), "send",
                             messages(e, e->backward, r, false)));
    json_t *doc = json_pack("{s:i,s:s,s:o,s:s,s:o}", "world", e->world, "direction", e->direction,
                            "scale", e->scale ? json_integer(e->scale) : json_null(), "output",
                            e->output, "ranks", ranks);
    for (int w = 0; w < 2; w++) {
        json_t *t = json_object();
        for (int i = 0; i < 5; i++)
            json_object_set_new(t, key[i], e->totals[w][i] < 0 ? json_null()
                                                               : json_integer(e->totals[w][i]));
        json_object_set_new(doc, w ? "backward" : "forward", t);
    }
    return doc;
}

T_CASE(the_worked_examples_are_planned_as_written_down)
{
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        tool_output_t s = tool_run(examples[i].args);
        assert_int_equal(s.exit, 0);
        assert_string_equal(s.err, "");
        json_auto_t *found = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL),
                    *want = expected(&examples[i]);
        assert_non_null(found);
        if (!json_equal(found, want)) {
            char *a = json_dumps(want, JSON_COMPACT | JSON_SORT_KEYS);
            char *b = json_dumps(found, JSON_COMPACT | JSON_SORT_KEYS);
            size_t index = 0;
            while (a[index] && a[index] == b[index])
                index++;
            index = index > 60 ? index - 60 : 0;
            fail_msg("example %zu: expected ...%.160s\nfound ...%.160s", i, a + index, b + index);
        }
    }
}

/* ---- text ---- */

static void assert_prints(const char *const *args, const char *text)
{
    tool_output_t s = tool_run(args);
    assert_string_equal(s.err, "");
    assert_string_equal(s.out, text);
    assert_int_equal(s.exit, 0);
}

/* As a page of golden/. */
static void assert_reads(const char *const *args, const char *name)
{
    const char *path = t_text("%s/%s", GOLDEN, name);
    const char *page = markup_read(path);
    assert_non_null(page);
    assert_prints(args, page);
}

/* In the last, single columns are as wide as their titles; a rank outside a grid has no coordinate.
 * Ranks 0 and 1 hold what 2 lacks: candidate (2 mod 2); 1 and 2 hold what 0 lacks: candidate (0 mod
 * 2). */
T_CASE(the_table_reads_as_written_down)
{
    const char *const *a = words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 16 --seq 8192 "
                                 "--hidden 4096 --dtype bf16 --axes sbh --output sharded");
    const char *const *b = words("--src tp=4,dp=2 --dst tp=1,cp=2,dp=4 --batch 8 --seq 8 --hidden "
                                 "4 --dtype f32 --grad disjoint");
    assert_reads(a, "plan-fan-in.txt");
    assert_reads(b, "plan-fan-out.txt");
    assert_reads(words("--src d=2 --dst e=2@1 --batch 1 --seq 1 --hidden 1 --extra e-d"),
                 "plan-narrow.txt");
}

/* In the first line, whatever else is printed. */
T_CASE(grids_of_different_size_are_warned_of)
{
    static const char warning[] = "warning: --src has 8 ranks, --dst 16: ";
    for (int one = 0; one < 2; one++) {
        const char *const *args =
            words(one ? "--src tp=2,dp=4 --dst tp=4,dp=4 --batch 8 --seq 8 --hidden 4 --rank 3"
                      : "--src tp=2,dp=4 --dst tp=4,dp=4 --batch 8 --seq 8 --hidden 4");
        tool_output_t s = tool_run(args);
        assert_int_equal(s.exit, 0);
        assert_string_equal(s.err, "");
        if (strncmp(s.out, warning, strlen(warning)) != 0)
            fail_msg("it begins \"%.80s\"", s.out);
    }
}

T_CASE(one_rank_is_shown_with_its_boxes)
{
    assert_reads(
        words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 8 --seq 8 --hidden 4 --dtype f32 "
              "--output sharded --axes sbh --rank 0"),
        "plan-one-rank.txt");
}

T_CASE(one_rank_as_json_keeps_the_totals_of_all)
{
    const char *const *all = words(
        "--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 8 --seq 8 --hidden 4 --dtype f32 --json");
    tool_output_t sa = tool_run(all),
                  so = tool_run(
                      words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 8 --seq 8 --hidden 4 "
                            "--dtype f32 --json --rank 5"));
    json_auto_t *a = json_loads(sa.out, 0, NULL), *o = json_loads(so.out, 0, NULL);
    json_t *ranks = json_object_get(o, "ranks");
    assert_int_equal(json_array_size(ranks), 1);
    assert_true(json_equal(json_array_get(ranks, 0),
                           json_array_get(json_object_get(a, "ranks"), 5)));
    json_object_del(a, "ranks");
    json_object_del(o, "ranks");
    assert_true(json_equal(a, o));
}

/* The adjoint of a full-length output: every source rank gets its rows from all C siblings. */
static void check_partial(const char *const *args)
{
    tool_output_t s = tool_run(args);
    json_auto_t *doc = json_loads(s.out, 0, NULL);
    assert_non_null(doc);
    for (int r = 0; r < 2; r++) { /* V = 128: rank r lacks the sibling's addend of its 2 samples */
        json_auto_t *want = json_pack("[{s:i,s:i,s:[{s:[ii],s:[ii]}]}]", "peer", 1 - r, "bytes", 64,
                                 "boxes", "b", 2 * r, 2 * r + 2, "s", 0, 8);
        json_t *rank = json_array_get(json_object_get(doc, "ranks"), (size_t)r);
        assert_true(json_equal(json_object_get(json_object_get(rank, "backward"), "recv"), want));
    }
}

T_CASE(partial_gradients_come_from_every_context_rank)
{
#define ONE_PAIR \
    "--src tp=1,dp=2 --dst tp=1,cp=2,dp=1 --batch 4 --seq 8 --hidden 1 --dtype f32 --json"
    check_partial(words(ONE_PAIR " --grad=partial"));
    check_partial(words(ONE_PAIR)); /* the library's default is the tool's */
}

T_CASE(sizes_that_are_not_given_are_assumed_and_named)
{
    static const char output[] = "colo-plan assumed --batch 16, --seq 8192, --hidden 4096, ";
    const char *const *all = words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2");
    const char *const *one = words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --seq 8 --hidden=4");
    const char *const *full = words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 16 --seq 8192 "
                                    "--hidden 4096 --dtype f32 --json");
    const char *const *json = words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --dtype=f32 --json");
    tool_output_t a = tool_run(all), o = tool_run(one), n = tool_run(full), j = tool_run(json),
                  c = tool_run(words("--src tp=2,dp=4 --compare tp=2,cp=2,dp=2"));
    assert_int_equal(a.exit + o.exit + n.exit + j.exit + c.exit, 0);
    json_auto_t *given = json_loads(n.out, 0, NULL), *assumed = json_loads(j.out, 0, NULL);
    const char *line = strstr(a.out, output);
    assert_true(line && strchr(strchr(a.out, '\n') + 1, '\n') + 1 == line); /* the third */
    assert_non_null(strstr(o.out, "\ncolo-plan assumed --batch 16, because "));
    assert_non_null(strstr(c.out, output));
    assert_null(json_object_get(given, "assumed"));
    assert_int_equal(
        strncmp(json_string_value(json_object_get(assumed, "assumed")), output, strlen(output)), 0);
    json_object_del(assumed, "assumed");
    assert_true(json_equal(given, assumed));
}

/* One row of one sample and three candidates: only the features are left to cut. 3 does not divide
 * them, so candidates 0 and 1 send one more; the piece is the first of its held block. */
T_CASE(a_box_names_features_only_where_they_are_cut)
{
    const char *const *args = words(
        "--src tp=2,dp=3 --dst tp=3,dp=2 --batch 6 --seq 1 --hidden 32768 --dtype f32 --json");
    static const int h[] = {0, 10923, 21846, 32768};
    tool_output_t s = tool_run(args);
    json_auto_t *doc = json_loads(s.out, 0, NULL), *want = json_array();
    assert_non_null(doc);
    for (int i = 0; i < 3; i++)
        json_array_append_new(want, json_pack("{s:i,s:i,s:[{s:[ii],s:[ii],s:[ii]}]}", "peer", 3 + i,
                                              "bytes", 4 * (h[i + 1] - h[i]), "boxes", "b", 3, 4, "s",
                                              0, 1, "h", h[i], h[i + 1]));
    json_t *rank = json_array_get(json_object_get(doc, "ranks"), 2);
    assert_true(json_equal(json_object_get(json_object_get(rank, "backward"), "recv"), want));
    json_t *whole = json_object_get(json_object_get(rank, "forward"), "recv");
    json_t *box = json_array_get(json_object_get(json_array_get(whole, 0), "boxes"), 0);
    assert_non_null(json_object_get(box, "b"));
    assert_null(json_object_get(box, "h"));
}

T_CASE(help_shows_an_example_and_version_a_number)
{
    tool_output_t s = tool_run(words("--help"));
    assert_int_equal(s.exit, 0);
    assert_string_equal(s.err, "");
    assert_non_null(strstr(s.out, "colo-plan --src tp=2,dp=4 --dst tp=2,cp=2,dp=2"));
    assert_prints(words("--version"), "colo-plan 0.1.0\n");
}

#define SMALL words("--src dp=2 --dst tp=2 --batch 2 --seq 2 --hidden 1")

T_CASE(output_that_is_no_terminal_has_no_colour)
{
    tool_output_t s = tool_run(SMALL);
    assert_non_null(strstr(s.out, "What this means"));
    assert_null(strchr(s.out, '\033'));
}

T_CASE(output_on_a_terminal_has_colour_unless_no_color_is_set)
{
    tool_output_t tty = tool_run_tty(SMALL, false);
    if (!tty.out)
        skip(); /* no pseudo-terminals here */
    tool_output_t plain = tool_run_tty(SMALL, true);
    assert_non_null(strchr(tty.out, '\033'));
    assert_non_null(strstr(plain.out, "What this means"));
    assert_null(strchr(plain.out, '\033'));
}

T_CASE(a_system_without_terminals_is_no_crash_of_the_test)
{
    struct rlimit few, before;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = (struct rlimit){3, before.rlim_max};
    fflush(NULL);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    tool_output_t s = tool_run_tty(SMALL, false);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_null(s.out);
    assert_int_equal(s.exit, -1);
}

T_TOOL_MAIN("COLO_PLAN", "tools/colo_plan")
