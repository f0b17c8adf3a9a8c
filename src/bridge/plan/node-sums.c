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
#include "bridge/plan/nodes.h"
#include "bridge/plan/routing.h"

#include "core/error.h"

#include <stdlib.h>

static const colo_sum_group_t *groups_of(const colo_builder_t *w)
{
    return w->held.groups.items;
}

/* How many addends of the group that @lead leads @node lacks. */
static int64_t lacks(colo_builder_t *w, int64_t node, int64_t lead)
{
    const colo_source_t *s = w->held.nodes.items;
    const colo_sum_group_t *g = groups_of(w);
    int64_t n = g[lead].n;
    for (int64_t i = colo_source_find(w, s, w->held.nodes.n, node, -1);
         i < w->held.nodes.n && s[i].key == node; i++)
        n -= g[s[i].rank].lead == lead;
    return n;
}

static bool sum_is_smaller(const colo_builder_t *w, int64_t addends)
{
    return addends * (int64_t)w->elem > (int64_t)w->sum_elem;
}

/* The node with most addends that are in no group yet; @most: how many. */
static int64_t next_home(const colo_builder_t *w, int64_t *most)
{
    const colo_source_t *s = w->held.nodes.items;
    int64_t home = -1, n = 0;
    *most = 0;
    for (int64_t i = 0; i < w->held.nodes.n; i++) {
        n = (i > 0 && s[i].key == s[i - 1].key ? n : 0) + (groups_of(w)[s[i].rank].n == 0);
        if (n > *most) {
            *most = n;
            home = s[i].key;
        }
    }
    return home;
}

colo_status_t colo_node_sums_group(colo_builder_t *w)
{
    const colo_source_t *s = w->held.nodes.items;
    w->held.groups.n = 0;
    for (int64_t a = 0; a < w->held.naddends; a++) {
        colo_sum_group_t *g = colo_list_push(&w->held.groups, sizeof *g);
        if (!g)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld addends", (long long)w->held.naddends);
        *g = (colo_sum_group_t){0};
    }
    colo_sum_group_t *g = w->held.groups.items;
    for (int64_t left = w->held.naddends, most; left > 0; left -= most) {
        const int64_t home = next_home(w, &most);
        const bool sums = sum_is_smaller(w, most);
        int64_t lead = -1;
        for (int64_t i = colo_source_find(w, s, w->held.nodes.n, home, -1);
             i < w->held.nodes.n && s[i].key == home; i++) {
            const int64_t a = s[i].rank;
            if (g[a].n)
                continue;
            lead = lead < 0 || !sums ? a : lead;
            g[a] = (colo_sum_group_t){.home = home, .lead = lead, .n = sums ? most : 1};
        }
    }
    return COLO_OK;
}

bool colo_node_sums_reach(colo_builder_t *w, int64_t rank)
{
    if (!w->summing)
        return true;
    const int64_t lead = groups_of(w)[w->held.addend].lead;
    return w->sums == sum_is_smaller(w, lacks(w, colo_location_of(w->cfg, rank).node, lead));
}

bool colo_node_sums_lead(const colo_builder_t *w)
{
    return groups_of(w)[w->held.addend].lead == w->held.addend;
}

int64_t colo_node_sums_saving(const colo_builder_t *w)
{
    return groups_of(w)[w->held.addend].n * (int64_t)w->elem - (int64_t)w->sum_elem;
}

static int by_value(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

colo_status_t colo_node_sums_sources(colo_builder_t *w)
{
    const colo_addend_source_t *h = w->held.addends.items;
    const int64_t lead = groups_of(w)[w->held.addend].lead;
    w->ranks.n = 0;
    for (int64_t i = 0; i < w->held.addends.n; i++) {
        if (groups_of(w)[h[i].addend].lead != lead || lacks(w, h[i].node, lead) > 0)
            continue;
        int64_t *rank = colo_list_push(&w->ranks, sizeof *rank);
        if (!rank)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld sources", (long long)w->held.addends.n);
        *rank = h[i].rank;
    }
    qsort(w->ranks.items, (size_t)w->ranks.n, sizeof(int64_t), by_value);
    return COLO_OK;
}

/* ---- the order of addition ---- */

static int by_home(const void *a, const void *b)
{
    const colo_sum_group_t *const x = *(const colo_sum_group_t *const *)a,
                                  *const y = *(const colo_sum_group_t *const *)b;
    if (x->home != y->home)
        return x->home < y->home ? -1 : 1;
    if (x->lead != y->lead)
        return x->lead < y->lead ? -1 : 1;
    return (x > y) - (x < y); /* by addend */
}

/* Does what the last order of @terms says, @n of them, stand there before? Then at *first. */
static bool is_known(const colo_list_t *terms, int64_t n, int32_t *first)
{
    const colo_term_t *t = terms->items, *mine = t + terms->n - n;
    for (int64_t i = 0; t + i < mine; i++) {
        int64_t k = 0;
        while (k < n && t[i + k].addend == mine[k].addend && t[i + k].use == mine[k].use)
            k++;
        if (k == n && (i == 0 || t[i - 1].use & COLO_TERM_LAST)) {
            *first = (int32_t)i;
            return true;
        }
    }
    return false;
}

colo_status_t colo_node_sums_order(colo_builder_t *w, int64_t node, bool one_group, int32_t *first)
{
    const colo_sum_group_t *g = groups_of(w), *mine = &g[w->held.addend];
    const int64_t begin = w->terms.n;
    COLO_AUTOFREE const colo_sum_group_t **by = malloc((size_t)w->held.naddends * sizeof *by);
    if (!by)
        return colo_fail(COLO_ERR_NOMEM, "plan: %lld addends", (long long)w->held.naddends);
    for (int64_t a = 0; a < w->held.naddends; a++)
        by[a] = &g[a];
    qsort(by, (size_t)w->held.naddends, sizeof *by, by_home);
    colo_term_t *t = NULL;
    for (int64_t i = 0; i < w->held.naddends; i++) {
        const int64_t a = by[i] - g;
        const bool sum = !one_group && sum_is_smaller(w, lacks(w, node, g[a].lead));
        if ((one_group && g[a].lead != mine->lead) || (sum && g[a].lead != a))
            continue;
        t = colo_list_push(&w->terms, sizeof *t);
        if (!t || w->terms.n > INT32_MAX)
            return colo_fail(COLO_ERR_NOMEM, "plan: %lld terms of sums", (long long)w->terms.n);
        *t = (colo_term_t){(int32_t)a,
                           (sum ? COLO_TERM_SUM : 0) | (g[a].lead == a ? COLO_TERM_FIRST : 0)};
    }
    if (t) /* always: there are addends */
        t->use |= COLO_TERM_LAST;
    *first = (int32_t)begin;
    if (is_known(&w->terms, w->terms.n - begin, first))
        w->terms.n = begin;
    return COLO_OK;
}

/* ---- which ranks bring addends together ---- */

int64_t colo_node_sums_helper(const colo_builder_t *w, int64_t collector, int64_t addend)
{
    const colo_addend_source_t *h = w->held.addends.items, *c = h;
    int64_t before = 0, n = 0, first = -1;
    while (c->rank != collector)
        c++;
    for (int64_t i = 0; i < w->held.addends.n; i++) {
        before += h[i].node == c->node && h[i].addend == c->addend && &h[i] < c;
        if (h[i].node != c->node || h[i].addend != addend)
            continue;
        first = n++ ? first : i;
    }
    for (int64_t i = first, k = before % n;; i++)
        if (h[i].node == c->node && h[i].addend == addend && k-- == 0)
            return h[i].rank;
}
