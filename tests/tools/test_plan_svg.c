/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_svg.c - the pictures of colo-plan: well-formed, every message of the hand-worked
 * examples in them with its bytes, one part of a large world with how many there are, and a file
 * that is whole or not there. Expectations are closed forms of the bridge's rules (docs/plan.md).
 */
#include "harness/harness.h"

#include "markup.h"
#include "tool.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

static const char path[] = "plan.svg";
static const char *text; /* the picture */

static void has(const char *what, int times)
{
    int n = markup_count(text, what);
    if (n != times)
        fail_msg("\"%s\" is there %d times, expected %d", what, n, times);
}

/* Runs colo-plan with @args and --svg, and checks what holds for every picture. */
static tool_output_t draw_alone(const char *const *args)
{
    const char *all[40];
    int n = 0;
    for (; args[n]; n++)
        all[n] = args[n];
    all[n++] = "--svg";
    all[n++] = path;
    all[n] = NULL;
    tool_output_t s = tool_run(all);
    if (s.exit != 0)
        fail_msg("exit %d: %s", s.exit, s.err);
    assert_non_null(text = markup_read(path));
    const char *why = markup_check(text);
    if (why)
        fail_msg("%s", why);
    has("http", 1); /* the name space */
    has("prefers-color-scheme:dark", 1);
    has("<script", 0);
    assert_int_equal(tool_folder_files(), 1);
    return s;
}

static void draw(const char *const *args)
{
    tool_output_t without = tool_run(args), s = draw_alone(args);
    assert_string_equal(s.out, without.out); /* the picture comes on top */
}

static void has_message(int from, int to, int bytes, int times)
{
    has(t_text("<title>rank %d to rank %d: %d bytes</title>", from, to, bytes), times);
}

/* 2 samples x 2 rows x 1 float: each of the two ranks lacks the 8 bytes of the other */
T_CASE(two_ranks_are_two_rows)
{
    draw(words("--src dp=2 --dst tp=2 --batch 2 --seq 2 --hidden 1 --dtype f32"));
    has_message(0, 1, 8, 1);
    has_message(1, 0, 8, 1);
    has(" to rank ", 2);
    has("2 messages, 16 B in all; at most 8 B into a rank.", 1);
    has("No messages: every rank already has its part.", 1); /* backward */
    has("class=\"rank\"", 2 * 2 * 2);
    has("<title>dp=2 \xe2\x86\x92 tp=2</title>", 1);
}

/* TP2/DP4 -> TP2/DP2/CP2, V = 1 KiB: 0-2, 1-3, 4-6, 5-7 exchange V/8 each way, nothing else. */
T_CASE(eight_ranks_show_every_message_with_its_bytes)
{
    draw(words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 8 --seq 8 --hidden 4 "
               "--dtype f32 --output sharded"));
    for (int a = 0; a < 8; a++)
        has_message(a, a ^ 2, 128, 2);
    has(" to rank ", 16);
    has(" keeps 128 bytes", 16);
    has(">128 B<", 32);
    has(">rank 7<", 4);
    has(">tp 1  dp 3<", 2);
    has(">tp 1  cp 1<", 2 * 2);
    has("class=\"part\"", 2 * 3); /* four pairs */
    has("8 messages, 1 KiB in all; at most 128 B into a rank.", 2);
    has(">Forward: activations<", 1);
    has(">Backward: gradients<", 1);
    /* ring all-gather of 2: V/4 a rank; ring all-reduce over 2: V/2 a rank */
    has("An all-gather would move 2 KiB.", 1);
    has("An all-reduce would move 4 KiB.", 1);
}

/* Nodes of four: TP4/DP2 -> TP1/CP2/DP4 stays inside {0..3} and {4..7}. Nodes of two: of three
 * peers one is on the node. */
T_CASE(arrows_between_nodes_are_thick)
{
#define ON_NODES_OF                                                                           \
    "--src tp=4,dp=2 --dst tp=1,cp=2,dp=4 --batch 8 --seq 8 --hidden 4 --dtype f32 --output " \
    "sharded --one-level --ranks-per-node "
    draw(words(ON_NODES_OF "4"));
    has("<g class=\"flow h", 24);
    has("<g class=\"flow far h", 0);
    has(">4 ranks per node.<", 1);
    draw(words(ON_NODES_OF "2"));
    has("<g class=\"flow h", 8);
    has("<g class=\"flow far h", 16);
    draw(words("--src tp=2,dp=4 --dst tp=4,dp=2 --batch 8 --seq 8 --hidden 4 "
               "--ranks-per-node 2"));
    has(">2 ranks per node. What several ranks of a node lack<", 1);
    has(">enters it once; they pass it on.<", 1);
}

/* TP8/DP8 -> TP8/CP2/DP4, V = 8 KiB: r and r ^ 8 exchange V/16. All ranks are drawn. */
T_CASE(sixty_four_ranks_are_all_drawn)
{
    draw(words("--src tp=8,dp=8 --dst tp=8,cp=2,dp=4 --batch 64 --seq 8 --hidden 4 "
               "--dtype f32 --output sharded"));
    for (int a = 0; a < 64; a++)
        has_message(a, a ^ 8, 512, 2);
    has(" to rank ", 128);
    has("class=\"rank\"", 2 * 2 * 64);
    has("Shown: one of", 0);
}

/* The same with 128 ranks: 64 pairs, one is drawn. */
T_CASE(of_128_ranks_one_part_is_shown_and_counted)
{
    draw(words("--src tp=8,dp=16 --dst tp=8,cp=2,dp=8 --batch 64 --seq 8 --hidden 4 "
               "--dtype f32 --output sharded"));
    has("Shown: one of 64 parts", 1);
    has("it has 2 ranks.", 1);
    has("64 were looked at; they are alike.", 1);
    has_message(0, 8, 256, 2);
    has_message(8, 0, 256, 2);
    has(" to rank ", 4);
    draw(words(
        "--src tp=8,dp=16 --dst tp=8,cp=2,dp=8 --batch 64 --seq 8 --hidden 4 --dtype f32 --output "
        "sharded --rank 90")); /* --rank chooses the part: 90 = 64 + 26 and its partner 82 */
    has_message(82, 90, 256, 2);
    has("the 2 ranks that rank 90 exchanges with", 1);
}

/* DP128 -> TP128, 128 samples of 4 bytes: all exchange with all and play one role. */
T_CASE(ranks_of_one_role_are_one_row)
{
    draw(words("--src dp=128 --dst tp=128 --batch 128 --seq 1 --hidden 1 --dtype f32"));
    has("and 127 like it", 2 * 2);
    has(">127 \xc3\x97 4 B<", 1);
    has("16,256 messages, 63.5 KiB in all; at most 508 B", 1);
    has("class=\"rank\"", 2 * 2);
}

/* DP127 -> DP128: a chain in which every rank lacks another amount; 64 of 128 roles fit. */
T_CASE(what_is_not_drawn_is_said)
{
    draw(words("--src dp=127 --dst dp=128 --batch 16256 --seq 1 --hidden 1 --dtype f32"));
    has("64 of 128 ranks are drawn; ", 1);
    has("class=\"rank\"", 2 * 2 * 64);
    /* rank r of 128 wants [127 r, 127 r + 127); [127 r, 128 r) is of rank r - 1 */
    for (int r = 1; r < 64; r++)
        has_message(r - 1, r, 4 * r, 1);
}

/* TP8/DP131072 -> TP8/CP2/DP65536, V = 256 MiB: r and r ^ 8 exchange V/2^18. */
T_CASE(of_a_million_ranks_one_part_is_drawn)
{
    draw_alone(
        words("--src tp=8,dp=131072 --dst tp=8,cp=2,dp=65536 --batch 131072 --seq "
              "64 --hidden 16 --output sharded --rank 1048575")); /* one rank: no sweep of all */
    has_message(1048567, 1048575, 1024, 2);
    has_message(1048575, 1048567, 1024, 2);
}

/* A few more ranks than the 65,536 of which the tool walks all. */
T_CASE(of_a_world_too_large_to_walk_parts_are_drawn_by_lot)
{
    draw_alone(words("--src tp=8,dp=8448 --dst tp=8,cp=2,dp=4224 --batch 8448 --seq 64 "
                     "--hidden 16 --output sharded"));
    has("Shown: one of 33,792 parts", 1);
    has("256 of them, drawn by lot, were looked at; they", 1);
    has(" to rank ", 4);
    has(": 1024 bytes</title>", 4);
}

T_CASE(a_comparison_is_drawn_as_bars)
{
    draw(words("--src tp=2,dp=4 --compare tp=2,cp=2,dp=2:sharded tp=4,dp=2->tp=1,cp=2,dp=4:sharded "
               "--batch 16 --seq 8192 --hidden 4096 --ranks-per-node 2 --one-level "
               "--alpha 10,20 --beta 100,50"));
    has(">1  tp=2,dp=4 \xe2\x86\x92 tp=2,cp=2,dp=2, sharded<", 6);
    has(">2  tp=4,dp=2 \xe2\x86\x92 tp=1,cp=2,dp=4, sharded<", 6);
    has(">5.41 ms least bridge time<", 1); /* see test_plan_compare.c */
    has(">6.76 ms<", 1);
    has(">384 MiB<", 1);
    has(">2 GiB<", 2); /* between nodes */
    has("10 us and 100", 1);
}

T_CASE(pictures_say_where_the_rows_sit)
{
    draw(words("--src dp=4 --dst cp=2,dp=2 --batch 4 --seq 8 --hidden 4 --dtype f32 "
               "--output sharded --llm-seq 64 --offset 4"));
    has("row 0 of a sample is position 4 of the LLM&#39;s 64.", 1);
    draw(words(
        "--src dp=4 --compare cp=2,dp=2 --batch 4 --seq 8 --hidden 4 --dtype f32 --llm-seq 64"));
    has("row 0 of a sample is position 0 of the LLM&#39;s 64.", 1);
    draw(words("--src dp=4 --dst cp=2,dp=2 --batch 4 --seq 8 --hidden 4 --dtype f32"));
    has("row 0 of", 0);
}

T_CASE(pictures_of_worlds_of_different_size_warn)
{
    draw(words("--src dp=4 --dst dp=8 --batch 8 --seq 8 --hidden 4 --dtype f32"));
    has("warning: --src has 4 ranks, --dst 8", 1);
    const char *const *compared =
        words("--src dp=4 --compare tp=4 tp=8 --batch 8 --seq 8 --hidden 4 --dtype f32");
    draw(compared);
    has("warning: grids of 4 to 8 ranks are compared", 1);
    has("least bridge time", 0);
}

/* 64 ranks that all exchange with all are more arrows than an eye follows: one row a role. */
T_CASE(sixty_four_ranks_of_one_role_are_one_row)
{
    draw(words("--src dp=64 --dst tp=64 --batch 64 --seq 1 --hidden 1 --dtype f32"));
    has("and 63 like it", 2 * 2);
    has("A row is a rank that stands for all that do the same", 1);
}

T_CASE(a_path_that_cannot_be_written_is_one_line)
{
    const char *paths[] = {"none/plan.svg", tool_folder, "/dev/full", ""};
    unlink(path);
    for (int compare = 0; compare < 2; compare++)
        for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
            tool_refuses(
                "colo-plan",
                words("--src dp=2 %s tp=2 --batch 2 --seq 2 --hidden 1 --dtype f32 --svg %s",
                      compare ? "--compare" : "--dst", paths[i]),
                2, "colo-plan: --svg: \"");
            assert_int_equal(tool_folder_files(), 0);
        }
}

/* A disk that is full after 2 KiB: the text fits, the picture does not. */
T_CASE(half_a_picture_is_no_picture)
{
    const char *const *args = words("--src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 8 --seq 8 "
                                    "--hidden 4 --dtype f32 --output sharded --svg %s",
                                    path);
    struct rlimit was, now;
    tool_write(path, "old");
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    now = was;
    now.rlim_cur = 2048;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &now), 0);
    tool_output_t s = tool_run(args);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(s.exit, 2);
    assert_int_equal(s.out_size, 0);
    assert_non_null(strstr(s.err, "File too large"));
    assert_string_equal(markup_read(path), "old");
    assert_int_equal(tool_folder_files(), 1);
}

T_CASE(layouts_without_a_plan_keep_the_old_picture)
{
    const char *const *args = words("--src dp=8 --dst cp=4,dp=2 --batch 8 --seq 12 --hidden 4 "
                                    "--dtype f32 --grad disjoint --svg %s",
                                    path);
    tool_write(path, "old");
    tool_output_t s = tool_run(args);
    assert_int_equal(s.exit, 1);
    assert_string_equal(markup_read(path), "old");
    assert_int_equal(tool_folder_files(), 1);
}

/* The check that the others rest on. */
T_CASE(broken_markup_is_noticed)
{
    static const char *const broken[] = {"<a>",
                                         "<a></b>",
                                         "<a></a><b/>",
                                         "<a x=1/>",
                                         "<a x=\"1\" x=\"2\"/>",
                                         "<a>&nbsp;</a>",
                                         "<a>&</a>",
                                         "<a x=\"<\"/>",
                                         "x<a/>",
                                         "<a/",
                                         "",
                                         "<a>\x01</a>",
                                         "<a>\xff</a>",
                                         "<a><b></a></b>"};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++)
        if (!markup_check(broken[i]))
            fail_msg("\"%s\" passes", broken[i]);
    assert_null(markup_check("<a x=\"1\" y-z=\"&lt;\">t &amp; &#39;<b/>\n\xe2\x86\x92</a>\n"));
}

int main(int argc, char **argv)
{
    if (!tool_path(argc, argv, "COLO_PLAN"))
        return T_EXIT_SKIP;
    return t_main_around("tools/plan_svg", tool_folder_enter, tool_folder_leave);
}
