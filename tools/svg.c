/* SPDX-License-Identifier: Apache-2.0 */
/*
 * svg.c - markup, and the page.
 *
 * A page has no viewBox: its units are the reader's pixels, so that text of 12 px is 12 px on a
 * phone. Panels are 344 wide, which fits the narrowest phones in use. A media query moves every
 * second panel to the right and enlarges all of it if there is space; panels are drawn before the
 * page is written, so their heights are known, both arrangements are plain numbers and no script is
 * needed. Inside an <img> the query sees the image's own width, and the narrow arrangement is the
 * natural one.
 */
#include "svg.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "out-file.h"

/* ---- text ---- */

/* Length of the UTF-8 sequence at @s, 0 when it is none (also overlong, surrogates, > 10FFFF). */
static int utf8_length(const unsigned char *s)
{
    static const uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    int n = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
    if (n <= 1)
        return n;
    uint32_t c = s[0] & (0x7fu >> n);
    for (int i = 1; i < n; i++) {
        if (s[i] >> 6 != 2)
            return 0;
        c = c << 6 | (s[i] & 0x3fu);
    }
    return c < smallest[n] || c > 0x10ffff || c >> 11 == 27 ? 0 : n;
}

static void put_text(FILE *f, const char *text)
{
    static const char special[] = "&<>\"'";
    static const char *const entity[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    const unsigned char *s = (const unsigned char *)text;

    while (*s) {
        int n = utf8_length(s);
        bool c1 = n == 2 && s[0] == 0xc2 && s[1] < 0xa0; /* control characters of Latin-1 */
        if (n == 0 || c1 || (n == 1 && (*s < ' ' || *s == 127))) {
            fprintf(f, "\\x%02x", *s++);
            continue;
        }
        const char *sign = strchr(special, *s);
        if (sign)
            fputs(entity[sign - special], f);
        else
            fwrite(s, 1, (size_t)n, f);
        s += n;
    }
}

/* One conversion of @fmt; returns what follows it. */
static const char *put_value(FILE *f, const char *fmt, va_list *args)
{
    char one[16];
    size_t n = 1 + strspn(fmt + 1, "+-.*0123456789");
    const bool wide = fmt[n] == 'l';
    n += wide ? 3 : 1;
    snprintf(one, sizeof one, "%.*s", (int)n, fmt);
    const int places = strchr(one, '*') ? va_arg(*args, int) : 0;
    const char kind = one[n - 1];
    if (kind == 's')
        put_text(f, va_arg(*args, const char *));
    else if (kind == '%')
        fputc('%', f);
    else if (wide)
        fprintf(f, one, va_arg(*args, long long));
    else if (kind == 'd')
        fprintf(f, one, va_arg(*args, int));
    else if (strchr(one, '*'))
        fprintf(f, one, places, va_arg(*args, double));
    else
        fprintf(f, one, va_arg(*args, double));
    return fmt + n;
}

void svg_put(FILE *f, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    while (*fmt)
        if (*fmt == '%')
            fmt = put_value(f, fmt, &args);
        else
            fputc(*fmt == '\'' ? '"' : *fmt, f), fmt++;
    va_end(args);
}

void svg_say(FILE *f, const char *class, double x, double y, const char *fmt, ...)
{
    char text[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    svg_put(f, "<text class='%s' x='%.1f' y='%.1f'>%s</text>\n", class, x, y, text);
}

void svg_rect(FILE *f, const char *class, double x, double y, double width, double height)
{
    svg_put(f, "<rect class='%s' x='%.1f' y='%.1f' width='%.1f' height='%.1f'/>\n", class, x, y,
            width, height);
}

void svg_line(FILE *f, const char *class, double x1, double y1, double x2, double y2)
{
    svg_put(f, "<line class='%s' x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f'/>\n", class, x1, y1, x2,
            y2);
}

void svg_fit(FILE *f, const char *class, int x, int y, size_t most, int width, const char *text)
{
    svg_put(f, "<text class='%s' x='%d' y='%d'", class, x, y);
    if (strlen(text) > most)
        svg_put(f, " textLength='%d' lengthAdjust='spacingAndGlyphs'", width);
    svg_put(f, ">%s</text>", text);
}

void svg_bar(FILE *f, int x, int y, int widest, double width, bool best)
{
    svg_put(f,
            "<rect class='track' x='%d' y='%d' width='%d' height='14' rx='3'/>"
            "<rect class='bar%s' x='%d' y='%d' width='%.1f' height='14' rx='3'/>",
            x, y, widest, best ? " best" : "", x, y, width);
}

void svg_grid(FILE *f, const colo_grid_t *grid)
{
    bool any = false;

    for (int32_t d = 0; d < grid->ndims; d++) {
        if (grid->extent[d] == 1)
            continue;
        fprintf(f, "%s%s=%lld", any ? "," : "", grid->name[d], (long long)grid->extent[d]);
        any = true;
    }
    if (!any)
        fputs("one rank", f);
    if (grid->offset)
        fprintf(f, "@%lld", (long long)grid->offset);
}

const char *svg_bytes(double bytes, char text[32])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int u = 0;
    while (bytes >= 1024.0 && u < 5) {
        bytes /= 1024.0;
        u++;
    }
    snprintf(text, 32, bytes == floor(bytes) ? "%.0f %s" : "%.1f %s", bytes, unit[u]);
    return text;
}

const char *svg_count(int64_t n, char text[32])
{
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%lld", (long long)n), out = 0;
    for (int i = 0; i < len; i++) {
        text[out++] = digits[i];
        if (digits[i] != '-' && i < len - 1 && (len - 1 - i) % 3 == 0)
            text[out++] = ',';
    }
    text[out] = 0;
    return text;
}

/* ---- the page ---- */

const char svg_layout_style[] =
    ".cell rect{fill:var(--card);stroke:var(--line)}.cell text,.side text{text-anchor:middle}\n"
    "svg .cell .rank{fill:var(--fg);font-weight:600}.none{opacity:.55}"
    ".none rect{stroke-dasharray:4 3}\n"
    ".flow path,.own path{fill:none;stroke-width:1.6}"
    ".own path{stroke:var(--dim);stroke-dasharray:3 3;opacity:.7}\n"
    "svg .flow text,svg .own text{font-size:11px;fill:var(--fg);stroke:var(--bg);stroke-width:3px;"
    "paint-order:stroke}svg .own text{fill:var(--dim)}\n"
    ".flow .head{stroke:none}.thin path{stroke-width:.8;opacity:.75}.thin .head{opacity:1}\n"
    ".far path{stroke-width:3.4}.thin.far path{stroke-width:1.8}\n"
    ".h0{--h:211}.h1{--h:28}.h2{--h:150}.h3{--h:335}.h4{--h:265}.h5{--h:48}\n"
    ".flow path{stroke:hsl(var(--h) 65% var(--l))}.flow .head{fill:hsl(var(--h) 65% var(--l))}\n"
    ".part{stroke:var(--line);stroke-dasharray:1 4;stroke-linecap:round;stroke-width:2}\n";

static const char page_style[] =
    ":root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#c4cdd6;"
    "--card:#f6f8fa;--accent:#0b66c3;--good:#1a7f37;--l:40%}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#0f1419;--fg:#e6e9ed;--dim:#a3adb8;"
    "--line:#3b444d;--card:#171d24;--accent:#58a6ff;--good:#4cc26a;--l:68%}}\n"
    "svg{background:var(--bg)}svg text{font:12px system-ui,-apple-system,Segoe "
    "UI,Helvetica,Arial,sans-serif;fill:var(--dim)}\n"
    "svg .title{font-size:15px;font-weight:700;fill:var(--fg)}"
    "svg .head2{font-size:13px;font-weight:600;fill:var(--fg)}\n"
    "svg .strong{fill:var(--fg)}svg .good{fill:var(--good);font-weight:600}\n"
    ".bar{fill:var(--accent)}.bar.best{fill:var(--good)}.track{fill:var(--card)}\n";

/* A blank that may end a line: not the one between a number and its unit. */
static bool may_break(const char *blank)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (*blank != ' ')
        return false;
    size_t n = strcspn(blank + 1, " .,;:");
    for (size_t i = 0; i < sizeof unit / sizeof unit[0]; i++)
        if (n == strlen(unit[i]) && memcmp(blank + 1, unit[i], n) == 0)
            return false;
    return true;
}

/* Bytes of @text that fit a line of @columns characters, broken at blanks where there are any. */
static size_t fitting(const char *text, size_t columns)
{
    size_t n = 0, last = 0;
    for (size_t seen = 0; text[n] && seen < columns; seen++) {
        for (n++; (text[n] & 0xc0) == 0x80; n++)
            ;
        if (may_break(text + n))
            last = n;
    }
    return !text[n] || !last ? n : last;
}

int svg_lines(FILE *f, const char *text, const char *class, size_t columns, int y)
{
    while (*text) {
        size_t n = fitting(text, columns);
        char line[512];
        snprintf(line, sizeof line, "%.*s", (int)n, text);
        y += SVG_LINE;
        svg_put(f, "<text class='%s' x='0' y='%d'>%s</text>\n", class, y, line);
        for (text += n; *text == ' '; text++)
            ;
    }
    return y;
}

void svg_add_line(svg_page_t *page, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(page->line[page->nlines++], sizeof page->line[0], fmt, args);
    va_end(args);
}

void svg_add_panel(svg_page_t *page, svg_draw_fn draw, const void *what)
{
    page->panel[page->npanels++] = (svg_panel_t){draw, what};
}

/* The lines above the panels. */
static int draw_top(FILE *f, const void *what)
{
    const svg_page_t *page = what;
    int y = svg_lines(f, page->title, "title", 35, 0);
    for (int i = 0; i < page->nlines; i++)
        y = svg_lines(f, page->line[i], "text", SVG_COLUMNS, y + (i ? 2 : 4));
    return y + 14;
}

/* What draw() writes, owned by the caller; NULL: no memory. */
static char *drawn(const svg_panel_t *panel, int *height)
{
    char *text = NULL;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (!f)
        return NULL;
    *height = panel->draw(f, panel->what);
    const bool bad = ferror(f);
    if (fclose(f) == 0 && !bad)
        return text;
    free(text);
    return NULL;
}

/* @text: of the top, then of the panels; @height: theirs */
static void put_page(FILE *f, const svg_page_t *p, char *const *text, const int *height)
{
    enum { GAP = 26, ACROSS = 40 };
    int narrow = height[0] + SVG_MARGIN, wide = narrow, row = 0;
    int index[SVG_PANELS_MAX], wide_at[SVG_PANELS_MAX];
    for (int i = 0; i < p->npanels; i++) {
        index[i] = narrow;
        narrow += height[i + 1] + GAP;
        wide_at[i] = wide;
        row = height[i + 1] > row ? height[i + 1] : row;
        if (i % 2 || i + 1 == p->npanels) {
            wide += row + GAP;
            row = 0;
        }
    }
    int width = SVG_PANEL + 2 * SVG_MARGIN, both = 2 * SVG_PANEL + ACROSS + 2 * SVG_MARGIN;
    svg_put(f,
            "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' role='img' "
            "aria-label='%s'>\n<title>%s</title>\n",
            width, narrow, p->label, p->title);
    fprintf(f, "<style>\n%s%s%s", page_style, svg_layout_style, p->style ? p->style : "");
    fprintf(f, "@media(min-width:%dpx){:root{width:%dpx;height:%dpx}\n", both, both, wide);
    for (int i = 0; i < p->npanels; i++)
        fprintf(f, "#p%d{transform:translate(%dpx,%dpx)}", i, i % 2 ? SVG_PANEL + ACROSS : 0,
                wide_at[i]);
    fprintf(f,
            "}\n@media(min-width:%dpx){:root{width:%dpx;height:%dpx}"
            "#page{transform:translate(%dpx,%dpx) scale(1.5)}}\n</style>\n",
            both * 3 / 2, both * 3 / 2, wide * 3 / 2, SVG_MARGIN * 3 / 2, SVG_MARGIN * 3 / 2);
    svg_put(f, "<rect width='100%%' height='100%%' style='fill:var(--bg)'/>\n");
    svg_put(f, "<g id='page' transform='translate(%d %d)'>\n", SVG_MARGIN, SVG_MARGIN);
    fputs(text[0], f);
    for (int i = 0; i < p->npanels; i++) {
        svg_put(f, "<g id='p%d' transform='translate(0 %d)'>\n", i, index[i]);
        fprintf(f, "%s</g>\n", text[i + 1]);
    }
    fputs("</g>\n</svg>\n", f);
}

int svg_page(const svg_page_t *page, const char *path)
{
    const svg_panel_t top = {draw_top, page};
    char *text[1 + SVG_PANELS_MAX];
    int height[1 + SVG_PANELS_MAX], n = 0, error = 0;
    out_file_t out;
    for (; n <= page->npanels && !error; n++) {
        text[n] = drawn(n ? &page->panel[n - 1] : &top, &height[n]);
        error = text[n] ? 0 : ENOMEM;
    }
    error = error ? error : out_file_open(&out, path);
    if (!error) {
        put_page(out.f, page, text, height);
        error = out_file_commit(&out);
    }
    while (n > 0)
        free(text[--n]);
    return error;
}
