/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_ragged_table.c - which tables are refused and why.
 *
 * Asks every question of every segment, every sequence and every pair of rows. What a pass cannot
 * ask because an earlier answer took the sense out of it, it skips.
 */
#include "ref/ref_ragged.h"

#include <stdlib.h>

typedef struct list {
    const ref_ragged_t *c;
    ref_refusal_t *out;
    int64_t cap, n;
    int64_t p, d, addends, chunks, sp;
} list_t;

static void refuse(list_t *l, ref_refusal_t why)
{
    if (l->n < l->cap)
        l->out[l->n] = why;
    l->n++;
}

static bool inside(int64_t v, int64_t limit)
{
    return v >= 0 && v < limit;
}

static void check_indices(list_t *l)
{
    const ref_segments_t *t = &l->c->table;
    for (int64_t e = 0; e < t->nseg; e++)
        if (t->rows[e] < 0)
            refuse(l, (ref_refusal_t){REF_REFUSE_ROWS, e, -1, -1, -1, -1, t->rows[e], 0});
    for (int64_t e = 0; e < t->nseg; e++)
        if (!inside(t->src_dp[e], l->p))
            refuse(l, (ref_refusal_t){REF_REFUSE_SRC_DP, e, -1, -1, -1, -1, t->src_dp[e], l->p});
    for (int64_t e = 0; e < t->nseg; e++)
        if (!inside(t->seq[e], t->nseq))
            refuse(l, (ref_refusal_t){REF_REFUSE_SEQ, e, -1, -1, -1, -1, t->seq[e], t->nseq});
    for (int64_t q = 0; q < t->nseq; q++)
        if (!inside(t->seq_dp[q], l->d))
            refuse(l, (ref_refusal_t){REF_REFUSE_SEQ_DP, -1, q, -1, -1, -1, t->seq_dp[q], l->d});
    for (int64_t q = 0; q < t->nseq; q++)
        if (t->seq_len[q] < 0)
            refuse(l, (ref_refusal_t){REF_REFUSE_SEQ_LEN, -1, q, -1, -1, -1, t->seq_len[q], 0});
}

/* May row positions of @e be asked for? */
static bool placed(const ref_segments_t *t, int64_t e)
{
    return t->rows[e] > 0 && inside(t->seq[e], t->nseq) && t->seq_len[t->seq[e]] >= 0;
}

/* The first row of segment e outside its sequence, or -1. @first: its index among all rows. */
static int64_t outside(const ref_segments_t *t, int64_t e, int64_t first, int64_t *found)
{
    int64_t limit = t->seq_len[t->seq[e]];
    if (t->row_pos) {
        for (int64_t r = 0; r < t->rows[e]; r++)
            if (!inside(t->row_pos[first + r], limit)) {
                *found = t->row_pos[first + r];
                return r;
            }
        return -1;
    }
    *found = t->pos[e];
    if (!inside(t->pos[e], limit))
        return 0;
    *found = limit;
    return t->rows[e] > limit - t->pos[e] ? limit - t->pos[e] : -1;
}

/* The lowest position that a row of e and another row, of f, share; -1: none. All are inside. */
static int64_t shared(const ref_segments_t *t, int64_t e, int64_t e0, int64_t f, int64_t f0)
{
    int64_t lowest = -1;
    if (t->seq[e] != t->seq[f])
        return -1;
    if (!t->row_pos) {
        if (e == f)
            return -1;
        int64_t offset = t->pos[e] > t->pos[f] ? t->pos[e] : t->pos[f];
        return offset - t->pos[e] < t->rows[e] && offset - t->pos[f] < t->rows[f] ? offset : -1;
    }
    for (int64_t r = 0; r < t->rows[e]; r++)
        for (int64_t s = 0; s < t->rows[f]; s++)
            if ((e != f || r < s) && t->row_pos[e0 + r] == t->row_pos[f0 + s] &&
                (lowest < 0 || t->row_pos[e0 + r] < lowest))
                lowest = t->row_pos[e0 + r];
    return lowest;
}

static void check_positions(list_t *l)
{
    const ref_segments_t *t = &l->c->table;
    int64_t *first = ref_zeros(t->nseg + 1, sizeof *first);
    bool *good = ref_zeros(t->nseg + 1, sizeof *good);
    for (int64_t e = 0; t->row_pos && e < t->nseg; e++)
        first[e + 1] = first[e] + t->rows[e];
    for (int64_t e = 0; e < t->nseg; e++) {
        int64_t found;
        if (!placed(t, e))
            continue;
        int64_t row = outside(t, e, first[e], &found);
        good[e] = row < 0;
        if (row >= 0)
            refuse(l, (ref_refusal_t){REF_REFUSE_POSITION, e, t->seq[e], -1, row, -1, found,
                                      t->seq_len[t->seq[e]]});
    }
    for (int64_t e = 0; e < t->nseg; e++)
        for (int64_t f = e; good[e] && f < t->nseg; f++) {
            int64_t offset = good[f] ? shared(t, e, first[e], f, first[f]) : -1;
            if (offset >= 0)
                refuse(l,
                       (ref_refusal_t){REF_REFUSE_COLLISION, e, t->seq[e], -1, -1, f, offset, 0});
        }
    free(first);
    free(good);
}

/* Sum of the lengths of replica d's sequences, or of all if d is -1; -1: beyond int64; -2: a length
 * has no sense. */
static int64_t axis_of(const ref_segments_t *t, int64_t d)
{
    int64_t sum = 0;
    for (int64_t q = 0; q < t->nseq; q++)
        if (d < 0 || t->seq_dp[q] == d) {
            if (t->seq_len[q] < 0)
                return -2;
            if (t->seq_len[q] > INT64_MAX - sum)
                return -1;
            sum += t->seq_len[q];
        }
    return sum;
}

static void check_lengths(list_t *l)
{
    const ref_segments_t *t = &l->c->table;
    for (int64_t q = 0; q < t->nseq; q++)
        if (t->seq_len[q] >= 0 && t->seq_len[q] % l->chunks)
            refuse(l,
                   (ref_refusal_t){REF_REFUSE_CHUNKS, -1, q, -1, -1, -1, t->seq_len[q], l->chunks});
    for (int64_t d = 0; d < l->d; d++) {
        int64_t axis = axis_of(t, d);
        bool whole = axis >= 0;
        for (int64_t q = 0; q < t->nseq; q++)
            if (t->seq_dp[q] == d && t->seq_len[q] % l->chunks)
                whole = false;
        if (whole && axis / l->addends % l->sp)
            refuse(l, (ref_refusal_t){REF_REFUSE_SP, -1, -1, d, -1, -1, axis / l->addends, l->sp});
    }
}

/* -1: beyond int64; -2: a count has no sense. */
static int64_t rows_of(const ref_segments_t *t)
{
    int64_t sum = 0;
    for (int64_t e = 0; e < t->nseg; e++) {
        if (t->rows[e] < 0)
            return -2;
        if (t->rows[e] > INT64_MAX - sum)
            return -1;
        sum += t->rows[e];
    }
    return sum;
}

int64_t ref_ragged_refusals(const ref_ragged_t *c, ref_refusal_t *out, int64_t cap)
{
    list_t l = {.c = c, .out = out, .cap = cap, .addends = 1, .chunks = 1, .sp = 1};
    l.p = ref_ragged_parts(&c->src);
    l.d = ref_ragged_parts(&c->dst);
    for (int k = 0; k < c->dst.nsplits[1]; k++) {
        const ref_split_t *sp = &c->dst.split[1][k];
        int64_t extent = ref_side_extent(&c->dst, sp->dim);
        if (!sp->context) {
            l.sp *= extent;
        } else if (extent > 1) {
            l.addends = extent;
            l.chunks = sp->cut == REF_ZIGZAG ? 2 * extent : extent;
        }
    }
    check_indices(&l);
    /* row positions cannot be counted off if the counts have no sense */
    if (!c->table.row_pos || rows_of(&c->table) >= 0)
        check_positions(&l);
    check_lengths(&l);
    if (rows_of(&c->table) == -1)
        refuse(&l, (ref_refusal_t){REF_REFUSE_SUM, -1, -1, -1, -1, -1, 0, 0});
    if (axis_of(&c->table, -1) == -1)
        refuse(&l, (ref_refusal_t){REF_REFUSE_SUM, -1, -1, 0, -1, -1, 0, 0});
    return l.n;
}
