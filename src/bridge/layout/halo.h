/* SPDX-License-Identifier: Apache-2.0 */
/* halo.h (private) - the pieces of a packing's ranks, and the rows in front of each. */
#ifndef COLO_BRIDGE_LAYOUT_HALO_H
#define COLO_BRIDGE_LAYOUT_HALO_H

#include "bridge/layout/packed.h"

/* A maximal run of positions of one sequence that follow each other on one rank. */
typedef struct colo_halo_piece {
    int64_t row, count;  /* its own rows, without padding; count 0: padding alone */
    int64_t fresh;       /* the first row, of its own or in front, that no earlier piece of its rank
                            has */
    int64_t seq, pos;    /* of its first position */
    int64_t block;       /* of its rank: owner * sp + which of its blocks */
    int64_t local, rows; /* where the rank's tensor has it, with what is in front and padding */
} colo_halo_piece_t;

/* Memory is kept for the next tables. */
typedef struct colo_halo {
    int64_t before;       /* rows in front of each piece; 0: there are no halos */
    int64_t rows;         /* of the tensors of all ranks */
    colo_list_t pieces;   /* colo_halo_piece_t, by row */
    colo_list_t by_block; /* int64_t: pieces of one block after those of another, by row */
    int64_t *lo;          /* [blocks + 1] in by_block */
    int64_t *held;        /* [blocks] rows of its tensor */
    colo_list_t entries;  /* int64_t: memory of the tables above */
} colo_halo_t;

/* How many of the rows in front of @piece are rows of its sequence. */
static inline int64_t colo_halo_front(const colo_halo_t *halo, const colo_halo_piece_t *piece)
{
    const int64_t most = piece->pos < halo->before ? piece->pos : halo->before;
    return piece->count > 0 ? most : 0;
}
/* Where the tensor has @row, of its own or in front. */
static inline int64_t colo_halo_local(const colo_halo_t *halo, const colo_halo_piece_t *piece,
                                      int64_t row)
{
    return piece->local + halo->before + (row - piece->row);
}
static inline const colo_halo_piece_t *colo_halo_piece(const colo_halo_t *halo, int64_t block,
                                                       int64_t i)
{
    const int64_t *by_block = halo->by_block.items;
    return (const colo_halo_piece_t *)halo->pieces.items + by_block[halo->lo[block] + i];
}
static inline int64_t colo_halo_count(const colo_halo_t *halo, int64_t block)
{
    return halo->lo[block + 1] - halo->lo[block];
}

/* Loads the pieces of @packing, and @rooms for it: with padding as rows like others. */
colo_status_t colo_halo_load(colo_halo_t *halo, colo_packed_t *rooms,
                             const colo_packing_t *packing);
void colo_halo_deinit(colo_halo_t *halo);

/* Rows of a batch, with all places that have them, of @side: its own piece comes first, then by
 * position. Only those of which some are among @mine, or which block @block has. @places and
 * @partials: colo_place_t, colo_partial_t, out; @addends: out, the most that a row of the whole
 * batch has. */
colo_status_t colo_halo_partials(const colo_side_t *side, const colo_runs_t *mine, int64_t block,
                                 colo_list_t *places, colo_list_t *partials, int64_t *addends);

extern const colo_ownership_t colo_owns_halo; /* its table is a colo_ragged_t */

#endif
