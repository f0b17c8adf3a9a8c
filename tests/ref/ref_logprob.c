/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_logprob.c - written from the definitions, not from the rearranged forms that src/ uses: the
 * probabilities first, the entropy as -sum p log p, the gradient as the textbook derivative of each
 * output. Whole rows, no shards, no statistics.
 */
#include "ref/ref_logprob.h"

#include <math.h>
#include <stdlib.h>

static double squash(const ref_logprob_opts_t *o, double z)
{
    const double capped =
        o->softcap > 0 ? o->softcap * tanh(o->scale * z / o->softcap) : o->scale * z;
    return capped / o->temperature;
}

static double squash_slope(const ref_logprob_opts_t *o, double z)
{
    const double ch = o->softcap > 0 ? cosh(o->scale * z / o->softcap) : 1;
    return o->scale / (ch * ch) / o->temperature;
}

static double epsilon(const ref_logprob_opts_t *o, int64_t vocab)
{
    return o->megatron && o->smoothing > 0 ? o->smoothing * (double)vocab / (double)(vocab - 1)
                                           : o->smoothing;
}

static double weight_of(const ref_logprob_opts_t *o, int64_t j)
{
    return o->class_weight ? o->class_weight[j] : 1;
}

/* logp of every column; returns log-sum-exp of x */
static double log_softmax(const ref_logprob_opts_t *o, const double *z, int64_t vocab, double *lp)
{
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < vocab; j++) {
        lp[j] = squash(o, z[j]);
        if (lp[j] > top)
            top = lp[j];
    }
    for (int64_t j = 0; j < vocab; j++)
        sum += exp(lp[j] - top);
    for (int64_t j = 0; j < vocab; j++)
        lp[j] = (lp[j] - top) - log(sum);
    return top + log(sum);
}

void ref_logprob(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                 ref_logprob_row_t *row)
{
    double *lp = malloc((size_t)vocab * sizeof *lp), mean = 0, eps = epsilon(o, vocab);
    double lo = INFINITY, hi = -INFINITY;
    int64_t best = 0;
    *row = (ref_logprob_row_t){.ignored = target == o->ignore_index};
    row->valid = !row->ignored && target >= 0 && target < vocab;
    row->lse = log_softmax(o, z, vocab, lp);
    for (int64_t j = 0; j < vocab; j++) {
        double x = squash(o, z[j]);
        if (x > hi) {
            hi = x;
            best = j;
        }
        lo = x < lo ? x : lo;
        row->top = fabs(x) > row->top ? fabs(x) : row->top;
        row->entropy -= exp(lp[j]) * lp[j];
        row->sum_p2 += exp(lp[j]) * exp(lp[j]);
        row->mean += x / (double)vocab;
        mean += weight_of(o, j) * lp[j] / (double)vocab;
    }
    row->range = hi - lo;
    row->best = best;
    if (row->ignored) {
        row->entropy = row->sum_p2 = row->mean = 0;
        row->best = -1;
    } else if (!row->valid && o->lenient) { /* -log p_t with x_t := max x, that is -max_j log p_j */
        row->loss = -(1 - eps) * lp[best] - eps * mean + o->z_loss * row->lse * row->lse;
    } else if (!row->valid) {
        row->logp = row->loss = NAN;
    } else {
        row->logp = lp[target];
        row->weight = weight_of(o, target);
        row->loss =
            row->weight * (-(1 - eps) * lp[target] + o->z_loss * row->lse * row->lse) - eps * mean;
        row->correct = best == target;
    }
    free(lp);
}

void ref_logprob_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                      const double g[REF_UPS], double *dz)
{
    double *lp = malloc((size_t)vocab * sizeof *lp), h = 0, eps = epsilon(o, vocab), all = 0;
    double lse = log_softmax(o, z, vocab, lp);
    const double w = target >= 0 && target < vocab ? weight_of(o, target) : 1;
    for (int64_t j = 0; j < vocab; j++) {
        h -= exp(lp[j]) * lp[j];
        all += weight_of(o, j);
    }
    for (int64_t j = 0; j < vocab; j++) {
        double p = exp(lp[j]), hit = j == target;
        double d_logp = hit - p;
        double d_entropy = -p * (lp[j] + h);
        double d_loss = w * ((1 - eps) * (p - hit) + 2 * o->z_loss * lse * p) +
                        eps / (double)vocab * (all * p - weight_of(o, j));
        double dx = g[0] * d_logp + g[1] * d_entropy + g[2] * d_loss + g[3] * p;
        dz[j] = target == o->ignore_index ? 0 : dx * squash_slope(o, z[j]);
    }
    free(lp);
}

/* ---- of a list: the columns side by side are the vocabulary ---- */

struct part {
    double *z, *dz, *weight;
    int64_t n, target, *column;
};

static struct part part_of(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                           const uint8_t *in, int64_t target)
{
    const size_t size = (size_t)vocab + 1;
    struct part p = {calloc(size, sizeof(double)),
                     calloc(size, sizeof(double)),
                     calloc(size, sizeof(double)),
                     0,
                     target,
                     calloc(size, sizeof(int64_t))};
    for (int64_t j = 0; j < vocab; j++)
        if (!in || in[j] || j == target) {
            p.target = j == target ? p.n : p.target;
            p.z[p.n] = z[j];
            p.weight[p.n] = weight_of(o, j);
            p.column[p.n++] = j;
        }
    p.target = target == o->ignore_index ? target : p.target;
    return p;
}

static void release(struct part *p)
{
    free(p->z);
    free(p->dz);
    free(p->weight);
    free(p->column);
}

void ref_support(const ref_logprob_opts_t *o, const double *z, int64_t vocab, const uint8_t *in,
                 int64_t target, ref_logprob_row_t *row)
{
    struct part p = part_of(o, z, vocab, in, target);
    ref_logprob_opts_t its = *o;
    its.class_weight = o->class_weight ? p.weight : NULL;
    ref_logprob(&its, p.z, p.n, p.target, row);
    row->best = row->best < 0 ? -1 : p.column[row->best];
    release(&p);
}

void ref_support_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                      const uint8_t *in, int64_t target, const double g[REF_UPS], double *dz)
{
    struct part p = part_of(o, z, vocab, in, target);
    ref_logprob_opts_t its = *o;
    its.class_weight = o->class_weight ? p.weight : NULL;
    ref_logprob_grad(&its, p.z, p.n, p.target, g, p.dz);
    for (int64_t j = 0; j < vocab; j++)
        dz[j] = 0;
    for (int64_t i = 0; i < p.n; i++)
        dz[p.column[i]] = p.dz[i];
    release(&p);
}

/* ---- against a distribution ---- */

/* log p, q of a row; @row may be NULL */
static void both(const ref_distill_opts_t *o, const double *z, const double *w, int64_t n,
                 double *lp, double *q, ref_distill_row_t *row)
{
    const ref_logprob_opts_t targets = {.temperature = o->target_temperature,
                                        .scale = o->target_scale,
                                        .softcap = o->target_softcap};
    double lo = INFINITY, hi = -INFINITY, qlo = INFINITY, qhi = -INFINITY;
    log_softmax(&o->logits, z, n, lp);
    if (!o->probs)
        log_softmax(&targets, w, n, q);
    for (int64_t j = 0; j < n; j++)
        q[j] = o->probs ? w[j] : exp(q[j]);
    if (!row)
        return;
    *row = (ref_distill_row_t){.mass = 0};
    for (int64_t j = 0; j < n; j++) {
        const double x = fabs(squash(&o->logits, z[j])),
                     y = o->probs ? 0 : fabs(squash(&targets, w[j]));
        row->top = x > row->top ? x : row->top;
        row->target_top = y > row->target_top ? y : row->target_top;
        lo = lp[j] < lo ? lp[j] : lo;
        hi = lp[j] > hi ? lp[j] : hi;
        row->mass += q[j];
        if (q[j] > 0) {
            qlo = log(q[j]) < qlo ? log(q[j]) : qlo;
            qhi = log(q[j]) > qhi ? log(q[j]) : qhi;
        }
    }
    row->range = hi - lo;
    row->target_range = qhi > qlo ? qhi - qlo : 0;
}

void ref_distill(const ref_distill_opts_t *o, const double *z, const double *w, int64_t n,
                 ref_distill_row_t *row)
{
    double *lp = malloc((size_t)n * sizeof *lp), *q = malloc((size_t)n * sizeof *q);
    both(o, z, w, n, lp, q, row);
    for (int64_t j = 0; j < n; j++)
        if (q[j] > 0) {
            row->ce -= q[j] * lp[j];
            row->kl += q[j] * (log(q[j]) - lp[j]);
        }
    double d = 0;
    for (int64_t j = 0; j < n; j++) {
        const double p = exp(lp[j]), m = o->beta * q[j] + (1 - o->beta) * p;
        row->alpha += p < q[j] ? p : q[j];
        row->equal += fabs(lp[j] - log(q[j])) < 1e-5 ? p : 0;
        if (o->divergence == REF_REVERSE)
            d += p > 0 ? p * (lp[j] - log(q[j])) : 0;
        else if (o->divergence == REF_JSD)
            d += (q[j] > 0 ? o->beta * q[j] * log(q[j] / m) : 0) +
                 (p > 0 ? (1 - o->beta) * p * log(p / m) : 0);
        else
            d += fabs(p - q[j]) / 2;
    }
    if (o->divergence != REF_FORWARD)
        row->kl = o->divergence == REF_ACCEPTANCE ? -log(row->alpha) : d;
    free(lp);
    free(q);
}

/* Through the Jacobian of log softmax: d log p_i / d x_j = [i = j] - p_j. */
void ref_distill_grad(const ref_distill_opts_t *o, const double *z, const double *w, int64_t n,
                      double g_ce, double g_kl, double *dz)
{
    double *lp = malloc((size_t)n * sizeof *lp), *q = malloc((size_t)n * sizeof *q);
    double *d = malloc((size_t)n * sizeof *d); /* by log p_i */
    double *behind = malloc((size_t)n * sizeof *behind), alpha = 0, sum = 0;
    both(o, z, w, n, lp, q, NULL);
    for (int64_t j = 0; j < n; j++)
        alpha += fmin(exp(lp[j]), q[j]);
    for (int64_t i = 0; i < n; i++) {
        const double p = exp(lp[i]), sign = (p > q[i]) - (p < q[i]);
        double by_logp = -q[i]; /* p_i dD/dp_i */
        if (o->divergence == REF_REVERSE)
            by_logp = p * (lp[i] - log(q[i]) + 1);
        else if (o->divergence == REF_JSD)
            by_logp = (1 - o->beta) * p * log(p / (o->beta * q[i] + (1 - o->beta) * p));
        else if (o->divergence != REF_FORWARD)
            by_logp = p * sign / 2 / (o->divergence == REF_TV ? 1 : alpha);
        d[i] = g_kl * by_logp - g_ce * q[i];
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        behind[i] = sum;
        sum += d[i];
    }
    sum = 0; /* from here on of those in front; neither has j, or digits are lost where p_j is
                nearly 1 */
    for (int64_t j = 0; j < n; j++) {
        const double p = exp(lp[j]);
        dz[j] = (d[j] * (1 - p) - (sum + behind[j]) * p) * squash_slope(&o->logits, z[j]);
        sum += d[j];
    }
    free(lp);
    free(q);
    free(d);
    free(behind);
}
