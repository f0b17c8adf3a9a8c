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
 * - gradient: |factor| (|g_p| + |g_l| (1 + 2 lambda |lse|) + |g_h| (L + R)) times the error of p,
 *   e_s + 16 u + 4 u R, twice with the entropy's share of A; and one rounding to the dtype of the
 *   logits, as in loss_case.c
 *
 * Where x is rounded by itself (softcap, factor <= 0, f64), 4 u max|x| more in each difference.
 */
#include "gpu/loss_gpu.h"

#include "loss/passes.h"

#include <math.h>

void gpu_row_compare(const ref_logprob_opts_t *o, colo_dtype_t dtype, const double *z,
                     int64_t vocab, int64_t target, const double *got, const bool *asked,
                     const double *up, const double *dz, const char *label)
{
    static const char *const names[3] = {"logp", "entropy", "loss"};
    ref_logprob_row_t r;
    ref_logprob(o, z, vocab, target, &r);
    const double f = fabs(o->scale / o->temperature), v = (double)vocab, big = 1 + log(v),
                 u = dtype == COLO_F64 ? 0x1p-53 : 0x1p-24, lse = fabs(r.lse),
                 own = o->softcap > 0 || o->scale <= 0 || dtype == COLO_F64 ? 4 * u * r.top : 0,
                 es = (v / 256 + 64 + 4 * big) * u + own, diff = 4 * u * r.range + own;
    const double want[3] = {r.logp, r.entropy, r.loss};
    const double tol[3] = {es + diff + u * fabs(want[0]), es * (1 + 2 * big) + u * fabs(want[1]),
                           es + diff + (v / 256 + 64) * u * r.range + u * fabs(want[2]) +
                               2 * o->z_loss * lse * (es + 2 * u * r.top)};
    for (int k = 0; k < 3; k++)
        if (asked[k] && !near(got[k], want[k], tol[k]))
            fail_msg("%s: %s is %.17g, expected %.17g within %g", label, names[k], got[k], want[k],
                     tol[k]);
    if (!dz)
        return;
    double g[3], *ref = malloc((size_t)vocab * sizeof *ref);
    double *fp = malloc((size_t)vocab * sizeof *fp); /* f p, as the gradient of -logp elsewhere */
    for (int k = 0; k < 3; k++)
        g[k] = asked[k] ? up[k] : 0;
    ref_logprob_grad(o, z, vocab, target, g[0], g[1], g[2], ref);
    ref_logprob_grad(o, z, vocab, -1, -1, 0, 0, fp);
    const bool lost = !o->lenient && !r.valid && !r.ignored &&
                      (up[3] != 0); /* up[3]: is d_logp or d_loss given? */
    const double size =
        f * (fabs(g[0]) + fabs(g[2]) * (1 + 2 * o->z_loss * lse) + fabs(g[1]) * (big + r.range));
    for (int64_t j = 0; j < vocab; j++) {
        double e = lost ? NAN : ref[j], t = 2 * size * (es + 16 * u + diff);
        if (o->softcap == 0 && j != target)
            t = t * fabs(fp[j]) / (f > 0 ? f : 1) + u * fabs(e) + 2 * u * f * fabs(g[2]) / v +
                1e-37 * size;
        t += loss_grad_rounding(dtype, e, u);
        if (!near(dz[j], e, t))
            fail_msg("%s: gradient of column %lld is %.17g, expected %.17g within %g", label,
                     (long long)j, dz[j], e, t);
    }
    free(ref);
    free(fp);
}

void gpu_case_compare(const loss_case_t *c, const char *label)
{
    const ref_logprob_opts_t o = loss_case_opts(c);
    const bool asked[3] = {true, c->config.want_entropy, c->config.want_loss};
    int64_t valid = 0, invalid = 0;
    char text[160];
    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t target = c->targets[t];
        const bool legal = target >= 0 && target < c->vocab,
                   ignored = target == c->config.ignore_index;
        double got[3], up[4] = {0};
        for (int k = 0; k < 3; k++) {
            got[k] = c->out[0][k][t];
            up[k] = c->no_up[k] ? 0 : c->up[k][t];
        }
        up[3] = !c->no_up[0] || (asked[2] && !c->no_up[2]);
        valid += legal && !ignored;
        invalid += !legal && !ignored;
        snprintf(text, sizeof text, "%s: token %d", label, (int)t);
        gpu_row_compare(&o, c->dtype, c->z + t * c->vocab, c->vocab, target, got, asked, up,
                        c->forward_only ? NULL : c->dz + t * c->vocab, text);
        if (c->config.want_correct) {
            ref_logprob_row_t r;
            ref_logprob(&o, c->z + t * c->vocab, c->vocab, target, &r);
            if (c->correct[0][t] != r.correct)
                fail_msg("%s: correct is %d", text, c->correct[0][t]);
        }
    }
    if (c->n_valid[0] != valid || c->n_invalid[0] != invalid)
        fail_msg("%s: %d valid and %d invalid, expected %d and %d", label, (int)c->n_valid[0],
                 (int)c->n_invalid[0], (int)valid, (int)invalid);
    if (c->pad_worst != 0)
        fail_msg("%s: a padding column or a gap was written: %g", label, c->pad_worst);
}

/* ---- running ---- */

typedef struct buffers {
    unsigned char *z, *dz; /* device, at the shifted start */
    void *base[2], *out[3], *up[3], *correct, *counts, *targets;
} buffers_t;

/* Uploads one shard: columns [start, start + cols) of the case, padding where there is no column.
 */
static void upload(const loss_case_t *c, int r, const int64_t *shift, buffers_t *b)
{
    const int64_t cols = c->columns[r], stride = cols + c->row_gap, n = c->tokens * stride;
    const int64_t elem = (int64_t)colo_dtype_size(c->dtype);
    unsigned char *host = malloc((size_t)((n + 1) * elem));
    *b = (buffers_t){0};
    for (int m = 0; m < 2; m++) {
        for (int64_t i = 0; i < n; i++) {
            int64_t t = i / stride, j = i % stride, col = c->start[r] + j;
            bool real = m == 0 && j < cols && col < c->vocab;
            loss_store(c->dtype, host, i,
                       real ? c->z[t * c->vocab + col] : loss_round(c->dtype, c->pad));
        }
        b->base[m] = gpu_put(NULL, (size_t)((n + shift[m] + 1) * elem));
        unsigned char *begin = (unsigned char *)b->base[m] + shift[m] * elem;
        assert_cuda(t_to_device(begin, host, (size_t)(n * elem)));
        *(m ? &b->dz : &b->z) = begin;
    }
    free(host);
}

static void upload_rest(const loss_case_t *c, buffers_t *b)
{
    const colo_dtype_t stat = colo_logprob_stat_dtype(c->dtype);
    double *host = malloc((size_t)(c->tokens + 1) * sizeof *host);
    for (int k = 0; k < 3; k++) {
        for (int64_t t = 0; t < c->tokens; t++)
            loss_store(stat, host, t, c->up[k][t]);
        b->up[k] = gpu_put(host, (size_t)c->tokens * colo_dtype_size(stat));
        b->out[k] = gpu_put(NULL, (size_t)c->tokens * colo_dtype_size(stat));
    }
    b->targets = gpu_put(c->targets, (size_t)c->tokens * 8);
    b->correct = gpu_put(NULL, (size_t)c->tokens);
    b->counts = gpu_put(NULL, 16);
    free(host);
}

static void fetch_rest(loss_case_t *c, const buffers_t *b)
{
    const colo_dtype_t stat = colo_logprob_stat_dtype(c->dtype);
    double *host = malloc((size_t)(c->tokens + 1) * sizeof *host);
    int64_t counts[2];
    for (int k = 0; k < 3; k++) {
        gpu_get(host, b->out[k], (size_t)c->tokens * colo_dtype_size(stat));
        for (int64_t t = 0; t < c->tokens; t++)
            c->out[0][k][t] = loss_load(stat, host, t);
    }
    gpu_get(c->correct[0], b->correct, (size_t)c->tokens);
    gpu_get(counts, b->counts, 16);
    c->n_valid[0] = counts[0];
    c->n_invalid[0] = counts[1];
    free(host);
}

static void fetch_gradient(loss_case_t *c, int r, const void *device)
{
    const int64_t cols = c->columns[r], stride = cols + c->row_gap, n = c->tokens * stride;
    unsigned char *host = malloc((size_t)(n + 1) * colo_dtype_size(c->dtype));
    gpu_get(host, device, (size_t)n * colo_dtype_size(c->dtype));
    for (int64_t i = 0; i < n; i++) {
        int64_t t = i / stride, j = i % stride, col = c->start[r] + j;
        double g = loss_load(c->dtype, host, i);
        if (j >= cols)
            c->pad_worst = g == loss_round(c->dtype, c->pad) ? c->pad_worst : INFINITY;
        else if (col < c->vocab)
            c->dz[t * c->vocab + col] = g;
        else if (g != 0)
            c->pad_worst = INFINITY;
    }
    free(host);
}

static void release(buffers_t *b)
{
    void *all[] = {b->base[0], b->base[1], b->out[0],  b->out[1], b->out[2], b->up[0],
                   b->up[1],   b->up[2],   b->correct, b->counts, b->targets};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(all[i]);
}

static colo_logprob_upstream_t upstream(const loss_case_t *c, const buffers_t *b)
{
    return (colo_logprob_upstream_t){
        .d_logp = c->no_up[0] ? NULL : b->up[0],
        .d_entropy = c->config.want_entropy && !c->no_up[1] ? b->up[1] : NULL,
        .d_loss = c->config.want_loss && !c->no_up[2] ? b->up[2] : NULL,
    };
}

static colo_logprob_out_t outputs(const loss_case_t *c, const buffers_t *b)
{
    return (colo_logprob_out_t){
        .logp = b->out[0],
        .entropy = c->config.want_entropy ? b->out[1] : NULL,
        .loss = c->config.want_loss ? b->out[2] : NULL,
        .correct = c->config.want_correct ? b->correct : NULL,
        .n_valid = b->counts,
        .n_invalid = (int64_t *)b->counts + 1,
    };
}

void gpu_case_run(loss_case_t *c, const int64_t *shift)
{
    static const int64_t none[2] = {0, 0};
    size_t stat_bytes, workspace_bytes;
    colo_comm_t *self = NULL;
    buffers_t b;
    c->pad_worst = 0;
    upload(c, 0, shift ? shift : none, &b);
    upload_rest(c, &b);
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_logprob_saved_size(&c->config, c->dtype, c->tokens, &stat_bytes));
    assert_ok(colo_logprob_workspace_size(&c->config, c->dtype, c->tokens, 1, &workspace_bytes));
    void *stats = gpu_put(NULL, stat_bytes), *workspace = gpu_put(NULL, workspace_bytes);
    colo_tensor_t z = colo_tensor_cuda(b.z, c->dtype, 0, 2, (int64_t[]){c->tokens, c->columns[0]});
    colo_tensor_t target = colo_tensor_cuda(b.targets, COLO_I64, 0, 1, &c->tokens);
    z.stride[0] = c->columns[0] + c->row_gap;
    colo_tensor_t dz = z;
    dz.data = c->in_place ? b.z : b.dz;
    colo_logprob_out_t out = outputs(c, &b);
    colo_logprob_saved_t saved = {.valid = false};
    assert_ok(colo_logprob_forward(
        &c->config, &(colo_logprob_batch_t){.logits = &z, .targets = &target}, self, &out,
        c->forward_only ? NULL : &saved, c->forward_only ? NULL : stats, workspace, NULL));
    assert_cuda(cudaMemset(workspace, 0xff, workspace_bytes)); /* free after the call */
    fetch_rest(c, &b);
    if (!c->forward_only) {
        colo_logprob_upstream_t up = upstream(c, &b);
        assert_ok(colo_logprob_backward(&saved, &up, &dz, NULL));
        fetch_gradient(c, 0, dz.data);
    }
    colo_comm_destroy(&self);
    gpu_free(stats);
    gpu_free(workspace);
    release(&b);
}

/* The layout of a block as passes.h describes it. */
static colo_logprob_block_t block_of(const loss_case_t *c, bool smoothing)
{
    const int64_t elem = c->dtype == COLO_F64 ? 8 : 4, each = (c->tokens * elem + 7) / 8 * 8;
    colo_logprob_block_t b = {.m = 64, .s = 64 + each, .xt = 64 + 2 * each, .u = -1, .d = -1};
    b.bytes = 64 + 3 * each;
    if (c->config.want_entropy) {
        b.u = b.bytes;
        b.bytes += each;
    }
    if (smoothing) {
        b.d = b.bytes;
        b.bytes += each;
    }
    b.arg = -1;
    if (c->config.want_correct) {
        b.arg = b.bytes;
        b.bytes += c->tokens * 8;
    }
    return b;
}

void gpu_case_run_shards(loss_case_t *c)
{
    static const int64_t none[2] = {0, 0};
    const colo_loss_ops_t *ops = gpu_loss();
    const double eps = c->config.want_loss ? c->config.label_smoothing : 0, v = (double)c->vocab;
    buffers_t b[LOSS_RANKS];
    colo_logprob_config_t config[LOSS_RANKS];
    struct colo_logprob_pass p[LOSS_RANKS];
    const colo_logprob_block_t block = block_of(c, eps > 0);
    unsigned char *blocks = gpu_put(NULL, (size_t)(block.bytes * c->ranks));
    double *saved = gpu_put(NULL, (size_t)c->tokens * 24);
    c->pad_worst = 0;
    for (int r = 0; r < c->ranks; r++) {
        int64_t real = c->vocab - c->start[r];
        upload(c, r, none, &b[r]);
        upload_rest(c, &b[r]);
        config[r] = c->config;
        config[r].logits.vocab_start = c->start[r];
        real = real < 0 ? 0 : real < c->columns[r] ? real : c->columns[r];
        p[r] = (struct colo_logprob_pass){
            .config = config[r],
            .dtype = c->dtype,
            .d_dtype = c->dtype,
            .stat_dtype = colo_logprob_stat_dtype(c->dtype),
            .factor = c->config.logits.scale / c->config.logits.temperature,
            .smoothing = c->config.local_smoothing      ? eps * (double)real / (double)(real - 1)
                         : c->config.megatron_smoothing ? eps * v / (v - 1)
                                                        : eps,
            .own = c->config.local_smoothing ? real : 0,
            .hi = c->tokens,
            .tokens = c->tokens,
            .logits = b[r].z,
            .row_stride = c->columns[r] + c->row_gap,
            .targets = b[r].targets,
            .target_stride = 1,
            .columns = c->columns[r],
            .true_columns = real,
            .rank = r,
            .ranks = c->ranks,
            .blocks = blocks,
            .block = block,
            .header = {.start = c->start[r], .columns = real, .tokens = c->tokens},
            .out = outputs(c, &b[0]),
            .saved = saved,
            .upstream = upstream(c, &b[0]),
            .d_logits = c->in_place ? b[r].z : b[r].dz,
            .d_row_stride = c->columns[r] + c->row_gap,
        };
        assert_ok(ops->logprob_stats(&p[r], NULL));
    }
    assert_ok(ops->logprob_merge(&p[c->ranks - 1], NULL)); /* the last rank's, for rank 0 */
    fetch_rest(c, &b[0]);
    for (int r = 0; r < c->ranks; r++) {
        assert_ok(ops->logprob_grad(&p[r], NULL));
        fetch_gradient(c, r, p[r].d_logits);
    }
    for (int r = 0; r < c->ranks; r++)
        release(&b[r]);
    gpu_free(blocks);
    gpu_free(saved);
}
