/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - the three products of linear.h as one form, and what becomes of the sums: scale,
 * bias, what was there before, one rounding. The sums themselves are gemm-cblas.c's where there
 * is a CBLAS, else gemm-loops.c's; which, is decided once an object.
 */
#include "loss/host/gemm.h"

#include "core/error.h"

#include <stdlib.h>

/* What create makes where there is a CBLAS; else NULL. */
struct blas {
    colo_cblas_t lib;
    int64_t columns;
    bool wide;
};

static colo_status_t run(void *made, const struct colo_linear_gemm *g, colo_stream_t stream)
{
    const struct blas *blas = made;
    struct colo_host_product p = {.first = g->first,
                                  .wide = g->h.dtype == COLO_F64,
                                  .scale = g->scale ? (double)*g->scale : 1};
    (void)stream;
    switch (g->product) {
    case COLO_LINEAR_LOGITS:
        p.a = (struct colo_host_operand){g->h.data, g->h.dtype, g->h.stride, false};
        p.b = (struct colo_host_operand){g->w.data, g->w.dtype, g->w.stride, false};
        p.m = g->rows;
        p.n = g->columns;
        p.k = g->hidden;
        p.c = &g->z;
        p.bias = g->bias;
        p.bias_dtype = g->h.dtype;
        break;
    case COLO_LINEAR_D_HIDDEN:
        p.a = (struct colo_host_operand){g->z.data, g->z.dtype, g->z.stride, false};
        p.b = (struct colo_host_operand){g->w.data, g->w.dtype, g->w.stride, true};
        p.m = g->rows;
        p.n = g->hidden;
        p.k = g->columns;
        p.c = &g->h;
        p.add = g->beta != 0;
        break;
    case COLO_LINEAR_D_WEIGHT:
        p.a = (struct colo_host_operand){g->z.data, g->z.dtype, g->z.stride, true};
        p.b = (struct colo_host_operand){g->h.data, g->h.dtype, g->h.stride, true};
        p.m = g->columns;
        p.n = g->hidden;
        p.k = g->rows;
        p.sums_rows = true;
        p.c = &g->w;
        p.add = g->beta != 0;
        break;
    }
    if (blas)
        colo_host_cblas_run(&blas->lib, &p, blas->columns, g->workspace);
    else
        colo_host_loops_run(&p, g->workspace);
    return COLO_OK;
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    struct blas blas = {.wide = shape->dtype == COLO_F64};
    bool found;
    *made = NULL;
    COLO_TRY(colo_cblas_find(&blas.lib, &found));
    if (!found)
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
