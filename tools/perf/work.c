/* SPDX-License-Identifier: Apache-2.0 */
/*
 * work.c - see perf/work.h.
 *
 * Inputs are position codes. The pushes are the plan's messages, byte for byte, but contiguous;
 * they go into the memory of the outputs, which is made large enough.
 */
#include "work.h"

#include "kernels.h"

#include <stdlib.h>
#include <string.h>

enum { SALT_X = 1, SALT_DY = 2 };

/* ---- the engine of the two methods of COLLECTIVE ---- */

static int engine_copy(perf_engine_t *e, const colo_box_t *dst, const colo_box_t *src, int64_t n)
{
    work_t *work = (work_t *)e;
    perf_rank_t *r = work->r;
    RANK_CUDA(colo_k_boxes_copy(dst, src, n, work->coll.elem, 0, r->stream));
    return TOOL_OK;
}

static int engine_zero(perf_engine_t *e, void *p, size_t bytes)
{
    perf_rank_t *r = ((work_t *)e)->r;
    RANK_CUDA(cudaMemsetAsync(p, 0, bytes, r->stream));
    return TOOL_OK;
}

static int engine_all_gather(perf_engine_t *e, perf_group_t group, const void *send, void *recv,
                             int64_t count)
{
    work_t *work = (work_t *)e;
    perf_rank_t *r = work->r;
    RANK_NCCL(r->all->nccl.all_gather(send, recv, (size_t)count, work->type, work->group[group],
                                      r->stream));
    return TOOL_OK;
}

static int engine_all_reduce(perf_engine_t *e, perf_group_t group, const void *send, void *recv,
                             int64_t count)
{
    work_t *work = (work_t *)e;
    perf_rank_t *r = work->r;
    RANK_NCCL(r->all->nccl.all_reduce(send, recv, (size_t)count, work->type, ncclSum,
                                      work->group[group], r->stream));
    return TOOL_OK;
}

colo_k_code_t perf_work_code(const work_t *work, const void *data, bool dst, bool gradient,
                             bool input)
{
    const perf_part_t *part = dst ? &work->to : &work->from;
    const int64_t h = work->shape.features;
    const bool sbh = strcmp(work->axes, "sbh") == 0;
    return (colo_k_code_t){.data = (void *)data,
                           .dtype = work->r->all->p->dtype,
                           .b = work->list[dst ? 2 : 0],
                           .s = dst && gradient && work->own ? work->own : work->list[dst ? 3 : 1],
                           .nb = part->nb,
                           .ns = part->ns,
                           .h = h,
                           .stride_b = sbh ? h : part->ns * h,
                           .stride_s = sbh ? part->nb * h : h,
                           .rows = work->shape.rows,
                           .salt = gradient ? SALT_DY : SALT_X,
                           .addends = gradient ? (int32_t)work->addends : 0,
                           .addend = input ? (int32_t)work->to.addend : -1};
}

size_t perf_tensor_bytes(const colo_tensor_t *t)
{
    return (size_t)colo_tensor_count(t) * colo_dtype_size(t->dtype);
}

static int list_on_device(perf_rank_t *r, int64_t **to, const int64_t *from, int64_t n)
{
    RANK_CUDA(cudaMalloc((void **)to, (size_t)n * 8 + 8));
    RANK_CUDA(cudaMemcpy(*to, from, (size_t)n * 8, cudaMemcpyHostToDevice));
    RANK_CUDA(cudaStreamSynchronize(cudaStreamLegacy)); /* a short one comes back before */
    return TOOL_OK;
}

/* Which rows of a full-length gradient are not this rank's own: those of DISJOINT are zero. */
static int make_own(work_t *work)
{
    perf_rank_t *r = work->r;
    perf_t *p = r->all->p;
    perf_part_t own;
    if (p->output == COLO_OUTPUT_SHARDED || p->grad == COLO_GRAD_PARTIAL || work->to.ns == 0)
        return TOOL_OK;
    int64_t *rows = malloc((size_t)work->to.ns * sizeof *rows);
    if (!rows || perf_part_make(&own, &work->pair->dst, r->me, true, work->shape.samples,
                                work->shape.rows, false) < 0)
        return perf_rank_complain(r, "no memory");
    for (int64_t i = 0; i < work->to.ns; i++)
        rows[i] = -1;
    for (int64_t i = 0; i < own.ns; i++)
        rows[own.s[i]] = own.s[i];
    const int rc = list_on_device(r, &work->own, rows, work->to.ns);
    perf_part_free(&own);
    free(rows);
    return rc;
}

static int make_parts(work_t *work)
{
    perf_rank_t *r = work->r;
    const perf_t *p = r->all->p;
    const bool full = p->output == COLO_OUTPUT_FULL_SEQ;
    if (perf_part_make(&work->from, &work->pair->src, r->me, false, work->shape.samples,
                       work->shape.rows, false) < 0 ||
        perf_part_make(&work->to, &work->pair->dst, r->me, true, work->shape.samples,
                       work->shape.rows, full) < 0)
        return perf_rank_complain(r, "no memory");
    work->addends =
        full && p->grad == COLO_GRAD_PARTIAL ? colo_grid_extent(&work->pair->dst, "cp") : 0;
    TOOL_TRY(list_on_device(r, &work->list[0], work->from.b, work->from.nb));
    TOOL_TRY(list_on_device(r, &work->list[1], work->from.s, work->from.ns));
    TOOL_TRY(list_on_device(r, &work->list[2], work->to.b, work->to.nb));
    TOOL_TRY(list_on_device(r, &work->list[3], work->to.s, work->to.ns));
    return make_own(work);
}

static int64_t bytes_of(const colo_tensor_t *t, int64_t arrive)
{
    const int64_t bytes = (int64_t)perf_tensor_bytes(t);
    return (bytes > arrive ? bytes : arrive) + 16 * (PERF_GPUS_MAX + 1);
}

/* @arrive: bytes that are pushed into it, more than it has where PARTIAL gradients are added up;
 * each push begins at a multiple of 16. @c NULL: an output */
static int make_tensor(perf_rank_t *r, colo_tensor_t *t, colo_dtype_t dtype, int32_t nd,
                       const int64_t *shape, int64_t arrive, const colo_k_code_t *c)
{
    *t = colo_tensor_cuda(NULL, dtype, r->me, nd, shape);
    RANK_CUDA(cudaMalloc(&t->data, (size_t)bytes_of(t, arrive)));
    if (c) {
        colo_k_code_t fill = *c;
        fill.data = t->data;
        RANK_CUDA(colo_k_probe_code(&fill, r->stream));
    }
    return TOOL_OK;
}

static int make_bridges(work_t *work)
{
    perf_rank_t *r = work->r;
    perf_t *p = r->all->p;
    colo_bridge_config_t cfg = {COLO_BRIDGE_CONFIG_INIT, .src = &work->src, .dst = &work->dst,
                                .shape = work->shape,    .dtype = p->dtype, .axes = work->axes,
                                .output = p->output,     .grad = p->grad,   .mem = COLO_MEM_CUDA};
    const colo_plan_config_t plan = {COLO_PLAN_CONFIG_INIT, .src = &work->src, .dst = &work->dst,
                                     .shape = work->shape,  .dtype = p->dtype, .output = p->output,
                                     .grad = p->grad};
    int64_t shape[3];
    RANK_COLO(colo_bridge_create(&work->bridge[EXACT_NCCL], &cfg, r->gpus));
    if (r->all->reach)
        RANK_COLO(colo_bridge_create(&work->bridge[EXACT_PEER], &cfg, r->gpus));
    if (colo_plan_collective_check(&plan) == COLO_OK) {
        cfg.algo = COLO_ALGO_COLLECTIVE;
        RANK_COLO(colo_bridge_create(&work->bridge[COLLECTIVE], &cfg, r->gpus));
    }
    const colo_k_code_t x = perf_work_code(work, NULL, false, false, true),
                        d_y = perf_work_code(work, NULL, true, true, true);
    const colo_plan_t *found = colo_bridge_plan(work->bridge[EXACT_NCCL]);
    colo_plan_bytes_t bytes[2] = {{COLO_PLAN_BYTES_INIT}, {COLO_PLAN_BYTES_INIT}};
    RANK_COLO(colo_plan_bytes(found, COLO_PASS_FORWARD, &bytes[COLO_PASS_FORWARD]));
    RANK_COLO(colo_plan_bytes(found, COLO_PASS_BACKWARD, &bytes[COLO_PASS_BACKWARD]));
    int32_t nd = colo_bridge_src_shape(work->bridge[EXACT_NCCL], shape);
    TOOL_TRY(make_tensor(r, &work->x, p->dtype, nd, shape, 0, &x));
    TOOL_TRY(make_tensor(r, &work->d_x, p->dtype, nd, shape, bytes[COLO_PASS_BACKWARD].recv, NULL));
    nd = colo_bridge_dst_shape(work->bridge[EXACT_NCCL], shape);
    TOOL_TRY(make_tensor(r, &work->y, p->dtype, nd, shape, bytes[COLO_PASS_FORWARD].recv, NULL));
    TOOL_TRY(make_tensor(r, &work->d_y, p->dtype, nd, shape, 0, &d_y));
    work->bytes = (int64_t)(perf_tensor_bytes(&work->x) > perf_tensor_bytes(&work->y)
                                ? perf_tensor_bytes(&work->x)
                                : perf_tensor_bytes(&work->y));
    return perf_rank_reduce(r, &work->bytes, COLO_REDOP_MAX);
}

/* The plan's messages as pushes, to the next rank first, so that no two begin at one receiver. */
static int make_pushes(work_t *work, int pass)
{
    perf_rank_t *r = work->r;
    perf_gpus_t *all = r->all;
    const colo_plan_t *plan = colo_bridge_plan(work->bridge[EXACT_NCCL]);
    colo_plan_bytes_t b = {COLO_PLAN_BYTES_INIT};
    const colo_tensor_t *in = pass ? &work->d_y : &work->x, *out = pass ? &work->d_x : &work->y;
    const int64_t in_bytes = (int64_t)perf_tensor_bytes(in),
                  out_bytes = (int64_t)perf_tensor_bytes(out);
    int32_t n;
    const colo_plan_message_t *send = colo_plan_sends(plan, (colo_pass_t)pass, &n);
    RANK_COLO(colo_plan_bytes(plan, (colo_pass_t)pass, &b));
    work->arrive[pass] = b.recv;
    work->local[pass] = b.local < in_bytes ? b.local : in_bytes;
    work->local[pass] = work->local[pass] < out_bytes ? work->local[pass] : out_bytes;
    work->mine[pass] = work->local[pass];
    TOOL_TRY(perf_rank_reduce(r, &work->arrive[pass], COLO_REDOP_MAX));
    TOOL_TRY(perf_rank_reduce(r, &work->local[pass], COLO_REDOP_MAX));
    memset(all->bytes[r->me], 0, sizeof all->bytes[r->me]);
    for (int32_t i = 0; i < n; i++)
        all->bytes[r->me][send[i].peer] = send[i].bytes;
    all->ptr[r->me] = out->data;
    all->out_bytes[r->me] = bytes_of(out, b.recv);
    TOOL_TRY(perf_rank_barrier(r));
    int64_t from = 0;
    for (int32_t i = 1; i < r->n && all->reach; i++) {
        const int32_t to = (r->me + i) % r->n;
        int64_t bytes = all->bytes[r->me][to], offset = 0;
        for (int32_t k = 0; k < r->me; k++) /* behind what lower ranks give it */
            offset += (all->bytes[k][to] + 15) / 16 * 16;
        if (bytes == 0)
            continue;
        bytes = (bytes + 15) / 16 * 16;
        if (from + bytes > in_bytes)
            from = 0;
        if (offset + bytes > all->out_bytes[to])
            return perf_rank_complain(r, "rank %d has no space for what it is given", (int)to);
        work->push[pass][work->pushes[pass]++] =
            (colo_k_push_t){(char *)all->ptr[to] + offset, (char *)in->data + from, bytes};
        from += bytes;
    }
    return perf_rank_barrier(r);
}

static int make_collective(work_t *work)
{
    perf_rank_t *r = work->r;
    const perf_t *p = r->all->p;
    work->coll = (perf_coll_t){.src = &work->pair->src,
                               .dst = &work->pair->dst,
                               .rank = r->me,
                               .samples = work->shape.samples,
                               .rows = work->shape.rows,
                               .features = work->shape.features,
                               .elem = colo_dtype_size(p->dtype),
                               .batch_first = strcmp(work->axes, "sbh") != 0,
                               .sharded = p->output == COLO_OUTPUT_SHARDED,
                               .engine = &work->engine,
                               .x = work->x.data,
                               .y = work->y.data,
                               .d_y = work->d_y.data,
                               .d_x = work->d_x.data};
    perf_coll_init(&work->coll);
    work->type = p->dtype == COLO_BF16 ? ncclBfloat16 : p->dtype == COLO_F16 ? ncclHalf : ncclFloat;
    for (int g = 0; g < PERF_GROUPS; g++) {
        perf_split_t split = {.color = {0}};
        for (int32_t k = 0; k < r->n; k++)
            perf_coll_group(&work->coll, (perf_group_t)g, k, &split.color[k], &split.key[k]);
        TOOL_TRY(perf_rank_comm(r, &split, &work->group[g]));
    }
    for (int i = 0; i < 3; i++)
        RANK_CUDA(cudaMalloc(&work->coll.stage[i], (size_t)perf_coll_stage(&work->coll) + 16));
    return TOOL_OK;
}

int perf_work_make(work_t *work)
{
    perf_rank_t *r = work->r;
    work->engine = (perf_engine_t){engine_copy, engine_zero, engine_all_gather, engine_all_reduce};
    RANK_COLO(colo_layout_init_src(&work->src, &work->pair->src));
    RANK_COLO(colo_layout_init_dst(&work->dst, &work->pair->dst));
    TOOL_TRY(make_parts(work));
    TOOL_TRY(make_bridges(work));
    TOOL_TRY(make_pushes(work, 0));
    TOOL_TRY(make_pushes(work, 1));
    if (work->bridge[COLLECTIVE])
        TOOL_TRY(make_collective(work));
    TOOL_TRY(perf_rank_wait(r));
    return perf_rank_barrier(r);
}

int perf_work_destroy(work_t *work)
{
    perf_rank_t *r = work->r;
    TOOL_TRY(perf_rank_barrier(r)); /* no rank still writes into another's memory */
    for (int i = 0; i < OPS; i++)
        colo_bridge_destroy(&work->bridge[i]);
    void *const memory[] = {work->x.data,        work->y.data,        work->d_y.data,
                            work->d_x.data,      work->coll.stage[0], work->coll.stage[1],
                            work->coll.stage[2], work->list[0],       work->list[1],
                            work->list[2],       work->list[3],       work->own};
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++)
        RANK_CUDA(cudaFree(memory[i]));
    perf_part_free(&work->from);
    perf_part_free(&work->to);
    return TOOL_OK;
}
