/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl_world.h - communicators and their operations, between nccl.c and nccl_stream.c.
 */
#ifndef TESTS_FAKE_NCCL_WORLD_H
#define TESTS_FAKE_NCCL_WORLD_H

#include "fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

enum kind { ALL_GATHER, ALL_REDUCE, BROADCAST, SEND, RECV };

struct data { /* what a rank has brought; under the world's lock */
    int32_t refs;
    size_t bytes;
    char content[];
};

struct call {
    enum kind kind;
    const void *send;
    void *recv;
    size_t bytes;
    int32_t peer; /* or the root */
};

struct message { /* a collective is one from each rank to each */
    struct message *next;
    struct call call; /* of the rank that sends it */
    struct data *data;
};

struct world { /* the ranks of one unique id */
    struct world *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t n, arrived, refs;
    bool ended;
    struct message **mailbox; /* [n][n]: from, to; oldest first */
    int64_t *taken;           /* [n][n] */
};

struct ncclComm {
    struct ncclComm *next; /* those that are there */
    struct world *world;
    int32_t rank, device;
    _Atomic int32_t refs; /* the handle, and what is enqueued */
    _Atomic bool aborted, gone;
    _Atomic int32_t running;
    int64_t *sent; /* [n]: the stream's */
};

struct group { /* what one communicator enqueues at once */
    struct ncclComm *comm;
    int32_t n;
    struct call call[];
};

void fake_data_put(struct data *d);
/* Runs a struct group, on the stream. */
void fake_group_run(void *arg);

#endif
