/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collectives.c - collectives between GPUs, each enqueued on the caller's stream.
 *
 * Movement is NCCL's: all-gather, broadcast, grouped send and receive, counted in bytes; a head
 * that is gathered into registered memory is copied by allgather.c. Float reductions are
 * ours: slices are brought together and combined in rank order (kernels/combine.cu), so the bits
 * are those of the host backends, whatever the message size.
 *
 * Reductions go in windows of at most 64 MiB of staging, the caller's or the context's. Nothing is
 * allocated once the latter has grown to the largest window, and nothing at all in a capture. count
 * == 0 enqueues nothing: NCCL would drop it on one rank and not on another.
 *
 * Left to others: arguments and statistics (comm/collectives.c), messages (nccl/exchange.c), what
 * all operations do first and last (operation.c), connections and failure (connection.c,
 * watchdog.c).
 */
#include "comm/nccl/comm.h"

#include "comm/reduce.h"

#include "core/device.h"
#include "core/error.h"
#include "combine.h"
#include "load.h"

#include <time.h>

enum {
    SMALL_REDUCE = 1 << 20, /* bytes up to which all ranks reduce everything */
    WINDOW = 64 << 20       /* bytes of staging: all ranks' values of a part of a slice */
};

/* ---- reductions ---- */

/* Part [@offset, @offset + @length) of each slice: of the own one, all ranks' @send are combined
 * into @dst. */
static colo_status_t combine_window(struct colo_operation *call, const char *send, char *dst,
                                    int64_t count, int64_t offset, int64_t length,
                                    colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = call->c->size, me = call->c->rank;
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    const size_t part = colo_stage_padded((size_t)(length * elem));
    int64_t own = 0, mine = 0;
    ncclResult_t error = ncclSuccess;
    COLO_TRY(colo_operation_stage(call, part * (size_t)n));
    COLO_NCCL(call->lib->group_start());
    for (int32_t k = 0; k < n; k++) {
        const int64_t from = colo_reduce_slice(count, n, k) + offset;
        const int64_t left = colo_reduce_slice(count, n, k + 1) - from;
        if (k == me) {
            own = from;
            mine = left < length ? left : length;
        } else if (left > 0 && error == ncclSuccess) {
            error = call->lib->send(send + from * elem,
                                    (size_t)((left < length ? left : length) * elem), ncclInt8, k,
                                    call->connection->nccl, call->stream);
        }
    }
    for (int32_t k = 0; k < n && mine > 0 && error == ncclSuccess; k++)
        if (k != me)
            error = call->lib->recv(call->stage + (size_t)k * part, (size_t)(mine * elem), ncclInt8,
                                    k, call->connection->nccl, call->stream);
    ncclResult_t closed = call->lib->group_end();
    COLO_NCCL(error != ncclSuccess ? error : closed);
    if (mine <= 0)
        return COLO_OK;
    return colo_operation_cuda(call, colo_k_combine(dst + offset * elem, call->stage, (int64_t)part,
                                                    send + own * elem, me, n, mine, dtype, op,
                                                    call->stream));
}

/* Own slice of all ranks' @send, combined into @dst; slices as colo_reduce_slice() cuts them. */
static colo_status_t combine_slice(struct colo_operation *call, const char *send, char *dst,
                                   int64_t count, colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = call->c->size;
    const int64_t longest = count / n + (count % n > 0);
    const int64_t bytes_each = WINDOW / n / COLO_STAGE_ALIGN * COLO_STAGE_ALIGN;
    const int64_t most = bytes_each / (int64_t)colo_dtype_size(dtype);
    const int64_t length = longest < most ? longest : most;
    for (int64_t offset = 0; offset < longest; offset += length)
        COLO_TRY(combine_window(call, send, dst, count, offset, length, dtype, op));
    return COLO_OK;
}

static size_t nccl_reduction_stage(const colo_comm_t *comm, size_t bytes)
{
    const size_t n = (size_t)comm->size, longest = bytes / n + sizeof(double),
                 most = WINDOW / n / COLO_STAGE_ALIGN * COLO_STAGE_ALIGN,
                 slices = colo_stage_padded(longest < most ? longest : most) * n,
                 uncut = bytes <= SMALL_REDUCE / n ? bytes * n : 0;
    return n == 1 ? 0 : slices > uncut ? slices : uncut;
}

/* Each rank's slice of @data to all ranks, in place. */
static colo_status_t broadcast_slices(struct colo_operation *call, char *data, int64_t count,
                                      int64_t elem)
{
    const int32_t n = call->c->size, me = call->c->rank;
    const int64_t lo = colo_reduce_slice(count, n, me),
                  mine = colo_reduce_slice(count, n, me + 1) - lo;
    ncclComm_t nccl = call->connection->nccl;
    if (count % n == 0)
        return colo_operation_nccl(call, call->lib->all_gather(data + lo * elem, data,
                                                               (size_t)(mine * elem), ncclInt8,
                                                               nccl, call->stream));
    COLO_NCCL(call->lib->group_start());
    ncclResult_t error = ncclSuccess;
    for (int32_t k = 0; k < n && error == ncclSuccess; k++) {
        int64_t from = colo_reduce_slice(count, n, k), to = colo_reduce_slice(count, n, k + 1);
        if (k == me)
            continue;
        if (mine > 0)
            error = call->lib->send(data + lo * elem, (size_t)(mine * elem), ncclInt8, k, nccl,
                                    call->stream);
        if (to > from && error == ncclSuccess)
            error = call->lib->recv(data + from * elem, (size_t)((to - from) * elem), ncclInt8, k,
                                    nccl, call->stream);
    }
    ncclResult_t closed = call->lib->group_end();
    COLO_NCCL(error != ncclSuccess ? error : closed);
    return COLO_OK;
}

/* Messages up to SMALL_REDUCE at once, of all ranks' values; others by slices. */
static colo_status_t all_reduce(struct colo_operation *call, const void *send, char *recv,
                                int64_t count, colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = call->c->size, me = call->c->rank;
    const int64_t elem = (int64_t)colo_dtype_size(dtype), bytes = count * elem;
    if (bytes > SMALL_REDUCE / n) {
        char *own = recv + colo_reduce_slice(count, n, me) * elem;
        COLO_TRY(combine_slice(call, send, own, count, dtype, op));
        return broadcast_slices(call, recv, count, elem);
    }
    COLO_TRY(colo_operation_stage(call, (size_t)bytes * (size_t)n));
    COLO_NCCL(call->lib->all_gather(send, call->stage, (size_t)bytes, ncclInt8,
                                    call->connection->nccl, call->stream));
    return colo_operation_cuda(call,
                               colo_k_combine(recv, call->stage, bytes, call->stage + me * bytes,
                                              me, n, count, dtype, op, call->stream));
}

/* ---- the operation ---- */

static colo_status_t run(struct colo_operation *call, const void *send, void *recv,
                         const struct colo_gather *from_peers)
{
    const colo_op_desc_t op = call->c->op;
    const colo_redop_t redop = (colo_redop_t)op.param;
    const size_t bytes = (size_t)op.count * colo_dtype_size(op.dtype);
    ncclComm_t nccl = call->connection->nccl; /* NULL: of one rank */
    if (op.kind == COLO_OP_BARRIER)
        send = recv = &call->f->counts[COLO_COUNT_BARRIER];
    else if (op.kind != COLO_OP_BROADCAST)
        COLO_TRY(colo_operation_on_device(call, "send", send));
    if (op.kind != COLO_OP_BARRIER)
        COLO_TRY(colo_operation_on_device(call, send ? "recv" : "buffer", recv));
    if (!nccl)
        return !send || recv == send
                   ? COLO_OK
                   : colo_operation_cuda(call,
                                         cudaMemcpyAsync(recv, send, bytes,
                                                         cudaMemcpyDeviceToDevice, call->stream));
    switch (op.kind) {
    case COLO_OP_ALL_GATHER:
        if (from_peers->id >= 0)
            return colo_operation_cuda(
                call, colo_gather_copy(call->c, from_peers, recv, bytes, call->stream));
        COLO_NCCL(call->lib->all_gather(send, recv, bytes, ncclInt8, nccl, call->stream));
        break;
    case COLO_OP_BROADCAST:
        COLO_NCCL(call->lib->broadcast(recv, recv, bytes, ncclInt8, op.param, nccl, call->stream));
        break;
    case COLO_OP_ALL_REDUCE:
        return all_reduce(call, send, recv, op.count, op.dtype, redop);
    case COLO_OP_REDUCE_SCATTER:
        return combine_slice(call, send, recv, op.count * call->c->size, op.dtype, redop);
    case COLO_OP_BARRIER:
        COLO_NCCL(call->lib->all_reduce(send, recv, 1, ncclInt32, ncclSum, nccl, call->stream));
        break;
    case COLO_OP_EXCHANGE: /* exchange.c's */
    case COLO_OP_SPLIT:    /* the control's */
    case COLO_OP_COUNT:
        break;
    }
    return COLO_OK;
}

static colo_status_t nccl_collective(colo_comm_t *comm, const void *send, void *recv,
                                     colo_stream_t stream)
{
    const colo_op_desc_t op = comm->op;
    struct colo_operation call;
    struct colo_gather from_peers = {.id = -1};
    if (op.count == 0 && op.kind != COLO_OP_BARRIER)
        return COLO_OK;
    if (op.kind == COLO_OP_ALL_GATHER)
        COLO_TRY(colo_gather_plan(comm, send, recv, (size_t)op.count * colo_dtype_size(op.dtype),
                                  stream, &from_peers));
    COLO_TRY(colo_operation_begin(&call, comm, NULL, stream));
    return colo_operation_end(&call, run(&call, send, recv, &from_peers));
}

/* ---- warming up ---- */

/* Until the stream is empty, or the caller has gone: what the stream waits for may never come. */
static cudaError_t wait_for(cudaStream_t stream, const struct colo_abandon *abandon)
{
    cudaError_t error;
    while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady && !abandon->is_set) {
        (void)cudaGetLastError();
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return error;
}

/* The first launch of a kernel may wait for the whole device (memory for its stack), so nothing of
 * ours should still be waiting there for a rank that shares it. */
static ncclResult_t finish(ncclResult_t error, cudaStream_t stream,
                           const struct colo_abandon *abandon)
{
    if (error == ncclSuccess)
        (void)wait_for(stream, abandon); /* its error comes back with what is next */
    return error == ncclSuccess && abandon->is_set ? ncclInternalError : error;
}

static ncclResult_t warm_messages(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank,
                                  int32_t n, cudaStream_t stream, char *memory, char *half)
{
    ncclResult_t error = lib->group_start();
    if (error != ncclSuccess)
        return error;
    for (int32_t k = 0; k < n && error == ncclSuccess; k++)
        if (k != rank) {
            error = lib->send(memory, 16, ncclInt8, k, nccl, stream);
            COLO_THEN(error, lib->recv(half + 16 * k, 16, ncclInt8, k, nccl, stream));
        }
    ncclResult_t closed = lib->group_end();
    return error != ncclSuccess ? error : closed;
}

static const char *warm_on(cudaStream_t stream, const colo_nccl_lib_t *lib, ncclComm_t nccl,
                           int32_t rank, int32_t n, char *memory, size_t memory_bytes,
                           const struct colo_abandon *abandon)
{
    const colo_device_t *device = NULL;
    char *half = memory + memory_bytes / 2;
    ncclResult_t error = ncclSuccess;
    if (cudaMemsetAsync(memory, 0, memory_bytes, stream) != cudaSuccess ||
        colo_k_load() != cudaSuccess)
        return cudaGetErrorString(cudaGetLastError());
    if (colo_device_for(COLO_MEM_CUDA, &device) == COLO_OK && device->load() < 0)
        return colo_last_error();
    if (!nccl)
        return NULL;
    error = finish(lib->all_gather(memory, half, 16, ncclInt8, nccl, stream), stream, abandon);
    COLO_THEN(error, finish(lib->all_reduce(memory, memory, 1, ncclInt32, ncclSum, nccl, stream),
                            stream, abandon));
    COLO_THEN(error, finish(lib->broadcast(memory, memory, 16, ncclInt8, 0, nccl, stream), stream,
                            abandon));
    COLO_THEN(error, warm_messages(lib, nccl, rank, n, stream, memory, half));
    return error == ncclSuccess ? NULL : lib->error_string(error);
}

const char *colo_nccl_warm(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank, int32_t n,
                           char *memory, size_t memory_bytes, const struct colo_abandon *abandon)
{
    cudaStream_t stream;
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess)
        return cudaGetErrorString(error);
    const char *why = warm_on(stream, lib, nccl, rank, n, memory, memory_bytes, abandon);
    if (!why && (error = wait_for(stream, abandon)) != cudaSuccess)
        why = cudaGetErrorString(error);
    cudaStreamDestroy(stream);
    return why;
}

const colo_comm_backend_t colo_comm_nccl_backend = {
    .name = "nccl",
    .collective = nccl_collective,
    .reduction_stage = nccl_reduction_stage,
    .exchange = colo_nccl_exchange,
    .subset = colo_nccl_subset,
    .connect = colo_nccl_connect,
    .fail = colo_nccl_fail,
    .state = colo_nccl_state,
    .destroy = colo_nccl_destroy,
    .subconnection_create = colo_nccl_subconnection_create,
    .subconnection_destroy = colo_nccl_subconnection_destroy,
    .subconnection_stage = colo_nccl_subconnection_stage,
    .direct = &colo_direct_table,
    .create = colo_nccl_create,
};
