/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensors.c - the tensors of a call: the shapes that a rank passes, and what is wrong with those
 * that it passed, in words that name the rank and the tensor. A call of a uniform bridge has one
 * tensor a side; one of a batch several, of any number of features each.
 */
#include "bridge/call.h"

#include "core/error.h"
#include "core/overlap.h"

#include <stdio.h>

static int32_t shape_of(const colo_bridge_t *bridge, const colo_owned_t *own, int64_t *shape)
{
    if (bridge->axes.of[1] < 0) {
        shape[0] = (own->b1 - own->b0) * own->rows;
        shape[1] = own->h1 - own->h0;
        return 2;
    }
    shape[bridge->axes.of[0]] = own->b1 - own->b0;
    shape[bridge->axes.of[1]] = own->rows;
    shape[bridge->axes.of[2]] = own->h1 - own->h0;
    return 3;
}

int32_t colo_bridge_src_shape(const colo_bridge_t *bridge, int64_t *shape)
{
    return bridge && shape ? shape_of(bridge, &bridge->now.program.plan->own_src, shape) : 0;
}

int32_t colo_bridge_dst_shape(const colo_bridge_t *bridge, int64_t *shape)
{
    return bridge && shape ? shape_of(bridge, &bridge->now.program.plan->own_dst, shape) : 0;
}

/* ---- what both kinds have ---- */

static const char *in_name(const colo_call_t *call)
{
    return call->frame.pass == COLO_PASS_FORWARD ? "x" : "d_y";
}

static const char *out_name(const colo_call_t *call)
{
    return call->frame.pass == COLO_PASS_FORWARD ? "y" : "d_x";
}

static long long rank_of(const colo_call_t *call)
{
    return (long long)call->frame.program->plan->rank;
}

/* @st, whose words name the rank, too. */
static colo_status_t of_rank(const colo_call_t *call, colo_status_t st)
{
    return st < 0 ? colo_fail_prefix(st, "rank %lld", rank_of(call)) : COLO_OK;
}

/* Is @tensor where the bridge is? */
static colo_status_t check_memory(const colo_call_t *call, const colo_tensor_t *tensor,
                                  const char *what)
{
    const colo_mem_t mem = call->bridge->mem;
    if (tensor->mem == mem)
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG, "rank %lld: %s lives in %s memory, the bridge was made for %s",
                     rank_of(call), what, tensor->mem == COLO_MEM_HOST ? "host" : "cuda",
                     mem == COLO_MEM_HOST ? "host" : "cuda");
}

/* May kernels use this memory? Here, because here all ranks can be told. */
static colo_status_t check_pointer(colo_call_t *call, const colo_tensor_t *tensor, const char *what)
{
    if (!tensor || colo_tensor_count(tensor) <= 0)
        return COLO_OK;
    return of_rank(call, call->bridge->device->pointer_check(&call->queries, tensor->data,
                                                             tensor->device, what));
}

static colo_status_t check_stream(colo_call_t *call)
{
    return of_rank(
        call, call->bridge->device->stream_check(&call->queries, call->stream, &call->capturing));
}

/* ---- of a uniform bridge ---- */

static void shape_text(const int64_t *shape, int32_t n, char *text, size_t cap)
{
    colo_text_t list = {.data = text, .cap = cap};
    text[0] = '\0';
    for (int32_t i = 0; i < n; i++)
        colo_put(&list, "%s%lld", i ? ", " : "", (long long)shape[i]);
}

static colo_status_t check_uniform(const colo_call_t *call, const colo_tensor_t *tensor,
                                   const char *what, const colo_owned_t *own, bool output)
{
    const colo_bridge_t *bridge = call->bridge;
    int64_t want[3];
    int32_t n = shape_of(bridge, own, want);
    const long long rank = rank_of(call);
    bool empty = own->b1 == own->b0 || own->rows == 0 || own->h1 == own->h0;
    char found[160], expected[80];
    if (!tensor) {
        if (empty)
            return COLO_OK;
        shape_text(want, n, expected, sizeof expected);
        return colo_fail(COLO_ERR_ARG, "rank %lld: %s is NULL, expected [%s]", rank, what,
                         expected);
    }
    COLO_TRY(of_rank(call, colo_tensor_check(tensor, what)));
    if (empty && colo_tensor_count(tensor) == 0)
        return COLO_OK;
    bool same = tensor->ndim == n;
    for (int32_t i = 0; same && i < n; i++)
        same = tensor->shape[i] == want[i];
    if (!same) {
        shape_text(tensor->shape, tensor->ndim, found, sizeof found);
        shape_text(want, n, expected, sizeof expected);
        return colo_fail(COLO_ERR_SHAPE, "rank %lld: %s is [%s], expected [%s] (axes %s)%s", rank,
                         what, found, expected, bridge->axes.name,
                         empty ? "; this rank owns nothing of it: pass NULL" : "");
    }
    COLO_FAIL_IF(tensor->dtype != bridge->now.program.plan->config.dtype, COLO_ERR_SHAPE,
                 "rank %lld: %s is %s, the bridge carries %s", rank, what,
                 colo_dtype_name(tensor->dtype),
                 colo_dtype_name(bridge->now.program.plan->config.dtype));
    COLO_TRY(check_memory(call, tensor, what));
    for (int32_t i = 0; output && i < n; i++)
        COLO_FAIL_IF(
            tensor->shape[i] > 1 && tensor->stride[i] == 0, COLO_ERR_SHAPE,
            "rank %lld: %s has stride 0 along axis %d (%s): an output cannot repeat elements", rank,
            what, (int)i, colo_axis_names[n == 2 ? 2 * i : i]);
    if (output && colo_tensor_overlaps(tensor)) {
        shape_text(tensor->shape, n, expected, sizeof expected);
        shape_text(tensor->stride, n, found, sizeof found);
        return colo_fail(COLO_ERR_SHAPE,
                         "rank %lld: %s is [%s] with strides [%s], by which elements share an "
                         "address, expected an output without overlap",
                         rank, what, expected, found);
    }
    return COLO_OK;
}

/* @rows: of a sample, if axes are flat; a batch has one sample, and 0. */
static colo_view_t view_in(const colo_bridge_t *bridge, const colo_tensor_t *tensor, int64_t rows)
{
    if (!tensor || !tensor->data)
        return (colo_view_t){0};
    if (bridge->axes.of[1] < 0)
        return (colo_view_t){
            .data = tensor->data,
            .stride = {rows * tensor->stride[0], tensor->stride[0], tensor->stride[1]}};
    return (colo_view_t){.data = tensor->data,
                         .stride = {tensor->stride[bridge->axes.of[0]],
                                    tensor->stride[bridge->axes.of[1]],
                                    tensor->stride[bridge->axes.of[2]]}};
}

colo_status_t colo_call_check_uniform(colo_call_t *call)
{
    const colo_bridge_t *bridge = call->bridge;
    const colo_plan_t *plan = call->frame.program->plan;
    const bool forward = call->frame.pass == COLO_PASS_FORWARD;
    const colo_owned_t *own[2] = {forward ? &plan->own_src : &plan->own_dst,
                                  forward ? &plan->own_dst : &plan->own_src};
    const colo_tensor_t *in = call->in, *out = call->out;
    COLO_FAIL_IF(!forward && plan->config.no_grad, COLO_ERR_STATE,
                 "rank %lld: backward on a bridge created with no_grad", rank_of(call));
    COLO_TRY(check_uniform(call, in, in_name(call), own[0], false));
    COLO_TRY(check_uniform(call, out, out_name(call), own[1], true));
    COLO_FAIL_IF(in && out && !colo_tensors_apart(in, out), COLO_ERR_ARG,
                 "rank %lld: %s and %s overlap in memory", rank_of(call), in_name(call),
                 out_name(call));
    COLO_TRY(check_stream(call));
    COLO_TRY(check_pointer(call, in, in_name(call)));
    COLO_TRY(check_pointer(call, out, out_name(call)));
    call->carried[0] = (colo_carried_t){.in = view_in(bridge, in, own[0]->rows),
                                        .out = view_in(bridge, out, own[1]->rows),
                                        .per = 1,
                                        .dtype = plan->config.dtype};
    return COLO_OK;
}

/* ---- of a batch ---- */

/* Does this rank have to have a tensor on this side? */
bool colo_call_must_have(const colo_call_t *call, bool src_side)
{
    const colo_plan_t *plan = call->frame.program->plan;
    if (src_side)
        return plan->own_src.rows > 0;
    return plan->exchange[COLO_PASS_FORWARD][COLO_EXCHANGE_MAIN].recv.nregions +
               plan->local[COLO_PASS_FORWARD].nregions +
               plan->exchange[COLO_PASS_FORWARD][COLO_EXCHANGE_RELAYS].recv.nregions >
           0;
}

/* A tensor [rows, k * cols] of this rank; @per: out, k of it, -1 if there is none. */
static colo_status_t check_ragged(colo_call_t *call, int32_t i, bool output, int64_t *per)
{
    const colo_plan_t *plan = call->frame.program->plan;
    const bool src_side = (call->frame.pass == COLO_PASS_FORWARD) != output;
    const colo_tensor_t *all = output ? call->out : call->in, *tensor = all ? &all[i] : NULL;
    const colo_owned_t *own = src_side ? &plan->own_src : &plan->own_dst;
    const int64_t units = own->h1 - own->h0;
    const long long rank = rank_of(call);
    char name[32];
    snprintf(name, sizeof name, "%s[%d]", output ? out_name(call) : in_name(call), (int)i);
    *per = -1;
    const bool none = !tensor || (!tensor->data && tensor->ndim == 0);
    if (!colo_call_must_have(call, src_side) &&
        (none || (!tensor->data && colo_tensor_count(tensor) == 0)))
        return COLO_OK;
    COLO_FAIL_IF(none, COLO_ERR_ARG, "rank %lld: %s is NULL, expected [%lld, features]", rank, name,
                 (long long)own->rows);
    COLO_TRY(of_rank(call, colo_tensor_check(tensor, name)));
    if (!colo_call_must_have(call, src_side) && colo_tensor_count(tensor) == 0)
        return COLO_OK;
    COLO_FAIL_IF(tensor->ndim != 2, COLO_ERR_SHAPE,
                 "rank %lld: %s has %d axes, expected 2: rows and features", rank, name,
                 (int)tensor->ndim);
    COLO_FAIL_IF(tensor->shape[0] != own->rows, COLO_ERR_SHAPE,
                 "rank %lld: %s has %lld rows, expected %lld", rank, name,
                 (long long)tensor->shape[0], (long long)own->rows);
    COLO_FAIL_IF(units == 0 || tensor->shape[1] % units, COLO_ERR_SHAPE,
                 "rank %lld: %s has %lld features, expected a multiple of %lld", rank, name,
                 (long long)tensor->shape[1], (long long)units);
    COLO_TRY(check_memory(call, tensor, name));
    COLO_FAIL_IF(output && colo_tensor_overlaps(tensor), COLO_ERR_SHAPE,
                 "rank %lld: %s has strides [%lld, %lld], by which elements share an "
                 "address, expected an output without overlap",
                 rank, name, (long long)tensor->stride[0], (long long)tensor->stride[1]);
    *per = tensor->shape[1] / units;
    return check_pointer(call, tensor, name);
}

/* Output @i overlaps no input and no output before it. */
static colo_status_t check_apart(const colo_call_t *call, int32_t i)
{
    const int32_t n = call->frame.n;
    for (int32_t k = 0; k < n + i; k++) {
        const bool input = k < n;
        const colo_tensor_t *tensor = input ? (call->in ? &call->in[k] : NULL) : &call->out[k - n];
        COLO_FAIL_IF(tensor && tensor->data && colo_tensor_count(tensor) > 0 &&
                         !colo_tensors_apart(tensor, &call->out[i]),
                     COLO_ERR_ARG, "rank %lld: %s[%d] and %s[%d] overlap in memory", rank_of(call),
                     input ? in_name(call) : out_name(call), (int)(input ? k : k - n),
                     out_name(call), (int)i);
    }
    return COLO_OK;
}

static colo_status_t check_pair(colo_call_t *call, int32_t i)
{
    const colo_plan_t *plan = call->frame.program->plan;
    const colo_tensor_t *in = call->in ? &call->in[i] : NULL,
                        *out = call->out ? &call->out[i] : NULL;
    colo_carried_t *tensor = &call->carried[i];
    int64_t in_per, out_per;
    COLO_TRY(check_ragged(call, i, false, &in_per));
    COLO_TRY(check_ragged(call, i, true, &out_per));
    if (in_per < 0 && out_per < 0)
        return COLO_OK; /* this rank carries nothing of it */
    COLO_FAIL_IF(in_per >= 0 && out_per >= 0 && (in_per != out_per || in->dtype != out->dtype),
                 COLO_ERR_SHAPE,
                 "rank %lld: %s[%d] has %lld features of %s, %s[%d] %lld of %s, expected "
                 "one number and dtype",
                 rank_of(call), in_name(call), (int)i,
                 (long long)(in_per * plan->config.shape.features), colo_dtype_name(in->dtype),
                 out_name(call), (int)i, (long long)(out_per * plan->config.shape.features),
                 colo_dtype_name(out->dtype));
    tensor->per = in_per >= 0 ? in_per : out_per;
    tensor->dtype = in_per >= 0 ? in->dtype : out->dtype;
    tensor->in = view_in(call->bridge, in_per >= 0 ? in : NULL, 0);
    tensor->out = view_in(call->bridge, out_per >= 0 ? out : NULL, 0);
    if (out_per >= 0)
        COLO_TRY(check_apart(call, i));
    if (!colo_plan_adds(plan, call->frame.pass))
        return COLO_OK;
    COLO_FAIL_IF(!colo_dtype_is_float(tensor->dtype), COLO_ERR_ARG,
                 plan->names_rows
                     ? "rank %lld: %s[%d] is %s, which gradients of rows in %lld pieces at most are "
                       "not added up in; leave it out"
                     : "rank %lld: %s[%d] is %s, which PARTIAL gradients over %lld context ranks "
                       "are not added up in; leave it out",
                 rank_of(call), in_name(call), (int)i, colo_dtype_name(tensor->dtype),
                 (long long)plan->addends);
    tensor->in_partial = call->frame.partial_bytes;
    const size_t bytes = colo_partial_bytes(plan, tensor->per, tensor->dtype);
    call->frame.partial_bytes += (bytes + COLO_ALIGNMENT - 1) / COLO_ALIGNMENT * COLO_ALIGNMENT;
    return COLO_OK;
}

colo_status_t colo_call_check_batch(colo_call_t *call)
{
    colo_bridge_memory_t *memory = &call->bridge->memory;
    const int32_t n = call->frame.n;
    COLO_FAIL_IF(n < 1, COLO_ERR_ARG, "rank %lld: %d tensors, expected at least 1", rank_of(call),
                 (int)n);
    call->carried = colo_list_zeroed(&memory->carried, n, sizeof *call->carried);
    call->frame.tensor = call->carried;
    call->registered.tensor =
        colo_list_zeroed(&memory->registered, 2 * (int64_t)n, sizeof *call->registered.tensor);
    COLO_FAIL_IF(!call->carried || !call->registered.tensor, COLO_ERR_NOMEM, "bridge: %d tensors",
                 (int)n);
    COLO_TRY(check_stream(call));
    for (int32_t i = 0; i < n; i++)
        COLO_TRY(check_pair(call, i));
    return COLO_OK;
}
