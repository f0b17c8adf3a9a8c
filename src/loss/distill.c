/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.c - loss against a sharded target distribution: checks, the kernels in order, one gather.
 *
 * As logprob.c, with two matrices instead of one: what differs are the numbers per token (eight, in
 * distill-args.h), that no target has an owner, and that some divergences read the shards twice.
 * The checks of a shard, of a gradient and of the gathered headers are those of the logits path.
 * Targets are sharded, so nothing of them can be compared across ranks; configs and masks are.
 */
#include "loss/call.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <math.h>

static colo_status_t check_config(const union colo_loss_config *own)
{
    const colo_distill_config_t *c = &own->distill;
    COLO_TRY(COLO_SIZED_CHECK_ROOM(c, "distill: config", "COLO_DISTILL_CONFIG_INIT"));
    COLO_FAIL_IF(c->targets != COLO_DISTILL_LOGITS && c->targets != COLO_DISTILL_PROBS,
                 COLO_ERR_ARG, "distill: targets is %d, expected logits (0) or probs (1)",
                 (int)c->targets);
    COLO_FAIL_IF(!(c->target_temperature > 0) || isinf(c->target_temperature), COLO_ERR_ARG,
                 "distill: target_temperature is %g, expected finite and > 0",
                 c->target_temperature);
    COLO_FAIL_IF(!isfinite(c->target_scale) || !isfinite(c->target_scale / c->target_temperature),
                 COLO_ERR_ARG, "distill: target_scale / target_temperature = %g / %g is not finite",
                 c->target_scale, c->target_temperature);
    COLO_FAIL_IF(!(c->target_softcap >= 0) || isinf(c->target_softcap), COLO_ERR_ARG,
                 "distill: target_softcap is %g, expected finite and >= 0", c->target_softcap);
    COLO_FAIL_IF(c->divergence < COLO_DIVERGENCE_FORWARD_KL ||
                     c->divergence > COLO_DIVERGENCE_ACCEPTANCE,
                 COLO_ERR_ARG, "distill: divergence is %" PRId64 ", expected %d to %d",
                 c->divergence, (int)COLO_DIVERGENCE_FORWARD_KL, (int)COLO_DIVERGENCE_ACCEPTANCE);
    COLO_FAIL_IF(c->divergence && c->targets == COLO_DISTILL_PROBS, COLO_ERR_ARG,
                 "distill: divergence is %" PRId64
                 ", but targets are probabilities: give their logarithms as logits",
                 c->divergence);
    COLO_FAIL_IF(c->divergence == COLO_DIVERGENCE_JSD && !(c->beta > 0 && c->beta < 1),
                 COLO_ERR_ARG, "distill: beta is %g, expected between 0 and 1", c->beta);
    COLO_FAIL_IF(c->has_target_temperature && c->targets == COLO_DISTILL_PROBS, COLO_ERR_ARG,
                 "distill: has_target_temperature is true, but targets are probabilities: give "
                 "their logarithms as logits");
    return COLO_OK;
}

/* ---- checks ---- */

static colo_status_t check_targets(const colo_tensor_t *logits, const colo_tensor_t *targets)
{
    COLO_TRY(colo_loss_check_matrix(targets, "targets", false));
    COLO_FAIL_IF(targets->dtype != logits->dtype && targets->dtype != COLO_F32, COLO_ERR_ARG,
                 "targets: dtype %s, expected f32 or the logits' %s",
                 colo_dtype_name(targets->dtype), colo_dtype_name(logits->dtype));
    COLO_FAIL_IF(targets->shape[0] != logits->shape[0] || targets->shape[1] != logits->shape[1],
                 COLO_ERR_SHAPE,
                 "targets: [%" PRId64 ", %" PRId64 "], expected [%" PRId64 ", %" PRId64
                 "] as the logits",
                 targets->shape[0], targets->shape[1], logits->shape[0], logits->shape[1]);
    return colo_loss_check_memory(targets, logits, "targets");
}

static colo_status_t check(const struct colo_loss_call *call)
{
    const colo_distill_batch_t *batch = &call->batch.distill;
    const colo_distill_out_t *out = &call->out.distill;
    const colo_tensor_t *logits = call->logits;
    const colo_dtype_t dtype = colo_logprob_stat_dtype(logits->dtype);
    COLO_TRY(check_targets(logits, batch->targets));
    const colo_distill_config_t *c = &call->config.distill;
    COLO_TRY(colo_loss_check_mask(batch->mask, logits));
    COLO_TRY(colo_loss_check_heat(batch->temperature, "temperature", c->has_temperature,
                                  batch->mask, logits));
    COLO_TRY(colo_loss_check_heat(batch->target_temperature, "target_temperature",
                                  c->has_target_temperature, batch->mask, logits));
    COLO_TRY(colo_loss_check_array(out->ce, "out.ce", dtype, logits->shape[0], 0, logits));
    COLO_TRY(colo_loss_check_array(out->kl, "out.kl", dtype, logits->shape[0], 0, logits));
    return colo_loss_check_call_memory(call);
}

/* ---- forward ---- */

void colo_distill_fill(const colo_distill_config_t *c, struct colo_distill_args *args)
{
    args->saved_stride = args->base.tokens;
    args->probs = c->targets == COLO_DISTILL_PROBS;
    args->target_factor = c->target_scale / c->target_temperature;
    args->target_cap = c->target_softcap / c->target_temperature;
    args->has_target_temperature = c->has_target_temperature;
    args->divergence = (colo_divergence_t)c->divergence;
    args->beta = c->divergence == COLO_DIVERGENCE_JSD ? c->beta : 0;
}

static void fill(const struct colo_loss_call *call, struct colo_logprob_args *base)
{
    struct colo_distill_args *args = (struct colo_distill_args *)base;
    *args = (struct colo_distill_args){.base = *base};
    colo_distill_fill(&call->config.distill, args);
}

static void set_targets(struct colo_distill_args *args, const colo_tensor_t *targets)
{
    args->target_dtype = targets->dtype;
    args->targets = targets->data;
    args->target_row_stride = targets->stride[0];
}

uint64_t colo_distill_hash_config(const struct colo_logprob_args *base)
{
    const struct colo_distill_args *args = (const struct colo_distill_args *)base;
    colo_logprob_config_t targets = {.logits.vocab = args->probs,
                                     .logits.scale = args->probs ? 1 : args->target_factor,
                                     .logits.temperature = 1};
    uint64_t hash = colo_hash_i64(colo_logprob_hash_config(&args->base.config, args->base.dtype),
                                  (int64_t)colo_logprob_hash_config(&targets, args->target_dtype));
    hash = colo_hash_i64(hash, args->divergence);
    hash = colo_hash_i64(hash, args->has_target_temperature);
    hash = colo_hash_bytes(hash, &args->target_cap, sizeof args->target_cap);
    return colo_hash_bytes(hash, &args->beta, sizeof args->beta);
}

static uint64_t hash_inputs(const struct colo_logprob_args *base)
{
    const struct colo_distill_args *args = (const struct colo_distill_args *)base;
    uint64_t hash = colo_hash_i64(COLO_HASH_INIT, args->mask != NULL);
    for (int64_t t = 0; t < args->base.tokens && args->mask; t++)
        hash = colo_hash_i64(hash, args->mask[t * args->mask_stride] != 0);
    hash = colo_loss_hash_heat(args->base.temperature, args->mask, args->mask_stride,
                               args->base.tokens, hash);
    return colo_loss_hash_heat(args->target_temperature, args->mask, args->mask_stride,
                               args->base.tokens, hash);
}

void colo_distill_describe(const struct colo_logprob_args *base, colo_fields_t *fields)
{
    const struct colo_distill_args *args = (const struct colo_distill_args *)base;
    colo_logprob_describe(base, fields);
    colo_fields_add(fields, "targets", "%s", args->probs ? "probs" : "logits");
    colo_fields_add(fields, "target_scale / target_temperature", "%.9g", args->target_factor);
    colo_fields_add(fields, "target_softcap / target_temperature", "%.9g", args->target_cap);
    colo_fields_add(fields, "has_target_temperature", "%d", args->has_target_temperature);
    colo_fields_add(fields, "divergence", "%d", (int)args->divergence);
    colo_fields_add(fields, "beta", "%.9g", args->beta);
    colo_fields_add(fields, "targets' dtype", "%s", colo_dtype_name(args->target_dtype));
}

static void compare(const struct colo_logprob_args *base, struct colo_loss_comparison *comparison)
{
    const struct colo_distill_args *args = (const struct colo_distill_args *)base;
    comparison->m = args->mx;
    comparison->s = args->sx;
}

static colo_status_t local(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    return call->kernels->distill_stats((struct colo_distill_args *)args, call->stream);
}

static colo_status_t merge(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    const struct colo_distill_args *own = (const struct colo_distill_args *)args;
    const int64_t n = args->tokens * COLO_DISTILL_SUMS;
    const bool alone = colo_logprob_alone(args);
    colo_status_t st = call->kernels->distill_merge(own, call->stream);
    if (!colo_distill_twice(own) || (alone && st < 0))
        return st;
    st = st < 0 ? st : call->kernels->distill_pairs(own, call->stream);
    if (!alone) {
        COLO_TRY(colo_loss_fail_on(call->group, st));
        st = colo_comm_all_gather_for(call->group, COLO_CATEGORY_LOSS, own->sums + args->rank * n,
                                      own->sums, n, COLO_F64, call->stream);
    }
    COLO_TRY(st);
    return call->kernels->distill_finish(own, call->stream);
}

#define ARRAY(member) offsetof(struct colo_distill_args, member), 0, 0
static const colo_block_array_t arrays[] = {{ARRAY(mx)}, {ARRAY(sx)}, {ARRAY(mv)}, {ARRAY(sv)},
                                            {ARRAY(c)},  {ARRAY(d)},  {ARRAY(e)},  {ARRAY(g)}};
static_assert(COLO_DISTILL_SUMS * sizeof(double) <= sizeof arrays / sizeof *arrays * sizeof(float),
              "sums of the second read lie where the blocks were");

bool colo_distill_lay_out(struct colo_distill_args *args, int64_t tokens)
{
    return colo_loss_lay_out(&args->base, arrays, sizeof arrays / sizeof *arrays, UINT32_MAX,
                             tokens);
}

static const struct colo_loss_kind kind = {
    .name = "distill",
    .config = COLO_LOSS_SIZED("distill: config", colo_distill_config_t, targets,
                              COLO_DISTILL_CONFIG_INIT),
    .batch = COLO_LOSS_SIZED("distill: batch", colo_distill_batch_t, mask, COLO_DISTILL_BATCH_INIT),
    .out = COLO_LOSS_SIZED("distill: out", colo_distill_out_t, ce, COLO_DISTILL_OUT_INIT),
    .state = COLO_LOSS_STATE("distill: saved", colo_distill_saved_t, COLO_DISTILL_SAVED_INIT),
    .upstream = COLO_LOSS_SIZED("distill: upstream", colo_distill_upstream_t, d_ce,
                                COLO_DISTILL_UPSTREAM_INIT),
    .order = offsetof(colo_distill_config_t, order),
    .heat = offsetof(colo_distill_config_t, has_temperature),
    .heats = 2,
    .check_config = check_config,
    .saved = COLO_DISTILL_SAVED * sizeof(double),
    .behind = true, /* the second read needs it */
    COLO_LOSS_ARRAYS(arrays),
    .check = check,
    .fill = fill,
    .hash_config = colo_distill_hash_config,
    .describe = colo_distill_describe,
    .hash_inputs = hash_inputs,
    .compare = compare,
    .local = local,
    .merge = merge};

colo_status_t colo_distill_config_check(const colo_distill_config_t *config)
{
    return colo_loss_check_config(&kind, config);
}

colo_status_t colo_distill_workspace_size(const colo_distill_config_t *config, colo_dtype_t dtype,
                                          int64_t tokens, int32_t ranks, size_t *bytes)
{
    return colo_loss_workspace_size(&kind, config, dtype, tokens, ranks, bytes);
}

colo_status_t colo_distill_saved_size(const colo_distill_config_t *config, int64_t tokens,
                                      size_t *bytes)
{
    return colo_loss_saved_size(&kind, config, tokens, bytes);
}

colo_status_t colo_distill_forward(const colo_distill_config_t *config,
                                   const colo_distill_batch_t *batch, colo_comm_t *group,
                                   const colo_distill_out_t *out, colo_distill_saved_t *saved,
                                   void *saved_memory, void *workspace, colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_distill_args args;
    struct colo_loss_call call = {.kind = &kind,
                                  .given = config,
                                  .given_batch = batch,
                                  .given_out = out,
                                  .group = group,
                                  .given_saved = saved,
                                  .saved_memory = saved_memory,
                                  .workspace = workspace,
                                  .stream = stream};
    COLO_TRY(colo_loss_open(&call, &args.base));
    const colo_distill_batch_t *in = &call.batch.distill;
    const colo_distill_saved_t all = {.logits = *call.logits,
                                      .targets = *in->targets,
                                      .logits_version = colo_loss_version(call.logits),
                                      .targets_version = colo_loss_version(in->targets),
                                      .memory = saved_memory,
                                      .valid = true,
                                      .config = call.config.distill};
    set_targets(&args, in->targets);
    args.mask = colo_loss_address(in->mask);
    args.mask_stride = in->mask ? in->mask->stride[0] : 0;
    args.base.temperature = colo_loss_address(in->temperature);
    args.target_temperature = colo_loss_address(in->target_temperature);
    args.out.ce = colo_loss_address(call.out.distill.ce);
    args.out.kl = colo_loss_address(call.out.distill.kl);
    args.sums = (double *)(void *)args.base.blocks;
    args.saved = saved_memory
                     ? saved_memory
                     : (void *)(args.base.blocks + args.base.ranks * args.base.block.bytes);
    COLO_TRY(colo_loss_run(&call, &args.base));
    return colo_loss_save(&call, &all);
}

/* ---- backward ---- */

colo_status_t colo_distill_backward(colo_distill_saved_t *saved,
                                    const colo_distill_upstream_t *upstream,
                                    const colo_tensor_t *d_logits, colo_stream_t stream)
{
    COLO_RANGE();
    COLO_TRY(colo_loss_check_saved(&kind, saved));
    struct colo_distill_args args;
    struct colo_loss_call call = {.kind = &kind,
                                  .given = &saved->config,
                                  .logits = &saved->logits,
                                  .valid = saved->valid,
                                  .version = saved->logits_version};
    COLO_TRY(colo_loss_reopen(&call, upstream, d_logits, &args.base));
    /* the targets are read row by row with the logits: nothing written may be among them */
    COLO_FAIL_IF(colo_loss_ranges_overlap(d_logits, &saved->targets), COLO_ERR_ARG,
                 "d_logits: overlaps the targets (%+" PRId64 " bytes)",
                 (int64_t)((uintptr_t)d_logits->data - (uintptr_t)saved->targets.data));
    COLO_TRY(colo_loss_check_version(&saved->targets, saved->targets_version, "targets"));
    const colo_distill_upstream_t *up = &call.upstream.distill;
    const colo_dtype_t dtype = args.base.stat_dtype;
    COLO_TRY(colo_loss_check_array(up->d_ce, "d_ce", dtype, args.base.tokens, 0, call.logits));
    COLO_TRY(colo_loss_check_array(up->d_kl, "d_kl", dtype, args.base.tokens, 0, call.logits));
    set_targets(&args, &saved->targets);
    args.saved = saved->memory;
    args.upstream.d_ce = colo_loss_address(up->d_ce);
    args.upstream.d_kl = colo_loss_address(up->d_kl);
    COLO_TRY(call.kernels->distill_grad(&args, stream));
    saved->valid = !call.in_place;
    return COLO_OK;
}
