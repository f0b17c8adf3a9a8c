/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_bridge.h - which rank owns which element of [samples, rows, features], and what a bridge must
 * deliver.
 *
 * Plain and slow: every axis of every rank is a list of indices, cut by slicing lists. Written from
 * the formulas alone; includes nothing of the library and shares no arithmetic with it.
 */
#ifndef TESTS_REF_REF_BRIDGE_H
#define TESTS_REF_REF_BRIDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define REF_MAX_DIMS 8
#define REF_MAX_SPLITS 3

typedef enum ref_cut { REF_BLOCK = 1, REF_ZIGZAG = 2, REF_CEIL = 3 } ref_cut_t;
typedef enum ref_map { REF_IDENTITY = 0, REF_OFFSET = 1, REF_TABLE = 2 } ref_map_t;

typedef struct ref_split {
    const char *dim;
    ref_cut_t cut;
    bool context; /* partial gradients add up over this dim */
} ref_split_t;

/* One grid and its layout. Zero-initialised fields mean "none". */
typedef struct ref_side {
    int ndims; /* the first dim varies fastest */
    const char *name[REF_MAX_DIMS];
    int64_t extent[REF_MAX_DIMS];
    int64_t offset;
    int nsplits[3]; /* samples, rows, features */
    ref_split_t split[3][REF_MAX_SPLITS];
    ref_map_t map;
    int64_t map_offset;
    const int64_t *table;
    int64_t positions; /* 0: as many as rows */
    const char *stage_dim;
    int64_t stage; /* coordinate in stage_dim */
} ref_side_t;

typedef struct ref_shape {
    int64_t b, n, h;
} ref_shape_t;

/* What one rank owns, as index lists in local order. */
typedef struct ref_part {
    bool holds;     /* in the grid and on the stage */
    int64_t addend; /* ordinal among the context siblings */
    int64_t nb, ns, nh;
    int64_t *b, *s, *h;
} ref_part_t;

/* @n elements of zeros, for free(). Without memory it ends the program. */
void *ref_zeros(int64_t n, size_t size);

int64_t ref_side_size(const ref_side_t *side);
int64_t ref_side_coord(const ref_side_t *side, int64_t rank, const char *dim); /* 0: no such dim */
int64_t ref_side_extent(const ref_side_t *side, const char *dim);              /* 1: no such dim */
bool ref_side_has(const ref_side_t *side, int64_t rank);
/* How many ranks' partial values make one gradient: the product of the context extents. */
int64_t ref_side_addends(const ref_side_t *side);
/* Product of the extents that cut the samples (DP). */
int64_t ref_side_dp(const ref_side_t *side);

/* @full_rows: all rows in row order, whatever the row splits. Free with ref_part_free(). */
void ref_part_make(ref_part_t *part, const ref_side_t *side, ref_shape_t shape, int64_t rank,
                   bool full_rows);
void ref_part_free(ref_part_t *part);
int64_t ref_part_count(const ref_part_t *part);
bool ref_list_has(const int64_t *list, int64_t n, int64_t v);

/* Position codes. x: one number per logical element, all different; d: another numbering; partial:
 * a hash of (addend, element), small enough that sums over 16 addends stay exact in @bits of
 * mantissa. */
int64_t ref_code_x(ref_shape_t shape, int64_t b, int64_t s, int64_t h);
int64_t ref_code_d(ref_shape_t shape, int64_t b, int64_t s, int64_t h);
int64_t ref_code_partial(int64_t addend, int64_t b, int64_t s, int64_t h, int bits);

/* dtypes by name, so that the header needs nothing of the library: "f32" "f64" "bf16" "f16" "i8"
 * ... */
size_t ref_dtype_size(const char *dtype);
/* Bytes that stand for a code in movement: exact numbers in f32, f64 and wide ints; a bit pattern
 * that is neither NaN nor infinity in bf16 and f16; the low bits in narrow ints. */
void ref_encode_move(const char *dtype, int64_t code, void *out);
/* The number @v rounded once to a float dtype, nearest even. */
void ref_encode_number(const char *dtype, double v, void *out);
/* How many bits of magnitude an addend of ref_code_partial() may have in this dtype. */
int ref_partial_bits(const char *dtype);

#endif
