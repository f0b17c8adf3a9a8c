/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sequence.c - targets, masks and gathered values of dense and packed batches on context
 * ranks, against lists of tokens cut by hand. Values say which token they belong to, and are
 * compared with ==; sums in the adjoint are of small integers, so exact.
 */
#include "loss/gather_case.h"
#include "ref/ref_sequence.h"

enum { ROWS = 5, COLUMNS = 40, CAPACITY = 64, RANKS = 8, MOST = ROWS * CAPACITY, IGNORE = -77 };

typedef struct batch {
    loss_case_t shape;   /* its ranks */
    colo_sequence_t seq; /* its arrays are set on each rank */
    bool packed, has_lengths, stream;
    int64_t lengths[ROWS], cu[ROWS + 1];
    int64_t tokens[ROWS * COLUMNS], packed_tokens[MOST];
    ref_token_t want[RANKS][MOST];
    int64_t n; /* elements of a rank */

    int64_t targets[RANKS][MOST];
    uint8_t mask[RANKS][2][MOST];
    double out[RANKS][ROWS * COLUMNS], d_local[RANKS][2][MOST];
    uint64_t gathers[RANKS], scatters[RANKS], total[RANKS][3];
} batch_t;

static batch_t b; /* large */

static int64_t code(int64_t row, int64_t x)
{
    return 1 + x + 1000 * row;
}

static int64_t length_of(int64_t row)
{
    const int64_t capacity = b.cu[row + 1] - b.cu[row];
    return b.has_lengths ? b.lengths[row]
           : b.packed    ? (capacity < b.seq.positions ? capacity : b.seq.positions)
                         : b.seq.positions;
}

static void draw(uint64_t *rng, int64_t cp, bool packed, bool left)
{
    ref_token_t list[MOST];
    memset(&b, 0, sizeof b);
    b.packed = packed;
    b.has_lengths = t_below(rng, 4) != 0;
    b.stream = packed && t_below(rng, 2);
    b.seq = (colo_sequence_t){COLO_SEQUENCE_INIT, .batch = 1 + t_below(rng, ROWS),
                              .positions = 1 + t_below(rng, COLUMNS), .left_padded = left};
    b.seq.cp = cp;
    b.seq.contiguous = t_below(rng, 3) == 0;
    b.seq.depth = t_below(rng, 2) ? t_below(rng, 5) : 0;
    const int64_t unit = b.seq.contiguous ? (packed ? 1 : cp) : cp > 1 ? 2 * cp : 1;
    const int64_t s = b.seq.positions;
    b.seq.padded = t_below(rng, 2) && s % unit == 0 ? 0 : (s + unit - 1) / unit * unit;
    for (int64_t r = 0; r < b.seq.batch; r++) {
        b.lengths[r] = t_below(rng, 5) ? t_below(rng, s + 1) : t_below(rng, 2) ? s : 0;
        int64_t capacity = (b.lengths[r] + unit - 1) / unit * unit + unit * t_below(rng, 2);
        if (b.seq.contiguous && packed && r + 1 == b.seq.batch) /* only the stream divides */
            capacity += (cp - (b.cu[r] + capacity) % cp) % cp;
        b.cu[r + 1] = b.cu[r] + capacity;
    }
    memset(b.tokens, 0xff, sizeof b.tokens);
    memset(b.packed_tokens, 0xff, sizeof b.packed_tokens);
    for (int64_t r = 0; r < b.seq.batch; r++)
        for (int64_t x = 0; x < length_of(r); x++) {
            b.tokens[r * s + x + (left ? s - length_of(r) : 0)] = code(r, x);
            b.packed_tokens[b.cu[r] + x] = code(r, x);
        }
    for (int64_t rank = 0; rank < cp; rank++) {
        int64_t all = 0; /* rows that are cut at once */
        b.n = 0;
        for (int64_t r = 0; r < b.seq.batch; r++) {
            int64_t capacity = packed ? b.cu[r + 1] - b.cu[r] : b.seq.padded ? b.seq.padded : s;
            ref_sequence_row(r, length_of(r), capacity, s, left && !packed, list + all);
            all += capacity;
            if (packed && b.seq.contiguous && r + 1 < b.seq.batch)
                continue;
            b.n += ref_sequence_cut(list, all, cp, rank, b.seq.contiguous, b.want[rank] + b.n);
            all = 0;
        }
    }
}

static bool has_target(const ref_token_t *t)
{
    return t->x >= 0 && t->x + b.seq.depth + 1 < length_of(t->row);
}

static int64_t column_of(const ref_token_t *t)
{
    return t->x + (b.seq.left_padded ? b.seq.positions - length_of(t->row) : 0);
}

/* Upstream gradient of rank @r at a place of the gathered table; small integers. */
static double d_out_of(int64_t r, int64_t row, int64_t column)
{
    return (double)((row * 31 + column * 7 + r * 13) % 101 - 50);
}

static colo_status_t run_with(void *batch, gather_rank_t *m)
{
    batch_t *g = batch;
    const int r = m->rank;
    colo_sequence_t seq = g->seq;
    seq.cp_rank = r;
    seq.lengths = g->has_lengths ? g->lengths : NULL;
    seq.cu_padded = g->packed ? g->cu : NULL;
    const int64_t n = colo_sequence_count(&seq), cols = seq.positions - 1, stride = cols + 3,
                  table = seq.batch * stride;
    double values[MOST];
    size_t bytes;
    colo_comm_stats_t stats;
    rank_check(n == g->n);
    void *lengths = gather_put(m, g->lengths, sizeof g->lengths),
         *cu = gather_put(m, g->cu, sizeof g->cu);
    seq.device_lengths = seq.lengths ? lengths : NULL;
    seq.device_cu_padded = seq.cu_padded ? cu : NULL;

    const colo_tensor_t tokens =
        g->stream ? where_tensor(gather_put(m, g->packed_tokens, sizeof g->packed_tokens), COLO_I64,
                                 1, &g->cu[seq.batch])
                  : where_tensor(gather_put(m, g->tokens, sizeof g->tokens), COLO_I64, 2,
                                 (int64_t[]){seq.batch, seq.positions});
    const colo_tensor_t targets = where_tensor(gather_put(m, NULL, (size_t)n * 8), COLO_I64, 1, &n),
                        mask = where_tensor(gather_put(m, NULL, (size_t)n), COLO_U8, 1, &n);
    rank_try(colo_sequence_targets(&seq, &tokens, IGNORE, &targets, NULL));
    where.get(g->targets[r], targets.data, (size_t)n * 8);
    for (int what = 0; what < 2; what++) {
        rank_try(colo_sequence_mask(&seq, (colo_sequence_mask_t)what, &mask, NULL));
        where.get(g->mask[r][what], mask.data, (size_t)n);
    }

    /* local values: the token's own code; padding holds what must not be seen */
    for (int64_t i = 0; i < n; i++)
        values[i] = g->want[r][i].x < 0 ? NAN : (double)code(g->want[r][i].row, g->want[r][i].x);
    const colo_tensor_t lt = where_tensor(gather_put(m, values, (size_t)n * 8), COLO_F64, 1, &n),
                        dlt = where_tensor(gather_put(m, NULL, (size_t)n * 8), COLO_F64, 1, &n);
    for (int64_t i = 0; i < table; i++)
        values[i] = -5;
    colo_tensor_t ot = where_tensor(gather_put(m, values, (size_t)table * 8), COLO_F64, 2,
                                    (int64_t[]){seq.batch, cols});
    ot.stride[0] = stride;
    colo_tensor_t dot = ot;
    for (int64_t i = 0; i < table; i++)
        values[i] = d_out_of(r, i / stride, i % stride);
    dot.data = gather_put(m, values, (size_t)table * 8);
    rank_try(colo_sequence_workspace_size(&seq, COLO_F64, &bytes));
    void *workspace = gather_put(m, NULL, bytes);
    colo_comm_stats_reset(m->group);
    rank_try(colo_sequence_gather(&seq, &lt, &ot, m->group, workspace, NULL));
    t_comm_stats(m->group, &stats);
    g->gathers[r] = stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
    g->total[r][0] = total_ops(&stats);
    for (int adjoint = 0; adjoint < 2; adjoint++) {
        colo_comm_stats_reset(m->group);
        rank_try(colo_sequence_gather_backward(&seq, (colo_sequence_adjoint_t)adjoint, &dot, &dlt,
                                               adjoint ? m->group : NULL,
                                               adjoint ? workspace : NULL, NULL));
        t_comm_stats(m->group, &stats);
        g->scatters[r] = stats.ops[COLO_OP_REDUCE_SCATTER][COLO_CATEGORY_LOSS];
        g->total[r][1 + adjoint] = total_ops(&stats);
        where.get(g->d_local[r][adjoint], dlt.data, (size_t)n * 8);
    }
    where.get(values, ot.data, (size_t)table * 8);
    for (int64_t i = 0; i < table; i++)
        if (i % stride < cols)
            g->out[r][i / stride * cols + i % stride] = values[i];
        else
            rank_check(values[i] == -5); /* a gap */
    return COLO_OK;
}

static void judge(const char *label)
{
    const int64_t s = b.seq.positions, cp = b.seq.cp, cols = s - 1;
    double table[ROWS * COLUMNS];
    gather_shape(&b.shape, (int32_t)cp, 0, 1, COLO_F64, run_with);
    assert_ok(gather_run(&b, sizeof b));
    memset(table, 0, sizeof table);
    for (int64_t r = 0; r < cp; r++)
        for (int64_t i = 0; i < b.n; i++) {
            const ref_token_t *t = &b.want[r][i];
            const bool target = has_target(t);
            const int64_t want = target ? code(t->row, t->x + b.seq.depth + 1) : IGNORE;
            double sum = 0, own = 0;
            if (target) {
                table[t->row * cols + column_of(t)] = (double)code(t->row, t->x);
                own = d_out_of(r, t->row, column_of(t));
                for (int64_t q = 0; q < cp; q++)
                    sum += d_out_of(q, t->row, column_of(t));
            }
            if (b.targets[r][i] != want)
                fail_msg("%s: rank %d, element %d: target %lld, expected %lld", label, (int)r,
                         (int)i, (long long)b.targets[r][i], (long long)want);
            assert_int_equal(b.mask[r][COLO_SEQUENCE_TOKENS][i], t->x >= 0);
            assert_int_equal(b.mask[r][COLO_SEQUENCE_TARGETS][i], target);
            if (b.d_local[r][COLO_SEQUENCE_SLICE][i] != own ||
                b.d_local[r][COLO_SEQUENCE_SUM][i] != sum)
                fail_msg("%s: rank %d, element %d: gradient %g and %g, expected %g and %g", label,
                         (int)r, (int)i, b.d_local[r][0][i], b.d_local[r][1][i], own, sum);
        }
    for (int64_t r = 0; r < cp; r++) {
        for (int64_t i = 0; i < b.seq.batch * cols; i++)
            if (b.out[r][i] != table[i])
                fail_msg("%s: rank %d, row %d, column %d: %g, expected %g", label, (int)r,
                         (int)(i / cols), (int)(i % cols), b.out[r][i], table[i]);
        assert_int_equal(b.gathers[r], cp > 1);
        assert_int_equal(b.total[r][0], cp > 1);
        assert_int_equal(b.total[r][1], 0);
        assert_int_equal(b.scatters[r], cp > 1);
        assert_int_equal(b.total[r][2], cp > 1);
    }
}

T_CASE(batches_on_context_ranks_match_lists_cut_by_hand)
{
    static const int64_t sizes[] = {1, 2, 3, 4, 8};
    uint64_t rng = t_seed();
    for (int64_t i = 0; i < t_scaled(60); i++)
        for (int k = 0; k < 5; k++)
            for (int form = 0; form < 4; form++) {
                draw(&rng, sizes[k], form / 2, form % 2);
                const char *label =
                    t_text("case %d, cp %d, %s, %s padded", (int)i, (int)sizes[k],
                           form / 2 ? "packed" : "dense", form % 2 ? "left" : "right");
                judge(label);
            }
}

/* Worked by hand: S = 8 tokens a..h, cp 2: rank 0 has a b g h, rank 1 c d e f. */
T_CASE(the_target_of_a_chunks_last_token_is_the_next_chunks_first)
{
    int64_t tokens[8] = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}, got[4];
    colo_sequence_t seq = {COLO_SEQUENCE_INIT, .batch = 1, .positions = 8};
    colo_tensor_t from = colo_tensor_host(tokens, COLO_I64, 2, (int64_t[]){1, 8});
    colo_tensor_t to = colo_tensor_host(got, COLO_I64, 1, (int64_t[]){4});
    seq.cp = 2;
    assert_ok(colo_sequence_targets(&seq, &from, -1, &to, NULL));
    assert_memory_equal(got, ((int64_t[]){'b', 'c', 'h', -1}), sizeof got);
    seq.cp_rank = 1;
    assert_ok(colo_sequence_targets(&seq, &from, -1, &to, NULL));
    assert_memory_equal(got, ((int64_t[]){'d', 'e', 'f', 'g'}), sizeof got);
    seq.depth = 3;
    assert_ok(colo_sequence_targets(&seq, &from, -1, &to, NULL));
    assert_memory_equal(got, ((int64_t[]){'g', 'h', -1, -1}), sizeof got);
    seq.depth = INT64_MAX;
    assert_ok(colo_sequence_targets(&seq, &from, -1, &to, NULL));
    assert_memory_equal(got, ((int64_t[]){-1, -1, -1, -1}), sizeof got);
}

T_CASE(the_mask_of_a_batch_is_a_dense_sequence_on_one_rank)
{
    const int64_t lengths[3] = {2, 0, 4};
    uint8_t mask[12];
    colo_sequence_t seq = {COLO_SEQUENCE_INIT, .batch = 3, .positions = 4, .lengths = lengths};
    colo_tensor_t m = colo_tensor_host(mask, COLO_U8, 2, (int64_t[]){3, 4});
    assert_ok(colo_sequence_mask(&seq, COLO_SEQUENCE_TOKENS, &m, NULL));
    assert_memory_equal(mask, ((uint8_t[]){1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1}), 12);
    seq.left_padded = true;
    assert_ok(colo_sequence_mask(&seq, COLO_SEQUENCE_TARGETS, &m, NULL));
    assert_memory_equal(mask, ((uint8_t[]){0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0}), 12);
}

T_CASE(rows_are_packed_with_padding_for_every_split)
{
    const int64_t lengths[4] = {5, 0, 8, 1};
    int64_t cu[5] = {9, 9, 9, 9, 9};
    assert_ok(colo_sequence_pack(lengths, 4, 1, 2, false, cu));
    assert_memory_equal(cu, ((int64_t[]){0, 8, 8, 16, 20}), sizeof cu);
    assert_ok(colo_sequence_pack(lengths, 4, 2, 2, true, cu)); /* lcm(2 * 4, 16 * 2) = 32 */
    assert_memory_equal(cu, ((int64_t[]){0, 32, 32, 64, 96}), sizeof cu);
    assert_ok(colo_sequence_pack(NULL, 0, 1, 1, false, cu));
    assert_int_equal(cu[0], 0);
    cu[0] = 7;
    assert_fails(colo_sequence_pack(lengths, -1, 1, 1, false, cu), COLO_ERR_ARG, "-1 rows");
    assert_fails(colo_sequence_pack(NULL, 2, 1, 1, false, cu), COLO_ERR_ARG, "lengths is NULL");
    assert_fails(colo_sequence_pack(lengths, 4, 0, 1, false, cu), COLO_ERR_ARG,
                 "row 0: padded: tp 0");
    assert_fails(colo_sequence_pack((int64_t[]){1, INT64_MAX}, 2, 1, 1, false, cu), COLO_ERR_ARG,
                 "the rows up to 1 exceed");
    assert_int_equal(cu[0], 7);
}

/* ---- refusals ---- */

T_CASE(batches_that_cannot_be_are_refused_by_row)
{
    const int64_t lengths[3] = {2, 4, 3}, cu[4] = {0, 4, 8, 12};
    const colo_sequence_t good = {.struct_size = sizeof good,
                                  .batch = 3,
                                  .positions = 4,
                                  .lengths = lengths,
                                  .cu_padded = cu,
                                  .cp = 2};
    colo_sequence_t s;
    assert_ok(colo_sequence_check(&good));
    assert_int_equal(colo_sequence_count(&good), 6);
#define REFUSE(change, status, words)                         \
    do {                                                      \
        s = good;                                             \
        change;                                               \
        assert_fails(colo_sequence_check(&s), status, words); \
    } while (0)
    assert_fails(colo_sequence_check(NULL), COLO_ERR_ARG, "sequence: seq is NULL");
    REFUSE(s.struct_size = 1, COLO_ERR_ARG, "struct_size is 1");
    REFUSE(s.batch = -1, COLO_ERR_ARG, "-1 rows");
    REFUSE(s.depth = -1, COLO_ERR_ARG, "depth is -1, expected 0 or more");
    REFUSE(s.positions = 0, COLO_ERR_ARG, "3 rows of 0 columns");
    REFUSE((s.cu_padded = NULL, s.padded = 3), COLO_ERR_ARG, "padded is 3, expected 0 or at least");
    REFUSE((s.cu_padded = NULL, s.padded = 5), COLO_ERR_LAYOUT,
           "5 positions do not divide by 2 * cp = 4");
    REFUSE((s.cp = 0, s.cp_rank = 1), COLO_ERR_ARG, "cp_rank 1 is outside [0, 1)");
    REFUSE(s.cp = -1, COLO_ERR_ARG, "cp_rank 0 is outside [0, -1)");
    REFUSE(s.cp_rank = 2, COLO_ERR_ARG, "cp_rank 2 is outside [0, 2)");
    REFUSE(s.lengths = ((int64_t[]){2, 5, 3}), COLO_ERR_LAYOUT,
           "row 1 has 5 tokens, expected 0..4");
    REFUSE(s.lengths = ((int64_t[]){2, -1, 3}), COLO_ERR_LAYOUT, "row 1 has -1 tokens");
    REFUSE((s.positions = 9, s.lengths = ((int64_t[]){2, 5, 3})), COLO_ERR_LAYOUT,
           "row 1 has 5 tokens, its segment has 4 positions");
    REFUSE(s.cu_padded = ((int64_t[]){0, 4, 2, 12}), COLO_ERR_LAYOUT,
           "not ascending at segment 1: from 4 to 2");
    REFUSE((s.lengths = NULL, s.cu_padded = ((int64_t[]){0, 4, 7, 11})), COLO_ERR_LAYOUT,
           "segment 1 has 3 positions, shorter than 2 * cp = 4; pad it, colo_sequence_pack()");
    REFUSE(s.cu_padded = ((int64_t[]){0, 4, 10, 14}), COLO_ERR_LAYOUT,
           "segment 1 has padded length 6, which does not divide by 2 * cp = 4");
    REFUSE(s.cu_padded = ((int64_t[]){4, 8, 12, 16}), COLO_ERR_LAYOUT, "cu_padded[0] is 4");
    REFUSE((s.cu_padded = NULL, s.lengths = NULL, s.batch = INT64_MAX / 8), COLO_ERR_ARG,
           "exceed 2^63 bytes");
#undef REFUSE
}

T_CASE(tensors_that_do_not_fit_are_refused_and_nothing_is_written)
{
    int64_t tokens[8] = {0}, targets[8];
    uint8_t mask[8];
    double local[8] = {0}, out[6], sentinel[8];
    _Alignas(COLO_ALIGNMENT) double workspace[8];
    size_t n = 77;
    colo_sequence_t seq = {COLO_SEQUENCE_INIT, .batch = 2, .positions = 4};
    colo_comm_t *self = t_self();
    colo_tensor_t tk = colo_tensor_host(tokens, COLO_I64, 2, (int64_t[]){2, 4});
    colo_tensor_t tg = colo_tensor_host(targets, COLO_I64, 1, (int64_t[]){8});
    colo_tensor_t mk = colo_tensor_host(mask, COLO_U8, 1, (int64_t[]){8});
    colo_tensor_t lc = colo_tensor_host(local, COLO_F64, 2, (int64_t[]){2, 4});
    colo_tensor_t ot = colo_tensor_host(out, COLO_F64, 2, (int64_t[]){2, 3});
    memset(sentinel, 0xa5, sizeof sentinel);
    memset(targets, 0xa5, sizeof targets);
    memset(mask, 0xa5, sizeof mask);
    memset(out, 0xa5, sizeof out);
    assert_fails(colo_sequence_targets(&seq, T_TENSOR(tokens, COLO_I64, 8), 0, &tg, NULL),
                 COLO_ERR_SHAPE, "tokens: 1 axes, expected [2, 4]");
    assert_fails(colo_sequence_targets(&seq, T_TENSOR(tokens, COLO_I64, 2, 3), 0, &tg, NULL),
                 COLO_ERR_SHAPE, "tokens: 3 columns, 1 apart, expected 4");
    assert_fails(colo_sequence_targets(&seq, T_TENSOR(tokens, COLO_I32, 2, 4), 0, &tg, NULL),
                 COLO_ERR_ARG, "dtype i32");
    assert_fails(colo_sequence_targets(&seq, &tk, 0, T_TENSOR(targets, COLO_I64, 7), NULL),
                 COLO_ERR_SHAPE, "targets: 7 elements, expected 8 contiguous ones");
    assert_fails(colo_sequence_mask(&seq, COLO_SEQUENCE_TOKENS, T_TENSOR(mask, COLO_I8, 8), NULL),
                 COLO_ERR_ARG, "mask: dtype i8, expected u8");
    assert_fails(colo_sequence_mask(&seq, (colo_sequence_mask_t)2, &mk, NULL), COLO_ERR_ARG,
                 "mask 2, expected");
    assert_fails(colo_sequence_gather(&seq, &lc, &ot, NULL, workspace, NULL), COLO_ERR_ARG,
                 "group is NULL, expected the cp group");
    assert_fails(
        colo_sequence_gather(&seq, T_TENSOR(local, COLO_BF16, 8), &ot, self, workspace, NULL),
        COLO_ERR_ARG, "local: dtype bf16, expected f32 or f64");
    assert_fails(
        colo_sequence_gather(&seq, &lc, T_TENSOR(out, COLO_F32, 2, 3), self, workspace, NULL),
        COLO_ERR_ARG, "out: dtype f32, expected f64");
    assert_fails(
        colo_sequence_gather(&seq, &lc, T_TENSOR(out, COLO_F64, 2, 2), self, workspace, NULL),
        COLO_ERR_SHAPE, "out: 2 axes, 4 elements, expected [2, 3]");
    seq.cp = 2;
    assert_fails(
        colo_sequence_gather(&seq, T_TENSOR(local, COLO_F64, 4), &ot, self, workspace, NULL),
        COLO_ERR_ARG, "rank 0 of a group of 1, expected the cp group: rank 0 of 2");
    seq.cp = 1;
    assert_fails(colo_sequence_gather_backward(&seq, (colo_sequence_adjoint_t)2, &ot, &lc, self,
                                               workspace, NULL),
                 COLO_ERR_ARG, "adjoint 2, expected slice (0) or sum (1)");
    assert_fails(
        colo_sequence_gather_backward(&seq, COLO_SEQUENCE_SUM, &ot, &lc, NULL, workspace, NULL),
        COLO_ERR_ARG, "group is NULL");
    for (int sum = 0; sum < 2; sum++)
        assert_fails(sum ? colo_sequence_gather_backward(&seq, COLO_SEQUENCE_SUM, &ot, &lc, self,
                                                         workspace + 1, NULL)
                         : colo_sequence_gather(&seq, &lc, &ot, self, workspace + 1, NULL),
                     COLO_ERR_ARG, "workspace is 8 past a multiple of 256 bytes, ");
    assert_fails(colo_sequence_workspace_size(&seq, COLO_I64, &n), COLO_ERR_ARG, "dtype i64");
    assert_int_equal(n, 77);
    assert_ok(colo_sequence_workspace_size(&seq, COLO_F64, &n));
    assert_true(n > 0 && n % 256 == 0);
    assert_memory_equal(targets, sentinel, sizeof targets);
    assert_memory_equal(mask, sentinel, sizeof mask);
    assert_memory_equal(out, sentinel, sizeof out);
    seq.positions = 2; /* one column: how far columns lie apart does not matter */
    lc = colo_tensor_host(local, COLO_F64, 1, (int64_t[]){4});
    ot = colo_tensor_host(out, COLO_F64, 2, (int64_t[]){2, 1});
    ot.stride[1] = 5;
    assert_ok(colo_sequence_gather(&seq, &lc, &ot, self, workspace, NULL));
}

T_CASE_ON(2, a_rank_with_a_bad_argument_does_not_leave_the_others_waiting)
{
    const int r = colo_comm_rank(world);
    double local[2] = {0}, out[3] = {7, 7, 7};
    _Alignas(COLO_ALIGNMENT) double workspace[4];
    colo_sequence_t seq = {COLO_SEQUENCE_INIT, .batch = 1, .positions = 4};
    seq.cp = 2;
    seq.cp_rank = r;
    rank_try(colo_comm_set_timeout(world, 3000));
    rank_try(colo_comm_set_check(world, 2));
    colo_tensor_t lt = colo_tensor_host(local, COLO_F64, 1, (int64_t[]){r ? 1 : 2});
    colo_tensor_t ot = colo_tensor_host(out, COLO_F64, 2, (int64_t[]){1, 3});
    rank_check(colo_sequence_gather(&seq, &lt, &ot, world, workspace, NULL) ==
               (r ? COLO_ERR_SHAPE : COLO_ERR_PEER));
    rank_check(out[0] == 7 && out[2] == 7);
    return COLO_OK;
}

T_MAIN_IF(where.need(), "loss/sequence")
