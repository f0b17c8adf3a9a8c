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

#include "losses-launch.h"

#include <string.h>

#define TRY COLO_TRY

_Static_assert(sizeof(struct colo_weighted_part) == 32 && sizeof(colo_weighted_t) == 32,
               "the kernels have the same structs");

/* ---- the pointers of a pass ---- */

/* When a pointer is checked: bits of what a pass has. */
enum { ALWAYS = 1, TOKENS = 2, COLUMNS = 4, LISTS = 8, IDS = 16 };
/* Dtypes of elements that are no member of the pass */
enum { BYTES = -1, I64 = -2, F64 = -3 };
struct pointer {
    size_t offset; /* in the pass */
    int64_t dtype; /* where the pass has it, or one of those above */
    unsigned when;
    const char *name; /* the caller's */
};

static colo_status_t check_pointers(const void *pass, const struct pointer *list, size_t n,
                                    unsigned has)
{
    static const colo_dtype_t fixed[] = {[-I64] = COLO_I64, [-F64] = COLO_F64};
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

/* A pass that checks its pointers, and one whose pointers another pass has checked. */
#define PASS(name, type, has, what)                                                       \
    static colo_status_t name(const struct type *p, colo_stream_t stream)                 \
    {                                                                                     \
        TRY(check_pointers(p, of_##name, sizeof of_##name / sizeof of_##name[0], (has))); \
        return colo_cuda_report(colo_k_##name(p, stream), what);                          \
    }
#define LAUNCH(name, type, what)                                          \
    static colo_status_t name(const struct type *p, colo_stream_t stream) \
    {                                                                     \
        return colo_cuda_report(colo_k_##name(p, stream), what);          \
    }

/* ---- log-probabilities ---- */

#define AT(member) offsetof(struct colo_logprob_pass, member)
static const struct pointer of_logprob_stats[] = {
    {AT(logits), AT(dtype), COLUMNS, "logits"},
    {AT(targets), I64, TOKENS, "targets"},
    {AT(support.ids), I64, IDS, "support: ids"},
    {AT(support.begin), I64, LISTS, "support: begin"},
    {AT(support.end), I64, LISTS, "support: end"},
    {AT(blocks), BYTES, ALWAYS, "workspace"},
    /* merge's, too: a wrong output must be known before anything is written */
    {AT(out.logp), AT(stat_dtype), ALWAYS, "out.logp"},
    {AT(out.entropy), AT(stat_dtype), ALWAYS, "out.entropy"},
    {AT(out.loss), AT(stat_dtype), ALWAYS, "out.loss"},
    {AT(out.correct), BYTES, ALWAYS, "out.correct"},
    {AT(out.n_valid), I64, ALWAYS, "out.n_valid"},
    {AT(out.n_invalid), I64, ALWAYS, "out.n_invalid"},
    {AT(saved), BYTES, ALWAYS, "stats"},
};
static const struct pointer of_logprob_grad[] = {
    {AT(logits), AT(dtype), COLUMNS, "logits"},
    {AT(d_logits), AT(dtype), COLUMNS, "d_logits"},
    {AT(targets), I64, COLUMNS, "targets"},
    {AT(support.ids), I64, IDS, "support: ids"},
    {AT(support.begin), I64, LISTS, "support: begin"},
    {AT(support.end), I64, LISTS, "support: end"},
    {AT(saved), BYTES, COLUMNS, "stats"},
    {AT(upstream.d_logp), AT(stat_dtype), COLUMNS, "d_logp"},
    {AT(upstream.d_entropy), AT(stat_dtype), COLUMNS, "d_entropy"},
    {AT(upstream.d_loss), AT(stat_dtype), COLUMNS, "d_loss"},
};
#undef AT
/* before its first chunk */
PASS(logprob_stats, colo_logprob_pass, p->lo == 0 ? has_of(p) : 0, "logprob forward")
LAUNCH(logprob_merge, colo_logprob_pass, "logprob forward, merging")
PASS(logprob_grad, colo_logprob_pass, p->lo == 0 && p->columns > 0 ? has_of(p) : 0,
     "logprob backward")

/* ---- rows of the lm_head path: each pointer of the caller's is checked by the first pass that
 * touches it ---- */

static const struct pointer of_rows_compact[] = {
    {offsetof(struct colo_linear_rows, targets), I64, TOKENS, "targets"},
    {offsetof(struct colo_linear_rows, counts), BYTES, ALWAYS, "workspace"},
};
PASS(rows_compact, colo_linear_rows, p->tokens > 0 ? ALWAYS | TOKENS : ALWAYS, "lm_head: packing")

#define AT(member) offsetof(struct colo_linear_upstream_rows, member)
static const struct pointer of_rows_upstream[] = {
    {AT(from[0]), AT(dtype), ALWAYS, "d_logp"},
    {AT(from[1]), AT(dtype), ALWAYS, "d_entropy"},
    {AT(from[2]), AT(dtype), ALWAYS, "d_loss"},
};
#undef AT
PASS(rows_upstream, colo_linear_upstream_rows, ALWAYS, "lm_head: upstream gradients")

#define AT(member) offsetof(struct colo_linear_scatter, member)
static const struct pointer of_rows_scatter[] = {
    {AT(to.logp), AT(dtype), ALWAYS, "out.logp"},
    {AT(to.entropy), AT(dtype), ALWAYS, "out.entropy"},
    {AT(to.loss), AT(dtype), ALWAYS, "out.loss"},
    {AT(to.correct), BYTES, ALWAYS, "out.correct"},
    {AT(to.n_valid), I64, ALWAYS, "out.n_valid"},
    {AT(to.n_invalid), I64, ALWAYS, "out.n_invalid"},
};
#undef AT
PASS(rows_scatter, colo_linear_scatter, ALWAYS, "lm_head: outputs")

static colo_status_t check_typed(bool first, const void *pointer, colo_dtype_t dtype,
                                 const char *name)
{
    colo_queries_t queries = {0};
    return first ? colo_cuda_typed(&queries, pointer, dtype, name) : COLO_OK;
}

static colo_status_t rows_factor(float *to, const float *from, double factor, const float *by,
                                 colo_stream_t stream)
{
    TRY(check_typed(true, by, COLO_F32, "d_loss"));
    return colo_cuda_report(colo_k_rows_factor(to, from, factor, by, stream), "lm_head: factor");
}

static colo_status_t rows_gather(const struct colo_linear_rows *rows, int64_t lo, int64_t hi,
                                 int64_t hidden, void *to, const struct colo_linear_matrix *from,
                                 colo_stream_t stream)
{
    TRY(check_typed(lo == 0, from->data, from->dtype, "hidden"));
    return colo_cuda_report(
        colo_k_rows_gather(rows, lo, hi, hidden, to, from->data, from->stride, from->dtype, stream),
        "lm_head: hidden rows");
}

static colo_status_t rows_restore(const struct colo_linear_rows *rows, int64_t lo, int64_t hi,
                                  int64_t hidden, const struct colo_linear_matrix *to,
                                  const void *from, colo_stream_t stream)
{
    TRY(check_typed(lo == 0, to->data, to->dtype, "d_hidden"));
    return colo_cuda_report(
        colo_k_rows_restore(rows, lo, hi, hidden, to->data, to->stride, from, to->dtype, stream),
        "lm_head: d_hidden rows");
}

static colo_status_t rows_clear(const struct colo_linear_rows *rows, int64_t hidden,
                                const struct colo_linear_matrix *to, colo_stream_t stream)
{
    TRY(check_typed(rows->tokens > 0, to->data, to->dtype, "d_hidden"));
    return colo_cuda_report(
        colo_k_rows_clear(rows, hidden, to->data, to->stride, to->dtype, stream),
        "lm_head: d_hidden rows");
}

static colo_status_t rows_sum(const struct colo_linear_matrix *z, int64_t rows, int64_t columns,
                              const float *scale, void *to, int64_t to_step, double beta,
                              colo_stream_t stream)
{
    return colo_cuda_report(colo_k_rows_sum(z->data, z->stride, z->dtype, rows, columns, scale, to,
                                            to_step, beta, stream),
                            "lm_head: d_bias");
}

static colo_status_t rows_convert(const struct colo_linear_matrix *to,
                                  const struct colo_linear_matrix *from, int64_t rows,
                                  int64_t columns, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_rows_convert(to->data, to->stride, to->dtype, from->data,
                                                from->stride, from->dtype, rows, columns, stream),
                            "lm_head: conversion");
}

/* ---- picks ---- */

#define AT(member) offsetof(struct colo_topk_pass, member)
static const struct pointer of_topk_rows[] = {
    {AT(base.logits), AT(base.dtype), COLUMNS, "logits"},
    {AT(ids), I64, ALWAYS, "ids"},
    {AT(mask), BYTES, ALWAYS, "mask"},
    {AT(base.blocks), BYTES, ALWAYS, "workspace"},
    {AT(base.saved), BYTES, ALWAYS, "stats"},
    {AT(out.logp), AT(base.stat_dtype), ALWAYS, "out.logp"},
    {AT(out.ids), I64, ALWAYS, "out.ids"},
    {AT(out.n_invalid), I64, ALWAYS, "out.n_invalid"},
};
static const struct pointer of_topk_sum[] = {
    {AT(d_logp), AT(base.stat_dtype), TOKENS, "d_logp"},
    {AT(base.saved), BYTES, TOKENS, "stats"},
    {AT(base.d_logits), AT(base.dtype), COLUMNS, "d_logits"},
};
#undef AT
/* the first of the call */
PASS(topk_rows, colo_topk_pass, p->count ? 0 : has_of(&p->base), "topk forward")
LAUNCH(topk_merge, colo_topk_pass, "topk forward, merging")
PASS(topk_sum, colo_topk_pass, has_of(&p->base), "topk backward")
LAUNCH(topk_fix, colo_topk_pass, "topk backward, picked columns")

static colo_status_t topk_local(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    if (pass->topk)
        return colo_cuda_report(colo_k_topk_largest(pass, stream), "topk forward, the largest");
    TRY(colo_cuda_report(colo_k_logprob_stats(&pass->base, stream), "topk forward, statistics"));
    return colo_cuda_report(colo_k_topk_given(pass, stream), "topk forward, given columns");
}

/* ---- what a sampler keeps ---- */

#define AT(member) offsetof(struct colo_sampling_pass, member)
static const struct pointer of_sampling_largest[] = {
    {AT(base.logits), AT(base.dtype), COLUMNS, "logits"},
    {AT(out), AT(base.dtype), COLUMNS, "out"},
    {AT(base.blocks), BYTES, ALWAYS, "workspace"},
};
#undef AT
PASS(sampling_largest, colo_sampling_pass, has_of(&p->base), "sampling, the largest")
LAUNCH(sampling_sums, colo_sampling_pass, "sampling, sums")
LAUNCH(sampling_find, colo_sampling_pass, "sampling, the last logit")
LAUNCH(sampling_keep, colo_sampling_pass, "sampling, writing")

/* ---- target distributions ---- */

#define AT(member) offsetof(struct colo_distill_pass, member)
static const struct pointer of_distill_stats[] = {
    {AT(base.logits), AT(base.dtype), COLUMNS, "logits"},
    {AT(targets), AT(target_dtype), COLUMNS, "targets"},
    {AT(saved), BYTES, ALWAYS, "stats"},
    {AT(mask), BYTES, ALWAYS, "mask"},
    {AT(base.blocks), BYTES, ALWAYS, "workspace"},
    {AT(out.ce), AT(base.stat_dtype), ALWAYS, "out.ce"},
    {AT(out.kl), AT(base.stat_dtype), ALWAYS, "out.kl"},
};
static const struct pointer of_distill_grad[] = {
    {AT(base.logits), AT(base.dtype), COLUMNS, "logits"},
    {AT(targets), AT(target_dtype), COLUMNS, "targets"},
    {AT(saved), BYTES, ALWAYS, "stats"},
    {AT(upstream.d_ce), AT(base.stat_dtype), ALWAYS, "d_ce"},
    {AT(upstream.d_kl), AT(base.stat_dtype), ALWAYS, "d_kl"},
    {AT(base.d_logits), AT(base.dtype), COLUMNS, "d_logits"},
};
#undef AT
PASS(distill_stats, colo_distill_pass, has_of(&p->base), "distill forward")
LAUNCH(distill_merge, colo_distill_pass, "distill forward, merging")
PASS(distill_grad, colo_distill_pass, has_of(&p->base), "distill backward")

/* ---- sequences ---- */

#define AT(member) offsetof(struct colo_sequence_pass, member)
static const struct pointer of_sequence_targets[] = {
    {AT(lengths), I64, ALWAYS, "device_lengths"},
    {AT(cu_padded), I64, ALWAYS, "device_cu_padded"},
    {AT(tokens), I64, ALWAYS, "tokens"},
    {AT(targets), I64, ALWAYS, "targets"},
};
static const struct pointer of_sequence_mask[] = {
    {AT(lengths), I64, ALWAYS, "device_lengths"},
    {AT(cu_padded), I64, ALWAYS, "device_cu_padded"},
    {AT(mask), BYTES, ALWAYS, "mask"},
};
static const struct pointer of_sequence_scatter[] = {
    {AT(lengths), I64, ALWAYS, "device_lengths"},
    {AT(cu_padded), I64, ALWAYS, "device_cu_padded"},
    {AT(elements), AT(dtype), ALWAYS, "local"},
    {AT(table), AT(dtype), ALWAYS, "out"},
};
static const struct pointer of_sequence_gather[] = {
    {AT(lengths), I64, ALWAYS, "device_lengths"},
    {AT(cu_padded), I64, ALWAYS, "device_cu_padded"},
    {AT(elements), AT(dtype), ALWAYS, "d_local"},
    {AT(table), AT(dtype), ALWAYS, "d_out"},
};
#undef AT
PASS(sequence_targets, colo_sequence_pass, ALWAYS, "sequence targets")
PASS(sequence_mask, colo_sequence_pass, ALWAYS, "sequence mask")
PASS(sequence_scatter, colo_sequence_pass, ALWAYS, "sequence gather")
PASS(sequence_gather, colo_sequence_pass, ALWAYS, "sequence gather backward")

/* ---- weighted sums ---- */

#define AT(member) offsetof(struct colo_weighted_pass, member)
static const struct pointer of_weighted_local[] = {
    {AT(values), AT(dtype), ALWAYS, "values"},
    {AT(weights), AT(dtype), ALWAYS, "weights"},
    {AT(mask), BYTES, ALWAYS, "mask"},
    {AT(parts), BYTES, ALWAYS, "workspace"},
    {AT(out), I64, ALWAYS, "out"},
    {AT(d_values), AT(dtype), ALWAYS, "d_values"},
    {AT(counted), I64, ALWAYS, "n_valid"},
    {AT(mean.value), AT(dtype), ALWAYS, "value"},
    {AT(mean.num), F64, ALWAYS, "num"},
    {AT(mean.den), F64, ALWAYS, "den"},
    {AT(mean.factor), F64, ALWAYS, "factor"},
};
#undef AT
#define AT(member) offsetof(struct colo_mean_grad_pass, member)
static const struct pointer of_mean_grad[] = {
    {AT(factor), F64, ALWAYS, "factor"},
    {AT(d_value), AT(dtype), ALWAYS, "d_value"},
    {AT(d_num), F64, ALWAYS, "d_num"},
    {AT(d_values), AT(dtype), ALWAYS, "d_losses"},
};
#undef AT
PASS(weighted_local, colo_weighted_pass, ALWAYS, "weighted sum")
LAUNCH(weighted_finish, colo_weighted_pass, "weighted sum over ranks")
PASS(mean_grad, colo_mean_grad_pass, ALWAYS, "gradient of a loss's mean")

#define ENTRY(name, parameters) .name = name,
const colo_loss_ops_t colo_loss_cuda = {.gemm = &colo_gemm_cuda, COLO_LOSS_PASSES(ENTRY)};
