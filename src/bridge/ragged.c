/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged.c - bridges of ragged batches: set tables, check the tensors of a call, hand over to
 * the program (run/program.h).
 *
 * A batch is a plan with its lists, so batches with different tables do not disturb each other.
 * Boxes count bytes, so tensors of other dtypes go in the same messages, and all ranks bring the
 * same operation, those without rows among them. Addends of PARTIAL gradients lie in memory of the
 * bridge, which grows to the largest call.
 */
#include "bridge/ragged.h"
#include "bridge/run/over-peers.h"

#include "core/env.h"
#include "core/hash.h"
#include "core/overlap.h"
#include "core/error.h"
#include "core/range.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the bridge ---- */

colo_status_t colo_ragged_create(colo_bridge_t *b, const colo_bridge_config_t *c)
{
    if (c->algo != COLO_EXACT)
        return colo_fail(COLO_ERR_ARG, "bridge: ragged batches with COLLECTIVE, expected EXACT");
    const bool gpus = b->comm->ops->peer != NULL;
    if (colo_comm_size(b->comm) > 1 && gpus != (c->mem == COLO_CUDA))
        return colo_fail(
            COLO_ERR_UNBUILT,
            "bridge: ragged batches in %s memory on comm '%s' of backend %s, which moves %s "
            "memory; %s",
            gpus ? "host" : "CUDA", colo_comm_name(b->comm), colo_comm_backend(b->comm),
            gpus ? "CUDA" : "host",
            gpus ? "set mem to COLO_CUDA, or use a host communicator"
                 : "colo_comm_create_nccl() makes a communicator of GPUs");
    if (strcmp(b->axes, "th") != 0)
        return colo_fail(COLO_ERR_ARG, "bridge: ragged batches with axes '%s', expected 'th'",
                         b->axes);
    if ((unsigned)c->placement > COLO_MERGED || c->max_rows < 0)
        return colo_fail(COLO_ERR_ARG,
                         "bridge: placement %d, max_rows %lld; expected 0 (PACKED) or 1 (MERGED), "
                         "and >= 0",
                         (int)c->placement, (long long)c->max_rows);
    colo_ragged_bridge_t *r = b->ragged = calloc(1, sizeof *r);
    if (!r)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %zu bytes", sizeof *r);
    r->merged = c->placement == COLO_MERGED;
    r->max_rows = c->max_rows;
    if (c->packed && (c->ragged || r->merged || c->output != COLO_FULL_SEQ || c->grad))
        return colo_fail(COLO_ERR_ARG,
                         "bridge: packed with %s, expected 0: the packings say what "
                         "a rank has",
                         c->ragged   ? "ragged"
                         : r->merged ? "placement"
                         : c->grad   ? "grad"
                                     : "output");
    const colo_status_t st = colo_ragged_init(&r->axes, c->src, c->dst, &c->shape, c->packed);
    return st < 0 ? colo_fail_prefix(st, "bridge") : COLO_OK;
}

void colo_bridge_rows(const colo_bridge_t *bridge, int64_t *src_rows, int64_t *dst_rows)
{
    const colo_ragged_bridge_t *r = bridge ? bridge->ragged : NULL;
    if (src_rows)
        *src_rows = r ? r->src_rows : 0;
    if (dst_rows)
        *dst_rows = r ? r->dst_rows : 0;
}

/* ---- batches ---- */

#define RAGGED_BATCH "ragged batch" /* what ranks agree on */

/* The tables of a batch, of either kind; the caller's. */
typedef struct tables {
    const colo_segments_t *segments;
    const colo_packing_t *src, *dst;
} tables_t;

/* Checks them, lays them out, and keeps what ranks compare of them. */
static colo_status_t load(colo_batch_t *b, colo_ragged_t *axes, const tables_t *t)
{
    if (axes->packed) {
        COLO_TRY(colo_ragged_load_packings(axes, t->src, t->dst));
        colo_packing_keep(b->table, &b->ntables, "src ", t->src);
        colo_packing_keep(b->table, &b->ntables, "dst ", t->dst);
    } else {
        COLO_TRY(colo_ragged_load(axes, t->segments));
        b->ntables = colo_segments_keep(b->table, &axes->given);
    }
    b->hash = colo_tables_hash(b->table, b->ntables);
    return COLO_OK;
}

static void add_tables(colo_fields_t *f, const colo_batch_t *b)
{
    for (int32_t i = 0; i < b->ntables; i++) {
        const colo_table_t *t = &b->table[i];
        char name[32], text[200] = "";
        int offset = 0;
        snprintf(name, sizeof name, "%s%s", t->side, t->name);
        for (int64_t k = 0; k < t->n && k < COLO_SHOWN; k++)
            offset += snprintf(text + offset, sizeof text - (size_t)offset, " %lld",
                               (long long)t->first[k]);
        colo_fields_add(f, name, "%lld:%s%s (%08x)", (long long)t->n, text,
                        t->n > COLO_SHOWN ? " ..." : "", (unsigned)t->hash);
    }
    f->hash = colo_hash_i64(f->hash, (int64_t)b->hash); /* all bits */
}

/* The most rows that a rank has of source replica @d. */
static int64_t most_rows(const colo_ragged_t *a, int64_t d)
{
    int64_t n, parts = a->src.axes.cp * a->src.axes.sp, most = 0;
    if (a->packed) {
        for (int64_t k = d * a->src.cp; k < (d + 1) * a->src.cp; k++)
            most = a->src.held[k] > most ? a->src.held[k] : most;
        return most / a->src.axes.sp;
    }
    n = a->src_lo[d + 1] - a->src_lo[d];
    return n / parts + (n % parts > 0);
}

static colo_status_t check_rows(const colo_ragged_bridge_t *r)
{
    const colo_ragged_t *a = &r->axes;
    for (int64_t d = 0; r->max_rows && d < a->src.axes.replicas; d++) {
        const int64_t most = most_rows(a, d);
        if (most > r->max_rows)
            return colo_fail(COLO_ERR_ARG,
                             "%s: source replica %lld has %lld rows on a rank, expected at most "
                             "max_rows=%lld",
                             a->packed ? "packing" : "segments", (long long)d, (long long)most,
                             (long long)r->max_rows);
    }
    return COLO_OK;
}

static colo_status_t plan_batch(colo_bridge_t *bridge, const tables_t *tables, colo_batch_t **batch)
{
    colo_ragged_bridge_t *r = bridge->ragged;
    colo_plan_config_t cfg = bridge->now.program.plan->config;
    cfg.src = &bridge->src;
    cfg.dst = &bridge->dst;
    colo_batch_t *x = calloc(1, sizeof *x);
    if (!x)
        return colo_fail(COLO_ERR_NOMEM, "batch: %zu bytes", sizeof *x);
    colo_status_t st = COLO_OK;
    x->bridge = bridge;
    COLO_TRY_GOTO(st, load(x, &r->axes, tables), done);
    COLO_TRY_GOTO(st, check_rows(r), done);
    x->pool = r->spare;
    r->spare.chunk = NULL;
    COLO_TRY_GOTO(st,
                  colo_ragged_plan(&x->loaded.program.plan, &cfg, bridge->now.program.plan->rank,
                                   &r->axes, &r->builder, r->merged, x->hash, &x->pool, &x->places),
                  done);
    COLO_TRY_GOTO(st, colo_loaded_create(bridge, &x->loaded, true), done);
    if (bridge->peers.path)
        COLO_TRY_GOTO(st, colo_ragged_place_peers(&r->builder, &r->axes, r->merged), done);
    COLO_TRY_GOTO(st, colo_peers_load(bridge, &x->loaded), done);
    r->src_rows = x->loaded.program.plan->own_src.rows;
    r->dst_rows = x->loaded.program.plan->own_dst.rows;
    *batch = x;
    x = NULL;
done:
    colo_batch_destroy(&x);
    return st;
}

/* Ranks whose arguments are right wait in the first call on their batch. This one brings its error
 * to that call, so that they return, too. Ranks that all refuse meet here. */
colo_status_t colo_ragged_share_refusal(const colo_bridge_t *b, colo_status_t mine)
{
    colo_fields_t f = {COLO_FIELDS_INIT};
    if (colo_comm_check_level(b->comm) < 1)
        return mine;
    const colo_error_t earlier = colo_error_save();
    const colo_status_t st = colo_comm_i_agree_fields(b->comm, RAGGED_BATCH, &f, mine);
    return st == mine ? st : colo_fail_prefix(st, "%.511s", earlier.text);
}

static colo_status_t set(colo_bridge_t *bridge, const tables_t *tables, bool packed,
                         colo_batch_t **batch)
{
    const char *what = packed ? "packing" : "segments";
    colo_status_t st;
    if (!bridge) /* and no comm on which other ranks could be told */
        return colo_fail(COLO_ERR_ARG, "%s: bridge is NULL", what);
    if (!batch)
        st = colo_fail(COLO_ERR_ARG, "%s: batch is NULL, expected an address for it", what);
    else if (!bridge->ragged || bridge->ragged->axes.packed != packed)
        st =
            colo_fail(COLO_ERR_ARG, "%s: the bridge was created for %s; set %s in its config", what,
                      !bridge->ragged ? "uniform batches"
                      : packed        ? "segments"
                                      : "packings",
                      packed ? "packed" : "ragged");
    else
        st = plan_batch(bridge, tables, batch);
    return st < 0 ? colo_ragged_share_refusal(bridge, st) : st;
}

colo_status_t colo_bridge_set_segments(colo_bridge_t *bridge, const colo_segments_t *segments,
                                       colo_batch_t **batch)
{
    COLO_RANGE();
    return set(bridge, &(tables_t){.segments = segments}, false, batch);
}

colo_status_t colo_bridge_set_packing(colo_bridge_t *bridge, const colo_packing_t *src,
                                      const colo_packing_t *dst, colo_batch_t **batch)
{
    COLO_RANGE();
    return set(bridge, &(tables_t){.src = src, .dst = dst}, true, batch);
}

const colo_plan_t *colo_batch_plan(const colo_batch_t *batch)
{
    return batch ? batch->loaded.program.plan : NULL;
}

int64_t colo_batch_runs(const colo_batch_t *batch, colo_run_t *runs, int64_t cap)
{
    const colo_ragged_places_t *places = batch ? &batch->places : NULL;
    for (int64_t i = 0; runs && places && i < places->n && i < cap; i++) {
        const colo_stored_t *s = &places->stored[i];
        runs[i] = (colo_run_t){.row = s->first, .count = s->count, .local = s->row};
    }
    return places ? places->n : 0;
}

void colo_batch_destroy(colo_batch_t **batch)
{
    if (!batch || !*batch)
        return;
    colo_peers_unload((*batch)->bridge, &(*batch)->loaded);
    colo_loaded_deinit((*batch)->bridge->comm, &(*batch)->loaded);
    colo_pool_recycle(&(*batch)->pool, &(*batch)->bridge->ragged->spare);
    free(*batch);
    *batch = NULL;
}

/* ---- the tensors of a call ---- */

typedef struct call {
    colo_call_t run;
    colo_batch_t *batch;
    colo_pass_t pass;
    const colo_tensor_t *in, *out; /* [n] or NULL */
    int32_t n;
    colo_queries_t queries;
    colo_carried_t *carried; /* [n] */
} call_t;

/* Does this rank have to have a tensor on this side? */
static bool must_have(const call_t *c, bool src_side)
{
    const colo_plan_t *p = c->batch->loaded.program.plan;
    if (src_side)
        return p->own_src.rows > 0;
    return p->exchange[COLO_FORWARD][COLO_FIRST].recv.nregions + p->local[COLO_FORWARD].nregions +
               p->exchange[COLO_FORWARD][COLO_RELAYS].recv.nregions >
           0;
}

/* A tensor [rows, k * cols] of this rank; @per: out, k of it, -1 if there is none. */
static colo_status_t check_tensor(call_t *c, const colo_tensor_t *t, const char *what, int32_t i,
                                  bool src_side, bool output, int64_t *per)
{
    const colo_plan_t *p = c->batch->loaded.program.plan;
    const colo_owned_t *own = src_side ? &p->own_src : &p->own_dst;
    const int64_t units = own->h1 - own->h0;
    const long long rank = (long long)p->rank;
    char name[32];
    snprintf(name, sizeof name, "%s[%d]", what, (int)i);
    *per = -1;
    const bool none = !t || (!t->data && t->ndim == 0);
    if (!must_have(c, src_side) && (none || (!t->data && colo_tensor_count(t) == 0)))
        return COLO_OK;
    if (none)
        return colo_fail(COLO_ERR_ARG, "rank %lld: %s is NULL, expected [%lld, features]", rank,
                         name, (long long)own->rows);
    if (colo_tensor_check(t, name) < 0) {
        colo_status_t st = colo_tensor_check(t, name);
        return colo_fail_prefix(st, "rank %lld", rank);
    }
    if (!must_have(c, src_side) && colo_tensor_count(t) == 0)
        return COLO_OK;
    if (t->ndim != 2 || t->shape[0] != own->rows || units == 0 || t->shape[1] % units)
        return colo_fail(COLO_ERR_SHAPE,
                         "rank %lld: %s has %d axes, %lld rows and %lld features, expected 2 axes, "
                         "%lld rows and a multiple of %lld features",
                         rank, name, (int)t->ndim, (long long)t->shape[0],
                         t->ndim > 1 ? (long long)t->shape[1] : 0, (long long)own->rows,
                         (long long)units);
    if (t->mem != c->batch->bridge->mem)
        return colo_fail(
            COLO_ERR_ARG, "rank %lld: %s lives in %s memory, the bridge was made for %s", rank,
            name, t->mem == COLO_HOST ? "host" : "cuda", t->mem == COLO_HOST ? "cuda" : "host");
    if (output && colo_tensor_overlaps(t))
        return colo_fail(COLO_ERR_SHAPE,
                         "rank %lld: %s has strides [%lld, %lld], by which elements share an "
                         "address, expected an output without overlap",
                         rank, name, (long long)t->stride[0], (long long)t->stride[1]);
    *per = t->shape[1] / units;
    if (colo_tensor_count(t) == 0)
        return COLO_OK;
    colo_status_t st = c->batch->bridge->ops->pointer_check(&c->queries, t->data, t->device, name);
    return st < 0 ? colo_fail_prefix(st, "rank %lld", rank) : COLO_OK;
}

static colo_view_t view_of(const colo_tensor_t *t)
{
    return t && t->data ? (colo_view_t){t->data, {0, t->stride[0], t->stride[1]}}
                        : (colo_view_t){0};
}

/* An output overlaps no input and no output before it. */
static colo_status_t check_apart(const call_t *c, const colo_tensor_t *out, int32_t i,
                                 const char *in_name, const char *out_name)
{
    for (int32_t k = 0; k < c->n + i; k++) {
        const bool input = k < c->n;
        const colo_tensor_t *t = input ? (c->in ? &c->in[k] : NULL) : &c->out[k - c->n];
        if (t && t->data && colo_tensor_count(t) > 0 && !colo_tensors_apart(t, out))
            return colo_fail(COLO_ERR_ARG, "rank %lld: %s[%d] and %s[%d] overlap in memory",
                             (long long)c->batch->loaded.program.plan->rank,
                             input ? in_name : out_name, (int)(input ? k : k - c->n), out_name,
                             (int)i);
    }
    return COLO_OK;
}

static colo_status_t check_pair(call_t *c, int32_t i)
{
    const colo_plan_t *p = c->batch->loaded.program.plan;
    const bool fwd = c->pass == COLO_FORWARD;
    const char *in_name = fwd ? "x" : "d_y", *out_name = fwd ? "y" : "d_x";
    const colo_tensor_t *in = c->in ? &c->in[i] : NULL, *out = c->out ? &c->out[i] : NULL;
    colo_carried_t *t = &c->carried[i];
    int64_t a, b;
    COLO_TRY(check_tensor(c, in, in_name, i, fwd, false, &a));
    COLO_TRY(check_tensor(c, out, out_name, i, !fwd, true, &b));
    if (a < 0 && b < 0)
        return COLO_OK; /* this rank carries nothing of it */
    if (a >= 0 && b >= 0 && (a != b || in->dtype != out->dtype))
        return colo_fail(COLO_ERR_SHAPE,
                         "rank %lld: %s[%d] has %lld features of %s, %s[%d] %lld of %s, expected "
                         "one number and dtype",
                         (long long)p->rank, in_name, (int)i,
                         (long long)(a * p->config.shape.features), colo_dtype_name(in->dtype),
                         out_name, (int)i, (long long)(b * p->config.shape.features),
                         colo_dtype_name(out->dtype));
    t->per = a >= 0 ? a : b;
    t->dtype = a >= 0 ? in->dtype : out->dtype;
    t->in = a >= 0 ? view_of(in) : (colo_view_t){0};
    t->out = b >= 0 ? view_of(out) : (colo_view_t){0};
    if (b >= 0)
        COLO_TRY(check_apart(c, out, i, in_name, out_name));
    if (fwd || p->addends == 1)
        return COLO_OK;
    if (!colo_dtype_is_float(t->dtype))
        return colo_fail(COLO_ERR_ARG,
                         "rank %lld: %s[%d] is %s, which PARTIAL gradients over %lld context ranks "
                         "are not added up in; leave it out",
                         (long long)p->rank, in_name, (int)i, colo_dtype_name(t->dtype),
                         (long long)p->addends);
    t->in_slot = c->run.frame.slot_bytes;
    c->run.frame.slot_bytes += colo_ragged_padded(colo_slot_bytes(p, t->per, t->dtype));
    return COLO_OK;
}

/* Boxes and addends; a peer-to-peer call needs neither. */
static colo_status_t prepare_staged(call_t *c)
{
    colo_loaded_t *loaded = &c->batch->loaded;
    colo_bridge_t *b = c->batch->bridge;
    COLO_TRY(colo_over_comm_widen(loaded, c->pass, c->n));
    if (c->pass == COLO_BACKWARD)
        COLO_TRY(colo_bridge_slots_for(b, c->run.frame.slot_bytes * (size_t)loaded->program.nslots,
                                       c->run.capturing));
    c->run.frame.slots = b->slots.data;
    return COLO_OK;
}

static colo_status_t prepare(call_t *c)
{
    colo_bridge_t *b = c->batch->bridge;
    const long long rank = (long long)c->batch->loaded.program.plan->rank;
    if (c->n < 1)
        return colo_fail(COLO_ERR_ARG, "rank %lld: %d tensors, expected at least 1", rank,
                         (int)c->n);
    c->carried = colo_list_zeroed(&b->ragged->carried, c->n, sizeof *c->carried);
    c->run.frame.tensor = c->carried;
    c->run.reached.tensor =
        colo_list_zeroed(&b->ragged->reached, 2 * (int64_t)c->n, sizeof *c->run.reached.tensor);
    if (!c->carried || !c->run.reached.tensor)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %d tensors", (int)c->n);
    colo_status_t st = b->ops->stream_check(&c->queries, c->run.stream, &c->run.capturing);
    if (st < 0)
        return colo_fail_prefix(st, "rank %lld", rank);
    for (int32_t i = 0; i < c->n; i++)
        COLO_TRY(check_pair(c, i));
    COLO_TRY(colo_peers_find(&c->run, c->in, c->out));
    c->run.device = c->queries.device;
    return colo_peers_carry(&c->run) || c->run.reached.not_agreed ? COLO_OK : prepare_staged(c);
}

/* ---- calls ---- */

/* All ranks of the comm come with the tables, the pass and their own status. */
static colo_status_t agree(const call_t *c, colo_status_t mine)
{
    const colo_bridge_t *b = c->batch->bridge;
    colo_fields_t f = {COLO_FIELDS_INIT};
    add_tables(&f, c->batch);
    colo_fields_add(&f, "operation", "bridge %llu %s", (unsigned long long)b->number,
                    c->pass == COLO_FORWARD ? "forward" : "backward");
    colo_fields_add(&f, "tensors", "%d", (int)c->n);
    if (colo_comm_check_level(b->comm) >= 2) /* registered on all ranks or on none */
        colo_fields_add(&f, "in registered memory", "%s",
                        c->run.reached.not_agreed ? "yet unknown"
                        : c->run.reached.p2p      ? "yes"
                                                  : "no");
    /* a rank without rows may have no tensors */
    const bool has = must_have(c, true) || must_have(c, false);
    for (int32_t i = 0; mine == COLO_OK && has && i < c->n; i++) {
        char name[32];
        snprintf(name, sizeof name, "tensor %d", (int)i);
        colo_fields_add_optional(
            &f, name, "%lld features of %s",
            (long long)(c->carried[i].per * c->batch->loaded.program.plan->config.shape.features),
            colo_dtype_name(c->carried[i].dtype));
    }
    return colo_comm_i_agree_fields(b->comm, RAGGED_BATCH, &f, mine);
}

static colo_op_desc_t operation(const call_t *c)
{
    const colo_bridge_t *b = c->batch->bridge;
    uint64_t h =
        colo_hash_i64(b->now.program.plan->hash, (int64_t)c->batch->loaded.program.plan->hash);
    return colo_op_of_bridge(COLO_U8, b->number, c->pass, colo_hash_i64(h, c->n));
}

static colo_status_t run(call_t *c)
{
    const colo_stream_t stream = c->run.stream;
    colo_bridge_t *b = c->batch->bridge;
    const int32_t level = colo_comm_check_level(b->comm);
    COLO_TRY(
        colo_comm_i_alive(b->comm, c->pass == COLO_FORWARD ? "bridge forward" : "bridge backward"));
    if (c->pass == COLO_BACKWARD && b->now.program.plan->config.no_grad)
        return colo_fail(COLO_ERR_STATE, "rank %lld: backward on a bridge created with no_grad",
                         (long long)b->now.program.plan->rank);
    colo_status_t st = prepare(c);
    const bool verifies = level >= 2 && !c->run.capturing;
    if (level >= 2 && c->run.capturing)
        colo_log(COLO_LOG_WARN, "bridge: a capture at COLO_CHECK=2 is compared between ranks, what "
                                "tensors hold is not verified");
    if (st == COLO_OK && verifies && c->pass == COLO_BACKWARD)
        st = colo_ragged_verify_zeros(c->batch, c->carried, c->n, stream);
    if (level >= 2 || (level == 1 && !c->batch->compared))
        COLO_TRY(agree(c, st));
    else if (st < 0)
        return colo_comm_i_fail(b->comm, st);
    if (verifies)
        COLO_TRY(colo_ragged_verify_replicas(c->batch, c->pass, c->carried, c->n, stream));
    c->batch->compared = true;
    if (c->run.reached.not_agreed) {
        COLO_TRY(colo_peers_agree(&c->run));
        st = colo_peers_carry(&c->run) ? COLO_OK : prepare_staged(c);
        if (st < 0)
            return colo_comm_i_fail(b->comm, st);
    }
    b->calls++;
    c->run.op = operation(c);
    st = c->run.reached.p2p ? colo_peers_begin(&c->run) : COLO_OK;
    if (st < 0)
        return colo_comm_i_fail(b->comm, st);
    if (colo_peers_carry(&c->run))
        return colo_peers_run(&c->run);
    if (!b->order || c->run.capturing)
        return colo_run_steps(&c->run);
    COLO_TRY(colo_bridge_follow(b, stream));
    return colo_bridge_lead(b, colo_run_steps(&c->run), stream);
}

static colo_status_t call(colo_batch_t *batch, colo_pass_t pass, const colo_tensor_t *in,
                          const colo_tensor_t *out, int32_t n, colo_stream_t stream)
{
    if (!batch)
        return colo_fail(COLO_ERR_ARG, "bridge: batch is NULL");
    call_t c = {.run = {.bridge = batch->bridge,
                        .loaded = &batch->loaded,
                        .frame = {.program = &batch->loaded.program, .pass = pass, .n = n},
                        .stream = stream},
                .batch = batch,
                .pass = pass,
                .in = in,
                .out = out,
                .n = n};
    return run(&c);
}

colo_status_t colo_batch_forward(colo_batch_t *batch, const colo_tensor_t *x,
                                 const colo_tensor_t *y, int32_t n, colo_stream_t stream)
{
    COLO_RANGE();
    return call(batch, COLO_FORWARD, x, y, n, stream);
}

colo_status_t colo_batch_backward(colo_batch_t *batch, const colo_tensor_t *d_y,
                                  const colo_tensor_t *d_x, int32_t n, colo_stream_t stream)
{
    COLO_RANGE();
    return call(batch, COLO_BACKWARD, d_y, d_x, n, stream);
}
