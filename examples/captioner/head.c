/* SPDX-License-Identifier: Apache-2.0 */
/*
 * head.c - the end of the model: final norm, head, loss; vocabulary over tp.
 *
 * Decides two things that the command line asks for. --head: every rank of dp x cp has the head's
 * rows of its tp rank, or a shard of them, gathered by colo_lm_head_t when a pass multiplies by
 * them; gradients are the same bits either way. --loss: logits in memory and colo_logprob_*, or
 * colo_linear_logprob_*, which makes them chunk by chunk. Decoding always looks at logits; with a
 * sharded head it opens it once for all bytes, because only some ranks choose.
 */
#include <string.h>

#include "rank.h"

enum { CHUNK = 64 }; /* tokens: more than one chunk a step even here */

static int64_t back_at(const cap_rank_t *r)
{
    return P_LAYER + r->cfg->model.layers * P_PER_LAYER;
}

bool cap_head_sharded(const cap_rank_t *r, int64_t i)
{
    return r->cfg->head_sharded && i == back_at(r) + B_HEAD;
}

colo_status_t cap_head_create(cap_rank_t *r)
{
    int64_t rows, cols;

    if (!r->back)
        return COLO_OK;
    cap_param_shard_shape(&r->table[back_at(r) + B_HEAD], r->dst.t, r->dst.tp, &rows, &cols);
    colo_lm_head_config_t config = {
        COLO_LM_HEAD_CONFIG_INIT, .rows = rows,      .hidden = cols,
        .dtype = COLO_F32,        .mem = r->ops.mem,
    };
    config.device = r->ops.device;
    CAP_TRY(colo_lm_head_create(&r->head, &config, r->cfg->head_sharded ? r->dst.mean_comm : NULL));
    colo_lm_head_rows(r->head, &r->head_first, &r->head_rows);
    return COLO_OK;
}

void cap_head_destroy(cap_rank_t *r)
{
    colo_linear_logprob_destroy(&r->linear);
    colo_lm_head_destroy(&r->head);
    colo_memory_destroy(&r->head_memory);
}

void *cap_take_aligned(cap_rank_t *r, size_t bytes)
{
    char *p = r->ops.take(&r->ops, (int64_t)bytes + COLO_ALIGNMENT);
    r->arena.failed = r->arena.failed || !p;
    return p ? p + (COLO_ALIGNMENT - (uintptr_t)p % COLO_ALIGNMENT) % COLO_ALIGNMENT : NULL;
}

static colo_lm_head_grads_t grads_of(const cap_rank_t *r, colo_tensor_t *d_weight)
{
    const int64_t shape[] = {r->head_rows, r->cfg->model.width};
    *d_weight = cap_view(r, r->g[back_at(r) + B_HEAD], COLO_F32, 2, shape);
    return (colo_lm_head_grads_t){COLO_LM_HEAD_GRADS_INIT, .d_weight = d_weight, .add = true};
}

/* Memory of both losses; after the parameters'. */
colo_status_t cap_head_take(cap_rank_t *r)
{
    const int64_t shape[] = {r->head_rows, r->cfg->model.width};
    colo_tensor_t weight = cap_view(r, r->w[back_at(r) + B_HEAD], COLO_F32, 2, shape), d_weight;
    colo_lm_head_grads_t grads = grads_of(r, &d_weight);
    colo_linear_logprob_config_t config = {COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    size_t forward, backward, kept;

    config.logprob = r->logprob;
    config.logprob.chunk_size = CHUNK;
    config.d_hidden = COLO_D_HIDDEN_ALL_REDUCE;
    config.mode = COLO_LINEAR_LOGPROB_LOGPROB;
    CAP_TRY(colo_linear_logprob_create(&r->linear, &config, r->head, r->dst.tp_comm));
    CAP_TRY(colo_linear_logprob_workspace_size(r->linear, COLO_LINEAR_LOGPROB_FORWARD, r->T, -1,
                                               &forward));
    CAP_TRY(colo_linear_logprob_workspace_size(r->linear, COLO_LINEAR_LOGPROB_BACKWARD, r->T, -1,
                                               &backward));
    CAP_TRY(colo_linear_logprob_saved_size(r->linear, r->T, -1, &kept));
    r->linear_work = cap_take_aligned(r, forward > backward ? forward : backward);
    r->linear_kept = cap_take_aligned(r, kept);
    r->head_sums = cap_take_aligned(r, colo_lm_head_reduce_size(r->head, &grads));
    if (r->cfg->head_sharded) /* into it GPUs that reach each other copy, during other work */
        CAP_TRY(colo_memory_alloc(r->dst.mean_comm, colo_lm_head_gathered_size(r->head),
                                  &r->head_memory));
    if (r->arena.failed)
        return COLO_ERR_NOMEM;
    return colo_lm_head_bind(r->head, &weight, NULL, colo_memory_data(r->head_memory));
}

/* ---- logits ---- */

colo_status_t cap_head_open(cap_rank_t *r)
{
    colo_tensor_t weight;

    CAP_TRY(colo_lm_head_acquire(r->head, r->ops.stream, &weight, NULL));
    r->head_w = weight.data;
    return COLO_OK;
}

colo_status_t cap_head_close(cap_rank_t *r)
{
    r->head_w = NULL;
    return colo_lm_head_release(r->head, r->ops.stream);
}

static void final_norm(cap_rank_t *r, int64_t t, const float *x)
{
    int64_t index = back_at(r);

    r->ops.norm(&r->ops, t, r->cfg->model.width, x, r->w[index + B_LNFG], r->w[index + B_LNFB],
                r->xf_hat, r->rf, r->hf);
}

void cap_head_logits(cap_rank_t *r, int64_t t, const float *x)
{
    final_norm(r, t, x);
    r->ops.linear(&r->ops, t, r->cfg->model.width, colo_lm_head_config(r->head)->rows, r->hf,
                  r->head_w, NULL, r->logits);
}

static colo_status_t logits_forward(cap_rank_t *r, const float *x, const colo_tensor_t *targets)
{
    const int64_t shape[] = {r->T, colo_lm_head_config(r->head)->rows};
    colo_tensor_t logits = cap_view(r, r->logits, COLO_F32, 2, shape);
    colo_tensor_t logp = cap_view(r, r->logp, COLO_F32, 1, &r->T);
    colo_logprob_batch_t batch = {COLO_LOGPROB_BATCH_INIT, .logits = &logits, .targets = targets};
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &logp};

    CAP_TRY(cap_head_open(r));
    cap_head_logits(r, r->T, x);
    CAP_TRY(cap_head_close(r));
    r->saved = (colo_logprob_saved_t){COLO_LOGPROB_SAVED_INIT};
    return colo_logprob_forward(&r->logprob, &batch, r->dst.tp_comm, &out, &r->saved, r->stats,
                                r->workspace, r->ops.stream);
}

static colo_status_t logits_backward(cap_rank_t *r, float each)
{
    const cap_ops_t *o = &r->ops;
    int64_t D = r->cfg->model.width, T = r->T, Vl = colo_lm_head_config(r->head)->rows;
    colo_tensor_t d_logp = cap_view(r, r->d_logp, COLO_F32, 1, &r->T);
    colo_logprob_upstream_t up = {COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &d_logp};
    colo_tensor_t d_logits = r->saved.logits; /* in place: the logits are not read again */
    colo_tensor_t d_weight, whole;
    colo_lm_head_grads_t grads = grads_of(r, &d_weight);

    for (int64_t i = 0; i < T; i++)
        r->d_logp_host[i] = r->mask[i] ? each : 0.0f;
    o->put(o, r->d_logp, r->d_logp_host, T * (int64_t)sizeof(float));
    CAP_TRY(colo_logprob_backward(&r->saved, &up, &d_logits, o->stream));
    CAP_TRY(cap_head_open(r));
    o->linear_d_input(o, T, D, Vl, r->logits, r->head_w, 0.0f, r->d_t1);
    CAP_TRY(cap_head_close(r));
    CAP_TRY(colo_lm_head_gradient(r->head, &grads, r->head_sums, o->stream, &whole, NULL));
    o->linear_d_weight(o, T, D, Vl, r->hf, r->logits, whole.data);
    CAP_TRY(colo_lm_head_reduce(r->head, &grads, r->head_sums, o->stream));
    return cap_sum(r->dst.tp_comm, r->d_t1, T * D, o->stream);
}

/* ---- without logits ---- */

static colo_tensor_t states(const cap_rank_t *r, float *data)
{
    const int64_t shape[] = {r->T, r->cfg->model.width};
    return cap_view(r, data, COLO_F32, 2, shape);
}

static colo_status_t linear_forward(cap_rank_t *r, const float *x, const colo_tensor_t *targets)
{
    colo_tensor_t hidden = states(r, r->hf);
    colo_linear_logprob_batch_t batch = {COLO_LINEAR_LOGPROB_BATCH_INIT, .hidden = &hidden,
                                         .targets = targets, .max_valid = -1};
    colo_tensor_t logp = cap_view(r, r->logp, COLO_F32, 1, &r->T);
    colo_logprob_out_t out = {COLO_LOGPROB_OUT_INIT, .logp = &logp};

    final_norm(r, r->T, x);
    r->linear_saved = (colo_linear_logprob_saved_t){COLO_LINEAR_LOGPROB_SAVED_INIT};
    return colo_linear_logprob_forward(r->linear, &batch, &out, &r->linear_saved, r->linear_kept,
                                       r->linear_work, r->ops.stream);
}

static colo_status_t linear_backward(cap_rank_t *r, float each)
{
    colo_tensor_t d_hidden = states(r, r->d_t1), d_weight;
    colo_lm_head_grads_t head = grads_of(r, &d_weight);
    colo_linear_logprob_grads_t grads = {COLO_LINEAR_LOGPROB_GRADS_INIT, .d_hidden = &d_hidden,
                                         .d_weight = head.d_weight};
    colo_linear_logprob_upstream_t up = {COLO_LINEAR_LOGPROB_UPSTREAM_INIT,
                                         .logp = (double)each}; /* of every token that counts */

    return colo_linear_logprob_backward(r->linear, &r->linear_saved, &up, &grads, r->linear_work,
                                        r->ops.stream);
}

/* ---- the step ---- */

colo_status_t cap_head_forward(cap_rank_t *r, const float *x)
{
    int64_t T = r->T;
    colo_tensor_t targets = cap_view(r, r->targets, COLO_I64, 1, &T);

    CAP_TRY(r->loss_linear ? linear_forward(r, x, &targets) : logits_forward(r, x, &targets));
    r->ops.get(&r->ops, r->nll, r->logp, T * (int64_t)sizeof(float));
    for (int64_t i = 0; i < T; i++) {
        r->mask[i] = r->targets_host[i] != r->logprob.ignore_index;
        r->nll[i] = -r->nll[i];
    }
    CAP_TRY(colo_loss_reduce(r->nll, COLO_F32, r->mask, T, r->dst.mean_host, &r->reduced, NULL));
    *r->loss = (float)r->reduced.value;
    return COLO_OK;
}

colo_status_t cap_head_backward(const colo_tensor_t *d_out, int32_t nout, const colo_tensor_t *d_in,
                                int32_t nin, void *rank)
{
    cap_rank_t *r = rank;
    int64_t index = back_at(r);
    double upstream = (double)*(const float *)d_out[0].data;
    float each = r->reduced.den ? (float)(-upstream / (double)r->reduced.den) : 0.0f;

    CAP_TRY(r->loss_linear ? linear_backward(r, each) : logits_backward(r, each));
    r->ops.norm_backward(&r->ops, r->T, r->cfg->model.width, r->d_t1, r->w[index + B_LNFG],
                         r->xf_hat, r->rf, NULL, d_in[0].data, r->g[index + B_LNFG],
                         r->g[index + B_LNFB]);
    return COLO_OK;
}
