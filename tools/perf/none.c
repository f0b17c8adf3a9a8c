/* SPDX-License-Identifier: Apache-2.0 */
/* none.c - colo-perf in a build without CUDA: it draws what was measured elsewhere. */
#include "perf.h"

int perf_describe(perf_t *p, int argc, char **argv)
{
    return tool_refuse("no CUDA device: this build has no CUDA; only plot works without");
}

int perf_link(perf_t *p)
{
    return TOOL_WRONG_USE;
}

int perf_logprob(perf_t *p)
{
    return TOOL_WRONG_USE;
}
