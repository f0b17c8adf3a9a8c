/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged_device.c - ragged batches in a device's memory, without a GPU: the device is the host
 * (cuda_is_host.c), the communicator is one of threads that calls itself one of GPUs.
 *
 * Random batches, staged, against the oracle. What needs the hardware is tests/gpu/'s.
 */
#include "harness/harness.h"

#include "bridge/bridge.h"
#include "core/error.h"
#include "harness/bridge_case.h"
#include "harness/ragged_run.h"

enum { RANKS = 8, CASES = 300 };

/* ---- a communicator that moves "CUDA memory" ---- */

static colo_status_t no_peers(colo_comm_t *c)
{
    return colo_fail(COLO_ERR_UNBUILT, "comm '%s' reaches no memory of peers", c->name);
}

static uint64_t no_registrations(const colo_comm_t *c)
{
    (void)c;
    return 0;
}

static const colo_peer_ops_t peers = {.open = no_peers, .registrations = no_registrations};

struct colo_subconnection {
    int32_t n;
};

static colo_status_t subconnection_create(colo_comm_t *c, const int32_t *members, int32_t n,
                                          uint64_t tag, colo_subconnection_t **route)
{
    (void)tag;
    rank_check(n == c->size); /* tables may tie any ranks */
    for (int32_t k = 0; k < n; k++)
        rank_check(members[k] == k);
    *route = malloc(sizeof **route);
    rank_check(*route);
    (*route)->n = n;
    return COLO_OK;
}

static void subconnection_destroy(colo_comm_t *c, colo_subconnection_t *route)
{
    (void)c;
    free(route);
}

static int64_t bytes_of(const colo_message_t *m, int32_t n, size_t elem)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < n; i++)
        for (int32_t k = 0; k < m[i].nboxes; k++) {
            const int64_t *e = m[i].boxes[k].extent;
            bytes += e[0] * e[1] * e[2] * (int64_t)elem;
        }
    return bytes;
}

/* Of messages below the size that is halved: all of them. */
static size_t subconnection_stage(const colo_message_t *sends, int32_t nsends,
                                  const colo_message_t *recvs, int32_t nrecvs, size_t elem)
{
    return (size_t)(bytes_of(sends, nsends, elem) + bytes_of(recvs, nrecvs, elem));
}

static colo_status_t subconnection_exchange(colo_comm_t *c, colo_subconnection_t *route,
                                            void *stage, size_t stage_bytes,
                                            const colo_message_t *sends, int32_t nsends,
                                            const colo_message_t *recvs, int32_t nrecvs,
                                            colo_dtype_t dtype, colo_stream_t stream)
{
    const size_t need = subconnection_stage(sends, nsends, recvs, nrecvs, colo_dtype_size(dtype));
    rank_check(route && stage_bytes >= need && (stage || need == 0));
    memset(stage ? stage : &(char){0}, 0x5a, stage ? need : 0);
    return c->ops->exchange(c, sends, nsends, recvs, nrecvs, dtype, stream);
}

static colo_status_t disguised(colo_comm_t *comm, colo_rank_fn fn, void *arg)
{
    const colo_comm_ops_t *was = comm->ops;
    colo_comm_ops_t ops = *was;
    colo_comm_t *control = NULL;
    ops.peer = &peers;
    ops.subconnection_create = subconnection_create;
    ops.subconnection_destroy = subconnection_destroy;
    ops.subconnection_stage = subconnection_stage;
    ops.subconnection_exchange = subconnection_exchange;
    rank_try(colo_comm_i_split_color(comm, COLO_CATEGORY_USER, 0, comm->rank, &control));
    comm->ops = &ops;
    comm->control = control;
    const colo_status_t st = fn(comm, arg);
    if (st < 0) /* others may wait on either */
        colo_comm_i_fail(control, st);
    comm->ops = was;
    comm->control = NULL;
    colo_comm_destroy(&control);
    return st;
}

/* ---- its memory: blocks of the host's ---- */

static colo_status_t put(void *arg, const void *from, size_t bytes, void **at)
{
    (void)arg;
    *at = malloc(bytes);
    rank_check(*at);
    memcpy(*at, from, bytes);
    return COLO_OK;
}

static colo_status_t get(void *arg, void *to, const void *at, size_t bytes)
{
    (void)arg;
    memcpy(to, at, bytes);
    return COLO_OK;
}

static void drop(void *arg, void *at)
{
    (void)arg;
    free(at);
}

static colo_status_t quiet(void *arg)
{
    (void)arg;
    return COLO_OK;
}

static const t_ragged_where_t where = {
    .device = -1, .put = put, .get = get, .drop = drop, .quiet = quiet};

/* ---- random batches ---- */

static colo_status_t run_random(colo_comm_t *comm, void *arg)
{
    const uint64_t seed = *(uint64_t *)arg;
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++) {
        t_ragged_t t;
        uint64_t s = seed + (uint64_t)i;
        t_ragged_random(&t, s, RANKS);
        const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&s, T_RAGGED_TENSORS),
                                      .ranks_per_node = t_below(&s, 4),
                                      .gap = t_below(&s, 3),
                                      .where = &where};
        rank_try(colo_comm_set_check(comm, (int32_t)t_below(&s, 3)));
        const colo_status_t st = t_ragged_on(&t, &o, comm);
        if (st < 0)
            return colo_fail_prefix(st, "%s", t_ragged_text(&t));
        t_ragged_free(&t);
    }
    return COLO_OK;
}

static colo_status_t random_batches(colo_comm_t *comm, void *arg)
{
    return disguised(comm, run_random, arg);
}

static void random_batches_on_a_device_arrive_as_the_oracle_says(void **state)
{
    uint64_t seed = t_seed();
    (void)state;
    assert_ok(colo_comm_threads_run(RANKS, random_batches, &seed));
}

/* ---- memory ---- */

/* Dense batches of more and more rows, up to max_rows of each source rank. */
static colo_status_t run_growing(colo_comm_t *comm, void *arg)
{
    enum { MOST = 16, H = 4 };
    const bool reserves = *(bool *)arg;
    colo_bridge_t *bridge = NULL;
    const ref_side_t src = t_side("dp=4", true), dst = t_side("cp=2,dp=2", false);
    t_ragged_t t;
    size_t first = 0, last = 0;
    for (int64_t n = 4; n <= MOST; n += 4) {
        const t_ragged_options_t o = {
            .tensors = 1, .max_rows = reserves ? MOST : 0, .where = &where};
        colo_batch_t *batch = NULL;
        t_ragged_uniform(&t, &src, &dst, (ref_shape_t){4, n, H});
        t.c.full = t.c.partial = true;
        if (!bridge) {
            rank_try(t_ragged_bridge(&bridge, &t, &o, comm));
            first = last = colo_bridge_workspace_size(bridge);
            rank_check((first > 0) == reserves);
        }
        const colo_segments_t s = t_ragged_segments(&t);
        rank_try(colo_bridge_set_segments(bridge, &s, &batch));
        rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_FORWARD));
        rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_BACKWARD));
        rank_check(colo_bridge_workspace_size(bridge) >= last);
        last = colo_bridge_workspace_size(bridge);
        colo_batch_destroy(&batch);
        t_ragged_free(&t);
    }
    rank_check(reserves ? last == first : last > first);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static colo_status_t growing_batches(colo_comm_t *comm, void *arg)
{
    return disguised(comm, run_growing, arg);
}

static void memory_on_a_device_grows_or_is_there_from_create(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        bool reserves = i > 0;
        assert_ok(colo_comm_threads_run(4, growing_batches, &reserves));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_batches_on_a_device_arrive_as_the_oracle_says),
        cmocka_unit_test(memory_on_a_device_grows_or_is_there_from_create),
    };
    assert_int_equal(setenv("COLO_BACKEND_DIR", getenv("T_BACKENDS"), 1), 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
