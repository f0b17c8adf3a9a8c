/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.c - the kernels of topk-args.h in plain C.
 *
 * A shard's k largest are kept sorted while its columns go by in ascending order: a column moves in
 * only where it is larger than what is there, so of equal logits the lower id stays in front. The
 * merge puts each rank's candidates where as many others come before them, by the same rule with
 * ids compared outright, for ranks need not hold the vocabulary in order.
 *
 * Backward's picked columns are written after the grad kernel, from x - M as it was kept: in place
 * the logits are gone by then. If an id occurs twice in a row, the first one writes the sum of
 * both.
 */
#include "loss/logprob-merge.h"
#include "loss/topk-tail.h"

#include "core/list.h"
#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>
#include <stdlib.h>

static bool is_legal(const struct colo_topk_args *args, int64_t id)
{
    return id >= 0 && id < args->base.config.logits.vocab;
}

colo_status_t colo_host_topk_rows(const struct colo_topk_args *args, colo_stream_t stream)
{
    int64_t invalid = 0;
    for (int64_t token = 0; token < args->base.tokens; token++) {
        int64_t row = args->topk ? 0 : COLO_TOPK_SKIP;
        if (args->mask && !args->mask[token * args->mask_stride])
            row = COLO_TOPK_SKIP;
        else
            for (int64_t i = 0; i < args->k && !args->topk; i++) {
                int64_t id = args->ids[token * args->id_stride + i];
                if (id == args->ignore_index)
                    continue;
                invalid += !is_legal(args, id);
                if (!is_legal(args, id))
                    row = -1;
                else if (row == COLO_TOPK_SKIP)
                    row = id;
            }
        args->rows[token] = row;
    }
    if (args->count && args->out.n_invalid)
        *args->out.n_invalid = invalid;
    return COLO_OK;
}

/* What is compared: rises with x. */
static double key_of(const struct colo_topk_args *args, double z)
{
    return args->base.factor > 0 ? z : args->base.factor < 0 ? -z : 0;
}

static double logit(const struct colo_topk_args *args, int64_t token, int64_t j)
{
    return colo_scalar_get(args->base.dtype, args->base.logits, token * args->base.row_stride + j);
}

static void shard_topk(const struct colo_topk_args *args, int64_t token, void *pz, int64_t *pid)
{
    double key[COLO_TOPK_MAX];
    int64_t column[COLO_TOPK_MAX], n = 0;
    for (int64_t j = 0; j < args->base.true_columns; j++) {
        double v = key_of(args, logit(args, token, j));
        if (n == args->k && !(v > key[n - 1]))
            continue;
        int64_t i = n < args->k ? n++ : n - 1;
        for (; i > 0 && v > key[i - 1]; i--) {
            key[i] = key[i - 1];
            column[i] = column[i - 1];
        }
        key[i] = v;
        column[i] = j;
    }
    for (int64_t i = 0; i < args->k; i++) {
        colo_scalar_put(args->base.stat_dtype, pz, token * args->k + i,
                        i < n ? logit(args, token, column[i]) : 0);
        pid[token * args->k + i] = i < n ? args->base.config.logits.vocab_start + column[i] : -1;
    }
}

colo_status_t colo_host_topk_local(const struct colo_topk_args *args, colo_stream_t stream)
{
    const int64_t start = args->base.config.logits.vocab_start;
    unsigned char *block = colo_logprob_block_of(&args->base, args->base.rank);
    colo_status_t st = colo_host_logprob_stats(&args->base, stream);
    if (st < 0)
        return st;
    for (int64_t token = 0; token < args->base.tokens; token++) {
        const bool skip = args->rows[token] == COLO_TOPK_SKIP;
        if (args->topk && !skip) {
            shard_topk(args, token, block + args->pz, (int64_t *)(block + args->pid));
            continue;
        }
        for (int64_t i = 0; i < args->k; i++) {
            int64_t j = skip || args->topk ? -1 : args->ids[token * args->id_stride + i];
            j = j >= start && j - start < args->base.true_columns ? j - start : -1;
            colo_scalar_put(args->base.stat_dtype, block + args->pz, token * args->k + i,
                            j >= 0 ? logit(args, token, j) : 0);
            if (args->topk)
                ((int64_t *)(block + args->pid))[token * args->k + i] = -1;
        }
    }
    return COLO_OK;
}

static int ascending(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static double x_of(const struct colo_topk_args *args, double z, double cold)
{
    return colo_scalar_x(args->base.dtype, z, args->base.factor * cold, args->base.cap * cold);
}

/* Of a row's columns that are not at ids */
static void rest_of(const struct colo_topk_args *args, int64_t token, double *m, double *s)
{
    const double cold = colo_logprob_coldness(&args->base, token);
    int64_t picks[COLO_TOPK_MAX + 1], n = 0;
    *m = -INFINITY;
    *s = 0;
    for (int64_t i = 0; i < args->k; i++) {
        const int64_t id = args->ids[token * args->id_stride + i],
                      j = id - args->base.config.logits.vocab_start;
        if (id != args->ignore_index && j >= 0 && j < args->base.true_columns)
            picks[n++] = j;
    }
    qsort(picks, (size_t)n, sizeof *picks, ascending);
    picks[n] = -1;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t j = 0, i = 0; j < args->base.true_columns; j++) {
            if (i < n && picks[i] == j) {
                i++;
                if (i < n && picks[i] == j)
                    *s = NAN;
                while (i < n && picks[i] == j)
                    i++;
                continue;
            }
            const double x = x_of(args, logit(args, token, j), cold);
            if (pass == 0)
                *m = fmax(*m, colo_scalar_round(args->base.stat_dtype, x));
            else if (x > -INFINITY)
                *s += exp(x - *m);
        }
}

colo_status_t colo_host_topk_rest(const struct colo_topk_args *args, colo_stream_t stream)
{
    unsigned char *block = colo_logprob_block_of(&args->base, args->base.rank);
    for (int64_t token = 0; token < args->base.tokens; token++) {
        double m = -INFINITY, s = 0;
        if (args->rows[token] != COLO_TOPK_SKIP)
            rest_of(args, token, &m, &s);
        colo_scalar_put(args->base.stat_dtype, block + args->tm, token, m);
        colo_scalar_put(args->base.stat_dtype, block + args->ts, token, s);
    }
    return COLO_OK;
}

colo_status_t colo_host_topk_tail(const struct colo_topk_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++)
        colo_topk_tail_token(args, token);
    return COLO_OK;
}

static double candidate(const struct colo_topk_args *args, int32_t r, int64_t index)
{
    return colo_scalar_get(args->base.stat_dtype, colo_logprob_block_of(&args->base, r) + args->pz,
                           index);
}

/* The rank whose block owns a legal @id. */
static int32_t rank_of(const struct colo_topk_args *args, int64_t id)
{
    for (int32_t r = 0; r < args->base.ranks; r++) {
        const colo_logprob_header_t *header =
            (const colo_logprob_header_t *)colo_logprob_block_of(&args->base, r);
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
static int64_t count_before(const struct colo_topk_args *args, int32_t r, int64_t token, double key,
                            int64_t id)
{
    const int64_t *ids =
        (const int64_t *)(colo_logprob_block_of(&args->base, r) + args->pid) + token * args->k;
    int64_t lo = 0, hi = args->k;
    COLO_SEARCH(lo, hi, i,
                ids[i] >= 0 && comes_before(key_of(args, candidate(args, r, token * args->k + i)),
                                            ids[i], key, id))
    return lo;
}

/* @id -1: no such column, NaN; COLO_TOPK_SKIP: nothing was asked for, 0 */
static void emit(const struct colo_topk_args *args, int64_t token, int64_t i, int64_t id, double z)
{
    const int64_t index = token * args->k + i;
    double down = 0, logp = id == COLO_TOPK_SKIP ? 0 : NAN;
    if (id >= 0) {
        down = x_of(args, z, colo_logprob_coldness(&args->base, token)) - args->base.saved[token];
        logp = colo_stat_at_most_0(down - args->base.saved[args->base.tokens + token]);
    }
    args->down[index] = down;
    args->saved_ids[index] = id < 0 ? -1 : id;
    if (args->out.logp)
        colo_scalar_put(args->base.stat_dtype, args->out.logp, index, logp);
    if (args->out.ids)
        args->out.ids[index] = id < 0 ? -1 : id;
    if (args->topk && i == 0 && id >= 0)
        args->rows[token] = id;
}

static void merge_topk(const struct colo_topk_args *args, int64_t token)
{
    for (int32_t r = 0; r < args->base.ranks; r++) {
        const int64_t *ids =
            (const int64_t *)(colo_logprob_block_of(&args->base, r) + args->pid) + token * args->k;
        for (int64_t i = 0; i < args->k && ids[i] >= 0; i++) {
            const double z = candidate(args, r, token * args->k + i);
            int64_t before = 0;
            for (int32_t q = 0; q < args->base.ranks && before < args->k; q++)
                before += count_before(args, q, token, key_of(args, z), ids[i]);
            if (before >= args->k)
                break; /* so will the rest of this rank's */
            emit(args, token, before, ids[i], z);
        }
    }
}

colo_status_t colo_host_topk_merge(const struct colo_topk_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++) {
        const bool skip = args->rows[token] == COLO_TOPK_SKIP;
        if (args->topk && !skip && !isnan(args->base.saved[token])) {
            merge_topk(args, token);
            continue;
        }
        for (int64_t i = 0; i < args->k; i++) {
            int64_t id = skip || args->topk ? -1 : args->ids[token * args->id_stride + i];
            if (skip || (!args->topk && id == args->ignore_index))
                emit(args, token, i, COLO_TOPK_SKIP, 0);
            else if (is_legal(args, id))
                emit(args, token, i, id, candidate(args, rank_of(args, id), token * args->k + i));
            else
                emit(args, token, i, -1, 0);
        }
    }
    return COLO_OK;
}

/* 0 where a pick has none */
static double upstream(const struct colo_topk_args *args, int64_t index)
{
    return args->saved_ids[index] < 0 ? 0
                                      : colo_scalar_get(args->base.stat_dtype, args->d_logp, index);
}

colo_status_t colo_host_topk_sum(const struct colo_topk_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++) {
        double sum = 0;
        for (int64_t i = 0; i < args->k; i++)
            sum += upstream(args, token * args->k + i);
        colo_topk_sum_token(args, token, sum);
    }
    return COLO_OK;
}

colo_status_t colo_host_topk_fix(const struct colo_topk_args *args, colo_stream_t stream)
{
    const int64_t rows = args->base.tokens, start = args->base.config.logits.vocab_start;
    for (int64_t token = 0; token < rows; token++) {
        const double cold = colo_logprob_saved_coldness(&args->base, token),
                     cap = args->base.cap * cold, m = args->base.saved[token],
                     log_sum = args->tail ? args->log_sum[token] : args->base.saved[rows + token];
        if (args->rows[token] < 0 || isnan(m))
            continue; /* zeros or NaN, already there */
        for (int64_t i = 0; i < args->k; i++) {
            const int64_t index = token * args->k + i, id = args->saved_ids[index], j = id - start;
            if (id < start || j >= args->base.true_columns)
                continue;
            double g = 0;
            bool first = true;
            for (int64_t n = 0; n < args->k; n++) {
                g += args->saved_ids[token * args->k + n] == id
                         ? upstream(args, token * args->k + n)
                         : 0;
                first = first && (n >= i || args->saved_ids[token * args->k + n] != id);
            }
            if (!first)
                continue;
            double dx = g - exp(args->down[index] - log_sum) * args->all[token];
            if (cap > 0) {
                double th = (args->down[index] + m) / cap;
                dx *= 1 - th * th;
            }
            colo_scalar_put(args->base.dtype, args->base.d_logits,
                            token * args->base.d_row_stride + j, dx * args->base.factor * cold);
        }
    }
    return COLO_OK;
}
