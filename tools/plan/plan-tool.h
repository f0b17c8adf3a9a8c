/* SPDX-License-Identifier: Apache-2.0 */
/* plan-tool.h - the parts of colo-plan: what was asked, what was counted, two ways to print it. */
#ifndef TOOLS_PLAN_PLAN_TOOL_H
#define TOOLS_PLAN_PLAN_TOOL_H

#include <colobridge/plan.h>

#include "options.h"
#include "batch.h"
#include "picture.h"

#define PLAN_WORLD_MAX ((int64_t)1 << 24) /* ranks that a run counts one by one */
#define PLAN_EXACT_MAX 65536 /* --compare and --svg count every rank of worlds up to this, */
#define PLAN_SAMPLE 256      /* and of larger ones the parts of so many ranks */
#define PLAN_PART_MAX 4096   /* ranks of a part that are followed */
/* What a run without --batch, --seq, --hidden assumes: samples, rows, features. */
#define PLAN_SIZES 16, 8192, 4096

/* Time of a message: alpha + bytes / beta. [0]: inside a node, [1]: across nodes. */
typedef struct plan_model {
    double alpha[2]; /* seconds */
    double beta[2];  /* bytes a second */
} plan_model_t;

/* What was asked. The layouts live here, config points at them. */
typedef struct plan_ask {
    colo_layout_t src, dst;
    colo_plan_config_t config;
    const plan_batch_t *batch; /* --segments, --packing; NULL: a uniform batch */
    int64_t item;              /* the segment or sequence whose path is drawn, or -1 */
    const char *axes;          /* "bsh" */
    int64_t world;             /* ranks 0 .. world - 1 */
    int64_t first;             /* below it no grid has a rank */
    int64_t max_ranks;         /* per-rank lists only up to this many ranks */
    int64_t rank;              /* the only one to print, or -1: all */
    bool json;
    char where[32];  /* "--compare entry 2", "" when there is only one ask */
    const char *svg; /* path of the picture, or NULL */
    plan_model_t model;
    bool own_model;  /* given, not the default */
    bool assumed[3]; /* samples, rows, features were not given */
} plan_ask_t;

/* Over all ranks, one pass. In count, too: first the PLAN_MOST that are the most of a rank, then
 * what all ranks have together. */
enum { PLAN_MOST = 5, PLAN_COUNTS = 11 };
typedef struct plan_totals {
    union {
        int64_t count[PLAN_COUNTS];
        struct {
            int64_t recv_max, send_max, local_max;
            int64_t collective_max; /* -1 if COLLECTIVE rejects the pair */
            int64_t messages_max;   /* that one rank receives or sends */
            int64_t recv_total, messages_total;
            int64_t minimum_total; /* what must arrive */
            int64_t slow_total;    /* bytes of messages between nodes */
            int64_t slow_minimum;  /* that must enter nodes */
            int64_t slow_one_level;
        };
    };
    double seconds, seconds_one_level; /* of the slowest rank, by the model */
} plan_totals_t;

typedef struct plan_sums {
    plan_totals_t pass[2]; /* by colo_pass_t */
    int64_t ranks;         /* that were added: looked at */
    colo_direction_t direction;
    int64_t scale;      /* 0: no integer */
    int64_t memory_max; /* input + output + staging of the rank that has most of them */
    int64_t input_max, output_max, staging_max; /* each for itself */
    bool overflow;                              /* a total passed 63 bits */
    bool no_memory;                             /* to count what staging takes */
    char rejects[192]; /* why COLLECTIVE rejects the pair; "" if it does not */
} plan_sums_t;

/* Ranks that exchange with each other, directly or not. */
typedef struct plan_part {
    int64_t *rank; /* [n], ascending; owned */
    int64_t n;
    bool cut; /* there are more than PLAN_PART_MAX */
    plan_sums_t sums;
} plan_part_t;

/* One entry of --compare: what was asked, what was counted. */
typedef struct plan_entry {
    plan_ask_t ask;
    int sp; /* 0 none, 1 src, 2 dst, 3 both */
    plan_sums_t sums;
    int64_t parts; /* looked at; 0: every rank was counted */
    bool alike;    /* all parts that were looked at are */
} plan_entry_t;

#define PLAN_ENTRIES_MAX 16

void plan_sums_init(plan_sums_t *sums);
/* Adds the sums of other ranks of the same ask. */
void plan_sums_merge(plan_sums_t *sums, const plan_sums_t *more);
/* Adds one rank. */
void plan_sums_add(plan_sums_t *sums, const plan_ask_t *ask, const colo_plan_t *plan);

/* Are there nodes, and more than one? */
bool plan_several_nodes(const plan_ask_t *ask);
/* "8 ranks per node", "one node", "3 nodes"; returns @out */
const char *plan_nodes_text(char out[48], const plan_ask_t *ask);
/* The sums of each node's ranks, of those whose plans are given: [*n], owned by the caller; NULL:
 * complained. */
plan_sums_t *plan_nodes(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                        int64_t *n);

/* The part of rank @seed. On failure: complains, returns the exit code. */
int plan_part_find(const plan_ask_t *ask, int64_t seed, plan_part_t *part);
void plan_part_free(plan_part_t *part);
/* the same size and the same totals */
bool plan_part_alike(const plan_part_t *a, const plan_part_t *b);
int64_t plan_sample_rank(const plan_ask_t *ask, int64_t k);

/* "" if both grids have as many ranks, else what the first line warns of; returns @out */
const char *plan_size_warning(char out[200], const plan_ask_t *ask);
/* "16 samples x 8192 rows x 4096 features, bf16"; @times: the sign between them; returns @out */
const char *plan_shape(char out[200], const plan_ask_t *ask, const char *times);
/* "64.0 MiB", the whole batch; returns @out */
const char *plan_batch_bytes(char out[24], const plan_ask_t *ask);
/* "row 0 of a sample is position 4 of the LLM's 64", "" if the sequence is the rows; returns @out
 */
const char *plan_positions(char out[200], const plan_ask_t *ask);
/* "colo-plan assumed --batch 16, because it was not given.", "" if all sizes were given; returns
 * @out
 */
const char *plan_assumed(char out[200], const plan_ask_t *ask);
/* the warning of all entries */
const char *plan_compare_warning(char out[200], const plan_entry_t *entries, int n);

/* Counts the entries and prints them as text or JSON, and draws them where --svg asks. */
int plan_compare(plan_entry_t *entries, int n);
/* @best: index of the entry with the least bridge time, or -1: worlds of different size have none
 */
int plan_compare_json(const plan_entry_t *entries, int n, int best);
/* "1.24 ms"; returns @out */
const char *plan_time(char out[24], double seconds);

/* defaults of --alpha and --beta, see print_model() in compare.c */
/* clang-format off */
#define PLAN_ALPHA_US {8, 12}
#define PLAN_BETA_GB_S {285, 45}
/* clang-format on */

/* Counts every rank, on several threads when there are many. Keeps the plan of rank r at plans[r]
 * where @plans is given ([world], NULL entries). On failure: complains, returns the exit code. */
int plan_sweep(const plan_ask_t *ask, colo_plan_t **plans, plan_sums_t *sums);

pic_batch_t plan_tables(const plan_ask_t *ask);
/* Does each rank get only rows that it owns? */
bool plan_sharded(const plan_ask_t *ask);
/* Features that a region counts as one. */
int64_t plan_unit(const plan_ask_t *ask);
/* The plan of world rank @rank. */
colo_status_t plan_make(colo_plan_t **plan, const plan_ask_t *ask, int64_t rank);

/* A rejected plan in words: COLO_ERR_ARG is wrong use, the rest a problem found. */
int plan_complain(const plan_ask_t *ask, colo_status_t status, const char *error_message);

/* @plans: [nplans], the ranks to list; @sums: of all ranks */
int plan_print_text(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums);
int plan_print_json(const plan_ask_t *ask, colo_plan_t *const *plans, int64_t nplans,
                    const plan_sums_t *sums);
/* Prints the lines of @text so that their cells, which are behind tabs, line up. @shape has a
 * letter for each column: l, r the side that its cells are bound to; L, R for the first of a group,
 * which four blanks precede, not two. @idle: NULL, or what dim lines end in; then
 * the first two lines are bold, and the first one has a title for each group. */
void plan_table(const char *text, const char *shape, const char *idle);
/* batch-text.c: the lines about a batch in tables */
void plan_batch_print_rows(const plan_ask_t *ask, const colo_region_t *g);
void plan_batch_print_minimum(const plan_totals_t *t);
void plan_batch_print_balance(const plan_ask_t *ask);
/* "3 segments of 8 rows in 2 sequences of 20 positions"; returns @out */
const char *plan_batch_size(char out[200], const plan_ask_t *ask);
/* segments-svg.c, packing-svg.c: the panels of a batch */
void plan_segments_panels(svg_page_t *page, const plan_ask_t *ask);
void plan_packing_panels(svg_page_t *page, const plan_ask_t *ask);
/* ask->svg: all ranks, or the part of ask->rank */
int plan_draw(const plan_ask_t *ask);
/* Writes the page to ask->svg. On failure: complains, returns the exit code. */
int plan_page(const plan_ask_t *ask, const svg_page_t *page);
/* one rank with its boxes, no totals */
int plan_print_rank(const plan_ask_t *ask, const colo_plan_t *plan);

#endif
