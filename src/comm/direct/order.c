/* SPDX-License-Identifier: Apache-2.0 */
/* order.c - the order of what all comms of a family enqueue on a device, by one event. */
#include "comm/direct/order.h"

#include <stdlib.h>

colo_status_t colo_cuda_error(const char *what, cudaError_t e)
{
    if (e == cudaSuccess)
        return COLO_OK;
    (void)cudaGetLastError(); /* or the next launch reports it again */
    return colo_fail(COLO_ERR_CUDA, "%s: CUDA says: %s", what, cudaGetErrorString(e));
}

colo_status_t colo_order_new(struct colo_order **out)
{
    struct colo_order *o = calloc(1, sizeof *o);
    COLO_FAIL_IF(!o, COLO_ERR_NOMEM, "order of operations: %zu bytes", sizeof *o);
    atomic_init(&o->refs, 1);
    cudaError_t e = cudaEventCreateWithFlags(&o->done, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        free(o);
        return colo_cuda_error("order of operations", e);
    }
    *out = o;
    return COLO_OK;
}

void colo_order_drop(struct colo_order *o)
{
    if (!o || atomic_fetch_sub(&o->refs, 1) != 1)
        return;
    cudaEventDestroy(o->done);
    free(o);
}

cudaError_t colo_order_follow(const struct colo_order *o, bool capturing, cudaStream_t stream)
{
    const bool same = o->last == stream && stream != cudaStreamPerThread; /* one of each thread */
    return o->used && !same && !capturing ? cudaStreamWaitEvent(stream, o->done, 0) : cudaSuccess;
}

cudaError_t colo_order_lead(struct colo_order *o, bool capturing, cudaStream_t stream)
{
    if (capturing)
        return cudaSuccess;
    o->last = stream;
    o->used = true;
    return cudaEventRecord(o->done, stream);
}
