/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_linear_host.c - lm_head and loss in host memory against the bare products, in one run.
 *
 *   bench-linear-host [TOKENS HIDDEN VOCAB [ROUNDS [CHUNK]]]     1024 1024 8192 9 0
 *
 * The floor are a CBLAS's own products over all tokens at once, fp32: three for a loss whose
 * gradient is made in forward, four where logits are made twice. Then the library, with products by
 * the CBLAS it finds and by its loops (COLO_GEMM). Rounds take turns, so that all see the same
 * machine; medians of CPU time, which other programs disturb least: give the CBLAS one thread
 * (OPENBLAS_NUM_THREADS=1). Log-probabilities of one way are compared with the other's.
 */
#include <colobridge.h>

#include <cblas.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COLO(expr)                                                                    \
    do {                                                                              \
        if ((expr) < 0) {                                                             \
            fprintf(stderr, "bench-linear-host: %s: %s\n", #expr, colo_last_error()); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

enum { WAYS = 2, MODES = 3, MOST = 99 };

static int64_t T = 1024, H = 1024, V = 8192, chunk;
static int repetitions = 9;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!p)
        exit(1);
    memset(p, 0, bytes);
    return p;
}

static float draw(uint64_t *s)
{
    *s = *s * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(*s >> 40) * 0x1p-23f - 1;
}

static void *values(int64_t n, colo_dtype_t dtype, float spread, uint64_t seed)
{
    void *v = memory((size_t)n * colo_dtype_size(dtype));
    for (int64_t i = 0; i < n; i++) {
        float x = spread * draw(&seed);
        uint32_t b;
        memcpy(&b, &x, 4);
        if (dtype == COLO_BF16)
            ((uint16_t *)v)[i] = (uint16_t)(b >> 16);
        else
            ((float *)v)[i] = x;
    }
    return v;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, (size_t)repetitions, sizeof *v, ascending);
    return v[repetitions / 2];
}

/* ---- the floor ---- */

static float *bare_h, *bare_w, *bare_z, *bare_dh, *bare_dw;

static void bare_logits(void)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)T, (int)V, (int)H, 1, bare_h, (int)H,
                bare_w, (int)H, 0, bare_z, (int)V);
}

static void bare_three(void)
{
    bare_logits();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)T, (int)H, (int)V, 1, bare_z,
                (int)V, bare_w, (int)H, 0, bare_dh, (int)H);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)V, (int)H, (int)T, 1, bare_z, (int)V,
                bare_h, (int)H, 1, bare_dw, (int)H);
}

/* ---- the library ---- */

typedef struct pass {
    colo_comm_t *self;
    colo_lm_head_t *head;
    colo_linear_logprob_t *linear;
    colo_tensor_t hidden, targets, weight, d_hidden, d_weight;
    float *logp;
    void *work, *buffer;
    double ms[MODES][MOST];
} way_t;

static void way_init(way_t *w, const char *gemm, colo_dtype_t dtype, void *h, void *weight,
                     int64_t *targets)
{
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H, .dtype = dtype};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    lc.logprob.logits.vocab = V;
    lc.logprob.chunk_size = chunk;
    lc.logits_dtype = dtype;
    const int64_t th[2] = {T, H}, vh[2] = {V, H};
    size_t most = 0, bytes;
    w->hidden = colo_tensor_host(h, dtype, 2, th);
    w->targets = colo_tensor_host(targets, COLO_I64, 1, &T);
    w->weight = colo_tensor_host(weight, dtype, 2, vh);
    w->d_hidden = colo_tensor_host(memory((size_t)(T * H) * 4), dtype, 2, th);
    w->d_weight = colo_tensor_host(memory((size_t)(V * H) * 4), COLO_F32, 2, vh);
    w->logp = memory((size_t)T * 4);
    setenv("COLO_GEMM", gemm, 1);
    COLO(colo_comm_create_self(&w->self));
    COLO(colo_lm_head_create(&w->head, &hc, NULL));
    COLO(colo_lm_head_bind(w->head, &w->weight, NULL, NULL));
    for (int m = 0; m < MODES; m++) { /* the largest serves all */
        lc.mode = m == 2 ? COLO_LINEAR_LOGPROB_KEEP : COLO_LINEAR_LOGPROB_LOGPROB;
        COLO(colo_linear_logprob_create(&w->linear, &lc, w->head, w->self));
        for (int p = 0; p <= COLO_LINEAR_LOGPROB_INFERENCE; p++) {
            COLO(colo_linear_logprob_workspace_size(w->linear, (colo_linear_logprob_pass_t)p, T, -1,
                                                    &bytes));
            most = bytes > most ? bytes : most;
        }
        COLO(colo_linear_logprob_saved_size(w->linear, T, -1, &bytes));
        if (m < MODES - 1)
            colo_linear_logprob_destroy(&w->linear);
    }
    colo_linear_logprob_destroy(&w->linear);
    w->work = memory(most);
    w->buffer = memory(bytes);
}

/* mode 0: loss, 1: logprob, 2: keep. Milliseconds of both ways together. */
static double step(way_t *w, int mode, const char *gemm, colo_dtype_t dtype)
{
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    lc.mode = mode == 2 ? COLO_LINEAR_LOGPROB_KEEP : COLO_LINEAR_LOGPROB_LOGPROB;
    lc.logprob.logits.vocab = V;
    lc.logprob.chunk_size = chunk;
    lc.logits_dtype = dtype;
    colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &w->hidden, &w->targets,
                                         -1, NULL};
    const colo_tensor_t logp =
        colo_tensor_host(w->logp, dtype == COLO_F64 ? COLO_F64 : COLO_F32, 1, w->targets.shape);
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &logp};
    colo_linear_logprob_upstream_t up = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = -1,
                                         .mean = true};
    colo_linear_logprob_grads_t grads = {COLO_LINEAR_LOGPROB_GRADS_INIT, &w->d_hidden, &w->d_weight,
                                         NULL};
    colo_linear_logprob_saved_t saved = {COLO_LINEAR_LOGPROB_SAVED_INIT};
    setenv("COLO_GEMM", gemm, 1);
    COLO(colo_linear_logprob_create(&w->linear, &lc, w->head, w->self));
    double from = now();
    if (mode == 0) {
        COLO(colo_linear_logprob_loss(w->linear, &batch, &up, &out, &grads, w->work, NULL));
    } else {
        COLO(
            colo_linear_logprob_forward(w->linear, &batch, &out, &saved, w->buffer, w->work, NULL));
        COLO(colo_linear_logprob_backward(w->linear, &saved, &up, &grads, w->work, NULL));
    }
    from = now() - from;
    colo_linear_logprob_destroy(&w->linear);
    return from;
}

static void compare(colo_dtype_t dtype)
{
    static const char *const gemm[WAYS] = {"cblas", "loops"};
    static const char *const modes[MODES] = {"loss", "logprob", "keep"};
    static way_t ways[WAYS];
    double three[MOST], four[MOST], off = 0;
    void *h = values(T * H, dtype, 1, 1), *weight = values(V * H, dtype, 0.05f, 2);
    int64_t *targets = memory((size_t)T * sizeof *targets);
    for (int64_t t = 0; t < T; t++)
        targets[t] = t * 7919 % V;
    memset(ways, 0, sizeof ways);
    for (int w = 0; w < WAYS; w++)
        way_init(&ways[w], gemm[w], dtype, h, weight, targets);
    for (int r = -1; r < repetitions; r++) { /* the first is not counted */
        double from = now();
        bare_three();
        double middle = now();
        bare_logits();
        if (r >= 0) {
            three[r] = middle - from;
            four[r] = now() - from;
        }
        for (int m = 0; m < MODES; m++)
            for (int w = 0; w < WAYS; w++) {
                double ms = step(&ways[w], m, gemm[w], dtype);
                if (r >= 0)
                    ways[w].ms[m][r] = ms;
            }
    }
    for (int64_t t = 0; t < T; t++)
        off = fmax(off, fabs((double)ways[0].logp[t] - (double)ways[1].logp[t]));
    const double t3 = median(three), t4 = median(four),
                 gflop = 2e-6 * (double)T * (double)H * (double)V;
    printf("%s: bare products, fp32: three %.1f ms, four %.1f ms (%.1f GFLOP/s); logp differs by "
           "%.1g at most\n",
           colo_dtype_name(dtype), t3, t4, 3 * gflop / t3, off);
    for (int m = 0; m < MODES; m++) {
        double a = median(ways[0].ms[m]), b = median(ways[1].ms[m]), floor = m == 1 ? t4 : t3;
        printf("  %-8s cblas %8.1f ms, %.2f x bare   loops %8.1f ms, %.2f x bare\n", modes[m], a,
               a / floor, b, b / floor);
    }
}

int main(int argc, char **argv)
{
    if (argc > 3) {
        T = atoll(argv[1]);
        H = atoll(argv[2]);
        V = atoll(argv[3]);
    }
    repetitions = argc > 4 ? atoi(argv[4]) : repetitions;
    chunk = argc > 5 ? atoll(argv[5]) : 0;
    if (T < 1 || H < 1 || V < 1 || T * V > INT32_MAX || repetitions < 1 || repetitions > MOST) {
        fprintf(stderr, "usage: bench-linear-host [TOKENS HIDDEN VOCAB [ROUNDS [CHUNK]]]\n");
        return 2;
    }
    bare_h = values(T * H, COLO_F32, 1, 1);
    bare_w = values(V * H, COLO_F32, 0.05f, 2);
    bare_z = memory((size_t)(T * V) * 4);
    bare_dh = memory((size_t)(T * H) * 4);
    bare_dw = memory((size_t)(V * H) * 4);
    printf("%lld tokens, hidden %lld, vocabulary %lld, chunk %lld, %d repetitions\n", (long long)T,
           (long long)H, (long long)V, (long long)chunk, repetitions);
    compare(COLO_F32);
    compare(COLO_BF16);
    return 0;
}
