/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults.c - each call of CUDA and NCCL fails once, in create, forward, backward and destroy.
 *
 * Either all ranks go on, with the values of the oracle, or every rank gets a status by its
 * deadline. Then the comm can be destroyed, a new one works, and nothing is left of both. So it is
 * if a call of NCCL does not come back in time.
 */
#include "fake.h"
#include "gpu/gpu_ranks.h"

#include "comm/comm.h"
#include "core/error.h"

#include <stdatomic.h>
#include <unistd.h>

enum { RANKS = 4, VICTIM = 2, DEADLINE_MS = 1500 };
enum stage { CREATE, FORWARD, BACKWARD, DESTROY, STAGES };
static const char *const stage_names[] = {"create", "forward", "backward", "destroy"};

struct fault {
    enum stage stage;
    const char *slow;      /* the call that lasts past the deadline, NULL: none */
    int64_t k;             /* the call of the stage that fails; 0: none does */
    int64_t calls[STAGES]; /* of the victim */
    const char *name;      /* the call that failed */
    _Atomic bool told;     /* at create, all ranks were told */
    t_case_t c;
};

static void begin(t_gpu_rank_t *r, struct fault *f, enum stage stage)
{
    if (r->rank != VICTIM)
        return;
    f->calls[stage] = -fake_calls(r->device);
    fake_fail(r->device, stage == f->stage ? f->k : 0);
    fake_delay(r->device, stage == f->stage ? f->slow : NULL, 2e-3 * DEADLINE_MS);
}

static void end(t_gpu_rank_t *r, struct fault *f, enum stage stage)
{
    if (r->rank != VICTIM)
        return;
    f->calls[stage] += fake_calls(r->device);
    if (stage == f->stage)
        f->name = fake_failed();
    fake_fail(r->device, 0);
}

/* Does every rank know by now, if one of them has failed? @any: one has. */
static colo_status_t all_know(t_gpu_rank_t *r, colo_status_t mine, double since, bool *any)
{
    int32_t own = mine, all[RANKS];
    char why[600];
    snprintf(why, sizeof why, "%s", mine < 0 ? colo_last_error() : "");
    const double took = colo_now() - since;
    rank_try(colo_comm_all_gather(r->host, &own, all, 1, COLO_I32, NULL));
    *any = false;
    for (int32_t k = 0; k < RANKS; k++)
        *any = *any || all[k] < 0;
    if (*any && mine == COLO_OK && r->gpus)
        for (int i = 0; i < 100 && mine == COLO_OK; i++) {
            mine = colo_comm_check(r->gpus);
            usleep(mine == COLO_OK ? 10000 : 0);
        }
    if (*any && mine == COLO_OK)
        return colo_fail(COLO_ERR_STATE, "rank %d: no status, others have %d %d %d %d",
                         (int)r->rank, (int)all[0], (int)all[1], (int)all[2], (int)all[3]);
    if (took > DEADLINE_MS * 1e-3 + 1)
        return colo_fail(COLO_ERR_STATE, "rank %d: status %d after %.2f s: %s", (int)r->rank,
                         (int)mine, took, why);
    return COLO_OK;
}

static colo_status_t pass(t_gpu_rank_t *r, colo_bridge_t *bridge, struct fault *f, bool backward,
                          bool *any)
{
    const enum stage stage = backward ? BACKWARD : FORWARD;
    t_role_t in_role = backward ? T_DY : T_X, out_role = backward ? T_DX : T_Y;
    t_placed_t in = {0}, out = {0};
    rank_try(t_place(r, &f->c, in_role, 1, true, &in));
    rank_try(t_place(r, &f->c, out_role, 1, false, &out));
    rank_try(t_gpu_quiet(r));
    begin(r, f, stage);
    const double since = colo_now();
    colo_status_t st = backward ? colo_bridge_backward(bridge, &in.t, &out.t, r->stream)
                                : colo_bridge_forward(bridge, &in.t, &out.t, r->stream);
    if (st == COLO_OK) {
        (void)cudaStreamSynchronize(r->stream);
        st = colo_comm_check(r->gpus);
    }
    end(r, f, stage);
    st = all_know(r, st, since, any);
    if (st == COLO_OK && !*any)
        st = t_download(r, &out);
    if (st == COLO_OK && !*any)
        st = t_case_compare(&f->c, out_role, r->rank, 1, &out.host);
    cudaStreamSynchronize(r->stream);
    t_placed_free(&in);
    t_placed_free(&out);
    return st;
}

static colo_status_t works(t_gpu_rank_t *r)
{
    colo_comm_t *fresh = NULL;
    int32_t *d, all[RANKS] = {0};
    rank_cuda(cudaMalloc((void **)&d, (RANKS + 1) * sizeof *d));
    rank_cuda(t_to_device(d + RANKS, &r->rank, sizeof *d));
    rank_try(colo_comm_create_nccl(r->host, -1, &fresh));
    rank_try(colo_comm_all_gather(fresh, d + RANKS, d, 1, COLO_I32, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_cuda(cudaMemcpyAsync(all, d, sizeof all, cudaMemcpyDeviceToHost, r->stream));
    for (int32_t k = 0; k < RANKS; k++)
        rank_check(all[k] == k);
    rank_try(colo_comm_barrier(r->host, NULL));
    colo_comm_destroy(&fresh);
    rank_cuda(cudaFree(d));
    return COLO_OK;
}

static colo_status_t with_fault(t_gpu_rank_t *r, void *arg)
{
    struct fault *f = arg;
    colo_bridge_t *bridge = NULL;
    bool any = false;
    rank_try(colo_comm_set_timeout(r->host, DEADLINE_MS));
    rank_try(colo_comm_barrier(r->host, NULL));
    begin(r, f, CREATE);
    double since = colo_now();
    colo_status_t st = colo_comm_create_nccl(r->host, -1, &r->gpus);
    if (st == COLO_OK)
        st = t_gpu_bridge(r, &f->c, &bridge);
    end(r, f, CREATE);
    rank_try(colo_comm_set_timeout(r->host, 10 * DEADLINE_MS)); /* what the test itself waits */
    rank_try(all_know(r, st, since, &any));
    f->told = any; /* on all ranks alike */
    if (!any)
        rank_try(pass(r, bridge, f, false, &any));
    if (!any)
        rank_try(pass(r, bridge, f, true, &any));
    rank_try(colo_comm_barrier(r->host, NULL));
    begin(r, f, DESTROY);
    since = colo_now();
    colo_bridge_destroy(&bridge);
    colo_comm_destroy(&r->gpus);
    end(r, f, DESTROY);
    rank_check(colo_now() - since < DEADLINE_MS * 1e-3 + 1);
    rank_try(colo_comm_barrier(r->host, NULL));
    (void)cudaGetLastError();
    return works(r);
}

/* Helper threads may still be on their way out. */
static void assert_nothing_left(const char *what, const int64_t *before)
{
    for (int kind = 0; kind < FAKE_KINDS; kind++) {
        for (int i = 0; i < 500 && fake_live((enum fake_kind)kind) != before[kind]; i++) {
            fake_end_inits();
            usleep(10000);
        }
        if (fake_live((enum fake_kind)kind) != before[kind])
            fail_msg("%s: %lld of kind %d are left, expected %lld", what,
                     (long long)fake_live((enum fake_kind)kind), kind, (long long)before[kind]);
    }
}

static void run(struct fault *f)
{
    int64_t before[FAKE_KINDS];
    char what[160];
    const int64_t misuse = fake_misuse();
    for (int kind = 0; kind < FAKE_KINDS; kind++)
        before[kind] = fake_live((enum fake_kind)kind);
    f->name = NULL;
    const double since = colo_now();
    colo_status_t st = t_gpus_run(RANKS, true, with_fault, f);
    snprintf(what, sizeof what, "call %lld of %s, %s", (long long)f->k, stage_names[f->stage],
             f->name ? f->name : "which did not fail");
    if (getenv("T_VERBOSE"))
        print_message("%s: %.2f s\n", what, colo_now() - since);
    if (st < 0)
        fail_msg("%s: %s: %s", what, colo_status_name(st), colo_last_error());
    if (f->slow && !f->told)
        fail_msg("%s that lasts: no rank was told", f->slow);
    assert_nothing_left(what, before);
    if (fake_misuse() != misuse)
        fail_msg("%s: misuse", what);
}

static void each_call_fails(enum stage stage)
{
    struct fault f = {.stage = stage, .c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4)};
    run(&f);
    const int64_t calls = f.calls[stage];
    assert_true(calls > 0);
    print_message("%lld calls in %s\n", (long long)calls, stage_names[stage]);
    for (f.k = 1; f.k <= calls; f.k++)
        if (!t_left_out(f.k))
            run(&f);
}

T_CASE(a_call_that_fails_in_create_is_told_to_all)
{
    each_call_fails(CREATE);
}

T_CASE(a_call_that_fails_in_forward_is_told_to_all)
{
    each_call_fails(FORWARD);
}

T_CASE(a_call_that_fails_in_backward_is_told_to_all)
{
    each_call_fails(BACKWARD);
}

T_CASE(a_call_that_fails_in_destroy_leaves_nothing)
{
    each_call_fails(DESTROY);
}

/* The others' first operations are on their devices by then, and wait for this rank. */
T_CASE(a_rank_that_stays_in_nccl_costs_the_others_their_deadline)
{
    static const char *const slow[] = {"ncclCommInitRank", "ncclAllGather", "ncclGroupEnd"};
    struct fault f = {.stage = CREATE, .c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4)};
    for (size_t i = 0; i < sizeof slow / sizeof slow[0]; i++) {
        f.slow = slow[i];
        run(&f);
    }
}

T_MAIN("fake/faults")
