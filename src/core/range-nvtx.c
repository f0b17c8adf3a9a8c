/* SPDX-License-Identifier: Apache-2.0 */
/* range-nvtx.c - ranges by NVTX 3, which is headers only: no tool in the process, no effect. */
#include "core/range.h"

#include <nvtx3/nvToolsExt.h>

#include <stddef.h>

bool colo_ranges;

void colo_range_init(void)
{
    nvtxInitialize(NULL);
}

void colo_range_push(const char *name)
{
    nvtxRangePushA(name);
}

void colo_range_pop(void)
{
    nvtxRangePop();
}
