/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.h - a stream tells the host how far it is (progress.cu). The rules of kernels.h hold.
 */
#ifndef COLO_KERNELS_PROGRESS_H
#define COLO_KERNELS_PROGRESS_H

#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* about[0..3] = what[0..3] unless @about is NULL, then n = ++*count, words[n % nwords] = n: the
 * largest word holds. @words, @about: pinned host memory; @count: device memory; @what: read at the
 * call. May be captured: each replay counts. */
cudaError_t colo_k_progress(int64_t *words, int32_t nwords, int64_t *count, int64_t *about,
                            const int64_t *what, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
