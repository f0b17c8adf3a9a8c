/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged-memory.c - memory for the largest batch: with max_rows, no tables can make a tensor of the
 * bridge's features and dtype need more than there is from create on.
 */
#include "bridge/plan/nodes.h"
#include "bridge/ragged.h"

#include "core/error.h"

/* a * b * c, or -1: more than 63 bits. */
static int64_t product(int64_t a, int64_t b, int64_t c)
{
    int64_t n = a;
    return a >= 0 && colo_mul_ok(n, b, &n) && colo_mul_ok(n, c, &n) ? n : -1;
}

static int64_t plus(int64_t a, int64_t b)
{
    int64_t n;
    return a >= 0 && b >= 0 && colo_add_ok(a, b, &n) ? n : -1;
}

/* How many times as large as an element a sum of a node is. */
static int64_t sum_elem(const colo_bridge_t *b)
{
    const colo_dtype_t dtype = b->now.program.plan->config.dtype;
    return (int64_t)(colo_dtype_size(colo_sum_wide(dtype)) / colo_dtype_size(dtype));
}

static colo_status_t too_many(const colo_bridge_t *b, const char *what)
{
    return colo_fail(COLO_ERR_ARG, "bridge: %s of max_rows=%lld rows exceed 63 bits", what,
                     (long long)b->ragged->max_rows);
}

static int64_t ranks_of(const colo_bridge_t *b, const colo_layout_t *l)
{
    int64_t n = 0;
    for (int32_t r = 0; r < colo_comm_size(b->comm); r++)
        n += colo_layout_holds(l, colo_comm_world_rank(b->comm, r));
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

/* Of the second exchange: this rank passes on all of @rows to the others of its node among
 * @replicas ranks that need the same, or gets them so. */
static int64_t relayed(const colo_bridge_t *b, colo_pass_t pass, const colo_layout_t *l,
                       int64_t replicas, int64_t rows, int64_t row)
{
    const colo_plan_t *p = b->now.program.plan;
    const int64_t peers = colo_comm_size(b->comm) - 1;
    int64_t same_node = 0;
    if (!p->exchange[pass][COLO_RELAYS].all_come || !colo_layout_holds(l, p->rank))
        return 0;
    for (int32_t r = 0; r < colo_comm_size(b->comm); r++) {
        const int64_t rank = colo_comm_world_rank(b->comm, r);
        same_node += colo_layout_holds(l, rank) && colo_location_of(&p->config, rank).node ==
                                                       colo_location_of(&p->config, p->rank).node;
    }
    same_node = same_node < replicas ? same_node : replicas;
    return staging(product(rows, same_node - 1, row), product(rows, 1, row), peers);
}

/* The most that a call can stage: every row of a rank goes to each rank of one destination replica,
 * or comes from it; all rows of all source ranks may go to one rank. */
static int64_t most_staged(const colo_bridge_t *b, int64_t src_row, int64_t dst_row)
{
    const colo_ragged_bridge_t *r = b->ragged;
    const colo_plan_t *p = b->now.program.plan;
    const int64_t shards = r->axes.src.axes.replicas * r->axes.src.axes.cp * r->axes.src.axes.sp;
    const int64_t sources = ranks_of(b, &b->sides.src), destinations = ranks_of(b, &b->sides.dst);
    const int64_t all = product(r->max_rows, shards, 1), peers = colo_comm_size(b->comm) - 1;
    const bool src = colo_layout_holds(&b->sides.src, p->rank),
               dst = colo_layout_holds(&b->sides.dst, p->rank);
    const int64_t out = destinations / r->axes.dst.axes.replicas, back = sources / shards;
    /* if nodes add up: what this rank collects for others, or others from it, and the sums */
    const int64_t times = colo_plan_sums_nodes(p), wide = sum_elem(b);
    const int64_t forward = staging(src ? product(r->max_rows, out, src_row) : 0,
                                    dst ? product(all, 1, dst_row) : 0, peers);
    const int64_t backward =
        p->config.no_grad
            ? 0
            : staging(dst ? product(all, back * (1 + times), dst_row) : 0,
                      plus(src ? product(r->max_rows, p->addends, src_row) : 0,
                           dst ? product(all, back * times * p->addends, dst_row) : 0),
                      peers);
    const int64_t sums =
        colo_plan_sums_nodes(p)
            ? staging(dst ? product(all, back * wide, dst_row) : 0,
                      src ? product(r->max_rows, p->addends * wide, src_row) : 0, peers)
            : 0;
    const int64_t need[] = {forward, backward, sums,
                            relayed(b, COLO_FORWARD, &b->sides.dst, out, all, dst_row),
                            relayed(b, COLO_BACKWARD, &b->sides.src, back, r->max_rows, src_row)};
    int64_t most = 0;
    for (int i = 0; i < 5 && most >= 0; i++)
        most = need[i] < 0 ? -1 : need[i] > most ? need[i] : most;
    return most;
}

colo_status_t colo_ragged_reserve(colo_bridge_t *b)
{
    const colo_plan_t *p = b->now.program.plan;
    const colo_plan_config_t *c = &p->config;
    const int64_t rows = b->ragged ? b->ragged->max_rows : 0;
    if (rows == 0 || b->lazy) /* for staged calls, if there will be any */
        return COLO_OK;
    const int64_t elem = (int64_t)colo_dtype_size(c->dtype);
    const int64_t h[2] = {c->shape.features / colo_layout_parts(&b->sides.src, COLO_FEATURES),
                          c->shape.features / colo_layout_parts(&b->sides.dst, COLO_FEATURES)};
    const bool src = colo_layout_holds(&b->sides.src, p->rank),
               dst = colo_layout_holds(&b->sides.dst, p->rank);
    if (p->addends > 1 && !c->no_grad && (src || (dst && colo_plan_sums_nodes(p)))) {
        const colo_ragged_axes_t *a = &b->ragged->axes.src.axes;
        int64_t n = p->addends, bytes = product(rows, h[0], elem);
        if (colo_plan_sums_nodes(p)) { /* what arrives, sums of nodes; what is collected */
            const int64_t most = dst ? product(rows, a->replicas * a->cp * a->sp, 1) : rows;
            bytes = product(most, h[0] > h[1] ? h[0] : h[1], elem * sum_elem(b));
            n = (src ? 2 * n : 0) + (dst ? n : 0);
        }
        bytes = bytes < 0 || !colo_add_ok(bytes, 255, &bytes) ? -1 : bytes / 256 * 256;
        bytes = product(bytes, n, 1);
        if (bytes < 0)
            return too_many(b, "addends");
        COLO_TRY(colo_partials_reserve(b, (size_t)bytes, false));
    }
    if (b->now.over_comm.nmembers == 0)
        return COLO_OK;
    const int64_t bytes = most_staged(b, h[0] * elem, h[1] * elem);
    return bytes < 0
               ? too_many(b, "messages")
               : colo_arena_grow(b, &b->memory.stage, (size_t)bytes, false, "staging of messages");
}
