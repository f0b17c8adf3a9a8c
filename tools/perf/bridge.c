/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge.c - colo-perf bridge: one pair of layouts, forward and backward, by several methods
 * compared with the limits of the same bytes, all in one run.
 *
 *   push        what the plan's messages would take as plain stores into the peers, all at once
 *   copy        what stays, as one contiguous copy; the faster of cudaMemcpyAsync and a kernel
 *   exact-nccl  the library's bridge over NCCL;   exact-peer: over the peers' memory
 *   collective  the library's own COLLECTIVE (sums in rank order)
 *   reference   the passes that runtimes run today, on NCCL itself
 *   tuned       as few passes as collectives allow
 *
 * Inputs are position codes, outputs begin as 0xff and are compared on the device after the last
 * launch of each pass.
 */
#include "work.h"

#include <colobridge/memory.h>

#include <stdlib.h>
#include <string.h>

static const char *const names[OPS] = {"push",       "copy",      "exact-nccl", "exact-peer",
                                       "collective", "reference", "tuned"};
enum { REPLAY_BELOW = 4 << 20 };

/* ---- running one pass ---- */

static int run(void *arg, cudaStream_t stream)
{
    static int (*const coll[2][2])(perf_coll_t *) = {
        {perf_coll_forward, perf_coll_backward},
        {perf_coll_tuned_forward, perf_coll_tuned_backward}};
    work_t *work = arg;
    perf_rank_t *r = work->r;
    const colo_tensor_t *in = work->pass ? &work->d_y : &work->x,
                        *out = work->pass ? &work->d_x : &work->y;
    switch (work->op) {
    case PUSH:
        RANK_CUDA(colo_k_probe_push(work->push[work->pass], work->pushes[work->pass], stream));
        return TOOL_OK;
    case COPY:
        if (work->memcpy)
            RANK_CUDA(cudaMemcpyAsync(out->data, in->data, (size_t)work->mine[work->pass],
                                      cudaMemcpyDeviceToDevice, stream));
        else
            RANK_CUDA(
                colo_k_probe_copy(out->data, in->data, work->mine[work->pass] / 16 * 16, stream));
        return TOOL_OK;
    case REFERENCE:
    case TUNED:
        return coll[work->op == TUNED][work->pass](&work->coll);
    default:
        if (work->pass)
            RANK_COLO(colo_bridge_backward(work->bridge[work->op], in, out, stream));
        else
            RANK_COLO(colo_bridge_forward(work->bridge[work->op], in, out, stream));
        return TOOL_OK;
    }
}

static int check(work_t *work, int64_t *wrong)
{
    perf_rank_t *r = work->r;
    unsigned long long found = 0;
    const bool coll = work->op == REFERENCE || work->op == TUNED;
    const void *out = coll ? work->coll.out : work->pass ? work->d_x.data : work->y.data;
    const colo_k_code_t c = perf_work_code(work, out, !work->pass, work->pass, false);
    RANK_CUDA(cudaMemsetAsync(r->count, 0, sizeof found, r->stream));
    RANK_CUDA(colo_k_probe_decode(&c, r->count, r->stream));
    TOOL_TRY(perf_rank_wait(r));
    RANK_CUDA(cudaMemcpy(&found, r->count, sizeof found, cudaMemcpyDeviceToHost));
    *wrong = (int64_t)found;
    return perf_rank_reduce(r, wrong, COLO_REDOP_SUM);
}

static int poison(work_t *work)
{
    perf_rank_t *r = work->r;
    const colo_tensor_t *out = work->pass ? &work->d_x : &work->y;
    RANK_CUDA(cudaMemsetAsync(out->data, 0xff, perf_tensor_bytes(out), r->stream));
    for (int i = 0; i < 3 && (work->op == REFERENCE || work->op == TUNED); i++)
        RANK_CUDA(cudaMemsetAsync(work->coll.stage[i], 0xff, (size_t)perf_coll_stage(&work->coll),
                                  r->stream));
    TOOL_TRY(perf_rank_wait(r));
    return perf_rank_barrier(r);
}

static int time_it(work_t *work, bool replayed, double *us, double *best)
{
    const int64_t batch = perf_batch(work->bytes);
    return replayed ? perf_rank_replay(work->r, run, work, batch, us, best)
                    : perf_rank_time(work->r, run, work, batch, us, best);
}

/* Does the result lie in the input */
static bool is_view(const work_t *work)
{
    const colo_tensor_t *in = work->pass ? &work->d_y : &work->x;
    const char *out = work->coll.out, *from = in->data;
    return (work->op == REFERENCE || work->op == TUNED) && out >= from &&
           out < from + perf_tensor_bytes(in);
}

/* Measures w->op in pass w->pass and prints it; @limit: launched, replayed. */
static int measure(work_t *work, double limit[2])
{
    perf_rank_t *r = work->r;
    perf_t *p = r->all->p;
    for (int replayed = 0; replayed < (work->bytes <= REPLAY_BELOW ? 2 : 1); replayed++) {
        perf_row_t row = {.pair = work->pair,
                          .axes = work->axes,
                          .pass = work->pass ? "backward" : "forward",
                          .op = names[work->op],
                          .shape = work->shape,
                          .replayed = replayed,
                          .bytes = work->bytes,
                          .arrive = work->arrive[work->pass],
                          .local = work->local[work->pass]};
        TOOL_TRY(poison(work));
        TOOL_TRY(time_it(work, replayed, &row.us, &row.best));
        if (work->op == COPY) { /* the faster of two */
            double us, best;
            work->memcpy = true;
            TOOL_TRY(time_it(work, replayed, &us, &best));
            work->memcpy = false;
            row.us = us < row.us ? us : row.us;
            row.best = best < row.best ? best : row.best;
        }
        int64_t wrong = 0;
        if (work->op >= EXACT_NCCL)
            TOOL_TRY(check(work, &wrong));
        if (work->op < EXACT_NCCL && row.us > limit[replayed])
            limit[replayed] = row.us;
        row.limit = work->op < EXACT_NCCL ? row.us : limit[replayed];
        row.view = is_view(work);
        row.wrong = wrong;
        if (r->me == 0)
            TOOL_TRY(perf_bridge_row(p, &row));
    }
    return perf_rank_barrier(r);
}

/* The same on registered memory: what peers write, and what they read to add gradients up. */
static int measure_peer(work_t *work, double limit[2])
{
    perf_rank_t *r = work->r;
    const colo_tensor_t *const tensor[2] = {work->pass ? &work->d_x : &work->y,
                                            work->pass ? &work->d_y : NULL};
    colo_memory_t *memory[2] = {NULL, NULL};
    for (int i = 0; i < 2 && tensor[i]; i++) {
        const size_t bytes = perf_tensor_bytes(tensor[i]);
        RANK_COLO(colo_memory_register(r->gpus, bytes ? tensor[i]->data : NULL, bytes, &memory[i]));
    }
    if (colo_memory_is_p2p(memory[0]))
        TOOL_TRY(measure(work, limit));
    TOOL_TRY(perf_rank_barrier(r));
    for (int i = 0; i < 2; i++)
        colo_memory_destroy(&memory[i]);
    return perf_rank_barrier(r);
}

/* ---- all of them ---- */

static int one_size(perf_rank_t *r, const perf_pair_t *pair, const char *axes, colo_shape_t shape)
{
    work_t *work = calloc(1, sizeof *work);
    if (!work)
        return perf_rank_complain(r, "no memory");
    work->r = r;
    work->pair = pair;
    work->axes = axes;
    work->shape = shape;
    TOOL_TRY(perf_work_make(work));
    for (work->pass = 0; work->pass < 2; work->pass++) {
        double limit[2] = {0, 0};
        for (int op = PUSH; op < OPS; op++) {
            work->op = (op_t)op;
            const bool there = op == PUSH ? r->all->reach && work->arrive[work->pass] > 0
                               : op == COPY
                                   ? work->local[work->pass] > 0
                                   : work->bridge[op >= REFERENCE ? COLLECTIVE : op] != NULL;
            if (there)
                TOOL_TRY((op == EXACT_PEER ? measure_peer : measure)(work, limit));
        }
    }
    TOOL_TRY(perf_work_destroy(work));
    free(work);
    return TOOL_OK;
}

/* Rows of which the larger tensor of a rank has @bytes, or the next number that can be cut. */
static int64_t rows_for(const perf_t *p, const perf_pair_t *pair, int64_t bytes)
{
    const int64_t ds = colo_grid_extent(&pair->src, "dp"), dd = colo_grid_extent(&pair->dst, "dp"),
                  cs = colo_grid_extent(&pair->src, "cp"), cd = colo_grid_extent(&pair->dst, "cp"),
                  step = (cs > 1 || cd > 1) ? 2 * cs * cd : 1,
                  in = (p->shape.samples + ds - 1) / ds, out = (p->shape.samples + dd - 1) / dd,
                  row = p->shape.features * (int64_t)colo_dtype_size(p->dtype);
    /* bytes of @step rows */
    const int64_t src = in * row * step / cs,
                  dst = out * row * step / (p->output == COLO_OUTPUT_SHARDED ? cd : 1);
    const int64_t n = bytes / (src > dst ? src : dst);
    return step * (n > 0 ? n : 1);
}

static int on_rank(perf_rank_t *r, void *arg)
{
    const perf_t *p = r->all->p;
    for (int i = 0; i < p->npairs; i++)
        for (int a = 0; p->axes[a]; a++) {
            if (r->me == 0)
                perf_bridge_head(p, &p->pair[i], p->axes[a]);
            colo_shape_t shape = p->shape;
            int64_t last = 0;
            for (int64_t bytes = p->begin; bytes <= p->end; bytes *= p->factor) {
                if (p->sizes)
                    shape.rows = rows_for(p, &p->pair[i], bytes);
                if (shape.rows != last)
                    TOOL_TRY(one_size(r, &p->pair[i], p->axes[a], shape));
                last = shape.rows;
                if (!p->sizes)
                    break;
            }
        }
    return TOOL_OK;
}

int perf_bridge(perf_t *p)
{
    int64_t ranks = 0;
    for (int i = 0; i < p->npairs; i++) {
        const colo_grid_t *const g[] = {&p->pair[i].src, &p->pair[i].dst};
        for (int k = 0; k < 2; k++)
            ranks = g[k]->offset + g[k]->size > ranks ? g[k]->offset + g[k]->size : ranks;
    }
    if (ranks > p->gpus || ranks > PERF_GPUS_MAX)
        return tool_refuse("%lld ranks, but %lld GPUs", (long long)ranks, (long long)p->gpus);
    setenv("COLO_TRANSPORT", "auto", 1); /* both are measured; which, registration decides */
    return perf_gpus_run(p, (int32_t)ranks, on_rank, NULL);
}
