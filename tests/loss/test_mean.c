/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mean.c - a loss as one number on dp x cp of 8 ranks against one serial sum; the losses are
 * multiples of 1/8 and few, so sums are exact and compared with ==. Counts differ between ranks,
 * and from the number of losses.
 */
#include "harness/harness.h"
#include "loss/where.h"

#include <math.h>

enum { TOKENS = 12 };

static double loss_of(int cp, int dp, int i)
{
    return (i + cp) % 3 == dp ? 0 : (double)(1 + i + 20 * cp + 7 * dp) / 8;
}

static int64_t count_of(int cp, int dp)
{
    return cp + 2 * dp == 2 ? 0 : 5 + 3 * cp + dp;
}

typedef struct world {
    colo_dtype_t dtype;
    bool divide, no_value, no_num;
    double value[8], num[8], den[8], factor[8], d[8][TOKENS];
    uint64_t gathers[8], total[8];
} world_t;

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    world_t *w = arg;
    const int r = colo_comm_rank(world), cp = r / 2 % 2, dp = r / 4;
    const bool wide = w->dtype == COLO_F64;
    const size_t elem = wide ? sizeof(double) : sizeof(float), line = TOKENS * elem;
    colo_grid_t grid;
    colo_comm_t *group = NULL, *mover = NULL;
    colo_comm_stats_t stats;
    double f64[TOKENS], d_value64 = 3;
    float f32[TOKENS], d_value32 = 3;
    const double d_num = 0.25;
    const int64_t count = count_of(cp, dp);
    rank_try(colo_grid_parse(&grid, "tp=2,cp=2,dp=2", 8));
    rank_try(colo_comm_split(world, &grid, "dp-cp", &group));
    rank_try(where.group(group, &mover));
    for (int i = 0; i < TOKENS; i++)
        f32[i] = (float)(f64[i] = loss_of(cp, dp, i));
    void *losses = where.put(wide ? (void *)f64 : f32, line), *d = where.put(NULL, line);
    void *n_valid = where.put(&count, sizeof count), *value = where.put(NULL, elem);
    void *d_value = where.put(wide ? (void *)&d_value64 : &d_value32, elem);
    void *d_of_num = where.put(&d_num, sizeof d_num);
    double *numbers = where.put(NULL, 3 * sizeof *numbers), got[3];
    void *workspace = where.put(NULL, colo_loss_weighted_workspace_size(colo_comm_size(group)));
    const colo_tensor_t x = where_tensor(losses, w->dtype, 1, (int64_t[]){TOKENS});
    const colo_tensor_t dx = where_tensor(d, w->dtype, 1, (int64_t[]){TOKENS});
    const colo_loss_mean_t out = {
        .value = value, .num = numbers, .den = numbers + 1, .factor = numbers + 2};
    colo_comm_stats_reset(mover);
    colo_status_t st = colo_loss_mean_forward(&x, n_valid, w->divide, mover, &out, workspace, NULL);
    if (st == COLO_OK)
        st = colo_loss_mean_backward(
            out.factor,
            &(colo_loss_mean_upstream_t){.d_value = w->no_value ? NULL : d_value,
                                         .d_num = w->no_num ? NULL : d_of_num},
            &dx, NULL);
    where.get(wide ? (void *)&f64[0] : &f32[0], value, elem);
    w->value[r] = wide ? f64[0] : (double)f32[0];
    where.get(got, numbers, sizeof got);
    w->num[r] = got[0];
    w->den[r] = got[1];
    w->factor[r] = got[2];
    where.get(wide ? (void *)f64 : f32, d, line);
    for (int i = 0; i < TOKENS; i++)
        w->d[r][i] = wide ? f64[i] : (double)f32[i];
    colo_comm_stats(mover, &stats);
    w->gathers[r] = stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
    for (int k = 0; k < COLO_OP_COUNT; k++)
        for (int o = 0; o < COLO_CATEGORY_COUNT; o++)
            w->total[r] += stats.ops[k][o];
    void *all[] = {losses, d, n_valid, value, d_value, d_of_num, numbers, workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        where.drop(all[i]);
    where.leave(&mover);
    colo_comm_destroy(&group);
    return st;
}

T_CASE(the_number_over_dp_and_cp_is_the_serial_one_and_so_is_its_gradient)
{
    for (int form = 0; form < 16; form++) {
        world_t w = {.dtype = form & 1 ? COLO_F64 : COLO_F32,
                     .divide = form & 2,
                     .no_value = form & 4,
                     .no_num = form & 8};
        double num = 0, den = 0;
        for (int dp = 0; dp < 2; dp++)
            for (int cp = 0; cp < 2; cp++) {
                for (int i = 0; i < TOKENS; i++)
                    num += loss_of(cp, dp, i);
                den += (double)count_of(cp, dp);
            }
        const double over = w.divide ? den : 1, value = num / over;
        const double g = (w.no_num ? 0 : 0.25) + (w.no_value ? 0 : 3 / over);
        assert_ok(t_run_ranks(8, on_rank, &w, sizeof w));
        for (int r = 0; r < 8; r++) {
            assert_true(w.value[r] == (w.dtype == COLO_F64 ? value : (double)(float)value));
            assert_true(w.num[r] == num && w.den[r] == den && w.factor[r] == 1 / over);
            assert_int_equal(w.gathers[r], 1);
            assert_int_equal(w.total[r], 1);
            /* 1 / over, its product with 3 and the sum are rounded: 3 half units of f64 or f32 */
            const double bound = 1.5 * (w.dtype == COLO_F64 ? 0x1p-52 : 0x1p-23) * g;
            for (int i = 0; i < TOKENS; i++)
                assert_true(fabs(w.d[r][i] - g) <= bound);
        }
    }
}

T_CASE(nothing_counted_is_zero_and_nan_is_not_hidden)
{
    colo_comm_t *self = NULL;
    double x[2] = {0, 0}, value = 7, n[3] = {7, 7, 7}, d[2] = {7, 7}, up = 5;
    _Alignas(COLO_ALIGNMENT) double workspace[4];
    int64_t none = 0, one = 1;
    const colo_loss_mean_upstream_t upstream = {.d_value_f64 = &up};
    const colo_tensor_t xt = colo_tensor_host(x, COLO_F64, 1, (int64_t[]){2});
    const colo_tensor_t dt = colo_tensor_host(d, COLO_F64, 1, (int64_t[]){2});
    const colo_tensor_t empty = colo_tensor_host(NULL, COLO_F64, 1, (int64_t[]){0});
    const colo_loss_mean_t out = {.value_f64 = &value, .num = &n[0], .den = &n[1], .factor = &n[2]};
    assert_ok(colo_comm_create_self(&self));
    assert_ok(colo_loss_mean_forward(&xt, &none, true, self, &out, workspace, NULL));
    assert_true(value == 0 && n[0] == 0 && n[1] == 0 && n[2] == 1);
    assert_ok(colo_loss_mean_forward(&empty, &none, true, self, &out, workspace, NULL));
    assert_true(value == 0 && n[0] == 0 && n[1] == 0);
    assert_ok(colo_loss_mean_backward(out.factor, &upstream, &empty, NULL));
    x[1] = NAN; /* an invalid target's, the only one */
    assert_ok(colo_loss_mean_forward(&xt, &none, true, self, &out, workspace, NULL));
    assert_true(isnan(value) && n[1] == 0);
    x[1] = 6;
    assert_ok(colo_loss_mean_forward(&xt, &one, true, self, &out, workspace, NULL));
    assert_ok(colo_loss_mean_backward(out.factor, &upstream, &dt, NULL));
    assert_true(value == 6 && n[1] == 1 && d[0] == 5 && d[1] == 5);
    colo_comm_destroy(&self);
}

T_CASE(bad_arguments_are_refused_and_nothing_is_written)
{
    colo_comm_t *self = NULL;
    double x[2] = {1, 2}, value = 7, n[3] = {7, 7, 7}, d[2] = {7, 7};
    _Alignas(COLO_ALIGNMENT) double workspace[4];
    int64_t two = 2;
    const colo_loss_mean_upstream_t upstream = {.d_value_f64 = &value};
    const colo_tensor_t xt = colo_tensor_host(x, COLO_F64, 1, (int64_t[]){2});
    const colo_loss_mean_t out = {.value_f64 = &value, .num = &n[0], .den = &n[1], .factor = &n[2]};
    colo_tensor_t t;
    assert_ok(colo_comm_create_self(&self));
    assert_fails(colo_loss_mean_forward(&xt, &two, true, NULL, &out, workspace, NULL), COLO_ERR_ARG,
                 "group is NULL, expected the dp x cp group");
    assert_fails(colo_loss_mean_forward(&xt, NULL, true, self, &out, workspace, NULL), COLO_ERR_ARG,
                 "n_valid is NULL");
    assert_fails(colo_loss_mean_forward(NULL, &two, true, self, &out, workspace, NULL),
                 COLO_ERR_ARG, "losses");
    t = colo_tensor_host(x, COLO_BF16, 1, (int64_t[]){2});
    assert_fails(colo_loss_mean_forward(&t, &two, true, self, &out, workspace, NULL), COLO_ERR_ARG,
                 "losses: dtype bf16, expected f32 or f64");
    t = colo_tensor_host(x, COLO_F64, 2, (int64_t[]){1, 2});
    assert_fails(colo_loss_mean_forward(&t, &two, true, self, &out, workspace, NULL),
                 COLO_ERR_SHAPE, "losses: 2 axes, expected [T]");
    for (int member = 0; member < 4; member++) {
        colo_loss_mean_t less = out;
        *(void **[]){(void **)&less.value, (void **)&less.num, (void **)&less.den,
                     (void **)&less.factor}[member] = NULL;
        assert_fails(colo_loss_mean_forward(&xt, &two, true, self, &less, workspace, NULL),
                     COLO_ERR_ARG, "out or a member of it is NULL");
    }
    assert_fails(colo_loss_mean_forward(&xt, &two, true, self, NULL, workspace, NULL), COLO_ERR_ARG,
                 "out or a member of it is NULL");
    assert_fails(colo_loss_mean_forward(&xt, &two, true, self, &out, NULL, NULL), COLO_ERR_ARG,
                 "workspace is NULL");
    assert_fails(colo_loss_mean_forward(&xt, &two, true, self, &out, (char *)workspace + 4, NULL),
                 COLO_ERR_ARG, "workspace");
    t = colo_tensor_host(d, COLO_F64, 1, (int64_t[]){2});
    assert_fails(colo_loss_mean_backward(NULL, &upstream, &t, NULL), COLO_ERR_ARG,
                 "factor is NULL");
    assert_fails(colo_loss_mean_backward(&n[2], NULL, &t, NULL), COLO_ERR_ARG, "upstream is NULL");
    t = colo_tensor_host(d, COLO_I64, 1, (int64_t[]){2});
    assert_fails(colo_loss_mean_backward(&n[2], &upstream, &t, NULL), COLO_ERR_ARG,
                 "d_losses: dtype i64");
    assert_true(value == 7 && n[0] == 7 && n[1] == 7 && n[2] == 7 && d[0] == 7 && d[1] == 7);
    colo_comm_destroy(&self);
}

T_CASE_ON(4, one_rank_s_mistake_is_every_rank_s_error)
{
    double x = 1, value = 7, n[3];
    _Alignas(COLO_ALIGNMENT) double workspace[16];
    int64_t one = 1;
    const colo_tensor_t xt = colo_tensor_host(&x, COLO_F64, 1, (int64_t[]){1});
    const colo_loss_mean_t out = {.value_f64 = &value, .num = &n[0], .den = &n[1], .factor = &n[2]};
    const int r = colo_comm_rank(world);
    colo_status_t st =
        colo_loss_mean_forward(&xt, r == 1 ? NULL : &one, true, world, &out, workspace, NULL);
    rank_check(st == (r == 1 ? COLO_ERR_ARG : COLO_ERR_PEER));
    rank_check(strstr(colo_last_error(), "n_valid is NULL") && value == 7);
    return COLO_OK;
}

T_MAIN_IF(where.need(), "loss/mean")
