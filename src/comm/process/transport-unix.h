/* SPDX-License-Identifier: Apache-2.0 */
/* transport-unix.h (private) - the transport over connected Unix sockets, and how they get
 * connected.
 */
#ifndef COLO_COMM_PROCESS_TRANSPORT_UNIX_H
#define COLO_COMM_PROCESS_TRANSPORT_UNIX_H

#include <colobridge/bootstrap.h>

#include "comm/process/transport.h"

extern const colo_process_transport_t colo_transport_sockets;

/* ---- fork.c: sockets that are closed in every child of this process ----
 * Non-blocking; -1 with errno. */
int colo_socket_open(void);
int colo_socket_accept(int listener);
void colo_socket_close(int fd); /* any descriptor, or -1 */

/* On a connection that this rank gives up: that it failed with @status, in words; and what a peer
 * that gave it up has said so, or COLO_OK. Nothing is taken from the connection. */
void colo_socket_fail(int fd, colo_status_t status, const char *error_message);
colo_status_t colo_socket_failure(int fd);

/* fd[r]: connected and non-blocking, -1 for @rank itself and for ranks that @far carries to, with
 * @far_connections; or NULL. Takes both, also when it fails. */
colo_status_t colo_transport_sockets_new(int32_t rank, int32_t size, const int *fd,
                                         const colo_process_transport_t *far, void *far_connections,
                                         void **connections);

#endif
