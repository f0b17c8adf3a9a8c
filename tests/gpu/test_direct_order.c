/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_direct_order.c - when things happen on the direct path: captured and replayed, back to
 * back with ranks that are late, outputs in turn; ranks that do not come; what is refused. Four
 * ranks on however many GPUs there are.
 */
#include "gpu/gpu_ranks.h"

#include "core/error.h"
#include "core/helper.h"

#include <unistd.h>

enum { RANKS = 4, CASES = 5 };

/* Of the last one two ranks only send and two only receive: a receiver has nothing to wait for but
 * what arrives. In the others each rank does both. */
static t_case_t the_case(int k)
{
    const bool staged = k == CASES - 1;
    return (t_case_t){.src = t_side(staged ? "tp=1,dp=2,pp=2" : "tp=1,dp=4", true),
                      .dst = t_side(staged ? "tp=1,cp=2,pp=2" : "tp=1,cp=2,dp=2", false),
                      .shape = {8, 8, k % 2 ? 24 : 5},
                      .output = k / 2 ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED,
                      .grad = COLO_GRAD_PARTIAL,
                      .dtype = k % 2 ? COLO_BF16 : COLO_F32,
                      .world = RANKS};
}

/* ---- graphs ---- */

/* A graph keeps its shape, whatever shapes its bridge has in between. */
static colo_status_t other_shapes(t_gpu_rank_t *r, colo_bridge_t *bridge, t_case_t c)
{
    for (int64_t i = 1; i <= 6; i++) {
        c.shape.b = 4 * i;
        rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){c.shape.b, c.shape.n, c.shape.h, 0}));
        rank_try(t_gpu_pass(r, bridge, &c, i, false));
    }
    return COLO_OK;
}

T_CASE_ON_PEERS(RANKS, a_captured_step_replays_a_thousand_times)
{
    for (int k = 0; k < CASES; k++) {
        const t_case_t c = the_case(k);
        colo_bridge_t *bridge = NULL;
        T_GPU_STEP(step);
        r->used = 0;
        rank_try(t_gpu_bridge(r, &c, &bridge));
        rank_try(t_gpu_step_capture(&step, r, &c, bridge));
        rank_try(other_shapes(r, bridge, c));
        rank_try(t_gpu_step_replay(&step, t_scaled(1000), 8));
        rank_try(t_gpu_end(r, &bridge));
    }
    return COLO_OK;
}

/* ---- back to back ---- */

/* Nothing but the stream's order: inputs change right after a call, outputs are read right after
 * and written again, two take turns, and every rank is late by some other time. */
T_CASE_ON_PEERS(RANKS, late_ranks_and_reused_tensors_do_no_harm)
{
    enum { DEEP = 12 };
    const int64_t steps = t_scaled(40);
    uint64_t s = t_seed() + 77 * (uint64_t)r->rank;
    for (int k = 0; k < CASES; k++) {
        t_case_t c = the_case(k);
        t_placed_t in, out[2], kept[DEEP], from[DEEP];
        colo_bridge_t *bridge = NULL;
        r->used = 0;
        rank_try(t_gpu_bridge(r, &c, &bridge));
        for (int pass = 0; pass < 2; pass++) {
            const t_role_t reads = pass ? T_DY : T_X, writes = pass ? T_DX : T_Y;
            rank_try(t_place(r, &c, reads, 0, true, &in));
            for (int i = 0; i < 2; i++)
                rank_try(t_place(r, &c, writes, 0, false, &out[i]));
            for (int i = 0; i < DEEP; i++) {
                rank_try(t_place(r, &c, writes, 0, false, &kept[i]));
                rank_try(t_place(r, &c, reads, i, true, &from[i]));
            }
            for (int64_t step = 0; step < steps; step++) {
                for (int i = 0; i < DEEP; i++) {
                    t_placed_t *o = &out[t_below(&s, 2)]; /* ranks choose for themselves */
                    rank_cuda(cudaMemcpyAsync(in.data, from[i].data, in.host.bytes,
                                              cudaMemcpyDeviceToDevice, r->stream));
                    rank_try(t_gpu_late_at_random(r, &s));
                    rank_try(pass ? colo_bridge_backward(bridge, &in.t, &o->t, r->stream)
                                  : colo_bridge_forward(bridge, &in.t, &o->t, r->stream));
                    if (t_below(&s, 2))
                        rank_try(t_gpu_late_at_random(r, &s));
                    rank_cuda(cudaMemcpyAsync(kept[i].data, o->data, o->host.bytes,
                                              cudaMemcpyDeviceToDevice, r->stream));
                }
                for (int i = 0; i < DEEP; i++) {
                    rank_try(t_download(r, &kept[i]));
                    rank_try(t_case_compare(&c, writes, r->rank, i, &kept[i].host));
                }
            }
            t_placed_free(&in);
            for (int i = 0; i < 2; i++)
                t_placed_free(&out[i]);
            for (int i = 0; i < DEEP; i++) {
                t_placed_free(&kept[i]);
                t_placed_free(&from[i]);
            }
        }
        rank_try(t_gpu_end(r, &bridge));
    }
    return COLO_OK;
}

/* ---- a rank that does not come ---- */

typedef struct verdict {
    colo_status_t status;
    char error_message[600];
    double seconds;
} verdict_t;

static colo_status_t one_is_missing(t_gpu_rank_t *r, void *arg)
{
    verdict_t *v = (verdict_t *)arg + r->rank;
    t_case_t c = the_case(0);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(colo_comm_set_timeout(r->gpus, 400));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    for (int i = 0; i < 2; i++) {
        const double since = colo_now();
        if (r->rank != 1 || i == 0) /* rank 1 leaves the second call out */
            rank_try(t_gpu_call_run(&k, bridge, r->stream));
        rank_cuda(cudaStreamSynchronize(r->stream));
        v->seconds = colo_now() - since;
    }
    v->status = colo_comm_check(r->gpus);
    snprintf(v->error_message, sizeof v->error_message, "%s", colo_last_error());
    if (r->rank != 1 && v->status < 0)
        rank_check(t_gpu_call_run(&k, bridge, r->stream) < 0);
    rank_cuda(cudaMemsetAsync(k.out.data, 1, k.out.host.bytes, r->stream)); /* the GPU is well */
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_barrier(r->host, NULL));
    return COLO_OK;
}

static colo_status_t works(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = the_case(2);
    return t_gpu_case(r, &c);
}

T_CASE(a_rank_that_does_not_come_is_a_timeout_and_the_gpu_is_well)
{
    verdict_t v[RANKS] = {{0}};
    assert_ok(t_peers_run(RANKS, false, one_is_missing, v, sizeof v));
    int timeouts = 0;
    for (int k = 0; k < RANKS; k++) {
        if (v[k].seconds > 5)
            fail_msg("rank %d waited %g s", k, v[k].seconds);
        timeouts += v[k].status == COLO_ERR_TIMEOUT;
        if (v[k].status == COLO_ERR_TIMEOUT &&
            (!strstr(v[k].error_message,
                     "bridge forward: waited 400 ms for rank 1 (world rank 1)") ||
             !strstr(v[k].error_message, "call 2 of the pair")))
            fail_msg("rank %d: %s", k, v[k].error_message);
    }
    assert_true(timeouts >= 1); /* ranks that depend on rank 1; others had what they wanted */
    assert_ok(t_peers_run(RANKS, false, works, NULL, 0));
}

/* Deadlines of partners that come one after the other do not add up, for boxes that are moved and
 * for those that are read and added: rank 1 comes at 0.7 of it, rank 2 at 1.4, rank 3 never. */
enum { DEADLINE_MS = 300 };
typedef struct gone {
    bool backward;
    double seconds;
    char error_message[600];
} gone_t;

static colo_status_t come_in_turn(t_gpu_rank_t *r, void *arg)
{
    gone_t *v = arg;
    t_case_t c = t_between("tp=1,dp=4", "tp=1,cp=4,dp=1", 4, 64, 512); /* all ranks with all */
    c.grad = v->backward ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
    c.output = v->backward ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
    c.dtype = COLO_F32;
    c.world = RANKS;
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_call_make(&k, r, &c, 0, v->backward));
    for (int i = 0; i < 2; i++) {
        rank_cuda(cudaStreamSynchronize(r->stream));
        rank_try(colo_comm_barrier(r->host, NULL));
        rank_try(colo_comm_set_timeout(r->gpus, i ? DEADLINE_MS : 20000));
        usleep((useconds_t)(i * r->rank % 3 * DEADLINE_MS * 700));
        const double since = colo_now();
        if (i == 0 || r->rank != 3)
            (void)t_gpu_call_run(&k, bridge, r->stream);
        rank_cuda(cudaStreamSynchronize(r->stream));
        if (i == 1 && r->rank == 0)
            v->seconds = colo_now() - since;
        rank_try(i == 0 ? colo_comm_check(r->gpus) : COLO_OK);
    }
    if (r->rank == 0 && colo_comm_check(r->gpus) < 0)
        snprintf(v->error_message, sizeof v->error_message, "%s", colo_last_error());
    rank_try(colo_comm_barrier(r->host, NULL));
    return COLO_OK;
}

static void partners_in_turn(bool backward)
{
    gone_t v = {.backward = backward};
    setenv("COLO_PEER_BLOCKS", backward ? "128" : "1", 1); /* with kernel wait_first and without */
    const colo_status_t st = t_peers_run(RANKS, false, come_in_turn, &v, sizeof v);
    unsetenv("COLO_PEER_BLOCKS");
    assert_ok(st);
    if (!strstr(v.error_message, "waited 300 ms for rank ") ||
        strstr(v.error_message, "for rank 1 ") || v.seconds > 2e-3 * DEADLINE_MS)
        fail_msg("rank 0 waited %g s: %s", v.seconds, v.error_message);
}

T_CASE(partners_that_come_one_after_the_other_share_a_deadline)
{
    partners_in_turn(false);
}

T_CASE(addends_that_come_one_after_the_other_share_a_deadline)
{
    partners_in_turn(true);
}

static colo_status_t aborted(t_gpu_rank_t *r, void *arg)
{
    verdict_t *v = (verdict_t *)arg + r->rank;
    t_case_t c = the_case(0);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    rank_try(t_gpu_call_run(&k, bridge, r->stream)); /* the host waits in the first */
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_barrier(r->host, NULL));
    if (r->rank == 1) {
        usleep(100000);
        colo_comm_abort(r->gpus, "test");
    } else {
        rank_try(t_gpu_call_run(&k, bridge, r->stream));
        for (int i = 0; i < 1000 && (v->status = colo_comm_check(r->gpus)) == COLO_OK; i++)
            usleep(10000);
        rank_cuda(cudaStreamSynchronize(r->stream)); /* 20 s is the deadline of the wait */
    }
    usleep(200000); /* an abort is of every comm of the world: no barrier any more */
    return COLO_OK;
}

T_CASE(an_abort_ends_waits)
{
    verdict_t v[RANKS] = {{0}};
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    (void)t_peers_run(RANKS, false, aborted, v, sizeof v);
    clock_gettime(CLOCK_MONOTONIC, &b);
    for (int k = 0; k < RANKS; k++)
        if (k != 1 && v[k].status != COLO_ERR_ABORTED && v[k].status != COLO_ERR_PEER)
            fail_msg("rank %d: %s", k, colo_status_name(v[k].status));
    assert_true(b.tv_sec - a.tv_sec < 15);
}

/* ---- what is registered ---- */

T_CASE_ON_BARE_PEERS(RANKS, memory_is_registered_found_and_refused)
{
    colo_memory_t *a = NULL, *b = NULL;
    char *block = NULL, host[64];
    rank_cuda(cudaMalloc((void **)&block, 1 << 20));
    rank_try(colo_memory_register(r->gpus, block + 512, 4096, &a)); /* a part of a block */
    rank_check(colo_memory_is_p2p(a) && colo_memory_data(a) == block + 512);
    rank_check(colo_memory_bytes(a) == 4096);
    rank_check(colo_memory_find(r->gpus, block + 512, 4096));
    rank_check(colo_memory_find(r->gpus, block + 4000, 608));
    rank_check(!colo_memory_find(r->gpus, block + 4000, 609));
    rank_check(!colo_memory_find(r->gpus, block + 511, 2));
    rank_try(colo_memory_alloc(r->gpus, r->rank == 2 ? 0 : 1000, &b)); /* one brings none */
    rank_check(colo_memory_bytes(b) == (r->rank == 2 ? 0u : 1024u));
    rank_check(r->rank == 2 || colo_memory_find(r->gpus, colo_memory_data(b), 1024));
    colo_memory_destroy(&b);
    rank_check(!b);
    colo_memory_t *none = NULL;
    colo_status_t st = colo_memory_register(r->gpus, r->rank == 1 ? host : block, 64, &none);
    rank_check(st == (r->rank == 1 ? COLO_ERR_ARG : COLO_ERR_PEER) && !none);
    rank_check(strstr(colo_last_error(), "host memory"));
    st = colo_memory_register(r->gpus, block + 512, 1 << 20, &none);
    rank_check(st == COLO_ERR_ARG && strstr(colo_last_error(), "512 bytes past"));
    st = colo_memory_register(r->gpus, r->rank == 3 ? NULL : block, 64, &none);
    rank_check(st == (r->rank == 3 ? COLO_ERR_ARG : COLO_ERR_PEER));
    rank_try(colo_comm_check(r->gpus)); /* it lives */
    rank_try(colo_memory_register(r->gpus, block, 64, &none));
    colo_memory_destroy(&none);
    colo_memory_destroy(&a);
    rank_check(!colo_memory_find(r->gpus, block + 512, 1));
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaFree(block));
    return COLO_OK;
}

/* Rank 0 captures its stream, in the mode that forbids all threads to allocate and free. */
T_CASE_ON_BARE_PEERS(RANKS, memory_and_bridges_come_and_go_while_a_stream_is_captured)
{
    t_case_t c = the_case(0);
    colo_memory_t *memory = NULL;
    colo_bridge_t *bridge = NULL;
    cudaGraph_t graph = NULL;
    if (r->rank == 0)
        rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeGlobal));
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &memory));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(&bridge);
    colo_memory_destroy(&memory);
    rank_try(colo_comm_barrier(r->host, NULL));
    if (r->rank == 0) {
        rank_cuda(cudaStreamEndCapture(r->stream, &graph));
        rank_cuda(cudaGraphDestroy(graph));
    }
    return COLO_OK;
}

/* Registered parts of one block, several of them, in use by turns; then unregistered. */
T_CASE_ON_BARE_PEERS(RANKS, parts_of_one_block_may_be_registered)
{
    enum { PARTS = 3, PART = 1 << 16 };
    colo_memory_t *m[PARTS] = {NULL};
    char *block = NULL;
    rank_cuda(cudaMalloc((void **)&block, (PARTS + 1) * PART));
    for (int i = 0; i < PARTS; i++) /* each rank at a place of its own */
        rank_try(
            colo_memory_register(r->gpus, block + i * PART + 256 * r->rank, PART - 1024, &m[i]));
    t_case_t c = the_case(0);
    for (int i = 0; i < PARTS; i++) {
        t_gpu_lie_in(r, m[(i + r->rank) % PARTS]); /* not the same number everywhere */
        rank_try(t_gpu_case(r, &c));
    }
    for (int i = 0; i < PARTS; i++)
        colo_memory_destroy(&m[i]);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaFree(block));
    return COLO_OK;
}

/* ---- COLO_TRANSPORT and tensors that are not registered ---- */

static colo_status_t unregistered(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = the_case(0);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    void *other = NULL;
    rank_cuda(cudaMalloc(&other, 1 << 16));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    rank_try(t_gpu_call_run(&k, bridge, r->stream));
    rank_try(t_gpu_call_compare(&k));
    colo_tensor_t away = k.out.t;
    away.data = other;
    rank_try(colo_comm_set_check(r->gpus, 2));
    /* at COLO_CHECK=2 all ranks hear of it and nothing has moved */
    colo_status_t st =
        colo_bridge_forward(bridge, &k.in.t, r->rank == 1 ? &away : &k.out.t, r->stream);
    rank_check(st == (r->rank == 1 ? COLO_ERR_ARG : COLO_ERR_PEER));
    rank_check(strstr(colo_last_error(), "is not registered over comm"));
    rank_try(colo_comm_check(r->gpus));
    rank_try(colo_comm_barrier(r->host, NULL)); /* what follows fails the comm */
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    rank_try(colo_comm_set_check(r->gpus, 1));
    st = colo_bridge_forward(bridge, &k.in.t, &away, r->stream);
    cudaGraph_t graph;
    rank_cuda(cudaStreamEndCapture(r->stream, &graph));
    rank_cuda(cudaGraphDestroy(graph));
    rank_check(st == COLO_ERR_ARG || st == COLO_ERR_PEER);
    (void)colo_comm_barrier(r->host, NULL);
    return COLO_OK;
}

T_CASE(a_tensor_that_is_not_registered_is_refused_where_peer_is_asked_for)
{
    setenv("COLO_TRANSPORT", "peer", 1);
    colo_status_t st = t_peers_run(RANKS, false, unregistered, NULL, 0);
    unsetenv("COLO_TRANSPORT");
    assert_ok(st);
}

T_CASE_ON_PEERS(RANKS, registered_on_some_ranks_only_is_a_mismatch_at_check_2)
{
    t_case_t c = the_case(0);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    void *other = NULL;
    rank_cuda(cudaMalloc(&other, 1 << 16));
    c.check = 2;
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_call_make(&k, r, &c, 0, false));
    colo_tensor_t away = k.out.t;
    away.data = other;
    colo_status_t st =
        colo_bridge_forward(bridge, &k.in.t, r->rank == 1 ? &away : &k.out.t, r->stream);
    rank_check(st == COLO_ERR_MISMATCH);
    rank_try(t_gpu_call_run(&k, bridge, r->stream));
    rank_try(t_gpu_call_compare(&k));
    rank_try(colo_comm_barrier(r->host, NULL));
    return COLO_OK;
}

static colo_status_t wrong_word(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = the_case(0);
    colo_bridge_t *bridge = NULL;
    if (r->rank == 0) /* only now: or there would be no communicator */
        setenv("COLO_TRANSPORT", "pear", 1);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_check(t_gpu_bridge(r, &c, &bridge) == COLO_ERR_ARG && !bridge);
    rank_check(
        strstr(colo_last_error(), "COLO_TRANSPORT is 'pear', expected auto, nccl, peer or ucx"));
    return colo_comm_check(r->gpus);
}

T_CASE(an_unknown_transport_is_refused)
{
    colo_status_t st = t_peers_run(RANKS, true, wrong_word, NULL, 0);
    unsetenv("COLO_TRANSPORT");
    assert_ok(st);
}

T_MAIN_IF(t_peers_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/direct_order")
