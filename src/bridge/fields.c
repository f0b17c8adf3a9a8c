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

static void add_splits(colo_fields_t *fields, const char *name, const colo_layout_t *layout)
{
    static const char *const kinds[] = {"", "", " zigzag", " ceil"};
    char text[240] = "none";
    colo_text_t list = {.data = text, .cap = sizeof text};
    for (int axis = 0; axis < 3; axis++)
        for (int i = 0; i < layout->nsplits[axis]; i++) {
            const colo_split_t *split = &layout->split[axis][i];
            colo_put(&list, "%s%s over %s%s%s", list.len ? ", " : "", colo_axis_names[axis],
                     layout->grid.name[split->dim], kinds[split->kind],
                     split->context && split->kind != COLO_SPLIT_ZIGZAG ? " in context" : "");
        }
    colo_fields_add(fields, name, "%s", text);
}

static void add_positions(colo_fields_t *fields, const char *name, const colo_layout_t *layout)
{
    enum { SHOWN = 8 };
    char text[200] = "";
    colo_text_t list = {.data = text, .cap = sizeof text};
    uint64_t hash = COLO_HASH_INIT;
    if (layout->map != COLO_MAP_TABLE) {
        if (layout->positions)
            snprintf(text, sizeof text, " of %lld", (long long)layout->positions);
        colo_fields_add(fields, name, "rows from %lld%s", (long long)layout->offset, text);
        return;
    }
    for (int64_t i = 0; i < layout->table_rows; i++) {
        hash = colo_hash_i64(hash, layout->table[i]);
        if (i < SHOWN)
            colo_put(&list, " %lld", (long long)layout->table[i]);
    }
    colo_fields_add(fields, name, "a table of %lld rows in %lld:%s%s (%08x)",
                    (long long)layout->table_rows, (long long)layout->positions, text,
                    layout->table_rows > SHOWN ? " ..." : "", (unsigned)hash);
}

static void add_layout(colo_fields_t *fields, const char *const names[4],
                       const colo_layout_t *layout)
{
    char grid[COLO_KEY_MAX];
    colo_grid_print(&layout->grid, grid, sizeof grid);
    colo_fields_add(fields, names[0], "%s", grid);
    add_splits(fields, names[1], layout);
    add_positions(fields, names[2], layout);
    if (layout->stage_dim < 0)
        colo_fields_add(fields, names[3], "any");
    else
        colo_fields_add(fields, names[3], "%s %lld", layout->grid.name[layout->stage_dim],
                        (long long)layout->stage);
}

void colo_bridge_fields(const colo_bridge_t *bridge, colo_fields_t *fields)
{
    static const char *const src[] = {"src", "src splits", "src positions", "src stage"};
    static const char *const dst[] = {"dst", "dst splits", "dst positions", "dst stage"};
    const colo_plan_t *plan = bridge->now.program.plan;
    const colo_plan_config_t *config = &plan->config;
    const bool sharded = config->output == COLO_OUTPUT_SHARDED;
    add_layout(fields, src, &plan->src);
    add_layout(fields, dst, &plan->dst);
    colo_fields_add(fields, "samples", "%lld", (long long)config->shape.samples);
    colo_fields_add(fields, "rows", "%lld", (long long)config->shape.rows);
    colo_fields_add(fields, "features", "%lld", (long long)config->shape.features);
    colo_fields_add(fields, "dtype", "%s", colo_dtype_name(config->dtype));
    colo_fields_add(fields, "output", "%s", sharded ? "SHARDED" : "FULL_SEQ");
    colo_fields_add(fields, "grad", "%s",
                    config->no_grad                      ? "no_grad"
                    : sharded                            ? "own rows"
                    : config->grad == COLO_GRAD_DISJOINT ? "DISJOINT"
                                                         : "PARTIAL");
    colo_fields_add(fields, "ranks_per_node", "%lld", (long long)config->ranks_per_node);
    colo_fields_add(fields, "nodes", "%lld", (long long)colo_nodes_count(config->nodes));
    colo_fields_add(fields, "algo", "%s", colo_algo_name(bridge->algo));
    colo_fields_add(fields, "axes", "%s",
                    colo_bridge_is_collective(bridge) ? bridge->axes.name : "any");
    colo_fields_add(fields, "transport", "%s", colo_transport_name(bridge->transport));
    colo_fields_add(fields, "one_level", "%s", config->one_level ? "yes" : "no");
    colo_ragged_fields(bridge, fields);
    /* else some would connect now and others not */
    colo_fields_add(fields, "registered memory", "%s", bridge->lazy ? "yes" : "no");
    colo_fields_add(fields, "bridge of this comm", "%llu", (unsigned long long)bridge->id.number);
    fields->hash =
        colo_hash_i64(fields->hash, (int64_t)colo_plan_hash(plan)); /* also what a value cuts off */
}

/* Do ranks that exchange messages find out by themselves that their calls differ? NCCL compares
 * nothing, and COLLECTIVE runs on comms of its own. */
bool colo_bridge_exchanges_compare(const colo_bridge_t *bridge)
{
    return colo_comm_mem(bridge->comm) == COLO_MEM_HOST && !colo_bridge_is_collective(bridge);
}

colo_op_desc_t colo_bridge_op(const colo_bridge_t *bridge, colo_pass_t pass)
{
    const colo_plan_t *plan = bridge->now.program.plan;
    const bool alone = pass == COLO_PASS_FORWARD && bridge->alone;
    return colo_op_of_bridge(plan->config.dtype, bridge->id.number, pass, alone, plan->hash);
}

colo_op_desc_t colo_batch_op(const colo_batch_t *batch, colo_pass_t pass, int32_t n)
{
    const colo_bridge_t *bridge = batch->bridge;
    const uint64_t hash =
        colo_hash_i64(bridge->now.program.plan->hash, (int64_t)batch->ready.program.plan->hash);
    const bool alone = pass == COLO_PASS_FORWARD && bridge->alone;
    return colo_op_of_bridge(COLO_U8, bridge->id.number, pass, alone, colo_hash_i64(hash, n));
}

/* ---- calls ---- */

static void add_tables(colo_fields_t *fields, const colo_batch_t *batch)
{
    for (int32_t i = 0; i < batch->ntables; i++) {
        const colo_table_t *table = &batch->table[i];
        char name[32], text[200] = "";
        colo_text_t list = {.data = text, .cap = sizeof text};
        snprintf(name, sizeof name, "%s%s", table->side, table->name);
        for (int64_t k = 0; k < table->n && k < COLO_SHOWN; k++)
            colo_put(&list, " %lld", (long long)table->first[k]);
        colo_fields_add(fields, name, "%lld:%s%s (%08x)", (long long)table->n, text,
                        table->n > COLO_SHOWN ? " ..." : "", (unsigned)table->hash);
    }
    fields->hash = colo_hash_i64(fields->hash, (int64_t)batch->hash); /* all bits */
}

static void add_operation(colo_fields_t *fields, const colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    const bool forward = call->frame.pass == COLO_PASS_FORWARD;
    colo_fields_add(fields, "operation", "bridge %llu %s%s", (unsigned long long)bridge->id.number,
                    forward ? "forward" : "backward",
                    forward && bridge->alone ? " without backward" : "");
}

static colo_status_t agree_batch(const colo_call_t *call, colo_status_t mine)
{
    const colo_bridge_t *bridge = call->bridge;
    colo_fields_t fields = {COLO_FIELDS_INIT};
    add_tables(&fields, call->batch);
    add_operation(&fields, call);
    colo_fields_add(&fields, "tensors", "%d", (int)call->frame.n);
    if (colo_comm_check_level(bridge->comm) >= 2) /* registered on all ranks or on none */
        colo_fields_add(&fields, "in registered memory", "%s",
                        call->undecided ? "yet unknown"
                        : call->direct  ? "yes"
                                        : "no");
    /* a rank without rows may have no tensors */
    const bool has = colo_call_must_have(call, true) || colo_call_must_have(call, false);
    for (int32_t i = 0; mine == COLO_OK && has && i < call->frame.n; i++) {
        const colo_carried_t *tensor = &call->carried[i];
        char name[32];
        snprintf(name, sizeof name, "tensor %d", (int)i);
        colo_fields_add_optional(
            &fields, name, "%lld features of %s",
            (long long)(tensor->per * call->frame.program->plan->config.shape.features),
            colo_dtype_name(tensor->dtype));
    }
    return colo_comm_agree_fields(bridge->comm, COLO_RAGGED_BATCH, &fields, mine);
}

static colo_status_t agree_uniform(const colo_call_t *call, colo_status_t mine)
{
    const colo_bridge_t *bridge = call->bridge;
    const bool strict = colo_comm_check_level(bridge->comm) >= 2;
    /* registered on all ranks or on none */
    const bool registered = strict && !call->undecided && call->direct;
    colo_fields_t fields = {COLO_FIELDS_INIT};
    add_operation(&fields, call);
    colo_fields_add(&fields, "calls before", "%llu", (unsigned long long)bridge->id.calls);
    colo_fields_add(&fields, "in registered memory", "%s", registered ? "yes" : "no");
    colo_fields_add(&fields, "captured", "%s", strict && call->capturing ? "yes" : "no");
    colo_bridge_fields(bridge, &fields);
    return colo_comm_agree_fields(bridge->comm, "bridge call", &fields, mine);
}

colo_status_t colo_call_agree(const colo_call_t *call, colo_status_t mine)
{
    return call->batch ? agree_batch(call, mine) : agree_uniform(call, mine);
}
