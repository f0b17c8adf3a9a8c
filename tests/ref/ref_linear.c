/* SPDX-License-Identifier: Apache-2.0 */
/* ref_linear.c - see ref_linear.h; whole vocabulary, all logits, three nested loops a product. */
#include "ref/ref_linear.h"

#include <math.h>
#include <stdlib.h>

void ref_linear_alloc(const ref_linear_t *in, ref_linear_result_t *out)
{
    size_t T = (size_t)in->tokens, V = (size_t)in->vocab, H = (size_t)in->hidden;
    out->rows = calloc(T + 1, sizeof *out->rows);
    out->z = calloc(T * V + 1, sizeof(double));
    out->dz = calloc(T * V + 1, sizeof(double));
    out->d_h = calloc(T * H + 1, sizeof(double));
    out->d_w = calloc(V * H + 1, sizeof(double));
    out->d_b = calloc(V + 1, sizeof(double));
}

void ref_linear_free(ref_linear_result_t *out)
{
    free(out->rows);
    free(out->z);
    free(out->dz);
    free(out->d_h);
    free(out->d_w);
    free(out->d_b);
}

static double up(const ref_linear_t *in, int k, int64_t t)
{
    return in->g[k] ? in->g[k][t] : 0;
}

void ref_linear(const ref_linear_t *in, ref_linear_result_t *out)
{
    const int64_t V = in->vocab, H = in->hidden;
    for (int64_t t = 0; t < in->tokens; t++) {
        const double *h = in->h + t * H;
        double *z = out->z + t * V, *dz = out->dz + t * V, *d_h = out->d_h + t * H;
        for (int64_t v = 0; v < V; v++) {
            z[v] = in->b ? in->b[v] : 0;
            for (int64_t k = 0; k < H; k++)
                z[v] += in->w[v * H + k] * h[k];
        }
        ref_logprob_opts_t opts = in->opts;
        opts.temperature *= in->temperature ? in->temperature[t] : 1;
        const uint8_t *list = in->support ? in->support + t * V : NULL;
        ref_support(&opts, z, V, list, in->targets[t], &out->rows[t]);
        const double g[REF_UPS] = {up(in, 0, t), up(in, 1, t), up(in, 2, t), up(in, 3, t)};
        ref_support_grad(&opts, z, V, list, in->targets[t], g, dz);
        if (!out->rows[t].valid && !out->rows[t].ignored && (in->g[0] || in->g[2]))
            for (int64_t v = 0; v < V; v++)
                dz[v] = NAN; /* a target that does not exist */
        for (int64_t k = 0; k < H; k++)
            d_h[k] = 0;
        if (out->rows[t].ignored)
            continue; /* whatever its hidden states are */
        for (int64_t v = 0; v < V; v++) {
            for (int64_t k = 0; k < H; k++) {
                d_h[k] += dz[v] * in->w[v * H + k];
                out->d_w[v * H + k] += dz[v] * h[k];
            }
            out->d_b[v] += dz[v];
        }
    }
}
