/* SPDX-License-Identifier: Apache-2.0 */
/* linear_gpu.h - runs a linear_case_t on GPUs, in managed memory; rank r has device r modulo
 * the devices. */
#ifndef TESTS_LINEAR_GPU_H
#define TESTS_LINEAR_GPU_H

#include "gpu/gpu.h"
#include "loss/linear_case.h"

const linear_place_t *linear_gpu_place(void);
/* @mode: 0 logprob, 1 keep, 2 loss. Options that need a loss get one. */
void linear_gpu_options(linear_case_t *c, unsigned bits, int mode);
/* @n cases of one world, against the oracle; fails the running test. */
void linear_gpu_run(linear_case_t *c, int32_t n, const char *what);
/* A small case; @dtypes picks the head's, the logits' and d_weight's dtype. */
void linear_gpu_case(linear_case_t *c, unsigned bits, int mode, int32_t ranks, int32_t replicas,
                     int dtypes, int64_t chunk, uint64_t *rng);
/* One of them on one rank: made, run, compared, freed. */
void linear_gpu_one(unsigned bits, int mode, int dtypes, int64_t chunk, uint64_t *rng);

#endif
