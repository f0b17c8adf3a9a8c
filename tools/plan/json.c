/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - the plan, and a comparison, for programs. The keys are documented in
 * docs/concepts/plan.md and stay.
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
    int64_t c[COLO_DIMS_MAX];
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
                     pass(plan, COLO_PASS_FORWARD, ask), "backward",
                     pass(plan, COLO_PASS_BACKWARD, ask));
}

static json_t *collective_of(const plan_totals_t *t)
{
    return t->collective_max < 0 ? json_null() : json_integer(t->collective_max);
}

static json_t *scale_of(const plan_sums_t *sums)
{
    return sums->scale > 0 ? json_integer(sums->scale) : json_null();
}

static int no_memory(int64_t n, const char *what)
{
    return tool_problem("no memory for the JSON of %lld %s", (long long)n, what);
}

static json_t *totals(const plan_ask_t *ask, const plan_totals_t *t)
{
    json_t *o = json_object();
    int bad = 0;
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
                     "collective_recv_bytes_max", collective_of(t)));
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
        return json_pack("{s:I,s:I,s:s,s:s,s:o*}", "sequences", (json_int_t)b->count, "positions",
                         (json_int_t)b->positions, "src", plan_batch_cut(b, 0), "dst",
                         plan_batch_cut(b, 1), "halo_before",
                         b->side[1].halo_before ? json_integer(b->side[1].halo_before) : NULL);
    return json_pack("{s:I,s:I,s:I,s:I,s:o,s:o}", "segments", (json_int_t)b->count, "sequences",
                     (json_int_t)b->tables.nseqs, "rows", (json_int_t)b->rows, "positions",
                     (json_int_t)b->positions, "load", loads(b, 0), "balanced", loads(b, 1));
}

static json_t *into_node(const plan_totals_t *t)
{
    return json_pack("{s:I,s:I,s:I}", "in", (json_int_t)t->slow_total, "minimum",
                     (json_int_t)t->slow_minimum, "one_level", (json_int_t)t->slow_one_level);
}

/* Bytes into each node that has a rank. */
static json_t *nodes(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans)
{
    int64_t n;
    plan_sums_t *node = plan_nodes(ask, plans, nplans, &n);
    json_t *a = node ? json_array() : NULL;
    int bad = !a;
    for (int64_t i = 0; i < n && !bad; i++)
        if (node[i].ranks > 0)
            bad = json_array_append_new(a, json_pack("{s:I,s:I,s:o,s:o}", "node", (json_int_t)i,
                                                     "ranks", (json_int_t)node[i].ranks, "forward",
                                                     into_node(&node[i].pass[0]), "backward",
                                                     into_node(&node[i].pass[1])));
    free(node);
    return checked(a, bad);
}

/* ---- the document ---- */

/* All of it is written to memory before the first byte is printed. */
typedef struct doc {
    FILE *f; /* NULL: no memory */
    char *text;
    size_t bytes, flags;
    bool bad;
} doc_t;

/* Takes @value, NULL is no memory. */
static void put(doc_t *doc, const char *before, json_t *value, const char *after)
{
    const size_t flags = doc->flags | JSON_PRESERVE_ORDER | JSON_ENCODE_ANY;
    fputs(before, doc->f);
    doc->bad |= !value || json_dumpf(value, doc->f, flags) != 0;
    json_decref(value);
    fputs(after, doc->f);
}

/* Prints and releases it. */
static int finish(doc_t *doc, int64_t n, const char *what)
{
    doc->bad |= ferror(doc->f) != 0;
    doc->bad |= fclose(doc->f) != 0;
    if (!doc->bad)
        fputs(doc->text, stdout);
    free(doc->text);
    return doc->bad ? no_memory(n, what) : TOOL_OK;
}

int plan_print_json(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums)
{
    char assumed[200];
    doc_t doc = {.bad = false};
    if (!(doc.f = open_memstream(&doc.text, &doc.bytes)))
        return no_memory(nplans, "ranks");
    fputs("{\n", doc.f);
    if (*plan_assumed(assumed, ask))
        put(&doc, "\"assumed\": ", json_string(assumed), ",\n");
    put(&doc, "\"world\": ", json_integer(ask->world), ",\n");
    put(&doc, "\"direction\": ", json_string(colo_direction_name(sums->direction)), ",\n");
    if (ask->batch)
        put(&doc, "\"batch\": ", batch(ask->batch), ",\n");
    put(&doc, "\"scale\": ", scale_of(sums), ",\n");
    put(&doc, "\"output\": ", json_string(plan_sharded(ask) ? "sharded" : "full"), ",\n");
    fputs("\"ranks\": [", doc.f);
    for (int64_t i = 0; i < nplans; i++)
        put(&doc, "\n", rank_entry(ask, plans[i]), i + 1 < nplans ? "," : "\n");
    fputs("],\n", doc.f);
    if (plan_several_nodes(ask) && nplans > 0)
        put(&doc, "\"nodes\": ", nodes(ask, plans, nplans), ",\n");
    put(&doc, "\"forward\": ", totals(ask, &sums->pass[0]), ",\n");
    put(&doc, "\"backward\": ", totals(ask, &sums->pass[1]), "\n}\n");
    return finish(&doc, nplans, "ranks");
}

/* ---- comparisons ---- */

static json_t *entry_pass(const plan_totals_t *t)
{
    return json_pack("{s:I,s:I,s:f,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o,s:f}", "slow_bytes_minimum",
                     (json_int_t)t->slow_minimum, "slow_bytes_one_level",
                     (json_int_t)t->slow_one_level, "seconds_one_level", t->seconds_one_level,
                     "recv_bytes_max", (json_int_t)t->recv_max, "recv_bytes_total",
                     (json_int_t)t->recv_total, "send_bytes_max", (json_int_t)t->send_max,
                     "local_bytes_max", (json_int_t)t->local_max, "messages_max",
                     (json_int_t)t->messages_max, "messages_total", (json_int_t)t->messages_total,
                     "slow_bytes_total", (json_int_t)t->slow_total, "collective_recv_bytes_max",
                     collective_of(t), "seconds", t->seconds);
}

static json_t *entry(const plan_entry_t *e, bool best)
{
    static const char *const sp[] = {"none", "src", "dst", "both"};
    const colo_plan_config_t *c = &e->ask.config;
    const plan_sums_t *s = &e->sums;
    char src[600], dst[600];
    colo_grid_print(&e->ask.src.grid, src, sizeof src);
    colo_grid_print(&e->ask.dst.grid, dst, sizeof dst);
    json_t *sampled = e->parts ? json_pack("{s:I,s:I,s:b}", "ranks", (json_int_t)s->ranks, "parts",
                                           (json_int_t)e->parts, "alike", e->alike)
                               : json_null();
    return json_pack(
        "{s:s,s:s,s:s,s:s,s:s,s:I,s:o,s:s,s:o,s:o,s:o,s:{s:I,s:I,s:I,s:I},s:f,s:b}", "src", src,
        "dst", dst, "output", c->output == COLO_OUTPUT_SHARDED ? "sharded" : "full", "grad",
        c->output == COLO_OUTPUT_SHARDED || c->grad == COLO_GRAD_DISJOINT ? "disjoint" : "partial",
        "sp", sp[e->sp], "world", (json_int_t)e->ask.world, "sampled", sampled, "direction",
        colo_direction_name(s->direction), "scale", scale_of(s), "forward", entry_pass(&s->pass[0]),
        "backward", entry_pass(&s->pass[1]), "memory", "input_bytes_max", (json_int_t)s->input_max,
        "output_bytes_max", (json_int_t)s->output_max, "staging_bytes_max",
        (json_int_t)s->staging_max, "bytes_max", (json_int_t)s->memory_max, "seconds",
        s->pass[0].seconds + s->pass[1].seconds, "best", best);
}

int plan_compare_json(const plan_entry_t *entries, int n, int best)
{
    const plan_ask_t *ask = &entries[0].ask;
    const plan_model_t *m = &ask->model;
    char words[200];
    doc_t doc = {.flags = JSON_REAL_PRECISION(12)};
    json_t *model =
        json_pack("{s:[f,f],s:[f,f],s:b}", "alpha_us", 1e6 * m->alpha[0], 1e6 * m->alpha[1],
                  "beta_gb_s", 1e-9 * m->beta[0], 1e-9 * m->beta[1], "default", !ask->own_model);
    if (!(doc.f = open_memstream(&doc.text, &doc.bytes)))
        return no_memory(n, "entries");
    fputs("{\n", doc.f);
    if (*plan_compare_warning(words, entries, n))
        put(&doc, "\"warning\": ", json_string(words), ",\n");
    if (*plan_assumed(words, ask))
        put(&doc, "\"assumed\": ", json_string(words), ",\n");
    put(&doc, "\"model\": ", model, ",\n");
    put(&doc, "\"ranks_per_node\": ", json_integer(ask->config.ranks_per_node), ",\n");
    put(&doc, "\"best\": ", best < 0 ? json_null() : json_integer(best), ",\n");
    fputs("\"entries\": [", doc.f);
    for (int i = 0; i < n; i++)
        put(&doc, "\n", entry(&entries[i], i == best), i + 1 < n ? "," : "\n]\n}\n");
    return finish(&doc, n, "entries");
}
