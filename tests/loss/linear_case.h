/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_case.h - one case of the lm_head path on W x D in-process ranks: W share the vocabulary, D
 * replicas have tokens of their own, and a sharded head is sharded over them. World rank = r + W d.
 * Hidden states, weight and targets go in; what every rank got and the gradients put together from
 * the shards come out.
 */
#ifndef TESTS_LOSS_LINEAR_CASE_H
#define TESTS_LOSS_LINEAR_CASE_H

#include "loss/loss_case.h"
#include "loss/where.h"
#include "ref/ref_linear.h"

enum { /* besides WITH_* */
       LINEAR_BIAS = 256,
       LINEAR_IGNORED = 512,
       LINEAR_SHARDED = 1024,
       LINEAR_MEAN = 2048,
       LINEAR_LORA = 8192,
       LINEAR_OPTIONS = 17,
       LINEAR_RANK = 3 /* of a LoRA */
};

typedef enum { HEAD_RESIDENT, HEAD_SHARDED } head_kind_t;

typedef struct linear_case {
    int32_t ranks, replicas;
    int64_t tokens, vocab, hidden;
    colo_dtype_t dtype;
    colo_linear_logprob_config_t config; /* vocab and vocab_start are filled in */
    head_kind_t head;
    void (*each_comm)(colo_comm_t *c); /* of a rank's groups, when they are made; NULL: nothing */
    bool has_bias, loss_mode, start_early, checkpoint, twice, no_saved;
    int64_t start[LOSS_RANKS], columns[LOSS_RANKS];
    int64_t max_valid;              /* of every replica, */
    int64_t most_valid[LOSS_RANKS]; /* but of those where this is > 0 */
    double factor[LOSS_UPS];        /* of colo_linear_logprob_upstream_t */
    bool arrays, mean;
    double prefill; /* what d_weight and d_bias hold before */

    void *memory; /* what is not the support points into these @bytes */
    size_t bytes;
    double *h[LOSS_RANKS];   /* [T, H] of each replica, exact in the dtype */
    double *w, *b;           /* [V, H], [V] */
    double *lora_a, *lora_b; /* [LINEAR_RANK, H], [V, LINEAR_RANK]; of LINEAR_LORA */
    double lora_scale;
    double *class_weight;             /* as in loss_case.h */
    double *temperature;              /* [T], of all replicas; as in loss_case.h */
    int64_t *targets[LOSS_RANKS];     /* [T] of each replica */
    uint8_t *support;                 /* [T, V] of all replicas: is an id in the list? NULL: all */
    double *up[LOSS_RANKS][LOSS_UPS]; /* [T] of each replica */

    /* results, by world rank */
    double *out[LOSS_RANKS][LOSS_OUTS], *weight[LOSS_RANKS];
    int64_t *argmax[LOSS_RANKS];
    uint8_t *correct[LOSS_RANKS];
    int64_t n_valid[LOSS_RANKS], n_invalid[LOSS_RANKS];
    double *d_h[LOSS_RANKS]; /* [T, H] as that rank has it; after a reduce-scatter [T/W, H] */
    double *d_w, *d_b;       /* [V, H], [V]: the sum over replicas, and the prefill */
    double *d_lora_a[LOSS_RANKS],
        *d_lora_b[LOSS_RANKS]; /* as lora_a, lora_b: this rank's columns */
    bool spilled[LOSS_RANKS], kept_changed[LOSS_RANKS], second_differs[LOSS_RANKS];
    int64_t chunks[LOSS_RANKS]; /* of the pass, by the object's own arithmetic */
    colo_comm_stats_t tp_forward[LOSS_RANKS], tp_all[LOSS_RANKS];
    colo_comm_stats_t head_forward[LOSS_RANKS], head_all[LOSS_RANKS];
} linear_case_t;

/* Allocates; draws everything; upstream: arrays on logp, entropy, loss and lse where they are
 * wanted. */
void linear_case_init(linear_case_t *c, int32_t ranks, int32_t replicas, int64_t tokens,
                      int64_t vocab, int64_t hidden, colo_dtype_t dtype, uint64_t *rng);
void linear_case_free(linear_case_t *c);
/* What @bits of WITH_* and LINEAR_* ask for, and a loss where one of them needs it. Ignored tokens
 * get hidden states that must not be read. */
void linear_case_options(linear_case_t *c, unsigned bits);
/* 0 logprob, 1 keep, 2 loss */
void linear_case_mode(linear_case_t *c, int mode);
void linear_case_shard(linear_case_t *c, shard_kind_t kind);
/* Each makes a case anew. */
/* The @i-th of 48 with upstream gradients that fp16 cannot hold, and some that it cannot hold a
 * probability of. d_weight is f32; d_hidden could not hold its values. */
void linear_case_upstream(linear_case_t *c, int32_t ranks, int i, uint64_t *rng);
/* The @i-th of 12 without tokens, where gradients of the head are 0. */
void linear_case_empty(linear_case_t *c, int32_t ranks, int i, uint64_t *rng);
/* The @i-th of 36 with lists of about a third of the ids. */
void linear_case_listed(linear_case_t *c, int32_t ranks, int32_t replicas, int i, uint64_t *rng);
/* The @i-th of 36 cases with share_d_weight. With 1.5 times as many rows as columns of hidden,
 * gradients of logits lie in d_weight. */
void linear_case_shared(linear_case_t *c, int32_t ranks, int i, uint64_t *rng);
colo_status_t linear_case_run(linear_case_t *c);
/* @n cases of one world, one after the other on the same communicators. */
colo_status_t linear_case_run_all(linear_case_t *c, int32_t n);
/* Against the oracle, within the tolerance stated in linear_compare.c; fails the running test. */
void linear_case_compare(const linear_case_t *c, const char *label);
/* Runs @n cases of one world and compares each; fails the running test. */
void linear_case_judge(linear_case_t *c, int32_t n, const char *what);
/* Bit by bit: outputs and d_hidden of all ranks; with @weights d_weight and d_bias, too. */
bool linear_case_same(const linear_case_t *a, const linear_case_t *b, bool weights);

#endif
