/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loss_gpu.h - runs a loss_case_t on a GPU: as the public calls do on a group of one, or pass by
 * pass over W shards whose blocks lie side by side, as after a gather.
 */
#ifndef TESTS_LOSS_GPU_H
#define TESTS_LOSS_GPU_H

#include "gpu/gpu.h"
#include "loss/loss_case.h"

/* Fills the results of @c. @shift: elements by which the matrices start past a 16-byte boundary,
 * the logits by the first, the gradient by the second; rows start c->row_gap apart. */
void gpu_case_run(loss_case_t *c, const int64_t *shift);
void gpu_case_run_shards(loss_case_t *c);

/* Against tests/ref, within the tolerance that loss_gpu.c derives. */
void gpu_case_compare(const loss_case_t *c, const char *label);

/* One row: @got and @dz as stored, widened. NULL @dz: forward only. */
void gpu_row_compare(const ref_logprob_opts_t *o, colo_dtype_t dtype, const double *z,
                     int64_t vocab, int64_t target, const double *got, const bool *asked,
                     const double *up, const double *dz, const char *label);

#endif
