/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.h - ranks that own a GPU each and talk through NCCL. Opt-in: not part of colobridge.h.
 *
 * A host communicator of the same ranks (threads, sockets, MPI) carries all that is not data:
 * the unique id, agreement, COLO_CHECK, who failed. So checks never touch a GPU, and whoever has a
 * bootstrap has GPUs: colo_comm_create_bootstrap() or colo_comm_create_mpi(), then this.
 *
 * NCCL is the one already in the process (inside PyTorch, PyTorch's); else libnccl.so.2 is loaded.
 * 2.28 or later. libcolobridge.so links neither NCCL nor CUDA: libcolobridge-nccl.so beside it does
 * that, loaded on first use.
 *
 * Operations are enqueued on the caller's stream, in device memory of the communicator's device,
 * which must be the thread's current device. The host does not wait, but where any two ranks are
 * threads of one process: then all meet, within the deadline, around each operation of the loss. A
 * group of one rank has nobody to meet: run its lm_head once per shape, then a barrier of the host
 * communicator, before ranks of one process depend on each other, or take a process a GPU
 * (docs/comm.md). An operation that has not ended by the deadline (COLO_TIMEOUT_MS,
 * colo_comm_set_timeout()) after its turn came on the stream is COLO_ERR_TIMEOUT; then, and when
 * another rank reports an error or aborts, or NCCL does, the comm is torn down within 50 ms and the
 * stream goes on. What memory then holds is undefined and colo_comm_check() says why. Operations in
 * CUDA graphs have the same deadline in every replay.
 *
 * Connections: a comm made here or borrowed connects nobody at create: its first collective or
 * exchange does, waits for all ranks meanwhile, and cannot be captured (a barrier beforehand will
 * do). So a world that is only there to be split costs no world-size ncclComm_t. Groups made by
 * colo_comm_split() connect at once, and so does a bridge: the ranks that its plan ties together
 * and no others. (A bridge of ranks that reach each other's memory, COLO_TRANSPORT, puts that and
 * its staging off until a call needs them, which cannot be captured.) Comms and bridges of the same
 * ranks share a connection; the last four that nobody uses (all, where ranks share a device) are
 * kept until the last comm of the context is destroyed.
 *
 * One rank a device, unless NCCL is 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 is set for all
 * ranks: to try out more ranks than there are devices. Kernels of ranks that wait for each other
 * must then fit the device together, and nothing may wait for the device meanwhile, as cudaFree()
 * does: docs/comm.md says what that takes.
 *
 * Order: all comms and bridges whose ranks share devices launch in the same order on all ranks, the
 * order of the calls. On a device each operation waits for the one before it, on whatever stream.
 * Operations in CUDA graphs are not part of that: order graphs by streams and events.
 * Staging of collectives grows at the first operation of a size, and not in a capture: run once,
 * then capture. Bridges have theirs from create. Sums combine in rank order, bitwise as on the
 * host.
 */
#ifndef COLOBRIDGE_NCCL_H
#define COLOBRIDGE_NCCL_H

#include <colobridge/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ncclComm; /* ncclComm_t is a pointer to it */

/**
 * colo_comm_create_nccl() - a comm of GPUs with the ranks of @parent; collective over @parent
 * @parent:  borrowed for the call; a group of it with the same ranks is kept for control. When that
 *           dies (a rank left, failed, aborted), the new comm dies
 * @device:  CUDA ordinal of this rank, one rank a device (see above); -1: the thread's current
 * device
 * @comm:    out, owned by the caller; smaller groups by colo_comm_split()
 * Waits:    for all ranks, at most the parent's deadline
 * Errors:   COLO_ERR_UNBUILT (no backend library, no NCCL, an old one), COLO_ERR_ARG,
 *           COLO_ERR_MISMATCH (two ranks on one device, different NCCL versions), COLO_ERR_CUDA,
 *           COLO_ERR_NCCL, COLO_ERR_TIMEOUT, COLO_ERR_PEER, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_comm_create_nccl(colo_comm_t *parent, int32_t device,
                                             colo_comm_t **comm);

/**
 * colo_comm_create_nccl_borrowed() - the same on an ncclComm_t that exists; collective over @parent
 * @nccl:    borrowed until @comm is destroyed; its ranks must be those of @parent. It is never
 *           destroyed nor aborted here, and must not be used elsewhere while an operation runs
 */
COLO_API colo_status_t colo_comm_create_nccl_borrowed(struct ncclComm *nccl, colo_comm_t *parent,
                                                      colo_comm_t **comm);

#ifdef __cplusplus
}
#endif
#endif
