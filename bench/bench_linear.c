/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_linear.c - lm_head and loss on one GPU against the bare products, in one run.
 *
 *   bench-linear [TOKENS HIDDEN VOCAB [ITERATIONS]]     8192 4096 151936 20
 *
 * The floor are cuBLAS's own products over all tokens at once (logits kept in one buffer, d_W in
 * fp32): three for a loss whose gradient is made in forward, four where logits are made twice. Then
 * the library, bf16 with bf16 logits and fp32 d_W added to. Medians. Rows of log-probability are
 * checked against fp64 sums, and modes that write logits against each other bit for bit. Then modes with 8 segments
 * of the vocabulary (docs/concepts/loss.md), if 128 divides it, and the logits path with and
 * without.
 */
#include "bench.h"

#include <colobridge.h>

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLAS(expr)                                                            \
    do {                                                                      \
        cublasStatus_t s_ = (expr);                                           \
        if (s_ != CUBLAS_STATUS_SUCCESS) {                                    \
            fprintf(stderr, "bench-linear: %s: status %d\n", #expr, (int)s_); \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

static int64_t T = 8192, H = 4096, V = 151936;
static int iterations = 20;
static cudaStream_t stream;

static void *device(const void *from, size_t bytes)
{
    void *p;
    CUDA(cudaMalloc(&p, bytes));
    if (from)
        CUDA(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    return p;
}

static uint16_t bf16(float v)
{
    uint32_t b;
    memcpy(&b, &v, 4);
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

static float wide(uint16_t v)
{
    uint32_t b = (uint32_t)v << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

static uint16_t *draw(int64_t n, float spread, uint64_t seed)
{
    uint16_t *v = malloc((size_t)n * 2);
    uint64_t s = seed;
    for (int64_t i = 0; v && i < n; i++) {
        s = s * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        v[i] = bf16(spread * ((float)(s >> 40) * 0x1p-23f - 1));
    }
    return v;
}

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median_ms(void (*fn)(void *), void *arg)
{
    cudaEvent_t event[2];
    float *ms = malloc((size_t)iterations * sizeof *ms);
    CUDA(cudaEventCreate(&event[0]));
    CUDA(cudaEventCreate(&event[1]));
    for (int i = -3; i < iterations; i++) {
        CUDA(cudaEventRecord(event[0], stream));
        fn(arg);
        CUDA(cudaEventRecord(event[1], stream));
        CUDA(cudaEventSynchronize(event[1]));
        if (i >= 0)
            CUDA(cudaEventElapsedTime(&ms[i], event[0], event[1]));
    }
    qsort(ms, (size_t)iterations, sizeof *ms, ascending);
    double m = ms[iterations / 2];
    free(ms);
    return m;
}

/* ---- the floor ---- */

typedef struct bare {
    cublasHandle_t blas;
    void *h, *w, *z, *d_h, *d_w;
} bare_t;

static void gemm(const bare_t *b, cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
                 int64_t k, const void *x, int64_t ldx, const void *y, int64_t ldy, void *out,
                 cudaDataType_t type, int64_t ldo, float beta)
{
    const float one = 1;
    BLAS(cublasGemmEx_64(b->blas, ta, tb, m, n, k, &one, x, CUDA_R_16BF, ldx, y, CUDA_R_16BF, ldy,
                         &beta, out, type, ldo, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

static void bare_logits(void *arg)
{
    bare_t *b = arg;
    gemm(b, CUBLAS_OP_T, CUBLAS_OP_N, V, T, H, b->w, H, b->h, H, b->z, CUDA_R_16BF, V, 0);
}

static void bare_d_hidden(void *arg)
{
    bare_t *b = arg;
    gemm(b, CUBLAS_OP_N, CUBLAS_OP_N, H, T, V, b->w, H, b->z, V, b->d_h, CUDA_R_16BF, H, 0);
}

static void bare_d_weight(void *arg)
{
    bare_t *b = arg;
    gemm(b, CUBLAS_OP_N, CUBLAS_OP_T, H, V, T, b->h, H, b->z, V, b->d_w, CUDA_R_32F, H, 1);
}

static void bare_three(void *arg)
{
    bare_logits(arg);
    bare_d_hidden(arg);
    bare_d_weight(arg);
}

static void bare_four(void *arg)
{
    bare_logits(arg);
    bare_three(arg);
}

/* ---- the library ---- */

typedef struct measured {
    colo_linear_logprob_t *linear;
    colo_linear_logprob_config_t config;
    colo_linear_logprob_batch_t batch;
    colo_logprob_out_t out;
    colo_linear_logprob_saved_t saved;
    colo_linear_logprob_upstream_t up;
    colo_linear_logprob_grads_t grads;
    void *work, *buffer;
    size_t work_bytes, buffer_bytes;
    bool alone; /* no backward follows */
} measured_t;

static void run_loss(void *arg)
{
    measured_t *r = arg;
    COLO(colo_linear_logprob_loss(r->linear, &r->batch, &r->up, &r->out, &r->grads, r->work,
                                  stream));
}

static void run_forward(void *arg)
{
    measured_t *r = arg;
    COLO(colo_linear_logprob_forward(r->linear, &r->batch, &r->out, r->alone ? NULL : &r->saved,
                                     r->buffer, r->work, stream));
}

static void run_both(void *arg)
{
    measured_t *r = arg;
    run_forward(r);
    COLO(colo_linear_logprob_backward(r->linear, &r->saved, &r->up, &r->grads, r->work, stream));
}

static void prepare(measured_t *r, colo_lm_head_t *head, colo_comm_t *self, bool loss)
{
    size_t bytes[2];
    COLO(colo_linear_logprob_create(&r->linear, &r->config, head, self));
    const colo_linear_logprob_pass_t pass[2] = {
        loss ? COLO_LINEAR_LOGPROB_LOSS : r->alone ? COLO_LINEAR_LOGPROB_INFERENCE : COLO_LINEAR_LOGPROB_FORWARD,
        loss ? COLO_LINEAR_LOGPROB_LOSS : r->alone ? COLO_LINEAR_LOGPROB_INFERENCE : COLO_LINEAR_LOGPROB_BACKWARD};
    for (int i = 0; i < 2; i++)
        COLO(colo_linear_logprob_workspace_size(r->linear, pass[i], T, -1, &bytes[i]));
    r->work_bytes = bytes[0] > bytes[1] ? bytes[0] : bytes[1];
    r->work = device(NULL, r->work_bytes);
    r->buffer_bytes = 0;
    if (!loss && !r->alone) {
        COLO(colo_linear_logprob_saved_size(r->linear, T, -1, &r->buffer_bytes));
        r->buffer = device(NULL, r->buffer_bytes);
    }
}

static void cleanup(measured_t *r)
{
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(r->work));
    CUDA(cudaFree(r->buffer));
    r->work = r->buffer = NULL;
    colo_linear_logprob_destroy(&r->linear);
}

/* ---- the logits path ---- */

typedef struct on_logits {
    colo_logprob_config_t config;
    colo_tensor_t z;
    const colo_tensor_t *ids;
    colo_comm_t *self;
    colo_logprob_out_t out;
    colo_logprob_saved_t saved;
    void *kept, *work;
} on_logits_t;

static void logits_forward(void *arg)
{
    on_logits_t *r = arg;
    r->saved = (colo_logprob_saved_t){COLO_LOGPROB_SAVED_INIT};
    COLO(colo_logprob_forward(&r->config, &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, &r->z, r->ids, NULL, NULL}, r->self,
                              &r->out, &r->saved, r->kept, r->work, stream));
}

static void logits_backward(void *arg)
{
    on_logits_t *r = arg;
    r->saved.valid = true; /* in place; the values do not matter */
    COLO(colo_logprob_backward(&r->saved, &(colo_logprob_upstream_t){COLO_LOGPROB_UPSTREAM_INIT, .d_logp = r->out.logp}, &r->z,
                               stream));
}

/* Of logits and their gradient in one buffer of T x V. */
static void logits_path(colo_comm_t *self, void *z, const colo_tensor_t *ids,
                        const colo_tensor_t *logp, const colo_tensor_t *entropy)
{
    double ms[2][3];
    CUDA(cudaMemset(z, 0x3c, (size_t)(T * V) * 2));
    for (int i = 0; i < 4; i++) {
        on_logits_t r = {
            .config = {COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V, .want_entropy = i > 1},
            .z = colo_tensor_cuda(z, COLO_BF16, 0, 2, (int64_t[]){T, V}),
            .ids = ids,
            .self = self,
            .out = {COLO_LOGPROB_OUT_INIT, .logp = logp, .entropy = i > 1 ? entropy : NULL}};
        r.config.segment = i % 2 ? V / 8 : 0;
        size_t kept, work;
        COLO(colo_logprob_saved_size(&r.config, COLO_BF16, T, &kept));
        COLO(colo_logprob_workspace_size(&r.config, COLO_BF16, T, 1, &work));
        r.kept = device(NULL, kept);
        r.work = device(NULL, work);
        ms[i % 2][i / 2] = median_ms(logits_forward, &r);
        if (i < 2)
            ms[i][2] = median_ms(logits_backward, &r);
        CUDA(cudaFree(r.kept));
        CUDA(cudaFree(r.work));
    }
    printf("| logits path | ms | with segments | times |\n|---|---:|---:|---:|\n");
    static const char *const names[] = {"forward", "forward, entropy", "backward"};
    for (int i = 0; i < 3; i++)
        printf("| %s | %.3f | %.3f | %.3f |\n", names[i], ms[0][i], ms[1][i], ms[1][i] / ms[0][i]);
}

/* How many of three rows of logp are not what fp64 says of bf16 logits */
static int wrong_rows(const uint16_t *h, const uint16_t *w, const int64_t *targets,
                      const void *logp)
{
    int wrong = 0;
    double *z = malloc((size_t)V * sizeof *z);
    for (int i = 0; i < 3; i++) {
        const int64_t t = (T - 1) * i / 2;
        double top = -INFINITY, sum = 0, most = 0;
        float got;
        for (int64_t v = 0; v < V; v++) {
            double x = 0;
            for (int64_t k = 0; k < H; k++)
                x += (double)wide(h[t * H + k]) * wide(w[v * H + k]);
            z[v] = x;
            top = fmax(top, x);
            most = fmax(most, fabs(x));
        }
        for (int64_t v = 0; v < V; v++)
            sum += exp(z[v] - top);
        CUDA(cudaMemcpy(&got, (const float *)logp + t, 4, cudaMemcpyDeviceToHost));
        /* a logit is rounded to bf16, the largest by 2^-8 of it at most */
        wrong += !(fabs(got - (z[targets[t]] - top - log(sum))) <= 0x1p-7 * most + 1e-4);
    }
    free(z);
    return wrong;
}

int main(int argc, char **argv)
{
    if (argc > 1 && argc < 4) {
        fprintf(stderr, "usage: bench-linear [TOKENS HIDDEN VOCAB [ITERATIONS]]\n");
        return 2;
    }
    if (argc > 3) {
        T = atoll(argv[1]);
        H = atoll(argv[2]);
        V = atoll(argv[3]);
    }
    if (argc > 4)
        iterations = atoi(argv[4]);
    const size_t th = (size_t)(T * H) * 2, vh = (size_t)(V * H) * 2, tv = (size_t)(T * V) * 2;
    uint16_t *h = draw(T * H, 1, 1), *w = draw(V * H, 0.03f, 2);
    int64_t *targets = malloc((size_t)T * 8);
    struct cudaDeviceProp prop;
    bare_t b = {.h = device(h, th), .w = device(w, vh), .d_h = device(NULL, th)};
    CUDA(cudaGetDeviceProperties(&prop, 0));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int64_t t = 0; t < T; t++)
        targets[t] = (t * 7919 + 13) % V;
    b.d_w = device(NULL, vh * 2);
    CUDA(cudaMemset(b.d_w, 0, vh * 2));

    b.z = device(NULL, tv);
    BLAS(cublasCreate(&b.blas));
    BLAS(cublasSetStream(b.blas, stream));
    const double one = median_ms(bare_logits, &b), dh = median_ms(bare_d_hidden, &b),
                 dw = median_ms(bare_d_weight, &b), three = median_ms(bare_three, &b),
                 four = median_ms(bare_four, &b);
    printf("# %s, T %lld, H %lld, V %lld, bf16, medians of %d\n", prop.name, (long long)T,
           (long long)H, (long long)V, iterations);
    printf("# cuBLAS alone, ms: logits %.2f, d_hidden %.2f, d_weight %.2f; three %.2f, four %.2f\n",
           one, dh, dw, three, four);
    CUDA(cudaFree(b.z));

    colo_comm_t *self;
    colo_lm_head_t *head;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H,
                                .dtype = COLO_BF16, .mem = COLO_MEM_CUDA};
    hc.device = 0;
    colo_tensor_t hidden = colo_tensor_cuda(b.h, COLO_BF16, 0, 2, (int64_t[]){T, H}),
                  weight = colo_tensor_cuda(b.w, COLO_BF16, 0, 2, (int64_t[]){V, H}),
                  ids = colo_tensor_cuda(device(targets, (size_t)T * 8), COLO_I64, 0, 1, &T),
                  d_h = colo_tensor_cuda(b.d_h, COLO_BF16, 0, 2, (int64_t[]){T, H}),
                  d_w = colo_tensor_cuda(b.d_w, COLO_F32, 0, 2, (int64_t[]){V, H});
    COLO(colo_comm_create_self(&self));
    COLO(colo_lm_head_create(&head, &hc, NULL));
    COLO(colo_lm_head_bind(head, &weight, NULL, NULL));
    float *logp = device(NULL, (size_t)T * 4), *entropy = device(NULL, (size_t)T * 4);
    const colo_tensor_t of_logp = colo_tensor_cuda(logp, COLO_F32, 0, 1, &T),
                        of_entropy = colo_tensor_cuda(entropy, COLO_F32, 0, 1, &T);
    float *first[3], *other = malloc((size_t)T * 4);
    int wrong = 0, seen[3] = {0};
    for (int i = 0; i < 3; i++)
        first[i] = malloc((size_t)T * 4);

    printf("| mode | chunk | ms | of the floor | extra memory without d_W, GiB |\n"
           "|---|---:|---:|---:|---:|\n");
    static const char *const names[] = {"loss",           "loss, entropy",     "logprob, forward",
                                        "logprob",        "logprob, entropy",  "keep",
                                        "loss, segments", "logprob, segments", "keep, segments"};
    for (int i = 0; i < (V % 128 ? 6 : 9); i++) {
        const bool loss = i < 2 || i == 6, with_entropy = i == 1 || i == 4;
        const bool keep = i == 5 || i == 8, segments = i >= 6;
        measured_t r = {.config = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true},
                        .batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &hidden, &ids, -1},
                        .out = {COLO_LOGPROB_OUT_INIT, .logp = &of_logp, .entropy = with_entropy ? &of_entropy : NULL},
                        .up = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = -1,
                               .entropy = with_entropy ? 0.01 : 0, .mean = true},
                        .saved = {COLO_LINEAR_LOGPROB_SAVED_INIT},
                        .grads = {COLO_LINEAR_LOGPROB_GRADS_INIT, &d_h, &d_w, NULL}};
        r.config.logprob.logits.vocab = V;
        r.config.logprob.want_entropy = with_entropy;
        r.config.logits_dtype = COLO_BF16;
        r.config.logprob.segment = segments ? V / 8 : 0;
        r.config.mode = keep ? COLO_LINEAR_LOGPROB_KEEP : COLO_LINEAR_LOGPROB_LOGPROB;
        r.config.keep_in_place = keep;
        r.config.without_logits = 88 << 20;
        r.alone = i == 2;
        prepare(&r, head, self, loss);
        const double ms = median_ms(loss ? run_loss : i == 2 ? run_forward : run_both, &r);
        const double floor = i == 2 ? one : loss || keep ? three : four;
        printf("| %s | %lld | %.2f | %.3f | %.2f |\n", names[i],
               (long long)colo_linear_logprob_chunk(r.linear, T), ms, ms / floor,
               (double)(r.work_bytes + r.buffer_bytes) * 0x1p-30);
        /* with segments, and where the product makes statistics, it has bits of its own */
        const int kind = segments ? 2 : !loss && !keep, n = seen[kind]++;
        CUDA(cudaMemcpy(n ? other : first[kind], logp, (size_t)T * 4, cudaMemcpyDeviceToHost));
        wrong += n ? memcmp(first[kind], other, (size_t)T * 4) != 0
                   : wrong_rows(h, w, targets, logp);
        cleanup(&r);
    }
    if (V % 128 == 0)
        logits_path(self, b.z = device(NULL, tv), &ids, &of_logp, &of_entropy);
    printf("# wrong: %d\n", wrong);
    return wrong != 0;
}
