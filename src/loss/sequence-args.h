/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence-args.h (private) - arguments of sequence.h's kernels, which run per element.
 *
 * Element i of context rank r is token x of row b, at column `column` of the batch:
 *   dense   b = i / local, position g = zigzag(i mod local) of the row, column g
 *           x = g, left padded g - (S - lengths[b])
 *   packed  g = zigzag within segments, b its segment, x = g - cu_padded[b]
 *           column x, left padded S - lengths[b] + x
 * Contiguous: g = r local + (i mod local) of a dense row, and r count + i of the stream.
 * It is a token where 0 <= x < lengths[b], and has a target where x + 1 + depth < lengths[b], too.
 *
 *   targets, mask  over the elements of cp_rank
 *   scatter        batch = 0, then gathered [cp, count] -> batch [B, S - 1]
 *   gather         batch [B, S - 1] -> [to - from, count] for the ranks [from, to)
 */
#ifndef COLO_LOSS_SEQUENCE_ARGS_H
#define COLO_LOSS_SEQUENCE_ARGS_H

#include <colobridge/sequence.h>

struct colo_sequence_args {
    int64_t batch, positions, cp, cp_rank;
    int64_t row;   /* dense: positions of a row that the model sees; packed: cu_padded[B] */
    int64_t count; /* local elements of a rank */
    const int64_t *lengths, *cu_padded; /* in the tensors' memory, may be NULL */
    bool left_padded, contiguous;
    int64_t depth;

    const int64_t *tokens;
    int64_t token_stride; /* of a row of the batch; -1: a packed stream */
    int64_t ignore;
    int64_t *targets;
    uint8_t *mask;
    colo_sequence_mask_t what;

    colo_dtype_t dtype; /* f32 or f64 */
    void *elements;     /* [.., count] */
    void *table;        /* [B, S - 1] */
    int64_t table_stride;
    int64_t from, to; /* context ranks of collect */
};

#endif
