/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report-layout.c - who holds what and what the bridge moves, as two pictures and a table.
 *
 * One picture a way. A rank is a row: its source coordinates in the left cell, its destination
 * coordinates in the right one. Forward arrows run left to right, backward arrows right to left,
 * dashed lines are what stays on the rank. Every arrow arrives at a port of its own with its bytes
 * written there, so that labels never lie on each other.
 *
 * Everything drawn comes from colo_plan_create() of every rank: the receives are drawn, and the
 * sends are not looked at, since both sides of a message derive the same list.
 */
#include <stdlib.h>
#include <string.h>

#include "report-page.h"

enum { WIDTH = 360, CELL = 104, PORT = 17, PAD = 8, GAP = 10, HEAD = 22 };

struct flow {
    int32_t from, to; /* equal: a copy on the rank itself */
    int64_t bytes;
};

/* Flows of one way, ordered by (to, from), with the totals that stand below the picture. */
struct flows {
    struct flow *flow;
    int64_t n, room, messages, total, most, minimum, collective;
};

static bool push(struct flows *s, int64_t from, int64_t to, int64_t bytes)
{
    if (s->n == s->room) {
        int64_t room = s->room ? 2 * s->room : 64;
        struct flow *more = realloc(s->flow, (size_t)room * sizeof *more);
        if (!more)
            return false;
        s->flow = more;
        s->room = room;
    }
    s->flow[s->n++] = (struct flow){.from = (int32_t)from, .to = (int32_t)to, .bytes = bytes};
    return true;
}

static bool add_rank(struct flows *s, const colo_plan_t *plan, int32_t rank, colo_way_t way)
{
    int32_t count = 0;
    const colo_plan_message_t *m = colo_plan_recvs(plan, way, &count);
    colo_plan_bytes_t b = colo_plan_bytes(plan, way);
    bool own = b.local > 0;

    for (int32_t i = 0; i <= count; i++) {
        if (own && (i == count || m[i].peer > rank)) {
            if (!push(s, rank, rank, b.local))
                return false;
            own = false;
        }
        if (i < count && !push(s, m[i].peer, rank, m[i].bytes))
            return false;
    }
    s->messages += count;
    s->total += b.recv;
    s->minimum += b.minimum;
    if (b.recv > s->most)
        s->most = b.recv;
    if (b.collective_recv < 0)
        s->collective = -1;
    else if (s->collective >= 0)
        s->collective += b.collective_recv;
    return true;
}

/* The plan of every rank, both ways. */
static colo_status_t collect(const cap_report_t *r, struct flows flows[2])
{
    for (int32_t rank = 0; rank < r->world; rank++) {
        colo_plan_t *plan = NULL;
        colo_status_t st = colo_plan_create(&plan, &r->plan, rank);
        if (st < 0)
            return st;
        bool ok = add_rank(&flows[COLO_FORWARD], plan, rank, COLO_FORWARD);
        if (ok && !r->plan.no_grad)
            ok = add_rank(&flows[COLO_BACKWARD], plan, rank, COLO_BACKWARD);
        colo_plan_destroy(&plan);
        if (!ok)
            return COLO_ERR_NOMEM;
    }
    return COLO_OK;
}

/* ---- cells ---- */

/* "tp 1 cp 0": dims @first and the next of those with extent > 1; returns how many those are */
static int coords_line(const colo_layout_t *l, int32_t rank, int first, char text[64])
{
    int64_t c[COLO_MAX_DIMS];
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

static int cell_lines(const colo_layout_t *l, int32_t rank)
{
    char text[64];
    int dims = coords_line(l, rank, 0, text);
    return dims > 2 ? (dims + 1) / 2 : 1;
}

static void put_cell(FILE *f, const colo_layout_t *l, int32_t rank, int x, int y, int height)
{
    char text[64];
    int lines = cell_lines(l, rank), top = y + (height - 14 * (lines + 1)) / 2 + 11;
    bool holds = colo_layout_holds(l, rank);

    fprintf(f, "<g class=\"%s\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"6\"/>",
            holds ? "cell" : "cell none", x, y, CELL, height);
    fprintf(f, "<text class=\"rank\" x=\"%d\" y=\"%d\">rank %d</text>", x + CELL / 2, top, rank);
    for (int i = 0; i < lines; i++) {
        int dims = coords_line(l, rank, 2 * i, text);
        if (!colo_grid_has_rank(&l->grid, rank))
            snprintf(text, sizeof text, "not in the grid");
        else if (!dims)
            snprintf(text, sizeof text, "alone");
        fprintf(f, "<text x=\"%d\" y=\"%d\"%s>", x + CELL / 2, top + 14 * (i + 1),
                strlen(text) > 16 ? " textLength=\"96\" lengthAdjust=\"spacingAndGlyphs\"" : "");
        cap_put_text(f, text);
        fputs("</text>", f);
    }
    fputs("</g>\n", f);
}

/* ---- a picture ---- */

struct place {
    int y, height, ins, outs, in, out; /* ports in all and used so far */
};

static void put_flow(FILE *f, const struct flow *w, struct place *place, colo_way_t way)
{
    struct place *a = &place[w->from], *b = &place[w->to];
    int step_a = a->height / (a->outs + 1), step_b = b->height / (b->ins + 1);
    int y1 = a->y + step_a * ++a->out, y2 = b->y + step_b * ++b->in;
    int x1 = way == COLO_FORWARD ? CELL : WIDTH - CELL, x2 = WIDTH - x1, mid = WIDTH / 2;
    int dir = way == COLO_FORWARD ? 1 : -1;
    char text[32];

    /* the last stretch is level, with the bytes above it */
    fprintf(f, "<g class=\"%s h%d\"><path d=\"M%d %d C%d %d %d %d %d %d H%d\"/>",
            w->from == w->to ? "own" : "flow", w->from % 6, x1, y1, mid, y1, mid - dir * 40, y2,
            x2 - dir * 52, y2, x2 - dir * 6);
    if (w->from != w->to)
        fprintf(f, "<path class=\"head\" d=\"M%d %d l%d -4 v8 z\"/>", x2, y2, -dir * 7);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"%s\">", x2 - dir * 9, y2 - 3,
            dir > 0 ? "end" : "start");
    fputs(cap_bytes((double)w->bytes, text), f);
    if (w->from == w->to)
        fprintf(f, "<title>rank %d keeps %lld bytes</title>", w->to, (long long)w->bytes);
    else
        fprintf(f, "<title>rank %d to rank %d: %lld bytes</title>", w->from, w->to,
                (long long)w->bytes);
    fputs("</text></g>\n", f);
}

static void put_picture(FILE *f, const cap_report_t *r, const struct flows *s, colo_way_t way,
                        struct place *place)
{
    const colo_layout_t *src = r->plan.src, *dst = r->plan.dst;
    int y = HEAD;

    memset(place, 0, (size_t)r->world * sizeof *place);
    for (int64_t i = 0; i < s->n; i++) {
        place[s->flow[i].from].outs++;
        place[s->flow[i].to].ins++;
    }
    for (int32_t rank = 0; rank < r->world; rank++) {
        struct place *p = &place[rank];
        int left = cell_lines(src, rank), right = cell_lines(dst, rank);
        int text = 14 * ((left > right ? left : right) + 1) + 2 * PAD;
        int ports = PORT * ((p->ins > p->outs ? p->ins : p->outs) + 1);
        p->y = y;
        p->height = text > ports ? text : ports;
        y += p->height + GAP;
    }
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" role=\"img\" ", WIDTH, y);
    fprintf(f, "aria-label=\"%s messages between ranks\">\n",
            way == COLO_FORWARD ? "forward" : "backward");
    fprintf(f, "<g class=\"side\"><text x=\"%d\" y=\"13\">source</text>", CELL / 2);
    fprintf(f, "<text x=\"%d\" y=\"13\">destination</text></g>\n", WIDTH - CELL / 2);
    for (int32_t rank = 0; rank < r->world; rank++) {
        put_cell(f, src, rank, 0, place[rank].y, place[rank].height);
        put_cell(f, dst, rank, WIDTH - CELL, place[rank].y, place[rank].height);
    }
    for (int64_t i = 0; i < s->n; i++)
        put_flow(f, &s->flow[i], place, way);
    fputs("</svg>\n", f);
}

static void put_way(FILE *f, const cap_report_t *r, const struct flows *s, colo_way_t way,
                    struct place *place)
{
    char a[32], b[32], c[32];

    fprintf(f, "<figure class=\"layout\">\n<figcaption><b>%s</b> ",
            way == COLO_FORWARD ? "Forward, activations" : "Backward, gradients");
    if (way == COLO_BACKWARD && r->plan.no_grad) {
        fputs("none: the source side is frozen</figcaption>\n</figure>\n", f);
        return;
    }
    if (!s->messages) {
        fputs("no messages: every rank already has its part", f);
    } else {
        fprintf(f, "%s %s, %s in all, at most %s into one rank", cap_count(s->messages, a),
                s->messages == 1 ? "message" : "messages", cap_bytes((double)s->total, b),
                cap_bytes((double)s->most, c));
        if (s->total == s->minimum)
            fputs("; nothing that its receiver already has", f);
        else
            fprintf(f, "; missing at the receivers: %s", cap_bytes((double)s->minimum, a));
    }
    if (s->collective >= 0)
        fprintf(f, "; by whole collectives %s", cap_bytes((double)s->collective, b));
    fputs(".</figcaption>\n", f);
    if (r->world <= CAP_DRAWN_RANKS)
        put_picture(f, r, s, way, place);
    fputs("</figure>\n", f);
}

/* ---- who holds what ---- */

static void put_owned(FILE *f, const cap_report_t *r, const colo_layout_t *layout, int32_t rank,
                      bool full_rows)
{
    const colo_shape_t *s = &r->plan.shape;
    colo_layout_t l = *layout;
    colo_run_t run[64];
    colo_owned_t owned;
    int64_t n = 0;

    if (s->positions && layout == r->plan.dst)
        l.positions = s->positions;
    if (colo_layout_owned(&l, rank, s->samples, s->rows, s->features, full_rows, &owned, run, 64,
                          &n) < 0) {
        fputs("in more than 64 pieces", f);
        return;
    }
    if (owned.b0 == owned.b1 || !owned.rows) {
        fputs("nothing", f);
        return;
    }
    fprintf(f, "samples %lld to %lld, rows", (long long)owned.b0, (long long)owned.b1 - 1);
    for (int64_t i = 0; i < n; i++)
        fprintf(f, "%s %lld to %lld", i ? "," : "", (long long)run[i].row,
                (long long)(run[i].row + run[i].count - 1));
}

static void put_holdings(FILE *f, const cap_report_t *r)
{
    bool full = r->plan.output == COLO_FULL_SEQ;

    fputs("<details>\n<summary>Who holds what</summary>\n<table>\n<thead><tr><th>rank</th>"
          "<th>source holds</th><th>destination gets</th></tr></thead>\n<tbody>\n", f);
    for (int32_t rank = 0; rank < r->world; rank++) {
        fprintf(f, "<tr><td data-name=\"rank\">%d</td><td data-name=\"source holds\">", rank);
        put_owned(f, r, r->plan.src, rank, false);
        fputs("</td><td data-name=\"destination gets\">", f);
        put_owned(f, r, r->plan.dst, rank, full);
        fputs("</td></tr>\n", f);
    }
    fputs("</tbody>\n</table>\n</details>\n", f);
}

static void put_intro(FILE *f, const cap_report_t *r)
{
    const colo_shape_t *s = &r->plan.shape;
    bool sharded = r->plan.output == COLO_SHARDED;

    fputs("<section id=\"layout\">\n<h2>Layout</h2>\n<p>Encoder on <code>", f);
    cap_put_grid(f, &r->plan.src->grid);
    fputs("</code>, language model on <code>", f);
    cap_put_grid(f, &r->plan.dst->grid);
    fprintf(f,
            "</code>, the same %d ranks. What crosses the bridge each step: %lld samples of %lld "
            "image rows of %lld features (%s), output %s, %s gradients%s. A row is a rank, solid "
            "arrows are messages, dashed lines stay on the rank.</p>\n",
            r->world, (long long)s->samples, (long long)s->rows, (long long)s->features,
            colo_dtype_name(r->plan.dtype), sharded ? "sharded" : "full",
            sharded || r->plan.grad == COLO_DISJOINT ? "disjoint" : "partial",
            r->algo == COLO_COLLECTIVE
                ? "; this run used whole collectives, the pictures show the exact plan"
                : "");
    if (r->world > CAP_DRAWN_RANKS)
        fprintf(f, "<p>Pictures are drawn up to %d ranks.</p>\n", CAP_DRAWN_RANKS);
}

colo_status_t cap_put_layout(FILE *f, const cap_report_t *r)
{
    struct flows flows[2] = {{0}, {0}};
    struct place *place = calloc((size_t)r->world, sizeof *place);
    colo_status_t st = place ? collect(r, flows) : COLO_ERR_NOMEM;

    if (st >= 0) {
        put_intro(f, r);
        fputs("<div class=\"pair\">\n", f);
        put_way(f, r, &flows[COLO_FORWARD], COLO_FORWARD, place);
        put_way(f, r, &flows[COLO_BACKWARD], COLO_BACKWARD, place);
        fputs("</div>\n", f);
        put_holdings(f, r);
        fputs("</section>\n", f);
    }
    free(place);
    free(flows[0].flow);
    free(flows[1].flow);
    return st;
}
