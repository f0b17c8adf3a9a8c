/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - COLO_CHECK=2: checks what the caller declared about the data.
 *
 * Two declared preconditions: a DISJOINT gradient is zero in rows that other context ranks own, and
 * replicas of a block hold the same bits. Both are checked before anything moves, and every rank
 * returns the error. Of a merged tensor only rows of the batch count: the text between them is the
 * caller's. The host waits for the stream, so a capture goes without (call.c).
 */
#include "bridge/call.h"

#include "core/box.h"
#include "core/error.h"
#include "core/hash.h"

#include <stdlib.h>
#include <string.h>

/* Rows [row, row + count) of an input. */
static colo_box_t rows_of(const colo_carried_t *t, const colo_owned_t *own, int64_t row,
                          int64_t count)
{
    const int64_t elem = (int64_t)colo_dtype_size(t->dtype);
    return (colo_box_t){.data = t->in.data ? t->in.data + row * t->in.stride[1] * elem : NULL,
                        .extent = {own->b1 - own->b0, count, (own->h1 - own->h0) * t->per},
                        .stride = {t->in.stride[0], t->in.stride[1], t->in.stride[2]}};
}

/* ---- zeros ---- */

static colo_status_t check_zeros(const colo_call_t *call, int32_t k, int64_t row, int64_t count)
{
    const colo_carried_t *t = &call->carried[k];
    const colo_owned_t *own = &call->frame.program->plan->own_dst;
    const colo_box_t box = rows_of(t, own, row, count);
    const long long rank = (long long)call->frame.program->plan->rank;
    const int64_t features = box.extent[2];
    int64_t offset;
    COLO_TRY(call->bridge->ops->box_nonzero(&box, t->dtype, &offset, call->stream));
    if (offset < 0)
        return COLO_OK;
    if (call->batch)
        return colo_fail(COLO_ERR_CONTRACT,
                         "rank %lld: d_y[%d] was declared DISJOINT, but row %lld is not zero and "
                         "belongs to another context rank; use PARTIAL",
                         rank, (int)k, (long long)(row + offset / features));
    return colo_fail(COLO_ERR_CONTRACT,
                     "rank %lld: d_y was declared DISJOINT, but row %lld of sample %lld is not "
                     "zero and belongs to another context rank; use PARTIAL",
                     rank, (long long)(row + offset / features % count),
                     (long long)(own->b0 + offset / features / count));
}

/* Of a uniform bridge: rows that no run of this rank has. */
static colo_status_t verify_uniform(const colo_call_t *call)
{
    const colo_plan_t *p = call->frame.program->plan;
    const colo_shape_t *shape = &p->config.shape;
    int64_t nruns = 0;
    colo_owned_t own;
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, shape, false, &own, NULL, 0, &nruns));
    COLO_AUTOFREE colo_run_t *runs = calloc((size_t)nruns + 1, sizeof *runs);
    COLO_AUTOFREE char *mine = calloc((size_t)shape->rows + 1, 1);
    if (!runs || !mine)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld rows to verify", (long long)shape->rows);
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, shape, false, &own, runs, nruns, &nruns));
    for (int64_t i = 0; i < nruns; i++)
        memset(mine + runs[i].row, 1, (size_t)runs[i].count);
    for (int64_t row = 0, end; row < shape->rows; row = end) {
        for (end = row + 1; end < shape->rows && !mine[end] == !mine[row]; end++)
            ;
        if (!mine[row])
            COLO_TRY(check_zeros(call, 0, row, end - row));
    }
    return COLO_OK;
}

colo_status_t colo_call_verify_zeros(const colo_call_t *call)
{
    const colo_plan_config_t *c = &call->frame.program->plan->config;
    const colo_ragged_places_t *places = call->batch ? &call->batch->places : NULL;
    if (!places)
        return c->output == COLO_FULL_SEQ && c->grad == COLO_DISJOINT && call->carried[0].in.data
                   ? verify_uniform(call)
                   : COLO_OK;
    for (int32_t k = 0; k < call->frame.n; k++)
        for (int64_t i = 0;
             call->carried[k].in.data && call->carried[k].per > 0 && i < places->nforeign; i++)
            COLO_TRY(check_zeros(call, k, places->foreign[i].row, places->foreign[i].count));
    return COLO_OK;
}

/* ---- replicas ---- */

/* The first replica of @rank's block: coordinates of dims without a role set to 0. */
static int64_t first_replica(const colo_layout_t *l, bool rows_role, bool context_role,
                             int64_t rank)
{
    int64_t c[COLO_MAX_DIMS] = {0}, keep[COLO_MAX_DIMS] = {0}, first = rank;
    if (!colo_layout_holds(l, rank))
        return rank;
    (void)colo_grid_coords(&l->grid, rank, c);
    for (int a = 0; a < 3; a++)
        for (int i = 0; i < l->nsplits[a]; i++) {
            const colo_split_t *s = &l->split[a][i];
            if (a != COLO_ROWS || rows_role || (context_role && s->context))
                keep[s->dim] = c[s->dim];
        }
    if (l->stage_dim >= 0)
        keep[l->stage_dim] = l->stage;
    (void)colo_grid_rank(&l->grid, keep, &first);
    return first;
}

/* Of the input that comm rank @i has. */
static int64_t first_of(const colo_bridge_t *b, colo_pass_t pass, int32_t i)
{
    const colo_plan_t *p = b->now.program.plan;
    const bool fwd = pass == COLO_FORWARD;
    const bool partial = p->config.output == COLO_FULL_SEQ && p->config.grad == COLO_PARTIAL;
    return first_replica(fwd ? &p->src : &p->dst, fwd || !partial, true,
                         colo_comm_world_rank(b->comm, i));
}

/* @mine: of what this rank holds; replicas must bring the same. Collective. */
static colo_status_t compare(const colo_bridge_t *b, colo_pass_t pass, uint64_t mine)
{
    const bool fwd = pass == COLO_FORWARD;
    const int32_t n = colo_comm_size(b->comm);
    COLO_AUTOFREE uint64_t *all = calloc((size_t)n, sizeof *all);
    if (!all)
        return colo_comm_i_fail(b->comm,
                                colo_fail(COLO_ERR_NOMEM, "bridge: %d fingerprints", (int)n));
    COLO_TRY(colo_comm_i_gather(b->comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, &mine, all, 1));
    for (int32_t i = 0; i < n; i++) {
        const int64_t first = first_of(b, pass, i);
        int32_t j = colo_comm_find(b->comm, first);
        for (int32_t k = 0; j < 0; k++) /* the comm may lack it, and has @i */
            j = first_of(b, pass, k) == first ? k : -1;
        if (all[i] != all[j])
            return colo_fail(
                COLO_ERR_CONTRACT,
                "ranks %lld and %lld hold the same block of %s, but their values differ; %s",
                (long long)colo_comm_world_rank(b->comm, j),
                (long long)colo_comm_world_rank(b->comm, i), fwd ? "x" : "d_y",
                fwd ? "give both the same x: is an all-reduce missing, or a common dropout seed?"
                    : "all-reduce d_y over these ranks (tp, usually) before the bridge");
    }
    return COLO_OK;
}

static colo_status_t add_rows(const colo_call_t *call, int32_t k, colo_run_t rows, uint64_t *hash)
{
    const colo_plan_t *p = call->frame.program->plan;
    const colo_owned_t *own = call->frame.pass == COLO_FORWARD ? &p->own_src : &p->own_dst;
    const colo_box_t box = rows_of(&call->carried[k], own, rows.row, rows.count);
    uint64_t mine = 0;
    if (colo_box_count(&box) <= 0) /* a view of nothing may have a pointer, or none */
        return COLO_OK;
    COLO_TRY(call->bridge->ops->box_hash(&box, colo_dtype_size(call->carried[k].dtype), &mine,
                                         call->stream));
    *hash = colo_hash_i64(*hash, (int64_t)mine);
    return COLO_OK;
}

colo_status_t colo_call_verify_replicas(const colo_call_t *call)
{
    const colo_plan_t *p = call->frame.program->plan;
    const bool forward = call->frame.pass == COLO_FORWARD;
    const colo_ragged_places_t *places = call->batch && !forward ? &call->batch->places : NULL;
    const colo_run_t all = {.count = forward ? p->own_src.rows : p->own_dst.rows};
    uint64_t hash = COLO_HASH_INIT;
    colo_status_t st = COLO_OK;
    for (int32_t k = 0; k < call->frame.n; k++) {
        if (!call->carried[k].in.data)
            continue;
        if (!places)
            st = add_rows(call, k, all, &hash);
        for (int64_t i = 0; st == COLO_OK && places && i < places->n; i++)
            st = add_rows(
                call, k,
                (colo_run_t){.row = places->stored[i].row, .count = places->stored[i].count},
                &hash);
        if (st < 0)
            return colo_comm_i_fail(call->bridge->comm, st);
    }
    return compare(call->bridge, call->frame.pass, hash);
}
