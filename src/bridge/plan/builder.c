/* SPDX-License-Identifier: Apache-2.0 */
/*
 * builder.c - makes the lists of a plan.
 *
 * Decides which roles the two layouts play (forward: destinations are destination ranks, sources
 * source ranks; backward in the other direction, and once for every addend of what is partial), and
 * sorts what routing.c finds into one message per peer.
 */
#include "bridge/plan/builder.h"
#include "bridge/plan/nodes.h"

#include "core/error.h"

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
static colo_status_t store(const colo_entry_t *entry, int64_t lo, int64_t hi, size_t elem,
                           colo_routes_t *out)
{
    while (lo < hi) {
        colo_region_t *region = &out->region[out->nregions];
        colo_offset_t *offset = &out->offset[out->nregions];
        colo_plan_message_t msg = {.peer = entry[lo].peer, .regions = region};
        for (; lo < hi && entry[lo].peer == msg.peer; lo++, msg.nregions++) {
            *region++ = entry[lo].region;
            *offset++ = entry[lo].offset;
            COLO_FAIL_IF(!colo_add_ok(msg.bytes, region_bytes(&entry[lo].region, elem), &msg.bytes),
                         COLO_ERR_ARG,
                         "plan: a message with rank %lld has more than 63 bits of bytes; give a "
                         "smaller shape",
                         (long long)msg.peer);
        }
        out->nregions += msg.nregions;
        out->message[out->nmessages++] = msg;
    }
    return COLO_OK;
}

/* Does @behind come behind @entry; nearly all do as they come. */
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
    COLO_TRY(store(entry, 0, lo, elem, out));
    COLO_TRY(store(entry, lo, hi, elem, local));
    COLO_TRY(store(entry, hi, n, elem, out));
    list->n = 0;
    return COLO_OK;
}

/* ---- forward and backward ---- */

/* Do nodes add up addends in backward, and do sums cross the network? Addends of named rows do not
 * lie alike, and a rank may have several: those cross one by one. */
static colo_status_t ask_sums(colo_builder_t *builder, const colo_side_t *need,
                              const colo_side_t *hold)
{
    const colo_partial_t *partial = colo_side_partial(hold);
    colo_answers_t *answers = &builder->answers;
    colo_node_question_t question = {
        .side = hold, .addends = true, .least = (int64_t)builder->wide + 1};
    if (!partial || partial->n == 1 || colo_partial_names_rows(partial) ||
        !colo_dtype_is_float(builder->cfg->dtype))
        return COLO_OK;
    COLO_TRY(colo_gateways_ask(builder, &question, &answers->adds_up));
    if (!answers->adds_up)
        return COLO_OK;
    question = (colo_node_question_t){.side = need, .hold = hold, .least = 1};
    COLO_TRY(colo_gateways_ask(builder, &question, &answers->adds_up)); /* else no node lacks any */
    if (!answers->adds_up)
        return COLO_OK;
    question.values = (colo_values_t){.kind = COLO_SUMS, .nodes_add_up = true};
    return colo_gateways_ask(builder, &question, &answers->sums_cross);
}

/* What ranks of several nodes must know of a pass before they route it; asked once. */
static colo_status_t ask(colo_builder_t *builder, colo_pass_t pass, const colo_side_t *need,
                         const colo_side_t *hold)
{
    colo_answers_t *answers = &builder->answers;
    const colo_node_question_t relays = {.side = need, .hold = hold, .least = 2};
    if (!builder->gateways.several_nodes || builder->cfg->one_level || answers->asked[pass])
        return COLO_OK;
    answers->asked[pass] = true;
    COLO_TRY(colo_gateways_ask(builder, &relays, &answers->relays[pass]));
    return ask_sums(builder, need, hold);
}

/* All overlaps of what is shown: once for each addend, then the sums with each addend. */
static colo_status_t find_shown(colo_builder_t *builder, const colo_roles_t *roles,
                                bool nodes_add_up)
{
    const colo_partial_t *partial = colo_side_partial(roles->hold);
    colo_values_t values = {.nodes_add_up = nodes_add_up};
    for (int kind = 0; kind < (nodes_add_up ? 2 : 1); kind++)
        for (values.addend = 0; values.addend < (partial ? partial->n : 1); values.addend++) {
            values.kind = kind ? COLO_SUMS : COLO_SINGLES;
            roles->hold->addend = values.addend;
            COLO_TRY(colo_overlaps_find(builder, &values, roles));
        }
    roles->hold->addend = 0;
    return COLO_OK;
}

/* All overlaps of one pass. */
static colo_status_t find_overlaps(colo_builder_t *builder, colo_pass_t pass, colo_side_t *src,
                                   colo_side_t *dst)
{
    const colo_roles_t roles = {.need = pass == COLO_PASS_FORWARD ? dst : src,
                                .hold = pass == COLO_PASS_FORWARD ? src : dst,
                                .need_is_src = pass == COLO_PASS_BACKWARD};
    if (pass == COLO_PASS_FORWARD)
        dst->npartial = 0;
    dst->full = builder->cfg->output == COLO_OUTPUT_FULL_SEQ &&
                (pass == COLO_PASS_FORWARD || dst->npartial > 0);
    COLO_TRY(ask(builder, pass, roles.need, roles.hold));
    const bool nodes_add_up =
        builder->plan->addends > 1 && pass == COLO_PASS_BACKWARD && builder->answers.adds_up;
    do
        COLO_TRY(find_shown(builder, &roles, nodes_add_up));
    while (++dst->shown < dst->npartial);
    builder->plan->exchange[pass][COLO_EXCHANGE_NODE_SUMS].wide = nodes_add_up;
    return COLO_OK;
}

/* The lists of one pass, as messages. */
static colo_status_t route(colo_builder_t *builder, colo_pass_t pass, colo_side_t src,
                           colo_side_t dst)
{
    colo_plan_t *plan = builder->plan;
    COLO_TRY(find_overlaps(builder, pass, &src, &dst));
    for (int i = 0; i < COLO_EXCHANGES; i++) {
        colo_exchange_plan_t *exchange = &plan->exchange[pass][i];
        colo_routes_t none = {0}; /* a rank sends nothing to itself: take() keeps a local */
        exchange->all_come = i == COLO_EXCHANGE_MAIN ||
                             (i == COLO_EXCHANGE_RELAYS && builder->answers.relays[pass]) ||
                             (exchange->wide && builder->answers.sums_cross);
        const size_t bytes = builder->elem * (exchange->wide ? builder->wide : 1);
        COLO_TRY(store_sorted(builder, &builder->found[i].recvs, bytes, &exchange->recv,
                              i == COLO_EXCHANGE_MAIN ? &plan->local[pass] : &none));
        COLO_TRY(store_sorted(builder, &builder->found[i].sends, bytes, &exchange->send, &none));
    }
    if (builder->sums.terms.n > 0) {
        plan->term = builder->sums.terms.items;
        builder->sums.terms = (colo_list_t){0};
    }
    plan->needed[pass] = builder->counted.needed;
    plan->entering[pass] = builder->counted.minimum;
    plan->left_out[pass] = builder->counted.left_out;
    builder->counted = (colo_counted_t){0};
    return COLO_OK;
}

/* How many addends there are, and which one is this rank's. */
static void count_addends(colo_builder_t *builder, const colo_side_t *dst)
{
    colo_plan_t *plan = builder->plan;
    int64_t coords[COLO_DIMS_MAX];
    const bool holds = colo_layout_coords(dst->layout, plan->rank, coords);
    plan->names_rows = dst->addends > 0 || colo_partial_names_rows(colo_side_partial(dst));
    plan->addends = dst->addends > 0 ? dst->addends : 1;
    plan->own_addend = holds ? 0 : -1;
    for (int64_t i = 0; i < dst->npartial; i++)
        plan->addends = dst->partial[i].n > plan->addends ? dst->partial[i].n : plan->addends;
    if (plan->names_rows)
        plan->own_addend = -1;
    else if (dst->npartial > 0 && holds)
        plan->own_addend = colo_partial_find(dst->partial, coords);
}

colo_status_t colo_builder_route(colo_builder_t *builder, colo_side_t src, colo_side_t dst)
{
    count_addends(builder, &dst);
    COLO_TRY(route(builder, COLO_PASS_FORWARD, src, dst));
    if (!builder->cfg->no_grad)
        COLO_TRY(route(builder, COLO_PASS_BACKWARD, src, dst));
    return colo_plan_count_bytes(builder->plan, builder->by_table);
}

/* ---- life ---- */

void colo_builder_begin(colo_builder_t *builder, colo_plan_t *plan, bool by_table)
{
    const size_t elem = colo_dtype_size(plan->config.dtype);
    builder->cfg = &plan->config;
    builder->plan = plan;
    builder->elem = plan->elem;
    builder->wide = elem < 4 ? 4 / elem : 1;
    builder->by_table = by_table;
    builder->gateways.several_nodes = colo_nodes_several(&plan->config);
    for (int i = 0; i < COLO_EXCHANGES; i++) /* a plan before may have failed */
        builder->found[i].recvs.n = builder->found[i].sends.n = 0;
    builder->sums.terms.n = 0;
    builder->counted = (colo_counted_t){0};
    builder->intersections[0].complete = builder->intersections[1].complete = false;
    memset(builder->own.known, 0, sizeof builder->own.known);
}

void colo_builder_deinit(colo_builder_t *builder)
{
    colo_list_t *lists[] = {&builder->gateways.nodes,  &builder->gateways.needed_by,
                            &builder->gateways.ranks,  &builder->sums.sources,
                            &builder->sums.groups,     &builder->sums.terms,
                            &builder->senders.by_node, &builder->senders.by_rail,
                            &builder->senders.ranks,   &builder->senders.destinations,
                            &builder->senders.share,   &builder->sorting.sorted,
                            &builder->sorting.runs,    &builder->fed[0],
                            &builder->fed[1],          &builder->fed[2],
                            &builder->given,           &builder->on_rank,
                            &builder->places,          &builder->partials};
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
