/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.c - the passes of topk-pass.h in plain C.
 *
 * A shard's k largest are kept sorted while its columns go by in ascending order: a column moves in
 * only where it is larger than what is there, so of equal logits the lower id stays in front. The
 * merge puts each rank's candidates where as many others come before them, by the same rule with
 * ids compared outright, for ranks need not hold the vocabulary in order.
 *
 * Backward's picked columns are written after the grad pass, from x - M as it was kept: in place
 * the logits are gone by then. Of an id that occurs twice in a row the first writes the sum of
 * both.
 */
#include "loss/topk-pass.h"

#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>

static bool is_legal(const struct colo_topk_pass *p, int64_t id)
{
    return id >= 0 && id < p->base.config.logits.vocab;
}

colo_status_t colo_host_topk_rows(const struct colo_topk_pass *p, colo_stream_t stream)
{
    int64_t invalid = 0;
    (void)stream;
    for (int64_t t = 0; t < p->base.tokens; t++) {
        int64_t row = p->topk ? 0 : COLO_TOPK_SKIP;
        if (p->mask && !p->mask[t * p->mask_stride])
            row = COLO_TOPK_SKIP;
        else
            for (int64_t i = 0; i < p->k && !p->topk; i++) {
                int64_t id = p->ids[t * p->id_stride + i];
                if (id == p->ignore_index)
                    continue;
                invalid += !is_legal(p, id);
                if (!is_legal(p, id))
                    row = -1;
                else if (row == COLO_TOPK_SKIP)
                    row = id;
            }
        p->rows[t] = row;
    }
    if (p->count && p->out.n_invalid)
        *p->out.n_invalid = invalid;
    return COLO_OK;
}

/* What is compared: rises with x. */
static double key_of(const struct colo_topk_pass *p, double z)
{
    return p->base.factor > 0 ? z : p->base.factor < 0 ? -z : 0;
}

static double logit(const struct colo_topk_pass *p, int64_t t, int64_t j)
{
    return colo_scalar_get(p->base.dtype, p->base.logits, t * p->base.row_stride + j);
}

static void shard_topk(const struct colo_topk_pass *p, int64_t t, void *pz, int64_t *pid)
{
    double key[COLO_TOPK_MAX];
    int64_t column[COLO_TOPK_MAX], n = 0;
    for (int64_t j = 0; j < p->base.true_columns; j++) {
        double v = key_of(p, logit(p, t, j));
        if (n == p->k && !(v > key[n - 1]))
            continue;
        int64_t i = n < p->k ? n++ : n - 1;
        for (; i > 0 && v > key[i - 1]; i--) {
            key[i] = key[i - 1];
            column[i] = column[i - 1];
        }
        key[i] = v;
        column[i] = j;
    }
    for (int64_t i = 0; i < p->k; i++) {
        colo_scalar_put(p->base.stat_dtype, pz, t * p->k + i, i < n ? logit(p, t, column[i]) : 0);
        pid[t * p->k + i] = i < n ? p->base.config.logits.vocab_start + column[i] : -1;
    }
}

colo_status_t colo_host_topk_local(const struct colo_topk_pass *p, colo_stream_t stream)
{
    const int64_t start = p->base.config.logits.vocab_start;
    unsigned char *block = colo_logprob_i_block(&p->base, p->base.rank);
    colo_status_t st = colo_host_logprob_stats(&p->base, stream);
    if (st < 0)
        return st;
    for (int64_t t = 0; t < p->base.tokens; t++) {
        const bool skip = p->rows[t] == COLO_TOPK_SKIP;
        if (p->topk && !skip) {
            shard_topk(p, t, block + p->pz, (int64_t *)(block + p->pid));
            continue;
        }
        for (int64_t i = 0; i < p->k; i++) {
            int64_t j = skip || p->topk ? -1 : p->ids[t * p->id_stride + i];
            j = j >= start && j - start < p->base.true_columns ? j - start : -1;
            colo_scalar_put(p->base.stat_dtype, block + p->pz, t * p->k + i,
                            j >= 0 ? logit(p, t, j) : 0);
            if (p->topk)
                ((int64_t *)(block + p->pid))[t * p->k + i] = -1;
        }
    }
    return COLO_OK;
}

static double candidate(const struct colo_topk_pass *p, int32_t r, int64_t index)
{
    return colo_scalar_get(p->base.stat_dtype, colo_logprob_i_block(&p->base, r) + p->pz, index);
}

/* The rank whose block owns a legal @id. */
static int32_t rank_of(const struct colo_topk_pass *p, int64_t id)
{
    for (int32_t r = 0; r < p->base.ranks; r++) {
        const colo_logprob_header_t *h =
            (const colo_logprob_header_t *)colo_logprob_i_block(&p->base, r);
        if (id >= h->start && id - h->start < h->columns)
            return r;
    }
    return 0; /* on the host: not reached, the shards tile the vocabulary */
}

/* How many candidates of rank @r come before (@key, @id). */
static int64_t count_before(const struct colo_topk_pass *p, int32_t r, int64_t t, double key,
                            int64_t id)
{
    const int64_t *ids = (const int64_t *)(colo_logprob_i_block(&p->base, r) + p->pid) + t * p->k;
    int64_t lo = 0, hi = p->k;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        double other = ids[mid] < 0 ? 0 : key_of(p, candidate(p, r, t * p->k + mid));
        if (ids[mid] >= 0 && (other > key || (other == key && ids[mid] < id)))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* @id -1: no such column, NaN; COLO_TOPK_SKIP: nothing was asked for, 0 */
static void emit(const struct colo_topk_pass *p, int64_t t, int64_t i, int64_t id, double z)
{
    const int64_t index = t * p->k + i;
    double down = 0, logp = id == COLO_TOPK_SKIP ? 0 : NAN;
    if (id >= 0) {
        down = colo_scalar_x(p->base.dtype, z, p->base.factor, p->base.config.logits.softcap) -
               p->base.saved[t];
        logp = colo_scalar_at_most_0(down - p->base.saved[p->base.tokens + t]);
    }
    p->down[index] = down;
    p->saved_ids[index] = id < 0 ? -1 : id;
    if (p->out.logp)
        colo_scalar_put(p->base.stat_dtype, p->out.logp, index, logp);
    if (p->out.ids)
        p->out.ids[index] = id < 0 ? -1 : id;
    if (p->topk && i == 0 && id >= 0)
        p->rows[t] = id;
}

static void merge_topk(const struct colo_topk_pass *p, int64_t t)
{
    for (int32_t r = 0; r < p->base.ranks; r++) {
        const int64_t *ids =
            (const int64_t *)(colo_logprob_i_block(&p->base, r) + p->pid) + t * p->k;
        for (int64_t i = 0; i < p->k && ids[i] >= 0; i++) {
            const double z = candidate(p, r, t * p->k + i);
            int64_t before = 0;
            for (int32_t q = 0; q < p->base.ranks && before < p->k; q++)
                before += count_before(p, q, t, key_of(p, z), ids[i]);
            if (before >= p->k)
                break; /* so will the rest of this rank's */
            emit(p, t, before, ids[i], z);
        }
    }
}

colo_status_t colo_host_topk_merge(const struct colo_topk_pass *p, colo_stream_t stream)
{
    (void)stream;
    for (int64_t t = 0; t < p->base.tokens; t++) {
        const bool skip = p->rows[t] == COLO_TOPK_SKIP;
        if (p->topk && !skip && !isnan(p->base.saved[t])) {
            merge_topk(p, t);
            continue;
        }
        for (int64_t i = 0; i < p->k; i++) {
            int64_t id = skip || p->topk ? -1 : p->ids[t * p->id_stride + i];
            if (skip || (!p->topk && id == p->ignore_index))
                emit(p, t, i, COLO_TOPK_SKIP, 0);
            else if (is_legal(p, id))
                emit(p, t, i, id, candidate(p, rank_of(p, id), t * p->k + i));
            else
                emit(p, t, i, -1, 0);
        }
    }
    return COLO_OK;
}

/* 0 where a pick has none */
static double upstream(const struct colo_topk_pass *p, int64_t index)
{
    return p->saved_ids[index] < 0 ? 0 : colo_scalar_get(p->base.stat_dtype, p->d_logp, index);
}

colo_status_t colo_host_topk_sum(const struct colo_topk_pass *p, colo_stream_t stream)
{
    (void)stream;
    for (int64_t t = 0; t < p->base.tokens; t++) {
        double sum = 0;
        for (int64_t i = 0; i < p->k; i++)
            sum += upstream(p, t * p->k + i);
        colo_scalar_put(p->base.stat_dtype, p->sum, t, sum);
    }
    return COLO_OK;
}

colo_status_t colo_host_topk_fix(const struct colo_topk_pass *p, colo_stream_t stream)
{
    const int64_t rows = p->base.tokens, start = p->base.config.logits.vocab_start;
    const double cap = p->base.config.logits.softcap;
    (void)stream;
    for (int64_t t = 0; t < rows; t++) {
        const double m = p->base.saved[t], log_sum = p->base.saved[rows + t];
        if (p->rows[t] < 0 || isnan(m))
            continue; /* zeros or NaN, already there */
        for (int64_t i = 0; i < p->k; i++) {
            const int64_t index = t * p->k + i, id = p->saved_ids[index], j = id - start;
            if (id < start || j >= p->base.true_columns)
                continue;
            double g = 0;
            bool first = true;
            for (int64_t n = 0; n < p->k; n++) {
                g += p->saved_ids[t * p->k + n] == id ? upstream(p, t * p->k + n) : 0;
                first = first && (n >= i || p->saved_ids[t * p->k + n] != id);
            }
            if (!first)
                continue;
            double dx =
                g - exp(p->down[index] - log_sum) * colo_scalar_get(p->base.stat_dtype, p->sum, t);
            if (cap > 0) {
                double th = (p->down[index] + m) / cap;
                dx *= 1 - th * th;
            }
            colo_scalar_put(p->base.dtype, p->base.d_logits, t * p->base.d_row_stride + j,
                            dx * p->base.factor);
        }
    }
    return COLO_OK;
}
