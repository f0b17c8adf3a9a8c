/* SPDX-License-Identifier: Apache-2.0 */
/*
 * add-up.c - the additions of PARTIAL gradients if nodes add up (node-sums.c): what crosses the
 * network, and what a rank needs. Sums of a node are as wide as fp32 at least; the result is
 * rounded once.
 */
#include "bridge/bridge.h"

void colo_sum_extent(const colo_plan_t *p, int64_t x[3])
{
    for (int dst = 0; dst < (colo_plan_sums_nodes(p) ? 2 : 1); dst++) {
        const colo_owned_t *o = dst ? &p->own_dst : &p->own_src;
        const int64_t of[3] = {o->b1 - o->b0, o->rows, o->h1 - o->h0};
        for (int i = 0; i < 3; i++)
            x[i] = dst && x[i] > of[i] ? x[i] : of[i];
    }
}

/* Sums of a node are at least as wide as fp32. */
colo_dtype_t colo_sum_wide(colo_dtype_t dtype)
{
    return colo_dtype_size(dtype) < sizeof(float) ? COLO_F32 : dtype;
}

size_t colo_partial_sum_bytes(const colo_plan_t *p, int64_t per, colo_dtype_t dtype)
{
    int64_t x[3];
    colo_sum_extent(p, x);
    return (size_t)(per * x[0] * x[1] * x[2]) *
           colo_dtype_size(colo_plan_sums_nodes(p) ? colo_sum_wide(dtype) : dtype);
}

/* Sums that go to the device together. None of them reads what another one writes. */
typedef struct list {
    int32_t n, terms;
    colo_mixed_sum_t sum[64];
    colo_box_t box[COLO_MAX_ADDENDS];
    colo_dtype_t dtype[COLO_MAX_ADDENDS];
} list_t;

static colo_status_t add_up(const colo_bridge_t *b, list_t *l, colo_stream_t stream)
{
    const int32_t n = l->n;
    l->n = l->terms = 0;
    return b->ops->box_sums(l->sum, n, stream);
}

/* Begins a sum of at most @most terms into @to, when those that fill the list have gone. */
static colo_status_t begin_sum(const colo_bridge_t *b, list_t *l, const colo_box_t *to,
                               colo_dtype_t dtype, int64_t most, colo_stream_t stream)
{
    if (l->n == (int32_t)(sizeof l->sum / sizeof l->sum[0]) || l->terms + most > COLO_MAX_ADDENDS)
        COLO_TRY(add_up(b, l, stream));
    l->sum[l->n++] = (colo_mixed_sum_t){
        .to = *to, .dtype = dtype, .from = &l->box[l->terms], .from_dtype = &l->dtype[l->terms]};
    return COLO_OK;
}

static void add_box(list_t *l, const colo_box_t *box, colo_dtype_t dtype)
{
    l->box[l->terms] = *box;
    l->dtype[l->terms++] = dtype;
    l->sum[l->n - 1].n++;
}

static void add_term(list_t *l, const colo_shape_state_t *s, const colo_carried_t *t, int64_t key,
                     const colo_region_t *r, const colo_offset_t *where)
{
    const colo_box_t box = colo_sum_box(s, t, key, r, where, false);
    add_box(l, &box, colo_sum_dtype(s->plan, t, key));
}

/* The first term behind the group that begins at @x, or NULL if that group is the last. */
static const colo_term_t *next_group(const colo_term_t *x)
{
    while (!(x->use & COLO_TERM_LAST))
        if ((++x)->use & COLO_TERM_FIRST)
            return x;
    return NULL;
}

static bool is_single(const colo_term_t *x)
{
    return x->use & COLO_TERM_LAST || x[1].use & COLO_TERM_FIRST;
}

/* A sum of each group of @r that has several terms. */
static colo_status_t add_groups(const colo_bridge_t *b, list_t *l, const colo_shape_state_t *s,
                                const colo_carried_t *t, const colo_region_t *r,
                                const colo_offset_t *where, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    for (const colo_term_t *x = &p->term[where->order], *next; x; x = next) {
        next = next_group(x);
        if (is_single(x))
            continue;
        const int64_t sum = colo_sum_key(p, COLO_SUM_NODE, x->addend);
        const colo_box_t to = colo_sum_box(s, t, sum, r, where, false);
        COLO_TRY(begin_sum(b, l, &to, colo_sum_wide(t->dtype), p->addends, stream));
        for (bool last = false; !last; x++) {
            last = is_single(x);
            add_term(l, s, t, colo_sum_key(p, COLO_SUM_ADDEND, x->addend), r, where);
        }
    }
    return COLO_OK;
}

/* The sum of @r: of the sums of its groups, and of the terms of groups that have one. */
static colo_status_t add_region(const colo_bridge_t *b, list_t *l, const colo_shape_state_t *s,
                                const colo_carried_t *t, const colo_region_t *r,
                                const colo_offset_t *where, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_box_t to = colo_exchange_box(t, t->out, &p->own_src, r, where->src_row, false);
    COLO_TRY(begin_sum(b, l, &to, t->dtype, p->addends, stream));
    for (const colo_term_t *x = &p->term[where->order]; x; x = next_group(x)) {
        const bool sum = x->use & COLO_TERM_SUM || !is_single(x);
        add_term(l, s, t, colo_sum_key(p, sum ? COLO_SUM_NODE : COLO_SUM_ADDEND, x->addend), r,
                 where);
    }
    return COLO_OK;
}

colo_status_t colo_add_up_terms(const colo_bridge_t *b, const colo_shape_state_t *s,
                                const colo_carried_t *t, const colo_routes_t *const lists[3],
                                colo_stream_t stream)
{
    list_t l = {.n = 0};
    for (int total = 0; total < 2; total++) {
        for (int k = 0; k < 3; k++)
            for (int64_t i = 0; i < lists[k]->nregions; i++)
                if (lists[k]->region[i].addend == 0)
                    COLO_TRY((total ? add_region : add_groups)(b, &l, s, t, &lists[k]->region[i],
                                                               &lists[k]->offset[i], stream));
        COLO_TRY(add_up(b, &l, stream));
    }
    return COLO_OK;
}

colo_status_t colo_add_up_for_others(const colo_bridge_t *b, const colo_shape_state_t *s,
                                     const colo_carried_t *t, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_routes_t *send = &p->exchange[COLO_BACKWARD][COLO_NODE_SUMS].send;
    list_t l = {.n = 0};
    for (int64_t i = 0; i < send->nregions; i++) {
        const colo_region_t *r = &send->region[i];
        const colo_offset_t *where = &send->offset[i];
        const colo_term_t *x = &p->term[where->order];
        const colo_box_t to =
            colo_sum_box(s, t, colo_sum_key(p, COLO_SUM_LEAVES, 0), r, where, false);
        COLO_TRY(begin_sum(b, &l, &to, colo_sum_wide(t->dtype), p->addends, stream));
        do {
            if (x->addend != p->own_addend) {
                add_term(&l, s, t, colo_sum_key(p, COLO_SUM_COLLECTED, x->addend), r, where);
                continue;
            }
            const colo_box_t own =
                colo_exchange_box(t, t->in, &p->own_dst, r, where->dst_row, false);
            add_box(&l, &own, t->dtype);
        } while (!(x++->use & COLO_TERM_LAST));
    }
    return add_up(b, &l, stream);
}
