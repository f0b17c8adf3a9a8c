/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hypergrid.c - a grid, its views, and the communicators asked for by name.
 *
 * Decides under which key a request is stored: requests that mean the same ranks in the same order
 * must meet one communicator, and a shared dim guarantees just that. A request over shared dims
 * only is therefore filed under the base key; everything else of a view is private to it.
 *
 * Membership is compared in closed form. A dim's groups are an (extent, stride) pair: two pairs
 * give the same members when they are equal, or when both extents are 1. The groups' order needs no
 * second look: both grids cover the same ranks, groups ascend by base, and there is one way only to
 * tile a range with a given set. Nor do the dims of several shared names: strides order them, so
 * dims that agree one by one agree jointly. (The tests compare with full enumeration.)
 *
 * Making and waiting is left to colo_comm_split(). Wrong arguments are refused before it, locally:
 * all ranks run the same calls, so all of them are refused.
 */
#include <colobridge/hypergrid.h>

#include "comm/comm.h"
#include "core/error.h"
#include "grid/dims.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_MAX (COLO_KEY_MAX + COLO_DIM_NAME_MAX) /* "view:" + key */

typedef struct view {
    struct view *next;
    char name[COLO_DIM_NAME_MAX];
    colo_grid_t grid;
    bool shared[COLO_DIMS_MAX]; /* by index in @grid */
} view_t;

typedef struct entry {
    struct entry *next; /* newest first: destroyed in reverse */
    char key[KEY_MAX];
    colo_comm_t *comm; /* NULL on a rank outside the grid */
} entry_t;

struct colo_hypergrid {
    view_t base; /* the head of the list of views */
    entry_t *entries;
};

/* A request, resolved. */
typedef struct request {
    const view_t *view; /* the base view when all dims are shared */
    char dims[COLO_KEY_MAX];
    char key[KEY_MAX];
    char label[KEY_MAX + 32]; /* "'dp-tp'" or "'dp-ep' for view 'moe'" */
} request_t;

colo_status_t colo_hypergrid_create(colo_hypergrid_t **hyper, const colo_grid_t *base)
{
    COLO_FAIL_IF(!hyper, COLO_ERR_ARG, "hypergrid: the output is NULL");
    COLO_TRY(colo_grid_check(base));
    colo_hypergrid_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "hypergrid: %zu bytes", sizeof *made);
    memcpy(made->base.name, "base", sizeof "base");
    made->base.grid = *base;
    *hyper = made;
    return COLO_OK;
}

void colo_hypergrid_destroy(colo_hypergrid_t **hyper)
{
    if (!hyper || !*hyper)
        return;
    colo_hypergrid_t *object = *hyper;
    for (entry_t *entry = object->entries, *next; entry; entry = next) {
        next = entry->next;
        colo_comm_destroy(&entry->comm);
        free(entry);
    }
    for (view_t *view = object->base.next, *next; view; view = next) {
        next = view->next;
        free(view);
    }
    free(object);
    *hyper = NULL;
}

/* ---- views ---- */

static const view_t *find_view(const colo_hypergrid_t *hyper, const char *name)
{
    for (const view_t *view = &hyper->base; view; view = view->next)
        if (strcmp(view->name, name) == 0)
            return view;
    return NULL;
}

/* NULL is "base" */
static colo_status_t get_view(const colo_hypergrid_t *hyper, const char *name, const view_t **view)
{
    COLO_FAIL_IF(!hyper, COLO_ERR_ARG, "hypergrid: the object is NULL");
    *view = name ? find_view(hyper, name) : &hyper->base;
    COLO_FAIL_IF(!*view, COLO_ERR_MISSING, "View '%s' is not registered", COLO_QUOTED_STR(name));
    return COLO_OK;
}

/* One name of @shared, [text, text + len): in both grids, once, with the same members. */
static colo_status_t share(const colo_grid_t *base, view_t *view, const char *text, size_t len)
{
    COLO_FAIL_IF(len == 0, COLO_ERR_ARG, "View '%s' has an empty name among its shared_dims",
                 view->name);
    const int32_t b = colo_grid_find(base, text, len), i = colo_grid_find(&view->grid, text, len);
    COLO_FAIL_IF(b < 0, COLO_ERR_ARG, "Shared dim '%s' of view '%s' is not in the base view",
                 COLO_QUOTED(text, len), view->name);
    const char *name = base->name[b];
    COLO_FAIL_IF(i < 0, COLO_ERR_ARG, "Shared dim '%s' of view '%s' is not in the view's dim_names",
                 name, view->name);
    COLO_FAIL_IF(view->shared[i], COLO_ERR_ARG, "View '%s' has duplicate shared_dims: '%s'",
                 view->name, name);
    COLO_FAIL_IF(base->extent[b] != view->grid.extent[i] ||
                     (base->extent[b] > 1 && base->stride[b] != view->grid.stride[i]),
                 COLO_ERR_ARG,
                 "Shared dim '%s' has different membership in view '%s': %lld ranks %lld "
                 "apart, in the base view %lld ranks %lld apart",
                 name, view->name, (long long)view->grid.extent[i], (long long)view->grid.stride[i],
                 (long long)base->extent[b], (long long)base->stride[b]);
    view->shared[i] = true;
    return COLO_OK;
}

static colo_status_t check_view(const colo_grid_t *base, view_t *view, const char *shared)
{
    COLO_FAIL_IF(view->grid.size != base->size, COLO_ERR_ARG,
                 "View '%s' has size %lld, but the grid size is %lld", view->name,
                 (long long)view->grid.size, (long long)base->size);
    COLO_FAIL_IF(view->grid.offset != base->offset, COLO_ERR_ARG,
                 "View '%s' has rank offset %lld, but the grid's rank offset is %lld", view->name,
                 (long long)view->grid.offset, (long long)base->offset);
    for (const char *part = shared; part && *shared; part++) {
        size_t len = strcspn(part, "-");
        COLO_TRY(share(base, view, part, len));
        part += len;
        if (!*part)
            break;
    }
    return COLO_OK;
}

colo_status_t colo_hypergrid_register_view(colo_hypergrid_t *hyper, const char *name,
                                           const colo_grid_t *view, const char *shared)
{
    COLO_FAIL_IF(!hyper || !name, COLO_ERR_ARG, "view: the %s is NULL",
                 hyper ? "name" : "hypergrid");
    size_t len = strlen(name);
    COLO_TRY(colo_grid_name_rule("view", name, len));
    COLO_TRY(colo_grid_check(view));
    COLO_FAIL_IF(find_view(hyper, name), COLO_ERR_EXISTS, "View '%s' is already registered", name);
    view_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "view: %zu bytes", sizeof *made);
    memcpy(made->name, name, len);
    made->grid = *view;
    colo_status_t st = check_view(&hyper->base.grid, made, shared);
    if (st < 0) {
        free(made);
        return st;
    }
    made->next = hyper->base.next;
    hyper->base.next = made;
    return COLO_OK;
}

colo_status_t colo_hypergrid_view(const colo_hypergrid_t *hyper, const char *name,
                                  const colo_grid_t **view)
{
    const view_t *found;
    COLO_TRY(get_view(hyper, name, &found));
    COLO_FAIL_IF(!view, COLO_ERR_ARG, "view: the output is NULL");
    *view = &found->grid;
    return COLO_OK;
}

/* ---- requests ---- */

static colo_status_t resolve(const colo_hypergrid_t *hyper, const char *view, const char *list,
                             request_t *request)
{
    char where[32];
    colo_dims_t dims;
    const view_t *found;
    COLO_TRY(get_view(hyper, view, &found));
    snprintf(where, sizeof where, "view '%s'", found->name);
    COLO_TRY(colo_grid_read_dims(&found->grid, where, list, &dims));
    bool all_shared = found != &hyper->base;
    for (int32_t k = 0; k < dims.n; k++)
        all_shared = all_shared && found->shared[dims.given[k]];
    if (all_shared) { /* the same request in the words of the base */
        found = &hyper->base;
        COLO_TRY(colo_grid_read_dims(&found->grid, "view 'base'", list, &dims));
    }
    request->view = found;
    colo_grid_write_key(&found->grid, &dims, request->dims);
    const bool base = found == &hyper->base;
    const char *name = base ? "" : found->name;
    snprintf(request->key, sizeof request->key, "%s%s%s", name, base ? "" : ":", request->dims);
    snprintf(request->label, sizeof request->label, "'%s'%s%s%s", request->dims,
             base ? "" : " for view '", name, base ? "" : "'");
    return COLO_OK;
}

static entry_t *find_entry(const colo_hypergrid_t *hyper, const char *key)
{
    for (entry_t *entry = hyper->entries; entry; entry = entry->next)
        if (strcmp(entry->key, key) == 0)
            return entry;
    return NULL;
}

colo_status_t colo_hypergrid_key(const colo_hypergrid_t *hyper, const char *view, const char *dims,
                                 char *key)
{
    request_t request;
    COLO_TRY(resolve(hyper, view, dims, &request));
    COLO_FAIL_IF(!key, COLO_ERR_ARG, "key: the output is NULL");
    memcpy(key, request.key, strlen(request.key) + 1);
    return COLO_OK;
}

colo_status_t colo_hypergrid_create_comm(colo_hypergrid_t *hyper, const char *view,
                                         const char *dims, colo_comm_t *world, colo_comm_t **comm)
{
    request_t request;
    COLO_TRY(resolve(hyper, view, dims, &request));
    COLO_FAIL_IF(!world, COLO_ERR_ARG, "Process group %s: the world to split is NULL",
                 request.label);
    COLO_FAIL_IF(find_entry(hyper, request.key), COLO_ERR_EXISTS,
                 "Process group %s has already been created", request.label);
    entry_t *entry = calloc(1, sizeof *entry);
    if (!entry) /* the one refusal that peers do not share: they must not wait for us in the split
                 */
        return colo_comm_fail(world, colo_fail(COLO_ERR_NOMEM, "Process group %s: %zu bytes",
                                               request.label, sizeof *entry));
    memcpy(entry->key, request.key, sizeof entry->key);
    colo_status_t st = colo_comm_split(world, &request.view->grid, request.dims, &entry->comm);
    if (st < 0) {
        free(entry);
        return st;
    }
    entry->next = hyper->entries;
    hyper->entries = entry;
    if (comm)
        *comm = entry->comm;
    return COLO_OK;
}

colo_status_t colo_hypergrid_comm(const colo_hypergrid_t *hyper, const char *view, const char *dims,
                                  colo_comm_t **comm)
{
    request_t request;
    COLO_TRY(resolve(hyper, view, dims, &request));
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "Process group for %s: the output is NULL", request.label);
    const entry_t *entry = find_entry(hyper, request.key);
    COLO_FAIL_IF(!entry, COLO_ERR_MISSING, "Process group for %s hasn't been created",
                 request.label);
    *comm = entry->comm;
    return COLO_OK;
}
