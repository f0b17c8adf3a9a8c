/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plot.c - what was achieved against the limit, by size: one panel for each pair of layouts
 * and pass, or for each group of GPUs. Logarithmic axes, as rooflines have; the limit is the thick
 * line.
 *
 * Drawn from the JSON alone, so that a run can be drawn again elsewhere. y is what must arrive
 * (what is copied, where nothing arrives) over time; the limit is the same over what push or copy
 * took, the longer. A panel of one size has bars instead.
 */
#include "perf.h"

#include "svg.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SERIES = 16,
    POINTS = 64,
    LEFT = 40,
    WIDTH = 296,
    TOP = 44,
    HEIGHT = 180,
    LINE = 17,
    BAR = 150,
    BAR_LEFT = 104
};

typedef struct series {
    char name[24];
    int hue; /* 0..5; -1: the limit */
    bool dashed;
    int n;
    double x[POINTS], y[POINTS]; /* bytes, GB/s */
} series_t;

typedef struct chart {
    char title[512], unit[64];
    series_t series[SERIES];
    int n;
    bool bars;
} chart_t;

typedef struct charts {
    chart_t chart[SVG_PANELS_MAX];
    int n;
    bool more; /* than there is room for */
    double lo, hi;
} charts_t;

static const char *text_of(const json_t *o, const char *key)
{
    const char *text = json_string_value(json_object_get(o, key));
    return text ? text : "?";
}

static double number_of(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

/* ---- collecting ---- */

/* The chart of that title; NULL: there is no room for it. */
static chart_t *chart_for(charts_t *all, const char *title, const char *unit)
{
    for (int i = 0; i < all->n; i++)
        if (strcmp(all->chart[i].title, title) == 0)
            return &all->chart[i];
    all->more |= all->n == SVG_PANELS_MAX;
    if (all->more)
        return NULL;
    chart_t *chart = &all->chart[all->n++];
    snprintf(chart->title, sizeof chart->title, "%s", title);
    snprintf(chart->unit, sizeof chart->unit, "%s", unit);
    return chart;
}

static void add(chart_t *chart, const char *name, bool dashed, double x, double y)
{
    static const char *const order[] = {"exact-peer", "exact-nccl", "reference",
                                        "torch",      "tuned",      "collective"};
    series_t *series = NULL;
    if (!chart || !(x > 0) || !(y > 0) || !isfinite(x) || !isfinite(y))
        return;
    for (int i = 0; i < chart->n && !series; i++)
        if (strcmp(chart->series[i].name, name) == 0 && chart->series[i].dashed == dashed)
            series = &chart->series[i];
    if (!series && chart->n == SERIES)
        return;
    if (!series) {
        series = &chart->series[chart->n++];
        snprintf(series->name, sizeof series->name, "%s", name);
        series->dashed = dashed;
        series->hue = strstr(name, "limit") ? -1 : (chart->n - 1) % 6;
        for (int i = 0; i < 6; i++) /* the same colour in every panel */
            if (strcmp(order[i], name) == 0)
                series->hue = i;
    }
    for (int i = 0; i < series->n; i++)
        if (series->x[i] == x)
            return;
    if (series->n < POINTS) {
        series->x[series->n] = x;
        series->y[series->n++] = y;
    }
}

static void collect_bridge(charts_t *all, const json_t *rows)
{
    size_t i;
    json_t *row;
    json_array_foreach(rows, i, row)
    {
        char title[512];
        const char *op = text_of(row, "op");
        const double arrive = number_of(row, "arrive_bytes"), local = number_of(row, "local_bytes"),
                     moved = arrive > 0 ? arrive : local, bytes = number_of(row, "bytes");
        const bool limit = strcmp(op, "push") == 0 || strcmp(op, "copy") == 0;
        snprintf(title, sizeof title, "%s \xe2\x86\x92 %s, %s, %s", text_of(row, "src"),
                 text_of(row, "dst"), text_of(row, "axes"), text_of(row, "way"));
        chart_t *chart = chart_for(
            all, title, arrive > 0 ? "GB/s of what must arrive" : "GB/s copied; none arrives");
        if (limit || json_is_true(json_object_get(row, "view")))
            continue;
        if (!json_is_true(json_object_get(row, "replayed")) && number_of(row, "limit_us") > 0)
            add(chart, "limit", false, bytes, moved / number_of(row, "limit_us") * 1e-3);
        add(chart, op, json_is_true(json_object_get(row, "replayed")), bytes,
            moved / number_of(row, "time_us") * 1e-3);
    }
}

static void collect_link(charts_t *all, const json_t *rows)
{
    size_t i;
    json_t *row;
    json_array_foreach(rows, i, row)
    {
        char title[64];
        const int gpus = (int)number_of(row, "gpus");
        snprintf(title, sizeof title, gpus > 1 ? "%d GPUs" : "Memory of one GPU", gpus);
        chart_t *chart = chart_for(all, title, gpus > 1 ? "GB/s, busbw" : "GB/s read and written");
        const char *op = text_of(row, "op");
        add(chart, gpus > 1 && strcmp(op, "push") == 0 ? "push, the limit" : op, false,
            number_of(row, "bytes"), number_of(row, gpus > 1 ? "busbw_gbs" : "membw_gbs"));
    }
}

static void collect_logprob(charts_t *all, const json_t *loss)
{
    size_t i;
    json_t *row;
    char title[80];
    snprintf(title, sizeof title, "T %.0f, V %.0f, %s", number_of(loss, "tokens"),
             number_of(loss, "vocab"), text_of(loss, "dtype"));
    json_array_foreach(json_object_get(loss, "rows"), i, row)
    {
        add(chart_for(all, title, "GB/s read and written"), text_of(row, "op"), false, 1,
            number_of(row, "gbs"));
    }
}

/* ---- drawing ---- */

static const char *short_bytes(double bytes, char text[32])
{
    svg_bytes(bytes, text);
    char *blank = strchr(text, ' '); /* "64 MiB" is "64M" on an axis */
    blank[0] = blank[1] == 'B' ? '\0' : blank[1];
    blank[1] = '\0';
    return text;
}

static double along(double v, double lo, double hi)
{
    return hi > lo ? (log(v) - log(lo)) / (log(hi) - log(lo)) : 0.5;
}

static void range(const chart_t *chart, double x[2], double y[2])
{
    x[0] = y[0] = INFINITY;
    x[1] = y[1] = 0;
    for (int i = 0; i < chart->n; i++)
        for (int k = 0; k < chart->series[i].n; k++) {
            x[0] = fmin(x[0], chart->series[i].x[k]);
            x[1] = fmax(x[1], chart->series[i].x[k]);
            y[0] = fmin(y[0], chart->series[i].y[k]);
            y[1] = fmax(y[1], chart->series[i].y[k]);
        }
    y[0] /= 1.15;
    y[1] *= 1.15;
}

static void put_axes(FILE *f, const double x[2], const double y[2])
{
    static const double steps[] = {1, 2, 5};
    const double octaves = log2(x[1] / x[0]), every = fmax(1, ceil(octaves / 5));
    const bool few = y[1] / y[0] < 30; /* then 2 and 5 are labelled, too */
    char text[32];
    svg_rect(f, "track", LEFT, TOP, WIDTH, HEIGHT);
    for (double e = 0; e <= octaves + 0.01; e += every) {
        const double offset = LEFT + WIDTH * e / octaves;
        svg_put(f,
                "<path class='rule' d='M%.1f %dv%d'/>"
                "<text x='%.1f' y='%d' text-anchor='%s'>%s</text>\n",
                offset, TOP, HEIGHT, offset, TOP + HEIGHT + 14,
                offset > LEFT + WIDTH - 16 ? "end" : "middle", short_bytes(x[0] * exp2(e), text));
    }
    for (int d = -3; d < 6; d++)
        for (int step = 0; step < 3; step++) {
            const double v = steps[step] * pow(10, d),
                         offset = TOP + HEIGHT * (1 - along(v, y[0], y[1]));
            if (v < y[0] || v > y[1] || (step > 0 && !few))
                continue;
            svg_put(f,
                    "<path class='rule' d='M%d %.1fh%d'/>"
                    "<text x='%d' y='%.1f' text-anchor='end'>%g</text>\n",
                    LEFT, offset, WIDTH, LEFT - 4, offset + 4, v);
        }
}

/* A curve in its colour, up to where its path begins. */
static void begin_curve(FILE *f, const series_t *series)
{
    if (series->hue < 0)
        svg_put(f, "<g class='limit'><path");
    else
        svg_put(f, "<g class='flow h%d' stroke-width='1.6'><path", series->hue);
    if (series->dashed)
        svg_put(f, " stroke-dasharray='4 3'");
    svg_put(f, " d='");
}

static void put_line(FILE *f, const series_t *series, const double x[2], const double y[2])
{
    double px[POINTS], py[POINTS];
    begin_curve(f, series);
    for (int i = 0; i < series->n; i++) {
        px[i] = LEFT + WIDTH * along(series->x[i], x[0], x[1]);
        py[i] = TOP + HEIGHT * (1 - along(series->y[i], y[0], y[1]));
        svg_put(f, "%s%.1f %.1f", i ? "L" : "M", px[i], py[i]);
    }
    svg_put(f, "'/>");
    for (int i = 0; i < series->n && series->hue >= 0; i++)
        svg_put(f, "<circle class='head h%d' cx='%.1f' cy='%.1f' r='2.4'/>", series->hue, px[i],
                py[i]);
    fputs("</g>\n", f);
}

static void put_legend(FILE *f, const chart_t *chart)
{
    for (int i = 0; i < chart->n; i++) {
        const series_t *series = &chart->series[i];
        const int offset = i % 2 * 172, y = TOP + HEIGHT + 34 + i / 2 * LINE;
        double best = 0;
        for (int k = 0; k < series->n; k++)
            best = fmax(best, series->y[k]);
        begin_curve(f, series);
        svg_put(f, "M%d %dh16'/></g><text class='strong' x='%d' y='%d'>%s%s: %.*f</text>\n", offset,
                y - 4, offset + 22, y, series->name, series->dashed ? ", graph" : "",
                best < 10 ? 1 : 0, best);
    }
}

static void put_bars(FILE *f, const chart_t *chart)
{
    double most = 0, limit = 0;
    for (int i = 0; i < chart->n; i++) {
        most = fmax(most, chart->series[i].y[0]);
        limit = chart->series[i].hue < 0 ? chart->series[i].y[0] : limit;
    }
    for (int i = 0; i < chart->n; i++) {
        const series_t *series = &chart->series[i];
        const int y = TOP + i * (LINE + 4);
        char percent[32] = "";
        if (limit > 0 && series->hue >= 0)
            snprintf(percent, sizeof percent, ", %.0f %%", 100 * series->y[0] / limit);
        svg_put(f, "<text class='strong' x='0' y='%d'>%s%s</text>", y + 11, series->name,
                series->dashed ? " (g)" : "");
        svg_bar(f, BAR_LEFT, y, BAR, BAR * series->y[0] / most, series->hue < 0);
        svg_put(f, "<text class='strong' x='%d' y='%d'>%.*f%s</text>\n", BAR_LEFT + BAR + 6, y + 11,
                series->y[0] < 10 ? 1 : 0, series->y[0], percent);
    }
}

static int draw(FILE *f, const void *what)
{
    const chart_t *chart = what;
    double x[2], y[2];
    svg_fit(f, "head2", 0, 14, 50, 342, chart->title);
    svg_put(f, "<text x='0' y='32'>%s%s</text>\n", chart->unit,
            chart->bars ? "" : "; the most of each below");
    if (chart->bars) {
        put_bars(f, chart);
        return TOP + chart->n * (LINE + 4);
    }
    range(chart, x, y);
    put_axes(f, x, y);
    for (int i = 0; i < chart->n; i++)
        put_line(f, &chart->series[i], x, y);
    put_legend(f, chart);
    return TOP + HEIGHT + 34 + (chart->n + 1) / 2 * LINE;
}

static bool by_size(const chart_t *chart)
{
    for (int i = 0; i < chart->n; i++)
        for (int k = 0; k < chart->series[i].n; k++)
            if (chart->series[i].x[k] != chart->series[0].x[0])
                return true;
    return false;
}

static const char *kind_of(const json_t *doc)
{
    return json_object_get(doc, "bridge")    ? "bridge"
           : json_object_get(doc, "link")    ? "link"
           : json_object_get(doc, "logprob") ? "logprob"
                                             : "";
}

static void describe(svg_page_t *page, const json_t *doc, const charts_t *all)
{
    svg_add_line(page, "%.0f \xc3\x97 %.80s, %.20s, colobridge %.20s, CUDA %.20s.",
                 fmax(1, number_of(doc, "gpus")), text_of(doc, "device"), text_of(doc, "date"),
                 text_of(doc, "version"), text_of(doc, "cuda"));
    svg_add_line(page, "%.399s", text_of(doc, "command"));
    const json_t *row = json_array_get(json_object_get(doc, "bridge"), 0);
    if (row)
        svg_add_line(
            page,
            "%.0f samples \xc3\x97 %.0f features, %.10s, %.10s output. Sizes: the larger tensor "
            "of a rank. Limit: stores into peers, or the copy of what stays, the longer.",
            number_of(row, "batch"), number_of(row, "hidden"), text_of(row, "dtype"),
            text_of(row, "output"));
    if (all->more)
        svg_add_line(page, "The first %d panels; the rest is not drawn.", SVG_PANELS_MAX);
}

int perf_plot(const json_t *doc, const char *path)
{
    charts_t *all = calloc(1, sizeof *all);
    char title[64];
    svg_page_t page = {.title = title, .label = "measured bandwidth against its limit, by size"};
    if (!all)
        return tool_problem("no memory");
    collect_bridge(all, json_object_get(doc, "bridge"));
    collect_link(all, json_object_get(doc, "link"));
    collect_logprob(all, json_object_get(doc, "logprob"));
    snprintf(title, sizeof title, "colo-perf %s", kind_of(doc));
    describe(&page, doc, all);
    for (int i = 0; i < all->n; i++) {
        chart_t *chart = &all->chart[i];
        chart->bars = !by_size(chart);
        if (chart->n > 0)
            svg_add_panel(&page, draw, chart);
    }
    const int rc = page.npanels == 0
                       ? tool_problem("nothing to draw: no rows of bridge, link or logprob")
                       : tool_svg(TOOL_PROBLEM, path, svg_page(&page, path));
    free(all);
    return rc;
}

int perf_plot_file(perf_t *p)
{
    json_error_t e;
    char q[TOOL_QUOTE_MAX];
    json_t *doc = json_load_file(p->file, JSON_REJECT_DUPLICATES, &e);
    if (!doc && e.line < 0) /* the words of a file that cannot be opened name it */
        return tool_refuse("plot: %s", e.text);
    if (!doc)
        return tool_refuse("plot: %s: line %d: %s", tool_quote(q, p->file), e.line, e.text);
    int rc = strcmp(text_of(doc, "tool"), tool_name) == 0
                 ? perf_plot(doc, p->svg)
                 : tool_refuse("plot: %s is not what --json prints", tool_quote(q, p->file));
    json_decref(doc);
    return rc;
}
