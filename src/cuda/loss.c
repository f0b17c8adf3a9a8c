/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss.c - CUDA's table of loss.h: passes go to the kernels as they are, after a check of their
 * pointers. Each call's first pass checks those of all its passes: a wrong output
 * must be known before anything is written.
 */
#include "cuda/device.h"
#include "loss/distill-pass.h"
#include "loss/loss.h"
#include "loss/topk-pass.h"
#include "loss/sampling-pass.h"
#include "loss/sequence-pass.h"
#include "loss/weighted.h"

#include "kernels.h"

#include <string.h>

#define TRY COLO_TRY

_Static_assert(sizeof(struct colo_weighted_part) == 32 && sizeof(colo_weighted_t) == 32,
               "the kernels have the same structs");

/* ---- the pointers of a pass ---- */

/* When a pointer is checked: bits of what a pass has. */
enum { ALWAYS = 1, TOKENS = 2, COLUMNS = 4, LISTS = 8, IDS = 16, FORWARD = 32, BACKWARD = 64 };
/* Dtypes of elements that are no member of the pass */
enum { BYTES = -1, I64 = -2, F64 = -3, F32 = -4 };
struct pointer {
    size_t offset; /* in the pass */
    int64_t dtype; /* where the pass has it, or one of those above */
    unsigned when;
    const char *name; /* the caller's */
};

static colo_status_t check_pointers(const void *pass, const struct pointer *list, size_t n,
                                    unsigned has)
{
    static const colo_dtype_t fixed[] = {[-I64] = COLO_I64, [-F64] = COLO_F64, [-F32] = COLO_F32};
    colo_queries_t queries = {0};
    for (const struct pointer *pointer = list; pointer < list + n; pointer++) {
        if (!(pointer->when & has))
            continue;
        const void *data;
        memcpy(&data, (const char *)pass + pointer->offset, sizeof data);
        if (pointer->dtype == BYTES)
            TRY(colo_cuda_pointer(&queries, data, pointer->name));
        else
            TRY(colo_cuda_typed(&queries, data,
                                pointer->dtype < 0
                                    ? fixed[-pointer->dtype]
                                    : *(const colo_dtype_t *)((const char *)pass + pointer->dtype),
                                pointer->name));
    }
    return COLO_OK;
}

static unsigned has_of(const struct colo_logprob_pass *pass)
{
    unsigned has = ALWAYS;
    if (pass->tokens > 0)
        has |= TOKENS | (pass->columns > 0 ? COLUMNS : 0);
    if (pass->tokens > 0 && pass->support.begin)
        has |= LISTS | (pass->support.count > 0 ? IDS : 0);
    return has;
}

/* A pass that checks the pointers of a list, and one whose pointers another pass has checked. */
#define PASS(name, type, list, has, what)                                     \
    static colo_status_t name(const struct type *p, colo_stream_t stream)     \
    {                                                                         \
        TRY(check_pointers(p, (list), sizeof(list) / sizeof *(list), (has))); \
        return colo_cuda_report(colo_k_##name(p, stream), what);              \
    }
#define LAUNCH(name, type, what)                                          \
    static colo_status_t name(const struct type *p, colo_stream_t stream) \
    {                                                                     \
        return colo_cuda_report(colo_k_##name(p, stream), what);          \
    }
#define AT(type, member) offsetof(struct colo_##type, member)

/* ---- log-probabilities ---- */

static const struct pointer of_logprob_stats[] = {
    {AT(logprob_pass, logits), AT(logprob_pass, dtype), COLUMNS, "logits"},
    {AT(logprob_pass, targets), I64, TOKENS, "targets"},
    {AT(logprob_pass, support.ids), I64, IDS, "support: ids"},
    {AT(logprob_pass, support.begin), I64, LISTS, "support: begin"},
    {AT(logprob_pass, support.end), I64, LISTS, "support: end"},
    {AT(logprob_pass, blocks), BYTES, ALWAYS, "workspace"},
    /* merge's, too: a wrong output must be known before anything is written */
    {AT(logprob_pass, out.logp), AT(logprob_pass, stat_dtype), ALWAYS, "out.logp"},
    {AT(logprob_pass, out.entropy), AT(logprob_pass, stat_dtype), ALWAYS, "out.entropy"},
    {AT(logprob_pass, out.loss), AT(logprob_pass, stat_dtype), ALWAYS, "out.loss"},
    {AT(logprob_pass, out.correct), BYTES, ALWAYS, "out.correct"},
    {AT(logprob_pass, out.n_valid), I64, ALWAYS, "out.n_valid"},
    {AT(logprob_pass, out.n_invalid), I64, ALWAYS, "out.n_invalid"},
    {AT(logprob_pass, saved), BYTES, ALWAYS, "stats"},
};
static const struct pointer of_logprob_grad[] = {
    {AT(logprob_pass, logits), AT(logprob_pass, dtype), COLUMNS, "logits"},
    {AT(logprob_pass, d_logits), AT(logprob_pass, dtype), COLUMNS, "d_logits"},
    {AT(logprob_pass, targets), I64, COLUMNS, "targets"},
    {AT(logprob_pass, support.ids), I64, IDS, "support: ids"},
    {AT(logprob_pass, support.begin), I64, LISTS, "support: begin"},
    {AT(logprob_pass, support.end), I64, LISTS, "support: end"},
    {AT(logprob_pass, saved), BYTES, COLUMNS, "stats"},
    {AT(logprob_pass, upstream.d_logp), AT(logprob_pass, stat_dtype), COLUMNS, "d_logp"},
    {AT(logprob_pass, upstream.d_entropy), AT(logprob_pass, stat_dtype), COLUMNS, "d_entropy"},
    {AT(logprob_pass, upstream.d_loss), AT(logprob_pass, stat_dtype), COLUMNS, "d_loss"},
};
/* before its first chunk */
PASS(logprob_stats, colo_logprob_pass, of_logprob_stats, p->lo == 0 ? has_of(p) : 0,
     "logprob forward")
LAUNCH(logprob_merge, colo_logprob_pass, "logprob forward, merging")
PASS(logprob_grad, colo_logprob_pass, of_logprob_grad, p->lo == 0 && p->columns > 0 ? has_of(p) : 0,
     "logprob backward")

/* ---- rows of the lm_head path: each pointer of the caller's is checked by the first pass that
 * touches it ---- */

static const struct pointer of_rows_compact[] = {
    {AT(linear_rows, targets), I64, TOKENS, "targets"},
    {AT(linear_rows, counts), BYTES, ALWAYS, "workspace"},
};
static const struct pointer of_rows_upstream[] = {
    {AT(linear_upstream_rows, from[0]), AT(linear_upstream_rows, dtype), ALWAYS, "d_logp"},
    {AT(linear_upstream_rows, from[1]), AT(linear_upstream_rows, dtype), ALWAYS, "d_entropy"},
    {AT(linear_upstream_rows, from[2]), AT(linear_upstream_rows, dtype), ALWAYS, "d_loss"},
};
static const struct pointer of_rows_factor[] = {{AT(linear_factor, by), F32, ALWAYS, "d_loss"}};
static const struct pointer of_rows_scatter[] = {
    {AT(linear_scatter, to.logp), AT(linear_scatter, dtype), ALWAYS, "out.logp"},
    {AT(linear_scatter, to.entropy), AT(linear_scatter, dtype), ALWAYS, "out.entropy"},
    {AT(linear_scatter, to.loss), AT(linear_scatter, dtype), ALWAYS, "out.loss"},
    {AT(linear_scatter, to.correct), BYTES, ALWAYS, "out.correct"},
    {AT(linear_scatter, to.n_valid), I64, ALWAYS, "out.n_valid"},
    {AT(linear_scatter, to.n_invalid), I64, ALWAYS, "out.n_invalid"},
};
static const struct pointer of_tokens[] = {
    {AT(linear_move, tokens.data), AT(linear_move, tokens.dtype), FORWARD, "hidden"},
    {AT(linear_move, tokens.data), AT(linear_move, tokens.dtype), BACKWARD, "d_hidden"},
};
PASS(rows_compact, colo_linear_rows, of_rows_compact, p->tokens > 0 ? ALWAYS | TOKENS : ALWAYS,
     "lm_head: packing")
PASS(rows_upstream, colo_linear_upstream_rows, of_rows_upstream, ALWAYS,
     "lm_head: upstream gradients")
PASS(rows_factor, colo_linear_factor, of_rows_factor, ALWAYS, "lm_head: factor")
PASS(rows_scatter, colo_linear_scatter, of_rows_scatter, ALWAYS, "lm_head: outputs")
PASS(rows_gather, colo_linear_move, of_tokens, p->lo == 0 ? FORWARD : 0, "lm_head: hidden rows")
PASS(rows_restore, colo_linear_move, of_tokens, p->lo == 0 ? BACKWARD : 0, "lm_head: d_hidden rows")
PASS(rows_clear, colo_linear_move, of_tokens, p->rows->tokens > 0 ? BACKWARD : 0,
     "lm_head: d_hidden rows")
LAUNCH(rows_sum, colo_linear_sum, "lm_head: d_bias")
LAUNCH(rows_convert, colo_linear_convert, "lm_head: conversion")

/* ---- picks ---- */

static const struct pointer of_topk_rows[] = {
    {AT(topk_pass, base.logits), AT(topk_pass, base.dtype), COLUMNS, "logits"},
    {AT(topk_pass, ids), I64, ALWAYS, "ids"},
    {AT(topk_pass, mask), BYTES, ALWAYS, "mask"},
    {AT(topk_pass, base.blocks), BYTES, ALWAYS, "workspace"},
    {AT(topk_pass, base.saved), BYTES, ALWAYS, "stats"},
    {AT(topk_pass, out.logp), AT(topk_pass, base.stat_dtype), ALWAYS, "out.logp"},
    {AT(topk_pass, out.ids), I64, ALWAYS, "out.ids"},
    {AT(topk_pass, out.n_invalid), I64, ALWAYS, "out.n_invalid"},
};
static const struct pointer of_topk_sum[] = {
    {AT(topk_pass, d_logp), AT(topk_pass, base.stat_dtype), TOKENS, "d_logp"},
    {AT(topk_pass, base.saved), BYTES, TOKENS, "stats"},
    {AT(topk_pass, base.d_logits), AT(topk_pass, base.dtype), COLUMNS, "d_logits"},
};
/* the first of the call */
PASS(topk_rows, colo_topk_pass, of_topk_rows, p->count ? 0 : has_of(&p->base), "topk forward")
LAUNCH(topk_merge, colo_topk_pass, "topk forward, merging")
PASS(topk_sum, colo_topk_pass, of_topk_sum, has_of(&p->base), "topk backward")
LAUNCH(topk_fix, colo_topk_pass, "topk backward, picked columns")

static colo_status_t topk_local(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    if (pass->topk)
        return colo_cuda_report(colo_k_topk_largest(pass, stream), "topk forward, the largest");
    TRY(colo_cuda_report(colo_k_logprob_stats(&pass->base, stream), "topk forward, statistics"));
    return colo_cuda_report(colo_k_topk_given(pass, stream), "topk forward, given columns");
}

/* ---- what a sampler keeps ---- */

static const struct pointer of_sampling_largest[] = {
    {AT(sampling_pass, base.logits), AT(sampling_pass, base.dtype), COLUMNS, "logits"},
    {AT(sampling_pass, out), AT(sampling_pass, base.dtype), COLUMNS, "out"},
    {AT(sampling_pass, base.blocks), BYTES, ALWAYS, "workspace"},
};
PASS(sampling_largest, colo_sampling_pass, of_sampling_largest, has_of(&p->base),
     "sampling, the largest")
LAUNCH(sampling_sums, colo_sampling_pass, "sampling, sums")
LAUNCH(sampling_find, colo_sampling_pass, "sampling, the last logit")
LAUNCH(sampling_keep, colo_sampling_pass, "sampling, writing")

/* ---- target distributions ---- */

static const struct pointer of_distill[] = {
    {AT(distill_pass, base.logits), AT(distill_pass, base.dtype), COLUMNS, "logits"},
    {AT(distill_pass, targets), AT(distill_pass, target_dtype), COLUMNS, "targets"},
    {AT(distill_pass, saved), BYTES, ALWAYS, "stats"},
    {AT(distill_pass, mask), BYTES, ALWAYS, "mask"},
    {AT(distill_pass, base.blocks), BYTES, ALWAYS, "workspace"},
    {AT(distill_pass, out.ce), AT(distill_pass, base.stat_dtype), ALWAYS, "out.ce"},
    {AT(distill_pass, out.kl), AT(distill_pass, base.stat_dtype), ALWAYS, "out.kl"},
    {AT(distill_pass, upstream.d_ce), AT(distill_pass, base.stat_dtype), ALWAYS, "d_ce"},
    {AT(distill_pass, upstream.d_kl), AT(distill_pass, base.stat_dtype), ALWAYS, "d_kl"},
    {AT(distill_pass, base.d_logits), AT(distill_pass, base.dtype), COLUMNS, "d_logits"},
};
PASS(distill_stats, colo_distill_pass, of_distill, has_of(&p->base), "distill forward")
LAUNCH(distill_merge, colo_distill_pass, "distill forward, merging")
PASS(distill_grad, colo_distill_pass, of_distill, has_of(&p->base), "distill backward")

/* ---- sequences ---- */

static const struct pointer of_sequence[] = {
    {AT(sequence_pass, lengths), I64, ALWAYS, "device_lengths"},
    {AT(sequence_pass, cu_padded), I64, ALWAYS, "device_cu_padded"},
    {AT(sequence_pass, tokens), I64, ALWAYS, "tokens"},
    {AT(sequence_pass, targets), I64, ALWAYS, "targets"},
    {AT(sequence_pass, mask), BYTES, ALWAYS, "mask"},
    {AT(sequence_pass, elements), AT(sequence_pass, dtype), FORWARD, "local"},
    {AT(sequence_pass, table), AT(sequence_pass, dtype), FORWARD, "out"},
    {AT(sequence_pass, elements), AT(sequence_pass, dtype), BACKWARD, "d_local"},
    {AT(sequence_pass, table), AT(sequence_pass, dtype), BACKWARD, "d_out"},
};
PASS(sequence_targets, colo_sequence_pass, of_sequence, ALWAYS, "sequence targets")
PASS(sequence_mask, colo_sequence_pass, of_sequence, ALWAYS, "sequence mask")
PASS(sequence_scatter, colo_sequence_pass, of_sequence, ALWAYS | FORWARD, "sequence gather")
PASS(sequence_gather, colo_sequence_pass, of_sequence, ALWAYS | BACKWARD,
     "sequence gather backward")

/* ---- weighted sums ---- */

static const struct pointer of_weighted_local[] = {
    {AT(weighted_pass, values), AT(weighted_pass, dtype), ALWAYS, "values"},
    {AT(weighted_pass, weights), AT(weighted_pass, dtype), ALWAYS, "weights"},
    {AT(weighted_pass, mask), BYTES, ALWAYS, "mask"},
    {AT(weighted_pass, parts), BYTES, ALWAYS, "workspace"},
    {AT(weighted_pass, out), I64, ALWAYS, "out"},
    {AT(weighted_pass, d_values), AT(weighted_pass, dtype), ALWAYS, "d_values"},
    {AT(weighted_pass, counted), I64, ALWAYS, "n_valid"},
    {AT(weighted_pass, mean.value), AT(weighted_pass, dtype), ALWAYS, "value"},
    {AT(weighted_pass, mean.num), F64, ALWAYS, "num"},
    {AT(weighted_pass, mean.den), F64, ALWAYS, "den"},
    {AT(weighted_pass, mean.factor), F64, ALWAYS, "factor"},
};
static const struct pointer of_mean_grad[] = {
    {AT(mean_grad_pass, factor), F64, ALWAYS, "factor"},
    {AT(mean_grad_pass, d_value), AT(mean_grad_pass, dtype), ALWAYS, "d_value"},
    {AT(mean_grad_pass, d_num), F64, ALWAYS, "d_num"},
    {AT(mean_grad_pass, d_values), AT(mean_grad_pass, dtype), ALWAYS, "d_losses"},
};
PASS(weighted_local, colo_weighted_pass, of_weighted_local, ALWAYS, "weighted sum")
LAUNCH(weighted_finish, colo_weighted_pass, "weighted sum over ranks")
PASS(mean_grad, colo_mean_grad_pass, of_mean_grad, ALWAYS, "gradient of a loss's mean")

#define ENTRY(name, parameters) .name = name,
const colo_loss_ops_t colo_loss_cuda = {.gemm = &colo_gemm_cuda, COLO_LOSS_PASSES(ENTRY)};
