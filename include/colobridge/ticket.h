/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ticket.h - calls of a bridge in two halves, so that other work runs while boxes move.
 *
 * colo_bridge_forward_start() enqueues a forward behind the caller's stream, on a stream of the
 * bridge's own, and returns a ticket; colo_ticket_finish() makes the caller's stream wait for it.
 * What the caller enqueues in between runs at the same time. The output has the bits that
 * colo_bridge_forward() gives. In host memory start does the work, and finish ends the ticket.
 *
 * Up to COLO_TICKETS_MAX calls of a bridge may be started and not finished; they may be finished in
 * any order, and calls without a ticket may come in between. All ranks start calls in the same
 * order, as they call forward and backward. In a capture, finish what the capture starts.
 */
#ifndef COLOBRIDGE_TICKET_H
#define COLOBRIDGE_TICKET_H

#include <colobridge/bridge.h>
#include <colobridge/ragged.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLO_TICKETS_MAX 64 /* of one bridge */

/** A call that was started. Finish it once, at any time: also when its bridge, its batch or their
 * comm were destroyed. */
typedef struct colo_ticket colo_ticket_t;

/**
 * colo_bridge_forward_start() - begin colo_bridge_forward()
 * @x, @y:   as in colo_bridge_forward(). Until finish the caller does not write @x, does not read
 *           or write @y, and frees neither
 * @stream:  on a GPU the call begins when this stream has done what it was given before. NULL on
 *           the host
 * @ticket:  out: for colo_ticket_finish(); NULL on an error
 * Errors:   as in colo_bridge_forward(). COLO_ERR_STATE: COLO_TICKETS_MAX calls are not finished;
 *           the comm lives on. COLO_ERR_TIMEOUT: one has not been for longer than the comm's
 *           deadline; the comm is marked failed. The error messages name the ticket
 */
COLO_API colo_status_t colo_bridge_forward_start(colo_bridge_t *bridge, const colo_tensor_t *x,
                                                 const colo_tensor_t *y, colo_stream_t stream,
                                                 colo_ticket_t **ticket);
/** colo_bridge_backward_start() - begin colo_bridge_backward(); as above, with its tensors */
COLO_API colo_status_t colo_bridge_backward_start(colo_bridge_t *bridge, const colo_tensor_t *d_y,
                                                  const colo_tensor_t *d_x, colo_stream_t stream,
                                                  colo_ticket_t **ticket);
/** colo_batch_forward_start() - begin colo_batch_forward(); as above, with its tensors. The batch
 *  may be destroyed after finish */
COLO_API colo_status_t colo_batch_forward_start(colo_batch_t *batch, const colo_tensor_t *x,
                                                const colo_tensor_t *y, int32_t n,
                                                colo_stream_t stream, colo_ticket_t **ticket);
/** colo_batch_backward_start() - begin colo_batch_backward(); as above, with its tensors */
COLO_API colo_status_t colo_batch_backward_start(colo_batch_t *batch, const colo_tensor_t *d_y,
                                                 const colo_tensor_t *d_x, int32_t n,
                                                 colo_stream_t stream, colo_ticket_t **ticket);
/**
 * colo_ticket_finish() - make a stream wait for a call that was started; local
 * @ticket:  set to NULL; NULL before is COLO_ERR_ARG. Any thread may finish it. A bridge that is
 *           destroyed ends its calls, and logs those that were not finished, by number, as errors;
 *           their tickets are valid until finish, which says so
 * @stream:  what it is given from now on runs after the call. Any stream of the device. NULL on the
 *           host
 * Errors:   COLO_ERR_ARG, COLO_ERR_CUDA; COLO_ERR_STATE: the bridge was destroyed before. How
 *           the call fared, the stream's next operation and the comm tell, as after colo_bridge_forward()
 */
COLO_API colo_status_t colo_ticket_finish(colo_ticket_t **ticket, colo_stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
