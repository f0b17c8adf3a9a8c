/* SPDX-License-Identifier: Apache-2.0 */
/*
 * program.c - what each pass of the lm_head path does, as a list of steps.
 *
 * Every pass is one pipeline over chunks of rows. On the caller's stream: rows are taken, the
 * product makes logits in one of two buffers; then, a chunk later, the products of the gradients
 * read what the auxiliary stream has made of them. On the auxiliary stream: statistics, merge,
 * gather, gradient of a chunk, while the caller's stream is at the next product. The passes differ
 * in what that stream does:
 *
 *   forward   statistics; after the last chunk one gather for all rows, and the merge
 *   backward  the gradient, from the saved statistics, of a chunk's blocks of columns
 *   loss      statistics, a gather (several ranks), merge and gradient of the chunk
 *   early     forward as loss, but the gradient stays in saved memory; backward nothing
 *
 * The head is taken once before the units and released after them, whether or not this rank has a
 * token: the other ranks of its group are in the same pass. d_W is reduced once after them.
 */
#include "loss/linear/workspace.h"

#include "comm/comm.h"

static void add(struct colo_linear_program *program, uint8_t kind, uint8_t when)
{
    const uint32_t aux =
        1u << COLO_STEP_STATISTICS | 1u << COLO_STEP_MERGE | 1u << COLO_STEP_OUTPUTS;
    program->step[program->n++] =
        (struct colo_linear_step){.kind = kind, .when = when, .aux = aux >> kind & 1};
    program->kinds |= 1u << kind;
}

/* RECORD or WAIT */
static void add_event(struct colo_linear_program *program, uint8_t kind, uint8_t event, bool aux,
                      uint8_t when)
{
    add(program, kind, when);
    program->step[program->n - 1].event = event;
    program->step[program->n - 1].aux = aux;
}

/* On the caller's stream, when the auxiliary stream has made d_logits. */
static void add_grads(const colo_linear_logprob_t *linear, struct colo_linear_size *size)
{
    struct colo_linear_program *program = &size->program;
    const bool hidden = !linear->config.frozen_hidden, weight = !linear->config.frozen_weight;
    if ((size->pass != COLO_LINEAR_BACKWARD && size->pass != COLO_LINEAR_LOSS) ||
        (!hidden && !weight))
        return;
    add_event(program, COLO_STEP_WAIT, COLO_EVENT_WORK, false, COLO_WHEN_PAST);
    if (hidden && !size->d_hidden_last)
        add(program, COLO_STEP_D_HIDDEN, COLO_WHEN_PAST);
    if (weight)
        add(program, COLO_STEP_D_WEIGHT, COLO_WHEN_PAST);
    if (hidden && size->d_hidden_last)
        add(program, COLO_STEP_D_HIDDEN, COLO_WHEN_PAST);
    if (weight && size->early && size->inside > 0)
        add(program, COLO_STEP_UNSTAGE, COLO_WHEN_PAST);
}

void colo_linear_i_program(const colo_linear_logprob_t *linear, bool makes_logits, bool takes_head,
                           struct colo_linear_size *size)
{
    struct colo_linear_program *program = &size->program;
    const bool back = size->pass == COLO_LINEAR_BACKWARD, loss = size->pass == COLO_LINEAR_LOSS;
    const bool alone = colo_comm_size(linear->group) == 1, each = size->piecewise || alone;
    const bool trains = !(linear->config.frozen_hidden && linear->config.frozen_weight);
    const bool over = size->joined > 1 && size->in_place; /* logits come where d_logits are */
    if (takes_head)
        add(program, COLO_STEP_TAKE_HEAD, COLO_WHEN_BEFORE);
    if (over)
        add_grads(linear, size);
    /* the auxiliary stream has read what was in this buffer */
    add_event(program, COLO_STEP_WAIT, COLO_EVENT_WORK, false, COLO_WHEN_UNIT);
    add(program, COLO_STEP_TAKE_ROWS, COLO_WHEN_CHUNK);
    if (makes_logits)
        add(program, COLO_STEP_LOGITS, COLO_WHEN_UNIT);
    add_event(program, COLO_STEP_RECORD, COLO_EVENT_LOGITS, false, COLO_WHEN_UNIT);
    if (!over)
        add_grads(linear, size);
    add_event(program, COLO_STEP_WAIT, COLO_EVENT_LOGITS, true, COLO_WHEN_UNIT);
    if (!back)
        add(program, COLO_STEP_STATISTICS, COLO_WHEN_UNIT);
    if (size->piecewise && !alone)
        add(program, COLO_STEP_GATHER, COLO_WHEN_UNIT);
    if (!back && each)
        add(program, COLO_STEP_MERGE, COLO_WHEN_UNIT);
    if (size->joined > 1) { /* products have read what was there before */
        add_event(program, COLO_STEP_RECORD, COLO_EVENT_MAIN, false, COLO_WHEN_JOINED);
        add_event(program, COLO_STEP_WAIT, COLO_EVENT_MAIN, true, COLO_WHEN_JOINED);
    }
    if (trains && (size->early ? size->pass == COLO_LINEAR_FORWARD : back || loss))
        add(program, COLO_STEP_D_LOGITS, COLO_WHEN_UNIT);
    add_event(program, COLO_STEP_RECORD, COLO_EVENT_WORK, true, COLO_WHEN_UNIT);
    if (!back && !each) {
        add(program, COLO_STEP_GATHER, COLO_WHEN_AFTER);
        add(program, COLO_STEP_MERGE, COLO_WHEN_AFTER);
    }
    if (!back)
        add(program, COLO_STEP_OUTPUTS, COLO_WHEN_AFTER);
    add_event(program, COLO_STEP_RECORD, COLO_EVENT_AUX, true, COLO_WHEN_AFTER);
    add_event(program, COLO_STEP_WAIT, COLO_EVENT_AUX, false, COLO_WHEN_AFTER);
    add(program, COLO_STEP_BARRIER, COLO_WHEN_AFTER); /* the last product, too, is behind all */
    if (takes_head)
        add(program, COLO_STEP_RELEASE_HEAD, COLO_WHEN_AFTER);
    if (colo_linear_has(size, COLO_STEP_D_WEIGHT))
        add(program, COLO_STEP_REDUCE, COLO_WHEN_AFTER);
}
