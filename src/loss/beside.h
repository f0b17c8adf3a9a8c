/* SPDX-License-Identifier: Apache-2.0 */
/*
 * beside.h (private) - the table of passes for what stands beside the loss of one target a token:
 * picks, target distributions, sequences, weighted sums. One for each kind of memory, in its
 * colo_ops_t.
 */
#ifndef COLO_LOSS_BESIDE_H
#define COLO_LOSS_BESIDE_H

#include "core/ops.h"

struct colo_pick_pass;     /* pick-pass.h */
struct colo_distill_pass;  /* distill-pass.h */
struct colo_sequence_pass; /* sequence-pass.h */
struct colo_weighted_pass; /* weighted.h */
struct colo_mean_grad_pass;

typedef struct colo_beside_ops {
    colo_status_t (*pick_rows)(const struct colo_pick_pass *p, colo_stream_t stream);
    colo_status_t (*pick_local)(const struct colo_pick_pass *p, colo_stream_t stream);
    colo_status_t (*pick_merge)(const struct colo_pick_pass *p, colo_stream_t stream);
    colo_status_t (*pick_sum)(const struct colo_pick_pass *p, colo_stream_t stream);
    colo_status_t (*pick_fix)(const struct colo_pick_pass *p, colo_stream_t stream);
    colo_status_t (*distill_stats)(const struct colo_distill_pass *p, colo_stream_t stream);
    colo_status_t (*distill_merge)(const struct colo_distill_pass *p, colo_stream_t stream);
    colo_status_t (*distill_grad)(const struct colo_distill_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_targets)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_mask)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_spread)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_collect)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*weighted_local)(const struct colo_weighted_pass *p, colo_stream_t stream);
    colo_status_t (*weighted_finish)(const struct colo_weighted_pass *p, colo_stream_t stream);
    colo_status_t (*mean_grad)(const struct colo_mean_grad_pass *p, colo_stream_t stream);
} colo_beside_ops_t;

extern const colo_beside_ops_t colo_host_beside_ops;

/* The tables for @mem; @ops may be NULL. COLO_ERR_UNBUILT with a sentence. */
colo_status_t colo_beside_i_for(colo_mem_t mem, const colo_ops_t **ops,
                                const colo_beside_ops_t **beside);

#endif
