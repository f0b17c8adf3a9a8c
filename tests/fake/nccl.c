/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.c - NCCL between threads of one process. See fake.h.
 *
 * As NCCL, it waits without limit: for ranks that do not come to ncclCommInitRank(), and on the
 * stream for ranks that do not come to a collective or a message. ncclCommAbort() ends what its own
 * rank waits for. Collectives that differ wait, too, until they are aborted.
 */
#include "fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum kind { ALL_GATHER, ALL_REDUCE, BROADCAST, SEND, RECV };

struct data { /* what a rank has brought; under the world's lock */
    int32_t refs;
    size_t bytes;
    char content[];
};

struct message {
    struct message *next;
    struct data *data;
};

struct call {
    enum kind kind;
    const void *send;
    void *recv;
    size_t bytes;
    int32_t peer; /* or the root */
};

struct seat {
    struct call call;
    struct data *data;
    int64_t posted, finished;
};

struct world { /* the ranks of one unique id */
    struct world *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t n, arrived, refs;
    bool ended;
    struct seat *seat;        /* [n] */
    struct message **mailbox; /* [n][n]: from, to; oldest first */
    int64_t *taken;           /* [n][n] */
};

struct ncclComm {
    struct ncclComm *next; /* those that are there */
    struct world *world;
    int32_t rank, device;
    _Atomic int32_t refs; /* the handle, and what is enqueued */
    _Atomic bool aborted, gone;
    _Atomic int32_t running;
    int64_t collectives; /* the stream's */
    int64_t *sent;       /* [n]: the stream's */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the lists */
static struct world *worlds;
static struct ncclComm *comms;
static uint64_t ids;

static ncclResult_t enter(int device, const char *name)
{
    return fake_enter(device, name) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
#define ENTER(device)                                    \
    do {                                                 \
        const ncclResult_t r_ = enter(device, __func__); \
        if (r_ != ncclSuccess)                           \
            return r_;                                   \
    } while (0)

/* ---- communicators ---- */

static bool is_there(ncclComm_t comm)
{
    pthread_mutex_lock(&lock);
    struct ncclComm *c = comms;
    while (c && c != comm)
        c = c->next;
    pthread_mutex_unlock(&lock);
    return c != NULL;
}

static void data_put(struct data *d)
{
    if (d && --d->refs == 0)
        free(d);
}

static void world_put(struct world *w)
{
    pthread_mutex_lock(&w->lock);
    const bool last = --w->refs == 0;
    pthread_mutex_unlock(&w->lock);
    if (!last)
        return;
    for (int32_t i = 0; i < w->n; i++)
        data_put(w->seat[i].data);
    for (int32_t i = 0; i < w->n * w->n; i++)
        for (struct message *m = w->mailbox[i], *next; m; m = next) {
            next = m->next;
            data_put(m->data);
            free(m);
        }
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w->seat);
    free(w->mailbox);
    free(w->taken);
    free(w);
}

static void comm_put(struct ncclComm *c)
{
    if (--c->refs > 0)
        return;
    world_put(c->world);
    free(c->sent);
    free(c);
}

ncclResult_t ncclGetVersion(int *version)
{
    const char *said = getenv("FAKE_NCCL_VERSION");
    *version = said ? (int)strtol(said, NULL, 10) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    ENTER(fake_device());
    memset(id, 0, sizeof *id);
    pthread_mutex_lock(&lock);
    const uint64_t n = ++ids;
    pthread_mutex_unlock(&lock);
    memcpy(id->internal, &n, sizeof n);
    return ncclSuccess;
}

void fake_end_inits(void)
{
    pthread_mutex_lock(&lock);
    for (struct world *w = worlds, *next; w; w = next) {
        next = w->next;
        pthread_mutex_lock(&w->lock);
        w->ended = true;
        pthread_cond_broadcast(&w->changed);
        pthread_mutex_unlock(&w->lock);
    }
    worlds = NULL;
    pthread_mutex_unlock(&lock);
}

static struct world *world_of(const ncclUniqueId *id, int32_t n)
{
    pthread_mutex_lock(&lock);
    struct world *w = worlds;
    while (w && memcmp(w->id, id->internal, sizeof w->id) != 0)
        w = w->next;
    if (!w) {
        const size_t pairs = (size_t)n * (size_t)n;
        w = calloc(1, sizeof *w);
        memcpy(w->id, id->internal, sizeof w->id);
        pthread_mutex_init(&w->lock, NULL);
        pthread_cond_init(&w->changed, NULL);
        w->n = n;
        w->seat = calloc((size_t)n, sizeof *w->seat);
        w->mailbox = calloc(pairs, sizeof(struct message *));
        w->taken = calloc(pairs, sizeof *w->taken);
        w->next = worlds;
        worlds = w;
    }
    pthread_mutex_lock(&w->lock);
    w->refs++;
    if (++w->arrived == n) {
        struct world **link = &worlds;
        while (*link != w)
            link = &(*link)->next;
        *link = w->next;
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&lock);
    while (w->arrived < n && !w->ended)
        pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
    return w;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank)
{
    const int device = fake_device();
    ENTER(device);
    if (n < 1 || rank < 0 || rank >= n)
        return ncclInvalidArgument;
    struct world *w = world_of(&id, n);
    if (w->ended) {
        world_put(w);
        return ncclRemoteError;
    }
    struct ncclComm *c = calloc(1, sizeof *c);
    c->world = w;
    c->rank = rank;
    c->device = device;
    c->refs = 1;
    c->sent = calloc((size_t)n, sizeof *c->sent);
    pthread_mutex_lock(&lock);
    c->next = comms;
    comms = c;
    pthread_mutex_unlock(&lock);
    fake_count(FAKE_COMM, 1);
    *comm = c;
    return ncclSuccess;
}

static ncclResult_t leave(ncclComm_t comm, bool abort, const char *name)
{
    if (!is_there(comm)) {
        fake_misused("a communicator ends that is not there");
        return ncclInvalidArgument;
    }
    const ncclResult_t r = enter(comm->device, name);
    pthread_mutex_lock(&lock);
    struct ncclComm **link = &comms;
    while (*link != comm)
        link = &(*link)->next;
    *link = comm->next;
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&comm->world->lock);
    comm->aborted = abort;
    comm->gone = true;
    if (!abort && comm->running > 0)
        fake_misused("a communicator is destroyed that is used");
    pthread_cond_broadcast(&comm->world->changed);
    pthread_mutex_unlock(&comm->world->lock);
    fake_count(FAKE_COMM, -1);
    comm_put(comm);
    return r;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return leave(comm, false, __func__);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return leave(comm, true, __func__);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *e)
{
    if (!is_there(comm))
        return ncclInvalidArgument;
    *e = fake_async_error_of(comm->device);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *n)
{
    if (!is_there(comm))
        return ncclInvalidArgument;
    ENTER(comm->device);
    *n = comm->world->n;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    if (!is_there(comm))
        return ncclInvalidArgument;
    ENTER(comm->device);
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    if (!is_there(comm))
        return ncclInvalidArgument;
    ENTER(comm->device);
    *device = comm->device;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t e)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited",
                                        "NCCL operation in progress"};
    return (size_t)e < sizeof texts / sizeof texts[0] ? texts[e] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    return "";
}

/* ---- on the stream ---- */

/* Until @cond, or until the rank is aborted or its device broken; under the world's lock. A device
 * that breaks wakes no one, so the wait looks at it from time to time. */
static bool must_stop(const struct ncclComm *c)
{
    return c->aborted || fake_is_broken(c->device);
}

static void wait_for_change(struct world *w)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 50000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&w->changed, &w->lock, &t);
}

static struct data *data_new(const void *from, size_t bytes)
{
    struct data *d = malloc(sizeof *d + bytes);
    d->refs = 1;
    d->bytes = bytes;
    if (bytes)
        memcpy(d->content, from, bytes);
    return d;
}

static bool all_posted(const struct world *w, int64_t number)
{
    for (int32_t i = 0; i < w->n; i++)
        if (w->seat[i].posted < number)
            return false;
    return true;
}

static bool all_finished(const struct world *w, int64_t number)
{
    for (int32_t i = 0; i < w->n; i++)
        if (w->seat[i].finished < number)
            return false;
    return true;
}

static bool all_alike(const struct world *w)
{
    const struct call *a = &w->seat[0].call;
    for (int32_t i = 1; i < w->n; i++) {
        const struct call *b = &w->seat[i].call;
        if (a->kind != b->kind || a->bytes != b->bytes || a->peer != b->peer)
            return false;
    }
    return true;
}

static void finish(const struct world *w, const struct call *k)
{
    char *to = k->recv;
    int32_t sum, v;
    switch (k->kind) {
    case ALL_GATHER:
        for (int32_t i = 0; i < w->n; i++)
            memcpy(to + (size_t)i * k->bytes, w->seat[i].data->content, k->bytes);
        break;
    case ALL_REDUCE: /* sums of i32 alone: the library makes its own of others */
        for (size_t pos = 0; pos < k->bytes; pos += sizeof sum) {
            sum = 0;
            for (int32_t i = 0; i < w->n; i++) {
                memcpy(&v, w->seat[i].data->content + pos, sizeof v);
                sum = (int32_t)((uint32_t)sum + (uint32_t)v);
            }
            memcpy(to + pos, &sum, sizeof sum);
        }
        break;
    case BROADCAST:
        memcpy(to, w->seat[k->peer].data->content, k->bytes);
        break;
    case SEND:
    case RECV:
        break;
    }
}

static void collective(struct ncclComm *c, const struct call *k)
{
    struct world *w = c->world;
    struct seat *me = &w->seat[c->rank];
    const bool brings = k->kind != BROADCAST || k->peer == c->rank;
    struct data *d = data_new(k->send, brings ? k->bytes : 0);
    pthread_mutex_lock(&w->lock);
    const int64_t number = ++c->collectives;
    data_put(me->data);
    me->data = d;
    me->call = *k;
    me->posted = number;
    pthread_cond_broadcast(&w->changed);
    while (!all_posted(w, number) && !must_stop(c))
        wait_for_change(w);
    if (!must_stop(c) && !all_alike(w)) {
        fake_misused("ranks differ in a collective");
        while (!must_stop(c))
            wait_for_change(w);
    }
    if (!must_stop(c)) {
        finish(w, k);
        me->finished = number;
        pthread_cond_broadcast(&w->changed);
        while (!all_finished(w, number) && !must_stop(c))
            wait_for_change(w);
    }
    pthread_mutex_unlock(&w->lock);
}

struct group { /* what one communicator enqueues at once */
    struct ncclComm *comm;
    int32_t n;
    struct call call[];
};

static void post(struct ncclComm *c, const struct call *k)
{
    struct world *w = c->world;
    struct message *m = calloc(1, sizeof *m), **link = &w->mailbox[c->rank * w->n + k->peer];
    m->data = data_new(k->send, k->bytes);
    while (*link)
        link = &(*link)->next;
    *link = m;
    c->sent[k->peer]++;
}

static void receive(struct ncclComm *c, const struct call *k)
{
    struct world *w = c->world;
    const int32_t pair = k->peer * w->n + c->rank;
    while (!w->mailbox[pair] && !must_stop(c))
        wait_for_change(w);
    if (must_stop(c))
        return;
    struct message *m = w->mailbox[pair];
    if (m->data->bytes != k->bytes) {
        fake_misused("a message is not as long as what receives it");
        while (!must_stop(c))
            wait_for_change(w);
        return;
    }
    memcpy(k->recv, m->data->content, k->bytes);
    w->mailbox[pair] = m->next;
    w->taken[pair]++;
    data_put(m->data);
    free(m);
    pthread_cond_broadcast(&w->changed);
}

static void messages(const struct group *g)
{
    struct ncclComm *c = g->comm;
    struct world *w = c->world;
    pthread_mutex_lock(&w->lock);
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind == SEND)
            post(c, &g->call[i]);
    pthread_cond_broadcast(&w->changed);
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind == RECV)
            receive(c, &g->call[i]);
    for (int32_t i = 0; i < w->n; i++)
        while (w->taken[c->rank * w->n + i] < c->sent[i] && !must_stop(c))
            wait_for_change(w);
    pthread_mutex_unlock(&w->lock);
}

static void group_run(void *arg)
{
    const struct group *g = arg;
    struct ncclComm *c = g->comm;
    if (c->gone && !c->aborted)
        fake_misused("an operation runs on a communicator that was destroyed");
    if (c->gone)
        return;
    c->running++;
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind < SEND)
            collective(c, &g->call[i]);
    messages(g);
    c->running--;
}

static void group_end(void *arg)
{
    comm_put(((struct group *)arg)->comm);
}

/* ---- enqueueing ---- */

struct queued {
    struct ncclComm *comm;
    cudaStream_t stream;
    struct call call;
};
static _Thread_local struct {
    int depth, n, cap;
    ncclResult_t failed; /* a call of the group: it does not run */
    struct queued *list;
} group;

static ncclResult_t enqueue(const struct queued *first, int n)
{
    const size_t bytes = sizeof(struct group) + (size_t)n * sizeof(struct call);
    struct group *g = calloc(1, bytes);
    g->comm = first->comm;
    for (int i = 0; i < n; i++)
        g->call[g->n++] = first[i].call;
    g->comm->refs++;
    const cudaError_t e = fake_enqueue(first->stream, group_run, group_end, g, bytes);
    free(g);
    return e == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

static ncclResult_t add(ncclComm_t comm, cudaStream_t stream, const struct call *k,
                        const char *name)
{
    if (!is_there(comm)) {
        fake_misused("an operation names a communicator that is not there");
        return ncclInvalidArgument;
    }
    const ncclResult_t r = enter(comm->device, name);
    const struct queued q = {comm, stream, *k};
    if (r != ncclSuccess)
        return group.failed = r;
    if (k->peer < 0 || k->peer >= comm->world->n)
        return group.failed = ncclInvalidArgument;
    if (group.depth == 0)
        return enqueue(&q, 1);
    if (group.n == group.cap) {
        group.cap = group.cap ? 2 * group.cap : 16;
        group.list = realloc(group.list, (size_t)group.cap * sizeof *group.list);
    }
    group.list[group.n++] = q;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    ENTER(fake_device());
    if (group.depth++ == 0) {
        group.failed = ncclSuccess;
        fake_count(FAKE_GROUP, 1);
    }
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t r = enter(fake_device(), __func__);
    if (group.depth == 0) {
        fake_misused("a group ends that has not begun");
        return ncclInvalidUsage;
    }
    if (--group.depth > 0)
        return r;
    fake_count(FAKE_GROUP, -1);
    r = r == ncclSuccess ? group.failed : r;
    for (int i = 0, n; i < group.n && r == ncclSuccess; i += n) {
        for (n = 1; i + n < group.n && group.list[i + n].comm == group.list[i].comm &&
                    group.list[i + n].stream == group.list[i].stream;)
            n++;
        r = enqueue(&group.list[i], n);
    }
    free(group.list);
    memset(&group, 0, sizeof group);
    return r;
}

static size_t size_of(ncclDataType_t type)
{
    return type == ncclInt32 ? 4 : 1;
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    const struct call k = {ALL_GATHER, send, recv, count * size_of(type), 0};
    return add(comm, stream, &k, __func__);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    const struct call k = {ALL_REDUCE, send, recv, count * size_of(type), 0};
    return type == ncclInt32 && op == ncclSum ? add(comm, stream, &k, __func__)
                                              : ncclInvalidArgument;
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream)
{
    const struct call k = {BROADCAST, send, recv, count * size_of(type), root};
    return add(comm, stream, &k, __func__);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    const struct call k = {SEND, send, NULL, count * size_of(type), peer};
    return add(comm, stream, &k, __func__);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    const struct call k = {RECV, NULL, recv, count * size_of(type), peer};
    return add(comm, stream, &k, __func__);
}
