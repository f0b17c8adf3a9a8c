/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_court.c - ownership from the oracle as one bit per (rank, index of an axis). The features
 * axis is cut into cells at every boundary that occurs.
 */
#include "harness/plan_court.h"

#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void add_edge(court_t *k, int64_t *cap, int64_t v)
{
    if (k->nc + 2 > *cap) {
        *cap = *cap * 2 + 16;
        k->edge = realloc(k->edge, (size_t)*cap * sizeof *k->edge);
        if (!k->edge)
            abort();
    }
    k->edge[k->nc++] = v;
}

static void add_region_edges(court_t *k, int64_t *cap, const colo_region_t *regions, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int e = 0; e < 2; e++)
            if (regions[i].h[e] > 0 && regions[i].h[e] < k->w->c->shape.h)
                add_edge(k, cap, regions[i].h[e]);
}

static void find_cells(court_t *k)
{
    const t_case_t *c = k->w->c;
    int64_t cap = 0;
    add_edge(k, &cap, 0);
    if (c->shape.h)
        add_edge(k, &cap, c->shape.h);
    /* where features are split: BLOCK boundaries of every rank, floor(dH/D) for all D that occur */
    for (int s = 0; s < 2; s++) {
        const ref_side_t *side = s ? &c->dst : &c->src;
        for (int i = 0; side->nsplits[2] && i < side->ndims; i++)
            for (int64_t d = 1; d < side->extent[i]; d++)
                add_edge(k, &cap, d * c->shape.h / side->extent[i]);
    }
    for (int32_t r = 0; r < k->w->n; r++) {
        int32_t n;
        const colo_plan_message_t *m = colo_plan_recvs(k->w->plan[r], k->pass, &n);
        for (int32_t i = 0; i < n; i++)
            add_region_edges(k, &cap, m[i].regions, m[i].nregions);
        int64_t nl;
        const colo_region_t *l = colo_plan_locals(k->w->plan[r], k->pass, &nl);
        add_region_edges(k, &cap, l, nl);
        m = colo_plan_relays(k->w->plan[r], k->pass, false, &n);
        for (int32_t i = 0; i < n; i++)
            add_region_edges(k, &cap, m[i].regions, m[i].nregions);
        m = colo_plan_sums(k->w->plan[r], k->pass, false, &n);
        for (int32_t i = 0; i < n; i++)
            add_region_edges(k, &cap, m[i].regions, m[i].nregions);
    }
    qsort(k->edge, (size_t)k->nc, sizeof *k->edge, by_value);
    int64_t u = 0;
    for (int64_t i = 0; i < k->nc; i++)
        if (!i || k->edge[i] != k->edge[u - 1])
            k->edge[u++] = k->edge[i];
    k->nc = u - 1;
}

void t_make_member(court_t *k, member_t *m, const ref_side_t *side, int64_t rank, bool full)
{
    /* features by their cut alone: a width of 0..H-1 may be huge, so ask the oracle with lists of
     * samples and rows and take the features' interval from its ends */
    const t_case_t *c = k->w->c;
    T_ENDS(ref_part_free) ref_part_t part = {0};
    bool wide = c->shape.h > 4096;
    ref_shape_t shape = c->shape;
    if (wide && !side->nsplits[2])
        shape.h = 1;
    ref_part_make(&part, side, shape, rank, full);
    m->holds = part.holds;
    m->addend = part.addend;
    m->b = calloc((size_t)k->nb + 1, 1);
    m->s = calloc((size_t)k->ns + 1, 1);
    m->h = calloc((size_t)k->nc + 1, 1);
    if (!m->b || !m->s || !m->h)
        abort();
    for (int64_t i = 0; i < part.nb; i++)
        m->b[part.b[i]] = true;
    for (int64_t i = 0; i < part.ns; i++)
        m->s[part.s[i]] = true;
    for (int64_t i = 0; i < k->nc; i++)
        m->h[i] = shape.h != c->shape.h ? part.holds : ref_list_has(part.h, part.nh, k->edge[i]);
}

void t_court_open(court_t *k, t_plans_t *w, colo_pass_t pass)
{
    const t_case_t *c = w->c;
    bool partial = c->output == COLO_FULL_SEQ && c->grad == COLO_PARTIAL;
    memset(k, 0, sizeof *k);
    k->w = w;
    k->pass = pass;
    k->nb = c->shape.b;
    k->ns = c->shape.n;
    k->addends = pass == COLO_BACKWARD && partial ? ref_side_addends(&c->dst) : 1;
    find_cells(k);
    k->has = calloc((size_t)w->n, sizeof *k->has);
    k->wants = calloc((size_t)w->n, sizeof *k->wants);
    if (!k->has || !k->wants)
        abort();
    for (int32_t r = 0; r < w->n; r++) {
        member_t *s = pass == COLO_FORWARD ? &k->has[r] : &k->wants[r];
        member_t *d = pass == COLO_FORWARD ? &k->wants[r] : &k->has[r];
        t_make_member(k, s, &c->src, r, false);
        t_make_member(k, d, &c->dst, r,
                      c->output == COLO_FULL_SEQ && (pass == COLO_FORWARD || partial));
        if (k->addends == 1)
            s->addend = d->addend = 0;
    }
}

void t_court_close(court_t *k)
{
    for (int32_t r = 0; r < k->w->n; r++)
        for (int i = 0; i < 2; i++) {
            member_t *m = i ? &k->has[r] : &k->wants[r];
            free(m->b);
            free(m->s);
            free(m->h);
        }
    free(k->has);
    free(k->wants);
    free(k->edge);
}
