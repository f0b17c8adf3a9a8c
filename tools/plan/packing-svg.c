/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packing-svg.c - the panels of a packed batch: how both sides cut each sequence, and the path of
 * one.
 *
 * Pieces are those of docs/concepts/ragged.md, found again from the tables (bars.c). A box has the
 * colour of the first rank that holds it, so what has one colour on both sides stays where it is.
 * What is drawn is bounded; the panels say what they leave out.
 */
#include "bars.h"

enum { ROW = 44, PAIR = 2 * BAR + 2 }; /* heights of a rank's bar, of both cuts */
enum { LANES = 3, LANE = 6 };          /* of halos, which overlap */

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
    const int64_t length = side->packing.seq_len[q];
    bars_track(f, bars_span(axis, 0, bars_room(side, q)), y);
    for (int64_t k = 0, pos = 0; k < n; k++) {
        const bars_piece_t x = bars_piece(side, q, k, pos);
        const int64_t real = bars_at_most(x.count, length > pos ? length - pos : 0);
        if (real > 0)
            draw_piece(f, side, q, x.owner, bars_span(axis, pos, real), y, false);
        if (x.count > real) /* padding */
            draw_piece(f, side, q, x.owner, bars_span(axis, pos + real, x.count - real), y, true);
        pos += x.count;
    }
}

static double halos_height(const plan_ask_t *ask)
{
    return ask->batch->side[1].halo_before > 0 ? LANES * LANE : 0;
}

/* How many of the positions in front of @x it brings. */
static int64_t front_of(const bars_path_t *path, const bars_piece_t *x)
{
    return x->begins && x->pos < path->side.packing.seq_len[path->q]
               ? bars_at_most(path->side.packing.halo_before, x->pos)
               : 0;
}

/* The positions in front of each piece, below the destination's bar. */
static void draw_halos(FILE *f, const plan_ask_t *ask, int64_t q, int64_t axis, double y)
{
    bars_path_t path = {.side = bars_side(ask, 1), .q = q};
    int64_t rank;
    char ranks[48];
    if (path.side.packing.halo_before == 0 || !bars_find_path(&path))
        return;
    for (int64_t i = 0, lane = 0; i < path.n; i++) {
        const bars_piece_t *x = &path.piece[i];
        const int64_t front = front_of(&path, x);
        if (front == 0)
            continue;
        bars_ranks(ranks, &rank, &path.side, q, x->owner);
        bars_box(f, rank, false, bars_span(axis, x->pos - front, front),
                 y + (double)(lane++ % LANES * LANE), LANE - 1, "%s", "");
    }
}

static void draw_pair(FILE *f, const plan_ask_t *ask, int64_t q, int64_t axis, double y)
{
    for (int k = 0; k < 2; k++) {
        const bars_side_t side = bars_side(ask, k);
        draw_cut(f, &side, q, axis, y + k * (PAIR - BAR));
    }
    draw_halos(f, ask, q, axis, y + PAIR + 2);
}

/* The longest of both sides, of @n sequences. */
static int64_t longest_room(const plan_ask_t *ask, int64_t first, int64_t n)
{
    int64_t most = 0;
    for (int k = 0; k < 2; k++) {
        const bars_side_t side = bars_side(ask, k);
        for (int64_t q = first; q < first + n; q++)
            most = bars_room(&side, q) > most ? bars_room(&side, q) : most;
    }
    return most;
}

/* ---- both cuts ---- */

static int draw_cuts(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const plan_batch_t *b = ask->batch;
    const bars_side_t src = bars_side(ask, 0), dst = bars_side(ask, 1);
    const int64_t n = bars_at_most(b->count, BARS_MAX), axis = longest_room(ask, 0, n);
    const int64_t halo = b->side[1].halo_before;
    char line[500], from[48] = "", below[160] = "";
    double y;
    svg_say(f, "head2", 0, 14, "Both cuts of the packed sequences");
    if (halo)
        snprintf(below, sizeof below,
                 " The strips below are the %lld rows in front of each piece, in the colour of the "
                 "rank that gets them.",
                 (long long)halo);
    snprintf(line, sizeof line,
             "Above the source's (%s), below the destination's (%s), with the ranks that hold each "
             "piece. Positions of one colour in both stay.%s%s",
             plan_batch_cut(b, 0), plan_batch_cut(b, 1),
             b->side[0].seq_room || b->side[1].seq_room ? " Padding is pale." : "", below);
    y = svg_lines(f, line, "text", SVG_COLUMNS, 15) + SVG_LINE;
    y = y > TOP ? y : TOP;
    for (int64_t q = 0; q < n; q++, y += PAIR + 28 + halos_height(ask)) {
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
    (void)bars_find_path(&end); /* without memory there is nothing to draw */
    return end;
}

/* Positions of a piece that are no padding. */
static int64_t real_of(const bars_path_t *path, const bars_piece_t *x)
{
    const int64_t left = path->side.packing.seq_len[path->q] - x->pos;
    return bars_at_most(x->count, left > 0 ? left : 0);
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
        end = bars_at_most(end, piece[k]->pos + real_of(&path[k], piece[k]));
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
                (long long)(x[0]->row + pos - x[0]->pos), ranks[1],
                (long long)(x[1]->row + pos - x[1]->pos));
        y += SVG_LINE;
    }
    return bars_left_out(f, y, n - LINES_MAX, "parts");
}

/* The axis of context rank @i of one end, at @y, and ribbons to the sequence, whose edge is at
 * @sequence_y and whose bar has @axis positions. @ribbons: only these, which lie below all bars. */
static void draw_rank(FILE *f, const bars_path_t *e, int64_t axis, int k, int64_t i, bool ribbons,
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
        const int64_t real = real_of(e, x), front = front_of(e, x);
        const bars_span_t row = bars_span(e->length[i], x->row, real);
        const bars_span_t of = bars_span(axis, x->pos, real);
        const int64_t hue = x->owner < 0 ? BARS_ALL : rank;
        if (!ribbons && front > 0)
            bars_box(f, hue, true, bars_span(e->length[i], x->row - front, front), y + 17, BAR,
                     "%s", "");
        if (real == 0)
            continue;
        if (!ribbons)
            draw_piece(f, side, e->q, x->owner, row, y + 17, false);
        else if (k)
            bars_ribbon(f, hue, of, sequence_y, row, y + 17);
        else
            bars_ribbon(f, hue, row, y + 17 + BAR, of, sequence_y);
    }
    for (int64_t j = 1; j < side->sp && !ribbons && side->packing.halo_before == 0; j++)
        bars_cut(f, e->length[i], j * (e->length[i] / side->sp), y + 17);
}

static int draw_path(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const bars_path_t path[2] = {end_of(ask, 0), end_of(ask, 1)};
    const int64_t length = ask->batch->length[ask->item];
    const int64_t axis = longest_room(ask, ask->item, 1);
    const double y = 36 + (double)path[0].nranks * ROW + 17;
    const double below = y + PAIR + halos_height(ask) + 6;
    svg_say(f, "head2", 0, 14, "Path of sequence %lld", (long long)ask->item);
    svg_say(f, "text", 0, 31,
            length ? "Source ranks, its positions, destination ranks."
                   : "It has no positions: nothing moves.");
    for (int i = 0; i < 4; i++) /* ribbons of both ends, then their bars */
        for (int64_t k = 0; k < path[i % 2].nranks; k++)
            draw_rank(f, &path[i % 2], axis, i % 2, k, i < 2, i % 2 ? y + PAIR : y,
                      (i % 2 ? below : 36) + (double)k * ROW);
    svg_say(f, "text", 0, y - 5, "sequence %lld: %lld positions", (long long)ask->item,
            (long long)length);
    draw_pair(f, ask, ask->item, axis, y);
    return (int)list_parts(f, path, below + (double)path[1].nranks * ROW) + 17;
}

void plan_packing_panels(svg_page_t *page, const plan_ask_t *ask)
{
    svg_add_panel(page, draw_cuts, ask);
    if (ask->item >= 0)
        svg_add_panel(page, draw_path, ask);
}
