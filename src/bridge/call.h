/* SPDX-License-Identifier: Apache-2.0 */
/* call.h (private) - what a call does before its program runs, of a uniform bridge or a batch. */
#ifndef COLO_BRIDGE_CALL_H
#define COLO_BRIDGE_CALL_H

#include "bridge/ragged/ragged.h"

/* ---- tensors.c ----
 * Checks of the tensors, on this rank: fills in call->carried and capturing. */
colo_status_t colo_call_check_uniform(colo_call_t *call);
colo_status_t colo_call_check_batch(colo_call_t *call);
/* Must this rank have a tensor on this side of a batch? */
bool colo_call_must_have(const colo_call_t *call, bool src_side);

/* ---- fields.c ----
 * All ranks of the comm come with the tables or the plan, the pass and their own status.
 * Collective. */
colo_status_t colo_call_agree(const colo_call_t *call, colo_status_t mine);

/* ---- verify.c: COLO_CHECK=2; waits for the stream ---- */
colo_status_t colo_call_verify_zeros(const colo_call_t *call);
/* Collective. */
colo_status_t colo_call_verify_replicas(const colo_call_t *call);

#endif
