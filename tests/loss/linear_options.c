/* SPDX-License-Identifier: Apache-2.0 */
/* linear_options.c - see linear_case.h: what a case asks for, between its numbers and its run. */
#include "loss/linear_case.h"

void linear_case_shard(linear_case_t *c, shard_kind_t kind)
{
    loss_case_t like = {.ranks = c->ranks, .vocab = c->vocab};
    loss_case_shard(&like, kind);
    memcpy(c->start, like.start, sizeof c->start);
    memcpy(c->columns, like.columns, sizeof c->columns);
}

void linear_case_options(linear_case_t *c, unsigned bits)
{
    if (bits & (WITH_SMOOTH | WITH_MEGATRON | WITH_ZLOSS | WITH_WEIGHTS))
        bits |= WITH_LOSS;
    loss_options(&c->config.logprob, bits);
    c->has_bias = bits & LINEAR_BIAS;
    c->head = bits & LINEAR_SHARDED ? HEAD_SHARDED : HEAD_RESIDENT;
    c->mean = bits & LINEAR_MEAN;
    c->config.lora = bits & LINEAR_LORA ? LINEAR_RANK : 0;
    for (int d = 0; bits & LINEAR_IGNORED && d < c->replicas; d++)
        for (int64_t t = d; t < c->tokens; t += 3) {
            c->targets[d][t] = -100;
            for (int64_t j = 0; j < c->hidden; j++)
                c->h[d][t * c->hidden + j] = NAN; /* must not be read */
        }
}

void linear_case_mode(linear_case_t *c, int mode)
{
    const bool wide = c->dtype == COLO_F64; /* what is early of others is loss of those */
    c->config.mode = mode == 1            ? COLO_LINEAR_LOGPROB_KEEP
                     : mode == 3 && !wide ? COLO_LINEAR_LOGPROB_EARLY
                                          : COLO_LINEAR_LOGPROB_LOGPROB;
    c->loss_mode = mode == 2 || (mode == 3 && wide);
}

void linear_case_upstream(linear_case_t *c, int32_t ranks, int i, uint64_t *rng)
{
    static const double factors[] = {0x1p-24, 1.0 / 3, 3e6};
    linear_case_init(c, ranks, 1, 9, 400, 6, i % 2 ? COLO_F16 : COLO_BF16, rng);
    linear_case_options(c, WITH_ENTROPY | WITH_LOSS | LINEAR_BIAS | LINEAR_IGNORED |
                               (i / 24 ? WITH_TAU : LINEAR_MEAN));
    linear_case_mode(c, i / 2 % 4);
    c->config.logprob.chunk_size = 4;
    for (int k = 0; k < 3; k++)
        c->factor[k] *= factors[i / 8 % 3];
    c->config.frozen_hidden = true;
}

void linear_case_empty(linear_case_t *c, int32_t ranks, int i, uint64_t *rng)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    linear_case_init(c, ranks, 1, 0, 23, 12, dtypes[i / 3], rng);
    linear_case_options(c, LINEAR_BIAS);
    linear_case_mode(c, i % 3);
}

void linear_case_listed(linear_case_t *c, int32_t ranks, int32_t replicas, int i, uint64_t *rng)
{
    linear_case_init(c, ranks, replicas, 9, 21, 6, loss_dtypes[i % 4], rng);
    linear_case_shard(c, i % SHARD_KINDS);
    linear_case_options(c, WITH_ENTROPY | WITH_LOSS | LINEAR_BIAS | LINEAR_IGNORED |
                               (i % 2 ? WITH_CAP : WITH_ZLOSS) | (i % 3 ? 0 : WITH_WEIGHTS));
    linear_case_mode(c, i / 4 % 4);
    c->support = calloc((size_t)(c->tokens * c->vocab) + 1, 1);
    for (int64_t k = 0; k < c->tokens * c->vocab; k++)
        c->support[k] = t_below(rng, 3) == 0;
    c->config.logprob.chunk_size = 4;
}

void linear_case_shared(linear_case_t *c, int32_t ranks, int i, uint64_t *rng)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16};
    static const int64_t tokens[] = {9, 13, 21, 7}, vocab[] = {3001, 40001, 700};
    linear_case_init(c, ranks, 1, tokens[i % 4], vocab[i % 3], 5, dtypes[i / 12], rng);
    linear_case_shard(c, i % SHARD_KINDS);
    linear_case_options(c, WITH_ENTROPY | WITH_LOSS | WITH_SMOOTH | (i & 4 ? LINEAR_BIAS : 0) |
                               (i & 8 ? LINEAR_IGNORED : 0) | (i % 5 < 2 ? WITH_WEIGHTS : 0) |
                               (i % 7 < 3 ? LINEAR_LORA : 0));
    c->config.mode = COLO_LINEAR_LOGPROB_EARLY;
    c->config.logits_dtype = i & 2 ? COLO_F32 : c->dtype;
    c->config.logprob.chunk_size = i & 1 ? 4 : 0;
    c->config.frozen_hidden = i % 5 == 4;
    c->config.d_weight_add = false;
    c->config.d_weight_dtype = c->dtype;
    c->config.share_d_weight = true;
}
