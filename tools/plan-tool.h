/* SPDX-License-Identifier: Apache-2.0 */
/* plan-tool.h - the parts of colo-plan: what was asked, what was counted, two ways to print it. */
#ifndef TOOLS_PLAN_TOOL_H
#define TOOLS_PLAN_TOOL_H

#include <colobridge/plan.h>

#include "options.h"

#define PLAN_TOOL "colo-plan"
#define PLAN_WORLD_MAX ((int64_t)1 << 24) /* ranks that a run counts one by one */

/* What was asked. The layouts live here, config points at them. */
typedef struct plan_ask {
    colo_layout_t src, dst;
    colo_plan_config_t config;
    const char *axes;   /* "bsh" */
    int64_t world;      /* ranks 0 .. world - 1 */
    int64_t first;      /* below it no grid has a rank */
    int64_t max_ranks;  /* per-rank lists only up to this many ranks */
    int64_t rank;       /* the only one to print, or -1: all */
    bool json;
} plan_ask_t;

/* Over all ranks, one way. */
typedef struct plan_totals {
    int64_t recv_max, recv_total, send_max, local_max;
    int64_t collective_max; /* -1 where that way rejects the pair */
} plan_totals_t;

typedef struct plan_sums {
    plan_totals_t way[2]; /* by colo_way_t */
    colo_direction_t direction;
    int64_t scale;        /* 0: no integer */
    char rejects[192];    /* why the collective way does not take the pair; "" when it does */
} plan_sums_t;

/* Counts every rank, on several threads when there are many. Keeps the plan of rank r at plans[r]
 * where @plans is given ([world], NULL entries). On failure: complains, returns the exit code. */
int plan_sweep(const plan_ask_t *ask, colo_plan_t **plans, plan_sums_t *sums);

/* A rejected plan in words: COLO_ERR_ARG is wrong use, the rest a problem found. */
int plan_complain(colo_status_t status, const char *sentence);

/* @plans: [nplans], the ranks to list; @sums: of all ranks */
int plan_print_text(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums);
int plan_print_json(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums);
/* one rank with its boxes, no totals */
int plan_print_rank(const plan_ask_t *ask, const colo_plan_t *plan);

#endif
