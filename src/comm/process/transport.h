/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport.h (private) - what a transport between processes must do, and the frames it carries.
 *
 * A transport connects a fixed set of ranks; a rank's connections carry frames: at most
 * COLO_FRAME_MAX bytes, never a part of one, in order for each pair of ranks. They own their
 * buffers, so nothing of a caller is ever in their hands: the packing goes from the caller's boxes
 * straight into a frame, and a call may return at any time. A transport never waits except in
 * wait(), open() and close(); it does not know what a frame means.
 *
 * The sockets of transport-unix.c are one. Each of the others is a module (connect.c lists them);
 * the sockets hold its connections if both are needed.
 * Communicators over a transport: group.h.
 */
#ifndef COLO_COMM_PROCESS_TRANSPORT_H
#define COLO_COMM_PROCESS_TRANSPORT_H

#include <colobridge/bootstrap.h>

enum {
    COLO_FRAME_EAGER = 4096,      /* bytes of payload that travel with a header */
    COLO_FRAME_CHUNK = 128 << 10, /* bytes of payload of a data frame; a multiple of 8 */
};

typedef struct colo_worker { /* what an all-gather carries of each rank, from open() to connect() */
    uint32_t bytes;
    uint32_t near; /* the all-gather sets it: this rank is reached by other means */
    unsigned char address[3064];
} colo_worker_t;

#define COLO_FRAME_MAGIC 0xC01B0005u /* the last digits count versions of the frames */

typedef enum colo_frame_kind {
    COLO_FRAME_HEADER = 1, /* "I am in operation seq; this is what I send you and expect of you" */
    COLO_FRAME_READY = 2,  /* "all my peers agree: send the rest" */
    COLO_FRAME_DATA = 3,   /* a piece of what did not fit into the header */
    COLO_FRAME_FAIL = 4,   /* "dead from operation seq on"; desc: status, count: culprit */
    COLO_FRAME_BYE = 5,    /* "I left this group"; seq, desc, count: my last operation */
    COLO_FRAME_CLOSE = 6,  /* "nothing more will come from me" */
} colo_frame_kind_t;

enum { COLO_FAIL_TEXT = 880 };                         /* bytes of an error message that travel */
enum { COLO_FRAME_SENDS = 1, COLO_FRAME_EXPECTS = 2 }; /* flags of a header */

typedef struct colo_frame { /* in front of the payload; ranks are of one architecture */
    uint32_t magic;
    uint8_t kind, round, flags, pad;
    int32_t from; /* sender's rank in the group */
    uint32_t pad2;
    uint64_t group; /* the group; 0: all ranks */
    uint64_t seq, desc, count;
    uint64_t bytes;      /* header: of the message; else of the payload */
    struct colo_shape_ { /* header: of the message that is sent, and of the one that is expected */
        int64_t bytes;
        uint64_t print;   /* of all extents */
        int64_t first[3]; /* extents of the first box */
        int64_t nboxes;
    } sent, expected;
} colo_frame_t;

#define COLO_FRAME_MAX ((size_t)COLO_FRAME_CHUNK + sizeof(colo_frame_t))

typedef struct colo_process_transport {
    const char *name;
    /* This rank's connections, which reach none yet, and its address. NULL of the sockets, which
     * are made otherwise. */
    colo_status_t (*open)(int32_t rank, int32_t size, colo_worker_t *mine, void **connections);
    /* To all ranks that are not near: rank r's address is @stride * r bytes behind @all. */
    colo_status_t (*connect)(void *connections, const colo_worker_t *all, size_t stride);
    /* So much is under way to @peer that pieces of large messages should wait. */
    bool (*full)(void *connections, int32_t peer);
    /* Room for a frame of @bytes to @peer, full or not; commit() sends it. NULL: no memory. */
    void *(*reserve)(void *connections, int32_t peer, size_t bytes);
    void (*commit)(void *connections);
    /* 1: a frame, valid until the next call; 0: none now; -1: @peer is gone, told once for each;
     * -2: the connections are unusable. why() has the error message. Moves sends on, too. */
    int (*recv)(void *connections, int32_t *peer, const void **frame, size_t *bytes);
    const char *(*why)(void *connections);
    bool (*flushed)(void *connections, int32_t peer); /* nothing to @peer waits in this process */
    void (*wait)(void *connections, double seconds);  /* until something may have happened */
    /* A descriptor that is readable once something may have happened, for wait() of
     * connections that hold these; -1: it has. NULL: there is none. */
    int (*arm)(void *connections);
    /* Frees. @clean: every peer said CLOSE or is gone, so that nothing is under way to us. */
    void (*close)(void *connections, bool clean);
} colo_process_transport_t;

#endif
