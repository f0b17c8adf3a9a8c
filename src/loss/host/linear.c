/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear.c - rows of linear.h in plain C: what the CPU build runs.
 */
#include "loss/linear/linear.h"

#include "loss/loss.h"
#include "loss/scalar.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { TILE = 64 };

/* ---- rows ---- */

colo_status_t colo_host_rows_compact(const struct colo_linear_rows *r, colo_stream_t stream)
{
    int64_t n = 0, counts[COLO_LINEAR_COUNTS] = {0};
    for (int64_t token = 0; token < r->tokens; token++) {
        const bool wanted = !r->mask || r->mask[token * r->mask_stride];
        int64_t target = r->targets ? r->targets[token * r->target_stride]
                         : wanted   ? 1
                                    : r->ignore_index;
        r->row_of[token] = -1;
        if (target == r->ignore_index)
            continue;
        bool fits = n < r->rows, legal = target >= 0 && target < r->vocab;
        counts[COLO_LINEAR_COUNTED]++;
        counts[legal && fits ? COLO_LINEAR_VALID : COLO_LINEAR_INVALID]++;
        r->row_of[token] = fits ? n : -2;
        if (fits) {
            r->token_of[n] = token;
            r->row_targets[n++] = target;
        }
    }
    for (; n < r->rows; n++) {
        r->token_of[n] = -1;
        r->row_targets[n] = r->ignore_index;
    }
    memcpy(r->counts, counts, sizeof counts);
    return COLO_OK;
}

static double upstream_of(const struct colo_linear_upstream_rows *up, int k, int64_t token)
{
    if (token < 0)
        return 0;
    return up->factor[k] * (up->from[k] ? colo_scalar_get(up->dtype, up->from[k], token) : 1);
}

static double coldness_of(const struct colo_linear_upstream_rows *up, int64_t row)
{
    const int64_t token = up->rows->token_of[row];
    return up->row_coldness                ? up->row_coldness[row]
           : up->temperature && token >= 0 ? 1 / (double)up->temperature[token]
                                           : 1;
}

colo_status_t colo_host_rows_upstream(const struct colo_linear_upstream_rows *up,
                                      colo_stream_t stream)
{
    const struct colo_linear_rows *r = up->rows;
    const int64_t valid = r->counts[COLO_LINEAR_VALID];
    const double mean = !up->mean ? 1 : valid ? 1 / (double)valid : 0;
    double by = 1;
    if (up->scale) {
        double most = 0;
        for (int k = 0; k < COLO_LINEAR_UPS; k++)
            for (int64_t i = 0; up->to[k] && i < r->rows; i++) {
                const double v =
                    fabs(upstream_of(up, k, r->token_of[i]) * mean * coldness_of(up, i));
                most = v > most && isfinite(v) ? v : most;
            }
        /* a number of fp32 that has a reciprocal */
        most = most < FLT_MIN ? 1 : most > FLT_MAX ? FLT_MAX : (double)(float)most;
        most = up->exact ? ldexp(1, ilogb(most)) : most;
        up->scale[0] = (float)(most / up->lift);
        up->scale[1] = 0;
        up->scale[2] = 1;
        by = up->lift / most;
    }
    for (int k = 0; k < COLO_LINEAR_UPS; k++)
        for (int64_t i = 0; up->to[k] && i < r->rows; i++)
            colo_scalar_put(up->dtype, up->to[k], i,
                            upstream_of(up, k, r->token_of[i]) * mean * by);
    return COLO_OK;
}

static void scatter_one(const struct colo_linear_scatter *scatter, const void *from, void *to)
{
    for (int64_t token = 0; to && token < scatter->rows->tokens; token++) {
        int64_t row = scatter->rows->row_of[token];
        colo_scalar_put(scatter->dtype, to, token,
                        row >= 0    ? colo_scalar_get(scatter->dtype, from, row)
                        : row == -1 ? 0
                                    : (double)NAN);
    }
}

colo_status_t colo_host_rows_factor(const struct colo_linear_factor *p, colo_stream_t stream)
{
    p->to[0] = (float)((p->from ? p->from[0] : 1.0) * p->factor * (p->by ? p->by[0] : 1.0));
    p->to[1] = 0;
    p->to[2] = 1;
    return COLO_OK;
}

colo_status_t colo_host_rows_scatter(const struct colo_linear_scatter *scatter,
                                     colo_stream_t stream)
{
    scatter_one(scatter, scatter->from.logp, scatter->to.logp);
    scatter_one(scatter, scatter->from.entropy, scatter->to.entropy);
    scatter_one(scatter, scatter->from.loss, scatter->to.loss);
    scatter_one(scatter, scatter->from.weight, scatter->to.weight);
    scatter_one(scatter, scatter->from.lse, scatter->to.lse);
    scatter_one(scatter, scatter->from.sum_p2, scatter->to.sum_p2);
    scatter_one(scatter, scatter->from.mean_logits, scatter->to.mean_logits);
    for (int64_t token = 0; token < scatter->rows->tokens; token++) {
        const int64_t row = scatter->rows->row_of[token];
        if (scatter->to.correct)
            scatter->to.correct[token] = row >= 0 ? scatter->from.correct[row] : 0;
        if (scatter->to.argmax)
            scatter->to.argmax[token] = row >= 0 ? scatter->from.argmax[row] : -1;
    }
    if (scatter->to.n_valid)
        *scatter->to.n_valid = scatter->rows->counts[COLO_LINEAR_VALID];
    if (scatter->to.n_invalid)
        *scatter->to.n_invalid = scatter->rows->counts[COLO_LINEAR_INVALID];
    return COLO_OK;
}

static char *token_at(const struct colo_linear_move *move, int64_t token)
{
    return (char *)move->tokens.data +
           (size_t)(token * move->tokens.stride) * colo_dtype_size(move->tokens.dtype);
}

colo_status_t colo_host_rows_gather(const struct colo_linear_move *move, colo_stream_t stream)
{
    const size_t bytes = (size_t)move->hidden * colo_dtype_size(move->tokens.dtype);
    char *row = move->packed;
    for (int64_t i = move->lo; i < move->hi; i++, row += bytes) {
        const int64_t token = move->rows->token_of[i];
        if (token < 0)
            memset(row, 0, bytes);
        else
            memcpy(row, token_at(move, token), bytes);
    }
    return COLO_OK;
}

colo_status_t colo_host_rows_restore(const struct colo_linear_move *move, colo_stream_t stream)
{
    const size_t bytes = (size_t)move->hidden * colo_dtype_size(move->tokens.dtype);
    const char *row = move->packed;
    for (int64_t i = move->lo; i < move->hi; i++, row += bytes)
        if (move->rows->token_of[i] >= 0)
            memcpy(token_at(move, move->rows->token_of[i]), row, bytes);
    return COLO_OK;
}

colo_status_t colo_host_rows_clear(const struct colo_linear_move *move, colo_stream_t stream)
{
    const struct colo_linear_rows *r = move->rows;
    for (int64_t token = 0; token < r->tokens; token++)
        for (int64_t j = 0; r->row_of[token] < 0 && j < move->hidden; j++)
            colo_scalar_put(move->tokens.dtype, token_at(move, token), j,
                            r->row_of[token] == -1 ? 0 : (double)NAN);
    return COLO_OK;
}

colo_status_t colo_host_rows_sum(const struct colo_linear_sum *p, colo_stream_t stream)
{
    const struct colo_linear_matrix *z = &p->z;
    const double by = p->scale ? (double)*p->scale : 1;
    const colo_dtype_t dtype = z->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    double sum[TILE];
    for (int64_t j = 0; j < p->columns; j += TILE) {
        int64_t n = p->columns - j < TILE ? p->columns - j : TILE;
        memset(sum, 0, sizeof sum);
        for (int64_t i = 0; i < p->rows; i++)
            for (int64_t k = 0; k < n; k++)
                sum[k] += colo_scalar_get(z->dtype, z->data, i * z->stride + j + k);
        for (int64_t k = 0; k < n; k++) {
            int64_t index = (j + k) * p->to_stride;
            colo_scalar_put(dtype, p->to, index,
                            (p->beta != 0 ? colo_scalar_get(dtype, p->to, index) : 0) +
                                by * sum[k]);
        }
    }
    return COLO_OK;
}

colo_status_t colo_host_rows_convert(const struct colo_linear_convert *p, colo_stream_t stream)
{
    for (int64_t i = 0; i < p->rows; i++)
        for (int64_t j = 0; j < p->columns; j++)
            colo_scalar_put(p->to.dtype, p->to.data, i * p->to.stride + j,
                            colo_scalar_get(p->from.dtype, p->from.data, i * p->from.stride + j));
    return COLO_OK;
}
