/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl-guard.c - what keeps a caller from waiting for ever: helper threads with a deadline, and a
 * guard thread for each family.
 *
 * NCCL may wait without limit in three places: making a communicator, its first operations, ending
 * it. All three run in a helper thread that the caller waits for up to the deadline; a helper that
 * does not come back keeps what it works on. (NCCL's non-blocking mode would start a thread for
 * every operation instead.)
 *
 * The guard looks every 20 ms whether a comm has failed here, at a peer or in NCCL, and aborts its
 * link then, so that streams do not wait for ever. NCCL wants no other thread inside it meanwhile:
 * operations hold the link's lock.
 */
#include "comm/comm-nccl.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

static const double ABORT_SECONDS = 10; /* for NCCL to give up a communicator */
enum { GUARD_MS = 20 };

/* ---- helper threads with a deadline ---- */

struct job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool finished, left;
    void (*fn)(void *arg);
    void *arg;
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
    if (left)
        job_free(j); /* @arg stays: nobody knows any more who uses what is in it */
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
    double at = colo_now() + seconds;
    return (struct timespec){.tv_sec = (time_t)at,
                             .tv_nsec = (long)((at - (double)(time_t)at) * 1e9)};
}

/* True when @fn came back in time; else @arg belongs to the thread for good. */
bool colo_nccl_run_for(double seconds, void (*fn)(void *arg), void *arg)
{
    struct job *j = calloc(1, sizeof *j);
    pthread_t thread;
    if (!j)
        return false;
    j->fn = fn;
    j->arg = arg;
    pthread_mutex_init(&j->lock, NULL);
    colo_nccl_cond_init(&j->changed);
    if (pthread_create(&thread, NULL, job_main, j) != 0) {
        job_free(j);
        return false;
    }
    pthread_detach(thread);
    struct timespec until = colo_nccl_in(seconds);
    pthread_mutex_lock(&j->lock);
    while (!j->finished && pthread_cond_timedwait(&j->changed, &j->lock, &until) != ETIMEDOUT)
        ;
    bool finished = j->finished;
    j->left = !finished;
    pthread_mutex_unlock(&j->lock);
    if (finished) {
        job_free(j);
    }
    return finished;
}

/* ---- the guard ---- */

struct tear {
    const colo_nccl_lib_t *lib;
    int32_t device;
    ncclComm_t nccl;
};

static void tear_main(void *p)
{
    struct tear *t = p;
    cudaSetDevice(t->device);
    (void)t->lib->abort(t->nccl);
}

/* Ends what is enqueued on a link. Once; never a borrowed one. */
void colo_nccl_tear(struct colo_nfamily *f, struct colo_link *l)
{
    int32_t ok = COLO_LINK_OK;
    if (!l->nccl || l->borrowed ||
        !atomic_compare_exchange_strong(&l->phase, &ok, COLO_LINK_ENDING))
        return;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;
    bool held = pthread_mutex_timedlock(&l->busy, &until) == 0; /* a stuck call: abort frees it */
    struct tear *t = malloc(sizeof *t);
    if (t) {
        *t = (struct tear){f->lib, f->device, l->nccl};
        if (colo_nccl_run_for(ABORT_SECONDS, tear_main, t))
            free(t);
    }
    atomic_store(&l->phase, COLO_LINK_GONE);
    if (held)
        pthread_mutex_unlock(&l->busy);
}

/* Does NCCL itself report an error on this link? */
static bool look_at_link(struct colo_nfamily *f, struct colo_nctx *x)
{
    struct colo_link *l = x->link;
    ncclResult_t r = ncclSuccess;
    if (!l->nccl || pthread_mutex_trylock(&l->busy) != 0)
        return false;
    if (atomic_load(&l->phase) == COLO_LINK_OK && f->lib->async_error(l->nccl, &r) != ncclSuccess)
        r = ncclSuccess;
    pthread_mutex_unlock(&l->busy);
    if (r == ncclSuccess || r == ncclInProgress)
        return false;
    char sentence[600];
    const char *more = f->lib->last_error(NULL);
    snprintf(sentence, sizeof sentence, "NCCL reports on the link of %d ranks: %s; %.400s",
             (int)l->n, f->lib->error_string(r), more ? more : "");
    if (x->control)
        x->control->ops->fail(x->control, COLO_ERR_NCCL, sentence);
    colo_fate_seal(&x->fate, COLO_ERR_NCCL, -1, -1, sentence);
    return true;
}

static struct colo_link *find_doomed(struct colo_nfamily *f)
{
    char sentence[900];
    for (struct colo_nctx *x = f->ctx; x; x = x->next) {
        bool dead = colo_fate_sealed(&x->fate) ||
                    colo_nccl_control_state(x, sentence, sizeof sentence) != COLO_OK ||
                    look_at_link(f, x);
        if (dead && x->link->nccl && !x->link->borrowed &&
            atomic_load(&x->link->phase) == COLO_LINK_OK)
            return x->link;
    }
    return NULL;
}

void *colo_nccl_guard(void *p)
{
    struct colo_nfamily *f = p;
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        struct colo_link *l = find_doomed(f);
        if (l) {
            pthread_mutex_unlock(&f->lock);
            colo_nccl_tear(f, l); /* links live as long as the family */
            pthread_mutex_lock(&f->lock);
            continue;
        }
        struct timespec until = colo_nccl_in(GUARD_MS * 1e-3);
        pthread_cond_timedwait(&f->wake, &f->lock, &until);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}
