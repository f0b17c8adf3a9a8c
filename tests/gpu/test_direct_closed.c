/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_closed.c - a rank that cannot open others' memory: the ranks that its plan ties to it
 * stage, the others do not; where peers are asked for, an error on all. Runs on a backend in which
 * rank 2 opens nothing (mutants.json, "rank-2-opens-nothing"), ranks that are processes.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"

enum { RANKS = 4 };

static t_case_t a_case(void)
{
    return (t_case_t){.src = t_side("tp=1,dp=4", true),
                      .dst = t_side("tp=1,cp=2,dp=2", false),
                      .shape = {8, 8, 4},
                      .world = RANKS};
}

T_CASE_ON_PEERS(RANKS, ranks_tied_to_one_that_opens_nothing_stage_and_others_do_not)
{
    const t_case_t c = a_case();
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_check(colo_memory_is_p2p(r->memory));
    rank_try(t_gpu_bridge(r, &c, &bridge)); /* ties ranks 0 and 1, and 2 and 3 */
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    rank_try(colo_comm_set_check(r->gpus, 0)); /* 1 compares the first calls of all ranks */
    if (r->rank < 2) {
        rank_try(t_gpu_call_run(&k, bridge, r->stream));
        rank_try(t_gpu_call_compare(&k));
    }
    rank_try(colo_comm_barrier(r->host, NULL)); /* what follows makes the comm fail on all ranks */
    if (r->rank == 2) {                         /* it stages, which this comm cannot */
        rank_fails(t_gpu_call_run(&k, bridge, r->stream), COLO_ERR_UNBUILT, "has no NCCL");
    }
    (void)colo_comm_barrier(r->host, NULL);
    return COLO_OK;
}

static colo_status_t insisted(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = a_case();
    colo_bridge_t *bridge = NULL;
    const colo_status_t st = t_gpu_bridge(r, &c, &bridge);
    rank_check(st == COLO_ERR_UNBUILT && !bridge);
    rank_check(strstr(colo_last_error(), r->rank < 2 ? "rank 2 (world rank 2) exchanges with"
                                                     : "ranks 2 and 3, which exchange, do not"));
    rank_check(r->rank != 2 || strstr(colo_last_error(), "rank 2 cannot open rank 0's"));
    rank_try(colo_comm_check(r->gpus));
    return colo_comm_barrier(r->host, NULL);
}

T_CASE(where_peer_is_asked_for_it_is_an_error_on_all)
{
    setenv("COLO_TRANSPORT", "peer", 1);
    colo_status_t st = t_peers_run(RANKS, true, insisted, NULL, 0);
    unsetenv("COLO_TRANSPORT");
    assert_ok(st);
}

T_MAIN_IF(t_ranks_are_processes() && t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/direct_closed")
