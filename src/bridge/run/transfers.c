/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transfers.c - the steps of a program as transfers between GPUs that reach each other.
 *
 * Movement is pushed: the sender knows where a box begins in the receiver's part, and is told the
 * rest, pointer and strides, at each call. The forward of a batch may be pulled, too: links write
 * faster than they read, but only x may be registered. A move to partial sums and the addition
 * behind it become one list: a receiver reads every addend's value where it lies and adds up in
 * addend order, so there is no partial sum and no second pass. The regions of one addend need not
 * be those of another; boxes are cut until each addend comes from one rank, and has the whole box
 * or nothing of it. If there are exchanges behind that move, or ranks out of reach, addends are
 * pulled into partial sums instead.
 *
 * Left to others: moving and waiting (comm/direct), registration (comm/memory.c), which calls go
 * this way (direct.c).
 */
#include "bridge/run/run.h"

#include "core/error.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[2] = {"bridge forward", "bridge backward"};

/* One pass while its list is made. */
typedef struct maker {
    colo_bridge_t *bridge;
    const colo_ready_plan_t *ready;
    const colo_plan_t *plan;
    colo_pass_t pass;
    const colo_move_t *move;
    bool pulls, sums;
    colo_list_t *transfer, *addend, *exposed; /* of the bridge's lists */
} maker_t;

/* ---- where a region begins in a rank's part ---- */

static void begins(const colo_owned_t *own, const colo_region_t *region, int64_t row,
                   int64_t begin[3])
{
    begin[0] = region->b[0] - own->b0;
    begin[1] = row;
    begin[2] = region->h[0] - own->h0;
}

static void extents(const colo_region_t *region, int64_t extent[3])
{
    extent[0] = region->b[1] - region->b[0];
    extent[1] = region->s[1] - region->s[0];
    extent[2] = region->h[1] - region->h[0];
}

/* Is a buffer's part that of the source? */
static bool is_src(const maker_t *maker, int buffer)
{
    return (buffer == COLO_IN) == (maker->pass == COLO_PASS_FORWARD);
}

/* What a world rank owns. Of a batch: its first feature, because the plan has the rows. */
static colo_status_t owned_by(const maker_t *maker, bool src, int64_t rank, colo_owned_t *own)
{
    const colo_plan_t *plan = maker->plan;
    const colo_layout_t *layout = src ? &plan->src : &plan->dst;
    int64_t coords[COLO_DIMS_MAX];
    colo_span_t spans[2 * COLO_MAX_SPANS] = {{0}};
    if (!maker->ready->program.bytes)
        return colo_layout_owned(layout, rank, &plan->config.shape,
                                 !src && plan->config.output == COLO_OUTPUT_FULL_SEQ, own, NULL, 0,
                                 NULL);
    (void)colo_grid_coords(&layout->grid, rank, coords);
    (void)colo_axis_spans(layout, COLO_AXIS_FEATURES, coords, plan->config.shape.features, spans);
    *own = (colo_owned_t){.h0 = spans[0].lo};
    return COLO_OK;
}

static const colo_owned_t *part_of(const maker_t *maker, bool src)
{
    return src ? &maker->plan->own_src : &maker->plan->own_dst;
}

static int64_t row_of(const colo_offset_t *where, bool src)
{
    return src ? where->src_row : where->dst_row;
}

/* ---- movement ---- */

/* Partial sums are like more samples of one tensor. */
static void begins_in_partial(const maker_t *maker, const colo_region_t *region,
                              const colo_offset_t *where, int64_t begin[3])
{
    const colo_program_t *program = &maker->ready->program;
    const colo_plan_t *plan = maker->plan;
    const int64_t key = colo_move_sum(plan, maker->move->exchange, false, region);
    const bool src = key < colo_sum_key(plan, COLO_SUM_COLLECTED, 0);
    int64_t extent[3], samples = 1; /* of a batch, a partial sum's size is the call's */
    colo_partial_extent(plan, extent);
    begins(part_of(maker, src), region, row_of(where, src), begin);
    if (!program->bytes && extent[1] * extent[2] > 0)
        samples =
            (int64_t)(colo_partial_bytes(plan, 1, plan->config.dtype) /
                      ((size_t)(extent[1] * extent[2]) * colo_dtype_size(plan->config.dtype)));
    begin[0] += program->partial_of[key] * samples;
}

/* Between this rank and peers in reach; and what stays, if it goes to the output. */
static colo_status_t list_moves(const maker_t *maker)
{
    const colo_move_t *move = maker->move;
    const bool from_src = is_src(maker, move->from),
               to_src = is_src(maker, move->to == COLO_PARTIALS ? COLO_OUT : move->to);
    const colo_routes_t *routes =
        colo_plan_routes(maker->plan, maker->pass, move->exchange, !maker->pulls);
    for (int32_t i = 0; i < routes->nmessages; i++) {
        const colo_plan_message_t *message = &routes->message[i];
        colo_owned_t theirs = *part_of(maker, maker->pulls ? from_src : to_src);
        const colo_owned_t *from = maker->pulls ? &theirs : part_of(maker, from_src),
                           *to = maker->pulls ? part_of(maker, to_src) : &theirs;
        colo_transfer_t transfer = {.peer = colo_comm_find(maker->bridge->comm, message->peer)};
        if (!colo_direct_near(maker->bridge, (int32_t)transfer.peer))
            continue;
        if (move->exchange ==
            COLO_EXCHANGE_MAIN) /* relays: replicas have the same in the same place */
            COLO_TRY(owned_by(maker, maker->pulls ? from_src : to_src, message->peer, &theirs));
        for (int64_t k = 0; k < message->nregions; k++) {
            const colo_region_t *region = &message->regions[k];
            const colo_offset_t *where = &routes->offset[region - routes->region];
            extents(region, transfer.extent);
            begins(from, region, row_of(where, from_src), transfer.here);
            if (move->to == COLO_PARTIALS)
                begins_in_partial(maker, region, where, transfer.there);
            else
                begins(to, region, row_of(where, to_src), transfer.there);
            COLO_PUSH(maker->transfer, "bridge: %lld boxes", transfer);
        }
    }
    for (int64_t i = 0; move->local && move->to == COLO_OUT && i < move->local->nregions; i++) {
        const colo_region_t *region = &move->local->region[i];
        colo_transfer_t transfer = {.peer = -1};
        extents(region, transfer.extent);
        begins(part_of(maker, from_src), region, row_of(&move->local->offset[i], from_src),
               transfer.here);
        begins(part_of(maker, to_src), region, row_of(&move->local->offset[i], to_src),
               transfer.there);
        COLO_PUSH(maker->transfer, "bridge: %lld boxes", transfer);
    }
    return COLO_OK;
}

/* ---- sums ---- */

/* A region of some addend, whose rows are [row, end) of this rank's source part, and where that
 * rank has it. */
typedef struct held {
    int64_t row, end; /* row first: they are sorted by it */
    const colo_region_t *region;
    int32_t peer, addend;
    int64_t begin[3];
} held_t;

static held_t held_of(const colo_owned_t *own, const colo_routes_t *routes, int64_t i, int32_t peer)
{
    const colo_region_t *region = &routes->region[i];
    const int64_t row = routes->offset[i].src_row;
    held_t held = {.row = row,
                   .region = region,
                   .end = row + region->s[1] - region->s[0],
                   .peer = peer,
                   .addend = region->addend};
    begins(own, region, routes->offset[i].dst_row, held.begin);
    return held;
}

static colo_status_t all_held(const maker_t *maker, held_t *held)
{
    const colo_plan_t *plan = maker->plan;
    const colo_routes_t *recv = &plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_MAIN].recv,
                        *local = &plan->local[COLO_PASS_BACKWARD];
    for (int64_t i = 0; i < local->nregions; i++)
        *held++ = held_of(&plan->own_dst, local, i, -1);
    for (int32_t i = 0; i < recv->nmessages; i++) {
        const colo_plan_message_t *message = &recv->message[i];
        const int32_t peer = colo_comm_find(maker->bridge->comm, message->peer);
        colo_owned_t theirs;
        COLO_TRY(owned_by(maker, false, message->peer, &theirs));
        for (int64_t k = 0; k < message->nregions; k++)
            *held++ = held_of(&theirs, recv, message->regions + k - recv->region, peer);
    }
    return COLO_OK;
}

/* Those of each addend, rows ascending. @from, @to: [n]; @first: [addends + 1], out: of each in
 * @to. */
static void sort_held(const held_t *from, int64_t n, int64_t addends, held_t *to, int64_t *first)
{
    memset(first, 0, (size_t)(addends + 1) * sizeof *first);
    for (int64_t i = 0; i < n; i++)
        first[from[i].addend + 1]++;
    for (int64_t addend = 0; addend < addends; addend++)
        first[addend + 1] += first[addend];
    for (int64_t i = 0; i < n; i++)
        to[first[from[i].addend]++] = from[i];
    memmove(&first[1], &first[0], (size_t)addends * sizeof *first);
    first[0] = 0;
    for (int64_t addend = 0; addend < addends; addend++) {
        int64_t i = first[addend] + 1;
        while (i < first[addend + 1] && to[i - 1].row <= to[i].row)
            i++;
        if (i < first[addend + 1])
            COLO_SORT(&to[first[addend]], first[addend + 1] - first[addend], row);
    }
}

/* Boxes of which each addend comes from one rank; the addends before the one at hand are fixed. */
typedef struct cutter {
    const maker_t *maker;
    const held_t *held;             /* by addend and row */
    const int64_t *first;           /* [addends + 1] of each */
    int64_t next[COLO_MAX_ADDENDS]; /* of each: those before end above the box */
    const held_t *chosen[COLO_MAX_ADDENDS];
} cutter_t;

typedef struct cut {
    int64_t row, end, b[2], h[2];
} cut_t;

static bool narrow(int64_t *lo, int64_t *hi, int64_t other_lo, int64_t other_hi)
{
    *lo = *lo > other_lo ? *lo : other_lo;
    *hi = *hi < other_hi ? *hi : other_hi;
    return *lo < *hi;
}

/* The sum of the first @n addends. */
static colo_status_t push_sum(const cutter_t *cutter, int64_t n, const cut_t *box)
{
    const maker_t *maker = cutter->maker;
    const colo_owned_t *own = &maker->plan->own_src;
    for (int64_t i = 0; i < maker->plan->addends; i++) {
        const held_t *held = cutter->chosen[i];
        if (i >= n) {
            COLO_PUSH(maker->addend, "bridge: %lld boxes", (colo_addend_t){.peer = COLO_NO_ADDEND});
            continue;
        }
        COLO_PUSH(maker->addend, "bridge: %lld boxes",
                  (colo_addend_t){held->peer,
                                  {held->begin[0] + box->b[0] - held->region->b[0],
                                   held->begin[1] + box->row - held->row,
                                   held->begin[2] + box->h[0] - held->region->h[0]}});
    }
    COLO_PUSH(maker->transfer, "bridge: %lld boxes",
              (colo_transfer_t){
                  .peer = -1,
                  .extent = {box->b[1] - box->b[0], box->end - box->row, box->h[1] - box->h[0]},
                  .there = {box->b[0] - own->b0, box->row, box->h[0] - own->h0}});
    return COLO_OK;
}

/* Cuts @box by the regions of @addend. Boxes of one parent come with rows ascending, so that what
 * ends above one box ends above the next ones, too. */
static colo_status_t cut_by_addend(cutter_t *cutter, int64_t addend, const cut_t *box)
{
    if (addend == cutter->maker->plan->addends)
        return push_sum(cutter, addend, box);
    int64_t *next = &cutter->next[addend], below = 0;
    bool has = false; /* all rows of a region of the first addend have as many */
    while (*next < cutter->first[addend + 1] && cutter->held[*next].end <= box->row)
        ++*next;
    if (addend + 1 < cutter->maker->plan->addends)
        below = cutter->next[addend + 1];
    for (int64_t i = *next; i < cutter->first[addend + 1] && cutter->held[i].row < box->end; i++) {
        const held_t *held = &cutter->held[i];
        cut_t part = *box;
        if (!narrow(&part.row, &part.end, held->row, held->end) ||
            !narrow(&part.b[0], &part.b[1], held->region->b[0], held->region->b[1]) ||
            !narrow(&part.h[0], &part.h[1], held->region->h[0], held->region->h[1]))
            continue;
        has = true;
        cutter->chosen[addend] = held;
        COLO_TRY(cut_by_addend(cutter, addend + 1, &part));
    }
    if (addend > 0 && !has)
        COLO_TRY(push_sum(cutter, addend, box));
    if (addend + 1 < cutter->maker->plan->addends)
        cutter->next[addend + 1] = below; /* the next box may begin above */
    return COLO_OK;
}

static colo_status_t list_sums(const maker_t *maker)
{
    const colo_plan_t *plan = maker->plan;
    const colo_owned_t *own = &plan->own_src;
    const int64_t n = plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_MAIN].recv.nregions +
                      plan->local[COLO_PASS_BACKWARD].nregions;
    colo_list_t *held = maker->bridge->direct.held;
    int64_t first[COLO_MAX_ADDENDS + 1];
    COLO_FAIL_IF(!colo_list_reserve(&held[0], n, sizeof(held_t)) ||
                     !colo_list_reserve(&held[1], n, sizeof(held_t)),
                 COLO_ERR_NOMEM, "bridge: %lld regions", (long long)n);
    if (n == 0)
        return COLO_OK;
    COLO_TRY(all_held(maker, held[0].items));
    sort_held(held[0].items, n, plan->addends, held[1].items, first);
    cutter_t cutter = {.maker = maker, .held = held[1].items, .first = first};
    memcpy(cutter.next, first, (size_t)plan->addends * sizeof *first);
    return cut_by_addend(&cutter, 0,
                         &(cut_t){0, own->rows, {own->b0, own->b1}, {own->h0, own->h1}});
}

/* ---- lists of both passes ---- */

void colo_transfers_deinit(colo_transfer_lists_t *lists)
{
    for (int pass = 0; pass < 2; pass++) {
        free(lists->transfer[pass].items);
        free(lists->addend[pass].items);
        free(lists->exposed[pass].items);
    }
}

size_t colo_direct_unit(const colo_bridge_t *bridge, const colo_ready_plan_t *ready)
{
    const colo_plan_t *plan = ready->program.plan;
    const size_t widest = ready->program.bytes ? (size_t)bridge->direct.unit : 0;
    if (plan->elem == 0 && widest == 0) /* there are no features */
        return colo_dtype_size(plan->config.dtype);
    return plan->elem > widest ? plan->elem : widest;
}

/* The move of @exchange in a pass, or NULL. */
static const colo_move_t *move_of(const colo_steps_t *steps, int exchange)
{
    for (int32_t i = 0; i < steps->n; i++)
        if (steps->step[i].kind == COLO_MOVE && steps->step[i].move.exchange == exchange)
            return &steps->step[i].move;
    return NULL;
}

/* Ranks that reach this rank's tensor: they send here, or read what it would send. */
static colo_status_t find_exposed(const maker_t *maker)
{
    const colo_routes_t *routes =
        colo_plan_routes(maker->plan, maker->pass, maker->move->exchange, maker->pulls);
    for (int32_t i = 0; i < routes->nmessages; i++) {
        int32_t peer = colo_comm_find(maker->bridge->comm, routes->message[i].peer);
        if (colo_direct_near(maker->bridge, peer))
            COLO_PUSH(maker->exposed, "bridge: %lld messages", peer);
    }
    return COLO_OK;
}

/* No transfers; any ranks in reach may reach this rank's tensors. */
static colo_status_t list_any(const colo_bridge_t *bridge, colo_transfer_lists_t *lists)
{
    const int32_t n = bridge->comm->size;
    for (int i = 0; i < 2; i++) {
        int32_t *exposed = colo_list_zeroed(&lists->exposed[i], n, sizeof *exposed);
        COLO_FAIL_IF(!exposed, COLO_ERR_NOMEM, "bridge: %d ranks", (int)n);
        lists->pass[i] = (colo_transfers_t){
            .name = names[i], .elem = 1, .blocks = bridge->direct.blocks, .exposed = exposed};
        for (int32_t rank = 0; rank < n; rank++)
            if (rank != bridge->comm->rank && colo_direct_near(bridge, rank))
                exposed[lists->pass[i].nexposed++] = rank;
    }
    return COLO_OK;
}

colo_status_t colo_transfers_list(colo_bridge_t *bridge, const colo_ready_plan_t *ready,
                                  int exchange, colo_transfer_lists_t *lists)
{
    const colo_plan_t *plan = ready->program.plan;
    if (ready->any_ranks)
        return list_any(bridge, lists);
    for (int i = 0; i < 2; i++) {
        const colo_pass_t pass = (colo_pass_t)i;
        const bool adds = colo_plan_adds(plan, pass);
        colo_transfers_t *out = &lists->pass[i];
        maker_t maker = {.bridge = bridge,
                         .ready = ready,
                         .plan = plan,
                         .pass = pass,
                         .move = move_of(&ready->program.pass[i], exchange),
                         .transfer = &lists->transfer[i],
                         .addend = &lists->addend[i],
                         .exposed = &lists->exposed[i]};
        *out = (colo_transfers_t){.name = names[i]};
        if (adds && plan->names_rows && ready->direct.needs_comm) /* the comm carries all */
            continue;
        if (!maker.move || (exchange == COLO_EXCHANGE_RELAYS && adds))
            continue;
        maker.pulls = adds || (exchange == COLO_EXCHANGE_MAIN && pass == COLO_PASS_FORWARD &&
                               ready->direct.forward == COLO_PULL);
        maker.sums = adds && !ready->direct.needs_comm;
        maker.transfer->n = maker.addend->n = maker.exposed->n = 0;
        COLO_TRY(find_exposed(&maker));
        COLO_TRY(maker.sums ? list_sums(&maker) : list_moves(&maker));
        out->elem = colo_direct_unit(bridge, ready);
        out->ntransfers = maker.transfer->n;
        out->transfer = maker.transfer->items;
        out->pulls = maker.pulls && !maker.sums;
        out->addends = maker.sums ? (int32_t)plan->addends : 0;
        out->addend = maker.addend->items;
        out->blocks = bridge->direct.blocks;
        out->nexposed = (int32_t)maker.exposed->n;
        out->exposed = maker.exposed->items;
    }
    return COLO_OK;
}
