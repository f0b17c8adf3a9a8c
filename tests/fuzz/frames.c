/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frames.c - rank 0 of two over a socket on which the peer writes any frames: each operation ends
 * before its deadline with a status, and rank 0 can be destroyed.
 */
#include "fuzz.h"

#include "comm/process/group.h"
#include "comm/process/transport-unix.h"

#include <sys/socket.h>
#include <unistd.h>

static const colo_comm_backend_t over_sockets = COLO_PROCESS_COMM("sockets");

/* What a peer could have meant, with some fields of its own. */
static void write_frame(fuzz_t *f, int fd)
{
    unsigned char bytes[8 + sizeof(colo_frame_t) + 64];
    colo_frame_t frame;
    const uint8_t changes = fuzz_u8(f);
    const size_t payload = (size_t)fuzz_range(f, 0, 64);
    fuzz_bytes(f, &frame, sizeof frame);
    if (!(changes & 1))
        frame.magic = COLO_FRAME_MAGIC;
    if (!(changes & 2))
        frame.from = 1;
    if (!(changes & 4))
        frame.group = 1;
    if (!(changes & 8))
        frame.seq = 1;
    if (!(changes & 16))
        frame.bytes = payload;
    if (!(changes & 32))
        frame.kind %= 16;
    uint64_t length = sizeof frame + payload;
    if (changes & 64)
        length = (uint64_t)fuzz_i64(f);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, &frame, sizeof frame);
    fuzz_bytes(f, bytes + 8 + sizeof frame, payload);
    (void)!send(fd, bytes, (8 + sizeof frame + payload + 7) / 8 * 8 - (changes >> 7),
                MSG_NOSIGNAL | MSG_DONTWAIT);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    float x[16] = {0}, y[32];
    int pair[2];
    void *connections = NULL;
    colo_comm_t *c = NULL;
    setenv("COLO_TIMEOUT_MS", "1", 1); /* destroy waits as long for a goodbye */
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    FUZZ_CHECK(colo_transport_sockets_new(0, 2, (int[]){-1, pair[0]}, NULL, NULL, &connections) ==
                   COLO_OK,
               "%s", colo_last_error());
    FUZZ_CHECK(colo_process_comm(&over_sockets, &colo_transport_sockets, connections, 0, 2, &c) ==
                   COLO_OK,
               "%s", colo_last_error());
    for (int64_t n = fuzz_range(&f, 1, 4); n > 0; n--)
        write_frame(&f, pair[1]);
    if (fuzz_range(&f, 0, 3) == 0)
        shutdown(pair[1], SHUT_WR);
    const int64_t count = fuzz_range(&f, 0, 16);
    colo_status_t st;
    if (fuzz_range(&f, 0, 1)) {
        st = colo_comm_all_gather(c, x, y, count, COLO_F32, NULL);
    } else {
        const colo_box_t box = {y, {1, 1, count}, {0, 0, 1}};
        const colo_message_t recv = {.peer = 1, .nboxes = 1, .boxes = &box};
        st = colo_comm_exchange(c, NULL, 0, &recv, 1, COLO_F32, NULL);
    }
    if (st < 0)
        FUZZ_REFUSED(st);
    close(pair[1]);
    colo_comm_destroy(&c);
    return 0;
}
