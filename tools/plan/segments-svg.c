/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments-svg.c - the panels of a ragged batch: rows of each source replica, packed sequences with
 * the owner of each chunk, and the path of one segment.
 *
 * A segment has the colour of its source replica everywhere. Owners are those of docs/ragged.md:
 * a sequence has 2C chunks (zigzag), chunk j belongs to context rank min(j, 2C - 1 - j). What is
 * drawn is bounded; the panels say what they leave out.
 */
#include "plan-tool.h"

#include <stdlib.h>
#include <string.h>

enum {
    BARS_MAX = 12,    /* replicas, sequences, context ranks of a panel */
    RECTS_MAX = 2000, /* segments of a bar */
    PARTS_MAX = 64,   /* of the segment whose path is drawn */
    LINES_MAX = 12,   /* that list them */
    NAMED_RANKS = 4,  /* of a context rank */
    BAR = 18,         /* height */
    TOP = 72,         /* of what is below a caption */
    STRIP = 14        /* height of the owners below a sequence */
};

const char plan_segments_style[] =
    ".seg{fill:hsl(var(--h) 60% var(--l));stroke:var(--bg);stroke-width:.7}"
    ".faded{opacity:.28}.ribbon{fill:hsl(var(--h) 60% var(--l));opacity:.25}\n"
    "svg .name{fill:var(--bg);font-size:11px;text-anchor:middle}"
    "svg .owner{font-size:10px;text-anchor:middle}\n"
    ".chunk{fill:var(--fg);stroke:var(--bg)}.cut{stroke:var(--fg);stroke-width:1.2}\n";

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

/* "0,1" or, if there are many, "cp 3": the ranks of a replica that own what context rank @cp owns.
 */
static const char *ranks_of(char out[48], const cuts_t *c, int64_t dp, int64_t cp)
{
    const colo_layout_t *l = &c->ask->dst;
    int named = 0;
    size_t n = 0;
    for (int64_t r = c->ask->first; c->ask->world <= PLAN_PART_MAX && r < c->ask->world; r++) {
        int64_t x[COLO_MAX_DIMS];
        const int32_t d = colo_grid_dim(&l->grid, "dp"), k = colo_grid_dim(&l->grid, "cp");
        if (!colo_layout_holds(l, r) || colo_grid_coords(&l->grid, r, x) != COLO_OK ||
            (d >= 0 && x[d] != dp) || (k >= 0 && x[k] != cp))
            continue;
        if (named++ < NAMED_RANKS)
            n += (size_t)snprintf(out + n, 48 - n, "%s%lld", n ? "," : "", (long long)r);
    }
    if (named == 0 || named > NAMED_RANKS)
        snprintf(out, 48, "cp %lld", (long long)cp);
    return out;
}

/* ---- bars ---- */

typedef struct scale {
    double x, per; /* of index 0; of one */
} scale_t;

static scale_t scale(int64_t length)
{
    return (scale_t){0, length > 0 ? (double)SVG_PANEL / (double)length : 0};
}

static void text(FILE *f, const char *class, double x, double y, const char *s)
{
    fprintf(f, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\">", class, x, y);
    svg_text(f, s);
    fputs("</text>\n", f);
}

static void track(FILE *f, scale_t s, int64_t length, double y, double height)
{
    fprintf(f, "<rect class=\"track\" x=\"0\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n", y,
            (double)length * s.per, height);
}

static void cut(FILE *f, scale_t s, int64_t offset, double y, double height)
{
    const double x = (double)offset * s.per;
    fprintf(f, "<line class=\"cut\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x, y - 2,
            x, y + height + 2);
}

/* @n rows of segment @e from index @offset on. */
static void rows(FILE *f, const plan_segments_t *b, scale_t s, int64_t e, int64_t offset, int64_t n,
                 double y, double height, bool faded)
{
    char name[24];
    const double x = (double)offset * s.per, width = (double)n * s.per;
    fprintf(f, "<rect class=\"seg h%d%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n",
            (int)(b->tables.src_dp[e] % 6), faded ? " faded" : "", x, y, width, height);
    const int len = snprintf(name, sizeof name, "e%lld", (long long)e);
    if (height >= BAR && width > 7 * len + 2)
        text(f, "name", x + width / 2, y + height - 5, name);
}

static int64_t at_most(int64_t n, int64_t most)
{
    return n < most ? n : most;
}

static double left_out(FILE *f, double y, int64_t n, const char *what)
{
    char line[80];
    if (n <= 0)
        return y;
    snprintf(line, sizeof line, "%lld more %s are not drawn.", (long long)n, what);
    text(f, "text", 0, y + 12, line);
    return y + SVG_LINE;
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

static int source_height(const plan_segments_t *b)
{
    const int64_t n = at_most(b->replicas, BARS_MAX);
    return (int)(TOP + n * 52 + (b->replicas > n ? SVG_LINE : 0));
}

static void draw_replica(FILE *f, const plan_ask_t *ask, int64_t d, scale_t s, double y)
{
    const plan_segments_t *b = ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t *load[2] = {b->loads.load[0], b->loads.load[1]};
    int64_t offset[2] = {0, 0}, parts = 1;
    char line[120];
    snprintf(line, sizeof line, "replica %lld: %lld rows; after colo_balance() %lld", (long long)d,
             (long long)load[0][d], (long long)load[1][d]);
    text(f, "text", 0, y + 12, line);
    for (int64_t e = 0, n = 0; e < t->count && n < RECTS_MAX; e++)
        for (int i = 0; i < 2; i++)
            if (t->rows[e] > 0 && (i ? b->assign : t->src_dp)[e] == d) {
                rows(f, b, s, e, offset[i], t->rows[e], y + (i ? 20 + BAR : 17), i ? 7 : BAR,
                     false);
                offset[i] += t->rows[e];
                n++;
            }
    for (int i = 0; i < ask->src.nsplits[COLO_ROWS]; i++)
        parts *= ask->src.grid.extent[ask->src.split[COLO_ROWS][i].dim];
    for (int64_t j = 1; j < parts && parts <= 64; j++)
        cut(f, s, j * (load[0][d] / parts) + j * (load[0][d] % parts) / parts, y + 17, BAR);
}

static void draw_source(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const plan_segments_t *b = ask->batch;
    const plan_loads_t *l = &b->loads;
    char line[200];
    text(f, "head2", 0, 14, "Encoder: rows of each source replica");
    snprintf(line, sizeof line,
             "The busiest has %.2f times the mean, %.2f after colo_balance() (thin bars), which "
             "moves %lld of %lld segments.",
             b->rows ? (double)l->most[0] / l->mean : 1, b->rows ? (double)l->most[1] / l->mean : 1,
             (long long)l->moved, (long long)b->tables.count);
    svg_lines(f, line, "text", SVG_COLUMNS, 15);
    const int64_t n = at_most(b->replicas, BARS_MAX);
    const scale_t s = scale(l->most[l->most[1] > l->most[0]]);
    double y = TOP;
    for (int64_t d = 0; d < n; d++, y += 52)
        draw_replica(f, ask, d, s, y);
    left_out(f, y, b->replicas - n, "replicas");
}

/* ---- packed sequences ---- */

static int sequences_height(const plan_segments_t *b)
{
    const int64_t n = at_most(b->tables.nseqs, BARS_MAX);
    return (int)(TOP + n * 58 + (b->tables.nseqs > n ? SVG_LINE : 0));
}

/* The bar of sequence @q and its owners; all segments but @only are faded, unless it is -1. */
static void draw_sequence(FILE *f, const cuts_t *c, int64_t q, int64_t only, scale_t s, double y)
{
    const plan_segments_t *b = c->ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t length = t->seq_len[q], chunk = length / c->chunks;
    char name[48];
    track(f, s, length, y, BAR);
    for (int64_t e = 0, first = 0, n = 0; e < t->count; first += t->rows[e++])
        for (int64_t r = 0; t->seq[e] == q && r < t->rows[e] && n < RECTS_MAX; n++) {
            part_t p = part_at(t, 1, e, first, r);
            rows(f, b, s, e, p.pos, p.count, y, BAR, only >= 0 && only != e);
            r += p.count;
        }
    for (int64_t j = 0; j < c->chunks && c->chunks <= 128 && chunk > 0; j++) {
        const double x = (double)(j * chunk) * s.per, width = (double)chunk * s.per;
        const double shade = .06 + .2 * (double)(owner(c, j) + 1) / (double)c->cp;
        fprintf(f,
                "<rect class=\"chunk\" fill-opacity=\"%.2f\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" "
                "height=\"%d\"/>\n",
                shade, x, y + BAR + 2, width, STRIP);
        if (j > 0)
            cut(f, s, j * chunk, y, BAR);
        ranks_of(name, c, t->seq_dp[q], owner(c, j));
        if (width > 6 * (double)strlen(name) + 2)
            text(f, "owner", x + width / 2, y + BAR + 2 + STRIP - 4, name);
    }
}

static int64_t longest(const colo_segments_t *t, int64_t n)
{
    int64_t most = 0;
    for (int64_t q = 0; q < n; q++)
        most = t->seq_len[q] > most ? t->seq_len[q] : most;
    return most;
}

static void draw_sequences(FILE *f, const void *what)
{
    const plan_ask_t *ask = what;
    const cuts_t c = cuts_of(ask);
    const colo_segments_t *t = &ask->batch->tables;
    const int64_t n = at_most(t->nseqs, BARS_MAX);
    const scale_t s = scale(longest(t, n));
    char line[200];
    double y = TOP;
    text(f, "head2", 0, 14, "LLM: packed sequences");
    snprintf(line, sizeof line,
             "Segments have the colour of their encoder replica. The grey boxes are the chunks and "
             "the ranks that own them%s.",
             c.chunks > c.cp ? ", zigzag" : "");
    svg_lines(f, line, "text", SVG_COLUMNS, 15);
    for (int64_t q = 0; q < n; q++, y += 58) {
        snprintf(line, sizeof line, "sequence %lld: %lld positions, on LLM replica %lld",
                 (long long)q, (long long)t->seq_len[q], (long long)t->seq_dp[q]);
        text(f, "text", 0, y + 12, line);
        draw_sequence(f, &c, q, -1, s, y + 17);
    }
    left_out(f, y, t->nseqs - n, "sequences");
}

/* ---- the path of one segment ---- */

typedef struct pass {
    cuts_t c;
    int64_t e, q, d; /* the segment, its sequence, its LLM replica */
    bool full;
    int64_t n, more; /* parts; those that are not drawn */
    part_t part[PARTS_MAX];
    int64_t nranks, cp[BARS_MAX]; /* context ranks that get some */
    int64_t axis;                 /* length of theirs */
} path_t;

static void find_path(path_t *w, const plan_ask_t *ask)
{
    const colo_segments_t *t = &ask->batch->tables;
    *w = (path_t){.c = cuts_of(ask), .e = ask->segment, .q = t->seq[ask->segment]};
    const int64_t first = first_of(t, w->e);
    w->d = t->seq_dp[w->q];
    w->full = ask->config.output == COLO_FULL_SEQ;
    w->axis = base_of(t, w->d, t->nseqs) / (w->full ? 1 : w->c.cp);
    for (int64_t r = 0; r < t->rows[w->e];) {
        const part_t p = part_at(t, w->c.chunks, w->e, first, r);
        const int64_t cp = w->full ? -1 : owner(&w->c, p.chunk);
        int64_t k = 0;
        while (k < w->nranks && w->cp[k] != cp)
            k++;
        if (w->n == PARTS_MAX || k == BARS_MAX) {
            w->more++;
        } else {
            w->part[w->n++] = p;
            w->cp[k] = cp;
            w->nranks = k == w->nranks ? k + 1 : w->nranks;
        }
        r += p.count;
    }
}

/* Where a part is on the axis of its context rank, or of the replica. */
static int64_t local_of(const path_t *w, const part_t *p)
{
    const colo_segments_t *t = &w->c.ask->batch->tables;
    const int64_t base = base_of(t, w->d, w->q), chunk = t->seq_len[w->q] / w->c.chunks;
    if (w->full)
        return base + p->pos;
    return base / w->c.cp + (p->chunk >= w->c.cp ? chunk : 0) + p->pos % chunk;
}

static int64_t listed(const path_t *w)
{
    return at_most(w->n, LINES_MAX);
}

static int path_height(const path_t *w)
{
    return (int)(168 + w->nranks * 60 + (listed(w) + (w->more + w->n > listed(w))) * SVG_LINE);
}

static void ribbon(FILE *f, int hue, double x0, double w0, double y0, double x1, double w1,
                   double y1)
{
    fprintf(f, "<path class=\"ribbon h%d\" d=\"M%.1f %.1fL%.1f %.1fL%.1f %.1fL%.1f %.1fZ\"/>\n",
            hue, x0, y0, x0 + w0, y0, x1 + w1, y1, x1, y1);
}

static double draw_rank(FILE *f, const path_t *w, int64_t cp, double sequence_y, scale_t from,
                        double y)
{
    const plan_segments_t *b = w->c.ask->batch;
    const scale_t s = scale(w->axis);
    const int hue = (int)(b->tables.src_dp[w->e] % 6);
    char ranks[48], line[160];
    if (cp < 0)
        snprintf(line, sizeof line, "each rank of LLM replica %lld: its axis of %lld positions",
                 (long long)w->d, (long long)w->axis);
    else
        snprintf(line, sizeof line, "%s %s: %s axis of %lld positions",
                 w->c.sp > 1 ? "ranks" : "rank", ranks_of(ranks, &w->c, w->d, cp),
                 w->c.sp > 1 ? "their" : "its", (long long)w->axis);
    track(f, s, w->axis, y + 17, BAR);
    for (int64_t i = 0; i < w->n; i++) {
        const part_t *p = &w->part[i];
        const int64_t offset = local_of(w, p);
        if (cp >= 0 && owner(&w->c, p->chunk) != cp)
            continue;
        ribbon(f, hue, (double)p->pos * from.per, (double)p->count * from.per, sequence_y,
               (double)offset * s.per, (double)p->count * s.per, y + 17);
        rows(f, b, s, w->e, offset, p->count, y + 17, BAR, false);
    }
    for (int64_t j = 1; j < w->c.sp && cp >= 0; j++)
        cut(f, s, j * (w->axis / w->c.sp), y + 17, BAR);
    text(f, "text", 0, y + 12, line);
    return y + 60;
}

static void list_parts(FILE *f, const path_t *w, double y)
{
    char ranks[48], line[200], one[40];
    for (int64_t i = 0; i < listed(w); i++, y += SVG_LINE) {
        const part_t *p = &w->part[i];
        snprintf(one, sizeof one, p->count > 1 ? "rows %lld..%lld" : "row %lld", (long long)p->row,
                 (long long)(p->row + p->count - 1));
        if (w->full)
            snprintf(line, sizeof line, "%s: from position %lld, index %lld", one,
                     (long long)p->pos, (long long)local_of(w, p));
        else
            snprintf(line, sizeof line, "%s: position %lld, chunk %lld, rank %s, index %lld", one,
                     (long long)p->pos, (long long)p->chunk,
                     ranks_of(ranks, &w->c, w->d, owner(&w->c, p->chunk)),
                     (long long)local_of(w, p));
        text(f, "text strong", 0, y + 12, line);
    }
    left_out(f, y, w->n - listed(w) + w->more, "parts");
}

static void draw_path(FILE *f, const void *what)
{
    path_t w;
    find_path(&w, what);
    const plan_segments_t *b = w.c.ask->batch;
    const colo_segments_t *t = &b->tables;
    const int64_t d = t->src_dp[w.e], load = b->loads.load[0][d];
    const int hue = (int)(d % 6);
    const scale_t axis = scale(load), s = scale(t->seq_len[w.q]);
    const double source_y = 62, sequence_y = 62 + BAR + 46;
    int64_t offset = 0;
    char line[160];
    snprintf(line, sizeof line, "Path of segment %lld", (long long)w.e);
    text(f, "head2", 0, 14, line);
    if (t->rows[w.e] == 0)
        snprintf(line, sizeof line, "It has no rows: nothing moves.");
    else
        snprintf(line, sizeof line, "Its %lld rows in %lld parts, from top to bottom.",
                 (long long)t->rows[w.e], (long long)(w.n + w.more));
    text(f, "text", 0, 31, line);
    snprintf(line, sizeof line, "encoder replica %lld: its %lld rows", (long long)d,
             (long long)load);
    text(f, "text", 0, source_y - 5, line);
    for (int64_t e = 0, n = 0; e < t->count && n < RECTS_MAX; e++)
        if (t->src_dp[e] == d && t->rows[e] > 0) {
            rows(f, b, axis, e, offset, t->rows[e], source_y, BAR, e != w.e);
            for (int64_t i = 0; e == w.e && i < w.n; i++)
                ribbon(f, hue, (double)(offset + w.part[i].row) * axis.per,
                       (double)w.part[i].count * axis.per, source_y + BAR,
                       (double)w.part[i].pos * s.per, (double)w.part[i].count * s.per, sequence_y);
            offset += t->rows[e];
            n++;
        }
    draw_sequence(f, &w.c, w.q, w.e, s, sequence_y);
    snprintf(line, sizeof line, "sequence %lld: %lld positions", (long long)w.q,
             (long long)t->seq_len[w.q]);
    text(f, "text", 0, sequence_y - 5, line);
    double y = sequence_y + BAR + STRIP + 16;
    for (int64_t k = 0; k < w.nranks; k++)
        y = draw_rank(f, &w, w.cp[k], sequence_y + BAR + STRIP + 2, s, y);
    list_parts(f, &w, y - 12);
}

/* ---- all of them ---- */

int plan_segments_panels(svg_panel_t *panel, const plan_ask_t *ask)
{
    static path_t w;
    int n = 0;
    panel[n++] = (svg_panel_t){source_height(ask->batch), draw_source, ask};
    panel[n++] = (svg_panel_t){sequences_height(ask->batch), draw_sequences, ask};
    if (ask->segment >= 0) {
        find_path(&w, ask);
        panel[n++] = (svg_panel_t){path_height(&w), draw_path, ask};
    }
    return n;
}
