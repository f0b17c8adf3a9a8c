/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged_device.c - ragged batches in a device's memory, without a GPU: the device is the host
 * (cuda_is_host.c), the communicator is one of threads that calls itself one of GPUs.
 *
 * Random batches against the oracle, staged, or peer-to-peer by host_peers.h. What needs the
 * hardware is tests/gpu/'s.
 */
#include "harness/harness.h"

#include "bridge/run/run.h"
#include "comm/threads/threads.h"
#include "core/error.h"
#include "harness/bridge_case.h"
#include "harness/host_peers.h"
#include "harness/ragged_run.h"

enum { RANKS = 8, CASES = 1000 };

/* ---- peers: ranks of this process reach all memory ---- */

enum mode {
    NO_PEERS,
    REGISTERED,
    INPUTS,  /* those only, on all ranks */
    OUTPUTS, /* likewise */
    OUTPUTS_BUT_INPUTS_ON_RANK_1,
    NOT_ON_RANK_1,
    NOT_REGISTERED,
    MODES
};

static enum mode mode_of[RANKS];

/* What this rank put: inputs and outputs by turns, as ragged_run.c makes them. */
enum { PLACED = 2 * T_RAGGED_TENSORS };
static _Thread_local struct {
    const void *data[PLACED];
    int64_t n;
} placed;

static bool is_input(const void *p)
{
    for (int64_t i = placed.n - 1; i >= 0 && i >= placed.n - PLACED; i--)
        if (placed.data[i % PLACED] == p)
            return i % 2 == 0;
    return false;
}

static bool is_registered(int32_t rank, const void *p)
{
    switch (mode_of[rank]) {
    case INPUTS:
        return is_input(p);
    case OUTPUTS:
        return !is_input(p);
    case OUTPUTS_BUT_INPUTS_ON_RANK_1:
        return is_input(p) == (rank == 1);
    default:
        return mode_of[rank] == REGISTERED || (mode_of[rank] == NOT_ON_RANK_1 && rank != 1);
    }
}

static void set_mode(int32_t rank, enum mode mode)
{
    mode_of[rank] = mode;
    t_told[rank].is_registered = is_registered;
    t_told[rank].open = mode == NO_PEERS ? COLO_ERR_UNBUILT : COLO_OK;
    t_told[rank].registrations = mode != NO_PEERS;
}

static int64_t runs_of(const t_told_t *told)
{
    return told->runs[COLO_PASS_FORWARD] + told->runs[COLO_PASS_BACKWARD];
}

static colo_status_t make_path(colo_comm_t *c, const colo_transfers_t pass[2],
                               colo_direct_launcher_t **d)
{
    rank_check(pass[0].nexposed == c->size - 1 && pass[1].nexposed == c->size - 1);
    return t_launcher_create(c, pass, d);
}

static colo_status_t run_direct(colo_direct_launcher_t *d, int pass, const colo_direct_call_t *c,
                                colo_stream_t stream)
{
    const colo_transfers_t *w = t_launcher_transfers(d, pass, c);
    /* or tiles are too large, so that few blocks of the kernel have work */
    for (int32_t k = 0; k < c->n; k++)
        rank_check(w->elem >= (size_t)c->tensor[k].per * c->tensor[k].elem);
    return t_launcher_run(d, pass, c, stream);
}

static colo_direct_memory_t peers; /* the harness's, with these two */

/* ---- a communicator that moves "CUDA memory" ---- */

static colo_status_t subconnection_create(colo_comm_t *c, const int32_t *members, int32_t n,
                                          uint64_t tag, colo_subconnection_t **route)
{
    rank_check(n == c->size); /* tables may tie any ranks */
    for (int32_t k = 0; k < n; k++)
        rank_check(members[k] == k);
    return t_sub_create(c, members, n, tag, route);
}

static colo_status_t exchange(colo_comm_t *c, const colo_exchange_t *x, colo_stream_t stream)
{
    const size_t need = t_sub_stage(x);
    rank_check(x->subconnection && x->stage_bytes >= need && (x->stage || need == 0));
    memset(x->stage ? x->stage : &(char){0}, 0x5a, x->stage ? need : 0);
    return colo_comm_threads_backend.exchange(c, x, stream);
}

static colo_rank_fn body; /* of the case that runs */

static colo_status_t disguised(colo_comm_t *comm, void *arg)
{
    T_ENDS(t_undisguise) t_disguise_t d = {0};
    rank_try(t_disguise(&d, comm, &peers));
    d.backend.subconnection_create = subconnection_create;
    d.backend.subconnection_destroy = t_sub_destroy;
    d.backend.subconnection_stage = t_sub_stage;
    d.backend.exchange = exchange;
    const colo_status_t st = body(comm, arg);
    return st < 0 ? colo_comm_fail(d.control, st) : st; /* others may wait on either */
}

static colo_status_t run_disguised(int32_t n, colo_rank_fn fn, void *arg)
{
    memset(t_told, 0, sizeof t_told);
    body = fn;
    return colo_comm_threads_run(n, disguised, arg);
}

#define T_CASE_ON_DISGUISED(n, name) \
    T_CASE_BY(run_disguised(n, t_ranks_of_##name, NULL), name, colo_comm_t *comm)
#define T_CASE_ON_DISGUISED_FOR(n, name, type, var, ...) \
    T_CASE_FOR_BY(run_disguised(n, t_ranks_of_##name, t_one_), name, type, var, comm, __VA_ARGS__)

/* ---- its memory: blocks of the host's ---- */

static colo_status_t put(void *arg, const void *from, size_t bytes, void **data)
{
    *data = malloc(bytes);
    rank_check(*data);
    memcpy(*data, from, bytes);
    placed.data[placed.n++ % PLACED] = *data;
    return COLO_OK;
}

static colo_status_t get(void *arg, void *to, const void *data, size_t bytes)
{
    memcpy(to, data, bytes);
    return COLO_OK;
}

static void drop(void *arg, void *data)
{
    free(data);
}

static colo_status_t quiet(void *arg)
{
    return COLO_OK;
}

static const t_ragged_where_t where = {
    .device = -1, .put = put, .get = get, .drop = drop, .quiet = quiet};

/* ---- random batches ---- */

static colo_status_t run_random(colo_comm_t *comm, void *arg)
{
    const uint64_t seed = *(uint64_t *)arg;
    const t_told_t *me = &t_told[comm->rank];
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        uint64_t s = seed + (uint64_t)i;
        t_ragged_random(&t, s, RANKS);
        const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&s, T_RAGGED_FEW),
                                      .ranks_per_node = t_below(&s, 4),
                                      .gap = t_below(&s, 3),
                                      .where = &where};
        rank_try(colo_comm_set_check(comm, (int32_t)t_below(&s, 3)));
        const enum mode mode = t_below(&s, 2) ? REGISTERED : (enum mode)t_below(&s, MODES);
        const int64_t before = runs_of(me), pulled = me->pulls;
        /* ranks of a part read what others of these have set, and no rank waits for all */
        rank_try(colo_comm_barrier(comm->control, NULL));
        set_mode(comm->rank, mode);
        rank_try(colo_comm_barrier(comm->control, NULL));
        const colo_status_t st = t_ragged_on(&t, &o, comm);
        rank_check(st < 0 || (mode != NO_PEERS && mode != NOT_REGISTERED) || runs_of(me) == before);
        rank_check(st < 0 || (mode != REGISTERED && mode != OUTPUTS) || me->pulls == pulled);
        rank_check(st < 0 || runs_of(me) - before <= 2); /* all tensors of a pass at once */
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_ragged_text(&t));
    }
    return COLO_OK;
}

T_CASE(random_batches_on_a_device_arrive_as_the_oracle_says)
{
    uint64_t seed = t_seed();
    int64_t direct = 0;
    assert_ok(run_disguised(RANKS, run_random, &seed));
    for (int32_t r = 0; r < RANKS; r++)
        direct += runs_of(&t_told[r]);
    assert_true(direct > t_scaled(CASES));
}

/* ---- which carrier ---- */

/* Batches of one bridge in registered memory: without any row, then with rows. */
T_CASE_ON_DISGUISED(2, path_after_a_batch_without_rows_is_still_peer_to_peer)
{
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    const t_ragged_options_t o = {.tensors = 1, .where = &where};
    const t_told_t *me = &t_told[comm->rank];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    set_mode(comm->rank, REGISTERED);
    for (int64_t samples = 0; samples <= 2; samples += 2) {
        T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        t_ragged_uniform(&t, &src, &dst, (ref_shape_t){samples, 8, 3});
        t.c.full = t.c.partial = true;
        if (!bridge)
            rank_try(t_ragged_bridge(&bridge, &t, &o, comm));
        const colo_segments_t s = t_ragged_segments(&t);
        rank_try(colo_bridge_set_segments(bridge, &s, &batch));
        rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_PASS_FORWARD));
        rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_PASS_BACKWARD));
        rank_check(runs_of(me) == samples);
    }
    rank_check(colo_bridge_workspace_size(bridge) == 0); /* nothing was staged */
    return COLO_OK;
}

/* What is registered, and what a forward is then with each transport. */
static const struct choice {
    enum mode mode;
    bool direct, pulls;
} choices[] = {{REGISTERED, true, false},
               {OUTPUTS, true, false},
               {INPUTS, true, true},
               {OUTPUTS_BUT_INPUTS_ON_RANK_1, false, false},
               {NOT_REGISTERED, false, false}};

/* Two batches of one bridge, the second made when ranks have agreed. */
T_CASE_ON_DISGUISED_FOR(2, forward_is_pushed_if_all_y_are_registered_and_pulled_if_all_x_are,
                        colo_transport_t, transport, COLO_TRANSPORT_AUTO, COLO_TRANSPORT_PEER)
{
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    const t_ragged_options_t o = {.tensors = 1, .where = &where};
    const t_told_t *me = &t_told[comm->rank];
    T_ENDS(t_ragged_free) t_ragged_t t = {0};
    t_ragged_uniform(&t, &src, &dst, (ref_shape_t){2, 8, 3});
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const struct choice *choice = &choices[i];
        T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
        set_mode(comm->rank, choice->mode);
        rank_try(t_ragged_bridge(&bridge, &t, &o, comm));
        bridge->transport = transport;
        for (int64_t call = 1; call <= 2; call++) {
            T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
            const colo_segments_t s = t_ragged_segments(&t);
            const int64_t runs = runs_of(me), pulled = me->pulls;
            rank_try(colo_bridge_set_segments(bridge, &s, &batch));
            const colo_status_t st = t_ragged_pass(batch, &t, &o, comm, COLO_PASS_FORWARD);
            if (transport == COLO_TRANSPORT_PEER && !choice->direct) {
                rank_fails(st, COLO_ERR_ARG, "neither y nor x is registered over comm '");
            } else {
                rank_try(st);
            }
            rank_check(runs_of(me) - runs == choice->direct && me->pulls - pulled == choice->pulls);
        }
    }
    return COLO_OK;
}

/* ---- memory ---- */

static size_t partials_of(const colo_bridge_t *bridge)
{
    return bridge->memory.partials.size;
}

T_CASE_ON_DISGUISED(2, sums_of_large_regions_copy_no_gradient_of_the_rank_itself)
{
    set_mode(comm->rank, NO_PEERS);
    return t_ragged_large(comm, &where, partials_of);
}

/* Dense batches of more and more rows, up to max_rows of each source rank. */
T_CASE_ON_DISGUISED_FOR(4, memory_on_a_device_grows_or_is_there_from_create, bool, reserves, false,
                        true)
{
    enum { MOST = 16, H = 4 };
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    const ref_side_t src = t_side("dp=4", true), dst = t_side("cp=2,dp=2", false);
    t_ragged_t t;
    size_t first = 0, last = 0;
    set_mode(comm->rank, NO_PEERS);
    for (int64_t n = 4; n <= MOST; n += 4) {
        const t_ragged_options_t o = {
            .tensors = 1, .max_rows = reserves ? MOST : 0, .where = &where};
        T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
        t_ragged_uniform(&t, &src, &dst, (ref_shape_t){4, n, H});
        t.c.full = t.c.partial = true;
        if (!bridge) {
            rank_try(t_ragged_bridge(&bridge, &t, &o, comm));
            first = last = colo_bridge_workspace_size(bridge);
            rank_check((first > 0) == reserves);
        }
        const colo_segments_t s = t_ragged_segments(&t);
        rank_try(colo_bridge_set_segments(bridge, &s, &batch));
        rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_PASS_FORWARD));
        rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_PASS_BACKWARD));
        rank_check(colo_bridge_workspace_size(bridge) >= last);
        last = colo_bridge_workspace_size(bridge);
        t_ragged_free(&t);
    }
    rank_check(reserves ? last == first : last > first);
    return COLO_OK;
}

int main(void)
{
    peers = t_peers;
    peers.create = make_path;
    peers.run = run_direct;
    assert_int_equal(setenv("COLO_BACKEND_DIR", getenv("T_BACKENDS"), 1), 0);
    return t_main("bridge/ragged_device");
}
