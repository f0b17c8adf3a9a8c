/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork.c - sockets that no other process keeps open, and that no standard stream becomes.
 *
 * A peer sees that this process died when the last copy of its sockets is closed. A child that
 * fork() makes has copies, and a data loader's worker may outlive its parent; the child closes them
 * before fork() returns there. Children that exec (posix_spawn, system, vfork) lose theirs because
 * every socket is opened with CLOEXEC.
 *
 * If the program closed its standard streams, their numbers are free, and what it prints would go
 * to a peer. So no socket keeps one of these numbers.
 */
#include "comm/process/transport-unix.h"

#include "core/list.h"
#include "core/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FLAGS = SOCK_NONBLOCK | SOCK_CLOEXEC };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* also: no fork() between open and keep */
static colo_list_t fds;                                  /* of int */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    const int *fd = fds.items;
    for (int64_t i = 0; i < fds.n; i++)
        close(fd[i]);
    fds.n = 0;
    pthread_mutex_unlock(&lock);
}

static int above_standard_streams(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    const int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
    close(fd);
    errno = error;
    return above;
}

/* With the lock held: @fd or a copy of it, or -1 with errno. */
static int keep(int fd)
{
    static bool registered;
    fd = above_standard_streams(fd);
    if (fd < 0)
        return fd;
    if (!registered)
        registered = pthread_atfork(before_fork, after_fork, in_child) == 0;
    int *place = registered ? colo_list_push(&fds, sizeof *place) : NULL;
    if (!place) {
        close(fd);
        errno = ENOMEM;
        return -1;
    }
    *place = fd;
    return fd;
}

int colo_socket_open(void)
{
    COLO_HOLD(&lock);
    return keep(socket(AF_UNIX, SOCK_STREAM | FLAGS, 0));
}

int colo_socket_accept(int listener)
{
    COLO_HOLD(&lock);
    return keep(accept4(listener, NULL, NULL, FLAGS));
}

void colo_socket_close(int fd)
{
    if (fd < 0)
        return;
    COLO_HOLD(&lock);
    int *all = fds.items;
    for (int64_t i = fds.n; i-- > 0;)
        if (all[i] == fd) {
            all[i] = all[--fds.n];
            break;
        }
    close(fd);
}
