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

#include "core/list.h"
#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>

static bool is_legal(const struct colo_topk_pass *pass, int64_t id)
{
    return id >= 0 && id < pass->base.config.logits.vocab;
}

colo_status_t colo_host_topk_rows(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    int64_t invalid = 0;
    for (int64_t token = 0; token < pass->base.tokens; token++) {
        int64_t row = pass->topk ? 0 : COLO_TOPK_SKIP;
        if (pass->mask && !pass->mask[token * pass->mask_stride])
            row = COLO_TOPK_SKIP;
        else
            for (int64_t i = 0; i < pass->k && !pass->topk; i++) {
                int64_t id = pass->ids[token * pass->id_stride + i];
                if (id == pass->ignore_index)
                    continue;
                invalid += !is_legal(pass, id);
                if (!is_legal(pass, id))
                    row = -1;
                else if (row == COLO_TOPK_SKIP)
                    row = id;
            }
        pass->rows[token] = row;
    }
    if (pass->count && pass->out.n_invalid)
        *pass->out.n_invalid = invalid;
    return COLO_OK;
}

/* What is compared: rises with x. */
static double key_of(const struct colo_topk_pass *pass, double z)
{
    return pass->base.factor > 0 ? z : pass->base.factor < 0 ? -z : 0;
}

static double logit(const struct colo_topk_pass *pass, int64_t token, int64_t j)
{
    return colo_scalar_get(pass->base.dtype, pass->base.logits, token * pass->base.row_stride + j);
}

static void shard_topk(const struct colo_topk_pass *pass, int64_t token, void *pz, int64_t *pid)
{
    double key[COLO_TOPK_MAX];
    int64_t column[COLO_TOPK_MAX], n = 0;
    for (int64_t j = 0; j < pass->base.true_columns; j++) {
        double v = key_of(pass, logit(pass, token, j));
        if (n == pass->k && !(v > key[n - 1]))
            continue;
        int64_t i = n < pass->k ? n++ : n - 1;
        for (; i > 0 && v > key[i - 1]; i--) {
            key[i] = key[i - 1];
            column[i] = column[i - 1];
        }
        key[i] = v;
        column[i] = j;
    }
    for (int64_t i = 0; i < pass->k; i++) {
        colo_scalar_put(pass->base.stat_dtype, pz, token * pass->k + i,
                        i < n ? logit(pass, token, column[i]) : 0);
        pid[token * pass->k + i] = i < n ? pass->base.config.logits.vocab_start + column[i] : -1;
    }
}

colo_status_t colo_host_topk_local(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    const int64_t start = pass->base.config.logits.vocab_start;
    unsigned char *block = colo_logprob_i_block(&pass->base, pass->base.rank);
    colo_status_t st = colo_host_logprob_stats(&pass->base, stream);
    if (st < 0)
        return st;
    for (int64_t token = 0; token < pass->base.tokens; token++) {
        const bool skip = pass->rows[token] == COLO_TOPK_SKIP;
        if (pass->topk && !skip) {
            shard_topk(pass, token, block + pass->pz, (int64_t *)(block + pass->pid));
            continue;
        }
        for (int64_t i = 0; i < pass->k; i++) {
            int64_t j = skip || pass->topk ? -1 : pass->ids[token * pass->id_stride + i];
            j = j >= start && j - start < pass->base.true_columns ? j - start : -1;
            colo_scalar_put(pass->base.stat_dtype, block + pass->pz, token * pass->k + i,
                            j >= 0 ? logit(pass, token, j) : 0);
            if (pass->topk)
                ((int64_t *)(block + pass->pid))[token * pass->k + i] = -1;
        }
    }
    return COLO_OK;
}

static double candidate(const struct colo_topk_pass *pass, int32_t r, int64_t index)
{
    return colo_scalar_get(pass->base.stat_dtype, colo_logprob_i_block(&pass->base, r) + pass->pz,
                           index);
}

/* The rank whose block owns a legal @id. */
static int32_t rank_of(const struct colo_topk_pass *pass, int64_t id)
{
    for (int32_t r = 0; r < pass->base.ranks; r++) {
        const colo_logprob_header_t *header =
            (const colo_logprob_header_t *)colo_logprob_i_block(&pass->base, r);
        if (id >= header->start && id - header->start < header->columns)
            return r;
    }
    return 0; /* on the host: not reached, the shards tile the vocabulary */
}

static bool comes_before(double key, int64_t id, double other, int64_t other_id)
{
    return key > other || (key == other && id < other_id);
}

/* How many candidates of rank @r come before (@key, @id). */
static int64_t count_before(const struct colo_topk_pass *pass, int32_t r, int64_t token, double key,
                            int64_t id)
{
    const int64_t *ids =
        (const int64_t *)(colo_logprob_i_block(&pass->base, r) + pass->pid) + token * pass->k;
    int64_t lo = 0, hi = pass->k;
    COLO_SEARCH(lo, hi, i,
                ids[i] >= 0 && comes_before(key_of(pass, candidate(pass, r, token * pass->k + i)),
                                            ids[i], key, id))
    return lo;
}

/* @id -1: no such column, NaN; COLO_TOPK_SKIP: nothing was asked for, 0 */
static void emit(const struct colo_topk_pass *pass, int64_t token, int64_t i, int64_t id, double z)
{
    const int64_t index = token * pass->k + i;
    double down = 0, logp = id == COLO_TOPK_SKIP ? 0 : NAN;
    if (id >= 0) {
        down = colo_scalar_x(pass->base.dtype, z, pass->base.factor, pass->base.cap) -
               pass->base.saved[token];
        logp = colo_scalar_at_most_0(down - pass->base.saved[pass->base.tokens + token]);
    }
    pass->down[index] = down;
    pass->saved_ids[index] = id < 0 ? -1 : id;
    if (pass->out.logp)
        colo_scalar_put(pass->base.stat_dtype, pass->out.logp, index, logp);
    if (pass->out.ids)
        pass->out.ids[index] = id < 0 ? -1 : id;
    if (pass->topk && i == 0 && id >= 0)
        pass->rows[token] = id;
}

static void merge_topk(const struct colo_topk_pass *pass, int64_t token)
{
    for (int32_t r = 0; r < pass->base.ranks; r++) {
        const int64_t *ids =
            (const int64_t *)(colo_logprob_i_block(&pass->base, r) + pass->pid) + token * pass->k;
        for (int64_t i = 0; i < pass->k && ids[i] >= 0; i++) {
            const double z = candidate(pass, r, token * pass->k + i);
            int64_t before = 0;
            for (int32_t q = 0; q < pass->base.ranks && before < pass->k; q++)
                before += count_before(pass, q, token, key_of(pass, z), ids[i]);
            if (before >= pass->k)
                break; /* so will the rest of this rank's */
            emit(pass, token, before, ids[i], z);
        }
    }
}

colo_status_t colo_host_topk_merge(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    for (int64_t token = 0; token < pass->base.tokens; token++) {
        const bool skip = pass->rows[token] == COLO_TOPK_SKIP;
        if (pass->topk && !skip && !isnan(pass->base.saved[token])) {
            merge_topk(pass, token);
            continue;
        }
        for (int64_t i = 0; i < pass->k; i++) {
            int64_t id = skip || pass->topk ? -1 : pass->ids[token * pass->id_stride + i];
            if (skip || (!pass->topk && id == pass->ignore_index))
                emit(pass, token, i, COLO_TOPK_SKIP, 0);
            else if (is_legal(pass, id))
                emit(pass, token, i, id, candidate(pass, rank_of(pass, id), token * pass->k + i));
            else
                emit(pass, token, i, -1, 0);
        }
    }
    return COLO_OK;
}

/* 0 where a pick has none */
static double upstream(const struct colo_topk_pass *pass, int64_t index)
{
    return pass->saved_ids[index] < 0 ? 0
                                      : colo_scalar_get(pass->base.stat_dtype, pass->d_logp, index);
}

colo_status_t colo_host_topk_sum(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    for (int64_t token = 0; token < pass->base.tokens; token++) {
        double sum = 0;
        for (int64_t i = 0; i < pass->k; i++)
            sum += upstream(pass, token * pass->k + i);
        colo_scalar_put(pass->base.stat_dtype, pass->sum, token, sum);
    }
    return COLO_OK;
}

colo_status_t colo_host_topk_fix(const struct colo_topk_pass *pass, colo_stream_t stream)
{
    const int64_t rows = pass->base.tokens, start = pass->base.config.logits.vocab_start;
    const double cap = pass->base.cap;
    for (int64_t token = 0; token < rows; token++) {
        const double m = pass->base.saved[token], log_sum = pass->base.saved[rows + token];
        if (pass->rows[token] < 0 || isnan(m))
            continue; /* zeros or NaN, already there */
        for (int64_t i = 0; i < pass->k; i++) {
            const int64_t index = token * pass->k + i, id = pass->saved_ids[index], j = id - start;
            if (id < start || j >= pass->base.true_columns)
                continue;
            double g = 0;
            bool first = true;
            for (int64_t n = 0; n < pass->k; n++) {
                g += pass->saved_ids[token * pass->k + n] == id
                         ? upstream(pass, token * pass->k + n)
                         : 0;
                first = first && (n >= i || pass->saved_ids[token * pass->k + n] != id);
            }
            if (!first)
                continue;
            double dx = g - exp(pass->down[index] - log_sum) *
                                colo_scalar_get(pass->base.stat_dtype, pass->sum, token);
            if (cap > 0) {
                double th = (pass->down[index] + m) / cap;
                dx *= 1 - th * th;
            }
            colo_scalar_put(pass->base.dtype, pass->base.d_logits,
                            token * pass->base.d_row_stride + j, dx * pass->base.factor);
        }
    }
    return COLO_OK;
}
