/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fills.c - before its messages leave, a staged call finds out where each of their boxes lies:
 * once. The linker sends the library's calls here (--wrap).
 */
#include "harness/harness.h"

#include "harness/bridge_case.h"
#include "harness/ranks.h"

#include "bridge/run/program.h"
#include "comm/comm.h"

enum { RANKS = 4 };

static _Thread_local int64_t boxes, before_messages;

__typeof__(colo_call_box) __real_colo_call_box, __wrap_colo_call_box;
colo_box_t __wrap_colo_call_box(const colo_call_frame_t *frame, const colo_carried_t *tensor,
                                colo_end_t end, const colo_routes_t *routes, int64_t i, bool bytes)
{
    boxes++;
    return __real_colo_call_box(frame, tensor, end, routes, i, bytes);
}

__typeof__(colo_comm_exchange_begin) __real_colo_comm_exchange_begin,
    __wrap_colo_comm_exchange_begin;
colo_status_t __wrap_colo_comm_exchange_begin(colo_comm_t *c, const colo_exchange_t *x,
                                              colo_stream_t stream, uint64_t *seq)
{
    before_messages = boxes;
    return __real_colo_comm_exchange_begin(c, x, stream, seq);
}

static int64_t regions_of(const colo_plan_t *plan, colo_pass_t pass)
{
    int32_t sends = 0, recvs = 0;
    const colo_plan_message_t *send = colo_plan_sends(plan, pass, &sends),
                              *recv = colo_plan_recvs(plan, pass, &recvs);
    int64_t regions = 0;
    for (int32_t i = 0; i < sends; i++)
        regions += send[i].nregions;
    for (int32_t i = 0; i < recvs; i++)
        regions += recv[i].nregions;
    return regions;
}

T_CASE_ON(RANKS, a_staged_call_fills_each_box_of_its_messages_once)
{
    t_case_t c = T_BETWEEN("tp=1,dp=4", "tp=1,cp=2,dp=2", 8, 8, 4, .grad = COLO_GRAD_PARTIAL);
    const int32_t me = colo_comm_rank(world);
    const t_role_t in_of[2] = {T_X, T_DY}, out_of[2] = {T_Y, T_DX};
    T_ENDS(colo_bridge_destroy) colo_bridge_t *bridge = NULL;
    rank_try(t_case_bridge(&bridge, &c, world, COLO_MEM_HOST));
    for (int pass = 0; pass < 2; pass++) {
        t_buffer_t in, out;
        rank_try(t_case_tensor(&c, in_of[pass], me, 1, true, &in));
        rank_try(t_case_tensor(&c, out_of[pass], me, 1, false, &out));
        boxes = 0;
        rank_try(pass ? colo_bridge_backward(bridge, &in.t, &out.t, NULL)
                      : colo_bridge_forward(bridge, &in.t, &out.t, NULL));
        const int64_t regions = regions_of(colo_bridge_plan(bridge), (colo_pass_t)pass);
        rank_check(regions > 0 && before_messages == regions);
        t_buffer_free(&in);
        t_buffer_free(&out);
    }
    return COLO_OK;
}

T_MAIN("bridge/fills")
