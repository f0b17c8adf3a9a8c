/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_captioner_ops.c - the captioner's arithmetic on a GPU against the same calls on the host,
 * which its own gradient check proves, on random numbers: odd sizes, empty shards, a sequence over
 * two context ranks. A call gets all its arrays on both sides, and afterwards all of them are
 * compared, so what it must not touch is, too.
 *
 * Tolerance: of an array's largest magnitude m, 4e-6 m: sums of K <= 77 products in fp32, rounded
 * in different orders, differ by less than 2 sqrt(K) 2^-24 of their terms' size, some 1e-6; the
 * softmax's exp and gelu's erf add a few units in the last place.
 */
#include "gpu/gpu.h"

#include <math.h>

#include "ops.h"

enum { ARRAYS = 10, CAPACITY = 1 << 14 };

static cap_ops_t host, cuda;
static float *h[ARRAYS], *d[ARRAYS];

static void fill(void)
{
    uint64_t seed = t_seed();
    for (int k = 0; k < ARRAYS; k++) {
        for (int i = 0; i < CAPACITY; i++)
            h[k][i] = (float)(t_uniform(&seed) * 4 - 2);
        cuda.put(&cuda, d[k], h[k], CAPACITY * (int64_t)sizeof(float));
    }
}

static void compare(const char *what)
{
    static float got[CAPACITY];

    assert_int_equal(cuda.check(&cuda), COLO_OK);
    for (int k = 0; k < ARRAYS; k++) {
        double most = 0;
        cuda.get(&cuda, got, d[k], sizeof got);
        for (int i = 0; i < CAPACITY; i++)
            most = fmax(most, fabs((double)h[k][i]));
        for (int i = 0; i < CAPACITY; i++)
            if (!(fabs((double)h[k][i] - (double)got[i]) <= 4e-6 * most))
                fail_msg("%s: array %d, element %d: host %.9g, GPU %.9g, largest %.3g", what, k, i,
                         (double)h[k][i], (double)got[i], most);
    }
}

/* The same call on both sides; a[] are its arrays. */
#define BOTH(member, ...)                                    \
    do {                                                     \
        fill();                                              \
        for (int side = 0; side < 2; side++) {               \
            cap_ops_t *o = side ? &cuda : &host;             \
            float **a = side ? d : h;                        \
            const cap_sequence_t *s = side ? &there : &here; \
            (void)a, (void)s;                                \
            o->member(o, __VA_ARGS__);                       \
        }                                                    \
        compare(#member);                                    \
    } while (0)

/* 3 samples of 12 positions, of which this rank has the first and the last quarter; 5 rows of y.
 * Or, packed, samples of 7, 2, 10, 11 and 6 positions on one axis, cut in the same way. */
enum {
    B = 3,
    N = 6,
    S = 12,
    HEADS = 2,
    E = 8,
    D = HEADS * E,
    T = B * N,
    YN = 5,
    CP = 2,
    AXIS = B * S
};
static int64_t tables[6][AXIS], tokens[AXIS];
static cap_sequence_t here, there;

static void *on_gpu(const void *from, size_t bytes)
{
    void *p = cuda.take(&cuda, (int64_t)bytes);
    assert_non_null(p);
    cuda.put(&cuda, p, from, (int64_t)bytes);
    return p;
}

static void make_sequence(bool packed)
{
    int64_t *pos = tables[0], *row = tables[1], *part_of = tables[2], *local_of = tables[3];
    int64_t *first = tables[4], *table_row = tables[5], n[CP] = {0}, own = 0;
    int64_t S_ = packed ? AXIS : S;

    for (int64_t p = 0; p < S_; p++) {
        part_of[p] = p >= S_ / 4 && p < S_ / 4 * 3;
        local_of[p] = n[part_of[p]]++;
        if (!part_of[p])
            pos[local_of[p]] = p;
        first[p] = 0;
        for (int64_t k = 0, begins[] = {0, 7, 9, 19, 30}; packed && k < 5; k++)
            first[p] = begins[k] <= p ? begins[k] : first[p];
        table_row[p] = packed ? (p - first[p]) * 3 % 7 : p; /* a row for several positions */
    }
    for (int64_t j = 0; j < n[0]; j++)
        row[j] = pos[j] - first[pos[j]] < (packed ? 1 : YN) ? packed ? own++ : pos[j] : -1;
    for (int64_t i = 0; i < AXIS; i++)
        tokens[i] = i % 3 ? 0 : i;
    here = (cap_sequence_t){.b = packed ? 1 : B,
                            .n = n[0],
                            .block = n[0] > n[1] ? n[0] : n[1],
                            .S = S_,
                            .h = HEADS,
                            .e = E,
                            .window = packed ? 11 : S,
                            .pos = pos,
                            .row = row,
                            .part_of = part_of,
                            .local_of = local_of,
                            .first = first,
                            .table_row = table_row,
                            .tokens = tokens};
    there = here;
    there.pos = on_gpu(pos, sizeof tables[0]);
    there.row = on_gpu(row, sizeof tables[0]);
    there.part_of = on_gpu(part_of, sizeof tables[0]);
    there.local_of = on_gpu(local_of, sizeof tables[0]);
    there.first = on_gpu(first, sizeof tables[0]);
    there.table_row = on_gpu(table_row, sizeof tables[0]);
    there.tokens = on_gpu(tokens, sizeof tokens);
}

T_CASE(products_and_sums)
{
    BOTH(linear, 77, 13, 21, a[0], a[1], a[2], a[3]);
    BOTH(linear, 77, 13, 21, a[0], a[1], NULL, a[3]);
    BOTH(linear, 0, 13, 21, a[0], a[1], a[2], a[3]);
    BOTH(linear, 5, 13, 0, a[0], a[1], NULL, a[3]);
    BOTH(linear_d_weight, 77, 13, 21, a[0], a[1], a[2]);
    BOTH(linear_d_weight, 0, 13, 21, a[0], a[1], a[2]);
    BOTH(linear_d_bias, 77, 41, a[0], a[1]);
    BOTH(linear_d_bias, 0, 41, a[0], a[1]);
    BOTH(linear_d_input, 77, 13, 21, a[0], a[1], 0.0f, a[2]);
    BOTH(linear_d_input, 77, 13, 21, a[0], a[1], 1.0f, a[2]);
    BOTH(linear_d_input, 77, 13, 0, a[0], a[1], 0.0f, a[2]);
    BOTH(linear_d_input, 77, 13, 0, a[0], a[1], 1.0f, a[2]);
}

T_CASE(rows_and_elements)
{
    BOTH(gelu, 1000, a[0], a[1], a[2]);
    BOTH(gelu, 1000, a[0], a[0], a[2]);
    BOTH(scale, 1000, a[0], a[1]);
    BOTH(add_rows, 31, 40, a[0], a[1], a[2]);
    BOTH(add_rows, 31, 40, NULL, a[1], a[2]);
    BOTH(norm, 31, 40, a[0], a[1], a[2], a[3], a[4], a[5]);
    BOTH(norm_backward, 31, 40, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    BOTH(norm_backward, 31, 40, a[0], a[1], a[2], a[3], NULL, a[5], a[6], a[7]);
    BOTH(zero, a[3], 400);
    BOTH(copy, a[3], a[4], 400);
}

/* Squares as second moments: their root is taken. */
T_CASE(one_step_of_adam)
{
    fill();
    for (int i = 0; i < CAPACITY; i++)
        h[2][i] *= h[2][i];
    cuda.put(&cuda, d[2], h[2], CAPACITY * (int64_t)sizeof(float));
    host.adam(&host, 999, 1e-3f, 1.5f, 1.25f, h[0], h[1], h[2], h[3]);
    cuda.adam(&cuda, 999, 1e-3f, 1.5f, 1.25f, d[0], d[1], d[2], d[3]);
    compare("adam");
}

/* The workspace is no result: it is an array apart. */
T_CASE(attention_over_two_context_ranks)
{
    for (int packed = 0; packed < 2; packed++) {
        make_sequence(packed);
        float *work[] = {host.take(&host, host.attend_work(&here) * (int64_t)sizeof(float)),
                         cuda.take(&cuda, cuda.attend_work(&here) * (int64_t)sizeof(float))};

        assert_true(work[0] && work[1]);
        assert_true(CP * 2 * T * D <= CAPACITY && T * HEADS * S <= CAPACITY);
        BOTH(attend, s, a[0], a[1], a[2], a[3], work[side]);
        fill();
        host.attend(&host, &here, h[0], h[1], h[2], h[3], work[0]); /* what backward needs */
        cuda.put(&cuda, d[2], h[2], CAPACITY * (int64_t)sizeof(float));
        cuda.put(&cuda, d[3], h[3], CAPACITY * (int64_t)sizeof(float));
        host.attend_backward(&host, &here, h[0], h[1], h[2], h[4], h[5], h[6], work[0]);
        cuda.attend_backward(&cuda, &there, d[0], d[1], d[2], d[4], d[5], d[6], work[1]);
        compare("attend_backward");
    }
}

T_CASE(rows_and_bytes_are_merged_and_come_back)
{
    for (int packed = 0; packed < 2; packed++) {
        make_sequence(packed);
        BOTH(merge, s, D, YN, a[0], a[1], a[2], a[3]);
        BOTH(merge_backward, s, D, YN, a[0], a[1], a[2], a[3]);
        BOTH(merge_backward, s, D, YN, a[0], NULL, a[2], a[3]);
    }
}

int main(void)
{
    char why[256];
    int rc = gpu_need(1);
    if (rc)
        return rc;
    cap_ops_host(&host);
    if (!cap_ops_cuda(&cuda, 0, why, sizeof why)) {
        printf("%s\n", why);
        return 1;
    }
    for (int k = 0; k < ARRAYS; k++) {
        h[k] = host.take(&host, CAPACITY * (int64_t)sizeof(float));
        d[k] = cuda.take(&cuda, CAPACITY * (int64_t)sizeof(float));
        if (!h[k] || !d[k])
            return 1;
    }
    rc = t_main("gpu/captioner_ops");
    cuda.destroy(&cuda);
    host.destroy(&host);
    return rc;
}
