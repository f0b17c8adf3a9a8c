/* SPDX-License-Identifier: Apache-2.0 */
/* gemm-store.c - what becomes of the sums of a product: scale, bias, what was there before, one
 * rounding. */
#include "loss/host/gemm.h"

#include "loss/scalar.h"

void colo_host_product_store(const struct colo_host_product *product, int64_t i0, int64_t m,
                             int64_t j0, int64_t n, double *sum, int64_t pitch)
{
    for (int64_t i = 0; i < m; i++) {
        double *row = sum + i * pitch;
        int64_t offset = (i0 + i) * product->c->stride + j0;
        for (int64_t j = 0; j < n; j++)
            row[j] *= product->scale;
        for (int64_t j = 0; product->bias && j < n; j++)
            row[j] += colo_scalar_get(product->bias_dtype, product->bias, j0 + j);
        for (int64_t j = 0; product->add && j < n; j++)
            row[j] += colo_scalar_get(product->c->dtype, product->c->data, offset + j);
        COLO_FOR_FLOAT(product->c->dtype, colo_scalar_put_each, product->c->data, offset, row, n)
    }
}
