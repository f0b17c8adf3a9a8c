/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments-svg.c - the panels of a ragged batch: rows of each source replica, packed sequences with
 * the owner of each chunk, and the path of one segment.
 *
 * A segment has the colour of its source replica everywhere. Owners are those of docs/concepts/ragged.md:
 * a sequence has 2C chunks (zigzag), chunk j belongs to context rank min(j, 2C - 1 - j). What is
 * drawn is bounded; the panels say what they leave out.
 */
#include "bars.h"

/* ---- positions ---- */

/* The number of row 0 of segment @e in row_pos. */
static int64_t first_of(const colo_segments_t *t, int64_t e)
{
    int64_t n = 0;
    for (int64_t i = 0; t->row_pos && i < e; i++)
        n += t->rows[i];
    return n;
}

/* Rows of segment @e from @r on that follow each other in the sequence and lie in one piece of it.
 * @first: see first_of(). */
static bars_piece_t part_at(const bars_side_t *side, int64_t e, int64_t first, int64_t r)
{
    const colo_segments_t *t = &side->ask->batch->tables;
    const int64_t pos = t->row_pos ? t->row_pos[first + r] : t->pos[e] + r;
    bars_piece_t p = bars_piece(side, t->seq[e], 0, 0);
    while (p.pos + p.count <= pos)
        p = bars_piece(side, t->seq[e], p.number + 1, p.pos + p.count);
    const int64_t most = bars_at_most(p.pos + p.count - pos, t->rows[e] - r);
    p.row = r;
    p.pos = pos;
    p.count = t->row_pos ? 1 : most;
    while (p.count < most && t->row_pos[first + r + p.count] == pos + p.count)
        p.count++;
    return p;
}

/* ---- rows of each source replica ---- */

static void draw_rows(FILE *f, const plan_batch_t *b, int64_t e, bool faded, bars_span_t at,
                      double y, double height)
{
    bars_box(f, b->tables.src_dp[e], faded, at, y, height, "e%lld", (long long)e);
}

static void draw_replica(FILE *f, const plan_ask_t *ask, int64_t d, int64_t axis, double y)
{
    const plan_batch_t *b = ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t *load[2] = {b->loads.load[0], b->loads.load[1]};
    int64_t offset[2] = {0, 0}, parts = 1;
    svg_say(f, "text", 0, y + 12, "replica %lld: %lld rows; after colo_segments_balance() %lld",
            (long long)d, (long long)load[0][d], (long long)load[1][d]);
    for (int64_t e = 0, n = 0; e < t->count && n < RECTS_MAX; e++)
        for (int i = 0; i < 2; i++)
            if (t->rows[e] > 0 && (i ? b->assign : t->src_dp)[e] == d) {
                draw_rows(f, b, e, false, bars_span(axis, offset[i], t->rows[e]),
                          y + (i ? 20 + BAR : 17), i ? 7 : BAR);
                offset[i] += t->rows[e];
                n++;
            }
    for (int i = 0; i < ask->src.nsplits[COLO_AXIS_ROWS]; i++)
        parts *= ask->src.grid.extent[ask->src.split[COLO_AXIS_ROWS][i].dim];
    for (int64_t j = 1; j < parts && parts <= 64; j++)
        bars_cut(f, axis, j * (load[0][d] / parts) + j * (load[0][d] % parts) / parts, y + 17);
}

static int draw_source(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const plan_batch_t *b = ask->batch;
    const plan_loads_t *l = &b->loads;
    char line[200];
    svg_say(f, "head2", 0, 14, "Encoder: rows of each source replica");
    snprintf(line, sizeof line,
             "The busiest has %.2f times the mean, %.2f after colo_segments_balance() (thin bars), "
             "which "
             "moves %lld of %lld segments.",
             b->rows ? (double)l->most[0] / l->mean : 1, b->rows ? (double)l->most[1] / l->mean : 1,
             (long long)l->moved, (long long)b->tables.count);
    svg_lines(f, line, "text", SVG_COLUMNS, 15);
    const int64_t n = bars_at_most(b->replicas, BARS_MAX);
    double y = TOP;
    for (int64_t d = 0; d < n; d++, y += 52)
        draw_replica(f, ask, d, l->most[l->most[1] > l->most[0]], y);
    return (int)bars_left_out(f, y, b->replicas - n, "replicas");
}

/* ---- packed sequences ---- */

/* The bar of sequence @q and its owners; all segments but @only are faded, unless it is -1. */
static void draw_sequence(FILE *f, const bars_side_t *side, int64_t q, int64_t only, int64_t axis,
                          double y)
{
    const plan_batch_t *b = side->ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t length = t->seq_len[q], pieces = length ? bars_pieces(side, q) : 0;
    bars_side_t all = *side; /* one piece for each sequence */
    char name[48];
    all.packing.split = COLO_PACKING_WHOLE;
    bars_track(f, bars_span(axis, 0, length), y);
    for (int64_t e = 0, first = 0, n = 0; e < t->count; first += t->rows[e++])
        for (int64_t r = 0; t->seq[e] == q && r < t->rows[e] && n < RECTS_MAX; n++) {
            const bars_piece_t p = part_at(&all, e, first, r);
            draw_rows(f, b, e, only >= 0 && only != e, bars_span(axis, p.pos, p.count), y, BAR);
            r += p.count;
        }
    for (int64_t k = 0, pos = 0; k < pieces && pieces <= 128; k++) {
        const bars_piece_t x = bars_piece(side, q, k, pos);
        bars_owner(f, .06 + .2 * (double)(x.owner + 1) / (double)side->cp,
                   bars_span(axis, pos, x.count), y + BAR + 2,
                   bars_ranks(name, NULL, side, q, x.owner));
        if (k > 0)
            bars_cut(f, axis, pos, y);
        pos += x.count;
    }
}

static int draw_sequences(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const bars_side_t side = bars_side(ask, 1);
    const colo_segments_t *t = &ask->batch->tables;
    const int64_t n = bars_at_most(t->nseqs, BARS_MAX), axis = bars_longest(t->seq_len, n);
    char line[200];
    double y = TOP;
    svg_say(f, "head2", 0, 14, "LLM: packed sequences");
    snprintf(line, sizeof line,
             "Segments have the colour of their encoder replica. The grey boxes are the chunks and "
             "the ranks that own them%s.",
             side.cp > 1 ? ", zigzag" : "");
    svg_lines(f, line, "text", SVG_COLUMNS, 15);
    for (int64_t q = 0; q < n; q++, y += 58) {
        svg_say(f, "text", 0, y + 12, "sequence %lld: %lld positions, on LLM replica %lld",
                (long long)q, (long long)t->seq_len[q], (long long)t->seq_dp[q]);
        draw_sequence(f, &side, q, -1, axis, y + 17);
    }
    return (int)bars_left_out(f, y, t->nseqs - n, "sequences");
}

/* ---- the path of one segment ---- */

/* The parts of the segment. If each context rank gets all rows, none of them owns a part. */
static bars_path_t path_of(const plan_ask_t *ask)
{
    const colo_segments_t *t = &ask->batch->tables;
    bars_path_t path = {.side = bars_side(ask, 1), .q = t->seq[ask->item]};
    const int64_t first = first_of(t, ask->item);
    for (int64_t r = 0; r < t->rows[ask->item];) {
        bars_piece_t p = part_at(&path.side, ask->item, first, r);
        if (ask->config.output == COLO_OUTPUT_FULL_SEQ)
            p.owner = BARS_ALL;
        bars_add(&path, p);
        r += p.count;
    }
    return path;
}

/* Of context rank number @k of the path. */
static double draw_rank(FILE *f, const bars_path_t *path, int64_t k, double sequence_y, double y)
{
    const plan_ask_t *ask = path->side.ask;
    const colo_segments_t *t = &ask->batch->tables;
    const int64_t owner = path->owner[k], axis = path->length[k], sp = path->side.sp;
    char ranks[48];
    bars_track(f, bars_span(1, 0, 1), y + 17);
    for (int64_t i = 0; i < path->n; i++) {
        const bars_piece_t *p = &path->piece[i];
        if (p->owner != owner)
            continue;
        const bars_span_t to = bars_span(axis, bars_row(path, owner, p->pos), p->count);
        bars_ribbon(f, t->src_dp[ask->item], bars_span(t->seq_len[path->q], p->pos, p->count),
                    sequence_y, to, y + 17);
        draw_rows(f, ask->batch, ask->item, false, to, y + 17, BAR);
    }
    for (int64_t j = 1; j < sp && owner >= 0; j++)
        bars_cut(f, axis, j * (axis / sp), y + 17);
    if (owner < 0)
        svg_say(f, "text", 0, y + 12, "each rank of LLM replica %lld: its axis of %lld positions",
                (long long)t->seq_dp[path->q], (long long)axis);
    else
        svg_say(f, "text", 0, y + 12, "%s %s: %s axis of %lld positions", sp > 1 ? "ranks" : "rank",
                bars_ranks(ranks, NULL, &path->side, path->q, owner), sp > 1 ? "their" : "its",
                (long long)axis);
    return y + 60;
}

/* Returns the y below. */
static double list_parts(FILE *f, const bars_path_t *path, double y)
{
    const int64_t listed = bars_at_most(path->n, LINES_MAX);
    char ranks[48], one[40];
    for (int64_t i = 0; i < listed; i++, y += SVG_LINE) {
        const bars_piece_t *p = &path->piece[i];
        const int64_t index = bars_row(path, p->owner, p->pos);
        snprintf(one, sizeof one, p->count > 1 ? "rows %lld..%lld" : "row %lld", (long long)p->row,
                 (long long)(p->row + p->count - 1));
        if (p->owner < 0)
            svg_say(f, "text strong", 0, y + 12, "%s: from position %lld, index %lld", one,
                    (long long)p->pos, (long long)index);
        else
            svg_say(f, "text strong", 0, y + 12,
                    "%s: position %lld, chunk %lld, rank %s, index %lld", one, (long long)p->pos,
                    (long long)p->number, bars_ranks(ranks, NULL, &path->side, path->q, p->owner),
                    (long long)index);
    }
    return bars_left_out(f, y, path->n - listed + path->more, "parts");
}

static int draw_path(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const bars_path_t path = path_of(ask);
    const plan_batch_t *b = ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t d = t->src_dp[ask->item], load = b->loads.load[0][d], length = t->seq_len[path.q];
    const double source_y = 62, sequence_y = 62 + BAR + 46;
    int64_t offset = 0;
    svg_say(f, "head2", 0, 14, "Path of segment %lld", (long long)ask->item);
    if (t->rows[ask->item] == 0)
        svg_say(f, "text", 0, 31, "It has no rows: nothing moves.");
    else
        svg_say(f, "text", 0, 31, "Its %lld rows in %lld parts, from top to bottom.",
                (long long)t->rows[ask->item], (long long)(path.n + path.more));
    svg_say(f, "text", 0, source_y - 5, "encoder replica %lld: its %lld rows", (long long)d,
            (long long)load);
    for (int64_t e = 0, n = 0; e < t->count && n < RECTS_MAX; e++)
        if (t->src_dp[e] == d && t->rows[e] > 0) {
            draw_rows(f, b, e, e != ask->item, bars_span(load, offset, t->rows[e]), source_y, BAR);
            for (int64_t i = 0; e == ask->item && i < path.n; i++)
                bars_ribbon(f, d, bars_span(load, offset + path.piece[i].row, path.piece[i].count),
                            source_y + BAR,
                            bars_span(length, path.piece[i].pos, path.piece[i].count), sequence_y);
            offset += t->rows[e];
            n++;
        }
    draw_sequence(f, &path.side, path.q, ask->item, length, sequence_y);
    svg_say(f, "text", 0, sequence_y - 5, "sequence %lld: %lld positions", (long long)path.q,
            (long long)length);
    double y = sequence_y + BAR + STRIP + 16;
    for (int64_t k = 0; k < path.nranks; k++)
        y = draw_rank(f, &path, k, sequence_y + BAR + STRIP + 2, y);
    return (int)list_parts(f, &path, y - 12) + 6;
}

/* ---- all of them ---- */

void plan_segments_panels(svg_page_t *page, const plan_ask_t *ask)
{
    svg_add_panel(page, draw_source, ask);
    svg_add_panel(page, draw_sequences, ask);
    if (ask->item >= 0)
        svg_add_panel(page, draw_path, ask);
}
