/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event.c - events. See fake.h.
 *
 * A record enqueues a point, which is reached when the stream has come to it. Other streams and the
 * host wait for the point, not for the event, so an event may be recorded again at any time.
 */
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

struct point { /* of a stream; done when the stream has got there */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t refs;
    bool done;
};

struct CUevent_st {
    pthread_mutex_t lock;
    struct point *point; /* a reference; NULL: not recorded */
    struct fake_captured capture; /* where it was recorded */
};

static void point_put(struct point *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    const bool last = --p->refs == 0;
    pthread_mutex_unlock(&p->lock);
    if (!last)
        return;
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

static struct point *point_of(cudaEvent_t e)
{
    pthread_mutex_lock(&e->lock);
    struct point *p = e->point;
    if (p) {
        pthread_mutex_lock(&p->lock);
        p->refs++;
        pthread_mutex_unlock(&p->lock);
    }
    pthread_mutex_unlock(&e->lock);
    return p;
}

static void point_reached(void *arg)
{
    struct point *p = *(struct point **)arg;
    pthread_mutex_lock(&p->lock);
    p->done = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void point_wait(void *arg)
{
    struct point *p = *(struct point **)arg;
    pthread_mutex_lock(&p->lock);
    while (!p->done)
        pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static void point_end(void *arg)
{
    point_put(*(struct point **)arg);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    FAKE_ENTER();
    struct CUevent_st *e = calloc(1, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    fake_count(FAKE_EVENT, 1);
    *event = e;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    fake_count(FAKE_EVENT, -1);
    point_put(event->point);
    pthread_mutex_destroy(&event->lock);
    free(event);
    return e;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    FAKE_ENTER();
    const struct fake_captured capture = fake_capture_of(stream);
    struct point *p = capture.id ? NULL : calloc(1, sizeof *p);
    if (p) {
        p->refs = 2;
        pthread_mutex_init(&p->lock, NULL);
        pthread_cond_init(&p->changed, NULL);
    }
    pthread_mutex_lock(&event->lock);
    struct point *old = event->point;
    event->point = p;
    event->capture = capture;
    pthread_mutex_unlock(&event->lock);
    point_put(old);
    return p ? fake_put(stream, point_reached, point_end, &p, sizeof p, true) : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    FAKE_ENTER();
    pthread_mutex_lock(&event->lock);
    const struct fake_captured capture = event->capture;
    pthread_mutex_unlock(&event->lock);
    if (capture.id || fake_capture_of(stream).id)
        return fake_join_capture(stream, &capture);
    struct point *p = point_of(event);
    return p ? fake_put(stream, point_wait, point_end, &p, sizeof p, true) : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    struct point *p = point_of(event);
    if (!p)
        return cudaSuccess;
    pthread_mutex_lock(&p->lock);
    const bool done = p->done;
    pthread_mutex_unlock(&p->lock);
    point_put(p);
    return done ? cudaSuccess : fake_error(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    FAKE_ENTER();
    struct point *p = point_of(event);
    if (p)
        point_wait(&p);
    point_put(p);
    return cudaSuccess;
}
