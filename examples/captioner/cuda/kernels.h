/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - what ops-cuda.c launches. Plain kernels, about a thread an element: the model is
 * small, and a reader should see the formula of ops-host.c in each. Sums have a fixed order, so the
 * same inputs give the same bits on every rank. Empty work is success without a launch.
 */
#ifndef EXAMPLES_CAPTIONER_CUDA_KERNELS_H
#define EXAMPLES_CAPTIONER_CUDA_KERNELS_H

#include <cuda_runtime_api.h>

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- rows.cu: each element or row by itself ---- */

cudaError_t cap_k_gelu(int64_t count, const float *z, float *act, float *slope,
                       cudaStream_t stream);
cudaError_t cap_k_scale(int64_t count, const float *by, float *y, cudaStream_t stream);
cudaError_t cap_k_add_rows(int64_t t, int64_t d, const float *skip, const float *bias, float *y,
                           cudaStream_t stream);
cudaError_t cap_k_norm(int64_t t, int64_t d, const float *x, const float *gain, const float *bias,
                       float *x_hat, float *r, float *y, cudaStream_t stream);
cudaError_t cap_k_norm_d_x(int64_t t, int64_t d, const float *d_y, const float *gain,
                           const float *x_hat, const float *r, const float *d_skip, float *d_x,
                           cudaStream_t stream);
cudaError_t cap_k_merge(const cap_sequence_t *s, int64_t d, int64_t yn, const float *y,
                        const float *embed, const float *table, float *x, cudaStream_t stream);
cudaError_t cap_k_adam(int64_t count, float rate, float fix1, float fix2, const float *g, float *m,
                       float *v, float *w, cudaStream_t stream);

/* ---- sums.cu: sums over tokens, in fp64 ---- */

/* sum [d] += sum over t of y [t, d], times @by [t, d] where that is given */
cudaError_t cap_k_sum_rows(int64_t t, int64_t d, const float *y, const float *by, float *sum,
                           cudaStream_t stream);
/* @d_y is zeros already, or NULL */
cudaError_t cap_k_merge_backward(const cap_sequence_t *s, int64_t d, int64_t yn, const float *d_x,
                                 float *d_y, float *d_embed, float *d_table, cudaStream_t stream);

/* ---- attention.cu; @work [b, h, n, window] ---- */

cudaError_t cap_k_attend(const cap_sequence_t *s, const float *q, const float *kv, float *prob,
                         float *out, cudaStream_t stream);
cudaError_t cap_k_attend_backward(const cap_sequence_t *s, const float *q, const float *kv,
                                  const float *prob, const float *d_out, float *d_q, float *d_kv,
                                  float *work, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
