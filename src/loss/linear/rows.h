/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h (private) - the row kernels of the lm_head path (linear.h): which tokens count, and
 * per-token values that become per-row values and back. Host and kernels read these structs alike.
 */
#ifndef COLO_LOSS_LINEAR_ROWS_H
#define COLO_LOSS_LINEAR_ROWS_H

#include "loss/args.h"

/* Columns contiguous, rows `stride` elements apart. */
struct colo_linear_matrix {
    void *data;
    int64_t stride;
    colo_dtype_t dtype;
};

/* What 16-bit d_logits are multiplied by, in fp32 and after they are summed; in the memory of the
 * operands, because a device makes it: the number, then the 0 and the 1 that beta may be. */
enum { COLO_LINEAR_SCALE = 3 };

enum {                          /* of counts[] */
       COLO_LINEAR_COUNTED = 0, /* targets that are not ignore_index */
       COLO_LINEAR_VALID = 1,   /* of these, in [0, V) and not dropped */
       COLO_LINEAR_INVALID = 2, /* outside [0, V), or dropped */
       COLO_LINEAR_COUNTS = 4
};
struct colo_linear_rows {
    int64_t tokens, rows; /* T, R */
    const int64_t *targets;
    int64_t target_stride;
    int64_t ignore_index, vocab;
    /* without targets, u8 [T], NULL: all count. A token's target is 1, or ignore_index where this
     * is 0 */
    const uint8_t *mask;
    int64_t mask_stride;
    int64_t *row_of;      /* [T]: row of a token; -1: ignored; -2: dropped, no row was left */
    int64_t *token_of;    /* [R]: token of a row; -1: none. Tokens ascend */
    int64_t *row_targets; /* [R]: ignore_index where there is no token */
    int64_t *counts;      /* [COLO_LINEAR_COUNTS] */
};

enum { COLO_LINEAR_UPS = 4 };

/* per-token values to rows: to[k][row] = factor[k] * (from[k] ? from[k][token] : 1), divided by
 * counts[VALID] with mean (0 when that is 0); 0 in rows without a token; to[k] NULL: not made.
 *
 * With scale, these values are lift times what they would be, divided by the largest finite one,
 * and scale[0] undoes both. d_logits of 16 bits then neither overflow by a loss scale nor underflow
 * by 1 / N; and 1 - p of all tokens is not rounded the same way, as a multiple of it would be. With
 * exact, the largest is rounded down to a power of 2: then no token's digits depend on the others.
 */
struct colo_linear_upstream_rows {
    const struct colo_linear_rows *rows;
    colo_dtype_t dtype;                /* stat dtype, of from and to */
    const void *from[COLO_LINEAR_UPS]; /* of logp, entropy, loss, lse */
    double factor[COLO_LINEAR_UPS];
    void *to[COLO_LINEAR_UPS];
    bool mean;
    /* What divides a token's d_logits, f32 [T], or multiplies those of a row, f64 [R]; NULL: 1. Of
     * the largest value that is what counts. */
    const float *temperature;
    const double *row_coldness;
    float *scale; /* [COLO_LINEAR_SCALE], written; NULL: values are as said */
    double lift;
    bool exact;
};

/* to = {from[0] * factor * by[0], 0, 1}; @from, @by NULL: 1 */
struct colo_linear_factor {
    float *to; /* [COLO_LINEAR_SCALE] */
    const float *from, *by;
    double factor;
};

/* Rows [lo, hi) of hidden states, or of their gradients. gather: from tokens, 0 in a row without a
 * token. restore: to tokens; those of other rows are left alone. clear: tokens without a row become
 * 0, NaN when dropped; it needs neither @lo and @hi nor @packed. */
struct colo_linear_move {
    const struct colo_linear_rows *rows;
    int64_t lo, hi, hidden;
    struct colo_linear_matrix tokens; /* [T, hidden] */
    void *packed;                     /* [hi - lo, hidden], contiguous, of the same dtype */
};

/* to[j * to_stride] = beta to + scale[0] * sum over rows of z[., j] (scale NULL: 1); to is f32 (f64
 * of f64), sums are in that dtype or a wider one, rows ascending or by a tree that depends on rows
 * only */
struct colo_linear_sum {
    struct colo_linear_matrix z; /* [rows, columns] */
    int64_t rows, columns;
    const float *scale;
    void *to;
    int64_t to_stride;
    double beta;
};

/* to [rows, columns] = from, rounded to to's dtype; a stride of 0 repeats a row of from */
struct colo_linear_convert {
    struct colo_linear_matrix to, from;
    int64_t rows, columns;
};

/* to [rows, columns] = beta to + factor (parts[0] + parts[1] + ..), in this order, in fp32, rounded
 * once; a part has rows without gaps, and the next one begins @step elements behind it */
struct colo_linear_fold {
    struct colo_linear_matrix to;
    const float *parts;
    int32_t count;
    int64_t step, rows, columns;
    double beta, factor;
    const float *scale; /* multiplies as factor does; NULL: 1 */
};

/* z = h wT + bias of 16-bit operands, as COLO_LINEAR_LOGITS of linear.h says, and what @stats' tiles
 * take of it, rounded to stats' dtype, which is z's. z.data NULL: it is not written. Rows are those of
 * stats, [lo, hi), columns are its, too. Addresses and rows of h, w and z are multiples of 16 bytes. */
struct colo_linear_tiled {
    struct colo_linear_matrix h, w, z;
    const void *bias; /* [columns], contiguous, h's dtype; NULL: none */
    int64_t hidden;
    const struct colo_logprob_args *stats;
    int32_t clusters; /* of colo_k_head_fit() */
};

/* w [columns, hidden] = zT h factor of 16-bit operands, as COLO_LINEAR_D_WEIGHT of linear.h says; rows
 * >= 1. Of w in f32 it may be added. Addresses and rows of h, w and z are multiples of 16 bytes. */
struct colo_linear_summed {
    struct colo_linear_matrix h, w, z;
    int64_t rows, columns, hidden;
    bool adds;
    double factor;
    const float *scale; /* multiplies as factor does; NULL: 1 */
    int32_t clusters;   /* of colo_k_head_fit() */
};

/* per-row values to tokens: 0 (argmax: -1) for an ignored token, NaN (correct: 0) for a dropped
 * one; NULL members of to are not written; n_valid and n_invalid come from the counts */
struct colo_linear_scatter {
    const struct colo_linear_rows *rows;
    colo_dtype_t dtype;           /* stat dtype */
    struct colo_logprob_out from; /* [R] each; counts not looked at */
    struct colo_logprob_out to;   /* [T] each */
};

#endif
