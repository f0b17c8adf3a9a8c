/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_distill.c - divergence from the hidden states of two models against the fp64 oracle:
 * ways, worlds, shards, dtypes, chunks, options, sharded heads; counts of collectives; chunks
 * change no bit; what is refused, on all ranks.
 */
#include "loss/linear_distill_case.h"

#include "loss/linear/workspace.h"

#include <colobridge/linear_distill.h>

static const char *const ways[] = {"logprob", "early", "loss", "inference"};
static const int64_t HIDDEN[2] = {12, 7};

/* The @i-th of many: every way, kind, dtype and shard comes together with every other in some of
 * them. */
static void draw(linear_distill_case_t *c, int32_t ranks, int32_t replicas, int i, uint64_t *rng)
{
    static const colo_dtype_t dtypes[][2] = {
        {COLO_F32, COLO_F32},  {COLO_BF16, COLO_BF16}, {COLO_F16, COLO_F32}, {COLO_F64, COLO_F64},
        {COLO_BF16, COLO_F16}, {COLO_F64, COLO_BF16},  {COLO_F32, COLO_BF16}};
    const colo_dtype_t *dtype = dtypes[i % 7];
    linear_distill_init(c, ranks, replicas, ranks * (1 + t_below(rng, 12 / ranks)), 23 + i % 5,
                        HIDDEN, dtype, rng);
    linear_distill_shard(c, (shard_kind_t)(i % SHARD_KINDS));
    c->way = (way_t)(i / 2 % WAYS);
    if (dtype[0] == COLO_F64 && c->way == BY_EARLY)
        c->way = BY_LOSS;
    c->config.distill.divergence = i % 5;
    c->config.distill.beta = 0.3;
    c->config.chunk_size = t_below(rng, 4);
    c->config.d_hidden = i % 3 ? COLO_D_HIDDEN_ALL_REDUCE : COLO_D_HIDDEN_REDUCE_SCATTER;
    c->config.frozen_weight = i % 13 == 0;
    c->config.frozen_hidden = i % 11 == 0;
    c->config.d_weight_add = i % 4 == 1;
    c->prefill = 0.5;
    if (t_below(rng, 3) == 0) {
        c->config.distill.logits.temperature = 0.5 + t_uniform(rng);
        c->config.distill.target_temperature = 0.5 + t_uniform(rng);
    }
    if (t_below(rng, 3) == 0)
        c->config.distill.logits.softcap = 3;
    if (t_below(rng, 3) == 0)
        c->config.distill.target_softcap = 4;
    if (t_below(rng, 4) == 0)
        c->config.distill.logits.scale = 0.7, c->config.distill.target_scale = 0.6;
    for (int s = 0; s < 2; s++) {
        c->bias[s] = t_below(rng, 2);
        c->lora[s] = t_below(rng, 3) == 0;
        c->sharded[s] = replicas > 1 && t_below(rng, 2);
    }
    if (t_below(rng, 2))
        linear_distill_mask(c);
    c->mean = t_below(rng, 3) == 0;
    c->arrays = t_below(rng, 4) > 0;
    c->factor = t_below(rng, 3) ? 1 : 300;
    c->twice = c->way == BY_LOGPROB && !c->config.d_weight_add;
    if ((dtype[0] == COLO_BF16 || dtype[0] == COLO_F16) && i % 3 == 0) {
        c->config.logits_dtype = dtype[0];
        if (dtype[1] == dtype[0])
            c->config.teacher_logits_dtype = dtype[1];
    }
    if (dtype[0] != COLO_F64 && !c->config.d_weight_add && i % 2)
        c->config.d_weight_dtype = dtype[0];
}

static void judge(linear_distill_case_t *c, const char *what, int i)
{
    const char *label =
        t_text("%s %d: %s, W %d D %d, T %d, V %d, %s from %s, divergence %d, chunks of %d", what, i,
               ways[c->way], (int)c->ranks, (int)c->replicas, (int)c->tokens, (int)c->vocab,
               colo_dtype_name(c->dtype[0]), colo_dtype_name(c->dtype[1]),
               (int)c->config.distill.divergence, (int)c->config.chunk_size);
    const colo_status_t st = linear_distill_run(c);
    if (st != COLO_OK)
        fail_msg("%s: %s: %s", label, colo_status_name(st), colo_last_error());
    linear_distill_compare(c, label);
}

T_CASE(every_option_agrees_with_the_oracle)
{
    uint64_t rng = t_seed();
    for (int32_t w = 1; w <= 4; w++)
        for (int i = 0; i < t_scaled(105); i++) {
            T_ENDS(linear_distill_free) linear_distill_case_t c;
            draw(&c, w, 1, i, &rng);
            judge(&c, "case", i);
        }
}

T_CASE_IF(where.mem == COLO_MEM_HOST, sharded_heads_agree_with_the_oracle)
{
    uint64_t rng = t_seed() + 1;
    for (int32_t w = 1; w <= 2; w++)
        for (int i = 0; i < t_scaled(70); i++) {
            T_ENDS(linear_distill_free) linear_distill_case_t c;
            draw(&c, w, 2 + i % 2, i, &rng);
            judge(&c, "sharded", i);
        }
}

/* Backward in blocks of 8,448 columns and one of what is left; gradients of logits in d_weight */
T_CASE(blocks_of_columns_and_a_shared_d_weight_agree_with_the_oracle)
{
    uint64_t rng = t_seed() + 2;
    for (int i = 0; i < 12; i++) {
        T_ENDS(linear_distill_free) linear_distill_case_t c;
        const bool large = i % 4 == 3;
        const colo_dtype_t dtype = i % 3 ? COLO_BF16 : COLO_F32;
        linear_distill_init(&c, 1 + i % 2, 1, large ? 3 : 24, large ? 17000 + i : 400 + i,
                            (int64_t[]){large ? 3 : 8, 5}, (colo_dtype_t[]){dtype, dtype}, &rng);
        c.way = large ? BY_LOGPROB : BY_EARLY;
        c.config.distill.divergence = i % 3;
        c.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
        c.config.d_weight_dtype = dtype;
        c.config.share_d_weight = !large;
        c.config.chunk_size = large ? 2 : 7;
        c.bias[0] = c.bias[1] = c.lora[0] = c.lora[1] = i % 2;
        if (i % 2)
            linear_distill_mask(&c);
        judge(&c, "blocks", i);
    }
}

/* Rows beyond the tokens that count are none; a rank without tokens takes part. */
T_CASE(no_token_and_no_token_that_counts)
{
    uint64_t rng = t_seed() + 3;
    for (int i = 0; i < 60; i++) {
        T_ENDS(linear_distill_free) linear_distill_case_t c;
        const colo_dtype_t dtype[2] = {i % 2 ? COLO_BF16 : COLO_F32, COLO_F32};
        linear_distill_init(&c, 1 + i % 3, 1, i % 2 ? 0 : 6, 23, HIDDEN, dtype, &rng);
        c.way = (way_t)(i % WAYS);
        c.config.distill.divergence = i / 4 % 5;
        c.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
        c.masked = true;
        for (int64_t t = 0; t < c.tokens; t++) {
            c.mask[0][t] = 0;
            c.h[0][0][t * HIDDEN[0]] = c.h[1][0][t * HIDDEN[1]] = NAN;
        }
        c.max_valid = i % 5 == 0 ? 0 : -1;
        judge(&c, "none", i);
    }
}

T_CASE(an_upper_bound_of_the_tokens_that_count)
{
    uint64_t rng = t_seed() + 4;
    for (int i = 0; i < 24; i++) {
        T_ENDS(linear_distill_free) linear_distill_case_t c;
        const colo_dtype_t dtype[2] = {COLO_F32, COLO_F32};
        linear_distill_init(&c, 1 + i % 2, 1, 12, 23, HIDDEN, dtype, &rng);
        c.way = (way_t)(i % WAYS);
        c.config.distill.divergence = i / 4 % 5;
        c.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
        c.config.chunk_size = 3;
        linear_distill_mask(&c); /* 8 of 12 count */
        c.max_valid = 8 + i % 3;
        judge(&c, "bound", i);
    }
}

/* A token's divergence and its gradient do not depend on the tokens that it is made with. */
T_CASE(chunks_change_no_bit)
{
    for (way_t way = 0; way < WAYS; way++)
        for (int kind = 0; kind < 5; kind++) {
            T_ENDS(linear_distill_free) linear_distill_case_t first = {.memory = NULL};
            for (int chunk = 1; chunk <= 11; chunk += 3) {
                T_ENDS(linear_distill_free) linear_distill_case_t c;
                uint64_t rng = t_seed() + 5;
                const colo_dtype_t dtype[2] = {COLO_F32, COLO_BF16};
                linear_distill_init(&c, 2, 1, 8, 29, HIDDEN, dtype, &rng);
                c.way = way;
                c.config.distill.divergence = kind;
                c.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
                c.config.chunk_size = chunk;
                assert_ok(linear_distill_run(&c));
                if (chunk == 1) {
                    first = c;
                    c.memory = NULL;
                    continue;
                }
                assert_memory_equal(c.loss[0], first.loss[0], 8 * sizeof(double));
                assert_memory_equal(c.d_h[0], first.d_h[0], 8 * 12 * sizeof(double));
            }
        }
}

T_CASE(statistics_are_gathered_once_or_for_each_chunk)
{
    uint64_t rng = t_seed() + 6;
    for (way_t way = 0; way < WAYS; way++)
        for (int kind = 0; kind < 5; kind++) {
            T_ENDS(linear_distill_free) linear_distill_case_t c;
            const colo_dtype_t dtype[2] = {COLO_F32, COLO_F32};
            linear_distill_init(&c, 2, 1, 9, 23, HIDDEN, dtype, &rng);
            c.way = way;
            c.config.distill.divergence = kind;
            c.config.chunk_size = 4; /* 3 chunks */
            assert_ok(linear_distill_run(&c));
            const bool twice = kind >= COLO_DIVERGENCE_JSD,
                       each = way == BY_EARLY || way == BY_LOSS;
            const uint64_t want = twice ? 6 : each ? 3 : 1;
            for (int r = 0; r < 2; r++)
                if (total_ops(&c.all[r]) != want || total_ops(&c.forward[r]) != want)
                    fail_msg("%s, divergence %d: %d operations, %d with backward, expected %d",
                             ways[way], kind, (int)total_ops(&c.forward[r]),
                             (int)total_ops(&c.all[r]), (int)want);
        }
}

/* Of T 8,192 tokens, V 151,936, H 4,096 and a teacher of 2,048: saved memory, d_weight and
 * workspace of either pass */
T_CASE(early_of_a_large_vocabulary_takes_less_than_3_GiB)
{
    for (int wide = 0; wide < 2; wide++) {
        T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
        T_ENDS(colo_lm_head_destroy) colo_lm_head_t *teacher = NULL;
        T_ENDS(colo_linear_distill_destroy) colo_linear_distill_t *distill = NULL;
        colo_lm_head_config_t of = {COLO_LM_HEAD_CONFIG_INIT, .rows = 151936, .hidden = 4096,
                                    .dtype = COLO_BF16, .gemm = COLO_GEMM_LOOPS};
        colo_linear_distill_config_t config = {COLO_LINEAR_DISTILL_CONFIG_INIT,
                                               .mode = COLO_LINEAR_LOGPROB_EARLY,
                                               .logits_dtype = wide ? COLO_F32 : COLO_BF16,
                                               .teacher_logits_dtype = wide ? COLO_F32 : COLO_BF16,
                                               .d_weight_dtype = COLO_BF16,
                                               .share_d_weight = true};
        size_t saved, fore, back;
        config.distill.logits.vocab = of.rows;
        assert_ok(colo_lm_head_create(&head, &of, NULL));
        of.hidden = 2048;
        assert_ok(colo_lm_head_create(&teacher, &of, NULL));
        assert_ok(colo_linear_distill_create(&distill, &config, head, teacher, t_self()));
        assert_ok(colo_linear_distill_saved_size(distill, 8192, -1, &saved));
        assert_ok(colo_linear_distill_workspace_size(distill, COLO_LINEAR_LOGPROB_FORWARD, 8192, -1,
                                                     &fore));
        assert_ok(colo_linear_distill_workspace_size(distill, COLO_LINEAR_LOGPROB_BACKWARD, 8192,
                                                     -1, &back));
        const size_t all = saved + (size_t)151936 * 4096 * 2 + (fore > back ? fore : back);
        if (!(all < (size_t)3 << 30) || all < (size_t)5 << 29)
            fail_msg("%s logits: %zu bytes saved, %zu and %zu of workspace", wide ? "f32" : "bf16",
                     saved, fore, back);
    }
}

/* Products of all tokens with each head, and tokens of a chunk */
T_CASE(products_and_chunks_of_a_large_vocabulary)
{
    static const struct {
        way_t way;
        bool wide;
        size_t budget;
        int64_t chunk;
        int student, teacher;
    } cases[] = {{BY_EARLY, true, 0, 512, 3, 1},
                 {BY_EARLY, false, 0, 1024, 3, 1},
                 {BY_EARLY, true, (size_t)3 << 29, 1024, 3, 1},
                 {BY_EARLY, true, 1, 512, 3, 1},
                 {BY_LOGPROB, true, 0, 1024, 4, 2},
                 {BY_LOGPROB, true, (size_t)3 << 30, 2048, 4, 2},
                 {BY_LOSS, true, 0, 512, 3, 1},
                 {BY_LOSS, false, 0, 2048, 3, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
        T_ENDS(colo_lm_head_destroy) colo_lm_head_t *teacher = NULL;
        T_ENDS(colo_linear_distill_destroy) colo_linear_distill_t *distill = NULL;
        const colo_dtype_t logits = cases[i].wide ? COLO_F32 : COLO_BF16;
        const colo_lm_head_config_t of = {COLO_LM_HEAD_CONFIG_INIT, .rows = 151936, .hidden = 64,
                                          .dtype = COLO_BF16, .gemm = COLO_GEMM_LOOPS};
        colo_linear_distill_config_t config = {
            COLO_LINEAR_DISTILL_CONFIG_INIT,
            .mode = cases[i].way == BY_EARLY ? COLO_LINEAR_LOGPROB_EARLY : COLO_LINEAR_LOGPROB_AUTO,
            .logits_dtype = logits,
            .teacher_logits_dtype = logits,
            .budget = cases[i].budget,
            .d_weight_dtype = COLO_BF16,
            .share_d_weight = cases[i].way == BY_EARLY};
        config.distill.logits.vocab = of.rows;
        assert_ok(colo_lm_head_create(&head, &of, NULL));
        assert_ok(colo_lm_head_create(&teacher, &of, NULL));
        assert_ok(colo_linear_distill_create(&distill, &config, head, teacher, t_self()));
        int student = 0, theirs = 0;
        for (int pass = 0; pass < (cases[i].way == BY_LOSS ? 1 : 2); pass++) {
            struct colo_linear_size size;
            /* the object begins with that of the lm_head path */
            assert_ok(colo_linear_set_size((const colo_linear_logprob_t *)(const void *)distill,
                                           cases[i].way == BY_LOSS ? COLO_LINEAR_LOGPROB_LOSS
                                           : pass                  ? COLO_LINEAR_LOGPROB_BACKWARD
                                                                   : COLO_LINEAR_LOGPROB_FORWARD,
                                           8192, -1, &size));
            student += size.makes_logits + size.makes_d_hidden + size.makes_d_weight;
            theirs += size.makes_logits;
            if (pass == 0 && size.chunk != cases[i].chunk)
                fail_msg("case %d: chunks of %d, expected %d", (int)i, (int)size.chunk,
                         (int)cases[i].chunk);
        }
        assert_int_equal(student, cases[i].student);
        assert_int_equal(theirs, cases[i].teacher);
    }
}

/* ---- what is refused ---- */

enum { T = 4, V = 6, H = 3, HT = 2 };

typedef struct alone {
    colo_lm_head_t *head[2];
    colo_linear_distill_t *distill;
    colo_linear_distill_config_t config;
    float h[T * H], ht[T * HT], w[V * H], wt[(V + 1) * HT], d_h[T * H], d_w[V * H], loss[T];
    uint8_t mask[T];
    uint64_t hidden_version, teacher_version, mask_version, weight_version, teacher_weight_version;
    colo_tensor_t hidden, teacher, masked, weight, teacher_weight, dh, dw, of_loss;
    colo_linear_distill_batch_t batch;
    colo_linear_distill_out_t out;
    colo_linear_distill_upstream_t up;
    colo_linear_logprob_grads_t grads;
    colo_linear_distill_saved_t saved;
    void *kept, *work;
} alone_t;

static void alone_make(alone_t *a)
{
    colo_linear_distill_destroy(&a->distill);
    assert_ok(
        colo_linear_distill_create(&a->distill, &a->config, a->head[0], a->head[1], t_self()));
}

static void alone_init(alone_t *a)
{
    memset(a, 0, sizeof *a);
    a->config = (colo_linear_distill_config_t){COLO_LINEAR_DISTILL_CONFIG_INIT};
    a->config.distill.logits.vocab = V;
    for (int s = 0; s < 2; s++) {
        const colo_lm_head_config_t of = {COLO_LM_HEAD_CONFIG_INIT, .rows = V + s,
                                          .hidden = s ? HT : H};
        assert_ok(colo_lm_head_create(&a->head[s], &of, NULL));
    }
    for (int i = 0; i < V * H; i++)
        a->w[i] = (float)(i % 5) / 4;
    alone_make(a);
    memset(a->mask, 1, sizeof a->mask);
    a->hidden = colo_tensor_host(a->h, COLO_F32, 2, (int64_t[]){T, H});
    a->teacher = colo_tensor_host(a->ht, COLO_F32, 2, (int64_t[]){T, HT});
    a->masked = colo_tensor_host(a->mask, COLO_U8, 1, (int64_t[]){T});
    a->weight = colo_tensor_host(a->w, COLO_F32, 2, (int64_t[]){V, H});
    a->teacher_weight = colo_tensor_host(a->wt, COLO_F32, 2, (int64_t[]){V + 1, HT});
    a->dh = colo_tensor_host(a->d_h, COLO_F32, 2, (int64_t[]){T, H});
    a->dw = colo_tensor_host(a->d_w, COLO_F32, 2, (int64_t[]){V, H});
    a->of_loss = colo_tensor_host(a->loss, COLO_F32, 1, (int64_t[]){T});
    a->hidden.version = &a->hidden_version;
    a->teacher.version = &a->teacher_version;
    a->masked.version = &a->mask_version;
    a->weight.version = &a->weight_version;
    a->teacher_weight.version = &a->teacher_weight_version;
    a->batch = (colo_linear_distill_batch_t){
        COLO_LINEAR_DISTILL_BATCH_INIT, &a->hidden, &a->teacher, &a->masked, -1, NULL, NULL};
    a->out = (colo_linear_distill_out_t){COLO_LINEAR_DISTILL_OUT_INIT, .loss = &a->of_loss};
    a->up = (colo_linear_distill_upstream_t){COLO_LINEAR_DISTILL_UPSTREAM_INIT, .loss = 1};
    a->grads = (colo_linear_logprob_grads_t){COLO_LINEAR_LOGPROB_GRADS_INIT, .d_hidden = &a->dh,
                                             .d_weight = &a->dw};
    a->saved = (colo_linear_distill_saved_t){COLO_LINEAR_DISTILL_SAVED_INIT};
    a->kept = t_aligned(1 << 16);
    a->work = t_aligned(1 << 21);
    assert_ok(colo_lm_head_bind(a->head[0], &a->weight, NULL, NULL));
    assert_ok(colo_lm_head_bind(a->head[1], &a->teacher_weight, NULL, NULL));
}

static void alone_free(alone_t *a)
{
    colo_linear_distill_destroy(&a->distill);
    colo_lm_head_destroy(&a->head[0]);
    colo_lm_head_destroy(&a->head[1]);
    free(a->kept);
    free(a->work);
}

static colo_status_t make_with(alone_t *a, const colo_linear_distill_config_t *config)
{
    colo_linear_distill_t *made = NULL;
    const colo_status_t st =
        colo_linear_distill_create(&made, config, a->head[0], a->head[1], t_self());
    assert_true(st < 0 && !made);
    return st;
}

static colo_status_t forward(alone_t *a)
{
    return colo_linear_distill_forward(a->distill, &a->batch, &a->out, &a->saved, a->kept, a->work,
                                       NULL);
}

static colo_status_t backward(alone_t *a)
{
    return colo_linear_distill_backward(a->distill, &a->saved, &a->up, &a->grads, a->work, NULL);
}

T_CASE(configs_that_cannot_be_are_refused)
{
    T_ENDS(alone_free) alone_t a;
    alone_init(&a);
    colo_linear_distill_config_t c = a.config;
    colo_linear_distill_t *made = NULL;
    c.distill.targets = COLO_DISTILL_PROBS;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "linear distill: targets is 1");
    c = a.config;
    c.distill.has_target_temperature = true;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "has_target_temperature 1, expected false");
    c = a.config;
    c.distill.divergence = 5;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "divergence is 5");
    c = a.config;
    c.mode = COLO_LINEAR_LOGPROB_KEEP;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "linear distill: mode is 2");
    c = a.config;
    c.teacher_logits_dtype = COLO_BF16;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "teacher_logits_dtype bf16");
    c = a.config;
    c.logits_dtype = COLO_BF16;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "logits_dtype bf16");
    c = a.config;
    c.teacher_lora = -1;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "teacher_lora is -1");
    c = a.config;
    c.struct_size = 3;
    assert_fails(make_with(&a, &c), COLO_ERR_ARG, "linear distill: config");
    c = a.config;
    c.distill.logits.vocab = V + 1;
    assert_fails(make_with(&a, &c), COLO_ERR_SHAPE, "");
    assert_fails(colo_linear_distill_create(&made, &a.config, a.head[0], NULL, t_self()),
                 COLO_ERR_ARG, "teacher is NULL");
    assert_fails(colo_linear_distill_create(&made, &a.config, a.head[0], a.head[0], t_self()),
                 COLO_ERR_ARG, "one object");
    assert_fails(colo_linear_distill_create(&made, &a.config, NULL, a.head[1], t_self()),
                 COLO_ERR_ARG, "head is NULL");
    assert_fails(colo_linear_distill_create(&made, &a.config, a.head[0], a.head[1], NULL),
                 COLO_ERR_ARG, "group is NULL");
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *narrow = NULL;
    assert_ok(colo_lm_head_create(
        &narrow, &(colo_lm_head_config_t){COLO_LM_HEAD_CONFIG_INIT, .rows = V - 1, .hidden = HT},
        NULL));
    assert_fails(colo_linear_distill_create(&made, &a.config, a.head[0], narrow, t_self()),
                 COLO_ERR_SHAPE, "has 5 of the 6 columns from 0 on, the other 6");
    assert_null(made);
}

T_CASE(batches_that_cannot_be_are_refused_and_write_nothing)
{
    T_ENDS(alone_free) alone_t a;
    alone_init(&a);
    const colo_linear_distill_batch_t batch = a.batch;
    const colo_tensor_t hidden = a.hidden, teacher = a.teacher;
    memset(a.loss, CANARY, sizeof a.loss);
    a.batch.teacher_hidden = NULL;
    assert_fails(forward(&a), COLO_ERR_ARG, "teacher_hidden is NULL");
    a.batch = batch;
    a.teacher.shape[0] = T - 1;
    assert_fails(forward(&a), COLO_ERR_SHAPE, "teacher_hidden: [3, 2], expected [4, 2]");
    a.teacher = teacher;
    a.teacher.dtype = COLO_F64;
    assert_fails(forward(&a), COLO_ERR_ARG, "teacher_hidden: dtype f64");
    a.teacher = teacher;
    a.hidden.shape[1] = H - 1;
    assert_fails(forward(&a), COLO_ERR_SHAPE, "hidden: [4, 2]");
    a.hidden = hidden;
    a.masked.dtype = COLO_F32;
    assert_fails(forward(&a), COLO_ERR_ARG, "mask");
    a.masked.dtype = COLO_U8;
    a.batch.max_valid = 3;
    assert_fails(forward(&a), COLO_ERR_ARG, "max_valid is 3, but 4 of 4 tokens count");
    a.batch.mask = NULL;
    assert_fails(forward(&a), COLO_ERR_ARG, "max_valid is 3, but 4 of 4 tokens count");
    a.batch = batch;
    a.batch.teacher_lora = &(colo_lora_t){&a.teacher, &a.teacher, 1};
    assert_fails(forward(&a), COLO_ERR_ARG,
                 "batch.teacher_lora is given, config.teacher_lora is 0");
    a.batch = batch;
    a.of_loss.shape[0] = T - 1;
    assert_fails(forward(&a), COLO_ERR_SHAPE, "out.loss");
    a.of_loss.shape[0] = T;
    assert_fails(colo_linear_distill_early(a.distill, &a.batch, &a.up, &a.out, &a.saved, a.kept,
                                           a.work, NULL),
                 COLO_ERR_ARG, "early, but mode is");
    assert_fails(
        colo_linear_distill_forward(a.distill, &a.batch, &a.out, &a.saved, a.kept, NULL, NULL),
        COLO_ERR_ARG, "workspace is NULL");
    assert_fails(
        colo_linear_distill_forward(a.distill, &a.batch, &a.out, NULL, a.kept, a.work, NULL),
        COLO_ERR_ARG, "saved memory is given, saved is NULL");
    assert_true(painted(a.loss, sizeof a.loss));
    a.teacher.data = a.d_h; /* read after d_hidden is written */
    a.teacher.stride[0] = HT;
    assert_fails(
        colo_linear_distill_loss(a.distill, &a.batch, &a.up, &a.out, &a.grads, a.work, NULL),
        COLO_ERR_ARG, "d_hidden: overlaps teacher_hidden");
    a.teacher = teacher;
    assert_ok(forward(&a));
    assert_ok(backward(&a));
}

T_CASE(what_was_written_since_forward_is_refused)
{
    T_ENDS(alone_free) alone_t a;
    alone_init(&a);
    uint64_t *const versions[] = {&a.hidden_version, &a.mask_version, &a.weight_version,
                                  &a.teacher_version, &a.teacher_weight_version};
    static const char *const names[] = {"hidden states", "the mask", "the head",
                                        "the teacher's hidden states", "the teacher's head"};
    for (int early = 0; early < 2; early++) {
        a.config.mode = early ? COLO_LINEAR_LOGPROB_EARLY : COLO_LINEAR_LOGPROB_AUTO;
        alone_make(&a);
        for (int i = 0; i < 5; i++) {
            a.saved.valid = false;
            assert_fails(backward(&a), COLO_ERR_STATE, "is not valid");
            assert_ok(early ? colo_linear_distill_early(a.distill, &a.batch, &a.up, &a.out,
                                                        &a.saved, a.kept, a.work, NULL)
                            : forward(&a));
            ++*versions[i];
            if (early && i > 2) /* what the teacher has is read in forward alone */
                assert_ok(backward(&a));
            else
                assert_fails(backward(&a), COLO_ERR_MODIFIED, names[i]);
        }
    }
    assert_ok(colo_linear_distill_early(a.distill, &a.batch, &a.up, &a.out, &a.saved, a.kept,
                                        a.work, NULL));
    a.saved.of = NULL;
    assert_fails(backward(&a), COLO_ERR_ARG, "of another object");
}

/* A rank whose arguments are wrong, and what the others hear of it; ranks whose configs or masks
 * differ */
typedef struct misuse {
    int what;
    colo_status_t seen[2];
    char said[2][256];
} misuse_t;

enum { WRONG_SHAPE, WRONG_TOKENS, OTHER_BETA, OTHER_CAP, OTHER_MASK, SAME_LOGITS, MISUSES };

static colo_status_t misused(colo_comm_t *world, void *arg)
{
    misuse_t *m = arg;
    const int r = colo_comm_rank(world);
    T_ENDS(alone_free) alone_t a;
    alone_init(&a);
    colo_linear_distill_destroy(&a.distill);
    const bool sharded = m->what == WRONG_TOKENS; /* the teacher, over ranks with other tokens */
    T_ENDS(colo_comm_destroy) colo_comm_t *self = NULL;
    rank_try(colo_comm_create_self(&self));
    a.config.distill.logits = (colo_logits_options_t){COLO_LOGITS_OPTIONS_INIT, .vocab = V};
    if (!sharded) {
        a.config.distill.logits.vocab = 2 * V;
        a.config.distill.logits.vocab_start = r * V;
    }
    a.config.distill.divergence = COLO_DIVERGENCE_JSD;
    a.config.distill.beta = m->what == OTHER_BETA && r ? 0.25 : 0.5;
    a.config.distill.target_softcap = m->what == OTHER_CAP && r ? 30 : 0;
    for (int s = 0; s < 2; s++) /* the last rank's may be longer */
        colo_lm_head_destroy(&a.head[s]);
    for (int s = 0; s < 2; s++) {
        const colo_lm_head_config_t of = {COLO_LM_HEAD_CONFIG_INIT, .rows = V,
                                          .hidden = s ? HT : H};
        rank_try(colo_lm_head_create(&a.head[s], &of, s && sharded ? world : NULL));
    }
    a.teacher_weight.shape[0] = sharded ? V / 2 : V;
    for (int i = 0; i < V * H; i++)
        a.w[i] = (float)(m->what == SAME_LOGITS ? i : i + r) / 8;
    for (int i = 0; i < T * H; i++)
        a.h[i] = 1;
    a.mask[1] = m->what != OTHER_MASK || r == 0;
    if (m->what <= WRONG_TOKENS && r)
        a.teacher.shape[0] = T - 1;
    rank_try(colo_lm_head_bind(a.head[0], &a.weight, NULL, NULL));
    rank_try(colo_lm_head_bind(a.head[1], &a.teacher_weight, NULL, sharded ? a.kept : NULL));
    rank_try(colo_linear_distill_create(&a.distill, &a.config, a.head[0], a.head[1],
                                        sharded ? self : world));
    m->seen[r] = colo_linear_distill_forward(a.distill, &a.batch, &a.out, NULL, NULL, a.work, NULL);
    snprintf(m->said[r], sizeof m->said[r], "%s", colo_last_error());
    return COLO_OK;
}

T_CASE(every_rank_hears_of_a_misuse)
{
    static const char *const said[] = {"",
                                       "",
                                       "beta",
                                       "target_softcap",
                                       "has other targets than rank 0",
                                       "these are the same logits on 2 ranks"};
    for (int what = 0; what < MISUSES; what++) {
        misuse_t m = {.what = what};
        assert_ok(t_run_ranks(2, misused, &m, sizeof m));
        if (what <= WRONG_TOKENS) {
            assert_int_equal(m.seen[0], COLO_ERR_PEER);
            assert_int_equal(m.seen[1], COLO_ERR_SHAPE);
            continue;
        }
        for (int r = 0; r < 2; r++)
            if (m.seen[r] != COLO_ERR_MISMATCH || !strstr(m.said[r], said[what]))
                fail_msg("misuse %d: rank %d got %s: %s", what, r, colo_status_name(m.seen[r]),
                         m.said[r]);
    }
}

T_MAIN_IF(where.need(), "loss/linear_distill")
