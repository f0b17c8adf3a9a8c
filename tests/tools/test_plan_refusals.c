/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_refusals.c - every way to use colo-plan wrongly: one line on stderr that names the
 * option, nothing on stdout.
 */
#include "harness/harness.h"

#include "tool.h"

#include <jansson.h>

#define GOOD_GRIDS "--src tp=2,dp=4 --dst tp=2,cp=2,dp=2"
#define GOOD_SIZES "--batch 8 --seq 8 --hidden 4"
#define GOOD GOOD_GRIDS " " GOOD_SIZES

T_CASE(a_wrong_option_is_named_in_one_line)
{
    static const struct {
        const char *line, *text;
    } cases[] = {
        {"", "--src is missing"},
        {"--src tp=2,dp=4", "--dst is missing"},
        {GOOD " --frobnicate", "unknown option \"--frobnicate\""},
        {GOOD " --jso", "unknown option \"--jso\""},
        {GOOD " -j", "unknown option \"-j\""},
        {GOOD " extra", "argument 11: unknown option \"extra\""},
        {GOOD " ", "unknown option \"\""}, /* an empty one */
        {GOOD " caf\xc3\xa9", "unknown option \"caf\\xc3\\xa9\""},
        {GOOD " --dtype", "--dtype: a value is missing"},
        {"--src --dst tp=2", "--src: a value is missing"},
        {GOOD " --json=yes", "--json: takes no value, found \"yes\""},
        {GOOD " --json --json", "--json: given twice"},
        {GOOD_GRIDS " --src tp=8 " GOOD_SIZES, "--src: given twice"},
        {GOOD " --batch=9", "--batch: given twice"},
        {GOOD_GRIDS " --batch 0 --seq 8 --hidden 4", "--batch: \"0\" is outside 1.."},
        {GOOD_GRIDS " --batch -4 --seq 8 --hidden 4",
         "--batch: \"-4\" is no whole number (byte 0)"},
        {GOOD_GRIDS " --batch 8x --seq 8 --hidden 4", "\"8x\" is no whole number (byte 1)"},
        {GOOD_GRIDS " --batch %s --seq 8 --hidden 4", "(byte 0)"},
        {GOOD_GRIDS " --batch +8 --seq 8 --hidden 4", "(byte 0)"},
        {GOOD_GRIDS " --batch 1e3 --seq 8 --hidden 4", "(byte 1)"},
        {GOOD_GRIDS " --batch  --seq 8 --hidden 4", "--batch: \"\" is no whole number"},
        {GOOD_GRIDS " --batch 8 --seq 9223372036854775808 --hidden 4",
         "--seq: \"9223372036854775808\" is outside"},
        {GOOD_GRIDS " --batch 8 --seq 8 --hidden 99999999999999999999999999999999999999999",
         "--hidden: "},
        {GOOD_GRIDS " --batch 4611686018427387904 --seq 8 --hidden 4", "overflow"},
        {GOOD " --dtype fp7", "--dtype: \"fp7\""},
        {GOOD " --dtype \xff\xfe", "--dtype: \"\\xff\\xfe\""},
        {GOOD " --axes hsb", "--axes: \"hsb\" is none of bsh, sbh, th"},
        {GOOD " --output half", "--output: \"half\" is none of full, sharded"},
        {GOOD " --grad all", "--grad: \"all\" is none of partial, disjoint"},
        {GOOD " --sp tp", "--sp: \"tp\" is none of none, src, dst, both"},
        {"--src dp=8 --dst dp=8 " GOOD_SIZES " --sp src", "--sp: "},
        {GOOD " --src-stage 1", "--src-stage: stage 1 is outside 0..0, the pp of --src"},
        {GOOD " --dst-stage first", "--dst-stage: \"first\""},
        {"--src pp=2,dp=4 --dst dp=8 " GOOD_SIZES " --src-stage 2",
         "stage 2 is outside 0..1, the pp of --src"},
        {GOOD " --offset -1", "--offset: \"-1\""},
        {GOOD " --offset 9223372036854775807", "--offset: "},
        {GOOD " --llm-seq 7", "--llm-seq: 7 positions cannot hold --offset 0 and --seq 8"},
        {GOOD " --llm-seq 16 --offset 9", "--llm-seq: 16 positions"},
        {GOOD " --ranks-per-node x", "--ranks-per-node: \"x\""},
        {GOOD " --nodes 0,0,1,x", "--nodes: \"0,0,1,x\" is not a list of at most 65536 numbers"},
        {GOOD " --nodes 0,", "(byte 2)"},
        {GOOD " --nodes 0,0,1", "--nodes: rank 7 has no node; give 8 numbers, one per rank"},
        {GOOD " --nodes 0,1 --ranks-per-node 1", "--nodes: not with --ranks-per-node"},
        {GOOD " --max-ranks -1", "--max-ranks: \"-1\""},
        {GOOD " --rank 8", "--rank: \"8\" is outside 0..7"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        tool_refuses("colo-plan", words(cases[i].line, " 8"), 2, cases[i].text);
}

/* Where reading stopped is in the error message, whatever else is. */
T_CASE(a_bad_spec_is_refused_with_its_position)
{
    static const struct {
        const char *spec;
        int byte;
    } cases[] = {
        {"", 0},           {"tp", 2},          {"tp=", 3},
        {"tp=2,", 5},      {"tp=2,,dp=4", 5},  {"tp=2,dp=x", 8},
        {"tp=2 ,dp=4", 4}, {" tp=2", 0},       {"tp=2,dp=4@", 10},
        {"tp=-2", 3},      {"t\xc3\xa9=2", 1}, {"tp=2\n", 4},
        {"tp=2;dp=4", 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int side = 0; side < 2; side++) {
            const char *const *args =
                words(side ? "--src dp=8 --dst %s " GOOD_SIZES : "--src %s --dst dp=8 " GOOD_SIZES,
                      cases[i].spec);
            char where[32], option[16];
            snprintf(where, sizeof where, "byte %d", cases[i].byte);
            snprintf(option, sizeof option, "--%s: ", side ? "dst" : "src");
            tool_refuses("colo-plan", args, 2, where);
            tool_refuses("colo-plan", args, 2, option);
        }
}

T_CASE(a_spec_that_is_no_grid_is_refused)
{
    static const char *const specs[] = {
        "tp=0",
        "tp=2,tp=2",
        "tp=9223372036854775808",
        "tp=4294967296,dp=4294967296",
        "a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1,j=1,k=1,l=1,m=1,n=1,o=1,p=1,q=1",
        "a_name_of_sixteen=2",
        "tp=2,dp=4@9223372036854775807",
        "dp=16777217",
        "dp=8@16777216",
        "2tp=2",
        "tp=2,dp4",
        "tp1dp4",
        "tp2-cp1dp4",
    };
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        tool_refuses("colo-plan", words("--src %s --dst dp=8 " GOOD_SIZES, specs[i]), 2, "--src: ");
}

/* A dim that splits nothing is a typing error, or its ranks hold different data. */
T_CASE(a_dim_without_a_role_is_refused_unless_declared)
{
    static const struct {
        const char *src, *dst, *extra, *text;
    } cases[] = {
        {"tp1dp4", "dp=4", NULL,
         "--src: grid spec, byte 0: grid: dim 0: the name 'tp1dp' has a letter after"},
        {"tp1_dp4", "dp=4", NULL, "--src: layout: dim 'tp1_dp' of extent 4 has no role"},
        {"dp=4", "gtp_remat=2,dp=2", NULL,
         "--dst: layout: dim 'gtp_remat' of extent 2 has no role"},
        {"dp=4", "gtp_remat=2,dp=2", "gtp_rema",
         "--dst: layout: dim 'gtp_remat' of extent 2 has no role"},
        {"dp=4", "gtp_remat=2,dp=2", "dp-gtp_remat", "--src: layout: extra dim 'dp'"},
        {"dp=4", "tp=2,dp=2", "gtp_remat",
         "--extra: \"gtp_remat\" names a dim that no grid has (byte 0)"},
        {"dp=4", "gtp_remat=2,dp=2", "gtp_remat-", "names a dim that no grid has (byte 10)"},
        {"dp=4", "tp=2,dp=2", "", "--extra: \"\" names a dim that no grid has"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        tool_refuses("colo-plan",
                     words(cases[i].extra ? "--src %s --dst %s " GOOD_SIZES " --extra %s"
                                          : "--src %s --dst %s " GOOD_SIZES,
                           cases[i].src, cases[i].dst, cases[i].extra),
                     2, cases[i].text);
    tool_output_t a = tool_run(words("--src tp=2,dp=4 --dst ep=2,cp=2,dp=2 " GOOD_SIZES " --json")),
                  b = tool_run(words("--src tp=2,dp=4 --dst xp=2,cp=2,dp=2 " GOOD_SIZES
                                     " --json --extra xp"));
    json_auto_t *replicas = json_loads(a.out, 0, NULL), *declared = json_loads(b.out, 0, NULL);
    assert_non_null(declared);
    assert_true(
        json_equal(json_object_get(replicas, "forward"), json_object_get(declared, "forward")));
}

T_CASE(a_spec_of_100_kb_gives_one_short_line)
{
    size_t n = 100 * 1024;
    char *spec = malloc(n + 1);
    static const char *const unit[] = {"x", "tp=2,",        "\xff", "\n",
                                       "9", "\xe2\x82\xac", "=",    "%n%s"};
    for (size_t u = 0; u < sizeof unit / sizeof unit[0]; u++) {
        for (size_t i = 0; i < n; i++)
            spec[i] = unit[u][i % strlen(unit[u])];
        spec[n] = '\0';
        tool_refuses("colo-plan", words("--src %s --dst dp=8 " GOOD_SIZES, spec), 2, "--src: ");
        /* --seq is missing, too */
        tool_refuses("colo-plan", words(GOOD_GRIDS " --batch %s", spec), 2, "--");
        tool_refuses("colo-plan", words(GOOD " --output %s", spec), 2, "--output: ");
        tool_refuses("colo-plan", words(GOOD " --dtype %s", spec), 2, "--dtype: ");
        tool_refuses("colo-plan", words("%s", spec), 2, "unknown option");
    }
    free(spec);
}

/* Well-formed options, but no plan: a problem found, not wrong use. */
T_CASE(layouts_that_do_not_fit_are_a_problem)
{
    const char *const *cp =
        words("--src dp=8 --dst cp=4,dp=2 --batch 8 --seq 12 --hidden 4 --grad disjoint");
    const char *const *sp =
        words("--src tp=4,dp=2 --dst dp=8 --batch 8 --seq 6 --hidden 4 --sp src");
    tool_refuses("colo-plan", cp, 1, "12");
    tool_refuses("colo-plan", sp, 1, "6");
}

T_CASE(an_output_that_cannot_be_written_is_a_problem)
{
    tool_refused(tool_run_closed(words(GOOD)), "colo-plan", 1, "standard output");
}

T_TOOL_MAIN("COLO_PLAN", "tools/plan_refusals")
