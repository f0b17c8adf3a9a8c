/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host-collectives.c - the collectives of host memory, each one or two exchanges with all others.
 *
 * A rank for which there is nothing gets a message without boxes. That finds a rank in another
 * operation, and makes a collective complete for all ranks or for none of them. Reductions bring
 * the slices together and combine them in rank order with reduce.c, so sums are bitwise the same
 * over all backends. Workspace grows to the largest reduction and stays.
 */
#include "comm/comm.h"

#include "comm/reduce.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>

enum {
    SMALL_REDUCE = 8 << 10 /* bytes up to which every rank reduces everything: an exchange less */
};

struct colo_parts {
    colo_message_t *send, *recv; /* [size - 1] to and from the others, ascending */
    const void **src;            /* [size] of a reduction */
    void *workspace;             /* owned, grown on demand */
    size_t workspace_bytes;
    colo_box_t box[]; /* [2 * size]; then the lists above */
};

struct colo_parts *colo_parts_new(int32_t size)
{
    const size_t n = (size_t)size;
    struct colo_parts *parts =
        malloc(sizeof *parts +
               n * (2 * sizeof parts->box[0] + 2 * sizeof parts->send[0] + sizeof parts->src[0]));
    if (!parts)
        return NULL;
    *parts = (struct colo_parts){.send = (void *)(parts->box + 2 * n)};
    parts->recv = parts->send + n;
    parts->src = (void *)(parts->recv + n);
    return parts;
}

void colo_parts_free(struct colo_parts *parts)
{
    if (parts)
        free(parts->workspace);
    free(parts);
}

/* @nout elements at @out go to @peer, @nin come from it to @in. */
static void part(colo_comm_t *comm, int32_t peer, const void *out, int64_t nout, void *in,
                 int64_t nin)
{
    struct colo_parts *parts = comm->parts;
    const int32_t i = peer - (peer > comm->rank);
    colo_box_t *box = &parts->box[2 * i];
    if (peer == comm->rank)
        return;
    box[0] = (colo_box_t){(void *)(uintptr_t)out, {1, 1, nout}, {0, 0, 1}};
    box[1] = (colo_box_t){in, {1, 1, nin}, {0, 0, 1}};
    parts->send[i] = (colo_message_t){peer, nout > 0, &box[0]};
    parts->recv[i] = (colo_message_t){peer, nin > 0, &box[1]};
}

static colo_status_t run(colo_comm_t *comm, uint8_t round)
{
    return comm->backend->exchange(comm,
                                   &(colo_exchange_t){.op = comm->op,
                                                      .send = comm->parts->send,
                                                      .recv = comm->parts->recv,
                                                      .nsends = comm->size - 1,
                                                      .nrecvs = comm->size - 1,
                                                      .round = round},
                                   NULL);
}

struct slice {
    int64_t lo, n; /* elements */
};

static struct slice slice_of(const colo_comm_t *comm, int64_t count, int32_t r)
{
    const int64_t lo = colo_reduce_slice(count, comm->size, r);
    return (struct slice){lo, colo_reduce_slice(count, comm->size, r + 1) - lo};
}

/* All ranks' slices of @all; this rank's own one is at @own. */
static colo_status_t gather(colo_comm_t *comm, uint8_t round, const char *own, char *all,
                            int64_t count)
{
    const int64_t elem = (int64_t)colo_dtype_size(comm->op.dtype);
    const struct slice mine = slice_of(comm, count, comm->rank);
    for (int32_t r = 0; r < comm->size; r++) {
        const struct slice its = slice_of(comm, count, r);
        part(comm, r, own, mine.n, all + its.lo * elem, its.n);
    }
    return run(comm, round);
}

static colo_status_t broadcast(colo_comm_t *comm, void *buffer, int64_t count, int32_t root)
{
    for (int32_t r = 0; r < comm->size; r++)
        part(comm, r, buffer, comm->rank == root ? count : 0, buffer, r == root ? count : 0);
    return run(comm, 0);
}

/* Brings this rank's slice of all ranks' @send together and reduces it into @dst, which may lie in
 * @send. @uncut: the slice of each rank is all of it. */
static colo_status_t reduce(colo_comm_t *comm, const char *send, void *dst, int64_t count,
                            bool uncut)
{
    struct colo_parts *parts = comm->parts;
    const colo_dtype_t dtype = comm->op.dtype;
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    const struct slice all = {0, count}, mine = uncut ? all : slice_of(comm, count, comm->rank);
    const size_t bytes = (size_t)(mine.n * elem);
    COLO_TRY(colo_reduce_grow(&parts->workspace, &parts->workspace_bytes,
                              colo_op_name(comm->op.kind), bytes * (size_t)comm->size));
    for (int32_t r = 0; r < comm->size; r++) {
        const struct slice its = uncut ? all : slice_of(comm, count, r);
        char *place = (char *)parts->workspace + (size_t)r * bytes;
        parts->src[r] = r == comm->rank ? send + mine.lo * elem : place;
        part(comm, r, send + its.lo * elem, its.n, place, mine.n);
    }
    COLO_TRY(run(comm, 0));
    if (mine.n > 0)
        colo_reduce_host(dst, parts->src, comm->size, 0, mine.n, dtype,
                         (colo_redop_t)comm->op.param);
    return COLO_OK;
}

static colo_status_t all_reduce(colo_comm_t *comm, const char *send, char *recv, int64_t count)
{
    const int64_t elem = (int64_t)colo_dtype_size(comm->op.dtype);
    if (count <= SMALL_REDUCE / elem)
        return reduce(comm, send, recv, count, true);
    char *own = recv + slice_of(comm, count, comm->rank).lo * elem;
    COLO_TRY(reduce(comm, send, own, count, false));
    return gather(comm, 1, own, recv, count);
}

colo_status_t colo_host_collective(colo_comm_t *comm, const void *send, void *recv,
                                   colo_stream_t stream)
{
    const colo_op_desc_t op = comm->op;
    const size_t bytes = (size_t)op.count * colo_dtype_size(op.dtype);
    char *own = recv;
    if (op.kind == COLO_OP_BROADCAST || op.count == 0) /* of nothing: a barrier */
        return broadcast(comm, recv, op.count, op.param);
    if (op.kind == COLO_OP_ALL_GATHER || op.kind == COLO_OP_SPLIT) {
        own += (size_t)comm->rank * bytes;
        COLO_TRY(gather(comm, 0, send, recv, op.count * comm->size));
    } else if (comm->size > 1) {
        return op.kind == COLO_OP_ALL_REDUCE
                   ? all_reduce(comm, send, recv, op.count)
                   : reduce(comm, send, recv, op.count * comm->size, false);
    }
    if (own != send)
        memcpy(own, send, bytes);
    return COLO_OK;
}
