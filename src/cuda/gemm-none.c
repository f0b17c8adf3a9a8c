/* SPDX-License-Identifier: Apache-2.0 */
/* gemm-none.c - stands in for cuda/gemm.c where the headers of cuBLASLt are missing: no object is
 * ever made. */
#include "cuda/device.h"
#include "loss/linear/linear.h"

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    return colo_fail(COLO_ERR_UNBUILT,
                     "lm_head: built without cublasLt.h; install cuBLAS's headers and build again");
}

const colo_gemm_backend_t colo_gemm_cuda = {.create = create};
