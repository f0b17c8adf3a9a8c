/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_topk.c - by looking for the largest k times; and one whole textbook gradient a pick, added
 * up.
 */
#include "ref/ref_topk.h"

#include <math.h>
#include <stdlib.h>

void ref_topk_largest(const ref_logprob_opts_t *o, const double *z, int64_t vocab, int64_t k,
                      int64_t *ids)
{
    bool *gone = calloc((size_t)vocab, sizeof *gone);
    double sign = o->scale > 0 ? 1 : o->scale < 0 ? -1 : 0;
    for (int64_t i = 0; i < k; i++) {
        int64_t best = -1;
        for (int64_t j = vocab - 1; j >= 0; j--)
            if (!gone[j] && (best < 0 || sign * z[j] >= sign * z[best]))
                best = j;
        gone[best] = true;
        ids[i] = best;
    }
    free(gone);
}

void ref_topk_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab, const int64_t *ids,
                   const double *g, int64_t k, double *dz)
{
    double *one = malloc((size_t)vocab * sizeof *one);
    for (int64_t j = 0; j < vocab; j++)
        dz[j] = 0;
    for (int64_t i = 0; i < k; i++) {
        if (ids[i] < 0)
            continue;
        ref_logprob_grad(o, z, vocab, ids[i], (double[REF_UPS]){g[i]}, one);
        for (int64_t j = 0; j < vocab; j++)
            dz[j] += one[j];
    }
    free(one);
}

/* d log p_tail = sum over the tail of (p_j / p_tail) d log p_j */
double ref_topk_tail(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                     const int64_t *ids, int64_t k, double g, double *dz)
{
    double *p = calloc((size_t)vocab, sizeof *p), *one = malloc((size_t)vocab * sizeof *one),
           sum = 0;
    for (int64_t j = 0; j < vocab; j++) {
        ref_logprob_row_t row;
        bool in = false;
        for (int64_t i = 0; i < k; i++)
            in = in || ids[i] == j;
        ref_logprob(o, z, vocab, j, &row);
        p[j] = in ? 0 : exp(row.logp);
        sum += p[j];
    }
    for (int64_t i = 0; i < vocab && dz; i++) {
        if (p[i] == 0)
            continue;
        ref_logprob_grad(o, z, vocab, i, (double[REF_UPS]){g * p[i] / sum}, one);
        for (int64_t j = 0; j < vocab; j++)
            dz[j] += one[j];
    }
    free(p);
    free(one);
    return log(sum);
}
