/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - contexts and groups over a transport: making them and leaving.
 *
 * A group needs no agreement to exist: its key is a hash of its parent's key, the number of the
 * split and its members, which all members know. A group that this rank has left stays until all
 * its members have left, so that frames that are still under way find it.
 *
 * Left to others: what is told of faults (fault.c), what arrives (arrive.c), exchanges (round.c),
 * bytes (the transport), error messages of arguments and the statistics (comm/collectives.c).
 */
#include "comm/process/group.h"

#include "core/env.h"
#include "core/error.h"
#include "core/hash.h"

#include <colobridge/version.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double LINGER_SECONDS = 1.0; /* at most, for the others to leave as well */

/* ---- making groups ---- */

static colo_status_t group_new(colo_comm_t *comm, struct colo_process_context *context,
                               uint64_t key, const int32_t *world, struct colo_process_group **out)
{
    const size_t n = (size_t)comm->size;
    struct colo_process_group *group = calloc(1, sizeof *group);
    COLO_FAIL_IF(!group, COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)comm->size);
    colo_error_state_init(&group->error);
    group->context = context;
    group->comm = comm;
    group->key = key ? key : 1;
    group->rank = comm->rank;
    group->size = comm->size;
    group->label = comm->world_rank;
    group->world = malloc(n * sizeof *group->world);
    group->peer = calloc(n, sizeof *group->peer);
    group->eager = calloc(n, 2 * COLO_FRAME_EAGER);
    group->peer_round = calloc(n, sizeof *group->peer_round);
    group->active = malloc(n * sizeof *group->active);
    if (!group->world || !group->peer || !group->eager || !group->peer_round || !group->active) {
        colo_process_group_free(group);
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
    if (colo_comm_timeout(comm) > context->timeout_ms)
        context->timeout_ms = colo_comm_timeout(comm);
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
    COLO_FAIL_IF(!world, COLO_ERR_NOMEM, "split: %d members", (int)n);
    for (int32_t i = 0; i < n; i++)
        world[i] = above->world[members[i]];
    COLO_TRY(group_new(child, above->context, child_key(above, tag, members, n), world, &x));
    group_live(child, x);
    return COLO_OK;
}

static void context_free(struct colo_process_context *context, bool clean)
{
    colo_process_exit_remove(context);
    context->transport->close(context->connections, clean);
    for (struct colo_process_group *group = context->group, *next; group; group = next) {
        next = group->next;
        colo_process_group_free(group);
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

colo_status_t colo_process_comm(const colo_comm_backend_t *table,
                                const colo_process_transport_t *transport, void *connections,
                                int32_t rank, int32_t size, colo_comm_t **comm)
{
    struct colo_process_context *context = calloc(1, sizeof *context);
    if (!context) {
        transport->close(connections, false);
        return colo_fail(COLO_ERR_NOMEM, "comm of %d ranks: no memory", (int)size);
    }
    *context =
        (struct colo_process_context){.transport = transport,
                                      .connections = connections,
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
                           ? colo_comm_new(&made, table, rank, size, NULL)
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
    const int64_t left_ms = world->timeout_ms - (int64_t)((colo_now() - begin) * 1e3);
    const int32_t n = world->size;
    colo_comm_t *all = NULL; /* a group of their own: the world's operations count from 1 */
    uint64_t mine;
    colo_fields_t fields = {COLO_FIELDS_INIT};
    COLO_AUTOFREE int32_t *members = malloc((size_t)n * sizeof *members);
    COLO_AUTOFREE uint64_t *id = malloc((size_t)n * sizeof *id);
    for (int32_t r = 0; members && r < n; r++)
        members[r] = r;
    colo_status_t st =
        members && id ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "%s: %d ranks", what, (int)n);
    COLO_THEN(st, colo_comm_child(world, members, n, 0, what, &all)); /* splits count from 1 */
    if (st == COLO_OK) {
        all->timeout_ms = left_ms > 1 ? left_ms : 1; /* all of create has one deadline */
        st = colo_env_check(NULL);
        COLO_THEN(st, colo_node_id(world->rank, n, &mine));
        colo_fields_add(&fields, "library version", "%s", colo_version());
        colo_fields_add(&fields, "check (COLO_CHECK)", "%d", (int)world->check);
        st = colo_comm_agree_fields(all, what, &fields, st);
    }
    COLO_THEN(st, colo_comm_gather(all, COLO_OP_ALL_GATHER, COLO_CATEGORY_CHECK, &mine, id, 1));
    COLO_THEN(st, colo_comm_set_nodes(world, id));
    if (st == COLO_OK)
        *comm = world;
    else /* do the ranks know how others fared? */
        ((struct colo_process_group *)world->impl)->context->alone =
            !all || colo_comm_check(all) != COLO_OK;
    colo_comm_destroy(&all);
    if (st < 0)
        colo_comm_destroy(&world);
    return st;
}

/* ---- failing ---- */

void colo_process_fail(colo_comm_t *comm, colo_status_t status, const char *error_message)
{
    struct colo_process_group *group = comm->impl;
    struct colo_process_context *context = group->context;
    COLO_HOLD(&context->lock);
    if (status == COLO_ERR_ABORTED)
        colo_process_set_error_all(context, status, -1, error_message);
    else /* only the thread that uses the group fails so, and a watchdog of GPUs for it */
        colo_process_set_error(group, group->seq + !group->running, status, group->rank,
                               error_message);
    colo_process_notify(context);
}

colo_status_t colo_process_state(const colo_comm_t *comm, char *error_message, size_t cap)
{
    struct colo_process_group *group = comm->impl;
    struct colo_process_context *context = group->context;
    COLO_HOLD(&context->lock);
    colo_process_progress(context);
    colo_status_t st = colo_error_state_notify(&group->error, group->rank, error_message, cap);
    if (st != COLO_OK)
        return st;
    return colo_error_state_notify(&context->error, context->rank, error_message, cap);
}

/* ---- leaving ---- */

/* The last comm of these connections: say so, and give the others a moment to say it, too, so that
 * nothing is under way when they are taken down. If its creation failed, others may wait
 * for a connection and see only that this rank hangs up. The lock is held, because another thread
 * may be in exit(), which waits for it while this one frees it. */
static void context_leave(struct colo_process_context *context)
{
    colo_frame_t close = {.kind = COLO_FRAME_CLOSE, .from = context->rank};
    for (int32_t r = 0; r < context->size; r++)
        colo_process_send(context, r, &close, NULL);
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
        pthread_mutex_unlock(&context->lock);
        context->transport->wait(context->connections, waited < 1e-3 ? 0 : 1e-3);
        pthread_mutex_lock(&context->lock);
    }
    const bool clean = flushed && context->nclosed == context->size;
    pthread_mutex_unlock(&context->lock);
    context_free(context, clean);
}

void colo_process_destroy(colo_comm_t *comm)
{
    struct colo_process_group *group = comm->impl;
    struct colo_process_context *context = group->context;
    comm->impl = NULL;
    pthread_mutex_lock(&context->lock);
    colo_process_notify(context);
    colo_process_bye(group);
    group->left = true;
    free(group->eager); /* from now on it only counts the ranks that left */
    free(group->peer_round);
    group->eager = NULL;
    group->peer_round = NULL;
    colo_process_reap(context);
    if (--context->live == 0)
        context_leave(context);
    else
        pthread_mutex_unlock(&context->lock);
}
