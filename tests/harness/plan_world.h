/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_world.h - the plans of all ranks of one case, judged against the oracle.
 *
 * The features axis is cut into cells at every boundary that occurs, so that plans over very wide
 * tensors are judged element by element too.
 */
#ifndef TESTS_HARNESS_PLAN_WORLD_H
#define TESTS_HARNESS_PLAN_WORLD_H

#include "harness/bridge_case.h"

#include <stdio.h>

typedef struct t_plans {
    const t_case_t *c;
    int32_t n;
    colo_plan_t **plan;
    colo_nodes_t *nodes;
    char why[512]; /* what is wrong, when a judgement fails */
} t_plans_t;

#define T_WRONG(w, ...) (snprintf((w)->why, sizeof(w)->why, __VA_ARGS__), false)

bool t_plans_make(t_plans_t *w, const t_case_t *c);
void t_plans_free(t_plans_t *w);
/* Plans of a case that must have some; they end with their scope. */
#define T_PLANS(name, c) T_ENDS(t_plans_free) t_plans_t name = t_plans_of(c)
t_plans_t t_plans_of(const t_case_t *c);

/*
 * Everything that semantics 3 guarantees of one way: each needed element reaches each destination
 * exactly once (PARTIAL: once per addend), from a rank that holds it; one message per peer pair,
 * peers ascending and never self, nothing empty, nothing that the destination holds; sends mirror
 * receives; byte totals; with nodes, the nearest tier that has a source. With two_levels, what
 * several ranks of a node need and none holds comes to one of them, with all its addends, and from
 * that one to the others; and into each node comes exactly what its ranks need and none holds.
 */
bool t_plans_judge(t_plans_t *w, colo_pass_t pass);
/* No rank sends more than the largest receive. */
bool t_plans_balanced(t_plans_t *w, colo_pass_t pass);
/* Makes, judges and frees them; fails the test case. */
void t_plans_check(const t_case_t *c);
/* bytes that travel from one rank to another; 0 when nothing does */
int64_t t_plans_bytes(const t_plans_t *w, colo_pass_t pass, int32_t from, int32_t to);

#endif
