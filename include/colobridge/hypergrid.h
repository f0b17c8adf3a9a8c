/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hypergrid.h - one grid with its views and the communicators made from it (HyperCommGrid).
 *
 * A view is another factorisation of the same ranks (for example an MoE layer's ep). A dim shared
 * by view and base must enumerate the same ordered groups in both; a request over shared dims only
 * is the base group, created and destroyed once. Getting never creates: asking for a group that
 * was not created is an error, and so is creating one twice.
 */
#ifndef COLOBRIDGE_HYPERGRID_H
#define COLOBRIDGE_HYPERGRID_H

#include <colobridge/comm.h>
#include <colobridge/grid.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_hypergrid colo_hypergrid_t;

/**
 * colo_hypergrid_create() - a hypergrid with the view "base" and no communicators; local
 * @hyper:  out, owned by the caller; one thread at a time uses it
 * @base:   copied
 * Errors:  COLO_ERR_ARG, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_hypergrid_create(colo_hypergrid_t **hyper, const colo_grid_t *base);
/** colo_hypergrid_destroy() - destroys every communicator it created, once; NULL is fine */
COLO_API void colo_hypergrid_destroy(colo_hypergrid_t **hyper);

/**
 * colo_hypergrid_register_view() - name another factorisation of the same ranks
 * @view:    same offset and size as the base grid
 * @shared:  dims of both joined by "-", NULL or "" for none
 * Errors:   COLO_ERR_EXISTS "is already registered"; COLO_ERR_ARG: size differs, duplicate or
 *           unknown shared dim, shared dim of different membership (each alone and all jointly)
 */
COLO_API colo_status_t colo_hypergrid_register_view(colo_hypergrid_t *hyper, const char *name,
                                                    const colo_grid_t *view, const char *shared);
/** colo_hypergrid_view() - a registered view ("base" is there from the start). COLO_ERR_MISSING */
COLO_API colo_status_t colo_hypergrid_view(const colo_hypergrid_t *hyper, const char *name,
                                           const colo_grid_t **view);
/**
 * colo_hypergrid_key() - under which key a request is stored: the base key when all dims are
 * shared, else "view:key". @key holds COLO_KEY_MAX + COLO_DIM_NAME_MAX bytes.
 */
COLO_API colo_status_t colo_hypergrid_key(const colo_hypergrid_t *hyper, const char *view,
                                          const char *dims, char *key);
/**
 * colo_hypergrid_create_comm() - split @world by @dims of a view; collective over @world
 * @view:   NULL is "base"
 * @comm:   out, may be NULL; owned by the hypergrid. A rank outside the grid stores NULL
 * Errors:  COLO_ERR_EXISTS "has already been created", those of colo_comm_split()
 */
COLO_API colo_status_t colo_hypergrid_create_comm(colo_hypergrid_t *hyper, const char *view,
                                                  const char *dims, colo_comm_t *world,
                                                  colo_comm_t **comm);
/** colo_hypergrid_comm() - a communicator created before; owned by the hypergrid.
 *  COLO_ERR_MISSING "hasn't been created" */
COLO_API colo_status_t colo_hypergrid_comm(const colo_hypergrid_t *hyper, const char *view,
                                           const char *dims, colo_comm_t **comm);

#ifdef __cplusplus
}
#endif
#endif
