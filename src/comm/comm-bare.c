/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm-bare.c - a comm of GPUs without NCCL: bridges over registered memory, and nothing else.
 *
 * For tests: ranks may share a device, so that the direct path runs where there is one GPU, under a
 * memory checker, too. All that moves data by itself is refused. There is no guard thread: a kernel
 * that waits ends at its deadline, or when somebody asks for the comm's state and it is dead.
 */
#include "comm/comm-peer.h"

#include "comm/comm-nccl.h"
#include "comm/fate.h"
#include "core/try.h"

#include <stdlib.h>

struct bare { /* colo_comm.impl */
    colo_fate_t fate;
    colo_comm_t *control; /* owned */
    struct colo_peer *_Atomic peer;
};

static colo_status_t refuse(const colo_comm_t *c)
{
    char what[96];
    return colo_fail(COLO_ERR_UNBUILT, "%s: comm '%s' has no NCCL",
                     colo_op_describe(what, sizeof what, c->op, c->seq), c->name);
}

static colo_status_t bare_all_gather(colo_comm_t *c, const void *send, void *recv, size_t bytes,
                                     colo_stream_t stream)
{
    return refuse(c);
}

static colo_status_t bare_reduce(colo_comm_t *c, const void *send, void *recv, int64_t count,
                                 colo_dtype_t dtype, colo_redop_t op, colo_stream_t stream)
{
    return refuse(c);
}

static colo_status_t bare_broadcast(colo_comm_t *c, void *buffer, size_t bytes, int32_t root,
                                    colo_stream_t stream)
{
    return refuse(c);
}

static colo_status_t bare_barrier(colo_comm_t *c, colo_stream_t stream)
{
    return refuse(c);
}

static colo_status_t bare_exchange(colo_comm_t *c, const colo_message_t *sends, int32_t nsends,
                                   const colo_message_t *recvs, int32_t nrecvs, colo_dtype_t dtype,
                                   colo_stream_t stream)
{
    return nsends || nrecvs ? refuse(c) : COLO_OK;
}

static colo_status_t bare_subset(colo_comm_t *parent, const int32_t *members, int32_t n,
                                 uint64_t tag, colo_comm_t *child)
{
    return refuse(parent);
}

static void bare_fail(colo_comm_t *c, colo_status_t status, const char *sentence)
{
    struct bare *x = c->impl;
    char kept[900];
    if (x->control->ops->state(x->control, kept, sizeof kept) == COLO_OK)
        x->control->ops->fail(x->control, status, sentence);
    colo_fate_seal(&x->fate, status, -1, -1, sentence);
    colo_peer_stop(atomic_load(&x->peer));
}

static colo_status_t bare_state(const colo_comm_t *c, char *sentence, size_t cap)
{
    struct bare *x = c->impl;
    colo_status_t st = colo_fate_tell(&x->fate, c->rank, sentence, cap);
    if (st == COLO_OK && (st = colo_peer_look(atomic_load(&x->peer), sentence, cap)) < 0) {
        x->control->ops->fail(x->control, st, sentence);
        colo_fate_seal(&x->fate, st, -1, -1, sentence);
    }
    if (st == COLO_OK)
        st = x->control->ops->state(x->control, sentence, cap);
    if (st < 0)
        colo_peer_stop(atomic_load(&x->peer));
    return st;
}

static void bare_destroy(colo_comm_t *c)
{
    struct bare *x = c->impl;
    char sentence[900];
    (void)bare_state(c, sentence, sizeof sentence);
    colo_peer_drop(atomic_load(&x->peer));
    colo_comm_destroy(&x->control);
    colo_fate_fini(&x->fate);
    free(x);
    c->impl = NULL;
}

static const colo_comm_ops_t colo_comm_bare_ops = {
    .name = "bare",
    .abi = COLO_COMM_ABI,
    .all_gather = bare_all_gather,
    .all_reduce = bare_reduce,
    .reduce_scatter = bare_reduce,
    .broadcast = bare_broadcast,
    .barrier = bare_barrier,
    .exchange = bare_exchange,
    .subset = bare_subset,
    .fail = bare_fail,
    .state = bare_state,
    .destroy = bare_destroy,
    .peer = &colo_peer_table,
};

struct colo_peer *_Atomic *colo_peer_place(const colo_comm_t *c)
{
    return c->ops == &colo_comm_bare_ops ? &((struct bare *)c->impl)->peer
                                         : &((struct colo_nctx *)c->impl)->peer;
}

int32_t colo_peer_device(const colo_comm_t *c)
{
    return c->ops == &colo_comm_bare_ops ? -1 : ((struct colo_nctx *)c->impl)->family->device;
}

colo_status_t colo_bare_create(colo_comm_t *control, colo_comm_t **comm)
{
    colo_comm_t *c = NULL;
    struct bare *x = calloc(1, sizeof *x);
    colo_status_t st = x ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "bare comm: %zu bytes", sizeof *x);
    if (st == COLO_OK)
        st = colo_comm_i_new(&c, &colo_comm_bare_ops, control->rank, control->size,
                             control->world_rank);
    st = colo_comm_i_agree(control, "bare comm", 0, st);
    if (st < 0) {
        free(x);
        colo_comm_destroy(&c);
        colo_comm_destroy(&control);
        return st;
    }
    colo_fate_init(&x->fate);
    x->control = control;
    c->impl = x;
    c->control = control;
    c->timeout_ms = control->timeout_ms;
    *comm = c;
    return COLO_OK;
}
