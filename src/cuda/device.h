/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h (private) - what the files of libcolobridge-cuda.so share: a cudaError_t becomes a
 * status in one place, and so does a pointer that no kernel could use.
 */
#ifndef COLO_CUDA_DEVICE_H
#define COLO_CUDA_DEVICE_H

#include "core/backend.h"
#include "core/device.h"

#include <cuda_runtime_api.h>

colo_status_t colo_cuda_report(cudaError_t e, const char *what);
/* COLO_ERR_ARG: pageable host memory, or another device's. NULL passes. */
colo_status_t colo_cuda_pointer(colo_queries_t *q, const void *p, const char *what);
/* and a multiple of the element */
colo_status_t colo_cuda_typed(colo_queries_t *q, const void *p, colo_dtype_t dtype,
                              const char *what);

extern const struct colo_loss_kernels colo_loss_cuda; /* cuda/loss.c */
extern const struct colo_gemm_backend colo_gemm_cuda; /* cuda/gemm.c */

#endif
