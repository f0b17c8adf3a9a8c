/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_loss_ranks.c - the losses on W GPUs of one host that share the vocabulary, against the same
 * without the others, in one run.
 *
 *   bench-loss-ranks RANKS [TOKENS HIDDEN VOCAB [ITERATIONS]] [head]    T 16384 H 4096 V 151936,
 * 20; head: the sharded head only
 *
 * Logits path: forward and backward on [T, V/W] bf16 logits; floor: a kernel that only reads the
 * same bytes, and one that copies them. lm_head path: loss and logprob modes with d_hidden left
 * partial or summed; with it the same V/W columns on a group of one, where nothing is gathered.
 * Sharded head: all V columns, sharded over the W ranks; the gather alone, and what it adds to
 * products that run meanwhile (the encoder's tail); by NCCL, and into registered memory, where GPUs
 * reach each other. A time is the slowest rank's; medians.
 */
#include "bench.h"

#include <colobridge.h>
#include <colobridge/nccl.h>

#include "perf/probe.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 16, MAX_ITERATIONS = 1000, MAX_WORKS = 7 };

static int64_t T = 16384, H = 4096, V = 151936;
static int iterations = 20, ranks;
static bool head_only;
static float times[MAX_WORKS][MAX_RANKS][MAX_ITERATIONS];

typedef struct rank {
    colo_comm_t *host, *gpus, *self;
    int32_t me;
    cudaStream_t stream;
    int64_t columns; /* V / W */
    int64_t d_rows;  /* of d_hidden: T, or T / W where it is scattered */
    void *z, *dz, *h, *w, *d_h, *d_w, *targets, *logp, *up, *stats, *workspace, *work, *buffer;
    unsigned long long *sum;
    colo_logprob_config_t config;
    colo_logprob_saved_t saved;
    colo_lm_head_t *head, *sharded[3];
    colo_linear_logprob_t *linear;
    colo_linear_logprob_saved_t kept;
    cublasHandle_t blas;
} rank_t;

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

typedef void (*work_fn)(rank_t *r);

/* Of the slowest rank, the median; on every rank the same. Several take turns, for a GPU that has
 * been at work is slower. */
static void measure_alternating(rank_t *r, int n, const work_fn *fn, double *ms)
{
    cudaEvent_t event[2];
    CUDA(cudaEventCreate(&event[0]));
    CUDA(cudaEventCreate(&event[1]));
    for (int i = -3; i < iterations; i++)
        for (int k = 0; k < n; k++) {
            COLO(colo_comm_barrier(r->host, NULL));
            CUDA(cudaEventRecord(event[0], r->stream));
            fn[k](r);
            CUDA(cudaEventRecord(event[1], r->stream));
            CUDA(cudaEventSynchronize(event[1]));
            if (i >= 0)
                CUDA(cudaEventElapsedTime(&times[k][r->me][i], event[0], event[1]));
        }
    COLO(colo_comm_barrier(r->host, NULL));
    for (int k = 0; k < n; k++) {
        float slowest[MAX_ITERATIONS];
        for (int i = 0; i < iterations; i++) {
            slowest[i] = 0;
            for (int q = 0; q < ranks; q++)
                slowest[i] = times[k][q][i] > slowest[i] ? times[k][q][i] : slowest[i];
        }
        qsort(slowest, (size_t)iterations, sizeof *slowest, ascending);
        ms[k] = slowest[iterations / 2];
    }
    COLO(colo_comm_barrier(r->host, NULL));
}

static double measure(rank_t *r, work_fn fn)
{
    double ms;
    measure_alternating(r, 1, &fn, &ms);
    return ms;
}

static void report(const rank_t *r, const char *what, double ms, double floor)
{
    if (r->me == 0 && floor > 0)
        printf("| %s | %.3f | %.3f | %.3f |\n", what, ms, floor, ms / floor);
    else if (r->me == 0)
        printf("| %s | %.3f | | |\n", what, ms);
    fflush(stdout);
}

/* ---- logits path ---- */

static colo_tensor_t logits_of(rank_t *r, void *data)
{
    return colo_tensor_cuda(data, COLO_BF16, r->me, 2, (int64_t[]){T, r->columns});
}

static void read_logits(rank_t *r)
{
    CUDA(colo_k_probe_read(r->z, T * r->columns * 2, r->sum, r->stream));
}

static void copy_logits(rank_t *r)
{
    CUDA(colo_k_probe_copy(r->dz, r->z, T * r->columns * 2, r->stream));
}

static void logits_forward(rank_t *r)
{
    colo_tensor_t z = logits_of(r, r->z),
                  ids = colo_tensor_cuda(r->targets, COLO_I64, r->me, 1, &T);
    const colo_tensor_t logp = colo_tensor_cuda(r->logp, COLO_F32, r->me, 1, &T);
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &logp};
    r->saved = (colo_logprob_saved_t){COLO_LOGPROB_SAVED_INIT};
    COLO(colo_logprob_forward(
        &r->config, &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT, .logits = &z, .targets = &ids},
        r->gpus, &out, &r->saved, r->stats, r->workspace, r->stream));
}

static void logits_backward(rank_t *r)
{
    colo_tensor_t dz = logits_of(r, r->dz);
    const colo_tensor_t d_logp = colo_tensor_cuda(r->up, COLO_F32, r->me, 1, &T);
    colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &d_logp};
    COLO(colo_logprob_backward(&r->saved, &up, &dz, r->stream));
}

static void *device(size_t bytes)
{
    void *p;
    CUDA(cudaMalloc(&p, bytes));
    CUDA(cudaMemset(p, 0, bytes));
    return p;
}

static void logits_path(rank_t *r)
{
    size_t bytes;
    const size_t tv = (size_t)(T * r->columns) * 2;
    r->z = device(tv);
    r->dz = device(tv);
    CUDA(colo_k_probe_fill(r->z, (int64_t)tv, 3, 1 + (uint64_t)r->me, NULL));
    COLO(colo_logprob_saved_size(&r->config, COLO_BF16, T, &bytes));
    r->stats = device(bytes);
    COLO(colo_logprob_workspace_size(&r->config, COLO_BF16, T, ranks, &bytes));
    r->workspace = device(bytes);
    const double one = measure(r, read_logits), two = measure(r, copy_logits);
    report(r, "logits forward, floor: read", measure(r, logits_forward), one);
    report(r, "logits backward, floor: copy", measure(r, logits_backward), two);
    CUDA(cudaFree(r->z));
    CUDA(cudaFree(r->dz));
    CUDA(cudaFree(r->stats));
    CUDA(cudaFree(r->workspace));
}

/* ---- lm_head path ---- */

typedef struct step {
    colo_tensor_t h, ids, d_h, d_w, logp;
    colo_linear_logprob_batch_t batch;
    colo_logprob_out_t out;
    colo_linear_logprob_upstream_t up;
    colo_linear_logprob_grads_t grads;
} step_t;

static void step_of(rank_t *r, step_t *s)
{
    s->h = colo_tensor_cuda(r->h, COLO_BF16, r->me, 2, (int64_t[]){T, H});
    s->ids = colo_tensor_cuda(r->targets, COLO_I64, r->me, 1, &T);
    s->d_h = colo_tensor_cuda(r->d_h, COLO_BF16, r->me, 2, (int64_t[]){r->d_rows, H});
    s->d_w = colo_tensor_cuda(r->d_w, COLO_F32, r->me, 2, (int64_t[]){r->columns, H});
    s->batch =
        (colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT, &s->h, &s->ids, -1, NULL};
    s->logp = colo_tensor_cuda(r->logp, COLO_F32, r->me, 1, &T);
    s->out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = &s->logp};
    s->up = (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = -1,
                                             .mean = true};
    s->grads =
        (colo_linear_logprob_grads_t){COLO_LINEAR_LOGPROB_GRADS_INIT, &s->d_h, &s->d_w, NULL};
}

static void linear_loss(rank_t *r)
{
    step_t s;
    step_of(r, &s);
    COLO(
        colo_linear_logprob_loss(r->linear, &s.batch, &s.up, &s.out, &s.grads, r->work, r->stream));
}

static void linear_logprob(rank_t *r)
{
    step_t s;
    step_of(r, &s);
    r->kept = (colo_linear_logprob_saved_t){COLO_LINEAR_LOGPROB_SAVED_INIT};
    COLO(colo_linear_logprob_forward(r->linear, &s.batch, &s.out, &r->kept, r->buffer, r->work,
                                     r->stream));
    COLO(colo_linear_logprob_backward(r->linear, &r->kept, &s.up, &s.grads, r->work, r->stream));
}

/* On @group; a group of one has V = its columns. */
static double linear_time(rank_t *r, colo_comm_t *group, bool loss, colo_d_hidden_t d_hidden)
{
    const bool alone = colo_comm_size(group) == 1;
    size_t bytes[3] = {0, 0, 0};
    colo_linear_logprob_config_t c = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    c.logprob.logits.vocab = alone ? r->columns : V;
    c.logprob.logits.vocab_start = alone ? 0 : r->me * r->columns;
    c.logits_dtype = COLO_BF16;
    c.mode = COLO_LINEAR_LOGPROB_LOGPROB;
    c.logprob.chunk_size = 2048;
    c.d_hidden = d_hidden;
    r->d_rows = d_hidden == COLO_D_HIDDEN_REDUCE_SCATTER ? T / ranks : T;
    COLO(colo_linear_logprob_create(&r->linear, &c, r->head, group));
    COLO(colo_linear_logprob_workspace_size(
        r->linear, loss ? COLO_LINEAR_LOGPROB_LOSS : COLO_LINEAR_LOGPROB_FORWARD, T, -1,
        &bytes[0]));
    if (!loss) {
        COLO(colo_linear_logprob_workspace_size(r->linear, COLO_LINEAR_LOGPROB_BACKWARD, T, -1,
                                                &bytes[1]));
        COLO(colo_linear_logprob_saved_size(r->linear, T, -1, &bytes[2]));
    }
    r->work = device(bytes[0] > bytes[1] ? bytes[0] : bytes[1]);
    r->buffer = device(bytes[2] + 256);
    double ms = measure(r, loss ? linear_loss : linear_logprob);
    colo_linear_logprob_destroy(&r->linear);
    CUDA(cudaFree(r->work));
    CUDA(cudaFree(r->buffer));
    return ms;
}

static void linear_path(rank_t *r)
{
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = r->columns, .hidden = H,
                                .dtype = COLO_BF16, .mem = COLO_MEM_CUDA};
    hc.device = r->me;
    colo_tensor_t w = colo_tensor_cuda(r->w, COLO_BF16, r->me, 2, (int64_t[]){r->columns, H});
    COLO(colo_lm_head_create(&r->head, &hc, NULL));
    COLO(colo_lm_head_bind(r->head, &w, NULL, NULL));
    for (int loss = 1; loss >= 0; loss--) {
        const char *name = loss ? "loss" : "logprob";
        char text[96];
        double one = linear_time(r, r->self, loss, COLO_D_HIDDEN_PARTIAL);
        snprintf(text, sizeof text, "lm_head %s, d_hidden partial, floor: a group of one", name);
        report(r, text, linear_time(r, r->gpus, loss, COLO_D_HIDDEN_PARTIAL), one);
        snprintf(text, sizeof text, "lm_head %s, d_hidden reduce-scattered", name);
        report(r, text, linear_time(r, r->gpus, loss, COLO_D_HIDDEN_REDUCE_SCATTER), one);
        snprintf(text, sizeof text, "lm_head %s, d_hidden all-reduced", name);
        report(r, text, linear_time(r, r->gpus, loss, COLO_D_HIDDEN_ALL_REDUCE), one);
    }
    colo_lm_head_destroy(&r->head);
}

/* ---- sharded head ---- */

static void tail(rank_t *r) /* products as an encoder's last layers have them */
{
    const float one = 1, zero = 0;
    for (int i = 0; i < 8; i++)
        if (cublasGemmEx(r->blas, CUBLAS_OP_N, CUBLAS_OP_N, (int)H, (int)T, (int)H, &one, r->w,
                         CUDA_R_16BF, (int)H, r->h, CUDA_R_16BF, (int)H, &zero, r->d_h, CUDA_R_16BF,
                         (int)H, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
            exit(1);
}

/* Three ways: by NCCL, into registered memory, and there with this rank's rows in their place. */
enum { WAYS = 3 };

static void alone(rank_t *r, int pass)
{
    COLO(colo_lm_head_acquire(r->sharded[pass], r->stream, NULL, NULL));
    COLO(colo_lm_head_release(r->sharded[pass], r->stream));
}

static void concurrent(rank_t *r, int pass)
{
    COLO(colo_lm_head_start(r->sharded[pass], r->stream));
    tail(r);
    COLO(colo_lm_head_finish(r->sharded[pass], r->stream, NULL, NULL));
    COLO(colo_lm_head_release(r->sharded[pass], r->stream));
}

#define OF_WAY(k)                         \
    static void alone_##k(rank_t *r)      \
    {                                     \
        alone(r, k);                      \
    }                                     \
    static void concurrent_##k(rank_t *r) \
    {                                     \
        concurrent(r, k);                 \
    }
OF_WAY(0)
OF_WAY(1)
OF_WAY(2)

static void sharded_head(rank_t *r)
{
    static const char *const names[WAYS] = {"head gather, NCCL", "head gather, registered memory",
                                            "head gather, registered memory, own rows in place"};
    static const work_fn works[] = {tail,         alone_0,      alone_1,     alone_2,
                                    concurrent_0, concurrent_1, concurrent_2};
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H,
                                .dtype = COLO_BF16, .mem = COLO_MEM_CUDA};
    colo_memory_t *memory[WAYS] = {NULL};
    double ms[1 + 2 * WAYS];
    char text[100];
    hc.device = r->me;
    for (int pass = 0; pass < WAYS; pass++) {
        int64_t first, rows;
        COLO(colo_lm_head_create(&r->sharded[pass], &hc, r->gpus));
        colo_lm_head_rows(r->sharded[pass], &first, &rows);
        const size_t bytes = colo_lm_head_gathered_size(r->sharded[pass]);
        if (pass > 0)
            COLO(colo_memory_alloc(r->gpus, bytes, &memory[pass]));
        char *gathered = pass > 0 ? colo_memory_data(memory[pass]) : device(bytes);
        colo_tensor_t w = colo_tensor_cuda(pass == 2 ? gathered + first * H * 2 : r->w, COLO_BF16,
                                           r->me, 2, (int64_t[]){rows, H});
        COLO(colo_lm_head_bind(r->sharded[pass], &w, NULL, gathered));
    }
    measure_alternating(r, 1 + 2 * WAYS, works, ms);
    report(r, "encoder's tail, alone", ms[0], 0);
    for (int pass = 0; pass < WAYS; pass++) {
        snprintf(text, sizeof text, "%s, alone", names[pass]);
        report(r, text, ms[1 + pass], 0);
    }
    for (int pass = 0; pass < WAYS; pass++) {
        snprintf(text, sizeof text, "%s, with the tail", names[pass]);
        report(r, text, ms[1 + WAYS + pass], ms[0]);
    }
    for (int pass = 0; r->me == 0 && pass < WAYS; pass++)
        printf("%s%s: %.3f ms visible, %.1f %% of its own time; %.0f GB/s received\n",
               pass ? "" : "\n", names[pass], ms[1 + WAYS + pass] - ms[0],
               100 * (ms[1 + WAYS + pass] - ms[0]) / ms[1 + pass],
               (double)(V * H * 2) * (ranks - 1) / ranks / ms[1 + pass] * 1e-6);
    if (r->me == 0 && !colo_memory_is_p2p(memory[1]))
        printf("no GPU reaches another one's memory here: all three are NCCL\n");
    for (int pass = 0; pass < WAYS; pass++) {
        colo_lm_head_destroy(&r->sharded[pass]);
        colo_memory_destroy(&memory[pass]);
    }
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    rank_t r = {.host = world, .me = colo_comm_rank(world)};
    CUDA(cudaSetDevice(r.me));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    COLO(colo_comm_create_nccl(world, r.me, &r.gpus));
    COLO(colo_comm_create_self(&r.self));
    r.columns = V / ranks;
    r.config = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V,
                                       .logits.vocab_start = r.me * r.columns};
    int64_t *ids = malloc((size_t)T * 8);
    float *up = malloc((size_t)T * 4);
    for (int64_t t = 0; t < T; t++) {
        ids[t] = (t * 7919 + 13) % r.columns; /* legal on a group of one, too */
        up[t] = 0.25f * (float)(t % 7 + 1);
    }
    r.targets = device((size_t)T * 8);
    r.up = device((size_t)T * 4);
    CUDA(cudaMemcpy(r.targets, ids, (size_t)T * 8, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(r.up, up, (size_t)T * 4, cudaMemcpyHostToDevice));
    r.logp = device((size_t)T * 4);
    r.sum = device(8);
    if (r.me == 0)
        printf("| what | ms | floor ms | ratio |\n|---|---:|---:|---:|\n");
    if (!head_only)
        logits_path(&r);
    const int64_t rows = r.columns + 1 > H ? r.columns + 1 : H;
    r.h = device((size_t)(T * H) * 2);
    r.w = device((size_t)(rows * H) * 2);
    r.d_h = device((size_t)(T * H) * 2);
    r.d_w = device((size_t)(rows * H) * 4);
    CUDA(colo_k_probe_fill(r.h, T * H * 2, 1, 3, NULL));
    CUDA(colo_k_probe_fill(r.w, rows * H * 2, 0.02f, 5 + (uint64_t)r.me, NULL));
    CUDA(cudaDeviceSynchronize());
    if (!head_only)
        linear_path(&r);
    if (cublasCreate(&r.blas) != CUBLAS_STATUS_SUCCESS ||
        cublasSetStream(r.blas, r.stream) != CUBLAS_STATUS_SUCCESS)
        exit(1);
    sharded_head(&r);
    free(ids);
    free(up);
    colo_comm_destroy(&r.self);
    colo_comm_destroy(&r.gpus);
    return COLO_OK; /* device memory goes with the process */
}

int main(int argc, char **argv)
{
    head_only = argc > 2 && strcmp(argv[argc - 1], "head") == 0;
    argc -= head_only;
    if (argc != 2 && argc != 5 && argc != 6) {
        fprintf(stderr,
                "usage: bench-loss-ranks RANKS [TOKENS HIDDEN VOCAB [ITERATIONS]] [head]\n");
        return 2;
    }
    ranks = atoi(argv[1]);
    if (argc > 4) {
        T = atoll(argv[2]);
        H = atoll(argv[3]);
        V = atoll(argv[4]);
    }
    if (argc > 5)
        iterations = atoi(argv[5]);
    int found = 0;
    struct cudaDeviceProp prop;
    CUDA(cudaGetDeviceCount(&found));
    if (ranks < 1 || ranks > MAX_RANKS || ranks > found || iterations < 1 ||
        iterations > MAX_ITERATIONS || T < 1 || T % ranks || H < 1 || V < ranks) {
        fprintf(stderr,
                "bench-loss-ranks: %d ranks, found %d GPUs; tokens are a multiple of the ranks\n",
                ranks, found);
        return 2;
    }
    V = V / ranks * ranks;
    CUDA(cudaGetDeviceProperties(&prop, 0));
    printf("# %d x %s, T %lld, H %lld, V %lld, bf16, medians of %d, slowest rank\n\n", ranks,
           prop.name, (long long)T, (long long)H, (long long)V, iterations);
    colo_status_t st = colo_comm_threads_run(ranks, on_rank, NULL);
    if (st < 0)
        fprintf(stderr, "bench-loss-ranks: %s\n", colo_last_error());
    return st < 0;
}
