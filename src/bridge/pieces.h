/* SPDX-License-Identifier: Apache-2.0 */
/* pieces.h (private) - what plan.c and pieces.c share while a plan is being made. */
#ifndef COLO_BRIDGE_PIECES_H
#define COLO_BRIDGE_PIECES_H

#include "bridge/plan.h"

/* A growing array; the owner frees at. */
typedef struct colo_list {
    void *at;
    int64_t n, cap;
} colo_list_t;

/* One layout in one role: which splits of rows count, and which context level it shows. */
typedef struct colo_side {
    const colo_layout_t *layout;
    const colo_posmap_t *map;
    bool full;                    /* rows are not split in this role */
    bool level_fixed;             /* PARTIAL: context dims are pinned to fixed[] */
    int64_t fixed[COLO_MAX_DIMS]; /* context coordinates of the level; -1 elsewhere */
} colo_side_t;

typedef struct colo_builder {
    const colo_plan_config_t *cfg;
    colo_plan_t *plan;
    size_t elem;
    int64_t per_node;
    colo_list_t recvs, sends, *out;      /* colo_entry_t; out: the list being made */
    colo_list_t rows, samples, features; /* blocks that overlap mine, per axis */
    colo_list_t pieces;                  /* colo_entry_t: regions of one piece */
    colo_list_t holders, needers;        /* int64_t ranks, ascending */
    colo_runs_t peer_runs;
} colo_builder_t;

/*
 * Every piece between my block of side @mine and the blocks of side @theirs. i_need: I am a needer
 * (entries go to recvs, own ones with peer == this rank), else a holder (entries go to sends).
 */
colo_status_t colo_pieces_meet(colo_builder_t *w, const colo_side_t *mine,
                               const colo_side_t *theirs, int32_t level, bool i_need,
                               bool mine_is_src);

/* By peer, level, samples, rows, features: the order of regions on both ends of a message. */
int colo_entry_cmp(const void *a, const void *b);

#endif
