/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.h - what the captioner writes down about a run: one self-contained HTML page.
 *
 * The caller fills a cap_report_t with what it saw; nothing here measures anything. Pictures of the
 * layout come from the plans of all ranks, made here from @plan with colo_plan_create(), so that
 * the page shows what the library planned and the statistics table what it then did.
 */
#ifndef EXAMPLES_CAPTIONER_REPORT_H
#define EXAMPLES_CAPTIONER_REPORT_H

#include <colobridge/bridge.h>

#include "captioner.h"

/** One point of a curve. Points ascend by step; a NaN or infinite value breaks the line. */
typedef struct cap_point {
    int64_t step;
    double value;
} cap_point_t;

/** One held-out sample with what the model wrote below it. */
typedef struct cap_sample {
    int64_t row;                       /* of the data set, of the first image */
    int64_t images;                    /* 0 .. CAP_IMAGES */
    const uint8_t *pixels[CAP_IMAGES]; /* [CAP_PIXELS] 0..16; borrowed */
    char want[CAP_SAID];
    char caption[CAP_SAID + 1]; /* decoded bytes up to the NUL; any bytes, shown escaped */
} cap_sample_t;

/** The encoder's work, before and after images were dealt out anew. */
typedef struct cap_balance {
    int64_t replicas;
    const int64_t *before, *after;        /* [replicas] rows in the last step; borrowed */
    int64_t steps;                        /* with rows; the next two are sums over them */
    double most_before, most_after;       /* rows of the most loaded replica / mean */
    double pixels, embeddings, gradients; /* bytes received in a step, all ranks' */
} cap_balance_t;

/** One line of the table of collectives: one comm, kind and owner, added over ranks and steps. */
typedef struct cap_stats_row {
    char where[32]; /* comm name: "world", "dst.tp" ... */
    colo_op_kind_t op;
    colo_category_t category;
    uint64_t ops;       /* calls, summed over ranks and over cap_report_t.stats_steps steps */
    uint64_t bytes;     /* received, summed the same way */
    int64_t plan_bytes; /* what the plans say, summed the same way; -1: no plan says */
} cap_stats_row_t;

/** Everything is borrowed for the call. @samples: mistakes first. Counts may be 0, then the part
 * says that it is empty. */
typedef struct cap_report {
    const char *command; /* command line, one string */
    cap_model_t model;
    int64_t parameters; /* scalars in the model; 0: not shown */
    int64_t batch, steps;
    uint64_t seed;
    double seconds;           /* of training; 0: not shown */
    double tokens_per_second; /* 0: not shown */
    const char *backend;      /* "threads" */
    colo_plan_config_t plan;  /* of the bridge: layouts, shape, output, grad */
    colo_algo_t algo;
    const cap_balance_t *balance; /* ragged: instead of the layout's pictures; NULL when uniform */
    int32_t world; /* ranks drawn: 0 .. world - 1 */
    const cap_point_t *loss;
    int64_t nloss;
    const cap_point_t *accuracy; /* 0..1, exact captions on held-out images */
    int64_t naccuracy;
    const cap_sample_t *samples;
    int64_t nsamples;
    int64_t held, mistakes; /* held-out images, and those of them with a wrong caption */
    const cap_stats_row_t *stats;
    int64_t nstats;
    int64_t stats_steps; /* steps that @statistics covers, >= 1 when nstats > 0 */
} cap_report_t;

/**
 * cap_report_write() - write the page to @path
 * Written to a new file next to @path, which then takes its name: a reader sees the old page or the
 * whole new one. On failure nothing is left behind.
 * Returns NULL, or one error message (path, what went wrong) in static thread-local memory
 */
const char *cap_report_write(const cap_report_t *report, const char *path);

/**
 * cap_report_plan_bytes() - bytes that all ranks 0..world-1 receive in one way, added
 * Returns -1 when a plan cannot be made (colo_last_error() says why)
 */
int64_t cap_report_plan_bytes(const colo_plan_config_t *plan, int32_t world, colo_pass_t pass);

#endif
