/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge.c - the handle: plan, agree, allocate; another shape; destroy. Its calls are call.c.
 */
#include "bridge/ragged.h"
#include "bridge/run/run.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/device.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"

#include <stdlib.h>
#include <string.h>

/* ---- axes ---- */

static colo_status_t parse_axes(colo_bridge_t *b, const char *axes)
{
    axes = axes ? axes : "bsh";
    if (strcmp(axes, "th") == 0 || strcmp(axes, "bh") == 0) {
        b->axes.of[0] = 0;
        b->axes.of[1] = -1;
        b->axes.of[2] = 1;
    } else {
        int seen = 0;
        for (int i = 0; strlen(axes) == 3 && i < 3; i++) {
            const char *pos = strchr("bsh", axes[i]);
            if (pos) {
                b->axes.of[pos - "bsh"] = i;
                seen |= 1 << (pos - "bsh");
            }
        }
        if (seen != 7)
            return colo_fail(COLO_ERR_ARG,
                             "bridge: axes '%.16s', expected a permutation of 'bsh', 'th' or 'bh'",
                             axes);
    }
    memcpy(b->axes.name, axes, strlen(axes) + 1);
    return COLO_OK;
}

/* ---- what depends on the shape ---- */

static colo_status_t load_plan(colo_bridge_t *b, const colo_plan_config_t *cfg, colo_loaded_t *out)
{
    colo_loaded_t s = {.any_ranks = b->now.any_ranks};
    colo_status_t st = COLO_OK;
    int64_t rank = colo_comm_world_rank(b->comm, colo_comm_rank(b->comm));
    if (strcmp(b->axes.name, "bh") == 0 && cfg->shape.rows != 1)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: %lld rows with axes 'bh', expected 1; tensors of several rows "
                         "have axes 'th', or 'bsh' in any order",
                         (long long)cfg->shape.rows);
    COLO_TRY_GOTO(st, colo_plan_create(&s.program.plan, cfg, rank), fail);
    COLO_TRY_GOTO(st, colo_run_load(b, &s), fail);
    *out = s;
    return COLO_OK;
fail:
    colo_run_unload(b, &s);
    return st;
}

/* ---- create ---- */

static colo_status_t check_config(const colo_bridge_config_t *c)
{
    if (!c->src || !c->dst)
        return colo_fail(COLO_ERR_ARG, "bridge: config.%s is NULL", c->src ? "dst" : "src");
    if (!colo_algorithm_of(c->algo))
        return colo_fail(COLO_ERR_ARG, "bridge: algo %d, expected 0 (EXACT) or 1 (COLLECTIVE)",
                         (int)c->algo);
    if ((unsigned)c->transport > COLO_TRANSPORT_PEER)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: transport %d, expected 0 (AUTO), 1 (NCCL) or 2 (PEER)",
                         (int)c->transport);
    if (c->peer_blocks < 0 || c->peer_blocks > COLO_PEER_BLOCKS_MAX)
        return colo_fail(COLO_ERR_ARG, "bridge: peer_blocks %d, expected 0 to %d",
                         (int)c->peer_blocks, COLO_PEER_BLOCKS_MAX);
    if (!c->allocator.allocate != !c->allocator.release)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: config.allocator: %s is NULL, expected both functions or none",
                         c->allocator.allocate ? "release" : "allocate");
    if ((unsigned)c->mem > COLO_CUDA)
        return colo_fail(COLO_ERR_ARG, "bridge: mem %d, expected 0 (host) or 1 (cuda)",
                         (int)c->mem);
    return COLO_OK;
}

/* The nodes of the comm, by world rank; none if they are one. */
static colo_status_t find_nodes(colo_bridge_t *b)
{
    const colo_comm_t *c = b->comm;
    const colo_grid_t *g[2] = {&b->sides.src.grid, &b->sides.dst.grid};
    int64_t ranks = 0;
    if (colo_comm_nodes(c) < 2)
        return COLO_OK;
    COLO_TRY(colo_layout_check_fields(&b->sides.src));
    COLO_TRY(colo_layout_check_fields(&b->sides.dst));
    for (int i = 0; i < 2; i++)
        ranks = g[i]->offset + g[i]->size > ranks ? g[i]->offset + g[i]->size : ranks;
    for (int32_t r = 0; r < c->size; r++)
        ranks = c->world_rank[r] >= ranks ? c->world_rank[r] + 1 : ranks;
    COLO_AUTOFREE int32_t *node =
        ranks <= INT64_MAX / 64 ? malloc((size_t)ranks * sizeof *node) : NULL;
    if (!node)
        return colo_fail(COLO_ERR_NOMEM, "bridge: nodes of %lld ranks", (long long)ranks);
    for (int64_t r = 0; r < ranks; r++)
        node[r] = -1; /* a rank outside the comm, which no plan of this bridge may name */
    for (int32_t r = 0; r < c->size; r++)
        node[c->world_rank[r]] = colo_comm_node(c, r);
    return colo_nodes_create(&b->sides.nodes, node, ranks);
}

/* The environment's, else the caller's. */
static colo_status_t choose_blocks(colo_bridge_t *b, const colo_bridge_config_t *c)
{
    static const char name[] = "COLO_PEER_BLOCKS";
    int64_t blocks;
    bool from_env;
    COLO_TRY(colo_env_i64(name, &blocks));
    (void)colo_env_value(name, &from_env);
    b->peers.blocks = from_env ? (int32_t)blocks : c->peer_blocks;
    return COLO_OK;
}

static colo_status_t create_local(colo_bridge_t *b, const colo_bridge_config_t *config)
{
    colo_bridge_config_t own = {COLO_BRIDGE_CONFIG_INIT};
    const colo_bridge_config_t *c = &own;
    COLO_TRY(COLO_SIZED_READ(&own, config, axes, "bridge: config", "COLO_BRIDGE_CONFIG_INIT"));
    COLO_TRY(check_config(c));
    b->algorithm = colo_algorithm_of(c->algo);
    COLO_TRY(parse_axes(b, !c->axes && colo_ragged_wanted(c) ? "th" : c->axes));
    COLO_TRY(colo_ragged_create(b, c));
    COLO_TRY(colo_ops_for(c->mem, &b->ops));
    b->mem = c->mem;
    b->allocator = c->allocator;
    if (c->mem == COLO_CUDA)
        COLO_TRY(colo_transport_wanted(&b->transport));
    if (c->mem == COLO_CUDA && b->transport == COLO_TRANSPORT_AUTO)
        b->transport = c->transport;
    COLO_TRY(choose_blocks(b, c));
    b->lazy = colo_run_likely(b);
    b->sides.src = *c->src;
    b->sides.dst = *c->dst;
    colo_plan_config_t plan = {COLO_PLAN_CONFIG_INIT,
                               .src = &b->sides.src,
                               .dst = &b->sides.dst,
                               .shape = c->shape,
                               .dtype = c->dtype,
                               .output = c->packed ? COLO_SHARDED : c->output, /* batches differ */
                               .grad = c->grad,
                               .no_grad = c->no_grad,
                               .ranks_per_node = c->ranks_per_node};
    if (c->ranks_per_node == 0)
        COLO_TRY(find_nodes(b));
    plan.nodes = b->sides.nodes;
    /* GPUs of one node may all reach each other's memory: then one level is faster */
    plan.one_level = c->one_level || b->algorithm->one_level ||
                     (c->mem == COLO_CUDA && colo_comm_nodes(b->comm) < 2);
    COLO_TRY(load_plan(b, &plan, &b->now));
    COLO_TRY(colo_ragged_reserve(b));
    if (b->mem == COLO_CUDA && !b->streams.order &&
        (c->packed || b->now.program.plan->addends > 1 || b->allocator.allocate))
        COLO_TRY(b->ops->stream_create(1, &b->streams.order));
    return COLO_OK;
}

static void log_create(const colo_bridge_t *b)
{
    char src[COLO_KEY_MAX], dst[COLO_KEY_MAX];
    if (colo_comm_rank(b->comm) != 0 || !colo_log_on(COLO_LOG_INFO))
        return;
    colo_grid_print(&b->sides.src.grid, src, sizeof src);
    colo_grid_print(&b->sides.dst.grid, dst, sizeof dst);
    colo_log(COLO_LOG_INFO, "bridge %s -> %s: %s, scale %lld, %s, %d ranks", src, dst,
             colo_direction_name(colo_plan_direction(b->now.program.plan)),
             (long long)colo_plan_scale(b->now.program.plan), b->algorithm->name,
             (int)colo_comm_size(b->comm));
}

colo_status_t colo_bridge_create(colo_bridge_t **bridge, const colo_bridge_config_t *config,
                                 colo_comm_t *comm)
{
    COLO_RANGE();
    if (!comm)
        return colo_fail(COLO_ERR_ARG, "bridge: comm is NULL");
    COLO_TRY(colo_comm_i_alive(comm, "bridge create"));
    colo_status_t st = COLO_OK;
    colo_bridge_t *b = calloc(1, sizeof *b);
    if (b) {
        b->comm = comm;
        b->id.number = comm->bridges + 1;
    }
    st = !bridge ? colo_fail(COLO_ERR_ARG, "bridge: bridge is NULL")
         : !b    ? colo_fail(COLO_ERR_NOMEM, "bridge: %zu bytes", sizeof *b)
                 : create_local(b, config);
    if (colo_comm_check_level(comm) >= 1) {
        colo_fields_t fields = {COLO_FIELDS_INIT};
        if (st == COLO_OK)
            colo_bridge_fields(b, &fields);
        st = colo_comm_i_agree_fields(comm, "bridge create", &fields, st);
    } else if (st < 0) {
        st = colo_comm_i_fail(comm, st);
    }
    COLO_TRY_GOTO(st, st, fail);
    b->id.tag = ++comm->split_tag;
    comm->bridges++;
    b->compared[0] = b->compared[1] = colo_bridge_exchanges_compare(b);
    COLO_TRY_GOTO(st, colo_run_create(b), fail);
    st = colo_ragged_reserve(b);
    if (st < 0) { /* a peer may be past it */
        colo_comm_i_fail(comm, st);
        goto fail;
    }
    log_create(b);
    *bridge = b;
    return COLO_OK;
fail:
    colo_bridge_destroy(&b);
    return st;
}

/* A caller's allocator gets memory back that no call uses; cudaFree() waits by itself. */
static void end_calls(colo_bridge_t *b)
{
    if (b->streams.side)
        b->ops->stream_destroy(b->streams.side); /* waits */
    if (!b->streams.order)
        return;
    if (b->streams.ran && b->allocator.release)
        (void)b->ops->event_wait(b->streams.order, 0, b->ops->stream_of(b->streams.order));
    b->ops->stream_destroy(b->streams.order); /* waits */
}

void colo_bridge_destroy(colo_bridge_t **bridge)
{
    if (!bridge || !*bridge)
        return;
    colo_bridge_t *b = *bridge;
    colo_tickets_destroy(b);
    colo_ragged_destroy(b);
    colo_run_unload(b, &b->now);
    end_calls(b);
    colo_run_destroy(b);
    colo_memory_deinit(b);
    colo_nodes_destroy(&b->sides.nodes);
    free(b);
    *bridge = NULL;
}

/* ---- another shape ---- */

colo_status_t colo_bridge_reshape(colo_bridge_t *bridge, const colo_shape_t *shape)
{
    COLO_RANGE();
    if (!bridge || !shape)
        return colo_fail(COLO_ERR_ARG, "bridge: %s is NULL", bridge ? "shape" : "bridge");
    COLO_TRY(colo_ragged_refuse_shape(bridge));
    colo_plan_config_t cfg = bridge->now.program.plan->config;
    colo_loaded_t next;
    bridge->id.reshapes++; /* also where it fails: ranks stay alike */
    memset(bridge->peers.agreed, 0, sizeof bridge->peers.agreed);
    memset(bridge->compared, 0, sizeof bridge->compared); /* also with ranks it shares no message */
    cfg.src = &bridge->sides.src;
    cfg.dst = &bridge->sides.dst;
    cfg.shape = *shape;
    COLO_TRY(load_plan(bridge, &cfg, &next));
    const colo_status_t st = colo_run_reshape(bridge, &next);
    if (st < 0)
        colo_run_unload(bridge, &next);
    return st;
}

const colo_plan_t *colo_bridge_plan(const colo_bridge_t *bridge)
{
    return bridge ? bridge->now.program.plan : NULL;
}

size_t colo_bridge_workspace_size(const colo_bridge_t *bridge)
{
    if (!bridge)
        return 0;
    const colo_collective_t *c = &bridge->coll;
    return bridge->memory.partials.total + bridge->memory.stage.total + c->stage[0].total +
           c->stage[1].total + c->sum.total;
}
