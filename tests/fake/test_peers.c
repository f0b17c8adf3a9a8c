/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_peers.c - peer memory where a GPU does not say: a device that others do not reach, as many
 * registrations as there are numbers, memory of lists that serves again, what a warm call asks the
 * runtime and the allocator, a launch that fails, an answer that CUDA owes, an allocator of the
 * caller's.
 */
#include "processes.h"

#include "gpu/gpu_ranks.h"
#include "gpu/ragged_gpu.h"
#include "harness/allocations.h"

#include "comm/comm.h"

#include <malloc.h>
#include <unistd.h>

enum { RANKS = 4, LOST = 2, MOST = 256 };

static t_case_t the_case(void)
{
    return T_BETWEEN("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 4, .output = COLO_OUTPUT_FULL_SEQ,
                     .grad = COLO_GRAD_PARTIAL, .dtype = COLO_F32);
}

/* ---- a device out of reach ---- */

static colo_status_t one_is_lost(t_gpu_rank_t *r, void *arg)
{
    const char *words = arg;
    const t_case_t c = the_case();
    for (int32_t a = 0; a < RANKS; a++)
        for (int32_t b = 0; b < RANKS; b++)
            rank_check(r->gpus->backend->direct->reaches(r->gpus, a, b) ==
                       (a == b || (a != LOST && b != LOST)));
    rank_check(!r->gpus->backend->direct->reaches(r->gpus, -1, -1));
    rank_check(strstr(r->gpus->backend->direct->why(r->gpus), words));
    r->arena = NULL; /* by NCCL */
    return t_gpu_case(r, &c);
}

static colo_status_t with_memory(t_gpu_rank_t *r, void *arg)
{
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &r->memory));
    return one_is_lost(r, arg);
}

T_CASE(a_device_that_no_other_one_reaches_is_known_to_all_ranks)
{
    char asked[] = "CUDA reports no peer access", enabled[] = "peer access is not supported";
    fake_lose_device(LOST, false);
    assert_ok(t_gpus_run(RANKS, false, with_memory, asked));
    fake_lose_device(LOST, true);
    assert_ok(t_gpus_run(RANKS, false, with_memory, enabled));
    fake_lose_device(-1, false);
}

/* What CUDA does not answer is no. */
static colo_status_t not_answered(t_gpu_rank_t *r, void *arg)
{
    if (r->rank == 1)
        fake_fail_name(r->device, "cudaDeviceCanAccessPeer"); /* asks for rank 0 first */
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &r->memory));
    rank_check(!r->gpus->backend->direct->reaches(r->gpus, 0, 1));
    rank_check(r->gpus->backend->direct->reaches(r->gpus, 1, 2));
    rank_check(r->rank > 0 || strstr(r->gpus->backend->direct->why(r->gpus), "has not arrived"));
    return COLO_OK;
}

T_CASE(a_device_that_cuda_does_not_answer_for_is_not_reached)
{
    fake_leave_words(COLO_K_TRIAL); /* as an earlier trial does */
    assert_ok(t_gpus_run(RANKS, false, not_answered, NULL));
    fake_leave_words(0);
}

/* ---- a rank that writes when the others have given up ---- */

static colo_status_t comes_late(t_gpu_rank_t *r, void *arg)
{
    rank_try(colo_comm_set_timeout(r->gpus, 50));
    if (r->rank == 0)
        fake_delay(r->device, "colo_k_direct_try", 0.4);
    rank_check(colo_memory_alloc(r->gpus, 1 << 16, &r->memory) < 0 && !r->memory);
    return COLO_OK;
}

T_CASE(a_rank_that_tries_late_writes_into_no_memory_that_was_freed)
{
    const int64_t misuse = fake_misuse();
    assert_ok(t_gpus_run(RANKS, false, comes_late, NULL));
    assert_int_equal(fake_misuse(), misuse);
}

/* ---- an error when ranks have opened each other's memory ---- */

static colo_status_t be_processes(t_gpu_rank_t *r)
{
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &r->memory));
    return fake_be_processes(r->gpus, r->host, LOST);
}

static colo_status_t fails_to_register(t_gpu_rank_t *r, void *arg)
{
    colo_memory_t *memory = NULL;
    rank_try(be_processes(r));
    if (r->rank == 1)
        fake_fail_name(r->device, "cudaMemcpy2DAsync");
    const colo_status_t st = colo_memory_alloc(r->gpus, 4096, &memory);
    rank_check(st == (r->rank == 1 ? COLO_ERR_CUDA : COLO_ERR_PEER) && !memory);
    rank_check(says("register: CUDA says"));
    return colo_comm_check(r->gpus);
}

static colo_status_t fails_to_connect(t_gpu_rank_t *r, void *arg)
{
    colo_direct_launcher_t *path = NULL;
    int32_t others[RANKS];
    for (int32_t k = 1; k < RANKS; k++)
        others[k - 1] = (r->rank + k) % RANKS;
    const colo_transfers_t pass[2] = {
        {.name = "a pass", .elem = 1, .nexposed = RANKS - 1, .exposed = others}, {.name = "none"}};
    rank_try(be_processes(r));
    if (r->rank == 1)
        fake_fail_name(r->device, "cudaEventCreateWithFlags");
    const colo_status_t st = r->gpus->backend->direct->create(r->gpus, pass, &path);
    rank_check(st == (r->rank == 1 ? COLO_ERR_CUDA : COLO_ERR_PEER) && !path);
    colo_memory_destroy(&r->memory);
    colo_comm_destroy(&r->gpus); /* frees mailboxes */
    return COLO_OK;
}

T_CASE(memory_that_others_have_open_is_not_freed_behind_an_error)
{
    const int64_t misuse = fake_misuse(), memory = fake_live(FAKE_MEMORY);
    assert_ok(t_gpus_run(RANKS, false, fails_to_register, NULL));
    assert_ok(t_gpus_run(RANKS, false, fails_to_connect, NULL));
    assert_int_equal(fake_misuse(), misuse);
    assert_int_equal(fake_live(FAKE_MEMORY), memory);
}

/* ---- memory where older memory was, which others have still open ---- */

static colo_status_t opens_anew(t_gpu_rank_t *r, void *arg)
{
    const int64_t *misuse = arg;
    const t_case_t c = the_case();
    colo_memory_t *older = NULL, *newer = NULL, *again = NULL;
    char *block = NULL;
    rank_try(be_processes(r));
    const int64_t open = fake_live(FAKE_OPENED);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaMalloc((void **)&block, 8192));
    rank_try(colo_memory_register(r->gpus, block, 8192, &older));
    if (r->rank == 1 || r->rank == 2) /* keep theirs */
        rank_try(colo_comm_barrier(r->host, NULL));
    else {
        colo_memory_destroy(&older);
        rank_try(colo_comm_barrier(r->host, NULL));
        fake_remake(block, 4096);
    }
    rank_try(colo_memory_register(r->gpus, block, 4096, &newer));
    rank_try(colo_memory_register(r->gpus, block, 4096, &again)); /* of the same extent */
    rank_check(colo_memory_is_p2p(newer) && colo_memory_is_p2p(again));
    colo_memory_destroy(&older);
    colo_memory_destroy(&again);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_check(fake_live(FAKE_OPENED) == open + RANKS * (RANKS - 1) && fake_misuse() == *misuse);
    t_gpu_lie_in(r, newer);
    rank_try(t_gpu_case(r, &c));
    colo_memory_destroy(&newer);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_check(fake_live(FAKE_OPENED) == open);
    rank_cuda(cudaFree(block));
    return COLO_OK;
}

T_CASE(memory_is_opened_where_a_rank_has_older_memory_open_that_was_freed)
{
    int64_t misuse = fake_misuse();
    assert_ok(t_gpus_run(RANKS, false, opens_anew, &misuse));
}

/* ---- another device is current ---- */

T_CASE_ON_GPUS(RANKS, memory_on_a_device_that_is_not_the_comm_s_is_refused)
{
    for (int i = 0; i < 2; i++) { /* before and after the comm knows whom it reaches */
        colo_memory_t *none = NULL;
        const int device = r->rank == 1 ? 3 : r->device;
        rank_cuda(cudaSetDevice(device));
        const colo_status_t st = colo_memory_alloc(r->gpus, 1 << 16, &none);
        rank_check(st == (r->rank == 1 ? COLO_ERR_ARG : COLO_ERR_PEER) && !none);
        rank_check(says("the current device is 3, comm"));
        rank_cuda(cudaSetDevice(r->device));
        rank_try(colo_comm_check(r->gpus));
        if (i == 0)
            rank_try(colo_memory_alloc(r->gpus, 1 << 16, &r->memory));
    }
    return COLO_OK;
}

/* ---- numbers of registrations ---- */

T_CASE_ON_GPUS(RANKS, a_comm_registers_256_memories_and_refuses_one_more)
{
    colo_memory_t *m[MOST] = {NULL}, *more = NULL;
    const t_case_t c = the_case();
    char *block = NULL;
    rank_cuda(cudaMalloc((void **)&block, MOST << 12));
    for (int i = 0; i < MOST; i++)
        rank_try(colo_memory_register(r->gpus, block + ((size_t)i << 12), 1 << 12, &m[i]));
    rank_check(colo_memory_register(r->gpus, block, 64, &more) == COLO_ERR_STATE && !more);
    rank_check(says("256 memories are registered"));
    rank_try(colo_comm_check(r->gpus));
    colo_memory_destroy(&m[7]);
    rank_try(colo_memory_register(r->gpus, block + (7 << 12), 1 << 12, &m[7]));
    for (int i = 0; i < MOST; i += MOST - 1) { /* the first number and the last one */
        t_gpu_lie_in(r, m[i]);
        rank_try(t_gpu_case(r, &c));
    }
    for (int i = 0; i < MOST; i++)
        colo_memory_destroy(&m[i]);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_cuda(cudaFree(block));
    return COLO_OK;
}

/* ---- memory behind its comm ---- */

static colo_status_t outlives(t_gpu_rank_t *r, void *arg)
{
    colo_comm_t *group = NULL;
    colo_memory_t *memory = NULL;
    rank_try(colo_comm_barrier(r->host, NULL));
    const int64_t before = fake_live(FAKE_MEMORY);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_try(colo_comm_split_color(r->gpus, 0, r->rank, &group));
    rank_try(colo_memory_alloc(group, 4096, &memory));
    rank_check(colo_memory_is_p2p(memory));
    colo_comm_destroy(&group);
    colo_memory_destroy(&memory);
    rank_try(colo_comm_barrier(r->host, NULL));
    rank_check(fake_live(FAKE_MEMORY) == before);
    return colo_comm_barrier(r->host, NULL);
}

T_CASE(memory_whose_comm_was_destroyed_is_given_back)
{
    mallopt(M_PERTURB, 1); /* what was freed holds other values */
    assert_ok(t_gpus_run(RANKS, false, outlives, NULL));
    mallopt(M_PERTURB, 0);
}

/* ---- lists of boxes ---- */

T_CASE_ON_GPUS(RANKS, memory_of_a_shape_s_lists_serves_the_next_shapes)
{
    t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    int64_t first = 0;
    rank_try(t_gpu_register(r, 1 << 20));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    for (int64_t i = 1; i <= 30; i++) {
        c.shape.b = 4 * (1 + i % 5);
        r->used = 0;
        rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){c.shape.b, c.shape.n, c.shape.h, 0}));
        rank_try(t_gpu_pass(r, bridge, &c, i, false));
        rank_try(t_gpu_pass(r, bridge, &c, i, true));
        rank_cuda(cudaDeviceSynchronize()); /* lists are idle */
        rank_try(colo_comm_barrier(r->host, NULL));
        const int64_t now = fake_live(FAKE_MEMORY) + fake_live(FAKE_PINNED);
        rank_try(colo_comm_barrier(r->host, NULL));
        first = i == 5 ? now : first;
        rank_check(i < 5 || now == first);
    }
    return t_gpu_end(r, &bridge);
}

/* ---- captures ---- */

/* A captured forward of tensors that are not registered, which every rank refuses; @told: one that
 * could have captured it. */
static colo_status_t refused_capture(t_gpu_rank_t *r, colo_bridge_t *bridge, const t_case_t *c,
                                     bool told)
{
    cudaGraph_t graph;
    T_GPU_CALL(k);
    rank_try(t_gpu_call_make(&k, r, c, 2, false));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    const colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    const char *why = t_text("%s", st < 0 ? colo_last_error() : "it was captured");
    rank_cuda(cudaStreamEndCapture(r->stream, &graph));
    rank_cuda(cudaGraphDestroy(graph));
    if ((st != COLO_ERR_STATE && st != COLO_ERR_PEER) || (told && st != COLO_ERR_PEER) ||
        !strstr(why, "the first staged call of a shape"))
        return colo_fail(COLO_ERR_STATE, "rank %d: %s: %s", (int)r->rank, colo_status_name(st),
                         why);
    return t_gpu_pass(r, bridge, c, 3, false); /* the comm lives */
}

/* The larger shape has more to stage on some ranks, and as much as before on rank 0. */
T_CASE_ON_GPUS(RANKS, a_staged_call_that_some_ranks_cannot_capture_is_refused_on_all)
{
    t_case_t c = T_BETWEEN("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 64, .output = COLO_OUTPUT_SHARDED,
                           .grad = COLO_GRAD_DISJOINT, .dtype = COLO_F32);
    colo_memory_t *memory = NULL;
    colo_bridge_t *bridge = NULL;
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &memory)); /* tensors lie elsewhere */
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false));
    c.shape.b = 9;
    rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){c.shape.b, c.shape.n, c.shape.h, 0}));
    rank_try(refused_capture(r, bridge, &c, r->rank == 0));
    rank_try(t_gpu_end(r, &bridge));
    colo_memory_destroy(&memory);
    return COLO_OK;
}

/* Ranks 2 and 3, which do not reach each other, connect at create; 0 and 1 at a staged call. */
static colo_status_t some_are_connected(t_gpu_rank_t *r, void *arg)
{
    const t_case_t c = T_BETWEEN("dp=4", "tp=1,cp=2,dp=2", 4, 8, 64, .output = COLO_OUTPUT_SHARDED,
                                 .grad = COLO_GRAD_DISJOINT, .dtype = COLO_F32);
    colo_memory_t *memory = NULL;
    colo_bridge_t *bridge = NULL;
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &memory));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(refused_capture(r, bridge, &c, r->rank >= 2));
    rank_try(t_gpu_end(r, &bridge));
    colo_memory_destroy(&memory);
    return COLO_OK;
}

T_CASE(a_staged_call_that_connected_ranks_could_capture_is_refused_on_all)
{
    fake_lose_device(LOST, false);
    assert_ok(t_gpus_run(RANKS, false, some_are_connected, NULL));
    fake_lose_device(-1, false);
}

/* What ranks out of each other's reach stage in a call that is direct for others is there after a
 * reshape, which may leave some of them as much as before. */
static colo_status_t captures_a_larger_shape(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = T_BETWEEN("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 64, .output = COLO_OUTPUT_SHARDED,
                           .grad = COLO_GRAD_DISJOINT, .dtype = COLO_F32);
    colo_bridge_t *bridge = NULL;
    cudaGraphExec_t exec;
    T_GPU_CALL(k);
    rank_try(t_gpu_register(r, 1 << 20));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false));
    c.shape.b = 9;
    r->used = 0;
    rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){c.shape.b, c.shape.n, c.shape.h, 0}));
    rank_try(t_gpu_call_make(&k, r, &c, 2, false));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    rank_try(t_gpu_captured(r, t_gpu_call_run(&k, bridge, r->stream), &exec));
    rank_cuda(cudaGraphLaunch(exec, r->stream));
    rank_try(t_gpu_call_compare(&k));
    rank_cuda(cudaGraphExecDestroy(exec));
    return t_gpu_end(r, &bridge);
}

T_CASE(a_direct_call_of_a_larger_shape_is_captured_where_ranks_are_out_of_reach)
{
    fake_lose_device(LOST, false);
    assert_ok(t_gpus_run(RANKS, false, captures_a_larger_shape, NULL));
    fake_lose_device(-1, false);
}

/* Tensors are registered, and the comm carries between the ranks that have rows. */
static colo_status_t has_all_of_max_rows(t_gpu_rank_t *r, void *arg)
{
    rank_try(t_gpu_register(r, 1 << 20));
    return t_ragged_outstanding(r, &(bool){true});
}

T_CASE(max_rows_is_reserved_for_direct_calls_where_ranks_are_out_of_reach)
{
    fake_lose_device(1, false);
    assert_ok(t_gpus_run(RANKS, false, has_all_of_max_rows, NULL));
    fake_lose_device(-1, false);
}

/* ---- calls of the runtime ---- */

enum { CALLS = 7 }; /* of the device, the stream (2), a pointer (2), a launch, an event */

T_CASE_ON_GPUS(RANKS, a_warm_call_of_a_bridge_asks_the_runtime_nothing_twice)
{
    const t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    rank_try(t_gpu_register(r, 1 << 20));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    for (int back = 0; back < 2; back++) {
        T_GPU_CALL(k);
        rank_try(t_gpu_pass(r, bridge, &c, 1, back));
        rank_try(t_gpu_call_make(&k, r, &c, 2, back));
        const int64_t before = fake_calls(r->device);
        rank_try(t_gpu_call_run(&k, bridge, r->stream));
        const int64_t calls = fake_calls(r->device) - before;
        if (calls != CALLS)
            return colo_fail(COLO_ERR_STATE, "%lld calls of the runtime, expected %d",
                             (long long)calls, CALLS);
        rank_try(t_gpu_quiet(r));
    }
    return t_gpu_end(r, &bridge);
}

#ifndef SANITIZED
/* The fake itself, as CUDA and NCCL, has what it needs. */
static bool is_of_the_fake(const void *caller)
{
    Dl_info of;
    return dladdr(caller, &of) && strstr(of.dli_fname, "libnccl");
}

static colo_status_t allocates_nothing(t_gpu_rank_t *r, void *arg)
{
    enum { TENSORS = 3, FAR_AWAY = 1 << 20 };
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    colo_bridge_t *bridge = NULL;
    colo_batch_t *batch = NULL;
    colo_tensor_t t[T_FOUR][TENSORS];
    int64_t rows[2];
    t_ragged_t c;
    rank_try(t_gpu_register(r, 1 << 20));
    const t_ragged_where_t w = t_where(r);
    const t_ragged_options_t o = {.tensors = TENSORS, .where = &w};
    t_ragged_uniform(&c, &src, &dst, (ref_shape_t){4, 8, 6});
    c.c.full = c.c.partial = true;
    rank_try(t_ragged_bridge(&bridge, &c, &o, r->gpus));
    const colo_segments_t s = t_ragged_segments(&c);
    rank_try(colo_bridge_set_segments(bridge, &s, &batch));
    colo_bridge_rows(bridge, &rows[0], &rows[1]);
    for (int i = 0; i < T_FOUR; i++)
        for (int k = 0; k < TENSORS; k++)
            rank_try(t_random_rows(&w, rows[i == T_Y2 || i == T_DY2], c.c.h, 1, &t[i][k]));
    for (int warm = 0; warm < 2; warm++) {
        rank_try(t_gpu_quiet(r));
        fail_at = FAR_AWAY;
        rank_try(colo_batch_forward(batch, t[T_X2], t[T_Y2], TENSORS, r->stream));
        rank_try(colo_batch_backward(batch, t[T_DY2], t[T_DX2], TENSORS, r->stream));
        const long left = fail_at;
        fail_at = 0;
        if (warm && left != FAR_AWAY)
            return colo_fail(COLO_ERR_STATE, "%ld allocations", FAR_AWAY - left);
    }
    rank_try(t_gpu_quiet(r));
    colo_batch_destroy(&batch);
    t_ragged_free(&c);
    return t_gpu_end(r, &bridge);
}

T_CASE(a_warm_call_of_several_tensors_allocates_nothing)
{
    spared = is_of_the_fake;
    assert_ok(t_gpus_run(RANKS, false, allocates_nothing, NULL));
}

/* Rows that are wider than those before, so that the batch is listed again; on one rank there is no
 * memory for that at first. */
static colo_status_t lists_again(t_gpu_rank_t *r, void *arg)
{
    enum { WIDER = 4 };
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    T_ENDS(t_ragged_free) t_ragged_t c;
    colo_bridge_t *bridge = NULL;
    colo_batch_t *batch = NULL, *other = NULL;
    colo_tensor_t x, y, again, wide_x, wide_y;
    int64_t rows[2];
    (void)arg;
    rank_try(t_gpu_register(r, 1 << 20));
    rank_try(colo_comm_set_check(r->gpus, 2)); /* an error is told, and the comm lives on */
    const t_ragged_where_t w = t_where(r);
    const t_ragged_options_t o = {.tensors = 1, .where = &w};
    t_ragged_uniform(&c, &src, &dst, (ref_shape_t){4, 8, 6});
    rank_try(t_ragged_bridge(&bridge, &c, &o, r->gpus));
    const colo_segments_t s = t_ragged_segments(&c);
    rank_try(colo_bridge_set_segments(bridge, &s, &batch));
    colo_bridge_rows(bridge, &rows[0], &rows[1]);
    rank_try(t_random_rows(&w, rows[0], c.c.h, 1, &x));
    rank_try(t_random_rows(&w, rows[1], c.c.h, 2, &y));
    rank_try(t_random_rows(&w, rows[0], WIDER * c.c.h, 3, &wide_x));
    rank_try(t_random_rows(&w, rows[1], WIDER * c.c.h, 4, &wide_y));
    rank_try(t_random_rows(&w, rows[1], WIDER * c.c.h, 5, &again));
    rank_try(t_gpu_quiet(r));
    rank_try(colo_batch_forward(batch, &x, &y, 1, r->stream));
    rank_try(t_gpu_quiet(r));
    fail_at = r->rank == 1;
    const colo_status_t st = colo_batch_forward(batch, &wide_x, &wide_y, 1, r->stream);
    rank_check(fail_at == 0);
    rank_check(st == (r->rank == 1 ? COLO_ERR_NOMEM : COLO_ERR_PEER));
    rank_try(colo_batch_forward(batch, &wide_x, &wide_y, 1, r->stream));
    rank_try(colo_bridge_set_segments(bridge, &s, &other));
    rank_try(colo_batch_forward(other, &wide_x, &again, 1, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_try(t_same_bits(&w, &wide_y, &again));
    colo_batch_destroy(&batch);
    colo_batch_destroy(&other);
    return t_gpu_end(r, &bridge);
}

T_CASE(a_batch_whose_listing_failed_is_listed_by_its_next_call)
{
    spared = is_of_the_fake;
    assert_ok(t_gpus_run(RANKS, false, lists_again, NULL));
}
#endif

/* ---- two streams with one handle ---- */

struct backward {
    t_gpu_rank_t *r;
    colo_bridge_t *bridge;
    cudaStream_t stream;
    int64_t salt, calls; /* calls: of the runtime, out */
    colo_status_t st;
};

static colo_status_t backward_on(struct backward *t)
{
    t_gpu_rank_t *r = t->r;
    const t_case_t c = the_case();
    T_GPU_CALL(k);
    rank_cuda(cudaSetDevice(r->device));
    rank_try(t_gpu_call_make(&k, r, &c, t->salt, true));
    rank_cuda(cudaStreamSynchronize(r->stream));
    t->calls = -fake_calls(r->device);
    rank_try(t_gpu_call_run(&k, t->bridge, t->stream));
    t->calls += fake_calls(r->device);
    rank_cuda(cudaStreamSynchronize(t->stream));
    return t_gpu_call_compare(&k);
}

static void *own_thread(void *arg)
{
    struct backward *t = arg;
    t->st = backward_on(t);
    return NULL;
}

/* A call behind one on another stream waits for it; whether the handle is another one or not. */
T_CASE_ON_GPUS(RANKS, calls_of_a_bridge_by_two_threads_on_their_own_streams_follow_each_other)
{
    enum { CALLERS = 5 };
    const t_case_t c = the_case();
    struct backward calls[CALLERS] = {{0}};
    cudaStream_t other;
    colo_bridge_t *bridge = NULL;
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (int i = 0; i < CALLERS; i++) {
        struct backward *t = &calls[i];
        pthread_t thread;
        *t = (struct backward){
            r, bridge, i < 3 ? (i == 1 ? other : r->stream) : cudaStreamPerThread, i, 0, COLO_OK};
        rank_check(pthread_create(&thread, NULL, own_thread, t) == 0);
        pthread_join(thread, NULL);
        rank_try(t->st);
        if (i > 2 && t->calls != calls[2].calls)
            return colo_fail(COLO_ERR_STATE, "call %d: %lld calls of the runtime, expected %lld", i,
                             (long long)t->calls, (long long)calls[2].calls);
    }
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamDestroy(other));
    return t_gpu_end(r, &bridge);
}

/* @st, or the error of the comm within a second. */
static colo_status_t await_error(const t_gpu_rank_t *r, colo_status_t st)
{
    for (int i = 0; st == COLO_OK && i < 1000; i++) {
        usleep(1000);
        st = colo_comm_check(r->gpus);
    }
    return st;
}

/* ---- a launch that fails ---- */

/* Its operation is recorded as failed, and not counted: where all ranks reach each other, and where
 * some exchange messages in the same operation. */
static colo_status_t cannot_launch(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = the_case();
    colo_bridge_t *bridge = NULL;
    colo_comm_stats_t before, after;
    T_GPU_CALL(k);
    if (*(bool *)arg) /* all ranks with all */
        c.dst = t_side("tp=1,cp=4,dp=1", false);
    rank_try(t_gpu_register(r, 1 << 20));
    rank_try(t_gpu_bridge(r, &c, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 1, false));
    rank_try(t_gpu_call_make(&k, r, &c, 2, false));
    rank_try(t_gpu_quiet(r));
    t_comm_stats(r->gpus, &before);
    if (r->rank == 1)
        fake_fail_name(r->device, "colo_k_direct");
    const colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    rank_check(r->rank != 1 || st == COLO_ERR_CUDA);
    if (r->rank == 1) {
        const colo_comm_t *g = r->gpus;
        t_comm_stats(g, &after);
        rank_check(g->record[g->seq % COLO_RECORDS].kind == COLO_OP_EXCHANGE);
        rank_check(g->record[g->seq % COLO_RECORDS].status == COLO_ERR_CUDA);
        rank_check(!memcmp(&before, &after, sizeof before));
    }
    rank_check(r->rank == 1 || await_error(r, st) == COLO_ERR_PEER);
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

T_CASE(a_launch_between_peers_that_fails_is_recorded_as_failed)
{
    for (int i = 0; i < 3; i++) {
        bool far = i == 2;
        fake_lose_device(i ? LOST : -1, false);
        assert_ok(t_gpus_run(RANKS, false, cannot_launch, &far));
    }
    fake_lose_device(-1, false);
}

/* ---- an answer that CUDA owes ---- */

T_CASE_ON_GPUS(RANKS, a_gather_without_an_answer_leaves_no_error_to_the_next_launch)
{
    rank_try(colo_memory_alloc(r->gpus, 256 * RANKS, &r->memory));
    char *all = colo_memory_data(r->memory);
    rank_try(colo_comm_barrier(r->host, NULL));
    if (r->rank == LOST)
        fake_fail_name(r->device, "cudaStreamIsCapturing");
    const colo_status_t st = colo_comm_all_gather_for(
        r->gpus, COLO_CATEGORY_HEAD, all + 256 * r->rank, all, 256, COLO_U8, r->stream);
    rank_check(r->rank == LOST ? st == COLO_ERR_CUDA : st == COLO_ERR_PEER);
    rank_check(cudaGetLastError() == cudaSuccess); /* of the caller's next launch */
    return COLO_OK;
}

/* ---- memory that a caller's allocator has ---- */

T_CASE_ON_GPUS(RANKS, a_failed_call_uses_no_memory_of_an_allocator_that_has_it_back)
{
    const t_case_t c = the_case();
    t_gpu_owner_t o = {.early = false};
    colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(t_gpu_owned(r, &c, &o, COLO_TRANSPORT_NCCL, &bridge));
    rank_try(t_gpu_pass(r, bridge, &c, 0, true));
    rank_try(t_gpu_call_make(&k, r, &c, 0, true));
    rank_try(t_gpu_owner_late(r, &o));
    if (r->rank == 1)
        fake_fail_name(r->device, "colo_k_box_sum");
    const colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    rank_check(r->rank != 1 || (st < 0 && strstr(colo_last_error(), "sum")));
    colo_bridge_destroy(&bridge);
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_check(r->rank != 1 || !o.early); /* others may have heard of it before their call */
    return COLO_OK;
}

/* The comm has peers, so that a bridge without registered tensors allocates in its first call. */
T_CASE_ON_GPUS(RANKS, an_allocator_without_memory_in_a_call_is_an_error_on_all_ranks)
{
    const t_case_t c = the_case();
    t_gpu_owner_t o = {.past = true};
    colo_bridge_t *bridge = NULL;
    T_GPU_CALL(k);
    rank_try(colo_memory_alloc(r->gpus, 1 << 16, &r->memory));
    rank_try(t_gpu_owned(r, &c, &o, COLO_TRANSPORT_AUTO, &bridge));
    rank_check(o.live == 0);
    o.refuses = r->rank == 1;
    rank_try(colo_comm_set_timeout(r->gpus, 3000));
    rank_try(t_gpu_call_make(&k, r, &c, 0, true));
    rank_try(t_gpu_quiet(r));
    rank_fails(await_error(r, t_gpu_call_run(&k, bridge, r->stream)),
               r->rank == 1 ? COLO_ERR_NOMEM : COLO_ERR_PEER,
               "config.allocator returned NULL, expected ");
    rank_cuda(cudaStreamSynchronize(r->stream));
    colo_bridge_destroy(&bridge);
    rank_check(o.live == 0);
    return COLO_OK;
}

T_MAIN("fake/peers")
