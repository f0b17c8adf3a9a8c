/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_backend.c - loading backend libraries: found, missing, foreign.
 *
 * backend_module.c is built several times next to this program: once right, and once wrong in each
 * way that must be refused with a way out.
 */
#include "harness/harness.h"

#include "comm/comm.h"
#include "core/backend.h"

#include <pthread.h>

T_CASE(a_backend_next_to_the_program_is_loaded_once)
{
    const colo_backend_t *b = NULL, *again = NULL;
    unsetenv("COLO_BACKEND_DIR");
    assert_ok(colo_backend_load("testgood", &b));
    assert_string_equal(b->name, "testgood");
    assert_int_equal(b->abi, COLO_BACKEND_ABI);
    assert_string_equal(b->comm->name, "testgood");
    assert_int_equal(b->device->box_copy(NULL, NULL, 0, NULL), COLO_PENDING);
    /* it is kept, wherever the folder points now */
    assert_int_equal(setenv("COLO_BACKEND_DIR", "/nonexistent", 1), 0);
    assert_ok(colo_backend_load("testgood", &again));
    assert_ptr_equal(b, again);
    unsetenv("COLO_BACKEND_DIR");
}

T_CASE(the_folder_of_the_environment_is_the_only_one_searched)
{
    const colo_backend_t *b = (const colo_backend_t *)&b;
    assert_int_equal(setenv("COLO_BACKEND_DIR", "/nonexistent/place", 1), 0);
    assert_fails(colo_backend_load("testother", &b), COLO_ERR_UNBUILT,
                 "/nonexistent/place/libcolobridge-testother.so");
    assert_ptr_equal(b, &b);
    assert_int_equal(setenv("COLO_BACKEND_DIR", BACKEND_DIR, 1),
                     0); /* a failure is not remembered */
    assert_ok(colo_backend_load("testother", &b));
    assert_string_equal(b->name, "testother");
    unsetenv("COLO_BACKEND_DIR");
}

T_CASE(long_folder_is_used_whole_or_refused)
{
    char folder[4001] = BACKEND_DIR;
    const colo_backend_t *b = NULL;
    while (strlen(folder) + 2 < 3000) /* the same folder, by a long way */
        strcat(folder, "/.");
    setenv("COLO_BACKEND_DIR", folder, 1);
    assert_ok(colo_backend_load("testlong", &b));
    assert_string_equal(b->name, "testlong");
    memset(folder, 'a', sizeof folder - 1);
    setenv("COLO_BACKEND_DIR", folder, 1);
    assert_fails(colo_backend_load("testmissing", &b), COLO_ERR_UNBUILT, "could not be loaded");
    char longer[4002];
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    setenv("COLO_BACKEND_DIR", longer, 1);
    assert_fails(colo_backend_load("testmissing", &b), COLO_ERR_ARG,
                 "COLO_BACKEND_DIR has 4001 bytes, expected at most 4000");
    unsetenv("COLO_BACKEND_DIR");
}

T_CASE(what_cannot_be_used_is_unbuilt_and_says_what_to_do)
{
    static const struct {
        const char *name, *found, *advice;
    } table[] = {
        {"testmissing", "backend 'testmissing' could not be loaded",
         "build it with -Dtestmissing=enabled"},
        {"testmissing", "libcolobridge-testmissing.so", "set COLO_BACKEND_DIR to the folder"},
        {"testabi", "has interface 77, this library", "install both from the same build"},
        {"testversion", "was built for version 9.8.7, this library is ",
         "install both from the same build"},
        {"testname", "says it is 'somebodyelse'", "install it again"},
        {"testcopy", "calls the copy of this library in " BACKEND_DIR "/libcolobridge-testcopy.so",
         "load one copy of libcolobridge per process"},
        {"testgone", "was built for another version than this library ",
         "install both from the same build"},
        {"testsymbol", "has no symbol 'colo_backend'", "not a backend of this library"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const colo_backend_t *b = (const colo_backend_t *)&b;
        assert_fails(colo_backend_load(table[i].name, &b), COLO_ERR_UNBUILT, table[i].found);
        assert_fails(colo_backend_load(table[i].name, &b), COLO_ERR_UNBUILT, table[i].advice);
        assert_ptr_equal(b, &b);
    }
}

T_CASE(a_name_is_a_name_and_not_a_path)
{
    const colo_backend_t *b = NULL;
    assert_fails(colo_backend_load(NULL, &b), COLO_ERR_ARG, "NULL");
    assert_fails(colo_backend_load("", &b), COLO_ERR_ARG, "''");
    assert_fails(colo_backend_load("../testgood", &b), COLO_ERR_ARG, "[a-z0-9]");
    assert_fails(colo_backend_load("a/b", &b), COLO_ERR_ARG, "[a-z0-9]");
    assert_fails(colo_backend_load("TESTGOOD", &b), COLO_ERR_ARG, "[a-z0-9]");
    assert_fails(colo_backend_load("seventeenletters1", &b), COLO_ERR_ARG, "1..16");
    assert_null(b);
}

static void *load_many(void *arg)
{
    const colo_backend_t *b = NULL;
    for (int i = 0; i < 200; i++)
        if (colo_backend_load("testthreads", &b) < 0)
            return NULL;
    return (void *)(uintptr_t)b;
}

T_CASE(threads_may_load_at_once)
{
    pthread_t thread[4];
    void *got[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, load_many, NULL), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_join(thread[i], &got[i]), 0);
    assert_non_null(got[0]);
    for (int i = 1; i < 4; i++)
        assert_ptr_equal(got[i], got[0]);
}

T_CASE(element_passes_come_from_the_memory_they_work_on)
{
    const colo_device_t *device = NULL;
    assert_ok(colo_device_for(COLO_MEM_HOST, &device));
    assert_ptr_equal(device, &colo_device_host);
    assert_int_equal(setenv("COLO_BACKEND_DIR", "/nonexistent", 1), 0);
    assert_fails(colo_device_for(COLO_MEM_CUDA, &device), COLO_ERR_UNBUILT,
                 "build it with -Dcuda=enabled");
    assert_ptr_equal(device, &colo_device_host);
    assert_fails(colo_device_for((colo_mem_t)9, &device), COLO_ERR_ARG, "kind 9");
    unsetenv("COLO_BACKEND_DIR");
}

T_MAIN("core/backend")
