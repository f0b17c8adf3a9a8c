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

#include <stdlib.h>
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

static void merge_pass(plan_totals_t *totals, const plan_totals_t *more, bool *overflow)
{
    for (int k = 0; k < PLAN_MOST; k++)
        totals->count[k] = max64(totals->count[k], more->count[k]);
    for (int k = PLAN_MOST; k < PLAN_COUNTS; k++)
        plus(&totals->count[k], more->count[k], overflow);
    totals->seconds = maxd(totals->seconds, more->seconds);
    totals->seconds_one_level = maxd(totals->seconds_one_level, more->seconds_one_level);
}

void plan_sums_merge(plan_sums_t *s, const plan_sums_t *more)
{
    for (int w = 0; w < 2; w++)
        merge_pass(&s->pass[w], &more->pass[w], &s->overflow);
    s->ranks += more->ranks;
    s->direction = more->direction;
    s->scale = more->scale;
    s->memory_max = max64(s->memory_max, more->memory_max);
    s->input_max = max64(s->input_max, more->input_max);
    s->output_max = max64(s->output_max, more->output_max);
    s->staging_max = max64(s->staging_max, more->staging_max);
    s->overflow |= more->overflow;
    s->no_memory |= more->no_memory;
}

bool plan_several_nodes(const plan_ask_t *ask)
{
    const int64_t n = ask->config.ranks_per_node;
    return ask->config.nodes ? colo_nodes_count(ask->config.nodes) > 1 : n && n < ask->world;
}

const char *plan_nodes_text(char out[48], const plan_ask_t *ask)
{
    const colo_plan_config_t *c = &ask->config;
    char n[32];
    if (!c->nodes && !c->ranks_per_node)
        snprintf(out, 48, "one node");
    else
        snprintf(out, 48, "%s %s",
                 svg_count(c->nodes ? colo_nodes_count(c->nodes) : c->ranks_per_node, n),
                 c->nodes ? "nodes" : "ranks per node");
    return out;
}

/* Time of one list of messages, one after another. */
static double list_time(const plan_ask_t *ask, int64_t rank, const pic_list_t *list)
{
    double seconds = 0;
    for (int32_t i = 0; i < list->n; i++) {
        const colo_plan_message_t *m = &list->message[i];
        const int far = pic_node(&ask->config, m->peer) != pic_node(&ask->config, rank);
        seconds += ask->model.alpha[far];
        if (ask->model.beta[far] > 0)
            seconds += (double)m->bytes / ask->model.beta[far];
    }
    return seconds;
}

/* Of all exchanges; each rank sends and receives at the same time. */
static double pass_time(const plan_ask_t *ask, const colo_plan_t *plan, colo_pass_t w)
{
    pic_list_t list[PIC_EXCHANGES][2];
    double time[2 * PIC_EXCHANGES] = {0};
    pic_lists(plan, w, list);
    for (int i = 0; i < 2 * PIC_EXCHANGES; i++)
        time[i] = list_time(ask, colo_plan_rank(plan), &list[i / 2][i % 2]);
    return maxd(time[0], time[1]) + maxd(time[2], time[3]) + maxd(time[4], time[5]);
}

/* Bytes of @rows whole rows: no layout of this tool splits features. */
static int64_t bytes_of(const plan_ask_t *ask, int64_t rows)
{
    return rows * ask->config.shape.features * (int64_t)colo_dtype_size(ask->config.dtype);
}

/* How many addends below @end these messages have; one pass over their regions, because a rank of
 * thousands has as many addends as messages. */
static int64_t addends_in(const pic_list_t *list, int64_t end, bool *no_memory)
{
    int64_t n = 0;
    bool *seen = calloc((size_t)end + 1, sizeof *seen);
    *no_memory |= !seen;
    for (int32_t i = 0; i < list->n && seen; i++)
        for (int64_t k = 0; k < list->message[i].nregions; k++) {
            const int64_t addend = list->message[i].regions[k].addend;
            if (addend < 0 || addend >= end || seen[addend])
                continue;
            seen[addend] = true;
            n++;
        }
    free(seen);
    return n;
}

/* Backward with PARTIAL gradients: one partial sum for every addend of which something arrives, as
 * large as the input (docs/concepts/bridge.md); if nodes add up, as the larger part, in fp32. */
static int64_t partial_sums(const plan_ask_t *ask, const colo_plan_t *plan, int64_t rows[2],
                            plan_sums_t *one)
{
    const int64_t addends = colo_plan_addends(plan);
    pic_list_t list[PIC_EXCHANGES][2];
    pic_lists(plan, COLO_PASS_BACKWARD, list);
    int64_t n = addends > 1 ? addends_in(&list[PIC_FIRST][0], 2 * addends, &one->no_memory) : 0,
            size = rows[0];
    if (list[PIC_SUMS][0].n + list[PIC_SUMS][1].n > 0) {
        const int64_t elem = (int64_t)colo_dtype_size(ask->config.dtype);
        n += addends_in(&list[PIC_SUMS][0], addends, &one->no_memory) + (list[PIC_SUMS][1].n > 0);
        size = max64(rows[0], rows[1]) * (elem < 4 ? 4 / elem : 1);
    }
    if (__builtin_mul_overflow(n, bytes_of(ask, size), &n))
        one->overflow = true;
    return n;
}

void plan_sums_add(plan_sums_t *s, const plan_ask_t *ask, const colo_plan_t *plan)
{
    int64_t rank = colo_plan_rank(plan), rows[2];
    colo_plan_t *one_level = NULL;
    if (plan_several_nodes(ask) && !ask->config.one_level) {
        plan_ask_t asked = *ask;
        asked.config.one_level = true;
        if (plan_make(&one_level, &asked, rank) < 0)
            one_level = NULL; /* no memory: both are shown alike */
    }
    plan_sums_t one = {
        .ranks = 1, .direction = colo_plan_direction(plan), .scale = colo_plan_scale(plan)};
    for (colo_pass_t pass = COLO_PASS_FORWARD; pass <= COLO_PASS_BACKWARD; pass++) {
        colo_plan_bytes_t b = {COLO_PLAN_BYTES_INIT};
        colo_plan_node_bytes_t node = {COLO_PLAN_NODE_BYTES_INIT};
        pic_list_t list[PIC_EXCHANGES][2];
        int32_t n[2] = {0, 0}; /* received, sent */
        (void)colo_plan_bytes(plan, pass, &b);
        (void)colo_plan_node_bytes(plan, pass, &node);
        pic_lists(plan, pass, list);
        for (int k = 0; k < 2 * PIC_EXCHANGES; k++)
            n[k % 2] += list[k / 2][k % 2].n;
        plan_totals_t *totals = &one.pass[pass];
        *totals = (plan_totals_t){.recv_max = b.recv,
                                  .recv_total = b.recv,
                                  .send_max = b.send,
                                  .local_max = b.local,
                                  .minimum_total = b.minimum,
                                  .collective_max = b.collective_recv,
                                  .messages_total = n[0],
                                  .messages_max = max64(n[0], n[1])};
        totals->slow_total = totals->slow_one_level = node.in;
        totals->slow_minimum = node.minimum;
        totals->seconds = totals->seconds_one_level = pass_time(ask, plan, pass);
        if (one_level) {
            (void)colo_plan_node_bytes(one_level, pass, &node);
            totals->slow_one_level = node.in;
            totals->seconds_one_level = pass_time(ask, one_level, pass);
        }
    }
    colo_plan_rows(plan, &rows[0], &rows[1]);
    one.input_max = bytes_of(ask, rows[0]);
    one.output_max = bytes_of(ask, rows[1]);
    one.staging_max = partial_sums(ask, plan, rows, &one);
    plus(&one.memory_max, one.input_max, &one.overflow);
    plus(&one.memory_max, one.output_max, &one.overflow);
    plus(&one.memory_max, one.staging_max, &one.overflow);
    colo_plan_destroy(&one_level);
    plan_sums_merge(s, &one);
}

plan_sums_t *plan_nodes(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                        int64_t *n)
{
    *n = ask->config.nodes ? colo_nodes_count(ask->config.nodes)
                           : (ask->world - 1) / ask->config.ranks_per_node + 1;
    plan_sums_t *node = calloc((size_t)*n, sizeof *node);
    if (!node)
        (void)tool_problem("no memory for the bytes into %lld nodes", (long long)*n);
    for (int64_t i = 0; node && i < nplans; i++)
        plan_sums_add(&node[pic_node(&ask->config, colo_plan_rank(plans[i]))], ask, plans[i]);
    return node;
}
