/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_frames.c - rank 0 over a socket whose other end is this test: what a broken or hostile peer
 * may write there, byte for byte.
 *
 * Each case writes frames first and then lets rank 0 meet them.
 */
#include "harness/harness.h"

#include "harness/allocations.h"

#include "comm/process/group.h"
#include "comm/process/transport-unix.h"
#include "core/hash.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static const colo_comm_backend_t over_sockets = COLO_PROCESS_COMM("sockets");

enum { COUNT = 10000, DEADLINE_MS = 1000 };

struct bench { /* rank 0 and the end of rank 1 */
    colo_comm_t *comm;
    int peer;
};

static struct bench set_up(void)
{
    struct bench b = {NULL, -1};
    int pair[2];
    void *connections = NULL;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    b.peer = pair[1];
    assert_ok(colo_transport_sockets_new(0, 2, (int[]){-1, pair[0]}, NULL, NULL, &connections));
    setenv("COLO_TIMEOUT_MS", "200", 1); /* destroy waits as long for a goodbye */
    assert_ok(
        colo_process_comm(&over_sockets, &colo_transport_sockets, connections, 0, 2, &b.comm));
    unsetenv("COLO_TIMEOUT_MS");
    assert_ok(colo_comm_set_timeout(b.comm, DEADLINE_MS));
    return b;
}

static void tear_down(struct bench *b)
{
    close(b->peer);
    colo_comm_destroy(&b->comm);
}

/* False when rank 0 does not take it in. */
static bool write_frame(const struct bench *b, colo_frame_t frame, const void *payload,
                        size_t bytes)
{
    static unsigned char memory[8 + COLO_FRAME_MAX + 8];
    const uint64_t length = sizeof frame + bytes;
    const size_t whole = 8 + (length + 7) / 8 * 8;
    memcpy(memory, &length, sizeof length);
    memcpy(memory + 8, &frame, sizeof frame);
    if (bytes && payload)
        memcpy(memory + 8 + sizeof frame, payload, bytes);
    return send(b->peer, memory, whole, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)whole;
}

static colo_frame_t frame_of(colo_frame_kind_t kind, uint64_t group, uint64_t bytes)
{
    return (colo_frame_t){.magic = COLO_FRAME_MAGIC,
                          .kind = (uint8_t)kind,
                          .from = 1,
                          .group = group,
                          .seq = 1,
                          .bytes = bytes};
}

/* The head of a message of COUNT floats to rank 0, in its first exchange. */
static colo_frame_t head_of_exchange(void)
{
    colo_frame_t h = frame_of(COLO_FRAME_HEADER, 1, COUNT * sizeof(float));
    colo_op_desc_t op = {.kind = COLO_OP_EXCHANGE, .dtype = COLO_F32};
    h.flags = COLO_FRAME_SENDS;
    h.desc = colo_op_pack(&op);
    h.sent = (struct colo_shape_){.bytes = COUNT * sizeof(float),
                                  .print = COLO_HASH_INIT,
                                  .first = {1, 1, COUNT},
                                  .nboxes = 1};
    for (int i = 0; i < 3; i++)
        h.sent.print = colo_hash_i64(h.sent.print, h.sent.first[i]);
    return h;
}

static colo_status_t receive(const struct bench *b, float *y)
{
    colo_box_t box = {y, {1, 1, COUNT}, {0, 0, 1}};
    colo_message_t m = {1, 1, &box};
    return colo_comm_exchange(b->comm, NULL, 0, &m, 1, COLO_F32, NULL);
}

static const char *const NONSENSE = "world rank 1 sends frames that world rank 0 does not "
                                    "understand";

struct piece {
    const struct bench *bench;
    uint64_t bytes;
};

/* Rank 1: a head, and when rank 0 asks for the rest, a piece of it. */
static void *send_piece(void *arg)
{
    static const unsigned char zeros[COLO_FRAME_CHUNK];
    const struct piece *p = arg;
    unsigned char memory[8 + sizeof(colo_frame_t)];
    colo_frame_t frame = {.kind = 0};
    write_frame(p->bench, head_of_exchange(), zeros, COLO_FRAME_EAGER);
    while (frame.kind != COLO_FRAME_READY &&
           recv(p->bench->peer, memory, sizeof memory, MSG_WAITALL) == (ssize_t)sizeof memory)
        memcpy(&frame, memory + 8, sizeof frame);
    write_frame(p->bench, frame_of(COLO_FRAME_DATA, 1, p->bytes), zeros, (size_t)p->bytes);
    return NULL;
}

static void refuse_piece(uint64_t bytes)
{
    static float y[COUNT];
    struct bench b = set_up();
    struct piece piece = {&b, bytes};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, send_piece, &piece), 0);
    colo_status_t st = receive(&b, y);
    shutdown(b.peer, SHUT_RDWR);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_fails(st, COLO_ERR_MISMATCH, NONSENSE);
    tear_down(&b);
}

T_CASE(piece_of_part_of_an_element_is_refused)
{
    refuse_piece(1);
    refuse_piece(4 * 100 + 2);
}

T_CASE(piece_of_no_or_too_many_bytes_is_refused)
{
    refuse_piece(0);
    refuse_piece(COUNT * sizeof(float));
}

T_CASE(stream_cut_inside_an_element_ends)
{
    int32_t from[6] = {1, 2, 3, 4, 5, 6}, to[8] = {0};
    colo_box_t box = {from, {1, 1, 6}, {0, 0, 1}};
    colo_cursor_t c;
    colo_cursor_init(&c, &box, 1, 4);
    colo_cursor_move(&c, (char *)to, NULL, 4 * 4 + 3);
    assert_int_equal(to[3], 4);
    assert_int_equal(to[4], 0);
    colo_cursor_move(&c, (char *)to, NULL, 4 * 4);
    assert_int_equal(to[1], 6);
    assert_int_equal(to[2], 3);
}

/* Every one is the first frame of a world of its own. */
T_CASE(frame_that_makes_no_sense_is_an_error_at_once)
{
    static const unsigned char zeros[COLO_FRAME_EAGER];
    enum { BAD = 10 };
    colo_frame_t bad[BAD];
    for (int i = 0; i < BAD; i++)
        bad[i] = frame_of(COLO_FRAME_BYE, 1, 0);
    bad[0].magic++;
    bad[1].kind = 99;
    bad[2].from = 0;
    bad[3].from = -1;
    bad[4].from = 2;
    bad[5] = frame_of(COLO_FRAME_DATA, 1, 0);  /* in no operation */
    bad[6] = frame_of(COLO_FRAME_DATA, 99, 0); /* of a group that is not here */
    bad[7] = frame_of(COLO_FRAME_READY, 0, 0); /* to all groups */
    bad[8] = frame_of(COLO_FRAME_HEADER, 1, COLO_FRAME_EAGER);
    bad[8].sent.bytes = 1; /* of another message than its bytes */
    bad[9] = frame_of(COLO_FRAME_HEADER, 1, 0);
    bad[9].sent.bytes = -1;
    for (int i = 0; i < BAD; i++) {
        struct bench b = set_up();
        assert_true(write_frame(&b, bad[i], zeros, (size_t)bad[i].bytes));
        colo_status_t st = colo_comm_check(b.comm);
        if (st != COLO_ERR_MISMATCH || !strstr(colo_last_error(), NONSENSE))
            fail_msg("frame %d: %s: %s", i, colo_status_name(st), colo_last_error());
        tear_down(&b);
    }
}

/* 4 MB are kept of the 84 MB that the next case writes. */
#ifdef __SANITIZE_THREAD__ /* which has up to six bytes more for each */
enum { KEPT_MAX_KIB = 64 << 10 };
#else
enum { KEPT_MAX_KIB = 16 << 10 };
#endif

T_CASE(frames_of_groups_that_are_not_made_are_kept_within_bounds)
{
    static const unsigned char zeros[COLO_FRAME_EAGER];
    struct bench b = set_up();
    struct rusage before, after;
    colo_frame_t head = frame_of(COLO_FRAME_HEADER, 99, COLO_FRAME_EAGER);
    head.sent.bytes = COLO_FRAME_EAGER;
    assert_true(write_frame(&b, head, zeros, COLO_FRAME_EAGER));
    assert_ok(colo_comm_check(b.comm)); /* one is what a rank that is ahead sends */
    getrusage(RUSAGE_SELF, &before);
    colo_status_t st = COLO_OK;
    for (int i = 0; i < 20000 && st == COLO_OK; i++)
        if (!write_frame(&b, head, zeros, COLO_FRAME_EAGER))
            st = colo_comm_check(b.comm);
    getrusage(RUSAGE_SELF, &after);
    assert_fails(st, COLO_ERR_MISMATCH, "to groups that world rank 0 did not make");
    assert_true(after.ru_maxrss - before.ru_maxrss < KEPT_MAX_KIB);
    tear_down(&b);
}

T_CASE(frame_that_is_cut_short_is_an_error_at_once)
{
    struct bench b = set_up();
    const uint64_t cut[2] = {8, COLO_FRAME_MAGIC}; /* its length, and all there is */
    assert_int_equal(send(b.peer, cut, sizeof cut, MSG_NOSIGNAL), sizeof cut);
    assert_fails(colo_comm_check(b.comm), COLO_ERR_MISMATCH, NONSENSE);
    tear_down(&b);
}

T_CASE(failure_of_a_peer_is_one_whatever_its_frame_says)
{
    static const char words[] = "because";
    static const struct {
        int64_t status, culprit;
        uint64_t group;
        colo_status_t want;
    } table[] = {{COLO_ERR_NOMEM, 1, 1, COLO_ERR_PEER},
                 {0, 1, 1, COLO_ERR_PEER},
                 {7, 2, 1, COLO_ERR_PEER},
                 {COLO_ERR_ABORTED, -1, 0, COLO_ERR_ABORTED},
                 {0, 99, 0, COLO_ERR_PEER}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct bench b = set_up();
        colo_frame_t f = frame_of(COLO_FRAME_FAIL, table[i].group, sizeof words);
        f.desc = (uint64_t)table[i].status;
        f.count = (uint64_t)table[i].culprit;
        assert_true(write_frame(&b, f, words, sizeof words));
        const colo_status_t st = colo_comm_check(b.comm);
        if (st != table[i].want || !strstr(colo_last_error(), words))
            fail_msg("frame %d: %s: %s", (int)i, colo_status_name(st), colo_last_error());
        tear_down(&b);
    }
}

T_CASE(peer_that_is_three_operations_ahead_is_a_mismatch)
{
    struct bench b = set_up();
    colo_frame_t h = frame_of(COLO_FRAME_HEADER, 1, 0);
    for (h.seq = 1; h.seq <= 3; h.seq++) {
        assert_ok(colo_comm_check(b.comm));
        assert_true(write_frame(&b, h, NULL, 0));
    }
    assert_fails(colo_comm_check(b.comm), COLO_ERR_MISMATCH,
                 "rank 1 of 'world' is three operations ahead of rank 0");
    tear_down(&b);
}

T_CASE(end_of_a_group_that_is_not_made_is_kept)
{
    struct bench b = set_up();
    assert_true(write_frame(&b, frame_of(COLO_FRAME_BYE, 99, 0), NULL, 0));
    assert_true(write_frame(&b, frame_of(COLO_FRAME_FAIL, 99, 0), NULL, 0));
    assert_ok(colo_comm_check(b.comm));
    tear_down(&b);
}

T_CASE(frame_that_cannot_be_kept_is_an_error_without_memory)
{
#ifdef SANITIZED
    skip();
#endif
    struct bench b = set_up();
    assert_true(write_frame(&b, frame_of(COLO_FRAME_HEADER, 99, 0), NULL, 0));
    fail_at = 1;
    const colo_status_t st = colo_comm_check(b.comm);
    assert_int_equal(fail_at, 0);
    assert_fails(st, COLO_ERR_NOMEM, "no memory for a frame that came before its group was made");
    tear_down(&b);
}

T_MAIN("comm/frames")
