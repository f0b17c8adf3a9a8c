/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collective.c - the runtimes' method, for comparison: all-gather and narrow, clone and all-reduce.
 *
 * This is the only file that knows fan-in from fan-out. It runs the reference's passes one by one
 * (contiguous copy, all-gather over the k siblings, concatenation along samples; clone, all-reduce
 * over cp, narrow), plus what a caller with a SHARDED output does around them (shard copy, scatter
 * into zeros). What it cannot express, plan/config.c refuses before any collective. It has no
 * program, and asks the comm for what any caller can (include/).
 */
#include "bridge/run/run.h"

#include "core/error.h"

#include <string.h>

/* ---- groups and staging ---- */

static colo_status_t is_member(const colo_bridge_t *bridge, int64_t rank)
{
    if (colo_comm_find(bridge->comm, rank) >= 0)
        return COLO_OK;
    return colo_fail(COLO_ERR_MISSING,
                     "bridge: COLLECTIVE gathers or adds with rank %lld, which is not in the "
                     "communicator '%s' of %d ranks",
                     (long long)rank, colo_comm_name(bridge->comm),
                     (int)colo_comm_size(bridge->comm));
}

/* COLO_ERR_MISSING if a rank of this rank's groups is not in the comm. */
static colo_status_t find_members(const colo_bridge_t *bridge, const colo_plan_t *plan)
{
    bool in = colo_plan_direction(plan) == COLO_DIRECTION_FAN_IN;
    const colo_grid_t *fine = in ? &plan->src.grid : &plan->dst.grid;
    int64_t k = colo_plan_scale(plan), dp;
    colo_group_t cp;
    if (!colo_grid_has_rank(fine, plan->rank))
        return COLO_OK;
    COLO_TRY(colo_grid_coord(fine, plan->rank, "dp", &dp));
    for (int64_t i = 0; k > 1 && i < k; i++) /* siblings differ in the finer side's dp only */
        COLO_TRY(
            is_member(bridge, plan->rank + (i - dp % k) * fine->stride[colo_grid_dim(fine, "dp")]));
    if (colo_grid_extent(&plan->dst.grid, "cp") == 1)
        return COLO_OK;
    COLO_TRY(colo_grid_group(&plan->dst.grid, "cp", plan->rank, &cp));
    for (int64_t i = 0; i < cp.size; i++)
        COLO_TRY(is_member(bridge, colo_group_member(&cp, i)));
    return COLO_OK;
}

colo_status_t colo_collective_create(colo_bridge_t *bridge)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    colo_collective_t *collective = &bridge->coll;
    const colo_grid_t *src_grid = &plan->src.grid, *dst_grid = &plan->dst.grid;
    int64_t color = -1, key = 0, sdp, stp, ddp, dtp, cp;
    collective->direction = colo_plan_direction(plan);
    collective->k = colo_plan_scale(plan);
    if (colo_grid_has_rank(src_grid, plan->rank)) {
        COLO_TRY(colo_grid_coord(src_grid, plan->rank, "dp", &sdp));
        COLO_TRY(colo_grid_coord(src_grid, plan->rank, "tp", &stp));
        COLO_TRY(colo_grid_coord(dst_grid, plan->rank, "dp", &ddp));
        COLO_TRY(colo_grid_coord(dst_grid, plan->rank, "tp", &dtp));
        COLO_TRY(colo_grid_coord(dst_grid, plan->rank, "cp", &cp));
        bool in = collective->direction == COLO_DIRECTION_FAN_IN;
        collective->sibling = (in ? sdp : ddp) % collective->k;
        key = in ? sdp : ddp;
        color =
            in ? ddp * colo_grid_extent(src_grid, "tp") + stp
               : (sdp * colo_grid_extent(dst_grid, "tp") + dtp) * colo_grid_extent(dst_grid, "cp") +
                     cp;
    }
    if (collective->direction != COLO_DIRECTION_EQUAL) {
        COLO_TRY(colo_comm_split_color(bridge->comm, color, key, &collective->gather));
        if (collective->gather)
            colo_comm_set_name(collective->gather, "bridge-gather");
    }
    if (colo_grid_extent(dst_grid, "cp") > 1) {
        COLO_TRY(colo_comm_split(bridge->comm, dst_grid, "cp", &collective->cp));
        if (collective->cp)
            colo_comm_set_name(collective->cp, "bridge-cp");
    }
    return COLO_OK;
}

void colo_collective_destroy(colo_bridge_t *bridge)
{
    colo_collective_t *collective = &bridge->coll;
    colo_comm_destroy(&collective->gather);
    colo_comm_destroy(&collective->cp);
    for (int i = 0; i < 2; i++)
        colo_arena_deinit(bridge, &collective->stage[i]);
}

static int64_t part_count(const colo_owned_t *owned)
{
    return (owned->b1 - owned->b0) * owned->rows * (owned->h1 - owned->h0);
}

/* A destination rank's samples with all rows, whatever the output is. */
static colo_owned_t full_dst(const colo_plan_t *plan)
{
    colo_owned_t owned = plan->own_dst;
    owned.rows = owned.b1 > owned.b0 ? plan->config.shape.rows : 0;
    return owned;
}

/* The rows that a SHARDED output takes out of the whole sequence. */
static colo_status_t find_rows(colo_ready_plan_t *ready)
{
    const colo_plan_t *plan = ready->program.plan;
    const colo_shape_t *shape = &plan->config.shape;
    colo_owned_t own;
    if (plan->config.output != COLO_OUTPUT_SHARDED)
        return COLO_OK;
    COLO_TRY(colo_layout_owned(&plan->dst, plan->rank, shape, false, &own, NULL, 0, &ready->nruns));
    ready->run =
        colo_pool_take(&ready->program.plan->pool, (size_t)(ready->nruns + 1) * sizeof *ready->run);
    COLO_FAIL_IF(!ready->run, COLO_ERR_NOMEM, "bridge: %lld runs of rows", (long long)ready->nruns);
    return colo_layout_owned(&plan->dst, plan->rank, shape, false, &own, ready->run, ready->nruns,
                             &ready->nruns);
}

/* Have staging for a plan. */
static colo_status_t reserve(colo_bridge_t *bridge, const colo_plan_t *plan)
{
    const size_t elem = colo_dtype_size(plan->config.dtype);
    const colo_owned_t full = full_dst(plan);
    const size_t src = (size_t)part_count(&plan->own_src) * elem,
                 dst = (size_t)part_count(&full) * elem;
    for (int i = 0; i < 2; i++)
        COLO_TRY(colo_arena_grow(bridge, &bridge->coll.stage[i], src > dst ? src : dst, false,
                                 "staging of COLLECTIVE"));
    return COLO_OK;
}

/* ---- passes ---- */

/* Contiguous memory of @nb samples in the tensors' own axis order. */
static colo_view_t contiguous(const colo_bridge_t *bridge, void *data, int64_t nb)
{
    const colo_shape_t *shape = &bridge->now.program.plan->config.shape;
    int64_t extent[3] = {nb, shape->rows, shape->features}, stride[3], next = 1;
    int order[3] = {0, 1, 2}; /* order[i]: which of samples, rows, features is tensor axis i */
    for (int i = 0; bridge->axes.of[1] >= 0 && i < 3; i++)
        order[bridge->axes.of[i]] = i;
    for (int i = 2; i >= 0; i--) {
        stride[order[i]] = next;
        next *= extent[order[i]];
    }
    return (colo_view_t){.data = data, .stride = {stride[0], stride[1], stride[2]}};
}

static bool same_strides(colo_view_t view, colo_view_t other, const int64_t *extent)
{
    for (int i = 0; i < 3; i++)
        if (extent[i] > 1 && view.stride[i] != other.stride[i])
            return false;
    return true;
}

/* A view without its first @n samples. */
static colo_view_t behind(const colo_bridge_t *bridge, colo_view_t view, int64_t n)
{
    if (view.data)
        view.data +=
            n * view.stride[0] * (int64_t)colo_dtype_size(bridge->now.program.plan->config.dtype);
    return view;
}

/* Of @n samples, rows [row, row + rows). */
static colo_box_t box_of(const colo_bridge_t *bridge, colo_view_t view, int64_t n, int64_t row,
                         int64_t rows)
{
    const colo_plan_config_t *config = &bridge->now.program.plan->config;
    const colo_owned_t own = {.b1 = n, .rows = rows, .h1 = config->shape.features};
    if (view.data)
        view.data += row * view.stride[1] * (int64_t)colo_dtype_size(config->dtype);
    return colo_view_box(view, &own);
}

static colo_status_t copy_samples(const colo_bridge_t *bridge, colo_view_t to, colo_view_t from,
                                  int64_t n, colo_stream_t stream)
{
    const colo_plan_config_t *config = &bridge->now.program.plan->config;
    const colo_box_t dst = box_of(bridge, to, n, 0, config->shape.rows),
                     src = box_of(bridge, from, n, 0, config->shape.rows);
    return bridge->device->box_copy(&dst, &src, colo_dtype_size(config->dtype), stream);
}

/* Copies own rows between a full-length view and a sharded one, either way round. */
static colo_status_t copy_rows(const colo_bridge_t *bridge, colo_view_t full, colo_view_t part,
                               bool to_part, colo_stream_t stream)
{
    const colo_ready_plan_t *ready = &bridge->now;
    const colo_owned_t *own = &ready->program.plan->own_dst;
    const int64_t nb = own->b1 - own->b0;
    const size_t elem = colo_dtype_size(ready->program.plan->config.dtype);
    for (int64_t i = 0; i < ready->nruns; i++) {
        const colo_run_t *run = &ready->run[i];
        colo_box_t full_box = box_of(bridge, full, nb, run->row, run->count);
        colo_box_t part_box = box_of(bridge, part, nb, run->local, run->count);
        COLO_TRY(bridge->device->box_copy(to_part ? &part_box : &full_box,
                                          to_part ? &full_box : &part_box, elem, stream));
    }
    return COLO_OK;
}

/* all-gather of the siblings' parts of @nb samples, concatenated along samples into @to. @stage: of
 * this rank's part; of all parts. */
static colo_status_t gather_samples(colo_bridge_t *bridge, colo_view_t from, int64_t nb,
                                    colo_view_t to, void *const stage[2], colo_stream_t stream)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const colo_shape_t *shape = &plan->config.shape;
    const colo_collective_t *collective = &bridge->coll;
    int64_t extent[3] = {nb, shape->rows, shape->features},
            all[3] = {nb * collective->k, shape->rows, shape->features};
    int64_t count = nb * shape->rows * shape->features;
    size_t elem = colo_dtype_size(plan->config.dtype);
    colo_view_t packed = contiguous(bridge, stage[0], nb);
    if (!collective->gather)
        return COLO_OK;
    if (!same_strides(from, packed, extent)) {
        COLO_TRY(copy_samples(bridge, packed, from, nb, stream));
        from = packed;
    }
    colo_view_t joined = contiguous(bridge, NULL, nb * collective->k);
    /* samples outermost and no gaps: the gathered parts are the concatenation already */
    const bool in_place =
        (bridge->axes.of[1] < 0 || bridge->axes.of[0] == 0) && same_strides(to, joined, all);
    COLO_TRY(colo_comm_all_gather(collective->gather, from.data,
                                  in_place ? (void *)to.data : stage[1], count, plan->config.dtype,
                                  stream));
    for (int64_t i = 0; !in_place && count && i < collective->k; i++) {
        colo_view_t part = contiguous(bridge, (char *)stage[1] + (size_t)(i * count) * elem, nb);
        COLO_TRY(copy_samples(bridge, behind(bridge, to, i * nb), part, nb, stream));
    }
    return COLO_OK;
}

static colo_status_t forward(colo_bridge_t *bridge, colo_view_t in, colo_view_t out,
                             colo_stream_t stream)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const colo_collective_t *collective = &bridge->coll;
    colo_owned_t full = full_dst(plan);
    int64_t nd = full.b1 - full.b0, ns = plan->own_src.b1 - plan->own_src.b0;
    bool sharded = plan->config.output == COLO_OUTPUT_SHARDED;
    if (nd == 0 && ns == 0 && !collective->gather)
        return COLO_OK; /* outside the grids, or no samples at all */
    /* SHARDED: the whole sequence is made first, then the caller's shard copy */
    colo_view_t sequence = contiguous(bridge, collective->stage[0].data, nd);
    colo_view_t to = sharded ? sequence : out;
    if (collective->direction == COLO_DIRECTION_FAN_IN) {
        /* sharded and samples outermost: parts land in stage 0 at once, so pack the input in stage
         * 1 */
        bool outer = bridge->axes.of[1] < 0 || bridge->axes.of[0] == 0;
        void *const stage[2] = {collective->stage[sharded && outer ? 1 : 0].data,
                                collective->stage[1].data};
        COLO_TRY(gather_samples(bridge, in, ns, to, stage, stream));
    } else {
        const int64_t first =
            collective->direction == COLO_DIRECTION_FAN_OUT ? collective->sibling * nd : 0;
        COLO_TRY(copy_samples(bridge, to, behind(bridge, in, first), nd, stream));
    }
    return sharded ? copy_rows(bridge, sequence, out, true, stream) : COLO_OK;
}

static colo_status_t backward(colo_bridge_t *bridge, colo_view_t d_y, colo_view_t d_x,
                              colo_stream_t stream)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const colo_collective_t *collective = &bridge->coll;
    const colo_shape_t *shape = &plan->config.shape;
    colo_owned_t full = full_dst(plan);
    int64_t nd = full.b1 - full.b0, ns = plan->own_src.b1 - plan->own_src.b0;
    bool sharded = plan->config.output == COLO_OUTPUT_SHARDED;
    size_t elem = colo_dtype_size(plan->config.dtype);
    colo_view_t view = contiguous(bridge, collective->stage[0].data, nd);
    if (nd == 0 && ns == 0 && !collective->gather)
        return COLO_OK;
    if (sharded &&
        collective->stage[0].data) { /* the adjoint of the shard copy: scatter into zeros */
        COLO_TRY(colo_mem_zero(bridge->mem, collective->stage[0].data,
                               (size_t)part_count(&full) * elem, stream));
        COLO_TRY(copy_rows(bridge, view, d_y, false, stream));
    } else if (collective->cp) {
        COLO_TRY(copy_samples(bridge, view, d_y, nd, stream)); /* clone: d_y is never written */
    } else {
        view = d_y;
    }
    if (collective->cp)
        COLO_TRY(colo_comm_all_reduce(collective->cp, view.data, view.data,
                                      nd * shape->rows * shape->features, plan->config.dtype,
                                      COLO_REDOP_SUM, stream));
    if (collective->direction == COLO_DIRECTION_FAN_OUT) {
        void *const stage[2] = {collective->stage[0].data, collective->stage[1].data};
        return gather_samples(bridge, view, nd, d_x, stage, stream);
    }
    const int64_t first =
        collective->direction == COLO_DIRECTION_FAN_IN ? collective->sibling * ns : 0;
    return copy_samples(bridge, d_x, behind(bridge, view, first), ns, stream);
}

/* ---- what a bridge asks of it ---- */

const char *colo_algo_name(colo_algo_t algo)
{
    return algo == COLO_ALGO_EXACT ? "EXACT" : algo == COLO_ALGO_COLLECTIVE ? "COLLECTIVE" : NULL;
}

colo_status_t colo_collective_load(colo_bridge_t *bridge, colo_ready_plan_t *ready)
{
    const colo_plan_t *plan = ready->program.plan;
    const colo_plan_config_t *config = &plan->config;
    const int64_t cp = colo_grid_extent(&plan->dst.grid, "cp");
    COLO_TRY(colo_plan_collective_check(config));
    COLO_FAIL_IF(!config->no_grad && !colo_dtype_is_float(config->dtype) && cp > 1, COLO_ERR_ARG,
                 "bridge: COLLECTIVE sums gradients over cp=%lld, which %s is not made "
                 "for; use EXACT or no_grad",
                 (long long)cp, colo_dtype_name(config->dtype));
    COLO_TRY(find_rows(ready));
    COLO_TRY(colo_memory_check(bridge, colo_comm_size(bridge->comm) > 1, 0));
    if (bridge->mem == COLO_MEM_CUDA && !bridge->streams.order)
        COLO_TRY(bridge->device->stream_create(1, &bridge->streams.order));
    COLO_TRY(find_members(bridge, plan));
    return reserve(bridge, plan);
}

static colo_status_t run_pass(colo_call_t *call)
{
    colo_bridge_t *bridge = call->bridge;
    const colo_carried_t *tensor = call->carried;
    const colo_status_t st = call->frame.pass == COLO_PASS_FORWARD
                                 ? forward(bridge, tensor->in, tensor->out, call->stream)
                                 : backward(bridge, tensor->in, tensor->out, call->stream);
    return st < 0 ? colo_bridge_fail(bridge, st) : st;
}

colo_status_t colo_collective_run(colo_call_t *call)
{
    COLO_TRY(colo_memory_begin(call));
    return colo_memory_end(call, run_pass(call));
}
