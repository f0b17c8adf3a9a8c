/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.h (private) - what touches elements: box copies and sums, and the passes of the loss.
 *
 * One table per kind of memory (ops-host.c; ops-cuda.c in libcolobridge-cuda.so). A pass gets
 * checked arguments; it allocates nothing and does not wait. The oracle of every table is
 * tests/ref/.
 */
#ifndef COLO_CORE_OPS_H
#define COLO_CORE_OPS_H

#include <colobridge/comm.h>
#include <colobridge/tensor.h>

/* ---- boxes ---- */

/* dst = src element by element; same extents, any strides, must not overlap. A src without data is
 * zeros: all bits of dst become zero, which is the zero of every dtype. */
typedef colo_status_t (*colo_box_copy_fn)(const colo_box_t *dst, const colo_box_t *src,
                                          size_t elem_size, colo_stream_t stream);
/* box_copy for @n pairs at once; no dst overlaps another pair's boxes. All dst lie in one tensor
 * that the caller has looked at (inspect.h), and so do all src with data: of each side one box is
 * checked. As few launches as it takes. */
typedef colo_status_t (*colo_box_list_fn)(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                                          size_t elem_size, colo_stream_t stream);
/* dst[.., i] = src[.., i + 1] along the last axis, dst[.., its end] = @last, for @n pairs of i64
 * boxes of equal extents; each dst is its src exactly or overlaps no src. One tensor a side, as
 * above. As few launches as it takes. */
typedef colo_status_t (*colo_box_shift_fn)(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                                           int64_t last, colo_stream_t stream);
#define COLO_MAX_ADDENDS 256

/* dst = src[0] + src[1] + ... in that order, 1..COLO_MAX_ADDENDS of a float dtype; fp32
 * accumulation for bf16 and fp16, the dtype's own for fp32 and fp64; one rounding. dst may be one
 * of the src boxes exactly. */
typedef colo_status_t (*colo_box_sum_fn)(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                                         colo_dtype_t dtype, colo_stream_t stream);

/* ---- loss, logits path: the passes are declared in src/loss/passes.h ---- */
struct colo_logprob_pass;
struct colo_beside_ops; /* src/loss/beside.h */

/* ---- loss, lm_head path: src/loss/linear.h ---- */
struct colo_linear_ops;

/* ---- a stream of the library's own, and events ---- */

/* Of the device that is current at create. On the host: stream() is NULL, the rest does nothing. */
struct colo_lane_ops {
    colo_status_t (*create)(int32_t events, void **lane);
    void (*destroy)(void *lane); /* takes NULL; waits for the stream */
    colo_stream_t (*stream)(void *lane);
    colo_status_t (*record)(void *lane, int32_t event, colo_stream_t on);
    colo_status_t (*wait)(void *lane, int32_t event, colo_stream_t on); /* event was recorded */
};
extern const struct colo_lane_ops colo_host_lanes; /* linear-host.c */

struct colo_inspect_ops;

typedef struct colo_ops {
    const char *name;
    /* Memory of the thread's current device, aligned to 256; @bytes > 0. free takes NULL. */
    colo_status_t (*alloc)(size_t bytes, void **p);
    void (*free)(void *p);
    colo_status_t (*zero)(void *p, size_t bytes, colo_stream_t stream);
    colo_box_copy_fn box_copy;
    colo_box_sum_fn box_sum;
    colo_status_t (*logprob_stats)(const struct colo_logprob_pass *p, colo_stream_t stream);
    colo_status_t (*logprob_merge)(const struct colo_logprob_pass *p, colo_stream_t stream);
    colo_status_t (*logprob_grad)(const struct colo_logprob_pass *p, colo_stream_t stream);
    colo_box_list_fn box_list;
    colo_box_shift_fn box_shift;
    const struct colo_lane_ops *lanes;      /* NULL: none for this memory, and no lm_head path */
    const struct colo_linear_ops *linear;   /* likewise */
    const struct colo_inspect_ops *inspect; /* core/inspect.h; never NULL */
    const struct colo_beside_ops *beside;   /* likewise, for what is in src/loss/beside.h */
} colo_ops_t;

extern const colo_ops_t colo_ops_host;

/* The table for a tensor's memory; COLO_ERR_UNBUILT with a sentence when this build lacks it. */
colo_status_t colo_ops_for(colo_mem_t mem, const colo_ops_t **ops);

#endif
