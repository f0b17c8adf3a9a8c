/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_alone.h - one small case of the lm_head path on a group of one rank, set up to succeed, so
 * that a test can change one thing, or look at what a step takes.
 */
#ifndef TESTS_LOSS_LINEAR_ALONE_H
#define TESTS_LOSS_LINEAR_ALONE_H

#include "loss/linear_case.h"

typedef struct alone {
    colo_lm_head_t *head;
    colo_linear_logprob_t *linear;
    colo_linear_logprob_config_t config;
    float *h, *w, *d_h, *d_w, *logp, *entropy; /* zeros, but d_h: CANARY */
    int64_t *targets;
    uint64_t hidden_version, weight_version;
    colo_tensor_t hidden, target, weight, dh, dw, of_logp, of_entropy;
    colo_linear_logprob_batch_t batch;
    colo_logprob_out_t out;
    colo_linear_logprob_grads_t grads;
    colo_linear_logprob_upstream_t up;
    colo_linear_logprob_saved_t saved;
    void *buffer, *work, *gathered;
    void *all[10];
    int count;
} alone_t;

static inline void *alone_take(alone_t *a, size_t bytes)
{
    void *p = t_aligned(bytes + 1);
    memset(p, 0, bytes);
    return a->all[a->count++] = p;
}

/* An object of a->config. */
static inline void alone_make(alone_t *a)
{
    colo_linear_logprob_destroy(&a->linear);
    assert_ok(colo_linear_logprob_create(&a->linear, &a->config, a->head, t_self()));
}

/* Of a head of @vocab rows that @shards hold; NULL: a resident one. d_w has room for a row more. */
static inline void alone_init(alone_t *a, int64_t tokens, int64_t vocab, int64_t hidden,
                              colo_comm_t *shards)
{
    const size_t t = (size_t)tokens, v = (size_t)vocab, h = (size_t)hidden, f = sizeof(float);
    memset(a, 0, sizeof *a);
    a->config =
        (colo_linear_logprob_config_t){COLO_LINEAR_LOGPROB_CONFIG_INIT, .d_weight_add = true};
    a->config.logprob.logits.vocab = vocab;
    colo_lm_head_config_t hc = {COLO_LM_HEAD_CONFIG_INIT, .rows = vocab, .hidden = hidden};
    assert_ok(colo_lm_head_create(&a->head, &hc, shards));
    alone_make(a);
    a->h = alone_take(a, t * h * f);
    a->w = alone_take(a, v * h * f);
    a->d_h = memset(alone_take(a, t * h * f), CANARY, t * h * f);
    a->d_w = alone_take(a, (v + 1) * h * f);
    a->logp = alone_take(a, t * f);
    a->entropy = alone_take(a, t * f);
    a->targets = alone_take(a, t * sizeof *a->targets);
    a->buffer = alone_take(a, 1 << 18);
    a->work = alone_take(a, 1 << 21);
    a->gathered = alone_take(a, colo_lm_head_gathered_size(a->head));
    a->hidden = colo_tensor_host(a->h, COLO_F32, 2, (int64_t[]){tokens, hidden});
    a->hidden.version = &a->hidden_version;
    a->weight = colo_tensor_host(a->w, COLO_F32, 2, (int64_t[]){vocab, hidden});
    a->weight.version = &a->weight_version;
    a->target = colo_tensor_host(a->targets, COLO_I64, 1, &tokens);
    a->dh = colo_tensor_host(a->d_h, COLO_F32, 2, (int64_t[]){tokens, hidden});
    a->dw = colo_tensor_host(a->d_w, COLO_F32, 2, (int64_t[]){vocab, hidden});
    a->batch = (colo_linear_logprob_batch_t){COLO_LINEAR_LOGPROB_BATCH_INIT, &a->hidden, &a->target,
                                             -1, NULL};
    a->of_logp = colo_tensor_host(a->logp, COLO_F32, 1, &tokens);
    a->of_entropy = colo_tensor_host(a->entropy, COLO_F32, 1, &tokens);
    a->out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT, .logp = &a->of_logp};
    a->saved = (colo_linear_logprob_saved_t){COLO_LINEAR_LOGPROB_SAVED_INIT};
    a->grads = (colo_linear_logprob_grads_t){COLO_LINEAR_LOGPROB_GRADS_INIT, &a->dh, &a->dw, NULL};
    a->up = (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = 1};
}

static inline void alone_free(alone_t *a)
{
    colo_linear_logprob_destroy(&a->linear);
    colo_lm_head_destroy(&a->head);
    while (a->count > 0)
        free(a->all[--a->count]);
}

static inline colo_status_t alone_bind(alone_t *a)
{
    return colo_lm_head_bind(a->head, &a->weight, NULL,
                             colo_lm_head_group(a->head) ? a->gathered : NULL);
}

static inline colo_status_t alone_forward(alone_t *a)
{
    return colo_linear_logprob_forward(a->linear, &a->batch, &a->out, &a->saved, a->buffer, a->work,
                                       NULL);
}

static inline colo_status_t alone_early(alone_t *a)
{
    return colo_linear_logprob_early(a->linear, &a->batch, &a->up, &a->out, &a->saved, a->buffer,
                                     a->work, NULL);
}

static inline colo_status_t alone_backward(alone_t *a)
{
    return colo_linear_logprob_backward(a->linear, &a->saved, &a->up, &a->grads, a->work, NULL);
}

#endif
