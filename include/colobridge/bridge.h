/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bridge.h - carry encoder activations into the LLM's layout, and gradients back.
 *
 * Declared precondition: the input is replicated over the dims of the source grid that split
 * nothing (tp), and the incoming gradient over those of the destination grid. COLO_CHECK=2
 * verifies both. Forward executes the plan, backward its adjoint. With PARTIAL, the bridge adds
 * the values of the context ranks in rank order, in fp32 for bf16 and fp16.
 */
#ifndef COLOBRIDGE_BRIDGE_H
#define COLOBRIDGE_BRIDGE_H

#include <colobridge/comm.h>
#include <colobridge/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum colo_algo_t { COLO_ALGO_EXACT = 0, COLO_ALGO_COLLECTIVE = 1 } colo_algo_t;

/** Where the rows of a ragged batch arrive (ragged.h). */
typedef enum colo_placement_t {
    COLO_PLACEMENT_PACKED = 0, /* in a tensor of just these rows, in the order of their positions */
    COLO_PLACEMENT_MERGED = 1  /* at their positions in the caller's buffer of the sequence axis */
} colo_placement_t;

#define COLO_PEER_BLOCKS_MAX 1024 /* of colo_bridge_config_t.peer_blocks */

/** A caller's allocator: both functions, or NULL for the library's own. The library calls them in
 * create, reshape and destroy, and in a call that needs more memory than any before; never in a
 * capture. */
typedef struct colo_allocator_t {
    /* Returns @bytes > 0 of memory like the tensors', on the current device, aligned to
     * COLO_ALIGNMENT, which no earlier work on any stream uses. NULL: there is none. */
    void *(*allocate)(void *user, size_t bytes);
    /* Work of the bridge has ended, except replays of graphs, which the caller waits for before it
     * destroys the bridge. */
    void (*release)(void *user, void *data);
    void *user; /* borrowed, must outlive the bridge */
} colo_allocator_t;

/** Members from axes on have defaults: NULL, 0, false. */
typedef struct colo_bridge_config_t {
    size_t struct_size;
    const colo_layout_t *src, *dst; /* borrowed for the call; copied (tables stay borrowed) */
    colo_shape_t shape;
    colo_dtype_t dtype;
    /* Memory order of tensors given to forward and backward: a permutation of "bsh" names the axes
     * of a 3-D tensor; "th" is the flattened [samples * rows, features], "bh" a tensor without rows
     * [samples, features], for which shape.rows is 1. Strides may be anything. NULL: "bsh". */
    const char *axes;
    colo_output_t output;
    colo_grad_t grad;
    colo_algo_t algo;
    bool no_grad;           /* the source side is frozen: backward is COLO_ERR_STATE */
    int64_t ranks_per_node; /* 0: the nodes of the comm, colo_comm_node() */
    colo_mem_t mem;         /* where tensors live */
    /* For GPUs, the same on all ranks. AUTO: the memory of each call decides (memory.h). With NCCL
     * and PEER the ranks agree in no call, except in the forward of ragged batches. With PEER
     * only tensors that other ranks reach must be registered. */
    colo_transport_t transport;
    /* Ragged batches (ragged.h): shape.features and dtype are those of the usual tensor, the rest
     * of shape is 0. algo is EXACT, and axes is NULL or "th". */
    bool ragged;
    /* Batches of two packings (colo_bridge_set_packing() in ragged.h). As with ragged, shape has
     * features only; ragged, placement, output and grad are 0, because the packings say what a rank
     * has. */
    bool packed;
    colo_placement_t placement;
    int64_t max_rows; /* ragged: most rows of a source rank, allocated at create; 0: as needed */
    /* As in colo_plan_config_t. COLLECTIVE, and GPUs of one node, have no second level. */
    bool one_level;
    /* Most blocks of a peer-to-peer kernel: the multiprocessors that it holds while it moves boxes
     * or waits for a peer. 0: as few as keep the links busy, and all for sums of gradients.
     * COLO_PEER_BLOCKS overrides it. */
    int32_t peer_blocks;
    /* Makes the memory that colo_bridge_workspace_size() counts. Ranks may differ in it. */
    colo_allocator_t allocator;
} colo_bridge_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_BRIDGE_CONFIG_INIT                                                            \
    sizeof(colo_bridge_config_t), nullptr, nullptr, {0, 0, 0, 0}, COLO_F32, nullptr,       \
        COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL, COLO_ALGO_EXACT, false, 0, COLO_MEM_HOST, \
        COLO_TRANSPORT_AUTO, false, false, COLO_PLACEMENT_PACKED, 0, false, 0,             \
        {nullptr, nullptr, nullptr}
#else
#define COLO_BRIDGE_CONFIG_INIT .struct_size = sizeof(colo_bridge_config_t)
#endif

typedef struct colo_bridge colo_bridge_t;

/**
 * colo_bridge_create() - plan, agree, allocate; collective over the ranks of both grids
 * @bridge:  out, owned by the caller
 * @config:  borrowed for the call
 * @comm:    borrowed, must outlive the bridge; contains every rank that the plan names. Its world
 *           ranks are the grids' ranks. The bridge, its calls and its batches concern the ranks of
 *           @comm that are in a grid: it is of their colo_comm_part(). A rank outside both grids
 *           need not call; if it does, its bridge does nothing. On a comm of GPUs
 *           (<colobridge/nccl.h>) EXACT connects the ranks that the plan ties together, and
 *           allocates staging for messages that are not contiguous. With transport PEER, or AUTO
 *           if memory is registered over @comm, all ranks of @comm call; pass the part of the
 *           grids' ranks, and register over that, if some are outside.
 * Check:    COLO_CHECK >= 1: these ranks compare the config first (axes with COLLECTIVE
 *           only). If it differs, all get COLO_ERR_MISMATCH, with the field and both values in the
 *           error message. If one rank has an error (a bad argument), that rank gets it and all
 *           others get COLO_ERR_PEER. If @comm has ranks outside of the grids, a rank whose grids
 *           are other ones, or whose config is not readable, does not meet the others: these get
 *           COLO_ERR_TIMEOUT at the deadline.
 *
 * Errors:   COLO_ERR_ARG, COLO_ERR_LAYOUT, COLO_ERR_SHAPE, COLO_ERR_MISSING (a peer is not in
 *           @comm), COLO_ERR_NOMEM, COLO_ERR_MISMATCH, COLO_ERR_PEER, COLO_ERR_TIMEOUT;
 *           COLO_ERR_UNBUILT (no backend for mem, or for it on @comm; COLO_TRANSPORT=peer and
 *           ranks out of reach), COLO_ERR_CUDA, COLO_ERR_NCCL
 */
COLO_API colo_status_t colo_bridge_create(colo_bridge_t **bridge,
                                          const colo_bridge_config_t *config, colo_comm_t *comm);
/**
 * colo_bridge_destroy() - local; takes NULL, leaves *bridge NULL
 * On a GPU the host waits for the calls of the bridge, and frees memory, which may wait for the
 * device.
 */
COLO_API void colo_bridge_destroy(colo_bridge_t **bridge);

/**
 * colo_bridge_forward() - carry one activation from the source layout to the destination layout
 * @x:       in   this rank's source part [b, n, H] in the order of axes; a view, never written.
 *                NULL, or of size 0, on ranks that own nothing of the source
 * @y:       out  this rank's destination part: own samples x all rows, as they follow each other in
 *                the sample (FULL_SEQ), or own samples x own rows, by position (SHARDED). It shares
 * no element with @x (other memory, other columns of the same rows, and rows in between are
 * allowed), and no two of its elements share an address. Every element is written
 * @stream:  NULL on the host, where the call returns when the work is done. On a GPU the call
 *           enqueues the work on @stream, and the host does not wait
 *
 * Order:    All ranks of the comm call forward and backward of all its bridges in the same order.
 *           Several forwards may be outstanding before their backwards, because the bridge keeps
 *           nothing of a forward. Ranks that exchange messages on the host compare bridge, pass
 *           and plan before anything moves: COLO_ERR_MISMATCH, and the comm is marked failed.
 *
 *           NCCL compares nothing. So on GPUs, and with COLLECTIVE, all ranks compare the first
 *           call of each pass after create or reshape if COLO_CHECK >= 1 (the host waits for it),
 *           and every call if COLO_CHECK=2. These return COLO_ERR_MISMATCH on all ranks, and the
 *           comm lives on. Over registered memory every bridge and pass has its own mailboxes: a
 *           call in another order is COLO_ERR_TIMEOUT at the deadline, never wrong data.
 *
 * Errors:   COLO_ERR_ARG, COLO_ERR_SHAPE: no memory is written. At COLO_CHECK 0 and 1 the comm is
 *           marked failed, because peers wait; at 2 every rank returns an error and the comm lives
 *           on. COLO_ERR_CONTRACT, COLO_ERR_MISMATCH, COLO_ERR_TIMEOUT, COLO_ERR_PEER;
 *           COLO_ERR_STATE (a capture of a first staged call, memory.h; the bridge is ragged),
 *           COLO_ERR_CUDA, COLO_ERR_NCCL. After an error that killed the comm in flight, the
 *           output may be partly written (status.h)
 */
COLO_API colo_status_t colo_bridge_forward(colo_bridge_t *bridge, const colo_tensor_t *x,
                                           const colo_tensor_t *y, colo_stream_t stream);
/**
 * colo_bridge_backward() - carry the gradient of y back to the gradient of x
 * @d_y:     in   a tensor of y's shape; never written
 * @d_x:     out  a tensor of x's shape; every element is written. Must not overlap @d_y
 * @stream:  as in forward
 * Errors:   as in forward; COLO_ERR_STATE if the bridge was created with no_grad
 */
COLO_API colo_status_t colo_bridge_backward(colo_bridge_t *bridge, const colo_tensor_t *d_y,
                                            const colo_tensor_t *d_x, colo_stream_t stream);

/**
 * colo_bridge_reshape() - use another batch, length or width from now on
 * @shape:  borrowed for the call
 * Local, O(peers), makes no new comm. All ranks must do the same before the next call. If
 * COLO_CHECK >= 1, that call compares the shape between all ranks of the comm, and the host waits
 * for it once; COLO_ERR_MISMATCH on all ranks names the field and both values, and the comm lives
 * on. On an error the bridge keeps its old shape.
 *
 * Memory of the bridge only grows, to the largest shape. A shape that needs no more than one
 * before it allocates nothing and waits for no GPU; earlier calls may still run.
 *
 * On a comm of GPUs a shape may tie other ranks together (seldom: a batch that does not divide).
 * The next staged call then connects them, and cannot be captured. CUDA graphs that were captured
 * before over registered memory keep their shape and may be replayed.
 */
COLO_API colo_status_t colo_bridge_reshape(colo_bridge_t *bridge, const colo_shape_t *shape);

/**
 * colo_bridge_expect_backward() - does a backward follow forwards from now on? local; yes after
 * create
 * All ranks say the same, else some would wait in backward for others. A rank that says something
 * else is COLO_ERR_MISMATCH in forward: on the host between ranks that exchange messages, between
 * GPUs in the first call of a shape, everywhere with COLO_CHECK=2. Where forward moves nothing and
 * backward adds up gradients, it is found in backward only.
 * @bridge: may be NULL
 */
COLO_API void colo_bridge_expect_backward(colo_bridge_t *bridge, bool follows);

/**
 * colo_bridge_src_shape() - the extents of this rank's source tensor (x and d_x); local
 * @shape:  out [3], or [2] if axes is "th" or "bh": extents in the order of axes, written by the
 * call Returns  the number of extents: 3, or 2 for "th" and "bh"; 0 if an argument is NULL
 */
COLO_API int32_t colo_bridge_src_shape(const colo_bridge_t *bridge, int64_t *shape);
/** colo_bridge_dst_shape() - the extents of this rank's destination tensor (y and d_y); arguments
 *  and result as in colo_bridge_src_shape() */
COLO_API int32_t colo_bridge_dst_shape(const colo_bridge_t *bridge, int64_t *shape);
/** colo_bridge_plan() - the plan in force; a view. NULL has none */
COLO_API const colo_plan_t *colo_bridge_plan(const colo_bridge_t *bridge);
/** colo_bridge_workspace_size() - bytes of memory like the tensors' that the bridge owns, all
 * allocated by create or reshape, for the largest shape so far: addends of PARTIAL, staging of
 * COLLECTIVE (not of its sums, which are colo_comm_all_reduce()'s), and with NCCL the staging of
 * messages (half of what is sent and received, by message of 1 MiB or more; smaller ones whole).
 * Over registered memory (memory.h) 0, until a call is staged after all, which then allocates.
 * Memory that has grown stays until destroy on a GPU, and counts. config.allocator gets all of it,
 * and nothing else */
COLO_API size_t colo_bridge_workspace_size(const colo_bridge_t *bridge);

#ifdef __cplusplus
}
#endif
#endif
