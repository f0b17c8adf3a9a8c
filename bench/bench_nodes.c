/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_nodes.c - bridges between the GPUs of one host as if these were two hosts: peer memory
 * inside, NCCL between, captured; and what the links allow, in one run.
 *
 * usage: bench_nodes GPUS [B S H]     GPUS: 2, 4 or 8, half of them on each node (COLO_NODE)
 *
 * Ranks are threads. A time is that of the slowest rank, from events on its stream after a host
 * barrier; the median of 20 after 3. The bridge's calls are launches of captured graphs. The limit
 * is the sum of two times: as many bytes as enter the node on the rank with most of them, in one
 * contiguous message from the rank of the same place on the other node and one to it; then as many
 * as the rank with most of these gets inside, written by a plain kernel into the next rank of the
 * node, all ranks at once. Outputs are compared bit for bit with those of one level that was not
 * captured; they hold small whole numbers, so that sums are exact in any order.
 */
#include "ranks.h"

#include <colobridge/nccl.h>

#include "perf/probe.h"

#include <string.h>

enum { MOST = 8, WAYS = 8, TILE = 1000003 };
enum { TWO, ONE = 2, BETWEEN = 4, INSIDE = 6 }; /* and their backwards behind them */

static const struct layout {
    int gpus;
    const char *src, *dst;
    colo_output_t output;
    colo_grad_t grad;
    colo_dtype_t dtype;
} layouts[] = {
    {2, "tp=1,dp=2", "tp=1,cp=2", COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT, COLO_BF16},
    {2, "tp=1,dp=2", "tp=1,cp=2", COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL, COLO_F32},
    {4, "tp=2,dp=2", "tp=2,cp=2", COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT, COLO_BF16},
    {4, "tp=2,dp=2", "tp=4", COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT, COLO_BF16},
    {4, "tp=1,dp=4", "tp=1,cp=4", COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT, COLO_BF16},
    {4, "tp=2,dp=2", "tp=1,cp=4", COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL, COLO_F32},
    {8, "tp=2,dp=4", "tp=2,cp=4", COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT, COLO_BF16},
    {8, "tp=2,dp=4", "tp=4,cp=2", COLO_OUTPUT_SHARDED, COLO_GRAD_DISJOINT, COLO_BF16},
    {8, "tp=2,dp=4", "tp=1,cp=8", COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL, COLO_F32},
};

static struct {
    int32_t ranks;
    colo_shape_t shape;
    float ms[WAYS * ITERATIONS * MOST];
    int64_t between[2][MOST], inside[2][MOST];
    char *arena[MOST];
    bool wrong[MOST];
} job;

struct rank {
    colo_comm_t *host, *gpus;
    int32_t me;
    colo_memory_t *memory;
    colo_bridge_t *bridge[2]; /* two levels, one */
    colo_tensor_t x, y;
    cudaGraphExec_t graph[2][2];
    int64_t between[2], inside[2]; /* most of any rank */
    unsigned long long *wrong;
    cudaStream_t stream;
};

static int32_t node_of(int32_t rank)
{
    return rank / (job.ranks / 2);
}

static int64_t most(const int64_t *v)
{
    int64_t m = 0;
    for (int32_t k = 0; k < job.ranks; k++)
        m = v[k] > m ? v[k] : m;
    return m;
}

static int64_t bytes_of(const colo_tensor_t *t)
{
    return colo_tensor_count(t) * (int64_t)colo_dtype_size(t->dtype);
}

/* ---- one call ---- */

static colo_status_t call(struct rank *r, int which)
{
    colo_bridge_t *b = r->bridge[which / 2];
    return which % 2 ? colo_bridge_backward(b, &r->y, &r->x, r->stream)
                     : colo_bridge_forward(b, &r->x, &r->y, r->stream);
}

/* Half of the memory is for tensors, the other half for this. */
static char *spare(const struct rank *r, int32_t rank)
{
    return job.arena[rank] + colo_memory_bytes(r->memory) / 512 * 256;
}

static colo_status_t run(struct rank *r, int which)
{
    const int32_t half = job.ranks / 2, place = r->me % half, first = r->me - place;
    if (which < BETWEEN) {
        CUDA(cudaGraphLaunch(r->graph[which / 2][which % 2], r->stream));
        return COLO_OK;
    }
    if (which >= INSIDE) {
        CUDA(colo_k_probe_copy(spare(r, first + (place + 1) % half), job.arena[r->me],
                               r->inside[which % 2], r->stream));
        return COLO_OK;
    }
    const int32_t other = (r->me + half) % job.ranks;
    colo_box_t box[2];
    for (int k = 0; k < 2; k++)
        box[k] = (colo_box_t){.data = k ? spare(r, r->me) : job.arena[r->me],
                              .extent = {1, 1, r->between[which % 2]},
                              .stride = {0, 0, 1}};
    const colo_message_t m[2] = {{.peer = other, .nboxes = 1, .boxes = &box[0]},
                                 {.peer = other, .nboxes = 1, .boxes = &box[1]}};
    return colo_comm_exchange(r->gpus, &m[0], 1, &m[1], 1, COLO_U8, r->stream);
}

/* ---- a layout ---- */

/* Small whole numbers, alike on replicas that hold the same. */
static colo_status_t fill(struct rank *r, const colo_tensor_t *t, uint32_t seed)
{
    const size_t elem = colo_dtype_size(t->dtype), all = (size_t)bytes_of(t);
    char *tile = malloc(TILE * elem);
    if (!tile)
        return COLO_ERR_NOMEM;
    for (uint32_t i = 0; i < TILE; i++) {
        const float v = (float)((i + seed * 7919) * 2654435761u >> 28) - 8;
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        if (elem == 2)
            memcpy(tile + i * elem, &(uint16_t){(uint16_t)(bits >> 16)}, elem); /* bf16, exact */
        else
            memcpy(tile + i * elem, &bits, elem);
    }
    size_t done = all < TILE * elem ? all : TILE * elem;
    CUDA(cudaMemcpy(t->data, tile, done, cudaMemcpyHostToDevice));
    for (size_t n; done < all; done += n) {
        n = all - done < done ? all - done : done;
        CUDA(cudaMemcpy((char *)t->data + done, t->data, n, cudaMemcpyDeviceToDevice));
    }
    CUDA(cudaStreamSynchronize(NULL)); /* copies inside a device do not wait for their end */
    free(tile);
    return COLO_OK;
}

static void count_bytes(const struct rank *r, const colo_plan_message_t *m, int32_t n, int pass)
{
    for (int32_t i = 0; i < n; i++)
        (node_of((int32_t)m[i].peer) == node_of(r->me) ? job.inside : job.between)[pass][r->me] +=
            m[i].bytes;
}

static colo_status_t open_layout(struct rank *r, const struct layout *l)
{
    colo_layout_t src, dst;
    int64_t s[3], coord[3];
    int32_t n;
    TRY(bench_layouts(l->src, l->dst, &src, &dst));
    colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT, .src = &src,         .dst = &dst,
                                .shape = job.shape,      .dtype = l->dtype,   .grad = l->grad,
                                .output = l->output,     .mem = COLO_MEM_CUDA};
    for (int k = 0; k < 2; k++) {
        cfg.one_level = k;
        TRY(colo_bridge_create(&r->bridge[k], &cfg, r->gpus));
    }
    const colo_plan_t *p = colo_bridge_plan(r->bridge[0]);
    for (int i = 0; i < 2; i++) {
        const colo_pass_t pass = (colo_pass_t)i;
        job.between[i][r->me] = job.inside[i][r->me] = 0;
        const colo_plan_message_t *m = colo_plan_recvs(p, pass, &n);
        count_bytes(r, m, n, i);
        m = colo_plan_relays(p, pass, false, &n);
        count_bytes(r, m, n, i);
        m = colo_plan_sums(p, pass, false, &n);
        count_bytes(r, m, n, i);
    }
    char *data = colo_memory_data(r->memory);
    n = colo_bridge_src_shape(r->bridge[0], s);
    r->x = colo_tensor_cuda(data, l->dtype, r->me, n, s);
    n = colo_bridge_dst_shape(r->bridge[0], s);
    r->y = colo_tensor_cuda(data + (bytes_of(&r->x) + 4095) / 4096 * 4096, l->dtype, r->me, n, s);
    TRY(colo_grid_coord(&src.grid, r->me, "dp", &coord[0]));
    TRY(colo_grid_coord(&dst.grid, r->me, "dp", &coord[1]));
    TRY(colo_grid_coord(&dst.grid, r->me, "cp", &coord[2]));
    TRY(colo_comm_barrier(r->host, NULL));
    for (int pass = 0; pass < 2; pass++) {
        r->between[pass] = most(job.between[pass]);
        r->inside[pass] = (most(job.inside[pass]) + 15) / 16 * 16;
    }
    /* the outputs of one level, behind the tensors, then those of captured calls of two */
    job.wrong[r->me] = false;
    for (int pass = 0; pass < 2; pass++) {
        const colo_tensor_t *in = pass ? &r->y : &r->x, *out = pass ? &r->x : &r->y;
        char *expected = spare(r, r->me);
        unsigned long long wrong = 0;
        cudaGraph_t graph;
        TRY(fill(r, in, (uint32_t)(pass ? 10 + coord[1] * 8 + coord[2] : coord[0])));
        CUDA(cudaMemsetAsync(out->data, 0xff, (size_t)bytes_of(out), r->stream));
        TRY(call(r, ONE + pass));
        CUDA(cudaMemcpyAsync(expected, out->data, (size_t)bytes_of(out), cudaMemcpyDeviceToDevice,
                             r->stream));
        CUDA(cudaMemsetAsync(out->data, 0xff, (size_t)bytes_of(out), r->stream));
        CUDA(cudaMemsetAsync(r->wrong, 0, sizeof *r->wrong, r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
        for (int k = 0; k < 2; k++) {
            TRY(colo_comm_barrier(r->host, NULL));
            CUDA(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
            TRY(call(r, 2 * k + pass));
            CUDA(cudaStreamEndCapture(r->stream, &graph));
            CUDA(cudaGraphInstantiate(&r->graph[k][pass], graph, 0));
            CUDA(cudaGraphDestroy(graph));
            CUDA(cudaGraphUpload(r->graph[k][pass], r->stream));
            CUDA(cudaStreamSynchronize(r->stream));
        }
        TRY(colo_comm_barrier(r->host, NULL));
        TRY(run(r, TWO + pass));
        CUDA(colo_k_probe_diff(out->data, expected, bytes_of(out), r->wrong, r->stream));
        CUDA(cudaMemcpyAsync(&wrong, r->wrong, sizeof wrong, cudaMemcpyDeviceToHost, r->stream));
        CUDA(cudaStreamSynchronize(r->stream));
        job.wrong[r->me] = job.wrong[r->me] || wrong > 0;
    }
    return COLO_OK;
}

static colo_status_t close_layout(struct rank *r)
{
    CUDA(cudaStreamSynchronize(r->stream));
    TRY(colo_comm_barrier(r->host, NULL));
    for (int k = 0; k < 4; k++)
        CUDA(cudaGraphExecDestroy(r->graph[k / 2][k % 2]));
    TRY(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(&r->bridge[0]);
    colo_bridge_destroy(&r->bridge[1]);
    return COLO_OK;
}

/* Returns whether all is right. */
static bool report(const struct layout *l)
{
    const double mib = 1 << 20;
    double t[WAYS];
    bool same = true;
    for (int32_t k = 0; k < job.ranks; k++)
        same = same && !job.wrong[k];
    for (int w = 0; w < WAYS; w++)
        t[w] = bench_median_us(&job.ms[w * ITERATIONS * job.ranks], job.ranks);
    for (int pass = 0; pass < 2; pass++) {
        const double between = most(job.between[pass]) ? t[BETWEEN + pass] : 0,
                     inside = most(job.inside[pass]) ? t[INSIDE + pass] : 0;
        if (between + inside == 0)
            continue;
        printf(
            "| %s → %s %s %s | %s | %.1f in %.0f | %.1f in %.0f | %.0f | %.0f | %.0f | %.0f %% | "
            "%s |\n",
            l->src, l->dst, l->output == COLO_OUTPUT_FULL_SEQ ? "full" : "sharded",
            colo_dtype_name(l->dtype), pass ? "backward" : "forward",
            (double)most(job.between[pass]) / mib, between, (double)most(job.inside[pass]) / mib,
            inside, between + inside, t[TWO + pass], t[ONE + pass],
            100 * (between + inside) / t[TWO + pass], same ? "same" : "DIFFERENT");
    }
    fflush(stdout);
    return same;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    struct rank r = {.host = world, .me = colo_comm_rank(world)};
    const size_t v = (size_t)(job.shape.samples * job.shape.rows * job.shape.features) * 4;
    CUDA(cudaSetDevice(r.me));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc((void **)&r.wrong, sizeof *r.wrong));
    TRY(colo_comm_create_nccl(world, -1, &r.gpus));
    TRY(colo_comm_set_timeout(r.gpus, 20000));
    TRY(colo_memory_alloc(r.gpus, 5 * v + (64u << 20), &r.memory));
    job.arena[r.me] = colo_memory_data(r.memory);
    TRY(colo_comm_barrier(world, NULL));
    if (r.me == 0)
        printf(
            "| layout | pass | between nodes MiB, µs | inside MiB, µs | limit µs | two levels µs "
            "| one level µs | limit / two levels | bits of one level |\n"
            "|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        if (layouts[i].gpus != job.ranks)
            continue;
        TRY(open_layout(&r, &layouts[i]));
        TRY(bench_measure(&r, r.host, r.stream, run, WAYS, job.ms, job.ranks));
        TRY(colo_comm_barrier(world, NULL));
        if (r.me == 0 && !report(&layouts[i]))
            *(bool *)arg = true;
        TRY(close_layout(&r));
    }
    colo_memory_destroy(&r.memory);
    colo_comm_destroy(&r.gpus);
    cudaFree(r.wrong);
    return COLO_OK;
}

int main(int argc, char **argv)
{
    bool wrong = false;
    char nodes[2 * MOST];
    job.ranks = argc > 1 ? atoi(argv[1]) : 0;
    if (job.ranks != 2 && job.ranks != 4 && job.ranks != 8)
        return fprintf(stderr, "usage: bench-nodes GPUS [B S H]; GPUS: 2, 4 or 8\n"), 2;
    job.shape = (colo_shape_t){8, 4096, 4096, 0};
    if (argc > 4)
        job.shape = (colo_shape_t){atoll(argv[2]), atoll(argv[3]), atoll(argv[4]), 0};
    for (int32_t k = 0; k < job.ranks; k++)
        memcpy(nodes + 2 * k, node_of(k) ? "1," : "0,", 2);
    nodes[2 * job.ranks - 1] = 0;
    setenv("COLO_NODE", nodes, 1);
    const colo_status_t st = colo_comm_threads_run(job.ranks, on_rank, &wrong);
    if (st < 0)
        fprintf(stderr, "%s: %s\n", colo_status_name(st), colo_last_error());
    return st < 0 || wrong;
}
