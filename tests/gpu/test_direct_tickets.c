/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_tickets.c - calls over peers' memory that are started and finished: the caller's
 * stream is free in between, the values are the oracle's in any order of finishing, and graphs take
 * them.
 */
#include "gpu/gpu_ranks.h"

enum { RANKS = 4 };

static t_case_t the_case(void)
{
    return (t_case_t){.src = t_side("tp=1,dp=4", true),
                      .dst = t_side("tp=1,cp=2,dp=2", false),
                      .shape = {8, 8, 24},
                      .grad = COLO_GRAD_PARTIAL,
                      .dtype = COLO_BF16,
                      .world = RANKS};
}

static colo_status_t start(const t_gpu_call_t *k, colo_bridge_t *bridge, colo_ticket_t **ticket)
{
    return (k->backward ? colo_bridge_backward_start : colo_bridge_forward_start)(
        bridge, &k->in.t, &k->out.t, k->r->stream, ticket);
}

/* A bridge whose ranks have compared each pass once, which makes them wait for each other, and that
 * has made its stream. */
static colo_status_t warm_bridge(t_gpu_rank_t *r, const t_case_t *c, colo_bridge_t **bridge)
{
    rank_try(t_gpu_bridge(r, c, bridge));
    for (int pass = 0; pass < 2; pass++) {
        T_GPU_CALL(k);
        colo_ticket_t *ticket = NULL;
        rank_try(t_gpu_call_make(&k, r, c, 1, pass == 1));
        rank_try(start(&k, *bridge, &ticket));
        rank_try(colo_ticket_finish(&ticket, r->stream));
        rank_try(t_gpu_call_compare(&k));
    }
    return t_gpu_quiet(r);
}

/* ---- between start and finish ---- */

/* Rank 0's stream comes to its end while no other rank has started: so it does not wait for the
 * call, which cannot end before the others come. */
T_CASE_ON_PEERS(RANKS, the_caller_s_stream_does_not_wait_before_finish)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    rank_try(warm_bridge(r, &c, &bridge));
    for (int pass = 0; pass < 2; pass++) {
        T_GPU_CALL(k);
        colo_ticket_t *ticket = NULL;
        rank_try(t_gpu_call_make(&k, r, &c, 5 + pass, pass == 1));
        rank_cuda(cudaStreamSynchronize(r->stream));
        if (r->rank == 0) {
            rank_try(start(&k, bridge, &ticket));
            rank_cuda(cudaStreamSynchronize(r->stream));
        }
        rank_try(colo_comm_barrier(r->host, NULL));
        if (r->rank != 0)
            rank_try(start(&k, bridge, &ticket));
        rank_try(colo_ticket_finish(&ticket, r->stream));
        rank_try(t_gpu_call_compare(&k));
    }
    return t_gpu_end(r, &bridge);
}

/* ---- several ---- */

T_CASE_ON_PEERS(RANKS, several_calls_are_finished_in_another_order)
{
    enum { PARTS = 6 };
    static const int order[PARTS] = {3, 0, 5, 1, 4, 2};
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    t_gpu_call_t part[PARTS];
    colo_ticket_t *ticket[PARTS] = {NULL};
    rank_try(warm_bridge(r, &c, &bridge));
    for (int64_t i = 0; i < PARTS; i++) {
        rank_try(t_gpu_call_make(&part[i], r, &c, 10 + i, i % 3 == 1));
        rank_try(start(&part[i], bridge, &ticket[i]));
    }
    rank_try(t_gpu_pass(r, bridge, &c, 30, true)); /* one without a ticket */
    for (int i = 0; i < PARTS; i++)
        rank_try(colo_ticket_finish(&ticket[order[i]], r->stream));
    for (int i = 0; i < PARTS; i++) {
        rank_try(t_gpu_call_compare(&part[i]));
        t_gpu_call_end(&part[i]);
    }
    return t_gpu_end(r, &bridge);
}

/* ---- graphs ---- */

T_CASE_ON_PEERS(RANKS, graphs_take_calls_in_two_halves)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    t_gpu_call_t part[2];
    colo_ticket_t *ticket[2] = {NULL};
    cudaGraphExec_t exec;
    colo_status_t st = COLO_OK;
    rank_try(warm_bridge(r, &c, &bridge));
    for (int i = 0; i < 2; i++)
        rank_try(t_gpu_call_make(&part[i], r, &c, 0, i == 1));
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 2 && st == COLO_OK; i++)
        st = start(&part[i], bridge, &ticket[i]);
    for (int i = 2; i-- > 0 && st == COLO_OK;)
        st = colo_ticket_finish(&ticket[i], r->stream);
    rank_try(t_gpu_captured(r, st, &exec));
    for (int64_t salt = 40; salt < 50; salt++) {
        for (int i = 0; i < 2; i++)
            rank_try(t_gpu_call_refill(&part[i], salt));
        rank_cuda(cudaGraphLaunch(exec, r->stream));
        for (int i = 0; i < 2; i++)
            rank_try(t_gpu_call_compare(&part[i]));
    }
    for (int i = 0; i < 2; i++)
        t_gpu_call_end(&part[i]);
    rank_try(t_gpu_end(r, &bridge));
    rank_cuda(cudaGraphExecDestroy(exec));
    return COLO_OK;
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/direct_tickets")
