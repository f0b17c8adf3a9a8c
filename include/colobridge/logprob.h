/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logprob.h - log-probability, entropy and loss of targets under vocabulary-parallel logits.
 *
 * Letters: T tokens on this rank, V vocabulary, W ranks of the vocabulary group, Vl columns
 * here. Raw logits z; y = scale z; x = cap tanh(y / cap) / temperature with softcap, else
 * y / temperature. M = max x, Sum = sum_j exp(x_j - M) over the whole vocabulary, lse = M + log
 * Sum, target t:
 *   logp    = (x_t - M) - log Sum                                  (never smoothed)
 *   entropy = log Sum - U / Sum,  U = sum_j exp(x_j - M)(x_j - M)
 *   loss    = (1-e)(lse - x_t) + e(lse - sum_j x_j / V) + z_loss lse^2
 *   with a weight w_j per class:
 *   loss    = w_t ((1-e)(lse - x_t) + z_loss lse^2) + e/V sum_j w_j (lse - x_j)
 *   lse     = M + log Sum,  sum_p2 = sum_j p_j^2,  mean_logits = sum_j x_j / V,  argmax of x
 * logp <= 0 and entropy >= 0 hold exactly, and so does loss >= 0 without class weights if e <= 1
 * (megatron_smoothing and local_smoothing can make e larger); NaN stays NaN.
 * Forward reads the shard once and does one all-gather; backward no collective.
 * A support replaces the vocabulary by a list of ids per token: colo_support_t.
 * Source of the formulas: docs/concepts/loss.md. Results do not depend on chunk_size, bit for bit.
 */
#ifndef COLOBRIDGE_LOGPROB_H
#define COLOBRIDGE_LOGPROB_H

#include <colobridge/comm.h>
#include <colobridge/logits.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Members from label_smoothing on have defaults: 0, false, ignore_index -100. */
typedef struct colo_logprob_config_t {
    size_t struct_size;
    colo_logits_options_t logits;
    double label_smoothing; /* e in [0, 1] */
    bool megatron_smoothing; /* e' = e V / (V - 1) */
    /* Smoothing as in Megatron-LM, over the n columns of this rank instead of the vocabulary: e' =
     * e n / (n - 1) and the mean of their x. The ranks' losses differ then; n >= 2. */
    bool local_smoothing;
    double z_loss; /* lambda, >= 0 */
    /* The batch brings class_weight, on all ranks: losses are weighted by class, and out.weight may
     * be asked for. Not with lenient_targets or local_smoothing. */
    bool has_class_weight;
    /* Targets outside [0, V) that are not ignore_index have no target term, instead of giving NaN:
     * logp is 0, loss is as if x_t were M, and gradients are those of the rest of the formula
     * (-p d_logp). n_invalid counts them all the same. */
    bool lenient_targets;
    int64_t ignore_index; /* -100 */
    bool want_entropy;    /* out.entropy may be asked for, and may have a gradient */
    bool want_loss;
    /* 1 if the target is the argmax of x, as the dtype of the outputs holds x (lowest index on
     * ties), else 0 */
    bool want_correct;
    int64_t chunk_size; /* tokens per pass, bounds workspace only; 0 = chosen, < 0 = error */
    /* > 0: results have the same bits for every number of ranks. Statistics are made of each
     * segment of so many columns of the vocabulary, and combined in the order of segments. A
     * multiple of 16; at most 64 segments. Of S segments rank r of W holds n from r n on, where n
     * is the least power of 2 that is not below S / W. 0: each rank's columns are one segment. See
     * docs/concepts/loss.md. */
    int64_t segment;
    int64_t order; /* a number for the order of the rows, if the caller has several: ranks compare it */
    /* out.argmax, .lse, .sum_p2 and .mean_logits may be asked for; lse may have a gradient, the
     * others never have. mean_logits: not with a support, local_smoothing, or both class weights and
     * smoothing. */
    bool want_argmax, want_lse, want_sum_p2, want_mean_logits;
    bool has_temperature; /* the batch brings temperature, on all ranks */
    int64_t reserved[7]; /* 0: room for members of newer headers. The size never changes, because
                          * other structs contain it */
} colo_logprob_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOGPROB_CONFIG_INIT sizeof(colo_logprob_config_t), {COLO_LOGITS_OPTIONS_INIT}, 0.0, false, false, 0.0, false, false, -100, false, false, false, 0, 0, 0, false, false, false, false, false, {}
#else
#define COLO_LOGPROB_CONFIG_INIT                                                          \
    .struct_size = sizeof(colo_logprob_config_t), .logits = {COLO_LOGITS_OPTIONS_INIT},   \
    .ignore_index = -100
#endif

/** What forward writes, per token; NULL members are not computed. Each is contiguous, in the memory of
 *  the logits, and written only on success. Numbers are f64 if the logits are f64, else f32. */
typedef struct colo_logprob_out_t {
    size_t struct_size;
    const colo_tensor_t *logp, *entropy, *loss; /* [T] */
    const colo_tensor_t *correct;               /* u8 [T] */
    const colo_tensor_t *n_valid;   /* i64 [1] tokens that are not ignored and have a legal target */
    const colo_tensor_t *n_invalid; /* i64 [1] targets outside [0, V) that are not ignore_index: logp
                                     *     and loss NaN, or as lenient_targets has it */
    /* [T] the class weight of the target, with has_class_weight; 0 of a token that n_valid does not
     * count. What a mean of the loss divides by is the sum of these: colo_loss_mean_weighted() */
    const colo_tensor_t *weight;
    /* i64 [T] the id of the largest x, as the dtype of the outputs holds x, the lowest one on ties;
     * -1 of an ignored token, and of a row that is NaN */
    const colo_tensor_t *argmax;
    const colo_tensor_t *lse, *sum_p2, *mean_logits; /* [T]; sum_p2 <= 1 */
} colo_logprob_out_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOGPROB_OUT_INIT sizeof(colo_logprob_out_t), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr
#else
#define COLO_LOGPROB_OUT_INIT .struct_size = sizeof(colo_logprob_out_t)
#endif

/** Upstream gradients, [T] each, contiguous, in the dtype of the outputs; NULL = zero. */
typedef struct colo_logprob_upstream_t {
    size_t struct_size;
    const colo_tensor_t *d_logp, *d_entropy, *d_loss;
    const colo_tensor_t *d_lse;
} colo_logprob_upstream_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOGPROB_UPSTREAM_INIT sizeof(colo_logprob_upstream_t), nullptr, nullptr, nullptr, nullptr
#else
#define COLO_LOGPROB_UPSTREAM_INIT .struct_size = sizeof(colo_logprob_upstream_t)
#endif

/**
 * The ids that a token was sampled from, for example the top k of the sampler. Every sum and
 * maximum of the formulas runs over them and the token's target, instead of the vocabulary, and
 * only they get a gradient other than 0. No other column is read in forward.
 *
 * A list may have any length. Its ids ascend; an id that occurs twice counts once. A CSR of offsets
 * [T + 1] is a begin at its first element and an end at its second. All ranks have the same lists.
 * Label smoothing is refused, and correct compares with the largest of the support. The list of an
 * ignored token is not read.
 */
typedef struct colo_support_t {
    const colo_tensor_t *ids;   /* i64 [N], contiguous, global; all lists */
    const colo_tensor_t *begin; /* i64 [T]: the first element of a token's list in ids */
    const colo_tensor_t *end;   /* i64 [T]: the element behind its last */
} colo_support_t;

/** Borrowed views of a support; begin.ndim 0: there is none. */
typedef struct colo_support_saved_t {
    colo_tensor_t ids, begin, end;
    uint64_t version; /* the sum of their versions */
} colo_support_saved_t;

/** What backward needs; caller's memory, filled by forward. Borrows logits, targets and buffer. */
typedef struct colo_logprob_saved_t {
    size_t struct_size;
    colo_tensor_t logits, targets; /* borrowed views */
    colo_support_saved_t support;
    colo_tensor_t class_weight; /* borrowed view; ndim 0: none */
    uint64_t logits_version, targets_version, class_weight_version;
    void *memory; /* borrowed: the caller's colo_logprob_saved_size() bytes: M, log Sum, h,
                   * two sums of class weights and 1 / temperature, if there are any */
    bool valid;
    colo_logprob_config_t config;
} colo_logprob_saved_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOGPROB_SAVED_INIT sizeof(colo_logprob_saved_t), {}, {}, {}, {}, 0, 0, 0, nullptr, false, {}
#else
#define COLO_LOGPROB_SAVED_INIT .struct_size = sizeof(colo_logprob_saved_t)
#endif

/**
 * colo_logprob_config_check() - are all members of @config in their ranges? Local
 * Errors:  COLO_ERR_ARG, naming the member, its value and its range
 */
COLO_API colo_status_t colo_logprob_config_check(const colo_logprob_config_t *config);
/**
 * colo_logprob_saved_size() - bytes of the saved statistics of @tokens with logits of @dtype
 * @bytes:  out
 */
COLO_API colo_status_t colo_logprob_saved_size(const colo_logprob_config_t *config,
                                               colo_dtype_t dtype, int64_t tokens, size_t *bytes);
/**
 * colo_logprob_workspace_size() - bytes of workspace that forward needs on a group of @ranks
 * @bytes:  out
 */
COLO_API colo_status_t colo_logprob_workspace_size(const colo_logprob_config_t *config,
                                                   colo_dtype_t dtype, int64_t tokens,
                                                   int32_t ranks, size_t *bytes);

/** The tensors that a forward reads, borrowed; all in one memory. */
typedef struct colo_logprob_batch_t {
    size_t struct_size;
    /* [T, Vl] f32, f64, bf16 or f16; columns contiguous, rows at any stride; borrowed until
     * backward */
    const colo_tensor_t *logits;
    const colo_tensor_t *targets; /* i64 [T], global indices; borrowed until backward */
    const colo_support_t
        *support; /* NULL: the vocabulary; its tensors are borrowed until backward */
    /* [Vl] in the dtype of the outputs, contiguous: the weights of this rank's columns, or of those
     * of them that are in the vocabulary; borrowed until backward. Given iff
     * config.has_class_weight. Any numbers: a negative one is taken as it is, a NaN makes the losses
     * NaN that it enters. A class of weight 0 adds nothing to a loss, also where its x is -inf. */
    const colo_tensor_t *class_weight;
    /* f32 [T], contiguous, finite and > 0, the same on all ranks: the x of token t is divided by
     * temperature[t], in addition to config.logits.temperature; not read after forward, nor of an
     * ignored token. Given iff config.has_temperature. Another number is COLO_ERR_ARG in host
     * memory; on a GPU it makes the row NaN. */
    const colo_tensor_t *temperature;
} colo_logprob_batch_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOGPROB_BATCH_INIT sizeof(colo_logprob_batch_t), nullptr, nullptr, nullptr, nullptr, nullptr
#else
#define COLO_LOGPROB_BATCH_INIT .struct_size = sizeof(colo_logprob_batch_t)
#endif

/**
 * colo_logprob_forward() - one read of the logits, one all-gather over @group (none if it has one
 * rank)
 * @batch:      in  borrowed for the call; its members say how long their tensors are
 * @group:      the vocabulary (tp) group, collective; NULL is an error (colo_comm_create_self()
 *              for W = 1)
 * @out:        out what the config wants; a member without its want_ is an error
 * @saved:      out may be NULL if there is no backward; then @saved_memory is NULL, too
 * @saved_memory:  colo_logprob_saved_size() bytes, aligned (COLO_ALIGNMENT), borrowed until
 *              the last backward
 * @workspace:  colo_logprob_workspace_size() bytes, aligned, free again after the call
 * @stream:     NULL on the host, where the call returns when the work is done. On a GPU the call
 *              enqueues the work on @stream, and the host does not wait
 *              (on several ranks it does in the first calls for a vocabulary, until ranks were seen
 *              to have shards of it, and at COLO_CHECK=2; not in a capture, or at COLO_CHECK=0)
 *
 * Special values (also in docs/concepts/loss.md). An ignored token has 0 in every output but argmax,
 * which is -1, and its row is not read. An invalid target gives logp and loss NaN, the others as
 * usual, and through logp and loss a gradient of NaN in that row (see lenient_targets). A row of
 * nothing but -inf gives NaN in every output (argmax -1, correct 0) and in its gradient. A target
 * that is -inf among finite logits gives logp -inf, and finite entropy and gradient; any -inf gives
 * mean_logits -inf. +inf or NaN anywhere in the row, on any rank, gives NaN on all ranks. With a
 * support only its columns count for these. A list that does not ascend, leaves ids
 * or names an id outside [0, V) is COLO_ERR_ARG in host memory; on a GPU it makes the row NaN.
 *
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE (the other ranks get COLO_ERR_PEER); COLO_ERR_MISMATCH
 *              on all ranks (other config, targets, support or tokens, or shards that do not tile
 *              [0, V)), on a GPU if all compare: docs/concepts/loss.md; those of colo_comm_all_gather()
 */
COLO_API colo_status_t colo_logprob_forward(const colo_logprob_config_t *config,
                                            const colo_logprob_batch_t *batch, colo_comm_t *group,
                                            const colo_logprob_out_t *out,
                                            colo_logprob_saved_t *saved, void *saved_memory,
                                            void *workspace, colo_stream_t stream);
/**
 * colo_logprob_backward() - gradient of the raw logits; local, one read and one write
 * @saved:     from forward; may be used again, with the same result
 * @upstream:  in  borrowed for the call
 * @d_logits:  out [T, Vl], dtype of the logits. If it is the logits themselves (same data and
 *                 strides), the gradient overwrites them, which ends @saved. Any other overlap is
 *                 an error
 * @stream:    as in forward
 * Errors:     COLO_ERR_STATE (no forward, or ended), COLO_ERR_MODIFIED (the version counter of
 *             logits, targets, support or class weights moved), COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_logprob_backward(colo_logprob_saved_t *saved,
                                             const colo_logprob_upstream_t *upstream,
                                             const colo_tensor_t *d_logits, colo_stream_t stream);

/** A masked sum and its mean: num and den are sums over the dp x cp group, never over tp. */
typedef struct colo_loss_reduced_t {
    double num;   /* global sum */
    int64_t den;  /* global token count */
    double value; /* num / den, 0 when den is 0 */
} colo_loss_reduced_t;

/**
 * colo_loss_reduce() - sum values over tokens and ranks, divide once
 * @values:  in  [count] f32 or f64 (dtype). Host memory; on a group of GPUs (<colobridge/nccl.h>)
 *               memory of this rank's device, summed on @stream in a fixed order
 * @mask:    in  [count], in the memory of @values, or NULL; tokens whose mask is 0 do not count
 * @group:   the dp x cp group; NULL is an error. One all-gather; every rank joins, also with count
 *           0
 * @out:     out host memory, written on return: the host waits, so the call cannot be captured
 *               (COLO_ERR_STATE)
 * The gradient of the result with respect to a counted value is 1 / den.
 * Errors:   COLO_ERR_ARG, COLO_ERR_NOMEM (the other ranks get COLO_ERR_PEER); those of
 *           colo_comm_all_gather()
 */
COLO_API colo_status_t colo_loss_reduce(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                        int64_t count, colo_comm_t *group,
                                        colo_loss_reduced_t *out, colo_stream_t stream);

/** A masked, weighted sum over tokens and ranks. */
typedef struct colo_loss_weighted_t {
    double num;    /* global sum of weight * value */
    double weight; /* global sum of weights */
    int64_t den;   /* global token count */
    double value;  /* num / den, 0 when den is 0 */
} colo_loss_weighted_t;

/**
 * colo_loss_weighted_workspace_size() - bytes of workspace of colo_loss_weighted_sum(),
 * colo_loss_mean_forward() and colo_loss_mean_weighted() on a group of @ranks
 */
COLO_API size_t colo_loss_weighted_workspace_size(int32_t ranks);
/**
 * colo_loss_weighted_sum() - sum_t w_t v_t / den, for example of advantages times
 * log-probabilities, and its gradient
 * @values:     in  [T] f32 or f64, contiguous
 * @weights:    in  [T], dtype of @values, contiguous; NULL: 1
 * @mask:       in  u8 [T], contiguous, or NULL; tokens whose mask is 0 do not count and are not
 *                  read
 * @group:      the dp x cp group, never tp; NULL is an error. One all-gather (none on a group of
 *              one); every rank joins, also with T = 0
 * @out:        out in the memory of @values
 * @d_values:   out [T] or NULL, as @values: d value / d values = w / den, 0 if masked. Its data
 *                  can be the upstream gradient d_logp or d_loss as they are
 * @workspace:  colo_loss_weighted_workspace_size() bytes, aligned, in the memory of @values
 * @stream:     NULL on the host, where the call returns when the work is done. On a GPU the call
 *              enqueues the work on @stream, and the host does not wait
 * Sums are fp64, in a fixed order: the same bits on every rank and in every run.
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE (the other ranks get COLO_ERR_PEER); COLO_ERR_MISMATCH
 *              on all ranks (some ranks call colo_loss_mean_forward() or _weighted() instead); on a
 *              GPU NaN instead
 */
COLO_API colo_status_t colo_loss_weighted_sum(const colo_tensor_t *values,
                                              const colo_tensor_t *weights,
                                              const colo_tensor_t *mask, colo_comm_t *group,
                                              colo_loss_weighted_t *out,
                                              const colo_tensor_t *d_values, void *workspace,
                                              colo_stream_t stream);

/** A loss of tokens over ranks; each other member is [1], in the memory of the tokens' losses, f64
 *  unless said. */
typedef struct colo_loss_mean_t {
    size_t struct_size;
    const colo_tensor_t *value;  /* num / max(den, 1), or num, in the dtype of the losses; of
                                  * colo_loss_mean_weighted() num / den, 0 if den is 0 */
    const colo_tensor_t *num;    /* global sum */
    const colo_tensor_t *den;    /* global token count; of colo_loss_mean_weighted() the sum of
                                  * weights */
    const colo_tensor_t *factor; /* d value / d loss of each token, for backward: 1 / max(den, 1),
                                  * or 1; of colo_loss_mean_weighted() 1 / den, 0 if den is 0 */
} colo_loss_mean_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOSS_MEAN_INIT sizeof(colo_loss_mean_t), nullptr, nullptr, nullptr, nullptr
#else
#define COLO_LOSS_MEAN_INIT .struct_size = sizeof(colo_loss_mean_t)
#endif

/**
 * colo_loss_mean_forward() - sum or mean of losses, with a count of tokens that forward has made,
 * so that the host does not wait for the count
 * @losses:     in  [T] f32 or f64, contiguous; 0 if a token does not count
 * @n_valid:    in  i64 [1] how many of them count: colo_logprob_out_t.n_valid
 * @divide:     value is the mean, else the sum
 * @group:      the dp x cp group, never tp; NULL is an error. One all-gather (none on a group of
 *              one); every rank joins, also with T = 0
 * @out:        out every member, in the memory of @losses
 * @workspace:  colo_loss_weighted_workspace_size() bytes, aligned, in the memory of @losses
 * @stream:     as in colo_loss_weighted_sum(); so are the order of sums, and the errors
 * A NaN is not hidden, also if no token counts.
 */
COLO_API colo_status_t colo_loss_mean_forward(const colo_tensor_t *losses,
                                              const colo_tensor_t *n_valid,
                                              bool divide, colo_comm_t *group,
                                              const colo_loss_mean_t *out, void *workspace,
                                              colo_stream_t stream);
/**
 * colo_loss_mean_weighted() - as colo_loss_mean_forward(), of losses that are weighted already,
 * divided by the sum of the weights: those of logprob with class weights
 * @weights:    in  [T] dtype of @losses, contiguous: colo_logprob_out_t.weight
 * Other arguments and errors: as colo_loss_mean_forward()'s. If the weights add up to 0, a mean and
 * the gradients are 0.
 */
COLO_API colo_status_t colo_loss_mean_weighted(const colo_tensor_t *losses,
                                               const colo_tensor_t *weights, bool divide,
                                               colo_comm_t *group, const colo_loss_mean_t *out,
                                               void *workspace, colo_stream_t stream);
/** Upstream gradients, [1] each; NULL = zero. */
typedef struct colo_loss_mean_upstream_t {
    size_t struct_size;
    const colo_tensor_t *d_value; /* dtype of the losses */
    const colo_tensor_t *d_num;   /* f64 */
} colo_loss_mean_upstream_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_LOSS_MEAN_UPSTREAM_INIT sizeof(colo_loss_mean_upstream_t), nullptr, nullptr
#else
#define COLO_LOSS_MEAN_UPSTREAM_INIT .struct_size = sizeof(colo_loss_mean_upstream_t)
#endif

/**
 * colo_loss_mean_backward() - d_losses[t] = d_value factor + d_num, the same for all tokens; local
 * @factor:    in  f64 [1] from forward
 * @upstream:  in  borrowed for the call
 * @d_losses:  out [T], as the losses; can be colo_logprob_upstream_t.d_loss
 * @stream:    as in forward. All arguments are in the same memory
 * The loss is already divided by the global token count: sum gradients over the group, do not
 * average.
 * Errors:     COLO_ERR_ARG, COLO_ERR_SHAPE
 */
COLO_API colo_status_t colo_loss_mean_backward(const colo_tensor_t *factor,
                                               const colo_loss_mean_upstream_t *upstream,
                                               const colo_tensor_t *d_losses, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
