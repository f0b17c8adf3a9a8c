/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_direct.c - a bridge over peers' memory, over NCCL, and what links and memory give, in one
 * run.
 *
 * usage: bench_direct [B S H]      bf16; layouts of 4 ranks, a GPU each; without a shape also small
 * ones
 *
 * Ranks are threads. A time is that of the slowest rank, from events on its stream after a host
 * barrier; the median of 20 after 3. The limit: as many bytes as the rank with the most receives,
 * written by a plain kernel into the next rank's memory, all ranks at once; and the bytes that
 * stay, copied by the same kernel on the device. Both paths' outputs are compared by checksum.
 *
 * Small: calls in a row, in one graph or launched one by one, divided by their number.
 */
#include "ranks.h"

#include <colobridge/nccl.h>

#include "perf/probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, WAYS = 8, ROW = 50 };

static const struct layout {
    const char *src, *dst, *axes;
    colo_output_t output;
} layouts[] = {
    {"tp=2,dp=2", "tp=1,cp=2,dp=2", "bsh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", "bsh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=1,cp=4,dp=1", "bsh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=2,cp=2,dp=1", "bsh", COLO_OUTPUT_SHARDED},
    {"tp=4,dp=1", "tp=1,cp=2,dp=2", "bsh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=4,dp=1", "bsh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", "sbh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=2,cp=2,dp=1", "sbh", COLO_OUTPUT_SHARDED},
    {"tp=4,dp=1", "tp=1,cp=2,dp=2", "sbh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=4,dp=1", "sbh", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", "bsh", COLO_OUTPUT_FULL_SEQ},
    {"tp=2,dp=2", "tp=1,cp=4,dp=1", "bsh", COLO_OUTPUT_FULL_SEQ},
};

enum { PEER_FWD, PEER_BWD, NCCL_FWD, NCCL_BWD, PUSH_FWD, PUSH_BWD, COPY_FWD, COPY_BWD };

static struct {
    colo_shape_t shape;
    float ms[WAYS][ITERATIONS][RANKS];
    int64_t recv[2][RANKS], local[2][RANKS], in[RANKS], out[RANKS];
    char *arena[RANKS];
    unsigned long long sum[4][RANKS];
    double row_us[6][RANKS];
} job;

struct rank {
    colo_comm_t *host, *gpus;
    int32_t me;
    colo_memory_t *memory;
    colo_bridge_t *bridge[2]; /* peer, NCCL */
    colo_tensor_t x, y;
    int64_t recv[2], local[2]; /* most of any rank */
    unsigned long long *sum;
    cudaStream_t stream;
};

static int64_t most(const int64_t *v)
{
    int64_t m = 0;
    for (int32_t k = 0; k < RANKS; k++)
        m = v[k] > m ? v[k] : m;
    return m;
}

static colo_status_t run(struct rank *r, int pass)
{
    if (pass < PUSH_FWD)
        return pass % 2 ? colo_bridge_backward(r->bridge[pass / 2], &r->y, &r->x, r->stream)
                        : colo_bridge_forward(r->bridge[pass / 2], &r->x, &r->y, r->stream);
    const bool push = pass < COPY_FWD;
    const int64_t bytes = push ? r->recv[pass % 2] : r->local[pass % 2];
    char *to = push ? job.arena[(r->me + 1) % RANKS] : job.arena[r->me];
    to += colo_memory_bytes(r->memory) / 512 * 256;
    CUDA(colo_k_probe_copy(to, job.arena[r->me], bytes, r->stream));
    return COLO_OK;
}

/* Checksums of y and of x after each path, from the same inputs. */
static colo_status_t check(struct rank *r)
{
    for (int pass = 0; pass < 4; pass++) {
        colo_tensor_t *in = pass % 2 ? &r->y : &r->x, *out = pass % 2 ? &r->x : &r->y;
        const int64_t nin = 2 * colo_tensor_count(in), nout = 2 * colo_tensor_count(out);
        CUDA(colo_k_probe_fill(in->data, nin, 1, 17 * (uint64_t)r->me + (uint64_t)pass % 2,
                               r->stream));
        CUDA(cudaMemsetAsync(out->data, 0xff, (size_t)nout, r->stream));
        CUDA(cudaMemsetAsync(r->sum, 0, sizeof *r->sum, r->stream));
        TRY(run(r, pass));
        CUDA(colo_k_probe_read(out->data, nout, r->sum, r->stream));
        CUDA(cudaMemcpyAsync(&job.sum[pass][r->me], r->sum, sizeof *r->sum, cudaMemcpyDeviceToHost,
                             r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
    }
    return COLO_OK;
}

static colo_status_t set_transport(struct rank *r, const char *to)
{
    TRY(colo_comm_barrier(r->host, NULL));
    if (r->me == 0)
        setenv("COLO_TRANSPORT", to, 1);
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t open_layout(struct rank *r, const struct layout *l, const colo_shape_t *shape)
{
    static const char *const transport[] = {"peer", "nccl"};
    colo_layout_t src, dst;
    TRY(bench_layouts(l->src, l->dst, &src, &dst));
    colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT, .src = &src,         .dst = &dst,
                                .shape = *shape,         .dtype = COLO_BF16,  .axes = l->axes,
                                .output = l->output,     .mem = COLO_MEM_CUDA};
    for (int k = 0; k < 2; k++) {
        TRY(set_transport(r, transport[k]));
        TRY(colo_bridge_create(&r->bridge[k], &cfg, r->gpus));
    }
    for (int pass = 0; pass < 2; pass++) {
        colo_plan_bytes_t p = {COLO_PLAN_BYTES_INIT};
        TRY(colo_plan_bytes(colo_bridge_plan(r->bridge[0]), (colo_pass_t)pass, &p));
        job.recv[pass][r->me] = p.recv;
        job.local[pass][r->me] = p.local;
    }
    int64_t s[3];
    char *data = colo_memory_data(r->memory);
    int32_t nd = colo_bridge_src_shape(r->bridge[0], s);
    r->x = colo_tensor_cuda(data, COLO_BF16, r->me, nd, s);
    job.in[r->me] = 2 * colo_tensor_count(&r->x);
    nd = colo_bridge_dst_shape(r->bridge[0], s);
    r->y = colo_tensor_cuda(data + (job.in[r->me] + 4095) / 4096 * 4096, COLO_BF16, r->me, nd, s);
    job.out[r->me] = 2 * colo_tensor_count(&r->y);
    TRY(colo_comm_barrier(r->host, NULL));
    for (int pass = 0; pass < 2; pass++) {
        r->recv[pass] = most(job.recv[pass]);
        r->local[pass] = most(job.local[pass]);
    }
    return COLO_OK;
}

static colo_status_t close_layout(struct rank *r)
{
    CUDA(cudaStreamSynchronize(r->stream));
    TRY(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(&r->bridge[0]);
    colo_bridge_destroy(&r->bridge[1]);
    return COLO_OK;
}

static void report(const struct layout *l)
{
    const double mib = 1 << 20;
    double t[WAYS], share[2];
    bool same = memcmp(job.sum[0], job.sum[2], sizeof job.sum[0]) == 0 &&
                memcmp(job.sum[1], job.sum[3], sizeof job.sum[1]) == 0;
    for (int pass = 0; pass < WAYS; pass++)
        t[pass] = bench_median_us(job.ms[pass][0], RANKS);
    for (int pass = 0; pass < 2; pass++) {
        double push = most(job.recv[pass]) ? t[PUSH_FWD + pass] : 0;
        double copy = most(job.local[pass]) ? t[COPY_FWD + pass] : 0;
        share[pass] = 100 * (push + copy) / t[pass];
    }
    printf("| %s → %s %s%s | %.0f → %.0f | %.0f + %.0f | %.0f + %.0f | %.0f / %.0f | %.0f / %.0f | "
           "%.0f / %.0f | %.0f / %.0f | %.0f / %.0f | %s |\n",
           l->src, l->dst, l->axes, l->output == COLO_OUTPUT_FULL_SEQ ? " full" : "",
           (double)most(job.in) / mib, (double)most(job.out) / mib, (double)most(job.recv[0]) / mib,
           (double)most(job.recv[1]) / mib, (double)most(job.local[0]) / mib,
           (double)most(job.local[1]) / mib, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7],
           share[0], share[1], same ? "same" : "DIFFERENT");
    fflush(stdout);
}

/* ---- small ---- */

static colo_status_t in_a_row(struct rank *r, int pass, bool graph, double *us)
{
    cudaEvent_t a, b;
    cudaGraph_t g = NULL;
    cudaGraphExec_t exec = NULL;
    float ms = 0;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    if (graph) {
        CUDA(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < ROW; i++)
            TRY(run(r, pass));
        CUDA(cudaStreamEndCapture(r->stream, &g));
        CUDA(cudaGraphInstantiate(&exec, g, 0));
        CUDA(cudaGraphUpload(exec, r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
    }
    float all[11];
    for (int k = -2; k < 11; k++) {
        TRY(colo_comm_barrier(r->host, NULL));
        if (graph) {
            CUDA(cudaEventRecord(a, r->stream));
            CUDA(cudaGraphLaunch(exec, r->stream));
        } else {
            for (int i = 0; i < 5; i++) /* past the barrier's skew */
                TRY(run(r, pass));
            CUDA(cudaEventRecord(a, r->stream));
            for (int i = 0; i < ROW; i++)
                TRY(run(r, pass));
        }
        CUDA(cudaEventRecord(b, r->stream));
        CUDA(cudaEventSynchronize(b));
        CUDA(cudaEventElapsedTime(&ms, a, b));
        if (k >= 0)
            all[k] = ms;
    }
    qsort(all, 11, sizeof all[0], bench_ascending);
    *us = all[5] * 1e3 / ROW;
    TRY(colo_comm_barrier(r->host, NULL));
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    if (g)
        CUDA(cudaGraphDestroy(g));
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    return COLO_OK;
}

static double slowest(int which)
{
    double m = 0;
    for (int32_t k = 0; k < RANKS; k++)
        m = job.row_us[which][k] > m ? job.row_us[which][k] : m;
    return m;
}

static colo_status_t small(struct rank *r)
{
    static const int64_t rows[] = {16, 64, 256, 1024};
    if (r->me == 0)
        printf("\n| B=8 H=256, S | arrives KiB | graph fwd / bwd | launched fwd / bwd | NCCL "
               "launched fwd / bwd |\n|---|---|---|---|---|\n");
    for (int l = 1; l < 4; l += 2)
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            colo_shape_t shape = {8, rows[i], 256, 0};
            TRY(open_layout(r, &layouts[l], &shape));
            TRY(check(r));
            for (int pass = 0; pass < 2; pass++) {
                TRY(in_a_row(r, pass, true, &job.row_us[pass][r->me]));
                TRY(in_a_row(r, pass, false, &job.row_us[2 + pass][r->me]));
                TRY(run(r, NCCL_FWD + pass));
                CUDA(cudaStreamSynchronize(r->stream));
                TRY(in_a_row(r, NCCL_FWD + pass, false, &job.row_us[4 + pass][r->me]));
            }
            TRY(colo_comm_barrier(r->host, NULL));
            if (r->me == 0)
                printf(
                    "| %s → %s, %lld | %.0f + %.0f | %.1f / %.1f | %.1f / %.1f | %.1f / %.1f |\n",
                    layouts[l].src, layouts[l].dst, (long long)rows[i],
                    (double)most(job.recv[0]) / 1024, (double)most(job.recv[1]) / 1024, slowest(0),
                    slowest(1), slowest(2), slowest(3), slowest(4), slowest(5));
            TRY(close_layout(r));
        }
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    struct rank r = {.host = world, .me = colo_comm_rank(world)};
    const size_t v = (size_t)(job.shape.samples * job.shape.rows * job.shape.features) * 2;
    CUDA(cudaSetDevice(r.me));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&r.sum, sizeof *r.sum));
    TRY(colo_comm_create_nccl(world, -1, &r.gpus));
    TRY(colo_comm_set_timeout(r.gpus, 20000));
    TRY(colo_memory_alloc(r.gpus, 3 * v + (64u << 20), &r.memory));
    job.arena[r.me] = colo_memory_data(r.memory);
    TRY(colo_comm_barrier(world, NULL));
    if (*(int *)arg)
        TRY(small(&r));
    if (r.me == 0)
        printf("\n| layout | in → out MiB | arrives MiB | stays MiB | peer µs | NCCL µs | push "
               "limit µs | copy limit µs | limit / peer %% | outputs |\n"
               "|---|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        TRY(open_layout(&r, &layouts[i], &job.shape));
        TRY(check(&r));
        TRY(bench_measure(&r, r.host, r.stream, run, WAYS, job.ms[0][0], RANKS));
        TRY(colo_comm_barrier(world, NULL));
        if (r.me == 0)
            report(&layouts[i]);
        TRY(close_layout(&r));
    }
    TRY(set_transport(&r, "auto"));
    colo_memory_destroy(&r.memory);
    colo_comm_destroy(&r.gpus);
    cudaFree(r.sum);
    return COLO_OK;
}

int main(int argc, char **argv)
{
    int with_small = argc < 4;
    job.shape = (colo_shape_t){16, 8192, 4096, 0};
    if (argc >= 4)
        job.shape = (colo_shape_t){atoll(argv[1]), atoll(argv[2]), atoll(argv[3]), 0};
    colo_status_t st = colo_comm_threads_run(RANKS, on_rank, &with_small);
    if (st < 0) {
        fprintf(stderr, "%s: %s\n", colo_status_name(st), colo_last_error());
        return 1;
    }
    return 0;
}
