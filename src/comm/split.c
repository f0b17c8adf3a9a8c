/* SPDX-License-Identifier: Apache-2.0 */
/*
 * split.c - smaller comms out of larger ones.
 *
 * A part needs no communication, and no other rank: its members make it when they need it, and the
 * comm keeps it, so that calls of all that they share it for have one order.
 *
 * Splitting by grid dims needs no communication: every rank computes its group from the grid.
 * Splitting by colour gathers (color, key) once. Each rank makes its child by itself (subset), and
 * what talks then is the agreement that all have one, of the same grid and dims (COLO_CHECK >= 1).
 * Between GPUs the members of a child connect after that, and all ranks agree once more.
 */
#include "comm/comm.h"
#include "core/hash.h"
#include "core/error.h"
#include "core/range.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- making the child ---- */

colo_status_t colo_comm_child(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                              const char *name, colo_comm_t **comm)
{
    int32_t rank = 0;
    COLO_AUTOFREE int64_t *world = malloc(sizeof *world * (size_t)n);
    COLO_FAIL_IF(!world, COLO_ERR_NOMEM, "split: %d members", (int)n);
    for (int32_t i = 0; i < n; i++) {
        world[i] = parent->world_rank[members[i]];
        if (members[i] == parent->rank)
            rank = i;
    }
    colo_comm_t *child = NULL;
    COLO_TRY(colo_comm_new(&child, parent->backend, rank, n, world));
    child->timeout_ms = colo_comm_timeout(parent);
    child->check = parent->check;
    child->share_process = parent->share_process;
    colo_comm_relate(child, parent, tag);
    colo_comm_set_name(child, name);
    colo_status_t st = COLO_OK;
    if (parent->node) {
        COLO_AUTOFREE uint64_t *id = malloc(sizeof *id * (size_t)n);
        for (int32_t i = 0; id && i < n; i++)
            id[i] = (uint64_t)parent->node[members[i]];
        st = id ? colo_comm_set_nodes(child, id)
                : colo_fail(COLO_ERR_NOMEM, "split: %d members", (int)n);
    }
    COLO_THEN(st, parent->backend->subset(parent, members, n, tag, child));
    if (st < 0) {
        colo_comm_destroy(&child);
        return st;
    }
    *comm = child;
    return COLO_OK;
}

static bool agrees(const colo_comm_t *parent)
{
    return parent->check >= 1 ||
           parent->backend->connect; /* nothing else ends a wait in connect() */
}

static colo_status_t agree(colo_comm_t *parent, const char *what, colo_fields_t *fields,
                           colo_status_t st)
{
    if (agrees(parent))
        return colo_comm_agree_fields(parent, what, fields, st);
    return st < 0 ? colo_comm_fail(parent, st) : COLO_OK;
}

/* @st: how this rank fared. @child, if any, is freed if another rank has none: its members would
 * wait for that rank until their deadline. So they connect only when all have theirs. */
static colo_status_t agree_on_child(colo_comm_t *parent, const char *what, colo_fields_t *fields,
                                    colo_status_t st, colo_comm_t **child)
{
    st = agree(parent, what, fields, st);
    if (st == COLO_OK && parent->backend->connect) {
        st = *child ? parent->backend->connect(*child) : COLO_OK;
        st = agree(parent, what, fields, st);
    }
    if (st < 0)
        colo_comm_destroy(child);
    return st;
}

/* ---- parts ---- */

static const uint64_t PART = UINT64_MAX; /* splits count from 1 */

static bool is_part(const colo_comm_t *part, const colo_comm_t *comm, const int32_t *members,
                    int32_t n)
{
    for (int32_t i = 0; part->size == n && i < n; i++)
        if (part->world_rank[i] != comm->world_rank[members[i]])
            return false;
    return part->size == n;
}

/* @members: [comm->size], out: those ranks of @comm, ascending. */
static colo_status_t find_part(const colo_comm_t *comm, const int64_t *world_ranks, int32_t n,
                               int32_t *members)
{
    COLO_AUTOFREE bool *in = calloc((size_t)comm->size, sizeof *in);
    COLO_FAIL_IF(!in, COLO_ERR_NOMEM, "part: %d members", (int)n);
    for (int32_t i = 0; i < n; i++) {
        const int32_t rank = colo_comm_find(comm, world_ranks[i]);
        COLO_FAIL_IF(rank < 0, COLO_ERR_MISSING,
                     "part: world rank %lld is not in comm '%s' of %d ranks",
                     (long long)world_ranks[i], comm->name, (int)comm->size);
        COLO_FAIL_IF(in[rank], COLO_ERR_ARG, "part: world_ranks has %lld twice, expected it once",
                     (long long)world_ranks[i]);
        in[rank] = true;
    }
    COLO_FAIL_IF(!in[comm->rank], COLO_ERR_ARG,
                 "part: world_ranks lacks this rank %lld, expected it among the %d",
                 (long long)comm->world_rank[comm->rank], (int)n);
    for (int32_t rank = 0; rank < comm->size; rank++)
        if (in[rank])
            *members++ = rank;
    return COLO_OK;
}

colo_status_t colo_comm_part(colo_comm_t *comm, const int64_t *world_ranks, int32_t n,
                             colo_comm_t **part)
{
    COLO_RANGE();
    COLO_TRY(colo_comm_alive(comm, "part"));
    COLO_FAIL_IF(!world_ranks || !part, COLO_ERR_ARG, "part: %s is NULL",
                 world_ranks ? "part" : "world_ranks");
    COLO_FAIL_IF(n < 1 || n > comm->size, COLO_ERR_ARG, "part: %d ranks, expected 1..%d", (int)n,
                 (int)comm->size);
    COLO_AUTOFREE int32_t *members = malloc(sizeof *members * (size_t)comm->size);
    COLO_FAIL_IF(!members, COLO_ERR_NOMEM, "part: %d members", (int)n);
    COLO_TRY(find_part(comm, world_ranks, n, members));
    colo_comm_t *made = n == comm->size ? comm : comm->part;
    while (made && made != comm && !is_part(made, comm, members, n))
        made = made->next_part;
    if (!made) {
        COLO_TRY(colo_comm_child(comm, members, n, PART, comm->name, &made));
        made->next_part = comm->part;
        COLO_HOLD(comm->lock); /* another thread may be reading its statistics */
        comm->part = made;
    }
    *part = made;
    return COLO_OK;
}

/* ---- by grid ---- */

/* Parent ranks of this rank's group, the caller's to free, also on error; *n = 0 when the grid does
 * not have this rank. */
static colo_status_t find_members(const colo_comm_t *parent, const colo_grid_t *grid,
                                  const char *dims, int32_t **members, int32_t *n)
{
    const int64_t me = parent->world_rank[parent->rank];
    colo_group_t group;
    *n = 0;
    if (!colo_grid_has_rank(grid, me)) /* the dims must still make sense */
        return colo_grid_group(grid, dims, grid->offset, &group);
    COLO_TRY(colo_grid_group(grid, dims, me, &group));
    COLO_FAIL_IF(group.size > parent->size, COLO_ERR_MISSING,
                 "split '%s': the group of world rank %lld has %lld members, comm '%s' has "
                 "%d ranks",
                 dims, (long long)me, (long long)group.size, parent->name, (int)parent->size);
    int32_t *list = *members = malloc(sizeof *list * (size_t)group.size);
    COLO_FAIL_IF(!list, COLO_ERR_NOMEM, "split '%s': %lld members", dims, (long long)group.size);
    for (int64_t i = 0; i < group.size; i++) {
        int64_t world = colo_group_member(&group, i);
        list[i] = colo_comm_find(parent, world);
        COLO_FAIL_IF(list[i] < 0, COLO_ERR_MISSING,
                     "split '%s': world rank %lld of the group of world rank %lld is not in "
                     "comm '%s' of %d ranks",
                     dims, (long long)world, (long long)me, parent->name, (int)parent->size);
    }
    *n = (int32_t)group.size;
    return COLO_OK;
}

colo_status_t colo_comm_split(colo_comm_t *parent, const colo_grid_t *grid, const char *dims,
                              colo_comm_t **comm)
{
    COLO_RANGE();
    COLO_TRY(colo_comm_alive(parent, "split"));
    COLO_AUTOFREE int32_t *members = NULL;
    int32_t n = 0;
    colo_fields_t fields = {COLO_FIELDS_INIT};
    colo_status_t st = COLO_OK;
    if (!grid || !dims || !comm)
        st = colo_fail(COLO_ERR_ARG, "split: %s is NULL", !grid ? "grid" : !dims ? "dims" : "comm");
    else
        st = find_members(parent, grid, dims, &members, &n);
    if (st == COLO_OK) {
        char key[COLO_KEY_MAX]; /* the order in which dims are named does not matter */
        st = colo_grid_key(grid, dims, key);
        if (st == COLO_OK) {
            colo_fields_add(&fields, "dims", "%s", key);
            colo_grid_print(grid, key, sizeof key);
            colo_fields_add(&fields, "grid", "%s", key);
            fields.hash = colo_hash_i64(fields.hash, (int64_t)colo_grid_hash(grid));
        }
    }
    const uint64_t tag = ++parent->split_tag;
    colo_comm_t *child = NULL;
    if (st == COLO_OK && n > 0)
        st = colo_comm_child(parent, members, n, tag, dims, &child);
    COLO_TRY(agree_on_child(parent, "split", &fields, st, &child));
    const colo_op_desc_t op = {.kind = COLO_OP_SPLIT, .category = COLO_CATEGORY_USER};
    colo_comm_end(parent, colo_comm_begin(parent, op, 0, 0, n > 0 ? n - 1 : 0), COLO_OK);
    *comm = child;
    return COLO_OK;
}

/* ---- by colour ---- */

struct place {
    int64_t key;
    int32_t rank;
};

static int by_key(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->rank < y->rank ? -1 : 1;
}

colo_status_t colo_comm_split_color_for(colo_comm_t *parent, colo_category_t category,
                                        int64_t color, int64_t key, colo_comm_t **comm)
{
    COLO_TRY(colo_comm_alive(parent, "split_color"));
    colo_status_t st = comm ? COLO_OK : colo_fail(COLO_ERR_ARG, "split_color: comm is NULL");
    if (st < 0 && !agrees(parent))
        return colo_comm_fail(parent, st);
    const size_t ranks = (size_t)parent->size;
    COLO_AUTOFREE uint64_t *all = malloc(2 * sizeof *all * ranks);
    COLO_AUTOFREE struct place *place = malloc(sizeof *place * ranks);
    COLO_AUTOFREE int32_t *members = malloc(sizeof *members * ranks);
    if (!all || !place || !members)
        return colo_comm_fail(parent, colo_fail(COLO_ERR_NOMEM, "split_color: %zu ranks", ranks));
    uint64_t pair[2] = {(uint64_t)color, (uint64_t)key};
    COLO_TRY(colo_comm_gather(parent, COLO_OP_SPLIT, category, pair, all, 2));
    uint64_t tag = ++parent->split_tag;
    int32_t n = 0;
    for (int32_t r = 0; r < parent->size && color >= 0; r++)
        if ((int64_t)all[2 * r] == color)
            place[n++] = (struct place){(int64_t)all[2 * r + 1], r};
    qsort(place, (size_t)n, sizeof *place, by_key);
    for (int32_t i = 0; i < n; i++)
        members[i] = place[i].rank;
    char name[32];
    snprintf(name, sizeof name, "color %lld", (long long)color);
    colo_fields_t fields = {COLO_FIELDS_INIT};
    colo_comm_t *child = NULL;
    if (st == COLO_OK && n > 0)
        st = colo_comm_child(parent, members, n, tag, name, &child);
    COLO_TRY(agree_on_child(parent, "split_color", &fields, st, &child));
    *comm = child;
    return COLO_OK;
}

colo_status_t colo_comm_split_color(colo_comm_t *parent, int64_t color, int64_t key,
                                    colo_comm_t **comm)
{
    COLO_RANGE();
    return colo_comm_split_color_for(parent, COLO_CATEGORY_USER, color, key, comm);
}
