/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm-nccl.h (private) - what the files of libcolobridge-nccl.so share.
 *
 * family   all comms that one rank made from one colo_comm_nccl_create(): the device, staging, the
 *          links, a guard thread that tears links down when a comm of theirs has failed.
 * link     an ncclComm_t and the ranks that it joins. Made once for each list of ranks and kept, so
 *          bridges that come and go do not connect anew.
 * ctx      one comm: a fate, a link.
 */
#ifndef COLO_COMM_COMM_NCCL_H
#define COLO_COMM_COMM_NCCL_H

#include "comm/comm.h"
#include "comm/fate.h"
#include "comm/gpu.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

/* The entry points of the NCCL in this process. */
typedef struct colo_nccl_lib {
    int version;
    ncclResult_t (*get_version)(int *);
    ncclResult_t (*get_unique_id)(ncclUniqueId *);
    ncclResult_t (*init_rank)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*count)(const ncclComm_t, int *);
    ncclResult_t (*user_rank)(const ncclComm_t, int *);
    ncclResult_t (*device)(const ncclComm_t, int *);
    const char *(*error_string)(ncclResult_t);
    const char *(*last_error)(ncclComm_t);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    ncclResult_t (*all_gather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t,
                               cudaStream_t);
    ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
                               ncclComm_t, cudaStream_t);
    ncclResult_t (*broadcast)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t,
                              cudaStream_t);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
} colo_nccl_lib_t;

/* Found once a process. COLO_ERR_UNBUILT: none, or one before 2.28. (nccl-lib.c) */
colo_status_t colo_nccl_find(const colo_nccl_lib_t **lib);

enum { COLO_LINK_OK = 0, COLO_LINK_ENDING = 1, COLO_LINK_GONE = 2 };

struct colo_link {
    struct colo_link *next;
    int32_t n;
    int64_t *world; /* [n] owned: world ranks in the order of the comm */
    ncclComm_t nccl; /* NULL for one rank */
    bool borrowed;
    _Atomic int32_t phase; /* COLO_LINK_* */
    pthread_mutex_t busy;  /* a thread is inside NCCL with it */
};

struct colo_nctx { /* colo_comm.impl */
    struct colo_nctx *next;
    struct colo_nfamily *family; /* a reference */
    struct colo_link *link;
    colo_fate_t fate;
    int32_t rank, world_rank;
    colo_comm_t *control; /* owned */
};

struct colo_nfamily {
    const colo_nccl_lib_t *lib;
    int32_t device;
    int64_t timeout_ms; /* the longest of its comms: for destroy */
    pthread_mutex_t lock; /* the lists */
    pthread_cond_t wake;
    bool stop;
    pthread_t guard;
    int32_t live; /* contexts */
    struct colo_nctx *ctx;
    struct colo_link *link;
    /* used by the thread of the comms only */
    int *word;       /* device: what a barrier reduces */
    cudaEvent_t done; /* after the last operation: the next may be on another stream */
    cudaStream_t last;
    bool used;
    char *stage; /* device; grown, the smaller ones kept until the end: streams may use them */
    size_t stage_bytes;
    void *old[48];
    int32_t nold;
    colo_box_t *from, *to; /* host lists of packing, [boxes] each */
    int64_t boxes;
};

extern const colo_comm_ops_t colo_comm_nccl_ops;

void colo_nccl_bind(const colo_services_t *services);

/* ---- nccl-guard.c ---- */
void colo_nccl_cond_init(pthread_cond_t *c);
struct timespec colo_nccl_in(double seconds); /* from now, on the clock of cond_init() */
/* True when @fn came back in time; else @arg belongs to its thread for good. */
bool colo_nccl_run_for(double seconds, void (*fn)(void *arg), void *arg);
/* Ends what is enqueued on a link. Once; never a borrowed one. */
void colo_nccl_tear(struct colo_nfamily *f, struct colo_link *l);
void *colo_nccl_guard(void *family);

/* ---- nccl-family.c ---- */
colo_status_t colo_nccl_family_create(struct colo_nfamily **out, int32_t device);
/* Nobody uses it any more. What does not end by the deadline is left alone. */
void colo_nccl_family_destroy(struct colo_nfamily *f, bool guarded);

/* ---- nccl-link.c ---- */
/* The link of @control's ranks: the one that is there, if all have it whole, or a new one. */
colo_status_t colo_nccl_link_get(struct colo_nfamily *f, colo_comm_t *control, ncclComm_t borrowed,
                                 struct colo_link **out);

/* ---- comm-nccl.c ---- */
colo_status_t colo_nccl_subset(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                               colo_comm_t *child);
void colo_nccl_fail(colo_comm_t *c, colo_status_t status, const char *sentence);
colo_status_t colo_nccl_state(const colo_comm_t *c, char *sentence, size_t cap);
void colo_nccl_destroy(colo_comm_t *c);
colo_status_t colo_nccl_control_state(const struct colo_nctx *x, char *sentence, size_t cap);
colo_status_t colo_nccl_error(const colo_nccl_lib_t *lib, const char *what, ncclResult_t r);
colo_status_t colo_cuda_error(const char *what, cudaError_t e);

/* ---- comm-nccl-ops.c ---- */
/* Every kind of operation once, on @stream; for the helper thread of create. NULL or a sentence. */
const char *colo_nccl_warm(const colo_nccl_lib_t *lib, ncclComm_t nccl, int32_t rank, int32_t n,
                           cudaStream_t stream, char *room, size_t room_bytes);
#define COLO_NCCL_WARM_BYTES(n) ((size_t)(n) * 2048)

#endif
