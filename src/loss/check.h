/* SPDX-License-Identifier: Apache-2.0 */
/* check.h (private) - the refusals of the logits path; colo_logprob_config_check() is public. */
#ifndef COLO_LOSS_CHECK_H
#define COLO_LOSS_CHECK_H

#include "loss/passes.h"

/* All arguments of forward but the group, which is not NULL. */
colo_status_t colo_logprob_i_check_forward(const colo_logprob_config_t *config,
                                           const colo_tensor_t *logits,
                                           const colo_tensor_t *targets, const colo_comm_t *group,
                                           const colo_logprob_out_t *out,
                                           const colo_logprob_saved_t *saved, const void *stats,
                                           const void *scratch);

/* Before a collective, @mine the verdict on this rank's own arguments: at COLO_CHECK=2 all ranks
 * hear of an error and @group lives on, below that the error marks @group failed. */
colo_status_t colo_loss_i_ready(colo_comm_t *group, const char *what, colo_status_t mine);

/* The gathered headers, in host memory: COLO_ERR_MISMATCH, the same sentence on every rank. */
colo_status_t colo_logprob_i_check_headers(const struct colo_logprob_pass *p);

/* @in_place: out, whether @d_logits is the logits */
colo_status_t colo_logprob_i_check_backward(const colo_logprob_saved_t *saved,
                                            const colo_logprob_upstream_t *upstream,
                                            const colo_tensor_t *d_logits, bool *in_place);

#endif
