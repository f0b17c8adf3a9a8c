/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments.h - the tables of a ragged batch: which rows belong together, which replica makes them,
 * where they land in the LLM's packed sequences. And the balance of segments over replicas.
 *
 * A segment is an image or a clip: rows that stay together. A sequence is one packed sequence of
 * the LLM. All tables are i64 in host memory and are the same on every rank (docs/concepts/ragged.md).
 */
#ifndef COLOBRIDGE_SEGMENTS_H
#define COLOBRIDGE_SEGMENTS_H

#include <colobridge/comm.h>
#include <colobridge/packing.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct colo_segments_t {
    size_t struct_size;
    int64_t count;          /* E segments, >= 0 */
    const int64_t *rows;    /* [count] rows of each segment, >= 0 */
    const int64_t *src_dp;  /* [count] the source replica that makes it */
    const int64_t *seq;     /* [count] the sequence that it is part of */
    const int64_t *pos;     /* [count] row r is at position pos + r; NULL with row_pos */
    const int64_t *row_pos; /* [sum of rows] the position of each row; NULL with pos */
    int64_t nseqs;          /* Q sequences, >= 0 */
    const int64_t *seq_len; /* [nseqs] positions, padding included, >= 0 */
    const int64_t *seq_dp;  /* [nseqs] the destination replica that holds it */
    /* Sequences as a packing says, in the place of nseqs, seq_len and seq_dp: each may have context
     * ranks of its own. Borrowed. NULL: each sequence lies on all context ranks, ZIGZAG or BLOCK
     * as the layout says */
    const colo_packing_t *packing;
} colo_segments_t;
#ifdef __cplusplus /* C++17 has no designated initializers */
#define COLO_SEGMENTS_INIT                                                                        \
    sizeof(colo_segments_t), 0, nullptr, nullptr, nullptr, nullptr, nullptr, 0, nullptr, nullptr, \
        nullptr
#else
#define COLO_SEGMENTS_INIT .struct_size = sizeof(colo_segments_t)
#endif

/**
 * colo_segments_check() - do the tables fit a bridge from @src to @dst; local
 * @segments:  borrowed for the call. A table of zero entries may be NULL
 * @src:       the dims that split samples are the replicas, the dims that split rows (BLOCK) cut a
 *             replica's rows into equal blocks
 * @dst:       samples as above; rows: at most one context split (zigzag or block), then splits for
 *             sequence parallelism
 * Errors:     each names the segment or the sequence, and the numbers. COLO_ERR_ARG: rows < 0; a
 *             sequence or replica out of range; a position outside its sequence; two rows on one
 *             position; sums beyond 63 bits; tables missing. COLO_ERR_LAYOUT: a length that 2 * cp
 *             (zigzag) or cp does not divide; a local length that the sequence-parallel ranks do
 *             not divide; a layout that ragged batches cannot have (position map, order of splits,
 *             a source that splits rows other than BLOCK)
 */
COLO_API colo_status_t colo_segments_check(const colo_segments_t *segments,
                                           const colo_layout_t *src, const colo_layout_t *dst);

/** colo_segments_hash() - 64-bit over all tables, the same on every machine. Only of tables that
 *  colo_segments_check() accepts; 0 for NULL */
COLO_API uint64_t colo_segments_hash(const colo_segments_t *segments);

/**
 * colo_segments_gather() - the global tables from the local ones; collective over @comm
 * One host all-gather if the tables of each rank take at most 4,056 bytes, else two. The call does
 * not wait for a GPU, so a program may run it a step ahead.
 * @global:  out, owned by the caller, in one allocation: segments and sequences of all ranks, in
 *           rank order; free it with colo_segments_free()
 * @local:   borrowed for the call: segments and sequences of this rank only. seq counts this
 *           rank's sequences from 0; src_dp and seq_dp are global. NULL: this rank adds nothing.
 *           If several ranks know the same samples (along tp or cp), only one of them may bring
 *           them
 * Errors:   COLO_ERR_ARG (tables missing, rows < 0, a sequence out of range, sums or positions
 *           beyond 63 bits) on one rank: that rank gets it, the others get COLO_ERR_PEER with its
 *           error message, and the comm lives on. COLO_ERR_NOMEM, COLO_ERR_TIMEOUT, COLO_ERR_PEER
 */
COLO_API colo_status_t colo_segments_gather(colo_segments_t **global, const colo_segments_t *local,
                                            colo_comm_t *comm);
/** colo_segments_free() - what colo_segments_gather() made; takes NULL, leaves NULL */
COLO_API void colo_segments_free(colo_segments_t **segments);

/**
 * colo_segments_balance() - assign segments to replicas so that the loads are alike; local,
 * deterministic
 * Segments go by descending cost, ties by index, each to the least loaded replica, ties to the
 * lowest. With @current a segment stays where it is if the load of that replica, the segment
 * included, is at most (1 + @stick) times the mean load.
 * @assign:   out [count]: the replica of each segment; may be @current
 * @cost:     [count] >= 0, for example the rows
 * @count:    segments, >= 0
 * @n:        replicas, >= 1
 * @current:  [count] in [0, n), or NULL: segments have no place yet
 * @stick:    >= 0; ignored without @current
 * Errors:    COLO_ERR_ARG, naming the segment (nothing is written); COLO_ERR_NOMEM
 */
COLO_API colo_status_t colo_segments_balance(int64_t *assign, const int64_t *cost, int64_t count,
                                             int64_t n, const int64_t *current, double stick);

#ifdef __cplusplus
}
#endif
#endif
