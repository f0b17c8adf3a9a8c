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
    int64_t pz, pid; /* byte offsets in a block; pid -1: not there */
    const int64_t *ids;
    int64_t id_stride; /* of a row */
    const uint8_t *mask;
    int64_t mask_stride;
    struct {
        void *logp; /* stat dtype */
        int64_t *ids, *n_invalid;
    } out;
    bool count; /* does rows write out.n_invalid? */

    /* in the saved buffer, behind base.saved [3, T] */
    int64_t *rows;      /* [T] */
    void *sum;          /* [T] stat dtype, in 8 bytes per token */
    double *down;       /* [T, k] x - M */
    int64_t *saved_ids; /* [T, k] ids; -1: no gradient */

    const void *d_logp; /* [T, k] stat dtype */
};

#endif
