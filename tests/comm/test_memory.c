/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_memory.c - the front of registered memory, over a table of peers that says what it is told:
 * ranks that do not reach each other, or not this memory, have memory that is not peer-to-peer,
 * what else goes wrong is an error. Where GPUs are, tests/gpu/test_direct_order.c has the table
 * itself.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "comm/direct.h"
#include "core/error.h"

enum { RANKS = 2 };

/* What opening the others' memory, or sharing one's own, says to ranks; what registering says. */
static const struct told {
    const char *transport;
    colo_status_t open[RANKS], share[RANKS], status[RANKS];
    bool direct;
    const char *words;
} tellings[] = {
    {.direct = true},
    /* ranks that do not reach each other, or not this memory */
    {.open = {COLO_ERR_UNBUILT, COLO_ERR_UNBUILT}},
    {.share = {COLO_ERR_UNBUILT, COLO_ERR_UNBUILT}},
#define AT_EITHER(transport, rank0, rank1)                                                     \
    {transport, .open = {rank0, rank1}, .status = {rank0, rank1}, .words = "open says so"},    \
    {                                                                                          \
        transport, .share = {rank0, rank1}, .status = {rank0, rank1}, .words = "share says so" \
    }
    AT_EITHER(NULL, COLO_ERR_PEER, COLO_ERR_ARG),
    AT_EITHER(NULL, COLO_ERR_PEER, COLO_ERR_NOMEM),
    AT_EITHER(NULL, COLO_ERR_PEER, COLO_ERR_CUDA),
    AT_EITHER("peer", COLO_ERR_UNBUILT, COLO_ERR_UNBUILT),
    /* no rank is asked */
    {.transport = "nccl", .open = {COLO_ERR_NOMEM, COLO_ERR_NOMEM}},
    {.transport = "pear",
     .status = {COLO_ERR_ARG, COLO_ERR_ARG},
     .words = "COLO_TRANSPORT is 'pear'"},
};
static const struct told *told;
static int shared;

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
    __atomic_fetch_add(&shared, 1, __ATOMIC_SEQ_CST);
    return COLO_OK;
}

static void share_ends(colo_memory_t *m)
{
    __atomic_fetch_sub(&shared, 1, __ATOMIC_SEQ_CST);
}

/* The environment changes once there is a communicator, and before anybody waits. */
static colo_status_t on_rank(colo_comm_t *c, void *arg)
{
    static const colo_direct_memory_t peers = {
        .open = print_open, .share = share, .unshare = share_ends};
    const colo_comm_backend_t *was = c->backend;
    colo_comm_backend_t mine = *was;
    colo_memory_t *memory = NULL;
    char block[64];
    mine.direct = &peers;
    if (told->transport && c->rank == 0)
        setenv("COLO_TRANSPORT", told->transport, 1);
    rank_try(colo_comm_barrier(c, NULL));
    c->backend = &mine;
    const colo_status_t st = colo_memory_register(c, block, sizeof block, &memory);
    c->backend = was;
    rank_check((memory != NULL) == (told->status[c->rank] == COLO_OK));
    rank_check(colo_memory_is_p2p(memory) == told->direct);
    colo_memory_destroy(&memory);
    if (told->words)
        rank_fails(st, told->status[c->rank], told->words);
    else
        rank_try(st);
    return COLO_OK;
}

T_CASE(registering_is_what_ranks_can_do_with_each_others_memory)
{
    for (size_t i = 0; i < sizeof tellings / sizeof tellings[0]; i++) {
        told = &tellings[i];
        const colo_status_t st = colo_comm_threads_run(RANKS, on_rank, NULL);
        unsetenv("COLO_TRANSPORT");
        if (st < 0)
            fail_msg("telling %zu: %s", i, colo_last_error());
        assert_int_equal(shared, 0);
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
