/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_packed.h - packings by brute force: which rank holds a position, what a rank has, what is
 * refused.
 *
 * Every question is answered position by position from the text of docs/concepts/ragged.md. Shares
 * the description of a grid with ref_bridge.h, and nothing with the library.
 */
#ifndef TESTS_REF_REF_PACKED_H
#define TESTS_REF_REF_PACKED_H

#include "ref/ref_bridge.h"

typedef enum ref_packed_cut {
    REF_CUT_BLOCK,
    REF_CUT_ZIGZAG,
    REF_CUT_WHOLE,
    REF_CUT_TABLE,
    REF_CUT_CONTIGUOUS
} ref_packed_cut_t;

typedef struct ref_packing {
    int64_t nseq;
    const int64_t *len, *dp, *cp, *first; /* dp, cp, first: or NULL */
    ref_packed_cut_t cut;
    const int64_t *start, *piece, *owner; /* REF_CUT_TABLE */
    const int64_t *room;                  /* or NULL: len */
    int64_t halo;                         /* rows in front of each piece of a rank */
} ref_packing_t;

/* A side: a grid at rank 0 of tp, cp and dp, and what is packed on it. Samples are cut over dp.
 * Rows are cut over cp, if that is a context split, and what a context rank holds over tp, if rows
 * have that split, too. */
typedef struct ref_packed {
    ref_side_t grid;
    ref_packing_t p;
} ref_packed_t;

/* Context ranks that cut rows. */
int64_t ref_packed_cp(const ref_packed_t *side);
/* Does context rank @c have position @pos of sequence @q? */
bool ref_packed_owns(const ref_packed_t *side, int64_t c, int64_t q, int64_t pos);
/* The rows of @rank in the order of its tensor, padding and halos included; returns how many. @q,
 * @pos: out, NULL: only count. @piece: out, or NULL: the first position of the piece that the row
 * is in, or in front of. */
int64_t ref_packed_rows(const ref_packed_t *side, int64_t rank, int64_t *q, int64_t *pos,
                        int64_t *piece);
/* @joins [nseq][most]: out: is a position on the same rank as the one before it, in one piece? */
void ref_packed_joins(const ref_packed_t *side, int64_t most, bool *joins);
/* Features [*lo, *hi) of @h. */
void ref_packed_features(const ref_packed_t *side, int64_t rank, int64_t h, int64_t *lo,
                         int64_t *hi);
/* Would the page accept the tables? */
bool ref_packed_valid(const ref_packed_t *side);

#endif
