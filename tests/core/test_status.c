/* SPDX-License-Identifier: Apache-2.0 */
/* test_status.c - names, fixed descriptions, and the one error message per thread. */
#include "harness/harness.h"

#include "core/error.h"

#include <pthread.h>

T_CASE(every_status_has_a_name_and_a_description)
{
    static const struct {
        colo_status_t status;
        int value;
        const char *name;
    } table[] = {
        {COLO_OK, 0, "COLO_OK"},
        {COLO_PENDING, 1, "COLO_PENDING"},
        {COLO_ERR_ARG, -1, "COLO_ERR_ARG"},
        {COLO_ERR_SHAPE, -2, "COLO_ERR_SHAPE"},
        {COLO_ERR_LAYOUT, -3, "COLO_ERR_LAYOUT"},
        {COLO_ERR_NOMEM, -4, "COLO_ERR_NOMEM"},
        {COLO_ERR_TIMEOUT, -5, "COLO_ERR_TIMEOUT"},
        {COLO_ERR_PEER, -6, "COLO_ERR_PEER"},
        {COLO_ERR_MISMATCH, -7, "COLO_ERR_MISMATCH"},
        {COLO_ERR_MODIFIED, -8, "COLO_ERR_MODIFIED"},
        {COLO_ERR_STATE, -9, "COLO_ERR_STATE"},
        {COLO_ERR_UNBUILT, -10, "COLO_ERR_UNBUILT"},
        {COLO_ERR_CONTRACT, -11, "COLO_ERR_CONTRACT"},
        {COLO_ERR_EXISTS, -12, "COLO_ERR_EXISTS"},
        {COLO_ERR_MISSING, -13, "COLO_ERR_MISSING"},
        {COLO_ERR_IO, -14, "COLO_ERR_IO"},
        {COLO_ERR_ABORTED, -15, "COLO_ERR_ABORTED"},
        {COLO_ERR_CUDA, -16, "COLO_ERR_CUDA"},
        {COLO_ERR_NCCL, -17, "COLO_ERR_NCCL"},
        {COLO_ERR_MPI, -18, "COLO_ERR_MPI"},
    };
    const size_t n = sizeof table / sizeof table[0];
    for (size_t i = 0; i < n; i++) {
        assert_int_equal((int)table[i].status, table[i].value);
        assert_string_equal(colo_status_name(table[i].status), table[i].name);
        assert_string_not_equal(colo_status_string(table[i].status), "unknown status");
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(colo_status_string(table[i].status),
                                    colo_status_string(table[j].status));
    }
    static const int foreign[] = {2, -19, 1000, -1000};
    for (size_t i = 0; i < 4; i++) {
        assert_string_equal(colo_status_string((colo_status_t)foreign[i]), "unknown status");
        assert_string_equal(colo_status_name((colo_status_t)foreign[i]), "COLO_?");
    }
}

T_CASE(a_failure_sets_the_error_message_and_returns_its_status)
{
    assert_int_equal(colo_fail(COLO_ERR_SHAPE, "batch %d does not split into %d", 30, 4),
                     COLO_ERR_SHAPE);
    assert_string_equal(colo_last_error(), "batch 30 does not split into 4");
    assert_int_equal(colo_fail_prefix(COLO_ERR_ARG, "rank %d", 7), COLO_ERR_ARG);
    assert_string_equal(colo_last_error(), "rank 7: batch 30 does not split into 4");
    /* the old error message may be part of the new one */
    assert_int_equal(colo_fail(COLO_ERR_IO, "again (%s)", colo_last_error()), COLO_ERR_IO);
    assert_string_equal(colo_last_error(), "again (rank 7: batch 30 does not split into 4)");
}

T_CASE(an_error_message_about_memory_says_so_once)
{
    colo_fail(COLO_ERR_NOMEM, "plan: %d blocks", 12);
    assert_string_equal(colo_last_error(), "plan: 12 blocks: no memory");
    colo_fail(COLO_ERR_NOMEM, "rank 1: %s", colo_last_error());
    assert_string_equal(colo_last_error(), "rank 1: plan: 12 blocks: no memory");
    colo_fail(COLO_ERR_NOMEM, "memory: 4 bytes: out of memory");
    assert_string_equal(colo_last_error(), "memory: 4 bytes: out of memory");
    colo_fail(COLO_ERR_ARG, "plan: %d blocks", 12);
    assert_string_equal(colo_last_error(), "plan: 12 blocks");
}

T_CASE(long_error_messages_are_cut_not_spilled)
{
    COLO_AUTOFREE char *text = malloc(5001);
    memset(text, 'x', 5000);
    text[5000] = '\0';
    colo_fail(COLO_ERR_ARG, "%s", text);
    assert_int_equal(strlen(colo_last_error()), 1023);
    colo_fail_prefix(COLO_ERR_ARG, "front");
    assert_int_equal(strlen(colo_last_error()), 1023);
    assert_memory_equal(colo_last_error(), "front: xxx", 10);
    colo_fail_prefix(COLO_ERR_ARG, "%s", text);
    assert_int_equal(strlen(colo_last_error()), 1023);
}

static void *other_thread(void *arg)
{
    bool fresh = colo_last_error()[0] == '\0';
    colo_fail(COLO_ERR_IO, "of the other thread");
    return (void *)(uintptr_t)(fresh && strcmp(colo_last_error(), "of the other thread") == 0);
}

T_CASE(every_thread_has_its_own_error_message)
{
    pthread_t thread;
    void *ok = NULL;
    colo_fail(COLO_ERR_ARG, "of this thread");
    assert_int_equal(pthread_create(&thread, NULL, other_thread, NULL), 0);
    assert_int_equal(pthread_join(thread, &ok), 0);
    assert_non_null(ok);
    assert_string_equal(colo_last_error(), "of this thread");
}

static colo_status_t step(colo_status_t st, int *calls)
{
    ++*calls;
    return st;
}

static colo_status_t tries(colo_status_t first, int *calls, int *cleaned)
{
    colo_status_t st = COLO_OK;
    COLO_TRY(step(first, calls));
    COLO_TRY_GOTO(st, step(COLO_PENDING, calls), out);
    COLO_TRY_GOTO(st, step(COLO_ERR_IO, calls), out);
    step(COLO_OK, calls);
out:
    ++*cleaned;
    return st;
}

T_CASE(trying_stops_at_errors_and_passes_news)
{
    int calls = 0, cleaned = 0;
    assert_int_equal(tries(COLO_ERR_ARG, &calls, &cleaned), COLO_ERR_ARG);
    assert_int_equal(calls, 1);
    assert_int_equal(cleaned, 0);
    calls = 0;
    assert_int_equal(tries(COLO_OK, &calls, &cleaned), COLO_ERR_IO);
    assert_int_equal(calls, 3);
    assert_int_equal(cleaned, 1);
}

T_CASE(products_and_sums_notice_overflow)
{
    int64_t v = 0;
    assert_true(colo_mul_ok(3037000499, 3037000499, &v));
    assert_true(v == INT64_C(9223372030926249001));
    assert_false(colo_mul_ok(3037000500, 3037000500, &v));
    assert_true(colo_add_ok(INT64_MAX - 1, 1, &v) && v == INT64_MAX);
    assert_false(colo_add_ok(INT64_MAX, 1, &v));
}

T_CASE(what_is_unknown_or_not_set_has_an_answer)
{
    float x = 0;
    const colo_sequence_t unset = {.batch = 3, .positions = 4}; /* cp is 0 */
    assert_string_equal(colo_op_name((colo_op_kind_t)99), "?");
    assert_string_equal(colo_category_name((colo_category_t)99), "?");
    assert_string_equal(colo_direction_name((colo_direction_t)99), "?");
    assert_non_null(colo_bind_name((colo_bind_t)99));
    assert_non_null(colo_dtype_name((colo_dtype_t)99));
    assert_non_null(colo_status_name((colo_status_t)-99));
    assert_non_null(colo_status_string((colo_status_t)-99));
    assert_int_equal(colo_dtype_size((colo_dtype_t)99), 0);
    assert_null(colo_env_variable(-1));
    assert_null(colo_tensor_host(&x, COLO_F32, 1, NULL).data);
    assert_null(colo_tensor_cuda(&x, COLO_F32, 0, 1, NULL).data);
    assert_int_equal(colo_sequence_count(&unset), 0);
    assert_int_equal(colo_loss_weighted_workspace_size(-1), colo_loss_weighted_workspace_size(1));
}

T_MAIN("core/status")
