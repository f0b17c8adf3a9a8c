/* SPDX-License-Identifier: Apache-2.0 */
/*
 * registry.h (private) - what the files of direct memory share in libcolobridge-nccl.so.
 *
 * direct   of one comm: which ranks it reaches, what is registered, the table that kernels read
 * share    an allocation of each rank, as every rank sees it
 * channel  the mailboxes and reports of kernels that wait for peers: those of a bridge, or the
 *          gathers of a head
 */
#ifndef COLO_COMM_DIRECT_REGISTRY_H
#define COLO_COMM_DIRECT_REGISTRY_H

#include "comm/direct.h"

#include "comm/comm.h"
#include "comm/direct/order.h"
#include "direct.h"

#include <pthread.h>

struct colo_direct {
    _Atomic int32_t refs;
    _Atomic bool stopped; /* the comm has failed or is gone: kernels are to end */
    int32_t rank, size, device;
    int64_t *world; /* [size] owned */
    char name[32];
    bool *foreign;   /* [size] owned: in another process */
    bool *reach;     /* [size] owned: this rank reaches its memory, and it this rank's */
    uint64_t *pairs; /* [size + 1][(size + 63) / 64] owned: bit b of a: rank a reaches rank b's */
    bool all_reach;  /* all ranks of the comm reach each other; the same on all of them */
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
    struct colo_direct_channel *channels;
    colo_memory_t *memory[COLO_K_MEMORIES];
    int32_t memories;
    uint64_t registrations; /* so far */
    void **retired; /* owned: mailboxes of bridges that are gone; a peer that errs may still write
                       there */
    int32_t nretired;
};

struct colo_offer { /* what a rank says of its memory, and which numbers it has not free */
    uint64_t process, base, size; /* of the allocation */
    uint64_t offset, bytes;
    cudaIpcMemHandle_t handle;
    uint64_t taken[COLO_K_MEMORIES / 64];
};

typedef struct colo_share {
    struct colo_share *next; /* in the list of this process */
    struct colo_direct *direct;
    struct colo_offer *offers; /* [size] owned */
    char **base;               /* [size] owned: where each rank's is reachable here */
    void **imported;           /* [size] owned: to close, NULL in the same process */
    bool stays;                /* another rank may still have this one's open: it is never freed */
} colo_share_t;

/* direct.h's table, whose calls are launch.c's, and what it has of registry.c. */
extern const colo_direct_memory_t colo_direct_table;
colo_status_t colo_direct_open(colo_comm_t *c);
colo_status_t colo_direct_register(colo_comm_t *c, colo_memory_t *m);
void colo_direct_unregister(colo_memory_t *m);
bool colo_direct_find_memory(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id,
                             uint64_t *offset);
uint64_t colo_direct_registrations(const colo_comm_t *c);

/* The context (colo_comm.impl) of every comm whose backend has that table begins with this. */
typedef struct colo_direct_base {
    struct colo_direct *_Atomic direct; /* NULL until it is needed */
    int32_t device;           /* that the comm was made on; -1: whichever is current first */
    struct colo_order *order; /* of its family; NULL: of itself */
} colo_direct_base_t;
static inline struct colo_direct *colo_direct_of(const colo_comm_t *c)
{
    return atomic_load(&((colo_direct_base_t *)c->impl)->direct);
}

/* A comm's struct comes into being at open(); these take NULL. */
void colo_direct_drop(struct colo_direct *p);
/* Waits of kernels end; any thread. */
void colo_direct_stop(struct colo_direct *p);
/* COLO_OK, or what a kernel gave up for, as an error message; any thread. */
colo_status_t colo_direct_check(struct colo_direct *p, char *error_message, size_t cap);

/* reach.c: which ranks reach each other, found out by trying. Collective; COLO_ERR_UNBUILT, on all:
 * no two of them. */
colo_status_t colo_direct_try(colo_comm_t *c, struct colo_direct *p);
void colo_direct_lose(struct colo_direct *p, int32_t rank, const char *why);
/* direct.h's reaches and why. */
bool colo_direct_reaches(const colo_comm_t *c, int32_t a, int32_t b);
const char *colo_direct_why(const colo_comm_t *c);
/* A multiple of 8 @bytes of every rank. */
colo_status_t colo_direct_gather(colo_comm_t *c, const void *mine, void *all, size_t bytes);

/* Errors of one rank are errors on all; COLO_ERR_UNBUILT of one is COLO_ERR_UNBUILT of all. */
colo_status_t colo_direct_agree_on(colo_comm_t *c, colo_status_t mine);
/* The same, but COLO_ERR_UNBUILT of one rank is COLO_ERR_PEER on the others. */
colo_status_t colo_direct_agree_alike(colo_comm_t *c, colo_status_t mine);
/* Collective: what lies at @mine on every rank that this one reaches; else base is NULL. @id: a
 * number free on all ranks, when not NULL.
 * COLO_ERR_UNBUILT, on all: some rank cannot open what another one offers. */
colo_status_t colo_direct_share(colo_comm_t *c, struct colo_direct *p, void *mine, size_t bytes,
                                int32_t *id, colo_share_t *s);
void colo_direct_unshare(colo_share_t *s);
/* The same of all ranks, behind an error that all of them have, or where @st is COLO_OK: then no
 * rank has open what another one is to free, or s->stays. Collective; returns @st, or an error of
 * its own. */
colo_status_t colo_direct_close(colo_comm_t *c, colo_share_t *s, colo_status_t st);
/* Frees device memory when the comm and all that was registered over it are gone. */
void colo_direct_retire(struct colo_direct *p, void *memory);

/* Memory @id of every rank; a view, as long as it is registered. */
const colo_share_t *colo_direct_memory_of(struct colo_direct *p, int32_t id);

/* ---- channel.c ---- */

typedef struct colo_direct_channel {
    struct colo_direct_channel *next; /* in direct->channels */
    struct colo_direct *direct;       /* a reference */
    colo_comm_t *comm;                /* borrowed: deadline, number of the operation */
    bool dead;                        /* when it was destroyed */
    char *mailboxes;                  /* device: [2][size] mailboxes, then [2] controls */
    colo_share_t share;
    colo_k_report_t *report; /* pinned host [2] */
    struct colo_direct_channel_pass {
        const char *name;
        _Atomic uint64_t seq; /* the comm's number of the last call */
        _Atomic int64_t deadline_ms;
    } pass[2];
    /* Waits until graphs are through with it, and frees what is behind this struct; on its device.
     */
    void (*end)(struct colo_direct_channel *channel);
} colo_direct_channel_t;

/* Collective: gives @channel mailboxes. NULL: this rank has no memory for it, and @st says so; else
 * 0 but for end(), and allocated: an error of these two frees it. */
colo_status_t colo_direct_channel_open(colo_comm_t *c, colo_direct_channel_t *channel,
                                       colo_status_t st);
/* Collective: the channel is used from now on, if @st is COLO_OK on all ranks. */
colo_status_t colo_direct_channel_enter(colo_direct_channel_t *channel, colo_status_t st);
void colo_direct_channel_destroy(colo_direct_channel_t *channel); /* takes NULL */
/* What kernels of a pass need of the channel itself. */
void colo_direct_channel_fill(const colo_direct_channel_t *channel, int pass, colo_k_direct_t *k);
/* Index of @rank among the partners of @k, made when it is new; COLO_DIRECT_CHANNEL_FULL: there are
 * too many.
 * @role: bits of colo_k_partner_t.exposes. */
enum { COLO_DIRECT_CHANNEL_FULL = -2 };
int32_t colo_direct_channel_partner(const colo_direct_channel_t *channel, int pass,
                                    colo_k_direct_t *k, int32_t rank, int32_t role);
colo_status_t colo_direct_channel_too_many(const colo_direct_channel_t *channel, const char *what);
/* Before a launch of @k. */
void colo_direct_channel_call(colo_direct_channel_t *channel, int pass, colo_k_direct_t *k);
/* Waits of its kernels end; COLO_OK, or what one gave up for. */
void colo_direct_channel_stop(colo_direct_channel_t *channel);
colo_status_t colo_direct_channel_poll(const colo_direct_channel_t *channel, char *error_message,
                                       size_t cap);

/* allgather.c */
struct colo_gathers; /* a comm's: the channel of all of them */
struct colo_gather { /* where one gather finds what others bring */
    int32_t id;      /* registered memory; -1: not this way */
    uint64_t offset;
};
/* Is it for copies? Before colo_operation_begin(); the same answer on all ranks. */
colo_status_t colo_gather_plan(colo_comm_t *c, const void *send, const void *recv, size_t bytes,
                               colo_stream_t stream, struct colo_gather *g);
void colo_gathers_destroy(struct colo_gathers **gathers);
cudaError_t colo_gather_copy(colo_comm_t *c, const struct colo_gather *g, char *recv, size_t bytes,
                             cudaStream_t stream);

#endif
