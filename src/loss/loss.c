/* SPDX-License-Identifier: Apache-2.0 */
/* loss.c - the host's table of loss.h, and which table serves a memory. */
#include "loss/loss.h"

#include "core/backend.h"
#include "core/error.h"
#include "loss/distill-pass.h"
#include "loss/topk-pass.h"
#include "loss/sampling-pass.h"
#include "loss/sequence-pass.h"
#include "loss/weighted.h"

const colo_loss_ops_t colo_loss_host = {
    .logprob_stats = colo_host_logprob_stats,
    .logprob_merge = colo_host_logprob_merge,
    .logprob_grad = colo_host_logprob_grad,
    .gemm = &colo_gemm_host,
    .rows_compact = colo_host_rows_compact,
    .rows_upstream = colo_host_rows_upstream,
    .rows_factor = colo_host_rows_factor,
    .rows_scatter = colo_host_rows_scatter,
    .rows_gather = colo_host_rows_gather,
    .rows_restore = colo_host_rows_restore,
    .rows_clear = colo_host_rows_clear,
    .rows_sum = colo_host_rows_sum,
    .rows_convert = colo_host_rows_convert,
    .topk_rows = colo_host_topk_rows,
    .topk_local = colo_host_topk_local,
    .topk_merge = colo_host_topk_merge,
    .topk_sum = colo_host_topk_sum,
    .topk_fix = colo_host_topk_fix,
    .sampling_largest = colo_host_sampling_largest,
    .sampling_sums = colo_host_sampling_sums,
    .sampling_find = colo_host_sampling_find,
    .sampling_keep = colo_host_sampling_keep,
    .distill_stats = colo_host_distill_stats,
    .distill_merge = colo_host_distill_merge,
    .distill_grad = colo_host_distill_grad,
    .sequence_targets = colo_host_sequence_targets,
    .sequence_mask = colo_host_sequence_mask,
    .sequence_scatter = colo_host_sequence_scatter,
    .sequence_gather = colo_host_sequence_gather,
    .weighted_local = colo_host_weighted_local,
    .weighted_finish = colo_host_weighted_finish,
    .mean_grad = colo_host_mean_grad,
};

colo_status_t colo_loss_ops_for(colo_mem_t mem, const colo_loss_ops_t **loss)
{
    const colo_backend_t *b;
    if (mem != COLO_CUDA) {
        *loss = &colo_loss_host;
        return COLO_OK;
    }
    COLO_TRY(colo_backend_load("cuda", &b));
    if (!b->loss)
        return colo_fail(COLO_ERR_UNBUILT, "backend 'cuda' offers no losses");
    *loss = b->loss;
    return COLO_OK;
}
