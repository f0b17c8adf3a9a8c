/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments.c - reads the tables of a ragged batch, and says where their rows are on the source.
 *
 * The file is one JSON object of lists of integers, under the names of colo_segments_t. What makes
 * it no such object is refused here, with key and index; whether the tables fit the layouts is
 * colo_segments_check()'s to say.
 */
#include "segments.h"

#include "plan-tool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

enum { ROWS, SRC_DP, SEQ, POS, ROW_POS, SEQ_LEN, SEQ_DP, TABLES };

static const char *const names[TABLES] = {"rows",    "src_dp",  "seq",   "pos",
                                          "row_pos", "seq_len", "seq_dp"};

#define ALL_NAMES "rows, src_dp, seq, pos or row_pos, seq_len, seq_dp"

typedef struct reader {
    char file[TOOL_QUOTE_MAX];
    json_t *doc;
    int64_t *table[TABLES], n[TABLES];
} reader_t;

#define REFUSE(r, fmt, ...) \
    tool_complain(TOOL_WRONG_USE, PLAN_TOOL, "--segments: %s: " fmt, (r)->file, __VA_ARGS__)

static const char *kind_of(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction or an exponent";
    case JSON_NULL:
        return "null";
    default:
        return "a truth value";
    }
}

static int read_doc(reader_t *r, const char *path)
{
    json_error_t e;
    FILE *f = fopen(path, "rb");
    if (!f)
        return REFUSE(r, "%s", strerror(errno));
    errno = 0;
    r->doc = json_loadf(f, JSON_REJECT_DUPLICATES, &e);
    const int error = ferror(f) ? errno : 0;
    fclose(f);
    if (error)
        return REFUSE(r, "%s", strerror(error));
    if (!r->doc)
        return REFUSE(r, "line %d, column %d: %s", e.line, e.column, e.text);
    if (!json_is_object(r->doc))
        return REFUSE(r, "found %s, expected an object with " ALL_NAMES, kind_of(r->doc));
    return TOOL_OK;
}

static int read_table(reader_t *r, int which)
{
    const json_t *list = json_object_get(r->doc, names[which]), *v;
    size_t i;
    if (!list)
        return TOOL_OK;
    if (!json_is_array(list))
        return REFUSE(r, "%s: found %s, expected a list of integers", names[which], kind_of(list));
    r->n[which] = (int64_t)json_array_size(list);
    r->table[which] = calloc((size_t)r->n[which] + 1, sizeof *r->table[which]);
    if (!r->table[which])
        return tool_complain(TOOL_PROBLEM, PLAN_TOOL, "no memory for %lld entries of %s",
                             (long long)r->n[which], names[which]);
    json_array_foreach(list, i, v)
    {
        if (!json_is_integer(v))
            return REFUSE(r, "%s[%zu]: found %s, expected an integer", names[which], i, kind_of(v));
        r->table[which][i] = json_integer_value(v);
    }
    return TOOL_OK;
}

static int check_keys(const reader_t *r)
{
    char q[TOOL_QUOTE_MAX];
    const char *key;
    json_t *v;
    json_object_foreach(r->doc, key, v)
    {
        int i = 0;
        while (i < TABLES && strcmp(key, names[i]) != 0)
            i++;
        if (i == TABLES)
            return REFUSE(r, "unknown key %s, expected " ALL_NAMES, tool_quote(q, key));
    }
    for (int i = 0; i < TABLES; i++)
        if (!r->table[i] && i != POS && i != ROW_POS)
            return REFUSE(r, "key %s is missing, expected " ALL_NAMES, names[i]);
    if (!r->table[POS] == !r->table[ROW_POS])
        return REFUSE(r, "found %s pos and row_pos, expected one of them",
                      r->table[POS] ? "both" : "neither");
    return TOOL_OK;
}

static int check_counts(const reader_t *r, int64_t *rows)
{
    static const int like[TABLES] = {ROWS, ROWS, ROWS, ROWS, ROW_POS, SEQ_LEN, SEQ_LEN};
    for (int i = 0; i < TABLES; i++)
        if (r->table[i] && r->n[i] != r->n[like[i]])
            return REFUSE(r, "%s: found %lld entries, expected %lld, as many as in %s", names[i],
                          (long long)r->n[i], (long long)r->n[like[i]], names[like[i]]);
    *rows = 0;
    for (int64_t e = 0; e < r->n[ROWS]; e++)
        if (r->table[ROWS][e] < 0 || __builtin_add_overflow(*rows, r->table[ROWS][e], rows))
            return REFUSE(r, "rows[%lld]: found %lld, expected at least 0 and a sum below 2^63",
                          (long long)e, (long long)r->table[ROWS][e]);
    if (r->table[ROW_POS] && r->n[ROW_POS] != *rows)
        return REFUSE(r, "row_pos: found %lld entries, expected %lld, the sum of rows",
                      (long long)r->n[ROW_POS], (long long)*rows);
    return TOOL_OK;
}

static int read_all(reader_t *r, const char *path, int64_t *rows)
{
    TOOL_TRY(read_doc(r, path));
    for (int i = 0; i < TABLES; i++)
        TOOL_TRY(read_table(r, i));
    TOOL_TRY(check_keys(r));
    return check_counts(r, rows);
}

int plan_segments_read(plan_segments_t *s, const char *path)
{
    reader_t r = {.doc = NULL};
    *s = (plan_segments_t){.rows = 0};
    tool_quote(r.file, path);
    const int rc = read_all(&r, path, &s->rows);
    json_decref(r.doc);
    s->tables = (colo_segments_t){.struct_size = sizeof s->tables,
                                  .count = r.n[ROWS],
                                  .rows = r.table[ROWS],
                                  .src_dp = r.table[SRC_DP],
                                  .seq = r.table[SEQ],
                                  .pos = r.table[POS],
                                  .row_pos = r.table[ROW_POS],
                                  .nseqs = r.n[SEQ_LEN],
                                  .seq_len = r.table[SEQ_LEN],
                                  .seq_dp = r.table[SEQ_DP]};
    if (rc != TOOL_OK)
        plan_segments_free(s);
    return rc;
}

void plan_segments_free(plan_segments_t *s)
{
    const int64_t *const tables[TABLES] = {s->tables.rows,  s->tables.src_dp,  s->tables.seq,
                                           s->tables.pos,   s->tables.row_pos, s->tables.seq_len,
                                           s->tables.seq_dp};
    for (int i = 0; i < TABLES; i++)
        free((void *)tables[i]);
    free(s->order);
    free(s->first);
    free(s->assign);
    free(s->loads.load[0]);
    *s = (plan_segments_t){.rows = 0};
}

/* ---- the source axes ---- */

static void order(plan_segments_t *s, int64_t *next)
{
    const colo_segments_t *t = &s->tables;
    int64_t row = 0;
    memset(next, 0, (size_t)(s->replicas + 1) * sizeof *next);
    for (int64_t e = 0; e < t->count; e++)
        next[t->src_dp[e] + 1]++;
    for (int64_t d = 0; d < s->replicas; d++)
        next[d + 1] += next[d];
    for (int64_t e = 0; e < t->count; e++)
        s->order[next[t->src_dp[e]]++] = e;
    for (int64_t i = 0; i < t->count; i++) {
        s->first[i] = row;
        row += t->rows[s->order[i]];
    }
}

plan_rows_t plan_segments_next(const plan_segments_t *s, int64_t *index, int64_t hi)
{
    int64_t a = 0, z = s->tables.count; /* first[a] <= *at < first[z] */
    while (z - a > 1) {
        const int64_t mid = a + (z - a) / 2;
        if (s->first[mid] <= *index)
            a = mid;
        else
            z = mid;
    }
    const int64_t e = s->order[a], end = s->first[a] + s->tables.rows[e];
    const plan_rows_t part = {e, *index - s->first[a], (hi < end ? hi : end) - s->first[a]};
    *index = hi < end ? hi : end;
    return part;
}

/* ---- balance ---- */

static void add_loads(plan_segments_t *s)
{
    const colo_segments_t *t = &s->tables;
    plan_loads_t *l = &s->loads;
    for (int64_t e = 0; e < t->count; e++) {
        l->load[0][t->src_dp[e]] += t->rows[e];
        l->load[1][s->assign[e]] += t->rows[e];
        l->moved += s->assign[e] != t->src_dp[e];
    }
    for (int i = 0; i < 2; i++)
        for (int64_t d = 0; d < s->replicas; d++)
            l->most[i] = l->load[i][d] > l->most[i] ? l->load[i][d] : l->most[i];
    l->mean = (double)s->rows / (double)s->replicas;
}

int plan_segments_place(plan_segments_t *s, const colo_layout_t *src, const colo_layout_t *dst)
{
    const colo_segments_t *t = &s->tables;
    const plan_ask_t ask = {.where = "--segments"};
    colo_status_t st = colo_segments_check(t, src, dst);
    if (st < 0)
        return plan_complain(&ask, st, colo_last_error());
    s->replicas = colo_grid_extent(&src->grid, "dp");
    s->order = calloc((size_t)t->count + 1, sizeof *s->order);
    s->first = calloc((size_t)t->count + 1, sizeof *s->first);
    s->assign = calloc((size_t)t->count + 1, sizeof *s->assign);
    s->loads.load[0] = calloc((size_t)s->replicas + 1, 2 * sizeof *s->loads.load[0]);
    if (!s->order || !s->first || !s->assign || !s->loads.load[0])
        return tool_complain(TOOL_PROBLEM, PLAN_TOOL, "no memory for %lld segments",
                             (long long)t->count);
    s->loads.load[1] = s->loads.load[0] + s->replicas;
    order(s, s->loads.load[0]);
    memset(s->loads.load[0], 0, (size_t)(s->replicas + 1) * sizeof *s->loads.load[0]);
    for (int64_t q = 0; q < t->nseqs; q++)
        if (__builtin_add_overflow(s->positions, t->seq_len[q], &s->positions))
            return tool_complain(TOOL_WRONG_USE, PLAN_TOOL,
                                 "--segments: the positions up to sequence %lld exceed 63 bits",
                                 (long long)q);
    st = colo_balance(s->assign, t->rows, t->count, s->replicas, NULL, 0);
    if (st < 0)
        return plan_complain(&ask, st, colo_last_error());
    add_loads(s);
    return TOOL_OK;
}
