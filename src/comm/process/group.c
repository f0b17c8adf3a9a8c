/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - contexts and groups over a transport: making them, failing, leaving.
 *
 * A group needs no agreement to exist: its key is a hash of its parent's key, the number of the
 * split and its members, which all members know. A left group stays as a draining group until all
 * its members have left, so that frames that are still under way find it.
 *
 * Each rank keeps its own copy of a group's error state, and from which operation on it holds:
 * ranks that are in an older one may still end it well. A rank that sets it by itself tells all
 * members at once. A rank that hears of it sets its own; if it has not begun an operation before
 * that one, it never will, and tells all members from which on it is missing. A fault in an older
 * operation replaces one in a newer: no rank waits for a rank that failed before. Two ranks may
 * find two faults at the same time and then keep different error messages, never one dead and one
 * alive.
 *
 * Left to others: what arrives (arrive.c), operations (step.c, process/collectives.c), bytes (the
 * transport), error messages of arguments and the statistics (comm/collectives.c).
 */
#include "comm/process/group.h"

#include "core/hash.h"
#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double LINGER_SECONDS = 1.0; /* at most, for the others to leave as well */

/* ---- telling ---- */

static void send_frame(struct colo_process_context *context, int32_t peer, colo_frame_t *frame,
                       const void *payload)
{
    /* a peer that closed waits for one thing more: that this rank closes, too */
    if (peer == context->rank || (context->closed[peer] && frame->kind != COLO_FRAME_CLOSE))
        return;
    unsigned char *place =
        context->ops->reserve(context->transport, peer, sizeof *frame + frame->bytes);
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
    context->ops->commit(context->transport);
}

void colo_process_frame(struct colo_process_group *group, int32_t to, colo_frame_t *frame,
                        const void *payload)
{
    frame->group = group->key;
    frame->from = group->rank;
    send_frame(group->context, group->world[to], frame, payload);
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
        send_frame(context, r, &frame, context->error.error_message);
}

void colo_process_notify(struct colo_process_context *context)
{
    if (atomic_load_explicit(&context->to_notify, memory_order_relaxed) &&
        atomic_exchange(&context->to_notify, false))
        notify_all(context);
    for (struct colo_process_group *group = context->group; group; group = group->next)
        if (atomic_load_explicit(&group->to_notify, memory_order_relaxed) &&
            atomic_exchange(&group->to_notify, false))
            notify_members(group);
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

void colo_process_set_error(struct colo_process_group *group, colo_status_t status, int32_t culprit,
                            const char *error_message)
{
    if (colo_process_take_fault(group, group->seq, status, culprit, error_message))
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
    atomic_store(&context->to_notify, true);
}

/* ---- groups that all have left ---- */

static bool all_gone(const struct colo_process_group *group)
{
    for (int32_t r = 0; r < group->size; r++)
        if (r != group->rank && !group->peer[r].gone && !group->context->closed[group->world[r]])
            return false;
    return true;
}

static void group_free(struct colo_process_group *group)
{
    colo_error_state_fini(&group->error);
    free(group->world);
    free(group->peer);
    free(group->eager);
    free(group->peer_step);
    free(group->active);
    free(group->workspace);
    free(group->src);
    free(group);
}

void colo_process_reap(struct colo_process_context *context)
{
    for (struct colo_process_group **link = &context->draining, *x; (x = *link);) {
        if (all_gone(x)) {
            *link = x->next;
            group_free(x);
        } else {
            link = &x->next;
        }
    }
}

/* ---- making groups ---- */

static colo_status_t group_new(colo_comm_t *comm, struct colo_process_context *context,
                               uint64_t key, const int32_t *world, struct colo_process_group **out)
{
    const size_t n = (size_t)comm->size;
    struct colo_process_group *group = calloc(1, sizeof *group);
    if (!group)
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)comm->size);
    colo_error_state_init(&group->error);
    group->context = context;
    group->key = key ? key : 1;
    group->rank = comm->rank;
    group->size = comm->size;
    group->label = comm->world_rank;
    group->world = malloc(n * sizeof *group->world);
    group->peer = calloc(n, sizeof *group->peer);
    group->eager = calloc(n, 2 * COLO_FRAME_EAGER);
    group->peer_step = calloc(n, sizeof *group->peer_step);
    group->active = malloc(n * sizeof *group->active);
    group->src = calloc(n, sizeof *group->src);
    if (!group->world || !group->peer || !group->eager || !group->peer_step || !group->active ||
        !group->src) {
        group_free(group);
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)comm->size);
    }
    for (size_t r = 0; r < n; r++) {
        group->world[r] = world ? world[r] : (int32_t)r;
        group->peer[r].gone = context->closed[group->world[r]];
        for (size_t k = 0; k < 2; k++)
            group->peer[r].early[k].eager = group->eager + (2 * r + k) * COLO_FRAME_EAGER;
    }
    snprintf(group->name, sizeof group->name, "%s", comm->name);
    *out = group;
    return COLO_OK;
}

static void group_live(struct colo_comm *comm, struct colo_process_group *group)
{
    struct colo_process_context *context = group->context;
    pthread_mutex_lock(&context->lock);
    group->next = context->group;
    context->group = group;
    context->live++;
    if (colo_comm_i_timeout(comm) > context->timeout_ms)
        context->timeout_ms = colo_comm_i_timeout(comm);
    colo_process_take_unexpected(group);
    pthread_mutex_unlock(&context->lock);
    comm->impl = group;
}

static uint64_t child_key(const struct colo_process_group *parent, uint64_t tag,
                          const int32_t *members, int32_t n)
{
    uint64_t h = colo_hash_i64(COLO_HASH_INIT, (int64_t)parent->key);
    h = colo_hash_i64(h, (int64_t)tag);
    for (int32_t i = 0; i < n; i++)
        h = colo_hash_i64(h, parent->world[members[i]]);
    return h;
}

colo_status_t colo_process_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                  uint64_t tag, colo_comm_t *child)
{
    struct colo_process_group *above = parent->impl, *x = NULL;
    COLO_AUTOFREE int32_t *world = malloc((size_t)n * sizeof *world);
    if (!world)
        return colo_fail(COLO_ERR_NOMEM, "split: %d members", (int)n);
    for (int32_t i = 0; i < n; i++)
        world[i] = above->world[members[i]];
    COLO_TRY(group_new(child, above->context, child_key(above, tag, members, n), world, &x));
    group_live(child, x);
    return COLO_OK;
}

static void context_free(struct colo_process_context *context, bool clean)
{
    colo_process_exit_remove(context);
    context->ops->close(context->transport, clean);
    for (struct colo_process_group *group = context->draining, *next; group; group = next) {
        next = group->next;
        group_free(group);
    }
    for (struct colo_unexpected *saved = context->unexpected, *next; saved; saved = next) {
        next = saved->next;
        free(saved);
    }
    pthread_mutex_destroy(&context->lock);
    colo_error_state_fini(&context->error);
    free(context->closed);
    free(context->unexpected_bytes);
    free(context);
}

colo_status_t colo_process_comm(const colo_comm_ops_t *table, const colo_transport_ops_t *ops,
                                void *transport, int32_t rank, int32_t size, colo_comm_t **comm)
{
    struct colo_process_context *context = calloc(1, sizeof *context);
    if (!context) {
        ops->close(transport, false);
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)size);
    }
    *context =
        (struct colo_process_context){.ops = ops,
                                      .transport = transport,
                                      .rank = rank,
                                      .size = size,
                                      .closed = calloc((size_t)size, sizeof(bool)),
                                      .unexpected_bytes = calloc((size_t)size, sizeof(size_t)),
                                      .nclosed = 1};
    pthread_mutex_init(&context->lock, NULL);
    colo_error_state_init(&context->error);
    colo_comm_t *made = NULL;
    struct colo_process_group *group = NULL;
    colo_status_t st = context->closed && context->unexpected_bytes
                           ? colo_comm_i_new(&made, table, rank, size, NULL)
                           : colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)size);
    if (st == COLO_OK) {
        context->closed[rank] = true;
        colo_comm_set_name(made, "world");
        st = group_new(made, context, 1, NULL, &group);
    }
    if (st < 0) {
        colo_comm_destroy(&made);
        context_free(context, false);
        return st;
    }
    group_live(made, group);
    colo_process_exit_add(context);
    *comm = made;
    return COLO_OK;
}

colo_status_t colo_process_agree(colo_comm_t *world, const char *what, double begin,
                                 colo_comm_t **comm)
{
    bool agreed;
    const colo_status_t st = colo_comm_i_agree_environment(world, what, begin, &agreed);
    if (st == COLO_OK) {
        *comm = world;
        return st;
    }
    ((struct colo_process_group *)world->impl)->context->alone = !agreed;
    colo_comm_destroy(&world);
    return st;
}

/* ---- failing ---- */

void colo_process_fail(colo_comm_t *comm, colo_status_t status, const char *error_message)
{
    struct colo_process_group *group = comm->impl;
    struct colo_process_context *context = group->context;
    bool is_new;
    if (status == COLO_ERR_ABORTED) {
        is_new = !colo_error_state_is_set(&context->error);
        colo_error_state_set(&context->error, status, -1, -1, error_message);
        if (is_new)
            atomic_store(&context->to_notify, true);
    } else { /* only the thread that uses the group fails so, and a watchdog of GPUs for it */
        pthread_mutex_lock(&context->lock);
        is_new = colo_process_take_fault(
            group, group->begun || group->running ? group->seq : group->seq + 1, status,
            group->rank, error_message);
        if (is_new)
            atomic_store(&group->to_notify, true);
        pthread_mutex_unlock(&context->lock);
    }
    if (is_new) {
        pthread_mutex_lock(&context->lock);
        colo_process_notify(context);
        pthread_mutex_unlock(&context->lock);
    }
}

colo_status_t colo_process_state(const colo_comm_t *comm, char *error_message, size_t cap)
{
    struct colo_process_group *group = comm->impl;
    struct colo_process_context *context = group->context;
    pthread_mutex_lock(&context->lock);
    colo_process_progress(context);
    pthread_mutex_unlock(&context->lock);
    colo_status_t st = colo_error_state_notify(&group->error, group->rank, error_message, cap);
    if (st != COLO_OK)
        return st;
    return colo_error_state_notify(&context->error, context->rank, error_message, cap);
}

/* ---- leaving ---- */

/* Tells every rank that hears of the leave why, even if the news of this rank's death is late. */
static void send_bye(struct colo_process_group *group)
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
        if (r != context->rank && !context->ops->flushed(context->transport, r))
            return false;
    return true;
}

/* The last comm of this transport: say so, and give the others a moment to say it, too, so that
 * nothing is under way when the transport is taken down. If its creation failed, others may wait
 * for a connection and see only that this rank hangs up. */
static void context_leave(struct colo_process_context *context)
{
    colo_frame_t close = {.kind = COLO_FRAME_CLOSE, .from = context->rank};
    for (int32_t r = 0; r < context->size; r++)
        send_frame(context, r, &close, NULL);
    double begin = colo_now(), linger = LINGER_SECONDS;
    if ((double)context->timeout_ms < linger * 1e3)
        linger = (double)context->timeout_ms / 1e3;
    bool flushed = colo_process_flushed(context);
    while (!flushed || (context->nclosed < context->size && !context->alone)) {
        colo_process_progress(context);
        flushed = colo_process_flushed(context);
        double waited = colo_now() - begin;
        if (waited > linger)
            break;
        context->ops->wait(context->transport, waited < 1e-3 ? 0 : 1e-3);
    }
    context_free(context, flushed && context->nclosed == context->size);
}

void colo_process_destroy(colo_comm_t *comm)
{
    struct colo_process_group *group = comm->impl, **link;
    struct colo_process_context *context = group->context;
    comm->impl = NULL;
    pthread_mutex_lock(&context->lock);
    colo_process_notify(context);
    send_bye(group);
    for (link = &context->group; *link != group; link = &(*link)->next)
        ;
    *link = group->next;
    free(group->eager); /* a draining group only counts the ranks that left */
    free(group->peer_step);
    free(group->workspace);
    group->eager = NULL;
    group->peer_step = NULL;
    group->workspace = NULL;
    group->next = context->draining;
    context->draining = group;
    colo_process_reap(context);
    bool last = --context->live == 0;
    pthread_mutex_unlock(&context->lock);
    if (last)
        context_leave(context);
}
