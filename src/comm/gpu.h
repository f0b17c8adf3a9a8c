/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h (private) - the seam between the library and libcolobridge-nccl.so.
 *
 * The backend library cannot see private symbols, so it is handed a table of what it needs;
 * services.c in it gives them their names back.
 */
#ifndef COLO_COMM_GPU_H
#define COLO_COMM_GPU_H

#include "comm/comm.h"

typedef struct colo_services {
    colo_status_t (*fail)(colo_status_t status, const char *sentence);
    const char *(*last_error)(void);
    colo_status_t (*comm_new)(colo_comm_t **comm, const colo_comm_ops_t *ops, int32_t rank,
                              int32_t size, const int64_t *world_rank);
    colo_status_t (*comm_child)(colo_comm_t *parent, const int32_t *members, int32_t n,
                                uint64_t tag, const char *name, colo_comm_t **comm);
    colo_status_t (*comm_agree)(colo_comm_t *c, const char *what, uint64_t fingerprint,
                                colo_status_t mine);
    colo_status_t (*comm_all_gather)(colo_comm_t *c, colo_category_t category, const void *send,
                                     void *recv, int64_t count, colo_dtype_t dtype,
                                     colo_stream_t stream);
    colo_status_t (*comm_broadcast)(colo_comm_t *c, void *buffer, int64_t count, colo_dtype_t dtype,
                                    int32_t root, colo_stream_t stream);
    void (*comm_destroy)(colo_comm_t **comm);
    uint64_t (*process)(void);
    const char *(*op_describe)(char *text, size_t cap, colo_op_desc_t op, uint64_t seq);
    size_t (*dtype_size)(colo_dtype_t dtype);
} colo_services_t;

/* In a backend library (services.c): its colo_backend_t.bind. */
void colo_gpu_bind(const colo_services_t *services);

/* Loads the backend library of that name, whose table has a create. */
colo_status_t colo_gpu_load(const char *name, const colo_comm_ops_t **ops);

#endif
