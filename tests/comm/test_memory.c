/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_memory.c - the front of registered memory, over a table of peers that says what it is told:
 * ranks that do not reach each other, or not this memory, have memory that is not peer-to-peer,
 * what else goes wrong is an error. Where GPUs are, tests/gpu/test_peer_order.c has the table
 * itself.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "comm/peer.h"
#include "core/error.h"

enum { RANKS = 2 };

struct told {
    colo_status_t open[RANKS], share[RANKS];
    colo_status_t status[RANKS]; /* of registering */
    char error_message[RANKS][200];
    bool p2p[RANKS], made[RANKS];
    bool odd; /* COLO_TRANSPORT, once there is a communicator */
    int shared;
};
static struct told *told;

static colo_status_t print_open(colo_comm_t *c)
{
    const colo_status_t st = told->open[c->rank];
    return st < 0 ? colo_fail(st, "open says so to rank %d", (int)c->rank) : st;
}

static colo_status_t share(colo_comm_t *c, colo_memory_t *m)
{
    const colo_status_t st = told->share[c->rank];
    if (st < 0)
        return colo_fail(st, "share says so to rank %d", (int)c->rank);
    __atomic_fetch_add(&told->shared, 1, __ATOMIC_SEQ_CST);
    return COLO_OK;
}

static void share_ends(colo_memory_t *m)
{
    __atomic_fetch_sub(&told->shared, 1, __ATOMIC_SEQ_CST);
}

static colo_status_t on_rank(colo_comm_t *c, void *arg)
{
    static const colo_peer_ops_t peers = {.open = print_open, .share = share, .unshare = share_ends};
    struct told *t = arg;
    const colo_comm_ops_t *was = c->ops;
    colo_comm_ops_t mine = *was;
    colo_memory_t *memory = NULL;
    char block[64];
    const int me = c->rank;
    mine.peer = &peers;
    if (t->odd && me == 0)
        setenv("COLO_TRANSPORT", "pear", 1);
    rank_try(colo_comm_barrier(c, NULL));
    c->ops = &mine;
    t->status[me] = colo_memory_register(c, block, sizeof block, &memory);
    snprintf(t->error_message[me], sizeof t->error_message[me], "%.199s", colo_last_error());
    t->made[me] = memory != NULL;
    t->p2p[me] = colo_memory_is_p2p(memory);
    colo_memory_destroy(&memory);
    c->ops = was;
    return COLO_OK;
}

static struct told telling(struct told t)
{
    told = &t;
    assert_ok(colo_comm_threads_run(RANKS, on_rank, &t));
    told = NULL;
    assert_int_equal(t.shared, 0);
    return t;
}

/* What opening says, or, where @late, sharing. */
static struct told registering(bool late, colo_status_t rank0, colo_status_t rank1)
{
    return telling(late ? (struct told){.share = {rank0, rank1}}
                        : (struct told){.open = {rank0, rank1}});
}

T_CASE(ranks_that_reach_each_other_share)
{
    struct told t = registering(false, COLO_OK, COLO_OK);
    for (int r = 0; r < RANKS; r++)
        assert_true(t.status[r] == COLO_OK && t.made[r] && t.p2p[r]);
}

T_CASE(ranks_that_do_not_have_memory_that_is_not_direct)
{
    for (int late = 0; late < 2; late++) { /* also where it is this memory that cannot be opened */
        struct told t = registering(late, COLO_ERR_UNBUILT, COLO_ERR_UNBUILT);
        for (int r = 0; r < RANKS; r++)
            assert_true(t.status[r] == COLO_OK && t.made[r] && !t.p2p[r]);
    }
}

T_CASE(what_else_goes_wrong_is_an_error)
{
    static const colo_status_t kinds[] = {COLO_ERR_ARG, COLO_ERR_NOMEM, COLO_ERR_CUDA};
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof kinds[0]; i++) {
        struct told t = registering(i % 2, COLO_ERR_PEER, kinds[i / 2]);
        assert_int_equal(t.status[0], COLO_ERR_PEER);
        assert_int_equal(t.status[1], kinds[i / 2]);
        for (int r = 0; r < RANKS; r++) {
            assert_false(t.made[r]);
            assert_non_null(strstr(t.error_message[r], i % 2 ? "share says so" : "open says so"));
        }
    }
}

T_CASE(where_peers_are_asked_for_none_is_an_error)
{
    for (int late = 0; late < 2; late++) {
        setenv("COLO_TRANSPORT", "peer", 1);
        struct told t = registering(late, COLO_ERR_UNBUILT, COLO_ERR_UNBUILT);
        unsetenv("COLO_TRANSPORT");
        for (int r = 0; r < RANKS; r++)
            assert_true(t.status[r] == COLO_ERR_UNBUILT && !t.made[r]);
    }
}

T_CASE(no_rank_is_asked_where_nccl_is_wanted)
{
    setenv("COLO_TRANSPORT", "nccl", 1);
    struct told t = registering(false, COLO_ERR_NOMEM, COLO_ERR_NOMEM);
    unsetenv("COLO_TRANSPORT");
    for (int r = 0; r < RANKS; r++)
        assert_true(t.status[r] == COLO_OK && t.made[r] && !t.p2p[r]);
}

T_CASE(an_unknown_transport_is_refused_before_anybody_waits)
{
    struct told t = telling((struct told){.odd = true});
    unsetenv("COLO_TRANSPORT");
    for (int r = 0; r < RANKS; r++) {
        assert_true(t.status[r] == COLO_ERR_ARG && !t.made[r]);
        assert_non_null(strstr(t.error_message[r], "COLO_TRANSPORT is 'pear'"));
    }
}

/* ---- what the library makes ---- */

T_CASE_ON_THREADS(RANKS, what_is_made_begins_and_ends_at_a_multiple_of_256)
{
    static const size_t sizes[] = {1, 255, 256, 257, 100000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        colo_memory_t *m = NULL;
        rank_try(colo_memory_alloc(world, world->rank ? sizes[i] : 0, &m));
        const size_t bytes = colo_memory_bytes(m);
        rank_check(!colo_memory_is_p2p(m) && bytes % 256 == 0);
        rank_check(world->rank ? bytes >= sizes[i] && bytes < sizes[i] + 256 : bytes == 0);
        rank_check((uintptr_t)colo_memory_data(m) % 256 == 0);
        if (bytes)
            memset(colo_memory_data(m), 1, bytes);
        colo_memory_destroy(&m);
    }
    return COLO_OK;
}

T_MAIN_AFTER(0, unsetenv("COLO_TRANSPORT"), "comm/memory")
