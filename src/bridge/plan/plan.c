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

static int64_t region_bytes(const colo_region_t *region, size_t elem)
{
    return (region->b[1] - region->b[0]) * (region->s[1] - region->s[0]) *
           (region->h[1] - region->h[0]) * (int64_t)elem;
}

/* Memory for @n regions in @peers messages. */
static colo_status_t reserve(colo_pool_t *pool, colo_routes_t *out, int64_t n, int64_t peers)
{
    if (n == 0)
        return COLO_OK;
    out->region = colo_pool_take(pool, (size_t)n * sizeof *out->region);
    out->offset = colo_pool_take(pool, (size_t)n * sizeof *out->offset);
    out->message = colo_pool_take(pool, (size_t)peers * sizeof *out->message);
    COLO_FAIL_IF(!out->region || !out->offset || !out->message, COLO_ERR_NOMEM,
                 "plan: %lld regions", (long long)n);
    return COLO_OK;
}

/* Appends the entries [@lo, @hi), by peer; there is memory for them. */
static void store(const colo_entry_t *entry, int64_t lo, int64_t hi, size_t elem,
                  colo_routes_t *out)
{
    while (lo < hi) {
        colo_region_t *region = &out->region[out->nregions];
        colo_offset_t *offset = &out->offset[out->nregions];
        colo_plan_message_t msg = {.peer = entry[lo].peer, .regions = region};
        for (; lo < hi && entry[lo].peer == msg.peer; lo++, msg.nregions++) {
            *region++ = entry[lo].region;
            *offset++ = entry[lo].offset;
            msg.bytes += region_bytes(&entry[lo].region, elem);
        }
        out->nregions += msg.nregions;
        out->message[out->nmessages++] = msg;
    }
}

/* Does @behind come behind @entry; nearly all do in the first pass. */
static bool ascends(const colo_entry_t *entry, const colo_entry_t *behind)
{
    const colo_region_t *one = &entry->region, *other = &behind->region;
    return (entry->peer == behind->peer && one->addend == other->addend &&
            one->b[0] == other->b[0] && one->s[0] < other->s[0]) ||
           colo_entry_cmp(entry, behind) < 0;
}

/* Entries of one peer that are sorted. */
typedef struct sorted {
    const colo_entry_t *items;
    int64_t n, peer;
} sorted_t;

static int by_first_entry(const void *first, const void *second)
{
    return colo_entry_cmp(((const sorted_t *)first)->items, ((const sorted_t *)second)->items);
}

/* Sorts entries. Those of a peer come in sorted runs, which usually need no more than another
 * order.
 */
static colo_status_t sort_entries(colo_builder_t *builder, colo_list_t *list)
{
    const int64_t n = list->n;
    colo_entry_t *entry = list->items;
    sorted_t *run = NULL;
    bool sorted = true, apart = true;
    builder->sorting.runs.n = 0;
    for (int64_t i = 0; i < n; i++) {
        const bool follows = i > 0 && ascends(&entry[i - 1], &entry[i]);
        sorted = sorted && (follows || i == 0);
        if (!follows || entry[i - 1].peer != entry[i].peer) {
            run = colo_list_push(&builder->sorting.runs, sizeof *run);
            COLO_FAIL_IF(!run, COLO_ERR_NOMEM, "plan: %lld regions", (long long)n);
            *run = (sorted_t){.items = &entry[i], .peer = entry[i].peer};
        }
        run->n++;
    }
    if (sorted)
        return COLO_OK;
    COLO_FAIL_IF(!colo_list_reserve(&builder->sorting.sorted, n, sizeof *entry), COLO_ERR_NOMEM,
                 "plan: %lld regions", (long long)n);
    run = builder->sorting.runs.items;
    colo_entry_t *to = builder->sorting.sorted.items;
    qsort(run, (size_t)builder->sorting.runs.n, sizeof *run, by_first_entry);
    for (int64_t k = 0, index = 0; k < builder->sorting.runs.n; index += run[k++].n) {
        memcpy(to + index, run[k].items, (size_t)run[k].n * sizeof *to);
        apart = apart && (k == 0 || colo_entry_cmp(&to[index - 1], &to[index]) < 0);
    }
    if (!apart)
        qsort(to, (size_t)n, sizeof *to, colo_entry_cmp);
    builder->sorting.sorted.n = n;
    const colo_list_t other = *list;
    *list = builder->sorting.sorted;
    builder->sorting.sorted = other;
    return COLO_OK;
}

/* Sorts a list and stores it; entries of the rank itself go to @local instead. */
static colo_status_t store_sorted(colo_builder_t *builder, colo_list_t *list, size_t elem,
                                  colo_routes_t *out, colo_routes_t *local)
{
    COLO_TRY(sort_entries(builder, list));
    const colo_entry_t *entry = list->items;
    const sorted_t *run = builder->sorting.runs.items;
    int64_t n = list->n, peers = builder->sorting.runs.n, lo = 0, hi = 0; /* a run has one peer */
    for (int64_t k = 0; k < builder->sorting.runs.n; k++) {
        lo += run[k].peer < builder->plan->rank ? run[k].n : 0;
        hi += run[k].peer <= builder->plan->rank ? run[k].n : 0;
    }
    COLO_TRY(reserve(&builder->plan->pool, out, n - (hi - lo), peers));
    COLO_TRY(reserve(&builder->plan->pool, local, hi - lo, 1));
    store(entry, 0, lo, elem, out);
    store(entry, lo, hi, elem, local);
    store(entry, hi, n, elem, out);
    list->n = 0;
    return COLO_OK;
}

/* ---- the two passes ---- */

/* Context dims ascending, first fastest, so that addends ascend with the rank. */
static int context_dims(const colo_layout_t *layout, int32_t *dims)
{
    int n = 0;
    for (int dim = 0; dim < layout->grid.ndims; dim++)
        for (int i = 0; i < layout->nsplits[COLO_ROWS]; i++)
            if (layout->split[COLO_ROWS][i].dim == dim && layout->split[COLO_ROWS][i].context)
                dims[n++] = dim;
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
static colo_status_t route(colo_builder_t *builder, colo_pass_t pass, colo_side_t src,
                           colo_side_t dst)
{
    const colo_plan_config_t *cfg = builder->cfg;
    colo_plan_t *plan = builder->plan;
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
    builder->held.several_nodes = colo_nodes_several(cfg);
    builder->sum_elem = builder->elem * (size_t)wide;
    if (builder->held.several_nodes && !cfg->one_level && !builder->answers.asked[pass]) {
        builder->answers.asked[pass] = true;
        COLO_TRY(colo_gateways_share_node(builder, need, hold, false, 2,
                                          &builder->answers.relays[pass]));
        if (addends > 1 && colo_dtype_is_float(cfg->dtype))
            COLO_TRY(colo_gateways_share_node(builder, hold, NULL, true, wide + 1,
                                              &builder->answers.adds_up));
        if (builder->answers.adds_up) /* unless no node lacks anything */
            COLO_TRY(
                colo_gateways_share_node(builder, need, hold, false, 1, &builder->answers.adds_up));
        builder->summing = builder->sums = builder->answers.adds_up;
        if (builder->answers.adds_up)
            COLO_TRY(colo_gateways_share_node(builder, need, hold, false, 1,
                                              &builder->answers.sums_cross));
        builder->sums = false;
    }
    builder->summing = addends > 1 && builder->answers.adds_up;
    for (int sums = 0; sums < (builder->summing ? 2 : 1); sums++)
        for (int64_t addend = 0; addend < addends; addend++) {
            builder->sums = sums;
            pin(plan, &dst, addend);
            COLO_TRY(
                colo_overlaps_find(builder, need, hold, (int32_t)addend, pass == COLO_BACKWARD));
        }
    builder->sums = false;
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        colo_exchange_plan_t *exchange = &plan->exchange[pass][i];
        colo_routes_t none = {0}; /* a rank sends nothing to itself: intersect() keeps a local */
        exchange->wide = i == COLO_NODE_SUMS && builder->summing;
        exchange->all_come = i == COLO_FIRST ||
                             (i == COLO_RELAYS && builder->answers.relays[pass]) ||
                             (exchange->wide && builder->answers.sums_cross);
        const size_t bytes = exchange->wide ? builder->sum_elem : builder->elem;
        COLO_TRY(store_sorted(builder, &builder->found[i].recvs, bytes, &exchange->recv,
                              i == COLO_FIRST ? &plan->local[pass] : &none));
        COLO_TRY(store_sorted(builder, &builder->found[i].sends, bytes, &exchange->send, &none));
    }
    if (builder->summing) {
        plan->term = builder->terms.items;
        builder->terms = (colo_list_t){0};
    }
    plan->entering[pass] = builder->counted.minimum;
    plan->left_out[pass] = builder->counted.left_out;
    builder->counted.minimum = builder->counted.left_out = 0;
    return COLO_OK;
}

/* ---- bytes ---- */

/* false: more than 63 bits. */
static bool add_bytes(int64_t *n, const colo_routes_t *routes)
{
    for (int32_t i = 0; i < routes->nmessages; i++)
        if (!colo_add_ok(*n, routes->message[i].bytes, n))
            return false;
    return true;
}

static int64_t owned_bytes(const colo_owned_t *owned, size_t elem)
{
    return (owned->b1 - owned->b0) * owned->rows * (owned->h1 - owned->h0) * (int64_t)elem;
}

/* Ring all-gather over k siblings, ring all-reduce over C: what COLLECTIVE receives. */
static int64_t collective_recv(const colo_plan_t *plan, colo_pass_t pass, size_t elem)
{
    const colo_shape_t *shape = &plan->config.shape;
    int64_t ds = colo_layout_parts(&plan->src, COLO_SAMPLES);
    int64_t dd = colo_layout_parts(&plan->dst, COLO_SAMPLES);
    int64_t cp = colo_grid_extent(&plan->dst.grid, "cp");
    int64_t bytes = shape->samples * shape->rows * shape->features * (int64_t)elem / dd,
            k = colo_plan_scale(plan);
    if (pass == COLO_FORWARD)
        return ds > dd ? bytes / k * (k - 1) : 0;
    int64_t reduce = (int64_t)((colo_i128_t)bytes * 2 * (cp - 1) / cp);
    return reduce + (dd > ds ? bytes * (k - 1) : 0);
}

static bool can_be_collective(const colo_plan_t *plan)
{
    const colo_error_t earlier = colo_error_save(); /* a no is an answer here, not a failure */
    const bool has = colo_plan_collective_check(&plan->config) == COLO_OK;
    (void)colo_error_restore(COLO_OK, &earlier);
    return has;
}

static colo_status_t count_bytes(colo_plan_t *plan, bool by_table)
{
    const size_t elem = plan->elem;
    const bool collective = !by_table && can_be_collective(plan);
    bool in_grid = colo_grid_has_rank(&plan->src.grid, plan->rank);
    for (int pass = 0; pass < 2; pass++) {
        colo_plan_bytes_t *bytes = &plan->bytes[pass];
        int64_t need = owned_bytes(pass == COLO_FORWARD ? &plan->own_dst : &plan->own_src, elem);
        *bytes = (colo_plan_bytes_t){0};
        bool fits = true;
        for (int i = 0; i < COLO_EXCHANGES; i++)
            fits = fits && add_bytes(&bytes->recv, &plan->exchange[pass][i].recv) &&
                   add_bytes(&bytes->send, &plan->exchange[pass][i].send);
        COLO_FAIL_IF(!fits, COLO_ERR_ARG,
                     "plan: rank %lld sends or receives more than 63 bits of bytes in %s; "
                     "give a smaller shape",
                     (long long)plan->rank, pass == COLO_FORWARD ? "forward" : "backward");
        (void)add_bytes(&bytes->local, &plan->local[pass]);
        if (pass == COLO_BACKWARD)
            need = plan->config.no_grad ? 0 : need * plan->addends;
        bytes->minimum = need - bytes->local - plan->left_out[pass];
        bytes->collective_recv = !collective ? -1
                                 : in_grid && !(pass == COLO_BACKWARD && plan->config.no_grad)
                                     ? collective_recv(plan, pass, elem)
                                     : 0;
    }
    return COLO_OK;
}

/* ---- create ---- */

colo_status_t colo_plan_route(colo_builder_t *builder, colo_side_t src, colo_side_t dst)
{
    COLO_TRY(route(builder, COLO_FORWARD, src, dst));
    if (!builder->cfg->no_grad)
        COLO_TRY(route(builder, COLO_BACKWARD, src, dst));
    return count_bytes(builder->plan, builder->by_table);
}

void colo_builder_begin(colo_builder_t *builder, colo_plan_t *plan, bool by_table)
{
    builder->cfg = &plan->config;
    builder->plan = plan;
    builder->elem = plan->elem;
    builder->by_table = by_table;
    for (int i = 0; i < COLO_EXCHANGES; i++) /* a plan before may have failed */
        builder->found[i].recvs.n = builder->found[i].sends.n = 0;
    builder->terms.n = 0;
    builder->summing = builder->sums = false;
    builder->counted.left_out = builder->counted.minimum = 0;
    builder->intersections[0].complete = builder->intersections[1].complete = false;
    memset(builder->own.known, 0, sizeof builder->own.known);
}

void colo_builder_deinit(colo_builder_t *builder)
{
    colo_list_t *lists[] = {
        &builder->held.nodes,     &builder->held.needed_by, &builder->share,
        &builder->sorting.sorted, &builder->ranks,          &builder->destinations,
        &builder->held.by_node,   &builder->held.by_rail,   &builder->sorting.runs,
        &builder->on_rank,        &builder->held.groups,    &builder->held.addends,
        &builder->terms,          &builder->given,          &builder->fed[0],
        &builder->fed[1],         &builder->fed[2]};
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        free(builder->found[i].sends.items);
        free(builder->found[i].recvs.items);
    }
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        free(lists[i]->items);
    for (int k = 0; k < 2; k++) {
        colo_intersections_t *intersections = &builder->intersections[k];
        for (int axis = 0; axis < 3; axis++)
            free(intersections->met[axis].items);
        free(intersections->first.items);
        free(intersections->overlap.items);
    }
    for (size_t i = 0; i < sizeof builder->own.runs / sizeof builder->own.runs[0]; i++)
        colo_runs_deinit(&builder->own.runs[i]);
    colo_runs_deinit(&builder->other);
}

static uint64_t hash_config(const colo_plan_t *plan)
{
    const colo_plan_config_t *config = &plan->config;
    uint64_t hash = colo_hash_i64(COLO_HASH_INIT, colo_version_number());
    hash = colo_hash_i64(hash, (int64_t)colo_layout_hash(&plan->src));
    hash = colo_hash_i64(hash, (int64_t)colo_layout_hash(&plan->dst));
    hash = colo_hash_i64(hash, config->shape.samples);
    hash = colo_hash_i64(hash, config->shape.rows);
    hash = colo_hash_i64(hash, config->shape.features);
    hash = colo_hash_i64(hash, config->dtype);
    hash = colo_hash_i64(hash, config->output);
    hash = colo_hash_i64(hash, config->output == COLO_SHARDED ? 0 : (int64_t)config->grad);
    hash = colo_hash_i64(hash, config->no_grad);
    hash = colo_hash_i64(hash, config->one_level);
    return colo_hash_i64(hash,
                         config->nodes ? (int64_t)config->nodes->hash : config->ranks_per_node);
}

static colo_status_t build(colo_plan_t *plan)
{
    const colo_plan_config_t *config = &plan->config;
    const colo_shape_t *shape = &config->shape;
    COLO_ENDS(colo_builder_deinit) colo_builder_t builder = {0};
    COLO_ENDS(colo_pool_deinit) colo_pool_t maps = {0};
    colo_posmap_t src_map, dst_map;
    const bool full = config->output == COLO_FULL_SEQ;
    const colo_side_t src = {
        .owns = &colo_owns_uniform, .layout = &plan->src, .shape = shape, .table = &src_map};
    const colo_side_t dst = {.owns = &colo_owns_uniform,
                             .layout = &plan->dst,
                             .shape = shape,
                             .table = &dst_map,
                             .whole = full};
    colo_builder_begin(&builder, plan, false);
    COLO_TRY(colo_layout_check_rows(&plan->src, shape->rows));
    if (!full ||
        (config->grad == COLO_DISJOINT && !config->no_grad)) /* else nothing splits by position */
        COLO_TRY(colo_layout_check_rows(&plan->dst, shape->rows));
    COLO_TRY(colo_posmap_init(&src_map, &plan->src, shape->rows, &maps));
    COLO_TRY(colo_posmap_init(&dst_map, &plan->dst, shape->rows, &maps));
    COLO_TRY(
        colo_layout_owned(&plan->src, plan->rank, shape, false, &plan->own_src, NULL, 0, NULL));
    COLO_TRY(colo_layout_owned(&plan->dst, plan->rank, shape, full, &plan->own_dst, NULL, 0, NULL));
    return colo_plan_route(&builder, src, dst);
}

colo_status_t colo_plan_new(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank)
{
    int64_t coords[COLO_MAX_DIMS];
    int32_t dims[COLO_MAX_SPLITS];
    colo_plan_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "plan: %zu bytes", sizeof *made);
    made->src = *config->src;
    made->dst = *config->dst;
    made->config = *config;
    made->config.src = &made->src;
    made->config.dst = &made->dst;
    if (config->shape.positions)
        made->dst.positions = config->shape.positions;
    made->rank = rank;
    made->elem = colo_dtype_size(config->dtype);
    made->addends = 1;
    int n = context_dims(&made->dst, dims);
    const bool holds = colo_layout_coords(&made->dst, rank, coords);
    made->own_addend = holds ? 0 : -1;
    for (int i = 0; config->output == COLO_FULL_SEQ && config->grad == COLO_PARTIAL && i < n; i++) {
        if (holds)
            made->own_addend += coords[dims[i]] * made->addends;
        made->addends *= made->dst.grid.extent[dims[i]];
    }
    *plan = made;
    return COLO_OK;
}

colo_status_t colo_plan_create(colo_plan_t **plan, const colo_plan_config_t *config, int64_t rank)
{
    colo_plan_config_t own;
    COLO_ENDS(colo_plan_destroy) colo_plan_t *made = NULL;
    COLO_FAIL_IF(!plan, COLO_ERR_ARG, "plan: plan is NULL");
    COLO_FAIL_IF(rank < 0, COLO_ERR_ARG, "plan: rank %lld, expected >= 0", (long long)rank);
    COLO_TRY(colo_plan_check_config(config, &own));
    COLO_TRY(colo_plan_new(&made, &own, rank));
    COLO_TRY(build(made));
    made->hash = hash_config(made);
    *plan = made;
    made = NULL;
    return COLO_OK;
}

void colo_plan_destroy(colo_plan_t **plan)
{
    if (!plan || !*plan)
        return;
    colo_pool_deinit(&(*plan)->pool);
    free((*plan)->term);
    free(*plan);
    *plan = NULL;
}
