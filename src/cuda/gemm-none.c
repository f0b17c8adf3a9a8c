/* SPDX-License-Identifier: Apache-2.0 */
/* gemm-none.c - stands in for cuda/gemm.c where the headers of cuBLASLt are missing. */
#include "cuda/device.h"
#include "loss/linear/linear.h"

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    return colo_fail(COLO_ERR_UNBUILT,
                     "lm_head: built without cublasLt.h; install cuBLAS's headers and build again");
}

static void destroy(void *made)
{
}

static int64_t workspace(const void *made)
{
    return 0;
}

static colo_status_t run(void *made, const struct colo_linear_gemm *g, colo_stream_t stream)
{
    return create(NULL, &made);
}

const colo_gemm_ops_t colo_gemm_cuda = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .run = run,
};
