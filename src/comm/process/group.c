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

static void send_frame(struct colo_process_context *f, int32_t peer, colo_frame_t *frame,
                       const void *payload)
{
    /* a peer that closed waits for one thing more: that this rank closes, too */
    if (peer == f->rank || (f->closed[peer] && frame->kind != COLO_FRAME_CLOSE))
        return;
    unsigned char *p = f->ops->reserve(f->transport, peer, sizeof *frame + frame->bytes);
    if (!p) {
        char error_message[200];
        snprintf(error_message, sizeof error_message,
                 "no memory for a frame of %zu bytes to world rank %d",
                 sizeof *frame + (size_t)frame->bytes, (int)peer);
        colo_process_set_error_all(f, COLO_ERR_NOMEM, f->rank, error_message);
        return;
    }
    frame->magic = COLO_FRAME_MAGIC;
    memcpy(p, frame, sizeof *frame);
    if (frame->bytes)
        memcpy(p + sizeof *frame, payload, frame->bytes);
    f->ops->commit(f->transport);
}

void colo_process_frame(struct colo_process_group *x, int32_t to, colo_frame_t *frame,
                        const void *payload)
{
    frame->group = x->key;
    frame->from = x->rank;
    send_frame(x->context, x->world[to], frame, payload);
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

static void notify_members(struct colo_process_group *x)
{
    colo_frame_t frame;
    fill_fail(&frame, &x->error, x->dead_from);
    for (int32_t r = 0; r < x->size; r++)
        if (r != x->rank && !x->peer[r].gone)
            colo_process_frame(x, r, &frame, x->error.error_message);
}

static void notify_all(struct colo_process_context *f)
{
    colo_frame_t frame;
    fill_fail(&frame, &f->error, 0);
    frame.from = f->rank;
    for (int32_t r = 0; r < f->size; r++)
        send_frame(f, r, &frame, f->error.error_message);
}

void colo_process_notify(struct colo_process_context *f)
{
    if (atomic_load_explicit(&f->to_notify, memory_order_relaxed) &&
        atomic_exchange(&f->to_notify, false))
        notify_all(f);
    for (struct colo_process_group *x = f->group; x; x = x->next)
        if (atomic_load_explicit(&x->to_notify, memory_order_relaxed) &&
            atomic_exchange(&x->to_notify, false))
            notify_members(x);
}

bool colo_process_must_fail(const struct colo_process_group *x)
{
    return (colo_error_state_is_set(&x->error) && x->seq >= x->dead_from) ||
           colo_error_state_is_set(&x->context->error);
}

bool colo_process_take_fault(struct colo_process_group *x, uint64_t seq, colo_status_t status,
                             int32_t culprit, const char *error_message)
{
    if (colo_error_state_is_set(&x->context->error) ||
        (colo_error_state_is_set(&x->error) && seq >= x->dead_from))
        return false;
    x->dead_from = seq;
    colo_error_state_replace(&x->error, status, culprit, culprit < 0 ? -1 : x->world[culprit],
                             error_message);
    return true;
}

void colo_process_set_error(struct colo_process_group *x, colo_status_t status, int32_t culprit,
                            const char *error_message)
{
    if (colo_process_take_fault(x, x->seq, status, culprit, error_message))
        notify_members(x);
}

void colo_process_begin_no_more(struct colo_process_group *x)
{
    if (x->seq + 1 >= x->dead_from)
        return;
    x->dead_from = x->seq + 1;
    notify_members(x);
}

void colo_process_set_error_all(struct colo_process_context *f, colo_status_t status,
                                int32_t culprit, const char *error_message)
{
    if (colo_error_state_is_set(&f->error))
        return;
    colo_error_state_set(&f->error, status, culprit, culprit, error_message);
    atomic_store(&f->to_notify, true);
}

/* ---- groups that all have left ---- */

static bool all_gone(const struct colo_process_group *x)
{
    for (int32_t r = 0; r < x->size; r++)
        if (r != x->rank && !x->peer[r].gone && !x->context->closed[x->world[r]])
            return false;
    return true;
}

static void group_free(struct colo_process_group *x)
{
    colo_error_state_fini(&x->error);
    free(x->world);
    free(x->peer);
    free(x->eager);
    free(x->peer_step);
    free(x->active);
    free(x->workspace);
    free(x->src);
    free(x);
}

void colo_process_reap(struct colo_process_context *f)
{
    for (struct colo_process_group **link = &f->draining, *x; (x = *link);) {
        if (all_gone(x)) {
            *link = x->next;
            group_free(x);
        } else {
            link = &x->next;
        }
    }
}

/* ---- making groups ---- */

static colo_status_t group_new(colo_comm_t *c, struct colo_process_context *f, uint64_t key,
                               const int32_t *world, struct colo_process_group **out)
{
    const size_t n = (size_t)c->size;
    struct colo_process_group *x = calloc(1, sizeof *x);
    if (!x)
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)c->size);
    colo_error_state_init(&x->error);
    x->context = f;
    x->key = key ? key : 1;
    x->rank = c->rank;
    x->size = c->size;
    x->label = c->world_rank;
    x->world = malloc(n * sizeof *x->world);
    x->peer = calloc(n, sizeof *x->peer);
    x->eager = calloc(n, 2 * COLO_FRAME_EAGER);
    x->peer_step = calloc(n, sizeof *x->peer_step);
    x->active = malloc(n * sizeof *x->active);
    x->src = calloc(n, sizeof *x->src);
    if (!x->world || !x->peer || !x->eager || !x->peer_step || !x->active || !x->src) {
        group_free(x);
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)c->size);
    }
    for (size_t r = 0; r < n; r++) {
        x->world[r] = world ? world[r] : (int32_t)r;
        x->peer[r].gone = f->closed[x->world[r]];
        for (size_t k = 0; k < 2; k++)
            x->peer[r].early[k].eager = x->eager + (2 * r + k) * COLO_FRAME_EAGER;
    }
    snprintf(x->name, sizeof x->name, "%s", c->name);
    *out = x;
    return COLO_OK;
}

static void group_live(struct colo_comm *c, struct colo_process_group *x)
{
    struct colo_process_context *f = x->context;
    pthread_mutex_lock(&f->lock);
    x->next = f->group;
    f->group = x;
    f->live++;
    if (colo_comm_i_timeout(c) > f->timeout_ms)
        f->timeout_ms = colo_comm_i_timeout(c);
    colo_process_take_unexpected(x);
    pthread_mutex_unlock(&f->lock);
    c->impl = x;
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

static void context_free(struct colo_process_context *f, bool clean)
{
    colo_process_exit_remove(f);
    f->ops->close(f->transport, clean);
    for (struct colo_process_group *x = f->draining, *next; x; x = next) {
        next = x->next;
        group_free(x);
    }
    for (struct colo_unexpected *s = f->unexpected, *next; s; s = next) {
        next = s->next;
        free(s);
    }
    pthread_mutex_destroy(&f->lock);
    colo_error_state_fini(&f->error);
    free(f->closed);
    free(f->unexpected_bytes);
    free(f);
}

colo_status_t colo_process_comm(const colo_comm_ops_t *table, const colo_transport_ops_t *ops,
                                void *transport, int32_t rank, int32_t size, colo_comm_t **comm)
{
    struct colo_process_context *f = calloc(1, sizeof *f);
    bool *closed = calloc((size_t)size, sizeof *closed);
    size_t *unexpected_bytes = calloc((size_t)size, sizeof *unexpected_bytes);
    if (!f || !closed || !unexpected_bytes) {
        free(f);
        free(closed);
        free(unexpected_bytes);
        ops->close(transport, false);
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)size);
    }
    f->ops = ops;
    f->transport = transport;
    f->rank = rank;
    f->size = size;
    f->closed = closed;
    f->unexpected_bytes = unexpected_bytes;
    f->closed[rank] = true;
    f->nclosed = 1;
    pthread_mutex_init(&f->lock, NULL);
    colo_error_state_init(&f->error);

    colo_comm_t *c = NULL;
    struct colo_process_group *x = NULL;
    colo_status_t st = colo_comm_i_new(&c, table, rank, size, NULL);
    if (st == COLO_OK) {
        colo_comm_set_name(c, "world");
        st = group_new(c, f, 1, NULL, &x);
    }
    if (st < 0) {
        colo_comm_destroy(&c);
        context_free(f, false);
        return st;
    }
    group_live(c, x);
    colo_process_exit_add(f);
    *comm = c;
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

void colo_process_fail(colo_comm_t *c, colo_status_t status, const char *error_message)
{
    struct colo_process_group *x = c->impl;
    struct colo_process_context *f = x->context;
    bool is_new;
    if (status == COLO_ERR_ABORTED) {
        is_new = !colo_error_state_is_set(&f->error);
        colo_error_state_set(&f->error, status, -1, -1, error_message);
        if (is_new)
            atomic_store(&f->to_notify, true);
    } else { /* only the thread that uses the group fails so, and a watchdog of GPUs for it */
        pthread_mutex_lock(&f->lock);
        is_new = colo_process_take_fault(x, x->begun || x->running ? x->seq : x->seq + 1, status,
                                         x->rank, error_message);
        if (is_new)
            atomic_store(&x->to_notify, true);
        pthread_mutex_unlock(&f->lock);
    }
    if (is_new) {
        pthread_mutex_lock(&f->lock);
        colo_process_notify(f);
        pthread_mutex_unlock(&f->lock);
    }
}

colo_status_t colo_process_state(const colo_comm_t *c, char *error_message, size_t cap)
{
    struct colo_process_group *x = c->impl;
    struct colo_process_context *f = x->context;
    pthread_mutex_lock(&f->lock);
    colo_process_progress(f);
    pthread_mutex_unlock(&f->lock);
    colo_status_t st = colo_error_state_notify(&x->error, x->rank, error_message, cap);
    if (st != COLO_OK)
        return st;
    return colo_error_state_notify(&f->error, f->rank, error_message, cap);
}

/* ---- leaving ---- */

/* Tells every rank that hears of the leave why, even if the news of this rank's death is late. */
static void send_bye(struct colo_process_group *x)
{
    if (colo_error_state_is_set(&x->context->error))
        notify_all(x->context);
    if (colo_error_state_is_set(&x->error))
        notify_members(x);
    colo_frame_t bye = {.kind = COLO_FRAME_BYE,
                        .seq = x->seq,
                        .desc = colo_op_pack(&x->op),
                        .count = (uint64_t)x->op.count};
    for (int32_t r = 0; r < x->size; r++)
        if (r != x->rank)
            colo_process_frame(x, r, &bye, NULL);
}

bool colo_process_flushed(const struct colo_process_context *f)
{
    for (int32_t r = 0; r < f->size; r++)
        if (r != f->rank && !f->ops->flushed(f->transport, r))
            return false;
    return true;
}

/* The last comm of this transport: say so, and give the others a moment to say it, too, so that
 * nothing is under way when the transport is taken down. If its creation failed, others may wait
 * for a connection and see only that this rank hangs up. */
static void context_leave(struct colo_process_context *f)
{
    colo_frame_t close = {.kind = COLO_FRAME_CLOSE, .from = f->rank};
    for (int32_t r = 0; r < f->size; r++)
        send_frame(f, r, &close, NULL);
    double begin = colo_now(), linger = LINGER_SECONDS;
    if ((double)f->timeout_ms < linger * 1e3)
        linger = (double)f->timeout_ms / 1e3;
    bool flushed = colo_process_flushed(f);
    while (!flushed || (f->nclosed < f->size && !f->alone)) {
        colo_process_progress(f);
        flushed = colo_process_flushed(f);
        double waited = colo_now() - begin;
        if (waited > linger)
            break;
        f->ops->wait(f->transport, waited < 1e-3 ? 0 : 1e-3);
    }
    context_free(f, flushed && f->nclosed == f->size);
}

void colo_process_destroy(colo_comm_t *c)
{
    struct colo_process_group *x = c->impl, **link;
    struct colo_process_context *f = x->context;
    c->impl = NULL;
    pthread_mutex_lock(&f->lock);
    colo_process_notify(f);
    send_bye(x);
    for (link = &f->group; *link != x; link = &(*link)->next)
        ;
    *link = x->next;
    free(x->eager); /* a draining group only counts the ranks that left */
    free(x->peer_step);
    free(x->workspace);
    x->eager = NULL;
    x->peer_step = NULL;
    x->workspace = NULL;
    x->next = f->draining;
    f->draining = x;
    colo_process_reap(f);
    bool last = --f->live == 0;
    pthread_mutex_unlock(&f->lock);
    if (last)
        context_leave(f);
}
