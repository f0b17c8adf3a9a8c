/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ragged_uniform.c - tables of a uniform batch give what the uniform bridge gives: the same
 * bits, the same bytes received by each rank, the same bytes sent in all.
 *
 * Every pair of (tp, cp, dp) layouts of up to 6 ranks whose source has no context ranks, because
 * those cut samples there and whole axes here.
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ragged_run.h"

#define RANKS 6

typedef struct job {
    t_ragged_t t;
    t_case_t c;
    int64_t sent[2][RANKS]; /* by way, more than the uniform bridge sends */
} job_t;

static colo_status_t bytes_of(const colo_plan_t *a, const colo_plan_t *b, int64_t rank, job_t *j)
{
    for (int pass = 0; pass < 2; pass++) {
        const colo_plan_bytes_t x = colo_plan_bytes(a, (colo_pass_t)pass);
        const colo_plan_bytes_t y = colo_plan_bytes(b, (colo_pass_t)pass);
        rank_check(x.recv == y.recv && x.local == y.local && x.minimum == y.minimum);
        j->sent[pass][rank] = x.send - y.send;
    }
    rank_check(colo_plan_addends(a) == colo_plan_addends(b));
    return COLO_OK;
}

/* Random bits, so that a sum in another order is another number. */
static void fill(float *v, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++)
        v[i] = (float)(t_uniform(&seed) - 0.5);
}

static colo_tensor_t flat(float *v, int64_t rows, int64_t h)
{
    return colo_tensor_host(v, COLO_F32, 2, (int64_t[]){rows, h});
}

static colo_status_t on_rank(colo_comm_t *comm, void *arg)
{
    job_t *j = arg;
    const int64_t rank = colo_comm_rank(comm), most = 4096;
    const t_ragged_options_t o = {.tensors = 1};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *uniform = NULL, *ragged = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    int64_t rows[2], us[3], ud[3];
    float *v = calloc((size_t)(6 * most), sizeof *v);
    rank_check(v);
    rank_try(t_case_bridge(&uniform, &j->c, comm, COLO_HOST));
    rank_try(t_ragged_bridge(&ragged, &j->t, &o, comm));
    const colo_segments_t s = t_ragged_segments(&j->t);
    rank_try(colo_bridge_set_segments(ragged, &s, &batch));
    rank_try(bytes_of(colo_batch_plan(batch), colo_bridge_plan(uniform), rank, j));
    colo_bridge_rows(ragged, &rows[0], &rows[1]);
    (void)colo_bridge_src_shape(uniform, us);
    (void)colo_bridge_dst_shape(uniform, ud);
    rank_check(rows[0] == us[0] && rows[1] == ud[0] && rows[0] * us[1] <= most &&
               rows[1] * ud[1] <= most);
    float *x = v, *y = v + most, *z = v + 2 * most, *dy = v + 3 * most, *dx = v + 4 * most,
          *dz = v + 5 * most;
    /* replicated over tp, other bits on other replicas and context ranks */
    fill(x, rows[0] * us[1], 1 + (uint64_t)ref_side_coord(&j->c.src, rank, "dp"));
    fill(dy, rows[1] * ud[1],
         100 * (1 + (uint64_t)ref_side_coord(&j->c.dst, rank, "dp")) +
             (uint64_t)ref_side_coord(&j->c.dst, rank, "cp"));
    const colo_tensor_t tx = flat(x, rows[0], us[1]), ty = flat(y, rows[1], ud[1]),
                        tz = flat(z, rows[1], ud[1]), tdy = flat(dy, rows[1], ud[1]),
                        tdx = flat(dx, rows[0], us[1]), tdz = flat(dz, rows[0], us[1]);
    rank_try(colo_bridge_forward(uniform, &tx, &ty, NULL));
    rank_try(colo_batch_forward(batch, &tx, &tz, 1, NULL));
    rank_check(memcmp(y, z, (size_t)(rows[1] * ud[1]) * sizeof *y) == 0);
    rank_try(colo_bridge_backward(uniform, &tdy, &tdx, NULL));
    rank_try(colo_batch_backward(batch, &tdy, &tdz, 1, NULL));
    rank_check(memcmp(dx, dz, (size_t)(rows[0] * us[1]) * sizeof *dx) == 0);
    free(v);
    return COLO_OK;
}

static void run_pair(int64_t n, const int64_t *s, const int64_t *d, void *arg)
{
    int64_t *cases = arg;
    if (s[1] > 1)
        return;
    for (int how = 0; how < 3; how++) {
        job_t j = {.c = {.src = t_side_ordered(0, s[0], 1, s[2], true),
                         .dst = t_side_ordered(0, d[0], d[1], d[2], false),
                         .shape = {12, 12 * d[1], 2},
                         .axes = "th",
                         .output = how ? COLO_FULL_SEQ : COLO_SHARDED,
                         .grad = how == 1 ? COLO_PARTIAL : COLO_DISJOINT,
                         .dtype = COLO_F32,
                         .world = (int32_t)n}};
        t_ragged_uniform(&j.t, &j.c.src, &j.c.dst, j.c.shape);
        j.t.c.full = how > 0;
        j.t.c.partial = how == 1;
        colo_status_t st = t_run_ranks((int32_t)n, on_rank, &j, sizeof j);
        if (st < 0)
            fail_msg("%s: %s: %s", t_case_text(&j.c), colo_status_name(st), colo_last_error());
        for (int pass = 0; pass < 2; pass++) {
            int64_t all = 0;
            for (int64_t r = 0; r < n; r++)
                all += j.sent[pass][r];
            assert_int_equal(all, 0);
        }
        t_ragged_free(&j.t);
        ++*cases;
    }
}

T_CASE(uniform_tables_give_the_bits_and_bytes_of_the_uniform_bridge)
{
    int64_t cases = 0;
    t_each_pair(1, RANKS, run_pair, &cases);
    assert_true(cases > 200);
}

T_MAIN("bridge/ragged_uniform")
