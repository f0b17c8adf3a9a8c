/* SPDX-License-Identifier: Apache-2.0 */
/*
 * promise.c - COLO_CHECK=2: what the caller promised about the data is looked at.
 *
 * Two promises: a DISJOINT gradient is zero outside the rank's own rows, and replicas of a block
 * hold the same bits. Both are checked before anything moves, and every rank returns the error.
 * Host memory only; the reading is as slow as it is thorough.
 */
#include "bridge/bridge.h"

#include "comm/comm.h"
#include "core/hash.h"
#include "core/try.h"

#include <stdlib.h>
#include <string.h>

static bool is_zero(const char *p, colo_dtype_t dtype)
{
    static const char zero[8];
    size_t n = colo_dtype_size(dtype);
    char v[8];
    memcpy(v, p, n);
    if (colo_dtype_is_float(dtype))
        v[n - 1] &= 0x7f; /* -0.0 is zero; little-endian, as every machine this runs on */
    return memcmp(v, zero, n) == 0;
}

colo_status_t colo_promise_zeros(const colo_bridge_t *b, colo_view_t d_y)
{
    const colo_plan_t *p = b->now.plan;
    const colo_owned_t *o = &p->own_dst;
    const colo_shape_t *s = &p->config.shape;
    int64_t elem = (int64_t)colo_dtype_size(p->config.dtype), nruns = 0;
    colo_owned_t own;
    if (p->config.output != COLO_FULL_SEQ || p->config.grad != COLO_DISJOINT || !d_y.data)
        return COLO_OK;
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, s->samples, s->rows, s->features, false, &own,
                               NULL, 0, &nruns));
    COLO_AUTOFREE colo_run_t *runs = calloc((size_t)nruns + 1, sizeof *runs);
    COLO_AUTOFREE char *mine = calloc((size_t)s->rows + 1, 1);
    if (!runs || !mine)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld rows to verify", (long long)s->rows);
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, s->samples, s->rows, s->features, false, &own,
                               runs, nruns, &nruns));
    for (int64_t i = 0; i < nruns; i++)
        memset(mine + runs[i].row, 1, (size_t)runs[i].count);
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t i = 0; !mine[row] && i < o->b1 - o->b0; i++)
            for (int64_t h = 0; h < o->h1 - o->h0; h++)
                if (!is_zero(d_y.data +
                                 (i * d_y.stride[0] + row * d_y.stride[1] + h * d_y.stride[2]) *
                                     elem,
                             p->config.dtype))
                    return colo_fail(COLO_ERR_PROMISE,
                                     "rank %lld: d_y was promised DISJOINT, but row %lld of sample "
                                     "%lld is not zero and belongs to another context rank; use "
                                     "PARTIAL",
                                     (long long)p->rank, (long long)row, (long long)(o->b0 + i));
    return COLO_OK;
}

static uint64_t hash_part(colo_view_t v, const colo_owned_t *o, int64_t elem)
{
    uint64_t h = COLO_HASH_INIT;
    for (int64_t i = 0; v.data && i < o->b1 - o->b0; i++)
        for (int64_t r = 0; r < o->rows; r++)
            for (int64_t f = 0; f < o->h1 - o->h0; f++)
                h = colo_hash_bytes(
                    h, v.data + (i * v.stride[0] + r * v.stride[1] + f * v.stride[2]) * elem,
                    (size_t)elem);
    return h;
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

colo_status_t colo_promise_replicas(colo_bridge_t *b, colo_way_t way, colo_view_t in,
                                    colo_stream_t stream)
{
    const colo_plan_t *p = b->now.plan;
    bool fwd = way == COLO_FORWARD;
    bool partial = p->config.output == COLO_FULL_SEQ && p->config.grad == COLO_PARTIAL;
    int32_t n = colo_comm_size(b->comm);
    uint64_t mine =
        hash_part(in, fwd ? &p->own_src : &p->own_dst, (int64_t)colo_dtype_size(p->config.dtype));
    COLO_AUTOFREE uint64_t *all = calloc((size_t)n, sizeof *all);
    if (!all)
        return colo_comm_i_fail(b->comm,
                                colo_fail(COLO_ERR_NOMEM, "bridge: %d fingerprints", (int)n));
    COLO_TRY(colo_comm_i_all_gather(b->comm, COLO_OWNER_CHECK, &mine, all, 1, COLO_I64, stream));
    for (int32_t i = 0; i < n; i++) {
        int64_t rank = colo_comm_world_rank(b->comm, i);
        int64_t first = first_replica(fwd ? &p->src : &p->dst, fwd || !partial, true, rank);
        int32_t j = colo_comm_find(b->comm, first);
        if (first != rank && j >= 0 && all[i] != all[j])
            return colo_fail(
                COLO_ERR_PROMISE,
                "ranks %lld and %lld hold the same block of %s, but their values differ",
                (long long)first, (long long)rank, fwd ? "x" : "d_y");
    }
    return COLO_OK;
}
