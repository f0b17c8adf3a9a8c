/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_p2p_routes.c - bridges of backends whose exchanges go over connections and compare
 * nothing: which calls are compared between ranks, which ranks connect, and when a reshape connects
 * anew.
 */
#include "p2p_stand.h"

#include "comm/threads/threads.h"
#include "harness/plan_world.h"

/* ---- routes that count how often ranks connect ---- */

static int connected[T_PEERS_RANKS], disconnected[T_PEERS_RANKS];

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

/* From now on; the next reshape finds whom it connects with. */
static void go_over_routes(struct stand *s)
{
    connected[s->on.comm->rank] = disconnected[s->on.comm->rank] = 0;
    s->as.ops.subconnection_create = connect;
    s->as.ops.subconnection_destroy = disconnect;
    s->as.ops.subconnection_stage = no_stage;
    s->as.ops.exchange = over_route;
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

T_CASE_ON_ALL(a_reshape_connects_only_if_it_ties_other_ranks)
{
    t_case_t c = T_BETWEEN("dp=4", "dp=3", 12, 8, 2, .grad = COLO_DISJOINT);
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_NCCL));
    go_over_routes(&s);
    return reshape_in_turn(&s, &c);
}

/* ---- which ranks connect ---- */

/* By rank: the lowest that messages tie it to, directly or through others. */
static int32_t lowest[T_PEERS_RANKS];

static void find_lowest(const t_plans_t *w)
{
    for (int32_t r = 0; r < w->n; r++)
        lowest[r] = r;
    for (int32_t i = 0; i < 2 * w->n * w->n; i++) { /* as often as the longest chain may need */
        const int32_t r = i / 2 % w->n;
        int32_t n;
        const colo_plan_message_t *m = colo_plan_sends(w->plan[r], (colo_pass_t)(i % 2), &n);
        for (int32_t k = 0; k < n; k++) {
            int32_t *one = &lowest[r], *other = &lowest[m[k].peer];
            *one = *other = *one < *other ? *one : *other;
        }
    }
}

static colo_status_t connect_all_that_are_tied(colo_comm_t *c, const int32_t *members, int32_t n,
                                               uint64_t tag, colo_subconnection_t **route)
{
    int32_t found = 0;
    for (int32_t r = 0; r < c->size; r++)
        if (lowest[r] == lowest[c->rank])
            rank_check(found < n && members[found++] == r);
    rank_check(found == n);
    return connect(c, members, n, tag, route);
}

static colo_status_t connect_rank(colo_comm_t *comm, void *arg)
{
    const t_case_t *c = arg;
    STAND(s);
    rank_try(stand_up(&s, comm, c, COLO_TRANSPORT_NCCL));
    go_over_routes(&s);
    s.as.ops.subconnection_create = connect_all_that_are_tied;
    rank_try(
        colo_bridge_reshape(s.on.bridge, &(colo_shape_t){c->shape.b, c->shape.n, c->shape.h, 0}));
    rank_try(expect(&s, COLO_FORWARD, false));
    rank_check(connected[comm->rank] == 1);
    return COLO_OK;
}

/* Of one more rank than is in the grids. */
T_CASE(ranks_connect_with_all_that_messages_tie_them_to_and_with_no_other)
{
    T_EACH_PAIR (p, 1, 8) {
        t_case_t c = t_pair_case(&p, 0, 0);
        c.world = (int32_t)p.n + 1;
        c.shape.b = 6; /* three parts on two: a chain */
        T_PLANS(w, &c);
        find_lowest(&w);
        if (colo_comm_threads_run(c.world, connect_rank, &c) < 0)
            fail_msg("%s: %s", t_case_text(&c), colo_last_error());
    }
}

T_MAIN("bridge/p2p_routes")
