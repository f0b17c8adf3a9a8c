/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_transport.c - communicators from an all-gather: making them, processes that end. What all
 * backends do alike is in tests/comm/, which runs over sockets as well.
 *
 * Given FOLDER RANK SIZE the program is one rank of a world whose all-gather is that folder:
 * tests/mpi/two-hosts.py.
 */
#include "harness/bridge_case.h"
#include "harness/harness.h"

#include "comm/comm.h"
#include "comm/process/pack.h"
#include "core/error.h"
#include "forked.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *by(void)
{
    const char *transport = getenv("COLO_TRANSPORT");
    return transport ? transport : "sockets";
}

/* ---- pieces of messages ---- */

T_CASE(a_stream_cut_anywhere_is_the_boxes_in_row_major_order)
{
    int32_t from[200], to[200];
    char stream[2 * 24 * 4 + 5 * 4];
    for (int i = 0; i < 200; i++)
        from[i] = i;
    for (int cut = 0; cut <= 53; cut++) {
        colo_box_t boxes[4] = {{from, {2, 3, 4}, {90, 30, 7}},
                               {from, {3, 0, 1}, {1, 1, 1}},
                               {from + 1, {1, 1, 5}, {0, 0, 3}},
                               {from + 2, {4, 3, 2}, {6, 2, 1}}};
        colo_cursor_t c;
        colo_cursor_init(&c, boxes, 4, 4);
        colo_cursor_move(&c, stream, NULL, cut * 4);
        colo_cursor_move(&c, stream + cut * 4, NULL, (53 - cut) * 4);
        int offset = 0, v;
        for (int b = 0; b < 4; b++)
            for (int64_t i = 0; i < boxes[b].extent[0]; i++)
                for (int64_t j = 0; j < boxes[b].extent[1]; j++)
                    for (int64_t k = 0; k < boxes[b].extent[2]; k++, offset++) {
                        memcpy(&v, stream + 4 * offset, 4);
                        assert_int_equal(v, (int)((int32_t *)boxes[b].data - from) +
                                                i * boxes[b].stride[0] + j * boxes[b].stride[1] +
                                                k * boxes[b].stride[2]);
                    }
        assert_int_equal(offset, 53);
        memset(to, 0xff, sizeof to);
        colo_box_t back = {to, {1, 1, 53}, {0, 0, 2}};
        colo_cursor_init(&c, &back, 1, 4);
        colo_cursor_move(&c, NULL, stream, cut * 4);
        colo_cursor_move(&c, NULL, stream + cut * 4, (53 - cut) * 4);
        for (int i = 0; i < 53; i++) {
            memcpy(&v, stream + 4 * i, 4);
            assert_int_equal(to[2 * i], v);
            assert_int_equal(to[2 * i + 1], -1);
        }
    }
}

/* ---- bootstraps that go wrong ---- */

struct wrong {
    colo_comm_t *threads;
    int which;
};

static colo_status_t gather_wrong(void *user, const void *send, void *recv, size_t bytes)
{
    struct wrong *w = user;
    int32_t n = colo_comm_size(w->threads), me = colo_comm_rank(w->threads);
    char *parts = recv;
    colo_status_t st = colo_comm_all_gather(w->threads, send, recv, (int64_t)bytes, COLO_U8, NULL);
    if (st < 0)
        return st;
    if (w->which == 0) { /* everyone turns them */
        char *first = malloc(bytes);
        memcpy(first, parts, bytes);
        memmove(parts, parts + bytes, (size_t)(n - 1) * bytes);
        memcpy(parts + (size_t)(n - 1) * bytes, first, bytes);
        free(first);
    } else if (w->which == 1) {
        memset(recv, 0, (size_t)n * bytes);
    } else if (w->which == 2 && me == 1 && bytes > 100) { /* in the last */
        return colo_fail(COLO_ERR_IO, "the store of rank 1 is full");
    }
    return COLO_OK;
}

static colo_status_t wrong_rank(colo_comm_t *c, void *arg)
{
    struct wrong w = {c, *(int *)arg};
    int32_t me = colo_comm_rank(c);
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, me, colo_comm_size(c), gather_wrong, &w};
    colo_comm_t *world = (colo_comm_t *)&w;
    colo_status_t st = colo_comm_create_bootstrap(&b, &world);
    rank_check(world == (colo_comm_t *)&w);
    if (w.which == 0) {
        rank_fails(st, COLO_ERR_MISMATCH, "entry 0 of the all-gather comes from rank 1 of 3");
    } else if (w.which == 1) {
        rank_fails(st, COLO_ERR_MISMATCH, "does not hold what rank 0 brought");
    } else if (me == 1) {
        rank_fails(st, COLO_ERR_IO, "the store of rank 1 is full");
    } else {
        /* of rank 1, or of the other one that left for it */
        rank_fails(st, COLO_ERR_PEER, " left before all ranks were connected");
    }
    return COLO_OK;
}

T_CASE(what_a_wrong_all_gather_did_is_said)
{
    for (int which = 0; which < 2; which++)
        assert_ok(colo_comm_threads_run(3, wrong_rank, &which));
}

T_CASE(a_rank_that_gives_up_is_an_error_on_the_others_at_once)
{
    int which = 2;
    if (strcmp(by(), "sockets") != 0)
        skip(); /* UCX's all-gather is the caller's, and so is its deadline */
    assert_ok(colo_comm_threads_run(3, wrong_rank, &which));
}

static colo_status_t gather_nothing(void *user, const void *send, void *recv, size_t bytes)
{
    return *(colo_status_t *)user;
}

T_CASE(callback_that_fails_silently_is_named)
{
    colo_status_t says = COLO_ERR_IO;
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, 1, 2, gather_nothing, &says};
    colo_comm_t *c = NULL;
    assert_fails(colo_comm_split_color(NULL, 0, 0, &c), COLO_ERR_ARG, "comm is NULL"); /* before */
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_IO,
                 "create_bootstrap: the all-gather callback of rank 1 returned COLO_ERR_IO");
    says = (colo_status_t)1;
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_ARG,
                 "callback of rank 1 returned 1, expected COLO_OK or an error below 0");
    assert_null(c);
}

static colo_status_t gather_and_explain(void *user, const void *send, void *recv, size_t bytes)
{
    return colo_bootstrap_fail(COLO_ERR_IO, user);
}

T_CASE(callback_that_fails_says_why)
{
    char why[] = "the store is full: 100%";
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, 1, 2, gather_and_explain, why};
    colo_comm_t *c = NULL;
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_IO, why);
    b.user = NULL; /* no message: it is named as one that fails silently */
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_IO, "callback of rank 1 returned");
    assert_null(c);
}

T_CASE(senseless_bootstraps_are_refused)
{
    struct wrong w = {NULL, 0};
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, 0, 0, gather_wrong, &w};
    colo_comm_t *c = NULL;
    assert_fails(colo_comm_create_bootstrap(NULL, &c), COLO_ERR_ARG, "bootstrap is NULL");
    assert_fails(colo_comm_create_bootstrap(&b, NULL), COLO_ERR_ARG, "comm is NULL");
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_ARG, "rank 0 of 0");
    b.size = 2;
    b.rank = 2;
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_ARG, "rank 2 of 2");
    b.all_gather = NULL;
    assert_fails(colo_comm_create_bootstrap(&b, &c), COLO_ERR_ARG, "callback is NULL");
    assert_fails(colo_bootstrap_from_comm(NULL, &b), COLO_ERR_ARG, "comm is NULL");
    assert_null(c);
}

/* ---- processes that end ---- */

enum way { KILLED, KILLED_BEFORE_FORKED, KILLED_BEFORE_SPAWNED, EXITS, EXITS_AT_ONCE };
static enum way way;

/* Of the rank that ends; a child that outlives it has whatever descriptors such a child gets. */
static void end(t_page_t *page)
{
    char program[] = "sleep", seconds[] = "60", *const words[] = {program, seconds, NULL};
    colo_grid_t grid;
    pid_t child = way == KILLED_BEFORE_FORKED ? fork() : -1;
    if (child == 0) {
        sleep(60);
        _exit(0);
    }
    if (way == KILLED_BEFORE_SPAWNED)
        (void)!posix_spawnp(&child, "sleep", NULL, NULL, words, environ);
    page->child = child;
    usleep(50000);
    (void)colo_grid_parse(&grid, "tp=two", 8); /* the cause */
    if (way == EXITS)
        exit(0);
    if (way == EXITS_AT_ONCE)
        _exit(0);
    raise(SIGKILL);
}

/* Rank 2 ends while rank 0 waits for it in the world, 1 in a group of two, and 3 in one with 0. */
T_LIFE(one_ends)
{
    rank_try(colo_comm_set_timeout(world, 15000));
    rank_try(colo_comm_split_color(world, me->rank % 3 == 0, me->rank, &me->pair));
    if (me->rank == 2)
        end(me->page);
    return colo_comm_barrier(me->rank == 0 ? world : me->pair, NULL);
}

static void expect_on_others(enum way by, colo_status_t status, const char *text)
{
    way = by;
    const t_page_t *page = t_fork_mortals(4, one_ends, way < EXITS ? 2 : -1);
    if (way == KILLED_BEFORE_FORKED || way == KILLED_BEFORE_SPAWNED) {
        assert_true(page->child > 0); /* it is still there, or this would prove nothing */
        assert_int_equal(kill(page->child, SIGKILL), 0);
    }
    for (int32_t r = 0; r < 4; r++)
        if (r != 2) {
            t_expect(page, r, status, text);
            assert_true(page->seconds[r] < 10);
        }
}

#define ENDED "world rank 2 ended without destroying its communicators"

T_CASE(a_process_that_dies_is_an_error_on_all_others_at_once)
{
    expect_on_others(KILLED, COLO_ERR_PEER, ENDED ", or was killed: its connection ended");
    expect_on_others(EXITS_AT_ONCE, COLO_ERR_PEER, ENDED ", or was killed: its connection ended");
}

T_CASE(process_that_exits_with_a_communicator_tells_its_last_error)
{
    const char *folder = t_folder();
    char record[1 << 14] = "";
    assert_int_equal(setenv("COLO_FLIGHT_RECORDER", t_text("%s/rank", folder), 1), 0);
    expect_on_others(EXITS, COLO_ERR_ABORTED, ENDED "; its last error: grid spec");
    assert_int_equal(unsetenv("COLO_FLIGHT_RECORDER"), 0);
    for (int r = 0; r < 4; r++) {
        const char *path = t_text("%s/rank%d", folder, r);
        FILE *file = fopen(path, "r");
        assert_non_null(file);
        record[fread(record, 1, sizeof record - 1, file)] = '\0';
        fclose(file);
        assert_non_null(strstr(record, ENDED "; its last error: grid spec"));
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(folder), 0);
}

T_CASE(process_that_dies_before_its_child_is_an_error_on_all_others_at_once)
{
    if (strcmp(by(), "sockets") != 0)
        skip(); /* no call closes UCX's sockets in a child: the deadline finds that rank */
    expect_on_others(KILLED_BEFORE_FORKED, COLO_ERR_PEER, ENDED);
    expect_on_others(KILLED_BEFORE_SPAWNED, COLO_ERR_PEER, ENDED);
}

T_LIFE(child_exits)
{
    rank_check(strcmp(colo_comm_backend(world), by()) == 0);
    const pid_t child = me->rank == 2 ? fork() : 1;
    if (child == 0)
        exit(0);
    if (me->rank == 2)
        waitpid(child, NULL, 0);
    return colo_comm_barrier(world, NULL);
}

T_CASE(child_that_exits_leaves_its_parents_communicators_alone)
{
    t_all_well(4, child_exits);
}

/* A child of rank 2 destroys what it inherited, when its descriptors are other ones. */
T_LIFE(inherited)
{
    int status = 0;
    if (me->rank == 2 && fork() == 0) {
        int mine[4][2];
        char byte;
        bool good = true;
        for (int i = 0; i < 4; i++)
            good = good && socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, mine[i]) == 0;
        colo_comm_destroy(&world);
        for (int i = 0; i < 8; i++)
            good = good && recv(mine[i / 2][i % 2], &byte, 1, 0) < 0 && errno == EAGAIN;
        _exit(world || !good);
    }
    if (me->rank == 2 && (wait(&status) < 0 || status != 0))
        return colo_fail(COLO_ERR_STATE, "the child's end was 0x%x", (unsigned)status);
    return colo_comm_barrier(world, NULL);
}

T_CASE(destroy_in_a_child_leaves_sockets_alone)
{
    t_all_well(4, inherited);
}

/* ---- an environment that is refused ---- */

static const char *const typo[][2] = {{"COLO_TIMEOUT_MS", "abc"}, {"COLO_TRANSPORT", "pear"}};
static int typed;

static void mistyped(t_forked_t *me)
{
    if (me->rank == 1)
        setenv(typo[typed][0], typo[typed][1], 1);
    t_live(me);
}

T_CASE(value_that_is_refused_on_one_rank_is_an_error_on_all)
{
    for (typed = 0; typed < 2; typed++) {
        const t_page_t *page = t_fork_ranks(4, mistyped);
        const char *own = t_text("%s is '%s', expected ", typo[typed][0], typo[typed][1]);
        for (int r = 0; r < 4; r++) {
            t_expect(page, r, r == 1 ? COLO_ERR_ARG : COLO_ERR_PEER, own);
            if (r != 1)
                t_expect(page, r, COLO_ERR_PEER, "create_bootstrap: rank 1 failed: ");
        }
    }
}

/* ---- which ranks share a process ---- */

struct home { /* a process; its ranks are threads */
    t_page_t *page;
    int32_t first;
    bool shared; /* expected */
};

static colo_status_t at_home(colo_comm_t *threads, void *arg)
{
    const struct home *h = arg;
    t_forked_t me = {.page = h->page, .rank = h->first + colo_comm_rank(threads)};
    const colo_bootstrap_t b = t_bootstrap(&me);
    T_ENDS(colo_comm_destroy) colo_comm_t *world = NULL;
    bool shared = !h->shared;
    rank_try(colo_comm_create_bootstrap(&b, &world));
    rank_try(colo_comm_find_shared_process(world, &shared));
    rank_check(shared == h->shared);
    return COLO_OK;
}

/* Process p has ranks first[p] to first[p + 1] - 1 of four. */
static void homes(int32_t n, const int32_t *first, bool shared)
{
    t_page_t *page = t_new_page(4);
    (void)colo_comm_process(); /* what children copy does not make them one */
    for (int32_t p = 0; p < n; p++)
        if (fork() == 0) {
            struct home h = {page, first[p], shared};
            colo_status_t st = colo_comm_threads_run(first[p + 1] - first[p], at_home, &h);
            if (st < 0)
                fprintf(stderr, "process %d: %s\n", (int)p, colo_last_error());
            _exit(st < 0);
        }
    for (int32_t p = 0; p < n; p++) {
        int status = 1;
        assert_true(wait(&status) > 0);
        assert_int_equal(status, 0);
    }
}

T_CASE(threads_are_told_from_processes_over_any_transport)
{
    homes(4, (int32_t[]){0, 1, 2, 3, 4}, false);
    homes(1, (int32_t[]){0, 4}, true);
    homes(3, (int32_t[]){0, 1, 2, 4}, true);
}

/* ---- one rank of a world that meets in a folder ---- */

struct folder {
    const char *dir;
    int32_t rank, size, calls;
};

static colo_status_t over_folder(void *user, const void *send, void *recv, size_t bytes)
{
    struct folder *f = user;
    const int call = f->calls++;
    char path[600], part[600];
    snprintf(part, sizeof part, "%s/%d-%d.part", f->dir, call, (int)f->rank);
    snprintf(path, sizeof path, "%s/%d-%d", f->dir, call, (int)f->rank);
    FILE *out = fopen(part, "wb");
    if (!out || fwrite(send, 1, bytes, out) != bytes || fclose(out) || rename(part, path))
        return colo_fail(COLO_ERR_IO, "%s cannot be written", path);
    for (int32_t r = 0; r < f->size; r++) {
        struct stat st;
        snprintf(path, sizeof path, "%s/%d-%d", f->dir, call, (int)r);
        for (int polls = 0; stat(path, &st) != 0; polls++) {
            if (polls > 20000)
                return colo_fail(COLO_ERR_TIMEOUT, "%s did not appear", path);
            usleep(1000);
        }
        FILE *in = fopen(path, "rb");
        size_t n = in ? fread((char *)recv + (size_t)r * bytes, 1, bytes, in) : 0;
        if (in)
            fclose(in);
        if (n != bytes)
            return colo_fail(COLO_ERR_IO, "%s has %zu bytes, expected %zu", path, n, bytes);
    }
    return COLO_OK;
}

/* Messages of several pieces. */
static colo_status_t gather_much(colo_comm_t *world)
{
    enum { MUCH = 3 * 1000 * 1000 + 7 };
    const int32_t n = colo_comm_size(world), me = colo_comm_rank(world);
    int32_t *x = malloc(MUCH * sizeof *x), *all = malloc((size_t)n * MUCH * sizeof *all);
    for (int32_t i = 0; i < MUCH; i++)
        x[i] = i * n + me;
    rank_try(colo_comm_all_gather(world, x, all, MUCH, COLO_I32, NULL));
    for (int32_t r = 0; r < n; r++)
        for (int32_t i = 0; i < MUCH; i++)
            rank_check(all[(int64_t)r * MUCH + i] == i * n + r);
    free(x);
    free(all);
    return COLO_OK;
}

/* Of ranks 0 and 2 on one host, 1 and 3 on another: values, and that @pass has two levels. */
static colo_status_t on_two_hosts(colo_comm_t *world, const char *src, const char *dst,
                                  colo_pass_t pass)
{
    t_case_t c = t_between(src, dst, 8, 512, 33);
    colo_bridge_t *bridge = NULL;
    int32_t sends = 0, recvs = 0;
    c.dtype = COLO_F32;
    c.output = COLO_OUTPUT_FULL_SEQ;
    c.steps = 2;
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    (void)colo_plan_relays(colo_bridge_plan(bridge), pass, true, &sends);
    (void)colo_plan_relays(colo_bridge_plan(bridge), pass, false, &recvs);
    colo_bridge_destroy(&bridge);
    rank_check(sends == 1 && recvs == 1);
    return t_case_on(world, &c);
}

static int one_rank(const char *dir, int32_t rank, int32_t size)
{
    struct folder folder = {dir, rank, size, 0};
    colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, rank, size, over_folder, &folder};
    colo_comm_t *world = NULL;
    colo_status_t st = colo_comm_create_bootstrap(&b, &world);
    if (st == COLO_OK && getenv("T_BACKEND") &&
        strcmp(colo_comm_backend(world), getenv("T_BACKEND")) != 0)
        st = colo_fail(COLO_ERR_STATE, "the backend is %s", colo_comm_backend(world));
    if (st == COLO_OK)
        st = gather_much(world);
    if (st == COLO_OK)
        st = on_two_hosts(world, "dp=4", "tp=4", COLO_PASS_FORWARD);
    if (st == COLO_OK) /* each host has one of the two addends */
        st = on_two_hosts(world, "dp=2,tp=2", "cp=2,dp=2", COLO_PASS_BACKWARD);
    if (st < 0)
        fprintf(stderr, "rank %d: %s: %s\n", (int)rank, colo_status_name(st), colo_last_error());
    colo_comm_destroy(&world);
    return st < 0;
}

int main(int argc, char **argv)
{
    if (argc == 4)
        return one_rank(argv[1], (int32_t)atoi(argv[2]), (int32_t)atoi(argv[3]));
    return t_main("sockets/transport");
}
