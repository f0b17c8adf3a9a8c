/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct.c - which calls take the direct path, and what create does without one, over a table
 * of peers that says what it is told: no GPU. Staged calls move host memory and are compared with
 * the oracle; direct ones are counted. What the path itself does is tests/gpu/test_peer*.c's.
 */
#include "harness/harness.h"

#include "bridge/bridge.h"
#include "core/try.h"
#include "harness/bridge_case.h"

enum { RANKS = 4, SOON_MS = 4000 };

/* ---- peers, as told: each rank has its own part ---- */

struct colo_direct {
    int32_t rank;
};

static struct told {
    colo_status_t open, create;
    const void *registered[2];
    uint64_t registrations;
    int runs[2]; /* direct calls by way */
    int connected, disconnected;
} told[RANKS];

static colo_status_t say_open(colo_comm_t *c)
{
    const colo_status_t st = told[c->rank].open;
    return st < 0 ? colo_fail(st, "open says so to rank %d", (int)c->rank) : st;
}

static colo_status_t say_create(colo_comm_t *c, const colo_steps_t way[2], colo_direct_t **d)
{
    const colo_status_t st = told[c->rank].create;
    (void)way;
    if (st < 0)
        return colo_fail(st, "create says so to rank %d", (int)c->rank);
    *d = malloc(sizeof **d);
    (*d)->rank = c->rank;
    return COLO_OK;
}

static colo_status_t load(colo_direct_t *d, const colo_steps_t way[2])
{
    (void)d;
    (void)way;
    return COLO_OK;
}

static colo_status_t run(colo_direct_t *d, int way, const colo_direct_call_t *call,
                         colo_stream_t stream)
{
    (void)call;
    (void)stream;
    told[d->rank].runs[way]++;
    return COLO_OK;
}

static void destroy(colo_direct_t **d)
{
    free(*d);
    *d = NULL;
}

static bool find(const colo_comm_t *c, const void *p, size_t bytes, int32_t *id, uint64_t *offset)
{
    const struct told *t = &told[c->rank];
    (void)bytes;
    *id = 0;
    *offset = 0;
    return p == t->registered[0] || p == t->registered[1];
}

static uint64_t registrations(const colo_comm_t *c)
{
    return told[c->rank].registrations;
}

static const colo_peer_ops_t peers = {.open = say_open,
                                      .create = say_create,
                                      .load = load,
                                      .run = run,
                                      .destroy = destroy,
                                      .find = find,
                                      .registrations = registrations};

/* ---- routes that count how often ranks connect ---- */

struct colo_route {
    int32_t n, members[RANKS];
};

static colo_status_t connect(colo_comm_t *c, const int32_t *members, int32_t n, uint64_t tag,
                             colo_route_t **route)
{
    (void)tag;
    *route = calloc(1, sizeof **route);
    (*route)->n = n;
    memcpy((*route)->members, members, (size_t)n * sizeof *members);
    told[c->rank].connected++;
    return COLO_OK;
}

static void disconnect(colo_comm_t *c, colo_route_t *route)
{
    free(route);
    told[c->rank].disconnected++;
}

static size_t no_stage(const colo_message_t *sends, int32_t nsends, const colo_message_t *recvs,
                       int32_t nrecvs, size_t elem)
{
    return 0;
}

static bool is_on(const colo_route_t *route, const colo_message_t *m, int32_t n)
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

static colo_status_t over_route(colo_comm_t *c, colo_route_t *route, void *stage,
                                size_t stage_bytes, const colo_message_t *sends, int32_t nsends,
                                const colo_message_t *recvs, int32_t nrecvs, colo_dtype_t dtype,
                                colo_stream_t stream)
{
    rank_check(is_on(route, sends, nsends) && is_on(route, recvs, nrecvs));
    return c->ops->exchange(c, sends, nsends, recvs, nrecvs, dtype, stream);
}

/* ---- a bridge that takes host memory for a device's ---- */

struct stand {
    colo_comm_t *comm, *control;
    const colo_comm_ops_t *was;
    colo_comm_ops_t ops;
    colo_bridge_t *b;
    const t_case_t *c;
    t_buffer_t t[4]; /* by role */
    struct told *told;
};

static colo_status_t stand_up(struct stand *s, colo_comm_t *comm, const t_case_t *c,
                              colo_transport_t transport)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    *s = (struct stand){.comm = comm, .was = comm->ops, .c = c, .told = &told[comm->rank]};
    rank_try(colo_comm_set_timeout(comm, SOON_MS));
    rank_try(colo_comm_set_check(comm, c->check ? c->check : 1));
    rank_try(t_case_config(c, &src, &dst, &config));
    rank_try(colo_bridge_create(&s->b, &config, comm));
    rank_try(colo_comm_i_split_color(comm, COLO_OWNER_USER, 0, comm->rank, &s->control));
    s->ops = *comm->ops;
    s->ops.peer = &peers;
    comm->ops = &s->ops;
    comm->control = s->control;
    s->b->mem = COLO_CUDA;
    s->b->transport = transport;
    return colo_bridge_direct_create(s->b);
}

static void lie_down(struct stand *s)
{
    for (int i = 0; i < 4; i++)
        t_buffer_free(&s->t[i]);
    if (s->b)
        s->b->mem = s->b->now.mem = COLO_HOST;
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

static colo_status_t go(struct stand *s, colo_way_t way)
{
    return way == COLO_FORWARD ? colo_bridge_forward(s->b, &s->t[T_X].t, &s->t[T_Y].t, NULL)
                               : colo_bridge_backward(s->b, &s->t[T_DY].t, &s->t[T_DX].t, NULL);
}

/* A call is to be direct, or staged: then its bytes are compared. */
static colo_status_t expect(struct stand *s, colo_way_t way, int64_t salt, bool direct)
{
    const int before = s->told->runs[way];
    rank_try(go(s, way));
    rank_check(s->told->runs[way] - before == direct);
    if (direct)
        return COLO_OK;
    const t_role_t out = way == COLO_FORWARD ? T_Y : T_DX;
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

/* ---- create ---- */

struct creating {
    colo_transport_t transport;
    colo_status_t open, create; /* of rank 1; the others' is that or COLO_ERR_PEER */
    colo_status_t status[RANKS];
    bool direct[RANKS];
    char sentence[RANKS][300];
};

static colo_status_t theirs(colo_status_t st, int32_t rank)
{
    return rank == 1 || st == COLO_OK || st == COLO_ERR_UNBUILT ? st : COLO_ERR_PEER;
}

static colo_status_t creates(colo_comm_t *comm, void *arg)
{
    struct creating *k = arg;
    const t_case_t c = {.src = t_side("dp=4", true),
                        .dst = t_side("tp=2,dp=2", false),
                        .shape = {8, 3, 2},
                        .world = RANKS};
    const int32_t r = comm->rank;
    struct stand s;
    told[r].open = theirs(k->open, r);
    told[r].create = theirs(k->create, r);
    k->status[r] = stand_up(&s, comm, &c, k->transport);
    snprintf(k->sentence[r], sizeof k->sentence[r], "%.299s", colo_last_error());
    k->direct[r] = s.b && s.b->direct;
    colo_status_t st = COLO_OK;
    if (k->status[r] == COLO_OK) {
        st = tensors(&s, 0);
        if (st == COLO_OK)
            st = expect(&s, COLO_FORWARD, 0, false);
    }
    lie_down(&s);
    return st;
}

static struct creating creating(colo_transport_t transport, colo_status_t open,
                                colo_status_t create)
{
    struct creating k = {.transport = transport, .open = open, .create = create};
    assert_ok(on_all(creates, &k));
    return k;
}

static void ranks_out_of_reach_get_a_bridge_that_stages(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct creating c = creating(COLO_TRANSPORT_AUTO, k ? COLO_OK : COLO_ERR_UNBUILT,
                                     k ? COLO_ERR_UNBUILT : COLO_OK);
        for (int r = 0; r < RANKS; r++)
            assert_true(c.status[r] == COLO_OK && !c.direct[r]);
    }
    struct creating c = creating(COLO_TRANSPORT_AUTO, COLO_OK, COLO_OK);
    for (int r = 0; r < RANKS; r++)
        assert_true(c.status[r] == COLO_OK && c.direct[r]);
}

static void what_else_goes_wrong_at_create_is_returned(void **state)
{
    static const colo_status_t kinds[] = {COLO_ERR_CUDA, COLO_ERR_NOMEM, COLO_ERR_ARG,
                                          COLO_ERR_TIMEOUT, COLO_ERR_ABORTED};
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (int k = 0; k < 2; k++) {
            struct creating c =
                creating(COLO_TRANSPORT_AUTO, k ? COLO_OK : kinds[i], k ? kinds[i] : COLO_OK);
            for (int r = 0; r < RANKS; r++) {
                if (c.status[r] != theirs(kinds[i], r))
                    fail_msg("rank %d: %s, told %s", r, colo_status_name(c.status[r]),
                             colo_status_name(kinds[i]));
                assert_false(c.direct[r]);
                assert_non_null(strstr(c.sentence[r], k ? "create says so" : "open says so"));
            }
        }
}

static void out_of_reach_is_an_error_where_peer_is_asked_for(void **state)
{
    (void)state;
    struct creating c = creating(COLO_TRANSPORT_PEER, COLO_ERR_UNBUILT, COLO_OK);
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(c.status[r], COLO_ERR_UNBUILT);
        assert_non_null(strstr(c.sentence[r], "bridge: transport peer: open says so"));
    }
}

/* ---- calls: who has nothing of what peers reach follows the others ---- */

/* Rank 3 owns nothing of the source, and sends gradients; every rank has somebody to talk to. */
static t_case_t lopsided(int32_t check)
{
    return (t_case_t){.src = t_side("dp=3", true),
                      .dst = t_side("dp=4", false),
                      .shape = {9, 3, 2},
                      .check = check,
                      .world = RANKS};
}

static colo_status_t y_alone(colo_comm_t *comm, void *arg)
{
    const t_case_t c = lopsided(*(const int32_t *)arg);
    struct stand s;
    colo_ledger_t after;
    uint64_t checks[3];
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    for (int64_t salt = 0; salt < 3; salt++) {
        rank_try(tensors(&s, salt));
        s.told->registered[0] = s.t[T_Y].t.data;
        s.told->registrations = 1;
        rank_try(expect(&s, COLO_FORWARD, salt, true));
        rank_try(expect(&s, COLO_BACKWARD, salt, false));
        colo_comm_ledger(s.control, &after);
        checks[salt] = after.ops[COLO_OP_ALL_GATHER][COLO_OWNER_CHECK];
    }
    if (c.check == 1) /* agreed on once, at the first backward */
        rank_check(checks[1] == checks[0] && checks[2] == checks[0]);
    lie_down(&s);
    return COLO_OK;
}

static void registering_y_alone_stages_backward_on_all_ranks(void **state)
{
    (void)state;
    for (int32_t check = 1; check <= 2; check++)
        assert_ok(on_all(y_alone, &check));
}

/* PARTIAL over cp: readers pull from d_y, of which ranks 0 and 1 have nothing. */
static colo_status_t sums(colo_comm_t *comm, void *arg)
{
    const t_role_t registered = *(const t_role_t *)arg;
    const t_case_t c = {.src = t_side("dp=2", true),
                        .dst = t_side("cp=2@2", false),
                        .shape = {4, 8, 3},
                        .grad = COLO_PARTIAL,
                        .world = RANKS};
    struct stand s;
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    rank_try(tensors(&s, 0));
    s.told->registered[0] = s.t[registered].t.data;
    s.told->registrations = 1;
    rank_try(expect(&s, COLO_BACKWARD, 0, registered == T_DY));
    lie_down(&s);
    return COLO_OK;
}

static void of_sums_it_is_d_y_that_counts(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const t_role_t role = k ? T_DY : T_DX;
        assert_ok(on_all(sums, &role));
    }
}

/* ---- calls: backends whose exchanges compare nothing ---- */

static uint64_t checks_of(const colo_comm_t *comm)
{
    colo_ledger_t l;
    colo_comm_ledger(comm, &l);
    return l.ops[COLO_OP_ALL_GATHER][COLO_OWNER_CHECK];
}

/* Rank 1 runs backward, the others forward, as the first call of a shape; then all do the same. */
static colo_status_t first_calls(colo_comm_t *comm, void *arg)
{
    const t_case_t c = {.src = t_side("dp=4", true),
                        .dst = t_side("cp=2,dp=2", false),
                        .shape = {4, 8, 2},
                        .grad = COLO_DISJOINT,
                        .world = RANKS};
    const colo_shape_t shape = {4, 8, 2, 0};
    struct stand s;
    (void)arg;
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_NCCL));
    rank_try(colo_bridge_reshape(s.b, &shape));
    rank_try(tensors(&s, 0));
    rank_check(go(&s, comm->rank == 1 ? COLO_BACKWARD : COLO_FORWARD) == COLO_ERR_MISMATCH);
    rank_check(strstr(colo_last_error(), "operation: rank 1 of 'world' has bridge 1 backward, rank "
                                         "0 bridge 1 forward"));
    for (int turn = 0; turn < 2; turn++)
        for (int way = 0; way < 2; way++) {
            const uint64_t before = checks_of(comm);
            rank_try(expect(&s, (colo_way_t)way, 0, false));
            rank_check(checks_of(comm) - before == (turn == 0));
        }
    lie_down(&s);
    return COLO_OK;
}

static void first_calls_of_a_shape_are_compared_way_by_way(void **state)
{
    (void)state;
    assert_ok(on_all(first_calls, NULL));
}

/* ---- routes ---- */

/* Of dp=4 to dp=3: 12 samples tie all ranks together, 2 only ranks 2 and 3. */
static colo_status_t reshaped_routes(colo_comm_t *comm, void *arg)
{
    static const int64_t samples[] = {12, 12, 24, 2, 2, 12};
    static const int connected[] = {1, 1, 1, 2, 2, 3};
    t_case_t c = {.src = t_side("dp=4", true),
                  .dst = t_side("dp=3", false),
                  .shape = {12, 8, 2},
                  .grad = COLO_DISJOINT,
                  .world = RANKS};
    struct stand s;
    (void)arg;
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_NCCL));
    s.ops.route_create = connect;
    s.ops.route_destroy = disconnect;
    s.ops.route_stage = no_stage;
    s.ops.route_exchange = over_route;
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) {
        const colo_shape_t shape = {samples[i], 8, 2, 0};
        c.shape.b = samples[i];
        rank_try(colo_bridge_reshape(s.b, &shape));
        rank_try(tensors(&s, (int64_t)i));
        for (int way = 0; way < 2; way++)
            rank_try(expect(&s, (colo_way_t)way, (int64_t)i, false));
        rank_check(s.told->connected == connected[i]);
        rank_check(s.told->disconnected == connected[i] - 1);
    }
    lie_down(&s);
    return COLO_OK;
}

static void a_reshape_connects_only_if_it_ties_other_ranks(void **state)
{
    (void)state;
    assert_ok(on_all(reshaped_routes, NULL));
}

static colo_status_t some_only(colo_comm_t *comm, void *arg)
{
    const t_case_t c = lopsided(*(const int32_t *)arg);
    struct stand s;
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    rank_try(tensors(&s, 0));
    s.told->registrations = 1;
    if (comm->rank != 1)
        s.told->registered[0] = s.t[T_DX].t.data;
    rank_try(expect(&s, COLO_BACKWARD, 0, false));
    s.told->registered[0] = s.t[T_DX].t.data; /* the verdict holds */
    rank_try(expect(&s, COLO_BACKWARD, 0, false));
    s.told->registrations = 2; /* until memory is registered */
    rank_try(expect(&s, COLO_BACKWARD, 0, true));
    lie_down(&s);
    return COLO_OK;
}

static void registered_on_some_ranks_is_staged_on_all_until_more_is_registered(void **state)
{
    (void)state;
    for (int32_t check = 1; check <= 2; check++)
        assert_ok(on_all(some_only, &check));
}

/* Every d_x is registered, and the ranks have agreed on that in a backward. */
static colo_status_t stand_up_direct(struct stand *s, colo_comm_t *comm, const t_case_t *c)
{
    rank_try(stand_up(s, comm, c, COLO_TRANSPORT_AUTO));
    rank_try(tensors(s, 0));
    s->told->registered[0] = s->t[T_DX].t.data;
    s->told->registrations = 1;
    return expect(s, COLO_BACKWARD, 0, true);
}

static colo_status_t later_not(colo_comm_t *comm, void *arg)
{
    const t_case_t c = lopsided(2);
    struct stand s;
    (void)arg;
    rank_try(stand_up_direct(&s, comm, &c));
    if (comm->rank == 1)
        s.told->registered[0] = NULL;
    colo_status_t st = go(&s, COLO_BACKWARD);
    rank_check(st == (comm->rank == 1 ? COLO_ERR_ARG : COLO_ERR_PEER));
    rank_check(strstr(colo_last_error(), "rank 1: d_x at"));
    rank_check(strstr(colo_last_error(), "is not registered over comm"));
    rank_check(strstr(colo_last_error(), "which the way's first call"));
    rank_try(colo_comm_check(comm));
    lie_down(&s);
    return COLO_OK;
}

static void a_tensor_that_is_registered_no_more_is_refused(void **state)
{
    (void)state;
    assert_ok(on_all(later_not, NULL));
}

/* Ranks with a part each need not agree; with one sample only rank 3 has some of d_x, and rank 2
 * half of its gradient. */
static colo_status_t fewer_samples(colo_comm_t *comm, void *arg)
{
    t_case_t c = {.src = t_side("dp=4", true),
                  .dst = t_side("cp=2,dp=2", false),
                  .shape = {8, 8, 2},
                  .grad = COLO_DISJOINT,
                  .world = RANKS};
    const colo_shape_t one = {1, 8, 2, 0};
    colo_ledger_t before, after;
    struct stand s;
    (void)arg;
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_AUTO));
    s.told->registrations = 1;
    colo_comm_ledger(s.control, &before);
    rank_try(tensors(&s, 0));
    s.told->registered[0] = s.t[T_Y].t.data;
    rank_try(expect(&s, COLO_FORWARD, 0, true));
    rank_try(expect(&s, COLO_BACKWARD, 0, false));
    colo_comm_ledger(s.control, &after);
    rank_check(after.ops[COLO_OP_ALL_GATHER][COLO_OWNER_CHECK] ==
               before.ops[COLO_OP_ALL_GATHER][COLO_OWNER_CHECK]);
    rank_try(colo_bridge_reshape(s.b, &one));
    c.shape.b = 1;
    rank_try(tensors(&s, 0));
    s.told->registered[0] = s.t[T_Y].t.data;
    rank_try(expect(&s, COLO_BACKWARD, 0, false));
    lie_down(&s);
    return COLO_OK;
}

static void another_shape_may_leave_ranks_without(void **state)
{
    (void)state;
    assert_ok(on_all(fewer_samples, NULL));
}

/* What ranks agreed on is of a shape: after a reshape they agree anew, here on the staged way. */
static colo_status_t reshaped(colo_comm_t *comm, void *arg)
{
    const t_case_t c = lopsided(1);
    struct stand s;
    (void)arg;
    rank_try(stand_up_direct(&s, comm, &c));
    const colo_shape_t same = {c.shape.b, c.shape.n, c.shape.h, 0};
    rank_try(colo_bridge_reshape(s.b, &same));
    s.told->registered[0] = NULL;
    rank_try(expect(&s, COLO_BACKWARD, 0, false));
    lie_down(&s);
    return COLO_OK;
}

static void another_shape_is_agreed_on_anew(void **state)
{
    (void)state;
    assert_ok(on_all(reshaped, NULL));
}

/* Of tp=4 -> dp=4 every rank has its samples already; in backward it sends them to three others. */
static colo_status_t fan_out(colo_comm_t *comm, void *arg)
{
    const t_case_t c = {.src = t_side("tp=4", true),
                        .dst = t_side("dp=4", false),
                        .shape = {8, 3, 2},
                        .check = 2,
                        .world = RANKS};
    struct stand s;
    (void)arg;
    rank_try(stand_up(&s, comm, &c, COLO_TRANSPORT_PEER));
    rank_try(tensors(&s, 0));
    rank_try(expect(&s, COLO_FORWARD, 0, false)); /* a plain copy: nobody is met */
    rank_check(go(&s, COLO_BACKWARD) == COLO_ERR_ARG);
    rank_check(strstr(colo_last_error(), "d_x at"));
    rank_check(strstr(colo_last_error(), "which transport peer (COLO_TRANSPORT, or the bridge's)"));
    s.told->registered[0] = s.t[T_DX].t.data;
    rank_try(expect(&s, COLO_BACKWARD, 0, true));
    lie_down(&s);
    return COLO_OK;
}

static void what_others_do_not_reach_may_lie_anywhere(void **state)
{
    (void)state;
    assert_ok(on_all(fan_out, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_out_of_reach_get_a_bridge_that_stages),
        cmocka_unit_test(what_else_goes_wrong_at_create_is_returned),
        cmocka_unit_test(out_of_reach_is_an_error_where_peer_is_asked_for),
        cmocka_unit_test(registering_y_alone_stages_backward_on_all_ranks),
        cmocka_unit_test(of_sums_it_is_d_y_that_counts),
        cmocka_unit_test(first_calls_of_a_shape_are_compared_way_by_way),
        cmocka_unit_test(a_reshape_connects_only_if_it_ties_other_ranks),
        cmocka_unit_test(registered_on_some_ranks_is_staged_on_all_until_more_is_registered),
        cmocka_unit_test(a_tensor_that_is_registered_no_more_is_refused),
        cmocka_unit_test(another_shape_may_leave_ranks_without),
        cmocka_unit_test(another_shape_is_agreed_on_anew),
        cmocka_unit_test(what_others_do_not_reach_may_lie_anywhere),
    };
    return cmocka_run_group_tests_name("bridge/direct", tests, NULL, NULL);
}
