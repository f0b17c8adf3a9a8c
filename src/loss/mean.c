/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mean.c - sums and means of values over tokens and ranks, next to where the values are: weighted
 * sums, and a loss as one number, forward and backward. The kernels are host/mean.c and
 * kernels/mean.cu.
 *
 * As reduce.c, whose rules hold: sum first, divide once, by an integer count of tokens; dp x cp,
 * never tp. Here values lie in tensors, so they may be on a GPU, and the result stays next to them:
 * the host does not wait to hand on a gradient.
 *
 * The mean of a loss is a training step's, in one call each way, on the stream of the losses. What
 * differs from a weighted sum: the count is read where the loss's kernels left it, the value comes
 * in the dtype of the losses, and what backward needs is one number, for all counted tokens have
 * the same gradient; tokens that do not count get it, too, and the loss's own backward drops it.
 * Which tokens count, and their gradient, are left to that.
 */
#include "loss/mean.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"
#include "core/range.h"
#include "loss/loss.h"
#include "loss/validate.h"

#include <inttypes.h>

/* ---- both ---- */

size_t colo_loss_weighted_workspace_size(int32_t ranks)
{
    int64_t bytes = (ranks > 1 ? ranks : 1) * (int64_t)sizeof(struct colo_mean_part);
    (void)colo_mem_round_ok(bytes, &bytes);
    return (size_t)bytes;
}

/* A rank that weighs values and a rank that counts them divide by different sums. In host memory
 * that is an error; on a device, where the host does not look, both get NaN. */
static colo_status_t check_parts(const struct colo_mean_args *args, const char *what)
{
    static const char *const kinds[] = {"a mean or sum by count", "a weighted sum",
                                        "a mean or sum by class weights"};
    for (int32_t r = 1; r < args->ranks; r++)
        COLO_FAIL_IF(args->parts[r].weighs != args->parts[0].weighs, COLO_ERR_MISMATCH,
                     "%s: found %s on rank 0 and %s on rank %d of the group, expected one of them; "
                     "give weights on all ranks or on none",
                     what, kinds[args->parts[0].weighs], kinds[args->parts[r].weighs], (int)r);
    return COLO_OK;
}

/* [T], f32 or f64, contiguous */
static colo_status_t check_values(const colo_tensor_t *values, const char *what)
{
    COLO_TRY(colo_tensor_check(values, what));
    COLO_FAIL_IF(values->dtype != COLO_F32 && values->dtype != COLO_F64, COLO_ERR_ARG,
                 "%s: dtype %s, expected f32 or f64", what, colo_dtype_name(values->dtype));
    COLO_FAIL_IF(values->ndim != 1 || !colo_tensor_is_contiguous(values), COLO_ERR_SHAPE,
                 "%s: %d axes, expected [T], contiguous", what, (int)values->ndim);
    return COLO_OK;
}

static colo_status_t check_workspace(const void *workspace, const char *what)
{
    COLO_FAIL_IF(!workspace, COLO_ERR_ARG,
                 "%s: workspace is NULL; colo_loss_weighted_workspace_size() tells how many bytes",
                 what);
    return colo_mem_check_aligned(workspace, what, "workspace");
}

/* The kernels and the all-gather between them. Of @args the caller sets what is its own: @values
 * and the group's numbers are added here. @st: what the check of this rank's other arguments gave;
 * if it is an error, @values and @args are not read. */
static colo_status_t run(struct colo_mean_args *args, const colo_tensor_t *values,
                         colo_comm_t *group, const char *what, colo_status_t st,
                         colo_stream_t stream)
{
    const colo_loss_kernels_t *kernels;
    COLO_FAIL_IF(!group, COLO_ERR_ARG, "%s: group is NULL, expected the dp x cp group", what);
    COLO_THEN(st, check_workspace(args->parts, what));
    COLO_THEN(st, colo_loss_check_place(values, group, what));
    COLO_THEN(st, colo_loss_kernels_for(values->mem, &kernels));
    COLO_TRY(colo_loss_ready(group, what, st));
    args->dtype = values->dtype;
    args->count = values->shape[0];
    args->values = values->data;
    args->rank = colo_comm_rank(group);
    args->ranks = colo_comm_size(group);
    COLO_TRY(colo_loss_fail_on(group, kernels->mean_local(args, stream)));
    if (args->ranks > 1)
        COLO_TRY(colo_comm_all_gather_for(group, COLO_CATEGORY_LOSS, args->parts + args->rank,
                                          args->parts, (int64_t)sizeof *args->parts, COLO_U8,
                                          stream));
    if (values->mem == COLO_MEM_HOST)
        COLO_TRY(check_parts(args, what));
    return kernels->mean_finish(args, stream);
}

/* ---- a weighted sum ---- */

static colo_status_t check_weighted(const colo_tensor_t *values, const colo_tensor_t *weights,
                                    const colo_tensor_t *mask, const colo_tensor_t *d_values,
                                    const colo_loss_weighted_t *out)
{
    COLO_TRY(check_values(values, "values"));
    const int64_t tokens = values->shape[0];
    COLO_TRY(colo_loss_check_array(weights, "weights", values->dtype, tokens, 0, values));
    COLO_TRY(colo_loss_check_array(d_values, "d_values", values->dtype, tokens, 0, values));
    COLO_TRY(colo_loss_check_array(mask, "mask", COLO_U8, tokens, 0, values));
    COLO_FAIL_IF(!out, COLO_ERR_ARG, "weighted sum: out is NULL");
    return COLO_OK;
}

colo_status_t colo_loss_weighted_sum(const colo_tensor_t *values, const colo_tensor_t *weights,
                                     const colo_tensor_t *mask, colo_comm_t *group,
                                     colo_loss_weighted_t *out, const colo_tensor_t *d_values,
                                     void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_mean_args args = {
        .weighs = COLO_MEAN_WEIGHS,
        .weights = colo_loss_address(weights),
        .mask = colo_loss_address(mask),
        .parts = workspace,
        .out = out,
        .d_values = colo_loss_address(d_values),
    };
    return run(&args, values, group, "weighted sum",
               check_weighted(values, weights, mask, d_values, out), stream);
}

/* ---- the mean of a loss ---- */

static colo_status_t check_mean(const colo_tensor_t *losses, const colo_loss_mean_t *out)
{
    COLO_TRY(check_values(losses, "losses"));
    COLO_TRY(COLO_SIZED_CHECK(out, factor, "loss mean: out", "COLO_LOSS_MEAN_INIT"));
    COLO_FAIL_IF(!out->value || !out->num || !out->den || !out->factor, COLO_ERR_ARG,
                 "loss mean: a member of out is NULL, expected memory for "
                 "value, num, den and factor");
    COLO_TRY(colo_loss_check_array(out->value, "out.value", losses->dtype, 1, 0, losses));
    COLO_TRY(colo_loss_check_array(out->num, "out.num", COLO_F64, 1, 0, losses));
    COLO_TRY(colo_loss_check_array(out->den, "out.den", COLO_F64, 1, 0, losses));
    return colo_loss_check_array(out->factor, "out.factor", COLO_F64, 1, 0, losses);
}

/* @st: what the checks of all other arguments gave */
static colo_status_t run_mean(struct colo_mean_args *args, const colo_tensor_t *losses,
                              colo_comm_t *group, const colo_loss_mean_t *out, colo_status_t st,
                              colo_stream_t stream)
{
    if (st == COLO_OK) {
        args->mean.value = out->value->data;
        args->mean.num = out->num->data;
        args->mean.den = out->den->data;
        args->mean.factor = out->factor->data;
    }
    return run(args, losses, group, "loss mean", st, stream);
}

static colo_status_t check_count(const colo_tensor_t *losses, const colo_tensor_t *n_valid)
{
    COLO_FAIL_IF(!n_valid, COLO_ERR_ARG,
                 "loss mean: n_valid is NULL, expected the count of tokens");
    return colo_loss_check_array(n_valid, "n_valid", COLO_I64, 1, 0, losses);
}

colo_status_t colo_loss_mean_forward(const colo_tensor_t *losses, const colo_tensor_t *n_valid,
                                     bool divide, colo_comm_t *group, const colo_loss_mean_t *out,
                                     void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    colo_status_t st = check_mean(losses, out);
    COLO_THEN(st, check_count(losses, n_valid));
    struct colo_mean_args args = {
        .counted = colo_loss_address(n_valid), .parts = workspace, .divide = divide};
    return run_mean(&args, losses, group, out, st, stream);
}

static colo_status_t check_weights(const colo_tensor_t *losses, const colo_tensor_t *weights)
{
    COLO_FAIL_IF(!weights, COLO_ERR_ARG, "loss mean: weights is NULL, expected those of tokens");
    return colo_loss_check_array(weights, "weights", losses->dtype, losses->shape[0], 0, losses);
}

colo_status_t colo_loss_mean_weighted(const colo_tensor_t *losses, const colo_tensor_t *weights,
                                      bool divide, colo_comm_t *group, const colo_loss_mean_t *out,
                                      void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    colo_status_t st = check_mean(losses, out);
    COLO_THEN(st, check_weights(losses, weights));
    struct colo_mean_args args = {.weighs = COLO_MEAN_WEIGHTED,
                                  .weights = colo_loss_address(weights),
                                  .parts = workspace,
                                  .divide = divide};
    return run_mean(&args, losses, group, out, st, stream);
}

colo_status_t colo_loss_mean_backward(const colo_tensor_t *factor,
                                      const colo_loss_mean_upstream_t *upstream,
                                      const colo_tensor_t *d_losses, colo_stream_t stream)
{
    COLO_RANGE();
    const colo_loss_kernels_t *kernels;
    COLO_TRY(check_values(d_losses, "d_losses"));
    COLO_FAIL_IF(!factor, COLO_ERR_ARG, "loss mean: factor is NULL, expected forward's");
    COLO_TRY(
        COLO_SIZED_CHECK(upstream, d_num, "loss mean: upstream", "COLO_LOSS_MEAN_UPSTREAM_INIT"));
    COLO_TRY(colo_loss_check_array(factor, "factor", COLO_F64, 1, 0, d_losses));
    COLO_TRY(colo_loss_check_array(upstream->d_value, "d_value", d_losses->dtype, 1, 0, d_losses));
    COLO_TRY(colo_loss_check_array(upstream->d_num, "d_num", COLO_F64, 1, 0, d_losses));
    COLO_TRY(colo_loss_kernels_for(d_losses->mem, &kernels));
    const struct colo_mean_grad_args args = {
        .dtype = d_losses->dtype,
        .count = d_losses->shape[0],
        .factor = factor->data,
        .d_num = colo_loss_address(upstream->d_num),
        .d_value = colo_loss_address(upstream->d_value),
        .d_values = d_losses->data,
    };
    return kernels->mean_grad(&args, stream);
}
