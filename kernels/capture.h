/* SPDX-License-Identifier: Apache-2.0 */
/* capture.h - calls of CUDA that a capture forbids, made although some thread captures a stream. */
#ifndef COLO_KERNELS_CAPTURE_H
#define COLO_KERNELS_CAPTURE_H

#include <cuda_runtime_api.h>

static inline enum cudaStreamCaptureMode colo_capture_relax(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static inline void colo_capture_restore(enum cudaStreamCaptureMode *mode)
{
    (void)cudaThreadExchangeStreamCaptureMode(mode);
}

/* A declaration: from here to the end of the block this thread may allocate, free and wait for
 * streams that are not captured. */
#define COLO_CAPTURE_RELAXED                                                          \
    enum cudaStreamCaptureMode __attribute__((cleanup(colo_capture_restore), unused)) \
    colo_capture_ = colo_capture_relax()

#endif
