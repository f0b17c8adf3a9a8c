/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_embed_gpu.c - examples/04_embed_gpu.c over the stand-in of CUDA and NCCL (fake.h): it runs,
 * and if a rank has no memory, no rank is left in NCCL's init, which waits for all of them.
 */
#include "harness/harness.h"

#include "fake.h"

#include <unistd.h>

int embed_main(void); /* the example's main() */

T_CASE(the_example_runs)
{
    assert_int_equal(embed_main(), 0);
    assert_int_equal(fake_misuse(), 0);
}

T_CASE(a_rank_without_memory_leaves_no_rank_in_nccl)
{
    fake_fail_name(1, "cudaMalloc");
    alarm(30); /* a rank that is left there waits for ever */
    assert_int_equal(embed_main(), 1);
    alarm(0);
    assert_int_equal(fake_live(FAKE_COMM), 0);
    assert_true(says("rank 1"));
}

T_MAIN("examples/embed_gpu")
