/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear-host.c - the tables of linear.h in plain C: what the CPU build runs.
 *
 * Products are blocked loops of our own, not a BLAS: the library needs none, and an element's sum
 * has one order whatever block it falls into, so that a token's logits do not depend on the tokens
 * beside it. A block of C is summed in fp64 over blocks of K, each of which is summed in fp32 (fp64
 * for f64 operands) from operands packed as such: the rounding error grows with the block of K, not
 * with K. That is several times slower than a good BLAS (bench/results/torch-cpu.md), and meant for
 * tests and small models.
 *
 * There is no second stream on the host: whatever is enqueued has happened.
 */
#include "loss/linear.h"

#include "core/half.h"

#include <math.h>
#include <string.h>

/* ---- elements ---- */

static double load(const void *base, colo_dtype_t dtype, int64_t i)
{
    switch (dtype) {
    case COLO_F64:
        return ((const double *)base)[i];
    case COLO_BF16:
        return (double)colo_bf16_to_f32(((const uint16_t *)base)[i]);
    case COLO_F16:
        return (double)colo_f16_to_f32(((const uint16_t *)base)[i]);
    default:
        return (double)((const float *)base)[i];
    }
}

static void store(void *base, colo_dtype_t dtype, int64_t i, double v)
{
    switch (dtype) {
    case COLO_F64:
        ((double *)base)[i] = v;
        break;
    case COLO_BF16:
        ((uint16_t *)base)[i] = colo_f32_to_bf16((float)v);
        break;
    case COLO_F16:
        ((uint16_t *)base)[i] = colo_f32_to_f16((float)v);
        break;
    default:
        ((float *)base)[i] = (float)v;
    }
}

/* ---- products: C [m, n] = sum over k of A(i, k) B(k, j) ---- */

enum { BLOCK = 64, DEPTH = 128, TALL = 4, WIDE = 8 };

/* What the GEMM workspace holds. */
struct room {
    double sum[BLOCK * BLOCK];
    union {
        float f32[DEPTH * BLOCK];
        double f64[DEPTH * BLOCK];
    } a, b; /* [k][i], [k][j]; zeros outside the matrix */
};

struct operand {
    const void *data;
    colo_dtype_t dtype;
    int64_t across, along; /* elements from one i (or j) to the next, from one k to the next */
};

/* @n of BLOCK lines from @at, @depth of DEPTH elements from @from */
static void pack_panel(const struct operand *x, int64_t at, int64_t n, int64_t from, int64_t depth,
                       bool wide, void *to)
{
    for (int64_t k = 0; k < depth; k++)
        for (int64_t i = 0; i < BLOCK; i++) {
            double v = 0;
            if (i < n)
                v = load(x->data, x->dtype, (at + i) * x->across + (from + k) * x->along);
            if (wide)
                ((double *)to)[k * BLOCK + i] = v;
            else
                ((float *)to)[k * BLOCK + i] = (float)v;
        }
}

#define MULTIPLY(name, real)                                                        \
    static void name(const real *a, const real *b, int64_t depth, double *sum)      \
    {                                                                               \
        for (int i = 0; i < BLOCK; i += TALL)                                       \
            for (int j = 0; j < BLOCK; j += WIDE) {                                 \
                real c[TALL][WIDE] = {{0}};                                         \
                for (int64_t k = 0; k < depth; k++)                                 \
                    for (int y = 0; y < TALL; y++)                                  \
                        for (int x = 0; x < WIDE; x++)                              \
                            c[y][x] += a[k * BLOCK + i + y] * b[k * BLOCK + j + x]; \
                for (int y = 0; y < TALL; y++)                                      \
                    for (int x = 0; x < WIDE; x++)                                  \
                        sum[(i + y) * BLOCK + j + x] += (double)c[y][x];            \
            }                                                                       \
    }
MULTIPLY(multiply_f32, float)
MULTIPLY(multiply_f64, double)

struct product {
    struct operand a, b;
    int64_t m, n, k;
    const struct colo_linear_matrix *c;
    const void *bias; /* [n] of bias_dtype */
    colo_dtype_t bias_dtype;
    bool add; /* to what is in c */
    bool wide;
};

static void store_block(const struct product *p, int64_t i0, int64_t j0, const double *sum)
{
    for (int64_t i = i0; i < p->m && i < i0 + BLOCK; i++)
        for (int64_t j = j0; j < p->n && j < j0 + BLOCK; j++) {
            double v = sum[(i - i0) * BLOCK + j - j0];
            int64_t at = i * p->c->stride + j;
            if (p->bias)
                v += load(p->bias, p->bias_dtype, j);
            if (p->add)
                v += load(p->c->data, p->c->dtype, at);
            store(p->c->data, p->c->dtype, at, v);
        }
}

static void run(const struct product *p, struct room *room)
{
    for (int64_t i = 0; i < p->m; i += BLOCK)
        for (int64_t j = 0; j < p->n; j += BLOCK) {
            int64_t tall = p->m - i < BLOCK ? p->m - i : BLOCK;
            int64_t wide = p->n - j < BLOCK ? p->n - j : BLOCK;
            memset(room->sum, 0, sizeof room->sum);
            for (int64_t k = 0; k < p->k; k += DEPTH) {
                int64_t depth = p->k - k < DEPTH ? p->k - k : DEPTH;
                pack_panel(&p->a, i, tall, k, depth, p->wide, &room->a);
                pack_panel(&p->b, j, wide, k, depth, p->wide, &room->b);
                if (p->wide)
                    multiply_f64(room->a.f64, room->b.f64, depth, room->sum);
                else
                    multiply_f32(room->a.f32, room->b.f32, depth, room->sum);
            }
            store_block(p, i, j, room->sum);
        }
}

static colo_status_t product(void *made, const struct colo_linear_gemm *g, colo_stream_t stream)
{
    struct product p = {.wide = g->h.dtype == COLO_F64};
    (void)made;
    (void)stream;
    switch (g->product) {
    case COLO_LINEAR_LOGITS:
        p.a = (struct operand){g->h.data, g->h.dtype, g->h.stride, 1};
        p.b = (struct operand){g->w.data, g->w.dtype, g->w.stride, 1};
        p.m = g->rows;
        p.n = g->columns;
        p.k = g->hidden;
        p.c = &g->z;
        p.bias = g->bias;
        p.bias_dtype = g->h.dtype;
        break;
    case COLO_LINEAR_D_HIDDEN:
        p.a = (struct operand){g->z.data, g->z.dtype, g->z.stride, 1};
        p.b = (struct operand){g->w.data, g->w.dtype, 1, g->w.stride};
        p.m = g->rows;
        p.n = g->hidden;
        p.k = g->columns;
        p.c = &g->h;
        break;
    case COLO_LINEAR_D_WEIGHT:
        p.a = (struct operand){g->z.data, g->z.dtype, 1, g->z.stride};
        p.b = (struct operand){g->h.data, g->h.dtype, 1, g->h.stride};
        p.m = g->columns;
        p.n = g->hidden;
        p.k = g->rows;
        p.c = &g->w;
        p.add = g->beta != 0;
        break;
    }
    run(&p, g->workspace);
    return COLO_OK;
}

static colo_status_t create(const struct colo_linear_shape *shape, void **made)
{
    (void)shape;
    *made = NULL;
    return COLO_OK;
}

static void destroy(void *made)
{
    (void)made;
}

static int64_t workspace(const void *made)
{
    (void)made;
    return ((int64_t)sizeof(struct room) + 255) & ~INT64_C(255);
}

/* ---- rows ---- */

static colo_status_t pack(const struct colo_linear_rows *r, colo_stream_t stream)
{
    int64_t n = 0, counts[COLO_LINEAR_COUNTS] = {0};
    (void)stream;
    for (int64_t t = 0; t < r->tokens; t++) {
        int64_t target = r->targets[t * r->target_stride];
        r->row_of[t] = -1;
        if (target == r->ignore_index)
            continue;
        bool room = n < r->rows, legal = target >= 0 && target < r->vocab;
        counts[COLO_LINEAR_COUNTED]++;
        counts[legal && room ? COLO_LINEAR_VALID : COLO_LINEAR_INVALID]++;
        r->row_of[t] = room ? n : -2;
        if (room) {
            r->token_of[n] = t;
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

static colo_status_t upstream(const struct colo_linear_upstream_rows *u, colo_stream_t stream)
{
    const struct colo_linear_rows *r = u->rows;
    const int64_t valid = r->counts[COLO_LINEAR_VALID];
    const double by = !u->mean ? 1 : valid ? 1 / (double)valid : 0;
    (void)stream;
    for (int k = 0; k < 3; k++)
        for (int64_t i = 0; u->to[k] && i < r->rows; i++) {
            int64_t t = r->token_of[i];
            double v = t < 0 ? 0 : u->from[k] ? load(u->from[k], u->dtype, t) : 1;
            store(u->to[k], u->dtype, i, t < 0 ? 0 : u->factor[k] * v * by);
        }
    return COLO_OK;
}

static void spread_one(const struct colo_linear_spread *s, const void *from, void *to)
{
    for (int64_t t = 0; to && t < s->rows->tokens; t++) {
        int64_t row = s->rows->row_of[t];
        store(to, s->dtype, t, row >= 0 ? load(from, s->dtype, row) : row == -1 ? 0 : (double)NAN);
    }
}

static colo_status_t spread(const struct colo_linear_spread *s, colo_stream_t stream)
{
    (void)stream;
    spread_one(s, s->from.logp, s->to.logp);
    spread_one(s, s->from.entropy, s->to.entropy);
    spread_one(s, s->from.loss, s->to.loss);
    for (int64_t t = 0; s->to.correct && t < s->rows->tokens; t++) {
        int64_t row = s->rows->row_of[t];
        s->to.correct[t] = row >= 0 ? s->from.correct[row] : 0;
    }
    if (s->to.n_valid)
        *s->to.n_valid = s->rows->counts[COLO_LINEAR_VALID];
    if (s->to.n_invalid)
        *s->to.n_invalid = s->rows->counts[COLO_LINEAR_INVALID];
    return COLO_OK;
}

static colo_status_t take_rows(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                               int64_t hidden, void *to, const struct colo_linear_matrix *from,
                               colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(from->dtype), bytes = (size_t)hidden * elem;
    (void)stream;
    for (int64_t i = lo; i < hi; i++) {
        char *row = (char *)to + (size_t)(i - lo) * bytes;
        int64_t t = r->token_of[i];
        if (t < 0)
            memset(row, 0, bytes);
        else
            memcpy(row, (const char *)from->data + (size_t)(t * from->stride) * elem, bytes);
    }
    return COLO_OK;
}

static colo_status_t put_rows(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                              int64_t hidden, const struct colo_linear_matrix *to, const void *from,
                              colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(to->dtype), bytes = (size_t)hidden * elem;
    (void)stream;
    for (int64_t i = lo; i < hi; i++) {
        int64_t t = r->token_of[i];
        if (t >= 0)
            memcpy((char *)to->data + (size_t)(t * to->stride) * elem,
                   (const char *)from + (size_t)(i - lo) * bytes, bytes);
    }
    return COLO_OK;
}

static colo_status_t clear_rows(const struct colo_linear_rows *r, int64_t hidden,
                                const struct colo_linear_matrix *to, colo_stream_t stream)
{
    (void)stream;
    for (int64_t t = 0; t < r->tokens; t++)
        for (int64_t j = 0; r->row_of[t] < 0 && j < hidden; j++)
            store(to->data, to->dtype, t * to->stride + j, r->row_of[t] == -1 ? 0 : (double)NAN);
    return COLO_OK;
}

static colo_status_t sum_rows(const struct colo_linear_matrix *z, int64_t rows, int64_t columns,
                              void *to, int64_t to_step, double beta, colo_stream_t stream)
{
    const colo_dtype_t dtype = z->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    double sum[BLOCK];
    (void)stream;
    for (int64_t j = 0; j < columns; j += BLOCK) {
        int64_t n = columns - j < BLOCK ? columns - j : BLOCK;
        memset(sum, 0, sizeof sum);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t k = 0; k < n; k++)
                sum[k] += load(z->data, z->dtype, i * z->stride + j + k);
        for (int64_t k = 0; k < n; k++) {
            int64_t at = (j + k) * to_step;
            store(to, dtype, at, beta != 0 ? load(to, dtype, at) + sum[k] : sum[k]);
        }
    }
    return COLO_OK;
}

static colo_status_t convert(const struct colo_linear_matrix *to,
                             const struct colo_linear_matrix *from, int64_t rows, int64_t columns,
                             colo_stream_t stream)
{
    (void)stream;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++)
            store(to->data, to->dtype, i * to->stride + j,
                  load(from->data, from->dtype, i * from->stride + j));
    return COLO_OK;
}

const struct colo_linear_ops colo_host_linear = {
    .create = create,
    .destroy = destroy,
    .workspace = workspace,
    .product = product,
    .pack = pack,
    .upstream = upstream,
    .spread = spread,
    .take_rows = take_rows,
    .put_rows = put_rows,
    .clear_rows = clear_rows,
    .sum_rows = sum_rows,
    .convert = convert,
};

/* ---- lanes ---- */

static colo_status_t lane_create(int32_t events, void **lane)
{
    (void)events;
    *lane = NULL;
    return COLO_OK;
}

static colo_stream_t lane_stream(void *lane)
{
    (void)lane;
    return NULL;
}

static colo_status_t lane_event(void *lane, int32_t event, colo_stream_t on)
{
    (void)lane;
    (void)event;
    (void)on;
    return COLO_OK;
}

const struct colo_lane_ops colo_host_lanes = {
    .create = lane_create,
    .destroy = destroy,
    .stream = lane_stream,
    .record = lane_event,
    .wait = lane_event,
};
