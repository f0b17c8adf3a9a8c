/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_special.c - infinities, NaN, wrong targets, and what is refused: with its error
 * message, with nothing written, and with the other ranks awake. A bias puts an infinity into a
 * column of every row; hidden states of one token put it into a row.
 */
#include "loss/linear_case.h"

#include <math.h>

enum { T = 6, V = 10, H = 3 };

static void make(linear_case_t *c, int32_t ranks, int mode, uint64_t *rng)
{
    linear_case_init(c, ranks, 1, T, V, H, COLO_F32, rng);
    c->has_bias = true;
    c->config.mode = mode == 1 ? COLO_LINEAR_KEEP : COLO_LINEAR_LOGPROB;
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
        linear_case_t c, without;
        uint64_t again = rng;
        make(&c, 2, mode, &rng);
        make(&without, 2, mode, &again);
        c.b[V - 1] = -INFINITY;
        without.b[V - 1] = -2e4; /* e^-20000 is 0, too */
        assert_ok(linear_case_run(&c));
        assert_ok(linear_case_run(&without));
        assert_true(linear_case_same(&c, &without, true));
        assert_true(c.d_b[V - 1] == 0);
        for (int k = 0; k < H; k++)
            assert_true(c.d_w[(V - 1) * H + k] == 0);
        linear_case_free(&c);
        linear_case_free(&without);
    }
}

T_CASE(minus_infinity_at_the_target_is_its_logp)
{
    uint64_t rng = t_seed() + 1;
    for (int mode = 0; mode < 3; mode++) {
        linear_case_t c;
        make(&c, 2, mode, &rng);
        c.b[2] = -INFINITY;
        assert_ok(linear_case_run(&c));
        assert_true(c.out[0][0][2] == -INFINITY && c.out[1][0][2] == -INFINITY);
        assert_true(isfinite(c.out[0][1][2]));
        for (int k = 0; k < H; k++)
            assert_true(isfinite(c.d_h[0][2 * H + k]));
        linear_case_free(&c);
    }
}

T_CASE(a_nan_row_is_nan_on_all_ranks_and_stays_a_row)
{
    static const double bad[] = {NAN, INFINITY};
    uint64_t rng = t_seed() + 2;
    for (int mode = 0; mode < 3; mode++)
        for (int i = 0; i < 2; i++) {
            linear_case_t c;
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
            linear_case_free(&c);
        }
}

T_CASE(a_vocabulary_of_minus_infinity_is_nan)
{
    uint64_t rng = t_seed() + 3;
    linear_case_t c;
    make(&c, 2, 0, &rng);
    for (int v = 0; v < V; v++)
        c.b[v] = -INFINITY;
    assert_ok(linear_case_run(&c));
    for (int64_t t = 0; t < T; t++)
        assert_true(isnan(c.out[0][0][t]) && isnan(c.out[1][1][t]) && isnan(c.d_h[0][t * H]));
    linear_case_free(&c);
}

T_CASE(targets_outside_the_vocabulary_are_counted_and_nan)
{
    uint64_t rng = t_seed() + 4;
    for (int mode = 0; mode < 3; mode++) {
        linear_case_t c;
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
        linear_case_free(&c);
    }
}

/* ---- refusals, alone ---- */

typedef struct alone {
    colo_comm_t *self;
    colo_lm_head_t *head;
    colo_linear_logprob_t *linear;
    colo_linear_logprob_config_t config;
    float h[T * H], w[V * H], d_h[T * H], d_w[V * H], logp[T];
    int64_t targets[T];
    uint64_t hidden_version, weight_version;
    colo_tensor_t hidden, target, weight, dh, dw;
    colo_linear_batch_t batch;
    colo_logprob_out_t out;
    colo_linear_grads_t grads;
    colo_linear_upstream_t up;
    colo_linear_logprob_saved_t saved;
    unsigned char *buffer, *work;
} alone_t;

static void alone_init(alone_t *a)
{
    memset(a, 0, sizeof *a);
    a->config = (colo_linear_logprob_config_t){COLO_LINEAR_LOGPROB_CONFIG_INIT};
    a->config.logprob.logits.vocab = V;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H};
    assert_ok(colo_comm_create_self(&a->self));
    assert_ok(colo_lm_head_create(&a->head, &hc, NULL));
    assert_ok(colo_linear_logprob_create(&a->linear, &a->config, a->head, a->self));
    a->hidden = colo_tensor_host(a->h, COLO_F32, 2, (int64_t[]){T, H});
    a->hidden.version = &a->hidden_version;
    a->weight = colo_tensor_host(a->w, COLO_F32, 2, (int64_t[]){V, H});
    a->weight.version = &a->weight_version;
    a->target = colo_tensor_host(a->targets, COLO_I64, 1, (int64_t[]){T});
    a->dh = colo_tensor_host(a->d_h, COLO_F32, 2, (int64_t[]){T, H});
    a->dw = colo_tensor_host(a->d_w, COLO_F32, 2, (int64_t[]){V, H});
    a->batch = (colo_linear_batch_t){&a->hidden, &a->target, -1, NULL};
    a->out = (colo_logprob_out_t){.logp = a->logp};
    a->grads = (colo_linear_grads_t){&a->dh, &a->dw, NULL};
    a->up = (colo_linear_upstream_t){.logp = 1};
    a->buffer = aligned_alloc(256, 1 << 16);
    a->work = aligned_alloc(256, 1 << 20);
    for (int i = 0; i < T; i++)
        a->logp[i] = 77;
    for (int i = 0; i < T * H; i++)
        a->d_h[i] = 77;
}

static void alone_free(alone_t *a)
{
    colo_linear_logprob_destroy(&a->linear);
    colo_lm_head_destroy(&a->head);
    colo_comm_destroy(&a->self);
    free(a->buffer);
    free(a->work);
}

static colo_status_t forward(alone_t *a)
{
    return colo_linear_logprob_forward(a->linear, &a->batch, &a->out, &a->saved, a->buffer, a->work,
                                       NULL);
}

static colo_status_t backward(alone_t *a)
{
    return colo_linear_logprob_backward(a->linear, &a->saved, &a->up, &a->grads, a->work, NULL);
}

T_CASE(wrong_arguments_are_named_and_nothing_is_written)
{
    alone_t a;
    alone_init(&a);
    assert_fails(forward(&a), COLO_ERR_STATE, "no weight is bound");
    assert_ok(colo_lm_head_bind(a.head, &a.weight, NULL, NULL));
    assert_fails(backward(&a), COLO_ERR_STATE, "no forward filled it");
    a.hidden.shape[1] = H - 1;
    assert_fails(forward(&a), COLO_ERR_SHAPE, "hidden: [6, 2], expected [6, 3]");
    a.hidden.shape[1] = H;
    a.hidden.dtype = COLO_BF16;
    assert_fails(forward(&a), COLO_ERR_ARG, "hidden: dtype bf16, the head is f32");
    a.hidden.dtype = COLO_F32;
    a.target.shape[0] = T - 1;
    assert_fails(forward(&a), COLO_ERR_SHAPE, "expected [6] as the rows of hidden");
    a.target.shape[0] = T;
    a.batch.max_valid = 4;
    assert_fails(forward(&a), COLO_ERR_ARG,
                 "max_valid is 4, but 6 of 6 targets are not ignore_index");
    a.batch.max_valid = -1;
    a.out.entropy = a.logp;
    assert_fails(forward(&a), COLO_ERR_ARG, "config.want_entropy is false");
    a.out.entropy = NULL;
    a.work += 8;
    assert_fails(forward(&a), COLO_ERR_ARG, "workspace is 8 past a multiple of 256");
    a.work -= 8;
    unsigned char *buffer = a.buffer;
    a.buffer = NULL;
    assert_fails(forward(&a), COLO_ERR_ARG, "saved memory is NULL");
    a.buffer = buffer;
    for (int i = 0; i < T; i++)
        assert_true(a.logp[i] == 77);

    assert_ok(forward(&a));
    a.up.entropy = 2;
    assert_fails(backward(&a), COLO_ERR_ARG, "upstream.entropy is 2");
    a.up.entropy = 0;
    a.grads.d_hidden = NULL;
    assert_fails(backward(&a), COLO_ERR_ARG, "d_hidden is NULL, config.frozen_hidden is false");
    a.grads.d_hidden = &a.hidden;
    assert_fails(backward(&a), COLO_ERR_ARG, "d_hidden: overlaps hidden");
    a.grads.d_hidden = &a.dh;
    a.dw.dtype = COLO_F64;
    assert_fails(backward(&a), COLO_ERR_ARG, "d_weight: dtype f64, config.d_weight_dtype is f32");
    a.dw.dtype = COLO_F32;
    a.saved.memory = buffer + 8; /* a runtime brought it back from elsewhere */
    assert_fails(backward(&a), COLO_ERR_ARG, "saved memory is 8 past a multiple of 256");
    a.saved.memory = buffer;
    a.hidden_version++;
    assert_fails(backward(&a), COLO_ERR_MODIFIED, "hidden states were written");
    a.hidden_version--;
    a.weight_version = 5;
    assert_fails(backward(&a), COLO_ERR_MODIFIED, "the head was written between forward and");
    a.weight_version = 0;
    for (int i = 0; i < T * H; i++)
        assert_true(a.d_h[i] == 77);
    assert_ok(backward(&a));
    alone_free(&a);
}

T_CASE(configs_that_lose_digits_are_refused)
{
    alone_t a;
    colo_lm_head_t *half = NULL;
    colo_linear_logprob_t *none = NULL;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V, .hidden = H,
                                .dtype = COLO_BF16};
    alone_init(&a);
    assert_ok(colo_lm_head_create(&half, &hc, NULL));
    a.config.d_weight_dtype = COLO_BF16;
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, a.self), COLO_ERR_ARG,
                 "d_weight_add to bf16 would lose digits");
    a.config.d_weight_dtype = COLO_F16;
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, a.self), COLO_ERR_ARG,
                 "d_weight_dtype f16, expected f32 or the head's bf16");
    a.config.d_weight_dtype = COLO_F32;
    a.config.logits_dtype = COLO_F64;
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, a.self), COLO_ERR_ARG,
                 "logits_dtype f64, expected f32 or the head's bf16");
    a.config.logits_dtype = COLO_F32;
    a.config.keep_in_place = true;
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, a.self), COLO_ERR_ARG,
                 "keep_in_place with logits of f32 and gradients of bf16");
    a.config.keep_in_place = false;
    a.config.share_d_weight = true;
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, a.self), COLO_ERR_ARG,
                 "share_d_weight with mode 0, d_weight added of f32, a resident head");
    a.config.share_d_weight = false;
    a.config.logprob.logits.vocab = V + 1;
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, a.self), COLO_ERR_SHAPE,
                 "expected the whole vocabulary");
    assert_fails(colo_linear_logprob_create(&none, &a.config, half, NULL), COLO_ERR_ARG,
                 "group is NULL");
    assert_null(none);
    colo_lm_head_destroy(&half);
    alone_free(&a);
}

/* Pipelines have several batches on their way: each forward's backward is its own. */
T_CASE(forwards_may_wait_for_their_backward)
{
    uint64_t rng = t_seed() + 5;
    alone_t a;
    float other[T * H], want[T * H];
    alone_init(&a);
    for (int i = 0; i < T * H; i++) {
        a.h[i] = (float)t_uniform(&rng);
        other[i] = (float)t_uniform(&rng);
    }
    for (int i = 0; i < V * H; i++)
        a.w[i] = (float)t_uniform(&rng) - 0.5f;
    assert_ok(colo_lm_head_bind(a.head, &a.weight, NULL, NULL));
    assert_ok(forward(&a));
    assert_ok(backward(&a));
    memcpy(want, a.d_h, sizeof want);

    assert_ok(forward(&a));
    colo_linear_logprob_saved_t first = a.saved, second;
    unsigned char *buffer = aligned_alloc(256, 1 << 16);
    colo_tensor_t hidden = colo_tensor_host(other, COLO_F32, 2, (int64_t[]){T, H});
    colo_linear_batch_t batch = {&hidden, &a.target, -1, NULL};
    assert_ok(colo_linear_logprob_forward(a.linear, &batch, &a.out, &second, buffer, a.work, NULL));
    a.saved = second;
    assert_ok(backward(&a));
    assert_memory_not_equal(a.d_h, want, sizeof want);
    a.saved = first;
    assert_ok(backward(&a));
    assert_memory_equal(a.d_h, want, sizeof want);
    free(buffer);
    alone_free(&a);
}

/* ---- refusals, with others waiting ---- */

typedef struct peers {
    int what;
    colo_status_t st[4], again[4];
    bool written[4], said[4];
} peers_t;

static colo_status_t one_of_four(colo_comm_t *world, void *arg)
{
    peers_t *p = arg;
    const int me = colo_comm_rank(world), r = me % 2;
    colo_grid_t grid;
    colo_comm_t *tp = NULL, *dp = NULL;
    colo_lm_head_t *head = NULL;
    colo_linear_logprob_t *linear = NULL;
    float h[T * H] = {0}, w[V * H] = {0}, logp[T];
    int64_t targets[T] = {0};
    rank_try(colo_comm_set_timeout(world, 20000));
    if (p->what == 2)
        rank_try(colo_comm_set_check(world, 2));
    rank_try(colo_grid_parse(&grid, "tp=2,dp=2", 4));
    rank_try(colo_comm_split(world, &grid, "tp", &tp));
    rank_try(colo_comm_split(world, &grid, "dp", &dp));
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = V / 2, .hidden = H};
    colo_linear_logprob_config_t lc = {COLO_LINEAR_LOGPROB_CONFIG_INIT};
    lc.logprob.logits.vocab = V;
    lc.logprob.logits.vocab_start = r * V / 2;
    lc.logprob.logits.temperature = p->what == 1 && r ? 0.5 : 1;
    rank_try(colo_lm_head_create(&head, &hc, dp));
    rank_try(colo_linear_logprob_create(&linear, &lc, head, tp));
    int64_t first, rows;
    colo_lm_head_rows(head, &first, &rows);
    unsigned char *gathered = aligned_alloc(256, 1024), *work = aligned_alloc(256, 1 << 20);
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 2, (int64_t[]){rows, H});
    colo_tensor_t hidden = colo_tensor_host(h, COLO_F32, 2, (int64_t[]){T, H});
    colo_tensor_t target = colo_tensor_host(targets, COLO_I64, 1, (int64_t[]){T});
    colo_linear_batch_t batch = {&hidden, &target, -1, NULL};
    colo_logprob_out_t out = {.logp = logp};
    logp[0] = 77;
    rank_try(colo_lm_head_bind(head, &weight, NULL, gathered));
    if (p->what != 1 && me == 3)
        hidden.shape[1] = H + 1;
    p->st[me] = colo_linear_logprob_forward(linear, &batch, &out, NULL, NULL, work, NULL);
    p->said[me] = strstr(colo_last_error(), "rank 1 has another config") != NULL;
    p->written[me] = logp[0] != 77;
    hidden.shape[1] = H;
    if (p->what == 2)
        p->again[me] = colo_linear_logprob_forward(linear, &batch, &out, NULL, NULL, work, NULL);
    colo_linear_logprob_destroy(&linear);
    colo_lm_head_destroy(&head);
    colo_comm_destroy(&tp);
    colo_comm_destroy(&dp);
    free(gathered);
    free(work);
    return COLO_OK;
}

T_CASE(a_rank_with_wrong_arguments_wakes_those_of_both_groups)
{
    peers_t p = {.what = 0};
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
    peers_t p = {.what = 1};
    assert_ok(t_run_ranks(4, one_of_four, &p, sizeof p));
    for (int r = 0; r < 4; r++) {
        assert_int_equal(p.st[r], COLO_ERR_MISMATCH);
        assert_true(p.said[r]);
        assert_false(p.written[r]);
    }
}

T_MAIN("loss/linear_special")
