/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event.c - events. See fake.h.
 *
 * A record keeps the place that the stream has come to. Other streams and the host wait for the
 * place, not for the event, so an event may be recorded again at any time.
 */
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

struct CUevent_st {
    struct fake_place place; /* of no stream: not recorded */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all events */

/* With a reference of its own. */
static struct fake_place place_of(cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    const struct fake_place place = fake_place_again(&event->place);
    pthread_mutex_unlock(&lock);
    return place;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    FAKE_ENTER();
    *event = calloc(1, sizeof **event);
    fake_count(FAKE_EVENT, 1);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    fake_count(FAKE_EVENT, -1);
    fake_place_end(&event->place);
    free(event);
    return e;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    FAKE_ENTER();
    const struct fake_place now = fake_place_of(stream);
    pthread_mutex_lock(&lock);
    struct fake_place before = event->place;
    event->place = now;
    pthread_mutex_unlock(&lock);
    fake_place_end(&before);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    FAKE_ENTER();
    return fake_follow(stream, place_of(event));
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    struct fake_place place = place_of(event);
    const bool reached = fake_is_reached(&place, false);
    fake_place_end(&place);
    return reached ? cudaSuccess : fake_error(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    FAKE_ENTER();
    struct fake_place place = place_of(event);
    (void)fake_is_reached(&place, true);
    fake_place_end(&place);
    return cudaSuccess;
}
