/* SPDX-License-Identifier: Apache-2.0 */
/*
 * colo-info.c - which library this is, what this machine looks like, and where a grid would sit.
 *
 * This file turns the command line into an info_ask_t. With nothing to place it lists versions,
 * backends, the topology, and every environment variable of the library's own table, so an
 * environment variable that the library reads is listed without a word here; what this build lacks
 * is listed as lacking rather than left out. With --grid, --bind or a bridge's options it answers
 * for that only, for this machine or for one that is not here. Finding is in find.c, printing in
 * info/text.c and info/json.c.
 */
#include "info-tool.h"

#include <stdlib.h>
#include <string.h>

#include <colobridge/log.h>
#include <colobridge/version.h>

const char tool_name[] = "colo-info";

static const char help[] =
    "usage: colo-info [--topology T] [--json]\n"
    "       colo-info --grid SPEC [--bind] [options]\n"
    "       colo-info --world FOLDER\n"
    "       colo-info --src SPEC --dst SPEC --batch B --seq N --hidden H [options]\n"
    "\n"
    "Prints the library's version, its backends, the machine, and the value of each\n"
    "environment variable, and says which values are not allowed. With --grid it\n"
    "prints where the ranks of a grid sit, which of its groups cross NUMA nodes,\n"
    "packages and hosts, and with which order of the dims or which binding fewer\n"
    "would cross.\n"
    "\n"
    "  --topology T         an hwloc XML file (a name with .xml or /), or a\n"
    "                       description such as \"package:2 numa:2 core:4 pu:1\"\n"
    "                       (default: this machine)\n"
    "  --grid SPEC          audits this grid, first dim fastest: tp=2,cp=2,dp=2\n"
    "  --ranks-per-node N   ranks of a host, each host such a machine; 0: one host\n"
    "                       (default 0)\n"
    "  --policy P           binding of the ranks: none, core, scatter, numa, package\n"
    "                       (default core); the variable COLO_BIND=P makes a job bind\n"
    "                       its threads so\n"
    "  --bind               lists the processors of each rank\n"
    "  --src, --dst SPEC, --batch B, --seq N, --hidden H, --dtype T,\n"
    "  --output full|sharded, --grad partial|disjoint\n"
    "                       a bridge as colo-plan takes it (default bf16, full,\n"
    "                       partial); prints its bytes across slow links\n"
    "  --world FOLDER       each rank of a job (torchrun, mpirun, srun) runs this;\n"
    "                       prints which ranks share a node, what carries each pair\n"
    "                       and why. The folder is new, and all hosts see it\n"
    "  --json               for programs; the keys are in docs/runtime/topology.md\n"
    "  --version, --help, -h\n"
    "\n"
    "Example: 8 ranks on a machine with two packages of four cores\n"
    "  colo-info --topology \"package:2 core:4 pu:1\" --grid dp=2,tp=4\n"
    "\n"
    "Colour only on a terminal, never with NO_COLOR.\n"
    "Exit: 0 ok, 1 found a problem, 2 wrong use.\n";

#define OPTIONS(X)                                \
    X(TOPOLOGY, .name = "--topology")             \
    X(GRID, .name = "--grid")                     \
    X(RANKS_PER_NODE, .name = "--ranks-per-node") \
    X(POLICY, .name = "--policy")                 \
    X(BIND, .name = "--bind", .flag = true)       \
    X(SRC, .name = "--src")                       \
    X(DST, .name = "--dst")                       \
    X(BATCH, .name = "--batch")                   \
    X(SEQ, .name = "--seq")                       \
    X(HIDDEN, .name = "--hidden")                 \
    X(DTYPE, .name = "--dtype")                   \
    X(OUTPUT, .name = "--output")                 \
    X(GRAD, .name = "--grad")                     \
    X(WORLD, .name = "--world")                   \
    X(JSON, .name = "--json", .flag = true)       \
    X(VERSION, .name = "--version", .flag = true) \
    X(HELP, .name = "--help", .flag = true)

enum { OPTIONS(TOOL_OPTION_ID) OPT_COUNT };
static tool_option_t options[OPT_COUNT] = {OPTIONS(TOOL_OPTION_ROW)};

static void add_ranks(info_ask_t *ask, const colo_grid_t *grid)
{
    if (ask->world < grid->offset + grid->size)
        ask->world = grid->offset + grid->size;
}

static int read_bridge(info_ask_t *ask)
{
    enum { REQUIRED = 5 };
    static const int of_bridge[] = {OPT_SRC,    OPT_DST,   OPT_BATCH,  OPT_SEQ,
                                    OPT_HIDDEN, OPT_DTYPE, OPT_OUTPUT, OPT_GRAD};
    const tool_option_t *given = NULL;
    for (size_t i = 0; i < sizeof of_bridge / sizeof of_bridge[0]; i++)
        if (options[of_bridge[i]].given)
            given = &options[of_bridge[i]];
    if (!given)
        return TOOL_OK;
    for (int i = 0; i < REQUIRED; i++)
        if (!options[of_bridge[i]].given)
            return tool_refuse("%s is missing; %s needs it; see --help", options[of_bridge[i]].name,
                               given->name);

    colo_plan_config_t *c = &ask->config;
    *c = (colo_plan_config_t){COLO_PLAN_CONFIG_INIT,
                              .src = &ask->src,
                              .dst = &ask->dst,
                              .dtype = COLO_BF16,
                              .output = COLO_OUTPUT_FULL_SEQ,
                              .grad = COLO_GRAD_PARTIAL};
    TOOL_TRY(tool_layouts(&options[OPT_SRC], &options[OPT_DST], NULL, INFO_PLANS_MAX, &ask->src,
                          &ask->dst));
    add_ranks(ask, &ask->src.grid);
    add_ranks(ask, &ask->dst.grid);
    TOOL_TRY(tool_i64(&options[OPT_BATCH], 1, INT64_MAX, &c->shape.samples));
    TOOL_TRY(tool_i64(&options[OPT_SEQ], 1, INT64_MAX, &c->shape.rows));
    TOOL_TRY(tool_i64(&options[OPT_HIDDEN], 1, INT64_MAX, &c->shape.features));
    TOOL_TRY(tool_dtype(&options[OPT_DTYPE], &c->dtype));
    TOOL_TRY(tool_output(&options[OPT_OUTPUT], &c->output));
    TOOL_TRY(tool_grad(&options[OPT_GRAD], &c->grad));
    ask->bridge = true;
    return TOOL_OK;
}

static int read_ask(info_ask_t *ask)
{
    ask->json = options[OPT_JSON].given;
    ask->topology = options[OPT_TOPOLOGY].value;
    ask->bind = options[OPT_BIND].given;
    ask->policy = COLO_BIND_CORE;
    TOOL_TRY(tool_i64(&options[OPT_RANKS_PER_NODE], 0, COLO_TOPOLOGY_PU_MAX, &ask->ranks_per_node));
    if (options[OPT_POLICY].given && colo_bind_parse(options[OPT_POLICY].value, &ask->policy) < 0)
        return tool_wrong(&options[OPT_POLICY]);
    if (options[OPT_GRID].given) {
        TOOL_TRY(tool_grid(&options[OPT_GRID], COLO_TOPOLOGY_WORLD_MAX, &ask->grid));
        add_ranks(ask, &ask->grid);
        ask->audit = true;
    }
    TOOL_TRY(read_bridge(ask));
    if (ask->world > INFO_PLANS_MAX && ask->bridge)
        return tool_refuse("--grid: %lld ranks; bridges of worlds up to %lld are counted",
                           (long long)ask->world, (long long)INFO_PLANS_MAX);
    ask->config.ranks_per_node = ask->ranks_per_node;
    if (ask->world == 0)
        ask->world = ask->ranks_per_node;
    if (info_is_plain(ask) && (options[OPT_RANKS_PER_NODE].given || options[OPT_POLICY].given))
        return tool_refuse("%s: no ranks are named; give --grid, --bind or --src and --dst",
                           options[OPT_POLICY].given ? "--policy" : "--ranks-per-node");
    if (ask->bind && ask->world == 0)
        return tool_refuse(
            "--bind: the number of ranks is missing; give --grid or --ranks-per-node");
    if (ask->bind && ask->world > INFO_RANKS_MAX)
        return tool_refuse("--bind: %lld ranks; up to %d are listed", (long long)ask->world,
                           INFO_RANKS_MAX);
    return TOOL_OK;
}

int main(int argc, char **argv)
{
    static info_ask_t ask;
    static info_found_t found;
    int rc = tool_start(options, OPT_COUNT, argc, argv, help, "");
    if (rc != TOOL_GO_ON)
        return rc;
    for (int i = 0; i < OPT_COUNT && options[OPT_WORLD].given; i++)
        if (options[i].given && i != OPT_WORLD)
            return tool_refuse("%s: not with --world", options[i].name);
    if (options[OPT_WORLD].given)
        return tool_finish(info_world(options[OPT_WORLD].value));
    TOOL_TRY(read_ask(&ask));
    setenv("HWLOC_HIDE_ERRORS", "2", 0); /* what it has to say about a file is our one line */
    rc = info_find(&ask, &found);
    if (rc == TOOL_OK)
        rc = ask.json ? info_print_json(&ask, &found) : info_print_text(&ask, &found);
    if (rc == TOOL_OK && info_is_plain(&ask) && colo_env_check(NULL) < 0)
        rc = tool_problem("%s", colo_last_error());
    info_forget(&found);
    return tool_finish(rc);
}
