/* SPDX-License-Identifier: Apache-2.0 */
/*
 * params.c - the list of parameters, their initial values, and how tensor parallelism cuts them.
 *
 * Decides: the order of the list, the spread of the initial weights, which element of a whole
 * parameter lives where in a shard. Initial values are a function of (seed, parameter, element), so
 * a layout only chooses which of them a rank looks at. Leaves to others: which rank holds which
 * shard, and every gradient.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "captioner.h"

struct list {
    cap_param_t *table;
    int n;
    bool encoder;
    int64_t layer;
};

static cap_param_t *add(struct list *l, const char *name, int64_t rows, int64_t cols, cap_cut_t cut,
                        cap_init_t init)
{
    cap_param_t *p = &l->table[l->n++];
    memset(p, 0, sizeof *p);
    if (l->layer >= 0 && strncmp(name, "lnf", 3) && strcmp(name, "head"))
        snprintf(p->name, sizeof p->name, "layer%d.%s", (int)l->layer, name);
    else
        snprintf(p->name, sizeof p->name, "%s", name);
    p->encoder = l->encoder;
    p->layer = l->layer;
    p->rows = rows;
    p->cols = cols;
    p->cut = cut;
    p->init = init;
    return p;
}

static void weight(struct list *l, const char *name, int64_t rows, int64_t cols, cap_cut_t cut,
                   double std)
{
    add(l, name, rows, cols, cut, CAP_INIT_NORMAL)->std = std;
}

static void vector(struct list *l, const char *name, int64_t rows, cap_cut_t cut, cap_init_t init)
{
    add(l, name, rows, 1, cut, init);
}

/* What adds to the residual stream starts smaller the more layers add to it. */
static void layer_params(struct list *l, const cap_model_t *m)
{
    int64_t d = m->width, f = 4 * m->width;
    double in = 1.0 / sqrt((double)d), depth = 1.0 / sqrt(2.0 * (double)m->layers);

    vector(l, "ln1.g", d, CAP_WHOLE, CAP_INIT_ONE);
    vector(l, "ln1.b", d, CAP_WHOLE, CAP_INIT_ZERO);
    weight(l, "wq", d, d, CAP_ROWS, in);
    vector(l, "bq", d, CAP_ROWS, CAP_INIT_ZERO);
    weight(l, "wk", d, d, CAP_ROWS, in);
    vector(l, "bk", d, CAP_ROWS, CAP_INIT_ZERO);
    weight(l, "wv", d, d, CAP_ROWS, in);
    vector(l, "bv", d, CAP_ROWS, CAP_INIT_ZERO);
    weight(l, "wo", d, d, CAP_COLS, in * depth);
    vector(l, "bo", d, CAP_WHOLE, CAP_INIT_ZERO);
    vector(l, "ln2.g", d, CAP_WHOLE, CAP_INIT_ONE);
    vector(l, "ln2.b", d, CAP_WHOLE, CAP_INIT_ZERO);
    weight(l, "wu", f, d, CAP_ROWS, in);
    vector(l, "bu", f, CAP_ROWS, CAP_INIT_ZERO);
    weight(l, "wd", d, f, CAP_COLS, depth / sqrt((double)f));
    vector(l, "bd", d, CAP_WHOLE, CAP_INIT_ZERO);
}

int cap_params(const cap_model_t *model, cap_param_t *table)
{
    const cap_model_t *m = model;
    int64_t d = m->width, e = m->hidden;
    struct list l = {.table = table, .encoder = true, .layer = -1};

    if (m->layers < 0 || 9 + 16 * m->layers > CAP_MAX_PARAMS)
        return -1;
    weight(&l, "enc.w1", e, CAP_PATCH, CAP_ROWS, 1.0 / sqrt((double)CAP_PATCH));
    vector(&l, "enc.b1", e, CAP_ROWS, CAP_INIT_ZERO);
    weight(&l, "enc.w2", d, e, CAP_COLS, 1.0 / sqrt((double)e));
    vector(&l, "enc.b2", d, CAP_WHOLE, CAP_INIT_ZERO);
    l.encoder = false;
    weight(&l, "embed", CAP_VOCAB, d, CAP_WHOLE, 0.2);
    weight(&l, "pos", CAP_POSITIONS, d, CAP_WHOLE, 0.2);
    for (l.layer = 0; l.layer < m->layers; l.layer++)
        layer_params(&l, m);
    vector(&l, "lnf.g", d, CAP_WHOLE, CAP_INIT_ONE);
    vector(&l, "lnf.b", d, CAP_WHOLE, CAP_INIT_ZERO);
    weight(&l, "head", CAP_VOCAB, d, CAP_ROWS, 0.5 / sqrt((double)d));
    return l.n;
}

/* splitmix64's output function: a good 64-bit mix of a counter */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Box-Muller on two numbers that belong to element @j alone */
static double normal(uint64_t key, uint64_t j)
{
    uint64_t a = mix(key + (2 * j + 1) * UINT64_C(0x9e3779b97f4a7c15));
    uint64_t b = mix(key + (2 * j + 2) * UINT64_C(0x9e3779b97f4a7c15));
    double u = ((double)(a >> 11) + 1.0) * 0x1p-53; /* (0, 1] */
    double v = (double)(b >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586477 * v);
}

void cap_param_init(const cap_param_t *table, int i, uint64_t seed, float *whole)
{
    const cap_param_t *p = &table[i];
    int64_t n = p->rows * p->cols;
    uint64_t key = mix(seed ^ mix((uint64_t)i + 1));

    for (int64_t j = 0; j < n; j++) {
        if (p->init == CAP_INIT_NORMAL)
            whole[j] = (float)(p->std * normal(key, (uint64_t)j));
        else
            whole[j] = p->init == CAP_INIT_ONE ? 1.0f : 0.0f;
    }
}

/* Rows [r0, r1) and columns [c0, c1) of the whole that tp rank @t of @w holds. */
struct part {
    int64_t r0, r1, c0, c1;
};

static struct part part_of(const cap_param_t *p, int64_t t, int64_t w)
{
    struct part s = {0, p->rows, 0, p->cols};
    if (p->cut == CAP_ROWS) {
        s.r0 = t * p->rows / w;
        s.r1 = (t + 1) * p->rows / w;
    } else if (p->cut == CAP_COLS) {
        s.c0 = t * p->cols / w;
        s.c1 = (t + 1) * p->cols / w;
    }
    return s;
}

void cap_param_shard_shape(const cap_param_t *p, int64_t t, int64_t w, int64_t *rows, int64_t *cols)
{
    struct part s = part_of(p, t, w);
    *rows = s.r1 - s.r0;
    *cols = s.c1 - s.c0;
}

void cap_param_shard(const cap_param_t *p, int64_t t, int64_t w, const float *whole, float *shard)
{
    struct part s = part_of(p, t, w);
    size_t row = (size_t)(s.c1 - s.c0);
    for (int64_t r = s.r0; r < s.r1; r++)
        memcpy(shard + (size_t)(r - s.r0) * row, whole + r * p->cols + s.c0, row * sizeof *shard);
}

void cap_param_unshard(const cap_param_t *p, int64_t t, int64_t w, const float *shard, float *whole)
{
    struct part s = part_of(p, t, w);
    size_t row = (size_t)(s.c1 - s.c0);
    for (int64_t r = s.r0; r < s.r1; r++)
        memcpy(whole + r * p->cols + s.c0, shard + (size_t)(r - s.r0) * row, row * sizeof *shard);
}
