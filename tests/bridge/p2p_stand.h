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

/* ---- a bridge that takes host memory for a device's ---- */

struct stand {
    t_stand_t on;
    t_disguise_t as;
    t_told_t *told; /* what its peers say */
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
    s->told = &t_told[comm->rank];
    rank_try(colo_comm_set_timeout(comm, SOON_MS));
    rank_try(colo_comm_set_check(comm, 1));
    rank_try(t_stand_make(&s->on, c, comm));
    rank_try(t_disguise(&s->as, comm, &t_peers));
    s->on.bridge->mem = COLO_CUDA;
    s->on.bridge->transport = transport;
    rank_try(tensors(s, 0));
    return colo_over_peers.create(s->on.bridge, &whole);
}

/* A call is to be peer-to-peer, or staged. */
static colo_status_t expect(struct stand *s, colo_pass_t pass, bool p2p)
{
    const int64_t before = s->told->runs[pass];
    const t_role_t out = pass == COLO_FORWARD ? T_Y : T_DX;
    rank_try(t_stand_call(&s->on, pass));
    rank_check(s->told->runs[pass] - before == p2p);
    return t_stand_compare(&s->on, out);
}

static colo_status_t on_all(colo_rank_fn fn, const void *arg)
{
    memset(t_told, 0, sizeof t_told);
    return colo_comm_threads_run(RANKS, fn, (void *)(uintptr_t)arg);
}

/* A case whose body runs on all ranks; once for each of the values, as @var of @type. */
#define T_CASE_ON_ALL(name) T_CASE_BY(on_all(t_ranks_of_##name, NULL), name, colo_comm_t *comm)
#define T_CASE_ON_ALL_FOR(name, type, var, ...) \
    T_CASE_FOR_BY(on_all(t_ranks_of_##name, t_one_), name, type, var, comm, __VA_ARGS__)

#endif
