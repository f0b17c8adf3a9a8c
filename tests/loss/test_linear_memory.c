/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_linear_memory.c - the calls of a training step allocate nothing, whatever the mode: not a
 * byte, so in particular nothing of the size of all logits. This program's allocator counts; under
 * a sanitizer, which brings its own, the test is skipped.
 */
#include "loss/linear_alone.h"

#include "harness/allocations.h"

enum { T = 96, V = 500, H = 16, CHUNK = 32 };

/* Bytes that one training step allocates. */
static size_t step(colo_linear_logprob_mode_t mode, bool loss_mode)
{
    T_ENDS(alone_free) alone_t a;
    alone_init(&a, T, V, H, t_self()); /* of a group of one: gathers to itself */
    for (int64_t t = 0; t < T; t++)
        a.targets[t] = t % 5 ? t : -100;
    a.config.mode = mode;
    a.config.logprob.chunk_size = CHUNK;
    a.config.logprob.want_entropy = true;
    a.out.entropy = &a.of_entropy;
    a.up = (colo_linear_logprob_upstream_t){COLO_LINEAR_LOGPROB_UPSTREAM_INIT, .logp = -1,
                                            .entropy = 0.1, .mean = true};
    alone_make(&a);
    assert_ok(alone_bind(&a));

    atomic_store(&allocated, 0);
    atomic_store(&counting, true);
    colo_status_t st = loss_mode ? colo_linear_logprob_loss(a.linear, &a.batch, &a.up, &a.out,
                                                            &a.grads, a.work, NULL)
                                 : alone_forward(&a);
    if (st == COLO_OK && !loss_mode)
        st = alone_backward(&a);
    atomic_store(&counting, false);
    assert_ok(st);
    return atomic_load(&allocated);
}

T_CASE(a_step_allocates_nothing)
{
    for (int mode = 0; mode < 3; mode++) {
        size_t bytes =
            step(mode == 1 ? COLO_LINEAR_LOGPROB_KEEP : COLO_LINEAR_LOGPROB_LOGPROB, mode == 2);
        if (bytes)
            fail_msg("mode %d: %zu bytes were allocated (one-hot targets: %zu)", mode, bytes,
                     (size_t)T * V * sizeof(int64_t));
    }
}

/* An allocator that is not asked would count nothing, too. */
T_CASE(the_allocator_counts)
{
    atomic_store(&allocated, 0);
    atomic_store(&counting, true);
    void *volatile p = malloc(100);
    void *volatile q = calloc(3, 7);
    atomic_store(&counting, false);
    free(p);
    free(q);
    assert_int_equal(atomic_load(&allocated), 121);
}

T_MAIN_IF(T_NEED_OWN_MALLOC, "loss/linear_memory")
