/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_p2p_routes.c - bridges of backends whose exchanges go over connections and compare
 * nothing: which calls are compared between ranks, and when a reshape connects anew.
 */
#include "p2p_stand.h"

#include "comm/threads/threads.h"

/* ---- routes that count how often ranks connect ---- */

static int connected[RANKS], disconnected[RANKS];

static colo_status_t connect(colo_comm_t *c, const int32_t *members, int32_t n, uint64_t tag,
                             colo_subconnection_t **route)
{
    connected[c->rank]++;
    return t_sub_create(c, members, n, tag, route);
}

static void disconnect(colo_comm_t *c, colo_subconnection_t *route)
{
    t_sub_destroy(c, route);
    disconnected[c->rank]++;
}

static size_t no_stage(const colo_exchange_t *x)
{
    return 0;
}

static bool is_on(const colo_subconnection_t *route, const colo_message_t *m, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        bool found = false;
        for (int32_t k = 0; k < route->n; k++)
            found = found || route->members[k] == m[i].peer;
        if (!found)
            return false;
    }
    return true;
}

static colo_status_t over_route(colo_comm_t *c, const colo_exchange_t *x, colo_stream_t stream)
{
    const colo_subconnection_t *route = x->subconnection;
    rank_check(route && is_on(route, x->send, x->nsends) && is_on(route, x->recv, x->nrecvs));
    return colo_comm_threads_ops.exchange(c, x, stream);
}

/* ---- calls: backends whose exchanges compare nothing ---- */

static uint64_t checks_of(const colo_comm_t *comm)
{
    colo_comm_stats_t l;
    colo_comm_stats(comm, &l);
    return l.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_CHECK];
}

/* Rank 1 runs backward, the others forward, as the first call of a shape; then all do the same. */
static colo_status_t call_in_turn(struct stand *s)
{
    const colo_shape_t shape = {4, 8, 2, 0};
    const int32_t rank = s->on.comm->rank;
    rank_try(colo_bridge_reshape(s->on.bridge, &shape));
    rank_try(tensors(s, 0));
    rank_fails(t_stand_call(&s->on, rank == 1 ? COLO_BACKWARD : COLO_FORWARD), COLO_ERR_MISMATCH,
               "operation: rank 1 of 'world' has bridge 1 backward, rank "
               "0 bridge 1 forward");
    for (int rep = 0; rep < 2; rep++)
        for (int pass = 0; pass < 2; pass++) {
            const uint64_t before = checks_of(s->on.comm);
            rank_try(expect(s, (colo_pass_t)pass, false));
            rank_check(checks_of(s->on.comm) - before == (rep == 0));
        }
    return COLO_OK;
}

T_CASE_ON_ALL(first_calls_of_a_shape_are_compared_way_by_way)
{
    const t_case_t c = T_BETWEEN("dp=4", "cp=2,dp=2", 4, 8, 2, .grad = COLO_DISJOINT);
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_NCCL));
    return call_in_turn(&s);
}

/* Of dp=4 to dp=3: 12 samples tie all ranks together, 2 only ranks 2 and 3. */
static colo_status_t reshape_in_turn(struct stand *s, t_case_t *c)
{
    static const int64_t samples[] = {12, 12, 24, 2, 2, 12};
    static const int times[] = {1, 1, 1, 2, 2, 3};
    const int32_t rank = s->on.comm->rank;
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) {
        const colo_shape_t shape = {samples[i], 8, 2, 0};
        c->shape.b = samples[i];
        rank_try(colo_bridge_reshape(s->on.bridge, &shape));
        rank_try(tensors(s, (int64_t)i));
        for (int pass = 0; pass < 2; pass++)
            rank_try(expect(s, (colo_pass_t)pass, false));
        rank_check(connected[rank] == times[i]);
        rank_check(disconnected[rank] == times[i] - 1);
    }
    return COLO_OK;
}

static colo_status_t reshaped_routes(colo_comm_t *comm, void *arg)
{
    t_case_t c = T_BETWEEN("dp=4", "dp=3", 12, 8, 2, .grad = COLO_DISJOINT);
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_NCCL));
    s.as.ops.subconnection_create = connect;
    s.as.ops.subconnection_destroy = disconnect;
    s.as.ops.subconnection_stage = no_stage;
    s.as.ops.exchange = over_route;
    return reshape_in_turn(&s, &c);
}

T_CASE(a_reshape_connects_only_if_it_ties_other_ranks)
{
    memset(connected, 0, sizeof connected);
    memset(disconnected, 0, sizeof disconnected);
    assert_ok(on_all(reshaped_routes, NULL));
}

T_MAIN("bridge/p2p_routes")
