/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sampling.c - which ids top-k and top-p keep: checks, order of the passes, the gathers.
 * sampling-pass.h has the passes and what travels.
 */
#include "loss/sampling-pass.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/range.h"
#include "core/sized.h"
#include "loss/loss.h"
#include "loss/validate.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static colo_logprob_config_t base_config(const colo_sampling_config_t *c)
{
    return (colo_logprob_config_t){.struct_size = sizeof(colo_logprob_config_t),
                                   .logits = c->logits};
}

static colo_status_t read_config(const colo_sampling_config_t *given, colo_sampling_config_t *own)
{
    *own = (colo_sampling_config_t){COLO_SAMPLING_CONFIG_INIT};
    return COLO_SIZED_READ(own, given, top_k, "sampling: config", "COLO_SAMPLING_CONFIG_INIT");
}

colo_status_t colo_sampling_config_check(const colo_sampling_config_t *config)
{
    colo_sampling_config_t c;
    COLO_TRY(read_config(config, &c));
    const colo_logprob_config_t base = base_config(&c);
    colo_status_t st = colo_logprob_config_check(&base);
    if (st < 0)
        return colo_fail_prefix(st, "sampling");
    if (c.logits.scale <= 0 || c.logits.softcap > 0)
        return colo_fail(COLO_ERR_ARG,
                         "sampling: scale is %g and softcap is %g, expected > 0 and 0: a logit of "
                         "-inf has no x of -inf",
                         c.logits.scale, c.logits.softcap);
    if (c.top_k < 0)
        return colo_fail(COLO_ERR_ARG, "sampling: top_k is %" PRId64 ", expected >= 0 (0: all ids)",
                         c.top_k);
    if (!(c.top_p >= 0 && c.top_p <= 1))
        return colo_fail(COLO_ERR_ARG, "sampling: top_p is %g, expected in [0, 1] (0: off)",
                         c.top_p);
    return COLO_OK;
}

/* A rank's share of the workspace is its block and its sums, what is found belongs to no rank. */
enum { SUMS = COLO_SAMPLING_DIGITS * (int)sizeof(int64_t), FOUND = 3 * (int)sizeof(int64_t) };

static bool block_of(int64_t tokens, colo_logprob_block_t *b, int64_t *each)
{
    *b = (colo_logprob_block_t){.bytes = (int64_t)sizeof(colo_logprob_header_t)};
    return colo_logprob_i_append(b, tokens, (int64_t)sizeof(double), true, &b->m) &&
           colo_mul_ok(tokens, SUMS, each) && colo_add_ok(*each, b->bytes, each);
}

colo_status_t colo_sampling_workspace_size(const colo_sampling_config_t *config, colo_dtype_t dtype,
                                           int64_t tokens, int32_t ranks, size_t *bytes)
{
    colo_logprob_block_t block;
    size_t found;
    int64_t each = 0;
    COLO_TRY(colo_sampling_config_check(config));
    COLO_TRY(colo_loss_i_saved_size("sampling", tokens, FOUND, bytes ? &found : NULL));
    COLO_TRY(colo_loss_i_check_logits("sampling", dtype));
    COLO_TRY(colo_loss_i_check_ranks("sampling", ranks));
    const bool ok = block_of(tokens, &block, &each);
    return colo_loss_i_workspace_size("sampling", ok, each, (int64_t)found, tokens, ranks, bytes);
}

static colo_status_t check(const colo_sampling_config_t *config, const colo_tensor_t *logits,
                           const colo_tensor_t *out, const colo_comm_t *group,
                           const void *workspace)
{
    bool in_place;
    COLO_TRY(colo_sampling_config_check(config));
    const colo_logprob_config_t base = base_config(config);
    COLO_TRY(colo_loss_i_check_matrix(logits, "logits", false));
    COLO_TRY(colo_loss_i_check_gradient(out, "out", logits, &in_place));
    COLO_TRY(colo_loss_i_check_shard(&base, logits, group));
    return colo_loss_i_check_buffers("sampling", false, NULL, 0, workspace);
}

static uint64_t hash_config(const struct colo_sampling_pass *p)
{
    const uint64_t h = colo_logprob_i_hash_config(&p->base.config, p->base.dtype);
    return colo_hash_bytes(colo_hash_i64(h, p->top_k), &p->top_p, sizeof p->top_p);
}

static colo_status_t step(struct colo_sampling_pass *p, bool weigh, const colo_loss_ops_t *loss,
                          colo_comm_t *group, colo_stream_t stream)
{
    const int64_t n = p->base.tokens * COLO_SAMPLING_DIGITS;
    p->weigh = weigh;
    for (p->digit = 0; p->digit < p->digits; p->digit++) {
        COLO_TRY(colo_loss_i_step(group, loss->sampling_sums(p, stream)));
        if (p->base.ranks > 1)
            COLO_TRY(colo_comm_i_all_gather(group, COLO_CATEGORY_LOSS, p->sums + p->base.rank * n,
                                            p->sums, n, COLO_I64, stream));
        COLO_TRY(colo_loss_i_step(group, loss->sampling_find(p, stream)));
    }
    COLO_TRY(colo_loss_i_step(group, loss->sampling_keep(p, stream)));
    p->base.logits = p->out; /* of the next step */
    p->base.row_stride = p->out_stride;
    return COLO_OK;
}

colo_status_t colo_sampling_keep(const colo_sampling_config_t *config, const colo_tensor_t *logits,
                                 const colo_tensor_t *out, colo_comm_t *group, void *workspace,
                                 colo_stream_t stream)
{
    COLO_RANGE();
    COLO_TRY(colo_loss_i_check_group("sampling", group));
    const colo_loss_ops_t *loss;
    colo_sampling_config_t own;
    colo_logprob_block_t block;
    int64_t each = 0, bits = 0;
    colo_status_t st = read_config(config, &own);
    if (st == COLO_OK)
        st = check(&own, logits, out, group, workspace);
    if (st == COLO_OK && !block_of(logits->shape[0], &block, &each))
        st = colo_fail(COLO_ERR_ARG, "sampling: workspace of %" PRId64 " tokens exceeds 2^63 bytes",
                       logits->shape[0]);
    COLO_TRY(colo_loss_i_begin("sampling", st, logits, group, &loss));
    const colo_logprob_config_t base = base_config(&own);
    const int32_t ranks = colo_comm_size(group);
    const int64_t tokens = logits->shape[0], vocab = own.logits.vocab;
    while (vocab >> bits)
        bits++;
    struct colo_sampling_pass p = {
        .base = colo_logprob_i_pass(&base, logits, NULL),
        .top_k = own.top_k && own.top_k < vocab ? own.top_k : vocab,
        .top_p = own.top_p > 0 ? own.top_p : 1,
        .units = exp2((double)(62 - bits)),
        .digits = (int32_t)colo_dtype_size(logits->dtype),
        .out = out->data,
        .out_stride = out->stride[0],
    };
    p.base.rank = colo_comm_rank(group);
    p.base.ranks = ranks;
    p.base.block = block;
    p.base.blocks = workspace;
    p.sums = (int64_t *)(p.base.blocks + ranks * block.bytes);
    p.above = p.sums + ranks * tokens * COLO_SAMPLING_DIGITS;
    p.wanted = p.above + tokens;
    p.prefix = (uint64_t *)(p.wanted + tokens);
    colo_logprob_i_set_header(&p.base, hash_config(&p), 0);
    COLO_TRY(colo_loss_i_step(group, loss->sampling_largest(&p, stream)));
    COLO_TRY(colo_loss_i_gather(&p.base, logits->mem == COLO_HOST, group, stream));
    if (p.top_k < vocab || p.top_p == 1)
        COLO_TRY(step(&p, false, loss, group, stream));
    return p.top_p < 1 ? step(&p, true, loss, group, stream) : COLO_OK;
}
