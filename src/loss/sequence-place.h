/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence-place.h (private) - which token of which row an element of a context rank is, by the
 * closed form of sequence-args.h. Host and kernels have it from here; it is the partition that
 * colo_partition_index() tells, so that a target lands where the partition puts its embedding.
 */
#ifndef COLO_LOSS_SEQUENCE_PLACE_H
#define COLO_LOSS_SEQUENCE_PLACE_H

#include "loss/sequence-args.h"
#include "loss/stat.h"

struct colo_sequence_place {
    int64_t row, column; /* of the batch */
    int64_t x, length;   /* token of the row, tokens of the row */
    int64_t position;    /* in the stream, or of the row that the model sees */
};

/* Position of element @i of a context rank, of @length positions */
COLO_EITHER int64_t colo_sequence_zigzag(int64_t length, int64_t cp, int64_t rank, int64_t i)
{
    const int64_t q = length / (2 * cp);
    return cp == 1 ? i : i < q ? rank * q + i : (2 * cp - 1 - rank) * q + (i - q);
}

/* The row whose segment, divided by @cp, begins at or before @i. */
COLO_EITHER int64_t colo_sequence_row(const struct colo_sequence_args *args, int64_t cp, int64_t i)
{
    int64_t lo = 0, hi = args->batch - 1;
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo + 1) / 2;
        if (args->cu_padded[mid] / cp <= i)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

/* Element @i of context rank @rank */
COLO_EITHER struct colo_sequence_place colo_sequence_locate(const struct colo_sequence_args *args,
                                                            int64_t rank, int64_t i)
{
    struct colo_sequence_place found;
    if (args->cu_padded) {
        const int64_t at = rank * args->count + i; /* in the stream, contiguous */
        found.row = args->contiguous ? colo_sequence_row(args, 1, at)
                                     : colo_sequence_row(args, args->cp, i);
        const int64_t begin = args->cu_padded[found.row],
                      padded = args->cu_padded[found.row + 1] - begin;
        found.x = args->contiguous
                      ? at - begin
                      : colo_sequence_zigzag(padded, args->cp, rank, i - begin / args->cp);
        found.position = begin + found.x;
        found.length = args->lengths              ? args->lengths[found.row]
                       : padded < args->positions ? padded
                                                  : args->positions;
        found.column = found.x + (args->left_padded ? args->positions - found.length : 0);
    } else {
        const int64_t local = args->row / args->cp;
        found.row = i / local;
        found.position = args->contiguous
                             ? rank * local + i % local
                             : colo_sequence_zigzag(args->row, args->cp, rank, i % local);
        found.length = args->lengths ? args->lengths[found.row] : args->positions;
        found.column = found.position;
        found.x = found.column - (args->left_padded ? args->positions - found.length : 0);
    }
    return found;
}

COLO_EITHER bool colo_sequence_has_token(const struct colo_sequence_place *found)
{
    return found->x >= 0 && found->x < found->length;
}

COLO_EITHER bool colo_sequence_has_target(const struct colo_sequence_args *args,
                                          const struct colo_sequence_place *found)
{
    return found->x >= 0 && found->x + 1 < found->length - args->depth;
}

/* In the batch, or in the packed stream: the target */
COLO_EITHER int64_t colo_sequence_next(const struct colo_sequence_args *args,
                                       const struct colo_sequence_place *found)
{
    const int64_t ahead = 1 + args->depth;
    return args->token_stride < 0 ? found->position + ahead
                                  : found->row * args->token_stride + found->column + ahead;
}

#endif
