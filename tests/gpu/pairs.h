/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pairs.h - the unit layouts of bridges on GPUs, of up to eight ranks: source, destination,
 * samples, rows, features. Each way takes those that its ranks suffice for (t_case_world()). And
 * cases of them, and of seeded layouts.
 */
#ifndef TESTS_GPU_PAIRS_H
#define TESTS_GPU_PAIRS_H

#include "gpu/gpu_ranks.h"

static const struct {
    const char *src, *dst;
    int64_t b, n, h;
} t_pairs[] = {
    {"dp=2", "tp=2,dp=1", 4, 3, 2},
    {"tp=2,dp=1", "dp=2", 4, 3, 2},
    {"dp=2", "tp=1,cp=2,dp=1", 4, 8, 3},
    {"tp=2,dp=1", "cp=2,dp=1", 3, 8, 5},
    {"tp=2,dp=1", "tp=2,dp=1", 2, 3, 2},
    {"dp=2", "dp=2", 4, 3, 2},
    {"cp=2", "dp=2", 3, 4, 2},
    {"cp=2", "tp=2", 2, 8, 3},
    {"dp=1", "dp=1@1", 2, 3, 2},
    {"pp=2,dp=1", "dp=1,pp=2", 2, 3, 2},
    {"dp=4", "tp=4,dp=1", 8, 3, 2},
    {"tp=4,dp=1", "dp=4", 8, 3, 2},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 3},
    {"tp=2,dp=2", "tp=1,cp=2,dp=2", 4, 8, 3},
    {"tp=4", "cp=4", 2, 8, 2},
    {"dp=4", "cp=4", 8, 16, 2},
    {"tp=2,dp=2", "tp=2,cp=2", 4, 8, 5},
    {"tp=2,dp=2", "tp=1,dp=4", 8, 5, 3},
    {"cp=2,dp=2", "tp=2,cp=2", 4, 8, 2},
    {"cp=4", "dp=4", 5, 8, 2},
    {"tp=1,dp=3", "tp=2,dp=2", 6, 4, 2},
    {"dp=3", "cp=3@1", 7, 6, 2},
    {"tp=2,pp=2", "cp=2,dp=2", 4, 4, 2},
    {"dp=2,tp=2", "cp=2,dp=2", 4, 8, 2},
    {"tp=1,dp=2", "tp=2,dp=1", 4, 6, 3},
    {"tp=2,dp=1", "tp=1,dp=2", 4, 3, 5},
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", 4, 8, 3},
    {"tp=2,dp=1", "tp=1,cp=2,dp=1", 3, 8, 4},
    {"tp=2,dp=1", "tp=2,dp=1", 3, 4, 2},
    {"tp=2,dp=2", "tp=1,cp=4,dp=1", 4, 8, 5},
    {"tp=1,dp=4", "tp=2,cp=2,dp=1", 8, 8, 3},
    {"tp=4,dp=1", "tp=1,cp=2,dp=2", 4, 8, 3},
    {"ep=2,dp=2", "xp=2,cp=2", 4, 8, 2},
    {"dp=2", "cp=2@2", 4, 8, 3},
    {"tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3},
    {"tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 2},
    {"tp=1,dp=8", "tp=2,cp=4,dp=1", 8, 16, 3},
    {"tp=1,dp=8", "tp=4,dp=2", 8, 3, 5},
    {"tp=4,dp=2", "tp=2,cp=2,dp=2", 4, 8, 5},
    {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2", 4, 16, 2},
    {"tp=2,dp=4", "tp=2,pp=2,dp=2", 8, 3, 2},
    {"tp=1,dp=6", "tp=1,cp=3,dp=2@2", 12, 12, 2},
    {"dp=4,tp=2", "cp=2,dp=2,tp=2", 4, 8, 2},
    {"cp=8", "dp=8", 8, 16, 3},
    {"tp=8", "cp=8", 2, 16, 2},
    {"dp=3", "tp=2,cp=2@4", 6, 8, 3},
    {"tp=1,dp=8", "tp=4,dp=2", 16, 3, 2},
    {"tp=1,dp=8", "tp=1,cp=4,dp=2", 8, 16, 2},
    {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2", 4, 8, 5},
    {"tp=2,dp=3", "tp=3,dp=2", 6, 3, 2},
    {"tp=1,dp=6", "tp=1,cp=3,dp=2", 7, 6, 2},
    {"dp=4,tp=2", "cp=2,dp=2,tp=2", 8, 8, 2},
    {"tp=2,dp=4", "dp=2,pp=2,cp=2", 8, 8, 3},
    {"tp=8", "cp=8", 2, 16, 5},
    {"dp=8", "tp=8", 8, 3, 2},
    {"cp=8", "dp=8", 9, 16, 2},
    {"tp=2,dp=2@4", "cp=4", 4, 8, 3},
};
enum { T_PAIRS = sizeof t_pairs / sizeof t_pairs[0] };

static const char *const t_axes[] = {"bsh", "sbh", "th", "hbs"};

/* Of @pair, with output and gradients @k of 4. */
static inline t_case_t t_unit_case(size_t pair, size_t k)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64};
    return (t_case_t){.src = t_side(t_pairs[pair].src, true),
                      .dst = t_side(t_pairs[pair].dst, false),
                      .shape = {t_pairs[pair].b, t_pairs[pair].n, t_pairs[pair].h},
                      .output = k < 2 ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED,
                      .grad = k % 2 ? COLO_GRAD_DISJOINT : COLO_GRAD_PARTIAL,
                      .dtype = dtypes[(pair + k) % 4],
                      .axes = t_axes[(pair / 4 + k) % 4],
                      .stride = (t_stride_t)((pair + k) % T_STRIDE_COUNT),
                      .check = pair % 3 == 0 ? 2 : 1,
                      .steps = 2};
}

static inline ref_side_t t_seeded_side(uint64_t *s, int64_t world, bool is_src)
{
    int64_t e[3], n;
    do {
        for (int i = 0; i < 3; i++)
            e[i] = 1 + t_below(s, world);
        n = e[0] * e[1] * e[2];
    } while (n > world || (n < world && t_below(s, 100) < 70));
    ref_side_t side = t_side_ordered((int)t_below(s, T_ORDERS), e[0], e[1], e[2], is_src);
    if (n < world && t_below(s, 2))
        side.offset = t_below(s, world - n + 1);
    return side;
}

static inline t_case_t t_seeded_case(uint64_t *s, int32_t world)
{
    static const colo_dtype_t dtypes[] = {COLO_F32, COLO_BF16, COLO_F16, COLO_F64,
                                          COLO_I32, COLO_I8,   COLO_I16, COLO_I64};
    t_case_t c = {.src = t_seeded_side(s, world, true),
                  .dst = t_seeded_side(s, world, false),
                  .world = world};
    int64_t a = ref_side_extent(&c.src, "cp"), b = ref_side_extent(&c.dst, "cp");
    c.shape.n = t_lcm(2 * a, 2 * b) * (1 + t_below(s, 3));
    c.shape.b = t_below(s, 9);
    c.shape.h = 1 + t_below(s, 40);
    c.output = t_below(s, 2) ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
    c.grad = t_below(s, 2) ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
    bool sums = c.output == COLO_OUTPUT_FULL_SEQ && c.grad == COLO_GRAD_PARTIAL;
    c.dtype = dtypes[t_below(s, sums ? 4 : 8)];
    c.axes = t_axes[t_below(s, 4)];
    c.stride = (t_stride_t)t_below(s, T_STRIDE_COUNT);
    c.check = t_below(s, 100) < 20 ? 2 : 1;
    c.steps = 1 + (int32_t)t_below(s, 2);
    return c;
}

/* 250 of them. In an arena tensors do not always begin at 16 bytes. */
static inline colo_status_t t_seeded_cases(t_gpu_rank_t *r, void *arg)
{
    uint64_t s = t_seed();
    for (int64_t i = 0; i < t_scaled(250); i++) {
        const t_case_t c = t_seeded_case(&s, r->size);
        r->shift = (size_t)t_below(&s, 4) * colo_dtype_size(c.dtype);
        rank_try(t_gpu_case(r, &c));
    }
    return COLO_OK;
}

#endif
