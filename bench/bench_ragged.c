/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_ragged.c - a ragged batch compared with a uniform one of as many bytes, in one run; and
 * what setting its tables costs the host.
 *
 * usage: bench_ragged [RANKS [H]]    bf16; RANKS 2 or 4 (4), a GPU each; 0: the host part only
 *
 * 64 images of 256 to 4,096 rows; each encoder replica has as many rows as any other, and the
 * uniform batch has 64 samples of the mean. Sequences are packed from 4 images of one replica, and
 * each destination replica has as many of these as any other, so both batches bring each rank the
 * same bytes, but for the padding of sequences. All passes of a layout run in each repetition, one
 * after the other. A time is that of the slowest rank, from events on its stream after a host
 * barrier; the median of 20 after 3. Outputs over peers and over NCCL are compared by checksum.
 *
 * The host part: processor time of colo_bridge_set_segments() on each of 64 ranks, threads, for
 * 10,000 segments; the best of 5 of each rank.
 */
#include "ranks.h"

#include <colobridge/nccl.h>

#include "perf/probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 4, PASSES = 8, IMAGES = 64, IN_SEQ = 4, SETS = 5 };
enum { MEAN = 2176, SHORT = 256, LONG = 4096, HOST_RANKS = 64, HOST_SEGMENTS = 10000 };

static const struct layout {
    const char *src, *dst;
    colo_output_t output;
} layouts[] = {
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", COLO_OUTPUT_FULL_SEQ},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=1,cp=4,dp=1", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=2,cp=2,dp=1", COLO_OUTPUT_SHARDED},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", COLO_OUTPUT_FULL_SEQ},
    {"tp=1,dp=4", "tp=1,cp=4,dp=1", COLO_OUTPUT_FULL_SEQ},
};

/* Each path: uniform forward, backward, ragged forward, backward. */
enum { PEER, NCCL };

static struct {
    int32_t ranks;
    int64_t h;
    float ms[PASSES][ITERATIONS][MOST];
    int64_t recv[2][2][MOST]; /* uniform, ragged; by pass */
    unsigned long long sum[PASSES][MOST];
    double set_us[HOST_RANKS], gpu_set_us[MOST];
} job;

/* ---- tables ---- */

typedef struct tables {
    int64_t count, nseqs;
    int64_t *rows, *src_dp, *seq, *pos, *seq_len, *seq_dp;
} tables_t;

static void tables_free(tables_t *t)
{
    free(t->rows);
}

static int64_t next(uint64_t *s)
{
    *s = *s * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)(*s >> 33);
}

/* @count segments of SHORT / @part to LONG / @part rows, each source replica with a sum of MEAN /
 * @part a segment; sequences of IN_SEQ of them, a multiple of @unit long. */
static bool tables_make(tables_t *t, int64_t count, int64_t part, int64_t srcs, int64_t dsts,
                        int64_t unit)
{
    const int64_t nseqs = (count + IN_SEQ - 1) / IN_SEQ, lo = SHORT / part, hi = LONG / part;
    int64_t *data = calloc((size_t)(4 * count + 2 * nseqs), sizeof *data);
    uint64_t seed = 7;
    if (!data)
        return false;
    *t = (tables_t){count,
                    nseqs,
                    data,
                    data + count,
                    data + 2 * count,
                    data + 3 * count,
                    data + 4 * count,
                    data + 4 * count + nseqs};
    for (int64_t d = 0; d < srcs; d++) {
        const int64_t first = count * d / srcs, end = count * (d + 1) / srcs;
        int64_t more = (end - first) * (MEAN / part);
        for (int64_t e = first; e < end; e++) {
            t->src_dp[e] = d;
            t->rows[e] = lo + next(&seed) % (hi - lo + 1);
            more -= t->rows[e];
        }
        for (int64_t e = first; more != 0; e = e + 1 < end ? e + 1 : first) {
            int64_t by = more < lo - t->rows[e] ? lo - t->rows[e] : more;
            by = by > hi - t->rows[e] ? hi - t->rows[e] : by;
            t->rows[e] += by;
            more -= by;
        }
    }
    for (int64_t q = 0; q < nseqs; q++) {
        t->seq_dp[q] = q * dsts / nseqs;
        for (int64_t e = q * IN_SEQ; e < (q + 1) * IN_SEQ && e < count; e++) {
            t->seq[e] = q;
            t->pos[e] = t->seq_len[q];
            t->seq_len[q] += t->rows[e];
        }
        t->seq_len[q] = (t->seq_len[q] + unit - 1) / unit * unit;
    }
    return true;
}

static colo_segments_t segments_of(const tables_t *t)
{
    return (colo_segments_t){.struct_size = sizeof(colo_segments_t),
                             .count = t->count,
                             .rows = t->rows,
                             .src_dp = t->src_dp,
                             .seq = t->seq,
                             .pos = t->pos,
                             .nseqs = t->nseqs,
                             .seq_len = t->seq_len,
                             .seq_dp = t->seq_dp};
}

static double thread_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* The best of SETS; the last batch stays. */
static colo_status_t set_tables(colo_bridge_t *b, const colo_segments_t *s, colo_batch_t **batch,
                                double *us)
{
    *us = 0;
    for (int i = 0; i < SETS; i++) {
        colo_batch_destroy(batch);
        const double from = thread_us();
        TRY(colo_bridge_set_segments(b, s, batch));
        const double took = thread_us() - from;
        *us = i == 0 || took < *us ? took : *us;
    }
    return COLO_OK;
}

/* ---- a layout on a rank ---- */

struct rank {
    colo_comm_t *host, *gpus;
    int32_t me;
    colo_memory_t *memory;
    colo_bridge_t *uniform[2], *ragged[2]; /* by path */
    colo_batch_t *batch[2];
    colo_tensor_t x[2], y[2]; /* uniform, ragged */
    unsigned long long *sum;
    cudaStream_t stream;
};

static colo_status_t run(struct rank *r, int pass)
{
    const int path = pass / 4;
    const bool ragged = pass / 2 % 2, back = pass % 2;
    colo_tensor_t *in = back ? &r->y[ragged] : &r->x[ragged];
    colo_tensor_t *out = back ? &r->x[ragged] : &r->y[ragged];
    if (ragged)
        return back ? colo_batch_backward(r->batch[path], in, out, 1, r->stream)
                    : colo_batch_forward(r->batch[path], in, out, 1, r->stream);
    return back ? colo_bridge_backward(r->uniform[path], in, out, r->stream)
                : colo_bridge_forward(r->uniform[path], in, out, r->stream);
}

static colo_status_t check(struct rank *r)
{
    for (int pass = 0; pass < PASSES; pass++) {
        const bool ragged = pass / 2 % 2, back = pass % 2;
        const colo_tensor_t *in = back ? &r->y[ragged] : &r->x[ragged];
        const colo_tensor_t *out = back ? &r->x[ragged] : &r->y[ragged];
        const int64_t nin = 2 * colo_tensor_count(in), nout = 2 * colo_tensor_count(out);
        CUDA(colo_k_probe_fill(in->data, nin, 1, 17 * (uint64_t)r->me + (uint64_t)back, r->stream));
        CUDA(cudaMemsetAsync(out->data, 0xff, (size_t)nout, r->stream));
        CUDA(cudaMemsetAsync(r->sum, 0, sizeof *r->sum, r->stream));
        TRY(colo_comm_barrier(r->host, NULL));
        TRY(run(r, pass));
        CUDA(colo_k_probe_read(out->data, nout, r->sum, r->stream));
        CUDA(cudaMemcpyAsync(&job.sum[pass][r->me], r->sum, sizeof *r->sum, cudaMemcpyDeviceToHost,
                             r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
        TRY(colo_comm_barrier(r->host, NULL));
    }
    return COLO_OK;
}

static colo_status_t open_layout(struct rank *r, const struct layout *l)
{
    colo_layout_t src, dst;
    tables_t t;
    int64_t s[2][2], shape[3];
    TRY(bench_layouts(l->src, l->dst, &src, &dst));
    const int64_t dp = colo_grid_extent(&src.grid, "dp"), cp = colo_grid_extent(&dst.grid, "cp"),
                  dd = colo_grid_extent(&dst.grid, "dp");
    if (!tables_make(&t, IMAGES, 1, dp, dd, 2 * cp))
        return COLO_ERR_NOMEM;
    const colo_segments_t segments = segments_of(&t);
    colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT,
                                .src = &src,
                                .dst = &dst,
                                .shape = {IMAGES, MEAN, job.h, 0},
                                .dtype = COLO_BF16,
                                .axes = "th",
                                .output = l->output,
                                .mem = COLO_MEM_CUDA};
    for (int k = 0; k < 2; k++) {
        cfg.transport = k == PEER ? COLO_TRANSPORT_PEER : COLO_TRANSPORT_NCCL;
        cfg.ragged = false;
        cfg.shape = (colo_shape_t){IMAGES, MEAN, job.h, 0};
        TRY(colo_bridge_create(&r->uniform[k], &cfg, r->gpus));
        cfg.ragged = true;
        cfg.shape = (colo_shape_t){.features = job.h};
        TRY(colo_bridge_create(&r->ragged[k], &cfg, r->gpus));
        TRY(colo_bridge_set_segments(r->ragged[k], &segments, &r->batch[k]));
    }
    colo_bridge_rows(r->ragged[PEER], &s[1][0], &s[1][1]);
    (void)colo_bridge_src_shape(r->uniform[PEER], shape);
    s[0][0] = shape[0];
    (void)colo_bridge_dst_shape(r->uniform[PEER], shape);
    s[0][1] = shape[0];
    char *data = colo_memory_data(r->memory),
         *half = data + colo_memory_bytes(r->memory) / 512 * 256;
    for (int k = 0; k < 2; k++) {
        r->x[k] = colo_tensor_cuda(data, COLO_BF16, r->me, 2, (int64_t[]){s[k][0], job.h});
        r->y[k] = colo_tensor_cuda(half, COLO_BF16, r->me, 2, (int64_t[]){s[k][1], job.h});
        const colo_plan_t *plan =
            k ? colo_batch_plan(r->batch[PEER]) : colo_bridge_plan(r->uniform[PEER]);
        for (int pass = 0; pass < 2; pass++) {
            colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};
            TRY(colo_plan_bytes(plan, (colo_pass_t)pass, &bytes));
            job.recv[k][pass][r->me] = bytes.recv;
        }
    }
    tables_free(&t);
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t close_layout(struct rank *r)
{
    CUDA(cudaStreamSynchronize(r->stream));
    TRY(colo_comm_barrier(r->host, NULL));
    for (int k = 0; k < 2; k++) {
        colo_batch_destroy(&r->batch[k]);
        colo_bridge_destroy(&r->ragged[k]);
        colo_bridge_destroy(&r->uniform[k]);
    }
    return COLO_OK;
}

/* ---- report ---- */

static double most_mib(const int64_t *v)
{
    int64_t m = 0;
    for (int32_t k = 0; k < job.ranks; k++)
        m = v[k] > m ? v[k] : m;
    return (double)m / (1 << 20);
}

static void report(const struct layout *l)
{
    for (int path = PEER; path <= NCCL; path++)
        for (int back = 0; back < 2; back++) {
            const double u = bench_median_us(job.ms[4 * path + back][0], MOST),
                         g = bench_median_us(job.ms[4 * path + 2 + back][0], MOST);
            const bool same = memcmp(job.sum[2 + back], job.sum[6 + back], sizeof job.sum[0]) == 0;
            printf("| %s → %s%s | %s | %s | %.1f | %.1f | %.0f | %.0f | %.3f | %s |\n", l->src,
                   l->dst, l->output == COLO_OUTPUT_FULL_SEQ ? " full" : "", path ? "nccl" : "peer",
                   back ? "backward" : "forward", most_mib(job.recv[0][back]),
                   most_mib(job.recv[1][back]), u, g, g / u, same ? "same" : "DIFFERENT");
        }
    fflush(stdout);
}

/* 10,000 segments on the bridge of the last layout over peers, lists of the kernel among it. */
static colo_status_t many_segments(struct rank *r, const struct layout *l)
{
    colo_grid_t gs, gd;
    tables_t t;
    colo_batch_t *batch = NULL;
    TRY(open_layout(r, l));
    TRY(colo_grid_parse(&gs, l->src, 0));
    TRY(colo_grid_parse(&gd, l->dst, 0));
    if (!tables_make(&t, HOST_SEGMENTS, 16, colo_grid_extent(&gs, "dp"),
                     colo_grid_extent(&gd, "dp"), 2 * colo_grid_extent(&gd, "cp")))
        return COLO_ERR_NOMEM;
    const colo_segments_t segments = segments_of(&t);
    TRY(set_tables(r->ragged[PEER], &segments, &batch, &job.gpu_set_us[r->me]));
    colo_batch_destroy(&batch);
    tables_free(&t);
    return close_layout(r);
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    struct rank r = {.host = world, .me = colo_comm_rank(world)};
    const size_t all = (size_t)(IMAGES * (MEAN + 64) * job.h) * 2;
    const struct layout *last = NULL;
    CUDA(cudaSetDevice(r.me));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&r.sum, sizeof *r.sum));
    TRY(colo_comm_create_nccl(world, -1, &r.gpus));
    TRY(colo_comm_set_timeout(r.gpus, 20000));
    TRY(colo_memory_alloc(r.gpus, 2 * all, &r.memory));
    if (r.me == 0)
        printf("| layout | path | pass | uniform arrives MiB | ragged arrives MiB | uniform µs | "
               "ragged µs | ragged / uniform | outputs |\n|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        colo_grid_t g;
        TRY(colo_grid_parse(&g, layouts[i].src, 0));
        if (colo_grid_extent(&g, "dp") != job.ranks)
            continue;
        last = &layouts[i];
        TRY(open_layout(&r, last));
        TRY(check(&r));
        TRY(bench_measure(&r, r.host, r.stream, run, PASSES, job.ms[0][0], MOST));
        TRY(colo_comm_barrier(world, NULL));
        if (r.me == 0)
            report(last);
        TRY(close_layout(&r));
    }
    if (last)
        TRY(many_segments(&r, last));
    TRY(colo_comm_barrier(world, NULL));
    colo_memory_destroy(&r.memory);
    colo_comm_destroy(&r.gpus);
    cudaFree(r.sum);
    return COLO_OK;
}

/* ---- the host part ---- */

static colo_status_t on_host(colo_comm_t *comm, void *arg)
{
    colo_layout_t src, dst;
    colo_bridge_t *bridge = NULL;
    colo_batch_t *batch = NULL;
    TRY(bench_layouts("tp=2,dp=32", "tp=2,cp=4,dp=8", &src, &dst));
    const colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT,
                                      .src = &src,
                                      .dst = &dst,
                                      .shape = {.features = 4096},
                                      .dtype = COLO_BF16,
                                      .output = COLO_OUTPUT_SHARDED,
                                      .ragged = true};
    TRY(colo_bridge_create(&bridge, &cfg, comm));
    const colo_segments_t segments = segments_of(arg);
    TRY(set_tables(bridge, &segments, &batch, &job.set_us[colo_comm_rank(comm)]));
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static double most_us(const double *v, int n)
{
    double m = 0;
    for (int i = 0; i < n; i++)
        m = v[i] > m ? v[i] : m;
    return m;
}

int main(int argc, char **argv)
{
    tables_t t;
    job.ranks = argc > 1 ? atoi(argv[1]) : MOST;
    job.h = argc > 2 ? atoll(argv[2]) : 4096;
    if ((job.ranks != 0 && job.ranks != 2 && job.ranks != MOST) || job.h < 8 || job.h % 8 ||
        !tables_make(&t, HOST_SEGMENTS, 16, 32, 8, 8)) {
        fprintf(stderr, "usage: bench_ragged [0, 2 or 4 ranks [H, a multiple of 8]]\n");
        return 2;
    }
    colo_status_t st = job.ranks ? colo_comm_threads_run(job.ranks, on_rank, NULL) : COLO_OK;
    if (st == COLO_OK)
        st = colo_comm_threads_run(HOST_RANKS, on_host, &t);
    tables_free(&t);
    if (st < 0) {
        fprintf(stderr, "%s: %s\n", colo_status_name(st), colo_last_error());
        return 1;
    }
    if (job.ranks)
        printf("\nset_segments of %d segments on %d GPUs, lists of boxes included: %.0f us on the "
               "slowest rank\n",
               HOST_SEGMENTS, (int)job.ranks, most_us(job.gpu_set_us, job.ranks));
    printf("set_segments of %d segments on %d ranks: %.0f us on the slowest rank\n", HOST_SEGMENTS,
           HOST_RANKS, most_us(job.set_us, HOST_RANKS));
    return 0;
}
