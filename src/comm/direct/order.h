/* SPDX-License-Identifier: Apache-2.0 */
/* order.h (private) - for backends of GPUs: one operation behind the other, and errors of CUDA. */
#ifndef COLO_COMM_DIRECT_ORDER_H
#define COLO_COMM_DIRECT_ORDER_H

#include "core/error.h"

#include <cuda_runtime_api.h>

#include <stdatomic.h>

/* COLO_OK, or an error: @what failed with @e. */
colo_status_t colo_cuda_error(const char *what, cudaError_t e);

/* What all comms of a family enqueue on a device: one operation behind the other, whatever stream
 * they are on. */
struct colo_order {
    _Atomic int32_t refs;
    cudaEvent_t done; /* after the last operation */
    cudaStream_t last;
    bool used;
};
colo_status_t colo_order_new(struct colo_order **out);
void colo_order_drop(struct colo_order *o); /* takes NULL */
/* Before and after what an operation enqueues. A capture is ordered by its graph alone. */
cudaError_t colo_order_follow(const struct colo_order *o, bool capturing, cudaStream_t stream);
cudaError_t colo_order_lead(struct colo_order *o, bool capturing, cudaStream_t stream);

#endif
