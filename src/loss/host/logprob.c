/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.c - the kernels of args.h in plain C: what the CPU build runs.
 *
 * A row is read once, in tiles that are decoded to double, so the same loop serves the four dtypes
 * and x = cap tanh(factor z / cap) is made in double whatever the logits are. The running maximum
 * starts at -inf (0 would underflow every exp of a row below -88) and sums are rescaled when it
 * grows. Sums run in double: per tile first, then over tiles, so their rounding error grows with
 * the tile and the number of tiles rather than with Vl; for f32 logits this costs nothing next to
 * exp. What goes into the block is rounded to the stat dtype once.
 *
 * (-inf) - (-inf) and 0 * inf are NaN, and both turn up in legal input: an all -inf tile or shard,
 * a -inf logit, two finite f64 logits whose difference overflows. Each is guarded where it would
 * arise. NaN itself is never left to fmax or a comparison: it is looked for.
 *
 * Argument checks, the gather and the choice of kernels are in logprob.c.
 */
#include "loss/logprob-merge.h"

#include "core/list.h"
#include "loss/loss.h"
#include "loss/scalar.h"

#include <math.h>
#include <string.h>

enum { TILE = 256 };

/* x of columns [j, j + n) of token t; what rounds to an infinity in the stat dtype is one. */
static void load_x(const struct colo_logprob_args *args, double coldness, int64_t token, int64_t j,
                   int n, double *x)
{
    int64_t index = (token - args->row_lo) * args->row_stride + j;
    COLO_FOR_FLOAT(args->dtype, colo_scalar_get_each, args->logits, index, x, n)
    for (int i = 0; i < n; i++)
        x[i] = colo_scalar_x(args->dtype, x[i], args->factor * coldness, args->cap * coldness);
}

/* The columns of a row that are in its softmax and on this shard, ascending. */
struct columns {
    int64_t next; /* without a support: they are [next, end) */
    int64_t end;
    bool listed;                /* with one; an empty list may have no memory: */
    const int64_t *id, *behind; /* those of the list that are not less than next */
    int64_t start, target;      /* of the shard; the target's column, -1 when it is none or past */
};

static struct columns columns_of(const struct colo_logprob_args *args, int64_t token,
                                 int64_t target)
{
    const struct colo_support_lists *s = &args->support;
    struct columns columns = {.end = args->true_columns, .target = -1};
    if (!s->begin)
        return columns;
    token = colo_logprob_token_of(args, token);
    int64_t lo = s->begin[token * s->begin_stride], hi = s->end[token * s->end_stride];
    columns.start = args->config.logits.vocab_start;
    columns.listed = true;
    columns.target = target < args->true_columns ? target : -1;
    if (lo == hi)
        return columns;
    columns.behind = s->ids + hi;
    COLO_SEARCH(lo, hi, i, s->ids[i] < columns.start) /* those before the shard are passed over */
    columns.id = s->ids + lo;
    return columns;
}

/* The next of a support; -1: none is left. */
static int64_t next_column(struct columns *columns)
{
    int64_t j = columns->id < columns->behind && *columns->id - columns->start < columns->end
                    ? *columns->id - columns->start
                    : INT64_MAX;
    j = columns->target >= 0 && columns->target < j ? columns->target : j;
    while (columns->id < columns->behind && *columns->id - columns->start == j)
        columns->id++;
    columns->target = columns->target == j ? -1 : columns->target;
    return j == INT64_MAX ? -1 : j;
}

/* x of the next columns, TILE at most; how many. column [TILE]: which, of a support; else the first
 * of a run. */
static int next_tile(const struct colo_logprob_args *args, double coldness, int64_t token,
                     struct columns *columns, double *x, int64_t *column)
{
    int n = 0;
    if (!columns->listed) {
        n = columns->end - columns->next < TILE ? (int)(columns->end - columns->next) : TILE;
        *column = columns->next;
        columns->next += n;
        load_x(args, coldness, token, *column, n, x);
        return n;
    }
    while (n < TILE && (column[n] = next_column(columns)) >= 0) {
        load_x(args, coldness, token, column[n], 1, x + n);
        n++;
    }
    return n;
}

/* What one shard knows about one row. */
struct row {
    double m, s, u, d, xt, w, q;
    int64_t arg;
};

/* The class weight of column @j of the logits; only where there are some. */
static double weight_of(const struct colo_logprob_args *args, int64_t j)
{
    const int64_t i = args->config.logits.vocab_start - args->class_start + j;
    return args->stat_dtype == COLO_F64 ? ((const double *)args->class_weight)[i]
                                        : (double)((const float *)args->class_weight)[i];
}

/* Of w (x - m) of a tile; w to *seen, and what -inf adds to *off. */
static double weighted_sum(const struct colo_logprob_args *args, int64_t column, int n,
                           const double *x, double m, double *seen, double *off)
{
    double d = 0;
    for (int i = 0; i < n; i++) {
        const double w = weight_of(args, column + i);
        *seen += w;
        if (w != 0 && x[i] == -INFINITY)
            *off += w * x[i];
        else if (w != 0)
            d += w * (x[i] - m);
    }
    return d;
}

/* @target: its column, or -1; @none: it is no token, and its x counts as the largest one */
static struct row row_stats(const struct colo_logprob_args *args, int64_t token, int64_t target,
                            bool none)
{
    const colo_dtype_t stat = args->stat_dtype;
    const bool want_u = args->block.u >= 0, want_d = args->block.d >= 0;
    struct row row = {.m = -INFINITY, .xt = -INFINITY, .arg = -1};
    const bool weighs = args->block.w >= 0; /* then there is no support */
    double x[TILE], xt = -INFINITY;
    double seen = 0, off = 0; /* w of the columns in r.d; what -inf adds to it */
    bool gone = false;        /* some x is -inf */
    int64_t column[TILE];
    struct columns left = columns_of(args, token, target);
    const double coldness = colo_logprob_coldness(args, token);

    for (int n; (n = next_tile(args, coldness, token, &left, x, column)) > 0;) {
        double top = -INFINITY;
        int arg = -1;
        for (int i = 0; i < n; i++) {
            double v = colo_scalar_round(stat, x[i]);
            if (!(v < INFINITY)) /* +inf or NaN: nothing of this row can be said */
                return (struct row){.m = NAN,
                                    .s = NAN,
                                    .u = NAN,
                                    .d = NAN,
                                    .xt = NAN,
                                    .w = NAN,
                                    .q = NAN,
                                    .arg = -1};
            if (v > top) {
                top = v;
                arg = i;
            }
        }
        if (!left.listed && target >= *column && target < *column + n)
            xt = x[target - *column];
        for (int i = 0; i < n && left.listed; i++)
            xt = column[i] == target ? x[i] : xt;
        for (int i = 0; i < n && none; i++)
            xt = x[i] > xt ? x[i] : xt;
        if (top > row.m) {
            if (row.m > -INFINITY) {
                double down = row.m - top, c = exp(down);
                row.u = c > 0 ? c * (row.u + down * row.s) : 0;
                row.s *= c;
                row.q *= c * c;
                row.d += seen * down;
            }
            row.m = top;
            row.arg = args->config.logits.vocab_start + (left.listed ? column[arg] : *column + arg);
        }
        double s = 0, u = 0, d = 0, q = 0;
        for (int i = 0; i < n; i++) {
            if (x[i] == -INFINITY) { /* also all that a tile has while m still is -inf */
                gone = true;
                continue;
            }
            double dx = x[i] - row.m, e = exp(dx);
            s += e;
            d += dx;
            q += e * e;
            if (want_u && e > 0)
                u += e * dx;
        }
        row.s += s;
        row.u += u;
        row.q += q;
        row.d += weighs ? weighted_sum(args, *column, n, x, row.m, &seen, &off) : d;
        seen += weighs ? 0 : n;
    }
    row.d = !want_d ? 0 : off != 0 ? off : gone && !weighs ? -INFINITY : row.d;
    row.w = seen;
    if (xt > -INFINITY)
        row.xt = xt - row.m;
    return row;
}

static void shard_stats(const struct colo_logprob_args *args)
{
    unsigned char *block = args->blocks + args->rank * args->block.bytes;
    const colo_logprob_block_t *offsets = &args->block;
    if (args->lo == args->block_lo)
        memcpy(block, &args->header, sizeof args->header);
    for (int64_t token = args->lo; token < args->hi; token++) {
        int64_t target = args->targets[token * args->target_stride], k = token - args->block_lo;
        struct row row = {.m = -INFINITY, .xt = -INFINITY, .arg = -1};
        if (target != args->config.ignore_index) {
            bool legal =
                target >= args->config.logits.vocab_start && target < args->config.logits.vocab;
            row = row_stats(args, token, legal ? target - args->config.logits.vocab_start : -1,
                            args->config.lenient_targets &&
                                (target < 0 || target >= args->config.logits.vocab));
        }
        colo_scalar_put(args->stat_dtype, block + offsets->m, k, row.m);
        colo_scalar_put(args->stat_dtype, block + offsets->s, k, row.s);
        colo_scalar_put(args->stat_dtype, block + offsets->xt, k, row.xt);
        if (offsets->u >= 0)
            colo_scalar_put(args->stat_dtype, block + offsets->u, k, row.u);
        if (offsets->d >= 0)
            colo_scalar_put(args->stat_dtype, block + offsets->d, k, row.d);
        if (offsets->arg >= 0)
            ((int64_t *)(block + offsets->arg))[k] = row.arg;
        if (offsets->w >= 0)
            colo_scalar_put(args->stat_dtype, block + offsets->w, k, row.w);
        if (offsets->q >= 0)
            colo_scalar_put(args->stat_dtype, block + offsets->q, k, row.q);
        if (offsets->wt >= 0) {
            const int64_t j = target - args->config.logits.vocab_start;
            const bool own = target != args->config.ignore_index &&
                             target >= args->config.logits.vocab_start && j < args->true_columns;
            colo_scalar_put(args->stat_dtype, block + offsets->wt, k, own ? weight_of(args, j) : 0);
        }
    }
}

colo_status_t colo_host_logprob_stats(const struct colo_logprob_args *args, colo_stream_t stream)
{
    if (args->config.segment == 0)
        shard_stats(args);
    for (int32_t i = 0; args->config.segment > 0 && i < args->segments; i++) {
        const struct colo_logprob_args one =
            colo_logprob_segment(args, (int64_t)colo_dtype_size(args->dtype), i);
        shard_stats(&one);
    }
    return COLO_OK;
}

colo_status_t colo_host_logprob_merge(const struct colo_logprob_args *args, colo_stream_t stream)
{
    int64_t n_valid = 0, n_invalid = 0;
    for (int64_t token = args->lo; token < args->hi; token++) {
        bool valid, invalid;
        colo_logprob_merge_token(args, token, &valid, &invalid);
        n_valid += valid;
        n_invalid += invalid;
    }
    if (args->out.n_valid)
        *args->out.n_valid = (args->lo ? *args->out.n_valid : 0) + n_valid;
    if (args->out.n_invalid)
        *args->out.n_invalid = (args->lo ? *args->out.n_invalid : 0) + n_invalid;
    return COLO_OK;
}

static void store_dz(const struct colo_logprob_args *args, int64_t token, int64_t j, int n,
                     const double *dz)
{
    COLO_FOR_FLOAT(args->d_dtype, colo_scalar_put_each, args->d_logits,
                   (token - args->row_lo) * args->d_row_stride + j, dz, n)
}

/* Columns [lo, hi) of a row all get @value: padding, ignored tokens, NaN rows. */
static void fill_dz(const struct colo_logprob_args *args, int64_t token, int64_t lo, int64_t hi,
                    double value)
{
    double dz[TILE];
    for (int i = 0; i < TILE; i++)
        dz[i] = value;
    for (int64_t j = lo; j < hi; j += TILE)
        store_dz(args, token, j, hi - j < TILE ? (int)(hi - j) : TILE, dz);
}

static double upstream(const struct colo_logprob_args *args, const void *g, int64_t token)
{
    return g ? colo_scalar_get(args->stat_dtype, g, token) : 0;
}

/* dx_j = p_j (a + b (x_j - M)) + c [j = t] + d w_j, then through softcap, scale and temperature; of
 * columns [lo, hi) */
static void row_grad(const struct colo_logprob_args *args, int64_t token, int64_t target,
                     int64_t lo, int64_t hi)
{
    const colo_logprob_config_t *cfg = &args->config;
    const double m = args->saved[token], log_sum = args->saved[args->tokens + token],
                 h = args->saved[2 * args->tokens + token],
                 coldness = colo_logprob_saved_coldness(args, token), cap = args->cap * coldness;
    const double g_p = upstream(args, args->upstream.d_logp, token),
                 g_h = upstream(args, args->upstream.d_entropy, token),
                 g_l = upstream(args, args->upstream.d_loss, token),
                 g_s = upstream(args, args->upstream.d_lse, token);
    const bool weighs = cfg->has_class_weight;
    const double e = args->smoothing, w_t = weighs ? args->saved[3 * args->tokens + token] : 1,
                 z = 2 * cfg->z_loss * (m + log_sum),
                 p_l =
                     weighs ? w_t * (1 - e + z) + e * args->saved[4 * args->tokens + token] : 1 + z;
    const double a = -g_p + g_l * p_l + g_h * (log_sum - h) + g_s, b = -g_h,
                 c = g_p - w_t * (1 - e) * g_l,
                 d = -e * g_l / (double)(args->own ? args->own : cfg->logits.vocab);
    double x[TILE];
    for (int64_t j = lo; j < hi; j += TILE) {
        int n = hi - j < TILE ? (int)(hi - j) : TILE;
        load_x(args, coldness, token, j, n, x);
        for (int i = 0; i < n; i++) {
            double down = x[i] - m, prob = exp(down - log_sum),
                   dx = weighs && d != 0 ? d * weight_of(args, j + i) : d;
            if (prob > 0) /* also keeps 0 * inf away where x is -inf */
                dx += prob * (a + b * down);
            if (j + i == target)
                dx += c;
            if (cap > 0) {
                double th = x[i] / cap;
                dx *= 1 - th * th;
            }
            x[i] = dx * (args->factor * coldness);
        }
        store_dz(args, token, j, n, x);
    }
}

/* The same of a support's columns, ascending, for the gradient may be written over the logits. */
static void support_grad(const struct colo_logprob_args *args, int64_t token, int64_t target)
{
    struct columns left = columns_of(args, token, target);
    int64_t done = 0;
    for (int64_t j; (j = next_column(&left)) >= 0; done = j + 1) {
        fill_dz(args, token, done, j, 0);
        row_grad(args, token, target, j, j + 1);
    }
    fill_dz(args, token, done, args->true_columns, 0);
}

colo_status_t colo_host_logprob_grad(const struct colo_logprob_args *args, colo_stream_t stream)
{
    const colo_logprob_config_t *c = &args->config;
    for (int64_t token = args->lo; token < args->hi; token++) {
        int64_t target = args->targets[token * args->target_stride];
        bool legal = target >= 0 && target < c->logits.vocab;
        bool lost =
            !legal && !c->lenient_targets && (args->upstream.d_logp || args->upstream.d_loss);
        if (target == c->ignore_index)
            fill_dz(args, token, 0, args->true_columns, 0);
        else if (isnan(args->saved[token]) || lost)
            fill_dz(args, token, 0, args->true_columns, NAN);
        else if (args->support.begin)
            support_grad(args, token, legal ? target - c->logits.vocab_start : -1);
        else
            row_grad(args, token, legal ? target - c->logits.vocab_start : -1, 0,
                     args->true_columns);
        fill_dz(args, token, args->true_columns, args->columns, 0);
    }
    return COLO_OK;
}
