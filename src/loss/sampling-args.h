/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sampling-args.h (private) - arguments of sampling.h's kernels. The last logit that a step keeps
 * is found 8 bits at a time, the highest first. Its key is an unsigned integer in the order of the
 * logits.
 *
 *   largest  logits -> this rank's block: the header, and the largest logit per token
 *   (one all-gather)
 *   for each step, for each digit of a key:
 *     sums   logits -> per token and digit the weight of the ids with the higher digits so far
 *     (one all-gather)
 *     find   sums of all ranks -> the next digit of the last logit that is kept
 *   for each step:
 *     keep   logits -> out. The second step reads what the first one wrote
 *
 * An id weighs 1 (top_k) or its mass (top_p). A row whose largest logit is not finite is copied by
 * keep; what the other kernels make of it is not read.
 */
#ifndef COLO_LOSS_SAMPLING_ARGS_H
#define COLO_LOSS_SAMPLING_ARGS_H

#include "loss/args.h"

#include <colobridge/sampling.h>

#define COLO_SAMPLING_DIGITS 256

struct colo_sampling_args {
    /* blocks are a header and m [T], raw logits as f64: the largest, or NaN */
    struct colo_logprob_args base;
    int64_t top_k;
    double top_p;
    bool weigh;   /* by mass */
    double units; /* of mass, in 1 */
    int32_t digit, digits;
    int64_t *sums; /* [W, T, COLO_SAMPLING_DIGITS] */
    /* [T]: the digits that were found; the weight of the ids before those that have them; the
     * weight that is wanted, and after the last digit what this rank's ids that have them all are
     * to bring of it */
    uint64_t *prefix;
    int64_t *above, *wanted;
    void *out; /* [T, columns] */
    int64_t out_stride;
};

#endif
