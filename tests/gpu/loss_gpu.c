/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss_gpu.c - see loss_gpu.h.
 *
 * Tolerances. u = 2^-24 (2^-53 for f64 logits), V columns, R = max x - min x, L = 1 + log V.
 *
 * What the kernels do in that precision, relative to e^(x-m) or its sum s:
 *
 * - e^d: 4 u for the instruction (2^-22), 2 u |d| for the product with log2 e, and u |d| twice for
 *   factor and d; averaged over s, |d| counts with weight e^d / s, at most L: (4 + 4L) u
 * - adding: a thread of 128 or more has at most V/512 + 8 terms in a partial sum, and at most
 *   V/4096 + 8 batches that each may rescale it (5 u): (V/256 + 48) u
 * - storing: u for each statistic
 *
 * so e_s = (V/256 + 64 + 4L) u. Then
 *
 * - logp: e_s + 4 u R + u |logp|
 * - entropy: log Sum and U / Sum, the latter at most L with twice the error: e_s (1 + 2L) + u |h|
 * - loss: as logp; the mean of x - m adds at most (V/256 + 64) u R, the z-loss
 *   2 lambda |lse| (e_s + 2 u |m|)
 * - lse, mean_logits: as logp, and as the loss's mean; sum_p2: e^2d has twice the error of e^d, and
 *   is divided by s^2: 4 e_s times its value
 * - gradient: |factor| (|g_p| + |g_s|, of lse, + |g_l| (1 + 2 lambda |lse|) + |g_h| (L + R)) times
 * the error of p, e_s + 16 u + 4 u R, twice with the entropy's share of A; and one rounding to the
 * dtype of the logits, as in loss_case.c. A column that is not the target's has its own size in the
 *   place of 1, and three roundings of what multiplies it: 1 / temperature, the factor, their
 * product
 *
 * Where x is rounded by itself (softcap, factor <= 0, f64), 4 u max|x| more in each difference.
 */
#include "gpu/loss_gpu.h"

void gpu_row_compare(const ref_logprob_opts_t *o, colo_dtype_t dtype, const double *z,
                     int64_t vocab, int64_t target, const double *got, const bool *asked,
                     const double *up, const double *dz, const char *label)
{
    ref_logprob_row_t r;
    ref_logprob(o, z, vocab, target, &r);
    const double f = fabs(o->scale / o->temperature), v = (double)vocab, big = 1 + log(v),
                 u = dtype == COLO_F64 ? 0x1p-53 : 0x1p-24, lse = fabs(r.lse),
                 own = o->softcap > 0 || o->scale <= 0 || dtype == COLO_F64 ? 4 * u * r.top : 0,
                 es = (v / 256 + 64 + 4 * big) * u + own, diff = 4 * u * r.range + own;
    const double mean = (v / 256 + 64) * u * r.range;
    const double want[LOSS_OUTS] = {r.logp,   r.entropy, r.loss, r.ignored ? 0 : r.lse,
                                    r.sum_p2, r.mean};
    const double tol[LOSS_OUTS] = {es + diff + u * fabs(want[0]),
                                   es * (1 + 2 * big) + u * fabs(want[1]),
                                   es + diff + mean + u * fabs(want[2]) +
                                       2 * o->z_loss * lse * (es + 2 * u * r.top),
                                   es + diff + u * fabs(want[3]),
                                   (4 * es + u) * want[4],
                                   diff + mean + u * fabs(want[5])};
    for (int k = 0; k < LOSS_OUTS; k++)
        if (asked[k] && !near(got[k], want[k], tol[k]))
            fail_msg("%s: %s is %.17g, expected %.17g within %g", label, loss_out_names[k], got[k],
                     want[k], tol[k]);
    if (!dz)
        return;
    double g[LOSS_UPS], *ref = malloc((size_t)vocab * sizeof *ref);
    COLO_AUTOFREE double *fp =
        malloc((size_t)vocab * sizeof *fp); /* f p, as the gradient of -logp elsewhere */
    for (int k = 0; k < LOSS_UPS; k++)
        g[k] = asked[k] ? up[k] : 0;
    ref_logprob_grad(o, z, vocab, target, g, ref);
    ref_logprob_grad(o, z, vocab, -1, (double[REF_UPS]){-1}, fp);
    const bool lost = !o->lenient && !r.valid && !r.ignored &&
                      (up[LOSS_UPS] != 0); /* is d_logp or d_loss given? */
    const double size = f * (fabs(g[0]) + fabs(g[3]) + fabs(g[2]) * (1 + 2 * o->z_loss * lse) +
                             fabs(g[1]) * (big + r.range));
    for (int64_t j = 0; j < vocab; j++) {
        double e = lost ? NAN : ref[j], t = 2 * size * (es + 16 * u + diff);
        if (o->softcap == 0 && j != target)
            t = t * fabs(fp[j]) / (f > 0 ? f : 1) + 3 * u * fabs(e) + 2 * u * f * fabs(g[2]) / v +
                1e-37 * size;
        t += loss_grad_rounding(dtype, e, u);
        if (!near(dz[j], e, t))
            fail_msg("%s: gradient of column %lld is %.17g, expected %.17g within %g", label,
                     (long long)j, dz[j], e, t);
    }
    free(ref);
}

void gpu_case_compare(const loss_case_t *c, const char *label)
{
    bool asked[LOSS_OUTS];
    loss_wanted(&c->config, asked);
    int64_t valid = 0, invalid = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        const ref_logprob_opts_t o = loss_case_opts(c, t);
        const int64_t target = c->targets[t];
        const bool legal = target >= 0 && target < c->vocab,
                   ignored = target == c->config.ignore_index;
        double got[LOSS_OUTS], up[LOSS_UPS + 1] = {0};
        for (int k = 0; k < LOSS_OUTS; k++)
            got[k] = c->out[0][k][t];
        for (int k = 0; k < LOSS_UPS; k++)
            up[k] = c->no_up[k] ? 0 : c->up[k][t];
        up[LOSS_UPS] = !c->no_up[0] || (asked[2] && !c->no_up[2]);
        valid += legal && !ignored;
        invalid += !legal && !ignored;
        const char *text = t_text("%s: token %d", label, (int)t);
        gpu_row_compare(&o, c->dtype, c->z + t * c->vocab, c->vocab, target, got, asked, up,
                        c->forward_only ? NULL : c->dz + t * c->vocab, text);
        ref_logprob_row_t r;
        ref_logprob(&o, c->z + t * c->vocab, c->vocab, target, &r);
        if (c->config.want_correct && c->correct[0][t] != r.correct)
            fail_msg("%s: correct is %d", text, c->correct[0][t]);
        if (c->config.want_argmax && c->argmax[0][t] != r.best)
            fail_msg("%s: argmax is %d, expected %d", text, (int)c->argmax[0][t], (int)r.best);
    }
    if (c->n_valid[0] != valid || c->n_invalid[0] != invalid)
        fail_msg("%s: %d valid and %d invalid, expected %d and %d", label, (int)c->n_valid[0],
                 (int)c->n_invalid[0], (int)valid, (int)invalid);
    if (c->pad_worst != 0)
        fail_msg("%s: a padding column or a gap was written: %g", label, c->pad_worst);
}
