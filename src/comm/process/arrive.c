/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arrive.c - what arrives from peers, checked and sorted to the groups.
 *
 * A frame of a group that this rank has not made yet is saved; one of a group that it has left is
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

static void nonsense(struct colo_process_context *context, int32_t peer)
{
    char error_message[200];
    snprintf(error_message, sizeof error_message,
             "world rank %d sends frames that world rank %d does not understand; run the same "
             "version on all ranks",
             (int)peer, (int)context->rank);
    colo_process_set_error_all(context, COLO_ERR_MISMATCH, -1, error_message);
}

/* ---- frames of groups that are not here ---- */

static void unexpected(struct colo_process_context *context, int32_t peer,
                       const colo_frame_t *frame, size_t bytes)
{
    /* The rest of a message is sent only to ranks that asked for it. */
    if (frame->kind != COLO_FRAME_HEADER && frame->kind != COLO_FRAME_FAIL &&
        frame->kind != COLO_FRAME_BYE) {
        nonsense(context, peer);
        return;
    }
    if (context->unexpected_bytes[peer] + bytes > UNEXPECTED_MAX) {
        char error_message[200];
        snprintf(error_message, sizeof error_message,
                 "world rank %d sent more than %d bytes to groups that world rank %d did not make; "
                 "split communicators in the same order on all ranks",
                 (int)peer, (int)UNEXPECTED_MAX, (int)context->rank);
        colo_process_set_error_all(context, COLO_ERR_MISMATCH, -1, error_message);
        return;
    }
    struct colo_unexpected *saved = malloc(sizeof *saved + bytes);
    if (!saved) {
        colo_process_set_error_all(context, COLO_ERR_NOMEM, context->rank,
                                   "no memory for a frame that came before its group was made");
        return;
    }
    *saved = (struct colo_unexpected){.peer = peer, .bytes = bytes};
    memcpy(saved->frame, frame, bytes);
    if (!context->unexpected)
        context->unexpected_end = &context->unexpected;
    *context->unexpected_end = saved;
    context->unexpected_end = &saved->next;
    context->unexpected_bytes[peer] += bytes;
}

static void dispatch(struct colo_process_context *context, int32_t peer, const colo_frame_t *frame,
                     size_t bytes);

void colo_process_take_unexpected(struct colo_process_group *group)
{
    struct colo_process_context *context = group->context;
    struct colo_unexpected *saved = context->unexpected;
    context->unexpected = NULL;
    while (saved) {
        struct colo_unexpected *next = saved->next;
        context->unexpected_bytes[saved->peer] -= saved->bytes;
        dispatch(context, saved->peer, (const colo_frame_t *)saved->frame,
                 saved->bytes); /* back, or to the group */
        free(saved);
        saved = next;
    }
}

/* ---- sorting ---- */

/* @group: NULL for the error state of all */
static void take_fail(struct colo_process_context *context, struct colo_process_group *group,
                      const colo_frame_t *frame, const void *payload)
{
    char error_message[COLO_FAIL_TEXT + 1];
    snprintf(error_message, sizeof error_message, "%.*s", (int)frame->bytes, (const char *)payload);
    const colo_status_t said = (colo_status_t)(int64_t)frame->desc;
    const colo_status_t status = said < 0 ? said : COLO_ERR_PEER;
    const int64_t culprit = (int64_t)frame->count;
    const int32_t named =
        culprit >= 0 && culprit < (group ? group->size : context->size) ? (int32_t)culprit : -1;
    if (!group)
        colo_error_state_set(&context->error, status, named, named, error_message);
    else if (colo_process_take_fault(group, frame->seq, status, named, error_message))
        colo_process_begin_no_more(group);
}

static void take_header(struct colo_process_group *group, const colo_frame_t *frame,
                        const void *payload)
{
    struct colo_remote *remote = &group->peer[frame->from];
    remote->last = (colo_last_op_t){frame->seq, frame->desc, frame->count};
    struct colo_early *early = &remote->early[remote->first];
    if (early->full)
        early = &remote->early[remote->first ^ 1];
    if (early->full) { /* it cannot be two operations ahead of what it needs me for */
        char error_message[160];
        snprintf(error_message, sizeof error_message,
                 "rank %d of '%s' is three operations ahead of rank %d: its frames make no sense",
                 (int)frame->from, group->name, (int)group->rank);
        colo_process_set_error(group, group->seq, COLO_ERR_MISMATCH, -1, error_message);
        return;
    }
    early->full = true;
    early->header = *frame;
    size_t n = frame->bytes < COLO_FRAME_EAGER ? frame->bytes : COLO_FRAME_EAGER;
    memcpy(early->eager, payload, n);
    colo_round_poll(group, frame->from);
}

/* Does a frame of @bytes hold together by itself? */
static bool is_consistent(const colo_frame_t *frame, size_t bytes)
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
static void take_close(struct colo_process_context *context, int32_t peer)
{
    context->nclosed += !context->closed[peer];
    context->closed[peer] = true;
    for (struct colo_process_group *group = context->group; group; group = group->next)
        for (int32_t r = 0; r < group->size; r++)
            if (group->world[r] == peer)
                group->peer[r].gone = true;
    colo_process_reap(context);
}

/* @bytes: of frame and payload */
static void dispatch(struct colo_process_context *context, int32_t peer, const colo_frame_t *frame,
                     size_t bytes)
{
    if (!is_consistent(frame, bytes)) {
        nonsense(context, peer);
        return;
    }
    const void *payload = frame + 1;
    if (frame->kind == COLO_FRAME_CLOSE) {
        take_close(context, peer);
        return;
    }
    if (frame->group == 0) {
        if (frame->kind == COLO_FRAME_FAIL)
            take_fail(context, NULL, frame, payload);
        else
            nonsense(context, peer);
        return;
    }
    struct colo_process_group *group = context->group;
    while (group && group->key != frame->group)
        group = group->next;
    if (!group) {
        unexpected(context, peer, frame, bytes);
        return;
    }
    if (frame->from < 0 || frame->from >= group->size || group->world[frame->from] != peer) {
        nonsense(context, peer);
        return;
    }
    if (frame->kind == COLO_FRAME_BYE) {
        group->peer[frame->from].gone = true;
        group->peer[frame->from].last = (colo_last_op_t){frame->seq, frame->desc, frame->count};
        colo_process_reap(context);
        return;
    }
    if (group->left)
        return;
    switch ((colo_frame_kind_t)frame->kind) {
    case COLO_FRAME_HEADER:
        take_header(group, frame, payload);
        break;
    case COLO_FRAME_READY:
        colo_round_ready(group, frame);
        break;
    case COLO_FRAME_DATA:
        if (!colo_round_data(group, frame, payload))
            nonsense(context, peer);
        break;
    case COLO_FRAME_FAIL:
        take_fail(context, group, frame, payload);
        break;
    default:
        nonsense(context, peer);
    }
}

static void peer_lost(struct colo_process_context *context, int32_t peer)
{
    char error_message[700];
    if (context->closed[peer])
        return; /* it said so */
    context->nclosed++;
    context->closed[peer] = true;
    snprintf(error_message, sizeof error_message,
             "world rank %d ended without destroying its communicators, or was killed: %s",
             (int)peer, context->transport->why(context->connections));
    colo_error_state_set(&context->error, COLO_ERR_PEER, -1, -1, error_message);
    colo_process_reap(context);
}

void colo_process_progress(struct colo_process_context *context)
{
    const void *frame = NULL;
    size_t bytes = 0;
    int32_t peer = 0;
    int got;
    colo_process_notify(context);
    for (int n = 0; n < AT_ONCE && (got = context->transport->recv(context->connections, &peer,
                                                                   &frame, &bytes)) != 0;
         n++) {
        if (got == 1) {
            dispatch(context, peer, frame, bytes);
        } else if (got == -1) {
            peer_lost(context, peer);
        } else { /* -2: the transport is broken */
            colo_error_state_set(&context->error, COLO_ERR_STATE, -1, -1,
                                 context->transport->why(context->connections));
            return;
        }
    }
}
