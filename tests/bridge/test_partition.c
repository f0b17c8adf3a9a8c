/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_partition.c - who gets which position, against cutting lists by hand: chunks are copied out
 * of a list of positions and strung together, no index is computed. Movement is compared exactly on
 * values that name their place.
 */
#include "harness/harness.h"

/* ---- the oracle: lists of positions ---- */

typedef struct list {
    int64_t n, at[4096];
} list;

static void take(list *to, const list *from, int64_t lo, int64_t hi)
{
    for (int64_t i = lo; i < hi; i++)
        to->at[to->n++] = from->at[i];
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
        all.at[all.n++] = i;
    for (int64_t j = 0; j < (p->segments ? p->segments : 1); j++) {
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
        if (colo_partition_index(p, i) != want.at[i])
            fail_msg("cp %lld/%lld tp %lld/%lld S %lld segments %lld: local %lld is %lld, cut %lld",
                     (long long)p->cp_rank, (long long)p->cp, (long long)p->tp_rank,
                     (long long)p->tp, (long long)p->positions, (long long)p->segments,
                     (long long)i, (long long)colo_partition_index(p, i), (long long)want.at[i]);
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

static void eight_positions_on_two_cp_ranks(void **state)
{
    static const int64_t want[2][4] = {{0, 1, 6, 7}, {2, 3, 4, 5}};
    (void)state;
    for (int64_t c = 0; c < 2; c++) {
        colo_partition_t p = {.cp = 2, .cp_rank = c, .tp = 1, .positions = 8};
        assert_int_equal(colo_partition_count(&p), 4);
        for (int64_t i = 0; i < 4; i++)
            assert_int_equal(colo_partition_index(&p, i), want[c][i]);
    }
}

static void two_packed_segments_on_two_cp_ranks(void **state)
{
    static const int64_t cu[] = {0, 4, 12}, want[2][6] = {{0, 3, 4, 5, 10, 11}, {1, 2, 6, 7, 8, 9}};
    (void)state;
    for (int64_t c = 0; c < 2; c++) {
        colo_partition_t p = {
            .cp = 2, .cp_rank = c, .tp = 1, .positions = 12, .segments = 2, .cu_padded = cu};
        assert_ok(colo_partition_check(&p));
        for (int64_t i = 0; i < 6; i++)
            assert_int_equal(colo_partition_index(&p, i), want[c][i]);
    }
}

static void dense_shards_match_cutting_by_hand(void **state)
{
    (void)state;
    for (int64_t cp = 1; cp <= 6; cp++)
        for (int64_t tp = 1; tp <= 4; tp++)
            for (int64_t k = 0; k <= 5; k++)
                check_all_ranks((colo_partition_t){
                    .cp = cp, .tp = tp, .positions = k * tp * (cp > 1 ? 2 * cp : 1)});
    check_all_ranks((colo_partition_t){.cp = 3, .tp = 4, .positions = 12}); /* blocks cut chunks */
    check_all_ranks((colo_partition_t){.cp = 2, .tp = 3, .positions = 12});
    check_all_ranks((colo_partition_t){.cp = 1, .tp = 1, .positions = 7});
}

static void packed_shards_match_cutting_by_hand(void **state)
{
    uint64_t rng = t_seed();
    (void)state;
    for (int round = 0; round < t_scaled(400); round++) {
        int64_t cu[10] = {0}, cp = 1 + t_below(&rng, 5), tp = 1 + t_below(&rng, 3);
        int64_t n = 1 + t_below(&rng, 8), unit = cp > 1 ? 2 * cp : 1;
        for (int64_t j = 0; j < n; j++) /* empty ones, too */
            cu[j + 1] = cu[j] + unit * t_below(&rng, 6);
        while (cu[n] / cp % tp != 0) /* the last one pads for tp */
            cu[n] += unit;
        check_all_ranks((colo_partition_t){
            .cp = cp, .tp = tp, .positions = cu[n], .segments = n, .cu_padded = cu});
    }
}

static void long_sequences_need_no_table(void **state)
{
    int64_t s = INT64_C(1) << 60;
    colo_partition_t p = {.cp = 4, .cp_rank = 1, .tp = 2, .tp_rank = 1, .positions = s};
    (void)state;
    assert_ok(colo_partition_check(&p));
    assert_true(colo_partition_count(&p) == s / 8);
    assert_true(colo_partition_index(&p, 0) == s / 8 * 6); /* chunk 6 of 8 */
    assert_true(colo_partition_index(&p, s / 8 - 1) == s / 8 * 7 - 1);
}

/* ---- shard and unshard ---- */

/* Tensors of any order of axes: positions at @axis, the strides those of a parent with a margin. */
typedef struct box {
    int32_t ndim, axis;
    int64_t shape[COLO_MAX_NDIM];
    bool permuted; /* innermost axis outermost in memory */
} box;

static colo_tensor_t strided(const box *b, int64_t positions, colo_dtype_t dtype, void *data,
                             int64_t *elements)
{
    int64_t shape[COLO_MAX_NDIM], step = 1;
    for (int32_t a = 0; a < b->ndim; a++)
        shape[a] = a == b->axis ? positions : b->shape[a];
    colo_tensor_t t = colo_tensor_host(data, dtype, b->ndim, shape);
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
static void put_value(unsigned char *at, size_t size, int64_t pos, int64_t rest)
{
    uint64_t state = (uint64_t)(pos * 100003 + rest + 1), v = t_rand(&state);
    for (size_t k = 0; k < size; k++)
        at[k] = (unsigned char)(v >> (8 * k));
    if (at[0] == 0x5a || at[0] == 0)
        at[0] = 1;
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
    g.data = gm;
    l.data = lm;

    memset(gm, 0x5a, (size_t)ge * size);
    memset(lm, 0x5a, (size_t)le * size);
    memset(want, 0x5a, (size_t)le * size);
    for (int64_t k = 0; k < colo_tensor_count(&g); k++) {
        int64_t at = place(&g, k, b->axis, &pos, &rest);
        put_value(gm + (size_t)at * size, size, pos, rest);
    }
    for (int64_t k = 0; k < colo_tensor_count(&l); k++) {
        int64_t at = place(&l, k, b->axis, &pos, &rest);
        put_value(want + (size_t)at * size, size, mine.at[pos], rest);
    }
    assert_ok(colo_partition_shard(p, &g, b->axis, &l));
    assert_memory_equal(lm, want, (size_t)le * size); /* gaps included */

    /* back: zeros, but for what this rank holds */
    memset(gm, 0x5a, (size_t)ge * size);
    memset(want, 0x5a, (size_t)ge * size);
    for (int64_t k = 0; k < colo_tensor_count(&g); k++) {
        int64_t at = place(&g, k, b->axis, &pos, &rest);
        memset(want + (size_t)at * size, 0, size);
        for (int64_t i = 0; i < mine.n; i++)
            if (mine.at[i] == pos)
                put_value(want + (size_t)at * size, size, pos, rest);
    }
    assert_ok(colo_partition_unshard(p, &l, b->axis, &g));
    assert_memory_equal(gm, want, (size_t)ge * size);
    free(gm);
    free(lm);
    free(want);
}

static void shards_move_bitwise_in_any_layout_and_dtype(void **state)
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
    };
    (void)state;
    for (size_t k = 0; k < sizeof boxes / sizeof *boxes; k++) {
        for (int dtype = 0; dtype < COLO_DTYPE_COUNT; dtype++) {
            for (int64_t r = 0; r < 4; r++) {
                colo_partition_t p = {.cp = 4, .cp_rank = r, .tp = 1, .positions = 24};
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p.segments = 3;
                p.cu_padded = cu;
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p = (colo_partition_t){
                    .cp = 2, .cp_rank = r / 2, .tp = 2, .tp_rank = r % 2, .positions = 12};
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
                p = (colo_partition_t){.cp = 1, .tp = 4, .tp_rank = r, .positions = 12};
                check_movement(&p, &boxes[k], (colo_dtype_t)dtype);
            }
        }
    }
}

/* <shard x, y> == <x, unshard y> in integers, for every rank. */
static void unshard_is_the_adjoint_of_shard(void **state)
{
    enum { S = 48, H = 5 };
    int64_t x[S * H], y[S * H], sx[S * H], uy[S * H];
    uint64_t rng = t_seed();
    (void)state;
    for (int64_t r = 0; r < 6; r++) {
        colo_partition_t p = {.cp = 3, .cp_rank = r / 2, .tp = 2, .tp_rank = r % 2, .positions = S};
        int64_t n = colo_partition_count(&p), left = 0, right = 0;
        assert_int_equal(n, S / 6);
        for (int i = 0; i < S * H; i++) {
            x[i] = t_below(&rng, 2001) - 1000;
            y[i] = t_below(&rng, 2001) - 1000;
        }
        colo_tensor_t tx = colo_tensor_host(x, COLO_I64, 2, (int64_t[]){S, H});
        colo_tensor_t ty = colo_tensor_host(y, COLO_I64, 2, (int64_t[]){n, H});
        colo_tensor_t tsx = colo_tensor_host(sx, COLO_I64, 2, (int64_t[]){n, H});
        colo_tensor_t tuy = colo_tensor_host(uy, COLO_I64, 2, (int64_t[]){S, H});
        assert_ok(colo_partition_shard(&p, &tx, 0, &tsx));
        assert_ok(colo_partition_unshard(&p, &ty, 0, &tuy));
        for (int64_t i = 0; i < n * H; i++)
            left += sx[i] * y[i];
        for (int64_t i = 0; i < S * H; i++)
            right += x[i] * uy[i];
        assert_true(left == right && left != 0);
    }
}

static void empty_tensors_are_moved_without_a_pointer(void **state)
{
    colo_partition_t p = {.cp = 2, .cp_rank = 1, .tp = 1, .positions = 0};
    colo_tensor_t none = colo_tensor_host(NULL, COLO_F32, 2, (int64_t[]){0, 3});
    colo_tensor_t global = colo_tensor_host(NULL, COLO_F32, 2, (int64_t[]){8, 0});
    colo_tensor_t local = colo_tensor_host(NULL, COLO_F32, 2, (int64_t[]){4, 0});
    (void)state;
    assert_ok(colo_partition_shard(&p, &none, 0, &none));
    assert_ok(colo_partition_unshard(&p, &none, 0, &none));
    p.positions = 8;
    assert_ok(colo_partition_shard(&p, &global, 0, &local));
    assert_ok(colo_partition_unshard(&p, &local, 0, &global));
}

/* ---- targets ---- */

static void targets_are_the_next_tokens_of_each_sample(void **state)
{
    static const int64_t want[2][4] = {{11, 12, 13, -100}, {21, 22, 23, -100}};
    int64_t tokens[2][4] = {{10, 11, 12, 13}, {20, 21, 22, 23}}, targets[2][4];
    colo_partition_t p = {.cp = 2, .cp_rank = 1, .tp = 1, .positions = 4};
    colo_tensor_t from = colo_tensor_host(tokens, COLO_I64, 2, (int64_t[]){2, 4});
    colo_tensor_t to = colo_tensor_host(targets, COLO_I64, 2, (int64_t[]){2, 4});
    (void)state;
    assert_ok(colo_partition_next_token(&p, &from, -100, &to));
    assert_memory_equal(targets, want, sizeof want);
    assert_ok(colo_partition_next_token(&p, &from, -100, &from)); /* in place */
    assert_memory_equal(tokens, want, sizeof want);
}

static void packed_targets_stop_at_each_segment(void **state)
{
    static const int64_t cu[] = {0, 3, 3, 4, 8}, want[8] = {1, 2, -1, -1, 5, 6, 7, -1};
    int64_t tokens[8] = {0, 1, 2, 3, 4, 5, 6, 7}, targets[8];
    colo_partition_t p = {.cp = 1, .tp = 1, .positions = 8, .segments = 4, .cu_padded = cu};
    colo_tensor_t from = colo_tensor_host(tokens, COLO_I64, 1, (int64_t[]){8});
    colo_tensor_t to = colo_tensor_host(targets, COLO_I64, 1, (int64_t[]){8});
    (void)state;
    assert_ok(colo_partition_next_token(&p, &from, -1, &to));
    assert_memory_equal(targets, want, sizeof want);
    assert_ok(colo_partition_next_token(&p, &from, -1, &from));
    assert_memory_equal(tokens, want, sizeof want);
}

/* [2, 3, 5] in, transposed memory out; every other element of the output stays. */
static void targets_follow_strides(void **state)
{
    int64_t tokens[2][3][5], targets[2 * 3 * 5 * 2];
    colo_partition_t p = {.cp = 1, .tp = 1, .positions = 5};
    (void)state;
    for (int i = 0; i < 30; i++)
        (&tokens[0][0][0])[i] = 1000 + i;
    for (int i = 0; i < 60; i++)
        targets[i] = -7;
    colo_tensor_t from = colo_tensor_host(tokens, COLO_I64, 3, (int64_t[]){2, 3, 5});
    colo_tensor_t to = colo_tensor_host(targets, COLO_I64, 3, (int64_t[]){2, 3, 5});
    to.stride[0] = 2;
    to.stride[1] = 4;
    to.stride[2] = 12;
    assert_ok(colo_partition_next_token(&p, &from, -1, &to));
    for (int a = 0; a < 2; a++)
        for (int b = 0; b < 3; b++)
            for (int s = 0; s < 5; s++) {
                assert_int_equal(targets[2 * a + 4 * b + 12 * s],
                                 s == 4 ? -1 : tokens[a][b][s + 1]);
                assert_int_equal(targets[2 * a + 4 * b + 12 * s + 1], -7);
            }
}

/* Roll first, shard second: the last target of a chunk comes from the next rank's tokens. */
static void targets_rolled_globally_cross_chunk_borders(void **state)
{
    static const int64_t want[2][4] = {{1, 2, 7, -100}, {3, 4, 5, 6}};
    int64_t tokens[8] = {0, 1, 2, 3, 4, 5, 6, 7}, local[4];
    colo_partition_t p = {.cp = 2, .tp = 1, .positions = 8};
    colo_tensor_t g = colo_tensor_host(tokens, COLO_I64, 1, (int64_t[]){8});
    colo_tensor_t l = colo_tensor_host(local, COLO_I64, 1, (int64_t[]){4});
    (void)state;
    assert_ok(colo_partition_next_token(&p, &g, -100, &g));
    for (p.cp_rank = 0; p.cp_rank < 2; p.cp_rank++) {
        assert_ok(colo_partition_shard(&p, &g, 0, &l));
        assert_memory_equal(local, want[p.cp_rank], sizeof local);
    }
}

/* ---- padding ---- */

/* The smallest length that every split accepts, found by trying one after the other. */
static void padded_lengths_are_the_smallest_that_split(void **state)
{
    (void)state;
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
                    colo_partition_t p = {.cp = cp, .tp = tp, .positions = got};
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

static void padding_refuses_bad_sizes_and_overflow(void **state)
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
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t got = -77;
        assert_fails(colo_partition_padded(bad[i].length, bad[i].tp, bad[i].cp, bad[i].fp8, &got),
                     COLO_ERR_ARG, bad[i].words);
        assert_int_equal(got, -77);
    }
    assert_fails(colo_partition_padded(8, 1, 1, false, NULL), COLO_ERR_ARG, "output is NULL");
}

/* ---- refusals ---- */

static void bad_partitions_are_refused_by_every_call(void **state)
{
    static const int64_t late[] = {1, 8, 16}, back[] = {0, 12, 8, 16}, shorter[] = {0, 8, 12},
                         odd[] = {0, 8, 14, 16}, negative[] = {0, -4, 16};
    static const struct {
        colo_partition_t p;
        colo_status_t want;
        const char *words;
    } bad[] = {
        {{.cp = 0, .tp = 1, .positions = 16}, COLO_ERR_ARG, "cp is 0, expected at least 1"},
        {{.cp = 1, .tp = -1, .positions = 16}, COLO_ERR_ARG, "tp is -1, expected at least 1"},
        {{.cp = 2, .cp_rank = 2, .tp = 1, .positions = 16},
         COLO_ERR_ARG,
         "cp rank 2 is outside [0, 2)"},
        {{.cp = 2, .tp = 2, .tp_rank = -1, .positions = 16},
         COLO_ERR_ARG,
         "tp rank -1 is outside [0, 2)"},
        {{.cp = 2, .tp = 1, .positions = -16}, COLO_ERR_ARG, "-16 positions in 0 segments"},
        {{.cp = 2, .tp = 1, .positions = 16, .segments = -1},
         COLO_ERR_ARG,
         "16 positions in -1 segments"},
        {{.cp = 3, .tp = 1, .positions = 16},
         COLO_ERR_LAYOUT,
         "16 positions do not divide by 2 * cp = 6"},
        {{.cp = 16, .tp = 1, .positions = 16}, COLO_ERR_LAYOUT, "do not divide by 2 * cp = 32"},
        {{.cp = INT64_MAX, .tp = 1, .positions = 16},
         COLO_ERR_LAYOUT,
         "do not divide by 2 * cp = 18446744073709551614"},
        {{.cp = 2, .tp = 3, .positions = 16},
         COLO_ERR_LAYOUT,
         "8 positions of a cp rank do not divide by tp = 3"},
        {{.cp = 1, .tp = 3, .positions = 16},
         COLO_ERR_LAYOUT,
         "16 positions of a cp rank do not divide by tp = 3"},
        {{.cp = 2, .tp = 1, .positions = 16, .segments = 2},
         COLO_ERR_ARG,
         "cu_padded is NULL for 2 segments"},
        {{.cp = 2, .tp = 1, .positions = 16, .segments = 2, .cu_padded = late},
         COLO_ERR_LAYOUT,
         "cu_padded[0] is 1, expected 0"},
        {{.cp = 2, .tp = 1, .positions = 16, .segments = 3, .cu_padded = back},
         COLO_ERR_LAYOUT,
         "not ascending at segment 1: from 12 to 8"},
        {{.cp = 1, .tp = 1, .positions = 16, .segments = 2, .cu_padded = negative},
         COLO_ERR_LAYOUT,
         "not ascending at segment 0: from 0 to -4"},
        {{.cp = 2, .tp = 1, .positions = 16, .segments = 2, .cu_padded = shorter},
         COLO_ERR_LAYOUT,
         "cu_padded ends at 12, expected 16 positions"},
        {{.cp = 2, .tp = 1, .positions = 16, .segments = 3, .cu_padded = odd},
         COLO_ERR_LAYOUT,
         "segment 1 has padded length 6, which does not divide by 2 * cp = 4"},
        {{.cp = 1, .tp = 3, .positions = 16, .segments = 3, .cu_padded = odd},
         COLO_ERR_LAYOUT,
         "16 positions of a cp rank do not divide by tp = 3"},
    };
    int64_t g[16], l[16], mark[16];
    (void)state;
    memset(g, 0xa5, sizeof g);
    memset(l, 0xa5, sizeof l);
    memset(mark, 0xa5, sizeof mark);
    colo_tensor_t tg = colo_tensor_host(g, COLO_I64, 1, (int64_t[]){16});
    colo_tensor_t tl = colo_tensor_host(l, COLO_I64, 1, (int64_t[]){8});
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const colo_partition_t *p = &bad[i].p;
        assert_fails(colo_partition_check(p), bad[i].want, bad[i].words);
        assert_fails(colo_partition_shard(p, &tg, 0, &tl), bad[i].want, bad[i].words);
        assert_fails(colo_partition_unshard(p, &tl, 0, &tg), bad[i].want, bad[i].words);
        assert_fails(colo_partition_next_token(p, &tg, -1, &tg), bad[i].want, bad[i].words);
    }
    assert_fails(colo_partition_check(NULL), COLO_ERR_ARG, "partition: NULL");
    assert_memory_equal(g, mark, sizeof g);
    assert_memory_equal(l, mark, sizeof l);
    colo_partition_t fine = {.cp = 1, .tp = 1, .positions = 16, .segments = 3, .cu_padded = odd};
    assert_ok(colo_partition_check(&fine)); /* any length will do without cp */
}

static void tensors_that_do_not_fit_are_refused(void **state)
{
    colo_partition_t p = {.cp = 2, .tp = 1, .positions = 8};
    int64_t g[24], l[24], mark[24];
    (void)state;
    memset(g, 0xa5, sizeof g);
    memset(l, 0xa5, sizeof l);
    memset(mark, 0xa5, sizeof mark);
    const colo_tensor_t tg = colo_tensor_host(g, COLO_I64, 2, (int64_t[]){8, 3});
    const colo_tensor_t tl = colo_tensor_host(l, COLO_I64, 2, (int64_t[]){4, 3});
    colo_tensor_t t;
#define both_refuse(glob, loc, axis, want, words)                               \
    do {                                                                        \
        assert_fails(colo_partition_shard(&p, glob, axis, loc), want, words);   \
        assert_fails(colo_partition_unshard(&p, loc, axis, glob), want, words); \
    } while (0)
    both_refuse(&tg, &tl, 2, COLO_ERR_ARG, "axis 2 is outside [0, 2)");
    both_refuse(&tg, &tl, -1, COLO_ERR_ARG, "axis -1 is outside [0, 2)");
    both_refuse(&tg, &tl, 1, COLO_ERR_SHAPE, "global axis 1 has 3 positions, expected 8");
    both_refuse(&tg, &tg, 0, COLO_ERR_SHAPE, "local axis 0 has extent 8, expected 4");
    both_refuse(NULL, &tl, 0, COLO_ERR_ARG, "global: tensor is NULL");
    both_refuse(&tg, NULL, 0, COLO_ERR_ARG, "local: tensor is NULL");
    t = colo_tensor_host(l, COLO_I64, 2, (int64_t[]){4, 2});
    both_refuse(&tg, &t, 0, COLO_ERR_SHAPE, "local axis 1 has extent 2, expected 3");
    t = colo_tensor_host(l, COLO_I64, 1, (int64_t[]){4});
    both_refuse(&tg, &t, 0, COLO_ERR_SHAPE, "global has 2 axes, local has 1");
    t = colo_tensor_host(l, COLO_F64, 2, (int64_t[]){4, 3});
    both_refuse(&tg, &t, 0, COLO_ERR_SHAPE, "global is i64, local is f64");
    t = colo_tensor_cuda(l, COLO_I64, 1, 2, (int64_t[]){4, 3});
    both_refuse(&tg, &t, 0, COLO_ERR_UNBUILT, "local is on device 1, expected host memory");
    t = colo_tensor_host(NULL, COLO_I64, 2, (int64_t[]){4, 3});
    both_refuse(&tg, &t, 0, COLO_ERR_ARG, "local: data is NULL");
    t = tl;
    t.stride[1] = 0; /* fine to read, not to write */
    assert_fails(colo_partition_shard(&p, &tg, 0, &t), COLO_ERR_SHAPE,
                 "local is written, but axis 1 has stride 0");
    t = tg;
    t.stride[0] = 0;
    assert_fails(colo_partition_unshard(&p, &tl, 0, &t), COLO_ERR_SHAPE,
                 "global is written, but axis 0 has stride 0");
    assert_memory_equal(g, mark, sizeof g);
    assert_memory_equal(l, mark, sizeof l);
}

static void bad_targets_are_refused(void **state)
{
    colo_partition_t p = {.cp = 1, .tp = 1, .positions = 8};
    int64_t from[16], to[16], mark[16];
    (void)state;
    memset(from, 0, sizeof from);
    memset(to, 0xa5, sizeof to);
    memset(mark, 0xa5, sizeof mark);
    const colo_tensor_t tf = colo_tensor_host(from, COLO_I64, 2, (int64_t[]){2, 8});
    const colo_tensor_t tt = colo_tensor_host(to, COLO_I64, 2, (int64_t[]){2, 8});
    colo_tensor_t t = colo_tensor_host(from, COLO_I32, 2, (int64_t[]){2, 8});
    assert_fails(colo_partition_next_token(&p, &t, -1, &tt), COLO_ERR_SHAPE,
                 "tokens is i32, expected i64");
    t = colo_tensor_host(to, COLO_F64, 2, (int64_t[]){2, 8});
    assert_fails(colo_partition_next_token(&p, &tf, -1, &t), COLO_ERR_SHAPE,
                 "targets is f64, expected i64");
    t = colo_tensor_host(from, COLO_I64, 0, NULL);
    assert_fails(colo_partition_next_token(&p, &t, -1, &tt), COLO_ERR_SHAPE, "tokens has no axis");
    t = colo_tensor_host(from, COLO_I64, 2, (int64_t[]){2, 7});
    assert_fails(colo_partition_next_token(&p, &t, -1, &tt), COLO_ERR_SHAPE,
                 "tokens has 7 positions, expected 8");
    t = colo_tensor_host(to, COLO_I64, 1, (int64_t[]){8});
    assert_fails(colo_partition_next_token(&p, &tf, -1, &t), COLO_ERR_SHAPE,
                 "tokens has 2 axes, targets has 1");
    t = colo_tensor_host(to, COLO_I64, 2, (int64_t[]){1, 8});
    assert_fails(colo_partition_next_token(&p, &tf, -1, &t), COLO_ERR_SHAPE,
                 "targets axis 0 has extent 1, expected 2");
    t = tt;
    t.stride[0] = 0;
    assert_fails(colo_partition_next_token(&p, &tf, -1, &t), COLO_ERR_SHAPE,
                 "targets is written, but axis 0 has stride 0");
    t = colo_tensor_cuda(to, COLO_I64, 0, 2, (int64_t[]){2, 8});
    assert_fails(colo_partition_next_token(&p, &tf, -1, &t), COLO_ERR_UNBUILT,
                 "targets is on device 0, expected host memory");
    assert_fails(colo_partition_next_token(&p, NULL, -1, &tt), COLO_ERR_ARG,
                 "tokens: tensor is NULL");
    assert_memory_equal(to, mark, sizeof to);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_positions_on_two_cp_ranks),
        cmocka_unit_test(two_packed_segments_on_two_cp_ranks),
        cmocka_unit_test(dense_shards_match_cutting_by_hand),
        cmocka_unit_test(packed_shards_match_cutting_by_hand),
        cmocka_unit_test(long_sequences_need_no_table),
        cmocka_unit_test(shards_move_bitwise_in_any_layout_and_dtype),
        cmocka_unit_test(unshard_is_the_adjoint_of_shard),
        cmocka_unit_test(empty_tensors_are_moved_without_a_pointer),
        cmocka_unit_test(targets_are_the_next_tokens_of_each_sample),
        cmocka_unit_test(packed_targets_stop_at_each_segment),
        cmocka_unit_test(targets_follow_strides),
        cmocka_unit_test(targets_rolled_globally_cross_chunk_borders),
        cmocka_unit_test(padded_lengths_are_the_smallest_that_split),
        cmocka_unit_test(padding_refuses_bad_sizes_and_overflow),
        cmocka_unit_test(bad_partitions_are_refused_by_every_call),
        cmocka_unit_test(tensors_that_do_not_fit_are_refused),
        cmocka_unit_test(bad_targets_are_refused),
    };
    return cmocka_run_group_tests_name("bridge/partition", tests, NULL, NULL);
}
