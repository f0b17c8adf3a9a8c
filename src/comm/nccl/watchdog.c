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
    const colo_comm_t *c = control;
    char error_message[900];
    return c->ops->state(c, error_message, sizeof error_message) != COLO_OK;
}

/* ---- tearing down ---- */

struct abort_job {
    struct colo_abandon abandon;
    const colo_nccl_lib_t *lib;
    int32_t device;
    ncclComm_t nccl;
};

static void abort_main(void *p)
{
    struct abort_job *t = p;
    (void)colo_capture_relax(); /* somebody may be capturing */
    cudaSetDevice(t->device);
    (void)t->lib->abort(t->nccl);
}

void colo_nccl_abort_connection(struct colo_nccl_context *f, struct colo_connection *l)
{
    int32_t ok = COLO_CONNECTION_OK;
    if (!l->nccl || l->borrowed ||
        !atomic_compare_exchange_strong(&l->phase, &ok, COLO_CONNECTION_ENDING))
        return;
    const double end = colo_now() + BUSY_SECONDS;
    bool held;
    while (!(held = pthread_mutex_trylock(&l->busy) == 0) && colo_now() < end)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    struct abort_job *t = malloc(sizeof *t);
    if (t) {
        *t = (struct abort_job){{.end = free}, f->lib, f->device, l->nccl};
        if (colo_run_for(ABORT_SECONDS, NULL, NULL, abort_main, &t->abandon, t) != COLO_ERR_TIMEOUT)
            free(t);
    }
    atomic_store(&l->phase, COLO_CONNECTION_GONE);
    if (held)
        pthread_mutex_unlock(&l->busy);
}

/* ---- the watchdog ---- */

/* Does NCCL itself report an error on this connection? A borrowed one is not asked, because its
 * owner may end it at any time. */
static bool check_connection(struct colo_nccl_context *f, struct colo_nccl_group *x,
                             struct colo_connection *l)
{
    ncclResult_t r = ncclSuccess;
    if (!l->nccl || l->borrowed || pthread_mutex_trylock(&l->busy) != 0)
        return false;
    if (atomic_load(&l->phase) == COLO_CONNECTION_OK &&
        f->lib->async_error(l->nccl, &r) != ncclSuccess)
        r = ncclSuccess;
    pthread_mutex_unlock(&l->busy);
    if (r == ncclSuccess || r == ncclInProgress)
        return false;
    char error_message[600];
    const char *more = f->lib->last_error(NULL);
    snprintf(error_message, sizeof error_message,
             "NCCL reports on the connection of %d ranks: %s; %.400s", (int)l->n,
             f->lib->error_string(r), more ? more : "");
    colo_nccl_set_error(x, COLO_ERR_NCCL, error_message);
    return true;
}

static bool is_dead(struct colo_nccl_context *f, struct colo_nccl_group *x)
{
    char error_message[900];
    bool dead = colo_error_state_is_set(&x->error) ||
                colo_nccl_check_peer(x, error_message, sizeof error_message) != COLO_OK ||
                colo_nccl_control_state(x, error_message, sizeof error_message) != COLO_OK ||
                (x->connection && check_connection(f, x, x->connection));
    for (struct colo_subconnection *r = x->subconnection; r && !dead; r = r->next)
        dead = check_connection(f, x, r->connection);
    if (dead)
        colo_peer_stop(atomic_load(&x->base.peer));
    if (dead && x->connecting && !colo_nccl_is_dead(x->connecting)) {
        (void)colo_nccl_state(x->comm, error_message, sizeof error_message);
        x->connecting->ops->fail(x->connecting, COLO_ERR_PEER, error_message);
    }
    return dead;
}

static bool is_whole(const struct colo_connection *l)
{
    return l && l->nccl && !l->borrowed && atomic_load(&l->phase) == COLO_CONNECTION_OK;
}

static struct colo_connection *find_whole(const struct colo_nccl_context *f,
                                          const struct colo_nccl_group *x)
{
    if (is_whole(x->connection))
        return x->connection;
    for (struct colo_subconnection *r = x->subconnection; r; r = r->next)
        if (is_whole(r->connection))
            return r->connection;
    for (struct colo_connection *l = f->connection; l; l = l->next)
        if (l->left_by == x->id && is_whole(l))
            return l;
    return NULL;
}

static bool uses(const struct colo_nccl_group *x, const struct colo_connection *l)
{
    const struct colo_subconnection *r = x->subconnection;
    while (r && r->connection != l)
        r = r->next;
    return r || x->connection == l;
}

/* Aborts @l because of @why; under the context's lock, which it opens meanwhile. What comms other
 * than @x have enqueued on it ends with it, and must not look complete. */
static void abort_used(struct colo_nccl_context *f, const struct colo_nccl_group *x,
                       struct colo_connection *l, const char *why_ended)
{
    char why[900], error_message[900];
    snprintf(error_message, sizeof error_message,
             "the connection was torn down when another comm of the same ranks failed: %.800s",
             why_ended);
    for (struct colo_nccl_group *y = f->group; y; y = y->next)
        if (y != x && uses(y, l) && !colo_error_state_is_set(&y->error) &&
            colo_nccl_control_state(y, why, sizeof why) == COLO_OK)
            colo_nccl_set_error(y, COLO_ERR_PEER, error_message);
    l->users++; /* its last user may leave meanwhile */
    pthread_mutex_unlock(&f->lock);
    colo_nccl_abort_connection(f, l);
    colo_nccl_connection_put(f, l);
    pthread_mutex_lock(&f->lock);
}

bool colo_nccl_abort_next(struct colo_nccl_context *f, const struct colo_nccl_group *x)
{
    char why[900];
    struct colo_connection *l = find_whole(f, x);
    if (!l)
        return false;
    (void)colo_nccl_state(x->comm, why, sizeof why);
    abort_used(f, x, l, why);
    return true;
}

static int64_t word(const struct colo_nccl_context *f, int i)
{
    return __atomic_load_n(&f->progress[i], __ATOMIC_ACQUIRE);
}

/* How far the stream has counted, from @first on. */
static int64_t count_of(const struct colo_nccl_context *f, int first)
{
    int64_t most = 0;
    for (int i = 0; i < COLO_PROGRESS_WORDS; i++)
        most = word(f, first + i) > most ? word(f, first + i) : most;
    return most;
}

bool colo_nccl_is_busy(const struct colo_nccl_context *f)
{
    return count_of(f, COLO_PROGRESS_BEGUN) > count_of(f, COLO_PROGRESS_ENDED) ||
           (f->order->used && cudaEventQuery(f->order->done) == cudaErrorNotReady);
}

/* The operation that has begun is of a comm that was destroyed: no caller is told, and the stream
 * must not wait for ever. */
static void end_left(struct colo_nccl_context *f, int64_t id, double ms, const char *what)
{
    char why[300];
    struct colo_connection *l = f->connection;
    while (l && !(l->left_by == id && is_whole(l)))
        l = l->next;
    if (!l || ms < (double)l->left_ms)
        return;
    snprintf(why, sizeof why,
             "%s of a communicator of %d ranks that was destroyed: has not ended %" PRId64
             " ms after its turn came on the stream of device %d",
             what, (int)l->n, l->left_ms, (int)f->device);
    colo_log(COLO_LOG_WARN, "%s; its connection is aborted", why);
    abort_used(f, NULL, l, why);
}

/* Fails the comm whose operation has been on the stream for longer than its deadline. */
static void read_clock(struct colo_nccl_context *f)
{
    const int64_t ended = count_of(f, COLO_PROGRESS_ENDED);
    const int64_t begun = count_of(f, COLO_PROGRESS_BEGUN);
    const double now = colo_now();
    if (begun <= ended || begun != f->seen_begun) {
        f->seen_begun = begun;
        f->since = now;
        return;
    }
    struct colo_nccl_group *x = f->group;
    while (x && x->id != word(f, COLO_PROGRESS_COMM))
        x = x->next;
    if (x && colo_error_state_is_set(&x->error))
        return;
    const int64_t ms = x ? colo_comm_i_timeout(x->comm) : 0;
    if ((now - f->since) * 1e3 < (double)ms)
        return;
    char what[96], error_message[400];
    colo_op_desc_t op =
        colo_op_unpack((uint64_t)word(f, COLO_PROGRESS_OP), (uint64_t)word(f, COLO_PROGRESS_COUNT));
    colo_op_describe(what, sizeof what, op, (uint64_t)word(f, COLO_PROGRESS_SEQ));
    if (!x) {
        end_left(f, word(f, COLO_PROGRESS_COMM), (now - f->since) * 1e3, what);
        return;
    }
    pthread_mutex_lock(x->comm->lock); /* the owner may be naming it */
    snprintf(error_message, sizeof error_message,
             "%s on '%s' of %d ranks, rank %d (world rank %" PRId64 ", device %d): has not ended "
             "%" PRId64 " ms after its turn came on the stream; a rank did not come, or its stream "
             "did not",
             what, x->comm->name, (int)x->comm->size, (int)x->rank,
             x->comm->world_rank[x->comm->rank], (int)f->device, ms);
    pthread_mutex_unlock(x->comm->lock);
    colo_nccl_set_error(x, COLO_ERR_TIMEOUT, error_message);
}

void *colo_nccl_watchdog(void *p)
{
    struct colo_nccl_context *f = p;
    (void)colo_capture_relax();
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        struct colo_nccl_group *x = f->group;
        while (x && !(is_dead(f, x) && colo_nccl_abort_next(f, x)))
            x = x->next;
        if (x)
            continue;
        read_clock(f);
        struct timespec until = colo_in(WATCHDOG_MS * 1e-3);
        pthread_cond_timedwait(&f->wake, &f->lock, &until);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}
