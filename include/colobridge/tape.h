/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tape.h - a small reverse-mode tape for C runtimes.
 *
 * Values are numbers handed out by the tape. A node has inputs, outputs, and a backward function
 * with its saved state; gradients of a value with several consumers add up. The tape owns no
 * activation, only gradient buffers that it makes; one thread at a time.
 *
 * Values live on the host or in CUDA memory, and so do their gradients. On a device the tape's own
 * work (zeros, sums, the seed's copy) is enqueued on its stream, which nodes must use, too; the
 * host does not wait, and a buffer is allocated in the first step that needs it.
 *
 * Backward releases the gradient of a node's output when that node has run, and another gradient
 * uses the memory again. Gradients of leaves live until reset.
 */
#ifndef COLOBRIDGE_TAPE_H
#define COLOBRIDGE_TAPE_H

#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_tape colo_tape_t;
typedef int32_t colo_value_t; /* >= 0; COLO_NO_VALUE if an input needs no gradient */
#define COLO_NO_VALUE (-1)

/**
 * colo_backward_fn - makes input gradients from output gradients
 * @d_out:  [nout] gradient of each output, contiguous; zeros if no node consumed it
 * @d_in:   [nin] memory to *write* each input's gradient to; data is NULL if none is wanted. The
 *          tape adds it to what other consumers gave.
 * @state:  what was given to colo_tape_record()
 */
typedef colo_status_t (*colo_backward_fn)(const colo_tensor_t *d_out, int32_t nout,
                                          const colo_tensor_t *d_in, int32_t nin, void *state);

/**
 * colo_tape_create() - an empty tape; local
 * @tape:   out, owned by the caller; free it with colo_tape_destroy()
 * Errors:  COLO_ERR_ARG, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_tape_create(colo_tape_t **tape);
/**
 * colo_tape_destroy() - frees nodes (calls their free functions once) and gradients; takes NULL
 */
COLO_API void colo_tape_destroy(colo_tape_t **tape);
/** colo_tape_reset() - forget nodes and values for the next step; buffers may be kept for reuse */
COLO_API void colo_tape_reset(colo_tape_t *tape);
/**
 * colo_tape_set_stream() - the stream of values in CUDA memory: one of the current device,
 * borrowed until destroy or the next call; NULL, as at create, is the default stream
 */
COLO_API void colo_tape_set_stream(colo_tape_t *tape, colo_stream_t stream);

/**
 * colo_tape_leaf() - a value to which gradients flow (a parameter, the input of a block)
 * @t:        float dtype; its shape, dtype and data pointer are noted, nothing is copied
 * @d_t:      NULL: the tape makes the gradient buffer; else the caller's, to which backward
 *            *adds*: @t's shape, contiguous, @t's dtype; for bf16 and fp16 also fp32 (a main
 *            gradient)
 * @value:    out, the number of the value
 * Errors:    COLO_ERR_ARG, COLO_ERR_SHAPE (@d_t is not like @t), COLO_ERR_STATE (backward has run),
 *            COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_tape_leaf(colo_tape_t *tape, const colo_tensor_t *t,
                                      const colo_tensor_t *d_t, colo_value_t *value);
/** A node: what it read and made, and how its gradient is computed. Borrowed for the call. Members
 * from state on have defaults: NULL. */
typedef struct colo_tape_record_t {
    size_t struct_size;
    const char *name;       /* for error messages */
    const colo_value_t *in; /* [nin] values or COLO_NO_VALUE */
    int32_t nin;
    const colo_tensor_t *out; /* [nout] tensors that the node made */
    int32_t nout;
    colo_value_t *out_values; /* [nout], written by the call: the numbers of the outputs */
    /* [nsaved] tensors that backward will read. The tape notes their version counters, and backward
     * returns COLO_ERR_MODIFIED if one has moved. */
    const colo_tensor_t *saved;
    int32_t nsaved;
    colo_backward_fn backward;
    void *state; /* handed to backward; borrowed if free_state is NULL, else owned by the tape */
    void (*free_state)(void *); /* called once with state, also if recording fails; may be NULL */
} colo_tape_record_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_TAPE_RECORD_INIT                                                                 \
    sizeof(colo_tape_record_t), nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr, 0, nullptr, \
        nullptr, nullptr
#else
#define COLO_TAPE_RECORD_INIT .struct_size = sizeof(colo_tape_record_t)
#endif

/**
 * colo_tape_record() - append a node; local
 * @record:  borrowed for the call; members that are not needed may be 0. If it cannot be read,
 *           free_state is not called
 * Errors:   COLO_ERR_ARG, COLO_ERR_SHAPE (an output), COLO_ERR_STATE (backward has run),
 *           COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_tape_record(colo_tape_t *tape, const colo_tape_record_t *record);
/**
 * colo_tape_retain_gradient() - keep the gradient of a node's output until reset
 * Call it before backward. Gradients of leaves are kept anyway.
 * Errors:  COLO_ERR_ARG (no such value), COLO_ERR_STATE (backward has run)
 */
COLO_API colo_status_t colo_tape_retain_gradient(colo_tape_t *tape, colo_value_t value);
/**
 * colo_tape_backward() - run the nodes in reverse from @value; local, apart from what nodes do
 * @seed:   gradient of @value, with its shape; NULL: ones, on the host only. Nodes whose outputs
 *          no node needs are skipped
 * Errors:  COLO_ERR_MODIFIED (checked for all nodes that will run, before any does), COLO_ERR_ARG,
 *          COLO_ERR_SHAPE (seed), COLO_ERR_STATE (run before; record anew), COLO_ERR_NOMEM,
 *          COLO_ERR_UNBUILT and COLO_ERR_CUDA (CUDA memory), and what a node's backward returned.
 *          After any of them a caller's d_t is unchanged
 */
COLO_API colo_status_t colo_tape_backward(colo_tape_t *tape, colo_value_t value,
                                          const colo_tensor_t *seed);
/**
 * colo_tape_gradient() - a contiguous view of a value's gradient, which the tape owns (or the
 * caller, if it gave d_t)
 * @d_value:  out
 * Errors:    COLO_ERR_MISSING if no gradient reached the value, or if the tape has released it
 *            (colo_tape_retain_gradient()); COLO_ERR_ARG
 */
COLO_API colo_status_t colo_tape_gradient(const colo_tape_t *tape, colo_value_t value,
                                          colo_tensor_t *d_value);

#ifdef __cplusplus
}
#endif
#endif
