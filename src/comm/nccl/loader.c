/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loader.c - which NCCL: the one that is in the process already, else libnccl.so.2.
 *
 * A process has one NCCL; a second copy would fight over the same GPUs. So: symbols that are
 * visible to everybody, then a library of that name that somebody loaded (PyTorch does), and only
 * then a load of our own. Result codes are never interpreted, only named by the library itself.
 */
#include "comm/nccl/comm.h"

#include "core/error.h"

#include <dlfcn.h>

static colo_nccl_lib_t the_lib;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *look_up(void *so, colo_nccl_lib_t *lib)
{
    const struct {
        const char *name;
        void *at;
    } want[] = {
        {"ncclGetVersion", &lib->get_version},
        {"ncclGetUniqueId", &lib->get_unique_id},
        {"ncclCommInitRank", &lib->init_rank},
        {"ncclCommDestroy", &lib->destroy},
        {"ncclCommAbort", &lib->abort},
        {"ncclCommGetAsyncError", &lib->async_error},
        {"ncclCommCount", &lib->count},
        {"ncclCommUserRank", &lib->user_rank},
        {"ncclCommCuDevice", &lib->device},
        {"ncclGetErrorString", &lib->error_string},
        {"ncclGetLastError", &lib->last_error},
        {"ncclGroupStart", &lib->group_start},
        {"ncclGroupEnd", &lib->group_end},
        {"ncclAllGather", &lib->all_gather},
        {"ncclAllReduce", &lib->all_reduce},
        {"ncclBroadcast", &lib->broadcast},
        {"ncclSend", &lib->send},
        {"ncclRecv", &lib->recv},
    };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        void *f = dlsym(so, want[i].name);
        if (!f)
            return want[i].name;
        *(void **)want[i].at = f;
    }
    return NULL;
}

static colo_status_t find(colo_nccl_lib_t *lib)
{
    const char *name = "libnccl.so.2";
    void *so = dlsym(RTLD_DEFAULT, "ncclCommInitRank") ? RTLD_DEFAULT : NULL;
    bool here = so != NULL;
    if (!here) {
        so = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
        so = so ? so : dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!so) {
            const char *why = dlerror();
            return colo_fail(COLO_ERR_UNBUILT, "nccl: %s cannot be loaded (%.300s)", name,
                             why ? why : "no reason given");
        }
    }
    const char *missing = look_up(so, lib);
    if (missing)
        return colo_fail(COLO_ERR_UNBUILT, "nccl: the NCCL in this process has no %s", missing);
    ncclResult_t r = lib->get_version(&lib->version);
    if (r != ncclSuccess)
        return colo_nccl_error(lib, "ncclGetVersion", r);
    if (lib->version < NCCL_VERSION(2, 28, 0) || lib->version >= NCCL_VERSION(3, 0, 0))
        return colo_fail(COLO_ERR_UNBUILT, "nccl: version %d, expected 2.28 (22800) or later",
                         lib->version);
    return COLO_OK;
}

colo_status_t colo_nccl_find(const colo_nccl_lib_t **lib)
{
    colo_status_t st = COLO_OK;
    pthread_mutex_lock(&lock);
    if (!the_lib.version || !the_lib.recv) {
        colo_nccl_lib_t found = {0};
        st = find(&found);
        if (st == COLO_OK)
            the_lib = found;
    }
    pthread_mutex_unlock(&lock);
    if (st == COLO_OK)
        *lib = &the_lib;
    return st;
}
