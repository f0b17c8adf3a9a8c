/* SPDX-License-Identifier: Apache-2.0 */
/*
 * services.c - in a backend library: private functions of libcolobridge.so under their names,
 * and what its files share about CUDA and the host.
 *
 * They come as a table when the library is loaded, so the backend needs no symbol of it and works
 * just as well in a program that linked the library statically.
 */
#include "comm/gpu.h"

#include "comm/peer/registry.h"
#include "core/hash.h"
#include "core/error.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const colo_services_t *_Atomic bound;

void colo_gpu_bind(const colo_services_t *services)
{
    atomic_store(&bound, services);
}

colo_status_t colo_fail(colo_status_t status, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return bound->fail(status, text);
}

const char *colo_last_error(void)
{
    return bound->last_error();
}

colo_status_t colo_comm_i_new(colo_comm_t **comm, const colo_comm_ops_t *ops, int32_t rank,
                              int32_t size, const int64_t *world_rank)
{
    return bound->comm_new(comm, ops, rank, size, world_rank);
}

colo_status_t colo_comm_i_child(colo_comm_t *parent, const int32_t *members, int32_t n,
                                uint64_t tag, const char *name, colo_comm_t **comm)
{
    return bound->comm_child(parent, members, n, tag, name, comm);
}

colo_status_t colo_comm_i_agree(colo_comm_t *c, const char *what, uint64_t fingerprint,
                                colo_status_t mine)
{
    return bound->comm_agree(c, what, fingerprint, mine);
}

colo_status_t colo_comm_i_all_gather(colo_comm_t *c, colo_category_t category, const void *send,
                                     void *recv, int64_t count, colo_dtype_t dtype,
                                     colo_stream_t stream)
{
    return bound->comm_all_gather(c, category, send, recv, count, dtype, stream);
}

colo_status_t colo_comm_broadcast(colo_comm_t *c, void *buffer, int64_t count, colo_dtype_t dtype,
                                  int32_t root, colo_stream_t stream)
{
    return bound->comm_broadcast(c, buffer, count, dtype, root, stream);
}

void colo_comm_destroy(colo_comm_t **comm)
{
    bound->comm_destroy(comm);
}

uint64_t colo_comm_i_process(void)
{
    return bound->process();
}

const char *colo_op_describe(char *text, size_t cap, colo_op_desc_t op, uint64_t seq)
{
    return bound->op_describe(text, cap, op, seq);
}

size_t colo_dtype_size(colo_dtype_t dtype)
{
    return bound->dtype_size(dtype);
}

void colo_autofree_(void *p)
{
    free(*(void **)p);
}

double colo_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- CUDA and the host ---- */

colo_status_t colo_cuda_error(const char *what, cudaError_t e)
{
    (void)cudaGetLastError(); /* or the next launch reports it again */
    return colo_fail(COLO_ERR_CUDA, "%s: CUDA says: %s", what, cudaGetErrorString(e));
}

uint64_t colo_host_hash(void)
{
    char text[128] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r"); /* containers share names */
    if (file) {
        if (!fgets(text, sizeof text, file))
            text[0] = '\0';
        fclose(file);
    }
    if (!text[0])
        gethostname(text, sizeof text - 1);
    return colo_hash_bytes(COLO_HASH_INIT, text, strlen(text));
}
