/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node-sums.c - which addends of PARTIAL gradients a node adds up before its sum crosses the
 * network.
 *
 * The addends of a held block are divided into groups, the same for all destinations: the node
 * that holds most of them makes the first group, the node that holds most of the rest the next. If
 * a sum is not smaller than its addends, each of these is a group of its own. A node that lacks so
 * many addends of a group that one sum is smaller gets the sum; others get the addends that they
 * lack. So replicas of a gradient have the same bits on all nodes: first each group is added up in
 * the order of addends, then the groups in the order of nodes.
 *
 * Any rank with an addend of the group, on a node that has all of it, may send the sum (senders.c).
 * It collects the other addends from ranks of its node before.
 */
#include "bridge/plan/builder.h"
#include "bridge/plan/nodes.h"

#include "core/error.h"

#include <stdlib.h>

static const colo_sum_group_t *groups_of(const colo_builder_t *builder)
{
    return builder->sums.groups.items;
}

int64_t colo_node_addends_first(colo_builder_t *builder, int64_t node)
{
    const colo_node_addend_t *on = builder->gateways.nodes.items;
    int64_t low = 0, n = builder->gateways.nodes.n, work = 0;
    COLO_SEARCH(low, n, i, (work++, on[i].node < node))
    builder->plan->work += work;
    return low;
}

/* How many addends of the group that @lead leads @node lacks. */
static int64_t lacks(colo_builder_t *builder, int64_t node, int64_t lead)
{
    const colo_node_addend_t *on = builder->gateways.nodes.items;
    const colo_sum_group_t *group = groups_of(builder);
    int64_t n = group[lead].n;
    for (int64_t i = colo_node_addends_first(builder, node);
         i < builder->gateways.nodes.n && on[i].node == node; i++)
        n -= group[on[i].addend].lead == lead;
    return n;
}

static bool sum_is_smaller(const colo_builder_t *builder, int64_t addends)
{
    return addends * (int64_t)builder->elem > (int64_t)(builder->elem * builder->wide);
}

/* The node with most addends that are in no group yet; @most: how many. */
static int64_t next_home(const colo_builder_t *builder, int64_t *most)
{
    const colo_node_addend_t *on = builder->gateways.nodes.items;
    int64_t home = -1, n = 0;
    *most = 0;
    for (int64_t i = 0; i < builder->gateways.nodes.n; i++) {
        n = (i > 0 && on[i].node == on[i - 1].node ? n : 0) +
            (groups_of(builder)[on[i].addend].n == 0);
        if (n > *most) {
            *most = n;
            home = on[i].node;
        }
    }
    return home;
}

colo_status_t colo_node_sums_group(colo_builder_t *builder)
{
    const colo_node_addend_t *on = builder->gateways.nodes.items;
    colo_sum_group_t *group =
        colo_list_zeroed(&builder->sums.groups, builder->gateways.naddends, sizeof *group);
    COLO_FAIL_IF(!group, COLO_ERR_NOMEM, "plan: %lld addends",
                 (long long)builder->gateways.naddends);
    for (int64_t left = builder->gateways.naddends, most; left > 0; left -= most) {
        const int64_t home = next_home(builder, &most);
        const bool sums = sum_is_smaller(builder, most);
        int64_t lead = -1;
        for (int64_t i = colo_node_addends_first(builder, home);
             i < builder->gateways.nodes.n && on[i].node == home; i++) {
            const int64_t addend = on[i].addend;
            if (group[addend].n)
                continue;
            lead = lead < 0 || !sums ? addend : lead;
            group[addend] = (colo_sum_group_t){.home = home, .lead = lead, .n = sums ? most : 1};
        }
    }
    return COLO_OK;
}

bool colo_node_sums_reach(colo_builder_t *builder, const colo_values_t *values, int64_t rank)
{
    if (!values->nodes_add_up)
        return true;
    const int64_t lead = groups_of(builder)[values->addend].lead;
    return (values->kind == COLO_SUMS) ==
           sum_is_smaller(builder, lacks(builder, colo_location_of(builder->cfg, rank).node, lead));
}

bool colo_node_sums_lead(const colo_builder_t *builder, const colo_values_t *values)
{
    return groups_of(builder)[values->addend].lead == values->addend;
}

int64_t colo_node_sums_saving(const colo_builder_t *builder, const colo_values_t *values)
{
    return (groups_of(builder)[values->addend].n - (int64_t)builder->wide) * (int64_t)builder->elem;
}

colo_status_t colo_node_sums_sources(colo_builder_t *builder, const colo_values_t *values,
                                     colo_list_t *ranks)
{
    const colo_addend_source_t *source = builder->sums.sources.items;
    const int64_t lead = groups_of(builder)[values->addend].lead;
    ranks->n = 0;
    for (int64_t i = 0; i < builder->sums.sources.n; i++) {
        if (groups_of(builder)[source[i].addend].lead != lead ||
            lacks(builder, source[i].node, lead) > 0)
            continue;
        COLO_PUSH(ranks, "plan: %lld sources", (int64_t)source[i].rank);
    }
    qsort(ranks->items, (size_t)ranks->n, sizeof(int64_t), colo_by_first);
    return COLO_OK;
}

/* ---- the order of addition ---- */

static int by_home(const void *first, const void *second)
{
    const colo_sum_group_t *const one = *(const colo_sum_group_t *const *)first,
                                  *const other = *(const colo_sum_group_t *const *)second;
    if (one->home != other->home)
        return one->home < other->home ? -1 : 1;
    if (one->lead != other->lead)
        return one->lead < other->lead ? -1 : 1;
    return (one > other) - (one < other); /* by addend */
}

/* Does what the last order of @terms says, @n of them, stand there before? Then at *first. */
static bool is_known(const colo_list_t *terms, int64_t n, int32_t *first)
{
    const colo_term_t *term = terms->items, *mine = term + terms->n - n;
    for (int64_t i = 0; term + i < mine; i++) {
        int64_t k = 0;
        while (k < n && term[i + k].addend == mine[k].addend && term[i + k].use == mine[k].use)
            k++;
        if (k == n && (i == 0 || term[i - 1].use & COLO_TERM_LAST)) {
            *first = (int32_t)i;
            return true;
        }
    }
    return false;
}

/* Appends a term. */
static colo_status_t push_term(colo_builder_t *builder, int64_t addend, int32_t use)
{
    colo_term_t *term = colo_list_push(&builder->sums.terms, sizeof *term);
    COLO_FAIL_IF(!term || builder->sums.terms.n > INT32_MAX, COLO_ERR_NOMEM,
                 "plan: %lld terms of sums", (long long)builder->sums.terms.n);
    *term = (colo_term_t){(int32_t)addend, use};
    return COLO_OK;
}

/* Ends the order whose terms begin at @begin; it may be the same as an earlier one. */
static void end_order(colo_builder_t *builder, int64_t begin, int32_t *first)
{
    colo_list_t *terms = &builder->sums.terms;
    ((colo_term_t *)terms->items)[terms->n - 1].use |= COLO_TERM_LAST; /* there are addends */
    *first = (int32_t)begin;
    if (is_known(terms, terms->n - begin, first))
        terms->n = begin;
}

colo_status_t colo_addends_order(colo_builder_t *builder, const colo_partial_t *partial,
                                 int32_t *first)
{
    const int64_t begin = builder->sums.terms.n;
    for (int64_t addend = 0; addend < partial->n; addend++)
        COLO_TRY(push_term(builder, addend, COLO_TERM_FIRST));
    end_order(builder, begin, first);
    return COLO_OK;
}

colo_status_t colo_node_sums_order(colo_builder_t *builder, int64_t node, int64_t one,
                                   int32_t *first)
{
    const colo_sum_group_t *group = groups_of(builder);
    const int64_t begin = builder->sums.terms.n;
    COLO_AUTOFREE const colo_sum_group_t **by =
        malloc((size_t)builder->gateways.naddends * sizeof *by);
    COLO_FAIL_IF(!by, COLO_ERR_NOMEM, "plan: %lld addends", (long long)builder->gateways.naddends);
    for (int64_t addend = 0; addend < builder->gateways.naddends; addend++)
        by[addend] = &group[addend];
    qsort(by, (size_t)builder->gateways.naddends, sizeof *by, by_home);
    for (int64_t i = 0; i < builder->gateways.naddends; i++) {
        const int64_t addend = by[i] - group;
        const bool sum =
            one < 0 && sum_is_smaller(builder, lacks(builder, node, group[addend].lead));
        if ((one >= 0 && group[addend].lead != group[one].lead) ||
            (sum && group[addend].lead != addend))
            continue;
        COLO_TRY(push_term(builder, addend,
                           (sum ? COLO_TERM_SUM : 0) |
                               (group[addend].lead == addend ? COLO_TERM_FIRST : 0)));
    }
    end_order(builder, begin, first);
    return COLO_OK;
}

/* ---- which ranks bring addends together ---- */

int64_t colo_node_sums_helper(const colo_builder_t *builder, int64_t collector, int64_t addend)
{
    const colo_addend_source_t *source = builder->sums.sources.items, *helper = source;
    int64_t before = 0, n = 0, first = -1;
    while (helper->rank != collector)
        helper++;
    for (int64_t i = 0; i < builder->sums.sources.n; i++) {
        before += source[i].node == helper->node && source[i].addend == helper->addend &&
                  &source[i] < helper;
        if (source[i].node != helper->node || source[i].addend != addend)
            continue;
        first = n++ ? first : i;
    }
    for (int64_t i = first, k = before % n;; i++)
        if (source[i].node == helper->node && source[i].addend == addend && k-- == 0)
            return source[i].rank;
}
