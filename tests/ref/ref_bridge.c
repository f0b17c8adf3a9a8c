/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_bridge.c - brute-force ownership and the numbers that mark an element.
 *
 * A rank's samples start as the list 0..B-1, its positions as 0..S-1; each split keeps a slice of
 * the list that the one before left. Rows are then found by asking, for each position kept, which
 * rows sit there. No closed forms, no intervals: what the library computes by arithmetic is here
 * read off lists.
 */
#include "ref/ref_bridge.h"
#include "ref/ref_half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *ref_zeros(int64_t n, size_t size)
{
    void *p = calloc((size_t)(n > 0 ? n : 1), size);
    if (!p) {
        fprintf(stderr, "oracle: out of memory\n");
        abort();
    }
    return p;
}

int64_t ref_side_size(const ref_side_t *side)
{
    int64_t n = 1;
    for (int i = 0; i < side->ndims; i++)
        n *= side->extent[i];
    return n;
}

bool ref_side_has(const ref_side_t *side, int64_t rank)
{
    return rank >= side->offset && rank - side->offset < ref_side_size(side);
}

int64_t ref_side_extent(const ref_side_t *side, const char *dim)
{
    for (int i = 0; i < side->ndims; i++)
        if (strcmp(side->name[i], dim) == 0)
            return side->extent[i];
    return 1;
}

int64_t ref_side_coord(const ref_side_t *side, int64_t rank, const char *dim)
{
    int64_t left = rank - side->offset; /* peel the fastest dim off, one after the other */
    for (int i = 0; i < side->ndims; i++) {
        if (strcmp(side->name[i], dim) == 0)
            return left % side->extent[i];
        left /= side->extent[i];
    }
    return 0;
}

static bool is_context(const ref_side_t *side, const char *dim)
{
    for (int i = 0; i < side->nsplits[1]; i++)
        if (side->split[1][i].context && strcmp(side->split[1][i].dim, dim) == 0)
            return true;
    return false;
}

int64_t ref_side_addends(const ref_side_t *side)
{
    int64_t n = 1;
    for (int i = 0; i < side->ndims; i++)
        if (is_context(side, side->name[i]))
            n *= side->extent[i];
    return n;
}

int64_t ref_side_dp(const ref_side_t *side)
{
    int64_t n = 1;
    for (int i = 0; i < side->nsplits[0]; i++)
        n *= ref_side_extent(side, side->split[0][i].dim);
    return n;
}

/* Keeps in place what coordinate c of C keeps of list[0..n); returns the new length. */
static int64_t cut(int64_t *list, int64_t n, ref_cut_t how, int64_t parts, int64_t c)
{
    int64_t m = 0;
    int64_t *kept = ref_zeros(n, sizeof *kept);
    if (how == REF_BLOCK || parts == 1) { /* one rank has all, whatever the number */
        for (int64_t i = 0; i < n; i++)
            if (i >= c * n / parts && i < (c + 1) * n / parts)
                kept[m++] = list[i];
    } else if (how == REF_CEIL) { /* each takes as many as the first, while there are */
        int64_t first = 0;
        while (first * parts < n)
            first++;
        for (int64_t i = 0; i < n; i++)
            if (i / first == c)
                kept[m++] = list[i];
    } else {
        int64_t chunk = n / (2 * parts);
        for (int64_t i = 0; i < chunk; i++)
            kept[m++] = list[c * chunk + i];
        for (int64_t i = 0; i < chunk; i++)
            kept[m++] = list[(2 * parts - 1 - c) * chunk + i];
    }
    memcpy(list, kept, (size_t)m * sizeof *list);
    free(kept);
    return m;
}

static int64_t *axis_list(const ref_side_t *side, int axis, int64_t length, int64_t rank,
                          bool split, int64_t *n)
{
    int64_t *list = ref_zeros(length, sizeof *list);
    for (int64_t i = 0; i < length; i++)
        list[i] = i;
    *n = length;
    for (int k = 0; split && k < side->nsplits[axis]; k++) {
        const ref_split_t *sp = &side->split[axis][k];
        *n = cut(list, *n, sp->cut, ref_side_extent(side, sp->dim),
                 ref_side_coord(side, rank, sp->dim));
    }
    return list;
}

static int64_t position_of(const ref_side_t *side, int64_t row)
{
    if (side->map == REF_OFFSET)
        return side->map_offset + row;
    if (side->map == REF_TABLE)
        return side->table[row];
    return row;
}

void ref_part_make(ref_part_t *part, const ref_side_t *side, ref_shape_t shape, int64_t rank,
                   bool full_rows)
{
    memset(part, 0, sizeof *part);
    if (!ref_side_has(side, rank))
        return;
    if (side->stage_dim && ref_side_coord(side, rank, side->stage_dim) != side->stage)
        return;
    part->holds = true;
    int64_t weight = 1; /* addends count up with the rank: the fastest context dim first */
    for (int i = 0; i < side->ndims; i++)
        if (is_context(side, side->name[i])) {
            part->addend += weight * ref_side_coord(side, rank, side->name[i]);
            weight *= side->extent[i];
        }
    part->b = axis_list(side, 0, shape.b, rank, true, &part->nb);
    part->h = axis_list(side, 2, shape.h, rank, true, &part->nh);
    if (full_rows) {
        part->s = axis_list(side, 1, shape.n, rank, false, &part->ns);
        return;
    }
    int64_t npos, positions = side->positions ? side->positions : shape.n;
    int64_t *pos = axis_list(side, 1, positions, rank, true, &npos);
    part->s = ref_zeros(shape.n, sizeof *part->s);
    for (int64_t p = 0; p < npos; p++)
        for (int64_t row = 0; row < shape.n; row++)
            if (position_of(side, row) == pos[p])
                part->s[part->ns++] = row;
    free(pos);
}

void ref_part_free(ref_part_t *part)
{
    free(part->b);
    free(part->s);
    free(part->h);
    memset(part, 0, sizeof *part);
}

int64_t ref_part_count(const ref_part_t *part)
{
    return part->nb * part->ns * part->nh;
}

bool ref_list_has(const int64_t *list, int64_t n, int64_t v)
{
    for (int64_t i = 0; i < n; i++)
        if (list[i] == v)
            return true;
    return false;
}

int64_t ref_code_x(ref_shape_t shape, int64_t b, int64_t s, int64_t h)
{
    return 1 + h + shape.h * (s + shape.n * b);
}

int64_t ref_code_d(ref_shape_t shape, int64_t b, int64_t s, int64_t h)
{
    return 2 + b + shape.b * (h + shape.h * (shape.n - 1 - s));
}

int64_t ref_code_partial(int64_t addend, int64_t b, int64_t s, int64_t h, int bits)
{
    uint64_t z = (uint64_t)addend * 0x2545f4914f6cdd1du + (uint64_t)b * 0x9e3779b97f4a7c15u +
                 (uint64_t)s * 0xc2b2ae3d27d4eb4fu + (uint64_t)h * 0x165667b19e3779f9u + 0x1234567u;
    for (int i = 0; i < 3; i++) {
        z ^= z >> 29;
        z *= 0xbf58476d1ce4e5b9u;
    }
    z ^= z >> 32;
    int64_t range = (int64_t)1 << (bits + 1);
    int64_t v =
        (int64_t)(z % (uint64_t)(range - 1)) - (range / 2 - 1); /* -(2^bits - 1) .. 2^bits - 1 */
    return v ? v : 1; /* a zero would hide a dropped addend */
}

/* Asked for each element: calls of strcmp(), under ASan most of all, took longer than all else
 * here. */
static bool is(const char *a, const char *b)
{
    for (; *a && *a == *b; a++)
        b++;
    return *a == *b;
}

size_t ref_dtype_size(const char *dtype)
{
    if (is(dtype, "f64") || is(dtype, "i64"))
        return 8;
    if (is(dtype, "f32") || is(dtype, "i32"))
        return 4;
    if (is(dtype, "i8") || is(dtype, "u8"))
        return 1;
    return 2;
}

static void put_low_bytes(uint64_t v, size_t size, void *out)
{
    unsigned char *p = out;
    uint16_t probe = 1;
    unsigned char first;
    memcpy(&first, &probe, 1);
    for (size_t i = 0; i < size; i++)
        p[first ? i : size - 1 - i] = (unsigned char)(v >> (8 * i));
}

void ref_encode_move(const char *dtype, int64_t code, void *out)
{
    if (is(dtype, "f64") || is(dtype, "f32")) {
        ref_encode_number(dtype, (double)code, out);
    } else if (is(dtype, "bf16") || is(dtype, "f16")) {
        uint64_t exponent = dtype[0] == 'b' ? 0x7f80 : 0x7c00;
        uint64_t v = (uint64_t)code * 40503u & 0xffff; /* odd factor: 65536 different patterns */
        if ((v & exponent) == exponent)
            v &= ~(exponent & -exponent); /* neither infinity nor NaN */
        put_low_bytes(v, 2, out);
    } else if (is(dtype, "i64")) {
        put_low_bytes((uint64_t)code * UINT64_C(0x9e3779b97f4a7c15), 8, out);
    } else if (is(dtype, "i32")) {
        put_low_bytes((uint64_t)code * UINT64_C(0x9e3779b1), 4, out);
    } else if (is(dtype, "i16")) {
        put_low_bytes((uint64_t)code * 40503u, 2, out);
    } else {
        put_low_bytes((uint64_t)code * UINT64_C(0x9e3779b97f4a7c15) >> 56, 1, out);
    }
}

void ref_encode_number(const char *dtype, double v, void *out)
{
    const float narrow = (float)v;
    if (is(dtype, "f64"))
        memcpy(out, &v, sizeof v);
    else if (is(dtype, "f32"))
        memcpy(out, &narrow, sizeof narrow);
    else
        put_low_bytes(ref_half_round(is(dtype, "bf16") ? ref_bf16 : ref_f16, v), 2, out);
}

int ref_partial_bits(const char *dtype)
{
    if (is(dtype, "bf16"))
        return 8;
    if (is(dtype, "f16"))
        return 10;
    return is(dtype, "f32") ? 19 : 40;
}
