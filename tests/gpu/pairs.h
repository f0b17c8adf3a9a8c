/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pairs.h - the unit layouts of bridges on GPUs, of up to eight ranks: source, destination,
 * samples, rows, features. Each way takes those that its ranks suffice for (t_case_world()).
 */
#ifndef TESTS_GPU_PAIRS_H
#define TESTS_GPU_PAIRS_H

#include <stdint.h>

static const struct {
    const char *src, *dst;
    int64_t b, n, h;
} t_pairs[] = {
    {"dp=2", "tp=2,dp=1", 4, 3, 2},
    {"tp=2,dp=1", "dp=2", 4, 3, 2},
    {"dp=2", "tp=1,cp=2,dp=1", 4, 8, 3},
    {"tp=2,dp=1", "cp=2,dp=1", 3, 8, 5},
    {"tp=2,dp=1", "tp=2,dp=1", 2, 3, 2},
    {"dp=2", "dp=2", 4, 3, 2},
    {"cp=2", "dp=2", 3, 4, 2},
    {"cp=2", "tp=2", 2, 8, 3},
    {"dp=1", "dp=1@1", 2, 3, 2},
    {"pp=2,dp=1", "dp=1,pp=2", 2, 3, 2},
    {"dp=4", "tp=4,dp=1", 8, 3, 2},
    {"tp=4,dp=1", "dp=4", 8, 3, 2},
    {"tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 3},
    {"tp=2,dp=2", "tp=1,cp=2,dp=2", 4, 8, 3},
    {"tp=4", "cp=4", 2, 8, 2},
    {"dp=4", "cp=4", 8, 16, 2},
    {"tp=2,dp=2", "tp=2,cp=2", 4, 8, 5},
    {"tp=2,dp=2", "tp=1,dp=4", 8, 5, 3},
    {"cp=2,dp=2", "tp=2,cp=2", 4, 8, 2},
    {"cp=4", "dp=4", 5, 8, 2},
    {"tp=1,dp=3", "tp=2,dp=2", 6, 4, 2},
    {"dp=3", "cp=3@1", 7, 6, 2},
    {"tp=2,pp=2", "cp=2,dp=2", 4, 4, 2},
    {"dp=2,tp=2", "cp=2,dp=2", 4, 8, 2},
    {"tp=1,dp=2", "tp=2,dp=1", 4, 6, 3},
    {"tp=2,dp=1", "tp=1,dp=2", 4, 3, 5},
    {"tp=1,dp=2", "tp=1,cp=2,dp=1", 4, 8, 3},
    {"tp=2,dp=1", "tp=1,cp=2,dp=1", 3, 8, 4},
    {"tp=2,dp=1", "tp=2,dp=1", 3, 4, 2},
    {"tp=2,dp=2", "tp=1,cp=4,dp=1", 4, 8, 5},
    {"tp=1,dp=4", "tp=2,cp=2,dp=1", 8, 8, 3},
    {"tp=4,dp=1", "tp=1,cp=2,dp=2", 4, 8, 3},
    {"ep=2,dp=2", "xp=2,cp=2", 4, 8, 2},
    {"dp=2", "cp=2@2", 4, 8, 3},
    {"tp=2,dp=4", "tp=2,cp=2,dp=2", 8, 8, 3},
    {"tp=4,dp=2", "tp=1,cp=2,dp=4", 8, 8, 2},
    {"tp=1,dp=8", "tp=2,cp=4,dp=1", 8, 16, 3},
    {"tp=1,dp=8", "tp=4,dp=2", 8, 3, 5},
    {"tp=4,dp=2", "tp=2,cp=2,dp=2", 4, 8, 5},
    {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2", 4, 16, 2},
    {"tp=2,dp=4", "tp=2,pp=2,dp=2", 8, 3, 2},
    {"tp=1,dp=6", "tp=1,cp=3,dp=2@2", 12, 12, 2},
    {"dp=4,tp=2", "cp=2,dp=2,tp=2", 4, 8, 2},
    {"cp=8", "dp=8", 8, 16, 3},
    {"tp=8", "cp=8", 2, 16, 2},
    {"dp=3", "tp=2,cp=2@4", 6, 8, 3},
    {"tp=1,dp=8", "tp=4,dp=2", 16, 3, 2},
    {"tp=1,dp=8", "tp=1,cp=4,dp=2", 8, 16, 2},
    {"tp=2,cp=2,dp=2", "tp=1,cp=4,dp=2", 4, 8, 5},
    {"tp=2,dp=3", "tp=3,dp=2", 6, 3, 2},
    {"tp=1,dp=6", "tp=1,cp=3,dp=2", 7, 6, 2},
    {"dp=4,tp=2", "cp=2,dp=2,tp=2", 8, 8, 2},
    {"tp=2,dp=4", "dp=2,pp=2,cp=2", 8, 8, 3},
    {"tp=8", "cp=8", 2, 16, 5},
    {"dp=8", "tp=8", 8, 3, 2},
    {"cp=8", "dp=8", 9, 16, 2},
    {"tp=2,dp=2@4", "cp=4", 4, 8, 3},
};
enum { T_PAIRS = sizeof t_pairs / sizeof t_pairs[0] };

#endif
