/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_ranks.h - ranks that are threads, or processes, with GPUs, and a bridge case on device
 * memory: over NCCL with a GPU each, or over peers' memory, which they registered, on any number of
 * GPUs.
 *
 * Inputs and expectations are those of harness/bridge_case.h: made on the host by the oracle, put
 * to the device, run there, copied back, compared byte by byte.
 */
#ifndef TESTS_GPU_GPU_RANKS_H
#define TESTS_GPU_GPU_RANKS_H

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
    bool peers; /* a comm without NCCL */
    /* Over peers: nothing is allocated while kernels wait for each other on one GPU, so tensors lie
     * in memory that is registered once. NULL: each is allocated. */
    colo_memory_t *memory;
    char *arena;
    size_t capacity, used, shift; /* shift: bytes that the next tensor is moved by */
} t_gpu_rank_t;
typedef colo_status_t (*t_gpu_fn)(t_gpu_rank_t *r, void *arg);

/* Ranks that there can be, 8 at most: the GPUs; 8 threads on any number of them where
 * NCCL_MULTI_RANK_GPU_ENABLE says that they may share. Before CUDA is asked in this process. */
int t_gpu_count(void);
int t_device_count(void);
bool t_gpus_shared(void);
int32_t t_gpu_ranks(void); /* 8, 4 or 2 of them, what a layout divides well */
/* With T_ONE_GPU, ranks that are processes see one GPU each. */
bool t_gpus_enough(int n);        /* else it says so, for main to return T_EXIT_SKIP */
bool t_ranks_are_processes(void); /* the same */
/* Is there a GPU? Under a memory checker (T_CHECKED), which runs the kernels of a device one after
 * the other: one for each of @ranks? */
bool t_peers_enough(int ranks);

/* @n ranks as T_RANKS says (harness/ranks.h), rank r on device r modulo the devices; gpus is NULL
 * when @bare: the test makes it. What ranks write in @arg must be shared by t_share(). */
colo_status_t t_gpus_run(int32_t n, bool bare, t_gpu_fn fn, void *arg);
/* The same over peers, on a comm without NCCL (backends/direct_only.c); when @bare, the test
 * registers the memory. @bytes of @arg are shared. */
#define T_ARENA ((size_t)48 << 20)
colo_status_t t_peers_run(int32_t n, bool bare, t_gpu_fn fn, void *arg, size_t bytes);

/* A case whose body runs on each of @n ranks @r, bare or not. */
#define T_CASE_ON_GPUS(n, name) \
    T_CASE_BY(t_gpus_run(n, false, t_ranks_of_##name, NULL), name, t_gpu_rank_t *r)
#define T_CASE_ON_BARE_GPUS(n, name) \
    T_CASE_BY(t_gpus_run(n, true, t_ranks_of_##name, NULL), name, t_gpu_rank_t *r)
#define T_CASE_ON_PEERS(n, name) \
    T_CASE_BY(t_peers_run(n, false, t_ranks_of_##name, NULL, 0), name, t_gpu_rank_t *r)
#define T_CASE_ON_BARE_PEERS(n, name) \
    T_CASE_BY(t_peers_run(n, true, t_ranks_of_##name, NULL, 0), name, t_gpu_rank_t *r)

/* The same on one rank, in a world that there is. */
colo_status_t t_gpu_on(colo_comm_t *world, bool peers, t_gpu_fn fn, void *arg);

/* Its stream is empty, or was ended with an error. */
colo_status_t t_gpu_wait(const t_gpu_rank_t *r);
/* Its stream is empty, and so is every other rank's: now memory may be freed, which waits for the
 * device with the context locked. Where ranks share one, a rank would not get to launch what others
 * wait for. */
colo_status_t t_gpu_quiet(t_gpu_rank_t *r);

colo_status_t t_cuda(cudaError_t e, const char *what);
#define rank_cuda(expr) rank_try(t_cuda((expr), #expr))

/* Tensors lie in @memory from now on; or in new memory of the rank's, registered over r->gpus. */
void t_gpu_lie_in(t_gpu_rank_t *r, const colo_memory_t *memory);
colo_status_t t_gpu_register(t_gpu_rank_t *r, size_t bytes);
/* @bytes of the arena, or allocated where there is none: then @own is what to free. */
colo_status_t t_gpu_memory(t_gpu_rank_t *r, size_t bytes, char **data, void **own);
/* A tensor there with the bytes of @host. */
typedef struct t_placed {
    t_buffer_t host;
    char *data;
    void *own;
    colo_tensor_t t;
} t_placed_t;
colo_status_t t_place(t_gpu_rank_t *r, const t_case_t *c, t_role_t role, int64_t salt, bool fill,
                      t_placed_t *p);
/* Copies the host's bytes there, or back, on the rank's stream; waits for it when back. */
colo_status_t t_upload(t_gpu_rank_t *r, t_placed_t *p);
colo_status_t t_download(t_gpu_rank_t *r, t_placed_t *p);
void t_placed_free(t_placed_t *p);

/* A pass of a case with its tensors there, x and y or d_y and d_x. It ends with its scope. */
typedef struct t_gpu_call {
    t_gpu_rank_t *r;
    const t_case_t *c;
    int64_t salt;
    bool backward;
    t_placed_t in, out;
} t_gpu_call_t;
#define T_GPU_CALL(name) T_ENDS(t_gpu_call_end) t_gpu_call_t name = {0}
void t_gpu_call_end(t_gpu_call_t *k);
/* The input is what the oracle says, the output is blank; refill: the input of another @salt */
colo_status_t t_gpu_call_make(t_gpu_call_t *k, t_gpu_rank_t *r, const t_case_t *c, int64_t salt,
                              bool backward);
colo_status_t t_gpu_call_refill(t_gpu_call_t *k, int64_t salt);
colo_status_t t_gpu_call_run(const t_gpu_call_t *k, colo_bridge_t *bridge, cudaStream_t stream);
/* The output, copied back, is what the oracle says. */
colo_status_t t_gpu_call_compare(t_gpu_call_t *k);

/* A bridge of @comm with a forward in memory that is registered there. */
typedef struct t_gpu_stand {
    colo_bridge_t *bridge;
    colo_memory_t *memory;
    t_gpu_call_t call;
} t_gpu_stand_t;
colo_status_t t_gpu_stand_up(t_gpu_stand_t *s, t_gpu_rank_t *r, colo_comm_t *comm,
                             const t_case_t *c, size_t bytes);
void t_gpu_stand_end(t_gpu_stand_t *s);

/* Ends the capture of the rank's stream, whose calls gave @st: what can be launched, when all ranks
 * are quiet, because what may wait for the device has done it. */
colo_status_t t_gpu_captured(t_gpu_rank_t *r, colo_status_t st, cudaGraphExec_t *exec);
/* Keeps @stream waiting for so long; or a rank's for some microseconds, and now and then for up to
 * 3 ms. */
colo_status_t t_gpu_late(cudaStream_t stream, int64_t us);
colo_status_t t_gpu_late_at_random(t_gpu_rank_t *r, uint64_t *seed);

/* Forward and backward of a bridge, captured at once. It ends with its scope. */
typedef struct t_gpu_step {
    t_gpu_call_t forward, backward;
    cudaGraphExec_t exec;
} t_gpu_step_t;
#define T_GPU_STEP(name) T_ENDS(t_gpu_step_end) t_gpu_step_t name = {.exec = NULL}
void t_gpu_step_end(t_gpu_step_t *s);
colo_status_t t_gpu_step_capture(t_gpu_step_t *s, t_gpu_rank_t *r, const t_case_t *c,
                                 colo_bridge_t *bridge);
/* Launches it so many times, with new inputs; ranks are late at random before each @late-th launch,
 * 0: never. */
colo_status_t t_gpu_step_replay(t_gpu_step_t *s, int64_t launches, int64_t late);

/* One case on r->gpus: create, forward, backward, compare, destroy. */
colo_status_t t_gpu_case(t_gpu_rank_t *r, const t_case_t *c);
colo_status_t t_gpu_pass(t_gpu_rank_t *r, colo_bridge_t *bridge, const t_case_t *c, int64_t salt,
                         bool backward);
/* A bridge of the case on device memory; and its end, when all ranks are quiet. */
colo_status_t t_gpu_bridge(t_gpu_rank_t *r, const t_case_t *c, colo_bridge_t **bridge);
colo_status_t t_gpu_end(t_gpu_rank_t *r, colo_bridge_t **bridge);

/* A caller's allocator, and a bridge whose memory it has. */
typedef struct t_gpu_owner {
    _Atomic bool past;  /* what was enqueued before the last call */
    size_t asked, live; /* bytes; blocks */
    bool refuses, misplaces, no_release, early;
    char *data;
} t_gpu_owner_t;
colo_status_t t_gpu_owned(t_gpu_rank_t *r, const t_case_t *c, t_gpu_owner_t *o,
                          colo_transport_t transport, colo_bridge_t **bridge);
/* Its stream is past it in so long; memory that comes back before is early. */
colo_status_t t_gpu_owner_late(t_gpu_rank_t *r, t_gpu_owner_t *o);

#endif
