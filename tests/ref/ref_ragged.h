/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_ragged.h - ragged batches by brute force: validation, ownership, values, bytes.
 *
 * A segment is a list of rows; each row has one place in a sequence. Each rank's rows are read off
 * lists of places that are cut by slicing. Shares the description of a grid and the element codes
 * with ref_bridge.h, and nothing with the library.
 */
#ifndef TESTS_REF_REF_RAGGED_H
#define TESTS_REF_REF_RAGGED_H

#include "ref/ref_bridge.h"

/* The tables, borrowed. Set @pos or @row_pos; the other is NULL. */
typedef struct ref_segments {
    int64_t nseg, nseq;
    const int64_t *rows, *src_dp, *seq; /* [nseg] */
    const int64_t *pos;                 /* [nseg]: row r is at pos[e] + r */
    const int64_t *row_pos;             /* [sum of rows], in order of (e, r) */
    const int64_t *seq_len, *seq_dp;    /* [nseq] */
} ref_segments_t;

/*
 * One bridge and its tables. Splits of a side: samples give the DP replica; features are BLOCK.
 * Rows of the source: all splits together are one BLOCK cut, context splits are the major index.
 * Rows of the destination: the context split cuts each sequence (REF_ZIGZAG, or REF_BLOCK for
 * contiguous), the other splits cut the local axis (SP).
 */
typedef struct ref_ragged {
    ref_side_t src, dst;
    ref_segments_t table;
    int64_t h;
    bool full;    /* all rows of the replica, else the rank's own rows */
    bool merged;  /* the caller's buffer of the sequence axis, else packed */
    bool partial; /* with full: PARTIAL, else DISJOINT; without full the gradient is SHARDED */
    bool rough;   /* addends of PARTIAL whose sum depends on the order */
    /* The node of each rank, NULL: one. A node adds up its addends first, if they are so many. */
    const int64_t *node;
    int64_t least;
} ref_ragged_t;

/* Refusals of the tables, in the order of the specification. */
typedef enum ref_refusal_kind {
    REF_REFUSE_ROWS = 1,  /* e: found rows < 0 */
    REF_REFUSE_SRC_DP,    /* e: found outside [0, limit) */
    REF_REFUSE_SEQ,       /* e: found outside [0, limit) */
    REF_REFUSE_SEQ_DP,    /* q: found outside [0, limit) */
    REF_REFUSE_SEQ_LEN,   /* q: found length < 0 */
    REF_REFUSE_POSITION,  /* e, q, row: first position found outside [0, limit) */
    REF_REFUSE_COLLISION, /* e <= other, q: both have a row at position found, the lowest shared */
    REF_REFUSE_CHUNKS,    /* q: length found is no multiple of limit = 2C or C */
    REF_REFUSE_SP,        /* d: local length found is no multiple of limit */
    REF_REFUSE_SUM,       /* d = -1: the sum of all rows; 0: that of all lengths */
} ref_refusal_kind_t;

typedef struct ref_refusal {
    ref_refusal_kind_t kind;
    int64_t e, q, d, row, other; /* -1: not about one */
    int64_t found, limit;
} ref_refusal_t;

/* Writes the first @cap refusals that apply, by kind, then by index; returns how many apply. What
 * a refusal makes meaningless (the position in a sequence that does not exist) is left out. */
int64_t ref_ragged_refusals(const ref_ragged_t *c, ref_refusal_t *out, int64_t cap);

/* A place on an axis. g counts all rows in order of (e, r); -1: no row of a segment is here. */
typedef struct ref_row {
    int64_t g, e, r, q, p;
    int64_t index; /* index on the rank's axis */
} ref_row_t;

/* What one rank has. All calls below this line expect valid tables. */
typedef struct ref_rows {
    bool holds; /* in the grid and on the stage */
    int64_t replica, addend;
    int64_t axis; /* places: shard of the source, or the (local) sequence axis */
    ref_row_t *place;
    int64_t n; /* rows among them: source in order of e, destination in order of (q, p) */
    ref_row_t *row;
    int64_t nh, *h;
} ref_rows_t;

void ref_ragged_src(ref_rows_t *part, const ref_ragged_t *c, int64_t rank);
/* @full: the whole axis of the replica; else the rank's own places. */
void ref_ragged_dst(ref_rows_t *part, const ref_ragged_t *c, int64_t rank, bool full);
void ref_rows_free(ref_rows_t *part);
int64_t ref_ragged_total(const ref_ragged_t *c);   /* rows of all segments */
int64_t ref_ragged_parts(const ref_side_t *side);  /* P or D */
int64_t ref_ragged_addends(const ref_ragged_t *c); /* C of the destination */

/* What a tensor of a rank holds. INTO: a merged buffer before forward. */
typedef enum ref_role { REF_X, REF_Y, REF_INTO, REF_DY, REF_DX } ref_role_t;

/* The tensor [*rows, *nh], tight, of @dtype, as every call must leave or find it. NULL @out: only
 * the shape. A rank without elements has *rows = 0, or *nh = 0 outside the grid. @salt makes
 * steps and tensors differ. Integers have no PARTIAL gradient. */
void ref_ragged_tensor(const ref_ragged_t *c, ref_role_t role, int64_t rank, const char *dtype,
                       int64_t salt, void *out, int64_t *rows, int64_t *nh);
/* Elements that @rank must receive: what it needs and does not hold. PARTIAL: per addend. */
int64_t ref_ragged_receives(const ref_ragged_t *c, int64_t rank, bool backward);

#endif
