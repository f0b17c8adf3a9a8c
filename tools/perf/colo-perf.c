/* SPDX-License-Identifier: Apache-2.0 */
/*
 * colo-perf.c - how fast this machine is, and how fast the library is on it, in one run.
 *
 * Flags and columns are those of nccl-tests. Every figure stands next to the limit that was
 * measured a moment before on the same device, and every result is checked in the run: a #wrong
 * that is not 0 is exit status 1. This file reads the command line. What is measured is in link.c
 * (one GPU), links.c (between GPUs), perf/bridge.c and perf/logprob.c; plot.c draws.
 */
#include "perf.h"

#include "out-file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const char tool_name[] = "colo-perf";

static const char help[] =
    "usage: colo-perf link|bridge|logprob [options]\n"
    "       colo-perf plot FILE --svg F\n"
    "\n"
    "link measures the memory of one GPU: cudaMemcpyAsync, a copy kernel, the\n"
    "bridge's local copy, and a kernel that only reads. Then it measures links\n"
    "between 2, 4 ... all GPUs, by size: stores into a peer's memory, copies, NCCL's\n"
    "send/receive and all-gather.\n"
    "\n"
    "bridge measures pairs of layouts, forward and backward. Ranks are threads with a\n"
    "GPU each. It times the library's bridge over NCCL and over peer memory, its\n"
    "COLLECTIVE, the passes that runtimes run today (reference), and as few passes as\n"
    "collectives allow (tuned). Next to them are the same bytes as plain stores into\n"
    "the peers (push), and one copy of what stays (copy).\n"
    "\n"
    "logprob measures the loss on logits of one GPU, forward and backward, against\n"
    "the read and copy bandwidth of the same run.\n"
    "\n"
    "plot draws what --json recorded, on any machine.\n"
    "\n"
    "  -b BYTES             link: smallest size (1M). bridge: sizes of the larger\n"
    "                       tensor of a rank, instead of --seq. K, M and G are powers\n"
    "                       of 1024\n"
    "  -e BYTES             largest size (1G)\n"
    "  -f N                 factor from size to size (4)\n"
    "  -g N                 GPUs (all; logprob: 1)\n"
    "  -w N                 launches that do not count (5)\n"
    "  -n N                 repetitions that count (20); the median is printed.\n"
    "                       Between GPUs a repetition is 3 to 20 launches in a row,\n"
    "                       more if the size is small; lines with (g) replay a CUDA\n"
    "                       graph\n"
    "  --src SPEC           bridge: the encoder's grid, first dim fastest: tp=1,dp=4\n"
    "  --dst SPEC           bridge: the LLM's grid: tp=1,cp=2,dp=2\n"
    "  --layouts ENTRY...   bridge: several pairs instead, each SRC->DST in quotes\n"
    "  --batch B            bridge: samples of the global batch (16)\n"
    "  --seq N              bridge: rows of a sample (8192); -b and -e choose others\n"
    "  --hidden H           bridge: features of a row (4096)\n"
    "  --axes A             bridge: memory order, bsh, sbh, th or both, which is bsh,\n"
    "                       then sbh (bsh)\n"
    "  --dtype T            bridge: bf16, f16 or f32 (bf16)\n"
    "  --output O           bridge: sharded: a rank gets its own rows; full: all\n"
    "                       (sharded)\n"
    "  --grad G             bridge, full: partial: values to be summed over cp;\n"
    "                       disjoint: zero outside own rows (partial)\n"
    "  --tokens N           logprob: rows of the logits (8192)\n"
    "  --vocab N            logprob: columns of the logits (151936), bf16\n"
    "  --entropy            logprob: with entropy and its gradient\n"
    "  --json               for programs; the keys are in docs/runtime/perf.md\n"
    "  --svg F              also draws bandwidth by size, next to the limit, on\n"
    "                       logarithmic axes, as a page in the file F\n"
    "  --version, --help, -h\n"
    "\n"
    "Example: the bridge of a 4-GPU host, a picture next to the table\n"
    "  colo-perf bridge --src tp=1,dp=4 --dst tp=1,cp=2,dp=2 -b 64K -e 1G \\\n"
    "            -f 8 --svg bridge.svg\n"
    "\n"
    "Example: the loss against memory bandwidth\n"
    "  colo-perf logprob -n 50\n"
    "\n"
    "Exit: 0 ok, 1 a wrong result or a failure, 2 wrong use or no GPU.\n";

static const char *const commands[] = {"link", "bridge", "logprob", "plot", NULL};
enum { LINK = 1, BRIDGE = 2, LOGPROB = 4, PLOT = 8 };
#define OPTIONS(X)                                                           \
    X(BEGIN, .name = "-b", .uses = LINK | BRIDGE)                            \
    X(END, .name = "-e", .uses = LINK | BRIDGE)                              \
    X(FACTOR, .name = "-f", .uses = LINK | BRIDGE)                           \
    X(GPUS, .name = "-g", .uses = LINK | BRIDGE | LOGPROB)                   \
    X(WARMUP, .name = "-w", .uses = LINK | BRIDGE | LOGPROB)                 \
    X(ITERS, .name = "-n", .uses = LINK | BRIDGE | LOGPROB)                  \
    X(SRC, .name = "--src", .uses = BRIDGE)                                  \
    X(DST, .name = "--dst", .uses = BRIDGE)                                  \
    X(LAYOUTS, .name = "--layouts", .list = true, .uses = BRIDGE)            \
    X(BATCH, .name = "--batch", .uses = BRIDGE)                              \
    X(SEQ, .name = "--seq", .uses = BRIDGE)                                  \
    X(HIDDEN, .name = "--hidden", .uses = BRIDGE)                            \
    X(AXES, .name = "--axes", .uses = BRIDGE)                                \
    X(DTYPE, .name = "--dtype", .uses = BRIDGE)                              \
    X(OUTPUT, .name = "--output", .uses = BRIDGE)                            \
    X(GRAD, .name = "--grad", .uses = BRIDGE)                                \
    X(TOKENS, .name = "--tokens", .uses = LOGPROB)                           \
    X(VOCAB, .name = "--vocab", .uses = LOGPROB)                             \
    X(ENTROPY, .name = "--entropy", .flag = true, .uses = LOGPROB)           \
    X(JSON, .name = "--json", .flag = true, .uses = LINK | BRIDGE | LOGPROB) \
    X(SVG, .name = "--svg", .uses = LINK | BRIDGE | LOGPROB | PLOT)          \
    X(VERSION, .name = "--version", .flag = true)                            \
    X(HELP, .name = "--help", .flag = true)

enum { OPTIONS(TOOL_OPTION_ID) OPT_COUNT };

/* "8", "64K", "1M", "2G" */
static int size_of(const tool_option_t *o, int64_t *bytes)
{
    char q[TOOL_QUOTE_MAX], *end;
    if (!o->given)
        return TOOL_OK;
    errno = 0;
    long long v = strtoll(o->value, &end, 10);
    static const char units[] = "KMG";
    const char *unit = *end ? strchr(units, *end) : NULL;
    const int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    bool ok = o->value[0] >= '0' && o->value[0] <= '9' && !errno && (!*end || (unit && !end[1]));
    if (!ok || v < 16 >> (shift < 4 ? shift : 4) || v > INT64_C(1) << 40 >> shift)
        return tool_refuse("%s: %s is no size from 16 bytes to 1024G (8M, 64K)", o->name,
                           tool_quote(q, o->value));
    *bytes = (int64_t)v << shift;
    return TOOL_OK;
}

static int read_pair(perf_t *p, const tool_option_t *src, const tool_option_t *dst)
{
    if (p->npairs == PERF_PAIRS_MAX)
        return tool_refuse("%s: more than %d pairs", src->name, PERF_PAIRS_MAX);
    perf_pair_t *pair = &p->pair[p->npairs++];
    colo_layout_t from, to;
    TOOL_TRY(tool_layouts(src, dst, NULL, 1024, &from, &to));
    pair->src = from.grid;
    pair->dst = to.grid;
    colo_grid_print(&pair->src, pair->src_name, sizeof pair->src_name);
    colo_grid_print(&pair->dst, pair->dst_name, sizeof pair->dst_name);
    return TOOL_OK;
}

static int read_pairs(perf_t *p, const tool_option_t *o)
{
    char where[32], q[TOOL_QUOTE_MAX];
    if (!o[OPT_LAYOUTS].given) {
        for (int i = OPT_SRC; i <= OPT_DST; i++)
            if (!o[i].given)
                return tool_refuse("%s is missing; see --help", o[i].name);
        return read_pair(p, &o[OPT_SRC], &o[OPT_DST]);
    }
    if (o[OPT_SRC].given || o[OPT_DST].given)
        return tool_refuse("%s: not with --layouts", o[OPT_SRC].given ? "--src" : "--dst");
    for (int i = 0; i < o[OPT_LAYOUTS].count; i++) {
        char copy[512];
        snprintf(where, sizeof where, "--layouts entry %d", i + 1);
        const int len = snprintf(copy, sizeof copy, "%s", o[OPT_LAYOUTS].values[i]);
        char *arrow = strstr(copy, "->");
        if (len >= (int)sizeof copy || !arrow)
            return tool_refuse("%s: %s is not SRC->DST", where,
                               tool_quote(q, o[OPT_LAYOUTS].values[i]));
        *arrow = '\0';
        const tool_option_t src = {.name = where, .value = copy},
                            dst = {.name = where, .value = arrow + 2};
        TOOL_TRY(read_pair(p, &src, &dst));
    }
    return TOOL_OK;
}

static int read_bridge(perf_t *p, const tool_option_t *o)
{
    static const char *const axes[] = {"bsh", "sbh", "th", "both", NULL};
    static const char *const dtypes[] = {"bf16", "f16", "f32", NULL};
    static const colo_dtype_t dtype[] = {COLO_BF16, COLO_F16, COLO_F32};
    int axis = 0, type = 0;
    p->shape = (colo_shape_t){16, 8192, 4096, 0};
    p->output = COLO_OUTPUT_SHARDED;
    p->grad = COLO_GRAD_PARTIAL;
    TOOL_TRY(tool_i64(&o[OPT_BATCH], 1, INT64_C(1) << 30, &p->shape.samples));
    TOOL_TRY(tool_i64(&o[OPT_SEQ], 1, INT64_C(1) << 40, &p->shape.rows));
    TOOL_TRY(tool_i64(&o[OPT_HIDDEN], 1, INT64_C(1) << 30, &p->shape.features));
    TOOL_TRY(tool_word(&o[OPT_AXES], axes, &axis));
    TOOL_TRY(tool_word(&o[OPT_DTYPE], dtypes, &type));
    TOOL_TRY(tool_output(&o[OPT_OUTPUT], &p->output));
    TOOL_TRY(tool_grad(&o[OPT_GRAD], &p->grad));
    p->dtype = dtype[type];
    p->axes[0] = axis == 3 ? "bsh" : axes[axis];
    p->axes[1] = axis == 3 ? "sbh" : NULL;
    if (p->sizes && o[OPT_SEQ].given)
        return tool_refuse("--seq: -b and -e choose it");
    return read_pairs(p, o);
}

static int read_options(perf_t *p, tool_option_t *o, unsigned what)
{
    const struct {
        int index;
        int64_t lo, hi, *value;
    } numbers[] = {
        {OPT_FACTOR, 2, 1 << 20, &p->factor},          {OPT_GPUS, 1, 1024, &p->gpus},
        {OPT_WARMUP, 0, 1000000, &p->warmup},          {OPT_ITERS, 1, 1000000, &p->iters},
        {OPT_TOKENS, 1, INT64_C(1) << 30, &p->tokens}, {OPT_VOCAB, 2, INT64_C(1) << 30, &p->vocab}};
    for (int i = 0; i < OPT_COUNT; i++)
        if (o[i].given && !(o[i].uses & 1u << what))
            return tool_refuse("%s: not with %s", o[i].name, commands[what]);
    TOOL_TRY(size_of(&o[OPT_BEGIN], &p->begin));
    TOOL_TRY(size_of(&o[OPT_END], &p->end));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        TOOL_TRY(tool_i64(&o[numbers[i].index], numbers[i].lo, numbers[i].hi, numbers[i].value));
    p->sizes = o[OPT_BEGIN].given || o[OPT_END].given;
    p->entropy = o[OPT_ENTROPY].given;
    p->json = o[OPT_JSON].given;
    p->svg = o[OPT_SVG].value;
    if (p->begin > p->end)
        return tool_refuse("-b %lld is larger than -e %lld", (long long)p->begin,
                           (long long)p->end);
    if (1u << what == LOGPROB && p->gpus > 1)
        return tool_refuse("-g %lld: logprob measures one GPU", (long long)p->gpus);
    if (1u << what == PLOT && !p->svg)
        return tool_refuse("--svg is missing; see --help");
    if (p->svg)
        TOOL_TRY(tool_svg(TOOL_PROBLEM, p->svg, out_file_check(p->svg)));
    return 1u << what == BRIDGE ? read_bridge(p, o) : TOOL_OK;
}

static int measure(perf_t *p, unsigned what, int argc, char **argv)
{
    if (1u << what == PLOT)
        return perf_plot_file(p);
    TOOL_TRY(perf_describe(p, argc, argv));
    int rc = TOOL_OK;
    switch (1u << what) {
    case LINK:
        rc = perf_link(p);
        rc = rc || p->gpus < 2 ? rc : perf_links(p);
        break;
    case BRIDGE:
        rc = perf_bridge(p);
        break;
    default:
        rc = perf_logprob(p);
    }
    rc = rc ? rc : perf_doc_finish(p);
    json_decref(p->doc);
    if (rc == TOOL_OK && p->wrong)
        rc = tool_problem("%lld results are wrong", p->wrong);
    return rc;
}

int main(int argc, char **argv)
{
    tool_option_t o[OPT_COUNT] = {OPTIONS(TOOL_OPTION_ROW)};
    static perf_t p = {.begin = 1 << 20,
                       .end = 1 << 30,
                       .factor = 4,
                       .warmup = 5,
                       .iters = 20,
                       .tokens = 8192,
                       .vocab = 151936};
    const char *name = argc > 1 && argv[1][0] != '-' ? argv[1] : NULL;
    int skip = name ? 1 : 0;
    unsigned what = 0;
    char q[TOOL_QUOTE_MAX];
    while (name && commands[what] && strcmp(commands[what], name) != 0)
        what++;
    if (name && commands[what] && 1u << what == PLOT && argc > 2 && argv[2][0] != '-') {
        p.file = argv[2];
        skip++;
    }
    const int rc = tool_start(o, OPT_COUNT, argc - skip, argv + skip, help, "");
    if (rc != TOOL_GO_ON)
        return rc;
    if (!name || !commands[what])
        return tool_refuse("%s%s, expected link, bridge, logprob or plot; see --help",
                           name ? tool_quote(q, name) : "a subcommand",
                           name ? " is no subcommand" : " is missing");
    if (1u << what == PLOT && !p.file)
        return tool_refuse("plot: which file? see --help");
    TOOL_TRY(read_options(&p, o, what));
    return tool_finish(measure(&p, what, argc, argv));
}
