/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.c - the kernels of sequence-args.h in plain C. Positions of elements are asked of
 * partition.h, so that a target lands where the partition puts its embedding.
 */
#include "loss/sequence-args.h"

#include "core/list.h"
#include "loss/loss.h"

#include <colobridge/partition.h>

#include <string.h>

struct place {
    int64_t row, column; /* of the batch */
    int64_t x, length;   /* token of the row, tokens of the row */
    int64_t position;    /* in the stream, or of the row that the model sees */
};

static struct place locate(const struct colo_sequence_args *args, int64_t rank, int64_t i)
{
    const colo_partition_t part = {COLO_PARTITION_INIT,
                                   .cp = args->cp,
                                   .cp_rank = rank,
                                   .tp = 1,
                                   .positions = args->row,
                                   .segments = args->cu_padded ? args->batch : 0,
                                   .cu_padded = args->cu_padded};
    struct place found;
    if (args->cu_padded) {
        found.position = colo_partition_index(&part, i);
        found.row = colo_last_begun(args->cu_padded, 1, args->batch, found.position);
        const int64_t begin = args->cu_padded[found.row],
                      padded = args->cu_padded[found.row + 1] - begin;
        found.length = args->lengths              ? args->lengths[found.row]
                       : padded < args->positions ? padded
                                                  : args->positions;
        found.x = found.position - begin;
        found.column = found.x + (args->left_padded ? args->positions - found.length : 0);
    } else {
        const int64_t local = args->row / args->cp;
        found.row = i / local;
        found.position = colo_partition_index(&part, i % local);
        found.length = args->lengths ? args->lengths[found.row] : args->positions;
        found.column = found.position;
        found.x = found.column - (args->left_padded ? args->positions - found.length : 0);
    }
    return found;
}

static bool has_token(const struct place *found)
{
    return found->x >= 0 && found->x < found->length;
}

static bool has_target(const struct place *found)
{
    return found->x >= 0 && found->x + 1 < found->length;
}

colo_status_t colo_host_sequence_targets(const struct colo_sequence_args *args,
                                         colo_stream_t stream)
{
    for (int64_t i = 0; i < args->count; i++) {
        const struct place found = locate(args, args->cp_rank, i);
        const int64_t next = args->token_stride < 0
                                 ? found.position + 1
                                 : found.row * args->token_stride + found.column + 1;
        args->targets[i] = has_target(&found) ? args->tokens[next] : args->ignore;
    }
    return COLO_OK;
}

colo_status_t colo_host_sequence_mask(const struct colo_sequence_args *args, colo_stream_t stream)
{
    for (int64_t i = 0; i < args->count; i++) {
        const struct place found = locate(args, args->cp_rank, i);
        args->mask[i] = args->what == COLO_SEQUENCE_TOKENS ? has_token(&found) : has_target(&found);
    }
    return COLO_OK;
}

/* The elements of context ranks [@from, @to) that have a target, from or to their places in the
 * batch. */
static void move(const struct colo_sequence_args *args, int64_t from, int64_t to, bool to_batch)
{
    const size_t elem = colo_dtype_size(args->dtype);
    char *element = args->elements;
    for (int64_t r = from; r < to; r++)
        for (int64_t i = 0; i < args->count; i++, element += elem) {
            const struct place found = locate(args, r, i);
            if (!has_target(&found))
                continue;
            char *place = (char *)args->table +
                          (size_t)(found.row * args->table_stride + found.column) * elem;
            memcpy(to_batch ? place : element, to_batch ? element : place, elem);
        }
}

colo_status_t colo_host_sequence_scatter(const struct colo_sequence_args *args,
                                         colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(args->dtype);
    for (int64_t b = 0; b < args->batch; b++)
        memset((char *)args->table + (size_t)(b * args->table_stride) * elem, 0,
               (size_t)(args->positions - 1) * elem);
    move(args, 0, args->cp, true);
    return COLO_OK;
}

colo_status_t colo_host_sequence_gather(const struct colo_sequence_args *args, colo_stream_t stream)
{
    memset(args->elements, 0,
           (size_t)((args->to - args->from) * args->count) * colo_dtype_size(args->dtype));
    move(args, args->from, args->to, false);
    return COLO_OK;
}
