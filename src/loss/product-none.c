/* SPDX-License-Identifier: Apache-2.0 */
/* product-none.c - stands in for product-cuda.c where the headers of cuBLASLt are missing. */
#include "core/ops-cuda.h"
#include "loss/product-cuda.h"

colo_status_t colo_product_create(colo_product_t **product)
{
    (void)product;
    return colo_backend_fail(
        COLO_ERR_UNBUILT, "lm_head: built without cublasLt.h; install cuBLAS's headers and build "
                          "again");
}

void colo_product_destroy(colo_product_t *product)
{
    (void)product;
}

int64_t colo_product_workspace(void)
{
    return 0;
}

colo_status_t colo_product_run(colo_product_t *product, const struct colo_linear_gemm *g,
                               colo_stream_t stream)
{
    (void)g;
    (void)stream;
    return colo_product_create(&product);
}
