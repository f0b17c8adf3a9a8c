/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_perf_collective.c - what colo-perf compares with is right, too: the reference's passes and
 * the tuned ones give what the oracle says, and its index lists are the oracle's. Host memory,
 * ranks are threads; an all-reduce of the reference is a sum over the ranks of the right group.
 */
#include "harness/bridge_case.h"
#include "harness/harness.h"
#include "harness/ranks.h"

#include "perf/collective.h"
#include "perf/parts.h"

#include <stdlib.h>

typedef struct host {
    perf_engine_t engine;
    colo_comm_t *group[PERF_GROUPS];
    colo_dtype_t dtype;
    int gathers[PERF_GROUPS], reduces, copies;
} host_t;

static int copy(perf_engine_t *e, const colo_box_t *dst, const colo_box_t *src, int64_t n)
{
    host_t *h = (host_t *)e;
    const size_t size = colo_dtype_size(h->dtype);
    h->copies++;
    for (int64_t k = 0; k < n; k++)
        for (int64_t i = 0; i < dst[k].extent[0]; i++)
            for (int64_t j = 0; j < dst[k].extent[1]; j++)
                memcpy((char *)dst[k].data +
                           (size_t)(i * dst[k].stride[0] + j * dst[k].stride[1]) * size,
                       (char *)src[k].data +
                           (size_t)(i * src[k].stride[0] + j * src[k].stride[1]) * size,
                       (size_t)dst[k].extent[2] * size);
    return 0;
}

static int zero(perf_engine_t *e, void *p, size_t bytes)
{
    memset(p, 0, bytes);
    return 0;
}

static int all_gather(perf_engine_t *e, perf_group_t g, const void *send, void *recv, int64_t count)
{
    host_t *h = (host_t *)e;
    h->gathers[g]++;
    return colo_comm_all_gather(h->group[g], send, recv, count, h->dtype, NULL);
}

static int all_reduce(perf_engine_t *e, perf_group_t g, const void *send, void *recv, int64_t count)
{
    host_t *h = (host_t *)e;
    h->reduces++;
    return colo_comm_all_reduce(h->group[g], send, recv, count, h->dtype, COLO_REDOP_SUM, NULL);
}

static colo_status_t compare(const t_case_t *c, t_role_t role, int64_t rank, const void *out,
                             t_buffer_t *b)
{
    memmove(b->t.data, out, (size_t)colo_tensor_count(&b->t) * colo_dtype_size(c->dtype));
    return t_case_compare(c, role, rank, 0, b);
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    const t_case_t *c = *(const t_case_t **)arg;
    const int64_t me = colo_comm_rank(world);
    const colo_grid_t src = t_grid(&c->src), dst = t_grid(&c->dst);
    T_ENDS(t_buffer_free) t_buffer_t x = {0}, y = {0}, d_y = {0}, d_x = {0};
    host_t h = {.engine = {copy, zero, all_gather, all_reduce}, .dtype = c->dtype};
    perf_coll_t p = {.src = &src,
                     .dst = &dst,
                     .rank = me,
                     .samples = c->shape.b,
                     .rows = c->shape.n,
                     .features = c->shape.h,
                     .elem = colo_dtype_size(c->dtype),
                     .batch_first = strcmp(c->axes, "sbh") != 0,
                     .sharded = c->output == COLO_OUTPUT_SHARDED,
                     .engine = &h.engine};
    perf_coll_init(&p);
    for (int g = 0; g < PERF_GROUPS; g++) {
        int64_t color, key;
        perf_coll_group(&p, (perf_group_t)g, me, &color, &key);
        rank_try(colo_comm_split_color(world, color, key, &h.group[g]));
    }
    rank_try(t_case_tensor(c, T_X, me, 0, true, &x));
    rank_try(t_case_tensor(c, T_DY, me, 0, true, &d_y));
    rank_try(t_case_tensor(c, T_Y, me, 0, false, &y));
    rank_try(t_case_tensor(c, T_DX, me, 0, false, &d_x));
    p.x = x.t.data;
    p.d_y = d_y.t.data;
    p.y = y.t.data;
    p.d_x = d_x.t.data;
    for (int i = 0; i < 3; i++)
        rank_check((p.stage[i] = calloc(1, (size_t)perf_coll_stage(&p) + 1)) != NULL);
    for (int tuned = 0; tuned < 2; tuned++) {
        rank_check((tuned ? perf_coll_tuned_forward : perf_coll_forward)(&p) == 0);
        rank_try(compare(c, T_Y, me, p.out, &y));
        rank_check((tuned ? perf_coll_tuned_backward : perf_coll_backward)(&p) == 0);
        rank_try(compare(c, T_DX, me, p.out, &d_x));
        if (!tuned) /* one all-reduce over cp, one gather: forward or backward, not both */
            rank_check(h.reduces == (p.cp > 1) && h.gathers[PERF_SIBLINGS] == (p.k > 1) &&
                       h.gathers[PERF_CP] + h.gathers[PERF_BOTH] == 0);
        rank_try(t_case_compare(c, T_X, me, 0, &x)); /* inputs are as they were */
        rank_try(t_case_compare(c, T_DY, me, 0, &d_y));
    }
    rank_check(h.reduces == (p.cp > 1) * (p.sharded ? 1 : 2)); /* tuned adds nothing to zeros */
    for (int i = 0; i < 3; i++)
        free(p.stage[i]);
    for (int g = 0; g < PERF_GROUPS; g++)
        colo_comm_destroy(&h.group[g]);
    return COLO_OK;
}

static const struct {
    const char *src, *dst;
    int64_t batch;
} pairs[] = {{"tp=1,dp=4", "tp=1,cp=2,dp=2", 8}, {"tp=1,dp=4", "tp=1,cp=4,dp=1", 4},
             {"tp=1,dp=4", "tp=2,cp=2,dp=1", 8}, {"tp=2,dp=2", "tp=1,cp=2,dp=2", 4},
             {"tp=4,dp=1", "tp=1,cp=2,dp=2", 4}, {"tp=1,dp=4", "tp=4,dp=1", 8},
             {"tp=2,dp=4", "tp=2,cp=2,dp=2", 4}, {"tp=4,dp=2", "tp=1,cp=2,dp=4", 8},
             {"tp=1,dp=8", "tp=2,cp=4,dp=1", 8}, {"tp=1,dp=8", "tp=4,cp=1,dp=2", 8},
             {"tp=4,dp=2", "tp=2,cp=2,dp=2", 2}, {"tp=8,dp=1", "tp=1,cp=2,dp=4", 8},
             {"tp=2,dp=2", "tp=2,dp=2", 2},      {"tp=2,dp=1", "tp=1,dp=2", 4}};

T_CASE(both_ways_give_what_the_oracle_says)
{
    static const char *const axes[] = {"bsh", "sbh", "th"};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        for (int k = 0; k < 9; k++) {
            t_case_t c = t_between(pairs[i].src, pairs[i].dst, pairs[i].batch, 16, 3);
            c.output = k < 3 ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ;
            c.grad = k < 6 ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT;
            c.algo = COLO_ALGO_COLLECTIVE;
            c.dtype = COLO_F32;
            c.axes = axes[k % 3];
            const t_case_t *p = &c;
            colo_status_t st = colo_comm_threads_run(t_case_world(&c), on_rank, &p);
            if (st < 0)
                fail_msg("%s: %s", t_case_text(&c), colo_last_error());
        }
}

T_CASE(the_lists_of_samples_and_rows_are_the_oracles)
{
    static const char *const more[] = {"cp=2,dp=3", "dp=3,tp=2", "tp=2,pp=2,dp=2", "dp=1,cp=4@2"};
    for (size_t i = 0; i < 14 + 4; i++)
        for (int k = 0; k < 4; k++) {
            const bool dst = k & 1, full = k & 2;
            ref_side_t side =
                t_side(i < 14 ? (dst ? pairs[i].dst : pairs[i].src) : more[i - 14], !dst);
            colo_grid_t grid = t_grid(&side);
            for (int64_t rank = 0; rank < grid.offset + grid.size + 1; rank++) {
                T_ENDS(ref_part_free) ref_part_t want;
                T_ENDS(perf_part_free) perf_part_t got;
                ref_part_make(&want, &side, (ref_shape_t){7, 48, 2}, rank, full);
                assert_int_equal(perf_part_make(&got, &grid, rank, dst, 7, 48, full), 0);
                assert_int_equal(got.nb, want.nb);
                if (want.nb > 0) {
                    assert_int_equal(got.ns, want.ns);
                    assert_memory_equal(got.b, want.b, (size_t)want.nb * 8);
                    assert_memory_equal(got.s, want.s, (size_t)want.ns * 8);
                    assert_int_equal(got.addend, want.addend);
                }
            }
        }
}

T_MAIN("tools/perf_collective")
