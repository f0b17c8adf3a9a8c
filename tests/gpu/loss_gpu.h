/* SPDX-License-Identifier: Apache-2.0 */
/* loss_gpu.h - compares a loss_case_t that ran on a GPU, in the precision of its kernels. */
#ifndef TESTS_GPU_LOSS_GPU_H
#define TESTS_GPU_LOSS_GPU_H

#include "gpu/gpu.h"
#include "loss/loss_case.h"

/* Against tests/ref, within the tolerance that loss_gpu.c derives. */
void gpu_case_compare(const loss_case_t *c, const char *label);

/* One row: @got [LOSS_OUTS] and @dz as stored, widened. @up [LOSS_UPS + 1]: at the end, is d_logp
 * or d_loss given? NULL @dz: forward only. */
void gpu_row_compare(const ref_logprob_opts_t *o, colo_dtype_t dtype, const double *z,
                     int64_t vocab, int64_t target, const double *got, const bool *asked,
                     const double *up, const double *dz, const char *label);

#endif
