/* SPDX-License-Identifier: Apache-2.0 */
/* sums.h (private) - a sum of boxes that differ in dtype, for the tables of devices and kernels. */
#ifndef COLO_CORE_SUMS_H
#define COLO_CORE_SUMS_H

#include <colobridge/comm.h>

/* to = from[0] + from[1] + ... in that order. Dtypes are some of bf16, f16 and f32, which add up in
 * fp32, or f64 alone; one rounding. @to may be one of @from exactly. */
typedef struct colo_mixed_sum {
    colo_box_t to;
    const colo_box_t *from;         /* [n] */
    const colo_dtype_t *from_dtype; /* [n] */
    colo_dtype_t dtype;             /* of to */
    int32_t n;                      /* 1..COLO_MAX_ADDENDS */
} colo_mixed_sum_t;

#endif
