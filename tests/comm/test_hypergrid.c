/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hypergrid.c - views, keys and the life of communicators asked for by name. Whether a dim may
 * be shared is compared with enumerating both grids (ref_grid): the library compares strides only.
 */
#include "harness/harness.h"
#include "ref/ref_grid.h"

typedef struct fixture {
    colo_hypergrid_t *hyper;
    colo_grid_t base;
} fixture;

static int set_up(void **state)
{
    static fixture f;
    if (colo_grid_parse(&f.base, "tp=2,cp=2,dp=2@8", 0) < 0 ||
        colo_hypergrid_create(&f.hyper, &f.base) < 0)
        return -1;
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    colo_hypergrid_destroy(&f->hyper);
    return f->hyper != NULL;
}

static colo_grid_t grid_of(const char *spec)
{
    colo_grid_t g;
    assert_ok(colo_grid_parse(&g, spec, 0));
    return g;
}

static colo_status_t add_view(fixture *f, const char *name, const char *spec, const char *shared)
{
    colo_grid_t g = grid_of(spec);
    return colo_hypergrid_register_view(f->hyper, name, &g, shared);
}

/* ---- views ---- */

T_CASE(the_base_view_is_there_from_the_start)
{
    fixture *f = *state;
    const colo_grid_t *view = NULL;
    assert_ok(colo_hypergrid_view(f->hyper, "base", &view));
    assert_memory_equal(view, &f->base, sizeof *view);
    assert_ptr_not_equal(view, &f->base); /* a copy */
    const colo_grid_t *same = NULL;
    assert_ok(colo_hypergrid_view(f->hyper, NULL, &same));
    assert_ptr_equal(same, view);
}

T_CASE(a_registered_view_is_a_copy_that_stays_in_place)
{
    fixture *f = *state;
    const colo_grid_t *moe = NULL, *again = NULL;
    colo_grid_t g = grid_of("tp=2,ep=4@8"), copy = g;
    assert_ok(colo_hypergrid_register_view(f->hyper, "moe", &g, "tp"));
    memset(&g, 0, sizeof g);
    assert_ok(colo_hypergrid_view(f->hyper, "moe", &moe));
    assert_memory_equal(moe, &copy, sizeof copy);
    for (int i = 0; i < 20; i++) {
        assert_ok(add_view(f, t_text("v%d", i), "x=8@8", i % 2 ? "" : NULL));
    }
    assert_ok(colo_hypergrid_view(f->hyper, "moe", &again));
    assert_ptr_equal(moe, again);
}

T_CASE(bad_views_are_refused_and_not_registered)
{
    static const struct {
        const char *name, *spec, *shared;
        colo_status_t want;
        const char *words;
    } bad[] = {
        {"base", "tp=8@8", NULL, COLO_ERR_EXISTS, "View 'base' is already registered"},
        {"moe", "tp=8@8", NULL, COLO_ERR_EXISTS, "View 'moe' is already registered"},
        {"", "tp=8@8", NULL, COLO_ERR_ARG, "view has an empty name"},
        {"a:b", "tp=8@8", NULL, COLO_ERR_ARG, "view: the name 'a:b' has a byte 0x3a at 1"},
        {"sixteen_bytes_xx", "tp=8@8", NULL, COLO_ERR_ARG, "has 16 bytes, at most 15"},
        {"v", "tp=2,ep=3@8", NULL, COLO_ERR_ARG, "View 'v' has size 6, but the grid size is 8"},
        {"v", "tp=2,ep=4@7", NULL, COLO_ERR_ARG,
         "View 'v' has rank offset 7, but the grid's rank offset is 8"},
        {"v", "tp=2,ep=4@8", "tp-tp", COLO_ERR_ARG, "View 'v' has duplicate shared_dims: 'tp'"},
        {"v", "tp=2,ep=4@8", "tp-ep", COLO_ERR_ARG,
         "Shared dim 'ep' of view 'v' is not in the base view"},
        {"v", "tp=2,ep=4@8", "tp-dp", COLO_ERR_ARG,
         "Shared dim 'dp' of view 'v' is not in the view's dim_names"},
        {"v", "tp=2,ep=4@8", "a_name_of_far_more_than_sixteen_bytes_and_forty", COLO_ERR_ARG,
         "Shared dim 'a_name_of_far_more_than_sixteen_bytes_an...' of view 'v' is not in the base"},
        {"v", "tp=2,ep=4@8", "-", COLO_ERR_ARG, "has an empty name among its shared_dims"},
        {"v", "tp=2,ep=4@8", "tp-", COLO_ERR_ARG, "has an empty name among its shared_dims"},
        {"v", "tp=4,ep=2@8", "tp", COLO_ERR_ARG,
         "Shared dim 'tp' has different membership in view 'v': 4 ranks 1 apart, in the base view "
         "2 ranks 1 apart"},
        {"v", "ep=4,tp=2@8", "tp", COLO_ERR_ARG,
         "Shared dim 'tp' has different membership in view 'v': 2 ranks 4 apart"},
    };
    fixture *f = *state;
    const colo_grid_t *view = &f->base;
    colo_grid_t zero = {0};
    assert_ok(add_view(f, "moe", "tp=2,ep=4@8", "tp"));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_fails(add_view(f, bad[i].name, bad[i].spec, bad[i].shared), bad[i].want,
                     bad[i].words);
    assert_fails(colo_hypergrid_register_view(f->hyper, "v", &zero, NULL), COLO_ERR_ARG,
                 "not initialised");
    assert_fails(colo_hypergrid_register_view(f->hyper, "v", NULL, NULL), COLO_ERR_ARG, "NULL");
    assert_fails(colo_hypergrid_register_view(f->hyper, NULL, &f->base, NULL), COLO_ERR_ARG,
                 "the name is NULL");
    assert_fails(colo_hypergrid_register_view(NULL, "v", &f->base, NULL), COLO_ERR_ARG,
                 "the hypergrid is NULL");
    assert_fails(colo_hypergrid_view(f->hyper, "v", &view), COLO_ERR_MISSING,
                 "View 'v' is not registered");
    assert_ptr_equal(view, &f->base);
    assert_fails(colo_hypergrid_view(NULL, "v", &view), COLO_ERR_ARG,
                 "hypergrid: the object is NULL");
    assert_fails(colo_hypergrid_view(f->hyper, "moe", NULL), COLO_ERR_ARG, "the output is NULL");
}

/* Are the ordered groups of the named dims the same lists of the same ranks? */
static bool same_enumeration(const colo_grid_t *a, const colo_grid_t *b, const char *const *names,
                             int n)
{
    const colo_grid_t *g[2] = {a, b};
    ref_groups groups[2];
    for (int s = 0; s < 2; s++) {
        bool in[REF_DIMS] = {false};
        T_ENDS(ref_grid_free) ref_grid ref;
        assert_true(ref_grid_make(&ref, g[s]->ndims, g[s]->extent));
        for (int d = 0; d < g[s]->ndims; d++)
            for (int k = 0; k < n; k++)
                in[d] = in[d] || strcmp(g[s]->name[d], names[k]) == 0;
        assert_true(ref_groups_make(&groups[s], &ref, in));
    }
    bool same = groups[0].count == groups[1].count && groups[0].each == groups[1].each;
    for (int64_t i = 0; same && i < a->size; i++)
        same = groups[0].member[i] == groups[1].member[i];
    ref_groups_free(&groups[0]);
    ref_groups_free(&groups[1]);
    return same;
}

/* Base a,b,c; view a,b,x in every order; both over every ordered factorisation of 24 ranks. */
T_CASE(shared_dims_are_accepted_exactly_when_enumeration_agrees)
{
    static const char *const orders[6][3] = {{"a", "b", "x"}, {"a", "x", "b"}, {"b", "a", "x"},
                                             {"b", "x", "a"}, {"x", "a", "b"}, {"x", "b", "a"}};
    static const char *const both[] = {"a", "b"};
    int64_t split[64][3];
    int n = 0, accepted = 0, refused = 0;
    for (int64_t i = 1; i <= 24; i++)
        for (int64_t k = 1; 24 % i == 0 && k <= 24 / i; k++)
            if (24 / i % k == 0)
                memcpy(split[n++], (int64_t[3]){i, k, 24 / i / k}, sizeof split[0]);
    assert_int_equal(n, 30);
    for (int s = 0; s < n; s++) {
        colo_grid_t base, view;
        colo_dim_t bd[3] = {{"a", split[s][0]}, {"b", split[s][1]}, {"c", split[s][2]}};
        assert_ok(colo_grid_init(&base, bd, 3, 0, 0));
        for (int t = 0; t < n * 6; t++) {
            colo_dim_t vd[3];
            for (int d = 0; d < 3; d++)
                vd[d] = (colo_dim_t){orders[t % 6][d], split[t / 6][d]};
            assert_ok(colo_grid_init(&view, vd, 3, 0, 0));
            bool a = same_enumeration(&base, &view, both, 1);
            bool b = same_enumeration(&base, &view, both + 1, 1);
            bool want[3] = {a, b, a && b && same_enumeration(&base, &view, both, 2)};
            for (int k = 0; k < 3; k++) {
                static const char *const shared[3] = {"a", "b", "b-a"};
                T_ENDS(colo_hypergrid_destroy) colo_hypergrid_t *h = NULL;
                assert_ok(colo_hypergrid_create(&h, &base));
                if (want[k])
                    assert_ok(colo_hypergrid_register_view(h, "v", &view, shared[k]));
                else
                    assert_fails(colo_hypergrid_register_view(h, "v", &view, shared[k]),
                                 COLO_ERR_ARG, "has different membership");
                accepted += want[k];
                refused += !want[k];
            }
        }
    }
    assert_true(accepted > 300 && refused > 300);
}

/* ---- keys ---- */

T_CASE(requests_over_shared_dims_only_are_filed_under_the_base)
{
    static const struct {
        const char *view, *dims, *key;
    } want[] = {
        {NULL, "tp-dp", "dp-tp"},
        {"base", "cp", "cp"},
        {"moe", "tp", "tp"},
        {"moe", "dp-tp", "dp-tp"},
        {"moe", "ep", "moe:ep"},
        {"moe", "tp-ep", "moe:ep-tp"},
        {"moe", "tp-ep-dp", "moe:dp-ep-tp"},
        {"flat", "tp", "flat:tp"},
    };
    fixture *f = *state;
    char key[COLO_KEY_MAX + COLO_DIM_NAME_MAX];
    assert_ok(add_view(f, "moe", "tp=2,ep=2,dp=2@8", "dp-tp"));
    assert_ok(add_view(f, "flat", "tp=8@8", NULL)); /* the same name, not shared */
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        assert_ok(colo_hypergrid_key(f->hyper, want[i].view, want[i].dims, key));
        assert_string_equal(key, want[i].key);
    }
}

/* A dim of extent 1 may sit elsewhere in the view; the base's naming order makes the key. */
T_CASE(a_shared_request_uses_the_words_of_the_base)
{
    char key[COLO_KEY_MAX + COLO_DIM_NAME_MAX];
    T_ENDS(colo_hypergrid_destroy) colo_hypergrid_t *h = NULL;
    colo_grid_t base = grid_of("tp=2,pp=1,dp=4"), view = grid_of("pp=1,tp=2,ep=4");
    assert_ok(colo_hypergrid_create(&h, &base));
    assert_ok(colo_hypergrid_register_view(h, "v", &view, "tp-pp"));
    assert_ok(colo_hypergrid_key(h, "v", "pp-tp", key));
    assert_string_equal(key, "pp-tp");
}

T_CASE(the_longest_view_key_fits)
{
    char name[16][16], list[COLO_KEY_MAX] = "";
    char key[COLO_KEY_MAX + COLO_DIM_NAME_MAX];
    colo_dim_t dims[16];
    colo_grid_t base = grid_of("a=1"), view;
    T_ENDS(colo_hypergrid_destroy) colo_hypergrid_t *h = NULL;
    for (int d = 0; d < 16; d++) {
        snprintf(name[d], sizeof name[d], "abcdefghijklmn%c", 'A' + d);
        dims[d] = (colo_dim_t){name[d], 1};
        strcat(strcat(list, d ? "-" : ""), name[d]);
    }
    assert_ok(colo_grid_init(&view, dims, 16, 0, 1));
    assert_ok(colo_hypergrid_create(&h, &base));
    assert_ok(colo_hypergrid_register_view(h, "fifteen_bytes_x", &view, NULL));
    assert_ok(colo_hypergrid_key(h, "fifteen_bytes_x", list, key));
    assert_int_equal(strlen(key), sizeof key - 1);
    assert_memory_equal(key, "fifteen_bytes_x:abcdefghijklmnP-", 32);
}

T_CASE(bad_requests_are_refused_by_every_call)
{
    static const struct {
        const char *view, *dims;
        colo_status_t want;
        const char *words;
    } bad[] = {
        {"nope", "tp", COLO_ERR_MISSING, "View 'nope' is not registered"},
        {"", "tp", COLO_ERR_MISSING, "View '' is not registered"},
        {NULL, "ep", COLO_ERR_ARG, "'ep' is not in view 'base', which has dims (tp, cp, dp)"},
        {"moe", "cp", COLO_ERR_ARG, "'cp' is not in view 'moe', which has dims (tp, ep)"},
        {"moe", "tp-tp", COLO_ERR_ARG, "'tp' is repeated at byte 3"},
        {NULL, "", COLO_ERR_ARG, "the list is empty, expected names of view 'base'"},
        {NULL, NULL, COLO_ERR_ARG, "the list is NULL"},
    };
    fixture *f = *state;
    char key[COLO_KEY_MAX + COLO_DIM_NAME_MAX], sentinel[sizeof key];
    colo_comm_t *self = NULL, *out = (void *)&key;
    assert_ok(add_view(f, "moe", "tp=2,ep=4@8", "tp"));
    assert_ok(colo_comm_create_self(&self));
    memset(key, 0xa5, sizeof key);
    memset(sentinel, 0xa5, sizeof sentinel);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(colo_hypergrid_key(f->hyper, bad[i].view, bad[i].dims, key), bad[i].want,
                     bad[i].words);
        assert_fails(colo_hypergrid_comm(f->hyper, bad[i].view, bad[i].dims, &out), bad[i].want,
                     bad[i].words);
        assert_fails(colo_hypergrid_create_comm(f->hyper, bad[i].view, bad[i].dims, self, &out),
                     bad[i].want, bad[i].words);
    }
    assert_fails(colo_hypergrid_key(NULL, NULL, "tp", key), COLO_ERR_ARG,
                 "hypergrid: the object is NULL");
    assert_fails(colo_hypergrid_key(f->hyper, NULL, "tp", NULL), COLO_ERR_ARG, "output is NULL");
    assert_fails(colo_hypergrid_comm(f->hyper, NULL, "tp", NULL), COLO_ERR_ARG, "output is NULL");
    assert_fails(colo_hypergrid_create_comm(f->hyper, NULL, "tp", NULL, &out), COLO_ERR_ARG,
                 "the world to split is NULL");
    assert_memory_equal(key, sentinel, sizeof key);
    assert_ptr_equal(out, &key);
    colo_comm_destroy(&self);
}

T_CASE(creating_needs_a_grid_and_destroying_takes_anything)
{
    colo_grid_t zero = {0}, base = grid_of("tp=2");
    colo_hypergrid_t *h = (void *)&zero;
    assert_fails(colo_hypergrid_create(&h, &zero), COLO_ERR_ARG, "not initialised (0 dims");
    assert_fails(colo_hypergrid_create(&h, NULL), COLO_ERR_ARG, "grid: the grid is NULL");
    assert_ptr_equal(h, &zero);
    assert_fails(colo_hypergrid_create(NULL, &base), COLO_ERR_ARG, "the output is NULL");
    h = NULL;
    colo_hypergrid_destroy(&h);
    colo_hypergrid_destroy(NULL);
}

/* ---- communicators ---- */

T_CASE(a_comm_that_was_not_created_is_missing)
{
    fixture *f = *state;
    colo_comm_t *comm = (void *)f;
    assert_ok(add_view(f, "moe", "tp=2,ep=4@8", "tp"));
    assert_fails(colo_hypergrid_comm(f->hyper, NULL, "tp-cp", &comm), COLO_ERR_MISSING,
                 "Process group for 'cp-tp' hasn't been created");
    assert_fails(colo_hypergrid_comm(f->hyper, "moe", "ep", &comm), COLO_ERR_MISSING,
                 "Process group for 'ep' for view 'moe' hasn't been created");
    assert_fails(colo_hypergrid_comm(f->hyper, "moe", "tp", &comm), COLO_ERR_MISSING,
                 "Process group for 'tp' hasn't been created");
    assert_ptr_equal(comm, f);
}

static colo_status_t members_are(const colo_comm_t *comm, int32_t n, const int64_t *want)
{
    rank_check(comm != NULL);
    rank_check(colo_comm_size(comm) == n);
    for (int32_t i = 0; i < n; i++)
        rank_check(colo_comm_world_rank(comm, i) == want[i]);
    return COLO_OK;
}

T_CASE_ON(8, a_comm_is_made_once_and_found_under_each_of_its_names)
{
    const int64_t me = colo_comm_rank(world);
    colo_grid_t base, moe;
    colo_hypergrid_t *h = NULL;
    colo_comm_t *tp = NULL, *ep = NULL, *cpdp = NULL, *found = NULL;
    rank_try(colo_grid_parse(&base, "tp=2,cp=2,dp=2", 8));
    rank_try(colo_grid_parse(&moe, "tp=2,ep=4", 8));
    rank_try(colo_hypergrid_create(&h, &base));
    rank_try(colo_hypergrid_register_view(h, "moe", &moe, "tp"));

    rank_try(colo_hypergrid_create_comm(h, NULL, "dp-cp", world, &cpdp));
    rank_try(members_are(cpdp, 4, (int64_t[]){me % 2, me % 2 + 2, me % 2 + 4, me % 2 + 6}));
    rank_try(colo_hypergrid_create_comm(h, "moe", "tp", world, &tp)); /* shared: the base group */
    rank_try(members_are(tp, 2, (int64_t[]){me / 2 * 2, me / 2 * 2 + 1}));
    rank_try(colo_hypergrid_create_comm(h, "moe", "ep", world, NULL));

    rank_try(colo_hypergrid_comm(h, "base", "tp", &found));
    rank_check(found == tp);
    rank_try(colo_hypergrid_comm(h, "moe", "tp", &found));
    rank_check(found == tp);
    rank_try(colo_hypergrid_comm(h, NULL, "cp-dp", &found));
    rank_check(found == cpdp);
    rank_try(colo_hypergrid_comm(h, "moe", "ep", &ep));
    rank_check(ep != cpdp);
    rank_try(members_are(ep, 4, (int64_t[]){me % 2, me % 2 + 2, me % 2 + 4, me % 2 + 6}));

    found = NULL;
    rank_fails(colo_hypergrid_create_comm(h, NULL, "cp-dp", world, &found), COLO_ERR_EXISTS,
               "Process group 'dp-cp' has already been created");
    rank_fails(colo_hypergrid_create_comm(h, NULL, "tp", world, &found), COLO_ERR_EXISTS,
               "Process group 'tp' has already been created");
    rank_fails(colo_hypergrid_create_comm(h, "moe", "ep", world, &found), COLO_ERR_EXISTS,
               "Process group 'ep' for view 'moe' has already been created");
    rank_check(found == NULL);

    float mine = (float)me, sum = 0; /* and the refusals left them in working order */
    rank_try(colo_comm_all_reduce(ep, &mine, &sum, 1, COLO_F32, COLO_REDOP_SUM, NULL));
    rank_check(sum == (float)(4 * (me % 2) + 12));
    colo_hypergrid_destroy(&h);
    rank_check(h == NULL);
    return COLO_OK;
}

T_CASE_ON(6, a_rank_outside_the_grid_takes_part_and_stores_no_comm)
{
    const int32_t me = colo_comm_rank(world);
    colo_grid_t base;
    T_ENDS(colo_hypergrid_destroy) colo_hypergrid_t *h = NULL;
    colo_comm_t *comm = world;
    rank_try(colo_grid_parse(&base, "tp=2,dp=2@1", 6));
    rank_try(colo_hypergrid_create(&h, &base));
    rank_try(colo_hypergrid_create_comm(h, NULL, "tp", world, &comm));
    rank_check((comm == NULL) == (me < 1 || me > 4));
    if (comm)
        rank_try(members_are(comm, 2, (int64_t[]){(me - 1) / 2 * 2 + 1, (me - 1) / 2 * 2 + 2}));
    comm = world;
    rank_try(colo_hypergrid_comm(h, NULL, "tp", &comm));
    rank_check((comm == NULL) == (me < 1 || me > 4));
    rank_fails(colo_hypergrid_create_comm(h, NULL, "tp", world, &comm), COLO_ERR_EXISTS,
               "has already been created");
    return COLO_OK;
}

T_CASE(a_failed_split_stores_nothing)
{
    colo_grid_t base = grid_of("tp=2,dp=2");
    T_ENDS(colo_hypergrid_destroy) colo_hypergrid_t *h = NULL;
    colo_comm_t *self = NULL, *comm = (void *)&base;
    assert_ok(colo_hypergrid_create(&h, &base));
    assert_ok(colo_comm_create_self(&self)); /* rank 0 alone: its tp peer is missing */
    assert_fails(colo_hypergrid_create_comm(h, NULL, "tp", self, &comm), COLO_ERR_MISSING, "'tp'");
    assert_ptr_equal(comm, &base);
    assert_fails(colo_hypergrid_comm(h, NULL, "tp", &comm), COLO_ERR_MISSING,
                 "hasn't been created");
    colo_comm_destroy(&self);
}

T_MAIN_EACH("grid/hypergrid", set_up, tear_down)
