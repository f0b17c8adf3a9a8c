/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm-nccl-ops.c - operations between GPUs, each enqueued on the caller's stream.
 *
 * Movement is NCCL's: all-gather, broadcast, grouped send and receive, counted in bytes. A message
 * whose boxes lie back to back is sent from where it is, any other is packed into staging by one
 * launch and unpacked by one launch. Both sides send a message as one, so it does not matter which
 * of them packs; many sends to one peer in a group are slower than packing (gpu-bridge.md). Float
 * reductions are ours: slices are brought together and combined in rank order (kernels/combine.cu),
 * so the bits are those of the host backends, whatever the message size.
 *
 * Nothing is allocated once staging and lists have grown to the largest operation, and nothing at
 * all in a capture. count == 0 enqueues nothing: NCCL would drop it on one rank and not on another.
 *
 * Left to others: arguments and ledger (comm-ops.c), links and failure (comm-nccl.c).
 */
#include "comm/comm-nccl.h"

#include "core/box.h"
#include "core/try.h"
#include "combine.h"
#include "kernels.h"

#include <stdlib.h>

enum { ALIGN = 256, SMALL_REDUCE = 1 << 20 }; /* bytes up to which all ranks reduce everything */

struct run { /* one operation */
    colo_comm_t *c;
    struct colo_nctx *x;
    struct colo_nfamily *f;
    const colo_nccl_lib_t *lib;
    cudaStream_t stream;
    bool capturing;
};

/* ---- begin and end ---- */

static const char *text_of(const struct run *r, char *text, size_t cap)
{
    return colo_op_describe(text, cap, r->c->op, r->c->seq);
}

static colo_status_t nccl_says(const struct run *r, ncclResult_t e)
{
    char what[96];
    return e == ncclSuccess ? COLO_OK : colo_nccl_error(r->lib, text_of(r, what, sizeof what), e);
}

static colo_status_t cuda_says(const struct run *r, cudaError_t e)
{
    char what[96];
    return e == cudaSuccess ? COLO_OK : colo_cuda_error(text_of(r, what, sizeof what), e);
}

#define NCCL(expr) COLO_TRY(nccl_says(r, (expr)))
#define CUDA(expr) COLO_TRY(cuda_says(r, (expr)))

static colo_status_t begin(struct run *r, colo_comm_t *c, colo_stream_t stream)
{
    struct colo_nctx *x = c->impl;
    struct colo_nfamily *f = x->family;
    *r = (struct run){.c = c, .x = x, .f = f, .lib = f->lib, .stream = stream};
    char what[96];
    int now = -1;
    CUDA(cudaGetDevice(&now));
    if (now != f->device)
        return colo_fail(COLO_ERR_ARG,
                         "%s: the current device is %d, comm '%s' was made on device %d",
                         text_of(r, what, sizeof what), now, c->name, (int)f->device);
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    CUDA(cudaStreamIsCapturing(stream, &capture));
    r->capturing = capture != cudaStreamCaptureStatusNone;
    if (f->used && f->last != stream && !r->capturing)
        CUDA(cudaStreamWaitEvent(stream, f->done, 0)); /* staging is shared */
    pthread_mutex_lock(&x->link->busy);
    if (atomic_load(&x->link->phase) == COLO_LINK_OK)
        return COLO_OK;
    pthread_mutex_unlock(&x->link->busy);
    char why[900];
    colo_status_t st = colo_nccl_state(c, why, sizeof why);
    return st < 0 ? colo_fail(st, "%s", why)
                  : colo_fail(COLO_ERR_PEER, "%s: the link of comm '%s' was torn down when another "
                                             "comm of the same ranks failed",
                              text_of(r, what, sizeof what), c->name);
}

static colo_status_t end(struct run *r, colo_status_t st)
{
    pthread_mutex_unlock(&r->x->link->busy);
    if (st == COLO_OK && !r->capturing) {
        st = cuda_says(r, cudaEventRecord(r->f->done, r->stream));
        r->f->last = r->stream;
        r->f->used = true;
    }
    return st;
}

/* Memory of the comm's device? Host memory in a kernel is a fault that nobody survives. */
static colo_status_t on_device(const struct run *r, const char *name, const void *p)
{
    struct cudaPointerAttributes a;
    char what[96];
    CUDA(cudaPointerGetAttributes(&a, p));
    if (a.type != cudaMemoryTypeDevice && a.type != cudaMemoryTypeManaged)
        return colo_fail(COLO_ERR_ARG,
                         "%s: %s is host memory; comm '%s' moves memory of CUDA device %d",
                         text_of(r, what, sizeof what), name, r->c->name, (int)r->f->device);
    if (a.type == cudaMemoryTypeDevice && a.device != r->f->device)
        return colo_fail(COLO_ERR_ARG, "%s: %s is memory of device %d, comm '%s' is on device %d",
                         text_of(r, what, sizeof what), name, a.device, r->c->name,
                         (int)r->f->device);
    return COLO_OK;
}

static size_t padded(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static colo_status_t need_stage(struct run *r, size_t bytes)
{
    struct colo_nfamily *f = r->f;
    char what[96];
    if (bytes <= f->stage_bytes)
        return COLO_OK;
    if (r->capturing)
        return colo_fail(COLO_ERR_STATE,
                         "%s: needs %zu bytes of staging, %zu are there; run it once before the "
                         "capture",
                         text_of(r, what, sizeof what), bytes, f->stage_bytes);
    size_t grown = f->stage_bytes + f->stage_bytes / 2;
    grown = bytes > grown ? bytes : grown;
    void *p = NULL;
    cudaError_t e = f->nold < (int32_t)(sizeof f->old / sizeof f->old[0])
                        ? cudaMalloc(&p, padded(grown))
                        : cudaErrorMemoryAllocation;
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return colo_fail(COLO_ERR_NOMEM, "%s: %zu bytes of staging on device %d: %s",
                         text_of(r, what, sizeof what), grown, (int)f->device,
                         cudaGetErrorString(e));
    }
    if (f->stage)
        f->old[f->nold++] = f->stage;
    f->stage = p;
    f->stage_bytes = grown;
    return COLO_OK;
}

/* ---- collectives ---- */

static cudaError_t copy(const struct run *r, void *to, const void *from, size_t bytes)
{
    return to == from || bytes == 0
               ? cudaSuccess
               : cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, r->stream);
}

static colo_status_t gather_on(struct run *r, const void *send, void *recv, size_t bytes)
{
    COLO_TRY(on_device(r, "send", send));
    COLO_TRY(on_device(r, "recv", recv));
    if (!r->x->link->nccl)
        return cuda_says(r, copy(r, recv, send, bytes));
    NCCL(r->lib->all_gather(send, recv, bytes, ncclInt8, r->x->link->nccl, r->stream));
    return COLO_OK;
}

static colo_status_t nccl_all_gather(colo_comm_t *c, const void *send, void *recv, size_t bytes,
                                     colo_stream_t stream)
{
    struct run r;
    if (bytes == 0)
        return COLO_OK;
    COLO_TRY(begin(&r, c, stream));
    return end(&r, gather_on(&r, send, recv, bytes));
}

static colo_status_t broadcast_on(struct run *r, void *buffer, size_t bytes, int32_t root)
{
    COLO_TRY(on_device(r, "buffer", buffer));
    if (r->x->link->nccl)
        NCCL(r->lib->broadcast(buffer, buffer, bytes, ncclInt8, root, r->x->link->nccl, r->stream));
    return COLO_OK;
}

static colo_status_t nccl_broadcast(colo_comm_t *c, void *buffer, size_t bytes, int32_t root,
                                    colo_stream_t stream)
{
    struct run r;
    if (bytes == 0)
        return COLO_OK;
    COLO_TRY(begin(&r, c, stream));
    return end(&r, broadcast_on(&r, buffer, bytes, root));
}

static colo_status_t barrier_on(struct run *r)
{
    if (r->x->link->nccl)
        NCCL(r->lib->all_reduce(r->f->word, r->f->word, 1, ncclInt32, ncclSum, r->x->link->nccl,
                                r->stream));
    return COLO_OK;
}

static colo_status_t nccl_barrier(colo_comm_t *c, colo_stream_t stream)
{
    struct run r;
    COLO_TRY(begin(&r, c, stream));
    return end(&r, barrier_on(&r));
}

/* ---- reductions ---- */

static int64_t slice_lo(int64_t count, int32_t n, int32_t k)
{
    return count / n * k + (k < count % n ? k : count % n);
}

/* Own slice of everyone's @send, combined into @dst; slices as slice_lo() cuts them. */
static colo_status_t combine_slice(struct run *r, const char *send, void *dst, int64_t count,
                                   colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = r->c->size, me = r->c->rank;
    const int64_t elem = (int64_t)colo_dtype_size(dtype);
    const int64_t lo = slice_lo(count, n, me), mine = slice_lo(count, n, me + 1) - lo;
    const size_t slot = padded((size_t)(mine * elem));
    ncclComm_t nccl = r->x->link->nccl;
    COLO_TRY(need_stage(r, slot * (size_t)n));
    NCCL(r->lib->group_start());
    ncclResult_t e = ncclSuccess;
    for (int32_t k = 0; k < n && e == ncclSuccess; k++) {
        int64_t from = slice_lo(count, n, k), to = slice_lo(count, n, k + 1);
        if (k != me && to > from)
            e = r->lib->send(send + from * elem, (size_t)((to - from) * elem), ncclInt8, k, nccl,
                             r->stream);
        if (k != me && mine > 0 && e == ncclSuccess)
            e = r->lib->recv(r->f->stage + (size_t)k * slot, (size_t)(mine * elem), ncclInt8, k,
                             nccl, r->stream);
    }
    ncclResult_t closed = r->lib->group_end();
    NCCL(e != ncclSuccess ? e : closed);
    return cuda_says(r, colo_k_combine(dst, r->f->stage, (int64_t)slot, send + lo * elem, me, n,
                                       mine, dtype, op, r->stream));
}

/* Everyone's slice of @data to everyone, in place. */
static colo_status_t spread_slices(struct run *r, char *data, int64_t count, int64_t elem)
{
    const int32_t n = r->c->size, me = r->c->rank;
    const int64_t lo = slice_lo(count, n, me), mine = slice_lo(count, n, me + 1) - lo;
    ncclComm_t nccl = r->x->link->nccl;
    if (count % n == 0)
        return nccl_says(r, r->lib->all_gather(data + lo * elem, data, (size_t)(mine * elem),
                                               ncclInt8, nccl, r->stream));
    NCCL(r->lib->group_start());
    ncclResult_t e = ncclSuccess;
    for (int32_t k = 0; k < n && e == ncclSuccess; k++) {
        int64_t from = slice_lo(count, n, k), to = slice_lo(count, n, k + 1);
        if (k == me)
            continue;
        if (mine > 0)
            e = r->lib->send(data + lo * elem, (size_t)(mine * elem), ncclInt8, k, nccl, r->stream);
        if (to > from && e == ncclSuccess)
            e = r->lib->recv(data + from * elem, (size_t)((to - from) * elem), ncclInt8, k, nccl,
                             r->stream);
    }
    ncclResult_t closed = r->lib->group_end();
    NCCL(e != ncclSuccess ? e : closed);
    return COLO_OK;
}

static colo_status_t all_reduce_on(struct run *r, const void *send, void *recv, int64_t count,
                                   colo_dtype_t dtype, colo_redop_t op)
{
    const int32_t n = r->c->size;
    const int64_t elem = (int64_t)colo_dtype_size(dtype), bytes = count * elem;
    COLO_TRY(on_device(r, "send", send));
    COLO_TRY(on_device(r, "recv", recv));
    if (!r->x->link->nccl)
        return cuda_says(r, copy(r, recv, send, (size_t)bytes));
    if (bytes > SMALL_REDUCE / n) {
        char *out = recv;
        COLO_TRY(combine_slice(r, send, out + slice_lo(count, n, r->c->rank) * elem, count, dtype,
                               op));
        return spread_slices(r, out, count, elem);
    }
    COLO_TRY(need_stage(r, (size_t)bytes * (size_t)n));
    NCCL(r->lib->all_gather(send, r->f->stage, (size_t)bytes, ncclInt8, r->x->link->nccl,
                            r->stream));
    return cuda_says(r, colo_k_combine(recv, r->f->stage, bytes, r->f->stage + r->c->rank * bytes,
                                       r->c->rank, n, count, dtype, op, r->stream));
}

static colo_status_t nccl_all_reduce(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                     colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    struct run r;
    if (count == 0)
        return COLO_OK;
    COLO_TRY(begin(&r, c, stream));
    return end(&r, all_reduce_on(&r, send, recv, count, dtype, op));
}

static colo_status_t reduce_scatter_on(struct run *r, const void *send, void *recv, int64_t count,
                                       colo_dtype_t dtype, colo_redop_t op)
{
    COLO_TRY(on_device(r, "send", send));
    COLO_TRY(on_device(r, "recv", recv));
    if (!r->x->link->nccl)
        return cuda_says(r, copy(r, recv, send, (size_t)count * colo_dtype_size(dtype)));
    return combine_slice(r, send, recv, count * r->c->size, dtype, op);
}

static colo_status_t nccl_reduce_scatter(colo_comm_t *c, const void *send, void *recv,
                                         int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                         colo_stream_t stream)
{
    struct run r;
    if (count == 0)
        return COLO_OK;
    COLO_TRY(begin(&r, c, stream));
    return end(&r, reduce_scatter_on(&r, send, recv, count, dtype, op));
}

/* ---- exchange ---- */

static size_t message_bytes(const colo_message_t *m, size_t elem)
{
    size_t n = 0;
    for (int32_t k = 0; k < m->nboxes; k++)
        n += (size_t)colo_box_count(&m->boxes[k]) * elem;
    return n;
}

static bool is_dense(const colo_box_t *box)
{
    int64_t step = 1;
    for (int i = 2; i >= 0; i--) {
        if (box->extent[i] > 1 && box->stride[i] != step)
            return false;
        step *= box->extent[i];
    }
    return true;
}

/* Where a message lies back to back, NULL when it has to be packed. */
static void *in_place(const colo_message_t *m, size_t elem)
{
    char *first = NULL, *next = NULL;
    for (int32_t k = 0; k < m->nboxes; k++) {
        const colo_box_t *box = &m->boxes[k];
        int64_t n = colo_box_count(box);
        if (n == 0)
            continue;
        if (!is_dense(box) || (next && next != (char *)box->data))
            return NULL;
        first = first ? first : box->data;
        next = (char *)box->data + (size_t)n * elem;
    }
    return first;
}

static colo_status_t need_lists(struct run *r, int64_t boxes)
{
    struct colo_nfamily *f = r->f;
    char what[96];
    if (boxes <= f->boxes)
        return COLO_OK;
    colo_box_t *from = malloc((size_t)boxes * sizeof *from);
    colo_box_t *to = malloc((size_t)boxes * sizeof *to);
    if (!from || !to) {
        free(from);
        free(to);
        return colo_fail(COLO_ERR_NOMEM, "%s: lists of %lld boxes", text_of(r, what, sizeof what),
                         (long long)boxes);
    }
    free(f->from);
    free(f->to);
    f->from = from;
    f->to = to;
    f->boxes = boxes;
    return COLO_OK;
}

/* What the packed messages of a list take in staging, from *at on; also counts their boxes. */
static colo_status_t size_up(struct run *r, const colo_message_t *m, int32_t n, size_t elem,
                             size_t *at, int64_t *boxes)
{
    int64_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        for (int32_t k = 0; k < m[i].nboxes; k++)
            if (colo_box_count(&m[i].boxes[k]) > 0) {
                COLO_TRY(on_device(r, "a box", m[i].boxes[k].data));
                break;
            }
        if (in_place(&m[i], elem))
            continue;
        *at += padded(message_bytes(&m[i], elem));
        count += m[i].nboxes;
    }
    *boxes = count > *boxes ? count : *boxes;
    return COLO_OK;
}

/* Entry @at of the lists: a box and its place in staging. Returns how many entries it took. */
static int stage_box(struct colo_nfamily *f, const colo_box_t *box, size_t elem, int64_t at,
                     size_t *offset)
{
    const int64_t *e = box->extent, n = colo_box_count(box);
    f->from[at] = *box;
    f->to[at] = (colo_box_t){.data = f->stage + *offset,
                             .extent = {e[0], e[1], e[2]},
                             .stride = {e[1] * e[2], e[2], 1}};
    *offset += (size_t)n * elem;
    return n > 0;
}

/* Copies boxes to (@pack) or from staging, which lies at @at as size_up() counted; one launch. */
static colo_status_t shuttle(struct run *r, const colo_message_t *m, int32_t n, size_t elem,
                             size_t at, bool pack)
{
    struct colo_nfamily *f = r->f;
    int64_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        if (in_place(&m[i], elem))
            continue;
        size_t offset = at;
        for (int32_t k = 0; k < m[i].nboxes; k++)
            count += stage_box(f, &m[i].boxes[k], elem, count, &offset);
        at += padded(offset - at);
    }
    return cuda_says(r, colo_k_boxes_copy(pack ? f->to : f->from, pack ? f->from : f->to, count,
                                          elem, r->stream));
}

static colo_status_t group_on(struct run *r, const colo_message_t *sends, int32_t nsends,
                              const colo_message_t *recvs, int32_t nrecvs, size_t elem)
{
    ncclComm_t nccl = r->x->link->nccl;
    ncclResult_t e = ncclSuccess;
    size_t at = 0;
    NCCL(r->lib->group_start());
    for (int32_t i = 0; i < nsends + nrecvs && e == ncclSuccess; i++) {
        const colo_message_t *m = i < nsends ? &sends[i] : &recvs[i - nsends];
        const size_t bytes = message_bytes(m, elem);
        void *data = in_place(m, elem);
        if (bytes == 0)
            continue;
        if (!data) {
            data = r->f->stage + at;
            at += padded(bytes);
        }
        e = i < nsends ? r->lib->send(data, bytes, ncclInt8, m->peer, nccl, r->stream)
                       : r->lib->recv(data, bytes, ncclInt8, m->peer, nccl, r->stream);
    }
    ncclResult_t closed = r->lib->group_end(); /* also after an error: the depth must be 0 again */
    NCCL(e != ncclSuccess ? e : closed);
    return COLO_OK;
}

static colo_status_t exchange_on(struct run *r, const colo_message_t *sends, int32_t nsends,
                                 const colo_message_t *recvs, int32_t nrecvs, size_t elem)
{
    size_t packed = 0, total = 0;
    int64_t boxes = 0;
    COLO_TRY(size_up(r, sends, nsends, elem, &packed, &boxes));
    total = packed;
    COLO_TRY(size_up(r, recvs, nrecvs, elem, &total, &boxes));
    COLO_TRY(need_stage(r, total));
    COLO_TRY(need_lists(r, boxes));
    if (packed > 0)
        COLO_TRY(shuttle(r, sends, nsends, elem, 0, true));
    COLO_TRY(group_on(r, sends, nsends, recvs, nrecvs, elem));
    return total > packed ? shuttle(r, recvs, nrecvs, elem, packed, false) : COLO_OK;
}

static colo_status_t nccl_exchange(colo_comm_t *c, const colo_message_t *sends, int32_t nsends,
                                   const colo_message_t *recvs, int32_t nrecvs, colo_dtype_t dtype,
                                   colo_stream_t stream)
{
    struct run r;
    if (nsends == 0 && nrecvs == 0)
        return COLO_OK;
    COLO_TRY(begin(&r, c, stream));
    return end(&r, exchange_on(&r, sends, nsends, recvs, nrecvs, colo_dtype_size(dtype)));
}

/* ---- warming up ---- */

const char *colo_nccl_warm(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank, int32_t n,
                           cudaStream_t stream, char *room, size_t room_bytes)
{
    static const size_t sizes[] = {1, 2, 4, 8};
    char *half = room + room_bytes / 2;
    ncclResult_t e = ncclSuccess;
    if (cudaMemsetAsync(room, 0, room_bytes, stream) != cudaSuccess ||
        colo_k_combine_load() != cudaSuccess)
        return cudaGetErrorString(cudaGetLastError());
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) { /* dense, gaps, misaligned */
        colo_box_t a = {.data = room, .extent = {1, 3, 16}, .stride = {48, 16, 1}}, b = a;
        b.data = half;
        b.stride[1] = 18;
        cudaError_t first = colo_k_boxes_copy(&b, &a, 1, sizes[i], stream);
        b.stride[2] = 2;
        cudaError_t second = colo_k_boxes_copy(&b, &a, 1, sizes[i], stream);
        if (first != cudaSuccess || second != cudaSuccess)
            return cudaGetErrorString(first != cudaSuccess ? first : second);
    }
    if (!nccl)
        return NULL;
    e = lib->all_gather(room, half, 16, ncclInt8, nccl, stream);
    if (e == ncclSuccess)
        e = lib->all_reduce(room, room, 1, ncclInt32, ncclSum, nccl, stream);
    if (e == ncclSuccess)
        e = lib->broadcast(room, room, 16, ncclInt8, 0, nccl, stream);
    if (e == ncclSuccess)
        e = lib->group_start();
    for (int32_t k = 0; k < n && e == ncclSuccess; k++)
        if (k != rank) {
            e = lib->send(room, 16, ncclInt8, k, nccl, stream);
            if (e == ncclSuccess)
                e = lib->recv(half + 16 * k, 16, ncclInt8, k, nccl, stream);
        }
    if (e == ncclSuccess)
        e = lib->group_end();
    return e == ncclSuccess ? NULL : lib->error_string(e);
}

const colo_comm_ops_t colo_comm_nccl_ops = {
    .name = "nccl",
    .abi = COLO_COMM_ABI,
    .all_gather = nccl_all_gather,
    .all_reduce = nccl_all_reduce,
    .reduce_scatter = nccl_reduce_scatter,
    .broadcast = nccl_broadcast,
    .barrier = nccl_barrier,
    .exchange = nccl_exchange,
    .subset = colo_nccl_subset,
    .fail = colo_nccl_fail,
    .state = colo_nccl_state,
    .destroy = colo_nccl_destroy,
};
