/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inspect.h (private) - looking at a caller's memory, wherever it is: may it be used, what is in
 * it.
 *
 * One table per kind of memory, as core/ops.h. Checks are cheap and may run in a capture. What
 * reads memory waits for the stream, which must not be capturing.
 */
#ifndef COLO_CORE_INSPECT_H
#define COLO_CORE_INSPECT_H

#include <colobridge/comm.h>
#include <colobridge/tensor.h>

typedef struct colo_inspect_ops {
    /* Can kernels of the current device use @p? @device: where its tensor says it is, -1: nowhere.
     */
    colo_status_t (*pointer_check)(const void *p, int32_t device, const char *what);
    /* Is @stream one of the current device; @capturing: out. */
    colo_status_t (*stream_check)(colo_stream_t stream, bool *capturing);

    /* A number that differs when the box's bits differ, comparable within one table only. */
    colo_status_t (*box_hash)(const colo_box_t *box, size_t elem_size, uint64_t *hash,
                              colo_stream_t stream);
    /* @first: the place, counted row by row, of the first element that is not zero (-0.0 of a float
     * dtype is zero); -1: there is none. */
    colo_status_t (*box_nonzero)(const colo_box_t *box, colo_dtype_t dtype, int64_t *first,
                                 colo_stream_t stream);
    /* Over i with mask[i] != 0 (NULL: all), in fp64; f32 and f64. Values that do not count are not
     * read. */
    colo_status_t (*masked_sum)(const void *values, colo_dtype_t dtype, const uint8_t *mask,
                                int64_t count, double *num, int64_t *den, colo_stream_t stream);
} colo_inspect_ops_t;

extern const colo_inspect_ops_t colo_inspect_host;

#endif
