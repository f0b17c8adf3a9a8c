/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oracle.c - the captioner's loss and gradients once more, serial, fp64, with plain loops.
 *
 * This is what the parallel model is compared with, so it shares nothing with it: no grid, no
 * bridge, no BLAS, no tape, no table of parameters. Every function is the maths of captioner.h, and
 * every *_back below its forward is that function's adjoint written out by hand; gradients are
 * always added (+=) to what is there.
 *
 * Letters: T positions, D width, F = 4D, E encoder hidden, H heads, V = 256. [T,D] is row-major,
 * y = W x + b with W [out,in]. Samples are worked off one by one. A sample's last target is the NUL
 * of its caption, so with a causal model nothing behind the caption's last byte can change the
 * loss: T = rows + strlen(text), and there is no padding and no packing here at all.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "captioner.h"

enum {
    MAX_LAYERS = CAP_MAX_PARAMS / 16,
    MAX_T = CAP_LONGEST > CAP_LENGTH ? CAP_LONGEST : CAP_LENGTH,
    MAX_ROWS = CAP_IMAGES * CAP_PATCHES
};

static const double LN_EPS = 1e-5, SQRT2 = 1.4142135623730950488, SQRT_2PI = 2.5066282746310005024;

struct sizes {
    int64_t D, F, E, H, L, V;
};

/* All parameters, or all their gradients, in the order of captioner.h. */
struct layer {
    double *ln1g, *ln1b, *wq, *bq, *wk, *bk, *wv, *bv, *wo, *bo;
    double *ln2g, *ln2b, *wu, *bu, *wd, *bd;
};
struct net {
    double *w1, *b1, *w2, *b2, *embed, *pos;
    struct layer layer[MAX_LAYERS];
    double *lnfg, *lnfb, *head;
};

/* What backward needs of forward, for one sample. */
struct norm_saved {
    double *xhat; /* [T,D] (x - mean) / sqrt(var + eps) */
    double *rstd; /* [T]   1 / sqrt(var + eps) */
};
struct layer_saved {
    struct norm_saved n1, n2;
    double *a, *q, *k, *v; /* [T,D] LN1(x) and its three projections */
    double *p;             /* [H,T,T] attention weights */
    double *o;             /* [T,D] heads side by side, before wo */
    double *m;             /* [T,D] LN2(x) */
    double *u, *g;         /* [T,F] before and after gelu */
};
struct saved {
    double *patch;   /* [rows,4] */
    double *h1, *g1; /* [rows,E] before and after gelu */
    struct layer_saved layer[MAX_LAYERS];
    struct norm_saved nf;
    double *z; /* [T,D] LNf(x) */
};

/* Everything that lives for one call; one block of doubles, cut up by take(). */
struct workspace {
    double *base;
    size_t used;
};

static double *take(struct workspace *s, int64_t n)
{
    double *p = s->base ? s->base + s->used : NULL; /* first pass: only count */
    s->used += (size_t)n;
    return p;
}

/* ---- the pieces ---- */

/* y [T,O] = x [T,I] W^T + b */
static void linear(double *y, const double *x, const double *w, const double *b, int64_t T,
                   int64_t I, int64_t O)
{
    for (int64_t t = 0; t < T; t++)
        for (int64_t o = 0; o < O; o++) {
            double sum = b ? b[o] : 0.0;
            for (int64_t i = 0; i < I; i++)
                sum += w[o * I + i] * x[t * I + i];
            y[t * O + o] = sum;
        }
}

/* dx = dy W, dW = dy^T x, db = sum_t dy; dx and db may be absent */
static void linear_back(double *dx, double *dw, double *db, const double *dy, const double *x,
                        const double *w, int64_t T, int64_t I, int64_t O)
{
    for (int64_t t = 0; t < T; t++)
        for (int64_t o = 0; o < O; o++) {
            double g = dy[t * O + o];
            if (db)
                db[o] += g;
            for (int64_t i = 0; i < I; i++)
                dw[o * I + i] += g * x[t * I + i];
            if (dx)
                for (int64_t i = 0; i < I; i++)
                    dx[t * I + i] += g * w[o * I + i];
        }
}

/* gelu(x) = x Phi(x), Phi(x) = (1 + erf(x / sqrt 2)) / 2 */
static void gelu(double *y, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] * 0.5 * (1.0 + erf(x[i] / SQRT2));
}

/* d gelu / dx = Phi(x) + x phi(x), phi(x) = exp(-x^2 / 2) / sqrt(2 pi) */
static void gelu_back(double *dx, const double *dy, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double cdf = 0.5 * (1.0 + erf(x[i] / SQRT2));
        double pdf = exp(-0.5 * x[i] * x[i]) / SQRT_2PI;
        dx[i] += dy[i] * (cdf + x[i] * pdf);
    }
}

/* y = gain * (x - mean) / sqrt(var + eps) + bias, per row of D; variance over D, not D - 1 */
static void norm(double *y, struct norm_saved *s, const double *x, const double *gain,
                 const double *bias, int64_t T, int64_t D)
{
    for (int64_t t = 0; t < T; t++) {
        const double *row = x + t * D;
        double mean = 0.0, var = 0.0;
        for (int64_t i = 0; i < D; i++)
            mean += row[i] / (double)D;
        for (int64_t i = 0; i < D; i++)
            var += (row[i] - mean) * (row[i] - mean) / (double)D;
        s->rstd[t] = 1.0 / sqrt(var + LN_EPS);
        for (int64_t i = 0; i < D; i++) {
            s->xhat[t * D + i] = (row[i] - mean) * s->rstd[t];
            y[t * D + i] = gain[i] * s->xhat[t * D + i] + bias[i];
        }
    }
}

/* with e = gain * dy:  dx = rstd (e - mean(e) - xhat mean(e xhat)) */
static void norm_back(double *dx, double *dgain, double *dbias, const double *dy,
                      const struct norm_saved *s, const double *gain, int64_t T, int64_t D)
{
    for (int64_t t = 0; t < T; t++) {
        const double *g = dy + t * D, *xhat = s->xhat + t * D;
        double e_mean = 0.0, ex_mean = 0.0;
        for (int64_t i = 0; i < D; i++) {
            dgain[i] += g[i] * xhat[i];
            dbias[i] += g[i];
            e_mean += gain[i] * g[i] / (double)D;
            ex_mean += gain[i] * g[i] * xhat[i] / (double)D;
        }
        for (int64_t i = 0; i < D; i++)
            dx[t * D + i] += s->rstd[t] * (gain[i] * g[i] - e_mean - xhat[i] * ex_mean);
    }
}

/* Per head h of n = D/H features: p[h,t,:] = softmax over j <= t of q_t . k_j / sqrt(n),
 * o_t = sum_j p[h,t,j] v_j */
static void attention(double *o, double *p, const double *q, const double *k, const double *v,
                      int64_t T, int64_t D, int64_t H)
{
    int64_t n = D / H;

    for (int64_t h = 0; h < H; h++)
        for (int64_t t = 0; t < T; t++) {
            double *w = p + (h * T + t) * T, max = -INFINITY, sum = 0.0;
            for (int64_t j = 0; j <= t; j++) {
                w[j] = 0.0;
                for (int64_t i = h * n; i < (h + 1) * n; i++)
                    w[j] += q[t * D + i] * k[j * D + i];
                w[j] /= sqrt((double)n);
                max = fmax(max, w[j]);
            }
            for (int64_t j = 0; j <= t; j++)
                sum += w[j] = exp(w[j] - max);
            for (int64_t i = h * n; i < (h + 1) * n; i++)
                o[t * D + i] = 0.0;
            for (int64_t j = 0; j <= t; j++) {
                w[j] /= sum;
                for (int64_t i = h * n; i < (h + 1) * n; i++)
                    o[t * D + i] += w[j] * v[j * D + i];
            }
        }
}

/* dp_j = do_t . v_j;  ds_j = p_j (dp_j - sum_i p_i dp_i);  q and k from ds / sqrt(n) */
static void attention_back(double *dq, double *dk, double *dv, const double *d_o, const double *p,
                           const double *q, const double *k, const double *v, int64_t T, int64_t D,
                           int64_t H)
{
    int64_t n = D / H;

    for (int64_t h = 0; h < H; h++)
        for (int64_t t = 0; t < T; t++) {
            const double *w = p + (h * T + t) * T;
            double dp[MAX_T], dot = 0.0;
            for (int64_t j = 0; j <= t; j++) {
                dp[j] = 0.0;
                for (int64_t i = h * n; i < (h + 1) * n; i++) {
                    dp[j] += d_o[t * D + i] * v[j * D + i];
                    dv[j * D + i] += w[j] * d_o[t * D + i];
                }
                dot += w[j] * dp[j];
            }
            for (int64_t j = 0; j <= t; j++) {
                double ds = w[j] * (dp[j] - dot) / sqrt((double)n);
                for (int64_t i = h * n; i < (h + 1) * n; i++) {
                    dq[t * D + i] += ds * k[j * D + i];
                    dk[j * D + i] += ds * q[t * D + i];
                }
            }
        }
}

static void add(double *y, const double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += x[i];
}

static double *zeros(double *x, int64_t n)
{
    memset(x, 0, (size_t)n * sizeof *x);
    return x;
}

/* ---- a layer ---- */

struct work {
    double *x, *dx;     /* [T,D] the residual stream and its gradient */
    double *y, *dy;     /* [T,D] */
    double *d_o, *dqkv; /* [T,D], [3,T,D] */
    double *du, *dg;    /* [T, max(F,E)] */
    double *logits;     /* [V] of one position, then their gradient */
};

static void layer_forward(const struct sizes *s, const struct layer *w, struct layer_saved *v,
                          struct work *k, int64_t T)
{
    int64_t D = s->D, F = s->F;

    norm(v->a, &v->n1, k->x, w->ln1g, w->ln1b, T, D);
    linear(v->q, v->a, w->wq, w->bq, T, D, D);
    linear(v->k, v->a, w->wk, w->bk, T, D, D);
    linear(v->v, v->a, w->wv, w->bv, T, D, D);
    attention(v->o, v->p, v->q, v->k, v->v, T, D, s->H);
    linear(k->y, v->o, w->wo, w->bo, T, D, D);
    add(k->x, k->y, T * D);

    norm(v->m, &v->n2, k->x, w->ln2g, w->ln2b, T, D);
    linear(v->u, v->m, w->wu, w->bu, T, D, F);
    gelu(v->g, v->u, T * F);
    linear(k->y, v->g, w->wd, w->bd, T, F, D);
    add(k->x, k->y, T * D);
}

/* k->dx is the gradient of the layer's output, then of its input: the residual adds by itself. */
static void layer_backward(const struct sizes *s, const struct layer *w, const struct layer *d,
                           const struct layer_saved *v, struct work *k, int64_t T)
{
    int64_t D = s->D, F = s->F;
    double *dg = zeros(k->dg, T * F), *du = zeros(k->du, T * F), *dm = zeros(k->dy, T * D);

    linear_back(dg, d->wd, d->bd, k->dx, v->g, w->wd, T, F, D);
    gelu_back(du, dg, v->u, T * F);
    linear_back(dm, d->wu, d->bu, du, v->m, w->wu, T, D, F);
    norm_back(k->dx, d->ln2g, d->ln2b, dm, &v->n2, w->ln2g, T, D);

    double *d_o = zeros(k->d_o, T * D), *dq = zeros(k->dqkv, 3 * T * D);
    double *dk = dq + T * D, *dv = dk + T * D, *da = zeros(k->dy, T * D);

    linear_back(d_o, d->wo, d->bo, k->dx, v->o, w->wo, T, D, D);
    attention_back(dq, dk, dv, d_o, v->p, v->q, v->k, v->v, T, D, s->H);
    linear_back(da, d->wq, d->bq, dq, v->a, w->wq, T, D, D);
    linear_back(da, d->wk, d->bk, dk, v->a, w->wk, T, D, D);
    linear_back(da, d->wv, d->bv, dv, v->a, w->wv, T, D, D);
    norm_back(k->dx, d->ln1g, d->ln1b, da, &v->n1, w->ln1g, T, D);
}

/* ---- one sample ---- */

/* The sequence is image rows, then the text, in which the caption comes last. */
struct sample {
    int64_t rows, T;
    int64_t row_at[MAX_T]; /* row of the position table */
    float patch[MAX_ROWS * CAP_PATCH];
    char caption[CAP_SAID], text[CAP_SAID + 1];
    int64_t length; /* of the caption */
};

static void sample_read(struct sample *e, const cap_task_t *task, const cap_data_t *data,
                        const int64_t *rows)
{
    e->rows = 0;
    for (int64_t i = 0; i < task->most && rows[i] >= 0; i++) {
        const uint8_t *pixels = data->pixels[rows[i]];
        float *patch = e->patch + e->rows * CAP_PATCH;
        int64_t cell[CAP_PATCHES], n = CAP_PATCHES;

        if (task->ragged)
            n = cap_crop(pixels, patch, cell);
        else
            cap_patches(pixels, patch);
        for (int64_t k = 0; k < n; k++)
            e->row_at[e->rows + k] = task->ragged ? i * CAP_PATCHES + cell[k] : k;
        e->rows += n;
    }
    cap_caption_text(data, task, rows, e->caption);
    e->length = (int64_t)strlen(e->caption);
    e->text[0] = CAP_BEGIN;
    strcpy(e->text + task->ragged, e->caption);
    e->T = e->rows + (int64_t)strlen(e->text);
    for (int64_t k = 0; e->rows + k < e->T; k++)
        e->row_at[e->rows + k] = (task->ragged ? MAX_ROWS : CAP_PATCHES) + k;
}

static void sample_forward(const struct sizes *s, const struct net *w, struct saved *v,
                           struct work *k, const struct sample *e)
{
    int64_t D = s->D;

    for (int64_t i = 0; i < e->rows * CAP_PATCH; i++)
        v->patch[i] = (double)e->patch[i];
    linear(v->h1, v->patch, w->w1, w->b1, e->rows, CAP_PATCH, s->E);
    gelu(v->g1, v->h1, e->rows * s->E);
    linear(k->x, v->g1, w->w2, w->b2, e->rows, s->E, D); /* the first rows of x = enc */

    for (int64_t t = e->rows; t < e->T; t++)
        memcpy(k->x + t * D, w->embed + (unsigned char)e->text[t - e->rows] * D,
               (size_t)D * sizeof *k->x);
    for (int64_t t = 0; t < e->T; t++)
        add(k->x + t * D, w->pos + e->row_at[t] * D, D);
    for (int64_t l = 0; l < s->L; l++)
        layer_forward(s, &w->layer[l], &v->layer[l], k, e->T);
    norm(v->z, &v->nf, k->x, w->lnfg, w->lnfb, e->T, D);
}

/* Head and loss of the positions that have a target; leaves the gradient of x in k->dx. The last
 * position predicts the caption's NUL, those before it its bytes. Returns the sum of -log p, not
 * the mean. */
static double sample_loss(const struct sizes *s, const struct net *w, const struct net *d,
                          const struct saved *v, struct work *k, const struct sample *e,
                          double tokens)
{
    int64_t D = s->D, V = s->V, T = e->T, first = T - 1 - e->length;
    double *dz = zeros(k->dy, T * D), loss = 0.0;

    for (int64_t t = first; t < T; t++) {
        int64_t target = (unsigned char)e->caption[t - first];
        double max = -INFINITY, sum = 0.0;

        linear(k->logits, v->z + t * D, w->head, NULL, 1, D, V);
        for (int64_t j = 0; j < V; j++)
            max = fmax(max, k->logits[j]);
        for (int64_t j = 0; j < V; j++)
            sum += exp(k->logits[j] - max);
        loss += max + log(sum) - k->logits[target];
        for (int64_t j = 0; j < V; j++) /* d logits = (softmax - one hot) / tokens */
            k->logits[j] = (exp(k->logits[j] - max) / sum - (j == target)) / tokens;
        linear_back(dz + t * D, d->head, NULL, k->logits, v->z + t * D, w->head, 1, D, V);
    }
    norm_back(zeros(k->dx, T * D), d->lnfg, d->lnfb, dz, &v->nf, w->lnfg, T, D);
    return loss;
}

static void sample_backward(const struct sizes *s, const struct net *w, const struct net *d,
                            const struct saved *v, struct work *k, const struct sample *e)
{
    int64_t D = s->D, E = s->E, n = e->rows;

    for (int64_t l = s->L - 1; l >= 0; l--)
        layer_backward(s, &w->layer[l], &d->layer[l], &v->layer[l], k, e->T);
    for (int64_t t = 0; t < e->T; t++)
        add(d->pos + e->row_at[t] * D, k->dx + t * D, D);
    for (int64_t t = n; t < e->T; t++)
        add(d->embed + (unsigned char)e->text[t - n] * D, k->dx + t * D, D);

    double *dg = zeros(k->dg, n * E), *dh = zeros(k->du, n * E);

    linear_back(dg, d->w2, d->b2, k->dx, v->g1, w->w2, n, E, D);
    gelu_back(dh, dg, v->h1, n * E);
    linear_back(NULL, d->w1, d->b1, dh, v->patch, w->w1, n, CAP_PATCH, E);
}

/* ---- the batch ---- */

/* Points every member of @net at element 0 of its parameter, in the order of captioner.h: from
 * @have, or cut out of @workspace with the sizes written to @count. Returns how many there are. */
static int net_map(const struct sizes *s, struct net *net, double *const *have,
                   struct workspace *workspace, int64_t *count)
{
    int64_t D = s->D, F = s->F, E = s->E;
    int n = 0;

#define MAP(member, size)                                       \
    do {                                                        \
        if (count)                                              \
            count[n] = (size);                                  \
        net->member = have ? have[n] : take(workspace, (size)); \
        n++;                                                    \
    } while (0)

    MAP(w1, E * CAP_PATCH);
    MAP(b1, E);
    MAP(w2, D * E);
    MAP(b2, D);
    MAP(embed, s->V * D);
    MAP(pos, CAP_POSITIONS * D);
    for (int64_t l = 0; l < s->L; l++) {
        MAP(layer[l].ln1g, D);
        MAP(layer[l].ln1b, D);
        MAP(layer[l].wq, D * D);
        MAP(layer[l].bq, D);
        MAP(layer[l].wk, D * D);
        MAP(layer[l].bk, D);
        MAP(layer[l].wv, D * D);
        MAP(layer[l].bv, D);
        MAP(layer[l].wo, D * D);
        MAP(layer[l].bo, D);
        MAP(layer[l].ln2g, D);
        MAP(layer[l].ln2b, D);
        MAP(layer[l].wu, F * D);
        MAP(layer[l].bu, F);
        MAP(layer[l].wd, D * F);
        MAP(layer[l].bd, D);
    }
    MAP(lnfg, D);
    MAP(lnfb, D);
    MAP(head, s->V * D);
#undef MAP
    return n;
}

static void norm_map(struct norm_saved *n, struct workspace *c, int64_t D)
{
    n->xhat = take(c, MAX_T * D);
    n->rstd = take(c, MAX_T);
}

static void work_map(const struct sizes *s, struct saved *v, struct work *k, struct workspace *c)
{
    int64_t D = s->D, F = s->F, E = s->E, wide = F > E ? F : E;

    v->patch = take(c, MAX_ROWS * CAP_PATCH);
    v->h1 = take(c, MAX_ROWS * E);
    v->g1 = take(c, MAX_ROWS * E);
    for (int64_t l = 0; l < s->L; l++) {
        struct layer_saved *y = &v->layer[l];
        double **const rows[] = {&y->a, &y->q, &y->k, &y->v, &y->o, &y->m};
        norm_map(&y->n1, c, D);
        norm_map(&y->n2, c, D);
        for (int i = 0; i < 6; i++)
            *rows[i] = take(c, MAX_T * D);
        y->p = take(c, s->H * MAX_T * MAX_T);
        y->u = take(c, MAX_T * F);
        y->g = take(c, MAX_T * F);
    }
    norm_map(&v->nf, c, D);
    v->z = take(c, MAX_T * D);

    k->x = take(c, MAX_T * D);
    k->dx = take(c, MAX_T * D);
    k->y = take(c, MAX_T * D);
    k->dy = take(c, MAX_T * D);
    k->d_o = take(c, MAX_T * D);
    k->dqkv = take(c, 3 * MAX_T * D);
    k->du = take(c, MAX_T * wide);
    k->dg = take(c, MAX_T * wide);
    k->logits = take(c, s->V);
}

double cap_oracle(const cap_model_t *model, const cap_task_t *task, const cap_data_t *data,
                  const int64_t *rows, int64_t n, const float *const *whole, double *const *grads)
{
    struct sizes s = {.D = model->width,
                      .F = 4 * model->width,
                      .E = model->hidden,
                      .H = model->heads,
                      .L = model->layers,
                      .V = CAP_VOCAB};
    struct workspace c = {0};
    struct net w, d;
    struct saved v;
    struct work k;
    struct sample e;
    int64_t count[CAP_MAX_PARAMS], tokens = 0;
    double loss = 0.0;

    if (s.L < 0 || 9 + 16 * s.L > CAP_MAX_PARAMS)
        return NAN;
    net_map(&s, &w, NULL, &c, count);
    work_map(&s, &v, &k, &c);
    c.base = malloc(c.used * sizeof *c.base);
    if (!c.base)
        return NAN;
    c.used = 0;
    int nparams = net_map(&s, &w, NULL, &c, count);
    work_map(&s, &v, &k, &c);
    net_map(&s, &d, grads, NULL, NULL);

    double *weights = c.base; /* the parameters lie one behind the other */
    for (int i = 0; i < nparams; i++) {
        for (int64_t j = 0; j < count[i]; j++)
            *weights++ = (double)whole[i][j];
        zeros(grads[i], count[i]);
    }

    for (int64_t i = 0; i < n; i++) {
        sample_read(&e, task, data, rows + i * task->most);
        tokens += e.length + 1;
    }
    for (int64_t i = 0; i < n; i++) {
        sample_read(&e, task, data, rows + i * task->most);
        sample_forward(&s, &w, &v, &k, &e);
        loss += sample_loss(&s, &w, &d, &v, &k, &e, (double)tokens);
        sample_backward(&s, &w, &d, &v, &k, &e);
    }
    free(c.base);
    return tokens ? loss / (double)tokens : 0.0;
}
