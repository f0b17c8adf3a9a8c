/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sampling.h - which ids of vocabulary-parallel logits a sampler with top-k and top-p draws from.
 *
 * The ids of a token are ordered by logit, the largest first; of equal logits the lowest id is
 * first, and -0 equals 0. Letters are those of logprob.h: x of a logit, M = max x.
 *
 *   1. top_k keeps the first k ids.
 *   2. top_p keeps of these the shortest list of first ids whose mass is at least top_p times the
 *      mass of all ids that step 1 kept. It keeps at least one id.
 *
 * The mass of an id is exp(x - M) in fp64, rounded down to an integer of units. There are
 * 2^(62 - b) units in 1, if V has b bits, so that all masses add up to less than 2^63. Sums of
 * integers are exact: neither the number of ranks nor the cut of the vocabulary or of the tokens
 * changes which ids are kept.
 */
#ifndef COLOBRIDGE_SAMPLING_H
#define COLOBRIDGE_SAMPLING_H

#include <colobridge/comm.h>
#include <colobridge/logits.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Members from top_k on have the default 0. */
typedef struct colo_sampling_config_t {
    size_t struct_size;
    colo_logits_options_t logits; /* scale > 0, softcap 0: else no logit would have x = -inf */
    int64_t top_k;                /* >= 0; 0: all ids, as is V or more */
    double top_p;                 /* in [0, 1]; 0 or 1: all that top_k keeps */
} colo_sampling_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_SAMPLING_CONFIG_INIT sizeof(colo_sampling_config_t), {COLO_LOGITS_OPTIONS_INIT}, 0, 0.0
#else
#define COLO_SAMPLING_CONFIG_INIT \
    .struct_size = sizeof(colo_sampling_config_t), .logits = {COLO_LOGITS_OPTIONS_INIT}
#endif

/**
 * colo_sampling_config_check() - are all members of @config in their ranges? Local
 * Errors:  COLO_ERR_ARG, naming the member, its value and its range
 */
COLO_API colo_status_t colo_sampling_config_check(const colo_sampling_config_t *config);
/**
 * colo_sampling_workspace_size() - bytes of workspace of a call on a group of @ranks: about 2 KiB
 * per token and rank, for any vocabulary. A call over fewer tokens needs less
 * @bytes:  out
 */
COLO_API colo_status_t colo_sampling_workspace_size(const colo_sampling_config_t *config,
                                                    colo_dtype_t dtype, int64_t tokens,
                                                    int32_t ranks, size_t *bytes);
/**
 * colo_sampling_keep() - copies the logits of the ids that are kept, and writes -inf to all others
 * @logits:     in  [T, Vl] f32, f64, bf16 or f16; columns contiguous, rows at any stride; borrowed
 *                  for the call
 * @out:        out [T, Vl], dtype of the logits. If it is the logits themselves (same data and
 *                  strides), they are overwritten. Any other overlap is an error. Padding columns
 *                  become -inf
 * @group:      the vocabulary (tp) group, collective; NULL is an error
 * @workspace:  colo_sampling_workspace_size() bytes, aligned, free again after the call
 * @stream:     NULL on the host, where the call returns when the work is done. On a GPU the call
 *              enqueues the work on @stream, and the host does not wait
 *              (on several ranks it does in the first calls for a vocabulary, until ranks were seen
 *              to have shards of it, and at COLO_CHECK=2; not in a capture, or at COLO_CHECK=0)
 *
 * The gradient of log-probabilities of @out (logprob.h) is that of the logits: an id that is not
 * kept has none, except a target.
 *
 * A row with NaN or +inf on any rank, or with nothing but -inf, is copied as it is.
 *
 * Each of the two steps reads the logits once per byte of a logit and once more, with one
 * all-gather per byte; there is one read and one all-gather before. A group of one rank gathers
 * nothing.
 *
 * Memory:      all on the host, or all of it CUDA; on CUDA the shards are not compared across
 *              ranks
 * Errors:      COLO_ERR_ARG, COLO_ERR_SHAPE (the other ranks get COLO_ERR_PEER); COLO_ERR_MISMATCH
 *              on all ranks (other config or tokens, shards that do not tile [0, V)); those of
 *              colo_comm_all_gather()
 */
COLO_API colo_status_t colo_sampling_keep(const colo_sampling_config_t *config,
                                          const colo_tensor_t *logits, const colo_tensor_t *out,
                                          colo_comm_t *group, void *workspace,
                                          colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
