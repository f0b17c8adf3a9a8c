/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_bridge.c - bridges over NCCL on 2, 4 or 8 ranks: the unit cases that fit, seeded
 * layouts on one communicator, COLLECTIVE, CUDA graphs, memory taken. == on every byte against the
 * oracle, the bytes between the elements included.
 */
#include "gpu/nccl_ranks.h"

#include "core/try.h"

#include <unistd.h>

static int32_t gpus; /* ranks of this run */

typedef struct pair {
    const char *src, *dst;
    int64_t b, n, h;
} pair_t;

static const pair_t pairs[] = {
    {"dp=2", "tp=2,dp=1", 4, 3, 2},
    {"tp=2,dp=1", "dp=2", 4, 3, 2},
    {"dp=2", "tp=1,cp=2,dp=1", 4, 8, 3},
    {"tp=2,dp=1", "cp=2,dp=1", 3, 8, 5},
    {"tp=2,dp=1", "tp=2,dp=1", 2, 3, 2},
    {"dp=2", "dp=2", 4, 3, 2},
    {"cp=2", "dp=2", 3, 4, 2},
    {"cp=2", "tp=2", 2, 8, 3},
    {"dp=1", "dp=1@1", 2, 3, 2},
    {"pp=2,dp=1", "dp=1,pp=2", 2, 3, 2},
    {"dp=4", "tp=4,dp=1", 8, 3, 2},
    {"tp=4,dp=1", "dp=4", 8, 3, 2},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 3},
    {"tp=2,dp=2", "tp=1,cp=2,dp=2", 4, 8, 3},
    {"tp=4", "cp=4", 2, 8, 2},
    {"dp=4", "cp=4", 8, 16, 2},
    {"tp=2,dp=2", "tp=2,cp=2", 4, 8, 5},
    {"tp=2,dp=2", "tp=1,dp=4", 8, 5, 3},
    {"cp=2,dp=2", "tp=2,cp=2", 4, 8, 2},
    {"cp=4", "dp=4", 5, 8, 2},
    {"tp=1,dp=3", "tp=2,dp=2", 6, 4, 2},
    {"dp=3", "cp=3@1", 7, 6, 2},
    {"tp=2,pp=2", "cp=2,dp=2", 4, 4, 2},
    {"dp=2,tp=2", "cp=2,dp=2", 4, 8, 2},
    {"tp=1,dp=2", "tp=2,dp=1", 4, 6, 3},
    {"tp=2,dp=1", "tp=1,dp=2", 4, 3, 5},
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", 4, 8, 3},
    {"tp=2,dp=1", "tp=1,cp=2,dp=1", 3, 8, 4},
    {"tp=2,dp=1", "tp=2,dp=1", 3, 4, 2},
    {"tp=2,dp=2", "tp=1,cp=4,dp=1", 4, 8, 5},
    {"tp=1,dp=4", "tp=2,cp=2,dp=1", 8, 8, 3},
    {"tp=4,dp=1", "tp=1,cp=2,dp=2", 4, 8, 3},
    {"ep=2,dp=2", "xp=2,cp=2", 4, 8, 2},
    {"dp=2", "cp=2@2", 4, 8, 3},
    {"tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3},
    {"tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 2},
    {"tp=1,dp=8", "tp=2,cp=4,dp=1", 8, 16, 3},
    {"tp=1,dp=8", "tp=4,dp=2", 8, 3, 5},
    {"tp=4,dp=2", "tp=2,cp=2,dp=2", 4, 8, 5},
    {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2", 4, 16, 2},
    {"tp=2,dp=4", "tp=2,pp=2,dp=2", 8, 3, 2},
    {"tp=1,dp=6", "tp=1,cp=3,dp=2@2", 12, 12, 2},
    {"dp=4,tp=2", "cp=2,dp=2,tp=2", 4, 8, 2},
    {"cp=8", "dp=8", 8, 16, 3},
    {"tp=8", "cp=8", 2, 16, 2},
    {"dp=3", "tp=2,cp=2@4", 6, 8, 3},
};
static const char *spread;  /* all ranks in dp, */
static const char *cut;     /* two of them in cp, */
static const char *cut_all; /* or all */

static bool fits(const t_case_t *c)
{
    return t_case_world(c) <= gpus;
}

static colo_status_t run_one(t_gpu_rank_t *r, const t_case_t *c)
{
    colo_status_t st = t_gpu_case(r, c);
    return st < 0 ? colo_fail_prefix(st, "%s", t_case_text(c)) : st;
}

/* ---- unit cases ---- */

static colo_status_t unit_cases(t_gpu_rank_t *r, void *arg)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    static const char *const axes[] = {"bsh", "sbh", "th", "hbs"};
    int32_t ran = 0;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        for (int k = 0; k < 4; k++) {
            t_case_t c = {.src = t_side(pairs[i].src, true),
                          .dst = t_side(pairs[i].dst, false),
                          .shape = {pairs[i].b, pairs[i].n, pairs[i].h},
                          .output = k < 2 ? COLO_FULL_SEQ : COLO_SHARDED,
                          .grad = k % 2 ? COLO_DISJOINT : COLO_PARTIAL,
                          .dtype = dtypes[(i + (size_t)k) % 4],
                          .axes = axes[(i / 4 + (size_t)k) % 4],
                          .stride = (t_stride_t)((i + (size_t)k) % T_STRIDE_COUNT),
                          .check = i % 3 == 0 ? 2 : 1,
                          .rounds = 2};
            if (!fits(&c))
                continue;
            rank_try(run_one(r, &c));
            ran++;
        }
    if (r->rank == 0)
        *(int32_t *)arg = ran;
    return COLO_OK;
}

static void unit_cases_arrive_on_gpus(void **state)
{
    (void)state;
    int32_t ran = 0;
    t_share(&ran, sizeof ran);
    assert_ok(t_gpus_run(gpus, false, unit_cases, &ran));
    t_unshare(&ran);
    print_message("%d unit cases on %d GPUs\n", ran, gpus);
    assert_true(ran >= (gpus == 8 ? 180 : gpus == 4 ? 100 : 36));
}

/* ---- messages of several MiB ---- */

static colo_status_t large_cases(t_gpu_rank_t *r, void *arg)
{
    static const char *const axes[] = {"bsh", "sbh", "th"};
    for (int k = 0; k < 6; k++) { /* each goes in two halves */
        t_case_t c = {.src = t_side(spread, true),
                      .dst = t_side(cut, false),
                      .shape = {gpus > 4 ? gpus : 4, 2048, 512},
                      .output = k % 2 ? COLO_FULL_SEQ : COLO_SHARDED,
                      .grad = COLO_PARTIAL,
                      .dtype = COLO_F32,
                      .axes = axes[k / 2],
                      .stride = k == 5 ? T_PADDED : T_TIGHT};
        rank_try(run_one(r, &c));
    }
    return COLO_OK;
}

static void boxes_of_several_mebibytes_arrive(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, large_cases, NULL));
}

/* ---- seeded layouts ---- */

static ref_side_t random_side(uint64_t *s, bool is_src)
{
    int64_t e[3], n;
    do {
        for (int i = 0; i < 3; i++)
            e[i] = 1 + t_below(s, gpus);
        n = e[0] * e[1] * e[2];
    } while (n > gpus || (n < gpus && t_below(s, 100) < 70));
    return t_side_ordered((int)t_below(s, T_ORDERS), e[0], e[1], e[2], is_src);
}

static t_case_t random_case(uint64_t *s)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64,
                                          COLO_I32, COLO_I8,   COLO_I16, COLO_I64};
    static const char *const axes[] = {"bsh", "sbh", "th", "hbs"};
    t_case_t c = {.src = random_side(s, true), .dst = random_side(s, false)};
    if (ref_side_size(&c.src) < gpus && t_below(s, 2))
        c.src.offset = t_below(s, gpus - ref_side_size(&c.src) + 1);
    if (ref_side_size(&c.dst) < gpus && t_below(s, 2))
        c.dst.offset = t_below(s, gpus - ref_side_size(&c.dst) + 1);
    int64_t a = ref_side_extent(&c.src, "cp"), b = ref_side_extent(&c.dst, "cp");
    c.shape.n = t_lcm(2 * a, 2 * b) * (1 + t_below(s, 3));
    c.shape.b = t_below(s, 9);
    c.shape.h = 1 + t_below(s, 40);
    c.output = t_below(s, 2) ? COLO_SHARDED : COLO_FULL_SEQ;
    c.grad = t_below(s, 2) ? COLO_PARTIAL : COLO_DISJOINT;
    bool sums = c.output == COLO_FULL_SEQ && c.grad == COLO_PARTIAL;
    c.dtype = dtypes[t_below(s, sums ? 4 : 8)];
    c.axes = axes[t_below(s, 4)];
    c.stride = (t_stride_t)t_below(s, T_STRIDE_COUNT);
    c.check = t_below(s, 100) < 20 ? 2 : 1;
    return c;
}

static colo_status_t random_cases(t_gpu_rank_t *r, void *arg)
{
    uint64_t s = t_seed();
    for (int64_t i = 0, n = *(int64_t *)arg; i < n; i++) {
        t_case_t c = random_case(&s);
        c.world = gpus;
        rank_try(run_one(r, &c));
    }
    return COLO_OK;
}

static void seeded_layouts_arrive_on_one_comm(void **state)
{
    (void)state;
    int64_t n = t_scaled(250);
    (void)t_seed();
    assert_ok(t_gpus_run(gpus, false, random_cases, &n));
}

/* ---- COLLECTIVE ---- */

static colo_status_t collective_cases(t_gpu_rank_t *r, void *arg)
{
    static const char *const axes[] = {"bsh", "sbh", "th"};
    int32_t ran = 0;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        for (int k = 0; k < 3; k++) {
            t_case_t c = {.src = t_side(pairs[i].src, true),
                          .dst = t_side(pairs[i].dst, false),
                          .shape = {pairs[i].b, pairs[i].n, pairs[i].h},
                          .output = k == 1 ? COLO_SHARDED : COLO_FULL_SEQ,
                          .grad = COLO_PARTIAL,
                          .algo = COLO_COLLECTIVE,
                          .dtype = k == 2 ? COLO_BF16 : COLO_F32,
                          .axes = axes[k],
                          .stride = (t_stride_t)(i % T_STRIDE_COUNT)};
            if (!fits(&c))
                continue;
            colo_status_t st = run_one(r, &c);
            /* no pair for COLLECTIVE: every rank says so before anything moves */
            if ((st == COLO_ERR_LAYOUT || st == COLO_ERR_SHAPE) &&
                colo_comm_check(r->gpus) == COLO_OK)
                continue;
            rank_try(st);
            ran++;
        }
    if (r->rank == 0)
        *(int32_t *)arg = ran;
    return COLO_OK;
}

static void collective_way_gives_the_same(void **state)
{
    (void)state;
    int32_t ran = 0;
    t_share(&ran, sizeof ran);
    assert_ok(t_gpus_run(gpus, false, collective_cases, &ran));
    t_unshare(&ran);
    print_message("%d COLLECTIVE cases on %d GPUs\n", ran, gpus);
    assert_true(ran >= 9);
}

/* ---- graphs ---- */

struct graph {
    t_case_t c;
    bool delays;
    int64_t rounds;
};

/* A tensor on the device, and pinned host memory to fill it from and fetch it to: copies of
 * pageable memory would wait for the stream. */
struct dev {
    t_buffer_t b;
    unsigned char *raw, *host;
    colo_tensor_t t;
};

static colo_status_t dev_make(struct dev *d, const t_case_t *c, t_role_t role,
                              const t_gpu_rank_t *r)
{
    rank_try(t_case_tensor(c, role, r->rank, 0, false, &d->b));
    rank_cuda(cudaMalloc((void **)&d->raw, d->b.bytes));
    rank_cuda(cudaMallocHost((void **)&d->host, d->b.bytes));
    rank_cuda(cudaMemcpy(d->raw, d->b.raw, d->b.bytes, cudaMemcpyHostToDevice));
    d->t = d->b.t;
    d->t.mem = COLO_CUDA;
    d->t.device = r->device;
    d->t.data = d->raw + ((unsigned char *)d->b.t.data - d->b.raw);
    return COLO_OK;
}

static colo_status_t dev_fill(struct dev *d, const t_case_t *c, t_role_t role, t_gpu_rank_t *r,
                              int64_t salt)
{
    t_buffer_t b;
    rank_try(t_case_tensor(c, role, r->rank, salt, true, &b));
    memcpy(d->host, b.raw, b.bytes);
    t_buffer_free(&b);
    return t_cuda(cudaMemcpyAsync(d->raw, d->host, d->b.bytes, cudaMemcpyHostToDevice, r->stream),
                  "fill");
}

static colo_status_t dev_check(struct dev *d, const t_case_t *c, t_role_t role, int32_t rank,
                               int64_t salt)
{
    memcpy(d->b.raw, d->host, d->b.bytes);
    return t_case_compare(c, role, rank, salt, &d->b);
}

static void dev_free(struct dev *d)
{
    cudaFree(d->raw);
    cudaFreeHost(d->host);
    t_buffer_free(&d->b);
}

static void nap(void *us)
{
    usleep((useconds_t)(uintptr_t)us);
}

static colo_status_t one_replay(t_gpu_rank_t *r, const struct graph *g, cudaGraphExec_t exec,
                                struct dev *d, int64_t salt, uint64_t *s)
{
    const t_case_t *c = &g->c;
    rank_try(dev_fill(&d[T_X], c, T_X, r, salt));
    rank_try(dev_fill(&d[T_DY], c, T_DY, r, salt));
    if (g->delays && t_below(s, 4) == 0) /* ranks draw different numbers */
        rank_cuda(cudaLaunchHostFunc(r->stream, nap, (void *)(uintptr_t)t_below(s, 3000)));
    rank_cuda(cudaGraphLaunch(exec, r->stream));
    static const t_role_t outs[] = {T_Y, T_DX};
    for (int i = 0; i < 2; i++)
        rank_cuda(cudaMemcpyAsync(d[outs[i]].host, d[outs[i]].raw, d[outs[i]].b.bytes,
                                  cudaMemcpyDeviceToHost, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    rank_try(dev_check(&d[T_Y], c, T_Y, r->rank, salt));
    return dev_check(&d[T_DX], c, T_DX, r->rank, salt);
}

/* Forward and backward captured at once, never run before: a bridge has all it needs from create.
 */
static colo_status_t replay(t_gpu_rank_t *r, void *arg)
{
    const struct graph *g = arg;
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    struct dev d[4];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    uint64_t s = 1 + (uint64_t)r->rank;
    rank_try(t_case_config(&g->c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    for (int role = T_X; role <= T_DX; role++)
        rank_try(dev_make(&d[role], &g->c, (t_role_t)role, r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    colo_status_t st = colo_bridge_forward(bridge, &d[T_X].t, &d[T_Y].t, r->stream);
    if (st == COLO_OK)
        st = colo_bridge_backward(bridge, &d[T_DY].t, &d[T_DX].t, r->stream);
    cudaError_t e = cudaStreamEndCapture(r->stream, &graph);
    rank_try(st);
    rank_cuda(e);
    rank_cuda(cudaGraphInstantiate(&exec, graph, 0));
    rank_cuda(cudaGraphUpload(exec, r->stream)); /* what may wait for the device does it now */
    rank_try(t_gpu_quiet(r));
    for (int64_t salt = 1; salt <= g->rounds; salt++) {
        st = one_replay(r, g, exec, d, salt, &s);
        if (st < 0)
            return colo_fail_prefix(st, "replay %lld", (long long)salt);
    }
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaGraphExecDestroy(exec));
    rank_cuda(cudaGraphDestroy(graph));
    for (int role = T_X; role <= T_DX; role++)
        dev_free(&d[role]);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static struct graph graph_of(colo_output_t output, int64_t rounds, bool delays)
{
    return (struct graph){.c = {.src = t_side(spread, true),
                                .dst = t_side(cut, false),
                                .shape = {8, 8, 16},
                                .output = output,
                                .dtype = COLO_F32},
                          .delays = delays,
                          .rounds = rounds};
}

static void captured_calls_replay_a_thousand_times_with_new_inputs(void **state)
{
    (void)state;
    struct graph g = graph_of(COLO_SHARDED, t_scaled(1000), false);
    assert_ok(t_gpus_run(gpus, false, replay, &g));
}

static void captured_calls_replay_while_ranks_are_late_at_random(void **state)
{
    (void)state;
    struct graph g = graph_of(COLO_FULL_SEQ, t_scaled(1000), true); /* PARTIAL: sums, too */
    assert_ok(t_gpus_run(gpus, false, replay, &g));
}

/* ---- streams ---- */

/* Two gradients on two streams, launched right behind each other: the second may not reach the
 * bridge's own memory before the first has left it. */
static colo_status_t in_turn(t_gpu_rank_t *r, void *arg)
{
    const t_case_t *c = arg;
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    struct dev d_y[2], d_x[2];
    t_gpu_rank_t on[2] = {*r, *r};
    rank_try(t_case_config(c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    for (int i = 0; i < 2; i++) {
        rank_cuda(cudaStreamCreateWithFlags(&on[i].stream, cudaStreamNonBlocking));
        rank_try(dev_make(&d_y[i], c, T_DY, r));
        rank_try(dev_make(&d_x[i], c, T_DX, r));
    }
    rank_try(t_gpu_quiet(r));
    for (int64_t salt = 1; salt < 21; salt += 2) {
        for (int i = 0; i < 2; i++)
            rank_try(dev_fill(&d_y[i], c, T_DY, &on[i], salt + i));
        for (int i = 0; i < 2; i++)
            rank_try(colo_bridge_backward(bridge, &d_y[i].t, &d_x[i].t, on[i].stream));
        for (int i = 0; i < 2; i++)
            rank_cuda(cudaMemcpyAsync(d_x[i].host, d_x[i].raw, d_x[i].b.bytes,
                                      cudaMemcpyDeviceToHost, on[i].stream));
        for (int i = 0; i < 2; i++)
            rank_cuda(cudaStreamSynchronize(on[i].stream));
        for (int i = 0; i < 2; i++)
            rank_try(dev_check(&d_x[i], c, T_DX, r->rank, salt + i));
    }
    rank_try(t_gpu_quiet(r));
    for (int i = 0; i < 2; i++) {
        dev_free(&d_y[i]);
        dev_free(&d_x[i]);
        rank_cuda(cudaStreamDestroy(on[i].stream));
    }
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static void calls_on_two_streams_in_turn_keep_their_values(void **state)
{
    (void)state;
    for (int algo = COLO_EXACT; algo <= COLO_COLLECTIVE; algo++) {
        t_case_t c = graph_of(COLO_FULL_SEQ, 0, false).c;
        c.shape = (ref_shape_t){8, 512, 256};
        c.algo = (colo_algo_t)algo;
        c.grad = COLO_PARTIAL;
        assert_ok(t_gpus_run(gpus, false, in_turn, &c));
    }
}

/* ---- memory that a bridge takes ---- */

#define FIRST_CALL ((size_t)4 << 20)

/* What is free on the device when no rank does anything: another one may share it. */
static colo_status_t free_bytes(t_gpu_rank_t *r, size_t *bytes)
{
    size_t all;
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaMemGetInfo(bytes, &all));
    return colo_comm_barrier(r->host, NULL);
}

static colo_status_t footprint(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = {.src = t_side(spread, true),
                  .dst = t_side(cut_all, false),
                  .shape = {4 * gpus, 2048, 512},
                  .output = COLO_SHARDED,
                  .dtype = COLO_F32,
                  .axes = "sbh"};
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL, *first = NULL;
    struct dev d[4];
    int devices = 1;
    rank_cuda(cudaGetDeviceCount(&devices));
    const size_t sharers = (size_t)((r->size - r->device + devices - 1) / devices);
    rank_try(t_case_config(&c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    rank_try(colo_bridge_create(&first, &config, r->gpus)); /* connects: NCCL takes what it takes */
    size_t free0, free1, free2;
    rank_try(free_bytes(r, &free0));
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    rank_try(free_bytes(r, &free1));
    const size_t scratch = colo_bridge_scratch_size(bridge);
    const int64_t missing = colo_plan_bytes(colo_bridge_plan(bridge), COLO_FORWARD).recv;
    if (free0 > free1 && /* the driver takes 2 MiB at a time */
        free0 - free1 > sharers * (scratch + (4u << 20)))
        return colo_fail(COLO_ERR_STATE,
                         "create took %zu bytes for %zu ranks, scratch_size says %zu",
                         free0 - free1, sharers, scratch);
    /* this layout sends what it receives: two halves of both are no more than what must arrive,
     * but for a line of each message and 256 bytes */
    if (scratch > (size_t)missing + 2 * (size_t)gpus * 65536)
        return colo_fail(COLO_ERR_STATE, "%zu bytes of staging for %lld that must arrive", scratch,
                         (long long)missing);
    for (int role = T_X; role <= T_DX; role++)
        rank_try(dev_make(&d[role], &c, (t_role_t)role, r));
    rank_try(dev_fill(&d[T_X], &c, T_X, r, 1)); /* the driver takes something at a first copy */
    rank_try(dev_fill(&d[T_DY], &c, T_DY, r, 1));
    rank_cuda(cudaMemcpyAsync(d[T_Y].host, d[T_Y].raw, d[T_Y].b.bytes, cudaMemcpyDeviceToHost,
                              r->stream));
    /* Between processes the driver took 4 MiB at first: less than any staging here, and never
     * again. */
    const size_t at_first = t_ranks_are_threads() ? 0 : FIRST_CALL;
    if (scratch <= at_first)
        return colo_fail(COLO_ERR_STATE, "%zu bytes of staging are too few to be seen", scratch);
    for (int turn = 0; turn < 3; turn++) {
        rank_try(free_bytes(r, &free1));
        rank_try(colo_bridge_forward(bridge, &d[T_X].t, &d[T_Y].t, r->stream));
        rank_try(colo_bridge_backward(bridge, &d[T_DY].t, &d[T_DX].t, r->stream));
        rank_try(free_bytes(r, &free2));
        if (free1 > free2 + (turn ? 0 : at_first))
            return colo_fail(COLO_ERR_STATE, "the calls of turn %d took %zu bytes", turn,
                             free1 - free2);
    }
    static const t_role_t outs[] = {T_Y, T_DX};
    for (int i = 0; i < 2; i++) {
        rank_cuda(cudaMemcpy(d[outs[i]].host, d[outs[i]].raw, d[outs[i]].b.bytes,
                             cudaMemcpyDeviceToHost));
        rank_try(dev_check(&d[outs[i]], &c, outs[i], r->rank, 1));
    }
    rank_try(t_gpu_quiet(r));
    for (int role = T_X; role <= T_DX; role++)
        dev_free(&d[role]);
    colo_bridge_destroy(&bridge);
    colo_bridge_destroy(&first);
    return COLO_OK;
}

static void staging_is_what_must_arrive_and_calls_take_nothing(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, footprint, NULL));
}

/* ---- reshape ---- */

static colo_status_t reshapes(t_gpu_rank_t *r, void *arg)
{
    /* 1 and 3 samples do not divide: other ranks are tied together, some have nothing */
    static const int64_t samples[] = {4, 8, 1, 3, 4, 2, 7};
    t_case_t c = {.src = t_side(gpus >= 4 ? "dp=4" : "dp=2", true),
                  .dst = t_side(gpus >= 4 ? "tp=1,cp=2,dp=2" : "tp=2,dp=1", false),
                  .shape = {4, 8, 3},
                  .dtype = COLO_F32};
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    rank_try(t_case_config(&c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    for (size_t i = 0; i < sizeof samples / sizeof samples[0]; i++) {
        c.shape.b = samples[i];
        colo_shape_t shape = {samples[i], 8, 3, 0};
        rank_try(colo_bridge_reshape(bridge, &shape));
        rank_try(t_gpu_way(r, bridge, &c, (int64_t)i, false));
        rank_try(t_gpu_way(r, bridge, &c, (int64_t)i, true));
    }
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static void a_bridge_takes_other_batches(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, reshapes, NULL));
}

/* One sample leaves ranks 0 and 1 to themselves, four tie them: they connect in the next call. */
static colo_status_t late_capture(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = {.src = t_side("dp=4", true),
                  .dst = t_side("tp=1,cp=2,dp=2", false),
                  .shape = {1, 8, 3},
                  .dtype = COLO_F32};
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    struct dev x, y;
    cudaGraph_t graph;
    rank_try(t_case_config(&c, &src, &dst, &config));
    config.mem = COLO_CUDA;
    rank_try(colo_bridge_create(&bridge, &config, r->gpus));
    c.shape.b = 4;
    rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){4, 8, 3, 0}));
    rank_try(dev_make(&x, &c, T_X, r));
    rank_try(dev_make(&y, &c, T_Y, r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    colo_status_t st = colo_bridge_forward(bridge, &x.t, &y.t, r->stream);
    rank_cuda(cudaStreamEndCapture(r->stream, &graph));
    cudaGraphDestroy(graph);
    if (r->rank < 2)
        rank_check(st == COLO_ERR_STATE && strstr(colo_last_error(), "cannot be captured"));
    else
        rank_try(st);
    rank_try(t_gpu_way(r, bridge, &c, 0, false));
    rank_try(t_gpu_quiet(r));
    dev_free(&x);
    dev_free(&y);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static void a_capture_that_would_connect_is_refused_and_the_comm_lives(void **state)
{
    (void)state;
    if (gpus >= 4)
        assert_ok(t_gpus_run(4, false, late_capture, NULL));
}

/* ---- the wrong memory ---- */

static colo_status_t host_bridge(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = {
        .src = t_side("dp=2", true), .dst = t_side("tp=2,dp=1", false), .shape = {4, 3, 2}};
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    colo_bridge_t *bridge = NULL;
    rank_try(t_case_config(&c, &src, &dst, &config));
    rank_check(colo_bridge_create(&bridge, &config, r->gpus) < 0 && !bridge);
    rank_check(colo_comm_check(r->gpus) == COLO_OK);
    config.mem = COLO_CUDA;
    rank_check(colo_bridge_create(&bridge, &config, r->host) < 0 && !bridge);
    return colo_comm_check(r->host);
}

static void a_bridge_of_the_other_memory_is_refused_and_the_comm_lives(void **state)
{
    (void)state;
    assert_ok(t_gpus_run(gpus, false, host_bridge, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unit_cases_arrive_on_gpus),
        cmocka_unit_test(boxes_of_several_mebibytes_arrive),
        cmocka_unit_test(seeded_layouts_arrive_on_one_comm),
        cmocka_unit_test(collective_way_gives_the_same),
        cmocka_unit_test(captured_calls_replay_a_thousand_times_with_new_inputs),
        cmocka_unit_test(captured_calls_replay_while_ranks_are_late_at_random),
        cmocka_unit_test(calls_on_two_streams_in_turn_keep_their_values),
        cmocka_unit_test(staging_is_what_must_arrive_and_calls_take_nothing),
        cmocka_unit_test(a_bridge_takes_other_batches),
        cmocka_unit_test(a_capture_that_would_connect_is_refused_and_the_comm_lives),
        cmocka_unit_test(a_bridge_of_the_other_memory_is_refused_and_the_comm_lives),
    };
    if (!t_gpus_enough(2))
        return T_EXIT_SKIP;
    gpus = t_gpu_count() >= 8 ? 8 : t_gpu_count() >= 4 ? 4 : 2;
    spread = gpus == 8 ? "tp=1,dp=8" : gpus == 4 ? "tp=1,dp=4" : "tp=1,dp=2";
    cut = gpus == 8 ? "tp=1,cp=2,dp=4" : gpus == 4 ? "tp=1,cp=2,dp=2" : "tp=1,cp=2,dp=1";
    cut_all = gpus == 8 ? "tp=1,cp=8,dp=1" : gpus == 4 ? "tp=1,cp=4,dp=1" : "tp=1,cp=2,dp=1";
    return cmocka_run_group_tests_name("gpu/nccl_bridge", tests, NULL, NULL);
}
