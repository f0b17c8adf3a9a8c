/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl_nodes.c - bridges between 4 GPUs on two nodes of two, as COLO_NODE says: what both
 * ranks of a node need crosses once and is passed on inside; their addends of a gradient are added
 * up inside, and the sum crosses. == on every byte against the oracle, and the bits of one level,
 * or of a bridge of host memory on the same nodes, also of captured calls.
 */
#include "gpu/pairs.h"
#include "gpu/ragged_gpu.h"

#include "comm/comm.h"
#include "core/error.h"

enum { RANKS = 4 };

static void run_on(const char *names, t_gpu_fn fn, void *arg)
{
    setenv("COLO_NODE", names, 1);
    assert_ok(t_gpus_run(RANKS, false, fn, arg));
    unsetenv("COLO_NODE");
}

static void run_on_nodes(t_gpu_fn fn, void *arg, size_t bytes)
{
    if (bytes)
        t_share(arg, bytes);
    run_on("0,0,1,1", fn, arg);
    run_on("a,b,a,b", fn, arg);
    if (bytes)
        t_unshare(arg);
}

/* Does this rank pass anything on, or get it so? */
static bool relays(const colo_bridge_t *bridge, colo_pass_t pass)
{
    int32_t n[2];
    for (int sends = 0; sends < 2; sends++)
        (void)colo_plan_relays(colo_bridge_plan(bridge), pass, sends, &n[sends]);
    return n[0] + n[1] > 0;
}

static _Thread_local const colo_comm_backend_t *nccl;
static _Thread_local int
    inside; /* messages of NCCL to a rank of the same node, if all is registered */

/* ---- values ---- */

static colo_status_t run_case(t_gpu_rank_t *r, const t_case_t *c, bool *relayed)
{
    const size_t used = r->used;
    const int earlier = inside;
    colo_bridge_t *bridge = NULL;
    rank_try(t_gpu_bridge(r, c, &bridge));
    *relayed = relays(bridge, COLO_PASS_FORWARD) || relays(bridge, COLO_PASS_BACKWARD);
    for (int32_t i = 0; i < (c->steps ? c->steps : 1); i++) {
        rank_try(t_gpu_pass(r, bridge, c, i, false));
        rank_try(t_gpu_pass(r, bridge, c, i, true));
    }
    rank_check(inside == earlier || (relays(bridge, COLO_PASS_BACKWARD) &&
                                     colo_plan_addends(colo_bridge_plan(bridge)) > 1));
    r->used = used;
    return t_gpu_end(r, &bridge);
}

static colo_status_t unit_cases(t_gpu_rank_t *r, void *arg)
{
    int32_t *two = arg;
    for (size_t i = 0; i < T_PAIRS; i++)
        for (int k = 0; k < 4; k++) {
            t_case_t c = t_unit_case(i, (size_t)k);
            bool relayed;
            if (t_case_world(&c) > RANKS)
                continue;
            c.world = RANKS;
            const colo_status_t st = run_case(r, &c, &relayed);
            if (st < 0)
                return colo_fail_prefix(st, "%s", t_case_text(&c));
            two[r->rank] += relayed;
        }
    return COLO_OK;
}

T_CASE(unit_layouts_on_two_nodes_arrive)
{
    int32_t two[RANKS] = {0};
    run_on_nodes(unit_cases, two, sizeof two);
    for (int r = 0; r < RANKS; r++)
        assert_true(two[r] > 40);
}

/* Ranks 2 and 3 need all that 0 and 1 hold: each gets half, in parts of 1 MiB and more, and passes
 * on what it got, so the second exchange stages more than the first. */
static colo_status_t large_cases(t_gpu_rank_t *r, void *arg)
{
    for (int k = 0; k < 2; k++) {
        t_case_t c = t_between("dp=2", "cp=2@2", 4, 256, 1024);
        bool relayed;
        c.output = COLO_OUTPUT_FULL_SEQ;
        c.grad = k ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL;
        c.dtype = COLO_F32;
        c.axes = t_axes[k];
        c.stride = T_PADDED; /* not in place */
        rank_try(run_case(r, &c, &relayed));
        rank_check(relayed == (r->rank >= 2));
    }
    return COLO_OK;
}

T_CASE(boxes_of_several_mebibytes_are_passed_on)
{
    run_on("0,0,1,1", large_cases, NULL);
}

/* Rank 0 gets sums of three ranks in fp32, twice the bytes of all else that it sends or gets, and
 * not in one piece: half of the rows of two samples. */
static colo_status_t large_sums(t_gpu_rank_t *r, void *arg)
{
    t_case_t c = t_between("cp=2", "cp=3@1", 2, 120, 1024);
    bool relayed;
    c.output = COLO_OUTPUT_FULL_SEQ;
    c.grad = COLO_GRAD_PARTIAL;
    c.dtype = COLO_BF16;
    c.stride = T_PADDED;
    return run_case(r, &c, &relayed);
}

T_CASE(sums_of_more_bytes_than_all_else_arrive)
{
    run_on("a,b,b,b", large_sums, NULL);
}

/* ---- bits of one level ---- */

/* A bridge on one level and one on two, and their tensors: the same inputs. */
struct both {
    colo_bridge_t *bridge[2];
    colo_tensor_t t[2][T_FOUR];
};

static colo_status_t both_make(t_gpu_rank_t *r, const t_case_t *c, const t_ragged_where_t *w,
                               struct both *b)
{
    for (int two = 0; two < 2; two++) {
        colo_layout_t src, dst;
        colo_bridge_config_t config;
        rank_try(t_case_config(c, &src, &dst, &config));
        config.mem = COLO_MEM_CUDA;
        config.one_level = !two;
        rank_try(colo_bridge_create(&b->bridge[two], &config, r->gpus));
        rank_check(two || !relays(b->bridge[two], COLO_PASS_FORWARD));
        for (int i = 0; i < T_FOUR; i++) {
            const bool is_dst = i == T_Y2 || i == T_DY2, in = i == T_X2 || i == T_DY2;
            int64_t shape[3];
            if (is_dst)
                (void)colo_bridge_dst_shape(b->bridge[two], shape);
            else
                (void)colo_bridge_src_shape(b->bridge[two], shape);
            /* replicas along tp hold the same */
            const ref_side_t *side = is_dst ? &c->dst : &c->src;
            const uint64_t seed =
                (in ? 100 : 0) * (1 + (uint64_t)ref_side_coord(side, r->rank, "dp")) +
                (uint64_t)ref_side_coord(side, r->rank, "cp");
            rank_try(t_random_rows(w, shape[0], shape[1], seed, &b->t[two][i]));
        }
    }
    return t_gpu_quiet(r);
}

static colo_status_t both_ways(struct both *b, int two, cudaStream_t stream)
{
    const colo_tensor_t *t = b->t[two];
    rank_try(colo_bridge_forward(b->bridge[two], &t[T_X2], &t[T_Y2], stream));
    return colo_bridge_backward(b->bridge[two], &t[T_DY2], &t[T_DX2], stream);
}

static bool partial(const t_case_t *c)
{
    return c->output == COLO_OUTPUT_FULL_SEQ && c->grad == COLO_GRAD_PARTIAL;
}

/* The gradient that a bridge of host memory makes of the same d_y, on the same nodes. */
static colo_status_t gradient_on_host(t_gpu_rank_t *r, const t_case_t *c, const t_ragged_where_t *w,
                                      colo_tensor_t t[T_FOUR])
{
    colo_bridge_t *bridge = NULL;
    colo_tensor_t in = t[T_DY2], out = t[T_DX2];
    const size_t n = (size_t)colo_tensor_count(&in) * sizeof(float),
                 m = (size_t)colo_tensor_count(&out) * sizeof(float);
    COLO_AUTOFREE char *d_y = malloc(n + 1), *d_x = calloc(m + 1, 1);
    rank_check(d_y && d_x);
    rank_try(w->get(w->arg, d_y, in.data, n));
    in.mem = out.mem = COLO_MEM_HOST;
    in.device = out.device = -1;
    in.data = d_y;
    out.data = d_x;
    rank_try(t_case_bridge(&bridge, c, r->host, COLO_MEM_HOST));
    rank_try(colo_bridge_backward(bridge, &in, &out, NULL));
    colo_bridge_destroy(&bridge);
    w->drop(w->arg, t[T_DX2].data);
    return w->put(w->arg, d_x, m + 1, &t[T_DX2].data);
}

struct captured {
    t_case_t c;
    int32_t two[RANKS], sums[RANKS]; /* by rank: passes of two levels, messages of sums */
};

/* Captured at once, never run before. */
static colo_status_t replays(t_gpu_rank_t *r, void *arg)
{
    struct captured *g = arg;
    const t_ragged_where_t w = t_where(r);
    cudaGraphExec_t exec;
    struct both b;
    rank_try(both_make(r, &g->c, &w, &b));
    g->two[r->rank] +=
        relays(b.bridge[1], COLO_PASS_FORWARD) + relays(b.bridge[1], COLO_PASS_BACKWARD);
    rank_try(both_ways(&b, 0, r->stream));
    rank_try(t_gpu_quiet(r));
    if (partial(&g->c)) {
        (void)colo_plan_sums(colo_bridge_plan(b.bridge[1]), COLO_PASS_BACKWARD, true,
                             &g->sums[r->rank]);
        rank_try(gradient_on_host(r, &g->c, &w, b.t[0]));
    }
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaStreamBeginCapture(r->stream, cudaStreamCaptureModeThreadLocal));
    rank_try(t_gpu_captured(r, both_ways(&b, 1, r->stream), &exec));
    for (int i = 0; i < 3; i++)
        rank_cuda(cudaGraphLaunch(exec, r->stream));
    rank_try(t_gpu_quiet(r));
    rank_try(t_same_bits(&w, &b.t[0][T_Y2], &b.t[1][T_Y2]));
    rank_try(t_same_bits(&w, &b.t[0][T_DX2], &b.t[1][T_DX2]));
    rank_try(t_gpu_quiet(r));
    rank_cuda(cudaGraphExecDestroy(exec));
    for (int two = 0; two < 2; two++) {
        for (int i = 0; i < T_FOUR; i++)
            w.drop(w.arg, b.t[two][i].data);
        rank_try(t_gpu_end(r, &b.bridge[two]));
    }
    return COLO_OK;
}

static void captured_pairs(void (*runs)(t_gpu_fn fn, void *arg, size_t bytes))
{
    static const t_layouts_t pairs[] = {{"tp=2,dp=2", "cp=4"}, {"dp=2,tp=2", "cp=2,dp=2"}};
    int32_t two = 0, sums = 0;
    for (int k = 0; k < 6; k++) {
        struct captured g = {.c = t_between(pairs[k % 2].src, pairs[k % 2].dst, 8, 16, 6)};
        g.c.output = k < 2 ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
        g.c.grad = k < 4 ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL;
        g.c.axes = "th";
        g.c.dtype = COLO_F32;
        runs(replays, &g, sizeof g);
        for (int r = 0; r < RANKS; r++) {
            two += g.two[r];
            sums += g.sums[r];
        }
    }
    assert_true(two > 30 && sums > 3);
}

T_CASE(captured_calls_on_two_nodes_have_the_stated_bits)
{
    captured_pairs(run_on_nodes);
}

/* ---- ragged ---- */

T_CASE(random_batches_on_two_nodes_arrive)
{
    run_on_nodes(t_ragged_batches, &(int64_t){150}, 0);
}

T_CASE(uniform_tables_on_two_nodes_give_the_bits_of_the_uniform_bridge)
{
    run_on_nodes(t_ragged_tables, NULL, 0);
}

/* Rank 0 has all rows and ranks 1 to 3 need them: one of these gets them and sends them twice.
 * @arg: are their gradients added up? a bool */
static colo_status_t reserved(t_gpu_rank_t *r, void *arg)
{
    const t_ragged_where_t w = t_where(r);
    const ref_side_t src = t_side("dp=1", true), dst = t_side("cp=3,dp=1@1", false);
    const t_ragged_options_t o = {.tensors = 1, .max_rows = 60, .where = &w};
    colo_bridge_t *bridge = NULL;
    colo_batch_t *batch = NULL;
    t_ragged_t t;
    t_ragged_uniform(&t, &src, &dst, (ref_shape_t){5, 12, 256});
    t.dtype = "f32";
    t.c.full = true;
    t.c.partial = *(bool *)arg;
    rank_try(t_ragged_bridge(&bridge, &t, &o, r->gpus));
    const size_t first = colo_bridge_workspace_size(bridge);
    const colo_segments_t s = t_ragged_segments(&t);
    rank_try(colo_bridge_set_segments(bridge, &s, &batch));
    rank_try(t_gpu_quiet(r));
    rank_try(t_ragged_pass(batch, &t, &o, r->gpus, COLO_PASS_FORWARD));
    rank_try(t_ragged_pass(batch, &t, &o, r->gpus, COLO_PASS_BACKWARD));
    rank_check(colo_bridge_workspace_size(bridge) == first);
    colo_batch_destroy(&batch);
    t_ragged_free(&t);
    return t_gpu_end(r, &bridge);
}

T_CASE(workspace_with_max_rows_holds_what_is_passed_on)
{
    for (int adds = 0; adds < 2; adds++)
        run_on("a,b,b,b", reserved, &(bool){adds});
}

/* ---- peers inside, NCCL between ---- */

static colo_status_t watched(colo_comm_t *c, const colo_exchange_t *x, colo_stream_t stream)
{
    for (int32_t i = 0; x->subconnection && i < x->nsends; i++)
        inside += colo_comm_node(c, x->send[i].peer) == colo_comm_node(c, c->rank);
    return nccl->exchange(c, x, stream);
}

struct mixed {
    t_gpu_fn fn;
    void *arg;
};

/* All tensors lie in memory that is registered. */
static colo_status_t mixed(t_gpu_rank_t *r, void *arg)
{
    const struct mixed *m = arg;
    colo_comm_backend_t backend = *r->gpus->backend;
    nccl = r->gpus->backend;
    inside = 0;
    backend.exchange = watched;
    rank_try(t_gpu_register(r, T_ARENA));
    rank_check(colo_memory_is_p2p(r->memory));
    for (int32_t k = 0; k < r->size; k++)
        rank_check(colo_memory_reaches(r->memory, r->rank, k) ==
                   (colo_comm_node(r->gpus, k) == colo_comm_node(r->gpus, r->rank)));
    r->gpus->backend = &backend;
    const colo_status_t st = m->fn(r, m->arg);
    r->gpus->backend = nccl;
    return st;
}

static void run_mixed(t_gpu_fn fn, void *arg, size_t bytes)
{
    const char *was = getenv("COLO_TRANSPORT");
    char earlier[16];
    snprintf(earlier, sizeof earlier, "%s", was ? was : "auto");
    struct mixed m = {fn, arg};
    setenv("COLO_TRANSPORT", "auto", 1);
    if (bytes)
        t_share(arg, bytes);
    run_on_nodes(mixed, &m, 0);
    if (bytes)
        t_unshare(arg);
    setenv("COLO_TRANSPORT", earlier, 1);
}

T_CASE(unit_layouts_by_peers_inside_and_nccl_between_arrive)
{
    int32_t two[RANKS] = {0};
    run_mixed(unit_cases, two, 0);
}

/* Ranks that pass on list their boxes anew. */
static colo_status_t reshaped(t_gpu_rank_t *r, void *arg)
{
    static const int64_t widths[] = {4, 24, 0, 2};
    t_case_t c = t_between("dp=2", "cp=2@2", 4, 16, 4);
    colo_bridge_t *bridge = NULL;
    c.output = COLO_OUTPUT_FULL_SEQ;
    c.grad = COLO_GRAD_DISJOINT;
    c.dtype = COLO_F32;
    rank_try(t_gpu_bridge(r, &c, &bridge));
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        c.shape.h = widths[i];
        rank_try(colo_bridge_reshape(bridge, &(colo_shape_t){c.shape.b, c.shape.n, c.shape.h, 0}));
        rank_try(t_gpu_pass(r, bridge, &c, (int64_t)i, false));
        rank_try(t_gpu_pass(r, bridge, &c, (int64_t)i, true));
    }
    return t_gpu_end(r, &bridge);
}

T_CASE(other_widths_by_peers_and_nccl_arrive)
{
    run_mixed(reshaped, NULL, 0);
}

T_CASE(captured_calls_by_peers_and_nccl_have_the_stated_bits)
{
    captured_pairs(run_mixed);
}

T_CASE(random_batches_by_peers_and_nccl_arrive)
{
    run_mixed(t_ragged_batches, &(int64_t){150}, 0);
}

/* Random batches whose gradients several ranks add up. */
static colo_status_t ragged_sums(t_gpu_rank_t *r, void *arg)
{
    const t_ragged_where_t w = t_where(r);
    int64_t left = t_scaled(120);
    for (uint64_t seed = t_seed(); left > 0; seed++) {
        t_ragged_t t;
        t_ragged_random(&t, seed, r->size);
        const t_ragged_options_t o = {.tensors = 2, .gap = (int64_t)(seed % 3), .where = &w};
        colo_status_t st = COLO_OK;
        if (t.c.partial && ref_side_addends(&t.c.dst) > 2) {
            r->used = 0;
            st = t_ragged_on(&t, &o, r->gpus);
            left--;
        }
        if (st < 0)
            st = colo_fail_prefix(st, "%s", t_ragged_text(&t));
        t_ragged_free(&t);
        rank_try(st);
    }
    return COLO_OK;
}

T_CASE(random_sums_by_peers_and_nccl_arrive)
{
    run_mixed(ragged_sums, NULL, 0);
}

T_CASE(uniform_tables_by_peers_and_nccl_give_the_bits_of_the_uniform_bridge)
{
    run_mixed(t_ragged_tables, NULL, 0);
}

T_MAIN_IF(t_gpus_enough(RANKS) ? 0 : T_EXIT_SKIP, "gpu/nccl_nodes")
