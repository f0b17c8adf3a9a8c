/* SPDX-License-Identifier: Apache-2.0 */
/* work.h - one pair of layouts at one size on one rank: tensors, bridges, the same bytes as
 * pushes, COLLECTIVE; what colo-perf bridge then measures. */
#ifndef TOOLS_PERF_WORK_H
#define TOOLS_PERF_WORK_H

#include "gpus.h"

#include "collective.h"
#include "parts.h"
#include "probe.h"

typedef enum op { PUSH, COPY, EXACT_NCCL, EXACT_PEER, COLLECTIVE, REFERENCE, TUNED, OPS } op_t;

/* One pair, one size, one rank. */
typedef struct work {
    perf_engine_t engine;
    perf_rank_t *r;
    const perf_pair_t *pair;
    const char *axes;
    colo_shape_t shape;
    colo_layout_t src, dst;
    colo_bridge_t *bridge[OPS];
    perf_coll_t coll;
    ncclComm_t group[PERF_GROUPS];
    ncclDataType_t type;
    perf_part_t from, to; /* lists on the host */
    int64_t *list[4];     /* on the device: from.b, from.s, to.b, to.s */
    int64_t *own;         /* to.s, -1 for rows of others */
    int64_t addends;      /* 0: gradients are moved; else added */
    colo_tensor_t x, y, d_y, d_x;
    colo_k_push_t push[2][COLO_K_PUSHES];
    int32_t pushes[2];
    int64_t bytes, arrive[2], local[2], mine[2]; /* mine: this rank's local */
    op_t op;
    int pass; /* 0 forward */
    bool memcpy;
} work_t;

/* All ranks together; pair, axes, shape and r are given. */
int perf_work_make(work_t *w);
int perf_work_destroy(work_t *w);
/* What a rank's tensor holds. @data may be a view elsewhere. */
colo_k_code_t perf_work_code(const work_t *w, const void *data, bool dst, bool gradient,
                             bool input);
size_t perf_tensor_bytes(const colo_tensor_t *t);

#endif
