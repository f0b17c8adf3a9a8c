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

/* Name and parameters of each pass. Those of a struct are described with it; the others:
 *
 *   rows_factor   to = {from[0] * factor * by[0], 0, 1}, as [COLO_LINEAR_SCALE]; by NULL: 1
 *   rows_gather   to [hi - lo, hidden] contiguous = rows [lo, hi) of from [T, hidden]; 0 in a row
 *                 without a token. Same dtype
 *   rows_restore  the reverse: tokens of rows [lo, hi) are written, the others left alone
 *   rows_clear    tokens without a row: 0, NaN when dropped
 *   rows_sum      to[j * to_step] = beta to + scale[0] * sum over rows of z[., j] (scale NULL: 1);
 *                 to is f32 (f64 of f64), sums are in that dtype or a wider one, rows ascending or
 *                 by a tree that depends on rows only
 *   rows_convert  to [rows, columns] = from, rounded to to's dtype; strided both
 */
#define COLO_PASS(type) (const struct type *p, colo_stream_t stream)
#define COLO_LOSS_PASSES(X)                                                                        \
    X(logprob_stats, COLO_PASS(colo_logprob_pass)) /* each segment that the rank has */            \
    X(logprob_merge, COLO_PASS(colo_logprob_pass))                                                 \
    X(logprob_grad, COLO_PASS(colo_logprob_pass))                                                  \
    X(rows_compact, COLO_PASS(colo_linear_rows))                                                   \
    X(rows_upstream, COLO_PASS(colo_linear_upstream_rows))                                         \
    X(rows_scatter, COLO_PASS(colo_linear_scatter))                                                \
    X(rows_factor,                                                                                 \
      (float *to, const float *from, double factor, const float *by, colo_stream_t stream))        \
    X(rows_gather, (const struct colo_linear_rows *r, int64_t lo, int64_t hi, int64_t hidden,      \
                    void *to, const struct colo_linear_matrix *from, colo_stream_t stream))        \
    X(rows_restore, (const struct colo_linear_rows *r, int64_t lo, int64_t hi, int64_t hidden,     \
                     const struct colo_linear_matrix *to, const void *from, colo_stream_t stream)) \
    X(rows_clear, (const struct colo_linear_rows *r, int64_t hidden,                               \
                   const struct colo_linear_matrix *to, colo_stream_t stream))                     \
    X(rows_sum,                                                                                    \
      (const struct colo_linear_matrix *z, int64_t rows, int64_t columns, const float *scale,      \
       void *to, int64_t to_step, double beta, colo_stream_t stream))                              \
    X(rows_convert, (const struct colo_linear_matrix *to, const struct colo_linear_matrix *from,   \
                     int64_t rows, int64_t columns, colo_stream_t stream))                         \
    X(topk_rows, COLO_PASS(colo_topk_pass))                                                        \
    X(topk_local, COLO_PASS(colo_topk_pass))                                                       \
    X(topk_merge, COLO_PASS(colo_topk_pass))                                                       \
    X(topk_sum, COLO_PASS(colo_topk_pass))                                                         \
    X(topk_fix, COLO_PASS(colo_topk_pass))                                                         \
    X(sampling_largest, COLO_PASS(colo_sampling_pass))                                             \
    X(sampling_sums, COLO_PASS(colo_sampling_pass))                                                \
    X(sampling_find, COLO_PASS(colo_sampling_pass))                                                \
    X(sampling_keep, COLO_PASS(colo_sampling_pass))                                                \
    X(distill_stats, COLO_PASS(colo_distill_pass))                                                 \
    X(distill_merge, COLO_PASS(colo_distill_pass))                                                 \
    X(distill_grad, COLO_PASS(colo_distill_pass))                                                  \
    X(sequence_targets, COLO_PASS(colo_sequence_pass))                                             \
    X(sequence_mask, COLO_PASS(colo_sequence_pass))                                                \
    X(sequence_scatter, COLO_PASS(colo_sequence_pass))                                             \
    X(sequence_gather, COLO_PASS(colo_sequence_pass))                                              \
    X(weighted_local, COLO_PASS(colo_weighted_pass))                                               \
    X(weighted_finish, COLO_PASS(colo_weighted_pass))                                              \
    X(mean_grad, COLO_PASS(colo_mean_grad_pass))

#define COLO_LOSS_MEMBER(name, parameters) colo_status_t(*name) parameters;
typedef struct colo_loss_ops {
    const colo_gemm_ops_t *gemm;
    COLO_LOSS_PASSES(COLO_LOSS_MEMBER)
} colo_loss_ops_t;

/* The host's: host/ in plain C */
#define COLO_LOSS_HOST(name, parameters) colo_status_t colo_host_##name parameters;
COLO_LOSS_PASSES(COLO_LOSS_HOST)
extern const colo_loss_ops_t colo_loss_host;

/* The table for a tensor's memory; COLO_ERR_UNBUILT with an error message if this build lacks it.
 */
colo_status_t colo_loss_ops_for(colo_mem_t mem, const colo_loss_ops_t **loss);

#endif
