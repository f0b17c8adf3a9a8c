/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct.c - which calls take the direct path, and what create does without one, over a
 * table of peers that says what it is told: no GPU. And bridges of backends whose exchanges go over
 * connections and compare nothing: which calls are compared between ranks, which ranks connect, and
 * when a reshape connects anew. What direct memory itself does is tests/gpu/test_direct*.c's.
 */
#include "harness/harness.h"

#include "bridge/run/run.h"
#include "comm/threads/threads.h"
#include "core/error.h"
#include "harness/bridge_case.h"
#include "harness/host_peers.h"
#include "harness/plan_world.h"

enum { RANKS = 4, SOON_MS = 4000 };

/* ---- a bridge that takes host memory for a device's ---- */

/* Calls move host memory and are compared with the oracle; peer-to-peer ones are counted. */
struct stand {
    t_stand_t on;
    t_disguise_t as;
    t_told_t *told; /* what its peers say */
};
#define STAND(name) T_ENDS(lie_down) struct stand name = {.told = NULL}

static void lie_down(struct stand *s)
{
    if (s->on.bridge)
        s->on.bridge->mem = COLO_MEM_HOST;
    t_stand_end(&s->on);
    t_undisguise(&s->as);
}

static colo_status_t tensors(struct stand *s, int64_t salt)
{
    rank_try(t_stand_fill(&s->on, salt));
    for (int role = 0; role < 4; role++)
        s->on.t[role].t.mem = COLO_MEM_CUDA;
    return COLO_OK;
}

static colo_status_t stand_up(struct stand *s, colo_comm_t *comm, const t_case_t *c,
                              colo_transport_t transport)
{
    s->told = &t_told[comm->rank];
    rank_try(colo_comm_set_timeout(comm, SOON_MS));
    rank_try(colo_comm_set_check(comm, 1));
    rank_try(t_stand_make(&s->on, c, comm));
    rank_try(t_disguise(&s->as, comm, &t_peers));
    s->on.bridge->mem = COLO_MEM_CUDA;
    s->on.bridge->transport = transport;
    rank_try(tensors(s, 0));
    return colo_direct_create(s->on.bridge);
}

/* A call is to be peer-to-peer, or staged. */
static colo_status_t expect(struct stand *s, colo_pass_t pass, bool direct)
{
    const int64_t before = s->told->runs[pass];
    const t_role_t out = pass == COLO_PASS_FORWARD ? T_Y : T_DX;
    rank_try(t_stand_call(&s->on, pass));
    rank_check(s->told->runs[pass] - before == direct);
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

/* From now on @role alone is registered. */
static void registered(struct stand *s, t_role_t role)
{
    s->told->registered = s->on.t[role].t.data;
    s->told->registrations = 1;
}

/* ---- create ---- */

/* What rank 1 is told at create, what it says then, and the words; none: peer-to-peer. */
struct creating {
    colo_transport_t transport;
    colo_status_t open, create, status;
    const char *words;
};

/* The others are told that too, or that a peer failed. */
static colo_status_t theirs(colo_status_t st, int32_t rank)
{
    return rank == 1 || st == COLO_OK || st == COLO_ERR_UNBUILT ? st : COLO_ERR_PEER;
}

/* Going wrong at either is returned. */
#define AT_EITHER(st)                                          \
    {COLO_TRANSPORT_AUTO, st, COLO_OK, st, "open says so"},    \
    {                                                          \
        COLO_TRANSPORT_AUTO, COLO_OK, st, st, "create says so" \
    }

T_CASE_ON_ALL_FOR(ranks_out_of_reach_stage_and_what_else_goes_wrong_at_create_is_returned,
                  struct creating, k, {COLO_TRANSPORT_AUTO, COLO_OK, COLO_OK, COLO_OK, NULL},
                  {COLO_TRANSPORT_AUTO, COLO_ERR_UNBUILT, COLO_OK, COLO_OK, "stages"},
                  {COLO_TRANSPORT_AUTO, COLO_OK, COLO_ERR_UNBUILT, COLO_OK, "stages"},
                  {COLO_TRANSPORT_PEER, COLO_ERR_UNBUILT, COLO_OK, COLO_ERR_UNBUILT,
                   "bridge: transport peer: open says so"},
                  AT_EITHER(COLO_ERR_CUDA), AT_EITHER(COLO_ERR_NOMEM), AT_EITHER(COLO_ERR_ARG),
                  AT_EITHER(COLO_ERR_TIMEOUT), AT_EITHER(COLO_ERR_ABORTED))
{
    const t_case_t c = t_between("dp=4", "tp=2,dp=2", 8, 3, 2);
    STAND(s);
    t_told[comm->rank].open = theirs(k.open, comm->rank);
    t_told[comm->rank].create = theirs(k.create, comm->rank);
    const colo_status_t st = stand_up(&s, comm, &c, k.transport);
    rank_check((s.on.bridge && s.on.bridge->direct.launcher) == !k.words);
    if (k.status == COLO_OK) {
        rank_try(st);
        return expect(&s, COLO_PASS_FORWARD, false);
    }
    rank_fails(st, theirs(k.status, comm->rank), k.words);
    return COLO_OK;
}

/* The plan ties ranks 0 and 1, and 2 and 3, of which the latter are out of reach. */
static colo_status_t one_pair(colo_comm_t *comm, void *arg)
{
    const colo_transport_t transport = *(const colo_transport_t *)arg;
    const t_case_t c = t_between("dp=4", "tp=2,dp=2", 8, 3, 2);
    STAND(s);
    const colo_status_t st = stand_up(&s, comm, &c, transport);
    const bool far = comm->rank >= 2;
    if (transport == COLO_TRANSPORT_PEER) {
        rank_check(st == COLO_ERR_UNBUILT && !s.on.bridge->direct.launcher);
        rank_check(says(far ? "ranks 2 and 3, which exchange, do not reach each other's memory; "
                              "says the test"
                            : "rank 2 (world rank 2) exchanges with a rank that it does not"));
    } else {
        rank_try(st);
        rank_check(s.on.bridge->now.direct.needs_comm == far);
        registered(&s, T_Y);
        rank_try(expect(&s, COLO_PASS_FORWARD, !far));
    }
    return COLO_OK;
}

T_CASE(ranks_out_of_reach_stage_and_others_do_not)
{
    t_apart = 2;
    for (int k = 0; k < 2; k++) {
        const colo_transport_t transport = k ? COLO_TRANSPORT_PEER : COLO_TRANSPORT_AUTO;
        const colo_status_t st = on_all(one_pair, &transport);
        if (st < 0)
            t_apart = -1;
        assert_ok(st);
    }
    t_apart = -1;
}

static colo_status_t blocks(colo_comm_t *comm, void *arg)
{
    const t_case_t c = t_between("dp=4", "tp=2,dp=2", 8, 3, 2);
    const int32_t expected = *(const int32_t *)arg;
    static const int32_t given[] = {0, 5, -1, COLO_PEER_BLOCKS_MAX + 1};
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) {
        colo_layout_t src, dst;
        colo_bridge_config_t config;
        T_ENDS(colo_bridge_destroy) colo_bridge_t *b = NULL;
        rank_try(t_case_config(&c, &src, &dst, &config));
        config.peer_blocks = given[i];
        const colo_status_t st = colo_bridge_create(&b, &config, comm);
        rank_check(st == (i < 2 ? COLO_OK : COLO_ERR_ARG));
        if (st == COLO_OK)
            rank_check(b->direct.blocks == (expected ? expected : given[i]));
    }
    return COLO_OK;
}

T_CASE(blocks_are_those_of_the_config_unless_the_environment_says)
{
    for (int32_t k = 0; k < 2; k++) {
        const int32_t expected = 7 * k;
        if (k)
            setenv("COLO_PEER_BLOCKS", "7", 1);
        const colo_status_t st = on_all(blocks, &expected);
        unsetenv("COLO_PEER_BLOCKS");
        assert_ok(st);
    }
}

/* ---- calls: a rank that has nothing of what peers reach follows the others ---- */

/* Rank 3 owns nothing of the source, and sends gradients; every rank has a rank to talk to. */
static t_case_t asymmetric(int32_t check)
{
    return T_BETWEEN("dp=3", "dp=4", 9, 3, 2, .check = check);
}

T_CASE_ON_ALL_FOR(registering_y_alone_stages_backward_on_all_ranks, int32_t, check, 1, 2)
{
    const t_case_t c = asymmetric(check);
    STAND(s);
    colo_comm_stats_t after;
    uint64_t checks[3];
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    for (int64_t salt = 0; salt < 3; salt++) {
        rank_try(tensors(&s, salt));
        registered(&s, T_Y);
        rank_try(expect(&s, COLO_PASS_FORWARD, true));
        rank_try(expect(&s, COLO_PASS_BACKWARD, false));
        t_comm_stats(s.as.control, &after);
        checks[salt] = after.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_CHECK];
    }
    if (check == 1) /* agreed on once, at the first backward */
        rank_check(checks[1] == checks[0] && checks[2] == checks[0]);
    return COLO_OK;
}

/* PARTIAL over cp: readers pull from d_y, of which ranks 0 and 1 have nothing. */
T_CASE_ON_ALL_FOR(of_sums_it_is_d_y_that_counts, t_role_t, role, T_DX, T_DY)
{
    const t_case_t c = T_BETWEEN("dp=2", "cp=2@2", 4, 8, 3, .grad = COLO_GRAD_PARTIAL);
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    registered(&s, role);
    return expect(&s, COLO_PASS_BACKWARD, role == T_DY);
}

T_CASE_ON_ALL_FOR(registered_on_some_ranks_is_staged_on_all_until_more_is_registered, int32_t,
                  check, 1, 2)
{
    const t_case_t c = asymmetric(check);
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    s.told->registrations = 1;
    if (comm->rank != 1)
        s.told->registered = s.on.t[T_DX].t.data;
    rank_try(expect(&s, COLO_PASS_BACKWARD, false));
    s.told->registered = s.on.t[T_DX].t.data; /* the verdict holds */
    rank_try(expect(&s, COLO_PASS_BACKWARD, false));
    s.told->registrations = 2; /* until memory is registered */
    return expect(&s, COLO_PASS_BACKWARD, true);
}

/* Every d_x is registered, and the ranks have agreed on that in a backward. */
static colo_status_t stand_up_direct(struct stand *s, colo_comm_t *comm, const t_case_t *c)
{
    rank_try(stand_up(s, comm, c, COLO_TRANSPORT_AUTO));
    registered(s, T_DX);
    return expect(s, COLO_PASS_BACKWARD, true);
}

T_CASE_ON_ALL(a_tensor_that_is_registered_no_more_is_refused)
{
    const t_case_t c = asymmetric(2);
    STAND(s);
    rank_try(stand_up_direct(&s, comm, &c));
    if (comm->rank == 1)
        s.told->registered = NULL;
    colo_status_t st = t_stand_call(&s.on, COLO_PASS_BACKWARD);
    rank_fails(st, comm->rank == 1 ? COLO_ERR_ARG : COLO_ERR_PEER, "rank 1: d_x at");
    rank_check(says("is not registered over comm"));
    rank_check(says("which the pass's first call"));
    rank_try(colo_comm_check(comm));
    return COLO_OK;
}

/* Ranks with a part each need not agree; with one sample only rank 3 has some of d_x, and rank 2
 * half of its gradient. */
T_CASE_ON_ALL(another_shape_may_leave_ranks_without)
{
    t_case_t c = T_BETWEEN("dp=4", "cp=2,dp=2", 8, 8, 2, .grad = COLO_GRAD_DISJOINT);
    const colo_shape_t one = {1, 8, 2, 0};
    colo_comm_stats_t before, after;
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    s.told->registrations = 1;
    t_comm_stats(s.as.control, &before);
    s.told->registered = s.on.t[T_Y].t.data;
    rank_try(expect(&s, COLO_PASS_FORWARD, true));
    rank_try(expect(&s, COLO_PASS_BACKWARD, false));
    t_comm_stats(s.as.control, &after);
    rank_check(after.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_CHECK] ==
               before.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_CHECK]);
    rank_try(colo_bridge_reshape(s.on.bridge, &one));
    c.shape.b = 1;
    rank_try(tensors(&s, 0));
    s.told->registered = s.on.t[T_Y].t.data;
    rank_try(expect(&s, COLO_PASS_BACKWARD, false));
    return COLO_OK;
}

/* What ranks agreed on is of a shape: after a reshape they agree anew, here on the staged way. */
T_CASE_ON_ALL(another_shape_is_agreed_on_anew)
{
    const t_case_t c = asymmetric(1);
    STAND(s);
    rank_try(stand_up_direct(&s, comm, &c));
    const colo_shape_t same = {c.shape.b, c.shape.n, c.shape.h, 0};
    rank_try(colo_bridge_reshape(s.on.bridge, &same));
    s.told->registered = NULL;
    rank_try(expect(&s, COLO_PASS_BACKWARD, false));
    return COLO_OK;
}

/* Of tp=4 -> dp=4 every rank has its samples already; in backward it sends them to three others. */
T_CASE_ON_ALL(what_others_do_not_reach_may_lie_anywhere)
{
    const t_case_t c = T_BETWEEN("tp=4", "dp=4", 8, 3, 2, .check = 2);
    STAND(s);
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_PEER));
    rank_try(expect(&s, COLO_PASS_FORWARD, false)); /* a plain copy: no rank is met */
    rank_fails(t_stand_call(&s.on, COLO_PASS_BACKWARD), COLO_ERR_ARG, "d_x at");
    rank_check(says("which transport peer (COLO_TRANSPORT, or the bridge's)"));
    s.told->registered = s.on.t[T_DX].t.data;
    rank_try(expect(&s, COLO_PASS_BACKWARD, true));
    return COLO_OK;
}

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
    return colo_comm_threads_backend.exchange(c, x, stream);
}

/* From now on; the next reshape finds whom it connects with. */
static void go_over_routes(struct stand *s)
{
    connected[s->on.comm->rank] = disconnected[s->on.comm->rank] = 0;
    s->as.backend.subconnection_create = connect;
    s->as.backend.subconnection_destroy = disconnect;
    s->as.backend.subconnection_stage = no_stage;
    s->as.backend.exchange = over_route;
}

/* ---- calls: backends whose exchanges compare nothing ---- */

static uint64_t checks_of(const colo_comm_t *comm)
{
    colo_comm_stats_t l;
    t_comm_stats(comm, &l);
    return l.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_CHECK];
}

/* Rank 1 runs backward, the others forward, as the first call of a shape; then all do the same. */
static colo_status_t call_in_turn(struct stand *s)
{
    const colo_shape_t shape = {4, 8, 2, 0};
    const int32_t rank = s->on.comm->rank;
    rank_try(colo_bridge_reshape(s->on.bridge, &shape));
    rank_try(tensors(s, 0));
    rank_fails(t_stand_call(&s->on, rank == 1 ? COLO_PASS_BACKWARD : COLO_PASS_FORWARD),
               COLO_ERR_MISMATCH,
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
    const t_case_t c = T_BETWEEN("dp=4", "cp=2,dp=2", 4, 8, 2, .grad = COLO_GRAD_DISJOINT);
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
    t_case_t c = T_BETWEEN("dp=4", "dp=3", 12, 8, 2, .grad = COLO_GRAD_DISJOINT);
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
    const int32_t others = c->world - 1;
    int64_t rank[T_PEERS_RANKS] = {0};
    STAND(s);
    for (int32_t r = 0; r < others; r++)
        rank[r] = r;
    if (comm->rank == others)
        return COLO_OK;
    rank_try(colo_comm_part(comm, rank, others, &comm));
    rank_try(stand_up(&s, comm, c, COLO_TRANSPORT_NCCL));
    go_over_routes(&s);
    s.as.backend.subconnection_create = connect_all_that_are_tied;
    rank_try(
        colo_bridge_reshape(s.on.bridge, &(colo_shape_t){c->shape.b, c->shape.n, c->shape.h, 0}));
    rank_try(expect(&s, COLO_PASS_FORWARD, false));
    rank_check(connected[comm->rank] == 1);
    return COLO_OK;
}

/* Of one more rank than is in the grids, which does not call. */
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

T_MAIN("bridge/direct")
