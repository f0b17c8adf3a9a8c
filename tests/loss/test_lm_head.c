/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lm_head.c - the sharded head by itself: which rank holds which rows, what a gather brings,
 * the three states, and that gradients come back summed in rank order. Values say where they come
 * from.
 */
#include "harness/harness.h"

#include "core/error.h"

#include <math.h>

enum { MOST = 8 };

typedef struct world {
    int64_t rows, hidden;
    bool flat, bias, add;
    colo_dtype_t grad_dtype;
    int64_t first[MOST], count[MOST];
    bool gathered[MOST], reduced[MOST], states[MOST];
    colo_comm_stats_t stats[MOST];
} world_t;

static float value(int64_t row, int64_t column)
{
    return (float)(1000 * row + column);
}

/* rank r's part of the gradient of one element: sums in another order differ */
static float part(int r, int64_t row, int64_t column)
{
    return (float)(sin((double)(r * 7919 + row * 31 + column)) * pow(10, r % 5));
}

static float in_rank_order(int ranks, int64_t row, int64_t column)
{
    float sum = part(0, row, column);
    for (int r = 1; r < ranks; r++)
        sum += part(r, row, column);
    return sum;
}

/* Are the rows there those from row @first on? */
static bool whole(const world_t *w, const colo_tensor_t *weight, const colo_tensor_t *bias,
                  int64_t first)
{
    bool ok = weight->shape[0] == w->rows && weight->shape[1] == w->hidden;
    for (int64_t i = 0; i < w->rows; i++) {
        for (int64_t j = 0; j < w->hidden; j++)
            ok = ok && ((float *)weight->data)[i * weight->stride[0] + j] == value(first + i, j);
        ok =
            ok && (!w->bias || ((float *)bias->data)[i * bias->stride[0]] == value(first + i, 500));
    }
    return ok;
}

/* Lines of a part of the flattened weight have one element each. */
static int64_t width_of(const world_t *w)
{
    return w->flat ? 1 : w->hidden;
}

/* Lines of a part, as long on all ranks if it is flat: with padding that no rank may read. */
static int64_t lines_of(const world_t *w, int me, int ranks)
{
    return w->flat ? (w->rows * w->hidden + ranks - 1) / ranks : w->count[me];
}

static colo_status_t gradients(world_t *w, colo_lm_head_t *head, int me, int ranks)
{
    const int64_t H = w->hidden, n = w->count[me], wide = width_of(w), all = lines_of(w, me, ranks);
    COLO_AUTOFREE float *dw = calloc((size_t)(all * wide) + 1, sizeof *dw),
                        *db = calloc((size_t)n + 1, sizeof *db);
    for (int64_t i = 0; i < all * wide; i++)
        dw[i] = w->add ? 0.5f : NAN;
    for (int64_t i = 0; i < n; i++)
        db[i] = w->add ? 0.5f : NAN;
    colo_tensor_t d_w = colo_tensor_host(dw, COLO_F32, w->flat ? 1 : 2, (int64_t[]){all, H});
    colo_tensor_t d_b = colo_tensor_host(db, COLO_F32, 1, &n);
    colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, &d_w, w->bias ? &d_b : NULL, w->add};
    COLO_AUTOFREE void *workspace = t_aligned(colo_lm_head_reduce_size(head, &grads) + 1);
    colo_tensor_t fw, fb;
    rank_try(colo_lm_head_gradient(head, &grads, workspace, NULL, &fw, &fb));
    for (int64_t i = 0; i < w->rows; i++) {
        for (int64_t j = 0; j < H; j++)
            ((float *)fw.data)[i * fw.stride[0] + j] += part(me, i, j);
        if (w->bias)
            ((float *)fb.data)[i * fb.stride[0]] += part(me, i, 900);
    }
    rank_try(colo_lm_head_reduce(head, &grads, workspace, NULL));
    bool ok = true;
    const float before = w->add ? 0.5f : 0;
    for (int64_t i = 0; i < all * wide; i++) {
        const int64_t at = w->first[me] * wide + i;
        ok = ok && (i < n * wide ? dw[i] == before + in_rank_order(ranks, at / H, at % H)
                    : w->add     ? dw[i] == 0.5f
                                 : isnan(dw[i]));
    }
    for (int64_t i = 0; i < n && w->bias; i++)
        ok = ok && db[i] == before + in_rank_order(ranks, w->first[me] + i, 900);
    w->reduced[me] = ok;
    return COLO_OK;
}

/* Rows of the weight, or elements [me P, (me + 1) P) of the flattened one, as DeepSpeed holds them:
 * the second time they are bound without padding. */
static colo_status_t sharded(colo_comm_t *world, void *arg)
{
    world_t *w = arg;
    const int me = colo_comm_rank(world), ranks = colo_comm_size(world);
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = w->rows, .hidden = w->hidden,
                                    .has_bias = w->bias};
    if (w->flat)
        config.partition = COLO_LM_HEAD_FLAT;
    rank_try(colo_lm_head_create(&head, &config, world));
    colo_lm_head_rows(head, &w->first[me], &w->count[me]);
    const int64_t n = w->count[me], H = w->hidden, wide = width_of(w), all = lines_of(w, me, ranks),
                  step = w->flat ? 1 : H + 3, /* rows at a stride */
        place = w->bias ? (H + 4) / 4 * 4 : H;
    COLO_AUTOFREE float *weight = calloc((size_t)(all * step) + 1, sizeof *weight),
                        *bias = calloc((size_t)n + 1, sizeof *bias);
    for (int64_t i = 0; i < all * wide; i++) {
        const int64_t at = w->first[me] * wide + i;
        weight[i / wide * step + i % wide] = i < n * wide ? value(at / H, at % H) : NAN;
    }
    for (int64_t i = 0; i < n; i++)
        bias[i] = value(w->first[me] + i, 500);
    colo_tensor_t tw = colo_tensor_host(weight, COLO_F32, w->flat ? 1 : 2, (int64_t[]){all, H});
    colo_tensor_t tb = colo_tensor_host(bias, COLO_F32, 1, &n), fw, fb;
    tw.stride[0] = step;
    size_t bytes = colo_lm_head_gathered_size(head);
    COLO_AUTOFREE float *gathered = t_aligned(bytes + 1);
    colo_comm_stats_reset(world);

    bool ok = true, right = true;
    for (int bind = 0; bind <= w->flat; bind++) {
        tw.shape[0] = bind ? n : all;
        rank_try(colo_lm_head_bind(head, &tw, w->bias ? &tb : NULL, gathered));
        ok = ok && colo_lm_head_state(head) == COLO_LM_HEAD_NOT_AVAILABLE;
        for (int rep = 0; rep < 3; rep++) { /* start and finish; acquire; acquire what is there */
            if (rep == 0)
                rank_try(colo_lm_head_start(head, NULL));
            ok = ok && (rep || colo_lm_head_state(head) == COLO_LM_HEAD_IN_FLIGHT);
            if (rep == 0)
                rank_try(colo_lm_head_finish(head, NULL, &fw, &fb));
            else
                rank_try(colo_lm_head_acquire(head, NULL, &fw, &fb));
            ok = ok && colo_lm_head_state(head) == COLO_LM_HEAD_AVAILABLE;
            right = right && fw.ndim == 2 && whole(w, &fw, &fb, 0);
            if (rep == 1)
                continue;
            rank_try(colo_lm_head_release(head, NULL));
            ok = ok && colo_lm_head_state(head) == COLO_LM_HEAD_NOT_AVAILABLE;
            memset(gathered, 0xff, bytes); /* no rank has what is released */
        }
    }
    /* A shard that lies where it is gathered stays there; the place is not this rank's any more
     * once the shard is bound elsewhere. */
    for (int rep = 0; rep < 3 && !w->flat; rep++) {
        tw.data = rep < 2 ? gathered + w->first[me] * place : weight;
        tw.stride[0] = rep < 2 ? place : step;
        memset(gathered, 0xff, bytes);
        rank_try(colo_lm_head_bind(head, &tw, w->bias ? &tb : NULL, gathered));
        for (int64_t i = 0; i < n * H; i++)
            ((float *)tw.data)[i / H * tw.stride[0] + i % H] =
                value(w->first[me] + i / H + rep, i % H);
        for (int64_t i = 0; i < n; i++)
            bias[i] = value(w->first[me] + i + rep, 500);
        rank_try(colo_lm_head_acquire(head, NULL, &fw, &fb));
        right = right && whole(w, &fw, &fb, rep);
        rank_try(colo_lm_head_release(head, NULL));
    }
    w->gathered[me] = right;
    w->states[me] = ok;
    rank_try(gradients(w, head, me, ranks));
    t_comm_stats(world, &w->stats[me]);
    return COLO_OK;
}

static void of_any_size(bool flat)
{
    for (int ranks = 1; ranks <= MOST; ranks++)
        for (int64_t rows = 0; rows <= 13; rows += rows < 3 ? 1 : 5)
            for (int bits = 0; bits < 4; bits += 1 + flat) {
                world_t w = {
                    .rows = rows, .hidden = 5, .flat = flat, .bias = bits & 1, .add = bits & 2};
                assert_ok(t_run_ranks(ranks, sharded, &w, sizeof w));
                const int64_t all = flat ? rows * w.hidden : rows, each = (all + ranks - 1) / ranks;
                int64_t begin = 0;
                for (int r = 0; r < ranks; r++) {
                    const colo_comm_stats_t *s = &w.stats[r];
                    assert_int_equal(w.first[r], begin);
                    assert_true(w.count[r] == each || begin + w.count[r] == all);
                    begin += w.count[r];
                    if (!w.gathered[r] || !w.reduced[r] || !w.states[r])
                        fail_msg("%d ranks, %d rows, %d: rank %d gathered %d, reduced %d, states "
                                 "%d",
                                 ranks, (int)rows, bits, r, w.gathered[r], w.reduced[r],
                                 w.states[r]);
                    /* weight and bias together; the third acquire found it there */
                    assert_int_equal(s->ops[COLO_OP_ALL_GATHER][COLO_CATEGORY_HEAD], flat ? 4 : 5);
                    assert_int_equal(s->ops[COLO_OP_REDUCE_SCATTER][COLO_CATEGORY_HEAD], 1);
                }
                assert_int_equal(begin, all);
            }
}

T_CASE(shards_of_any_size_gather_and_reduce)
{
    of_any_size(false);
}

T_CASE(flat_parts_of_any_size_gather_and_reduce)
{
    of_any_size(true);
}

T_CASE(a_flat_part_of_another_size_is_refused)
{
    colo_comm_t *self = t_self();
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 4, .hidden = 3,
                                    .partition = COLO_LM_HEAD_FLAT};
    static _Alignas(256) unsigned char memory[256];
    float w[12] = {0};
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 1, (int64_t[]){11});
    assert_fails(colo_lm_head_create(&head, &config, NULL), COLO_ERR_ARG,
                 "a flat partition with no group, expected one");
    config.has_bias = true;
    assert_fails(colo_lm_head_create(&head, &config, self), COLO_ERR_ARG,
                 "a flat partition with a bias, expected none");
    config.has_bias = false;
    config.partition = 2;
    assert_fails(colo_lm_head_create(&head, &config, self), COLO_ERR_ARG, "partition 2 is unknown");
    config.partition = COLO_LM_HEAD_FLAT;
    assert_ok(colo_lm_head_create(&head, &config, self));
    assert_fails(colo_lm_head_bind(head, &weight, NULL, memory), COLO_ERR_SHAPE,
                 "11 elements, expected 1 axis of 12 or 12, elements 0 to 12 of 4 x 3");
    weight.shape[0] = 12;
    weight.data = memory + 4;
    assert_fails(colo_lm_head_bind(head, &weight, NULL, memory), COLO_ERR_ARG, "lies in gathered");
    weight.data = memory;
    assert_ok(colo_lm_head_bind(head, &weight, NULL, memory));
}

T_CASE(a_resident_head_is_always_there_and_moves_nothing)
{
    colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 4, .hidden = 3};
    float w[12] = {1, 2, 3}, d[12] = {5};
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 2, (int64_t[]){4, 3}), view, bias, dv, db;
    colo_tensor_t d_weight = colo_tensor_host(d, COLO_F32, 2, (int64_t[]){4, 3});
    colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, &d_weight, NULL, true};
    int64_t first, count;
    assert_ok(colo_lm_head_create(&head, &config, NULL));
    assert_null(colo_lm_head_group(head));
    assert_int_equal(colo_lm_head_gathered_size(head), 0);
    colo_lm_head_rows(head, &first, &count);
    assert_true(first == 0 && count == 4);
    assert_fails(colo_lm_head_acquire(head, NULL, &view, &bias), COLO_ERR_STATE,
                 "no weight is bound");
    assert_ok(colo_lm_head_bind(head, &weight, NULL, NULL));
    assert_ok(colo_lm_head_start(head, NULL));
    assert_ok(colo_lm_head_finish(head, NULL, &view, &bias));
    assert_true(view.data == w && !bias.data);
    assert_ok(colo_lm_head_release(head, NULL));
    assert_int_equal(colo_lm_head_state(head), COLO_LM_HEAD_AVAILABLE);
    assert_int_equal(colo_lm_head_reduce_size(head, &grads), 0);
    assert_ok(colo_lm_head_gradient(head, &grads, NULL, NULL, &dv, &db));
    assert_true(dv.data == d && d[0] == 5);
    assert_ok(colo_lm_head_reduce(head, &grads, NULL, NULL));
    grads.add = false;
    assert_ok(colo_lm_head_gradient(head, &grads, NULL, NULL, &dv, &db));
    assert_true(dv.data == d && d[0] == 0);
    colo_lm_head_destroy(&head);
    assert_null(head);
}

/* A bf16 head's gradient, stored: summed in fp32, rounded once. */
T_CASE(half_gradients_are_summed_in_f32)
{
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 1, .hidden = 2,
                                    .dtype = COLO_BF16};
    uint16_t w[2] = {0}, d[2] = {0x7fc0, 0x7fc0};
    colo_tensor_t weight = colo_tensor_host(w, COLO_BF16, 2, (int64_t[]){1, 2}), dv, db;
    colo_tensor_t d_weight = colo_tensor_host(d, COLO_BF16, 2, (int64_t[]){1, 2});
    colo_lm_head_grads_t grads = {COLO_LM_HEAD_GRADS_INIT, &d_weight, NULL, true};
    static _Alignas(256) unsigned char workspace[256];
    assert_ok(colo_lm_head_create(&head, &config, NULL));
    assert_ok(colo_lm_head_bind(head, &weight, NULL, NULL));
    assert_fails(colo_lm_head_gradient(head, &grads, workspace, NULL, &dv, &db), COLO_ERR_ARG,
                 "cannot be added to without losing digits, expected f32");
    grads.add = false;
    assert_int_equal(colo_lm_head_reduce_size(head, &grads), t_rounded(2 * sizeof(float)));
    assert_ok(colo_lm_head_gradient(head, &grads, workspace, NULL, &dv, &db));
    assert_int_equal(dv.dtype, COLO_F32);
    for (int i = 0; i < 256; i++) /* in bf16 1 + 256 * 2^-9 would stay 1 */
        ((float *)dv.data)[1] += i ? 0x1p-9f : 1;
    assert_ok(colo_lm_head_reduce(head, &grads, workspace, NULL));
    assert_int_equal(d[0], 0);
    assert_int_equal(d[1], 0x3fc0); /* 1.498 rounds to 1.5 */
}

T_CASE(misuse_is_told_with_its_numbers)
{
    colo_comm_t *self = t_self();
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 4, .hidden = 0};
    float w[12] = {0};
    static _Alignas(256) unsigned char memory[256];
    colo_tensor_t weight = colo_tensor_host(w, COLO_F32, 2, (int64_t[]){4, 3});
    assert_fails(colo_lm_head_create(&head, &config, self), COLO_ERR_ARG, "hidden is 0");
    config.hidden = 3;
    config.dtype = COLO_I32;
    assert_fails(colo_lm_head_create(&head, &config, self), COLO_ERR_ARG, "dtype i32");
    config.dtype = COLO_F32;
    config.struct_size = 3;
    assert_fails(colo_lm_head_create(&head, &config, self), COLO_ERR_ARG, "struct_size is 3");
    config.struct_size = sizeof config;
    config.rows = INT64_MAX / 4;
    assert_fails(colo_lm_head_create(&head, &config, self), COLO_ERR_ARG, "passes 2^63 bytes");
    config.rows = 4;
    assert_ok(colo_lm_head_create(&head, &config, self));
    assert_fails(colo_lm_head_start(head, NULL), COLO_ERR_STATE, "no weight is bound");
    assert_fails(colo_lm_head_bind(head, &weight, &weight, memory), COLO_ERR_ARG,
                 "bias is given, the head has no bias");
    assert_fails(colo_lm_head_bind(head, &weight, NULL, NULL), COLO_ERR_ARG, "needs 256 bytes");
    assert_fails(colo_lm_head_bind(head, &weight, NULL, memory + 8), COLO_ERR_ARG,
                 "8 past a multiple of 256");
    weight.shape[0] = 3;
    assert_fails(colo_lm_head_bind(head, &weight, NULL, memory), COLO_ERR_SHAPE,
                 "weight: 2 axes, [3, 3], expected 2: [4, 3], rows 0 to 4 of 4");
    weight.shape[0] = 4;
    weight.data = memory + 4;
    assert_fails(colo_lm_head_bind(head, &weight, NULL, memory), COLO_ERR_ARG, "lies in gathered");
    weight.data = w;
    assert_ok(colo_lm_head_bind(head, &weight, NULL, memory));
    assert_fails(colo_lm_head_finish(head, NULL, NULL, NULL), COLO_ERR_STATE,
                 "no gather was started");
    assert_fails(colo_lm_head_release(head, NULL), COLO_ERR_STATE, "it is not available");
    assert_ok(colo_lm_head_start(head, NULL));
    assert_fails(colo_lm_head_start(head, NULL), COLO_ERR_STATE, "it is already in flight");
    assert_fails(colo_lm_head_release(head, NULL), COLO_ERR_STATE, "colo_lm_head_finish() first");
    assert_fails(colo_lm_head_bind(head, &weight, NULL, memory), COLO_ERR_STATE,
                 "bind while a gather is in flight");
    assert_ok(colo_lm_head_finish(head, NULL, NULL, NULL));
    assert_ok(colo_lm_head_release(head, NULL));
}

/* 4 rows of 3 and a bias on two ranks: rows of 4 elements there, two of each rank. */
T_CASE_ON(2, a_shard_lies_in_its_place_or_apart)
{
    static _Alignas(256) float shared[2][256];
    const int me = colo_comm_rank(world);
    float *memory = shared[me], b[2];
    const int64_t two = 2, dense[] = {2, 3};
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 4, .hidden = 3,
                                    .has_bias = true};
    colo_tensor_t w = colo_tensor_host(memory, COLO_F32, 2, dense);
    colo_tensor_t bias = colo_tensor_host(b, COLO_F32, 1, &two);
    rank_try(colo_lm_head_create(&head, &config, world));
    rank_check(colo_lm_head_gathered_size(head) == t_rounded(4 * 4 * sizeof *memory));
    struct {
        float *begin;
        int64_t step;
        bool fine;
    } tries[] = {{memory + 8 * me, 4, true},
                 {memory + 8 * me, 3, false}, /* dense, as without a bias */
                 {memory + 8 * (1 - me), 4, false},
                 {memory + 64, 3, true}, /* right behind it */
                 {memory + 63, 3, false},
                 {memory + 10, 4, false}};
    for (size_t i = 0; i < sizeof tries / sizeof *tries; i++) {
        w.data = tries[i].begin;
        w.stride[0] = tries[i].step;
        rank_check((colo_lm_head_bind(head, &w, &bias, memory) == COLO_OK) == tries[i].fine);
    }
    w.data = memory + 64;
    bias.data = memory + 63;
    rank_check(colo_lm_head_bind(head, &w, &bias, memory) == COLO_ERR_ARG);
    bias.data = memory + 80;
    rank_check(colo_lm_head_bind(head, &w, &bias, memory + 128) == COLO_OK);
    return COLO_OK;
}

T_CASE_ON(4, ranks_with_another_head_find_out_at_create)
{
    colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = 3};
    config.hidden += colo_comm_rank(world) == 2;
    rank_check(colo_lm_head_create(&head, &config, world) == COLO_ERR_MISMATCH && !head);
    rank_check(says("hidden: rank 2 of 'world' has 4, rank 0 3"));
    return COLO_OK;
}

/* Without COLO_CHECK nothing is compared; a rank that refuses its own config fails the group. */
T_CASE_ON(4, head_refused_on_one_rank_fails_the_group)
{
    const bool odd = colo_comm_rank(world) == 2;
    T_ENDS(colo_lm_head_destroy) colo_lm_head_t *head = NULL;
    colo_lm_head_config_t config = {COLO_LM_HEAD_CONFIG_INIT, .rows = 8, .hidden = odd ? 0 : 3};
    rank_try(colo_comm_set_check(world, 0));
    rank_check(colo_lm_head_create(&head, &config, world) == (odd ? COLO_ERR_ARG : COLO_OK));
    rank_check(colo_comm_barrier(world, NULL) == (odd ? COLO_ERR_ARG : COLO_ERR_PEER));
    return COLO_OK;
}

T_MAIN("loss/lm_head")
