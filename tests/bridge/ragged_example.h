/* SPDX-License-Identifier: Apache-2.0 */
/* ragged_example.h - the worked example of ragged batches on two ranks. */
#ifndef TESTS_BRIDGE_RAGGED_EXAMPLE_H
#define TESTS_BRIDGE_RAGGED_EXAMPLE_H

#include "harness/harness.h"

#define H 2
#define GAP (-77.0f)

/* ---- the example: P = 2, D = 1, C = 2, zigzag ---- */

typedef struct tables {
    int64_t rows[3], src_dp[3], seq[3], pos[3], len[2], dp[2];
} tables_t;

static const tables_t worked = {
    .rows = {3, 0, 5}, .src_dp = {0, 1, 1}, .seq = {0, 0, 1}, .pos = {2, 9, 1}, .len = {12, 8}};

static inline colo_segments_t segments_of(const tables_t *t)
{
    return (colo_segments_t){.struct_size = sizeof(colo_segments_t),
                             .count = 3,
                             .rows = t->rows,
                             .src_dp = t->src_dp,
                             .seq = t->seq,
                             .pos = t->pos,
                             .nseqs = 2,
                             .seq_len = t->len,
                             .seq_dp = t->dp};
}

typedef struct options {
    colo_output_t output;
    colo_grad_t grad;
    colo_placement_t placement;
    int64_t max_rows;
    bool no_grad;
} options_t;

static inline colo_status_t make_of(colo_bridge_t **b, colo_bridge_config_t c, colo_comm_t *comm)
{
    colo_layout_t src, dst;
    rank_try(t_layouts("dp=2", "cp=2,dp=1", &src, &dst));
    c.src = &src;
    c.dst = &dst;
    return colo_bridge_create(b, &c, comm);
}

static inline colo_status_t make(colo_bridge_t **b, const options_t *o, colo_comm_t *comm)
{
    const colo_bridge_config_t c = {
        COLO_BRIDGE_CONFIG_INIT, .shape = {.features = H}, .dtype = COLO_F32, .output = o->output,
        .grad = o->grad, .no_grad = o->no_grad, .ragged = true, .placement = o->placement,
        .max_rows = o->max_rows,
        /* one exchange a call, also if the ranks run on two hosts: a rank that is done with a
         * call may fail the next while another is between two exchanges */
        .one_level = true};
    return make_of(b, c, comm);
}

/* A bridge of uniform batches between the same layouts. */
static inline colo_status_t make_uniform(colo_bridge_t **b, colo_comm_t *comm)
{
    return make_of(b, (colo_bridge_config_t){COLO_BRIDGE_CONFIG_INIT, .shape = {2, 4, H, 0}}, comm);
}

static inline colo_tensor_t tensor(float *data, int64_t rows)
{
    return colo_tensor_host(data, COLO_F32, 2, (int64_t[]){rows, H});
}

/* Row r of segment e, feature k. */
static inline float code(int64_t e, int64_t r, int64_t k)
{
    return (float)(100 * e + 10 * r + k);
}

/* x of a rank: e0 on rank 0, e1 and e2 on rank 1. */
static inline int64_t fill_x(float *x, int32_t rank)
{
    const int64_t e = rank ? 2 : 0, n = worked.rows[e];
    for (int64_t r = 0; r < n; r++)
        for (int64_t k = 0; k < H; k++)
            x[r * H + k] = code(e, r, k);
    return n;
}

/* What arrives on a rank: row r of segment e at index @index. */
typedef struct arrival {
    int64_t e, r, index;
} arrival_t;

static inline bool has_only(const float *y, int64_t rows, const arrival_t *a, int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        const arrival_t *here = NULL;
        for (int64_t k = 0; k < n; k++)
            here = a[k].index == i ? &a[k] : here;
        for (int64_t k = 0; k < H; k++)
            if (y[i * H + k] != (here ? code(here->e, here->r, k) : GAP))
                return false;
    }
    return true;
}

static inline void blank(float *y, int64_t rows)
{
    for (int64_t i = 0; i < rows * H; i++)
        y[i] = GAP;
}

/* A bridge with one batch; x of the example, and tensors that nothing has arrived in. */
typedef struct stand {
    colo_bridge_t *b;
    colo_batch_t *batch;
    int64_t src, dst; /* rows */
    float x[5 * H], y[20 * H], dx[5 * H];
    colo_tensor_t tx, ty, tdx;
} stand_t;
#define STAND(name) T_ENDS(stand_end) stand_t name = {.b = NULL}

static inline void stand_end(stand_t *d)
{
    colo_batch_destroy(&d->batch);
    colo_bridge_destroy(&d->b);
}

static inline colo_status_t stand_up(stand_t *d, const options_t *o, const tables_t *t,
                                     colo_comm_t *comm)
{
    const colo_segments_t s = segments_of(t);
    rank_try(make(&d->b, o, comm));
    colo_bridge_rows(d->b, &d->src, &d->dst);
    rank_check(d->src == 0 && d->dst == 0);
    rank_try(colo_bridge_set_segments(d->b, &s, &d->batch));
    colo_bridge_rows(d->b, &d->src, &d->dst);
    rank_check(d->src <= 5 && d->dst <= 20);
    fill_x(d->x, colo_comm_rank(comm));
    blank(d->y, 20);
    blank(d->dx, 5);
    d->tx = tensor(d->x, d->src);
    d->ty = tensor(d->y, d->dst);
    d->tdx = tensor(d->dx, d->src);
    return COLO_OK;
}

#endif
