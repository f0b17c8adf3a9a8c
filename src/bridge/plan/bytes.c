/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bytes.c - how many bytes a plan's lists move, the fewest that would do, and what COLLECTIVE
 * moves.
 */
#include "bridge/plan/plan.h"

#include "core/error.h"

/* false: more than 63 bits. */
static bool add_bytes(int64_t *n, const colo_routes_t *routes)
{
    for (int32_t i = 0; i < routes->nmessages; i++)
        if (!colo_add_ok(*n, routes->message[i].bytes, n))
            return false;
    return true;
}

/* Ring all-gather over k siblings, ring all-reduce over C: what COLLECTIVE receives. */
static int64_t collective_recv(const colo_plan_t *plan, colo_pass_t pass, size_t elem)
{
    const colo_shape_t *shape = &plan->config.shape;
    int64_t ds = colo_layout_parts(&plan->src, COLO_AXIS_SAMPLES);
    int64_t dd = colo_layout_parts(&plan->dst, COLO_AXIS_SAMPLES);
    int64_t cp = colo_grid_extent(&plan->dst.grid, "cp");
    int64_t bytes = shape->samples * shape->rows * shape->features * (int64_t)elem / dd,
            k = colo_plan_scale(plan);
    if (pass == COLO_PASS_FORWARD)
        return ds > dd ? bytes / k * (k - 1) : 0;
    int64_t reduce = (int64_t)((colo_i128_t)bytes * 2 * (cp - 1) / cp);
    return reduce + (dd > ds ? bytes * (k - 1) : 0);
}

static bool can_be_collective(const colo_plan_t *plan)
{
    const colo_error_t earlier = colo_error_save(); /* a no is an answer here, not a failure */
    const bool has = colo_plan_collective_check(&plan->config) == COLO_OK;
    (void)colo_error_restore(COLO_OK, &earlier);
    return has;
}

colo_status_t colo_plan_count_bytes(colo_plan_t *plan, bool by_table)
{
    const size_t elem = plan->elem;
    const bool collective = !by_table && can_be_collective(plan);
    bool in_grid = colo_grid_has_rank(&plan->src.grid, plan->rank);
    for (int pass = 0; pass < 2; pass++) {
        colo_plan_bytes_t *bytes = &plan->bytes[pass];
        *bytes = (colo_plan_bytes_t){0};
        bool fits = true;
        for (int i = 0; i < COLO_EXCHANGES; i++)
            fits = fits && add_bytes(&bytes->recv, &plan->exchange[pass][i].recv) &&
                   add_bytes(&bytes->send, &plan->exchange[pass][i].send);
        COLO_FAIL_IF(!fits, COLO_ERR_ARG,
                     "plan: rank %lld sends or receives more than 63 bits of bytes in %s; "
                     "give a smaller shape",
                     (long long)plan->rank, pass == COLO_PASS_FORWARD ? "forward" : "backward");
        (void)add_bytes(&bytes->local, &plan->local[pass]);
        int64_t relayed = 0; /* however many addends each is the sum of, it comes once */
        (void)add_bytes(&relayed, &plan->exchange[pass][COLO_EXCHANGE_RELAYS].recv);
        bytes->minimum = plan->needed[pass] - bytes->local - plan->left_out[pass] + relayed;
        bytes->collective_recv = !collective ? -1
                                 : in_grid && !(pass == COLO_PASS_BACKWARD && plan->config.no_grad)
                                     ? collective_recv(plan, pass, elem)
                                     : 0;
    }
    return COLO_OK;
}
