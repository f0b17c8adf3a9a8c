/* SPDX-License-Identifier: Apache-2.0 */
/*
 * p2p_stand.h - a bridge that takes host memory for a device's, over a table of peers that says
 * what it is told: no GPU. Calls move host memory and are compared with the oracle, and those that
 * are peer-to-peer are counted. Included by one source of a program.
 */
#ifndef TESTS_BRIDGE_P2P_STAND_H
#define TESTS_BRIDGE_P2P_STAND_H

#include "harness/harness.h"

#include "bridge/run/run.h"
#include "core/error.h"
#include "harness/bridge_case.h"
#include "harness/host_peers.h"

enum { RANKS = 4, SOON_MS = 4000 };

/* ---- peers, as told: each rank has its own part ---- */

static struct told {
    colo_status_t open, create;
    const void *registered;
    uint64_t registrations;
    int runs[2]; /* p2p calls by way */
} told[RANKS];

static int32_t apart = -1; /* it and the next rank do not reach each other */

static bool reaches(const colo_comm_t *c, int32_t a, int32_t b)
{
    (void)c;
    return a < 0 ? apart < 0 : apart < 0 || a == b || a + b != 2 * apart + 1;
}

static const char *why(const colo_comm_t *c)
{
    (void)c;
    return "says the test";
}

static colo_status_t print_open(colo_comm_t *c)
{
    const colo_status_t st = told[c->rank].open;
    return st < 0 ? colo_fail(st, "open says so to rank %d", (int)c->rank) : st;
}

static colo_status_t print_create(colo_comm_t *c, const colo_transfers_t pass[2], colo_p2p_t **d)
{
    const colo_status_t st = told[c->rank].create;
    return st < 0 ? colo_fail(st, "create says so to rank %d", (int)c->rank)
                  : t_path_create(c, pass, d);
}

static colo_status_t run(colo_p2p_t *d, int pass, const colo_p2p_call_t *call, colo_stream_t stream)
{
    told[t_path_rank(d)].runs[pass]++;
    return t_path_run(d, pass, call, stream);
}

static bool find(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset)
{
    const struct told *t = &told[c->rank];
    *id = 0;
    *offset = 0;
    return p == t->registered;
}

static uint64_t registrations(const colo_comm_t *c)
{
    return told[c->rank].registrations;
}

static const colo_peer_ops_t peers = {.open = print_open,
                                      .reaches = reaches,
                                      .why = why,
                                      .run = run,
                                      .find = find,
                                      .registrations = registrations,
                                      T_HOST_PEERS(print_create)};

/* ---- a bridge that takes host memory for a device's ---- */

struct stand {
    t_stand_t on;
    t_disguise_t as;
    struct told *told;
};
#define STAND(name) T_ENDS(lie_down) struct stand name = {.told = NULL}

static void lie_down(struct stand *s)
{
    if (s->on.bridge)
        s->on.bridge->mem = COLO_HOST;
    t_stand_end(&s->on);
    t_undisguise(&s->as);
}

static colo_status_t tensors(struct stand *s, int64_t salt)
{
    rank_try(t_stand_fill(&s->on, salt));
    for (int role = 0; role < 4; role++)
        s->on.t[role].t.mem = COLO_CUDA;
    return COLO_OK;
}

static colo_status_t stand_up(struct stand *s, colo_comm_t *comm, const t_case_t *c,
                              colo_transport_t transport)
{
    bool whole;
    s->told = &told[comm->rank];
    rank_try(colo_comm_set_timeout(comm, SOON_MS));
    rank_try(colo_comm_set_check(comm, 1));
    rank_try(t_stand_make(&s->on, c, comm));
    rank_try(t_disguise(&s->as, comm, &peers));
    s->on.bridge->mem = COLO_CUDA;
    s->on.bridge->transport = transport;
    rank_try(tensors(s, 0));
    return colo_over_peers.create(s->on.bridge, &whole);
}

/* A call is to be peer-to-peer, or staged. */
static colo_status_t expect(struct stand *s, colo_pass_t pass, bool p2p)
{
    const int before = s->told->runs[pass];
    const t_role_t out = pass == COLO_FORWARD ? T_Y : T_DX;
    rank_try(t_stand_call(&s->on, pass));
    rank_check(s->told->runs[pass] - before == p2p);
    return t_stand_compare(&s->on, out);
}

static colo_status_t on_all(colo_rank_fn fn, const void *arg)
{
    memset(told, 0, sizeof told);
    return colo_comm_threads_run(RANKS, fn, (void *)(uintptr_t)arg);
}

/* A case whose body runs on all ranks. */
#define T_CASE_ON_ALL(name) T_CASE_BY(on_all(t_ranks_of_##name, NULL), name, colo_comm_t *comm)

#endif
