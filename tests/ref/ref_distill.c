/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_distill.c - from the definitions: both distributions first, each whole, then the two sums.
 * The gradient goes through the Jacobian of log softmax: d log p_i / d x_j = [i = j] - p_j.
 */
#include "ref/ref_distill.h"

#include <math.h>
#include <stdlib.h>

static void log_softmax(double *x, int64_t n)
{
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++)
        top = x[j] > top ? x[j] : top;
    for (int64_t j = 0; j < n; j++)
        sum += exp(x[j] - top);
    for (int64_t j = 0; j < n; j++)
        x[j] = x[j] - top - log(sum);
}

/* log p, q of a row; @row may be NULL */
static void both(const ref_distill_opts_t *o, const double *z, const double *w, int64_t n,
                 double *lp, double *q, ref_distill_row_t *row)
{
    double lo = INFINITY, hi = -INFINITY, qlo = INFINITY, qhi = -INFINITY, top = 0, qtop = 0;
    for (int64_t j = 0; j < n; j++) {
        double y = o->scale * z[j] / o->temperature;
        lp[j] = o->softcap > 0 ? o->softcap * tanh(y / o->softcap) : y;
        q[j] = o->probs ? w[j] : o->target_scale * w[j] / o->target_temperature;
        top = fabs(lp[j]) > top ? fabs(lp[j]) : top;
        qtop = !o->probs && fabs(q[j]) > qtop ? fabs(q[j]) : qtop;
    }
    log_softmax(lp, n);
    if (!o->probs) {
        log_softmax(q, n);
        for (int64_t j = 0; j < n; j++)
            q[j] = exp(q[j]);
    }
    if (!row)
        return;
    row->mass = 0;
    for (int64_t j = 0; j < n; j++) {
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
    row->top = top;
    row->target_top = qtop;
}

void ref_distill(const ref_distill_opts_t *o, const double *z, const double *w, int64_t n,
                 ref_distill_row_t *row)
{
    double *lp = malloc((size_t)n * sizeof *lp), *q = malloc((size_t)n * sizeof *q);
    both(o, z, w, n, lp, q, row);
    row->ce = row->kl = 0;
    for (int64_t j = 0; j < n; j++)
        if (q[j] > 0) {
            row->ce -= q[j] * lp[j];
            row->kl += q[j] * (log(q[j]) - lp[j]);
        }
    free(lp);
    free(q);
}

void ref_distill_grad(const ref_distill_opts_t *o, const double *z, const double *w, int64_t n,
                      double g_ce, double g_kl, double *dz)
{
    double *lp = malloc((size_t)n * sizeof *lp), *q = malloc((size_t)n * sizeof *q);
    both(o, z, w, n, lp, q, NULL);
    for (int64_t j = 0; j < n; j++) {
        double dx = 0, slope = o->scale / o->temperature;
        for (int64_t i = 0; i < n; i++)
            dx -= (g_ce + g_kl) * q[i] * ((i == j) - exp(lp[j]));
        if (o->softcap > 0) {
            double ch = cosh(o->scale * z[j] / o->temperature / o->softcap);
            slope /= ch * ch;
        }
        dz[j] = dx * slope;
    }
    free(lp);
    free(q);
}
