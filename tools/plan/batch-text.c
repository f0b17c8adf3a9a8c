/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch-text.c - the lines that text.c prints for a batch in tables only: its sizes, which rows of
 * which segment or sequence a message has, and the load of each source replica.
 */
#include "plan-tool.h"

const char *plan_batch_size(char out[200], const plan_ask_t *ask)
{
    const plan_batch_t *b = ask->batch;
    const int64_t before = b->side[1].halo_before;
    char halo[48] = "";
    if (before)
        snprintf(halo, sizeof halo, " with %lld rows in front of each piece", (long long)before);
    if (b->packed)
        snprintf(out, 200, "%lld sequences of %lld positions, %s to %s%s", (long long)b->count,
                 (long long)b->positions, plan_batch_cut(b, 0), plan_batch_cut(b, 1), halo);
    else
        snprintf(out, 200, "%lld segments of %lld rows in %lld sequences of %lld positions",
                 (long long)b->count, (long long)b->rows, (long long)b->tables.nseqs,
                 (long long)b->positions);
    return out;
}

void plan_batch_print_rows(const plan_ask_t *ask, const colo_region_t *g)
{
    const plan_batch_t *b = ask->batch;
    const int64_t unit = plan_unit(ask);
    for (int64_t index = g->s[0]; index < g->s[1];) {
        const bool more = index > g->s[0];
        const plan_rows_t part = plan_batch_next(b, &index, g->s[1]);
        tool_say("%s %s %lld %s %lld..%lld", more ? "," : "", b->packed ? "sequence" : "segment",
                 (long long)part.item, b->packed ? "positions" : "rows", (long long)part.lo,
                 (long long)part.hi - 1);
        if ((g->h[1] - g->h[0]) * unit < ask->config.shape.features)
            tool_say(" features %lld..%lld", (long long)(g->h[0] * unit),
                     (long long)(g->h[1] * unit) - 1);
    }
}

void plan_batch_print_minimum(const plan_totals_t *t)
{
    char bytes[24];
    if (t->recv_total > 0)
        tool_say("            %lld %s; %s must move.\n", (long long)t->messages_total,
                 t->messages_total == 1 ? "message" : "messages",
                 tool_bytes(bytes, t->minimum_total));
}

void plan_batch_print_balance(const plan_ask_t *ask)
{
    const plan_batch_t *b = ask->batch;
    const plan_loads_t *l = &b->loads;
    tool_say("\n%sRows of each source replica%s\n", tool_bold, tool_plain);
    if (b->replicas <= ask->max_ranks) {
        tool_say("  replica  as it is  after colo_segments_balance()\n");
        for (int64_t d = 0; d < b->replicas; d++)
            tool_say("  %7lld  %8lld  %20lld\n", (long long)d, (long long)l->load[0][d],
                     (long long)l->load[1][d]);
    }
    if (b->rows > 0)
        tool_say(
            "  The busiest replica has %.2f times the mean, %.2f after colo_segments_balance(), "
            "which "
            "moves %lld of %lld segments.\n",
            (double)l->most[0] / l->mean, (double)l->most[1] / l->mean, (long long)l->moved,
            (long long)b->tables.count);
}
