/* SPDX-License-Identifier: Apache-2.0 */
/*
 * perf.h - what the parts of colo-perf share: what was asked, and the rows that come out. Nothing
 * of CUDA: reading options, writing JSON and drawing work in any build.
 */
#ifndef TOOLS_PERF_PERF_H
#define TOOLS_PERF_PERF_H

#include <colobridge.h>

#include <jansson.h>

#include "options.h"

#define PERF_PAIRS_MAX 32

typedef struct perf_pair {
    colo_grid_t src, dst;
    char src_name[160], dst_name[160];
} perf_pair_t;

typedef struct perf {
    int64_t begin, end, factor, gpus, warmup, iters; /* -b -e -f -g -w -n; gpus 0: all */
    bool sizes;                                      /* -b or -e was given */
    int64_t tokens, vocab;
    bool entropy;
    perf_pair_t pair[PERF_PAIRS_MAX]; /* bridge */
    int npairs;
    colo_shape_t shape;
    colo_dtype_t dtype;
    colo_output_t output;
    colo_grad_t grad;
    const char *axes[3]; /* "bsh", "sbh", "th"; NULL ends */
    bool json;
    const char *svg;  /* path, or NULL */
    const char *file; /* plot: what to draw */
    json_t *doc;      /* the JSON so far; made by perf_doc() */
    long long wrong;
} perf_t;

/* One line of `bridge`. Bytes are those of the rank that has most of them. */
typedef struct perf_row {
    const perf_pair_t *pair;
    const char *axes, *pass, *op;
    colo_shape_t shape;
    bool replayed, view;          /* view: nothing was moved, the result lies in the input */
    int64_t bytes, arrive, local; /* the larger tensor; received from others; copied from own */
    double us, best, limit; /* limit: push or copy of the same bytes, the longer; 0: not measured */
    long long wrong;
} perf_row_t;

/* ---- rows.c ---- */

/* The JSON's head: tool, version, date, device, gpus, cuda, command, warmup, iters. */
int perf_doc(perf_t *p, const char *device, int gpus, const char *cuda, int argc, char **argv);
/* Appends to the list of that name; takes @row, NULL is no memory. */
int perf_doc_add(perf_t *p, const char *list, json_t *row);
void perf_bridge_head(const perf_t *p, const perf_pair_t *pair, const char *axes);
int perf_bridge_row(perf_t *p, const perf_row_t *row);
/* Prints the JSON where --json asks, draws where --svg does. */
int perf_doc_finish(perf_t *p);

/* ---- plot.c ---- */

/* Draws @doc into the file @path. */
int perf_plot(const json_t *doc, const char *path);
/* Reads p->file and draws it. */
int perf_plot_file(perf_t *p);

/* ---- the measuring parts; without CUDA or NCCL they say so ---- */

/* Says what it runs on; a complaint and TOOL_WRONG_USE where there is no GPU. */
int perf_describe(perf_t *p, int argc, char **argv);
int perf_link(perf_t *p);
int perf_logprob(perf_t *p);
/* between GPUs, 2..p->gpus */
int perf_links(perf_t *p);
int perf_bridge(perf_t *p);

#endif
