/* SPDX-License-Identifier: Apache-2.0 */
/*
 * svg.h - what all pictures share: text as markup, numbers for people, colours, and a page of
 * panels, two side by side. Public headers and the C library only; the captioner's report uses it,
 * too.
 */
#ifndef TOOLS_SVG_H
#define TOOLS_SVG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <colobridge/grid.h>

/* "tp=2,dp=4": the spec without dims of extent 1 */
void svg_grid(FILE *f, const colo_grid_t *grid);
/* "96 B", "24 KiB", "1.5 MiB"; returns text */
const char *svg_bytes(double bytes, char text[32]);
/* "1,234,567"; returns text */
const char *svg_count(int64_t n, char text[32]);

enum { SVG_PANEL = 344, SVG_MARGIN = 8, SVG_PANELS_MAX = 32, SVG_LINE = 17, SVG_COLUMNS = 54 };

/* One panel: draw() writes it with its corner at 0, 0, SVG_PANEL wide, and returns its height. */
typedef int (*svg_draw_fn)(FILE *f, const void *what);
typedef struct svg_panel {
    svg_draw_fn draw;
    const void *what;
} svg_panel_t;

typedef struct svg_page {
    const char *title;  /* one line, bold */
    const char *label;  /* for readers that cannot see it */
    char line[12][400]; /* below the title */
    int nlines;
    svg_panel_t panel[SVG_PANELS_MAX];
    int npanels;
} svg_page_t;

void svg_add_line(svg_page_t *page, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void svg_add_panel(svg_page_t *page, svg_draw_fn draw, const void *what);
/* Writes the page to the file @path, which appears whole or not at all. 0, or an errno. */
int svg_page(const svg_page_t *page, const char *path);

/* Markup: printf(), in whose @fmt ' stands for ", and what %s brings is text: <, >, &, quotes as
 * entities, control bytes and broken UTF-8 as \xNN. Of %s no width. Takes %d, %lld, %g, %f, %%,
 * too. */
void svg_put(FILE *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* What pictures are made of; numbers with one decimal. @class: words that svg.c knows. */
void svg_say(FILE *f, const char *class, double x, double y, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
void svg_rect(FILE *f, const char *class, double x, double y, double width, double height);
void svg_line(FILE *f, const char *class, double x1, double y1, double x2, double y2);

/* @text as a line, narrowed to @width if it has more than @most bytes */
void svg_fit(FILE *f, const char *class, int x, int y, size_t most, int width, const char *text);
/* A bar of a chart, @width of @widest; @best: in another colour */
void svg_bar(FILE *f, int x, int y, int widest, double width, bool best);

/* @text in lines of at most @columns characters from @y on. Returns the y of the last line. */
int svg_lines(FILE *f, const char *text, const char *class, size_t columns, int y);

#endif
