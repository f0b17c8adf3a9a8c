/* SPDX-License-Identifier: Apache-2.0 */
/*
 * round.c - one round of an operation: a message to and from each peer that takes part.
 *
 *   1  to every peer a header: which operation, what I send, what I expect, and the first bytes
 *   2  wait for every peer's header and compare; a difference kills the group on both sides
 *   3  only now write: first bytes into the caller's boxes, READY to each peer with more for me
 *   4  the rest in segments, to each READY peer, until all is sent and received
 *
 * Small messages end after 2 and 3: one frame each way. A rank that is in another operation, went
 * past this one or left is found by its header (meet.c) or its goodbye; one that does not come, by
 * the deadline.
 */
#include "comm/process/group.h"

#include "core/hash.h"
#include "core/error.h"

#include <stdio.h>
#include <string.h>

/* ---- error messages ---- */

/* @timeout_ms: 0: it left */
static void missing(struct colo_process_group *group, int32_t peer, int64_t timeout_ms)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = colo_round_waiter(group, peer);
    colo_blame_missing(error_message, &me, timeout_ms, group->peer_round[peer].met);
    colo_process_set_error(group, group->seq, COLO_ERR_TIMEOUT, -1, error_message);
}

static void interrupt(struct colo_process_group *group, int32_t peer)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = colo_round_waiter(group, peer);
    colo_blame_interrupted(error_message, &me);
    colo_process_set_error_all(group->context, COLO_ERR_ABORTED, -1, error_message);
    colo_process_notify(group->context);
}

static colo_status_t verdict(const struct colo_process_group *group)
{
    char error_message[1000];
    colo_status_t st =
        colo_error_state_notify(&group->error, group->rank, error_message, sizeof error_message);
    COLO_THEN(st, colo_error_state_notify(&group->context->error, group->context->rank,
                                          error_message, sizeof error_message));
    return colo_fail(st, "%s", error_message);
}

/* ---- beginning ---- */

static struct colo_shape_ shape_of(const colo_message_t *message, size_t elem)
{
    struct colo_shape_ s = {.print = COLO_HASH_INIT, .nboxes = message->nboxes};
    for (int32_t k = 0; k < message->nboxes; k++) {
        const int64_t *e = message->boxes[k].extent;
        for (int i = 0; i < 3; i++) {
            s.print = colo_hash_i64(s.print, e[i]);
            s.first[i] = k == 0 ? e[i] : s.first[i];
        }
        s.bytes += e[0] * e[1] * e[2];
    }
    s.bytes *= (int64_t)elem;
    return s;
}

/* Until the group runs no other thread reads the peer rounds. */
static void add(struct colo_process_group *group, const colo_message_t *message, bool is_sent,
                size_t elem)
{
    struct colo_process_round *round = &group->peer_round[message->peer];
    if (!round->active) {
        memset(round, 0, sizeof *round);
        round->active = true;
        group->active[group->nactive++] = message->peer;
    }
    struct colo_transit *transit = is_sent ? &round->out : &round->in;
    transit->due = true;
    transit->shape = shape_of(message, elem);
    transit->left = transit->shape.bytes;
    colo_cursor_init(&transit->cursor, message->boxes, message->nboxes, elem);
}

/* Sends @frame with the next @bytes of the message to @peer. False: the peer is gone, or the group
 * is dead. */
static bool send_part(struct colo_process_group *group, int32_t peer, colo_frame_t *frame,
                      int64_t bytes)
{
    struct colo_process_round *round = &group->peer_round[peer];
    struct colo_process_context *context = group->context;
    if (context->closed[group->world[peer]])
        return false;
    const size_t all = sizeof *frame + (size_t)bytes;
    char *place = context->transport->reserve(context->connections, group->world[peer], all);
    if (!place) {
        char error_message[120];
        snprintf(error_message, sizeof error_message, "no memory to send %zu bytes to rank %d", all,
                 (int)peer);
        colo_process_set_error(group, group->seq, COLO_ERR_NOMEM, group->rank, error_message);
        return false;
    }
    frame->magic = COLO_FRAME_MAGIC;
    frame->round = group->round;
    frame->from = group->rank;
    frame->group = group->key;
    frame->seq = group->seq;
    memcpy(place, frame, sizeof *frame);
    colo_cursor_move(&round->out.cursor, place + sizeof *frame, NULL, bytes);
    round->out.left -= bytes;
    context->transport->commit(context->connections);
    return true;
}

static void send_header(struct colo_process_group *group, int32_t peer)
{
    const struct colo_process_round *round = &group->peer_round[peer];
    const int64_t bytes = round->out.shape.bytes;
    colo_frame_t header = {
        .kind = COLO_FRAME_HEADER,
        .flags = (uint8_t)((round->out.due ? COLO_FRAME_SENDS : 0) |
                           (round->in.due ? COLO_FRAME_EXPECTS : 0)),
        .desc = colo_op_pack(&group->op),
        .count = (uint64_t)group->op.count,
        .bytes = (uint64_t)bytes,
        .sent = round->out.shape,
        .expected = round->in.shape,
    };
    (void)send_part(group, peer, &header, bytes < COLO_FRAME_EAGER ? bytes : COLO_FRAME_EAGER);
}

/* ---- moving ---- */

/* All agree: take what came with the headers, ask for what did not. */
static void take_eager(struct colo_process_group *group)
{
    colo_frame_t ready = {.kind = COLO_FRAME_READY, .round = group->round, .seq = group->seq};
    for (int32_t i = 0; i < group->nactive; i++) {
        int32_t peer = group->active[i];
        struct colo_process_round *round = &group->peer_round[peer];
        struct colo_remote *remote = &group->peer[peer];
        struct colo_early *early = &remote->early[remote->first];
        const int64_t n = round->in.left < COLO_FRAME_EAGER ? round->in.left : COLO_FRAME_EAGER;
        colo_cursor_move(&round->in.cursor, NULL, (const char *)early->eager, n);
        round->in.left -= n;
        early->full = false;
        remote->first ^= 1;
        if (round->in.left > 0)
            colo_process_frame(group, peer, &ready, NULL);
    }
    group->moving = true;
}

static void send_data(struct colo_process_group *group, int32_t peer)
{
    const struct colo_process_round *round = &group->peer_round[peer];
    const struct colo_process_context *context = group->context;
    while (round->out.left > 0 &&
           !context->transport->full(context->connections, group->world[peer])) {
        const int64_t bytes =
            round->out.left < COLO_FRAME_CHUNK ? round->out.left : COLO_FRAME_CHUNK;
        colo_frame_t data = {.kind = COLO_FRAME_DATA, .bytes = (uint64_t)bytes};
        if (!send_part(group, peer, &data, bytes))
            return;
    }
}

/* Sends what can be sent; -1 (DONE) or a peer that is not done. */
static int32_t pump(struct colo_process_group *group)
{
    int32_t undone = -1;
    for (int32_t k = 1; k < group->size; k++) {
        int32_t peer = (group->rank + k) % group->size; /* not all ranks to rank 0 first */
        struct colo_process_round *round = &group->peer_round[peer];
        if (!round->active)
            continue;
        if (round->ready && round->out.left > 0)
            send_data(group, peer);
        if (round->out.left > 0 || round->in.left > 0 ||
            !group->context->transport->flushed(group->context->connections, group->world[peer]))
            undone = peer;
    }
    return undone;
}

static int32_t unmet(const struct colo_process_group *group)
{
    for (int32_t i = 0; i < group->nactive; i++)
        if (!group->peer_round[group->active[i]].met)
            return group->active[i];
    return -1;
}

/* Sets the error state: a rank will not come any more, or @peer did not come in time. */
static void judge(struct colo_process_group *group, int32_t peer, double waited, int64_t timeout_ms)
{
    for (int32_t i = 0; i < group->nactive; i++) {
        int32_t r = group->active[i];
        const struct colo_process_round *round = &group->peer_round[r];
        if (group->peer[r].gone && !round->met && group->peer[r].last.seq >= group->seq) {
            colo_round_mismatch(group, r, NULL);
            return;
        }
        if (group->peer[r].gone &&
            (!round->met || (group->moving && round->in.left > 0) || round->out.left > 0)) {
            missing(group, r, 0);
            return;
        }
    }
    if (waited * 1e3 > (double)timeout_ms)
        missing(group, peer, timeout_ms);
}

enum { DONE = -1, FAILED = -2 };

/* Polls once; DONE, FAILED, or the peer it waits for. */
static int32_t poll_once(struct colo_process_group *group, const colo_comm_t *comm, bool read_clock)
{
    colo_process_progress(group->context);
    if (!group->moving && group->nmet == group->nactive)
        take_eager(group);
    int32_t peer = group->moving ? pump(group) : unmet(group);
    if (peer >= 0 && colo_process_must_fail(group)) /* what all agreed on is brought to its end */
        return FAILED;
    if (peer >= 0 && read_clock)
        judge(group, peer, colo_now() - group->begin, colo_comm_timeout(comm));
    return peer;
}

/* What arrives finds the round as a whole, or not yet. */
static void begin(struct colo_process_group *group, const colo_comm_t *comm,
                  const colo_exchange_t *exchange)
{
    if (exchange->round == 0) {
        group->begin = colo_now();
        snprintf(group->name, sizeof group->name, "%s", comm->name);
    }
    group->seq = comm->seq;
    group->round = exchange->round;
    group->op = comm->op;
    group->nmet = 0;
    group->moving = false;
    group->running = true;
    for (int32_t k = 1; k < group->size; k++) {
        int32_t peer = (group->rank + k) % group->size;
        if (group->peer_round[peer].active)
            send_header(group, peer);
    }
    for (int32_t r = 0; r < group->size; r++) /* also those with whom nothing is due */
        if (r != group->rank)
            colo_round_poll(group, r);
}

colo_status_t colo_process_exchange(colo_comm_t *comm, const colo_exchange_t *exchange,
                                    colo_stream_t stream)
{
    struct colo_process_group *group = comm->impl;
    pthread_mutex_t *lock = &group->context->lock;
    const size_t elem = colo_dtype_size(exchange->op.dtype);
    group->nactive = 0;
    for (int32_t i = 0; i < exchange->nsends; i++)
        add(group, &exchange->send[i], true, elem);
    for (int32_t i = 0; i < exchange->nrecvs; i++)
        add(group, &exchange->recv[i], false, elem);
    pthread_mutex_lock(lock);
    begin(group, comm, exchange);
    colo_wait_t wait = {.begin = group->begin};
    bool ends = false; /* what the caller asks for is an error even if the round came to its end */
    int32_t peer = poll_once(group, comm, false);
    while (peer >= 0) {
        pthread_mutex_unlock(lock);
        const bool spins = colo_wait_spin(&wait);
        const double waited = spins ? 0 : colo_now() - wait.begin;
        const double nap = spins ? 0 : colo_wait_nap(waited);
        if (nap > 0)
            group->context->transport->wait(group->context->connections, nap);
        const bool interrupted = colo_interrupted(waited);
        pthread_mutex_lock(lock);
        if (interrupted)
            interrupt(group, peer);
        ends |= interrupted;
        peer = poll_once(group, comm, !spins);
    }
    group->running = false;
    for (int32_t i = 0; i < group->nactive; i++)
        group->peer_round[group->active[i]].active = false;
    pthread_mutex_unlock(lock);
    return peer == FAILED || ends ? verdict(group) : COLO_OK;
}
