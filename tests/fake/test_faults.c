/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults.c - each call of CUDA and NCCL fails once, in create, forward, backward and destroy,
 * as does each allocation and each thread's start; and what the program around the library does to
 * a device, a stream or its own ncclComm_t.
 *
 * Either all ranks go on, with the values of the oracle, or every rank gets a status by its
 * deadline. Then the comm can be destroyed, a new one works, and nothing is left of both. So it is
 * if a call of NCCL does not come back in time.
 */
#include "judge.h"

#include "comm/comm.h"
#include "core/error.h"
#include "harness/allocations.h"

#include <stdatomic.h>

enum stage { CREATE, FORWARD, BACKWARD, DESTROY, STAGES };
static const char *const stage_names[] = {"create", "forward", "backward", "destroy"};
static const char *const what_names[] = {"call", "allocation", "thread"};

enum what { CALL, ALLOCATION, THREAD };

struct fault {
    enum stage stage;
    enum what what;
    bool hit;              /* the allocation or the thread did fail */
    bool registered;       /* tensors are, and move between peers */
    const char *slow;      /* the call that lasts past the deadline, NULL: none */
    int64_t k;             /* the call of the stage that fails, or its try; 0: none does */
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
    const int64_t k = stage == f->stage ? f->k : 0;
    fake_fail(r->device, f->what == CALL ? k : 0);
    fail_at = f->what == ALLOCATION && k > 0; /* the next that may fail */
    thread_fail_at = f->what == THREAD && k > 0;
    fake_delay(r->device, stage == f->stage ? f->slow : NULL, 2e-3 * DEADLINE_MS);
}

static void end(t_gpu_rank_t *r, struct fault *f, enum stage stage)
{
    if (r->rank != VICTIM)
        return;
    f->calls[stage] += fake_calls(r->device);
    if (stage == f->stage) {
        f->name = fake_failed();
        f->hit = fail_at == 0 && thread_fail_at == 0;
    }
    fail_at = thread_fail_at = 0;
    fake_fail(r->device, 0);
}

/* All ranks are here, and know what each got. Not over a comm, which may have failed. */
static _Atomic int32_t arrived;
static _Atomic colo_status_t statuses[RANKS];
static _Thread_local int32_t meetings;

static colo_status_t meet(const t_gpu_rank_t *r, colo_status_t mine, colo_status_t all[RANKS])
{
    const double end = colo_now() + 10e-3 * DEADLINE_MS;
    statuses[r->rank] = mine;
    for (int repetition = 0; repetition < 2; repetition++) { /* once more: then all have read */
        meetings++;
        for (arrived++; arrived < RANKS * meetings; usleep(100))
            if (colo_now() > end)
                return colo_fail(COLO_ERR_TIMEOUT, "rank %d: the others do not come", (int)r->rank);
        for (int32_t k = 0; all && k < RANKS && repetition == 0; k++)
            all[k] = statuses[k];
    }
    return COLO_OK;
}

/* Does every rank know by now, if one of them has failed? @any: one has. */
static colo_status_t all_know(t_gpu_rank_t *r, colo_status_t mine, double since, bool *any)
{
    colo_status_t all[RANKS];
    const char *why = t_text("%s", mine < 0 ? colo_last_error() : "");
    const double took = colo_now() - since;
    rank_try(meet(r, mine, all));
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
    T_GPU_CALL(k);
    rank_try(t_gpu_call_make(&k, r, &f->c, 1, backward));
    rank_try(t_gpu_quiet(r));
    begin(r, f, stage);
    const double since = colo_now();
    colo_status_t st = t_gpu_call_run(&k, bridge, r->stream);
    if (st == COLO_OK) {
        (void)cudaStreamSynchronize(r->stream);
        st = colo_comm_check(r->gpus);
    }
    end(r, f, stage);
    st = all_know(r, st, since, any);
    if (st == COLO_OK && !*any)
        st = t_gpu_call_compare(&k);
    cudaStreamSynchronize(r->stream);
    return st;
}

/* No rank waits for one that has no memory, so no allocation costs the deadline. */
static int64_t deadline_of(const struct fault *f)
{
    return f->what == ALLOCATION ? 10 * DEADLINE_MS
           : f->what == CALL     ? DEADLINE_MS
                                 : DEADLINE_MS / 5;
}

static colo_status_t with_fault(t_gpu_rank_t *r, void *arg)
{
    struct fault *f = arg;
    colo_bridge_t *bridge = NULL;
    colo_comm_t *pair = NULL;
    bool any = false;
    rank_try(colo_comm_set_timeout(r->host, deadline_of(f)));
    rank_try(meet(r, COLO_OK, NULL));
    begin(r, f, CREATE);
    double since = colo_now();
    colo_status_t st = colo_comm_create_nccl(r->host, -1, &r->gpus);
    if (st == COLO_OK && f->registered)
        st = t_gpu_register(r, 1 << 16);
    if (st == COLO_OK)
        st = t_gpu_bridge(r, &f->c, &bridge);
    if (st == COLO_OK)
        st = colo_comm_split_color(r->gpus, r->rank / 2, 0, &pair);
    end(r, f, CREATE);
    rank_check(f->what != ALLOCATION || st != COLO_ERR_TIMEOUT);
    rank_try(all_know(r, st, since, &any));
    rank_try(colo_comm_set_timeout(r->host, 10 * DEADLINE_MS)); /* what the test itself waits */
    f->told = any;                                              /* on all ranks alike */
    if (!any)
        rank_try(pass(r, bridge, f, false, &any));
    if (!any)
        rank_try(pass(r, bridge, f, true, &any));
    rank_try(meet(r, COLO_OK, NULL));
    begin(r, f, DESTROY);
    since = colo_now();
    colo_comm_destroy(&pair);
    colo_bridge_destroy(&bridge);
    colo_memory_destroy(&r->memory);
    colo_comm_destroy(&r->gpus);
    end(r, f, DESTROY);
    rank_check(colo_now() - since < DEADLINE_MS * 1e-3 + 1);
    rank_try(meet(r, COLO_OK, NULL));
    (void)cudaGetLastError();
    /* A rank without memory fails the world, too. */
    return f->what != CALL && colo_comm_check(r->host) < 0 ? COLO_OK : works(r);
}

static colo_status_t on_a_new_world(t_gpu_rank_t *r, void *arg)
{
    return works(r);
}

static void run(struct fault *f)
{
    objects_t before = live_objects();
    const int64_t misuse = fake_misuse();
    setenv("COLO_TRANSPORT", f->registered ? "auto" : "nccl", 1);
    f->name = NULL;
    f->hit = false;
    arrived = 0;
    const double since = colo_now();
    colo_status_t st = t_gpus_run(RANKS, true, with_fault, f);
    if (st == COLO_OK && f->what != CALL)
        st = t_gpus_run(RANKS, true, on_a_new_world, NULL);
    const char *what =
        t_text("%s %lld of %s, %s", what_names[f->what], (long long)f->k, stage_names[f->stage],
               f->name  ? f->name
               : f->hit ? "refused"
                        : "which did not fail");
    if (getenv("T_VERBOSE"))
        print_message("%s: %.2f s\n", what, colo_now() - since);
    if (st < 0)
        fail_msg("%s: %s: %s", what, colo_status_name(st), colo_last_error());
    if (f->slow && !f->told)
        fail_msg("%s that lasts: no rank was told", f->slow);
    /* A path between peers that has died keeps its mailboxes and its reports: a peer may still
     * write. */
    const bool dies = f->registered && (f->stage != CREATE || f->what == ALLOCATION) && f->k > 0;
    for (int kind = FAKE_MEMORY; kind <= FAKE_PINNED && dies; kind++)
        if (fake_live((enum fake_kind)kind) <= before.n[kind] + RANKS)
            before.n[kind] = fake_live((enum fake_kind)kind);
    if (f->what == CALL || f->stage != DESTROY) /* a helper that cannot start ends nothing */
        assert_nothing_left(what, before);
    if (fake_misuse() != misuse)
        fail_msg("%s: misuse", what);
}

static void each_call_fails(bool registered)
{
    struct fault f = {.registered = registered,
                      .c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4)};
    for (f.stage = CREATE; f.stage < STAGES; f.stage++) {
        f.k = 0;
        run(&f);
        const int64_t calls = f.calls[f.stage];
        assert_true(calls > 0);
        print_message("%lld calls in %s\n", (long long)calls, stage_names[f.stage]);
        for (f.k = 1; f.k <= calls; f.k++)
            if (!t_left_out(f.k - 1))
                run(&f);
    }
}

T_CASE(a_call_that_fails_is_told_to_all)
{
    each_call_fails(false);
}

T_CASE(a_call_that_fails_between_peers_is_told_to_all)
{
    each_call_fails(true);
}

#ifndef SANITIZED
/* Where the library asks for memory, or for a thread: the place in its module. */
struct place {
    ptrdiff_t at;
    int64_t seen, refused; /* times: in this run, in all of the stage */
};
static struct place places[512];
static size_t place_count;

/* Lets pass what was refused in an earlier run. A count of all would not do: a list that has grown
 * or a stack that glibc kept moves what follows to another number, and one number is never tried.
 */
static bool had_its_turn(const void *caller)
{
    Dl_info of;
    size_t i = 0;
    /* the fake itself, as CUDA and NCCL, has what it needs */
    if (!dladdr(caller, &of) || strstr(of.dli_fname, "libnccl"))
        return true;
    const ptrdiff_t at = (const char *)caller - (const char *)of.dli_fbase;
    while (i < place_count && places[i].at != at)
        i++;
    if (i == sizeof places / sizeof places[0])
        abort();
    if (i == place_count)
        places[place_count++] = (struct place){.at = at};
    if (++places[i].seen <= places[i].refused)
        return true;
    places[i].refused++;
    return false;
}

static void each_fails(enum what what, bool registered)
{
    struct fault f = {.what = what,
                      .registered = registered,
                      .c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4)};
    spared = had_its_turn;
    for (f.stage = CREATE; f.stage < STAGES; f.stage++) {
        place_count = 0;
        for (f.k = 1, f.hit = true; f.hit; f.k++) {
            for (size_t i = 0; i < place_count; i++)
                places[i].seen = 0;
            run(&f);
        }
    }
}

T_CASE(an_allocation_that_fails_is_told_to_all)
{
    each_fails(ALLOCATION, false);
}

T_CASE(an_allocation_that_fails_between_peers_is_told_to_all)
{
    each_fails(ALLOCATION, true);
}

T_CASE(a_thread_that_does_not_start_is_told_to_all)
{
    each_fails(THREAD, false);
}
#endif

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

/* ---- what the program does on one rank ---- */

enum deed {
    BREAKS_BEFORE_CREATE, /* an error of its device that stays */
    BREAKS,
    NCCL_FAILS, /* by itself: ncclCommGetAsyncError() says so */
    LEAVES,     /* instead of a forward; the others destroy everything right behind theirs */
    CAPTURES,   /* its forward, which the others launch */
    BORROWS_ANOTHER_SIZE,
    ABORTS_BORROWED,  /* before a forward */
    DESTROYS_BORROWED /* before it destroys the communicator */
};

struct row {
    enum deed deed;
    colo_status_t own, others; /* what the ranks must get */
    const char *words;         /* of the own message */
    t_case_t c;
};

/* An ncclComm_t of all ranks, and one of this rank. */
static colo_status_t borrow(t_gpu_rank_t *r, ncclComm_t *whole, ncclComm_t *alone)
{
    ncclUniqueId ids[2];
    for (int i = 0; i < 2; i++)
        rank_check(ncclGetUniqueId(&ids[i]) == ncclSuccess);
    rank_try(colo_comm_broadcast(r->host, &ids[0], sizeof ids[0], COLO_U8, 0, NULL));
    rank_check(ncclCommInitRank(whole, r->size, ids[0], r->rank) == ncclSuccess);
    rank_check(ncclCommInitRank(alone, 1, ids[1], 0) == ncclSuccess);
    return COLO_OK;
}

static colo_status_t judge(const struct row *w, const t_gpu_rank_t *r, colo_status_t got,
                           double took)
{
    const bool mine = r->rank == VICTIM;
    const char *why = got < 0 ? colo_last_error() : "";
    const bool right = mine ? got == w->own && strstr(why, w->words)
                            : got == w->others || (w->deed == CAPTURES && got == COLO_ERR_TIMEOUT);
    if (!right || took > DEADLINE_MS * 1e-3 + 1)
        return colo_fail(COLO_ERR_STATE, "rank %d: %s after %.2f s: %s", (int)r->rank,
                         colo_status_name(got), took, why);
    return COLO_OK;
}

/* Forward, and until this rank knows how it ended. */
static colo_status_t forward(colo_bridge_t *bridge, const t_gpu_call_t *k)
{
    const double end = colo_now() + DEADLINE_MS * 1e-3 + 2;
    colo_status_t st = t_gpu_call_run(k, bridge, k->r->stream);
    while (st == COLO_OK && colo_now() < end) {
        usleep(1000);
        st = colo_comm_check(k->r->gpus);
    }
    return st;
}

static colo_status_t one_row(t_gpu_rank_t *r, void *arg)
{
    const struct row *w = arg;
    const bool mine = r->rank == VICTIM, borrows = w->deed >= BORROWS_ANOTHER_SIZE;
    ncclComm_t theirs = NULL, alone = NULL;
    colo_bridge_t *bridge = NULL;
    cudaGraph_t graph = NULL;
    T_GPU_CALL(k);
    rank_try(colo_comm_set_timeout(r->host, DEADLINE_MS));
    if (borrows)
        rank_try(borrow(r, &theirs, &alone));
    if (mine && w->deed == BREAKS_BEFORE_CREATE)
        fake_break_device(r->device, cudaErrorIllegalAddress);
    rank_try(colo_comm_barrier(r->host, NULL));
    double since = colo_now();
    colo_status_t st =
        borrows ? colo_comm_create_nccl_borrowed(
                      mine && w->deed == BORROWS_ANOTHER_SIZE ? alone : theirs, r->host, &r->gpus)
                : colo_comm_create_nccl(r->host, -1, &r->gpus);
    double took = colo_now() - since;
    rank_try(colo_comm_set_timeout(r->host, 10 * DEADLINE_MS)); /* what the test itself waits */
    if (st == COLO_OK) {
        rank_try(t_gpu_bridge(r, &w->c, &bridge));
        rank_try(t_gpu_pass(r, bridge, &w->c, 1, false));
        rank_try(t_gpu_call_make(&k, r, &w->c, 2, false));
        rank_try(t_gpu_quiet(r));
        if (mine && w->deed == BREAKS)
            fake_break_device(r->device, cudaErrorIllegalAddress);
        if (mine && w->deed == NCCL_FAILS)
            fake_async_error(r->device, ncclRemoteError);
        if (mine && w->deed == CAPTURES)
            rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeGlobal));
        if (mine && w->deed == ABORTS_BORROWED)
            rank_check(ncclCommAbort(theirs) == ncclSuccess);
        if (w->deed == DESTROYS_BORROWED)
            rank_check(ncclCommDestroy(theirs) == ncclSuccess);
        usleep(w->deed == DESTROYS_BORROWED ? 100000 : 0); /* the watchdog comes by */
        rank_try(colo_comm_barrier(r->host, NULL));
        since = colo_now();
        if (w->deed == LEAVES && !mine)
            st = t_gpu_call_run(&k, bridge, r->stream);
        if (w->own != COLO_OK)
            st = forward(bridge, &k);
        took = colo_now() - since;
    }
    colo_status_t verdict = judge(w, r, st, took);
    const char *why = t_text("%s", verdict < 0 ? colo_last_error() : "");
    rank_try(colo_comm_barrier(r->host, NULL));
    if (borrows)
        rank_check(ncclCommAbort(alone) == ncclSuccess);
    if (borrows && w->deed != DESTROYS_BORROWED && !(mine && w->deed == ABORTS_BORROWED))
        rank_check(ncclCommAbort(theirs) == ncclSuccess);
    since = colo_now();
    colo_bridge_destroy(&bridge);
    colo_comm_destroy(&r->gpus);
    rank_check(colo_now() - since < DEADLINE_MS * 1e-3 + 1);
    if (mine && w->deed == CAPTURES) {
        rank_cuda(cudaStreamEndCapture(r->stream, &graph)); /* what was destroyed did not end it */
        rank_cuda(cudaGraphDestroy(graph));
    }
    if (mine) {
        fake_break_device(r->device, cudaSuccess);
        fake_async_error(r->device, ncclSuccess);
    }
    rank_try(colo_comm_barrier(r->host, NULL));
    (void)cudaGetLastError();
    if (verdict < 0)
        return colo_fail(verdict, "%s", why);
    return works(r);
}

T_CASE(what_the_program_does_on_one_rank_is_told_to_all)
{
    static const struct row rows[] = {
        {BREAKS_BEFORE_CREATE, COLO_ERR_CUDA, COLO_ERR_PEER, .words = "illegal"},
        {BREAKS, COLO_ERR_CUDA, COLO_ERR_PEER, .words = "illegal"},
        {NCCL_FAILS, COLO_ERR_NCCL, COLO_ERR_PEER, .words = "NCCL reports"},
        {LEAVES, COLO_OK, COLO_OK, .words = ""},
        {CAPTURES, COLO_ERR_PEER, COLO_ERR_PEER, .words = ""},
        {BORROWS_ANOTHER_SIZE, COLO_ERR_ARG, COLO_ERR_PEER, .words = "is rank 0 of 1, the parent"},
        {ABORTS_BORROWED, COLO_ERR_NCCL, COLO_ERR_PEER, .words = "invalid argument"},
        {DESTROYS_BORROWED, COLO_OK, COLO_OK, .words = ""},
    };
    setenv("COLO_TRANSPORT", "nccl", 1);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const objects_t before = live_objects();
        const int64_t misuse = fake_misuse();
        struct row w = rows[i];
        w.c = t_between("tp=1,dp=4", "tp=2,cp=2,dp=1", 4, 8, 4);
        if (t_gpus_run(RANKS, true, one_row, &w) < 0)
            fail_msg("deed %d: %s", (int)w.deed, colo_last_error());
        assert_nothing_left(t_text("deed %d", (int)w.deed), before);
        /* calls of NCCL that name a communicator which has ended */
        assert_int_equal(fake_misuse() - misuse, w.deed == ABORTS_BORROWED);
    }
}

T_MAIN("fake/faults")
