/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence.h - targets, masks and gathered log-probabilities of a batch whose positions are split
 * over context ranks: dense or packed, padded on either side.
 *
 * The batch has B rows of S columns; row b holds lengths[b] tokens, at its first columns or, left
 * padded, at its last. The model sees local elements: of a dense batch [B, padded / cp], of a packed
 * one [cu_padded[B] / cp], a segment a row with its tokens first. Which element is which position is
 * partition.h's zigzag. An element's *target* is the next token of its row, wherever that one lives:
 * the shift is of the whole sequence, before it is sharded. The last token of a row and padding have
 * none. Log-probabilities of targets are [B, S - 1]: column c belongs to the token at column c and
 * predicts the one at c + 1.
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

typedef struct colo_sequence {
    size_t struct_size;
    int64_t batch;     /* B */
    int64_t positions; /* S, columns of the batch, >= 1 */
    int64_t padded;    /* dense: columns that the model sees of a row, >= S; 0 = S. Packed: not used */
    /* Arrays in host memory, borrowed for each call. */
    const int64_t *lengths;   /* [B] tokens of a row, 0..S. NULL: S (packed: the padded length, or S
                               * where that is less) */
    const int64_t *cu_padded; /* [B + 1] first position of each row's segment, from 0; NULL: dense */
    bool left_padded;         /* in the batch; segments have their tokens first all the same */
    int64_t cp, cp_rank;
    /* The same arrays in the memory of the tensors, where those are on a GPU; NULL as theirs are. */
    const int64_t *device_lengths;
    const int64_t *device_cu_padded;
} colo_sequence_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_SEQUENCE_INIT sizeof(colo_sequence_t), 0, 0, 0, nullptr, nullptr, false, 1, 0, nullptr, nullptr
#else
#define COLO_SEQUENCE_INIT .struct_size = sizeof(colo_sequence_t), .cp = 1
#endif

/** What an element is asked for. */
typedef enum colo_sequence_mask {
    COLO_SEQUENCE_TOKENS = 0, /* does it hold a token? */
    COLO_SEQUENCE_TARGETS = 1 /* has it a target: a token, and not its row's last? */
} colo_sequence_mask_t;

/** How the gradient of a gathered output comes back to the context ranks. */
typedef enum colo_sequence_adjoint {
    /* Every context rank made the same loss of the gathered output, and it counts once: a rank takes
     * its own elements of d_out. The scale does not depend on cp. No collective. */
    COLO_SEQUENCE_SLICE = 0,
    /* Each rank's loss is a part of the whole: gradients of all ranks are added, in rank order, and a
     * rank takes its own. cp times the other where all made the same. One reduce-scatter. */
    COLO_SEQUENCE_SUM = 1
} colo_sequence_adjoint_t;

/**
 * colo_sequence_check() - Errors: COLO_ERR_ARG (sizes), COLO_ERR_LAYOUT, by row: more tokens than
 * columns or than its segment, a padded length that 2 * cp does not divide (cp > 1), a segment shorter
 * than 2 * cp, cu_padded not ascending from 0. A segment of 0 positions is fine.
 */
COLO_API colo_status_t colo_sequence_check(const colo_sequence_t *seq);
/** colo_sequence_count() - local elements of a rank, the same on all; unchecked */
COLO_API int64_t colo_sequence_count(const colo_sequence_t *seq);

/**
 * colo_sequence_targets() - the target of every local element
 * @tokens:  in  i64 [B, S], or of a packed batch i64 [cu_padded[B]]; columns contiguous, whole: every
 *           rank has it
 * @ignore:  for elements without a target
 * @targets: out i64 with colo_sequence_count() elements, contiguous
 * Errors:   those of colo_sequence_check(), COLO_ERR_ARG, COLO_ERR_SHAPE, COLO_ERR_UNBUILT
 */
COLO_API colo_status_t colo_sequence_targets(const colo_sequence_t *seq,
                                             const colo_tensor_t *tokens, int64_t ignore,
                                             const colo_tensor_t *targets, colo_stream_t stream);
/**
 * colo_sequence_mask() - u8 1 or 0 for every local element, from the lengths alone
 * @mask:  out u8 with colo_sequence_count() elements, contiguous. Of the batch itself, [B, S]: a
 *         dense sequence with cp = 1
 */
COLO_API colo_status_t colo_sequence_mask(const colo_sequence_t *seq, colo_sequence_mask_t what,
                                          const colo_tensor_t *mask, colo_stream_t stream);

/** colo_sequence_workspace_size() - bytes that gathering and its adjoint need: cp * count elements
 */
COLO_API colo_status_t colo_sequence_workspace_size(const colo_sequence_t *seq, colo_dtype_t dtype,
                                                    size_t *bytes);
/**
 * colo_sequence_gather() - values of all ranks' elements, at their places in the batch
 * @local:   in  f32 or f64 with colo_sequence_count() elements, contiguous
 * @out:     out [B, S - 1], dtype of @local, columns contiguous; 0 where there is no target
 * @group:   the cp group, ranked by cp_rank; NULL is an error (colo_comm_create_self() for cp = 1)
 * @workspace: colo_sequence_workspace_size() bytes, free after the call; aligned
 * One all-gather; none when cp is 1.
 */
COLO_API colo_status_t colo_sequence_gather(const colo_sequence_t *seq, const colo_tensor_t *local,
                                            const colo_tensor_t *out, colo_comm_t *group,
                                            void *workspace, colo_stream_t stream);
/**
 * colo_sequence_gather_backward() - from the gradient of the gathered output to that of the
 * elements
 * @d_out:   in  [B, S - 1] as @out was
 * @d_local: out as @local was; 0 for elements without a target
 * @group:   as in forward; not used, and may be NULL, with COLO_SEQUENCE_SLICE
 * @workspace: as in forward; not used, and may be NULL, with COLO_SEQUENCE_SLICE
 */
COLO_API colo_status_t colo_sequence_gather_backward(
    const colo_sequence_t *seq, colo_sequence_adjoint_t adjoint, const colo_tensor_t *d_out,
    const colo_tensor_t *d_local, colo_comm_t *group, void *workspace, colo_stream_t stream);
/**
 * colo_sequence_pack() - cu_padded of rows of @lengths, each padded by colo_partition_padded()
 * @cu_padded: out [batch + 1]. A row of 0 tokens stays empty. Untouched on error
 * Errors:     COLO_ERR_ARG: NULL, a negative length, sizes < 1, overflow
 */
COLO_API colo_status_t colo_sequence_pack(const int64_t *lengths, int64_t batch, int64_t tp,
                                          int64_t cp, bool fp8, int64_t *cu_padded);

#ifdef __cplusplus
}
#endif
#endif
