/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tape_memory.c - what gradients cost: backward reserves what a chain needs at a time, not
 * what the whole tape would need. This program's allocator counts; under a sanitizer, which brings
 * its own, the test is skipped. T_BACKENDS: as in test_tape_sums.c.
 */
#include "harness/harness.h"

#include "core/tape_node.h"

#include "harness/allocations.h"

enum { NODES = 64, MIB = 1 << 20, SMALL = 1 << 10 };

static int ran;

static colo_status_t write_nothing(const colo_tensor_t *d_out, int32_t nout,
                                   const colo_tensor_t *d_in, int32_t nin, void *state)
{
    ran++;
    return COLO_OK;
}

static colo_tensor_t tensor(void *data, colo_dtype_t dtype, int64_t bytes, int mem)
{
    colo_tensor_t t =
        colo_tensor_host(data, dtype, 1, (int64_t[]){bytes / (int64_t)colo_dtype_size(dtype)});
    if (mem)
        t.mem = COLO_MEM_CUDA, t.device = 0;
    return t;
}

/* What one backward allocates for NODES values of @bytes, each with @consumers, and as many
 * parameters of 1 KiB whose gradients the tape keeps. */
static size_t bytes_of_chain(int mem, colo_dtype_t dtype, int64_t bytes, int consumers, bool retain)
{
    static unsigned char data[16 * MIB];
    const colo_tensor_t t = tensor(data, dtype, bytes, mem);
    const colo_tensor_t p = tensor(data, dtype, SMALL, mem);
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    size_t first = 0;
    assert_ok(colo_tape_create(&tape));
    for (int step = 0; step < 2; step++) {
        colo_value_t v, in[3] = {0};
        assert_ok(colo_tape_leaf(tape, &t, NULL, &v));
        for (int k = 0; k < NODES; k++) {
            assert_ok(colo_tape_leaf(tape, &p, NULL, &in[0]));
            for (int c = 0; c < consumers; c++) {
                in[2] = in[1]; /* the second node of a pair uses the input of the first again */
                in[1] = v;
                assert_ok(t_node(tape, "node", in, c ? 3 : 2, &t, &v, write_nothing, NULL, NULL));
            }
            if (retain)
                assert_ok(colo_tape_retain_gradient(tape, v));
        }
        atomic_store(&allocated, 0);
        atomic_store(&counting, true);
        assert_ok(colo_tape_backward(tape, v, &t));
        atomic_store(&counting, false);
        if (step == 0)
            first = atomic_load(&allocated);
        else
            assert_in_range(atomic_load(&allocated), 0, MIB / 4); /* the pool has all */
        colo_tape_reset(tape);
    }
    return first;
}

T_CASE(a_chain_needs_two_gradients_at_a_time)
{
    const size_t large = 16 * MIB, one = MIB, small = MIB / 4;
    if (getenv("T_BACKENDS"))
        assert_int_equal(setenv("COLO_BACKEND_DIR", getenv("T_BACKENDS"), 1), 0);
    for (int mem = 0; mem < (getenv("T_BACKENDS") ? 2 : 1); mem++) {
        assert_in_range(bytes_of_chain(mem, COLO_F32, large, 1, false), 2 * large,
                        2 * large + small);
        assert_in_range(bytes_of_chain(mem, COLO_BF16, one, 1, false), 2 * one, 2 * one + small);
        /* a value with two consumers: besides, a spare, and for bf16 a sum in fp32 */
        assert_in_range(bytes_of_chain(mem, COLO_F32, one, 2, false), 3 * one, 4 * one + small);
        assert_in_range(bytes_of_chain(mem, COLO_BF16, one, 2, false), 4 * one, 6 * one + small);
        assert_in_range(bytes_of_chain(mem, COLO_F32, one, 1, true), (NODES + 1) * one,
                        (NODES + 1) * one + small);
    }
}

T_CASE(a_lack_of_memory_is_found_before_any_node_runs)
{
    static float data[8], mine[8] = {3, 3, 3, 3, 3, 3, 3, 3};
    const colo_tensor_t t = tensor(data, COLO_F32, sizeof data, 0);
    const colo_tensor_t d_t = tensor(mine, COLO_F32, sizeof mine, 0);
    const colo_tensor_t huge = tensor(data, COLO_F32, INT64_C(1) << 60, 0);
    T_ENDS(colo_tape_destroy) colo_tape_t *tape = NULL;
    colo_value_t w, x, v;
    assert_ok(colo_tape_create(&tape));
    assert_ok(colo_tape_leaf(tape, &t, &d_t, &w));
    assert_ok(colo_tape_leaf(tape, &huge, NULL, &x));
    assert_ok(t_node(tape, "early", &x, 1, &t, &v, write_nothing, NULL, NULL));
    assert_ok(t_node(tape, "late", (colo_value_t[]){w, v}, 2, &t, &v, write_nothing, NULL, NULL));
    for (int again = 0; again < 2; again++) {
        ran = 0;
        assert_fails(colo_tape_backward(tape, v, &t), COLO_ERR_NOMEM,
                     "tape: gradient of 1152921504606846976 bytes");
        assert_int_equal(ran, 0);
        assert_true(mine[0] == 3);
    }
    assert_ok(colo_tape_backward(tape, w, &t)); /* nothing ran, so the tape is not used up */
    assert_true(mine[0] == 3 + data[0]);
}

T_MAIN_IF(T_NEED_OWN_MALLOC, "core/tape_memory")
