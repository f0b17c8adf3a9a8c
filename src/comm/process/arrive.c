/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrive.c - what arrives from peers, checked and sorted to the groups.
 *
 * A frame of a group that this rank has not made yet is kept; one of a group that it has left is
 * dropped. A peer may be broken or hostile: every length, index and kind is checked before it is
 * used, what is kept of a peer is bounded, and the first frame that makes no sense is an error on
 * all ranks, because nothing after it can be trusted.
 */
#include "comm/process/group.h"

#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    AT_ONCE = 256,            /* frames of one progress, so that its caller can look at the clock */
    UNEXPECTED_MAX = 4 << 20, /* bytes kept of one peer: a thousand groups ahead of this rank */
};

static struct colo_process_group *find_group(struct colo_process_group *list, uint64_t key)
{
    while (list && list->key != key)
        list = list->next;
    return list;
}

static void nonsense(struct colo_process_context *f, int32_t peer)
{
    char error_message[200];
    snprintf(error_message, sizeof error_message,
             "world rank %d sends frames that world rank %d does not understand; run the same "
             "version on all ranks",
             (int)peer, (int)f->rank);
    colo_process_set_error_all(f, COLO_ERR_MISMATCH, -1, error_message);
}

/* ---- frames of groups that are not here ---- */

static void unexpected(struct colo_process_context *f, int32_t peer, const colo_frame_t *frame,
                       size_t bytes)
{
    /* The rest of a message is sent only to ranks that asked for it. */
    if (frame->kind != COLO_FRAME_HEADER && frame->kind != COLO_FRAME_FAIL &&
        frame->kind != COLO_FRAME_BYE) {
        nonsense(f, peer);
        return;
    }
    if (f->unexpected_bytes[peer] + bytes > UNEXPECTED_MAX) {
        char error_message[200];
        snprintf(error_message, sizeof error_message,
                 "world rank %d sent more than %d bytes to groups that world rank %d did not make; "
                 "split communicators in the same order on all ranks",
                 (int)peer, (int)UNEXPECTED_MAX, (int)f->rank);
        colo_process_set_error_all(f, COLO_ERR_MISMATCH, -1, error_message);
        return;
    }
    struct colo_unexpected *s = malloc(sizeof *s + bytes);
    if (!s) {
        colo_process_set_error_all(f, COLO_ERR_NOMEM, f->rank,
                                   "no memory for a frame that came before its group was made");
        return;
    }
    *s = (struct colo_unexpected){.peer = peer, .bytes = bytes};
    memcpy(s->frame, frame, bytes);
    if (!f->unexpected)
        f->unexpected_end = &f->unexpected;
    *f->unexpected_end = s;
    f->unexpected_end = &s->next;
    f->unexpected_bytes[peer] += bytes;
}

static void dispatch(struct colo_process_context *f, int32_t peer, const colo_frame_t *frame,
                     size_t bytes);

void colo_process_take_unexpected(struct colo_process_group *x)
{
    struct colo_process_context *f = x->context;
    struct colo_unexpected *s = f->unexpected;
    f->unexpected = NULL;
    while (s) {
        struct colo_unexpected *next = s->next;
        f->unexpected_bytes[s->peer] -= s->bytes;
        dispatch(f, s->peer, (const colo_frame_t *)s->frame, s->bytes); /* back, or to the group */
        free(s);
        s = next;
    }
}

/* ---- sorting ---- */

/* @x: NULL for the error state of all */
static void take_fail(struct colo_process_context *f, struct colo_process_group *x,
                      const colo_frame_t *frame, const void *payload)
{
    char error_message[COLO_FAIL_TEXT + 1];
    snprintf(error_message, sizeof error_message, "%.*s", (int)frame->bytes, (const char *)payload);
    const colo_status_t said = (colo_status_t)(int64_t)frame->desc;
    const colo_status_t status = said < 0 ? said : COLO_ERR_PEER;
    const int64_t culprit = (int64_t)frame->count;
    const int32_t named = culprit >= 0 && culprit < (x ? x->size : f->size) ? (int32_t)culprit : -1;
    if (!x)
        colo_error_state_set(&f->error, status, named, named, error_message);
    else if (colo_process_take_fault(x, frame->seq, status, named, error_message))
        colo_process_begin_no_more(x);
}

static void take_header(struct colo_process_group *x, const colo_frame_t *frame,
                        const void *payload)
{
    struct colo_remote *p = &x->peer[frame->from];
    p->last = (colo_last_op_t){frame->seq, frame->desc, frame->count};
    struct colo_early *e = &p->early[p->first];
    if (e->full)
        e = &p->early[p->first ^ 1];
    if (e->full) { /* it cannot be two operations ahead of what it needs me for */
        char error_message[160];
        snprintf(error_message, sizeof error_message,
                 "rank %d of '%s' is three operations ahead of rank %d: its frames make no sense",
                 (int)frame->from, x->name, (int)x->rank);
        colo_process_set_error(x, COLO_ERR_MISMATCH, -1, error_message);
        return;
    }
    e->full = true;
    e->header = *frame;
    size_t n = frame->bytes < COLO_FRAME_EAGER ? frame->bytes : COLO_FRAME_EAGER;
    memcpy(e->eager, payload, n);
    colo_step_poll(x, frame->from);
}

/* Does a frame of @bytes hold together by itself? */
static bool is_whole(const colo_frame_t *frame, size_t bytes)
{
    if (bytes < sizeof *frame || frame->magic != COLO_FRAME_MAGIC)
        return false;
    uint64_t payload = frame->bytes;
    if (frame->kind == COLO_FRAME_HEADER) {
        if (frame->sent.bytes < 0 || frame->bytes != (uint64_t)frame->sent.bytes)
            return false;
        payload = frame->bytes < COLO_FRAME_EAGER ? frame->bytes : COLO_FRAME_EAGER;
    }
    return bytes - sizeof *frame == payload;
}

/* @peer closed its end: it is gone from all groups. */
static void take_close(struct colo_process_context *f, int32_t peer)
{
    f->nclosed += !f->closed[peer];
    f->closed[peer] = true;
    for (struct colo_process_group *x = f->group; x; x = x->next)
        for (int32_t r = 0; r < x->size; r++)
            if (x->world[r] == peer)
                x->peer[r].gone = true;
    colo_process_reap(f);
}

static void take_bye(struct colo_remote *p, const colo_frame_t *frame)
{
    p->gone = true;
    p->last = (colo_last_op_t){frame->seq, frame->desc, frame->count};
}

/* @bytes: of frame and payload */
static void dispatch(struct colo_process_context *f, int32_t peer, const colo_frame_t *frame,
                     size_t bytes)
{
    if (!is_whole(frame, bytes)) {
        nonsense(f, peer);
        return;
    }
    const void *payload = frame + 1;
    if (frame->kind == COLO_FRAME_CLOSE) {
        take_close(f, peer);
        return;
    }
    if (frame->group == 0) {
        if (frame->kind == COLO_FRAME_FAIL)
            take_fail(f, NULL, frame, payload);
        else
            nonsense(f, peer);
        return;
    }
    struct colo_process_group *x = find_group(f->group, frame->group);
    const bool left = !x && (x = find_group(f->draining, frame->group)) != NULL;
    if (!x) {
        unexpected(f, peer, frame, bytes);
        return;
    }
    if (frame->from < 0 || frame->from >= x->size || x->world[frame->from] != peer) {
        nonsense(f, peer);
        return;
    }
    if (left) {
        if (frame->kind == COLO_FRAME_BYE) {
            x->peer[frame->from].gone = true;
            colo_process_reap(f);
        }
        return;
    }
    switch ((colo_frame_kind_t)frame->kind) {
    case COLO_FRAME_HEADER:
        take_header(x, frame, payload);
        break;
    case COLO_FRAME_READY:
        colo_step_ready(x, frame);
        break;
    case COLO_FRAME_DATA:
        if (!colo_step_data(x, frame, payload))
            nonsense(f, peer);
        break;
    case COLO_FRAME_FAIL:
        take_fail(f, x, frame, payload);
        break;
    case COLO_FRAME_BYE:
        take_bye(&x->peer[frame->from], frame);
        break;
    default:
        nonsense(f, peer);
    }
}

static void peer_lost(struct colo_process_context *f, int32_t peer)
{
    char error_message[700];
    if (f->closed[peer])
        return; /* it said so */
    f->nclosed++;
    f->closed[peer] = true;
    snprintf(error_message, sizeof error_message,
             "world rank %d ended without destroying its communicators, or was killed: %s",
             (int)peer, f->ops->why(f->transport));
    colo_error_state_set(&f->error, COLO_ERR_PEER, -1, -1, error_message);
    colo_process_reap(f);
}

void colo_process_progress(struct colo_process_context *f)
{
    const void *frame = NULL;
    size_t bytes = 0;
    int32_t peer = 0;
    int got;
    colo_process_notify(f);
    for (int n = 0; n < AT_ONCE && (got = f->ops->recv(f->transport, &peer, &frame, &bytes)) != 0;
         n++) {
        if (got == 1) {
            dispatch(f, peer, frame, bytes);
        } else if (got == -1) {
            peer_lost(f, peer);
        } else { /* -2: the transport is broken */
            colo_error_state_set(&f->error, COLO_ERR_STATE, -1, -1, f->ops->why(f->transport));
            return;
        }
    }
}
