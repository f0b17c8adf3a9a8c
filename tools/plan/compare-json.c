/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare-json.c - a comparison for programs. The keys are documented in docs/plan.md and
 * stay. As in plan/json.c, everything is built before the first byte is written.
 */
#include "plan-tool.h"

#include <stdlib.h>

#include <jansson.h>

static json_t *pass(const plan_totals_t *t)
{
    json_t *collective = t->collective_max < 0 ? json_null() : json_integer(t->collective_max);
    return json_pack(
        "{s:I,s:I,s:f,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o,s:f}", "slow_bytes_minimum",
        (json_int_t)t->slow_minimum, "slow_bytes_one_level", (json_int_t)t->slow_one_level,
        "seconds_one_level", t->seconds_one_level, "recv_bytes_max", (json_int_t)t->recv_max,
        "recv_bytes_total", (json_int_t)t->recv_total, "send_bytes_max", (json_int_t)t->send_max,
        "local_bytes_max", (json_int_t)t->local_max, "messages_max", (json_int_t)t->messages_max,
        "messages_total", (json_int_t)t->messages_total, "slow_bytes_total",
        (json_int_t)t->slow_total, "collective_recv_bytes_max", collective, "seconds", t->seconds);
}

static json_t *one(const plan_entry_t *e, bool best)
{
    static const char *const sp[] = {"none", "src", "dst", "both"};
    const colo_plan_config_t *c = &e->ask.config;
    const plan_sums_t *s = &e->sums;
    char src[600], dst[600];
    colo_grid_print(&e->ask.src.grid, src, sizeof src);
    colo_grid_print(&e->ask.dst.grid, dst, sizeof dst);
    json_t *sampled = e->parts ? json_pack("{s:I,s:I,s:b}", "ranks", (json_int_t)e->ranks, "parts",
                                           (json_int_t)e->parts, "alike", e->alike)
                               : json_null();
    return json_pack("{s:s,s:s,s:s,s:s,s:s,s:I,s:o,s:s,s:o,s:o,s:o,s:{s:I,s:I,s:I,s:I},s:f,s:b}",
                     "src", src, "dst", dst, "output",
                     c->output == COLO_SHARDED ? "sharded" : "full", "grad",
                     c->output == COLO_SHARDED || c->grad == COLO_DISJOINT ? "disjoint" : "partial",
                     "sp", sp[e->sp], "world", (json_int_t)e->ask.world, "sampled", sampled,
                     "direction", colo_direction_name(s->direction), "scale",
                     s->scale > 0 ? json_integer(s->scale) : json_null(), "forward",
                     pass(&s->pass[0]), "backward", pass(&s->pass[1]), "memory", "input_bytes_max",
                     (json_int_t)s->input_max, "output_bytes_max", (json_int_t)s->output_max,
                     "staging_bytes_max", (json_int_t)s->staging_max, "bytes_max",
                     (json_int_t)s->memory_max, "seconds", plan_entry_seconds(e), "best", best);
}

int plan_compare_json(const plan_entry_t *entries, int n, int best)
{
    const plan_ask_t *ask = &entries[0].ask;
    const plan_model_t *m = &ask->model;
    char *text[PLAN_ENTRIES_MAX + 1] = {NULL}, index[16] = "null", warning[200];
    bool ok = true;
    json_t *head =
        json_pack("{s:[f,f],s:[f,f],s:b}", "alpha_us", 1e6 * m->alpha[0], 1e6 * m->alpha[1],
                  "beta_gb_s", 1e-9 * m->beta[0], 1e-9 * m->beta[1], "default", !ask->own_model);
    for (int i = 0; i <= n && ok; i++) {
        json_t *v = i < n ? one(&entries[i], i == best) : head;
        text[i] = v ? json_dumps(v, JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(12)) : NULL;
        json_decref(v);
        ok = text[i] != NULL;
    }
    if (ok && text[n]) {
        if (best >= 0)
            snprintf(index, sizeof index, "%d", best);
        printf("{\n");
        if (*plan_compare_warning(warning, entries, n)) /* printable ASCII without quotes */
            printf("\"warning\": \"%s\",\n", warning);
        if (*plan_assumed(warning, ask))
            printf("\"assumed\": \"%s\",\n", warning);
        printf("\"model\": %s,\n\"ranks_per_node\": %lld,\n\"best\": %s,\n\"entries\": [\n",
               text[n], (long long)ask->config.ranks_per_node, index);
        for (int i = 0; i < n; i++)
            printf("%s%s\n", text[i], i + 1 < n ? "," : "");
        printf("]\n}\n");
    }
    for (int i = 0; i <= n; i++)
        free(text[i]);
    return ok ? TOOL_OK : tool_problem("no memory for the JSON of %d entries", n);
}
