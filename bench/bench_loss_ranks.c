/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_loss_ranks.c - the losses on W GPUs of one host that share the vocabulary, against the same
 * without the others, in one run.
 *
 *   bench-loss-ranks RANKS [TOKENS HIDDEN VOCAB [ITERATIONS]] [PATH]    T 16384 H 4096 V 151936,
 * 20; PATH: logits, linear or head, else all
 *
 * logits: forward and backward on [T, V/W] bf16 logits; floor: a kernel that only reads the same
 * bytes, and one that copies them. linear: loss and logprob modes of the lm_head, with chunks of
 * 2048 tokens and of its own choice, d_hidden left partial or summed; floor: the same V/W columns
 * on a group of one, where nothing is gathered; three calls back to back. head: all V columns,
 * sharded over the W ranks; the gather alone, and what it adds to products that run meanwhile (the
 * encoder's tail); by NCCL, and into registered memory, where GPUs reach each other. A time is the
 * slowest rank's; medians.
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

enum { MAX_RANKS = 16, MAX_ITERATIONS = 1000, MAX_WORKS = 7, CALLS = 3 };

static int64_t T = 16384, H = 4096, V = 151936;
static int iterations = 20, ranks;
static const char *only = ""; /* of the paths, by name */
static float times[MAX_WORKS][MAX_RANKS][MAX_ITERATIONS];

typedef struct rank {
    colo_comm_t *host, *gpus, *self;
    int32_t me;
    cudaStream_t stream;
    int64_t columns; /* V / W */
    void *z, *dz, *h, *w, *d_h, *d_w, *targets, *logp, *up, *stats, *workspace;
    unsigned long long *sum;
    colo_logprob_config_t config;
    colo_logprob_saved_t saved;
    colo_lm_head_t *head, *sharded[3];
    bool loss;
    struct linear_way {
        colo_linear_logprob_t *linear;
        colo_linear_logprob_saved_t kept;
        void *work, *saved, *d_h; /* the last one in the first */
    } way[4];
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

/* Each with an object and memory of its own: a group of one, whose vocabulary are its columns, and
 * what becomes of d_hidden on W ranks. */
enum { ALONE, PARTIAL, SCATTERED, REDUCED, LINEAR_WAYS };

static const char *const way_names[] = {
    [PARTIAL] = "partial",
    [SCATTERED] = "reduce-scattered",
    [REDUCED] = "all-reduced",
};

static colo_d_hidden_t d_hidden_of(int k)
{
    return k == SCATTERED ? COLO_D_HIDDEN_REDUCE_SCATTER
           : k == REDUCED ? COLO_D_HIDDEN_ALL_REDUCE
                          : COLO_D_HIDDEN_PARTIAL;
}

/* Rows of d_hidden */
static int64_t rows_of(int k)
{
    return d_hidden_of(k) == COLO_D_HIDDEN_REDUCE_SCATTER ? T / ranks : T;
}

static void linear_call(rank_t *r, int k)
{
    struct linear_way *way = &r->way[k];
    const colo_tensor_t h = colo_tensor_cuda(r->h, COLO_BF16, r->me, 2, (int64_t[]){T, H}),
                        ids = colo_tensor_cuda(r->targets, COLO_I64, r->me, 1, &T),
                        d_h = colo_tensor_cuda(way->d_h, COLO_BF16, r->me, 2,
                                               (int64_t[]){rows_of(k), H}),
                        d_w = colo_tensor_cuda(r->d_w, COLO_F32, r->me, 2,
                                               (int64_t[]){r->columns, H}),
                        logp = colo_tensor_cuda(r->logp, COLO_F32, r->me, 1, &T);
    const colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &h, &ids, -1, NULL};
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &logp};
    const colo_linear_logprob_upstream_t up = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = -1,
                                               .mean = true};
    const colo_linear_logprob_grads_t grads = {COLO_LINEAR_LOGPROB_GRADS_INIT, &d_h, &d_w, NULL};
    if (r->loss) {
        COLO(
            colo_linear_logprob_loss(way->linear, &batch, &up, &out, &grads, way->work, r->stream));
        return;
    }
    way->kept = (colo_linear_logprob_saved_t){COLO_LINEAR_LOGPROB_SAVED_INIT};
    COLO(colo_linear_logprob_forward(way->linear, &batch, &out, &way->kept, way->saved, way->work,
                                     r->stream));
    COLO(colo_linear_logprob_backward(way->linear, &way->kept, &up, &grads, way->work, r->stream));
}

/* Back to back, as in a step that has more work enqueued. */
#define OF_LINEAR(k)                    \
    static void linear_##k(rank_t *r)   \
    {                                   \
        for (int i = 0; i < CALLS; i++) \
            linear_call(r, k);          \
    }
OF_LINEAR(0)
OF_LINEAR(1)
OF_LINEAR(2)
OF_LINEAR(3)

static void open_way(rank_t *r, int k, int64_t chunk)
{
    struct linear_way *way = &r->way[k];
    size_t work = 0, more = 0, saved = 0;
    colo_linear_logprob_config_t c = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    c.logprob.logits.vocab = k == ALONE ? r->columns : V;
    c.logprob.logits.vocab_start = k == ALONE ? 0 : r->me * r->columns;
    c.logits_dtype = COLO_BF16;
    c.mode = COLO_LINEAR_LOGPROB_LOGPROB;
    c.logprob.chunk_size = chunk;
    c.d_hidden = d_hidden_of(k);
    COLO(colo_linear_logprob_create(&way->linear, &c, r->head, k == ALONE ? r->self : r->gpus));
    COLO(colo_linear_logprob_workspace_size(
        way->linear, r->loss ? COLO_LINEAR_LOGPROB_LOSS : COLO_LINEAR_LOGPROB_FORWARD, T, -1,
        &work));
    if (!r->loss) {
        COLO(colo_linear_logprob_workspace_size(way->linear, COLO_LINEAR_LOGPROB_BACKWARD, T, -1,
                                                &more));
        COLO(colo_linear_logprob_saved_size(way->linear, T, -1, &saved));
    }
    work = ((more > work ? more : work) + 255) / 256 * 256;
    const size_t d_h = (size_t)(rows_of(k) * H) * 2;
    way->work = device(work + d_h);
    way->d_h = (char *)way->work + work;
    way->saved = device(saved + 256);
}

static void close_way(rank_t *r, int k)
{
    struct linear_way *way = &r->way[k];
    colo_linear_logprob_destroy(&way->linear);
    CUDA(cudaFree(way->saved));
    CUDA(cudaFree(way->work));
}

static bool same(rank_t *r, const void *a, const void *b, int64_t bytes)
{
    unsigned long long wrong = 0;
    CUDA(cudaMemsetAsync(r->sum, 0, sizeof *r->sum, r->stream));
    CUDA(colo_k_probe_diff(a, b, bytes, r->sum, r->stream));
    CUDA(cudaMemcpyAsync(&wrong, r->sum, sizeof wrong, cudaMemcpyDeviceToHost, r->stream));
    CUDA(cudaStreamSynchronize(r->stream));
    return wrong == 0;
}

/* Whatever becomes of d_hidden, d_weight has the same bits; so have the sums. */
static void compare_ways(rank_t *r)
{
    const int64_t weights = r->columns * H * 4, each = T / ranks * H * 2;
    void *expected = device((size_t)weights);
    for (int k = PARTIAL; k < LINEAR_WAYS; k++) {
        CUDA(cudaMemsetAsync(r->d_w, 0, (size_t)weights, r->stream));
        linear_call(r, k);
        CUDA(cudaStreamSynchronize(r->stream));
        if (k == PARTIAL)
            CUDA(cudaMemcpyAsync(expected, r->d_w, (size_t)weights, cudaMemcpyDeviceToDevice,
                                 r->stream));
        else if (!same(r, expected, r->d_w, weights))
            printf("rank %d: d_weight of %s differs from partial's\n", (int)r->me, way_names[k]);
        COLO(colo_comm_barrier(r->host, NULL));
    }
    if (!same(r, (char *)r->way[REDUCED].d_h + each * r->me, r->way[SCATTERED].d_h, each))
        printf("rank %d: d_hidden of a reduce-scatter differs from an all-reduce's\n", (int)r->me);
    CUDA(cudaFree(expected));
}

static void linear_path(rank_t *r)
{
    static const work_fn works[] = {linear_0, linear_1, linear_2, linear_3};
    static const int64_t chunks[] = {2048, 0};
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = r->columns, .hidden = H,
                                .dtype = COLO_BF16, .mem = COLO_MEM_CUDA};
    hc.device = r->me;
    colo_tensor_t w = colo_tensor_cuda(r->w, COLO_BF16, r->me, 2, (int64_t[]){r->columns, H});
    COLO(colo_lm_head_create(&r->head, &hc, NULL));
    COLO(colo_lm_head_bind(r->head, &w, NULL, NULL));
    for (int i = 0; i < 4; i++) {
        double ms[LINEAR_WAYS];
        char text[96];
        r->loss = i < 2;
        for (int k = 0; k < LINEAR_WAYS; k++)
            open_way(r, k, chunks[i % 2]);
        compare_ways(r);
        measure_alternating(r, LINEAR_WAYS, works, ms);
        for (int k = PARTIAL; k < LINEAR_WAYS; k++) {
            snprintf(text, sizeof text, "lm_head %s, %s, d_hidden %s", r->loss ? "loss" : "logprob",
                     i % 2 ? "chunks of its own" : "chunks of 2048", way_names[k]);
            report(r, text, ms[k] / CALLS, ms[ALONE] / CALLS);
        }
        for (int k = 0; k < LINEAR_WAYS; k++)
            close_way(r, k);
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

static bool runs(const char *path)
{
    return !*only || strcmp(only, path) == 0;
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
    if (runs("logits"))
        logits_path(&r);
    const int64_t rows = r.columns + 1 > H ? r.columns + 1 : H;
    r.h = device((size_t)(T * H) * 2);
    r.w = device((size_t)(rows * H) * 2);
    r.d_h = device((size_t)(T * H) * 2);
    r.d_w = device((size_t)(rows * H) * 4);
    CUDA(colo_k_probe_fill(r.h, T * H * 2, 1, 3, NULL));
    CUDA(colo_k_probe_fill(r.w, rows * H * 2, 0.02f, 5 + (uint64_t)r.me, NULL));
    CUDA(cudaDeviceSynchronize());
    if (runs("linear"))
        linear_path(&r);
    if (cublasCreate(&r.blas) != CUBLAS_STATUS_SUCCESS ||
        cublasSetStream(r.blas, r.stream) != CUBLAS_STATUS_SUCCESS)
        exit(1);
    if (runs("head"))
        sharded_head(&r);
    free(ids);
    free(up);
    colo_comm_destroy(&r.self);
    colo_comm_destroy(&r.gpus);
    return COLO_OK; /* device memory goes with the process */
}

int main(int argc, char **argv)
{
    static const char *const paths[] = {"logits", "linear", "head"};
    for (int i = 0; argc > 2 && i < 3; i++)
        only = strcmp(argv[argc - 1], paths[i]) == 0 ? paths[i] : only;
    argc -= *only != 0;
    if (argc != 2 && argc != 5 && argc != 6) {
        fprintf(stderr,
                "usage: bench-loss-ranks RANKS [TOKENS HIDDEN VOCAB [ITERATIONS]] [PATH]\n");
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
