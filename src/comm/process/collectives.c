/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collectives.c - the collectives of ranks in different processes, each one or two steps of
 * step.c.
 *
 * Ranks exchange headers with all others in each collective, also where no data flows: that is
 * what finds a rank in another operation, and it makes a collective complete for all or for none of
 * them. Reductions bring the slices together and combine them in rank order with comm/reduce.c, so
 * sums are bitwise those of the other backends. Workspace grows to the largest reduction and stays.
 */
#include "comm/process/group.h"

#include "comm/reduce.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>

enum {
    SMALL_REDUCE = 8 << 10
}; /* bytes up to which every rank reduces everything: one step less */

static colo_status_t process_barrier(colo_comm_t *c, colo_stream_t stream)
{
    colo_step_begin(c, 0);
    for (int32_t r = 0; r < c->size; r++)
        if (r != c->rank)
            colo_step_plain(c, r, NULL, 0, NULL, 0);
    return colo_step_run(c);
}

static colo_status_t process_all_gather(colo_comm_t *c, const void *send, void *recv, size_t bytes,
                                        colo_stream_t stream)
{
    if (bytes == 0)
        return process_barrier(c, stream);
    colo_step_begin(c, 0);
    for (int32_t r = 0; r < c->size; r++)
        if (r != c->rank)
            colo_step_plain(c, r, send, bytes, (char *)recv + (size_t)r * bytes, bytes);
    COLO_TRY(colo_step_run(c));
    char *own = (char *)recv + (size_t)c->rank * bytes;
    if (own != send)
        memcpy(own, send, bytes);
    return COLO_OK;
}

static colo_status_t process_broadcast(colo_comm_t *c, void *buffer, size_t bytes, int32_t root,
                                       colo_stream_t stream)
{
    if (bytes == 0)
        return process_barrier(c, stream);
    colo_step_begin(c, 0);
    for (int32_t r = 0; r < c->size; r++)
        if (r != c->rank)
            colo_step_plain(c, r, c->rank == root ? buffer : NULL, bytes, r == root ? buffer : NULL,
                            bytes);
    return colo_step_run(c);
}

/* ---- reductions ---- */

/* Brings this rank's slice of all ranks' @send together and reduces it into @dst, which may lie in
 * @send. Slice r is elements [lo[r], lo[r + 1]) of equal cuts, or all of it for all ranks. */
static colo_status_t gather_reduce(colo_comm_t *c, const char *send, void *dst, int64_t count,
                                   bool whole, colo_dtype_t dtype, colo_redop_t op)
{
    struct colo_process_group *x = c->impl;
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    const int64_t lo = whole ? 0 : colo_reduce_slice(count, c->size, c->rank);
    const int64_t n = whole ? count : colo_reduce_slice(count, c->size, c->rank + 1) - lo;
    const size_t mine = (size_t)(n * elem);
    COLO_TRY(colo_reduce_grow(&x->workspace, &x->workspace_bytes, colo_op_name(c->op.kind),
                              mine * (size_t)c->size));
    colo_step_begin(c, 0);
    for (int32_t r = 0; r < c->size; r++) {
        int64_t from = whole ? 0 : colo_reduce_slice(count, c->size, r);
        int64_t to = whole ? count : colo_reduce_slice(count, c->size, r + 1);
        char *part = (char *)x->workspace + (size_t)r * mine;
        x->src[r] = r == c->rank ? send + lo * elem : part;
        if (r != c->rank)
            colo_step_plain(c, r, send + from * elem, (size_t)((to - from) * elem), part, mine);
    }
    COLO_TRY(colo_step_run(c));
    if (n > 0)
        colo_reduce_host(dst, x->src, c->size, 0, n, dtype, op);
    return COLO_OK;
}

static colo_status_t process_all_reduce(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                        colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    if (count == 0)
        return process_barrier(c, stream);
    if (count <= SMALL_REDUCE / elem)
        return gather_reduce(c, send, recv, count, true, dtype, op);
    char *out = recv;
    const int64_t lo = colo_reduce_slice(count, c->size, c->rank);
    COLO_TRY(gather_reduce(c, send, out + lo * elem, count, false, dtype, op));
    colo_step_begin(c, 1);
    for (int32_t r = 0; r < c->size; r++) {
        int64_t from = colo_reduce_slice(count, c->size, r),
                to = colo_reduce_slice(count, c->size, r + 1);
        if (r != c->rank)
            colo_step_plain(c, r, out + lo * elem,
                            (size_t)((colo_reduce_slice(count, c->size, c->rank + 1) - lo) * elem),
                            out + from * elem, (size_t)((to - from) * elem));
    }
    return colo_step_run(c);
}

static colo_status_t process_reduce_scatter(colo_comm_t *c, const void *send, void *recv,
                                            int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                            colo_stream_t stream)
{
    if (count == 0)
        return process_barrier(c, stream);
    return gather_reduce(c, send, recv, count * c->size, false, dtype, op);
}

/* ---- exchange ---- */

static colo_status_t process_exchange(colo_comm_t *c, const colo_exchange_t *exchange,
                                      colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(exchange->op.dtype);
    colo_step_begin(c, 0);
    for (int32_t i = 0; i < exchange->nsends; i++)
        colo_step_add(c, exchange->send[i].peer, &exchange->send[i], NULL, elem);
    for (int32_t i = 0; i < exchange->nrecvs; i++)
        colo_step_add(c, exchange->recv[i].peer, NULL, &exchange->recv[i], elem);
    return colo_step_run(c);
}

#define TABLE(backend)                                                                            \
    {                                                                                             \
        .name = (backend), .abi = COLO_COMM_ABI, .all_gather = process_all_gather,                \
        .all_reduce = process_all_reduce, .reduce_scatter = process_reduce_scatter,               \
        .broadcast = process_broadcast, .barrier = process_barrier, .exchange = process_exchange, \
        .subset = colo_process_subset, .fail = colo_process_fail, .state = colo_process_state,    \
        .destroy = colo_process_destroy,                                                          \
    }

const colo_comm_ops_t colo_comm_sockets_ops = TABLE("sockets");
const colo_comm_ops_t colo_comm_ucx_ops = TABLE("ucx");
