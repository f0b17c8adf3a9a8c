/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.c - NCCL between threads of one process. See fake.h.
 *
 * As NCCL, ncclCommInitRank() waits without limit for ranks that do not come. What operations do on
 * the stream is nccl_stream.c.
 */
#include "nccl_world.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

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

static void world_put(struct world *w)
{
    pthread_mutex_lock(&w->lock);
    const bool last = --w->refs == 0;
    pthread_mutex_unlock(&w->lock);
    if (!last)
        return;
    for (int32_t i = 0; i < w->n * w->n; i++)
        for (struct message *m = w->mailbox[i], *next; m; m = next) {
            next = m->next;
            fake_data_put(m->data);
            free(m);
        }
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
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
    if (!is_there(comm)) {
        fake_misused("a communicator is asked that is not there");
        return ncclInvalidArgument;
    }
    *e = fake_async_error_of(comm->device);
    return ncclSuccess;
}

#define ASKS(what, value)                                 \
    ncclResult_t what(const ncclComm_t comm, int *answer) \
    {                                                     \
        if (!is_there(comm))                              \
            return ncclInvalidArgument;                   \
        ENTER(comm->device);                              \
        *answer = (value);                                \
        return ncclSuccess;                               \
    }
ASKS(ncclCommCount, comm->world->n)
ASKS(ncclCommUserRank, comm->rank)
ASKS(ncclCommCuDevice, comm->device)

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

static void group_end(void *arg)
{
    comm_put(((struct group *)arg)->comm);
}

static ncclResult_t enqueue(const struct queued *first, int n)
{
    const size_t bytes = sizeof(struct group) + (size_t)n * sizeof(struct call);
    struct group *g = calloc(1, bytes);
    g->comm = first->comm;
    for (int i = 0; i < n; i++)
        g->call[g->n++] = first[i].call;
    g->comm->refs++;
    const cudaError_t e = fake_enqueue(first->stream, fake_group_run, group_end, g, bytes);
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

static ncclResult_t message(ncclComm_t comm, cudaStream_t stream, const struct call *k,
                            const char *name)
{
    const void *p = k->send ? k->send : k->recv;
    return fake_is_memory(p) && fake_is_whole(p, k->bytes) ? add(comm, stream, k, name)
                                                           : ncclInvalidArgument;
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    const struct call k = {SEND, send, NULL, count * size_of(type), peer};
    return message(comm, stream, &k, __func__);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    const struct call k = {RECV, NULL, recv, count * size_of(type), peer};
    return message(comm, stream, &k, __func__);
}
