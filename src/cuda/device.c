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

static colo_status_t status_of(cudaError_t error)
{
    switch (error) {
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

colo_status_t colo_cuda_report(cudaError_t error, const char *what)
{
    int device = -1;
    if (error == cudaSuccess)
        return COLO_OK;
    cudaGetDevice(&device);
    cudaGetLastError(); /* the caller's next check is about the caller's next call */
    return colo_fail(status_of(error), "%s: CUDA says %s (%s) on device %d", what,
                     cudaGetErrorName(error), cudaGetErrorString(error), device);
}

/* ---- pointers ---- */

static cudaError_t current_device(colo_queries_t *queries)
{
    int device = -1;
    cudaError_t error = queries->known ? cudaSuccess : cudaGetDevice(&device);
    if (!queries->known && error == cudaSuccess)
        *queries = (colo_queries_t){.known = true, .device = device};
    return error;
}

/* NULL is on no device: the kernels do not read what may be NULL. */
colo_status_t colo_cuda_pointer(colo_queries_t *queries, const void *pointer, const char *what)
{
    enum { MAX_SEEN = sizeof queries->seen / sizeof *queries->seen };
    struct cudaPointerAttributes attributes;
    if (!pointer)
        return COLO_OK;
    for (int32_t i = 0; i < queries->n; i++)
        if (queries->seen[i] == pointer)
            return COLO_OK;
    cudaError_t error = current_device(queries);
    COLO_THEN(error, cudaPointerGetAttributes(&attributes, pointer));
    if (error != cudaSuccess)
        return colo_cuda_report(error, what);
    COLO_FAIL_IF(attributes.type == cudaMemoryTypeUnregistered, COLO_ERR_ARG,
                 "%s: %p is host memory that CUDA does not know, expected memory of device %d",
                 what, pointer, (int)queries->device);
    COLO_FAIL_IF(attributes.type == cudaMemoryTypeDevice && attributes.device != queries->device,
                 COLO_ERR_ARG, "%s: %p is memory of device %d, the current device is %d", what,
                 pointer, attributes.device, (int)queries->device);
    if (queries->n < MAX_SEEN)
        queries->seen[queries->n++] = pointer;
    return COLO_OK;
}

colo_status_t colo_cuda_typed(colo_queries_t *queries, const void *pointer, colo_dtype_t dtype,
                              const char *what)
{
    const size_t size = colo_dtype_size(dtype);
    COLO_FAIL_IF((uintptr_t)pointer % size, COLO_ERR_ARG,
                 "%s: %p is no multiple of %d bytes, an element", what, pointer, (int)size);
    return colo_cuda_pointer(queries, pointer, what);
}

/* ---- memory ---- */

static colo_status_t gpu_load(void)
{
    return colo_cuda_report(colo_k_load(), "kernels");
}

static colo_status_t gpu_alloc(size_t bytes, void **pointer)
{
    COLO_CAPTURE_RELAXED;
    char what[48];
    *pointer = NULL;
    snprintf(what, sizeof what, "%zu bytes of device memory", bytes);
    return colo_cuda_report(cudaMalloc(pointer, bytes), what);
}

static int device_now(void)
{
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess)
        (void)cudaGetLastError();
    return device;
}

/* On a helper thread, whose own state this changes, or on the caller's (colo_end_on()). */
static void free_on(int device, void *pointer)
{
    COLO_CAPTURE_RELAXED;
    (void)cudaSetDevice(device);
    cudaFree(pointer);
    (void)cudaGetLastError();
}

static void gpu_free(void *pointer)
{
    if (pointer)
        (void)colo_end_on(device_now(), 0, free_on, pointer);
}

static colo_status_t gpu_zero(void *pointer, size_t bytes, colo_stream_t stream)
{
    return colo_cuda_report(bytes ? cudaMemsetAsync(pointer, 0, bytes, stream) : cudaSuccess,
                            "zeros");
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

static void stream_end(int device, void *made)
{
    COLO_CAPTURE_RELAXED;
    struct aux_stream *aux = made;
    (void)cudaSetDevice(device);
    for (int32_t i = 0; i < aux->events; i++)
        if (aux->event[i])
            cudaEventDestroy(aux->event[i]);
    if (aux->stream) {
        cudaStreamSynchronize(aux->stream); /* the caller may free next what it works on */
        cudaStreamDestroy(aux->stream);
    }
    cudaGetLastError();
    free(aux);
}

static void stream_destroy(void *made)
{
    if (made)
        (void)colo_end_on(device_now(), 0, stream_end, made);
}

static colo_status_t stream_create(int32_t events, void **made)
{
    int least = 0, greatest = 0;
    struct aux_stream *aux = calloc(1, sizeof *aux + (size_t)events * sizeof *aux->event);
    COLO_FAIL_IF(!aux, COLO_ERR_NOMEM, "stream: %d events", (int)events);
    aux->events = events;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    COLO_THEN(error, cudaStreamCreateWithPriority(&aux->stream, cudaStreamNonBlocking, greatest));
    for (int32_t i = 0; i < events && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&aux->event[i], cudaEventDisableTiming);
    if (error != cudaSuccess) {
        stream_destroy(aux);
        return colo_cuda_report(error, "stream");
    }
    *made = aux;
    return COLO_OK;
}

static colo_stream_t stream_of(void *made)
{
    return ((struct aux_stream *)made)->stream;
}

static colo_status_t event_record(void *made, int32_t event, colo_stream_t on)
{
    return colo_cuda_report(cudaEventRecord(((struct aux_stream *)made)->event[event], on),
                            "stream");
}

static colo_status_t event_wait(void *made, int32_t event, colo_stream_t on)
{
    return colo_cuda_report(cudaStreamWaitEvent(on, ((struct aux_stream *)made)->event[event], 0),
                            "stream");
}

static cudaError_t capture_of(cudaStream_t stream, unsigned long long *id)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
    cudaError_t error = cudaStreamGetCaptureInfo(stream, &capture, id, NULL, NULL, NULL, NULL);
#else
    cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &capture, id, NULL, NULL, NULL);
#endif
    *id = capture == cudaStreamCaptureStatusNone ? 0 : *id;
    return error;
}

static colo_status_t stream_follow(void *made, int32_t event, colo_stream_t from, bool *follows)
{
    cudaStream_t own = ((struct aux_stream *)made)->stream;
    unsigned long long from_id = 0, own_id = 0;
    cudaError_t error = capture_of(from, &from_id);
    COLO_THEN(error, capture_of(own, &own_id));
    *follows = error == cudaSuccess && (own_id == 0 || own_id == from_id);
    if (!*follows)
        return colo_cuda_report(error, "stream");
    COLO_TRY(event_record(made, event, from));
    return event_wait(made, event, own);
}

/* ---- may it be used ---- */

static colo_status_t pointer_check(colo_queries_t *queries, const void *pointer, int32_t device,
                                   const char *what)
{
    if (pointer && device >= 0) {
        cudaError_t error = current_device(queries);
        if (error != cudaSuccess)
            return colo_cuda_report(error, what);
        COLO_FAIL_IF(device != queries->device, COLO_ERR_ARG,
                     "%s: a tensor of device %d, the current device is %d", what, (int)device,
                     (int)queries->device);
    }
    return colo_cuda_pointer(queries, pointer, what);
}

static colo_status_t stream_check(colo_queries_t *queries, colo_stream_t stream, bool *capturing)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int device = -1;
    cudaError_t error = current_device(queries);
    COLO_THEN(error, cudaStreamIsCapturing(stream, &capture));
    *capturing = capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (error == cudaSuccess && stream &&
        !*capturing) /* the default stream is the current device's */
        error = cudaStreamGetDevice(stream, &device);
#endif
    COLO_FAIL_IF(error == cudaSuccess && device >= 0 && device != queries->device, COLO_ERR_ARG,
                 "the stream is one of device %d, the current device is %d", device,
                 (int)queries->device);
    return colo_cuda_report(error, "stream");
}

/* ---- what is in memory: the host waits for it, or for a kernel's answer of sixteen bytes ---- */

static colo_status_t device_read(void *to, const void *from, size_t bytes, colo_stream_t stream)
{
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
    COLO_THEN(error, cudaStreamSynchronize(stream));
    return colo_cuda_report(error, "read");
}

static bool is_empty(const colo_box_t *box)
{
    return box->extent[0] == 0 || box->extent[1] == 0 || box->extent[2] == 0;
}

/* Sixteen bytes for a kernel's answer, as @from. */
static cudaError_t answer_new(void **pointer, const void *from, cudaStream_t stream)
{
    cudaError_t error = cudaMallocAsync(pointer, 16, stream);
    if (error != cudaSuccess) {
        *pointer = NULL;
        return error;
    }
    return cudaMemcpyAsync(*pointer, from, 16, cudaMemcpyHostToDevice, stream);
}

static cudaError_t answer_take(void *pointer, void *to, cudaError_t error, cudaStream_t stream)
{
    COLO_THEN(error, cudaMemcpyAsync(to, pointer, 16, cudaMemcpyDeviceToHost, stream));
    COLO_THEN(error, cudaStreamSynchronize(stream));
    if (pointer)
        cudaFreeAsync(pointer, stream);
    return error;
}

static colo_status_t box_hash(const colo_box_t *box, size_t elem_size, uint64_t *hash,
                              colo_stream_t stream)
{
    colo_queries_t queries = {0};
    uint64_t got[2] = {0, 0};
    void *pointer = NULL;
    *hash = 0;
    if (is_empty(box))
        return COLO_OK;
    COLO_TRY(colo_cuda_pointer(&queries, box->data, "hash"));
    cudaError_t error = answer_new(&pointer, got, stream);
    COLO_THEN(error, colo_k_box_hash(box, elem_size, pointer, stream));
    error = answer_take(pointer, got, error, stream);
    *hash = got[0];
    return colo_cuda_report(error, "hash");
}

static colo_status_t box_nonzero(const colo_box_t *box, colo_dtype_t dtype, int64_t *first,
                                 colo_stream_t stream)
{
    colo_queries_t queries = {0};
    uint64_t got[2] = {UINT64_MAX, 0};
    void *pointer = NULL;
    *first = -1;
    if (is_empty(box))
        return COLO_OK;
    COLO_TRY(colo_cuda_pointer(&queries, box->data, "search for zeros"));
    cudaError_t error = answer_new(&pointer, got, stream);
    COLO_THEN(error, colo_k_box_nonzero(box, (int)colo_dtype_size(dtype), dtype <= COLO_F16,
                                        pointer, stream));
    error = answer_take(pointer, got, error, stream);
    *first = (int64_t)got[0]; /* all ones: none */
    return colo_cuda_report(error, "search for zeros");
}

static colo_status_t masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                int64_t count, double *num, int64_t *den, colo_stream_t stream)
{
    colo_queries_t queries = {0};
    struct {
        double num;
        int64_t den;
    } got = {0, 0};
    void *pointer = NULL;
    bool capturing = false;
    COLO_TRY(stream_check(&queries, stream, &capturing));
    COLO_FAIL_IF(capturing, COLO_ERR_STATE, "reduce: waits for the stream and cannot be captured");
    if (count > 0) {
        COLO_TRY(colo_cuda_typed(&queries, values, dtype, "values"));
        COLO_TRY(colo_cuda_pointer(&queries, mask, "mask"));
    }
    cudaError_t error = answer_new(&pointer, &got, stream);
    COLO_THEN(error, colo_k_masked_sum(values, dtype, mask, count, pointer, (int64_t *)pointer + 1,
                                       stream));
    error = answer_take(pointer, &got, error, stream);
    *num = got.num;
    *den = got.den;
    return colo_cuda_report(error, "reduce");
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
    colo_queries_t queries = {0};
    COLO_TRY(colo_cuda_pointer(&queries, first_of(dst, dst, n), "copy: destination"));
    COLO_TRY(colo_cuda_pointer(&queries, first_of(src, dst, n), "copy: source"));
    return colo_cuda_report(colo_k_boxes_copy(dst, src, n, elem_size, blocks, stream), "copy");
}

static colo_status_t box_list(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                              size_t elem_size, colo_stream_t stream)
{
    return copy_list(dst, src, n, elem_size, 0, stream);
}

/* Of what is copied; a fork and a join cost some microseconds (bench/results/scale.md). */
#ifndef COLO_OVERLAP_BYTES /* tests have small tensors */
#define COLO_OVERLAP_BYTES (INT64_C(64) << 20)
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
    colo_queries_t queries = {0};
    COLO_TRY(colo_cuda_typed(&queries, first_of(dst, dst, n), COLO_I64, "shift: destination"));
    COLO_TRY(colo_cuda_typed(&queries, first_of(src, dst, n), COLO_I64, "shift: source"));
    return colo_cuda_report(colo_k_boxes_shift(dst, src, n, last, stream), "shift");
}

static colo_status_t box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                             colo_dtype_t dtype, colo_stream_t stream)
{
    colo_queries_t queries = {0};
    COLO_FAIL_IF(n < 1 || n > COLO_MAX_ADDENDS || (unsigned)dtype > COLO_F16, COLO_ERR_ARG,
                 "sum: %d addends of dtype %d, expected 1..%d of a float dtype", (int)n, (int)dtype,
                 COLO_MAX_ADDENDS);
    if (is_empty(dst))
        return COLO_OK;
    COLO_TRY(colo_cuda_pointer(&queries, dst->data, "sum: destination"));
    for (int32_t k = 0; k < n; k++)
        COLO_TRY(colo_cuda_pointer(&queries, src[k].data, "sum: addend"));
    return colo_cuda_report(colo_k_box_sum(dst, src, n, dtype, stream), "sum");
}

static colo_status_t box_sums(const colo_mixed_sum_t *sums, int32_t n, colo_stream_t stream)
{
    colo_queries_t queries = {0};
    for (int32_t i = 0; i < n; i++) { /* most pointers are the bridge's: the first stand for all */
        const colo_mixed_sum_t *sum = &sums[i];
        bool fits = sum->n >= 1 && sum->n <= COLO_MAX_ADDENDS && (unsigned)sum->dtype <= COLO_F16;
        for (int32_t k = 0; fits && k < sum->n; k++)
            fits = (unsigned)sum->from_dtype[k] <= COLO_F16 &&
                   (sum->from_dtype[k] == COLO_F64) == (sum->dtype == COLO_F64);
        COLO_FAIL_IF(
            !fits, COLO_ERR_ARG,
            "sum: %d addends into dtype %d, expected 1..%d of bf16, f16 and f32, or of f64 alone",
            (int)sum->n, (int)sum->dtype, COLO_MAX_ADDENDS);
        if (i == 0 && !is_empty(&sum->to)) {
            COLO_TRY(colo_cuda_pointer(&queries, sum->to.data, "sum: destination"));
            COLO_TRY(colo_cuda_pointer(&queries, sum->from[0].data, "sum: addend"));
        }
    }
    return colo_cuda_report(colo_k_box_sums(sums, n, stream), "sum");
}

static colo_status_t half_sum(void *to, colo_dtype_t to_dtype, const float *wide, const void *half,
                              colo_dtype_t dtype, int64_t n, colo_stream_t stream)
{
    colo_queries_t queries = {0};
    COLO_FAIL_IF((dtype != COLO_BF16 && dtype != COLO_F16) ||
                     (to_dtype != COLO_F32 && to_dtype != dtype),
                 COLO_ERR_ARG,
                 "sum of fp32 and dtype %d into dtype %d: expected bf16 or f16, into it or f32",
                 (int)dtype, (int)to_dtype);
    if (n == 0)
        return COLO_OK;
    COLO_TRY(colo_cuda_typed(&queries, to, to_dtype, "sum: destination"));
    COLO_TRY(colo_cuda_typed(&queries, wide, COLO_F32, "sum: fp32 addend"));
    COLO_TRY(colo_cuda_typed(&queries, half, dtype, "sum: addend"));
    return colo_cuda_report(colo_k_half_sum(to, to_dtype == COLO_F32, wide, half, dtype, n, stream),
                            "sum");
}

static const colo_device_t colo_device_cuda = {
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
    .read = device_read,
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
    .device = &colo_device_cuda,
    .loss = &colo_loss_cuda,
};
