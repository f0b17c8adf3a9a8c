/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_partition.c - which rank gets which position, against cutting lists by hand: chunks are
 * copied out of a list of positions and strung together, no index is computed. Movement is compared
 * exactly on values that name their place. tests/gpu links the same program with tensors on a GPU.
 */
#include "bridge/there.h"

/* ---- the oracle: lists of positions ---- */

typedef struct list {
    int64_t n, index[8192];
} list;

static void take(list *to, const list *from, int64_t lo, int64_t hi)
{
    for (int64_t i = lo; i < hi; i++)
        to->index[to->n++] = from->index[i];
}

/* 2C chunks of one sequence; the rank's first, then its mirror image's */
static void take_zigzag(list *to, const list *sequence, int64_t cp, int64_t cp_rank)
{
    int64_t chunk = sequence->n / (2 * cp);
    if (cp == 1) {
        take(to, sequence, 0, sequence->n);
        return;
    }
    take(to, sequence, cp_rank * chunk, (cp_rank + 1) * chunk);
    take(to, sequence, sequence->n - (cp_rank + 1) * chunk, sequence->n - cp_rank * chunk);
}

static void expect(const colo_partition_t *p, list *mine)
{
    static list all, sequence, cut;
    all.n = cut.n = mine->n = 0;
    for (int64_t i = 0; i < p->positions; i++)
        all.index[all.n++] = i;
    if (p->contiguous)
        take(&cut, &all, p->positions / p->cp * p->cp_rank,
             p->positions / p->cp * (p->cp_rank + 1));
    for (int64_t j = 0; !p->contiguous && j < (p->segments ? p->segments : 1); j++) {
        sequence.n = 0;
        take(&sequence, &all, p->segments ? p->cu_padded[j] : 0,
             p->segments ? p->cu_padded[j + 1] : p->positions);
        take_zigzag(&cut, &sequence, p->cp, p->cp_rank);
    }
    take(mine, &cut, cut.n / p->tp * p->tp_rank, cut.n / p->tp * (p->tp_rank + 1));
}

static void check_index(const colo_partition_t *p)
{
    static list want;
    expect(p, &want);
    assert_ok(colo_partition_check(p));
    assert_int_equal(colo_partition_count(p), want.n);
    for (int64_t i = 0; i < want.n; i++)
        if (colo_partition_index(p, i) != want.index[i])
            fail_msg("cp %lld/%lld tp %lld/%lld S %lld segments %lld: local %lld is %lld, cut %lld",
                     (long long)p->cp_rank, (long long)p->cp, (long long)p->tp_rank,
                     (long long)p->tp, (long long)p->positions, (long long)p->segments,
                     (long long)i, (long long)colo_partition_index(p, i), (long long)want.index[i]);
}

/* For every rank; together they hold each position once. */
static void check_all_ranks(colo_partition_t p)
{
    int *seen = calloc((size_t)p.positions + 1, sizeof *seen);
    assert_non_null(seen);
    for (p.cp_rank = 0; p.cp_rank < p.cp; p.cp_rank++) {
        for (p.tp_rank = 0; p.tp_rank < p.tp; p.tp_rank++) {
            check_index(&p);
            for (int64_t i = 0; i < colo_partition_count(&p); i++)
                seen[colo_partition_index(&p, i)]++;
        }
    }
    for (int64_t i = 0; i < p.positions; i++)
        assert_int_equal(seen[i], 1);
    free(seen);
}

/* ---- the closed form ---- */

T_CASE(dense_shards_match_cutting_by_hand)
{
    for (int64_t cp = 1; cp <= 6; cp++)
        for (int64_t tp = 1; tp <= 4; tp++)
            for (int64_t k = 0; k <= 5; k++)
                check_all_ranks((colo_partition_t){COLO_PARTITION_INIT, .cp = cp, .tp = tp,
                                                   .positions = k * tp * (cp > 1 ? 2 * cp : 1)});
    check_all_ranks((colo_partition_t){COLO_PARTITION_INIT, .cp = 3, .tp = 4,
                                       .positions = 12}); /* blocks cut chunks */
    check_all_ranks((colo_partition_t){COLO_PARTITION_INIT, .cp = 2, .tp = 3, .positions = 12});
    check_all_ranks((colo_partition_t){COLO_PARTITION_INIT, .cp = 1, .tp = 1, .positions = 7});
}

T_CASE(packed_shards_match_cutting_by_hand)
{
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(400); step++) {
        int64_t cu[10] = {0}, cp = 1 + t_below(&rng, 5), tp = 1 + t_below(&rng, 3);
        int64_t n = 1 + t_below(&rng, 8), unit = cp > 1 ? 2 * cp : 1;
        for (int64_t j = 0; j < n; j++) /* empty ones, too */
            cu[j + 1] = cu[j] + unit * t_below(&rng, 6);
        while (cu[n] / cp % tp != 0) /* the last one pads for tp */
            cu[n] += unit;
        check_all_ranks((colo_partition_t){COLO_PARTITION_INIT, .cp = cp, .tp = tp,
                                           .positions = cu[n], .segments = n, .cu_padded = cu});
    }
}

T_CASE(contiguous_shards_match_cutting_by_hand)
{
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(400); step++) {
        int64_t cu[10] = {0}, cp = 1 + t_below(&rng, 5), tp = 1 + t_below(&rng, 3);
        int64_t n = t_below(&rng, 9);
        for (int64_t j = 0; j < n; j++) /* of any length */
            cu[j + 1] = cu[j] + t_below(&rng, 30);
        if (n)
            cu[n] += (cp * tp - cu[n] % (cp * tp)) % (cp * tp);
        check_all_ranks((colo_partition_t){COLO_PARTITION_INIT, .cp = cp, .tp = tp,
                                           .positions = n ? cu[n] : cp * tp * t_below(&rng, 20),
                                           .segments = n, .cu_padded = n ? cu : NULL,
                                           .contiguous = true});
    }
    const colo_partition_t odd = {COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = 7,
                                  .contiguous = true};
    assert_fails(colo_partition_check(&odd), COLO_ERR_LAYOUT,
                 "7 positions do not divide by cp = 2, of which each rank has one interval");
}

T_CASE(long_sequences_need_no_table)
{
    int64_t s = INT64_C(1) << 60;
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 4,       .cp_rank = 1, .tp = 2,
                          .tp_rank = 1,        .positions = s};
    assert_ok(colo_partition_check(&p));
    assert_true(colo_partition_count(&p) == s / 8);
    assert_true(colo_partition_index(&p, 0) == s / 8 * 6); /* chunk 6 of 8 */
    assert_true(colo_partition_index(&p, s / 8 - 1) == s / 8 * 7 - 1);
}

/* ---- shard and unshard ---- */

/* Tensors of any order of axes: positions at @axis, the strides those of a parent with a margin. */
typedef struct box {
    int32_t ndim, axis;
    int64_t shape[COLO_NDIM_MAX];
    bool permuted; /* innermost axis outermost in memory */
} box;

static colo_tensor_t strided(const box *b, int64_t positions, colo_dtype_t dtype, void *data,
                             int64_t *elements)
{
    int64_t shape[COLO_NDIM_MAX], step = 1;
    for (int32_t a = 0; a < b->ndim; a++)
        shape[a] = a == b->axis ? positions : b->shape[a];
    colo_tensor_t t = where_tensor(data, dtype, b->ndim, shape);
    for (int32_t k = 0; k < b->ndim; k++) {
        int32_t a = b->permuted ? k : b->ndim - 1 - k;
        t.stride[a] = step;
        step *= shape[a] + (b->permuted ? 1 : 0); /* a gap after every axis */
    }
    *elements = step;
    return t;
}

/* Offset in elements of the k-th index tuple in row-major order; its index along @axis in *pos. */
static int64_t place(const colo_tensor_t *t, int64_t k, int32_t axis, int64_t *pos, int64_t *rest)
{
    int64_t offset = 0, step = 1;
    *rest = 0;
    for (int32_t a = t->ndim - 1; a >= 0; a--) {
        int64_t c = k % t->shape[a];
        k /= t->shape[a];
        offset += c * t->stride[a];
        if (a == axis) {
            *pos = c;
        } else {
            *rest += c * step;
            step *= t->shape[a];
        }
    }
    return offset;
}

/* Bytes that name (position, rest); never the filler. */
static void put_value(unsigned char *to, size_t size, int64_t pos, int64_t rest)
{
    uint64_t state = (uint64_t)(pos * 100003 + rest + 1), v = t_rand(&state);
    for (size_t k = 0; k < size; k++)
        to[k] = (unsigned char)(v >> (8 * k));
    if (to[0] == 0x5a || to[0] == 0)
        to[0] = 1;
}

static void check_movement(const colo_partition_t *p, const box *b, colo_dtype_t dtype)
{
    static list mine;
    int64_t ge, le, pos = 0, rest;
    size_t size = colo_dtype_size(dtype);
    expect(p, &mine);
    colo_tensor_t g = strided(b, p->positions, dtype, NULL, &ge);
    colo_tensor_t l = strided(b, mine.n, dtype, NULL, &le);
    unsigned char *gm = malloc((size_t)ge * size + 1), *lm = malloc((size_t)le * size + 1);
    unsigned char *want = malloc((size_t)(ge > le ? ge : le) * size + 1);
    assert_true(gm && lm && want);

    memset(gm, 0x5a, (size_t)ge * size);
    memset(lm, 0x5a, (size_t)le * size);
    memset(want, 0x5a, (size_t)le * size);
    for (int64_t k = 0; k < colo_tensor_count(&g); k++) {
        int64_t index = place(&g, k, b->axis, &pos, &rest);
        put_value(gm + (size_t)index * size, size, pos, rest);
    }
    for (int64_t k = 0; k < colo_tensor_count(&l); k++) {
        int64_t index = place(&l, k, b->axis, &pos, &rest);
        put_value(want + (size_t)index * size, size, mine.index[pos], rest);
    }
    g.data = where.put(gm, (size_t)ge * size);
    l.data = where.put(lm, (size_t)le * size);
    assert_ok(colo_partition_shard(p, &g, b->axis, &l, NULL));
    assert_there(l.data, want, (size_t)le * size); /* gaps included */
    where.drop(g.data);

    /* back: zeros, but for what this rank holds */
    memset(gm, 0x5a, (size_t)ge * size);
    memset(want, 0x5a, (size_t)ge * size);
    for (int64_t k = 0; k < colo_tensor_count(&g); k++) {
        int64_t index = place(&g, k, b->axis, &pos, &rest);
        memset(want + (size_t)index * size, 0, size);
        for (int64_t i = 0; i < mine.n; i++)
            if (mine.index[i] == pos)
                put_value(want + (size_t)index * size, size, pos, rest);
    }
    g.data = where.put(gm, (size_t)ge * size);
    assert_ok(colo_partition_unshard(p, &l, b->axis, &g, NULL));
    assert_there(g.data, want, (size_t)ge * size);
    where.drop(g.data);
    where.drop(l.data);
    free(gm);
    free(lm);
    free(want);
}

T_CASE(shards_move_bitwise_in_any_layout_and_dtype)
{
    static const int64_t cu[] = {0, 8, 8, 24};
    static const box boxes[] = {
        {1, 0, {0}, false},
        {2, 0, {0, 3}, false},
        {2, 1, {3, 0}, false},
        {3, 1, {2, 0, 3}, false},
        {3, 0, {0, 2, 3}, true},
        {3, 2, {2, 3, 0}, true},
        {4, 1, {2, 0, 3, 2}, true},
        {5, 0, {0, 2, 1, 3, 2}, false},
        {5, 3, {2, 2, 2, 0, 2}, true},
        {8, 7, {1, 2, 1, 2, 1, 2, 1, 0}, true},
        {4, 1, {2, 0, 3, 2}, false},
    };
    for (size_t k = 0; k < sizeof boxes / sizeof *boxes; k++) {
        for (int dtype = 0; dtype < COLO_DTYPE_COUNT; dtype++) {
            for (int64_t r = 0; r < 4; r++) {
                colo_partition_t p = {COLO_PARTITION_INIT, .cp = 4, .cp_rank = r, .tp = 1,
                                      .positions = 24};
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p.segments = 3;
                p.cu_padded = cu;
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p.contiguous = true;
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p = (colo_partition_t){COLO_PARTITION_INIT, .cp = 2,
                                       .cp_rank = r / 2,    .tp = 2,
                                       .tp_rank = r % 2,    .positions = 12};
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p = (colo_partition_t){COLO_PARTITION_INIT, .cp = 1, .tp = 4, .tp_rank = r,
                                       .positions = 12};
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
            }
        }
    }
}

/* More boxes than one list takes: of segments, and of outer axes that have gaps. */
T_CASE(a_thousand_segments_are_moved)
{
    static const box boxes[] = {{1, 0, {0}, false}, {2, 0, {0, 3}, false}, {2, 1, {2, 0}, true}};
    static const box outer = {5, 4, {9, 9, 2, 2, 0}, true};
    static int64_t cu[1001];
    uint64_t rng = t_seed();
    for (int64_t j = 0; j < 1000; j++)
        cu[j + 1] = cu[j] + 4 * t_below(&rng, 3); /* empty ones, too */
    for (int64_t r = 0; r < 2; r++) {
        colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .cp_rank = r, .tp = 1,
                              .positions = cu[1000]};
        p.segments = 1000;
        p.cu_padded = cu;
        for (size_t k = 0; k < sizeof boxes / sizeof *boxes; k++)
            check_movement(&p, &boxes[k], k ? COLO_BF16 : COLO_F32);
        p = (colo_partition_t){COLO_PARTITION_INIT, .cp = 2, .cp_rank = r, .tp = 1,
                               .positions = 12};
        check_movement(&p, &outer, COLO_F16);
    }
}

T_CASE(empty_tensors_are_moved_without_a_pointer)
{
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .cp_rank = 1, .tp = 1, .positions = 0};
    colo_tensor_t none = where_tensor(NULL, COLO_F32, 2, (int64_t[]){0, 3});
    colo_tensor_t global = where_tensor(NULL, COLO_F32, 2, (int64_t[]){8, 0});
    colo_tensor_t local = where_tensor(NULL, COLO_F32, 2, (int64_t[]){4, 0});
    colo_tensor_t tokens = where_tensor(NULL, COLO_I64, 2, (int64_t[]){0, 8});
    assert_ok(colo_partition_shard(&p, &none, 0, &none, NULL));
    assert_ok(colo_partition_unshard(&p, &none, 0, &none, NULL));
    p.positions = 8;
    assert_ok(colo_partition_shard(&p, &global, 0, &local, NULL));
    assert_ok(colo_partition_unshard(&p, &local, 0, &global, NULL));
    assert_ok(colo_partition_next_token(&p, &tokens, -1, &tokens, NULL));
    p.positions = 0;
    tokens = where_tensor(NULL, COLO_I64, 1, (int64_t[]){0});
    assert_ok(colo_partition_next_token(&p, &tokens, -1, &tokens, NULL));
}

/* ---- targets ---- */

/* Elsewhere, then in place. */
static void check_targets(const colo_partition_t *p, int32_t ndim, const int64_t *shape,
                          const int64_t *tokens, int64_t last, const int64_t *want)
{
    colo_tensor_t from, to;
    there(tokens, COLO_I64, ndim, shape, &from);
    there(NULL, COLO_I64, ndim, shape, &to);
    size_t bytes = (size_t)colo_tensor_count(&from) * sizeof *want;
    assert_ok(colo_partition_next_token(p, &from, last, &to, NULL));
    assert_there(to.data, want, bytes);
    assert_there(from.data, tokens, bytes);
    assert_ok(colo_partition_next_token(p, &from, last, &from, NULL));
    assert_there(from.data, want, bytes);
    where.drop(from.data);
    where.drop(to.data);
}

/* Rows of several tiles of a kernel, and more segments than a list takes. */
T_CASE(long_rows_are_shifted_onto_themselves)
{
    enum { ROWS = 3, S = 20011, SEGMENTS = 700 };
    static int64_t tokens[ROWS][S], want[ROWS][S], cu[SEGMENTS + 1];
    uint64_t rng = t_seed();
    for (int j = 1; j < SEGMENTS; j++) /* short ones, empty ones; the last is some tiles long */
        cu[j] = cu[j - 1] + t_below(&rng, 15);
    cu[SEGMENTS] = S;
    for (int i = 0; i < ROWS; i++)
        for (int64_t k = 0; k < S; k++)
            tokens[i][k] = i * 100000 + k;
    for (int packed = 0; packed < 2; packed++) {
        colo_partition_t p = {COLO_PARTITION_INIT, .cp = 1, .tp = 1, .positions = S};
        for (int i = 0; i < ROWS; i++) {
            for (int64_t k = 0; k < S; k++)
                want[i][k] = k == S - 1 ? -7 : i * 100000 + k + 1;
            for (int j = 0; packed && j < SEGMENTS; j++)
                if (cu[j] < cu[j + 1])
                    want[i][cu[j + 1] - 1] = -7;
        }
        if (packed) {
            p.segments = SEGMENTS;
            p.cu_padded = cu;
        }
        check_targets(&p, 2, (int64_t[]){ROWS, S}, tokens[0], -7, want[0]);
    }
}

/* [2, 3, 5] in, transposed memory out; every other element of the output stays. */
T_CASE(targets_follow_strides)
{
    int64_t tokens[2][3][5], targets[2 * 3 * 5 * 2];
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 1, .tp = 1, .positions = 5};
    colo_tensor_t from, to;
    for (int i = 0; i < 30; i++)
        (&tokens[0][0][0])[i] = 1000 + i;
    for (int i = 0; i < 60; i++)
        targets[i] = -7;
    there(tokens, COLO_I64, 3, (int64_t[]){2, 3, 5}, &from);
    void *out = where.put(targets, sizeof targets);
    to = where_tensor(out, COLO_I64, 3, (int64_t[]){2, 3, 5});
    to.stride[0] = 2;
    to.stride[1] = 4;
    to.stride[2] = 12;
    assert_ok(colo_partition_next_token(&p, &from, -1, &to, NULL));
    where.get(targets, out, sizeof targets);
    for (int again = 0; again < 2; again++) {
        for (int a = 0; a < 2; a++)
            for (int b = 0; b < 3; b++)
                for (int s = 0; s < 5; s++) {
                    assert_int_equal(targets[2 * a + 4 * b + 12 * s],
                                     s + again >= 4 ? -1 : tokens[a][b][s + again + 1]);
                    assert_int_equal(targets[2 * a + 4 * b + 12 * s + 1], -7);
                }
        if (again == 0) {
            assert_ok(colo_partition_next_token(&p, &to, -1, &to, NULL)); /* in place */
            where.get(targets, out, sizeof targets);
        }
    }
    where.drop(from.data);
    where.drop(out);
}

/* Five axes with a gap after each: rows stay apart. */
T_CASE(targets_of_many_axes_are_each_row_s_own)
{
    static const box b = {5, 4, {4, 5, 3, 6, 0}, true};
    int64_t n, pos = 0, rest;
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 1, .tp = 1, .positions = 7};
    colo_tensor_t t = strided(&b, 7, COLO_I64, NULL, &n);
    int64_t *m = malloc((size_t)n * sizeof *m), *want = malloc((size_t)n * sizeof *m);
    assert_true(m && want);
    for (int64_t i = 0; i < n; i++)
        m[i] = want[i] = -9;
    for (int64_t k = 0; k < colo_tensor_count(&t); k++) {
        int64_t index = place(&t, k, 4, &pos, &rest);
        m[index] = 10 * rest + pos;
        want[index] = pos == 6 ? -1 : m[index] + 1;
    }
    t.data = where.put(m, (size_t)n * sizeof *m);
    assert_ok(colo_partition_next_token(&p, &t, -1, &t, NULL));
    assert_there(t.data, want, (size_t)n * sizeof *m);
    where.drop(t.data);
    free(m);
    free(want);
}

/* Roll first, shard second: the last target of a chunk comes from the next rank's tokens. */
T_CASE(targets_rolled_globally_cross_chunk_borders)
{
    static const int64_t want[2][4] = {{1, 2, 7, -100}, {3, 4, 5, 6}};
    int64_t tokens[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    colo_partition_t p = {COLO_PARTITION_INIT, .cp = 2, .tp = 1, .positions = 8};
    colo_tensor_t g, l;
    there(tokens, COLO_I64, 1, (int64_t[]){8}, &g);
    there(NULL, COLO_I64, 1, (int64_t[]){4}, &l);
    assert_ok(colo_partition_next_token(&p, &g, -100, &g, NULL));
    for (p.cp_rank = 0; p.cp_rank < 2; p.cp_rank++) {
        assert_ok(colo_partition_shard(&p, &g, 0, &l, NULL));
        assert_there(l.data, want[p.cp_rank], sizeof want[0]);
    }
    where.drop(g.data);
    where.drop(l.data);
}

/* ---- padding ---- */

/* The smallest length that every split accepts, found by trying one after the other. */
T_CASE(padded_lengths_are_the_smallest_that_split)
{
    for (int64_t tp = 1; tp <= 6; tp++) {
        for (int64_t cp = 1; cp <= 6; cp++) {
            for (int fp8 = 0; fp8 < 2; fp8++) {
                for (int64_t length = 0; length < 200; length += 7) {
                    int64_t got = -1, want = length;
                    while (want % tp || (cp > 1 && want % (tp * 2 * cp)) ||
                           (fp8 && want % (16 * cp)))
                        want++;
                    assert_ok(colo_partition_padded(length, tp, cp, fp8, &got));
                    assert_int_equal(got, want);
                    colo_partition_t p = {COLO_PARTITION_INIT, .cp = cp, .tp = tp,
                                          .positions = got};
                    assert_ok(colo_partition_check(&p));
                }
            }
        }
    }
    int64_t got;
    assert_ok(colo_partition_padded(77, 3, 2, false, &got)); /* lcm 12 */
    assert_int_equal(got, 84);
    assert_ok(colo_partition_padded(1, 3, 2, true, &got)); /* lcm(12, 32) */
    assert_int_equal(got, 96);
    assert_ok(colo_partition_padded(INT64_MAX, 1, 1, false, &got));
    assert_true(got == INT64_MAX);
}

T_CASE(padding_refuses_bad_sizes_and_overflow)
{
    static const struct {
        int64_t length, tp, cp;
        bool fp8;
        const char *words;
    } bad[] = {
        {-1, 1, 1, false, "length -1 is negative"},
        {8, 0, 1, false, "tp 0 and cp 1, expected at least 1"},
        {8, 1, -2, false, "tp 1 and cp -2, expected at least 1"},
        {INT64_MAX, 1, 2, false, "length 9223372036854775807 for tp 1, cp 2 overflows"},
        {1, 1, INT64_MAX, false, "overflows 63 bits"},
        {1, INT64_MAX, 2, false, "overflows 63 bits"},
        {1, 1, INT64_MAX / 2, true, ", fp8 overflows 63 bits"},
        {1, INT64_MAX, 1, true, ", fp8 overflows 63 bits"},
        {INT64_MAX, 2, 1, false, "overflows 63 bits"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t got = -77;
        assert_fails(colo_partition_padded(bad[i].length, bad[i].tp, bad[i].cp, bad[i].fp8, &got),
                     COLO_ERR_ARG, bad[i].words);
        assert_int_equal(got, -77);
    }
    assert_fails(colo_partition_padded(8, 1, 1, false, NULL), COLO_ERR_ARG, "output is NULL");
}

T_MAIN_IF(where.need(), "bridge/partition")
