/* SPDX-License-Identifier: Apache-2.0 */
/*
 * helper.c - threads for calls that may not come back: the caller waits up to a deadline, and goes
 * on without the thread then. What the thread works on is its own from that moment.
 *
 * To free memory of a device waits for all that the device does. If a kernel never ends there,
 * destroying an object would hang; so that runs in such a thread, too.
 *
 * exit() ends CUDA and NCCL. A thread that is in a call of theirs would end the process by a
 * signal, so exit() waits for such threads before, for a moment: one may never come back.
 */
#include "core/helper.h"

#include "core/env.h"

#include <stdlib.h>

static const double ASK_SECONDS = 20e-3;
static const double EXIT_SECONDS = 1.0; /* for threads that were left, at most */

static _Atomic int32_t abandoned; /* threads that were left and have not come back */

double colo_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool finished, left;
    void (*fn)(void *arg);
    void *arg;
    struct colo_abandon *abandon;
};

static void job_free(struct job *job)
{
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
    free(job);
}

static void at_exit(void)
{
    const double end = colo_now() + EXIT_SECONDS;
    while (abandoned > 0 && colo_now() < end)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void in_child(void)
{
    abandoned = 0; /* fork() copies no other thread */
}

static void watch_exit(void)
{
    (void)atexit(at_exit);
    (void)pthread_atfork(NULL, NULL, in_child);
}

/* The caller goes on without the thread. */
static void leave(struct job *job)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_exit);
    job->left = true;
    abandoned++;
}

static void *job_main(void *arg)
{
    struct job *job = arg;
    job->fn(job->arg);
    pthread_mutex_lock(&job->lock);
    job->finished = true;
    bool left = job->left;
    pthread_cond_signal(&job->changed);
    pthread_mutex_unlock(&job->lock);
    if (left && job->abandon)
        job->abandon->end(job->arg);
    if (left) {
        job_free(job);
        abandoned--;
    }
    return NULL;
}

void colo_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &clock);
    pthread_condattr_destroy(&clock);
}

struct timespec colo_in(double seconds)
{
    double when = colo_now() + seconds;
    return (struct timespec){.tv_sec = (time_t)when,
                             .tv_nsec = (long)((when - (double)(time_t)when) * 1e9)};
}

/* Starts @job, or frees it. */
static bool job_start(struct job *job)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, job_main, job) != 0) {
        job_free(job);
        return false;
    }
    pthread_detach(thread);
    return true;
}

static struct job *job_new(void (*fn)(void *arg), struct colo_abandon *abandon, void *arg)
{
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return NULL;
    job->fn = fn;
    job->abandon = abandon;
    job->arg = arg;
    pthread_mutex_init(&job->lock, NULL);
    colo_cond_init(&job->changed);
    return job;
}

colo_status_t colo_run_for(double seconds, bool (*ends)(const void *of), const void *of,
                           void (*fn)(void *arg), struct colo_abandon *abandon, void *arg)
{
    struct job *job = job_new(fn, abandon, arg);
    const double end = colo_now() + seconds;
    COLO_FAIL_IF(!job || !job_start(job), COLO_ERR_NOMEM, "no thread could be started");
    pthread_mutex_lock(&job->lock);
    while (!job->finished && colo_now() < end) {
        double left = end - colo_now(), nap = ends ? ASK_SECONDS : left;
        struct timespec until = colo_in(nap < left ? nap : left);
        pthread_cond_timedwait(&job->changed, &job->lock, &until);
        if (ends && ends(of))
            break;
    }
    bool finished = job->finished;
    if (!finished)
        leave(job);
    if (!finished && abandon)
        abandon->is_set = true;
    pthread_mutex_unlock(&job->lock);
    if (!finished)
        return COLO_ERR_TIMEOUT;
    job_free(job);
    return COLO_OK;
}

bool colo_run_apart(void (*fn)(void *arg), void *arg)
{
    struct job *job = job_new(fn, NULL, arg);
    if (!job)
        return false;
    leave(job);
    const bool started = job_start(job);
    abandoned -= !started;
    return started;
}

/* ---- what waits for a device ---- */

enum { DEVICES = 64 };                /* more of them share a counter */
static _Atomic int32_t away[DEVICES]; /* threads that have not come back */

struct ending {
    struct colo_abandon abandon;
    int device;
    void (*fn)(int device, void *arg);
    void *arg;
};

static void ending_main(void *arg)
{
    const struct ending *ending = arg;
    ending->fn(ending->device, ending->arg);
}

static void ending_abandoned(void *arg)
{
    struct ending *ending = arg;
    away[(unsigned)ending->device % DEVICES]--;
    free(ending);
}

bool colo_end_on(int device, int64_t ms, void (*fn)(int device, void *arg), void *arg)
{
    _Atomic int32_t *others = &away[(unsigned)device % DEVICES];
    const bool waits = *others <= 0;
    const colo_error_t earlier = colo_error_save();
    struct ending *ending = malloc(sizeof *ending);
    colo_status_t st = COLO_ERR_NOMEM;
    if (ms == 0)
        (void)colo_env_i64("COLO_TIMEOUT_MS", &ms);
    if (ending) {
        *ending = (struct ending){{.end = ending_abandoned}, device, fn, arg};
        st = colo_run_for(waits ? (double)ms * 1e-3 : 0, NULL, NULL, ending_main, &ending->abandon,
                          ending);
    }
    if (st == COLO_ERR_TIMEOUT) {
        ++*others;
        if (waits)
            colo_log(COLO_LOG_WARN,
                     "device %d does not end its work within %lld ms; memory is freed when it does",
                     device, (long long)ms);
        return false;
    }
    if (st == COLO_ERR_NOMEM)
        fn(device, arg);
    free(ending);
    (void)colo_error_restore(COLO_OK, &earlier);
    return true;
}
