/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linear_distill.h - divergence of a student from a teacher straight from the hidden states of both:
 * the products with their lm_heads and the divergence of the logits, one chunk of tokens at a time.
 * Neither side's logits ever exist as a whole.
 *
 *   z_t = W h_t + b of the student, y_t = W' h'_t + b' of the teacher, each with a LoRA if it has one;
 *   then for each token what distill.h calls kl of z and y: the divergence that the config names
 *   d_h = d_z W,  d_W = d_z^T h,  d_b = sum_t d_z,  and gradients of the student's LoRA
 *
 * The teacher gets no gradient. Its width, dtype and padding of the vocabulary are its own. Both heads
 * have the same columns of the vocabulary on a rank: they begin at logits.vocab_start, and as many of
 * their rows are below V.
 *
 * Modes are two of linear_logprob.h. Products with the student's head, and with the teacher's:
 *
 *   logprob  forward, backward with any upstream gradient; logits made twice       4 and 2
 *   early    upstream gradient known in forward but for one factor: saved memory
 *            keeps the gradients of the student's logits                           3 and 1
 *   loss     upstream gradient known beforehand: colo_linear_distill_loss() makes
 *            the divergence and gradients in one pass                              3 and 1
 *
 * Gradients of logits have the student's dtype, and lie over its logits if those have it, too, and
 * d_weight's memory does not hold them.
 *
 * Collectives over the vocabulary group: forward of mode logprob does one all-gather of statistics for
 * forward and reverse KL; early and loss do one for each chunk. JSD, TV and ACCEPTANCE do two for each
 * chunk in each mode, because they read a chunk's logits once more when both normalisers are known.
 * Backward does none for them. d_hidden and d_A are as in linear_logprob.h.
 *
 * Tokens whose mask is 0 take no part in products, as ignored tokens of linear_logprob.h.
 */
#ifndef COLOBRIDGE_LINEAR_DISTILL_H
#define COLOBRIDGE_LINEAR_DISTILL_H

#include <colobridge/distill.h>
#include <colobridge/linear_logprob.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_linear_distill colo_linear_distill_t;

/** Members from mode on have defaults: 0, false. Those of the names of linear_logprob.h mean what they
 *  mean there. */
typedef struct colo_linear_distill_config_t {
    size_t struct_size;
    /* logits: of the student. targets: COLO_DISTILL_LOGITS; target_temperature, target_scale and
     * target_softcap are the teacher's. No temperatures of tokens */
    colo_distill_config_t distill;
    colo_linear_logprob_mode_t mode; /* AUTO and LOGPROB: logprob; EARLY */
    colo_dtype_t logits_dtype;       /* of the student's in memory: its head's dtype, or f32 (f64) */
    colo_dtype_t teacher_logits_dtype; /* f32, or the dtype of the student's logits if it is the
                                          teacher's head's, too */
    size_t budget; /* bytes for logits of both: a chunk of the teacher's and one of the student's, two on several
                      ranks (in the loss pass gradients, too); early and the loss pass have at least 512 tokens a
                      chunk, or 1024 if the student's logits have 16 bits, forward of mode logprob 1024. 0: 1 GiB
                      (early: 640 MiB, the loss pass: 1.25 GiB) */
    int64_t chunk_size; /* tokens a chunk, the same on all ranks of the vocabulary; 0: from tokens and
                           budget */
    colo_d_hidden_t d_hidden;
    bool frozen_hidden, frozen_weight;
    colo_dtype_t d_weight_dtype;
    bool d_weight_add, share_d_weight;
    int64_t lora; /* of the student */
    bool frozen_lora;
    int64_t teacher_lora;
} colo_linear_distill_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_DISTILL_CONFIG_INIT sizeof(colo_linear_distill_config_t), {COLO_DISTILL_CONFIG_INIT}, COLO_LINEAR_LOGPROB_AUTO, COLO_F32, COLO_F32, 0, 0, COLO_D_HIDDEN_PARTIAL, false, false, COLO_F32, false, false, 0, false, 0
#else
#define COLO_LINEAR_DISTILL_CONFIG_INIT \
    .struct_size = sizeof(colo_linear_distill_config_t), .distill = {COLO_DISTILL_CONFIG_INIT}
#endif

/** One call's tokens, in the memory of the heads; the same on all ranks of the vocabulary group. */
typedef struct colo_linear_distill_batch_t {
    size_t struct_size;
    const colo_tensor_t *hidden;         /* [T, H], the student's head's dtype; columns contiguous */
    const colo_tensor_t *teacher_hidden; /* [T, H'], the teacher's head's dtype; columns contiguous */
    const colo_tensor_t *mask;           /* u8 [T] or NULL; a token whose mask is 0 is not read: its divergence
                                            and its gradient are 0 */
    int64_t max_valid; /* upper bound on the number of tokens that count; < 0: T. As in linear_logprob.h */
    const colo_lora_t *lora, *teacher_lora; /* NULL iff config.lora, config.teacher_lora is 0 */
} colo_linear_distill_batch_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_DISTILL_BATCH_INIT sizeof(colo_linear_distill_batch_t), nullptr, nullptr, nullptr, 0, nullptr, nullptr
#else
#define COLO_LINEAR_DISTILL_BATCH_INIT .struct_size = sizeof(colo_linear_distill_batch_t)
#endif

/** What forward writes; NULL members are not computed. Contiguous, in the memory of the heads. */
typedef struct colo_linear_distill_out_t {
    size_t struct_size;
    const colo_tensor_t *loss; /* [T], the divergence; f64 of f64 heads of a student, else f32 */
    const colo_tensor_t *n_valid, *n_invalid; /* i64 [1]: tokens that count; of these, beyond max_valid */
} colo_linear_distill_out_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_DISTILL_OUT_INIT sizeof(colo_linear_distill_out_t), nullptr, nullptr, nullptr
#else
#define COLO_LINEAR_DISTILL_OUT_INIT .struct_size = sizeof(colo_linear_distill_out_t)
#endif

/** Upstream gradient of each token's divergence: loss * d_loss[t], or loss alone if d_loss is NULL; with
 *  mean divided by the number of tokens of this rank that count. Of bf16 and f16 heads the largest one
 *  multiplies after the products, in fp32. Backward of mode early takes one number: loss * d_loss[0], or
 *  loss. */
typedef struct colo_linear_distill_upstream_t {
    size_t struct_size;
    double loss;
    const colo_tensor_t *d_loss; /* [T], contiguous, in the dtype of out.loss, or NULL */
    bool mean;
} colo_linear_distill_upstream_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_DISTILL_UPSTREAM_INIT sizeof(colo_linear_distill_upstream_t), 0, nullptr, false
#else
#define COLO_LINEAR_DISTILL_UPSTREAM_INIT .struct_size = sizeof(colo_linear_distill_upstream_t)
#endif

/** What backward needs; caller's memory, filled by forward. Borrows hidden, the mask and the student's
 *  LoRA, in mode logprob what the teacher has, too, and the saved memory. memory and d_weight: as in
 *  colo_linear_logprob_saved_t. */
typedef struct colo_linear_distill_saved_t {
    size_t struct_size;
    const colo_linear_distill_t *of;
    colo_tensor_t hidden, teacher_hidden, mask; /* mask.ndim 0: none */
    uint64_t hidden_version, teacher_hidden_version, mask_version, weight_version, teacher_version;
    int64_t max_valid;
    void *memory, *d_weight;
    bool valid;
    colo_tensor_t lora_a, lora_b, teacher_lora_a, teacher_lora_b;
    double lora_scale, teacher_lora_scale;
    uint64_t lora_version; /* the sum of their versions; teacher_version: with the head's */
} colo_linear_distill_saved_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LINEAR_DISTILL_SAVED_INIT sizeof(colo_linear_distill_saved_t), nullptr, {}, {}, {}, 0, 0, 0, 0, 0, 0, nullptr, nullptr, false, {}, {}, {}, {}, 0, 0, 0
#else
#define COLO_LINEAR_DISTILL_SAVED_INIT .struct_size = sizeof(colo_linear_distill_saved_t)
#endif

/**
 * colo_linear_distill_create() - make handles, streams and events, so that later calls make none; local
 * @distill: out, owned by the caller
 * @config:  borrowed for the call
 * @head:    the student's, borrowed for the object's life; as in colo_linear_logprob_create()
 * @teacher: the teacher's, borrowed for the object's life, in the memory of @head; resident, or sharded
 *           over ranks that need not be those of @head
 * @group:   the vocabulary (tp) group, borrowed for the object's life; NULL is an error. This rank alone is
 *           in it and in a head's group
 * One call at a time uses the object. Any number of forwards may wait for their backward.
 * Errors:   COLO_ERR_ARG, COLO_ERR_SHAPE (heads with other columns), COLO_ERR_NOMEM, COLO_ERR_UNBUILT
 */
COLO_API colo_status_t colo_linear_distill_create(colo_linear_distill_t **distill,
                                                  const colo_linear_distill_config_t *config,
                                                  colo_lm_head_t *head, colo_lm_head_t *teacher,
                                                  colo_comm_t *group);
/** colo_linear_distill_destroy() - local; takes NULL, leaves *distill NULL. On a GPU the host waits for the
 * stream of the object. Memory given to calls stays the caller's */
COLO_API void colo_linear_distill_destroy(colo_linear_distill_t **distill);

/**
 * colo_linear_distill_saved_size() - bytes of saved memory of @tokens: 64 per token in mode logprob, the
 * gradients of logits in mode early
 * @bytes:  out
 */
COLO_API colo_status_t colo_linear_distill_saved_size(const colo_linear_distill_t *distill,
                                                      int64_t tokens, int64_t max_valid,
                                                      size_t *bytes);
/**
 * colo_linear_distill_workspace_size() - bytes of workspace of one pass over @tokens
 * @bytes:  out
 */
COLO_API colo_status_t colo_linear_distill_workspace_size(const colo_linear_distill_t *distill,
                                                          colo_linear_logprob_pass_t pass,
                                                          int64_t tokens, int64_t max_valid,
                                                          size_t *bytes);

/**
 * colo_linear_distill_forward() - the divergence of each token, in mode logprob, and without @saved in each
 * mode; collective
 * @batch:      in  borrowed for the call; of its tensors what @saved says, until backward
 * @out:        out
 * @saved:      out; NULL if there is no backward
 * @saved_memory:  colo_linear_distill_saved_size() bytes, aligned, borrowed until the last backward; NULL iff
 *              @saved is NULL
 * @workspace:  colo_linear_distill_workspace_size() bytes, aligned, free again after the call
 * @stream:     as in colo_linear_logprob_forward()
 * The call acquires both heads, unless the caller has started or finished one, and releases them. Special
 * values: as in colo_distill_forward(); a token beyond max_valid is NaN.
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE, COLO_ERR_STATE (a head is not bound); those of
 *              colo_distill_forward() and of the heads
 */
COLO_API colo_status_t colo_linear_distill_forward(colo_linear_distill_t *distill,
                                                   const colo_linear_distill_batch_t *batch,
                                                   const colo_linear_distill_out_t *out,
                                                   colo_linear_distill_saved_t *saved,
                                                   void *saved_memory, void *workspace,
                                                   colo_stream_t stream);
/**
 * colo_linear_distill_early() - forward of mode early: the divergence, and the gradients of the student's
 * logits in saved memory; collective
 * @upstream:   in  borrowed for the call
 * Other arguments, special values and errors: as in colo_linear_distill_forward(); @saved is not NULL. What
 * the teacher has is the caller's again after the call. The backward may run more than once, but with
 * share_d_weight only once.
 */
COLO_API colo_status_t colo_linear_distill_early(colo_linear_distill_t *distill,
                                                 const colo_linear_distill_batch_t *batch,
                                                 const colo_linear_distill_upstream_t *upstream,
                                                 const colo_linear_distill_out_t *out,
                                                 colo_linear_distill_saved_t *saved,
                                                 void *saved_memory, void *workspace,
                                                 colo_stream_t stream);
/**
 * colo_linear_distill_backward() - gradients of hidden states, weight, bias and LoRA of the student;
 * collective
 * @saved:      from forward; may be used again unless share_d_weight
 * @upstream:   in  borrowed for the call
 * @grads:      out, borrowed for the call; as in linear_logprob.h
 * @workspace:  colo_linear_distill_workspace_size() bytes, aligned, free again after the call
 * @stream:     as in forward
 * Errors:      COLO_ERR_STATE, COLO_ERR_MODIFIED (what @saved borrows, or a head, was written), COLO_ERR_ARG,
 *              COLO_ERR_SHAPE, those of the groups
 */
COLO_API colo_status_t colo_linear_distill_backward(colo_linear_distill_t *distill,
                                                    colo_linear_distill_saved_t *saved,
                                                    const colo_linear_distill_upstream_t *upstream,
                                                    const colo_linear_logprob_grads_t *grads,
                                                    void *workspace, colo_stream_t stream);
/**
 * colo_linear_distill_loss() - the divergence and gradients in one pass, without saved memory; collective
 * @batch, @out, @stream:  as in forward
 * @upstream, @grads:      as in backward
 * @workspace:             colo_linear_distill_workspace_size() bytes, aligned, free again after the call
 * Errors:                 as in forward
 */
COLO_API colo_status_t colo_linear_distill_loss(colo_linear_distill_t *distill,
                                                const colo_linear_distill_batch_t *batch,
                                                const colo_linear_distill_upstream_t *upstream,
                                                const colo_linear_distill_out_t *out,
                                                const colo_linear_logprob_grads_t *grads,
                                                void *workspace, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
