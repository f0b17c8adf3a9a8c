/* SPDX-License-Identifier: Apache-2.0 */
/* packed.h (private) - a packing seen along the axes of a layout, while a plan is made. */
#ifndef COLO_BRIDGE_LAYOUT_PACKED_H
#define COLO_BRIDGE_LAYOUT_PACKED_H

#include "bridge/layout/ownership.h"

#include <colobridge/packing.h>

/* How a layout divides rows that are in tables. */
typedef struct colo_ragged_axes {
    int64_t replicas; /* ranks along the dims that split samples */
    int64_t cp;       /* ranks along those that split rows in context; the major index */
    int64_t sp;       /* ranks along the others that split rows */
    bool zigzag;      /* of the layout, cp > 1 */
    bool in_order;    /* its ranks hold the rows of a replica in table order, in equal blocks */
} colo_ragged_axes_t;

/* Checks that the layout has no position map, and one context split, as its first, at most.
 * @in_order: any splits that are BLOCK, because rows lie in table order. @what, @side: for error
 * messages. */
colo_status_t colo_ragged_axes(colo_ragged_axes_t *axes, const colo_layout_t *layout, bool in_order,
                               const char *what, const char *side);
/* What coordinates mean then; the first split of each is the coarsest. */
typedef struct colo_ragged_place {
    int64_t replica;
    int64_t context, part; /* rank in context; of sequence parallelism; or -1, when it is set */
} colo_ragged_place_t;
colo_ragged_place_t colo_ragged_place(const colo_layout_t *layout, const int64_t *coords);
/* Sets the coordinates of a place, but for what is -1 in it. */
void colo_ragged_set_place(const colo_layout_t *layout, colo_ragged_place_t place, int64_t *coords);

/* Positions of one sequence that follow each other on one context rank. Rows of packings are
 * numbered sequence by sequence in table order, the same on both sides of a bridge. */
typedef struct colo_piece {
    int64_t row, count; /* count > 0, without padding */
    int64_t local;      /* of the first, on the axis of its owner */
    int64_t owner;      /* replica * cp + context rank */
} colo_piece_t;

/* Memory is kept for the next tables. axes and what are set before the first load. */
typedef struct colo_packed {
    colo_ragged_axes_t axes;
    const char *what; /* for error messages */
    int64_t nseqs;
    int64_t cp;      /* owners per replica: 1 if every context rank holds all */
    int64_t sp;      /* blocks that the rows of an owner are cut into */
    bool uncut;      /* the tables say that each context rank holds all rows */
    int64_t *start;  /* [nseqs + 1] row of each sequence's first position */
    int64_t *base;   /* [nseqs] where a sequence begins on its replica's axis */
    int64_t *length; /* [replicas] of a replica's axis, which has the padding */
    int64_t *held;   /* [replicas * cp] rows of each owner, with padding */
    int64_t *share;  /* [replicas] CONTIGUOUS: rows of each of its owners */
    int64_t *lo;     /* [replicas * cp + 1] in by_owner */
    /* If blocks will not be asked for their rows there is no list: all sequences are cut alike. */
    bool listed;
    union {
        int64_t *first; /* [nseqs + 1] listed: the first piece of each sequence */
        int64_t *chunk; /* [nseqs] else: rows of a piece */
    };
    const int64_t *seq_dp; /* not listed: the caller's, until the next tables */
    colo_list_t pieces;    /* colo_piece_t, by row */
    colo_list_t by_owner;  /* int64_t: pieces of one owner after those of another, by row */
    colo_list_t entries;   /* int64_t: memory of the tables above */
} colo_packed_t;

/* Checks tables and lays them out. @listed: blocks will be asked for their rows; a list costs as
 * much as many batches of segments. Else @tables has a seq_dp and cuts all sequences alike. */
colo_status_t colo_packed_load(colo_packed_t *packed, const colo_packing_t *tables, bool listed);
void colo_packed_deinit(colo_packed_t *packed);
/* Tables [n] of so many entries and one more each, one behind the other; false: there is no memory.
 */
bool colo_tables_lay(colo_list_t *memory, int64_t **const table[], const int64_t *entries, int n);

/* length / unit. A division per sequence costs as much as the rest of the check; a unit is a power
 * of two, usually. */
static inline int64_t colo_packed_times(int64_t length, uint64_t unit)
{
    return unit & (unit - 1) ? (int64_t)((uint64_t)length / unit) : length >> __builtin_ctzll(unit);
}

/* Piece @j of sequence @seq. */
static inline colo_piece_t colo_packed_piece(const colo_packed_t *packed, int64_t seq, int64_t j)
{
    if (packed->listed)
        return ((const colo_piece_t *)packed->pieces.items)[packed->first[seq] + j];
    const int64_t unit = packed->chunk[seq];
    const bool mirrored = packed->axes.zigzag && j >= packed->cp;
    return (colo_piece_t){
        packed->start[seq] + j * unit, unit,
        colo_packed_times(packed->base[seq], (uint64_t)packed->cp) + (mirrored ? unit : 0),
        packed->seq_dp[seq] * packed->cp + (mirrored ? 2 * packed->cp - 1 - j : j)};
}

/* Which block @coords belong to: owner * sp + which of the owner's; and the coordinates of one that
 * a side splits, others stay. */
int64_t colo_packed_block(const colo_packed_t *packed, const colo_layout_t *layout,
                          const int64_t *coords);
void colo_packed_coords(const colo_side_t *side, const colo_packed_t *packed, int64_t block,
                        int64_t *coords);

/* Rows of the tensor of @coords, padding included. */
int64_t colo_packed_extent(const colo_packed_t *packed, const colo_layout_t *layout,
                           const int64_t *coords);

/* The piece of sequence @seq that has @row. */
int64_t colo_packed_find(const colo_packed_t *packed, int64_t seq, int64_t row);

/* The rows [*lo, *hi) of piece @piece that rank @part of sequence parallelism has; false: none. */
static inline bool colo_packed_cut(const colo_packed_t *packed, const colo_piece_t *piece,
                                   int64_t part, int64_t *lo, int64_t *hi)
{
    int64_t first = piece->row, last = piece->row + piece->count;
    if (packed->sp > 1) {
        const int64_t block = packed->held[piece->owner] / packed->sp,
                      local_end = (part + 1) * block;
        if (piece->local < part * block)
            first = piece->row + (part * block - piece->local);
        if (piece->local + piece->count > local_end)
            last = piece->row + (local_end - piece->local);
    }
    *lo = first > *lo ? first : *lo;
    *hi = last < *hi ? last : *hi;
    return *lo < *hi;
}

/* Rows that some rows met in a block: owner * sp + which of its blocks. */
typedef struct colo_met {
    int64_t block, count; /* block first: they are sorted by it */
} colo_met_t;

/* Counts @count rows of one block, in @met. */
static inline colo_status_t colo_packed_count(int64_t block, int64_t count, colo_list_t *met)
{
    colo_met_t *last = met->n > 0 ? (colo_met_t *)met->items + met->n - 1 : NULL;
    if (last && last->block == block)
        last->count += count;
    else
        COLO_PUSH(met, "plan: list of %lld blocks", (colo_met_t){block, count});
    return COLO_OK;
}
/* Counts rows [lo, hi) of sequence @seq by the block that owns them. */
colo_status_t colo_packed_meet(const colo_packed_t *packed, int64_t seq, int64_t lo, int64_t hi,
                               colo_list_t *met);
/* Appends to @out what @met counted, ascending; sorts @met. */
colo_status_t colo_packed_blocks(const colo_side_t *side, const colo_packed_t *packed,
                                 colo_list_t *met, colo_list_t *out);

/* What all ranks must have alike of one table, and of it what an error message shows. */
enum { COLO_SHOWN = 8, COLO_TABLES = 20 };
typedef struct colo_table {
    const char *side, *name; /* side: "", "src " or "dst " */
    int64_t n, first[COLO_SHOWN];
    uint64_t hash;
} colo_table_t;
/* Appends a table; NULL has no entries. */
void colo_table_keep(colo_table_t *table, int32_t *n, const char *side, const char *name,
                     const int64_t *values, int64_t entries);
/* Appends 10 tables of @packing, which was checked. */
void colo_packing_keep(colo_table_t *table, int32_t *n, const char *side,
                       const colo_packing_t *packing);
/* Those of both sides; returns how many. */
int32_t colo_packings_keep(colo_table_t *table, const colo_packing_t *src,
                           const colo_packing_t *dst);
uint64_t colo_tables_hash(const colo_table_t *table, int32_t n);

#endif
