/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_overlap.c - views that share elements, one with itself and two with each other, against the
 * list of all addresses that they touch.
 */
#include "harness/harness.h"

#include "core/overlap.h"

enum { CAPACITY = 4096 };

static char memory[CAPACITY] __attribute__((aligned(8)));

/* Counts how often a view touches each place; the most. */
static int touch(const colo_tensor_t *t, int *times)
{
    int64_t index[COLO_NDIM_MAX] = {0};
    int most = 0;
    for (bool done = colo_tensor_count(t) == 0; !done;) {
        int64_t place = (char *)t->data - memory;
        for (int32_t a = 0; a < t->ndim; a++)
            place += index[a] * t->stride[a] * (int64_t)colo_dtype_size(t->dtype);
        most = ++times[place] > most ? times[place] : most;
        int32_t a = t->ndim - 1;
        for (; a >= 0 && ++index[a] == t->shape[a]; a--)
            index[a] = 0;
        done = a < 0;
    }
    return most;
}

static colo_tensor_t random_view(uint64_t *seed, int32_t ndim)
{
    colo_tensor_t t = {
        .data = memory, .ndim = ndim, .dtype = t_below(seed, 2) ? COLO_I8 : COLO_F32};
    for (int32_t a = 0; a < ndim; a++) {
        t.shape[a] = t_below(seed, 5);
        t.stride[a] = t_below(seed, 20);
    }
    t.data = memory + 8 * t_below(seed, 16);
    return t;
}

T_CASE(a_view_overlaps_itself_if_it_touches_a_place_twice)
{
    uint64_t seed = t_seed();
    int seen[2] = {0};
    for (int64_t i = t_scaled(20000); i > 0; i--) {
        int times[CAPACITY] = {0};
        const colo_tensor_t t = random_view(&seed, 1 + (int32_t)t_below(&seed, 4));
        const bool twice = touch(&t, times) > 1;
        seen[twice]++;
        if (colo_tensor_overlaps(&t) != twice)
            fail_msg("%d axes, %lld %lld %lld %lld by %lld %lld %lld %lld: %s", (int)t.ndim,
                     (long long)t.shape[0], (long long)t.shape[1], (long long)t.shape[2],
                     (long long)t.shape[3], (long long)t.stride[0], (long long)t.stride[1],
                     (long long)t.stride[2], (long long)t.stride[3],
                     twice ? "a place is touched twice" : "no place is touched twice");
    }
    assert_true(seen[0] > 50 && seen[1] > 50);
}

T_CASE(views_are_apart_if_they_share_no_place)
{
    uint64_t seed = t_seed();
    int seen[2] = {0};
    for (int64_t i = t_scaled(20000); i > 0; i--) {
        int times[2][CAPACITY] = {{0}};
        const colo_tensor_t a = random_view(&seed, 3), b = random_view(&seed, 3);
        (void)touch(&a, times[0]);
        (void)touch(&b, times[1]);
        const int64_t reach[2] = {(int64_t)colo_dtype_size(a.dtype),
                                  (int64_t)colo_dtype_size(b.dtype)};
        bool shared = false;
        for (int64_t p = 0; p < CAPACITY; p++)
            for (int64_t k = 0; times[0][p] && k < reach[0]; k++)
                for (int64_t j = 0; j < reach[1]; j++)
                    shared = shared || (p + k >= j && times[1][p + k - j]);
        seen[shared]++;
        if (colo_tensors_apart(&a, &b) == shared)
            fail_msg("case %lld: %s", (long long)i,
                     shared ? "a byte is in both" : "no byte is in both");
    }
    assert_true(seen[0] > 50 && seen[1] > 50);
}

/* Rows of 4 in planes of 3 rows and 2 more elements. */
T_CASE(columns_of_the_same_rows_in_planes_with_gaps_are_apart)
{
    colo_tensor_t x = colo_tensor_host(memory, COLO_F32, 3, (int64_t[]){2, 3, 2}), y = x;
    x.stride[0] = y.stride[0] = 14;
    x.stride[1] = y.stride[1] = 4;
    y.data = memory + 2 * sizeof(float);
    assert_true(colo_tensors_apart(&x, &y));
    y.data = memory + sizeof(float);
    assert_false(colo_tensors_apart(&x, &y));
}

/* Even rows, and every second odd one: more than the search tries. */
T_CASE(rows_in_turn_are_apart_however_many)
{
    colo_tensor_t x = colo_tensor_host(memory, COLO_F32, 1, (int64_t[]){1000000}), y = x;
    x.stride[0] = 2;
    y.stride[0] = 4;
    y.shape[0] = 500000;
    y.data = memory + sizeof(float);
    assert_true(colo_tensors_apart(&x, &y));
    y.data = memory + 2 * sizeof(float);
    assert_false(colo_tensors_apart(&x, &y));
}

T_CASE(large_views_are_judged_in_bounded_time)
{
    static const struct {
        int64_t shape[3], stride[3];
        bool overlaps;
    } list[] = {
        {{1 << 20, 1 << 20, 1 << 20}, {INT64_C(1) << 40, 1 << 20, 1}, false},
        {{1 << 20, 1 << 20, 1 << 20}, {1, 1 << 20, INT64_C(1) << 40}, false},
        {{1 << 20, 1 << 20, 1 << 20}, {1, 1, 1}, true},
        {{1 << 20, 4, 1}, {3, (1 << 21) + 2, 1}, false}, /* in turn: 3 does not divide the step */
        {{1 << 20, 4, 1}, {3, 3 << 19, 1}, true},
        {{1 << 20, 2, 1}, {INT64_C(1) << 42, INT64_C(1) << 41, 1}, false},
        {{100000, 100000, 100000}, {1000003, 1000001, 999999}, true}, /* (1, -2, 1) */
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        colo_tensor_t t = colo_tensor_host(memory, COLO_I8, 3, list[i].shape);
        memcpy(t.stride, list[i].stride, sizeof list[i].stride);
        assert_int_equal(colo_tensor_overlaps(&t), list[i].overlaps);
    }
}

T_MAIN("core/overlap")
