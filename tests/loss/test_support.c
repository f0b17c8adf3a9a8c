/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_support.c - logp, entropy, loss and gradients over lists of ids per token, against the fp64
 * oracle on W ranks: dtypes, cuts of the vocabulary, lists from none to all ids, repeated ids.
 * Columns outside of a list are NaN: one that is read is seen.
 *
 * Tolerances: those of loss_case.c with the list for a vocabulary; on a GPU where.slack times that.
 */
#include "loss/gather_case.h"

enum { T = 9, V = 70, LONG = 2347, MOST = 16717 }; /* MOST: tiles of a kernel */

/* Lists of about @percent of V, in reverse, with a gap between them; every third id occurs twice.
 */
static void make_lists(loss_case_t *c, int percent, uint64_t *rng)
{
    const int64_t v = c->vocab;
    for (int64_t t = c->tokens - 1; t >= 0; t--) {
        c->begin[t] = c->count;
        for (int64_t j = 0; j < v; j++) {
            c->in[t * v + j] = t_below(rng, 100) < percent;
            for (int n = 0; c->in[t * v + j] && n <= (j % 3 == 0); n++)
                c->ids[c->count++] = j;
        }
        c->end[t] = c->count;
        c->ids[c->count++] = -1; /* of no list */
        for (int64_t j = 0; j < v; j++)
            if (!c->in[t * v + j] && j != c->targets[t])
                c->z[t * v + j] = NAN;
    }
}

static loss_case_t make_case(int32_t ranks, int64_t tokens, int64_t vocab, colo_dtype_t dtype,
                             shard_kind_t kind, int percent, uint64_t *rng)
{
    loss_case_t c;
    const size_t t = (size_t)tokens, most = t * (2 * (size_t)vocab + 1);
    loss_case_init(&c, ranks, tokens, vocab, dtype, 3, rng);
    loss_case_shard(&c, kind);
    c.config.want_entropy = c.config.want_loss = c.config.want_correct = true;
    c.config.want_argmax = c.config.want_lse = c.config.want_sum_p2 = true;
    c.config.has_temperature = tokens % 2;
    c.in = calloc(t, (size_t)vocab);
    c.ids = calloc(most, sizeof *c.ids);
    c.begin = calloc(t, sizeof *c.begin);
    c.end = calloc(t, sizeof *c.end);
    make_lists(&c, percent, rng);
    return c;
}

static void run_and_compare(loss_case_t *c, const char *label)
{
    assert_ok(loss_case_run(c));
    loss_case_compare(c, label);
    gather_check(c, label);
    loss_case_free(c);
}

T_CASE(lists_of_any_length_agree_with_the_oracle)
{
    static const int32_t worlds[] = {1, 2, 3, 8};
    static const int percents[] = {0, 3, 40, 100};
    uint64_t rng = t_seed();
    for (int i = 0; i < 256; i++) {
        const int64_t vocab = (const int64_t[]){V, 5, i % 4 ? LONG : MOST, 6}[i / 64];
        if (T_LEFT_OUT({i / 64, 4}, {i / 16 % 4, 4}, {i / 4 % 4, 4}, {i % 4, 4}))
            continue;
        loss_case_t c = make_case(worlds[i % 4], 5, vocab, loss_dtypes[i / 4 % 4], i / 16 % 4,
                                  percents[(i + i / 4 + i / 16) % 4], &rng);
        c.config.logits.softcap = i % 3 == 0 ? 5 : 0;
        c.config.logits.temperature = i % 2 ? 0.7 : 1;
        c.config.z_loss = i % 5 == 0 ? 1e-2 : 0;
        c.config.chunk_size = i % 7 == 0 ? 2 : 0;
        c.in_place = i % 3 == 1;
        const char *label = t_text("case %d: W %d, V %d, %s, shards %d", i, (int)c.ranks,
                                   (int)vocab, colo_dtype_name(c.dtype), i / 16 % 4);
        run_and_compare(&c, label);
    }
}

T_CASE(a_list_without_the_target_has_it_all_the_same)
{
    uint64_t rng = t_seed() + 1;
    for (int32_t ranks = 1; ranks <= 3; ranks++) {
        T_ENDS(loss_case_free)
        loss_case_t c = make_case(ranks, T, V, COLO_F64, SHARD_EVEN, 0, &rng);
        assert_ok(loss_case_run(&c));
        for (int64_t t = 0; t < T; t++)
            for (int r = 0; r < ranks; r++)
                if (c.out[r][0][t] != 0 || c.out[r][1][t] != 0)
                    fail_msg("the only id of a list has logp %g, entropy %g", c.out[r][0][t],
                             c.out[r][1][t]);
    }
}

/* Of equal logits the first one is the largest, in a list or not. */
T_CASE(a_target_outside_its_list_is_correct_if_it_precedes_its_equal)
{
    uint64_t rng = t_seed() + 6;
    for (int i = 0; i < 4; i++) {
        loss_case_t c = make_case(1 + i % 2, T, V, loss_dtypes[i], SHARD_EVEN, 0, &rng);
        for (int64_t t = 0; t < T; t++) {
            const int64_t target = 3 * t + 1, other = target + (t % 2 ? -1 : 1);
            c.targets[t] = target;
            c.ids[c.begin[t]] = other;
            c.end[t] = c.begin[t] + 1;
            c.in[t * V + other] = 1;
            c.z[t * V + target] = c.z[t * V + other] = 0.5;
        }
        run_and_compare(&c, "equal logits");
    }
}

T_CASE(lists_that_are_all_empty_need_no_memory)
{
    uint64_t rng = t_seed() + 5;
    for (int i = 0; i < 4; i++) {
        loss_case_t c = make_case(1 + i, T, V, loss_dtypes[i], SHARD_EVEN, 0, &rng);
        c.count = 0;
        memset(c.begin, 0, T * sizeof *c.begin);
        memset(c.end, 0, T * sizeof *c.end);
        run_and_compare(&c, "no ids");
    }
}

T_CASE(ignored_tokens_and_their_lists_are_not_read)
{
    uint64_t rng = t_seed() + 2;
    for (int i = 0; i < 4; i++) {
        loss_case_t c = make_case(1 + i, T, V, loss_dtypes[i], SHARD_UNEVEN, 20, &rng);
        for (int64_t t = i % 2; t < T; t += 2) {
            c.targets[t] = -100;
            c.begin[t] = -7; /* no range of ids */
            c.end[t] = c.count + 9;
        }
        run_and_compare(&c, "ignored");
    }
}

T_CASE(special_values_of_a_list_and_no_others_count)
{
    uint64_t rng = t_seed() + 3;
    T_ENDS(loss_case_free) loss_case_t c = make_case(2, 4, V, COLO_F32, SHARD_EVEN, 30, &rng);
    for (int64_t t = 0; t < 4; t++)
        for (int64_t j = 0; j < V; j++) /* -inf, +inf, NaN in the list; nothing but -inf */
            if (t == 3 && (c.in[t * V + j] || j == c.targets[t]))
                c.z[t * V + j] = -INFINITY;
    for (int64_t t = 0; t < 3; t++) {
        int64_t j = c.ids[c.begin[t]];
        c.targets[t] = c.ids[c.end[t] - 1];
        c.in[t * V + c.targets[t]] = 1;
        c.z[t * V + j] = t == 0 ? -INFINITY : t == 1 ? INFINITY : NAN;
    }
    assert_ok(loss_case_run(&c));
    const double *logp = c.out[0][0], *dz = c.dz;
    if (!isfinite(logp[0]) || !isnan(logp[1]) || !isnan(logp[2]) || !isnan(logp[3]))
        fail_msg("logp of rows with -inf, +inf, NaN, all -inf: %g %g %g %g", logp[0], logp[1],
                 logp[2], logp[3]);
    for (int64_t j = 0; j < V; j++)
        if (!isfinite(dz[j]) || !isnan(dz[V + j]) || !isnan(dz[2 * V + j]) || !isnan(dz[3 * V + j]))
            fail_msg("column %d: gradients %g %g %g %g", (int)j, dz[j], dz[V + j], dz[2 * V + j],
                     dz[3 * V + j]);
}

/* On a GPU lists are not looked at by the host: token @nan is NaN then. */
static void refuses(loss_case_t *c, const char *words, colo_status_t status, int nan)
{
    if (where.mem == COLO_MEM_HOST || (nan < 0 && c->ranks == 1)) {
        assert_fails(loss_case_run(c), status, words);
    } else if (nan >= 0) {
        assert_ok(loss_case_run(c));
        for (int64_t t = 0; t < c->tokens; t++)
            if (isnan(c->out[0][0][t]) != (t == nan) || isnan(c->dz[t * V]) != (t == nan))
                fail_msg("token %d: logp %g, gradient %g", (int)t, c->out[0][0][t], c->dz[t * V]);
    }
    loss_case_free(c);
}

T_CASE(lists_that_are_none_are_refused)
{
    uint64_t rng = t_seed() + 4;
    loss_case_t c[6];
    for (int i = 0; i < 6; i++) {
        c[i] = make_case(i == 4 ? 3 : 1, 4, V, COLO_F32, SHARD_EVEN, 40, &rng);
        c[i].config.want_loss = true;
    }
    c[0].ids[c[0].begin[2] + 1] = V;
    refuses(&c[0], "support: token 2 has id 70, expected one of [0, 70)", COLO_ERR_ARG, 2);
    c[1].ids[c[1].begin[2]] = V - 1;
    refuses(&c[1], "support: token 2 has id", COLO_ERR_ARG, 2);
    c[2].end[1] = c[2].count + 1;
    refuses(&c[2], "support: token 1 has ids [", COLO_ERR_ARG, 1);
    c[3].config.label_smoothing = 0.1;
    refuses(&c[3], "support: label_smoothing is 0.1, expected 0", COLO_ERR_ARG, -1);
    c[5].config.want_mean_logits = true;
    refuses(&c[5], "support: want_mean_logits is true, expected false", COLO_ERR_ARG, -1);
    c[4].odd_rank = true;
    refuses(&c[4], "has other targets", COLO_ERR_MISMATCH, -1);
}

T_MAIN_IF(where.need(), "loss/support")
