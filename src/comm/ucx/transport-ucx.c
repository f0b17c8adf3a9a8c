/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport-ucx.c - libcolobridge-ucx.so: the transport over UCX. The only file that includes
 * ucp.h.
 *
 * A worker and its endpoints belong to one set of connections, so no message here can meet one of
 * the program. A frame is one message, whose tag holds the sender's rank and a number of this set
 * of ranks. A ring of posted receives takes whatever comes; they are completed in the order they
 * were posted, which is the order of sending for each sender. UCX makes the connections from the
 * workers' addresses, which the bootstrap's all-gather carries, and tells of each endpoint that its
 * peer died (UCP_ERR_HANDLING_MODE_PEER). A process that hangs is left to the deadline.
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
#include "core/helper.h"
#include "core/lock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
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
    struct connections *w;
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

struct connections {
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

static void recycle(struct out *out)
{
    struct out **list = &out->w->unused[out->large];
    out->next = *list;
    *list = out;
}

static void fail(struct peer *to, ucs_status_t status)
{
    if (to->failed == UCS_OK)
        to->failed = status;
}

static void on_failed(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    fail(arg, status);
}

static void on_sent(void *request, ucs_status_t status, void *user)
{
    struct out *out = user;
    out->peer->pending--;
    out->peer->queued -= out->bytes;
    if (status != UCS_OK)
        fail(out->peer, status);
    recycle(out);
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

static bool ucx_full(void *connections, int32_t peer)
{
    return ((struct connections *)connections)->peer[peer].queued > QUEUED_MAX;
}

static void *ucx_reserve(void *connections, int32_t peer, size_t bytes)
{
    struct connections *self = connections;
    const bool large = bytes > SMALL;
    struct out *out = self->unused[large];
    if (out)
        self->unused[large] = out->next;
    else
        out = aligned_alloc(64, (sizeof *out + (large ? COLO_FRAME_MAX : SMALL) + 63) / 64 * 64);
    if (!out)
        return NULL;
    out->w = self;
    out->large = large;
    out->peer = &self->peer[peer];
    out->bytes = bytes;
    self->reserved = out;
    return out->frame;
}

static void ucx_commit(void *connections)
{
    struct connections *self = connections;
    struct out *out = self->reserved;
    struct peer *to = out->peer;
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA |
                                                       UCP_OP_ATTR_FIELD_MEMORY_TYPE,
                                       .cb = {.send = on_sent},
                                       .user_data = out,
                                       .memory_type = UCS_MEMORY_TYPE_HOST};
    void *request = NULL;
    COLO_HOLD(&self->lock);
    if (to->ep && to->failed == UCS_OK) {
        to->pending++;
        to->queued += out->bytes;
        to->dirty = true;
        request = ucp_tag_send_nbx(to->ep, out->frame, out->bytes,
                                   self->token << RANK_BITS | (uint64_t)self->rank, &param);
        if (!UCS_PTR_IS_PTR(request)) {
            to->pending--;
            to->queued -= out->bytes;
        }
        if (UCS_PTR_IS_ERR(request))
            fail(to, UCS_PTR_STATUS(request));
    }
    if (!UCS_PTR_IS_PTR(request))
        recycle(out);
}

static bool ucx_flushed(void *connections, int32_t peer)
{
    struct connections *self = connections;
    struct peer *to = &self->peer[peer];
    COLO_HOLD(&self->lock);
    const bool alive = to->ep && to->failed == UCS_OK;
    if (alive && to->dirty && !to->pending && !to->flushing) {
        const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                           UCP_OP_ATTR_FIELD_USER_DATA,
                                           .cb = {.send = on_flushed},
                                           .user_data = to};
        void *request = ucp_am_send_nbx(to->ep, EMPTY, NULL, 0, NULL, 0, &param);
        to->dirty = false;
        to->flushing = UCS_PTR_IS_PTR(request);
        if (UCS_PTR_IS_ERR(request))
            fail(to, UCS_PTR_STATUS(request));
    }
    return !alive || (!to->pending && !to->dirty && !to->flushing);
}

/* ---- receiving ---- */

static int break_down(struct connections *self, const char *call, ucs_status_t status)
{
    snprintf(self->why, sizeof self->why, "%s: %s", call, ucs_status_string(status));
    self->broken = true;
    return -2;
}

static bool post(struct connections *self, struct in *in)
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
    in->request = ucp_tag_recv_nbx(self->worker, in->frame, COLO_FRAME_MAX,
                                   self->token << RANK_BITS, ~RANK_MASK, &param);
    if (!UCS_PTR_IS_ERR(in->request))
        return true;
    break_down(self, "ucp_tag_recv_nbx", UCS_PTR_STATUS(in->request));
    in->request = NULL;
    return false;
}

/* Nothing of a peer that failed is waiting any more: says so, once for each. */
static int report_gone(struct connections *self, int32_t *peer)
{
    for (int32_t r = 0; r < self->size; r++) {
        struct peer *to = &self->peer[r];
        if (to->failed == UCS_OK || to->gone)
            continue;
        snprintf(self->why, sizeof self->why, "its connection ended: %s",
                 ucs_status_string(to->failed));
        to->gone = true; /* closed with the others: UCX 1.13 may end the process otherwise */
        *peer = r;
        return -1;
    }
    return 0;
}

static int receive(struct connections *self, int32_t *peer, const void **frame, size_t *bytes)
{
    if (self->held) {
        self->held = false;
        if (!post(self, &self->in[self->next]))
            return -2;
        self->next = (self->next + 1) % RING;
    }
    ucp_worker_progress(self->worker);
    for (int i = 0; i < RING; i++) {
        struct in *in = &self->in[self->next];
        if (!in->done)
            return report_gone(self, peer);
        const uint64_t from = in->tag & RANK_MASK;
        if (in->status == UCS_OK && from < (uint64_t)self->size) {
            self->held = true;
            *peer = (int32_t)from;
            *frame = in->frame;
            *bytes = in->bytes;
            return 1;
        }
        if (in->status == UCS_ERR_MESSAGE_TRUNCATED || in->status == UCS_OK)
            return break_down(self, "a frame that no rank sends",
                              in->status ? in->status : UCS_ERR_INVALID_PARAM);
        if (!post(self, in)) /* the rest will not come: its sender died */
            return -2;
        self->next = (self->next + 1) % RING;
    }
    return 0;
}

static int ucx_recv(void *connections, int32_t *peer, const void **frame, size_t *bytes)
{
    struct connections *self = connections;
    COLO_HOLD(&self->lock);
    return self->broken ? -2 : receive(self, peer, frame, bytes);
}

static const char *ucx_why(void *connections)
{
    return ((struct connections *)connections)->why;
}

static int ucx_arm(void *connections)
{
    struct connections *self = connections;
    COLO_HOLD(&self->lock);
    const ucs_status_t armed = ucp_worker_arm(self->worker);
    return armed == UCS_ERR_BUSY ? -1 : self->event;
}

static void ucx_wait(void *connections, double seconds)
{
    struct timespec span = {.tv_sec = (time_t)seconds};
    span.tv_nsec = (long)((seconds - (double)span.tv_sec) * 1e9);
    const int event = ucx_arm(connections);
    if (event >= 0)
        ppoll(&(struct pollfd){.fd = event, .events = POLLIN}, 1, &span, NULL);
}

/* ---- taking down ---- */

/* UCX has given everything back that it holds of ours. */
static bool all_done(struct connections *self)
{
    for (int32_t r = 0; r < self->size; r++)
        if (self->peer[r].pending || self->peer[r].flushing ||
            (UCS_PTR_IS_PTR(self->peer[r].closing) &&
             ucp_request_check_status(self->peer[r].closing) == UCS_INPROGRESS))
            return false;
    for (int i = 0; i < RING; i++)
        if (self->in[i].request && !self->in[i].done)
            return false;
    return true;
}

static void ucx_close(void *connections, bool clean)
{
    struct connections *self = connections;
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    for (int32_t r = 0; self->peer && r < self->size; r++)
        if (self->peer[r].ep)
            self->peer[r].closing = ucp_ep_close_nbx(self->peer[r].ep, &param);
    for (int i = 0; i < RING; i++)
        if (self->in[i].request && !self->in[i].done)
            ucp_request_cancel(self->worker, self->in[i].request);
    const double end = colo_now() + CLOSE_SECONDS;
    while (self->peer && !all_done(self) && colo_now() < end)
        ucp_worker_progress(self->worker);
    for (int32_t r = 0; self->peer && r < self->size; r++)
        if (UCS_PTR_IS_PTR(self->peer[r].closing))
            ucp_request_free(self->peer[r].closing);
    for (int i = 0; i < RING; i++)
        if (self->in[i].request)
            ucp_request_free(self->in[i].request);
    if (self->worker)
        ucp_worker_destroy(self->worker);
    if (self->context)
        ucp_cleanup(self->context);
    for (int i = 0; i < RING; i++) /* UCX is at nothing any more */
        free(self->in[i].frame);
    for (int large = 0; large < 2; large++)
        for (struct out *out = self->unused[large], *next; out; out = next) {
            next = out->next;
            free(out);
        }
    pthread_mutex_destroy(&self->lock);
    free(self->peer);
    free(self);
}

/* ---- setting up ---- */

/* Where UCX keeps segments for ranks of its host, and how much it takes at least. */
enum { SHM_MIB = 16, DESCRIPTORS = 32 };

static colo_status_t explain(const struct connections *self, const char *call, ucs_status_t status)
{
    struct statvfs shm;
    char limit[160] = "";
    if (statvfs("/dev/shm", &shm) == 0 && shm.f_bavail < ((uint64_t)SHM_MIB << 20) / shm.f_frsize)
        snprintf(limit, sizeof limit,
                 "; /dev/shm has %llu KiB left, and UCX takes %d MiB or more: make it larger, or "
                 "set "
                 "UCX_TLS=^shm",
                 (unsigned long long)shm.f_bavail * shm.f_frsize >> 10, SHM_MIB);
    return colo_fail(*limit || status == UCS_ERR_NO_MEMORY ? COLO_ERR_NOMEM : COLO_ERR_IO,
                     "create_bootstrap: rank %d of %d: UCX: %.40s: %s%s", (int)self->rank,
                     (int)self->size, call, ucs_status_string(status), limit);
}

#define TRY_UCX(self, call)                     \
    do {                                        \
        const ucs_status_t st_ = (call);        \
        if (st_ != UCS_OK)                      \
            return explain((self), #call, st_); \
    } while (0)

/* Where descriptors run out, UCX may end the process. So as many as it opens are had first. */
static colo_status_t check_descriptors(const struct connections *self)
{
    const int32_t n = DESCRIPTORS + self->size - 1;
    struct rlimit limit = {0, 0};
    COLO_AUTOFREE int *fd = malloc((size_t)n * sizeof *fd);
    int error = 0;
    int32_t open = 0;
    COLO_FAIL_IF(!fd, COLO_ERR_NOMEM, "create_bootstrap: rank %d has no memory for %d peers",
                 (int)self->rank, (int)self->size - 1);
    while (open < n && (fd[open] = eventfd(0, EFD_CLOEXEC)) >= 0)
        open++;
    error = open < n ? errno : 0;
    for (int32_t i = 0; i < open; i++)
        close(fd[i]);
    getrlimit(RLIMIT_NOFILE, &limit);
    COLO_FAIL_IF(error, COLO_ERR_IO,
                 "create_bootstrap: rank %d has %d descriptors left, and UCX takes up to %d: %s; "
                 "its limit is %lld, raise it (ulimit -n) or close files",
                 (int)self->rank, (int)open, (int)n, strerror(error), (long long)limit.rlim_cur);
    return COLO_OK;
}

static colo_status_t make_worker(struct connections *self)
{
    ucp_config_t *config = NULL;
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES |
                                               UCP_PARAM_FIELD_ESTIMATED_NUM_EPS |
                                               UCP_PARAM_FIELD_NAME,
                                 .features = UCP_FEATURE_TAG | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                                 .estimated_num_eps = (size_t)self->size,
                                 .name = "colobridge"};
    const ucp_worker_params_t serialized = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                            .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t empty = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                        UCP_AM_HANDLER_PARAM_FIELD_CB,
                                          .id = EMPTY,
                                          .cb = on_empty};
    TRY_UCX(self, ucp_config_read(NULL, NULL, &config));
    const ucs_status_t st = ucp_init(&params, config, &self->context);
    ucp_config_release(config);
    TRY_UCX(self, st);
    TRY_UCX(self, ucp_worker_create(self->context, &serialized, &self->worker));
    TRY_UCX(self, ucp_worker_get_efd(self->worker, &self->event));
    TRY_UCX(self, ucp_worker_set_am_recv_handler(self->worker, &empty));
    return COLO_OK;
}

static colo_status_t write_address(struct connections *self, colo_worker_t *mine)
{
    ucp_address_t *address = NULL;
    size_t bytes = 0;
    TRY_UCX(self, ucp_worker_get_address(self->worker, &address, &bytes));
    mine->bytes = (uint32_t)bytes;
    memcpy(mine->address, address, bytes < sizeof mine->address ? bytes : sizeof mine->address);
    ucp_worker_release_address(self->worker, address);
    COLO_FAIL_IF(
        bytes > sizeof mine->address, COLO_ERR_IO,
        "create_bootstrap: rank %d of %d: UCX's address has %zu bytes, expected at most %zu; "
        "name fewer devices in UCX_NET_DEVICES",
        (int)self->rank, (int)self->size, bytes, sizeof mine->address);
    return COLO_OK;
}

static const colo_worker_t *worker_of(const colo_worker_t *all, size_t stride, int32_t r)
{
    return (const colo_worker_t *)(const void *)((const char *)all + (size_t)r * stride);
}

static colo_status_t ucx_connect(void *connections, const colo_worker_t *all, size_t stride)
{
    struct connections *self = connections;
    self->token = COLO_HASH_INIT;
    for (int32_t r = 0; r < self->size; r++) {
        const colo_worker_t *worker = worker_of(all, stride, r);
        COLO_FAIL_IF(worker->bytes > sizeof worker->address, COLO_ERR_MISMATCH,
                     "create_bootstrap: the all-gather changed the UCX address of rank %d", (int)r);
        self->token = colo_hash_bytes(self->token, worker->address, worker->bytes);
    }
    self->token &= UINT64_MAX >> RANK_BITS;
    for (int32_t r = 0; r < self->size; r++) {
        const colo_worker_t *worker = worker_of(all, stride, r);
        const ucp_ep_params_t params = {
            .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                          UCP_EP_PARAM_FIELD_ERR_HANDLER,
            .address = (const ucp_address_t *)(const void *)worker->address,
            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
            .err_handler = {on_failed, &self->peer[r]}};
        const ucs_status_t st = r == self->rank || worker->near
                                    ? UCS_OK
                                    : ucp_ep_create(self->worker, &params, &self->peer[r].ep);
        COLO_FAIL_IF(
            st != UCS_OK, st == UCS_ERR_NO_MEMORY ? COLO_ERR_NOMEM : COLO_ERR_PEER,
            "create_bootstrap: rank %d of %d cannot reach rank %d by UCX: %s; either that "
            "process has ended, or UCX_NET_DEVICES and UCX_TLS leave no network that both have",
            (int)self->rank, (int)self->size, (int)r, ucs_status_string(st));
    }
    for (int i = 0; i < RING; i++)
        COLO_FAIL_IF(!post(self, &self->in[i]), COLO_ERR_IO, "create_bootstrap: %s", self->why);
    return COLO_OK;
}

static colo_status_t ucx_open(int32_t rank, int32_t size, colo_worker_t *mine, void **connections)
{
    struct connections *self = calloc(1, sizeof *self);
    bool enough = self && (self->peer = calloc((size_t)size, sizeof *self->peer));
    for (int i = 0; i < RING && enough; i++)
        enough = (self->in[i].frame = aligned_alloc(64, (COLO_FRAME_MAX + 63) / 64 * 64)) != NULL;
    colo_status_t st = enough ? COLO_OK : COLO_ERR_NOMEM;
    if (!enough)
        (void)colo_fail(st, "create_bootstrap: rank %d has no memory for %d peers", (int)rank,
                        (int)size - 1);
    if (enough) {
        self->rank = rank;
        self->size = size;
        pthread_mutex_init(&self->lock, NULL);
        st = check_descriptors(self);
        COLO_THEN(st, make_worker(self));
        COLO_THEN(st, write_address(self, mine));
    }
    if (st == COLO_OK)
        *connections = self;
    else if (self)
        ucx_close(self, false);
    return st;
}

static const colo_process_transport_t ucx_transport = {
    .name = "ucx",
    .open = ucx_open,
    .connect = ucx_connect,
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
