/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 04_embed_gpu.c - 04_embed on GPUs: a host runtime with its own device arena, its own ncclComm_t
 * and its own stream, one GPU a rank.
 *
 * The library borrows all three. The arena is one cudaMalloc() that is registered once, so that
 * peers reach any tensor that it hands out (where GPUs reach each other; else NCCL moves them).
 * Work is enqueued on rt's stream between rt's own copies; only rt waits, at the end. Ranks are
 * threads here, as the host communicator that carries what is no data; processes have
 * colo_comm_create_bootstrap() for it.
 *
 * With fewer than two GPUs it says so and exits with 77.
 */
#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <colobridge.h>
#include <colobridge/nccl.h>

enum { MOST = 8, ARENA = 1 << 20, ROWS = 8, FEATURES = 4 };

/* ---- the host's runtime, one per rank ---- */

struct rt {
    char *arena; /* one block of the device, handed out from the front */
    size_t used;
    cudaStream_t stream;
    ncclComm_t nccl;
    /* what is the library's */
    colo_comm_t *comm;
    colo_memory_t *memory;
    colo_bridge_t *bridge;
};

struct job {
    int ranks;
    ncclUniqueId id;
    colo_layout_t src, dst;
};

static void *rt_new(struct rt *rt, size_t bytes)
{
    void *p = rt->arena + rt->used;
    rt->used += (bytes + 255) / 256 * 256;
    return rt->used <= ARENA ? p : NULL;
}

static colo_status_t rt_init(struct rt *rt, int rank)
{
    void *arena = NULL;
    cudaError_t e = cudaSetDevice(rank);
    if (e == cudaSuccess)
        e = cudaMalloc(&arena, ARENA);
    rt->arena = arena;
    if (e == cudaSuccess)
        e = cudaStreamCreate(&rt->stream);
    if (e == cudaSuccess)
        return COLO_OK;
    fprintf(stderr, "04_embed_gpu: rank %d: %s\n", rank, cudaGetErrorString(e));
    return COLO_ERR_CUDA;
}

/* NCCL waits for a missing rank without limit, and there is nothing to abort yet: so all say first
 * that they will come. The barrier has a deadline, and ends at once when a rank has failed. */
static colo_status_t rt_connect(struct rt *rt, const struct job *job, colo_comm_t *world)
{
    const int rank = colo_comm_rank(world);
    colo_status_t st = colo_comm_barrier(world, NULL);
    if (st < 0)
        return st;
    ncclResult_t r = ncclCommInitRank(&rt->nccl, job->ranks, job->id, rank);
    if (r == ncclSuccess)
        return COLO_OK;
    fprintf(stderr, "04_embed_gpu: rank %d: %s\n", rank, ncclGetErrorString(r));
    return COLO_ERR_NCCL;
}

static void rt_end(struct rt *rt)
{
    if (rt->nccl)
        ncclCommDestroy(rt->nccl);
    if (rt->stream)
        cudaStreamDestroy(rt->stream);
    cudaFree(rt->arena);
}

/* ---- what embeds the library ---- */

static colo_status_t embed(struct rt *rt, const struct job *job, colo_comm_t *world)
{
    colo_bridge_config_t config = {
        COLO_BRIDGE_CONFIG_INIT, .src = &job->src,
        .dst = &job->dst,        .shape = {job->ranks, ROWS, FEATURES, 0},
        .dtype = COLO_F32,       .mem = COLO_MEM_CUDA};
    colo_status_t st = colo_comm_create_nccl_borrowed(rt->nccl, world, &rt->comm);
    if (st == COLO_OK)
        st = colo_memory_register(rt->comm, rt->arena, ARENA, &rt->memory);
    if (st == COLO_OK)
        st = colo_bridge_create(&rt->bridge, &config, rt->comm);
    return st;
}

static void leave(struct rt *rt) /* in this order, and before what was lent to the library ends */
{
    colo_bridge_destroy(&rt->bridge);
    colo_memory_destroy(&rt->memory);
    colo_comm_destroy(&rt->comm);
}

/* ---- a step: sample r is rank r's, its elements say so; each cp rank gives half the gradient ----
 */

static colo_status_t step(struct rt *rt, int rank)
{
    float x[ROWS * FEATURES], y[2 * ROWS * FEATURES], d_x[ROWS * FEATURES];
    const size_t bytes = sizeof x, first = (size_t)(rank / 2 * 2);
    const int32_t device = rank;
    colo_tensor_t in =
        colo_tensor_cuda(rt_new(rt, bytes), COLO_F32, device, 3, (int64_t[]){1, ROWS, FEATURES});
    colo_tensor_t out = colo_tensor_cuda(rt_new(rt, 2 * bytes), COLO_F32, device, 3,
                                         (int64_t[]){2, ROWS, FEATURES});
    colo_tensor_t d_in = in, d_out = out;
    colo_status_t st;
    d_in.data = rt_new(rt, bytes);
    d_out.data = rt_new(rt, 2 * bytes);
    for (int i = 0; i < ROWS * FEATURES; i++)
        x[i] = (float)(100 * rank + i);
    for (int i = 0; i < 2 * ROWS * FEATURES; i++)
        y[i] = 0.5f;
    cudaMemcpyAsync(in.data, x, sizeof x, cudaMemcpyHostToDevice, rt->stream);
    cudaMemcpyAsync(d_out.data, y, sizeof y, cudaMemcpyHostToDevice, rt->stream);
    st = colo_bridge_forward(rt->bridge, &in, &out, rt->stream);
    if (st == COLO_OK)
        st = colo_bridge_backward(rt->bridge, &d_out, &d_in, rt->stream);
    if (st < 0)
        return st;
    cudaMemcpyAsync(y, out.data, sizeof y, cudaMemcpyDeviceToHost, rt->stream);
    cudaMemcpyAsync(d_x, d_in.data, sizeof d_x, cudaMemcpyDeviceToHost, rt->stream);
    if (cudaStreamSynchronize(rt->stream) != cudaSuccess)
        return COLO_ERR_STATE;
    st = colo_comm_check(rt->comm); /* what went wrong on the stream, if something did */
    for (size_t i = 0; i < 2 * ROWS * FEATURES && st == COLO_OK; i++)
        if (y[i] != (float)(100 * (first + i / (ROWS * FEATURES)) + i % (ROWS * FEATURES)))
            st = COLO_ERR_STATE;
    for (int i = 0; i < ROWS * FEATURES && st == COLO_OK; i++)
        if (d_x[i] != 1.0f)
            st = COLO_ERR_STATE;
    if (st == COLO_OK && rank == 0)
        printf("%d GPUs over %s, memory %s: y[1] of sample 1 is %g, its gradient %g\n",
               (int)colo_comm_size(rt->comm), colo_comm_backend(rt->comm),
               colo_memory_is_p2p(rt->memory) ? "reached" : "staged",
               (double)y[ROWS * FEATURES + 1], (double)d_x[1]);
    return st;
}

static colo_status_t rank_main(colo_comm_t *world, void *arg)
{
    const struct job *job = arg;
    const int rank = colo_comm_rank(world);
    struct rt rt;
    memset(&rt, 0, sizeof rt);
    colo_status_t st = rt_init(&rt, rank);
    if (st == COLO_OK)
        st = rt_connect(&rt, job, world);
    if (st == COLO_OK)
        st = embed(&rt, job, world);
    if (st == COLO_OK)
        st = step(&rt, rank);
    leave(&rt);
    rt_end(&rt);
    return st;
}

int main(void)
{
    static struct job job;
    colo_grid_t src, dst;
    char spec[32];
    int gpus = 0;

    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < 2) {
        fprintf(stderr, "04_embed_gpu: needs two GPUs, found %d\n", gpus);
        return 77;
    }
    job.ranks = (gpus < MOST ? gpus : MOST) / 2 * 2;
    snprintf(spec, sizeof spec, "dp=%d", job.ranks);
    if (colo_grid_parse(&src, spec, 0) < 0)
        goto fail;
    snprintf(spec, sizeof spec, "cp=2,dp=%d", job.ranks / 2);
    if (colo_grid_parse(&dst, spec, 0) < 0 || colo_layout_init_src(&job.src, &src) < 0 ||
        colo_layout_init_dst(&job.dst, &dst) < 0 || ncclGetUniqueId(&job.id) != ncclSuccess ||
        colo_comm_threads_run(job.ranks, rank_main, &job) < 0)
        goto fail;
    return 0;
fail:
    fprintf(stderr, "04_embed_gpu: %s\n", colo_last_error());
    return 1;
}
