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
    double y = o->scale * z / o->temperature;
    return o->softcap > 0 ? o->softcap * tanh(y / o->softcap) : y;
}

static double squash_slope(const ref_logprob_opts_t *o, double z)
{
    double slope = o->scale / o->temperature;
    if (o->softcap > 0) {
        double ch = cosh(o->scale * z / o->temperature / o->softcap);
        slope /= ch * ch;
    }
    return slope;
}

static double epsilon(const ref_logprob_opts_t *o, int64_t vocab)
{
    return o->megatron && o->smoothing > 0 ? o->smoothing * (double)vocab / (double)(vocab - 1)
                                           : o->smoothing;
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
        mean += lp[j] / (double)vocab;
    }
    row->range = hi - lo;
    if (row->ignored) {
        row->entropy = 0;
    } else if (!row->valid && o->lenient) { /* -log p_t with x_t := max x, that is -max_j log p_j */
        row->loss = -(1 - eps) * lp[best] - eps * mean + o->z_loss * row->lse * row->lse;
    } else if (!row->valid) {
        row->logp = row->loss = NAN;
    } else {
        row->logp = lp[target];
        row->loss = -(1 - eps) * lp[target] - eps * mean + o->z_loss * row->lse * row->lse;
        row->correct = best == target;
    }
    free(lp);
}

void ref_logprob_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t target,
                      double g_logp, double g_entropy, double g_loss, double *dz)
{
    double *lp = malloc((size_t)vocab * sizeof *lp), h = 0, eps = epsilon(o, vocab);
    double lse = log_softmax(o, z, vocab, lp);
    for (int64_t j = 0; j < vocab; j++)
        h -= exp(lp[j]) * lp[j];
    for (int64_t j = 0; j < vocab; j++) {
        double p = exp(lp[j]), hit = j == target;
        double d_logp = hit - p;
        double d_entropy = -p * (lp[j] + h);
        double d_loss = p - (1 - eps) * hit - eps / (double)vocab + 2 * o->z_loss * lse * p;
        double dx = g_logp * d_logp + g_entropy * d_entropy + g_loss * d_loss;
        dz[j] = target == o->ignore_index ? 0 : dx * squash_slope(o, z[j]);
    }
    free(lp);
}
