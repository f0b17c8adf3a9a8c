/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_ragged.c - the oracle of ragged batches against answers that were written by hand, where
 * those of test_ragged.c and test_segments.c, which are the library's, say nothing; and what random
 * cases cover. That it says the same as the library of every rank and table is seen in
 * test_ragged_random.c, test_ragged_plan.c and test_ragged_refusals.c. Calls nothing of the
 * library.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ragged_case.h"

#define CASES 3000
#define MOST_RANKS 16

/* e, r of each row, ended by -1; and where it lies on the axis if @index is given. */
static void expect_rows(const ref_rows_t *part, const int64_t (*er)[2], const int64_t *index,
                        int64_t n)
{
    assert_int_equal(part->n, n);
    for (int64_t i = 0; i < n; i++) {
        assert_int_equal(part->row[i].e, er[i][0]);
        assert_int_equal(part->row[i].r, er[i][1]);
        if (index)
            assert_int_equal(part->row[i].index, index[i]);
    }
}

T_CASE(source_shards_cut_the_axis_once_with_cp_major)
{
    static const int64_t rows[] = {4, 2, 3}, src_dp[] = {0, 1, 0}, seq[] = {0, 0, 0};
    static const int64_t pos[] = {5, 3, 0}, len[] = {9}, seq_dp[] = {0};
    /* cp varies fastest; replica 0 has 7 rows, cut at 0 1 3 5 7 */
    ref_ragged_t c = {.src = t_side("cp=2,tp=2,dp=2", true), .dst = t_side("dp=1", false), .h = 1};
    t_side_split(&c.src, 1, "tp", REF_BLOCK, false);
    c.table = (ref_segments_t){3, 1, rows, src_dp, seq, pos, NULL, len, seq_dp};
    static const int64_t first[] = {0, 3, 1, 5}, last[] = {1, 5, 3, 7}; /* by rank */
    static const int64_t axis[][2] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {2, 0}, {2, 1}, {2, 2}};
    ref_rows_t part;
    for (int rank = 0; rank < 4; rank++) {
        ref_ragged_src(&part, &c, rank);
        expect_rows(&part, axis + first[rank], NULL, last[rank] - first[rank]);
        ref_rows_free(&part);
    }
    /* replica 1 has 2 rows, cut at 0 0 1 1 2: ranks 4 and 6 are j = 0 and 1, 5 and 7 j = 2 and 3 */
    static const int64_t held[] = {0, 0, 1, 1};
    for (int rank = 4; rank < 8; rank++) {
        ref_ragged_src(&part, &c, rank);
        assert_int_equal(part.n, held[rank - 4]);
        if (part.n)
            assert_int_equal(part.row[0].r, rank == 6 ? 0 : 1);
        ref_rows_free(&part);
    }
}

static void expect_places(const ref_ragged_t *c, int rank, bool full, const int64_t (*qp)[2],
                          int64_t n)
{
    T_ENDS(ref_rows_free) ref_rows_t part = {0};
    ref_ragged_dst(&part, c, rank, full);
    assert_int_equal(part.axis, n);
    for (int64_t i = 0; i < n; i++) {
        assert_int_equal(part.place[i].q, qp[i][0]);
        assert_int_equal(part.place[i].p, qp[i][1]);
    }
}

T_CASE(destination_axis_is_cut_by_chunks_and_then_by_sequence_parallel)
{
    static const int64_t len[] = {8, 4, 4}, seq_dp[] = {0, 1, 0}, none[1];
    ref_ragged_t c = {.src = t_side("dp=1", true), .dst = t_side("tp=2,cp=2,dp=2", false), .h = 1};
    c.table = (ref_segments_t){0, 3, none, none, none, none, NULL, len, seq_dp};
    /* rank = tp + 2 cp + 4 dp; replica 0 has q0 and q2, replica 1 has q1 */
    static const int64_t cp0[][2] = {{0, 0}, {0, 1}, {0, 6}, {0, 7}, {2, 0}, {2, 3}};
    static const int64_t cp1[][2] = {{0, 2}, {0, 3}, {0, 4}, {0, 5}, {2, 1}, {2, 2}};
    static const int64_t one[][2] = {{1, 0}, {1, 1}, {1, 2}, {1, 3}};
    expect_places(&c, 0, false, cp0, 6);
    expect_places(&c, 1, false, cp0, 6);
    expect_places(&c, 2, false, cp1, 6);
    expect_places(&c, 6, false, one + 1, 2);
    expect_places(&c, 6, true, one, 4);
    t_side_split(&c.dst, 1, "tp", REF_BLOCK, false);
    expect_places(&c, 0, false, cp0, 3);
    expect_places(&c, 1, false, cp0 + 3, 3);
    expect_places(&c, 2, false, cp1, 3);
    expect_places(&c, 3, false, cp1 + 3, 3);
    expect_places(&c, 7, true, one, 4); /* full is whole for SP ranks, too */
    c.dst.split[1][0].cut = REF_BLOCK;  /* contiguous */
    static const int64_t near[][2] = {{0, 0}, {0, 1}, {0, 2}, {0, 3}, {2, 0}, {2, 1}};
    static const int64_t later[][2] = {{0, 4}, {0, 5}, {0, 6}, {0, 7}, {2, 2}, {2, 3}};
    expect_places(&c, 0, false, near, 3);
    expect_places(&c, 1, false, near + 3, 3);
    expect_places(&c, 2, false, later, 3);
    expect_places(&c, 3, false, later + 3, 3);
    expect_places(&c, 7, false, one + 3, 1);
}

T_CASE(scattered_rows_are_packed_by_position)
{
    static const int64_t rows[] = {3, 2}, src_dp[] = {0, 0}, seq[] = {1, 0};
    static const int64_t row_pos[] = {5, 0, 3, 6, 1}, len[] = {8, 8}, seq_dp[] = {0, 0};
    ref_ragged_t c = {.src = t_side("dp=1", true), .dst = t_side("cp=2", false), .h = 1};
    c.table = (ref_segments_t){2, 2, rows, src_dp, seq, NULL, row_pos, len, seq_dp};
    ref_rows_t part;
    ref_ragged_dst(&part, &c, 0, true);
    expect_rows(&part, (const int64_t[][2]){{1, 1}, {1, 0}, {0, 1}, {0, 2}, {0, 0}},
                (const int64_t[]){1, 6, 8, 11, 13}, 5);
    ref_rows_free(&part);
    ref_ragged_dst(&part, &c, 0, false); /* positions 0 1 6 7 of each */
    expect_rows(&part, (const int64_t[][2]){{1, 1}, {1, 0}, {0, 1}}, (const int64_t[]){1, 2, 4}, 3);
    ref_rows_free(&part);
}

static float rounded_to_bf16(float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* Element @i of a tensor; a bf16 is the upper half of a float. */
static float value(const void *data, int i, bool half)
{
    float v = half ? 0 : ((const float *)data)[i];
    if (half)
        memcpy((char *)&v + 2, (const char *)data + 2 * i, 2);
    return v;
}

/* Four ranks hold 8 rows, of which source rank 1 gets the last 5 back. */
T_CASE(partial_gradients_add_up_in_rank_order_in_float_and_are_rounded_once)
{
    static const int64_t rows_of[] = {3, 5}, src_dp[] = {0, 1}, seq[] = {0, 1}, pos[] = {2, 1};
    static const int64_t len[] = {16, 16}, seq_dp[] = {0, 0};
    ref_ragged_t c = {.src = t_side("dp=2", true), .dst = t_side("cp=4", false), .h = 1};
    c.table = (ref_segments_t){2, 2, rows_of, src_dp, seq, pos, NULL, len, seq_dp};
    c.full = c.partial = c.rough = true;
    for (int half = 0; half < 2; half++) {
        const char *dtype = half ? "bf16" : "f32";
        float d_y[4][8], d_x[5];
        int64_t rows, nh, other_order = 0, each_rounded = 0;
        for (int64_t salt = 0; salt < 20; salt++) {
            for (int rank = 0; rank < 4; rank++)
                ref_ragged_tensor(&c, REF_DY, rank, dtype, salt, d_y[rank], &rows, &nh);
            assert_int_equal(rows, 8);
            ref_ragged_tensor(&c, REF_DX, 1, dtype, salt, d_x, &rows, &nh);
            assert_int_equal(rows, 5);
            for (int i = 0; i < 5; i++) {
                volatile float up = 0, down = 0, rounded = 0;
                for (int addend = 0; addend < 4; addend++) {
                    up = up + value(d_y[addend], 3 + i, half);
                    down = down + value(d_y[3 - addend], 3 + i, half);
                    rounded = rounded_to_bf16(rounded + value(d_y[addend], 3 + i, half));
                }
                assert_true(value(d_x, i, half) == (half ? rounded_to_bf16(up) : up));
                other_order += up != down;
                each_rounded += rounded_to_bf16(up) != rounded;
            }
        }
        assert_true(half ? each_rounded > 5 : other_order > 10); /* of 100: it would be seen */
    }
}

static int64_t extent_of(const ref_side_t *side, const ref_split_t *sp)
{
    return sp ? ref_side_extent(side, sp->dim) : 1;
}

static const ref_split_t *find_split(const ref_side_t *side, bool context)
{
    for (int k = 0; k < side->nsplits[1]; k++)
        if (side->split[1][k].context == context)
            return &side->split[1][k];
    return NULL;
}

/* ---- random cases ---- */

typedef struct shares {
    int64_t no_rows, empty_src, empty_dst, empty_replica, differ, src_sp, src_cp, dst_sp,
        contiguous;
    int64_t zigzag, features, scattered, full, merged, partial, stages, offsets;
} shares_t;

static uint64_t seed_of(int64_t i)
{
    return t_seed() * 1000003u + (uint64_t)i;
}

static void count_shares(shares_t *n, const t_ragged_t *t)
{
    const ref_ragged_t *c = &t->c;
    ref_rows_t part;
    bool empty_src = false, empty_dst = false;
    for (int32_t rank = 0; rank < t->world; rank++) {
        ref_ragged_src(&part, c, rank);
        empty_src |= part.holds && !part.n;
        ref_rows_free(&part);
        ref_ragged_dst(&part, c, rank, false);
        empty_dst |= part.holds && !part.n;
        n->empty_replica += part.holds && !part.axis;
        ref_rows_free(&part);
    }
    n->empty_src += empty_src;
    n->empty_dst += empty_dst;
    n->no_rows += !ref_ragged_total(c);
    n->differ += ref_ragged_parts(&c->src) != ref_ragged_parts(&c->dst);
    n->src_sp += extent_of(&c->src, find_split(&c->src, false)) > 1;
    n->src_cp += extent_of(&c->src, find_split(&c->src, true)) > 1;
    n->dst_sp += extent_of(&c->dst, find_split(&c->dst, false)) > 1;
    const ref_split_t *cp = find_split(&c->dst, true);
    n->zigzag += extent_of(&c->dst, cp) > 1 && cp->cut == REF_ZIGZAG;
    n->contiguous += extent_of(&c->dst, cp) > 1 && cp->cut == REF_BLOCK;
    n->features += c->src.nsplits[2] || c->dst.nsplits[2];
    n->scattered += c->table.row_pos != NULL;
    n->full += c->full;
    n->merged += c->merged;
    n->partial += c->partial && ref_ragged_addends(c) > 1;
    n->stages += c->src.stage_dim || c->dst.stage_dim;
    n->offsets += c->src.offset || c->dst.offset;
}

T_CASE(random_cases_are_valid_and_cover_what_the_page_says)
{
    shares_t n = {0};
    int64_t rows = 0, ranks = 0;
    const int64_t cases = t_scaled(CASES);
    for (int64_t i = 0; i < cases; i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        ref_refusal_t why;
        t_ragged_random(&t, seed_of(i), MOST_RANKS);
        if (ref_ragged_refusals(&t.c, &why, 1))
            fail_msg("%s: refusal %d of segment %lld sequence %lld", t_ragged_text(&t), why.kind,
                     (long long)why.e, (long long)why.q);
        assert_true(t.world <= MOST_RANKS);
        count_shares(&n, &t);
        rows += ref_ragged_total(&t.c);
        ranks += t.world;
    }
    printf("%lld cases, %lld rows, %lld ranks\n", (long long)cases, (long long)rows,
           (long long)ranks);
    const int64_t *share = (const int64_t *)&n;
    for (size_t k = 0; k < sizeof n / sizeof *share; k++)
        if (share[k] * 50 < cases) /* 2 percent at least */
            fail_msg("share %zu is %lld of %lld", k, (long long)share[k], (long long)cases);
}

T_MAIN("bridge/ref_ragged")
