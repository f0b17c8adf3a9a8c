/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_nccl_bridge.c - a bridge over NCCL: EXACT, COLLECTIVE and the link, in one run.
 *
 * usage: bench_nccl_bridge SRC DST B S H [AXES]      sharded output, bf16, as many GPUs as ranks
 *
 * Ranks are threads with a GPU each. A time is that of the slowest rank, from events on its stream
 * after a host barrier; the median of 30 after 5. The link: the largest number of bytes that one
 * rank must receive, as one contiguous message around the ring of all ranks, on the same comm.
 */
#include <colobridge.h>
#include <colobridge/nccl.h>

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM = 5, ITERATIONS = 30, WAYS = 5, RANKS = 16 };

static struct {
    colo_layout_t src, dst;
    colo_shape_t shape;
    const char *axes;
    int32_t n;
    float ms[WAYS][ITERATIONS][RANKS];
    int64_t recv[2][RANKS], in[RANKS], out[RANKS];
} job;

#define CUDA(expr)                                                             \
    do {                                                                       \
        cudaError_t e_ = (expr);                                               \
        if (e_ != cudaSuccess) {                                               \
            fprintf(stderr, "%s: %s\n", #expr, cudaGetErrorString(e_));        \
            return COLO_ERR_CUDA;                                              \
        }                                                                      \
    } while (0)
#define TRY(expr)                 \
    do {                          \
        colo_status_t s_ = (expr); \
        if (s_ < 0)               \
            return s_;            \
    } while (0)

struct rank {
    colo_comm_t *host, *gpus;
    colo_bridge_t *bridge[2]; /* EXACT, COLLECTIVE or NULL */
    colo_tensor_t x, y;
    char *send, *recv;
    int64_t link;
    cudaStream_t stream;
};

static colo_status_t run(struct rank *r, int way)
{
    if (way == 4) {
        const int32_t n = colo_comm_size(r->gpus), me = colo_comm_rank(r->gpus);
        colo_box_t from = {r->send, {1, 1, r->link / 2}, {0, 0, 1}}, to = from;
        to.data = r->recv;
        colo_message_t out = {(me + 1) % n, 1, &from}, in = {(me + n - 1) % n, 1, &to};
        return r->link ? colo_comm_exchange(r->gpus, &out, 1, &in, 1, COLO_BF16, r->stream)
                       : COLO_OK;
    }
    colo_bridge_t *b = r->bridge[way / 2];
    if (!b)
        return COLO_OK;
    return way % 2 ? colo_bridge_backward(b, &r->y, &r->x, r->stream)
                   : colo_bridge_forward(b, &r->x, &r->y, r->stream);
}

static colo_status_t measure(struct rank *r)
{
    const int32_t me = colo_comm_rank(r->gpus);
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    for (int i = -WARM; i < ITERATIONS; i++)
        for (int way = 0; way < WAYS; way++) {
            TRY(colo_comm_barrier(r->host, NULL));
            CUDA(cudaEventRecord(a, r->stream));
            TRY(run(r, way));
            CUDA(cudaEventRecord(b, r->stream));
            CUDA(cudaEventSynchronize(b));
            if (i >= 0)
                CUDA(cudaEventElapsedTime(&job.ms[way][i][me], a, b));
        }
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    struct rank r = {.host = world};
    const int32_t me = colo_comm_rank(world);
    (void)arg;
    CUDA(cudaSetDevice(me));
    CUDA(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking));
    TRY(colo_comm_nccl_create(world, -1, &r.gpus));
    colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT,
                                .src = &job.src,
                                .dst = &job.dst,
                                .shape = job.shape,
                                .dtype = COLO_BF16,
                                .axes = job.axes,
                                .output = COLO_SHARDED,
                                .mem = COLO_CUDA};
    TRY(colo_bridge_create(&r.bridge[0], &cfg, r.gpus));
    cfg.algo = COLO_COLLECTIVE;
    if (colo_bridge_create(&r.bridge[1], &cfg, r.gpus) < 0)
        TRY(colo_comm_check(r.gpus));
    for (int way = 0; way < 2; way++)
        job.recv[way][me] = colo_plan_bytes(colo_bridge_plan(r.bridge[0]), (colo_way_t)way).recv;
    TRY(colo_comm_barrier(world, NULL));
    for (int32_t k = 0; k < job.n; k++)
        for (int way = 0; way < 2; way++)
            r.link = job.recv[way][k] > r.link ? job.recv[way][k] : r.link;
    int64_t shape[3];
    int32_t nd = colo_bridge_src_shape(r.bridge[0], shape);
    r.x = colo_tensor_cuda(NULL, COLO_BF16, me, nd, shape);
    job.in[me] = 2 * colo_tensor_count(&r.x);
    nd = colo_bridge_dst_shape(r.bridge[0], shape);
    r.y = colo_tensor_cuda(NULL, COLO_BF16, me, nd, shape);
    job.out[me] = 2 * colo_tensor_count(&r.y);
    CUDA(cudaMalloc(&r.x.data, (size_t)job.in[me] + 16));
    CUDA(cudaMalloc(&r.y.data, (size_t)job.out[me] + 16));
    CUDA(cudaMalloc((void **)&r.send, (size_t)r.link + 16));
    CUDA(cudaMalloc((void **)&r.recv, (size_t)r.link + 16));
    CUDA(cudaMemset(r.x.data, 0x3c, (size_t)job.in[me]));
    CUDA(cudaMemset(r.y.data, 0x3d, (size_t)job.out[me]));
    CUDA(cudaDeviceSynchronize());
    colo_status_t st = measure(&r);
    bool collective = r.bridge[1] != NULL;
    colo_bridge_destroy(&r.bridge[0]);
    colo_bridge_destroy(&r.bridge[1]);
    cudaFree(r.x.data);
    cudaFree(r.y.data);
    cudaFree(r.send);
    cudaFree(r.recv);
    colo_comm_destroy(&r.gpus);
    return st < 0 ? st : collective ? COLO_OK : COLO_OK;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median_us(int way)
{
    float worst[ITERATIONS];
    for (int i = 0; i < ITERATIONS; i++) {
        worst[i] = 0;
        for (int32_t k = 0; k < job.n; k++)
            worst[i] = job.ms[way][i][k] > worst[i] ? job.ms[way][i][k] : worst[i];
    }
    qsort(worst, ITERATIONS, sizeof worst[0], by_value);
    return worst[ITERATIONS / 2] * 1e3;
}

static int64_t most(const int64_t *v)
{
    int64_t m = 0;
    for (int32_t k = 0; k < job.n; k++)
        m = v[k] > m ? v[k] : m;
    return m;
}

int main(int argc, char **argv)
{
    colo_grid_t src, dst;
    if (argc < 6) {
        fprintf(stderr, "usage: %s SRC DST B S H [AXES]\n", argv[0]);
        return 2;
    }
    job.shape = (colo_shape_t){atoll(argv[3]), atoll(argv[4]), atoll(argv[5]), 0};
    job.axes = argc > 6 ? argv[6] : "bsh";
    if (colo_grid_parse(&src, argv[1], 0) < 0 || colo_grid_parse(&dst, argv[2], 0) < 0 ||
        colo_layout_init_src(&job.src, &src) < 0 || colo_layout_init_dst(&job.dst, &dst) < 0) {
        fprintf(stderr, "%s\n", colo_last_error());
        return 2;
    }
    job.n = (int32_t)src.size;
    if (job.n != (int32_t)dst.size || job.n > RANKS || job.n < 2) {
        fprintf(stderr, "grids of %d and %d ranks, expected the same, 2..%d\n", job.n,
                (int)dst.size, RANKS);
        return 2;
    }
    colo_status_t st = colo_comm_threads_run(job.n, on_rank, NULL);
    if (st < 0) {
        fprintf(stderr, "%s: %s\n", colo_status_name(st), colo_last_error());
        return 1;
    }
    double f = median_us(0), b = median_us(1), cf = median_us(2), cb = median_us(3);
    double l = median_us(4), mib = 1 << 20;
    double rf = (double)most(job.recv[0]), rb = (double)most(job.recv[1]);
    double lb = rf > rb ? rf : rb;
    printf("| %s → %s %s | %.0f → %.0f | %.0f + %.0f | %.0f / %.0f | %.0f / %.0f | %.2f | %.0f / %.0f "
           "| %.0f at %.0f MiB |\n",
           argv[1], argv[2], job.axes, (double)most(job.in) / mib, (double)most(job.out) / mib,
           rf / mib, rb / mib, f, b, cf, cb, (cf + cb) / (f + b), rf / f * 1e-3, rb / b * 1e-3,
           l > 0 ? lb / l * 1e-3 : 0, lb / mib);
    return 0;
}
