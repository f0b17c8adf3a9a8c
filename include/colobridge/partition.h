/* SPDX-License-Identifier: Apache-2.0 */
/*
 * partition.h - shard embeddings, labels and masks along the sequence, by the index code of
 * layouts.
 *
 * Dense batches: ZIGZAG over cp, then BLOCK over tp (sequence parallelism, embeddings only).
 * Packed (THD) batches: zigzag within each padded segment. The adjoint of shard is scatter into
 * zeros.
 *
 * Tensors of a call are in host memory, or on one CUDA device, which is the current one; cu_padded
 * is in host memory always, and read before the call returns. @stream is NULL on the host, where
 * work is done on return. On a GPU it is enqueued there: the host does not wait, nothing is
 * allocated, and the call may be captured in a CUDA graph.
 */
#ifndef COLOBRIDGE_PARTITION_H
#define COLOBRIDGE_PARTITION_H

#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Members from segments on have defaults: 0, NULL. */
typedef struct colo_partition_t {
    size_t struct_size;
    int64_t cp, cp_rank;
    int64_t tp, tp_rank;      /* 1, 0 for tensors that are not sequence-parallel */
    int64_t positions;        /* S, global; packed: total padded tokens */
    int64_t segments;         /* 0: dense; else packed */
    const int64_t *cu_padded; /* [segments + 1], borrowed: padded segment starts, cu[0] = 0 */
    bool contiguous;          /* each cp rank has one interval of all S positions; else zigzag */
} colo_partition_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_PARTITION_INIT sizeof(colo_partition_t), 0, 0, 0, 0, 0, 0, nullptr, false
#else
#define COLO_PARTITION_INIT .struct_size = sizeof(colo_partition_t)
#endif

/**
 * colo_partition_check() - do the members of @part fit together? Local
 * Errors:  COLO_ERR_ARG (rank outside its size). COLO_ERR_LAYOUT: 2*cp does not divide S, tp does
 *          not divide S/cp, cu_padded does not ascend from 0 to S, or 2*cp does not divide the
 *          padded length of a segment (cp > 1), naming the segment. Contiguous: cp does not divide
 * S
 */
COLO_API colo_status_t colo_partition_check(const colo_partition_t *part);
/** colo_partition_count() - local positions: S / cp / tp; 0 if @part cannot be read */
COLO_API int64_t colo_partition_count(const colo_partition_t *part);
/**
 * colo_partition_index() - global position of local index @i of a partition that was checked; -1
 * if @i is outside [0, count), or @part cannot be read
 */
COLO_API int64_t colo_partition_index(const colo_partition_t *part, int64_t i);
/**
 * colo_partition_shard() - local = global[index(i)] along @axis; other extents are equal
 * @global, @local:  any strides, same memory, dtype and number of axes; must not overlap
 * @stream:          NULL on the host; see the top of this header
 * Errors (nothing is written): those of colo_partition_check(); COLO_ERR_ARG (@axis, two memories,
 * on a GPU memory or a stream that the current device cannot use; a data pointer that is no
 * multiple of an element; @global and @local overlap), COLO_ERR_SHAPE (extents, dtypes, an output
 * whose strides let elements share an address), COLO_ERR_UNBUILT (no CUDA in this build, no GPU)
 */
COLO_API colo_status_t colo_partition_shard(const colo_partition_t *part,
                                            const colo_tensor_t *global, int32_t axis,
                                            const colo_tensor_t *local, colo_stream_t stream);
/**
 * colo_partition_unshard() - the adjoint: global[index(i)] = local, 0 elsewhere; each element of
 * global is written once. Arguments and errors as in colo_partition_shard()
 */
COLO_API colo_status_t colo_partition_unshard(const colo_partition_t *part,
                                              const colo_tensor_t *local, int32_t axis,
                                              const colo_tensor_t *global, colo_stream_t stream);
/**
 * colo_partition_next_token() - targets[i] = tokens[i + 1] on the *global* sequence, before
 * sharding
 * @tokens, @targets:  i64 [..., S], the same tensor or without overlap; per segment when packed
 * @last:              what the last position of a sequence (or segment) gets, e.g. the ignore
 *                     index
 * @stream:            as for shard; so are errors
 */
COLO_API colo_status_t colo_partition_next_token(const colo_partition_t *part,
                                                 const colo_tensor_t *tokens, int64_t last,
                                                 const colo_tensor_t *targets,
                                                 colo_stream_t stream);
/**
 * colo_partition_padded() - smallest length >= @length that every split accepts: a multiple of
 * lcm(cp > 1 ? tp * 2cp : tp, fp8 ? 16 cp : 1)
 * Errors:  COLO_ERR_ARG: sizes < 1, length < 0, overflow
 */
COLO_API colo_status_t colo_partition_padded(int64_t length, int64_t tp, int64_t cp, bool fp8,
                                             int64_t *padded);

#ifdef __cplusplus
}
#endif
#endif
