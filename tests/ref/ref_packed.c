/* SPDX-License-Identifier: Apache-2.0 */
/* ref_packed.c - see ref_packed.h. */
#include "ref/ref_packed.h"

#include <stdlib.h>

int64_t ref_packed_cp(const ref_packed_t *side)
{
    return ref_side_addends(&side->grid);
}

/* Parts in which the rows of a context rank are cut. */
static int64_t sp_of(const ref_side_t *grid)
{
    for (int k = 0; k < grid->nsplits[1]; k++)
        if (!grid->split[1][k].context)
            return ref_side_extent(grid, grid->split[1][k].dim);
    return 1;
}

static int64_t at(const int64_t *table, int64_t i, int64_t absent)
{
    return table ? table[i] : absent;
}

/* Positions that the side has for a sequence. */
static int64_t room(const ref_packing_t *p, int64_t q)
{
    return p->room ? p->room[q] : p->len[q];
}

/* Positions of all sequences of a replica before sequence @q. */
static int64_t before(const ref_packing_t *p, int64_t dp, int64_t q)
{
    int64_t n = 0;
    for (int64_t i = 0; i < q; i++)
        n += at(p->dp, i, 0) == dp ? room(p, i) : 0;
    return n;
}

bool ref_packed_owns(const ref_packed_t *side, int64_t c, int64_t q, int64_t pos)
{
    const ref_packing_t *p = &side->p;
    if (p->cut == REF_CUT_WHOLE)
        return true;
    if (p->cut == REF_CUT_TABLE) {
        int64_t end = 0;
        for (int64_t i = p->start[q]; i < p->start[q + 1]; i++) {
            end += p->piece[i];
            if (pos < end)
                return p->owner[i] == c;
        }
        abort();
    }
    if (p->cut == REF_CUT_CONTIGUOUS) {
        const int64_t dp = at(p->dp, q, 0), row = before(p, dp, q) + pos;
        return row * ref_packed_cp(side) / before(p, dp, p->nseq) == c;
    }
    const int64_t n = at(p->cp, q, ref_packed_cp(side)), mine = c - at(p->first, q, 0);
    const bool zigzag = p->cut == REF_CUT_ZIGZAG && n > 1;
    const int64_t pieces = zigzag ? 2 * n : n;
    int64_t k = 0;
    while (pos >= (k + 1) * (room(p, q) / pieces))
        k++;
    if (zigzag && k >= n)
        k = 2 * n - 1 - k;
    return k == mine;
}

/* Without halos. */
static int64_t own_rows(const ref_packed_t *side, int64_t rank, int64_t *q_of, int64_t *pos_of)
{
    const ref_packing_t *p = &side->p;
    if (!ref_side_has(&side->grid, rank))
        return 0;
    const int64_t d = ref_side_coord(&side->grid, rank, "dp"), sp = sp_of(&side->grid);
    const int64_t c = ref_packed_cp(side) > 1 ? ref_side_coord(&side->grid, rank, "cp") : 0;
    int64_t n = 0, lo, hi;
    for (int64_t q = 0; q < p->nseq; q++)
        for (int64_t pos = 0; at(p->dp, q, 0) == d && pos < room(p, q); pos++)
            n += ref_packed_owns(side, c, q, pos);
    lo = sp > 1 ? n / sp * ref_side_coord(&side->grid, rank, "tp") : 0;
    hi = lo + n / sp;
    n = 0;
    for (int64_t q = 0; q_of && q < p->nseq; q++)
        for (int64_t pos = 0; at(p->dp, q, 0) == d && pos < room(p, q); pos++)
            if (ref_packed_owns(side, c, q, pos)) {
                if (n >= lo && n < hi) {
                    q_of[n - lo] = q;
                    pos_of[n - lo] = pos;
                }
                n++;
            }
    return hi - lo;
}

int64_t ref_packed_rows(const ref_packed_t *side, int64_t rank, int64_t *q_of, int64_t *pos_of,
                        int64_t *piece_of)
{
    const int64_t own = own_rows(side, rank, NULL, NULL);
    int64_t *q = malloc((size_t)(2 * own + 1) * sizeof *q), *pos = q + own, n = 0, piece = 0;
    if (!q)
        abort();
    (void)own_rows(side, rank, q, pos);
    for (int64_t i = 0; i < own; i++) {
        const bool begins = i == 0 || q[i] != q[i - 1] || pos[i] != pos[i - 1] + 1;
        piece = begins ? pos[i] : piece;
        for (int64_t p = pos[i] - (begins ? side->p.halo : 0); p <= pos[i]; p++, n++) {
            if (!q_of)
                continue;
            q_of[n] = q[i];
            pos_of[n] = p;
            if (piece_of)
                piece_of[n] = piece;
        }
    }
    free(q);
    return n;
}

void ref_packed_joins(const ref_packed_t *side, int64_t most, bool *joins)
{
    for (int64_t i = 0; i < side->p.nseq * most; i++)
        joins[i] = false;
    for (int64_t rank = 0; rank < ref_side_size(&side->grid); rank++) {
        const int64_t n = own_rows(side, rank, NULL, NULL);
        int64_t *q = malloc((size_t)(2 * n + 1) * sizeof *q), *pos = q + n;
        if (!q)
            abort();
        (void)own_rows(side, rank, q, pos);
        for (int64_t i = 1; i < n; i++)
            if (q[i] == q[i - 1] && pos[i] == pos[i - 1] + 1)
                joins[q[i] * most + pos[i]] = true;
        free(q);
    }
}

void ref_packed_features(const ref_packed_t *side, int64_t rank, int64_t h, int64_t *lo,
                         int64_t *hi)
{
    const ref_side_t *grid = &side->grid;
    const char *dim = grid->nsplits[2] ? grid->split[2][0].dim : "none";
    const int64_t part = ref_side_has(grid, rank) ? h / ref_side_extent(grid, dim) : 0;
    *lo = part * ref_side_coord(grid, rank, dim);
    *hi = *lo + part;
}

/* The pieces of sequence @q are as the page says. */
static bool pieces_fit(const ref_packed_t *side, int64_t q)
{
    const ref_packing_t *p = &side->p;
    int64_t left = room(p, q);
    if ((q == 0 && p->start[0] != 0) || p->start[q + 1] < p->start[q])
        return false;
    for (int64_t i = p->start[q]; i < p->start[q + 1]; i++) {
        if (p->piece[i] < 0 || p->piece[i] > left || p->owner[i] < 0 ||
            p->owner[i] >= ref_packed_cp(side))
            return false;
        left -= p->piece[i];
    }
    return left == 0;
}

bool ref_packed_valid(const ref_packed_t *side)
{
    const ref_packing_t *p = &side->p;
    const int64_t most = ref_packed_cp(side);
    int64_t left = INT64_MAX;
    if (p->halo < 0 || (p->halo > 0 && p->cut == REF_CUT_WHOLE))
        return false;
    for (int64_t q = 0; q < p->nseq; q++) {
        const int64_t d = at(p->dp, q, 0), cp = at(p->cp, q, most), first = at(p->first, q, 0);
        if (d < 0 || d >= ref_side_dp(&side->grid) || p->len[q] < 0 || room(p, q) < p->len[q] ||
            room(p, q) > left)
            return false;
        left -= room(p, q);
        if (p->cut == REF_CUT_TABLE
                ? !pieces_fit(side, q)
                : p->cut <= REF_CUT_ZIGZAG &&
                      (cp < 1 || first < 0 || first >= most || cp > most - first))
            return false;
        const bool zigzag = p->cut == REF_CUT_ZIGZAG && cp > 1;
        if (p->cut <= REF_CUT_ZIGZAG && room(p, q) % (zigzag ? 2 * cp : cp))
            return false;
    }
    for (int64_t d = 0; p->cut == REF_CUT_CONTIGUOUS && d < ref_side_dp(&side->grid); d++)
        if (before(p, d, p->nseq) % most)
            return false;
    const int64_t sp = sp_of(&side->grid);
    ref_packed_t all = *side; /* rows that are not cut over tp */
    all.grid.nsplits[1] = most > 1;
    for (int64_t rank = 0; sp > 1 && rank < ref_side_size(&side->grid); rank++)
        if (own_rows(&all, rank, NULL, NULL) % sp)
            return false;
    return true;
}
