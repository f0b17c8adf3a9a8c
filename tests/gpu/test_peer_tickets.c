/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_peer_tickets.c - calls over peers' memory that are started and finished: the caller's stream
 * is free in between, the values are the oracle's in any order of finishing, and graphs take them.
 */
#include "gpu/gpu_ranks.h"

enum { RANKS = 4 };

static t_case_t the_case(void)
{
    return (t_case_t){.src = t_side("tp=1,dp=4", true),
                      .dst = t_side("tp=1,cp=2,dp=2", false),
                      .shape = {8, 8, 24},
                      .grad = COLO_PARTIAL,
                      .dtype = COLO_BF16,
                      .world = RANKS};
}

/* A call, and its tensors on the device. */
typedef struct part {
    bool backward;
    int64_t salt;
    t_placed_t in, out;
    colo_ticket_t *ticket;
} part_t;

static colo_status_t place(t_gpu_rank_t *r, const t_case_t *c, part_t *p)
{
    rank_try(t_place(r, c, p->backward ? T_DY : T_X, p->salt, true, &p->in));
    return t_place(r, c, p->backward ? T_DX : T_Y, p->salt, false, &p->out);
}

static colo_status_t start(const t_gpu_rank_t *r, colo_bridge_t *bridge, part_t *p)
{
    return p->backward
               ? colo_bridge_backward_start(bridge, &p->in.t, &p->out.t, r->stream, &p->ticket)
               : colo_bridge_forward_start(bridge, &p->in.t, &p->out.t, r->stream, &p->ticket);
}

static colo_status_t compare(t_gpu_rank_t *r, const t_case_t *c, part_t *p)
{
    rank_try(t_download(r, &p->out));
    return t_case_compare(c, p->backward ? T_DX : T_Y, r->rank, p->salt, &p->out.host);
}

static void free_part(part_t *p)
{
    t_placed_free(&p->in);
    t_placed_free(&p->out);
}

/* A bridge whose ranks have compared each pass once, which makes them wait for each other, and that
 * has made its stream. */
static colo_status_t warm_bridge(t_gpu_rank_t *r, const t_case_t *c, colo_bridge_t **bridge)
{
    rank_try(t_gpu_bridge(r, c, bridge));
    for (int pass = 0; pass < 2; pass++) {
        part_t p = {.backward = pass == 1, .salt = 1};
        rank_try(place(r, c, &p));
        rank_try(start(r, *bridge, &p));
        rank_try(colo_bridge_finish(&p.ticket, r->stream));
        rank_try(compare(r, c, &p));
        free_part(&p);
    }
    return t_gpu_quiet(r);
}

/* ---- between start and finish ---- */

/* Rank 0's stream comes to its end while no other rank has started: so it does not wait for the
 * call, which cannot end before the others come. */
static colo_status_t between(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    rank_try(warm_bridge(r, &c, &bridge));
    for (int pass = 0; pass < 2; pass++) {
        part_t p = {.backward = pass == 1, .salt = 5 + pass};
        rank_try(place(r, &c, &p));
        rank_cuda(cudaStreamSynchronize(r->stream));
        if (r->rank == 0) {
            rank_try(start(r, bridge, &p));
            rank_cuda(cudaStreamSynchronize(r->stream));
        }
        rank_try(colo_comm_barrier(r->host, NULL));
        if (r->rank != 0)
            rank_try(start(r, bridge, &p));
        rank_try(colo_bridge_finish(&p.ticket, r->stream));
        rank_try(compare(r, &c, &p));
        free_part(&p);
    }
    (void)arg;
    return t_gpu_end(r, &bridge);
}

T_CASE(the_caller_s_stream_does_not_wait_before_finish)
{
    assert_ok(t_peers_run(RANKS, false, between, NULL, 0));
}

/* ---- several ---- */

static colo_status_t several(t_gpu_rank_t *r, void *arg)
{
    enum { PARTS = 6 };
    static const int order[PARTS] = {3, 0, 5, 1, 4, 2};
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    part_t part[PARTS];
    rank_try(warm_bridge(r, &c, &bridge));
    for (int64_t i = 0; i < PARTS; i++) {
        part[i] = (part_t){.backward = i % 3 == 1, .salt = 10 + i};
        rank_try(place(r, &c, &part[i]));
        rank_try(start(r, bridge, &part[i]));
    }
    rank_try(t_gpu_pass(r, bridge, &c, 30, true)); /* one without a ticket */
    for (int i = 0; i < PARTS; i++)
        rank_try(colo_bridge_finish(&part[order[i]].ticket, r->stream));
    for (int i = 0; i < PARTS; i++) {
        rank_try(compare(r, &c, &part[i]));
        free_part(&part[i]);
    }
    (void)arg;
    return t_gpu_end(r, &bridge);
}

T_CASE(several_calls_are_finished_in_another_order)
{
    assert_ok(t_peers_run(RANKS, false, several, NULL, 0));
}

/* ---- graphs ---- */

static colo_status_t refill(t_gpu_rank_t *r, const t_case_t *c, int64_t salt, part_t *p)
{
    p->salt = salt;
    return t_refill(r, c, p->backward ? T_DY : T_X, salt, &p->in);
}

T_CASE_ON_PEERS(RANKS, graphs_take_calls_in_two_halves)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    part_t part[2] = {{.backward = false}, {.backward = true}};
    cudaGraphExec_t exec;
    colo_status_t st = COLO_OK;
    rank_try(warm_bridge(r, &c, &bridge));
    for (int i = 0; i < 2; i++)
        rank_try(place(r, &c, &part[i]));
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 2 && st == COLO_OK; i++)
        st = start(r, bridge, &part[i]);
    for (int i = 2; i-- > 0 && st == COLO_OK;)
        st = colo_bridge_finish(&part[i].ticket, r->stream);
    rank_try(t_gpu_captured(r, st, &exec));
    for (int64_t salt = 40; salt < 50; salt++) {
        for (int i = 0; i < 2; i++)
            rank_try(refill(r, &c, salt, &part[i]));
        rank_cuda(cudaGraphLaunch(exec, r->stream));
        for (int i = 0; i < 2; i++)
            rank_try(compare(r, &c, &part[i]));
    }
    for (int i = 0; i < 2; i++)
        free_part(&part[i]);
    rank_try(t_gpu_end(r, &bridge));
    rank_cuda(cudaGraphExecDestroy(exec));
    return COLO_OK;
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/peer_tickets")
