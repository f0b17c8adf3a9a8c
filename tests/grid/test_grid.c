/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grid.c - coordinates, groups and keys against counting (ref_grid), golden cases of the
 * reference orders, and every rejection: its status, its error message, and nothing written.
 */
#include "harness/harness.h"
#include "ref/ref_grid.h"

#include <time.h>

static const char *const letters[REF_DIMS] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                              "i", "j", "k", "l", "m", "n", "o", "p"};

/* A grid and its oracle, dims named a, b, c ... */
typedef struct pair {
    colo_grid_t grid;
    ref_grid ref;
} pair;

static void make(pair *p, int n, const int64_t *extent, int64_t offset)
{
    colo_dim_t dims[REF_DIMS];
    for (int d = 0; d < n; d++)
        dims[d] = (colo_dim_t){letters[d], extent[d]};
    assert_ok(colo_grid_init(&p->grid, dims, n, offset, 0));
    assert_true(ref_grid_make(&p->ref, n, extent));
}

static void list_dims(char *text, const int *given, int n)
{
    text[0] = '\0';
    for (int k = 0; k < n; k++) {
        strcat(text, k ? "-" : "");
        strcat(text, letters[given[k]]);
    }
}

/* ---- against counting ---- */

static void check_coords(const pair *p)
{
    const colo_grid_t *g = &p->grid;
    assert_int_equal(g->size, p->ref.size);
    for (int64_t r = 0; r < g->size; r++) {
        int64_t c[REF_DIMS], back = -1;
        assert_ok(colo_grid_coords(g, g->offset + r, c));
        for (int d = 0; d < g->ndims; d++)
            if (c[d] != p->ref.coord[r * g->ndims + d])
                fail_msg("rank %lld dim %d: %lld, counted %d", (long long)r, d, (long long)c[d],
                         (int)p->ref.coord[r * g->ndims + d]);
        assert_ok(colo_grid_rank(g, c, &back));
        if (back != g->offset + r)
            fail_msg("rank %lld came back as %lld", (long long)(g->offset + r), (long long)back);
    }
}

/* Every rank's group against the oracle's; each member of each group once. */
static void check_groups(const pair *p, const char *dims, const ref_groups *want, bool as_given)
{
    const colo_grid_t *g = &p->grid;
    for (int64_t r = 0; r < g->size; r++) {
        colo_group_t got;
        int64_t rank = g->offset + r, first = want->member[want->group[r] * want->each];
        assert_ok(as_given ? colo_grid_group_as_given(g, dims, rank, &got)
                           : colo_grid_group(g, dims, rank, &got));
        if (got.ordinal != want->group[r] || got.index != want->index[r] ||
            got.size != want->each || got.count != want->count || got.base != g->offset + first)
            fail_msg("'%s' rank %lld: group %lld of %lld, index %lld of %lld, base %lld; counted "
                     "%lld of %lld, %lld of %lld, %lld",
                     dims, (long long)rank, (long long)got.ordinal, (long long)got.count,
                     (long long)got.index, (long long)got.size, (long long)got.base,
                     (long long)want->group[r], (long long)want->count, (long long)want->index[r],
                     (long long)want->each, (long long)(g->offset + first));
        if (colo_group_member(&got, want->index[r]) != rank ||
            colo_group_find(&got, rank) != want->index[r])
            fail_msg("'%s' rank %lld: not found at its own index %lld", dims, (long long)rank,
                     (long long)want->index[r]);
        if (want->index[r] != 0)
            continue;
        for (int64_t i = 0; i < want->each; i++) {
            int64_t member = g->offset + want->member[want->group[r] * want->each + i];
            if (colo_group_member(&got, i) != member || colo_group_find(&got, member) != i)
                fail_msg("'%s' group %lld member %lld: %lld, counted %lld", dims,
                         (long long)got.ordinal, (long long)i,
                         (long long)colo_group_member(&got, i), (long long)member);
        }
        for (int64_t q = -g->size; g->size < 100 && q < 2 * g->size; q++) { /* and no other */
            bool member = q >= 0 && q < g->size && want->group[q] == want->group[r];
            if (colo_group_find(&got, g->offset + q) != (member ? want->index[q] : -1))
                fail_msg("'%s' group %lld: rank %lld is found at %lld", dims,
                         (long long)got.ordinal, (long long)(g->offset + q),
                         (long long)colo_group_find(&got, g->offset + q));
        }
        if (!as_given) {
            colo_group_t found;
            assert_ok(colo_grid_group_at(g, dims, want->group[r], &found));
            assert_memory_equal(&found, &got, sizeof found);
        }
    }
}

/* Groups do not depend on the order of the list: some grids are asked by the reverse, too. */
static void check_set(const pair *p, unsigned set)
{
    bool in[REF_DIMS] = {false};
    int given[REF_DIMS] = {0}, reverse[REF_DIMS] = {0}, n = 0;
    char dims[COLO_KEY_MAX];
    T_ENDS(ref_groups_free) ref_groups want;
    for (int d = 0; d < p->grid.ndims; d++)
        if ((in[d] = set >> d & 1))
            given[n++] = d;
    list_dims(dims, given, n);
    assert_true(ref_groups_make(&want, &p->ref, in));
    check_groups(p, dims, &want, false);
    for (int k = 0; k < n; k++)
        reverse[k] = given[n - 1 - k];
    list_dims(dims, reverse, n);
    if (n > 1 && p->ref.size < 100)
        check_groups(p, dims, &want, false);
}

T_CASE(every_small_grid_in_every_dim_order_matches_counting)
{
    static const int64_t shapes[][4] = {{2, 3, 4, 1}, {1, 2, 2, 3}, {3, 1, 5, 2}, {2, 2, 2, 2}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        for (int code = 0; code < 256; code++) { /* the 24 permutations among the 4-digit codes */
            int64_t extent[4];
            unsigned seen = 0;
            for (int d = 0; d < 4; d++) {
                int pick = code >> (2 * d) & 3;
                seen |= 1u << pick;
                extent[d] = shapes[s][pick];
            }
            if (seen != 15)
                continue;
            pair p;
            make(&p, 4, extent, 7 * (int64_t)s);
            check_coords(&p);
            for (unsigned set = 1; set < 16; set++)
                check_set(&p, set);
            ref_grid_free(&p.ref);
        }
    }
}

T_CASE(as_given_order_matches_sorting_by_the_given_dims)
{
    static const int64_t extent[4] = {2, 3, 1, 4};
    pair p;
    make(&p, 4, extent, 5);
    for (int n = 1; n <= 4; n++) {
        for (int code = 0; code < 256; code++) { /* every ordered choice of n dims */
            int given[4];
            unsigned seen = 0;
            for (int k = 0; k < n; k++) {
                given[k] = code >> (2 * k) & 3;
                seen |= 1u << given[k];
            }
            if (code >> (2 * n) || __builtin_popcount(seen) != n)
                continue;
            char dims[COLO_KEY_MAX];
            T_ENDS(ref_groups_free) ref_groups want;
            list_dims(dims, given, n);
            assert_true(ref_groups_make_as_given(&want, &p.ref, given, n));
            check_groups(&p, dims, &want, true);
        }
    }
    ref_grid_free(&p.ref);
}

T_CASE(a_million_ranks_match_counting)
{
    static const struct {
        int n;
        int64_t offset, extent[16], some[16];
        unsigned sets[8]; /* up to 0 */
    } of[] = {{16,
               0,
               {2, 2, 4, 1, 4, 2, 2, 1, 8, 2, 4, 2, 2, 2, 2, 4},
               {2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2},
               {0x0001, 0x8421, 0x7fff}},
              {5, 1000, {8, 4, 16, 32, 64}, {4, 2, 8, 16, 16}, {1, 6, 11, 16, 21, 26, 31}}};
    const bool all = t_scaled(100) == 100;
    for (int i = 0; i < 2; i++) {
        pair p;
        make(&p, of[i].n, all ? of[i].extent : of[i].some, of[i].offset);
        assert_int_equal(p.ref.size, all ? 1048576 : 16384);
        check_coords(&p);
        for (int k = 0; of[i].sets[k]; k++)
            check_set(&p, of[i].sets[k]);
        ref_grid_free(&p.ref);
    }
}

/* A materialised group of this grid would take terabytes; 100,000 queries take a moment. */
T_CASE(a_grid_of_two_to_the_forty_answers_at_once)
{
    colo_grid_t g;
    colo_group_t group;
    struct timespec t0, t1;
    assert_ok(colo_grid_parse(&g, "tp=8,cp=1024,pp=128,dp=1048576", 0));
    assert_true(g.size == INT64_C(1) << 40);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t0);
    for (int64_t k = 0; k < 100000; k++) {
        int64_t rank = (g.size - 1) - k * 10995116;
        assert_ok(colo_grid_group(&g, "dp-cp", rank, &group));
        assert_true(group.size == INT64_C(1) << 30);
        assert_true(group.count == 1024);
        assert_true(colo_group_member(&group, group.index) == rank);
        assert_true(colo_group_find(&group, rank) == group.index);
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t1);
    assert_true((double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec) < 5);
    /* the last rank by hand: tp 7, cp 1023, pp 127, dp 1048575 */
    assert_ok(colo_grid_group(&g, "dp-cp", g.size - 1, &group));
    assert_true(group.base == 7 + INT64_C(127) * 8 * 1024);
    assert_true(group.ordinal == 7 + 127 * 8);
    assert_true(group.index == group.size - 1);
    assert_true(colo_group_member(&group, 1) == group.base + 8);
    assert_true(colo_group_member(&group, 1024) == group.base + 8 * 1024 * 128);
}

T_CASE(the_largest_grid_that_fits_63_bits_works)
{
    colo_grid_t g;
    int64_t c[2], rank;
    colo_dim_t dims[] = {{"a", INT64_MAX}};
    assert_ok(colo_grid_init(&g, dims, 1, 0, 0));
    assert_true(colo_grid_has_rank(&g, INT64_MAX - 1));
    assert_false(colo_grid_has_rank(&g, INT64_MAX));
    colo_dim_t two[] = {{"a", INT64_C(1) << 31}, {"b", (INT64_C(1) << 31)}};
    assert_ok(colo_grid_init(&g, two, 2, (INT64_C(1) << 62) - 1, INT64_MAX));
    assert_ok(colo_grid_coords(&g, INT64_MAX - 1, c));
    assert_true(c[0] == (INT64_C(1) << 31) - 1 && c[1] == (INT64_C(1) << 31) - 1);
    assert_ok(colo_grid_rank(&g, c, &rank));
    assert_true(rank == INT64_MAX - 1);
}

/* ---- golden ---- */

T_CASE(the_first_dim_varies_fastest_and_the_offset_shifts_all)
{
    static const struct {
        const char *dims;
        int64_t rank, members[4];
        bool as_given;
    } of[] = {{"tp", 11, {10, 11}, false},
              {"cp", 12, {10, 12}, false},
              {"dp", 14, {10, 14}, false},
              {"cp-dp", 17, {11, 15, 13, 17}, true},
              {"dp-cp", 17, {11, 13, 15, 17}, false}};
    static const int64_t others[] = {12, 9, 19, INT64_MIN, INT64_MAX};
    colo_grid_t g;
    colo_group_t group;
    int64_t c;
    assert_ok(colo_grid_parse(&g, "tp=2,cp=2,dp=2@10", 18));
    for (int i = 0; i < 5; i++) {
        assert_ok(of[i].as_given ? colo_grid_group_as_given(&g, of[i].dims, of[i].rank, &group)
                                 : colo_grid_group(&g, of[i].dims, of[i].rank, &group));
        for (int64_t k = 0; k < group.size; k++)
            assert_int_equal(colo_group_member(&group, k), of[i].members[k]);
    }
    assert_int_equal(group.index, 3);
    assert_int_equal(group.ordinal, 1);
    for (int i = 0; i < 5; i++)
        assert_int_equal(colo_group_find(&group, others[i]), -1);
    for (int i = 0; i < 3; i++) {
        assert_ok(colo_grid_coord(&g, 15, ((const char *[]){"dp", "cp", "pp"})[i], &c));
        assert_int_equal(c, i == 0);
    }
}

T_CASE(keys_name_dims_in_reversed_naming_order)
{
    static const char *const of[][2] = {
        {"tp-dp", "dp-tp"}, {"dp-tp", "dp-tp"}, {"tp-cp-pp-dp", "dp-pp-cp-tp"}, {"cp", "cp"}};
    colo_grid_t g;
    char key[COLO_KEY_MAX];
    assert_ok(colo_grid_parse(&g, "tp=2,cp=2,pp=1,dp=2", 0));
    for (int i = 0; i < 4; i++) {
        assert_ok(colo_grid_key(&g, of[i][0], key));
        assert_string_equal(key, of[i][1]);
    }
}

T_CASE(the_longest_key_fits)
{
    char name[16][16], list[COLO_KEY_MAX] = "", want[COLO_KEY_MAX] = "", key[COLO_KEY_MAX];
    colo_dim_t dims[16];
    colo_grid_t g;
    for (int d = 0; d < 16; d++) {
        snprintf(name[d], sizeof name[d], "abcdefghijklmn%c", 'A' + d);
        dims[d] = (colo_dim_t){name[d], 1};
    }
    for (int d = 0; d < 16; d++) {
        strcat(strcat(list, d ? "-" : ""), name[d]);
        strcat(strcat(want, d ? "-" : ""), name[15 - d]);
    }
    assert_int_equal(strlen(list), COLO_KEY_MAX - 1);
    assert_ok(colo_grid_init(&g, dims, 16, 0, 1));
    assert_ok(colo_grid_key(&g, list, key));
    assert_string_equal(key, want);
}

T_CASE(getters_answer_for_dims_that_are_not_there)
{
    colo_grid_t g;
    assert_ok(colo_grid_parse(&g, "tp=2,cp=3,dp=4@1", 0));
    assert_int_equal(colo_grid_dim(&g, "cp"), 1);
    assert_int_equal(colo_grid_dim(&g, "c"), -1);
    assert_int_equal(colo_grid_dim(&g, "cpp"), -1);
    assert_int_equal(colo_grid_dim(&g, ""), -1);
    assert_int_equal(colo_grid_dim(&g, NULL), -1);
    assert_int_equal(colo_grid_extent(&g, "dp"), 4);
    assert_int_equal(colo_grid_extent(&g, "pp"), 1);
    assert_false(colo_grid_has_rank(&g, 0));
    assert_true(colo_grid_has_rank(&g, 1));
    assert_true(colo_grid_has_rank(&g, 24));
    assert_false(colo_grid_has_rank(&g, 25));
    assert_false(colo_grid_has_rank(&g, INT64_MIN));
}

T_CASE(equal_grids_hash_alike_and_others_do_not)
{
    static const char *const specs[] = {"tp=2,dp=4",   "dp=4,tp=2",   "tp=4,dp=2", "tp=2,dp=4@8",
                                        "tp=2,cp=4",   "tp=8",        "dp=8",      "tp=2,dp=4,pp=1",
                                        "tp=1,dp=4@2", "tpd=2,p=4@0", "tp=2,dp=2"};
    colo_grid_t a, b;
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        for (size_t j = 0; j < sizeof specs / sizeof *specs; j++) {
            assert_ok(colo_grid_parse(&a, specs[i], 0));
            assert_ok(colo_grid_parse(&b, specs[j], 0));
            assert_int_equal(colo_grid_equal(&a, &b), i == j);
            assert_int_equal(colo_grid_hash(&a) == colo_grid_hash(&b), i == j);
        }
    }
}

/* ---- rejections ---- */

/* Fills @obj, runs @call, checks status and words, and that @obj still has the pattern. */
#define refuses(obj, call, want, words)                           \
    do {                                                          \
        unsigned char sentinel_[sizeof(obj)];                     \
        memset(sentinel_, 0xa5, sizeof sentinel_);                \
        memset(&(obj), 0xa5, sizeof(obj));                        \
        assert_fails(call, want, words);                          \
        assert_memory_equal(&(obj), sentinel_, sizeof sentinel_); \
    } while (0)

T_CASE(init_refuses_bad_dims)
{
    colo_grid_t g;
    colo_dim_t d[17];
    char name[17][16];
    for (int i = 0; i < 17; i++) {
        snprintf(name[i], sizeof name[i], "d%d", i);
        d[i] = (colo_dim_t){name[i], 1};
    }
    refuses(g, colo_grid_init(&g, d, 0, 0, 0), COLO_ERR_ARG, "no dims, expected 1 to 16");
    refuses(g, colo_grid_init(&g, NULL, 0, 0, 0), COLO_ERR_ARG, "no dims");
    refuses(g, colo_grid_init(&g, NULL, 2, 0, 0), COLO_ERR_ARG, "dims is NULL for 2 dims");
    refuses(g, colo_grid_init(&g, d, -1, 0, 0), COLO_ERR_ARG, "-1 dims");
    refuses(g, colo_grid_init(&g, d, 17, 0, 0), COLO_ERR_ARG, "more than 16 dims: 17");
    refuses(g, colo_grid_init(&g, d, INT32_MAX, 0, 0), COLO_ERR_ARG, "more than 16 dims");
    assert_fails(colo_grid_init(NULL, d, 1, 0, 0), COLO_ERR_ARG, "the output is NULL");

    d[1].name = "";
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG, "dim 1 has an empty name");
    d[1].name = NULL;
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG, "dim 1 has a NULL name");
    d[1].name = "d0";
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG,
            "dim 1: duplicate dim name 'd0', already dim 0");
    d[1].name = "sixteen_bytes_xx";
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG,
            "dim 1: the name 'sixteen_bytes_xx' has 16 bytes, at most 15");
    d[1].name = "1d";
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG, "the name '1d' starts with a digit");
    d[1].name = "t-p";
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG, "'t-p' has a byte 0x2d at 1");
    d[1].name = "t\xc3\xa9'\n";
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG,
            "the name 't\\xc3\\xa9\\x27\\x0a' has a byte 0xc3 at 1");
    d[1].name = name[1];
    assert_ok(colo_grid_init(&g, d, 16, 0, 0));
}

T_CASE(init_refuses_bad_sizes)
{
    colo_grid_t g;
    colo_dim_t d[3] = {{"tp", 2}, {"cp", 2}, {"dp", 2}};
    d[1].extent = 0;
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG,
            "dim 1 'cp' has extent 0, expected at least 1");
    d[1].extent = -4;
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG, "dim 1 'cp' has extent -4");
    d[1].extent = INT64_MAX;
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG,
            "overflows 63 bits at dim 1 'cp': 2 x 9223372036854775807");
    d[1].extent = INT64_C(1) << 62; /* 2^63: one too many */
    refuses(g, colo_grid_init(&g, d, 3, 0, 0), COLO_ERR_ARG, "overflows 63 bits at dim 1 'cp'");
    d[1].extent = 2;
    refuses(g, colo_grid_init(&g, d, 3, -1, 0), COLO_ERR_ARG, "offset -1 is negative");
    refuses(g, colo_grid_init(&g, d, 3, INT64_MAX - 7, 0), COLO_ERR_ARG,
            "rank offset 9223372036854775800 + size 8 overflows");
    refuses(g, colo_grid_init(&g, d, 3, 0, -2), COLO_ERR_ARG, "a world of -2 ranks");
    refuses(g, colo_grid_init(&g, d, 3, 0, 7), COLO_ERR_ARG,
            "size 8 is over sized: a world of 7 ranks has 7 from rank offset 0 on");
    refuses(g, colo_grid_init(&g, d, 3, 1, 8), COLO_ERR_ARG,
            "size 8 is over sized: a world of 8 ranks has 7 from rank offset 1 on");
    refuses(g, colo_grid_init(&g, d, 3, 12, 8), COLO_ERR_ARG, "has 0 from rank offset 12 on");
    assert_ok(colo_grid_init(&g, d, 3, 1, 9));
}

T_CASE(queries_refuse_ranks_and_coordinates_outside)
{
    colo_grid_t g, odd, zero = {0};
    colo_group_t group;
    int64_t c[2], rank, bad[2] = {0, 4};
    char key[COLO_KEY_MAX];
    assert_ok(colo_grid_parse(&g, "tp=2,dp=4@8", 0));
    refuses(c, colo_grid_coords(&g, 7, c), COLO_ERR_ARG, "rank 7 is outside the grid's [8, 16)");
    refuses(c, colo_grid_coords(&g, 16, c), COLO_ERR_ARG, "rank 16 is outside");
    refuses(c, colo_grid_coords(&zero, 0, c), COLO_ERR_ARG, "not initialised");
    odd = g;
    odd.offset = -1;
    refuses(key, colo_grid_key(&odd, "tp", key), COLO_ERR_ARG, "size 8 and rank offset -1");
    refuses(c, colo_grid_coords(NULL, 0, c), COLO_ERR_ARG, "grid: the grid is NULL");
    assert_fails(colo_grid_coords(&g, 8, NULL), COLO_ERR_ARG, "the output is NULL");
    refuses(rank, colo_grid_coord(&g, 16, "tp", &rank), COLO_ERR_ARG, "rank 16 is outside");
    refuses(rank, colo_grid_coord(&g, 8, NULL, &rank), COLO_ERR_ARG, "the dim name is NULL");
    assert_fails(colo_grid_coord(&g, 8, "tp", NULL), COLO_ERR_ARG, "the output is NULL");
    refuses(rank, colo_grid_rank(&g, bad, &rank), COLO_ERR_ARG,
            "coordinate 4 of dim 1 'dp' is outside [0, 4)");
    bad[0] = -1;
    refuses(rank, colo_grid_rank(&g, bad, &rank), COLO_ERR_ARG,
            "coordinate -1 of dim 0 'tp' is outside [0, 2)");
    refuses(rank, colo_grid_rank(&g, NULL, &rank), COLO_ERR_ARG, "coords is NULL");
    refuses(rank, colo_grid_rank(&zero, bad, &rank), COLO_ERR_ARG, "not initialised");
    refuses(group, colo_grid_group(&g, "tp", 16, &group), COLO_ERR_ARG, "rank 16 is outside");
    refuses(group, colo_grid_group_as_given(&g, "tp", 7, &group), COLO_ERR_ARG,
            "rank 7 is outside");
    refuses(group, colo_grid_group_at(&g, "tp", 4, &group), COLO_ERR_ARG,
            "group 4 of 'tp' is outside [0, 4)");
    refuses(group, colo_grid_group_at(&g, "tp", -1, &group), COLO_ERR_ARG, "group -1 of 'tp'");
    refuses(key, colo_grid_key(&zero, "tp", key), COLO_ERR_ARG, "not initialised");
    assert_fails(colo_grid_key(&g, "tp", NULL), COLO_ERR_ARG, "the output is NULL");
    assert_fails(colo_grid_group(&g, "tp", 8, NULL), COLO_ERR_ARG, "the output is NULL");
    assert_fails(colo_grid_group_at(&g, "tp", 0, NULL), COLO_ERR_ARG, "the output is NULL");
}

T_CASE(dim_lists_are_read_strictly)
{
    static const struct {
        const char *list, *words;
    } bad[] = {
        {"", "the list is empty, expected names of the grid (tp, cp, dp)"},
        {NULL, "the list is NULL"},
        {"pp", "'pp' is not in the grid, which has dims (tp, cp, dp)"},
        {"tp-pp", "'pp' is not in the grid"},
        {"t", "'t' is not in the grid"},
        {"tpp", "'tpp' is not in the grid"},
        {"TP", "'TP' is not in the grid"},
        {"tp,cp", "'tp,cp' is not in the grid, which has dims (tp, cp, dp); join names by '-'"},
        {" tp", "' tp' is not in the grid"},
        {"tp-tp", "'tp' is repeated at byte 3"},
        {"cp-tp-cp", "'cp' is repeated at byte 6"},
        {"-", "empty name at byte 0"},
        {"tp-", "empty name at byte 3"},
        {"tp--cp", "empty name at byte 3"},
        {"t\xff", "'t\\xff' is not in the grid"},
    };
    colo_grid_t g;
    colo_group_t group;
    char key[COLO_KEY_MAX];
    assert_ok(colo_grid_parse(&g, "tp=2,cp=2,dp=4", 0));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        refuses(group, colo_grid_group(&g, bad[i].list, 0, &group), COLO_ERR_ARG, bad[i].words);
        refuses(group, colo_grid_group_as_given(&g, bad[i].list, 0, &group), COLO_ERR_ARG,
                bad[i].words);
        refuses(group, colo_grid_group_at(&g, bad[i].list, 0, &group), COLO_ERR_ARG, bad[i].words);
        refuses(key, colo_grid_key(&g, bad[i].list, key), COLO_ERR_ARG, bad[i].words);
    }
    size_t n = 1 << 20;
    char *big = malloc(n + 1);
    assert_non_null(big);
    memset(big, 'x', n);
    big[n] = '\0';
    refuses(group, colo_grid_group(&g, big, 0, &group), COLO_ERR_ARG, "xxx...' is not in the grid");
    assert_true(strlen(colo_last_error()) < 200);
    memset(big, '-', n);
    refuses(group, colo_grid_group(&g, big, 0, &group), COLO_ERR_ARG, "empty name at byte 0");
    assert_true(strlen(colo_last_error()) < 200);
    free(big);
}

T_MAIN("grid/grid")
