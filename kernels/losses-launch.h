/* SPDX-License-Identifier: Apache-2.0 */
/*
 * losses-launch.h - launchers of what stands beside the loss of one target a token: picks
 * (topk-loss.cu, topk.cu), target distributions (distill.cu), sequences and weighted sums
 * (sequence.cu). The rules are those of kernels.h; structs that are declared here are
 * src/loss/{topk-pass,distill-pass}.h, flattened.
 */
#ifndef COLO_KERNELS_LOSSES_LAUNCH_H
#define COLO_KERNELS_LOSSES_LAUNCH_H

#include "kernels.h"
#include "loss/sequence-pass.h"
#include "loss/weighted.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_K_TOPK_SKIP INT64_MIN
#define COLO_K_TOPK_MAX 256 /* ids a token */

typedef struct colo_k_topk {
    colo_dtype_t dtype;
    double factor, softcap;
    int64_t vocab, vocab_start, ignore_index, tokens, k;
    bool topk, count;
    const void *logits;
    int64_t row_stride, true_columns;
    unsigned char *blocks; /* [ranks] blocks of block_bytes */
    int64_t block_bytes, pz, pid;
    int32_t rank, ranks;
    int32_t head_start, head_columns; /* words of a block's header: first column, columns */
    const int64_t *ids;
    int64_t id_stride;
    const uint8_t *mask;
    int64_t mask_stride;
    void *logp;
    int64_t *out_ids, *n_invalid;
    const double *saved; /* [2, tokens]: M, log Sum */
    int64_t *rows;
    void *sum;
    double *down;
    int64_t *kept;
    const void *d_logp;
    void *d_logits;
    int64_t d_row_stride;
} colo_k_topk_t;

cudaError_t colo_k_topk_rows(const colo_k_topk_t *p, cudaStream_t stream);
/* the candidates: those given; or the k largest, and in the same read what colo_k_logprob_stats()
 * makes of @stats, whose shard and blocks are p's (topk.cu) */
cudaError_t colo_k_topk_given(const colo_k_topk_t *p, cudaStream_t stream);
cudaError_t colo_k_topk_largest(const colo_k_logprob_t *stats, const colo_k_topk_t *p,
                                cudaStream_t stream);
cudaError_t colo_k_topk_merge(const colo_k_topk_t *p, cudaStream_t stream);
cudaError_t colo_k_topk_sum(const colo_k_topk_t *p, cudaStream_t stream);
cudaError_t colo_k_topk_fix(const colo_k_topk_t *p, cudaStream_t stream);

typedef struct colo_k_distill {
    colo_dtype_t dtype, target_dtype; /* the latter is the former or f32 */
    double factor, softcap, target_factor;
    bool probs;
    int64_t tokens;
    const void *logits, *targets;
    int64_t row_stride, target_row_stride, columns, true_columns;
    const uint8_t *mask;
    int64_t mask_stride;
    unsigned char *blocks;
    int64_t block_bytes, mx, sx, mv, sv, c, d;
    int64_t head[8];
    int32_t rank, ranks;
    void *ce, *kl;
    double *saved; /* [5, tokens] */
    const void *d_ce, *d_kl;
    void *d_logits;
    int64_t d_row_stride;
} colo_k_distill_t;

cudaError_t colo_k_distill_stats(const colo_k_distill_t *p, cudaStream_t stream);
cudaError_t colo_k_distill_merge(const colo_k_distill_t *p, cudaStream_t stream);
cudaError_t colo_k_distill_grad(const colo_k_distill_t *p, cudaStream_t stream);

/* the passes of src/loss, which host and kernels read alike */
cudaError_t colo_k_sequence_targets(const struct colo_sequence_pass *p, cudaStream_t stream);
cudaError_t colo_k_sequence_mask(const struct colo_sequence_pass *p, cudaStream_t stream);
cudaError_t colo_k_sequence_scatter(const struct colo_sequence_pass *p, cudaStream_t stream);
cudaError_t colo_k_sequence_gather(const struct colo_sequence_pass *p, cudaStream_t stream);

cudaError_t colo_k_weighted_local(const struct colo_weighted_pass *p, cudaStream_t stream);
cudaError_t colo_k_weighted_finish(const struct colo_weighted_pass *p, cudaStream_t stream);

cudaError_t colo_k_mean_grad(const struct colo_mean_grad_pass *p, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
