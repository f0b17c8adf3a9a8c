/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_distill.c - cross entropy and KL from sharded targets against the fp64 oracle, over worlds,
 * shards, dtypes and options; known values; special values; central differences; what is refused.
 */
#include "loss/distill_case.h"

static const int32_t worlds[] = {1, 2, 4, 8};
static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};

static distill_case_t c; /* large */

static void draw_options(uint64_t *rng)
{
    if (t_below(rng, 2))
        c.config.logits.temperature = 0.5 + 2 * t_uniform(rng);
    if (t_below(rng, 2))
        c.config.target_temperature = 0.5 + 2 * t_uniform(rng);
    if (t_below(rng, 3) == 0)
        c.config.target_scale = 0.5;
    c.masked = gather_draw(&c.shape, &c.config.logits, c.mask, rng);
    c.no_ce = t_below(rng, 4) == 0;
    c.no_kl = t_below(rng, 4) == 0;
}

static void compare(const void *arg)
{
    const distill_case_t *a = arg;
    distill_case_compare(a, a->shape.label);
}

T_CASE(every_option_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    for (int step = 0; step < t_scaled(3); step++)
        for (int w = 0; w < 4; w++)
            for (int d = 0; d < 4; d++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++)
                    for (int i = 0; i < 4; i++) {
                        const bool probs = i % 2;
                        const colo_dtype_t other = i / 2 ? COLO_F32 : dtypes[d];
                        distill_case_init(&c, worlds[w], 6, 23 + 8 * step, probs, dtypes[d], other,
                                          3, &rng);
                        loss_case_shard(&c.shape, kind);
                        draw_options(&rng);
                        snprintf(c.shape.label, sizeof c.shape.label,
                                 "W %d, %s from %s %s, shard %d", worlds[w],
                                 colo_dtype_name(dtypes[d]), colo_dtype_name(other),
                                 probs ? "probabilities" : "logits", (int)kind);
                        distill_case_later(&c, compare);
                    }
    t_run_rest();
}

/* p = q: ce is the entropy, kl and the gradient vanish, on every cut. */
T_CASE(a_student_that_is_its_teacher_has_no_kl)
{
    uint64_t rng = t_seed() + 1;
    for (int w = 0; w < 4; w++)
        for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
            distill_case_init(&c, worlds[w], 4, 40, false, COLO_F32, COLO_F32, 3, &rng);
            loss_case_shard(&c.shape, kind);
            memcpy(c.w, c.z, sizeof c.w);
            c.config.logits.temperature = c.config.target_temperature = 1.7;
            assert_ok(distill_case_run(&c));
            distill_case_compare(&c, "its own teacher");
            for (int t = 0; t < 4; t++)
                assert_true(fabs(c.out[0][1][t]) < 1e-6);
            for (int i = 0; i < 4 * 40; i++)
                assert_true(fabs(c.dz[i]) < 1e-6);
        }
}

static void never_below_0(const void *arg)
{
    const distill_case_t *a = arg;
    const bool probs = a->config.targets == COLO_DISTILL_PROBS;
    for (int t = 0; t < DISTILL_TOKENS; t++)
        if (!(a->out[0][0][t] >= 0) || !(probs || a->out[0][1][t] >= 0))
            fail_msg("%s: ce is %.9g, kl %.9g", a->shape.label, a->out[0][0][t], a->out[0][1][t]);
}

/* Soft labels of one column are hard labels: ce = kl = -logp of it. */
/* Rounding errors of a divergence of 0, and of a cross entropy of 0, are on both sides. */
T_CASE(divergence_and_cross_entropy_are_never_below_0)
{
    uint64_t rng = t_seed() + 21;
    for (int i = 0; i < 192; i++) {
        const int64_t vocab = 1 + i % 3 % 2 * 15;
        const bool probs = i / 96;
        const colo_dtype_t dtype = dtypes[i / 24 % 4];
        distill_case_init(&c, worlds[i / 6 % 4], DISTILL_TOKENS, vocab, probs, dtype,
                          dtype == COLO_F64 ? COLO_F64 : COLO_F32, 40, &rng);
        for (int64_t j = 0; j < DISTILL_TOKENS * vocab; j++) {
            c.z[j] = loss_round(dtype, c.z[j] + (i % 2 ? 3000 : 0));
            c.w[j] = probs ? vocab == 1 : loss_round(COLO_F32, c.z[j] * (1 + 0x1p-21));
        }
        c.config.logits.temperature = c.config.target_temperature = i % 5 ? 0.7 : 1.3;
        if (probs)
            c.config.target_temperature = 1;
        snprintf(c.shape.label, sizeof c.shape.label, "case %d", i);
        distill_case_later(&c, never_below_0);
    }
    t_run_rest();
}

T_CASE(a_one_hot_target_is_the_log_probability)
{
    uint64_t rng = t_seed() + 2;
    for (int w = 0; w < 4; w++) {
        distill_case_init(&c, worlds[w], 5, 32, true, COLO_F64, COLO_F32, 3, &rng);
        for (int t = 0; t < 5; t++)
            for (int j = 0; j < 32; j++)
                c.w[t * 32 + j] = j == 7 * t % 32;
        assert_ok(distill_case_run(&c));
        for (int t = 0; t < 5; t++) {
            double sum = 0, target = c.z[t * 32 + 7 * t % 32];
            for (int j = 0; j < 32; j++)
                sum += exp(c.z[t * 32 + j] - target);
            assert_true(fabs(c.out[0][0][t] - log(sum)) < 1e-12);
            assert_true(fabs(c.out[0][1][t] - log(sum)) < 1e-12);
        }
    }
}

/* Twice the soft labels are twice the loss and the gradient; none at all are 0. */
T_CASE(probabilities_are_not_normalised)
{
    uint64_t rng = t_seed() + 3;
    static double first[DISTILL_TOKENS * DISTILL_VOCAB], ce[4];
    distill_case_init(&c, 4, 4, 30, true, COLO_F64, COLO_F64, 2, &rng);
    c.no_kl = true;
    assert_ok(distill_case_run(&c));
    memcpy(first, c.dz, sizeof first);
    memcpy(ce, c.out[0][0], sizeof ce);
    for (int i = 0; i < 4 * 30; i++)
        c.w[i] = i < 30 ? 0 : 2 * c.w[i];
    assert_ok(distill_case_run(&c));
    for (int t = 1; t < 4; t++)
        assert_true(fabs(c.out[0][0][t] - 2 * ce[t]) < 1e-12);
    for (int i = 30; i < 4 * 30; i++)
        assert_true(fabs(c.dz[i] - 2 * first[i]) < 1e-12);
    assert_true(c.out[0][0][0] == 0 && c.out[0][1][0] == 0);
    for (int i = 0; i < 30; i++)
        assert_true(c.dz[i] == 0);
}

/* 5000 + z and 5000 + w on the grid of fp32: the same bits */
T_CASE(an_offset_of_5000_costs_no_digit)
{
    uint64_t rng = t_seed() + 4;
    double first[2][5];
    for (int w = 0; w < 4; w++) {
        distill_case_init(&c, worlds[w], 5, 32, false, COLO_F32, COLO_F32, 3, &rng);
        for (int i = 0; i < 5 * 32; i++) {
            c.z[i] = floor(c.z[i] * 2048) / 2048;
            c.w[i] = floor(c.w[i] * 2048) / 2048;
        }
        assert_ok(distill_case_run(&c));
        for (int k = 0; k < 2; k++)
            memcpy(first[k], c.out[0][k], sizeof first[k]);
        for (int i = 0; i < 5 * 32; i++) {
            c.z[i] += 5000;
            c.w[i] -= 5000;
        }
        assert_ok(distill_case_run(&c));
        for (int k = 0; k < 2; k++)
            for (int t = 0; t < 5; t++)
                assert_true(c.out[0][k][t] == first[k][t]);
    }
}

/* ---- special values ---- */

enum { Z_NAN, Z_PLUS, Z_MINUS, W_NAN, W_PLUS, W_MINUS, MASKED, GAPS, PLAIN, ROWS };

T_CASE(special_rows_are_as_documented)
{
    uint64_t rng = t_seed() + 5;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int d = 0; d < 4; d++)
            for (int probs = 0; probs < 2; probs++)
                for (shard_kind_t kind = 0; kind < SHARD_KINDS; kind++) {
                    distill_case_init(&c, worlds[w], ROWS, V, probs, dtypes[d], dtypes[d], 2, &rng);
                    loss_case_shard(&c.shape, kind);
                    for (int j = 0; j < V; j++) {
                        c.z[Z_MINUS * V + j] = -INFINITY;
                        c.w[W_MINUS * V + j] = probs ? -1 : -INFINITY;
                        c.z[MASKED * V + j] = NAN;
                        c.w[MASKED * V + j] = NAN;
                    }
                    c.z[Z_NAN * V + 11] = c.w[W_NAN * V + 1] = NAN;
                    c.z[Z_PLUS * V + 3] = c.w[W_PLUS * V + 14] = INFINITY;
                    /* no probability in 5, and there x = -inf; whole shards of both at W = 8 */
                    for (int j = 4; j < 8; j++) {
                        c.z[GAPS * V + j] = -INFINITY;
                        c.w[GAPS * V + j] = probs ? 0 : -INFINITY;
                    }
                    c.masked = true;
                    c.mask[MASKED] = 0;
                    assert_ok(distill_case_run(&c));
                    for (int r = 0; r < worlds[w]; r++)
                        for (int k = 0; k < 2; k++) {
                            for (int t = Z_NAN; t <= W_MINUS; t++)
                                assert_true(isnan(c.out[r][k][t]));
                            assert_true(c.out[r][k][MASKED] == 0);
                            assert_true(isfinite(c.out[r][k][GAPS]));
                            assert_true(isfinite(c.out[r][k][PLAIN]));
                        }
                    for (int j = 0; j < V; j++) {
                        for (int t = Z_NAN; t <= W_MINUS; t++)
                            assert_true(isnan(c.dz[t * V + j]));
                        assert_true(c.dz[MASKED * V + j] == 0);
                        assert_true(isfinite(c.dz[GAPS * V + j]));
                        assert_true(isfinite(c.dz[PLAIN * V + j]));
                    }
                    /* the row without its columns 4..7, serially */
                    double z[V], q[V], ce[2] = {c.out[0][0][GAPS], c.out[0][1][GAPS]};
                    ref_distill_row_t row;
                    ref_distill_opts_t o = distill_case_opts(&c);
                    int n = 0;
                    for (int j = 0; j < V; j++)
                        if (j < 4 || j > 7) {
                            z[n] = c.z[GAPS * V + j];
                            q[n++] = c.w[GAPS * V + j];
                        }
                    ref_distill(&o, z, q, n, &row);
                    assert_true(fabs(ce[0] - row.ce) < 1e-5 && fabs(ce[1] - row.kl) < 1e-5);
                }
}

T_CASE(a_target_where_the_student_has_none_is_infinite)
{
    uint64_t rng = t_seed() + 6;
    enum { V = 16 };
    for (int w = 0; w < 4; w++)
        for (int probs = 0; probs < 2; probs++) {
            distill_case_init(&c, worlds[w], 1, V, probs, COLO_F32, COLO_F32, 2, &rng);
            for (int j = 2; j < 6; j++)
                c.z[j] = -INFINITY;
            c.w[4] = 0.25; /* as a logit or a probability: some mass is there */
            assert_ok(distill_case_run(&c));
            assert_true(c.out[0][0][0] == INFINITY && c.out[0][1][0] == INFINITY);
            for (int j = 0; j < V; j++)
                assert_true(isfinite(c.dz[j]));
            assert_true(c.dz[4] != 0);
        }
}

T_CASE(no_tokens_still_join_the_gather)
{
    uint64_t rng = t_seed() + 7;
    for (int w = 0; w < 4; w++) {
        distill_case_init(&c, worlds[w], 0, 10, false, COLO_F32, COLO_F32, 2, &rng);
        assert_ok(distill_case_run(&c));
        distill_case_compare(&c, "no tokens");
    }
}

/* ---- gradient ---- */

static colo_status_t run(void)
{
    return distill_case_run(&c);
}

static double weighted(int64_t t)
{
    return c.up[c.no_ce][t] * c.out[0][c.no_ce][t];
}

T_CASE(the_gradient_is_the_central_difference)
{
    uint64_t rng = t_seed() + 8;
    for (int probs = 0; probs < 2; probs++)
        for (int which = 0; which < 2; which++) {
            distill_case_init(&c, 2, 3, 12, probs, COLO_F64, COLO_F64, 2, &rng);
            loss_case_shard(&c.shape, SHARD_UNEVEN);
            c.config.logits.softcap = 3;
            c.config.logits.temperature = 0.7;
            c.no_ce = which;
            c.no_kl = !which;
            gather_central(&c.shape, c.z, c.dz, run, weighted);
        }
}

/* ---- refusals ---- */

enum { AT = 3, AV = 6 };

typedef struct alone {
    colo_distill_config_t cfg;
    float z[AT * AV], w[AT * AV], dz[AT * AV], ce[AT], kl[AT], up[AT];
    uint8_t mask[AT];
    _Alignas(COLO_ALIGNMENT) double stats[AT * 5];
    _Alignas(COLO_ALIGNMENT) unsigned char workspace[512];
    uint64_t version, targets_version;
    colo_tensor_t logits, targets, masked, d_logits;
    colo_distill_out_t out;
    colo_distill_saved_t saved;
    colo_distill_upstream_t upstream;
    struct {
        colo_comm_t *group;
        const colo_distill_out_t *out;
        colo_distill_saved_t *saved;
        void *stats, *workspace;
    } arg;
} alone_t;

static void alone_init(alone_t *a)
{
    uint64_t rng = 5;
    memset(a, CANARY, sizeof *a);
    a->cfg = (colo_distill_config_t){COLO_DISTILL_CONFIG_INIT, .logits.vocab = AV};
    for (int i = 0; i < AT * AV; i++) {
        a->z[i] = (float)t_uniform(&rng);
        a->w[i] = (float)t_uniform(&rng);
    }
    for (int t = 0; t < AT; t++)
        a->up[t] = 1;
    a->version = a->targets_version = 1;
    a->logits = colo_tensor_host(a->z, COLO_F32, 2, (int64_t[]){AT, AV});
    a->targets = colo_tensor_host(a->w, COLO_F32, 2, (int64_t[]){AT, AV});
    a->logits.version = &a->version;
    a->targets.version = &a->targets_version;
    a->masked = colo_tensor_host(a->mask, COLO_U8, 1, (int64_t[]){AT});
    a->d_logits = colo_tensor_host(a->dz, COLO_F32, 2, (int64_t[]){AT, AV});
    a->out = (colo_distill_out_t){.ce = a->ce, .kl = a->kl};
    a->saved = (colo_distill_saved_t){.valid = false};
    a->upstream = (colo_distill_upstream_t){.d_ce = a->up};
    a->arg.group = t_self();
    a->arg.out = &a->out;
    a->arg.saved = &a->saved;
    a->arg.stats = a->stats;
    a->arg.workspace = a->workspace;
}

static colo_status_t forward(alone_t *a)
{
    return colo_distill_forward(
        &a->cfg,
        &(colo_distill_batch_t){.logits = &a->logits, .targets = &a->targets, .mask = &a->masked},
        a->arg.group, a->arg.out, a->arg.saved, a->arg.stats, a->arg.workspace, NULL);
}

static colo_status_t backward(alone_t *a)
{
    return colo_distill_backward(&a->saved, &a->upstream, &a->d_logits, NULL);
}

static bool wrote_nothing(const alone_t *a)
{
    return painted(a->ce, sizeof a->ce) && painted(a->kl, sizeof a->kl) &&
           painted(a->stats, sizeof a->stats) && !a->saved.valid;
}

#define REJECT(change, status, error_message)                                       \
    do {                                                                            \
        alone_t a;                                                                  \
        alone_init(&a);                                                             \
        change;                                                                     \
        assert_fails(forward(&a), status, error_message);                           \
        assert_true(wrote_nothing(&a) && painted(a.workspace, sizeof a.workspace)); \
    } while (0)

T_CASE(bad_arguments_are_refused_and_nothing_is_written)
{
    const double inf = INFINITY;
    size_t n = 77;
    alone_t b;
    REJECT(a.cfg.struct_size = 3, COLO_ERR_ARG, "struct_size is 3");
    REJECT(a.cfg.logits.temperature = 0, COLO_ERR_ARG, "distill: logprob: temperature is 0");
    REJECT(a.cfg.targets = 2, COLO_ERR_ARG, "targets is 2, expected logits (0) or probs (1)");
    REJECT(a.cfg.target_temperature = 0, COLO_ERR_ARG, "target_temperature is 0");
    REJECT(a.cfg.target_temperature = NAN, COLO_ERR_ARG, "target_temperature is ");
    REJECT(a.cfg.target_scale = inf, COLO_ERR_ARG, "target_scale / target_temperature = inf");
    REJECT(a.targets.dtype = COLO_BF16, COLO_ERR_ARG, "targets: dtype bf16, expected f32 or");
    REJECT(a.targets.shape[0] = 2, COLO_ERR_SHAPE, "targets: [2, 6], expected [3, 6]");
    REJECT((a.targets.shape[1] = 5, a.targets.stride[0] = 6), COLO_ERR_SHAPE, "targets: [3, 5]");
    REJECT(a.targets.stride[1] = 2, COLO_ERR_SHAPE, "targets: columns are 2 elements apart");
    REJECT(a.targets.mem = COLO_CUDA, COLO_ERR_ARG, "targets: memory kind 1");
    REJECT(a.targets.data = NULL, COLO_ERR_ARG, "targets: data is NULL");
    REJECT(a.masked.dtype = COLO_I8, COLO_ERR_ARG, "mask: dtype i8, expected u8");
    REJECT(a.logits.dtype = COLO_I8, COLO_ERR_ARG, "logits: dtype i8");
    REJECT(a.cfg.logits.vocab_start = 1, COLO_ERR_SHAPE, "columns [1, 7) on a group of one rank");
    REJECT(a.arg.group = NULL, COLO_ERR_ARG, "group is NULL");
    REJECT(a.arg.out = NULL, COLO_ERR_ARG, "out is NULL");
    REJECT(a.arg.stats = NULL, COLO_ERR_ARG, "saved memory is NULL; it needs 256 bytes");
    REJECT((a.arg.saved = NULL, a.arg.stats = NULL, a.arg.workspace = NULL), COLO_ERR_ARG,
           "workspace is NULL");
    alone_init(&b);
    assert_fails(colo_distill_saved_size(&b.cfg, -1, &n), COLO_ERR_ARG, "tokens is -1");
    assert_fails(colo_distill_workspace_size(&b.cfg, COLO_F32, INT64_MAX / 64, 8, &n), COLO_ERR_ARG,
                 "exceeds 2^63");
    assert_int_equal(n, 77);
}

T_CASE(no_buffer_grows_with_the_vocabulary)
{
    static const int64_t vocabs[] = {1000, 151936, 1 << 20};
    for (int i = 0; i < 3; i++) {
        const colo_distill_config_t cfg = {COLO_DISTILL_CONFIG_INIT, .logits.vocab = vocabs[i]};
        size_t stats, workspace;
        assert_ok(colo_distill_saved_size(&cfg, 65536, &stats));
        assert_ok(colo_distill_workspace_size(&cfg, COLO_BF16, 65536, 8, &workspace));
        assert_int_equal(stats, t_rounded(65536 * 40));
        assert_int_equal(workspace, t_rounded(8 * (64 + 65536 * 24)));
    }
}

T_CASE(bad_backwards_are_refused_and_in_place_ends_the_state)
{
    alone_t a;
    alone_init(&a);
    assert_fails(backward(&a), COLO_ERR_STATE, "no forward filled it");
    assert_ok(forward(&a));
    a.version = 2;
    assert_fails(backward(&a), COLO_ERR_MODIFIED, "logits were written after they were saved");
    a.version = 1;
    a.targets_version = 5;
    assert_fails(backward(&a), COLO_ERR_MODIFIED,
                 "targets were written after they were saved: version 5, saved at 1");
    a.targets_version = 1;
    a.d_logits.data = a.w;
    assert_fails(backward(&a), COLO_ERR_ARG, "d_logits: overlaps the targets (+0 bytes)");
    a.d_logits.data = a.z + 1;
    assert_fails(backward(&a), COLO_ERR_ARG, "overlaps the logits without being them");
    assert_fails(colo_distill_backward(&a.saved, NULL, &a.d_logits, NULL), COLO_ERR_ARG,
                 "upstream is NULL");
    a.d_logits.data = a.z;
    assert_ok(backward(&a));
    assert_fails(backward(&a), COLO_ERR_STATE, "in place ended it");
}

/* Each rank has half of 8 columns. */
static colo_status_t disagree(colo_comm_t *world, void *arg)
{
    disagreement_t *d = arg;
    const int r = colo_comm_rank(world), kind = r == 1 ? d->kind : -1;
    alone_t a;
    alone_init(&a);
    memset(a.mask, 1, sizeof a.mask);
    a.cfg.logits.vocab = 8;
    a.cfg.logits.vocab_start = kind == 3 ? 3 : 4 * r;
    a.cfg.target_temperature = kind == 0 ? 2 : 1;
    a.cfg.targets = kind == 1 ? COLO_DISTILL_PROBS : a.cfg.targets;
    a.logits = colo_tensor_host(a.z, COLO_F32, 2, (int64_t[]){AT, 4});
    a.targets = colo_tensor_host(a.w, COLO_F32, 2, (int64_t[]){AT, 4});
    a.mask[0] = kind != 2;
    a.arg.group = world;
    disagreement_note(d, r, forward(&a));
    rank_check(wrote_nothing(&a));
    return colo_comm_barrier(world, NULL); /* the group lives on */
}

T_CASE(ranks_that_disagree_get_the_same_error_message_and_live_on)
{
    static const char *const words[] = {"rank 1 has another config", "rank 1 has another config",
                                        "rank 1 has other targets", "no rank of 2 holds column 7"};
    for (int kind = 0; kind < 4; kind++) {
        disagreement_t d = {.kind = kind};
        assert_ok(t_run_ranks(2, disagree, &d, sizeof d));
        disagreement_check(&d, words[kind]);
    }
}

T_MAIN_IF(where.need(), "loss/distill")
