/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged_gpu.h - what programs of ragged batches on GPUs share: tables of a uniform batch against
 * the uniform bridge, random batches, batches that are outstanding together, graphs. t_ragged_*()
 * run on a rank of gpu_ranks.h. Included by one source of a program.
 */
#ifndef TESTS_GPU_RAGGED_GPU_H
#define TESTS_GPU_RAGGED_GPU_H

#include "harness/harness.h"

#include "bridge/run/run.h"
#include "core/error.h"
#include "gpu/gpu_ranks.h"
#include "harness/ragged_run.h"

typedef struct t_layouts {
    const char *src, *dst;
} t_layouts_t;

enum { T_X2, T_Y2, T_DY2, T_DX2, T_FOUR };

/* ---- where tensors of a rank are ---- */

static inline colo_status_t t_put(void *arg, const void *from, size_t bytes, void **data)
{
    t_gpu_rank_t *r = arg;
    char *p = NULL;
    void *own = NULL; /* what t_drop() frees */
    rank_try(t_gpu_memory(r, bytes, &p, &own));
    *data = p;
    rank_cuda(cudaMemcpyAsync(p, from, bytes, cudaMemcpyHostToDevice, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream)); /* the caller frees what it is from */
    return COLO_OK;
}

static inline colo_status_t t_get(void *arg, void *to, const void *data, size_t bytes)
{
    t_gpu_rank_t *r = arg;
    rank_cuda(cudaMemcpyAsync(to, data, bytes, cudaMemcpyDeviceToHost, r->stream));
    rank_cuda(cudaStreamSynchronize(r->stream));
    return COLO_OK;
}

static inline void t_drop(void *arg, void *data)
{
    if (!((t_gpu_rank_t *)arg)->arena) /* all of it at the end of a case */
        cudaFree(data);
}

static inline colo_status_t t_quiet(void *arg)
{
    t_gpu_rank_t *r = arg;
    rank_try(t_gpu_quiet(r));
    return colo_comm_check(r->gpus);
}

static inline t_ragged_where_t t_where(t_gpu_rank_t *r)
{
    return (t_ragged_where_t){.arg = r,
                              .device = r->device,
                              .stream = r->stream,
                              .put = t_put,
                              .get = t_get,
                              .drop = t_drop,
                              .quiet = t_quiet};
}

/* [rows, h] of f32 somewhere, of random bits, so that a sum in another order is another number. */
static inline colo_status_t t_random_rows(const t_ragged_where_t *w, int64_t rows, int64_t h,
                                          uint64_t seed, colo_tensor_t *t)
{
    const size_t bytes = (size_t)(rows * h) * sizeof(float);
    float *v = malloc(bytes + 1);
    void *data = NULL;
    rank_check(v);
    for (int64_t i = 0; i < rows * h; i++)
        v[i] = (float)(t_uniform(&seed) - 0.5);
    colo_status_t st = w->put(w->arg, v, bytes + 1, &data);
    free(v);
    *t = colo_tensor_cuda(data, COLO_F32, w->device, 2, (int64_t[]){rows, h});
    return st;
}

static inline colo_status_t t_same_bits(const t_ragged_where_t *w, const colo_tensor_t *a,
                                        const colo_tensor_t *b)
{
    const size_t bytes = (size_t)colo_tensor_count(a) * sizeof(float);
    char *v = malloc(2 * bytes + 2);
    rank_check(v);
    rank_try(w->get(w->arg, v, a->data, bytes));
    rank_try(w->get(w->arg, v + bytes, b->data, bytes));
    const bool same = memcmp(v, v + bytes, bytes) == 0;
    free(v);
    rank_check(same);
    return COLO_OK;
}

static inline colo_status_t t_uniform_one(colo_comm_t *comm, const t_ragged_where_t *w,
                                          const t_case_t *c, t_ragged_t *t)
{
    const t_ragged_options_t o = {.tensors = 1, .where = w};
    const int64_t rank = colo_comm_rank(comm);
    T_ENDS(colo_bridge_destroy) colo_bridge_t *uniform = NULL, *ragged = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    colo_tensor_t u[T_FOUR], r[T_FOUR];
    int64_t rows[2], shape[2][3] = {{0}};
    rank_try(t_case_bridge(&uniform, c, comm, COLO_MEM_CUDA));
    rank_try(t_ragged_bridge(&ragged, t, &o, comm));
    const colo_segments_t s = t_ragged_segments(t);
    rank_try(colo_bridge_set_segments(ragged, &s, &batch));
    colo_bridge_rows(ragged, &rows[0], &rows[1]);
    (void)colo_bridge_src_shape(uniform, shape[0]);
    (void)colo_bridge_dst_shape(uniform, shape[1]);
    rank_check(rows[0] == shape[0][0] && rows[1] == shape[1][0]);
    /* replicated over tp, other bits on other replicas and context ranks */
    const uint64_t sx = 1 + (uint64_t)ref_side_coord(&c->src, rank, "dp"),
                   sy = 100 * (1 + (uint64_t)ref_side_coord(&c->dst, rank, "dp")) +
                        (uint64_t)ref_side_coord(&c->dst, rank, "cp");
    for (int i = 0; i < T_FOUR; i++) {
        const bool is_dst = i == T_Y2 || i == T_DY2, in = i == T_X2 || i == T_DY2;
        const int64_t *e = shape[is_dst];
        const uint64_t seed = i == T_X2 ? sx : i == T_DY2 ? sy : 7;
        rank_try(t_random_rows(w, e[0], e[1], seed, &u[i]));
        if (in)
            r[i] = u[i];
        else
            rank_try(t_random_rows(w, e[0], e[1], 8, &r[i]));
    }
    rank_try(w->quiet(w->arg));
    rank_try(colo_bridge_forward(uniform, &u[T_X2], &u[T_Y2], w->stream));
    rank_try(colo_batch_forward(batch, &r[T_X2], &r[T_Y2], 1, w->stream));
    rank_try(colo_bridge_backward(uniform, &u[T_DY2], &u[T_DX2], w->stream));
    rank_try(colo_batch_backward(batch, &r[T_DY2], &r[T_DX2], 1, w->stream));
    rank_try(w->quiet(w->arg));
    rank_try(t_same_bits(w, &u[T_Y2], &r[T_Y2]));
    rank_try(t_same_bits(w, &u[T_DX2], &r[T_DX2]));
    for (int i = 0; i < T_FOUR; i++) {
        w->drop(w->arg, u[i].data);
        if (i == T_Y2 || i == T_DX2)
            w->drop(w->arg, r[i].data);
    }
    rank_try(w->quiet(w->arg));
    return COLO_OK;
}

/* Pairs of layouts that fit the ranks, whose sources have no context ranks. */
static inline colo_status_t t_ragged_tables(t_gpu_rank_t *r, void *arg)
{
    static const t_layouts_t pairs[] = {
        {"tp=1,dp=1", "tp=1,cp=1,dp=1"}, {"tp=1,dp=2", "tp=1,cp=2,dp=1"},
        {"tp=2,dp=1", "tp=1,cp=1,dp=2"}, {"tp=2,dp=1", "tp=2,cp=1,dp=1"},
        {"tp=1,dp=4", "tp=1,cp=4,dp=1"}, {"tp=1,dp=4", "tp=2,cp=2,dp=1"},
        {"tp=2,dp=2", "tp=1,cp=2,dp=2"}, {"tp=4,dp=1", "tp=1,cp=1,dp=4"},
    };
    const t_ragged_where_t w = t_where(r);
    int32_t ran = 0;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        for (int how = 0; how < 3; how++) {
            t_case_t c = t_between(pairs[i].src, pairs[i].dst, 8, 16, 6);
            c.axes = "th";
            c.output = how ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED;
            c.grad = how == 1 ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
            c.dtype = COLO_F32;
            c.world = r->size;
            t_ragged_t t;
            if (t_case_world(&(t_case_t){.src = c.src, .dst = c.dst}) > c.world)
                continue;
            t_ragged_uniform(&t, &c.src, &c.dst, c.shape);
            t.c.full = how > 0;
            t.c.partial = how == 1;
            colo_status_t st = t_uniform_one(r->gpus, &w, &c, &t);
            t_ragged_free(&t);
            if (st < 0)
                return colo_fail_prefix(st, "%s", t_case_text(&c));
            ran++;
        }
    rank_check(ran == (r->size >= 4 ? 24 : r->size == 2 ? 12 : 3));
    return COLO_OK;
}

/* ---- batches of one bridge ---- */

/* Four batches of one bridge, with more tensors than a launch takes: all forwards, then all
 * backwards, the last one first. */
/* @arg: with max_rows, so that the workspace stays as it was at create? a bool */
static inline colo_status_t t_ragged_outstanding(t_gpu_rank_t *r, void *arg)
{
    enum { BATCHES = 4 };
    const bool reserves = *(bool *)arg;
    const t_ragged_where_t w = t_where(r);
    const t_ragged_options_t o = {
        .tensors = reserves ? 1 : T_RAGGED_TENSORS, .max_rows = reserves ? 64 : 0, .where = &w};
    t_ragged_t t[BATCHES];
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    colo_batch_t *batch[BATCHES] = {NULL};
    ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    for (int i = 0; i < BATCHES; i++) {
        t_ragged_uniform(&t[i], &src, &dst, (ref_shape_t){2 * (1 + i % 2), 4 + 4 * i, 6});
        t[i].dtype = "f32";
        t[i].c.full = t[i].c.partial = true;
    }
    rank_try(t_ragged_bridge(&bridge, &t[0], &o, r->gpus));
    const size_t first = colo_bridge_workspace_size(bridge);
    rank_check(r->rank >= 2 || (first > 0) == reserves);
    for (int i = 0; i < BATCHES; i++) {
        const colo_segments_t s = t_ragged_segments(&t[i]);
        rank_try(colo_bridge_set_segments(bridge, &s, &batch[i]));
    }
    rank_try(t_quiet(r));
    for (int i = 0; i < BATCHES; i++)
        rank_try(t_ragged_pass(batch[i], &t[i], &o, r->gpus, COLO_PASS_FORWARD));
    for (int i = BATCHES; i-- > 0;)
        rank_try(t_ragged_pass(batch[i], &t[i], &o, r->gpus, COLO_PASS_BACKWARD));
    rank_check(!reserves || colo_bridge_workspace_size(bridge) == first);
    rank_try(t_quiet(r));
    for (int i = 0; i < BATCHES; i++) {
        colo_batch_destroy(&batch[i]);
        t_ragged_free(&t[i]);
    }
    return COLO_OK;
}

/* ---- graphs ---- */

/* Forward and backward of a batch of @bridge, launched, then captured: two replays give the same
 * bits. @h: features of either side. Ends both. */
static inline colo_status_t t_replayed(colo_bridge_t *bridge, colo_batch_t *batch, const int64_t *h,
                                       const t_ragged_where_t *w)
{
    cudaStream_t stream = w->stream;
    colo_tensor_t t[T_FOUR], again[T_FOUR];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int64_t rows[2];
    colo_bridge_rows(bridge, &rows[0], &rows[1]);
    for (int i = 0; i < T_FOUR; i++) {
        const bool is_dst = i == T_Y2 || i == T_DY2, in = i == T_X2 || i == T_DY2;
        rank_try(t_random_rows(w, rows[is_dst], h[is_dst], is_dst ? 100 + (uint64_t)i : 1, &t[i]));
        if (in)
            again[i] = t[i];
        else
            rank_try(t_random_rows(w, rows[is_dst], h[is_dst], 8, &again[i]));
    }
    rank_try(w->quiet(w->arg));
    rank_try(colo_batch_forward(batch, &t[T_X2], &t[T_Y2], 1, w->stream));
    rank_try(colo_batch_backward(batch, &t[T_DY2], &t[T_DX2], 1, w->stream));
    rank_try(w->quiet(w->arg));
    rank_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    rank_try(colo_batch_forward(batch, &again[T_X2], &again[T_Y2], 1, w->stream));
    rank_try(colo_batch_backward(batch, &again[T_DY2], &again[T_DX2], 1, w->stream));
    rank_cuda(cudaStreamEndCapture(stream, &graph));
    rank_cuda(cudaGraphInstantiate(&exec, graph, 0));
    rank_cuda(cudaGraphUpload(exec, stream)); /* what may wait for the device does it now */
    rank_try(w->quiet(w->arg));
    for (int i = 0; i < 2; i++)
        rank_cuda(cudaGraphLaunch(exec, stream));
    rank_try(w->quiet(w->arg));
    rank_try(t_same_bits(w, &t[T_Y2], &again[T_Y2]));
    rank_try(t_same_bits(w, &t[T_DX2], &again[T_DX2]));
    rank_try(w->quiet(w->arg));
    rank_cuda(cudaGraphExecDestroy(exec));
    rank_cuda(cudaGraphDestroy(graph));
    for (int i = 0; i < T_FOUR; i++) {
        w->drop(w->arg, t[i].data);
        if (i == T_Y2 || i == T_DX2)
            w->drop(w->arg, again[i].data);
    }
    rank_try(w->quiet(w->arg));
    colo_batch_destroy(&batch);
    colo_bridge_destroy(&bridge);
    return COLO_OK;
}

static inline colo_status_t t_ragged_captured(t_gpu_rank_t *r, void *arg)
{
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    const t_ragged_where_t w = t_where(r);
    const t_ragged_options_t o = {.tensors = 1, .where = &w};
    colo_bridge_t *bridge = NULL;
    colo_batch_t *batch = NULL;
    T_ENDS(t_ragged_free) t_ragged_t c;
    t_ragged_uniform(&c, &src, &dst, (ref_shape_t){4, 8, 6});
    c.c.full = c.c.partial = true;
    rank_try(t_ragged_bridge(&bridge, &c, &o, r->gpus));
    const colo_segments_t s = t_ragged_segments(&c);
    rank_try(colo_bridge_set_segments(bridge, &s, &batch));
    return t_replayed(bridge, batch, (const int64_t[]){c.c.h, c.c.h}, &w);
}

static inline colo_status_t t_ragged_batch(t_gpu_rank_t *r, uint64_t seed)
{
    const t_ragged_where_t w = t_where(r);
    T_ENDS(t_ragged_free) t_ragged_t t;
    t_ragged_random(&t, seed, r->size);
    const t_ragged_options_t o = {.tensors = 1 + (int32_t)t_below(&seed, T_RAGGED_FEW),
                                  .ranks_per_node = t_below(&seed, 4),
                                  .max_rows = t_below(&seed, 4) ? 0
                                              : r->size > 1     ? 1000
                                                                : 10000,
                                  .gap = t_below(&seed, 3),
                                  .where = &w};
    r->used = 0;
    r->shift = 8 * (size_t)t_below(&seed, 3); /* in an arena: not always 16 bytes */
    colo_status_t st = colo_comm_set_check(r->gpus, (int32_t)t_below(&seed, 3));
    if (st == COLO_OK)
        st = t_ragged_on(&t, &o, r->gpus);
    if (st < 0)
        st = colo_fail_prefix(st, "%s", t_ragged_text(&t));
    return st;
}

/* @arg: how many, an int64_t, of which T_SCALE leaves a part */
static inline colo_status_t t_ragged_batches(t_gpu_rank_t *r, void *arg)
{
    const uint64_t seed = t_seed();
    for (int64_t i = 0, n = t_scaled(*(int64_t *)arg); i < n; i++)
        rank_try(t_ragged_batch(r, seed + (uint64_t)i));
    return COLO_OK;
}

#endif
