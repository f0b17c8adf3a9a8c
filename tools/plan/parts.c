/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parts.c - which ranks exchange with each other, directly or not: the parts of a world.
 *
 * Parts are what a bridge's create talks within, and in a regular pair of layouts they are all
 * alike, so that one of them shows what a million ranks do. A part is found by following peers from
 * one rank. Worlds up to PLAN_EXACT_MAX are walked whole; of larger ones PLAN_SAMPLE ranks are
 * drawn by a fixed hash (never by a stride, which would meet the same coordinate again and again),
 * and each brings its part. A mean over drawn ranks of "one over the size of my part" estimates the
 * number of parts without bias; where all parts drawn are alike it is world / size.
 */
#include "plan-tool.h"

#include <stdlib.h>

static uint64_t scatter(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* @seen: [world] */
static void follow(const pic_list_t *list, bool *seen, plan_part_t *part)
{
    for (int32_t i = 0; i < list->n; i++) {
        const int64_t peer = list->message[i].peer;
        if (part->n == PLAN_PART_MAX) {
            part->cut = true;
        } else if (!seen[peer]) {
            seen[peer] = true;
            part->rank[part->n++] = peer;
        }
    }
}

void plan_part_free(plan_part_t *part)
{
    free(part->rank);
    *part = (plan_part_t){.n = 0};
}

int plan_part_find(const plan_ask_t *ask, int64_t seed, plan_part_t *part)
{
    bool *seen = calloc((size_t)ask->world, sizeof *seen);
    colo_status_t st = COLO_OK;
    *part = (plan_part_t){.rank = malloc(PLAN_PART_MAX * sizeof *part->rank)};
    plan_sums_init(&part->sums);
    if (!seen || !part->rank) {
        free(seen);
        plan_part_free(part);
        return tool_problem("no memory for the peers of rank %lld", (long long)seed);
    }
    part->rank[part->n++] = seed;
    seen[seed] = true;
    for (int64_t i = 0; i < part->n && st >= 0; i++) {
        colo_plan_t *plan = NULL;
        st = plan_make(&plan, ask, part->rank[i]);
        if (st < 0)
            break;
        for (colo_pass_t pass = COLO_PASS_FORWARD; pass <= COLO_PASS_BACKWARD; pass++) {
            pic_list_t list[PIC_EXCHANGES][2];
            pic_lists(plan, pass, list);
            for (int k = 0; k < 2 * PIC_EXCHANGES; k++)
                follow(&list[k / 2][k % 2], seen, part);
        }
        plan_sums_add(&part->sums, ask, plan);
        colo_plan_destroy(&plan);
    }
    free(seen);
    if (st < 0) {
        plan_part_free(part);
        return plan_complain(ask, st, colo_last_error());
    }
    qsort(part->rank, (size_t)part->n, sizeof *part->rank, pic_by_number);
    return TOOL_OK;
}

bool plan_part_alike(const plan_part_t *a, const plan_part_t *b)
{
    for (int w = 0; w < 2; w++) {
        const plan_totals_t *x = &a->sums.pass[w], *y = &b->sums.pass[w];
        if (x->recv_max != y->recv_max || x->recv_total != y->recv_total ||
            x->send_max != y->send_max || x->local_max != y->local_max ||
            x->messages_total != y->messages_total || x->slow_total != y->slow_total)
            return false;
    }
    return a->n == b->n && a->cut == b->cut;
}

/* The @k-th rank drawn from @first .. @world - 1. */
int64_t plan_sample_rank(const plan_ask_t *ask, int64_t k)
{
    return ask->first +
           (int64_t)(scatter((uint64_t)k * 2 + 1) % (uint64_t)(ask->world - ask->first));
}
