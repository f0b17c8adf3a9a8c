/* SPDX-License-Identifier: Apache-2.0 */
/*
 * halo-plan.c - what a rank does with rows that several of its pieces have, or pieces of several
 * ranks: copies in forward, partial sums in backward. Who sends which row to whom is routing.c's.
 */
#include "bridge/plan/halo-plan.h"

#include "core/error.h"

#include <string.h>

/* ---- forward ---- */

/* Appends the rows in front of piece @i of the block that earlier pieces of the rank have: each
 * with the first that has it. */
static colo_status_t add_repeats(const colo_halo_t *halo, int64_t block, int64_t i,
                                 colo_runs_t *repeats)
{
    const colo_halo_piece_t *piece = colo_halo_piece(halo, block, i);
    const int64_t row = piece->row - colo_halo_front(halo, piece);
    for (int64_t end = piece->fresh; row < end;) {
        const colo_halo_piece_t *earlier = colo_halo_piece(halo, block, --i);
        const int64_t lo = earlier->fresh > row ? earlier->fresh : row;
        if (lo >= end) /* all of it is in front of others */
            continue;
        COLO_TRY(colo_runs_push(repeats, colo_halo_local(halo, earlier, lo), end - lo,
                                colo_halo_local(halo, piece, lo)));
        end = lo;
    }
    return COLO_OK;
}

static void push_run(colo_run_list_t *list, int64_t local, int64_t count)
{
    if (count > 0)
        list->run[list->n++] = (colo_run_t){.row = local, .count = count, .local = local};
}

colo_status_t colo_halo_find_places(colo_plan_t *plan, const colo_halo_t *halo, int64_t block,
                                    colo_ragged_places_t *places)
{
    const int64_t n = colo_halo_count(halo, block);
    COLO_ENDS(colo_runs_deinit) colo_runs_t repeats = {0};
    colo_run_list_t *zeros = &plan->padding[COLO_PASS_FORWARD], stored = {0};
    zeros->run = colo_pool_take(&plan->pool, (size_t)(2 * n + 1) * sizeof *zeros->run);
    stored.run = colo_pool_take(&plan->pool, (size_t)(n + 1) * sizeof *stored.run);
    COLO_FAIL_IF(!zeros->run || !stored.run, COLO_ERR_NOMEM, "plan: %lld pieces and their halos",
                 (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const colo_halo_piece_t *piece = colo_halo_piece(halo, block, i);
        const int64_t front = colo_halo_front(halo, piece), none = halo->before - front,
                      end = none + front + piece->count;
        push_run(zeros, piece->local, none);
        push_run(&stored, piece->local + none, front + piece->count);
        push_run(zeros, piece->local + end, piece->rows - end);
        COLO_TRY(add_repeats(halo, block, i, &repeats));
    }
    places->stored = stored.run;
    places->n = stored.n;
    plan->repeats.run = colo_pool_take(&plan->pool, (size_t)(repeats.n + 1) * sizeof(colo_run_t));
    COLO_FAIL_IF(!plan->repeats.run, COLO_ERR_NOMEM, "plan: %lld runs of rows",
                 (long long)repeats.n);
    plan->repeats.n = repeats.n;
    if (repeats.n > 0)
        memcpy(plan->repeats.run, repeats.run, (size_t)repeats.n * sizeof *repeats.run);
    return COLO_OK;
}

/* ---- backward ---- */

/* The rows of @mine that have several addends, and where a partial sum has them. */
static colo_status_t list_sums(const colo_list_t *partials, const colo_runs_t *mine,
                               colo_runs_t *sums)
{
    const colo_partial_t *partial = partials->items;
    for (int64_t i = 0, first = 0; mine && i < partials->n; i++) {
        const int64_t row = partial[i].row, end = row + partial[i].count;
        while (first < mine->n && mine->run[first].row + mine->run[first].count <= row)
            first++;
        for (int64_t k = first; partial[i].n > 1 && k < mine->n && mine->run[k].row < end; k++) {
            const colo_run_t *run = &mine->run[k];
            const int64_t behind = run->row + run->count, lo = row > run->row ? row : run->row;
            COLO_TRY(colo_runs_push(sums, lo, (behind < end ? behind : end) - lo, sums->rows));
        }
    }
    return COLO_OK;
}

/* -1: @row has one addend. All rows of a region have as many. */
static int64_t sum_row(const colo_runs_t *sums, int64_t row)
{
    enum { STRIDE = sizeof(colo_run_t) / sizeof(int64_t) };
    if (sums->n == 0 || row < sums->run->row)
        return -1;
    const colo_run_t *run = &sums->run[colo_last_begun(&sums->run->row, STRIDE, sums->n, row)];
    return row < run->row + run->count ? run->local + (row - run->row) : -1;
}

colo_status_t colo_halo_place_sums(colo_plan_t *plan, const colo_list_t *partials,
                                   const colo_runs_t *mine)
{
    COLO_ENDS(colo_runs_deinit) colo_runs_t sums = {0};
    const colo_routes_t *list[] = {&plan->local[COLO_PASS_BACKWARD],
                                   &plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_MAIN].recv};
    COLO_TRY(list_sums(partials, mine, &sums));
    plan->sum_rows = sums.rows;
    COLO_FAIL_IF(sums.rows > INT32_MAX, COLO_ERR_ARG,
                 "packing: %lld rows of a rank are in several halos, expected at most 2^31 - 1",
                 (long long)sums.rows);
    for (int k = 0; k < 2; k++)
        for (int64_t i = 0; i < list[k]->nregions; i++)
            list[k]->offset[i].sum_row = (int32_t)sum_row(&sums, list[k]->region[i].s[0]);
    return COLO_OK;
}
