/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - the table of CUDA devices; with the kernels, libcolobridge-cuda.so.
 *
 * Decides two things. A pointer that no kernel on the current device can use (pageable host
 * memory, another device's memory) is COLO_ERR_ARG here instead of a fault on the device that would
 * end every later call of the process; pinned host memory is accepted, kernels reach it. A
 * cudaError_t becomes a status and an error message, in one place.
 *
 * The current device is the caller's business: streams belong to it. Only alloc and free allocate
 * or wait; everything else here may be captured in a graph. The maths is in kernels/.
 */
#include "cuda/device.h"

#include "capture.h"
#include "core/helper.h"
#include "kernels.h"
#include "load.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(COLO_K_ADDENDS == COLO_MAX_ADDENDS, "the kernel takes what the table declares");

/* ---- statuses ---- */

static colo_status_t status_of(cudaError_t e)
{
    switch (e) {
    case cudaSuccess:
        return COLO_OK;
    case cudaErrorMemoryAllocation:
        return COLO_ERR_NOMEM;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
        return COLO_ERR_UNBUILT;
    default:
        return COLO_ERR_CUDA;
    }
}

colo_status_t colo_cuda_report(cudaError_t e, const char *what)
{
    int device = -1;
    if (e == cudaSuccess)
        return COLO_OK;
    cudaGetDevice(&device);
    cudaGetLastError(); /* the caller's next check is about the caller's next call */
    return colo_fail(status_of(e), "%s: CUDA says %s (%s) on device %d", what, cudaGetErrorName(e),
                     cudaGetErrorString(e), device);
}

/* ---- pointers ---- */

static cudaError_t current_device(colo_queries_t *q)
{
    int device = -1;
    cudaError_t e = q->known ? cudaSuccess : cudaGetDevice(&device);
    if (!q->known && e == cudaSuccess)
        *q = (colo_queries_t){.known = true, .device = device};
    return e;
}

/* NULL is on no device: the kernels do not read what may be NULL. */
colo_status_t colo_cuda_pointer(colo_queries_t *q, const void *p, const char *what)
{
    enum { MOST = sizeof q->seen / sizeof *q->seen };
    struct cudaPointerAttributes a;
    if (!p)
        return COLO_OK;
    for (int32_t i = 0; i < q->n; i++)
        if (q->seen[i] == p)
            return COLO_OK;
    cudaError_t e = current_device(q);
    if (e == cudaSuccess)
        e = cudaPointerGetAttributes(&a, p);
    if (e != cudaSuccess)
        return colo_cuda_report(e, what);
    if (a.type == cudaMemoryTypeUnregistered)
        return colo_fail(COLO_ERR_ARG,
                         "%s: %p is host memory that CUDA does not know, expected memory "
                         "of device %d",
                         what, p, (int)q->device);
    if (a.type == cudaMemoryTypeDevice && a.device != q->device)
        return colo_fail(COLO_ERR_ARG, "%s: %p is memory of device %d, the current device is %d",
                         what, p, a.device, (int)q->device);
    if (q->n < MOST)
        q->seen[q->n++] = p;
    return COLO_OK;
}

colo_status_t colo_cuda_typed(colo_queries_t *q, const void *p, colo_dtype_t dtype,
                              const char *what)
{
    const size_t size = colo_dtype_size(dtype);
    if ((uintptr_t)p % size)
        return colo_fail(COLO_ERR_ARG, "%s: %p is no multiple of %d bytes, an element", what, p,
                         (int)size);
    return colo_cuda_pointer(q, p, what);
}

/* ---- memory ---- */

static colo_status_t gpu_load(void)
{
    return colo_cuda_report(colo_k_load(), "kernels");
}

static colo_status_t gpu_alloc(size_t bytes, void **p)
{
    COLO_CAPTURE_RELAXED;
    char what[48];
    *p = NULL;
    snprintf(what, sizeof what, "%zu bytes of device memory", bytes);
    return colo_cuda_report(cudaMalloc(p, bytes), what);
}

static int device_now(void)
{
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess)
        (void)cudaGetLastError();
    return device;
}

/* On a helper thread, whose own state this changes, or on the caller's (colo_end_on()). */
static void free_on(int device, void *p)
{
    COLO_CAPTURE_RELAXED;
    (void)cudaSetDevice(device);
    cudaFree(p);
    (void)cudaGetLastError();
}

static void gpu_free(void *p)
{
    if (p)
        (void)colo_end_on(device_now(), 0, free_on, p);
}

static colo_status_t gpu_zero(void *p, size_t bytes, colo_stream_t stream)
{
    return colo_cuda_report(bytes ? cudaMemsetAsync(p, 0, bytes, stream) : cudaSuccess, "zeros");
}

/* ---- a stream of the library's own, and events ----
 * Its priority is the highest: what runs on it is short (statistics, a gather), and what the
 * caller's stream does next waits for it sooner or later. Which stream records and waits, and when,
 * is loss/linear/linear.h. */

struct aux_stream {
    cudaStream_t stream;
    int32_t events;
    cudaEvent_t event[];
};

static void stream_end(int device, void *s)
{
    COLO_CAPTURE_RELAXED;
    struct aux_stream *l = s;
    (void)cudaSetDevice(device);
    for (int32_t i = 0; i < l->events; i++)
        if (l->event[i])
            cudaEventDestroy(l->event[i]);
    if (l->stream) {
        cudaStreamSynchronize(l->stream); /* the caller may free next what it works on */
        cudaStreamDestroy(l->stream);
    }
    cudaGetLastError();
    free(l);
}

static void stream_destroy(void *s)
{
    if (s)
        (void)colo_end_on(device_now(), 0, stream_end, s);
}

static colo_status_t stream_create(int32_t events, void **s)
{
    int least = 0, greatest = 0;
    struct aux_stream *l = calloc(1, sizeof *l + (size_t)events * sizeof *l->event);
    if (!l)
        return colo_fail(COLO_ERR_NOMEM, "stream: %d events", (int)events);
    l->events = events;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&l->stream, cudaStreamNonBlocking, greatest);
    for (int32_t i = 0; i < events && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&l->event[i], cudaEventDisableTiming);
    if (e != cudaSuccess) {
        stream_destroy(l);
        return colo_cuda_report(e, "stream");
    }
    *s = l;
    return COLO_OK;
}

static colo_stream_t stream_of(void *s)
{
    return ((struct aux_stream *)s)->stream;
}

static colo_status_t event_record(void *s, int32_t event, colo_stream_t on)
{
    return colo_cuda_report(cudaEventRecord(((struct aux_stream *)s)->event[event], on), "stream");
}

static colo_status_t event_wait(void *s, int32_t event, colo_stream_t on)
{
    return colo_cuda_report(cudaStreamWaitEvent(on, ((struct aux_stream *)s)->event[event], 0),
                            "stream");
}

static cudaError_t capture_of(cudaStream_t stream, unsigned long long *id)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
    cudaError_t e = cudaStreamGetCaptureInfo(stream, &capture, id, NULL, NULL, NULL, NULL);
#else
    cudaError_t e = cudaStreamGetCaptureInfo_v2(stream, &capture, id, NULL, NULL, NULL);
#endif
    *id = capture == cudaStreamCaptureStatusNone ? 0 : *id;
    return e;
}

static colo_status_t stream_follow(void *s, int32_t event, colo_stream_t from, bool *follows)
{
    cudaStream_t own = ((struct aux_stream *)s)->stream;
    unsigned long long from_id = 0, own_id = 0;
    cudaError_t e = capture_of(from, &from_id);
    if (e == cudaSuccess)
        e = capture_of(own, &own_id);
    *follows = e == cudaSuccess && (own_id == 0 || own_id == from_id);
    if (!*follows)
        return colo_cuda_report(e, "stream");
    COLO_TRY(event_record(s, event, from));
    return event_wait(s, event, own);
}

/* ---- may it be used ---- */

static colo_status_t pointer_check(colo_queries_t *q, const void *p, int32_t device,
                                   const char *what)
{
    if (p && device >= 0) {
        cudaError_t e = current_device(q);
        if (e != cudaSuccess)
            return colo_cuda_report(e, what);
        if (device != q->device)
            return colo_fail(COLO_ERR_ARG, "%s: a tensor of device %d, the current device is %d",
                             what, (int)device, (int)q->device);
    }
    return colo_cuda_pointer(q, p, what);
}

static colo_status_t stream_check(colo_queries_t *q, colo_stream_t stream, bool *capturing)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int device = -1;
    cudaError_t e = current_device(q);
    if (e == cudaSuccess)
        e = cudaStreamIsCapturing(stream, &capture);
    *capturing = capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (e == cudaSuccess && stream && !*capturing) /* the default stream is the current device's */
        e = cudaStreamGetDevice(stream, &device);
#endif
    if (e == cudaSuccess && device >= 0 && device != q->device)
        return colo_fail(COLO_ERR_ARG, "the stream is one of device %d, the current device is %d",
                         device, (int)q->device);
    return colo_cuda_report(e, "stream");
}

/* ---- what is in memory: kernels whose answer of sixteen bytes the host waits for ---- */

static bool is_empty(const colo_box_t *b)
{
    return b->extent[0] == 0 || b->extent[1] == 0 || b->extent[2] == 0;
}

/* Sixteen bytes for a kernel's answer, as @from. */
static cudaError_t answer_new(void **p, const void *from, cudaStream_t stream)
{
    cudaError_t e = cudaMallocAsync(p, 16, stream);
    if (e != cudaSuccess) {
        *p = NULL;
        return e;
    }
    return cudaMemcpyAsync(*p, from, 16, cudaMemcpyHostToDevice, stream);
}

static cudaError_t answer_take(void *p, void *to, cudaError_t e, cudaStream_t stream)
{
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(to, p, 16, cudaMemcpyDeviceToHost, stream);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    if (p)
        cudaFreeAsync(p, stream);
    return e;
}

static colo_status_t box_hash(const colo_box_t *box, size_t elem_size, uint64_t *hash,
                              colo_stream_t stream)
{
    colo_queries_t q = {0};
    uint64_t got[2] = {0, 0};
    void *p = NULL;
    *hash = 0;
    if (is_empty(box))
        return COLO_OK;
    COLO_TRY(colo_cuda_pointer(&q, box->data, "hash"));
    cudaError_t e = answer_new(&p, got, stream);
    if (e == cudaSuccess)
        e = colo_k_box_hash(box, elem_size, p, stream);
    e = answer_take(p, got, e, stream);
    *hash = got[0];
    return colo_cuda_report(e, "hash");
}

static colo_status_t box_nonzero(const colo_box_t *box, colo_dtype_t dtype, int64_t *first,
                                 colo_stream_t stream)
{
    colo_queries_t q = {0};
    uint64_t got[2] = {UINT64_MAX, 0};
    void *p = NULL;
    *first = -1;
    if (is_empty(box))
        return COLO_OK;
    COLO_TRY(colo_cuda_pointer(&q, box->data, "search for zeros"));
    cudaError_t e = answer_new(&p, got, stream);
    if (e == cudaSuccess)
        e = colo_k_box_nonzero(box, (int)colo_dtype_size(dtype), dtype <= COLO_F16, p, stream);
    e = answer_take(p, got, e, stream);
    *first = (int64_t)got[0]; /* all ones: none */
    return colo_cuda_report(e, "search for zeros");
}

static colo_status_t masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                int64_t count, double *num, int64_t *den, colo_stream_t stream)
{
    colo_queries_t q = {0};
    struct {
        double num;
        int64_t den;
    } got = {0, 0};
    void *p = NULL;
    bool capturing = false;
    COLO_TRY(stream_check(&q, stream, &capturing));
    if (capturing)
        return colo_fail(COLO_ERR_STATE, "reduce: waits for the stream and cannot be captured");
    if (count > 0) {
        COLO_TRY(colo_cuda_typed(&q, values, dtype, "values"));
        COLO_TRY(colo_cuda_pointer(&q, mask, "mask"));
    }
    cudaError_t e = answer_new(&p, &got, stream);
    if (e == cudaSuccess)
        e = colo_k_masked_sum(values, dtype, mask, count, p, (int64_t *)p + 1, stream);
    e = answer_take(p, &got, e, stream);
    *num = got.num;
    *den = got.den;
    return colo_cuda_report(e, "reduce");
}

/* ---- boxes ---- */

/* One box of each side speaks for its allocation; asking CUDA for all of them took the host longer
 * than launching. */
static const void *first_of(const colo_box_t *side, const colo_box_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!is_empty(&dst[i]) && side[i].data)
            return side[i].data;
    return NULL;
}

static colo_status_t copy_list(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               size_t elem_size, int32_t blocks, colo_stream_t stream)
{
    colo_queries_t q = {0};
    COLO_TRY(colo_cuda_pointer(&q, first_of(dst, dst, n), "copy: destination"));
    COLO_TRY(colo_cuda_pointer(&q, first_of(src, dst, n), "copy: source"));
    return colo_cuda_report(colo_k_boxes_copy(dst, src, n, elem_size, blocks, stream), "copy");
}

static colo_status_t box_list(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                              size_t elem_size, colo_stream_t stream)
{
    return copy_list(dst, src, n, elem_size, 0, stream);
}

/* A graph of one branch is launched much faster than one of two (bench/results/hosts.md). */
#ifndef COLO_OVERLAP_BYTES /* tests have small tensors */
#define COLO_OVERLAP_BYTES (INT64_C(128) << 20)
#endif

/* A block keeps its multiprocessor to the end: NCCL's kernels need others for themselves, and would
 * begin when the last of many short blocks has begun. */
static colo_status_t box_list_narrow(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                                     size_t elem_size, colo_stream_t stream)
{
    enum { BLOCKS = 32 }; /* copy 360 GB/s on an H200, more than NCCL moves between two */
    return copy_list(dst, src, n, elem_size, BLOCKS, stream);
}

static colo_status_t box_copy(const colo_box_t *dst, const colo_box_t *src, size_t elem_size,
                              colo_stream_t stream)
{
    return box_list(dst, src, 1, elem_size, stream);
}

static colo_status_t box_shift(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               int64_t last, colo_stream_t stream)
{
    colo_queries_t q = {0};
    COLO_TRY(colo_cuda_typed(&q, first_of(dst, dst, n), COLO_I64, "shift: destination"));
    COLO_TRY(colo_cuda_typed(&q, first_of(src, dst, n), COLO_I64, "shift: source"));
    return colo_cuda_report(colo_k_boxes_shift(dst, src, n, last, stream), "shift");
}

static colo_status_t box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                             colo_dtype_t dtype, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (n < 1 || n > COLO_MAX_ADDENDS || (unsigned)dtype > COLO_F16)
        return colo_fail(COLO_ERR_ARG,
                         "sum: %d addends of dtype %d, expected 1..%d of a float dtype", (int)n,
                         (int)dtype, COLO_MAX_ADDENDS);
    if (is_empty(dst))
        return COLO_OK;
    COLO_TRY(colo_cuda_pointer(&q, dst->data, "sum: destination"));
    for (int32_t k = 0; k < n; k++)
        COLO_TRY(colo_cuda_pointer(&q, src[k].data, "sum: addend"));
    return colo_cuda_report(colo_k_box_sum(dst, src, n, dtype, stream), "sum");
}

static colo_status_t box_sums(const colo_mixed_sum_t *sums, int32_t n, colo_stream_t stream)
{
    colo_queries_t q = {0};
    for (int32_t i = 0; i < n; i++) { /* most pointers are the bridge's: the first stand for all */
        const colo_mixed_sum_t *s = &sums[i];
        bool fits = s->n >= 1 && s->n <= COLO_MAX_ADDENDS && (unsigned)s->dtype <= COLO_F16;
        for (int32_t k = 0; fits && k < s->n; k++)
            fits = (unsigned)s->from_dtype[k] <= COLO_F16 &&
                   (s->from_dtype[k] == COLO_F64) == (s->dtype == COLO_F64);
        if (!fits)
            return colo_fail(
                COLO_ERR_ARG,
                "sum: %d addends into dtype %d, expected 1..%d of bf16, f16 and f32, or "
                "of f64 alone",
                (int)s->n, (int)s->dtype, COLO_MAX_ADDENDS);
        if (i == 0 && !is_empty(&s->to)) {
            COLO_TRY(colo_cuda_pointer(&q, s->to.data, "sum: destination"));
            COLO_TRY(colo_cuda_pointer(&q, s->from[0].data, "sum: addend"));
        }
    }
    return colo_cuda_report(colo_k_box_sums(sums, n, stream), "sum");
}

static colo_status_t half_sum(void *to, colo_dtype_t to_dtype, const float *wide, const void *half,
                              colo_dtype_t dtype, int64_t n, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if ((dtype != COLO_BF16 && dtype != COLO_F16) || (to_dtype != COLO_F32 && to_dtype != dtype))
        return colo_fail(COLO_ERR_ARG,
                         "sum of fp32 and dtype %d into dtype %d: expected bf16 or f16, "
                         "into it or f32",
                         (int)dtype, (int)to_dtype);
    if (n == 0)
        return COLO_OK;
    COLO_TRY(colo_cuda_typed(&q, to, to_dtype, "sum: destination"));
    COLO_TRY(colo_cuda_typed(&q, wide, COLO_F32, "sum: fp32 addend"));
    COLO_TRY(colo_cuda_typed(&q, half, dtype, "sum: addend"));
    return colo_cuda_report(colo_k_half_sum(to, to_dtype == COLO_F32, wide, half, dtype, n, stream),
                            "sum");
}

static const colo_ops_t colo_ops_cuda = {
    .name = "cuda",
    .load = gpu_load,
    .alloc = gpu_alloc,
    .free = gpu_free,
    .zero = gpu_zero,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_of = stream_of,
    .event_record = event_record,
    .event_wait = event_wait,
    .stream_follow = stream_follow,
    .pointer_check = pointer_check,
    .stream_check = stream_check,
    .box_hash = box_hash,
    .box_nonzero = box_nonzero,
    .masked_sum = masked_sum,
    .box_copy = box_copy,
    .box_sum = box_sum,
    .box_sums = box_sums,
    .half_sum = half_sum,
    .box_list = box_list,
    .box_list_narrow = box_list_narrow,
    .overlap_bytes = COLO_OVERLAP_BYTES,
    .box_shift = box_shift,
};

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    COLO_BACKEND_INIT("cuda"),
    .ops = &colo_ops_cuda,
    .loss = &colo_loss_cuda,
};
