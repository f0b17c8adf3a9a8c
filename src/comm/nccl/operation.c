/* SPDX-License-Identifier: Apache-2.0 */
/*
 * operation.c - what every operation between GPUs does first and last.
 *
 * First: is this the device of the comm, and the stream one of that device; is the connection
 * there. A comm that was made without one connects here, once, and not in a capture. Then the
 * operation waits on the device for the one before it, whatever comm of the context or stream that
 * was on: so two of them never run at once on a device, and ranks that launch in the same order
 * cannot wait for each other crosswise. Captured operations are ordered by their graphs alone.
 *
 * Between first and last the connection's lock is held, and on the stream there are two counts that
 * the watchdog looks at (watchdog.c).
 *
 * Where ranks of a context are threads of one process, whatever they talk over, a comm's ranks also
 * meet on the host before and after an operation of the loss. cuBLASLt loads a kernel when a
 * product first needs it, whatever CUDA_MODULE_LOADING says, and the driver waits for all devices
 * of the process meanwhile: for one, too, where an operation waits for the rank that is loading.
 * No rank launches before all have the products behind them that come first, and no rank goes on to
 * the next one before all have launched. Ranks of the comm that are all in different processes do
 * so, too: two groups can wait for each other crosswise.
 */
#include "comm/nccl/comm.h"

#include "capture.h"
#include "core/hash.h"
#include "core/error.h"
#include "progress.h"

#include <stdio.h>
#include <stdlib.h>

const char *colo_operation_text(const struct colo_operation *r, char *text, size_t cap)
{
    return colo_op_describe(text, cap, r->c->op, r->c->seq);
}

colo_status_t colo_operation_nccl(const struct colo_operation *r, ncclResult_t e)
{
    char what[96];
    return e == ncclSuccess ? COLO_OK
                            : colo_nccl_error(r->lib, colo_operation_text(r, what, sizeof what), e);
}

colo_status_t colo_operation_cuda(const struct colo_operation *r, cudaError_t e)
{
    char what[96];
    return e == cudaSuccess ? COLO_OK
                            : colo_cuda_error(colo_operation_text(r, what, sizeof what), e);
}

/* ---- begin and end ---- */

static colo_status_t check_place(struct colo_operation *r)
{
    char what[96];
    int now = -1;
    COLO_OPERATION_CUDA(cudaGetDevice(&now));
    if (now != r->f->device)
        return colo_fail(
            COLO_ERR_ARG, "%s: the current device is %d, comm '%s' was made on device %d",
            colo_operation_text(r, what, sizeof what), now, r->c->name, (int)r->f->device);
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    COLO_OPERATION_CUDA(cudaStreamIsCapturing(r->stream, &capture));
    r->capturing = capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (r->stream && !r->capturing) { /* the default stream is the current device's */
        COLO_OPERATION_CUDA(cudaStreamGetDevice(r->stream, &now));
        if (now != r->f->device)
            return colo_fail(
                COLO_ERR_ARG, "%s: the stream is of device %d, comm '%s' was made on device %d",
                colo_operation_text(r, what, sizeof what), now, r->c->name, (int)r->f->device);
    }
#endif
    return COLO_OK;
}

/* The comm's own connection, made now if no operation has needed it yet. */
static colo_status_t own_link(struct colo_operation *r)
{
    char what[96];
    if (!r->x->connection && r->capturing)
        return colo_fail(COLO_ERR_STATE,
                         "%s: comm '%s' connects at its first operation, which cannot be captured; "
                         "run one before the capture, a barrier will do",
                         colo_operation_text(r, what, sizeof what), r->c->name);
    if (!r->x->connection)
        COLO_TRY(colo_nccl_connect(r->c));
    r->connection = r->x->connection;
    return COLO_OK;
}

static cudaError_t count_progress(struct colo_operation *r, bool begin)
{
    const colo_op_desc_t *op = &r->c->op;
    struct colo_nccl_context *f = r->f;
    const int64_t what[4] = {r->x->id, (int64_t)colo_op_pack(op), op->count, (int64_t)r->c->seq};
    if (!r->connection->nccl)
        return cudaSuccess;
    return colo_k_progress(&f->progress[begin ? COLO_PROGRESS_BEGUN : COLO_PROGRESS_ENDED],
                           COLO_PROGRESS_WORDS,
                           &f->counts[begin ? COLO_COUNT_BEGUN : COLO_COUNT_ENDED],
                           begin ? &f->progress[COLO_PROGRESS_COMM] : NULL, what, r->stream);
}

static colo_status_t host_barrier(const struct colo_operation *r, colo_status_t st)
{
    const colo_category_t category = r->c->op.category;
    if ((category != COLO_CATEGORY_LOSS && category != COLO_CATEGORY_HEAD) ||
        !r->connection->nccl || !r->c->share_process)
        return st;
    const colo_error_t why = colo_error_save(); /* a dead control would have its own */
    const uint64_t same = colo_op_pack(&r->c->op) ^ (uint64_t)r->c->op.count * COLO_HASH_INIT;
    colo_status_t together =
        colo_comm_i_agree(colo_comm_i_control(r->c), "an operation of the loss", same, st);
    return st < 0 ? colo_error_restore(st, &why) : together;
}

colo_status_t colo_operation_begin(struct colo_operation *r, colo_comm_t *c,
                                   const colo_subconnection_t *subconnection, colo_stream_t stream)
{
    struct colo_nccl_group *x = c->impl;
    struct colo_nccl_context *f = x->context;
    char what[96], why[900];
    *r = (struct colo_operation){.c = c, .x = x, .f = f, .lib = f->lib, .stream = stream};
    COLO_TRY(check_place(r));
    if (subconnection)
        r->connection = subconnection->connection;
    else
        COLO_TRY(own_link(r));
    COLO_TRY(host_barrier(r, COLO_OK));
    COLO_OPERATION_CUDA(colo_order_follow(f->order, r->capturing, stream));
    pthread_mutex_lock(&r->connection->busy);
    colo_status_t st = COLO_OK;
    if (atomic_load(&r->connection->phase) != COLO_CONNECTION_OK) {
        st = colo_nccl_state(c, why, sizeof why);
        st = st < 0 ? colo_fail(st, "%s", why)
                    : colo_fail(
                          COLO_ERR_PEER,
                          "%s: the connection of comm '%s' was torn down when another comm of the "
                          "same ranks failed",
                          colo_operation_text(r, what, sizeof what), c->name);
    }
    if (st == COLO_OK)
        st = colo_operation_cuda(r, count_progress(r, true));
    if (st < 0)
        pthread_mutex_unlock(&r->connection->busy);
    return st;
}

colo_status_t colo_operation_end(struct colo_operation *r, colo_status_t st)
{
    const cudaError_t counted = count_progress(r, false);
    pthread_mutex_unlock(&r->connection->busy);
    if (st == COLO_OK) /* else it keeps its error message */
        st = colo_operation_cuda(r, counted);
    if (st == COLO_OK)
        st = colo_operation_cuda(r, colo_order_lead(r->f->order, r->capturing, r->stream));
    return host_barrier(r, st);
}

/* ---- memory ---- */

colo_status_t colo_operation_on_device(const struct colo_operation *r, const char *name,
                                       const void *p)
{
    struct cudaPointerAttributes a;
    char what[96];
    COLO_OPERATION_CUDA(cudaPointerGetAttributes(&a, p));
    if (a.type != cudaMemoryTypeDevice && a.type != cudaMemoryTypeManaged)
        return colo_fail(
            COLO_ERR_ARG, "%s: %s is host memory; comm '%s' moves memory of CUDA device %d",
            colo_operation_text(r, what, sizeof what), name, r->c->name, (int)r->f->device);
    if (a.type == cudaMemoryTypeDevice && a.device != r->f->device)
        return colo_fail(COLO_ERR_ARG, "%s: %s is memory of device %d, comm '%s' is on device %d",
                         colo_operation_text(r, what, sizeof what), name, a.device, r->c->name,
                         (int)r->f->device);
    return COLO_OK;
}

colo_status_t colo_operation_stage(struct colo_operation *r, size_t bytes)
{
    COLO_CAPTURE_RELAXED;
    struct colo_nccl_context *f = r->f;
    char what[96];
    const bool lent = r->c->stage_bytes > 0 && bytes <= r->c->stage_bytes;
    r->stage = lent ? r->c->stage : f->stage;
    if (lent || bytes <= f->stage_bytes)
        return COLO_OK;
    if (r->capturing)
        return colo_fail(COLO_ERR_STATE,
                         "%s: needs %zu bytes of staging, %zu are there; run it once before the "
                         "capture",
                         colo_operation_text(r, what, sizeof what), bytes, f->stage_bytes);
    size_t grown = COLO_STAGE_ALIGN; /* powers of two: with those before, at most twice as much */
    while (grown < bytes)
        grown *= 2;
    void *p = NULL;
    cudaError_t e = f->nold < (int32_t)(sizeof f->old / sizeof f->old[0])
                        ? cudaMalloc(&p, grown)
                        : cudaErrorMemoryAllocation;
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return colo_fail(COLO_ERR_NOMEM, "%s: %zu bytes of staging on device %d: %s",
                         colo_operation_text(r, what, sizeof what), grown, (int)f->device,
                         cudaGetErrorString(e));
    }
    if (f->stage)
        f->old[f->nold++] = f->stage;
    r->stage = f->stage = p;
    f->stage_bytes = grown;
    return COLO_OK;
}
