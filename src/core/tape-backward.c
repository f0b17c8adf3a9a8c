/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tape-backward.c - which nodes of a tape run, in which order, and where gradients add up.
 *
 * Backward marks what the wanted value depends on, checks the versions of everything those nodes
 * saved, reserves every buffer, and only then runs the marked nodes from last to first. So a
 * refusal comes before any node has run.
 *
 * A node writes its input gradients; the tape adds, in the reverse order of recording. The first
 * gradient that reaches an fp32 or fp64 value is written straight into the value's buffer; each
 * later one (of another consumer, or of the same value twice in one node) is written into a spare
 * buffer and added. If several gradients reach a bf16 or fp16 value, they add up in an fp32 buffer,
 * and the last one rounds the sum into the value's buffer. A caller's own gradient (d_t of a leaf)
 * is added to once, after the last node has succeeded: a backward that fails leaves it as it was.
 *
 * Reserving goes through the nodes as running does: a buffer is taken for the first node that needs
 * it and given back after the last one, so another gradient takes the same memory. What a gradient
 * costs is known before any node runs. The gradient of a leaf lives until reset, so does that of a
 * value that was retained.
 *
 * A gradient lives in its value's kind of memory. On a device zeros, copies and sums are those of
 * device.h, enqueued on the tape's stream, and the host waits for nothing: a node enqueues there,
 * too.
 */
#include "core/range.h"
#include "core/tape.h"

#include "core/box.h"
#include "core/memory.h"
#include "core/device.h"
#include "core/error.h"
#include "core/scalar.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- elements ---- */

static size_t bytes_of(const colo_tensor_t *tensor)
{
    return (size_t)colo_tensor_count(tensor) * colo_dtype_size(tensor->dtype);
}

/* A contiguous gradient is one long box. */
static colo_box_t line(void *data, const colo_tensor_t *like)
{
    return colo_box_rows(data, 1, colo_tensor_count(like), 0);
}

/* sum += more, both of @dtype. */
static colo_status_t add_to(const colo_tape_t *tape, void *sum, void *more, colo_dtype_t dtype,
                            const colo_tensor_t *like)
{
    const colo_device_t *device;
    COLO_TRY(colo_device_for(like->mem, &device));
    colo_box_t to = line(sum, like), addends[] = {to, line(more, like)};
    return device->box_sum(&to, addends, 2, dtype, tape->stream);
}

/* to = wide + half, rounded once if @to is not fp32. wide NULL: zeros. */
static colo_status_t add_half(const colo_tape_t *tape, void *to, colo_dtype_t to_dtype,
                              const float *wide, const void *half, const colo_tensor_t *like)
{
    const colo_device_t *device;
    COLO_TRY(colo_device_for(like->mem, &device));
    return device->half_sum(to, to_dtype, wide, half, like->dtype, colo_tensor_count(like),
                            tape->stream);
}

static colo_status_t copy_to(const colo_tape_t *tape, void *to, const void *from,
                             const colo_tensor_t *like)
{
    const colo_device_t *device;
    COLO_TRY(colo_device_for(like->mem, &device));
    colo_box_t dst = line(to, like), src = line((void *)from, like);
    return device->box_copy(&dst, &src, colo_dtype_size(like->dtype), tape->stream);
}

COLO_INLINE void put_ones(colo_dtype_t dtype, void *data, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        colo_scalar_put(dtype, data, i, 1);
}

static void fill_ones(void *data, const colo_tensor_t *like)
{
    COLO_FOR_FLOAT(like->dtype, put_ones, data, colo_tensor_count(like))
}

/* A value's gradient as a contiguous view of @data. */
static colo_tensor_t grad_view(const struct colo_tape_value *value, void *data)
{
    colo_tensor_t gradient =
        colo_tensor_host(data, value->tensor.dtype, value->tensor.ndim, value->tensor.shape);
    gradient.mem = value->tensor.mem;
    gradient.device = value->tensor.device;
    return gradient;
}

/* ---- backward ---- */

static bool is_wanted(const colo_tape_t *tape, const struct colo_tape_node *node)
{
    for (int32_t i = 0; i < node->nout; i++)
        if (tape->values[node->first_out + i].wanted)
            return true;
    return false;
}

static void mark_needed(colo_tape_t *tape, colo_value_t from)
{
    for (int64_t i = 0; i < tape->nvalues; i++) {
        tape->values[i].wanted = false;
        tape->values[i].uses = 0;
    }
    tape->values[from].wanted = true;
    tape->values[from].uses = 1; /* the seed */
    for (int64_t index = tape->nnodes; index-- > 0;) {
        const struct colo_tape_node *node = &tape->nodes[index];
        if (!is_wanted(tape, node))
            continue;
        for (int32_t i = 0; i < node->nin; i++)
            if (node->in[i] != COLO_NO_VALUE) {
                tape->values[node->in[i]].wanted = true;
                tape->values[node->in[i]].uses++;
            }
    }
}

static colo_status_t check_versions(const colo_tape_t *tape)
{
    for (int64_t index = 0; index < tape->nnodes; index++) {
        const struct colo_tape_node *node = &tape->nodes[index];
        if (!is_wanted(tape, node))
            continue;
        for (int32_t i = 0; i < node->nsaved; i++)
            COLO_FAIL_IF(
                node->saved[i].version && *node->saved[i].version != node->saved[i].expected,
                COLO_ERR_MODIFIED,
                "node %" PRId64 " '%s': saved tensor %d was written after it was "
                "saved: version %" PRIu64 ", saved at %" PRIu64,
                index, node->name, (int)i, *node->saved[i].version, node->saved[i].expected);
    }
    return COLO_OK;
}

static bool adds_in_f32(const struct colo_tape_value *value)
{
    return colo_tape_is_half(&value->tensor) && value->uses > 1;
}

/* Where input @i of @node is to be written: its value's own buffer, or a spare one. */
static colo_status_t reserve_input(colo_tape_t *tape, struct colo_tape_node *node, int32_t i)
{
    node->spare[i] = NULL;
    if (node->in[i] == COLO_NO_VALUE)
        return COLO_OK;
    struct colo_tape_value *value = &tape->values[node->in[i]];
    const size_t bytes = bytes_of(&value->tensor);
    void *sum = value->sum;
    bool own = ++value->seen == 1;
    if (adds_in_f32(value)) {
        if (own)
            COLO_TRY(colo_tape_take(tape, value->tensor.mem, bytes * 2, &sum)); /* 4 bytes for 2 */
        value->sum = sum;
        own = value->seen == value->uses && !value->caller.data;
    }
    return colo_tape_take(tape, value->tensor.mem, bytes, own ? &value->grad : &node->spare[i]);
}

/* The buffers of one node; those that nothing needs afterwards are free again. */
static colo_status_t reserve_node(colo_tape_t *tape, struct colo_tape_node *node)
{
    for (int32_t i = 0; i < node->nout; i++) {
        struct colo_tape_value *value = &tape->values[node->first_out + i];
        if (!value->grad)
            COLO_TRY(
                colo_tape_take(tape, value->tensor.mem, bytes_of(&value->tensor), &value->grad));
    }
    for (int32_t i = 0; i < node->nin; i++)
        COLO_TRY(reserve_input(tape, node, i));
    for (int32_t i = 0; i < node->nin; i++) {
        const struct colo_tape_value *value =
            node->in[i] == COLO_NO_VALUE ? NULL : &tape->values[node->in[i]];
        colo_tape_give(tape, node->spare[i]);
        if (value && value->seen == value->uses && !value->caller.data)
            colo_tape_give(tape, value->sum);
    }
    for (int32_t i = 0; i < node->nout; i++)
        if (!tape->values[node->first_out + i].retained)
            colo_tape_give(tape, tape->values[node->first_out + i].grad);
    return COLO_OK;
}

static void forget_seen(colo_tape_t *tape)
{
    for (int64_t i = 0; i < tape->nvalues; i++)
        tape->values[i].seen = 0;
}

/* Every buffer that running the nodes will need. On failure none. */
static colo_status_t reserve(colo_tape_t *tape, struct colo_tape_value *from)
{
    colo_status_t st = colo_tape_take(tape, from->tensor.mem, bytes_of(&from->tensor), &from->grad);
    from->seen = 1;
    for (int64_t index = tape->nnodes; st == COLO_OK && index-- > 0;)
        if (is_wanted(tape, &tape->nodes[index]))
            st = reserve_node(tape, &tape->nodes[index]);
    forget_seen(tape);
    for (int64_t i = 0; st < 0 && i < tape->nvalues; i++)
        tape->values[i].grad = tape->values[i].sum = NULL;
    for (int64_t i = 0; st < 0 && i < tape->npool; i++)
        tape->pool[i].taken = false;
    return st;
}

/* What a node wrote for its input @i joins what others wrote. */
static colo_status_t collect(const colo_tape_t *tape, const struct colo_tape_node *node, int32_t i)
{
    if (node->in[i] == COLO_NO_VALUE)
        return COLO_OK;
    struct colo_tape_value *value = &tape->values[node->in[i]];
    void *spare = node->spare[i];
    bool first = ++value->seen == 1;
    if (!adds_in_f32(value))
        return first ? COLO_OK
                     : add_to(tape, value->grad, spare, value->tensor.dtype, &value->tensor);
    if (!spare) /* the last of several */
        return add_half(tape, value->grad, value->tensor.dtype, value->sum, value->grad,
                        &value->tensor);
    return add_half(tape, value->sum, COLO_F32, first ? NULL : value->sum, spare, &value->tensor);
}

/* Adds what reached a leaf to the caller's gradient. */
static colo_status_t deliver(const colo_tape_t *tape, const struct colo_tape_value *value)
{
    const colo_tensor_t *to = &value->caller;
    if (value->sum && to->dtype == COLO_F32)
        return add_to(tape, to->data, value->sum, COLO_F32, to);
    if (value->sum)
        return add_half(tape, to->data, to->dtype, value->sum, to->data, to);
    if (to->dtype == value->tensor.dtype)
        return add_to(tape, to->data, value->grad, to->dtype, to);
    return add_half(tape, to->data, COLO_F32, to->data, value->grad, &value->tensor);
}

static colo_status_t run_node(colo_tape_t *tape, int64_t index)
{
    struct colo_tape_node *node = &tape->nodes[index];
    COLO_AUTOFREE void *views =
        calloc((size_t)node->nin + (size_t)node->nout, sizeof(colo_tensor_t));
    COLO_FAIL_IF(!views, COLO_ERR_NOMEM, "node %" PRId64 " '%s': %d views", index, node->name,
                 (int)(node->nin + node->nout));
    colo_tensor_t *d_out = views, *d_in = d_out + node->nout;
    for (int32_t i = 0; i < node->nout; i++) {
        struct colo_tape_value *value = &tape->values[node->first_out + i];
        if (!value->seen)
            COLO_TRY(colo_mem_zero(value->tensor.mem, value->grad, bytes_of(&value->tensor),
                                   tape->stream));
        d_out[i] = grad_view(value, value->grad);
    }
    for (int32_t i = 0; i < node->nin; i++) {
        const struct colo_tape_value *value =
            node->in[i] == COLO_NO_VALUE ? NULL : &tape->values[node->in[i]];
        d_in[i] = value ? grad_view(value, node->spare[i] ? node->spare[i] : value->grad)
                        : (colo_tensor_t){.device = -1};
    }
    colo_status_t st = node->backward(d_out, node->nout, d_in, node->nin, node->state);
    if (st < 0)
        return colo_fail_prefix(st, "node %" PRId64 " '%s'", index, node->name);
    for (int32_t i = 0; i < node->nin; i++)
        COLO_TRY(collect(tape, node, i));
    return COLO_OK;
}

colo_status_t colo_tape_backward(colo_tape_t *tape, colo_value_t value, const colo_tensor_t *seed)
{
    COLO_RANGE();
    COLO_TRY(colo_tape_check_open(tape, "backward"));
    COLO_TRY(colo_tape_check_value(tape, value, "backward"));
    struct colo_tape_value *from = &tape->values[value];
    if (seed)
        COLO_TRY(colo_tape_check_like(seed, &from->tensor, "seed", false));
    else if (from->tensor.mem != COLO_MEM_HOST)
        return colo_fail(COLO_ERR_ARG,
                         "backward: seed is NULL, which stands for ones on the host; "
                         "value %d is in CUDA memory and needs one",
                         (int)value);
    mark_needed(tape, value);
    COLO_TRY(check_versions(tape));
    COLO_TRY(reserve(tape, from));

    tape->ran = true; /* from here on nodes may have used up what they saved */
    if (seed && bytes_of(&from->tensor))
        COLO_TRY(copy_to(tape, from->grad, seed->data, &from->tensor));
    if (!seed)
        fill_ones(from->grad, &from->tensor);
    from->seen = 1;
    for (int64_t index = tape->nnodes; index-- > 0;)
        if (is_wanted(tape, &tape->nodes[index])) {
            colo_status_t st = run_node(tape, index);
            if (st < 0) {
                forget_seen(tape);
                return st;
            }
        }
    for (int64_t i = 0; i < tape->nvalues; i++) {
        const struct colo_tape_value *reached = &tape->values[i];
        if (reached->seen && reached->caller.data)
            COLO_TRY(deliver(tape, reached));
    }
    return COLO_OK;
}

colo_status_t colo_tape_retain_gradient(colo_tape_t *tape, colo_value_t value)
{
    COLO_TRY(colo_tape_check_open(tape, "retain_gradient"));
    COLO_TRY(colo_tape_check_value(tape, value, "retain_gradient"));
    tape->values[value].retained = true;
    return COLO_OK;
}

colo_status_t colo_tape_gradient(const colo_tape_t *tape, colo_value_t value,
                                 colo_tensor_t *d_value)
{
    COLO_FAIL_IF(!tape, COLO_ERR_ARG, "gradient: tape is NULL");
    COLO_TRY(colo_tape_check_value(tape, value, "gradient"));
    COLO_FAIL_IF(!d_value, COLO_ERR_ARG, "gradient: d_value is NULL");
    const struct colo_tape_value *found = &tape->values[value];
    COLO_FAIL_IF(!found->seen, COLO_ERR_MISSING, "gradient: none reached value %d%s", (int)value,
                 tape->ran ? "" : "; backward has not run");
    COLO_FAIL_IF(found->node >= 0 && !found->retained, COLO_ERR_MISSING,
                 "gradient: that of value %d was released when node %d '%s' had run; call "
                 "colo_tape_retain_gradient() before backward to keep it",
                 (int)value, (int)found->node, tape->nodes[found->node].name);
    *d_value = found->caller.data ? found->caller : grad_view(found, found->grad);
    return COLO_OK;
}
