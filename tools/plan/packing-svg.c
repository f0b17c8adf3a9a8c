/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packing-svg.c - the panels of a packed batch: how both sides cut each sequence, and the path of
 * one.
 *
 * Pieces are those of docs/packed.md, found here again from the tables. A box has the colour of the
 * first rank that holds it, so what has one colour on both sides stays where it is. What is drawn
 * is bounded; the panels say what they leave out.
 */
#include "bars.h"

#include <stdlib.h>
#include <string.h>

enum { ROW = 44, PAIR = 2 * BAR + 2, EVERY = -1 }; /* heights of a rank's bar, of both cuts */

/* Positions of a sequence that follow each other on one context rank, or on all. */
typedef struct piece {
    int64_t pos, count, owner; /* EVERY: all context ranks hold it */
    int64_t local;             /* on the axis of its owner */
} piece_t;

/* One side of the batch. */
typedef struct side {
    const plan_ask_t *ask;
    const colo_packing_t *packing;
    const colo_layout_t *layout;
    int64_t cp, sp;
} side_t;

static side_t side_of(const plan_ask_t *ask, int k)
{
    const colo_layout_t *layout = k ? &ask->dst : &ask->src;
    side_t side = {ask, &ask->batch->side[k], layout, colo_grid_extent(&layout->grid, "cp"), 1};
    for (int i = 0; i < layout->nsplits[COLO_ROWS]; i++)
        if (!layout->split[COLO_ROWS][i].context)
            side.sp *= layout->grid.extent[layout->split[COLO_ROWS][i].dim];
    return side;
}

static int64_t replica_of(const side_t *side, int64_t q)
{
    return side->packing->seq_dp ? side->packing->seq_dp[q] : 0;
}

static int64_t pieces_of(const side_t *side, int64_t q)
{
    const colo_packing_t *p = side->packing;
    const int64_t ranks = p->seq_cp ? p->seq_cp[q] : side->cp;
    return p->split == COLO_PACKING_WHOLE   ? 1
           : p->split == COLO_PACKING_TABLE ? p->piece_start[q + 1] - p->piece_start[q]
           : p->split == COLO_PACKING_ZIGZAG && ranks > 1 ? 2 * ranks
                                                          : ranks;
}

/* Piece @k of sequence @q, which begins at @pos. */
static piece_t piece_at(const side_t *side, int64_t q, int64_t k, int64_t pos)
{
    const colo_packing_t *p = side->packing;
    const int64_t n = pieces_of(side, q), first = p->seq_first ? p->seq_first[q] : 0;
    if (p->split == COLO_PACKING_WHOLE)
        return (piece_t){0, p->seq_len[q], EVERY, 0};
    if (p->split == COLO_PACKING_TABLE)
        return (piece_t){pos, p->piece_len[p->piece_start[q] + k],
                         p->piece_owner[p->piece_start[q] + k], 0};
    const bool mirrored = p->split == COLO_PACKING_ZIGZAG && n > 1 && k >= n / 2;
    return (piece_t){pos, p->seq_len[q] / n, first + (mirrored ? n - 1 - k : k), 0};
}

/* A box with its ranks' names. */
static void draw_piece(FILE *f, const side_t *side, int64_t q, int64_t owner, bars_span_t at,
                       double y, bool faded)
{
    char ranks[48];
    int64_t rank;
    bars_ranks(ranks, &rank, side->ask, side->layout, replica_of(side, q), owner);
    bars_box(f, owner < 0 ? EVERY : rank, faded, at, y, BAR, "%s", ranks);
}

static void draw_cut(FILE *f, const side_t *side, int64_t q, int64_t axis, double y)
{
    const int64_t n = bars_at_most(pieces_of(side, q), RECTS_MAX);
    bars_track(f, bars_span(axis, 0, side->packing->seq_len[q]), y);
    for (int64_t k = 0, pos = 0; k < n; k++) {
        const piece_t x = piece_at(side, q, k, pos);
        if (x.count > 0)
            draw_piece(f, side, q, x.owner, bars_span(axis, pos, x.count), y, false);
        pos += x.count;
    }
}

static void draw_pair(FILE *f, const plan_ask_t *ask, int64_t q, int64_t axis, double y)
{
    for (int k = 0; k < 2; k++) {
        const side_t side = side_of(ask, k);
        draw_cut(f, &side, q, axis, y + k * (PAIR - BAR));
    }
}

/* ---- both cuts ---- */

static int draw_cuts(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const plan_batch_t *b = ask->batch;
    const side_t src = side_of(ask, 0), dst = side_of(ask, 1);
    const int64_t n = bars_at_most(b->count, BARS_MAX), axis = bars_longest(b->length, n);
    char line[300], from[48] = "";
    double y = TOP;
    svg_say(f, "head2", 0, 14, "Both cuts of the packed sequences");
    snprintf(line, sizeof line,
             "Above the source's (%s), below the destination's (%s), with the ranks that hold each "
             "piece. Positions of one colour in both stay.",
             plan_batch_cut(b, 0), plan_batch_cut(b, 1));
    svg_lines(f, line, "text", SVG_COLUMNS, 15);
    for (int64_t q = 0; q < n; q++, y += PAIR + 28) {
        if (b->side[0].seq_dp || b->side[1].seq_dp)
            snprintf(from, sizeof from, ", replica %lld \xe2\x86\x92 %lld",
                     (long long)replica_of(&src, q), (long long)replica_of(&dst, q));
        svg_say(f, "text", 0, y + 12, "sequence %lld: %lld positions%s", (long long)q,
                (long long)b->length[q], from);
        draw_pair(f, ask, q, axis, y + 17);
    }
    return (int)bars_left_out(f, y, b->count - n, "sequences");
}

/* ---- the path of one sequence ---- */

/* The pieces of the sequence on one side, and the axes of the context ranks that hold some. */
typedef struct end {
    side_t side;
    int64_t n, more; /* pieces; those that are not drawn */
    piece_t piece[PARTS_MAX];
    int64_t nranks, owner[BARS_MAX], length[BARS_MAX];
} end_t;

typedef struct path {
    int64_t q;
    end_t end[2];
} path_t;

static int64_t rank_index(const end_t *e, int64_t owner)
{
    int64_t k = 0;
    while (k < e->nranks && e->owner[k] != owner)
        k++;
    return k;
}

/* Walks over the sequences of the replica in table order; what each rank has grows. */
static void find_end(end_t *e, const plan_ask_t *ask, int k, int64_t q)
{
    *e = (end_t){.side = side_of(ask, k)};
    const side_t *side = &e->side;
    for (int pass = 0; pass < 2; pass++) /* which ranks; then their axes */
        for (int64_t r = pass ? 0 : q; r < (pass ? ask->batch->count : q + 1); r++) {
            const int64_t n = replica_of(side, r) == replica_of(side, q) ? pieces_of(side, r) : 0;
            for (int64_t j = 0, pos = 0, drawn = 0; j < n; j++) {
                piece_t x = piece_at(side, r, j, pos);
                const int64_t i = rank_index(e, x.owner);
                pos += x.count;
                if (x.count == 0)
                    continue;
                if (!pass && i < BARS_MAX && e->n < PARTS_MAX) {
                    e->owner[i] = x.owner;
                    e->nranks = i == e->nranks ? i + 1 : e->nranks;
                    e->piece[e->n++] = x;
                } else if (!pass) {
                    e->more++;
                } else if (i < e->nranks) {
                    if (r == q && drawn < e->n && e->piece[drawn].pos == x.pos)
                        e->piece[drawn++].local = e->length[i];
                    e->length[i] += x.count;
                }
            }
        }
}

/* The part that begins at @pos, of one piece on either side: how long it is, 0 behind the last. */
static int64_t part_at(const path_t *path, int64_t pos, const piece_t *piece[2])
{
    int64_t end = INT64_MAX;
    for (int k = 0; k < 2; k++) {
        int64_t i = 0;
        while (i < path->end[k].n && path->end[k].piece[i].pos + path->end[k].piece[i].count <= pos)
            i++;
        if (i == path->end[k].n || path->end[k].piece[i].pos > pos)
            return 0;
        piece[k] = &path->end[k].piece[i];
        end = bars_at_most(end, piece[k]->pos + piece[k]->count);
    }
    return end - pos;
}

/* The lines that list the parts; returns the y below. */
static double list_parts(FILE *f, const path_t *path, double y)
{
    const piece_t *x[2];
    char ranks[2][48];
    int64_t n = 0, pos = 0;
    for (int64_t count; (count = part_at(path, pos, x)) > 0; pos += count) {
        if (n++ >= LINES_MAX)
            continue;
        for (int k = 0; k < 2; k++) {
            const side_t *side = &path->end[k].side;
            bars_ranks(ranks[k], NULL, side->ask, side->layout, replica_of(side, path->q),
                       x[k]->owner);
        }
        svg_say(f, "text strong", 0, y + 12,
                "positions %lld..%lld: rank %s, row %lld \xe2\x86\x92 rank %s, row %lld",
                (long long)pos, (long long)(pos + count - 1), ranks[0],
                (long long)(x[0]->local + pos - x[0]->pos), ranks[1],
                (long long)(x[1]->local + pos - x[1]->pos));
        y += SVG_LINE;
    }
    return bars_left_out(f, y, n - LINES_MAX, "parts");
}

/* The axis of context rank @i of one end, at @y, and ribbons to the sequence, whose edge is at
 * @sequence_y. @ribbons: only these, which lie below all bars. */
static void draw_rank(FILE *f, const path_t *path, int k, int64_t i, bool ribbons,
                      double sequence_y, double y)
{
    const end_t *e = &path->end[k];
    const side_t *side = &e->side;
    char ranks[48];
    int64_t rank;
    bars_ranks(ranks, &rank, side->ask, side->layout, replica_of(side, path->q), e->owner[i]);
    if (!ribbons) {
        svg_say(f, "text", 0, y + 12, "%s rank %s: its %lld rows", k ? "destination" : "source",
                ranks, (long long)e->length[i]);
        bars_track(f, bars_span(1, 0, 1), y + 17);
    }
    for (int64_t j = 0; j < e->n; j++) {
        const piece_t *x = &e->piece[j];
        const bars_span_t row = bars_span(e->length[i], x->local, x->count);
        const bars_span_t of = bars_span(side->packing->seq_len[path->q], x->pos, x->count);
        const int64_t hue = x->owner < 0 ? EVERY : rank;
        if (x->owner != e->owner[i])
            continue;
        if (!ribbons)
            draw_piece(f, side, path->q, x->owner, row, y + 17, false);
        else if (k)
            bars_ribbon(f, hue, of, sequence_y, row, y + 17);
        else
            bars_ribbon(f, hue, row, y + 17 + BAR, of, sequence_y);
    }
    for (int64_t j = 1; j < side->sp && !ribbons; j++) /* of sequence parallelism */
        bars_cut(f, e->length[i], j * (e->length[i] / side->sp), y + 17);
}

static int draw_path(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    path_t path = {.q = ask->item};
    for (int k = 0; k < 2; k++)
        find_end(&path.end[k], ask, k, path.q);
    const int64_t length = ask->batch->length[path.q];
    const double y = 36 + (double)path.end[0].nranks * ROW + 17;
    svg_say(f, "head2", 0, 14, "Path of sequence %lld", (long long)path.q);
    svg_say(f, "text", 0, 31,
            length ? "Source ranks, its positions, destination ranks."
                   : "It has no positions: nothing moves.");
    for (int i = 0; i < 4; i++) /* ribbons of both ends, then their bars */
        for (int64_t k = 0; k < path.end[i % 2].nranks; k++)
            draw_rank(f, &path, i % 2, k, i < 2, i % 2 ? y + PAIR : y,
                      (i % 2 ? y + PAIR + 6 : 36) + (double)k * ROW);
    svg_say(f, "text", 0, y - 5, "sequence %lld: %lld positions", (long long)path.q,
            (long long)length);
    draw_pair(f, ask, path.q, length, y);
    return (int)list_parts(f, &path, y + PAIR + 6 + (double)path.end[1].nranks * ROW) + 17;
}

void plan_packing_panels(svg_page_t *page, const plan_ask_t *ask)
{
    svg_add_panel(page, draw_cuts, ask);
    if (ask->item >= 0)
        svg_add_panel(page, draw_path, ask);
}
