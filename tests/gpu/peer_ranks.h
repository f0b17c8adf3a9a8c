/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer_ranks.h - ranks that reach each other's GPU memory, as threads or (T_RANKS=sockets) as
 * processes, and a bridge case in memory that they registered.
 *
 * Rank r has device r modulo the devices, and a comm without NCCL (backends/peer_only.c), so any number of ranks runs on
 * one GPU. Nothing is allocated while kernels wait for each other there: tensors lie in an arena
 * that is registered once.
 */
#ifndef TESTS_GPU_PEER_RANKS_H
#define TESTS_GPU_PEER_RANKS_H

#include "harness/harness.h"

#include "harness/bridge_case.h"

#include <colobridge/nccl.h>

#include <cuda_runtime_api.h>

typedef struct t_peer_rank {
    colo_comm_t *host, *gpus; /* the same ranks */
    int32_t rank, size, device;
    cudaStream_t stream;
    colo_memory_t *memory; /* the arena */
    char *arena;
    size_t used, shift; /* shift: bytes that the next tensor is moved by */
} t_peer_rank_t;
typedef colo_status_t (*t_peer_fn)(t_peer_rank_t *r, void *arg);

/* Is there a GPU? Under a memory checker (T_CHECKED), which runs the kernels of a device one after
 * the other: one for each of @ranks? Asked in a process of its own, so that this one may still
 * fork. */
bool t_peer_enough(int ranks);
#define T_ARENA ((size_t)48 << 20)
/* NULL arena and memory when @bare: the test registers. */
colo_status_t t_peer_run(int32_t n, bool bare, t_peer_fn fn, void *arg, size_t bytes);
colo_status_t t_peer_cuda(cudaError_t e, const char *what);
#define peer_cuda(expr) rank_try(t_peer_cuda((expr), #expr))

/* A tensor of the arena with the bytes of @b, which stay borrowed. */
typedef struct t_placed {
    t_buffer_t host;
    char *at;
    colo_tensor_t t;
} t_placed_t;
colo_status_t t_topology(t_peer_rank_t *r, const t_case_t *c, t_role_t role, int64_t salt,
                         bool fill, t_placed_t *p);
/* Copies the host's bytes there, or back, on the rank's stream; waits for it when back. */
colo_status_t t_upload(t_peer_rank_t *r, t_placed_t *p);
colo_status_t t_download(t_peer_rank_t *r, t_placed_t *p);
void t_placed_free(t_placed_t *p);

/* One case on r->gpus: create, forward, backward, compare, destroy. */
colo_status_t t_peer_case(t_peer_rank_t *r, const t_case_t *c);
colo_status_t t_peer_pass(t_peer_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                          bool backward);
/* Destroys a bridge when no rank's kernel runs any more: freeing waits for the device with the
 * context locked, and ranks of one device would not get to launch what others wait for. */
colo_status_t t_peer_end(t_peer_rank_t *r, colo_bridge_t **bridge);
/* A bridge of the case on device memory. */
colo_status_t t_peer_bridge(t_peer_rank_t *r, const t_case_t *c, colo_bridge_t **bridge);

#endif
