/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mean.c - a loss as one number, forward and backward, of losses that were counted where they were
 * made: a training step's sum or mean in one call each way, on the stream of the losses.
 *
 * The sums are weighted.c's, by reduce.c's rules. What differs: the count is read where the loss's
 * kernels left it, the value comes in the dtype of the losses, and what backward needs is one
 * number, for all counted tokens have the same gradient; tokens that do not count get it, too, and
 * the loss's own backward drops it. Which tokens count, and their gradient, are left to that.
 */
#include "loss/weighted.h"

#include "core/error.h"
#include "core/range.h"
#include "loss/loss.h"
#include "loss/validate.h"

static colo_status_t check(const colo_tensor_t *losses, const int64_t *n_valid,
                           const colo_loss_mean_t *out)
{
    COLO_TRY(colo_weighted_i_check_values(losses, "losses"));
    COLO_FAIL_IF(!n_valid, COLO_ERR_ARG,
                 "loss mean: n_valid is NULL, expected the count of tokens");
    COLO_FAIL_IF(!out || !out->value || !out->num || !out->den || !out->factor, COLO_ERR_ARG,
                 "loss mean: out or a member of it is NULL, expected memory for "
                 "value, num, den and factor");
    return COLO_OK;
}

colo_status_t colo_loss_mean_forward(const colo_tensor_t *losses, const int64_t *n_valid,
                                     bool divide, colo_comm_t *group, const colo_loss_mean_t *out,
                                     void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_weighted_args args = {.counted = n_valid, .parts = workspace, .divide = divide};
    const colo_status_t st = check(losses, n_valid, out);
    if (st == COLO_OK)
        args.mean = *out;
    return colo_weighted_i_run(&args, losses, group, "loss mean", st, stream);
}

colo_status_t colo_loss_mean_backward(const double *factor,
                                      const colo_loss_mean_upstream_t *upstream,
                                      const colo_tensor_t *d_losses, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_loss_kernels_t *kernels;
    COLO_TRY(colo_weighted_i_check_values(d_losses, "d_losses"));
    COLO_FAIL_IF(!factor, COLO_ERR_ARG, "loss mean: factor is NULL, expected forward's");
    COLO_FAIL_IF(!upstream, COLO_ERR_ARG, "loss mean: upstream is NULL");
    COLO_TRY(colo_loss_kernels_for(d_losses->mem, &kernels));
    const struct colo_mean_grad_args args = {
        .dtype = d_losses->dtype,
        .count = d_losses->shape[0],
        .factor = factor,
        .d_num = upstream->d_num,
        .d_value = upstream->d_value,
        .d_values = d_losses->data,
    };
    return kernels->mean_grad(&args, stream);
}
