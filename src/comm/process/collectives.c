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

static colo_status_t process_barrier(colo_comm_t *comm, colo_stream_t stream)
{
    colo_step_begin(comm, 0);
    for (int32_t r = 0; r < comm->size; r++)
        if (r != comm->rank)
            colo_step_plain(comm, r, NULL, 0, NULL, 0);
    return colo_step_run(comm);
}

static colo_status_t process_all_gather(colo_comm_t *comm, const void *send, void *recv,
                                        size_t bytes, colo_stream_t stream)
{
    if (bytes == 0)
        return process_barrier(comm, stream);
    colo_step_begin(comm, 0);
    for (int32_t r = 0; r < comm->size; r++)
        if (r != comm->rank)
            colo_step_plain(comm, r, send, bytes, (char *)recv + (size_t)r * bytes, bytes);
    COLO_TRY(colo_step_run(comm));
    char *own = (char *)recv + (size_t)comm->rank * bytes;
    if (own != send)
        memcpy(own, send, bytes);
    return COLO_OK;
}

static colo_status_t process_broadcast(colo_comm_t *comm, void *buffer, size_t bytes, int32_t root,
                                       colo_stream_t stream)
{
    if (bytes == 0)
        return process_barrier(comm, stream);
    colo_step_begin(comm, 0);
    for (int32_t r = 0; r < comm->size; r++)
        if (r != comm->rank)
            colo_step_plain(comm, r, comm->rank == root ? buffer : NULL, bytes,
                            r == root ? buffer : NULL, bytes);
    return colo_step_run(comm);
}

/* ---- reductions ---- */

/* Brings this rank's slice of all ranks' @send together and reduces it into @dst, which may lie in
 * @send. Slice r is elements [lo[r], lo[r + 1]) of equal cuts, or all of it for all ranks. */
static colo_status_t gather_reduce(colo_comm_t *comm, const char *send, void *dst, int64_t count,
                                   bool whole, colo_dtype_t dtype, colo_redop_t op)
{
    struct colo_process_group *group = comm->impl;
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    const int64_t lo = whole ? 0 : colo_reduce_slice(count, comm->size, comm->rank);
    const int64_t n = whole ? count : colo_reduce_slice(count, comm->size, comm->rank + 1) - lo;
    const size_t mine = (size_t)(n * elem);
    COLO_TRY(colo_reduce_grow(&group->workspace, &group->workspace_bytes,
                              colo_op_name(comm->op.kind), mine * (size_t)comm->size));
    colo_step_begin(comm, 0);
    for (int32_t r = 0; r < comm->size; r++) {
        int64_t from = whole ? 0 : colo_reduce_slice(count, comm->size, r);
        int64_t to = whole ? count : colo_reduce_slice(count, comm->size, r + 1);
        char *part = (char *)group->workspace + (size_t)r * mine;
        group->src[r] = r == comm->rank ? send + lo * elem : part;
        if (r != comm->rank)
            colo_step_plain(comm, r, send + from * elem, (size_t)((to - from) * elem), part, mine);
    }
    COLO_TRY(colo_step_run(comm));
    if (n > 0)
        colo_reduce_host(dst, group->src, comm->size, 0, n, dtype, op);
    return COLO_OK;
}

static colo_status_t process_all_reduce(colo_comm_t *comm, const void *send, void *recv,
                                        int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                        colo_stream_t stream)
{
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    if (count == 0)
        return process_barrier(comm, stream);
    if (count <= SMALL_REDUCE / elem)
        return gather_reduce(comm, send, recv, count, true, dtype, op);
    char *out = recv;
    const int64_t lo = colo_reduce_slice(count, comm->size, comm->rank);
    COLO_TRY(gather_reduce(comm, send, out + lo * elem, count, false, dtype, op));
    colo_step_begin(comm, 1);
    for (int32_t r = 0; r < comm->size; r++) {
        int64_t from = colo_reduce_slice(count, comm->size, r),
                to = colo_reduce_slice(count, comm->size, r + 1);
        if (r != comm->rank)
            colo_step_plain(
                comm, r, out + lo * elem,
                (size_t)((colo_reduce_slice(count, comm->size, comm->rank + 1) - lo) * elem),
                out + from * elem, (size_t)((to - from) * elem));
    }
    return colo_step_run(comm);
}

static colo_status_t process_reduce_scatter(colo_comm_t *comm, const void *send, void *recv,
                                            int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                            colo_stream_t stream)
{
    if (count == 0)
        return process_barrier(comm, stream);
    return gather_reduce(comm, send, recv, count * comm->size, false, dtype, op);
}

/* ---- exchange ---- */

static colo_status_t process_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                      colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(exchange->op.dtype);
    colo_step_begin(comm, 0);
    for (int32_t i = 0; i < exchange->nsends; i++)
        colo_step_add(comm, exchange->send[i].peer, &exchange->send[i], NULL, elem);
    for (int32_t i = 0; i < exchange->nrecvs; i++)
        colo_step_add(comm, exchange->recv[i].peer, NULL, &exchange->recv[i], elem);
    return colo_step_run(comm);
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
