/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged-memory.c - memory for the largest batch: with max_rows, no tables can make a tensor of the
 * bridge's features and dtype need more than there is from create on.
 */
#include "bridge/plan/nodes.h"
#include "bridge/ragged/ragged.h"

#include "core/error.h"

/* The product of the three, or -1: more than 63 bits. */
static int64_t product(int64_t first, int64_t second, int64_t third)
{
    int64_t n = first;
    return first >= 0 && colo_mul_ok(n, second, &n) && colo_mul_ok(n, third, &n) ? n : -1;
}

static int64_t plus(int64_t first, int64_t second)
{
    int64_t n;
    return first >= 0 && second >= 0 && colo_add_ok(first, second, &n) ? n : -1;
}

/* How many times as large as an element a sum of a node is. */
static int64_t sum_elem(const colo_bridge_t *bridge)
{
    const colo_dtype_t dtype = bridge->now.program.plan->config.dtype;
    return (int64_t)(colo_dtype_size(colo_sum_wide(dtype)) / colo_dtype_size(dtype));
}

static colo_status_t too_many(const colo_bridge_t *bridge, const char *what)
{
    return colo_fail(COLO_ERR_ARG, "bridge: %s of max_rows=%lld rows exceed 63 bits", what,
                     (long long)bridge->ragged->max_rows);
}

static int64_t ranks_of(const colo_bridge_t *bridge, const colo_layout_t *layout)
{
    int64_t n = 0;
    for (int32_t rank = 0; rank < colo_comm_size(bridge->comm); rank++)
        n += colo_layout_holds(layout, colo_comm_world_rank(bridge->comm, rank));
    return n;
}

/* Messages of at least 1 MiB take staging for one half at a time, others for all of it. */
static int64_t staging(int64_t send, int64_t recv, int64_t peers)
{
    enum { SMALL = 1 << 20 };
    int64_t n, more = product(peers, 2, SMALL);
    if (send < 0 || recv < 0 || more < 0 || !colo_add_ok(send, recv, &n))
        return -1;
    n = n / 2 < more ? n : n / 2 + more;
    return colo_add_ok(n, product(peers, 2, 512), &n) ? n : -1;
}

/* In the second exchange this rank passes on all of @rows to the others of its node among
 * @replicas ranks that need the same, or gets them so. */
static int64_t relayed(const colo_bridge_t *bridge, colo_pass_t pass, const colo_layout_t *layout,
                       int64_t replicas, int64_t rows, int64_t row)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const int64_t peers = colo_comm_size(bridge->comm) - 1;
    int64_t same_node = 0;
    if (!plan->exchange[pass][COLO_EXCHANGE_RELAYS].all_come ||
        !colo_layout_holds(layout, plan->rank))
        return 0;
    for (int32_t i = 0; i < colo_comm_size(bridge->comm); i++) {
        const int64_t rank = colo_comm_world_rank(bridge->comm, i);
        same_node +=
            colo_layout_holds(layout, rank) && colo_location_of(&plan->config, rank).node ==
                                                   colo_location_of(&plan->config, plan->rank).node;
    }
    same_node = same_node < replicas ? same_node : replicas;
    return staging(product(rows, same_node - 1, row), product(rows, 1, row), peers);
}

/* The most that a call can stage: every row of a rank goes to each rank of one destination replica,
 * or comes from it; all rows of all source ranks may go to one rank. */
static int64_t most_staged(const colo_bridge_t *bridge, int64_t src_row, int64_t dst_row)
{
    const colo_ragged_bridge_t *ragged = bridge->ragged;
    const colo_plan_t *plan = bridge->now.program.plan;
    const int64_t shards =
        ragged->axes.src.axes.replicas * ragged->axes.src.axes.cp * ragged->axes.src.axes.sp;
    const int64_t sources = ranks_of(bridge, &bridge->sides.src),
                  destinations = ranks_of(bridge, &bridge->sides.dst);
    const int64_t all = product(ragged->max_rows, shards, 1),
                  peers = colo_comm_size(bridge->comm) - 1;
    const bool src = colo_layout_holds(&bridge->sides.src, plan->rank),
               dst = colo_layout_holds(&bridge->sides.dst, plan->rank);
    const int64_t out = destinations / ragged->axes.dst.axes.replicas, back = sources / shards;
    /* if nodes add up: what this rank collects for others, or others from it, and the sums */
    const int64_t times = colo_plan_sums_nodes(plan), wide = sum_elem(bridge);
    const int64_t forward = staging(src ? product(ragged->max_rows, out, src_row) : 0,
                                    dst ? product(all, 1, dst_row) : 0, peers);
    const int64_t backward =
        plan->config.no_grad
            ? 0
            : staging(dst ? product(all, back * (1 + times), dst_row) : 0,
                      plus(src ? product(ragged->max_rows, plan->addends, src_row) : 0,
                           dst ? product(all, back * times * plan->addends, dst_row) : 0),
                      peers);
    const int64_t sums =
        colo_plan_sums_nodes(plan)
            ? staging(dst ? product(all, back * wide, dst_row) : 0,
                      src ? product(ragged->max_rows, plan->addends * wide, src_row) : 0, peers)
            : 0;
    const int64_t need[] = {
        forward, backward, sums,
        relayed(bridge, COLO_PASS_FORWARD, &bridge->sides.dst, out, all, dst_row),
        relayed(bridge, COLO_PASS_BACKWARD, &bridge->sides.src, back, ragged->max_rows, src_row)};
    int64_t most = 0;
    for (int i = 0; i < 5 && most >= 0; i++)
        most = need[i] < 0 ? -1 : need[i] > most ? need[i] : most;
    return most;
}

colo_status_t colo_ragged_reserve(colo_bridge_t *bridge)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const colo_plan_config_t *config = &plan->config;
    const int64_t rows = bridge->ragged ? bridge->ragged->max_rows : 0;
    if (rows == 0 || (bridge->lazy && !bridge->now.direct.needs_comm))
        return COLO_OK; /* it is for staged calls, if there will be any */
    const int64_t elem = (int64_t)colo_dtype_size(config->dtype);
    const int64_t features[2] = {
        config->shape.features / colo_layout_parts(&bridge->sides.src, COLO_AXIS_FEATURES),
        config->shape.features / colo_layout_parts(&bridge->sides.dst, COLO_AXIS_FEATURES)};
    const bool src = colo_layout_holds(&bridge->sides.src, plan->rank),
               dst = colo_layout_holds(&bridge->sides.dst, plan->rank);
    if (plan->addends > 1 && !config->no_grad && (src || (dst && colo_plan_sums_nodes(plan)))) {
        const colo_ragged_axes_t *axes = &bridge->ragged->axes.src.axes;
        int64_t n = plan->addends, bytes = product(rows, features[0], elem);
        if (colo_plan_sums_nodes(plan)) { /* what arrives, sums of nodes; what is collected */
            const int64_t most =
                dst ? product(rows, axes->replicas * axes->cp * axes->sp, 1) : rows;
            bytes = product(most, features[0] > features[1] ? features[0] : features[1],
                            elem * sum_elem(bridge));
            n = (src ? 2 * n : 0) + (dst ? n : 0);
        }
        bytes = bytes < 0 || !colo_add_ok(bytes, 255, &bytes) ? -1 : bytes / 256 * 256;
        bytes = product(bytes, n, 1);
        if (bytes < 0)
            return too_many(bridge, "addends");
        COLO_TRY(colo_partials_reserve(bridge, (size_t)bytes, false));
    }
    if (bridge->now.messages.nmembers == 0)
        return COLO_OK;
    const int64_t bytes = most_staged(bridge, features[0] * elem, features[1] * elem);
    return bytes < 0 ? too_many(bridge, "messages")
                     : colo_arena_grow(bridge, &bridge->memory.stage, (size_t)bytes, false,
                                       "staging of messages");
}
