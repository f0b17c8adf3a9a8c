/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk-args.h (private) - arguments of topk.h's kernels, which run around the merge and grad
 * kernels of logprob (args.h).
 *
 *   rows    ids, mask -> rows: what logprob's kernels take for targets
 *   local   logits -> this rank's block: what logprob's stats kernel makes, and candidates. One
 * read of the logits where a backend can (one all-gather) (merge: M, log Sum) merge   candidates of
 * all ranks -> logp, ids, and x - M of each pick, kept for backward sum     d_logp -> sum of a
 * row's gradients (grad: -p_j sum_i g_i in every column, as if one target had all of it) fix the
 * picked columns, made anew from what was kept
 *
 * A block is logprob's (m, s, x_t) and then
 *   pz  [n, k]  raw logits, stat dtype (exact): with topk the shard's k first, else those owned
 *   pid [n, k]  i64 global ids, -1 where the shard has fewer; with topk only
 *
 * and with want_tail
 *   tm  [n]     max x of the shard's columns that are not at ids
 *   ts  [n]     sum e^(x - tm) of them; NaN where an id of the shard occurs twice
 *
 * Backward with tail: a column that is not at ids has p_j (g_t / p_tail - S) = e^(x_j - M - L) (g_t -
 * S p_tail), S = sum_i g_i + g_t and L = log Sum + log p_tail. Neither form divides by what may be
 * 0 in fp32, so the grad kernel gets L for log Sum, and S p_tail - g_t as the sum.
 *
 * Raw logits travel, not x: their order is exact and the same on host and GPU, and x - M is made
 * from them in fp64.
 *
 * A row is COLO_TOPK_SKIP where nothing is to be read, -1 where an id is invalid and the gradient
 * is NaN, else some picked id.
 */
#ifndef COLO_LOSS_TOPK_ARGS_H
#define COLO_LOSS_TOPK_ARGS_H

#include "loss/args.h"

#include <colobridge/topk.h>

#define COLO_TOPK_SKIP INT64_MIN

struct colo_topk_args {
    struct colo_logprob_args base; /* targets are the rows, ignore_index is COLO_TOPK_SKIP */
    int64_t k;
    bool topk;
    int64_t ignore_index;
    bool tail;
    int64_t pz, pid, tm, ts; /* byte offsets in a block; -1: not there */
    const int64_t *ids;
    int64_t id_stride; /* of a row */
    const uint8_t *mask;
    int64_t mask_stride;
    struct {
        void *logp; /* stat dtype */
        int64_t *ids, *n_invalid;
        void *tail; /* stat dtype */
    } out;
    bool count; /* does rows write out.n_invalid? */

    /* in the saved buffer, behind base.saved [3 or 4, T] */
    int64_t *rows;      /* [T] */
    void *sum;          /* [T] stat dtype, in 8 bytes per token */
    double *down;       /* [T, k] x - M */
    int64_t *saved_ids; /* [T, k] ids; -1: no gradient */
    double *log_sum;    /* [T] log Sum; with tail base.saved has L */
    double *all;        /* [T] S, written by sum */

    const void *d_logp; /* [T, k] stat dtype */
    const void *d_tail; /* [T] */
};

#endif
