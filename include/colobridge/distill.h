/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill.h - cross entropy and KL divergence from a target distribution that is sharded over
 * the vocabulary like the logits: distillation from a teacher's logits, or soft labels.
 *
 * Student: x of a logit as in logprob.h, p = softmax(x) over the whole vocabulary. Targets w:
 *   COLO_DISTILL_LOGITS  q = softmax(y), y = target_scale w / target_temperature, Q = 1; with a
 *                        target_softcap c: y = c tanh(target_scale w / c) / target_temperature.
 *                        has_temperature and has_target_temperature: the batch has a temperature
 *                        of each token, which divides x, or y, in addition
 *   COLO_DISTILL_PROBS   q = w as it is, Q = sum_j q_j over the whole vocabulary (not
 *                        normalised)
 *   ce = -sum_j q_j log p_j
 *   kl = sum_j q_j (log q_j - log p_j),  0 log 0 = 0
 *   d ce / dx_j = d kl / dx_j = Q p_j - q_j;  targets get no gradient
 * ce >= 0 holds exactly, and with COLO_DISTILL_LOGITS kl >= 0. (Probabilities that do not add up
 * to 1 may have a negative kl.)
 *
 * With COLO_DISTILL_LOGITS config.divergence may put another divergence D into kl:
 *   COLO_DIVERGENCE_REVERSE_KL  D = sum p log(p/q)         dD/dx_j = p_j (log(p_j/q_j) - D)
 *   COLO_DIVERGENCE_JSD         D = beta sum q log(q/m) + (1 - beta) sum p log(p/m),
 *                               m = beta q + (1 - beta) p
 *                               dD/dx_j = (1 - beta) p_j (log(p_j/m_j) - sum p log(p/m))
 *   COLO_DIVERGENCE_TV          D = 1/2 sum |p - q|        dD/dx_j = 1/2 p_j (s_j - sum p s),
 *                               s = sign(p - q), 0 where they are equal
 *   COLO_DIVERGENCE_ACCEPTANCE  D = -log alpha, alpha = sum min(p, q) = 1 - TV: how often a target
 *                               model accepts a draft; that of TV, divided by alpha
 * D >= 0. Where p and q are near each other D has the digits that p and q have, not those of a
 * difference: docs/concepts/loss.md. Sources: Hinton et al. 2015; Agarwal et al. 2024 (JSD's beta);
 * Leviathan et al. 2023 (alpha).
 *
 * Forward reads both shards once and does one all-gather; for JSD, TV and ACCEPTANCE two of each.
 * Backward does no collective. The usual factor temperature^2 of distillation is the caller's: put
 * it into the upstream gradient.
 */
#ifndef COLOBRIDGE_DISTILL_H
#define COLOBRIDGE_DISTILL_H

#include <colobridge/comm.h>
#include <colobridge/logits.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum colo_distill_kind_t {
    COLO_DISTILL_LOGITS = 0,
    COLO_DISTILL_PROBS = 1
} colo_distill_kind_t;

typedef enum colo_divergence_t {
    COLO_DIVERGENCE_FORWARD_KL = 0,
    COLO_DIVERGENCE_REVERSE_KL = 1,
    COLO_DIVERGENCE_JSD = 2,
    COLO_DIVERGENCE_TV = 3,
    COLO_DIVERGENCE_ACCEPTANCE = 4
} colo_divergence_t;

/** Members from targets on have defaults: COLO_DISTILL_LOGITS, 1, 1. */
typedef struct colo_distill_config_t {
    size_t struct_size;
    colo_logits_options_t logits; /* of the student; the targets have its columns, too */
    colo_distill_kind_t targets;
    double target_temperature; /* > 0; COLO_DISTILL_LOGITS only, as target_scale */
    double target_scale;
    int64_t order; /* a number for the order of the rows, if the caller has several: ranks compare it */
    int64_t divergence; /* a colo_divergence_t: what kl is; not 0 only with COLO_DISTILL_LOGITS */
    double beta;         /* of JSD, 0 < beta < 1 */
    double target_softcap; /* 0: none; COLO_DISTILL_LOGITS only */
    bool has_temperature, has_target_temperature; /* the batch has them; the second with
                                                   * COLO_DISTILL_LOGITS only */
    int64_t reserved[4]; /* 0: room for members of newer headers. The size never changes, because
                          * other structs contain it */
} colo_distill_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_DISTILL_CONFIG_INIT sizeof(colo_distill_config_t), {COLO_LOGITS_OPTIONS_INIT}, COLO_DISTILL_LOGITS, 1.0, 1.0, 0, COLO_DIVERGENCE_FORWARD_KL, 0.5, 0.0, false, false, {}
#else
#define COLO_DISTILL_CONFIG_INIT                                                          \
    .struct_size = sizeof(colo_distill_config_t), .logits = {COLO_LOGITS_OPTIONS_INIT},   \
    .target_temperature = 1.0, .target_scale = 1.0, .beta = 0.5
#endif

/** What forward writes, [T] each, f64 if the logits are f64, else f32; NULL members are not computed.
 *  Each is contiguous, in the memory of the logits, and written only on success. */
typedef struct colo_distill_out_t {
    size_t struct_size;
    const colo_tensor_t *ce, *kl; /* kl: the divergence that the config names */
} colo_distill_out_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_DISTILL_OUT_INIT sizeof(colo_distill_out_t), nullptr, nullptr
#else
#define COLO_DISTILL_OUT_INIT .struct_size = sizeof(colo_distill_out_t)
#endif

/** Upstream gradients, [T] each, contiguous, in the dtype of the outputs; NULL = zero. */
typedef struct colo_distill_upstream_t {
    size_t struct_size;
    const colo_tensor_t *d_ce, *d_kl;
} colo_distill_upstream_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_DISTILL_UPSTREAM_INIT sizeof(colo_distill_upstream_t), nullptr, nullptr
#else
#define COLO_DISTILL_UPSTREAM_INIT .struct_size = sizeof(colo_distill_upstream_t)
#endif

/** What backward needs; caller's memory, filled by forward. Borrows logits, targets and buffer. */
typedef struct colo_distill_saved_t {
    size_t struct_size;
    colo_tensor_t logits, targets; /* borrowed views */
    uint64_t logits_version, targets_version;
    void *memory; /* borrowed: the caller's colo_distill_saved_size() bytes */
    bool valid;
    colo_distill_config_t config;
} colo_distill_saved_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_DISTILL_SAVED_INIT sizeof(colo_distill_saved_t), {}, {}, 0, 0, nullptr, false, {}
#else
#define COLO_DISTILL_SAVED_INIT .struct_size = sizeof(colo_distill_saved_t)
#endif

/**
 * colo_distill_config_check() - are all members of @config in their ranges? Local
 * Errors:  COLO_ERR_ARG, naming the member, its value and its range
 */
COLO_API colo_status_t colo_distill_config_check(const colo_distill_config_t *config);
/**
 * colo_distill_saved_size() - bytes of the saved statistics: 64 per token, and 8 per
 *                             temperature of it
 * @bytes:  out
 */
COLO_API colo_status_t colo_distill_saved_size(const colo_distill_config_t *config, int64_t tokens,
                                               size_t *bytes);
/**
 * colo_distill_workspace_size() - bytes of workspace that forward needs on a group of @ranks
 * @bytes:  out
 */
COLO_API colo_status_t colo_distill_workspace_size(const colo_distill_config_t *config,
                                                   colo_dtype_t dtype, int64_t tokens,
                                                   int32_t ranks, size_t *bytes);

/** The tensors that a forward reads, borrowed; all in one memory. */
typedef struct colo_distill_batch_t {
    size_t struct_size;
    /* [T, Vl] f32, f64, bf16 or f16; columns contiguous; borrowed until backward */
    const colo_tensor_t *logits;
    /* [T, Vl] of the same columns, f32 or the dtype of the logits; borrowed until backward */
    const colo_tensor_t *targets;
    /* u8 [T] or NULL; a row whose mask is 0 is not read, and ce = kl = 0, gradient 0 */
    const colo_tensor_t *mask;
    /* f32 [T], contiguous, > 0 and finite where the mask is not 0, the same on all ranks; NULL
     * unless the config has them. On a GPU the host does not read them, and a row of another number
     * is NaN */
    const colo_tensor_t *temperature, *target_temperature;
} colo_distill_batch_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_DISTILL_BATCH_INIT sizeof(colo_distill_batch_t), nullptr, nullptr, nullptr, nullptr, nullptr
#else
#define COLO_DISTILL_BATCH_INIT .struct_size = sizeof(colo_distill_batch_t)
#endif

/**
 * colo_distill_forward() - one read of both shards, one all-gather over @group (none if it has one
 * rank)
 * @batch:      in  borrowed for the call; its members say how long their tensors are
 * @group:      the vocabulary (tp) group, collective; NULL is an error
 * @saved:      out may be NULL if there is no backward; then @saved_memory is NULL, too
 * @saved_memory:  colo_distill_saved_size() bytes, aligned, borrowed until the last backward
 * @workspace:  colo_distill_workspace_size() bytes, aligned, free again after the call
 * @stream:     NULL on the host, where the call returns when the work is done. On a GPU the call
 *              enqueues the work on @stream, and the host does not wait
 *              (on several ranks it does in the first calls for a vocabulary, until ranks were seen
 *              to have shards of it, and at COLO_CHECK=2; not in a capture, or at COLO_CHECK=0)
 *
 * Special values. The row's ce, kl and gradient are NaN on all ranks if a row of either has NaN or
 * +inf, if one of them is nothing but -inf, or if a probability is negative, NaN or infinite. A
 * logit x_j = -inf gives ce = kl = +inf and a finite gradient if q_j > 0, and adds nothing if q_j
 * = 0. Reverse KL: if y_j = -inf and p_j > 0, D = +inf, and its gradient is NaN where p_j > 0. JSD
 * and TV are finite. Acceptance, alpha = 0: D = +inf, and its gradient is NaN where p_j > 0. But for
 * forward KL the gradient is 0 where p_j = 0.
 *
 * Memory:      all on the host, or all of it CUDA
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE (the other ranks get COLO_ERR_PEER); COLO_ERR_MISMATCH
 *              on all ranks (other config, mask or tokens, shards that do not tile [0, V)); those
 *              of colo_comm_all_gather()
 */
COLO_API colo_status_t colo_distill_forward(const colo_distill_config_t *config,
                                            const colo_distill_batch_t *batch, colo_comm_t *group,
                                            const colo_distill_out_t *out,
                                            colo_distill_saved_t *saved, void *saved_memory,
                                            void *workspace, colo_stream_t stream);
/**
 * colo_distill_backward() - gradient of the raw logits; local, reads both and writes one
 * @saved:     from forward; may be used again, with the same result
 * @upstream:  in  borrowed for the call
 * @d_logits:  out [T, Vl], dtype of the logits. If it is the logits themselves (same data and
 *                 strides), the gradient overwrites them, which ends @saved. Any other overlap
 *                 with logits or targets is an error
 * @stream:    as in forward
 * Errors:     COLO_ERR_STATE, COLO_ERR_MODIFIED, COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_distill_backward(colo_distill_saved_t *saved,
                                             const colo_distill_upstream_t *upstream,
                                             const colo_tensor_t *d_logits, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
