/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exchange.c - messages between GPUs: grouped send and receive, packed where boxes lie apart.
 *
 * A message whose boxes lie back to back is sent from where it is, any other is packed into staging
 * by one launch and unpacked by one launch. Both sides send a message as one, so it does not matter
 * which of them packs; many sends to one peer in a group are slower than packing
 * (bench/results/bridge.md).
 *
 * On a subconnection staging is the caller's, sized beforehand. A message of 1 MiB or more goes in
 * two halves there, one after the other through the same staging, so that a rank that sends as much
 * as it receives needs staging for what must arrive and no more; it costs 3 to 10 % of the time
 * (bench/results/bridge.md). Where it is cut follows from the boxes' extents, which both sides have
 * alike: at the first line (run along the last axis) that begins in the second half of the bytes.
 * Of two ranks, one that packs nothing exchanges both halves in one group.
 *
 * An exchange without a subconnection is not cut, and uses the context's staging, which
 * grows.
 */
#include "comm/nccl/comm.h"

#include "core/box.h"
#include "core/error.h"
#include "kernels.h"

#include <stdlib.h>

enum { HALVES = 2, SPLIT_BYTES = 1 << 20 };

struct exchange {
    const colo_message_t *m[2]; /* sends, receives */
    int32_t n[2];
    size_t elem;
    const colo_subconnection_t *subconnection; /* NULL: none, and no halves */
};

static struct exchange both_sides(const colo_exchange_t *exchange)
{
    return (struct exchange){{exchange->send, exchange->recv},
                             {exchange->nsends, exchange->nrecvs},
                             colo_dtype_size(exchange->op.dtype),
                             exchange->subconnection};
}

/* ---- halves ---- */

static int64_t message_bytes(const colo_message_t *message, size_t elem)
{
    int64_t n = 0;
    for (int32_t k = 0; k < message->nboxes; k++)
        n += colo_box_count(&message->boxes[k]) * (int64_t)elem;
    return n;
}

static int halves_of(int64_t bytes, bool splits)
{
    return splits && bytes >= SPLIT_BYTES ? HALVES : 1;
}

static colo_box_t sub_box(const colo_box_t *box, int64_t i, int64_t j, int64_t k, int64_t ni,
                          int64_t nj, int64_t nk, size_t elem)
{
    int64_t offset = i * box->stride[0] + j * box->stride[1] + k * box->stride[2];
    return (colo_box_t){.data = box->data ? (char *)box->data + offset * (int64_t)elem : NULL,
                        .extent = {ni, nj, nk},
                        .stride = {box->stride[0], box->stride[1], box->stride[2]}};
}

/* Lines [lo, hi) of a box as at most three boxes. One line by itself is cut into elements. */
static int32_t lines_of(const colo_box_t *box, int64_t lo, int64_t hi, size_t elem, colo_box_t *out)
{
    const int64_t rows = box->extent[1], h = box->extent[2];
    int32_t n = 0;
    if (lo >= hi)
        return 0;
    if (box->extent[0] * rows == 1) {
        out[0] = sub_box(box, 0, 0, lo, 1, 1, hi - lo, elem);
        return 1;
    }
    int64_t plane = lo / rows, last = hi / rows, row = lo % rows, rest = hi % rows;
    if (plane == last) {
        out[0] = sub_box(box, plane, row, 0, 1, rest - row, h, elem);
        return 1;
    }
    if (row > 0)
        out[n++] = sub_box(box, plane++, row, 0, 1, rows - row, h, elem);
    if (plane < last)
        out[n++] = sub_box(box, plane, 0, 0, last - plane, rows, h, elem);
    if (rest > 0)
        out[n++] = sub_box(box, last, 0, 0, 1, rest, h, elem);
    return n;
}

static int64_t clamped_up(int64_t bytes, int64_t line, int64_t lines)
{
    int64_t n = bytes <= 0 ? 0 : (bytes + line - 1) / line;
    return n < lines ? n : lines;
}

/* The boxes of half @k of a message, at most nboxes + 4, and their bytes; @out may be NULL. Empty
 * ones are left out. */
static int32_t cut(const colo_message_t *message, int k, bool splits, size_t elem, colo_box_t *out,
                   int64_t *bytes)
{
    const int64_t all = message_bytes(message, elem);
    const int halves = halves_of(all, splits);
    const int64_t lo = all * k / halves, hi = all * (k + 1) / halves;
    int64_t offset = 0;
    int32_t n = 0;
    *bytes = 0;
    for (int32_t i = 0; k < halves && i < message->nboxes; i++) {
        const colo_box_t *box = &message->boxes[i];
        const int64_t count = colo_box_count(box);
        if (count == 0)
            continue;
        int64_t lines = box->extent[0] * box->extent[1];
        lines = lines == 1 ? box->extent[2] : lines;
        const int64_t line = count / lines * (int64_t)elem;
        const int64_t l0 = clamped_up(lo - offset, line, lines),
                      l1 = clamped_up(hi - offset, line, lines);
        n += out ? lines_of(box, l0, l1, elem, out + n) : 0;
        *bytes += (l1 - l0) * line;
        offset += count * (int64_t)elem;
    }
    return n;
}

static int64_t half_bytes(const colo_message_t *message, int k, size_t elem)
{
    int64_t bytes;
    cut(message, k, true, elem, NULL, &bytes);
    return bytes;
}

/* ---- where things lie ---- */

static bool is_dense(const colo_box_t *box)
{
    int64_t next = 1;
    for (int i = 2; i >= 0; i--) {
        if (box->extent[i] > 1 && box->stride[i] != next)
            return false;
        next *= box->extent[i];
    }
    return true;
}

/* Where boxes lie back to back, NULL when they have to be packed. */
static void *in_place(const colo_box_t *boxes, int32_t n, size_t elem)
{
    char *next = n > 0 ? (char *)boxes[0].data : NULL;
    for (int32_t k = 0; k < n; k++) {
        if (!is_dense(&boxes[k]) || next != (char *)boxes[k].data)
            return NULL;
        next += (size_t)colo_box_count(&boxes[k]) * elem;
    }
    return n > 0 ? boxes[0].data : NULL;
}

static colo_status_t need_lists(struct colo_operation *call, const struct exchange *exchange)
{
    struct colo_nccl_context *context = call->f;
    int64_t boxes = 0;
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < exchange->n[side]; i++)
            boxes += exchange->m[side][i].nboxes + 2 * 4; /* as many parts are enough, too */
    if (boxes <= context->boxes)
        return COLO_OK;
    colo_box_t *from = malloc((size_t)boxes * (2 * sizeof *from + sizeof *context->part));
    COLO_FAIL_IF(!from, COLO_ERR_NOMEM, "%s: lists of %lld boxes", colo_operation_text(call),
                 (long long)boxes);
    free(context->from);
    context->from = from;
    context->to = from + boxes;
    context->part = (void *)(from + 2 * boxes);
    context->boxes = boxes;
    return COLO_OK;
}

/* One box of each message; on a subconnection of each side, which is one tensor's. */
static colo_status_t check_memory(struct colo_operation *call, const struct exchange *exchange)
{
    for (int side = 0; side < 2; side++) {
        bool known = false;
        for (int32_t i = 0; i < exchange->n[side] && !(exchange->subconnection && known); i++) {
            const colo_message_t *message = &exchange->m[side][i];
            int32_t k = 0;
            while (k < message->nboxes && colo_box_count(&message->boxes[k]) == 0)
                k++;
            if (k == message->nboxes)
                continue;
            COLO_TRY(colo_operation_on_device(call, "a box", message->boxes[k].data));
            known = true;
        }
    }
    return COLO_OK;
}

static char *staged_at(char *stage, size_t offset)
{
    return stage ? stage + offset : NULL;
}

/* Halves [@k, @end): f->part[] for every message and half, sends first; f->from (the caller's
 * boxes) and f->to (their places in @stage) for those that are packed, packs[0] pairs of sends,
 * then packs[1] of receives. Returns the staging taken, which is all that holds if @stage is NULL.
 */
static size_t lay_out(struct colo_nccl_context *context, const struct exchange *exchange, int k,
                      int end, char *stage, int64_t *packs)
{
    size_t offset = 0;
    int64_t pairs = 0, bytes;
    struct colo_packet *part = context->part;
    for (int side = 0; side < 2; side++) {
        for (int32_t i = 0; i < exchange->n[side] * (end - k); i++, part++) {
            const colo_message_t *message = &exchange->m[side][i / (end - k)];
            const int32_t n = cut(message, k + i % (end - k), exchange->subconnection,
                                  exchange->elem, context->from + pairs, &bytes);
            *part = (struct colo_packet){in_place(context->from + pairs, n, exchange->elem),
                                         (size_t)bytes, message->peer};
            if (part->data || bytes == 0)
                continue;
            part->data = staged_at(stage, offset);
            size_t to = offset;
            for (const int64_t last = pairs + n; pairs < last; pairs++) {
                const int64_t *extent = context->from[pairs].extent;
                context->to[pairs] = (colo_box_t){.data = staged_at(stage, to),
                                                  .extent = {extent[0], extent[1], extent[2]},
                                                  .stride = {extent[1] * extent[2], extent[2], 1}};
                to += (size_t)colo_box_count(&context->from[pairs]) * exchange->elem;
            }
            offset += colo_stage_padded((size_t)bytes);
        }
        packs[side] = pairs - (side ? packs[0] : 0);
    }
    return offset;
}

/* ---- a half, or both ---- */

static int by_value(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Rank @peer of the comm among the ranks of the connection. -1: the subconnection does not have it.
 */
static int32_t rank_on(const colo_subconnection_t *subconnection, int32_t peer)
{
    if (!subconnection)
        return peer;
    const int32_t *member =
        bsearch(&peer, subconnection->members, (size_t)subconnection->n, sizeof peer, by_value);
    return member ? (int32_t)(member - subconnection->members) : -1;
}

static colo_status_t group(struct colo_operation *call, const struct exchange *exchange, int halves)
{
    const struct colo_packet *part = call->f->part;
    ncclComm_t nccl = call->connection->nccl;
    ncclResult_t error = ncclSuccess;
    COLO_NCCL(call->lib->group_start());
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < exchange->n[side] * halves; i++, part++) {
            if (part->bytes == 0 || error != ncclSuccess)
                continue;
            const int32_t peer = rank_on(exchange->subconnection, part->peer);
            error =
                side ? call->lib->recv(part->data, part->bytes, ncclInt8, peer, nccl, call->stream)
                     : call->lib->send(part->data, part->bytes, ncclInt8, peer, nccl, call->stream);
        }
    ncclResult_t closed =
        call->lib->group_end(); /* also after an error: the depth must be 0 again */
    return colo_operation_nccl(call, error != ncclSuccess ? error : closed);
}

static colo_status_t run_halves(struct colo_operation *call, const struct exchange *exchange, int k,
                                int end, char *stage)
{
    struct colo_nccl_context *context = call->f;
    int64_t packs[2];
    lay_out(context, exchange, k, end, stage, packs);
    COLO_OPERATION_CUDA(
        colo_k_boxes_copy(context->to, context->from, packs[0], exchange->elem, 0, call->stream));
    COLO_TRY(group(call, exchange, end - k));
    return colo_operation_cuda(call,
                               colo_k_boxes_copy(context->from + packs[0], context->to + packs[0],
                                                 packs[1], exchange->elem, 0, call->stream));
}

static int halves_needed(const struct exchange *exchange)
{
    int halves = 0;
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < exchange->n[side]; i++) {
            int n = halves_of(message_bytes(&exchange->m[side][i], exchange->elem),
                              exchange->subconnection);
            halves = n > halves ? n : halves;
        }
    return halves;
}

static colo_status_t run(struct colo_operation *call, const struct exchange *exchange, char *stage,
                         size_t stage_bytes)
{
    int64_t packs[2];
    size_t need = 0;
    const int halves = halves_needed(exchange);
    for (int side = 0; side < 2; side++)
        for (int32_t i = 0; i < exchange->n[side]; i++)
            COLO_FAIL_IF(rank_on(exchange->subconnection, exchange->m[side][i].peer) < 0,
                         COLO_ERR_STATE, "%s: rank %d is not on the subconnection",
                         colo_operation_text(call), (int)exchange->m[side][i].peer);
    COLO_TRY(check_memory(call, exchange));
    COLO_TRY(need_lists(call, exchange));
    for (int k = 0; k < halves; k++) {
        size_t n = lay_out(call->f, exchange, k, k + 1, stage, packs);
        need = n > need ? n : need;
    }
    if (!exchange->subconnection) {
        COLO_TRY(colo_operation_stage(call, need));
        stage = call->stage;
    } else if (need > stage_bytes) {
        return colo_fail(COLO_ERR_STATE, "%s: %zu bytes of staging are needed, %zu are there",
                         colo_operation_text(call), need, stage_bytes);
    }
    /* two ranks need not take equally many halves: what one sends to the other has one order */
    const bool at_once = exchange->subconnection && exchange->subconnection->n == 2 && need == 0;
    for (int k = 0, end; k < halves; k = end) {
        end = at_once ? halves : k + 1;
        COLO_TRY(run_halves(call, exchange, k, end, stage));
    }
    return COLO_OK;
}

/* ---- entries ---- */

colo_status_t colo_nccl_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                 colo_stream_t stream)
{
    const struct exchange x = both_sides(exchange);
    struct colo_operation call;
    /* A rank that brings nothing is waited for where the comm is not connected yet. */
    if (x.n[0] + x.n[1] == 0 &&
        (x.subconnection || ((struct colo_nccl_group *)comm->impl)->connection))
        return COLO_OK;
    COLO_TRY(colo_operation_begin(&call, comm, exchange->subconnection, stream));
    return colo_operation_end(
        &call, run(&call, &x, x.subconnection ? exchange->stage : NULL, exchange->stage_bytes));
}

size_t colo_nccl_subconnection_stage(const colo_exchange_t *exchange)
{
    const struct exchange x = both_sides(exchange);
    size_t most = 0;
    for (int k = 0; k < HALVES; k++) {
        size_t n = 0;
        for (int side = 0; side < 2; side++)
            for (int32_t i = 0; i < x.n[side]; i++)
                n += colo_stage_padded((size_t)half_bytes(&x.m[side][i], k, x.elem));
        most = n > most ? n : most;
    }
    return most;
}
