/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments-svg.c - the panels of a ragged batch: rows of each source replica, packed sequences with
 * the owner of each chunk, and the path of one segment.
 *
 * A segment has the colour of its source replica everywhere. Owners are those of docs/ragged.md:
 * a sequence has 2C chunks (zigzag), chunk j belongs to context rank min(j, 2C - 1 - j). What is
 * drawn is bounded; the panels say what they leave out.
 */
#include "bars.h"

#include <string.h>

/* How the destination cuts its sequences. */
typedef struct cuts {
    const plan_ask_t *ask;
    int64_t cp, sp, chunks;
} cuts_t;

static cuts_t cuts_of(const plan_ask_t *ask)
{
    const colo_layout_t *l = &ask->dst;
    cuts_t c = {.ask = ask, .cp = 1, .sp = 1, .chunks = 1};
    for (int i = 0; i < l->nsplits[COLO_ROWS]; i++) {
        const colo_split_t *s = &l->split[COLO_ROWS][i];
        const int64_t extent = l->grid.extent[s->dim];
        if (!s->context)
            c.sp *= extent;
        else if (extent > 1) {
            c.cp = extent;
            c.chunks = s->kind == COLO_ZIGZAG ? 2 * extent : extent;
        }
    }
    return c;
}

static int64_t owner(const cuts_t *c, int64_t chunk)
{
    return chunk < c->cp ? chunk : c->chunks - 1 - chunk;
}

/* ---- positions ---- */

/* Rows of a segment that follow each other in the sequence and lie in one chunk. */
typedef struct part {
    int64_t row, pos, count, chunk;
} part_t;

/* The number of row 0 of segment @e in row_pos. */
static int64_t first_of(const colo_segments_t *t, int64_t e)
{
    int64_t n = 0;
    for (int64_t i = 0; t->row_pos && i < e; i++)
        n += t->rows[i];
    return n;
}

/* The part that begins with row @r. @first: see first_of(). */
static part_t part_at(const colo_segments_t *t, int64_t chunks, int64_t e, int64_t first, int64_t r)
{
    const int64_t chunk = t->seq_len[t->seq[e]] / chunks;
    const int64_t pos = t->row_pos ? t->row_pos[first + r] : t->pos[e] + r;
    part_t p = {.row = r, .pos = pos, .chunk = pos / chunk};
    int64_t most = (p.chunk + 1) * chunk - pos;
    most = most < t->rows[e] - r ? most : t->rows[e] - r;
    p.count = t->row_pos ? 1 : most;
    while (p.count < most && t->row_pos[first + r + p.count] == pos + p.count)
        p.count++;
    return p;
}

/* Positions of the sequences of replica @d before sequence @q. */
static int64_t base_of(const colo_segments_t *t, int64_t d, int64_t q)
{
    int64_t n = 0;
    for (int64_t i = 0; i < q; i++)
        n += t->seq_dp[i] == d ? t->seq_len[i] : 0;
    return n;
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
    svg_say(f, "text", 0, y + 12, "replica %lld: %lld rows; after colo_balance() %lld",
            (long long)d, (long long)load[0][d], (long long)load[1][d]);
    for (int64_t e = 0, n = 0; e < t->count && n < RECTS_MAX; e++)
        for (int i = 0; i < 2; i++)
            if (t->rows[e] > 0 && (i ? b->assign : t->src_dp)[e] == d) {
                draw_rows(f, b, e, false, bars_span(axis, offset[i], t->rows[e]),
                          y + (i ? 20 + BAR : 17), i ? 7 : BAR);
                offset[i] += t->rows[e];
                n++;
            }
    for (int i = 0; i < ask->src.nsplits[COLO_ROWS]; i++)
        parts *= ask->src.grid.extent[ask->src.split[COLO_ROWS][i].dim];
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
             "The busiest has %.2f times the mean, %.2f after colo_balance() (thin bars), which "
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
static void draw_sequence(FILE *f, const cuts_t *c, int64_t q, int64_t only, int64_t axis, double y)
{
    const plan_batch_t *b = c->ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t length = t->seq_len[q], chunk = length / c->chunks;
    char name[48];
    bars_track(f, bars_span(axis, 0, length), y);
    for (int64_t e = 0, first = 0, n = 0; e < t->count; first += t->rows[e++])
        for (int64_t r = 0; t->seq[e] == q && r < t->rows[e] && n < RECTS_MAX; n++) {
            part_t p = part_at(t, 1, e, first, r);
            draw_rows(f, b, e, only >= 0 && only != e, bars_span(axis, p.pos, p.count), y, BAR);
            r += p.count;
        }
    for (int64_t j = 0; j < c->chunks && c->chunks <= 128 && chunk > 0; j++) {
        bars_owner(f, .06 + .2 * (double)(owner(c, j) + 1) / (double)c->cp,
                   bars_span(axis, j * chunk, chunk), y + BAR + 2,
                   bars_ranks(name, NULL, c->ask, &c->ask->dst, t->seq_dp[q], owner(c, j)));
        if (j > 0)
            bars_cut(f, axis, j * chunk, y);
    }
}

static int draw_sequences(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const cuts_t c = cuts_of(ask);
    const colo_segments_t *t = &ask->batch->tables;
    const int64_t n = bars_at_most(t->nseqs, BARS_MAX), axis = bars_longest(t->seq_len, n);
    char line[200];
    double y = TOP;
    svg_say(f, "head2", 0, 14, "LLM: packed sequences");
    snprintf(line, sizeof line,
             "Segments have the colour of their encoder replica. The grey boxes are the chunks and "
             "the ranks that own them%s.",
             c.chunks > c.cp ? ", zigzag" : "");
    svg_lines(f, line, "text", SVG_COLUMNS, 15);
    for (int64_t q = 0; q < n; q++, y += 58) {
        svg_say(f, "text", 0, y + 12, "sequence %lld: %lld positions, on LLM replica %lld",
                (long long)q, (long long)t->seq_len[q], (long long)t->seq_dp[q]);
        draw_sequence(f, &c, q, -1, axis, y + 17);
    }
    return (int)bars_left_out(f, y, t->nseqs - n, "sequences");
}

/* ---- the path of one segment ---- */

typedef struct path {
    cuts_t c;
    int64_t e, q, d; /* the segment, its sequence, its LLM replica */
    bool full;
    int64_t n, more; /* parts; those that are not drawn */
    part_t part[PARTS_MAX];
    int64_t nranks, cp[BARS_MAX]; /* context ranks that get some */
    int64_t axis;                 /* length of theirs */
} path_t;

static void find_path(path_t *path, const plan_ask_t *ask)
{
    const colo_segments_t *t = &ask->batch->tables;
    *path = (path_t){.c = cuts_of(ask), .e = ask->item, .q = t->seq[ask->item]};
    const int64_t first = first_of(t, path->e);
    path->d = t->seq_dp[path->q];
    path->full = ask->config.output == COLO_FULL_SEQ;
    path->axis = base_of(t, path->d, t->nseqs) / (path->full ? 1 : path->c.cp);
    for (int64_t r = 0; r < t->rows[path->e];) {
        const part_t p = part_at(t, path->c.chunks, path->e, first, r);
        const int64_t cp = path->full ? -1 : owner(&path->c, p.chunk);
        int64_t k = 0;
        while (k < path->nranks && path->cp[k] != cp)
            k++;
        if (path->n == PARTS_MAX || k == BARS_MAX) {
            path->more++;
        } else {
            path->part[path->n++] = p;
            path->cp[k] = cp;
            path->nranks = k == path->nranks ? k + 1 : path->nranks;
        }
        r += p.count;
    }
}

/* Where a part is on the axis of its context rank, or of the replica. */
static int64_t local_of(const path_t *path, const part_t *p)
{
    const colo_segments_t *t = &path->c.ask->batch->tables;
    const int64_t base = base_of(t, path->d, path->q), chunk = t->seq_len[path->q] / path->c.chunks;
    if (path->full)
        return base + p->pos;
    return base / path->c.cp + (p->chunk >= path->c.cp ? chunk : 0) + p->pos % chunk;
}

static double draw_rank(FILE *f, const path_t *path, int64_t cp, double sequence_y, double y)
{
    const plan_ask_t *ask = path->c.ask;
    const colo_segments_t *t = &ask->batch->tables;
    char ranks[48];
    bars_track(f, bars_span(1, 0, 1), y + 17);
    for (int64_t i = 0; i < path->n; i++) {
        const part_t *p = &path->part[i];
        const bars_span_t to = bars_span(path->axis, local_of(path, p), p->count);
        if (cp >= 0 && owner(&path->c, p->chunk) != cp)
            continue;
        bars_ribbon(f, t->src_dp[path->e], bars_span(t->seq_len[path->q], p->pos, p->count),
                    sequence_y, to, y + 17);
        draw_rows(f, ask->batch, path->e, false, to, y + 17, BAR);
    }
    for (int64_t j = 1; j < path->c.sp && cp >= 0; j++)
        bars_cut(f, path->axis, j * (path->axis / path->c.sp), y + 17);
    if (cp < 0)
        svg_say(f, "text", 0, y + 12, "each rank of LLM replica %lld: its axis of %lld positions",
                (long long)path->d, (long long)path->axis);
    else
        svg_say(f, "text", 0, y + 12, "%s %s: %s axis of %lld positions",
                path->c.sp > 1 ? "ranks" : "rank",
                bars_ranks(ranks, NULL, ask, &ask->dst, path->d, cp),
                path->c.sp > 1 ? "their" : "its", (long long)path->axis);
    return y + 60;
}

/* Returns the y below. */
static double list_parts(FILE *f, const path_t *path, double y)
{
    const int64_t listed = bars_at_most(path->n, LINES_MAX);
    char ranks[48], one[40];
    for (int64_t i = 0; i < listed; i++, y += SVG_LINE) {
        const part_t *p = &path->part[i];
        snprintf(one, sizeof one, p->count > 1 ? "rows %lld..%lld" : "row %lld", (long long)p->row,
                 (long long)(p->row + p->count - 1));
        if (path->full)
            svg_say(f, "text strong", 0, y + 12, "%s: from position %lld, index %lld", one,
                    (long long)p->pos, (long long)local_of(path, p));
        else
            svg_say(f, "text strong", 0, y + 12,
                    "%s: position %lld, chunk %lld, rank %s, index %lld", one, (long long)p->pos,
                    (long long)p->chunk,
                    bars_ranks(ranks, NULL, path->c.ask, &path->c.ask->dst, path->d,
                               owner(&path->c, p->chunk)),
                    (long long)local_of(path, p));
    }
    return bars_left_out(f, y, path->n - listed + path->more, "parts");
}

static int draw_path(FILE *f, const void *what)
{
    path_t path;
    find_path(&path, what);
    const plan_batch_t *b = path.c.ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t d = t->src_dp[path.e], load = b->loads.load[0][d], length = t->seq_len[path.q];
    const double source_y = 62, sequence_y = 62 + BAR + 46;
    int64_t offset = 0;
    svg_say(f, "head2", 0, 14, "Path of segment %lld", (long long)path.e);
    if (t->rows[path.e] == 0)
        svg_say(f, "text", 0, 31, "It has no rows: nothing moves.");
    else
        svg_say(f, "text", 0, 31, "Its %lld rows in %lld parts, from top to bottom.",
                (long long)t->rows[path.e], (long long)(path.n + path.more));
    svg_say(f, "text", 0, source_y - 5, "encoder replica %lld: its %lld rows", (long long)d,
            (long long)load);
    for (int64_t e = 0, n = 0; e < t->count && n < RECTS_MAX; e++)
        if (t->src_dp[e] == d && t->rows[e] > 0) {
            draw_rows(f, b, e, e != path.e, bars_span(load, offset, t->rows[e]), source_y, BAR);
            for (int64_t i = 0; e == path.e && i < path.n; i++)
                bars_ribbon(f, d, bars_span(load, offset + path.part[i].row, path.part[i].count),
                            source_y + BAR, bars_span(length, path.part[i].pos, path.part[i].count),
                            sequence_y);
            offset += t->rows[e];
            n++;
        }
    draw_sequence(f, &path.c, path.q, path.e, length, sequence_y);
    svg_say(f, "text", 0, sequence_y - 5, "sequence %lld: %lld positions", (long long)path.q,
            (long long)length);
    double y = sequence_y + BAR + STRIP + 16;
    for (int64_t k = 0; k < path.nranks; k++)
        y = draw_rank(f, &path, path.cp[k], sequence_y + BAR + STRIP + 2, y);
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
