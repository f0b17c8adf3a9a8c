/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - one rank's part of the routing between two layouts: what it sends and receives, forward
 * and backward. A plan follows from coordinates alone, in O(peers), without communication: both
 * sides of a message derive the same sender by the same rule (docs/concepts/plan.md).
 */
#ifndef COLOBRIDGE_PLAN_H
#define COLOBRIDGE_PLAN_H

#include <colobridge/layout.h>
#include <colobridge/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum colo_output_t { COLO_OUTPUT_FULL_SEQ = 0, COLO_OUTPUT_SHARDED = 1 } colo_output_t;
/** What a destination rank's gradient holds (semantics of context parallelism). */
typedef enum colo_grad_t {
    COLO_GRAD_PARTIAL = 0, /* FULL_SEQ: full-length values on every cp sibling; their sum over cp
                              is the gradient */
    /* FULL_SEQ: zero outside the rank's own rows, as the caller declares; SHARDED: own rows */
    COLO_GRAD_DISJOINT = 1
} colo_grad_t;
#define COLO_PLAN_REPLICAS_MAX 65536 /* ranks that hold the same samples, on a side of a plan */
typedef enum colo_direction_t {
    COLO_DIRECTION_EQUAL = 0,
    COLO_DIRECTION_FAN_IN = 1,
    COLO_DIRECTION_FAN_OUT = 2
} colo_direction_t;
typedef enum colo_pass_t { COLO_PASS_FORWARD = 0, COLO_PASS_BACKWARD = 1 } colo_pass_t;

/** Which rank is on which node. Immutable; any threads may share it. */
typedef struct colo_nodes colo_nodes_t;

/** Members from output on have defaults: 0. */
typedef struct colo_plan_config_t {
    size_t struct_size;
    const colo_layout_t *src, *dst; /* borrowed for the call; copied (tables stay borrowed) */
    colo_shape_t shape;
    colo_dtype_t dtype;
    colo_output_t output;
    colo_grad_t grad;       /* ignored for SHARDED */
    bool no_grad;           /* the source side is frozen: no backward plan */
    int64_t ranks_per_node; /* 0: one node, or those of nodes */
    const colo_nodes_t *nodes; /* borrowed while the plan lives; NULL: by ranks_per_node */
    /* true: each rank receives what it lacks from ranks that hold it. false: data that several
     * ranks of a node lack enter the node once, and these ranks pass them on; PARTIAL gradients of
     * a node are added up before they leave it, where that makes them fewer bytes. */
    bool one_level;
} colo_plan_config_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_PLAN_CONFIG_INIT sizeof(colo_plan_config_t), nullptr, nullptr, {0, 0, 0, 0}, COLO_F32, COLO_OUTPUT_FULL_SEQ, COLO_GRAD_PARTIAL, false, 0, nullptr, false
#else
#define COLO_PLAN_CONFIG_INIT .struct_size = sizeof(colo_plan_config_t)
#endif

/** A box in global indices, half-open. */
typedef struct colo_region_t {
    int64_t b[2], s[2], h[2];
    int32_t addend; /* PARTIAL backward: which addend (ordinal among the cp siblings); of a sum,
                       the lowest; else 0 */
} colo_region_t;

typedef struct colo_plan_message_t {
    int64_t peer; /* world rank, never self */
    int64_t bytes;
    int64_t nregions;
    const colo_region_t *regions; /* owned by the plan; the same list on both sides */
} colo_plan_message_t;

/** Bytes of one rank in one pass. */
typedef struct colo_plan_bytes_t {
    size_t struct_size;
    int64_t recv, send; /* of all exchanges */
    int64_t local;   /* copied from own input to own output */
    /* what must arrive: this rank needs it and does not have it. A sum of a node counts once, and so
     * does what another rank of its node added up for it. At most recv */
    int64_t minimum;
    int64_t collective_recv; /* by all-gather and all-reduce (ring); -1 if COLLECTIVE rejects it */
} colo_plan_bytes_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_PLAN_BYTES_INIT sizeof(colo_plan_bytes_t), 0, 0, 0, 0, 0
#else
#define COLO_PLAN_BYTES_INIT .struct_size = sizeof(colo_plan_bytes_t)
#endif

/**
 * colo_nodes_create() - nodes of any size, whose ranks need not follow each other; local
 * @nodes:  out, owned by the caller
 * @node:   [@ranks] what names the node of each world rank; ranks with the same number share a
 *          node. Nodes count from 0, by their first rank
 * @ranks:  at least as many as the grids of a plan name
 * Errors:  COLO_ERR_ARG, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_nodes_create(colo_nodes_t **nodes, const int32_t *node, int64_t ranks);
/** colo_nodes_destroy() - local; takes NULL, leaves *nodes NULL */
COLO_API void colo_nodes_destroy(colo_nodes_t **nodes);
/** colo_nodes_count() - the number of nodes; 0 if @nodes is NULL */
COLO_API int64_t colo_nodes_count(const colo_nodes_t *nodes);
/** colo_nodes_find() - the node of a world rank; -1 if it has none */
COLO_API int64_t colo_nodes_find(const colo_nodes_t *nodes, int64_t rank);

typedef struct colo_plan colo_plan_t;

/**
 * colo_plan_create() - the plan of world rank @rank; local
 * @plan:    out, owned by the caller; immutable, any threads may share it. A rank outside both
 *           grids gets an empty plan
 * @config:  borrowed for the call; copied, but for position tables
 * Errors:   COLO_ERR_ARG (NULL, sizes < 0, overflow, struct_size, more than
 *           COLO_PLAN_REPLICAS_MAX ranks hold the same samples), COLO_ERR_LAYOUT, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_plan_create(colo_plan_t **plan, const colo_plan_config_t *config,
                                        int64_t rank);
/**
 * colo_plan_destroy() - local; takes NULL, leaves *plan NULL. Ends the plan's messages and regions
 */
COLO_API void colo_plan_destroy(colo_plan_t **plan);

/* Getters are local. If the plan is NULL or the pass unknown, they return no messages, rank -1,
 * config NULL, or COLO_ERR_ARG. */

/** colo_plan_rank() - the world rank that the plan is for */
COLO_API int64_t colo_plan_rank(const colo_plan_t *plan);
/**
 * colo_plan_rows() - rows of this rank's source and destination tensors: its samples times its
 * rows
 * @src_rows, @dst_rows:  out, may be NULL
 */
COLO_API void colo_plan_rows(const colo_plan_t *plan, int64_t *src_rows, int64_t *dst_rows);
/**
 * colo_plan_sends() - the messages that this rank sends, peers ascending; the plan owns them
 * @count:  out, their number; may be NULL
 */
COLO_API const colo_plan_message_t *colo_plan_sends(const colo_plan_t *plan, colo_pass_t pass,
                                                    int32_t *count);
/** colo_plan_recvs() - the messages that this rank receives; otherwise as colo_plan_sends() */
COLO_API const colo_plan_message_t *colo_plan_recvs(const colo_plan_t *plan, colo_pass_t pass,
                                                    int32_t *count);
/**
 * colo_plan_relays() - the messages of the last exchange of a call, in which the ranks of a node
 * pass on what entered it for several of them; otherwise as colo_plan_sends(). Backward PARTIAL:
 * their regions have been summed, addend is 0
 * @sends:  what this rank sends, else what it receives
 */
COLO_API const colo_plan_message_t *colo_plan_relays(const colo_plan_t *plan, colo_pass_t pass,
                                                     bool sends, int32_t *count);
/**
 * colo_plan_sums() - the messages of the exchange of sums of backward PARTIAL over several nodes,
 * which comes before that of colo_plan_relays(); otherwise as colo_plan_sends(). Ranks of one node
 * have added up their addends, and the sum crosses once. addend is the lowest of them. A region of
 * colo_plan_recvs() whose addend is at least colo_plan_addends() brings an addend, more by that
 * number, to the rank that adds up
 * @sends:  what this rank sends, else what it receives
 */
COLO_API const colo_plan_message_t *colo_plan_sums(const colo_plan_t *plan, colo_pass_t pass,
                                                   bool sends, int32_t *count);
/**
 * colo_plan_locals() - regions that this rank copies from its own input (backward PARTIAL: adds,
 * by addend); the plan owns them
 * @count:  out, their number; may be NULL
 */
COLO_API const colo_region_t *colo_plan_locals(const colo_plan_t *plan, colo_pass_t pass,
                                               int64_t *count);
/**
 * colo_plan_bytes() - bytes that this rank sends, receives and copies per call
 * @bytes:  out
 * Errors:  COLO_ERR_ARG (also: no such pass)
 */
COLO_API colo_status_t colo_plan_bytes(const colo_plan_t *plan, colo_pass_t pass,
                                       colo_plan_bytes_t *bytes);
/** Bytes of one rank in one pass; their sums over the ranks of a node are those of the node. */
typedef struct colo_plan_node_bytes_t {
    size_t struct_size;
    int64_t in;      /* that this rank receives from other nodes */
    int64_t minimum; /* that ranks of the node need and none holds, addends that another node adds
                        up as one sum; an even part of each is counted here */
} colo_plan_node_bytes_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_PLAN_NODE_BYTES_INIT sizeof(colo_plan_node_bytes_t), 0, 0
#else
#define COLO_PLAN_NODE_BYTES_INIT .struct_size = sizeof(colo_plan_node_bytes_t)
#endif
/** colo_plan_node_bytes() - bytes that enter the node at this rank per call; arguments and errors
 * as in colo_plan_bytes() */
COLO_API colo_status_t colo_plan_node_bytes(const colo_plan_t *plan, colo_pass_t pass,
                                            colo_plan_node_bytes_t *bytes);
/**
 * colo_plan_addends() - addends of each backward element: 1, or with PARTIAL the number of context
 * ranks
 */
COLO_API int64_t colo_plan_addends(const colo_plan_t *plan);
/** colo_plan_direction() - do more ranks split the samples of the source (FAN_IN), or of the
 * destination (FAN_OUT)? EQUAL if @plan is NULL */
COLO_API colo_direction_t colo_plan_direction(const colo_plan_t *plan);
/**
 * colo_plan_scale() - max(Ds,Dd)/min(Ds,Dd) of the ranks that split samples; 0 if it is no integer
 */
COLO_API int64_t colo_plan_scale(const colo_plan_t *plan);
/**
 * colo_plan_hash() - 64 bits over grids, layouts, shape, dtype, options and library version: the
 * same on every rank that plans the same bridge
 */
COLO_API uint64_t colo_plan_hash(const colo_plan_t *plan);
/** colo_plan_config() - the config given to create; the plan owns it */
COLO_API const colo_plan_config_t *colo_plan_config(const colo_plan_t *plan);
/** colo_direction_name() - "equal", "fan_in", "fan_out"; "?" for another value. Static storage */
COLO_API const char *colo_direction_name(colo_direction_t direction);

/**
 * colo_plan_collective_check() - can the COLLECTIVE algorithm carry this pair of layouts? Local
 * The checks and their order are those of the reference (docs/internals.md).
 * Errors:  COLO_ERR_ARG, COLO_ERR_LAYOUT, COLO_ERR_SHAPE (batch not divisible)
 */
COLO_API colo_status_t colo_plan_collective_check(const colo_plan_config_t *config);

#ifdef __cplusplus
}
#endif
#endif
