/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peers.c - a comm of "GPUs" on threads: a table of peers that records what it is given to move,
 * and moves it on the host; and subconnections, which move as the comm does.
 *
 * A rank that peers reach shows them its tensors and waits until they are done; a rank that reaches
 * waits until they are shown. Each has a deadline.
 */
#include "record.h"

#include "comm/comm.h"
#include "comm/peer.h"
#include "core/error.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WAIT_S = 20 };

struct colo_p2p_list {
    colo_transfers_t pass[2]; /* with copies of the lists */
};

struct colo_p2p {
    colo_comm_t *comm;
    colo_p2p_list_t own;
};

struct colo_subconnection {
    int32_t n, member[GUARD_RANKS];
};

/* ---- which ranks reach each other ---- */

static reach_t reach;
static uint64_t reach_seed;

void peers_init(reach_t r, uint64_t seed)
{
    reach = r;
    reach_seed = seed;
}

static bool pair_reaches(int32_t a, int32_t b)
{
    const uint64_t low = (uint64_t)(a < b ? a : b), high = (uint64_t)(a < b ? b : a);
    switch (reach) {
    case REACH_GROUPS:
        return a / 3 == b / 3;
    case REACH_SOME:
        return a == b || ((reach_seed >> 8 ^ low * 7 ^ high * 13) * 2654435761u >> 20) % 4 > 0;
    case REACH_NONE:
        return a == b;
    default:
        return true;
    }
}

static bool reaches(const colo_comm_t *c, int32_t a, int32_t b)
{
    if (a >= 0)
        return pair_reaches(a, b);
    for (a = 0; a < c->size; a++)
        for (b = 0; b < a; b++)
            if (!pair_reaches(a, b))
                return false;
    return true;
}

static colo_status_t open_peers(colo_comm_t *c)
{
    for (int32_t a = 0; a < c->size; a++)
        for (int32_t b = 0; b < a; b++)
            if (pair_reaches(a, b))
                return COLO_OK;
    return colo_fail(COLO_ERR_UNBUILT, "no two ranks reach each other");
}

static const char *why(const colo_comm_t *c)
{
    return "says the recorder";
}

/* ---- memory: each registered tensor has offset 0 ---- */

static bool find(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset)
{
    const int64_t at = memory_registered(p, bytes);
    *id = at < 0 ? -1 : 0;
    *offset = at < 0 ? 0 : (uint64_t)at;
    return at >= 0;
}

static uint64_t registrations(const colo_comm_t *c)
{
    return 1;
}

static colo_status_t no_share(colo_comm_t *c, colo_memory_t *m)
{
    return colo_fail(COLO_ERR_UNBUILT, "the recorder registers by itself");
}

static void no_longer_share(colo_memory_t *m)
{
}

/* ---- lists ---- */

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes + 1);
    if (!to)
        abort();
    if (bytes)
        memcpy(to, from, bytes);
    return to;
}

static void keep(colo_p2p_list_t *l, const colo_transfers_t pass[2])
{
    for (int i = 0; i < 2; i++) {
        colo_transfers_t *t = &l->pass[i];
        *t = pass[i];
        t->step = copy_of(t->step, (size_t)t->nsteps * sizeof *t->step);
        t->addend = copy_of(t->addend, (size_t)t->nsteps * (size_t)t->addends * sizeof *t->addend);
        t->exposed = copy_of(t->exposed, (size_t)t->nexposed * sizeof *t->exposed);
    }
}

static void drop_lists(colo_p2p_list_t *l)
{
    for (int i = 0; i < 2; i++) {
        free((void *)(uintptr_t)l->pass[i].step);
        free((void *)(uintptr_t)l->pass[i].addend);
        free((void *)(uintptr_t)l->pass[i].exposed);
    }
}

static colo_status_t create(colo_comm_t *c, const colo_transfers_t pass[2], colo_p2p_t **d)
{
    *d = malloc(sizeof **d);
    if (!*d)
        abort();
    (*d)->comm = c;
    keep(&(*d)->own, pass);
    return COLO_OK;
}

static colo_status_t load(colo_p2p_t *d, const colo_transfers_t pass[2])
{
    drop_lists(&d->own);
    keep(&d->own, pass);
    return COLO_OK;
}

static void destroy(colo_p2p_t **d)
{
    drop_lists(&(*d)->own);
    free(*d);
    *d = NULL;
}

static colo_status_t list(colo_p2p_t *d, const colo_transfers_t pass[2], colo_p2p_list_t **l)
{
    *l = malloc(sizeof **l);
    if (!*l)
        abort();
    keep(*l, pass);
    return COLO_OK;
}

static void drop(colo_p2p_t *d, colo_p2p_list_t **l)
{
    drop_lists(*l);
    free(*l);
    *l = NULL;
}

/* ---- the record of a call ---- */

static void say_list(const colo_transfers_t *t, const colo_p2p_call_t *call)
{
    say(TRANSFERS, "%s: %d steps of %d bytes, pulls %d, %d addends, %d blocks, %d tensors", t->name,
        t->nsteps, (int64_t)t->elem, (int64_t)t->pulls, (int64_t)t->addends, (int64_t)t->blocks,
        (int64_t)call->n);
    bag_begin(TRANSFERS);
    for (int32_t i = 0; i < t->nexposed; i++)
        say(TRANSFERS, "  rank %d reaches this one", (int64_t)t->exposed[i]);
    bag_end(TRANSFERS);
    for (int32_t k = 0; k < call->n; k++) {
        const colo_p2p_tensor_t *x = &call->tensor[k];
        say(TRANSFERS, "  %s, %d a feature: in %p by %d %d %d, out %p by %d %d %d, memory %d+%d",
            colo_dtype_name(x->dtype), x->per, x->in, x->in_step[0], x->in_step[1], x->in_step[2],
            x->out, x->out_step[0], x->out_step[1], x->out_step[2], (int64_t)x->id,
            (int64_t)x->offset);
    }
    bag_begin(TRANSFERS);
    for (int64_t i = 0; i < t->nsteps; i++) {
        const colo_transfer_t *s = &t->step[i];
        char addends[2048] = "";
        for (int32_t l = 0, n = 0; l < t->addends && n < 2000; l++) {
            const colo_addend_t *a = &t->addend[i * t->addends + l];
            n += snprintf(addends + n, sizeof addends - (size_t)n, " + %lld at %lld %lld %lld",
                          (long long)a->peer, (long long)a->begin[0], (long long)a->begin[1],
                          (long long)a->begin[2]);
        }
        if (t->addends)
            say(TRANSFERS, "  [%d %d %d] to %d %d %d =%s", s->extent[0], s->extent[1], s->extent[2],
                s->there[0], s->there[1], s->there[2], addends);
        else
            say(TRANSFERS, "  [%d %d %d] from %d %d %d, peer %d, to %d %d %d", s->extent[0],
                s->extent[1], s->extent[2], s->here[0], s->here[1], s->here[2], s->peer,
                s->there[0], s->there[1], s->there[2]);
    }
    bag_end(TRANSFERS);
}

/* ---- movement ---- */

/* [shows][reaches]: the tensors of a call, until all that reach them are done. */
static const colo_p2p_call_t *shown[GUARD_RANKS][GUARD_RANKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Under the lock: until rank @shows shows @reader its tensors (@there), or no longer does. */
static colo_status_t wait_for(int32_t shows, int32_t reader, bool there)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += WAIT_S;
    while ((shown[shows][reader] != NULL) != there)
        if (pthread_cond_timedwait(&changed, &lock, &end) == ETIMEDOUT)
            return colo_fail(COLO_ERR_TIMEOUT, "recorder: rank %d %s rank %d", (int)shows,
                             there ? "shows nothing to" : "is not yet read by", (int)reader);
    return COLO_OK;
}

static void show(int32_t shows, int32_t reader, const colo_p2p_call_t *call)
{
    pthread_mutex_lock(&lock);
    shown[shows][reader] = call;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static colo_box_t box_of(const colo_p2p_tensor_t *t, bool in, const int64_t begin[3],
                         const int64_t extent[3])
{
    const int64_t *step = in ? t->in_step : t->out_step;
    colo_box_t box = {.data = (in ? t->in : t->out) + begin[0] * step[0] + begin[1] * step[1] +
                              begin[2] * t->per * step[2]};
    for (int i = 0; i < 3; i++) {
        box.extent[i] = extent[i] * (i == 2 ? t->per : 1);
        box.stride[i] = step[i] / (int64_t)t->elem;
    }
    return box;
}

/* Tensor @k of @peer (-1: of this rank). */
static const colo_p2p_tensor_t *tensor_of(const colo_p2p_call_t *call, int32_t rank, int64_t peer,
                                          int32_t k)
{
    return peer < 0 ? &call->tensor[k] : &shown[peer][rank]->tensor[k];
}

static colo_status_t move(const colo_transfers_t *t, int64_t i, const colo_p2p_call_t *call,
                          int32_t rank, int32_t k, const colo_ops_t *ops)
{
    const colo_transfer_t *s = &t->step[i];
    const colo_p2p_tensor_t *own = &call->tensor[k];
    if (t->addends) {
        colo_box_t from[COLO_MAX_ADDENDS], to = box_of(own, false, s->there, s->extent);
        for (int32_t l = 0; l < t->addends; l++) {
            const colo_addend_t *a = &t->addend[i * t->addends + l];
            from[l] = box_of(tensor_of(call, rank, a->peer, k), true, a->begin, s->extent);
        }
        return ops->box_sum(&to, from, t->addends, own->dtype, NULL);
    }
    const colo_p2p_tensor_t *other = tensor_of(call, rank, s->peer, k);
    const colo_box_t from = box_of(t->pulls ? other : own, true, s->here, s->extent),
                     to = box_of(t->pulls ? own : other, false, s->there, s->extent);
    return ops->box_copy(&to, &from, own->elem, NULL);
}

/* Which ranks this one reaches. */
static void find_peers(const colo_transfers_t *t, bool peer[GUARD_RANKS])
{
    for (int64_t i = 0; i < t->nsteps; i++) {
        if (!t->addends && t->step[i].peer >= 0)
            peer[t->step[i].peer] = true;
        for (int32_t l = 0; l < t->addends; l++)
            if (t->addend[i * t->addends + l].peer >= 0)
                peer[t->addend[i * t->addends + l].peer] = true;
    }
}

static colo_status_t run(colo_p2p_t *d, int pass, const colo_p2p_call_t *call, colo_stream_t stream)
{
    const colo_transfers_t *t = &(call->list ? call->list : &d->own)->pass[pass];
    const int32_t rank = d->comm->rank;
    bool peer[GUARD_RANKS] = {false};
    colo_status_t st = COLO_OK;
    const colo_ops_t *ops;
    say_list(t, call);
    find_peers(t, peer);
    COLO_TRY(colo_ops_for(COLO_HOST, &ops));
    for (int32_t i = 0; i < t->nexposed; i++)
        show(rank, t->exposed[i], call);
    pthread_mutex_lock(&lock);
    for (int32_t r = 0; r < GUARD_RANKS && st == COLO_OK; r++)
        if (peer[r])
            st = wait_for(r, rank, true);
    pthread_mutex_unlock(&lock);
    log_of_rank(-1); /* what a peer moves is recorded as transfers, not as boxes */
    for (int32_t k = 0; k < call->n && st == COLO_OK; k++)
        for (int64_t i = 0; i < t->nsteps && st == COLO_OK; i++)
            st = move(t, i, call, rank, k, ops);
    log_of_rank(rank);
    for (int32_t r = 0; r < GUARD_RANKS; r++)
        if (peer[r])
            show(r, rank, NULL);
    pthread_mutex_lock(&lock);
    for (int32_t i = 0; i < t->nexposed && st == COLO_OK; i++)
        st = wait_for(rank, t->exposed[i], false);
    pthread_mutex_unlock(&lock);
    return st;
}

static const colo_peer_ops_t peers = {.open = open_peers,
                                      .reaches = reaches,
                                      .why = why,
                                      .share = no_share,
                                      .unshare = no_longer_share,
                                      .find = find,
                                      .registrations = registrations,
                                      .create = create,
                                      .load = load,
                                      .run = run,
                                      .list = list,
                                      .drop = drop,
                                      .destroy = destroy};

/* ---- subconnections ---- */

static colo_status_t sub_create(colo_comm_t *c, const int32_t *members, int32_t n, uint64_t tag,
                                colo_subconnection_t **s)
{
    *s = malloc(sizeof **s);
    if (!*s)
        abort();
    (*s)->n = n;
    memcpy((*s)->member, members, (size_t)n * sizeof *members);
    for (int32_t i = 0; i < n; i++)
        say(EXCHANGES, "member %d", (int64_t)members[i]);
    return COLO_OK;
}

static void sub_destroy(colo_comm_t *c, colo_subconnection_t *s)
{
    free(s);
}

/* ---- a comm of GPUs ---- */

static const colo_comm_ops_t *was[GUARD_RANKS];
static colo_comm_ops_t now[GUARD_RANKS];
static colo_comm_t *control[GUARD_RANKS];

colo_status_t peers_join(colo_comm_t *comm)
{
    const int32_t r = comm->rank;
    memset(shown[r], 0, sizeof shown[r]);
    COLO_TRY(colo_comm_split_color(comm, 0, r, &control[r]));
    was[r] = comm->ops;
    now[r] = *comm->ops;
    now[r].peer = &peers;
    now[r].subconnection_create = sub_create;
    now[r].subconnection_destroy = sub_destroy;
    guard_subconnections(&now[r]);
    comm->ops = &now[r];
    comm->control = control[r];
    return COLO_OK;
}

void peers_leave(colo_comm_t *comm)
{
    const int32_t r = comm->rank;
    if (!comm->control)
        return;
    comm->ops = was[r];
    comm->control = NULL;
    colo_comm_destroy(&control[r]);
}
