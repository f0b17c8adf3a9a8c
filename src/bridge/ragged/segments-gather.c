/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segments-gather.c - the global tables of a ragged batch from those of each rank.
 *
 * Each rank sends one message of a fixed size: sizes, then its tables. Every rank sees all sizes,
 * so all of them know if some tables did not fit, and then a second all-gather of the largest size
 * follows.
 */
#include "bridge/ragged/ragged.h"

#include "comm/comm.h"
#include "core/error.h"
#include "core/range.h"

#include <stdlib.h>
#include <string.h>

enum { WORDS = 512 };                                          /* of the first message: 4 KiB */
enum { STATUS, SEGMENTS, ROWS, SCATTERED, SEQUENCES, HEADER }; /* its first words */

/* Sizes of local tables as words of a message, and what is wrong with the tables. */
static colo_status_t local_sizes(const colo_segments_t *local, int64_t *head)
{
    colo_segments_t own;
    const colo_segments_t *segments = &own;
    memset(head, 0, HEADER * sizeof *head);
    if (!local)
        return COLO_OK;
    COLO_TRY(colo_segments_read(&own, local));
    COLO_FAIL_IF(segments->packing, COLO_ERR_ARG,
                 "segments: local tables with a packing, expected NULL; set "
                 "it in the global tables");
    for (int64_t segment = 0; segment < segments->count; segment++) {
        COLO_FAIL_IF(segments->rows[segment] < 0 ||
                         !colo_add_ok(head[ROWS], segments->rows[segment], &head[ROWS]),
                     COLO_ERR_ARG, "segments: local segment %lld has %lld rows, expected %s",
                     (long long)segment, (long long)segments->rows[segment],
                     segments->rows[segment] < 0 ? ">= 0" : "a sum of at most 63 bits");
        COLO_FAIL_IF(
            segments->seq[segment] < 0 || segments->seq[segment] >= segments->nseqs, COLO_ERR_ARG,
            "segments: local segment %lld: seq is %lld, expected 0..%lld, counted "
            "among the sequences of this rank",
            (long long)segment, (long long)segments->seq[segment], (long long)segments->nseqs - 1);
        /* if another rank has row_pos, all ranks get the position of each row */
        COLO_FAIL_IF(segments->pos && segments->pos[segment] > INT64_MAX - segments->rows[segment],
                     COLO_ERR_ARG,
                     "segments: local segment %lld: its %lld rows are at positions from "
                     "%lld on, expected positions of at most 63 bits",
                     (long long)segment, (long long)segments->rows[segment],
                     (long long)segments->pos[segment]);
    }
    head[SEGMENTS] = segments->count;
    head[SCATTERED] =
        segments->count && !segments->pos; /* row_pos may be NULL if there are no rows */
    head[SEQUENCES] = segments->nseqs;
    return COLO_OK;
}

/* Words of a whole message; -1: beyond 63 bits. */
static int64_t message_words(const int64_t *head)
{
    int64_t n, more;
    if (!colo_mul_ok(head[SEGMENTS], head[SCATTERED] ? 3 : 4, &n) ||
        !colo_mul_ok(head[SEQUENCES], 2, &more) || !colo_add_ok(n, more, &n) ||
        !colo_add_ok(n, head[SCATTERED] ? head[ROWS] : 0, &n) || !colo_add_ok(n, HEADER, &n))
        return -1;
    return n;
}

static int64_t *put(int64_t *offset, const int64_t *table, int64_t n)
{
    if (n)
        memcpy(offset, table, (size_t)n * sizeof *offset);
    return offset + n;
}

static void write_message(int64_t *to, const int64_t *head, const colo_segments_t *segments)
{
    to = put(to, head, HEADER);
    if (!segments)
        return;
    to = put(to, segments->rows, segments->count);
    to = put(to, segments->src_dp, segments->count);
    to = put(to, segments->seq, segments->count);
    to = head[SCATTERED] ? put(to, segments->row_pos, head[ROWS])
                         : put(to, segments->pos, segments->count);
    to = put(to, segments->seq_len, segments->nseqs);
    (void)put(to, segments->seq_dp, segments->nseqs);
}

/* The tables of @n messages of @words each, one after the other. */
static colo_status_t join(const int64_t *all, int32_t n, int64_t words, colo_segments_t **out)
{
    int64_t count = 0, rows = 0, nseqs = 0;
    bool scattered = false;
    for (int32_t rank = 0; rank < n; rank++) {
        const int64_t *head = all + rank * words;
        count += head[SEGMENTS];
        nseqs += head[SEQUENCES];
        scattered = scattered || head[SCATTERED];
        COLO_FAIL_IF(!colo_add_ok(rows, head[ROWS], &rows), COLO_ERR_ARG,
                     "segments: the rows of rank %d make the sum of all rows exceed 63 bits",
                     (int)rank);
    }
    /* tables have entries, so a rank that sends positions row by row has as many of them */
    const int64_t places = scattered ? rows : count;
    int64_t size = 0;
    colo_segments_t *segments = NULL;
    if (colo_mul_ok(3 * count + 2 * nseqs, sizeof *all, &size) && places <= INT64_MAX / 16 &&
        colo_add_ok(size, places * (int64_t)sizeof *all, &size) &&
        colo_add_ok(size, sizeof *segments, &size))
        segments = malloc((size_t)size);
    COLO_FAIL_IF(!segments, COLO_ERR_NOMEM, "segments: %lld segments in %lld sequences",
                 (long long)count, (long long)nseqs);
    int64_t *offset = (int64_t *)(segments + 1);
    int64_t *t_rows = offset, *t_src = offset + count, *t_seq = offset + 2 * count,
            *t_pos = offset + 3 * count, *t_len = t_pos + places, *t_dp = t_len + nseqs;
    *segments = (colo_segments_t){.struct_size = sizeof *segments,
                                  .count = count,
                                  .rows = t_rows,
                                  .src_dp = t_src,
                                  .seq = t_seq,
                                  .pos = scattered ? NULL : t_pos,
                                  .row_pos = scattered ? t_pos : NULL,
                                  .nseqs = nseqs,
                                  .seq_len = t_len,
                                  .seq_dp = t_dp};
    for (int32_t rank = 0; rank < n; rank++) {
        const int64_t *head = all + rank * words, *from = head + HEADER, nsegments = head[SEGMENTS],
                      sequences = head[SEQUENCES], before = t_len - segments->seq_len;
        t_rows = put(t_rows, from, nsegments);
        t_src = put(t_src, from + nsegments, nsegments);
        for (int64_t i = 0; i < nsegments; i++)
            *t_seq++ = from[2 * nsegments + i] + before;
        const int64_t *pos = from + 3 * nsegments;
        if (head[SCATTERED] || !scattered) {
            const int64_t positions = head[SCATTERED] ? head[ROWS] : nsegments;
            t_pos = put(t_pos, pos, positions);
            pos += positions;
        } else {
            for (int64_t i = 0; i < nsegments; i++)
                for (int64_t k = 0; k < from[i]; k++)
                    *t_pos++ = pos[i] + k;
            pos += nsegments;
        }
        t_len = put(t_len, pos, sequences);
        t_dp = put(t_dp, pos + sequences, sequences);
    }
    *out = segments;
    return COLO_OK;
}

/* All ranks' messages of @words each; the caller frees. Collective. */
static colo_status_t gather(colo_comm_t *comm, const int64_t *head, const colo_segments_t *segments,
                            int64_t words, int64_t **all)
{
    int64_t size;
    int64_t *mine = NULL;
    *all = NULL;
    if (colo_mul_ok(words, (int64_t)comm->size, &size) && size <= INT64_MAX / 8) {
        mine = calloc((size_t)words, sizeof *mine);
        *all = malloc((size_t)size * sizeof **all);
    }
    if (!mine || !*all) {
        free(mine);
        return colo_comm_fail(
            comm, colo_fail(COLO_ERR_NOMEM, "segments: tables of %d ranks", (int)comm->size));
    }
    write_message(mine, head, message_words(head) <= words ? segments : NULL);
    colo_status_t st = colo_comm_gather(comm, COLO_OP_ALL_GATHER, COLO_CATEGORY_BRIDGE,
                                        (uint64_t *)mine, (uint64_t *)*all, words);
    free(mine);
    return st;
}

colo_status_t colo_segments_gather(colo_segments_t **global, const colo_segments_t *local,
                                   colo_comm_t *comm)
{
    COLO_RANGE();
    int64_t head[HEADER], *all = NULL, words = WORDS, largest = 0;
    COLO_FAIL_IF(!comm, COLO_ERR_ARG, "segments: comm is NULL");
    COLO_TRY(colo_comm_alive(comm, "segments gather"));
    colo_status_t mine =
        global ? local_sizes(local, head) : colo_fail(COLO_ERR_ARG, "segments: global is NULL");
    if (mine == COLO_OK && message_words(head) < 0)
        mine = colo_fail(COLO_ERR_ARG, "segments: local tables exceed 63 bits");
    if (mine < 0)
        memset(head, 0, sizeof head);
    head[STATUS] = mine;
    colo_status_t st = gather(comm, head, mine < 0 ? NULL : local, words, &all);
    bool failed = false;
    for (int32_t rank = 0; st == COLO_OK && rank < comm->size; rank++) {
        const int64_t n = message_words(all + rank * words);
        largest = n > largest ? n : largest;
        failed = failed || all[rank * words + STATUS] < 0;
    }
    if (st == COLO_OK && failed) /* on all ranks: each learns the error message */
        st = colo_comm_agree(comm, "segments gather", 0, mine);
    if (st == COLO_OK && largest > words) {
        words = largest;
        free(all);
        st = gather(comm, head, local, words, &all);
    }
    COLO_THEN(st, join(all, comm->size, words, global));
    free(all);
    return st;
}

void colo_segments_free(colo_segments_t **segments)
{
    if (!segments)
        return;
    free(*segments);
    *segments = NULL;
}
