/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ownership.c - blocks along one axis, found by division, so that the cost is what meets and not how
 * large the world is.
 */
#include "bridge/layout/ownership.h"

#include "core/error.h"

void colo_block_clear(colo_block_t *block)
{
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        block->coord[i] = -1;
    block->count = 0;
}

int colo_block_cmp(const void *a, const void *b)
{
    const colo_block_t *x = a, *y = b;
    for (int i = 0; i < COLO_MAX_DIMS; i++)
        if (x->coord[i] != y->coord[i])
            return x->coord[i] < y->coord[i] ? -1 : 1;
    return 0;
}

colo_status_t colo_block_push(colo_list_t *out, const colo_block_t *block, int64_t count)
{
    colo_block_t *entry = colo_list_push(out, sizeof *entry);
    if (!entry)
        return colo_fail(COLO_ERR_NOMEM, "plan: list of %lld blocks", (long long)out->n);
    *entry = *block;
    entry->count = count;
    return COLO_OK;
}

/* Appends every block coordinate choice of @axis that meets local indices [lo, hi) of the whole
 * axis, from split @i on. @b is a workspace of the choices made so far. */
static colo_status_t visit(colo_list_t *out, const colo_layout_t *l, colo_axis_t axis, int i,
                           int64_t length, int64_t lo, int64_t hi, colo_block_t *b)
{
    if (lo >= hi)
        return COLO_OK;
    if (i == l->nsplits[axis])
        return colo_block_push(out, b, hi - lo);
    const colo_split_t *s = &l->split[axis][i];
    int64_t parts = l->grid.extent[s->dim];
    if (parts == 1) {
        b->coord[s->dim] = 0;
        return visit(out, l, axis, i + 1, length, lo, hi, b);
    }
    if (s->kind != COLO_ZIGZAG) {
        for (int64_t end; lo < hi; lo = end) { /* parts in between may be empty */
            const int64_t d = colo_split_part(s->kind, length, parts, lo);
            const int64_t a = colo_split_lo(s->kind, length, parts, d),
                          e = colo_split_lo(s->kind, length, parts, d + 1);
            end = hi < e ? hi : e;
            b->coord[s->dim] = d;
            COLO_TRY(visit(out, l, axis, i + 1, e - a, lo - a, end - a, b));
        }
        return COLO_OK;
    }
    int64_t q = length / (2 * parts);
    while (lo < hi) {
        int64_t end = (lo / q + 1) * q < hi ? (lo / q + 1) * q : hi, local;
        b->coord[s->dim] = colo_zigzag_part(q, parts, lo, &local);
        COLO_TRY(visit(out, l, axis, i + 1, 2 * q, local, local + (end - lo), b));
        lo = end;
    }
    return COLO_OK;
}

colo_status_t colo_blocks_along(colo_list_t *out, const colo_layout_t *layout, colo_axis_t axis,
                                int64_t length, int64_t lo, int64_t hi)
{
    colo_block_t block;
    colo_block_clear(&block);
    return visit(out, layout, axis, 0, length, lo, hi, &block);
}
