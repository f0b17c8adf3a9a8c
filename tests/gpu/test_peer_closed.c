/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_peer_closed.c - memory that one rank cannot open: all ranks' is not direct, or, where peers
 * are asked for, an error on all of them. Runs on a backend in which rank 2 opens nothing
 * (mutants.json, "rank-2-opens-nothing"), ranks that are processes.
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

static colo_status_t closed(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = a_case();
    colo_memory_t *a = NULL, *b = NULL;
    colo_bridge_t *bridge = NULL;
    char *block = NULL;
    rank_cuda(cudaMalloc((void **)&block, 4096));
    rank_try(colo_memory_register(r->gpus, block, 4096, &a));
    rank_check(!colo_memory_is_p2p(a) && colo_memory_data(a) == block);
    rank_check(!colo_memory_find(r->gpus, block, 4096));
    rank_try(colo_memory_alloc(r->gpus, 1000, &b));
    rank_check(!colo_memory_is_p2p(b) && colo_memory_bytes(b) == 1024);
    rank_cuda(cudaMemset(colo_memory_data(b), 1, 1024));
    rank_try(t_gpu_bridge(r, &c, &bridge)); /* it stages, which this comm cannot */
    colo_bridge_destroy(&bridge);
    rank_try(colo_comm_check(r->gpus));
    colo_memory_destroy(&b);
    colo_memory_destroy(&a);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaFree(block));
    return COLO_OK;
}

T_CASE(what_one_rank_cannot_open_is_staged_on_all)
{
    assert_ok(t_peers_run(RANKS, true, closed, NULL, 0));
}

static colo_status_t insisted(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = a_case();
    colo_memory_t *m = NULL;
    colo_bridge_t *bridge = NULL;
    rank_check(colo_memory_alloc(r->gpus, 1000, &m) == COLO_ERR_UNBUILT && !m);
    rank_check(strstr(colo_last_error(), "rank 2 cannot open rank 0's"));
    rank_check(t_gpu_bridge(r, &c, &bridge) == COLO_ERR_UNBUILT && !bridge);
    rank_check(strstr(colo_last_error(), "rank 2 cannot open rank 0's"));
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

int main(void)
{
    if (t_ranks_are_threads()) {
        printf("skipped: ranks of one process open nothing\n");
        return T_EXIT_SKIP;
    }
    if (!t_peers_enough(RANKS))
        return T_EXIT_SKIP;
    return t_main("gpu/peer_closed");
}
