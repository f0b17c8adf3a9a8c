/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss_alone.h - one small case on a group of one rank, set up to succeed and painted with
 * canaries, so that a test can change one thing and see what is refused and what was written.
 */
#ifndef TESTS_LOSS_ALONE_H
#define TESTS_LOSS_ALONE_H

#include "loss/loss_case.h"

enum { T = 4, V = 6, MARGIN = COLO_ALIGNMENT };

typedef struct alone {
    colo_logprob_config_t cfg;
    float z[T * V], dz[T * V], logp[T], entropy[T], loss[T], up[T];
    uint8_t correct[T];
    int64_t targets[T], n_valid, n_invalid;
    _Alignas(COLO_ALIGNMENT) double stats[3 * T];
    _Alignas(COLO_ALIGNMENT) unsigned char workspace[1024];
    uint64_t version, targets_version;
    colo_tensor_t logits, target, d_logits;
    colo_logprob_out_t out;
    colo_logprob_saved_t saved;
    colo_logprob_upstream_t upstream;
    struct {
        colo_comm_t *group;
        const colo_tensor_t *logits, *targets;
        const colo_logprob_out_t *out;
        colo_logprob_saved_t *saved;
        void *stats, *workspace;
    } arg; /* of forward */
} alone_t;

static inline void alone_init(alone_t *a)
{
    uint64_t rng = 5;
    memset(a, CANARY, sizeof *a);
    a->cfg = (colo_logprob_config_t){COLO_LOGPROB_CONFIG_INIT, .logits.vocab = V,
                                     .want_entropy = true, .want_loss = true, .want_correct = true};
    for (int i = 0; i < T * V; i++)
        a->z[i] = (float)t_uniform(&rng);
    for (int t = 0; t < T; t++) {
        a->targets[t] = t;
        a->up[t] = 1;
    }
    a->version = a->targets_version = 1;
    a->logits = colo_tensor_host(a->z, COLO_F32, 2, (int64_t[]){T, V});
    a->logits.version = &a->version;
    a->target = colo_tensor_host(a->targets, COLO_I64, 1, (int64_t[]){T});
    a->target.version = &a->targets_version;
    a->d_logits = colo_tensor_host(a->dz, COLO_F32, 2, (int64_t[]){T, V});
    a->out = (colo_logprob_out_t){.logp = a->logp,
                                  .entropy = a->entropy,
                                  .loss = a->loss,
                                  .correct = a->correct,
                                  .n_valid = &a->n_valid,
                                  .n_invalid = &a->n_invalid};
    a->saved = (colo_logprob_saved_t){.valid = false};
    a->upstream = (colo_logprob_upstream_t){.d_logp = a->up};
    a->arg.group = t_self();
    a->arg.logits = &a->logits;
    a->arg.targets = &a->target;
    a->arg.out = &a->out;
    a->arg.saved = &a->saved;
    a->arg.stats = a->stats;
    a->arg.workspace = a->workspace;
}

static inline colo_status_t alone_forward(alone_t *a)
{
    return colo_logprob_forward(
        &a->cfg, &(colo_logprob_batch_t){.logits = a->arg.logits, .targets = a->arg.targets},
        a->arg.group, a->arg.out, a->arg.saved, a->arg.stats, a->arg.workspace, NULL);
}

static inline colo_status_t alone_backward(alone_t *a)
{
    return colo_logprob_backward(&a->saved, &a->upstream, &a->d_logits, NULL);
}

#endif
