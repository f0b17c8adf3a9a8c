/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_direct_blocks.c - how many blocks a peer-to-peer kernel needs, and what it leaves to
 * others.
 *
 * usage: bench_direct_blocks [BLOCKS...]    two ranks, threads with a GPU each; bf16
 *
 * Each line is a bridge with that many blocks (colo_bridge_config_t.peer_blocks), 0: the default.
 * Large: as many bytes as arrive, written by a plain kernel into the other rank's memory, are the
 * limit of the same run. A time is that of the slower rank, from events after a host barrier;
 * medians of 20 after 3. Small: 50 calls in a row, in one graph or launched one by one, divided by
 * 50. Concurrent: products of 8192 x 8192 x 8192 on another stream while the kernel waits 5 ms for
 * its peer, or while blocks sleep, which is the limit, against the same products alone.
 */
#include "ranks.h"

#include <colobridge/nccl.h>

#include "perf/probe.h"

#include <cublas_v2.h>

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { RANKS = 2, ROW = 50, N = 8192, PRODUCTS = 3, LATE_US = 5000, SHARES = 4, RUNS = 15 };

static const struct layout {
    const char *src, *dst;
    colo_output_t output;
    int pass;
} layouts[] = {
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", COLO_OUTPUT_SHARDED, 0},
    {"tp=1,dp=2", "tp=2,dp=1", COLO_OUTPUT_SHARDED, 0},
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", COLO_OUTPUT_FULL_SEQ, 1},
};
enum { LAYOUTS = sizeof layouts / sizeof layouts[0], SMALL = 4 };
static const int64_t small_rows[SMALL] = {16, 256, 1024, 4096};

static struct {
    float ms[RANKS];
    double us[RANKS];
    int64_t recv[RANKS];
    char *arena[RANKS];
    const int32_t *blocks;
    int32_t n;
} job;

struct rank {
    colo_comm_t *host, *gpus;
    int32_t me;
    colo_memory_t *memory;
    colo_bridge_t *bridge;
    colo_tensor_t x, y;
    cudaStream_t stream, concurrent;
    cudaEvent_t a, b;
    cublasHandle_t blas;
    char *matrix;
};

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The slower rank's; the same on both. */
static colo_status_t slower(struct rank *r, double us, double *out)
{
    job.us[r->me] = us;
    TRY(colo_comm_barrier(r->host, NULL));
    *out = job.us[0] > job.us[1] ? job.us[0] : job.us[1];
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t stand_up(struct rank *r, const struct layout *l, colo_shape_t shape,
                              int32_t blocks)
{
    colo_layout_t src, dst;
    int64_t s[3];
    TRY(bench_layouts(l->src, l->dst, &src, &dst));
    const colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT,
                                      .src = &src,
                                      .dst = &dst,
                                      .shape = shape,
                                      .dtype = COLO_BF16,
                                      .output = l->output,
                                      .mem = COLO_MEM_CUDA,
                                      .transport = COLO_TRANSPORT_PEER,
                                      .peer_blocks = blocks};
    TRY(colo_bridge_create(&r->bridge, &cfg, r->gpus));
    char *data = colo_memory_data(r->memory);
    int32_t nd = colo_bridge_src_shape(r->bridge, s);
    r->x = colo_tensor_cuda(data, COLO_BF16, r->me, nd, s);
    nd = colo_bridge_dst_shape(r->bridge, s);
    r->y = colo_tensor_cuda(data + (2 * colo_tensor_count(&r->x) + 4095) / 4096 * 4096, COLO_BF16,
                            r->me, nd, s);
    colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};
    TRY(colo_plan_bytes(colo_bridge_plan(r->bridge),
                        l->pass ? COLO_PASS_BACKWARD : COLO_PASS_FORWARD, &bytes));
    job.recv[r->me] = bytes.recv;
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t lie_down(struct rank *r)
{
    CUDA(cudaStreamSynchronize(r->stream));
    TRY(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(&r->bridge);
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t go(struct rank *r, int pass)
{
    return pass ? colo_bridge_backward(r->bridge, &r->y, &r->x, r->stream)
                : colo_bridge_forward(r->bridge, &r->x, &r->y, r->stream);
}

/* @pass -1: plain stores of what arrives. */
static colo_status_t large(struct rank *r, int pass, double *us)
{
    double all[ITERATIONS];
    float ms = 0;
    char *from = job.arena[r->me], *to = job.arena[1 - r->me] + colo_memory_bytes(r->memory) / 2;
    for (int i = -WARM; i < ITERATIONS; i++) {
        TRY(colo_comm_barrier(r->host, NULL));
        CUDA(cudaEventRecord(r->a, r->stream));
        if (pass < 0)
            CUDA(colo_k_probe_copy(to, from, job.recv[r->me], r->stream));
        else
            TRY(go(r, pass));
        CUDA(cudaEventRecord(r->b, r->stream));
        CUDA(cudaEventSynchronize(r->b));
        CUDA(cudaEventElapsedTime(&ms, r->a, r->b));
        double worst;
        TRY(slower(r, (double)ms * 1e3, &worst));
        if (i >= 0)
            all[i] = worst;
    }
    qsort(all, ITERATIONS, sizeof all[0], by_value);
    *us = all[ITERATIONS / 2];
    return COLO_OK;
}

static colo_status_t in_a_row(struct rank *r, bool graph, double *us)
{
    cudaGraph_t g = NULL;
    cudaGraphExec_t exec = NULL;
    double all[11];
    float ms = 0;
    if (graph) {
        CUDA(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < ROW; i++)
            TRY(go(r, 0));
        CUDA(cudaStreamEndCapture(r->stream, &g));
        CUDA(cudaGraphInstantiate(&exec, g, 0));
        CUDA(cudaGraphUpload(exec, r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
    }
    for (int k = -2; k < 11; k++) {
        TRY(colo_comm_barrier(r->host, NULL));
        for (int i = 0; i < 5; i++) /* past the barrier's skew */
            TRY(go(r, 0));
        CUDA(cudaEventRecord(r->a, r->stream));
        if (graph)
            CUDA(cudaGraphLaunch(exec, r->stream));
        for (int i = 0; i < ROW && !graph; i++)
            TRY(go(r, 0));
        CUDA(cudaEventRecord(r->b, r->stream));
        CUDA(cudaEventSynchronize(r->b));
        CUDA(cudaEventElapsedTime(&ms, r->a, r->b));
        double worst;
        TRY(slower(r, (double)ms * 1e3 / ROW, &worst));
        if (k >= 0)
            all[k] = worst;
    }
    qsort(all, 11, sizeof all[0], by_value);
    *us = all[5];
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    if (g)
        CUDA(cudaGraphDestroy(g));
    return COLO_OK;
}

static void late(void *us)
{
    usleep((useconds_t)(uintptr_t)us);
}

/* Products of rank 0 alone over those while a kernel waits; on rank 1 the peer is late. @sleepers:
 * no kernel of a bridge waits, but so many blocks of a multiprocessor each sleep (-1: one warp). */
static colo_status_t concurrent(struct rank *r, int32_t sleepers, double *share)
{
    double took[2][RUNS];
    float ms = 0;
    for (int k = -2; k < 2 * RUNS; k++) { /* by turns, so that the clock is the same for both */
        const bool with = k & 1, waits = with && !sleepers;
        TRY(colo_comm_barrier(r->host, NULL));
        if (waits && r->me == 1)
            CUDA(cudaLaunchHostFunc(r->stream, late, (void *)(uintptr_t)LATE_US));
        if (waits)
            TRY(go(r, 0));
        if (with && sleepers && r->me == 0)
            CUDA(colo_k_probe_sleep(sleepers < 0 ? 1 : sleepers, sleepers > 0, LATE_US, r->stream));
        if (r->me == 0) {
            const float one = 1, zero = 0;
            char *c = r->matrix + 4 * (size_t)N * N;
            CUDA(cudaEventRecord(r->a, r->concurrent));
            for (int i = 0; i < PRODUCTS; i++)
                if (cublasGemmEx(r->blas, CUBLAS_OP_T, CUBLAS_OP_N, N, N, N, &one, r->matrix,
                                 CUDA_R_16BF, N, r->matrix + 2 * (size_t)N * N, CUDA_R_16BF, N,
                                 &zero, c, CUDA_R_16BF, N, CUBLAS_COMPUTE_32F,
                                 CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
                    return COLO_ERR_CUDA;
            CUDA(cudaEventRecord(r->b, r->concurrent));
            CUDA(cudaEventSynchronize(r->b));
            CUDA(cudaEventElapsedTime(&ms, r->a, r->b));
        }
        CUDA(cudaStreamSynchronize(r->stream));
        if (k >= 0)
            took[with][k / 2] = (double)ms;
    }
    for (int i = 0; i < 2; i++)
        qsort(took[i], RUNS, sizeof took[i][0], by_value);
    *share = r->me == 0 ? took[0][RUNS / 2] / took[1][RUNS / 2] : 0;
    return COLO_OK;
}

static colo_status_t one_line(struct rank *r, int32_t blocks)
{
    double push[LAYOUTS], peer[LAYOUTS], row[2][SMALL], share[SHARES];
    const int32_t sleepers[SHARES] = {0, -1, 1, blocks ? blocks : 24};
    for (int l = 0; l < LAYOUTS; l++) {
        TRY(stand_up(r, &layouts[l], (colo_shape_t){16, 4096, 4096, 0}, blocks));
        TRY(large(r, -1, &push[l]));
        TRY(large(r, layouts[l].pass, &peer[l]));
        for (int i = 0; l == 0 && i < SHARES; i++)
            TRY(concurrent(r, sleepers[i], &share[i]));
        TRY(lie_down(r));
    }
    for (int i = 0; i < SMALL; i++) {
        TRY(stand_up(r, &layouts[0], (colo_shape_t){8, small_rows[i], 256, 0}, blocks));
        TRY(in_a_row(r, true, &row[0][i]));
        TRY(in_a_row(r, false, &row[1][i]));
        TRY(lie_down(r));
    }
    if (r->me != 0)
        return COLO_OK;
    printf("| %d |", (int)blocks);
    for (int l = 0; l < LAYOUTS; l++)
        printf(" %.0f / %.0f (%.1f) |", peer[l], push[l], 100 * push[l] / peer[l]);
    for (int i = 0; i < SMALL; i++)
        printf(" %.1f / %.1f |", row[0][i], row[1][i]);
    for (int i = 0; i < SHARES; i++)
        printf(" %.1f |", 100 * share[i]);
    printf("\n");
    fflush(stdout);
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    struct rank r = {.host = world, .me = colo_comm_rank(world)};
    (void)arg;
    CUDA(cudaSetDevice(r.me));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&r.concurrent, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&r.a));
    CUDA(cudaEventCreate(&r.b));
    CUDA(cudaMalloc((void **)&r.matrix, 6 * (size_t)N * N));
    CUDA(cudaMemset(r.matrix, 0, 6 * (size_t)N * N));
    if (cublasCreate(&r.blas) != CUBLAS_STATUS_SUCCESS ||
        cublasSetStream(r.blas, r.concurrent) != CUBLAS_STATUS_SUCCESS)
        return COLO_ERR_CUDA;
    TRY(colo_comm_create_nccl(world, -1, &r.gpus));
    TRY(colo_comm_set_timeout(r.gpus, 20000));
    TRY(colo_memory_alloc(r.gpus, (size_t)2 << 30, &r.memory));
    job.arena[r.me] = colo_memory_data(r.memory);
    TRY(colo_comm_barrier(world, NULL));
    if (r.me == 0) {
        printf("| blocks |");
        for (int l = 0; l < LAYOUTS; l++)
            printf(" %s → %s%s %s: µs / push limit (%%) |", layouts[l].src, layouts[l].dst,
                   layouts[l].output == COLO_OUTPUT_FULL_SEQ ? " full" : "",
                   layouts[l].pass ? "backward" : "forward");
        for (int i = 0; i < SMALL; i++)
            printf(" %lld KiB arrive: µs in a graph / launched |", (long long)small_rows[i]);
        printf(" products meanwhile, %% of alone | a warp sleeps | a block sleeps | so many "
               "blocks sleep |\n|");
        for (int i = 0; i < LAYOUTS + SMALL + 1 + SHARES; i++)
            printf("---|");
        printf("\n");
    }
    for (int32_t i = 0; i < job.n; i++)
        TRY(one_line(&r, job.blocks[i]));
    colo_memory_destroy(&r.memory);
    colo_comm_destroy(&r.gpus);
    return COLO_OK;
}

int main(int argc, char **argv)
{
    int32_t blocks[64] = {0};
    job.blocks = blocks;
    job.n = argc > 1 ? argc - 1 : 1;
    for (int i = 1; i < argc && i <= 64; i++)
        blocks[i - 1] = atoi(argv[i]);
    const colo_status_t st = argc > 65 ? COLO_ERR_ARG : colo_comm_threads_run(RANKS, on_rank, NULL);
    if (st < 0) {
        fprintf(stderr, "%s: %s\n", colo_status_name(st), colo_last_error());
        return 1;
    }
    return 0;
}
