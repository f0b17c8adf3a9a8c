/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sampling.c - which ids top-k and top-p keep: checks, order of the kernels, the gathers.
 * sampling-args.h has the kernels and what travels.
 */
#include "loss/call.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/range.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <math.h>

static colo_status_t check_config(const union colo_loss_config *own)
{
    const colo_sampling_config_t *c = &own->sampling;
    COLO_FAIL_IF(c->logits.scale <= 0 || c->logits.softcap > 0, COLO_ERR_ARG,
                 "sampling: scale is %g and softcap is %g, expected > 0 and 0: a logit of "
                 "-inf has no x of -inf",
                 c->logits.scale, c->logits.softcap);
    COLO_FAIL_IF(c->top_k < 0, COLO_ERR_ARG,
                 "sampling: top_k is %" PRId64 ", expected >= 0 (0: all ids)", c->top_k);
    COLO_FAIL_IF(!(c->top_p >= 0 && c->top_p <= 1), COLO_ERR_ARG,
                 "sampling: top_p is %g, expected in [0, 1] (0: off)", c->top_p);
    return COLO_OK;
}

/* A rank's share of the workspace is its block and its sums, what is found belongs to no rank. */
enum { SUMS = COLO_SAMPLING_DIGITS * (int)sizeof(int64_t), FOUND = 3 * (int)sizeof(int64_t) };

static colo_status_t check(const struct colo_loss_call *call)
{
    bool in_place;
    COLO_TRY(colo_loss_check_gradient(call->given_out, "out", call->logits, &in_place));
    return colo_loss_check_call_memory(call);
}

static void fill(const struct colo_loss_call *call, struct colo_logprob_args *base)
{
    struct colo_sampling_args *args = (struct colo_sampling_args *)base;
    const colo_sampling_config_t *c = &call->config.sampling;
    const int64_t vocab = c->logits.vocab;
    int64_t bits = 0;
    while (vocab >> bits)
        bits++;
    *args = (struct colo_sampling_args){
        .base = *base,
        .top_k = c->top_k && c->top_k < vocab ? c->top_k : vocab,
        .top_p = c->top_p > 0 ? c->top_p : 1,
        .units = exp2((double)(62 - bits)),
        .digits = (int32_t)colo_dtype_size(base->dtype),
    };
}

static uint64_t hash_config(const struct colo_logprob_args *base)
{
    const struct colo_sampling_args *args = (const struct colo_sampling_args *)base;
    const uint64_t hash = colo_logprob_hash_config(&base->config, base->dtype);
    return colo_hash_bytes(colo_hash_i64(hash, args->top_k), &args->top_p, sizeof args->top_p);
}

static void describe(const struct colo_logprob_args *base, colo_fields_t *fields)
{
    const struct colo_sampling_args *args = (const struct colo_sampling_args *)base;
    colo_logprob_describe(base, fields);
    colo_fields_add(fields, "top_k", "%" PRId64, args->top_k);
    colo_fields_add(fields, "top_p", "%.9g", args->top_p);
}

static void compare(const struct colo_logprob_args *args, struct colo_loss_comparison *comparison)
{
    comparison->s = -1;
    comparison->dtype = COLO_F64;
}

static colo_status_t local(const struct colo_loss_call *call, struct colo_logprob_args *args)
{
    return call->kernels->sampling_largest((struct colo_sampling_args *)args, call->stream);
}

static colo_status_t step(const struct colo_loss_call *call, struct colo_sampling_args *args,
                          bool weigh)
{
    colo_comm_t *group = call->group;
    const int64_t n = args->base.tokens * COLO_SAMPLING_DIGITS;
    args->weigh = weigh;
    for (args->digit = 0; args->digit < args->digits; args->digit++) {
        COLO_TRY(colo_loss_fail_on(group, call->kernels->sampling_sums(args, call->stream)));
        if (args->base.ranks > 1)
            COLO_TRY(colo_comm_all_gather_for(group, COLO_CATEGORY_LOSS,
                                              args->sums + args->base.rank * n, args->sums, n,
                                              COLO_I64, call->stream));
        COLO_TRY(colo_loss_fail_on(group, call->kernels->sampling_find(args, call->stream)));
    }
    COLO_TRY(colo_loss_fail_on(group, call->kernels->sampling_keep(args, call->stream)));
    args->base.logits = args->out; /* of the next step */
    args->base.row_stride = args->out_stride;
    return COLO_OK;
}

static colo_status_t merge(const struct colo_loss_call *call, struct colo_logprob_args *base)
{
    struct colo_sampling_args *args = (struct colo_sampling_args *)base;
    if (args->top_k < base->config.logits.vocab || args->top_p == 1)
        COLO_TRY(step(call, args, false));
    return args->top_p < 1 ? step(call, args, true) : COLO_OK;
}

static const colo_block_array_t arrays[] = {{COLO_LOGPROB_ARRAY(m), sizeof(double)}};
static const struct colo_loss_kind kind = {.name = "sampling",
                                           .config = COLO_LOSS_SIZED("sampling: config",
                                                                     colo_sampling_config_t, top_k,
                                                                     COLO_SAMPLING_CONFIG_INIT),
                                           .check_config = check_config,
                                           .saved = FOUND,
                                           .behind = true,
                                           .per_rank = SUMS,
                                           COLO_LOSS_ARRAYS(arrays),
                                           .check = check,
                                           .fill = fill,
                                           .hash_config = hash_config,
                                           .describe = describe,
                                           .compare = compare,
                                           .local = local,
                                           .merge = merge};

colo_status_t colo_sampling_config_check(const colo_sampling_config_t *config)
{
    return colo_loss_check_config(&kind, config);
}

colo_status_t colo_sampling_workspace_size(const colo_sampling_config_t *config, colo_dtype_t dtype,
                                           int64_t tokens, int32_t ranks, size_t *bytes)
{
    return colo_loss_workspace_size(&kind, config, dtype, tokens, ranks, bytes);
}

colo_status_t colo_sampling_keep(const colo_sampling_config_t *config, const colo_tensor_t *logits,
                                 const colo_tensor_t *out, colo_comm_t *group, void *workspace,
                                 colo_stream_t stream)
{
    COLO_RANGE();
    struct colo_sampling_args args;
    struct colo_loss_call call = {.kind = &kind,
                                  .given = config,
                                  .batch.base.logits = logits,
                                  .given_out = out,
                                  .group = group,
                                  .workspace = workspace,
                                  .stream = stream};
    COLO_TRY(colo_loss_open(&call, &args.base));
    const int64_t tokens = args.base.tokens, ranks = args.base.ranks;
    args.out = out->data;
    args.out_stride = out->stride[0];
    args.sums = (int64_t *)(void *)(args.base.blocks + ranks * args.base.block.bytes);
    args.above = args.sums + ranks * tokens * COLO_SAMPLING_DIGITS;
    args.wanted = args.above + tokens;
    args.prefix = (uint64_t *)(args.wanted + tokens);
    return colo_loss_run(&call, &args.base);
}
