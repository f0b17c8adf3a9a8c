/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_layout.c - what each rank owns, element by element against the oracle's lists, and every
 * rejection of a layout: its status, an error message with the numbers, nothing written.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"

#define MAX_RUNS 256

static bool is_range(int64_t lo, int64_t hi, const int64_t *want, int64_t n)
{
    return hi - lo == n && (n == 0 || lo == want[0]);
}

static colo_status_t owned_by(const colo_layout_t *layout, int64_t rank, ref_shape_t s, bool full,
                              colo_owned_t *own, colo_run_t *runs, int64_t cap, int64_t *nruns)
{
    const colo_shape_t shape = {.samples = s.b, .rows = s.n, .features = s.h};
    return colo_layout_owned(layout, rank, &shape, full, own, runs, cap, nruns);
}

/* Compares one rank; on a difference fails with the rank and its
 * local row. */
static void compare_rank(const char *what, const colo_layout_t *layout, const ref_side_t *side,
                         ref_shape_t shape, int64_t rank, bool full)
{
    T_ENDS(ref_part_free) ref_part_t want = {0};
    ref_part_make(&want, side, shape, rank, full);
    colo_owned_t got;
    colo_run_t runs[MAX_RUNS];
    int64_t nruns = -1, local = 0;
    memset(&got, 0x5a, sizeof got);
    assert_ok(owned_by(layout, rank, shape, full, &got, runs, MAX_RUNS, &nruns));
    bool ok = colo_layout_holds(layout, rank) == want.holds && got.rows == want.ns &&
              is_range(got.b0, got.b1, want.b, want.nb) &&
              is_range(got.h0, got.h1, want.h, want.nh);
    if (!want.holds)
        ok = ok && !(got.b0 | got.b1 | got.h0 | got.h1 | got.rows | nruns);
    for (int64_t i = 0; ok && i < nruns; i++) {
        ok = runs[i].local == local && runs[i].count >= 1;
        for (int64_t k = 0; ok && k < runs[i].count; k++, local += ok)
            ok = local < want.ns && runs[i].row + k == want.s[local];
    }
    if (!ok || local != want.ns)
        fail_msg("%s: rank %lld has samples [%lld,%lld) of %lld, features [%lld,%lld) of %lld, "
                 "%lld rows of %lld; local row %lld differs",
                 what, (long long)rank, (long long)got.b0, (long long)got.b1, (long long)want.nb,
                 (long long)got.h0, (long long)got.h1, (long long)want.nh, (long long)got.rows,
                 (long long)want.ns, (long long)local);
}

static void compare_all(const char *what, const ref_side_t *side, ref_shape_t shape)
{
    colo_layout_t layout;
    assert_ok(t_layout(&layout, side));
    if (side->map == REF_TABLE)
        assert_ok(colo_layout_map_table(&layout, side->table, shape.n, side->positions));
    assert_ok(colo_layout_check(&layout, shape.b, shape.n, shape.h));
    int64_t end = side->offset + ref_side_size(side);
    for (int64_t rank = 0; rank < end + 2; rank++)
        for (int full = 0; full < 2; full++)
            compare_rank(what, &layout, side, shape, rank, full);
}

T_CASE(every_rank_owns_what_slicing_lists_says)
{
    static const char *const orders[] = {"tp=%d,cp=%d,dp=%d", "cp=%d,dp=%d,tp=%d",
                                         "dp=%d,tp=%d,cp=%d"};
    int64_t cases = 0;
    for (int a = 1; a <= 4; a++)
        for (int b = 1; b <= 4; b++)
            for (int c = 1; c <= 4; c++)
                for (size_t o = 0; o < 3; o++)
                    for (int sp = 0; sp < 2; sp++) {
                        const char *spec = t_text(orders[o], a, b, c);
                        ref_side_t side = t_side(spec, true);
                        int64_t cp = ref_side_extent(&side, "cp"),
                                tp = ref_side_extent(&side, "tp");
                        if (sp)
                            t_side_split(&side, 1, "tp", REF_BLOCK, false);
                        ref_shape_t shape = {5, 2 * cp * tp, 2};
                        compare_all(spec, &side, shape);
                        cases++;
                    }
    assert_int_equal(cases, 4 * 4 * 4 * 3 * 2);
}

T_CASE(samples_need_not_divide_and_ranks_may_be_empty)
{
    for (int dp = 1; dp <= 9; dp++)
        for (int64_t b = 0; b <= 10; b++) {
            const char *spec = t_text("tp=2,dp=%d", dp);
            ref_side_t side = t_side(spec, true);
            compare_all(spec, &side, (ref_shape_t){b, 3, 2});
        }
}

T_CASE(rows_follow_the_positions_of_the_llm_sequence)
{
    /* 4 image tokens before 4 text tokens, C = 2: rows 0..3 belong to cp 0 0 1 1 */
    ref_side_t side = t_side("cp=2", false);
    side.positions = 8;
    compare_all("image first", &side, (ref_shape_t){2, 4, 1});
    for (int64_t offset = 0; offset <= 12; offset++)
        for (int cp = 1; cp <= 4; cp++) {
            const char *spec = t_text("cp=%d,dp=2,tp=2", cp);
            side = t_side(spec, false);
            side.positions = 48;
            side.map = REF_OFFSET;
            side.map_offset = offset;
            compare_all(spec, &side, (ref_shape_t){3, 5, 2});
            t_side_split(&side, 1, "tp", REF_BLOCK, false);
            compare_all(spec, &side, (ref_shape_t){3, 5, 2});
        }
}

T_CASE(rows_follow_a_table_of_positions)
{
    static const int64_t spread[] = {0, 1, 5, 6, 7, 20, 22, 23};
    static const int64_t shuffled[] = {17, 3, 22, 0, 1, 9, 8, 23};
    static const int64_t *const tables[] = {spread, shuffled};
    for (int t = 0; t < 2; t++)
        for (int cp = 1; cp <= 4; cp++)
            for (int sp = 0; sp < 2; sp++) {
                const char *spec = t_text("tp=2,cp=%d,dp=2", cp);
                ref_side_t side = t_side(spec, false);
                if (cp == 1) { /* something must cut the rows, or the table says nothing */
                    side.nsplits[1] = 0;
                    t_side_split(&side, 1, "tp", REF_BLOCK, false);
                } else if (sp) {
                    t_side_split(&side, 1, "tp", REF_BLOCK, false);
                }
                side.map = REF_TABLE;
                side.table = tables[t];
                side.positions = 48;
                compare_all(spec, &side, (ref_shape_t){3, 8, 1});
                side.positions = 24;
                if (24 % (2 * cp) == 0 && (!sp || 24 / cp % 2 == 0))
                    compare_all(spec, &side, (ref_shape_t){3, 8, 1});
            }
}

T_CASE(stages_blocks_features_and_extra_dims_cut_as_stated)
{
    ref_side_t side = t_side("pp=3,tp=2,ep=2,cp=2,dp=2@3", true);
    compare_all("last stage", &side, (ref_shape_t){3, 8, 3});
    side.stage = 0;
    compare_all("first stage", &side, (ref_shape_t){3, 8, 3});
    side.stage = 1;
    t_side_split(&side, 2, "tp", REF_BLOCK, false);
    compare_all("features over tp", &side, (ref_shape_t){3, 8, 3});
    compare_all("fewer features than ranks", &side, (ref_shape_t){3, 8, 1});
    t_side_split(&side, 0, "ep", REF_BLOCK, false);
    compare_all("samples over dp, then ep", &side, (ref_shape_t){7, 8, 3});
    ref_side_t block = t_side("tp=3,dp=2", false);
    t_side_split(&block, 1, "tp", REF_BLOCK, true);
    compare_all("context in blocks", &block, (ref_shape_t){3, 6, 1});
    ref_side_t two = t_side("xp=2,cp=2,dp=2", false);
    two.nsplits[1] = 0;
    t_side_split(&two, 1, "cp", REF_ZIGZAG, true);
    t_side_split(&two, 1, "xp", REF_ZIGZAG, true);
    compare_all("zigzag of a zigzag", &two, (ref_shape_t){2, 16, 1});
}

/* By ceil(L / C), as torch.chunk() and DTensor cut: the last parts are shorter, or empty. */
T_CASE(parts_by_ceil_are_full_until_nothing_is_left)
{
    for (int axis = 0; axis < 3; axis++)
        for (int parts = 1; parts <= 5; parts++)
            for (int64_t length = 0; length <= 13; length++) {
                const char *spec = t_text("ep=%d,xp=2", parts);
                ref_side_t side = t_side(spec, true);
                ref_shape_t shape = {axis == 0 ? length : 2, axis == 1 ? length : 4,
                                     axis == 2 ? length : 3};
                t_side_split(&side, axis, "ep", REF_CEIL, axis == 1);
                compare_all(spec, &side, shape);
                t_side_split(&side, axis, "xp", REF_CEIL,
                             false); /* of each part, by its own length */
                compare_all(spec, &side, shape);
            }
    ref_side_t side = t_side("tp=3,cp=2", true); /* zigzag, then what each rank has by ceil */
    t_side_split(&side, 1, "tp", REF_CEIL, false);
    compare_all("ceil of a zigzag", &side, (ref_shape_t){1, 20, 1});
}

T_CASE(the_default_layouts_are_those_of_the_documentation)
{
    static const struct {
        const char *spec, *extra;
    } cases[] = {
        {"tp=2,cp=2,pp=2,dp=2", NULL},
        {"tp=2,dp=3", NULL},
        {"pp=2,cp=3", NULL},
        {"tp=4", NULL},
        {"tp=2,ep=2,dp=2", NULL},
        /* declared extra dims replicate */
        {"tp=2,gtp_remat=2,cp=2,dp=2,pp=2", "gtp_remat"},
        {"xp=2,dp=2,gtp_remat=3", "gtp_remat-absent-xp"},
        {"tp=2,xp=1,dp=2", ""}, /* one rank: no copies to declare */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int src = 0; src < 2; src++) {
            ref_side_t side = t_side(cases[i].spec, src);
            colo_grid_t grid = t_grid(&side);
            colo_layout_t layout, plain;
            assert_ok(src ? colo_layout_init_src_extra(&layout, &grid, cases[i].extra)
                          : colo_layout_init_dst_extra(&layout, &grid, cases[i].extra));
            for (int64_t rank = 0; rank < ref_side_size(&side) + 1; rank++)
                compare_rank(cases[i].spec, &layout, &side, (ref_shape_t){5, 12, 2}, rank, false);
            if (cases[i].extra)
                continue;
            assert_ok(src ? colo_layout_init_src(&plain, &grid)
                          : colo_layout_init_dst(&plain, &grid));
            assert_true(colo_layout_hash(&plain) == colo_layout_hash(&layout));
        }
}

T_CASE(a_layout_without_splits_replicates_everything)
{
    ref_side_t side = t_side("tp=2,cp=2,pp=2,dp=2", true);
    colo_grid_t grid = t_grid(&side);
    colo_layout_t layout;
    assert_ok(colo_layout_init(&layout, &grid));
    memset(side.nsplits, 0, sizeof side.nsplits);
    side.stage_dim = NULL;
    for (int64_t rank = 0; rank < 16; rank++)
        compare_rank("everything replicated", &layout, &side, (ref_shape_t){5, 12, 2}, rank, false);
}

/* ---- rejections ---- */

static colo_layout_t base_layout(const char *spec)
{
    colo_layout_t layout;
    assert_ok(t_layout_of(spec, false, &layout));
    return layout;
}

/* check and owned refuse alike, and owned writes nothing */
static void refused(const colo_layout_t *layout, int64_t b, int64_t n, int64_t h, const char *word1,
                    const char *word2)
{
    assert_fails(colo_layout_check(layout, b, n, h), COLO_ERR_LAYOUT, word1);
    if (!strstr(colo_last_error(), word2))
        fail_msg("error message \"%s\" lacks \"%s\"", colo_last_error(), word2);
    colo_owned_t own, own0;
    colo_run_t run[4], run0[4];
    int64_t nruns = -77;
    memset(&own, 0x5a, sizeof own);
    memset(run, 0x5a, sizeof run);
    own0 = own;
    memcpy(run0, run, sizeof run);
    assert_fails(owned_by(layout, 0, (ref_shape_t){b, n, h}, false, &own, run, 4, &nruns),
                 COLO_ERR_LAYOUT, word1);
    assert_memory_equal(&own, &own0, sizeof own);
    assert_memory_equal(run, run0, sizeof run);
    assert_int_equal(nruns, -77);
}

T_CASE(positions_that_do_not_split_are_refused)
{
    colo_layout_t l = base_layout("tp=2,cp=2,dp=2");
    refused(&l, 4, 10, 2, "10", "4"); /* 2C = 4 does not divide 10 */
    refused(&l, 4, 7, 2, "7", "4");
    l = base_layout("tp=2,cp=3");
    refused(&l, 4, 8, 2, "8", "6");
    assert_ok(colo_layout_check(&l, 4, 12, 2));
    /* SP: tp does not divide S / C */
    l = base_layout("tp=4,cp=3");
    assert_ok(colo_layout_split(&l, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    refused(&l, 4, 6, 2, "4", "2");
    refused(&l, 4, 18, 2, "4", "6");
    assert_ok(colo_layout_check(&l, 4, 12, 2));
    l = base_layout("tp=4");
    assert_ok(colo_layout_split(&l, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    refused(&l, 4, 6, 2, "4", "6");
    assert_ok(colo_layout_check(&l, 4, 8, 2));
    /* the positions decide, not the rows */
    l = base_layout("cp=2");
    assert_ok(colo_layout_map_offset(&l, 1, 12));
    assert_ok(colo_layout_check(&l, 4, 7, 2));
    assert_ok(colo_layout_map_offset(&l, 0, 14));
    refused(&l, 4, 8, 2, "14", "4");
}

T_CASE(maps_that_leave_the_sequence_are_refused)
{
    colo_layout_t l = base_layout("cp=2");
    assert_ok(colo_layout_map_offset(&l, 5, 12));
    assert_ok(colo_layout_check(&l, 1, 7, 1));
    refused(&l, 1, 8, 1, "12", "5");
    static int64_t table[6] = {0, 3, 2, 7, 6, 1};
    l = base_layout("cp=2");
    assert_ok(colo_layout_map_table(&l, table, 6, 8));
    assert_ok(colo_layout_check(&l, 1, 6, 1));
    refused(&l, 1, 5, 1, "6", "5"); /* a table of another length */
    refused(&l, 1, 7, 1, "6", "7");
    table[4] = 8;
    refused(&l, 1, 6, 1, "8", "4"); /* row 4 outside */
    table[4] = -1;
    refused(&l, 1, 6, 1, "-1", "4");
    table[4] = 2;
    refused(&l, 1, 6, 1, "2", "4"); /* rows 2 and 4 at one position */
    table[4] = 6;
    /* identity map with more rows than positions */
    l = base_layout("cp=2");
    assert_ok(colo_layout_map_offset(&l, 0, 4));
    refused(&l, 1, 6, 1, "4", "5"); /* rows 0..5 */
    l = base_layout("cp=2");
    assert_ok(colo_layout_map_offset(&l, 1, 8));
    assert_fails(colo_layout_check(&l, 1, INT64_MAX, 1), COLO_ERR_LAYOUT, "at offset 1 reach past");
    assert_ok(colo_layout_map_table(&l, (int64_t[]){0}, 0, 8));
    assert_ok(colo_layout_check(&l, 1, 0, 1));
}

T_CASE(a_split_of_uneven_parts_must_divide_each_of_them)
{
    colo_layout_t l = base_layout("ep=3,tp=2");
    assert_ok(colo_layout_split(&l, COLO_AXIS_ROWS, "ep", COLO_SPLIT_CEIL));
    assert_ok(colo_layout_split(&l, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_check(&l, 1, 10, 1)); /* 4, 4, 2 */
    assert_fails(colo_layout_check(&l, 1, 11, 1), COLO_ERR_LAYOUT,
                 "3 positions do not split into 2 equal parts"); /* 4, 4, 3 */
    assert_fails(colo_layout_check(&l, 1, 9, 1), COLO_ERR_LAYOUT, "3 positions do not split");
    assert_ok(colo_layout_check(&l, 1, 0, 1));
}

T_CASE(the_largest_axis_is_cut_by_ceil_without_overflow)
{
    colo_layout_t l = base_layout("dp=9223372036854775807");
    colo_owned_t own;
    colo_layout_clear(&l, COLO_AXIS_SAMPLES);
    assert_ok(colo_layout_split(&l, COLO_AXIS_SAMPLES, "dp", COLO_SPLIT_CEIL));
    const ref_shape_t shape = {INT64_MAX - 1, 1, 1};
    assert_ok(owned_by(&l, INT64_MAX - 2, shape, false, &own, NULL, 0, NULL));
    assert_true(own.b0 == INT64_MAX - 2 && own.b1 == INT64_MAX - 1);
    assert_ok(owned_by(&l, INT64_MAX - 1, shape, false, &own, NULL, 0, NULL));
    assert_true(own.b0 == own.b1);
}

#define UNTOUCHED(layout, call, status, word)                   \
    do {                                                        \
        colo_layout_t before_ = layout;                         \
        assert_fails(call, status, word);                       \
        assert_memory_equal(&before_, &layout, sizeof before_); \
    } while (0)

T_CASE(splits_that_make_no_sense_are_refused)
{
    colo_layout_t l;
    memset(&l, 0, sizeof l);
    l = base_layout("tp=2,cp=2,dp=2,ep=2,xp=1");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, "zz", COLO_SPLIT_BLOCK), COLO_ERR_ARG, "zz");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, "zz", COLO_SPLIT_REPLICATE), COLO_ERR_ARG,
              "zz");
    UNTOUCHED(l, colo_layout_split_context(&l, "zz", COLO_SPLIT_BLOCK), COLO_ERR_ARG, "zz");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, "cp", COLO_SPLIT_BLOCK), COLO_ERR_ARG, "cp");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_FEATURES, "dp", COLO_SPLIT_BLOCK), COLO_ERR_ARG,
              "dp");
    UNTOUCHED(l, colo_layout_split_context(&l, "dp", COLO_SPLIT_ZIGZAG), COLO_ERR_ARG, "dp");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_SAMPLES, "tp", COLO_SPLIT_ZIGZAG), COLO_ERR_ARG,
              "samples");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_FEATURES, "tp", COLO_SPLIT_ZIGZAG), COLO_ERR_ARG,
              "features");
    UNTOUCHED(l, colo_layout_split(&l, (colo_axis_t)3, "tp", COLO_SPLIT_BLOCK), COLO_ERR_ARG, "3");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, "tp", (colo_split_kind_t)9), COLO_ERR_ARG,
              "9");
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, NULL, COLO_SPLIT_BLOCK), COLO_ERR_ARG,
              "dim");
    assert_fails(colo_layout_split(NULL, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK), COLO_ERR_ARG,
                 "layout");
    colo_dim_t dims[6] = {{"a", 1}, {"b", 1}, {"c", 1}, {"d", 1}, {"e", 1}, {"f", 1}};
    colo_grid_t grid;
    assert_ok(colo_grid_init(&grid, dims, 6, 0, 0));
    assert_ok(colo_layout_init(&l, &grid));
    for (int i = 0; i < COLO_SPLITS_MAX; i++)
        assert_ok(colo_layout_split(&l, COLO_AXIS_SAMPLES, dims[i].name, COLO_SPLIT_BLOCK));
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_SAMPLES, "e", COLO_SPLIT_BLOCK), COLO_ERR_ARG,
              "4");
    assert_ok(
        colo_layout_split(&l, COLO_AXIS_SAMPLES, "e", COLO_SPLIT_REPLICATE)); /* appends nothing */
    colo_layout_clear(NULL, COLO_AXIS_SAMPLES);
    colo_layout_clear(&l, (colo_axis_t)3);
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, "a", COLO_SPLIT_BLOCK), COLO_ERR_ARG,
              "'a' already");
    colo_layout_clear(&l, COLO_AXIS_SAMPLES);
    assert_ok(colo_layout_split(&l, COLO_AXIS_ROWS, "a", COLO_SPLIT_BLOCK)); /* free again */
    assert_ok(colo_layout_stage(&l, "b", 0));
    UNTOUCHED(l, colo_layout_split(&l, COLO_AXIS_ROWS, "b", COLO_SPLIT_BLOCK), COLO_ERR_ARG,
              "'b' already");
}

/* Ranks along such a dim may hold different data, or it may be a typing error. */
T_CASE(dims_without_a_role_are_refused_unless_declared)
{
    static const struct {
        const char *spec, *extra, *words;
    } cases[] = {
        {"tp=2,gtp_remat=2,dp=2", NULL, "dim 'gtp_remat' of extent 2 has no role"},
        {"tp=2,gtp_remat=2,dp=2", "", "dim 'gtp_remat' of extent 2 has no role"},
        {"tp=2,gtp_remat=2,dp=2", "gtp-remat-gtp_rema-gtp_rematt", "dim 'gtp_remat'"},
        {"tp1_dp4", NULL, "dim 'tp1_dp' of extent 4 has no role: expected tp, cp, pp, dp or ep"},
        {"DP=4", "dp", "dim 'DP' of extent 4 has no role"},
        {"a=2,b=3", "a", "dim 'b' of extent 3 has no role"},
        {"tp=2,dp=2", "dp", "extra dim 'dp': its ranks hold different data"},
        {"cp=2,dp=2", "tp-cp", "extra dim 'cp': its ranks hold different data"},
        {"pp=1,dp=2", "pp", "extra dim 'pp': its ranks hold different data"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        colo_grid_t grid;
        colo_layout_t l;
        memset(&l, 0x33, sizeof l);
        assert_ok(colo_grid_parse(&grid, cases[i].spec, 0));
        UNTOUCHED(l, colo_layout_init_src_extra(&l, &grid, cases[i].extra), COLO_ERR_ARG,
                  cases[i].words);
        UNTOUCHED(l, colo_layout_init_dst_extra(&l, &grid, cases[i].extra), COLO_ERR_ARG,
                  cases[i].words);
        if (cases[i].extra)
            continue;
        UNTOUCHED(l, colo_layout_init_src(&l, &grid), COLO_ERR_ARG, cases[i].words);
        UNTOUCHED(l, colo_layout_init_dst(&l, &grid), COLO_ERR_ARG, cases[i].words);
    }
}

T_CASE(maps_and_stages_that_make_no_sense_are_refused)
{
    static const int64_t table[2] = {0, 1};
    colo_layout_t l = base_layout("tp=2,cp=2,pp=2");
    UNTOUCHED(l, colo_layout_map_offset(&l, -1, 8), COLO_ERR_ARG, "-1");
    UNTOUCHED(l, colo_layout_map_offset(&l, 0, -8), COLO_ERR_ARG, "-8");
    UNTOUCHED(l, colo_layout_map_offset(&l, 8, 8), COLO_ERR_ARG, "offset 8 of 8 positions");
    UNTOUCHED(l, colo_layout_map_table(&l, NULL, 2, 8), COLO_ERR_ARG, "table");
    UNTOUCHED(l, colo_layout_map_table(&l, table, -2, 8), COLO_ERR_ARG, "-2");
    UNTOUCHED(l, colo_layout_map_table(&l, table, 2, 1), COLO_ERR_ARG, "2 rows for 1 positions");
    UNTOUCHED(l, colo_layout_map_table(&l, table, 0, 0), COLO_ERR_ARG, "0 rows for 0 positions");
    UNTOUCHED(l, colo_layout_stage(&l, "zz", 0), COLO_ERR_ARG, "zz");
    UNTOUCHED(l, colo_layout_stage(&l, "pp", 2), COLO_ERR_ARG, "2");
    UNTOUCHED(l, colo_layout_stage(&l, "pp", -3), COLO_ERR_ARG, "-3");
    UNTOUCHED(l, colo_layout_stage(&l, NULL, 0), COLO_ERR_ARG, "dim");
    UNTOUCHED(l, colo_layout_stage(&l, "cp", 0), COLO_ERR_ARG, "'cp' already splits an axis");
    assert_fails(colo_layout_map_offset(NULL, 0, 8), COLO_ERR_ARG, "layout is NULL");
    assert_fails(colo_layout_map_table(NULL, table, 2, 8), COLO_ERR_ARG, "layout is NULL");
    assert_fails(colo_layout_stage(NULL, "pp", 0), COLO_ERR_ARG, "layout is NULL");
    assert_ok(colo_layout_stage(&l, NULL, COLO_STAGE_ANY));
    assert_true(colo_layout_holds(&l, 0) && colo_layout_holds(&l, 7));
    assert_ok(colo_layout_stage(&l, "pp", COLO_STAGE_LAST));
    assert_true(!colo_layout_holds(&l, 0) && colo_layout_holds(&l, 7));
    assert_false(colo_layout_holds(&l, 8));
    assert_false(colo_layout_holds(&l, -1));
}

T_CASE(missing_arguments_and_bad_sizes_are_refused)
{
    colo_layout_t l;
    colo_owned_t own;
    memset(&l, 0x33, sizeof l);
    UNTOUCHED(l, colo_layout_init(&l, NULL), COLO_ERR_ARG, "grid");
    UNTOUCHED(l, colo_layout_init_src(&l, NULL), COLO_ERR_ARG, "grid");
    UNTOUCHED(l, colo_layout_init_dst(&l, NULL), COLO_ERR_ARG, "grid");
    colo_grid_t none = {0};
    UNTOUCHED(l, colo_layout_init(&l, &none), COLO_ERR_ARG, "0 dims, expected 1..16");
    UNTOUCHED(l, colo_layout_init_src(&l, &none), COLO_ERR_ARG, "0 dims, expected 1..16");
    l = base_layout("tp=2");
    assert_fails(colo_layout_init(NULL, &l.grid), COLO_ERR_ARG, "layout");
    assert_fails(colo_layout_init_src(NULL, &l.grid), COLO_ERR_ARG, "layout is NULL");
    assert_fails(colo_layout_init_dst(NULL, &l.grid), COLO_ERR_ARG, "layout is NULL");
    assert_fails(colo_layout_check(NULL, 1, 1, 1), COLO_ERR_ARG, "layout");
    assert_true(colo_layout_check(&l, -3, 1, 1) < 0);
    assert_non_null(strstr(colo_last_error(), "-3"));
    assert_true(colo_layout_check(&l, 1, -3, 1) < 0);
    assert_non_null(strstr(colo_last_error(), "-3"));
    assert_true(colo_layout_check(&l, 1, 1, -3) < 0);
    assert_non_null(strstr(colo_last_error(), "-3"));
    assert_fails(colo_layout_owned(&l, 0, NULL, false, &own, NULL, 0, NULL), COLO_ERR_ARG,
                 "shape is NULL");
    const ref_shape_t one = {1, 1, 1};
    assert_fails(owned_by(&l, 0, one, false, NULL, NULL, 0, NULL), COLO_ERR_ARG, "owned");
    assert_ok(owned_by(&l, 0, one, false, &own, NULL, 0, NULL)); /* runs are optional */
    /* memory for one run where there are two: the count is told, nothing else */
    l = base_layout("cp=2");
    colo_run_t run[2];
    int64_t n = -1;
    memset(&own, 0x5a, sizeof own);
    memset(run, 0x5a, sizeof run);
    colo_owned_t own0 = own;
    colo_run_t run0[2];
    memcpy(run0, run, sizeof run);
    assert_fails(owned_by(&l, 0, (ref_shape_t){1, 8, 1}, false, &own, run, 1, &n), COLO_ERR_ARG,
                 "2");
    assert_int_equal(n, 2);
    assert_memory_equal(&own, &own0, sizeof own);
    assert_memory_equal(run, run0, sizeof run);
}

T_CASE(the_largest_grids_divide_without_overflow)
{
    colo_grid_t g;
    colo_layout_t l;
    colo_owned_t own;
    int64_t n;
    assert_ok(colo_grid_parse(&g, "cp=4611686018427387904", 0)); /* 2 cp is 2^63 */
    assert_ok(colo_layout_init_src(&l, &g));
    assert_fails(colo_layout_check(&l, 1, 8, 1), COLO_ERR_LAYOUT, "9223372036854775808");
    assert_fails(colo_layout_check(&l, 1, INT64_C(1) << 62, 1), COLO_ERR_LAYOUT,
                 "9223372036854775808");
    assert_ok(colo_layout_check(&l, 1, 0, 1)); /* nothing splits into nothing */
    assert_ok(owned_by(&l, INT64_C(1) << 61, (ref_shape_t){1, 0, 1}, false, &own, NULL, 0, &n));
    assert_int_equal(own.rows, 0);
    assert_int_equal(n, 0);
}

T_CASE(hashes_tell_layouts_apart_and_read_tables)
{
    int64_t t1[4] = {0, 1, 2, 3}, t2[4] = {0, 1, 2, 3};
    enum { N = 10 };
    colo_layout_t l[N];
    for (int i = 0; i < N; i++)
        l[i] = base_layout("tp=2,cp=2,dp=2,pp=2");
    l[1] = base_layout("tp=2,dp=2,cp=2,pp=2");
    l[2] = base_layout("tp=2,cp=2,dp=4,pp=2");
    assert_ok(colo_layout_split(&l[3], COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_split_context(&l[4], "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_split(&l[5], COLO_AXIS_FEATURES, "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_stage(&l[6], "pp", COLO_STAGE_LAST));
    assert_ok(colo_layout_map_offset(&l[7], 2, 8));
    assert_ok(colo_layout_map_offset(&l[8], 3, 8));
    assert_ok(colo_layout_map_table(&l[9], t1, 4, 8));
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            assert_int_equal(i == j, colo_layout_hash(&l[i]) == colo_layout_hash(&l[j]));
    colo_layout_t a = l[0], b = l[0];
    assert_ok(colo_layout_map_table(&a, t1, 4, 8));
    assert_ok(colo_layout_map_table(&b, t2, 4, 8));
    assert_true(colo_layout_hash(&a) == colo_layout_hash(&b)); /* by contents, not by pointer */
    t2[3] = 7;
    assert_true(colo_layout_hash(&a) != colo_layout_hash(&b));
}

T_MAIN("bridge/layout")
