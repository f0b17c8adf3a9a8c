/* SPDX-License-Identifier: Apache-2.0 */
/* ragged_run.c - see ragged_run.h. */
#include "harness/ragged_run.h"

#include "harness/bridge_case.h"
#include "harness/harness.h"

colo_segments_t t_ragged_segments(const t_ragged_t *t)
{
    const ref_segments_t *s = &t->c.table;
    return (colo_segments_t){.struct_size = sizeof(colo_segments_t),
                             .count = s->nseg,
                             .rows = s->rows,
                             .src_dp = s->src_dp,
                             .seq = s->seq,
                             .pos = s->pos,
                             .row_pos = s->row_pos,
                             .nseqs = s->nseq,
                             .seq_len = s->seq_len,
                             .seq_dp = s->seq_dp};
}

static colo_dtype_t dtype_of(const char *name)
{
    colo_dtype_t d = COLO_DTYPE_COUNT;
    (void)colo_dtype_parse(name, &d);
    return d;
}

colo_dtype_t t_ragged_dtype(const t_ragged_t *t, int32_t i)
{
    static const colo_dtype_t others[] = {COLO_BF16, COLO_F64, COLO_I64};
    return i == 0 ? dtype_of(t->dtype) : others[(t->seed + (uint64_t)i) % 3];
}

/* Tensor @i of a call: the case with other features, and its dtype. */
static const char *tensor_of(const t_ragged_t *t, int32_t i, ref_ragged_t *c)
{
    *c = t->c;
    c->h *= 1 + i;
    return colo_dtype_name(t_ragged_dtype(t, i));
}

colo_status_t t_ragged_config(const t_ragged_t *t, colo_layout_t *src, colo_layout_t *dst,
                              colo_bridge_config_t *config)
{
    rank_try(t_layout(src, &t->c.src));
    rank_try(t_layout(dst, &t->c.dst));
    src->positions = dst->positions = 0;
    dst->map = COLO_MAP_IDENTITY;
    dst->offset = 0;
    *config = (colo_bridge_config_t){
        COLO_BRIDGE_CONFIG_INIT,
        .src = src,
        .dst = dst,
        .shape = {.features = t->c.h},
        .dtype = t_ragged_dtype(t, 0),
        .output = t->c.full ? COLO_OUTPUT_FULL_SEQ : COLO_OUTPUT_SHARDED,
        .grad = t->c.partial ? COLO_GRAD_PARTIAL : COLO_GRAD_DISJOINT,
        .ragged = true,
        .placement = t->c.merged ? COLO_PLACEMENT_MERGED : COLO_PLACEMENT_PACKED};
    return COLO_OK;
}

colo_status_t t_ragged_bridge(colo_bridge_t **bridge, const t_ragged_t *t,
                              const t_ragged_options_t *o, colo_comm_t *comm)
{
    colo_layout_t src, dst;
    colo_bridge_config_t config;
    rank_try(t_ragged_config(t, &src, &dst, &config));
    config.mem = o->where ? COLO_MEM_CUDA : COLO_MEM_HOST;
    config.ranks_per_node = o->ranks_per_node;
    config.max_rows = o->max_rows;
    return colo_bridge_create(bridge, &config, comm);
}

/* ---- tensors ---- */

/* What @role holds on @rank, with gaps; @blank: before the call has written it. */
static colo_status_t make(t_buffer_t *b, const ref_ragged_t *c, ref_role_t role, int64_t rank,
                          const char *dtype, int64_t salt, int64_t gap, bool blank)
{
    int64_t rows, nh;
    const size_t elem = ref_dtype_size(dtype);
    const bool into = role == REF_Y && c->merged && blank;
    ref_ragged_tensor(c, into ? REF_INTO : role, rank, dtype, salt, NULL, &rows, &nh);
    const int64_t step = 1 + (gap > 0), row = nh * step + gap;
    rank_try(t_buffer_rows(b, dtype_of(dtype), rows, nh, row, step));
    unsigned char *tight = malloc((size_t)(rows * nh) * elem + 1);
    rank_check(tight);
    ref_ragged_tensor(c, into ? REF_INTO : role, rank, dtype, salt, tight, &rows, &nh);
    for (int64_t i = 0; (!blank || into) && i < rows; i++)
        for (int64_t k = 0; k < nh; k++)
            memcpy(b->raw + (size_t)(i * row + k * step) * elem,
                   tight + (size_t)(i * nh + k) * elem, elem);
    free(tight);
    return COLO_OK;
}

/* == on values: a sum may be a zero of either sign. */
static bool same(const t_buffer_t *got, const t_buffer_t *want, bool sums)
{
    if (memcmp(got->raw, want->raw, got->bytes) == 0)
        return true;
    const size_t elem = colo_dtype_size(got->t.dtype);
    for (size_t i = 0; sums && i + elem <= got->bytes; i += elem) {
        bool zeros = true;
        for (size_t k = 0; k < elem; k++) {
            const unsigned char keep = k == elem - 1 ? 0x7f : 0xff; /* all but the sign */
            zeros = zeros && !(got->raw[i + k] & keep) && !(want->raw[i + k] & keep);
        }
        if (!zeros && memcmp(got->raw + i, want->raw + i, elem) != 0)
            return false;
    }
    return sums;
}

static int64_t node_of(const colo_plan_config_t *c, int64_t rank)
{
    return c->nodes ? colo_nodes_find(c->nodes, rank)
                    : rank / (c->ranks_per_node ? c->ranks_per_node : INT64_MAX);
}

static bool holds(const ref_side_t *side, int64_t rank)
{
    return ref_side_has(side, rank) &&
           (!side->stage_dim || ref_side_coord(side, rank, side->stage_dim) == side->stage);
}

/* Do @a and @b have the same, but for what context ranks cut? */
static bool same_block(const ref_side_t *side, int64_t a, int64_t b, bool full, bool *other_addend)
{
    *other_addend = false;
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < side->nsplits[axis]; i++) {
            const ref_split_t *s = &side->split[axis][i];
            const bool differ = ref_side_coord(side, a, s->dim) != ref_side_coord(side, b, s->dim);
            *other_addend |= differ && s->context;
            if (differ && !(full && axis == 1))
                return false;
        }
    return true;
}

/* Do @least ranks of a node need the same, or, @addends, hold other addends of the same? */
static bool share_a_node(const colo_plan_config_t *c, const ref_side_t *side, bool full,
                         bool addends, int64_t least)
{
    const int64_t end = side->offset + ref_side_size(side);
    bool other;
    for (int64_t r = side->offset; r < end; r++) {
        int64_t n = 0;
        for (int64_t q = side->offset; q < end; q++) {
            bool is_new = true;
            for (int64_t p = side->offset; p < q && addends; p++) /* its addend was counted */
                is_new = is_new && !(node_of(c, p) == node_of(c, r) && holds(side, p) &&
                                     same_block(side, p, r, full, &other) &&
                                     same_block(side, p, q, full, &other) && !other);
            n += is_new && node_of(c, q) == node_of(c, r) && holds(side, q) &&
                 same_block(side, q, r, full, &other);
        }
        if (n >= least && holds(side, r))
            return true;
    }
    return false;
}

/* Bytes that came since @before, in so many exchanges. @sums: of a node, for which others of it
 * get more, or save addends. */
static bool came(colo_comm_t *comm, const colo_comm_stats_t *before, int64_t bytes,
                 uint64_t exchanges, bool sums, bool adds_up)
{
    const int kind = COLO_OP_EXCHANGE, owner = COLO_CATEGORY_BRIDGE;
    colo_comm_stats_t now;
    t_comm_stats(comm, &now);
    const uint64_t got = now.recv_bytes[kind][owner] - before->recv_bytes[kind][owner];
    return now.ops[kind][owner] == before->ops[kind][owner] + exchanges &&
           (adds_up                 ? true
            : exchanges > 1 && sums ? got <= (uint64_t)bytes
                                    : got == (uint64_t)bytes);
}

static bool several_nodes(const colo_batch_t *batch)
{
    const colo_plan_config_t *c = colo_plan_config(colo_batch_plan(batch));
    const colo_grid_t *a = &c->src->grid, *b = &c->dst->grid;
    if (c->one_level || c->nodes)
        return !c->one_level && colo_nodes_count(c->nodes) > 1;
    return c->ranks_per_node &&
           (a->offset + a->size > c->ranks_per_node || b->offset + b->size > c->ranks_per_node);
}

/* Nodes add up PARTIAL gradients if that makes them smaller in fp32. */
static int64_t least_addends(const t_ragged_t *t)
{
    const int64_t elem = (int64_t)ref_dtype_size(t->dtype);
    return elem < 4 ? 4 / elem + 1 : 2;
}

static bool adds_up(const colo_batch_t *batch, const t_ragged_t *t)
{
    return several_nodes(batch) && t->c.full && t->c.partial && ref_side_addends(&t->c.dst) > 1 &&
           share_a_node(colo_plan_config(colo_batch_plan(batch)), &t->c.dst, true, true,
                        least_addends(t));
}

/* The tensors of a call, and what one of them should hold. */
enum { T_RAGGED_RANKS = 16 };
typedef struct blocks {
    t_buffer_t in[T_RAGGED_TENSORS], out[T_RAGGED_TENSORS], want;
} blocks_t;

static colo_status_t run_pass(colo_batch_t *batch, const t_ragged_t *t, const t_ragged_options_t *o,
                              colo_comm_t *comm, colo_pass_t pass, blocks_t *b)
{
    const bool fwd = pass == COLO_PASS_FORWARD, sums = !fwd && t->c.full && t->c.partial;
    const int64_t rank = colo_comm_world_rank(comm, colo_comm_rank(comm));
    colo_tensor_t ti[T_RAGGED_TENSORS], to[T_RAGGED_TENSORS];
    int32_t n = 0, which[T_RAGGED_TENSORS];
    int64_t bytes = 0;
    ref_ragged_t c;
    for (int32_t i = 0; i < o->tensors; i++) {
        const char *dtype = tensor_of(t, i, &c);
        if (sums && dtype[0] == 'i')
            continue; /* has no gradient */
        rank_try(make(&b->in[n], &c, fwd ? REF_X : REF_DY, rank, dtype, i, o->gap, false));
        rank_try(make(&b->out[n], &c, fwd ? REF_Y : REF_DX, rank, dtype, i, o->gap, true));
        bytes += ref_ragged_receives(&c, rank, !fwd) * (int64_t)ref_dtype_size(dtype);
        rank_try(t_buffer_put(o->where, &b->in[n]));
        rank_try(t_buffer_put(o->where, &b->out[n]));
        ti[n] = b->in[n].t;
        to[n] = b->out[n].t;
        which[n++] = i;
    }
    colo_comm_stats_t before;
    t_comm_stats(comm, &before);
    /* ranks without rows pass nothing at all, every other time */
    const bool none = (t->seed + (uint64_t)rank) % 2;
    const colo_tensor_t *pi = none && colo_tensor_count(ti) == 0 ? NULL : ti;
    const colo_tensor_t *po = none && colo_tensor_count(to) == 0 ? NULL : to;
    const colo_stream_t stream = o->where ? o->where->stream : NULL;
    rank_try(t_buffers_quiet(o->where));
    if (o->tickets) {
        colo_ticket_t *ticket = NULL;
        rank_try(fwd ? colo_batch_forward_start(batch, pi, po, n, stream, &ticket)
                     : colo_batch_backward_start(batch, pi, po, n, stream, &ticket));
        rank_try(colo_ticket_finish(&ticket, stream));
    } else {
        rank_try(fwd ? colo_batch_forward(batch, pi, po, n, stream)
                     : colo_batch_backward(batch, pi, po, n, stream));
    }
    const bool adds = !fwd && adds_up(batch, t);
    int64_t node[T_RAGGED_RANKS];
    const bool relays = several_nodes(batch) &&
                        share_a_node(colo_plan_config(colo_batch_plan(batch)),
                                     fwd ? &t->c.dst : &t->c.src, fwd && t->c.full, false, 2);
    rank_check(came(comm, &before, bytes, 1 + (uint64_t)relays + adds, sums, adds));
    rank_try(t_buffers_quiet(o->where));
    for (int32_t k = 0; k < n; k++) {
        rank_try(t_buffer_get(o->where, &b->in[k]));
        rank_try(t_buffer_get(o->where, &b->out[k]));
    }
    for (int32_t k = 0; k < n; k++) {
        const char *dtype = tensor_of(t, which[k], &c);
        if (adds) {
            rank_check(t->world <= T_RAGGED_RANKS);
            for (int64_t r = 0; r < t->world; r++)
                node[r] = node_of(colo_plan_config(colo_batch_plan(batch)), r);
            c.node = node;
            c.least = least_addends(t);
        }
        rank_try(make(&b->want, &c, fwd ? REF_Y : REF_DX, rank, dtype, which[k], o->gap, false));
        if (!same(&b->out[k], &b->want, sums))
            fprintf(stderr, "rank %d: tensor %d %s differs: %s\n", (int)rank, (int)k,
                    fwd ? "forward" : "backward", t_ragged_text(t));
        rank_check(same(&b->out[k], &b->want, sums));
        t_buffer_free(&b->want);
        rank_try(make(&b->want, &c, fwd ? REF_X : REF_DY, rank, dtype, which[k], o->gap, false));
        rank_check(same(&b->in[k], &b->want, false)); /* never written */
        t_buffer_free(&b->want);
    }
    return COLO_OK;
}

colo_status_t t_ragged_pass(colo_batch_t *batch, const t_ragged_t *t, const t_ragged_options_t *o,
                            colo_comm_t *comm, colo_pass_t pass)
{
    blocks_t b = {0};
    const colo_status_t st = run_pass(batch, t, o, comm, pass, &b);
    for (int k = 0; k < 2 * T_RAGGED_TENSORS; k++) {
        t_buffer_t *one = k % 2 ? &b.in[k / 2] : &b.out[k / 2];
        if (one->there) /* the call has failed */
            o->where->drop(o->where->arg, one->there);
        t_buffer_free(one);
    }
    t_buffer_free(&b.want);
    return st;
}

static colo_status_t run_batch(colo_bridge_t *bridge, colo_batch_t **batch, const t_ragged_t *t,
                               const t_ragged_options_t *o, colo_comm_t *comm)
{
    const int64_t rank = colo_comm_world_rank(comm, colo_comm_rank(comm));
    const int64_t elem = (int64_t)ref_dtype_size(t->dtype);
    int64_t rows[2], want[2], nh;
    const colo_segments_t s = t_ragged_segments(t);
    rank_try(colo_bridge_set_segments(bridge, &s, batch));
    colo_bridge_rows(bridge, &rows[0], &rows[1]);
    ref_ragged_tensor(&t->c, REF_X, rank, t->dtype, 0, NULL, &want[0], &nh);
    ref_ragged_tensor(&t->c, REF_Y, rank, t->dtype, 0, NULL, &want[1], &nh);
    rank_check(rows[0] == want[0] && rows[1] == want[1]);
    for (int pass = 0; pass < 2; pass++) {
        const colo_plan_bytes_t b = t_plan_bytes(colo_batch_plan(*batch), (colo_pass_t)pass);
        const bool sums = pass && t->c.full && t->c.partial && several_nodes(*batch);
        const int64_t most = ref_ragged_receives(&t->c, rank, pass) * elem;
        const bool adds = pass && adds_up(*batch, t); /* then recv may have addends for others */
        rank_check(sums ? b.minimum <= most : b.minimum == most); /* what is passed on is a sum */
        rank_check(adds ? b.minimum <= b.recv : b.minimum == b.recv);
    }
    rank_try(t_buffers_quiet(o->where));
    rank_try(t_ragged_pass(*batch, t, o, comm, COLO_PASS_FORWARD));
    return t_ragged_pass(*batch, t, o, comm, COLO_PASS_BACKWARD);
}

colo_status_t t_ragged_on(const t_ragged_t *t, const t_ragged_options_t *o, colo_comm_t *comm)
{
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    colo_status_t st = t_ragged_bridge(&bridge, t, o, comm);
    if (st == COLO_OK)
        st = run_batch(bridge, &batch, t, o, comm);
    return st;
}

/* A rank's own addend is read where it lies: memory for addends has the other rank's only. */
colo_status_t t_ragged_large(colo_comm_t *comm, const t_ragged_where_t *w,
                             size_t (*partials)(const colo_bridge_t *bridge))
{
    const ref_side_t src = t_side("dp=2", true), dst = t_side("cp=2,dp=1", false);
    const t_ragged_options_t o = {.tensors = 1, .where = w};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    T_ENDS(colo_batch_destroy) colo_batch_t *batch = NULL;
    T_ENDS(t_ragged_free) t_ragged_t t = {0};
    t_ragged_uniform(&t, &src, &dst, (ref_shape_t){2, 1024, 1028});
    t.dtype = "f64";
    t.c.full = t.c.partial = true;
    rank_try(t_ragged_bridge(&bridge, &t, &o, comm));
    const colo_segments_t s = t_ragged_segments(&t);
    rank_try(colo_bridge_set_segments(bridge, &s, &batch));
    rank_try(t_ragged_pass(batch, &t, &o, comm, COLO_PASS_BACKWARD));
    rank_try(w->quiet(w->arg));
    rank_check(partials(bridge) == (colo_comm_rank(comm) < 2 ? (size_t)1024 * 1028 * 8 : 0));
    return COLO_OK;
}
