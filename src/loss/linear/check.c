/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - what the lm_head path refuses, each with its numbers, before anything is
 * written.
 *
 * The config at create, then per call the batch, the outputs, the upstream gradient, the gradients
 * and the memory. What the logits path checks already (config, headers after a gather) is its own.
 * Weight and bias are the head's business.
 */
#include "loss/linear/workspace.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/sized.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static colo_status_t check_shard(const colo_logprob_config_t *config,
                                 const colo_lm_head_config_t *head, const colo_comm_t *group)
{
    colo_tensor_t like = {
        .mem = head->mem, .device = head->device, .ndim = 2, .shape = {0, head->rows}};
    COLO_TRY(colo_loss_check_shard(config, &like, group));
    return colo_loss_check_place(&like, group, "linear");
}

/* Products with segments are as wide on every rank, and the library adds up what they make. */
static colo_status_t check_segments(const colo_linear_logprob_config_t *config,
                                    const colo_lm_head_config_t *head, const colo_comm_t *group)
{
    const int32_t ranks = colo_comm_size(group);
    const int64_t each = colo_logprob_segments(&config->logprob, ranks) * config->logprob.segment;
    COLO_FAIL_IF(config->logprob.segment > 0 && head->rows != each, COLO_ERR_SHAPE,
                 "linear: the head has %" PRId64 " rows here, expected %" PRId64
                 " with segments of %" PRId64 " on %d ranks; pad it",
                 head->rows, each, config->logprob.segment, (int)ranks);
    COLO_FAIL_IF(
        config->logprob.segment > 0 && ranks > 1 && !config->frozen_hidden &&
            config->d_hidden == COLO_D_HIDDEN_PARTIAL,
        COLO_ERR_ARG,
        "linear: d_hidden is partial with segments, expected all-reduce or reduce-scatter: the "
        "caller's sum over ranks has another order on other numbers of ranks");
    return COLO_OK;
}

colo_status_t colo_linear_check_apart(const colo_comm_t *head, const colo_comm_t *group)
{
    const int32_t both = head ? colo_comm_in_both(head, group) : 0;
    COLO_FAIL_IF(both > 1, COLO_ERR_ARG,
                 "linear: %d ranks of group are in the head's group, too, expected one: ranks of "
                 "group have the same tokens, those of the head's group have others",
                 (int)both);
    return COLO_OK;
}

static colo_status_t read_config(const colo_linear_logprob_config_t *given,
                                 colo_linear_logprob_config_t *own)
{
    const char *what = "linear: config";
    *own = (colo_linear_logprob_config_t){COLO_LINEAR_LOGPROB_CONFIG_INIT};
    COLO_TRY(COLO_SIZED_READ(own, given, mode, what, "COLO_LINEAR_LOGPROB_CONFIG_INIT"));
    own->frozen_lora = own->frozen_lora || own->lora == 0;
    const colo_status_t st = colo_logprob_read(&given->logprob, &own->logprob);
    return st < 0 ? colo_fail_prefix(st, "%s", what) : COLO_OK;
}

colo_status_t colo_linear_check_config(const colo_linear_logprob_config_t *config,
                                       const colo_lm_head_t *head, const colo_comm_t *group,
                                       colo_linear_logprob_config_t *own)
{
    COLO_TRY(read_config(config, own));
    COLO_TRY(colo_logprob_config_check(&own->logprob));
    COLO_FAIL_IF(!head, COLO_ERR_ARG, "linear: head is NULL; colo_lm_head_create() makes one");
    const colo_lm_head_config_t *head_config = colo_lm_head_config(head);
    const colo_dtype_t sums = head_config->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    COLO_FAIL_IF((unsigned)own->mode > COLO_LINEAR_LOGPROB_EARLY, COLO_ERR_ARG,
                 "linear: mode %d is unknown", (int)own->mode);
    COLO_FAIL_IF(own->mode == COLO_LINEAR_LOGPROB_EARLY && head_config->dtype == COLO_F64,
                 COLO_ERR_ARG,
                 "linear: mode early, but the head is f64, expected f32, bf16 or f16; "
                 "colo_linear_logprob_loss() takes it");
    COLO_FAIL_IF((unsigned)own->d_hidden > COLO_D_HIDDEN_REDUCE_SCATTER, COLO_ERR_ARG,
                 "linear: d_hidden %d is unknown", (int)own->d_hidden);
    COLO_FAIL_IF(own->logits_dtype != head_config->dtype && own->logits_dtype != sums, COLO_ERR_ARG,
                 "linear: logits_dtype %s, expected %s or the head's %s",
                 colo_dtype_name(own->logits_dtype), colo_dtype_name(sums),
                 colo_dtype_name(head_config->dtype));
    COLO_FAIL_IF(own->d_weight_dtype != head_config->dtype && own->d_weight_dtype != sums,
                 COLO_ERR_ARG, "linear: d_weight_dtype %s, expected %s or the head's %s",
                 colo_dtype_name(own->d_weight_dtype), colo_dtype_name(sums),
                 colo_dtype_name(head_config->dtype));
    COLO_FAIL_IF(own->d_weight_add && own->d_weight_dtype != sums, COLO_ERR_ARG,
                 "linear: d_weight_add to %s would lose digits, expected d_weight_dtype %s",
                 colo_dtype_name(own->d_weight_dtype), colo_dtype_name(sums));
    COLO_FAIL_IF(
        own->keep_in_place && own->logits_dtype != head_config->dtype, COLO_ERR_ARG,
        "linear: keep_in_place with logits of %s and gradients of %s, expected the same dtype",
        colo_dtype_name(own->logits_dtype), colo_dtype_name(head_config->dtype));
    COLO_FAIL_IF(
        own->share_d_weight && (own->mode != COLO_LINEAR_LOGPROB_EARLY || own->frozen_weight ||
                                own->d_weight_add || own->d_weight_dtype != head_config->dtype ||
                                colo_lm_head_group(head) || own->logprob.segment > 0),
        COLO_ERR_ARG,
        "linear: share_d_weight with mode %d, d_weight %s of %s, %s head and segments of %" PRId64
        ", expected mode %d, d_weight written of %s, a resident head and no segments",
        (int)own->mode,
        own->frozen_weight  ? "frozen"
        : own->d_weight_add ? "added"
                            : "written",
        colo_dtype_name(own->d_weight_dtype), colo_lm_head_group(head) ? "a sharded" : "a resident",
        own->logprob.segment, (int)COLO_LINEAR_LOGPROB_EARLY, colo_dtype_name(head_config->dtype));
    COLO_FAIL_IF(own->lora < 0 || own->lora > INT64_MAX / 4096, COLO_ERR_ARG,
                 "linear: lora is %" PRId64 ", expected the rows of A, or 0", own->lora);
    COLO_TRY(check_shard(&own->logprob, head_config, group));
    COLO_TRY(colo_linear_check_apart(colo_lm_head_group(head), group));
    return check_segments(own, head_config, group);
}

/* ---- a call ---- */

static colo_status_t check_place(const colo_linear_logprob_t *linear, const colo_tensor_t *tensor,
                                 const char *what)
{
    const colo_lm_head_config_t *head = colo_lm_head_config(linear->head);
    return colo_loss_check_in(tensor, head->mem, head->device, what);
}

colo_status_t colo_linear_check_states(const colo_lm_head_t *of, const colo_tensor_t *tensor,
                                       const char *what, int64_t rows, bool written)
{
    const colo_lm_head_config_t *head = colo_lm_head_config(of);
    COLO_TRY(colo_loss_check_matrix(tensor, what, written));
    COLO_FAIL_IF(tensor->dtype != head->dtype, COLO_ERR_ARG, "%s: dtype %s, the head is %s", what,
                 colo_dtype_name(tensor->dtype), colo_dtype_name(head->dtype));
    COLO_FAIL_IF(
        tensor->shape[1] != head->hidden || (rows >= 0 && tensor->shape[0] != rows), COLO_ERR_SHAPE,
        "%s: [%" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64 "]", what,
        tensor->shape[0], tensor->shape[1], rows >= 0 ? rows : tensor->shape[0], head->hidden);
    return colo_loss_check_in(tensor, head->mem, head->device, what);
}

/* A matrix of a LoRA, or its gradient, of the dtype of sums and contiguous. */
static colo_status_t check_factor(const colo_lm_head_config_t *head, const colo_tensor_t *tensor,
                                  const char *what, int64_t rank, int64_t rows, int64_t columns,
                                  bool gradient)
{
    const colo_dtype_t sums = head->dtype == COLO_F64 ? COLO_F64 : COLO_F32,
                       dtype = gradient ? sums : head->dtype;
    COLO_FAIL_IF(!tensor, COLO_ERR_ARG, "linear: %s is NULL, config.%slora is %" PRId64, what,
                 strncmp(what, "teacher_", 8) == 0 ? "teacher_" : "", rank);
    COLO_TRY(colo_loss_check_matrix(tensor, what, gradient));
    COLO_FAIL_IF(tensor->dtype != dtype, COLO_ERR_ARG, "%s: dtype %s, expected %s", what,
                 colo_dtype_name(tensor->dtype), colo_dtype_name(dtype));
    COLO_FAIL_IF(tensor->shape[0] != rows || tensor->shape[1] != columns ||
                     (gradient && !colo_tensor_is_contiguous(tensor)),
                 COLO_ERR_SHAPE,
                 "%s: [%" PRId64 ", %" PRId64 "], rows %" PRId64
                 " elements apart, expected [%" PRId64 ", %" PRId64 "]%s",
                 what, tensor->shape[0], tensor->shape[1], tensor->stride[0], rows, columns,
                 gradient ? ", contiguous" : "");
    return colo_loss_check_in(tensor, head->mem, head->device, what);
}

colo_status_t colo_linear_check_lora(const colo_lm_head_t *of, int64_t rank,
                                     const colo_lora_t *lora, const char *what)
{
    const colo_lm_head_config_t *head = colo_lm_head_config(of);
    char a[32], b[32];
    COLO_FAIL_IF(!lora != (rank == 0), COLO_ERR_ARG,
                 "linear: batch.%s is %s, config.%s is %" PRId64, what, lora ? "given" : "NULL",
                 what, rank);
    if (!lora)
        return COLO_OK;
    snprintf(a, sizeof a, "%s.a", what);
    snprintf(b, sizeof b, "%s.b", what);
    COLO_TRY(check_factor(head, lora->a, a, rank, rank, head->hidden, false));
    return check_factor(head, lora->b, b, rank, head->rows, rank, false);
}

static colo_status_t check_count(const colo_linear_logprob_t *linear,
                                 const colo_linear_logprob_batch_t *batch)
{
    const int64_t ignore = linear->config.logprob.ignore_index, tokens = batch->targets->shape[0];
    int64_t count = 0;
    if (batch->max_valid < 0 || batch->targets->mem != COLO_MEM_HOST)
        return COLO_OK;
    for (int64_t token = 0; token < tokens; token++)
        count +=
            ((const int64_t *)batch->targets->data)[token * batch->targets->stride[0]] != ignore;
    COLO_FAIL_IF(count > batch->max_valid, COLO_ERR_ARG,
                 "linear: max_valid is %" PRId64 ", but %" PRId64 " of %" PRId64
                 " targets are not ignore_index",
                 batch->max_valid, count, tokens);
    return COLO_OK;
}

colo_status_t colo_linear_check_batch(const colo_linear_logprob_t *linear,
                                      const colo_linear_logprob_batch_t *given,
                                      colo_linear_logprob_batch_t *batch)
{
    const colo_logprob_config_t *config = &linear->config.logprob;
    *batch = (colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT};
    COLO_TRY(COLO_SIZED_READ(batch, given, class_weight, "linear: batch",
                             "COLO_LINEAR_LOGPROB_BATCH_INIT"));
    COLO_FAIL_IF(!batch->hidden || !batch->targets, COLO_ERR_ARG, "linear: %s is NULL",
                 !batch->hidden ? "hidden" : "targets");
    COLO_TRY(colo_linear_check_states(linear->head, batch->hidden, "hidden", -1, false));
    COLO_TRY(colo_loss_check_line(batch->targets, "targets", COLO_I64, batch->hidden->shape[0],
                                  " as the rows of hidden"));
    COLO_TRY(check_place(linear, batch->targets, "targets"));
    COLO_TRY(colo_loss_check_support(batch->support, config, batch->targets, batch->hidden));
    COLO_TRY(
        colo_loss_check_class_weight(batch->class_weight, config, linear->columns, batch->hidden));
    COLO_TRY(
        colo_loss_check_temperature(batch->temperature, config, batch->targets, batch->hidden));
    COLO_TRY(colo_linear_check_lora(linear->head, linear->config.lora, batch->lora, "lora"));
    return check_count(linear, batch);
}

/* What the arrays of @tokens are compared with. */
static colo_tensor_t like_tokens(const colo_linear_logprob_t *linear, int64_t tokens)
{
    const colo_lm_head_config_t *head = colo_lm_head_config(linear->head);
    return (colo_tensor_t){
        .mem = head->mem, .device = head->device, .ndim = 2, .shape = {tokens, head->rows}};
}

colo_status_t colo_linear_check_out(const colo_linear_logprob_t *linear,
                                    const colo_logprob_out_t *given, int64_t tokens,
                                    struct colo_logprob_out *out)
{
    const colo_tensor_t like = like_tokens(linear, tokens);
    colo_logprob_out_t own = {COLO_LOGPROB_OUT_INIT};
    COLO_TRY(COLO_SIZED_READ(&own, given, logp, "linear: out", "COLO_LOGPROB_OUT_INIT"));
    COLO_TRY(
        colo_logprob_check_out(&linear->config.logprob, &own, "linear", linear->stat_dtype, &like));
    *out = colo_logprob_addresses(&own);
    return COLO_OK;
}

colo_status_t colo_linear_check_upstream(const colo_linear_logprob_t *linear,
                                         const colo_linear_logprob_upstream_t *given,
                                         int64_t tokens, bool factor,
                                         colo_linear_logprob_upstream_t *up)
{
    const colo_tensor_t like = like_tokens(linear, tokens);
    const colo_dtype_t dtype = linear->stat_dtype;
    *up = (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT};
    COLO_TRY(
        COLO_SIZED_READ(up, given, lse, "linear: upstream", "COLO_LINEAR_LOGPROB_UPSTREAM_INIT"));
    COLO_FAIL_IF(factor && (up->logp != 0 || up->entropy != 0 || up->lse != 0 || up->mean),
                 COLO_ERR_ARG,
                 "linear: upstream has logp %g, entropy %g, lse %g, mean %d, expected loss and "
                 "d_loss[0] only in backward of mode early",
                 up->logp, up->entropy, up->lse, up->mean);
    COLO_FAIL_IF(up->lse != 0 && !linear->config.logprob.want_lse, COLO_ERR_ARG,
                 "linear: upstream.lse is %g, config.want_lse is false", up->lse);
    COLO_FAIL_IF(up->entropy != 0 && !linear->config.logprob.want_entropy, COLO_ERR_ARG,
                 "linear: upstream.entropy is %g, config.want_entropy is false", up->entropy);
    COLO_FAIL_IF(up->loss != 0 && !linear->config.logprob.want_loss && !factor, COLO_ERR_ARG,
                 "linear: upstream.loss is %g, config.want_loss is false", up->loss);
    COLO_TRY(colo_loss_check_array(up->d_logp, "d_logp", dtype, tokens, 0, &like));
    COLO_TRY(colo_loss_check_array(up->d_entropy, "d_entropy", dtype, tokens, 0, &like));
    COLO_TRY(colo_loss_check_array(up->d_lse, "d_lse", dtype, tokens, 0, &like));
    return colo_loss_check_array(up->d_loss, "d_loss", dtype, factor ? 1 : tokens, 0, &like);
}

static colo_status_t check_d_hidden(const colo_linear_logprob_t *linear,
                                    const colo_tensor_t *d_hidden, const colo_tensor_t *hidden)
{
    const int64_t tokens = hidden->shape[0], ranks = colo_comm_size(linear->group);
    const bool scatter = linear->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER;
    COLO_FAIL_IF(scatter && tokens % ranks, COLO_ERR_SHAPE,
                 "d_hidden: %" PRId64 " tokens do not split over %" PRId64 " ranks", tokens, ranks);
    COLO_TRY(colo_linear_check_states(linear->head, d_hidden, "d_hidden",
                                      scatter ? tokens / ranks : tokens, true));
    COLO_FAIL_IF(linear->config.d_hidden != COLO_D_HIDDEN_PARTIAL &&
                     !colo_tensor_is_contiguous(d_hidden),
                 COLO_ERR_SHAPE,
                 "d_hidden: rows are %" PRId64
                 " elements apart, a collective over it needs contiguous rows of %" PRId64,
                 d_hidden->stride[0], d_hidden->shape[1]);
    COLO_FAIL_IF(colo_loss_ranges_overlap(d_hidden, hidden), COLO_ERR_ARG,
                 "d_hidden: overlaps hidden");
    return COLO_OK;
}

colo_status_t colo_linear_check_grads(const colo_linear_logprob_t *linear,
                                      const colo_linear_logprob_grads_t *grads,
                                      const colo_tensor_t *hidden)
{
    const colo_linear_logprob_config_t *config = &linear->config;
    const colo_lm_head_config_t *head = colo_lm_head_config(linear->head);
    COLO_TRY(COLO_SIZED_CHECK(grads, d_bias, "linear: grads", "COLO_LINEAR_LOGPROB_GRADS_INIT"));
    COLO_FAIL_IF(config->frozen_hidden != !grads->d_hidden, COLO_ERR_ARG,
                 "linear: d_hidden is %s, config.frozen_hidden is %s",
                 grads->d_hidden ? "given" : "NULL", config->frozen_hidden ? "true" : "false");
    COLO_FAIL_IF(config->frozen_weight != !grads->d_weight, COLO_ERR_ARG,
                 "linear: d_weight is %s, config.frozen_weight is %s",
                 grads->d_weight ? "given" : "NULL", config->frozen_weight ? "true" : "false");
    COLO_FAIL_IF(config->frozen_weight && grads->d_bias, COLO_ERR_ARG,
                 "linear: d_bias is given, config.frozen_weight is true");
    COLO_FAIL_IF(grads->d_weight && grads->d_weight->dtype != config->d_weight_dtype, COLO_ERR_ARG,
                 "d_weight: dtype %s, config.d_weight_dtype is %s",
                 colo_dtype_name(grads->d_weight->dtype), colo_dtype_name(config->d_weight_dtype));
    if (config->lora > 0 && !config->frozen_lora) {
        COLO_TRY(
            COLO_SIZED_CHECK(grads, d_lora_b, "linear: grads", "COLO_LINEAR_LOGPROB_GRADS_INIT"));
        COLO_TRY(check_factor(head, grads->d_lora_a, "d_lora_a", config->lora, config->lora,
                              linear->hidden, true));
        COLO_TRY(check_factor(head, grads->d_lora_b, "d_lora_b", config->lora, linear->columns,
                              config->lora, true));
    }
    return grads->d_hidden ? check_d_hidden(linear, grads->d_hidden, hidden) : COLO_OK;
}

colo_status_t colo_linear_check_saved(const colo_linear_logprob_t *linear,
                                      const colo_linear_logprob_saved_t *saved)
{
    uint64_t weight = 0;
    COLO_TRY(COLO_SIZED_CHECK(saved, valid, "linear: saved", "COLO_LINEAR_LOGPROB_SAVED_INIT"));
    COLO_FAIL_IF(!saved->valid, COLO_ERR_STATE,
                 "linear: the saved state is not valid: no forward filled it, or a backward in "
                 "place ended it");
    COLO_FAIL_IF(saved->of != linear, COLO_ERR_ARG, "linear: the saved state is of another object");
    COLO_TRY(colo_loss_check_version(&saved->hidden, saved->hidden_version, "hidden states"));
    COLO_TRY(colo_loss_check_version(&saved->targets, saved->targets_version, "targets"));
    COLO_TRY(colo_loss_check_support_version(&saved->support));
    if (linear->config.logprob.has_class_weight)
        COLO_TRY(colo_loss_check_version(&saved->class_weight, saved->class_weight_version,
                                         "class_weight"));
    if (linear->config.lora > 0) {
        const uint64_t now = colo_loss_version(&saved->lora_a) + colo_loss_version(&saved->lora_b);
        COLO_FAIL_IF(now != saved->lora_version, COLO_ERR_MODIFIED,
                     "a LoRA was written between forward and backward: version %" PRIu64
                     ", saved at %" PRIu64,
                     now, saved->lora_version);
    }
    COLO_TRY(colo_lm_head_bound(linear->head, &weight));
    COLO_FAIL_IF(weight != saved->weight_version, COLO_ERR_MODIFIED,
                 "the head was written between forward and backward: version %" PRIu64
                 ", saved at %" PRIu64,
                 weight, saved->weight_version);
    return COLO_OK;
}

colo_status_t colo_linear_check_shared(const struct colo_linear_size *size,
                                       const colo_linear_logprob_grads_t *grads,
                                       const void *d_weight)
{
    COLO_FAIL_IF(colo_linear_shares(size) && (grads->d_weight->data != d_weight ||
                                              !colo_tensor_is_contiguous(grads->d_weight)),
                 COLO_ERR_ARG,
                 "d_weight: at %p, rows %" PRId64 " elements apart, expected saved.d_weight, "
                 "%p, without gaps: it holds gradients of logits",
                 grads->d_weight->data, grads->d_weight->stride[0], d_weight);
    return COLO_OK;
}

colo_status_t colo_linear_check_memory(const void *memory, const char *what, int64_t bytes)
{
    COLO_FAIL_IF(!memory && bytes > 0, COLO_ERR_ARG,
                 "linear: %s is NULL, expected %" PRId64 " bytes", what, bytes);
    return colo_mem_check_aligned(memory, "linear", what);
}
