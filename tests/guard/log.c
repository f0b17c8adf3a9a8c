/* SPDX-License-Identifier: Apache-2.0 */
/* log.c - records of each rank: a hash of their lines, and the lines themselves where one asks. */
#include "record.h"

#include "core/hash.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const recorder_names[RECORDERS] = {"plan",  "exchanges", "transfers",
                                               "boxes", "outputs",   "status"};

typedef struct memory {
    const char *data;
    size_t bytes;
    const char *name;
    bool registered;
} memory_t;

typedef struct rank_log {
    uint64_t hash[RECORDERS], bag;
    bool in_bag;
    char **line; /* [n] of all recorders */
    size_t n, cap, bag_first;
    memory_t memory[64];
    int nmemory;
} rank_log_t;

static rank_log_t logs[GUARD_RANKS];
static bool keeps_text;
static _Thread_local rank_log_t *me;

void log_of_rank(int32_t rank)
{
    me = rank < 0 ? NULL : &logs[rank];
}

void log_reset(bool keep_text)
{
    keeps_text = keep_text;
    for (int r = 0; r < GUARD_RANKS; r++) {
        for (size_t i = 0; i < logs[r].n; i++)
            free(logs[r].line[i]);
        free(logs[r].line);
        logs[r] = (rank_log_t){.hash = {0}};
        for (int k = 0; k < RECORDERS; k++)
            logs[r].hash[k] = COLO_HASH_INIT;
    }
}

uint64_t log_hash(recorder_t recorder)
{
    uint64_t all = COLO_HASH_INIT;
    for (int r = 0; r < GUARD_RANKS; r++)
        all = colo_hash_bytes(all, &logs[r].hash[recorder], sizeof logs[r].hash[recorder]);
    return all;
}

void log_print(void)
{
    for (int k = 0; k < RECORDERS; k++)
        for (int r = 0; r < GUARD_RANKS; r++)
            for (size_t i = 0; i < logs[r].n; i++)
                if (logs[r].line[i][0] == (char)('0' + k))
                    printf("%s, rank %d: %s\n", recorder_names[k], r, logs[r].line[i] + 1);
}

/* ---- memory ---- */

void memory_is(const void *data, size_t bytes, const char *name, bool registered)
{
    if (!me || !data)
        return;
    if (me->nmemory == sizeof me->memory / sizeof me->memory[0])
        abort();
    me->memory[me->nmemory++] = (memory_t){data, bytes, name, registered};
}

void memory_forget(const void *data)
{
    for (int i = 0; me && i < me->nmemory; i++)
        if (me->memory[i].data == data) {
            me->memory[i] = me->memory[--me->nmemory];
            return;
        }
}

static const memory_t *find(const char *p, size_t bytes)
{
    for (int i = 0; me && i < me->nmemory; i++)
        if (p >= me->memory[i].data && p + bytes <= me->memory[i].data + me->memory[i].bytes)
            return &me->memory[i];
    return NULL;
}

int64_t memory_registered(const void *data, size_t bytes)
{
    const memory_t *m = find(data, bytes);
    return m && m->registered ? (const char *)data - m->data : -1;
}

/* ---- lines ---- */

typedef struct text {
    size_t n;
    char at[4096];
} text_t;

static void put(text_t *t, const char *s)
{
    while (*s && t->n + 1 < sizeof t->at)
        t->at[t->n++] = *s++;
}

static void put_number(text_t *t, uint64_t v, unsigned base)
{
    char digit[32];
    int n = 31;
    digit[n] = '\0';
    do
        digit[--n] = "0123456789abcdef"[v % base];
    while ((v /= base) > 0);
    put(t, digit + n);
}

static void put_signed(text_t *t, int64_t v)
{
    if (v < 0)
        put(t, "-");
    put_number(t, v < 0 ? -(uint64_t)v : (uint64_t)v, 10);
}

static void put_place(text_t *t, const void *p)
{
    const memory_t *m = p ? find(p, 0) : NULL;
    put(t, !p ? "0" : m ? m->name : "?");
    if (!m)
        return;
    put(t, "+");
    put_signed(t, (const char *)p - m->data);
}

/* Steps of an axis of one element mean nothing; nor does the place of no element. */
static void put_box(text_t *t, const colo_box_t *b)
{
    const bool empty = b->extent[0] == 0 || b->extent[1] == 0 || b->extent[2] == 0;
    if (!empty)
        put_place(t, b->data);
    put(t, empty ? "none" : "[");
    for (int i = 0; i < 3 && !empty; i++) {
        put(t, i ? " " : "");
        put_signed(t, b->extent[i]);
        if (b->extent[i] > 1) {
            put(t, "*");
            put_signed(t, b->stride[i]);
        }
    }
    put(t, empty ? "" : "]");
}

static void keep(recorder_t recorder, const text_t *t)
{
    if (me->n == me->cap) {
        me->cap = me->cap ? 2 * me->cap : 64;
        me->line = realloc(me->line, me->cap * sizeof *me->line);
        if (!me->line)
            abort();
    }
    char *line = malloc(t->n + 2);
    if (!line)
        abort();
    line[0] = (char)('0' + recorder);
    memcpy(line + 1, t->at, t->n + 1);
    me->line[me->n++] = line;
}

void say(recorder_t recorder, const char *format, ...)
{
    if (!me)
        return;
    text_t t;
    t.n = 0;
    va_list args;
    va_start(args, format);
    for (const char *c = format; *c; c++) {
        if (*c != '%') {
            put(&t, (char[]){*c, '\0'});
            continue;
        }
        switch (*++c) {
        case 'd':
            put_signed(&t, va_arg(args, int64_t));
            break;
        case 'x':
            put_number(&t, va_arg(args, uint64_t), 16);
            break;
        case 's':
            put(&t, va_arg(args, const char *));
            break;
        case 'p':
            put_place(&t, va_arg(args, const void *));
            break;
        case 'b':
            put_box(&t, va_arg(args, const colo_box_t *));
            break;
        default:
            abort();
        }
    }
    va_end(args);
    t.at[t.n] = '\0';
    if (keeps_text)
        keep(recorder, &t);
    if (me->in_bag)
        me->bag += colo_hash_bytes(COLO_HASH_INIT, t.at, t.n + 1);
    else
        me->hash[recorder] = colo_hash_bytes(me->hash[recorder], t.at, t.n + 1);
}

void bag_begin(recorder_t recorder)
{
    if (!me)
        return;
    me->in_bag = true;
    me->bag = 0;
    me->bag_first = me->n;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void bag_end(recorder_t recorder)
{
    if (!me)
        return;
    me->in_bag = false;
    me->hash[recorder] = colo_hash_bytes(me->hash[recorder], &me->bag, sizeof me->bag);
    if (me->n > me->bag_first)
        qsort(me->line + me->bag_first, me->n - me->bag_first, sizeof *me->line, by_text);
}
