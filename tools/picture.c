/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture.c - draws what picture-flows.c collected.
 *
 * Every arrow arrives at a port of its own with its bytes written there, so that labels never lie
 * on each other. A row with more than MANY arrivals gets thin arrows and one label for all of them:
 * sixty labels of the same number would only make the picture sixty times taller.
 */
#include "picture.h"

#include <stdlib.h>
#include <string.h>

enum { CELL = 100, PORT = 17, THIN = 5, PAD = 8, GAP = 8, PART_GAP = 20, HEAD = 24, MANY = 6 };

/* "tp 1 cp 0": dims @first and the next of those with extent > 1; returns how many those are */
static int coords_line(const colo_layout_t *l, int64_t rank, int first, char text[64])
{
    int64_t c[COLO_DIMS_MAX];
    int seen = 0;
    size_t used = 0;

    text[0] = 0;
    if (colo_grid_coords(&l->grid, rank, c) < 0)
        return 0;
    for (int32_t d = 0; d < l->grid.ndims; d++) {
        if (l->grid.extent[d] == 1)
            continue;
        if (seen >= first && seen < first + 2)
            used += (size_t)snprintf(text + used, 64 - used, "%s%s %lld", used ? "  " : "",
                                     l->grid.name[d], (long long)c[d]);
        seen++;
    }
    return seen;
}

static int cell_lines(const colo_layout_t *l, const pic_row_t *row)
{
    char text[64];
    int dims = coords_line(l, row->rank, 0, text);
    return (dims > 2 ? (dims + 1) / 2 : 1) + (row->alike > 0);
}

static void put_cell(FILE *f, const colo_layout_t *l, const pic_row_t *row, int x, int y,
                     int height)
{
    char text[64], n[32];
    int lines = cell_lines(l, row), top = (height - 14 * (lines + 1)) / 2 + 11;

    svg_put(f,
            "<g transform='translate(%d %d)'><g class='%s'><rect width='%d' height='%d' rx='6'/>",
            x, y, colo_layout_holds(l, row->rank) ? "cell" : "cell none", CELL, height);
    snprintf(text, sizeof text, "rank %lld", (long long)row->rank);
    svg_fit(f, "rank", CELL / 2, top, 15, 92, text);
    for (int i = 0; i < lines; i++) {
        int dims = coords_line(l, row->rank, 2 * i, text);
        if (row->alike && i + 1 == lines)
            snprintf(text, sizeof text, "and %s like it", svg_count(row->alike, n));
        else if (!colo_grid_has_rank(&l->grid, row->rank))
            snprintf(text, sizeof text, "not in the grid");
        else if (!dims)
            snprintf(text, sizeof text, "alone");
        svg_fit(f, "at", CELL / 2, top + 14 * (i + 1), 15, 92, text);
    }
    fputs("</g></g>\n", f);
}

/* ---- arrows ---- */

typedef struct place {
    int y, height, ins, outs, in, out; /* ports in all and used so far */
    int64_t least, most, sum, times;   /* bytes that arrive from others */
} place_t;

static void put_label(FILE *f, bool own, int x, int y, int dir, const char *text)
{
    svg_put(f, "<text class='label %s' x='%d' y='%d' text-anchor='%s'>%s", own ? "grey" : "strong",
            x - dir * 9, y - 4, dir > 0 ? "end" : "start", text);
}

/* "36 KiB", "3 x 36 KiB", "7: 1.5 MiB in all" */
static void label(char text[64], int64_t times, int64_t least, int64_t most, int64_t sum)
{
    char n[32], b[32];
    if (times == 1)
        svg_bytes((double)most, text);
    else if (least == most)
        snprintf(text, 64, "%s \xc3\x97 %s", svg_count(times, n), svg_bytes((double)most, b));
    else
        snprintf(text, 64, "%s: %s", svg_count(times, n), svg_bytes((double)sum, b));
}

static void put_flow(FILE *f, const pic_t *pic, const pic_flow_t *flow, place_t *place,
                     colo_pass_t pass)
{
    place_t *a = &place[flow->from], *b = &place[flow->to];
    bool own = flow->own, thin = b->ins > MANY && !own;
    int64_t each = flow->times / (pic->row[flow->to].alike + 1); /* into one rank of the row */
    int step_a = a->height / (a->outs + 1), y1 = a->y + step_a * ++a->out;
    int y2 =
        b->y + (b->ins > MANY ? 2 * PORT + THIN * b->in : b->height / (b->ins + 1) * (b->in + 1));
    int x1 = pass == COLO_PASS_FORWARD ? CELL : SVG_PANEL - CELL, x2 = SVG_PANEL - x1,
        mid = SVG_PANEL / 2;
    int dir = pass == COLO_PASS_FORWARD ? 1 : -1;
    long long from = (long long)pic->row[flow->from].rank, to = (long long)pic->row[flow->to].rank;
    char text[64];

    b->in++;
    /* the last stretch is level, with the bytes above it */
    const double width = thin && flow->far ? 1.8 : thin ? .8 : flow->far ? 3.4 : 1.6;
    if (own)
        svg_put(f, "<g class='own' stroke-width='%.1f'>", width);
    else
        svg_put(f, "<g class='flow%s%s h%d' stroke-width='%.1f'>", thin ? " thin" : "",
                flow->far ? " far" : "", flow->from % 6, width);
    svg_put(f, "<path d='M%d %d C%d %d %d %d %d %d H%d'/>", x1, y1, mid, y1, mid - dir * 40, y2,
            x2 - dir * 52, y2, x2 - dir * 6);
    if (!own)
        svg_put(f, "<path class='head h%d' d='M%d %d l%d -4 v8 z'/>", flow->from % 6, x2, y2,
                -dir * 7);
    label(text, each, flow->bytes, flow->bytes, flow->bytes * each);
    put_label(f, own, x2, y2, dir, b->ins > MANY ? "" : text);
    if (own)
        fprintf(f, "<title>rank %lld keeps %lld bytes</title>", to, (long long)flow->bytes);
    else
        fprintf(f, "<title>rank %lld to rank %lld: %lld bytes</title>", from, to,
                (long long)flow->bytes);
    fputs("</text></g>\n", f);
}

/* One label for a row of thin arrows, above the first. */
static void put_sum(FILE *f, const place_t *p, colo_pass_t pass)
{
    char text[64];
    int dir = pass == COLO_PASS_FORWARD ? 1 : -1;
    if (p->ins <= MANY || p->times == 0)
        return;
    label(text, p->times, p->least, p->most, p->sum);
    svg_put(f, "<g class='flow'>");
    put_label(f, false, pass == COLO_PASS_FORWARD ? SVG_PANEL - CELL : CELL, p->y + PORT, dir,
              text);
    fputs("</text></g>\n", f);
}

static int ports_height(int ins, int outs)
{
    int in = ins > MANY ? 2 * PORT + THIN * ins : PORT * (ins + 1);
    int out = outs > MANY ? THIN * (outs + 1) : PORT * (outs + 1);
    return in > out ? in : out;
}

/* What the arrows of the other way need: the two pictures stand side by side, row next to row. */
static void leave_place(const pic_t *pic, colo_pass_t other, place_t *place)
{
    const pic_flows_t *s = &pic->pass[other];
    for (int64_t i = 0; i < s->n; i++) {
        place[s->flow[i].from].outs++;
        place[s->flow[i].to].ins++;
    }
    for (int32_t r = 0; r < pic->nrows; r++) {
        int height = ports_height(place[r].ins, place[r].outs);
        place[r] = (place_t){.height = height};
    }
}

/* Rows from top to bottom; returns the height. */
static int arrange(const pic_t *pic, colo_pass_t pass, place_t *place)
{
    const pic_flows_t *s = &pic->pass[pass];
    int y = HEAD;

    memset(place, 0, (size_t)pic->nrows * sizeof *place);
    leave_place(pic, pass == COLO_PASS_FORWARD ? COLO_PASS_BACKWARD : COLO_PASS_FORWARD, place);
    for (int64_t i = 0; i < s->n; i++) {
        const pic_flow_t *flow = &s->flow[i];
        place_t *p = &place[flow->to];
        place[flow->from].outs++;
        p->ins++;
        if (flow->own)
            continue;
        int64_t each = flow->times / (pic->row[flow->to].alike + 1);
        p->least = p->times && p->least < flow->bytes ? p->least : flow->bytes;
        p->most = p->most > flow->bytes ? p->most : flow->bytes;
        p->sum += flow->bytes * each;
        p->times += each;
    }
    for (int32_t r = 0; r < pic->nrows; r++) {
        place_t *p = &place[r];
        int left = cell_lines(pic->src, &pic->row[r]), right = cell_lines(pic->dst, &pic->row[r]);
        int text = 14 * ((left > right ? left : right) + 1) + 2 * PAD;
        int ports = ports_height(p->ins, p->outs);
        if (r > 0)
            y += pic->row[r].part != pic->row[r - 1].part && pic->nparts < pic->nrows ? PART_GAP
                                                                                      : GAP;
        p->y = y;
        p->height = p->height > ports ? p->height : ports;
        p->height = p->height > text ? p->height : text;
        y += p->height;
    }
    return y + 2;
}

static void draw(FILE *f, const pic_t *pic, colo_pass_t pass, place_t *place)
{
    const pic_flows_t *s = &pic->pass[pass];

    svg_put(f,
            "<g class='side'><text x='%d' y='13'>source</text>"
            "<text x='%d' y='13'>destination</text></g>\n",
            CELL / 2, SVG_PANEL - CELL / 2);
    for (int32_t r = 0; r < pic->nrows; r++) {
        const place_t *p = &place[r];
        if (r > 0 && p->y - p[-1].y - p[-1].height == PART_GAP)
            svg_put(f, "<path class='part' d='M0 %d H%d'/>\n", p->y - PART_GAP / 2, SVG_PANEL);
        put_cell(f, pic->src, &pic->row[r], 0, p->y, p->height);
        put_cell(f, pic->dst, &pic->row[r], SVG_PANEL - CELL, p->y, p->height);
    }
    for (int64_t i = 0; i < s->n; i++)
        put_flow(f, pic, &s->flow[i], place, pass);
    for (int32_t r = 0; r < pic->nrows; r++)
        put_sum(f, &place[r], pass);
}

int pic_draw(FILE *f, const pic_t *pic, colo_pass_t pass)
{
    place_t *place = calloc((size_t)pic->nrows + 1, sizeof *place);
    if (!place)
        return HEAD;
    const int height = arrange(pic, pass, place);
    if (f)
        draw(f, pic, pass, place);
    free(place);
    return height;
}
