/* SPDX-License-Identifier: Apache-2.0 */
/* half.h (private) - bf16 and fp16 to and from float on the host; round to nearest even, NaN stays
 * NaN. */
#ifndef COLO_CORE_HALF_H
#define COLO_CORE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float colo_bf16_to_f32(uint16_t v)
{
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint16_t colo_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u); /* quiet NaN: rounding could carry it into infinity */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float colo_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 0x1fu, man = h & 0x3ffu, u;
    if (exp == 0x1f) {
        u = sign | 0x7f800000u | (man << 13);
    } else if (exp) {
        u = sign | ((exp + 112) << 23) | (man << 13);
    } else {
        float f = (float)man * 0x1p-24f; /* subnormal or zero, exact */
        memcpy(&u, &f, sizeof u);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint16_t colo_f32_to_f16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (a < 0x38800000u) {                 /* subnormal: let the FPU round at 2^-24 */
        float m;
        memcpy(&m, &a, sizeof m);
        m += 0.5f; /* ulp of [0.5, 1) is 2^-24 */
        memcpy(&a, &m, sizeof a);
        return (uint16_t)(sign | (a - 0x3f000000u));
    }
    a += 0xfffu + ((a >> 13) & 1u) - ((uint32_t)112 << 23);
    return (uint16_t)(sign | (a >> 13));
}

#endif
