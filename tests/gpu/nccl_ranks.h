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

#include "gpu/to_device.h"
#include "harness/bridge_case.h"
#include "harness/ranks.h"

#include <colobridge/nccl.h>

#include <cuda_runtime_api.h>

typedef struct t_gpu_rank {
    colo_comm_t *host, *gpus; /* the same ranks */
    int32_t rank, size, device;
    cudaStream_t stream;
} t_gpu_rank_t;
typedef colo_status_t (*t_gpu_fn)(t_gpu_rank_t *r, void *arg);

/* Ranks that there can be, 8 at most: the GPUs; 8 threads on any number of them where
 * NCCL_MULTI_RANK_GPU_ENABLE says that they may share. Before CUDA is asked in this process. */
int t_gpu_count(void);
int t_device_count(void);
bool t_gpus_shared(void);
int32_t t_gpu_ranks(void); /* 8, 4 or 2 of them, what a layout divides well */
bool t_gpus_enough(int n); /* else it says so, for main to return T_EXIT_SKIP */
/* @n ranks as T_RANKS says (harness/ranks.h), rank r on device r modulo the devices; gpus is NULL
 * when @bare: the test makes it. What ranks write in @arg must be shared by t_share(). */
colo_status_t t_gpus_run(int32_t n, bool bare, t_gpu_fn fn, void *arg);

/* Its stream is empty, and so is every other rank's: now memory may be freed, which waits for the
 * device with the context locked. Where ranks share one, a rank would not get to launch what others
 * wait for. */
colo_status_t t_gpu_quiet(t_gpu_rank_t *r);

colo_status_t t_cuda(cudaError_t e, const char *what);
#define rank_cuda(expr) rank_try(t_cuda((expr), #expr))

/* One case on r->gpus: create, forward, backward, compare, destroy. */
colo_status_t t_gpu_case(t_gpu_rank_t *r, const t_case_t *c);
colo_status_t t_gpu_pass(t_gpu_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                         bool backward);

#endif
