/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sums.c - a loss as one number on dp x cp of 8 ranks against one serial sum: weighted sums,
 * means by count, and colo_loss_reduce(). Tokens that count are spread unevenly; values and weights
 * are multiples of 1/8 and few, so sums are exact and compared with ==.
 */
#include "loss/gather_case.h"

#include <stdatomic.h>
#include <unistd.h>

enum { TOKENS = 12 };
typedef enum kind { WEIGHTED, MEAN, REDUCE } kind_t;

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
    return cp == 0 ? i % 5 == dp : i > 1 + dp; /* 2 or 3 tokens on cp 0, 9 or 10 on cp 1 */
}

/* Of a mean: some losses are 0, and the counts are not those of the losses. */
static double loss_of(int cp, int dp, int i)
{
    return (i + cp) % 3 == dp ? 0 : value_of(cp, dp, i);
}

static int64_t count_of(int cp, int dp)
{
    return cp + 2 * dp == 2 ? 0 : 5 + 3 * cp + dp;
}

typedef struct world {
    kind_t kind;
    colo_dtype_t dtype;
    const char *group;
    bool weighted, masked, empty;  /* empty: nothing counts anywhere */
    bool divide, no_value, no_num; /* of a mean */
    double value[8], num[8], den[8], weight[8], factor[8], d[8][TOKENS];
    uint64_t gathers[8], total[8];
} world_t;

typedef struct rank {
    world_t *w;
    int r, cp, dp;
    colo_comm_t *group;
    gather_rank_t m; /* whose group moves memory */
} rank_t;

/* In the dtype of the world. NULL: memory for so many. */
static void *put_numbers(rank_t *k, const double *from, int n)
{
    return from ? gather_put_stats(&k->m, from, n)
                : gather_put(&k->m, NULL, (size_t)n * colo_dtype_size(k->m.stat));
}

static colo_tensor_t line(const rank_t *k, void *data)
{
    return where_tensor(data, k->w->dtype, 1, (int64_t[]){TOKENS});
}

static void *put_workspace(rank_t *k)
{
    return gather_put(&k->m, NULL, colo_loss_weighted_workspace_size(colo_comm_size(k->group)));
}

static colo_status_t weigh(rank_t *k)
{
    world_t *w = k->w;
    double v[TOKENS], u[TOKENS];
    uint8_t mask[TOKENS];
    colo_loss_weighted_t got;
    for (int i = 0; i < TOKENS; i++) {
        mask[i] = !w->masked || counts(k->cp, k->dp, i);
        v[i] = mask[i] ? value_of(k->cp, k->dp, i) : NAN; /* must not be read */
        u[i] = mask[i] ? weight_of(k->cp, k->dp, i) : NAN;
    }
    void *d = put_numbers(k, NULL, TOKENS), *out = gather_put(&k->m, NULL, sizeof got);
    const colo_tensor_t vt = line(k, put_numbers(k, v, TOKENS)), dt = line(k, d),
                        ut = line(k, put_numbers(k, u, TOKENS)),
                        mt = where_tensor(gather_put(&k->m, mask, sizeof mask), COLO_U8, 1,
                                          (int64_t[]){TOKENS});
    rank_try(colo_loss_weighted_sum(&vt, w->weighted ? &ut : NULL, w->masked ? &mt : NULL,
                                    k->m.group, out, &dt, put_workspace(k), NULL));
    where.get(&got, out, sizeof got);
    w->num[k->r] = got.num;
    w->den[k->r] = (double)got.den;
    w->value[k->r] = got.value;
    w->weight[k->r] = got.weight;
    gather_get_stats(&k->m, w->d[k->r], d, TOKENS);
    return COLO_OK;
}

static colo_status_t average(rank_t *k)
{
    world_t *w = k->w;
    double x[TOKENS], n[3];
    const double three = 3, quarter = 0.25;
    const int64_t count = count_of(k->cp, k->dp);
    for (int i = 0; i < TOKENS; i++)
        x[i] = loss_of(k->cp, k->dp, i);
    void *value = put_numbers(k, NULL, 1), *d = put_numbers(k, NULL, TOKENS);
    void *d_value = put_numbers(k, &three, 1), *d_num = gather_put(&k->m, &quarter, sizeof quarter);
    double *numbers = gather_put(&k->m, NULL, sizeof n);
    const colo_tensor_t xt = line(k, put_numbers(k, x, TOKENS)), dt = line(k, d);
    const colo_loss_mean_t out = {COLO_LOSS_MEAN_INIT, .value = WHERE_ARRAY(value, xt.dtype, 1),
                                  .num = WHERE_ARRAY(numbers, COLO_F64, 1),
                                  .den = WHERE_ARRAY(numbers + 1, COLO_F64, 1),
                                  .factor = WHERE_ARRAY(numbers + 2, COLO_F64, 1)};
    if (w->weighted) {
        for (int i = 0; i < TOKENS; i++)
            x[i] = weight_of(k->cp, k->dp, i);
        const colo_tensor_t ut = line(k, put_numbers(k, x, TOKENS));
        rank_try(
            colo_loss_mean_weighted(&xt, &ut, w->divide, k->m.group, &out, put_workspace(k), NULL));
    } else {
        void *counted = gather_put(&k->m, &count, sizeof count);
        rank_try(colo_loss_mean_forward(&xt, WHERE_ARRAY(counted, COLO_I64, 1), w->divide,
                                        k->m.group, &out, put_workspace(k), NULL));
    }
    rank_try(colo_loss_mean_backward(
        out.factor,
        &(colo_loss_mean_upstream_t){COLO_LOSS_MEAN_UPSTREAM_INIT,
                                     .d_value =
                                         w->no_value ? NULL : WHERE_ARRAY(d_value, xt.dtype, 1),
                                     .d_num = w->no_num ? NULL : WHERE_ARRAY(d_num, COLO_F64, 1)},
        &dt, NULL));
    where.get(n, numbers, sizeof n);
    w->num[k->r] = n[0];
    w->den[k->r] = n[1];
    w->factor[k->r] = n[2];
    gather_get_stats(&k->m, &w->value[k->r], value, 1);
    gather_get_stats(&k->m, w->d[k->r], d, TOKENS);
    return COLO_OK;
}

static colo_status_t reduce(rank_t *k) /* in host memory */
{
    world_t *w = k->w;
    double f64[TOKENS];
    float f32[TOKENS];
    uint8_t mask[TOKENS];
    colo_loss_reduced_t got;
    for (int i = 0; i < TOKENS; i++) {
        mask[i] = !w->empty && counts(k->cp, k->dp, i);
        f64[i] = mask[i] ? value_of(k->cp, k->dp, i) : NAN; /* must not be read */
        f32[i] = (float)f64[i];
    }
    rank_try(colo_loss_reduce(w->dtype == COLO_F64 ? (void *)f64 : (void *)f32, w->dtype, mask,
                              TOKENS, k->group, &got, NULL));
    w->num[k->r] = got.num;
    w->den[k->r] = (double)got.den;
    w->value[k->r] = got.value;
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    static colo_status_t (*const run[])(rank_t * k) = {weigh, average, reduce};
    world_t *w = arg;
    const int r = colo_comm_rank(world);
    double host[TOKENS];
    rank_t k = {
        .w = w, .r = r, .cp = r / 2 % 2, .dp = r / 4, .m = {.stat = w->dtype, .host = host}};
    colo_grid_t grid;
    colo_comm_stats_t stats;
    rank_try(colo_grid_parse(&grid, "tp=2,cp=2,dp=2,pp=1", 8));
    rank_try(colo_comm_split(world, &grid, w->group, &k.group));
    rank_try(where.group(k.group, &k.m.group));
    colo_comm_t *asked = w->kind == REDUCE ? k.group : k.m.group;
    colo_comm_stats_reset(asked);
    const colo_status_t st = run[w->kind](&k);
    t_comm_stats(asked, &stats);
    w->gathers[r] = stats.ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_LOSS];
    w->total[r] = total_ops(&stats);
    for (int i = 0; i < k.m.count; i++)
        where.drop(k.m.all[i]);
    where.leave(&k.m.group);
    colo_comm_destroy(&k.group);
    return st;
}

/* On 8 ranks, each of which gathers once if its group has several. */
static void run(world_t *w)
{
    assert_ok(t_run_ranks(8, on_rank, w, sizeof *w));
    for (int r = 0; r < 8; r++) {
        assert_int_equal(w->gathers[r], strcmp(w->group, "pp") != 0);
        assert_int_equal(w->total[r], w->gathers[r]);
    }
}

static double weight_in(const world_t *w, int cp, int dp, int i)
{
    return w->masked && !counts(cp, dp, i) ? 0 : w->weighted ? weight_of(cp, dp, i) : 1;
}

/* What the ranks of dp x cp have in all, or rank @r alone. */
static void serial(const world_t *w, int r, double *num, double *den, double *weight)
{
    const bool alone = strcmp(w->group, "pp") == 0;
    *num = *den = *weight = 0;
    for (int dp = 0; dp < 2; dp++)
        for (int cp = 0; cp < 2; cp++) {
            if (alone && (cp != r / 2 % 2 || dp != r / 4))
                continue;
            *den += w->kind == MEAN && !w->weighted ? (double)count_of(cp, dp) : 0;
            for (int i = 0; i < TOKENS; i++) {
                const double u = weight_in(w, cp, dp, i);
                *num += w->kind == MEAN ? loss_of(cp, dp, i) : u * value_of(cp, dp, i);
                *den += w->kind != MEAN ? !w->masked || counts(cp, dp, i) : w->weighted ? u : 0;
                *weight += u;
            }
        }
}

T_CASE(sums_over_dp_and_cp_are_the_serial_sum_and_so_are_their_gradients)
{
    for (int form = 0; form < 12; form++) { /* 8, 9: colo_loss_reduce(); 10, 11: of one rank */
        world_t w = {.kind = form < 8 || form >= 10 ? WEIGHTED : REDUCE,
                     .dtype = form & 1 ? COLO_F64 : COLO_F32,
                     .weighted = form & 2,
                     .masked = form & 4 || form >= 8,
                     .group = form < 10 ? "dp-cp" : "pp"};
        double num, den, weight;
        run(&w);
        for (int r = 0; r < 8; r++) {
            serial(&w, r, &num, &den, &weight);
            assert_true(w.num[r] == num && w.den[r] == den && w.value[r] == num / den);
            assert_true(w.kind == REDUCE || w.weight[r] == weight);
            for (int i = 0; i < TOKENS && w.kind == WEIGHTED; i++) {
                const double want = weight_in(&w, r / 2 % 2, r / 4, i) / den;
                assert_true(w.d[r][i] == (w.dtype == COLO_F64 ? want : (float)want));
            }
        }
    }
}

T_CASE(the_mean_over_dp_and_cp_is_the_serial_one_and_so_is_its_gradient)
{
    for (int form = 0; form < 32; form++) {
        world_t w = {.kind = MEAN,
                     .dtype = form & 1 ? COLO_F64 : COLO_F32,
                     .divide = form & 2,
                     .no_value = form & 4,
                     .no_num = form & 8,
                     .weighted = form & 16,
                     .group = "dp-cp"};
        const bool wide = w.dtype == COLO_F64;
        double num, den, unused;
        serial(&w, 0, &num, &den, &unused);
        const double over = w.divide ? den : 1, value = num / over;
        const double g = (w.no_num ? 0 : 0.25) + (w.no_value ? 0 : 3 / over);
        run(&w);
        for (int r = 0; r < 8; r++) {
            assert_true(w.value[r] == (wide ? value : (double)(float)value));
            assert_true(w.num[r] == num && w.den[r] == den && w.factor[r] == 1 / over);
            /* 1 / over, its product with 3 and the sum are rounded: 3 half units of f64 or f32 */
            for (int i = 0; i < TOKENS; i++)
                assert_true(fabs(w.d[r][i] - g) <= 1.5 * (wide ? 0x1p-52 : 0x1p-23) * g);
        }
    }
}

/* The usual mistakes: a sum over dp alone, and the mean of such means. */
T_CASE(sums_over_dp_only_are_other_values)
{
    for (int kind = WEIGHTED; kind <= REDUCE; kind += REDUCE - WEIGHTED) {
        world_t whole = {.kind = kind,
                         .dtype = COLO_F64,
                         .weighted = kind == WEIGHTED,
                         .masked = true,
                         .group = "dp-cp"};
        world_t part = whole;
        part.group = "dp";
        run(&whole);
        run(&part);
        assert_true(fabs((part.value[0] + part.value[2]) / 2 - whole.value[0]) > 0.01);
        for (int r = 0; r < 8; r++)
            assert_true(part.den[r] < whole.den[r] && fabs(part.value[r] - whole.value[r]) > 0.01);
    }
}

T_CASE(no_counted_token_anywhere_gives_zero)
{
    world_t w = {.kind = REDUCE, .group = "dp-cp", .dtype = COLO_F32, .empty = true};
    run(&w);
    for (int r = 0; r < 8; r++)
        assert_true(w.num[r] == 0 && w.value[r] == 0 && w.den[r] == 0);
}

/* ---- on one rank: two numbers ---- */

static colo_comm_t *self;
static double v[2], value, n[3], d[2];
static uint8_t mask[2];
static int64_t count;
static _Alignas(COLO_ALIGNMENT) double workspace[4];
static colo_tensor_t vt, dt, mt, empty;
static colo_loss_weighted_t got;
static colo_loss_reduced_t reduced;
#define NUMBER(at, type)                                                                  \
    {                                                                                     \
        .data = at, .dtype = type, .device = -1, .ndim = 1, .shape = {1}, .stride = { 1 } \
    }
static colo_tensor_t of_value = NUMBER(&value, COLO_F64), of_num = NUMBER(&n[0], COLO_F64),
                     of_den = NUMBER(&n[1], COLO_F64), factor = NUMBER(&n[2], COLO_F64),
                     of_count = NUMBER(&count, COLO_I64);
static const colo_loss_mean_t out = {COLO_LOSS_MEAN_INIT, .value = &of_value, .num = &of_num,
                                     .den = &of_den, .factor = &factor};

static void begin(double first, double second)
{
    v[0] = first, v[1] = second;
    value = n[0] = n[1] = n[2] = d[0] = d[1] = 7;
    got = (colo_loss_weighted_t){.num = 7};
    reduced = (colo_loss_reduced_t){.num = 7, .den = 7, .value = 7};
    count = 2;
    mask[0] = mask[1] = 1;
    vt = colo_tensor_host(v, COLO_F64, 1, (int64_t[]){2});
    dt = colo_tensor_host(d, COLO_F64, 1, (int64_t[]){2});
    mt = colo_tensor_host(mask, COLO_U8, 1, (int64_t[]){2});
    empty = colo_tensor_host(NULL, COLO_F64, 1, (int64_t[]){0});
    self = t_self();
}

static colo_status_t mean_of(const colo_tensor_t *losses)
{
    return colo_loss_mean_forward(losses, &of_count, true, self, &out, workspace, NULL);
}

T_CASE(nothing_counted_is_zero_and_nan_is_not_hidden)
{
    double up = 5;
    const colo_loss_mean_upstream_t upstream = {COLO_LOSS_MEAN_UPSTREAM_INIT,
                                                .d_value = T_TENSOR(&up, COLO_F64, 1)};
    begin(NAN, 1);
    mask[0] = mask[1] = 0;
    assert_ok(colo_loss_weighted_sum(&vt, NULL, &mt, self, &got, &dt, workspace, NULL));
    assert_true(got.num == 0 && got.den == 0 && got.value == 0 && d[0] == 0 && d[1] == 0);
    assert_ok(colo_loss_weighted_sum(&empty, NULL, NULL, self, &got, NULL, workspace, NULL));
    assert_true(got.num == 0 && got.den == 0);
    assert_ok(colo_loss_weighted_sum(&vt, NULL, NULL, self, &got, NULL, workspace, NULL));
    assert_true(isnan(got.value) && got.den == 2);
    assert_ok(colo_loss_reduce(v, COLO_F64, NULL, 2, self, &reduced, NULL));
    assert_true(isnan(reduced.num) && isnan(reduced.value) && reduced.den == 2);
    count = 0;
    v[0] = v[1] = 0;
    assert_ok(mean_of(&vt));
    assert_true(value == 0 && n[0] == 0 && n[1] == 0 && n[2] == 1);
    assert_ok(mean_of(&empty));
    assert_true(value == 0 && n[0] == 0 && n[1] == 0);
    assert_ok(colo_loss_mean_backward(out.factor, &upstream, &empty, NULL));
    v[1] = NAN; /* an invalid target's, the only one */
    assert_ok(mean_of(&vt));
    assert_true(isnan(value) && n[1] == 0);
    v[1] = 6;
    count = 1;
    assert_ok(mean_of(&vt));
    assert_ok(colo_loss_mean_backward(out.factor, &upstream, &dt, NULL));
    assert_true(value == 6 && n[1] == 1 && d[0] == 5 && d[1] == 5);
}

/* Of losses that are weighted already; without weight nothing counts, and NaN is not hidden. */
T_CASE(a_mean_by_weights_divides_by_their_sum)
{
    double up = 6;
    const colo_loss_mean_upstream_t upstream = {COLO_LOSS_MEAN_UPSTREAM_INIT,
                                                .d_value = T_TENSOR(&up, COLO_F64, 1)};
    double w[2] = {0.5, 1.5};
    const colo_tensor_t wt = colo_tensor_host(w, COLO_F64, 1, (int64_t[]){2});
    begin(3, 5);
    assert_ok(colo_loss_mean_weighted(&vt, &wt, true, self, &out, workspace, NULL));
    assert_true(value == 4 && n[0] == 8 && n[1] == 2 && n[2] == 0.5);
    assert_ok(colo_loss_mean_backward(out.factor, &upstream, &dt, NULL));
    assert_true(d[0] == 3 && d[1] == 3);
    assert_ok(colo_loss_mean_weighted(&vt, &wt, false, self, &out, workspace, NULL));
    assert_true(value == 8 && n[0] == 8 && n[1] == 2 && n[2] == 1);
    w[1] = 0.25; /* below 1 it divides, too */
    assert_ok(colo_loss_mean_weighted(&vt, &wt, true, self, &out, workspace, NULL));
    assert_true(fabs(value - 8 / 0.75) < 1e-14 && n[1] == 0.75);
    w[0] = w[1] = 0;
    assert_ok(colo_loss_mean_weighted(&vt, &wt, true, self, &out, workspace, NULL));
    assert_true(value == 0 && n[0] == 8 && n[1] == 0 && n[2] == 0);
    v[0] = NAN;
    assert_ok(colo_loss_mean_weighted(&vt, &wt, true, self, &out, workspace, NULL));
    assert_true(isnan(value));
    begin(3, 5);
    assert_fails(colo_loss_mean_weighted(&vt, NULL, true, self, &out, workspace, NULL),
                 COLO_ERR_ARG, "weights is NULL");
    assert_fails(
        colo_loss_mean_weighted(&vt, T_TENSOR(w, COLO_F32, 2), true, self, &out, workspace, NULL),
        COLO_ERR_ARG, "weights: dtype f32, expected f64");
    assert_fails(colo_loss_mean_weighted(&vt, &empty, true, self, &out, workspace, NULL),
                 COLO_ERR_SHAPE, "weights");
    assert_fails(colo_loss_mean_weighted(NULL, &wt, true, self, &out, workspace, NULL),
                 COLO_ERR_ARG, "losses");
    assert_true(value == 7 && n[0] == 7);
}

T_CASE_ON(4, a_mean_by_weights_is_over_all_ranks)
{
    const int32_t r = colo_comm_rank(world);
    const int64_t tokens = r % 3; /* 0, 1, 2, 0 */
    float x[2] = {(float)r, 8}, w[2] = {0.5F, (float)r}, mean;
    double num, den, share;
    _Alignas(COLO_ALIGNMENT) double memory[16];
    const colo_tensor_t xt = colo_tensor_host(x, COLO_F32, 1, &tokens),
                        wt = colo_tensor_host(w, COLO_F32, 1, &tokens);
    const colo_loss_mean_t to = {COLO_LOSS_MEAN_INIT, .value = T_TENSOR(&mean, COLO_F32, 1),
                                 .num = T_TENSOR(&num, COLO_F64, 1),
                                 .den = T_TENSOR(&den, COLO_F64, 1),
                                 .factor = T_TENSOR(&share, COLO_F64, 1)};
    rank_try(colo_loss_mean_weighted(&xt, &wt, true, world, &to, memory, NULL));
    rank_check(num == 1 + 2 + 8 && den == 0.5 + 0.5 + 2); /* of ranks 1 and 2 */
    rank_check(mean == (float)(11.0 / 3) && share == 1.0 / 3);
    return COLO_OK;
}

T_CASE(bad_sums_are_refused_and_nothing_is_written)
{
#define WEIGH(values, weights, mask, group, out, d, workspace, status, text)                    \
    assert_fails(colo_loss_weighted_sum(values, weights, mask, group, out, d, workspace, NULL), \
                 status, text)
    begin(1, 2);
    WEIGH(&vt, NULL, NULL, NULL, &got, NULL, workspace, COLO_ERR_ARG,
          "group is NULL, expected the dp x cp group");
    WEIGH(T_TENSOR(v, COLO_BF16, 2), NULL, NULL, self, &got, NULL, workspace, COLO_ERR_ARG,
          "values: dtype bf16, expected f32 or f64");
    WEIGH(T_TENSOR(v, COLO_F64, 1, 2), NULL, NULL, self, &got, NULL, workspace, COLO_ERR_SHAPE,
          "values: 2 axes, expected [T]");
    WEIGH(&vt, T_TENSOR(v, COLO_F64, 1), NULL, self, &got, NULL, workspace, COLO_ERR_SHAPE,
          "weights: 1 axes, 1 elements, expected [2]");
    WEIGH(&vt, T_TENSOR(v, COLO_F32, 2), NULL, self, &got, NULL, workspace, COLO_ERR_ARG,
          "weights: dtype f32, expected f64");
    WEIGH(&vt, NULL, NULL, self, &got, T_TENSOR(v, COLO_F32, 2), workspace, COLO_ERR_ARG,
          "d_values: dtype f32, expected f64");
    WEIGH(&vt, NULL, NULL, self, &got, T_TENSOR(v, COLO_F64, 1), workspace, COLO_ERR_SHAPE,
          "d_values: 1 axes, 1 elements, expected [2]");
    WEIGH(&vt, NULL, T_TENSOR(mask, COLO_I8, 2), self, &got, NULL, workspace, COLO_ERR_ARG,
          "mask: dtype i8, expected u8");
    const colo_tensor_t t = colo_tensor_cuda(mask, COLO_U8, 0, 1, (int64_t[]){2});
    WEIGH(&vt, NULL, &t, self, &got, NULL, workspace, COLO_ERR_ARG, "mask: memory kind 1");
    WEIGH(&vt, NULL, NULL, self, NULL, NULL, workspace, COLO_ERR_ARG, "out is NULL");
    WEIGH(&vt, NULL, NULL, self, &got, NULL, NULL, COLO_ERR_ARG, "workspace is NULL");
    WEIGH(&vt, NULL, NULL, self, &got, NULL, workspace + 1, COLO_ERR_ARG,
          "workspace is 8 past a multiple of 256 bytes, ");
    assert_int_equal(colo_loss_weighted_workspace_size(3) % 256, 0);
    assert_true(got.num == 7);
#define REDUCED(values, dtype, count, group, out, text) \
    assert_fails(colo_loss_reduce(values, dtype, NULL, count, group, out, NULL), COLO_ERR_ARG, text)
    REDUCED(v, COLO_F64, 1, NULL, &reduced, "group is NULL, expected the dp x cp group");
    REDUCED(v, COLO_BF16, 1, self, &reduced, "dtype bf16, expected f32 or f64");
    REDUCED(v, COLO_F64, -1, self, &reduced, "count is -1");
    REDUCED(NULL, COLO_F64, 5, self, &reduced, "values is NULL for 5 tokens");
    REDUCED(v, COLO_F64, 1, self, NULL, "out is NULL");
    assert_true(reduced.num == 7 && reduced.den == 7 && reduced.value == 7);
}

T_CASE(bad_means_are_refused_and_nothing_is_written)
{
    const colo_loss_mean_upstream_t upstream = {COLO_LOSS_MEAN_UPSTREAM_INIT, .d_value = &of_value};
#define AVERAGE(losses, n_valid, group, out, workspace, status, text)                        \
    assert_fails(colo_loss_mean_forward(losses, n_valid, true, group, out, workspace, NULL), \
                 status, text)
    begin(1, 2);
    AVERAGE(&vt, &of_count, NULL, &out, workspace, COLO_ERR_ARG,
            "group is NULL, expected the dp x cp group");
    AVERAGE(&vt, NULL, self, &out, workspace, COLO_ERR_ARG, "n_valid is NULL");
    AVERAGE(NULL, &of_count, self, &out, workspace, COLO_ERR_ARG, "losses");
    AVERAGE(T_TENSOR(v, COLO_BF16, 2), &of_count, self, &out, workspace, COLO_ERR_ARG,
            "losses: dtype bf16, expected f32 or f64");
    AVERAGE(T_TENSOR(v, COLO_F64, 1, 2), &of_count, self, &out, workspace, COLO_ERR_SHAPE,
            "losses: 2 axes, expected [T]");
    for (int member = 0; member < 4; member++) {
        colo_loss_mean_t less = out;
        *(const colo_tensor_t **[]){&less.value, &less.num, &less.den, &less.factor}[member] = NULL;
        AVERAGE(&vt, &of_count, self, &less, workspace, COLO_ERR_ARG,
                "loss mean: a member of out is NULL");
    }
    AVERAGE(&vt, &of_count, self, NULL, workspace, COLO_ERR_ARG, "loss mean: out is NULL");
    AVERAGE(&vt, &of_count, self, &out, NULL, COLO_ERR_ARG, "workspace is NULL");
    AVERAGE(&vt, &of_count, self, &out, (char *)workspace + 4, COLO_ERR_ARG, "workspace");
    assert_fails(colo_loss_mean_backward(NULL, &upstream, &dt, NULL), COLO_ERR_ARG,
                 "factor is NULL");
    assert_fails(colo_loss_mean_backward(&factor, NULL, &dt, NULL), COLO_ERR_ARG,
                 "upstream is NULL");
    assert_fails(colo_loss_mean_backward(&factor, &upstream, T_TENSOR(d, COLO_I64, 2), NULL),
                 COLO_ERR_ARG, "d_losses: dtype i64");
    static const struct {
        colo_tensor_t *of;
        const char *forward, *backward; /* its name there; NULL: not there */
    } numbers[] = {{&of_value, "out.value: ", "d_value: "},
                   {&of_num, "out.num: ", NULL},
                   {&of_den, "out.den: ", NULL},
                   {&factor, "out.factor: ", "factor: "},
                   {&of_count, "n_valid: ", NULL}};
    for (size_t i = 0; i < 4 * sizeof numbers / sizeof *numbers; i++) {
        colo_tensor_t *of = numbers[i / 4].of, before = *of;
        const colo_status_t status = i % 4 < 2 ? COLO_ERR_ARG : COLO_ERR_SHAPE;
        if (i % 4 == 0)
            of->dtype = COLO_F32; /* half of what is written */
        if (i % 4 == 1)
            of->mem = COLO_MEM_CUDA;
        if (i % 4 == 2)
            of->shape[0] = 0;
        if (i % 4 == 3)
            of->ndim = 0;
        AVERAGE(&vt, &of_count, self, &out, workspace, status, numbers[i / 4].forward);
        if (numbers[i / 4].backward)
            assert_fails(colo_loss_mean_backward(&factor, &upstream, &dt, NULL), status,
                         numbers[i / 4].backward);
        *of = before;
    }
    assert_true(value == 7 && n[0] == 7 && n[1] == 7 && n[2] == 7 && d[0] == 7 && d[1] == 7);
}

/* ---- ranks that differ ---- */

T_CASE_ON(4, ranks_without_tokens_join_and_no_mask_counts_all)
{
    const double values[3] = {1.5, 2.5, 3.5};
    colo_loss_reduced_t sum;
    const int r = colo_comm_rank(world); /* rank 0 has no token, 1 has one ... and no mask */
    rank_try(colo_loss_reduce(r ? values : NULL, COLO_F64, NULL, r, world, &sum, NULL));
    rank_check(sum.num == 1.5 + 4 + 7.5 && sum.den == 6);
    return COLO_OK;
}

T_CASE_ON(4, one_rank_s_mistake_is_every_rank_s_error)
{
    double x = 1, number = 7, three[3];
    int64_t valid = 1;
    _Alignas(COLO_ALIGNMENT) double memory[16];
    const int64_t one = 1;
    const bool odd = colo_comm_rank(world) == 1;
    const colo_tensor_t xt = colo_tensor_host(&x, COLO_F64, 1, &one);
    const colo_loss_mean_t to = {COLO_LOSS_MEAN_INIT, .value = T_TENSOR(&number, COLO_F64, 1),
                                 .num = T_TENSOR(&three[0], COLO_F64, 1),
                                 .den = T_TENSOR(&three[1], COLO_F64, 1),
                                 .factor = T_TENSOR(&three[2], COLO_F64, 1)};
    const colo_status_t st = colo_loss_mean_forward(&xt, odd ? NULL : T_TENSOR(&valid, COLO_I64, 1),
                                                    true, world, &to, memory, NULL);
    rank_check(st == (odd ? COLO_ERR_ARG : COLO_ERR_PEER));
    rank_check(says("n_valid is NULL") && number == 7);
    return COLO_OK;
}

static atomic_int peer_is_back;

/* The rank that failed stays: only the mark on the group can wake the other before its deadline. */
static colo_status_t one_rank_errs(colo_comm_t *world, void *arg)
{
    const double one = 1;
    colo_loss_reduced_t sum = {.num = 7, .den = 7};
    const int r = colo_comm_rank(world);
    rank_try(colo_comm_set_timeout(world, 3000));
    const colo_status_t st = colo_loss_reduce(&one, COLO_F64, NULL, r ? -1 : 1, world, &sum, NULL);
    rank_check(st == (r ? COLO_ERR_ARG : COLO_ERR_PEER));
    rank_check(sum.num == 7 && sum.den == 7);
    if (r == 0)
        atomic_store(&peer_is_back, 1);
    for (int i = 0; i < 6000 && !atomic_load(&peer_is_back); i++)
        usleep(1000);
    ((bool *)arg)[r] = true;
    return st;
}

T_CASE(a_rank_that_errs_wakes_its_peers)
{
    bool seen[2] = {false, false};
    assert_true(colo_comm_threads_run(2, one_rank_errs, seen) < 0);
    assert_true(seen[0] && seen[1]);
}

/* Rank 2 weighs the values that the others count. */
T_CASE_ON_THREADS(3, ranks_that_weigh_and_ranks_that_count_are_a_mismatch)
{
    const int64_t two = 2;
    double x[2] = {1, 2}, number, num, den, made_factor, again = 0;
    int64_t valid = 2;
    _Alignas(COLO_ALIGNMENT) double memory[16];
    colo_loss_weighted_t sum;
    const colo_tensor_t values = colo_tensor_host(x, COLO_F64, 1, &two);
    const colo_loss_mean_t to = {COLO_LOSS_MEAN_INIT, .value = T_TENSOR(&number, COLO_F64, 1),
                                 .num = T_TENSOR(&num, COLO_F64, 1),
                                 .den = T_TENSOR(&den, COLO_F64, 1),
                                 .factor = T_TENSOR(&made_factor, COLO_F64, 1)};
    const colo_status_t st =
        colo_comm_rank(world) == 2
            ? colo_loss_weighted_sum(&values, &values, NULL, world, &sum, NULL, memory, NULL)
            : colo_loss_mean_forward(&values, T_TENSOR(&valid, COLO_I64, 1), true, world, &to,
                                     memory, NULL);
    rank_check(st == COLO_ERR_MISMATCH);
    rank_check(says("found a mean or sum by count on rank 0 and a weighted sum on rank 2"));
    const colo_status_t other =
        colo_comm_rank(world) == 0
            ? colo_loss_mean_weighted(&values, &values, true, world, &to, memory, NULL)
            : colo_loss_mean_forward(&values, T_TENSOR(&valid, COLO_I64, 1), true, world, &to,
                                     memory, NULL);
    rank_check(other == COLO_ERR_MISMATCH);
    rank_check(says("found a mean or sum by class weights on rank 0 and a mean or sum by count on "
                    "rank 1"));
    rank_try(colo_comm_all_reduce(world, x, &again, 1, COLO_F64, COLO_REDOP_SUM,
                                  NULL)); /* it lives on */
    rank_check(again == 3);
    return COLO_OK;
}

T_MAIN_IF(where.need(), "loss/sums")
