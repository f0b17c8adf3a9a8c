/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_colo_perf.c - colo-perf without a GPU: what it refuses, in one error message, and the
 * pictures of recorded runs: well-formed, every series with the figure that the record holds,
 * nothing drawn of what moved nothing. Figures are computed here from the JSON.
 */
#include "harness/harness.h"

#include "markup.h"
#include "tool.h"

#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

static const char path[] = "plot.svg", input[] = "in.json";

static void expect(const char *const *args, int code, const char *text)
{
    tool_output_t s = tool_run(args);
    const char *end = strchr(s.err, '\n');
    if (s.exit != code || !strstr(code ? s.err : s.out, text))
        fail_msg("exit %d, expected %d and \"%s\": %s%s", s.exit, code, text, s.out, s.err);
    if (code && (s.out_size > 0 || !end || end[1]))
        fail_msg("expected one line on stderr and nothing on stdout: %s%s", s.out, s.err);
}

#define EXPECT(code, text, ...) expect((const char *[]){__VA_ARGS__, NULL}, code, text)

T_CASE(wrong_use_is_exit_2_with_the_option)
{
    expect((const char *[]){NULL}, 2, "a subcommand is missing, expected link, bridge, logprob or plot; see");
    EXPECT(2, "\"lnk\" is no subcommand, expected link, bridge, logprob or plot; see", "lnk");
    EXPECT(2, "-b: \"8X\" is no size", "link", "-b", "8X");
    EXPECT(2, "-b: \"3\" is no size", "link", "-b", "3");
    EXPECT(2, "-b: \"2048G\" is no size", "link", "-b", "2048G");
    EXPECT(2, "-b 2097152 is larger than -e 1048576", "link", "-b", "2M", "-e", "1M");
    EXPECT(2, "-f: \"1\" is outside", "link", "-f", "1");
    EXPECT(2, "-n: \"0\" is outside", "link", "-n", "0");
    EXPECT(2, "--vocab: \"x\"", "logprob", "--vocab", "x");
    EXPECT(2, "-g 2: logprob measures one GPU", "logprob", "-g", "2");
    EXPECT(2, "--tokens: not with bridge", "bridge", "--tokens", "4");
    EXPECT(2, "--src: not with link", "link", "--src", "dp=2");
    EXPECT(2, "--src is missing", "bridge");
    EXPECT(2, "--dst is missing", "bridge", "--src", "dp=2");
    EXPECT(2, "--src: ", "bridge", "--src", "dp=0", "--dst", "dp=2");
    EXPECT(2, "--dst: not with --layouts", "bridge", "--dst", "dp=2", "--layouts", "dp=2->tp=2");
    EXPECT(2, "--layouts entry 2: \"tp=2\" is not SRC->DST", "bridge", "--layouts", "dp=2->tp=2",
           "tp=2");
    EXPECT(2, "--layouts entry 1: ", "bridge", "--layouts", "dp=2->xx");
    EXPECT(2, "--layouts: a value is missing", "bridge", "--layouts", "-n", "5");
    EXPECT(2, "--axes: \"hbs\" is none of bsh, sbh, th, both", "bridge", "--axes", "hbs");
    EXPECT(2, "--dtype: \"i8\" is none of bf16, f16, f32", "bridge", "--dtype", "i8");
    EXPECT(2, "--seq: -b and -e choose it", "bridge", "--seq", "8", "-b", "1M");
    EXPECT(2, "plot: which file?", "plot", "--svg", "x");
    EXPECT(2, "--svg is missing", "plot", "x");
    EXPECT(2, "--json: not with plot", "plot", "x", "--json");
    EXPECT(0, "usage: colo-perf", "--help");
    EXPECT(0, "colo-perf 0.1.0", "--version");
}

T_CASE(a_pair_as_long_as_the_line_is_refused)
{
    char text[2000];
    for (size_t len = 500; len < sizeof text; len += len < 520 ? 1 : 700) {
        snprintf(text, sizeof text, "%0*d", (int)len, 0);
        EXPECT(2, "is not SRC->DST", "bridge", "--layouts", text);
        memcpy(text + len - 2, "->", 2); /* past what is looked at, or before an empty side */
        EXPECT(2, "--layouts entry 1", "bridge", "--layouts", text);
    }
}

T_CASE(no_gpu_is_exit_2_and_says_so)
{
    EXPECT(2, "no CUDA device", "link");
    EXPECT(2, "no CUDA device", "logprob", "--json");
    EXPECT(2, "no CUDA device", "bridge", "--layouts", "dp=2->tp=2", "dp=2->cp=2", "-n", "3");
}

T_CASE(what_is_no_record_is_refused_and_leaves_no_picture)
{
    static const struct {
        const char *text, *error_message;
        int code;
    } cases[] = {{"{\"tool\": ", "in.json\": line 1", 2},
                 {"{\"tool\": \"colo-plan\"}", "is not what --json prints", 2},
                 {"[]", "is not what --json prints", 2},
                 {"{\"tool\": \"colo-perf\", \"bridge\": []}", "nothing to draw", 1},
                 {"{\"tool\": \"colo-perf\", \"bridge\": [{\"op\": \"tuned\", \"time_us\": -1}]}",
                  "nothing to draw", 1},
                 {"{\"tool\": \"colo-perf\", \"link\": 7}", "nothing to draw", 1}};
    EXPECT(2, "in.json\": line -1: unable to open", "plot", input, "--svg", path);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tool_write(input, cases[i].text);
        EXPECT(cases[i].code, cases[i].error_message, "plot", input, "--svg", path);
        assert_int_not_equal(access(path, F_OK), 0);
    }
    EXPECT(1, "Is a directory", "plot", GOLDEN "/perf-sizes.json", "--svg", tool_folder);
}

/* ---- pictures ---- */

static const char *drawn(const char *record)
{
    tool_output_t s = tool_run((const char *[]){"plot", record, "--svg", path, NULL});
    if (s.exit != 0)
        fail_msg("exit %d: %s", s.exit, s.err);
    assert_string_equal(s.out, "");
    const char *text = markup_read(path);
    assert_non_null(text);
    const char *why = markup_check(text);
    if (why)
        fail_msg("%s", why);
    assert_int_equal(markup_count(text, "nan"), 0);
    assert_int_equal(markup_count(text, "inf"), 0);
    return text;
}

static double number(const json_t *row, const char *key)
{
    return json_number_value(json_object_get(row, key));
}

static const char *string(const json_t *row, const char *key)
{
    return json_string_value(json_object_get(row, key));
}

/* The best of one series of the record, as the legend writes it; 0: not there */
static double best_of(const json_t *rows, const char *way, const char *op, bool replayed)
{
    double best = 0;
    size_t i;
    json_t *row;
    json_array_foreach((json_t *)rows, i, row)
    {
        const double moved = number(row, "arrive_bytes"),
                     y = (moved > 0 ? moved : number(row, "local_bytes")) / number(row, "time_us") *
                         1e-3;
        if (strcmp(string(row, "way"), way) == 0 && strcmp(string(row, "op"), op) == 0 &&
            json_is_true(json_object_get(row, "replayed")) == replayed &&
            !json_is_true(json_object_get(row, "view")))
            best = y > best ? y : best;
    }
    return best;
}

/* From the panel's title to the next panel. */
static char *panel(const char *text, const char *title)
{
    const char *from = strstr(text, title), *to = from ? strstr(from, "<g id=\"p") : NULL;
    if (!from)
        fail_msg("no panel \"%s\"", title);
    return strndup(from, to ? (size_t)(to - from) : strlen(from));
}

T_CASE(every_series_has_its_best_figure)
{
    static const char *const ways[] = {"forward", "backward"};
    static const char *const ops[] = {"exact-nccl", "collective", "reference", "tuned"};
    const char *text = drawn(GOLDEN "/perf-sizes.json");
    json_auto_t *doc = json_load_file(GOLDEN "/perf-sizes.json", 0, NULL);
    const json_t *rows = json_object_get(doc, "bridge");
    for (int w = 0; w < 2; w++) {
        const char *title =
            t_text("tp=1,dp=2 \xe2\x86\x92 tp=1,cp=2,dp=1, bsh, %s</text>", ways[w]);
        char *p = panel(text, title);
        assert_int_equal(markup_count(p, "GB/s of what must arrive"), 1);
        for (int o = 0; o < 4; o++)
            for (int g = 0; g < 2; g++) {
                const double best = best_of(rows, ways[w], ops[o], g);
                assert_true(best > 0);
                const char *what = t_text(">%s%s: %.*f</text>", ops[o], g ? ", graph" : "",
                                          best < 10 ? 1 : 0, best);
                if (markup_count(p, what) != 1)
                    fail_msg("%s: no %s in %s", ways[w], what, p);
            }
        assert_int_equal(markup_count(p, "<circle"), 4 * 2 * 3); /* 3 sizes */
        assert_int_equal(markup_count(p, ">limit: "), 1);
        assert_int_equal(markup_count(p, ">16K</text>"), 1);
        assert_int_equal(markup_count(p, ">1M</text>"), 1);
        assert_int_equal(markup_count(p, ">10</text>"), 1); /* a decade of the other axis */
        free(p);
    }
    assert_int_equal(markup_count(text, "<g id=\"p"), 3); /* the page and two panels */
}

T_CASE(one_size_is_bars_without_what_moved_nothing)
{
    const char *text = drawn(GOLDEN "/perf-one-size.json");
    json_auto_t *doc = json_load_file(GOLDEN "/perf-one-size.json", 0, NULL);
    const json_t *rows = json_object_get(doc, "bridge");
    char *p = panel(text, "bsh, backward</text>"), what[64];
    const double limit = best_of(rows, "backward", "copy", false),
                 exact = best_of(rows, "backward", "exact-nccl", false);
    assert_int_equal(markup_count(p, "GB/s copied; none arrives"), 1);
    snprintf(what, sizeof what, ">%.0f, %.0f %%</text>", exact, 100 * exact / limit);
    assert_int_equal(markup_count(p, what), 1);
    assert_int_equal(markup_count(p, ">reference</text>"), 0); /* a view */
    assert_int_equal(markup_count(p, ">collective</text>"), 1);
    free(p);
    p = panel(text, "bsh, forward</text>");
    assert_int_equal(markup_count(p, ">reference</text>"), 1);
    assert_int_equal(markup_count(p, "class=\"bar best\""), 1); /* the limit */
    free(p);
}

T_CASE(what_does_not_fit_is_said)
{
    for (int panels = 32; panels <= 33; panels++) {
        FILE *f = fopen(input, "w");
        assert_non_null(f);
        fputs("{\"tool\": \"colo-perf\", \"bridge\": [", f);
        for (int i = 0; i < 2 * panels; i++) /* two sizes each */
            fprintf(f,
                    "%s{\"src\": \"dp=%d\", \"dst\": \"tp=2\", \"axes\": \"bsh\", \"way\": "
                    "\"forward\", \"op\": \"tuned\", \"bytes\": %d, \"local_bytes\": 1024, "
                    "\"time_us\": 1}",
                    i ? "," : "", i / 2, 1024 << (i % 2));
        fputs("]}", f);
        fclose(f);
        const char *text = drawn(input);
        assert_int_equal(markup_count(text, "<g id=\"p"), 1 + 32); /* the page, too */
        assert_int_equal(markup_count(text, ">The first 32 panels; the rest is not drawn.</text>"),
                         panels > 32);
    }
}

T_CASE(links_and_losses_are_drawn_and_names_are_escaped)
{
    FILE *f = fopen(input, "w");
    assert_non_null(f);
    fputs("{\"tool\": \"colo-perf\", \"device\": \"<&>\", \"gpus\": 4, \"link\": [", f);
    for (int i = 0; i < 3; i++)
        fprintf(f,
                "{\"op\": \"push\", \"gpus\": 4, \"bytes\": %d, \"time_us\": 1, \"busbw_gbs\": %d},"
                "{\"op\": \"<x>\", \"gpus\": 1, \"bytes\": %d, \"time_us\": 1, \"membw_gbs\": 4000}"
                "%s",
                1 << (10 + i), 100 + i, 1 << (10 + i), i < 2 ? "," : "");
    fputs("], \"logprob\": {\"tokens\": 64, \"vocab\": 9, \"dtype\": \"bf16\", \"rows\": [{\"op\": "
          "\"forward\", \"gbs\": 4321}]}}",
          f);
    fclose(f);
    const char *text = drawn(input);
    assert_int_equal(markup_count(text, ">4 GPUs</text>"), 1);
    assert_int_equal(markup_count(text, ">push, the limit: 102</text>"), 1);
    assert_int_equal(markup_count(text, ">Memory of one GPU</text>"), 1);
    assert_int_equal(markup_count(text, "&lt;x&gt;: 4000</text>"), 1);
    assert_int_equal(markup_count(text, ">T 64, V 9, bf16</text>"), 1);
    assert_int_equal(markup_count(text, ">4321</text>"), 1);
}

int main(int argc, char **argv)
{
    if (!tool_path(argc, argv, "COLO_PERF"))
        return 2;
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* also where there are some */
    return t_main_each("tools/colo_perf", tool_folder_enter, tool_folder_leave);
}
