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

#define TRY COLO_TRY

_Static_assert(sizeof(struct colo_weighted_part) == 32 && sizeof(colo_weighted_t) == 32,
               "the kernels have the same structs");

/* ---- log-probabilities ---- */

static colo_status_t check_support(colo_queries_t *q, const struct colo_logprob_pass *p)
{
    const struct colo_support_pass *s = &p->support;
    if (p->tokens == 0 || !s->begin)
        return COLO_OK;
    if (s->count > 0)
        TRY(colo_cuda_typed(q, s->ids, COLO_I64, "support: ids"));
    TRY(colo_cuda_typed(q, s->begin, COLO_I64, "support: begin"));
    return colo_cuda_typed(q, s->end, COLO_I64, "support: end");
}

/* Each pass looks at its pointers once, before its first chunk. */
static colo_status_t logprob_stats(const struct colo_logprob_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (p->lo == 0) {
        if (p->tokens > 0 && p->columns > 0)
            TRY(colo_cuda_typed(&q, p->logits, p->dtype, "logits"));
        if (p->tokens > 0)
            TRY(colo_cuda_typed(&q, p->targets, COLO_I64, "targets"));
        TRY(check_support(&q, p));
        TRY(colo_cuda_pointer(&q, p->blocks, "workspace"));
        /* merge's, too: a wrong output must be known before anything is written */
        TRY(colo_cuda_typed(&q, p->out.logp, p->stat_dtype, "out.logp"));
        TRY(colo_cuda_typed(&q, p->out.entropy, p->stat_dtype, "out.entropy"));
        TRY(colo_cuda_typed(&q, p->out.loss, p->stat_dtype, "out.loss"));
        TRY(colo_cuda_pointer(&q, p->out.correct, "out.correct"));
        TRY(colo_cuda_typed(&q, p->out.n_valid, COLO_I64, "out.n_valid"));
        TRY(colo_cuda_typed(&q, p->out.n_invalid, COLO_I64, "out.n_invalid"));
        TRY(colo_cuda_pointer(&q, p->saved, "stats"));
    }
    return colo_cuda_report(colo_k_logprob_stats(p, stream), "logprob forward");
}

static colo_status_t logprob_merge(const struct colo_logprob_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_logprob_merge(p, stream), "logprob forward, merging");
}

static colo_status_t logprob_grad(const struct colo_logprob_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (p->lo == 0 && p->tokens > 0 && p->columns > 0) {
        TRY(colo_cuda_typed(&q, p->logits, p->dtype, "logits"));
        TRY(colo_cuda_typed(&q, p->d_logits, p->dtype, "d_logits"));
        TRY(colo_cuda_typed(&q, p->targets, COLO_I64, "targets"));
        TRY(check_support(&q, p));
        TRY(colo_cuda_pointer(&q, p->saved, "stats"));
        TRY(colo_cuda_typed(&q, p->upstream.d_logp, p->stat_dtype, "d_logp"));
        TRY(colo_cuda_typed(&q, p->upstream.d_entropy, p->stat_dtype, "d_entropy"));
        TRY(colo_cuda_typed(&q, p->upstream.d_loss, p->stat_dtype, "d_loss"));
    }
    return colo_cuda_report(colo_k_logprob_grad(p, stream), "logprob backward");
}

/* ---- rows of the lm_head path: each pointer of the caller's is checked by the first pass that
 * touches it ---- */

static colo_status_t rows_compact(const struct colo_linear_rows *r, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (r->tokens > 0)
        TRY(colo_cuda_typed(&q, r->targets, COLO_I64, "targets"));
    TRY(colo_cuda_pointer(&q, r->counts, "workspace"));
    return colo_cuda_report(colo_k_rows_compact(r, stream), "lm_head: packing");
}

static colo_status_t rows_upstream(const struct colo_linear_upstream_rows *u, colo_stream_t stream)
{
    colo_queries_t q = {0};
    static const char *const names[] = {"d_logp", "d_entropy", "d_loss"};
    for (int i = 0; i < 3; i++)
        TRY(colo_cuda_typed(&q, u->from[i], u->dtype, names[i]));
    return colo_cuda_report(colo_k_rows_upstream(u, stream), "lm_head: upstream gradients");
}

static colo_status_t rows_factor(float *to, const float *from, double factor, const float *by,
                                 colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(colo_cuda_typed(&q, by, COLO_F32, "d_loss"));
    return colo_cuda_report(colo_k_rows_factor(to, from, factor, by, stream), "lm_head: factor");
}

static colo_status_t rows_scatter(const struct colo_linear_scatter *s, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(colo_cuda_typed(&q, s->to.logp, s->dtype, "out.logp"));
    TRY(colo_cuda_typed(&q, s->to.entropy, s->dtype, "out.entropy"));
    TRY(colo_cuda_typed(&q, s->to.loss, s->dtype, "out.loss"));
    TRY(colo_cuda_pointer(&q, s->to.correct, "out.correct"));
    TRY(colo_cuda_typed(&q, s->to.n_valid, COLO_I64, "out.n_valid"));
    TRY(colo_cuda_typed(&q, s->to.n_invalid, COLO_I64, "out.n_invalid"));
    return colo_cuda_report(colo_k_rows_scatter(s, stream), "lm_head: outputs");
}

static colo_status_t rows_gather(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                                 int64_t hidden, void *to, const struct colo_linear_matrix *from,
                                 colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (lo == 0)
        TRY(colo_cuda_typed(&q, from->data, from->dtype, "hidden"));
    return colo_cuda_report(
        colo_k_rows_gather(r, lo, hi, hidden, to, from->data, from->stride, from->dtype, stream),
        "lm_head: hidden rows");
}

static colo_status_t rows_restore(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                                  int64_t hidden, const struct colo_linear_matrix *to,
                                  const void *from, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (lo == 0)
        TRY(colo_cuda_typed(&q, to->data, to->dtype, "d_hidden"));
    return colo_cuda_report(
        colo_k_rows_restore(r, lo, hi, hidden, to->data, to->stride, from, to->dtype, stream),
        "lm_head: d_hidden rows");
}

static colo_status_t rows_clear(const struct colo_linear_rows *r, int64_t hidden,
                                const struct colo_linear_matrix *to, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (r->tokens > 0)
        TRY(colo_cuda_typed(&q, to->data, to->dtype, "d_hidden"));
    return colo_cuda_report(colo_k_rows_clear(r, hidden, to->data, to->stride, to->dtype, stream),
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

static colo_status_t topk_rows(const struct colo_topk_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (!p->count) { /* the first of the call */
        if (p->base.tokens > 0 && p->base.columns > 0)
            TRY(colo_cuda_typed(&q, p->base.logits, p->base.dtype, "logits"));
        TRY(colo_cuda_typed(&q, p->ids, COLO_I64, "ids"));
        TRY(colo_cuda_pointer(&q, p->mask, "mask"));
        TRY(colo_cuda_pointer(&q, p->base.blocks, "workspace"));
        TRY(colo_cuda_pointer(&q, p->base.saved, "stats"));
        TRY(colo_cuda_typed(&q, p->out.logp, p->base.stat_dtype, "out.logp"));
        TRY(colo_cuda_typed(&q, p->out.ids, COLO_I64, "out.ids"));
        TRY(colo_cuda_typed(&q, p->out.n_invalid, COLO_I64, "out.n_invalid"));
    }
    return colo_cuda_report(colo_k_topk_rows(p, stream), "topk forward");
}

static colo_status_t topk_local(const struct colo_topk_pass *p, colo_stream_t stream)
{
    if (p->topk)
        return colo_cuda_report(colo_k_topk_largest(p, stream), "topk forward, the largest");
    TRY(colo_cuda_report(colo_k_logprob_stats(&p->base, stream), "topk forward, statistics"));
    return colo_cuda_report(colo_k_topk_given(p, stream), "topk forward, given columns");
}

static colo_status_t topk_merge(const struct colo_topk_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_topk_merge(p, stream), "topk forward, merging");
}

static colo_status_t topk_sum(const struct colo_topk_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (p->base.tokens > 0) {
        TRY(colo_cuda_typed(&q, p->d_logp, p->base.stat_dtype, "d_logp"));
        TRY(colo_cuda_pointer(&q, p->base.saved, "stats"));
        if (p->base.columns > 0)
            TRY(colo_cuda_typed(&q, p->base.d_logits, p->base.dtype, "d_logits"));
    }
    return colo_cuda_report(colo_k_topk_sum(p, stream), "topk backward");
}

static colo_status_t topk_fix(const struct colo_topk_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_topk_fix(p, stream), "topk backward, picked columns");
}

/* ---- what a sampler keeps ---- */

static colo_status_t sampling_largest(const struct colo_sampling_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    if (p->base.tokens > 0 && p->base.columns > 0) {
        TRY(colo_cuda_typed(&q, p->base.logits, p->base.dtype, "logits"));
        TRY(colo_cuda_typed(&q, p->out, p->base.dtype, "out"));
    }
    TRY(colo_cuda_pointer(&q, p->base.blocks, "workspace"));
    return colo_cuda_report(colo_k_sampling_largest(p, stream), "sampling, the largest");
}

static colo_status_t sampling_sums(const struct colo_sampling_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_sampling_sums(p, stream), "sampling, sums");
}

static colo_status_t sampling_find(const struct colo_sampling_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_sampling_find(p, stream), "sampling, the last logit");
}

static colo_status_t sampling_keep(const struct colo_sampling_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_sampling_keep(p, stream), "sampling, writing");
}

/* ---- target distributions ---- */

static colo_status_t distill_inputs(colo_queries_t *q, const struct colo_distill_pass *p)
{
    if (p->base.tokens > 0 && p->base.columns > 0) {
        TRY(colo_cuda_typed(q, p->base.logits, p->base.dtype, "logits"));
        TRY(colo_cuda_typed(q, p->targets, p->target_dtype, "targets"));
    }
    return colo_cuda_pointer(q, p->saved, "stats");
}

static colo_status_t distill_stats(const struct colo_distill_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(distill_inputs(&q, p));
    TRY(colo_cuda_pointer(&q, p->mask, "mask"));
    TRY(colo_cuda_pointer(&q, p->base.blocks, "workspace"));
    TRY(colo_cuda_typed(&q, p->out.ce, p->base.stat_dtype, "out.ce"));
    TRY(colo_cuda_typed(&q, p->out.kl, p->base.stat_dtype, "out.kl"));
    return colo_cuda_report(colo_k_distill_stats(p, stream), "distill forward");
}

static colo_status_t distill_merge(const struct colo_distill_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_distill_merge(p, stream), "distill forward, merging");
}

static colo_status_t distill_grad(const struct colo_distill_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(distill_inputs(&q, p));
    TRY(colo_cuda_typed(&q, p->upstream.d_ce, p->base.stat_dtype, "d_ce"));
    TRY(colo_cuda_typed(&q, p->upstream.d_kl, p->base.stat_dtype, "d_kl"));
    if (p->base.tokens > 0 && p->base.columns > 0)
        TRY(colo_cuda_typed(&q, p->base.d_logits, p->base.dtype, "d_logits"));
    return colo_cuda_report(colo_k_distill_grad(p, stream), "distill backward");
}

/* ---- sequences ---- */

static colo_status_t sequence_inputs(colo_queries_t *q, const struct colo_sequence_pass *p)
{
    TRY(colo_cuda_typed(q, p->lengths, COLO_I64, "device_lengths"));
    return colo_cuda_typed(q, p->cu_padded, COLO_I64, "device_cu_padded");
}

static colo_status_t sequence_targets(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(sequence_inputs(&q, p));
    TRY(colo_cuda_typed(&q, p->tokens, COLO_I64, "tokens"));
    TRY(colo_cuda_typed(&q, p->targets, COLO_I64, "targets"));
    return colo_cuda_report(colo_k_sequence_targets(p, stream), "sequence targets");
}

static colo_status_t sequence_mask(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(sequence_inputs(&q, p));
    TRY(colo_cuda_pointer(&q, p->mask, "mask"));
    return colo_cuda_report(colo_k_sequence_mask(p, stream), "sequence mask");
}

static colo_status_t sequence_scatter(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(sequence_inputs(&q, p));
    TRY(colo_cuda_typed(&q, p->elements, p->dtype, "local"));
    TRY(colo_cuda_typed(&q, p->table, p->dtype, "out"));
    return colo_cuda_report(colo_k_sequence_scatter(p, stream), "sequence gather");
}

static colo_status_t sequence_gather(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(sequence_inputs(&q, p));
    TRY(colo_cuda_typed(&q, p->elements, p->dtype, "d_local"));
    TRY(colo_cuda_typed(&q, p->table, p->dtype, "d_out"));
    return colo_cuda_report(colo_k_sequence_gather(p, stream), "sequence gather backward");
}

/* ---- weighted sums ---- */

static colo_status_t weighted_local(const struct colo_weighted_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(colo_cuda_typed(&q, p->values, p->dtype, "values"));
    TRY(colo_cuda_typed(&q, p->weights, p->dtype, "weights"));
    TRY(colo_cuda_pointer(&q, p->mask, "mask"));
    TRY(colo_cuda_pointer(&q, p->parts, "workspace"));
    TRY(colo_cuda_typed(&q, p->out, COLO_I64, "out"));
    TRY(colo_cuda_typed(&q, p->d_values, p->dtype, "d_values"));
    TRY(colo_cuda_typed(&q, p->counted, COLO_I64, "n_valid"));
    TRY(colo_cuda_typed(&q, p->mean.value, p->dtype, "value"));
    TRY(colo_cuda_typed(&q, p->mean.num, COLO_F64, "num"));
    TRY(colo_cuda_typed(&q, p->mean.den, COLO_F64, "den"));
    TRY(colo_cuda_typed(&q, p->mean.factor, COLO_F64, "factor"));
    return colo_cuda_report(colo_k_weighted_local(p, stream), "weighted sum");
}

static colo_status_t weighted_finish(const struct colo_weighted_pass *p, colo_stream_t stream)
{
    return colo_cuda_report(colo_k_weighted_finish(p, stream), "weighted sum over ranks");
}

static colo_status_t mean_grad(const struct colo_mean_grad_pass *p, colo_stream_t stream)
{
    colo_queries_t q = {0};
    TRY(colo_cuda_typed(&q, p->factor, COLO_F64, "factor"));
    TRY(colo_cuda_typed(&q, p->d_value, p->dtype, "d_value"));
    TRY(colo_cuda_typed(&q, p->d_num, COLO_F64, "d_num"));
    TRY(colo_cuda_typed(&q, p->d_values, p->dtype, "d_losses"));
    return colo_cuda_report(colo_k_mean_grad(p, stream), "gradient of a loss's mean");
}

const colo_loss_ops_t colo_loss_cuda = {
    .logprob_stats = logprob_stats,
    .logprob_merge = logprob_merge,
    .logprob_grad = logprob_grad,
    .gemm = &colo_gemm_cuda,
    .rows_compact = rows_compact,
    .rows_upstream = rows_upstream,
    .rows_factor = rows_factor,
    .rows_scatter = rows_scatter,
    .rows_gather = rows_gather,
    .rows_restore = rows_restore,
    .rows_clear = rows_clear,
    .rows_sum = rows_sum,
    .rows_convert = rows_convert,
    .topk_rows = topk_rows,
    .topk_local = topk_local,
    .topk_merge = topk_merge,
    .topk_sum = topk_sum,
    .topk_fix = topk_fix,
    .sampling_largest = sampling_largest,
    .sampling_sums = sampling_sums,
    .sampling_find = sampling_find,
    .sampling_keep = sampling_keep,
    .distill_stats = distill_stats,
    .distill_merge = distill_merge,
    .distill_grad = distill_grad,
    .sequence_targets = sequence_targets,
    .sequence_mask = sequence_mask,
    .sequence_scatter = sequence_scatter,
    .sequence_gather = sequence_gather,
    .weighted_local = weighted_local,
    .weighted_finish = weighted_finish,
    .mean_grad = mean_grad,
};
