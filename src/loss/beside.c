/* SPDX-License-Identifier: Apache-2.0 */
/* beside.c - the host's table of beside.h, and which table serves a memory. */
#include "loss/beside.h"

#include "core/try.h"
#include "loss/distill-pass.h"
#include "loss/pick-pass.h"
#include "loss/sequence-pass.h"
#include "loss/weighted.h"

const colo_beside_ops_t colo_host_beside_ops = {
    .pick_rows = colo_host_pick_rows,
    .pick_local = colo_host_pick_local,
    .pick_merge = colo_host_pick_merge,
    .pick_sum = colo_host_pick_sum,
    .pick_fix = colo_host_pick_fix,
    .distill_stats = colo_host_distill_stats,
    .distill_merge = colo_host_distill_merge,
    .distill_grad = colo_host_distill_grad,
    .sequence_targets = colo_host_sequence_targets,
    .sequence_mask = colo_host_sequence_mask,
    .sequence_spread = colo_host_sequence_spread,
    .sequence_collect = colo_host_sequence_collect,
    .weighted_local = colo_host_weighted_local,
    .weighted_finish = colo_host_weighted_finish,
    .mean_grad = colo_host_mean_grad,
};

colo_status_t colo_beside_i_for(colo_mem_t mem, const colo_ops_t **ops,
                                const colo_beside_ops_t **beside)
{
    const colo_ops_t *table;
    COLO_TRY(colo_ops_for(mem, &table));
    if (!table->beside)
        return colo_fail(COLO_ERR_UNBUILT, "loss: the passes of this call are not built for %s",
                         table->name);
    *beside = table->beside;
    if (ops)
        *ops = table;
    return COLO_OK;
}
