/* SPDX-License-Identifier: Apache-2.0 */
/*
 * registry.h (private) - what the files of the peer-to-peer path share in libcolobridge-nccl.so.
 *
 * peer   of one comm: which ranks it reaches, what is registered, the table that kernels read
 * share  an allocation of each rank, as every rank sees it
 * p2p    the path of one bridge: mailboxes, reports, and two passes
 */
#ifndef COLO_COMM_COMM_PEER_H
#define COLO_COMM_COMM_PEER_H

#include "comm/peer.h"

#include "comm/comm.h"
#include "p2p.h"

#include <cuda_runtime_api.h>

#include <pthread.h>
#include <stdatomic.h>

/* What all comms of a family enqueue on a device: one operation behind the other, whatever stream
 * they are on. */
struct colo_order {
    _Atomic int32_t refs;
    cudaEvent_t done; /* after the last operation */
    cudaStream_t last;
    bool used;
};
colo_status_t colo_order_new(struct colo_order **out);
void colo_order_drop(struct colo_order *o); /* takes NULL */
/* Before and after what an operation enqueues. A capture is ordered by its graph alone. */
cudaError_t colo_order_follow(const struct colo_order *o, bool capturing, cudaStream_t stream);
cudaError_t colo_order_lead(struct colo_order *o, bool capturing, cudaStream_t stream);

struct colo_peer {
    _Atomic int32_t refs;
    _Atomic bool stopped; /* the comm has failed or is gone: kernels are to end */
    int32_t rank, size, device;
    int64_t *world; /* [size] owned */
    char name[32];
    bool *foreign;   /* [size] owned: in another process */
    bool *reach;     /* [size] owned: this rank reaches its memory, and it this rank's */
    uint64_t *pairs; /* [size + 1][(size + 63) / 64] owned: bit b of a: rank a reaches rank b's */
    bool whole;      /* all ranks of the comm reach each other; the same on all of them */
    bool tried;      /* reach holds; until then it is what may be */
    char why[200];   /* of the first rank that this one does not reach */
    int32_t sharers; /* ranks on this device: 1, but in tests */
    int32_t blocks;
    int64_t timeout_ms;       /* of the comm, when it was last used: a destroy waits so long */
    bool early;               /* kernels may launch while the one before them ends */
    cudaStream_t stream;      /* for tables and lists, never the caller's */
    uint64_t *table;          /* device [size][COLO_K_MEMORIES] */
    struct colo_order *order; /* a reference */
    _Atomic bool used;        /* there was a call */
    pthread_mutex_t lock;     /* what follows */
    struct colo_p2p *p2p;
    colo_memory_t *memory[COLO_K_MEMORIES];
    int32_t memories;
    uint64_t registrations; /* so far */
    void **retired; /* owned: mailboxes of bridges that are gone; a peer that errs may still write
                       there */
    int32_t nretired;
};

typedef struct colo_share {
    char **base;     /* [size] owned: the allocation of each rank, reachable here */
    size_t *bytes;   /* [size] owned: how much of it */
    void **imported; /* [size] owned: to close, NULL in the same process */
    bool stays;      /* another rank may still have this one's open: it is never freed */
} colo_share_t;

extern const colo_peer_ops_t colo_peer_table;

/* The context (colo_comm.impl) of every comm whose backend has that table begins with this. */
typedef struct colo_peer_base {
    struct colo_peer *_Atomic peer; /* NULL until it is needed */
    int32_t device;                 /* that the comm was made on; -1: whichever is current first */
    struct colo_order *order;       /* of its family; NULL: of itself */
} colo_peer_base_t;
static inline struct colo_peer *colo_peer_of(const colo_comm_t *c)
{
    return atomic_load(&((colo_peer_base_t *)c->impl)->peer);
}

/* A comm's peer comes into being at open(); these take NULL. */
void colo_peer_drop(struct colo_peer *p);
/* Waits of kernels end; any thread. */
void colo_peer_stop(struct colo_peer *p);
/* COLO_OK, or what a kernel gave up for, as an error message; any thread. */
colo_status_t colo_peer_check(struct colo_peer *p, char *error_message, size_t cap);

colo_status_t colo_cuda_error(const char *what, cudaError_t e);

/* reach.c: which ranks reach each other, found out by trying. Collective; COLO_ERR_UNBUILT, on all:
 * no two of them. */
colo_status_t colo_peer_try(colo_comm_t *c, struct colo_peer *p);
void colo_peer_lose(struct colo_peer *p, int32_t rank, const char *why);
/* peer.h's reaches and why. */
bool colo_peer_reaches(const colo_comm_t *c, int32_t a, int32_t b);
const char *colo_peer_why(const colo_comm_t *c);
/* A multiple of 8 @bytes of every rank. */
colo_status_t colo_peer_gather(colo_comm_t *c, const void *mine, void *all, size_t bytes);

/* Errors of one rank are errors on all; COLO_ERR_UNBUILT of one is COLO_ERR_UNBUILT of all. */
colo_status_t colo_peer_agree(colo_comm_t *c, colo_status_t mine);
/* The same, but COLO_ERR_UNBUILT of one rank is COLO_ERR_PEER on the others. */
colo_status_t colo_peer_agree_alike(colo_comm_t *c, colo_status_t mine);
/* Collective: what lies at @mine on every rank that this one reaches; else base is NULL. @id: a
 * number free on all ranks, when not NULL.
 * COLO_ERR_UNBUILT, on all: some rank cannot open what another one offers. */
colo_status_t colo_peer_share(colo_comm_t *c, struct colo_peer *p, void *mine, size_t bytes,
                              int32_t *id, colo_share_t *s);
void colo_peer_unshare(struct colo_peer *p, colo_share_t *s);
/* The same of all ranks, behind an error that all of them have, or where @st is COLO_OK: then no
 * rank has open what another one is to free, or s->stays. Collective; returns @st, or an error of
 * its own. */
colo_status_t colo_peer_close(colo_comm_t *c, struct colo_peer *p, colo_share_t *s,
                              colo_status_t st);
/* Frees device memory when the comm and all that was registered over it are gone. */
void colo_peer_retire(struct colo_peer *p, void *memory);

/* Memory @id of every rank; a view, as long as it is registered. */
const colo_share_t *colo_peer_memory(struct colo_peer *p, int32_t id);

/* transfer.c */
colo_status_t colo_p2p_make(colo_comm_t *c, const colo_transfers_t pass[2], colo_p2p_t **d);
colo_status_t colo_p2p_load(colo_p2p_t *d, const colo_transfers_t pass[2]);
colo_status_t colo_p2p_run(colo_p2p_t *d, int pass, const colo_p2p_call_t *call,
                           colo_stream_t stream);
/* peer.h's list and drop. */
colo_status_t colo_p2p_list(colo_p2p_t *d, const colo_transfers_t pass[2], colo_p2p_list_t **list);
void colo_p2p_drop(colo_p2p_t *d, colo_p2p_list_t **list);
void colo_p2p_destroy(colo_p2p_t **d);
colo_status_t colo_p2p_poll(const struct colo_p2p *d, char *error_message, size_t cap);
void colo_p2p_stop(struct colo_p2p *d);

/* allgather.c */
struct colo_gather { /* where one gather finds what others bring */
    int32_t id;      /* registered memory; -1: not this way */
    uint64_t offset;
};
/* Is it for copies? Before colo_operation_begin(); the same answer on all ranks. */
colo_status_t colo_gather_plan(colo_comm_t *c, const void *send, const void *recv, size_t bytes,
                               colo_stream_t stream, struct colo_gather *g);
cudaError_t colo_gather_copy(colo_comm_t *c, const struct colo_gather *g, char *recv, size_t bytes,
                             cudaStream_t stream);

struct colo_p2p_list {          /* of a shape or a ragged batch */
    struct colo_p2p_list *next; /* in p2p->lists */
    colo_k_p2p_t k[2];          /* by pass, all but the call */
    char *host, *device;        /* of capacity bytes: segments and addends of both passes */
    size_t capacity, bytes;
    cudaEvent_t done; /* after the last call; recorded when it is dropped */
    bool used, sent;  /* by a call; to the device */
    bool taken;       /* by a shape or a batch */
    bool captured;    /* by a graph, which may be replayed at any time */
};

struct colo_p2p {
    struct colo_p2p *next;  /* in peer->p2p */
    struct colo_peer *peer; /* a reference */
    colo_comm_t *comm;      /* borrowed: deadline, number of the operation */
    bool dead;              /* when it was destroyed */
    char *mailboxes;        /* device: [2][size] mailboxes, then [2] controls */
    colo_share_t share;
    colo_k_report_t *report;           /* pinned host [2] */
    struct colo_p2p_list *lists, *own; /* all; that of the shape */
    struct colo_p2p_pass {
        const char *name;
        _Atomic uint64_t seq; /* the comm's number of the last call */
        _Atomic int64_t deadline_ms;
    } pass[2];
};

#endif
