/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan_compare.c - colo-plan --compare from outside: numbers from the closed forms of the
 * bridge's rules and from the stated model, the text as written down (golden/plan-compare.txt), and
 * every way to use it wrongly.
 *
 * V is the whole tensor, k = larger dp over smaller dp, C = cp of the destination, Ds and Dd the dp
 * sizes. Fan-in receives forward (k-1)/(kC) V/Dd sharded, backward (C-1)/(kC) V/Dd; fan-out forward
 * 0, backward (kC-1)/C V/Dd, in messages of V/(Dd C) here.
 */
#include "harness/harness.h"

#include "markup.h"
#include "tool.h"

#include <math.h>

#include <jansson.h>

/* 16 samples x 8192 rows x 4096 bf16 features: V = 2^30 */
#define SIZES "--batch 16 --seq 8192 --hidden 4096"
static const double V = 1073741824.0;

static json_t *compared(const char *const *args)
{
    tool_output_t s = tool_run(args);
    if (s.exit != 0)
        fail_msg("exit %d: %s", s.exit, s.err);
    json_t *doc = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(doc);
    return doc;
}

static const json_t *entry(const json_t *doc, size_t i)
{
    return json_array_get(json_object_get(doc, "entries"), i);
}

static void assert_int(const json_t *e, const char *group, const char *key, double value)
{
    const json_t *v = json_object_get(group ? json_object_get(e, group) : e, key);
    if (!json_is_integer(v) || (double)json_integer_value(v) != value)
        fail_msg("%s.%s is %lld, expected %.0f", group ? group : "", key,
                 (long long)json_integer_value(v), value);
}

/* Two of the model's sums in double: a few units in the last of 12 printed digits. */
static void assert_seconds(const json_t *e, const char *group, double value)
{
    double found =
        json_real_value(json_object_get(group ? json_object_get(e, group) : e, "seconds"));
    if (fabs(found - value) > 1e-10 * value)
        fail_msg("%s seconds are %.12g, expected %.12g", group ? group : "all", found, value);
}

T_CASE(fan_in_and_fan_out_are_their_closed_forms)
{
    json_auto_t *doc = compared(words(
        "--compare tp=2,dp=4->tp=2,cp=2,dp=2:sharded tp=4,dp=2->tp=1,cp=2,dp=4:sharded --batch 16 "
        "--seq 8192 --hidden 4096 --ranks-per-node 2 --one-level "
        "--alpha 10,20 --beta 100,50 --json"));
    const json_t *in = entry(doc, 0), *out = entry(doc, 1);
    assert_int(doc, NULL, "ranks_per_node", 2);
    assert_int(doc, NULL, "best", 0);
    assert_int_equal(json_array_size(json_object_get(doc, "entries")), 2);

    /* pairs 0-2, 1-3, 4-6, 5-7: always two nodes of two ranks, one message a rank and way */
    static const char *const ways[] = {"forward", "backward"};
    for (int w = 0; w < 2; w++) {
        assert_int(in, ways[w], "recv_bytes_max", V / 8);
        assert_int(in, ways[w], "recv_bytes_total", V);
        assert_int(in, ways[w], "send_bytes_max", V / 8);
        assert_int(in, ways[w], "local_bytes_max", V / 8);
        assert_int(in, ways[w], "messages_max", 1);
        assert_int(in, ways[w], "messages_total", 8);
        assert_int(in, ways[w], "slow_bytes_total", V);
        assert_seconds(in, ways[w], 20e-6 + V / 8 / 50e9);
    }
    assert_int(in, "forward", "collective_recv_bytes_max", V / 4);
    assert_int(in, "backward", "collective_recv_bytes_max", V / 2);
    assert_int(in, "memory", "input_bytes_max", V / 4);
    assert_int(in, "memory", "output_bytes_max", V / 4);
    assert_int(in, "memory", "staging_bytes_max", 0);
    assert_int(in, "memory", "bytes_max", V / 2);
    assert_seconds(in, NULL, 2 * (20e-6 + V / 8 / 50e9));
    assert_true(json_is_true(json_object_get(in, "best")));

    /* an exchange inside {0,1,2,3} and {4,5,6,7}: of three messages one stays on the node */
    assert_int(out, "forward", "recv_bytes_max", 0);
    assert_int(out, "forward", "messages_total", 0);
    assert_seconds(out, "forward", 0);
    assert_int(out, "backward", "recv_bytes_max", 3 * V / 8);
    assert_int(out, "backward", "recv_bytes_total", 3 * V);
    assert_int(out, "backward", "messages_max", 3);
    assert_int(out, "backward", "messages_total", 24);
    assert_int(out, "backward", "slow_bytes_total", 2 * V);
    assert_seconds(out, "backward", 10e-6 + V / 8 / 100e9 + 2 * (20e-6 + V / 8 / 50e9));
    assert_int(out, "memory", "input_bytes_max", V / 2);
    assert_int(out, "memory", "output_bytes_max", V / 8);
    assert_int(out, "memory", "bytes_max", 5 * V / 8);
    assert_true(json_is_false(json_object_get(out, "best")));

    json_auto_t *model = json_pack("{s:[f,f],s:[f,f],s:b}", "alpha_us", 10.0, 20.0, "beta_gb_s", 100.0,
                              50.0, "default", 0);
    assert_true(json_equal(json_object_get(doc, "model"), model));
    json_auto_t *same = json_pack("{s:s,s:s,s:s,s:s,s:s,s:i,s:n,s:s,s:i}", "src", "tp=2,dp=4", "dst",
                             "tp=2,cp=2,dp=2", "output", "sharded", "grad", "disjoint", "sp",
                             "none", "world", 8, "sampled", "direction", "fan_in", "scale", 2);
    const char *key;
    json_t *value;
    json_object_foreach(same, key, value) if (!json_equal(json_object_get(in, key), value))
        fail_msg("key %s", key);
}

/* V = 128 bytes, CP2 of one sample block: full output V, input V/2, and one partial sum as large as
 * the input for the sibling's addend. Forward each lacks V/2, backward the sibling's V/2. */
T_CASE(partial_gradients_need_staging)
{
    json_auto_t *doc =
        compared(words("--src tp=1,dp=2 --compare tp=1,cp=2,dp=1:full:partial "
                       "tp=1,cp=2,dp=1:disjoint --batch 4 --seq 8 --hidden 1 --dtype f32 --json"));
    const json_t *partial = entry(doc, 0), *disjoint = entry(doc, 1);
    assert_int(partial, "memory", "input_bytes_max", 64);
    assert_int(partial, "memory", "output_bytes_max", 128);
    assert_int(partial, "memory", "staging_bytes_max", 64);
    assert_int(partial, "memory", "bytes_max", 256);
    assert_int(partial, "backward", "recv_bytes_max", 64);
    assert_int(disjoint, "memory", "staging_bytes_max", 0);
    assert_int(disjoint, "memory", "bytes_max", 192);
    assert_int(disjoint, "backward", "recv_bytes_max", 32); /* (C-1)/(kC) V/Dd */
    /* the defaults, inside one node */
    assert_seconds(partial, "backward", 8e-6 + 64 / 285e9);
    assert_string_equal(json_string_value(json_object_get(partial, "grad")), "partial");
    assert_string_equal(json_string_value(json_object_get(disjoint, "output")), "full");
    assert_true(json_is_true(json_object_get(json_object_get(doc, "model"), "default")));
    assert_int(doc, NULL, "best", 1);
}

/* TP2/DP3 -> TP3/DP2, 6 samples of 128 bytes: no rank receives more than one message forward, but
 * rank 2 sends a sample to 0 and one to 5, and rank 3 to 1 and 4. Its sends take longest. */
T_CASE(a_rank_that_sends_longer_than_it_receives_counts)
{
    json_auto_t *doc = compared(words("--src tp=2,dp=3 --compare tp=3,dp=2 --batch 6 --seq 8 --hidden 4 "
                                 "--dtype f32 --alpha 10 --beta 1 --json"));
    assert_int(entry(doc, 0), "forward", "recv_bytes_max", 256);
    assert_int(entry(doc, 0), "forward", "messages_max", 2);
    assert_int(entry(doc, 0), "forward", "messages_total", 6);
    assert_seconds(entry(doc, 0), "forward", 2 * 10e-6 + 256 / 1e9);
}

/* Each node of 8 holds a quarter of the batch and lacks another: on one level each rank brings it
 * from its rail; on two levels each brings an eighth of it and sends that to 7 others. */
T_CASE(two_levels_are_their_closed_form)
{
    json_auto_t *doc = compared(words("--compare tp=8,dp=4->tp=4,cp=4,dp=2:full:disjoint " SIZES
                                 " --ranks-per-node 8 --alpha 10,20 --beta 100,50 --json"));
    const json_t *forward = json_object_get(entry(doc, 0), "forward");
    assert_int(forward, NULL, "slow_bytes_total", V);
    assert_int(forward, NULL, "slow_bytes_minimum", V);
    assert_int(forward, NULL, "slow_bytes_one_level", 8 * V);
    assert_int(forward, NULL, "messages_max", 8);
    assert_seconds(forward, NULL, 20e-6 + V / 32 / 50e9 + 7 * (10e-6 + V / 32 / 100e9));
    assert_true(fabs(json_real_value(json_object_get(forward, "seconds_one_level")) -
                     (20e-6 + V / 4 / 50e9)) < 1e-12);
}

/* Each node of 4 needs a quarter of the batch, V/4, and has 4 of its 8 addends. Each rank adds up a
 * quarter of that, V/16: of 3 others it collects their addends for itself and for the rank of its
 * rail, to which it sends one sum in fp32. Then it passes its part on to 3 others. */
T_CASE(nodes_that_add_up_are_their_closed_form)
{
    json_auto_t *doc = compared(words("--compare tp=4,dp=4->tp=1,cp=8,dp=2:full:partial " SIZES
                                 " --ranks-per-node 4 --alpha 10,20 --beta 100,50 --json"));
    const json_t *backward = json_object_get(entry(doc, 0), "backward");
    assert_int(backward, NULL, "slow_bytes_total", 2 * V);
    assert_int(backward, NULL, "slow_bytes_minimum", 2 * V);
    assert_int(backward, NULL, "slow_bytes_one_level", 16 * V);
    assert_int(backward, NULL, "recv_bytes_max", V * 3 / 8 + V / 8 + V * 3 / 16);
    assert_int(backward, NULL, "messages_max", 7);
    assert_seconds(backward, NULL,
                   3 * (10e-6 + V / 8 / 100e9) + 20e-6 + V / 8 / 50e9 +
                       3 * (10e-6 + V / 16 / 100e9));
}

/* TP8/DP131072 -> TP8/CP2/DP65536, V = 2^28: k = 2, C = 2, Dd = 2^16, V/(4 Dd) = 2^10 a rank and
 * way. The partner is 8 ranks away, on the next node of 8. */
T_CASE(a_million_ranks_are_estimated_from_their_parts)
{
    json_auto_t *doc = compared(words("--src tp=8,dp=131072 --compare tp=8,cp=2,dp=65536:sharded "
                                 "--batch 131072 --seq 64 --hidden 16 --ranks-per-node 8 --one-level "
                                 "--json"));
    const json_t *e = entry(doc, 0);
    assert_int(e, NULL, "world", 1048576);
    assert_int(e, "sampled", "parts", 256);
    assert_int(e, "sampled", "ranks", 512);
    assert_true(json_is_true(json_object_get(json_object_get(e, "sampled"), "alike")));
    assert_int(e, "forward", "recv_bytes_max", 1024);
    assert_int(e, "forward", "recv_bytes_total", 1073741824);
    assert_int(e, "forward", "messages_total", 1048576);
    assert_int(e, "backward", "slow_bytes_total", 1073741824);
    assert_int(e, "backward", "slow_bytes_minimum", 134217728); /* 8 replicas of a node need it */
    assert_int(e, "backward", "slow_bytes_one_level", 1073741824);
    assert_int(e, "memory", "bytes_max", 4096);
}

/* Half of the ranks of each pp world hold nothing; the estimate of what the others move comes from
 * ranks drawn by lot: 256 of them, so within 4 standard deviations of a fair coin, 4 x 1/16. */
T_CASE(unlike_parts_are_estimated_and_said_to_be)
{
    json_auto_t *doc = compared(words("--src dp=65536,pp=2 --compare dp=32768,cp=2,pp=2:sharded --batch "
                                 "65536 --seq 64 --hidden 16 --src-stage 0 --json"));
    const json_t *e = entry(doc, 0);
    assert_true(json_is_false(json_object_get(json_object_get(e, "sampled"), "alike")));
    /* V = 2^27; each of 65536 ranks with output gets 2 of 4 quarters of a sample's rows, half
     * of it from its own sample where it has it; whatever is local, at most V moves in all */
    double total = (double)json_integer_value(
        json_object_get(json_object_get(e, "forward"), "recv_bytes_total"));
    assert_true(total > 0.5 * 0.75 * 134217728 && total < 134217728 * 1.25);
}

T_CASE(the_table_and_bars_read_as_written_down)
{
    tool_output_t s = tool_run(words(
        "--compare tp=2,dp=4->tp=2,cp=2,dp=2:sharded tp=4,dp=2->tp=1,cp=2,dp=4:sharded --batch 16 "
        "--seq 8192 --hidden 4096 --ranks-per-node 2 --one-level --alpha 10,20 --beta 100,50"));
    assert_string_equal(s.err, "");
    assert_string_equal(s.out, markup_read(GOLDEN "/plan-compare.txt"));
    assert_int_equal(s.exit, 0);
}

/* The first lines say what was asked: the shape, and where the rows sit in the LLM's sequence. */
T_CASE(a_comparison_says_where_the_rows_sit)
{
    tool_output_t s =
        tool_run(words("--src dp=4 --compare cp=2,dp=2:sharded --batch 4 --seq 8 --hidden 4 "
                       "--llm-seq 64 --offset 4"));
    static const char head[] = "4 samples x 8 rows x 4 features, bf16; one node\n"
                               "row 0 of a sample is position 4 of the LLM's 64\n"
                               "*  1  dp=4 -> cp=2,dp=2, sharded: 4 ranks\n";
    if (strncmp(s.out, head, strlen(head)) != 0)
        fail_msg("found %.300s", s.out);
}

/* 8 ranks against 16, in one entry or between two: neither is better than the other. */
T_CASE(worlds_of_different_size_have_no_best)
{
    static const struct {
        const char *entries[3], *warning;
    } cases[] = {
        {{"tp=2,dp=4->tp=4,dp=4"}, "warning: grids of 8 to 16 ranks are compared"},
        {{"tp=2,dp=4->tp=4,dp=2", "tp=4,dp=4->tp=8,dp=2"},
         "warning: grids of 8 to 16 ranks are compared"},
        {{"dp=4@8->tp=4@8", "dp=8->tp=8", "dp=16->tp=16"},
         "warning: grids of 4 to 16 ranks are compared"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *args[16] = {"--batch", "16", "--seq", "8", "--hidden", "4", "--compare"};
        int n = 7;
        for (int k = 0; k < 3 && cases[i].entries[k]; k++)
            args[n++] = cases[i].entries[k];
        tool_output_t s = tool_run(args);
        assert_int_equal(s.exit, 0);
        assert_string_equal(s.err, "");
        if (strncmp(s.out, cases[i].warning, strlen(cases[i].warning)) != 0)
            fail_msg("case %zu begins \"%.80s\"", i, s.out);
        assert_null(strchr(s.out, '*'));
        assert_null(strstr(s.out, "least bridge time"));

        args[n] = "--json";
        s = tool_run(args);
        json_auto_t *doc = json_loads(s.out, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(doc);
        assert_string_equal(s.err, "");
        const char *output = json_string_value(json_object_get(doc, "warning"));
        assert_true(output && strncmp(output, cases[i].warning, strlen(cases[i].warning)) == 0);
        assert_true(json_is_null(json_object_get(doc, "best")));
        for (size_t k = 0; k < json_array_size(json_object_get(doc, "entries")); k++)
            assert_true(json_is_false(json_object_get(entry(doc, k), "best")));
    }
    /* as many ranks elsewhere are not another size */
    tool_output_t s =
        tool_run(words("--batch 16 --seq 8 --hidden 4 --compare dp=8@8->tp=8@8 dp=8->tp=8"));
    assert_null(strstr(s.out, "warning"));
    assert_non_null(strstr(s.out, "least bridge time"));
}

T_CASE(entries_stay_in_order_and_the_first_of_equals_is_best)
{
    const char *const *args = words(
        "--src tp=2,dp=4 --compare tp=4,dp=2 tp=2,cp=2,dp=2:sharded tp=2,cp=2,dp=2:sharded:sp=src "
        "tp=2,cp=2,dp=2:sharded --output full --batch 16 --seq 8192 --hidden 4096 --json");
    static const char *const dst[] = {"tp=4,dp=2", "tp=2,cp=2,dp=2", "tp=2,cp=2,dp=2",
                                      "tp=2,cp=2,dp=2"};
    static const char *const sp[] = {"none", "none", "src", "none"};
    json_auto_t *doc = compared(args);
    int best = 0;
    for (size_t i = 0; i < 4; i++) {
        assert_string_equal(json_string_value(json_object_get(entry(doc, i), "dst")), dst[i]);
        assert_string_equal(json_string_value(json_object_get(entry(doc, i), "sp")), sp[i]);
        best += json_is_true(json_object_get(entry(doc, i), "best"));
    }
    assert_int_equal(best, 1);
    assert_true(json_integer_value(json_object_get(doc, "best")) != 3);
}

T_CASE(wrong_use_is_named_in_one_line)
{
    char spec[5000];
    memset(spec, 'x', sizeof spec - 1);
    spec[sizeof spec - 1] = '\0';
    static const struct {
        const char *line;
        int exit;
        const char *text;
    } cases[] = {
        {SIZES " --compare", 2, "--compare: a value is missing"},
        {SIZES " --compare=tp=2", 2, "--compare: its values are arguments of their own"},
        {SIZES " --compare tp=2", 2, "--compare entry 1: \"tp=2\" names no source; give --src"},
        {SIZES " --compare tp=2->tp=2 dp=2-", 2,
         "--compare entry 2: \"dp=2-\" ends in -; put SRC->DST in quotes"},
        {SIZES " --src tp=2 --compare tp=2 ", 2, "--compare entry 2: "},
        {SIZES " --compare ->tp=2", 2, "--compare entry 1: grid spec, byte 0"},
        {SIZES " --compare tp=2->", 2, "--compare entry 1: grid spec, byte 0"},
        {SIZES " --compare tp=2->dp=2->dp=2", 2, "--compare entry 1: "},
        {SIZES " --src tp=2 --compare tp=2:half", 2,
         "--compare entry 1: \"half\" is none of full, sharded"},
        {SIZES " --src tp=2 --compare tp=2:", 2, "--compare entry 1: \"\" is none of"},
        {SIZES " --src tp=2 --compare tp=2:sp=tp", 2, "--compare entry 1: \"sp=tp\""},
        {SIZES " --src tp=2 --compare %s", 2, "--compare entry 1: 4999 bytes, at most 2047"},
        {SIZES " --src tp=2 --dst tp=2 --compare tp=2", 2, "--dst: not with --compare"},
        {SIZES " --src tp=2 --rank 0 --compare tp=2", 2, "--rank: not with --compare"},
        {SIZES " --src dp=8 --compare dp=8 cp=3,dp=8:disjoint", 1,
         "--compare entry 2: 8192 positions do not split"},
        {SIZES " --src tp=2 --dst tp=2 --alpha 3", 2, "--alpha: only with --compare"},
        {SIZES " --src tp=2 --dst tp=2 --beta 3", 2, "--beta: only with --compare"},
        {SIZES " --src tp=2 --compare tp=2 --alpha 1,2,3", 2,
         "--alpha: \"1,2,3\" is not one or two numbers"},
        {SIZES " --src tp=2 --compare tp=2 --alpha -1", 2, "(byte 0)"},
        {SIZES " --src tp=2 --compare tp=2 --alpha 1.", 2, "(byte 0)"},
        {SIZES " --src tp=2 --compare tp=2 --alpha nan", 2, "(byte 0)"},
        {SIZES " --src tp=2 --compare tp=2 --beta 1e3", 2, "(byte 1)"},
        {SIZES " --src tp=2 --compare tp=2 --beta 0", 2, "--beta: \"0\" is outside"},
        {SIZES " --src tp=2 --compare a a a a a a a a a a a a a a a a a", 2,
         "--compare: 17 entries, at most 16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        tool_refuses("colo-plan", words(cases[i].line, spec), cases[i].exit, cases[i].text);
}

T_TOOL_MAIN("COLO_PLAN", "tools/plan_compare")
