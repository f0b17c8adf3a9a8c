/* SPDX-License-Identifier: Apache-2.0 */
/*
 * colo-plan.c - what moves where between two layouts, without a GPU and without communication.
 *
 * This file turns the command line into a plan_ask_t: the two layouts as a bridge would declare
 * them and the sizes. It says no as early as it can and names the option; what only the library can
 * judge (does 2C divide the sequence) is the library's error message. Counting is in sweep.c,
 * printing in plan/text.c and plan/json.c. Exit 0: printed; 1: these layouts cannot be planned, or
 * the output could not be written; 2: wrong use, one line on stderr and nothing on stdout.
 */
#include "plan-tool.h"

#include "out-file.h"

#include <stdlib.h>
#include <string.h>

#include <colobridge/version.h>

const char tool_name[] = "colo-plan";

/* clang-format off: rows as they are printed */
static const char help[] =
    "usage: colo-plan --src SPEC --dst SPEC [options]\n"
    "       colo-plan --src SPEC --dst SPEC --segments F | --packing F [options]\n"
    "       colo-plan [--src SPEC] --compare ENTRY... [options]\n"
    "\n"
    "colo-plan shows what a bridge moves between two layouts of the same ranks,\n"
    "forward and backward. With --compare it compares several pairs: bytes, messages,\n"
    "memory, estimated time. It needs no GPU. Without options it shows the first\n"
    "example.\n"
    "\n"
    "  --src SPEC           the encoder's grid, first dim fastest: tp=2,dp=4 (@8:\n"
    "                       from rank 8)\n"
    "  --dst SPEC           the LLM's grid: tp=2,cp=2,dp=2\n"
    "  --extra NAME         dims of either grid, joined by -, whose ranks hold\n"
    "                       copies; a dim above 1 that is none of tp, cp, pp, dp, ep\n"
    "                       is refused unless named here\n"
    "  --batch B            samples of the global batch (default 16)\n"
    "  --seq N              rows of a sample that cross the bridge (default 8192)\n"
    "  --hidden H           features of a row (default 4096)\n"
    "  --dtype T            f32, f64, bf16, f16, i8, u8, i16, i32, i64 (default bf16)\n"
    "  --axes A             memory order, bsh, sbh or th (default bsh); changes no\n"
    "                       byte\n"
    "  --llm-seq S          positions of the LLM's sequence (default: offset + N)\n"
    "  --offset P           position of the first row in it (default 0)\n"
    "  --output O           full: each rank gets all rows of its samples; sharded:\n"
    "                       only the rows that it owns (default full)\n"
    "  --grad G             partial: the bridge sums full-length gradients over cp,\n"
    "                       as the library does by default; disjoint: each rank's\n"
    "                       gradient is zero outside its own rows, so only those rows\n"
    "                       travel (default partial)\n"
    "  --ranks-per-node N   0: one node (default 0); peers on the node are preferred\n"
    "  --nodes N,N,...      the node of each rank, in place of --ranks-per-node:\n"
    "                       nodes of any size, whose ranks need not follow each other\n"
    "  --one-level          each rank receives what it lacks by itself; without this\n"
    "                       option, data that several ranks of a node lack enter the\n"
    "                       node once, and the ranks pass them on; gradients of a\n"
    "                       node are added up before they leave it\n"
    "  --src-stage X        pp stage that holds the encoder's output: last, any or a\n"
    "                       number (default last)\n"
    "  --dst-stage X        pp stage that consumes it (default 0)\n"
    "  --sp SIDE            sequence parallel over tp: none, src, dst or both\n"
    "                       (default none)\n"
    "  --max-ranks N        lists ranks one by one up to this many (default 64)\n"
    "  --rank R             prints only this rank, with the boxes that it sends and\n"
    "                       receives\n"
    "  --svg F              also draws the messages between ranks, as a page in the\n"
    "                       file F; with --rank it draws only the ranks that R\n"
    "                       exchanges with\n"
    "  --json               for programs; the keys are in docs/concepts/plan.md\n"
    "  --compare ENTRY...   each is DST, with --src, or SRC->DST (in quotes: > is the\n"
    "                       shell's); options of the entry follow after colons:\n"
    "                       tp=2,cp=2,dp=2:sharded:sp=dst. full, sharded, partial,\n"
    "                       disjoint, sp=src, sp=dst, sp=both\n";

/* A string may have 4095 bytes. */
static const char rest_of_help[] =
    "  --segments F         plans the ragged batch in file F in place of --batch,\n"
    "                       --seq: one JSON object of lists of integers, see the\n"
    "                       example; shows rows per rank and the load of each source\n"
    "                       replica, as it is and after colo_segments_balance()\n"
    "  --segment E          with --segments and --svg: also draws the path of segment\n"
    "                       E\n"
    "  --packing F          plans packed sequences, which change their cut, in the\n"
    "                       same way; the file has their lengths and the cut of\n"
    "                       either side, see the example\n"
    "  --sequence Q         with --packing and --svg: also draws the path of sequence\n"
    "                       Q\n"
    "  --alpha A[,B]        microseconds that a message costs inside a node[, between\n"
    "                       nodes] (default 8,12); one number stands for both\n"
    "  --beta A[,B]         GB/s of a link inside a node[, between nodes] (default\n"
    "                       285,45)\n"
    "  --version, --help, -h\n"
    "\n"
    "Example: 8 ranks, the encoder TP 2 x DP 4, the LLM TP 2 x CP 2 x DP 2\n"
    "  colo-plan --src tp=2,dp=4 --dst tp=2,cp=2,dp=2\n"
    "  colo-plan --src tp=2,dp=4 --dst tp=2,cp=2,dp=2 --batch 16 --seq 8192 \\\n"
    "            --hidden 4096 --dtype bf16 --output sharded\n"
    "\n"
    "Example: the same encoder, three layouts of the LLM\n"
    "  colo-plan --src tp=2,dp=4 --compare tp=2,cp=2,dp=2:sharded tp=4,dp=2 \\\n"
    "            tp=1,cp=4,dp=2:sharded --batch 16 --seq 8192 --hidden 4096 \\\n"
    "            --ranks-per-node 4 --svg compare.svg\n"
    "\n"
    "Example: a ragged batch of 3 images, the second without rows, in 2 packed\n"
    "sequences. Row r of image e is made by encoder replica src_dp[e], and is at\n"
    "position pos[e] + r of sequence seq[e]\n"
    "  echo '{\"rows\": [3, 0, 5], \"src_dp\": [0, 1, 1], \"seq\": [0, 0, 1],\n"
    "         \"pos\": [2, 9, 1], \"seq_len\": [12, 8],\n"
    "         \"seq_dp\": [0, 0]}' >batch.json\n"
    "  colo-plan --src dp=2 --dst cp=2,dp=1 --segments batch.json --hidden 4 \\\n"
    "            --output sharded --svg batch.svg --segment 2\n"
    "\n"
    "Example: 2 packed sequences change their cut inside the LLM. seq_dp, seq_cp,\n"
    "seq_first, seq_room, halo_before of dst, and the pieces of a table are optional,\n"
    "as in docs/concepts/ragged.md; heads divides the features over cp\n"
    "  echo '{\"seq_len\": [8, 4], \"src\": {\"split\": \"zigzag\"},\n"
    "         \"dst\": {\"split\": \"block\", \"seq_cp\": [2, 1],\n"
    "                 \"seq_first\": [0, 1]}}' >packing.json\n"
    "  colo-plan --src cp=2 --dst cp=2 --packing packing.json --hidden 4 \\\n"
    "            --svg packing.svg --sequence 0\n"
    "\n"
    "Colour only on a terminal, never with NO_COLOR.\n"
    "Exit: 0 ok, 1 found a problem, 2 wrong use.\n";
/* clang-format on */

#define OPTIONS(X)                                                                  \
    X(SRC, .name = "--src")                                                         \
    X(DST, .name = "--dst")                                                         \
    X(EXTRA, .name = "--extra")                                                     \
    X(BATCH, .name = "--batch") /* the three sizes, in the order of colo_shape_t */ \
    X(SEQ, .name = "--seq")                                                         \
    X(HIDDEN, .name = "--hidden")                                                   \
    X(DTYPE, .name = "--dtype")                                                     \
    X(AXES, .name = "--axes")                                                       \
    X(LLM_SEQ, .name = "--llm-seq")                                                 \
    X(OFFSET, .name = "--offset")                                                   \
    X(OUTPUT, .name = "--output")                                                   \
    X(GRAD, .name = "--grad")                                                       \
    X(RANKS_PER_NODE, .name = "--ranks-per-node")                                   \
    X(NODES, .name = "--nodes")                                                     \
    X(ONE_LEVEL, .name = "--one-level", .flag = true)                               \
    X(SRC_STAGE, .name = "--src-stage")                                             \
    X(DST_STAGE, .name = "--dst-stage")                                             \
    X(SP, .name = "--sp")                                                           \
    X(MAX_RANKS, .name = "--max-ranks")                                             \
    X(RANK, .name = "--rank")                                                       \
    X(SVG, .name = "--svg")                                                         \
    X(COMPARE, .name = "--compare", .list = true)                                   \
    X(SEGMENTS, .name = "--segments")                                               \
    X(SEGMENT, .name = "--segment")                                                 \
    X(PACKING, .name = "--packing")                                                 \
    X(SEQUENCE, .name = "--sequence")                                               \
    X(ALPHA, .name = "--alpha")                                                     \
    X(BETA, .name = "--beta")                                                       \
    X(JSON, .name = "--json", .flag = true)                                         \
    X(VERSION, .name = "--version", .flag = true)                                   \
    X(HELP, .name = "--help", .flag = true)

enum { OPTIONS(TOOL_OPTION_ID) OPT_COUNT };
static tool_option_t options[OPT_COUNT] = {OPTIONS(TOOL_OPTION_ROW)};

/* --src-stage, --dst-stage: last, any or a number below the grid's pp. */
static int read_stage(const tool_option_t *o, const char *grid_option, colo_layout_t *layout)
{
    if (!o->given)
        return TOOL_OK;
    int64_t stage = COLO_STAGE_ANY, stages = colo_grid_extent(&layout->grid, "pp");
    if (strcmp(o->value, "last") == 0)
        stage = COLO_STAGE_LAST;
    else if (strcmp(o->value, "any") != 0)
        TOOL_TRY(tool_i64(o, 0, INT64_MAX, &stage));
    if (stage >= stages)
        return tool_refuse("%s: stage %lld is outside 0..%lld, the pp of %s", o->name,
                           (long long)stage, (long long)stages - 1, grid_option);
    if (stage != COLO_STAGE_ANY && colo_grid_dim(&layout->grid, "pp") < 0)
        return TOOL_OK; /* one stage, and every rank is on it */
    const char *dim = stage == COLO_STAGE_ANY ? NULL : "pp";
    return colo_layout_stage(layout, dim, stage) < 0 ? tool_wrong(o) : TOOL_OK;
}

static int split_tp(const tool_option_t *o, colo_layout_t *layout)
{
    if (colo_layout_split(layout, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK) < 0)
        return tool_wrong(o);
    return TOOL_OK;
}

static const char *const sp_sides[] = {"none", "src", "dst", "both", NULL};

/* @src_spec, @dst_spec: --src and --dst, or the halves of an entry; @sp: index in sp_sides */
static int read_layouts(plan_ask_t *ask, const tool_option_t *src_spec,
                        const tool_option_t *dst_spec, int sp)
{
    const colo_grid_t *src = &ask->src.grid, *dst = &ask->dst.grid;
    TOOL_TRY(tool_layouts(src_spec, dst_spec, options[OPT_EXTRA].value, PLAN_WORLD_MAX, &ask->src,
                          &ask->dst));
    TOOL_TRY(read_stage(&options[OPT_SRC_STAGE], "--src", &ask->src));
    TOOL_TRY(read_stage(&options[OPT_DST_STAGE], "--dst", &ask->dst));

    if (sp & 1)
        TOOL_TRY(split_tp(&options[OPT_SP], &ask->src));
    if (sp & 2)
        TOOL_TRY(split_tp(&options[OPT_SP], &ask->dst));

    int64_t src_end = src->offset + src->size, dst_end = dst->offset + dst->size;
    ask->world = src_end > dst_end ? src_end : dst_end;
    ask->first = src->offset < dst->offset ? src->offset : dst->offset;
    return TOOL_OK;
}

/* A name in --extra that no grid of the @n asks has is a typing error. */
static int check_extra(const plan_ask_t *const *asks, int n)
{
    const char *list = options[OPT_EXTRA].value;
    char name[COLO_DIM_NAME_MAX], q[TOOL_QUOTE_MAX];
    for (size_t len = 0; list; list = list[len] ? list + len + 1 : NULL) {
        bool found = false;
        len = strcspn(list, "-");
        snprintf(name, sizeof name, "%.*s", len < sizeof name ? (int)len : 0, list);
        for (int i = 0; i < n && !found; i++)
            found = colo_grid_dim(&asks[i]->src.grid, name) >= 0 ||
                    colo_grid_dim(&asks[i]->dst.grid, name) >= 0;
        if (!found)
            return tool_refuse("--extra: %s names a dim that no grid has (byte %zu)",
                               tool_quote(q, options[OPT_EXTRA].value),
                               (size_t)(list - options[OPT_EXTRA].value));
    }
    return TOOL_OK;
}

/* One number for each rank of the largest of the @n asks. */
static int check_nodes(const plan_ask_t *const *asks, int n)
{
    const colo_nodes_t *nodes = asks[0]->config.nodes;
    int64_t world = 0;
    for (int i = 0; i < n; i++)
        world = asks[i]->world > world ? asks[i]->world : world;
    const bool few = nodes && colo_nodes_find(nodes, world - 1) < 0;
    if (few || colo_nodes_find(nodes, world) >= 0)
        return tool_refuse("--nodes: rank %lld %s; give %lld numbers, one per rank",
                           (long long)world - few, few ? "has no node" : "does not exist",
                           (long long)world);
    return TOOL_OK;
}

/* The LLM's sequence may be longer than the rows that cross: where do they sit in it? Only the
 * destination is cut along it; an encoder with cp cuts its own rows. */
static int read_positions(plan_ask_t *ask)
{
    int64_t rows = ask->config.shape.rows, offset = 0, positions;
    TOOL_TRY(tool_i64(&options[OPT_OFFSET], 0, INT64_MAX - rows, &offset));
    positions = offset + rows;
    TOOL_TRY(tool_i64(&options[OPT_LLM_SEQ], 1, INT64_MAX, &positions));
    if (positions - rows < offset)
        return tool_refuse(
            "--llm-seq: %lld positions cannot hold --offset %lld and --seq %lld rows",
            (long long)positions, (long long)offset, (long long)rows);
    if (options[OPT_OFFSET].given || options[OPT_LLM_SEQ].given)
        if (colo_layout_map_offset(&ask->dst, offset, positions) < 0)
            return tool_wrong(&options[OPT_LLM_SEQ]);
    return TOOL_OK;
}

static int read_model(plan_ask_t *ask)
{
    double alpha[2] = PLAN_ALPHA_US, beta[2] = PLAN_BETA_GB_S;
    TOOL_TRY(tool_pair(&options[OPT_ALPHA], 0, 1e9, alpha));
    TOOL_TRY(tool_pair(&options[OPT_BETA], 1e-6, 1e9, beta));
    for (int i = 0; i < 2; i++) {
        ask->model.alpha[i] = 1e-6 * alpha[i];
        ask->model.beta[i] = 1e9 * beta[i];
    }
    ask->own_model = options[OPT_ALPHA].given || options[OPT_BETA].given;
    return TOOL_OK;
}

/* --nodes 0,0,1,1 */
static int read_nodes(colo_plan_config_t *c)
{
    static colo_nodes_t *nodes; /* until the program ends */
    static int32_t node[PLAN_EXACT_MAX];
    const char *s = options[OPT_NODES].value;
    char q[TOOL_QUOTE_MAX];
    int64_t n = 0;
    if (!options[OPT_NODES].given)
        return TOOL_OK;
    if (options[OPT_RANKS_PER_NODE].given)
        return tool_refuse("--nodes: not with --ranks-per-node");
    do {
        const size_t digits = strspn(s, "0123456789");
        if (digits == 0 || digits > 9 || n == PLAN_EXACT_MAX)
            break;
        node[n++] = (int32_t)strtol(s, NULL, 10);
        s += digits;
    } while (*s == ',' && *++s);
    if (n == 0 || *s || s[-1] == ',')
        return tool_refuse("--nodes: %s is not a list of at most %d numbers like 0,0,1,1 (byte %d)",
                           tool_quote(q, options[OPT_NODES].value), PLAN_EXACT_MAX,
                           (int)(s - options[OPT_NODES].value));
    if (colo_nodes_create(&nodes, node, n) < 0)
        return tool_wrong(&options[OPT_NODES]);
    c->nodes = nodes;
    return TOOL_OK;
}

/* What does not depend on the layouts. */
static int read_common(plan_ask_t *ask, int *sp)
{
    static const char *const axes[] = {"bsh", "sbh", "th", NULL};
    int axis = 0;
    colo_plan_config_t *c = &ask->config;
    *c = (colo_plan_config_t){COLO_PLAN_CONFIG_INIT, .dtype = COLO_BF16,
                              .output = COLO_OUTPUT_FULL_SEQ, .grad = COLO_GRAD_PARTIAL,
                              .shape = {PLAN_SIZES, 0}};
    for (int i = 0; i < 3; i++)
        ask->assumed[i] = !options[OPT_BATCH + i].given;
    ask->item = -1;
    TOOL_TRY(tool_i64(&options[OPT_BATCH], 1, INT64_MAX, &c->shape.samples));
    TOOL_TRY(tool_i64(&options[OPT_SEQ], 1, INT64_MAX, &c->shape.rows));
    TOOL_TRY(tool_i64(&options[OPT_HIDDEN], 1, INT64_MAX, &c->shape.features));
    TOOL_TRY(tool_dtype(&options[OPT_DTYPE], &c->dtype));
    TOOL_TRY(tool_word(&options[OPT_AXES], axes, &axis));
    TOOL_TRY(tool_output(&options[OPT_OUTPUT], &c->output));
    TOOL_TRY(tool_grad(&options[OPT_GRAD], &c->grad));
    TOOL_TRY(tool_word(&options[OPT_SP], sp_sides, sp));
    TOOL_TRY(tool_i64(&options[OPT_RANKS_PER_NODE], 0, INT64_MAX, &c->ranks_per_node));
    TOOL_TRY(read_nodes(c));
    c->one_level = options[OPT_ONE_LEVEL].given;
    ask->max_ranks = 64;
    TOOL_TRY(tool_i64(&options[OPT_MAX_RANKS], 0, PLAN_WORLD_MAX, &ask->max_ranks));
    TOOL_TRY(read_model(ask));
    ask->rank = -1;
    ask->axes = axes[axis];
    ask->json = options[OPT_JSON].given;
    ask->svg = options[OPT_SVG].value;
    return ask->svg ? tool_svg(TOOL_WRONG_USE, ask->svg, out_file_check(ask->svg)) : TOOL_OK;
}

static int need(const int *which, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!options[which[i]].given)
            return tool_refuse("%s is missing; see --help", options[which[i]].name);
    return TOOL_OK;
}

/* Ranks that divide the features hold all rows. */
static int divide_features(colo_layout_t *layout, const char *side)
{
    if (layout->nsplits[COLO_AXIS_ROWS] > (colo_grid_dim(&layout->grid, "cp") >= 0))
        return tool_refuse("--sp: ranks of tp share the rows of %s, whose split is heads", side);
    colo_layout_clear(layout, COLO_AXIS_ROWS);
    if (colo_layout_split(layout, COLO_AXIS_FEATURES, "cp", COLO_SPLIT_BLOCK) < 0)
        return tool_refuse("--packing: %s.split: heads: %s", side, colo_last_error());
    return TOOL_OK;
}

/* The tables are the batch. */
static int read_batch(plan_ask_t *ask, plan_batch_t *batch)
{
    static const int other[] = {OPT_BATCH,  OPT_SEQ,    OPT_AXES, OPT_LLM_SEQ,
                                OPT_OFFSET, OPT_OUTPUT, OPT_GRAD, OPT_SEGMENTS};
    const bool packed = options[OPT_PACKING].given;
    const tool_option_t *file = &options[packed ? OPT_PACKING : OPT_SEGMENTS];
    const tool_option_t *const path[] = {&options[OPT_SEGMENT], &options[OPT_SEQUENCE]};
    for (int i = 0; i < 2; i++)
        if (path[i]->given && !(file->given && packed == (i == 1) && options[OPT_SVG].given))
            return tool_refuse("%s: only with %s and --svg", path[i]->name,
                               i ? "--packing" : "--segments");
    if (!file->given)
        return read_positions(ask);
    for (size_t i = 0; i < sizeof other / sizeof other[0] - (packed ? 0 : 3); i++)
        if (options[other[i]].given)
            return tool_refuse("%s: not with %s", options[other[i]].name, file->name);
    ask->config.shape = (colo_shape_t){.features = ask->config.shape.features};
    ask->assumed[0] = ask->assumed[1] = false;
    TOOL_TRY(plan_batch_read(batch, file->value, packed));
    ask->batch = batch;
    if (batch->heads[0])
        TOOL_TRY(divide_features(&ask->src, "src"));
    if (batch->heads[1])
        TOOL_TRY(divide_features(&ask->dst, "dst"));
    TOOL_TRY(plan_batch_place(batch, &ask->config));
    return tool_i64(path[packed], 0, batch->count - 1, &ask->item);
}

static int read_ask(plan_ask_t *ask, plan_batch_t *batch)
{
    static const int required[] = {OPT_SRC, OPT_DST};
    int sp = 0;
    TOOL_TRY(need(required, sizeof required / sizeof required[0]));
    TOOL_TRY(read_common(ask, &sp));
    TOOL_TRY(read_layouts(ask, &options[OPT_SRC], &options[OPT_DST], sp));
    TOOL_TRY(check_extra((const plan_ask_t *const[]){ask}, 1));
    TOOL_TRY(check_nodes((const plan_ask_t *const[]){ask}, 1));
    ask->config.src = &ask->src;
    ask->config.dst = &ask->dst;
    TOOL_TRY(read_batch(ask, batch));
    return tool_i64(&options[OPT_RANK], 0, ask->world - 1, &ask->rank);
}

/* ---- --compare ---- */

/* One word after a colon; @given: a bit for each kind of word that came before. */
static int read_entry_word(const char *where, const char *word, plan_entry_t *e, unsigned *given)
{
    enum { SP, OUTPUT, GRAD };
    static const char *const kinds[] = {"sp", "output", "gradient"};
    static const struct {
        const char *word;
        int kind, value;
    } known[] = {{"sp=none", SP, 0},
                 {"sp=src", SP, 1},
                 {"sp=dst", SP, 2},
                 {"sp=both", SP, 3},
                 {"full", OUTPUT, COLO_OUTPUT_FULL_SEQ},
                 {"sharded", OUTPUT, COLO_OUTPUT_SHARDED},
                 {"partial", GRAD, COLO_GRAD_PARTIAL},
                 {"disjoint", GRAD, COLO_GRAD_DISJOINT}};
    enum { KNOWN = sizeof known / sizeof known[0] };
    char q[TOOL_QUOTE_MAX];
    int i = 0;
    while (i < KNOWN && strcmp(word, known[i].word) != 0)
        i++;
    if (i == KNOWN)
        return tool_refuse(
            "%s: found %s, expected one of full, sharded, partial, disjoint, sp=SIDE", where,
            tool_quote(q, word));
    if (*given & 1U << known[i].kind)
        return tool_refuse("%s: %s given twice, again as %s", where, kinds[known[i].kind], word);
    *given |= 1U << known[i].kind;
    switch (known[i].kind) {
    case SP:
        e->sp = known[i].value;
        break;
    case OUTPUT:
        e->ask.config.output = known[i].value;
        break;
    default:
        e->ask.config.grad = known[i].value;
    }
    return TOOL_OK;
}

/* [SRC->]DST[:WORD]... */
static int read_entry(int i, const char *text, plan_entry_t *e, int sp)
{
    char *where = e->ask.where, copy[2048], q[TOOL_QUOTE_MAX];
    snprintf(where, sizeof e->ask.where, "--compare entry %d", i + 1);
    size_t n = strlen(text);
    if (n >= sizeof copy)
        return tool_refuse("%s: %zu bytes, at most %zu", where, n, sizeof copy - 1);
    memcpy(copy, text, n + 1);
    e->sp = sp;
    char *rest = copy, *word;
    unsigned given = 0;
    (void)strsep(&rest, ":"); /* the pair itself */
    while ((word = strsep(&rest, ":")))
        TOOL_TRY(read_entry_word(where, word, e, &given));
    char *arrow = strstr(copy, "->");
    tool_option_t src = {.name = where, .value = copy}, dst = src;
    if (arrow) {
        *arrow = '\0';
        dst.value = arrow + 2;
    } else if (*copy && copy[strlen(copy) - 1] == '-') { /* of ":full" nothing is left */
        return tool_refuse("%s: %s ends in -; put SRC->DST in quotes, or the shell takes the >",
                           where, tool_quote(q, copy));
    } else if (options[OPT_SRC].given) {
        src = options[OPT_SRC];
    } else {
        return tool_refuse("%s: %s names no source; give --src or SRC->DST", where,
                           tool_quote(q, text));
    }
    TOOL_TRY(read_layouts(&e->ask, &src, &dst, e->sp));
    e->ask.config.src = &e->ask.src;
    e->ask.config.dst = &e->ask.dst;
    return read_positions(&e->ask);
}

static int compare(void)
{
    static const int other[] = {OPT_DST,     OPT_RANK,    OPT_MAX_RANKS, OPT_SEGMENTS,
                                OPT_SEGMENT, OPT_PACKING, OPT_SEQUENCE};
    static plan_entry_t entries[PLAN_ENTRIES_MAX];
    const plan_ask_t *asks[PLAN_ENTRIES_MAX];
    int n = options[OPT_COMPARE].count;
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++)
        if (options[other[i]].given)
            return tool_refuse("%s: not with --compare", options[other[i]].name);
    if (n > PLAN_ENTRIES_MAX)
        return tool_refuse("--compare: %d entries, at most %d", n, PLAN_ENTRIES_MAX);
    for (int i = 0; i < n; i++) {
        int sp = 0;
        TOOL_TRY(read_common(&entries[i].ask, &sp));
        TOOL_TRY(read_entry(i, options[OPT_COMPARE].values[i], &entries[i], sp));
        asks[i] = &entries[i].ask;
    }
    TOOL_TRY(check_extra(asks, n));
    TOOL_TRY(check_nodes(asks, n));
    return plan_compare(entries, n);
}

/* One rank costs O(peers), whatever the world; only its JSON carries totals, which cost a sweep. */
static int show(const plan_ask_t *ask)
{
    const bool one = ask->rank >= 0;
    const int64_t n = one ? 1 : ask->world <= ask->max_ranks ? ask->world : 0;
    plan_sums_t sums;
    colo_plan_t **plans = calloc((size_t)n + 1, sizeof(colo_plan_t *));
    int rc = TOOL_OK;
    if (!plans)
        return tool_problem("no memory for %lld plans", (long long)n);
    if (!one || ask->json)
        rc = plan_sweep(ask, one || n == 0 ? NULL : plans, &sums);
    if (rc == TOOL_OK && one) {
        const colo_status_t st = plan_make(plans, ask, ask->rank);
        rc = st < 0 ? plan_complain(ask, st, colo_last_error()) : TOOL_OK;
    }
    if (rc == TOOL_OK && ask->svg)
        rc = plan_draw(ask);
    if (rc == TOOL_OK)
        rc = ask->json ? plan_print_json(ask, plans, n, &sums)
             : one     ? plan_print_rank(ask, plans[0])
                       : plan_print_text(ask, plans, n, &sums);
    for (int64_t r = 0; r < n; r++)
        colo_plan_destroy(&plans[r]);
    free(plans);
    return rc;
}

int main(int argc, char **argv)
{
    static plan_ask_t ask;
    static plan_batch_t batch;
    static char word[][16] = {"colo-plan", "--src", "tp=2,dp=4", "--dst", "tp=2,cp=2,dp=2"};
    char *example[] = {word[0], word[1], word[2], word[3], word[4]};
    const bool shown = argc < 2;
    int rc = tool_start(options, OPT_COUNT, shown ? 5 : argc, shown ? example : argv, help,
                        rest_of_help);
    if (rc != TOOL_GO_ON)
        return rc;
    if (shown)
        tool_say("%s %s %s %s %s\n\n", word[0], word[1], word[2], word[3], word[4]);
    if (options[OPT_COMPARE].given)
        return tool_finish(compare());
    if (options[OPT_ALPHA].given || options[OPT_BETA].given)
        return tool_refuse("%s: only with --compare",
                           options[OPT_ALPHA].given ? "--alpha" : "--beta");
    rc = read_ask(&ask, &batch);
    if (rc == TOOL_OK)
        rc = show(&ask);
    plan_batch_free(&batch);
    return tool_finish(rc);
}
