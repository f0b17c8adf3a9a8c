/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_process.c - what processes tell each other when they leave or die, on a transport of this
 * test's.
 *
 * Its links are queues, and each can be held, so that news arrive in an order that real transports
 * show only now and then. All ranks are this thread: nothing here waits for a rank that has not
 * spoken already, except where a bug makes it wait.
 */
#include "harness/harness.h"

#include "comm/process/group.h"
#include "core/error.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const colo_comm_backend_t over_sockets = COLO_PROCESS_COMM("sockets");

/* What is told at once comes within half of that, also on a machine that does much besides. */
enum { RANKS = 4, DEADLINE_MS = 20000 };

struct letter {
    struct letter *next;
    size_t bytes;
    _Alignas(16) unsigned char frame[];
};

struct post {
    struct letter *link[RANKS][RANKS]; /* [from][to] */
    bool held[RANKS][RANKS];
    int polls_left[RANKS][RANKS]; /* so often does the receiver look in vain */
    bool poor;                    /* no memory for frames without an error message */
    double chatter_until;         /* rank 1 has one frame more for rank 0 until then */
    bool died;                    /* rank 1, which rank 0 will be told */
    int waits;                    /* of all ranks */
    pthread_mutex_t *lock;        /* of what rank 0 works on, looked at when it receives */
    bool unlocked;                /* it was free once */
    _Atomic int *counts;          /* when rank 0 waits the process ends, and counts what it sends */
};

struct desk { /* one rank's end */
    struct post *post;
    int32_t rank, to;
    struct letter *written, *read;
};

static bool desk_full(void *connections, int32_t peer)
{
    return false;
}

static void *desk_reserve(void *connections, int32_t peer, size_t bytes)
{
    if (((struct desk *)connections)->post->poor && bytes < sizeof(colo_frame_t) + 8)
        return NULL;

    struct desk *d = connections;
    d->written = calloc(1, sizeof *d->written + bytes);
    d->written->bytes = bytes;
    d->to = peer;
    return d->written->frame;
}

static _Atomic int *frames; /* sent, when a process counts them */

static void desk_commit(void *connections)
{
    struct desk *d = connections;
    if (frames)
        atomic_fetch_add(frames, 1);
    struct letter **tail = &d->post->link[d->rank][d->to];
    while (*tail)
        tail = &(*tail)->next;
    *tail = d->written;
}

static int desk_recv(void *connections, int32_t *peer, const void **frame, size_t *bytes)
{
    struct desk *d = connections;
    if (d->rank == 0 && d->post->lock && pthread_mutex_trylock(d->post->lock) == 0) {
        d->post->unlocked = true;
        pthread_mutex_unlock(d->post->lock);
    }
    static const colo_frame_t chatter = {
        .magic = COLO_FRAME_MAGIC, .kind = COLO_FRAME_READY, .from = 1, .group = 1};
    if (d->rank == 0 && colo_now() < d->post->chatter_until) {
        *peer = 1;
        *frame = &chatter;
        *bytes = sizeof chatter;
        return 1;
    }
    free(d->read);
    d->read = NULL;
    if (d->rank == 0 && d->post->died) {
        d->post->died = false;
        *peer = 1;
        return -1;
    }
    for (int32_t r = 0; r < RANKS; r++) {
        struct letter *l = d->post->link[r][d->rank];
        if (!l || d->post->held[r][d->rank] || d->post->polls_left[r][d->rank]-- > 0)
            continue;
        d->post->polls_left[r][d->rank] = 0;
        d->post->link[r][d->rank] = l->next;
        d->read = l;
        *peer = r;
        *frame = l->frame;
        *bytes = l->bytes;
        return 1;
    }
    return 0;
}

static const char *desk_why(void *connections)
{
    return "no reason";
}

static bool desk_flushed(void *connections, int32_t peer)
{
    return true;
}

static void desk_wait(void *connections, double seconds)
{
    struct desk *d = connections;
    d->post->waits++;
    if (d->rank == 0 && d->post->counts) {
        frames = d->post->counts;
        exit(0);
    }
    nanosleep(&(struct timespec){.tv_nsec = (long)(seconds * 1e9)}, NULL);
}

static void desk_close(void *connections, bool clean)
{
    struct desk *d = connections;
    free(d->read);
    free(d);
}

static const colo_process_transport_t desks = {.name = "desk",
                                               .full = desk_full,
                                               .reserve = desk_reserve,
                                               .commit = desk_commit,
                                               .recv = desk_recv,
                                               .why = desk_why,
                                               .flushed = desk_flushed,
                                               .wait = desk_wait,
                                               .close = desk_close};

/* A world and, so that the transport outlives it, a second group of the same ranks. */
static struct post post; /* of the case that runs */
static colo_comm_t *world[RANKS], *mutant[RANKS];

static int open_all(void **state)
{
    colo_grid_t grid;
    memset(&post, 0, sizeof post);
    assert_ok(colo_grid_parse(&grid, "dp=4", RANKS));
    setenv("COLO_TIMEOUT_MS", "50", 1); /* leaving waits as long for the others */
    for (int32_t r = 0; r < RANKS; r++) {
        struct desk *d = calloc(1, sizeof *d);
        d->post = &post;
        d->rank = r;
        world[r] = mutant[r] = NULL;
        assert_ok(colo_process_comm(&over_sockets, &desks, d, r, RANKS, &world[r]));
        assert_ok(colo_comm_set_check(world[r], 0)); /* or groups would talk when they are made */
        assert_ok(colo_comm_split(world[r], &grid, "dp", &mutant[r]));
        assert_ok(colo_comm_set_timeout(world[r], DEADLINE_MS));
        assert_ok(colo_comm_set_timeout(mutant[r], DEADLINE_MS));
    }
    unsetenv("COLO_TIMEOUT_MS");
    return 0;
}

static int close_all(void **state)
{
    memset(post.held, 0, sizeof post.held);
    for (int32_t r = 0; r < RANKS; r++) {
        colo_comm_destroy(&world[r]);
        colo_comm_destroy(&mutant[r]);
    }
    for (int32_t i = 0; i < RANKS * RANKS; i++)
        for (struct letter *l = post.link[i / RANKS][i % RANKS], *next; l; l = next) {
            next = l->next;
            free(l);
        }
    return 0;
}

T_CASE(a_rank_that_left_one_group_is_named_at_once)
{
    colo_comm_destroy(&world[1]); /* it still has the other group, so its process is there */
    double begin = colo_now();
    assert_fails(colo_comm_barrier(world[0], NULL), COLO_ERR_TIMEOUT,
                 "rank 0 waited for rank 1 (world rank 1), which has left the communicator; the "
                 "last operation of rank 1 is none");
    assert_true(colo_now() - begin < DEADLINE_MS / 2e3);
    assert_ok(colo_comm_check(mutant[0]));
}

T_CASE(why_all_is_over_comes_before_the_goodbye_of_a_rank_that_heard_it)
{
    post.held[0][2] = true; /* rank 2 does not hear rank 0 itself */
    colo_comm_abort(world[0], "the loss is not a number");
    assert_int_equal(colo_comm_check(world[1]), COLO_ERR_ABORTED);
    colo_comm_destroy(&world[1]);
    assert_fails(colo_comm_barrier(world[2], NULL), COLO_ERR_ABORTED, "the loss is not a number");
}

T_CASE(why_a_group_is_over_comes_before_the_goodbye_of_a_rank_that_heard_it)
{
    float x[RANKS] = {0};
    post.held[0][2] = true;
    assert_fails(colo_comm_all_gather(world[0], NULL, x, 1, COLO_F32, NULL), COLO_ERR_ARG, "NULL");
    assert_int_equal(colo_comm_check(world[1]), COLO_ERR_PEER);
    colo_comm_destroy(&world[1]);
    assert_fails(colo_comm_all_gather(world[2], x, x, 1, COLO_F32, NULL), COLO_ERR_PEER,
                 "rank 0 failed: all_gather: send is NULL");
    assert_ok(colo_comm_check(mutant[2]));
}

/* The head of @rank's barrier, to rank 1 and without what @rank says when no rank comes. */
static void send_head_only(colo_comm_t *comm, int32_t rank)
{
    assert_ok(colo_comm_set_timeout(comm, 20));
    assert_fails(colo_comm_barrier(comm, NULL), COLO_ERR_TIMEOUT, "barrier #");
    struct letter *head = post.link[rank][1];
    assert_non_null(head);
    for (struct letter *l = head->next, *next; l; l = next) {
        next = l->next;
        free(l);
    }
    head->next = NULL;
}

/* Another thread may ask for the state at any time, and takes in what has arrived. */
T_CASE(header_that_arrives_before_its_round_runs_is_no_mismatch)
{
    colo_comm_t *c = mutant[1];
    for (int32_t r = 0; r < RANKS; r++)
        for (int32_t to = r + 1; r != 1 && to < RANKS; to++)
            post.held[r][to] = to != 1; /* these do not hear that rank r gave up */
    for (int32_t r = 0; r < RANKS; r++)
        if (r != 1)
            send_head_only(mutant[r], r);
    assert_ok(colo_comm_check(c));
    for (int32_t r = 0; r < RANKS; r++)
        assert_null(post.link[r][1]); /* all have been taken in */
    assert_ok(colo_comm_barrier(c, NULL));
    assert_ok(colo_comm_check(c));
}

T_CASE(no_memory_for_a_head_is_an_error_at_once_and_told)
{
    post.poor = true;
    assert_fails(colo_comm_barrier(world[1], NULL), COLO_ERR_NOMEM, "no memory to send");
    post.poor = false;
    assert_fails(colo_comm_barrier(world[0], NULL), COLO_ERR_PEER,
                 "rank 1 failed: no memory to send");
    assert_ok(colo_comm_check(mutant[0]));
}

T_CASE(no_memory_for_a_goodbye_is_told_to_all_groups)
{
    post.poor = true;
    colo_comm_destroy(&world[1]);
    post.poor = false;
    assert_fails(colo_comm_check(mutant[1]), COLO_ERR_NOMEM, "no memory for a frame");
    assert_fails(colo_comm_barrier(mutant[0], NULL), COLO_ERR_PEER,
                 "rank 1 failed: no memory for a frame");
}

T_CASE(peer_that_talks_without_pause_does_not_hold_a_call)
{
    assert_ok(colo_comm_set_timeout(world[0], 100));
    post.chatter_until = colo_now() + 10;
    assert_fails(colo_comm_barrier(world[0], NULL), COLO_ERR_TIMEOUT, "within 100 ms");
    assert_true(colo_now() < post.chatter_until);
    post.chatter_until = 0;
}

/* The others may not have a connection with all ranks yet, and then wait for this one, too. */
T_CASE(create_that_fails_since_a_process_died_waits_for_no_goodbye)
{
    colo_comm_t *made = NULL;
    colo_comm_destroy(&mutant[0]);
    post.died = true;
    post.waits = 0;
    assert_fails(colo_process_agree(world[0], "create", colo_now(), &made), COLO_ERR_PEER,
                 "world rank 1 ended without destroying its communicators");
    world[0] = NULL;
    assert_null(made);
    assert_int_equal(post.waits, 0);
}

/* Another thread may be in exit(), which works on the same transport. */
T_CASE(the_last_destroy_holds_the_lock_whenever_it_talks)
{
    const struct colo_process_group *group = mutant[0]->impl;
    colo_comm_destroy(&world[0]);
    post.lock = &group->context->lock;
    colo_comm_destroy(&mutant[0]);
    post.lock = NULL;
    assert_true(post.waits > 0);
    assert_false(post.unlocked);
}

/* ---- processes that end ---- */

/* In a process of its own: the ranks are new, and all but @rank have left. */
static void only(int32_t rank)
{
    for (int32_t r = 0; r < RANKS; r++)
        if (r != rank) {
            colo_comm_destroy(&world[r]);
            colo_comm_destroy(&mutant[r]);
        }
}

static void end_with_copies(_Atomic int *count)
{
    frames = count;
    exit(0);
}

/* Rank 1 hears of an abort from rank 0. */
static void end_having_heard(_Atomic int *count)
{
    (void)open_all(NULL);
    colo_comm_abort(world[0], "the loss is not a number");
    if (colo_comm_check(world[1]) != COLO_ERR_ABORTED)
        _exit(1);
    only(1);
    frames = count;
    exit(0);
}

/* Rank 0 has destroyed its last communicator, and waits for the others to say so, too. */
static void end_while_leaving(_Atomic int *count)
{
    (void)open_all(NULL);
    for (int32_t r = 1; r < RANKS; r++)
        post.held[r][0] = true;
    only(0);
    post.counts = count;
    colo_comm_destroy(&world[0]);
    colo_comm_destroy(&mutant[0]);
    _exit(1);
}

/* Frames that a process sends in exit(). */
static int sent_at_the_end(void (*end)(_Atomic int *count))
{
    int status = 1;
    _Atomic int *count =
        mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(count != MAP_FAILED);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        end(count);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    const int sent = atomic_load(count);
    munmap((void *)count, sizeof *count);
    return sent;
}

/* What a transport's library does in a child of fork() is undefined. */
T_CASE(child_that_exits_sends_nothing)
{
    assert_int_equal(sent_at_the_end(end_with_copies), 0);
}

T_CASE(why_all_is_over_comes_before_the_end_of_a_process_that_heard_it)
{
    assert_int_equal(sent_at_the_end(end_having_heard), RANKS - 1);
}

T_CASE(what_ends_while_it_leaves_aborts_nothing)
{
    assert_int_equal(sent_at_the_end(end_while_leaving), 0);
}

/* ---- a fault after which older operations go on ---- */

/* @comm waits for a message of rank @from in its next operation. */
static colo_status_t wait_for(colo_comm_t *comm, int32_t from, int64_t deadline_ms)
{
    int32_t got = -1;
    colo_box_t in = {&got, {1, 1, 1}, {0, 0, 0}};
    colo_message_t recv = {from, 1, &in};
    assert_ok(colo_comm_set_timeout(comm, deadline_ms));
    colo_status_t st = colo_comm_exchange(comm, NULL, 0, &recv, 1, COLO_I32, NULL);
    assert_int_equal(got, -1);
    return st;
}

static void pass(colo_comm_t *comm, int operations)
{
    for (int i = 0; i < operations; i++)
        assert_ok(colo_comm_exchange(comm, NULL, 0, NULL, 0, COLO_I32, NULL));
}

/* Rank 0 fails in #3, then rank 1 in #1; rank 2 waits for rank 1 in #2. */
T_CASE(fault_in_an_older_operation_is_told_and_named)
{
    pass(mutant[0], 2);
    assert_int_equal(wait_for(mutant[0], 3, 20), COLO_ERR_TIMEOUT);
    post.polls_left[0][1] = 3; /* the news come when #1 has begun */
    assert_fails(wait_for(mutant[1], 3, 40), COLO_ERR_TIMEOUT,
                 "exchange #1 (i32) on 'dp' (world ranks 0 1 2 3): rank 1 waited for rank 3");
    post.polls_left[0][2] = 6;
    post.polls_left[1][2] = 9;
    pass(mutant[2], 1);
    double begin = colo_now();
    assert_fails(wait_for(mutant[2], 1, DEADLINE_MS), COLO_ERR_TIMEOUT, "rank 1 waited for rank 3");
    assert_true(colo_now() - begin < DEADLINE_MS / 2e3);
}

/* Rank 0 fails in #3, and rank 1 has not begun #1, for which rank 2 waits. */
T_CASE(rank_that_will_not_begin_an_older_operation_says_so)
{
    pass(mutant[0], 2);
    assert_int_equal(wait_for(mutant[0], 3, 20), COLO_ERR_TIMEOUT);
    assert_fails(colo_comm_check(mutant[1]), COLO_ERR_TIMEOUT, "rank 0 waited for rank 3");
    post.polls_left[0][2] = 3;
    post.polls_left[1][2] = 6;
    double begin = colo_now();
    assert_fails(wait_for(mutant[2], 1, DEADLINE_MS), COLO_ERR_TIMEOUT, "rank 0 waited for rank 3");
    assert_true(colo_now() - begin < DEADLINE_MS / 2e3);
}

/* Rank 0 fails in #3, and rank 1 brings wrong arguments to #1, for which rank 2 waits. */
T_CASE(wrong_arguments_of_an_older_operation_are_told_and_named)
{
    pass(mutant[0], 2);
    assert_int_equal(wait_for(mutant[0], 3, 20), COLO_ERR_TIMEOUT);
    post.polls_left[0][1] = 1; /* when it has looked whether the group lives */
    (void)colo_fail(COLO_ERR_ARG, "rank 1 is wrong");
    assert_int_equal(colo_comm_fail(mutant[1], COLO_ERR_ARG), COLO_ERR_ARG);
    assert_fails(colo_comm_check(mutant[1]), COLO_ERR_ARG, "rank 1 is wrong");
    post.polls_left[0][2] = 3;
    post.polls_left[1][2] = 6;
    double begin = colo_now();
    assert_fails(wait_for(mutant[2], 1, DEADLINE_MS), COLO_ERR_PEER,
                 "rank 1 failed: rank 1 is wrong");
    assert_true(colo_now() - begin < DEADLINE_MS / 2e3);
}

T_MAIN_EACH("comm/process", open_all, close_all)
