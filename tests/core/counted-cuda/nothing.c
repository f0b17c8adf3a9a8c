/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nothing.c - kernels that launch nothing, and the rest of the runtime that the linker wants. Each
 * returns cudaSuccess, which is 0; no prototype, because none reads its arguments.
 */
#define NOTHING(name) \
    int name(void);   \
    int name(void)    \
    {                 \
        return 0;     \
    }

NOTHING(cudaDeviceGetStreamPriorityRange)
NOTHING(cudaEventCreateWithFlags)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord)
NOTHING(cudaFree)
NOTHING(cudaFreeAsync)
NOTHING(cudaMalloc)
NOTHING(cudaMallocAsync)
NOTHING(cudaMemcpyAsync)
NOTHING(cudaMemsetAsync)
NOTHING(cudaStreamCreateWithPriority)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamGetCaptureInfo)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)

NOTHING(colo_k_box_hash)
NOTHING(colo_k_box_nonzero)
NOTHING(colo_k_box_sum)
NOTHING(colo_k_box_sums)
NOTHING(colo_k_boxes_copy)
NOTHING(colo_k_boxes_shift)
NOTHING(colo_k_distill_grad)
NOTHING(colo_k_distill_merge)
NOTHING(colo_k_distill_stats)
NOTHING(colo_k_half_sum)
NOTHING(colo_k_load)
NOTHING(colo_k_logprob_grad)
NOTHING(colo_k_logprob_merge)
NOTHING(colo_k_logprob_stats)
NOTHING(colo_k_masked_sum)
NOTHING(colo_k_mean_grad)
NOTHING(colo_k_topk_fix)
NOTHING(colo_k_topk_given)
NOTHING(colo_k_topk_merge)
NOTHING(colo_k_topk_rows)
NOTHING(colo_k_topk_sum)
NOTHING(colo_k_topk_largest)
NOTHING(colo_k_rows_clear)
NOTHING(colo_k_rows_convert)
NOTHING(colo_k_rows_compact)
NOTHING(colo_k_rows_restore)
NOTHING(colo_k_rows_scatter)
NOTHING(colo_k_rows_sum)
NOTHING(colo_k_rows_factor)
NOTHING(colo_k_rows_gather)
NOTHING(colo_k_rows_upstream)
NOTHING(colo_k_sequence_gather)
NOTHING(colo_k_sequence_mask)
NOTHING(colo_k_sequence_scatter)
NOTHING(colo_k_sequence_targets)
NOTHING(colo_k_weighted_finish)
NOTHING(colo_k_weighted_local)
