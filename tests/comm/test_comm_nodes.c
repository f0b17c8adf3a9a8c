/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm_nodes.c - which ranks of a comm and of its children share a node, and COLO_NODE. */
#include "harness/harness.h"

#include <stdlib.h>

static colo_status_t one_node_rank(colo_comm_t *c, void *arg)
{
    rank_check(colo_comm_nodes(c) == 1);
    for (int32_t r = 0; r < colo_comm_size(c); r++)
        rank_check(colo_comm_node(c, r) == 0);
    rank_check(colo_comm_node(c, -1) == -1 && colo_comm_node(c, colo_comm_size(c)) == -1);
    return COLO_OK;
}

T_CASE(ranks_of_one_host_share_one_node)
{
    unsetenv("COLO_NODE");
    assert_ok(t_run_ranks(4, one_node_rank, NULL, 0));
    setenv("COLO_NODE", "a name for all", 1);
    assert_ok(t_run_ranks(4, one_node_rank, NULL, 0));
    unsetenv("COLO_NODE");
    colo_comm_t *self = t_self();
    assert_int_equal(colo_comm_nodes(self), 1);
    assert_int_equal(colo_comm_nodes(NULL), 0);
    assert_int_equal(colo_comm_node(NULL, 0), -1);
}

static colo_status_t listed_rank(colo_comm_t *c, void *arg)
{
    static const int32_t node[] = {0, 1, 0, 2, 1, 0}; /* of b,a,b,c,a,b */
    const int32_t me = colo_comm_rank(c);
    T_ENDS(colo_comm_destroy) colo_comm_t *part = NULL;
    rank_check(colo_comm_nodes(c) == 3);
    for (int32_t r = 0; r < 6; r++)
        rank_check(colo_comm_node(c, r) == node[r]);
    /* 4 3 2 1 0: a c b a b, numbered anew */
    rank_try(colo_comm_split_color(c, me == 5 ? -1 : 0, -me, &part));
    static const int32_t again[] = {0, 1, 2, 0, 2};
    rank_check(me == 5 || colo_comm_nodes(part) == 3);
    for (int32_t r = 0; part && r < 5; r++)
        rank_check(colo_comm_node(part, r) == again[r]);
    return COLO_OK;
}

T_CASE(nodes_of_a_list_are_numbered_by_their_first_rank)
{
    setenv("COLO_NODE", "b,a,b,c,a,b", 1);
    assert_ok(t_run_ranks(6, listed_rank, NULL, 0));
    unsetenv("COLO_NODE");
}

static colo_status_t idle_rank(colo_comm_t *c, void *arg)
{
    return COLO_OK;
}

T_CASE(list_of_another_length_is_refused)
{
    setenv("COLO_NODE", "0,0,1", 1);
    assert_fails(t_run_ranks(4, idle_rank, NULL, 0), COLO_ERR_ARG,
                 "COLO_NODE names the nodes of 3 ranks, and there are 4");
    unsetenv("COLO_NODE");
}

T_MAIN("comm/comm_nodes")
