/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_comm_threads.c - every operation on 1, 2, 3 and 8 in-process ranks against a serial loop.
 *
 * Values are coded by rank and position, so that a swapped part, a shifted slice or a missing rank
 * shows. Movement and sums are compared bitwise: sums combine in rank order, as the loops here do.
 */
#include "harness/harness.h"
#include "ref/ref_half.h"

static const int64_t counts[] = {0, 1, 7, 100, 2049, 9001}; /* around the small-message path */

static const colo_dtype_t reducible[] = {COLO_F32, COLO_F64, COLO_BF16,
                                         COLO_F16, COLO_I32, COLO_I64};

/* 64 random bits for (rank, position): no two alike in practice */
static uint64_t code(int64_t rank, int64_t i)
{
    uint64_t s =
        (uint64_t)rank * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)i * UINT64_C(0xc2b2ae3d27d4eb4f);
    return t_rand(&s);
}

/* ---- movement ---- */

T_CASE_ON_SIZES(all_gather_puts_every_rank_at_its_place)
{
    int32_t n = colo_comm_size(world), me = colo_comm_rank(world);
    for (int d = 0; d < COLO_DTYPE_COUNT; d++)
        for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++)
            for (int in_place = 0; in_place < 2; in_place++) {
                size_t bytes = (size_t)counts[k] * colo_dtype_size((colo_dtype_t)d);
                unsigned char *recv = malloc(bytes * (size_t)n + 1), *send = malloc(bytes + 1);
                unsigned char *from = in_place ? recv + (size_t)me * bytes : send;
                memset(recv, 0xee, bytes * (size_t)n + 1);
                for (size_t i = 0; i < bytes; i++)
                    from[i] = (unsigned char)code(me, (int64_t)i);
                rank_try(colo_comm_all_gather(world, from, recv, counts[k], (colo_dtype_t)d, NULL));
                for (int32_t r = 0; r < n; r++)
                    for (size_t i = 0; i < bytes; i++)
                        rank_check(recv[(size_t)r * bytes + i] ==
                                   (unsigned char)code(r, (int64_t)i));
                rank_check(recv[bytes * (size_t)n] == 0xee);
                free(recv);
                free(send);
            }
    return COLO_OK;
}

T_CASE_ON_SIZES(broadcast_gives_everyone_the_roots_buffer)
{
    int32_t n = colo_comm_size(world), me = colo_comm_rank(world);
    for (int32_t root = 0; root < n; root++)
        for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
            int64_t *x = malloc(sizeof *x * (size_t)(counts[k] + 1));
            for (int64_t i = 0; i <= counts[k]; i++)
                x[i] = (int64_t)code(me, i);
            rank_try(colo_comm_broadcast(world, x, counts[k], COLO_I64, root, NULL));
            for (int64_t i = 0; i < counts[k]; i++)
                rank_check(x[i] == (int64_t)code(root, i));
            rank_check(x[counts[k]] == (int64_t)code(me, counts[k]));
            free(x);
        }
    return COLO_OK;
}

/* ---- reductions ---- */

/* The bits of @v, or of @k if the dtype is one of integers. */
static uint64_t bits_of(colo_dtype_t d, double v, int64_t k)
{
    const float f = (float)v;
    uint64_t bits = 0;
    switch (d) {
    case COLO_F32:
        memcpy(&bits, &f, sizeof f);
        return bits;
    case COLO_F64:
        memcpy(&bits, &v, sizeof v);
        return bits;
    case COLO_BF16:
        return ref_half_round(ref_bf16, v);
    case COLO_F16:
        return ref_half_round(ref_f16, v);
    default:
        return d == COLO_I32 ? (uint32_t)k : (uint64_t)k;
    }
}

static int64_t integer_of(colo_dtype_t d, uint64_t bits)
{
    return d == COLO_I32 ? (int32_t)bits : (int64_t)bits;
}

static double value_of(colo_dtype_t d, uint64_t bits)
{
    float f;
    double v;
    memcpy(&f, &bits, sizeof f);
    memcpy(&v, &bits, sizeof v);
    return d == COLO_F32    ? f
           : d == COLO_F64  ? v
           : d == COLO_BF16 ? ref_half_value(ref_bf16, (uint16_t)bits)
                            : ref_half_value(ref_f16, (uint16_t)bits);
}

/* Element @i of rank @r: floats of mixed sign and size, so that the order of a sum shows. */
static uint64_t element(colo_dtype_t d, int32_t r, int64_t i)
{
    const uint64_t u = code(r, i);
    const double v = ldexp((double)(int64_t)(u >> 20 & 0xfff) - 2048, (int)(u & 15) - 8);
    return bits_of(d, d == COLO_F16 ? v / 64 : v * 1.00097651, (int64_t)u);
}

/* What rank order gives for element @i of @n ranks: sums of halves are floats until the end. */
static uint64_t expected(colo_dtype_t d, colo_redop_t op, int32_t n, int64_t i)
{
    double sum = value_of(d, element(d, 0, i));
    int64_t total = integer_of(d, element(d, 0, i));
    for (int32_t r = 1; r < n; r++) {
        const uint64_t one = element(d, r, i);
        const double v = value_of(d, one);
        const int64_t k = integer_of(d, one);
        if (op == COLO_REDOP_SUM) {
            sum = d == COLO_F64 ? sum + v : (float)(sum + v);
            total = (int64_t)((uint64_t)total + (uint64_t)k);
        } else {
            sum = v > sum ? v : sum;
            total = k > total ? k : total;
        }
    }
    return bits_of(d, sum, total);
}

static uint64_t bits_at(const void *x, size_t elem, int64_t i)
{
    uint64_t u = 0;
    memcpy(&u, (const char *)x + (size_t)i * elem, elem);
    return u;
}

static void put(void *x, size_t elem, int64_t i, uint64_t bits)
{
    memcpy((char *)x + (size_t)i * elem, &bits, elem);
}

struct reduction {
    colo_dtype_t dtype;
    colo_redop_t op;
    bool scatters; /* to each rank its slice */
};

static colo_status_t reduce_rank(colo_comm_t *c, void *arg)
{
    const struct reduction *how = arg;
    const int32_t n = colo_comm_size(c), me = colo_comm_rank(c);
    const size_t elem = colo_dtype_size(how->dtype);
    /* a scatter of most elements to most ranks takes long */
    const size_t most = sizeof counts / sizeof counts[0] - how->scatters;
    for (size_t k = 0; k < most; k++)
        for (int in_place = 0; in_place < 2; in_place++) {
            const int64_t count = counts[k], all = how->scatters ? count * n : count,
                          first = how->scatters ? count * me : 0;
            char *send = malloc(elem * (size_t)all + 1), *recv = malloc(elem * (size_t)count + 1);
            for (int64_t i = 0; i < all; i++)
                put(send, elem, i, element(how->dtype, me, i));
            char *to = in_place ? send + elem * (size_t)first : recv;
            const bool guarded = !in_place || !how->scatters; /* by a byte behind it */
            if (guarded)
                to[elem * (size_t)count] = 0x5a;
            rank_try(how->scatters
                         ? colo_comm_reduce_scatter(c, send, to, count, how->dtype, how->op, NULL)
                         : colo_comm_all_reduce(c, send, to, count, how->dtype, how->op, NULL));
            for (int64_t i = 0; i < count; i++)
                rank_check(bits_at(to, elem, i) == expected(how->dtype, how->op, n, first + i));
            rank_check(!guarded || to[elem * (size_t)count] == 0x5a);
            for (int64_t i = 0; !in_place && i < all; i++)
                rank_check(bits_at(send, elem, i) == element(how->dtype, me, i));
            free(send);
            free(recv);
        }
    return COLO_OK;
}

static void reduce(colo_redop_t op, bool scatters)
{
    for (size_t d = 0; d < sizeof reducible / sizeof reducible[0]; d++)
        assert_ok(t_run_sizes(reduce_rank, &(struct reduction){reducible[d], op, scatters}));
}

T_CASE(all_reduce_sums_in_rank_order_bitwise)
{
    reduce(COLO_REDOP_SUM, false);
}

T_CASE(all_reduce_finds_the_largest)
{
    reduce(COLO_REDOP_MAX, false);
}

T_CASE(reduce_scatter_leaves_each_rank_its_slice)
{
    reduce(COLO_REDOP_SUM, true);
    reduce(COLO_REDOP_MAX, true);
}

/* Every second element is NaN on one rank; f32 is infinite on rank 0 elsewhere. */
T_CASE_ON_SIZES(max_keeps_a_nan_of_any_rank)
{
    enum { COUNT = 3000, FLOATS = 4 };
    const int32_t n = colo_comm_size(world), me = colo_comm_rank(world);
    for (int k = 0; k < FLOATS; k++) {
        const colo_dtype_t d = reducible[k];
        const size_t elem = colo_dtype_size(d);
        const double nan = d == COLO_F16 ? -NAN : NAN, top = d == COLO_F32 ? INFINITY : n - 1;
        double x[COUNT];
        for (int i = 0; i < COUNT; i++)
            put(x, elem, i,
                bits_of(d,
                        i % 2 == 0 && i / 2 % n == me ? nan
                        : me == 0 && top > n          ? top
                                                      : me,
                        0));
        rank_try(colo_comm_all_reduce(world, x, x, COUNT, d, COLO_REDOP_MAX, NULL));
        for (int i = 0; i < COUNT; i++) {
            const double got = value_of(d, bits_at(x, elem, i));
            rank_check(i % 2 ? got == top : isnan(got));
        }
    }
    return COLO_OK;
}

T_CASE_ON_SIZES(nothing_may_be_moved_through_null_buffers)
{
    for (int step = 0; step < 50; step++) {
        rank_try(colo_comm_all_gather(world, NULL, NULL, 0, COLO_F32, NULL));
        rank_try(colo_comm_all_reduce(world, NULL, NULL, 0, COLO_BF16, COLO_REDOP_SUM, NULL));
        rank_try(colo_comm_reduce_scatter(world, NULL, NULL, 0, COLO_I64, COLO_REDOP_MAX, NULL));
        rank_try(colo_comm_broadcast(world, NULL, 0, COLO_U8, 0, NULL));
        rank_try(colo_comm_exchange(world, NULL, 0, NULL, 0, COLO_F32, NULL));
        rank_try(colo_comm_barrier(world, NULL));
    }
    return COLO_OK;
}

/* ---- barriers ---- */

static colo_status_t barrier_rank(colo_comm_t *c, void *arg)
{
    int32_t *last = arg, n = colo_comm_size(c), me = colo_comm_rank(c);
    for (int i = 0; i < 20 * n; i++) { /* plain memory: only the barrier orders these accesses */
        if (i % n == me)
            *last = i;
        rank_try(colo_comm_barrier(c, NULL));
        rank_check(*last == i);
        rank_try(colo_comm_barrier(c, NULL));
    }
    return COLO_OK;
}

T_CASE(a_barrier_orders_plain_memory)
{
    T_THREADS_ONLY();
    int32_t last = -1;
    assert_ok(t_run_sizes(barrier_rank, &last));
}

/* ---- a long mixed sequence with late ranks ---- */

static colo_status_t mixed_rank(colo_comm_t *c, void *arg)
{
    uint64_t shared = *(uint64_t *)arg, own = shared + (uint64_t)colo_comm_rank(c);
    int32_t n = colo_comm_size(c), me = colo_comm_rank(c);
    enum { MOST = 4000 };
    int64_t *a = malloc(sizeof *a * MOST), *b = malloc(sizeof *b * MOST * (size_t)n);
    for (int rep = 0; rep < 300; rep++) {
        int64_t kind = t_below(&shared, 4), count = t_below(&shared, MOST),
                root = t_below(&shared, n);
        for (volatile int64_t idle = t_below(&own, 20000); idle > 0; idle--)
            ;
        for (int64_t i = 0; i < count; i++)
            a[i] = (me + 1) * 100000 + i + rep;
        if (kind == 0) {
            rank_try(colo_comm_all_gather(c, a, b, count, COLO_I64, NULL));
            for (int32_t r = 0; r < n; r++)
                for (int64_t i = 0; i < count; i++)
                    rank_check(b[r * count + i] == (r + 1) * 100000 + i + rep);
        } else if (kind == 1) {
            rank_try(colo_comm_all_reduce(c, a, a, count, COLO_I64, COLO_REDOP_SUM, NULL));
            for (int64_t i = 0; i < count; i++)
                rank_check(a[i] == (int64_t)n * (n + 1) / 2 * 100000 + n * (i + rep));
        } else if (kind == 2) {
            rank_try(colo_comm_broadcast(c, a, count, COLO_I64, (int32_t)root, NULL));
            for (int64_t i = 0; i < count; i++)
                rank_check(a[i] == (root + 1) * 100000 + i + rep);
        } else {
            int64_t got = -1, mine = me * 1000 + rep;
            colo_box_t out = {&mine, {1, 1, 1}, {0, 0, 0}}, in = {&got, {1, 1, 1}, {0, 0, 0}};
            int32_t from = (me + n - 1) % n;
            colo_message_t send = {(me + 1) % n, 1, &out}, recv = {from, 1, &in};
            rank_try(colo_comm_exchange(c, &send, n > 1, &recv, n > 1, COLO_I64, NULL));
            rank_check(n == 1 || got == from * 1000 + rep);
        }
    }
    free(a);
    free(b);
    return COLO_OK;
}

T_CASE(a_long_mixed_sequence_stays_in_step)
{
    uint64_t seed = t_seed();
    assert_ok(t_run_sizes(mixed_rank, &seed));
}

/* ---- the comm of one rank, getters, the run's own arguments ---- */

T_CASE(a_comm_of_one_rank_copies)
{
    colo_comm_t *c = NULL, *child = NULL;
    assert_fails(colo_comm_create_self(NULL), COLO_ERR_ARG, "NULL");
    assert_ok(colo_comm_create_self(&c));
    assert_string_equal(colo_comm_backend(c), "self");
    assert_int_equal(colo_comm_size(c), 1);
    assert_int_equal(colo_comm_world_rank(c, 0), 0);
    float x[3] = {1, -2, NAN}, y[3] = {0};
    assert_ok(colo_comm_all_gather(c, x, y, 3, COLO_F32, NULL));
    assert_memory_equal(x, y, sizeof x);
    memset(y, 0, sizeof y);
    assert_ok(colo_comm_all_reduce(c, x, y, 3, COLO_F32, COLO_REDOP_SUM, NULL));
    assert_memory_equal(x, y, sizeof x);
    memset(y, 0, sizeof y);
    assert_ok(colo_comm_reduce_scatter(c, x, y, 3, COLO_F32, COLO_REDOP_MAX, NULL));
    assert_memory_equal(x, y, sizeof x);
    assert_ok(colo_comm_broadcast(c, y, 3, COLO_F32, 0, NULL));
    assert_ok(colo_comm_barrier(c, NULL));
    assert_ok(colo_comm_exchange(c, NULL, 0, NULL, 0, COLO_F32, NULL));
    colo_grid_t one;
    assert_ok(colo_grid_parse(&one, "tp=1,dp=1", 1));
    assert_ok(colo_comm_split(c, &one, "tp", &child));
    assert_int_equal(colo_comm_size(child), 1);
    colo_comm_destroy(&c);
    assert_ok(colo_comm_barrier(child, NULL));
    colo_comm_destroy(&child);
    colo_comm_destroy(&child);
    colo_comm_destroy(NULL);
}

T_CASE(settings_are_checked_and_inherited)
{
    colo_comm_t *c = NULL, *child = NULL;
    assert_ok(colo_comm_create_self(&c));
    assert_fails(colo_comm_set_timeout(c, 0), COLO_ERR_ARG, "0 ms");
    assert_fails(colo_comm_set_timeout(c, -5), COLO_ERR_ARG, "-5 ms");
    assert_fails(colo_comm_set_timeout(NULL, 5), COLO_ERR_ARG, "NULL");
    assert_fails(colo_comm_set_check(c, 3), COLO_ERR_ARG, "level 3");
    assert_fails(colo_comm_set_check(c, -1), COLO_ERR_ARG, "level -1");
    assert_fails(colo_comm_set_check(NULL, 1), COLO_ERR_ARG, "NULL");
    assert_int_equal(colo_comm_check_level(c), 1);
    assert_ok(colo_comm_set_check(c, 2));
    assert_ok(colo_comm_split_color(c, 5, 0, &child));
    assert_int_equal(colo_comm_check_level(child), 2);
    colo_comm_set_name(child, "a name that is longer than thirty-one bytes");
    assert_string_equal(colo_comm_name(child), "a name that is longer than thir");
    assert_int_equal(strlen(colo_comm_name(child)), 31);
    colo_comm_destroy(&child);
    colo_comm_destroy(&c);
    assert_int_equal(colo_comm_rank(NULL), -1);
    assert_int_equal(colo_comm_size(NULL), 0);
    assert_int_equal(colo_comm_find(NULL, 0), -1);
}

static colo_status_t first_rank_only(colo_comm_t *c, void *arg)
{
    *(int *)arg += 1;
    return COLO_OK;
}

T_CASE(a_run_refuses_senseless_sizes)
{
    int calls = 0;
    assert_fails(colo_comm_threads_run(0, first_rank_only, &calls), COLO_ERR_ARG, "0 ranks");
    assert_fails(colo_comm_threads_run(-1, first_rank_only, &calls), COLO_ERR_ARG, "-1 ranks");
    assert_fails(colo_comm_threads_run(4097, first_rank_only, &calls), COLO_ERR_ARG, "4097");
    assert_fails(colo_comm_threads_run(2, NULL, &calls), COLO_ERR_ARG, "NULL");
    assert_int_equal(calls, 0);
    assert_ok(colo_comm_threads_run(1, first_rank_only, &calls));
    assert_int_equal(calls, 1);
}

T_CASE_ON_THREADS(200, two_hundred_ranks_meet)
{
    int64_t one = 1, all = 0;
    rank_try(colo_comm_all_reduce(world, &one, &all, 1, COLO_I64, COLO_REDOP_SUM, NULL));
    rank_check(all == colo_comm_size(world));
    return COLO_OK;
}

/* A comm of world ranks 4..7 and one of 9, 2, 5, 3: groups of a grid follow the names. */
T_CASE_ON(4, world_ranks_may_be_named)
{
    const int64_t row[] = {4, 5, 6, 7}, odd[] = {9, 2, 5, 3}, twice[] = {1, 2, 1, 3},
                  negative[] = {0, 1, -2, 3};
    T_ENDS(colo_comm_destroy) colo_comm_t *sub = NULL;
    colo_grid_t grid;
    rank_check(colo_comm_set_world_ranks(NULL, NULL) == COLO_ERR_ARG);
    rank_check(colo_comm_set_world_ranks(world, twice) == COLO_ERR_ARG);
    rank_check(colo_comm_set_world_ranks(world, negative) == COLO_ERR_ARG);
    rank_check(colo_comm_world_rank(world, 2) == 2);
    rank_try(colo_comm_set_world_ranks(world, row));
    rank_try(colo_grid_parse(&grid, "tp=2,dp=2@4", 0));
    rank_try(colo_comm_split(world, &grid, "dp", &sub));
    rank_check(colo_comm_world_rank(sub, 1) == 6 + colo_comm_rank(world) % 2);
    rank_check(colo_comm_find(world, 7) == 3 && colo_comm_find(world, 3) == -1);
    rank_try(colo_comm_barrier(sub, NULL));
    rank_try(colo_comm_set_world_ranks(world, odd));
    rank_check(colo_comm_world_rank(sub, 0) == 4 + colo_comm_rank(world) % 2);
    colo_comm_destroy(&sub);
    for (int32_t r = 0; r < 4; r++)
        rank_check(colo_comm_world_rank(world, r) == odd[r] && colo_comm_find(world, odd[r]) == r);
    rank_try(
        colo_comm_split_color(world, 0, colo_comm_world_rank(world, colo_comm_rank(world)), &sub));
    rank_check(colo_comm_world_rank(sub, 0) == 2 && colo_comm_world_rank(sub, 3) == 9);
    rank_try(colo_comm_barrier(sub, NULL));
    return COLO_OK;
}

T_MAIN("comm/threads")
