/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport-ucx.c - libcolobridge-ucx.so: the transport over UCX. The only file that includes
 * ucp.h.
 *
 * A worker and its endpoints belong to one transport, so no message here can meet one of the
 * program. A frame is one message, whose tag holds the sender's rank and a number of this set of
 * ranks. A ring of posted receives takes whatever comes; they are completed in the order they were
 * posted, which is the order of sending for each sender. UCX makes the connections from the
 * workers' addresses, which the bootstrap's all-gather carries, and tells of each endpoint that
 * its peer died (UCP_ERR_HANDLING_MODE_PEER). A process that hangs is left to the deadline.
 *
 * A send is complete once UCX has taken the frame, whose end may still wait in a buffer of UCX for
 * a full socket. UCX takes the next message of an endpoint after that buffer has become empty, so
 * an empty message follows the frames, and once it is sent they have left this process. It is an
 * active message, which takes no memory of the receiver. A flush of UCX would not do: over TCP it
 * also waits until the peer makes progress, and the peer may be done. If an adapter sends by
 * itself, the empty message says that the adapter has the frames.
 * Frames live in host memory, and UCX is told so: GPU memory is NCCL's.
 *
 * UCX is called under a lock of this file, because wait() runs concurrently with all other calls.
 * No call here waits inside UCX.
 */
#include <colobridge/bootstrap.h>

#include "comm/process/transport.h"
#include "core/backend.h"
#include "core/hash.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

enum { RING = 8, EMPTY = 0, SMALL = COLO_FRAME_EAGER + 1024, QUEUED_MAX = 512 << 10 };
#define RANK_BITS 24
#define RANK_MASK ((UINT64_C(1) << RANK_BITS) - 1)
static const double CLOSE_SECONDS = 0.5; /* at most, for UCX to give everything back */

struct peer {
    ucp_ep_h ep; /* NULL: this rank, or reached by other means */
    void *closing;
    int32_t pending;     /* sends under way */
    size_t queued;       /* their bytes */
    bool dirty;          /* sent to since the last empty message */
    bool flushing, gone; /* the empty message is under way; gone: told */
    ucs_status_t failed; /* UCS_OK: it lives */
};

struct out {
    struct out *next;
    struct transport *w;
    struct peer *peer;
    bool large;
    size_t bytes;
    _Alignas(64) unsigned char frame[];
};

struct in {
    void *request;
    bool done;
    ucs_status_t status;
    uint64_t tag;
    size_t bytes;
    unsigned char *frame; /* [COLO_FRAME_MAX] */
};

struct transport {
    ucp_context_h context;
    ucp_worker_h worker;
    int event;
    int32_t rank, size;
    uint64_t token;    /* in the upper bits of all tags */
    struct peer *peer; /* [size] */
    struct in in[RING];
    int next;              /* the receive that was posted first */
    bool held;             /* its frame has been handed out and not been posted again */
    struct out *unused[2]; /* [large] */
    struct out *reserved;
    bool broken; /* a frame was lost: what comes behind it would be taken for it */
    pthread_mutex_t lock;
    char why[300];
};

/* ---- what UCX calls, with the lock held ---- */

static void recycle(struct out *o)
{
    struct out **list = &o->w->unused[o->large];
    o->next = *list;
    *list = o;
}

static void fail(struct peer *p, ucs_status_t status)
{
    if (p->failed == UCS_OK)
        p->failed = status;
}

static void on_failed(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    fail(arg, status);
}

static void on_sent(void *request, ucs_status_t status, void *user)
{
    struct out *o = user;
    o->peer->pending--;
    o->peer->queued -= o->bytes;
    if (status != UCS_OK)
        fail(o->peer, status);
    recycle(o);
    ucp_request_free(request);
}

static void on_flushed(void *request, ucs_status_t status, void *user)
{
    ((struct peer *)user)->flushing = false;
    ucp_request_free(request);
}

static ucs_status_t on_empty(void *arg, const void *header, size_t header_length, void *data,
                             size_t length, const ucp_am_recv_param_t *param)
{
    return UCS_OK;
}

static void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                        void *user)
{
    struct in *in = user;
    in->done = true;
    in->status = status;
    in->tag = info->sender_tag;
    in->bytes = info->length;
}

/* ---- sending ---- */

static bool ucx_full(void *transport, int32_t peer)
{
    return ((struct transport *)transport)->peer[peer].queued > QUEUED_MAX;
}

static void *ucx_reserve(void *transport, int32_t peer, size_t bytes)
{
    struct transport *w = transport;
    const bool large = bytes > SMALL;
    struct out *o = w->unused[large];
    if (o)
        w->unused[large] = o->next;
    else
        o = aligned_alloc(64, (sizeof *o + (large ? COLO_FRAME_MAX : SMALL) + 63) / 64 * 64);
    if (!o)
        return NULL;
    o->w = w;
    o->large = large;
    o->peer = &w->peer[peer];
    o->bytes = bytes;
    w->reserved = o;
    return o->frame;
}

static void ucx_commit(void *transport)
{
    struct transport *w = transport;
    struct out *o = w->reserved;
    struct peer *p = o->peer;
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA |
                                                       UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                                       .cb = {.send = on_sent},
                                       .user_data = o,
                                       .memory_type = UCS_MEMORY_TYPE_HOST};
    void *request = NULL;
    pthread_mutex_lock(&w->lock);
    if (p->ep && p->failed == UCS_OK) {
        p->pending++;
        p->queued += o->bytes;
        p->dirty = true;
        request = ucp_tag_send_nbx(p->ep, o->frame, o->bytes,
                                   w->token << RANK_BITS | (uint64_t)w->rank, &param);
        if (!UCS_PTR_IS_PTR(request)) {
            p->pending--;
            p->queued -= o->bytes;
        }
        if (UCS_PTR_IS_ERR(request))
            fail(p, UCS_PTR_STATUS(request));
    }
    if (!UCS_PTR_IS_PTR(request))
        recycle(o);
    pthread_mutex_unlock(&w->lock);
}

static bool ucx_flushed(void *transport, int32_t peer)
{
    struct transport *w = transport;
    struct peer *p = &w->peer[peer];
    pthread_mutex_lock(&w->lock);
    const bool alive = p->ep && p->failed == UCS_OK;
    if (alive && p->dirty && !p->pending && !p->flushing) {
        const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                           UCP_OP_ATTR_FIELD_USER_DATA,
                                           .cb = {.send = on_flushed},
                                           .user_data = p};
        void *request = ucp_am_send_nbx(p->ep, EMPTY, NULL, 0, NULL, 0, &param);
        p->dirty = false;
        p->flushing = UCS_PTR_IS_PTR(request);
        if (UCS_PTR_IS_ERR(request))
            fail(p, UCS_PTR_STATUS(request));
    }
    const bool flushed = !alive || (!p->pending && !p->dirty && !p->flushing);
    pthread_mutex_unlock(&w->lock);
    return flushed;
}

/* ---- receiving ---- */

static int break_down(struct transport *w, const char *call, ucs_status_t status)
{
    snprintf(w->why, sizeof w->why, "%s: %s", call, ucs_status_string(status));
    w->broken = true;
    return -2;
}

static bool post(struct transport *w, struct in *in)
{
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
        .cb = {.recv = on_received},
        .user_data = in,
        .memory_type = UCS_MEMORY_TYPE_HOST};
    if (in->request)
        ucp_request_free(in->request);
    in->done = false;
    in->request = ucp_tag_recv_nbx(w->worker, in->frame, COLO_FRAME_MAX, w->token << RANK_BITS,
                                   ~RANK_MASK, &param);
    if (!UCS_PTR_IS_ERR(in->request))
        return true;
    break_down(w, "ucp_tag_recv_nbx", UCS_PTR_STATUS(in->request));
    in->request = NULL;
    return false;
}

/* Nothing of a peer that failed is waiting any more: says so, once for each. */
static int report_gone(struct transport *w, int32_t *peer)
{
    for (int32_t r = 0; r < w->size; r++) {
        struct peer *p = &w->peer[r];
        if (p->failed == UCS_OK || p->gone)
            continue;
        snprintf(w->why, sizeof w->why, "its connection ended: %s", ucs_status_string(p->failed));
        p->gone = true; /* closed with the others: UCX 1.13 may end the process otherwise */
        *peer = r;
        return -1;
    }
    return 0;
}

static int receive(struct transport *w, int32_t *peer, const void **frame, size_t *bytes)
{
    if (w->held) {
        w->held = false;
        if (!post(w, &w->in[w->next]))
            return -2;
        w->next = (w->next + 1) % RING;
    }
    ucp_worker_progress(w->worker);
    for (int i = 0; i < RING; i++) {
        struct in *in = &w->in[w->next];
        if (!in->done)
            return report_gone(w, peer);
        const uint64_t from = in->tag & RANK_MASK;
        if (in->status == UCS_OK && from < (uint64_t)w->size) {
            w->held = true;
            *peer = (int32_t)from;
            *frame = in->frame;
            *bytes = in->bytes;
            return 1;
        }
        if (in->status == UCS_ERR_MESSAGE_TRUNCATED || in->status == UCS_OK)
            return break_down(w, "a frame that no rank sends",
                              in->status ? in->status : UCS_ERR_INVALID_PARAM);
        if (!post(w, in)) /* the rest will not come: its sender died */
            return -2;
        w->next = (w->next + 1) % RING;
    }
    return 0;
}

static int ucx_recv(void *transport, int32_t *peer, const void **frame, size_t *bytes)
{
    struct transport *w = transport;
    pthread_mutex_lock(&w->lock);
    int got = w->broken ? -2 : receive(w, peer, frame, bytes);
    pthread_mutex_unlock(&w->lock);
    return got;
}

static const char *ucx_why(void *transport)
{
    return ((struct transport *)transport)->why;
}

static int ucx_arm(void *transport)
{
    struct transport *w = transport;
    pthread_mutex_lock(&w->lock);
    const ucs_status_t armed = ucp_worker_arm(w->worker);
    pthread_mutex_unlock(&w->lock);
    return armed == UCS_ERR_BUSY ? -1 : w->event;
}

static void ucx_wait(void *transport, double seconds)
{
    struct timespec t = {.tv_sec = (time_t)seconds};
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    const int event = ucx_arm(transport);
    if (event >= 0)
        ppoll(&(struct pollfd){.fd = event, .events = POLLIN}, 1, &t, NULL);
}

/* ---- taking down ---- */

/* UCX has given everything back that it holds of ours. */
static bool all_done(struct transport *w)
{
    for (int32_t r = 0; r < w->size; r++)
        if (w->peer[r].pending || w->peer[r].flushing ||
            (UCS_PTR_IS_PTR(w->peer[r].closing) &&
             ucp_request_check_status(w->peer[r].closing) == UCS_INPROGRESS))
            return false;
    for (int i = 0; i < RING; i++)
        if (w->in[i].request && !w->in[i].done)
            return false;
    return true;
}

static void ucx_close(void *transport, bool clean)
{
    struct transport *w = transport;
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    for (int32_t r = 0; w->peer && r < w->size; r++)
        if (w->peer[r].ep)
            w->peer[r].closing = ucp_ep_close_nbx(w->peer[r].ep, &param);
    for (int i = 0; i < RING; i++)
        if (w->in[i].request && !w->in[i].done)
            ucp_request_cancel(w->worker, w->in[i].request);
    const double end = colo_now() + CLOSE_SECONDS;
    while (w->peer && !all_done(w) && colo_now() < end)
        ucp_worker_progress(w->worker);
    for (int32_t r = 0; w->peer && r < w->size; r++)
        if (UCS_PTR_IS_PTR(w->peer[r].closing))
            ucp_request_free(w->peer[r].closing);
    for (int i = 0; i < RING; i++)
        if (w->in[i].request)
            ucp_request_free(w->in[i].request);
    if (w->worker)
        ucp_worker_destroy(w->worker);
    if (w->context)
        ucp_cleanup(w->context);
    for (int i = 0; i < RING; i++) /* UCX is at nothing any more */
        free(w->in[i].frame);
    for (int large = 0; large < 2; large++)
        for (struct out *o = w->unused[large], *next; o; o = next) {
            next = o->next;
            free(o);
        }
    pthread_mutex_destroy(&w->lock);
    free(w->peer);
    free(w);
}

/* ---- setting up ---- */

#define TRY_UCX(w, call)                                                                        \
    do {                                                                                        \
        const ucs_status_t st_ = (call);                                                        \
        if (st_ != UCS_OK)                                                                      \
            return colo_fail(st_ == UCS_ERR_NO_MEMORY ? COLO_ERR_NOMEM : COLO_ERR_IO,           \
                             "create_bootstrap: rank %d of %d: UCX: %.40s: %s", (int)(w)->rank, \
                             (int)(w)->size, #call, ucs_status_string(st_));                    \
    } while (0)

static colo_status_t make_worker(struct transport *w)
{
    ucp_config_t *config = NULL;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES |
                                               UCP_PARAM_FIELD_ESTIMATED_NUM_EPS |
                                               UCP_PARAM_FIELD_NAME,
                                 .features = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                                 .estimated_num_eps = (size_t)w->size,
                                 .name = "colobridge"};
    const ucp_worker_params_t serialized = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                            .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t empty = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                        UCP_AM_HANDLER_PARAM_FIELD_CB,
                                          .id = EMPTY,
                                          .cb = on_empty};
    TRY_UCX(w, ucp_config_read(NULL, NULL, &config));
    const ucs_status_t st = ucp_init(&params, config, &w->context);
    ucp_config_release(config);
    TRY_UCX(w, st);
    TRY_UCX(w, ucp_worker_create(w->context, &serialized, &w->worker));
    TRY_UCX(w, ucp_worker_get_efd(w->worker, &w->event));
    TRY_UCX(w, ucp_worker_set_am_recv_handler(w->worker, &empty));
    return COLO_OK;
}

static colo_status_t write_address(struct transport *w, colo_worker_t *mine)
{
    ucp_address_t *address = NULL;
    size_t bytes = 0;
    TRY_UCX(w, ucp_worker_get_address(w->worker, &address, &bytes));
    mine->bytes = (uint32_t)bytes;
    memcpy(mine->address, address, bytes < sizeof mine->address ? bytes : sizeof mine->address);
    ucp_worker_release_address(w->worker, address);
    if (bytes > sizeof mine->address)
        return colo_fail(
            COLO_ERR_IO,
            "create_bootstrap: rank %d of %d: UCX's address has %zu bytes, expected at most %zu; "
            "name fewer devices in UCX_NET_DEVICES",
            (int)w->rank, (int)w->size, bytes, sizeof mine->address);
    return COLO_OK;
}

static colo_status_t connect_all(struct transport *w, const colo_worker_t *all)
{
    w->token = COLO_HASH_INIT;
    for (int32_t r = 0; r < w->size; r++) {
        if (all[r].bytes > sizeof all[r].address)
            return colo_fail(COLO_ERR_MISMATCH,
                             "create_bootstrap: the all-gather changed the UCX address of rank %d",
                             (int)r);
        w->token = colo_hash_bytes(w->token, all[r].address, all[r].bytes);
    }
    w->token &= UINT64_MAX >> RANK_BITS;
    for (int32_t r = 0; r < w->size; r++) {
        const ucp_ep_params_t params = {
            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                          UCP_EP_PARAM_FIELD_ERR_HANDLER,
            .address = (const ucp_address_t *)(const void *)all[r].address,
            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
            .err_handler = {on_failed, &w->peer[r]}};
        const ucs_status_t st = r == w->rank || all[r].near
                                    ? UCS_OK
                                    : ucp_ep_create(w->worker, &params, &w->peer[r].ep);
        if (st != UCS_OK)
            return colo_fail(
                st == UCS_ERR_NO_MEMORY ? COLO_ERR_NOMEM : COLO_ERR_PEER,
                "create_bootstrap: rank %d of %d cannot reach rank %d by UCX: %s; either that "
                "process has ended, or UCX_NET_DEVICES and UCX_TLS leave no network that both have",
                (int)w->rank, (int)w->size, (int)r, ucs_status_string(st));
    }
    for (int i = 0; i < RING; i++)
        if (!post(w, &w->in[i]))
            return colo_fail(COLO_ERR_IO, "create_bootstrap: %s", w->why);
    return COLO_OK;
}

static colo_status_t ucx_open(const colo_bootstrap_t *b, void **transport)
{
    struct transport *w = calloc(1, sizeof *w);
    colo_worker_t *mine = calloc(1, sizeof *mine), *all = calloc((size_t)b->size, sizeof *all);
    bool enough = w && mine && all && (w->peer = calloc((size_t)b->size, sizeof *w->peer));
    for (int i = 0; i < RING && enough; i++)
        enough = (w->in[i].frame = aligned_alloc(64, (COLO_FRAME_MAX + 63) / 64 * 64)) != NULL;
    colo_status_t st = enough ? COLO_OK : COLO_ERR_NOMEM;
    if (!enough)
        (void)colo_fail(st, "create_bootstrap: rank %d has no memory for %d peers", (int)b->rank,
                        (int)b->size - 1);
    if (enough) {
        w->rank = b->rank;
        w->size = b->size;
        pthread_mutex_init(&w->lock, NULL);
        st = make_worker(w);
        if (st == COLO_OK)
            st = write_address(w, mine);
        if (st == COLO_OK)
            st = b->all_gather(b->user, mine, all, sizeof *mine);
        if (st == COLO_OK)
            st = connect_all(w, all);
    }
    free(mine);
    free(all);
    if (st == COLO_OK)
        *transport = w;
    else if (w)
        ucx_close(w, false);
    return st;
}

static const colo_transport_ops_t ucx_transport = {
    .abi = COLO_TRANSPORT_ABI,
    .name = "ucx",
    .open = ucx_open,
    .full = ucx_full,
    .reserve = ucx_reserve,
    .commit = ucx_commit,
    .recv = ucx_recv,
    .why = ucx_why,
    .flushed = ucx_flushed,
    .wait = ucx_wait,
    .arm = ucx_arm,
    .close = ucx_close,
};

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    COLO_BACKEND_INIT("ucx"),
    .transport = &ucx_transport,
};
