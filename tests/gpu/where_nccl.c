/* SPDX-License-Identifier: Apache-2.0 */
/*
 * where_nccl.c - see loss/where.h: rank r has device r modulo the devices, and NCCL moves its
 * memory; one rank needs no NCCL. Tolerances are those of where_gpu.c.
 *
 * A rank's memory is taken before any rank's kernels run and kept until the process ends: taking it
 * and giving it back may wait for a device that waits for this rank.
 */
#include "gpu/gpu_ranks.h"
#include "loss/where.h"

enum { MOST = 8, ARENA = 192 << 20, ALIGN = 256 };

static struct seat {
    char *arena;
    cudaStream_t stream;
    size_t used;
    void *last; /* what was taken last, when it is still there */
    int32_t live;
} seats[MOST];
static _Thread_local struct seat *mine;

/* On a rank's thread no assertion returns to CMocka. */
static void must(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "where_nccl: %s: %s\n", what, cudaGetErrorString(e));
    abort();
}

static void wait(void)
{
    cudaStreamSynchronize(mine->stream); /* a call that failed says so itself */
}

static void set(void *to, const void *from, size_t bytes)
{
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, mine->stream), "filling");
    must(cudaStreamSynchronize(mine->stream), "filling");
}

static void get(void *to, const void *from, size_t bytes)
{
    must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, mine->stream), "fetching");
    must(cudaStreamSynchronize(mine->stream), "fetching");
}

static void *put(const void *from, size_t bytes)
{
    void *p = mine->arena + mine->used;
    mine->used += (bytes + ALIGN) / ALIGN * ALIGN;
    mine->live++;
    mine->last = p;
    must(mine->used <= ARENA ? cudaSuccess : cudaErrorMemoryAllocation, "memory of a rank");
    if (from)
        set(p, from, bytes);
    else
        must(cudaMemsetAsync(p, 0xa5, bytes, mine->stream), "filling");
    return p;
}

/* In any order; memory comes back when the last one goes, or all: workspaces are the last. */
static void drop(void *p)
{
    if (!p)
        return;
    if (p == mine->last)
        mine->used = (size_t)((char *)p - mine->arena);
    if (--mine->live == 0)
        mine->used = 0;
    mine->last = NULL;
}

static int32_t device(void)
{
    int d = -1;
    cudaGetDevice(&d);
    return d;
}

static colo_stream_t stream(void)
{
    return mine->stream;
}

static colo_status_t group_of(colo_comm_t *world, colo_comm_t **group)
{
    const int32_t rank = colo_comm_rank(world);
    int devices = 0;
    rank_cuda(cudaGetDeviceCount(&devices));
    mine = &seats[rank];
    rank_cuda(cudaSetDevice(rank % devices));
    if (!mine->stream)
        rank_cuda(cudaStreamCreateWithFlags(&mine->stream, cudaStreamNonBlocking));
    if (!mine->arena)
        rank_cuda(cudaMalloc((void **)&mine->arena, ARENA));
    rank_try(colo_comm_barrier(world, NULL));
    /* the threads' own would sum on the host, while the device writes */
    return colo_comm_size(world) > 1 ? colo_comm_create_nccl(world, -1, group)
                                     : colo_comm_create_self(group);
}

static int need(void)
{
    return t_gpus_enough(2) ? 0 : T_EXIT_SKIP;
}

where_t where = {COLO_MEM_CUDA, 32,  put,  get,    drop,   group_of, colo_comm_destroy,
                 need,          set, wait, device, stream, false};
