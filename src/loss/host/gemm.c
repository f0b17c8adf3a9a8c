/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the three products of linear.h in one call. The sums themselves are gemm-cblas.c's where
 * there is a CBLAS and the object is not pinned, else gemm-loops.c's; which, is decided once an
 * object.
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
    const struct colo_linear_form form = colo_linear_form_of(gemm);
    const struct colo_host_product product = {
        .a = {form.a->data, form.a->dtype, form.a->stride, form.a_by_k},
        .b = {form.b->data, form.b->dtype, form.b->stride, form.b_by_k},
        .m = form.m,
        .n = form.n,
        .k = form.k,
        .first = gemm->first,
        .sums_rows = gemm->product == COLO_LINEAR_D_WEIGHT,
        .c = form.c,
        .bias = gemm->bias,
        .bias_dtype = gemm->h.dtype,
        .scale = gemm->scale ? (double)*gemm->scale : 1,
        .add = gemm->beta != 0,
        .wide = gemm->h.dtype == COLO_F64,
    };
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
