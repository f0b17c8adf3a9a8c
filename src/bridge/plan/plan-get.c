/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan-get.c - what a plan says of itself. Functions without a status take NULL.
 */
#include "bridge/plan/nodes.h"
#include "bridge/plan/plan.h"

#include "core/error.h"
#include "core/sized.h"

static bool known(const colo_plan_t *plan, colo_pass_t pass)
{
    return plan && (pass == COLO_PASS_FORWARD || pass == COLO_PASS_BACKWARD);
}

int64_t colo_plan_rank(const colo_plan_t *plan)
{
    return plan ? plan->rank : -1;
}

static int64_t rows_of(const colo_owned_t *own)
{
    return own->h1 > own->h0 ? (own->b1 - own->b0) * own->rows : 0;
}

void colo_plan_rows(const colo_plan_t *plan, int64_t *src_rows, int64_t *dst_rows)
{
    if (src_rows)
        *src_rows = plan ? rows_of(&plan->own_src) : 0;
    if (dst_rows)
        *dst_rows = plan ? rows_of(&plan->own_dst) : 0;
}

/* The messages of exchange @i. */
static const colo_plan_message_t *messages(const colo_plan_t *plan, colo_pass_t pass, int i,
                                           bool sends, int32_t *count)
{
    const colo_routes_t *routes = known(plan, pass) ? colo_plan_routes(plan, pass, i, sends) : NULL;
    if (count)
        *count = routes ? routes->nmessages : 0;
    return routes ? routes->message : NULL;
}

const colo_plan_message_t *colo_plan_sends(const colo_plan_t *plan, colo_pass_t pass,
                                           int32_t *count)
{
    return messages(plan, pass, COLO_EXCHANGE_MAIN, true, count);
}

const colo_plan_message_t *colo_plan_recvs(const colo_plan_t *plan, colo_pass_t pass,
                                           int32_t *count)
{
    return messages(plan, pass, COLO_EXCHANGE_MAIN, false, count);
}

const colo_plan_message_t *colo_plan_relays(const colo_plan_t *plan, colo_pass_t pass, bool sends,
                                            int32_t *count)
{
    return messages(plan, pass, COLO_EXCHANGE_RELAYS, sends, count);
}

const colo_plan_message_t *colo_plan_sums(const colo_plan_t *plan, colo_pass_t pass, bool sends,
                                          int32_t *count)
{
    return messages(plan, pass, COLO_EXCHANGE_NODE_SUMS, sends, count);
}

static colo_status_t check(const colo_plan_t *plan, colo_pass_t pass, const char *call)
{
    COLO_FAIL_IF(!plan, COLO_ERR_ARG, "%s: the plan is NULL", call);
    COLO_FAIL_IF(!known(plan, pass), COLO_ERR_ARG,
                 "%s: pass %d is neither COLO_PASS_FORWARD nor COLO_PASS_BACKWARD", call,
                 (int)pass);
    return COLO_OK;
}

colo_status_t colo_plan_node_bytes(const colo_plan_t *plan, colo_pass_t pass,
                                   colo_plan_node_bytes_t *bytes)
{
    COLO_TRY(check(plan, pass, "plan_node_bytes"));
    colo_plan_node_bytes_t own = {.minimum = plan->entering[pass]};
    const colo_plan_config_t *config = &plan->config;
    const int64_t node = colo_nodes_known(config) ? colo_location_of(config, plan->rank).node : 0;
    for (int i = COLO_EXCHANGE_MAIN; i <= COLO_EXCHANGE_NODE_SUMS; i++) {
        const colo_routes_t *routes = colo_plan_routes(plan, pass, i, false);
        for (int32_t k = 0; k < routes->nmessages; k++)
            own.in += colo_location_of(config, routes->message[k].peer).node != node
                          ? routes->message[k].bytes
                          : 0;
    }
    return COLO_SIZED_WRITE(bytes, &own, "plan_node_bytes: bytes", "COLO_PLAN_NODE_BYTES_INIT");
}

const colo_region_t *colo_plan_locals(const colo_plan_t *plan, colo_pass_t pass, int64_t *count)
{
    const colo_routes_t *routes = known(plan, pass) ? &plan->local[pass] : NULL;
    if (count)
        *count = routes ? routes->nregions : 0;
    return routes ? routes->region : NULL;
}

colo_status_t colo_plan_bytes(const colo_plan_t *plan, colo_pass_t pass, colo_plan_bytes_t *bytes)
{
    COLO_TRY(check(plan, pass, "plan_bytes"));
    return COLO_SIZED_WRITE(bytes, &plan->bytes[pass], "plan_bytes: bytes", "COLO_PLAN_BYTES_INIT");
}

int64_t colo_plan_addends(const colo_plan_t *plan)
{
    return plan ? plan->addends : 0;
}

colo_direction_t colo_plan_direction(const colo_plan_t *plan)
{
    if (!plan)
        return COLO_DIRECTION_EQUAL;
    int64_t src_dp = colo_layout_parts(&plan->src, COLO_AXIS_SAMPLES);
    int64_t dst_dp = colo_layout_parts(&plan->dst, COLO_AXIS_SAMPLES);
    return src_dp > dst_dp   ? COLO_DIRECTION_FAN_IN
           : src_dp < dst_dp ? COLO_DIRECTION_FAN_OUT
                             : COLO_DIRECTION_EQUAL;
}

int64_t colo_plan_scale(const colo_plan_t *plan)
{
    if (!plan)
        return 0;
    int64_t src_dp = colo_layout_parts(&plan->src, COLO_AXIS_SAMPLES);
    int64_t dst_dp = colo_layout_parts(&plan->dst, COLO_AXIS_SAMPLES);
    int64_t hi = src_dp > dst_dp ? src_dp : dst_dp, lo = src_dp > dst_dp ? dst_dp : src_dp;
    return hi % lo ? 0 : hi / lo;
}

uint64_t colo_plan_hash(const colo_plan_t *plan)
{
    return plan ? plan->hash : 0;
}

const colo_plan_config_t *colo_plan_config(const colo_plan_t *plan)
{
    return plan ? &plan->config : NULL;
}

const char *colo_direction_name(colo_direction_t direction)
{
    switch (direction) {
    case COLO_DIRECTION_EQUAL:
        return "equal";
    case COLO_DIRECTION_FAN_IN:
        return "fan_in";
    case COLO_DIRECTION_FAN_OUT:
        return "fan_out";
    }
    return "?";
}
