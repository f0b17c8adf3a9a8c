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

/* ---- collectives ---- */

static cudaError_t copy(const struct colo_operation *r, void *to, const void *from, size_t bytes)
{
    return to == from || bytes == 0
               ? cudaSuccess
               : cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, r->stream);
}

static colo_status_t gather_on(struct colo_operation *r, const void *send, void *recv, size_t bytes,
                               const struct colo_gather *g)
{
    COLO_TRY(colo_operation_on_device(r, "send", send));
    COLO_TRY(colo_operation_on_device(r, "recv", recv));
    if (!r->connection->nccl)
        return colo_operation_cuda(r, copy(r, recv, send, bytes));
    if (g->id >= 0)
        return colo_operation_cuda(r, colo_gather_copy(r->c, g, recv, bytes, r->stream));
    COLO_NCCL(r->lib->all_gather(send, recv, bytes, ncclInt8, r->connection->nccl, r->stream));
    return COLO_OK;
}

static colo_status_t nccl_all_gather(colo_comm_t *c, const void *send, void *recv, size_t bytes,
                                     colo_stream_t stream)
{
    struct colo_operation r;
    struct colo_gather g;
    if (bytes == 0)
        return COLO_OK;
    COLO_TRY(colo_gather_plan(c, send, recv, bytes, stream, &g));
    COLO_TRY(colo_operation_begin(&r, c, NULL, stream));
    return colo_operation_end(&r, gather_on(&r, send, recv, bytes, &g));
}

static colo_status_t broadcast_on(struct colo_operation *r, void *buffer, size_t bytes,
                                  int32_t root)
{
    COLO_TRY(colo_operation_on_device(r, "buffer", buffer));
    if (r->connection->nccl)
        COLO_NCCL(r->lib->broadcast(buffer, buffer, bytes, ncclInt8, root, r->connection->nccl,
                                    r->stream));
    return COLO_OK;
}

static colo_status_t nccl_broadcast(colo_comm_t *c, void *buffer, size_t bytes, int32_t root,
                                    colo_stream_t stream)
{
    struct colo_operation r;
    if (bytes == 0)
        return COLO_OK;
    COLO_TRY(colo_operation_begin(&r, c, NULL, stream));
    return colo_operation_end(&r, broadcast_on(&r, buffer, bytes, root));
}

static colo_status_t barrier_on(struct colo_operation *r)
{
    int64_t *word = &r->f->counts[COLO_COUNT_BARRIER];
    if (r->connection->nccl)
        COLO_NCCL(
            r->lib->all_reduce(word, word, 1, ncclInt32, ncclSum, r->connection->nccl, r->stream));
    return COLO_OK;
}

static colo_status_t nccl_barrier(colo_comm_t *c, colo_stream_t stream)
{
    struct colo_operation r;
    COLO_TRY(colo_operation_begin(&r, c, NULL, stream));
    return colo_operation_end(&r, barrier_on(&r));
}

/* ---- reductions ---- */

/* Part [at, at + step) of each slice: of the own one, all ranks' @send are combined into @dst. */
static colo_status_t combine_window(struct colo_operation *r, const char *send, char *dst,
                                    int64_t count, int64_t offset, int64_t step, colo_dtype_t dtype,
                                    colo_redop_t op)
{
    const int32_t n = r->c->size, me = r->c->rank;
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    const size_t part = colo_stage_padded((size_t)(step * elem));
    int64_t own = 0, mine = 0;
    ncclResult_t e = ncclSuccess;
    COLO_TRY(colo_operation_stage(r, part * (size_t)n));
    COLO_NCCL(r->lib->group_start());
    for (int32_t k = 0; k < n; k++) {
        const int64_t from = colo_reduce_slice(count, n, k) + offset;
        const int64_t left = colo_reduce_slice(count, n, k + 1) - from;
        if (k == me) {
            own = from;
            mine = left < step ? left : step;
        } else if (left > 0 && e == ncclSuccess) {
            e = r->lib->send(send + from * elem, (size_t)((left < step ? left : step) * elem),
                             ncclInt8, k, r->connection->nccl, r->stream);
        }
    }
    for (int32_t k = 0; k < n && mine > 0 && e == ncclSuccess; k++)
        if (k != me)
            e = r->lib->recv(r->stage + (size_t)k * part, (size_t)(mine * elem), ncclInt8, k,
                             r->connection->nccl, r->stream);
    ncclResult_t closed = r->lib->group_end();
    COLO_NCCL(e != ncclSuccess ? e : closed);
    if (mine <= 0)
        return COLO_OK;
    return colo_operation_cuda(r, colo_k_combine(dst + offset * elem, r->stage, (int64_t)part,
                                                 send + own * elem, me, n, mine, dtype, op,
                                                 r->stream));
}

/* Own slice of all ranks' @send, combined into @dst; slices as colo_reduce_slice() cuts them. */
static colo_status_t combine_slice(struct colo_operation *r, const char *send, char *dst,
                                   int64_t count, colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = r->c->size;
    const int64_t longest = count / n + (count % n > 0);
    const int64_t bytes_each = WINDOW / n / COLO_STAGE_ALIGN * COLO_STAGE_ALIGN;
    const int64_t most = bytes_each / (int64_t)colo_dtype_size(dtype);
    const int64_t step = longest < most ? longest : most;
    for (int64_t offset = 0; offset < longest; offset += step)
        COLO_TRY(combine_window(r, send, dst, count, offset, step, dtype, op));
    return COLO_OK;
}

static size_t nccl_reduction_stage(const colo_comm_t *c, size_t bytes)
{
    const size_t n = (size_t)c->size, longest = bytes / n + sizeof(double),
                 most = WINDOW / n / COLO_STAGE_ALIGN * COLO_STAGE_ALIGN,
                 slices = colo_stage_padded(longest < most ? longest : most) * n,
                 whole = bytes <= SMALL_REDUCE / n ? bytes * n : 0;
    return n == 1 ? 0 : slices > whole ? slices : whole;
}

/* Each rank's slice of @data to all ranks, in place. */
static colo_status_t broadcast_slices(struct colo_operation *r, char *data, int64_t count,
                                      int64_t elem)
{
    const int32_t n = r->c->size, me = r->c->rank;
    const int64_t lo = colo_reduce_slice(count, n, me),
                  mine = colo_reduce_slice(count, n, me + 1) - lo;
    ncclComm_t nccl = r->connection->nccl;
    if (count % n == 0)
        return colo_operation_nccl(r,
                                   r->lib->all_gather(data + lo * elem, data, (size_t)(mine * elem),
                                                      ncclInt8, nccl, r->stream));
    COLO_NCCL(r->lib->group_start());
    ncclResult_t e = ncclSuccess;
    for (int32_t k = 0; k < n && e == ncclSuccess; k++) {
        int64_t from = colo_reduce_slice(count, n, k), to = colo_reduce_slice(count, n, k + 1);
        if (k == me)
            continue;
        if (mine > 0)
            e = r->lib->send(data + lo * elem, (size_t)(mine * elem), ncclInt8, k, nccl, r->stream);
        if (to > from && e == ncclSuccess)
            e = r->lib->recv(data + from * elem, (size_t)((to - from) * elem), ncclInt8, k, nccl,
                             r->stream);
    }
    ncclResult_t closed = r->lib->group_end();
    COLO_NCCL(e != ncclSuccess ? e : closed);
    return COLO_OK;
}

static colo_status_t all_reduce_on(struct colo_operation *r, const void *send, void *recv,
                                   int64_t count, colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = r->c->size;
    const int64_t elem = (int64_t)colo_dtype_size(dtype), bytes = count * elem;
    COLO_TRY(colo_operation_on_device(r, "send", send));
    COLO_TRY(colo_operation_on_device(r, "recv", recv));
    if (!r->connection->nccl)
        return colo_operation_cuda(r, copy(r, recv, send, (size_t)bytes));
    if (bytes > SMALL_REDUCE / n) {
        char *out = recv;
        COLO_TRY(combine_slice(r, send, out + colo_reduce_slice(count, n, r->c->rank) * elem, count,
                               dtype, op));
        return broadcast_slices(r, out, count, elem);
    }
    COLO_TRY(colo_operation_stage(r, (size_t)bytes * (size_t)n));
    COLO_NCCL(r->lib->all_gather(send, r->stage, (size_t)bytes, ncclInt8, r->connection->nccl,
                                 r->stream));
    return colo_operation_cuda(r,
                               colo_k_combine(recv, r->stage, bytes, r->stage + r->c->rank * bytes,
                                              r->c->rank, n, count, dtype, op, r->stream));
}

static colo_status_t nccl_all_reduce(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                     colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    struct colo_operation r;
    if (count == 0)
        return COLO_OK;
    COLO_TRY(colo_operation_begin(&r, c, NULL, stream));
    return colo_operation_end(&r, all_reduce_on(&r, send, recv, count, dtype, op));
}

static colo_status_t reduce_scatter_on(struct colo_operation *r, const void *send, void *recv,
                                       int64_t count, colo_dtype_t dtype, colo_redop_t op)
{
    COLO_TRY(colo_operation_on_device(r, "send", send));
    COLO_TRY(colo_operation_on_device(r, "recv", recv));
    if (!r->connection->nccl)
        return colo_operation_cuda(r, copy(r, recv, send, (size_t)count * colo_dtype_size(dtype)));
    return combine_slice(r, send, recv, count * r->c->size, dtype, op);
}

static colo_status_t nccl_reduce_scatter(colo_comm_t *c, const void *send, void *recv,
                                         int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                         colo_stream_t stream)
{
    struct colo_operation r;
    if (count == 0)
        return COLO_OK;
    COLO_TRY(colo_operation_begin(&r, c, NULL, stream));
    return colo_operation_end(&r, reduce_scatter_on(&r, send, recv, count, dtype, op));
}

/* ---- warming up ---- */

/* Until the stream is empty, or the caller has gone: what the stream waits for may never come. */
static cudaError_t wait_for(cudaStream_t stream, const struct colo_abandon *abandon)
{
    cudaError_t e;
    while ((e = cudaStreamQuery(stream)) == cudaErrorNotReady && !abandon->is_set) {
        (void)cudaGetLastError();
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return e;
}

/* The first launch of a kernel may wait for the whole device (memory for its stack), so nothing of
 * ours should still be waiting there for a rank that shares it. */
static ncclResult_t finish(ncclResult_t e, cudaStream_t stream, const struct colo_abandon *abandon)
{
    if (e == ncclSuccess)
        (void)wait_for(stream, abandon); /* its error comes back with what is next */
    return e == ncclSuccess && abandon->is_set ? ncclInternalError : e;
}

static ncclResult_t warm_messages(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank,
                                  int32_t n, cudaStream_t stream, char *memory, char *half)
{
    ncclResult_t e = lib->group_start();
    if (e != ncclSuccess)
        return e;
    for (int32_t k = 0; k < n && e == ncclSuccess; k++)
        if (k != rank) {
            e = lib->send(memory, 16, ncclInt8, k, nccl, stream);
            if (e == ncclSuccess)
                e = lib->recv(half + 16 * k, 16, ncclInt8, k, nccl, stream);
        }
    ncclResult_t closed = lib->group_end();
    return e != ncclSuccess ? e : closed;
}

static const char *warm_on(cudaStream_t stream, const colo_nccl_lib_t *lib, ncclComm_t nccl,
                           int32_t rank, int32_t n, char *memory, size_t memory_bytes,
                           const struct colo_abandon *abandon)
{
    const colo_ops_t *ops = NULL;
    char *half = memory + memory_bytes / 2;
    ncclResult_t e = ncclSuccess;
    if (cudaMemsetAsync(memory, 0, memory_bytes, stream) != cudaSuccess ||
        colo_k_load() != cudaSuccess)
        return cudaGetErrorString(cudaGetLastError());
    if (colo_ops_for(COLO_CUDA, &ops) == COLO_OK && ops->load() < 0)
        return colo_last_error();
    if (!nccl)
        return NULL;
    e = finish(lib->all_gather(memory, half, 16, ncclInt8, nccl, stream), stream, abandon);
    if (e == ncclSuccess)
        e = finish(lib->all_reduce(memory, memory, 1, ncclInt32, ncclSum, nccl, stream), stream,
                   abandon);
    if (e == ncclSuccess)
        e = finish(lib->broadcast(memory, memory, 16, ncclInt8, 0, nccl, stream), stream, abandon);
    if (e == ncclSuccess)
        e = warm_messages(lib, nccl, rank, n, stream, memory, half);
    return e == ncclSuccess ? NULL : lib->error_string(e);
}

const char *colo_nccl_warm(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank, int32_t n,
                           char *memory, size_t memory_bytes, const struct colo_abandon *abandon)
{
    cudaStream_t stream;
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e != cudaSuccess)
        return cudaGetErrorString(e);
    const char *why = warm_on(stream, lib, nccl, rank, n, memory, memory_bytes, abandon);
    if (!why && (e = wait_for(stream, abandon)) != cudaSuccess)
        why = cudaGetErrorString(e);
    cudaStreamDestroy(stream);
    return why;
}

const colo_comm_ops_t colo_comm_nccl_ops = {
    .name = "nccl",
    .abi = COLO_COMM_ABI,
    .all_gather = nccl_all_gather,
    .all_reduce = nccl_all_reduce,
    .reduce_scatter = nccl_reduce_scatter,
    .reduction_stage = nccl_reduction_stage,
    .broadcast = nccl_broadcast,
    .barrier = nccl_barrier,
    .exchange = colo_nccl_exchange,
    .subset = colo_nccl_subset,
    .connect = colo_nccl_connect,
    .fail = colo_nccl_fail,
    .state = colo_nccl_state,
    .destroy = colo_nccl_destroy,
    .subconnection_create = colo_nccl_subconnection_create,
    .subconnection_destroy = colo_nccl_subconnection_destroy,
    .subconnection_stage = colo_nccl_subconnection_stage,
    .peer = &colo_peer_table,
    .create = colo_nccl_create,
};
