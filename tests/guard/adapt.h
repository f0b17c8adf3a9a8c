/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adapt.h - the only places of record.c that name what a change of the bridge may rename.
 *
 * record.c is compiled against two revisions, each with its own adapt.h: a commit that changes one
 * of these interfaces changes this file with it, and what is recorded stays the same. A revision
 * from before this file is read with the newer one.
 */
#ifndef TESTS_GUARD_ADAPT_H
#define TESTS_GUARD_ADAPT_H

#include "comm/comm.h"
#include "harness/host_peers.h"

#include <colobridge.h>

/* ---- what a plan says: exchange 0 is the first of a pass, 1 the sums of nodes, 2 the relays ----
 */

enum { GUARD_EXCHANGES = 3 };
static const colo_plan_message_t *guard_messages(const colo_plan_t *plan, colo_pass_t pass,
                                                 int exchange, bool sends, int32_t *count)
{
    switch (exchange) {
    case 0:
        return sends ? colo_plan_sends(plan, pass, count) : colo_plan_recvs(plan, pass, count);
    case 1:
        return colo_plan_sums(plan, pass, sends, count);
    default:
        return colo_plan_relays(plan, pass, sends, count);
    }
}

/* ---- what reaches the comm: the linker sends the bridge's calls here (--wrap) ---- */

static void guard_exchange(const colo_exchange_t *x, bool is_part, colo_stream_t stream);
static void guard_collective(const char *name, const void *send, const void *recv, int64_t count,
                             colo_dtype_t dtype);

__typeof__(colo_comm_exchange_begin) __real_colo_comm_exchange_begin,
    __wrap_colo_comm_exchange_begin;
colo_status_t __wrap_colo_comm_exchange_begin(colo_comm_t *c, const colo_exchange_t *x,
                                              colo_stream_t stream, uint64_t *seq)
{
    /* where all ranks reach each other, a call that needs no messages has no list of them */
    if (!x->is_part || x->send || !c->backend->direct->reaches(c, -1, -1))
        guard_exchange(x, x->is_part, stream);
    return __real_colo_comm_exchange_begin(c, x, stream, seq);
}

void guard_subconnections(colo_comm_backend_t *backend)
{
    backend->subconnection_stage = t_sub_stage;
}

/* Nothing else in the recorder has a comm gather or reduce. */
__typeof__(colo_comm_all_gather) __real_colo_comm_all_gather, __wrap_colo_comm_all_gather;
colo_status_t __wrap_colo_comm_all_gather(colo_comm_t *c, const void *send, void *recv,
                                          int64_t count, colo_dtype_t dtype, colo_stream_t stream)
{
    guard_collective("all_gather", send, recv, count, dtype);
    return __real_colo_comm_all_gather(c, send, recv, count, dtype, stream);
}

__typeof__(colo_comm_all_reduce) __real_colo_comm_all_reduce, __wrap_colo_comm_all_reduce;
colo_status_t __wrap_colo_comm_all_reduce(colo_comm_t *c, const void *send, void *recv,
                                          int64_t count, colo_dtype_t dtype, colo_redop_t op,
                                          colo_stream_t stream)
{
    guard_collective("all_reduce", send, recv, count, dtype);
    return __real_colo_comm_all_reduce(c, send, recv, count, dtype, op, stream);
}

#endif
