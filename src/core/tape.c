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
#include "core/sized.h"

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
        struct colo_tape_buffer *buffer = &tape->pool[i];
        if (!buffer->taken && buffer->mem == mem && buffer->bytes >= bytes &&
            buffer->bytes / 2 <= bytes && (!best || buffer->bytes < best->bytes))
            best = buffer;
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

static void node_free(struct colo_tape_node *node)
{
    if (node->free_state)
        node->free_state(node->state);
    free(node->in);
    free(node->saved);
    free(node->spare);
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

static colo_status_t check_value_tensor(const colo_tensor_t *tensor, const char *what)
{
    COLO_TRY(colo_tensor_check(tensor, what));
    COLO_FAIL_IF(!colo_dtype_is_float(tensor->dtype), COLO_ERR_ARG,
                 "%s: dtype %s has no gradient, expected f32, f64, bf16 or f16", what,
                 colo_dtype_name(tensor->dtype));
    return COLO_OK;
}

colo_status_t colo_tape_check_like(const colo_tensor_t *gradient, const colo_tensor_t *tensor,
                                   const char *what, bool or_f32)
{
    COLO_TRY(check_value_tensor(gradient, what));
    COLO_FAIL_IF(gradient->mem != tensor->mem ||
                     (tensor->mem == COLO_MEM_CUDA && gradient->device != tensor->device),
                 COLO_ERR_ARG,
                 "%s: in %s memory (device %d), its value is in %s memory (device %d)", what,
                 gradient->mem == COLO_MEM_CUDA ? "CUDA" : "host", (int)gradient->device,
                 tensor->mem == COLO_MEM_CUDA ? "CUDA" : "host", (int)tensor->device);
    or_f32 &= colo_tape_is_half(tensor);
    COLO_FAIL_IF(gradient->dtype != tensor->dtype && !(or_f32 && gradient->dtype == COLO_F32),
                 COLO_ERR_SHAPE, "%s: dtype %s, its value is %s%s", what,
                 colo_dtype_name(gradient->dtype), colo_dtype_name(tensor->dtype),
                 or_f32 ? "; expected that or f32" : "");
    COLO_FAIL_IF(gradient->ndim != tensor->ndim, COLO_ERR_SHAPE, "%s: %d axes, its value has %d",
                 what, (int)gradient->ndim, (int)tensor->ndim);
    for (int32_t i = 0; i < tensor->ndim; i++)
        COLO_FAIL_IF(gradient->shape[i] != tensor->shape[i], COLO_ERR_SHAPE,
                     "%s: axis %d has extent %" PRId64 ", its value has %" PRId64, what, (int)i,
                     gradient->shape[i], tensor->shape[i]);
    COLO_FAIL_IF(!colo_tensor_is_contiguous(gradient), COLO_ERR_SHAPE, "%s: not contiguous", what);
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

colo_status_t colo_tape_leaf(colo_tape_t *tape, const colo_tensor_t *tensor,
                             const colo_tensor_t *d_t, colo_value_t *value)
{
    COLO_TRY(colo_tape_check_open(tape, "leaf"));
    COLO_TRY(check_value_tensor(tensor, "leaf"));
    if (d_t)
        COLO_TRY(colo_tape_check_like(d_t, tensor, "d_t of a leaf", true));
    COLO_FAIL_IF(!value, COLO_ERR_ARG, "leaf: value is NULL");
    COLO_TRY(check_capacity(tape, 1));
    COLO_TRY(
        grow((void **)&tape->values, &tape->cap_values, tape->nvalues, 1, sizeof *tape->values));
    struct colo_tape_value *leaf = &tape->values[tape->nvalues];
    *leaf = (struct colo_tape_value){.tensor = *tensor, .node = -1};
    if (d_t)
        leaf->caller = *d_t;
    *value = (colo_value_t)tape->nvalues++;
    return COLO_OK;
}

static colo_status_t check_record(const colo_tape_t *tape, const colo_tape_record_t *record)
{
    COLO_TRY(colo_tape_check_open(tape, "record"));
    COLO_FAIL_IF(!record->name, COLO_ERR_ARG, "record: name is NULL");
    COLO_FAIL_IF(record->nin < 0 || record->nout < 1 || record->nsaved < 0, COLO_ERR_ARG,
                 "record '%s': %d inputs, %d outputs, %d saved tensors, expected >= 0, >= 1, >= 0",
                 record->name, (int)record->nin, (int)record->nout, (int)record->nsaved);
    COLO_FAIL_IF((record->nin && !record->in) || !record->out || !record->out_values ||
                     (record->nsaved && !record->saved) || !record->backward,
                 COLO_ERR_ARG, "record '%s': %s is NULL", record->name,
                 record->nin && !record->in         ? "in"
                 : !record->out                     ? "out"
                 : !record->out_values              ? "out_values"
                 : record->nsaved && !record->saved ? "saved"
                                                    : "backward");
    for (int32_t i = 0; i < record->nin; i++)
        COLO_FAIL_IF(record->in[i] != COLO_NO_VALUE &&
                         (record->in[i] < 0 || record->in[i] >= tape->nvalues),
                     COLO_ERR_ARG, "record '%s': input %d is value %d, the tape has %" PRId64,
                     record->name, (int)i, (int)record->in[i], tape->nvalues);
    for (int32_t i = 0; i < record->nout; i++) {
        colo_status_t st = check_value_tensor(&record->out[i], "output");
        if (st < 0)
            return colo_fail_prefix(st, "record '%s': output %d", record->name, (int)i);
    }
    return check_capacity(tape, record->nout);
}

static colo_status_t append_node(colo_tape_t *tape, const colo_tape_record_t *record)
{
    COLO_TRY(grow((void **)&tape->values, &tape->cap_values, tape->nvalues, record->nout,
                  sizeof *tape->values));
    COLO_TRY(grow((void **)&tape->nodes, &tape->cap_nodes, tape->nnodes, 1, sizeof *tape->nodes));
    struct colo_tape_node node = {
        .nin = record->nin,
        .nout = record->nout,
        .nsaved = record->nsaved,
        .first_out = (int32_t)tape->nvalues,
        .in = calloc((size_t)record->nin + 1, sizeof *node.in),
        .saved = calloc((size_t)record->nsaved + 1, sizeof *node.saved),
        .spare = calloc((size_t)record->nin + 1, sizeof *node.spare),
        .backward = record->backward,
    };
    if (!node.in || !node.saved || !node.spare) {
        node_free(&node);
        return colo_fail(COLO_ERR_NOMEM, "record '%s': %d inputs, %d saved tensors", record->name,
                         (int)record->nin, (int)record->nsaved);
    }
    size_t len = strlen(record->name);
    memcpy(node.name, record->name, len < COLO_TAPE_NAME ? len : COLO_TAPE_NAME - 1);
    for (int32_t i = 0; i < record->nin; i++)
        node.in[i] = record->in[i];
    for (int32_t i = 0; i < record->nsaved; i++)
        node.saved[i] = (struct colo_tape_saved){
            record->saved[i].version, record->saved[i].version ? *record->saved[i].version : 0};
    for (int32_t i = 0; i < record->nout; i++)
        tape->values[tape->nvalues + i] =
            (struct colo_tape_value){.tensor = record->out[i], .node = (int32_t)tape->nnodes};
    tape->nvalues += record->nout;
    tape->nodes[tape->nnodes++] = node;
    return COLO_OK;
}

colo_status_t colo_tape_record(colo_tape_t *tape, const colo_tape_record_t *record)
{
    colo_tape_record_t own = {COLO_TAPE_RECORD_INIT};
    COLO_TRY(COLO_SIZED_READ(&own, record, state, "record: record", "COLO_TAPE_RECORD_INIT"));
    record = &own;
    colo_status_t st = check_record(tape, record);
    COLO_THEN(st, append_node(tape, record));
    if (st < 0) {
        if (record->free_state)
            record->free_state(record->state);
        return st;
    }
    struct colo_tape_node *node = &tape->nodes[tape->nnodes - 1];
    node->state = record->state;
    node->free_state = record->free_state;
    for (int32_t i = 0; i < record->nout; i++)
        record->out_values[i] = node->first_out + i;
    return COLO_OK;
}
