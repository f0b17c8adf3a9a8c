/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss_alone.h - one small case of any loss on a group of one rank, set up to succeed and painted
 * with canaries, so that a test can change one thing and see what is refused and what was written.
 */
#ifndef TESTS_LOSS_LOSS_ALONE_H
#define TESTS_LOSS_LOSS_ALONE_H

#include "loss/loss_case.h"

enum { T = 4, V = 6, K = 2, MARGIN = COLO_ALIGNMENT, ALONE_WORKSPACE = 8448 /* of sampling */ };
typedef enum { LOGPROB, GIVEN, LARGEST, DISTILL, SAMPLING, LOSSES } loss_t; /* GIVEN: top-k's ids */

typedef struct alone {
    loss_t loss;
    union {
        struct {
            size_t struct_size;
            colo_logits_options_t logits;
        };
        colo_logprob_config_t logprob;
        colo_topk_config_t topk;
        colo_distill_config_t distill;
        colo_sampling_config_t sampling;
    } cfg;
    float z[T * V], w[T * V], dz[T * V], logp[T * K], entropy[T], losses[T], ce[T], kl[T],
        up[T * K];
    uint8_t correct[T], mask[T];
    int64_t targets[T * K], chosen[T * K], n_valid, n_invalid;
    _Alignas(COLO_ALIGNMENT) double stats[T * (5 + 2 * K)];
    _Alignas(COLO_ALIGNMENT) unsigned char workspace[ALONE_WORKSPACE + MARGIN];
    uint64_t version, targets_version;
    colo_tensor_t logits, target, masked, d_logits; /* d_logits: what sampling writes, too */
    /* of outputs, and of any upstream gradient */
    colo_tensor_t of_logp, of_entropy, of_losses, of_ce, of_kl, of_correct, of_chosen, of_n_valid,
        of_n_invalid, of_up;
    colo_logprob_out_t out;
    colo_topk_out_t picks;
    colo_distill_out_t divergences;
    union {
        size_t struct_size;
        colo_logprob_saved_t logprob;
        colo_topk_saved_t topk;
        colo_distill_saved_t distill;
    } saved;
    colo_logprob_upstream_t upstream;
    colo_topk_upstream_t d_picks;
    colo_distill_upstream_t d_divergences;
    struct {
        const void *config; /* &cfg */
        colo_comm_t *group;
        const colo_tensor_t *logits, *targets;
        bool no_out, no_upstream;
        void *saved, *stats, *workspace; /* &saved; NULL: none */
    } arg;                               /* of forward and backward */
} alone_t;

static inline void alone_init(alone_t *a, loss_t loss)
{
    static const int64_t shape[] = {T, V}, picks[] = {T, K};
    uint64_t rng = 5;
    memset(a, CANARY, sizeof *a);
    a->loss = loss;
    switch (loss) {
    case LOGPROB:
        a->cfg.logprob = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .want_entropy = true,
                                                 .want_loss = true, .want_correct = true};
        break;
    case DISTILL:
        a->cfg.distill = (colo_distill_config_t){COLO_DISTILL_CONFIG_INIT};
        break;
    case SAMPLING:
        a->cfg.sampling =
            (colo_sampling_config_t){COLO_SAMPLING_CONFIG_INIT, .top_k = 2, .top_p = 0.9};
        break;
    default:
        a->cfg.topk = (colo_topk_config_t){COLO_TOPK_CONFIG_INIT, .k = K, .topk = loss == LARGEST};
    }
    a->cfg.logits.vocab = V;
    for (int i = 0; i < T * V; i++) {
        a->z[i] = loss == SAMPLING ? (float)i : (float)t_uniform(&rng);
        a->w[i] = (float)t_uniform(&rng);
    }
    for (int i = 0; i < T * K; i++) {
        a->targets[i] = i % V;
        a->up[i] = 1;
    }
    a->version = a->targets_version = 1;
    a->logits = colo_tensor_host(a->z, COLO_F32, 2, shape);
    a->logits.version = &a->version;
    a->target = loss == DISTILL ? colo_tensor_host(a->w, COLO_F32, 2, shape)
                                : colo_tensor_host(a->targets, COLO_I64, loss == GIVEN ? 2 : 1,
                                                   loss == GIVEN ? picks : shape);
    a->target.version = &a->targets_version;
    a->masked = colo_tensor_host(a->mask, COLO_U8, 1, shape);
    a->d_logits = colo_tensor_host(a->dz, COLO_F32, 2, shape);
    const int32_t axes = loss == GIVEN || loss == LARGEST ? 2 : 1;
    const int64_t one = 1;
    a->of_logp = colo_tensor_host(a->logp, COLO_F32, axes, picks);
    a->of_entropy = colo_tensor_host(a->entropy, COLO_F32, 1, shape);
    a->of_losses = colo_tensor_host(a->losses, COLO_F32, 1, shape);
    a->of_ce = colo_tensor_host(a->ce, COLO_F32, 1, shape);
    a->of_kl = colo_tensor_host(a->kl, COLO_F32, 1, shape);
    a->of_correct = colo_tensor_host(a->correct, COLO_U8, 1, shape);
    a->of_chosen = colo_tensor_host(a->chosen, COLO_I64, 2, picks);
    a->of_n_valid = colo_tensor_host(&a->n_valid, COLO_I64, 1, &one);
    a->of_n_invalid = colo_tensor_host(&a->n_invalid, COLO_I64, 1, &one);
    a->of_up = colo_tensor_host(a->up, COLO_F32, axes, picks);
    a->out = (colo_logprob_out_t){COLO_LOGPROB_OUT_INIT,        .logp = &a->of_logp,
                                  .entropy = &a->of_entropy,    .loss = &a->of_losses,
                                  .correct = &a->of_correct,    .n_valid = &a->of_n_valid,
                                  .n_invalid = &a->of_n_invalid};
    a->picks = (colo_topk_out_t){COLO_TOPK_OUT_INIT, .logp = &a->of_logp,
                                 .ids = loss == LARGEST ? &a->of_chosen : NULL,
                                 .n_invalid = &a->of_n_invalid};
    a->divergences = (colo_distill_out_t){COLO_DISTILL_OUT_INIT, .ce = &a->of_ce, .kl = &a->of_kl};
    memset(&a->saved, 0, sizeof a->saved);
    a->saved.struct_size = loss == LOGPROB   ? sizeof a->saved.logprob
                           : loss == DISTILL ? sizeof a->saved.distill
                                             : sizeof a->saved.topk;
    a->upstream = (colo_logprob_upstream_t){COLO_LOGPROB_UPSTREAM_INIT, .d_logp = &a->of_up};
    a->d_picks = (colo_topk_upstream_t){COLO_TOPK_UPSTREAM_INIT, .d_logp = &a->of_up};
    a->d_divergences = (colo_distill_upstream_t){COLO_DISTILL_UPSTREAM_INIT, .d_ce = &a->of_up};
    memset(&a->arg, 0, sizeof a->arg);
    a->arg.config = &a->cfg;
    a->arg.group = t_self();
    a->arg.logits = &a->logits;
    a->arg.targets = loss == LARGEST ? NULL : &a->target;
    a->arg.saved = &a->saved;
    a->arg.stats = a->stats;
    a->arg.workspace = a->workspace;
}

static inline colo_status_t alone_forward(alone_t *a)
{
    const bool no_out = a->arg.no_out;
    switch (a->loss) {
    case LOGPROB:
        return colo_logprob_forward(a->arg.config,
                                    &(colo_logprob_batch_t){COLO_LOGPROB_BATCH_INIT,
                                                            .logits = a->arg.logits,
                                                            .targets = a->arg.targets},
                                    a->arg.group, no_out ? NULL : &a->out, a->arg.saved,
                                    a->arg.stats, a->arg.workspace, NULL);
    case DISTILL:
        return colo_distill_forward(
            a->arg.config,
            &(colo_distill_batch_t){COLO_DISTILL_BATCH_INIT, .logits = a->arg.logits,
                                    .targets = a->arg.targets, .mask = &a->masked},
            a->arg.group, no_out ? NULL : &a->divergences, a->arg.saved, a->arg.stats,
            a->arg.workspace, NULL);
    case SAMPLING:
        return colo_sampling_keep(a->arg.config, a->arg.logits, &a->d_logits, a->arg.group,
                                  a->arg.workspace, NULL);
    default:
        return colo_topk_forward(a->arg.config,
                                 &(colo_topk_batch_t){COLO_TOPK_BATCH_INIT, .logits = a->arg.logits,
                                                      .ids = a->arg.targets, .mask = &a->masked},
                                 a->arg.group, no_out ? NULL : &a->picks, a->arg.saved,
                                 a->arg.stats, a->arg.workspace, NULL);
    }
}

static inline colo_status_t alone_backward(alone_t *a)
{
    const bool none = a->arg.no_upstream;
    switch (a->loss) {
    case LOGPROB:
        return colo_logprob_backward(a->arg.saved, none ? NULL : &a->upstream, &a->d_logits, NULL);
    case DISTILL:
        return colo_distill_backward(a->arg.saved, none ? NULL : &a->d_divergences, &a->d_logits,
                                     NULL);
    default:
        return colo_topk_backward(a->arg.saved, none ? NULL : &a->d_picks, &a->d_logits, NULL);
    }
}

static inline bool alone_valid(const alone_t *a)
{
    return a->loss == LOGPROB   ? a->saved.logprob.valid
           : a->loss == DISTILL ? a->saved.distill.valid
                                : a->saved.topk.valid;
}

static inline bool alone_wrote_nothing(const alone_t *a)
{
    return painted(a->logp, sizeof a->logp) && painted(a->entropy, sizeof a->entropy) &&
           painted(a->losses, sizeof a->losses) && painted(a->ce, sizeof a->ce) &&
           painted(a->kl, sizeof a->kl) && painted(a->correct, sizeof a->correct) &&
           painted(a->chosen, sizeof a->chosen) && painted(a->dz, sizeof a->dz) &&
           painted(a->stats, sizeof a->stats) && painted(&a->n_valid, sizeof a->n_valid) &&
           painted(&a->n_invalid, sizeof a->n_invalid) && !alone_valid(a);
}

static inline colo_status_t alone_saved_size(const alone_t *a, colo_dtype_t dtype, int64_t tokens,
                                             size_t *bytes)
{
    return a->loss == LOGPROB   ? colo_logprob_saved_size(a->arg.config, dtype, tokens, bytes)
           : a->loss == DISTILL ? colo_distill_saved_size(a->arg.config, tokens, bytes)
                                : colo_topk_saved_size(a->arg.config, tokens, bytes);
}

static inline colo_status_t alone_workspace_size(const alone_t *a, colo_dtype_t dtype,
                                                 int64_t tokens, int32_t ranks, size_t *bytes)
{
    switch (a->loss) {
    case LOGPROB:
        return colo_logprob_workspace_size(a->arg.config, dtype, tokens, ranks, bytes);
    case DISTILL:
        return colo_distill_workspace_size(a->arg.config, dtype, tokens, ranks, bytes);
    case SAMPLING:
        return colo_sampling_workspace_size(a->arg.config, dtype, tokens, ranks, bytes);
    default:
        return colo_topk_workspace_size(a->arg.config, dtype, tokens, ranks, bytes);
    }
}

#endif
