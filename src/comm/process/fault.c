/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.c - what a rank tells the others of a group: that it failed, and that it leaves.
 *
 * Each rank keeps its own copy of a group's error state, and from which operation on it holds:
 * ranks that are in an older one may still end it well. A rank that sets it by itself tells all
 * members at once. A rank that hears of it sets its own; if it has not begun an operation before
 * that one, it never will, and tells all members from which on it is missing. A fault in an older
 * operation replaces one in a newer: no rank waits for a rank that failed before. Two ranks may
 * find two faults at the same time and then keep different error messages, never one dead and one
 * alive.
 */
#include "comm/process/group.h"

#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- telling ---- */

void colo_process_send(struct colo_process_context *context, int32_t peer, colo_frame_t *frame,
                       const void *payload)
{
    /* a peer that closed waits for one thing more: that this rank closes, too */
    if (peer == context->rank || (context->closed[peer] && frame->kind != COLO_FRAME_CLOSE))
        return;
    unsigned char *place =
        context->transport->reserve(context->connections, peer, sizeof *frame + frame->bytes);
    if (!place) {
        char error_message[200];
        snprintf(error_message, sizeof error_message,
                 "no memory for a frame of %zu bytes to world rank %d",
                 sizeof *frame + (size_t)frame->bytes, (int)peer);
        colo_process_set_error_all(context, COLO_ERR_NOMEM, context->rank, error_message);
        return;
    }
    frame->magic = COLO_FRAME_MAGIC;
    memcpy(place, frame, sizeof *frame);
    if (frame->bytes)
        memcpy(place + sizeof *frame, payload, frame->bytes);
    context->transport->commit(context->connections);
}

void colo_process_frame(struct colo_process_group *group, int32_t to, colo_frame_t *frame,
                        const void *payload)
{
    frame->group = group->key;
    frame->from = group->rank;
    colo_process_send(group->context, group->world[to], frame, payload);
}

static void fill_fail(colo_frame_t *frame, const colo_error_state_t *error, uint64_t dead_from)
{
    *frame = (colo_frame_t){
        .kind = COLO_FRAME_FAIL,
        .seq = dead_from,
        .desc = (uint64_t)(int64_t)atomic_load(&error->status),
        .count = (uint64_t)(int64_t)error->culprit,
        .bytes = strnlen(error->error_message, COLO_FAIL_TEXT),
    };
}

static void notify_members(struct colo_process_group *group)
{
    colo_frame_t frame;
    fill_fail(&frame, &group->error, group->dead_from);
    for (int32_t r = 0; r < group->size; r++)
        if (r != group->rank && !group->peer[r].gone)
            colo_process_frame(group, r, &frame, group->error.error_message);
}

static void notify_all(struct colo_process_context *context)
{
    colo_frame_t frame;
    fill_fail(&frame, &context->error, 0);
    frame.from = context->rank;
    for (int32_t r = 0; r < context->size; r++)
        colo_process_send(context, r, &frame, context->error.error_message);
}

void colo_process_notify(struct colo_process_context *context)
{
    if (!context->to_notify)
        return;
    context->to_notify = false;
    notify_all(context);
}

bool colo_process_must_fail(const struct colo_process_group *group)
{
    return (colo_error_state_is_set(&group->error) && group->seq >= group->dead_from) ||
           colo_error_state_is_set(&group->context->error);
}

bool colo_process_take_fault(struct colo_process_group *group, uint64_t seq, colo_status_t status,
                             int32_t culprit, const char *error_message)
{
    if (colo_error_state_is_set(&group->context->error) ||
        (colo_error_state_is_set(&group->error) && seq >= group->dead_from))
        return false;
    group->dead_from = seq;
    colo_error_state_write(&group->error, true, status, culprit,
                           culprit < 0 ? -1 : group->world[culprit], error_message);
    return true;
}

void colo_process_set_error(struct colo_process_group *group, uint64_t seq, colo_status_t status,
                            int32_t culprit, const char *error_message)
{
    if (colo_process_take_fault(group, seq, status, culprit, error_message))
        notify_members(group);
}

void colo_process_begin_no_more(struct colo_process_group *group)
{
    if (group->seq + 1 >= group->dead_from)
        return;
    group->dead_from = group->seq + 1;
    notify_members(group);
}

void colo_process_set_error_all(struct colo_process_context *context, colo_status_t status,
                                int32_t culprit, const char *error_message)
{
    if (colo_error_state_is_set(&context->error))
        return;
    colo_error_state_set(&context->error, status, culprit, culprit, error_message);
    context->to_notify = true;
}

/* ---- groups that all have left ---- */

static bool all_gone(const struct colo_process_group *group)
{
    for (int32_t r = 0; r < group->size; r++)
        if (r != group->rank && !group->peer[r].gone && !group->context->closed[group->world[r]])
            return false;
    return true;
}

void colo_process_group_free(struct colo_process_group *group)
{
    colo_error_state_fini(&group->error);
    free(group->world);
    free(group->peer);
    free(group->eager);
    free(group->peer_round);
    free(group->active);
    free(group);
}

void colo_process_reap(struct colo_process_context *context)
{
    for (struct colo_process_group **link = &context->group, *x; (x = *link);) {
        if (x->left && all_gone(x)) {
            *link = x->next;
            colo_process_group_free(x);
        } else {
            link = &x->next;
        }
    }
}

/* ---- leaving ---- */

/* Tells every rank that hears of the leave why, even if the news of this rank's death is late. */
void colo_process_bye(struct colo_process_group *group)
{
    if (colo_error_state_is_set(&group->context->error))
        notify_all(group->context);
    if (colo_error_state_is_set(&group->error))
        notify_members(group);
    colo_frame_t bye = {.kind = COLO_FRAME_BYE,
                        .seq = group->seq,
                        .desc = colo_op_pack(&group->op),
                        .count = (uint64_t)group->op.count};
    for (int32_t r = 0; r < group->size; r++)
        if (r != group->rank)
            colo_process_frame(group, r, &bye, NULL);
}

bool colo_process_flushed(const struct colo_process_context *context)
{
    for (int32_t r = 0; r < context->size; r++)
        if (r != context->rank && !context->transport->flushed(context->connections, r))
            return false;
    return true;
}
