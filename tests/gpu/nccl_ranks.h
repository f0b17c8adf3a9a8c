/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl_ranks.h - ranks that are threads, or processes, with a GPU each, and a bridge case on device
 * memory.
 *
 * Inputs and expectations are those of harness/bridge_case.h: made on the host by the oracle, put
 * to the device, run there, copied back, compared byte by byte.
 */
#ifndef TESTS_GPU_NCCL_RANKS_H
#define TESTS_GPU_NCCL_RANKS_H

#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ranks.h"

#include <colobridge/nccl.h>

#include <cuda_runtime_api.h>

typedef struct t_gpu_rank {
    colo_comm_t *host, *gpus; /* the same ranks */
    int32_t rank, size;
    cudaStream_t stream;
} t_gpu_rank_t;
typedef colo_status_t (*t_gpu_fn)(t_gpu_rank_t *r, void *arg);

int t_gpu_count(void); /* no more than there can be ranks; before CUDA is asked in this process */
bool t_gpus_enough(int n); /* else it says so, for main to return T_EXIT_SKIP */
/* @n ranks as T_RANKS says (harness/ranks.h), rank r on device r; gpus is NULL when @bare: the test
 * makes it. What ranks write in @arg must be shared by t_share(). */
colo_status_t t_gpus_run(int32_t n, bool bare, t_gpu_fn fn, void *arg);

colo_status_t t_cuda(cudaError_t e, const char *what);
#define rank_cuda(expr) rank_try(t_cuda((expr), #expr))

/* One case on r->gpus: create, forward, backward, compare, destroy. */
colo_status_t t_gpu_case(t_gpu_rank_t *r, const t_case_t *c);
colo_status_t t_gpu_way(t_gpu_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                        bool backward);

#endif
