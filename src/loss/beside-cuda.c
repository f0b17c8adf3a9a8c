/* SPDX-License-Identifier: Apache-2.0 */
/*
 * beside-cuda.c - CUDA's table of src/loss/beside.h: passes become the flat structs of
 * kernels/beside-launch.h, after a look at their pointers. Each call's first pass looks at those of
 * all its passes: a wrong output must be known before anything is written.
 */
#include "core/ops-cuda.h"
#include "loss/beside.h"
#include "loss/distill-pass.h"
#include "loss/pick-pass.h"
#include "loss/sequence-pass.h"
#include "loss/weighted.h"

#include "beside-launch.h"

#include <stddef.h>
#include <string.h>

#define TRY COLO_CUDA_TRY

_Static_assert(COLO_K_PICK_MAX == COLO_PICK_MAX && COLO_K_PICK_SKIP == COLO_PICK_SKIP,
               "the kernels take what the passes promise");
_Static_assert(sizeof(struct colo_weighted_part) == 32 && sizeof(colo_weighted_t) == 32,
               "the kernels have the same structs");

/* ---- picks ---- */

static colo_k_pick_t flat_pick(const struct colo_pick_pass *p)
{
    return (colo_k_pick_t){
        .dtype = p->base.dtype,
        .factor = p->base.factor,
        .softcap = p->base.config->softcap,
        .vocab = p->base.config->vocab,
        .vocab_start = p->base.config->vocab_start,
        .ignore_index = p->ignore_index,
        .tokens = p->base.tokens,
        .k = p->k,
        .topk = p->topk,
        .count = p->count,
        .logits = p->base.logits,
        .row_stride = p->base.row_stride,
        .true_columns = p->base.true_columns,
        .blocks = p->base.blocks,
        .block_bytes = p->base.block.bytes,
        .pz = p->pz,
        .pid = p->pid,
        .rank = p->base.rank,
        .ranks = p->base.ranks,
        .head_start = offsetof(colo_logprob_header_t, start) / sizeof(int64_t),
        .head_columns = offsetof(colo_logprob_header_t, columns) / sizeof(int64_t),
        .ids = p->ids,
        .id_stride = p->id_stride,
        .mask = p->mask,
        .mask_stride = p->mask_stride,
        .logp = p->out.logp,
        .out_ids = p->out.ids,
        .n_invalid = p->out.n_invalid,
        .saved = p->base.saved,
        .rows = p->rows,
        .sum = p->sum,
        .down = p->down,
        .kept = p->kept,
        .d_logp = p->d_logp,
        .d_logits = p->base.d_logits,
        .d_row_stride = p->base.d_row_stride,
    };
}

static colo_status_t pick_rows(const struct colo_pick_pass *p, colo_stream_t stream)
{
    if (!p->count) { /* the first of the call */
        if (p->base.tokens > 0 && p->base.columns > 0)
            TRY(colo_cuda_typed(p->base.logits, p->base.dtype, "logits"));
        TRY(colo_cuda_typed(p->ids, COLO_I64, "ids"));
        TRY(colo_cuda_pointer(p->mask, "mask"));
        TRY(colo_cuda_pointer(p->base.blocks, "scratch"));
        TRY(colo_cuda_pointer(p->base.saved, "stats"));
        TRY(colo_cuda_typed(p->out.logp, p->base.stat_dtype, "out.logp"));
        TRY(colo_cuda_typed(p->out.ids, COLO_I64, "out.ids"));
        TRY(colo_cuda_typed(p->out.n_invalid, COLO_I64, "out.n_invalid"));
    }
    const colo_k_pick_t k = flat_pick(p);
    return colo_cuda_report(colo_k_pick_rows(&k, stream), "pick forward");
}

static colo_status_t pick_local(const struct colo_pick_pass *p, colo_stream_t stream)
{
    const colo_k_logprob_t s = colo_cuda_logprob(&p->base);
    const colo_k_pick_t k = flat_pick(p);
    if (p->topk)
        return colo_cuda_report(colo_k_pick_topk(&s, &k, stream), "pick forward, the largest");
    TRY(colo_cuda_report(colo_k_logprob_stats(&s, stream), "pick forward, statistics"));
    return colo_cuda_report(colo_k_pick_given(&k, stream), "pick forward, given columns");
}

static colo_status_t pick_merge(const struct colo_pick_pass *p, colo_stream_t stream)
{
    const colo_k_pick_t k = flat_pick(p);
    return colo_cuda_report(colo_k_pick_merge(&k, stream), "pick forward, merging");
}

static colo_status_t pick_sum(const struct colo_pick_pass *p, colo_stream_t stream)
{
    if (p->base.tokens > 0) {
        TRY(colo_cuda_typed(p->d_logp, p->base.stat_dtype, "d_logp"));
        TRY(colo_cuda_pointer(p->base.saved, "stats"));
        if (p->base.columns > 0)
            TRY(colo_cuda_typed(p->base.d_logits, p->base.dtype, "d_logits"));
    }
    const colo_k_pick_t k = flat_pick(p);
    return colo_cuda_report(colo_k_pick_sum(&k, stream), "pick backward");
}

static colo_status_t pick_fix(const struct colo_pick_pass *p, colo_stream_t stream)
{
    const colo_k_pick_t k = flat_pick(p);
    return colo_cuda_report(colo_k_pick_fix(&k, stream), "pick backward, picked columns");
}

/* ---- target distributions ---- */

static colo_k_distill_t flat_distill(const struct colo_distill_pass *p)
{
    colo_k_distill_t k = {
        .dtype = p->base.dtype,
        .target_dtype = p->target_dtype,
        .factor = p->base.factor,
        .softcap = p->base.config->softcap,
        .target_factor = p->target_factor,
        .probs = p->probs,
        .tokens = p->base.tokens,
        .logits = p->base.logits,
        .targets = p->targets,
        .row_stride = p->base.row_stride,
        .target_row_stride = p->target_row_stride,
        .columns = p->base.columns,
        .true_columns = p->base.true_columns,
        .mask = p->mask,
        .mask_stride = p->mask_stride,
        .blocks = p->base.blocks,
        .block_bytes = p->base.block.bytes,
        .mx = p->mx,
        .sx = p->sx,
        .mv = p->mv,
        .sv = p->sv,
        .c = p->c,
        .d = p->d,
        .rank = p->base.rank,
        .ranks = p->base.ranks,
        .ce = p->out.ce,
        .kl = p->out.kl,
        .saved = p->saved,
        .d_ce = p->upstream.d_ce,
        .d_kl = p->upstream.d_kl,
        .d_logits = p->base.d_logits,
        .d_row_stride = p->base.d_row_stride,
    };
    memcpy(k.head, &p->base.header, sizeof k.head);
    return k;
}

static colo_status_t distill_inputs(const struct colo_distill_pass *p)
{
    if (p->base.tokens > 0 && p->base.columns > 0) {
        TRY(colo_cuda_typed(p->base.logits, p->base.dtype, "logits"));
        TRY(colo_cuda_typed(p->targets, p->target_dtype, "targets"));
    }
    return colo_cuda_pointer(p->saved, "stats");
}

static colo_status_t distill_stats(const struct colo_distill_pass *p, colo_stream_t stream)
{
    TRY(distill_inputs(p));
    TRY(colo_cuda_pointer(p->mask, "mask"));
    TRY(colo_cuda_pointer(p->base.blocks, "scratch"));
    TRY(colo_cuda_typed(p->out.ce, p->base.stat_dtype, "out.ce"));
    TRY(colo_cuda_typed(p->out.kl, p->base.stat_dtype, "out.kl"));
    const colo_k_distill_t k = flat_distill(p);
    return colo_cuda_report(colo_k_distill_stats(&k, stream), "distill forward");
}

static colo_status_t distill_merge(const struct colo_distill_pass *p, colo_stream_t stream)
{
    const colo_k_distill_t k = flat_distill(p);
    return colo_cuda_report(colo_k_distill_merge(&k, stream), "distill forward, merging");
}

static colo_status_t distill_grad(const struct colo_distill_pass *p, colo_stream_t stream)
{
    TRY(distill_inputs(p));
    TRY(colo_cuda_typed(p->upstream.d_ce, p->base.stat_dtype, "d_ce"));
    TRY(colo_cuda_typed(p->upstream.d_kl, p->base.stat_dtype, "d_kl"));
    if (p->base.tokens > 0 && p->base.columns > 0)
        TRY(colo_cuda_typed(p->base.d_logits, p->base.dtype, "d_logits"));
    const colo_k_distill_t k = flat_distill(p);
    return colo_cuda_report(colo_k_distill_grad(&k, stream), "distill backward");
}

/* ---- sequences ---- */

static colo_k_sequence_t flat_sequence(const struct colo_sequence_pass *p)
{
    return (colo_k_sequence_t){
        .batch = p->batch,
        .positions = p->positions,
        .cp = p->cp,
        .cp_rank = p->cp_rank,
        .row = p->row,
        .count = p->count,
        .lengths = p->lengths,
        .cu_padded = p->cu_padded,
        .left_padded = p->left_padded,
        .tokens = p->tokens,
        .token_stride = p->token_stride,
        .ignore = p->ignore,
        .targets = p->targets,
        .mask = p->mask,
        .targets_only = p->what == COLO_SEQUENCE_TARGETS,
        .elem = p->dtype == COLO_F64 ? 8 : 4,
        .elements = p->elements,
        .table = p->table,
        .table_stride = p->table_stride,
        .from = p->from,
        .to = p->to,
    };
}

static colo_status_t sequence_inputs(const struct colo_sequence_pass *p)
{
    TRY(colo_cuda_typed(p->lengths, COLO_I64, "device_lengths"));
    return colo_cuda_typed(p->cu_padded, COLO_I64, "device_cu_padded");
}

static colo_status_t sequence_targets(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    TRY(sequence_inputs(p));
    TRY(colo_cuda_typed(p->tokens, COLO_I64, "tokens"));
    TRY(colo_cuda_typed(p->targets, COLO_I64, "targets"));
    const colo_k_sequence_t k = flat_sequence(p);
    return colo_cuda_report(colo_k_sequence_targets(&k, stream), "sequence targets");
}

static colo_status_t sequence_mask(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    TRY(sequence_inputs(p));
    TRY(colo_cuda_pointer(p->mask, "mask"));
    const colo_k_sequence_t k = flat_sequence(p);
    return colo_cuda_report(colo_k_sequence_mask(&k, stream), "sequence mask");
}

static colo_status_t sequence_spread(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    TRY(sequence_inputs(p));
    TRY(colo_cuda_typed(p->elements, p->dtype, "local"));
    TRY(colo_cuda_typed(p->table, p->dtype, "out"));
    const colo_k_sequence_t k = flat_sequence(p);
    return colo_cuda_report(colo_k_sequence_spread(&k, stream), "sequence gather");
}

static colo_status_t sequence_collect(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    TRY(sequence_inputs(p));
    TRY(colo_cuda_typed(p->elements, p->dtype, "d_local"));
    TRY(colo_cuda_typed(p->table, p->dtype, "d_out"));
    const colo_k_sequence_t k = flat_sequence(p);
    return colo_cuda_report(colo_k_sequence_collect(&k, stream), "sequence gather backward");
}

/* ---- weighted sums ---- */

static colo_k_weighted_t flat_weighted(const struct colo_weighted_pass *p)
{
    return (colo_k_weighted_t){
        .dtype = p->dtype,
        .count = p->count,
        .values = p->values,
        .weights = p->weights,
        .mask = p->mask,
        .counted = p->counted,
        .rank = p->rank,
        .ranks = p->ranks,
        .parts = p->parts,
        .out = p->out,
        .value = p->mean.value,
        .num = p->mean.num,
        .den = p->mean.den,
        .factor = p->mean.factor,
        .divide = p->divide,
        .d_values = p->d_values,
    };
}

static colo_status_t weighted_local(const struct colo_weighted_pass *p, colo_stream_t stream)
{
    TRY(colo_cuda_typed(p->values, p->dtype, "values"));
    TRY(colo_cuda_typed(p->weights, p->dtype, "weights"));
    TRY(colo_cuda_pointer(p->mask, "mask"));
    TRY(colo_cuda_pointer(p->parts, "scratch"));
    TRY(colo_cuda_typed(p->out, COLO_I64, "out"));
    TRY(colo_cuda_typed(p->d_values, p->dtype, "d_values"));
    TRY(colo_cuda_typed(p->counted, COLO_I64, "n_valid"));
    TRY(colo_cuda_typed(p->mean.value, p->dtype, "value"));
    TRY(colo_cuda_typed(p->mean.num, COLO_F64, "num"));
    TRY(colo_cuda_typed(p->mean.den, COLO_F64, "den"));
    TRY(colo_cuda_typed(p->mean.factor, COLO_F64, "factor"));
    const colo_k_weighted_t k = flat_weighted(p);
    return colo_cuda_report(colo_k_weighted_local(&k, stream), "weighted sum");
}

static colo_status_t weighted_finish(const struct colo_weighted_pass *p, colo_stream_t stream)
{
    const colo_k_weighted_t k = flat_weighted(p);
    return colo_cuda_report(colo_k_weighted_finish(&k, stream), "weighted sum over ranks");
}

static colo_status_t mean_grad(const struct colo_mean_grad_pass *p, colo_stream_t stream)
{
    TRY(colo_cuda_typed(p->factor, COLO_F64, "factor"));
    TRY(colo_cuda_typed(p->d_value, p->dtype, "d_value"));
    TRY(colo_cuda_typed(p->d_num, COLO_F64, "d_num"));
    TRY(colo_cuda_typed(p->d_values, p->dtype, "d_losses"));
    const colo_k_mean_grad_t k = {
        .dtype = p->dtype,
        .count = p->count,
        .factor = p->factor,
        .d_num = p->d_num,
        .d_value = p->d_value,
        .d_values = p->d_values,
    };
    return colo_cuda_report(colo_k_mean_grad(&k, stream), "gradient of a loss's mean");
}

const colo_beside_ops_t colo_cuda_beside = {
    .pick_rows = pick_rows,
    .pick_local = pick_local,
    .pick_merge = pick_merge,
    .pick_sum = pick_sum,
    .pick_fix = pick_fix,
    .distill_stats = distill_stats,
    .distill_merge = distill_merge,
    .distill_grad = distill_grad,
    .sequence_targets = sequence_targets,
    .sequence_mask = sequence_mask,
    .sequence_spread = sequence_spread,
    .sequence_collect = sequence_collect,
    .weighted_local = weighted_local,
    .weighted_finish = weighted_finish,
    .mean_grad = mean_grad,
};
