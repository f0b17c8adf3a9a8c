/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.h - targets, masks and gathered log-probabilities of a batch whose positions are split
 * over context ranks: dense or packed, padded on either side.
 *
 * The batch has B rows of S columns. Row b has lengths[b] tokens, in its first columns or, if left
 * padded, in its last ones. The model sees local elements: [B, padded / cp] of a dense batch, and
 * [cu_padded[B] / cp] of a packed one, in which each row is a segment that begins with its tokens.
 * The cut of partition.h, zigzag or contiguous, decides which element is which position. An
 * element's *target* is the next token of its row, on whatever rank that token is: the whole
 * sequence is shifted before it is sharded. The last token of a row and padding have no target. With
 * a depth, for multi-token prediction, it is the token that comes depth later, and the last
 * 1 + depth tokens have none.
 * Log-probabilities of targets are [B, S - 1]: column c belongs to the token in column c and
 * predicts the one in c + 1.
 *
 * Each call is one pass over elements; nothing loops over the batch. Host or CUDA memory.
 */
#ifndef COLOBRIDGE_SEQUENCE_H
#define COLOBRIDGE_SEQUENCE_H

#include <colobridge/comm.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Members from padded on have defaults: 0, NULL, false. */
typedef struct colo_sequence_t {
    size_t struct_size;
    int64_t batch;     /* B */
    int64_t positions; /* S, columns of the batch, >= 1 */
    int64_t padded;    /* dense: columns of a row that the model sees, >= S; 0: S. Packed: unused */
    /* Arrays in host memory, borrowed for each call. */
    const int64_t *lengths;   /* [B] tokens of each row, 0..S. NULL: S (packed: the padded length,
                               * or S if that is less) */
    const int64_t *cu_padded; /* [B + 1] first position of each row's segment; NULL: dense */
    bool left_padded;         /* in the batch; segments begin with their tokens all the same */
    int64_t cp, cp_rank;      /* of the context group; cp 0: 1 */
    /* If tensors are on a GPU: copies of these arrays there, NULL iff the arrays are NULL. */
    const int64_t *device_lengths;
    const int64_t *device_cu_padded;
    bool contiguous; /* each context rank has one interval: of a dense row, or of the whole packed
                        stream; else zigzag of each row */
    int64_t depth; /* a target is 1 + depth tokens ahead */
} colo_sequence_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_SEQUENCE_INIT \
    sizeof(colo_sequence_t), 0, 0, 0, nullptr, nullptr, false, 0, 0, nullptr, nullptr, false, 0
#else
#define COLO_SEQUENCE_INIT .struct_size = sizeof(colo_sequence_t)
#endif

/** The question that a mask answers for each element. */
typedef enum colo_sequence_mask_t {
    COLO_SEQUENCE_TOKENS = 0, /* does it hold a token? */
    COLO_SEQUENCE_TARGETS = 1 /* does it have a target? */
} colo_sequence_mask_t;

/** How the gradient of a gathered output comes back to the context ranks. */
typedef enum colo_sequence_adjoint_t {
    /* Every context rank computes the same loss from the gathered output, and it counts once: each
     * rank takes its own elements of d_out. The scale does not depend on cp. No collective. */
    COLO_SEQUENCE_SLICE = 0,
    /* Each rank's loss is a part of the whole: the gradients of all ranks are added, in rank order,
     * and each rank takes its own. If all ranks compute the same loss, this is cp times the other
     * one. One reduce-scatter. */
    COLO_SEQUENCE_SUM = 1
} colo_sequence_adjoint_t;

/**
 * colo_sequence_check() - do the members of @seq fit together? Local
 * Errors:  COLO_ERR_ARG (sizes). COLO_ERR_LAYOUT, naming the row: more tokens than columns or than
 *          its segment, a padded length that 2 * cp does not divide (cp > 1), a segment shorter
 *          than 2 * cp, cu_padded not ascending from 0. A segment of 0 positions is fine.
 * Contiguous: cp must divide the positions of a dense row, or of the stream, and nothing else
 */
COLO_API colo_status_t colo_sequence_check(const colo_sequence_t *seq);
/**
 * colo_sequence_count() - local elements of each rank, the same on all ranks; @seq is not checked.
 * 0 if they pass 2^63
 */
COLO_API int64_t colo_sequence_count(const colo_sequence_t *seq);

/**
 * colo_sequence_targets() - the target of every local element; local
 * @tokens:  in  i64 [B, S], or i64 [cu_padded[B]] of a packed batch; columns contiguous. Every
 *               rank has all of it
 * @ignore:  written for elements without a target
 * @targets: out i64 with colo_sequence_count() elements, contiguous, in the memory of @tokens
 * @stream:  NULL on the host, where the call returns when the work is done. On a GPU the call
 *           enqueues the work on @stream
 * Errors:   those of colo_sequence_check(), COLO_ERR_ARG, COLO_ERR_SHAPE, COLO_ERR_UNBUILT
 */
COLO_API colo_status_t colo_sequence_targets(const colo_sequence_t *seq,
                                             const colo_tensor_t *tokens, int64_t ignore,
                                             const colo_tensor_t *targets, colo_stream_t stream);
/**
 * colo_sequence_mask() - u8 1 or 0 for every local element, from the lengths alone; local
 * @what:    the question that the mask answers
 * @mask:    out u8 with colo_sequence_count() elements, contiguous. A dense sequence with cp = 1
 *               gives the mask of the batch itself, [B, S]
 * @stream:  as in colo_sequence_targets(); so are the errors
 */
COLO_API colo_status_t colo_sequence_mask(const colo_sequence_t *seq, colo_sequence_mask_t what,
                                          const colo_tensor_t *mask, colo_stream_t stream);

/**
 * colo_sequence_workspace_size() - bytes that gathering and its adjoint need: cp * count elements
 * @bytes:  out
 */
COLO_API colo_status_t colo_sequence_workspace_size(const colo_sequence_t *seq, colo_dtype_t dtype,
                                                    size_t *bytes);
/**
 * colo_sequence_gather() - gather the values of all ranks' elements into [B, S - 1]; collective
 * @local:     in  f32 or f64 with colo_sequence_count() elements, contiguous
 * @out:       out [B, S - 1], dtype of @local, columns contiguous; 0 if there is no target
 * @group:     the cp group, ranked by cp_rank; NULL is an error (colo_comm_create_self() for cp =
 *             1). One all-gather; none if cp is 1
 * @workspace: colo_sequence_workspace_size() bytes, aligned, free again after the call
 * @stream:    as in colo_sequence_targets()
 * Errors:     those of colo_sequence_targets() and of colo_comm_all_gather()
 */
COLO_API colo_status_t colo_sequence_gather(const colo_sequence_t *seq, const colo_tensor_t *local,
                                            const colo_tensor_t *out, colo_comm_t *group,
                                            void *workspace, colo_stream_t stream);
/**
 * colo_sequence_gather_backward() - the gradient of the elements, from that of the gathered output
 * @adjoint:   which of the two adjoints; SUM is collective, SLICE is local
 * @d_out:     in  [B, S - 1], as @out of forward
 * @d_local:   out as @local of forward; 0 for elements without a target
 * @group:     as in forward; not used with COLO_SEQUENCE_SLICE, where it may be NULL
 * @workspace: as in forward; not used with COLO_SEQUENCE_SLICE, where it may be NULL
 * @stream:    as in forward
 */
COLO_API colo_status_t colo_sequence_gather_backward(
    const colo_sequence_t *seq, colo_sequence_adjoint_t adjoint, const colo_tensor_t *d_out,
    const colo_tensor_t *d_local, colo_comm_t *group, void *workspace, colo_stream_t stream);
/**
 * colo_sequence_pack() - cu_padded of rows of @lengths, each padded by colo_partition_padded();
 * local
 * @lengths:   in  [batch], host memory
 * @cu_padded: out [batch + 1], host memory. A row of 0 tokens stays empty. Untouched on error
 * Errors:     COLO_ERR_ARG: NULL, a negative length, sizes < 1, overflow
 */
COLO_API colo_status_t colo_sequence_pack(const int64_t *lengths, int64_t batch, int64_t tp,
                                          int64_t cp, bool fp8, int64_t *cu_padded);

#ifdef __cplusplus
}
#endif
#endif
