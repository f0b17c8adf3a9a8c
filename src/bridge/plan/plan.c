/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - one rank's part of the routing: what it sends, receives and keeps, forward and backward.
 *
 * Decides which roles the two layouts play (forward: destinations are destination ranks, sources
 * source ranks; backward in the other direction, and with PARTIAL gradients once for every
 * addend), sorts what routing.c finds into one message per peer, and counts bytes.
 * routing.c's rule says which rank sends an overlap; what a rank does with its boxes is
 * its program's business.
 */
#include "bridge/plan/routing.h"

#include "core/hash.h"
#include "core/error.h"

#include "bridge/layout/index.h"
#include "bridge/plan/nodes.h"

#include <colobridge/version.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists into messages ---- */

static int64_t region_bytes(const colo_region_t *r, size_t elem)
{
    return (r->b[1] - r->b[0]) * (r->s[1] - r->s[0]) * (r->h[1] - r->h[0]) * (int64_t)elem;
}

/* Memory for @n regions in @peers messages. */
static colo_status_t reserve(colo_pool_t *pool, colo_routes_t *out, int64_t n, int64_t peers)
{
    if (n == 0)
        return COLO_OK;
    out->region = colo_pool_take(pool, (size_t)n * sizeof *out->region);
    out->offset = colo_pool_take(pool, (size_t)n * sizeof *out->offset);
    out->message = colo_pool_take(pool, (size_t)peers * sizeof *out->message);
    if (!out->region || !out->offset || !out->message)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)n);
    return COLO_OK;
}

/* Appends the entries [@lo, @hi), by peer; there is memory for them. */
static void store(const colo_entry_t *e, int64_t lo, int64_t hi, size_t elem, colo_routes_t *out)
{
    while (lo < hi) {
        colo_region_t *region = &out->region[out->nregions];
        colo_offset_t *offset = &out->offset[out->nregions];
        colo_plan_message_t msg = {.peer = e[lo].peer, .regions = region};
        for (; lo < hi && e[lo].peer == msg.peer; lo++, msg.nregions++) {
            *region++ = e[lo].region;
            *offset++ = e[lo].offset;
            msg.bytes += region_bytes(&e[lo].region, elem);
        }
        out->nregions += msg.nregions;
        out->message[out->nmessages++] = msg;
    }
}

static void routes_deinit(const colo_pool_t *pool, colo_routes_t *r)
{
    colo_pool_drop(pool, r->message);
    colo_pool_drop(pool, r->region);
    colo_pool_drop(pool, r->offset);
    memset(r, 0, sizeof *r);
}

/* Does @b come behind @a; nearly all do in the first pass. */
static bool ascends(const colo_entry_t *a, const colo_entry_t *b)
{
    const colo_region_t *x = &a->region, *y = &b->region;
    return (a->peer == b->peer && x->addend == y->addend && x->b[0] == y->b[0] &&
            x->s[0] < y->s[0]) ||
           colo_entry_cmp(a, b) < 0;
}

/* Entries of one peer that are sorted. */
typedef struct sorted {
    const colo_entry_t *items;
    int64_t n, peer;
} sorted_t;

static int by_first_entry(const void *a, const void *b)
{
    return colo_entry_cmp(((const sorted_t *)a)->items, ((const sorted_t *)b)->items);
}

/* Sorts entries. Those of a peer come in sorted runs, which usually need no more than another
 * order.
 */
static colo_status_t sort_entries(colo_builder_t *w, colo_list_t *list)
{
    const int64_t n = list->n;
    colo_entry_t *e = list->items;
    sorted_t *run = NULL;
    bool sorted = true, apart = true;
    w->sorting.runs.n = 0;
    for (int64_t i = 0; i < n; i++) {
        const bool follows = i > 0 && ascends(&e[i - 1], &e[i]);
        sorted = sorted && (follows || i == 0);
        if (!follows || e[i - 1].peer != e[i].peer) {
            run = colo_list_push(&w->sorting.runs, sizeof *run);
            if (!run)
                return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)n);
            *run = (sorted_t){.items = &e[i], .peer = e[i].peer};
        }
        run->n++;
    }
    if (sorted)
        return COLO_OK;
    if (!colo_list_reserve(&w->sorting.sorted, n, sizeof *e))
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld regions", (long long)n);
    run = w->sorting.runs.items;
    colo_entry_t *to = w->sorting.sorted.items;
    qsort(run, (size_t)w->sorting.runs.n, sizeof *run, by_first_entry);
    for (int64_t k = 0, index = 0; k < w->sorting.runs.n; index += run[k++].n) {
        memcpy(to + index, run[k].items, (size_t)run[k].n * sizeof *to);
        apart = apart && (k == 0 || colo_entry_cmp(&to[index - 1], &to[index]) < 0);
    }
    if (!apart)
        qsort(to, (size_t)n, sizeof *to, colo_entry_cmp);
    w->sorting.sorted.n = n;
    const colo_list_t other = *list;
    *list = w->sorting.sorted;
    w->sorting.sorted = other;
    return COLO_OK;
}

/* Sorts a list and stores it; entries of the rank itself go to @local instead. */
static colo_status_t store_sorted(colo_builder_t *w, colo_list_t *list, size_t elem,
                                  colo_routes_t *out, colo_routes_t *local)
{
    COLO_TRY(sort_entries(w, list));
    const colo_entry_t *e = list->items;
    const sorted_t *run = w->sorting.runs.items;
    int64_t n = list->n, peers = w->sorting.runs.n, lo = 0, hi = 0; /* a run has one peer */
    for (int64_t k = 0; k < w->sorting.runs.n; k++) {
        lo += run[k].peer < w->plan->rank ? run[k].n : 0;
        hi += run[k].peer <= w->plan->rank ? run[k].n : 0;
    }
    COLO_TRY(reserve(w->plan->pool, out, n - (hi - lo), peers));
    COLO_TRY(reserve(w->plan->pool, local, hi - lo, 1));
    store(e, 0, lo, elem, out);
    store(e, lo, hi, elem, local);
    store(e, hi, n, elem, out);
    list->n = 0;
    return COLO_OK;
}

/* ---- the two passes ---- */

/* Context dims ascending, first fastest, so that addends ascend with the rank. */
static int context_dims(const colo_layout_t *l, int32_t *dims)
{
    int n = 0;
    for (int d = 0; d < l->grid.ndims; d++)
        for (int i = 0; i < l->nsplits[COLO_ROWS]; i++)
            if (l->split[COLO_ROWS][i].dim == d && l->split[COLO_ROWS][i].context)
                dims[n++] = d;
    return n;
}

/* Pins the context dims to @addend. */
static void pin(const colo_plan_t *plan, colo_side_t *dst, int64_t addend)
{
    int32_t dims[COLO_MAX_SPLITS];
    const int ndims = context_dims(&plan->dst, dims);
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        dst->fixed[i] = -1;
    for (int i = 0; dst->addend_fixed && i < ndims; i++) {
        dst->fixed[dims[i]] = addend % plan->dst.grid.extent[dims[i]];
        addend /= plan->dst.grid.extent[dims[i]];
    }
}

/* All overlaps of one pass; backward PARTIAL: once per addend, with the context dims pinned, then
 * the sums with each addend. */
colo_status_t colo_plan_route(colo_builder_t *w, colo_pass_t pass, colo_side_t src, colo_side_t dst)
{
    const colo_plan_config_t *cfg = w->cfg;
    colo_plan_t *plan = w->plan;
    bool partial =
        pass == COLO_BACKWARD && cfg->output == COLO_FULL_SEQ && cfg->grad == COLO_PARTIAL;
    bool full = partial || (pass == COLO_FORWARD && cfg->output == COLO_FULL_SEQ);
    dst.full = full;
    dst.addend_fixed = partial;
    colo_side_t *need = pass == COLO_FORWARD ? &dst : &src,
                *hold = pass == COLO_FORWARD ? &src : &dst;
    const int64_t addends = partial ? plan->addends : 1,
                  elem = (int64_t)colo_dtype_size(cfg->dtype),
                  wide = elem < 4 ? 4 / elem : 1; /* a sum is of fp32 at least */
    pin(plan, &dst, 0);
    w->held.several_nodes = colo_nodes_several(cfg);
    w->sum_elem = w->elem * (size_t)wide;
    if (w->held.several_nodes && !cfg->one_level && !w->answers.asked[pass]) {
        w->answers.asked[pass] = true;
        COLO_TRY(colo_gateways_share_node(w, need, hold, false, 2, &w->answers.relays[pass]));
        if (addends > 1 && colo_dtype_is_float(cfg->dtype))
            COLO_TRY(colo_gateways_share_node(w, hold, NULL, true, wide + 1, &w->answers.adds_up));
        if (w->answers.adds_up) /* unless no node lacks anything */
            COLO_TRY(colo_gateways_share_node(w, need, hold, false, 1, &w->answers.adds_up));
        w->summing = w->sums = w->answers.adds_up;
        if (w->answers.adds_up)
            COLO_TRY(colo_gateways_share_node(w, need, hold, false, 1, &w->answers.sums_cross));
        w->sums = false;
    }
    w->summing = addends > 1 && w->answers.adds_up;
    for (int sums = 0; sums < (w->summing ? 2 : 1); sums++)
        for (int64_t addend = 0; addend < addends; addend++) {
            w->sums = sums;
            pin(plan, &dst, addend);
            COLO_TRY(colo_overlaps_find(w, need, hold, (int32_t)addend, pass == COLO_BACKWARD));
        }
    w->sums = false;
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        colo_exchange_plan_t *exchange = &plan->exchange[pass][i];
        colo_routes_t none = {0}; /* a rank sends nothing to itself: intersect() keeps a local */
        exchange->wide = i == COLO_NODE_SUMS && w->summing;
        exchange->all_come = i == COLO_FIRST || (i == COLO_RELAYS && w->answers.relays[pass]) ||
                             (exchange->wide && w->answers.sums_cross);
        const size_t bytes = exchange->wide ? w->sum_elem : w->elem;
        COLO_TRY(store_sorted(w, &w->found[i].recvs, bytes, &exchange->recv,
                              i == COLO_FIRST ? &plan->local[pass] : &none));
        COLO_TRY(store_sorted(w, &w->found[i].sends, bytes, &exchange->send, &none));
    }
    if (w->summing) {
        plan->term = w->terms.items;
        w->terms = (colo_list_t){0};
    }
    plan->entering[pass] = w->counted.minimum;
    plan->left_out[pass] = w->counted.left_out;
    w->counted.minimum = w->counted.left_out = 0;
    return COLO_OK;
}

/* ---- bytes ---- */

/* false: more than 63 bits. */
static bool add_bytes(int64_t *n, const colo_routes_t *r)
{
    for (int32_t i = 0; i < r->nmessages; i++)
        if (!colo_add_ok(*n, r->message[i].bytes, n))
            return false;
    return true;
}

static int64_t owned_bytes(const colo_owned_t *o, size_t elem)
{
    return (o->b1 - o->b0) * o->rows * (o->h1 - o->h0) * (int64_t)elem;
}

/* Ring all-gather over k siblings, ring all-reduce over C: what COLLECTIVE receives. */
static int64_t collective_recv(const colo_plan_t *p, colo_pass_t pass, size_t elem)
{
    const colo_shape_t *s = &p->config.shape;
    int64_t ds = colo_layout_parts(&p->src, COLO_SAMPLES);
    int64_t dd = colo_layout_parts(&p->dst, COLO_SAMPLES);
    int64_t c = colo_grid_extent(&p->dst.grid, "cp");
    int64_t v = s->samples * s->rows * s->features * (int64_t)elem / dd, k = colo_plan_scale(p);
    if (pass == COLO_FORWARD)
        return ds > dd ? v / k * (k - 1) : 0;
    int64_t reduce = (int64_t)((colo_i128_t)v * 2 * (c - 1) / c);
    return reduce + (dd > ds ? v * (k - 1) : 0);
}

static bool can_be_collective(const colo_plan_t *p)
{
    const colo_error_t earlier = colo_error_save(); /* a no is an answer here, not a failure */
    const bool has = colo_plan_collective_check(&p->config) == COLO_OK;
    (void)colo_error_restore(COLO_OK, &earlier);
    return has;
}

colo_status_t colo_plan_count_bytes(colo_plan_t *p, size_t elem, bool by_table)
{
    const bool collective = !by_table && can_be_collective(p);
    bool in_grid = colo_grid_has_rank(&p->src.grid, p->rank);
    for (int pass = 0; pass < 2; pass++) {
        colo_plan_bytes_t *b = &p->bytes[pass];
        int64_t need = owned_bytes(pass == COLO_FORWARD ? &p->own_dst : &p->own_src, elem);
        *b = (colo_plan_bytes_t){0};
        bool fits = true;
        for (int i = 0; i < COLO_EXCHANGES; i++)
            fits = fits && add_bytes(&b->recv, &p->exchange[pass][i].recv) &&
                   add_bytes(&b->send, &p->exchange[pass][i].send);
        if (!fits)
            return colo_fail(COLO_ERR_ARG,
                             "plan: rank %lld sends or receives more than 63 bits of bytes in %s; "
                             "give a smaller shape",
                             (long long)p->rank, pass == COLO_FORWARD ? "forward" : "backward");
        (void)add_bytes(&b->local, &p->local[pass]);
        if (pass == COLO_BACKWARD)
            need = p->config.no_grad ? 0 : need * p->addends;
        b->minimum = need - b->local - p->left_out[pass];
        b->collective_recv = !collective ? -1
                             : in_grid && !(pass == COLO_BACKWARD && p->config.no_grad)
                                 ? collective_recv(p, pass, elem)
                                 : 0;
    }
    return COLO_OK;
}

/* ---- create ---- */

void colo_builder_begin(colo_builder_t *w, colo_plan_t *plan, size_t elem, bool by_table)
{
    w->cfg = &plan->config;
    w->plan = plan;
    w->elem = elem;
    w->by_table = by_table;
    for (int i = 0; i < COLO_EXCHANGES; i++) /* a plan before may have failed */
        w->found[i].recvs.n = w->found[i].sends.n = 0;
    w->terms.n = 0;
    w->summing = w->sums = false;
    w->counted.left_out = w->counted.minimum = 0;
    w->intersections[0].complete = w->intersections[1].complete = false;
    memset(w->own.known, 0, sizeof w->own.known);
}

void colo_builder_deinit(colo_builder_t *w)
{
    colo_list_t *lists[] = {
        &w->held.nodes,   &w->held.needed_by, &w->share,        &w->sorting.sorted, &w->ranks,
        &w->destinations, &w->held.by_node,   &w->held.by_rail, &w->sorting.runs,   &w->on_rank,
        &w->held.groups,  &w->held.addends,   &w->terms,        &w->given,          &w->fed[0],
        &w->fed[1],       &w->fed[2]};
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        free(w->found[i].sends.items);
        free(w->found[i].recvs.items);
    }
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        free(lists[i]->items);
    for (int k = 0; k < 2; k++) {
        colo_intersections_t *m = &w->intersections[k];
        for (int a = 0; a < 3; a++)
            free(m->met[a].items);
        free(m->first.items);
        free(m->overlap.items);
    }
    for (size_t i = 0; i < sizeof w->own.runs / sizeof w->own.runs[0]; i++)
        colo_runs_deinit(&w->own.runs[i]);
    colo_runs_deinit(&w->other);
}

static uint64_t hash_config(const colo_plan_t *p)
{
    const colo_plan_config_t *c = &p->config;
    uint64_t h = colo_hash_i64(COLO_HASH_INIT, colo_version_number());
    h = colo_hash_i64(h, (int64_t)colo_layout_hash(&p->src));
    h = colo_hash_i64(h, (int64_t)colo_layout_hash(&p->dst));
    h = colo_hash_i64(h, c->shape.samples);
    h = colo_hash_i64(h, c->shape.rows);
    h = colo_hash_i64(h, c->shape.features);
    h = colo_hash_i64(h, c->dtype);
    h = colo_hash_i64(h, c->output);
    h = colo_hash_i64(h, c->output == COLO_SHARDED ? 0 : (int64_t)c->grad);
    h = colo_hash_i64(h, c->no_grad);
    h = colo_hash_i64(h, c->one_level);
    return colo_hash_i64(h, c->nodes ? (int64_t)c->nodes->hash : c->ranks_per_node);
}

static colo_status_t build(colo_plan_t *p)
{
    const colo_plan_config_t *c = &p->config;
    const colo_shape_t *s = &c->shape;
    colo_builder_t w = {0};
    colo_posmap_t src_map = {0}, dst_map = {0};
    const bool full = c->output == COLO_FULL_SEQ;
    const colo_side_t src = {
        .owns = &colo_owns_uniform, .layout = &p->src, .shape = s, .table = &src_map};
    const colo_side_t dst = {.owns = &colo_owns_uniform,
                             .layout = &p->dst,
                             .shape = s,
                             .table = &dst_map,
                             .whole = full};
    colo_status_t st = COLO_OK;
    colo_builder_begin(&w, p, colo_dtype_size(c->dtype), false);
    COLO_TRY_GOTO(st, colo_layout_check_rows(&p->src, s->rows), done);
    if (!full || (c->grad == COLO_DISJOINT && !c->no_grad)) /* else nothing splits by position */
        COLO_TRY_GOTO(st, colo_layout_check_rows(&p->dst, s->rows), done);
    COLO_TRY_GOTO(st, colo_posmap_init(&src_map, &p->src, s->rows), done);
    COLO_TRY_GOTO(st, colo_posmap_init(&dst_map, &p->dst, s->rows), done);
    COLO_TRY_GOTO(st, colo_layout_owned(&p->src, p->rank, s, false, &p->own_src, NULL, 0, NULL),
                  done);
    COLO_TRY_GOTO(st, colo_layout_owned(&p->dst, p->rank, s, full, &p->own_dst, NULL, 0, NULL),
                  done);
    COLO_TRY_GOTO(st, colo_plan_route(&w, COLO_FORWARD, src, dst), done);
    if (!c->no_grad)
        COLO_TRY_GOTO(st, colo_plan_route(&w, COLO_BACKWARD, src, dst), done);
    st = colo_plan_count_bytes(p, w.elem, false);
done:
    colo_posmap_deinit(&src_map);
    colo_posmap_deinit(&dst_map);
    colo_builder_deinit(&w);
    return st;
}

colo_status_t colo_plan_new(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank)
{
    int64_t coords[COLO_MAX_DIMS];
    int32_t dims[COLO_MAX_SPLITS];
    colo_plan_t *p = calloc(1, sizeof *p);
    if (!p)
        return colo_fail(COLO_ERR_NOMEM, "plan: %zu bytes", sizeof *p);
    p->src = *config->src;
    p->dst = *config->dst;
    p->config = *config;
    p->config.src = &p->src;
    p->config.dst = &p->dst;
    if (config->shape.positions)
        p->dst.positions = config->shape.positions;
    p->rank = rank;
    p->addends = 1;
    p->own_addend = -1;
    int n = context_dims(&p->dst, dims);
    bool holds = colo_layout_holds(&p->dst, rank);
    if (holds) {
        p->own_addend = 0;
        (void)colo_grid_coords(&p->dst.grid, rank, coords);
    }
    for (int i = 0; config->output == COLO_FULL_SEQ && config->grad == COLO_PARTIAL && i < n; i++) {
        if (holds)
            p->own_addend += coords[dims[i]] * p->addends;
        p->addends *= p->dst.grid.extent[dims[i]];
    }
    *plan = p;
    return COLO_OK;
}

colo_status_t colo_plan_create(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank)
{
    colo_plan_config_t own;
    colo_plan_t *p;
    if (!plan)
        return colo_fail(COLO_ERR_ARG, "plan: plan is NULL");
    if (rank < 0)
        return colo_fail(COLO_ERR_ARG, "plan: rank %lld, expected >= 0", (long long)rank);
    COLO_TRY(colo_plan_check_config(config, &own));
    COLO_TRY(colo_plan_new(&p, &own, rank));
    colo_status_t st = build(p);
    if (st < 0) {
        colo_plan_destroy(&p);
        return st;
    }
    p->hash = hash_config(p);
    *plan = p;
    return COLO_OK;
}

void colo_plan_destroy(colo_plan_t **plan)
{
    if (!plan || !*plan)
        return;
    for (int pass = 0; pass < 2; pass++) {
        routes_deinit((*plan)->pool, &(*plan)->local[pass]);
        for (int i = 0; i < COLO_EXCHANGES; i++) {
            routes_deinit((*plan)->pool, &(*plan)->exchange[pass][i].send);
            routes_deinit((*plan)->pool, &(*plan)->exchange[pass][i].recv);
        }
    }
    free((*plan)->term);
    free(*plan);
    *plan = NULL;
}
