/* SPDX-License-Identifier: Apache-2.0 */
/* host_peers.c - see host_peers.h. */
#include "harness/host_peers.h"

#include "comm/threads/threads.h"
#include "core/device.h"
#include "core/error.h"
#include "harness/harness.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

t_told_t t_told[T_PEERS_RANKS];
int32_t t_apart = -1;

struct colo_direct_list {
    colo_transfers_t pass[2]; /* with copies of the lists */
};

struct colo_direct_launcher {
    colo_comm_t *comm;
    colo_direct_list_t own;
};

/* ---- lists ---- */

static void *memory_of(size_t bytes)
{
    void *p = malloc(bytes + 1);
    if (!p)
        abort();
    return p;
}

static void *copy_of(const void *from, size_t bytes)
{
    void *to = memory_of(bytes);
    if (bytes)
        memcpy(to, from, bytes);
    return to;
}

static void keep(colo_direct_list_t *l, const colo_transfers_t pass[2])
{
    for (int i = 0; i < 2; i++) {
        colo_transfers_t *t = &l->pass[i];
        *t = pass[i];
        t->transfer = copy_of(t->transfer, (size_t)t->ntransfers * sizeof *t->transfer);
        t->addend =
            copy_of(t->addend, (size_t)t->ntransfers * (size_t)t->addends * sizeof *t->addend);
        t->exposed = copy_of(t->exposed, (size_t)t->nexposed * sizeof *t->exposed);
    }
}

static void forget(colo_direct_list_t *l)
{
    for (int i = 0; i < 2; i++) {
        free((void *)(uintptr_t)l->pass[i].transfer);
        free((void *)(uintptr_t)l->pass[i].addend);
        free((void *)(uintptr_t)l->pass[i].exposed);
    }
}

colo_status_t t_launcher_create(colo_comm_t *c, const colo_transfers_t pass[2],
                                colo_direct_launcher_t **d)
{
    const colo_status_t st = t_told[c->rank].create;
    if (st < 0)
        return colo_fail(st, "create says so to rank %d", (int)c->rank);
    *d = memory_of(sizeof **d);
    (*d)->comm = c;
    keep(&(*d)->own, pass);
    return COLO_OK;
}

static colo_status_t path_load(colo_direct_launcher_t *d, const colo_transfers_t pass[2])
{
    forget(&d->own);
    keep(&d->own, pass);
    return COLO_OK;
}

static void path_destroy(colo_direct_launcher_t **d)
{
    forget(&(*d)->own);
    free(*d);
    *d = NULL;
}

static colo_status_t path_list(colo_direct_launcher_t *d, const colo_transfers_t pass[2],
                               colo_direct_list_t **l)
{
    *l = memory_of(sizeof **l);
    keep(*l, pass);
    return COLO_OK;
}

static void path_drop(colo_direct_launcher_t *d, colo_direct_list_t **l)
{
    forget(*l);
    free(*l);
    *l = NULL;
}

/* ---- movement ---- */

int32_t t_launcher_rank(const colo_direct_launcher_t *d)
{
    return d->comm->rank;
}

const colo_transfers_t *t_launcher_transfers(const colo_direct_launcher_t *d, int pass,
                                             const colo_direct_call_t *call)
{
    return &(call->list ? call->list : &d->own)->pass[pass];
}

/* [shows][reaches]: the tensors of a call, until all that reach them are done. */
static const colo_direct_call_t *shown[T_PEERS_RANKS][T_PEERS_RANKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Under the lock: until rank @shows shows @reader its tensors (@there), or no longer does; at most
 * as long as calls on @comm wait. */
static colo_status_t wait_for(const colo_comm_t *comm, int32_t shows, int32_t reader, bool there)
{
    const int64_t most = t_long_wait(), ms = comm->timeout_ms < most ? comm->timeout_ms : most;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 1 + ms / 1000;
    while ((shown[shows][reader] != NULL) != there)
        if (pthread_cond_timedwait(&changed, &lock, &end) == ETIMEDOUT)
            return colo_fail(COLO_ERR_TIMEOUT, "peers: rank %d %s rank %d", (int)shows,
                             there ? "shows nothing to" : "is not yet read by", (int)reader);
    return COLO_OK;
}

static void show(int32_t shows, int32_t reader, const colo_direct_call_t *call)
{
    pthread_mutex_lock(&lock);
    shown[shows][reader] = call;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static colo_box_t box_of(const colo_direct_tensor_t *t, bool in, const int64_t begin[3],
                         const int64_t extent[3])
{
    const int64_t *stride = in ? t->in_stride : t->out_stride;
    colo_box_t box = {.data = (in ? t->in : t->out) + begin[0] * stride[0] + begin[1] * stride[1] +
                              begin[2] * t->per * stride[2]};
    for (int i = 0; i < 3; i++) {
        box.extent[i] = extent[i] * (i == 2 ? t->per : 1);
        box.stride[i] = stride[i] / (int64_t)t->elem;
    }
    return box;
}

/* Tensor @k of @peer (-1: of this rank). */
static const colo_direct_tensor_t *tensor_of(const colo_direct_call_t *call, int32_t rank,
                                             int64_t peer, int32_t k)
{
    return peer < 0 ? &call->tensor[k] : &shown[peer][rank]->tensor[k];
}

static colo_status_t move(const colo_transfers_t *t, int64_t i, const colo_direct_call_t *call,
                          int32_t rank, int32_t k, const colo_device_t *device)
{
    const colo_transfer_t *s = &t->transfer[i];
    const colo_direct_tensor_t *own = &call->tensor[k];
    if (t->addends) {
        colo_box_t from[COLO_MAX_ADDENDS], to = box_of(own, false, s->there, s->extent);
        for (int32_t l = 0; l < t->addends; l++) {
            const colo_addend_t *a = &t->addend[i * t->addends + l];
            from[l] = box_of(tensor_of(call, rank, a->peer, k), true, a->begin, s->extent);
        }
        return device->box_sum(&to, from, t->addends, own->dtype, NULL);
    }
    const colo_direct_tensor_t *other = tensor_of(call, rank, s->peer, k);
    const colo_box_t from = box_of(t->pulls ? other : own, true, s->here, s->extent),
                     to = box_of(t->pulls ? own : other, false, s->there, s->extent);
    return device->box_copy(&to, &from, own->elem, NULL);
}

/* Which ranks this one reaches. */
static void find_peers(const colo_transfers_t *t, bool peer[T_PEERS_RANKS])
{
    for (int64_t i = 0; i < t->ntransfers; i++) {
        if (!t->addends && t->transfer[i].peer >= 0)
            peer[t->transfer[i].peer] = true;
        for (int32_t l = 0; l < t->addends; l++)
            if (t->addend[i * t->addends + l].peer >= 0)
                peer[t->addend[i * t->addends + l].peer] = true;
    }
}

colo_status_t t_launcher_run(colo_direct_launcher_t *d, int pass, const colo_direct_call_t *call,
                             colo_stream_t stream)
{
    const colo_transfers_t *t = t_launcher_transfers(d, pass, call);
    const int32_t rank = d->comm->rank;
    bool peer[T_PEERS_RANKS] = {false};
    colo_status_t st = COLO_OK;
    const colo_device_t *device;
    find_peers(t, peer);
    COLO_TRY(colo_device_for(COLO_MEM_HOST, &device));
    for (int32_t i = 0; i < t->nexposed; i++)
        show(rank, t->exposed[i], call);
    pthread_mutex_lock(&lock);
    for (int32_t r = 0; r < T_PEERS_RANKS && st == COLO_OK; r++)
        if (peer[r])
            st = wait_for(d->comm, r, rank, true);
    pthread_mutex_unlock(&lock);
    for (int32_t k = 0; k < call->n && st == COLO_OK; k++)
        for (int64_t i = 0; i < t->ntransfers && st == COLO_OK; i++)
            st = move(t, i, call, rank, k, device);
    t_told[rank].runs[pass]++;
    t_told[rank].pulls += t->pulls;
    for (int32_t r = 0; r < T_PEERS_RANKS; r++)
        if (peer[r])
            show(r, rank, NULL);
    pthread_mutex_lock(&lock);
    for (int32_t i = 0; i < t->nexposed && st == COLO_OK; i++)
        st = wait_for(d->comm, rank, t->exposed[i], false);
    pthread_mutex_unlock(&lock);
    return st;
}

/* ---- what the table says ---- */

static colo_status_t open_as_told(colo_comm_t *c)
{
    const colo_status_t st = t_told[c->rank].open;
    return st < 0 ? colo_fail(st, "open says so to rank %d", (int)c->rank) : st;
}

static bool reaches(const colo_comm_t *c, int32_t a, int32_t b)
{
    return a < 0 ? t_apart < 0 : t_apart < 0 || a == b || a + b != 2 * t_apart + 1;
}

static const char *why(const colo_comm_t *c)
{
    return "says the test";
}

static bool find(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset)
{
    const t_told_t *t = &t_told[c->rank];
    *id = 0;
    *offset = 0;
    return t->is_registered ? t->is_registered(c->rank, p) : p == t->registered;
}

static uint64_t registrations(const colo_comm_t *c)
{
    return t_told[c->rank].registrations;
}

const colo_direct_memory_t t_peers = {.open = open_as_told,
                                      .reaches = reaches,
                                      .why = why,
                                      .find = find,
                                      .registrations = registrations,
                                      .create = t_launcher_create,
                                      .load = path_load,
                                      .run = t_launcher_run,
                                      .list = path_list,
                                      .drop = path_drop,
                                      .destroy = path_destroy};

/* ---- subconnections ---- */

colo_status_t t_sub_create(colo_comm_t *c, const int32_t *members, int32_t n, uint64_t tag,
                           colo_subconnection_t **s)
{
    *s = memory_of(sizeof **s);
    (*s)->n = n;
    memcpy((*s)->members, members, (size_t)n * sizeof *members);
    return COLO_OK;
}

void t_sub_destroy(colo_comm_t *c, colo_subconnection_t *s)
{
    free(s);
}

static size_t elements_of(const colo_message_t *m, int32_t n)
{
    size_t elements = 0;
    for (int32_t i = 0; i < n; i++)
        for (int32_t k = 0; k < m[i].nboxes; k++) {
            const int64_t *extent = m[i].boxes[k].extent;
            elements += (size_t)(extent[0] * extent[1] * extent[2]);
        }
    return elements;
}

size_t t_sub_stage(const colo_exchange_t *x)
{
    return (elements_of(x->send, x->nsends) + elements_of(x->recv, x->nrecvs)) *
           colo_dtype_size(x->op.dtype);
}

/* ---- a comm of GPUs ---- */

/* A part of a comm in disguise has its table, and a control comm of its own. */
static colo_status_t part_of(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                             colo_comm_t *child)
{
    COLO_TRY(colo_comm_threads_backend.subset(parent, members, n, tag, child));
    return colo_comm_child(parent->control, members, n, tag, "control", &child->control);
}

static void end_part(colo_comm_t *c)
{
    colo_comm_destroy(&c->control);
    colo_comm_threads_backend.destroy(c);
}

colo_status_t t_disguise(t_disguise_t *d, colo_comm_t *comm, const colo_direct_memory_t *peers)
{
    memset(shown[comm->rank], 0, sizeof shown[0]);
    *d = (t_disguise_t){.comm = comm, .was = comm->backend, .backend = *comm->backend};
    COLO_TRY(colo_comm_split_color(comm, 0, comm->rank, &d->control));
    d->backend.direct = peers;
    d->backend.subset = part_of;
    d->backend.destroy = end_part;
    comm->backend = &d->backend;
    comm->control = d->control;
    return COLO_OK;
}

void t_undisguise(t_disguise_t *d)
{
    if (!d->control)
        return;
    while (d->comm->part) { /* their table goes with @d */
        colo_comm_t *part = d->comm->part;
        d->comm->part = part->next_part;
        colo_comm_destroy(&part);
    }
    d->comm->backend = d->was;
    d->comm->control = NULL;
    colo_comm_destroy(&d->control);
}
