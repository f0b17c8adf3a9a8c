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

const char *colo_operation_text(struct colo_operation *call)
{
    return colo_op_describe(call->text, sizeof call->text, call->c->op, call->c->seq);
}

colo_status_t colo_operation_nccl(struct colo_operation *call, ncclResult_t error)
{
    return error == ncclSuccess ? COLO_OK
                                : colo_nccl_error(call->lib, colo_operation_text(call), error);
}

colo_status_t colo_operation_cuda(struct colo_operation *call, cudaError_t error)
{
    return error == cudaSuccess ? COLO_OK : colo_cuda_error(colo_operation_text(call), error);
}

/* ---- begin and end ---- */

static colo_status_t check_place(struct colo_operation *call)
{
    int now = -1;
    COLO_OPERATION_CUDA(cudaGetDevice(&now));
    COLO_FAIL_IF(now != call->f->device, COLO_ERR_ARG,
                 "%s: the current device is %d, comm '%s' was made on device %d",
                 colo_operation_text(call), now, call->c->name, (int)call->f->device);
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    COLO_OPERATION_CUDA(cudaStreamIsCapturing(call->stream, &capture));
    call->capturing = capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (call->stream && !call->capturing) { /* the default stream is the current device's */
        COLO_OPERATION_CUDA(cudaStreamGetDevice(call->stream, &now));
        COLO_FAIL_IF(now != call->f->device, COLO_ERR_ARG,
                     "%s: the stream is of device %d, comm '%s' was made on device %d",
                     colo_operation_text(call), now, call->c->name, (int)call->f->device);
    }
#endif
    return COLO_OK;
}

/* The comm's own connection, made now if no operation has needed it yet. */
static colo_status_t own_link(struct colo_operation *call)
{
    COLO_FAIL_IF(!call->x->connection && call->capturing, COLO_ERR_STATE,
                 "%s: comm '%s' connects at its first operation, which cannot be captured; "
                 "run one before the capture, a barrier will do",
                 colo_operation_text(call), call->c->name);
    if (!call->x->connection)
        COLO_TRY(colo_nccl_connect(call->c));
    call->connection = call->x->connection;
    return COLO_OK;
}

static cudaError_t count_progress(struct colo_operation *call, bool begin)
{
    const colo_op_desc_t *op = &call->c->op;
    struct colo_nccl_context *context = call->f;
    const int64_t what[4] = {call->x->id, (int64_t)colo_op_pack(op), op->count,
                             (int64_t)call->c->seq};
    if (!call->connection->nccl)
        return cudaSuccess;
    return colo_k_progress(
        &context->progress[begin ? COLO_PROGRESS_BEGUN : COLO_PROGRESS_ENDED], COLO_PROGRESS_WORDS,
        &context->counts[begin ? COLO_COUNT_BEGUN : COLO_COUNT_ENDED],
        begin ? &context->progress[COLO_PROGRESS_COMM] : NULL, what, call->stream);
}

static colo_status_t host_barrier(const struct colo_operation *call, colo_status_t st)
{
    const colo_category_t category = call->c->op.category;
    if ((category != COLO_CATEGORY_LOSS && category != COLO_CATEGORY_HEAD) ||
        !call->connection->nccl || !call->c->share_process)
        return st;
    const colo_error_t why = colo_error_save(); /* a dead control would have its own */
    const uint64_t same = colo_op_pack(&call->c->op) ^ (uint64_t)call->c->op.count * COLO_HASH_INIT;
    colo_status_t together =
        colo_comm_agree(colo_comm_control(call->c), "an operation of the loss", same, st);
    return st < 0 ? colo_error_restore(st, &why) : together;
}

colo_status_t colo_operation_begin(struct colo_operation *call, colo_comm_t *comm,
                                   const colo_subconnection_t *subconnection, colo_stream_t stream)
{
    struct colo_nccl_group *group = comm->impl;
    struct colo_nccl_context *context = group->context;
    char why[900];
    *call = (struct colo_operation){
        .c = comm, .x = group, .f = context, .lib = context->lib, .stream = stream};
    COLO_TRY(check_place(call));
    if (subconnection)
        call->connection = subconnection->connection;
    else
        COLO_TRY(own_link(call));
    COLO_TRY(host_barrier(call, COLO_OK));
    COLO_OPERATION_CUDA(colo_order_follow(context->order, call->capturing, stream));
    pthread_mutex_lock(&call->connection->busy);
    colo_status_t st = COLO_OK;
    if (atomic_load(&call->connection->phase) != COLO_CONNECTION_OK) {
        st = colo_nccl_state(comm, why, sizeof why);
        st = st < 0 ? colo_fail(st, "%s", why)
                    : colo_fail(
                          COLO_ERR_PEER,
                          "%s: the connection of comm '%s' was torn down when another comm of the "
                          "same ranks failed",
                          colo_operation_text(call), comm->name);
    }
    COLO_THEN(st, colo_operation_cuda(call, count_progress(call, true)));
    if (st < 0)
        pthread_mutex_unlock(&call->connection->busy);
    return st;
}

colo_status_t colo_operation_end(struct colo_operation *call, colo_status_t st)
{
    const cudaError_t counted = count_progress(call, false);
    pthread_mutex_unlock(&call->connection->busy);
    COLO_THEN(st, colo_operation_cuda(call, counted)); /* else it keeps its error message */
    COLO_THEN(st, colo_operation_cuda(
                      call, colo_order_lead(call->f->order, call->capturing, call->stream)));
    return host_barrier(call, st);
}

/* ---- memory ---- */

colo_status_t colo_operation_on_device(struct colo_operation *call, const char *name,
                                       const void *memory)
{
    struct cudaPointerAttributes attributes;
    COLO_OPERATION_CUDA(cudaPointerGetAttributes(&attributes, memory));
    COLO_FAIL_IF(attributes.type != cudaMemoryTypeDevice &&
                     attributes.type != cudaMemoryTypeManaged,
                 COLO_ERR_ARG, "%s: %s is host memory; comm '%s' moves memory of CUDA device %d",
                 colo_operation_text(call), name, call->c->name, (int)call->f->device);
    COLO_FAIL_IF(attributes.type == cudaMemoryTypeDevice && attributes.device != call->f->device,
                 COLO_ERR_ARG, "%s: %s is memory of device %d, comm '%s' is on device %d",
                 colo_operation_text(call), name, attributes.device, call->c->name,
                 (int)call->f->device);
    return COLO_OK;
}

colo_status_t colo_operation_stage(struct colo_operation *call, size_t bytes)
{
    COLO_CAPTURE_RELAXED;
    struct colo_nccl_context *context = call->f;
    const bool lent = call->c->stage_bytes > 0 && bytes <= call->c->stage_bytes;
    call->stage = lent ? call->c->stage : context->stage;
    if (lent || bytes <= context->stage_bytes)
        return COLO_OK;
    COLO_FAIL_IF(call->capturing, COLO_ERR_STATE,
                 "%s: needs %zu bytes of staging, %zu are there; run it once before the "
                 "capture",
                 colo_operation_text(call), bytes, context->stage_bytes);
    size_t grown = COLO_STAGE_ALIGN; /* powers of two: with those before, at most twice as much */
    while (grown < bytes)
        grown *= 2;
    void *memory = NULL;
    cudaError_t error = context->nold < (int32_t)(sizeof context->old / sizeof context->old[0])
                            ? cudaMalloc(&memory, grown)
                            : cudaErrorMemoryAllocation;
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return colo_fail(COLO_ERR_NOMEM, "%s: %zu bytes of staging on device %d: %s",
                         colo_operation_text(call), grown, (int)context->device,
                         cudaGetErrorString(error));
    }
    if (context->stage)
        context->old[context->nold++] = context->stage;
    call->stage = context->stage = memory;
    context->stage_bytes = grown;
    return COLO_OK;
}
