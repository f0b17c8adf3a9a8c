/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged_plan.c - plans of ragged batches without a bridge, for every rank of random cases:
 * rows and bytes are the oracle's, and both ends of a message have the same list.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ragged_run.h"

#include "bridge/plan/plan.h" /* work */

#define CASES 600
#define MOST 16

typedef struct plans {
    colo_layout_t src, dst;
    colo_plan_t *of[MOST];
} plans_t;

static colo_status_t plan_all(plans_t *p, const t_ragged_t *t)
{
    const colo_segments_t s = t_ragged_segments(t);
    colo_bridge_config_t b;
    assert_ok(t_ragged_config(t, &p->src, &p->dst, &b));
    const colo_plan_config_t c = {COLO_PLAN_CONFIG_INIT, .src = b.src,     .dst = b.dst,
                                  .shape = b.shape,      .dtype = b.dtype, .output = b.output,
                                  .grad = b.grad};
    colo_status_t st = COLO_OK;
    for (int32_t r = 0; r < t->world && st == COLO_OK; r++)
        st = colo_plan_create_ragged(&p->of[r], &c, &s, r);
    return st;
}

static void free_plans(plans_t *p)
{
    for (int i = 0; i < MOST; i++)
        colo_plan_destroy(&p->of[i]);
}

/* Rows of a rank that holds features; the others have none. */
static int64_t oracle_rows(const t_ragged_t *t, int64_t rank, bool src)
{
    T_ENDS(ref_rows_free) ref_rows_t part = {0};
    if (src)
        ref_ragged_src(&part, &t->c, rank);
    else
        ref_ragged_dst(&part, &t->c, rank, t->c.full);
    const int64_t n = part.holds && part.nh > 0 ? part.n : 0;
    return n;
}

/* What @p says that it sends to @peer is what the peer says that it receives. */
static bool ends_agree(const plans_t *p, int32_t rank, colo_pass_t pass)
{
    int32_t sends, recvs;
    const colo_plan_message_t *out = colo_plan_sends(p->of[rank], pass, &sends);
    for (int32_t i = 0; i < sends; i++) {
        const colo_plan_message_t *in = colo_plan_recvs(p->of[out[i].peer], pass, &recvs);
        bool found = false;
        for (int32_t k = 0; k < recvs && !found; k++)
            found = in[k].peer == rank && t_same_message(&in[k], &out[i]);
        if (!found)
            return false;
    }
    return true;
}

static void check_rank(const t_ragged_t *t, const plans_t *p, int32_t rank)
{
    int64_t src, dst, sent = 0, received = 0;
    colo_plan_rows(p->of[rank], &src, &dst);
    if (src != oracle_rows(t, rank, true) || dst != oracle_rows(t, rank, false))
        fail_msg("rank %d: %lld and %lld rows, expected %lld and %lld: %s", (int)rank,
                 (long long)src, (long long)dst, (long long)oracle_rows(t, rank, true),
                 (long long)oracle_rows(t, rank, false), t_ragged_text(t));
    for (int w = 0; w < 2; w++) {
        const int64_t want = ref_ragged_receives(&t->c, rank, w == COLO_PASS_BACKWARD) *
                             (int64_t)ref_dtype_size(t->dtype);
        const colo_plan_bytes_t b = t_plan_bytes(p->of[rank], (colo_pass_t)w);
        if (b.recv != want || b.minimum != want)
            fail_msg("rank %d, way %d: %lld bytes, minimum %lld, expected %lld: %s", (int)rank, w,
                     (long long)b.recv, (long long)b.minimum, (long long)want, t_ragged_text(t));
        if (!ends_agree(p, rank, (colo_pass_t)w))
            fail_msg("rank %d, way %d: a peer does not expect its message: %s", (int)rank, w,
                     t_ragged_text(t));
    }
    for (int32_t r = 0; r < t->world; r++) {
        sent += t_plan_bytes(p->of[r], COLO_PASS_FORWARD).send;
        received += t_plan_bytes(p->of[r], COLO_PASS_FORWARD).recv;
    }
    assert_int_equal(sent, received);
}

T_CASE(plans_without_a_bridge_have_the_oracles_rows_and_bytes)
{
    const uint64_t seed = t_seed();
    for (int64_t i = 0; i < t_scaled(CASES); i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        plans_t p = {0};
        t_ragged_random(&t, seed + (uint64_t)i, MOST - 1);
        if (plan_all(&p, &t) < 0)
            fail_msg("%s: %s", colo_last_error(), t_ragged_text(&t));
        for (int32_t r = 0; r < t.world; r++)
            check_rank(&t, &p, r);
        free_plans(&p);
    }
}

/* 8 samples of 6 rows: dp=4 has 2 samples each, dp=2 has 4. Rank 4 is in no grid. */
T_CASE(rows_of_a_uniform_plan_are_those_of_all_its_samples)
{
    T_PLAN_CONFIG(c, "dp=4", "tp=2,dp=2", .shape = {.samples = 8, .rows = 6, .features = 1});
    for (int64_t rank = 0; rank < 5; rank++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *plan = NULL;
        int64_t a, b;
        assert_ok(colo_plan_create(&plan, &c, rank));
        colo_plan_rows(plan, &a, &b);
        assert_int_equal(a, rank < 4 ? 12 : 0);
        assert_int_equal(b, rank < 4 ? 24 : 0);
    }
}

static void plan_without_features(void)
{
    const int64_t rows[] = {3}, zero[] = {0}, len[] = {8};
    const colo_segments_t s = {sizeof s, 1, rows, zero, zero, zero, NULL, 1, len, zero, NULL};
    T_PLAN_CONFIG(c, "dp=1", "cp=4", .dtype = COLO_BF16, .ranks_per_node = 2);
    for (int64_t rank = 0; rank < 4; rank++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
        int32_t n;
        int64_t locals;
        assert_ok(colo_plan_create_ragged(&p, &c, &s, rank));
        (void)colo_plan_locals(p, COLO_PASS_FORWARD, &locals);
        const colo_plan_message_t *m = colo_plan_recvs(p, COLO_PASS_FORWARD, &n);
        const colo_plan_message_t *passed =
            n ? m : colo_plan_relays(p, COLO_PASS_FORWARD, false, &n);
        assert_int_equal(locals + n, 1); /* all three rows */
        assert_true(locals || passed->regions[0].s[1] == 3);
        assert_int_equal(t_plan_bytes(p, COLO_PASS_BACKWARD).recv, 0);
    }
}

/* Tensors say how wide they are. */
T_CASE(a_plan_of_no_features_routes_rows_over_several_nodes)
{
    assert_true(t_returns(plan_without_features));
}

/* What planning looks at on @rank: @images of 90 rows in sequences of 5, which replicas make in
 * turn. @runs: out: regions that arrive or stay. */
static int64_t work_of(const char *from, const char *to, int64_t rank, int64_t images,
                       int64_t *runs)
{
    enum { MOST_IMAGES = 2000, EACH = 5 };
    static int64_t rows[MOST_IMAGES], src_dp[MOST_IMAGES], seq[MOST_IMAGES], pos[MOST_IMAGES];
    static int64_t len[MOST_IMAGES], dp[MOST_IMAGES];
    T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
    int32_t n;
    T_PLAN_CONFIG(c, from, to, .shape = {.features = 8}, .output = COLO_OUTPUT_SHARDED);
    for (int64_t e = 0; e < images; e++) {
        rows[e] = 90;
        src_dp[e] = e % colo_grid_extent(&c.src->grid, "dp");
        seq[e] = e / EACH;
        pos[e] = e % EACH * 100;
        len[e / EACH] = 512;
        dp[e / EACH] = e / EACH * colo_grid_extent(&c.dst->grid, "dp") / (images / EACH);
    }
    const colo_segments_t s = {sizeof s, images,        rows, src_dp, seq, pos,
                               NULL,     images / EACH, len,  dp,     NULL};
    assert_ok(colo_plan_create_ragged(&p, &c, &s, rank));
    (void)colo_plan_locals(p, COLO_PASS_FORWARD, runs);
    const colo_plan_message_t *m = colo_plan_recvs(p, COLO_PASS_FORWARD, &n);
    for (int32_t i = 0; i < n; i++)
        *runs += m[i].nregions;
    const int64_t work = p->work;
    return work;
}

/* Ranks and their peers stay the same, so only the rank's runs of rows cost more. Chunks 0 and 3 of
 * rank 0 do not touch, so each run is a region. */
T_CASE(planning_lists_the_rows_of_a_rank_once)
{
    int64_t few, many;
    const int64_t a = work_of("dp=2", "cp=2,dp=1", 0, 500, &few);
    const int64_t b = work_of("dp=2", "cp=2,dp=1", 0, 1000, &many);
    assert_int_equal(few, 400);
    assert_int_equal(many, 800);
    assert_int_equal(b - a, many - few);
}

/* Two ranks hold what one of 64 needs and take turns. A turn depends on the destinations before:
 * rank 0 has none, and each sequence has rows for it and for those behind it. */
T_CASE(planning_passes_turns_of_ranks_before_only)
{
    int64_t runs;
    const int64_t first = work_of("dp=64", "cp=4,tp=2,dp=8", 0, 2000, &runs);
    assert_true(4 * first < work_of("dp=64", "cp=4,tp=2,dp=8", 63, 2000, &runs));
}

/* ---- which rank sends ---- */

#define WHOLE_BELOW 65536 /* bytes: smaller overlaps are not cut */

/* What a rank has on one side: rows by number, ascending, and one range of features. */
typedef struct held {
    int64_t n, *row, h0, h1;
    int64_t addend; /* PARTIAL: which one */
} held_t;

static int by_number(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static held_t held_by(const t_ragged_t *t, int64_t rank, bool src, bool full, bool addend)
{
    T_ENDS(ref_rows_free) ref_rows_t part = {0};
    if (src)
        ref_ragged_src(&part, &t->c, rank);
    else
        ref_ragged_dst(&part, &t->c, rank, full);
    held_t x = {.n = part.holds && part.nh > 0 ? part.n : 0, .addend = addend ? part.addend : 0};
    x.row = calloc((size_t)x.n + 1, sizeof *x.row);
    for (int64_t i = 0; i < x.n; i++)
        x.row[i] = part.row[i].g;
    qsort(x.row, (size_t)x.n, sizeof *x.row, by_number);
    x.h0 = x.n ? part.h[0] : 0;
    x.h1 = x.n ? part.h[part.nh - 1] + 1 : 0;
    return x;
}

static bool same_held(const held_t *a, const held_t *b)
{
    return a->n == b->n && a->h0 == b->h0 && a->h1 == b->h1 && a->addend == b->addend &&
           memcmp(a->row, b->row, (size_t)a->n * sizeof *a->row) == 0;
}

static int64_t common_rows(const held_t *a, const held_t *b)
{
    int64_t n = 0;
    for (int64_t i = 0, k = 0; i < a->n && k < b->n;) {
        n += a->row[i] == b->row[k];
        if (a->row[i] <= b->row[k])
            i++;
        else
            k++;
    }
    return n;
}

/* Ranks that hold the same send alike: each at most an even share of what all of them must send,
 * plus one overlap that is not cut, plus one row of one that is. All ranks are on one node. */
static void check_shares(const t_ragged_t *t, const plans_t *p, colo_pass_t pass)
{
    const bool back = pass == COLO_PASS_BACKWARD, partial = back && t->c.full && t->c.partial;
    const bool full = partial || (!back && t->c.full);
    const int64_t elem = (int64_t)ref_dtype_size(t->dtype);
    held_t hold[MOST], need[MOST];
    for (int32_t r = 0; r < t->world; r++) {
        hold[r] = held_by(t, r, !back, full, partial);
        need[r] = held_by(t, r, back, full, false);
    }
    for (int32_t r = 0; r < t->world; r++) {
        int64_t total = 0, whole = 0, slice = 0, n = 0;
        for (int32_t k = 0; k < t->world; k++)
            n += same_held(&hold[k], &hold[r]);
        for (int32_t k = 0; k < t->world && hold[r].n > 0; k++) {
            const int64_t lo = hold[r].h0 > need[k].h0 ? hold[r].h0 : need[k].h0;
            const int64_t hi = hold[r].h1 < need[k].h1 ? hold[r].h1 : need[k].h1;
            const int64_t rows = hi > lo ? common_rows(&hold[r], &need[k]) : 0;
            const int64_t bytes = rows * (hi - lo) * elem;
            if (rows == 0 || same_held(&hold[k], &hold[r])) /* it has them itself */
                continue;
            total += bytes;
            whole = bytes < WHOLE_BELOW && bytes > whole ? bytes : whole;
            if (bytes >= WHOLE_BELOW && bytes / rows > slice)
                slice = bytes / rows;
        }
        const int64_t sent = t_plan_bytes(p->of[r], pass).send;
        if (hold[r].n > 0 && sent * n > total + (whole + slice) * n)
            fail_msg("rank %d sends %lld bytes, expected at most %lld / %lld + %lld + %lld: %s",
                     (int)r, (long long)sent, (long long)total, (long long)n, (long long)whole,
                     (long long)slice, t_ragged_text(t));
    }
    for (int32_t r = 0; r < t->world; r++) {
        free(hold[r].row);
        free(need[r].row);
    }
}

/* Ranks 0 and 1 hold all rows. Ranks 2..7 need 100, 1, 100, 1, 100, 1 of them: by turns rank 0
 * would send 300 rows and rank 1 three. */
T_CASE(small_overlaps_are_dealt_by_their_size)
{
    enum { N = 8 };
    int64_t rows[N], zero[N] = {0}, seq[N], len[N], most = 0;
    for (int64_t e = 0; e < N; e++) {
        rows[e] = e % 2 ? 1 : 100;
        seq[e] = e;
        len[e] = 100;
    }
    const colo_segments_t s = {sizeof s, N, rows, zero, seq, zero, NULL, N, len, seq, NULL};
    T_PLAN_CONFIG(c, "tp=2,dp=1", "dp=8", .shape = {.features = 1}, .dtype = COLO_U8);
    for (int64_t rank = 0; rank < 2; rank++) {
        T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
        assert_ok(colo_plan_create_ragged(&p, &c, &s, rank));
        const int64_t sent = t_plan_bytes(p, COLO_PASS_FORWARD).send;
        most = sent > most ? sent : most;
    }
    assert_true(most <= 303 / 2 + 100);
}

T_CASE(segments_that_touch_on_both_sides_are_one_region)
{
    const int64_t rows[] = {10, 10}, zero[2] = {0}, pos[] = {0, 10}, len = 20;
    const colo_segments_t s = {sizeof s, 2, rows, zero, zero, pos, NULL, 1, &len, zero, NULL};
    T_ENDS(colo_plan_destroy) colo_plan_t *p = NULL;
    int32_t n;
    T_PLAN_CONFIG(c, "dp=1", "dp=1@1", .shape = {.features = 1}, .dtype = COLO_U8);
    assert_ok(colo_plan_create_ragged(&p, &c, &s, 0));
    const colo_plan_message_t *m = colo_plan_sends(p, COLO_PASS_FORWARD, &n);
    assert_int_equal(n, 1);
    assert_int_equal(m->nregions, 1);
}

T_CASE(replicas_share_the_sending_of_ragged_batches)
{
    const uint64_t seed = t_seed();
    for (int64_t i = 0; i < t_scaled(4 * CASES); i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        plans_t p = {0};
        t_ragged_random(&t, seed + (uint64_t)i, MOST - 1);
        t.c.h *= i % 2 ? 1 : 2048; /* overlaps that are cut */
        if (plan_all(&p, &t) < 0)
            fail_msg("%s: %s", colo_last_error(), t_ragged_text(&t));
        check_shares(&t, &p, COLO_PASS_FORWARD);
        check_shares(&t, &p, COLO_PASS_BACKWARD);
        free_plans(&p);
    }
}

/* ---- refusals ---- */

static colo_status_t plan_one(colo_plan_t **plan, colo_shape_t shape, int64_t rows, int64_t rank)
{
    const int64_t zero = 0;
    const colo_segments_t s = {.struct_size = sizeof s,
                               .count = 1,
                               .rows = &rows,
                               .src_dp = &zero,
                               .seq = &zero,
                               .pos = &zero,
                               .nseqs = 1,
                               .seq_len = &rows,
                               .seq_dp = &zero};
    T_PLAN_CONFIG(c, "dp=2", "dp=2", .shape = shape);
    return colo_plan_create_ragged(plan, &c, &s, rank);
}

T_CASE(what_a_plan_cannot_have_is_refused_with_the_numbers)
{
    const struct {
        colo_shape_t shape;
        int64_t rows;
        const char *text;
        int64_t rank;
    } cases[] = {
        {{.samples = 4, .features = 2}, 1, "plan: ragged batches with a shape of 4 samples", 0},
        {{.features = 1024}, INT64_MAX / 2048, "1024 f32 features overflow 63 bits of bytes", 0},
        {{.features = -1}, 1, "-1 features", 0},
        {{.features = 1}, -1, "has -1 positions", 0},
        {{.features = 1}, 1, "plan: rank -3, expected >= 0", -3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        colo_plan_t *plan = NULL;
        assert_int_equal(plan_one(&plan, cases[i].shape, cases[i].rows, cases[i].rank),
                         COLO_ERR_ARG);
        assert_null(plan);
        if (!strstr(colo_last_error(), cases[i].text))
            fail_msg("\"%s\" lacks \"%s\"", colo_last_error(), cases[i].text);
    }
    assert_int_equal(plan_one(NULL, (colo_shape_t){.features = 1}, 1, 0), COLO_ERR_ARG);
    colo_plan_rows(NULL, NULL, NULL);
}

T_MAIN("bridge/ragged_plan")
