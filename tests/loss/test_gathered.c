/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gathered.c - ranks that all bring the logits of the whole vocabulary: refused on every rank,
 * for the loss would be off by the logarithm of their number. Shards that are equal by chance are
 * no such logits.
 */
#include "loss/distill_case.h"
#include "loss/topk_case.h"

enum { T = GATHER_TOKENS, EACH = 16 };

static uint64_t rng;

/* Every rank has the columns of the first one. */
static void repeat(double *z, int64_t tokens, int64_t vocab, int32_t ranks)
{
    const int64_t each = vocab / ranks;
    for (int64_t i = 0; i < tokens * vocab; i++)
        z[i] = z[i / vocab * vocab + i % vocab % each];
}

static loss_case_t gathered(int32_t ranks, colo_dtype_t dtype)
{
    loss_case_t c;
    loss_case_init(&c, ranks, T, EACH * ranks, dtype, 3, &rng);
    repeat(c.z, T, c.vocab, ranks);
    for (int64_t t = 0; t < T; t++)
        c.targets[t] = t_below(&rng, EACH);
    c.config.want_entropy = c.config.want_loss = true;
    return c;
}

static void is_refused(colo_status_t st, const char *name, int32_t ranks)
{
    assert_fails(st, COLO_ERR_MISMATCH,
                 t_text("%s: these are the same logits on %d ranks; pass tp_group=None (in C a "
                        "group of one rank), or each rank's columns",
                        name, (int)ranks));
}

/* Also where no token but one counts, where a target is none, and per segment. */
T_CASE(the_same_logits_on_all_ranks_are_refused)
{
    rng = t_seed();
    for (int i = 0; i < 40; i++) {
        T_ENDS(loss_case_free) loss_case_t c = gathered(i % 2 ? 2 : 4, loss_dtypes[i / 2 % 4]);
        c.forward_only = i % 3 == 0;
        for (int64_t t = 0; t + 1 < T && i / 8 == 1; t++)
            c.targets[t] = c.config.ignore_index;
        if (i / 8 == 2)
            c.targets[0] = -1;
        c.config.lenient_targets = i / 8 == 2;
        c.config.segment = i / 8 == 3 ? EACH : 0;
        c.config.logits.softcap = i / 8 == 4 ? 5 : 0;
        is_refused(loss_case_run(&c), "logprob", c.ranks);
    }
}

/* Made with one seed, but with a target of the last rank; alike but for one logit; all alike. */
T_CASE(equal_shards_of_a_vocabulary_are_taken)
{
    rng = t_seed() + 1;
    for (int i = 0; i < 32; i++) {
        T_ENDS(loss_case_free) loss_case_t c = gathered(i % 2 ? 2 : 4, loss_dtypes[i / 2 % 4]);
        if (i / 8 == 0)
            c.targets[T - 1] = c.vocab - 1;
        if (i / 8 == 1) { /* but not the largest */
            double *last = &c.z[T * c.vocab - 1];
            last -= *last > last[-1];
            *last = loss_round(c.dtype, *last - 1);
        }
        for (int64_t k = 0; k < T * c.vocab && i / 8 >= 2; k++)
            c.z[k] = i / 8 == 3 && k % EACH == 5 ? -INFINITY : 0.5 - 300 * (i % 4 > 1);
        if (i / 8 >= 2) /* the maximum is rounded then, and sums of e^(x - m) are no integers */
            c.config.logits.temperature = 0.7;
        for (int64_t t = 0; t < T && i / 8 == 3; t++)
            c.targets[t] = 0;
        c.config.want_loss = i / 8 != 3; /* no smoothing, where the oracle would have infinities */
        c.config.want_entropy = i / 8 != 3;
        c.forward_only = i / 8 == 3;
        assert_ok(loss_case_run(&c));
        if (i / 8 != 3)
            loss_case_compare(&c, t_text("case %d", i));
    }
}

/* As vocab_start=0 and vocab_end=V on every rank say it. */
T_CASE(the_whole_vocabulary_on_each_rank_is_refused)
{
    rng = t_seed() + 2;
    T_ENDS(loss_case_free) loss_case_t c;
    loss_case_init(&c, 2, T, EACH, COLO_F32, 3, &rng);
    c.start[1] = 0;
    c.columns[0] = c.columns[1] = EACH;
    c.forward_only = true;
    assert_fails(loss_case_run(&c), COLO_ERR_MISMATCH,
                 "logprob: each of 2 ranks holds all 16 columns; pass tp_group=None");
}

static topk_case_t topk;
static distill_case_t distill;

static colo_status_t run_topk(bool search, bool behind)
{
    topk_case_init(&topk, 2, T, 2 * EACH, 3, search, COLO_F32, 3, &rng);
    repeat(topk.z, T, 2 * EACH, 2);
    for (int i = 0; i < T * 3; i++)
        topk.ids[i] %= EACH;
    for (int i = 0; i < 3 && behind; i++)
        topk.ids[i] += EACH;
    return gather_run(&topk, sizeof topk);
}

T_CASE(the_same_logits_are_refused_by_top_k_and_distill_too)
{
    rng = t_seed() + 3;
    is_refused(run_topk(true, false), "topk", 2);
    is_refused(run_topk(false, false), "topk", 2);
    assert_ok(run_topk(false, true));
    topk_case_compare(&topk, "ids behind the first rank's");
    for (int probs = 0; probs < 2; probs++) {
        distill_case_init(&distill, 2, T, 2 * EACH, probs, COLO_F32, COLO_F32, 3, &rng);
        repeat(distill.z, T, 2 * EACH, 2);
        repeat(distill.w, T, 2 * EACH, 2);
        is_refused(gather_run(&distill, sizeof distill), "distill", 2);
    }
}

typedef struct sampling_case {
    loss_case_t shape;
    double z[T * 2 * EACH];
} sampling_case_t;

static colo_status_t keep(void *arg, gather_rank_t *m)
{
    sampling_case_t *c = arg;
    colo_sampling_config_t cfg = {COLO_SAMPLING_CONFIG_INIT, .logits.vocab = 2 * EACH, .top_k = 5};
    size_t bytes;
    cfg.logits.vocab_start = c->shape.start[m->rank];
    rank_try(colo_sampling_workspace_size(&cfg, c->shape.dtype, T, 2, &bytes));
    const colo_tensor_t z = gather_put_shard(m, c->shape.dtype, c->z);
    return colo_sampling_keep(&cfg, &z, &z, m->group, gather_put(m, NULL, bytes), where_stream());
}

/* Only the largest logits travel: one that differs in one row is enough. */
T_CASE(the_same_logits_are_refused_where_ids_are_kept)
{
    sampling_case_t c;
    rng = t_seed() + 4;
    for (int same = 0; same < 2; same++) {
        gather_shape(&c.shape, 2, T, 2 * EACH, COLO_BF16, keep);
        for (int i = 0; i < T * 2 * EACH; i++)
            c.z[i] = loss_round(COLO_BF16, 3 * loss_normal(&rng));
        repeat(c.z, T, 2 * EACH, 2);
        if (!same)
            c.z[T * 2 * EACH - 1] = 99;
        const colo_status_t st = gather_run(&c, sizeof c);
        if (same)
            is_refused(st, "sampling", 2);
        else
            assert_ok(st);
    }
}

T_MAIN_IF(where.need(), "loss/gathered")
