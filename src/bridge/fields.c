/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fields.c - what all ranks must have alike about a bridge, by name, for agreements (agree.c).
 *
 * Messages of EXACT have an order of their own, so axes count with COLLECTIVE only: there a
 * gathered part is in the order of its rank's axes. A position table is compared as a whole and
 * shown by its first entries.
 */
#include "bridge/call.h"

#include "core/hash.h"

#include <stdio.h>
#include <string.h>

static void add_splits(colo_fields_t *f, const char *name, const colo_layout_t *l)
{
    static const char *const axes[] = {"samples", "rows", "features"};
    static const char *const kinds[] = {"", "", " zigzag", " ceil"};
    char text[240] = "none";
    size_t pos = 0;
    for (int a = 0; a < 3; a++)
        for (int i = 0; i < l->nsplits[a] && pos < sizeof text; i++) {
            const colo_split_t *s = &l->split[a][i];
            const int n = snprintf(text + pos, sizeof text - pos, "%s%s over %s%s%s",
                                   pos ? ", " : "", axes[a], l->grid.name[s->dim], kinds[s->kind],
                                   s->context && s->kind != COLO_ZIGZAG ? " in context" : "");
            pos += n > 0 ? (size_t)n : 0;
        }
    colo_fields_add(f, name, "%s", text);
}

static void add_positions(colo_fields_t *f, const char *name, const colo_layout_t *l)
{
    enum { SHOWN = 8 };
    char text[200] = "";
    size_t pos = 0;
    uint64_t hash = COLO_HASH_INIT;
    if (l->map != COLO_MAP_TABLE) {
        if (l->positions)
            snprintf(text, sizeof text, " of %lld", (long long)l->positions);
        colo_fields_add(f, name, "rows from %lld%s", (long long)l->offset, text);
        return;
    }
    for (int64_t i = 0; i < l->table_rows; i++) {
        hash = colo_hash_i64(hash, l->table[i]);
        if (i < SHOWN)
            pos += (size_t)snprintf(text + pos, sizeof text - pos, " %lld", (long long)l->table[i]);
    }
    colo_fields_add(f, name, "a table of %lld rows in %lld:%s%s (%08x)", (long long)l->table_rows,
                    (long long)l->positions, text, l->table_rows > SHOWN ? " ..." : "",
                    (unsigned)hash);
}

static void add_layout(colo_fields_t *f, const char *const names[4], const colo_layout_t *l)
{
    char grid[COLO_KEY_MAX];
    colo_grid_print(&l->grid, grid, sizeof grid);
    colo_fields_add(f, names[0], "%s", grid);
    add_splits(f, names[1], l);
    add_positions(f, names[2], l);
    if (l->stage_dim < 0)
        colo_fields_add(f, names[3], "any");
    else
        colo_fields_add(f, names[3], "%s %lld", l->grid.name[l->stage_dim], (long long)l->stage);
}

void colo_bridge_fields(const colo_bridge_t *b, colo_fields_t *f)
{
    static const char *const src[] = {"src", "src splits", "src positions", "src stage"};
    static const char *const dst[] = {"dst", "dst splits", "dst positions", "dst stage"};
    const colo_plan_t *p = b->now.program.plan;
    const colo_plan_config_t *c = &p->config;
    const bool sharded = c->output == COLO_SHARDED;
    add_layout(f, src, &p->src);
    add_layout(f, dst, &p->dst);
    colo_fields_add(f, "samples", "%lld", (long long)c->shape.samples);
    colo_fields_add(f, "rows", "%lld", (long long)c->shape.rows);
    colo_fields_add(f, "features", "%lld", (long long)c->shape.features);
    colo_fields_add(f, "dtype", "%s", colo_dtype_name(c->dtype));
    colo_fields_add(f, "output", "%s", sharded ? "SHARDED" : "FULL_SEQ");
    colo_fields_add(f, "grad", "%s",
                    c->no_grad                 ? "no_grad"
                    : sharded                  ? "own rows"
                    : c->grad == COLO_DISJOINT ? "DISJOINT"
                                               : "PARTIAL");
    colo_fields_add(f, "ranks_per_node", "%lld", (long long)c->ranks_per_node);
    colo_fields_add(f, "nodes", "%lld", (long long)colo_nodes_count(c->nodes));
    colo_fields_add(f, "algo", "%s", b->algorithm->name);
    colo_fields_add(f, "axes", "%s", b->algorithm->same_axes ? b->axes.name : "any");
    colo_fields_add(f, "transport", "%s", colo_transport_name(b->transport));
    colo_fields_add(f, "one_level", "%s", c->one_level ? "yes" : "no");
    colo_ragged_fields(b, f);
    /* else some would connect now and others not */
    colo_fields_add(f, "registered memory", "%s", b->lazy ? "yes" : "no");
    colo_fields_add(f, "bridge of this comm", "%llu", (unsigned long long)b->id.number);
    f->hash = colo_hash_i64(f->hash, (int64_t)colo_plan_hash(p)); /* also what a value cuts off */
}

/* Do ranks that exchange messages find out by themselves that their calls differ? NCCL compares
 * nothing, and COLLECTIVE runs on comms of its own. */
bool colo_bridge_exchanges_compare(const colo_bridge_t *b)
{
    return colo_comm_i_mem(b->comm) == COLO_HOST && b->algorithm->compares;
}

colo_op_desc_t colo_bridge_op(const colo_bridge_t *b, colo_pass_t pass)
{
    const colo_plan_t *p = b->now.program.plan;
    return colo_op_of_bridge(p->config.dtype, b->id.number, pass, p->hash);
}

colo_op_desc_t colo_batch_op(const colo_batch_t *batch, colo_pass_t pass, int32_t n)
{
    const colo_bridge_t *b = batch->bridge;
    const uint64_t h =
        colo_hash_i64(b->now.program.plan->hash, (int64_t)batch->loaded.program.plan->hash);
    return colo_op_of_bridge(COLO_U8, b->id.number, pass, colo_hash_i64(h, n));
}

/* ---- calls ---- */

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

static colo_status_t agree_batch(const colo_call_t *call, colo_status_t mine)
{
    const colo_bridge_t *b = call->bridge;
    colo_fields_t f = {COLO_FIELDS_INIT};
    add_tables(&f, call->batch);
    colo_fields_add(&f, "operation", "bridge %llu %s", (unsigned long long)b->id.number,
                    call->frame.pass == COLO_FORWARD ? "forward" : "backward");
    colo_fields_add(&f, "tensors", "%d", (int)call->frame.n);
    if (colo_comm_check_level(b->comm) >= 2) /* registered on all ranks or on none */
        colo_fields_add(&f, "in registered memory", "%s",
                        call->asks                   ? "yet unknown"
                        : call->executor->registered ? "yes"
                                                     : "no");
    /* a rank without rows may have no tensors */
    const bool has = colo_call_must_have(call, true) || colo_call_must_have(call, false);
    for (int32_t i = 0; mine == COLO_OK && has && i < call->frame.n; i++) {
        const colo_carried_t *t = &call->carried[i];
        char name[32];
        snprintf(name, sizeof name, "tensor %d", (int)i);
        colo_fields_add_optional(
            &f, name, "%lld features of %s",
            (long long)(t->per * call->frame.program->plan->config.shape.features),
            colo_dtype_name(t->dtype));
    }
    return colo_comm_i_agree_fields(b->comm, COLO_RAGGED_BATCH, &f, mine);
}

static colo_status_t agree_uniform(const colo_call_t *call, colo_status_t mine)
{
    const colo_bridge_t *b = call->bridge;
    const bool strict = colo_comm_check_level(b->comm) >= 2;
    /* registered on all ranks or on none */
    const bool registered = strict && !call->asks && call->executor->registered;
    colo_fields_t f = {COLO_FIELDS_INIT};
    colo_fields_add(&f, "operation", "bridge %llu %s", (unsigned long long)b->id.number,
                    call->frame.pass == COLO_FORWARD ? "forward" : "backward");
    colo_fields_add(&f, "calls before", "%llu", (unsigned long long)b->id.calls);
    colo_fields_add(&f, "in registered memory", "%s", registered ? "yes" : "no");
    colo_fields_add(&f, "captured", "%s", strict && call->capturing ? "yes" : "no");
    colo_bridge_fields(b, &f);
    return colo_comm_i_agree_fields(b->comm, "bridge call", &f, mine);
}

colo_status_t colo_call_agree(const colo_call_t *call, colo_status_t mine)
{
    return call->batch ? agree_batch(call, mine) : agree_uniform(call, mine);
}
