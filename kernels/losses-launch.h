/* SPDX-License-Identifier: Apache-2.0 */
/*
 * losses-launch.h - launchers of the other losses: top-k (topk-loss.cu, topk.cu), what a sampler
 * keeps (sampling.cu), target distributions (distill.cu), sequences and weighted sums (sequence.cu).
 * The rules are those of kernels.h.
 */
#ifndef COLO_KERNELS_LOSSES_LAUNCH_H
#define COLO_KERNELS_LOSSES_LAUNCH_H

#include "kernels.h"
#include "loss/distill-pass.h"
#include "loss/sampling-pass.h"
#include "loss/sequence-pass.h"
#include "loss/topk-pass.h"
#include "loss/weighted.h"

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t colo_k_topk_rows(const struct colo_topk_pass *p, cudaStream_t stream);
/* the candidates: those given; or the k largest, and in the same read what colo_k_logprob_stats()
 * makes of p's base (topk.cu) */
cudaError_t colo_k_topk_given(const struct colo_topk_pass *p, cudaStream_t stream);
cudaError_t colo_k_topk_largest(const struct colo_topk_pass *p, cudaStream_t stream);
cudaError_t colo_k_topk_merge(const struct colo_topk_pass *p, cudaStream_t stream);
cudaError_t colo_k_topk_sum(const struct colo_topk_pass *p, cudaStream_t stream);
cudaError_t colo_k_topk_fix(const struct colo_topk_pass *p, cudaStream_t stream);

cudaError_t colo_k_sampling_largest(const struct colo_sampling_pass *p, cudaStream_t stream);
cudaError_t colo_k_sampling_sums(const struct colo_sampling_pass *p, cudaStream_t stream);
cudaError_t colo_k_sampling_find(const struct colo_sampling_pass *p, cudaStream_t stream);
cudaError_t colo_k_sampling_keep(const struct colo_sampling_pass *p, cudaStream_t stream);

cudaError_t colo_k_distill_stats(const struct colo_distill_pass *p, cudaStream_t stream);
cudaError_t colo_k_distill_merge(const struct colo_distill_pass *p, cudaStream_t stream);
cudaError_t colo_k_distill_grad(const struct colo_distill_pass *p, cudaStream_t stream);

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
