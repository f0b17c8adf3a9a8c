/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sums.c - what one rank's plan adds to the totals: bytes, messages, memory, estimated time.
 *
 * The estimate: a message costs alpha + bytes / beta of its link, inside a node or across nodes; a
 * rank's sends go one after another, so do its receives, the two at the same time; the slowest rank
 * decides. Copies on the rank itself are free. That is crude on purpose: four numbers that anyone
 * can check, the same for all layouts that are compared.
 */
#include "plan-tool.h"

#include <string.h>

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static double maxd(double a, double b)
{
    return a > b ? a : b;
}

static void plus(int64_t *sum, int64_t more, bool *overflow)
{
    if (__builtin_add_overflow(*sum, more, sum))
        *overflow = true;
}

void plan_sums_init(plan_sums_t *s)
{
    memset(s, 0, sizeof *s);
    s->pass[0].collective_max = s->pass[1].collective_max = -1;
}

static void merge_pass(plan_totals_t *t, const plan_totals_t *more, bool *overflow)
{
    t->recv_max = max64(t->recv_max, more->recv_max);
    t->send_max = max64(t->send_max, more->send_max);
    t->local_max = max64(t->local_max, more->local_max);
    t->collective_max = max64(t->collective_max, more->collective_max);
    t->messages_max = max64(t->messages_max, more->messages_max);
    t->seconds = maxd(t->seconds, more->seconds);
    plus(&t->recv_total, more->recv_total, overflow);
    plus(&t->messages_total, more->messages_total, overflow);
    plus(&t->slow_total, more->slow_total, overflow);
    plus(&t->minimum_total, more->minimum_total, overflow);
}

void plan_sums_merge(plan_sums_t *s, const plan_sums_t *more)
{
    for (int w = 0; w < 2; w++)
        merge_pass(&s->pass[w], &more->pass[w], &s->overflow);
    s->direction = more->direction;
    s->scale = more->scale;
    s->memory_max = max64(s->memory_max, more->memory_max);
    s->input_max = max64(s->input_max, more->input_max);
    s->output_max = max64(s->output_max, more->output_max);
    s->staging_max = max64(s->staging_max, more->staging_max);
    s->overflow |= more->overflow;
}

static int64_t node_of(const plan_ask_t *ask, int64_t rank)
{
    return ask->config.ranks_per_node ? rank / ask->config.ranks_per_node : 0;
}

/* Time of one list of messages, one after another; bytes between nodes are added to @slow. */
static double list_time(const plan_ask_t *ask, int64_t rank, const colo_plan_message_t *m,
                        int32_t count, int64_t *slow)
{
    double t = 0;
    for (int32_t i = 0; i < count; i++) {
        int far = node_of(ask, m[i].peer) != node_of(ask, rank);
        t += ask->model.alpha[far];
        if (ask->model.beta[far] > 0)
            t += (double)m[i].bytes / ask->model.beta[far];
        *slow += far ? m[i].bytes : 0;
    }
    return t;
}

/* Bytes of @rows whole rows: no layout of this tool splits features. */
static int64_t bytes_of(const plan_ask_t *ask, int64_t rows)
{
    return rows * ask->config.shape.features * (int64_t)colo_dtype_size(ask->config.dtype);
}

/* Backward with PARTIAL gradients: one slab, as large as the input, for every context level from
 * which something arrives (docs/bridge.md). */
static int64_t levels_that_arrive(const colo_plan_t *plan)
{
    int32_t count;
    const colo_plan_message_t *m = colo_plan_recvs(plan, COLO_BACKWARD, &count);
    int64_t levels = colo_plan_addends(plan), n = 0;
    for (int64_t level = 0; level < levels && levels > 1; level++) {
        bool found = false;
        for (int32_t i = 0; i < count && !found; i++)
            for (int64_t k = 0; k < m[i].nregions && !found; k++)
                found = m[i].regions[k].level == level;
        n += found;
    }
    return n;
}

void plan_sums_add(plan_sums_t *s, const plan_ask_t *ask, const colo_plan_t *plan)
{
    int64_t rank = colo_plan_rank(plan), src_rows, dst_rows;
    plan_sums_t one = {.direction = colo_plan_direction(plan), .scale = colo_plan_scale(plan)};
    for (int w = 0; w < 2; w++) {
        colo_plan_bytes_t b = colo_plan_bytes(plan, (colo_pass_t)w);
        int32_t nrecvs, nsends;
        int64_t ignored = 0;
        const colo_plan_message_t *recvs = colo_plan_recvs(plan, (colo_pass_t)w, &nrecvs);
        const colo_plan_message_t *sends = colo_plan_sends(plan, (colo_pass_t)w, &nsends);
        plan_totals_t *t = &one.pass[w];
        *t = (plan_totals_t){.recv_max = b.recv,
                             .recv_total = b.recv,
                             .send_max = b.send,
                             .local_max = b.local,
                             .minimum_total = b.minimum,
                             .collective_max = b.collective_recv,
                             .messages_total = nrecvs,
                             .messages_max = max64(nrecvs, nsends)};
        double in = list_time(ask, rank, recvs, nrecvs, &t->slow_total);
        t->seconds = maxd(in, list_time(ask, rank, sends, nsends, &ignored));
    }
    colo_plan_rows(plan, &src_rows, &dst_rows);
    one.input_max = bytes_of(ask, src_rows);
    one.output_max = bytes_of(ask, dst_rows);
    if (__builtin_mul_overflow(levels_that_arrive(plan), one.input_max, &one.staging_max))
        one.overflow = true;
    plus(&one.memory_max, one.input_max, &one.overflow);
    plus(&one.memory_max, one.output_max, &one.overflow);
    plus(&one.memory_max, one.staging_max, &one.overflow);
    plan_sums_merge(s, &one);
}
