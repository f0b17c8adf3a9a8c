/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.c - the passes of sequence-pass.h in plain C. Positions of elements are asked of
 * partition.h, so that a target lands where the partition puts its embedding.
 */
#include "loss/sequence-pass.h"

#include "core/list.h"
#include "loss/loss.h"

#include <colobridge/partition.h>

#include <string.h>

struct place {
    int64_t row, column; /* of the batch */
    int64_t x, length;   /* token of the row, tokens of the row */
    int64_t position;    /* in the stream, or of the row that the model sees */
};

static struct place locate(const struct colo_sequence_pass *pass, int64_t rank, int64_t i)
{
    const colo_partition_t part = {.cp = pass->cp,
                                   .cp_rank = rank,
                                   .tp = 1,
                                   .positions = pass->row,
                                   .segments = pass->cu_padded ? pass->batch : 0,
                                   .cu_padded = pass->cu_padded};
    struct place found;
    if (pass->cu_padded) {
        found.position = colo_partition_index(&part, i);
        found.row = colo_last_begun(pass->cu_padded, 1, pass->batch, found.position);
        const int64_t begin = pass->cu_padded[found.row],
                      padded = pass->cu_padded[found.row + 1] - begin;
        found.length = pass->lengths              ? pass->lengths[found.row]
                       : padded < pass->positions ? padded
                                                  : pass->positions;
        found.x = found.position - begin;
        found.column = found.x + (pass->left_padded ? pass->positions - found.length : 0);
    } else {
        const int64_t local = pass->row / pass->cp;
        found.row = i / local;
        found.position = colo_partition_index(&part, i % local);
        found.length = pass->lengths ? pass->lengths[found.row] : pass->positions;
        found.column = found.position;
        found.x = found.column - (pass->left_padded ? pass->positions - found.length : 0);
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

colo_status_t colo_host_sequence_targets(const struct colo_sequence_pass *pass,
                                         colo_stream_t stream)
{
    for (int64_t i = 0; i < pass->count; i++) {
        const struct place found = locate(pass, pass->cp_rank, i);
        const int64_t next = pass->token_stride < 0
                                 ? found.position + 1
                                 : found.row * pass->token_stride + found.column + 1;
        pass->targets[i] = has_target(&found) ? pass->tokens[next] : pass->ignore;
    }
    return COLO_OK;
}

colo_status_t colo_host_sequence_mask(const struct colo_sequence_pass *pass, colo_stream_t stream)
{
    for (int64_t i = 0; i < pass->count; i++) {
        const struct place found = locate(pass, pass->cp_rank, i);
        pass->mask[i] = pass->what == COLO_SEQUENCE_TOKENS ? has_token(&found) : has_target(&found);
    }
    return COLO_OK;
}

/* The elements of context ranks [@from, @to) that have a target, from or to their places in the
 * batch. */
static void move(const struct colo_sequence_pass *pass, int64_t from, int64_t to, bool to_batch)
{
    const size_t elem = colo_dtype_size(pass->dtype);
    char *element = pass->elements;
    for (int64_t r = from; r < to; r++)
        for (int64_t i = 0; i < pass->count; i++, element += elem) {
            const struct place found = locate(pass, r, i);
            if (!has_target(&found))
                continue;
            char *place = (char *)pass->table +
                          (size_t)(found.row * pass->table_stride + found.column) * elem;
            memcpy(to_batch ? place : element, to_batch ? element : place, elem);
        }
}

colo_status_t colo_host_sequence_scatter(const struct colo_sequence_pass *pass,
                                         colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(pass->dtype);
    for (int64_t b = 0; b < pass->batch; b++)
        memset((char *)pass->table + (size_t)(b * pass->table_stride) * elem, 0,
               (size_t)(pass->positions - 1) * elem);
    move(pass, 0, pass->cp, true);
    return COLO_OK;
}

colo_status_t colo_host_sequence_gather(const struct colo_sequence_pass *pass, colo_stream_t stream)
{
    memset(pass->elements, 0,
           (size_t)((pass->to - pass->from) * pass->count) * colo_dtype_size(pass->dtype));
    move(pass, pass->from, pass->to, false);
    return COLO_OK;
}
