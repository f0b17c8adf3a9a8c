/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.h (private) - a device: its memory, streams and events, checks of pointers, and what
 * touches elements.
 *
 * One table per kind of memory (device-host.c; cuda/device.c in libcolobridge-cuda.so). What
 * touches elements gets checked arguments; it allocates nothing and does not wait. The oracle of
 * every table is tests/ref/.
 */
#ifndef COLO_CORE_DEVICE_H
#define COLO_CORE_DEVICE_H

#include "core/error.h"
#include "core/sums.h"

#include <colobridge/comm.h>
#include <colobridge/tensor.h>

#define COLO_MAX_ADDENDS 256

/* What one call has asked the driver: once for the current device, once for each pointer. Zeroed
 * when the call begins. */
typedef struct colo_queries {
    bool known; /* is device? */
    int32_t device;
    int32_t n;
    const void *seen[16]; /* [n] pointers that may be used; more are asked about each time */
} colo_queries_t;

typedef colo_status_t (*colo_box_list_fn)(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                                          size_t elem_size, colo_stream_t stream);

typedef struct colo_device {
    const char *name;

    colo_status_t (*load)(void); /* all kernels, on the current device; NULL on the host */

    /* ---- memory of the thread's current device, aligned to 256 ---- */

    colo_status_t (*alloc)(size_t bytes, void **p); /* @bytes > 0 */
    void (*free)(void *p);                          /* takes NULL */
    colo_status_t (*zero)(void *p, size_t bytes, colo_stream_t stream);

    /* ---- a stream of the library's own, and events ----
     * They belong to the device that is current at create. On the host stream_of() is NULL, no
     * stream follows, the rest does nothing. */

    colo_status_t (*stream_create)(int32_t events, void **s);
    void (*stream_destroy)(void *s); /* takes NULL; waits for the stream, up to COLO_TIMEOUT_MS */
    colo_stream_t (*stream_of)(void *s);
    colo_status_t (*event_record)(void *s, int32_t event, colo_stream_t on);
    colo_status_t (*event_wait)(void *s, int32_t event, colo_stream_t on); /* it was recorded */
    /* The stream waits for what @from has been given, by @event. Not if one of the two is in a
     * capture of which the other is no part: then @follows is false. */
    colo_status_t (*stream_follow)(void *s, int32_t event, colo_stream_t from, bool *follows);

    /* ---- a caller's memory: may it be used, what is in it ----
     * Checks are cheap and may run in a capture. What reads memory waits for the stream, which must
     * not be capturing. */

    /* Can kernels of the current device use @p? @device: where its tensor says it is, -1: nowhere.
     */
    colo_status_t (*pointer_check)(colo_queries_t *q, const void *p, int32_t device,
                                   const char *what);
    /* Is @stream one of the current device; @capturing: out. */
    colo_status_t (*stream_check)(colo_queries_t *q, colo_stream_t stream, bool *capturing);

    /* To the caller's memory. */
    colo_status_t (*read)(void *to, const void *from, size_t bytes, colo_stream_t stream);
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

    /* ---- boxes ---- */

    /* dst = src element by element; same extents, any strides, must not overlap. A src without data
     * is zeros: all bits of dst become zero, which is the zero of every dtype. */
    colo_status_t (*box_copy)(const colo_box_t *dst, const colo_box_t *src, size_t elem_size,
                              colo_stream_t stream);
    /* box_copy for @n pairs at once; no dst overlaps another pair's boxes. All dst lie in one
     * tensor that the caller has checked (pointer_check), and so do all src with data: of each side
     * one box is checked. As few launches as it takes. */
    colo_box_list_fn box_list;
    /* box_list next to kernels of another stream: slower, and it leaves room for them. Both
     * together are faster than one after the other from @overlap_bytes on. */
    colo_box_list_fn box_list_narrow;
    int64_t overlap_bytes;
    /* dst[.., i] = src[.., i + 1] along the last axis, dst[.., its end] = @last, for @n pairs of
     * i64 boxes of equal extents; each dst is its src exactly or overlaps no src. One tensor a
     * side, as above. As few launches as it takes. */
    colo_status_t (*box_shift)(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                               int64_t last, colo_stream_t stream);
    /* dst = src[0] + src[1] + ... in that order, 1..COLO_MAX_ADDENDS of a float dtype; fp32
     * accumulation for bf16 and fp16, the dtype's own for fp32 and fp64; one rounding. dst may be
     * one of the src boxes exactly. */
    colo_status_t (*box_sum)(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                             colo_dtype_t dtype, colo_stream_t stream);
    /* @n sums, none of which reads what another one writes. As few launches as it takes. */
    colo_status_t (*box_sums)(const colo_mixed_sum_t *sums, int32_t n, colo_stream_t stream);
    /* to = wide + half for @n contiguous elements: wide is fp32 (NULL: zeros), half is bf16 or
     * fp16,
     * @dtype. @to is of @to_dtype, fp32 or @dtype, and is rounded once; it may be wide or half
     * exactly. */
    colo_status_t (*half_sum)(void *to, colo_dtype_t to_dtype, const float *wide, const void *half,
                              colo_dtype_t dtype, int64_t n, colo_stream_t stream);
} colo_device_t;

extern const colo_device_t colo_device_host;

/* The table for a tensor's memory; COLO_ERR_UNBUILT with an error message when this build lacks it.
 */
COLO_FOR_MODULES colo_status_t colo_device_for(colo_mem_t mem, const colo_device_t **device);

#endif
