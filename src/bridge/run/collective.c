/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collective.c - the runtimes' method, for comparison: all-gather and narrow, clone and all-reduce.
 *
 * This is the only file that knows fan-in from fan-out. It runs the reference's passes one by one
 * (contiguous copy, all-gather over the k siblings, concatenation along samples; clone, all-reduce
 * over cp, narrow), plus what a caller with a SHARDED output does around them (shard copy, scatter
 * into zeros). What it cannot express, plan/config.c refuses before any collective.
 */
#include "bridge/run/run.h"
#include "bridge/plan/routing.h"

#include "comm/comm.h"
#include "core/error.h"

#include <stdlib.h>
#include <string.h>

/* ---- groups and staging ---- */

static colo_status_t is_member(const colo_bridge_t *b, int64_t rank)
{
    if (colo_comm_find(b->comm, rank) >= 0)
        return COLO_OK;
    return colo_fail(COLO_ERR_MISSING,
                     "bridge: COLLECTIVE gathers or adds with rank %lld, which is not in the "
                     "communicator '%s' of %d ranks",
                     (long long)rank, colo_comm_name(b->comm), (int)colo_comm_size(b->comm));
}

/* COLO_ERR_MISSING if a rank of this rank's groups is not in b->comm. */
static colo_status_t find_members(const colo_bridge_t *b, const colo_plan_t *p)
{
    bool in = colo_plan_direction(p) == COLO_FAN_IN;
    const colo_grid_t *fine = in ? &p->src.grid : &p->dst.grid;
    int64_t k = colo_plan_scale(p), dp;
    colo_group_t cp;
    if (!colo_grid_has_rank(fine, p->rank))
        return COLO_OK;
    COLO_TRY(colo_grid_coord(fine, p->rank, "dp", &dp));
    for (int64_t i = 0; k > 1 && i < k; i++) /* siblings differ in the finer side's dp only */
        COLO_TRY(is_member(b, p->rank + (i - dp % k) * fine->stride[colo_grid_dim(fine, "dp")]));
    if (colo_grid_extent(&p->dst.grid, "cp") == 1)
        return COLO_OK;
    COLO_TRY(colo_grid_group(&p->dst.grid, "cp", p->rank, &cp));
    for (int64_t i = 0; i < cp.size; i++)
        COLO_TRY(is_member(b, colo_group_member(&cp, i)));
    return COLO_OK;
}

static colo_status_t make_groups(colo_bridge_t *b)
{
    const colo_plan_t *p = b->now.program.plan;
    colo_collective_t *c = &b->coll;
    const colo_grid_t *s = &p->src.grid, *d = &p->dst.grid;
    int64_t color = -1, key = 0, sdp, stp, ddp, dtp, cp;
    c->direction = colo_plan_direction(p);
    c->k = colo_plan_scale(p);
    if (colo_grid_has_rank(s, p->rank)) {
        COLO_TRY(colo_grid_coord(s, p->rank, "dp", &sdp));
        COLO_TRY(colo_grid_coord(s, p->rank, "tp", &stp));
        COLO_TRY(colo_grid_coord(d, p->rank, "dp", &ddp));
        COLO_TRY(colo_grid_coord(d, p->rank, "tp", &dtp));
        COLO_TRY(colo_grid_coord(d, p->rank, "cp", &cp));
        bool in = c->direction == COLO_FAN_IN;
        c->sibling = (in ? sdp : ddp) % c->k;
        key = in ? sdp : ddp;
        color = in ? ddp * colo_grid_extent(s, "tp") + stp
                   : (sdp * colo_grid_extent(d, "tp") + dtp) * colo_grid_extent(d, "cp") + cp;
    }
    if (c->direction != COLO_EQUAL) {
        COLO_TRY(colo_comm_i_split_color(b->comm, COLO_CATEGORY_BRIDGE, color, key, &c->gather));
        if (c->gather)
            colo_comm_set_name(c->gather, "bridge-gather");
    }
    if (colo_grid_extent(d, "cp") > 1) {
        COLO_TRY(colo_comm_split(b->comm, d, "cp", &c->cp));
        if (c->cp)
            colo_comm_set_name(c->cp, "bridge-cp");
    }
    return COLO_OK;
}

static void destroy(colo_bridge_t *b)
{
    colo_collective_t *c = &b->coll;
    colo_comm_destroy(&c->gather);
    colo_comm_destroy(&c->cp);
    for (int i = 0; i < 2; i++)
        colo_arena_deinit(b, &c->stage[i]);
    colo_arena_deinit(b, &c->sum);
}

static int64_t part_count(const colo_owned_t *o)
{
    return (o->b1 - o->b0) * o->rows * (o->h1 - o->h0);
}

/* A destination rank's samples with all rows, whatever the output is. */
static colo_owned_t full_dst(const colo_plan_t *p)
{
    colo_owned_t o = p->own_dst;
    o.rows = o.b1 > o.b0 ? p->config.shape.rows : 0;
    return o;
}

/* The rows that a SHARDED output takes out of the whole sequence. */
static colo_status_t find_rows(colo_loaded_t *s)
{
    const colo_plan_t *p = s->program.plan;
    const colo_shape_t *shape = &p->config.shape;
    colo_owned_t own;
    if (p->config.output != COLO_SHARDED)
        return COLO_OK;
    COLO_TRY(colo_layout_owned(&p->dst, p->rank, shape, false, &own, NULL, 0, &s->nruns));
    s->run = malloc((size_t)(s->nruns + 1) * sizeof *s->run);
    if (!s->run)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %lld runs of rows", (long long)s->nruns);
    return colo_layout_owned(&p->dst, p->rank, shape, false, &own, s->run, s->nruns, &s->nruns);
}

/* Have staging for a plan. */
static colo_status_t reserve(colo_bridge_t *b, const colo_plan_t *p)
{
    colo_collective_t *c = &b->coll;
    size_t elem = colo_dtype_size(p->config.dtype);
    colo_owned_t full = full_dst(p);
    size_t src = (size_t)part_count(&p->own_src) * elem, dst = (size_t)part_count(&full) * elem;
    for (int i = 0; i < 2; i++)
        COLO_TRY(colo_arena_grow(b, &c->stage[i], src > dst ? src : dst, false,
                                 "staging of COLLECTIVE"));
    if (!c->cp || p->config.no_grad)
        return COLO_OK;
    return colo_arena_grow(b, &c->sum, colo_comm_i_reduction_stage(c->cp, (int64_t)dst), false,
                           "staging of COLLECTIVE's sums");
}

/* ---- passes ---- */

/* Contiguous memory of @nb samples in the tensors' own axis order. */
static colo_view_t contiguous(const colo_bridge_t *b, void *data, int64_t nb, int64_t rows,
                              int64_t h)
{
    int64_t extent[3] = {nb, rows, h}, stride[3], step = 1;
    int order[3] = {0, 1, 2}; /* order[i]: which of b, s, h is tensor axis i */
    for (int i = 0; b->axes.of[1] >= 0 && i < 3; i++)
        order[b->axes.of[i]] = i;
    for (int i = 2; i >= 0; i--) {
        stride[order[i]] = step;
        step *= extent[order[i]];
    }
    return (colo_view_t){.data = data, .stride = {stride[0], stride[1], stride[2]}};
}

static bool same_strides(colo_view_t a, colo_view_t b, const int64_t *extent)
{
    for (int i = 0; i < 3; i++)
        if (extent[i] > 1 && a.stride[i] != b.stride[i])
            return false;
    return true;
}

/* Samples from @first on of a view. */
typedef struct samples {
    colo_view_t view;
    int64_t first;
} samples_t;

/* Of @n samples, rows [row, row + rows). */
static colo_box_t box_of(const colo_bridge_t *b, samples_t s, int64_t n, int64_t row, int64_t rows)
{
    const colo_plan_config_t *c = &b->now.program.plan->config;
    const int64_t pos = s.first * s.view.stride[0] + row * s.view.stride[1];
    return (colo_box_t){.data = s.view.data ? s.view.data + pos * (int64_t)colo_dtype_size(c->dtype)
                                            : NULL,
                        .extent = {n, rows, c->shape.features},
                        .stride = {s.view.stride[0], s.view.stride[1], s.view.stride[2]}};
}

static colo_status_t copy_samples(const colo_bridge_t *b, samples_t to, samples_t from, int64_t n,
                                  colo_stream_t stream)
{
    const colo_plan_config_t *c = &b->now.program.plan->config;
    const colo_box_t dst = box_of(b, to, n, 0, c->shape.rows),
                     src = box_of(b, from, n, 0, c->shape.rows);
    return b->ops->box_copy(&dst, &src, colo_dtype_size(c->dtype), stream);
}

/* Copies own rows between a full-length view and a sharded one, either way round. */
static colo_status_t copy_rows(const colo_bridge_t *b, colo_view_t full, colo_view_t part,
                               bool to_part, colo_stream_t stream)
{
    const colo_loaded_t *s = &b->now;
    const colo_owned_t *own = &s->program.plan->own_dst;
    const int64_t nb = own->b1 - own->b0;
    const size_t elem = colo_dtype_size(s->program.plan->config.dtype);
    for (int64_t i = 0; i < s->nruns; i++) {
        const colo_run_t *run = &s->run[i];
        colo_box_t f = box_of(b, (samples_t){.view = full}, nb, run->row, run->count);
        colo_box_t q = box_of(b, (samples_t){.view = part}, nb, run->local, run->count);
        COLO_TRY(b->ops->box_copy(to_part ? &q : &f, to_part ? &f : &q, elem, stream));
    }
    return COLO_OK;
}

/* all-gather of the siblings' parts of @nb samples, concatenated along samples into @to. @stage: of
 * this rank's part; of all parts. */
static colo_status_t gather_samples(colo_bridge_t *b, colo_view_t from, int64_t nb, colo_view_t to,
                                    void *const stage[2], colo_stream_t stream)
{
    const colo_plan_t *p = b->now.program.plan;
    const colo_shape_t *s = &p->config.shape;
    const colo_collective_t *c = &b->coll;
    int64_t extent[3] = {nb, s->rows, s->features}, all[3] = {nb * c->k, s->rows, s->features};
    int64_t count = nb * s->rows * s->features;
    size_t elem = colo_dtype_size(p->config.dtype);
    colo_view_t packed = contiguous(b, stage[0], nb, s->rows, s->features);
    if (!c->gather)
        return COLO_OK;
    if (!same_strides(from, packed, extent)) {
        COLO_TRY(
            copy_samples(b, (samples_t){.view = packed}, (samples_t){.view = from}, nb, stream));
        from = packed;
    }
    colo_view_t joined = contiguous(b, NULL, nb * c->k, s->rows, s->features);
    /* samples outermost and no gaps: the gathered parts are the concatenation already */
    const bool in_place =
        (b->axes.of[1] < 0 || b->axes.of[0] == 0) && same_strides(to, joined, all);
    COLO_TRY(colo_comm_i_all_gather(c->gather, COLO_CATEGORY_BRIDGE, from.data,
                                    in_place ? (void *)to.data : stage[1], count, p->config.dtype,
                                    stream));
    for (int64_t i = 0; !in_place && count && i < c->k; i++) {
        colo_view_t part =
            contiguous(b, (char *)stage[1] + (size_t)(i * count) * elem, nb, s->rows, s->features);
        COLO_TRY(copy_samples(b, (samples_t){to, i * nb}, (samples_t){.view = part}, nb, stream));
    }
    return COLO_OK;
}

static colo_status_t forward(colo_bridge_t *b, colo_view_t x, colo_view_t y, colo_stream_t stream)
{
    const colo_plan_t *p = b->now.program.plan;
    const colo_collective_t *c = &b->coll;
    colo_owned_t full = full_dst(p);
    int64_t nd = full.b1 - full.b0, ns = p->own_src.b1 - p->own_src.b0;
    bool sharded = p->config.output == COLO_SHARDED;
    if (nd == 0 && ns == 0 && !c->gather)
        return COLO_OK; /* outside the grids, or no samples at all */
    /* SHARDED: the whole sequence is made first, then the caller's shard copy */
    colo_view_t whole =
        contiguous(b, c->stage[0].data, nd, p->config.shape.rows, p->config.shape.features);
    colo_view_t to = sharded ? whole : y;
    if (c->direction == COLO_FAN_IN) {
        /* sharded and samples outermost: parts land in stage 0 at once, so pack x in stage 1 */
        bool outer = b->axes.of[1] < 0 || b->axes.of[0] == 0;
        void *const stage[2] = {c->stage[sharded && outer ? 1 : 0].data, c->stage[1].data};
        COLO_TRY(gather_samples(b, x, ns, to, stage, stream));
    } else {
        COLO_TRY(copy_samples(b, (samples_t){.view = to},
                              (samples_t){x, c->direction == COLO_FAN_OUT ? c->sibling * nd : 0},
                              nd, stream));
    }
    return sharded ? copy_rows(b, whole, y, true, stream) : COLO_OK;
}

static colo_status_t backward(colo_bridge_t *b, colo_view_t d_y, colo_view_t d_x,
                              colo_stream_t stream)
{
    const colo_plan_t *p = b->now.program.plan;
    const colo_collective_t *c = &b->coll;
    const colo_shape_t *s = &p->config.shape;
    colo_owned_t full = full_dst(p);
    int64_t nd = full.b1 - full.b0, ns = p->own_src.b1 - p->own_src.b0;
    bool sharded = p->config.output == COLO_SHARDED;
    size_t elem = colo_dtype_size(p->config.dtype);
    colo_view_t g = contiguous(b, c->stage[0].data, nd, s->rows, s->features);
    if (nd == 0 && ns == 0 && !c->gather)
        return COLO_OK;
    if (sharded && c->stage[0].data) { /* the adjoint of the shard copy: scatter into zeros */
        COLO_TRY(colo_mem_zero(b->mem, c->stage[0].data, (size_t)part_count(&full) * elem, stream));
        COLO_TRY(copy_rows(b, g, d_y, false, stream));
    } else if (c->cp) {
        COLO_TRY(copy_samples(b, (samples_t){.view = g}, (samples_t){.view = d_y}, nd,
                              stream)); /* clone: d_y is never written */
    } else {
        g = d_y;
    }
    if (c->cp) {
        colo_comm_i_set_stage(c->cp, c->sum.data, c->sum.size);
        const colo_status_t st =
            colo_comm_i_all_reduce(c->cp, COLO_CATEGORY_BRIDGE, g.data, g.data,
                                   nd * s->rows * s->features, p->config.dtype, COLO_SUM, stream);
        colo_comm_i_set_stage(c->cp, NULL, 0);
        COLO_TRY(st);
    }
    if (c->direction == COLO_FAN_OUT) {
        void *const stage[2] = {c->stage[0].data, c->stage[1].data};
        return gather_samples(b, g, nd, d_x, stage, stream);
    }
    return copy_samples(b, (samples_t){.view = d_x},
                        (samples_t){g, c->direction == COLO_FAN_IN ? c->sibling * ns : 0}, ns,
                        stream);
}

/* ---- the executor ---- */

static colo_status_t load(colo_bridge_t *b, colo_loaded_t *loaded)
{
    const colo_plan_t *p = loaded->program.plan;
    const colo_plan_config_t *c = &p->config;
    const int64_t cp = colo_grid_extent(&p->dst.grid, "cp");
    COLO_TRY(colo_plan_collective_check(c));
    if (!c->no_grad && !colo_dtype_is_float(c->dtype) && cp > 1)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: COLLECTIVE sums gradients over cp=%lld, which %s is not made "
                         "for; use EXACT or no_grad",
                         (long long)cp, colo_dtype_name(c->dtype));
    COLO_TRY(find_rows(loaded));
    COLO_TRY(colo_memory_check(b, colo_comm_size(b->comm) > 1, 0));
    if (b->mem == COLO_CUDA && !b->streams.order)
        COLO_TRY(b->ops->stream_create(1, &b->streams.order));
    return find_members(b, p);
}

static void unload(const colo_bridge_t *b, colo_loaded_t *loaded)
{
    (void)b;
    free(loaded->run);
}

static colo_status_t create(colo_bridge_t *b, bool *whole)
{
    *whole = true;
    COLO_TRY(make_groups(b));
    const colo_status_t st = reserve(b, b->now.program.plan);
    return st < 0 ? colo_comm_i_fail(b->comm, st) : st; /* peers may wait in a forward */
}

static colo_status_t reshape(colo_bridge_t *b, colo_loaded_t *next)
{
    return reserve(b, next->program.plan);
}

static colo_status_t run_pass(colo_call_t *call)
{
    colo_bridge_t *b = call->bridge;
    const colo_carried_t *t = call->carried;
    const colo_status_t st = call->frame.pass == COLO_FORWARD
                                 ? forward(b, t->in, t->out, call->stream)
                                 : backward(b, t->in, t->out, call->stream);
    return st < 0 ? colo_bridge_fail(b, st) : st;
}

static colo_status_t run(colo_call_t *call)
{
    return colo_memory_in_order(call, run_pass);
}

/* Peers wait in the groups, whose error state is not that of the comm they were split from. */
static void fail(colo_bridge_t *b, colo_status_t st)
{
    if (b->coll.gather)
        colo_comm_i_fail(b->coll.gather, st);
    if (b->coll.cp)
        colo_comm_i_fail(b->coll.cp, st);
}

const colo_executor_t colo_over_groups = {.load = load,
                                          .unload = unload,
                                          .create = create,
                                          .destroy = destroy,
                                          .reshape = reshape,
                                          .run = run,
                                          .fail = fail};
