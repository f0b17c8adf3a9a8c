/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged-verify.c - COLO_CHECK=2 on a ragged batch: what the caller declared about the data holds.
 *
 * As verify.c for uniform batches: a DISJOINT gradient is zero in rows that other context ranks
 * own, and replicas of a block hold the same bits. Of a merged tensor only rows of the batch count:
 * the text between them is the caller's.
 */
#include "bridge/ragged.h"

#include "core/hash.h"
#include "core/error.h"

/* Rows [row, row + count) of the tensor. */
static colo_box_t rows_of(const colo_carried_t *t, const colo_owned_t *own, int64_t row,
                          int64_t count)
{
    const colo_view_t v = t->in;
    return (colo_box_t){.data = v.data + row * v.stride[1] * (int64_t)colo_dtype_size(t->dtype),
                        .extent = {1, count, (own->h1 - own->h0) * t->per},
                        .stride = {0, v.stride[1], v.stride[2]}};
}

colo_status_t colo_ragged_verify_zeros(const colo_batch_t *batch, const colo_carried_t *t,
                                       int32_t n, colo_stream_t stream)
{
    const colo_plan_t *p = batch->loaded.program.plan;
    const colo_ragged_places_t *places = &batch->places;
    for (int32_t k = 0; k < n; k++)
        for (int64_t i = 0; t[k].in.data && t[k].per > 0 && i < places->nforeign; i++) {
            const colo_stored_t *s = &places->foreign[i];
            const colo_box_t box = rows_of(&t[k], &p->own_dst, s->row, s->count);
            int64_t offset;
            COLO_TRY(batch->bridge->ops->box_nonzero(&box, t[k].dtype, &offset, stream));
            if (offset >= 0)
                return colo_fail(COLO_ERR_CONTRACT,
                                 "rank %lld: d_y[%d] was declared DISJOINT, but row %lld is not "
                                 "zero and belongs to another context rank; use PARTIAL",
                                 (long long)p->rank, (int)k,
                                 (long long)(s->row + offset / box.extent[2]));
        }
    return COLO_OK;
}

static colo_status_t add_rows(const colo_batch_t *batch, const colo_carried_t *t,
                              const colo_owned_t *own, int64_t row, int64_t count, uint64_t *hash,
                              colo_stream_t stream)
{
    const colo_box_t box = rows_of(t, own, row, count);
    uint64_t h = 0;
    if (count * box.extent[2] == 0)
        return COLO_OK;
    COLO_TRY(batch->bridge->ops->box_hash(&box, colo_dtype_size(t->dtype), &h, stream));
    *hash = colo_hash_i64(*hash, (int64_t)h);
    return COLO_OK;
}

colo_status_t colo_ragged_verify_replicas(const colo_batch_t *batch, colo_pass_t pass,
                                          const colo_carried_t *t, int32_t n, colo_stream_t stream)
{
    const colo_plan_t *p = batch->loaded.program.plan;
    const colo_ragged_places_t *places = &batch->places;
    uint64_t hash = COLO_HASH_INIT;
    colo_status_t st = COLO_OK;
    for (int32_t k = 0; k < n; k++) {
        if (!t[k].in.data)
            continue;
        if (pass == COLO_FORWARD)
            st = add_rows(batch, &t[k], &p->own_src, 0, p->own_src.rows, &hash, stream);
        for (int64_t i = 0; st == COLO_OK && pass == COLO_BACKWARD && i < places->n; i++)
            st = add_rows(batch, &t[k], &p->own_dst, places->stored[i].row, places->stored[i].count,
                          &hash, stream);
        if (st < 0)
            return colo_comm_i_fail(batch->bridge->comm, st);
    }
    return colo_contract_compare(batch->bridge, pass, hash);
}
