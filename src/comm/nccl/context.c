/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.c - what the comms of one rank and device share, from the first to the last of them.
 *
 * The last comm waits for whatever its connections still do, up to the deadline. Then it aborts
 * them, or the caller's streams would wait for ranks that never come. What does not end by that
 * either is left alone, memory included.
 */
#include "comm/nccl/comm.h"

#include "capture.h"
#include "core/env.h"
#include "core/error.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void close_main(void *p)
{
    struct colo_nccl_context *f = p;
    COLO_CAPTURE_RELAXED;
    int now = f->device; /* if create fails, this is the caller's thread, which keeps its state */
    cudaGetDevice(&now);
    cudaSetDevice(f->device);
    cudaDeviceSynchronize();
    for (struct colo_connection *l = f->connection, *next; l; l = next) {
        next = l->next;
        if (l->nccl && !l->borrowed && atomic_load(&l->phase) == COLO_CONNECTION_OK)
            (void)f->lib->destroy(l->nccl);
        colo_nccl_connection_free(l);
    }
    for (int32_t i = 0; i < f->nold; i++)
        cudaFree(f->old[i]);
    cudaFree(f->stage);
    cudaFree(f->memory);
    cudaFree(f->counts);
    cudaFreeHost(f->progress);
    colo_order_drop(f->order);
    cudaSetDevice(now);
    (void)cudaGetLastError();
    free(f->from);
    free(f->to);
    free(f->part);
    pthread_cond_destroy(&f->wake);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

static const double REST_SECONDS = 0.5; /* for a device on which everything was aborted */

/* False: operations that do not end had to be aborted. */
static bool wait_quiet(struct colo_nccl_context *f, double seconds)
{
    COLO_CAPTURE_RELAXED;
    const double end = colo_now() + seconds;
    while (colo_nccl_is_busy(f)) {
        if (colo_now() < end) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            continue;
        }
        colo_log(COLO_LOG_WARN,
                 "operations of destroyed communicators on device %d have not ended after %lld ms; "
                 "their connections are aborted",
                 (int)f->device, (long long)f->timeout_ms);
        for (struct colo_connection *l = f->connection; l; l = l->next)
            colo_nccl_abort_connection(f, l);
        return false;
    }
    return true;
}

void colo_nccl_context_destroy(struct colo_nccl_context *f, bool watched)
{
    double seconds = (double)f->timeout_ms * 1e-3;
    if (watched) {
        pthread_mutex_lock(&f->lock);
        f->stop = true;
        pthread_cond_signal(&f->wake);
        pthread_mutex_unlock(&f->lock);
        pthread_join(f->watchdog, NULL); /* bounded: an abort is */
    }
    struct timespec until = colo_in(seconds);
    pthread_mutex_lock(&f->lock);
    while (f->leaving > 0 && pthread_cond_timedwait(&f->wake, &f->lock, &until) != ETIMEDOUT)
        ;
    bool left = f->leaving == 0;
    pthread_mutex_unlock(&f->lock);
    if (left && watched && !wait_quiet(f, seconds))
        seconds = REST_SECONDS;
    if (left)
        (void)colo_run_for(seconds, NULL, NULL, close_main, NULL, f);
}

colo_status_t colo_nccl_context_create(struct colo_nccl_context **out, int32_t device,
                                       int32_t ranks)
{
    const colo_nccl_lib_t *lib = NULL;
    int now = 0, count = 0;
    COLO_TRY(colo_nccl_find(&lib));
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess)
        e = cudaGetDevice(&now);
    if (e != cudaSuccess)
        return colo_cuda_error("nccl create", e);
    device = device < 0 ? now : device;
    if (device >= count)
        return colo_fail(COLO_ERR_ARG, "nccl create: device %d, %d devices are visible",
                         (int)device, count);
    struct colo_nccl_context *f = calloc(1, sizeof *f);
    if (!f)
        return colo_fail(COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *f);
    f->lib = lib;
    f->device = device;
    f->timeout_ms = 1000;
    f->memory_bytes = COLO_NCCL_WARM_BYTES(ranks);
    pthread_mutex_init(&f->lock, NULL);
    colo_cond_init(&f->wake);
    if (device != now)
        e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&f->memory, f->memory_bytes);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&f->counts, COLO_COUNTS * sizeof *f->counts);
    if (e == cudaSuccess)
        e = cudaHostAlloc((void **)&f->progress, COLO_PROGRESS_COUNTERS * sizeof *f->progress,
                          cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaSuccess)
        memset(f->progress, 0, COLO_PROGRESS_COUNTERS * sizeof *f->progress);
    colo_status_t st =
        e == cudaSuccess ? colo_order_new(&f->order) : colo_cuda_error("nccl create", e);
    if (device != now)
        cudaSetDevice(now);
    if (st == COLO_OK && pthread_create(&f->watchdog, NULL, colo_nccl_watchdog, f) != 0)
        st = colo_fail(COLO_ERR_NOMEM, "nccl create: no thread to watchdog the connections");
    if (st < 0) {
        close_main(f);
        return st;
    }
    *out = f;
    return COLO_OK;
}
