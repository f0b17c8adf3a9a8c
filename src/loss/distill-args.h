/* SPDX-License-Identifier: Apache-2.0 */
/*
 * distill-args.h (private) - arguments of distill.h's three kernels: stats, (one all-gather),
 * merge, grad.
 *
 * v of a target is y of distill.h, or log w of a probability. A block, after
 * the header of args.h, in the stat dtype, one number a token each:
 *
 *   mx  max x of the shard; NaN when it has a NaN or +inf, or when its targets do
 *   sx  sum e^(x - mx)
 *   mv  max v of the shard; 0 for probabilities
 *   sv  sum e^(v - mv), the shard's q before it is divided
 *   c   sum e^(v - mv) (x - bx)              bx = mx, 0 while that is -inf
 *   d   sum w r
 *   e   sum w expm1(-r) = sum w' - sum w
 *   g   sum w (r + expm1(-r)), and w' of columns where w is 0
 *
 * where e^(v - mv) is 0 a column adds nothing to c, whatever x is; d likewise with w. Of a reverse
 * KL, w is e^(x - bx), w' is e^(v - bv), r is (x - bx) - (v - bv); of all others x and v change
 * places. No summand of g is negative, and w' = w e^-r, so with E = sum e / sum w
 *
 *   KL = sum w r / sum w + log(sum w' / sum w) = sum g / sum w + (log1p(E) - E)
 *
 * of which both are of second order in r: a KL near 0 has the digits of r, and rounding of g and e
 * costs it as many as it has itself. The merge moves the sums to the global maxima: c += (bx - M)
 * sv, and as r -> r + s with
 *
 *   e -> e + expm1(-s) (sum w + e)
 *   g -> g + (s + expm1(-s)) sum w + expm1(-s) e
 *
 * The divergences that need both normalisers (colo_distill_twice()) read the shards again, relative
 * to what the merge has saved, and gather four sums of a token, in fp64: `sums`. With t = log(p/q)
 * and p_j = m_j (1 + E_j), q_j = m_j (1 + F_j), h(E) = (1 + E) log(1 + E) - E >= 0:
 *
 *   JSD         sum m (beta h(F) + (1 - beta) h(E)), sum p log(p/m) = sum m h(E), 0, 0
 *   TV          sum |p - q|, sum p s, sum min(p, q), sum p (1 - s)
 *   ACCEPTANCE  the same
 */
#ifndef COLO_LOSS_DISTILL_ARGS_H
#define COLO_LOSS_DISTILL_ARGS_H

#include "loss/args.h"

#include <colobridge/distill.h>

struct colo_distill_args {
    struct colo_logprob_args base; /* shard, blocks, header; its targets, out, saved: not used */
    bool probs;
    double target_factor, target_cap; /* as factor and cap of the base */
    bool has_target_temperature;
    const float *target_temperature; /* as temperature of the base; grad has both from saved */
    colo_dtype_t target_dtype;
    const void *targets;
    int64_t target_row_stride;
    const uint8_t *mask;
    int64_t mask_stride;
    colo_divergence_t divergence;
    double beta;
    int64_t mx, sx, mv, sv, c, d, e, g; /* byte offsets in a block */
    double *sums;                       /* [ranks, 4, T]: where the blocks were */
    struct {
        void *ce, *kl;
    } out; /* stat dtype */
    /* merge writes, grad reads: f64 [8, T], a number's row saved_stride behind the one before it: M,
     * log Sum x, Mv, log Sum v, Q, K, and of other divergences than forward KL, whose gradient is
     * F p_j (u_j - A), A and F; of TV and ACCEPTANCE u is s - 1 and A is sum p s - 1. Then
     * 1 / temperature of either side that has those of tokens. log(p_j / q_j) = (x_j - M) - (v_j -
     * Mv) - K. M is NaN for a row that is NaN and +inf for a masked one; Mv = log Sum v = 0 for
     * probabilities. */
    double *saved;
    int64_t saved_stride;
    struct {
        const void *d_ce, *d_kl;
    } upstream;
};

enum { COLO_DISTILL_SAVED = 8, COLO_DISTILL_SUMS = 4 }; /* fp64 numbers of a token */

/* distill.c: what the config says, of @args whose base is made; the members of a block of @tokens,
 * false when it passes 2^63 bytes; what ranks compare. */
void colo_distill_fill(const colo_distill_config_t *config, struct colo_distill_args *args);
bool colo_distill_lay_out(struct colo_distill_args *args, int64_t tokens);
uint64_t colo_distill_hash_config(const struct colo_logprob_args *base);

#ifdef __CUDACC__
__host__ __device__
#endif
    static inline bool
    colo_distill_twice(const struct colo_distill_args *args)
{
    return args->divergence >= COLO_DIVERGENCE_JSD;
}

#endif
