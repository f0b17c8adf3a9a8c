/* SPDX-License-Identifier: Apache-2.0 */
/* workspace.h (private) - the object of the lm_head path, what a pass makes, and where a call's
 * memory lies. */
#ifndef COLO_LOSS_LINEAR_WORKSPACE_H
#define COLO_LOSS_LINEAR_WORKSPACE_H

#include "core/device.h"
#include "loss/distill-args.h"
#include "loss/linear/rows.h"
#include "loss/loss.h"

#include <colobridge/linear_logprob.h>

/* Of a distillation: the head that makes the other logits, which are not trained. */
struct colo_linear_teacher {
    colo_distill_config_t config;
    colo_lm_head_t *head; /* borrowed; has the vocabulary's columns that the other head has */
    void *gemm;
    colo_dtype_t dtype, logits_dtype;
    int64_t columns, hidden, lora;
    bool has_bias;
};

struct colo_linear_logprob {
    colo_linear_logprob_config_t config;
    colo_lm_head_t *head; /* borrowed */
    colo_comm_t *group;   /* borrowed */
    const colo_device_t *device;
    const colo_loss_kernels_t *kernels;
    const struct colo_linear_teacher *teacher; /* NULL: log-probabilities */
    void *aux, *gemm;
    colo_dtype_t dtype, stat_dtype; /* of the head; of outputs */
    int64_t columns, hidden;        /* Vl, H */
    bool has_bias;
};

/* Saved d_logits of columns from first on: a matrix of R rows, behind `ahead` elements, or with
 * shared, ahead elements per row. */
struct colo_linear_part {
    int64_t first, ahead, stride;
};
enum { COLO_LINEAR_PARTS = 12 };

/* Those that both streams record. Pairs: a unit has the one of its parity. */
enum colo_linear_event {
    COLO_EVENT_LOGITS = 0,
    COLO_EVENT_WORK = 2,
    COLO_EVENT_MAIN = 4,
    COLO_EVENT_AUX = 5,
    COLO_LINEAR_EVENTS = 6
};

/* One pass over T tokens and R rows, as numbers. */
struct colo_linear_size {
    colo_linear_logprob_pass_t pass;
    int64_t tokens, rows;
    int64_t chunk, chunks; /* rows a chunk; chunks >= 1, the only one of 0 rows may be empty */
    int64_t joined;        /* chunks that products of gradients take together */
    bool over;             /* their logits come where d_logits are, so these products come first */
    bool d_hidden_last;    /* d_hidden comes after d_W, and is made where its rows of hidden were */
    int64_t width, blocks; /* columns a block; blocks of a chunk */
    int64_t body;          /* columns in such blocks; the rest, if any, is one more */
    bool keeps;            /* all logits are in the saved buffer */
    bool early;            /* all d_logits are, in parts */
    bool shared;           /* the first `inside` parts are in d_weight */
    int32_t parts, inside;
    struct colo_linear_part part[COLO_LINEAR_PARTS + 1]; /* the one behind the last: its end */
    bool piecewise;                     /* statistics are gathered and merged chunk by chunk */
    bool in_place;                      /* d_logits over logits */
    bool once;                          /* d_weight is written once */
    int64_t segment;                    /* columns a product; 0: all of a block */
    int64_t buffers;                    /* logits buffers in the workspace: 0, 1, 2 */
    bool single;                        /* 1, which units have one after another */
    int64_t z_stride, d_stride;         /* elements from a row to the next */
    int64_t u_stride;                   /* of a LoRA's u and d_u */
    int64_t y_stride, teacher_u_stride; /* of the teacher's logits, and of its LoRA's u */
    colo_logprob_block_t block;
    int64_t block_rows; /* that it has */
    bool stats_inside;  /* statistics are in the workspace, not in saved memory */
    bool takes_head, makes_logits, makes_d_logits, makes_d_hidden, makes_d_weight, makes_d_lora;
    bool reduces;   /* products can leave statistics */
    bool writes;    /* something else reads their logits, too */
    bool no_logits; /* there is no memory for logits */
};

static inline bool colo_linear_makes_grads(const struct colo_linear_size *size)
{
    return size->makes_d_hidden || size->makes_d_weight || size->makes_d_lora;
}

/* Byte offsets in a workspace; -1: not there. */
struct colo_linear_memory {
    int64_t row_of, token_of, row_targets, counts;
    int64_t logp, entropy, loss, correct, weight, argmax, lse, sum_p2, mean_logits; /* per row */
    int64_t up[COLO_LINEAR_UPS], scale, stats, blocks;
    int64_t z[2], dz[2], h[2]; /* chunks; joined ones: z in place, dz and h */
    int64_t tiles[2];          /* args.tiles of a chunk */
    int64_t d_h, d_hidden;     /* as h; [T, H] before a reduce-scatter */
    int64_t d_h_sum;           /* chunk, of the sum dtype; with segments one a level of the tree */
    int64_t d_h_stage, d_h_stage_bytes; /* staging of the sum of d_hidden over ranks */
    int64_t d_h_all;                    /* chunks of all ranks, of the sum dtype */
    int64_t stage;                      /* d_weight of the first part */
    int64_t u[2], d_u;                  /* of a LoRA: as h; of joined chunks */
    int64_t d_u_sum, d_u_all;           /* as d_h_sum and d_h_all */
    int64_t d_a_stage, d_a_stage_bytes; /* staging of the sum of d_lora_a over ranks */
    int64_t y, teacher_h, teacher_u, teacher_bias; /* a chunk of the teacher's */
    int64_t bias, reduce, gemm;
    int64_t bytes;
};

/* Can a product that makes statistics read this weight? */
static inline bool colo_linear_is_tiled(const colo_tensor_t *weight)
{
    const int64_t pitch = weight->stride[0] * (int64_t)colo_dtype_size(weight->dtype);
    return (uintptr_t)weight->data % 16 == 0 && pitch > 0 && pitch % 16 == 0 &&
           pitch < INT64_C(1) << 40;
}

/* NULL of -1 */
static inline void *colo_linear_place(void *memory, int64_t offset)
{
    return offset < 0 ? NULL : (char *)memory + offset;
}

/* Offsets in the buffer from forward to backward. */
struct colo_linear_saved {
    int64_t stats, logits, d_logits, scale; /* -1: not there */
    int64_t bytes;
};

/* @max_valid as given: < 0 is @tokens. COLO_ERR_ARG when bytes pass 2^63. */
colo_status_t colo_linear_set_size(const colo_linear_logprob_t *linear,
                                   colo_linear_logprob_pass_t pass, int64_t tokens,
                                   int64_t max_valid, struct colo_linear_size *size);
colo_status_t colo_linear_set_memory(const colo_linear_logprob_t *linear,
                                     const struct colo_linear_size *size,
                                     struct colo_linear_memory *memory);
colo_status_t colo_linear_set_saved(const colo_linear_logprob_t *linear,
                                    const struct colo_linear_size *size,
                                    struct colo_linear_saved *offsets);

/* ---- pipeline.c ---- */

/* One call. */
struct colo_linear_call {
    const colo_linear_logprob_t *linear;
    colo_linear_logprob_batch_t batch; /* of forward and the loss pass */
    struct colo_linear_size size;
    struct colo_linear_memory memory;
    void *workspace;
    void *stats, *saved_logits; /* in saved memory or the workspace; logits, or d_logits */
    void *shared;               /* d_weight's memory, which has d_logits, too */
    float *scale;               /* of d_logits; NULL: 1 */
    colo_stream_t main, aux;
    struct colo_linear_matrix hidden;
    struct colo_linear_rows rows;
    struct colo_logprob_args args;
    int64_t true_columns;             /* of all blocks */
    struct colo_distill_args distill; /* of a teacher: but for what is in args and in chunks */
    struct colo_linear_matrix weight;
    void *bias;
    struct colo_linear_matrix lora_a, lora_b, d_lora_a, d_lora_b; /* of a LoRA */
    double lora_scale;
    struct { /* the teacher's, as the members before it */
        struct colo_linear_matrix hidden, weight, lora_a, lora_b;
        double lora_scale;
        void *bias;
    } teacher;
    bool reduces; /* of size, and of this weight and this batch, too */

    colo_lm_head_grads_t head_grads;
    colo_tensor_t d_weight, d_bias; /* of the whole head */
    bool fresh;                     /* d_weight holds nothing yet */
    struct colo_linear_matrix d_hidden;
    const colo_tensor_t *d_hidden_out;
    struct colo_logprob_out out; /* of forward and the loss pass */
};

/* Does d_weight's memory hold d_logits? */
static inline bool colo_linear_shares(const struct colo_linear_size *size)
{
    return size->early && size->inside > 0;
}

/* Does @pass, or the backward that follows it, add up gradients of hidden states over the
 * vocabulary group? */
static inline bool colo_linear_sums(const colo_linear_logprob_t *linear,
                                    colo_linear_logprob_pass_t pass)
{
    return linear->config.d_hidden != COLO_D_HIDDEN_PARTIAL && !linear->config.frozen_hidden &&
           pass != COLO_LINEAR_LOGPROB_INFERENCE;
}
/* The same of gradients of a LoRA's A */
static inline bool colo_linear_sums_lora(const colo_linear_logprob_t *linear,
                                         colo_linear_logprob_pass_t pass)
{
    return !linear->config.frozen_lora && pass != COLO_LINEAR_LOGPROB_INFERENCE;
}

/* The tokens of a call. */
struct colo_linear_tokens {
    const colo_tensor_t *hidden, *targets;
    const colo_support_saved_t *support;
    const void *class_weight; /* NULL: none */
    const colo_lora_t *lora;  /* NULL: none */
    const void *temperature;  /* of forward and the loss pass; NULL: none */
    /* of a teacher, where the pass makes logits; the mask instead of targets, NULL: all tokens
     * count */
    const colo_tensor_t *teacher_hidden, *mask;
    const colo_lora_t *teacher_lora;
};
/* The members of @call before aux are set; packs the tokens */
colo_status_t colo_linear_begin(struct colo_linear_call *call,
                                const struct colo_linear_tokens *tokens);
/* The caller's stream waits for what the auxiliary stream has been given. */
colo_status_t colo_linear_join(const struct colo_linear_call *call);
colo_status_t colo_linear_pipeline(struct colo_linear_call *call);

/* ---- run.c ---- */

/* @linear, of zeros, becomes an object without a teacher; after an error nothing is open. */
colo_status_t colo_linear_open(colo_linear_logprob_t *linear,
                               const colo_linear_logprob_config_t *config, colo_lm_head_t *head,
                               colo_comm_t *group);
void colo_linear_close(colo_linear_logprob_t *linear);
/* What makes products with @head, which kernels->gemm destroys */
colo_status_t colo_linear_open_products(const colo_lm_head_t *head, colo_dtype_t logits,
                                        int64_t segment, void **made);

extern const struct colo_linear_saved colo_linear_nowhere;
/* Tells every rank that would wait for this one whether its arguments are valid. @size may be of a
 * batch that is refused: then it says what the others, whose batch is right, will do. */
colo_status_t colo_linear_ready(const colo_linear_logprob_t *linear,
                                const struct colo_linear_size *size, const char *what,
                                colo_status_t mine);
/* Where forward and backward meet; @memory NULL: they do not. */
void colo_linear_place_saved(struct colo_linear_call *call, void *memory,
                             const struct colo_linear_saved *offsets);
/* Checks the head's gradients; writes nothing. Before run */
colo_status_t colo_linear_place_grads(struct colo_linear_call *call,
                                      const colo_linear_logprob_grads_t *grads);
/* Finds size and memory of a backward, and where its gradients go. @memory and @d_weight: of the
 * saved state; @offsets: out, what begins where in @memory. Before run */
colo_status_t colo_linear_place_backward(struct colo_linear_call *call, int64_t tokens,
                                         int64_t max_valid,
                                         const colo_linear_logprob_grads_t *grads,
                                         const void *memory, const void *d_weight,
                                         struct colo_linear_saved *offsets);
/* A call whose arguments are checked. @up: of its d_logits; NULL: it makes none */
colo_status_t colo_linear_run(struct colo_linear_call *call,
                              const struct colo_linear_tokens *tokens,
                              const colo_linear_logprob_upstream_t *up);

/* ---- check.c ---- */

colo_status_t colo_linear_check_config(const colo_linear_logprob_config_t *config,
                                       const colo_lm_head_t *head, const colo_comm_t *group,
                                       colo_linear_logprob_config_t *own);
/* Reads the caller's batch @given into *@batch. */
colo_status_t colo_linear_check_batch(const colo_linear_logprob_t *linear,
                                      const colo_linear_logprob_batch_t *given,
                                      colo_linear_logprob_batch_t *batch);
/* Reads the caller's @given into *@up. @tokens: how long its arrays are; @factor: that of early's
 * backward */
colo_status_t colo_linear_check_upstream(const colo_linear_logprob_t *linear,
                                         const colo_linear_logprob_upstream_t *given,
                                         int64_t tokens, bool factor,
                                         colo_linear_logprob_upstream_t *up);
colo_status_t colo_linear_check_out(const colo_linear_logprob_t *linear,
                                    const colo_logprob_out_t *given, int64_t tokens,
                                    struct colo_logprob_out *out);
colo_status_t colo_linear_check_grads(const colo_linear_logprob_t *linear,
                                      const colo_linear_logprob_grads_t *grads,
                                      const colo_tensor_t *hidden);
colo_status_t colo_linear_check_saved(const colo_linear_logprob_t *linear,
                                      const colo_linear_logprob_saved_t *saved);
/* [@rows, H] of the head's dtype; @rows < 0: any */
colo_status_t colo_linear_check_states(const colo_lm_head_t *of, const colo_tensor_t *tensor,
                                       const char *what, int64_t rows, bool written);
/* Is it there iff @rank > 0? Named @what in batch and config */
colo_status_t colo_linear_check_lora(const colo_lm_head_t *of, int64_t rank,
                                     const colo_lora_t *lora, const char *what);
/* Is d_weight where forward has put gradients of logits? */
colo_status_t colo_linear_check_shared(const struct colo_linear_size *size,
                                       const colo_linear_logprob_grads_t *grads,
                                       const void *d_weight);
/* Is this rank alone in both? */
colo_status_t colo_linear_check_apart(const colo_comm_t *head, const colo_comm_t *group);
colo_status_t colo_linear_check_memory(const void *memory, const char *what, int64_t bytes);

#endif
