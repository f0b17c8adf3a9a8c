/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ragged.c - bridges of batches whose rows are in tables: make a batch of them. Its calls are
 * call.c.
 *
 * A batch is a plan with its lists, so batches with different tables do not disturb each other.
 * Boxes count bytes, so tensors of other dtypes go in the same messages, and all ranks bring the
 * same operation, those without rows among them. Addends of PARTIAL gradients lie in memory of the
 * bridge, which grows to the largest call.
 */
#include "bridge/ragged/ragged.h"

#include "core/env.h"
#include "core/hash.h"
#include "core/overlap.h"
#include "core/error.h"
#include "core/range.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the bridge ---- */

bool colo_ragged_wanted(const colo_bridge_config_t *config)
{
    return config->ragged || config->packed;
}

colo_status_t colo_ragged_create(colo_bridge_t *bridge, const colo_bridge_config_t *config)
{
    const bool wanted = colo_ragged_wanted(config);
    COLO_FAIL_IF(!wanted && (config->placement || config->max_rows), COLO_ERR_ARG,
                 "bridge: placement %d and max_rows %lld without ragged; expected 0 and 0",
                 (int)config->placement, (long long)config->max_rows);
    if (!wanted)
        return COLO_OK;
    COLO_FAIL_IF(colo_bridge_is_collective(bridge), COLO_ERR_ARG,
                 "bridge: ragged batches with %s, expected EXACT", colo_algo_name(bridge->algo));
    const bool gpus = colo_comm_mem(bridge->comm) == COLO_MEM_CUDA;
    COLO_FAIL_IF(colo_comm_size(bridge->comm) > 1 && gpus != (config->mem == COLO_MEM_CUDA),
                 COLO_ERR_UNBUILT,
                 "bridge: ragged batches in %s memory on comm '%s' of backend %s, which moves %s "
                 "memory; %s",
                 gpus ? "host" : "CUDA", colo_comm_name(bridge->comm),
                 colo_comm_backend(bridge->comm), gpus ? "CUDA" : "host",
                 gpus ? "set mem to COLO_MEM_CUDA, or use a host communicator"
                      : "colo_comm_create_nccl() makes a communicator of GPUs");
    COLO_FAIL_IF(strcmp(bridge->axes.name, "th") != 0, COLO_ERR_ARG,
                 "bridge: ragged batches with axes '%s', expected 'th'", bridge->axes.name);
    COLO_FAIL_IF((unsigned)config->placement > COLO_PLACEMENT_MERGED || config->max_rows < 0,
                 COLO_ERR_ARG,
                 "bridge: placement %d, max_rows %lld; expected 0 (PACKED) or 1 (MERGED), "
                 "and >= 0",
                 (int)config->placement, (long long)config->max_rows);
    colo_ragged_bridge_t *ragged = bridge->ragged = calloc(1, sizeof *ragged);
    COLO_FAIL_IF(!ragged, COLO_ERR_NOMEM, "bridge: %zu bytes", sizeof *ragged);
    bridge->now.any_ranks = true;
    ragged->merged = config->placement == COLO_PLACEMENT_MERGED;
    ragged->max_rows = config->max_rows;
    COLO_FAIL_IF(config->packed && (config->ragged || ragged->merged ||
                                    config->output != COLO_OUTPUT_FULL_SEQ || config->grad),
                 COLO_ERR_ARG,
                 "bridge: packed with %s, expected 0: the packings say what "
                 "a rank has",
                 config->ragged   ? "ragged"
                 : ragged->merged ? "placement"
                 : config->grad   ? "grad"
                                  : "output");
    const colo_status_t st =
        colo_ragged_init(&ragged->axes, config->src, config->dst, &config->shape, config->packed);
    return st < 0 ? colo_fail_prefix(st, "bridge") : COLO_OK;
}

void colo_ragged_destroy(colo_bridge_t *bridge)
{
    if (!bridge->ragged)
        return;
    colo_ragged_deinit(&bridge->ragged->axes);
    colo_builder_deinit(&bridge->ragged->builder);
    colo_pool_deinit(&bridge->ragged->spare);
    free(bridge->ragged);
}

void colo_ragged_fields(const colo_bridge_t *bridge, colo_fields_t *fields)
{
    const colo_ragged_bridge_t *ragged = bridge->ragged;
    if (ragged)
        colo_fields_add(fields, "ragged", "%s, at most %lld rows",
                        ragged->axes.packed ? "packings"
                        : ragged->merged    ? "MERGED"
                                            : "PACKED",
                        (long long)ragged->max_rows);
}

void colo_bridge_rows(const colo_bridge_t *bridge, int64_t *src_rows, int64_t *dst_rows)
{
    const colo_ragged_bridge_t *ragged = bridge ? bridge->ragged : NULL;
    if (src_rows)
        *src_rows = ragged ? ragged->src_rows : 0;
    if (dst_rows)
        *dst_rows = ragged ? ragged->dst_rows : 0;
}

/* ---- batches ---- */

/* The most rows that a rank has of source replica @replica. */
static int64_t most_rows(const colo_ragged_t *ragged, int64_t replica)
{
    const colo_packed_t *src = &ragged->src;
    int64_t most = 0;
    for (int64_t k = replica * src->cp; k < (replica + 1) * src->cp; k++)
        most = src->held[k] > most ? src->held[k] : most;
    return most / src->sp;
}

static colo_status_t check_rows(const colo_ragged_bridge_t *ragged)
{
    const colo_ragged_t *tables = &ragged->axes;
    for (int64_t replica = 0; ragged->max_rows && replica < tables->src.axes.replicas; replica++) {
        const int64_t most = most_rows(tables, replica);
        COLO_FAIL_IF(most > ragged->max_rows, COLO_ERR_ARG,
                     "%s: source replica %lld has %lld rows on a rank, expected at most "
                     "max_rows=%lld",
                     tables->packed ? "packing" : "segments", (long long)replica, (long long)most,
                     (long long)ragged->max_rows);
    }
    return COLO_OK;
}

static colo_status_t plan_batch(colo_bridge_t *bridge, const colo_tables_t *tables,
                                colo_batch_t **batch)
{
    colo_ragged_bridge_t *ragged = bridge->ragged;
    colo_plan_config_t cfg = bridge->now.program.plan->config;
    cfg.src = &bridge->sides.src;
    cfg.dst = &bridge->sides.dst;
    COLO_ENDS(colo_batch_destroy) colo_batch_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "batch: %zu bytes", sizeof *made);
    made->bridge = bridge;
    COLO_TRY(colo_ragged_load(&ragged->axes, tables, made->table, &made->ntables));
    made->hash = colo_tables_hash(made->table, made->ntables);
    COLO_TRY(check_rows(ragged));
    COLO_TRY(colo_ragged_plan(&made->ready.program.plan, &cfg, bridge->now.program.plan->rank,
                              &ragged->axes, &ragged->builder, ragged->merged, made->hash,
                              &ragged->spare, &made->places));
    if (bridge->direct.launcher)
        COLO_TRY(colo_ragged_place_peers(&ragged->builder, &ragged->axes, ragged->merged));
    made->ready.program.bytes = true;
    COLO_TRY(colo_run_load(bridge, &made->ready));
    ragged->src_rows = made->ready.program.plan->own_src.rows;
    ragged->dst_rows = made->ready.program.plan->own_dst.rows;
    *batch = made;
    made = NULL;
    return COLO_OK;
}

/* Ranks whose arguments are right wait in the first call on their batch. This one brings its error
 * to that call, so that they return, too. Ranks that all refuse meet here. Collective, if
 * COLO_CHECK is at least 1; returns @mine. */
static colo_status_t share_refusal(const colo_bridge_t *bridge, colo_status_t mine)
{
    colo_fields_t fields = {COLO_FIELDS_INIT};
    if (colo_comm_check_level(bridge->comm) < 1)
        return mine;
    const colo_error_t earlier = colo_error_save();
    const colo_status_t st = colo_comm_agree_fields(bridge->comm, COLO_RAGGED_BATCH, &fields, mine);
    return st == mine ? st : colo_fail_prefix(st, "%.511s", earlier.text);
}

colo_status_t colo_ragged_refuse_call(const colo_bridge_t *bridge, colo_pass_t pass)
{
    if (!bridge->ragged)
        return COLO_OK;
    const colo_status_t refused =
        colo_fail(COLO_ERR_STATE,
                  "bridge: created for ragged batches; call colo_bridge_set_segments() and "
                  "colo_batch_%s()",
                  pass == COLO_PASS_FORWARD ? "forward" : "backward");
    return share_refusal(bridge, refused);
}

colo_status_t colo_ragged_refuse_shape(const colo_bridge_t *bridge)
{
    if (!bridge->ragged)
        return COLO_OK;
    return colo_fail(COLO_ERR_STATE, "bridge: created for ragged batches, whose shape is in "
                                     "their tables; call colo_bridge_set_segments()");
}

static colo_status_t set(colo_bridge_t *bridge, const colo_tables_t *tables, bool packed,
                         colo_batch_t **batch)
{
    const char *what = packed ? "packing" : "segments";
    colo_status_t st;
    /* without one there is no comm on which other ranks could be told */
    COLO_FAIL_IF(!bridge, COLO_ERR_ARG, "%s: bridge is NULL", what);
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
    return st < 0 ? share_refusal(bridge, st) : st;
}

colo_status_t colo_bridge_set_segments(colo_bridge_t *bridge, const colo_segments_t *segments,
                                       colo_batch_t **batch)
{
    COLO_RANGE();
    return set(bridge, &(colo_tables_t){.segments = segments}, false, batch);
}

colo_status_t colo_bridge_set_packing(colo_bridge_t *bridge, const colo_packing_t *src,
                                      const colo_packing_t *dst, colo_batch_t **batch)
{
    COLO_RANGE();
    return set(bridge, &(colo_tables_t){.src = src, .dst = dst}, true, batch);
}

const colo_plan_t *colo_batch_plan(const colo_batch_t *batch)
{
    return batch ? batch->ready.program.plan : NULL;
}

int64_t colo_batch_runs(const colo_batch_t *batch, colo_run_t *runs, int64_t cap)
{
    const int64_t n = batch ? batch->places.n : 0;
    for (int64_t i = 0; runs && i < n && i < cap; i++)
        runs[i] = batch->places.stored[i];
    return n;
}

void colo_batch_destroy(colo_batch_t **batch)
{
    if (!batch || !*batch)
        return;
    if ((*batch)->ready.program.plan)
        colo_pool_recycle(&(*batch)->ready.program.plan->pool, &(*batch)->bridge->ragged->spare);
    colo_run_unload((*batch)->bridge, &(*batch)->ready);
    free(*batch);
    *batch = NULL;
}
