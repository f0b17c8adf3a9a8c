/* SPDX-License-Identifier: Apache-2.0 */
/* ref_packed.c - see ref_packed.h. */
#include "ref/ref_packed.h"

#include <stdlib.h>

int64_t ref_packed_size(const ref_packed_t *side)
{
    return side->extent[0] * side->extent[1] * side->extent[2];
}

int64_t ref_packed_coord(const ref_packed_t *side, int64_t rank, int dim)
{
    for (int k = 0; side->order[k] != dim; k++)
        rank /= side->extent[side->order[k]];
    return rank % side->extent[dim];
}

int64_t ref_packed_cp(const ref_packed_t *side)
{
    return side->features == REF_CP ? 1 : side->extent[REF_CP];
}

static int64_t at(const int64_t *table, int64_t i, int64_t absent)
{
    return table ? table[i] : absent;
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
    const int64_t n = at(p->cp, q, ref_packed_cp(side)), mine = c - at(p->first, q, 0);
    const bool zigzag = p->cut == REF_CUT_ZIGZAG && n > 1;
    const int64_t pieces = zigzag ? 2 * n : n;
    int64_t k = 0;
    while (pos >= (k + 1) * (p->len[q] / pieces))
        k++;
    if (zigzag && k >= n)
        k = 2 * n - 1 - k;
    return k == mine;
}

int64_t ref_packed_rows(const ref_packed_t *side, int64_t rank, int64_t *q_of, int64_t *pos_of)
{
    const ref_packing_t *p = &side->p;
    if (rank >= ref_packed_size(side))
        return 0;
    const int64_t d = ref_packed_coord(side, rank, REF_DP);
    const int64_t c = side->features == REF_CP ? 0 : ref_packed_coord(side, rank, REF_CP);
    int64_t n = 0, lo, hi;
    for (int64_t q = 0; q < p->nseq; q++)
        for (int64_t pos = 0; at(p->dp, q, 0) == d && pos < p->len[q]; pos++)
            n += ref_packed_owns(side, c, q, pos);
    lo = 0;
    hi = n;
    if (side->sp) {
        const int64_t block = n / side->extent[REF_TP];
        lo = block * ref_packed_coord(side, rank, REF_TP);
        hi = lo + block;
    }
    n = 0;
    for (int64_t q = 0; q_of && q < p->nseq; q++)
        for (int64_t pos = 0; at(p->dp, q, 0) == d && pos < p->len[q]; pos++)
            if (ref_packed_owns(side, c, q, pos)) {
                if (n >= lo && n < hi) {
                    q_of[n - lo] = q;
                    pos_of[n - lo] = pos;
                }
                n++;
            }
    return hi - lo;
}

void ref_packed_features(const ref_packed_t *side, int64_t rank, int64_t h, int64_t *lo,
                         int64_t *hi)
{
    *lo = 0;
    *hi = rank < ref_packed_size(side) ? h : 0;
    if (side->features < 0 || *hi == 0)
        return;
    const int64_t part = h / side->extent[side->features];
    *lo = part * ref_packed_coord(side, rank, side->features);
    *hi = *lo + part;
}

/* The pieces of sequence @q are as the page says. */
static bool pieces_fit(const ref_packed_t *side, int64_t q)
{
    const ref_packing_t *p = &side->p;
    int64_t left = p->len[q];
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
    for (int64_t q = 0; q < p->nseq; q++) {
        const int64_t d = at(p->dp, q, 0), cp = at(p->cp, q, most), first = at(p->first, q, 0);
        if (d < 0 || d >= side->extent[REF_DP] || p->len[q] < 0 || p->len[q] > left)
            return false;
        left -= p->len[q];
        if (p->cut == REF_CUT_TABLE
                ? !pieces_fit(side, q)
                : p->cut != REF_CUT_WHOLE &&
                      (cp < 1 || first < 0 || first >= most || cp > most - first))
            return false;
        const bool zigzag = p->cut == REF_CUT_ZIGZAG && cp > 1;
        if (p->cut <= REF_CUT_ZIGZAG && p->len[q] % (zigzag ? 2 * cp : cp))
            return false;
    }
    for (int64_t rank = 0; side->sp && rank < ref_packed_size(side); rank++) {
        ref_packed_t all = *side;
        all.sp = false;
        if (ref_packed_rows(&all, rank, NULL, NULL) % side->extent[REF_TP])
            return false;
    }
    return true;
}
