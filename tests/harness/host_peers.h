/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host_peers.h - a comm of "GPUs" on threads: ranks reach each other's memory, and a table of peers
 * makes the steps that a bridge gives it, on the host.
 *
 * A rank that peers reach shows them its tensors and waits until they are done; a rank that reaches
 * waits until they are shown. Each has a deadline. What is registered, and which ranks reach each
 * other, the table of a user says.
 */
#ifndef TESTS_HARNESS_HOST_PEERS_H
#define TESTS_HARNESS_HOST_PEERS_H

#include <colobridge.h>

#include "comm/comm.h"
#include "comm/peer.h"

enum { T_PEERS_RANKS = 16 };

/* The members that hold paths and their lists; @make is t_path_create or ends in it. */
#define T_HOST_PEERS(make)                                                         \
    .create = make, .load = t_path_load, .list = t_path_list, .drop = t_path_drop, \
    .destroy = t_path_destroy
colo_status_t t_path_create(colo_comm_t *c, const colo_transfers_t pass[2], colo_p2p_t **d);
colo_status_t t_path_load(colo_p2p_t *d, const colo_transfers_t pass[2]);
colo_status_t t_path_list(colo_p2p_t *d, const colo_transfers_t pass[2], colo_p2p_list_t **l);
void t_path_drop(colo_p2p_t *d, colo_p2p_list_t **l);
colo_status_t t_path_run(colo_p2p_t *d, int pass, const colo_p2p_call_t *call,
                         colo_stream_t stream);
void t_path_destroy(colo_p2p_t **d);

/* For a table whose own run() begins or ends with something else: the comm rank of a path, and the
 * steps of a call. */
int32_t t_path_rank(const colo_p2p_t *d);
const colo_transfers_t *t_path_steps(const colo_p2p_t *d, int pass, const colo_p2p_call_t *call);

/* A comm that calls itself one of GPUs: with a control comm, and with the table @peers. */
typedef struct t_disguise {
    colo_comm_t *comm, *control;
    const colo_comm_ops_t *was;
    colo_comm_ops_t ops; /* more may be changed */
} t_disguise_t;
colo_status_t t_disguise(t_disguise_t *d, colo_comm_t *comm, const colo_peer_ops_t *peers);
/* Host again; nothing, if it is. */
void t_undisguise(t_disguise_t *d);

#endif
