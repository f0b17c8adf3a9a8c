/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sampling.c - which ids top-k and top-p keep, against rows that are sorted, over worlds,
 * shards, dtypes and options; equal logits; special values; what is refused.
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
static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};
static sampling_case_t c; /* large */

static void init(int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype, int64_t top_k,
                 double top_p)
{
    memset(&c, 0, sizeof c);
    gather_shape(&c.shape, ranks, tokens, vocab, dtype);
    c.config = (colo_sampling_config_t){COLO_SAMPLING_CONFIG_INIT, .logits.vocab = vocab,
                                        .top_k = top_k, .top_p = top_p};
}

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
    colo_comm_stats(m->group, &s->after_forward[m->rank]);
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

static colo_status_t on_rank(colo_comm_t *world, void *arg)
{
    return gather_on_rank(world, arg, run_with);
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
    assert_ok(t_run_ranks(c.shape.ranks, on_rank, &c, sizeof c));
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
                    init(worlds[w], TOKENS, 53, dtypes[d], of[i].top_k, of[i].top_p);
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
                init(worlds[w], 2, VOCAB, dtypes[d], i > 0 ? 2600 : 0, i < 2 ? 0.8 : 1);
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
            init(worlds[w], 1, ALL, dtypes[d], 0, 0.9);
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
                init(worlds[w], 1, 64, dtypes[d], of[i / 2].top_k, of[i / 2].top_p);
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
                init(worlds[w], TOKENS, 60, dtypes[d], i % 2 ? 3 : 0, i / 2 ? 1 : 0.5);
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

/* ---- refusals ---- */

enum { AT = 3, AV = 6, WORKSPACE = 6656 /* 3 x 2080 + 64, rounded up */ };

typedef struct alone {
    colo_comm_t *group;
    colo_sampling_config_t cfg;
    float z[AT * AV], to[AT * AV];
    _Alignas(COLO_ALIGNMENT) unsigned char workspace[WORKSPACE + COLO_ALIGNMENT];
    colo_tensor_t logits, out;
    void *given;
} alone_t;

static void alone_init(alone_t *a)
{
    memset(a, CANARY, sizeof *a);
    a->group = t_self();
    a->cfg = (colo_sampling_config_t){COLO_SAMPLING_CONFIG_INIT, .logits.vocab = AV, .top_k = 2,
                                      .top_p = 0.9};
    for (int i = 0; i < AT * AV; i++)
        a->z[i] = (float)i;
    a->logits = colo_tensor_host(a->z, COLO_F32, 2, (int64_t[]){AT, AV});
    a->out = colo_tensor_host(a->to, COLO_F32, 2, (int64_t[]){AT, AV});
    a->given = a->workspace;
}

static colo_status_t keep(alone_t *a)
{
    return colo_sampling_keep(&a->cfg, &a->logits, &a->out, a->group, a->given, NULL);
}

#define REJECT(change, status, error_message)                                                \
    do {                                                                                     \
        alone_t a;                                                                           \
        alone_init(&a);                                                                      \
        change;                                                                              \
        assert_fails(keep(&a), status, error_message);                                       \
        assert_true(painted(a.to, sizeof a.to) && painted(a.workspace, sizeof a.workspace)); \
    } while (0)

T_CASE(bad_arguments_are_refused_and_nothing_is_written)
{
    size_t n = 77;
    const colo_sampling_config_t cfg = {COLO_SAMPLING_CONFIG_INIT, .logits.vocab = AV};
    REJECT(a.cfg.struct_size = 3, COLO_ERR_ARG, "struct_size is 3");
    REJECT(a.cfg.logits.vocab = 0, COLO_ERR_ARG, "sampling: logprob: vocab is 0");
    REJECT(a.cfg.logits.scale = -1, COLO_ERR_ARG, "scale is -1 and softcap is 0");
    REJECT(a.cfg.logits.scale = 0, COLO_ERR_ARG, "scale is 0 and softcap is 0");
    REJECT(a.cfg.logits.softcap = 2, COLO_ERR_ARG, "scale is 1 and softcap is 2");
    REJECT(a.cfg.top_k = -1, COLO_ERR_ARG, "top_k is -1, expected >= 0");
    REJECT(a.cfg.top_p = -0.1, COLO_ERR_ARG, "top_p is -0.1, expected in [0, 1]");
    REJECT(a.cfg.top_p = 1.5, COLO_ERR_ARG, "top_p is 1.5");
    REJECT(a.cfg.top_p = NAN, COLO_ERR_ARG, "top_p is nan");
    REJECT(a.logits.dtype = COLO_I8, COLO_ERR_ARG, "logits: dtype i8");
    REJECT((a.logits.shape[1] = 5, a.out.shape[1] = 5), COLO_ERR_SHAPE,
           "columns [0, 5) on a group of one rank");
    REJECT(a.out.shape[0] = 2, COLO_ERR_SHAPE, "out: [2, 6], expected [3, 6]");
    REJECT(a.out.dtype = COLO_I32, COLO_ERR_ARG, "out: dtype i32");
    REJECT(a.out.dtype = COLO_F64, COLO_ERR_ARG, "out: dtype f64, the logits are f32");
    REJECT(a.out.stride[0] = 5, COLO_ERR_SHAPE, "out: ");
    REJECT((a.out.data = a.z + 1, a.out.stride[0] = 6), COLO_ERR_ARG,
           "out: overlaps the logits without being them");
    REJECT(a.group = NULL, COLO_ERR_ARG, "group is NULL");
    REJECT(a.given = NULL, COLO_ERR_ARG, "workspace is NULL");
    REJECT(a.given = a.workspace + 8, COLO_ERR_ARG, "workspace");
    assert_fails(colo_sampling_workspace_size(&cfg, COLO_F32, -1, 1, &n), COLO_ERR_ARG,
                 "tokens is -1");
    assert_fails(colo_sampling_workspace_size(&cfg, COLO_F32, INT64_MAX / 4096, 8, &n),
                 COLO_ERR_ARG, "exceeds 2^63");
    assert_fails(colo_sampling_workspace_size(&cfg, COLO_I8, 1, 1, &n), COLO_ERR_ARG, "dtype i8");
    assert_fails(colo_sampling_workspace_size(&cfg, COLO_F32, 1, 0, &n), COLO_ERR_ARG,
                 "ranks is 0");
    assert_fails(colo_sampling_workspace_size(&cfg, COLO_F32, 1, 1, NULL), COLO_ERR_ARG,
                 "bytes is NULL");
    assert_int_equal(n, 77);
}

T_CASE(workspace_is_as_large_as_it_says_for_any_vocabulary)
{
    static const int64_t vocabs[] = {AV, 151936, 1 << 20};
    size_t n;
    alone_t a;
    for (int i = 0; i < 3; i++) {
        const colo_sampling_config_t cfg = {COLO_SAMPLING_CONFIG_INIT, .logits.vocab = vocabs[i]};
        assert_ok(colo_sampling_workspace_size(&cfg, COLO_F32, AT, 1, &n));
        assert_int_equal(n, WORKSPACE);
        assert_ok(colo_sampling_workspace_size(&cfg, COLO_F32, 4096, 8, &n));
        assert_int_equal(n, t_rounded(4096 * 24 + 8 * (64 + 4096 * (8 + 2048))));
    }
    alone_init(&a);
    assert_ok(keep(&a));
    assert_true(painted(a.workspace + WORKSPACE, COLO_ALIGNMENT));
    assert_true(a.to[5] == 5 && a.to[4] == 4 && isinf(a.to[3]));
}

/* ---- ranks that disagree ---- */

/* Each rank has half of 8 columns. */
static colo_status_t disagree(colo_comm_t *world, void *arg)
{
    disagreement_t *d = arg;
    const int r = colo_comm_rank(world), kind = r == 1 ? d->kind : -1;
    size_t bytes;
    alone_t a;
    alone_init(&a);
    a.cfg.logits.vocab = 8;
    a.cfg.logits.vocab_start = kind == 3 ? 5 : 4 * r;
    a.cfg.logits.temperature = kind == 2 ? 2 : 1;
    a.cfg.top_k = kind == 0 ? 3 : 2;
    a.cfg.top_p = kind == 1 ? 0.5 : 0.9;
    a.logits = colo_tensor_host(a.z, COLO_F32, 2, (int64_t[]){AT, 4});
    a.out = colo_tensor_host(a.to, COLO_F32, 2, (int64_t[]){AT, 4});
    a.group = world;
    rank_try(colo_sampling_workspace_size(&a.cfg, COLO_F32, AT, 2, &bytes));
    a.given = t_aligned(bytes);
    disagreement_note(d, r, keep(&a));
    free(a.given);
    rank_check(painted(a.to, sizeof a.to));
    return colo_comm_barrier(world, NULL); /* the group lives on */
}

T_CASE(ranks_that_disagree_get_the_same_error_message)
{
    static const char *const words[] = {"rank 1 has another config", "rank 1 has another config",
                                        "rank 1 has another config", "no rank of 2 holds column 4"};
    for (int kind = 0; kind < 4; kind++) {
        disagreement_t d = {.kind = kind};
        assert_ok(t_run_ranks(2, disagree, &d, sizeof d));
        disagreement_check(&d, words[kind]);
    }
}

T_MAIN_IF(where.need(), "loss/sampling")
