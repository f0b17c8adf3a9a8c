/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_partial.c - rows whose sum is wanted, over places that are no context ranks: rows that
 * overlap, of any number of places, several of them on a rank; and all rows in places along any
 * dims, in any order of addition.
 *
 * Plans are made through the inside of the library, with ownerships of this file. A serial run of
 * their lists is compared with sums that are taken straight from the tables: no rank, no list.
 */
#include "harness/harness.h"

#include "bridge/plan/builder.h"
#include "bridge/run/program.h"

enum { DIMS = 3, ROWS = 13, HOLDERS = 18, RANKS = 24, PIECES = 5, SAMPLES = 3, FEATURES = 4 };
enum { LOCALS = ROWS * PIECES, ADDENDS = HOLDERS > PIECES ? HOLDERS : PIECES };
static const uint64_t none = UINT64_C(0xdeadbeefdeadbeef);

/* What a dim does: its ranks are copies, or hold rows of their own, or parts of the other axes. */
typedef enum role { COPIES, HOLDS, CUTS_SAMPLES, CUTS_FEATURES } role_t;

typedef struct side {
    int64_t extent[DIMS], offset, size, holders;
    role_t role[DIMS];
    colo_layout_t layout;
    int64_t local[HOLDERS][ROWS]; /* where a holder has a row first; -1: it lacks it */
} side_t;

typedef struct at {
    int64_t holder, local;
} at_t;

typedef struct world {
    side_t src, dst;
    int64_t rows, ranks;
    bool named;      /* places of rows, else of all rows alike */
    int64_t n[ROWS]; /* places of a row, in the order of addition */
    at_t place[ROWS][ADDENDS];
    colo_plan_config_t config;
    bool by_table;
    colo_plan_t *plan[RANKS];
} world_t;

/* ---- who has what ---- */

static void coords_of(const side_t *side, int64_t rank, int64_t *coords)
{
    int64_t left = rank - side->offset;
    memset(coords, 0, COLO_DIMS_MAX * sizeof *coords);
    for (int i = 0; i < DIMS; left /= side->extent[i++])
        coords[i] = left % side->extent[i];
}

static int64_t holder_at(const side_t *side, const int64_t *coords)
{
    int64_t holder = 0;
    for (int i = DIMS; i-- > 0;)
        holder = side->role[i] == HOLDS ? holder * side->extent[i] + coords[i] : holder;
    return holder;
}

static void set_holder(const side_t *side, int64_t holder, int64_t *coord)
{
    for (int i = 0; i < COLO_DIMS_MAX; i++) {
        const bool holds = i < DIMS && side->role[i] == HOLDS;
        coord[i] = holds ? holder % side->extent[i] : -1;
        holder = holds ? holder / side->extent[i] : holder;
    }
}

static bool has_rank(const side_t *side, int64_t rank)
{
    return rank >= side->offset && rank < side->offset + side->size;
}

/* Has @rank the element of sample @b and feature @h, of a row that it has? */
static bool has_element(const side_t *side, int64_t rank, int64_t b, int64_t h)
{
    int64_t coords[COLO_DIMS_MAX];
    if (!has_rank(side, rank))
        return false;
    coords_of(side, rank, coords);
    for (int i = 0; i < DIMS; i++) {
        const int64_t n = side->role[i] == CUTS_SAMPLES ? SAMPLES : FEATURES,
                      at = side->role[i] == CUTS_SAMPLES ? b : h, c = coords[i];
        if (side->role[i] >= CUTS_SAMPLES &&
            (at < c * n / side->extent[i] || at >= (c + 1) * n / side->extent[i]))
            return false;
    }
    return true;
}

static int64_t local_of(const side_t *side, int64_t rank, int64_t row, bool full)
{
    int64_t coords[COLO_DIMS_MAX];
    coords_of(side, rank, coords);
    return side->local[full ? 0 : holder_at(side, coords)][row];
}

/* ---- the same as an ownership ---- */

static colo_status_t rows(const colo_side_t *of, const int64_t *coords, const colo_runs_t *within,
                          colo_runs_t *runs)
{
    const side_t *side = of->table;
    const int64_t *local = side->local[of->full ? 0 : holder_at(side, coords)];
    (void)within;
    runs->n = runs->rows = 0;
    for (int64_t row = 0, end; row < of->shape->rows; row = end) {
        for (end = row + 1; end < of->shape->rows && local[row] >= 0; end++)
            if (local[end] != local[row] + (end - row))
                break;
        if (local[row] >= 0)
            COLO_TRY(colo_runs_push(runs, row, end - row, local[row]));
    }
    return COLO_OK;
}

static colo_status_t visit(const colo_side_t *of, const colo_runs_t *mine, colo_list_t *met)
{
    const side_t *side = of->table;
    for (int64_t holder = 0; holder < (of->full ? 1 : side->holders); holder++) {
        colo_block_t block;
        int64_t count = 0;
        for (int64_t i = 0; i < mine->n; i++)
            for (int64_t k = 0; k < mine->run[i].count; k++)
                count += side->local[holder][mine->run[i].row + k] >= 0;
        if (count == 0)
            continue;
        colo_block_clear(&block);
        if (!of->full)
            set_holder(side, holder, block.coord);
        COLO_TRY(colo_block_push(met, &block, count));
    }
    return COLO_OK;
}

static const colo_ownership_t owns = {.rows = rows, .visit = visit};

/* ---- random worlds ---- */

static void make_side(side_t *side, uint64_t *r, int64_t offset, bool alike)
{
    static const char *const names[DIMS] = {"tp", "cp", "dp"};
    static const colo_axis_t axes[] = {COLO_AXIS_ROWS, COLO_AXIS_ROWS, COLO_AXIS_SAMPLES,
                                       COLO_AXIS_FEATURES};
    colo_dim_t dims[DIMS];
    colo_grid_t grid;
    const int64_t holds = t_below(r, DIMS);
    bool taken[4] = {false};
    *side = (side_t){.offset = offset, .size = 1, .holders = 1};
    for (int i = 0; i < DIMS; i++) {
        side->extent[i] = t_pick(r, 1, side->size > 3 ? 2 : 3);
        side->size *= side->extent[i];
        role_t role = i == holds || t_chance(r, 25) ? HOLDS : (role_t)t_below(r, 4);
        if (role >= CUTS_SAMPLES && taken[role])
            role = COPIES;
        taken[role] = true;
        side->role[i] = role;
        side->holders *= role == HOLDS ? side->extent[i] : 1;
        dims[i] = (colo_dim_t){names[i], side->extent[i]};
    }
    assert_ok(colo_grid_init(&grid, dims, DIMS, offset, RANKS));
    assert_ok(colo_layout_init(&side->layout, &grid));
    for (int i = 0; i < DIMS; i++)
        if (side->role[i] >= CUTS_SAMPLES || (side->role[i] == HOLDS && !alike))
            assert_ok(
                colo_layout_split(&side->layout, axes[side->role[i]], names[i], COLO_SPLIT_BLOCK));
    memset(side->local, -1, sizeof side->local);
}

/* Each row is of one holder of the source, in any order. */
static void deal_rows(world_t *w, uint64_t *r)
{
    int64_t n[HOLDERS] = {0}, holder = 0;
    for (int64_t row = 0; row < w->rows; row++) {
        holder = t_chance(r, 40) ? t_below(r, w->src.holders) : holder;
        w->src.local[holder][row] = n[holder]++;
    }
}

/* Pieces that follow each other, uneven ones, each with rows in front of it that are of others. */
static void lay_pieces(world_t *w, uint64_t *r)
{
    const int64_t pieces = t_pick(r, 1, PIECES), before = t_below(r, w->rows);
    int64_t lo[PIECES + 1], length[HOLDERS] = {0};
    lo[0] = 0;
    for (int64_t i = 1; i <= pieces; i++)
        lo[i] = i == pieces ? w->rows : t_pick(r, lo[i - 1], w->rows);
    at_t in[PIECES][ROWS];
    for (int64_t i = 0; i < pieces; i++) {
        const int64_t holder = t_below(r, w->dst.holders);
        for (int64_t row = lo[i] > before ? lo[i] - before : 0;
             lo[i] < lo[i + 1] && row < lo[i + 1]; row++) {
            in[i][row] = (at_t){holder, length[holder]++};
            if (w->dst.local[holder][row] < 0)
                w->dst.local[holder][row] = in[i][row].local;
        }
    }
    for (int64_t row = 0; row < w->rows; row++)
        for (int others = 0; others < 2; others++) /* its own piece comes first */
            for (int64_t i = 0; i < pieces; i++) {
                const bool own = lo[i] <= row && row < lo[i + 1];
                if (own == !others && lo[i] < lo[i + 1] && row < lo[i + 1] && row >= lo[i] - before)
                    w->place[row][w->n[row]++] = in[i][row];
            }
}

/* All rows in each place, alike. */
static void lay_alike(world_t *w, uint64_t *r)
{
    int64_t order[HOLDERS];
    for (int64_t i = 0; i < w->dst.holders; i++) {
        const int64_t k = t_below(r, i + 1);
        order[i] = order[k];
        order[k] = i;
    }
    const int64_t shift = t_below(r, w->rows);
    for (int64_t row = 0; row < w->rows; row++) {
        w->dst.local[0][row] = (row + shift) % w->rows;
        w->n[row] = w->dst.holders;
        for (int64_t i = 0; i < w->n[row]; i++)
            w->place[row][i] = (at_t){order[i], w->dst.local[0][row]};
    }
}

static void make_world(world_t *w, uint64_t seed)
{
    uint64_t r = seed;
    *w = (world_t){.rows = t_pick(&r, 1, ROWS), .named = t_chance(&r, 60)};
    w->by_table = t_chance(&r, 50);
    make_side(&w->src, &r, t_below(&r, 4), false);
    make_side(&w->dst, &r, t_below(&r, 7), !w->named);
    deal_rows(w, &r);
    w->named ? lay_pieces(w, &r) : lay_alike(w, &r);
    w->ranks = w->src.offset + w->src.size > w->dst.offset + w->dst.size
                   ? w->src.offset + w->src.size
                   : w->dst.offset + w->dst.size;
    w->config =
        (colo_plan_config_t){COLO_PLAN_CONFIG_INIT,
                             .src = &w->src.layout,
                             .dst = &w->dst.layout,
                             .shape = {SAMPLES, w->rows, FEATURES, 0},
                             .dtype = t_chance(&r, 50) ? COLO_BF16 : COLO_F32,
                             .output = w->named ? COLO_OUTPUT_SHARDED : COLO_OUTPUT_FULL_SEQ,
                             .grad = COLO_GRAD_PARTIAL,
                             .ranks_per_node = t_chance(&r, 30) ? 0 : t_pick(&r, 1, 6),
                             .one_level = t_chance(&r, 25)};
}

/* Rows that follow each other in all of their places. */
static int64_t list_partial(const world_t *w, colo_partial_t *partial, colo_place_t *places)
{
    int64_t n = 0;
    for (int64_t row = 0; row < (w->named ? w->rows : 1); row++) {
        const at_t *place = w->place[row];
        bool goes_on = n > 0 && w->n[row] == w->n[row - 1];
        for (int64_t i = 0; goes_on && i < w->n[row]; i++)
            goes_on = place[i].holder == w->place[row - 1][i].holder &&
                      place[i].local == w->place[row - 1][i].local + 1;
        if (goes_on) {
            partial[n - 1].count++;
            continue;
        }
        colo_place_t *to = &places[n * ADDENDS];
        for (int64_t i = 0; i < w->n[row]; i++) {
            to[i].local = place[i].local;
            set_holder(&w->dst, place[i].holder, to[i].coord);
        }
        partial[n++] = (colo_partial_t){w->n[row], to, row, w->named};
    }
    return n;
}

/* @made: out, how each plan ended */
static void try_plans(world_t *w, colo_status_t made[RANKS])
{
    COLO_ENDS(colo_builder_deinit) colo_builder_t builder = {0};
    static colo_place_t places[ROWS * ADDENDS];
    colo_partial_t partial[ROWS];
    const int64_t n = list_partial(w, partial, places);
    const colo_side_t src = {.owns = &owns,
                             .layout = &w->src.layout,
                             .shape = &w->config.shape,
                             .table = &w->src},
                      dst = {.owns = &owns,
                             .layout = &w->dst.layout,
                             .shape = &w->config.shape,
                             .table = &w->dst,
                             .partial = partial,
                             .npartial = n};
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        colo_side_t from = src, to = dst;
        assert_ok(colo_plan_new(&w->plan[rank], &w->config, rank));
        from.layout = &w->plan[rank]->src;
        to.layout = &w->plan[rank]->dst;
        colo_builder_begin(&builder, w->plan[rank], w->by_table);
        made[rank] = colo_builder_route(&builder, from, to);
    }
}

static void make_plans(world_t *w)
{
    colo_status_t made[RANKS];
    try_plans(w, made);
    for (int64_t rank = 0; rank < w->ranks; rank++)
        assert_ok(made[rank]);
}

static void free_plans(world_t *w)
{
    for (int64_t rank = 0; rank < w->ranks; rank++)
        colo_plan_destroy(&w->plan[rank]);
}

/* Of rows that all places have alike, each rank has one addend. */
static void judge_own(const world_t *w)
{
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        int64_t coords[COLO_DIMS_MAX], own = -1;
        coords_of(&w->dst, rank, coords);
        for (int64_t i = 0; has_rank(&w->dst, rank) && i < w->n[0]; i++)
            own = w->place[0][i].holder == holder_at(&w->dst, coords) ? i : own;
        assert_int_equal(w->plan[rank]->own_addend, w->named ? -1 : own);
        assert_true(!w->named || !colo_plan_sums_nodes(w->plan[rank]));
    }
}

/* ---- a serial run ---- */

typedef uint64_t tensor_t[SAMPLES][LOCALS][FEATURES];

/* What a rank has in a call: its input and output; and what has arrived, by addend: of its rows
 * alone and as the sum of a node; what it collects for other nodes, and the sum of that. */
typedef struct memory {
    tensor_t in, out, addend[ADDENDS], sum[ADDENDS], collected[ADDENDS], leaves;
} memory_t;

/* Of a row: the number of the element on its side. */
static uint64_t code(int64_t holder, int64_t local, int64_t b, int64_t h)
{
    uint64_t state = (uint64_t)(((holder * LOCALS + local) * SAMPLES + b) * FEATURES + h);
    return t_rand(&state) | 1;
}

static void fill(tensor_t to, uint64_t value)
{
    for (int64_t i = 0; i < SAMPLES * LOCALS * FEATURES; i++)
        (&to[0][0][0])[i] = value;
}

#define FOR_BOX(region, b, k, h)                                      \
    for (int64_t b = (region)->b[0]; b < (region)->b[1]; b++)         \
        for (int64_t k = 0; k < (region)->s[1] - (region)->s[0]; k++) \
            for (int64_t h = (region)->h[0]; h < (region)->h[1]; h++)

/* @again: it may have come before. */
static void copy(bool again, const colo_region_t *region, tensor_t from, int64_t from_row,
                 tensor_t to, int64_t to_row)
{
    assert_true(from_row >= 0 && to_row >= 0);
    FOR_BOX(region, b, k, h)
    {
        assert_true(from[b][from_row + k][h] != none); /* it is there */
        assert_true(again || to[b][to_row + k][h] == none);
        to[b][to_row + k][h] = from[b][from_row + k][h];
    }
}

typedef void (*carry_fn)(const world_t *w, memory_t *from, memory_t *to,
                         const colo_region_t *region, const colo_offset_t *sent,
                         const colo_offset_t *got);

static bool is_same(const colo_region_t *one, const colo_region_t *other)
{
    return memcmp(one->b, other->b, sizeof one->b) == 0 &&
           memcmp(one->s, other->s, sizeof one->s) == 0 &&
           memcmp(one->h, other->h, sizeof one->h) == 0 && one->addend == other->addend;
}

/* Carries each message, which both ends list alike. */
static void exchange(const world_t *w, colo_pass_t pass, int which, memory_t *memory,
                     carry_fn carry)
{
    int64_t received = 0;
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        const colo_routes_t *sends = &w->plan[rank]->exchange[pass][which].send;
        received += w->plan[rank]->exchange[pass][which].recv.nmessages;
        for (int32_t i = 0; i < sends->nmessages; i++, received--) {
            const colo_plan_message_t *sent = &sends->message[i], *got = NULL;
            const colo_routes_t *recvs = &w->plan[sent->peer]->exchange[pass][which].recv;
            for (int32_t k = 0; k < recvs->nmessages; k++)
                got = recvs->message[k].peer == rank ? &recvs->message[k] : got;
            assert_non_null(got);
            assert_int_equal(sent->nregions, got->nregions);
            for (int64_t k = 0; k < got->nregions; k++)
                assert_true(is_same(&sent->regions[k], &got->regions[k]));
            for (int64_t k = 0; k < got->nregions; k++)
                carry(w, &memory[rank], &memory[sent->peer], &got->regions[k],
                      &sends->offset[sent->regions - sends->region + k],
                      &recvs->offset[got->regions - recvs->region + k]);
        }
    }
    assert_int_equal(received, 0);
}

static void carry_row(const world_t *w, memory_t *from, memory_t *to, const colo_region_t *region,
                      const colo_offset_t *sent, const colo_offset_t *got)
{
    (void)w;
    copy(false, region, from->in, sent->src_row, to->out, got->dst_row);
}

static void relay_row(const world_t *w, memory_t *from, memory_t *to, const colo_region_t *region,
                      const colo_offset_t *sent, const colo_offset_t *got)
{
    (void)w;
    copy(false, region, from->out, sent->dst_row, to->out, got->dst_row);
}

static void carry_addend(const world_t *w, memory_t *from, memory_t *to,
                         const colo_region_t *region, const colo_offset_t *sent,
                         const colo_offset_t *got)
{
    const int64_t addends = w->plan[0]->addends;
    if (region->addend < addends)
        copy(false, region, from->in, sent->dst_row, to->addend[region->addend], got->src_row);
    else
        copy(true, region, from->in, sent->dst_row, to->collected[region->addend - addends],
             got->dst_row);
}

static void carry_sum(const world_t *w, memory_t *from, memory_t *to, const colo_region_t *region,
                      const colo_offset_t *sent, const colo_offset_t *got)
{
    (void)w;
    copy(false, region, from->leaves, sent->dst_row, to->sum[region->addend], got->src_row);
}

static void relay_sum(const world_t *w, memory_t *from, memory_t *to, const colo_region_t *region,
                      const colo_offset_t *sent, const colo_offset_t *got)
{
    (void)w;
    copy(false, region, from->out, sent->src_row, to->out, got->src_row);
}

/* ---- sums ---- */

/* Another order gives another number, where the order is stated: if nodes add up, groups come in
 * that of nodes, which test_node_sums.c has. */
static uint64_t weight(const world_t *w)
{
    return colo_plan_sums_nodes(w->plan[0]) ? 1 : 3;
}

static void add(uint64_t *sum, uint64_t value, uint64_t by)
{
    assert_true(value != none);
    *sum = *sum * by + value;
}

/* What this rank sends to other nodes: its addend, and what it has collected. */
static void add_leaving(const colo_plan_t *plan, memory_t *memory)
{
    const colo_routes_t *sends = &plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_NODE_SUMS].send;
    for (int64_t i = 0; i < sends->nregions; i++)
        FOR_BOX(&sends->region[i], b, k, h)
        {
            const int64_t row = sends->offset[i].dst_row + k;
            const colo_term_t *term = &plan->term[sends->offset[i].order];
            uint64_t sum = 0;
            do
                add(&sum,
                    term->addend == plan->own_addend ? memory->in[b][row][h]
                                                     : memory->collected[term->addend][b][row][h],
                    1);
            while (!(term++->use & COLO_TERM_LAST));
            memory->leaves[b][row][h] = sum;
        }
}

static void add_list(const world_t *w, const colo_plan_t *plan, const colo_routes_t *list,
                     memory_t *memory)
{
    for (int64_t i = 0; i < list->nregions; i++) {
        if (list->region[i].addend != 0)
            continue;
        FOR_BOX(&list->region[i], b, k, h)
        {
            const int64_t row = list->offset[i].src_row + k;
            const colo_term_t *term = plan->term ? &plan->term[list->offset[i].order] : NULL;
            uint64_t sum = 0;
            for (int64_t addend = 0; !term && addend < plan->addends; addend++)
                add(&sum, memory->addend[addend][b][row][h], weight(w));
            for (bool last = !term; !last; term++) {
                last = term->use & COLO_TERM_LAST;
                add(&sum,
                    (term->use & COLO_TERM_SUM ? memory->sum
                                               : memory->addend)[term->addend][b][row][h],
                    weight(w));
            }
            assert_true(memory->out[b][row][h] == none);
            memory->out[b][row][h] = sum;
        }
    }
}

static void run_backward(const world_t *w, memory_t *memory)
{
    exchange(w, COLO_PASS_BACKWARD, COLO_EXCHANGE_MAIN, memory, carry_addend);
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        const colo_routes_t *local = &w->plan[rank]->local[COLO_PASS_BACKWARD];
        for (int64_t i = 0; i < local->nregions; i++)
            carry_addend(w, &memory[rank], &memory[rank], &local->region[i], &local->offset[i],
                         &local->offset[i]);
        add_leaving(w->plan[rank], &memory[rank]);
    }
    exchange(w, COLO_PASS_BACKWARD, COLO_EXCHANGE_NODE_SUMS, memory, carry_sum);
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        const colo_plan_t *plan = w->plan[rank];
        add_list(w, plan, &plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_MAIN].recv,
                 &memory[rank]);
        add_list(w, plan, &plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_NODE_SUMS].recv,
                 &memory[rank]);
        add_list(w, plan, &plan->local[COLO_PASS_BACKWARD], &memory[rank]);
    }
    exchange(w, COLO_PASS_BACKWARD, COLO_EXCHANGE_RELAYS, memory, relay_sum);
}

static void run_forward(const world_t *w, memory_t *memory)
{
    exchange(w, COLO_PASS_FORWARD, COLO_EXCHANGE_MAIN, memory, carry_row);
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        const colo_routes_t *local = &w->plan[rank]->local[COLO_PASS_FORWARD];
        for (int64_t i = 0; i < local->nregions; i++)
            carry_row(w, &memory[rank], &memory[rank], &local->region[i], &local->offset[i],
                      &local->offset[i]);
    }
    exchange(w, COLO_PASS_FORWARD, COLO_EXCHANGE_RELAYS, memory, relay_row);
}

/* ---- what must come out ---- */

#define FOR_ELEMENTS(w, side, rank, b, row, h)        \
    for (int64_t b = 0; b < SAMPLES; b++)             \
        for (int64_t row = 0; row < (w)->rows; row++) \
            for (int64_t h = 0; h < FEATURES; h++)    \
                if (has_element(side, rank, b, h))

static uint64_t source_code(int64_t row, int64_t b, int64_t h)
{
    return code(HOLDERS, row, b, h);
}

static void judge_forward(const world_t *w, memory_t *memory)
{
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        fill(memory[rank].in, none);
        fill(memory[rank].out, none);
        FOR_ELEMENTS(w, &w->src, rank, b, row, h)
        {
            const int64_t local = local_of(&w->src, rank, row, false);
            if (local >= 0)
                memory[rank].in[b][local][h] = source_code(row, b, h);
        }
    }
    run_forward(w, memory);
    for (int64_t rank = 0; rank < w->ranks; rank++)
        FOR_ELEMENTS(w, &w->dst, rank, b, row, h)
        {
            const int64_t local = local_of(&w->dst, rank, row, !w->named);
            if (local >= 0)
                assert_true(memory[rank].out[b][local][h] == source_code(row, b, h));
        }
}

static void judge_backward(const world_t *w, memory_t *memory)
{
    const int64_t elem = (int64_t)colo_dtype_size(w->config.dtype);
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        int64_t coords[COLO_DIMS_MAX];
        for (size_t i = 0; i < sizeof *memory / sizeof(tensor_t); i++)
            fill(*((tensor_t *)&memory[rank] + i), none);
        coords_of(&w->dst, rank, coords);
        FOR_ELEMENTS(w, &w->dst, rank, b, row, h)
        for (int64_t i = 0; i < w->n[row]; i++) {
            const at_t *place = &w->place[row][i];
            if (place->holder == holder_at(&w->dst, coords))
                memory[rank].in[b][place->local][h] = code(place->holder, place->local, b, h);
        }
    }
    run_backward(w, memory);
    for (int64_t rank = 0; rank < w->ranks; rank++) {
        colo_plan_bytes_t bytes = {COLO_PLAN_BYTES_INIT};
        assert_int_equal(colo_plan_bytes(w->plan[rank], COLO_PASS_BACKWARD, &bytes), COLO_OK);
        int64_t needed = 0;
        FOR_ELEMENTS(w, &w->src, rank, b, row, h)
        {
            const int64_t local = local_of(&w->src, rank, row, false);
            uint64_t sum = 0;
            if (local < 0)
                continue;
            for (int64_t i = 0; i < w->n[row]; i++)
                sum = sum * weight(w) + code(w->place[row][i].holder, w->place[row][i].local, b, h);
            assert_true(memory[rank].out[b][local][h] == sum);
            needed += w->n[row] * elem;
        }
        assert_true(bytes.minimum <= bytes.recv);
        if (!w->config.ranks_per_node || w->config.one_level)
            assert_true(bytes.recv + bytes.local == needed && bytes.minimum == bytes.recv);
    }
}

static void judge_calls(const world_t *w)
{
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < COLO_EXCHANGES; i++)
            for (int64_t rank = 0; rank < w->ranks; rank++) {
                const colo_exchange_plan_t *exchange = &w->plan[rank]->exchange[pass][i];
                assert_int_equal(exchange->all_come, w->plan[0]->exchange[pass][i].all_come);
                assert_true(exchange->all_come ||
                            exchange->send.nmessages + exchange->recv.nmessages == 0);
            }
}

/* A program adds by addend, as nodes do, or by the terms of named rows. */
static void judge_programs(const world_t *w)
{
    for (int64_t rank = 0; rank < w->ranks; rank++)
        for (int launched = 0; launched < 2; launched++) {
            colo_plan_t *plan = w->plan[rank];
            colo_program_t program = {.plan = plan}; /* its memory is the plan's */
            assert_int_equal(colo_program_create(&program, launched), COLO_OK);
        }
}

static void judge(uint64_t seed, bool named)
{
    static memory_t memory[RANKS];
    world_t w;
    make_world(&w, seed);
    if (w.named == named) {
        make_plans(&w);
        judge_own(&w);
        judge_calls(&w);
        judge_programs(&w);
        judge_forward(&w, memory);
        judge_backward(&w, memory);
    }
    free_plans(&w);
}

enum { CASES = 1500 };

T_CASE(rows_that_overlap_are_added_up_over_all_their_places)
{
    const uint64_t seed = t_seed();
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++)
        judge(seed + (uint64_t)i, true);
}

T_CASE(all_rows_are_added_up_over_places_along_any_dims)
{
    const uint64_t seed = t_seed();
    for (int64_t i = 0, n = t_scaled(CASES); i < n; i++)
        judge(seed + (uint64_t)i, false);
}

/* ---- more bytes than 63 bits ---- */

/* Ranks from 0 on, each a holder. */
static void make_holders(side_t *side, int64_t n)
{
    const colo_dim_t tp = {"tp", n};
    colo_grid_t grid;
    *side = (side_t){{n, 1, 1}, .size = n, .holders = n, .role = {HOLDS}};
    assert_ok(colo_grid_init(&grid, &tp, 1, 0, RANKS));
    assert_ok(colo_layout_init(&side->layout, &grid));
    assert_ok(colo_layout_split(&side->layout, COLO_AXIS_ROWS, "tp", COLO_SPLIT_BLOCK));
    memset(side->local, -1, sizeof side->local);
}

/* One row, which rank 0 needs, and of which both ranks have addends. Two of them are as many bytes
 * as a config may have, which knows of no others than those of its parts. */
T_CASE(addends_of_more_than_63_bits_are_refused_where_they_are_needed_and_sent)
{
    static const struct {
        int64_t on_rank[2]; /* addends */
        colo_status_t made[2];
    } cases[] = {
        {{1, 1}, {COLO_OK, COLO_OK}},
        {{2, 2}, {COLO_ERR_ARG, COLO_OK}}, /* two stay there, two come */
        {{0, 3}, {COLO_ERR_ARG, COLO_ERR_ARG}},
    };
    for (int k = 0; k < 3; k++) {
        world_t w = {.rows = 1, .ranks = 2, .named = true};
        colo_status_t made[RANKS];
        make_holders(&w.src, 1);
        make_holders(&w.dst, 2);
        w.src.local[0][0] = 0;
        for (int64_t rank = 0; rank < 2; rank++)
            for (int64_t i = 0; i < cases[k].on_rank[rank]; i++)
                w.place[0][w.n[0]++] = (at_t){rank, i};
        w.config =
            (colo_plan_config_t){COLO_PLAN_CONFIG_INIT,    .src = &w.src.layout,
                                 .dst = &w.dst.layout,     .shape = {1, 1, INT64_MAX / 4 / 2, 0},
                                 .dtype = COLO_F32,        .output = COLO_OUTPUT_SHARDED,
                                 .grad = COLO_GRAD_PARTIAL};
        try_plans(&w, made);
        for (int rank = 0; rank < 2; rank++)
            assert_int_equal(made[rank], cases[k].made[rank]);
        free_plans(&w);
    }
}

T_MAIN("bridge/partial")
