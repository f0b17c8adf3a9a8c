/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sampling.c - the kernels of sampling-args.h in plain C. What is done per logit is written once
 * for all dtypes and compiled for each: a switch per logit would take longer than the rest.
 */
#include "loss/sampling-args.h"

#include "loss/loss.h"
#include "loss/scalar.h"

#include <string.h>

/* colo_dtype_size(), which compilers see through */
COLO_INLINE int64_t size_of(colo_dtype_t dtype)
{
    return dtype == COLO_F64 ? 8 : dtype == COLO_F32 ? 4 : 2;
}

/* The bits of a logit, as a number */
COLO_INLINE uint64_t bits_at(colo_dtype_t dtype, const void *row, int64_t j)
{
    const int64_t size = size_of(dtype);
    const char *p = (const char *)row + j * size;
    uint16_t b16;
    uint32_t b32;
    uint64_t b64;
    if (size == 2)
        return memcpy(&b16, p, sizeof b16), b16;
    if (size == 4)
        return memcpy(&b32, p, sizeof b32), b32;
    return memcpy(&b64, p, sizeof b64), b64;
}

COLO_INLINE void put_bits(colo_dtype_t dtype, void *row, int64_t j, uint64_t bits)
{
    const int64_t size = size_of(dtype);
    char *p = (char *)row + j * size;
    const uint16_t b16 = (uint16_t)bits;
    const uint32_t b32 = (uint32_t)bits;
    if (size == 2)
        memcpy(p, &b16, sizeof b16);
    else if (size == 4)
        memcpy(p, &b32, sizeof b32);
    else
        memcpy(p, &bits, sizeof bits);
}

COLO_INLINE uint64_t sign_of(colo_dtype_t dtype)
{
    return UINT64_C(1) << (8 * size_of(dtype) - 1);
}

/* In the order of the logits; of -0 as of 0. No branch, because signs cannot be guessed. */
COLO_INLINE uint64_t key_of(colo_dtype_t dtype, uint64_t bits)
{
    const uint64_t sign = sign_of(dtype);
    bits = bits == sign ? 0 : bits;
    return bits ^ (((bits & sign ? UINT64_MAX : 0) | sign) & (sign | (sign - 1)));
}

COLO_INLINE uint64_t minus_infinity(colo_dtype_t dtype)
{
    return dtype == COLO_F64    ? UINT64_C(0xfff0000000000000)
           : dtype == COLO_F32  ? 0xff800000
           : dtype == COLO_BF16 ? 0xff80
                                : 0xfc00;
}

/* The logit of a key */
COLO_INLINE double logit_of(colo_dtype_t dtype, uint64_t key)
{
    const uint64_t sign = sign_of(dtype);
    union {
        uint16_t half;
        float f32;
        double f64;
    } z;
    put_bits(dtype, &z, 0, key & sign ? key ^ sign : ~key);
    return colo_scalar_get(dtype, &z, 0);
}

static const void *row_of(const struct colo_sampling_args *p, int64_t token)
{
    return (const char *)p->base.logits + token * p->base.row_stride * size_of(p->base.dtype);
}

/* M of a token; not finite: the row is copied. */
static double largest(const struct colo_sampling_args *args, int64_t token)
{
    double m = -INFINITY;
    for (int32_t r = 0; r < args->base.ranks; r++) {
        const double z =
            ((const double *)(colo_logprob_block_of(&args->base, r) + args->base.block.m))[token];
        m = z > m || isnan(z) ? z : m;
    }
    return args->base.factor * m;
}

/* One function, so that its roundings are the same wherever it is called. */
static __attribute__((noinline)) int64_t mass(const struct colo_sampling_args *args, double z,
                                              double m)
{
    const double units = exp(args->base.factor * z - m) * args->units;
    return units > 0 ? (int64_t)units : 0; /* NaN, of another rank's row, is 0, too */
}

/* Keys are compared: compilers put several into a register, but no comparisons that have to see a
 * NaN. */
COLO_INLINE void largest_in(colo_dtype_t dtype, const struct colo_sampling_args *args,
                            const void *row, double *m)
{
    uint64_t most = 0, least = UINT64_MAX;
    for (int64_t j = 0; j < args->base.true_columns; j++) {
        const uint64_t key = key_of(dtype, bits_at(dtype, row, j));
        most = key > most ? key : most;
        least = key < least ? key : least;
    }
    if (args->base.true_columns > 0) /* NaN is above inf or below -inf */
        *m = isnan(logit_of(dtype, least)) ? NAN : logit_of(dtype, most);
}

colo_status_t colo_host_sampling_largest(const struct colo_sampling_args *args,
                                         colo_stream_t stream)
{
    unsigned char *block = colo_logprob_block_of(&args->base, args->base.rank);
    memcpy(block, &args->base.header, sizeof args->base.header);
    for (int64_t token = 0; token < args->base.tokens; token++) {
        double m = -INFINITY;
        COLO_FOR_FLOAT(args->base.dtype, largest_in, args, row_of(args, token), &m)
        ((double *)(block + args->base.block.m))[token] = m;
    }
    return COLO_OK;
}

/* Two loops, because a test of what is weighed takes as long as the rest of the first one. */
COLO_INLINE void add_row(colo_dtype_t dtype, const struct colo_sampling_args *args, const void *row,
                         double m, uint64_t prefix, int64_t *sums)
{
    const int shift = 8 * (args->digits - 1 - args->digit);
    const bool first = args->digit == 0;
    const uint64_t minus = minus_infinity(dtype);
    /* In turns, so that equal digits in a row do not wait for each other. The last of a table are
     * the logits with another prefix: no branch that is guessed wrong. */
    int64_t counts[4][COLO_SAMPLING_DIGITS + 1] = {{0}};
    for (int64_t j = 0; j < args->base.true_columns && (!args->weigh || shift == 0); j++) {
        const uint64_t key = key_of(dtype, bits_at(dtype, row, j));
        const bool counted = first || key >> shift >> 8 == prefix;
        counts[j & 3][counted ? key >> shift & 255 : COLO_SAMPLING_DIGITS]++;
    }
    for (int64_t j = 0; j < args->base.true_columns && args->weigh && shift > 0; j++) {
        const uint64_t bits = bits_at(dtype, row, j), key = key_of(dtype, bits);
        if (bits != minus /* weighs nothing, and after top_k most are */ &&
            (first || key >> shift >> 8 == prefix))
            sums[key >> shift & 255] += mass(args, colo_scalar_get(dtype, row, j), m);
    }
    for (int d = 0; d < COLO_SAMPLING_DIGITS; d++) {
        const int64_t n = counts[0][d] + counts[1][d] + counts[2][d] + counts[3][d];
        if (n > 0) /* of one mass, because the last digit makes a key */
            sums[d] =
                n * (args->weigh ? mass(args, logit_of(dtype, prefix << 8 | (uint64_t)d), m) : 1);
    }
}

colo_status_t colo_host_sampling_sums(const struct colo_sampling_args *args, colo_stream_t stream)
{
    int64_t *sums = args->sums + args->base.rank * args->base.tokens * COLO_SAMPLING_DIGITS;
    memset(sums, 0, (size_t)args->base.tokens * COLO_SAMPLING_DIGITS * sizeof *sums);
    for (int64_t token = 0; token < args->base.tokens; token++, sums += COLO_SAMPLING_DIGITS) {
        const double m = largest(args, token);
        if (isfinite(m))
            COLO_FOR_FLOAT(args->base.dtype, add_row, args, row_of(args, token), m,
                           args->prefix[token], sums)
    }
    return COLO_OK;
}

static int64_t wanted_of(const struct colo_sampling_args *args, int64_t total)
{
    const int64_t need = args->weigh ? (int64_t)ceil((double)total * args->top_p) : args->top_k;
    return need < 1 ? 1 : need > total ? total : need;
}

static void find(const struct colo_sampling_args *args, int64_t token)
{
    const int64_t start = args->base.config.logits.vocab_start,
                  rows = args->base.tokens * COLO_SAMPLING_DIGITS;
    const int64_t *sums = args->sums + token * COLO_SAMPLING_DIGITS;
    int64_t each[COLO_SAMPLING_DIGITS] = {0}, total = 0,
            before = args->digit ? args->above[token] : 0;
    int d = COLO_SAMPLING_DIGITS - 1;
    for (int32_t r = 0; r < args->base.ranks; r++)
        for (int i = 0; i < COLO_SAMPLING_DIGITS; i++) {
            each[i] += sums[r * rows + i];
            total += sums[r * rows + i];
        }
    if (args->digit == 0)
        args->wanted[token] = wanted_of(args, total);
    for (; d > 0 && before + each[d] < args->wanted[token]; d--)
        before += each[d];
    args->above[token] = before;
    args->prefix[token] = (args->digit ? args->prefix[token] << 8 : 0) | (uint64_t)d;
    if (args->digit < args->digits - 1)
        return;
    args->wanted[token] -= before;
    for (int32_t r = 0; r < args->base.ranks; r++) /* equal logits of lower ids come first */
        if (((const colo_logprob_header_t *)colo_logprob_block_of(&args->base, r))->start < start)
            args->wanted[token] -= sums[r * rows + d];
}

colo_status_t colo_host_sampling_find(const struct colo_sampling_args *args, colo_stream_t stream)
{
    for (int64_t token = 0; token < args->base.tokens; token++)
        if (isfinite(largest(args, token)))
            find(args, token);
    return COLO_OK;
}

COLO_INLINE void keep_row(colo_dtype_t dtype, const struct colo_sampling_args *args,
                          const void *row, int64_t token, double m, void *out)
{
    const int64_t n = args->base.true_columns;
    const uint64_t last = isfinite(m) ? args->prefix[token] : 0;
    const int64_t each = args->weigh ? mass(args, logit_of(dtype, last), m) : 1;
    const uint64_t minus = minus_infinity(dtype);
    for (int64_t j = 0; j < n; j++) {
        const uint64_t bits = bits_at(dtype, row, j);
        put_bits(dtype, out, j, key_of(dtype, bits) >= last ? bits : minus);
    }
    for (int64_t j = 0, seen = 0; j < n && isfinite(m); j++)
        if (key_of(dtype, bits_at(dtype, out, j)) == last) {
            if (seen >= args->wanted[token])
                put_bits(dtype, out, j, minus);
            seen += each;
        }
    for (int64_t j = n; j < args->base.columns; j++)
        put_bits(dtype, out, j, minus);
}

colo_status_t colo_host_sampling_keep(const struct colo_sampling_args *args, colo_stream_t stream)
{
    const int64_t size = size_of(args->base.dtype);
    for (int64_t token = 0; token < args->base.tokens; token++) {
        void *out = (char *)args->out + token * args->out_stride * size;
        COLO_FOR_FLOAT(args->base.dtype, keep_row, args, row_of(args, token), token,
                       largest(args, token), out)
    }
    return COLO_OK;
}
