/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.c - log-probabilities of the k largest or of k given columns per token: checks, order of the
 * kernels, the one gather.
 *
 * Almost all of it is the logits path's: its stats and merge kernels make M and log Sum, its grad
 * kernel writes -p_j times the sum of a row's gradients. What is added rides along: candidates
 * behind the statistics in the same block, so that there is one gather; and the picked columns,
 * written after the grad kernel. topk-args.h has the order of the kernels and what travels.
 *
 * To the logits path a token's target is some id that was picked. That column's gradient comes out
 * of it with all of the row's upstream in it, and is among those that are written anew.
 */
#include "loss/call.h"

#include "core/error.h"
#include "core/hash.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/validate.h"

#include <inttypes.h>

static colo_status_t check_config(const union colo_loss_config *own)
{
    const colo_topk_config_t *c = &own->topk;
    COLO_TRY(COLO_SIZED_CHECK_ROOM(c, "topk: config", "COLO_TOPK_CONFIG_INIT"));
    COLO_FAIL_IF(c->k < 1 || c->k > COLO_TOPK_MAX, COLO_ERR_ARG,
                 "topk: k is %" PRId64 ", expected 1..%d", c->k, COLO_TOPK_MAX);
    COLO_FAIL_IF(c->topk && c->k > c->logits.vocab, COLO_ERR_ARG,
                 "topk: k is %" PRId64 ", expected at most %" PRId64 ", the vocabulary", c->k,
                 c->logits.vocab);
    COLO_FAIL_IF(
        c->want_tail && c->topk, COLO_ERR_ARG,
        "topk: want_tail and topk are true, expected one of them: what the k largest leave "
        "is that of their ids in a second call");
    COLO_FAIL_IF(
        c->has_temperature && c->topk, COLO_ERR_ARG,
        "topk: has_temperature and topk are true, expected one of them: the k largest do "
        "not depend on it, their log-probabilities are those of their ids in a second call");
    return COLO_OK;
}

/* ---- checks ---- */

static colo_status_t check_ids(const colo_topk_config_t *c, const colo_tensor_t *logits,
                               const colo_tensor_t *ids)
{
    COLO_FAIL_IF(c->topk && ids, COLO_ERR_ARG, "topk: ids are given, config.topk chooses them");
    if (c->topk)
        return COLO_OK;
    COLO_TRY(colo_tensor_check(ids, "ids"));
    COLO_TRY(colo_loss_check_is(ids, COLO_I64, "ids"));
    COLO_FAIL_IF(ids->ndim != 2 || ids->shape[0] != logits->shape[0] || ids->shape[1] != c->k,
                 COLO_ERR_SHAPE,
                 "ids: %d axes, %" PRId64 " elements, expected [%" PRId64 ", %" PRId64 "]",
                 (int)ids->ndim, colo_tensor_count(ids), logits->shape[0], c->k);
    COLO_FAIL_IF(c->k > 1 && ids->stride[1] != 1, COLO_ERR_SHAPE,
                 "ids: columns are %" PRId64 " elements apart, expected contiguous columns",
                 ids->stride[1]);
    return colo_loss_check_memory(ids, logits, "ids");
}

static colo_status_t check(const struct colo_loss_call *call)
{
    const colo_topk_batch_t *batch = &call->batch.topk;
    const colo_topk_out_t *out = &call->out.topk;
    const colo_tensor_t *logits = call->logits;
    const int64_t tokens = logits->shape[0], k = call->config.topk.k;
    COLO_TRY(check_ids(&call->config.topk, logits, batch->ids));
    COLO_TRY(colo_loss_check_mask(batch->mask, logits));
    COLO_TRY(colo_loss_check_heat(batch->temperature, "temperature",
                                  call->config.topk.has_temperature, batch->mask, logits));
    COLO_FAIL_IF(out->ids && !call->config.topk.topk, COLO_ERR_ARG,
                 "topk: out.ids is given, config.topk is false");
    COLO_TRY(colo_loss_check_array(out->logp, "out.logp", colo_logprob_stat_dtype(logits->dtype),
                                   tokens, k, logits));
    COLO_TRY(colo_loss_check_array(out->ids, "out.ids", COLO_I64, tokens, k, logits));
    COLO_FAIL_IF(out->tail && !call->config.topk.want_tail, COLO_ERR_ARG,
                 "topk: out.tail is given, config.want_tail is false");
    COLO_TRY(colo_loss_check_array(out->tail, "out.tail", colo_logprob_stat_dtype(logits->dtype),
                                   tokens, 0, logits));
    COLO_TRY(colo_loss_check_array(out->n_invalid, "out.n_invalid", COLO_I64, 1, 0, logits));
    return colo_loss_check_call_memory(call);
}

/* ---- forward ---- */

static void fill(const struct colo_loss_call *call, struct colo_logprob_args *base)
{
    struct colo_topk_args *args = (struct colo_topk_args *)base;
    const colo_topk_config_t *c = &call->config.topk;
    *args = (struct colo_topk_args){.base = *base,
                                    .k = c->k,
                                    .topk = c->topk,
                                    .ignore_index = c->ignore_index,
                                    .tail = c->want_tail};
}

/* Where the saved buffer has what. */
static void place(struct colo_topk_args *args, double *memory)
{
    const int64_t tokens = args->base.tokens;
    args->base.saved = memory;
    if (memory) {
        memory += colo_logprob_saved_numbers(&args->base.config) * tokens;
        args->rows = (int64_t *)memory;
        args->sum = memory + tokens;
        args->down = memory + 2 * tokens;
        args->saved_ids = (int64_t *)(memory + (2 + args->k) * tokens);
        args->log_sum = memory + (2 + 2 * args->k) * tokens;
        args->all = args->log_sum + tokens;
    }
    args->base.targets = args->rows;
}

static uint64_t hash_inputs(const struct colo_logprob_args *base)
{
    const struct colo_topk_args *args = (const struct colo_topk_args *)base;
    uint64_t hash = colo_hash_i64(COLO_HASH_INIT, args->mask != NULL);
    for (int64_t t = 0; t < args->base.tokens; t++) {
        hash = colo_hash_i64(hash, args->mask ? args->mask[t * args->mask_stride] != 0 : 1);
        for (int64_t i = 0; i < args->k && !args->topk; i++)
            hash = colo_hash_i64(hash, args->ids[t * args->id_stride + i]);
    }
    return colo_loss_hash_heat(args->base.temperature, args->mask, args->mask_stride,
                               args->base.tokens, hash);
}

static uint64_t hash_config(const struct colo_logprob_args *base)
{
    const struct colo_topk_args *args = (const struct colo_topk_args *)base;
    uint64_t hash = colo_logprob_hash_config(&args->base.config, args->base.dtype);
    hash = colo_hash_i64(hash, args->k);
    hash = colo_hash_i64(hash, args->topk);
    hash = colo_hash_i64(hash, args->tail);
    return colo_hash_i64(hash, args->ignore_index);
}

/* In the workspace */
static int64_t *rows_behind(const struct colo_logprob_args *args)
{
    return (int64_t *)(args->blocks + args->ranks * args->block.bytes) +
           colo_logprob_saved_numbers(&args->config) * args->tokens;
}

static void describe(const struct colo_logprob_args *base, colo_fields_t *fields)
{
    const struct colo_topk_args *args = (const struct colo_topk_args *)base;
    colo_logprob_describe(base, fields);
    colo_fields_add(fields, "k", "%" PRId64, args->k);
    colo_fields_add(fields, "topk", "%d", args->topk);
    colo_fields_add(fields, "want_tail", "%d", args->tail);
    colo_fields_add(fields, "ids' ignore_index", "%" PRId64, args->ignore_index);
}

static void compare(const struct colo_logprob_args *args, struct colo_loss_comparison *comparison)
{
    comparison->targets = rows_behind(args);
}

static colo_status_t local(const struct colo_loss_call *call, struct colo_logprob_args *base)
{
    struct colo_topk_args *args = (struct colo_topk_args *)base;
    /* rows are in the caller's saved memory, which a mismatch leaves alone */
    int64_t *rows = args->rows;
    args->rows = rows_behind(base);
    base->targets = args->rows;
    COLO_TRY(call->kernels->topk_rows(args, call->stream));
    COLO_TRY(call->kernels->topk_local(args, call->stream));
    if (args->tail)
        COLO_TRY(call->kernels->topk_rest(args, call->stream));
    base->targets = args->rows = rows;
    return COLO_OK;
}

static colo_status_t merge(const struct colo_loss_call *call, struct colo_logprob_args *base)
{
    struct colo_topk_args *args = (struct colo_topk_args *)base;
    args->count = true;
    COLO_TRY(call->kernels->topk_rows(args, call->stream));
    COLO_TRY(call->kernels->logprob_merge(base, call->stream));
    COLO_TRY(call->kernels->topk_merge(args, call->stream));
    return args->tail ? call->kernels->topk_tail(args, call->stream) : COLO_OK;
}

static uint32_t wanted(const struct colo_logprob_args *base)
{
    const struct colo_topk_args *args = (const struct colo_topk_args *)base;
    return colo_logprob_wanted(base) | 1u << COLO_LOGPROB_NARRAYS |
           (uint32_t)args->topk << (COLO_LOGPROB_NARRAYS + 1) |
           (args->tail ? 3u : 0u) << (COLO_LOGPROB_NARRAYS + 2);
}

#define PER_K offsetof(struct colo_topk_args, k)
static const colo_block_array_t arrays[] = {COLO_LOGPROB_ARRAYS,
                                            {offsetof(struct colo_topk_args, pz), PER_K, 0},
                                            {offsetof(struct colo_topk_args, pid), PER_K, 8},
                                            {offsetof(struct colo_topk_args, tm), 0, 0},
                                            {offsetof(struct colo_topk_args, ts), 0, 0}};
static const struct colo_loss_kind kind = {
    .name = "topk",
    .config = COLO_LOSS_SIZED("topk: config", colo_topk_config_t, topk, COLO_TOPK_CONFIG_INIT),
    .batch = COLO_LOSS_SIZED("topk: batch", colo_topk_batch_t, ids, COLO_TOPK_BATCH_INIT),
    .out = COLO_LOSS_SIZED("topk: out", colo_topk_out_t, logp, COLO_TOPK_OUT_INIT),
    .state = COLO_LOSS_STATE("topk: saved", colo_topk_saved_t, COLO_TOPK_SAVED_INIT),
    .upstream =
        COLO_LOSS_SIZED("topk: upstream", colo_topk_upstream_t, d_logp, COLO_TOPK_UPSTREAM_INIT),
    .order = offsetof(colo_topk_config_t, order),
    .heat = offsetof(colo_topk_config_t, has_temperature),
    .heats = 1,
    .ignore_index = COLO_TOPK_SKIP, /* no row is ignored by the caller's index, but by its mask */
    .check_config = check_config,
    .saved = 56,
    .saved_by_k = 16,
    .k = offsetof(colo_topk_config_t, k),
    .behind = true,
    COLO_LOSS_ARRAYS(arrays),
    .wanted = wanted,
    .check = check,
    .fill = fill,
    .hash_config = hash_config,
    .describe = describe,
    .hash_inputs = hash_inputs,
    .compare = compare,
    .local = local,
    .merge = merge};

colo_status_t colo_topk_config_check(const colo_topk_config_t *config)
{
    return colo_loss_check_config(&kind, config);
}

colo_status_t colo_topk_workspace_size(const colo_topk_config_t *config, colo_dtype_t dtype,
                                       int64_t tokens, int32_t ranks, size_t *bytes)
{
    return colo_loss_workspace_size(&kind, config, dtype, tokens, ranks, bytes);
}

colo_status_t colo_topk_saved_size(const colo_topk_config_t *config, int64_t tokens, size_t *bytes)
{
    return colo_loss_saved_size(&kind, config, tokens, bytes);
}

colo_status_t colo_topk_forward(const colo_topk_config_t *config, const colo_topk_batch_t *batch,
                                colo_comm_t *group, const colo_topk_out_t *out,
                                colo_topk_saved_t *saved, void *saved_memory, void *workspace,
                                colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_topk_args args;
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
    const colo_topk_saved_t all = {.logits = *call.logits,
                                   .logits_version = colo_loss_version(call.logits),
                                   .memory = saved_memory,
                                   .valid = true,
                                   .config = call.config.topk};
    const colo_topk_batch_t *in = &call.batch.topk;
    args.ids = colo_loss_address(in->ids);
    args.id_stride = in->ids ? in->ids->stride[0] : 0;
    args.mask = colo_loss_address(in->mask);
    args.mask_stride = in->mask ? in->mask->stride[0] : 0;
    args.base.temperature = colo_loss_address(in->temperature);
    args.out.logp = colo_loss_address(call.out.topk.logp);
    args.out.ids = colo_loss_address(call.out.topk.ids);
    args.out.tail = colo_loss_address(call.out.topk.tail);
    args.out.n_invalid = colo_loss_address(call.out.topk.n_invalid);
    place(&args,
          saved ? saved_memory
                : (double *)(void *)(args.base.blocks + args.base.ranks * args.base.block.bytes));
    COLO_TRY(colo_loss_run(&call, &args.base));
    return colo_loss_save(&call, &all);
}

/* ---- backward ---- */

colo_status_t colo_topk_backward(colo_topk_saved_t *saved, const colo_topk_upstream_t *upstream,
                                 const colo_tensor_t *d_logits, colo_stream_t stream)
{
    COLO_RANGE();
    COLO_TRY(colo_loss_check_saved(&kind, saved));
    struct colo_topk_args args;
    struct colo_loss_call call = {.kind = &kind,
                                  .given = &saved->config,
                                  .logits = &saved->logits,
                                  .valid = saved->valid,
                                  .version = saved->logits_version};
    COLO_TRY(colo_loss_reopen(&call, upstream, d_logits, &args.base));
    const colo_tensor_t *d_logp = call.upstream.topk.d_logp;
    COLO_FAIL_IF(!d_logp && args.base.tokens > 0, COLO_ERR_ARG, "topk: d_logp is NULL");
    COLO_TRY(colo_loss_check_array(d_logp, "d_logp", args.base.stat_dtype, args.base.tokens, args.k,
                                   call.logits));
    const colo_tensor_t *d_tail = call.upstream.topk.d_tail;
    COLO_FAIL_IF(d_tail && !args.tail, COLO_ERR_ARG,
                 "topk: d_tail is given, config.want_tail is false");
    COLO_TRY(colo_loss_check_array(d_tail, "d_tail", args.base.stat_dtype, args.base.tokens, 0,
                                   call.logits));
    place(&args, saved->memory);
    args.d_tail = colo_loss_address(d_tail);
    args.base.upstream.d_logp = args.sum;
    args.d_logp = colo_loss_address(d_logp);
    COLO_TRY(call.kernels->topk_sum(&args, stream));
    COLO_TRY(call.kernels->logprob_grad(&args.base, stream));
    COLO_TRY(call.kernels->topk_fix(&args, stream));
    saved->valid = !call.in_place;
    return COLO_OK;
}
