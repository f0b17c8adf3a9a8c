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

static bool at_end(const reader_t *reader)
{
    return reader->pos == reader->len;
}

static bool sees(const reader_t *reader, char c)
{
    return reader->pos < reader->len && reader->text[reader->pos] == c;
}

/* "byte N: <why>, found '...'" */
static colo_status_t stop(const reader_t *reader, size_t pos, const char *why)
{
    COLO_FAIL_IF(pos == reader->len, COLO_ERR_ARG, "grid spec, byte %zu: %s, found the end", pos,
                 why);
    char text[128];
    snprintf(text, sizeof text, "%s%s", reader->text[pos] == ' ' ? "no spaces: " : "", why);
    return colo_fail(COLO_ERR_ARG, "grid spec, byte %zu: %s, found '%s'", pos, text,
                     COLO_QUOTED(reader->text + pos, reader->len - pos));
}

/* A rule of dims.c was broken by what begins at @pos. */
static colo_status_t broken(colo_status_t st, size_t pos)
{
    return st < 0 ? colo_fail_prefix(st, "grid spec, byte %zu", pos) : st;
}

static colo_status_t read_number(reader_t *reader, const char *what, int64_t *value)
{
    size_t begin = reader->pos;
    char why[64];
    int64_t number = 0;
    while (!at_end(reader) && colo_is_digit(reader->text[reader->pos])) {
        if (!colo_mul_ok(number, 10, &number) ||
            !colo_add_ok(number, reader->text[reader->pos] - '0', &number)) {
            snprintf(why, sizeof why, "the %s does not fit in 63 bits", what);
            return stop(reader, begin, why);
        }
        reader->pos++;
    }
    if (reader->pos == begin) {
        snprintf(why, sizeof why, "expected a decimal %s", what);
        return stop(reader, begin, why);
    }
    if (reader->text[begin] == '0' && reader->pos - begin > 1) {
        snprintf(why, sizeof why, "the %s has a leading zero", what);
        return stop(reader, begin, why);
    }
    *value = number;
    return COLO_OK;
}

/* One "tp=2" or "tp2". */
static colo_status_t read_dim(reader_t *reader, colo_grid_t *grid)
{
    size_t begin = reader->pos, end;
    int64_t extent;
    while (!at_end(reader) && colo_is_name_byte(reader->text[reader->pos]))
        reader->pos++;
    end = reader->pos;
    if (grid->ndims == 0)
        reader->assign = sees(reader, '=');
    if (end == begin && !sees(reader, '='))
        return stop(reader, begin,
                    grid->ndims ? "empty part, expected a dim name"
                                : "no dims, expected a dim name");
    if (reader->assign) {
        COLO_TRY(broken(colo_grid_add_name(grid, reader->text + begin, end - begin), begin));
        if (!sees(reader, '='))
            return stop(reader, reader->pos, "expected '=' after a dim name");
        reader->pos++;
    } else {
        if (sees(reader, '='))
            return stop(reader, reader->pos,
                        "'=' in a spec that began without, one style per string");
        while (end > begin && colo_is_digit(reader->text[end - 1]))
            end--;
        COLO_TRY(broken(colo_grid_add_name(grid, reader->text + begin, end - begin), begin));
        reader->pos = end;
    }
    size_t number = reader->pos;
    COLO_TRY(read_number(reader, "extent", &extent));
    return broken(colo_grid_add_extent(grid, extent), number);
}

colo_status_t colo_grid_parse_n(colo_grid_t *grid, const char *spec, size_t len, int64_t world)
{
    colo_grid_t made;
    reader_t reader = {.text = spec, .len = len};
    int64_t offset = 0;
    COLO_FAIL_IF(!grid || !spec, COLO_ERR_ARG, "grid spec, byte 0: the %s is NULL",
                 grid ? "text" : "output");
    colo_grid_start(&made);
    for (;;) {
        COLO_TRY(read_dim(&reader, &made));
        if (!sees(&reader, reader.assign ? ',' : '-'))
            break;
        reader.pos++;
    }
    if (sees(&reader, '@')) {
        reader.pos++;
        COLO_TRY(read_number(&reader, "rank offset", &offset));
        if (!at_end(&reader))
            return stop(&reader, reader.pos, "expected the end after the rank offset");
    }
    if (!at_end(&reader))
        return stop(&reader, reader.pos,
                    reader.assign ? "expected ',', '@' or the end"
                                  : "expected '-', '@' or the end");
    COLO_TRY(broken(colo_grid_finish(&made, offset, world), reader.pos));
    *grid = made;
    return COLO_OK;
}

colo_status_t colo_grid_parse(colo_grid_t *grid, const char *spec, int64_t world)
{
    return colo_grid_parse_n(grid, spec, spec ? strlen(spec) : 0, world);
}

/* ---- printing ---- */

size_t colo_grid_print(const colo_grid_t *grid, char *text, size_t cap)
{
    colo_text_t out = {.data = text, .cap = text ? cap : 0};
    if (out.cap > 0)
        text[0] = '\0';
    for (int32_t i = 0; grid && i < grid->ndims && i < COLO_DIMS_MAX; i++)
        colo_put(&out, "%s%s=%lld", i ? "," : "", grid->name[i], (long long)grid->extent[i]);
    if (grid && grid->offset != 0)
        colo_put(&out, "@%lld", (long long)grid->offset);
    return out.len;
}
