/* SPDX-License-Identifier: Apache-2.0 */
/* test_split.c - smaller comms by colour and by a grid's dims, on 1, 2, 3 and 8 ranks; how long
 * they live. */
#include "harness/harness.h"

/* ---- splits ---- */

T_CASE_ON_SIZES(split_by_color_orders_by_key_then_rank)
{
    int32_t n = colo_comm_size(world), me = colo_comm_rank(world);
    colo_comm_t *part = NULL, *none = (colo_comm_t *)&n;
    /* parity classes, members in descending order */
    rank_try(colo_comm_split_color(world, me % 2, -me, &part));
    int32_t members = (n + 1 - me % 2) / 2, place = 0;
    rank_check(colo_comm_size(part) == members);
    for (int32_t r = n - 1; r >= 0; r--)
        if (r % 2 == me % 2) {
            rank_check(colo_comm_world_rank(part, place) == r);
            rank_check(colo_comm_find(part, r) == place);
            rank_check(r != me || colo_comm_rank(part) == place);
            place++;
        }
    rank_check(place == members && colo_comm_world_rank(part, place) == -1);
    rank_check(colo_comm_find(part, (me + 1) % 2) == -1);
    int64_t x = me + 1, sum = 0;
    rank_try(colo_comm_all_reduce(part, &x, &sum, 1, COLO_I64, COLO_REDOP_SUM, NULL));
    int64_t want = 0;
    for (int32_t r = me % 2; r < n; r += 2)
        want += r + 1;
    rank_check(sum == want);
    /* equal keys: parent order; a child of a child keeps world ranks */
    colo_comm_t *again = NULL;
    rank_try(colo_comm_split_color(part, 7, 0, &again));
    for (int32_t r = 0; r < members; r++)
        rank_check(colo_comm_world_rank(again, r) == colo_comm_world_rank(part, r));
    colo_comm_destroy(&part); /* the child lives on */
    rank_check(part == NULL);
    rank_try(colo_comm_barrier(again, NULL));
    colo_comm_destroy(&again);
    /* a negative color takes part and gets nothing */
    rank_try(colo_comm_split_color(world, me == 0 ? 3 : -1, 0, &none));
    rank_check((none != NULL) == (me == 0));
    rank_check(me != 0 || colo_comm_size(none) == 1);
    colo_comm_destroy(&none);
    return COLO_OK;
}

T_CASE_ON(8, split_by_dims_follows_the_grid)
{
    /* tp=2,cp=2,dp=2: members per dims, written out */
    static const struct {
        const char *dims;
        int32_t n;
        int64_t members[8][8];
    } table[] = {
        {"tp", 2, {{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}, {6, 7}, {6, 7}}},
        {"cp", 2, {{0, 2}, {1, 3}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {4, 6}, {5, 7}}},
        {"dp-tp",
         4,
         {{0, 1, 4, 5},
          {0, 1, 4, 5},
          {2, 3, 6, 7},
          {2, 3, 6, 7},
          {0, 1, 4, 5},
          {0, 1, 4, 5},
          {2, 3, 6, 7},
          {2, 3, 6, 7}}},
    };
    int32_t me = colo_comm_rank(world);
    for (int32_t check = 0; check <= 2; check++) {
        rank_try(colo_comm_set_check(world, check));
        rank_try(colo_comm_barrier(world, NULL));
        colo_grid_t grid;
        rank_try(colo_grid_parse(&grid, "tp=2,cp=2,dp=2", 8));
        for (size_t t = 0; t < 3; t++) {
            colo_comm_t *g = NULL;
            rank_try(colo_comm_split(world, &grid, table[t].dims, &g));
            rank_check(colo_comm_size(g) == table[t].n);
            rank_check(strcmp(colo_comm_name(g), table[t].dims) == 0);
            rank_check(colo_comm_check_level(g) == check);
            int64_t all[8], mine = me;
            rank_try(colo_comm_all_gather(g, &mine, all, 1, COLO_I64, NULL));
            for (int32_t r = 0; r < table[t].n; r++) {
                rank_check(all[r] == table[t].members[me][r]);
                rank_check(colo_comm_world_rank(g, r) == table[t].members[me][r]);
            }
            colo_comm_destroy(&g);
        }
        /* the grid covers ranks 4..7 only */
        colo_comm_t *g = (colo_comm_t *)&grid;
        rank_try(colo_grid_parse(&grid, "tp=2,dp=2@4", 8));
        rank_try(colo_comm_split(world, &grid, "dp", &g));
        rank_check((g != NULL) == (me >= 4));
        rank_check(me < 4 || colo_comm_world_rank(g, 0) == 4 + me % 2);
        rank_check(me < 4 || colo_comm_world_rank(g, 1) == 6 + me % 2);
        colo_comm_destroy(&g);
    }
    return COLO_OK;
}

/* The others have gathered its colour when they hear of it. */
T_CASE_ON_THREADS(3, split_without_a_place_for_its_comm_is_an_error_on_all_ranks)
{
    const int32_t me = colo_comm_rank(world);
    for (int32_t check = 2; check >= 0; check--) {
        colo_comm_t *part = (colo_comm_t *)&check;
        rank_try(colo_comm_set_check(world, check));
        rank_check(colo_comm_split_color(world, 0, 0, me == 1 ? NULL : &part) ==
                   (me == 1 ? COLO_ERR_ARG : COLO_ERR_PEER));
        rank_check(strstr(colo_last_error(), "split_color: comm is NULL"));
        rank_check(part == (colo_comm_t *)&check);
        if (check > 0)
            rank_try(colo_comm_barrier(world, NULL));
        else
            rank_check(colo_comm_check(world) != COLO_OK);
    }
    return COLO_OK;
}

/* Ranks 1 and 3 make no comm, so that of their partners is never met in full. */
T_CASE_ON_THREADS(4, split_that_some_ranks_leave_out_is_freed)
{
    static const char *const dims[] = {"tp", "dp-tp"};
    colo_grid_t grid;
    rank_try(colo_grid_parse(&grid, "tp=2,dp=2", 4));
    rank_try(colo_comm_set_check(world, 0));
    for (int i = 0; i < 2 && colo_comm_rank(world) % 2 == 0; i++) {
        colo_comm_t *g = NULL;
        rank_try(colo_comm_split(world, &grid, dims[i], &g));
        colo_comm_destroy(&g);
    }
    return COLO_OK;
}

struct keep {
    colo_comm_t *child[8];
};

static colo_status_t keep_rank(colo_comm_t *c, void *arg)
{
    struct keep *k = arg;
    int32_t me = colo_comm_rank(c);
    return colo_comm_split_color(c, me / 4, 0, &k->child[me]);
}

T_CASE(comms_may_outlive_their_run_and_each_other)
{
    T_THREADS_ONLY();
    struct keep k = {{NULL}};
    assert_ok(t_run_ranks(8, keep_rank, &k, sizeof k));
    for (int i = 0; i < 8; i++) {
        int r = i * 3 % 8; /* in another order than made */
        assert_int_equal(colo_comm_size(k.child[r]), 4);
        assert_int_equal(colo_comm_world_rank(k.child[r], 0), r / 4 * 4);
        assert_ok(colo_comm_check(k.child[r]));
        colo_comm_destroy(&k.child[r]);
        assert_null(k.child[r]);
    }
}

T_MAIN("comm/split")
