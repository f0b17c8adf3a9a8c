/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - the page around the pictures: style, facts, samples, the table of collectives, and how
 * the file gets its name.
 *
 * The page needs nothing from outside and no script, so that it can be mailed or kept next to a
 * log. Every string that is not ours goes through svg_put() or svg_grid(). The markup is closed as
 * XML would want it, which is what the test can check.
 *
 * How it is written is tools/out-file.c: a new file next to the target, then rename().
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "report-page.h"

#include "out-file.h"

#include <colobridge/version.h>

static _Thread_local char error_message[1024];

static const char *refuse(const char *fmt, ...) COLO_PRINTF(1, 2);
static const char *refuse(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(error_message, sizeof error_message, fmt, args);
    va_end(args);
    return error_message;
}

/* ---- style and head ---- */

static const char style[] =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#d1d9e0;"
    "--card:#f6f8fa;--accent:#0b66c3;--good:#1a7f37;--bad:#c0362c;--l:40%}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#0f1419;--fg:#e6e9ed;--dim:#9aa4af;"
    "--line:#30363d;--card:#171d24;--accent:#58a6ff;--good:#4cc26a;--bad:#ff7b72;--l:68%}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;padding:20px 16px 40px;max-width:1120px;background:var(--bg);"
    "color:var(--fg);font:16px/1.5 system-ui,sans-serif}\n"
    "h1{font-size:1.6rem;line-height:1.25;margin:.2em 0}h2{font-size:1.2rem;margin:2em 0 .5em;"
    "padding-bottom:.25em;border-bottom:1px solid var(--line)}\n"
    "p{margin:.5em 0;max-width:75ch}code{font-size:.92em;overflow-wrap:anywhere}\n"
    "pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;"
    "font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}\n"
    ".facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(104px,1fr));gap:8px;"
    "margin:14px 0;padding:0}\n"
    ".facts div{background:var(--card);border:1px solid var(--line);border-radius:8px;"
    "padding:8px 10px}.facts dt{color:var(--dim);font-size:.8rem}\n"
    ".facts dd{margin:0;font-size:1.1rem;font-weight:600;font-variant-numeric:tabular-nums}\n"
    ".pair{display:grid;gap:20px 32px;grid-template-columns:minmax(0,1fr)}\n"
    "@media(min-width:760px){.pair{grid-template-columns:repeat(2,minmax(0,1fr))}}\n"
    "figure{margin:0}figcaption{color:var(--dim);font-size:.9rem;margin-bottom:6px}\n"
    "figcaption b{color:var(--fg)}figure svg{display:block;width:100%;height:auto;margin:0 auto}\n"
    "figure.layout svg{max-width:500px}\n"
    "svg text{font:11px system-ui,sans-serif;fill:var(--dim)}\n"
    ".grid{stroke:var(--line)}.tick{stroke:var(--dim)}\n"
    ".bar{display:inline-block;width:90px;height:9px;margin-left:8px;fill:var(--accent)}\n"
    ".curve{fill:none;stroke:var(--accent);stroke-width:2;stroke-linejoin:round}"
    ".dot{fill:var(--accent)}\n";

static const char style_end[] =
    ".samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(96px,1fr));gap:10px}\n"
    ".sample{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px;"
    "text-align:center;min-width:0}\n"
    ".sample svg{width:100%;max-width:112px;background:#fff;border-radius:4px;display:block;"
    "margin:0 auto 6px}\n"
    ".sample b{display:block;font-size:.95rem;overflow-wrap:anywhere;line-height:1.3}"
    ".sample span{display:block;font-size:.8rem;color:var(--dim)}\n"
    ".right,.right span.mark{color:var(--good)}.wrong,.wrong span.mark{color:var(--bad)}\n"
    ".sample.wrong{border-color:var(--bad)}.sample b{color:var(--fg)}\n"
    "table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}\n"
    "th,td{text-align:left;padding:6px 10px;border-bottom:1px solid var(--line)}"
    "th{color:var(--dim);font-weight:500}\n"
    ".num{text-align:right}details{margin-top:14px}summary{cursor:pointer;color:var(--accent)}\n"
    "footer{margin-top:3em;color:var(--dim);font-size:.85rem}\n"
    "caption{text-align:left;color:var(--dim);padding:6px 0}\n"
    "@media(max-width:640px){thead{position:absolute;width:1px;height:1px;overflow:hidden;"
    "clip-path:inset(50%)}table,caption,tbody,tr,td{display:block}"
    "tr{border:1px solid var(--line);border-radius:8px;padding:6px 12px;margin:8px 0;"
    "background:var(--card)}\n"
    "td,td.num{display:flex;justify-content:space-between;gap:16px;border:0;padding:2px 0;"
    "text-align:right}td::before{content:attr(data-name);content:attr(data-name)/"
    "\"\";color:var(--dim);text-align:left;"
    "flex:none}}\n";

/* The cells and arrows of tools/picture.c in the page's colours, light and dark. */
static const char layout_style[] =
    ".cell rect{fill:var(--card);stroke:var(--line)}.cell text,.side text{text-anchor:middle}\n"
    "svg .cell .rank{fill:var(--fg);font-weight:600}.none{opacity:.55}"
    ".none rect{stroke-dasharray:4 3}\n"
    ".flow path,.own path{fill:none}"
    ".own path{stroke:var(--dim);stroke-dasharray:3 3;opacity:.7}\n"
    "svg .label{font-size:11px;stroke:var(--bg);stroke-width:3px;paint-order:stroke}"
    "svg .label.strong{fill:var(--fg)}\n"
    ".flow .head{stroke:none}.thin path{opacity:.75}.thin .head{opacity:1}\n"
    ".h0{--h:211}.h1{--h:28}.h2{--h:150}.h3{--h:335}.h4{--h:265}.h5{--h:48}\n"
    ".flow path{stroke:hsl(var(--h) 65% var(--l))}.flow .head{fill:hsl(var(--h) 65% var(--l))}\n"
    ".part{stroke:var(--line);stroke-dasharray:1 4;stroke-linecap:round;stroke-width:2}\n";

/* A narrow page shows rows as cards, for which browsers forget what is a table unless roles say so.
 */
void cap_put_table(FILE *f, const char *caption, const char *const *columns)
{
    svg_put(f,
            "<table role='table'>\n<caption>%s</caption>\n"
            "<thead role='rowgroup'><tr role='row'>",
            caption);
    for (; *columns; columns++)
        svg_put(f, "<th role='columnheader' scope='col' class='%s'>%s</th>",
                **columns == '#' ? "num" : "", *columns + (**columns == '#'));
    svg_put(f, "</tr></thead>\n<tbody role='rowgroup'>\n");
}

static void put_fact(FILE *f, const char *name, const char *fmt, ...) COLO_PRINTF(3, 4);
static void put_fact(FILE *f, const char *name, const char *fmt, ...)
{
    va_list args;
    fprintf(f, "<div><dt>%s</dt><dd>", name);
    va_start(args, fmt);
    vfprintf(f, fmt, args);
    va_end(args);
    fputs("</dd></div>\n", f);
}

static void put_head(FILE *f, const cap_report_t *r)
{
    const colo_grid_t *src = &r->plan.src->grid, *dst = &r->plan.dst->grid;
    char text[32];

    svg_put(f, "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'/>\n"
               "<meta name='viewport' content='width=device-width, initial-scale=1'/>\n"
               "<title>Captioner: ");
    svg_grid(f, src);
    fputs(" to ", f);
    svg_grid(f, dst);
    fprintf(f,
            "</title>\n<style>\n%s%s%s</style>\n</head>\n<body>\n<header>\n<h1>Captioner: ", style,
            layout_style, style_end);
    svg_grid(f, src);
    fputs(" \xe2\x86\x92 ", f); /* arrow */
    svg_grid(f, dst);
    svg_put(f, "</h1>\n<pre><code>%s</code></pre>\n<dl class='facts'>\n",
            r->command ? r->command : "");
    if (r->naccuracy)
        put_fact(f, "accuracy", "%.1f%%", 100.0 * r->accuracy[r->naccuracy - 1].value);
    if (r->nloss && isfinite(r->loss[r->nloss - 1].value))
        put_fact(f, "last loss", "%.4f", r->loss[r->nloss - 1].value);
    else if (r->nloss)
        put_fact(f, "last loss", "not a number");
    put_fact(f, "steps", "%s", svg_count(r->steps, text));
    put_fact(f, "batch", "%s", svg_count(r->batch, text));
    if (r->seconds > 0.0)
        put_fact(f, "time", "%.1f s", r->seconds);
    if (r->tokens_per_second > 0.0)
        put_fact(f, "tokens/s", "%s", svg_count((int64_t)(r->tokens_per_second + 0.5), text));
    put_fact(f, "ranks", "%d", r->world);
    if (r->parameters)
        put_fact(f, "parameters", "%s", svg_count(r->parameters, text));
    put_fact(f, "seed", "%llu", (unsigned long long)r->seed);
    svg_put(f,
            "</dl>\n<p>Width %lld, %lld heads, encoder hidden %lld, %lld layers; ranks are "
            "%s.</p>\n</header>\n<main>\n",
            (long long)r->model.width, (long long)r->model.heads, (long long)r->model.hidden,
            (long long)r->model.layers, r->backend ? r->backend : "not named");
}

/* ---- samples ---- */

static void put_sample(FILE *f, const cap_sample_t *s)
{
    bool right = !strcmp(s->caption, s->want);

    svg_put(f, "<div class='sample %s'>\n", right ? "right" : "wrong");
    for (int64_t k = 0; k < s->images; k++) {
        svg_put(f,
                "<svg viewBox='0 0 8 8' shape-rendering='crispEdges' role='img' "
                "aria-label='image %lld'>",
                (long long)(s->images > 1 ? k + 1 : s->row));
        for (int i = 0; i < CAP_PIXELS; i++)
            if (s->pixels[k][i])
                svg_put(f,
                        "<rect x='%d' y='%d' width='1' height='1' "
                        "fill-opacity='%.3g'/>",
                        i % 8, i / 8, s->pixels[k][i] / 16.0);
        fputs("</svg>\n", f);
    }
    svg_put(f, "<b>%s</b>\n<span class='mark'>", *s->caption ? s->caption : "(nothing)");
    if (right) /* check mark, cross */
        fputs("\xe2\x9c\x93 right", f);
    else
        fprintf(f, "\xe2\x9c\x97 is %s", s->want);
    if (s->images == 1)
        fprintf(f, "</span>\n<span>row %lld", (long long)s->row);
    fputs("</span>\n</div>\n", f);
}

static void put_samples(FILE *f, const cap_report_t *r)
{
    int64_t right = 0;
    char a[32], b[32];

    for (int64_t i = 0; i < r->nsamples; i++)
        right += !strcmp(r->samples[i].caption, r->samples[i].want);
    svg_put(f, "<section id='samples'>\n<h2>Held-out images</h2>\n");
    if (!r->nsamples) {
        fputs("<p>No samples were recorded.</p>\n</section>\n", f);
        return;
    }
    fputs("<p>The model writes these captions, byte by byte, for images that it did not train on. ",
          f);
    if (r->mistakes)
        fprintf(f, "Mistakes come first: %s of its %s %s", svg_count(r->nsamples - right, a),
                svg_count(r->mistakes, b), r->mistakes == 1 ? "mistake" : "mistakes");
    else
        fputs("It made no mistake", f);
    svg_put(f, " in %s images%s %s %s.</p>\n<div class='samples'>\n", svg_count(r->held, a),
            r->mistakes ? ", then" : "; here are", svg_count(right, b),
            r->mistakes && right == 1 ? "other"
            : r->mistakes             ? "others"
                                      : "of them");
    for (int64_t i = 0; i < r->nsamples; i++)
        put_sample(f, &r->samples[i]);
    fputs("</div>\n</section>\n", f);
}

/* ---- collectives ---- */

/* Exact: over all steps, to the byte. */
static bool as_planned(const cap_stats_row_t *w)
{
    return w->bytes == (uint64_t)w->plan_bytes;
}

static void put_number(FILE *f, const char *name, double v)
{
    char text[32];
    if (v == floor(v) && fabs(v) < 1e15)
        svg_put(f, "<td role='cell' class='num' data-name='%s'>%s</td>", name,
                svg_count((int64_t)v, text));
    else
        svg_put(f, "<td role='cell' class='num' data-name='%s'>%.2f</td>", name, v);
}

static void put_stats_row(FILE *f, const cap_report_t *r, const cap_stats_row_t *w)
{
    double steps = (double)r->stats_steps;

    svg_put(f,
            "<tr role='row'><td role='cell' data-name='where'>%s</td><td role='cell' "
            "data-name='operation'>%s</td>"
            "<td role='cell' data-name='for'>%s</td>",
            w->where, colo_op_name(w->op), colo_category_name(w->category));
    put_number(f, "calls per step", (double)w->ops / steps);
    put_number(f, "bytes per step", (double)w->bytes / steps);
    if (w->plan_bytes < 0) {
        svg_put(f, "<td role='cell' class='num' data-name='plan'>\xe2\x80\x93</td>"
                   "<td role='cell' data-name='equal'>\xe2\x80\x93</td></tr>\n");
        return;
    }
    put_number(f, "plan", (double)w->plan_bytes / steps);
    if (as_planned(w))
        svg_put(f, "<td role='cell' data-name='equal'><span class='right'>\xe2\x9c\x93 "
                   "yes</span></td></tr>\n");
    else
        svg_put(
            f,
            "<td role='cell' data-name='equal'><span class='wrong'>\xe2\x9c\x97 no, %+lld in all"
            "</span></td></tr>\n",
            (long long)(w->bytes - (uint64_t)w->plan_bytes));
}

static void put_stats(FILE *f, const cap_report_t *r)
{
    int64_t planned = 0, equal = 0;
    char a[32];

    for (int64_t i = 0; i < r->nstats; i++)
        if (r->stats[i].plan_bytes >= 0) {
            planned++;
            equal += as_planned(&r->stats[i]);
        }
    svg_put(f, "<section id='collectives'>\n<h2>Collectives</h2>\n");
    if (!r->nstats) {
        fputs("<p>No operations were recorded.</p>\n</section>\n", f);
        return;
    }
    fprintf(f,
            "<p>From the statistics of all ranks over %s %s: calls and bytes received, per step, "
            "next to the bytes that the plan says. ",
            svg_count(r->stats_steps, a), r->stats_steps == 1 ? "step" : "steps");
    if (!planned)
        fputs("No row has a plan.</p>\n", f);
    else if (equal == planned)
        svg_put(f,
                "<span class='right'>\xe2\x9c\x93 Every planned row moved exactly what was planned."
                "</span></p>\n");
    else
        svg_put(f,
                "<span class='wrong'>\xe2\x9c\x97 %lld of %lld planned rows moved something "
                "else.</span></p>\n",
                (long long)(planned - equal), (long long)planned);
    cap_put_table(f, "Operations of all ranks, per step",
                  (const char *[]){"where", "operation", "for", "#calls per step",
                                   "#bytes per step", "#plan", "equal", NULL});
    for (int64_t i = 0; i < r->nstats; i++)
        put_stats_row(f, r, &r->stats[i]);
    fputs("</tbody>\n</table>\n</section>\n", f);
}

/* ---- the file ---- */

static const char *put_page(FILE *f, const cap_report_t *r)
{
    put_head(f, r);
    cap_put_curves(f, r);
    put_samples(f, r);
    colo_status_t st = r->balance ? cap_put_balance(f, r) : cap_put_layout(f, r);
    if (st == COLO_ERR_NOMEM)
        return refuse("report: no memory for the plans of %d ranks", r->world);
    if (st < 0)
        return refuse("report: %s", colo_last_error());
    put_stats(f, r);
    fprintf(f, "</main>\n<footer>colobridge %s</footer>\n</body>\n</html>\n", colo_version());
    return NULL;
}

const char *cap_report_write(const cap_report_t *report, const char *path)
{
    out_file_t out;

    if (!report->plan.src || !report->plan.dst || report->world < 1)
        return refuse("report: needs both layouts and at least one rank (has %d)", report->world);
    if (report->nstats > 0 && report->stats_steps < 1)
        return refuse("report: %lld rows of the statistics over %lld steps",
                      (long long)report->nstats, (long long)report->stats_steps);
    int error = out_file_open(&out, path);
    if (error)
        return refuse("report: %s: %s", path, error == EISDIR ? "is a directory" : strerror(error));
    const char *why = put_page(out.f, report);
    if (why) {
        out_file_drop(&out);
        return why;
    }
    error = out_file_commit(&out);
    return error ? refuse("report: %s: %s", path, strerror(error)) : NULL;
}

int64_t cap_report_plan_bytes(const colo_plan_config_t *plan, int32_t world, colo_pass_t pass)
{
    int64_t total = 0;

    for (int32_t rank = 0; rank < world; rank++) {
        colo_plan_t *p = NULL;
        colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};
        if (colo_plan_create(&p, plan, rank) < 0)
            return -1;
        (void)colo_plan_bytes(p, pass, &bytes);
        total += bytes.recv;
        colo_plan_destroy(&p);
    }
    return total;
}
