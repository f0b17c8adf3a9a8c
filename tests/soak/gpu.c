/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.c - a soak on GPUs. See soak.h. Ranks have a GPU each and a comm of NCCL; tensors of half of
 * the cases are in registered memory and move between peers, those of the others by NCCL. With
 * SOAK_PEERS=1 eight threads share the GPUs that there are, on comms without NCCL.
 */
#include "soak/soak.h"

#include "core/error.h"
#include "gpu/gpu_ranks.h"
#include "gpu/pairs.h"
#include "gpu/ragged_gpu.h"

enum { MANY = 8 };

const int64_t soak_device_slack = 8 << 20; /* CUDA takes 2 MiB at a time */

static bool peers_only(void)
{
    return getenv("SOAK_PEERS") != NULL;
}

int32_t soak_ranks(void)
{
    if (peers_only())
        return t_peers_enough(MANY) ? MANY : 0;
    return t_gpus_enough(2) ? t_gpu_ranks() : 0;
}

/* CUDA and NCCL keep what they like. */
int64_t soak_heap_slack(void)
{
    return INT64_MAX;
}

int64_t soak_device_bytes(void)
{
    size_t available, total;
    int64_t used = 0;
    int own, devices;
    if (cudaGetDevice(&own) != cudaSuccess || cudaGetDeviceCount(&devices) != cudaSuccess)
        return INT64_MAX;
    for (int d = 0; d < devices; d++) {
        if (d != own && !t_ranks_are_threads())
            continue; /* another process has it */
        if (cudaSetDevice(d) != cudaSuccess || cudaMemGetInfo(&available, &total) != cudaSuccess)
            return INT64_MAX;
        used += (int64_t)(total - available);
    }
    return cudaSetDevice(own) == cudaSuccess ? used : INT64_MAX;
}

/* A peer that gave up after the abort may be heard of first. */
bool soak_is_abort(colo_status_t st)
{
    return st == COLO_ERR_ABORTED || st == COLO_ERR_PEER;
}

struct job {
    colo_status_t (*fn)(soak_rank_t *rank, void *arg);
    void *arg;
};

static colo_status_t on_gpu(t_gpu_rank_t *r, void *arg)
{
    const struct job *job = arg;
    rank_try(colo_comm_set_timeout(r->gpus, t_long_wait()));
    if (!r->memory)
        rank_try(t_gpu_register(r, T_ARENA));
    return job->fn(&(soak_rank_t){r->host, r}, job->arg);
}

colo_status_t soak_on(colo_comm_t *world, colo_status_t (*fn)(soak_rank_t *rank, void *arg),
                      void *arg)
{
    struct job job = {fn, arg};
    return t_gpu_on(world, peers_only(), on_gpu, &job);
}

static t_gpu_rank_t *choose_memory(const soak_rank_t *rank, uint64_t *seed)
{
    t_gpu_rank_t *r = rank->where;
    r->used = 0;
    r->arena = t_below(seed, 2) || peers_only() ? colo_memory_data(r->memory) : NULL;
    return r;
}

colo_status_t soak_uniform(soak_rank_t *rank, uint64_t seed)
{
    t_gpu_rank_t *r = choose_memory(rank, &seed);
    const t_case_t c = t_seeded_case(&seed, r->size);
    r->shift = (size_t)t_below(&seed, 4) * colo_dtype_size(c.dtype);
    const colo_status_t st = t_gpu_case(r, &c);
    return st < 0 ? colo_fail_prefix(st, "%s", t_case_text(&c)) : st;
}

colo_status_t soak_ragged(soak_rank_t *rank, uint64_t seed)
{
    return t_ragged_batch(choose_memory(rank, &seed), seed);
}
