/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - COLO_CHECK=2: checks what the caller declared about the data.
 *
 * Two declared preconditions: a DISJOINT gradient is zero outside the rank's own rows, and replicas
 * of a block hold the same bits. Both are checked before anything moves, and every rank returns the
 * error. The host waits for the stream, so a capture goes without (bridge.c).
 */
#include "bridge/run/run.h"

#include "comm/comm.h"
#include "core/box.h"
#include "core/device.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>

colo_status_t colo_contract_zeros(const colo_bridge_t *b, colo_view_t d_y, colo_stream_t stream)
{
    const colo_plan_t *p = b->now.program.plan;
    const colo_owned_t *o = &p->own_dst;
    const colo_shape_t *s = &p->config.shape;
    int64_t elem = (int64_t)colo_dtype_size(p->config.dtype), nruns = 0;
    colo_owned_t own;
    if (p->config.output != COLO_FULL_SEQ || p->config.grad != COLO_DISJOINT || !d_y.data)
        return COLO_OK;
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, s, false, &own, NULL, 0, &nruns));
    COLO_AUTOFREE colo_run_t *runs = calloc((size_t)nruns + 1, sizeof *runs);
    COLO_AUTOFREE char *mine = calloc((size_t)s->rows + 1, 1);
    if (!runs || !mine)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld rows to verify", (long long)s->rows);
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, s, false, &own, runs, nruns, &nruns));
    for (int64_t i = 0; i < nruns; i++)
        memset(mine + runs[i].row, 1, (size_t)runs[i].count);
    for (int64_t row = 0, end; row < s->rows; row = end) {
        for (end = row + 1; end < s->rows && !mine[end] == !mine[row]; end++)
            ;
        if (mine[row])
            continue;
        int64_t offset, nh = o->h1 - o->h0, rows = end - row;
        colo_box_t box = {.data = d_y.data + row * d_y.stride[1] * elem,
                          .extent = {o->b1 - o->b0, rows, nh},
                          .stride = {d_y.stride[0], d_y.stride[1], d_y.stride[2]}};
        COLO_TRY(b->ops->box_nonzero(&box, p->config.dtype, &offset, stream));
        if (offset >= 0)
            return colo_fail(COLO_ERR_CONTRACT,
                             "rank %lld: d_y was declared DISJOINT, but row %lld of sample %lld is "
                             "not zero and belongs to another context rank; use PARTIAL",
                             (long long)p->rank, (long long)(row + offset / nh % rows),
                             (long long)(o->b0 + offset / nh / rows));
    }
    return COLO_OK;
}

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

colo_status_t colo_contract_compare(colo_bridge_t *b, colo_pass_t pass, uint64_t mine)
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

colo_status_t colo_contract_replicas(colo_bridge_t *b, colo_pass_t pass, colo_view_t in,
                                     colo_stream_t stream)
{
    const colo_plan_t *p = b->now.program.plan;
    const colo_box_t box = colo_view_box(in, pass == COLO_FORWARD ? &p->own_src : &p->own_dst);
    uint64_t mine = 0;
    colo_status_t st = COLO_OK;
    if (colo_box_count(&box) > 0) /* a view of nothing may have a pointer, or none */
        st = b->ops->box_hash(&box, colo_dtype_size(p->config.dtype), &mine, stream);
    if (st < 0)
        return colo_comm_i_fail(b->comm, st);
    return colo_contract_compare(b, pass, mine);
}
