/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loader.c - which NCCL: the one that is in the process already, else libnccl.so.2.
 *
 * Result codes are never interpreted, only named by the library itself. All functions below are in
 * 2.17, too; 2.18 is the first that is made for CUDA 12 and Hopper.
 */
#include "comm/nccl/comm.h"

#include "core/error.h"
#include "core/library.h"

static colo_nccl_lib_t the_lib;
static bool found;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static colo_status_t find(void)
{
    static const colo_library_t nccl = {"nccl", "NCCL", "libnccl.so.2", "", ""};
    static const colo_library_symbol_t want[] = {
        {"ncclCommInitRank", &the_lib.init_rank},
        {"ncclGetVersion", &the_lib.get_version},
        {"ncclGetUniqueId", &the_lib.get_unique_id},
        {"ncclCommDestroy", &the_lib.destroy},
        {"ncclCommAbort", &the_lib.abort},
        {"ncclCommGetAsyncError", &the_lib.async_error},
        {"ncclCommCount", &the_lib.count},
        {"ncclCommUserRank", &the_lib.user_rank},
        {"ncclCommCuDevice", &the_lib.device},
        {"ncclGetErrorString", &the_lib.error_string},
        {"ncclGetLastError", &the_lib.last_error},
        {"ncclGroupStart", &the_lib.group_start},
        {"ncclGroupEnd", &the_lib.group_end},
        {"ncclAllGather", &the_lib.all_gather},
        {"ncclAllReduce", &the_lib.all_reduce},
        {"ncclBroadcast", &the_lib.broadcast},
        {"ncclSend", &the_lib.send},
        {"ncclRecv", &the_lib.recv},
    };
    COLO_TRY(colo_library_find(&nccl, want, sizeof want / sizeof want[0]));
    ncclResult_t r = the_lib.get_version(&the_lib.version);
    if (r != ncclSuccess)
        return colo_nccl_error(&the_lib, "ncclGetVersion", r);
    COLO_FAIL_IF(the_lib.version < NCCL_VERSION(2, 18, 0) ||
                     the_lib.version >= NCCL_VERSION(3, 0, 0),
                 COLO_ERR_UNBUILT,
                 "nccl: version %d, expected 2.18 (21800) or a later 2.x; update the NCCL "
                 "that the process loads",
                 the_lib.version);
    found = true;
    return COLO_OK;
}

colo_status_t colo_nccl_find(const colo_nccl_lib_t **lib)
{
    COLO_HOLD(&lock);
    if (!found)
        COLO_TRY(find());
    *lib = &the_lib;
    return COLO_OK;
}
