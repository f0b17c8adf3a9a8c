/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_host.c - the numbers that say where a process runs: the boot id is read once, however many
 * threads ask, and again if there was no descriptor for it.
 */
#include "harness/harness.h"

#include "core/host.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

static _Atomic int opened;
static bool no_descriptors;

FILE *fopen(const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *) = NULL;
    void *symbol = dlsym(RTLD_NEXT, "fopen");
    memcpy(&real, &symbol, sizeof real);
    if (!strstr(path, "boot_id"))
        return real(path, mode);
    opened++;
    errno = EMFILE;
    return no_descriptors ? NULL : real(path, mode);
}

static void *ask(void *arg)
{
    uint64_t *id = arg;
    id[0] = colo_host_machine();
    id[1] = colo_host_node();
    (void)colo_host_sockets(&id[2]);
    return NULL;
}

T_CASE(boot_id_is_read_once_and_again_behind_a_shortage)
{
    enum { THREADS = 8 };
    uint64_t id[THREADS][3], none = 1;
    pthread_t thread[THREADS];
    no_descriptors = true;
    assert_int_equal(colo_host_sockets(&none), EMFILE);
    assert_int_equal(none, 0);
    no_descriptors = false;
    opened = 0;
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, ask, id[i]), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    assert_int_equal(opened, 1);
    for (int i = 0; i < THREADS; i++)
        assert_memory_equal(id[i], id[0], sizeof id[0]);
    assert_true(id[0][0] && id[0][1] && id[0][2]);
    assert_true(id[0][0] != id[0][1] && id[0][0] != id[0][2]); /* three questions */
}

T_MAIN("core/host")
