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
#include "core/sized.h"
#include "core/range.h"
#include "loss/validate.h"

#include <inttypes.h>

/* Does the weight's gradient go straight into the caller's memory? */
static bool writes_in_place(const colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                            bool once)
{
    return !head->group && (once || grads->d_weight->dtype == colo_head_sum_dtype(head));
}

/* A bias's gradient is summed by kernels of the sum dtype only. */
static bool bias_apart(const colo_lm_head_t *head, const colo_lm_head_grads_t *grads)
{
    return head->config.has_bias && grads->d_weight->dtype != colo_head_sum_dtype(head);
}

/* Staging of the reduce-scatter, behind the sums. */
static size_t stage_bytes(const colo_lm_head_t *head)
{
    return head->group
               ? colo_comm_reduction_stage(
                     head->group, (int64_t)colo_head_bytes_of(head, colo_head_sum_dtype(head)))
               : 0;
}

size_t colo_lm_head_sums_size(const colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                              bool once)
{
    const colo_dtype_t sums = head ? colo_head_sum_dtype(head) : COLO_F32;
    if (!head || !grads || !grads->d_weight)
        return 0;
    if (writes_in_place(head, grads, once))
        return bias_apart(head, grads) ? (size_t)head->config.rows * colo_dtype_size(sums) : 0;
    return colo_head_bytes_of(head, sums) + stage_bytes(head);
}

size_t colo_lm_head_reduce_size(const colo_lm_head_t *head, const colo_lm_head_grads_t *grads)
{
    return grads && COLO_SIZED_CHECK(grads, add, "lm_head: grads", "COLO_LM_HEAD_GRADS_INIT") < 0
               ? 0
               : colo_lm_head_sums_size(head, grads, false);
}

static colo_status_t check_grads(const colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                 bool once, const void *workspace)
{
    COLO_TRY(COLO_SIZED_CHECK(grads, add, "lm_head: grads", "COLO_LM_HEAD_GRADS_INIT"));
    COLO_FAIL_IF(!grads->d_weight, COLO_ERR_ARG, "lm_head: d_weight is NULL");
    COLO_TRY(colo_head_check_param(head, grads->d_weight, 2, "d_weight"));
    COLO_TRY(colo_head_check_has_bias(head, grads->d_bias, "d_bias"));
    if (grads->d_bias)
        COLO_TRY(colo_head_check_param(head, grads->d_bias, 1, "d_bias"));
    const colo_dtype_t dtype = grads->d_weight->dtype;
    COLO_FAIL_IF(dtype != colo_head_sum_dtype(head) && dtype != head->config.dtype, COLO_ERR_ARG,
                 "d_weight: dtype %s, expected %s or the head's %s", colo_dtype_name(dtype),
                 colo_dtype_name(colo_head_sum_dtype(head)), colo_dtype_name(head->config.dtype));
    COLO_FAIL_IF(grads->d_bias && grads->d_bias->dtype != dtype, COLO_ERR_ARG,
                 "d_bias: dtype %s, d_weight is %s", colo_dtype_name(grads->d_bias->dtype),
                 colo_dtype_name(dtype));
    COLO_FAIL_IF(grads->add && dtype != colo_head_sum_dtype(head), COLO_ERR_ARG,
                 "d_weight: dtype %s cannot be added to without losing digits, expected %s",
                 colo_dtype_name(dtype), colo_dtype_name(colo_head_sum_dtype(head)));
    size_t bytes = colo_lm_head_sums_size(head, grads, once);
    COLO_FAIL_IF(bytes > 0 && !workspace, COLO_ERR_ARG,
                 "lm_head: workspace is NULL, expected %zu bytes", bytes);
    return colo_mem_check_aligned(workspace, "lm_head", "workspace");
}

static colo_tensor_t view_of(const colo_lm_head_t *head, void *data, int32_t axes, int64_t stride)
{
    colo_tensor_t view = {.data = data,
                          .dtype = colo_head_sum_dtype(head),
                          .mem = head->config.mem,
                          .device = head->config.mem == COLO_MEM_HOST ? -1 : head->config.device,
                          .ndim = axes,
                          .shape = {head->config.rows, axes == 2 ? head->config.hidden : 0},
                          .stride = {stride, axes == 2 ? 1 : 0}};
    return view;
}

colo_status_t colo_lm_head_open_sums(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                     bool once, void *workspace, colo_tensor_t *d_weight,
                                     colo_tensor_t *d_bias, bool *fresh)
{
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    COLO_TRY(check_grads(head, grads, once, workspace));
    const colo_dtype_t sums = colo_head_sum_dtype(head);
    const int64_t step = colo_head_pitch(head, sums);
    const bool straight = writes_in_place(head, grads, once);
    *fresh = !straight || !grads->add;
    *d_weight = straight ? *grads->d_weight : view_of(head, workspace, 2, step);
    if (!head->config.has_bias)
        *d_bias = (colo_tensor_t){.data = NULL};
    else if (straight)
        *d_bias = bias_apart(head, grads) ? view_of(head, workspace, 1, 1) : *grads->d_bias;
    else
        *d_bias = view_of(head, colo_linear_element(workspace, sums, head->config.hidden), 1, step);
    return COLO_OK;
}

/* Zeros in rows of a view, at once where they are back to back. */
static colo_status_t clear(const colo_lm_head_t *head, const colo_tensor_t *view,
                           colo_stream_t stream)
{
    const int64_t width = view->ndim == 2 ? view->shape[1] : 1;
    if (view->data && view->stride[0] == width)
        return colo_mem_zero(head->config.mem, view->data,
                             (size_t)(view->shape[0] * width) * colo_dtype_size(view->dtype),
                             stream);
    for (int64_t i = 0; view->data && i < view->shape[0]; i++)
        COLO_TRY(colo_mem_zero(head->config.mem,
                               colo_linear_element(view->data, view->dtype, i * view->stride[0]),
                               (size_t)width * colo_dtype_size(view->dtype), stream));
    return COLO_OK;
}

colo_status_t colo_lm_head_gradient(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                    void *workspace, colo_stream_t stream, colo_tensor_t *d_weight,
                                    colo_tensor_t *d_bias)
{
    COLO_RANGE();
    colo_tensor_t w, b;
    bool fresh = false;
    COLO_TRY(colo_lm_head_open_sums(head, grads, false, workspace, &w, &b, &fresh));
    if (fresh && !writes_in_place(head, grads, false)) {
        COLO_TRY(colo_mem_zero(head->config.mem, workspace,
                               colo_head_bytes_of(head, colo_head_sum_dtype(head)), stream));
    } else if (fresh) {
        COLO_TRY(clear(head, &w, stream));
        COLO_TRY(clear(head, &b, stream));
    }
    if (d_weight)
        *d_weight = w;
    if (d_bias)
        *d_bias = b;
    return COLO_OK;
}

/* rows x columns of @from, sums that are @step elements apart, into the caller's @to */
static colo_status_t deliver(const colo_lm_head_t *head, const colo_tensor_t *to, void *from,
                             int64_t step, int64_t columns, bool add, colo_stream_t stream)
{
    const int64_t rows = colo_head_rows_of(head), to_stride = to->stride[0];
    if (head->count == 0)
        return COLO_OK;
    if (!add) {
        const struct colo_linear_convert convert = {.to = {to->data, to_stride, to->dtype},
                                                    .from = {from, step, colo_head_sum_dtype(head)},
                                                    .rows = rows,
                                                    .columns = columns};
        return head->kernels->rows_convert(&convert, stream);
    }
    colo_box_t dst = colo_box_rows(to->data, rows, columns, to_stride),
               addends[2] = {dst, colo_box_rows(from, rows, columns, step)};
    return head->device->box_sum(&dst, addends, 2, to->dtype, stream);
}

colo_status_t colo_lm_head_reduce_sums(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                       bool once, void *workspace, colo_stream_t stream)
{
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "lm_head: head is NULL");
    const int64_t step = colo_head_pitch(head, colo_head_sum_dtype(head));
    colo_status_t st = check_grads(head, grads, once, workspace);
    if (!head->group) {
        COLO_TRY(st);
        if (writes_in_place(head, grads, once))
            return bias_apart(head, grads)
                       ? deliver(head, grads->d_bias, workspace, 1, 1, false, stream)
                       : COLO_OK;
    }
    const int64_t each = colo_head_slab(head, colo_head_sum_dtype(head));
    void *own = workspace;
    if (head->group) {
        COLO_TRY(colo_loss_ready(head->group, "lm_head reduce", st));
        own = colo_linear_element(workspace, colo_head_sum_dtype(head),
                                  colo_comm_rank(head->group) * each);
        colo_comm_set_stage(head->group,
                            workspace ? (char *)workspace +
                                            colo_head_bytes_of(head, colo_head_sum_dtype(head))
                                      : NULL,
                            stage_bytes(head));
        st = colo_comm_reduce_scatter_for(head->group, COLO_CATEGORY_HEAD, workspace, own, each,
                                          colo_head_sum_dtype(head), COLO_REDOP_SUM, stream);
        colo_comm_set_stage(head->group, NULL, 0);
        COLO_TRY(st);
    }
    COLO_TRY(
        deliver(head, grads->d_weight, own, step, colo_head_columns_of(head), grads->add, stream));
    if (!head->config.has_bias)
        return COLO_OK;
    return deliver(head, grads->d_bias,
                   colo_linear_element(own, colo_head_sum_dtype(head), head->config.hidden), step,
                   1, grads->add, stream);
}

colo_status_t colo_lm_head_reduce(colo_lm_head_t *head, const colo_lm_head_grads_t *grads,
                                  void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    return colo_lm_head_reduce_sums(head, grads, false, workspace, stream);
}
