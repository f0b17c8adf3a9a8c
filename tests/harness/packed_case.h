/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packed_case.h - random batches of packings, and one of them on a bridge of the library.
 *
 * Every rank runs forward and backward and compares every byte of its tensors and the bytes that
 * it received with tests/ref/ref_packed.h.
 */
#ifndef TESTS_HARNESS_PACKED_CASE_H
#define TESTS_HARNESS_PACKED_CASE_H

#include <colobridge.h>

#include "harness/ragged_run.h"
#include "ref/ref_packed.h"

enum { T_PACKED_SEQS = 6, T_PACKED_PIECES = 40 };

typedef struct t_packed {
    ref_packed_t side[2]; /* source, destination; tables point below */
    uint64_t seed;
    int64_t h, ranks_per_node, max_rows;
    colo_dtype_t dtype;
    int32_t world;
    const t_ragged_where_t *where; /* where tensors of calls are; NULL: host memory */
    int64_t len[T_PACKED_SEQS], dp[2][T_PACKED_SEQS], cp[2][T_PACKED_SEQS], first[2][T_PACKED_SEQS],
        room[2][T_PACKED_SEQS], start[2][T_PACKED_SEQS + 1], piece[2][T_PACKED_PIECES],
        owner[2][T_PACKED_PIECES];
} t_packed_t;

/* A valid case of at most @most ranks. Not moved afterwards. */
void t_packed_random(t_packed_t *t, uint64_t seed, int64_t most);
/* The case in words; static storage of the calling thread. */
const char *t_packed_text(const t_packed_t *t);
colo_packing_t t_packing(const ref_packing_t *p);
/* Cuts rows of a context rank over tp, too; features over that dim, NULL: not. If it is cp, rows
 * are not cut over it. */
void t_packed_split(ref_packed_t *side, bool sp, const char *features);
/* Is the gradient a sum over context ranks? */
bool t_packed_sums(const t_packed_t *t);
/* Elements that @rank must receive. */
int64_t t_packed_receives(const t_packed_t *t, int64_t rank, colo_pass_t pass);
colo_status_t t_packed_bridge(colo_bridge_t **bridge, const t_packed_t *t, colo_comm_t *comm);
colo_status_t t_packed_pass(colo_batch_t *batch, const t_packed_t *t, colo_comm_t *comm,
                            colo_pass_t pass);
/* One rank's whole job. */
colo_status_t t_packed_on(const t_packed_t *t, colo_comm_t *comm);

#endif
