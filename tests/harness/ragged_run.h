/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged_run.h - a ragged batch of ragged_case.h on a bridge of the library.
 *
 * Every rank runs forward and backward and compares every byte of its tensors, those between the
 * elements included, and the bytes that it received. Expectations come from tests/ref/ only.
 */
#ifndef TESTS_HARNESS_RAGGED_RUN_H
#define TESTS_HARNESS_RAGGED_RUN_H

#include <colobridge.h>

#include "harness/bridge_case.h"
#include "harness/ragged_case.h"

#define T_RAGGED_TENSORS 10
#define T_RAGGED_FEW 3 /* of a random batch, at most */

typedef struct t_ragged_options {
    int32_t tensors; /* of a call, 1..T_RAGGED_TENSORS: other dtypes and features than the first */
    int64_t ranks_per_node, max_rows;
    int64_t gap;                   /* elements between rows and between the features of a row */
    bool tickets;                  /* calls are started and finished */
    const t_ragged_where_t *where; /* NULL: host memory */
} t_ragged_options_t;

colo_segments_t t_ragged_segments(const t_ragged_t *t);
/* The dtype of tensor @i of a call; it has 1 + i times the features of the case. */
colo_dtype_t t_ragged_dtype(const t_ragged_t *t, int32_t i);
/* The library's config of a case; src and dst are where it keeps the layouts. */
colo_status_t t_ragged_config(const t_ragged_t *t, colo_layout_t *src, colo_layout_t *dst,
                              colo_bridge_config_t *config);
/* The bridge of a case; collective. */
colo_status_t t_ragged_bridge(colo_bridge_t **bridge, const t_ragged_t *t,
                              const t_ragged_options_t *o, colo_comm_t *comm);
/* One way of a batch that was set: tensors in, call, compare. */
colo_status_t t_ragged_pass(colo_batch_t *batch, const t_ragged_t *t, const t_ragged_options_t *o,
                            colo_comm_t *comm, colo_pass_t pass);
/* One rank's whole job: create, set, forward, backward, bytes, destroy. */
colo_status_t t_ragged_on(const t_ragged_t *t, const t_ragged_options_t *o, colo_comm_t *comm);

/* Backward of a batch whose regions are large, and that a rank's own gradient is not copied then.
 * @partial sums: bytes of the bridge's memory for addends. */
colo_status_t t_ragged_large(colo_comm_t *comm, const t_ragged_where_t *w,
                             size_t (*partials)(const colo_bridge_t *bridge));

#endif
