/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report-curves.c - loss and accuracy over steps, as SVG with axes and ticks.
 *
 * Both charts are one function over points. The y axis starts at 0, so that a small wiggle looks
 * small. More points than pixels are thinned to the last of each group; a value that is no number
 * breaks the line, so that a run that blew up looks like one.
 */
#include <math.h>
#include <stdlib.h>

#include "report-page.h"

enum { WIDTH = 400, HEIGHT = 230, LEFT = 54, RIGHT = 12, TOP = 12, BOTTOM = 38, MAX_DRAWN = 700 };

struct chart {
    const char *title, *unit, *y_label, *empty;
    const cap_point_t *points;
    int64_t n;
    bool percent;
};

/* 1, 2 or 5 times a power of ten, so that @range has about @ticks of them */
static double nice_step(double range, int ticks)
{
    double raw = range / ticks, ten = pow(10.0, floor(log10(raw))), lead = raw / ten;
    return ten * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
}

struct scale {
    double x0, x1, y1; /* y0 is 0 */
};

static double px(const struct scale *s, double x)
{
    return LEFT + (x - s->x0) / (s->x1 - s->x0) * (WIDTH - LEFT - RIGHT);
}

static double py(const struct scale *s, double y)
{
    return HEIGHT - BOTTOM - y / s->y1 * (HEIGHT - TOP - BOTTOM);
}

static void put_axes(FILE *f, const struct chart *c, const struct scale *s)
{
    char text[32];
    double xs = nice_step(s->x1 - s->x0, 5), ys = nice_step(s->y1, 5);

    if (xs < 1.0)
        xs = 1.0; /* steps are whole */
    svg_put(f, "<g class='axis'>\n");
    for (int k = 0; k * ys <= s->y1 * 1.0001; k++) {
        double y = py(s, k * ys);
        svg_put(f, "<line class='grid' x1='%d' x2='%d' y1='%.1f' y2='%.1f'/>", LEFT, WIDTH - RIGHT,
                y, y);
        svg_put(f, "<text x='%d' y='%.1f' text-anchor='end'>%.4g%s</text>\n", LEFT - 6, y + 4.0,
                c->percent ? 100.0 * k * ys : k * ys, c->percent ? "%" : "");
    }
    for (double x = ceil(s->x0 / xs) * xs; x <= s->x1 * 1.0001; x += xs)
        svg_put(f,
                "<line class='tick' x1='%.1f' x2='%.1f' y1='%d' y2='%d'/>"
                "<text x='%.1f' y='%d' text-anchor='middle'>%s</text>\n",
                px(s, x), px(s, x), HEIGHT - BOTTOM, HEIGHT - BOTTOM + 4, px(s, x),
                HEIGHT - BOTTOM + 17, svg_count((int64_t)x, text));
    svg_put(f, "<line class='tick' x1='%d' x2='%d' y1='%d' y2='%d'/>", LEFT, WIDTH - RIGHT,
            HEIGHT - BOTTOM, HEIGHT - BOTTOM);
    svg_put(f, "<text x='%d' y='%d' text-anchor='middle'>step</text>", (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 5);
    svg_put(f, "<text transform='translate(12 %d) rotate(-90)' text-anchor='middle'>",
            (TOP + HEIGHT - BOTTOM) / 2);
    fprintf(f, "%s</text>\n", c->y_label);
    fputs("</g>\n", f);
}

static void put_line(FILE *f, const struct chart *c, const struct scale *s)
{
    int64_t group = c->n / MAX_DRAWN + 1;
    bool open = false, pen = false;
    const cap_point_t *last = NULL;

    for (int64_t i = 0; i < c->n; i += group) {
        const cap_point_t *p = &c->points[i + group <= c->n ? i + group - 1 : c->n - 1];
        if (i == 0)
            p = &c->points[0]; /* a curve begins where the run began */
        if (!isfinite(p->value)) {
            pen = false;
            continue;
        }
        if (!open)
            svg_put(f, "<path class='curve' d='");
        fprintf(f, "%s%.1f %.1f",
                pen    ? " L"
                : open ? " M"
                       : "M",
                px(s, (double)p->step), py(s, p->value));
        open = pen = true;
        last = p;
    }
    if (!open)
        return;
    svg_put(f, "'/>\n");
    svg_put(f, "<circle class='dot' r='3.5' cx='%.1f' cy='%.1f'/>\n", px(s, (double)last->step),
            py(s, last->value));
}

static void put_value(FILE *f, const struct chart *c, double v)
{
    if (!isfinite(v))
        fputs("not a number", f);
    else
        fprintf(f, c->percent ? "%.1f%%" : "%.4f", c->percent ? 100.0 * v : v);
}

static void put_chart(FILE *f, const struct chart *c)
{
    char text[32];
    struct scale s = {.y1 = c->percent ? 1.0 : 0.0};

    svg_put(f, "<figure class='chart'>\n<figcaption><b>%s</b> ", c->title);
    if (!c->n) {
        fprintf(f, "%s</figcaption>\n</figure>\n", c->empty);
        return;
    }
    const cap_point_t *first = &c->points[0], *end = &c->points[c->n - 1];
    put_value(f, c, first->value);
    fprintf(f, " at step %s", svg_count(first->step, text));
    if (c->n > 1) {
        fputs(", ", f);
        put_value(f, c, end->value);
        fprintf(f, " at step %s", svg_count(end->step, text));
    }
    fputs("</figcaption>\n", f);

    s.x0 = (double)first->step;
    s.x1 = end->step > first->step ? (double)end->step : s.x0 + 1.0;
    for (int64_t i = 0; i < c->n; i++)
        if (isfinite(c->points[i].value) && c->points[i].value > s.y1)
            s.y1 = c->points[i].value;
    if (s.y1 <= 0.0)
        s.y1 = 1.0;
    if (!c->percent) {
        double step = nice_step(s.y1, 5);
        s.y1 = ceil(s.y1 / step) * step;
    }
    svg_put(f, "<svg viewBox='0 0 %d %d' role='img' aria-label='%s over steps'>\n", WIDTH, HEIGHT,
            c->title);
    put_axes(f, c, &s);
    put_line(f, c, &s);
    fputs("</svg>\n</figure>\n", f);
}

void cap_put_curves(FILE *f, const cap_report_t *r)
{
    const struct chart loss = {.title = "Loss",
                               .y_label = "nats per caption byte",
                               .empty = "was not recorded",
                               .points = r->loss,
                               .n = r->nloss};
    const struct chart accuracy = {.title = "Held-out accuracy",
                                   .y_label = "exact captions",
                                   .empty = "was not recorded",
                                   .points = r->accuracy,
                                   .n = r->naccuracy,
                                   .percent = true};

    svg_put(f, "<section id='curves'>\n<h2>Curves</h2>\n<div class='pair'>\n");
    put_chart(f, &loss);
    put_chart(f, &accuracy);
    fputs("</div>\n</section>\n", f);
}
