/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.h - one way of a bridge in one launch, between GPUs that reach each other (direct.cu).
 *
 * The rules of kernels.h hold but for one: the kernel waits for its peers, up to a deadline, and
 * says in host memory which one did not come.
 *
 * A pair of ranks that has to do with each other has a mailbox on both sides, in the memory of the
 * one that reads it. The rank whose tensors are reached (its outputs when boxes are pushed, its
 * inputs when they are read, or read and added up) posts a record of each; the other one moves, and
 * signals done. All tensors of a launch have the same boxes.
 */
#ifndef COLO_KERNELS_DIRECT_H
#define COLO_KERNELS_DIRECT_H

#include "comm/direct.h"

#include <colobridge/comm.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    COLO_K_PARTNERS = 64, /* ranks that one rank exchanges with in one way */
    COLO_K_MEMORIES = 256,
    COLO_K_TENSORS = 8,    /* of a launch */
    COLO_K_MAILBOX = 2048, /* bytes of a mailbox */
    COLO_K_RECORD = 9,   /* its words of a tensor: memory, offset (2), strides of three axes (6) */
    COLO_K_POISON = 81,  /* index of 64-bit words in a mailbox: the peer has given up */
    COLO_K_CALLS = 96,   /* calls of this pair that have finished here; local */
    COLO_K_DONE = 128,   /* index of words: the peer has moved part N of this call */
    COLO_K_PARTS = 128,  /* of a call that the peer reports by themselves, at most */
    COLO_K_THREADS = 512 /* of a block */
};

/* What a kernel that gave up says, in host memory. */
enum {
    COLO_K_FINE = 0,
    COLO_K_TIMEOUT = 1,     /* the peer did not come by the deadline */
    COLO_K_STOPPED = 2,     /* the host said stop */
    COLO_K_PEER_FAILED = 3, /* the peer gave up first */
    COLO_K_UNKNOWN = 4,     /* the peer's record names memory that is not known here */
    COLO_K_ELSEWHERE = 5    /* of a gather: its record names another place than this rank's */
};
typedef struct colo_k_report {
    uint64_t code; /* written last */
    uint64_t peer, call, memory;
    uint64_t stop; /* the host's: waits end */
} colo_k_report_t;

/* Device memory of one way; zeroed by create, kept by the kernel. */
typedef struct colo_k_control {
    unsigned long long ticket[2], moved;
    unsigned finished, dead;
} colo_k_control_t;

typedef struct colo_k_partner {
    uint64_t *mine;   /* the mailbox that it writes */
    uint64_t *remote; /* the mailbox that I write, in its memory */
    int32_t rank;
    int32_t exposes; /* bit 0: I post to it and wait until it is done; bit 1: I move, it posts */
    int32_t first, count; /* tiles of queue 0 that are for it, of each tensor */
} colo_k_partner_t;

typedef struct colo_k_tensor {
    const char *in;
    char *out;
    int64_t in_stride[3], out_stride[3]; /* bytes */
    uint32_t memory;                     /* record of what peers reach */
    int32_t elem;                        /* bytes */
    uint64_t offset;
    int64_t per; /* elements of a feature of the segments and addends: 1, but of a ragged batch */
} colo_k_tensor_t;

typedef struct colo_k_direct {
    colo_k_tensor_t tensor[COLO_K_TENSORS];
    int32_t tensors;
    const colo_transfer_t *segment[2]; /* device; queue 0 has to do with partners, 1 stays here */
    int32_t segments[2];
    int64_t tiles[2]; /* of each tensor */
    int64_t tile;     /* features of them, each of per elements */
    int32_t pull;     /* boxes come from partners */
    int32_t addends;  /* 0: moves; else addends of a segment; one that has fewer ends with
                         COLO_NO_ADDEND */
    int32_t npartners;
    const colo_addend_t *addend; /* device [segments of queue 0, then of queue 1][addends] */
    colo_dtype_t dtype;          /* of sums: all tensors' */
    int32_t blocks;              /* at most */
    bool early;                  /* as colo_k_direct_fit() says */
    colo_k_control_t *control;
    const uint64_t *table; /* device [ranks][COLO_K_MEMORIES]: where memory of a rank is, here */
    colo_k_report_t *report;
    uint64_t deadline_ns;
    int32_t pushers; /* filled by the launcher: blocks that begin with queue 0 */
    int32_t single;  /* filled by the launcher: each block has one tile */
    int32_t parts;   /* filled by the launcher: and reports it by itself */
    int32_t posted;  /* filled by the launcher: wait_first() has posted */
    colo_k_partner_t partner[COLO_K_PARTNERS];
} colo_k_direct_t;

/* Enqueues one call. May be captured. Work without partners, segments: nothing is launched. */
cudaError_t colo_k_direct(colo_k_direct_t *d, cudaStream_t stream);
/* @blocks: how many of any kernel of colo_k_direct() fit the current device at once; @early: may
 * one launch while the one before it ends? */
cudaError_t colo_k_direct_fit(int32_t *blocks, bool *early);

/* Writes COLO_K_TRIAL + @me at index @me of page[r], device addresses in device memory, for each of
 * @ranks whose page is not NULL, and what it then reads there to back[r]. */
#define COLO_K_TRIAL UINT64_C(0xc010b71d00000000)
cudaError_t colo_k_direct_try(const uint64_t *page, uint64_t *back, int32_t ranks, int32_t me,
                              cudaStream_t stream);

/* Before and after copies from all partners' memory, made elsewhere (gather.cu). Of @d they
 * use the first tensor's memory and offset, control, report, deadline and partners, each of which
 * posts and is read. begin: all partners have come, and name the same memory and offset; end: all
 * have copied. */
cudaError_t colo_k_gather_begin(const colo_k_direct_t *d, cudaStream_t stream);
cudaError_t colo_k_gather_end(const colo_k_direct_t *d, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
