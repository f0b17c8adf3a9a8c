/* SPDX-License-Identifier: Apache-2.0 */
/*
 * add.c - the additions of gradients: every element in addend order, or by the plan's terms if
 * nodes add up (node-sums.c) or rows have addends of their own. Sums of a node are as wide as fp32
 * at least; the result is rounded once.
 */
#include "bridge/run/run.h"

/* One addition of a call, of one tensor; and sums that go to the device together, none of which
 * reads what another one writes. */
typedef struct addition {
    const colo_device_t *device;
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
static colo_box_t box_of(const addition_t *addition, int buffer, int64_t key,
                         const colo_routes_t *list, int64_t i)
{
    return colo_call_box(addition->frame, addition->tensor, (colo_end_t){buffer, key}, list, i,
                         false);
}

static bool is_mine(const addition_t *addition, const colo_routes_t *list, int64_t i)
{
    if (addition->plan->names_rows && list->offset[i].sum_row < 0)
        return false;
    return addition->add->addend < 0 || list->region[i].addend == addition->add->addend;
}

/* ---- by addend ---- */

static colo_status_t add_region(addition_t *addition, const colo_routes_t *list, int64_t i)
{
    const int64_t addends = addition->plan->addends;
    const bool own_in = addition->add->own_in && list == addition->add->list[0];
    const colo_box_t to = box_of(addition, COLO_OUT, 0, list, i);
    for (int64_t addend = 0; addend < addends; addend++)
        addition->term[addend] = own_in && addend == addition->plan->own_addend
                                     ? box_of(addition, COLO_IN, 0, list, i)
                                     : box_of(addition, COLO_PARTIALS, addend, list, i);
    return addition->device->box_sum(&to, addition->term, (int32_t)addends, addition->tensor->dtype,
                                     addition->stream);
}

/* ---- by terms ---- */

static colo_status_t flush(addition_t *addition)
{
    const int32_t n = addition->nsums;
    addition->nsums = addition->nterms = 0;
    return addition->device->box_sums(addition->sum, n, addition->stream);
}

/* Begins a sum of all addends at most, when those that fill the list have gone. */
static colo_status_t begin_sum(addition_t *addition, colo_box_t to, colo_dtype_t dtype)
{
    if (addition->nsums == (int32_t)(sizeof addition->sum / sizeof addition->sum[0]) ||
        addition->nterms + addition->plan->addends > COLO_MAX_ADDENDS)
        COLO_TRY(flush(addition));
    addition->sum[addition->nsums++] =
        (colo_mixed_sum_t){.to = to,
                           .dtype = dtype,
                           .from = &addition->term[addition->nterms],
                           .from_dtype = &addition->dtype[addition->nterms]};
    return COLO_OK;
}

static void add_box(addition_t *addition, colo_box_t box, colo_dtype_t dtype)
{
    addition->term[addition->nterms] = box;
    addition->dtype[addition->nterms++] = dtype;
    addition->sum[addition->nsums - 1].n++;
}

static void add_partial(addition_t *addition, int kind, int64_t addend, const colo_routes_t *list,
                        int64_t i)
{
    const int64_t key = colo_sum_key(addition->plan, kind, addend);
    if (addition->add->own_in && addend == 0 && list == addition->add->list[0]) {
        add_box(addition, box_of(addition, COLO_IN, 0, list, i), addition->tensor->dtype);
        return;
    }
    add_box(addition, box_of(addition, COLO_PARTIALS, key, list, i),
            colo_sum_dtype(addition->plan, addition->tensor, key));
}

/* The first term behind the group that begins at @term, or NULL if that group is the last. */
static const colo_term_t *next_group(const colo_term_t *term)
{
    while (!(term->use & COLO_TERM_LAST))
        if ((++term)->use & COLO_TERM_FIRST)
            return term;
    return NULL;
}

static bool is_single(const colo_term_t *term)
{
    return term->use & COLO_TERM_LAST || term[1].use & COLO_TERM_FIRST;
}

/* A sum of each group of a region that has several terms. */
static colo_status_t add_groups(addition_t *addition, const colo_routes_t *list, int64_t i)
{
    const colo_dtype_t wide = colo_sum_wide(addition->tensor->dtype);
    for (const colo_term_t *term = &addition->plan->term[list->offset[i].order], *next; term;
         term = next) {
        next = next_group(term);
        if (is_single(term))
            continue;
        const int64_t sum = colo_sum_key(addition->plan, COLO_SUM_NODE, term->addend);
        COLO_TRY(begin_sum(addition, box_of(addition, COLO_PARTIALS, sum, list, i), wide));
        for (bool last = false; !last; term++) {
            last = is_single(term);
            add_partial(addition, COLO_SUM_ADDEND, term->addend, list, i);
        }
    }
    return COLO_OK;
}

/* The sum of a region: of the sums of its groups, and of the terms of groups that have one. */
static colo_status_t add_total(addition_t *addition, const colo_routes_t *list, int64_t i)
{
    COLO_TRY(begin_sum(addition, box_of(addition, COLO_OUT, 0, list, i), addition->tensor->dtype));
    for (const colo_term_t *term = &addition->plan->term[list->offset[i].order]; term;
         term = next_group(term)) {
        const bool sum = term->use & COLO_TERM_SUM || !is_single(term);
        add_partial(addition, sum ? COLO_SUM_NODE : COLO_SUM_ADDEND, term->addend, list, i);
    }
    return COLO_OK;
}

/* What this rank brings to other nodes: its addend and those that it has collected. */
static colo_status_t add_for_others(addition_t *addition, const colo_routes_t *list, int64_t i)
{
    const colo_term_t *term = &addition->plan->term[list->offset[i].order];
    const int64_t leaves = colo_sum_key(addition->plan, COLO_SUM_LEAVES, 0);
    COLO_TRY(begin_sum(addition, box_of(addition, COLO_PARTIALS, leaves, list, i),
                       colo_sum_wide(addition->tensor->dtype)));
    do {
        if (term->addend == addition->plan->own_addend)
            add_box(addition, box_of(addition, COLO_IN, 0, list, i), addition->tensor->dtype);
        else
            add_partial(addition, COLO_SUM_COLLECTED, term->addend, list, i);
    } while (!(term++->use & COLO_TERM_LAST));
    return COLO_OK;
}

/* ---- all regions ---- */

typedef colo_status_t (*add_fn)(addition_t *a, const colo_routes_t *list, int64_t i);

static colo_status_t each_region(addition_t *addition, add_fn add)
{
    for (int k = 0; k < 3 && addition->add->list[k]; k++)
        for (int64_t i = 0; i < addition->add->list[k]->nregions; i++)
            if (is_mine(addition, addition->add->list[k], i))
                COLO_TRY(add(addition, addition->add->list[k], i));
    return COLO_OK;
}

colo_status_t colo_add_run(const colo_device_t *device, const colo_call_frame_t *frame,
                           const colo_add_t *add, colo_stream_t stream)
{
    addition_t addition;
    addition.device = device;
    addition.frame = frame;
    addition.plan = frame->program->plan;
    addition.add = add;
    addition.stream = stream;
    addition.nsums = addition.nterms = 0;
    for (int32_t k = 0; k < frame->n; k++) {
        addition.tensor = &frame->tensor[k];
        if (addition.tensor->per == 0)
            continue;
        if (!add->by_terms) {
            COLO_TRY(each_region(&addition, add_region));
            continue;
        }
        if (add->to == COLO_OUT) { /* totals read sums of groups */
            COLO_TRY(each_region(&addition, add_groups));
            COLO_TRY(flush(&addition));
        }
        COLO_TRY(each_region(&addition, add->to == COLO_OUT ? add_total : add_for_others));
        COLO_TRY(flush(&addition));
    }
    return COLO_OK;
}
