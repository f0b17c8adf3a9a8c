/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.c - the passes of sequence-pass.h in plain C. Positions of elements are asked of
 * partition.h, so that a target lands where the partition puts its embedding.
 */
#include "loss/sequence-pass.h"

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
    struct place at;
    if (p->cu_padded) {
        at.position = colo_partition_index(&part, i);
        at.row = segment_of(p, at.position);
        const int64_t begin = p->cu_padded[at.row], padded = p->cu_padded[at.row + 1] - begin;
        at.length = p->lengths ? p->lengths[at.row] : padded < p->positions ? padded : p->positions;
        at.x = at.position - begin;
        at.column = at.x + (p->left_padded ? p->positions - at.length : 0);
    } else {
        const int64_t local = p->row / p->cp;
        at.row = i / local;
        at.position = colo_partition_index(&part, i % local);
        at.length = p->lengths ? p->lengths[at.row] : p->positions;
        at.column = at.position;
        at.x = at.column - (p->left_padded ? p->positions - at.length : 0);
    }
    return at;
}

static bool has_token(const struct place *at)
{
    return at->x >= 0 && at->x < at->length;
}

static bool has_target(const struct place *at)
{
    return at->x >= 0 && at->x + 1 < at->length;
}

colo_status_t colo_host_sequence_targets(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    (void)stream;
    for (int64_t i = 0; i < p->count; i++) {
        const struct place at = locate(p, p->cp_rank, i);
        const int64_t next =
            p->token_stride < 0 ? at.position + 1 : at.row * p->token_stride + at.column + 1;
        p->targets[i] = has_target(&at) ? p->tokens[next] : p->ignore;
    }
    return COLO_OK;
}

colo_status_t colo_host_sequence_mask(const struct colo_sequence_pass *p, colo_stream_t stream)
{
    (void)stream;
    for (int64_t i = 0; i < p->count; i++) {
        const struct place at = locate(p, p->cp_rank, i);
        p->mask[i] = p->what == COLO_SEQUENCE_TOKENS ? has_token(&at) : has_target(&at);
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
            const struct place at = locate(p, r, i);
            if (has_target(&at))
                memcpy(table + (size_t)(at.row * p->table_stride + at.column) * elem,
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
            const struct place at = locate(p, r, i);
            char *to = elements + (size_t)((r - p->from) * p->count + i) * elem;
            if (has_target(&at))
                memcpy(to, table + (size_t)(at.row * p->table_stride + at.column) * elem, elem);
            else
                memset(to, 0, elem);
        }
    return COLO_OK;
}
