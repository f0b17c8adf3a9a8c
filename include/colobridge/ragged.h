/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged.h - a bridge for ragged batches: any number of rows per image, of images per sample.
 *
 * Create the bridge with config.ragged. In each step, set the tables of the step (segments.h), ask
 * how many rows this rank has, then run forward and backward on the batch that it returned.
 * Several batches with different tables may be outstanding. docs/concepts/ragged.md shows the path of
 * one image.
 *
 * Tensors are [rows, features]. On a source rank x has the rows of its replica's segments, in the
 * order of the tables, cut into equal blocks over the ranks that split rows. On a destination rank
 * y has, with
 *   COLO_PLACEMENT_PACKED  all rows of its replica, by sequence and position
 *                          (COLO_OUTPUT_FULL_SEQ), or those of them that the rank owns (SHARDED)
 *   COLO_PLACEMENT_MERGED  the whole sequence axis of its replica (FULL_SEQ), or the rank's part of
 *                          it: the batch's rows are written at their positions, nothing else is
 */
#ifndef COLOBRIDGE_RAGGED_H
#define COLOBRIDGE_RAGGED_H

#include <colobridge/bridge.h>
#include <colobridge/segments.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_batch colo_batch_t;

/**
 * colo_bridge_set_segments() - plan a batch; local, nothing waits, unless the tables are refused
 * All ranks of the bridge's comm set the same tables, so they all refuse them or none does. The
 * first call on the batch compares them; a rank that does not come to it is COLO_ERR_TIMEOUT on
 * the others. At COLO_CHECK >= 1 a rank that refuses its tables, or another argument than a NULL
 * @bridge, takes part in that comparison before it returns: if the arguments of other ranks were
 * accepted, their first call is COLO_ERR_PEER with this rank's error message, and the comm lives
 * on. At 0 the refusal is this rank's alone.
 * @segments:  borrowed for the call: the tables may be freed or changed afterwards
 * @batch:     out: owned by the caller, destroyed before the bridge. Batches set before stay valid
 * Errors:     those of colo_segments_check(); COLO_ERR_ARG (the bridge is not ragged, more rows
 *             than max_rows), COLO_ERR_MISSING (a peer is not in the comm), COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_bridge_set_segments(colo_bridge_t *bridge,
                                                const colo_segments_t *segments,
                                                colo_batch_t **batch);
/**
 * colo_bridge_set_packing() - plan a batch that moves packed sequences from one cut to another;
 * local, as colo_bridge_set_segments() on all points
 * Forward moves every row that a destination rank lacks, once, bit for bit. Backward is the
 * adjoint. If @dst is WHOLE, gradients are PARTIAL: each context rank brings values of all rows,
 * and the bridge adds them in rank order. If @src is WHOLE, each copy gets the whole gradient.
 * Tensors are [rows, features]; colo_packing_rows() and colo_packing_index() say which rows.
 * @bridge:    created with config.packed
 * @src, @dst: borrowed for the call: the same sequences; the replicas that hold them may differ
 * @batch:     out: owned by the caller, destroyed before the bridge
 * Errors:     those of colo_packing_rows(); COLO_ERR_ARG (the bridge is not packed, the lengths
 *             differ, more rows than max_rows), COLO_ERR_MISSING, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_bridge_set_packing(colo_bridge_t *bridge, const colo_packing_t *src,
                                               const colo_packing_t *dst, colo_batch_t **batch);
/**
 * colo_bridge_rows() - rows of this rank's x and y for the tables set last; 0 before. Local
 * @src_rows, @dst_rows:  out, may be NULL
 */
COLO_API void colo_bridge_rows(const colo_bridge_t *bridge, int64_t *src_rows, int64_t *dst_rows);

/**
 * colo_batch_forward() - carry @n tensors with one routing, in one message per pair of ranks
 * @x:       in   [n] tensors [source rows, features]; NULL on ranks without source rows
 * @y:       out  [n] tensors [destination rows, features], each with the dtype and the features of
 *                its x. NULL on ranks to which nothing arrives. Overlaps no x and no other y. With
 *                COLO_PLACEMENT_MERGED only the rows of the batch are written
 * @n:       at least 1, the same on all ranks. Tensors may differ in dtype and features
 * @stream:  NULL on the host; on a GPU the call enqueues the work here, and the host does not wait
 *
 * Check:    at COLO_CHECK >= 1 the first call on a batch compares the tables, the pass, n, and the
 *           dtype and features of each tensor between all ranks of the comm: an error on any rank
 *           is an error on all, nothing is written, and the comm lives on. Later calls compare
 *           between ranks that exchange messages. At 2 every call compares
 * Errors:   COLO_ERR_MISMATCH (tables, dtypes or features differ; the error message names the table
 *           or the tensor, two ranks, and what they have), COLO_ERR_ARG,
 *           COLO_ERR_SHAPE (nothing is written; if ranks are not compared, the comm is marked
 *           failed, because peers wait), COLO_ERR_TIMEOUT, COLO_ERR_PEER, COLO_ERR_NOMEM,
 *           COLO_ERR_STATE (a capture needs memory that is not there), COLO_ERR_CUDA,
 *           COLO_ERR_NCCL
 */
COLO_API colo_status_t colo_batch_forward(colo_batch_t *batch, const colo_tensor_t *x,
                                          const colo_tensor_t *y, int32_t n, colo_stream_t stream);
/**
 * colo_batch_backward() - carry the gradients of y back to those of x
 * @d_y:     in   [n] tensors of y's shapes; with COLO_PLACEMENT_MERGED only the rows of the
 *                batch are read
 * @d_x:     out  [n] tensors of x's shapes; every element is written
 * @n:       may differ from that of the forward, because tensors without a gradient are left out
 * @stream:  as in forward
 * Errors:   as in forward; COLO_ERR_STATE if created with no_grad; COLO_ERR_ARG: PARTIAL gradients
 *           of a dtype that cannot be added
 */
COLO_API colo_status_t colo_batch_backward(colo_batch_t *batch, const colo_tensor_t *d_y,
                                           const colo_tensor_t *d_x, int32_t n,
                                           colo_stream_t stream);
/** colo_batch_plan() - what this rank sends and receives, with the bytes of one tensor of the
 *  bridge's features and dtype; a view. Rows of regions are numbered along the source replicas */
COLO_API const colo_plan_t *colo_batch_plan(const colo_batch_t *batch);
/**
 * colo_plan_create_ragged() - the plan of world rank @rank for a ragged batch; local, no bridge
 * It is the plan of a batch that a bridge with these layouts and options makes on that rank.
 * @config:    of its shape only features count, the rest is 0
 * @segments:  borrowed for the call
 * @plan:      out: owned by the caller; destroy with colo_plan_destroy(). Rows of regions are
 *             numbered along the source replicas
 * Errors:     those of colo_plan_create() and colo_segments_check()
 */
COLO_API colo_status_t colo_plan_create_ragged(colo_plan_t **plan, const colo_plan_config_t *config,
                                               const colo_segments_t *segments, int64_t rank);
/**
 * colo_plan_create_packed() - the plan of world rank @rank for a batch that moves packed sequences
 * from one cut to another; local, no bridge. It is the plan of a batch of
 * colo_bridge_set_packing() on that rank.
 * @config:    of its shape only features count; output and grad are 0, because the packings say
 *             what a rank has
 * @src, @dst: borrowed for the call: the same sequences
 * @plan:      out: owned by the caller; destroy with colo_plan_destroy(). Rows of regions are
 *             numbered sequence by sequence in table order
 * Errors:     those of colo_plan_create() and colo_packing_rows(); COLO_ERR_ARG: the lengths differ
 */
COLO_API colo_status_t colo_plan_create_packed(colo_plan_t **plan, const colo_plan_config_t *config,
                                               const colo_packing_t *src, const colo_packing_t *dst,
                                               int64_t rank);
/** colo_batch_runs() - which rows of y forward writes; with COLO_PLACEMENT_MERGED the other rows
 * are the text. Of packings it is one run, all rows; with seq_room those that are not padding
 * @runs:    out [@cap], may be NULL: rows local .. local + count - 1 of y are at positions row ..
 *           row + count - 1 of the replica's axis. Ascending by row
 * Returns:  how many runs there are, which may exceed @cap; 0 for NULL */
COLO_API int64_t colo_batch_runs(const colo_batch_t *batch, colo_run_t *runs, int64_t cap);
/** colo_batch_destroy() - local; takes NULL */
COLO_API void colo_batch_destroy(colo_batch_t **batch);

#ifdef __cplusplus
}
#endif
#endif
