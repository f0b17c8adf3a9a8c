/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge.c - the handle: plan, agree, allocate; another shape; destroy. Its calls are call.c.
 */
#include "bridge/ragged/ragged.h"
#include "bridge/run/run.h"

#include "comm/comm.h"
#include "core/env.h"
#include "core/device.h"
#include "core/error.h"
#include "core/range.h"
#include "core/sized.h"
#include "grid/dims.h"

#include <stdlib.h>
#include <string.h>

/* ---- axes ---- */

static colo_status_t parse_axes(colo_bridge_t *bridge, const char *axes)
{
    axes = axes ? axes : "bsh";
    if (strcmp(axes, "th") == 0 || strcmp(axes, "bh") == 0) {
        bridge->axes.of[0] = 0;
        bridge->axes.of[1] = -1;
        bridge->axes.of[2] = 1;
    } else {
        int seen = 0;
        for (int i = 0; strlen(axes) == 3 && i < 3; i++) {
            const char *pos = strchr("bsh", axes[i]);
            if (pos) {
                bridge->axes.of[pos - "bsh"] = i;
                seen |= 1 << (pos - "bsh");
            }
        }
        COLO_FAIL_IF(seen != 7, COLO_ERR_ARG,
                     "bridge: axes '%.16s', expected a permutation of 'bsh', 'th' or 'bh'", axes);
    }
    memcpy(bridge->axes.name, axes, strlen(axes) + 1);
    return COLO_OK;
}

/* ---- what depends on the shape ---- */

static colo_status_t load_plan(colo_bridge_t *bridge, const colo_plan_config_t *cfg,
                               colo_ready_plan_t *out)
{
    colo_ready_plan_t ready = {.any_ranks = bridge->now.any_ranks};
    colo_status_t st = COLO_OK;
    int64_t rank = colo_comm_world_rank(bridge->comm, colo_comm_rank(bridge->comm));
    COLO_FAIL_IF(strcmp(bridge->axes.name, "bh") == 0 && cfg->shape.rows != 1, COLO_ERR_ARG,
                 "bridge: %lld rows with axes 'bh', expected 1; tensors of several rows "
                 "have axes 'th', or 'bsh' in any order",
                 (long long)cfg->shape.rows);
    COLO_TRY_GOTO(st, colo_plan_create(&ready.program.plan, cfg, rank), fail);
    COLO_TRY_GOTO(st,
                  colo_bridge_is_collective(bridge) ? colo_collective_load(bridge, &ready)
                                                    : colo_run_load(bridge, &ready),
                  fail);
    *out = ready;
    return COLO_OK;
fail:
    colo_run_unload(bridge, &ready);
    return st;
}

/* ---- create ---- */

static colo_status_t check_config(const colo_bridge_config_t *config)
{
    COLO_FAIL_IF(!colo_algo_name(config->algo), COLO_ERR_ARG,
                 "bridge: algo %d, expected 0 (EXACT) or 1 (COLLECTIVE)", (int)config->algo);
    COLO_FAIL_IF((unsigned)config->transport > COLO_TRANSPORT_PEER, COLO_ERR_ARG,
                 "bridge: transport %d, expected 0 (AUTO), 1 (NCCL) or 2 (PEER)",
                 (int)config->transport);
    COLO_FAIL_IF(config->peer_blocks < 0 || config->peer_blocks > COLO_PEER_BLOCKS_MAX,
                 COLO_ERR_ARG, "bridge: peer_blocks %d, expected 0 to %d", (int)config->peer_blocks,
                 COLO_PEER_BLOCKS_MAX);
    COLO_FAIL_IF(!config->allocator.allocate != !config->allocator.release, COLO_ERR_ARG,
                 "bridge: config.allocator: %s is NULL, expected both functions or none",
                 config->allocator.allocate ? "release" : "allocate");
    COLO_FAIL_IF((unsigned)config->mem > COLO_MEM_CUDA, COLO_ERR_ARG,
                 "bridge: mem %d, expected 0 (host) or 1 (cuda)", (int)config->mem);
    return COLO_OK;
}

/* The nodes of the comm, by world rank; none if they are one. */
static colo_status_t find_nodes(colo_bridge_t *bridge)
{
    const colo_comm_t *comm = bridge->comm;
    const colo_grid_t *grids[2] = {&bridge->sides.src.grid, &bridge->sides.dst.grid};
    int64_t ranks = 0;
    if (colo_comm_nodes(comm) < 2)
        return COLO_OK;
    COLO_TRY(colo_layout_check_fields(&bridge->sides.src));
    COLO_TRY(colo_layout_check_fields(&bridge->sides.dst));
    for (int i = 0; i < 2; i++)
        ranks =
            grids[i]->offset + grids[i]->size > ranks ? grids[i]->offset + grids[i]->size : ranks;
    for (int32_t rank = 0; rank < comm->size; rank++)
        ranks = comm->world_rank[rank] >= ranks ? comm->world_rank[rank] + 1 : ranks;
    COLO_AUTOFREE int32_t *node =
        ranks <= INT64_MAX / 64 ? malloc((size_t)ranks * sizeof *node) : NULL;
    COLO_FAIL_IF(!node, COLO_ERR_NOMEM, "bridge: nodes of %lld ranks", (long long)ranks);
    for (int64_t rank = 0; rank < ranks; rank++)
        node[rank] = -1; /* a rank outside the comm, which no plan of this bridge may name */
    for (int32_t rank = 0; rank < comm->size; rank++)
        node[comm->world_rank[rank]] = colo_comm_node(comm, rank);
    return colo_nodes_create(&bridge->sides.nodes, node, ranks);
}

/* The environment's, else the caller's. */
static colo_status_t choose_blocks(colo_bridge_t *bridge, const colo_bridge_config_t *config)
{
    static const char name[] = "COLO_PEER_BLOCKS";
    int64_t blocks;
    bool from_env;
    COLO_TRY(colo_env_i64(name, &blocks));
    (void)colo_env_value(name, &from_env);
    bridge->direct.blocks = from_env ? (int32_t)blocks : config->peer_blocks;
    return COLO_OK;
}

/* The ranks of the comm that are in the grids, or this one alone if it is in neither, are the
 * bridge's comm: of @config, which is as far right. What names no ranks is refused on all of it. If
 * peers may reach memory that is registered over it, all of its ranks call. */
static colo_status_t find_comm(colo_bridge_t *bridge, const colo_bridge_config_t *config)
{
    colo_comm_t *comm = bridge->comm;
    const colo_layout_t *side[2] = {config->src, config->dst};
    COLO_FAIL_IF(!side[0] || !side[1], COLO_ERR_ARG, "bridge: config.%s is NULL",
                 side[0] ? "dst" : "src");
    for (int i = 0; i < 2; i++)
        if (side[i]->grid.ndims == 0 || colo_grid_check(&side[i]->grid) < 0)
            return colo_layout_check_fields(side[i]);
    bridge->algo = config->algo;
    bridge->mem = config->mem;
    if (config->mem == COLO_MEM_CUDA)
        COLO_TRY(colo_transport_wanted(comm, config->transport, &bridge->transport));
    bridge->lazy = !colo_bridge_is_collective(bridge) && colo_direct_likely(bridge);
    if (bridge->lazy)
        return COLO_OK;
    COLO_AUTOFREE int64_t *rank = malloc(sizeof *rank * (size_t)comm->size);
    COLO_FAIL_IF(!rank, COLO_ERR_NOMEM, "bridge: %d ranks", (int)comm->size);
    int32_t n = 0;
    bool inside = false;
    for (int32_t i = 0; i < comm->size; i++) {
        rank[n] = comm->world_rank[i];
        if (colo_grid_has_rank(&side[0]->grid, rank[n]) ||
            colo_grid_has_rank(&side[1]->grid, rank[n])) {
            inside = inside || i == comm->rank;
            n++;
        }
    }
    return inside ? colo_comm_part(comm, rank, n, &bridge->comm)
                  : colo_comm_part(comm, &comm->world_rank[comm->rank], 1, &bridge->comm);
}

static colo_status_t create_local(colo_bridge_t *bridge, const colo_bridge_config_t *given)
{
    COLO_TRY(check_config(given));
    COLO_TRY(parse_axes(bridge, !given->axes && colo_ragged_wanted(given) ? "th" : given->axes));
    COLO_TRY(colo_ragged_create(bridge, given));
    COLO_TRY(colo_device_for(given->mem, &bridge->device));
    bridge->allocator = given->allocator;
    COLO_TRY(choose_blocks(bridge, given));
    bridge->sides.src = *given->src;
    bridge->sides.dst = *given->dst;
    colo_plan_config_t plan = {COLO_PLAN_CONFIG_INIT,
                               .src = &bridge->sides.src,
                               .dst = &bridge->sides.dst,
                               .shape = given->shape,
                               .dtype = given->dtype,
                               .output = given->packed ? COLO_OUTPUT_SHARDED
                                                       : given->output, /* batches differ */
                               .grad = given->grad,
                               .no_grad = given->no_grad,
                               .ranks_per_node = given->ranks_per_node};
    if (given->ranks_per_node == 0)
        COLO_TRY(find_nodes(bridge));
    plan.nodes = bridge->sides.nodes;
    /* GPUs of one node may all reach each other's memory: then one level is faster */
    plan.one_level = given->one_level || colo_bridge_is_collective(bridge) ||
                     (given->mem == COLO_MEM_CUDA && colo_comm_nodes(bridge->comm) < 2);
    COLO_TRY(load_plan(bridge, &plan, &bridge->now));
    COLO_TRY(colo_ragged_reserve(bridge));
    if (bridge->mem == COLO_MEM_CUDA && !bridge->streams.order &&
        (given->packed || bridge->now.program.plan->addends > 1 || bridge->allocator.allocate))
        COLO_TRY(bridge->device->stream_create(1, &bridge->streams.order));
    return COLO_OK;
}

static void log_create(const colo_bridge_t *bridge)
{
    char src[COLO_KEY_MAX], dst[COLO_KEY_MAX];
    if (colo_comm_rank(bridge->comm) != 0 || !colo_log_on(COLO_LOG_INFO))
        return;
    colo_grid_print(&bridge->sides.src.grid, src, sizeof src);
    colo_grid_print(&bridge->sides.dst.grid, dst, sizeof dst);
    colo_log(COLO_LOG_INFO, "bridge %s -> %s: %s, scale %lld, %s, %d ranks", src, dst,
             colo_direction_name(colo_plan_direction(bridge->now.program.plan)),
             (long long)colo_plan_scale(bridge->now.program.plan), colo_algo_name(bridge->algo),
             (int)colo_comm_size(bridge->comm));
}

colo_status_t colo_bridge_create(colo_bridge_t **bridge, const colo_bridge_config_t *config,
                                 colo_comm_t *comm)
{
    COLO_RANGE();
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "bridge: comm is NULL");
    COLO_TRY(colo_comm_alive(comm, "bridge create"));
    colo_bridge_config_t own = {COLO_BRIDGE_CONFIG_INIT};
    colo_status_t st =
        COLO_SIZED_READ(&own, config, axes, "bridge: config", "COLO_BRIDGE_CONFIG_INIT");
    colo_bridge_t none = {.comm = comm};
    COLO_ENDS(colo_bridge_destroy) colo_bridge_t *made = calloc(1, sizeof *made);
    if (made)
        made->comm = comm;
    COLO_THEN(st, find_comm(made ? made : &none, &own));
    comm = made ? made->comm : none.comm;
    COLO_TRY(colo_comm_alive(comm, "bridge create"));
    if (!bridge)
        st = colo_fail(COLO_ERR_ARG, "bridge: bridge is NULL");
    else if (!made)
        st = colo_fail(COLO_ERR_NOMEM, "bridge: %zu bytes", sizeof *made);
    else
        made->id.number = comm->bridges + 1;
    COLO_THEN(st, create_local(made, &own));
    if (colo_comm_check_level(comm) >= 1) {
        colo_fields_t fields = {COLO_FIELDS_INIT};
        if (st == COLO_OK)
            colo_bridge_fields(made, &fields);
        st = colo_comm_agree_fields(comm, "bridge create", &fields, st);
    } else if (st < 0) {
        st = colo_comm_fail(comm, st);
    }
    COLO_TRY(st);
    made->id.tag = ++comm->split_tag;
    comm->bridges++;
    made->compared[0] = made->compared[1] = colo_bridge_exchanges_compare(made);
    COLO_TRY(colo_bridge_is_collective(made) ? colo_collective_create(made)
                                             : colo_run_create(made));
    st = colo_ragged_reserve(made);
    if (st < 0) /* a peer may be past it */
        return colo_comm_fail(comm, st);
    log_create(made);
    *bridge = made;
    made = NULL;
    return COLO_OK;
}

/* A caller's allocator gets memory back that no call uses; cudaFree() waits by itself. */
static void end_calls(colo_bridge_t *bridge)
{
    if (bridge->streams.side)
        bridge->device->stream_destroy(bridge->streams.side); /* waits */
    if (!bridge->streams.order)
        return;
    if (bridge->streams.ran && bridge->allocator.release)
        (void)bridge->device->event_wait(bridge->streams.order, 0,
                                         bridge->device->stream_of(bridge->streams.order));
    bridge->device->stream_destroy(bridge->streams.order); /* waits */
}

void colo_bridge_destroy(colo_bridge_t **bridge)
{
    if (!bridge || !*bridge)
        return;
    colo_bridge_t *made = *bridge;
    colo_tickets_destroy(made);
    colo_ragged_destroy(made);
    colo_run_unload(made, &made->now);
    end_calls(made);
    colo_direct_destroy(made);
    colo_collective_destroy(made);
    colo_memory_deinit(made);
    colo_nodes_destroy(&made->sides.nodes);
    free(made);
    *bridge = NULL;
}

/* ---- another shape ---- */

colo_status_t colo_bridge_reshape(colo_bridge_t *bridge, const colo_shape_t *shape)
{
    COLO_RANGE();
    COLO_FAIL_IF(!bridge || !shape, COLO_ERR_ARG, "bridge: %s is NULL",
                 bridge ? "shape" : "bridge");
    COLO_TRY(colo_ragged_refuse_shape(bridge));
    colo_plan_config_t cfg = bridge->now.program.plan->config;
    colo_ready_plan_t next;
    bridge->id.reshapes++; /* also where it fails: ranks stay alike */
    memset(bridge->direct.agreed, 0, sizeof bridge->direct.agreed);
    memset(bridge->compared, 0, sizeof bridge->compared); /* also with ranks it shares no message */
    cfg.src = &bridge->sides.src;
    cfg.dst = &bridge->sides.dst;
    cfg.shape = *shape;
    COLO_TRY(load_plan(bridge, &cfg, &next));
    colo_run_reshape(bridge, &next);
    return COLO_OK;
}

void colo_bridge_expect_backward(colo_bridge_t *bridge, bool follows)
{
    if (bridge)
        bridge->alone = !follows;
}

const colo_plan_t *colo_bridge_plan(const colo_bridge_t *bridge)
{
    return bridge ? bridge->now.program.plan : NULL;
}

size_t colo_bridge_workspace_size(const colo_bridge_t *bridge)
{
    if (!bridge)
        return 0;
    return bridge->memory.partials.total + bridge->memory.stage.total +
           bridge->coll.stage[0].total + bridge->coll.stage[1].total;
}
