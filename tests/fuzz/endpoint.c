/* SPDX-License-Identifier: Apache-2.0 */
/*
 * endpoint.c - what peers say of themselves before ranks connect, in any bytes: it is refused with
 * words or taken, and nothing behind it is read.
 */
#include "fuzz.h"

#include "comm/process/address.h"

enum { RANKS = 3 };

static void read_endpoint(fuzz_t *f, colo_endpoint_t *e, int32_t rank)
{
    const uint8_t right = fuzz_u8(f);
    fuzz_bytes(f, e, sizeof *e);
    if (right & 1)
        e->hello.magic = COLO_ENDPOINT_MAGIC;
    if (right & 2)
        e->hello.rank = rank;
    if (right & 4)
        e->hello.size = RANKS;
    if (right & 8) {
        e->hello.version = 1;
        e->hello.bytes = sizeof *e;
    }
    if (right & 16)
        e->status = -(int32_t)fuzz_range(f, 0, 1);
    if (right & 32)
        memset(e->why, 'x', sizeof e->why);
    if (right & 64)
        memset(&e->worker, 'y', sizeof e->worker);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_t f = {data, size};
    const colo_bootstrap_t b = {COLO_BOOTSTRAP_INIT, .rank = (int32_t)fuzz_range(&f, 0, RANKS - 1),
                                .size = RANKS};
    colo_endpoint_t *e = malloc(RANKS * sizeof *e);
    if (!e)
        return 0;
    for (int32_t r = 0; r < RANKS; r++)
        read_endpoint(&f, &e[r], r);
    const colo_status_t st = colo_endpoint_check_all(&b, e);
    if (st < 0)
        FUZZ_REFUSED(st);
    for (int32_t r = 0; r < RANKS; r++) {
        struct sockaddr_un a;
        FUZZ_CHECK(colo_endpoint_address(&e[r], &a) <= sizeof a, "address of rank %d", (int)r);
        FUZZ_CHECK(colo_endpoint_near(&e[r], &e[0], false) ==
                       colo_endpoint_near(&e[0], &e[r], false),
                   "near of rank %d", (int)r);
        FUZZ_CHECK(st < 0 || e[r].status >= 0, "rank %d failed, and was taken", (int)r);
    }
    free(e);
    return 0;
}
