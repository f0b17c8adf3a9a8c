/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_half.h - bf16 and fp16 by their definition, in double arithmetic: sign, exponent, fraction.
 * A double holds every value of both and every midpoint between neighbours exactly.
 */
#ifndef TESTS_REF_REF_HALF_H
#define TESTS_REF_REF_HALF_H

#include <math.h>
#include <stdint.h>

struct ref_format {
    int exp_bits, man_bits;
};
static const struct ref_format ref_bf16 = {8, 7}, ref_f16 = {5, 10};

static inline double ref_half_value(struct ref_format f, uint16_t bits)
{
    int bias = (1 << (f.exp_bits - 1)) - 1, top = (1 << f.exp_bits) - 1;
    int exp = bits >> f.man_bits & top, man = bits & ((1 << f.man_bits) - 1);
    double v;
    if (exp == top)
        v = man ? NAN : INFINITY;
    else if (exp == 0)
        v = ldexp(man, 1 - bias - f.man_bits);
    else
        v = ldexp((1 << f.man_bits) + man, exp - bias - f.man_bits);
    return bits & 0x8000 ? -v : v;
}

/* Nearest, ties to even. */
static inline uint16_t ref_half_round(struct ref_format f, double v)
{
    int bias = (1 << (f.exp_bits - 1)) - 1, top = (1 << f.exp_bits) - 1, exp;
    uint16_t sign = signbit(v) ? 0x8000 : 0;
    v = fabs(v);
    if (v == 0)
        return sign;
    if (isnan(v))
        return (uint16_t)(sign | top << f.man_bits | 1 << (f.man_bits - 1));
    frexp(v, &exp); /* v = m 2^exp, m in [1/2, 1) */
    if (isinf(v) || exp - 1 > bias)
        return (uint16_t)(sign | top << f.man_bits);
    int unit = exp - 1 < 1 - bias ? 1 - bias - f.man_bits : exp - 1 - f.man_bits;
    double q = v / ldexp(1, unit), whole = floor(q), rest = q - whole;
    if (rest > 0.5 || (rest == 0.5 && fmod(whole, 2) == 1))
        whole += 1;
    /* whole units of 2^unit; a carry runs into the exponent by itself */
    int64_t code = (int64_t)whole;
    if (unit > 1 - bias - f.man_bits)
        code += (int64_t)(unit - (1 - bias - f.man_bits)) << f.man_bits;
    return (uint16_t)(sign | code);
}

#endif
