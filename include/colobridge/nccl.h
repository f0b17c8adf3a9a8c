/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.h - ranks that own a GPU each and talk through NCCL. Opt-in: not part of colobridge.h.
 *
 * A host communicator of the same ranks (threads, processes) carries everything that is not
 * data: the unique id, agreement, COLO_CHECK, errors. So checks never touch a GPU, and a program
 * that has a bootstrap can use GPUs: colo_comm_create_bootstrap() or colo_comm_create_mpi(), then
 * colo_comm_create_nccl().
 *
 * The library uses the NCCL that is already in the process (PyTorch's, for example), else it loads
 * libnccl.so.2. It needs 2.18 or later, which has all functions that the library calls; tests on
 * GPUs ran with 2.28 and later. libcolobridge.so links neither NCCL nor CUDA: libcolobridge-nccl.so
 * does, and is loaded on first use.
 *
 * Calls are asynchronous: they enqueue operations on the caller's stream, in device memory of the
 * communicator's device, which must be the thread's current device. Exception: if two ranks are
 * threads of one process, all ranks synchronize on the host, within the deadline, around each
 * operation of the loss. A group of one rank cannot synchronize: run its lm_head once per shape,
 * then a barrier of the host communicator, before ranks of one process depend on each other; or
 * use one process per GPU (docs/runtime/comm.md).
 *
 * If an operation does not end by the deadline (COLO_TIMEOUT_MS, colo_comm_set_timeout()) after it
 * began on the stream, that is COLO_ERR_TIMEOUT. Then, or if another rank or NCCL reports an
 * error, or a rank aborts, the library aborts the comm within 50 ms, and the stream goes on. The
 * contents of outputs are then undefined, and colo_comm_check() returns the error. Operations in
 * CUDA graphs have the same deadline in every replay.
 *
 * Connections: create connects no ranks. The first collective or exchange does; it waits for all
 * ranks, and cannot be captured (a barrier before the capture is enough). So a world that is only
 * split costs no ncclComm_t of world size. Groups made by colo_comm_split() connect at once. A
 * bridge connects at create the ranks that its plan ties together, and no others. (If its ranks
 * reach each other's memory, COLO_TRANSPORT, it connects and allocates staging in the first call
 * that needs them, which cannot be captured.) Comms and bridges of the same ranks share a
 * connection; if one of them fails, the others fail with COLO_ERR_PEER. The library keeps the last
 * four unused connections (all of them, if ranks share a device) until the last comm that came
 * from the same create is destroyed, because connecting takes most of a second.
 *
 * One rank per device. Exception, to try out more ranks than there are devices: NCCL is 2.30 or
 * later and NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all ranks. Kernels of ranks that wait for each
 * other must then fit on the device together, and no call may wait for the device meanwhile, as
 * cudaFree() does: see docs/runtime/comm.md.
 *
 * Order: all comms and bridges whose ranks share devices launch in the same order on all ranks,
 * the order of the calls. On a device each operation waits for the operation before it, on any
 * stream. This does not hold for operations in CUDA graphs: order graphs by streams and events.
 * Staging of collectives grows at the first operation of a size, and not in a capture: run the
 * operation once, then capture. Bridges allocate their staging at create; the sums of COLLECTIVE are
 * all-reduces, so run a backward once before the capture. Sums combine in rank order, bitwise as on
 * the host.
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
 * @parent:  borrowed for the call. The new comm keeps a group of it with the same ranks for
 *           control; if that group dies (a rank left, failed, aborted), the new comm dies
 * @device:  CUDA ordinal of this rank, one rank per device (see above); -1: the thread's current
 *           device
 * @comm:    out, owned by the caller; smaller groups by colo_comm_split()
 * Waits:    for all ranks, at most until the parent's deadline
 * Errors:   COLO_ERR_UNBUILT (no backend library, no NCCL, an old NCCL), COLO_ERR_ARG,
 *           COLO_ERR_MISMATCH (two ranks on one device, different NCCL versions), COLO_ERR_CUDA,
 *           COLO_ERR_NCCL, COLO_ERR_TIMEOUT, COLO_ERR_PEER, COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_comm_create_nccl(colo_comm_t *parent, int32_t device,
                                             colo_comm_t **comm);

/**
 * colo_comm_create_nccl_borrowed() - the same on an ncclComm_t that exists; collective over
 * @parent
 * @nccl:    borrowed until @comm is destroyed; its ranks must be those of @parent. It is never
 *           destroyed, aborted nor asked for asynchronous errors here, and must not be used
 *           elsewhere while an operation runs. If @comm fails, abort @nccl first: destroying a
 *           bridge waits for the device
 * @parent, @comm, waits and errors: as in colo_comm_create_nccl()
 */
COLO_API colo_status_t colo_comm_create_nccl_borrowed(struct ncclComm *nccl, colo_comm_t *parent,
                                                      colo_comm_t **comm);

#ifdef __cplusplus
}
#endif
#endif
