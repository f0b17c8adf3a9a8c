/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss.c - CUDA's table of loss.h: arguments go to the kernels as they are, after a check of their
 * pointers. The first kernel of a call checks those of all its kernels: a wrong output must be
 * known before anything is written.
 */
#include "cuda/device.h"
#include "loss/distill-args.h"
#include "loss/loss.h"
#include "loss/topk-args.h"
#include "loss/sampling-args.h"
#include "loss/sequence-args.h"
#include "loss/mean.h"

#include "kernels.h"

#include <string.h>

#define TRY COLO_TRY

/* ---- the pointers of args ---- */

/* When a pointer is checked: bits of what args have. */
enum { ALWAYS = 1, TOKENS = 2, COLUMNS = 4, LISTS = 8, IDS = 16, FORWARD = 32, BACKWARD = 64 };
/* Dtypes of elements that are no member of args */
enum { BYTES = -1, I64 = -2, F64 = -3, F32 = -4 };
struct pointer {
    size_t offset; /* in args */
    int64_t dtype; /* where args have it, or one of those above */
    unsigned when;
    const char *name; /* the caller's */
};

static colo_status_t check_pointers(const void *args, const struct pointer *list, size_t n,
                                    unsigned has)
{
    static const colo_dtype_t fixed[] = {[-I64] = COLO_I64, [-F64] = COLO_F64, [-F32] = COLO_F32};
    colo_queries_t queries = {0};
    for (const struct pointer *pointer = list; pointer < list + n; pointer++) {
        if (!(pointer->when & has))
            continue;
        const void *data;
        memcpy(&data, (const char *)args + pointer->offset, sizeof data);
        if (pointer->dtype == BYTES)
            TRY(colo_cuda_pointer(&queries, data, pointer->name));
        else
            TRY(colo_cuda_typed(&queries, data,
                                pointer->dtype < 0
                                    ? fixed[-pointer->dtype]
                                    : *(const colo_dtype_t *)((const char *)args + pointer->dtype),
                                pointer->name));
    }
    return COLO_OK;
}

static unsigned has_of(const struct colo_logprob_args *args)
{
    unsigned has = ALWAYS;
    if (args->tokens > 0)
        has |= TOKENS | (args->columns > 0 ? COLUMNS : 0);
    if (args->tokens > 0 && args->support.begin)
        has |= LISTS | (args->support.count > 0 ? IDS : 0);
    return has;
}

/* A kernel whose pointers are checked by a list, and one whose pointers another kernel has checked.
 */
#define CHECKED(name, type, list, has, what)                                  \
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
    {AT(logprob_args, logits), AT(logprob_args, dtype), COLUMNS, "logits"},
    {AT(logprob_args, targets), I64, TOKENS, "targets"},
    {AT(logprob_args, support.ids), I64, IDS, "support: ids"},
    {AT(logprob_args, support.begin), I64, LISTS, "support: begin"},
    {AT(logprob_args, support.end), I64, LISTS, "support: end"},
    {AT(logprob_args, class_weight), AT(logprob_args, stat_dtype), COLUMNS, "class_weight"},
    {AT(logprob_args, temperature), F32, TOKENS, "temperature"},
    {AT(logprob_args, blocks), BYTES, ALWAYS, "workspace"},
    /* merge's, too: a wrong output must be known before anything is written */
    {AT(logprob_args, out.logp), AT(logprob_args, stat_dtype), ALWAYS, "out.logp"},
    {AT(logprob_args, out.entropy), AT(logprob_args, stat_dtype), ALWAYS, "out.entropy"},
    {AT(logprob_args, out.loss), AT(logprob_args, stat_dtype), ALWAYS, "out.loss"},
    {AT(logprob_args, out.correct), BYTES, ALWAYS, "out.correct"},
    {AT(logprob_args, out.n_valid), I64, ALWAYS, "out.n_valid"},
    {AT(logprob_args, out.n_invalid), I64, ALWAYS, "out.n_invalid"},
    {AT(logprob_args, out.weight), AT(logprob_args, stat_dtype), ALWAYS, "out.weight"},
    {AT(logprob_args, out.argmax), I64, ALWAYS, "out.argmax"},
    {AT(logprob_args, out.lse), AT(logprob_args, stat_dtype), ALWAYS, "out.lse"},
    {AT(logprob_args, out.sum_p2), AT(logprob_args, stat_dtype), ALWAYS, "out.sum_p2"},
    {AT(logprob_args, out.mean_logits), AT(logprob_args, stat_dtype), ALWAYS, "out.mean_logits"},
    {AT(logprob_args, saved), BYTES, ALWAYS, "stats"},
};
static const struct pointer of_logprob_grad[] = {
    {AT(logprob_args, logits), AT(logprob_args, dtype), COLUMNS, "logits"},
    {AT(logprob_args, d_logits), AT(logprob_args, dtype), COLUMNS, "d_logits"},
    {AT(logprob_args, targets), I64, COLUMNS, "targets"},
    {AT(logprob_args, support.ids), I64, IDS, "support: ids"},
    {AT(logprob_args, support.begin), I64, LISTS, "support: begin"},
    {AT(logprob_args, support.end), I64, LISTS, "support: end"},
    {AT(logprob_args, class_weight), AT(logprob_args, stat_dtype), COLUMNS, "class_weight"},
    {AT(logprob_args, saved), BYTES, COLUMNS, "stats"},
    {AT(logprob_args, upstream.d_logp), AT(logprob_args, stat_dtype), COLUMNS, "d_logp"},
    {AT(logprob_args, upstream.d_entropy), AT(logprob_args, stat_dtype), COLUMNS, "d_entropy"},
    {AT(logprob_args, upstream.d_loss), AT(logprob_args, stat_dtype), COLUMNS, "d_loss"},
    {AT(logprob_args, upstream.d_lse), AT(logprob_args, stat_dtype), COLUMNS, "d_lse"},
};
/* before its first chunk */
CHECKED(logprob_stats, colo_logprob_args, of_logprob_stats, p->lo == 0 ? has_of(p) : 0,
        "logprob forward")
LAUNCH(logprob_merge, colo_logprob_args, "logprob forward, merging")
CHECKED(logprob_grad, colo_logprob_args, of_logprob_grad,
        p->lo == 0 && p->columns > 0 ? has_of(p) : 0, "logprob backward")

/* ---- rows of the lm_head path: each pointer of the caller's is checked by the first kernel that
 * touches it ---- */

static const struct pointer of_rows_compact[] = {
    {AT(linear_rows, targets), I64, TOKENS, "targets"},
    {AT(linear_rows, mask), BYTES, TOKENS, "mask"},
    {AT(linear_rows, counts), BYTES, ALWAYS, "workspace"},
};
static const struct pointer of_rows_upstream[] = {
    {AT(linear_upstream_rows, from[0]), AT(linear_upstream_rows, dtype), ALWAYS, "d_logp"},
    {AT(linear_upstream_rows, from[1]), AT(linear_upstream_rows, dtype), ALWAYS, "d_entropy"},
    {AT(linear_upstream_rows, from[2]), AT(linear_upstream_rows, dtype), ALWAYS, "d_loss"},
    {AT(linear_upstream_rows, from[3]), AT(linear_upstream_rows, dtype), ALWAYS, "d_lse"},
};
static const struct pointer of_rows_factor[] = {{AT(linear_factor, by), F32, ALWAYS, "d_loss"}};
static const struct pointer of_rows_scatter[] = {
    {AT(linear_scatter, to.logp), AT(linear_scatter, dtype), ALWAYS, "out.logp"},
    {AT(linear_scatter, to.entropy), AT(linear_scatter, dtype), ALWAYS, "out.entropy"},
    {AT(linear_scatter, to.loss), AT(linear_scatter, dtype), ALWAYS, "out.loss"},
    {AT(linear_scatter, to.correct), BYTES, ALWAYS, "out.correct"},
    {AT(linear_scatter, to.n_valid), I64, ALWAYS, "out.n_valid"},
    {AT(linear_scatter, to.n_invalid), I64, ALWAYS, "out.n_invalid"},
    {AT(linear_scatter, to.weight), AT(linear_scatter, dtype), ALWAYS, "out.weight"},
    {AT(linear_scatter, to.argmax), I64, ALWAYS, "out.argmax"},
    {AT(linear_scatter, to.lse), AT(linear_scatter, dtype), ALWAYS, "out.lse"},
    {AT(linear_scatter, to.sum_p2), AT(linear_scatter, dtype), ALWAYS, "out.sum_p2"},
    {AT(linear_scatter, to.mean_logits), AT(linear_scatter, dtype), ALWAYS, "out.mean_logits"},
};
static const struct pointer of_tokens[] = {
    {AT(linear_move, tokens.data), AT(linear_move, tokens.dtype), FORWARD, "hidden"},
    {AT(linear_move, tokens.data), AT(linear_move, tokens.dtype), BACKWARD, "d_hidden"},
};
CHECKED(rows_compact, colo_linear_rows, of_rows_compact, p->tokens > 0 ? ALWAYS | TOKENS : ALWAYS,
        "lm_head: packing")
CHECKED(rows_upstream, colo_linear_upstream_rows, of_rows_upstream, ALWAYS,
        "lm_head: upstream gradients")
CHECKED(rows_factor, colo_linear_factor, of_rows_factor, ALWAYS, "lm_head: factor")
CHECKED(rows_scatter, colo_linear_scatter, of_rows_scatter, ALWAYS, "lm_head: outputs")
CHECKED(rows_gather, colo_linear_move, of_tokens, p->lo == 0 ? FORWARD : 0, "lm_head: hidden rows")
CHECKED(rows_restore, colo_linear_move, of_tokens, p->lo == 0 ? BACKWARD : 0,
        "lm_head: d_hidden rows")
CHECKED(rows_clear, colo_linear_move, of_tokens, p->rows->tokens > 0 ? BACKWARD : 0,
        "lm_head: d_hidden rows")
LAUNCH(rows_sum, colo_linear_sum, "lm_head: d_bias")
LAUNCH(rows_convert, colo_linear_convert, "lm_head: conversion")

/* ---- picks ---- */

static const struct pointer of_topk_rows[] = {
    {AT(topk_args, base.logits), AT(topk_args, base.dtype), COLUMNS, "logits"},
    {AT(topk_args, ids), I64, ALWAYS, "ids"},
    {AT(topk_args, mask), BYTES, ALWAYS, "mask"},
    {AT(topk_args, base.temperature), F32, TOKENS, "temperature"},
    {AT(topk_args, base.blocks), BYTES, ALWAYS, "workspace"},
    {AT(topk_args, base.saved), BYTES, ALWAYS, "stats"},
    {AT(topk_args, out.logp), AT(topk_args, base.stat_dtype), ALWAYS, "out.logp"},
    {AT(topk_args, out.ids), I64, ALWAYS, "out.ids"},
    {AT(topk_args, out.n_invalid), I64, ALWAYS, "out.n_invalid"},
    {AT(topk_args, out.tail), AT(topk_args, base.stat_dtype), ALWAYS, "out.tail"},
};
static const struct pointer of_topk_sum[] = {
    {AT(topk_args, d_logp), AT(topk_args, base.stat_dtype), TOKENS, "d_logp"},
    {AT(topk_args, d_tail), AT(topk_args, base.stat_dtype), TOKENS, "d_tail"},
    {AT(topk_args, base.saved), BYTES, TOKENS, "stats"},
    {AT(topk_args, base.d_logits), AT(topk_args, base.dtype), COLUMNS, "d_logits"},
};
/* the first of the call */
CHECKED(topk_rows, colo_topk_args, of_topk_rows, p->count ? 0 : has_of(&p->base), "topk forward")
LAUNCH(topk_rest, colo_topk_args, "topk forward, the tail")
LAUNCH(topk_merge, colo_topk_args, "topk forward, merging")
LAUNCH(topk_tail, colo_topk_args, "topk forward, merging the tail")
CHECKED(topk_sum, colo_topk_args, of_topk_sum, has_of(&p->base), "topk backward")
LAUNCH(topk_fix, colo_topk_args, "topk backward, picked columns")

static colo_status_t topk_local(const struct colo_topk_args *args, colo_stream_t stream)
{
    if (args->topk)
        return colo_cuda_report(colo_k_topk_largest(args, stream), "topk forward, the largest");
    TRY(colo_cuda_report(colo_k_logprob_stats(&args->base, stream), "topk forward, statistics"));
    return colo_cuda_report(colo_k_topk_given(args, stream), "topk forward, given columns");
}

/* ---- what a sampler keeps ---- */

static const struct pointer of_sampling_largest[] = {
    {AT(sampling_args, base.logits), AT(sampling_args, base.dtype), COLUMNS, "logits"},
    {AT(sampling_args, out), AT(sampling_args, base.dtype), COLUMNS, "out"},
    {AT(sampling_args, base.blocks), BYTES, ALWAYS, "workspace"},
};
CHECKED(sampling_largest, colo_sampling_args, of_sampling_largest, has_of(&p->base),
        "sampling, the largest")
LAUNCH(sampling_sums, colo_sampling_args, "sampling, sums")
LAUNCH(sampling_find, colo_sampling_args, "sampling, the last logit")
LAUNCH(sampling_keep, colo_sampling_args, "sampling, writing")

/* ---- target distributions ---- */

static const struct pointer of_distill[] = {
    {AT(distill_args, base.logits), AT(distill_args, base.dtype), COLUMNS, "logits"},
    {AT(distill_args, targets), AT(distill_args, target_dtype), COLUMNS, "targets"},
    {AT(distill_args, saved), BYTES, ALWAYS, "stats"},
    {AT(distill_args, mask), BYTES, ALWAYS, "mask"},
    {AT(distill_args, base.temperature), F32, TOKENS, "temperature"},
    {AT(distill_args, target_temperature), F32, TOKENS, "target_temperature"},
    {AT(distill_args, base.blocks), BYTES, ALWAYS, "workspace"},
    {AT(distill_args, out.ce), AT(distill_args, base.stat_dtype), ALWAYS, "out.ce"},
    {AT(distill_args, out.kl), AT(distill_args, base.stat_dtype), ALWAYS, "out.kl"},
    {AT(distill_args, upstream.d_ce), AT(distill_args, base.stat_dtype), ALWAYS, "d_ce"},
    {AT(distill_args, upstream.d_kl), AT(distill_args, base.stat_dtype), ALWAYS, "d_kl"},
    {AT(distill_args, base.d_logits), AT(distill_args, base.d_dtype), COLUMNS, "d_logits"},
};
/* before the first chunk */
CHECKED(distill_stats, colo_distill_args, of_distill, p->base.lo == 0 ? has_of(&p->base) : 0,
        "distill forward")
LAUNCH(distill_merge, colo_distill_args, "distill forward, merging")
LAUNCH(distill_pairs, colo_distill_args, "distill forward, second read")
LAUNCH(distill_finish, colo_distill_args, "distill forward, merging again")
CHECKED(distill_grad, colo_distill_args, of_distill, p->base.lo == 0 ? has_of(&p->base) : 0,
        "distill backward")

/* ---- sequences ---- */

static const struct pointer of_sequence[] = {
    {AT(sequence_args, lengths), I64, ALWAYS, "device_lengths"},
    {AT(sequence_args, cu_padded), I64, ALWAYS, "device_cu_padded"},
    {AT(sequence_args, tokens), I64, ALWAYS, "tokens"},
    {AT(sequence_args, targets), I64, ALWAYS, "targets"},
    {AT(sequence_args, mask), BYTES, ALWAYS, "mask"},
    {AT(sequence_args, elements), AT(sequence_args, dtype), FORWARD, "local"},
    {AT(sequence_args, table), AT(sequence_args, dtype), FORWARD, "out"},
    {AT(sequence_args, elements), AT(sequence_args, dtype), BACKWARD, "d_local"},
    {AT(sequence_args, table), AT(sequence_args, dtype), BACKWARD, "d_out"},
};
CHECKED(sequence_targets, colo_sequence_args, of_sequence, ALWAYS, "sequence targets")
CHECKED(sequence_mask, colo_sequence_args, of_sequence, ALWAYS, "sequence mask")
CHECKED(sequence_scatter, colo_sequence_args, of_sequence, ALWAYS | FORWARD, "sequence gather")
CHECKED(sequence_gather, colo_sequence_args, of_sequence, ALWAYS | BACKWARD,
        "sequence gather backward")

/* ---- sums and means over ranks ---- */

static const struct pointer of_mean_local[] = {
    {AT(mean_args, values), AT(mean_args, dtype), ALWAYS, "values"},
    {AT(mean_args, weights), AT(mean_args, dtype), ALWAYS, "weights"},
    {AT(mean_args, mask), BYTES, ALWAYS, "mask"},
    {AT(mean_args, parts), BYTES, ALWAYS, "workspace"},
    {AT(mean_args, out), I64, ALWAYS, "out"},
    {AT(mean_args, d_values), AT(mean_args, dtype), ALWAYS, "d_values"},
    {AT(mean_args, counted), I64, ALWAYS, "n_valid"},
    {AT(mean_args, mean.value), AT(mean_args, dtype), ALWAYS, "value"},
    {AT(mean_args, mean.num), F64, ALWAYS, "num"},
    {AT(mean_args, mean.den), F64, ALWAYS, "den"},
    {AT(mean_args, mean.factor), F64, ALWAYS, "factor"},
};
static const struct pointer of_mean_grad[] = {
    {AT(mean_grad_args, factor), F64, ALWAYS, "factor"},
    {AT(mean_grad_args, d_value), AT(mean_grad_args, dtype), ALWAYS, "d_value"},
    {AT(mean_grad_args, d_num), F64, ALWAYS, "d_num"},
    {AT(mean_grad_args, d_values), AT(mean_grad_args, dtype), ALWAYS, "d_losses"},
};
CHECKED(mean_local, colo_mean_args, of_mean_local, ALWAYS, "weighted sum")
LAUNCH(mean_finish, colo_mean_args, "weighted sum over ranks")
CHECKED(mean_grad, colo_mean_grad_args, of_mean_grad, ALWAYS, "gradient of a loss's mean")

#define ENTRY(name, parameters) .name = name,
const colo_loss_kernels_t colo_loss_cuda = {.gemm = &colo_gemm_cuda, COLO_LOSS_FUNCTIONS(ENTRY)};
