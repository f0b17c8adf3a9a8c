/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss.h (private) - the table of what the losses do with elements, one for each kind of memory
 * (loss.c; cuda/loss.c in libcolobridge-cuda.so).
 *
 * A pass gets checked arguments; it allocates nothing and does not wait. The oracle of every table
 * is tests/ref/.
 */
#ifndef COLO_LOSS_LOSS_H
#define COLO_LOSS_LOSS_H

#include "loss/linear/linear.h"

struct colo_topk_pass;     /* topk-pass.h */
struct colo_distill_pass;  /* distill-pass.h */
struct colo_sampling_pass; /* sampling-pass.h */
struct colo_sequence_pass; /* sequence-pass.h */
struct colo_weighted_pass; /* weighted.h */
struct colo_mean_grad_pass;

typedef struct colo_loss_ops {
    /* ---- logits: passes.h ---- */

    /* each segment that the rank has, if the config has segments */
    colo_status_t (*logprob_stats)(const struct colo_logprob_pass *p, colo_stream_t stream);
    colo_status_t (*logprob_merge)(const struct colo_logprob_pass *p, colo_stream_t stream);
    colo_status_t (*logprob_grad)(const struct colo_logprob_pass *p, colo_stream_t stream);

    /* ---- hidden states: linear.h ---- */

    const colo_gemm_ops_t *gemm;
    colo_status_t (*rows_compact)(const struct colo_linear_rows *r, colo_stream_t stream);
    colo_status_t (*rows_upstream)(const struct colo_linear_upstream_rows *u, colo_stream_t stream);
    /* to = {from[0] * factor * by[0], 0, 1}, as [COLO_LINEAR_SCALE]; NULL: 1 */
    colo_status_t (*rows_factor)(float *to, const float *from, double factor, const float *by,
                                 colo_stream_t stream);
    colo_status_t (*rows_scatter)(const struct colo_linear_scatter *s, colo_stream_t stream);
    /* to [hi - lo, hidden] contiguous = rows [lo, hi) of from [T, hidden]; 0 where there is no
     * token. Same dtype */
    colo_status_t (*rows_gather)(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                                 int64_t hidden, void *to, const struct colo_linear_matrix *from,
                                 colo_stream_t stream);
    /* the reverse: tokens of rows [lo, hi) are written, the others left alone */
    colo_status_t (*rows_restore)(const struct colo_linear_rows *r, int64_t lo, int64_t hi,
                                  int64_t hidden, const struct colo_linear_matrix *to,
                                  const void *from, colo_stream_t stream);
    /* tokens without a row: 0, NaN when dropped */
    colo_status_t (*rows_clear)(const struct colo_linear_rows *r, int64_t hidden,
                                const struct colo_linear_matrix *to, colo_stream_t stream);
    /* to[j * to_step] = beta to + scale[0] * sum over rows of z[., j] (scale NULL: 1); to is f32
     * (f64 of f64), sums are in that dtype or a wider one, rows ascending or by a tree that depends
     * on rows only */
    colo_status_t (*rows_sum)(const struct colo_linear_matrix *z, int64_t rows, int64_t columns,
                              const float *scale, void *to, int64_t to_step, double beta,
                              colo_stream_t stream);
    /* to [rows, columns] = from, rounded to to's dtype; strided both */
    colo_status_t (*rows_convert)(const struct colo_linear_matrix *to,
                                  const struct colo_linear_matrix *from, int64_t rows,
                                  int64_t columns, colo_stream_t stream);

    /* ---- the other losses ---- */

    colo_status_t (*topk_rows)(const struct colo_topk_pass *p, colo_stream_t stream);
    colo_status_t (*topk_local)(const struct colo_topk_pass *p, colo_stream_t stream);
    colo_status_t (*topk_merge)(const struct colo_topk_pass *p, colo_stream_t stream);
    colo_status_t (*topk_sum)(const struct colo_topk_pass *p, colo_stream_t stream);
    colo_status_t (*topk_fix)(const struct colo_topk_pass *p, colo_stream_t stream);
    colo_status_t (*sampling_largest)(const struct colo_sampling_pass *p, colo_stream_t stream);
    colo_status_t (*sampling_sums)(const struct colo_sampling_pass *p, colo_stream_t stream);
    colo_status_t (*sampling_find)(const struct colo_sampling_pass *p, colo_stream_t stream);
    colo_status_t (*sampling_keep)(const struct colo_sampling_pass *p, colo_stream_t stream);
    colo_status_t (*distill_stats)(const struct colo_distill_pass *p, colo_stream_t stream);
    colo_status_t (*distill_merge)(const struct colo_distill_pass *p, colo_stream_t stream);
    colo_status_t (*distill_grad)(const struct colo_distill_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_targets)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_mask)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_scatter)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*sequence_gather)(const struct colo_sequence_pass *p, colo_stream_t stream);
    colo_status_t (*weighted_local)(const struct colo_weighted_pass *p, colo_stream_t stream);
    colo_status_t (*weighted_finish)(const struct colo_weighted_pass *p, colo_stream_t stream);
    colo_status_t (*mean_grad)(const struct colo_mean_grad_pass *p, colo_stream_t stream);
} colo_loss_ops_t;

extern const colo_loss_ops_t colo_loss_host;

/* The table for a tensor's memory; COLO_ERR_UNBUILT with an error message if this build lacks it.
 */
colo_status_t colo_loss_ops_for(colo_mem_t mem, const colo_loss_ops_t **loss);

#endif
