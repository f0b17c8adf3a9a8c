/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collectives.c - the front of every operation: what is checked before a backend may move a byte.
 *
 * In this order: is there a comm, does it live, are this rank's arguments right, do the ranks agree
 * (COLO_CHECK=2 only), then the statistics entry and the backend. A rank whose arguments are wrong
 * while its peers are on their way into the operation must not leave them waiting: at level 2 the
 * comparison tells them and the comm lives on, below that the comm is marked failed and they get
 * COLO_ERR_PEER. A backend that fails halfway has either told its peers already or is helped to do
 * so here.
 */
#include "comm/comm.h"

#include "comm/reduce.h"
#include "core/box.h"
#include "core/error.h"
#include "core/overlap.h"
#include "core/range.h"

/* @mine: the verdict on this rank's own arguments */
static colo_status_t check_call(colo_comm_t *comm, colo_op_desc_t op, colo_status_t mine)
{
    if (comm->check >= 2)
        return colo_comm_compare(comm, op, mine);
    return mine < 0 ? colo_comm_fail(comm, mine) : COLO_OK;
}

/* ---- arguments ---- */

/* bytes of all elements; @times of them must fit an int64 */
static colo_status_t count_bytes(colo_op_desc_t op, int64_t times, int64_t *bytes)
{
    const char *what = colo_op_name(op.kind);
    int64_t elem = (int64_t)colo_dtype_size(op.dtype), all;
    COLO_FAIL_IF(elem == 0, COLO_ERR_ARG, "%s: dtype %d is unknown", what, (int)op.dtype);
    COLO_FAIL_IF(op.count < 0, COLO_ERR_ARG, "%s: count %lld, expected >= 0", what,
                 (long long)op.count);
    COLO_FAIL_IF(!colo_mul_ok(op.count, elem, bytes) || !colo_mul_ok(*bytes, times, &all),
                 COLO_ERR_ARG, "%s: %lld elements of %lld bytes for %lld ranks pass 2^63", what,
                 (long long)op.count, (long long)elem, (long long)times);
    return COLO_OK;
}

static colo_status_t reducible(colo_op_desc_t op)
{
    const char *what = colo_op_name(op.kind);
    COLO_FAIL_IF(!colo_reduce_takes(op.dtype), COLO_ERR_ARG,
                 "%s: dtype %s, expected a float dtype, i32 or i64", what,
                 colo_dtype_name(op.dtype));
    COLO_FAIL_IF(op.param != COLO_REDOP_SUM && op.param != COLO_REDOP_MAX, COLO_ERR_ARG,
                 "%s: operation %d, expected sum (0) or max (1)", what, (int)op.param);
    return COLO_OK;
}

/* @small [small_bytes] may lie in @large [large_bytes] only at offset @offset */
static colo_status_t buffers(const char *what, const void *send, const void *recv,
                             const void *small, int64_t small_bytes, const void *large,
                             int64_t large_bytes, int64_t offset)
{
    COLO_FAIL_IF(large_bytes > 0 && (!send || !recv), COLO_ERR_ARG, "%s: %s is NULL for %lld bytes",
                 what, send ? "recv" : "send", (long long)large_bytes);
    if (small_bytes == 0)
        return COLO_OK;
    uintptr_t s = (uintptr_t)small, l = (uintptr_t)large;
    if (s - l == (uintptr_t)offset || s + (uintptr_t)small_bytes <= l ||
        l + (uintptr_t)large_bytes <= s)
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG,
                     "%s: send and recv overlap other than in place (%lld bytes apart, %lld where "
                     "in place)",
                     what, (long long)(s - l), (long long)offset);
}

/* ---- collectives ---- */

static colo_status_t check_arguments(const colo_comm_t *comm, colo_op_desc_t op, const void *send,
                                     const void *recv)
{
    const char *what = colo_op_name(op.kind);
    const bool reduces = op.kind == COLO_OP_ALL_REDUCE, gathers = op.kind == COLO_OP_ALL_GATHER;
    const int64_t n = comm->size;
    int64_t bytes = 0;
    if (op.kind == COLO_OP_BARRIER)
        return COLO_OK;
    if (op.kind == COLO_OP_BROADCAST) {
        COLO_TRY(count_bytes(op, 1, &bytes));
        COLO_FAIL_IF(op.param < 0 || op.param >= n, COLO_ERR_ARG,
                     "broadcast: root %d, expected 0..%d", (int)op.param, (int)n - 1);
        COLO_FAIL_IF(bytes > 0 && !recv, COLO_ERR_ARG, "broadcast: buffer is NULL for %lld bytes",
                     (long long)bytes);
        return COLO_OK;
    }
    COLO_TRY(count_bytes(op, reduces ? 2 * n : n, &bytes));
    if (!gathers)
        COLO_TRY(reducible(op));
    if (reduces)
        return buffers(what, send, recv, send, bytes, recv, bytes, 0);
    return buffers(what, send, recv, gathers ? send : recv, bytes, gathers ? recv : send, n * bytes,
                   comm->rank * bytes);
}

static colo_status_t collective(colo_comm_t *comm, colo_op_desc_t op, const void *send, void *recv,
                                colo_stream_t stream)
{
    COLO_TRY(colo_comm_ready(comm, op));
    COLO_TRY(check_call(comm, op, check_arguments(comm, op, send, recv)));
    const uint64_t seq = colo_comm_begin_collective(comm, op);
    return colo_comm_finish(comm, seq, comm->backend->collective(comm, send, recv, stream));
}

colo_status_t colo_comm_all_gather_for(colo_comm_t *comm, colo_category_t category,
                                       const void *send, void *recv, int64_t count,
                                       colo_dtype_t dtype, colo_stream_t stream)
{
    const colo_op_desc_t op = {COLO_OP_ALL_GATHER, dtype, 0, count, category};
    return collective(comm, op, send, recv, stream);
}

colo_status_t colo_comm_all_reduce_for(colo_comm_t *comm, colo_category_t category,
                                       const void *send, void *recv, int64_t count,
                                       colo_dtype_t dtype, colo_redop_t redop, colo_stream_t stream)
{
    const colo_op_desc_t op = {COLO_OP_ALL_REDUCE, dtype, (int32_t)redop, count, category};
    return collective(comm, op, send, recv, stream);
}

colo_status_t colo_comm_reduce_scatter_for(colo_comm_t *comm, colo_category_t category,
                                           const void *send, void *recv, int64_t count,
                                           colo_dtype_t dtype, colo_redop_t redop,
                                           colo_stream_t stream)
{
    const colo_op_desc_t op = {COLO_OP_REDUCE_SCATTER, dtype, (int32_t)redop, count, category};
    return collective(comm, op, send, recv, stream);
}

size_t colo_comm_reduction_stage(const colo_comm_t *comm, int64_t bytes)
{
    return comm->backend->reduction_stage ? comm->backend->reduction_stage(comm, (size_t)bytes) : 0;
}

void colo_comm_set_stage(colo_comm_t *comm, void *stage, size_t bytes)
{
    comm->stage = stage;
    comm->stage_bytes = stage ? bytes : 0;
}

/* ---- exchange ---- */

static colo_status_t check_box(const char *side, int32_t peer, int32_t k, const colo_box_t *box,
                               int64_t elem, int64_t *bytes)
{
    int64_t n = colo_box_count(box), reach;
    COLO_FAIL_IF(
        n < 0, COLO_ERR_ARG,
        "exchange: %s rank %d, box %d has extents %lldx%lldx%lld, expected >= 0, and fewer than "
        "2^63 elements",
        side, (int)peer, (int)k, (long long)box->extent[0], (long long)box->extent[1],
        (long long)box->extent[2]);
    if (n == 0)
        return COLO_OK;
    COLO_FAIL_IF(!box->data, COLO_ERR_ARG,
                 "exchange: %s rank %d, box %d: data is NULL for %lld elements", side, (int)peer,
                 (int)k, (long long)n);
    for (int i = 0; i < 3; i++)
        COLO_FAIL_IF(box->stride[i] < 0, COLO_ERR_ARG,
                     "exchange: %s rank %d, box %d: axis %d has stride "
                     "%lld, expected >= 0",
                     side, (int)peer, (int)k, i, (long long)box->stride[i]);
    reach = colo_box_reach(box);
    COLO_FAIL_IF(reach < 0 || !colo_mul_ok(reach, elem, &reach) || !colo_mul_ok(n, elem, &n) ||
                     !colo_add_ok(*bytes, n, bytes),
                 COLO_ERR_ARG, "exchange: %s rank %d, box %d: more than 2^63 bytes", side,
                 (int)peer, (int)k);
    return COLO_OK;
}

/* @side: "message to", "message from" */
static colo_status_t check_messages(const colo_comm_t *comm, const char *side,
                                    const colo_message_t *list, int32_t n, colo_dtype_t dtype,
                                    int64_t *bytes)
{
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    *bytes = 0;
    COLO_FAIL_IF(elem == 0, COLO_ERR_ARG, "exchange: dtype %d is unknown", (int)dtype);
    COLO_FAIL_IF(n < 0 || (n > 0 && !list), COLO_ERR_ARG, "exchange: %d entries of '%s a rank'%s",
                 (int)n, side, list ? ", expected >= 0" : ", but the list is NULL");
    for (int32_t i = 0; i < n; i++) {
        const colo_message_t *message = &list[i];
        COLO_FAIL_IF(
            message->peer < 0 || message->peer >= comm->size || message->peer == comm->rank,
            COLO_ERR_ARG, "exchange: entry %d is a %s rank %d, expected 0..%d without self (%d)",
            (int)i, side, (int)message->peer, (int)comm->size - 1, (int)comm->rank);
        COLO_FAIL_IF(i > 0 && message->peer <= list[i - 1].peer, COLO_ERR_ARG,
                     "exchange: %s rank %d follows that of rank %d, expected "
                     "peers ascending, each once",
                     side, (int)message->peer, (int)list[i - 1].peer);
        COLO_FAIL_IF(message->nboxes < 0 || (message->nboxes > 0 && !message->boxes), COLO_ERR_ARG,
                     "exchange: %s rank %d: %d boxes%s", side, (int)message->peer,
                     (int)message->nboxes, message->boxes ? "" : " at NULL");
        for (int32_t k = 0; k < message->nboxes; k++)
            COLO_TRY(check_box(side, message->peer, k, &message->boxes[k], elem, bytes));
    }
    return COLO_OK;
}

/* Message @i of those that are received and then those that are sent. */
static const colo_message_t *message_at(const colo_exchange_t *exchange, int32_t i)
{
    return i < exchange->nrecvs ? &exchange->recv[i] : &exchange->send[i - exchange->nrecvs];
}

static colo_tensor_t view_of(const colo_box_t *box, colo_dtype_t dtype)
{
    colo_tensor_t view = colo_tensor_host(box->data, dtype, 3, box->extent);
    memcpy(view.stride, box->stride, sizeof box->stride);
    return view;
}

/* Does box @k of message @i share no element with those after it? Each pair is looked at. */
static colo_status_t check_apart(const colo_exchange_t *exchange, int32_t i, int32_t k)
{
    const colo_message_t *message = message_at(exchange, i);
    const colo_tensor_t view = view_of(&message->boxes[k], exchange->op.dtype);
    for (int32_t j = i; j < exchange->nrecvs + exchange->nsends; j++) {
        const colo_message_t *other = message_at(exchange, j);
        for (int32_t l = j == i ? k + 1 : 0; l < other->nboxes; l++) {
            const colo_tensor_t its = view_of(&other->boxes[l], exchange->op.dtype);
            COLO_FAIL_IF(!colo_tensors_apart(&view, &its), COLO_ERR_ARG,
                         "exchange: message from rank %d, box %d overlaps message %s rank %d, box "
                         "%d, expected memory of its own",
                         (int)message->peer, (int)k, j < exchange->nrecvs ? "from" : "to",
                         (int)other->peer, (int)l);
        }
    }
    return COLO_OK;
}

static colo_status_t check_received_apart(const colo_exchange_t *exchange)
{
    for (int32_t i = 0; i < exchange->nrecvs; i++)
        for (int32_t k = 0; k < exchange->recv[i].nboxes; k++)
            COLO_TRY(check_apart(exchange, i, k));
    return COLO_OK;
}

colo_status_t colo_comm_exchange_begin(colo_comm_t *comm, const colo_exchange_t *exchange,
                                       colo_stream_t stream, uint64_t *seq)
{
    COLO_TRY(colo_comm_ready(comm, exchange->op));
    const colo_dtype_t dtype = exchange->op.dtype;
    int64_t sent = 0, received = 0;
    colo_status_t st =
        check_messages(comm, "message to", exchange->send, exchange->nsends, dtype, &sent);
    COLO_THEN(st, check_messages(comm, "message from", exchange->recv, exchange->nrecvs, dtype,
                                 &received));
    if (comm->check >= 2 && exchange->op.category == COLO_CATEGORY_USER) /* a plan's are apart */
        COLO_THEN(st, check_received_apart(exchange));
    COLO_TRY(check_call(comm, exchange->op, st));
    if (comm->check >= 2)
        COLO_TRY(colo_comm_compare_messages(comm, exchange));
    const int32_t peers =
        (exchange->nsends > exchange->nrecvs ? exchange->nsends : exchange->nrecvs) +
        exchange->more_peers;
    *seq = colo_comm_begin(comm, exchange->op, sent + exchange->more_sent,
                           received + exchange->more_received, peers);
    if (exchange->is_part && exchange->nsends + exchange->nrecvs == 0)
        return COLO_OK;
    st = comm->backend->exchange(comm, exchange, stream);
    return st < 0 ? colo_comm_finish(comm, *seq, st) : COLO_OK;
}

/* ---- the public names, counted for the user ---- */

colo_status_t colo_comm_barrier(colo_comm_t *comm, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_op_desc_t op = {.kind = COLO_OP_BARRIER, .category = COLO_CATEGORY_USER};
    return collective(comm, op, NULL, NULL, stream);
}

colo_status_t colo_comm_broadcast(colo_comm_t *comm, void *buffer, int64_t count,
                                  colo_dtype_t dtype, int32_t root, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_op_desc_t op = {COLO_OP_BROADCAST, dtype, root, count, COLO_CATEGORY_USER};
    return collective(comm, op, NULL, buffer, stream);
}

colo_status_t colo_comm_all_gather(colo_comm_t *comm, const void *send, void *recv, int64_t count,
                                   colo_dtype_t dtype, colo_stream_t stream)
{
    COLO_RANGE();
    return colo_comm_all_gather_for(comm, COLO_CATEGORY_USER, send, recv, count, dtype, stream);
}

colo_status_t colo_comm_all_reduce(colo_comm_t *comm, const void *send, void *recv, int64_t count,
                                   colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    COLO_RANGE();
    return colo_comm_all_reduce_for(comm, COLO_CATEGORY_USER, send, recv, count, dtype, op, stream);
}

colo_status_t colo_comm_reduce_scatter(colo_comm_t *comm, const void *send, void *recv,
                                       int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                       colo_stream_t stream)
{
    COLO_RANGE();
    return colo_comm_reduce_scatter_for(comm, COLO_CATEGORY_USER, send, recv, count, dtype, op,
                                        stream);
}

colo_status_t colo_comm_exchange(colo_comm_t *comm, const colo_message_t *sends, int32_t nsends,
                                 const colo_message_t *recvs, int32_t nrecvs, colo_dtype_t dtype,
                                 colo_stream_t stream)
{
    COLO_RANGE();
    const colo_exchange_t exchange = {.op = {COLO_OP_EXCHANGE, dtype, 0, 0, COLO_CATEGORY_USER},
                                      .send = sends,
                                      .recv = recvs,
                                      .nsends = nsends,
                                      .nrecvs = nrecvs};
    uint64_t seq;
    COLO_TRY(colo_comm_exchange_begin(comm, &exchange, stream, &seq));
    return colo_comm_finish(comm, seq, COLO_OK);
}
