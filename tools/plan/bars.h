/* SPDX-License-Identifier: Apache-2.0 */
/* bars.h - what the panels of batches share: how context ranks cut sequences into pieces, and rows
 * of an axis as a bar, as wide as the panel: boxes on it, and ribbons to other bars. */
#ifndef TOOLS_PLAN_BARS_H
#define TOOLS_PLAN_BARS_H

#include "plan-tool.h"

enum {
    BARS_MAX = 12,    /* bars of one kind in a panel */
    RECTS_MAX = 2000, /* boxes of a bar */
    PARTS_MAX = 64,   /* of the segment or sequence whose path is drawn */
    LINES_MAX = 12,   /* that list them */
    BAR = 18,         /* height */
    TOP = 72,         /* of what is below a caption */
    STRIP = 14        /* height of the owners below a bar */
};

/* ---- pieces ---- */

enum { BARS_ALL = -1 }; /* in place of a context rank: all of them */

/* One side of the batch; of segments, the destination. */
typedef struct bars_side {
    const plan_ask_t *ask;
    const colo_layout_t *layout;
    colo_packing_t packing; /* that of the batch, or the sequences of its segments */
    int64_t cp, sp;
} bars_side_t;
bars_side_t bars_side(const plan_ask_t *ask, int k);

/* Positions of a sequence that follow each other on one context rank, or on all. */
typedef struct bars_piece {
    int64_t number, pos, count, owner;
    int64_t row; /* of the segment that has these positions; of a path on its rank's axis */
    bool begins; /* a run of positions that follow each other on one rank, which has a halo */
} bars_piece_t;
/* of sequence @q */
int64_t bars_pieces(const bars_side_t *side, int64_t q);
int64_t bars_replica(const bars_side_t *side, int64_t q);
/* Its positions on this side, padding included: those are cut. */
int64_t bars_room(const bars_side_t *side, int64_t q);
/* Piece @k, which begins at @pos. */
bars_piece_t bars_piece(const bars_side_t *side, int64_t q, int64_t k, int64_t pos);

/* Pieces of a sequence, as many as are drawn, and the context ranks that hold some of them. */
typedef struct bars_path {
    bars_side_t side;
    int64_t q;
    int64_t n, more; /* pieces; those that are not drawn */
    bars_piece_t piece[PARTS_MAX];
    int64_t nranks, owner[BARS_MAX], length[BARS_MAX]; /* of their axes */
} bars_path_t;
void bars_add(bars_path_t *path, bars_piece_t piece);
/* Pieces of a packing's sequence, cut by sequence parallelism, too, and the axes of their context
 * ranks, with halos; false: there is no memory. */
bool bars_find_path(bars_path_t *path);
/* The row on the axis of context rank @owner that position @pos of the sequence is. */
int64_t bars_row(const bars_path_t *path, int64_t owner, int64_t pos);
/* "0,1" or, if there are many, "cp 3": the ranks that hold a piece of @owner of sequence @q.
 * @first: out, may be NULL: the first of them, or @owner if the world has too many. Returns @out.
 */
const char *bars_ranks(char out[48], int64_t *first, const bars_side_t *side, int64_t q,
                       int64_t owner);

/* ---- bars ---- */

/* Rows @offset .. @offset + @count - 1 of a bar: where they begin, and how wide they are. */
typedef struct bars_span {
    double x, width;
} bars_span_t;
/* @length: of the bar's axis */
bars_span_t bars_span(int64_t length, int64_t offset, int64_t count);

/* What the boxes lie on. */
void bars_track(FILE *f, bars_span_t at, double y);
/* A box of colour @hue (any number; below 0: grey), with its name if there is space. */
void bars_box(FILE *f, int64_t hue, bool faded, bars_span_t at, double y, double height,
              const char *fmt, ...) __attribute__((format(printf, 7, 8)));
/* A grey box below a bar, with the name of its owners. */
void bars_owner(FILE *f, double shade, bars_span_t at, double y, const char *name);
/* A line across the bar before row @offset. */
void bars_cut(FILE *f, int64_t length, int64_t offset, double y);
/* From @from, whose lower edge is @y0, to @to, whose upper edge is @y1. */
void bars_ribbon(FILE *f, int64_t hue, bars_span_t from, double y0, bars_span_t to, double y1);
/* "3 more sequences are not drawn."; returns the y below. */
double bars_left_out(FILE *f, double y, int64_t n, const char *what);
int64_t bars_at_most(int64_t n, int64_t most);
int64_t bars_longest(const int64_t *length, int64_t n);

#endif
