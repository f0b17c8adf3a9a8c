/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the three products of linear.h as one form, and what becomes of the sums: scale,
 * bias, what was there before, one rounding. The sums themselves are gemm-cblas.c's where there
 * is a CBLAS and the object is not pinned, else gemm-loops.c's; which, is decided once an object.
 */
#include "loss/host/gemm.h"

#include "core/error.h"

#include <stdlib.h>

/* What create makes where a CBLAS makes products; else NULL. */
struct blas {
    colo_cblas_t lib;
    int64_t columns;
    bool wide;
};

static colo_status_t run(void *made, const struct colo_linear_gemm *gemm, colo_stream_t stream)
{
    const struct blas *blas = made;
    struct colo_host_product product = {.first = gemm->first,
                                        .wide = gemm->h.dtype == COLO_F64,
                                        .scale = gemm->scale ? (double)*gemm->scale : 1};
    switch (gemm->product) {
    case COLO_LINEAR_LOGITS:
        product.a = (struct colo_host_operand){gemm->h.data, gemm->h.dtype, gemm->h.stride, false};
        product.b = (struct colo_host_operand){gemm->w.data, gemm->w.dtype, gemm->w.stride, false};
        product.m = gemm->rows;
        product.n = gemm->columns;
        product.k = gemm->hidden;
        product.c = &gemm->z;
        product.bias = gemm->bias;
        product.bias_dtype = gemm->h.dtype;
        break;
    case COLO_LINEAR_D_HIDDEN:
        product.a = (struct colo_host_operand){gemm->z.data, gemm->z.dtype, gemm->z.stride, false};
        product.b = (struct colo_host_operand){gemm->w.data, gemm->w.dtype, gemm->w.stride, true};
        product.m = gemm->rows;
        product.n = gemm->hidden;
        product.k = gemm->columns;
        product.c = &gemm->h;
        product.add = gemm->beta != 0;
        break;
    case COLO_LINEAR_D_WEIGHT:
        product.a = (struct colo_host_operand){gemm->z.data, gemm->z.dtype, gemm->z.stride, true};
        product.b = (struct colo_host_operand){gemm->h.data, gemm->h.dtype, gemm->h.stride, true};
        product.m = gemm->columns;
        product.n = gemm->hidden;
        product.k = gemm->rows;
        product.sums_rows = true;
        product.c = &gemm->w;
        product.add = gemm->beta != 0;
        break;
    }
    if (blas)
        colo_host_cblas_run(&blas->lib, &product, blas->columns, gemm->workspace);
    else
        colo_host_loops_run(&product, gemm->workspace);
    return COLO_OK;
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    struct blas blas = {.wide = shape->dtype == COLO_F64};
    bool found;
    *made = NULL;
    COLO_TRY(colo_cblas_find(&blas.lib, &found));
    if (!found || shape->pinned) /* the bits that a CBLAS gives a row depend on its place */
        return COLO_OK;
    blas.columns =
        colo_host_cblas_columns(shape->columns > shape->hidden ? shape->columns : shape->hidden);
    struct blas *b = malloc(sizeof *b);
    COLO_FAIL_IF(!b, COLO_ERR_NOMEM, "linear: %zu bytes", sizeof *b);
    *b = blas;
    *made = b;
    return COLO_OK;
}

static void destroy(void *made)
{
    free(made);
}

static int64_t workspace(const void *made)
{
    const struct blas *blas = made;
    int64_t bytes =
        blas ? colo_host_cblas_workspace(blas->columns, blas->wide) : colo_host_loops_workspace();
    return (bytes + 255) & ~INT64_C(255);
}

const colo_gemm_ops_t colo_gemm_host = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .run = run,
};
