/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record.h - what the files of the recorder share: a line of a record, and where it goes.
 *
 * Addresses mean nothing in another process, so a record names memory by what it is to the case
 * (x0, y0, ...; work: what the library has allocated) and the distance from its beginning.
 */
#ifndef TESTS_GUARD_RECORD_H
#define TESTS_GUARD_RECORD_H

#include "core/device.h"

#include <colobridge.h>

enum { GUARD_RANKS = 16 };

/* What one record is about. OUTPUTS and STATUS: what calls have written and said. */
typedef enum recorder { PLAN, EXCHANGES, TRANSFERS, BOXES, OUTPUTS, STATUS, RECORDERS } recorder_t;
extern const char *const recorder_names[RECORDERS];

/* The calling thread is this rank from now on; -1: none, and says nothing. */
void log_of_rank(int32_t rank);
void log_reset(bool keep_text);
uint64_t log_hash(recorder_t recorder); /* of all ranks */
void log_print(void);

/* A line. */
void say(recorder_t recorder, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* How a line names an address, and a box. */
typedef struct name {
    char text[256];
} name_t;
name_t place_name(const void *p);
name_t box_name(const colo_box_t *b);
/* Lines up to the end are a multiset: their order does not count. */
void bag_begin(recorder_t recorder);
void bag_end(recorder_t recorder);

/* Memory that the calling rank's records may name, until it is forgotten. */
void memory_is(const void *data, size_t bytes, const char *name, bool registered);
void memory_forget(const void *data);
/* How far into registered memory of this rank? -1: not in any. */
int64_t memory_registered(const void *data, size_t bytes);

/* device.c: tables of a device that record every call, and do it on the host. */
void device_init(void);

/* peers.c: peers that reach each other's memory in this process. */
typedef enum reach { REACH_ALL, REACH_GROUPS, REACH_SOME, REACH_NONE } reach_t;
void peers_init(reach_t reach, uint64_t seed);
/* Makes @comm one of GPUs, and host again. */
colo_status_t peers_join(colo_comm_t *comm);
void peers_leave(colo_comm_t *comm);
/* adapt.h: what a table of a comm says of messages on a subconnection. */
struct colo_comm_backend;
void guard_subconnections(struct colo_comm_backend *backend);

#endif
