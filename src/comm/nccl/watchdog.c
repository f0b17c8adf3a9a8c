/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watchdog.c - what keeps a caller from waiting for ever: helper threads with a deadline, and a
 * watchdog thread for each context.
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

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const double ABORT_SECONDS = 10; /* for NCCL to give up a communicator */
static const double BUSY_SECONDS = 2;   /* for a call of NCCL to return; abort frees a stuck one */
enum { WATCHDOG_MS = 20 };

/* ---- helper threads with a deadline ---- */

struct job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool finished, left;
    void (*fn)(void *arg);
    void *arg;
    struct colo_abandon *abandon;
};

static void job_free(struct job *j)
{
    pthread_cond_destroy(&j->changed);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

static void *job_main(void *p)
{
    struct job *j = p;
    j->fn(j->arg);
    pthread_mutex_lock(&j->lock);
    j->finished = true;
    bool left = j->left;
    pthread_cond_signal(&j->changed);
    pthread_mutex_unlock(&j->lock);
    if (left && j->abandon)
        j->abandon->end(j->arg);
    if (left)
        job_free(j);
    return NULL;
}

void colo_nccl_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(c, &a);
    pthread_condattr_destroy(&a);
}

struct timespec colo_nccl_in(double seconds)
{
    double when = colo_now() + seconds;
    return (struct timespec){.tv_sec = (time_t)when,
                             .tv_nsec = (long)((when - (double)(time_t)when) * 1e9)};
}

/* Starts @j, or frees it. */
static bool job_start(struct job *j)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, job_main, j) != 0) {
        job_free(j);
        return false;
    }
    pthread_detach(thread);
    return true;
}

static struct job *job_new(void (*fn)(void *arg), struct colo_abandon *abandon, void *arg)
{
    struct job *j = calloc(1, sizeof *j);
    if (!j)
        return NULL;
    j->fn = fn;
    j->abandon = abandon;
    j->arg = arg;
    pthread_mutex_init(&j->lock, NULL);
    colo_nccl_cond_init(&j->changed);
    return j;
}

bool colo_nccl_run_for(double seconds, const colo_comm_t *control, void (*fn)(void *arg),
                       struct colo_abandon *abandon, void *arg)
{
    struct job *j = job_new(fn, abandon, arg);
    const double end = colo_now() + seconds;
    char error_message[900];
    if (!j || !job_start(j)) {
        if (abandon)
            abandon->end(arg);
        return false;
    }
    pthread_mutex_lock(&j->lock);
    while (!j->finished && colo_now() < end) {
        double left = end - colo_now(), step = control ? WATCHDOG_MS * 1e-3 : left;
        struct timespec until = colo_nccl_in(step < left ? step : left);
        pthread_cond_timedwait(&j->changed, &j->lock, &until);
        if (control && control->ops->state(control, error_message, sizeof error_message) != COLO_OK)
            break;
    }
    bool finished = j->finished;
    j->left = !finished;
    if (!finished && abandon)
        abandon->is_set = true;
    pthread_mutex_unlock(&j->lock);
    if (finished)
        job_free(j);
    return finished;
}

bool colo_nccl_run_apart(void (*fn)(void *arg), void *arg)
{
    struct job *j = job_new(fn, NULL, arg);
    if (!j)
        return false;
    j->left = true;
    return job_start(j);
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
        if (colo_nccl_run_for(ABORT_SECONDS, NULL, abort_main, &t->abandon, t))
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

/* What other comms have enqueued on @x's connection @l ends with it, and must not look complete. */
static void fail_users(const struct colo_nccl_context *f, const struct colo_nccl_group *x,
                       const struct colo_connection *l)
{
    char why[900], error_message[900];
    (void)colo_nccl_state(x->comm, why, sizeof why);
    snprintf(error_message, sizeof error_message,
             "the connection was torn down when another comm of the same ranks failed: %.800s",
             why);
    for (struct colo_nccl_group *y = f->group; y; y = y->next)
        if (y != x && uses(y, l) && !colo_error_state_is_set(&y->error) &&
            colo_nccl_control_state(y, why, sizeof why) == COLO_OK)
            colo_nccl_set_error(y, COLO_ERR_PEER, error_message);
}

bool colo_nccl_abort_next(struct colo_nccl_context *f, const struct colo_nccl_group *x)
{
    struct colo_connection *l = find_whole(f, x);
    if (!l)
        return false;
    fail_users(f, x, l);
    l->users++; /* its last user may leave meanwhile */
    pthread_mutex_unlock(&f->lock);
    colo_nccl_abort_connection(f, l);
    colo_nccl_connection_put(f, l);
    pthread_mutex_lock(&f->lock);
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
    if (!x || colo_error_state_is_set(&x->error))
        return;
    const int64_t ms = colo_comm_i_timeout(x->comm);
    if ((now - f->since) * 1e3 < (double)ms)
        return;
    char what[96], error_message[400];
    colo_op_desc_t op =
        colo_op_unpack((uint64_t)word(f, COLO_PROGRESS_OP), (uint64_t)word(f, COLO_PROGRESS_COUNT));
    colo_op_describe(what, sizeof what, op, (uint64_t)word(f, COLO_PROGRESS_SEQ));
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
        struct timespec until = colo_nccl_in(WATCHDOG_MS * 1e-3);
        pthread_cond_timedwait(&f->wake, &f->lock, &until);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}
