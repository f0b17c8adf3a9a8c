/* SPDX-License-Identifier: Apache-2.0 */
/* ref_support.c - the columns side by side are the vocabulary of ref_logprob.h. */
#include "ref/ref_support.h"

#include <stdlib.h>

struct part {
    double *z, *dz;
    int64_t n, target, *column;
};

static struct part part_of(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                           const uint8_t *in, int64_t target)
{
    const size_t size = (size_t)vocab + 1;
    struct part p = {calloc(size, sizeof(double)), calloc(size, sizeof(double)), 0, target,
                     calloc(size, sizeof(int64_t))};
    for (int64_t j = 0; j < vocab; j++)
        if (!in || in[j] || j == target) {
            p.target = j == target ? p.n : p.target;
            p.z[p.n] = z[j];
            p.column[p.n++] = j;
        }
    p.target = target == o->ignore_index ? target : p.target;
    return p;
}

static void release(struct part *p)
{
    free(p->z);
    free(p->dz);
    free(p->column);
}

void ref_support(const ref_logprob_opts_t *o, const double *z, int64_t vocab, const uint8_t *in,
                 int64_t target, ref_logprob_row_t *row)
{
    struct part p = part_of(o, z, vocab, in, target);
    ref_logprob(o, p.z, p.n, p.target, row);
    release(&p);
}

void ref_support_grad(const ref_logprob_opts_t *o, const double *z, int64_t vocab,
                      const uint8_t *in, int64_t target, double g_logp, double g_entropy,
                      double g_loss, double *dz)
{
    struct part p = part_of(o, z, vocab, in, target);
    ref_logprob_grad(o, p.z, p.n, p.target, g_logp, g_entropy, g_loss, p.dz);
    for (int64_t j = 0; j < vocab; j++)
        dz[j] = 0;
    for (int64_t i = 0; i < p.n; i++)
        dz[p.column[i]] = p.dz[i];
    release(&p);
}
