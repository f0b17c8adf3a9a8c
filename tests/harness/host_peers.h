/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_peers.h - a comm of "GPUs" on threads: ranks reach each other's memory, and a table of peers
 * makes the transfers that a bridge gives it, on the host.
 *
 * A rank that peers reach shows them its tensors and waits until they are done; a rank that reaches
 * waits until they are shown. Each has a deadline.
 */
#ifndef TESTS_HARNESS_HOST_PEERS_H
#define TESTS_HARNESS_HOST_PEERS_H

#include <colobridge.h>

#include "comm/comm.h"
#include "comm/direct.h"

enum { T_PEERS_RANKS = 16 };

/* What the table says to a rank, and what came of it. Zeros: all ranks reach each other, and
 * nothing is registered. */
typedef struct t_told {
    colo_status_t open, create; /* an error: says so, to rank so and so */
    const void *registered;     /* this tensor is, or those of which this is true: */
    bool (*is_registered)(int32_t rank, const void *data);
    uint64_t registrations;
    int64_t runs[2], pulls; /* calls by pass; forwards that pulled */
} t_told_t;
extern t_told_t t_told[T_PEERS_RANKS];
extern int32_t t_apart; /* it and the next rank do not reach each other; -1: all do */

/* The whole table; a program may change its copy. */
extern const colo_direct_memory_t t_peers;
colo_status_t t_launcher_create(colo_comm_t *c, const colo_transfers_t pass[2],
                                colo_direct_launcher_t **d);
colo_status_t t_launcher_run(colo_direct_launcher_t *d, int pass, const colo_direct_call_t *call,
                             colo_stream_t stream);

/* For a table whose own run() begins or ends with something else: the comm rank of a path, and the
 * transfers of a call. */
int32_t t_launcher_rank(const colo_direct_launcher_t *d);
const colo_transfers_t *t_launcher_transfers(const colo_direct_launcher_t *d, int pass,
                                             const colo_direct_call_t *call);

/* The members of a subconnection that carries nothing by itself. */
struct colo_subconnection {
    int32_t n, members[T_PEERS_RANKS];
};
colo_status_t t_sub_create(colo_comm_t *c, const int32_t *members, int32_t n, uint64_t tag,
                           colo_subconnection_t **s);
void t_sub_destroy(colo_comm_t *c, colo_subconnection_t *s);
/* What a comm stages of messages below the size that is halved: all of them. */
size_t t_sub_stage(const colo_exchange_t *x);

/* A comm that calls itself one of GPUs: with a control comm, and with the table @peers. */
typedef struct t_disguise {
    colo_comm_t *comm, *control;
    const colo_comm_backend_t *was;
    colo_comm_backend_t backend; /* more may be changed */
} t_disguise_t;
colo_status_t t_disguise(t_disguise_t *d, colo_comm_t *comm, const colo_direct_memory_t *peers);
/* Host again; nothing, if it is. */
void t_undisguise(t_disguise_t *d);

#endif
