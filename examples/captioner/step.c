/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.c - one global batch through the model, forward and backward.
 *
 * Decides the order of things: encoder, bridge, this stage's layers, loss; then back. Stages hand
 * activations and gradients over by one message; every rank of a pipeline joins every hand-over, in
 * the same order, because an exchange is collective. The gradients are those of the mean over the
 * global batch, so ranks' shares are summed over dp x cp and never divided again.
 */
#include <string.h>

#include "rank.h"

/* ---- input ---- */

static void load_patches(cap_rank_t *r, const int64_t *rows)
{
    int64_t rank = r->src.b0;

    for (int64_t i = 0; r->encodes && i < r->sb; i++) {
        float image[CAP_PATCHES * CAP_PATCH];

        cap_patches(r->cfg->data->pixels[rows[rank + i]], image);
        for (int64_t k = 0; k < r->sn; k++)
            memcpy(r->patches_host + (i * r->sn + k) * CAP_PATCH,
                   image + r->patch_at[k] * CAP_PATCH, CAP_PATCH * sizeof *image);
    }
    if (r->encodes)
        r->ops.put(&r->ops, r->patches, r->patches_host,
                   r->sb * r->sn * CAP_PATCH * (int64_t)sizeof(float));
}

void cap_put_tokens(cap_rank_t *r)
{
    r->ops.put(&r->ops, r->tokens_seen, r->tokens, r->seq.b * r->S * (int64_t)sizeof *r->tokens);
}

/* Targets: the byte after each position, from the one before the caption to the caption's NUL. The
 * roll is over whole sequences; only then they are cut over cp. */
static colo_status_t load_targets(cap_rank_t *r, const int64_t *rows)
{
    const cap_config_t *cfg = r->cfg;
    int64_t ignore = -100, shape[] = {r->seq.b, r->S}, own[] = {r->seq.b, r->n};
    colo_tensor_t all = colo_tensor_host(r->targets_all, COLO_I64, 2, shape);
    colo_tensor_t mine = colo_tensor_host(r->targets_host, COLO_I64, 2, own);

    for (int64_t k = 0; k < r->seq.b * r->S; k++)
        r->targets_all[k] = ignore;
    for (int64_t i = 0; i < r->dst.b; i++) {
        char caption[CAP_SAID];

        cap_caption_text(cfg->data, &cfg->task, rows + (r->dst.b0 + i) * cfg->task.most, caption);
        for (size_t k = 0; k <= strlen(caption); k++) {
            r->tokens[r->text_at[i] + (int64_t)k] = (unsigned char)caption[k];
            r->targets_all[r->text_at[i] + (int64_t)k] = (unsigned char)caption[k];
        }
    }
    if (!r->dst.b)
        return COLO_OK;
    CAP_TRY(colo_partition_next_token(&r->part, &all, ignore, &all, NULL));
    if (cfg->dynamic_cp)
        for (int64_t k = 0; k < r->n; k++)
            r->targets_host[k] = r->targets_all[r->pos[k]];
    else
        CAP_TRY(colo_partition_shard(&r->part, &all, 1, &mine, NULL));
    r->ops.put(&r->ops, r->targets, r->targets_host, r->T * (int64_t)sizeof *r->targets);
    return COLO_OK;
}

colo_status_t cap_load(cap_rank_t *r, const int64_t *rows, bool captions)
{
    if (r->ragged)
        CAP_TRY(cap_ragged_load(r, rows, captions));
    else
        load_patches(r, rows);
    if (!r->dst.in)
        return COLO_OK;
    memset(r->tokens, 0, (size_t)(r->seq.b * r->S) * sizeof *r->tokens);
    for (int64_t i = 0; r->ragged && i < r->dst.b; i++)
        r->tokens[r->text_at[i] - 1] = CAP_BEGIN;
    if (captions)
        CAP_TRY(load_targets(r, rows));
    cap_put_tokens(r);
    return COLO_OK;
}

/* ---- between stages ---- */

/* Stage @from gives @send to stage @to, which puts it at @recv; the other stages only take part. */
static colo_status_t hand_over(cap_rank_t *r, int64_t from, int64_t to, const float *send,
                               float *recv)
{
    bool gives = r->dst.p == from, gets = r->dst.p == to;
    colo_box_t box = {.data = gives ? (void *)send : recv,
                      .extent = {1, 1, r->T * r->cfg->model.width},
                      .stride = {0, 0, 1}};
    colo_message_t message = {.peer = (int32_t)(gives ? to : from), .nboxes = 1, .boxes = &box};

    return colo_comm_exchange(r->dst.pp_comm, gives ? &message : NULL, gives,
                              gets ? &message : NULL, gets, COLO_F32, r->ops.stream);
}

static colo_tensor_t tokens_view(const cap_rank_t *r, float *data)
{
    const int64_t shape[] = {r->T, r->cfg->model.width};
    return cap_view(r, data, COLO_F32, 2, shape);
}

/* ---- forward ---- */

colo_status_t cap_encode(cap_rank_t *r, colo_tape_t *tape)
{
    CAP_TRY(cap_encoder_forward(r));
    CAP_TRY(cap_bridge_forward(r));
    if (!tape)
        return COLO_OK;

    colo_tensor_t x = cap_x_view(r, r->enc), y = cap_y_view(r, r->y);
    colo_value_t x_value;
    CAP_TRY(colo_tape_record(tape,
                             &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, .name = "encoder",
                                                   .out = &x, .nout = 1, .out_values = &x_value,
                                                   .backward = cap_encoder_backward, .state = r}));
    return colo_tape_record(
        tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, .name = "bridge", .in = &x_value,
                                    .nin = 1, .out = &y, .nout = 1, .out_values = &r->y_value,
                                    .backward = cap_bridge_backward, .state = r});
}

/* What this stage starts from, and its value on the tape. */
static colo_status_t stage_input(cap_rank_t *r, colo_tape_t *tape, colo_value_t *value)
{
    for (int64_t p = 0; p < r->dst.p; p++)
        CAP_TRY(hand_over(r, p, p + 1, r->h_in, r->h_in));
    if (r->front)
        cap_merge_forward(r);
    if (!tape)
        return COLO_OK;

    colo_tensor_t h = tokens_view(r, r->h_in), y = cap_y_view(r, r->y);
    CAP_TRY(colo_tape_leaf(tape, r->front ? &y : &h, NULL, &r->in_value));
    *value = r->in_value;
    if (!r->front)
        return COLO_OK;
    return colo_tape_record(
        tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, .name = "merge", .in = &r->in_value,
                                    .nin = 1, .out = &h, .nout = 1, .out_values = value,
                                    .backward = cap_merge_backward, .state = r});
}

colo_status_t cap_stack(cap_rank_t *r, colo_tape_t *tape, const float **top)
{
    colo_value_t value = COLO_NO_VALUE;
    float *x = r->h_in;

    CAP_TRY(stage_input(r, tape, &value));
    for (int64_t k = 0; k < r->end_layer - r->first_layer; k++) {
        cap_layer_t *l = &r->layer[k];

        CAP_TRY(cap_layer_forward(l, x));
        x = l->out;
        if (tape) {
            colo_tensor_t out = tokens_view(r, x);
            CAP_TRY(colo_tape_record(
                tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, .name = "layer", .in = &value,
                                            .nin = 1, .out = &out, .nout = 1, .out_values = &value,
                                            .backward = cap_layer_backward, .state = l}));
        }
    }
    for (int64_t p = r->dst.p; p < r->dst.pp - 1; p++)
        CAP_TRY(hand_over(r, p, p + 1, x, x));
    r->out_value = value;
    *top = x;
    return COLO_OK;
}

/* ---- backward ---- */

static colo_status_t stack_backward(cap_rank_t *r)
{
    colo_tensor_t seed = tokens_view(r, r->d_top), d_in;

    for (int64_t p = r->dst.pp - 2; p >= r->dst.p; p--)
        CAP_TRY(hand_over(r, p + 1, p, NULL, r->d_top));
    CAP_TRY(colo_tape_backward(r->llm_tape, r->out_value, r->back ? NULL : &seed));
    CAP_TRY(colo_tape_gradient(r->llm_tape, r->in_value, &d_in));
    for (int64_t p = r->dst.p - 1; p >= 0; p--)
        CAP_TRY(hand_over(r, p + 1, p, d_in.data, NULL));
    return COLO_OK;
}

static colo_status_t encoder_backward(cap_rank_t *r)
{
    colo_tensor_t d_y = cap_y_view(r, r->no_seed);

    if (r->front)
        CAP_TRY(colo_tape_gradient(r->llm_tape, r->in_value, &d_y));
    return colo_tape_backward(r->encoder_tape, r->y_value, &d_y);
}

colo_status_t cap_forward_backward(cap_rank_t *r)
{
    colo_tape_reset(r->encoder_tape);
    colo_tape_reset(r->llm_tape);
    for (int side = 0; side < 2; side++)
        r->ops.zero(&r->ops, r->side_g[side], r->side_count[side] * (int64_t)sizeof(float));

    if (r->back) /* a sharded head comes while encoder and layers are at work */
        CAP_TRY(colo_lm_head_start(r->head, r->ops.stream));
    CAP_TRY(cap_encode(r, r->encoder_tape));
    if (r->dst.in) {
        const float *top;

        CAP_TRY(cap_stack(r, r->llm_tape, &top));
        if (r->back) {
            const int64_t one = 1;
            colo_tensor_t loss = colo_tensor_host(r->loss, COLO_F32, 1, &one);

            CAP_TRY(cap_head_forward(r, top));
            CAP_TRY(colo_tape_record(
                r->llm_tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, .name = "head",
                                                   .in = &r->out_value, .nin = 1, .out = &loss,
                                                   .nout = 1, .out_values = &r->out_value,
                                                   .backward = cap_head_backward, .state = r}));
        }
        CAP_TRY(stack_backward(r));
    }
    CAP_TRY(encoder_backward(r));

    if (r->encodes)
        CAP_TRY(cap_sum(r->src.mean_comm, r->side_g[0], r->side_count[0], r->ops.stream));
    if (r->dst.in) {
        /* the head is the last of its side; a sharded one's gradient is summed already */
        int64_t count = r->side_count[1];
        if (r->back && cap_head_sharded(r, r->nparams - 1))
            count -= r->count[r->nparams - 1];
        CAP_TRY(cap_sum(r->dst.mean_comm, r->side_g[1], count, r->ops.stream));
    }
    return COLO_OK;
}
