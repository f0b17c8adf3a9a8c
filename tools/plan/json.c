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

/* json_pack() takes the values given as o, and is NULL if one of them is; o* may be left out. */
static json_t *range(const int64_t x[2])
{
    return json_pack("[I,I]", (json_int_t)x[0], (json_int_t)x[1]);
}

/* A region of all features is a (b, s) box; only a cut through the features needs "h". */
static json_t *box(const colo_region_t *g, int64_t features)
{
    return json_pack("{s:o,s:o,s:o*}", "b", range(g->b), "s", range(g->s), "h",
                     g->h[0] != 0 || g->h[1] != features ? range(g->h) : NULL);
}

/* The rows of a region by segment or sequence; adds to @list. */
static int add_items(json_t *list, const plan_ask_t *ask, const colo_region_t *g)
{
    const bool packed = ask->batch->packed;
    const int64_t unit = plan_unit(ask), features[2] = {g->h[0] * unit, g->h[1] * unit};
    const bool cut = features[1] - features[0] < ask->config.shape.features;
    int bad = 0;
    for (int64_t index = g->s[0]; index < g->s[1] && !bad;) {
        const plan_rows_t part = plan_batch_next(ask->batch, &index, g->s[1]);
        bad = json_array_append_new(list,
                                    json_pack("{s:I,s:[I,I],s:o*}", packed ? "sequence" : "segment",
                                              (json_int_t)part.item, packed ? "positions" : "rows",
                                              (json_int_t)part.lo, (json_int_t)part.hi, "h",
                                              cut ? range(features) : NULL));
    }
    return bad;
}

/* @list, or NULL after a failure. */
static json_t *checked(json_t *list, int bad)
{
    if (!bad)
        return list;
    json_decref(list);
    return NULL;
}

static json_t *messages(const pic_list_t *of, const plan_ask_t *ask)
{
    const char *what = !ask->batch ? "boxes" : ask->batch->packed ? "sequences" : "segments";
    json_t *list = json_array();
    int bad = !list;
    for (int32_t i = 0; i < of->n && !bad; i++) {
        const colo_plan_message_t *m = &of->message[i];
        json_t *boxes = json_array();
        for (int64_t k = 0; k < m->nregions; k++)
            bad |=
                ask->batch
                    ? add_items(boxes, ask, &m->regions[k])
                    : json_array_append_new(boxes, box(&m->regions[k], ask->config.shape.features));
        bad |= json_array_append_new(list, json_pack("{s:I,s:I,s:o}", "peer", (json_int_t)m->peer,
                                                     "bytes", (json_int_t)m->bytes, what, boxes));
    }
    return checked(list, bad);
}

static json_t *pass(const colo_plan_t *plan, colo_pass_t w, const plan_ask_t *ask)
{
    static const char *const names[PIC_EXCHANGES][2] = {
        {"recv", "send"}, {"sum_recv", "sum_send"}, {"relay_recv", "relay_send"}};
    pic_list_t list[PIC_EXCHANGES][2];
    json_t *o = json_object();
    int bad = 0;
    pic_lists(plan, w, list);
    for (int k = plan_several_nodes(ask) ? PIC_RELAYS : PIC_FIRST; k >= 0; k--)
        for (int sends = 0; sends < 2; sends++)
            bad |= json_object_set_new(o, names[k][sends], messages(&list[k][sends], ask));
    return checked(o, bad);
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
    return checked(o, bad);
}

static json_t *rank_entry(const plan_ask_t *ask, const colo_plan_t *plan)
{
    int64_t rank = colo_plan_rank(plan), src_rows, dst_rows;
    colo_plan_rows(plan, &src_rows, &dst_rows);
    return json_pack("{s:I,s:o*,s:o*,s:o,s:o,s:o,s:o}", "rank", (json_int_t)rank, "src_rows",
                     ask->batch ? json_integer(src_rows) : NULL, "dst_rows",
                     ask->batch ? json_integer(dst_rows) : NULL, "src",
                     coords(&ask->src.grid, rank), "dst", coords(&ask->dst.grid, rank), "forward",
                     pass(plan, COLO_FORWARD, ask), "backward", pass(plan, COLO_BACKWARD, ask));
}

static json_t *totals(const plan_ask_t *ask, const plan_totals_t *t)
{
    json_t *o = json_object();
    int bad = 0;
    json_t *collective = t->collective_max < 0 ? json_null() : json_integer(t->collective_max);
    if (ask->batch)
        bad = json_object_update_new(o, json_pack("{s:I,s:I}", "minimum_bytes_total",
                                                  (json_int_t)t->minimum_total, "messages_total",
                                                  (json_int_t)t->messages_total));
    if (plan_several_nodes(ask))
        bad |= json_object_update_new(
            o, json_pack("{s:I,s:I,s:I,s:f,s:f}", "slow_bytes_total", (json_int_t)t->slow_total,
                         "slow_bytes_minimum", (json_int_t)t->slow_minimum, "slow_bytes_one_level",
                         (json_int_t)t->slow_one_level, "seconds", t->seconds, "seconds_one_level",
                         t->seconds_one_level));
    bad |= json_object_update_new(
        o, json_pack("{s:I,s:I,s:I,s:I,s:o}", "recv_bytes_max", (json_int_t)t->recv_max,
                     "recv_bytes_total", (json_int_t)t->recv_total, "send_bytes_max",
                     (json_int_t)t->send_max, "local_bytes_max", (json_int_t)t->local_max,
                     "collective_recv_bytes_max", collective));
    return checked(o, bad);
}

static json_t *list(const int64_t *v, int64_t n)
{
    json_t *a = json_array();
    int bad = !a;
    for (int64_t i = 0; i < n && !bad; i++)
        bad = json_array_append_new(a, json_integer(v[i]));
    return checked(a, bad);
}

static json_t *loads(const plan_batch_t *b, int which)
{
    const plan_loads_t *l = &b->loads;
    return json_pack("{s:o,s:o,s:I,s:f}", "src_dp",
                     list(which ? b->assign : b->tables.src_dp, b->tables.count), "rows",
                     list(l->load[which], b->replicas), "rows_max", (json_int_t)l->most[which],
                     "max_over_mean", l->mean > 0 ? (double)l->most[which] / l->mean : 1);
}

static json_t *batch(const plan_batch_t *b)
{
    if (b->packed)
        return json_pack("{s:I,s:I,s:s,s:s}", "sequences", (json_int_t)b->count, "positions",
                         (json_int_t)b->positions, "src", plan_batch_cut(b, 0), "dst",
                         plan_batch_cut(b, 1));
    return json_pack("{s:I,s:I,s:I,s:I,s:o,s:o}", "segments", (json_int_t)b->count, "sequences",
                     (json_int_t)b->tables.nseqs, "rows", (json_int_t)b->rows, "positions",
                     (json_int_t)b->positions, "load", loads(b, 0), "balanced", loads(b, 1));
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
    return checked(a, bad);
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
        return tool_problem("no memory for the JSON of %lld ranks", (long long)nplans);
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
    printf("\"output\": \"%s\",\n\"ranks\": [", plan_sharded(ask) ? "sharded" : "full");
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
