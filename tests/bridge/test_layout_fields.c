/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_layout_fields.c - layouts that no call of the library made: never initialised, or with a
 * field that the caller edited. Every entry point refuses them before it reads what they point at.
 */
#include "harness/harness.h"

#include "harness/plan_world.h"

static const int64_t table[8] = {7, 6, 5, 4, 3, 2, 1, 0};

/* tp=2,cp=2,pp=2,dp=2: samples over dp (dim 3), rows over cp (dim 1), stage 0 of pp (dim 2) */
static void usual(colo_layout_t *l)
{
    colo_grid_t grid;
    assert_ok(colo_grid_parse(&grid, "tp=2,cp=2,pp=2,dp=2", 16));
    assert_ok(colo_layout_init_dst(l, &grid));
    assert_ok(colo_layout_map_offset(l, 0, 8));
}

/* Makes edit @n of a layout; returns the words that refuse it, NULL: there are no more. */
static const char *edit(colo_layout_t *l, int n)
{
#define EDIT(words, ...)  \
    do {                  \
        if (n-- == 0) {   \
            __VA_ARGS__;  \
            return words; \
        }                 \
    } while (0)
    EDIT("layout: not initialised", memset(l, 0, sizeof *l));
    EDIT("samples have -1 splits, expected 0..4", l->nsplits[0] = -1);
    EDIT("rows have 5 splits, expected 0..4", l->nsplits[1] = COLO_SPLITS_MAX + 1);
    EDIT("split 0 of samples is over dim -1, expected 0..3", l->split[0][0].dim = -1);
    EDIT("split 0 of rows is over dim 4, expected 0..3", l->split[1][0].dim = 4);
    EDIT("split 0 of samples has kind 4, expected BLOCK or CEIL",
         l->split[0][0].kind = (colo_split_kind_t)4);
    EDIT("split 0 of rows has kind 4, expected BLOCK, ZIGZAG or CEIL",
         l->split[1][0].kind = (colo_split_kind_t)4);
    EDIT("0 positions, expected at least 1", l->map = COLO_MAP_TABLE, l->positions = 0);
    EDIT("split 0 of samples has kind 0", l->split[0][0].kind = COLO_SPLIT_REPLICATE);
    EDIT("split 0 of samples has kind 2, expected BLOCK or CEIL",
         l->split[0][0].kind = COLO_SPLIT_ZIGZAG);
    EDIT("dim 'cp' is split over twice", l->split[0][0].dim = 1);
    EDIT("stage_dim -2, expected -1..3", l->stage_dim = -2);
    EDIT("stage_dim 16, expected -1..3", l->stage_dim = 16);
    EDIT("dim 'cp' is the stage and splits an axis, too", l->stage_dim = 1);
    EDIT("stage -1, expected 0..1", l->stage = -1);
    EDIT("stage 2, expected 0..1", l->stage = 2);
    EDIT("reserved[15] is 7, expected 0", l->reserved[15] = 7);
    EDIT("map 3, expected 0..2", l->map = (colo_map_kind_t)3);
    EDIT("offset -5, expected 0..7", l->offset = -5);
    EDIT("offset 8, expected 0..7", l->offset = 8);
    EDIT("offset 1, expected 0..0", l->map = COLO_MAP_IDENTITY, l->offset = 1);
    EDIT("-8 positions, expected at least 1", l->positions = -8);
    EDIT("-8 positions, expected at least 0", l->map = COLO_MAP_IDENTITY, l->positions = -8);
    EDIT("no position table of 4 rows", l->map = COLO_MAP_TABLE, l->table_rows = 4);
    EDIT("a position table of 9 rows, expected 0..8", l->map = COLO_MAP_TABLE, l->table = table,
         l->table_rows = 9);
    EDIT("a position table of -1 rows, expected 0..8", l->map = COLO_MAP_TABLE, l->table = table,
         l->table_rows = -1);
    EDIT("no position table of 1073741824 rows, expected 0..0", l->table_rows = 1 << 30);
    EDIT("17 dims, expected 1..16", l->grid.ndims = 17);
    EDIT("dim 0 'tp' was not made by this library: found extent 0", l->grid.extent[0] = 0);
    EDIT("dim 3 'dp' was not made by this library: found extent -2", l->grid.extent[3] = -2);
    EDIT("dim 3 'dp' was not made by this library", l->grid.extent[3] = INT64_MAX);
    EDIT("dim 1 'cp' was not made by this library: found extent 2 and stride 4",
         l->grid.stride[1] = 4);
    EDIT("found extent 2 and stride 0, expected an extent of at least 1 and stride 1",
         l->grid.stride[0] = 0);
    EDIT("found size 32 and rank offset 0, expected size 16", l->grid.size = 32);
    EDIT("rank offset -1", l->grid.offset = -1);
    EDIT("rank offset 9223372036854775804", l->grid.offset = INT64_MAX - 3);
    EDIT("dim 1 'ccccccccccccccc' was not made by this library",
         memset(l->grid.name[1], 'c', sizeof l->grid.name[1]));
    return NULL;
}

static void refuses(const char *words, const char *call, const char *object, colo_status_t st)
{
    const char *said = colo_last_error();
    if (st != COLO_ERR_ARG || !strstr(said, words) || strncmp(said, object, strlen(object)) != 0)
        fail_msg("%s: %s \"%s\", expected COLO_ERR_ARG \"%s\" ... \"%s\"", call,
                 colo_status_name(st), said, object, words);
}

/* A layout that no call made, by edit @n; false: there are no more. */
static bool edited(colo_layout_t *l, const char **words, int n)
{
    usual(l);
    *words = edit(l, n);
    return *words != NULL;
}

T_CASE(a_plan_refuses_a_layout_that_no_call_made)
{
    colo_plan_t *const sentinel = (colo_plan_t *)(uintptr_t)0x1230;
    colo_layout_t good, bad;
    const char *words;
    usual(&good);
    for (int i = 0; edited(&bad, &words, i); i++) {
        colo_plan_t *p = sentinel;
        colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = &bad, .dst = &good,
                                .shape = {4, 8, 2, 0}};
        refuses(words, "plan of a source",
                "plan: config.src: layout: ", colo_plan_create(&p, &c, 0));
        refuses(words, "collective check", "layout: ", colo_plan_collective_check(&c));
        c.src = &good;
        c.dst = &bad;
        refuses(words, "plan of a destination",
                "plan: config.dst: layout: ", colo_plan_create(&p, &c, 0));
        refuses(words, "collective check", "layout: ", colo_plan_collective_check(&c));
        assert_ptr_equal(p, sentinel);
    }
}

T_CASE(calls_on_a_layout_refuse_one_that_no_call_made)
{
    colo_layout_t l;
    const char *words;
    for (int i = 0; edited(&l, &words, i); i++) {
        const colo_layout_t before = l;
        colo_owned_t own, sentinel;
        memset(&sentinel, 0x5a, sizeof sentinel);
        own = sentinel;
        refuses(words, "check", "layout: ", colo_layout_check(&l, 4, 8, 2));
        refuses(words, "map of an offset", "layout: ", colo_layout_map_offset(&l, 0, 8));
        refuses(words, "map of a table", "layout: ", colo_layout_map_table(&l, table, 8, 8));
        refuses(words, "owned", "layout: ",
                colo_layout_owned(&l, 0, &(colo_shape_t){.samples = 4, .rows = 8, .features = 2},
                                  false, &own, NULL, 0, NULL));
        refuses(words, "split",
                "layout: ", colo_layout_split(&l, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
        refuses(words, "stage", "layout: ", colo_layout_stage(&l, "tp", 0));
        assert_memory_equal(&own, &sentinel, sizeof own);
        assert_memory_equal(&l, &before, sizeof l);
        assert_false(colo_layout_holds(&l, 0));
        assert_true(colo_layout_hash(&l) == colo_layout_hash(NULL));
    }
}

/* The fields of a grid alone. */
T_CASE(calls_on_a_grid_refuse_one_that_no_call_made)
{
    colo_layout_t l, made;
    const char *words;
    usual(&made);
    for (int i = 1; edited(&l, &words, i); i++) { /* edit 0 leaves no grid at all */
        int64_t coords[COLO_DIMS_MAX];
        colo_group_t group;
        if (memcmp(&l.grid, &made.grid, sizeof l.grid) == 0)
            continue;
        refuses(words, "coords", "grid: ", colo_grid_coords(&l.grid, 0, coords));
        refuses(words, "group", "grid: ", colo_grid_group(&l.grid, "tp", 0, &group));
        refuses(words, "layout", "layout: grid: ", colo_layout_init(&made, &l.grid));
    }
}

T_MAIN("bridge/layout_fields")
