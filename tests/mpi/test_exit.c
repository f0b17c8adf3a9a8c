/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_exit.c - processes that end with communicators: the others hear of it at once, and why.
 */
#include "forked.h"

enum way { BY_EXIT, BY_EXIT_AT_ONCE, BY_EXIT_OF_A_CHILD };
static enum way way;

static void end(void)
{
    colo_grid_t grid;
    (void)colo_grid_parse(&grid, "tp=two", 8); /* the cause */
    if (way == BY_EXIT)
        exit(0);
    if (way == BY_EXIT_AT_ONCE)
        _exit(0);
    pid_t child = fork();
    if (child == 0)
        exit(0);
    waitpid(child, NULL, 0);
}

/* Rank 2 ends while rank 3 waits for it in a group of two, and the others in the world. */
T_LIFE(one_ends)
{
    rank_try(colo_comm_set_timeout(world, 60000));
    rank_try(colo_comm_split_color(world, me->rank / 2, me->rank, &me->pair));
    if (me->rank == 2)
        end();
    rank_try(colo_comm_barrier(me->rank >= 2 ? me->pair : world, NULL));
    return me->rank >= 2 ? colo_comm_barrier(world, NULL) : COLO_OK;
}

static void expect_on_others(enum way by, colo_status_t status, const char *text)
{
    way = by;
    const t_page_t *page = t_fork_ranks(4, one_ends);
    for (int r = 0; r < 4; r++)
        if (r != 2 || status == COLO_OK) {
            t_expect(page, r, status, text);
            assert_true(page->seconds[r] < 10);
        }
}

T_CASE(process_that_exits_with_a_communicator_tells_its_last_error)
{
    expect_on_others(BY_EXIT, COLO_ERR_ABORTED,
                     "world rank 2 ended without destroying its communicators; its last error: "
                     "grid spec");
}

T_CASE(process_that_ends_at_once_is_missed)
{
    expect_on_others(BY_EXIT_AT_ONCE, COLO_ERR_PEER,
                     "world rank 2 ended without destroying its communicators, or was killed: its "
                     "connection ended");
}

T_CASE(child_that_exits_leaves_its_parents_communicators_alone)
{
    expect_on_others(BY_EXIT_OF_A_CHILD, COLO_OK, "");
}

T_MAIN("sockets/exit")
