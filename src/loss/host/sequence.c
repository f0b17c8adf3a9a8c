/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.c - the passes of sequence-pass.h in plain C. Positions of elements are asked of
 * partition.h, so that a target lands where the partition puts its embedding.
 */
#include "loss/sequence-pass.h"
#include "loss/loss.h"

#include <colobridge/partition.h>

#include <string.h>

struct place {
    int64_t row, column; /* of the batch */
    int64_t x, length;   /* token of the row, tokens of the row */
    int64_t position;    /* in the stream, or of the row that the model sees */
};

/* The row whose segment holds @position: the last that begins at or before it. */
static int64_t segment_of(const struct colo_sequence_pass *p, int64_t position)
{
    int64_t lo = 0, hi = p->batch - 1;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo + 1) / 2;
        if (p->cu_padded[mid] <= position)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

static struct place locate(const struct colo_sequence_pass *p, int64_t rank, int64_t i)
{
    const colo_partition_t part = {.cp = p->cp,
                                   .cp_rank = rank,
                                   .tp = 1,
                                   .positions = p->row,
                                   .segments = p->cu_padded ? p->batch : 0,
                                   .cu_padded = p->cu_padded};
    struct place found;
    if (p->cu_padded) {
        found.position = colo_partition_index(&part, i);
        found.row = segment_of(p, found.position);
        const int64_t begin = p->cu_padded[found.row], padded = p->cu_padded[found.row + 1] - begin;
        found.length = p->lengths              ? p->lengths[found.row]
                       : padded < p->positions ? padded
                                               : p->positions;
        found.x = found.position - begin;
        found.column = found.x + (p->left_padded ? p->positions - found.length : 0);
    } else {
        const int64_t local = p->row / p->cp;
        found.row = i / local;
        found.position = colo_partition_index(&part, i % local);
        found.length = p->lengths ? p->lengths[found.row] : p->positions;
        found.column = found.position;
        found.x = found.column - (p->left_padded ? p->positions - found.length : 0);
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

colo_status_t colo_host_sequence_targets(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    (void)stream;
    for (int64_t i = 0; i < p->count; i++) {
        const struct place found = locate(p, p->cp_rank, i);
        const int64_t next = p->token_stride < 0 ? found.position + 1
                                                 : found.row * p->token_stride + found.column + 1;
        p->targets[i] = has_target(&found) ? p->tokens[next] : p->ignore;
    }
    return COLO_OK;
}

colo_status_t colo_host_sequence_mask(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    (void)stream;
    for (int64_t i = 0; i < p->count; i++) {
        const struct place found = locate(p, p->cp_rank, i);
        p->mask[i] = p->what == COLO_SEQUENCE_TOKENS ? has_token(&found) : has_target(&found);
    }
    return COLO_OK;
}

colo_status_t colo_host_sequence_scatter(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(p->dtype);
    char *table = p->table;
    const char *elements = p->elements;
    (void)stream;
    for (int64_t b = 0; b < p->batch; b++)
        memset(table + (size_t)(b * p->table_stride) * elem, 0, (size_t)(p->positions - 1) * elem);
    for (int64_t r = 0; r < p->cp; r++)
        for (int64_t i = 0; i < p->count; i++) {
            const struct place found = locate(p, r, i);
            if (has_target(&found))
                memcpy(table + (size_t)(found.row * p->table_stride + found.column) * elem,
                       elements + (size_t)(r * p->count + i) * elem, elem);
        }
    return COLO_OK;
}

colo_status_t colo_host_sequence_gather(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    const size_t elem = colo_dtype_size(p->dtype);
    const char *table = p->table;
    char *elements = p->elements;
    (void)stream;
    for (int64_t r = p->from; r < p->to; r++)
        for (int64_t i = 0; i < p->count; i++) {
            const struct place found = locate(p, r, i);
            char *to = elements + (size_t)((r - p->from) * p->count + i) * elem;
            if (has_target(&found))
                memcpy(to, table + (size_t)(found.row * p->table_stride + found.column) * elem,
                       elem);
            else
                memset(to, 0, elem);
        }
    return COLO_OK;
}
