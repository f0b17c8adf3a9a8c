/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drill.h - between the job of a drill and its faults (drill.c) and what makes its ranks:
 * drill_host.c, whose tensors are in host memory, or drill_gpu.c, whose tensors are on GPUs.
 */
#ifndef TESTS_FAULTS_DRILL_H
#define TESTS_FAULTS_DRILL_H

#include "harness/harness.h"

#include "comm/comm.h"
#include "core/error.h"

#include <stdatomic.h>

enum { RANKS = 4, CULPRIT = 2 };

struct rank {
    int32_t me;
    FILE *out;
    colo_comm_t *world; /* carries bridges */
    colo_comm_t *sums;  /* the same ranks; can be split and can sum */
    colo_mem_t mem;
    colo_stream_t stream;
    void *where; /* for drill_gpu.c */
};

/* ---- drill.c ---- */

extern const char *folder; /* each rank writes its own file there */
extern char fault[32], step[32];
extern int deadline_ms;
/* How long processes may take to connect, and a fresh communicator to sum: that is no fault. */
enum { PATIENCE_MS = 10000 };
extern _Atomic int sends_to_live; /* this process is killed before its last send(); 0: it is not */
extern uint32_t next_version;     /* 1: this process runs the library after this one */

/* Is this the rank at fault, and @name its fault? */
bool is(const struct rank *r, const char *name);
void report_fault(void);
void report(struct rank *r, const char *call, colo_status_t st, double begin);
bool open_rank(struct rank *r, int32_t me);
/* The job over r->world and r->sums; it reports its status, and destroys all but these. */
colo_status_t work(struct rank *r);

/* ---- drill_host.c or drill_gpu.c ---- */

extern const char transports[]; /* for messages */
/* Runs the job over @transport, and then uses a fresh communicator; returns what main() does. */
int run_worlds(const char *transport);
/* Moves @bytes at the data of @t to where the bridges of this rank have their tensors. */
colo_status_t place_tensor(struct rank *r, colo_tensor_t *t, size_t bytes);
/* The sum of a 1 of each rank of @c, which is r->sums or a part of it. */
colo_status_t sum_ranks(struct rank *r, colo_comm_t *c, float *sum);
/* @st of a call over r->world, or what became of it on the stream; waits for that. */
colo_status_t wait_ended(struct rank *r, colo_status_t st);
/* Before the rank at fault destroys what it has, a communicator of @pair among it: work on its
 * device that does not end. */
void burden_device(struct rank *r, colo_comm_t *pair);
/* Before the first call of another thread of the rank. */
void enter_thread(struct rank *r);

/* ---- tests/fake/drill_ipc.c; NULL without the stand-in for CUDA ---- */

/* The ranks open each other's memory as processes do, from now on; all of them call. */
colo_status_t be_processes(struct rank *r) __attribute__((weak));
/* The rank's part of @step fails when the others have opened its memory. */
void fail_while_open(struct rank *r) __attribute__((weak));
/* Did a rank free what another one had open? */
bool freed_while_open(void) __attribute__((weak));

#endif
