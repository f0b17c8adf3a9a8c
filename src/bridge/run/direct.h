/* SPDX-License-Identifier: Apache-2.0 */
/* direct.h (private) - what direct.c keeps in a bridge, a ready plan and a call. */
#ifndef COLO_BRIDGE_RUN_DIRECT_H
#define COLO_BRIDGE_RUN_DIRECT_H

#include "comm/direct.h"
#include "core/list.h"

#include <colobridge/comm.h>

/* Peers write into this rank's output, or it reads in their inputs. */
typedef enum colo_mover { COLO_PUSH = 1, COLO_PULL = 2 } colo_mover_t;

/* A program as direct memory carries it. */
typedef struct colo_ready_direct {
    bool asymmetric[2]; /* of a pass, some rank has nothing that peers could reach */
    /* Some messages are the comm's: ranks that the plan ties to this one do not reach each other,
     * or there is another exchange. */
    bool needs_comm;
    int32_t moves[2]; /* of a pass: colo_mover_t that it can take; 0: the comm carries it, because a
                         part of addends that differ in number would go to partial sums */
    bool one_view;    /* all ranks decide alike on a tensor, also those whose messages are none */
    colo_mover_t forward;
    colo_direct_list_t *list,
        *relay_list; /* of a batch, else the launcher's own; what relays move */
    int64_t unit;    /* bytes of a feature of the plan that lists are for */
} colo_ready_direct_t;

/* Transfers of both passes, which say where ranks have what they move. */
typedef struct colo_transfer_lists {
    colo_list_t transfer[2];           /* colo_transfer_t */
    colo_list_t addend[2], exposed[2]; /* colo_addend_t, addends of each transfer; int32_t */
    colo_transfers_t pass[2];
} colo_transfer_lists_t;

/* Direct memory of a bridge; lists keep their memory for the next batch. */
typedef struct colo_bridge_direct {
    colo_direct_launcher_t *launcher; /* NULL: every call is staged */
    int32_t blocks;                   /* of its kernel, at most; 0: as few as keep the links busy */
    struct colo_agreed {
        bool made;              /* not if no rank had anything: another batch has to say */
        int32_t moves;          /* colo_mover_t that is taken; 0: staged */
        uint64_t registrations; /* how often memory had been registered */
    } agreed[2];                /* what ranks agreed on for passes that need it */
    int64_t unit;               /* bytes of a feature of the plan in the widest tensor so far */
    colo_transfer_lists_t main, relays;
    colo_list_t held[2]; /* of sums, as they come; by addend */
    colo_list_t tensors; /* colo_direct_tensor_t of a call */
} colo_bridge_direct_t;

/* What peers reach of a tensor. */
typedef struct colo_registered_tensor {
    int32_t id; /* of the memory; -1: nothing */
    uint64_t offset;
} colo_registered_tensor_t;

/* What a call has in registered memory. */
typedef struct colo_registered {
    int32_t moves;                    /* colo_mover_t by which this rank can take part */
    bool nothing;                     /* this rank has nothing that peers could reach */
    colo_registered_tensor_t *tensor; /* [2][n]: of what is pushed; of what is pulled */
} colo_registered_t;

#endif
