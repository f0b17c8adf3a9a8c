/* SPDX-License-Identifier: Apache-2.0 */
/*
 * program.c - which steps a pass takes, which partial sums it needs, and where a region lies in a
 * buffer.
 *
 * Forward: a move, and a second one from output to output if ranks of a node pass on what entered
 * it; then rows that lie in several places are copied to the others. Backward in the other
 * direction. The only addition is the sum of PARTIAL gradients. Receiving into the output would be
 * simpler, but an addend may come before those that are added up first: each lands in a partial sum
 * of its own, and then every element is added up in addend order, which is rank order, or as the
 * plan says. If nodes add up, what crosses the network is summed up before.
 */
#include "bridge/run/program.h"

#include "core/device.h"
#include "core/error.h"

/* ---- partial sums ---- */

void colo_partial_extent(const colo_plan_t *plan, int64_t extent[3])
{
    for (int dst = 0; dst < (colo_plan_sums_nodes(plan) ? 2 : 1); dst++) {
        const colo_owned_t *own = dst ? &plan->own_dst : &plan->own_src;
        const int64_t of[3] = {own->b1 - own->b0, own->rows, own->h1 - own->h0};
        for (int i = 0; i < 3; i++)
            extent[i] = dst && extent[i] > of[i] ? extent[i] : of[i];
    }
    if (plan->names_rows)
        extent[1] = plan->sum_rows;
}

colo_dtype_t colo_sum_wide(colo_dtype_t dtype)
{
    return colo_dtype_size(dtype) < sizeof(float) ? COLO_F32 : dtype;
}

size_t colo_partial_bytes(const colo_plan_t *plan, int64_t per, colo_dtype_t dtype)
{
    int64_t extent[3];
    colo_partial_extent(plan, extent);
    return (size_t)(per * extent[0] * extent[1] * extent[2]) *
           colo_dtype_size(colo_plan_sums_nodes(plan) ? colo_sum_wide(dtype) : dtype);
}

colo_dtype_t colo_sum_dtype(const colo_plan_t *plan, const colo_carried_t *tensor, int64_t key)
{
    const int64_t kind = key / plan->addends;
    return kind == COLO_SUM_NODE || kind == COLO_SUM_LEAVES ? colo_sum_wide(tensor->dtype)
                                                            : tensor->dtype;
}

colo_dtype_t colo_move_dtype(const colo_program_t *program, colo_pass_t pass, int exchange)
{
    const colo_dtype_t dtype = program->plan->config.dtype;
    return program->bytes                                 ? COLO_U8
           : program->plan->exchange[pass][exchange].wide ? colo_sum_wide(dtype)
                                                          : dtype;
}

int64_t colo_move_sum(const colo_plan_t *plan, int exchange, bool sends,
                      const colo_region_t *region)
{
    if (exchange == COLO_EXCHANGE_NODE_SUMS)
        return sends ? colo_sum_key(plan, COLO_SUM_LEAVES, 0)
                     : colo_sum_key(plan, COLO_SUM_NODE, region->addend);
    return region->addend < plan->addends
               ? region->addend
               : colo_sum_key(plan, COLO_SUM_COLLECTED, region->addend - plan->addends);
}

static void need_partial(colo_program_t *program, int64_t key)
{
    int32_t *partial = &program->partial_of[key];
    *partial = *partial < 0 ? program->npartials++ : *partial;
}

static void need_partials(colo_program_t *program, int exchange)
{
    const colo_routes_t *recv =
        colo_plan_routes(program->plan, COLO_PASS_BACKWARD, exchange, false);
    for (int64_t i = 0; i < recv->nregions; i++)
        if (!program->plan->names_rows ||
            colo_plan_sums_region(program->plan, COLO_PASS_BACKWARD, recv, i))
            need_partial(program, colo_move_sum(program->plan, exchange, false, &recv->region[i]));
}

/* Of those groups of terms from @term on that are added up here. */
static void need_groups(colo_program_t *program, const colo_term_t *term)
{
    for (; !(term->use & COLO_TERM_LAST); term++)
        if (term->use == COLO_TERM_FIRST && !(term[1].use & COLO_TERM_FIRST))
            need_partial(program, colo_sum_key(program->plan, COLO_SUM_NODE, term->addend));
}

static colo_status_t find_partials(colo_program_t *program, const colo_add_t *add)
{
    colo_plan_t *plan = program->plan;
    const bool nodes = colo_plan_sums_nodes(plan);
    const int64_t keys = colo_sum_key(plan, nodes ? COLO_SUM_LEAVES : COLO_SUM_NODE, 0) + 1;
    program->partial_of = colo_pool_take(&plan->pool, (size_t)keys * sizeof *program->partial_of);
    COLO_FAIL_IF(!program->partial_of, COLO_ERR_NOMEM, "bridge: %lld addends",
                 (long long)plan->addends);
    for (int64_t i = 0; i < keys; i++)
        program->partial_of[i] = -1;
    need_partials(program, COLO_EXCHANGE_MAIN);
    need_partials(program, COLO_EXCHANGE_NODE_SUMS);
    if (plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_NODE_SUMS].send.nregions > 0)
        need_partial(program, colo_sum_key(plan, COLO_SUM_LEAVES, 0));
    for (int k = 0; nodes && k < 3; k++)
        for (int64_t i = 0; i < add->list[k]->nregions; i++)
            if (add->list[k]->region[i].addend == 0)
                need_groups(program, &plan->term[add->list[k]->offset[i].order]);
    if (!add->own_in && plan->local[COLO_PASS_BACKWARD].nregions > 0)
        need_partial(program, plan->own_addend);
    const colo_routes_t *local = &plan->local[COLO_PASS_BACKWARD];
    for (int64_t i = 0; plan->names_rows && i < local->nregions; i++)
        if (local->region[i].addend > 0) /* which some row has, so it is added up */
            need_partial(program, local->region[i].addend);
    return COLO_OK;
}

/* ---- steps ---- */

/* If a batch has many small regions, what stays on the rank is copied to the others' addends, in
 * few launches, and one sum is over all rows. A launch takes as long as that copy of some MiB. */
static bool sums_at_once(const colo_plan_t *plan, bool launched)
{
    enum { LARGE = 4 << 20 }; /* bytes of a region of the usual tensor, on average */
    const int64_t n = plan->local[COLO_PASS_BACKWARD].nregions +
                      plan->exchange[COLO_PASS_BACKWARD][COLO_EXCHANGE_MAIN].recv.nregions;
    const int64_t units = plan->own_src.rows * (plan->own_src.h1 - plan->own_src.h0);
    return launched && units * (int64_t)plan->elem < n * LARGE;
}

static void push_move(colo_steps_t *steps, int exchange, const colo_routes_t *local, int from,
                      int to)
{
    steps->step[steps->n++] = (colo_step_t){.kind = COLO_MOVE, .move = {exchange, local, from, to}};
}

static void push_add(colo_steps_t *steps, const colo_add_t *add)
{
    steps->step[steps->n++] = (colo_step_t){.kind = COLO_ADD, .add = *add};
}

/* Addends into partial sums, and how they become the output. */
static colo_add_t add_up(colo_program_t *program, colo_steps_t *steps, bool launched)
{
    const colo_plan_t *plan = program->plan;
    const colo_exchange_plan_t *exchange = plan->exchange[COLO_PASS_BACKWARD];
    const colo_routes_t *local = &plan->local[COLO_PASS_BACKWARD];
    if (exchange[COLO_EXCHANGE_NODE_SUMS].wide) {
        push_move(steps, COLO_EXCHANGE_MAIN, local, COLO_IN, COLO_PARTIALS);
        push_add(steps, &(colo_add_t){.list = {&exchange[COLO_EXCHANGE_NODE_SUMS].send},
                                      .addend = -1,
                                      .by_terms = true,
                                      .to = COLO_PARTIALS});
        if (exchange[COLO_EXCHANGE_NODE_SUMS].all_come)
            push_move(steps, COLO_EXCHANGE_NODE_SUMS, NULL, COLO_PARTIALS, COLO_PARTIALS);
        return (colo_add_t){.list = {&exchange[COLO_EXCHANGE_MAIN].recv, local,
                                     &exchange[COLO_EXCHANGE_NODE_SUMS].recv},
                            .by_terms = true,
                            .to = COLO_OUT};
    }
    if (plan->names_rows) { /* rows of one value go to the output at once */
        push_move(steps, COLO_EXCHANGE_MAIN, local, COLO_IN, COLO_OUT);
        return (colo_add_t){.list = {local, &exchange[COLO_EXCHANGE_MAIN].recv},
                            .by_terms = true,
                            .own_in = true,
                            .to = COLO_OUT};
    }
    /* own addend: held here or received; the two lists together cover each element once */
    colo_add_t add = {.list = {local, &exchange[COLO_EXCHANGE_MAIN].recv},
                      .addend = plan->own_addend >= 0 ? plan->own_addend : 0,
                      .own_in = !sums_at_once(plan, launched),
                      .to = COLO_OUT};
    push_move(steps, COLO_EXCHANGE_MAIN, add.own_in ? NULL : local, COLO_IN, COLO_PARTIALS);
    if (!add.own_in) {
        const colo_owned_t *own = &plan->own_src;
        struct colo_source_part *part = program->source_part;
        *part = (struct colo_source_part){.region = {.b = {own->b0, own->b1},
                                                     .s = {0, own->rows},
                                                     .h = {own->h0, own->h1},
                                                     .addend = (int32_t)add.addend}};
        part->routes = (colo_routes_t){
            .nregions = own->rows > 0, .region = &part->region, .offset = &part->offset};
        add.list[0] = &part->routes;
        add.list[1] = NULL;
    }
    return add;
}

colo_status_t colo_program_create(colo_program_t *program, bool launched)
{
    colo_plan_t *plan = program->plan;
    program->source_part =
        launched ? colo_pool_take(&plan->pool, sizeof *program->source_part) : NULL;
    COLO_FAIL_IF(launched && !program->source_part, COLO_ERR_NOMEM, "bridge: %zu bytes",
                 sizeof *program->source_part);
    for (int pass = 0; pass < (plan->config.no_grad ? 1 : 2); pass++) {
        colo_steps_t *steps = &program->pass[pass];
        if (!colo_plan_adds(plan, (colo_pass_t)pass)) {
            push_move(steps, COLO_EXCHANGE_MAIN, &plan->local[pass], COLO_IN, COLO_OUT);
        } else if (!colo_dtype_is_float(plan->config.dtype)) {
            return colo_fail(
                COLO_ERR_ARG,
                plan->names_rows
                    ? "bridge: gradients of rows in %lld pieces at most are summed, which %s is "
                      "not "
                      "made for; set no_grad"
                    : "bridge: PARTIAL gradients over %lld context ranks are summed, which %s is "
                      "not made for; use DISJOINT, SHARDED or no_grad",
                (long long)plan->addends, colo_dtype_name(plan->config.dtype));
        } else if (plan->addends > COLO_MAX_ADDENDS && plan->names_rows) {
            return colo_fail(COLO_ERR_ARG,
                             "bridge: a row is in %lld pieces and their halos, at most %d; give "
                             "longer pieces or a smaller halo_before, or set no_grad",
                             (long long)plan->addends, COLO_MAX_ADDENDS);
        } else if (plan->addends > COLO_MAX_ADDENDS) {
            return colo_fail(COLO_ERR_ARG,
                             "bridge: PARTIAL gradients over %lld context ranks, at most %d; use "
                             "DISJOINT or SHARDED",
                             (long long)plan->addends, COLO_MAX_ADDENDS);
        } else {
            const colo_add_t add = add_up(program, steps, launched);
            COLO_TRY(find_partials(program, &add));
            push_add(steps, &add);
        }
        if (plan->exchange[pass][COLO_EXCHANGE_RELAYS].all_come)
            push_move(steps, COLO_EXCHANGE_RELAYS, NULL, COLO_OUT, COLO_OUT);
        if (pass == COLO_PASS_FORWARD && plan->repeats.n) /* after all has come */
            steps->step[steps->n++] = (colo_step_t){.kind = COLO_REPEAT};
        if (plan->padding[pass].n) /* after sums, which may take all rows at once */
            steps->step[steps->n++] = (colo_step_t){.kind = COLO_CLEAR};
    }
    return COLO_OK;
}

void colo_program_deinit(colo_program_t *program)
{
    colo_plan_destroy(&program->plan);
    *program = (colo_program_t){0};
}

/* ---- boxes ---- */

colo_box_t colo_view_box(colo_view_t view, const colo_owned_t *own)
{
    return (colo_box_t){.data = view.data,
                        .extent = {own->b1 - own->b0, own->rows, own->h1 - own->h0},
                        .stride = {view.stride[0], view.stride[1], view.stride[2]}};
}

/* This rank's part of tensor @tensor in a partial sum, contiguous. */
static colo_view_t partial_view(const colo_call_frame_t *frame, const colo_carried_t *tensor,
                                int64_t key)
{
    int64_t extent[3];
    colo_partial_extent(frame->program->plan, extent);
    const size_t begin =
        (size_t)frame->program->partial_of[key] * frame->partial_bytes + tensor->in_partial;
    return (colo_view_t){
        .data = frame->partials ? (char *)frame->partials + begin : NULL,
        .stride = {extent[1] * extent[2] * tensor->per, extent[2] * tensor->per, 1}};
}

colo_box_t colo_call_box(const colo_call_frame_t *frame, const colo_carried_t *tensor,
                         colo_end_t end, const colo_routes_t *routes, int64_t i, bool bytes)
{
    const colo_plan_t *plan = frame->program->plan;
    const colo_region_t *region = &routes->region[i];
    const bool src = end.buffer == COLO_PARTIALS
                         ? end.key < colo_sum_key(plan, COLO_SUM_COLLECTED, 0)
                         : (end.buffer == COLO_IN) == (frame->pass == COLO_PASS_FORWARD);
    const colo_owned_t *own = src ? &plan->own_src : &plan->own_dst;
    const int64_t row = end.buffer == COLO_PARTIALS && plan->names_rows ? routes->offset[i].sum_row
                        : src                                           ? routes->offset[i].src_row
                                                                        : routes->offset[i].dst_row;
    const colo_view_t view = end.buffer == COLO_IN    ? tensor->in
                             : end.buffer == COLO_OUT ? tensor->out
                                                      : partial_view(frame, tensor, end.key);
    const int64_t elem = (int64_t)colo_dtype_size(
        end.buffer == COLO_PARTIALS ? colo_sum_dtype(plan, tensor, end.key) : tensor->dtype);
    const int64_t rows = region->s[1] - region->s[0],
                  cols = (region->h[1] - region->h[0]) * tensor->per;
    colo_box_t box = {.extent = {region->b[1] - region->b[0], rows, cols},
                      .stride = {view.stride[0], view.stride[1], view.stride[2]}};
    const int64_t first = (region->b[0] - own->b0) * view.stride[0] + row * view.stride[1] +
                          (region->h[0] - own->h0) * tensor->per * view.stride[2];
    if (bytes) /* one sample */
        box = (colo_box_t){.extent = {rows, cols, elem},
                           .stride = {view.stride[1] * elem, view.stride[2] * elem, 1}};
    box.data = view.data ? view.data + first * elem : NULL;
    return box;
}
