/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dims.h (private) - what grid.c, spec.c and hypergrid.c share: adding a dim to a half-built grid,
 * reading a "cp-dp" list, and quoting a caller's bytes in an error message.
 */
#ifndef COLO_GRID_DIMS_H
#define COLO_GRID_DIMS_H

#include <colobridge/grid.h>

/* A grid is built dim by dim, name before extent, so that a parser can say at which byte a rule was
 * broken. start, then (name, extent) per dim, then finish; the grid is usable after finish. */
void colo_grid_start(colo_grid_t *grid);
colo_status_t colo_grid_add_name(colo_grid_t *grid, const char *text, size_t len);
colo_status_t colo_grid_add_extent(colo_grid_t *grid, int64_t extent);
colo_status_t colo_grid_finish(colo_grid_t *grid, int64_t offset, int64_t world);

/* The rule of names, for dims and views alike: 1..15 bytes of [A-Za-z0-9_], no digit first.
 * @what names the thing in the error message ("dim 3", "view"). */
colo_status_t colo_grid_name_rule(const char *what, const char *text, size_t len);

/* A set of dims of one grid. */
typedef struct colo_dims {
    int32_t n;
    int32_t given[COLO_DIMS_MAX]; /* indices in the order of the list */
    bool in[COLO_DIMS_MAX];       /* by index */
} colo_dims_t;

/* The dim of that name, which has no NUL at its end; -1: there is none. */
int32_t colo_grid_find(const colo_grid_t *grid, const char *text, size_t len);
/* "cp-dp" against @grid; @where names the grid in the error message ("the grid", "view 'base'"). */
colo_status_t colo_grid_read_dims(const colo_grid_t *grid, const char *where, const char *list,
                                  colo_dims_t *dims);
void colo_grid_write_key(const colo_grid_t *grid, const colo_dims_t *dims, char key[COLO_KEY_MAX]);

/* Refuses NULL, a grid that was never initialised, and fields that no call of this library sets. */
colo_status_t colo_grid_check(const colo_grid_t *grid);

/* At most 40 bytes of @text, printable ASCII only: other bytes and quotes become \xNN. */
#define COLO_QUOTE_MAX 48
const char *colo_grid_quote(char out[COLO_QUOTE_MAX], const char *text, size_t len);
/* The same up to the NUL; reads no further than it shows. */
const char *colo_grid_quote_str(char out[COLO_QUOTE_MAX], const char *text);
/* Both; the text lives until the end of the enclosing block. */
#define COLO_QUOTED(text, len) colo_grid_quote((char[COLO_QUOTE_MAX]){""}, text, len)
#define COLO_QUOTED_STR(text) colo_grid_quote_str((char[COLO_QUOTE_MAX]){""}, text)

static inline bool colo_is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* ASCII whatever the locale */
static inline bool colo_is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static inline bool colo_is_name_byte(char c)
{
    return colo_is_letter(c) || c == '_' || colo_is_digit(c);
}

#endif
