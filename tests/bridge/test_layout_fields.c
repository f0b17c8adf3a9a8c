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

#define EDIT(name, ...)                \
    static void name(colo_layout_t *l) \
    {                                  \
        __VA_ARGS__;                   \
    }
EDIT(forgotten, memset(l, 0, sizeof *l))
EDIT(splits_below_none, l->nsplits[0] = -1)
EDIT(splits_beyond_the_most, l->nsplits[1] = COLO_MAX_SPLITS + 1)
EDIT(split_over_a_dim_below_the_first, l->split[0][0].dim = -1)
EDIT(split_over_a_dim_beyond_the_last, l->split[1][0].dim = 4)
EDIT(split_of_no_kind, l->split[0][0].kind = (colo_split_kind_t)4)
EDIT(rows_split_of_no_kind, l->split[1][0].kind = (colo_split_kind_t)4)
EDIT(table_of_no_positions, l->map = COLO_MAP_TABLE, l->positions = 0)
EDIT(split_that_replicates, l->split[0][0].kind = COLO_REPLICATE)
EDIT(zigzag_of_samples, l->split[0][0].kind = COLO_ZIGZAG)
EDIT(split_twice, l->split[0][0].dim = 1)
EDIT(stage_dim_below_none, l->stage_dim = -2)
EDIT(stage_dim_beyond_the_last, l->stage_dim = 16)
EDIT(stage_dim_that_splits, l->stage_dim = 1)
EDIT(stage_below_the_first, l->stage = -1)
EDIT(stage_beyond_the_last, l->stage = 2)
EDIT(map_of_no_kind, l->map = (colo_map_kind_t)3)
EDIT(offset_below_the_first, l->offset = -5)
EDIT(offset_beyond_the_last, l->offset = 8)
EDIT(offset_of_the_identity, l->map = COLO_MAP_IDENTITY, l->offset = 1)
EDIT(positions_below_none, l->positions = -8)
EDIT(positions_of_the_identity, l->map = COLO_MAP_IDENTITY, l->positions = -8)
EDIT(table_that_is_null, l->map = COLO_MAP_TABLE, l->table_rows = 4)
EDIT(table_of_too_many_rows, l->map = COLO_MAP_TABLE, l->table = table, l->table_rows = 9)
EDIT(table_of_fewer_rows_than_none, l->map = COLO_MAP_TABLE, l->table = table, l->table_rows = -1)
EDIT(rows_of_a_table_that_is_not_there, l->table_rows = 1 << 30)
EDIT(grid_of_too_many_dims, l->grid.ndims = 17)
EDIT(extent_of_none, l->grid.extent[0] = 0)
EDIT(extent_below_none, l->grid.extent[3] = -2)
EDIT(extent_that_overflows, l->grid.extent[3] = INT64_MAX)
EDIT(stride_of_another_grid, l->grid.stride[1] = 4)
EDIT(stride_of_none, l->grid.stride[0] = 0)
EDIT(size_of_another_grid, l->grid.size = 32)
EDIT(grid_offset_below_none, l->grid.offset = -1)
EDIT(grid_offset_that_overflows, l->grid.offset = INT64_MAX - 3)
EDIT(name_without_an_end, memset(l->grid.name[1], 'c', sizeof l->grid.name[1]))

static const struct {
    void (*edit)(colo_layout_t *l);
    const char *words;
} edits[] = {
    {forgotten, "layout: not initialised"},
    {splits_below_none, "samples have -1 splits, expected 0..4"},
    {splits_beyond_the_most, "rows have 5 splits, expected 0..4"},
    {split_over_a_dim_below_the_first, "split 0 of samples is over dim -1, expected 0..3"},
    {split_over_a_dim_beyond_the_last, "split 0 of rows is over dim 4, expected 0..3"},
    {split_of_no_kind, "split 0 of samples has kind 4, expected BLOCK or CEIL"},
    {rows_split_of_no_kind, "split 0 of rows has kind 4, expected BLOCK, ZIGZAG or CEIL"},
    {table_of_no_positions, "0 positions, expected at least 1"},
    {split_that_replicates, "split 0 of samples has kind 0"},
    {zigzag_of_samples, "split 0 of samples has kind 2, expected BLOCK or CEIL"},
    {split_twice, "dim 'cp' is split over twice"},
    {stage_dim_below_none, "stage_dim -2, expected -1..3"},
    {stage_dim_beyond_the_last, "stage_dim 16, expected -1..3"},
    {stage_dim_that_splits, "dim 'cp' is the stage and splits an axis, too"},
    {stage_below_the_first, "stage -1, expected 0..1"},
    {stage_beyond_the_last, "stage 2, expected 0..1"},
    {map_of_no_kind, "map 3, expected 0..2"},
    {offset_below_the_first, "offset -5, expected 0..7"},
    {offset_beyond_the_last, "offset 8, expected 0..7"},
    {offset_of_the_identity, "offset 1, expected 0..0"},
    {positions_below_none, "-8 positions, expected at least 1"},
    {positions_of_the_identity, "-8 positions, expected at least 0"},
    {table_that_is_null, "no position table of 4 rows"},
    {table_of_too_many_rows, "a position table of 9 rows, expected 0..8"},
    {table_of_fewer_rows_than_none, "a position table of -1 rows, expected 0..8"},
    {rows_of_a_table_that_is_not_there, "no position table of 1073741824 rows, expected 0..0"},
    {grid_of_too_many_dims, "17 dims, expected 1..16"},
    {extent_of_none, "dim 0 'tp' was not made by this library: found extent 0"},
    {extent_below_none, "dim 3 'dp' was not made by this library: found extent -2"},
    {extent_that_overflows, "dim 3 'dp' was not made by this library"},
    {stride_of_another_grid,
     "dim 1 'cp' was not made by this library: found extent 2 and stride 4"},
    {stride_of_none, "found extent 2 and stride 0, expected an extent of at least 1 and stride 1"},
    {size_of_another_grid, "found size 32 and rank offset 0, expected size 16"},
    {grid_offset_below_none, "rank offset -1"},
    {grid_offset_that_overflows, "rank offset 9223372036854775804"},
    {name_without_an_end, "dim 1 'ccccccccccccccc' was not made by this library"},
};
#define EDITS (sizeof edits / sizeof edits[0])

static void refuses(size_t i, const char *call, const char *object, colo_status_t st)
{
    const char *said = colo_last_error();
    if (st != COLO_ERR_ARG || !strstr(said, edits[i].words) ||
        strncmp(said, object, strlen(object)) != 0)
        fail_msg("edit %zu, %s: %s \"%s\", expected COLO_ERR_ARG \"%s\" ... \"%s\"", i, call,
                 colo_status_name(st), said, object, edits[i].words);
}

T_CASE(a_plan_refuses_a_layout_that_no_call_made)
{
    colo_plan_t *const sentinel = (colo_plan_t *)(uintptr_t)0x1230;
    for (size_t i = 0; i < EDITS; i++) {
        colo_layout_t good, bad;
        colo_plan_t *p = sentinel;
        usual(&good);
        usual(&bad);
        edits[i].edit(&bad);
        colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = &bad, .dst = &good,
                                .shape = {4, 8, 2, 0}};
        refuses(i, "plan of a source", "plan: config.src: layout: ", colo_plan_create(&p, &c, 0));
        refuses(i, "collective check", "layout: ", colo_plan_collective_check(&c));
        c.src = &good;
        c.dst = &bad;
        refuses(i, "plan of a destination",
                "plan: config.dst: layout: ", colo_plan_create(&p, &c, 0));
        refuses(i, "collective check", "layout: ", colo_plan_collective_check(&c));
        assert_ptr_equal(p, sentinel);
    }
}

T_CASE(calls_on_a_layout_refuse_one_that_no_call_made)
{
    for (size_t i = 0; i < EDITS; i++) {
        colo_layout_t l, before;
        colo_owned_t own, sentinel;
        memset(&sentinel, 0x5a, sizeof sentinel);
        own = sentinel;
        usual(&l);
        edits[i].edit(&l);
        before = l;
        refuses(i, "check", "layout: ", colo_layout_check(&l, 4, 8, 2));
        refuses(i, "map of an offset", "layout: ", colo_layout_map_offset(&l, 0, 8));
        refuses(i, "map of a table", "layout: ", colo_layout_map_table(&l, table, 8, 8));
        refuses(i, "owned", "layout: ",
                colo_layout_owned(&l, 0, &(colo_shape_t){.samples = 4, .rows = 8, .features = 2},
                                  false, &own, NULL, 0, NULL));
        refuses(i, "split", "layout: ", colo_layout_split(&l, COLO_ROWS, "tp", COLO_BLOCK));
        refuses(i, "stage", "layout: ", colo_layout_stage(&l, "tp", 0));
        assert_memory_equal(&own, &sentinel, sizeof own);
        assert_memory_equal(&l, &before, sizeof l);
        assert_false(colo_layout_holds(&l, 0));
        assert_true(colo_layout_hash(&l) == colo_layout_hash(NULL));
    }
}

/* The fields of a grid alone. */
T_CASE(calls_on_a_grid_refuse_one_that_no_call_made)
{
    for (size_t i = 0; i < EDITS; i++) {
        colo_layout_t l, made;
        int64_t coords[COLO_MAX_DIMS];
        colo_group_t group;
        usual(&l);
        made = l;
        edits[i].edit(&l);
        if (memcmp(&l.grid, &made.grid, sizeof l.grid) == 0 || edits[i].edit == forgotten)
            continue;
        refuses(i, "coords", "grid: ", colo_grid_coords(&l.grid, 0, coords));
        refuses(i, "group", "grid: ", colo_grid_group(&l.grid, "tp", 0, &group));
        refuses(i, "layout", "layout: grid: ", colo_layout_init(&made, &l.grid));
    }
}

T_MAIN("bridge/layout_fields")
