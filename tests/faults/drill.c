/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drill.c - "drill TRANSPORT ROW FOLDER": four ranks do one job, one of them is at fault, and each
 * live rank writes what it got and when into FOLDER/RANK. drill.py knows the rows and judges.
 *
 * The job: split, create a bridge, three forwards and backwards, two sums. A row is a fault, "@"
 * and the step before which it happens. Afterwards the live ranks destroy everything and sum once
 * more on a fresh communicator. TRANSPORT: threads; sockets or ucx, processes that fork
 * (drill_host.c). Or nccl or peer, threads with GPUs (drill_gpu.c, another program).
 */
#include "faults/drill.h"

#include "faults/culprit.h"

#include <colobridge/version.h>

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    STEPS = 3,
    SAMPLES = 8,
    ROWS = 8,
    WIDTH = 4,
    LARGE = 1 << 18 /* elements, in many frames */
};

const char *folder;
char fault[32], step[32];
int deadline_ms;
static float large[2][LARGE];

/* ---- calls of the system that the library makes, and this process may hinder ---- */

static _Atomic bool sends_fail, sends_fail_once, reads_little;
static _Atomic int hindered;
_Atomic int sends_to_live;

ssize_t send(int fd, const void *data, size_t bytes, int flags)
{
    static _Atomic unsigned calls;
    if (sends_to_live > 0 && --sends_to_live == 0) {
        report_fault();
        raise(SIGKILL);
    }
    if (sends_fail || (sends_fail_once && calls++ % 2 == 0)) {
        errno = ENOBUFS;
        hindered++;
        return -1;
    }
    return sendto(fd, data, bytes, flags, NULL, 0);
}

ssize_t recv(int fd, void *data, size_t bytes, int flags)
{
    if (reads_little)
        usleep(100);
    hindered += reads_little && bytes > 32;
    return recvfrom(fd, data, reads_little && bytes > 32 ? 32 : bytes, flags, NULL, NULL);
}

uint32_t next_version;

uint32_t colo_version_number(void)
{
    return COLO_VERSION_MAJOR << 16 | COLO_VERSION_MINOR << 8 | (COLO_VERSION_PATCH + next_version);
}

const char *colo_version(void)
{
    static char text[32];
    const uint32_t n = colo_version_number();
    snprintf(text, sizeof text, "%u.%u.%u", n >> 16, n >> 8 & 0xff, n & 0xff);
    return text;
}

/* Closes one direction of each connection of this process. */
static void close_halves(int direction)
{
    for (int fd = 3; fd < 256; fd++)
        (void)shutdown(fd, direction);
}

/* ---- what a rank says ---- */

void report(struct rank *r, const char *call, colo_status_t st, double begin)
{
    char words[1000];
    if (r->me == CULPRIT)
        release_memory();
    snprintf(words, sizeof words, "%s", st < 0 ? colo_last_error() : "");
    for (char *c = words; *c; c++)
        if (*c == '"' || *c == '\\' || *c < ' ')
            *c = '\'';
    fprintf(r->out,
            "{\"call\":\"%s\",\"status\":\"%s\",\"begin\":%.6f,\"end\":%.6f,\"error\":\"%s\"}\n",
            call, colo_status_name(st), begin, colo_now(), words);
    fflush(r->out);
}

void report_fault(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/fault", folder);
    FILE *f = fopen(path, "w");
    if (f)
        fprintf(f, "%.6f\n", colo_now());
    if (f)
        fclose(f);
}

/* Until some rank reports the fault; not for ever, so that a fault that does not come is seen. */
static void await_fault(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/fault", folder);
    for (int ms = 0; ms < 20 * deadline_ms && access(path, F_OK) != 0; ms++)
        usleep(1000);
}

/* ---- faults ---- */

bool is(const struct rank *r, const char *name)
{
    return r->me == CULPRIT && strcmp(fault, name) == 0;
}

static void resume_later(int ms)
{
    const pid_t parent = getpid(), child = fork();
    if (child == 0) { /* a grandchild that waits, so that nothing here reaps it */
        if (fork() == 0) {
            for (int fd = 3; fd < 256; fd++)
                close(fd);
            usleep((useconds_t)ms * 1000);
            kill(parent, SIGCONT);
        }
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

/* True: the rank takes no further part. */
static bool strike(struct rank *r, const char *now)
{
    if (r->me != CULPRIT || strcmp(step, now) != 0)
        return false;
    report_fault();
    if (is(r, "killed"))
        raise(SIGKILL);
    if (is(r, "exits"))
        exit(0);
    if (is(r, "late"))
        usleep((useconds_t)deadline_ms * 1000 / 3);
    if (is(r, "stopped-briefly") || is(r, "stopped")) {
        resume_later(is(r, "stopped") ? 3 * deadline_ms : deadline_ms / 3);
        raise(SIGSTOP);
    }
    if (is(r, "never") && strcmp(now, "destroy") == 0)
        usleep((useconds_t)deadline_ms * 1250); /* the others must not wait any longer */
    else if (is(r, "never"))
        while (colo_comm_check(r->world) == COLO_OK && colo_comm_check(r->sums) == COLO_OK)
            usleep(1000);
    if (is(r, "mute") || is(r, "deaf"))
        close_halves(is(r, "mute") ? SHUT_WR : SHUT_RD);
    if (is(r, "starved"))
        sends_fail = true;
    if (is(r, "memory"))
        exhaust_memory();
    if (is(r, "fails") && fail_while_open)
        fail_while_open(r);
    return is(r, "leaves");
}

/* Kills this process at some moment of the work that follows. */
static void kill_later(int ms)
{
    const pid_t parent = getpid();
    if (fork() == 0) {
        usleep((useconds_t)ms * 1000);
        report_fault();
        kill(parent, SIGKILL);
        _exit(0);
    }
}

/* A child of fork() has a copy of the comm that no rank answers. */
static colo_status_t use_in_child(colo_comm_t *c)
{
    int how = 0;
    const pid_t child = fork();
    if (child == 0) {
        const colo_status_t st = colo_comm_barrier(c, NULL);
        colo_comm_destroy(&c);
        _exit(st == COLO_ERR_STATE ? 0 : 1);
    }
    return waitpid(child, &how, 0) == child && how == 0
               ? COLO_OK
               : colo_fail(COLO_ERR_CONTRACT, "a child of fork() was not refused");
}

static void *abort_soon(void *c)
{
    usleep(100 * 1000);
    report_fault();
    colo_comm_abort(c, "the drill says so");
    return NULL;
}

struct intruder {
    struct rank *rank;
    colo_comm_t *comm;
};

static bool is_in_call(colo_comm_t *c)
{
    pthread_mutex_lock(c->lock);
    const bool in = c->thread != 0;
    pthread_mutex_unlock(c->lock);
    return in;
}

/* A second thread calls while the first waits for the other ranks, which wait for the fault. */
static void *intrude(void *arg)
{
    struct intruder *i = arg;
    enter_thread(i->rank);
    for (int ms = 0; ms < deadline_ms && !is_in_call(i->comm); ms++)
        usleep(1000);
    const double begin = colo_now();
    report(i->rank, "barrier", colo_comm_barrier(i->comm, NULL), begin);
    report_fault();
    return NULL;
}

static _Atomic bool asks;

static void *ask(void *c)
{
    for (; asks; usleep(1000))
        (void)colo_comm_check(c);
    return NULL;
}

static void nothing(int signal)
{
    (void)signal;
}

/* A signal every millisecond, in any system call. */
static void storm(bool on)
{
    const struct itimerval each = {{0, on ? 1000 : 0}, {0, on ? 1000 : 0}};
    const struct sigaction act = {.sa_handler = nothing}; /* no SA_RESTART */
    sigaction(SIGALRM, &act, NULL);
    setitimer(ITIMER_REAL, &each, NULL);
}

/* ---- the job ---- */

#define STEP(r, name, call)               \
    do {                                  \
        const double begin_ = colo_now(); \
        st = (call);                      \
        if (st < 0) {                     \
            report(r, name, st, begin_);  \
            goto done;                    \
        }                                 \
    } while (0)

static void config_of(const struct rank *r, colo_bridge_config_t *k, const colo_layout_t *src)
{
    if (is(r, "shape"))
        k->shape.rows *= 2;
    if (is(r, "dtype"))
        k->dtype = COLO_F64;
    if (is(r, "output"))
        k->output = COLO_OUTPUT_SHARDED;
    if (is(r, "gradient"))
        k->grad = COLO_GRAD_DISJOINT;
    if (is(r, "algorithm"))
        k->algo = COLO_ALGO_COLLECTIVE;
    if (is(r, "layout"))
        k->dst = src;
    if (strcmp(step, "create") == 0 && !is(r, "never") && !is(r, "late") && r->me == CULPRIT)
        report_fault();
}

/* Half the ranks need what the other half has, with a gradient of both context ranks. */
colo_status_t work(struct rank *r)
{
    colo_comm_t *world = r->world;
    const int64_t samples =
        strcmp(fault, "no-samples") == 0 ? 2 : SAMPLES; /* of dp 4: two have none */
    float x[SAMPLES * ROWS * WIDTH], y[SAMPLES * ROWS * WIDTH], sum = 0;
    colo_grid_t from, to;
    colo_layout_t src, dst;
    colo_bridge_t *bridge = NULL;
    colo_comm_t *pair = NULL;
    colo_memory_t *memory = NULL;
    pthread_t thread;
    bool threaded = false;
    colo_status_t st = COLO_OK;
    struct intruder intruder = {r, world};
    for (int i = 0; i < SAMPLES * ROWS * WIDTH; i++)
        x[i] = y[i] = is(r, "nan") && i == 1 ? NAN : 1;
    STEP(r, "set_timeout", colo_comm_set_timeout(world, is(r, "deadline-0") ? 0 : deadline_ms));
    /* GPUs compare only the first calls if not told otherwise, and their calls do not wait. */
    const bool on_gpus = r->mem == COLO_MEM_CUDA;
    if (strcmp(fault, "replicas") == 0 ||
        (on_gpus && (strcmp(fault, "order") == 0 || strcmp(fault, "two-threads") == 0)) ||
        is(r, "levels"))
        STEP(r, "set_check", colo_comm_set_check(world, 2));
    if (is(r, "signals"))
        storm(true);
    sends_fail_once = is(r, "starved-briefly");
    reads_little = is(r, "slow-reader");
    if (is(r, "monitor")) {
        asks = threaded = true;
        pthread_create(&thread, NULL, ask, world);
    }
    const bool replicas = strcmp(fault, "replicas") == 0;
    STEP(r, "grid", colo_grid_parse(&from, replicas ? "tp=2,dp=2" : "tp=1,dp=4", RANKS));
    STEP(r, "grid", colo_grid_parse(&to, "tp=1,cp=2,dp=2", RANKS));
    STEP(r, "layout", colo_layout_init_src(&src, &from));
    STEP(r, "layout", colo_layout_init_dst(&dst, &to));
    if (strike(r, "split"))
        goto done;
    STEP(r, "split", colo_comm_split(r->sums, &to, is(r, "dims") ? "dp" : "cp", &pair));
    const bool segments = strcmp(fault, "segments") == 0, chunks = strcmp(fault, "chunks") == 0;
    if (is(r, "segments") || is(r, "chunks"))
        report_fault();
    if (segments)
        STEP(r, "batch", carry_batch(r, &src, &dst, WIDTH));
    if (chunks)
        STEP(r, "loss", loss_in_chunks(world, is(r, "chunks")));
    if (strcmp(step, "register") == 0) {
        (void)strike(r, "register");
        STEP(r, "register", colo_memory_alloc(world, 4096, &memory));
    }
    if (strike(r, "create"))
        goto done;
    colo_bridge_config_t k = {
        COLO_BRIDGE_CONFIG_INIT, .src = &src,  .dst = &dst, .shape = {samples, ROWS, WIDTH, 0},
        .dtype = COLO_F32,       .mem = r->mem};
    config_of(r, &k, &src);
    STEP(r, "create", colo_bridge_create(&bridge, &k, world));
    int64_t xs[4], ys[4];
    const int32_t xn = colo_bridge_src_shape(bridge, xs), yn = colo_bridge_dst_shape(bridge, ys);
    colo_tensor_t tx = colo_tensor_host(x, COLO_F32, xn, xs),
                  ty = colo_tensor_host(y, COLO_F32, yn, ys);
    const int steps = STEPS + (is(r, "one-more") ? 1 : is(r, "one-fewer") ? -1 : 0);
    if (is(r, "forks"))
        STEP(r, "child", use_in_child(world));
    if (is(r, "killed-at-work"))
        kill_later(60);
    while (strcmp(fault, "killed-at-work") == 0) {
        STEP(r, "forward", colo_bridge_forward(bridge, &tx, &ty, NULL));
        STEP(
            r, "all_reduce",
            colo_comm_all_reduce(world, large[0], large[1], LARGE, COLO_F32, COLO_REDOP_SUM, NULL));
    }
    if (is(r, "replicas")) {
        report_fault();
        x[0] = 7;
    }
    STEP(r, "tensor", place_tensor(r, &tx, sizeof x));
    STEP(r, "tensor", place_tensor(r, &ty, sizeof y));
    for (int i = 0; i < steps; i++) {
        if (i == 1 && is(r, "aborted")) {
            pthread_create(&thread, NULL, abort_soon, world);
            threaded = true;
            for (int ms = 0; ms < 20 * deadline_ms && colo_comm_check(world) == COLO_OK; ms++)
                usleep(1000);
        }
        if (i == 1 && is(r, "two-threads")) {
            pthread_create(&thread, NULL, intrude, &intruder);
            threaded = true;
        } else if (i == 1 && strcmp(fault, "two-threads") == 0) {
            await_fault();
        }
        if (i == 1 && is(r, "order")) {
            report_fault();
            STEP(r, "backward", wait_ended(r, colo_bridge_backward(bridge, &ty, &tx, r->stream)));
        }
        if (i >= STEPS - 1 && (is(r, "one-more") || is(r, "one-fewer")))
            report_fault();
        if (i == 1 && strike(r, "forward"))
            goto done;
        STEP(r, "forward", wait_ended(r, colo_bridge_forward(bridge, &tx, &ty, r->stream)));
        if (i == 1 && strike(r, "backward"))
            goto done;
        STEP(r, "backward", wait_ended(r, colo_bridge_backward(bridge, &ty, &tx, r->stream)));
    }
    STEP(r, "all_reduce", sum_ranks(r, pair, &sum));
    if (sum == 2) /* and once with all: exchanges wait for those that they need */
        STEP(r, "all_reduce", sum_ranks(r, r->sums, &sum));
    if (sum != RANKS)
        st = colo_fail(COLO_ERR_CONTRACT, "the sum is %g, expected %d", sum, RANKS);
    if ((sends_fail_once || reads_little) && !hindered)
        st = colo_fail(COLO_ERR_CONTRACT, "no send() and no recv() was hindered");
    report(r, "job", st, colo_now());
    (void)strike(r, "destroy");
    burden_device(r, pair);
done:
    storm(false);
    sends_fail = sends_fail_once = reads_little = asks = false;
    if (threaded)
        pthread_join(thread, NULL);
    const double begin = colo_now();
    colo_bridge_destroy(&bridge);
    colo_memory_destroy(&memory);
    colo_comm_destroy(&pair);
    (void)strike(r, "leave");
    report(r, "destroy", COLO_OK, begin);
    return st;
}

bool open_rank(struct rank *r, int32_t me)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, (int)me);
    *r = (struct rank){.me = me, .out = fopen(path, "a")};
    return r->out != NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4 || sscanf(argv[2], "%31[^@]@%31s", fault, step) < 1) {
        fprintf(stderr, "usage: drill %s FAULT[@STEP] FOLDER; drill.py runs it\n", transports);
        return 2;
    }
    folder = argv[3];
    setenv("COLO_TIMEOUT_MS", "500", 0); /* as drill.py */
    deadline_ms = atoi(getenv("COLO_TIMEOUT_MS"));
    return run_worlds(argv[1]);
}
