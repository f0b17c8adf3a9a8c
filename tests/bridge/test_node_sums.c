/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_node_sums.c - PARTIAL gradients that nodes add up before these leave them: the bits of the
 * order that docs/concepts/plan.md states, and a sum in double.
 */
#include "harness/harness.h"
#include "harness/bridge_case.h"
#include "ref/ref_half.h"

#include <math.h>
#include <stdlib.h>

typedef struct ordered {
    t_case_t c;
    float *out; /* [ranks][ROWS * FEATURES] */
} ordered_t;
enum { RANKS = 12, ADDENDS = 6, ROWS = 16, FEATURES = 96, PART = ROWS * FEATURES };

static float of_bf16(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* What rank @rank has of two samples, whose sums depend on the order. */
static void rounding_values(float *to, int64_t rank, colo_dtype_t dtype)
{
    uint64_t seed = 77 + (uint64_t)rank;
    for (int64_t i = 0; i < 2 * PART; i++) {
        const double v = (double)t_below(&seed, 1 << 24) / 3.0;
        to[i] = dtype == COLO_F32 ? (float)v : of_bf16(ref_half_round(ref_bf16, v));
    }
}

static colo_status_t rounding_rank(colo_comm_t *world, void *arg)
{
    const ordered_t *o = arg;
    const bool narrow = o->c.dtype == COLO_BF16;
    float value[2 * PART];
    colo_comm_stats_t stats;
    T_STAND(s);
    rank_try(t_stand_make(&s, &o->c, world));
    const colo_tensor_t *dy = &s.t[T_DY].t, *dx = &s.t[T_DX].t;
    rank_check(colo_tensor_count(dy) == 2 * PART && colo_tensor_count(dx) == PART);
    rounding_values(value, s.rank, o->c.dtype);
    for (int64_t i = 0; i < 2 * PART; i++)
        if (narrow)
            ((uint16_t *)dy->data)[i] = ref_half_round(ref_bf16, (double)value[i]);
        else
            ((float *)dy->data)[i] = value[i];
    colo_comm_stats_reset(world);
    rank_try(t_stand_call(&s, COLO_PASS_BACKWARD));
    t_comm_stats(world, &stats);
    rank_check(stats.recv_bytes[COLO_OP_EXCHANGE][COLO_CATEGORY_BRIDGE] ==
               (uint64_t)t_plan_bytes(colo_bridge_plan(s.bridge), COLO_PASS_BACKWARD).recv);
    for (int64_t i = 0; i < PART; i++)
        o->out[s.rank * PART + i] =
            narrow ? of_bf16(((const uint16_t *)dx->data)[i]) : ((const float *)dx->data)[i];
    return COLO_OK;
}

static float to_bf16(float v)
{
    return of_bf16(ref_half_round(ref_bf16, (double)v));
}

/* In the order of nodes; a node with at least @least addends adds them up first. @cut: its sum is
 * rounded to bf16. */
static float sum_of_nodes(const float *v, const char *node, int64_t least, bool cut)
{
    float sum = 0; /* 0 + x is x: all are positive */
    for (char m = 'a'; m <= 'c'; m++) {
        float of_node = 0;
        int64_t n = 0;
        for (int64_t c = 0; c < ADDENDS; c++)
            n += node[c] == m;
        for (int64_t c = 0; c < ADDENDS; c++)
            if (node[c] == m)
                *(n < least ? &sum : &of_node) += v[c * 2 * PART];
        sum += cut ? to_bf16(of_node) : of_node;
    }
    return sum;
}

static void check_order(colo_dtype_t dtype)
{
    /* by rank; replica 1 has its highest addends on the first node */
    static const char node[] = "aaabbbbbbcaa";
    const bool narrow = dtype == COLO_BF16;
    ordered_t o = {.c = {.src = t_side("tp=3,dp=4", true),
                         .dst = t_side("tp=1,cp=6,dp=2", false),
                         .shape = {4, ROWS, FEATURES},
                         .dtype = dtype,
                         .output = COLO_OUTPUT_FULL_SEQ}};
    const size_t bytes = sizeof(float) * RANKS * PART;
    float *value = malloc(2 * bytes);
    int64_t differs = 0;
    o.out = calloc(1, bytes);
    assert_non_null(value);
    t_share(o.out, bytes);
    for (int64_t r = 0; r < RANKS; r++)
        rounding_values(value + r * 2 * PART, r, dtype);
    setenv("COLO_NODE", "a,a,a,b,b,b,b,b,b,c,a,a", 1);
    assert_ok(t_run_ranks(RANKS, rounding_rank, &o, 0));
    unsetenv("COLO_NODE");
    for (int64_t r = 0; r < RANKS; r++)
        for (int64_t i = 0; i < PART; i++) {
            const int64_t sample = r / 3;
            const float *v = value + sample / 2 * ADDENDS * 2 * PART + sample % 2 * PART + i;
            const float got = o.out[r * PART + i];
            const char *of = node + sample / 2 * ADDENDS;
            float sum = sum_of_nodes(v, of, narrow ? 3 : 2, false), other = 0;
            double exact = 0;
            for (int64_t c = 0; c < ADDENDS; c++) {
                other += v[c * 2 * PART];
                exact += (double)v[c * 2 * PART];
            }
            /* 5 additions of positive numbers, half an ulp each, and the rounding to bf16 */
            double bound = 5 * ldexp(exact, -24);
            if (narrow) {
                sum = to_bf16(sum);
                other = to_bf16(sum_of_nodes(v, of, 3, true));
                bound += ldexp(exact + bound, -8);
            }
            differs += sum != other;
            assert_memory_equal(&got, &sum, sizeof sum);
            assert_true(fabs((double)got - exact) <= bound);
        }
    assert_true(differs > RANKS * PART / 8); /* or the sum does not tell */
    t_unshare(o.out);
    free(o.out);
    free(value);
}

/* tp=3,dp=4 to cp=6,dp=2: each sample of a source replica is the sum over two or three nodes. */
T_CASE(sums_are_those_of_nodes_in_their_order_each_in_the_order_of_ranks)
{
    check_order(COLO_F32);
}

T_CASE(sums_of_bf16_cross_in_fp32_and_are_rounded_once)
{
    check_order(COLO_BF16);
}

T_MAIN("bridge/node_sums")
