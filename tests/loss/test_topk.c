/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_topk.c - the k largest and k given columns against the fp64 oracle, over worlds, shards,
 * dtypes and options; ties; special values; central differences; what is refused.
 */
#include "loss/topk_case.h"

static const int32_t worlds[] = {1, 2, 4, 8};
static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};
static const int64_t ks[] = {1, 2, 5, 20};

static topk_case_t c; /* large */

static void draw_options(uint64_t *rng)
{
    if (t_below(rng, 2))
        c.config.logits.temperature = 0.5 + t_uniform(rng);
    c.masked = gather_draw(&c.shape, &c.config.logits, c.mask, rng);
}

static void compare(const void *arg)
{
    const topk_case_t *a = arg;
    topk_case_compare(a, a->shape.label);
}

T_CASE(every_option_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(3); step++)
        for (int w = 0; w < 4; w++)
            for (int d = 0; d < 4; d++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
                    for (int i = 0; i < 8; i++) {
                        bool topk = i % 2;
                        topk_case_init(&c, worlds[w], 6, 23 + 8 * step, ks[i / 2], topk, dtypes[d],
                                       3, &rng);
                        loss_case_shard(&c.shape, kind);
                        draw_options(&rng);
                        if (!topk && t_below(&rng, 2))
                            c.ids[t_below(&rng, 6 * c.config.k)] = -100;
                        snprintf(c.shape.label, sizeof c.shape.label,
                                 "W %d, %s, shard %d, k %d, %s", worlds[w],
                                 colo_dtype_name(dtypes[d]), (int)kind, (int)c.config.k,
                                 topk ? "largest" : "given");
                        topk_case_later(&c, compare);
                    }
    t_run_rest();
}

/* ---- order ---- */

/* Few distinct values, so that every pick is among ties; ranks hold the vocabulary backwards. */
T_CASE(of_equal_logits_the_lowest_id_is_first_on_any_cut)
{
    uint64_t rng = t_seed() + 1;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int backwards = 0; backwards < 2; backwards++) {
                topk_case_init(&c, worlds[w], 8, 40, 13, true, dtypes[d], 1, &rng);
                for (int i = 0; i < 8 * 40; i++)
                    c.z[i] = (double)t_below(&rng, 3) - 1;
                for (int32_t r = 0; r < worlds[w] && backwards; r++)
                    c.shape.start[r] = (worlds[w] - 1 - r) * c.shape.columns[r];
                assert_ok(topk_case_run(&c));
                topk_case_compare(&c, "ties");
            }
}

T_CASE(all_columns_can_be_asked_for)
{
    uint64_t rng = t_seed() + 2;
    for (int w = 0; w < 4; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            topk_case_init(&c, worlds[w], 3, 30, 30, true, COLO_F32, 2, &rng);
            loss_case_shard(&c.shape, kind);
            assert_ok(topk_case_run(&c));
            topk_case_compare(&c, "all columns");
        }
}

T_CASE(a_scale_of_zero_makes_all_equal)
{
    uint64_t rng = t_seed() + 3;
    topk_case_init(&c, 4, 2, 20, 5, true, COLO_F32, 2, &rng);
    c.config.logits.scale = 0;
    assert_ok(topk_case_run(&c));
    topk_case_compare(&c, "scale 0");
    assert_int_equal(c.got[3][4], 4);
}

static void never_above_0(const void *arg)
{
    const topk_case_t *a = arg;
    for (int64_t i = 0; i < a->shape.tokens * a->config.k; i++)
        if (!(a->logp[0][i] <= 0))
            fail_msg("%s: logp is %.9g", a->shape.label, a->logp[0][i]);
}

/* 5000 + x on the grid of fp32: the same ids and the same bits as at offset 0 */
/* Rounding errors of probability 1 are on both sides. */
T_CASE(log_probabilities_are_never_above_0)
{
    uint64_t rng = t_seed() + 21;
    for (int i = 0; i < 96; i++) {
        const int64_t vocab = i % 2 ? 1 : 2;
        const colo_dtype_t dtype =
            (colo_dtype_t[]){COLO_F32, COLO_F64, COLO_BF16, COLO_F16}[i / 2 % 4];
        topk_case_init(&c, i / 8 % 3 ? 2 : 1, TOPK_TOKENS, vocab, vocab, i / 24 % 2, dtype, 40,
                       &rng);
        c.config.logits.temperature = i / 48 ? 1.3 : 0.7;
        for (int64_t t = 0; t < TOPK_TOKENS * vocab; t++)
            c.z[t] = loss_round(dtype, c.z[t] + 3000);
        snprintf(c.shape.label, sizeof c.shape.label, "case %d", i);
        topk_case_later(&c, never_above_0);
    }
    t_run_rest();
}

T_CASE(an_offset_of_5000_costs_no_digit)
{
    uint64_t rng = t_seed() + 4;
    static double first[TOPK_TOKENS * TOPK_K];
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 5, 32, 6, true, COLO_F32, 3, &rng);
        for (int i = 0; i < 5 * 32; i++)
            c.z[i] = floor(c.z[i] * 2048) / 2048;
        assert_ok(topk_case_run(&c));
        memcpy(first, c.logp[0], sizeof first);
        for (int i = 0; i < 5 * 32; i++)
            c.z[i] += 5000;
        assert_ok(topk_case_run(&c));
        for (int i = 0; i < 5 * 6; i++)
            assert_true(c.logp[0][i] == first[i]);
    }
}

/* ---- special values ---- */

enum { NAN_ROW, PLUS_ROW, MINUS_ROW, SOME_MINUS, MASKED, PLAIN, ROWS };

T_CASE(special_rows_are_as_documented)
{
    uint64_t rng = t_seed() + 5;
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int topk = 0; topk < 2; topk++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                    enum { V = 16, K = 6 };
                    topk_case_init(&c, worlds[w], ROWS, V, K, topk, dtypes[d], 2, &rng);
                    loss_case_shard(&c.shape, kind);
                    c.shape.pad = NAN;
                    c.z[NAN_ROW * V + 11] = NAN;
                    c.z[PLUS_ROW * V + 3] = INFINITY;
                    for (int j = 0; j < V; j++) {
                        c.z[MINUS_ROW * V + j] = -INFINITY;
                        if (j != 2 && j != 9) /* two that count, the rest is picked after them */
                            c.z[SOME_MINUS * V + j] = -INFINITY;
                        c.z[MASKED * V + j] = j % 2 ? NAN : INFINITY;
                    }
                    c.masked = true;
                    c.mask[MASKED] = 0;
                    for (int i = 0; i < K; i++)
                        c.ids[SOME_MINUS * K + i] = (int64_t[]){2, 9, 0, 1, 2, 15}[i];
                    c.shape.pad = 1000; /* gaps and padding are compared with == */
                    assert_ok(topk_case_run(&c));
                    for (int r = 0; r < worlds[w]; r++)
                        for (int i = 0; i < K; i++) {
                            for (int t = NAN_ROW; t <= MINUS_ROW; t++) {
                                assert_true(isnan(c.logp[r][t * K + i]));
                                assert_true(!topk || c.got[r][t * K + i] == -1);
                            }
                            assert_true(c.logp[r][MASKED * K + i] == 0);
                            assert_true(!topk || c.got[r][MASKED * K + i] == -1);
                        }
                    for (int j = 0; j < V; j++) {
                        for (int t = NAN_ROW; t <= MINUS_ROW; t++)
                            assert_true(isnan(c.dz[t * V + j]));
                        assert_true(c.dz[MASKED * V + j] == 0);
                        assert_true(isfinite(c.dz[SOME_MINUS * V + j]));
                        assert_true(isfinite(c.dz[PLAIN * V + j]));
                    }
                    const double *z = c.z + SOME_MINUS * V;
                    const int64_t hi = z[2] >= z[9] ? 2 : 9, order[K] = {hi, 11 - hi, 0, 1, 3, 4};
                    for (int r = 0; r < worlds[w]; r++)
                        for (int i = 0; i < K; i++) {
                            const int index = SOME_MINUS * K + i;
                            const int64_t id = topk ? c.got[r][index] : c.ids[index];
                            if (topk)
                                assert_int_equal(id, order[i]);
                            if (id != 2 && id != 9)
                                assert_true(c.logp[r][index] == -INFINITY);
                            else
                                assert_true(fabs(c.logp[r][index] +
                                                 log(1 + exp(z[11 - id] - z[id]))) < 1e-5);
                        }
                    /* a picked -inf: its gradient is its own g, for its p is 0 */
                    if (topk)
                        assert_true(fabs(c.dz[SOME_MINUS * V + 3] - c.up[SOME_MINUS * K + 4]) <
                                    0.01);
                }
}

T_CASE(an_invalid_id_is_counted_and_spoils_its_row_only)
{
    uint64_t rng = t_seed() + 6;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 5, 20, 3, false, COLO_F32, 2, &rng);
        c.ids[1 * 3 + 2] = 20;
        c.ids[2 * 3 + 0] = -1;
        c.ids[2 * 3 + 1] = INT64_MIN; /* what rows use themselves */
        c.ids[3 * 3 + 1] = -100;
        c.ids[4 * 3 + 0] = c.ids[4 * 3 + 1] = c.ids[4 * 3 + 2] = -100; /* nothing is asked for */
        for (int j = 0; j < 20; j++)
            c.z[4 * 20 + j] = NAN;
        assert_ok(topk_case_run(&c));
        assert_int_equal(c.n_invalid[0], 3);
        for (int j = 0; j < 20; j++)
            assert_true(c.dz[4 * 20 + j] == 0);
        c.shape.tokens = 4; /* the last row is not for the oracle */
        topk_case_compare(&c, "invalid");
    }
}

T_CASE(an_id_that_occurs_twice_counts_twice)
{
    uint64_t rng = t_seed() + 7;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 4, 10, 20, false, COLO_F64, 2, &rng); /* 20 of 10: many do */
        assert_ok(topk_case_run(&c));
        topk_case_compare(&c, "twice");
    }
}

T_CASE(no_tokens_still_join_the_gather)
{
    uint64_t rng = t_seed() + 8;
    for (int w = 0; w < 4; w++) {
        topk_case_init(&c, worlds[w], 0, 10, 2, true, COLO_F32, 2, &rng);
        assert_ok(topk_case_run(&c));
        topk_case_compare(&c, "no tokens");
    }
}

/* ---- gradient ---- */

static colo_status_t run(void)
{
    return topk_case_run(&c);
}

static double weighted(int64_t t)
{
    double f = 0;
    for (int64_t i = t * c.config.k; i < (t + 1) * c.config.k; i++)
        f += c.up[i] * c.logp[0][i];
    return f;
}

T_CASE(the_gradient_is_the_central_difference)
{
    uint64_t rng = t_seed() + 9;
    for (int topk = 0; topk < 2; topk++) {
        topk_case_init(&c, 2, 3, 12, 3, topk, COLO_F64, 2, &rng);
        loss_case_shard(&c.shape, SHARD_UNEVEN);
        c.config.logits.softcap = topk ? 3 : 0.9;
        c.config.logits.temperature = 0.7;
        gather_central(&c.shape, c.z, c.dz, run, weighted);
    }
}

/* ---- refusals ---- */

enum { AT = 3, AV = 6, AK = 2 };

typedef struct alone {
    colo_topk_config_t cfg;
    float z[AT * AV], dz[AT * AV], logp[AT * AK], up[AT * AK];
    int64_t ids[AT * AK], chosen[AT * AK], n_invalid;
    uint8_t mask[AT];
    _Alignas(COLO_ALIGNMENT) double stats[AT * (5 + 2 * AK)];
    _Alignas(COLO_ALIGNMENT) unsigned char workspace[1024];
    uint64_t version;
    colo_tensor_t logits, given, masked, d_logits;
    colo_topk_out_t out;
    colo_topk_saved_t saved;
    colo_topk_upstream_t upstream;
    struct {
        colo_comm_t *group;
        const colo_tensor_t *ids;
        const colo_topk_out_t *out;
        colo_topk_saved_t *saved;
        void *stats, *workspace;
    } arg;
} alone_t;

static void alone_init(alone_t *a, bool topk)
{
    uint64_t rng = 5;
    memset(a, CANARY, sizeof *a);
    a->cfg = (colo_topk_config_t){COLO_TOPK_CONFIG_INIT, .logits.vocab = AV, .k = AK, .topk = topk};
    for (int i = 0; i < AT * AV; i++)
        a->z[i] = (float)t_uniform(&rng);
    for (int i = 0; i < AT * AK; i++) {
        a->ids[i] = i;
        a->up[i] = 1;
    }
    a->version = 1;
    a->logits = colo_tensor_host(a->z, COLO_F32, 2, (int64_t[]){AT, AV});
    a->logits.version = &a->version;
    a->given = colo_tensor_host(a->ids, COLO_I64, 2, (int64_t[]){AT, AK});
    a->masked = colo_tensor_host(a->mask, COLO_U8, 1, (int64_t[]){AT});
    a->d_logits = colo_tensor_host(a->dz, COLO_F32, 2, (int64_t[]){AT, AV});
    a->out = (colo_topk_out_t){
        .logp = a->logp, .ids = topk ? a->chosen : NULL, .n_invalid = &a->n_invalid};
    a->saved = (colo_topk_saved_t){.valid = false};
    a->upstream = (colo_topk_upstream_t){.d_logp = a->up};
    a->arg.group = t_self();
    a->arg.ids = topk ? NULL : &a->given;
    a->arg.out = &a->out;
    a->arg.saved = &a->saved;
    a->arg.stats = a->stats;
    a->arg.workspace = a->workspace;
}

static colo_status_t forward(alone_t *a)
{
    return colo_topk_forward(
        &a->cfg, &(colo_topk_batch_t){.logits = &a->logits, .ids = a->arg.ids, .mask = &a->masked},
        a->arg.group, a->arg.out, a->arg.saved, a->arg.stats, a->arg.workspace, NULL);
}

static bool wrote_nothing(const alone_t *a)
{
    return painted(a->logp, sizeof a->logp) && painted(a->chosen, sizeof a->chosen) &&
           painted(a->stats, sizeof a->stats) && painted(&a->n_invalid, sizeof a->n_invalid) &&
           !a->saved.valid;
}

#define REJECT(topk, change, status, error_message)                                 \
    do {                                                                            \
        alone_t a;                                                                  \
        alone_init(&a, topk);                                                       \
        change;                                                                     \
        assert_fails(forward(&a), status, error_message);                           \
        assert_true(wrote_nothing(&a) && painted(a.workspace, sizeof a.workspace)); \
    } while (0)

T_CASE(bad_arguments_are_refused_and_nothing_is_written)
{
    size_t n = 77;
    alone_t b;
    REJECT(true, a.cfg.struct_size = 3, COLO_ERR_ARG, "struct_size is 3");
    REJECT(true, a.cfg.k = 0, COLO_ERR_ARG, "k is 0, expected 1..256");
    REJECT(true, a.cfg.k = 257, COLO_ERR_ARG, "k is 257, expected 1..256");
    REJECT(true, a.cfg.k = 7, COLO_ERR_ARG, "k is 7, expected at most 6");
    REJECT(true, a.cfg.logits.temperature = 0, COLO_ERR_ARG, "topk: logprob: temperature is 0");
    REJECT(true, a.cfg.logits.vocab = 0, COLO_ERR_ARG, "vocab is 0");
    REJECT(true, a.arg.ids = &a.given, COLO_ERR_ARG, "ids are given, config.topk chooses them");
    REJECT(false, a.arg.ids = NULL, COLO_ERR_ARG, "ids: tensor is NULL");
    REJECT(false, a.given.dtype = COLO_I32, COLO_ERR_ARG, "ids: dtype i32, expected i64");
    REJECT(false, a.given.shape[1] = 1, COLO_ERR_SHAPE, "expected [3, 2]");
    REJECT(false, a.given.stride[1] = 2, COLO_ERR_SHAPE, "columns are 2 elements apart");
    REJECT(false, a.given.mem = COLO_CUDA, COLO_ERR_ARG, "ids: memory kind 1");
    REJECT(false, a.out.ids = a.chosen, COLO_ERR_ARG, "out.ids is given, config.topk is false");
    REJECT(true, a.masked.dtype = COLO_F32, COLO_ERR_ARG, "mask: dtype f32, expected u8");
    REJECT(true, a.masked.shape[0] = 2, COLO_ERR_SHAPE, "mask: 1 axes, 2 elements, expected [3]");
    REJECT(true, a.masked.data = NULL, COLO_ERR_ARG, "mask: data is NULL");
    REJECT(true, (a.masked.ndim = 2, a.masked.shape[1] = a.masked.stride[1] = 1), COLO_ERR_SHAPE,
           "mask: 2 axes");
    REJECT(true, a.logits.dtype = COLO_I8, COLO_ERR_ARG, "logits: dtype i8");
    REJECT(true, (a.logits.shape[1] = 5, a.logits.stride[0] = 6), COLO_ERR_SHAPE,
           "columns [0, 5) on a group of one rank");
    REJECT(true, a.arg.group = NULL, COLO_ERR_ARG, "group is NULL");
    REJECT(true, a.arg.out = NULL, COLO_ERR_ARG, "out is NULL");
    REJECT(true, a.arg.stats = NULL, COLO_ERR_ARG, "saved memory is NULL; it needs 256 bytes");
    REJECT(true, a.arg.saved = NULL, COLO_ERR_ARG, "saved memory is given, saved is NULL");
    REJECT(true, a.arg.workspace = NULL, COLO_ERR_ARG, "workspace is NULL");
    alone_init(&b, true);
    assert_fails(colo_topk_saved_size(&b.cfg, -1, &n), COLO_ERR_ARG, "tokens is -1");
    assert_fails(colo_topk_saved_size(&b.cfg, INT64_MAX / 4, &n), COLO_ERR_ARG, "exceed 2^63");
    assert_fails(colo_topk_workspace_size(&b.cfg, COLO_F32, INT64_MAX / 100, 8, &n), COLO_ERR_ARG,
                 "exceeds 2^63");
    assert_fails(colo_topk_workspace_size(&b.cfg, COLO_I8, 1, 1, &n), COLO_ERR_ARG, "dtype i8");
    assert_int_equal(n, 77);
}

T_CASE(bad_backwards_are_refused_and_in_place_ends_the_state)
{
    alone_t a;
    alone_init(&a, true);
    assert_fails(colo_topk_backward(&a.saved, &a.upstream, &a.d_logits, NULL), COLO_ERR_STATE,
                 "no forward filled it");
    assert_fails(colo_topk_backward(NULL, &a.upstream, &a.d_logits, NULL), COLO_ERR_ARG,
                 "saved is NULL");
    assert_ok(forward(&a));
    assert_fails(colo_topk_backward(&a.saved, NULL, &a.d_logits, NULL), COLO_ERR_ARG,
                 "upstream is NULL");
    a.upstream.d_logp = NULL;
    assert_fails(colo_topk_backward(&a.saved, &a.upstream, &a.d_logits, NULL), COLO_ERR_ARG,
                 "d_logp is NULL");
    a.upstream.d_logp = a.up;
    a.version = 2;
    assert_fails(colo_topk_backward(&a.saved, &a.upstream, &a.d_logits, NULL), COLO_ERR_MODIFIED,
                 "logits were written after they were saved: version 2, saved at 1");
    a.version = 1;
    a.d_logits.data = a.z + 1;
    a.d_logits.shape[0] = AT;
    assert_fails(colo_topk_backward(&a.saved, &a.upstream, &a.d_logits, NULL), COLO_ERR_ARG,
                 "overlaps the logits without being them");
    assert_true(painted(a.dz, sizeof a.dz));
    a.d_logits = a.logits;
    assert_ok(colo_topk_backward(&a.saved, &a.upstream, &a.d_logits, NULL));
    assert_fails(colo_topk_backward(&a.saved, &a.upstream, &a.d_logits, NULL), COLO_ERR_STATE,
                 "in place ended it");
}

T_CASE(nothing_is_written_past_the_queried_sizes)
{
    for (int topk = 0; topk < 2; topk++) {
        enum { MARGIN = COLO_ALIGNMENT };
        alone_t a;
        size_t stat_bytes, workspace_bytes;
        alone_init(&a, topk);
        assert_ok(colo_topk_saved_size(&a.cfg, AT, &stat_bytes));
        assert_ok(colo_topk_workspace_size(&a.cfg, COLO_F32, AT, 1, &workspace_bytes));
        unsigned char *s = t_aligned(stat_bytes + 2 * MARGIN),
                      *x = t_aligned(workspace_bytes + 2 * MARGIN);
        for (int saved = 0; saved < 2; saved++) {
            memset(s, CANARY, stat_bytes + 2 * MARGIN);
            memset(x, CANARY, workspace_bytes + 2 * MARGIN);
            a.arg.saved = saved ? &a.saved : NULL;
            a.arg.stats = saved ? s + MARGIN : NULL;
            a.arg.workspace = x + MARGIN;
            assert_ok(forward(&a));
            assert_true(painted(s, MARGIN) && painted(x, MARGIN));
            assert_true(painted(s + MARGIN + stat_bytes, MARGIN));
            assert_true(painted(x + MARGIN + workspace_bytes, MARGIN));
            assert_true(painted(s + MARGIN, stat_bytes) == !saved);
        }
        free(s);
        free(x);
    }
}

/* Logits of 65536 x 2^20 in bf16 are 128 GiB: no buffer may know V. */
T_CASE(no_buffer_grows_with_the_vocabulary)
{
    static const int64_t vocabs[] = {1000, 151936, 1 << 20};
    for (int topk = 0; topk < 2; topk++)
        for (int i = 0; i < 3; i++) {
            const colo_topk_config_t cfg = {COLO_TOPK_CONFIG_INIT, .logits.vocab = vocabs[i],
                                            .k = 64, .topk = topk};
            const size_t tokens = 65536, own = 40 + 16 * 64, block = 12 + 64 * (topk ? 12 : 4);
            size_t stats, workspace;
            assert_ok(colo_topk_saved_size(&cfg, (int64_t)tokens, &stats));
            assert_ok(colo_topk_workspace_size(&cfg, COLO_BF16, (int64_t)tokens, 8, &workspace));
            assert_int_equal(stats, t_rounded(tokens * own));
            assert_int_equal(workspace,
                             t_rounded(t_rounded(tokens * own) + 8 * (64 + tokens * block)));
        }
}

/* ---- ranks that disagree ---- */

/* Each rank has half of 8 columns. */
static colo_status_t disagree(colo_comm_t *world, void *arg)
{
    disagreement_t *d = arg;
    const int r = colo_comm_rank(world), kind = r == 1 ? d->kind : -1;
    alone_t a;
    alone_init(&a, false);
    memset(a.mask, 1, sizeof a.mask);
    a.cfg.logits.vocab = 8;
    a.cfg.logits.vocab_start = kind == 3 ? 5 : 4 * r;
    a.cfg.logits.temperature = kind == 0 ? 2 : 1;
    a.cfg.ignore_index = kind == 4 ? -1 : a.cfg.ignore_index;
    a.logits = colo_tensor_host(a.z, COLO_F32, 2, (int64_t[]){AT, 4});
    a.ids[kind == 1 ? 3 : 0] += kind == 1 || kind == 5;
    a.mask[1] = kind != 2;
    a.arg.group = world;
    disagreement_note(d, r, forward(&a));
    rank_check(wrote_nothing(&a));
    return colo_comm_barrier(world, NULL); /* the group lives on */
}

T_CASE(ranks_that_disagree_get_the_same_error_message_and_live_on)
{
    static const char *const words[] = {"rank 1 has another config", "rank 1 has other targets",
                                        "rank 1 has other targets",  "no rank of 2 holds column 4",
                                        "rank 1 has another config", "rank 1 has other targets"};
    for (int kind = 0; kind < 6; kind++) {
        disagreement_t d = {.kind = kind};
        assert_ok(t_run_ranks(2, disagree, &d, sizeof d));
        disagreement_check(&d, words[kind]);
    }
}

T_MAIN_IF(where.need(), "loss/topk")
