/* SPDX-License-Identifier: Apache-2.0 */
/* test_create.c - what making a communicator leaves alone: the caller's default stream. */
#include "fake.h"
#include "harness/harness.h"

#include <colobridge/nccl.h>

#include <stdatomic.h>
#include <unistd.h>

static void hold(void *arg)
{
    while (!*(atomic_bool *)arg)
        usleep(100);
}

/* The caller's work is on it, and streams of the library do not wait for that. */
T_CASE(create_gives_the_default_stream_nothing)
{
    static atomic_bool go;
    colo_comm_t *self = NULL, *comm = NULL;
    const int64_t misuse = fake_misuse();
    assert_ok(colo_comm_create_self(&self));
    assert_int_equal(cudaLaunchHostFunc(NULL, hold, &go), cudaSuccess);
    const colo_status_t st = colo_comm_create_nccl(self, 0, &comm);
    const int64_t pending = fake_pending(NULL);
    go = true;
    assert_ok(st);
    assert_int_equal(pending, 1);
    assert_int_equal(fake_misuse(), misuse);
    colo_comm_destroy(&comm);
    colo_comm_destroy(&self);
}

T_MAIN("fake/create")
