/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lane-cuda.c - a stream of the library's own and the events that order it against the caller's.
 *
 * Its priority is the highest: what runs on it is short (statistics, a gather), and what the
 * caller's stream does next waits for it sooner or later. Who records what, and when, is
 * loss/linear.h.
 */
#include "core/ops-cuda.h"
#include "loss/linear.h"

#include <stdlib.h>

struct lane {
    cudaStream_t stream;
    int32_t events;
    cudaEvent_t event[];
};

static void destroy(void *lane)
{
    struct lane *l = lane;
    if (!l)
        return;
    for (int32_t i = 0; i < l->events; i++)
        if (l->event[i])
            cudaEventDestroy(l->event[i]);
    if (l->stream) {
        cudaStreamSynchronize(l->stream); /* whoever frees next what it works on */
        cudaStreamDestroy(l->stream);
    }
    cudaGetLastError();
    free(l);
}

static colo_status_t create(int32_t events, void **lane)
{
    int least = 0, greatest = 0;
    struct lane *l = calloc(1, sizeof *l + (size_t)events * sizeof *l->event);
    if (!l)
        return colo_backend_fail(COLO_ERR_NOMEM, "stream: %d events", (int)events);
    l->events = events;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&l->stream, cudaStreamNonBlocking, greatest);
    for (int32_t i = 0; i < events && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&l->event[i], cudaEventDisableTiming);
    if (e != cudaSuccess) {
        destroy(l);
        return colo_cuda_report(e, "stream");
    }
    *lane = l;
    return COLO_OK;
}

static colo_stream_t stream(void *lane)
{
    return ((struct lane *)lane)->stream;
}

static colo_status_t record(void *lane, int32_t event, colo_stream_t on)
{
    return colo_cuda_report(cudaEventRecord(((struct lane *)lane)->event[event], on), "stream");
}

static colo_status_t wait(void *lane, int32_t event, colo_stream_t on)
{
    return colo_cuda_report(cudaStreamWaitEvent(on, ((struct lane *)lane)->event[event], 0),
                            "stream");
}

const struct colo_lane_ops colo_cuda_lanes = {create, destroy, stream, record, wait};
