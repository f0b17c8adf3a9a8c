/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - the plan for programs. The keys are documented in docs/plan.md and stay.
 *
 * Everything is built before the first byte is written, so a failure leaves stdout empty. One rank
 * a line: a diff of two plans then shows which ranks differ.
 */
#include "plan-tool.h"

#include <stdlib.h>

#include <jansson.h>

/* json_object_set_new() takes the value and fails on NULL, so one check at the end is enough. */
static json_t *range(const int64_t x[2])
{
    json_t *a = json_array();
    if (json_array_append_new(a, json_integer(x[0])) ||
        json_array_append_new(a, json_integer(x[1]))) {
        json_decref(a);
        return NULL;
    }
    return a;
}

/* A region of all features is a (b, s) box; only a cut through the features needs "h". */
static json_t *box(const colo_region_t *g, int64_t features)
{
    json_t *o = json_object();
    int bad = json_object_set_new(o, "b", range(g->b)) | json_object_set_new(o, "s", range(g->s));
    if (g->h[0] != 0 || g->h[1] != features)
        bad |= json_object_set_new(o, "h", range(g->h));
    if (bad) {
        json_decref(o);
        return NULL;
    }
    return o;
}

/* The rows of a region by segment; adds to @list. */
static int add_segments(json_t *list, const plan_segments_t *batch, const colo_region_t *g)
{
    int bad = 0;
    for (int64_t index = g->s[0]; index < g->s[1] && !bad;) {
        const plan_rows_t part = plan_segments_next(batch, &index, g->s[1]);
        const int64_t rows[2] = {part.lo, part.hi};
        json_t *o = json_object();
        bad = json_object_set_new(o, "segment", json_integer(part.segment)) |
              json_object_set_new(o, "rows", range(rows)) | json_array_append(list, o);
        json_decref(o);
    }
    return bad;
}

static json_t *messages(const colo_plan_message_t *m, int32_t count, const plan_ask_t *ask)
{
    json_t *list = json_array();
    int bad = !list;
    for (int32_t i = 0; i < count && !bad; i++) {
        json_t *boxes = json_array(), *o = json_object();
        for (int64_t k = 0; k < m[i].nregions; k++)
            bad |= ask->batch ? add_segments(boxes, ask->batch, &m[i].regions[k])
                              : json_array_append_new(
                                    boxes, box(&m[i].regions[k], ask->config.shape.features));
        bad |= json_object_set_new(o, "peer", json_integer(m[i].peer));
        bad |= json_object_set_new(o, "bytes", json_integer(m[i].bytes));
        bad |= json_object_set_new(o, ask->batch ? "segments" : "boxes", boxes);
        bad |= json_array_append_new(list, o);
    }
    if (bad) {
        json_decref(list);
        return NULL;
    }
    return list;
}

static json_t *pass(const colo_plan_t *plan, colo_pass_t w, const plan_ask_t *ask)
{
    int32_t nrecvs, nsends;
    const colo_plan_message_t *recvs = colo_plan_recvs(plan, w, &nrecvs);
    const colo_plan_message_t *sends = colo_plan_sends(plan, w, &nsends);
    json_t *o = json_object();
    int bad = 0;
    if (plan_several_nodes(ask)) {
        int32_t n[4];
        const colo_plan_message_t *in = colo_plan_relays(plan, w, false, &n[0]);
        const colo_plan_message_t *out = colo_plan_relays(plan, w, true, &n[1]);
        const colo_plan_message_t *sums = colo_plan_sums(plan, w, false, &n[2]);
        const colo_plan_message_t *sent = colo_plan_sums(plan, w, true, &n[3]);
        bad = json_object_set_new(o, "relay_recv", messages(in, n[0], ask)) |
              json_object_set_new(o, "relay_send", messages(out, n[1], ask)) |
              json_object_set_new(o, "sum_recv", messages(sums, n[2], ask)) |
              json_object_set_new(o, "sum_send", messages(sent, n[3], ask));
    }
    if (bad | json_object_set_new(o, "recv", messages(recvs, nrecvs, ask)) |
        json_object_set_new(o, "send", messages(sends, nsends, ask))) {
        json_decref(o);
        return NULL;
    }
    return o;
}

/* {dim: coord}; a rank outside the grid has none */
static json_t *coords(const colo_grid_t *grid, int64_t rank)
{
    int64_t c[COLO_MAX_DIMS];
    json_t *o = json_object();
    int bad = !o;
    if (colo_grid_has_rank(grid, rank) && colo_grid_coords(grid, rank, c) == COLO_OK)
        for (int32_t i = 0; i < grid->ndims; i++)
            bad |= json_object_set_new(o, grid->name[i], json_integer(c[i]));
    if (bad) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static json_t *rank_entry(const plan_ask_t *ask, const colo_plan_t *plan)
{
    int64_t rank = colo_plan_rank(plan), src_rows, dst_rows;
    json_t *o = json_object();
    int bad = json_object_set_new(o, "rank", json_integer(rank));
    colo_plan_rows(plan, &src_rows, &dst_rows);
    if (ask->batch)
        bad |= json_object_set_new(o, "src_rows", json_integer(src_rows)) |
               json_object_set_new(o, "dst_rows", json_integer(dst_rows));
    if (bad | json_object_set_new(o, "src", coords(&ask->src.grid, rank)) |
        json_object_set_new(o, "dst", coords(&ask->dst.grid, rank)) |
        json_object_set_new(o, "forward", pass(plan, COLO_FORWARD, ask)) |
        json_object_set_new(o, "backward", pass(plan, COLO_BACKWARD, ask))) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static json_t *totals(const plan_ask_t *ask, const plan_totals_t *t)
{
    json_t *o = json_object();
    int bad = 0;
    json_t *collective = t->collective_max < 0 ? json_null() : json_integer(t->collective_max);
    if (ask->batch)
        bad = json_object_set_new(o, "minimum_bytes_total", json_integer(t->minimum_total)) |
              json_object_set_new(o, "messages_total", json_integer(t->messages_total));
    if (plan_several_nodes(ask))
        bad |= json_object_set_new(o, "slow_bytes_total", json_integer(t->slow_total)) |
               json_object_set_new(o, "slow_bytes_minimum", json_integer(t->slow_minimum)) |
               json_object_set_new(o, "slow_bytes_one_level", json_integer(t->slow_one_level)) |
               json_object_set_new(o, "seconds", json_real(t->seconds)) |
               json_object_set_new(o, "seconds_one_level", json_real(t->seconds_one_level));
    if (bad | json_object_set_new(o, "recv_bytes_max", json_integer(t->recv_max)) |
        json_object_set_new(o, "recv_bytes_total", json_integer(t->recv_total)) |
        json_object_set_new(o, "send_bytes_max", json_integer(t->send_max)) |
        json_object_set_new(o, "local_bytes_max", json_integer(t->local_max)) |
        json_object_set_new(o, "collective_recv_bytes_max", collective)) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static json_t *list(const int64_t *v, int64_t n)
{
    json_t *a = json_array();
    int bad = !a;
    for (int64_t i = 0; i < n && !bad; i++)
        bad = json_array_append_new(a, json_integer(v[i]));
    if (bad) {
        json_decref(a);
        return NULL;
    }
    return a;
}

static json_t *loads(const plan_segments_t *b, int which)
{
    const plan_loads_t *l = &b->loads;
    json_t *o = json_object();
    const double over = l->mean > 0 ? (double)l->most[which] / l->mean : 1;
    if (json_object_set_new(o, "src_dp",
                            list(which ? b->assign : b->tables.src_dp, b->tables.count)) |
        json_object_set_new(o, "rows", list(l->load[which], b->replicas)) |
        json_object_set_new(o, "rows_max", json_integer(l->most[which])) |
        json_object_set_new(o, "max_over_mean", json_real(over))) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static json_t *batch(const plan_segments_t *b)
{
    json_t *o = json_object();
    if (json_object_set_new(o, "segments", json_integer(b->tables.count)) |
        json_object_set_new(o, "sequences", json_integer(b->tables.nseqs)) |
        json_object_set_new(o, "rows", json_integer(b->rows)) |
        json_object_set_new(o, "positions", json_integer(b->positions)) |
        json_object_set_new(o, "load", loads(b, 0)) |
        json_object_set_new(o, "balanced", loads(b, 1))) {
        json_decref(o);
        return NULL;
    }
    return o;
}

/* Bytes into each node that has a rank. */
static json_t *nodes(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans)
{
    static const char *const passes[] = {"forward", "backward"};
    int64_t n;
    plan_node_t *node = plan_nodes(ask, plans, nplans, &n);
    json_t *a = node ? json_array() : NULL;
    int bad = !a;
    for (int64_t i = 0; i < n && !bad; i++) {
        if (node[i].ranks == 0)
            continue;
        json_t *o =
            json_pack("{s:I,s:I}", "node", (json_int_t)i, "ranks", (json_int_t)node[i].ranks);
        for (int w = 0; w < 2; w++)
            bad |= json_object_set_new(o, passes[w],
                                       json_pack("{s:I,s:I,s:I}", "in", (json_int_t)node[i].in[w],
                                                 "minimum", (json_int_t)node[i].minimum[w],
                                                 "one_level", (json_int_t)node[i].one_level[w]));
        bad |= json_array_append_new(a, o);
    }
    free(node);
    if (bad) {
        json_decref(a);
        return NULL;
    }
    return a;
}

/* Prints and releases. */
static void put(char *text, const char *after)
{
    printf("%s%s", text, after);
    free(text);
}

static char *line(json_t *value)
{
    char *text = value ? json_dumps(value, JSON_PRESERVE_ORDER | JSON_ENCODE_ANY) : NULL;
    json_decref(value);
    return text;
}

int plan_print_json(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums)
{
    int64_t used = 0;
    char assumed[200]; /* printable ASCII without quotes */
    char **ranks = calloc((size_t)nplans + 1, sizeof *ranks);
    char *pass_line[2] = {line(totals(ask, &sums->pass[0])), line(totals(ask, &sums->pass[1]))};
    char *batch_line = ask->batch ? line(batch(ask->batch)) : NULL;
    const bool several = plan_several_nodes(ask) && nplans > 0;
    char *node_line = several ? line(nodes(ask, plans, nplans)) : NULL;
    bool ok = ranks != NULL && pass_line[0] && pass_line[1] && (batch_line || !ask->batch) &&
              (node_line || !several);
    while (used < nplans && ok) {
        ranks[used] = line(rank_entry(ask, plans[used]));
        ok = ranks[used++] != NULL;
    }
    if (!ok) {
        for (int64_t i = 0; i < used; i++)
            free(ranks[i]);
        free(ranks);
        free(pass_line[0]);
        free(pass_line[1]);
        free(batch_line);
        free(node_line);
        return tool_complain(TOOL_PROBLEM, PLAN_TOOL, "no memory for the JSON of %lld ranks",
                             (long long)nplans);
    }
    printf("{\n");
    if (*plan_assumed(assumed, ask))
        printf("\"assumed\": \"%s\",\n", assumed);
    printf("\"world\": %lld,\n\"direction\": \"%s\",\n", (long long)ask->world,
           colo_direction_name(sums->direction));
    if (ask->batch) {
        printf("\"batch\": ");
        put(batch_line, ",\n");
    }
    if (sums->scale > 0)
        printf("\"scale\": %lld,\n", (long long)sums->scale);
    else
        printf("\"scale\": null,\n");
    printf("\"output\": \"%s\",\n\"ranks\": [",
           ask->config.output == COLO_SHARDED ? "sharded" : "full");
    for (int64_t i = 0; i < used; i++) {
        printf("\n");
        put(ranks[i], i + 1 < used ? "," : "\n");
    }
    printf("],\n");
    if (several) {
        printf("\"nodes\": ");
        put(node_line, ",\n");
    }
    printf("\"forward\": ");
    put(pass_line[0], ",\n");
    printf("\"backward\": ");
    put(pass_line[1], "\n}\n");
    free(ranks);
    return TOOL_OK;
}
