/* SPDX-License-Identifier: Apache-2.0 */
/*
 * variants.h - what the variants share: bf16 inputs, median times, the limit, a line a version.
 *
 * A variants keeps the versions of a kernel that led to the one in kernels/, slowest first, each as
 * short as it can be, so that one can read what a step is and see what it gained.
 */
#ifndef BENCH_KERNELS_VARIANTS_H
#define BENCH_KERNELS_VARIANTS_H

#include "kernels.h"
#include "perf/probe.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "../bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

struct variants {
    int64_t tokens = 8192, vocab = 151936;
    int iterations = 20;
    __nv_bfloat16 *z = nullptr; /* [tokens, vocab] */
    int64_t *targets = nullptr; /* [tokens], device */
    std::vector<int64_t> host_targets;

    variants(int argc, char **argv)
    {
        if (argc == 3 || argc == 4) {
            tokens = atoll(argv[1]);
            vocab = atoll(argv[2]) / 8 * 8;
        }
        if (argc == 4)
            iterations = atoi(argv[3]);
        host_targets.resize((size_t)tokens);
        for (int64_t t = 0; t < tokens; t++)
            host_targets[(size_t)t] = (t * 7919 + 13) % vocab;
        CUDA(cudaMalloc(&z, (size_t)bytes()));
        CUDA(cudaMalloc(&targets, (size_t)tokens * 8));
        CUDA(cudaMemcpy(targets, host_targets.data(), (size_t)tokens * 8, cudaMemcpyHostToDevice));
        CUDA(colo_k_probe_fill(z, bytes(), 3, 1, nullptr));
    }

    int64_t bytes() const
    {
        return tokens * vocab * 2;
    }

    double median_us(const std::function<void()> &launch) const
    {
        cudaEvent_t event[2];
        std::vector<float> ms((size_t)iterations);
        CUDA(cudaEventCreate(&event[0]));
        CUDA(cudaEventCreate(&event[1]));
        for (int i = -2; i < iterations; i++) {
            CUDA(cudaEventRecord(event[0]));
            launch();
            CUDA(cudaGetLastError());
            CUDA(cudaEventRecord(event[1]));
            CUDA(cudaEventSynchronize(event[1]));
            if (i >= 0)
                CUDA(cudaEventElapsedTime(&ms[(size_t)i], event[0], event[1]));
        }
        std::sort(ms.begin(), ms.end());
        return 1e3 * ms[ms.size() / 2];
    }

    std::vector<double> row(int64_t t) const
    {
        std::vector<__nv_bfloat16> raw((size_t)vocab);
        CUDA(cudaMemcpy(raw.data(), z + t * vocab, (size_t)vocab * 2, cudaMemcpyDeviceToHost));
        return std::vector<double>(raw.begin(), raw.end());
    }
};

#endif
