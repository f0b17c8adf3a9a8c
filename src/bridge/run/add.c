/* SPDX-License-Identifier: Apache-2.0 */
/*
 * add.c - the additions of PARTIAL gradients: every element in addend order, or by the plan's terms
 * if nodes add up (node-sums.c). Sums of a node are as wide as fp32 at least; the result is rounded
 * once.
 */
#include "bridge/run/add.h"

/* One addition of a call, of one tensor; and sums that go to the device together, none of which
 * reads what another one writes. */
typedef struct addition {
    const colo_ops_t *ops;
    const colo_call_frame_t *frame;
    const colo_plan_t *plan;
    const colo_add_t *add;
    const colo_carried_t *tensor;
    colo_stream_t stream;
    int32_t nsums, nterms;
    colo_mixed_sum_t sum[64];
    colo_box_t term[COLO_MAX_ADDENDS];
    colo_dtype_t dtype[COLO_MAX_ADDENDS];
} addition_t;

/* Region @i of a list. */
static colo_box_t box_of(const addition_t *a, int buffer, int64_t key, const colo_routes_t *list,
                         int64_t i)
{
    return colo_call_box(a->frame, a->tensor, (colo_end_t){buffer, key}, list, i, false);
}

static bool is_mine(const addition_t *a, const colo_routes_t *list, int64_t i)
{
    return a->add->addend < 0 || list->region[i].addend == a->add->addend;
}

/* ---- by addend ---- */

static colo_status_t add_region(addition_t *a, const colo_routes_t *list, int64_t i)
{
    const int64_t addends = a->plan->addends;
    const bool own_in = a->add->own_in && list == a->add->list[0];
    const colo_box_t to = box_of(a, COLO_OUT, 0, list, i);
    for (int64_t addend = 0; addend < addends; addend++)
        a->term[addend] = own_in && addend == a->plan->own_addend
                              ? box_of(a, COLO_IN, 0, list, i)
                              : box_of(a, COLO_PARTIALS, addend, list, i);
    return a->ops->box_sum(&to, a->term, (int32_t)addends, a->tensor->dtype, a->stream);
}

/* ---- by terms ---- */

static colo_status_t flush(addition_t *a)
{
    const int32_t n = a->nsums;
    a->nsums = a->nterms = 0;
    return a->ops->box_sums(a->sum, n, a->stream);
}

/* Begins a sum of all addends at most, when those that fill the list have gone. */
static colo_status_t begin_sum(addition_t *a, colo_box_t to, colo_dtype_t dtype)
{
    if (a->nsums == (int32_t)(sizeof a->sum / sizeof a->sum[0]) ||
        a->nterms + a->plan->addends > COLO_MAX_ADDENDS)
        COLO_TRY(flush(a));
    a->sum[a->nsums++] = (colo_mixed_sum_t){
        .to = to, .dtype = dtype, .from = &a->term[a->nterms], .from_dtype = &a->dtype[a->nterms]};
    return COLO_OK;
}

static void add_box(addition_t *a, colo_box_t box, colo_dtype_t dtype)
{
    a->term[a->nterms] = box;
    a->dtype[a->nterms++] = dtype;
    a->sum[a->nsums - 1].n++;
}

static void add_partial(addition_t *a, int kind, int64_t addend, const colo_routes_t *list,
                        int64_t i)
{
    const int64_t key = colo_sum_key(a->plan, kind, addend);
    add_box(a, box_of(a, COLO_PARTIALS, key, list, i), colo_sum_dtype(a->plan, a->tensor, key));
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

/* A sum of each group of a region that has several terms. */
static colo_status_t add_groups(addition_t *a, const colo_routes_t *list, int64_t i)
{
    const colo_dtype_t wide = colo_sum_wide(a->tensor->dtype);
    for (const colo_term_t *x = &a->plan->term[list->offset[i].order], *next; x; x = next) {
        next = next_group(x);
        if (is_single(x))
            continue;
        const int64_t sum = colo_sum_key(a->plan, COLO_SUM_NODE, x->addend);
        COLO_TRY(begin_sum(a, box_of(a, COLO_PARTIALS, sum, list, i), wide));
        for (bool last = false; !last; x++) {
            last = is_single(x);
            add_partial(a, COLO_SUM_ADDEND, x->addend, list, i);
        }
    }
    return COLO_OK;
}

/* The sum of a region: of the sums of its groups, and of the terms of groups that have one. */
static colo_status_t add_total(addition_t *a, const colo_routes_t *list, int64_t i)
{
    COLO_TRY(begin_sum(a, box_of(a, COLO_OUT, 0, list, i), a->tensor->dtype));
    for (const colo_term_t *x = &a->plan->term[list->offset[i].order]; x; x = next_group(x)) {
        const bool sum = x->use & COLO_TERM_SUM || !is_single(x);
        add_partial(a, sum ? COLO_SUM_NODE : COLO_SUM_ADDEND, x->addend, list, i);
    }
    return COLO_OK;
}

/* What this rank brings to other nodes: its addend and those that it has collected. */
static colo_status_t add_for_others(addition_t *a, const colo_routes_t *list, int64_t i)
{
    const colo_term_t *x = &a->plan->term[list->offset[i].order];
    const int64_t leaves = colo_sum_key(a->plan, COLO_SUM_LEAVES, 0);
    COLO_TRY(
        begin_sum(a, box_of(a, COLO_PARTIALS, leaves, list, i), colo_sum_wide(a->tensor->dtype)));
    do {
        if (x->addend == a->plan->own_addend)
            add_box(a, box_of(a, COLO_IN, 0, list, i), a->tensor->dtype);
        else
            add_partial(a, COLO_SUM_COLLECTED, x->addend, list, i);
    } while (!(x++->use & COLO_TERM_LAST));
    return COLO_OK;
}

/* ---- all regions ---- */

typedef colo_status_t (*add_fn)(addition_t *a, const colo_routes_t *list, int64_t i);

static colo_status_t each_region(addition_t *a, add_fn add)
{
    for (int k = 0; k < 3 && a->add->list[k]; k++)
        for (int64_t i = 0; i < a->add->list[k]->nregions; i++)
            if (is_mine(a, a->add->list[k], i))
                COLO_TRY(add(a, a->add->list[k], i));
    return COLO_OK;
}

colo_status_t colo_add_run(const colo_ops_t *ops, const colo_call_frame_t *f, const colo_add_t *add,
                           colo_stream_t stream)
{
    addition_t a;
    a.ops = ops;
    a.frame = f;
    a.plan = f->program->plan;
    a.add = add;
    a.stream = stream;
    a.nsums = a.nterms = 0;
    for (int32_t k = 0; k < f->n; k++) {
        a.tensor = &f->tensor[k];
        if (a.tensor->per == 0)
            continue;
        if (!add->by_terms) {
            COLO_TRY(each_region(&a, add_region));
            continue;
        }
        if (add->to == COLO_OUT) { /* totals read sums of groups */
            COLO_TRY(each_region(&a, add_groups));
            COLO_TRY(flush(&a));
        }
        COLO_TRY(each_region(&a, add->to == COLO_OUT ? add_total : add_for_others));
        COLO_TRY(flush(&a));
    }
    return COLO_OK;
}
