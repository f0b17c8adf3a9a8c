/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watchdog.c - what keeps a caller from waiting for ever: a watchdog thread for each context, and
 * helper threads (core/helper.h).
 *
 * NCCL may wait without limit in three places: making a communicator, its first operations, ending
 * it. All three run in a helper thread that the caller waits for up to the deadline; a helper that
 * is late frees what it works on. (NCCL's non-blocking mode would start a thread for
 * every operation instead.)
 *
 * The watchdog looks every 20 ms whether a comm has failed here, at a peer or in NCCL, or whether
 * an operation on the stream is late, and aborts the comm's connections then, so that streams do
 * not wait for ever. NCCL wants no other thread inside it meanwhile: operations hold the
 * connection's lock.
 *
 * Late: the stream counts in host memory the operations whose turn has come and those that have
 * ended (kernels/progress.cu). The time runs from when the watchdog sees one begin, so work of the
 * caller that is queued in front does not count. A context's operations follow each other on the
 * device (operation.c), so at most one has begun and not ended. Counts are captured with the
 * operation: a replay has its deadline, too.
 */
#include "comm/nccl/comm.h"

#include "capture.h"
#include "core/env.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const double ABORT_SECONDS = 10; /* for NCCL to give up a communicator */
static const double BUSY_SECONDS = 2;   /* for a call of NCCL to return; abort frees a stuck one */
enum { WATCHDOG_MS = 20 };

bool colo_nccl_is_dead(const void *control)
{
    const colo_comm_t *comm = control;
    char error_message[900];
    return comm->backend->state(comm, error_message, sizeof error_message) != COLO_OK;
}

/* ---- tearing down ---- */

struct abort_job {
    struct colo_abandon abandon;
    const colo_nccl_lib_t *lib;
    int32_t device;
    ncclComm_t nccl;
};

static void abort_main(void *memory)
{
    struct abort_job *job = memory;
    (void)colo_capture_relax(); /* somebody may be capturing */
    cudaSetDevice(job->device);
    (void)job->lib->abort(job->nccl);
}

void colo_nccl_abort_connection(struct colo_nccl_context *context,
                                struct colo_connection *connection)
{
    int32_t ok = COLO_CONNECTION_OK;
    if (!connection->nccl || connection->borrowed ||
        !atomic_compare_exchange_strong(&connection->phase, &ok, COLO_CONNECTION_ENDING))
        return;
    const double end = colo_now() + BUSY_SECONDS;
    bool held;
    while (!(held = pthread_mutex_trylock(&connection->busy) == 0) && colo_now() < end)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    struct abort_job *job = malloc(sizeof *job);
    if (job) {
        *job = (struct abort_job){{.end = free}, context->lib, context->device, connection->nccl};
        if (colo_run_for(ABORT_SECONDS, NULL, NULL, abort_main, &job->abandon, job) !=
            COLO_ERR_TIMEOUT)
            free(job);
    }
    atomic_store(&connection->phase, COLO_CONNECTION_GONE);
    if (held)
        pthread_mutex_unlock(&connection->busy);
}

/* ---- the watchdog ---- */

/* Does NCCL itself report an error on this connection? A borrowed one is not asked, because its
 * owner may end it at any time. */
static bool check_connection(struct colo_nccl_context *context, struct colo_nccl_group *group,
                             struct colo_connection *connection)
{
    ncclResult_t error = ncclSuccess;
    if (!connection->nccl || connection->borrowed || pthread_mutex_trylock(&connection->busy) != 0)
        return false;
    if (atomic_load(&connection->phase) == COLO_CONNECTION_OK &&
        context->lib->async_error(connection->nccl, &error) != ncclSuccess)
        error = ncclSuccess;
    pthread_mutex_unlock(&connection->busy);
    if (error == ncclSuccess || error == ncclInProgress)
        return false;
    char error_message[600];
    const char *more = context->lib->last_error(NULL);
    snprintf(error_message, sizeof error_message,
             "NCCL reports on the connection of %d ranks: %s; %.400s", (int)connection->n,
             context->lib->error_string(error), more ? more : "");
    colo_nccl_set_error(group, COLO_ERR_NCCL, error_message);
    return true;
}

static bool is_dead(struct colo_nccl_context *context, struct colo_nccl_group *group)
{
    char error_message[900];
    bool dead = colo_error_state_is_set(&group->error) ||
                colo_nccl_check_peer(group, error_message, sizeof error_message) != COLO_OK ||
                colo_nccl_control_state(group, error_message, sizeof error_message) != COLO_OK ||
                (group->connection && check_connection(context, group, group->connection));
    for (struct colo_subconnection *subconnection = group->subconnection; subconnection && !dead;
         subconnection = subconnection->next)
        dead = check_connection(context, group, subconnection->connection);
    if (dead)
        colo_direct_stop(atomic_load(&group->base.direct));
    if (dead && group->connecting && !colo_nccl_is_dead(group->connecting)) {
        (void)colo_nccl_state(group->comm, error_message, sizeof error_message);
        group->connecting->backend->fail(group->connecting, COLO_ERR_PEER, error_message);
    }
    return dead;
}

static bool is_usable(const struct colo_connection *connection)
{
    return connection && connection->nccl && !connection->borrowed &&
           atomic_load(&connection->phase) == COLO_CONNECTION_OK;
}

static struct colo_connection *find_usable(const struct colo_nccl_context *context,
                                           const struct colo_nccl_group *group)
{
    if (is_usable(group->connection))
        return group->connection;
    for (struct colo_subconnection *subconnection = group->subconnection; subconnection;
         subconnection = subconnection->next)
        if (is_usable(subconnection->connection))
            return subconnection->connection;
    for (struct colo_connection *connection = context->connection; connection;
         connection = connection->next)
        if (connection->left_by == group->id && is_usable(connection))
            return connection;
    return NULL;
}

static bool uses(const struct colo_nccl_group *group, const struct colo_connection *connection)
{
    const struct colo_subconnection *subconnection = group->subconnection;
    while (subconnection && subconnection->connection != connection)
        subconnection = subconnection->next;
    return subconnection || group->connection == connection;
}

/* Aborts @connection because of @why; under the context's lock, which it opens meanwhile. What
 * comms other than @group have enqueued on it ends with it, and must not look complete. */
static void abort_used(struct colo_nccl_context *context, const struct colo_nccl_group *group,
                       struct colo_connection *connection, const char *why_ended)
{
    char why[900], error_message[900];
    snprintf(error_message, sizeof error_message,
             "the connection was torn down when another comm of the same ranks failed: %.800s",
             why_ended);
    for (struct colo_nccl_group *other = context->group; other; other = other->next)
        if (other != group && uses(other, connection) && !colo_error_state_is_set(&other->error) &&
            colo_nccl_control_state(other, why, sizeof why) == COLO_OK)
            colo_nccl_set_error(other, COLO_ERR_PEER, error_message);
    connection->users++; /* its last user may leave meanwhile */
    pthread_mutex_unlock(&context->lock);
    colo_nccl_abort_connection(context, connection);
    colo_nccl_connection_put(context, connection);
    pthread_mutex_lock(&context->lock);
}

bool colo_nccl_abort_next(struct colo_nccl_context *context, const struct colo_nccl_group *group)
{
    char why[900];
    struct colo_connection *connection = find_usable(context, group);
    if (!connection)
        return false;
    (void)colo_nccl_state(group->comm, why, sizeof why);
    abort_used(context, group, connection, why);
    return true;
}

static int64_t word(const struct colo_nccl_context *context, int i)
{
    return __atomic_load_n(&context->progress[i], __ATOMIC_ACQUIRE);
}

/* How far the stream has counted, from @first on. */
static int64_t count_of(const struct colo_nccl_context *context, int first)
{
    int64_t most = 0;
    for (int i = 0; i < COLO_PROGRESS_WORDS; i++)
        most = word(context, first + i) > most ? word(context, first + i) : most;
    return most;
}

bool colo_nccl_is_busy(const struct colo_nccl_context *context)
{
    return count_of(context, COLO_PROGRESS_BEGUN) > count_of(context, COLO_PROGRESS_ENDED) ||
           (context->order->used && cudaEventQuery(context->order->done) == cudaErrorNotReady);
}

/* The operation that has begun is of a comm that was destroyed: no caller is told, and the stream
 * must not wait for ever. */
static void end_left(struct colo_nccl_context *context, int64_t id, double ms, const char *what)
{
    char why[300];
    struct colo_connection *connection = context->connection;
    while (connection && !(connection->left_by == id && is_usable(connection)))
        connection = connection->next;
    if (!connection || ms < (double)connection->left_ms)
        return;
    snprintf(why, sizeof why,
             "%s of a communicator of %d ranks that was destroyed: has not ended %" PRId64
             " ms after its turn came on the stream of device %d",
             what, (int)connection->n, connection->left_ms, (int)context->device);
    colo_log(COLO_LOG_WARN, "%s; its connection is aborted", why);
    abort_used(context, NULL, connection, why);
}

/* Fails the comm whose operation has been on the stream for longer than its deadline. */
static void read_clock(struct colo_nccl_context *context)
{
    const int64_t ended = count_of(context, COLO_PROGRESS_ENDED);
    const int64_t begun = count_of(context, COLO_PROGRESS_BEGUN);
    const double now = colo_now();
    if (begun <= ended || begun != context->seen_begun) {
        context->seen_begun = begun;
        context->since = now;
        return;
    }
    struct colo_nccl_group *group = context->group;
    while (group && group->id != word(context, COLO_PROGRESS_COMM))
        group = group->next;
    if (group && colo_error_state_is_set(&group->error))
        return;
    const int64_t ms = group ? colo_comm_timeout(group->comm) : 0;
    if ((now - context->since) * 1e3 < (double)ms)
        return;
    char what[96], error_message[400];
    colo_op_desc_t op = colo_op_unpack((uint64_t)word(context, COLO_PROGRESS_OP),
                                       (uint64_t)word(context, COLO_PROGRESS_COUNT));
    colo_op_describe(what, sizeof what, op, (uint64_t)word(context, COLO_PROGRESS_SEQ));
    if (!group) {
        end_left(context, word(context, COLO_PROGRESS_COMM), (now - context->since) * 1e3, what);
        return;
    }
    pthread_mutex_lock(group->comm->lock); /* the owner may be naming it */
    snprintf(error_message, sizeof error_message,
             "%s on '%s' of %d ranks, rank %d (world rank %" PRId64 ", device %d): has not ended "
             "%" PRId64 " ms after its turn came on the stream; a rank did not come, or its stream "
             "did not",
             what, group->comm->name, (int)group->comm->size, (int)group->rank,
             group->comm->world_rank[group->comm->rank], (int)context->device, ms);
    pthread_mutex_unlock(group->comm->lock);
    colo_nccl_set_error(group, COLO_ERR_TIMEOUT, error_message);
}

void *colo_nccl_watchdog(void *memory)
{
    struct colo_nccl_context *context = memory;
    (void)colo_capture_relax();
    COLO_HOLD(&context->lock);
    while (!context->stop) {
        struct colo_nccl_group *group = context->group;
        while (group && !(is_dead(context, group) && colo_nccl_abort_next(context, group)))
            group = group->next;
        if (group)
            continue;
        read_clock(context);
        struct timespec until = colo_in(WATCHDOG_MS * 1e-3);
        pthread_cond_timedwait(&context->wake, &context->lock, &until);
    }
    return NULL;
}
