/* SPDX-License-Identifier: Apache-2.0 */
/*
 * picture.h - which rank sends what to which, as rows of cells with arrows between them. A row is a
 * rank: its source coordinates in the left cell, its destination coordinates in the right one.
 * Forward arrows run left to right, backward arrows right to left, thick ones between nodes; dashed
 * lines are what stays on the rank. Public headers only; the captioner's report uses it, too.
 */
#ifndef TOOLS_PICTURE_H
#define TOOLS_PICTURE_H

#include <colobridge/plan.h>
#include <colobridge/ragged.h>

#include "svg.h"

enum { PIC_ROWS_MAX = 64, PIC_FLOWS_MAX = 400 }; /* more cannot be read */

typedef struct pic_flow {
    int32_t from, to; /* rows */
    int64_t bytes;    /* of one message */
    int64_t times;    /* messages drawn as this one */
    bool own;         /* a copy on the rank itself */
    bool far;         /* between nodes */
} pic_flow_t;

/* Flows of one way, ordered by (to, from), and what they add up to. */
typedef struct pic_flows {
    pic_flow_t *flow;
    int64_t n, capacity;
    int64_t messages, total, most, minimum;
    int64_t collective; /* -1 where that way does not take the pair */
} pic_flows_t;

typedef struct pic_row {
    int64_t rank;
    int64_t alike; /* other ranks drawn as this one */
    int32_t part;  /* ranks that exchange with each other, directly or not, share a part */
    int32_t was;   /* its index before rows were sorted */
} pic_row_t;

typedef struct pic {
    const colo_layout_t *src, *dst; /* borrowed */
    pic_row_t *row;
    int32_t nrows;
    int32_t nparts;
    pic_flows_t pass[2]; /* by colo_pass_t */
    int64_t outside;     /* messages with an end that is not drawn */
    bool passes_on;      /* ranks of a node send each other what entered it for several of them */
} pic_t;

/* What is planned: the batch of the config's shape; or one of segments; or packing[0] to
 * packing[1]. */
typedef struct pic_batch {
    const colo_segments_t *segments;
    const colo_packing_t *packing;
} pic_batch_t;

/* The messages of a pass: [exchange][0: what the rank receives, 1: what it sends]. */
enum { PIC_FIRST, PIC_SUMS, PIC_RELAYS, PIC_EXCHANGES };
typedef struct pic_list {
    const colo_plan_message_t *message;
    int32_t n;
} pic_list_t;
void pic_lists(const colo_plan_t *plan, colo_pass_t pass, pic_list_t list[PIC_EXCHANGES][2]);
/* 0 if there is one node */
int64_t pic_node(const colo_plan_config_t *config, int64_t rank);

/* The plan of world rank @rank. */
colo_status_t pic_plan(colo_plan_t **plan, const colo_plan_config_t *config,
                       const pic_batch_t *batch, int64_t rank);
/* The plans of @ranks ([n], ascending), a row each, ordered by part. On failure nothing is kept. */
colo_status_t pic_collect(pic_t *pic, const colo_plan_config_t *config, const pic_batch_t *batch,
                          const int64_t *ranks, int32_t n);
/* Ranks that play the same role become one row. What the ranks' own bytes and coordinates are makes
 * no difference, only how much they exchange with which ranks. False: no memory, nothing
 * changed. */
bool pic_fold(pic_t *pic);
/* Keeps the first @rows rows and what moves between them. */
void pic_cut(pic_t *pic, int32_t rows);
void pic_free(pic_t *pic);
/* qsort()'s order of int64_t */
int pic_by_number(const void *a, const void *b);

/* The picture of one way, SVG_PANEL wide, its corner at 0, 0; NULL: only measures. Returns its
 * height. */
int pic_draw(FILE *f, const pic_t *pic, colo_pass_t pass);

#endif
