/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plans.c - makes the plans of all ranks. See plan_world.h.
 */
#include "harness/harness.h"
#include "harness/plan_world.h"

#include <stdlib.h>
#include <string.h>

bool t_plans_make(t_plans_t *w, const t_case_t *c)
{
    colo_layout_t src, dst;
    colo_bridge_config_t bc;
    memset(w, 0, sizeof *w);
    w->c = c;
    w->n = t_case_world(c);
    w->plan = calloc((size_t)w->n, sizeof *w->plan);
    if (!w->plan || t_case_config(c, &src, &dst, &bc) != COLO_OK)
        return T_WRONG(w, "%s", colo_last_error());
    colo_plan_config_t pc = {
        COLO_PLAN_CONFIG_INIT, .src = bc.src,         .dst = bc.dst,
        .shape = bc.shape,     .dtype = bc.dtype,     .output = bc.output,
        .grad = bc.grad,       .no_grad = bc.no_grad, .ranks_per_node = bc.ranks_per_node};
    if (c->node && colo_nodes_create(&w->nodes, c->node, w->n) != COLO_OK)
        return T_WRONG(w, "%s", colo_last_error());
    pc.nodes = w->nodes;
    pc.one_level = !c->two_levels;
    for (int32_t r = 0; r < w->n; r++)
        if (colo_plan_create(&w->plan[r], &pc, r) != COLO_OK)
            return T_WRONG(w, "plan of rank %d: %s", r, colo_last_error());
    return true;
}

t_plans_t t_plans_of(const t_case_t *c)
{
    t_plans_t w;
    if (!t_plans_make(&w, c))
        fail_msg("%s: %s", t_case_text(c), w.why);
    return w;
}

void t_plans_free(t_plans_t *w)
{
    for (int32_t r = 0; w->plan && r < w->n; r++)
        colo_plan_destroy(&w->plan[r]);
    free(w->plan);
    w->plan = NULL;
    colo_nodes_destroy(&w->nodes);
}

bool t_same_message(const colo_plan_message_t *one, const colo_plan_message_t *other)
{
    bool same = one->bytes == other->bytes && one->nregions == other->nregions;
    for (int64_t i = 0; same && i < one->nregions; i++) {
        const colo_region_t *a = &one->regions[i], *b = &other->regions[i];
        same = memcmp(a->b, b->b, sizeof a->b) == 0 && memcmp(a->s, b->s, sizeof a->s) == 0 &&
               memcmp(a->h, b->h, sizeof a->h) == 0 && a->addend == b->addend;
    }
    return same;
}

bool t_plans_balanced(t_plans_t *w, colo_pass_t pass)
{
    int64_t largest = 0;
    for (int32_t r = 0; r < w->n; r++) {
        int64_t v = t_plan_bytes(w->plan[r], pass).recv;
        largest = v > largest ? v : largest;
    }
    for (int32_t r = 0; r < w->n; r++)
        if (t_plan_bytes(w->plan[r], pass).send > largest)
            return T_WRONG(w, "rank %d sends %lld bytes, the largest receive is %lld", r,
                           (long long)t_plan_bytes(w->plan[r], pass).send, (long long)largest);
    return true;
}

void t_plans_check(const t_case_t *c)
{
    t_plans_t w;
    bool ok = t_plans_make(&w, c) && t_plans_judge(&w, COLO_PASS_FORWARD) &&
              (c->no_grad || t_plans_judge(&w, COLO_PASS_BACKWARD));
    t_plans_free(&w);
    if (!ok)
        fail_msg("%s: %s", t_case_text(c), w.why);
}
