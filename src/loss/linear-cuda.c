/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear-cuda.c - the table of the lm_head path for CUDA memory: products by product-cuda.c, the
 * rest by kernels/rows.cu.
 *
 * Decides only which pointers of the caller's are looked at: each once a call, by the first pass
 * that touches it, so that host memory is a status and not a fault on the device.
 */
#include "core/ops-cuda.h"
#include "loss/product-cuda.h"

#include "kernels.h"

#include <stddef.h>

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    (void)shape;
    colo_product_t *p = NULL;
    COLO_CUDA_TRY(colo_product_create(&p));
    *made = p;
    return COLO_OK;
}

static void destroy(void *made)
{
    colo_product_destroy(made);
}

static int64_t workspace(const void *made)
{
    (void)made;
    return colo_product_workspace();
}

static colo_status_t product(void *made, const struct colo_linear_gemm *g, colo_stream_t stream)
{
    return colo_product_run(made, g, stream);
}

static colo_k_rows_t flat(const struct colo_linear_rows *r)
{
    return (colo_k_rows_t){.tokens = r->tokens,
                           .rows = r->rows,
                           .targets = r->targets,
                           .target_stride = r->target_stride,
                           .ignore_index = r->ignore_index,
                           .vocab = r->vocab,
                           .row_of = r->row_of,
                           .token_of = r->token_of,
                           .row_targets = r->row_targets,
                           .counts = r->counts};
}

static colo_status_t pack(const struct colo_linear_rows *r, colo_stream_t stream)
{
    if (r->tokens > 0)
        COLO_CUDA_TRY(colo_cuda_typed(r->targets, COLO_I64, "targets"));
    COLO_CUDA_TRY(colo_cuda_pointer(r->counts, "workspace"));
    colo_k_rows_t k = flat(r);
    return colo_cuda_report(colo_k_rows_pack(&k, stream), "lm_head: packing");
}

static colo_status_t upstream(const struct colo_linear_upstream_rows *u, colo_stream_t stream)
{
    static const char *const names[] = {"d_logp", "d_entropy", "d_loss"};
    colo_k_rows_t k = flat(u->rows);
    colo_k_upstream_t up = {
        .wide = u->dtype == COLO_F64, .mean = u->mean, .scale = u->scale, .lift = u->lift};
    for (int i = 0; i < 3; i++) {
        COLO_CUDA_TRY(colo_cuda_typed(u->from[i], u->dtype, names[i]));
        up.from[i] = u->from[i];
        up.factor[i] = u->factor[i];
        up.to[i] = u->to[i];
    }
    return colo_cuda_report(colo_k_rows_upstream(&k, &up, stream), "lm_head: upstream gradients");
}

static colo_status_t spread(const struct colo_linear_spread *s, colo_stream_t stream)
{
    colo_k_rows_t k = flat(s->rows);
    colo_k_spread_t sp = {.wide = s->dtype == COLO_F64,
                          .from = {s->from.logp, s->from.entropy, s->from.loss},
                          .to = {s->to.logp, s->to.entropy, s->to.loss},
                          .from_correct = s->from.correct,
                          .to_correct = s->to.correct,
                          .n_valid = s->to.n_valid,
                          .n_invalid = s->to.n_invalid};
    static const char *const names[] = {"out.logp", "out.entropy", "out.loss"};
    for (int i = 0; i < 3; i++)
        COLO_CUDA_TRY(colo_cuda_typed(sp.to[i], s->dtype, names[i]));
    COLO_CUDA_TRY(colo_cuda_pointer(sp.to_correct, "out.correct"));
    COLO_CUDA_TRY(colo_cuda_typed(sp.n_valid, COLO_I64, "out.n_valid"));
    COLO_CUDA_TRY(colo_cuda_typed(sp.n_invalid, COLO_I64, "out.n_invalid"));
    return colo_cuda_report(colo_k_rows_spread(&k, &sp, stream), "lm_head: outputs");
}

static colo_status_t take_rows(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                               int64_t hidden, void *to, const struct colo_linear_matrix *from,
                               colo_stream_t stream)
{
    if (lo == 0)
        COLO_CUDA_TRY(colo_cuda_typed(from->data, from->dtype, "hidden"));
    colo_k_rows_t k = flat(r);
    return colo_cuda_report(
        colo_k_rows_take(&k, lo, hi, hidden, to, from->data, from->stride, from->dtype, stream),
        "lm_head: hidden rows");
}

static colo_status_t put_rows(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                              int64_t hidden, const struct colo_linear_matrix *to, const void *from,
                              colo_stream_t stream)
{
    if (lo == 0)
        COLO_CUDA_TRY(colo_cuda_typed(to->data, to->dtype, "d_hidden"));
    colo_k_rows_t k = flat(r);
    return colo_cuda_report(
        colo_k_rows_put(&k, lo, hi, hidden, to->data, to->stride, from, to->dtype, stream),
        "lm_head: d_hidden rows");
}

static colo_status_t clear_rows(const struct colo_linear_rows *r, int64_t hidden,
                                const struct colo_linear_matrix *to, colo_stream_t stream)
{
    if (r->tokens > 0)
        COLO_CUDA_TRY(colo_cuda_typed(to->data, to->dtype, "d_hidden"));
    colo_k_rows_t k = flat(r);
    return colo_cuda_report(colo_k_rows_clear(&k, hidden, to->data, to->stride, to->dtype, stream),
                            "lm_head: d_hidden rows");
}

static colo_status_t sum_rows(const struct colo_linear_matrix *z, int64_t rows, int64_t columns,
                              const float *scale, void *to, int64_t to_step, double beta,
                              colo_stream_t stream)
{
    return colo_cuda_report(colo_k_rows_sum(z->data, z->stride, z->dtype, rows, columns, scale, to,
                                            to_step, beta, stream),
                            "lm_head: d_bias");
}

static colo_status_t convert(const struct colo_linear_matrix *to,
                             const struct colo_linear_matrix *from, int64_t rows, int64_t columns,
                             colo_stream_t stream)
{
    return colo_cuda_report(colo_k_rows_convert(to->data, to->stride, to->dtype, from->data,
                                                from->stride, from->dtype, rows, columns, stream),
                            "lm_head: conversion");
}

const struct colo_linear_ops colo_cuda_linear = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .product = product,
    .pack = pack,
    .upstream = upstream,
    .spread = spread,
    .take_rows = take_rows,
    .put_rows = put_rows,
    .clear_rows = clear_rows,
    .sum_rows = sum_rows,
    .convert = convert,
};
