/* SPDX-License-Identifier: Apache-2.0 */
/*
 * p2p_stand.h - a bridge that takes host memory for a device's, over a table of peers that says
 * what it is told: no GPU. Staged calls move host memory and are compared with the oracle;
 * peer-to-peer ones are counted. Included by one source of a program.
 */
#ifndef TESTS_BRIDGE_P2P_STAND_H
#define TESTS_BRIDGE_P2P_STAND_H

#include "harness/harness.h"

#include "bridge/run/over-peers.h"
#include "core/error.h"
#include "harness/bridge_case.h"

enum { RANKS = 4, SOON_MS = 4000 };

/* ---- peers, as told: each rank has its own part ---- */

struct colo_p2p {
    int32_t rank;
};

static struct told {
    colo_status_t open, create;
    const void *registered[2];
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
    if (st < 0)
        return colo_fail(st, "create says so to rank %d", (int)c->rank);
    *d = malloc(sizeof **d);
    (*d)->rank = c->rank;
    return COLO_OK;
}

static colo_status_t load(colo_p2p_t *d, const colo_transfers_t pass[2])
{
    return COLO_OK;
}

static colo_status_t run(colo_p2p_t *d, int pass, const colo_p2p_call_t *call, colo_stream_t stream)
{
    told[d->rank].runs[pass]++;
    return COLO_OK;
}

static void destroy(colo_p2p_t **d)
{
    free(*d);
    *d = NULL;
}

static bool find(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset)
{
    const struct told *t = &told[c->rank];
    *id = 0;
    *offset = 0;
    return p == t->registered[0] || p == t->registered[1];
}

static uint64_t registrations(const colo_comm_t *c)
{
    return told[c->rank].registrations;
}

static const colo_peer_ops_t peers = {.open = print_open,
                                      .reaches = reaches,
                                      .why = why,
                                      .create = print_create,
                                      .load = load,
                                      .run = run,
                                      .destroy = destroy,
                                      .find = find,
                                      .registrations = registrations};

/* ---- a bridge that takes host memory for a device's ---- */

struct stand {
    colo_comm_t *comm, *control;
    const colo_comm_ops_t *was;
    colo_comm_ops_t *ops; /* not in here: a check that fails returns, and comm is destroyed later */
    colo_bridge_t *b;
    const t_case_t *c;
    t_buffer_t t[4]; /* by role */
    struct told *told;
};

static colo_status_t stand_up(struct stand *s, colo_comm_t *comm, const t_case_t *c,
                              colo_transport_t transport)
{
    *s = (struct stand){.comm = comm, .was = comm->ops, .c = c, .told = &told[comm->rank]};
    rank_try(colo_comm_set_timeout(comm, SOON_MS));
    rank_try(colo_comm_set_check(comm, c->check ? c->check : 1));
    rank_try(t_case_bridge(&s->b, c, comm, COLO_HOST));
    rank_try(colo_comm_i_split_color(comm, COLO_CATEGORY_USER, 0, comm->rank, &s->control));
    static colo_comm_ops_t ops[RANKS];
    s->ops = &ops[comm->rank];
    *s->ops = *comm->ops;
    s->ops->peer = &peers;
    comm->ops = s->ops;
    comm->control = s->control;
    s->b->mem = COLO_CUDA;
    s->b->transport = transport;
    bool whole;
    return colo_over_peers.create(s->b, &whole);
}

static void lie_down(struct stand *s)
{
    for (int i = 0; i < 4; i++)
        t_buffer_free(&s->t[i]);
    if (s->b)
        s->b->mem = COLO_HOST;
    colo_bridge_destroy(&s->b);
    s->comm->ops = s->was;
    s->comm->control = NULL;
    colo_comm_destroy(&s->control);
}

static colo_status_t tensors(struct stand *s, int64_t salt)
{
    for (int role = 0; role < 4; role++) {
        const bool in = role == T_X || role == T_DY;
        t_buffer_free(&s->t[role]);
        rank_try(t_case_tensor(s->c, (t_role_t)role, s->comm->rank, salt, in, &s->t[role]));
        s->t[role].t.mem = COLO_CUDA;
    }
    return COLO_OK;
}

static colo_status_t go(struct stand *s, colo_pass_t pass)
{
    return pass == COLO_FORWARD ? colo_bridge_forward(s->b, &s->t[T_X].t, &s->t[T_Y].t, NULL)
                                : colo_bridge_backward(s->b, &s->t[T_DY].t, &s->t[T_DX].t, NULL);
}

/* A call is to be peer-to-peer, or staged: then its bytes are compared. */
static colo_status_t expect(struct stand *s, colo_pass_t pass, int64_t salt, bool p2p)
{
    const int before = s->told->runs[pass];
    rank_try(go(s, pass));
    rank_check(s->told->runs[pass] - before == p2p);
    if (p2p)
        return COLO_OK;
    const t_role_t out = pass == COLO_FORWARD ? T_Y : T_DX;
    s->t[out].t.mem = COLO_HOST;
    colo_status_t st = t_case_compare(s->c, out, s->comm->rank, salt, &s->t[out]);
    s->t[out].t.mem = COLO_CUDA;
    return st;
}

static colo_status_t on_all(colo_rank_fn fn, const void *arg)
{
    memset(told, 0, sizeof told);
    return colo_comm_threads_run(RANKS, fn, (void *)(uintptr_t)arg);
}

/* A case whose body runs on all ranks. */
#define T_CASE_ON_ALL(name) T_CASE_BY(on_all(t_ranks_of_##name, NULL), name, colo_comm_t *comm)

#endif
