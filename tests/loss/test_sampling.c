/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sampling.c - which ids top-k and top-p keep, against rows that are sorted, over worlds,
 * shards, dtypes and options; equal logits; special values.
 */
#include "loss/gather_case.h"
#include "ref/ref_sampling.h"

enum { TOKENS = 5, VOCAB = 5000, ALL = TOKENS * VOCAB };

typedef struct sampling_case {
    loss_case_t shape;
    colo_sampling_config_t config;
    double z[ALL], got[ALL];
} sampling_case_t;

static const int32_t worlds[] = {1, 2, 4, 8};
static sampling_case_t c; /* large */

static double factor(void)
{
    return c.config.logits.scale / c.config.logits.temperature;
}

/* Rows of which no rounding decides; @steps > 0: many equal logits, zeros of both signs. */
static void draw(double spread, int steps, uint64_t *rng)
{
    static bool kept[ALL];
    const int64_t v = c.shape.vocab;
    for (int64_t t = 0; t < c.shape.tokens; t++) {
        double *z = c.z + t * v;
        do
            for (int64_t j = 0; j < v; j++) {
                z[j] = spread * loss_normal(rng);
                z[j] = steps ? round(z[j] * steps) / steps : z[j];
                z[j] = loss_round(c.shape.dtype, loss_round(COLO_F32, z[j]));
            }
        while (c.config.top_p > 0 &&
               !ref_sampling(factor(), z, v, c.config.top_k, c.config.top_p, kept));
    }
}

static colo_status_t run_with(void *arg, gather_rank_t *m)
{
    sampling_case_t *a = arg;
    loss_case_t *s = &a->shape;
    const int64_t cols = s->columns[m->rank], stride = cols + s->row_gap;
    colo_sampling_config_t cfg = a->config;
    size_t bytes;
    cfg.logits.vocab_start = s->start[m->rank];
    rank_try(colo_sampling_workspace_size(&cfg, s->dtype, s->tokens, s->ranks, &bytes));
    colo_tensor_t z = gather_put_shard(m, s->dtype, a->z);
    colo_tensor_t out = s->in_place ? z : gather_put_shard(m, s->dtype, NULL);
    void *workspace = gather_put(m, NULL, bytes);
    colo_comm_stats_reset(m->group);
    rank_try(colo_sampling_keep(&cfg, &z, &out, m->group, workspace, NULL));
    t_comm_stats(m->group, &s->after_forward[m->rank]);
    where.get(m->host, out.data, (size_t)(s->tokens * stride) * colo_dtype_size(s->dtype));
    for (int64_t i = 0; i < s->tokens * stride; i++) {
        const int64_t j = i % stride, id = s->start[m->rank] + j;
        const double got = loss_load(s->dtype, m->host, i);
        if (j < cols && id < s->vocab)
            a->got[i / stride * s->vocab + id] = got;
        else
            rank_check(got == (j < cols ? -INFINITY : s->pad));
    }
    return COLO_OK;
}

static void init(int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype, int64_t top_k,
                 double top_p)
{
    memset(&c, 0, sizeof c);
    gather_shape(&c.shape, ranks, tokens, vocab, dtype, run_with);
    c.config = (colo_sampling_config_t){COLO_SAMPLING_CONFIG_INIT, .logits.vocab = vocab,
                                        .top_k = top_k, .top_p = top_p};
}

static bool same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

/* @whole: rows that are copied */
static void run_and_compare(uint64_t whole)
{
    static bool kept[ALL];
    const int64_t v = c.shape.vocab, k = c.config.top_k;
    const double top_p = c.config.top_p > 0 ? c.config.top_p : 1;
    const int steps = (k > 0 && k < v) + (top_p < 1);
    const int want =
        c.shape.ranks == 1 ? 0 : 1 + (steps ? steps : 1) * (int)colo_dtype_size(c.shape.dtype);
    assert_ok(gather_run(&c, sizeof c));
    for (int r = 0; r < c.shape.ranks; r++)
        assert_int_equal(total_ops(&c.shape.after_forward[r]), want);
    for (int64_t t = 0; t < c.shape.tokens; t++) {
        const double *z = c.z + t * v, *got = c.got + t * v;
        ref_sampling(factor(), z, v, k, top_p, kept);
        for (int64_t j = 0; j < v; j++)
            if (!same(got[j], kept[j] || whole >> t & 1 ? z[j] : -INFINITY))
                fail_msg("W %d, %s, top_k %d, top_p %g, token %d: id %d of logit %g is %g",
                         c.shape.ranks, colo_dtype_name(c.shape.dtype), (int)k, c.config.top_p,
                         (int)t, (int)j, z[j], got[j]);
    }
}

T_CASE(every_cut_keeps_the_ids_of_the_sorted_row)
{
    static const struct {
        int64_t top_k;
        double top_p;
    } of[] = {{0, 0.9},  {0, 0.3}, {0, 1e-9}, {7, 1}, {1, 1},
              {40, 0.7}, {9, 0.8}, {99, 0.5}, {0, 0}};
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(4); step++)
        for (int w = 0; w < 4; w++)
            for (int d = 0; d < 4; d++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                    const int i = (int)t_below(&rng, 9);
                    init(worlds[w], TOKENS, 53, loss_dtypes[d], of[i].top_k, of[i].top_p);
                    loss_case_shard(&c.shape, kind);
                    c.shape.in_place = t_below(&rng, 2);
                    c.shape.row_gap = t_below(&rng, 4);
                    if (t_below(&rng, 2))
                        c.config.logits.temperature = 0.5 + t_uniform(&rng);
                    draw(3, (int)t_below(&rng, 3), &rng);
                    run_and_compare(0);
                }
}

/* More than a block of threads reads at a time, and as many equal logits as that. */
T_CASE(long_rows_end_among_equal_logits)
{
    uint64_t rng = t_seed() + 1;
    for (int w = 0; w < 2; w++)
        for (int d = 0; d < 4; d++)
            for (int i = 0; i < 3; i++) {
                init(worlds[w], 2, VOCAB, loss_dtypes[d], i > 0 ? 2600 : 0, i < 2 ? 0.8 : 1);
                c.shape.row_gap = i;
                draw(0.5, 1, &rng);
                run_and_compare(0);
            }
}

/* Masses add up to many times 2^32 units, of which each has a random part. */
T_CASE(long_rows_lose_no_unit_of_mass)
{
    uint64_t rng = t_seed() + 3;
    for (int d = 0; d < 4; d++)
        for (int w = 0; w < 2; w++) {
            init(worlds[w], 1, ALL, loss_dtypes[d], 0, 0.9);
            draw(1, 0, &rng);
            run_and_compare(0);
        }
}

static int64_t kept_of(int64_t vocab)
{
    int64_t n = 0;
    run_and_compare(0);
    while (n < vocab && c.got[n] > -INFINITY)
        n++;
    return n;
}

/* Also with ranks that hold the vocabulary backwards. */
T_CASE(of_equal_logits_the_first_that_reach_the_mass_are_kept)
{
    static const struct {
        int64_t top_k;
        double top_p;
        int64_t kept;
    } of[] = {{0, 0.5, 32}, {0, 0.5 + 0x1p-20, 33}, {8, 0.5, 4}, {5, 1, 5}, {64, 0.25, 16}};
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (size_t i = 0; i < 10; i++) {
                init(worlds[w], 1, 64, loss_dtypes[d], of[i / 2].top_k, of[i / 2].top_p);
                for (int j = 0; j < 64; j++)
                    c.z[j] = j % 3 ? 0.0 : -0.0;
                for (int32_t r = 0; r < worlds[w] && i % 2; r++)
                    c.shape.start[r] = (worlds[w] - 1 - r) * c.shape.columns[r];
                assert_int_equal(kept_of(64), of[i / 2].kept);
            }
}

T_CASE(rows_without_a_largest_logit_are_copied)
{
    uint64_t rng = t_seed() + 2;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int i = 0; i < 4; i++) {
                init(worlds[w], TOKENS, 60, loss_dtypes[d], i % 2 ? 3 : 0, i / 2 ? 1 : 0.5);
                draw(2, 0, &rng);
                c.z[7] = i % 2 ? NAN : copysign(NAN, -1);
                c.z[60 + 50] = INFINITY;
                for (int j = 0; j < 60; j++) {
                    c.z[120 + j] = -INFINITY;
                    c.z[180 + j] = j == 41 ? -70 : -INFINITY; /* fewer than top_k */
                }
                run_and_compare(7);
            }
}

T_CASE(no_tokens_still_join_the_gathers)
{
    for (int w = 0; w < 4; w++) {
        init(worlds[w], 0, 10, COLO_F32, 2, 0.5);
        run_and_compare(0);
    }
}

T_MAIN_IF(where.need(), "loss/sampling")
