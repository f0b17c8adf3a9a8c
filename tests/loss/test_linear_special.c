/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_special.c - infinities, NaN, wrong targets, and what is refused: with its error
 * message, with nothing written, and with the other ranks awake. A bias puts an infinity into a
 * column of every row; hidden states of one token put it into a row.
 */
#include "loss/linear_alone.h"

enum { T = 6, V = 10, H = 3 };

static void make(linear_case_t *c, int32_t ranks, int mode, uint64_t *rng)
{
    linear_case_init(c, ranks, 1, T, V, H, COLO_F32, rng);
    c->has_bias = true;
    c->config.mode = mode == 1 ? COLO_LINEAR_LOGPROB_KEEP : COLO_LINEAR_LOGPROB_LOGPROB;
    c->loss_mode = mode == 2;
    c->config.logprob.chunk_size = 4;
    c->config.logprob.want_entropy = true;
    c->config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
    for (int64_t t = 0; t < T; t++)
        c->targets[0][t] = t;
}

T_CASE(minus_infinity_next_to_the_target_adds_nothing)
{
    uint64_t rng = t_seed();
    for (int mode = 0; mode < 3; mode++) {
        T_ENDS(linear_case_free) linear_case_t c, without;
        uint64_t again = rng;
        make(&c, 2, mode, &rng);
        make(&without, 2, mode, &again);
        c.b[V - 1] = -INFINITY;
        without.b[V - 1] = -2e4; /* e^-20000 is 0, too */
        assert_ok(linear_case_run(&c));
        assert_ok(linear_case_run(&without));
        assert_true(linear_case_same(&c, &without, true));
        assert_true(c.d_b[V - 1] == 0);
        assert_true(all_of(IS_ZERO, c.d_w + (V - 1) * H, H));
    }
}

T_CASE(minus_infinity_at_the_target_is_its_logp)
{
    uint64_t rng = t_seed() + 1;
    for (int mode = 0; mode < 3; mode++) {
        T_ENDS(linear_case_free) linear_case_t c;
        make(&c, 2, mode, &rng);
        c.b[2] = -INFINITY;
        assert_ok(linear_case_run(&c));
        assert_true(c.out[0][0][2] == -INFINITY && c.out[1][0][2] == -INFINITY);
        assert_true(isfinite(c.out[0][1][2]));
        assert_true(all_of(IS_FINITE, c.d_h[0] + 2 * H, H));
    }
}

T_CASE(a_nan_row_is_nan_on_all_ranks_and_stays_a_row)
{
    static const double bad[] = {NAN, INFINITY};
    uint64_t rng = t_seed() + 2;
    for (int mode = 0; mode < 3; mode++)
        for (int i = 0; i < 2; i++) {
            T_ENDS(linear_case_free) linear_case_t c;
            make(&c, 2, mode, &rng);
            c.h[0][3 * H] = bad[i]; /* column 0 of W has both signs: +inf somewhere */
            assert_ok(linear_case_run(&c));
            for (int r = 0; r < 2; r++)
                for (int64_t t = 0; t < T; t++) {
                    assert_true(isnan(c.out[r][0][t]) == (t == 3));
                    assert_true(isnan(c.out[r][1][t]) == (t == 3));
                    for (int k = 0; k < H; k++)
                        assert_true(isnan(c.d_h[r][t * H + k]) == (t == 3));
                }
        }
}

T_CASE(a_vocabulary_of_minus_infinity_is_nan)
{
    uint64_t rng = t_seed() + 3;
    T_ENDS(linear_case_free) linear_case_t c;
    make(&c, 2, 0, &rng);
    for (int v = 0; v < V; v++)
        c.b[v] = -INFINITY;
    assert_ok(linear_case_run(&c));
    for (int64_t t = 0; t < T; t++)
        assert_true(isnan(c.out[0][0][t]) && isnan(c.out[1][1][t]) && isnan(c.d_h[0][t * H]));
}

T_CASE(targets_outside_the_vocabulary_are_counted_and_nan)
{
    uint64_t rng = t_seed() + 4;
    for (int mode = 0; mode < 3; mode++) {
        T_ENDS(linear_case_free) linear_case_t c;
        make(&c, 2, mode, &rng);
        c.targets[0][1] = V;
        c.targets[0][4] = -7;
        c.targets[0][5] = -100;
        assert_ok(linear_case_run(&c));
        for (int r = 0; r < 2; r++) {
            assert_int_equal(c.n_valid[r], 3);
            assert_int_equal(c.n_invalid[r], 2);
            for (int64_t t = 0; t < T; t++) {
                bool wrong = t == 1 || t == 4;
                assert_true(isnan(c.out[r][0][t]) == wrong);
                assert_true(isfinite(c.out[r][1][t])); /* the entropy needs no target */
                assert_true(isnan(c.d_h[r][t * H]) == wrong);
            }
            assert_true(c.out[r][0][5] == 0 && c.out[r][1][5] == 0 && c.d_h[r][5 * H] == 0);
        }
    }
}

/* ---- refusals, alone ---- */

/* An object of a->config; its forward has run. */
static void again(alone_t *a)
{
    alone_make(a);
    if (a->config.mode == COLO_LINEAR_LOGPROB_EARLY) {
        a->up = (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .loss = 1};
        assert_ok(alone_early(a));
    } else {
        assert_ok(alone_forward(a));
    }
    memset(a->logp, CANARY, T * sizeof *a->logp);
}

T_CASE(a_pass_without_what_comes_before_it_is_refused)
{
    T_ENDS(alone_free) alone_t a;
    alone_init(&a, T, V, H, NULL);
    assert_fails(alone_forward(&a), COLO_ERR_STATE, "no weight is bound");
    assert_ok(alone_bind(&a));
    assert_fails(alone_backward(&a), COLO_ERR_STATE, "no forward filled it");
    assert_ok(alone_forward(&a));
    a.hidden_version++;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED, "hidden states were written");
    a.hidden_version--;
    assert_ok(alone_backward(&a)); /* the refusal did not end the saved state */
}

#define REFUSE(change, call, status, text)                 \
    do {                                                   \
        alone_t a;                                         \
        alone_init(&a, T, V, H, NULL);                     \
        assert_ok(alone_bind(&a));                         \
        assert_ok(alone_forward(&a));                      \
        memset(a.logp, CANARY, T * sizeof *a.logp);        \
        change;                                            \
        assert_fails(call, status, text);                  \
        assert_true(painted(a.logp, T * sizeof *a.logp));  \
        assert_true(painted(a.d_h, sizeof(float[T * H]))); \
        alone_free(&a);                                    \
    } while (0)

T_CASE(every_wrong_config_is_named)
{
    colo_linear_logprob_t *none = NULL;
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *wide = NULL, *half = NULL, *sharded = NULL;
    colo_comm_t *self = t_self();
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H};
    assert_ok(colo_lm_head_create(&sharded, &hc, self));
    hc.dtype = COLO_F64;
    assert_ok(colo_lm_head_create(&wide, &hc, NULL));
    hc.dtype = COLO_BF16;
    assert_ok(colo_lm_head_create(&half, &hc, NULL));
#define CONFIG(change, head, text) \
    REFUSE(change, colo_linear_logprob_create(&none, &a.config, head, t_self()), COLO_ERR_ARG, text)
    REFUSE((void)0, colo_linear_logprob_create(&none, NULL, a.head, t_self()), COLO_ERR_ARG,
           "linear: config is NULL");
    CONFIG(a.config.logprob.struct_size = 4096, a.head, "struct_size is 4096");
    CONFIG(a.config.logprob.logits.temperature = 0, a.head, "temperature is 0");
    CONFIG(a.config.logprob.logits.softcap = INFINITY, a.head, "softcap is inf");
    CONFIG(a.config.logprob.segment = INT64_C(1) << 41, a.head, "segment is 2199023255552");
    CONFIG((void)0, NULL, "head is NULL");
    CONFIG(a.config.d_weight_dtype = COLO_BF16, half, "d_weight_add to bf16 would lose digits");
    CONFIG(a.config.d_weight_dtype = COLO_F16, half,
           "d_weight_dtype f16, expected f32 or the head's bf16");
    CONFIG(a.config.logits_dtype = COLO_F64, half,
           "logits_dtype f64, expected f32 or the head's bf16");
    CONFIG(a.config.keep_in_place = true, half,
           "keep_in_place with logits of f32 and gradients of bf16");
    CONFIG(a.config.share_d_weight = true, half,
           "share_d_weight with mode 0, d_weight added of f32, a resident head");
    REFUSE(a.config.logprob.logits.vocab = V + 1,
           colo_linear_logprob_create(&none, &a.config, half, t_self()), COLO_ERR_SHAPE,
           "expected the whole vocabulary");
    REFUSE((void)0, colo_linear_logprob_create(&none, &a.config, half, NULL), COLO_ERR_ARG,
           "group is NULL");
    CONFIG(a.config.mode = (colo_linear_logprob_mode_t)9, a.head, "mode 9 is unknown");
    CONFIG(a.config.d_hidden = (colo_d_hidden_t)9, a.head, "d_hidden 9 is unknown");
    CONFIG((a.config.mode = COLO_LINEAR_LOGPROB_EARLY,
            a.config.logits_dtype = a.config.d_weight_dtype = COLO_F64),
           wide, "mode early, but the head is f64");
#define SHARE                                                                  \
    a.config.share_d_weight = true, a.config.mode = COLO_LINEAR_LOGPROB_EARLY, \
    a.config.d_weight_add = false
    CONFIG((SHARE, a.config.frozen_weight = true), a.head, "d_weight frozen of f32");
    CONFIG((SHARE, a.config.d_weight_add = true), a.head, "d_weight added of f32");
    CONFIG((SHARE), half, "d_weight written of f32");
    CONFIG((SHARE), sharded, "a sharded head");
    CONFIG((SHARE, a.config.logprob.segment = 16), a.head, "segments of 16, expected mode");
#undef SHARE
#undef CONFIG
    assert_null(none);
}

T_CASE(every_wrong_batch_is_named)
{
    int64_t ids[2] = {0, 1}, none[T] = {0};
    colo_tensor_t id = colo_tensor_host(ids, COLO_I64, 1, (int64_t[]){2});
    colo_tensor_t begin = colo_tensor_host(none, COLO_I64, 1, (int64_t[]){T}), odd;
    colo_support_t lists = {&id, &begin, &begin};
#define BATCH(change, status, text) REFUSE(change, alone_forward(&a), status, text)
    REFUSE((void)0,
           colo_linear_logprob_forward(a.linear, NULL, &a.out, &a.saved, a.buffer, a.work, NULL),
           COLO_ERR_ARG, "linear: batch is NULL");
    BATCH(a.batch.hidden = NULL, COLO_ERR_ARG, "linear: hidden is NULL");
    BATCH(a.batch.targets = NULL, COLO_ERR_ARG, "linear: targets is NULL");
    BATCH(a.hidden.ndim = 1, COLO_ERR_SHAPE, "hidden: 1 axes");
    BATCH(a.hidden.shape[1] = H - 1, COLO_ERR_SHAPE, "hidden: [6, 2], expected [6, 3]");
    BATCH(a.hidden.dtype = COLO_BF16, COLO_ERR_ARG, "hidden: dtype bf16, the head is f32");
    BATCH(a.target.shape[0] = T - 1, COLO_ERR_SHAPE, "expected [6] as the rows of hidden");
    BATCH(a.batch.max_valid = 4, COLO_ERR_ARG,
          "max_valid is 4, but 6 of 6 targets are not ignore_index");
    BATCH(a.out.entropy = &a.of_logp, COLO_ERR_ARG, "config.want_entropy is false");
    REFUSE((void)0,
           colo_linear_logprob_forward(a.linear, &a.batch, &a.out, &a.saved, a.buffer,
                                       (char *)a.work + 8, NULL),
           COLO_ERR_ARG, "workspace is 8 past a multiple of 256");
    REFUSE((void)0,
           colo_linear_logprob_forward(a.linear, &a.batch, &a.out, &a.saved, NULL, a.work, NULL),
           COLO_ERR_ARG, "saved memory is NULL");
    BATCH(a.target.data = NULL, COLO_ERR_ARG, "targets: data is NULL");
    BATCH(a.target.dtype = COLO_I32, COLO_ERR_ARG, "targets: dtype i32");
    BATCH((a.target.ndim = 2, a.target.shape[1] = a.target.stride[1] = 1), COLO_ERR_SHAPE,
          "targets: 2 axes");
    BATCH((a.target.mem = COLO_MEM_CUDA, a.target.device = 0), COLO_ERR_ARG,
          "targets: memory kind 1 on device 0, expected kind 0");
    REFUSE((void)0,
           colo_linear_logprob_forward(a.linear, &a.batch, NULL, &a.saved, a.buffer, a.work, NULL),
           COLO_ERR_ARG, "linear: out is NULL");
    BATCH(a.out.loss = &a.of_logp, COLO_ERR_ARG, "config.want_loss is false");
    BATCH(a.out.correct = &a.of_logp, COLO_ERR_ARG, "config.want_correct is false");
    lists.ids = NULL;
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: ids: tensor is NULL");
    lists = (colo_support_t){&id, NULL, &begin};
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: begin: tensor is NULL");
    lists = (colo_support_t){&id, &begin, NULL};
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: end: tensor is NULL");
    lists = (colo_support_t){&odd, &begin, &begin};
    odd = id, odd.dtype = COLO_I32;
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: ids: dtype i32, expected i64");
    odd = colo_tensor_host(ids, COLO_I64, 2, (int64_t[]){1, 2});
    BATCH(a.batch.support = &lists, COLO_ERR_SHAPE,
          "support: ids: 2 axes, 2 elements, expected [2]");
    odd = id, odd.stride[0] = 2;
    BATCH(a.batch.support = &lists, COLO_ERR_SHAPE, "support: ids: elements are 2 apart");
    lists = (colo_support_t){&id, &odd, &begin};
    odd = begin, odd.shape[0] = T - 1;
    BATCH(a.batch.support = &lists, COLO_ERR_SHAPE,
          "support: begin: 1 axes, 5 elements, expected [6]");
    lists = (colo_support_t){&id, &begin, &begin};
    none[1] = -1;
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: token 1 has ids [-1, -1)");
    odd = colo_tensor_host((int64_t[T]){1}, COLO_I64, 1, (int64_t[]){T});
    none[1] = 0;
    lists.begin = &odd;
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: token 0 has ids [1, 0)");
    lists = (colo_support_t){&id, &begin, &odd};
    ids[0] = -1;
    BATCH(a.batch.support = &lists, COLO_ERR_ARG, "support: token 0 has id -1");
#undef BATCH
}

T_CASE(every_wrong_backward_is_named)
{
    uint64_t version = 0;
    float bias[V];
    colo_tensor_t db = colo_tensor_host(bias, COLO_F32, 1, (int64_t[]){V});
#define BACKWARD(change, status, text) REFUSE(change, alone_backward(&a), status, text)
#define EARLY \
    (a.config.mode = COLO_LINEAR_LOGPROB_EARLY, a.config.logprob.want_loss = true, again(&a))
    REFUSE((void)0, colo_linear_logprob_backward(a.linear, &a.saved, NULL, &a.grads, a.work, NULL),
           COLO_ERR_ARG, "linear: upstream is NULL");
    BACKWARD(a.up.loss = 2, COLO_ERR_ARG, "upstream.loss is 2, config.want_loss is false");
    BACKWARD((EARLY, a.up.logp = 1), COLO_ERR_ARG, "upstream has logp 1, entropy 0, lse 0, mean 0");
    BACKWARD((EARLY, a.up.entropy = 2), COLO_ERR_ARG, "logp 0, entropy 2, lse 0, mean 0");
    BACKWARD((EARLY, a.up.lse = 3), COLO_ERR_ARG, "logp 0, entropy 0, lse 3, mean 0");
    BACKWARD((EARLY, a.up.mean = true), COLO_ERR_ARG, "logp 0, entropy 0, lse 0, mean 1");
    BACKWARD(a.up.lse = 2, COLO_ERR_ARG, "upstream.lse is 2, config.want_lse is false");
    REFUSE((void)0, colo_linear_logprob_backward(a.linear, &a.saved, &a.up, NULL, a.work, NULL),
           COLO_ERR_ARG, "linear: grads is NULL");
    BACKWARD(a.up.entropy = 2, COLO_ERR_ARG, "upstream.entropy is 2");
    BACKWARD(a.grads.d_hidden = NULL, COLO_ERR_ARG,
             "d_hidden is NULL, config.frozen_hidden is false");
    BACKWARD(a.grads.d_hidden = &a.hidden, COLO_ERR_ARG, "d_hidden: overlaps hidden");
    BACKWARD(a.dw.dtype = COLO_F64, COLO_ERR_ARG,
             "d_weight: dtype f64, config.d_weight_dtype is f32");
    /* a runtime brought it back from elsewhere */
    BACKWARD(a.saved.memory = (char *)a.buffer + 8, COLO_ERR_ARG,
             "saved memory is 8 past a multiple of 256");
    BACKWARD(a.weight_version = 5, COLO_ERR_MODIFIED, "the head was written between forward and");
    BACKWARD(a.dh.dtype = COLO_F64, COLO_ERR_ARG, "d_hidden: dtype f64, the head is f32");
    BACKWARD((a.config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE, again(&a), a.dh.stride[0] = H + 1),
             COLO_ERR_SHAPE, "d_hidden: rows are 4 elements apart");
    BACKWARD((a.config.frozen_hidden = true, again(&a)), COLO_ERR_ARG,
             "d_hidden is given, config.frozen_hidden is true");
    BACKWARD(a.grads.d_weight = NULL, COLO_ERR_ARG,
             "d_weight is NULL, config.frozen_weight is false");
    BACKWARD((a.config.frozen_weight = true, again(&a)), COLO_ERR_ARG,
             "d_weight is given, config.frozen_weight is true");
    BACKWARD(
        (a.config.frozen_weight = true, again(&a), a.grads.d_weight = NULL, a.grads.d_bias = &db),
        COLO_ERR_ARG, "d_bias is given, config.frozen_weight is true");
    REFUSE((void)0, colo_linear_logprob_backward(a.linear, NULL, &a.up, &a.grads, a.work, NULL),
           COLO_ERR_ARG, "linear: saved is NULL");
    BACKWARD(a.saved.of = (const colo_linear_logprob_t *)&a, COLO_ERR_ARG, "of another object");
    BACKWARD((a.target.version = &version, again(&a), version = 1), COLO_ERR_MODIFIED,
             "targets were written");
#undef EARLY
#undef BACKWARD
}

T_CASE(class_weights_that_do_not_fit_or_were_written_are_refused)
{
    uint64_t version = 1;
    float w[V];
    T_ENDS(alone_free) alone_t a;
    alone_init(&a, T, V, H, NULL);
    for (int i = 0; i < V; i++)
        w[i] = (float)(i % 3);
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 1, (int64_t[]){V});
    weight.version = &version;
    assert_ok(alone_bind(&a));
    a.batch.class_weight = &weight;
    assert_fails(alone_forward(&a), COLO_ERR_ARG,
                 "class_weight: the batch has one, config.has_class_weight is false");
    a.config.logprob.has_class_weight = a.config.logprob.want_loss = true;
    alone_make(&a);
    a.batch.class_weight = NULL;
    assert_fails(alone_forward(&a), COLO_ERR_ARG,
                 "class_weight: the batch has none, config.has_class_weight is true");
    a.batch.class_weight = &weight;
    weight.dtype = COLO_F64;
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "class_weight: dtype f64, expected f32");
    weight.dtype = COLO_F32;
    weight.shape[0] = V - 1;
    assert_fails(alone_forward(&a), COLO_ERR_SHAPE, "class_weight: 9 elements, expected one for");
    weight.shape[0] = V;
    a.saved.struct_size = offsetof(colo_linear_logprob_saved_t, valid);
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "linear: saved.struct_size is ");
    a.saved.struct_size = sizeof a.saved;
    assert_ok(alone_forward(&a));
    version++;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED, "class_weight were written");
    version--;
    assert_ok(alone_backward(&a));
}

T_CASE(a_lora_that_does_not_fit_or_was_written_is_refused)
{
    enum { R = 2 };
    uint64_t version = 1;
    float f[4][V * R];
    memset(f, 0, sizeof f);
    T_ENDS(alone_free) alone_t a;
    alone_init(&a, T, V, H, NULL);
    colo_tensor_t of_a = colo_tensor_host(f[0], COLO_F32, 2, (int64_t[]){R, H}),
                  of_b = colo_tensor_host(f[1], COLO_F32, 2, (int64_t[]){V, R}),
                  d_a = colo_tensor_host(f[2], COLO_F32, 2, (int64_t[]){R, H}),
                  d_b = colo_tensor_host(f[3], COLO_F32, 2, (int64_t[]){V, R});
    colo_lora_t lora = {&of_a, &of_b, 1};
    of_b.version = &version;
    assert_ok(alone_bind(&a));
    a.batch.lora = &lora;
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "batch.lora is given, config.lora is 0");
    colo_linear_logprob_t *none = NULL;
    a.config.lora = -1;
    assert_fails(colo_linear_logprob_create(&none, &a.config, a.head, t_self()), COLO_ERR_ARG,
                 "lora is -1");
    a.config.lora = R;
    alone_make(&a);
    a.batch.lora = NULL;
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "batch.lora is NULL, config.lora is 2");
    a.batch.lora = &lora;
    lora.b = NULL;
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "lora.b is NULL");
    lora.b = &of_b;
    of_a.dtype = COLO_F64;
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "lora.a: dtype f64, expected f32");
    of_a.dtype = COLO_F32;
    of_a.shape[1] = H - 1;
    assert_fails(alone_forward(&a), COLO_ERR_SHAPE,
                 "lora.a: [2, 2], rows 3 elements apart, expected");
    of_a.shape[1] = H;
    of_b.shape[0] = V - 1;
    assert_fails(alone_forward(&a), COLO_ERR_SHAPE, "expected [10, 2]");
    of_b.shape[0] = V;
    of_b.mem = COLO_MEM_CUDA;
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "lora.b: memory kind 1");
    of_b.mem = COLO_MEM_HOST;
    a.saved.struct_size = offsetof(colo_linear_logprob_saved_t, lora_a);
    assert_fails(alone_forward(&a), COLO_ERR_ARG, "linear: saved.struct_size is ");
    a.saved.struct_size = sizeof a.saved;
    assert_ok(alone_forward(&a));
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "d_lora_a is NULL, config.lora is 2");
    a.grads.d_lora_a = &d_a;
    a.grads.d_lora_b = &d_b;
    a.grads.struct_size = offsetof(colo_linear_logprob_grads_t, d_lora_a);
    assert_fails(alone_backward(&a), COLO_ERR_ARG, "linear: grads.struct_size is ");
    a.grads.struct_size = sizeof a.grads;
    d_a.stride[0] = H + 1;
    assert_fails(alone_backward(&a), COLO_ERR_SHAPE, "expected [2, 3], contiguous");
    d_a.stride[0] = H;
    version++;
    assert_fails(alone_backward(&a), COLO_ERR_MODIFIED, "a LoRA was written");
    version--;
    assert_ok(alone_backward(&a));
}

/* Pipelines have several batches on their way: each forward's backward is its own. */
T_CASE(forwards_may_wait_for_their_backward)
{
    uint64_t rng = t_seed() + 5;
    T_ENDS(alone_free) alone_t a;
    float other[T * H], want[T * H];
    alone_init(&a, T, V, H, NULL);
    for (int i = 0; i < T * H; i++) {
        a.h[i] = (float)t_uniform(&rng);
        other[i] = (float)t_uniform(&rng);
    }
    for (int i = 0; i < V * H; i++)
        a.w[i] = (float)t_uniform(&rng) - 0.5f;
    assert_ok(alone_bind(&a));
    assert_ok(alone_forward(&a));
    assert_ok(alone_backward(&a));
    memcpy(want, a.d_h, sizeof want);

    assert_ok(alone_forward(&a));
    colo_linear_logprob_saved_t first = a.saved, second = {COLO_LINEAR_LOGPROB_SAVED_INIT};
    COLO_AUTOFREE unsigned char *buffer = aligned_alloc(256, 1 << 16);
    colo_tensor_t hidden = colo_tensor_host(other, COLO_F32, 2, (int64_t[]){T, H});
    colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &hidden, &a.target, -1,
                                         NULL};
    assert_ok(colo_linear_logprob_forward(a.linear, &batch, &a.out, &second, buffer, a.work, NULL));
    a.saved = second;
    assert_ok(alone_backward(&a));
    assert_memory_not_equal(a.d_h, want, sizeof want);
    a.saved = first;
    assert_ok(alone_backward(&a));
    assert_memory_equal(a.d_h, want, sizeof want);
}

/* ---- refusals, with others waiting ---- */

enum { WITHOUT = 3, WITHOUT_LORA, OTHER_LORA };

typedef struct peers {
    int what; /* WITHOUT: a backward adds up gradients of hidden on rank 0 of tp alone;
                 WITHOUT_LORA: of a LoRA; OTHER_LORA: rank 1 has one of another rank; at level check
               */
    int32_t check;
    const char *words;
    colo_status_t st[4], again[4];
    bool written[4], said[4];
} peers_t;

static colo_status_t one_of_four(colo_comm_t *world, void *arg)
{
    peers_t *p = arg;
    const int me = colo_comm_rank(world), r = me % 2;
    colo_grid_t grid;
    T_ENDS(colo_comm_destroy) colo_comm_t *tp = NULL, *dp = NULL;
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
    float h[T * H] = {0}, w[V * H] = {0}, logp[T];
    int64_t targets[T] = {0};
    rank_try(colo_comm_set_timeout(world, 20000));
    rank_try(colo_comm_set_check(world, p->what == 2 ? 2 : p->check));
    rank_try(colo_grid_parse(&grid, "tp=2,dp=2", 4));
    rank_try(colo_comm_split(world, &grid, "tp", &tp));
    rank_try(colo_comm_split(world, &grid, "dp", &dp));
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V / 2, .hidden = H};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    lc.logprob.logits.vocab = V;
    lc.logprob.logits.vocab_start = r * V / 2;
    lc.logprob.logits.temperature = p->what == 1 && r ? 0.5 : 1;
    lc.d_hidden = p->what == WITHOUT ? COLO_D_HIDDEN_ALL_REDUCE : COLO_D_HIDDEN_PARTIAL;
    lc.frozen_hidden = p->what == WITHOUT && r;
    lc.lora = p->what == OTHER_LORA ? 1 + r : p->what == WITHOUT_LORA;
    lc.frozen_lora = p->what == WITHOUT_LORA && r;
    const int64_t of_a[2] = {lc.lora, H}, of_b[2] = {V / 2, lc.lora};
    const colo_tensor_t a = colo_tensor_host(w, COLO_F32, 2, of_a),
                        b = colo_tensor_host(w, COLO_F32, 2, of_b);
    const colo_lora_t lora = {&a, &b, 1};
    rank_try(colo_lm_head_create(&head, &hc, dp));
    rank_try(colo_linear_logprob_create(&linear, &lc, head, tp));
    int64_t first, rows;
    colo_lm_head_rows(head, &first, &rows);
    COLO_AUTOFREE unsigned char *gathered = aligned_alloc(256, 1024),
                                *work = aligned_alloc(256, 1 << 20),
                                *kept = aligned_alloc(256, 1 << 20);
    colo_linear_logprob_saved_t saved = {COLO_LINEAR_LOGPROB_SAVED_INIT};
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 2, (int64_t[]){rows, H});
    colo_tensor_t hidden = colo_tensor_host(h, COLO_F32, 2, (int64_t[]){T, H});
    colo_tensor_t target = colo_tensor_host(targets, COLO_I64, 1, (int64_t[]){T});
    colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, &hidden, &target, -1,
                                         NULL};
    batch.lora = lc.lora ? &lora : NULL;
    const colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = T_TENSOR(logp, COLO_F32, T)};
    logp[0] = 77;
    rank_try(colo_lm_head_bind(head, &weight, NULL, gathered));
    if ((p->what == 0 || p->what == 2) && me == 3)
        hidden.shape[1] = H + 1;
    const bool saves = p->what >= WITHOUT;
    p->st[me] = colo_linear_logprob_forward(linear, &batch, &out, saves ? &saved : NULL,
                                            saves ? kept : NULL, work, NULL);
    p->said[me] = p->words && strstr(colo_last_error(), p->words);
    p->written[me] = logp[0] != 77;
    hidden.shape[1] = H;
    if (p->what == 2)
        p->again[me] = colo_linear_logprob_forward(linear, &batch, &out, NULL, NULL, work, NULL);
    return COLO_OK;
}

T_CASE(a_rank_with_wrong_arguments_wakes_those_of_both_groups)
{
    peers_t p = {.what = 0, .check = 1};
    colo_status_t st = t_run_ranks(4, one_of_four, &p, sizeof p);
    assert_true(st == COLO_OK || st == COLO_ERR_PEER);
    assert_int_equal(p.st[3], COLO_ERR_SHAPE);
    assert_int_equal(p.st[1], COLO_ERR_PEER); /* its replica, in the head's gather */
    assert_int_equal(p.st[2], COLO_ERR_PEER); /* the other half of its vocabulary */
    assert_int_equal(p.st[0], COLO_ERR_PEER);
    for (int r = 0; r < 4; r++)
        assert_false(p.written[r]);
}

T_CASE(at_check_2_both_groups_live_on)
{
    peers_t p = {.what = 2, .again = {COLO_ERR_ARG, COLO_ERR_ARG, COLO_ERR_ARG, COLO_ERR_ARG}};
    assert_ok(t_run_ranks(4, one_of_four, &p, sizeof p));
    assert_int_equal(p.st[3], COLO_ERR_SHAPE);
    for (int r = 0; r < 4; r++) {
        assert_true(r == 3 || p.st[r] == COLO_ERR_PEER);
        assert_false(p.written[r]);
        assert_int_equal(p.again[r], COLO_OK);
    }
}

T_CASE(ranks_with_another_config_all_get_mismatch)
{
    peers_t p = {.what = 1, .check = 1, .words = "rank 1 has another config"};
    assert_ok(t_run_ranks(4, one_of_four, &p, sizeof p));
    for (int r = 0; r < 4; r++) {
        assert_int_equal(p.st[r], COLO_ERR_MISMATCH);
        assert_true(p.said[r]);
        assert_false(p.written[r]);
    }
}

/* With COLO_CHECK=2 before anything moves, between GPUs, too. */
T_CASE(a_backward_that_some_ranks_do_not_come_to_is_a_mismatch_in_forward)
{
    for (int32_t check = 0; check < 3; check++) {
        peers_t p = {.what = WITHOUT,
                     .check = check,
                     .words = check == 2
                                  ? "rank 1 of 'tp' has linear logprob forward, rank 0 linear "
                                    "logprob forward, whose backward adds up gradients of hidden"
                                  : "rank 1 adds up no gradients of hidden in backward, rank 0 "
                                    "does; the hidden states require grad on all ranks"};
        assert_ok(t_run_ranks(4, one_of_four, &p, sizeof p));
        for (int r = 0; r < 4; r++) {
            assert_int_equal(p.st[r], COLO_ERR_MISMATCH);
            assert_true(p.said[r]);
            assert_false(p.written[r]);
        }
    }
}

T_CASE(loras_of_which_ranks_do_not_all_get_gradients_are_a_mismatch_in_forward)
{
    static const char *const words[2][2] = {
        {"rank 1 adds up no gradients of a LoRA in backward, rank 0 does; its factors require grad",
         "rank 0 linear logprob forward, whose backward adds up gradients of a LoRA"},
        {"rank 1 has a LoRA of rank 2, rank 0 one of rank 1",
         "rank 1 has a LoRA of rank 2, rank 0 one of rank 1"}};
    for (int i = 0; i < 2; i++)
        for (int32_t check = 0; check < 3; check++) {
            peers_t p = {.what = WITHOUT_LORA + i, .check = check, .words = words[i][check == 2]};
            assert_ok(t_run_ranks(4, one_of_four, &p, sizeof p));
            for (int r = 0; r < 4; r++) {
                assert_int_equal(p.st[r], COLO_ERR_MISMATCH);
                assert_true(p.said[r]);
                assert_false(p.written[r]);
            }
        }
}

/* In every mode and for any chunks; a target of the last rank, in the last row, makes it legal. */
T_CASE(a_whole_head_on_every_rank_is_refused)
{
    uint64_t rng = t_seed() + 7;
    for (int i = 0; i < 24; i++) {
        T_ENDS(linear_case_free) linear_case_t c;
        const int32_t ranks = i / 12 ? 4 : 2;
        const int64_t each = 16, vocab = each * ranks, hidden = 6, tokens = 8;
        linear_case_init(&c, ranks, 1, tokens, vocab, hidden, i % 2 ? COLO_F32 : COLO_F64, &rng);
        linear_case_options(&c, LINEAR_BIAS);
        linear_case_mode(&c, i / 2 % 3);
        linear_case_shard(&c, SHARD_EVEN);
        c.config.logprob.chunk_size = i / 6 % 2 ? 3 : 0;
        for (int64_t v = 0; v < vocab; v++)
            c.b[v] = c.b[v % each];
        for (int64_t k = 0; k < vocab * hidden; k++)
            c.w[k] = c.w[k % (each * hidden)];
        for (int64_t t = 0; t < tokens; t++)
            c.targets[0][t] %= each;
        assert_fails(linear_case_run(&c), COLO_ERR_MISMATCH,
                     t_text("linear: these are the same logits on %d ranks; pass tp_group=None",
                            (int)ranks));
        c.targets[0][tokens - 1] = vocab - 1;
        linear_case_judge(&c, 1, t_text("case %d with a target behind the first rank's", i));
    }
}

T_CASE_ON(4, vocabulary_and_head_share_this_rank_alone)
{
    colo_grid_t grid;
    T_ENDS(colo_comm_destroy) colo_comm_t *tp = NULL, *dp = NULL;
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *of_all = NULL, *of_tp = NULL, *of_dp = NULL;
    T_ENDS(colo_linear_logprob_destroy) colo_linear_logprob_t *linear = NULL;
    rank_try(colo_grid_parse(&grid, "tp=2,dp=2", 4));
    rank_try(colo_comm_split(world, &grid, "tp", &tp));
    rank_try(colo_comm_split(world, &grid, "dp", &dp));
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V / 2, .hidden = H};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    lc.logprob.logits.vocab = V;
    lc.logprob.logits.vocab_start = colo_comm_rank(tp) * V / 2;
    rank_try(colo_lm_head_create(&of_all, &hc, world));
    rank_try(colo_lm_head_create(&of_tp, &hc, tp));
    rank_try(colo_lm_head_create(&of_dp, &hc, dp));
    rank_check(colo_linear_logprob_create(&linear, &lc, of_all, tp) == COLO_ERR_ARG && !linear);
    rank_check(strstr(colo_last_error(), "2 ranks of group are in the head's group, too") != NULL);
    rank_check(colo_linear_logprob_create(&linear, &lc, of_tp, tp) == COLO_ERR_ARG && !linear);
    rank_try(colo_linear_logprob_create(&linear, &lc, of_dp, tp));
    return COLO_OK;
}

T_MAIN("loss/linear_special")
