/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inspect-cuda.c - looking at CUDA memory: attributes of pointers and streams, and kernels whose
 * answer of sixteen bytes the host waits for. The maths is in kernels/inspect.cu.
 */
#include "core/inspect.h"
#include "core/ops-cuda.h"

#include "kernels.h"

#include <stdint.h>

static const uint8_t dtype_size[COLO_DTYPE_COUNT] = {4, 8, 2, 2, 1, 1, 2, 4, 8};

/* ---- may it be used ---- */

static colo_status_t pointer_check(const void *p, int32_t device, const char *what)
{
    int now = -1;
    if (p && device >= 0) {
        cudaError_t e = cudaGetDevice(&now);
        if (e != cudaSuccess)
            return colo_cuda_report(e, what);
        if (device != now)
            return colo_backend_fail(COLO_ERR_ARG,
                                     "%s: a tensor of device %d, the current device is %d", what,
                                     (int)device, now);
    }
    return colo_cuda_pointer(p, what);
}

static colo_status_t stream_check(colo_stream_t stream, bool *capturing)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int now = -1, device = -1;
    cudaError_t e = cudaGetDevice(&now);
    if (e == cudaSuccess)
        e = cudaStreamIsCapturing(stream, &capture);
    *capturing = capture != cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 12080
    if (e == cudaSuccess && stream && !*capturing) /* the default stream is the current device's */
        e = cudaStreamGetDevice(stream, &device);
#endif
    if (e == cudaSuccess && device >= 0 && device != now)
        return colo_backend_fail(
            COLO_ERR_ARG, "the stream is one of device %d, the current device is %d", device, now);
    return colo_cuda_report(e, "stream");
}

/* ---- what is in it ---- */

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

static bool is_empty(const colo_box_t *b)
{
    return b->extent[0] == 0 || b->extent[1] == 0 || b->extent[2] == 0;
}

static colo_status_t box_hash(const colo_box_t *box, size_t elem_size, uint64_t *hash,
                              colo_stream_t stream)
{
    uint64_t got[2] = {0, 0};
    void *p = NULL;
    *hash = 0;
    if (is_empty(box))
        return COLO_OK;
    COLO_CUDA_TRY(colo_cuda_pointer(box->data, "hash"));
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
    uint64_t got[2] = {UINT64_MAX, 0};
    void *p = NULL;
    *first = -1;
    if (is_empty(box))
        return COLO_OK;
    COLO_CUDA_TRY(colo_cuda_pointer(box->data, "search for zeros"));
    cudaError_t e = answer_new(&p, got, stream);
    if (e == cudaSuccess)
        e = colo_k_box_nonzero(box, dtype_size[dtype], dtype <= COLO_F16, p, stream);
    e = answer_take(p, got, e, stream);
    *first = (int64_t)got[0]; /* all ones: none */
    return colo_cuda_report(e, "search for zeros");
}

static colo_status_t masked_sum(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                int64_t count, double *num, int64_t *den, colo_stream_t stream)
{
    struct {
        double num;
        int64_t den;
    } got = {0, 0};
    void *p = NULL;
    bool capturing = false;
    COLO_CUDA_TRY(stream_check(stream, &capturing));
    if (capturing)
        return colo_backend_fail(COLO_ERR_STATE,
                                 "reduce: waits for the stream and cannot be captured");
    if (count > 0) {
        COLO_CUDA_TRY(colo_cuda_typed(values, dtype, "values"));
        COLO_CUDA_TRY(colo_cuda_pointer(mask, "mask"));
    }
    cudaError_t e = answer_new(&p, &got, stream);
    if (e == cudaSuccess)
        e = colo_k_masked_sum(values, dtype, mask, count, p, (int64_t *)p + 1, stream);
    e = answer_take(p, &got, e, stream);
    *num = got.num;
    *den = got.den;
    return colo_cuda_report(e, "reduce");
}

const colo_inspect_ops_t colo_inspect_cuda = {
    .pointer_check = pointer_check,
    .stream_check = stream_check,
    .box_hash = box_hash,
    .box_nonzero = box_nonzero,
    .masked_sum = masked_sum,
};
