/* SPDX-License-Identifier: Apache-2.0 */
/* product-cuda.h (private) - products of loss/linear.h on a GPU; used by one thread at a time. */
#ifndef COLO_LOSS_PRODUCT_CUDA_H
#define COLO_LOSS_PRODUCT_CUDA_H

#include "loss/linear.h"

typedef struct colo_product colo_product_t;

/* On the current device. COLO_ERR_UNBUILT: no cuBLASLt. */
colo_status_t colo_product_create(colo_product_t **product);
void colo_product_destroy(colo_product_t *product); /* takes NULL */
int64_t colo_product_workspace(void);
colo_status_t colo_product_run(colo_product_t *product, const struct colo_linear_gemm *g,
                               colo_stream_t stream);

#endif
