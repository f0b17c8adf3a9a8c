/* SPDX-License-Identifier: Apache-2.0 */
/* ops-none.c - a build without CUDA and NCCL says so. */
#include "ops.h"

#include <stdio.h>

int cap_gpus(char *why, size_t why_size)
{
    snprintf(why, why_size,
             "this build has no CUDA and NCCL; install nvcc, then meson setup "
             "--reconfigure -Dnccl=enabled");
    return -1;
}

bool cap_ops_cuda(cap_ops_t *o, int32_t device, char *why, size_t why_size)
{
    (void)o, (void)device;
    cap_gpus(why, why_size);
    return false;
}
