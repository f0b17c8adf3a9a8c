/* SPDX-License-Identifier: Apache-2.0 */
/*
 * collective.c - COLLECTIVE for comparison: two methods to build a bridge from collectives.
 *
 * The library has its own (src/bridge/run/collective.c), whose sums are in rank order. This one is
 * what runtimes run today: NCCL's sums, and PyTorch's passes, of which a narrow along the outermost
 * axis is a view and costs nothing. Whether the pair can be done so at all is
 * colo_plan_collective_check()'s business.
 */
#include "collective.h"

#include "parts.h"

enum { RUNS = 2, BOXES = 256 };

void perf_coll_init(perf_coll_t *c)
{
    const int64_t ds = colo_grid_extent(c->src, "dp"), dd = colo_grid_extent(c->dst, "dp"),
                  sdp = perf_coord(c->src, c->rank, "dp"), ddp = perf_coord(c->dst, c->rank, "dp");
    c->direction = (ds > dd) - (ds < dd);
    c->k = ds > dd ? ds / dd : dd / ds;
    c->sibling = (c->direction > 0 ? sdp : ddp) % c->k;
    c->cp = colo_grid_extent(c->dst, "cp");
    c->addend = perf_coord(c->dst, c->rank, "cp");
    c->nsrc = c->samples / ds;
    c->ndst = c->samples / dd;
}

int64_t perf_coll_stage(const perf_coll_t *c)
{
    const int64_t most = c->nsrc > c->ndst ? c->nsrc : c->ndst;
    return most * c->rows * c->features * (int64_t)c->elem;
}

void perf_coll_group(const perf_coll_t *c, perf_group_t group, int64_t rank, int64_t *color,
                     int64_t *key)
{
    const int64_t sdp = perf_coord(c->src, rank, "dp"), stp = perf_coord(c->src, rank, "tp"),
                  ddp = perf_coord(c->dst, rank, "dp"), dtp = perf_coord(c->dst, rank, "tp"),
                  addend = perf_coord(c->dst, rank, "cp"), tp = colo_grid_extent(c->dst, "tp");
    *color = -1;
    *key = 0;
    if (!colo_grid_has_rank(c->src, rank))
        return;
    if (group == PERF_CP && c->cp > 1) {
        *color = ddp * tp + dtp;
        *key = addend;
    } else if (group == PERF_SIBLINGS && c->direction > 0) {
        *color = ddp * colo_grid_extent(c->src, "tp") + stp;
        *key = sdp;
    } else if (group == PERF_SIBLINGS && c->direction < 0) {
        *color = (sdp * tp + dtp) * c->cp + addend;
        *key = ddp;
    } else if (group == PERF_BOTH && c->direction < 0 && c->cp > 1) {
        *color = sdp * tp + dtp;
        *key = ddp % c->k * c->cp + addend;
    }
}

/* ---- boxes ---- */

/* Contiguous [samples, rows, features] in one of the two orders. */
typedef struct view {
    char *data;
    int64_t stride_b, stride_s; /* elements */
} view_t;

static view_t view(const perf_coll_t *c, const void *data, int64_t samples, int64_t rows,
                   bool batch_first)
{
    const int64_t h = c->features;
    return batch_first ? (view_t){(char *)data, rows * h, h}
                       : (view_t){(char *)data, h, samples * h};
}

static colo_box_t box(const perf_coll_t *c, view_t v, int64_t b, int64_t nb, int64_t s, int64_t ns)
{
    return (colo_box_t){.data = v.data + (b * v.stride_b + s * v.stride_s) * (int64_t)c->elem,
                        .extent = {nb, ns, c->features},
                        .stride = {v.stride_b, v.stride_s, 1}};
}

/* Samples [from_b, from_b + nb) of one view to [to_b, ...) of another, all rows. */
static int copy_samples(perf_coll_t *c, view_t to, int64_t to_b, view_t from, int64_t from_b,
                        int64_t nb)
{
    colo_box_t dst = box(c, to, to_b, nb, 0, c->rows), src = box(c, from, from_b, nb, 0, c->rows);
    return c->engine->copy(c->engine, &dst, &src, 1);
}

/* Rows of context rank @addend as runs: where they begin in the sequence and in its shard. */
static int64_t runs(const perf_coll_t *c, int64_t addend, int64_t row[RUNS], int64_t local[RUNS])
{
    const int64_t chunk = c->cp > 1 ? c->rows / (2 * c->cp) : c->rows;
    row[0] = c->cp > 1 ? addend * chunk : 0;
    row[1] = (2 * c->cp - 1 - addend) * chunk;
    local[0] = 0;
    local[1] = chunk;
    return chunk;
}

/* Own rows of @nb samples between a view of all rows and a view of the shard; n boxes more. */
static int64_t add_rows(const perf_coll_t *c, colo_box_t *whole, colo_box_t *shard, int64_t n,
                        view_t all, int64_t all_b, view_t part, int64_t part_b, int64_t nb,
                        int64_t addend)
{
    int64_t row[RUNS], local[RUNS];
    const int64_t chunk = runs(c, addend, row, local);
    for (int i = 0; i < (c->cp > 1 ? RUNS : 1); i++, n++) {
        whole[n] = box(c, all, all_b, nb, row[i], chunk);
        shard[n] = box(c, part, part_b, nb, local[i], chunk);
    }
    return n;
}

static int64_t shard_rows(const perf_coll_t *c)
{
    return c->sharded ? c->rows / c->cp : c->rows;
}

static int64_t count(const perf_coll_t *c, int64_t samples, int64_t rows)
{
    return samples * rows * c->features;
}

#define TRY(expr)      \
    do {               \
        int e_ = expr; \
        if (e_ != 0)   \
            return e_; \
    } while (0)

/* ---- the reference's passes ---- */

/* Siblings' @nb samples each, concatenated along samples into @to. Uses stages 1 and 2. */
static int gather(perf_coll_t *c, void *to, const void *from, int64_t nb)
{
    const int64_t n = count(c, nb, c->rows), all = nb * c->k;
    if (c->batch_first)
        return c->engine->all_gather(c->engine, PERF_SIBLINGS, from, to, n);
    void *packed = from == c->stage[1] ? c->stage[0] : c->stage[1];
    TRY(copy_samples(c, view(c, packed, nb, c->rows, true), 0, view(c, from, nb, c->rows, false), 0,
                     nb));
    TRY(c->engine->all_gather(c->engine, PERF_SIBLINGS, packed, c->stage[2], n));
    return copy_samples(c, view(c, to, all, c->rows, false), 0,
                        view(c, c->stage[2], all, c->rows, true), 0, all);
}

/* narrow(samples, index * nb, nb).contiguous(): a view where samples are outermost */
static int narrow(perf_coll_t *c, void *to, const void *from, int64_t nb, const void **out)
{
    const view_t all = view(c, from, nb * c->k, c->rows, c->batch_first);
    if (c->batch_first || c->k == 1) {
        *out = all.data + c->sibling * nb * all.stride_b * (int64_t)c->elem * (c->k > 1);
        return 0;
    }
    *out = to;
    return copy_samples(c, view(c, to, nb, c->rows, false), 0, all, c->sibling * nb, nb);
}

int perf_coll_forward(perf_coll_t *c)
{
    colo_box_t whole[RUNS], shard[RUNS];
    c->out = c->x;
    if (c->direction > 0) {
        TRY(gather(c, c->stage[0], c->x, c->nsrc));
        c->out = c->stage[0];
    } else if (c->direction < 0) {
        TRY(narrow(c, c->stage[0], c->x, c->ndst, &c->out));
    }
    if (!c->sharded || c->cp == 1)
        return 0;
    const int64_t n =
        add_rows(c, whole, shard, 0, view(c, c->out, c->ndst, c->rows, c->batch_first), 0,
                 view(c, c->y, c->ndst, shard_rows(c), c->batch_first), 0, c->ndst, c->addend);
    c->out = c->y;
    return c->engine->copy(c->engine, shard, whole, n);
}

int perf_coll_backward(perf_coll_t *c)
{
    colo_box_t whole[RUNS], shard[RUNS];
    const int64_t full = count(c, c->ndst, c->rows);
    const void *g = c->d_y;
    if (c->sharded && c->cp > 1) {
        const int64_t n = add_rows(
            c, whole, shard, 0, view(c, c->stage[0], c->ndst, c->rows, c->batch_first), 0,
            view(c, c->d_y, c->ndst, shard_rows(c), c->batch_first), 0, c->ndst, c->addend);
        TRY(c->engine->zero(c->engine, c->stage[0], (size_t)full * c->elem));
        TRY(c->engine->copy(c->engine, whole, shard, n));
        g = c->stage[0];
    }
    if (c->cp > 1) {
        TRY(copy_samples(c, view(c, c->stage[1], c->ndst, c->rows, true), 0,
                         view(c, g, c->ndst, c->rows, true), 0, c->ndst)); /* clone */
        TRY(c->engine->all_reduce(c->engine, PERF_CP, c->stage[1], c->stage[1], full));
        g = c->stage[1];
    }
    c->out = g;
    if (c->direction > 0)
        return narrow(c, c->d_x, g, c->nsrc, &c->out);
    if (c->direction == 0)
        return 0;
    c->out = c->d_x;
    return gather(c, c->d_x, g, c->ndst);
}

/* ---- tuned ---- */

int perf_coll_tuned_forward(perf_coll_t *c)
{
    colo_box_t whole[BOXES], shard[BOXES];
    const bool cut = c->sharded && c->cp > 1;
    const view_t to = view(c, c->y, c->ndst, shard_rows(c), c->batch_first);
    int64_t n = 0;
    c->out = c->y;
    if (c->direction <= 0) {
        if (!cut)
            return narrow(c, c->y, c->x, c->ndst, &c->out);
        n = add_rows(c, whole, shard, 0, view(c, c->x, c->nsrc, c->rows, c->batch_first),
                     c->sibling * c->ndst * (c->direction < 0), to, 0, c->ndst, c->addend);
        return c->engine->copy(c->engine, shard, whole, n);
    }
    const int64_t each = count(c, c->nsrc, c->rows);
    if (!cut && c->batch_first)
        return c->engine->all_gather(c->engine, PERF_SIBLINGS, c->x, c->y, each);
    TRY(c->engine->all_gather(c->engine, PERF_SIBLINGS, c->x, c->stage[0], each));
    for (int64_t i = 0; i < c->k; i++) {
        const view_t part = view(c, (char *)c->stage[0] + i * each * (int64_t)c->elem, c->nsrc,
                                 c->rows, c->batch_first);
        if (cut) {
            n = add_rows(c, whole, shard, n, part, 0, to, i * c->nsrc, c->nsrc, c->addend);
        } else {
            whole[n] = box(c, part, 0, c->nsrc, 0, c->rows);
            shard[n++] = box(c, to, i * c->nsrc, c->nsrc, 0, c->rows);
        }
    }
    return c->engine->copy(c->engine, shard, whole, n);
}

/* Gradients of shards are disjoint: gathered, they are the whole. One pass puts them into d_x. */
static int gather_shards(perf_coll_t *c)
{
    colo_box_t whole[BOXES], shard[BOXES];
    const bool out = c->direction < 0;
    const int64_t each = count(c, c->ndst, shard_rows(c)), members = c->cp * (out ? c->k : 1);
    const view_t to = view(c, c->d_x, c->nsrc, c->rows, c->batch_first);
    int64_t n = 0;
    TRY(c->engine->all_gather(c->engine, out ? PERF_BOTH : PERF_CP, c->d_y, c->stage[0], each));
    for (int64_t m = 0; m < members; m++) {
        const view_t part = view(c, (char *)c->stage[0] + m * each * (int64_t)c->elem, c->ndst,
                                 shard_rows(c), c->batch_first);
        const int64_t addend = m % c->cp, sibling = m / c->cp;
        n = out ? add_rows(c, whole, shard, n, to, sibling * c->ndst, part, 0, c->ndst, addend)
                : add_rows(c, whole, shard, n, to, 0, part, c->sibling * c->nsrc, c->nsrc, addend);
    }
    c->out = c->d_x;
    return c->engine->copy(c->engine, whole, shard, n);
}

int perf_coll_tuned_backward(perf_coll_t *c)
{
    const void *g = c->d_y;
    if (c->sharded && c->cp > 1)
        return gather_shards(c);
    if (c->cp > 1) {
        TRY(c->engine->all_reduce(c->engine, PERF_CP, c->d_y, c->stage[0],
                                  count(c, c->ndst, c->rows)));
        g = c->stage[0];
    }
    c->out = g;
    if (c->direction >= 0)
        return narrow(c, c->d_x, g, c->nsrc, &c->out);
    c->out = c->d_x;
    const int64_t each = count(c, c->ndst, c->rows);
    if (c->batch_first)
        return c->engine->all_gather(c->engine, PERF_SIBLINGS, g, c->d_x, each);
    TRY(c->engine->all_gather(c->engine, PERF_SIBLINGS, g, c->stage[1], each));
    colo_box_t whole[BOXES], part[BOXES];
    for (int64_t i = 0; i < c->k; i++) {
        whole[i] =
            box(c, view(c, c->d_x, c->nsrc, c->rows, false), i * c->ndst, c->ndst, 0, c->rows);
        part[i] = box(
            c, view(c, (char *)c->stage[1] + i * each * (int64_t)c->elem, c->ndst, c->rows, false),
            0, c->ndst, 0, c->rows);
    }
    return c->engine->copy(c->engine, whole, part, c->k);
}
