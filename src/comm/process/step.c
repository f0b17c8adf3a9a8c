/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - one step of an operation: a message to and from each peer that takes part.
 *
 *   1  to every peer a header: which operation, what I send, what I expect, and the first bytes
 *   2  wait for every peer's head and compare; a difference kills the group on both sides
 *   3  only now write: first bytes into the caller's boxes, READY to each peer with more for me
 *   4  the rest in segments, to each READY peer, until all is sent and received
 *
 * Small messages end after 2 and 3: one frame each way. A rank that is in another operation, went
 * past this one or left is found by its header or its goodbye; one that does not come, by the
 * deadline.
 */
#include "comm/process/group.h"

#include "core/hash.h"
#include "core/error.h"

#include <stdio.h>
#include <string.h>

/* ---- error messages ---- */

static colo_waiter_t waiter(const struct colo_process_group *x, int32_t peer)
{
    return (colo_waiter_t){x->name, x->label,           x->rank, x->size, x->op, x->seq,
                           peer,    x->peer[peer].last, true};
}

/* @found: NULL: it went on without this rank */
static void mismatch(struct colo_process_group *x, int32_t peer, const char *found)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(x, peer);
    colo_blame_mismatch(error_message, &me, found, x->peer[peer].gone);
    colo_process_set_error(x, COLO_ERR_MISMATCH, -1, error_message);
}

/* @timeout_ms: 0: it left */
static void missing(struct colo_process_group *x, int32_t peer, int64_t timeout_ms)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = waiter(x, peer);
    colo_blame_missing(error_message, &me, timeout_ms, x->peer_step[peer].met);
    colo_process_set_error(x, COLO_ERR_TIMEOUT, -1, error_message);
}

static colo_status_t verdict(const struct colo_process_group *x)
{
    char error_message[1000];
    colo_status_t st =
        colo_error_state_notify(&x->error, x->rank, error_message, sizeof error_message);
    if (st == COLO_OK)
        st = colo_error_state_notify(&x->context->error, x->context->rank, error_message,
                                     sizeof error_message);
    return colo_fail(st, "%s", error_message);
}

/* ---- beginning ---- */

static struct colo_shape_ shape_of(const colo_message_t *m, size_t elem)
{
    struct colo_shape_ s = {.print = COLO_HASH_INIT, .nboxes = m->nboxes};
    for (int32_t k = 0; k < m->nboxes; k++) {
        const int64_t *e = m->boxes[k].extent;
        for (int i = 0; i < 3; i++) {
            s.print = colo_hash_i64(s.print, e[i]);
            s.first[i] = k == 0 ? e[i] : s.first[i];
        }
        s.bytes += e[0] * e[1] * e[2];
    }
    s.bytes *= (int64_t)elem;
    return s;
}

void colo_step_begin(colo_comm_t *c, uint8_t step)
{
    struct colo_process_group *x = c->impl;
    pthread_mutex_lock(&x->context->lock);
    if (step == 0) {
        x->begin = colo_now();
        snprintf(x->name, sizeof x->name, "%s", c->name);
    }
    x->seq = c->seq;
    x->step = step;
    x->op = c->op;
    x->nactive = x->nmet = 0;
    x->moving = false;
    x->begun = true;
    pthread_mutex_unlock(&x->context->lock);
}

/* Until colo_step_run() no other thread reads the peer steps. */
void colo_step_add(colo_comm_t *c, int32_t peer, const colo_message_t *send,
                   const colo_message_t *recv, size_t elem)
{
    struct colo_process_group *x = c->impl;
    struct colo_process_step *l = &x->peer_step[peer];
    if (!l->active) {
        memset(l, 0, sizeof *l);
        l->active = true;
        x->active[x->nactive++] = peer;
    }
    if (send) {
        l->sends = true;
        l->sent = shape_of(send, elem);
        l->out_left = l->sent.bytes;
        colo_cursor_init(&l->out, send->boxes, send->nboxes, elem);
    }
    if (recv) {
        l->expects = true;
        l->expected = shape_of(recv, elem);
        l->in_left = l->expected.bytes;
        colo_cursor_init(&l->in, recv->boxes, recv->nboxes, elem);
    }
}

void colo_step_plain(colo_comm_t *c, int32_t peer, const void *out, size_t out_bytes, void *in,
                     size_t in_bytes)
{
    struct colo_process_step *l = &((struct colo_process_group *)c->impl)->peer_step[peer];
    colo_step_add(c, peer, NULL, NULL, 1);
    l->out_box = (colo_box_t){(void *)(uintptr_t)out, {1, 1, (int64_t)out_bytes}, {0, 0, 1}};
    l->in_box = (colo_box_t){in, {1, 1, (int64_t)in_bytes}, {0, 0, 1}};
    colo_message_t send = {peer, 1, &l->out_box}, recv = {peer, 1, &l->in_box};
    colo_step_add(c, peer, out ? &send : NULL, in ? &recv : NULL, 1);
}

/* Room for a frame of this step; NULL: the group is dead. */
static char *reserve(struct colo_process_group *x, int32_t peer, size_t bytes)
{
    struct colo_process_context *f = x->context;
    char *p = f->ops->reserve(f->transport, x->world[peer], bytes);
    if (!p) {
        char error_message[120];
        snprintf(error_message, sizeof error_message, "no memory to send %zu bytes to rank %d",
                 bytes, (int)peer);
        colo_process_set_error(x, COLO_ERR_NOMEM, x->rank, error_message);
    }
    return p;
}

static void send_header(struct colo_process_group *x, int32_t peer)
{
    struct colo_process_step *l = &x->peer_step[peer];
    struct colo_process_context *f = x->context;
    colo_frame_t header = {
        .magic = COLO_FRAME_MAGIC,
        .kind = COLO_FRAME_HEADER,
        .step = x->step,
        .flags =
            (uint8_t)((l->sends ? COLO_FRAME_SENDS : 0) | (l->expects ? COLO_FRAME_EXPECTS : 0)),
        .from = x->rank,
        .group = x->key,
        .seq = x->seq,
        .desc = colo_op_pack(&x->op),
        .count = (uint64_t)x->op.count,
        .bytes = (uint64_t)l->sent.bytes,
        .sent = l->sent,
        .expected = l->expected,
    };
    int64_t eager = l->sent.bytes < COLO_FRAME_EAGER ? l->sent.bytes : COLO_FRAME_EAGER;
    if (f->closed[x->world[peer]])
        return;
    char *p = reserve(x, peer, sizeof header + (size_t)eager);
    if (!p)
        return;
    memcpy(p, &header, sizeof header);
    colo_cursor_move(&l->out, p + sizeof header, NULL, eager);
    l->out_left -= eager;
    f->ops->commit(f->transport);
}

/* ---- meeting ---- */

/* "box 0 of 1x4x3 elements where 1x3x4 are expected"; NULL when they are the same */
static const char *shapes_differ(char *text, size_t cap, const struct colo_shape_ *sent,
                                 const struct colo_shape_ *expected)
{
    const int64_t *a = sent->first, *b = expected->first;
    if (sent->nboxes != expected->nboxes)
        snprintf(text, cap, "%lld boxes where %lld are expected", (long long)sent->nboxes,
                 (long long)expected->nboxes);
    else if (memcmp(sent->first, expected->first, sizeof sent->first) != 0)
        snprintf(text, cap, "box 0 of %lldx%lldx%lld elements where %lldx%lldx%lld are expected",
                 (long long)a[0], (long long)a[1], (long long)a[2], (long long)b[0],
                 (long long)b[1], (long long)b[2]);
    else if (sent->bytes != expected->bytes || sent->print != expected->print)
        snprintf(text, cap,
                 "%lld boxes of %lld bytes where as many of %lld bytes and other extents are "
                 "expected",
                 (long long)sent->nboxes, (long long)sent->bytes, (long long)expected->bytes);
    else
        return NULL;
    return text;
}

/* The header of @peer for this very step: does it fit what I do with it? Both sides judge alike. */
static bool agrees(struct colo_process_group *x, int32_t peer, const colo_frame_t *h)
{
    const struct colo_process_step *l = &x->peer_step[peer];
    const bool sends = h->flags & COLO_FRAME_SENDS, expects = h->flags & COLO_FRAME_EXPECTS;
    char what[200], found[240];
    if (h->desc != colo_op_pack(&x->op) || h->count != (uint64_t)x->op.count)
        colo_op_found(found, sizeof found, x->op, colo_op_unpack(h->desc, h->count), h->seq);
    else if (l->expects && !sends)
        snprintf(found, sizeof found, "sends it no message where one is expected");
    else if (sends && !l->expects)
        snprintf(found, sizeof found, "sends it a message where none is expected");
    else if (l->sends && !expects)
        snprintf(found, sizeof found, "expects no message from it where it sends one");
    else if (expects && !l->sends)
        snprintf(found, sizeof found, "expects a message from it where it sends none");
    else if (sends && shapes_differ(what, sizeof what, &h->sent, &l->expected))
        snprintf(found, sizeof found, "sends it %s", what);
    else if (expects && shapes_differ(what, sizeof what, &l->sent, &h->expected))
        snprintf(found, sizeof found, "is sent %s", what);
    else
        return true;
    mismatch(x, peer, found);
    return false;
}

/* @peer has a header here: for now, for later, or for something that will not come to pass? */
void colo_step_poll(struct colo_process_group *x, int32_t peer)
{
    struct colo_remote *p = &x->peer[peer];
    struct colo_process_step *l = &x->peer_step[peer];
    const struct colo_early *e = &p->early[p->first];
    char what[96], found[200];
    if (!e->full || x->begun || (x->running && l->active && l->met))
        return; /* begun: another thread takes in what arrives, the step looks when it runs */
    const colo_frame_t *h = &e->header;
    const bool same = h->seq == x->seq && h->step == x->step;
    const bool before = h->seq < x->seq || (h->seq == x->seq && h->step < x->step);
    if (same && x->running && l->active) {
        if (agrees(x, peer, h)) {
            l->met = true;
            x->nmet++;
        }
    } else if (same && x->running) {
        if (h->flags & COLO_FRAME_SENDS)
            snprintf(found, sizeof found,
                     "sends it one: rank %d expects no message from it where it sends one",
                     (int)x->rank);
        else
            snprintf(found, sizeof found, "expects a message from it where it sends none");
        if (h->desc != colo_op_pack(&x->op) || h->count != (uint64_t)x->op.count)
            colo_op_found(found, sizeof found, x->op, colo_op_unpack(h->desc, h->count), h->seq);
        mismatch(x, peer, found);
    } else if (same || before) {
        snprintf(found, sizeof found, "is in %s only now: rank %d went past it without that rank",
                 colo_op_describe(what, sizeof what, colo_op_unpack(h->desc, h->count), h->seq),
                 (int)x->rank);
        mismatch(x, peer, found);
    } else if (x->running && l->active) {
        mismatch(x, peer, NULL);
    }
}

/* ---- moving ---- */

/* All agree: take what came with the headers, ask for what did not. */
static void take_eager(struct colo_process_group *x)
{
    colo_frame_t ready = {.kind = COLO_FRAME_READY, .step = x->step, .seq = x->seq};
    for (int32_t i = 0; i < x->nactive; i++) {
        int32_t peer = x->active[i];
        struct colo_process_step *l = &x->peer_step[peer];
        struct colo_remote *p = &x->peer[peer];
        struct colo_early *e = &p->early[p->first];
        int64_t n = l->expected.bytes < COLO_FRAME_EAGER ? l->expected.bytes : COLO_FRAME_EAGER;
        colo_cursor_move(&l->in, NULL, (const char *)e->eager, n);
        l->in_left -= n;
        e->full = false;
        p->first ^= 1;
        if (l->in_left > 0)
            colo_process_frame(x, peer, &ready, NULL);
    }
    x->moving = true;
}

void colo_step_ready(struct colo_process_group *x, const colo_frame_t *frame)
{
    struct colo_process_step *l = &x->peer_step[frame->from];
    if (x->running && l->active && frame->seq == x->seq && frame->step == x->step)
        l->ready = true; /* otherwise the group is dead, and this is what was under way */
}

bool colo_step_data(struct colo_process_group *x, const colo_frame_t *frame, const void *payload)
{
    struct colo_process_step *l = &x->peer_step[frame->from];
    if (!x->running || !x->moving || !l->active || frame->seq != x->seq || frame->step != x->step)
        return colo_error_state_is_set(&x->error) ||
               colo_error_state_is_set(&x->context->error); /* under way */
    const int64_t bytes = (int64_t)frame->bytes;
    if (bytes <= 0 || bytes > l->in_left || bytes % l->in.elem != 0)
        return false;
    colo_cursor_move(&l->in, NULL, payload, bytes);
    l->in_left -= bytes;
    return true;
}

static void send_data(struct colo_process_group *x, int32_t peer)
{
    struct colo_process_step *l = &x->peer_step[peer];
    struct colo_process_context *f = x->context;
    while (l->out_left > 0) {
        int64_t n = l->out_left < COLO_FRAME_CHUNK ? l->out_left : COLO_FRAME_CHUNK;
        colo_frame_t data = {.magic = COLO_FRAME_MAGIC,
                             .kind = COLO_FRAME_DATA,
                             .step = x->step,
                             .from = x->rank,
                             .group = x->key,
                             .seq = x->seq,
                             .bytes = (uint64_t)n};
        if (f->closed[x->world[peer]] || f->ops->full(f->transport, x->world[peer]))
            return;
        char *p = reserve(x, peer, sizeof data + (size_t)n);
        if (!p)
            return;
        memcpy(p, &data, sizeof data);
        colo_cursor_move(&l->out, p + sizeof data, NULL, n);
        l->out_left -= n;
        f->ops->commit(f->transport);
    }
}

/* Sends what can be sent; -1 (DONE) or a peer that is not done. */
static int32_t pump(struct colo_process_group *x)
{
    int32_t undone = -1;
    for (int32_t k = 1; k < x->size; k++) {
        int32_t peer = (x->rank + k) % x->size; /* not all ranks to rank 0 first */
        struct colo_process_step *l = &x->peer_step[peer];
        if (!l->active)
            continue;
        if (l->ready && l->out_left > 0)
            send_data(x, peer);
        if (l->out_left > 0 || l->in_left > 0 ||
            !x->context->ops->flushed(x->context->transport, x->world[peer]))
            undone = peer;
    }
    return undone;
}

static int32_t unmet(const struct colo_process_group *x)
{
    for (int32_t i = 0; i < x->nactive; i++)
        if (!x->peer_step[x->active[i]].met)
            return x->active[i];
    return -1;
}

/* Sets the error state: a rank will not come any more, or @peer did not come in time. */
static void judge(struct colo_process_group *x, int32_t peer, double waited, int64_t timeout_ms)
{
    for (int32_t i = 0; i < x->nactive; i++) {
        int32_t r = x->active[i];
        const struct colo_process_step *l = &x->peer_step[r];
        if (x->peer[r].gone && !l->met && x->peer[r].last.seq >= x->seq) {
            mismatch(x, r, NULL);
            return;
        }
        if (x->peer[r].gone && (!l->met || (x->moving && l->in_left > 0) || l->out_left > 0)) {
            missing(x, r, 0);
            return;
        }
    }
    if (waited * 1e3 > (double)timeout_ms)
        missing(x, peer, timeout_ms);
}

enum { DONE = -1, FAILED = -2 };

/* Polls once; DONE, FAILED, or the peer it waits for. */
static int32_t poll_once(struct colo_process_group *x, const colo_comm_t *c, bool read_clock)
{
    colo_process_progress(x->context);
    if (!x->moving && x->nmet == x->nactive)
        take_eager(x);
    int32_t peer = x->moving ? pump(x) : unmet(x);
    if (peer >= 0 && colo_process_must_fail(x)) /* what all agreed on is brought to its end */
        return FAILED;
    if (peer >= 0 && read_clock)
        judge(x, peer, colo_now() - x->begin, colo_comm_i_timeout(c));
    return peer;
}

colo_status_t colo_step_run(colo_comm_t *c)
{
    struct colo_process_group *x = c->impl;
    pthread_mutex_t *lock = &x->context->lock;
    pthread_mutex_lock(lock);
    x->begun = false;
    x->running = true;
    for (int32_t k = 1; k < x->size; k++) {
        int32_t peer = (x->rank + k) % x->size;
        if (x->peer_step[peer].active)
            send_header(x, peer);
    }
    for (int32_t r = 0; r < x->size; r++) /* also those with whom nothing is due */
        if (r != x->rank)
            colo_step_poll(x, r);
    colo_wait_t wait = {.begin = x->begin};
    int32_t peer = poll_once(x, c, false);
    while (peer >= 0) {
        pthread_mutex_unlock(lock);
        const bool spins = colo_wait_spin(&wait);
        const double nap = spins ? 0 : colo_wait_nap(colo_now() - wait.begin);
        if (nap > 0)
            x->context->ops->wait(x->context->transport, nap);
        pthread_mutex_lock(lock);
        peer = poll_once(x, c, !spins);
    }
    x->running = false;
    for (int32_t i = 0; i < x->nactive; i++)
        x->peer_step[x->active[i]].active = false;
    pthread_mutex_unlock(lock);
    return peer == FAILED ? verdict(x) : COLO_OK;
}
