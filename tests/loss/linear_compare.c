/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_compare.c - what a case of linear_case.h gave, against the oracle and against another
 * case.
 *
 * Tolerances. u is the unit roundoff of sums (2^-24; 2^-53 for f64 heads), n(k) = u times the steps
 * of a sum of k terms: min(k, 128) + 2 where blocks of 128 are added in fp64, else k + 2. A logit
 * is off by at most
 *     e = n(H) A + (rounding of z to the logits dtype),  A = max over t, v of sum_k |h w| + |b|.
 * From there loss_case.c's terms, plus what e does: with f = |scale / tau|, D = 1 + log V + range,
 *     logp, loss: 2 f e (1 + 2 lambda |lse| + 2 lambda f e),   entropy: 2 f e D,
 *     lse, mean_logits: f e, for which logp's stands,  sum_p2: 4 f e times its value.
 * With temperatures of tokens, the lowest one stands for all. With class weights 5 u stands for 4
 * u, and the largest weight multiplies what is the loss's. d_z_v is made of p_v times coefficients,
 * plus a constant at the target. What p_v multiplies sums to at most 2 |g_p| + |g_h| (2 |log p_v +
 * h| + 2 + 2 h) + |g_l| (2 + 2 lambda (1 + 2 |lse|)) over the derivatives by all logits; a softcap
 * adds 2 f / cap of the gradient itself; rounding of the statistics is 4 u of G D as in
 * loss_case.c, times p_v, and 4 u of the constants: s_tv = f^2 e p_v (the above) + 2 f e / cap
 * |d_z| + 4 u f (p_v G D + |d_z| + [v = t] (|g_p| + |g_l|)) and d_z's rounding to the head's dtype.
 * Then the products: |d_h - ref| <= sum_v (s_tv |w|
 * + n(V) |d_z w|) + (rounding of d_h), d_w and d_b alike over tokens and replicas, with one more
 * rounding a chunk and a replica to f32, and to the gradient's dtype at the end. Each rounding to
 * fp16 may add 2^-25: results may be subnormal. d_z are rounded when the largest upstream gradient
 * times f is 64 or more, so that theirs is 2^-25 of 1/64 of that, whatever its size.
 * With a LoRA of scale s, W + s B A stands for W in the oracle. What is made of it is rounded on
 * its way: with L = max over t, v of |s| sum_r |B| sum_k |A h| e += (n(H) + n(R) + rounding to the
 * head's dtype) L. The logits without it, at most |z| + L, are rounded, perhaps what is added to
 * them, and then the sum: e += (rounding to the logits dtype) (|z| + 2 L). With l = |s|
 * sum_r |B A| of a column, |w| + l stands for |w| and d_h adds sum_v |d_z| ((n(V) + n(R) + 2
 * roundings) l + 1 rounding (|w| + l)), and fp16's 2^-25 for each d_u. d_A is a sum over tokens of
 * d_u h, d_B one of d_z u, each with the errors of its factors: those of d_z, n(V) or n(H), and
 * one rounding. Upstream gradients of lse count as those of logp, but for the target. Whether a
 * prediction is correct, and which it is, is compared exactly, unless the target's logit and the
 * largest other one (of argmax: the two largest ones) are within 2 e of each other, or within 8 u
 * once they are scaled and capped. More such tokens than a tenth (of 16 bits a third, on GPUs three
 * quarters) and one fail the case: it would say too little.
 */
#include "loss/linear_case.h"

struct scale {
    double u, nv, nt, e, f, cap, lambda; /* as in the essay */
    double tiny;                         /* of d_z */
    double terms, heavy;                 /* 4, or 5 with class weights; loss_heaviest() */
};

static double roundoff(colo_dtype_t dtype)
{
    return dtype == COLO_F64   ? 0x1p-53
           : dtype == COLO_F32 ? 0x1p-24
           : dtype == COLO_F16 ? 0x1p-11
                               : 0x1p-8;
}

/* What a rounding may add besides: half the distance of fp16's subnormals. */
static double tiny(colo_dtype_t dtype)
{
    return dtype == COLO_F16 ? 0x1p-25 : 0;
}

static double upstream_at(const linear_case_t *c, int d, int k, int64_t t, int64_t valid)
{
    bool asked[LOSS_OUTS];
    loss_wanted(&c->config.logprob, asked);
    double g = asked[k] ? c->factor[k] * (c->arrays ? c->up[d][k][t] : 1) : 0;
    return c->mean ? valid ? g / (double)valid : 0 : g;
}

static bool has_lora(const linear_case_t *c)
{
    return c->config.lora > 0;
}

/* sum_r |s B A| of a column, element @k */
static double narrow_size(const linear_case_t *c, int64_t v, int64_t k)
{
    double size = 0;
    for (int64_t r = 0; r < LINEAR_RANK && has_lora(c); r++)
        size += fabs(c->lora_scale * c->lora_b[v * LINEAR_RANK + r] * c->lora_a[r * c->hidden + k]);
    return size;
}

/* W + s B A */
static double *whole_weight(const linear_case_t *c)
{
    const int64_t V = c->vocab, H = c->hidden;
    double *w = calloc((size_t)(V * H) + 1, sizeof *w);
    for (int64_t i = 0; i < V * H; i++) {
        w[i] = c->w[i];
        for (int64_t r = 0; r < LINEAR_RANK && has_lora(c); r++)
            w[i] += c->lora_scale * c->lora_b[i / H * LINEAR_RANK + r] * c->lora_a[r * H + i % H];
    }
    return w;
}

/* @w: whole_weight() */
static ref_linear_t ref_of(const linear_case_t *c, int d, const double *w, double *g[LOSS_UPS],
                           int64_t *valid)
{
    loss_case_t like = {.config = c->config.logprob, .class_weight = c->class_weight};
    *valid = 0;
    for (int64_t t = 0; t < c->tokens; t++)
        *valid += c->targets[d][t] >= 0 && c->targets[d][t] < c->vocab &&
                  c->targets[d][t] != c->config.logprob.ignore_index;
    for (int k = 0; k < LOSS_UPS; k++) {
        g[k] = calloc((size_t)c->tokens + 1, sizeof(double));
        for (int64_t t = 0; t < c->tokens; t++)
            g[k][t] = upstream_at(c, d, k, t, *valid);
    }
    return (ref_linear_t){.opts = loss_case_opts(&like, -1),
                          .tokens = c->tokens,
                          .vocab = c->vocab,
                          .hidden = c->hidden,
                          .h = c->h[d],
                          .w = w,
                          .b = c->has_bias ? c->b : NULL,
                          .targets = c->targets[d],
                          .support = c->support,
                          .temperature = c->config.logprob.has_temperature ? c->temperature : NULL,
                          .g = {c->factor[0] != 0 ? g[0] : NULL, g[1],
                                c->config.logprob.want_loss && c->factor[2] != 0 ? g[2] : NULL,
                                c->config.logprob.want_lse ? g[3] : NULL}};
}

static double steps_of(const linear_case_t *c, int64_t terms)
{
    bool blocks = c->dtype != COLO_F64;
    return (blocks ? 0x1p-24 : 0x1p-53) * (double)((blocks && terms > 128 ? 128 : terms) + 2);
}

static struct scale scale_of(const linear_case_t *c, const ref_linear_t *in,
                             const ref_linear_result_t *ref)
{
    const int64_t V = c->vocab, H = c->hidden;
    struct scale s = {.u = c->dtype == COLO_F64 ? 0x1p-53 : 0x1p-24};
    double most = 0, top = 0, largest = 0, narrow = 0;
    for (int64_t t = 0; t < c->tokens; t++)
        for (int64_t v = 0; v < V && !ref->rows[t].ignored; v++) {
            double a = in->b ? fabs(in->b[v]) : 0;
            double l = 0;
            for (int64_t k = 0; k < H; k++) {
                a += fabs(in->h[t * H + k] * c->w[v * H + k]);
                l += fabs(in->h[t * H + k]) * narrow_size(c, v, k);
            }
            most = a > most ? a : most;
            narrow = l > narrow ? l : narrow;
            top = fabs(ref->z[t * V + v]) > top ? fabs(ref->z[t * V + v]) : top;
        }
    s.nv = steps_of(c, V);
    s.nt = steps_of(c, c->tokens);
    s.e = steps_of(c, H) * most + roundoff(c->config.logits_dtype) * top;
    if (has_lora(c))
        s.e += (steps_of(c, H) + steps_of(c, LINEAR_RANK) + roundoff(c->dtype)) * narrow +
               roundoff(c->config.logits_dtype) * (top + 2 * narrow);
    double coldest = 1;
    for (int64_t t = 0; t < c->tokens && in->temperature; t++)
        coldest = in->temperature[t] < coldest ? in->temperature[t] : coldest;
    s.f = fabs(in->opts.scale / in->opts.temperature) / coldest;
    s.cap = in->opts.softcap / in->opts.temperature / coldest; /* of x */
    s.lambda = in->opts.z_loss;
    s.terms = in->opts.class_weight ? 5 : 4;
    s.heavy = loss_heaviest(in->opts.class_weight, V);
    for (int k = 0; k < LOSS_UPS; k++)
        for (int64_t t = 0; t < c->tokens && in->g[k]; t++)
            largest = fabs(in->g[k][t]) > largest ? fabs(in->g[k][t]) : largest;
    s.tiny = tiny(c->dtype) * largest * s.f / 64;
    return s;
}

static double scaled(const ref_linear_t *in, double z)
{
    const double y = in->opts.scale * z, cap = in->opts.softcap;
    return (cap > 0 ? cap * tanh(y / cap) : y) / in->opts.temperature;
}

/* Do errors of the logits @z of one token decide whether the largest is that of @target? */
static bool is_close_call(const linear_case_t *c, const ref_linear_t *in, const double *z,
                          int64_t target, const struct scale *s)
{
    int64_t best = -1;
    for (int64_t v = 0; v < c->vocab; v++)
        if (v != target && (best < 0 || scaled(in, z[v]) > scaled(in, z[best])))
            best = v;
    if (target < 0 || target >= c->vocab || best < 0)
        return false;
    const double a = scaled(in, z[best]), b = scaled(in, z[target]);
    return fabs(z[best] - z[target]) <= 2 * s->e || fabs(a - b) <= 8 * s->u * fabs(b);
}

static void compare_outputs(const linear_case_t *c, const char *label, int d, int64_t t,
                            const ref_logprob_row_t *ref, bool close, bool tie,
                            const struct scale *s)
{
    const double want[LOSS_OUTS] = {ref->logp,   ref->entropy,
                                    ref->loss,   ref->ignored ? 0 : ref->lse,
                                    ref->sum_p2, ref->mean},
                 lse = fabs(ref->lse);
    bool asked[LOSS_OUTS];
    loss_wanted(&c->config.logprob, asked);
    double D = 1 + log((double)c->vocab) + ref->range, u = s->u;
    if (c->dtype == COLO_F64) {
        u *= (double)c->vocab + 16;
        D += 4 * ref->top;
    }
    for (int r = 0; r < c->ranks; r++) {
        int index = r + c->ranks * d, first = c->ranks * d;
        for (int k = 0; k < LOSS_OUTS; k++) {
            double tol = s->terms * u * (D + s->lambda * lse * (lse + D));
            tol += k == 1 ? 2 * s->f * s->e * D
                          : 2 * s->f * s->e * (1 + 2 * s->lambda * (lse + s->f * s->e));
            tol = tol * (k == 2 ? s->heavy : 1) + u * fabs(want[k]);
            if (k == 4)
                tol = (2 * s->terms * u * D + 4 * s->f * s->e + u) * want[k];
            if (ref->ignored)
                tol = 0;
            if (asked[k] && !near(c->out[index][k][t], want[k], tol))
                fail_msg("%s: rank %d, token %d: %s is %.17g, expected %.17g within %g", label,
                         index, (int)t, loss_out_names[k], c->out[index][k][t], want[k], tol);
            if (asked[k] && memcmp(&c->out[index][k][t], &c->out[first][k][t], sizeof(double)))
                fail_msg("%s: ranks %d and %d differ in %s of token %d", label, first, index,
                         loss_out_names[k], (int)t);
        }
        if (c->config.logprob.has_class_weight && c->weight[index][t] != ref->weight)
            fail_msg("%s: rank %d, token %d: weight is %.9g, expected %.9g", label, index, (int)t,
                     c->weight[index][t], ref->weight);
        if (c->config.logprob.want_correct && !close && c->correct[index][t] != ref->correct)
            fail_msg("%s: rank %d, token %d: correct is %d", label, index, (int)t,
                     c->correct[index][t]);
        if (c->config.logprob.want_argmax && !tie && c->argmax[index][t] != ref->best)
            fail_msg("%s: rank %d, token %d: argmax is %d, expected %d", label, index, (int)t,
                     (int)c->argmax[index][t], (int)ref->best);
    }
}

/* s_tv of the essay */
static double slack_of(const linear_case_t *c, const ref_linear_t *in,
                       const ref_linear_result_t *ref, int64_t t, int64_t v, const struct scale *s)
{
    const ref_logprob_row_t *row = &ref->rows[t];
    const double h = row->entropy, lse = fabs(row->lse), dz = fabs(ref->dz[t * c->vocab + v]);
    const double gp = in->g[0] ? fabs(in->g[0][t]) : 0, gs = in->g[3] ? fabs(in->g[3][t]) : 0,
                 gh = fabs(in->g[1][t]), gl = in->g[2] ? s->heavy * fabs(in->g[2][t]) : 0;
    double D = 1 + log((double)c->vocab) + row->range, u = s->u;
    if (c->dtype == COLO_F64) {
        u *= (double)c->vocab + 16;
        D += 4 * row->top;
    }
    const double lp = scaled(in, ref->z[t * c->vocab + v]) /
                          (in->temperature ? in->temperature[t] : 1) -
                      row->lse,
                 p = exp(lp);
    double moves = 2 * (gp + gs) + gh * (2 * fabs(lp + h) + 2 + 2 * h) +
                   gl * (2 + 2 * s->lambda * (1 + 2 * lse));
    double G = gp + gs + gh * D + gl * (1 + 2 * s->lambda * lse);
    double constant = v == in->targets[t] ? gp + gl : 0;
    return s->f * s->f * s->e * p * moves + (s->cap > 0 ? 2 * s->f * s->e / s->cap * dz : 0) +
           s->terms * u * (s->f * (p * G * D + constant) + dz);
}

/* d_hidden as it must be on rank (r, d) for token @t: the sum over the vocabulary, or this part */
static void compare_d_hidden(const linear_case_t *c, const char *label, int d, int64_t t,
                             const ref_linear_t *in, const ref_linear_result_t *ref,
                             const struct scale *s)
{
    const int64_t V = c->vocab, H = c->hidden, slice = c->tokens / c->ranks;
    const double narrow = roundoff(c->dtype);
    for (int r = 0; r < c->ranks; r++)
        for (int64_t k = 0; k < H; k++) {
            bool partial = c->config.d_hidden == COLO_D_HIDDEN_PARTIAL;
            double want = 0, tol = 0;
            for (int64_t v = 0; v < V && !ref->rows[t].ignored; v++) {
                const double l = narrow_size(c, v, k);
                double dz = ref->dz[t * V + v], w = in->w[v * H + k];
                if (partial && (v < c->start[r] || v >= c->start[r] + c->columns[r]))
                    continue;
                want += dz * w;
                w = fabs(c->w[v * H + k]) + l;
                tol += (slack_of(c, in, ref, t, v, s) + narrow * fabs(dz) + s->tiny) * w +
                       s->nv * fabs(dz * w);
                /* each rank's part is rounded, and it may be larger than the sum */
                tol += narrow * fabs(dz * w);
                if (has_lora(c))
                    tol += fabs(dz) * ((steps_of(c, LINEAR_RANK) + 2 * narrow) * l + narrow * w);
            }
            for (int64_t i = 0; i < LINEAR_RANK && has_lora(c); i++)
                tol += c->ranks * s->tiny * fabs(c->lora_a[i * H + k]);
            tol += narrow * fabs(want) + (c->ranks + 1) * tiny(c->dtype);
            int index = r + c->ranks * d;
            double got = c->d_h[index][t * H + k];
            if (c->config.d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER) {
                if (t / slice != r)
                    continue;
                got = c->d_h[index][(t - r * slice) * H + k];
            }
            if (!near(got, want, tol))
                fail_msg("%s: rank %d, token %d: d_hidden[%d] is %.17g, expected %.17g within %g",
                         label, index, (int)t, (int)k, got, want, tol);
        }
}

/* One replica's share of the tolerance of d_weight [V, H] and d_bias [V] */
static void add_slack(const linear_case_t *c, const ref_linear_t *in,
                      const ref_linear_result_t *ref, const struct scale *s, double *tw, double *tb)
{
    const int64_t V = c->vocab, H = c->hidden;
    const double narrow = roundoff(c->dtype), steps = s->u * (double)(c->tokens + c->replicas + 1);
    for (int64_t t = 0; t < c->tokens; t++) {
        for (int64_t v = 0; v < V && !ref->rows[t].ignored; v++) {
            double dz = fabs(ref->dz[t * V + v]);
            double off = slack_of(c, in, ref, t, v, s) + narrow * dz + s->tiny;
            for (int64_t k = 0; k < H; k++)
                tw[v * H + k] += (off + (s->nt + steps) * dz) * fabs(in->h[t * H + k]);
            tb[v] += off + (s->nt + steps) * dz;
        }
    }
}

/* d_lora_a of a rank of replica @d, and d_lora_b of its columns */
static void compare_lora(const linear_case_t *c, const char *label, int d, const ref_linear_t *in,
                         const ref_linear_result_t *ref, const struct scale *s)
{
    enum { R = LINEAR_RANK };
    const int64_t V = c->vocab, H = c->hidden;
    const double narrow = roundoff(c->dtype), S = fabs(c->lora_scale),
                 steps = s->nt + s->u * (double)(c->tokens + c->ranks + 1);
    COLO_AUTOFREE double *want_a = calloc((size_t)(R * H) + 1, sizeof(double)),
                         *tol_a = calloc((size_t)(R * H) + 1, sizeof(double));
    for (int64_t v = 0; v < V; v++)
        for (int64_t r = 0; r < R; r++) {
            const double b = S * fabs(c->lora_b[v * R + r]);
            double want = 0, tol = 0;
            for (int64_t k = 0; k < H; k++) {
                want += c->lora_scale * ref->d_w[v * H + k] * c->lora_a[r * H + k];
                want_a[r * H + k] += c->lora_scale * c->lora_b[v * R + r] * ref->d_w[v * H + k];
            }
            for (int64_t t = 0; t < c->tokens; t++) {
                const double dz = fabs(ref->dz[t * V + v]);
                if (ref->rows[t].ignored)
                    continue;
                const double off = slack_of(c, in, ref, t, v, s) + narrow * dz + s->tiny;
                double u = 0;
                for (int64_t k = 0; k < H; k++) {
                    const double h = fabs(in->h[t * H + k]);
                    u += S * fabs(c->lora_a[r * H + k]) * h;
                    tol_a[r * H + k] += (off + (s->nv + narrow + steps) * dz) * b * h +
                                        (v == 0 ? c->ranks * s->tiny * h : 0);
                }
                tol += (off + (steps_of(c, H) + narrow + steps) * dz) * u + dz * tiny(c->dtype);
            }
            for (int rank = 0; rank < c->ranks; rank++) {
                const double got = c->d_lora_b[rank + c->ranks * d][v * R + r];
                if (v >= c->start[rank] && v < c->start[rank] + c->columns[rank] &&
                    !near(got, want, tol + s->u * fabs(want)))
                    fail_msg("%s: rank %d: d_lora_b[%d, %d] is %.17g, expected %.17g within %g",
                             label, rank + c->ranks * d, (int)v, (int)r, got, want, tol);
            }
        }
    for (int rank = 0; rank < c->ranks; rank++)
        for (int64_t i = 0; i < R * H; i++) {
            const double got = c->d_lora_a[rank + c->ranks * d][i];
            if (!near(got, want_a[i], tol_a[i] + s->u * fabs(want_a[i])))
                fail_msg("%s: rank %d: d_lora_a[%d, %d] is %.17g, expected %.17g within %g", label,
                         rank + c->ranks * d, (int)(i / H), (int)(i % H), got, want_a[i], tol_a[i]);
        }
}

static void compare_weights(const linear_case_t *c, const char *label, const double *want_w,
                            const double *want_b, const double *tol_w, const double *tol_b)
{
    const double narrow = roundoff(c->config.d_weight_dtype) * (c->head == HEAD_RESIDENT ? 4 : 2),
                 before = c->config.d_weight_add && !c->twice ? c->prefill : 0;
    for (int64_t i = 0; i < c->vocab * c->hidden; i++) {
        double want = want_w[i] + before, tol = tol_w[i] + narrow * (fabs(want) + tol_w[i]);
        tol += narrow * fabs(before) + 2 * tiny(c->config.d_weight_dtype);
        if (!near(c->d_w[i], want, tol))
            fail_msg("%s: d_weight[%d, %d] is %.17g, expected %.17g within %g", label,
                     (int)(i / c->hidden), (int)(i % c->hidden), c->d_w[i], want, tol);
    }
    for (int64_t v = 0; c->has_bias && v < c->vocab; v++) {
        double want = want_b[v] + before;
        double tol = tol_b[v] + narrow * (fabs(want) + tol_b[v] + fabs(before)) +
                     2 * tiny(c->config.d_weight_dtype);
        if (!near(c->d_b[v], want, tol))
            fail_msg("%s: d_bias[%d] is %.17g, expected %.17g within %g", label, (int)v, c->d_b[v],
                     want, tol);
    }
}

void linear_case_compare(const linear_case_t *c, const char *label)
{
    const size_t V = (size_t)c->vocab, VH = V * (size_t)c->hidden;
    COLO_AUTOFREE double *tw = calloc(VH + 1, sizeof *tw), *tb = calloc(V + 1, sizeof *tb);
    COLO_AUTOFREE double *want_w = calloc(VH + 1, sizeof *tw), *want_b = calloc(V + 1, sizeof *tb);
    COLO_AUTOFREE double *whole = whole_weight(c);
    for (int d = 0; d < c->replicas; d++) {
        int64_t valid, invalid = 0, closes = 0;
        double *g[LOSS_UPS];
        ref_linear_t in = ref_of(c, d, whole, g, &valid);
        ref_linear_result_t ref;
        ref_linear_alloc(&in, &ref);
        ref_linear(&in, &ref);
        struct scale s = scale_of(c, &in, &ref);
        for (int64_t t = 0; t < c->tokens; t++) {
            invalid += !ref.rows[t].valid && !ref.rows[t].ignored;
            const double *z = &ref.z[t * c->vocab];
            const bool close = is_close_call(c, &in, z, in.targets[t], &s),
                       tie = is_close_call(c, &in, z, ref.rows[t].best, &s);
            closes += close || (tie && c->config.logprob.want_argmax);
            compare_outputs(c, label, d, t, &ref.rows[t], close, tie, &s);
            if (!c->config.frozen_hidden && !c->no_saved)
                compare_d_hidden(c, label, d, t, &in, &ref, &s);
        }
        /* of 16 bits: more, and still more where a LoRA's sums of them may be rounded twice */
        const double share = roundoff(c->dtype) <= 0x1p-24 ? 0.1
                             : where.mem == COLO_MEM_CUDA  ? 0.75
                                                           : 1.0 / 3;
        if ((c->config.logprob.want_correct || c->config.logprob.want_argmax) &&
            (double)closes > 1 + share * (double)c->tokens)
            fail_msg("%s: replica %d: %d of %d tokens are too close to call", label, d, (int)closes,
                     (int)c->tokens);
        add_slack(c, &in, &ref, &s, tw, tb);
        if (has_lora(c) && !c->config.frozen_lora && !c->no_saved)
            compare_lora(c, label, d, &in, &ref, &s);
        for (size_t i = 0; i < VH; i++)
            want_w[i] += ref.d_w[i];
        for (size_t i = 0; i < V; i++)
            want_b[i] += ref.d_b[i];
        for (int r = 0; r < c->ranks; r++) {
            int index = r + c->ranks * d;
            if (c->n_valid[index] != valid || c->n_invalid[index] != invalid)
                fail_msg("%s: rank %d counts %d valid and %d invalid, expected %d and %d", label,
                         index, (int)c->n_valid[index], (int)c->n_invalid[index], (int)valid,
                         (int)invalid);
            if (c->spilled[index])
                fail_msg("%s: rank %d wrote outside the memory that the queries asked for", label,
                         index);
        }
        ref_linear_free(&ref);
        for (int k = 0; k < LOSS_UPS; k++)
            free(g[k]);
    }
    if (!c->config.frozen_weight && !c->no_saved)
        compare_weights(c, label, want_w, want_b, tw, tb);
}

void linear_case_judge(linear_case_t *c, int32_t n, const char *what)
{
    colo_status_t st = linear_case_run_all(c, n);
    for (int32_t i = 0; i < n; i++) {
        const char *label = t_text("%s, case %d (W=%d D=%d T=%d V=%d H=%d %s, %d chunks)", what,
                                   (int)i, (int)c[i].ranks, (int)c[i].replicas, (int)c[i].tokens,
                                   (int)c[i].vocab, (int)c[i].hidden, colo_dtype_name(c[i].dtype),
                                   (int)c[i].config.logprob.chunk_size);
        if (st != COLO_OK)
            fail_msg("%s: %s: %s", label, colo_status_name(st), colo_last_error());
        linear_case_compare(&c[i], label);
    }
}

bool linear_case_same(const linear_case_t *a, const linear_case_t *b, bool weights)
{
    const size_t t = (size_t)a->tokens * sizeof(double), h = (size_t)a->hidden;
    bool same = true;
    for (int r = 0; r < a->ranks * a->replicas; r++) {
        bool wanted[LOSS_OUTS];
        loss_wanted(&a->config.logprob, wanted);
        for (int k = 0; k < LOSS_OUTS; k++)
            same = same && (!wanted[k] || !memcmp(a->out[r][k], b->out[r][k], t));
        same = same && !memcmp(a->d_h[r], b->d_h[r], t * h);
    }
    if (weights) {
        same = same && !memcmp(a->d_w, b->d_w, (size_t)a->vocab * h * sizeof(double));
        if (a->has_bias)
            same = same && !memcmp(a->d_b, b->d_b, (size_t)a->vocab * sizeof(double));
    }
    return same;
}
