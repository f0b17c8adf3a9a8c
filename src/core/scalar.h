/* SPDX-License-Identifier: Apache-2.0 */
/* scalar.h (private) - elements of a float dtype in host memory, as doubles. */
#ifndef COLO_CORE_SCALAR_H
#define COLO_CORE_SCALAR_H

#include "core/half.h"

#include <colobridge/tensor.h>

#define COLO_INLINE static inline __attribute__((always_inline))

/* case by case, so that @f, which is COLO_INLINE, is compiled for each dtype: a switch per element
 * would take longer than the rest, and keeps a compiler from making vectors. */
#define COLO_FOR_FLOAT(dtype, f, ...) \
    switch (dtype) {                  \
    case COLO_F64:                    \
        f(COLO_F64, __VA_ARGS__);     \
        break;                        \
    case COLO_BF16:                   \
        f(COLO_BF16, __VA_ARGS__);    \
        break;                        \
    case COLO_F16:                    \
        f(COLO_F16, __VA_ARGS__);     \
        break;                        \
    default:                          \
        f(COLO_F32, __VA_ARGS__);     \
    }

COLO_INLINE double colo_scalar_get(colo_dtype_t dtype, const void *base, int64_t i)
{
    switch (dtype) {
    case COLO_F64:
        return ((const double *)base)[i];
    case COLO_BF16:
        return colo_bf16_to_f32(((const uint16_t *)base)[i]);
    case COLO_F16:
        return colo_f16_to_f32(((const uint16_t *)base)[i]);
    default:
        return ((const float *)base)[i];
    }
}

COLO_INLINE void colo_scalar_put(colo_dtype_t dtype, void *base, int64_t i, double value)
{
    switch (dtype) {
    case COLO_F64:
        ((double *)base)[i] = value;
        break;
    case COLO_BF16:
        ((uint16_t *)base)[i] = colo_f32_to_bf16((float)value);
        break;
    case COLO_F16:
        ((uint16_t *)base)[i] = colo_f32_to_f16((float)value);
        break;
    default:
        ((float *)base)[i] = (float)value;
    }
}

COLO_INLINE void colo_scalar_get_each(colo_dtype_t dtype, const void *base, int64_t first,
                                      double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = colo_scalar_get(dtype, base, first + i);
}

COLO_INLINE void colo_scalar_put_each(colo_dtype_t dtype, void *base, int64_t first,
                                      const double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        colo_scalar_put(dtype, base, first + i, values[i]);
}

#endif
