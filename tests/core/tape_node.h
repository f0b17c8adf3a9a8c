/* SPDX-License-Identifier: Apache-2.0 */
/* tape_node.h - the node that most tests of the tape record: one output, nothing saved. */
#ifndef TESTS_CORE_TAPE_NODE_H
#define TESTS_CORE_TAPE_NODE_H

#include <colobridge.h>

static inline colo_status_t t_node(colo_tape_t *tape, const char *name, const colo_value_t *in,
                                   int32_t nin, const colo_tensor_t *out, colo_value_t *value,
                                   colo_backward_fn backward, void *state,
                                   void (*free_state)(void *state))
{
    return colo_tape_record(tape, &(colo_tape_record_t){COLO_TAPE_RECORD_INIT, .name = name,
                                                        .in = in, .nin = nin, .out = out, .nout = 1,
                                                        .out_values = value, .backward = backward,
                                                        .state = state, .free_state = free_state});
}

#endif
