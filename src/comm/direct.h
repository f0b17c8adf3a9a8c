/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.h (private) - memory that ranks reach in each other, and a bridge's passes through it.
 *
 * colo_comm_backend_t.direct is the table of a backend that can (comm/direct/ in
 * libcolobridge-nccl.so); NULL elsewhere. memory.c and bridge/run/direct.c use it.
 */
#ifndef COLO_COMM_DIRECT_H
#define COLO_COMM_DIRECT_H

#include <colobridge/memory.h>

const char *colo_transport_name(colo_transport_t transport); /* memory.c */
/* What COLO_TRANSPORT says, else the caller, else the comm's config. (memory.c) */
colo_status_t colo_transport_wanted(const colo_comm_t *comm, colo_transport_t asked,
                                    colo_transport_t *transport);

typedef struct colo_direct_memory colo_direct_memory_t;

struct colo_memory {
    colo_comm_t *comm;                  /* borrowed; may be gone at destroy */
    int32_t process;                    /* of the comm */
    const colo_direct_memory_t *direct; /* NULL: nothing registered, staged */
    void *data;
    size_t bytes;
    colo_mem_t mem;
    bool owned, is_direct;
    int32_t id;
    void *impl; /* the backend's */
};

/* One box of a pass, in samples, rows, features. Moved: from here in this rank's input to there in
 * the output of comm rank peer (-1: of this rank). Pulled: from here in that rank's input to there
 * in this rank's output. Added up: to there in this rank's output. On the device, peer is an index
 * among partners, and tile_end counts the tiles of this box and those before it in its queue. */
typedef struct colo_transfer {
    int64_t extent[3], here[3], there[3];
    int64_t tile_end, peer;
} colo_transfer_t;

enum { COLO_NO_ADDEND = -2 }; /* in place of a peer: the box has no more addends */
/* An addend of a box: where it begins in the input of comm rank peer (-1: of this rank). */
typedef struct colo_addend {
    int64_t peer, begin[3];
} colo_addend_t;

/* All that a rank does in one pass; borrowed for load(). */
typedef struct colo_transfers {
    const char *name; /* "bridge forward"; static */
    size_t elem;      /* of a feature of the transfers, usually */
    int64_t ntransfers;
    const colo_transfer_t *transfer;
    bool pulls;                  /* boxes move from peers to this rank; else to them */
    int32_t addends;             /* 0: boxes move; else each is the sum of that many addends, at
                                    most, but of one */
    const colo_addend_t *addend; /* [ntransfers][addends] */
    int32_t blocks;              /* of the kernel, at most; 0: as few as keep the links busy */
    int32_t nexposed;            /* comm ranks that reach this rank's tensor */
    const int32_t *exposed;
} colo_transfers_t;

/* The transfers of a ragged batch, for the launcher of its bridge. */
typedef struct colo_direct_list colo_direct_list_t;

/* A tensor of a call, which kernels of the current device can use; strides in bytes. Peers reach
 * out, or in if the pass adds up or pulls. */
typedef struct colo_direct_tensor {
    int64_t per; /* each feature of the transfers is so many of dtype */
    colo_dtype_t dtype;
    size_t elem;
    char *in, *out;
    int64_t in_stride[3], out_stride[3];
    int32_t id; /* of the memory that is reached, from find(); -1 when nothing of it is */
    uint64_t offset;
} colo_direct_tensor_t;

typedef struct colo_direct_call {
    colo_direct_list_t *list;           /* NULL: the launcher's own transfers */
    const colo_direct_tensor_t *tensor; /* [n] */
    int32_t n;
    int32_t device; /* the current one */
    bool capturing; /* is the stream? */
} colo_direct_call_t;

typedef struct colo_direct_launcher colo_direct_launcher_t; /* the launches of one bridge */

struct colo_direct_memory {
    /* open, share and create return COLO_ERR_UNBUILT, "not here", on all ranks with an error
     * message; what else goes wrong is an error on all of them. The comm lives on. open finds out
     * which ranks of the comm reach each other, once; UNBUILT: no two of them do. Collective. */
    colo_status_t (*open)(colo_comm_t *c);
    /* After open: do ranks @a and @b reach each other; @a < 0: do all? The same on all ranks. */
    bool (*reaches)(const colo_comm_t *c, int32_t a, int32_t b);
    /* Why this rank does not reach the first one that it does not; a view. */
    const char *(*why)(const colo_comm_t *c);
    /* Fills m->data (NULL with m->owned: makes it), id, impl. Collective; all or none succeed. */
    colo_status_t (*share)(colo_comm_t *c, colo_memory_t *m);
    void (*unshare)(colo_memory_t *m);
    /* The registered memory that [p, p + bytes) lies in: id and offset. */
    bool (*find)(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset);
    /* How often memory was registered so far: the same on all ranks between the same two calls. */
    uint64_t (*registrations)(const colo_comm_t *c);
    /* A pass without transfers and exposed ranks does nothing. Collective. */
    colo_status_t (*create)(colo_comm_t *c, const colo_transfers_t pass[2],
                            colo_direct_launcher_t **d);
    /* Other transfers from now on; local. Keeps the old ones on error. */
    colo_status_t (*load)(colo_direct_launcher_t *d, const colo_transfers_t pass[2]);
    colo_status_t (*run)(colo_direct_launcher_t *d, int pass /* 0 forward, 1 backward */,
                         const colo_direct_call_t *call, colo_stream_t stream);
    /* Transfers in addition to the launcher's own; local, and nothing waits for the device. Memory
     * of a list that is dropped serves the next ones when the device is past its last call. */
    colo_status_t (*list)(colo_direct_launcher_t *d, const colo_transfers_t pass[2],
                          colo_direct_list_t **list);
    void (*drop)(colo_direct_launcher_t *d, colo_direct_list_t **list);
    void (*destroy)(colo_direct_launcher_t **d);
};

#endif
