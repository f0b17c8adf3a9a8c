/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_weighted.c - weighted sums on dp x cp of 8 ranks against one serial sum, spread unevenly;
 * values and weights are multiples of 1/8, so sums are exact and compared with ==.
 */
#include "harness/harness.h"
#include "loss/where.h"

#include <math.h>

enum { TOKENS = 12 };

static double value_of(int cp, int dp, int i)
{
    return (double)(1 + i + 20 * cp + 7 * dp) / 8;
}

static double weight_of(int cp, int dp, int i)
{
    return (double)((5 * i + 3 * cp + dp) % 9 + 1) / 8;
}

static uint8_t counts(int cp, int dp, int i)
{
    return cp == 0 ? i % 5 == dp : i > 1 + dp;
}

typedef struct world {
    colo_dtype_t dtype;
    bool weighted, masked;
    const char *group;
    colo_weighted_t got[8];
    double d_values[8][TOKENS];
    uint64_t gathers[8], total[8];
} world_t;

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    world_t *w = arg;
    const int r = colo_comm_rank(world), cp = r / 2 % 2, dp = r / 4;
    colo_grid_t grid;
    colo_comm_t *group = NULL;
    double f64[3][TOKENS];
    float f32[3][TOKENS];
    uint8_t mask[TOKENS];
    colo_comm_stats_t stats;
    rank_try(colo_grid_parse(&grid, "tp=2,cp=2,dp=2,pp=1", 8));
    rank_try(colo_comm_split(world, &grid, w->group, &group));
    for (int i = 0; i < TOKENS; i++) {
        mask[i] = !w->masked || counts(cp, dp, i);
        f64[0][i] = mask[i] ? value_of(cp, dp, i) : NAN; /* must not be read */
        f64[1][i] = mask[i] ? weight_of(cp, dp, i) : NAN;
        f32[0][i] = (float)f64[0][i];
        f32[1][i] = (float)f64[1][i];
    }
    const bool wide = w->dtype == COLO_F64;
    const size_t line = TOKENS * (wide ? sizeof(double) : sizeof(float));
    colo_comm_t *mover = NULL;
    rank_try(where.group(group, &mover));
    void *values = where.put(wide ? (void *)f64[0] : f32[0], line),
         *weights = where.put(wide ? (void *)f64[1] : f32[1], line), *d = where.put(NULL, line),
         *masked = where.put(mask, sizeof mask), *out = where.put(NULL, sizeof w->got[r]),
         *workspace = where.put(NULL, colo_loss_weighted_workspace_size(colo_comm_size(group)));
    colo_tensor_t v = where_tensor(values, w->dtype, 1, (int64_t[]){TOKENS}), u = v;
    colo_tensor_t m = where_tensor(masked, COLO_U8, 1, (int64_t[]){TOKENS});
    colo_tensor_t dv = v;
    u.data = weights;
    dv.data = d;
    colo_comm_stats_reset(mover);
    colo_status_t st = colo_loss_weighted_sum(&v, w->weighted ? &u : NULL, w->masked ? &m : NULL,
                                              mover, out, &dv, workspace, NULL);
    where.get(wide ? (void *)f64[2] : f32[2], d, line);
    where.get(&w->got[r], out, sizeof w->got[r]);
    for (int i = 0; i < TOKENS; i++)
        w->d_values[r][i] = wide ? f64[2][i] : (double)f32[2][i];
    colo_comm_stats(mover, &stats);
    w->gathers[r] = stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int o = 0; o < COLO_CATEGORY_COUNT; o++)
            w->total[r] += stats.ops[k][o];
    void *all[] = {values, weights, d, masked, out, workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        where.drop(all[i]);
    where.leave(&mover);
    colo_comm_destroy(&group);
    return st;
}

T_CASE(the_sum_over_dp_and_cp_is_the_serial_sum)
{
    for (int form = 0; form < 8; form++) {
        world_t w = {.dtype = form & 1 ? COLO_F64 : COLO_F32,
                     .weighted = form & 2,
                     .masked = form & 4,
                     .group = "dp-cp"};
        double num = 0, weight = 0;
        int64_t den = 0;
        for (int dp = 0; dp < 2; dp++)
            for (int cp = 0; cp < 2; cp++)
                for (int i = 0; i < TOKENS; i++)
                    if (!w.masked || counts(cp, dp, i)) {
                        double x = w.weighted ? weight_of(cp, dp, i) : 1;
                        num += x * value_of(cp, dp, i);
                        weight += x;
                        den++;
                    }
        assert_ok(t_run_ranks(8, on_rank, &w, sizeof w));
        for (int r = 0; r < 8; r++) {
            assert_true(w.got[r].num == num && w.got[r].weight == weight);
            assert_int_equal(w.got[r].den, den);
            assert_true(w.got[r].value == num / (double)den);
            assert_int_equal(w.gathers[r], 1);
            assert_int_equal(w.total[r], 1);
            for (int i = 0; i < TOKENS; i++) {
                const int cp = r / 2 % 2, dp = r / 4;
                double x = w.weighted ? weight_of(cp, dp, i) : 1, want = x / (double)den;
                if (w.masked && !counts(cp, dp, i))
                    want = 0;
                assert_true(w.d_values[r][i] == (w.dtype == COLO_F64 ? want : (float)want));
            }
        }
    }
}

T_CASE(the_sum_over_dp_only_is_another_value)
{
    world_t whole = {.dtype = COLO_F64, .weighted = true, .masked = true, .group = "dp-cp"};
    world_t part = {.dtype = COLO_F64, .weighted = true, .masked = true, .group = "dp"};
    assert_ok(t_run_ranks(8, on_rank, &whole, sizeof whole));
    assert_ok(t_run_ranks(8, on_rank, &part, sizeof part));
    for (int r = 0; r < 8; r++)
        assert_true(part.got[r].den < whole.got[r].den &&
                    fabs(part.got[r].value - whole.got[r].value) > 0.01);
}

T_CASE(the_sum_over_one_rank_has_its_gradients)
{
    for (int form = 0; form < 2; form++) {
        world_t w = {
            .dtype = form ? COLO_F64 : COLO_F32, .weighted = true, .masked = true, .group = "pp"};
        assert_ok(t_run_ranks(8, on_rank, &w, sizeof w));
        for (int r = 0; r < 8; r++) {
            const int cp = r / 2 % 2, dp = r / 4;
            double num = 0, den = 0;
            for (int i = 0; i < TOKENS; i++) {
                num += counts(cp, dp, i) ? weight_of(cp, dp, i) * value_of(cp, dp, i) : 0;
                den += counts(cp, dp, i);
            }
            assert_true(w.got[r].num == num && (double)w.got[r].den == den);
            for (int i = 0; i < TOKENS; i++) {
                const double want = counts(cp, dp, i) ? weight_of(cp, dp, i) / den : 0;
                assert_true(w.d_values[r][i] == (form ? want : (float)want));
            }
        }
    }
}

T_CASE(no_counted_token_gives_zero_and_nan_is_not_hidden)
{
    colo_comm_t *self = NULL;
    double v[2] = {NAN, 1}, d[2] = {7, 7};
    _Alignas(COLO_ALIGNMENT) double workspace[4];
    uint8_t none[2] = {0, 0};
    colo_weighted_t got;
    colo_tensor_t vt = colo_tensor_host(v, COLO_F64, 1, (int64_t[]){2});
    colo_tensor_t dt = colo_tensor_host(d, COLO_F64, 1, (int64_t[]){2});
    colo_tensor_t mt = colo_tensor_host(none, COLO_U8, 1, (int64_t[]){2});
    colo_tensor_t empty = colo_tensor_host(NULL, COLO_F64, 1, (int64_t[]){0});
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_loss_weighted_sum(&vt, NULL, &mt, self, &got, &dt, workspace, NULL));
    assert_true(got.num == 0 && got.den == 0 && got.value == 0 && d[0] == 0 && d[1] == 0);
    assert_ok(colo_loss_weighted_sum(&empty, NULL, NULL, self, &got, NULL, workspace, NULL));
    assert_true(got.num == 0 && got.den == 0);
    assert_ok(colo_loss_weighted_sum(&vt, NULL, NULL, self, &got, NULL, workspace, NULL));
    assert_true(isnan(got.value) && got.den == 2);
    colo_comm_destroy(&self);
}

T_CASE(bad_arguments_are_refused_and_nothing_is_written)
{
    colo_comm_t *self = NULL;
    double v[2] = {1, 2};
    _Alignas(COLO_ALIGNMENT) double workspace[4];
    uint8_t m[2] = {1, 1};
    colo_weighted_t got = {.num = 7};
    const colo_tensor_t vt = colo_tensor_host(v, COLO_F64, 1, (int64_t[]){2});
    colo_tensor_t t;
    assert_ok(colo_comm_create_self(&self));
    assert_fails(colo_loss_weighted_sum(&vt, NULL, NULL, NULL, &got, NULL, workspace, NULL),
                 COLO_ERR_ARG, "group is NULL, expected the dp x cp group");
    t = colo_tensor_host(v, COLO_BF16, 1, (int64_t[]){2});
    assert_fails(colo_loss_weighted_sum(&t, NULL, NULL, self, &got, NULL, workspace, NULL),
                 COLO_ERR_ARG, "values: dtype bf16, expected f32 or f64");
    t = colo_tensor_host(v, COLO_F64, 2, (int64_t[]){1, 2});
    assert_fails(colo_loss_weighted_sum(&t, NULL, NULL, self, &got, NULL, workspace, NULL),
                 COLO_ERR_SHAPE, "values: 2 axes, expected [T]");
    t = colo_tensor_host(v, COLO_F64, 1, (int64_t[]){1});
    assert_fails(colo_loss_weighted_sum(&vt, &t, NULL, self, &got, NULL, workspace, NULL),
                 COLO_ERR_SHAPE, "weights: 1 axes, 1 elements, expected [2]");
    t = colo_tensor_host(v, COLO_F32, 1, (int64_t[]){2});
    assert_fails(colo_loss_weighted_sum(&vt, &t, NULL, self, &got, NULL, workspace, NULL),
                 COLO_ERR_ARG, "weights: dtype f32, the values are f64");
    assert_fails(colo_loss_weighted_sum(&vt, NULL, NULL, self, &got, &t, workspace, NULL),
                 COLO_ERR_ARG, "d_values: dtype f32, the values are f64");
    t = colo_tensor_host(v, COLO_F64, 1, (int64_t[]){1});
    assert_fails(colo_loss_weighted_sum(&vt, NULL, NULL, self, &got, &t, workspace, NULL),
                 COLO_ERR_SHAPE, "d_values: 1 axes, 1 elements, expected [2]");
    t = colo_tensor_host(m, COLO_I8, 1, (int64_t[]){2});
    assert_fails(colo_loss_weighted_sum(&vt, NULL, &t, self, &got, NULL, workspace, NULL),
                 COLO_ERR_ARG, "mask: dtype i8, expected u8");
    t = colo_tensor_cuda(m, COLO_U8, 0, 1, (int64_t[]){2});
    assert_fails(colo_loss_weighted_sum(&vt, NULL, &t, self, &got, NULL, workspace, NULL),
                 COLO_ERR_ARG, "mask: memory kind 1");
    assert_fails(colo_loss_weighted_sum(&vt, NULL, NULL, self, NULL, NULL, workspace, NULL),
                 COLO_ERR_ARG, "out is NULL");
    assert_fails(colo_loss_weighted_sum(&vt, NULL, NULL, self, &got, NULL, NULL, NULL),
                 COLO_ERR_ARG, "workspace is NULL");
    assert_true(got.num == 7);
    colo_comm_destroy(&self);
}

T_MAIN_IF(where.need(), "loss/weighted")
