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

name_t place_name(const void *p)
{
    name_t name;
    const memory_t *m = p ? find(p, 0) : NULL;
    if (m)
        snprintf(name.text, sizeof name.text, "%s+%td", m->name, (const char *)p - m->data);
    else
        snprintf(name.text, sizeof name.text, "%s", p ? "?" : "0");
    return name;
}

/* Steps of an axis of one element mean nothing; nor does the place of no element. */
name_t box_name(const colo_box_t *b)
{
    name_t name = {"none"};
    const int64_t *n = b->extent;
    int64_t step[3];
    for (int i = 0; i < 3; i++)
        step[i] = n[i] > 1 ? b->stride[i] : 0;
    if (n[0] != 0 && n[1] != 0 && n[2] != 0 &&
        snprintf(name.text, sizeof name.text, "%s[%ld*%ld %ld*%ld %ld*%ld]",
                 place_name(b->data).text, n[0], step[0], n[1], step[1], n[2],
                 step[2]) >= (int)sizeof name.text)
        abort();
    return name;
}

static void keep(recorder_t recorder, const char *text)
{
    if (me->n == me->cap) {
        me->cap = me->cap ? 2 * me->cap : 64;
        me->line = realloc(me->line, me->cap * sizeof *me->line);
        if (!me->line)
            abort();
    }
    if (asprintf(&me->line[me->n++], "%d%s", recorder, text) < 0)
        abort();
}

void say(recorder_t recorder, const char *format, ...)
{
    char text[4096];
    va_list args;
    if (!me)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (keeps_text)
        keep(recorder, text);
    const size_t bytes = strlen(text) + 1;
    if (me->in_bag)
        me->bag += colo_hash_bytes(COLO_HASH_INIT, text, bytes);
    else
        me->hash[recorder] = colo_hash_bytes(me->hash[recorder], text, bytes);
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
