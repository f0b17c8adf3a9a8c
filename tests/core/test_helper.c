/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_helper.c - a process that ends while a thread of a call that took too long is at work. The
 * thread is in a library, say CUDA, which a handler of exit() ends.
 */
#include "harness/harness.h"

#include "core/helper.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ENDED = 3, AT_WORK = 4, AWAITED = 5 };

static _Atomic bool exiting, awaited, ended;
static bool comes_back;
static pid_t worker; /* the process with the thread */

/* Only exit() sleeps in these processes: the thread ends when it does. */
int nanosleep(const struct timespec *time, struct timespec *left)
{
    int (*real)(const struct timespec *, struct timespec *) = NULL;
    void *symbol = dlsym(RTLD_NEXT, "nanosleep");
    memcpy(&real, &symbol, sizeof real);
    awaited = exiting;
    while (exiting && comes_back && !ended && getpid() == worker)
        sched_yield();
    return real(time, left);
}

static void work(void *arg)
{
    while (!awaited || !comes_back)
        sched_yield();
    ended = true;
}

static void library_ends(void)
{
    _exit(ended ? ENDED : awaited ? AWAITED : AT_WORK);
}

static void begin_exit(void)
{
    exiting = true;
}

/* What the library saw of the thread when it was ended; of a child of fork(), and of its own thread
 * if that @leaves one, too. */
static int exit_of(bool apart, bool forks, bool leaves)
{
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        worker = getpid();
        if (atexit(library_ends) != 0 ||
            (apart ? !colo_run_apart(work, NULL)
                   : colo_run_for(0, NULL, NULL, work, NULL, NULL) != COLO_ERR_TIMEOUT) ||
            atexit(begin_exit) != 0)
            _exit(1);
        const pid_t grandchild = forks ? fork() : 0;
        if (grandchild > 0)
            _exit(waitpid(grandchild, &status, 0) == grandchild ? WEXITSTATUS(status) : 1);
        if (leaves) {
            worker = getpid();
            if (!colo_run_apart(work, NULL))
                _exit(1);
        }
        exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

T_CASE(exit_waits_for_a_thread_that_was_left)
{
    comes_back = true;
    assert_int_equal(exit_of(false, false, false), ENDED);
    assert_int_equal(exit_of(true, false, false), ENDED);
}

T_CASE(exit_does_not_wait_for_ever)
{
    comes_back = false;
    assert_int_equal(exit_of(false, false, false), AWAITED);
}

T_CASE(a_child_of_fork_has_no_such_thread)
{
    comes_back = true;
    assert_int_equal(exit_of(false, true, false), AT_WORK);
    assert_int_equal(exit_of(false, true, true), ENDED);
}

T_MAIN("helper")
