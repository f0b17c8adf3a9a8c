/* SPDX-License-Identifier: Apache-2.0 */
/*
 * batch.c - reads the tables of a batch, and says which rows its regions are.
 *
 * The file is one JSON object of lists of integers, under the names of colo_segments_t; or, of
 * packings, of the lengths and one object per side, under the names of colo_packing_t. What makes
 * it no such object is refused here, with key and index; whether the tables fit the layouts is the
 * library's to say.
 */
#include "batch.h"

#include "plan-tool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <colobridge/ragged.h>
#include <jansson.h>

enum { ROWS, SRC_DP, SEQ, POS, ROW_POS, SEQ_LEN, SEQ_DP, TABLES };
static const char *const names[] = {"rows",    "src_dp",  "seq",    "pos",
                                    "row_pos", "seq_len", "seq_dp", NULL};

#define ALL_NAMES "rows, src_dp, seq, pos or row_pos, seq_len, seq_dp"

/* Of a side of a packed batch; of the batch, whose sides are objects. */
enum { SIDE_DP, SIDE_CP, SIDE_FIRST, SIDE_ROOM, SIDE_START, SIDE_LEN, SIDE_OWNER, SIDE_TABLES };
static const char *const side_names[] = {"seq_dp",      "seq_cp",    "seq_first",   "seq_room",
                                         "piece_start", "piece_len", "piece_owner", "split",
                                         "halo_before", NULL};
static const char *const packed_names[] = {"seq_len", "src", "dst", NULL};

#define SIDE_NAMES                                                                      \
    "split, seq_dp, seq_cp, seq_first, seq_room, piece_start, piece_len, piece_owner, " \
    "halo_before"
#define PACKED_NAMES "seq_len, src, dst"

static const char *const cuts[] = {"block",      "zigzag", "whole", "table",
                                   "contiguous", "heads",  NULL};

typedef struct reader {
    char file[TOOL_QUOTE_MAX];
    const char *option;
    plan_batch_t *batch;
    int64_t *next; /* of the batch's table */
} reader_t;

#define REFUSE(r, fmt, ...) tool_refuse("%s: %s: " fmt, (r)->option, (r)->file, __VA_ARGS__)

static const char *kind_of(const json_t *v)
{
    static const char *const kinds[] = {[JSON_OBJECT] = "an object",
                                        [JSON_ARRAY] = "a list",
                                        [JSON_STRING] = "a string",
                                        [JSON_INTEGER] = "an integer",
                                        [JSON_REAL] = "a number with a fraction or an exponent",
                                        [JSON_TRUE] = "a truth value",
                                        [JSON_FALSE] = "a truth value",
                                        [JSON_NULL] = "null"};
    return kinds[json_typeof(v)];
}

static int read_doc(reader_t *r, const char *path, json_t **doc)
{
    json_error_t e;
    FILE *f = fopen(path, "rb");
    if (!f)
        return REFUSE(r, "%s", strerror(errno));
    errno = 0;
    *doc = json_loadf(f, JSON_REJECT_DUPLICATES, &e);
    const int error = ferror(f) ? errno : 0;
    fclose(f);
    if (error)
        return REFUSE(r, "%s", strerror(error));
    if (!*doc)
        return REFUSE(r, "line %d, column %d: %s", e.line, e.column, e.text);
    return TOOL_OK;
}

/* @of: "" or "src." */
static int check_keys(const reader_t *r, json_t *object, const char *of, const char *const *known,
                      const char *all)
{
    char q[TOOL_QUOTE_MAX];
    const char *key;
    json_t *v;
    if (!json_is_object(object))
        return REFUSE(r, "%.*s%sfound %s, expected an object with %s", (int)strcspn(of, "."), of,
                      *of ? ": " : "", kind_of(object), all);
    json_object_foreach(object, key, v)
    {
        int i = 0;
        while (known[i] && strcmp(key, known[i]) != 0)
            i++;
        if (!known[i])
            return REFUSE(r, "%sunknown key %s, expected %s", of, tool_quote(q, key), all);
    }
    return TOOL_OK;
}

/* Of all lists in @doc and in its objects. */
static int64_t entries_of(json_t *doc)
{
    int64_t n = (int64_t)json_array_size(doc);
    const char *key;
    json_t *value;
    json_object_foreach(doc, key, value) n += entries_of(value);
    return n;
}

/* *@table: the list of that name, NULL if there is none. */
static int read_table(reader_t *r, const json_t *object, const char *of, const char *name,
                      const int64_t **table, int64_t *n)
{
    const json_t *list = json_object_get(object, name), *v;
    size_t i;
    if (!list)
        return TOOL_OK;
    if (!json_is_array(list))
        return REFUSE(r, "%s%s: found %s, expected a list of integers", of, name, kind_of(list));
    *n = (int64_t)json_array_size(list);
    *table = r->next;
    json_array_foreach(list, i, v)
    {
        if (!json_is_integer(v))
            return REFUSE(r, "%s%s[%zu]: found %s, expected an integer", of, name, i, kind_of(v));
        *r->next++ = json_integer_value(v);
    }
    return TOOL_OK;
}

static int missing(const reader_t *r, const char *of, const char *name, const char *all)
{
    return REFUSE(r, "%skey %s is missing, expected %s", of, name, all);
}

static int check_count(const reader_t *r, const char *of, const char *name, int64_t n,
                       int64_t expected, const char *like)
{
    if (n == expected)
        return TOOL_OK;
    return REFUSE(r, "%s%s: found %lld entries, expected %lld, %s", of, name, (long long)n,
                  (long long)expected, like);
}

/* ---- segments ---- */

static int check_segments(const reader_t *r, const int64_t *const *table, const int64_t *n,
                          int64_t *rows)
{
    static const int like[TABLES] = {ROWS, ROWS, ROWS, ROWS, ROW_POS, SEQ_LEN, SEQ_LEN};
    char words[40];
    for (int i = 0; i < TABLES; i++)
        if (!table[i] && i != POS && i != ROW_POS)
            return missing(r, "", names[i], ALL_NAMES);
    if (!table[POS] == !table[ROW_POS])
        return REFUSE(r, "found %s pos and row_pos, expected one of them",
                      table[POS] ? "both" : "neither");
    for (int i = 0; i < TABLES; i++) {
        snprintf(words, sizeof words, "as many as in %s", names[like[i]]);
        if (table[i])
            TOOL_TRY(check_count(r, "", names[i], n[i], n[like[i]], words));
    }
    *rows = 0;
    for (int64_t e = 0; e < n[ROWS]; e++)
        if (table[ROWS][e] < 0 || __builtin_add_overflow(*rows, table[ROWS][e], rows))
            return REFUSE(r, "rows[%lld]: found %lld, expected at least 0 and a sum below 2^63",
                          (long long)e, (long long)table[ROWS][e]);
    return table[ROW_POS] ? check_count(r, "", "row_pos", n[ROW_POS], *rows, "the sum of rows")
                          : TOOL_OK;
}

static int read_segments(reader_t *r, json_t *doc)
{
    plan_batch_t *batch = r->batch;
    const int64_t *table[TABLES] = {NULL};
    int64_t n[TABLES] = {0};
    TOOL_TRY(check_keys(r, doc, "", names, ALL_NAMES));
    for (int i = 0; i < TABLES; i++)
        TOOL_TRY(read_table(r, doc, "", names[i], &table[i], &n[i]));
    TOOL_TRY(check_segments(r, table, n, &batch->rows));
    batch->tables =
        (colo_segments_t){COLO_SEGMENTS_INIT,        .count = n[ROWS],    .rows = table[ROWS],
                          .src_dp = table[SRC_DP],   .seq = table[SEQ],   .pos = table[POS],
                          .row_pos = table[ROW_POS], .nseqs = n[SEQ_LEN], .seq_len = table[SEQ_LEN],
                          .seq_dp = table[SEQ_DP]};
    batch->length = table[ROWS];
    batch->count = n[ROWS];
    return TOOL_OK;
}

/* ---- packings ---- */

static int read_side(reader_t *r, json_t *object, const char *of, int side)
{
    plan_batch_t *batch = r->batch;
    const int64_t *table[SIDE_TABLES] = {NULL};
    int64_t n[SIDE_TABLES] = {0};
    char q[TOOL_QUOTE_MAX];
    int cut = 0;
    TOOL_TRY(check_keys(r, object, of, side_names, SIDE_NAMES));
    const char *split = json_string_value(json_object_get(object, "split"));
    while (split && cuts[cut] && strcmp(split, cuts[cut]) != 0)
        cut++;
    if (!split || !cuts[cut])
        return REFUSE(r,
                      "%ssplit: found %s, expected \"block\", \"zigzag\", \"whole\", "
                      "\"table\", \"contiguous\" or \"heads\"",
                      of, split ? tool_quote(q, split) : "no string");
    for (int i = 0; i < SIDE_TABLES; i++)
        TOOL_TRY(read_table(r, object, of, side_names[i], &table[i], &n[i]));
    for (int i = 0; i <= SIDE_START; i++)
        if (table[i])
            TOOL_TRY(check_count(r, of, side_names[i], n[i], batch->count + (i == SIDE_START),
                                 i == SIDE_START ? "one more than in seq_len"
                                                 : "as many as in seq_len"));
    const json_t *halo = json_object_get(object, "halo_before");
    if (halo && !json_is_integer(halo))
        return REFUSE(r, "%shalo_before: found %s, expected an integer", of, kind_of(halo));
    const int64_t parts = table[SIDE_START] ? table[SIDE_START][batch->count] : 0;
    for (int i = SIDE_LEN; i <= SIDE_OWNER; i++)
        if (table[i])
            TOOL_TRY(check_count(r, of, side_names[i], n[i], parts, "the last of piece_start"));
    batch->heads[side] = cut > COLO_PACKING_CONTIGUOUS;
    batch->side[side] = (colo_packing_t){COLO_PACKING_INIT,
                                         .nseqs = batch->count,
                                         .seq_len = batch->length,
                                         .seq_dp = table[SIDE_DP],
                                         .seq_cp = table[SIDE_CP],
                                         .seq_first = table[SIDE_FIRST],
                                         .split = batch->heads[side] ? COLO_PACKING_WHOLE
                                                                     : (colo_packing_split_t)cut,
                                         .piece_start = table[SIDE_START],
                                         .piece_len = table[SIDE_LEN],
                                         .piece_owner = table[SIDE_OWNER],
                                         .seq_room = table[SIDE_ROOM],
                                         .halo_before = halo ? json_integer_value(halo) : 0};
    return TOOL_OK;
}

static int read_packings(reader_t *r, json_t *doc)
{
    plan_batch_t *batch = r->batch;
    TOOL_TRY(check_keys(r, doc, "", packed_names, PACKED_NAMES));
    for (int i = 0; packed_names[i]; i++)
        if (!json_object_get(doc, packed_names[i]))
            return missing(r, "", packed_names[i], PACKED_NAMES);
    TOOL_TRY(read_table(r, doc, "", "seq_len", &batch->length, &batch->count));
    TOOL_TRY(read_side(r, json_object_get(doc, "src"), "src.", 0));
    return read_side(r, json_object_get(doc, "dst"), "dst.", 1);
}

int plan_batch_read(plan_batch_t *batch, const char *path, bool packed)
{
    reader_t r = {.option = packed ? "--packing" : "--segments", .batch = batch};
    json_t *doc = NULL;
    *batch = (plan_batch_t){.packed = packed};
    tool_quote(r.file, path);
    int rc = read_doc(&r, path, &doc);
    if (rc == TOOL_OK) {
        const int64_t n = entries_of(doc);
        r.next = batch->table = calloc((size_t)n + 1, sizeof *batch->table);
        if (!r.next)
            rc = tool_problem("no memory for %lld entries of %s", (long long)n, r.file);
    }
    if (rc == TOOL_OK)
        rc = packed ? read_packings(&r, doc) : read_segments(&r, doc);
    json_decref(doc);
    if (rc != TOOL_OK)
        plan_batch_free(batch);
    return rc;
}

void plan_batch_free(plan_batch_t *batch)
{
    free(batch->table);
    free(batch->order);
    free(batch->first);
    free(batch->assign);
    free(batch->loads.load[0]);
    *batch = (plan_batch_t){.rows = 0};
}

const char *plan_batch_cut(const plan_batch_t *batch, int side)
{
    return batch->heads[side] ? "heads" : cuts[batch->side[side].split];
}

/* ---- the rows of regions ---- */

/* Segments by replica; sequences as they are. */
static void order(plan_batch_t *batch, int64_t *next)
{
    int64_t row = 0;
    memset(next, 0, (size_t)(batch->replicas + 1) * sizeof *next);
    for (int64_t e = 0; e < batch->count; e++)
        next[batch->packed ? 1 : batch->tables.src_dp[e] + 1]++;
    for (int64_t d = 0; d < batch->replicas; d++)
        next[d + 1] += next[d];
    for (int64_t e = 0; e < batch->count; e++)
        batch->order[next[batch->packed ? 0 : batch->tables.src_dp[e]]++] = e;
    for (int64_t i = 0; i < batch->count; i++) {
        batch->first[i] = row;
        row += batch->length[batch->order[i]];
    }
}

plan_rows_t plan_batch_next(const plan_batch_t *batch, int64_t *index, int64_t hi)
{
    int64_t a = 0, z = batch->count; /* first[a] <= *index < first[z] */
    while (z - a > 1) {
        const int64_t mid = a + (z - a) / 2;
        if (batch->first[mid] <= *index)
            a = mid;
        else
            z = mid;
    }
    const int64_t e = batch->order[a], end = batch->first[a] + batch->length[e];
    const plan_rows_t part = {e, *index - batch->first[a], (hi < end ? hi : end) - batch->first[a]};
    *index = hi < end ? hi : end;
    return part;
}

/* ---- balance ---- */

static void add_loads(plan_batch_t *batch)
{
    const colo_segments_t *t = &batch->tables;
    plan_loads_t *l = &batch->loads;
    for (int64_t e = 0; e < t->count; e++) {
        l->load[0][t->src_dp[e]] += t->rows[e];
        l->load[1][batch->assign[e]] += t->rows[e];
        l->moved += batch->assign[e] != t->src_dp[e];
    }
    for (int i = 0; i < 2; i++)
        for (int64_t d = 0; d < batch->replicas; d++)
            l->most[i] = l->load[i][d] > l->most[i] ? l->load[i][d] : l->most[i];
    l->mean = (double)batch->rows / (double)batch->replicas;
}

/* The plan of any rank checks both packings. */
static colo_status_t check(const plan_batch_t *batch, const colo_plan_config_t *c)
{
    colo_plan_t *plan = NULL;
    if (!batch->packed)
        return colo_segments_check(&batch->tables, c->src, c->dst);
    const colo_status_t st = colo_plan_create_packed(&plan, c, &batch->side[0], &batch->side[1], 0);
    colo_plan_destroy(&plan);
    return st;
}

int plan_batch_place(plan_batch_t *batch, const colo_plan_config_t *c)
{
    const colo_segments_t *t = &batch->tables;
    const int64_t *length = batch->packed ? batch->length : t->seq_len;
    plan_ask_t ask = {.rank = -1};
    snprintf(ask.where, sizeof ask.where, "%s", batch->packed ? "--packing" : "--segments");
    colo_status_t st = check(batch, c);
    if (st < 0)
        return plan_complain(&ask, st, colo_last_error());
    batch->replicas = colo_grid_extent(&c->src->grid, "dp");
    batch->order = calloc((size_t)batch->count + 1, sizeof *batch->order);
    batch->first = calloc((size_t)batch->count + 1, sizeof *batch->first);
    batch->assign = calloc((size_t)batch->count + 1, sizeof *batch->assign);
    batch->loads.load[0] = calloc((size_t)batch->replicas + 1, 2 * sizeof *batch->loads.load[0]);
    if (!batch->order || !batch->first || !batch->assign || !batch->loads.load[0])
        return tool_problem("no memory for %lld %s", (long long)batch->count,
                            batch->packed ? "sequences" : "segments");
    batch->loads.load[1] = batch->loads.load[0] + batch->replicas;
    order(batch, batch->loads.load[0]);
    memset(batch->loads.load[0], 0, (size_t)(batch->replicas + 1) * sizeof *batch->loads.load[0]);
    for (int64_t q = 0; q < (batch->packed ? batch->count : t->nseqs); q++)
        if (__builtin_add_overflow(batch->positions, length[q], &batch->positions))
            return tool_refuse("%s: the positions up to sequence %lld exceed 63 bits", ask.where,
                               (long long)q);
    if (batch->packed) {
        batch->rows = batch->positions;
        return TOOL_OK;
    }
    st = colo_segments_balance(batch->assign, t->rows, t->count, batch->replicas, NULL, 0);
    if (st < 0)
        return plan_complain(&ask, st, colo_last_error());
    add_loads(batch);
    return TOOL_OK;
}
