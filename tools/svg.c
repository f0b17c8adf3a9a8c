/* SPDX-License-Identifier: Apache-2.0 */
/*
 * svg.c - markup, and the page.
 *
 * A page is a picture of a fixed size, two panels wide, in dark ink on white, whatever shows it: a
 * browser, librsvg, a page around it. So it has neither style sheet nor query: when it is written,
 * each element gets what its class means as attributes. Panels are drawn before, so that their
 * heights are known.
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
            "<rect class='%s' x='%d' y='%d' width='%.1f' height='14' rx='3'/>",
            x, y, widest, best ? "best" : "bar", x, y, width);
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

enum { GAP = 26, ACROSS = 40 };
#define INK "#1b1f24"
#define DIM "#59636e"
#define LINE "#c4cdd6"
#define CARD "#f6f8fa"

/* What the words of a class mean; text is DIM, if its class does not say otherwise. No element has
 * two that say the same attribute. */
static const struct {
    const char *word, *attributes;
} looks[] = {
    {"title", "font-size='15' font-weight='700' fill='" INK "'"},
    {"head2", "font-size='13' font-weight='600' fill='" INK "'"},
    {"strong", "fill='" INK "'"},
    {"good", "fill='#1a7f37' font-weight='600'"},
    {"owner", "font-size='10' text-anchor='middle'"},
    {"name", "font-size='11' text-anchor='middle' fill='#ffffff'"},
    {"track", "fill='" CARD "'"},
    {"bar", "fill='#0b66c3'"},
    {"best", "fill='#1a7f37'"},
    {"chunk", "fill='" INK "' stroke='#ffffff'"},
    {"cut", "stroke='" INK "' stroke-width='1.2'"},
    {"rule", "stroke='" LINE "' stroke-width='.5'"},
    {"limit", "stroke='" INK "' stroke-width='2.6' fill='none'"},
    {"seg", "stroke='#ffffff' stroke-width='.7'"},
    {"grey", "fill='" DIM "'"},
    {"faded", "opacity='.28'"},
    {"ribbon", "opacity='.25'"},
    {"cell", "fill='" CARD "' stroke='" LINE "' text-anchor='middle'"},
    {"none", "opacity='.55' stroke-dasharray='4 3'"},
    {"rank", "fill='" INK "' stroke='none' font-weight='600'"},
    {"at", "fill='" DIM "' stroke='none'"},
    {"side", "text-anchor='middle'"},
    {"flow", "fill='none'"},
    {"thin", "stroke-opacity='.75'"},
    {"own", "fill='none' stroke='" DIM "' stroke-dasharray='3 3' stroke-opacity='.7'"},
    {"label", "font-size='11' stroke='#ffffff' stroke-width='3' stroke-opacity='1' "
              "stroke-dasharray='none' paint-order='stroke'"},
    {"head", "stroke='none'"},
    {"part", "stroke='" LINE "' stroke-width='2' stroke-dasharray='1 4' stroke-linecap='round'"},
};

/* The colours of the classes h0 to h5. Arrows are drawn in them, all else is filled. */
static const char *const hues[] = {"#2464a8", "#a86224", "#24a866",
                                   "#a8245b", "#5b24a8", "#a88e24"};

/* The attributes of the words of @class, @len bytes. */
static void put_looks(FILE *f, const char *class, size_t len)
{
    const bool arrow = len >= 4 && memcmp(class, "flow", 4) == 0;
    for (size_t n; len > 0; class += n, len -= n) {
        n = strcspn(class, " \"");
        for (size_t i = 0; i < sizeof looks / sizeof looks[0]; i++) {
            const bool is = strlen(looks[i].word) == n && memcmp(class, looks[i].word, n) == 0;
            fputs(is ? " " : "", f);
            for (const char *s = looks[i].attributes; is && *s; s++)
                fputc(*s == '\'' ? '"' : *s, f);
        }
        if (n == 2 && class[0] == 'h' && class[1] >= '0' && class[1] < '6')
            svg_put(f, " %s='%s'", arrow ? "stroke" : "fill", hues[class[1] - '0']);
        n += n < len;
    }
}

/* @markup, whose values have no < and >; what a class means stands behind an element's attributes.
 */
static void put_markup(FILE *f, const char *markup)
{
    static const char attribute[] = " class=\"";
    while (*markup) {
        const size_t end = strcspn(markup, ">"), slash = end > 0 && markup[end - 1] == '/';
        fwrite(markup, 1, end - slash, f);
        const char *class = memmem(markup, end, attribute, sizeof attribute - 1);
        if (class) {
            class += sizeof attribute - 1;
            put_looks(f, class, strcspn(class, "\""));
        }
        markup += end - slash;
        for (size_t i = 0; i <= slash && *markup; i++)
            fputc(*markup++, f);
    }
}

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

static int page_width(const svg_page_t *page)
{
    return page->npanels > 1 ? 2 * SVG_PANEL + ACROSS : SVG_PANEL;
}

/* The lines above the panels. */
static int draw_top(FILE *f, const void *what)
{
    const svg_page_t *page = what;
    const size_t width = (size_t)page_width(page);
    int y = svg_lines(f, page->title, "title", 35 * width / SVG_PANEL, 0);
    for (int i = 0; i < page->nlines; i++)
        y = svg_lines(f, page->line[i], "text", SVG_COLUMNS * width / SVG_PANEL, y + (i ? 2 : 4));
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
    const int width = page_width(p) + 2 * SVG_MARGIN;
    int at[SVG_PANELS_MAX], y = height[0];
    for (int i = 0; i < p->npanels; i += 2) {
        const int right = i + 1 < p->npanels ? height[i + 2] : 0;
        at[i] = at[i + 1 < p->npanels ? i + 1 : i] = y;
        y += (height[i + 1] > right ? height[i + 1] : right) + GAP;
    }
    y += 2 * SVG_MARGIN - (p->npanels > 0 ? GAP : 0);
    svg_put(f,
            "<svg xmlns='http://www.w3.org/2000/svg' width='%d' height='%d' viewBox='0 0 %d %d' "
            "role='img' aria-label='%s' font-size='12' "
            "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'>\n"
            "<title>%s</title>\n<rect width='%d' height='%d' fill='#ffffff'/>\n"
            "<g transform='translate(%d %d)' fill='" DIM "'>\n",
            width, y, width, y, p->label, p->title, width, y, SVG_MARGIN, SVG_MARGIN);
    put_markup(f, text[0]);
    for (int i = 0; i < p->npanels; i++) {
        svg_put(f, "<g class='panel' transform='translate(%d %d)'>\n",
                i % 2 ? SVG_PANEL + ACROSS : 0, at[i]);
        put_markup(f, text[i + 1]);
        fputs("</g>\n", f);
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
