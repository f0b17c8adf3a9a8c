/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_segments.c - colo-plan --segments and --packing: the worked examples of docs/ragged.md
 * and docs/packed.md as whole JSON documents, whole tables (both in golden/) and pictures, written
 * down by hand from these pages; and every file that is no such table.
 */
#include "harness/harness.h"

#include "markup.h"
#include "tool.h"

#include <jansson.h>
#include <unistd.h>

/* P = 2, D = 1, C = 2, zigzag: docs/ragged.md. Rank 0 owns e0 row 0 and e2 row 0. */
#define WORKED                                                          \
    "{\"rows\": [3, 0, 5], \"src_dp\": [0, 1, 1], \"seq\": [0, 0, 1], " \
    "\"pos\": [2, 9, 1], \"seq_len\": [12, 8], \"seq_dp\": [0, 0]}"
#define GRIDS "--src dp=2 --dst cp=2,dp=1 --hidden 4 --dtype f32"

static const char file[] = "batch.json", picture[] = "batch.svg";

/* Only packings say how they are split. */
static const char *kind_of(const char *text)
{
    return strstr(text, "split") ? "--packing" : "--segments";
}

/* What colo-plan gives with @args, the batch @text and --json, or a picture. */
static tool_output_t run_on(const char *text, const char *const *args, const char *svg)
{
    const char *all[40] = {kind_of(text), file, svg ? "--svg" : "--json", svg};
    int n = svg ? 4 : 3;
    tool_write(file, text);
    while ((all[n++] = *args++))
        ;
    tool_output_t s = tool_run(all);
    assert_string_equal(s.err, "");
    assert_int_equal(s.exit, 0);
    return s;
}

static json_t *planned(const char *text, const char *const *args)
{
    json_t *doc = json_loads(run_on(text, args, NULL).out, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(doc);
    return doc;
}

static void assert_equal(const json_t *found, json_t *want)
{
    assert_non_null(want);
    char *a = json_dumps(want, JSON_COMPACT | JSON_SORT_KEYS);
    char *b = json_dumps(found, JSON_COMPACT | JSON_SORT_KEYS);
    assert_string_equal(b, a);
    free(a);
    free(b);
    json_decref(want);
}

static void assert_json(const json_t *found, const char *expected)
{
    char *text = strdup(expected);
    for (char *c = text; *c; c++)
        *c = *c == '\'' ? '"' : *c;
    assert_equal(found, json_loads(text, 0, NULL));
    free(text);
}

static void assert_page(const json_t *found, const char *name)
{
    assert_equal(found, json_load_file(t_text("%s/%s", GOLDEN, name), 0, NULL));
}

/* 16 bytes a row. To rank 0: e2 row 0 from rank 1. To rank 1: e0 rows 1 and 2 from rank 0. */
T_CASE(the_worked_example_is_planned_as_written_down)
{
    json_auto_t *doc = planned(WORKED, words(GRIDS " --output sharded"));
    assert_page(doc, "plan-segments.json");
}

T_CASE(positions_of_each_row_give_the_same_plan)
{
    json_auto_t *doc =
        planned("{\"rows\": [3, 0, 5], \"src_dp\": [0, 1, 1], \"seq\": [0, 0, 1], \"row_pos\": "
                "[2, 3, 4, 1, 2, 3, 4, 5], \"seq_len\": [12, 8], \"seq_dp\": [0, 0]}",
                words(GRIDS " --output sharded"));
    assert_page(doc, "plan-segments.json");
}

/* A message with rows of two segments and a hole: replica 0 has e1, then e2; rank 1 owns, of its
 * chunks 1 and 2 (positions 2..5), e1's row 1 and e2's row 0. */
T_CASE(a_message_names_its_rows_by_segment)
{
    json_auto_t *doc =
        planned("{\"rows\": [2, 2, 3], \"src_dp\": [1, 0, 0], \"seq\": [0, 1, 1], \"pos\": "
                "[0, 1, 5], \"seq_len\": [8, 8], \"seq_dp\": [0, 0]}",
                words(GRIDS " --output sharded --rank 1"));
    json_t *rank = json_array_get(json_object_get(doc, "ranks"), 0);
    assert_json(json_object_get(json_object_get(rank, "forward"), "recv"),
                "[{'peer': 0, 'bytes': 32, 'segments': [{'segment': 1, 'rows': [1, 2]},"
                " {'segment': 2, 'rows': [0, 1]}]}]");
}

T_CASE(no_segments_at_all_are_a_plan_without_messages)
{
    json_auto_t *doc = planned("{\"rows\": [], \"src_dp\": [], \"seq\": [], \"pos\": [], "
                          "\"seq_len\": [], \"seq_dp\": []}",
                          words(GRIDS));
    json_t *forward = json_object_get(doc, "forward");
    assert_int_equal(json_integer_value(json_object_get(forward, "messages_total")), 0);
}

T_CASE(the_worked_example_reads_as_written_down)
{
    tool_write(file, WORKED);
    tool_output_t a = tool_run(words(GRIDS " --output sharded --segments %s", file)),
                  o = tool_run(words(GRIDS " --output sharded --segments %s --rank 0", file));
    assert_string_equal(a.err, "");
    assert_string_equal(a.out, markup_read(GOLDEN "/plan-segments.txt"));
    assert_non_null(strstr(o.out, "src: dp 0, 3 rows\ndst: cp 0 dp 0, 2 rows\n"));
    assert_non_null(strstr(o.out, "forward: the rank keeps 16 B of its own\n"
                                  "  receives 16 B from rank 1: segment 2 rows 0..0\n"
                                  "  sends 32 B to rank 1: segment 0 rows 1..2\n"));
}

/* Loads 9, 1, 2 of 12 rows: the mean is 4. Balanced 5, 4, 3. */
T_CASE(balance_lowers_the_load_of_the_busiest_replica)
{
    json_auto_t *doc =
        planned("{\"rows\": [5, 4, 1, 2], \"src_dp\": [0, 0, 1, 2], \"seq\": [0, 0, 0, 0], "
                "\"pos\": [0, 5, 9, 10], \"seq_len\": [12], \"seq_dp\": [2]}",
                words("--src dp=3 --dst dp=3 --hidden 1"));
    json_t *batch = json_object_get(doc, "batch");
    assert_json(json_object_get(batch, "load"), "{'src_dp': [0, 0, 1, 2], 'rows': [9, 1, 2],"
                                                " 'rows_max': 9, 'max_over_mean': 2.25}");
    assert_json(json_object_get(batch, "balanced"), "{'src_dp': [0, 1, 2, 2], 'rows': [5, 4, 3],"
                                                    " 'rows_max': 5, 'max_over_mean': 1.25}");
}

/* ---- pictures ---- */

static const char *drawn(const char *text, const char *const *args)
{
    run_on(text, args, picture);
    const char *svg = markup_read(picture);
    assert_non_null(svg);
    const char *wrong = markup_check(svg);
    if (wrong)
        fail_msg("%s", wrong);
    return svg;
}

static void assert_in_order(const char *svg, const char *const *texts)
{
    for (; *texts; texts++) {
        const char *found = strstr(svg, *texts);
        if (!found)
            fail_msg("the picture lacks \"%s\"", *texts);
        svg = found + strlen(*texts);
    }
}

T_CASE(a_picture_shows_the_way_of_one_segment)
{
    static const char *const texts[] = {"replica 0: 3 rows; after colo_balance() 5",
                                        "replica 1: 5 rows; after colo_balance() 3",
                                        "sequence 0: 12 positions, on LLM replica 0",
                                        "sequence 1: 8 positions, on LLM replica 0",
                                        "Path of segment 2",
                                        "encoder replica 1: its 5 rows",
                                        "sequence 1: 8 positions",
                                        "rank 0: its axis of 10 positions",
                                        "rank 1: its axis of 10 positions",
                                        "row 0: position 1, chunk 0, rank 0, index 7",
                                        "rows 1..2: position 2, chunk 1, rank 1, index 6",
                                        "rows 3..4: position 4, chunk 2, rank 1, index 8",
                                        "Forward: activations",
                                        "Backward: gradients",
                                        NULL};
    const char *svg = drawn(WORKED, words(GRIDS " --output sharded --segment 2"));
    assert_in_order(svg, texts);
}

/* The chunks of one sequence over cp=4: 0, 1, 2, 3, 3, 2, 1, 0. Its 344 units are 16 positions; e0
 * begins at position 6. */
T_CASE(a_picture_names_the_owner_of_each_chunk)
{
    static const char *const texts[] = {">0</text>", ">1</text>", ">2</text>",
                                        ">3</text>", ">3</text>", ">2</text>",
                                        ">1</text>", ">0</text>", NULL};
    const char *svg = drawn("{\"rows\": [4], \"src_dp\": [1], \"seq\": [0], \"pos\": [6], "
                            "\"seq_len\": [16], \"seq_dp\": [0]}",
                            words("--src dp=4 --dst cp=4"));
    char *sequences = strstr(svg, "LLM: packed sequences");
    assert_non_null(sequences);
    const char *first = strstr(sequences, "class=\"owner\"");
    assert_in_order(first, texts);
    assert_non_null(strstr(sequences, "<rect class=\"seg h1\" x=\"129.0\""));
}

T_CASE(a_picture_of_a_full_output_ends_on_the_replicas_axis)
{
    static const char *const texts[] = {"each rank of LLM replica 0: its axis of 20 positions",
                                        "row 0: from position 1, index 13", NULL};
    const char *svg = drawn(WORKED, words(GRIDS " --segment 2"));
    assert_in_order(svg, texts);
}

/* Counting them one by one would take hours. */
T_CASE(a_picture_of_a_million_million_rows_is_drawn_at_once)
{
    static const char *const texts[] = {"Its 4000000000000 rows in 4 parts",
                                        "rows 0..999999999999: position 0, chunk 0, rank 0", NULL};
    const char *svg =
        drawn("{\"rows\": [4000000000000], \"src_dp\": [1], \"seq\": [0], \"pos\": [0], "
              "\"seq_len\": [4000000000000], \"seq_dp\": [0]}",
              words(GRIDS " --output sharded --segment 0"));
    assert_in_order(svg, texts);
}

/* ---- packings ---- */

/* docs/packed.md: rank 0 sends q0 6 7 and q1 3, and gets q0 2 3 and q1 1. 16 bytes a row. */
#define PACKED \
    "{\"seq_len\": [8, 4], \"src\": {\"split\": \"zigzag\"}, \"dst\": {\"split\": \"block\"}}"
#define CP2 "--src cp=2 --dst cp=2 --hidden 4 --dtype f32"

T_CASE(a_packed_batch_is_planned_as_written_down)
{
    json_auto_t *doc = planned(PACKED, words(CP2));
    assert_page(doc, "plan-packing.json");
}

T_CASE(a_packed_batch_reads_as_written_down)
{
    tool_write(file, PACKED);
    tool_output_t a = tool_run(words(CP2 " --packing %s", file)),
                  o = tool_run(words(CP2 " --packing %s --rank 0", file));
    assert_string_equal(a.err, "");
    assert_non_null(strstr(a.out, "cp=2 -> cp=2\n2 sequences of 12 positions, zigzag to block, 4 "
                                  "features, f32: 192 B\ngradients: each rank returns those of the "
                                  "rows and features that it has\n"));
    assert_non_null(strstr(a.out, "   0      0      0      6    6        48 B  1      48 B  1   "));
    assert_null(strstr(a.out, "colo_balance"));
    assert_non_null(strstr(o.out, "src: cp 0, 6 rows\ndst: cp 0, 6 rows\n"));
    assert_non_null(strstr(o.out,
                           "  receives 48 B from rank 1: sequence 0 positions 2..3, sequence "
                           "1 positions 1..1\n"));
}

/* Heads: rank 1 lacks features 2 and 3 of rank 0's rows. Whole: gradients come from both ranks. */
T_CASE(a_side_may_have_all_rows_of_its_features_or_of_all)
{
    json_auto_t *doc = planned("{\"seq_len\": [4], \"src\": {\"split\": \"block\"}, \"dst\": "
                          "{\"split\": \"heads\"}}",
                          words(CP2 " --rank 1"));
    json_t *rank = json_array_get(json_object_get(doc, "ranks"), 0);
    assert_json(json_object_get(json_object_get(rank, "forward"), "recv"),
                "[{'peer': 0, 'bytes': 16, 'sequences': [{'sequence': 0, 'positions': [0, 2], 'h': "
                "[2, 4]}]}]");
    tool_write(file, "{\"seq_len\": [4], \"src\": {\"split\": \"heads\"}, \"dst\": {\"split\": "
                     "\"block\"}}");
    tool_output_t a = tool_run(words(CP2 " --packing %s --rank 1", file));
    assert_non_null(strstr(a.out, "receives 16 B from rank 0: sequence 0 positions 2..3 features "
                                  "0..1\n"));
    tool_write(file, "{\"seq_len\": [4], \"src\": {\"split\": \"block\"}, \"dst\": {\"split\": "
                     "\"whole\"}}");
    a = tool_run(words(CP2 " --packing %s --rank 1", file));
    assert_non_null(strstr(a.out, "gradients partial: each context rank returns all rows"));
    assert_non_null(strstr(a.out, "backward: the rank keeps 32 B of its own\n  receives 32 B"));
}

/* Sequence 1 begins behind the rows of sequence 0 on either side; its 344 units are 8 positions. */
T_CASE(a_picture_shows_both_cuts_and_the_path_of_one_sequence)
{
    static const char *const texts[] = {"Both cuts of the packed sequences",
                                        "Above the source",
                                        "(zigzag), below",
                                        "(table)",
                                        "sequence 0: 4 positions",
                                        "sequence 1: 8 positions",
                                        "<rect class=\"seg h0\" x=\"0.0\"",
                                        "<rect class=\"seg h1\" x=\"86.0\"",
                                        "<rect class=\"seg h1\" x=\"172.0\"",
                                        "<rect class=\"seg h0\" x=\"258.0\"",
                                        "<rect class=\"seg h1\" x=\"0.0\"",
                                        "<rect class=\"seg h0\" x=\"215.0\"",
                                        "Path of sequence 1",
                                        "source rank 0: its 6 rows",
                                        "source rank 1: its 6 rows",
                                        "destination rank 1: its 5 rows",
                                        "destination rank 0: its 7 rows",
                                        "sequence 1: 8 positions",
                                        "positions 0..1: rank 0, row 2 \xe2\x86\x92 rank 1, row 0",
                                        "positions 2..3: rank 1, row 2 \xe2\x86\x92 rank 1, row 2",
                                        "positions 4..4: rank 1, row 4 \xe2\x86\x92 rank 1, row 4",
                                        "positions 5..5: rank 1, row 5 \xe2\x86\x92 rank 0, row 4",
                                        "positions 6..7: rank 0, row 4 \xe2\x86\x92 rank 0, row 5",
                                        "Forward: activations",
                                        NULL};
    const char *svg = drawn("{\"seq_len\": [4, 8], \"src\": {\"split\": \"zigzag\"}, \"dst\": "
                            "{\"split\": \"table\", \"piece_start\": [0, 1, 4], \"piece_len\": "
                            "[4, 5, 0, 3], \"piece_owner\": [0, 1, 0, 0]}}",
                            words(CP2 " --sequence 1"));
    assert_in_order(svg, texts);
}

T_CASE(a_picture_of_a_whole_side_and_other_replicas_names_their_ranks)
{
    static const char *const texts[] = {
        "sequence 0: 4000000000000 positions, replica 0 \xe2\x86\x92 1", "class=\"seg grey\"",
        ">2,3</text>",
        "positions 0..1999999999999: rank 0, row 0 \xe2\x86\x92 rank 2,3, "
        "row 0",
        NULL};
    char text[400], zeros[100] = "";
    for (int i = 0; i < 13; i++)
        strcat(zeros, ", 0");
    snprintf(text, sizeof text,
             "{\"seq_len\": [4000000000000%s], \"src\": {\"split\": \"block\"}, \"dst\": "
             "{\"split\": \"whole\", \"seq_dp\": [1%s]}}",
             zeros, zeros);
    const char *svg =
        drawn(text, words("--src cp=2,dp=2 --dst cp=2,dp=2 --hidden 1 --dtype u8 --sequence 0"));
    assert_in_order(svg, texts);
    assert_non_null(strstr(svg, "2 more sequences are not drawn."));
}

/* ---- refusals ---- */

#define SEGMENTS_OF(rows, pos) \
    "{\"rows\":" rows ",\"src_dp\":[0,1],\"seq\":[0,0]," pos ",\"seq_len\":[8],\"seq_dp\":[0]}"
#define POS "\"pos\":[0,4]"

T_CASE(a_file_that_is_no_batch_is_refused_with_key_and_index)
{
    static const struct {
        const char *file;
        int exit;
        const char *text;
    } cases[] = {
        {"", 2, "line 1, column 0: "},
        {"{\"rows\": [1,}", 2, "line 1, column 13: "},
        {SEGMENTS_OF("[1,2]", POS) "x", 2, "line 1, column "},
        {"[1]", 2, "found a list, expected an object with rows, src_dp"},
        {"{}", 2, "key rows is missing"},
        {"{\"rows\": [1], \"rows\": [1]}", 2, "duplicate object key"},
        {SEGMENTS_OF("[1,2]", POS ",\"colour\":[1]"), 2, "unknown key \"colour\", expected rows,"},
        {SEGMENTS_OF("3", POS), 2, "rows: found an integer, expected a list of integers"},
        {SEGMENTS_OF("[1,2.5]", POS), 2, "rows[1]: found a number with a fraction"},
        {SEGMENTS_OF("[\"1\",2]", POS), 2, "rows[0]: found a string, expected an integer"},
        {SEGMENTS_OF("[true,2]", POS), 2, "rows[0]: found a truth value"},
        {SEGMENTS_OF("[null,2]", POS), 2, "rows[0]: found null"},
        {SEGMENTS_OF("[1,9223372036854775808]", POS), 2, "too big integer"},
        {SEGMENTS_OF("[1,2,3]", POS), 2, "src_dp: found 2 entries, expected 3, as many as in rows"},
        {SEGMENTS_OF("[1,2]", "\"pos\":[1]"), 2, "pos: found 1 entries, expected 2"},
        {SEGMENTS_OF("[1,2]", POS ",\"row_pos\":[1,2,3]"), 2, "found both pos and row_pos"},
        {SEGMENTS_OF("[1,2]", "\"row_pos\":[1,2]"), 2,
         "row_pos: found 2 entries, expected 3, the sum of rows"},
        {SEGMENTS_OF("[-1,2]", POS), 2, "rows[0]: found -1, expected at least 0"},
        {SEGMENTS_OF("[1,2]", "\"pos\":[0,7]"), 2,
         "--segments: segments: segment 1: row 1 of 2 is at position 8"},
        {SEGMENTS_OF("[5,2]", POS), 2, "segments 0 and 1 both have a row at position 4"},
        {"{\"rows\":[1],\"src_dp\":[2],\"seq\":[0],\"pos\":[0],\"seq_len\":[8],\"seq_dp\":[0]}", 2,
         "segment 0: src_dp is 2, expected 0..1"},
        {"{\"rows\":[1],\"src_dp\":[0],\"seq\":[0],\"pos\":[0],\"seq_len\":[6],\"seq_dp\":[0]}", 1,
         "sequence 0 has 6 positions, expected a multiple of 2 * cp=2 = 4"},
    };
    const char *const *args = words(GRIDS " --segments %s", file);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tool_write(file, cases[i].file);
        tool_refuses("colo-plan", args, cases[i].exit, cases[i].text);
    }
}

#define SIDES(len, src, dst) "{\"seq_len\":" len ",\"src\":" src ",\"dst\":" dst "}"
#define BLOCK "{\"split\":\"block\"}"

T_CASE(a_file_that_is_no_packing_is_refused_with_side_and_key)
{
    static const struct {
        const char *file;
        int exit;
        const char *text;
    } cases[] = {
        {"[1]", 2, "found a list, expected an object with seq_len, src, dst"},
        {"{\"seq_len\": [8]}", 2, "key src is missing, expected seq_len, src, dst"},
        {SIDES("[8]", "3", BLOCK), 2,
         "src: found an integer, expected an object with split, seq_dp"},
        {SIDES("[8]", BLOCK, "{}"), 2,
         "dst.split: found no string, expected \"block\", \"zigzag\""},
        {SIDES("[8]", BLOCK, "{\"split\":\"blocks\"}"), 2, "dst.split: found \"blocks\", expected"},
        {SIDES("[8]", "{\"split\":\"block\",\"cp\":[2]}", BLOCK), 2, "src.unknown key \"cp\""},
        {SIDES("8", BLOCK, BLOCK), 2, "seq_len: found an integer, expected a list"},
        {SIDES("[8]", "{\"split\":\"block\",\"seq_cp\":[1.5]}", BLOCK), 2,
         "src.seq_cp[0]: found a number with a fraction"},
        {SIDES("[8]", "{\"split\":\"block\",\"seq_dp\":[0,0]}", BLOCK), 2,
         "src.seq_dp: found 2 entries, expected 1, as many as in seq_len"},
        {SIDES("[8]", BLOCK, "{\"split\":\"table\",\"piece_start\":[0]}"), 2,
         "dst.piece_start: found 1 entries, expected 2, one more than in seq_len"},
        {SIDES("[8]", BLOCK, "{\"split\":\"table\",\"piece_start\":[0,2],\"piece_len\":[8]}"), 2,
         "dst.piece_len: found 1 entries, expected 2, the last of piece_start"},
        {SIDES("[8]", BLOCK, "{\"split\":\"table\",\"piece_start\":[0,-1],\"piece_len\":[8]}"), 2,
         "dst.piece_len: found 1 entries, expected -1"},
        {SIDES("[7]", BLOCK, BLOCK), 1,
         "--packing: src packing: sequence 0 has 7 positions, expected a multiple of cp=2"},
        {SIDES("[8]", BLOCK, "{\"split\":\"zigzag\",\"seq_dp\":[1]}"), 2,
         "--packing: dst packing: sequence 0: seq_dp is 1, expected 0..0"},
        {SIDES("[8]", BLOCK, "{\"split\":\"table\"}"), 2,
         "--packing: dst packing: table piece_start is NULL"},
    };
    const char *const *args = words(CP2 " --packing %s", file);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tool_write(file, cases[i].file);
        tool_refuses("colo-plan", args, cases[i].exit, cases[i].text);
    }
    tool_write(file, SIDES("[8]", BLOCK, "{\"split\":\"heads\"}"));
    tool_refuses("colo-plan", words("--src dp=2 --dst dp=2 --packing %s", file), 2,
                 "--packing: dst.split: heads:");
    tool_refuses("colo-plan", words("--src tp=2,cp=2 --dst tp=2,cp=2 --sp dst --packing %s", file),
                 2, "--sp: ranks of tp share the rows of dst, whose split is heads");
}

T_CASE(options_that_do_not_go_with_segments_are_refused)
{
    static const struct {
        const char *line, *text; /* %s: the batch, then the picture */
    } cases[] = {
        {GRIDS " --segments /no/such/file", "--segments: \"/no/such/file\": No such file"},
        {GRIDS " --segments /tmp", "--segments: \"/tmp\": Is a directory"},
        {GRIDS " --segments %s --batch 4", "--batch: not with --segments"},
        {GRIDS " --segments %s --seq 4", "--seq: not with --segments"},
        {GRIDS " --segments %s --axes th", "--axes: not with --segments"},
        {GRIDS " --segments %s --offset 4", "--offset: not with --segments"},
        {GRIDS " --segments %s --segment 1", "--segment: only with --segments and --svg"},
        {GRIDS " --svg batch.svg --segment 1", "--segment: only with --segments and --svg"},
        {GRIDS " --segments %s --svg %s --segment 3", "\"3\" is outside 0..2"},
        {"--compare dp=2->dp=1 --segments %s", "--segments: not with --compare"},
        {"--compare dp=2->dp=1 --packing %s", "--packing: not with --compare"},
        {GRIDS " --packing %s --segments %s", "--segments: not with --packing"},
        {GRIDS " --packing %s --output full", "--output: not with --packing"},
        {GRIDS " --packing %s --grad partial", "--grad: not with --packing"},
        {GRIDS " --packing %s --seq 4", "--seq: not with --packing"},
        {GRIDS " --packing %s --svg %s --segment 0", "--segment: only with --segments and --svg"},
        {GRIDS " --segments %s --svg %s --sequence 0", "--sequence: only with --packing and --svg"},
    };
    tool_write(file, WORKED);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        tool_refuses("colo-plan", words(cases[i].line, file, picture), 2, cases[i].text);
}

int main(int argc, char **argv)
{
    if (!tool_path(argc, argv, "COLO_PLAN"))
        return T_EXIT_SKIP;
    return t_main_around("tools/plan_segments", tool_folder_enter, tool_folder_leave);
}
