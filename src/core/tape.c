/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tape.c - a reverse-mode tape: values, nodes, and the pool of gradient buffers.
 *
 * A tape is a list of nodes in the order they were recorded, which is a topological order: an input
 * is always recorded before the node that uses it. What backward does with it is tape-backward.c's.
 *
 * Buffers live in a pool: reset returns them, and the next step, which needs the same sizes, takes
 * them again. A small gradient does not take a large buffer, because it may live until reset while
 * the large one is needed for another. Versions, not copies, protect saved tensors; the tape owns
 * no activation.
 */
#include "core/tape.h"

#include "core/memory.h"
#include "core/error.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

/* Room for @more elements behind @n; the array may move. */
static colo_status_t grow(void **array, int64_t *cap, int64_t n, int64_t more, size_t elem)
{
    if (n + more <= *cap)
        return COLO_OK;
    int64_t want = *cap * 2 > n + more ? *cap * 2 : n + more + 16;
    void *moved = realloc(*array, (size_t)want * elem);
    COLO_FAIL_IF(!moved, COLO_ERR_NOMEM, "tape: %zu bytes", (size_t)want * elem);
    *array = moved;
    *cap = want;
    return COLO_OK;
}

colo_status_t colo_tape_take(colo_tape_t *tape, colo_mem_t mem, size_t bytes, void **data)
{
    struct colo_tape_buffer *best = NULL;
    for (int64_t i = 0; i < tape->npool; i++) {
        struct colo_tape_buffer *b = &tape->pool[i];
        if (!b->taken && b->mem == mem && b->bytes >= bytes && b->bytes / 2 <= bytes &&
            (!best || b->bytes < best->bytes))
            best = b;
    }
    if (!best) {
        COLO_TRY(grow((void **)&tape->pool, &tape->cap_pool, tape->npool, 1, sizeof *tape->pool));
        best = &tape->pool[tape->npool];
        *best = (struct colo_tape_buffer){.bytes = bytes, .mem = mem};
        colo_status_t st = colo_mem_alloc(mem, bytes ? bytes : 1, &best->data);
        if (st < 0)
            return colo_fail_prefix(st, "tape: gradient of %zu bytes", bytes);
        tape->npool++;
    }
    best->taken = true;
    *data = best->data;
    return COLO_OK;
}

void colo_tape_give(colo_tape_t *tape, const void *data)
{
    for (int64_t i = 0; i < tape->npool; i++)
        if (tape->pool[i].data == data)
            tape->pool[i].taken = false;
}

colo_status_t colo_tape_create(colo_tape_t **tape)
{
    COLO_FAIL_IF(!tape, COLO_ERR_ARG, "tape: the output is NULL");
    colo_tape_t *made = calloc(1, sizeof *made);
    COLO_FAIL_IF(!made, COLO_ERR_NOMEM, "tape: %zu bytes", sizeof *made);
    *tape = made;
    return COLO_OK;
}

static void node_free(struct colo_tape_node *n)
{
    if (n->free_state)
        n->free_state(n->state);
    free(n->in);
    free(n->saved);
    free(n->spare);
}

void colo_tape_set_stream(colo_tape_t *tape, colo_stream_t stream)
{
    if (tape)
        tape->stream = stream;
}

void colo_tape_reset(colo_tape_t *tape)
{
    if (!tape)
        return;
    for (int64_t i = tape->nnodes; i-- > 0;)
        node_free(&tape->nodes[i]);
    for (int64_t i = 0; i < tape->npool; i++)
        tape->pool[i].taken = false;
    tape->nnodes = tape->nvalues = 0;
    tape->ran = false;
}

void colo_tape_destroy(colo_tape_t **tape)
{
    if (!tape || !*tape)
        return;
    colo_tape_reset(*tape);
    for (int64_t i = 0; i < (*tape)->npool; i++)
        colo_mem_free((*tape)->pool[i].mem, (*tape)->pool[i].data);
    free((*tape)->pool);
    free((*tape)->nodes);
    free((*tape)->values);
    free(*tape);
    *tape = NULL;
}

/* ---- recording ---- */

static colo_status_t check_value_tensor(const colo_tensor_t *t, const char *what)
{
    COLO_TRY(colo_tensor_check(t, what));
    COLO_FAIL_IF(!colo_dtype_is_float(t->dtype), COLO_ERR_ARG,
                 "%s: dtype %s has no gradient, expected f32, f64, bf16 or f16", what,
                 colo_dtype_name(t->dtype));
    return COLO_OK;
}

colo_status_t colo_tape_check_like(const colo_tensor_t *g, const colo_tensor_t *t, const char *what,
                                   bool or_f32)
{
    COLO_TRY(check_value_tensor(g, what));
    COLO_FAIL_IF(g->mem != t->mem || g->device != t->device, COLO_ERR_ARG,
                 "%s: in %s memory (device %d), its value is in %s memory (device %d)", what,
                 g->mem == COLO_CUDA ? "CUDA" : "host", (int)g->device,
                 t->mem == COLO_CUDA ? "CUDA" : "host", (int)t->device);
    or_f32 &= colo_tape_is_half(t);
    COLO_FAIL_IF(g->dtype != t->dtype && !(or_f32 && g->dtype == COLO_F32), COLO_ERR_SHAPE,
                 "%s: dtype %s, its value is %s%s", what, colo_dtype_name(g->dtype),
                 colo_dtype_name(t->dtype), or_f32 ? "; expected that or f32" : "");
    COLO_FAIL_IF(g->ndim != t->ndim, COLO_ERR_SHAPE, "%s: %d axes, its value has %d", what,
                 (int)g->ndim, (int)t->ndim);
    for (int32_t i = 0; i < t->ndim; i++)
        COLO_FAIL_IF(g->shape[i] != t->shape[i], COLO_ERR_SHAPE,
                     "%s: axis %d has extent %" PRId64 ", its value has %" PRId64, what, (int)i,
                     g->shape[i], t->shape[i]);
    COLO_FAIL_IF(!colo_tensor_is_contiguous(g), COLO_ERR_SHAPE, "%s: not contiguous", what);
    return COLO_OK;
}

colo_status_t colo_tape_check_open(const colo_tape_t *tape, const char *what)
{
    COLO_FAIL_IF(!tape, COLO_ERR_ARG, "%s: tape is NULL", what);
    COLO_FAIL_IF(tape->ran, COLO_ERR_STATE,
                 "%s: backward has run on this tape of %" PRId64 " nodes; reset it and record anew",
                 what, tape->nnodes);
    return COLO_OK;
}

colo_status_t colo_tape_check_value(const colo_tape_t *tape, colo_value_t value, const char *what)
{
    COLO_FAIL_IF(value < 0 || value >= tape->nvalues, COLO_ERR_ARG,
                 "%s: value %d, the tape has %" PRId64 " values, from 0", what, (int)value,
                 tape->nvalues);
    return COLO_OK;
}

static colo_status_t check_capacity(const colo_tape_t *tape, int64_t more)
{
    COLO_FAIL_IF(tape->nvalues + more > INT32_MAX, COLO_ERR_ARG,
                 "tape: %" PRId64 " values, at most %d", tape->nvalues + more, INT32_MAX);
    return COLO_OK;
}

colo_status_t colo_tape_leaf(colo_tape_t *tape, const colo_tensor_t *t, const colo_tensor_t *d_t,
                             colo_value_t *value)
{
    COLO_TRY(colo_tape_check_open(tape, "leaf"));
    COLO_TRY(check_value_tensor(t, "leaf"));
    if (d_t)
        COLO_TRY(colo_tape_check_like(d_t, t, "d_t of a leaf", true));
    COLO_FAIL_IF(!value, COLO_ERR_ARG, "leaf: value is NULL");
    COLO_TRY(check_capacity(tape, 1));
    COLO_TRY(
        grow((void **)&tape->values, &tape->cap_values, tape->nvalues, 1, sizeof *tape->values));
    struct colo_tape_value *v = &tape->values[tape->nvalues];
    *v = (struct colo_tape_value){.t = *t, .node = -1};
    if (d_t)
        v->caller = *d_t;
    *value = (colo_value_t)tape->nvalues++;
    return COLO_OK;
}

static colo_status_t check_record(const colo_tape_t *tape, const colo_tape_record_t *r)
{
    COLO_TRY(colo_tape_check_open(tape, "record"));
    COLO_FAIL_IF(!r->name, COLO_ERR_ARG, "record: name is NULL");
    COLO_FAIL_IF(r->nin < 0 || r->nout < 1 || r->nsaved < 0, COLO_ERR_ARG,
                 "record '%s': %d inputs, %d outputs, %d saved tensors, expected >= 0, "
                 ">= 1, >= 0",
                 r->name, (int)r->nin, (int)r->nout, (int)r->nsaved);
    COLO_FAIL_IF((r->nin && !r->in) || !r->out || !r->out_values || (r->nsaved && !r->saved) ||
                     !r->backward,
                 COLO_ERR_ARG, "record '%s': %s is NULL", r->name,
                 r->nin && !r->in         ? "in"
                 : !r->out                ? "out"
                 : !r->out_values         ? "out_values"
                 : r->nsaved && !r->saved ? "saved"
                                          : "backward");
    for (int32_t i = 0; i < r->nin; i++)
        COLO_FAIL_IF(r->in[i] != COLO_NO_VALUE && (r->in[i] < 0 || r->in[i] >= tape->nvalues),
                     COLO_ERR_ARG, "record '%s': input %d is value %d, the tape has %" PRId64,
                     r->name, (int)i, (int)r->in[i], tape->nvalues);
    for (int32_t i = 0; i < r->nout; i++) {
        colo_status_t st = check_value_tensor(&r->out[i], "output");
        if (st < 0)
            return colo_fail_prefix(st, "record '%s': output %d", r->name, (int)i);
    }
    return check_capacity(tape, r->nout);
}

static colo_status_t append_node(colo_tape_t *tape, const colo_tape_record_t *r)
{
    COLO_TRY(grow((void **)&tape->values, &tape->cap_values, tape->nvalues, r->nout,
                  sizeof *tape->values));
    COLO_TRY(grow((void **)&tape->nodes, &tape->cap_nodes, tape->nnodes, 1, sizeof *tape->nodes));
    struct colo_tape_node n = {
        .nin = r->nin,
        .nout = r->nout,
        .nsaved = r->nsaved,
        .first_out = (int32_t)tape->nvalues,
        .in = calloc((size_t)r->nin + 1, sizeof *n.in),
        .saved = calloc((size_t)r->nsaved + 1, sizeof *n.saved),
        .spare = calloc((size_t)r->nin + 1, sizeof *n.spare),
        .backward = r->backward,
    };
    if (!n.in || !n.saved || !n.spare) {
        node_free(&n);
        return colo_fail(COLO_ERR_NOMEM, "record '%s': %d inputs, %d saved tensors", r->name,
                         (int)r->nin, (int)r->nsaved);
    }
    size_t len = strlen(r->name);
    memcpy(n.name, r->name, len < COLO_TAPE_NAME ? len : COLO_TAPE_NAME - 1);
    for (int32_t i = 0; i < r->nin; i++)
        n.in[i] = r->in[i];
    for (int32_t i = 0; i < r->nsaved; i++)
        n.saved[i] = (struct colo_tape_saved){r->saved[i].version,
                                              r->saved[i].version ? *r->saved[i].version : 0};
    for (int32_t i = 0; i < r->nout; i++)
        tape->values[tape->nvalues + i] =
            (struct colo_tape_value){.t = r->out[i], .node = (int32_t)tape->nnodes};
    tape->nvalues += r->nout;
    tape->nodes[tape->nnodes++] = n;
    return COLO_OK;
}

colo_status_t colo_tape_record(colo_tape_t *tape, const colo_tape_record_t *record)
{
    COLO_FAIL_IF(!record, COLO_ERR_ARG, "record: record is NULL");
    colo_status_t st = check_record(tape, record);
    if (st == COLO_OK)
        st = append_node(tape, record);
    if (st < 0) {
        if (record->free_state)
            record->free_state(record->state);
        return st;
    }
    struct colo_tape_node *n = &tape->nodes[tape->nnodes - 1];
    n->state = record->state;
    n->free_state = record->free_state;
    for (int32_t i = 0; i < record->nout; i++)
        record->out_values[i] = n->first_out + i;
    return COLO_OK;
}
