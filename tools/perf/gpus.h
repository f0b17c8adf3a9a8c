/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpus.h - ranks that are threads with a GPU each, for the parts of colo-perf that need
 * several.
 *
 * A repetition is @batch launches in a row between two events, after a host barrier; a time is that
 * of the slowest rank, divided by @batch, and the median of @iters repetitions. NCCL is used
 * without the library between, as a baseline; its comms are made once for each way to group the
 * ranks.
 */
#ifndef TOOLS_PERF_GPUS_H
#define TOOLS_PERF_GPUS_H

#include "cuda.h"

#include <nccl.h>
#include <stdatomic.h>

#define PERF_GPUS_MAX 64
#define PERF_COMMS_MAX 64

/* The entry points of the NCCL in this process. */
#define PERF_NCCL(X)                    \
    X(get_version, ncclGetVersion)      \
    X(get_unique_id, ncclGetUniqueId)   \
    X(init_rank, ncclCommInitRank)      \
    X(split, ncclCommSplit)             \
    X(error_string, ncclGetErrorString) \
    X(group_start, ncclGroupStart)      \
    X(group_end, ncclGroupEnd)          \
    X(all_gather, ncclAllGather)        \
    X(all_reduce, ncclAllReduce)        \
    X(send, ncclSend)                   \
    X(recv, ncclRecv)
#define PERF_NCCL_MEMBER(name, function) __typeof__(&(function)) name;
typedef struct perf_nccl {
    int version;
    PERF_NCCL(PERF_NCCL_MEMBER)
} perf_nccl_t;

/* Groups: the ranks of one color, ordered by key; color -1: in none. By rank. */
typedef struct perf_split {
    int64_t color[PERF_GPUS_MAX], key[PERF_GPUS_MAX];
} perf_split_t;

typedef struct perf_comms {
    perf_split_t split;
    ncclComm_t comm; /* of this rank */
} perf_comms_t;

/* What all ranks see. */
typedef struct perf_gpus {
    perf_t *p;
    perf_nccl_t nccl;
    ncclUniqueId id; /* of all */
    bool reach;      /* every GPU reaches every other's memory */
    void *ptr[PERF_GPUS_MAX];
    int64_t out_bytes[PERF_GPUS_MAX];            /* bytes at ptr */
    int64_t bytes[PERF_GPUS_MAX][PERF_GPUS_MAX]; /* free for works that need a number per pair */
    atomic_int said;                             /* a rank has complained */
} perf_gpus_t;

typedef struct perf_rank {
    perf_gpus_t *all;
    int32_t me, n;
    colo_comm_t *host, *gpus; /* borrowed; gpus through the library's NCCL */
    ncclComm_t nccl;          /* of all */
    perf_comms_t comms[PERF_COMMS_MAX];
    int32_t ncomms;
    cudaStream_t stream;
    unsigned long long *count; /* device memory */
} perf_rank_t;

/* Runs @fn on the first @n GPUs. */
int perf_gpus_run(perf_t *p, int32_t n, int (*fn)(perf_rank_t *r, void *arg), void *arg);
/* Complains, once for all ranks. */
int perf_rank_complain(perf_rank_t *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int perf_rank_barrier(perf_rank_t *r);
/* Until the stream has done everything; at most a minute. */
int perf_rank_wait(perf_rank_t *r);
/* Of all ranks' values, in place: the largest or the sum. */
int perf_rank_reduce(perf_rank_t *r, int64_t *value, colo_redop_t op);
int perf_rank_time(perf_rank_t *r, perf_fn fn, void *arg, int64_t batch, double *median,
                   double *best);
/* The same replayed: four launches captured in one graph, so its own launch hardly counts. */
int perf_rank_replay(perf_rank_t *r, perf_fn fn, void *arg, int64_t batch, double *median,
                     double *best);
/* Launches in a repetition: so many that they move 256 MiB, 3 to 20. */
int64_t perf_batch(int64_t bytes);
/* This rank's NCCL comm of a split that all ranks pass alike; NULL for a rank without. */
int perf_rank_comm(perf_rank_t *r, const perf_split_t *split, ncclComm_t *comm);

#define RANK_CUDA(expr)                                                       \
    do {                                                                      \
        cudaError_t e_ = (expr);                                              \
        if (e_ != cudaSuccess)                                                \
            return perf_rank_complain(r, "GPU %d: %s: %s", (int)r->me, #expr, \
                                      cudaGetErrorString(e_));                \
    } while (0)
#define RANK_NCCL(expr)                                                       \
    do {                                                                      \
        ncclResult_t e_ = (expr);                                             \
        if (e_ != ncclSuccess)                                                \
            return perf_rank_complain(r, "GPU %d: %s: %s", (int)r->me, #expr, \
                                      r->all->nccl.error_string(e_));         \
    } while (0)
/* A rank that ends because another did has nothing to say. */
#define RANK_COLO(expr)                                            \
    do {                                                           \
        if ((expr) < 0)                                            \
            return perf_rank_complain(r, "%s", colo_last_error()); \
    } while (0)

#endif
