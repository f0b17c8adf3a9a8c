/* SPDX-License-Identifier: Apache-2.0 */
/* bars.c - see bars.h. */
#include "bars.h"

#include <stdarg.h>
#include <string.h>

const char bars_style[] =
    ".seg{fill:hsl(var(--h) 60% var(--l));stroke:var(--bg);stroke-width:.7}"
    ".faded{opacity:.28}.ribbon{fill:hsl(var(--h) 60% var(--l));opacity:.25}\n"
    "svg .name{fill:var(--bg);font-size:11px;text-anchor:middle}"
    "svg .owner{font-size:10px;text-anchor:middle}\n"
    ".chunk{fill:var(--fg);stroke:var(--bg)}.cut{stroke:var(--fg);stroke-width:1.2}"
    ".grey{fill:var(--dim)}\n";

bars_span_t bars_span(int64_t length, int64_t offset, int64_t count)
{
    const double per = length > 0 ? (double)SVG_PANEL / (double)length : 0;
    return (bars_span_t){(double)offset * per, (double)count * per};
}

void bars_track(FILE *f, bars_span_t at, double y)
{
    svg_rect(f, "track", at.x, y, at.width, BAR);
}

void bars_owner(FILE *f, double shade, bars_span_t at, double y, const char *name)
{
    svg_put(f, "<g fill-opacity='%.2f'>", shade);
    svg_rect(f, "chunk", at.x, y, at.width, STRIP);
    fputs("</g>", f);
    if (at.width > 6 * (double)strlen(name) + 2)
        svg_say(f, "owner", at.x + at.width / 2, y + STRIP - 4, "%s", name);
}

void bars_box(FILE *f, int64_t hue, bool faded, bars_span_t at, double y, double height,
              const char *fmt, ...)
{
    char class[32], name[64];
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    if (hue < 0)
        snprintf(class, sizeof class, "seg grey%s", faded ? " faded" : "");
    else
        snprintf(class, sizeof class, "seg h%d%s", (int)(hue % 6), faded ? " faded" : "");
    svg_rect(f, class, at.x, y, at.width, height);
    if (height >= BAR && at.width > 7 * n + 2)
        svg_say(f, "name", at.x + at.width / 2, y + height - 5, "%s", name);
}

void bars_cut(FILE *f, int64_t length, int64_t offset, double y)
{
    const double x = bars_span(length, offset, 0).x;
    svg_line(f, "cut", x, y - 2, x, y + BAR + 2);
}

void bars_ribbon(FILE *f, int64_t hue, bars_span_t from, double y0, bars_span_t to, double y1)
{
    svg_put(f, "<path class='ribbon %s%d' d='M%.1f %.1fL%.1f %.1fL%.1f %.1fL%.1f %.1fZ'/>\n",
            hue < 0 ? "grey h" : "h", (int)(hue < 0 ? 0 : hue % 6), from.x, y0, from.x + from.width,
            y0, to.x + to.width, y1, to.x, y1);
}

int64_t bars_at_most(int64_t n, int64_t most)
{
    return n < most ? n : most;
}

int64_t bars_longest(const int64_t *length, int64_t n)
{
    int64_t most = 0;
    for (int64_t q = 0; q < n; q++)
        most = length[q] > most ? length[q] : most;
    return most;
}

double bars_left_out(FILE *f, double y, int64_t n, const char *what)
{
    if (n <= 0)
        return y;
    svg_say(f, "text", 0, y + 12, "%lld more %s are not drawn.", (long long)n, what);
    return y + SVG_LINE;
}

const char *bars_ranks(char out[48], int64_t *first, const plan_ask_t *ask,
                       const colo_layout_t *layout, int64_t dp, int64_t cp)
{
    enum { NAMED = 4 };
    const int32_t d = colo_grid_dim(&layout->grid, "dp"), k = colo_grid_dim(&layout->grid, "cp");
    int named = 0;
    size_t n = 0;
    if (first)
        *first = cp;
    for (int64_t r = ask->first; ask->world <= PLAN_PART_MAX && r < ask->world; r++) {
        int64_t x[COLO_MAX_DIMS];
        if (!colo_layout_holds(layout, r) || colo_grid_coords(&layout->grid, r, x) != COLO_OK ||
            (d >= 0 && x[d] != dp) || (k >= 0 && cp >= 0 && x[k] != cp))
            continue;
        if (first && named == 0)
            *first = r;
        if (named++ < NAMED)
            n += (size_t)snprintf(out + n, 48 - n, "%s%lld", n ? "," : "", (long long)r);
    }
    if (named == 0 || named > NAMED)
        snprintf(out, 48, cp < 0 ? "all" : "cp %lld", (long long)cp);
    return out;
}
