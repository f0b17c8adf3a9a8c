/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peers.c - a comm of "GPUs" on threads: a table of peers that records what it is given to move
 * (harness/host_peers.h moves it); and subconnections, which move as the comm does.
 */
#include "record.h"

#include "core/error.h"
#include "harness/host_peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- which ranks reach each other ---- */

static reach_t reach;
static uint64_t reach_seed;

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

/* ---- memory: each registered tensor has offset 0 ---- */

static bool find(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset)
{
    const int64_t at = memory_registered(p, bytes);
    *id = at < 0 ? -1 : 0;
    *offset = at < 0 ? 0 : (uint64_t)at;
    return at >= 0;
}

static colo_status_t no_share(colo_comm_t *c, colo_memory_t *m)
{
    return colo_fail(COLO_ERR_UNBUILT, "the recorder registers by itself");
}

static void no_longer_share(colo_memory_t *m)
{
}

/* ---- the record of a call ---- */

static void say_list(const colo_transfers_t *t, const colo_direct_call_t *call)
{
    say(TRANSFERS, "%s: %ld steps of %zu bytes, pulls %d, %d addends, %d blocks, %d tensors",
        t->name, t->ntransfers, t->elem, t->pulls, t->addends, t->blocks, call->n);
    bag_begin(TRANSFERS);
    for (int32_t i = 0; i < t->nexposed; i++)
        say(TRANSFERS, "  rank %d reaches this one", t->exposed[i]);
    bag_end(TRANSFERS);
    for (int32_t k = 0; k < call->n; k++) {
        const colo_direct_tensor_t *x = &call->tensor[k];
        say(TRANSFERS,
            "  %s, %ld a feature: in %s by %ld %ld %ld, out %s by %ld %ld %ld, memory %d+%lu",
            colo_dtype_name(x->dtype), x->per, place_name(x->in).text, x->in_stride[0],
            x->in_stride[1], x->in_stride[2], place_name(x->out).text, x->out_stride[0],
            x->out_stride[1], x->out_stride[2], x->id, x->offset);
    }
    bag_begin(TRANSFERS);
    for (int64_t i = 0; i < t->ntransfers; i++) {
        const colo_transfer_t *s = &t->transfer[i];
        char addends[2048] = "";
        for (int32_t l = 0, n = 0; l < t->addends && n < 2000; l++) {
            const colo_addend_t *a = &t->addend[i * t->addends + l];
            n += snprintf(addends + n, sizeof addends - (size_t)n, " + %lld at %lld %lld %lld",
                          (long long)a->peer, (long long)a->begin[0], (long long)a->begin[1],
                          (long long)a->begin[2]);
        }
        if (t->addends)
            say(TRANSFERS, "  [%ld %ld %ld] to %ld %ld %ld =%s", s->extent[0], s->extent[1],
                s->extent[2], s->there[0], s->there[1], s->there[2], addends);
        else
            say(TRANSFERS, "  [%ld %ld %ld] from %ld %ld %ld, peer %ld, to %ld %ld %ld",
                s->extent[0], s->extent[1], s->extent[2], s->here[0], s->here[1], s->here[2],
                s->peer, s->there[0], s->there[1], s->there[2]);
    }
    bag_end(TRANSFERS);
}

static colo_status_t run(colo_direct_launcher_t *d, int pass, const colo_direct_call_t *call,
                         colo_stream_t stream)
{
    const colo_transfers_t *transfers = t_launcher_transfers(d, pass, call);
    if (transfers->ntransfers + transfers->nexposed > 0) /* else nothing is launched */
        say_list(transfers, call);
    log_of_rank(-1); /* what a peer moves is recorded as transfers, not as boxes */
    const colo_status_t st = t_launcher_run(d, pass, call, stream);
    log_of_rank(t_launcher_rank(d));
    return st;
}

static colo_direct_memory_t peers; /* the harness's, but for what is said here */

void peers_init(reach_t r, uint64_t seed)
{
    reach = r;
    reach_seed = seed;
    peers = t_peers;
    peers.open = open_peers;
    peers.reaches = reaches;
    peers.share = no_share;
    peers.unshare = no_longer_share;
    peers.find = find;
    peers.run = run;
}

/* ---- subconnections ---- */

static colo_status_t sub_create(colo_comm_t *c, const int32_t *members, int32_t n, uint64_t tag,
                                colo_subconnection_t **s)
{
    for (int32_t i = 0; i < n; i++)
        say(EXCHANGES, "member %d", members[i]);
    return t_sub_create(c, members, n, tag, s);
}

/* ---- a comm of GPUs ---- */

static t_disguise_t disguise[GUARD_RANKS];

colo_status_t peers_join(colo_comm_t *comm)
{
    t_disguise_t *d = &disguise[comm->rank];
    COLO_TRY(t_disguise(d, comm, &peers));
    t_told[comm->rank].registrations = 1;
    d->backend.subconnection_create = sub_create;
    d->backend.subconnection_destroy = t_sub_destroy;
    guard_subconnections(&d->backend);
    return COLO_OK;
}

void peers_leave(colo_comm_t *comm)
{
    t_undisguise(&disguise[comm->rank]);
}
