/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-args.h (private) - arguments of distill.h's three kernels: stats, (one all-gather),
 * merge, grad.
 *
 * v of a target is target_scale w / target_temperature, or log w of a probability. A block, after
 * the header of args.h, in the stat dtype, one number a token each:
 *
 *   mx  max x of the shard; NaN when it has a NaN or +inf, or when its targets do
 *   sx  sum e^(x - mx)
 *   mv  max v of the shard; 0 for probabilities
 *   sv  sum e^(v - mv), the shard's q before it is divided
 *   c   sum e^(v - mv) (x - bx)              bx = mx, 0 while that is -inf
 *   d   sum e^(v - mv) ((v - mv) - (x - bx))
 *
 * where e^(v - mv) is 0 a column adds nothing to c and d, whatever x is. The difference in d is
 * made column by column: a KL near 0 is a sum of small numbers, not a difference of large ones. The
 * merge moves c and d to the global maxima: c += (bx - M) sv, d += ((mv - Mv) - (bx - M)) sv.
 */
#ifndef COLO_LOSS_DISTILL_ARGS_H
#define COLO_LOSS_DISTILL_ARGS_H

#include "loss/args.h"

#include <colobridge/distill.h>

struct colo_distill_args {
    struct colo_logprob_args base; /* shard, blocks, header; its targets, out, saved: not used */
    bool probs;
    double target_factor;
    colo_dtype_t target_dtype;
    const void *targets;
    int64_t target_row_stride;
    const uint8_t *mask;
    int64_t mask_stride;
    int64_t mx, sx, mv, sv, c, d; /* byte offsets in a block */
    struct {
        void *ce, *kl;
    } out; /* stat dtype */
    /* merge writes, grad reads: f64 [5, T]: M, log Sum x, Mv, log Sum v, Q. M is NaN for a row that
     * is NaN and +inf for a masked one; Mv = log Sum v = 0 for probabilities. May be NULL in merge.
     */
    double *saved;
    struct {
        const void *d_ce, *d_kl;
    } upstream;
};

#endif
