/* SPDX-License-Identifier: Apache-2.0 */
/*
 * head-grads.c - the gradient of an lm_head: where passes add it, and how it comes back to the
 * shards.
 *
 * The whole gradient lies as the gathered head does (lm_head.c), as sums: fp32, or fp64 of an fp64
 * head. One reduce-scatter in place, then this rank's part is added to the caller's, or rounded
 * once.
 */
#include "loss/linear/head.h"

#include "core/error.h"
#include "core/range.h"
#include "loss/validate.h"

#include <inttypes.h>

/* Does the weight's gradient go straight into the caller's memory? */
static bool writes_in_place(const colo_lm_head_t *h, const colo_lm_head_grads_t *grads, bool once)
{
    return !h->group && (once || grads->d_weight->dtype == colo_head_sum_dtype(h));
}

/* A bias's gradient is summed by kernels of the sum dtype only. */
static bool bias_apart(const colo_lm_head_t *h, const colo_lm_head_grads_t *grads)
{
    return h->config.has_bias && grads->d_weight->dtype != colo_head_sum_dtype(h);
}

/* Staging of the reduce-scatter, behind the sums. */
static size_t stage_bytes(const colo_lm_head_t *h)
{
    return h->group ? colo_comm_i_reduction_stage(
                          h->group, (int64_t)colo_head_bytes_of(h, colo_head_sum_dtype(h)))
                    : 0;
}

size_t colo_lm_head_i_reduce_size(const colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                  bool once)
{
    const colo_dtype_t sums = h ? colo_head_sum_dtype(h) : COLO_F32;
    if (!h || !grads || !grads->d_weight)
        return 0;
    if (writes_in_place(h, grads, once))
        return bias_apart(h, grads) ? (size_t)h->config.rows * colo_dtype_size(sums) : 0;
    return colo_head_bytes_of(h, sums) + stage_bytes(h);
}

size_t colo_lm_head_reduce_size(const colo_lm_head_t *h, const colo_lm_head_grads_t *grads)
{
    return colo_lm_head_i_reduce_size(h, grads, false);
}

static colo_status_t check_grads(const colo_lm_head_t *h, const colo_lm_head_grads_t *g, bool once,
                                 const void *workspace)
{
    COLO_FAIL_IF(!g || !g->d_weight, COLO_ERR_ARG, "lm_head: d_weight is NULL");
    COLO_TRY(colo_head_check_param(h, g->d_weight, 2, "d_weight"));
    COLO_TRY(colo_head_check_has_bias(h, g->d_bias, "d_bias"));
    if (g->d_bias)
        COLO_TRY(colo_head_check_param(h, g->d_bias, 1, "d_bias"));
    const colo_dtype_t dtype = g->d_weight->dtype;
    COLO_FAIL_IF(dtype != colo_head_sum_dtype(h) && dtype != h->config.dtype, COLO_ERR_ARG,
                 "d_weight: dtype %s, expected %s or the head's %s", colo_dtype_name(dtype),
                 colo_dtype_name(colo_head_sum_dtype(h)), colo_dtype_name(h->config.dtype));
    COLO_FAIL_IF(g->d_bias && g->d_bias->dtype != dtype, COLO_ERR_ARG,
                 "d_bias: dtype %s, d_weight is %s", colo_dtype_name(g->d_bias->dtype),
                 colo_dtype_name(dtype));
    COLO_FAIL_IF(g->add && dtype != colo_head_sum_dtype(h), COLO_ERR_ARG,
                 "d_weight: dtype %s cannot be added to without losing digits, expected %s",
                 colo_dtype_name(dtype), colo_dtype_name(colo_head_sum_dtype(h)));
    size_t bytes = colo_lm_head_i_reduce_size(h, g, once);
    COLO_FAIL_IF(bytes > 0 && !workspace, COLO_ERR_ARG,
                 "lm_head: workspace is NULL, expected %zu bytes", bytes);
    return colo_mem_check_aligned(workspace, "lm_head", "workspace");
}

static colo_tensor_t view_of(const colo_lm_head_t *h, void *data, int32_t axes, int64_t stride)
{
    colo_tensor_t v = {.data = data,
                       .dtype = colo_head_sum_dtype(h),
                       .mem = h->config.mem,
                       .device = h->config.mem == COLO_HOST ? -1 : h->config.device,
                       .ndim = axes,
                       .shape = {h->config.rows, axes == 2 ? h->config.hidden : 0},
                       .stride = {stride, axes == 2 ? 1 : 0}};
    return v;
}

colo_status_t colo_lm_head_i_gradient(colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                      bool once, void *workspace, colo_tensor_t *d_weight,
                                      colo_tensor_t *d_bias, bool *fresh)
{
    COLO_FAIL_IF(!h, COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(check_grads(h, grads, once, workspace));
    const colo_dtype_t sums = colo_head_sum_dtype(h);
    const int64_t step = colo_head_pitch(h, sums);
    const bool straight = writes_in_place(h, grads, once);
    *fresh = !straight || !grads->add;
    *d_weight = straight ? *grads->d_weight : view_of(h, workspace, 2, step);
    if (!h->config.has_bias)
        *d_bias = (colo_tensor_t){.data = NULL};
    else if (straight)
        *d_bias = bias_apart(h, grads) ? view_of(h, workspace, 1, 1) : *grads->d_bias;
    else
        *d_bias = view_of(h, colo_linear_element(workspace, sums, h->config.hidden), 1, step);
    return COLO_OK;
}

/* Zeros in rows of a view, at once where they are back to back. */
static colo_status_t clear(const colo_lm_head_t *h, const colo_tensor_t *d, colo_stream_t stream)
{
    const int64_t width = d->ndim == 2 ? d->shape[1] : 1;
    if (d->data && d->stride[0] == width)
        return colo_mem_zero(h->config.mem, d->data,
                             (size_t)(d->shape[0] * width) * colo_dtype_size(d->dtype), stream);
    for (int64_t i = 0; d->data && i < d->shape[0]; i++)
        COLO_TRY(colo_mem_zero(h->config.mem,
                               colo_linear_element(d->data, d->dtype, i * d->stride[0]),
                               (size_t)width * colo_dtype_size(d->dtype), stream));
    return COLO_OK;
}

colo_status_t colo_lm_head_gradient(colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                    void *workspace, colo_stream_t stream, colo_tensor_t *d_weight,
                                    colo_tensor_t *d_bias)
{
    COLO_RANGE();
    colo_tensor_t w, b;
    bool fresh = false;
    COLO_TRY(colo_lm_head_i_gradient(h, grads, false, workspace, &w, &b, &fresh));
    if (fresh && !writes_in_place(h, grads, false)) {
        COLO_TRY(colo_mem_zero(h->config.mem, workspace,
                               colo_head_bytes_of(h, colo_head_sum_dtype(h)), stream));
    } else if (fresh) {
        COLO_TRY(clear(h, &w, stream));
        COLO_TRY(clear(h, &b, stream));
    }
    if (d_weight)
        *d_weight = w;
    if (d_bias)
        *d_bias = b;
    return COLO_OK;
}

/* rows x columns of @from, sums that are @step elements apart, into the caller's @to */
static colo_status_t deliver(const colo_lm_head_t *h, const colo_tensor_t *to, void *from,
                             int64_t step, int64_t columns, bool add, colo_stream_t stream)
{
    const int64_t rows = colo_head_rows_of(h), to_step = to->stride[0];
    if (h->count == 0)
        return COLO_OK;
    if (!add) {
        struct colo_linear_matrix dst = {to->data, to_step, to->dtype},
                                  src = {from, step, colo_head_sum_dtype(h)};
        return h->loss->rows_convert(&dst, &src, rows, columns, stream);
    }
    colo_box_t dst = colo_head_box_of(to->data, rows, columns, to_step),
               addends[2] = {dst, colo_head_box_of(from, rows, columns, step)};
    return h->ops->box_sum(&dst, addends, 2, to->dtype, stream);
}

colo_status_t colo_lm_head_i_reduce(colo_lm_head_t *h, const colo_lm_head_grads_t *grads, bool once,
                                    void *workspace, colo_stream_t stream)
{
    COLO_FAIL_IF(!h, COLO_ERR_ARG, "lm_head: head is NULL");
    const int64_t step = colo_head_pitch(h, colo_head_sum_dtype(h));
    colo_status_t st = check_grads(h, grads, once, workspace);
    if (!h->group) {
        COLO_TRY(st);
        if (writes_in_place(h, grads, once))
            return bias_apart(h, grads) ? deliver(h, grads->d_bias, workspace, 1, 1, false, stream)
                                        : COLO_OK;
    }
    const int64_t each = colo_head_slab(h, colo_head_sum_dtype(h));
    void *own = workspace;
    if (h->group) {
        COLO_TRY(colo_loss_i_ready(h->group, "lm_head reduce", st));
        own =
            colo_linear_element(workspace, colo_head_sum_dtype(h), colo_comm_rank(h->group) * each);
        colo_comm_i_set_stage(
            h->group,
            workspace ? (char *)workspace + colo_head_bytes_of(h, colo_head_sum_dtype(h)) : NULL,
            stage_bytes(h));
        st = colo_comm_i_reduce_scatter(h->group, COLO_CATEGORY_HEAD, workspace, own, each,
                                        colo_head_sum_dtype(h), COLO_SUM, stream);
        colo_comm_i_set_stage(h->group, NULL, 0);
        COLO_TRY(st);
    }
    COLO_TRY(deliver(h, grads->d_weight, own, step, colo_head_columns_of(h), grads->add, stream));
    if (!h->config.has_bias)
        return COLO_OK;
    return deliver(h, grads->d_bias,
                   colo_linear_element(own, colo_head_sum_dtype(h), h->config.hidden), step, 1,
                   grads->add, stream);
}

colo_status_t colo_lm_head_reduce(colo_lm_head_t *h, const colo_lm_head_grads_t *grads,
                                  void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    return colo_lm_head_i_reduce(h, grads, false, workspace, stream);
}
