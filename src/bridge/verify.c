/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - COLO_CHECK=2: checks what the caller declared about the data.
 *
 * Two declared preconditions: a DISJOINT gradient is zero in rows that other context ranks own, and
 * replicas of a block hold the same bits. Both are checked before anything moves, and every rank
 * returns the error. Of a merged tensor, and of one with padding, only rows of the batch count:
 * what lies between them is the caller's. The host waits for the stream, so a capture goes without
 * (call.c).
 */
#include "bridge/call.h"

#include "core/box.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/list.h"

#include <stdlib.h>

/* Rows [row, row + count) of an input. */
static colo_box_t rows_of(const colo_carried_t *tensor, const colo_owned_t *own, int64_t row,
                          int64_t count)
{
    const int64_t elem = (int64_t)colo_dtype_size(tensor->dtype);
    return (colo_box_t){
        .data = tensor->in.data ? tensor->in.data + row * tensor->in.stride[1] * elem : NULL,
        .extent = {own->b1 - own->b0, count, (own->h1 - own->h0) * tensor->per},
        .stride = {tensor->in.stride[0], tensor->in.stride[1], tensor->in.stride[2]}};
}

/* ---- zeros ---- */

static colo_status_t check_zeros(const colo_call_t *call, int32_t k, int64_t row, int64_t count)
{
    const colo_carried_t *tensor = &call->carried[k];
    const colo_owned_t *own = &call->frame.program->plan->own_dst;
    const colo_box_t box = rows_of(tensor, own, row, count);
    const long long rank = (long long)call->frame.program->plan->rank;
    const int64_t features = box.extent[2];
    int64_t offset;
    COLO_TRY(call->bridge->device->box_nonzero(&box, tensor->dtype, &offset, call->stream));
    if (offset < 0)
        return COLO_OK;
    COLO_FAIL_IF(call->batch, COLO_ERR_CONTRACT,
                 "rank %lld: d_y[%d] was declared DISJOINT, but row %lld is not zero and "
                 "belongs to another context rank; use PARTIAL",
                 rank, (int)k, (long long)(row + offset / features));
    return colo_fail(COLO_ERR_CONTRACT,
                     "rank %lld: d_y was declared DISJOINT, but row %lld of sample %lld is not "
                     "zero and belongs to another context rank; use PARTIAL",
                     rank, (long long)(row + offset / features % count),
                     (long long)(own->b0 + offset / features / count));
}

/* Looks for rows of a uniform bridge that no run of this rank has. */
static colo_status_t verify_uniform(const colo_call_t *call)
{
    const colo_plan_t *plan = call->frame.program->plan;
    const colo_shape_t *shape = &plan->config.shape;
    int64_t nruns = 0;
    colo_owned_t own;
    COLO_TRY(colo_layout_owned(&plan->dst, plan->rank, shape, false, &own, NULL, 0, &nruns));
    COLO_AUTOFREE colo_run_t *runs = calloc((size_t)nruns + 1, sizeof *runs);
    COLO_FAIL_IF(!runs, COLO_ERR_NOMEM, "bridge: %lld rows to verify", (long long)shape->rows);
    COLO_TRY(colo_layout_owned(&plan->dst, plan->rank, shape, false, &own, runs, nruns, &nruns));
    COLO_SORT(runs, nruns, row);
    runs[nruns] = (colo_run_t){.row = shape->rows};
    for (int64_t i = 0, row = 0; i <= nruns; row = runs[i].row + runs[i].count, i++)
        if (row < runs[i].row)
            COLO_TRY(check_zeros(call, 0, row, runs[i].row - row));
    return COLO_OK;
}

colo_status_t colo_call_verify_zeros(const colo_call_t *call)
{
    const colo_plan_config_t *config = &call->frame.program->plan->config;
    const colo_ragged_places_t *places = call->batch ? &call->batch->places : NULL;
    if (!places)
        return config->output == COLO_OUTPUT_FULL_SEQ && config->grad == COLO_GRAD_DISJOINT &&
                       call->carried[0].in.data
                   ? verify_uniform(call)
                   : COLO_OK;
    for (int32_t k = 0; k < call->frame.n; k++)
        for (int64_t i = 0;
             call->carried[k].in.data && call->carried[k].per > 0 && i < places->nforeign; i++)
            COLO_TRY(check_zeros(call, k, places->foreign[i].local, places->foreign[i].count));
    return COLO_OK;
}

/* ---- replicas ---- */

/* The first replica of @rank's block: coordinates of dims without a role set to 0. */
static int64_t first_replica(const colo_layout_t *layout, bool rows_role, bool context_role,
                             int64_t rank)
{
    int64_t coords[COLO_DIMS_MAX] = {0}, keep[COLO_DIMS_MAX] = {0}, first = rank;
    if (!colo_layout_coords(layout, rank, coords))
        return rank;
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < layout->nsplits[axis]; i++) {
            const colo_split_t *split = &layout->split[axis][i];
            if (axis != COLO_AXIS_ROWS || rows_role || (context_role && split->context))
                keep[split->dim] = coords[split->dim];
        }
    if (layout->stage_dim >= 0)
        keep[layout->stage_dim] = layout->stage;
    (void)colo_grid_rank(&layout->grid, keep, &first);
    return first;
}

/* The first row of the input that comm rank @i has. */
static int64_t first_of(const colo_bridge_t *bridge, colo_pass_t pass, int32_t i)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const bool fwd = pass == COLO_PASS_FORWARD;
    const bool partial =
        plan->config.output == COLO_OUTPUT_FULL_SEQ && plan->config.grad == COLO_GRAD_PARTIAL;
    return first_replica(fwd ? &plan->src : &plan->dst, fwd || !partial, true,
                         colo_comm_world_rank(bridge->comm, i));
}

/* @mine: of what this rank holds; replicas must bring the same. Collective. */
static colo_status_t compare(const colo_bridge_t *bridge, colo_pass_t pass, uint64_t mine)
{
    const bool fwd = pass == COLO_PASS_FORWARD;
    const int32_t n = colo_comm_size(bridge->comm);
    COLO_AUTOFREE uint64_t *all = calloc((size_t)n, sizeof *all);
    if (!all)
        return colo_comm_fail(bridge->comm,
                              colo_fail(COLO_ERR_NOMEM, "bridge: %d fingerprints", (int)n));
    COLO_TRY(
        colo_comm_gather(bridge->comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, &mine, all, 1));
    for (int32_t i = 0; i < n; i++) {
        const int64_t first = first_of(bridge, pass, i);
        int32_t j = colo_comm_find(bridge->comm, first);
        for (int32_t k = 0; j < 0; k++) /* the comm may lack it, and has @i */
            j = first_of(bridge, pass, k) == first ? k : -1;
        COLO_FAIL_IF(
            all[i] != all[j], COLO_ERR_CONTRACT,
            "ranks %lld and %lld hold the same block of %s, but their values differ; %s",
            (long long)colo_comm_world_rank(bridge->comm, j),
            (long long)colo_comm_world_rank(bridge->comm, i), fwd ? "x" : "d_y",
            fwd ? "give both the same x: is an all-reduce missing, or a common dropout seed?"
                : "all-reduce d_y over these ranks (tp, usually) before the bridge");
    }
    return COLO_OK;
}

static colo_status_t add_rows(const colo_call_t *call, int32_t k, const colo_run_t *rows,
                              uint64_t *hash)
{
    const colo_plan_t *plan = call->frame.program->plan;
    const colo_owned_t *own =
        call->frame.pass == COLO_PASS_FORWARD ? &plan->own_src : &plan->own_dst;
    const colo_box_t box = rows_of(&call->carried[k], own, rows->local, rows->count);
    uint64_t mine = 0;
    if (colo_box_count(&box) <= 0) /* a view of nothing may have a pointer, or none */
        return COLO_OK;
    COLO_TRY(call->bridge->device->box_hash(&box, colo_dtype_size(call->carried[k].dtype), &mine,
                                            call->stream));
    *hash = colo_hash_i64(*hash, (int64_t)mine);
    return COLO_OK;
}

colo_status_t colo_call_verify_replicas(const colo_call_t *call)
{
    const colo_plan_t *plan = call->frame.program->plan;
    const bool forward = call->frame.pass == COLO_PASS_FORWARD;
    const colo_ragged_places_t *places = call->batch && !forward ? &call->batch->places : NULL;
    const int64_t rows = forward ? plan->own_src.rows : plan->own_dst.rows;
    const colo_run_list_t *padding = &plan->padding[COLO_PASS_BACKWARD]; /* of the source */
    uint64_t hash = COLO_HASH_INIT;
    colo_status_t st = COLO_OK;
    for (int32_t k = 0; k < call->frame.n; k++) {
        if (!call->carried[k].in.data)
            continue;
        for (int64_t i = 0, local = 0; st == COLO_OK && !places && i <= padding->n; i++) {
            const int64_t end = i < padding->n ? padding->run[i].local : rows;
            st = add_rows(call, k, &(colo_run_t){.local = local, .count = end - local}, &hash);
            local = i < padding->n ? end + padding->run[i].count : end;
        }
        for (int64_t i = 0; st == COLO_OK && places && i < places->n; i++)
            st = add_rows(call, k, &places->stored[i], &hash);
        if (st < 0)
            return colo_comm_fail(call->bridge->comm, st);
    }
    return compare(call->bridge, call->frame.pass, hash);
}
