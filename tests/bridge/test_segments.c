/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_segments.c - the tables of a ragged batch: each refusal with its numbers, and the hash; then
 * tables made wrong at random: refused exactly if the oracle refuses them, with the number of a
 * segment or a sequence that it names.
 */
#include "harness/harness.h"

#include "harness/ragged_run.h"

/* The tables of the worked example, to be edited. */
typedef struct tables {
    int64_t rows[3], src_dp[3], seq[3], pos[3], row_pos[8], len[2], dp[2];
    colo_segments_t s;
    colo_layout_t src, dst;
} tables_t;

static void layouts(tables_t *t, const char *src, const char *dst, bool sp)
{
    assert_ok(t_layouts(src, dst, &t->src, &t->dst));
    if (sp)
        assert_ok(colo_layout_split(&t->dst, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
}

static tables_t *worked(tables_t *t)
{
    *t = (tables_t){.rows = {3, 0, 5},
                    .src_dp = {0, 1, 1},
                    .seq = {0, 0, 1},
                    .pos = {2, 9, 1},
                    .row_pos = {2, 3, 4, 1, 2, 3, 4, 5},
                    .len = {12, 8}};
    t->s = (colo_segments_t){.struct_size = sizeof t->s,
                             .count = 3,
                             .rows = t->rows,
                             .src_dp = t->src_dp,
                             .seq = t->seq,
                             .pos = t->pos,
                             .nseqs = 2,
                             .seq_len = t->len,
                             .seq_dp = t->dp};
    layouts(t, "dp=2", "cp=2,dp=1", false);
    return t;
}

static colo_status_t check(const tables_t *t)
{
    return colo_segments_check(&t->s, &t->src, &t->dst);
}

T_CASE(the_worked_example_is_accepted)
{
    tables_t t;
    assert_ok(check(worked(&t)));
    t.s.row_pos = t.row_pos;
    t.s.pos = NULL;
    assert_ok(check(&t));
    t.s = (colo_segments_t){COLO_SEGMENTS_INIT};
    assert_ok(check(&t));
}

T_CASE(segments_without_rows_are_accepted_without_row_pos)
{
    tables_t t;
    worked(&t)->rows[0] = 0;
    t.rows[2] = 0;
    t.s.pos = NULL;
    assert_ok(check(&t));
    const uint64_t absent = colo_segments_hash(&t.s);
    t.s.row_pos = t.row_pos;
    assert_ok(check(&t));
    assert_int_equal(colo_segments_hash(&t.s), absent);
}

/* The worked example, but for one entry, is refused. */
#define REFUSED(entry, status, words)           \
    do {                                        \
        worked(&t)->entry;                      \
        assert_fails(check(&t), status, words); \
    } while (0)

T_CASE(bad_rows_and_indices_are_refused_with_their_numbers)
{
    tables_t t;
    REFUSED(rows[2] = -1, COLO_ERR_ARG, "segment 2 has -1 rows");
    REFUSED(rows[1] = INT64_MAX, COLO_ERR_ARG, "segment 1: its 9223372036854775807 rows");
    REFUSED(src_dp[1] = 2, COLO_ERR_ARG, "segment 1: src_dp is 2, expected 0..1");
    REFUSED(src_dp[0] = -1, COLO_ERR_ARG, "segment 0: src_dp is -1");
    /* though it has no rows */
    REFUSED(seq[1] = 2, COLO_ERR_ARG, "segment 1: seq is 2, expected 0..1");
    REFUSED(seq[2] = -3, COLO_ERR_ARG, "segment 2: seq is -3");
    REFUSED(dp[1] = 1, COLO_ERR_ARG, "sequence 1: seq_dp is 1, expected 0..0");
}

T_CASE(bad_positions_are_refused_with_their_numbers)
{
    tables_t t;
    REFUSED(pos[2] = 4, COLO_ERR_ARG,
            "segment 2: row 4 of 5 is at position 8 of sequence 1, expected 0..7");
    REFUSED(pos[0] = -1, COLO_ERR_ARG, "segment 0: row 0 of 3 is at position -1 of sequence 0");
    REFUSED(pos[0] = INT64_MAX, COLO_ERR_ARG,
            "segment 0: row 0 of 3 is at position 9223372036854775807");
    /* positions 1..5 and 2..4 */
    REFUSED(seq[2] = 0, COLO_ERR_ARG,
            "segments 2 and 0 both have a row at position 2 of sequence 0");
    worked(&t)->row_pos[6] = 8;
    t.s.row_pos = t.row_pos;
    t.s.pos = NULL;
    assert_fails(check(&t), COLO_ERR_ARG, "segment 2: row 3 of 5 is at position 8 of sequence 1");
    worked(&t)->row_pos[6] = 1;
    t.s.row_pos = t.row_pos;
    t.s.pos = NULL;
    assert_fails(check(&t), COLO_ERR_ARG,
                 "segments 2 and 2 both have a row at position 1 of sequence 1");
}

T_CASE(bad_lengths_are_refused_with_their_numbers)
{
    tables_t t;
    REFUSED(len[1] = 10, COLO_ERR_LAYOUT,
            "sequence 1 has 10 positions, expected a multiple of 2 * cp=2 = 4");
    colo_layout_clear(&t.dst, COLO_AXIS_ROWS);
    assert_ok(colo_layout_split_context(&t.dst, "cp", COLO_SPLIT_BLOCK));
    assert_ok(check(&t));
    t.len[0] = 11;
    assert_fails(check(&t), COLO_ERR_LAYOUT,
                 "sequence 0 has 11 positions, expected a multiple of cp=2 = 2");
    REFUSED(len[0] = -4, COLO_ERR_ARG, "sequence 0 has -4 positions");
    REFUSED(len[1] = INT64_MAX - 3, COLO_ERR_ARG,
            "sequence 1: its 9223372036854775804 positions make the lengths of all sequences");
    worked(&t); /* each length and each segment fits, the sum of rows does not */
    t.len[0] = t.rows[0] = t.rows[2] = INT64_C(1) << 62;
    t.seq[2] = 0;
    memset(t.pos, 0, sizeof t.pos);
    assert_fails(check(&t), COLO_ERR_ARG, "make the sum of all rows exceed 63 bits");
    worked(&t);
    layouts(&t, "dp=2", "tp=3,cp=2,dp=1", true); /* 10 positions on a context rank */
    assert_fails(check(&t), COLO_ERR_LAYOUT,
                 "replica 0, the last of them sequence 1, have 10 positions on a context rank, "
                 "expected a multiple of the 3");
    t.len[1] = 12;
    assert_ok(check(&t));
}

T_CASE(missing_tables_are_refused_by_name)
{
    tables_t t;
    REFUSED(s.struct_size = 8, COLO_ERR_ARG, "struct_size is 8");
    REFUSED(s.rows = NULL, COLO_ERR_ARG, "table rows is NULL, expected the entries of 3 segments");
    REFUSED(s.src_dp = NULL, COLO_ERR_ARG, "table src_dp is NULL");
    REFUSED(s.seq = NULL, COLO_ERR_ARG, "table seq is NULL");
    REFUSED(s.pos = NULL, COLO_ERR_ARG, "table pos, or row_pos, is NULL");
    REFUSED(s.row_pos = t.row_pos, COLO_ERR_ARG, "both pos and row_pos are set");
    REFUSED(s.seq_len = NULL, COLO_ERR_ARG, "table seq_len is NULL, expected the entries of 2");
    REFUSED(s.seq_dp = NULL, COLO_ERR_ARG, "table seq_dp is NULL");
    REFUSED(s.count = -1, COLO_ERR_ARG, "-1 segments");
    REFUSED(s.nseqs = -1, COLO_ERR_ARG, "3 segments in -1 sequences");
    worked(&t);
    assert_fails(colo_segments_check(NULL, &t.src, &t.dst), COLO_ERR_ARG, "segments is NULL");
    assert_fails(colo_segments_check(&t.s, NULL, &t.dst), COLO_ERR_ARG,
                 "segments: src: layout: layout is NULL");
    assert_fails(colo_segments_check(&t.s, &t.src, NULL), COLO_ERR_ARG,
                 "segments: dst: layout: layout is NULL");
}

T_CASE(layouts_that_ragged_batches_cannot_have_are_refused)
{
    tables_t t;
    assert_ok(colo_layout_map_offset(&worked(&t)->dst, 1, 20));
    assert_fails(check(&t), COLO_ERR_LAYOUT, "destination layout has a position map");
    assert_ok(colo_layout_map_offset(&worked(&t)->src, 1, 20));
    assert_fails(check(&t), COLO_ERR_LAYOUT, "source layout has a position map");
    worked(&t);
    layouts(&t, "dp=2", "tp=2,cp=2,dp=1", false);
    colo_layout_clear(&t.dst, COLO_AXIS_ROWS);
    assert_ok(colo_layout_split(&t.dst, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    assert_ok(colo_layout_split(&t.dst, COLO_AXIS_ROWS, "cp", COLO_SPLIT_ZIGZAG));
    assert_fails(check(&t), COLO_ERR_LAYOUT, "splits rows in context over 'cp' as split 1");
    layouts(&t, "dp=2,cp=2", "dp=1", false);
    assert_fails(check(&t), COLO_ERR_LAYOUT, "source layout splits rows ZIGZAG over 'cp'");
    colo_layout_clear(&t.src, COLO_AXIS_ROWS);
    assert_ok(colo_layout_split(&t.src, COLO_AXIS_ROWS, "cp", COLO_SPLIT_CEIL));
    assert_fails(check(&t), COLO_ERR_LAYOUT, "source layout splits rows CEIL over 'cp'");
    layouts(&t, "dp=2,cp=1", "dp=1", false);
    assert_ok(check(&t)); /* one part is all of it */
}

/* Tables of one entry per replica or context rank take more than 2^63 bytes. */
static void check_largest_layouts(void)
{
    tables_t t;
    layouts(worked(&t), "dp=2", "cp=4611686018427387904", false);
    assert_fails(check(&t), COLO_ERR_NOMEM, "2 sequences on 4611686018427387904 context ranks");
    layouts(worked(&t), "dp=4611686018427387904", "dp=1", false);
    assert_fails(check(&t), COLO_ERR_NOMEM, "3 segments in 2 sequences");
    layouts(worked(&t), "dp=2305843009213693952", "dp=1", false); /* two tables, 2^65 bytes */
    assert_fails(check(&t), COLO_ERR_NOMEM, "3 segments in 2 sequences");
    layouts(worked(&t), "dp=2", "dp=9223372036854775807", false);
    assert_fails(check(&t), COLO_ERR_NOMEM, "3 segments in 2 sequences");
}

T_CASE(the_largest_layouts_are_judged_without_overflow)
{
    assert_true(t_returns(check_largest_layouts));
}

T_CASE(the_hash_differs_when_any_entry_does)
{
    tables_t t;
    const uint64_t first = colo_segments_hash(&worked(&t)->s);
    int64_t *const entry[] = {&t.rows[0], &t.src_dp[2], &t.seq[1], &t.pos[1],
                              &t.len[1],  &t.dp[0],     &t.pos[0]};
    assert_true(first == colo_segments_hash(&worked(&t)->s));
    for (size_t i = 0; i < sizeof entry / sizeof entry[0]; i++) {
        worked(&t);
        *entry[i] += 1;
        assert_true(first != colo_segments_hash(&t.s));
    }
    worked(&t); /* two segments in another order */
    t.s.row_pos = t.row_pos;
    t.s.pos = NULL;
    assert_true(first != colo_segments_hash(&t.s));
    assert_true(colo_segments_hash(NULL) == 0);
}

/* A table of 67 entries: eight at a time, and what remains. */
T_CASE(the_hash_differs_when_entries_change_or_trade_places)
{
    enum { N = 67 };
    tables_t t;
    int64_t rows[N], zero[N] = {0};
    for (int64_t i = 0; i < N; i++)
        rows[i] = 3 * i + 1;
    colo_segments_t s = worked(&t)->s;
    s.count = N;
    s.rows = rows;
    s.src_dp = s.seq = s.pos = zero;
    const uint64_t first = colo_segments_hash(&s);
    for (int i = 0; i < N; i++) {
        rows[i] ^= 1;
        assert_true(first != colo_segments_hash(&s));
        rows[i] ^= 1;
        for (int k = 0; k < i; k++) {
            const int64_t a = rows[i], b = rows[k];
            rows[i] = b;
            rows[k] = a;
            if (first == colo_segments_hash(&s))
                fail_msg("entries %d and %d", k, i);
            rows[i] = a;
            rows[k] = b;
        }
    }
    assert_true(first == colo_segments_hash(&s));
}

/* ---- random tables ---- */

#define CASES 20000
#define MOST 64

/* What the error message says of a refusal of the oracle's. */
static const char *words_of(const ref_refusal_t *f)
{
    const long long e = (long long)f->e, q = (long long)f->q, v = (long long)f->found;
    switch (f->kind) {
    case REF_REFUSE_ROWS:
        return t_text("segment %lld has %lld rows", e, v);
    case REF_REFUSE_SRC_DP:
        return t_text("segment %lld: src_dp is %lld", e, v);
    case REF_REFUSE_SEQ:
        return t_text("segment %lld: seq is %lld", e, v);
    case REF_REFUSE_SEQ_DP:
        return t_text("sequence %lld: seq_dp is %lld", q, v);
    case REF_REFUSE_SEQ_LEN:
    case REF_REFUSE_CHUNKS:
        return t_text("sequence %lld has %lld positions", q, v);
    case REF_REFUSE_POSITION:
        return t_text("at position %lld of sequence %lld, expected 0..", v, q);
    case REF_REFUSE_COLLISION:
        return "both have a row at position";
    case REF_REFUSE_SP:
        return t_text("%lld positions on a context rank", v);
    case REF_REFUSE_SUM:
        return "exceed 63 bits";
    }
    abort();
}

static bool names_one(const ref_refusal_t *f, int64_t n, const char *error_message)
{
    for (int64_t i = 0; i < n; i++)
        if (strstr(error_message, words_of(&f[i])))
            return true;
    return false;
}

T_CASE(random_tables_are_refused_if_the_oracle_refuses_them)
{
    const uint64_t seed = t_seed();
    int64_t refused = 0, kinds[REF_REFUSE_SUM + 1] = {0};
    for (int64_t i = 0; i < CASES; i++) {
        T_ENDS(t_ragged_free) t_ragged_t t = {0};
        colo_layout_t src, dst;
        ref_refusal_t found[MOST];
        uint64_t r = seed + (uint64_t)i;
        t_ragged_random(&t, seed + (uint64_t)i, 12);
        if (i % 4 == 0)
            (void)t_ragged_break(&t, (ref_refusal_kind_t)(1 + i / 4 % 10), &r);
        else if (i % 4 < 3)
            t_ragged_mutate(&t, &r);
        assert_ok(t_layout(&src, &t.c.src));
        assert_ok(t_layout(&dst, &t.c.dst));
        const colo_segments_t s = t_ragged_segments(&t);
        const int64_t n = ref_ragged_refusals(&t.c, found, MOST);
        const colo_status_t st = colo_segments_check(&s, &src, &dst);
        refused += st < 0;
        for (int64_t k = 0; k < n && k < MOST; k++)
            kinds[found[k].kind]++;
        if ((n > 0) != (st < 0))
            fail_msg("case %d: %s: %s, the oracle has %d refusals: %s", (int)i,
                     colo_status_name(st), st < 0 ? colo_last_error() : "", (int)n,
                     t_ragged_text(&t));
        if (n > 0 && !names_one(found, n < MOST ? n : MOST, colo_last_error()))
            fail_msg("case %d: \"%s\" is no refusal of the oracle, kind %d first: %s", (int)i,
                     colo_last_error(), (int)found[0].kind, t_ragged_text(&t));
    }
    assert_true(4 * refused > CASES && 4 * refused < 3 * CASES);
    for (int kind = REF_REFUSE_ROWS; kind <= REF_REFUSE_SUM; kind++)
        assert_true(kinds[kind] > 0);
}

T_MAIN("bridge/segments")
