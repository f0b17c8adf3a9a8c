/* SPDX-License-Identifier: Apache-2.0 */
/* none-nccl.c - colo-perf in a build without NCCL: one GPU only. */
#include "perf.h"

int perf_links(perf_t *p)
{
    return tool_refuse("this build has no NCCL: link takes -g 1 only");
}

int perf_bridge(perf_t *p)
{
    return tool_refuse("this build has no NCCL, which bridge needs");
}
