/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collective.h - a bridge made from collectives, as colo-perf measures it: the reference's
 * passes one by one, and the same tuned. The device and NCCL come as a table, so that the geometry
 * is tested on the host.
 */
#ifndef TOOLS_PERF_COLLECTIVE_H
#define TOOLS_PERF_COLLECTIVE_H

#include <colobridge/comm.h>
#include <colobridge/grid.h>

/* The groups that it talks in. Siblings: ranks whose samples make one replica's; cp: context
 * ranks; both: context ranks of all siblings, for fan-out. */
typedef enum perf_group {
    PERF_SIBLINGS = 0,
    PERF_CP = 1,
    PERF_BOTH = 2,
    PERF_GROUPS = 3
} perf_group_t;

/* What it runs on. Everything is enqueued in order; 0 or an exit code of the tool. */
typedef struct perf_engine perf_engine_t;
struct perf_engine {
    int (*copy)(perf_engine_t *e, const colo_box_t *dst, const colo_box_t *src, int64_t n);
    int (*zero)(perf_engine_t *e, void *p, size_t bytes);
    int (*all_gather)(perf_engine_t *e, perf_group_t group, const void *send, void *recv,
                      int64_t count);
    int (*all_reduce)(perf_engine_t *e, perf_group_t group, const void *send, void *recv,
                      int64_t count);
};

typedef struct perf_coll {
    /* given; perf_coll_init() does the rest */
    const colo_grid_t *src, *dst; /* borrowed; as colo_plan_collective_check() takes them */
    int64_t rank, samples, rows, features;
    size_t elem;
    bool batch_first; /* bsh or th; else sbh */
    bool sharded;
    perf_engine_t *engine;   /* borrowed */
    void *x, *y, *d_y, *d_x; /* contiguous */
    void *stage[3];          /* of perf_coll_stage() bytes each */
    const void *out;         /* where the last pass left its result: y or d_x, or a view */

    int64_t k, sibling, cp, addend; /* scale, which of the siblings, context ranks and which */
    int direction;                  /* 1 fan-in, 0 equal, -1 fan-out */
    int64_t nsrc, ndst;             /* samples of x and of y */
} perf_coll_t;

void perf_coll_init(perf_coll_t *c);
int64_t perf_coll_stage(const perf_coll_t *c);
/* Ranks of one color form the group, ordered by key; color -1: the group is not needed at all. */
void perf_coll_group(const perf_coll_t *c, perf_group_t group, int64_t rank, int64_t *color,
                     int64_t *key);

/* The reference's passes: all-gather over siblings, or a view; then the shard copy that its caller
 * runs. Backward: scatter into zeros (its caller), clone, in-place all-reduce over cp, a view or an
 * all-gather. Contiguous copies where samples are not the outermost axis. */
int perf_coll_forward(perf_coll_t *c);
int perf_coll_backward(perf_coll_t *c);
/* As few passes as collectives allow: shards are taken straight from what was gathered, gradients
 * of shards are gathered over cp instead of added to zeros, nothing is cloned. */
int perf_coll_tuned_forward(perf_coll_t *c);
int perf_coll_tuned_backward(perf_coll_t *c);

#endif
