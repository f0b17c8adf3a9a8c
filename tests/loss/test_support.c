/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_support.c - logp, entropy, loss and gradients over lists of ids per token, against the fp64
 * oracle on W ranks: dtypes, cuts of the vocabulary, lists from none to all ids, repeated ids.
 * Columns outside of a list are NaN: one that is read is seen.
 *
 * Tolerances: those of loss_case.c with the list for a vocabulary; on a GPU where.slack times that.
 */
#include "loss/gather_case.h"
#include "ref/ref_support.h"

enum { T = 9, V = 70, LONG = 2347, MOST = 16717, N = 2 * T * MOST }; /* MOST: tiles of a kernel */

typedef struct support_case {
    loss_case_t c; /* first: it is the shape */
    uint8_t in[T * MOST];
    int64_t ids[N], begin[T], end[T], count; /* lists lie in reverse, with a gap between them */
    bool odd_rank; /* the last rank has one id more in the list of token 0 */
} support_case_t;

/* Lists of about @percent of V; every third id occurs twice. */
static void make_lists(support_case_t *s, int percent, uint64_t *rng)
{
    s->count = 0;
    for (int64_t t = s->c.tokens - 1; t >= 0; t--) {
        s->begin[t] = s->count;
        for (int64_t j = 0; j < s->c.vocab; j++) {
            s->in[t * s->c.vocab + j] = t_below(rng, 100) < percent;
            for (int n = 0; s->in[t * s->c.vocab + j] && n <= (j % 3 == 0); n++)
                s->ids[s->count++] = j;
        }
        s->end[t] = s->count;
        s->ids[s->count++] = -1; /* of no list */
        for (int64_t j = 0; j < s->c.vocab; j++)
            if (!s->in[t * s->c.vocab + j] && j != s->c.targets[t])
                s->c.z[t * s->c.vocab + j] = NAN;
    }
}

static support_case_t *make_case(int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype,
                                 shard_kind_t kind, int percent, uint64_t *rng)
{
    support_case_t *s = calloc(1, sizeof *s);
    loss_case_init(&s->c, ranks, tokens, vocab, dtype, 3, rng);
    loss_case_shard(&s->c, kind);
    s->c.config.want_entropy = s->c.config.want_loss = s->c.config.want_correct = true;
    make_lists(s, percent, rng);
    return s;
}

static colo_tensor_t list_of(gather_rank_t *m, const int64_t *from, int64_t n)
{
    return where_tensor(gather_put(m, from, (size_t)n * 8), COLO_I64, 1, &n);
}

static colo_status_t run_with(void *arg, gather_rank_t *m)
{
    support_case_t *s = arg;
    loss_case_t *c = &s->c;
    const int32_t r = m->rank;
    const int64_t tokens = c->tokens;
    const size_t outs = (size_t)tokens * colo_dtype_size(m->stat);
    colo_logprob_config_t cfg = c->config;
    size_t stat_bytes, workspace_bytes;
    int64_t ends[T], counts[2];
    memcpy(ends, s->end, sizeof ends);
    ends[0] -= s->odd_rank && r == c->ranks - 1;
    cfg.logits.vocab_start = c->start[r];
    rank_try(colo_logprob_saved_size(&cfg, c->dtype, tokens, &stat_bytes));
    rank_try(colo_logprob_workspace_size(&cfg, c->dtype, tokens, c->ranks, &workspace_bytes));
    colo_tensor_t z = gather_put_shard(m, c->dtype, c->z);
    colo_tensor_t dz = c->in_place ? z : gather_put_shard(m, c->dtype, NULL);
    colo_tensor_t targets = list_of(m, c->targets, tokens), ids = list_of(m, s->ids, s->count),
                  begin = list_of(m, s->begin, tokens), end = list_of(m, ends, tokens);
    if (s->count == 0)
        ids.data = NULL;
    void *stats = gather_put(m, NULL, stat_bytes),
         *workspace = gather_put(m, NULL, workspace_bytes);
    colo_logprob_out_t out = {.logp = gather_put(m, NULL, outs),
                              .entropy = gather_put(m, NULL, outs),
                              .loss = gather_put(m, NULL, outs),
                              .correct = gather_put(m, NULL, (size_t)tokens),
                              .n_valid = gather_put(m, NULL, 16)};
    out.n_invalid = out.n_valid + 1;
    colo_logprob_saved_t saved = {.valid = false};
    colo_comm_stats_reset(m->group);
    rank_try(colo_logprob_forward(
        &cfg,
        &(colo_logprob_batch_t){
            .logits = &z, .targets = &targets, .support = &(colo_support_t){&ids, &begin, &end}},
        m->group, &out, &saved, stats, workspace, NULL));
    colo_comm_stats(m->group, &c->after_forward[r]);
    gather_get_stats(m, c->out[r][0], out.logp, tokens);
    gather_get_stats(m, c->out[r][1], out.entropy, tokens);
    gather_get_stats(m, c->out[r][2], out.loss, tokens);
    where.get(counts, out.n_valid, 16);
    where.get(c->correct[r], out.correct, (size_t)tokens);
    c->n_valid[r] = counts[0];
    c->n_invalid[r] = counts[1];
    gather_drop(m, workspace); /* free after the call */
    const colo_logprob_upstream_t up = {.d_logp = gather_put_stats(m, c->up[0], tokens),
                                        .d_entropy = gather_put_stats(m, c->up[1], tokens),
                                        .d_loss = gather_put_stats(m, c->up[2], tokens)};
    for (int again = 0; again < (c->in_place ? 1 : 2); again++)
        rank_try(colo_logprob_backward(&saved, &up, &dz, NULL));
    colo_comm_stats(m->group, &c->after_backward[r]);
    gather_get_shard(m, c->dz, dz.data);
    return COLO_OK;
}

static colo_status_t on_rank(colo_comm_t *world, void *s)
{
    return gather_on_rank(world, s, run_with);
}

static colo_status_t run_case(support_case_t *s)
{
    loss_case_t *c = &s->c;
    t_share(c->dz, (size_t)(c->tokens * c->vocab) * sizeof *c->dz);
    for (int r = 0; r < c->ranks; r++) {
        for (int k = 0; k < 3; k++)
            t_share(c->out[r][k], (size_t)c->tokens * sizeof(double));
        t_share(c->correct[r], (size_t)c->tokens);
    }
    colo_status_t st = t_run_ranks(c->ranks, on_rank, s, sizeof *s);
    t_unshare(c->dz);
    for (int r = 0; r < c->ranks; r++) {
        for (int k = 0; k < 3; k++)
            t_unshare(c->out[r][k]);
        t_unshare(c->correct[r]);
    }
    return st;
}

static void compare_row(const support_case_t *s, const char *label, int64_t t)
{
    static const char *const names[3] = {"logp", "entropy", "loss"};
    const loss_case_t *c = &s->c;
    const ref_logprob_opts_t o = loss_case_opts(c);
    const double *z = c->z + t * c->vocab, lambda = o.z_loss, f = fabs(o.scale / o.temperature);
    const uint8_t *in = s->in + t * c->vocab;
    ref_logprob_row_t ref;
    double dz[MOST], g[3];
    ref_support(&o, z, c->vocab, in, c->targets[t], &ref);
    const double want[3] = {ref.logp, ref.entropy, ref.loss}, lse = fabs(ref.lse);
    double u = where.slack * 0x1p-24, d = 1 + log((double)c->vocab) + ref.range;
    if (c->dtype == COLO_F64) {
        u = where.slack * ((double)c->vocab + 16) * 0x1p-53;
        d += 4 * ref.top;
    }
    for (int r = 0; r < c->ranks; r++) {
        for (int k = 0; k < 3; k++) {
            const double tol = 4 * u * d + u * fabs(want[k]) + 4 * u * lambda * lse * (lse + d);
            if (!near(c->out[r][k][t], want[k], tol))
                fail_msg("%s: rank %d of %d, token %d: %s is %.17g, expected %.17g within %g",
                         label, r, c->ranks, (int)t, names[k], c->out[r][k][t], want[k], tol);
            if (memcmp(&c->out[r][k][t], &c->out[0][k][t], sizeof(double)))
                fail_msg("%s: ranks 0 and %d differ in %s of token %d", label, r, names[k], (int)t);
        }
        if (c->correct[r][t] != ref.correct)
            fail_msg("%s: rank %d, token %d: correct is %d", label, r, (int)t, c->correct[r][t]);
    }
    for (int k = 0; k < 3; k++)
        g[k] = c->up[k][t];
    ref_support_grad(&o, z, c->vocab, in, c->targets[t], g[0], g[1], g[2], dz);
    const double size = fabs(g[0]) + fabs(g[2]) * (1 + 2 * lambda * lse) + fabs(g[1]) * d;
    for (int64_t j = 0; j < c->vocab; j++) {
        double tol = 4 * u * size * d * f;
        tol += c->dtype == COLO_F32    ? u * fabs(dz[j])
               : c->dtype == COLO_BF16 ? 0x1p-8 * fabs(dz[j])
               : c->dtype == COLO_F16  ? 0x1p-11 * fabs(dz[j]) + 0x1p-25
                                       : 0;
        if (!in[j] && j != c->targets[t])
            tol = 0;
        if (!near(c->dz[t * c->vocab + j], dz[j], tol))
            fail_msg("%s: token %d, column %d: gradient is %.17g, expected %.17g within %g", label,
                     (int)t, (int)j, c->dz[t * c->vocab + j], dz[j], tol);
    }
}

static void run_and_compare(support_case_t *s, const char *label)
{
    assert_ok(run_case(s));
    int64_t valid = 0;
    for (int64_t t = 0; t < s->c.tokens; t++) {
        valid += s->c.targets[t] != s->c.config.ignore_index;
        compare_row(s, label, t);
    }
    for (int r = 0; r < s->c.ranks; r++)
        if (s->c.n_valid[r] != valid || s->c.n_invalid[r] != 0)
            fail_msg("%s: rank %d counts %d tokens and %d invalid ones, expected %d and none",
                     label, r, (int)s->c.n_valid[r], (int)s->c.n_invalid[r], (int)valid);
    gather_check(&s->c, label);
    loss_case_free(&s->c);
    free(s);
}

static const colo_dtype_t dtypes[] = {COLO_F32, COLO_F64, COLO_BF16, COLO_F16};

T_CASE(lists_of_any_length_agree_with_the_oracle)
{
    static const int32_t worlds[] = {1, 2, 3, 8};
    static const int percents[] = {0, 3, 40, 100};
    uint64_t rng = t_seed();
    for (int i = 0; i < 256; i++) {
        char label[96];
        const int64_t vocab = (const int64_t[]){V, 5, i % 4 ? LONG : MOST, 6}[i / 64];
        if (T_LEFT_OUT({i / 64, 4}, {i / 16 % 4, 4}, {i / 4 % 4, 4}, {i % 4, 4}))
            continue;
        support_case_t *s = make_case(worlds[i % 4], 5, vocab, dtypes[i / 4 % 4], i / 16 % 4,
                                      percents[(i + i / 4 + i / 16) % 4], &rng);
        s->c.config.logits.softcap = i % 3 == 0 ? 5 : 0;
        s->c.config.logits.temperature = i % 2 ? 0.7 : 1;
        s->c.config.z_loss = i % 5 == 0 ? 1e-2 : 0;
        s->c.config.chunk_size = i % 7 == 0 ? 2 : 0;
        s->c.in_place = i % 3 == 1;
        snprintf(label, sizeof label, "case %d: W %d, V %d, %s, shards %d", i, (int)s->c.ranks,
                 (int)vocab, colo_dtype_name(s->c.dtype), i / 16 % 4);
        run_and_compare(s, label);
    }
}

T_CASE(a_list_without_the_target_has_it_all_the_same)
{
    uint64_t rng = t_seed() + 1;
    for (int32_t ranks = 1; ranks <= 3; ranks++) {
        support_case_t *s = make_case(ranks, T, V, COLO_F64, SHARD_EVEN, 0, &rng);
        assert_ok(run_case(s));
        for (int64_t t = 0; t < T; t++)
            for (int r = 0; r < ranks; r++)
                if (s->c.out[r][0][t] != 0 || s->c.out[r][1][t] != 0)
                    fail_msg("the only id of a list has logp %g, entropy %g", s->c.out[r][0][t],
                             s->c.out[r][1][t]);
        loss_case_free(&s->c);
        free(s);
    }
}

/* Of equal logits the first one is the largest, in a list or not. */
T_CASE(a_target_outside_its_list_is_correct_if_it_precedes_its_equal)
{
    uint64_t rng = t_seed() + 6;
    for (int i = 0; i < 4; i++) {
        support_case_t *s = make_case(1 + i % 2, T, V, dtypes[i], SHARD_EVEN, 0, &rng);
        for (int64_t t = 0; t < T; t++) {
            const int64_t target = 3 * t + 1, other = target + (t % 2 ? -1 : 1);
            s->c.targets[t] = target;
            s->ids[s->begin[t]] = other;
            s->end[t] = s->begin[t] + 1;
            s->in[t * V + other] = 1;
            s->c.z[t * V + target] = s->c.z[t * V + other] = 0.5;
        }
        run_and_compare(s, "equal logits");
    }
}

T_CASE(lists_that_are_all_empty_need_no_memory)
{
    uint64_t rng = t_seed() + 5;
    for (int i = 0; i < 4; i++) {
        support_case_t *s = make_case(1 + i, T, V, dtypes[i], SHARD_EVEN, 0, &rng);
        s->count = 0;
        memset(s->begin, 0, sizeof s->begin);
        memset(s->end, 0, sizeof s->end);
        run_and_compare(s, "no ids");
    }
}

T_CASE(ignored_tokens_and_their_lists_are_not_read)
{
    uint64_t rng = t_seed() + 2;
    for (int i = 0; i < 4; i++) {
        support_case_t *s = make_case(1 + i, T, V, dtypes[i], SHARD_UNEVEN, 20, &rng);
        for (int64_t t = i % 2; t < T; t += 2) {
            s->c.targets[t] = -100;
            s->begin[t] = -7; /* no range of ids */
            s->end[t] = N + 9;
        }
        run_and_compare(s, "ignored");
    }
}

T_CASE(special_values_of_a_list_and_no_others_count)
{
    uint64_t rng = t_seed() + 3;
    support_case_t *s = make_case(2, 4, V, COLO_F32, SHARD_EVEN, 30, &rng);
    for (int64_t t = 0; t < 4; t++)
        for (int64_t j = 0; j < V; j++) /* -inf, +inf, NaN in the list; nothing but -inf */
            if (t == 3 && (s->in[t * V + j] || j == s->c.targets[t]))
                s->c.z[t * V + j] = -INFINITY;
    for (int64_t t = 0; t < 3; t++) {
        int64_t j = s->ids[s->begin[t]];
        s->c.targets[t] = s->ids[s->end[t] - 1];
        s->in[t * V + s->c.targets[t]] = 1;
        s->c.z[t * V + j] = t == 0 ? -INFINITY : t == 1 ? INFINITY : NAN;
    }
    assert_ok(run_case(s));
    const double *logp = s->c.out[0][0], *dz = s->c.dz;
    if (!isfinite(logp[0]) || !isnan(logp[1]) || !isnan(logp[2]) || !isnan(logp[3]))
        fail_msg("logp of rows with -inf, +inf, NaN, all -inf: %g %g %g %g", logp[0], logp[1],
                 logp[2], logp[3]);
    for (int64_t j = 0; j < V; j++)
        if (!isfinite(dz[j]) || !isnan(dz[V + j]) || !isnan(dz[2 * V + j]) || !isnan(dz[3 * V + j]))
            fail_msg("column %d: gradients %g %g %g %g", (int)j, dz[j], dz[V + j], dz[2 * V + j],
                     dz[3 * V + j]);
    loss_case_free(&s->c);
    free(s);
}

/* On a GPU lists are not looked at by the host: token @nan is NaN then. */
static void refuses(support_case_t *s, const char *words, colo_status_t status, int nan)
{
    if (where.mem == COLO_HOST || (nan < 0 && s->c.ranks == 1)) {
        assert_fails(run_case(s), status, words);
    } else if (nan >= 0) {
        assert_ok(run_case(s));
        for (int64_t t = 0; t < s->c.tokens; t++)
            if (isnan(s->c.out[0][0][t]) != (t == nan) || isnan(s->c.dz[t * V]) != (t == nan))
                fail_msg("token %d: logp %g, gradient %g", (int)t, s->c.out[0][0][t],
                         s->c.dz[t * V]);
    }
    loss_case_free(&s->c);
    free(s);
}

T_CASE(lists_that_are_none_are_refused)
{
    uint64_t rng = t_seed() + 4;
    support_case_t *s[5];
    for (int i = 0; i < 5; i++) {
        s[i] = make_case(i == 4 ? 3 : 1, 4, V, COLO_F32, SHARD_EVEN, 40, &rng);
        s[i]->c.config.want_loss = true;
    }
    s[0]->ids[s[0]->begin[2] + 1] = V;
    refuses(s[0], "support: token 2 has id 70, expected one of [0, 70)", COLO_ERR_ARG, 2);
    s[1]->ids[s[1]->begin[2]] = V - 1;
    refuses(s[1], "support: token 2 has id", COLO_ERR_ARG, 2);
    s[2]->end[1] = s[2]->count + 1;
    refuses(s[2], "support: token 1 has ids [", COLO_ERR_ARG, 1);
    s[3]->c.config.label_smoothing = 0.1;
    refuses(s[3], "support: label_smoothing is 0.1, expected 0", COLO_ERR_ARG, -1);
    s[4]->odd_rank = true;
    refuses(s[4], "has other targets", COLO_ERR_MISMATCH, -1);
}

T_MAIN_IF(where.need(), "loss/support")
