/* SPDX-License-Identifier: Apache-2.0 */
/*
 * calls.c - forward and backward of a uniform bridge: checks each call's tensors, and hands over to
 * an algorithm.
 *
 * Decides what is an error, on which ranks, and what happens to the communicator then. Movement is
 * a program (EXACT) or collective.c; declared preconditions are verify.c. The bridge keeps nothing
 * of a forward, so any number of forwards may be outstanding before their backwards.
 */
#include "bridge/ragged.h"
#include "bridge/run/over-peers.h"

#include "comm/comm.h"
#include "core/device.h"
#include "core/env.h"
#include "core/error.h"
#include "core/overlap.h"
#include "core/range.h"

#include <stdio.h>
#include <string.h>

static const char *const axis_words[] = {"samples", "rows", "features"};

static int32_t shape_of(const colo_bridge_t *b, const colo_owned_t *own, int64_t *shape)
{
    if (b->axis[1] < 0) {
        shape[0] = (own->b1 - own->b0) * own->rows;
        shape[1] = own->h1 - own->h0;
        return 2;
    }
    shape[b->axis[0]] = own->b1 - own->b0;
    shape[b->axis[1]] = own->rows;
    shape[b->axis[2]] = own->h1 - own->h0;
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

/* ---- tensors of a call ---- */

static void shape_text(const int64_t *shape, int32_t n, char *text, size_t cap)
{
    size_t pos = 0;
    text[0] = '\0';
    for (int32_t i = 0; i < n && pos < cap; i++) {
        int w = snprintf(text + pos, cap - pos, "%s%lld", i ? ", " : "", (long long)shape[i]);
        pos += w > 0 ? (size_t)w : 0;
    }
}

static colo_status_t check_tensor(const colo_bridge_t *b, const colo_tensor_t *t, const char *what,
                                  const colo_owned_t *own, bool output)
{
    int64_t want[3];
    int32_t n = shape_of(b, own, want);
    long long rank = (long long)b->now.program.plan->rank;
    bool empty = own->b1 == own->b0 || own->rows == 0 || own->h1 == own->h0;
    char found[160], expected[80];
    if (!t) {
        if (empty)
            return COLO_OK;
        shape_text(want, n, expected, sizeof expected);
        return colo_fail(COLO_ERR_ARG, "rank %lld: %s is NULL, expected [%s]", rank, what,
                         expected);
    }
    if (colo_tensor_check(t, what) < 0) {
        colo_status_t st = colo_tensor_check(t, what);
        return colo_fail_prefix(st, "rank %lld", rank);
    }
    if (empty && colo_tensor_count(t) == 0)
        return COLO_OK;
    bool same = t->ndim == n;
    for (int32_t i = 0; same && i < n; i++)
        same = t->shape[i] == want[i];
    if (!same) {
        shape_text(t->shape, t->ndim, found, sizeof found);
        shape_text(want, n, expected, sizeof expected);
        return colo_fail(COLO_ERR_SHAPE, "rank %lld: %s is [%s], expected [%s] (axes %s)%s", rank,
                         what, found, expected, b->axes,
                         empty ? "; this rank owns nothing of it: pass NULL" : "");
    }
    if (t->dtype != b->now.program.plan->config.dtype)
        return colo_fail(COLO_ERR_SHAPE, "rank %lld: %s is %s, the bridge carries %s", rank, what,
                         colo_dtype_name(t->dtype),
                         colo_dtype_name(b->now.program.plan->config.dtype));
    if (t->mem != b->mem)
        return colo_fail(
            COLO_ERR_ARG, "rank %lld: %s lives in %s memory, the bridge was made for %s", rank,
            what, t->mem == COLO_HOST ? "host" : "cuda", b->mem == COLO_HOST ? "host" : "cuda");
    for (int32_t i = 0; output && i < n; i++)
        if (t->shape[i] > 1 && t->stride[i] == 0)
            return colo_fail(
                COLO_ERR_SHAPE,
                "rank %lld: %s has stride 0 along axis %d (%s): an output cannot repeat elements",
                rank, what, (int)i, axis_words[n == 2 ? 2 * i : i]);
    if (output && colo_tensor_overlaps(t)) {
        shape_text(t->shape, n, expected, sizeof expected);
        shape_text(t->stride, n, found, sizeof found);
        return colo_fail(COLO_ERR_SHAPE,
                         "rank %lld: %s is [%s] with strides [%s], by which elements share an "
                         "address, expected an output without overlap",
                         rank, what, expected, found);
    }
    return COLO_OK;
}

static colo_status_t check_apart(const colo_bridge_t *b, const colo_tensor_t *in,
                                 const colo_tensor_t *out, const char *in_name,
                                 const char *out_name)
{
    if (!in || !out || colo_tensors_apart(in, out))
        return COLO_OK;
    return colo_fail(COLO_ERR_ARG, "rank %lld: %s and %s overlap in memory",
                     (long long)b->now.program.plan->rank, in_name, out_name);
}

/* ---- calls ---- */

/* May kernels use this memory and this stream? Here, because here all ranks can be told. */
static colo_status_t check_places(const colo_bridge_t *b, const colo_tensor_t *in,
                                  const colo_tensor_t *out, const char *in_name,
                                  const char *out_name, colo_stream_t stream, colo_queries_t *q,
                                  bool *capturing)
{
    const colo_ops_t *ops = b->ops;
    const colo_tensor_t *t[2] = {in, out};
    const char *const name[2] = {in_name, out_name};
    colo_status_t st = ops->stream_check(q, stream, capturing);
    for (int i = 0; st == COLO_OK && i < 2; i++)
        if (t[i] && colo_tensor_count(t[i]) > 0)
            st = ops->pointer_check(q, t[i]->data, t[i]->device, name[i]);
    return st < 0 ? colo_fail_prefix(st, "rank %lld", (long long)b->now.program.plan->rank)
                  : COLO_OK;
}

static colo_status_t check_call(colo_bridge_t *b, colo_pass_t pass, const colo_tensor_t *in,
                                const colo_tensor_t *out, colo_stream_t stream, colo_queries_t *q,
                                bool *capturing)
{
    const colo_plan_t *p = b->now.program.plan;
    bool fwd = pass == COLO_FORWARD;
    const char *in_name = fwd ? "x" : "d_y", *out_name = fwd ? "y" : "d_x";
    if (!fwd && p->config.no_grad)
        return colo_fail(COLO_ERR_STATE, "rank %lld: backward on a bridge created with no_grad",
                         (long long)p->rank);
    COLO_TRY(check_tensor(b, in, in_name, fwd ? &p->own_src : &p->own_dst, false));
    COLO_TRY(check_tensor(b, out, out_name, fwd ? &p->own_dst : &p->own_src, true));
    COLO_TRY(check_apart(b, in, out, in_name, out_name));
    return check_places(b, in, out, in_name, out_name, stream, q, capturing);
}

/* A failure that peers do not share. With COLLECTIVE they wait in the groups, whose error state is
 * not that of a comm they were split from. */
static colo_status_t fail_all(colo_bridge_t *b, colo_status_t st)
{
    if (b->coll.gather)
        colo_comm_i_fail(b->coll.gather, st);
    if (b->coll.cp)
        colo_comm_i_fail(b->coll.cp, st);
    return colo_comm_i_fail(b->comm, st);
}

static colo_status_t run_staged(colo_call_t *call)
{
    colo_bridge_t *b = call->bridge;
    const colo_carried_t *t = call->frame.tensor;
    if (b->algo == COLO_EXACT)
        return colo_run_steps(call);
    const colo_status_t st = call->frame.pass == COLO_FORWARD
                                 ? colo_collective_forward(b, t->in, t->out, call->stream)
                                 : colo_collective_backward(b, t->in, t->out, call->stream);
    return st < 0 ? fail_all(b, st) : st;
}

/* Partial sums, and the staging of COLLECTIVE, are in use until the call's last sum or copy, of
 * which the comm knows nothing: the next call waits for it, on whatever stream, because a handle
 * does not say which one it is: cudaStreamPerThread is one of each thread. In captures the caller
 * sees to that.
 */
colo_status_t colo_bridge_follow(colo_bridge_t *b, colo_stream_t stream)
{
    colo_status_t st = COLO_OK;
    if (b->ran)
        st = b->ops->event_wait(b->order, 0, stream);
    return st < 0 ? fail_all(b, st) : st;
}

colo_status_t colo_bridge_lead(colo_bridge_t *b, colo_status_t st, colo_stream_t stream)
{
    const colo_error_t why = colo_error_save();
    b->ran = true;
    const colo_status_t led = b->ops->event_record(b->order, 0, stream);
    if (st < 0)
        return colo_error_restore(st, &why);
    return led < 0 ? fail_all(b, led) : COLO_OK;
}

static colo_status_t run_in_order(colo_call_t *call)
{
    COLO_TRY(colo_bridge_follow(call->bridge, call->stream));
    return colo_bridge_lead(call->bridge, run_staged(call), call->stream);
}

static colo_status_t call_bridge(colo_bridge_t *b, colo_pass_t pass, const colo_tensor_t *in,
                                 const colo_tensor_t *out, colo_stream_t stream)
{
    if (!b)
        return colo_fail(COLO_ERR_ARG, "bridge: bridge is NULL");
    COLO_TRY(
        colo_comm_i_alive(b->comm, pass == COLO_FORWARD ? "bridge forward" : "bridge backward"));
    if (b->ragged) {
        const colo_status_t refused =
            colo_fail(COLO_ERR_STATE,
                      "bridge: created for ragged batches; call colo_bridge_set_segments() and "
                      "colo_batch_%s()",
                      pass == COLO_FORWARD ? "forward" : "backward");
        return colo_ragged_share_refusal(b, refused);
    }
    const colo_plan_t *p = b->now.program.plan;
    bool fwd = pass == COLO_FORWARD, strict = colo_comm_check_level(b->comm) >= 2;
    colo_queries_t q = {0};
    colo_carried_t tensor = {0};
    colo_reached_tensor_t reached[2];
    colo_call_t call = {.bridge = b,
                        .loaded = &b->now,
                        .frame = {.program = &b->now.program,
                                  .pass = pass,
                                  .tensor = &tensor,
                                  .n = 1,
                                  .slot_bytes = colo_slot_bytes(p, 1, p->config.dtype)},
                        .op = colo_bridge_op(b, pass),
                        .reached = {.tensor = reached},
                        .stream = stream};
    colo_status_t st = check_call(b, pass, in, out, stream, &q, &call.capturing);
    const bool capturing = call.capturing;
    if (st == COLO_OK)
        st = colo_peers_find(&call, in, out);
    if (st == COLO_OK)
        tensor =
            colo_bridge_carried(b, colo_bridge_view(b, in, fwd ? p->own_src.rows : p->own_dst.rows),
                                colo_bridge_view(b, out, fwd ? p->own_dst.rows : p->own_src.rows));
    if (strict) {
        if (capturing) /* a replay runs no check; what is captured must be alike on all ranks */
            colo_log(COLO_LOG_WARN, "bridge: a capture at COLO_CHECK=2 is compared between ranks, "
                                    "what tensors hold is not verified");
        if (st == COLO_OK && !fwd && !capturing)
            st = colo_contract_zeros(b, tensor.in, stream);
        /* registered on all ranks or on none */
        const bool p2p = call.reached.p2p && !call.reached.not_agreed;
        COLO_TRY(colo_bridge_agree_call(b, pass, p2p, capturing, st));
        if (!capturing)
            COLO_TRY(colo_contract_replicas(b, pass, tensor.in, stream));
    } else if (st < 0) {
        /* no_grad is the same on every rank: no rank waits, the comm may live */
        return st == COLO_ERR_STATE ? st : fail_all(b, st);
    } else if (!b->compared[pass] && colo_comm_check_level(b->comm) == 1) {
        COLO_TRY(colo_bridge_agree_call(b, pass, false, false, COLO_OK));
    }
    b->compared[pass] = true;
    b->compared[!pass] = b->compared[!pass] || colo_bridge_exchanges_compare(b);
    if (call.reached.not_agreed)
        COLO_TRY(colo_peers_agree(&call));
    b->calls++;
    call.device = q.device;
    if (colo_peers_carry(&call))
        return colo_peers_run(&call);
    return b->order && !capturing ? run_in_order(&call) : run_staged(&call);
}

colo_status_t colo_bridge_forward(colo_bridge_t *bridge, const colo_tensor_t *x,
                                  const colo_tensor_t *y, colo_stream_t stream)
{
    COLO_RANGE();
    return call_bridge(bridge, COLO_FORWARD, x, y, stream);
}

colo_status_t colo_bridge_backward(colo_bridge_t *bridge, const colo_tensor_t *d_y,
                                   const colo_tensor_t *d_x, colo_stream_t stream)
{
    COLO_RANGE();
    return call_bridge(bridge, COLO_BACKWARD, d_y, d_x, stream);
}
