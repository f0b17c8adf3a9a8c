/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spec.c - grids as text: "tp=2,cp=2,dp=2", "tp2-cp2-dp2", either with "@8" for a rank offset.
 *
 *   spec   = list [ "@" number ]
 *   list   = name "=" number { "," name "=" number }  |  name number { "-" name number }
 *   number = "0" | [1-9][0-9]*
 *
 * Strict, because a layout that was misread still trains, only wrongly: no spaces, no signs, no
 * leading zeros, no empty parts, no mixing of the two styles, no letter after a digit in a name. In
 * the second style the digits at the end of a part are the extent, so a name that ends in a digit
 * needs the first style. Reading stops
 * at the first broken rule and every error message begins with the byte it stopped at. Input is
 * bytes with a length: NULs, UTF-8 and megabytes are ordinary wrong input.
 */
#include "grid/dims.h"

#include "core/error.h"

#include <stdio.h>
#include <string.h>

typedef struct reader {
    const char *text;
    size_t len, pos;
    bool assign; /* the style: "tp=2," */
} reader_t;

static bool at_end(const reader_t *r)
{
    return r->pos == r->len;
}

static bool sees(const reader_t *r, char c)
{
    return r->pos < r->len && r->text[r->pos] == c;
}

/* "byte N: <why>, found '...'" */
static colo_status_t stop(const reader_t *r, size_t pos, const char *why)
{
    char q[COLO_QUOTE_MAX];
    COLO_FAIL_IF(pos == r->len, COLO_ERR_ARG, "grid spec, byte %zu: %s, found the end", pos, why);
    char text[128];
    snprintf(text, sizeof text, "%s%s", r->text[pos] == ' ' ? "no spaces: " : "", why);
    return colo_fail(COLO_ERR_ARG, "grid spec, byte %zu: %s, found '%s'", pos, text,
                     colo_grid_i_quote(q, r->text + pos, r->len - pos));
}

/* A rule of dims.c was broken by what begins at @pos. */
static colo_status_t broken(colo_status_t st, size_t pos)
{
    return st < 0 ? colo_fail_prefix(st, "grid spec, byte %zu", pos) : st;
}

static colo_status_t read_number(reader_t *r, const char *what, int64_t *value)
{
    size_t begin = r->pos;
    char why[64];
    int64_t v = 0;
    while (!at_end(r) && colo_is_digit(r->text[r->pos])) {
        if (!colo_mul_ok(v, 10, &v) || !colo_add_ok(v, r->text[r->pos] - '0', &v)) {
            snprintf(why, sizeof why, "the %s does not fit in 63 bits", what);
            return stop(r, begin, why);
        }
        r->pos++;
    }
    if (r->pos == begin) {
        snprintf(why, sizeof why, "expected a decimal %s", what);
        return stop(r, begin, why);
    }
    if (r->text[begin] == '0' && r->pos - begin > 1) {
        snprintf(why, sizeof why, "the %s has a leading zero", what);
        return stop(r, begin, why);
    }
    *value = v;
    return COLO_OK;
}

/* One "tp=2" or "tp2". */
static colo_status_t read_dim(reader_t *r, colo_grid_t *grid)
{
    size_t begin = r->pos, end;
    int64_t extent;
    while (!at_end(r) && colo_is_name_byte(r->text[r->pos]))
        r->pos++;
    end = r->pos;
    if (grid->ndims == 0)
        r->assign = sees(r, '=');
    if (end == begin && !sees(r, '='))
        return stop(r, begin,
                    grid->ndims ? "empty part, expected a dim name"
                                : "no dims, expected a dim name");
    if (r->assign) {
        COLO_TRY(broken(colo_grid_i_name(grid, r->text + begin, end - begin), begin));
        if (!sees(r, '='))
            return stop(r, r->pos, "expected '=' after a dim name");
        r->pos++;
    } else {
        if (sees(r, '='))
            return stop(r, r->pos, "'=' in a spec that began without, one style per string");
        while (end > begin && colo_is_digit(r->text[end - 1]))
            end--;
        COLO_TRY(broken(colo_grid_i_name(grid, r->text + begin, end - begin), begin));
        r->pos = end;
    }
    size_t number = r->pos;
    COLO_TRY(read_number(r, "extent", &extent));
    return broken(colo_grid_i_extent(grid, extent), number);
}

colo_status_t colo_grid_parse_n(colo_grid_t *grid, const char *spec, size_t len, int64_t world)
{
    colo_grid_t g;
    reader_t r = {.text = spec, .len = len};
    int64_t offset = 0;
    COLO_FAIL_IF(!grid || !spec, COLO_ERR_ARG, "grid spec, byte 0: the %s is NULL",
                 grid ? "text" : "output");
    colo_grid_i_start(&g);
    for (;;) {
        COLO_TRY(read_dim(&r, &g));
        if (!sees(&r, r.assign ? ',' : '-'))
            break;
        r.pos++;
    }
    if (sees(&r, '@')) {
        r.pos++;
        COLO_TRY(read_number(&r, "rank offset", &offset));
        if (!at_end(&r))
            return stop(&r, r.pos, "expected the end after the rank offset");
    }
    if (!at_end(&r))
        return stop(&r, r.pos,
                    r.assign ? "expected ',', '@' or the end" : "expected '-', '@' or the end");
    COLO_TRY(broken(colo_grid_i_finish(&g, offset, world), r.pos));
    *grid = g;
    return COLO_OK;
}

colo_status_t colo_grid_parse(colo_grid_t *grid, const char *spec, int64_t world)
{
    return colo_grid_parse_n(grid, spec, spec ? strlen(spec) : 0, world);
}

/* ---- printing ---- */

typedef struct writer {
    char *text;
    size_t cap, n; /* n counts what there was no room for, too */
} writer_t;

static void put(writer_t *w, const char *s)
{
    for (; *s; s++, w->n++)
        if (w->n + 1 < w->cap)
            w->text[w->n] = *s;
}

static void put_number(writer_t *w, int64_t v)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)v);
    put(w, digits);
}

size_t colo_grid_print(const colo_grid_t *grid, char *text, size_t cap)
{
    writer_t w = {.text = text, .cap = text ? cap : 0};
    for (int32_t i = 0; grid && i < grid->ndims && i < COLO_MAX_DIMS; i++) {
        put(&w, i ? "," : "");
        put(&w, grid->name[i]);
        put(&w, "=");
        put_number(&w, grid->extent[i]);
    }
    if (grid && grid->offset != 0) {
        put(&w, "@");
        put_number(&w, grid->offset);
    }
    if (w.cap > 0)
        text[w.n < w.cap ? w.n : w.cap - 1] = '\0';
    return w.n;
}
