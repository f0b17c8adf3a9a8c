/* SPDX-License-Identifier: Apache-2.0 */
/*
 * add-up.c - the additions of PARTIAL gradients if nodes add up (node-sums.c): what crosses the
 * network, and what a rank needs. Sums of a node are as wide as fp32 at least; the result is
 * rounded once.
 */
#include "bridge/bridge.h"

static size_t part_size(const colo_owned_t *o)
{
    return (size_t)((o->b1 - o->b0) * o->rows * (o->h1 - o->h0));
}

/* Sums of a node are at least as wide as fp32. */
colo_dtype_t colo_sum_wide(colo_dtype_t dtype)
{
    return colo_dtype_size(dtype) < sizeof(float) ? COLO_F32 : dtype;
}

size_t colo_partial_sum_bytes(const colo_plan_t *p, int64_t per, colo_dtype_t dtype)
{
    const size_t src = part_size(&p->own_src), dst = part_size(&p->own_dst);
    return (size_t)per * (p->node_sums
                              ? (src > dst ? src : dst) * colo_dtype_size(colo_sum_wide(dtype))
                              : src * colo_dtype_size(dtype));
}

/* Values to add up, in partial sums. */
typedef struct terms {
    int32_t n;
    colo_box_t box[COLO_MAX_ADDENDS];
    colo_dtype_t dtype[COLO_MAX_ADDENDS];
} terms_t;

static void add_term(terms_t *x, const colo_shape_state_t *s, const colo_carried_t *t, int64_t key,
                     const colo_region_t *r, const colo_offset_t *where)
{
    x->box[x->n] = colo_sum_box(s, t, key, r, where, false);
    x->dtype[x->n++] = colo_sum_dtype(s->plan, t, key);
}

colo_status_t colo_add_up_terms(colo_bridge_t *b, const colo_shape_state_t *s,
                                const colo_carried_t *t, const colo_region_t *r,
                                const colo_offset_t *where, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_term_t *x = &p->term[where->order];
    terms_t all = {.n = 0};
    const colo_box_t to = colo_exchange_box(t, t->out, &p->own_src, r, where->src_row, false);
    for (bool last = false; !last;) {
        terms_t group = {.n = 0};
        const int64_t sum = colo_sum_key(p, COLO_SUM_NODE, x->addend);
        do {
            const int kind = x->use & COLO_TERM_SUM ? COLO_SUM_NODE : COLO_SUM_ADDEND;
            add_term(&group, s, t, colo_sum_key(p, kind, x->addend), r, where);
            last = x++->use & COLO_TERM_LAST;
        } while (!last && !(x->use & COLO_TERM_FIRST));
        if (group.n > 1) {
            add_term(&all, s, t, sum, r, where);
            COLO_TRY(b->ops->box_sum_mixed(&all.box[all.n - 1], colo_sum_wide(t->dtype), group.box,
                                           group.dtype, group.n, stream));
        } else {
            all.box[all.n] = group.box[0];
            all.dtype[all.n++] = group.dtype[0];
        }
    }
    return b->ops->box_sum_mixed(&to, t->dtype, all.box, all.dtype, all.n, stream);
}

colo_status_t colo_add_up_for_others(colo_bridge_t *b, const colo_shape_state_t *s,
                                     const colo_carried_t *t, colo_stream_t stream)
{
    const colo_plan_t *p = s->plan;
    const colo_routes_t *send = &p->sum_send;
    for (int64_t i = 0; i < send->nregions; i++) {
        const colo_region_t *r = &send->region[i];
        const colo_offset_t *where = &send->offset[i];
        const colo_term_t *x = &p->term[where->order];
        const colo_box_t to =
            colo_sum_box(s, t, colo_sum_key(p, COLO_SUM_LEAVES, 0), r, where, false);
        terms_t all = {.n = 0};
        do {
            if (x->addend != p->own_addend) {
                add_term(&all, s, t, colo_sum_key(p, COLO_SUM_COLLECTED, x->addend), r, where);
                continue;
            }
            all.box[all.n] = colo_exchange_box(t, t->in, &p->own_dst, r, where->dst_row, false);
            all.dtype[all.n++] = t->dtype;
        } while (!(x++->use & COLO_TERM_LAST));
        COLO_TRY(
            b->ops->box_sum_mixed(&to, colo_sum_wide(t->dtype), all.box, all.dtype, all.n, stream));
    }
    return COLO_OK;
}
