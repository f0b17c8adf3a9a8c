/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.c - the logits path: what call.c does, with stats and merge around the gather.
 *
 * Backward: no collective. The logits are read again from where they were; version counters tell
 * whether they still are what forward saw. In place is legal element by element (an element is read
 * before it is written), and ends the saved state, for the logits are gone.
 *
 * The checks are in validate.c, the formulas in the kernels (args.h, host/logprob.c), the
 * layout of a block in args.h.
 */
#include "loss/call.h"

#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/validate.h"

#include <inttypes.h>

static colo_status_t check(const struct colo_loss_call *call)
{
    const colo_logprob_config_t *config = &call->base;
    const colo_logprob_batch_t *batch = &call->batch.logprob;
    const colo_tensor_t *logits = call->logits, *targets = call->targets;
    COLO_TRY(colo_loss_check_line(targets, "targets", COLO_I64, logits->shape[0],
                                  " as the logits' rows"));
    COLO_TRY(colo_loss_check_memory(targets, logits, "targets"));
    COLO_TRY(colo_loss_check_words(config, logits));
    COLO_TRY(colo_logprob_check_out(config, &call->out.logprob, "logprob",
                                    colo_logprob_stat_dtype(logits->dtype), logits));
    COLO_TRY(colo_loss_check_call_memory(call));
    COLO_TRY(colo_loss_check_class_weight(batch->class_weight, config, logits->shape[1], logits));
    COLO_TRY(colo_loss_check_temperature(batch->temperature, config, targets, logits));
    return colo_loss_check_support(batch->support, config, targets, logits);
}

static uint64_t hash_config(const struct colo_logprob_args *args)
{
    return colo_logprob_hash_config(&args->config, args->dtype);
}

static colo_status_t local(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    return call->kernels->logprob_stats(args, call->stream);
}

static colo_status_t merge(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    return call->kernels->logprob_merge(args, call->stream);
}

static const colo_block_array_t arrays[] = {COLO_LOGPROB_ARRAYS};
static const struct colo_loss_kind kind = {
    .name = "logprob",
    .config = COLO_LOSS_SIZED("logprob: config", colo_logprob_config_t, label_smoothing,
                              COLO_LOGPROB_CONFIG_INIT),
    .batch =
        COLO_LOSS_SIZED("logprob: batch", colo_logprob_batch_t, support, COLO_LOGPROB_BATCH_INIT),
    .out = COLO_LOSS_SIZED("logprob: out", colo_logprob_out_t, logp, COLO_LOGPROB_OUT_INIT),
    .state = COLO_LOSS_STATE("logprob: saved", colo_logprob_saved_t, COLO_LOGPROB_SAVED_INIT),
    .upstream = COLO_LOSS_SIZED("logprob: upstream", colo_logprob_upstream_t, d_logp,
                                COLO_LOGPROB_UPSTREAM_INIT),
    .is_base = true,
    .chunked = true,
    COLO_LOSS_ARRAYS(arrays),
    .wanted = colo_logprob_wanted,
    .check = check,
    .hash_config = hash_config,
    .describe = colo_logprob_describe,
    .hash_inputs = colo_logprob_hash_targets,
    .local = local,
    .merge = merge};

colo_status_t colo_logprob_saved_size(const colo_logprob_config_t *config, colo_dtype_t dtype,
                                      int64_t tokens, size_t *bytes)
{
    COLO_TRY(colo_loss_check_dtype("logprob", dtype));
    return colo_loss_saved_size(&kind, config, tokens, bytes);
}

colo_status_t colo_logprob_workspace_size(const colo_logprob_config_t *config, colo_dtype_t dtype,
                                          int64_t tokens, int32_t ranks, size_t *bytes)
{
    return colo_loss_workspace_size(&kind, config, dtype, tokens, ranks, bytes);
}

colo_status_t colo_logprob_forward(const colo_logprob_config_t *config,
                                   const colo_logprob_batch_t *batch, colo_comm_t *group,
                                   const colo_logprob_out_t *out, colo_logprob_saved_t *saved,
                                   void *saved_memory, void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_logprob_args args;
    struct colo_loss_call call = {.kind = &kind,
                                  .given = config,
                                  .given_batch = batch,
                                  .given_out = out,
                                  .group = group,
                                  .given_saved = saved,
                                  .saved_memory = saved_memory,
                                  .workspace = workspace,
                                  .stream = stream};
    COLO_TRY(colo_loss_open(&call, &args));
    const colo_logprob_batch_t *in = &call.batch.logprob;
    const colo_logprob_saved_t all = {
        .logits = *call.logits,
        .targets = *call.targets,
        .support = colo_loss_save_support(in->support),
        .class_weight = in->class_weight ? *in->class_weight : (colo_tensor_t){.ndim = 0},
        .logits_version = colo_loss_version(call.logits), /* before the first row is read */
        .targets_version = colo_loss_version(call.targets),
        .class_weight_version = in->class_weight ? colo_loss_version(in->class_weight) : 0,
        .memory = saved_memory,
        .valid = true,
        .config = call.config.logprob};
    args.support = colo_loss_support(&all.support);
    args.class_weight = all.class_weight.data;
    args.temperature = colo_loss_address(in->temperature);
    args.out = colo_logprob_addresses(&call.out.logprob);
    args.saved = saved_memory;
    COLO_TRY(colo_loss_run(&call, &args));
    return colo_loss_save(&call, &all);
}

static colo_status_t check_upstream(const colo_logprob_config_t *config,
                                    const colo_logprob_upstream_t *up, const colo_tensor_t *logits)
{
    const colo_dtype_t dtype = colo_logprob_stat_dtype(logits->dtype);
    const int64_t tokens = logits->shape[0];
    COLO_FAIL_IF(up->d_entropy && !config->want_entropy, COLO_ERR_ARG,
                 "logprob: d_entropy is given, forward ran with want_entropy false");
    COLO_FAIL_IF(up->d_loss && !config->want_loss, COLO_ERR_ARG,
                 "logprob: d_loss is given, forward ran with want_loss false");
    COLO_FAIL_IF(up->d_lse && !config->want_lse, COLO_ERR_ARG,
                 "logprob: d_lse is given, forward ran with want_lse false");
    COLO_TRY(colo_loss_check_array(up->d_logp, "d_logp", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(up->d_entropy, "d_entropy", dtype, tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(up->d_loss, "d_loss", dtype, tokens, 0, logits));
    return colo_loss_check_array(up->d_lse, "d_lse", dtype, tokens, 0, logits);
}

colo_status_t colo_logprob_backward(colo_logprob_saved_t *saved,
                                    const colo_logprob_upstream_t *upstream,
                                    const colo_tensor_t *d_logits, colo_stream_t stream)
{
    COLO_RANGE();
    COLO_TRY(colo_loss_check_saved(&kind, saved));
    struct colo_logprob_args args;
    struct colo_loss_call call = {.kind = &kind,
                                  .given = &saved->config,
                                  .logits = &saved->logits,
                                  .targets = &saved->targets,
                                  .valid = saved->valid,
                                  .version = saved->logits_version};
    COLO_TRY(colo_loss_reopen(&call, upstream, d_logits, &args));
    const colo_logprob_upstream_t *up = &call.upstream.logprob;
    COLO_TRY(check_upstream(&call.base, up, call.logits));
    COLO_TRY(colo_loss_check_version(call.targets, saved->targets_version, "targets"));
    COLO_TRY(colo_loss_check_support_version(&saved->support));
    if (call.base.has_class_weight)
        COLO_TRY(colo_loss_check_version(&saved->class_weight, saved->class_weight_version,
                                         "class_weight"));
    args.support = colo_loss_support(&saved->support);
    args.class_weight = saved->class_weight.data;
    args.saved = saved->memory;
    args.upstream = (struct colo_logprob_upstream){.d_logp = colo_loss_address(up->d_logp),
                                                   .d_entropy = colo_loss_address(up->d_entropy),
                                                   .d_loss = colo_loss_address(up->d_loss),
                                                   .d_lse = colo_loss_address(up->d_lse)};
    COLO_TRY(call.kernels->logprob_grad(&args, stream));
    saved->valid = !call.in_place;
    return COLO_OK;
}
