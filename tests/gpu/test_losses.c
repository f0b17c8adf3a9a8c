/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_losses.c - picks and target distributions where only a GPU goes: long vocabularies, rows in
 * the order that the filter of candidates likes least, more than 2^31 logits, pointers that no
 * kernel can use. The rest is the programs of tests/loss, linked with where_gpu.c.
 */
#include "gpu/loss_gpu.h"

#include "perf/probe.h"
#include "ref/ref_topk.h"

static uint64_t rng;

enum { K = 64 };

typedef struct picks {
    colo_dtype_t dtype;
    double scale;
    void *z, *dz; /* dz NULL: forward only */
    void *stats, *workspace, *logp, *ids, *up;
    colo_topk_saved_t saved;
} topks_t;

static void topk_run(topks_t *m, int64_t tokens, int64_t vocab, int64_t k)
{
    size_t stat_bytes, workspace_bytes;
    colo_topk_config_t cfg = {COLO_TOPK_CONFIG_INIT, .logits.vocab = vocab, .k = k, .topk = true};
    const size_t wide = m->dtype == COLO_F64 ? 8 : 4;
    COLO_AUTOFREE float *ones = malloc((size_t)(tokens * k) * sizeof *ones);
    for (int64_t i = 0; i < tokens * k; i++)
        ones[i] = (float)(i % k + 1) / 64;
    cfg.logits.scale = m->scale;
    assert_ok(colo_topk_saved_size(&cfg, tokens, &stat_bytes));
    assert_ok(colo_topk_workspace_size(&cfg, m->dtype, tokens, 1, &workspace_bytes));
    m->stats = gpu_put(NULL, stat_bytes);
    m->workspace = gpu_put(NULL, workspace_bytes);
    m->logp = gpu_put(NULL, (size_t)(tokens * k) * wide);
    m->ids = gpu_put(NULL, (size_t)(tokens * k) * 8);
    m->up = gpu_put(ones, (size_t)(tokens * k) * 4);
    colo_tensor_t zt = colo_tensor_cuda(m->z, m->dtype, 0, 2, (int64_t[]){tokens, vocab}), dt = zt;
    dt.data = m->dz;
    const colo_dtype_t stat = m->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    const colo_topk_out_t out = {COLO_TOPK_OUT_INIT,
                                 .logp = T_CUDA_TENSOR(m->logp, stat, 0, tokens, k),
                                 .ids = T_CUDA_TENSOR(m->ids, COLO_I64, 0, tokens, k)};
    const colo_topk_upstream_t d_out = {COLO_TOPK_UPSTREAM_INIT,
                                        .d_logp = T_CUDA_TENSOR(m->up, stat, 0, tokens, k)};
    m->saved = (colo_topk_saved_t){COLO_TOPK_SAVED_INIT};
    assert_ok(colo_topk_forward(&cfg, &(colo_topk_batch_t){COLO_TOPK_BATCH_INIT, .logits = &zt},
                                t_self(), &out, &m->saved, m->stats, m->workspace, NULL));
    if (m->dz)
        assert_ok(colo_topk_backward(&m->saved, &d_out, &dt, NULL));
}

static void topk_done(topks_t *m)
{
    void *all[] = {m->stats, m->workspace, m->logp, m->ids, m->up};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(all[i]);
}

static double *fetch_row(const void *base, int64_t t, int64_t vocab)
{
    COLO_AUTOFREE uint16_t *raw = malloc((size_t)vocab * 2);
    double *row = malloc((size_t)vocab * sizeof *row);
    gpu_get(raw, (const char *)base + t * vocab * 2, (size_t)vocab * 2);
    for (int64_t j = 0; j < vocab; j++)
        row[j] = loss_load(COLO_BF16, raw, j);
    return row;
}

/* Row @t, of @vocab logits @z: ids exactly; logp within what loss_gpu.c derives, for sums of which
 * a thread adds one of @per terms; in f64 it is the serial sum here that errs. Gives the ids and
 * the tolerance. */
static double check_picks(const topks_t *m, const double *z, int64_t vocab, int64_t t, int64_t k,
                          int64_t per, int64_t *want, const char *label)
{
    const ref_logprob_opts_t o = {.temperature = 1, .scale = m->scale, .ignore_index = INT64_MIN};
    const colo_dtype_t stat = m->dtype == COLO_F64 ? COLO_F64 : COLO_F32;
    const size_t wide = colo_dtype_size(stat);
    int64_t got[COLO_TOPK_MAX];
    double logp[COLO_TOPK_MAX], top = -INFINITY, low = INFINITY, sum = 0;
    gpu_get(got, (int64_t *)m->ids + t * k, (size_t)k * 8);
    gpu_get(logp, (char *)m->logp + (size_t)(t * k) * wide, (size_t)k * wide);
    ref_topk_largest(&o, z, vocab, k, want);
    for (int64_t j = 0; j < vocab; j++) {
        const double x = m->scale * z[j];
        top = x > top ? x : top;
        low = x < low && x > -INFINITY ? x : low;
    }
    for (int64_t j = 0; j < vocab; j++)
        sum += exp(m->scale * z[j] - top);
    const double u = stat == COLO_F64 ? 0x1p-53 : 0x1p-24, l = 1 + log((double)vocab),
                 terms = stat == COLO_F64 ? (double)vocab : (double)vocab / (double)per + 64,
                 tol = (terms + 4 * l) * u + 8 * u * (top - low);
    for (int64_t i = 0; i < k; i++) {
        const double x = m->scale * z[want[i]], exact = x - top - log(sum),
                     found = loss_load(stat, logp, i);
        if (got[i] != want[i])
            fail_msg("%s: row %d, pick %d: %lld, expected %lld", label, (int)t, (int)i,
                     (long long)got[i], (long long)want[i]);
        if (x == -INFINITY ? found != x : !(fabs(found - exact) <= tol + u * fabs(exact)))
            fail_msg("%s: row %d, pick %d: logp %.17g, expected %.17g within %g", label, (int)t,
                     (int)i, found, exact, tol);
    }
    return tol;
}

/* The gradient with bf16's rounding, too. */
static void topk_check(const topks_t *m, int64_t t, int64_t vocab, int64_t k)
{
    const ref_logprob_opts_t o = {.temperature = 1, .scale = 1, .ignore_index = INT64_MIN};
    COLO_AUTOFREE double *z = fetch_row(m->z, t, vocab), *dz = fetch_row(m->dz, t, vocab),
                         *one = malloc((size_t)vocab * sizeof *one);
    double sum = 0;
    int64_t want[COLO_TOPK_MAX];
    const double tol = check_picks(m, z, vocab, t, k, 256, want, "long vocabulary");
    for (int64_t i = 0; i < k; i++)
        sum += (double)(i + 1) / 64;
    ref_logprob_grad(&o, z, vocab, -1, (double[REF_UPS]){-sum}, one); /* +sum p in every column */
    for (int64_t j = 0; j < vocab; j++)
        one[j] = -one[j];
    for (int64_t i = 0; i < k; i++)
        one[want[i]] += (double)(i + 1) / 64;
    for (int64_t j = 0; j < vocab; j++)
        if (!(fabs(dz[j] - one[j]) <= 2 * sum * tol + 0x1p-8 * fabs(one[j])))
            fail_msg("row %lld, column %lld: gradient %g, expected %g", (long long)t, (long long)j,
                     dz[j], one[j]);
}

/* bf16 normals tie all the time; odd widths put rows at every place of a 16-byte word */
T_CASE(the_largest_of_a_long_vocabulary_are_exact)
{
    static const int64_t widths[] = {151936, 200003, 65537, 257, 256}, ks[] = {1, K, COLO_TOPK_MAX};
    for (int w = 0; w < 5; w++)
        for (int i = 0; i < 3; i++) {
            const int64_t tokens = 6, vocab = widths[w];
            const size_t bytes = (size_t)(tokens * vocab * 2 + 15) / 16 * 16;
            topks_t m = {.dtype = COLO_BF16, .scale = 1};
            m.z = gpu_put(NULL, bytes);
            m.dz = gpu_put(NULL, bytes);
            assert_cuda(colo_k_probe_fill(m.z, (int64_t)bytes, 3, t_rand(&rng), NULL));
            topk_run(&m, tokens, vocab, ks[i]);
            for (int64_t t = 0; t < tokens; t += 5)
                topk_check(&m, t, vocab, ks[i]);
            topk_done(&m);
            gpu_free(m.z);
            gpu_free(m.dz);
        }
}

/* ---- orders that a search with a bar likes least ---- */

enum { ASCENDING, DESCENDING, EQUAL, SAWTOOTH, TIES, FEW_FINITE, ORDERS, LONG = 20001 };

static double value_of(int order, int64_t j)
{
    switch (order) {
    case ASCENDING: /* no column is below what comes before it */
        return (double)j * 1e-3 - 10;
    case DESCENDING:
        return 10 - (double)j * 1e-3;
    case SAWTOOTH:
        return (double)(j % 1000) * 1e-2 + (double)(j / 1000) * 1e-3;
    case TIES:
        return (double)(j * 7919 % 1013 % 3);
    case FEW_FINITE: /* fewer than k */
        return j % 997 == 5 ? (double)j * 1e-4 : -INFINITY;
    default:
        return -2.5;
    }
}

T_CASE(rows_in_any_order_have_exact_picks)
{
    static const double scales[] = {1, -0.5};
    static const int64_t ks[] = {1, K, COLO_TOPK_MAX};
    COLO_AUTOFREE double *z = malloc(ORDERS * LONG * sizeof *z);
    COLO_AUTOFREE void *raw = malloc(ORDERS * LONG * 8);
    for (int d = 0; d < 4; d++)
        for (int s = 0; s < 2; s++)
            for (int i = 0; i < 3; i++) {
                /* under a negative scale -inf would be +inf, which leaves nothing to look at */
                const int64_t rows = scales[s] > 0 ? ORDERS : FEW_FINITE;
                for (int64_t n = 0; n < rows * LONG; n++) {
                    z[n] = loss_round(loss_dtypes[d], value_of((int)(n / LONG), n % LONG));
                    loss_store(loss_dtypes[d], raw, n, z[n]);
                }
                topks_t m = {.dtype = loss_dtypes[d], .scale = scales[s]};
                m.z = gpu_put(raw, (size_t)(rows * LONG) * colo_dtype_size(loss_dtypes[d]));
                topk_run(&m, rows, LONG, ks[i]);
                const char *label = t_text("%s, scale %g, k %d", colo_dtype_name(loss_dtypes[d]),
                                           scales[s], (int)ks[i]);
                int64_t want[COLO_TOPK_MAX];
                for (int64_t t = 0; t < rows; t++)
                    check_picks(&m, z + t * LONG, LONG, t, ks[i], 128, want, label);
                topk_done(&m);
                gpu_free(m.z);
            }
}

T_CASE(the_same_logits_give_the_same_bits)
{
    enum { TOKENS = 64, VOCAB = 40000 };
    topks_t m = {.dtype = COLO_BF16, .scale = 1, .z = gpu_put(NULL, TOKENS * VOCAB * 2)};
    float logp[2][TOKENS * K];
    int64_t ids[2][TOKENS * K];
    assert_cuda(colo_k_probe_fill(m.z, TOKENS * VOCAB * 2, 0.1f, t_rand(&rng), NULL));
    for (int run = 0; run < t_scaled(20) + 1; run++) {
        topk_run(&m, TOKENS, VOCAB, K);
        gpu_get(logp[run > 0], m.logp, sizeof logp[0]);
        gpu_get(ids[run > 0], m.ids, sizeof ids[0]);
        topk_done(&m);
        if (run > 0) {
            assert_memory_equal(logp[0], logp[1], sizeof logp[0]);
            assert_memory_equal(ids[0], ids[1], sizeof ids[0]);
        }
    }
    gpu_free(m.z);
}

/* ---- more than 2^31 logits ---- */

/* The same memory is teacher at temperature 1 and student at 2: both distributions are known. */
static void distill_check(const void *z, const void *dz, const float *ce, const float *kl,
                          int64_t t, int64_t vocab)
{
    double *x = fetch_row(z, t, vocab), *g = fetch_row(dz, t, vocab), top = -INFINITY, sum = 0,
           sum_v = 0, want_ce = 0, want_kl = 0;
    float got[2];
    for (int64_t j = 0; j < vocab; j++)
        top = x[j] > top ? x[j] : top;
    for (int64_t j = 0; j < vocab; j++) {
        sum += exp((x[j] - top) / 2);
        sum_v += exp(x[j] - top);
    }
    for (int64_t j = 0; j < vocab; j++) {
        const double lp = (x[j] - top) / 2 - log(sum), lq = x[j] - top - log(sum_v);
        want_ce -= exp(lq) * lp;
        want_kl += exp(lq) * (lq - lp);
    }
    gpu_get(&got[0], ce + t, sizeof got[0]);
    gpu_get(&got[1], kl + t, sizeof got[1]);
    /* the sums of a row: (V/256 + 64) u each, times differences of at most 40 here */
    const double tol = ((double)vocab / 256 + 64) * 0x1p-24 * 40;
    if (!(fabs(got[0] - want_ce) <= tol) || !(fabs(got[1] - want_kl) <= tol))
        fail_msg("row %lld: ce %g, kl %g, expected %g, %g within %g", (long long)t, got[0], got[1],
                 want_ce, want_kl, tol);
    for (int64_t j = 0; j < vocab; j++) {
        const double p = exp((x[j] - top) / 2) / sum, q = exp(x[j] - top) / sum_v, e = (p - q) / 2;
        if (!(fabs(g[j] - e) <= tol * (p + q) + 0x1p-8 * fabs(e)))
            fail_msg("row %lld, column %lld: gradient %g, expected %g", (long long)t, (long long)j,
                     g[j], e);
    }
    free(x);
    free(g);
}

/* Of z and w [V], in fp64: D, and dD/dx [V] */
static double divergence(colo_divergence_t kind, const float *z, const float *w, int64_t vocab,
                         double *dx, double *alpha)
{
    double mz = -INFINITY, mw = -INFINITY, sz = 0, sw = 0, d = 0, mean = 0;
    for (int64_t j = 0; j < vocab; j++) {
        mz = fmax(mz, z[j]);
        mw = fmax(mw, w[j]);
    }
    for (int64_t j = 0; j < vocab; j++) {
        sz += exp(z[j] - mz);
        sw += exp(w[j] - mw);
    }
    *alpha = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t j = 0; j < vocab; j++) {
            const double lp = z[j] - mz - log(sz), lq = w[j] - mw - log(sw), p = exp(lp),
                         q = exp(lq), m = (p + q) / 2;
            double by_logp = p * ((p > q) - (p < q)) / 2, term = fabs(p - q) / 2;
            if (kind == COLO_DIVERGENCE_FORWARD_KL) {
                by_logp = -q;
                term = q * (lq - lp) - q + p;
            } else if (kind == COLO_DIVERGENCE_REVERSE_KL) {
                by_logp = p * (lp - lq);
                term = by_logp - p + q;
            } else if (kind == COLO_DIVERGENCE_JSD) {
                by_logp = p * log(p / m) / 2;
                term = by_logp + q * log(q / m) / 2;
            }
            d += pass ? 0 : term;
            mean += pass ? 0 : by_logp;
            *alpha += pass ? 0 : fmin(p, q);
            if (pass)
                dx[j] = (by_logp - p * mean) / (kind == COLO_DIVERGENCE_ACCEPTANCE ? *alpha : 1);
        }
    return kind == COLO_DIVERGENCE_ACCEPTANCE ? -log1p(-d) : d;
}

/* Bounds: the sums of a row are off by (V/256 + 64) u each, log(p/q) by eta = 4 u (range of x), so
 * D by 2 eta sqrt(2 D) or, of the first order, eta; where D is not small that is (V/256 + 64) u
 * times differences of at most 40. TV's sign of a column is not known where |log(p/q)| < eta. */
T_CASE(divergences_of_a_long_vocabulary_are_right_also_near_0)
{
    static const int64_t widths[] = {151936, 65537};
    static const double deltas[] = {1, 0x1p-10, 0x1p-14};
    enum { ROWS = 3 };
    for (int i = 0; i < 6; i++) {
        const int64_t vocab = widths[i % 2];
        const double delta = deltas[i / 2];
        const size_t n = (size_t)(ROWS * vocab);
        COLO_AUTOFREE float *z = malloc(n * sizeof *z), *w = malloc(n * sizeof *w),
                            *dz = malloc(n * sizeof *dz);
        COLO_AUTOFREE double *dx = malloc((size_t)vocab * sizeof *dx);
        for (size_t j = 0; j < n; j++) {
            z[j] = (float)(floor(2 * loss_normal(&rng) * 0x1p14) * 0x1p-14);
            w[j] = (float)(z[j] + 3 + floor(8 * delta * loss_normal(&rng) * 0x1p14) * 0x1p-17);
        }
        GPU_AUTOFREE void *gz = gpu_put(z, n * 4), *gw = gpu_put(w, n * 4),
                          *gd = gpu_put(NULL, n * 4), *kl = gpu_put(NULL, ROWS * 4),
                          *up = gpu_put((float[ROWS]){1, 1, 1}, ROWS * 4);
        colo_tensor_t zt = colo_tensor_cuda(gz, COLO_F32, 0, 2, (int64_t[]){ROWS, vocab}), wt = zt,
                      dt = zt;
        wt.data = gw;
        dt.data = gd;
        for (colo_divergence_t kind = COLO_DIVERGENCE_FORWARD_KL;
             kind <= COLO_DIVERGENCE_ACCEPTANCE; kind++) {
            const colo_distill_config_t cfg = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = vocab,
                                               .divergence = kind};
            colo_distill_saved_t saved = {COLO_DISTILL_SAVED_INIT};
            size_t stat_bytes, workspace_bytes;
            float got[ROWS];
            assert_ok(colo_distill_saved_size(&cfg, ROWS, &stat_bytes));
            assert_ok(colo_distill_workspace_size(&cfg, COLO_F32, ROWS, 1, &workspace_bytes));
            GPU_AUTOFREE void *stats = gpu_put(NULL, stat_bytes),
                              *workspace = gpu_put(NULL, workspace_bytes);
            const colo_distill_batch_t batch = {COLO_DISTILL_BATCH_INIT, .logits = &zt,
                                                .targets = &wt};
            const colo_distill_out_t out = {COLO_DISTILL_OUT_INIT,
                                            .kl = T_CUDA_TENSOR(kl, COLO_F32, 0, ROWS)};
            const colo_distill_upstream_t d_out = {COLO_DISTILL_UPSTREAM_INIT,
                                                   .d_kl = T_CUDA_TENSOR(up, COLO_F32, 0, ROWS)};
            assert_ok(
                colo_distill_forward(&cfg, &batch, t_self(), &out, &saved, stats, workspace, NULL));
            assert_ok(colo_distill_backward(&saved, &d_out, &dt, NULL));
            gpu_get(got, kl, sizeof got);
            gpu_get(dz, gd, n * 4);
            for (int t = 0; t < ROWS; t++) {
                double alpha;
                const float *zr = z + t * vocab, *wr = w + t * vocab;
                const double u = 0x1p-24, range = 24, eta = 4 * u * range,
                             want = divergence(kind, zr, wr, vocab, dx, &alpha),
                             by = kind == COLO_DIVERGENCE_ACCEPTANCE ? alpha : 1,
                             sums = ((double)vocab / 256 + 64) * u,
                             first = kind >= COLO_DIVERGENCE_TV ? eta : 2 * eta * sqrt(2 * want),
                             tol = sums * want * (delta == 1 ? 40 : 1) / by + first / by + u * want;
                if (!(fabs(got[t] - want) <= tol))
                    fail_msg("V %d, delta %g, divergence %d: %.9g, expected %.9g within %g",
                             (int)vocab, delta, (int)kind, got[t], want, tol);
                double sum = 0, sum_w = 0;
                for (int64_t j = 0; j < vocab; j++) {
                    sum += exp(zr[j]);
                    sum_w += exp(wr[j]);
                }
                for (int64_t j = 0; j < vocab; j++) {
                    const double p = exp(zr[j]) / sum, q = exp(wr[j]) / sum_w, ratio = log(p / q),
                                 off = kind ? p * (1 + fabs(ratio) + fabs(want)) : p + q,
                                 flips = kind >= COLO_DIVERGENCE_TV && fabs(ratio) < 2 * eta,
                                 allowed = (2 * eta + 2 * sums) * off / by + flips * p / by +
                                           u * fabs(dx[j]);
                    if (!(fabs(dz[t * vocab + j] - dx[j]) <= allowed))
                        fail_msg("V %d, delta %g, divergence %d, column %d: gradient %.9g, "
                                 "expected %.9g within %g",
                                 (int)vocab, delta, (int)kind, (int)j, dz[t * vocab + j], dx[j],
                                 allowed);
                }
            }
        }
    }
}

T_CASE(more_than_two_to_the_31_logits_are_right)
{
    static const int64_t look[] = {0, 16383, 16384, 16999};
    const int64_t tokens = 17000, vocab = 131072;
    const size_t bytes = (size_t)(tokens * vocab) * 2;
    topks_t m = {.dtype = COLO_BF16, .scale = 1};
    if (t_scaled(100) < 100)
        skip();
    assert_cuda(cudaMalloc(&m.z, bytes));
    assert_cuda(cudaMalloc(&m.dz, bytes));
    assert_cuda(colo_k_probe_fill(m.z, (int64_t)bytes, 3, t_rand(&rng), NULL));
    topk_run(&m, tokens, vocab, 8);
    for (int i = 0; i < 4; i++)
        topk_check(&m, look[i], vocab, 8);

    colo_distill_config_t cfg = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = vocab};
    colo_distill_saved_t saved = {COLO_DISTILL_SAVED_INIT};
    size_t stat_bytes, workspace_bytes;
    COLO_AUTOFREE float *ones = malloc((size_t)tokens * sizeof *ones);
    for (int64_t t = 0; t < tokens; t++)
        ones[t] = 1;
    cfg.logits.temperature = 2;
    assert_ok(colo_distill_saved_size(&cfg, tokens, &stat_bytes));
    assert_ok(colo_distill_workspace_size(&cfg, COLO_BF16, tokens, 1, &workspace_bytes));
    void *stats = gpu_put(NULL, stat_bytes), *workspace = gpu_put(NULL, workspace_bytes),
         *up = gpu_put(ones, (size_t)tokens * 4);
    float *ce = gpu_put(NULL, (size_t)tokens * 4), *kl = gpu_put(NULL, (size_t)tokens * 4);
    colo_tensor_t zt = colo_tensor_cuda(m.z, COLO_BF16, 0, 2, (int64_t[]){tokens, vocab}), dt = zt;
    dt.data = m.dz;
    const colo_distill_batch_t batch = {COLO_DISTILL_BATCH_INIT, .logits = &zt, .targets = &zt};
    const colo_distill_out_t out = {COLO_DISTILL_OUT_INIT,
                                    .ce = T_CUDA_TENSOR(ce, COLO_F32, 0, tokens),
                                    .kl = T_CUDA_TENSOR(kl, COLO_F32, 0, tokens)};
    const colo_distill_upstream_t d_out = {COLO_DISTILL_UPSTREAM_INIT,
                                           .d_kl = T_CUDA_TENSOR(up, COLO_F32, 0, tokens)};
    assert_ok(colo_distill_forward(&cfg, &batch, t_self(), &out, &saved, stats, workspace, NULL));
    assert_ok(colo_distill_backward(&saved, &d_out, &dt, NULL));
    for (int i = 0; i < 4; i++)
        distill_check(m.z, m.dz, ce, kl, look[i], vocab);
    void *all[] = {stats, workspace, up, ce, kl};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(all[i]);
    topk_done(&m);
    cudaFree(m.z);
    cudaFree(m.dz);
}

/* ---- refusals ---- */

T_CASE(pointers_that_no_kernel_can_use_are_refused)
{
    float host[8] = {0};
    const colo_topk_config_t cfg = {COLO_TOPK_CONFIG_INIT, .logits.vocab = 4, .k = 1, .topk = true};
    const colo_distill_config_t dcfg = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = 4};
    const int64_t lengths[1] = {3};
    colo_sequence_t seq = {COLO_SEQUENCE_INIT, .batch = 1, .positions = 4, .lengths = lengths};
    GPU_AUTOFREE void *z = gpu_put(host, 32), *workspace = gpu_put(NULL, 4096),
                      *logp = gpu_put(NULL, 8);
    colo_tensor_t zt = colo_tensor_cuda(z, COLO_F32, 0, 2, (int64_t[]){2, 4}), bad = zt;
    colo_tensor_t mask = colo_tensor_cuda(workspace, COLO_U8, 0, 1, (int64_t[]){4});
    bad.data = host;
    colo_topk_batch_t picks = {COLO_TOPK_BATCH_INIT, .logits = &bad};
    colo_topk_out_t out = {COLO_TOPK_OUT_INIT, .logp = T_CUDA_TENSOR(logp, COLO_F32, 0, 2, 1)};
    const colo_distill_batch_t soft = {COLO_DISTILL_BATCH_INIT, .logits = &zt, .targets = &bad};
    const colo_distill_out_t ce = {COLO_DISTILL_OUT_INIT,
                                   .ce = T_CUDA_TENSOR(logp, COLO_F32, 0, 2)};
    assert_fails(colo_topk_forward(&cfg, &picks, t_self(), &out, NULL, NULL, workspace, NULL),
                 COLO_ERR_ARG, "logits: ");
    picks.logits = &zt;
    out.logp = T_CUDA_TENSOR(host, COLO_F32, 0, 2, 1);
    assert_fails(colo_topk_forward(&cfg, &picks, t_self(), &out, NULL, NULL, workspace, NULL),
                 COLO_ERR_ARG, "out.logp: ");
    assert_fails(colo_distill_forward(&dcfg, &soft, t_self(), &ce, NULL, NULL, workspace, NULL),
                 COLO_ERR_ARG, "targets: ");
    assert_fails(colo_sequence_mask(&seq, COLO_SEQUENCE_TOKENS, &mask, NULL), COLO_ERR_ARG,
                 "tensors on a GPU need device_lengths");
    seq.device_lengths = lengths;
    assert_fails(colo_sequence_mask(&seq, COLO_SEQUENCE_TOKENS, &mask, NULL), COLO_ERR_ARG,
                 "device_lengths: ");
}

T_MAIN_AFTER(gpu_need(1), rng = t_seed(), "gpu/losses")
