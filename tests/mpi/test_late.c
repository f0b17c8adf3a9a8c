/* SPDX-License-Identifier: Apache-2.0 */
/* test_late.c - ranks that come late when communicators are made, by seconds. */
#include "forked.h"

enum { DEADLINE_S = 12 };

static void come_late(t_forked_t *me, void *endpoints, size_t bytes)
{
    sleep(DEADLINE_S - 5);
}

static void lower_is_late(t_forked_t *me)
{
    me->after = me->rank == 0 ? come_late : NULL;
    t_live(me);
}

/* The others call rank 0 all the while; they have met each other. */
T_CASE(rank_may_be_late_by_more_than_half_of_its_deadline)
{
    t_expect_all(t_fork_within(12000, 3, lower_is_late), COLO_OK, "");
}

static void come_too_late(t_forked_t *me, void *endpoints, size_t bytes)
{
    usleep(1500 * 1000);
}

static void lower_is_too_late(t_forked_t *me)
{
    me->after = me->rank == 0 ? come_too_late : NULL;
    t_live(me);
}

T_CASE(rank_that_is_too_late_fails_like_those_that_waited)
{
    t_page_t *page = t_fork_within(1000, 2, lower_is_too_late);
    t_expect(page, 1, COLO_ERR_TIMEOUT, "has no connection with 1 ranks after 1000 ms");
    if (page->status[0] != COLO_ERR_TIMEOUT && page->status[0] != COLO_ERR_PEER)
        fail_msg("rank 0: %s", colo_status_name(page->status[0]));
    assert_true(page->seconds[0] < 8);
}

T_MAIN("sockets/late")
