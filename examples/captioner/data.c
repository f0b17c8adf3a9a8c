/* SPDX-License-Identifier: Apache-2.0 */
/*
 * data.c - the digits data set: a strict reader, the held-out split, captions, patches, batches.
 *
 * The reader takes exactly 65 unsigned numbers a line, commas between, a newline after (the last
 * line may lack it). Anything else is refused with the file, the line and what was found there: a
 * reader that skips what it does not understand trains on something else and reports nothing.
 *
 * A batch is a function of (seed, step, batch size): position k of the endless walk over the
 * training rows is epoch k / ntrain, place k mod ntrain, and each epoch has its own permutation,
 * computed place by place (a Feistel network with cycle walking) instead of shuffled in memory. So
 * every rank finds its images alone.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "captioner.h"

enum { FIELDS = CAP_PIXELS + 1, MAX_PIXEL = 16, MAX_LABEL = 9 };

struct reader {
    FILE *file;
    const char *path;
    long line;
    char *why;
    size_t why_size;
};

#define REFUSE(r, ...) snprintf((r)->why, (r)->why_size, __VA_ARGS__)

/* What stopped the reading, for people. */
static const char *seen(int c, char text[16])
{
    if (c == EOF)
        return "the end of the file";
    if (c == '\n')
        return "the end of the line";
    if (c > ' ' && c < 127)
        snprintf(text, 16, "'%c'", c);
    else
        snprintf(text, 16, "byte 0x%02x", (unsigned)c & 0xffu);
    return text;
}

/* One field and what follows it in *end; -1 with an error message. */
static int read_field(struct reader *r, int field, uint8_t *value, int *end)
{
    int max = field == CAP_PIXELS ? MAX_LABEL : MAX_PIXEL, digits = 0, v = 0, c;
    char text[16];

    while ((c = getc(r->file)) >= '0' && c <= '9') {
        v = v * 10 + (c - '0');
        if (++digits > 3)
            break;
    }
    if (!digits) {
        REFUSE(r, "%s:%ld: field %d of %d: expected a number, found %s", r->path, r->line,
               field + 1, FIELDS, seen(c, text));
        return -1;
    }
    if (v > max) {
        REFUSE(r, "%s:%ld: field %d of %d: found %d%s, expected %s 0 to %d", r->path, r->line,
               field + 1, FIELDS, v, digits > 3 ? "..." : "",
               field == CAP_PIXELS ? "a label" : "a pixel", max);
        return -1;
    }
    *value = (uint8_t)v;
    *end = c;
    return 0;
}

/* 1: a row, 0: the end, -1: refused */
static int read_row(struct reader *r, uint8_t *row)
{
    char text[16];
    int c = getc(r->file);

    if (c == EOF && !ferror(r->file))
        return 0;
    ungetc(c, r->file);
    for (int field = 0; field < FIELDS; field++) {
        bool last = field == FIELDS - 1;
        if (read_field(r, field, &row[field], &c) < 0)
            return -1;
        if (last ? c == '\n' || c == EOF : c == ',')
            continue;
        if (c == '\n' || c == EOF)
            REFUSE(r, "%s:%ld: found %d fields, expected %d", r->path, r->line, field + 1, FIELDS);
        else
            REFUSE(r, "%s:%ld: after field %d of %d: expected %s, found %s", r->path, r->line,
                   field + 1, FIELDS, last ? "the end of the line" : "a comma", seen(c, text));
        return -1;
    }
    return 1;
}

static int store_row(cap_data_t *d, int64_t *capacity, const uint8_t *row)
{
    if (d->n == *capacity) {
        int64_t more = *capacity ? *capacity * 2 : 256;
        void *pixels = realloc(d->pixels, (size_t)more * sizeof *d->pixels);
        if (!pixels)
            return -1;
        d->pixels = pixels;
        void *label = realloc(d->label, (size_t)more);
        if (!label)
            return -1;
        d->label = label;
        *capacity = more;
    }
    memcpy(d->pixels[d->n], row, CAP_PIXELS);
    d->label[d->n++] = row[CAP_PIXELS];
    return 0;
}

static int split(cap_data_t *d)
{
    d->train = malloc((size_t)d->n * sizeof *d->train);
    d->held = malloc((size_t)d->n * sizeof *d->held);
    if (!d->train || !d->held)
        return -1;
    for (int64_t i = 0; i < d->n; i++) {
        if (i % 6 == 5)
            d->held[d->nheld++] = i;
        else
            d->train[d->ntrain++] = i;
    }
    return 0;
}

int cap_data_load(cap_data_t *data, const char *path, char *why, int why_size)
{
    struct reader r = {
        .path = path, .line = 1, .why = why, .why_size = why_size > 0 ? (size_t)why_size : 0};
    cap_data_t d = {0};
    uint8_t row[FIELDS];
    int64_t capacity = 0;
    int got;

    r.file = fopen(path, "rb");
    if (!r.file) {
        REFUSE(&r, "%s: %s", path, strerror(errno));
        return -1;
    }
    errno = 0;
    while ((got = read_row(&r, row)) > 0) {
        if (store_row(&d, &capacity, row) < 0) {
            REFUSE(&r, "%s:%ld: no memory for %lld rows", path, r.line, (long long)d.n + 1);
            goto fail;
        }
        r.line++;
    }
    if (ferror(r.file)) {
        REFUSE(&r, "%s:%ld: %s", path, r.line, errno ? strerror(errno) : "could not be read");
        goto fail;
    }
    if (got < 0)
        goto fail;
    if (!d.n) {
        REFUSE(&r, "%s:1: found no rows, expected lines of %d numbers", path, FIELDS);
        goto fail;
    }
    if (split(&d) < 0) {
        REFUSE(&r, "%s: no memory for the indices of %lld rows", path, (long long)d.n);
        goto fail;
    }
    fclose(r.file);
    *data = d;
    return 0;
fail:
    fclose(r.file);
    cap_data_free(&d);
    return -1;
}

void cap_data_free(cap_data_t *data)
{
    free(data->pixels);
    free(data->label);
    free(data->train);
    free(data->held);
    memset(data, 0, sizeof *data);
}

const char *cap_caption(int label)
{
    static const char *const name[] = {"zero", "one", "two",   "three", "four",
                                       "five", "six", "seven", "eight", "nine"};
    return label >= 0 && label <= MAX_LABEL ? name[label] : "";
}

void cap_patches(const uint8_t *pixels, float *patches)
{
    for (int p = 0; p < CAP_PATCHES; p++)
        for (int k = 0; k < CAP_PATCH; k++) {
            int y = p / 4 * 2 + k / 2, x = p % 4 * 2 + k % 2;
            patches[p * CAP_PATCH + k] = (float)pixels[y * 8 + x] / (float)MAX_PIXEL;
        }
}

int64_t cap_crop(const uint8_t *pixels, float *patches, int64_t *cell)
{
    int y0 = 8, y1 = 0, x0 = 8, x1 = 0;
    uint8_t moved[CAP_PIXELS] = {0};
    float all[CAP_PATCHES * CAP_PATCH];
    int64_t n = 0;

    for (int i = 0; i < CAP_PIXELS; i++)
        if (pixels[i]) {
            y0 = i / 8 < y0 ? i / 8 : y0;
            y1 = i / 8 >= y1 ? i / 8 + 1 : y1;
            x0 = i % 8 < x0 ? i % 8 : x0;
            x1 = i % 8 >= x1 ? i % 8 + 1 : x1;
        }
    for (int y = y0; y < y1; y++)
        for (int x = x0; x < x1; x++)
            moved[(y - y0) * 8 + x - x0] = pixels[y * 8 + x];
    cap_patches(moved, all);
    for (int p = 0; p < CAP_PATCHES; p++)
        if (p / 4 * 2 < y1 - y0 && p % 4 * 2 < x1 - x0) {
            memcpy(patches + n * CAP_PATCH, all + p * CAP_PATCH, CAP_PATCH * sizeof *all);
            cell[n++] = p;
        }
    return n;
}

void cap_caption_text(const cap_data_t *data, const cap_task_t *task, const int64_t *rows,
                      char text[CAP_SAID])
{
    size_t offset = 0;

    for (int64_t k = 0; k < task->most && rows[k] >= 0; k++)
        offset += (size_t)snprintf(text + offset, CAP_SAID - offset, "%s%s", k ? " " : "",
                                   cap_caption(data->label[rows[k]]));
    if (!offset)
        snprintf(text, CAP_SAID, "none");
}

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Where place @i of [0, n) goes in the permutation that @key names. Six Feistel rounds permute
 * [0, 4^half); walking on while the value is >= n makes that a permutation of [0, n). */
static uint64_t permute(uint64_t key, uint64_t n, uint64_t i)
{
    int half = 1;
    while (half < 31 && (UINT64_C(1) << (2 * half)) < n)
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;

    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t k = 1; k <= 6; k++) {
            uint64_t f = mix(key + k * UINT64_C(0x9e3779b97f4a7c15) + mix(right)) & mask;
            uint64_t next = left ^ f;
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

void cap_batch(const cap_data_t *data, uint64_t seed, int64_t step, int64_t batch, int64_t *rows)
{
    uint64_t n = (uint64_t)data->ntrain, k = (uint64_t)step * (uint64_t)batch;

    for (int64_t i = 0; i < batch; i++, k++) {
        uint64_t key = mix(seed + mix(k / n + 1));
        rows[i] = data->train[permute(key, n, k % n)];
    }
}

/* Of [most] rows as many stay as the sample that @key names has images. */
static void drop(const cap_task_t *task, uint64_t key, int64_t *rows)
{
    int64_t n = task->least + (int64_t)(mix(key) % (uint64_t)(task->most - task->least + 1));

    for (int64_t k = n; k < task->most; k++)
        rows[k] = -1;
}

void cap_samples(const cap_data_t *data, const cap_task_t *task, uint64_t seed, int64_t step,
                 int64_t batch, int64_t *rows)
{
    cap_batch(data, seed, step, batch * task->most, rows);
    for (int64_t i = 0; i < batch; i++)
        drop(task, mix(seed ^ UINT64_C(0x5851f42d4c957f2d)) + (uint64_t)(step * batch + i),
             rows + i * task->most);
}

void cap_held_sample(const cap_data_t *data, const cap_task_t *task, int64_t i, int64_t *rows)
{
    uint64_t n = (uint64_t)data->nheld, k = (uint64_t)(i * task->most);

    for (int64_t j = 0; j < task->most; j++, k++)
        rows[j] = data->held[task->ragged ? permute(k / n, n, k % n) : k % n];
    drop(task, (uint64_t)i, rows);
}
