/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dims.c - the rules that a grid's dims keep, and the lists that name some of them.
 *
 * Every rule is checked here once, wherever the dims come from: a caller's array (grid.c), a spec
 * string (spec.c) or a view (hypergrid.c). A rule's error message names the dim by number and
 * quotes what the caller wrote, shortened and with unprintable bytes escaped: names can come from a
 * network or a file, and an error message ends up in logs.
 */
#include "grid/dims.h"

#include "core/error.h"

#include <stdio.h>
#include <string.h>

#define QUOTE_SHOWN 40

const char *colo_grid_quote(char out[COLO_QUOTE_MAX], const char *text, size_t len)
{
    static const char hex[] = "0123456789abcdef";
    size_t len_out = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char byte = (unsigned char)text[i];
        bool plain = byte >= 0x20 && byte < 0x7f && byte != '\'' && byte != '"' && byte != '\\';
        if (len_out + (plain ? 1 : 4) > QUOTE_SHOWN) {
            memcpy(out + len_out, "...", 3);
            len_out += 3;
            break;
        }
        if (plain) {
            out[len_out++] = (char)byte;
        } else {
            out[len_out++] = '\\';
            out[len_out++] = 'x';
            out[len_out++] = hex[byte >> 4];
            out[len_out++] = hex[byte & 15];
        }
    }
    out[len_out] = '\0';
    return out;
}

const char *colo_grid_quote_str(char out[COLO_QUOTE_MAX], const char *text)
{
    return colo_grid_quote(out, text, strnlen(text, COLO_QUOTE_MAX));
}

colo_status_t colo_grid_name_rule(const char *what, const char *text, size_t len)
{
    COLO_FAIL_IF(len == 0, COLO_ERR_ARG, "%s has an empty name", what);
    COLO_FAIL_IF(len >= COLO_DIM_NAME_MAX, COLO_ERR_ARG,
                 "%s: the name '%s' has %zu bytes, at most %d are allowed", what,
                 COLO_QUOTED(text, len), len, COLO_DIM_NAME_MAX - 1);
    for (size_t i = 0; i < len; i++)
        COLO_FAIL_IF(!colo_is_name_byte(text[i]), COLO_ERR_ARG,
                     "%s: the name '%s' has a byte 0x%02x at %zu, allowed are A-Z a-z 0-9 _", what,
                     COLO_QUOTED(text, len), (unsigned)(unsigned char)text[i], i);
    COLO_FAIL_IF(colo_is_digit(text[0]), COLO_ERR_ARG, "%s: the name '%s' starts with a digit",
                 what, COLO_QUOTED(text, len));
    return COLO_OK;
}

/* ---- building ---- */

int32_t colo_grid_find(const colo_grid_t *grid, const char *text, size_t len)
{
    for (int32_t i = 0; i < grid->ndims && i < COLO_DIMS_MAX; i++)
        if (strlen(grid->name[i]) == len && memcmp(grid->name[i], text, len) == 0)
            return i;
    return -1;
}

void colo_grid_start(colo_grid_t *grid)
{
    memset(grid, 0, sizeof *grid); /* unused entries are 0, so that equal grids have equal bytes */
    grid->size = 1;
}

colo_status_t colo_grid_add_name(colo_grid_t *grid, const char *text, size_t len)
{
    char what[24];
    COLO_FAIL_IF(grid->ndims == COLO_DIMS_MAX, COLO_ERR_ARG, "grid: more than %d dims",
                 COLO_DIMS_MAX);
    snprintf(what, sizeof what, "grid: dim %d", (int)grid->ndims);
    COLO_TRY(colo_grid_name_rule(what, text, len));
    /* "tp1dp4" with its separator forgotten would be one dim that splits nothing. */
    for (size_t i = 1; i < len; i++)
        COLO_FAIL_IF(colo_is_digit(text[i - 1]) && colo_is_letter(text[i]), COLO_ERR_ARG,
                     "%s: the name '%s' has a letter after a digit at %zu; put ',' or '-' "
                     "between dims: tp=1,dp=4 or tp1-dp4",
                     what, COLO_QUOTED(text, len), i);
    const int32_t same = colo_grid_find(grid, text, len);
    COLO_FAIL_IF(same >= 0, COLO_ERR_ARG, "%s: duplicate dim name '%s', already dim %d", what,
                 COLO_QUOTED(text, len), (int)same);
    memset(grid->name[grid->ndims], 0, COLO_DIM_NAME_MAX);
    memcpy(grid->name[grid->ndims], text, len);
    return COLO_OK;
}

colo_status_t colo_grid_add_extent(colo_grid_t *grid, int64_t extent)
{
    int32_t i = grid->ndims;
    int64_t size;
    COLO_FAIL_IF(extent <= 0, COLO_ERR_ARG,
                 "grid: dim %d '%s' has extent %lld, expected at least 1", (int)i, grid->name[i],
                 (long long)extent);
    COLO_FAIL_IF(!colo_mul_ok(grid->size, extent, &size), COLO_ERR_ARG,
                 "grid: the product of extents overflows 63 bits at dim %d '%s': %lld x %lld",
                 (int)i, grid->name[i], (long long)grid->size, (long long)extent);
    grid->extent[i] = extent;
    grid->stride[i] = grid->size;
    grid->size = size;
    grid->ndims = i + 1;
    return COLO_OK;
}

colo_status_t colo_grid_finish(colo_grid_t *grid, int64_t offset, int64_t world)
{
    int64_t end;
    COLO_FAIL_IF(grid->ndims == 0, COLO_ERR_ARG, "grid: no dims, expected 1 to %d", COLO_DIMS_MAX);
    COLO_FAIL_IF(offset < 0, COLO_ERR_ARG,
                 "grid: rank offset %lld is negative, must be non-negative", (long long)offset);
    COLO_FAIL_IF(world < 0, COLO_ERR_ARG,
                 "grid: a world of %lld ranks, expected 0 (unknown) or more", (long long)world);
    COLO_FAIL_IF(!colo_add_ok(offset, grid->size, &end), COLO_ERR_ARG,
                 "grid: rank offset %lld + size %lld overflows 63 bits", (long long)offset,
                 (long long)grid->size);
    COLO_FAIL_IF(world > 0 && end > world, COLO_ERR_ARG,
                 "grid: size %lld is over sized: a world of %lld ranks has %lld from rank "
                 "offset %lld on",
                 (long long)grid->size, (long long)world,
                 (long long)(world > offset ? world - offset : 0), (long long)offset);
    grid->offset = offset;
    return COLO_OK;
}

colo_status_t colo_grid_check(const colo_grid_t *grid)
{
    int64_t size = 1, end;
    COLO_FAIL_IF(!grid, COLO_ERR_ARG,
                 "grid: the grid is NULL, expected what colo_grid_init() made");
    COLO_FAIL_IF(grid->ndims < 1 || grid->ndims > COLO_DIMS_MAX, COLO_ERR_ARG,
                 "grid: not initialised (%d dims, expected 1..%d)", (int)grid->ndims,
                 COLO_DIMS_MAX);
    for (int32_t i = 0; i < grid->ndims; i++) {
        int64_t stride = size;
        COLO_FAIL_IF(grid->extent[i] < 1 || grid->stride[i] != stride ||
                         !colo_mul_ok(size, grid->extent[i], &size) ||
                         !memchr(grid->name[i], '\0', sizeof grid->name[i]),
                     COLO_ERR_ARG,
                     "grid: dim %d '%.*s' was not made by this library: found extent %lld "
                     "and stride %lld, expected an extent of at least 1 and stride %lld; "
                     "make the grid with colo_grid_init() or colo_grid_parse()",
                     (int)i, COLO_DIM_NAME_MAX - 1, grid->name[i], (long long)grid->extent[i],
                     (long long)grid->stride[i], (long long)stride);
    }
    COLO_FAIL_IF(grid->size != size || grid->offset < 0 || !colo_add_ok(grid->offset, size, &end),
                 COLO_ERR_ARG,
                 "grid: it was not made by this library: found size %lld and rank offset "
                 "%lld, expected size %lld and an offset of at least 0; make the grid with "
                 "colo_grid_init() or colo_grid_parse()",
                 (long long)grid->size, (long long)grid->offset, (long long)size);
    return COLO_OK;
}

/* ---- lists ---- */

enum { NAMES_MAX = COLO_KEY_MAX + COLO_DIMS_MAX }; /* a key with two bytes between names */

/* "tp, cp, dp", for error messages that say what there is instead */
static const char *names(const colo_grid_t *grid, char text[NAMES_MAX])
{
    colo_text_t list = {.data = text, .cap = NAMES_MAX};
    text[0] = '\0';
    for (int32_t i = 0; i < grid->ndims; i++)
        colo_put(&list, "%s%s", i ? ", " : "", grid->name[i]);
    return text;
}

colo_status_t colo_grid_read_dims(const colo_grid_t *grid, const char *where, const char *list,
                                  colo_dims_t *dims)
{
    char all[NAMES_MAX];
    colo_dims_t set = {0};
    COLO_FAIL_IF(!list || !*list, COLO_ERR_ARG, "dims: the list is %s, expected names of %s (%s)",
                 list ? "empty" : "NULL", where, names(grid, all));
    for (const char *part = list;; part++) {
        size_t len = strcspn(part, "-");
        COLO_FAIL_IF(len == 0, COLO_ERR_ARG, "dims '%s': empty name at byte %zu",
                     COLO_QUOTED_STR(list), (size_t)(part - list));
        int32_t i = colo_grid_find(grid, part, len);
        COLO_FAIL_IF(i < 0, COLO_ERR_ARG, "'%s' is not in %s, which has dims (%s)%s",
                     COLO_QUOTED(part, len), where, names(grid, all),
                     strchr(list, ',') ? "; join names by '-'" : "");
        COLO_FAIL_IF(set.in[i], COLO_ERR_ARG, "dims '%s': '%s' is repeated at byte %zu",
                     COLO_QUOTED_STR(list), grid->name[i], (size_t)(part - list));
        set.in[i] = true;
        set.given[set.n++] = i;
        part += len;
        if (!*part)
            break;
    }
    *dims = set;
    return COLO_OK;
}

void colo_grid_write_key(const colo_grid_t *grid, const colo_dims_t *dims, char key[COLO_KEY_MAX])
{
    size_t n = 0;
    for (int32_t i = grid->ndims - 1; i >= 0; i--) {
        if (!dims->in[i])
            continue;
        if (n)
            key[n++] = '-';
        size_t len = strlen(grid->name[i]);
        memcpy(key + n, grid->name[i], len);
        n += len;
    }
    key[n] = '\0';
}
