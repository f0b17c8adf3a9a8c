/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packing.c - what a rank holds by a packing: rows, their positions, pieces. Public queries; plans
 * do not need them.
 */
#include "bridge/layout/halo.h"

#include "core/error.h"
#include "core/sized.h"

/* What a query looks at: the pieces of @packing, and the block of a rank; -1: it has none. */
typedef struct query {
    colo_packed_t rooms;
    colo_halo_t halo;
    int64_t block;
} query_t;

static void end_query(query_t *query)
{
    colo_packed_deinit(&query->rooms);
    colo_halo_deinit(&query->halo);
}

static colo_status_t begin_query(query_t *query, const colo_packing_t *given,
                                 const colo_layout_t *layout, int64_t rank)
{
    int64_t coords[COLO_DIMS_MAX];
    colo_packing_t own = {COLO_PACKING_INIT};
    COLO_FAIL_IF(!layout, COLO_ERR_ARG, "packing: layout is NULL");
    COLO_TRY(COLO_SIZED_READ(&own, given, seq_dp, "packing", "COLO_PACKING_INIT"));
    COLO_TRY(colo_layout_check_fields(layout));
    query->rooms.what = "packing";
    COLO_TRY(colo_ragged_axes(&query->rooms.axes, layout, false, query->rooms.what, "given"));
    COLO_TRY(colo_halo_load(&query->halo, &query->rooms, &own));
    query->block = colo_layout_coords(layout, rank, coords)
                       ? colo_packed_block(&query->rooms, layout, coords)
                       : -1;
    return COLO_OK;
}

colo_status_t colo_packing_rows(const colo_packing_t *packing, const colo_layout_t *layout,
                                int64_t rank, int64_t *out)
{
    COLO_ENDS(end_query) query_t query = {0};
    COLO_FAIL_IF(!out, COLO_ERR_ARG, "packing: rows is NULL");
    COLO_TRY(begin_query(&query, packing, layout, rank));
    *out = query.block < 0 ? 0 : query.halo.held[query.block];
    return COLO_OK;
}

colo_status_t colo_packing_most_rows(const colo_packing_t *packing, const colo_layout_t *layout,
                                     int64_t *out)
{
    COLO_ENDS(end_query) query_t query = {0};
    COLO_FAIL_IF(!out, COLO_ERR_ARG, "packing: rows is NULL");
    COLO_TRY(begin_query(&query, packing, layout, -1));
    const colo_packed_t *rooms = &query.rooms;
    *out = 0;
    for (int64_t k = 0; k < rooms->axes.replicas * rooms->cp * rooms->sp; k++)
        *out = query.halo.held[k] > *out ? query.halo.held[k] : *out;
    return COLO_OK;
}

colo_status_t colo_packing_index(const colo_packing_t *packing, const colo_layout_t *layout,
                                 int64_t rank, int64_t *index)
{
    COLO_ENDS(end_query) query_t query = {0};
    COLO_TRY(begin_query(&query, packing, layout, rank));
    if (query.block < 0)
        return COLO_OK;
    const colo_halo_t *halo = &query.halo;
    const int64_t rows = halo->held[query.block];
    COLO_FAIL_IF(rows && !index, COLO_ERR_ARG, "packing: index is NULL");
    for (int64_t i = 0; i < colo_halo_count(halo, query.block); i++) {
        const colo_halo_piece_t *piece = colo_halo_piece(halo, query.block, i);
        for (int64_t k = 0; k < piece->rows; k++) {
            index[piece->local + k] = piece->pos - halo->before + k;
            index[rows + piece->local + k] = piece->seq;
        }
    }
    return COLO_OK;
}

colo_status_t colo_packing_pieces(const colo_packing_t *packing, const colo_layout_t *layout,
                                  int64_t rank, int64_t *begin, int64_t *n)
{
    COLO_ENDS(end_query) query_t query = {0};
    COLO_FAIL_IF(!n, COLO_ERR_ARG, "packing: n is NULL");
    COLO_TRY(begin_query(&query, packing, layout, rank));
    *n = query.block < 0 ? 0 : colo_halo_count(&query.halo, query.block);
    for (int64_t i = 0; begin && i < *n; i++)
        begin[i] = colo_halo_piece(&query.halo, query.block, i)->local;
    if (begin)
        begin[*n] = *n ? query.halo.held[query.block] : 0;
    return COLO_OK;
}
