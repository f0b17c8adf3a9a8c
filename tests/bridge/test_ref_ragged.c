/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_ragged.c - the oracle of ragged batches against answers that were written by hand.
 *
 * Calls nothing of the library. What an oracle gets wrong, every test that trusts it gets wrong.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "ref/ref_ragged.h"

/* The worked example: P = 2, D = 1, C = 2, zigzag. */
static const int64_t ex_rows[] = {3, 0, 5}, ex_src_dp[] = {0, 1, 1}, ex_seq[] = {0, 0, 1};
static const int64_t ex_pos[] = {2, 9, 1}, ex_len[] = {12, 8}, ex_seq_dp[] = {0, 0};

static ref_ragged_t example(void)
{
    ref_ragged_t c = {.src = t_side("dp=2", true), .dst = t_side("cp=2", false), .h = 1};
    c.table = (ref_segments_t){.nseg = 3,
                               .nseq = 2,
                               .rows = ex_rows,
                               .src_dp = ex_src_dp,
                               .seq = ex_seq,
                               .pos = ex_pos,
                               .seq_len = ex_len,
                               .seq_dp = ex_seq_dp};
    return c;
}

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

T_CASE(worked_example_gives_rows_and_places_of_the_page)
{
    ref_ragged_t c = example();
    ref_rows_t part;
    assert_int_equal(ref_ragged_refusals(&c, NULL, 0), 0);
    ref_ragged_dst(&part, &c, 0, false);
    expect_rows(&part, (const int64_t[][2]){{0, 0}, {2, 0}}, (const int64_t[]){2, 7}, 2);
    assert_int_equal(part.axis, 10);
    ref_rows_free(&part);
    ref_ragged_dst(&part, &c, 1, false);
    expect_rows(&part, (const int64_t[][2]){{0, 1}, {0, 2}, {2, 1}, {2, 2}, {2, 3}, {2, 4}},
                (const int64_t[]){0, 1, 6, 7, 8, 9}, 6);
    assert_int_equal(part.axis, 10);
    ref_rows_free(&part);
    for (int rank = 0; rank < 2; rank++) {
        ref_ragged_dst(&part, &c, rank, true);
        expect_rows(
            &part,
            (const int64_t[][2]){{0, 0}, {0, 1}, {0, 2}, {2, 0}, {2, 1}, {2, 2}, {2, 3}, {2, 4}},
            (const int64_t[]){2, 3, 4, 13, 14, 15, 16, 17}, 8);
        assert_int_equal(part.axis, 20);
        ref_rows_free(&part);
    }
    ref_ragged_src(&part, &c, 0);
    expect_rows(&part, (const int64_t[][2]){{0, 0}, {0, 1}, {0, 2}}, NULL, 3);
    ref_rows_free(&part);
    ref_ragged_src(&part, &c, 1);
    expect_rows(&part, (const int64_t[][2]){{2, 0}, {2, 1}, {2, 2}, {2, 3}, {2, 4}}, NULL, 5);
    ref_rows_free(&part);
}

T_CASE(worked_example_receives_what_each_rank_lacks)
{
    ref_ragged_t c = example();
    /* sharded: rank 0 has e0 and lacks e2r0; rank 1 has e2 and lacks e0r1, e0r2 */
    assert_int_equal(ref_ragged_receives(&c, 0, false), 1);
    assert_int_equal(ref_ragged_receives(&c, 1, false), 2);
    /* back: rank 0 owns the gradient of e0r0 of its three rows; rank 1 four of its five */
    assert_int_equal(ref_ragged_receives(&c, 0, true), 2);
    assert_int_equal(ref_ragged_receives(&c, 1, true), 1);
    c.full = true; /* each rank lacks the other's segment; DISJOINT goes back by ownership */
    assert_int_equal(ref_ragged_receives(&c, 0, false), 5);
    assert_int_equal(ref_ragged_receives(&c, 1, false), 3);
    assert_int_equal(ref_ragged_receives(&c, 0, true), 2);
    assert_int_equal(ref_ragged_receives(&c, 1, true), 1);
    c.partial = true; /* each rank has its own addend and lacks the other */
    assert_int_equal(ref_ragged_receives(&c, 0, true), 3);
    assert_int_equal(ref_ragged_receives(&c, 1, true), 5);
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
    ref_rows_t part;
    ref_ragged_dst(&part, c, rank, full);
    assert_int_equal(part.axis, n);
    for (int64_t i = 0; i < n; i++) {
        assert_int_equal(part.place[i].q, qp[i][0]);
        assert_int_equal(part.place[i].p, qp[i][1]);
    }
    ref_rows_free(&part);
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

T_CASE(features_are_cut_on_either_side)
{
    ref_ragged_t c = example();
    c.h = 4;
    c.src = t_side("tp=2,dp=2", true);
    t_side_split(&c.src, 2, "tp", REF_BLOCK, false);
    c.dst = t_side("cp=2,tp=2", false);
    /* rank 3 has e2 with features 2, 3 and needs six rows with all: e0r1, e0r2 and half of e2's */
    assert_int_equal(ref_ragged_receives(&c, 3, false), 2 * 4 + 4 * 2);
    int64_t rows, nh;
    float x[10], y[24];
    ref_ragged_tensor(&c, REF_X, 3, "f32", 0, NULL, &rows, &nh);
    assert_int_equal(rows, 5);
    assert_int_equal(nh, 2);
    ref_ragged_tensor(&c, REF_X, 3, "f32", 0, x, &rows, &nh);
    ref_ragged_tensor(&c, REF_Y, 3, "f32", 0, y, &rows, &nh);
    assert_int_equal(rows, 6);
    assert_int_equal(nh, 4);
    assert_true(x[0] == 1 + 3 * 4 + 2 && x[9] == 1 + 7 * 4 + 3); /* 1 + row among all * H + h */
    assert_true(y[0] == 1 + 1 * 4 && y[7] == 1 + 2 * 4 + 3 && y[23] == x[9]);
}

T_CASE(merged_tensors_leave_what_no_row_covers)
{
    ref_ragged_t c = example();
    c.merged = true;
    float into[20], y[20], d_y[20], d_into[20];
    bool touched[20];
    int64_t rows, nh;
    static const int64_t index[2][6] = {{2, 7}, {0, 1, 6, 7, 8, 9}}, n[] = {2, 6};
    for (int rank = 0; rank < 2; rank++) {
        ref_ragged_tensor(&c, REF_INTO, rank, "f32", 0, into, &rows, &nh);
        ref_ragged_tensor(&c, REF_Y, rank, "f32", 0, y, &rows, &nh);
        ref_ragged_tensor(&c, REF_DY, rank, "f32", 0, d_y, &rows, &nh);
        ref_ragged_tensor(&c, REF_DINTO, rank, "f32", 0, d_into, &rows, &nh);
        ref_ragged_touched(&c, rank, touched);
        assert_int_equal(rows, 10);
        for (int64_t i = 0; i < 10; i++) {
            bool row = ref_list_has(index[rank], n[rank], i);
            assert_int_equal(touched[i], row);
            assert_true(into[i] < 0 && (row ? y[i] > 0 : y[i] == into[i]));
            assert_true(d_y[i] != 0 && d_into[i] == (row ? 0 : d_y[i]));
        }
    }
    c.full = true; /* DISJOINT: zero outside the rank's own places, text included */
    static const int64_t own0[] = {0, 1, 2, 9, 10, 11, 12, 13, 18, 19};
    static const int64_t image[] = {2, 3, 4, 13, 14, 15, 16, 17};
    ref_ragged_tensor(&c, REF_DY, 0, "f32", 0, d_y, &rows, &nh);
    ref_ragged_tensor(&c, REF_DINTO, 0, "f32", 0, d_into, &rows, &nh);
    assert_int_equal(rows, 20);
    for (int64_t i = 0; i < 20; i++) {
        assert_int_equal(d_y[i] != 0, ref_list_has(own0, 10, i));
        assert_true(d_into[i] == (ref_list_has(image, 8, i) ? 0 : d_y[i]));
    }
}

T_CASE(partial_gradients_add_up_in_rank_order)
{
    ref_ragged_t c = example();
    static const int64_t len[] = {16, 16};
    c.table.seq_len = len;
    c.dst = t_side("cp=4", false);
    c.full = c.partial = c.rough = true;
    float d_y[4][8], d_x[5];
    int64_t rows, nh, differ = 0;
    for (int64_t salt = 0; salt < 20; salt++) {
        for (int rank = 0; rank < 4; rank++)
            ref_ragged_tensor(&c, REF_DY, rank, "f32", salt, d_y[rank], &rows, &nh);
        assert_int_equal(rows, 8);
        ref_ragged_tensor(&c, REF_DX, 1, "f32", salt, d_x, &rows, &nh);
        assert_int_equal(rows, 5);
        for (int i = 0; i < 5; i++) {
            const int k = 3 + i;
            volatile float up = d_y[0][k], down = d_y[3][k];
            for (int addend = 1; addend < 4; addend++) {
                up = up + d_y[addend][k];
                down = down + d_y[3 - addend][k];
            }
            assert_true(d_x[i] == up);
            differ += up != down;
        }
    }
    assert_true(differ > 10); /* of 100: another order is seen */
}

T_CASE(halves_are_summed_in_float_and_rounded_once)
{
    ref_ragged_t c = example();
    static const int64_t len[] = {16, 16};
    c.table.seq_len = len;
    c.dst = t_side("cp=4", false);
    c.full = c.partial = c.rough = true;
    uint16_t d_y[4][8], d_x[5];
    int64_t rows, nh, differ = 0;
    for (int64_t salt = 0; salt < 20; salt++) {
        for (int rank = 0; rank < 4; rank++)
            ref_ragged_tensor(&c, REF_DY, rank, "bf16", salt, d_y[rank], &rows, &nh);
        ref_ragged_tensor(&c, REF_DX, 1, "bf16", salt, d_x, &rows, &nh);
        for (int i = 0; i < 5; i++) {
            float sum = 0, rounded = 0, got;
            for (int addend = 0; addend < 4; addend++) { /* a bf16 is the upper half of a float */
                uint32_t bits = (uint32_t)d_y[addend][3 + i] << 16;
                float v;
                memcpy(&v, &bits, sizeof v);
                sum += v;
                rounded += v;
                memcpy(&bits, &rounded, sizeof bits);
                bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
                memcpy(&rounded, &bits, sizeof bits);
            }
            uint32_t bits;
            memcpy(&bits, &sum, sizeof bits);
            bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
            memcpy(&sum, &bits, sizeof bits);
            bits = (uint32_t)d_x[i] << 16;
            memcpy(&got, &bits, sizeof got);
            assert_true(got == sum);
            differ += sum != rounded;
        }
    }
    assert_true(differ > 5); /* of 100: rounding every sum is seen */
}

static void expect_refusal(const ref_ragged_t *c, ref_refusal_t want)
{
    ref_refusal_t got[8];
    assert_int_equal(ref_ragged_refusals(c, got, 8), 1);
    assert_int_equal(got[0].kind, want.kind);
    assert_int_equal(got[0].e, want.e);
    assert_int_equal(got[0].q, want.q);
    assert_int_equal(got[0].d, want.d);
    assert_int_equal(got[0].row, want.row);
    assert_int_equal(got[0].other, want.other);
    assert_int_equal(got[0].found, want.found);
    assert_int_equal(got[0].limit, want.limit);
}

T_CASE(each_refusal_names_its_place_and_numbers)
{
    ref_ragged_t c = example();
    c.table.rows = (const int64_t[]){3, -1, 5};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_ROWS, 1, -1, -1, -1, -1, -1, 0});
    c = example();
    c.table.src_dp = (const int64_t[]){0, 1, 2};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SRC_DP, 2, -1, -1, -1, -1, 2, 2});
    c = example();
    c.table.seq = (const int64_t[]){0, 2, 1}; /* of a segment without rows */
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SEQ, 1, -1, -1, -1, -1, 2, 2});
    c = example();
    c.table.seq_dp = (const int64_t[]){0, -1};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SEQ_DP, -1, 1, -1, -1, -1, -1, 1});
    c = example();
    c.table.nseg = 2;
    c.table.seq_len = (const int64_t[]){12, -4};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SEQ_LEN, -1, 1, -1, -1, -1, -4, 0});
    c = example();
    c.table.pos = (const int64_t[]){2, 99, 4}; /* rows 4..8 of 8; no row of segment 1 is outside */
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_POSITION, 2, 1, -1, 4, -1, 8, 8});
    c.table.pos = (const int64_t[]){-1, 0, 3};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_POSITION, 0, 0, -1, 0, -1, -1, 12});
    c = example();
    c.table.seq = (const int64_t[]){1, 0, 1};
    c.table.pos = (const int64_t[]){5, 9, 1}; /* 5..7 and 1..5 */
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_COLLISION, 0, 1, -1, -1, 2, 5, 0});
    c.table.pos = NULL;
    c.table.row_pos = (const int64_t[]){5, 6, 7, 0, 1, 0, 2, 3};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_COLLISION, 2, 1, -1, -1, 2, 0, 0});
    c = example();
    c.table.seq_len = (const int64_t[]){12, 10};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_CHUNKS, -1, 1, -1, -1, -1, 10, 4});
    c.dst.split[1][0].cut = REF_BLOCK; /* contiguous: 2 divides 10 */
    assert_int_equal(ref_ragged_refusals(&c, NULL, 0), 0);
    c.table.seq_len = (const int64_t[]){12, 9};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_CHUNKS, -1, 1, -1, -1, -1, 9, 2});
    c = example();
    c.dst = t_side("tp=3,cp=2,dp=1", false);
    t_side_split(&c.dst, 1, "tp", REF_BLOCK, false);
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SP, -1, -1, 0, -1, -1, 10, 3});
    c.table.seq_len = (const int64_t[]){16, 8};
    assert_int_equal(ref_ragged_refusals(&c, NULL, 0), 0);
    c = example();
    const int64_t half = INT64_MAX / 2 + 1;
    c.table.seq_len = (const int64_t[]){half, half};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SUM, -1, -1, 0, -1, -1, 0, 0});
    c.dst = t_side("cp=2,dp=2", false); /* each replica has one: positions are counted over all */
    c.table.seq_dp = (const int64_t[]){0, 1};
    expect_refusal(&c, (ref_refusal_t){REF_REFUSE_SUM, -1, -1, 0, -1, -1, 0, 0});
    c.table.seq_len = (const int64_t[]){half, half - 16};
    assert_int_equal(ref_ragged_refusals(&c, NULL, 0), 0);
    c.table.rows = (const int64_t[]){half - 32, 0, half - 32};
    assert_int_equal(ref_ragged_refusals(&c, NULL, 0), 0);
    c.table.rows = (const int64_t[]){half - 2, 31, half - 17};
    c.table.pos = (const int64_t[]){2, 0, 1};
    c.table.seq = (const int64_t[]){0, 1, 1};
    ref_refusal_t got[4];
    assert_int_equal(ref_ragged_refusals(&c, got, 4), 2); /* segments 1 and 2 meet, too */
    assert_int_equal(got[0].kind, REF_REFUSE_COLLISION);
    assert_int_equal(got[1].kind, REF_REFUSE_SUM);
    assert_int_equal(got[1].d, -1);
}

static void expect_bins(const int64_t *cost, int64_t nseg, int64_t n, const int64_t *current,
                        double stick, const int64_t *want)
{
    int64_t assign[8];
    ref_ragged_balance(assign, cost, nseg, n, current, stick);
    for (int64_t e = 0; e < nseg; e++)
        assert_int_equal(assign[e], want[e]);
}

T_CASE(balance_follows_cost_and_lets_segments_stay)
{
    static const int64_t cost[] = {3, 7, 3, 5, 0, 6}, now[] = {1, 1, 1, 0, 2, 0};
    /* 7 to 0, 6 to 1, 5 to 2, 3 to 2 (8), 3 to 1 (9), 0 to 0 */
    expect_bins(cost, 6, 3, NULL, 0, (const int64_t[]){2, 0, 1, 2, 0, 1});
    /* mean 8: 7 stays in 1 (7); 6 stays in 0 (6); 5 would make 11 in 0: to 2 (5);
     * 3 would make 10 in 1: to 2 (8); 3 again: to the lowest of 7, 8, 6: 0 (9); 0 stays in 2 */
    expect_bins(cost, 6, 3, now, 0, (const int64_t[]){2, 1, 0, 2, 2, 0});
    /* up to 10: 5 would make 11: to 2; 3 stays in 1 (10); 3 would make 13: to 2 (8); 0 stays */
    expect_bins(cost, 6, 3, now, 0.25, (const int64_t[]){1, 1, 2, 2, 2, 0});
    expect_bins(cost, 6, 3, now, 9, now);
    static const int64_t same[] = {1, 1, 1, 1, 1};
    expect_bins(same, 5, 2, NULL, 0, (const int64_t[]){0, 1, 0, 1, 0});
    expect_bins(same, 0, 2, NULL, 0, NULL);
}

T_MAIN("bridge/ref_ragged")
