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

static void close_main(void *memory)
{
    struct colo_nccl_context *context = memory;
    COLO_CAPTURE_RELAXED;
    int now =
        context->device; /* if create fails, this is the caller's thread, which keeps its state */
    cudaGetDevice(&now);
    cudaSetDevice(context->device);
    cudaDeviceSynchronize();
    for (struct colo_connection *connection = context->connection, *next; connection;
         connection = next) {
        next = connection->next;
        if (connection->nccl && !connection->borrowed &&
            atomic_load(&connection->phase) == COLO_CONNECTION_OK)
            (void)context->lib->destroy(connection->nccl);
        colo_nccl_connection_free(connection);
    }
    for (int32_t i = 0; i < context->nold; i++)
        cudaFree(context->old[i]);
    cudaFree(context->stage);
    cudaFree(context->memory);
    cudaFree(context->counts);
    cudaFreeHost(context->progress);
    colo_order_drop(context->order);
    cudaSetDevice(now);
    (void)cudaGetLastError();
    free(context->from);
    pthread_cond_destroy(&context->wake);
    pthread_mutex_destroy(&context->lock);
    free(context);
}

static const double REST_SECONDS = 0.5; /* for a device on which everything was aborted */

/* False: operations that do not end had to be aborted. */
static bool wait_quiet(struct colo_nccl_context *context, double seconds)
{
    COLO_CAPTURE_RELAXED;
    const double end = colo_now() + seconds;
    while (colo_nccl_is_busy(context)) {
        if (colo_now() < end) {
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            continue;
        }
        colo_log(COLO_LOG_WARN,
                 "operations of destroyed communicators on device %d have not ended after %lld ms; "
                 "their connections are aborted",
                 (int)context->device, (long long)context->timeout_ms);
        for (struct colo_connection *connection = context->connection; connection;
             connection = connection->next)
            colo_nccl_abort_connection(context, connection);
        return false;
    }
    return true;
}

void colo_nccl_context_destroy(struct colo_nccl_context *context, bool watched)
{
    double seconds = (double)context->timeout_ms * 1e-3;
    if (watched) {
        pthread_mutex_lock(&context->lock);
        context->stop = true;
        pthread_cond_signal(&context->wake);
        pthread_mutex_unlock(&context->lock);
        pthread_join(context->watchdog, NULL); /* bounded: an abort is */
    }
    struct timespec until = colo_in(seconds);
    pthread_mutex_lock(&context->lock);
    while (context->leaving > 0 &&
           pthread_cond_timedwait(&context->wake, &context->lock, &until) != ETIMEDOUT)
        ;
    bool left = context->leaving == 0;
    pthread_mutex_unlock(&context->lock);
    if (left && watched && !wait_quiet(context, seconds))
        seconds = REST_SECONDS;
    if (left)
        (void)colo_run_for(seconds, NULL, NULL, close_main, NULL, context);
}

colo_status_t colo_nccl_context_create(struct colo_nccl_context **out, int32_t device,
                                       int32_t ranks)
{
    const colo_nccl_lib_t *lib = NULL;
    int now = 0, count = 0;
    COLO_TRY(colo_nccl_find(&lib));
    cudaError_t error = cudaGetDeviceCount(&count);
    COLO_THEN(error, cudaGetDevice(&now));
    COLO_TRY(colo_cuda_error("nccl create", error));
    device = device < 0 ? now : device;
    COLO_FAIL_IF(device >= count, COLO_ERR_ARG, "nccl create: device %d, %d devices are visible",
                 (int)device, count);
    struct colo_nccl_context *context = calloc(1, sizeof *context);
    COLO_FAIL_IF(!context, COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *context);
    context->lib = lib;
    context->device = device;
    context->timeout_ms = 1000;
    context->memory_bytes = COLO_NCCL_WARM_BYTES(ranks);
    pthread_mutex_init(&context->lock, NULL);
    colo_cond_init(&context->wake);
    if (device != now)
        error = cudaSetDevice(device);
    COLO_THEN(error, cudaMalloc((void **)&context->memory, context->memory_bytes));
    COLO_THEN(error, cudaMalloc((void **)&context->counts, COLO_COUNTS * sizeof *context->counts));
    COLO_THEN(error, cudaHostAlloc((void **)&context->progress,
                                   COLO_PROGRESS_COUNTERS * sizeof *context->progress,
                                   cudaHostAllocPortable | cudaHostAllocMapped));
    if (error == cudaSuccess)
        memset(context->progress, 0, COLO_PROGRESS_COUNTERS * sizeof *context->progress);
    colo_status_t st = colo_cuda_error("nccl create", error);
    COLO_THEN(st, colo_order_new(&context->order));
    if (device != now)
        cudaSetDevice(now);
    if (st == COLO_OK && pthread_create(&context->watchdog, NULL, colo_nccl_watchdog, context) != 0)
        st = colo_fail(COLO_ERR_NOMEM, "nccl create: no thread to watch the connections");
    if (st < 0) {
        close_main(context);
        return st;
    }
    *out = context;
    return COLO_OK;
}
