/* SPDX-License-Identifier: Apache-2.0 */
/* operation.h - one operation of a communicator as data, for tables of those that are refused. */
#ifndef TESTS_COMM_OPERATION_H
#define TESTS_COMM_OPERATION_H

#include <colobridge.h>

enum { NOWHERE = -1 };

typedef struct operation {
    colo_op_kind_t kind;
    int64_t count;
    int from, to;       /* elements of the rank's memory; NOWHERE: NULL */
    int32_t how;        /* the root, or a colo_redop_t; 0: rank 0, and COLO_REDOP_SUM */
    colo_dtype_t dtype; /* 0: COLO_F32 */
} operation_t;

/* An exchange has no messages. */
static inline colo_status_t operate(colo_comm_t *c, const operation_t *o, float *memory)
{
    const float *from = o->from == NOWHERE ? NULL : memory + o->from;
    float *to = o->to == NOWHERE ? NULL : memory + o->to;
    switch (o->kind) {
    case COLO_OP_ALL_GATHER:
        return colo_comm_all_gather(c, from, to, o->count, o->dtype, NULL);
    case COLO_OP_ALL_REDUCE:
        return colo_comm_all_reduce(c, from, to, o->count, o->dtype, (colo_redop_t)o->how, NULL);
    case COLO_OP_REDUCE_SCATTER:
        return colo_comm_reduce_scatter(c, from, to, o->count, o->dtype, (colo_redop_t)o->how,
                                        NULL);
    case COLO_OP_BROADCAST:
        return colo_comm_broadcast(c, to, o->count, o->dtype, o->how, NULL);
    case COLO_OP_EXCHANGE:
        return colo_comm_exchange(c, NULL, 0, NULL, 0, o->dtype, NULL);
    default:
        return colo_comm_barrier(c, NULL);
    }
}

#endif
