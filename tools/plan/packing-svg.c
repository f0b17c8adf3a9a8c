/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packing-svg.c - the panels of a packed batch: how both sides cut each sequence, and the path of
 * one.
 *
 * Pieces are those of docs/concepts/ragged.md, found again from the tables (bars.c). A box has the colour of
 * the first rank that holds it, so what has one colour on both sides stays where it is. What is
 * drawn is bounded; the panels say what they leave out.
 */
#include "bars.h"

enum { ROW = 44, PAIR = 2 * BAR + 2 }; /* heights of a rank's bar, of both cuts */

/* A box with its ranks' names. */
static void draw_piece(FILE *f, const bars_side_t *side, int64_t q, int64_t owner, bars_span_t at,
                       double y, bool faded)
{
    char ranks[48];
    int64_t rank;
    bars_ranks(ranks, &rank, side, q, owner);
    bars_box(f, owner < 0 ? BARS_ALL : rank, faded, at, y, BAR, "%s", ranks);
}

static void draw_cut(FILE *f, const bars_side_t *side, int64_t q, int64_t axis, double y)
{
    const int64_t n = bars_at_most(bars_pieces(side, q), RECTS_MAX);
    bars_track(f, bars_span(axis, 0, side->packing.seq_len[q]), y);
    for (int64_t k = 0, pos = 0; k < n; k++) {
        const bars_piece_t x = bars_piece(side, q, k, pos);
        if (x.count > 0)
            draw_piece(f, side, q, x.owner, bars_span(axis, pos, x.count), y, false);
        pos += x.count;
    }
}

static void draw_pair(FILE *f, const plan_ask_t *ask, int64_t q, int64_t axis, double y)
{
    for (int k = 0; k < 2; k++) {
        const bars_side_t side = bars_side(ask, k);
        draw_cut(f, &side, q, axis, y + k * (PAIR - BAR));
    }
}

/* ---- both cuts ---- */

static int draw_cuts(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const plan_batch_t *b = ask->batch;
    const bars_side_t src = bars_side(ask, 0), dst = bars_side(ask, 1);
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
                     (long long)bars_replica(&src, q), (long long)bars_replica(&dst, q));
        svg_say(f, "text", 0, y + 12, "sequence %lld: %lld positions%s", (long long)q,
                (long long)b->length[q], from);
        draw_pair(f, ask, q, axis, y + 17);
    }
    return (int)bars_left_out(f, y, b->count - n, "sequences");
}

/* ---- the path of one sequence ---- */

static bars_path_t end_of(const plan_ask_t *ask, int k)
{
    bars_path_t end = {.side = bars_side(ask, k), .q = ask->item};
    const int64_t n = bars_pieces(&end.side, end.q);
    for (int64_t i = 0, pos = 0; i < n; i++) {
        const bars_piece_t x = bars_piece(&end.side, end.q, i, pos);
        pos += x.count;
        if (x.count > 0)
            bars_add(&end, x);
    }
    return end;
}

/* The part that begins at @pos, of one piece on either side: how long it is, 0 behind the last. */
static int64_t part_at(const bars_path_t path[2], int64_t pos, const bars_piece_t *piece[2])
{
    int64_t end = INT64_MAX;
    for (int k = 0; k < 2; k++) {
        int64_t i = 0;
        while (i < path[k].n && path[k].piece[i].pos + path[k].piece[i].count <= pos)
            i++;
        if (i == path[k].n || path[k].piece[i].pos > pos)
            return 0;
        piece[k] = &path[k].piece[i];
        end = bars_at_most(end, piece[k]->pos + piece[k]->count);
    }
    return end - pos;
}

/* The lines that list the parts; returns the y below. */
static double list_parts(FILE *f, const bars_path_t path[2], double y)
{
    const bars_piece_t *x[2];
    char ranks[2][48];
    int64_t n = 0, pos = 0;
    for (int64_t count; (count = part_at(path, pos, x)) > 0; pos += count) {
        if (n++ >= LINES_MAX)
            continue;
        for (int k = 0; k < 2; k++)
            bars_ranks(ranks[k], NULL, &path[k].side, path[k].q, x[k]->owner);
        svg_say(f, "text strong", 0, y + 12,
                "positions %lld..%lld: rank %s, row %lld \xe2\x86\x92 rank %s, row %lld",
                (long long)pos, (long long)(pos + count - 1), ranks[0],
                (long long)bars_row(&path[0], x[0]->owner, pos), ranks[1],
                (long long)bars_row(&path[1], x[1]->owner, pos));
        y += SVG_LINE;
    }
    return bars_left_out(f, y, n - LINES_MAX, "parts");
}

/* The axis of context rank @i of one end, at @y, and ribbons to the sequence, whose edge is at
 * @sequence_y. @ribbons: only these, which lie below all bars. */
static void draw_rank(FILE *f, const bars_path_t *e, int k, int64_t i, bool ribbons,
                      double sequence_y, double y)
{
    const bars_side_t *side = &e->side;
    char ranks[48];
    int64_t rank;
    bars_ranks(ranks, &rank, side, e->q, e->owner[i]);
    if (!ribbons) {
        svg_say(f, "text", 0, y + 12, "%s rank %s: its %lld rows", k ? "destination" : "source",
                ranks, (long long)e->length[i]);
        bars_track(f, bars_span(1, 0, 1), y + 17);
    }
    for (int64_t j = 0; j < e->n; j++) {
        const bars_piece_t *x = &e->piece[j];
        if (x->owner != e->owner[i])
            continue;
        const bars_span_t row = bars_span(e->length[i], bars_row(e, x->owner, x->pos), x->count);
        const bars_span_t of = bars_span(side->packing.seq_len[e->q], x->pos, x->count);
        const int64_t hue = x->owner < 0 ? BARS_ALL : rank;
        if (!ribbons)
            draw_piece(f, side, e->q, x->owner, row, y + 17, false);
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
    const bars_path_t path[2] = {end_of(ask, 0), end_of(ask, 1)};
    const int64_t length = ask->batch->length[ask->item];
    const double y = 36 + (double)path[0].nranks * ROW + 17;
    svg_say(f, "head2", 0, 14, "Path of sequence %lld", (long long)ask->item);
    svg_say(f, "text", 0, 31,
            length ? "Source ranks, its positions, destination ranks."
                   : "It has no positions: nothing moves.");
    for (int i = 0; i < 4; i++) /* ribbons of both ends, then their bars */
        for (int64_t k = 0; k < path[i % 2].nranks; k++)
            draw_rank(f, &path[i % 2], i % 2, k, i < 2, i % 2 ? y + PAIR : y,
                      (i % 2 ? y + PAIR + 6 : 36) + (double)k * ROW);
    svg_say(f, "text", 0, y - 5, "sequence %lld: %lld positions", (long long)ask->item,
            (long long)length);
    draw_pair(f, ask, ask->item, length, y);
    return (int)list_parts(f, path, y + PAIR + 6 + (double)path[1].nranks * ROW) + 17;
}

void plan_packing_panels(svg_page_t *page, const plan_ask_t *ask)
{
    svg_add_panel(page, draw_cuts, ask);
    if (ask->item >= 0)
        svg_add_panel(page, draw_path, ask);
}
