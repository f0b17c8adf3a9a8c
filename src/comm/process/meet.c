/* SPDX-License-Identifier: Apache-2.0 */
/*
 * meet.c - what frames of a peer mean to the round that runs: a header that fits or does not, that
 * the peer is ready, the rest of its message.
 */
#include "comm/process/group.h"

#include "core/error.h"

#include <stdio.h>
#include <string.h>

colo_waiter_t colo_round_waiter(const struct colo_process_group *group, int32_t peer)
{
    return (colo_waiter_t){group->name, group->label, group->rank, group->size,
                           group->op,   group->seq,   peer,        group->peer[peer].last,
                           true};
}

void colo_round_mismatch(struct colo_process_group *group, int32_t peer, const char *found)
{
    char error_message[COLO_BLAME];
    const colo_waiter_t me = colo_round_waiter(group, peer);
    colo_blame_mismatch(error_message, &me, found, group->peer[peer].gone);
    colo_process_set_error(group, group->seq, COLO_ERR_MISMATCH, -1, error_message);
}

/* ---- headers ---- */

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

/* The header of @peer for this very round: does it fit what I do with it? Both sides judge alike.
 */
static bool agrees(struct colo_process_group *group, int32_t peer, const colo_frame_t *header)
{
    const struct colo_process_round *round = &group->peer_round[peer];
    const bool sends = header->flags & COLO_FRAME_SENDS,
               expects = header->flags & COLO_FRAME_EXPECTS;
    const bool in = round->active && round->in.due, out = round->active && round->out.due;
    char what[200], found[240];
    if (header->desc != colo_op_pack(&group->op) || header->count != (uint64_t)group->op.count)
        colo_op_found(found, sizeof found, group->op, colo_op_unpack(header->desc, header->count),
                      header->seq);
    else if (sends && !round->active)
        snprintf(found, sizeof found,
                 "sends it one: rank %d expects no message from it where it sends one",
                 (int)group->rank);
    else if (in && !sends)
        snprintf(found, sizeof found, "sends it no message where one is expected");
    else if (sends && !in)
        snprintf(found, sizeof found, "sends it a message where none is expected");
    else if (out && !expects)
        snprintf(found, sizeof found, "expects no message from it where it sends one");
    else if (!out && (expects || !round->active))
        snprintf(found, sizeof found, "expects a message from it where it sends none");
    else if (sends && shapes_differ(what, sizeof what, &header->sent, &round->in.shape))
        snprintf(found, sizeof found, "sends it %s", what);
    else if (expects && shapes_differ(what, sizeof what, &round->out.shape, &header->expected))
        snprintf(found, sizeof found, "is sent %s", what);
    else
        return true;
    colo_round_mismatch(group, peer, found);
    return false;
}

void colo_round_poll(struct colo_process_group *group, int32_t peer)
{
    struct colo_remote *remote = &group->peer[peer];
    struct colo_process_round *round = &group->peer_round[peer];
    const struct colo_early *early = &remote->early[remote->first];
    char what[96], found[200];
    if (!early->full || (group->running && round->active && round->met))
        return;
    const colo_frame_t *header = &early->header;
    const bool same = header->seq == group->seq && header->round == group->round;
    const bool before =
        header->seq < group->seq || (header->seq == group->seq && header->round < group->round);
    if (same && group->running) {
        if (agrees(group, peer, header)) {
            round->met = true;
            group->nmet++;
        }
    } else if (same || before) {
        snprintf(found, sizeof found, "is in %s only now: rank %d went past it without that rank",
                 colo_op_describe(what, sizeof what, colo_op_unpack(header->desc, header->count),
                                  header->seq),
                 (int)group->rank);
        colo_round_mismatch(group, peer, found);
    } else if (group->running && round->active) {
        colo_round_mismatch(group, peer, NULL);
    }
}

void colo_round_ready(struct colo_process_group *group, const colo_frame_t *frame)
{
    struct colo_process_round *round = &group->peer_round[frame->from];
    if (group->running && round->active && frame->seq == group->seq && frame->round == group->round)
        round->ready = true; /* otherwise the group is dead, and this is what was under way */
}

bool colo_round_data(struct colo_process_group *group, const colo_frame_t *frame,
                     const void *payload)
{
    struct colo_process_round *round = &group->peer_round[frame->from];
    if (!group->running || !group->moving || !round->active || frame->seq != group->seq ||
        frame->round != group->round)
        return colo_error_state_is_set(&group->error) ||
               colo_error_state_is_set(&group->context->error); /* under way */
    const int64_t bytes = (int64_t)frame->bytes;
    if (bytes <= 0 || bytes > round->in.left || bytes % round->in.cursor.elem != 0)
        return false;
    colo_cursor_move(&round->in.cursor, NULL, payload, bytes);
    round->in.left -= bytes;
    return true;
}
