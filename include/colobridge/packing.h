/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packing.h - which rank holds which positions of the LLM's packed sequences.
 *
 * A packing cuts each sequence into pieces. Each piece lies on one context rank of the replica that
 * holds the sequence. A batch of two packings of the same sequences moves rows from one cut to
 * another (colo_bridge_set_packing() in ragged.h, docs/concepts/ragged.md). All tables are i64 in
 * host memory and are the same on every rank.
 *
 * A layout says which ranks there are: the dims that split samples are the replicas, the first
 * split of rows, if it is one of context, has cp ranks, and the other splits of rows (sequence
 * parallelism) cut what a context rank holds into equal blocks. Whether the layout's context split
 * is ZIGZAG or BLOCK does not matter here: the packing decides.
 *
 * A rank holds the sequences of its replica in table order, and of each sequence its own pieces in
 * ascending position.
 *
 * A destination may have halos: rows in front of each piece, as short convolutions and token shifts
 * want them. Here a piece is a maximal run of positions of one sequence that follow each other on
 * one rank, whatever cut them.
 */
#ifndef COLOBRIDGE_PACKING_H
#define COLOBRIDGE_PACKING_H

#include <colobridge/layout.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum colo_packing_split_t {
    COLO_PACKING_BLOCK = 0,  /* one piece per context rank, in their order */
    COLO_PACKING_ZIGZAG = 1, /* 2 cp pieces; context rank c has pieces c and 2 cp - 1 - c. With cp 1
                                it is one piece, of any length */
    COLO_PACKING_WHOLE = 2,  /* every context rank holds all of each sequence */
    COLO_PACKING_TABLE = 3,  /* piece_len and piece_owner say */
    COLO_PACKING_CONTIGUOUS = 4 /* the sequences of a replica, one behind the other, are cut once:
                                   each context rank holds one interval of R / cp of all R rows.
                                   BLOCK cuts each sequence */
} colo_packing_split_t;

typedef struct colo_packing_t {
    size_t struct_size;
    int64_t nseqs;            /* Q sequences, >= 0 */
    const int64_t *seq_len;   /* [nseqs] positions, >= 0; padding included, unless seq_room says */
    const int64_t *seq_dp;    /* [nseqs] the replica that holds it; NULL: 0 */
    const int64_t *seq_cp;    /* [nseqs] BLOCK, ZIGZAG: context ranks of this sequence, >= 1; NULL:
                                 all cp */
    const int64_t *seq_first; /* [nseqs] BLOCK, ZIGZAG: the first of these ranks; NULL: 0 */
    colo_packing_split_t split;
    const int64_t *piece_start; /* [nseqs + 1] TABLE: sequence q has the pieces from piece_start[q]
                                   on, before piece_start[q + 1], one behind the other */
    const int64_t *piece_len;   /* [piece_start[nseqs]] positions of each piece, >= 0 */
    const int64_t *piece_owner; /* [piece_start[nseqs]] its context rank */
    const int64_t *seq_room; /* [nseqs] rows that this side has for the sequence, >= seq_len; NULL:
                                seq_len. The split, and TABLE's pieces, cut the room. Rows behind
                                seq_len are padding: they never travel, are 0 at a destination,
                                and the source's gradient of them is 0 */
    int64_t halo_before; /* of a destination, not WHOLE: so many rows in front of each piece of a
                            rank, >= 0: those before it in its sequence. Rows before a sequence's
                            first are 0, and so are those in front of padding alone. A row that a
                            rank lacks travels to it once; its gradient is the sum over all
                            pieces that have it, its own piece first, then by position, in fp32
                            for 16-bit dtypes, rounded once */
} colo_packing_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_PACKING_INIT                                                                       \
    sizeof(colo_packing_t), 0, nullptr, nullptr, nullptr, nullptr, COLO_PACKING_BLOCK, nullptr, \
        nullptr, nullptr, nullptr, 0
#else
#define COLO_PACKING_INIT .struct_size = sizeof(colo_packing_t)
#endif

/**
 * colo_packing_rows() - how many rows @rank holds; local
 * The call checks the whole packing, so it also answers whether the tables fit the layout.
 * @packing:  borrowed for the call. A table of zero entries may be NULL
 * @layout:   of one side of the bridge
 * @rows:     out: padding and halos included; 0 if the layout gives @rank nothing
 * Errors:    each names the sequence and the numbers. COLO_ERR_ARG: a table is missing or does not
 *            go with the split; a length < 0; a replica, context rank or piece out of range; pieces
 *            that do not add up to the length; sums beyond 63 bits. COLO_ERR_LAYOUT: a length that
 *            the pieces do not divide; rows of a context rank that the ranks of sequence
 *            parallelism do not divide; a layout that packings cannot have (position map, order of
 *            splits). COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_packing_rows(const colo_packing_t *packing, const colo_layout_t *layout,
                                         int64_t rank, int64_t *rows);
/**
 * colo_packing_most_rows() - how many rows the rank has that has most of them; local
 * For memory that is the same on all ranks: one look at the tables, whatever the number of ranks.
 * @rows:     out
 * Errors:    those of colo_packing_rows()
 */
COLO_API colo_status_t colo_packing_most_rows(const colo_packing_t *packing,
                                              const colo_layout_t *layout, int64_t *rows);
/**
 * colo_packing_index() - which rows @rank holds, in the order of its tensor; local
 * @index:   out [2][rows], rows as colo_packing_rows() says: first the position of each row in its
 *           sequence, then the number of that sequence. A position >= seq_len is padding, one < 0
 *           is in front of the sequence
 * Errors:   those of colo_packing_rows()
 */
COLO_API colo_status_t colo_packing_index(const colo_packing_t *packing,
                                          const colo_layout_t *layout, int64_t rank,
                                          int64_t *index);
/**
 * colo_packing_pieces() - where the pieces of @rank begin in its tensor; local
 * Piece i has the rows [begin[i], begin[i + 1]): its halo_before rows, and then its own.
 * @begin:   out [*n + 1], ascending from 0 on; the last is how many rows @rank has. NULL: only
 * count
 * @n:       out: pieces. No more than rows of colo_packing_rows(), if you ask for both at once
 * Errors:   those of colo_packing_rows()
 */
COLO_API colo_status_t colo_packing_pieces(const colo_packing_t *packing,
                                           const colo_layout_t *layout, int64_t rank,
                                           int64_t *begin, int64_t *n);

#ifdef __cplusplus
}
#endif
#endif
