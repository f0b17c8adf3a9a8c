/* SPDX-License-Identifier: Apache-2.0 */
/*
 * run.c - which executors a bridge has, and which of them carries a call. A new one is an entry
 * here, if COLO_EXECUTORS leaves room for it.
 */
#include "bridge/run/run.h"

#include "core/error.h"

#include <stdlib.h>

const colo_algorithm_t *colo_algorithm_of(colo_algo_t algo)
{
    static const colo_algorithm_t all[] = {
        [COLO_EXACT] = {.name = "EXACT",
                        .tables = true,
                        .compares = true,
                        .executor = {&colo_over_comm, &colo_over_peers}},
        [COLO_COLLECTIVE] = {.name = "COLLECTIVE",
                             .one_level = true,
                             .same_axes = true,
                             .executor = {&colo_over_groups}},
    };
    return (unsigned)algo < sizeof all / sizeof all[0] ? &all[algo] : NULL;
}

/* Executor @i of a bridge, which may have fewer, or none yet. */
static const colo_executor_t *executor_of(const colo_bridge_t *bridge, int i)
{
    static const colo_executor_t none = {.run = NULL};
    return bridge->algorithm && bridge->algorithm->executor[i] ? bridge->algorithm->executor[i]
                                                               : &none;
}

bool colo_run_likely(const colo_bridge_t *bridge)
{
    bool likely = false;
    for (int i = 0; i < COLO_EXECUTORS; i++)
        likely =
            likely || (executor_of(bridge, i)->likely && executor_of(bridge, i)->likely(bridge));
    return likely;
}

colo_status_t colo_run_load(colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    for (int i = 0; i < COLO_EXECUTORS; i++)
        if (executor_of(bridge, i)->load)
            COLO_TRY(executor_of(bridge, i)->load(bridge, loaded));
    return COLO_OK;
}

void colo_run_unload(const colo_bridge_t *bridge, colo_loaded_t *loaded)
{
    for (int i = COLO_EXECUTORS - 1; i >= 0; i--)
        if (executor_of(bridge, i)->unload)
            executor_of(bridge, i)->unload(bridge, loaded);
    colo_program_deinit(&loaded->program);
    *loaded = (colo_loaded_t){0};
}

colo_status_t colo_run_create(colo_bridge_t *bridge)
{
    bool whole = false;
    for (int i = COLO_EXECUTORS - 1; i >= 0 && !whole; i--)
        if (executor_of(bridge, i)->create)
            COLO_TRY(executor_of(bridge, i)->create(bridge, &whole));
    return COLO_OK;
}

void colo_run_destroy(colo_bridge_t *bridge)
{
    for (int i = COLO_EXECUTORS - 1; i >= 0; i--)
        if (executor_of(bridge, i)->destroy)
            executor_of(bridge, i)->destroy(bridge);
}

colo_status_t colo_run_reshape(colo_bridge_t *bridge, colo_loaded_t *next)
{
    for (int i = COLO_EXECUTORS - 1; i >= 0; i--)
        if (executor_of(bridge, i)->reshape)
            COLO_TRY(executor_of(bridge, i)->reshape(bridge, next));
    colo_run_unload(bridge, &bridge->now);
    bridge->now = *next;
    return COLO_OK;
}

static colo_status_t prepare(colo_call_t *call)
{
    return call->executor->prepare ? call->executor->prepare(call) : COLO_OK;
}

colo_status_t colo_run_find(colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    call->executor = executor_of(bridge, 0);
    for (int i = COLO_EXECUTORS - 1; i > 0 && call->executor == executor_of(bridge, 0); i--)
        if (executor_of(bridge, i)->find)
            COLO_TRY(executor_of(bridge, i)->find(call));
    return call->asks ? COLO_OK : prepare(call);
}

colo_status_t colo_run_call(colo_call_t *call)
{
    colo_status_t st = COLO_OK;
    if (call->asks) {
        COLO_TRY(call->asks->agree(call));
        st = prepare(call);
    }
    if (st < 0)
        return colo_comm_i_fail(call->bridge->comm, st);
    call->bridge->id.calls++;
    return call->executor->run(call);
}
