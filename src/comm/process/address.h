/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address.h (private) - what a rank tells the others before they connect: where it can be
 * reached, what proves that a caller belongs to them, or why it cannot take part.
 */
#ifndef COLO_COMM_PROCESS_ADDRESS_H
#define COLO_COMM_PROCESS_ADDRESS_H

#include <colobridge/bootstrap.h>

#include "comm/process/transport.h"

#include <netinet/in.h>
#include <sys/socket.h>

enum { COLO_ADDRESSES = 9, COLO_TOKEN = 16 };
#define COLO_ENDPOINT_MAGIC 0xC0105ACDu

typedef union colo_address { /* with its port; family 0: none */
    sa_family_t family;
    struct sockaddr any;
    struct sockaddr_in four;
    struct sockaddr_in6 six;
} colo_address_t;

typedef struct colo_endpoint {
    uint32_t magic, version;
    int32_t rank, size;
    int32_t status; /* < 0: the rank failed, and says why */
    int32_t naddress;
    uint64_t host; /* of the machine and its network namespace; 0: unknown */
    int32_t ucx;   /* 1: COLO_TRANSPORT is ucx here; -1: COLO_SOCKETS is tcp, or it is not here */
    uint8_t token[COLO_TOKEN];
    char name[48]; /* abstract Unix name without the leading NUL; "": none */
    colo_address_t address[COLO_ADDRESSES]; /* the first is loopback */
    char why[400];
    uint8_t worker[COLO_UCX_BYTES]; /* of the second all-gather, which is for UCX alone */
} colo_endpoint_t;

/* Bound sockets that do not listen yet: nothing can reach this rank before it waits for callers. */
typedef struct colo_doors {
    int unix_fd;             /* -1: none */
    int tcp[COLO_ADDRESSES]; /* of endpoint.address */
} colo_doors_t;

/* This rank's endpoint and doors, and in @fd [b->size] a descriptor in the place of each
 * connection. A rank without descriptors, or without memory (@enough false, @fd NULL), thus fails
 * before the others wait for it, and the endpoint tells them. Doors and @fd hold what is to be
 * closed in any case. */
void colo_endpoint_make(const colo_bootstrap_t *b, bool enough, colo_endpoint_t *endpoint,
                        colo_doors_t *doors, int *fd);
/* The calling thread's error as this rank's, for all. */
void colo_endpoint_set_error(colo_endpoint_t *endpoint, colo_status_t status);
/* Does UCX carry between these ranks? The same on all of them. */
bool colo_endpoint_wants_ucx(const colo_bootstrap_t *b, const colo_endpoint_t *endpoint);
/* Do all endpoints belong together, and did no rank fail? */
colo_status_t colo_endpoint_check_all(const colo_bootstrap_t *b, const colo_endpoint_t *endpoint);
/* The ways from the rank of @mine to that of @to: how many, and the address of number @i. One for
 * ranks of one host. */
int colo_endpoint_addresses(const colo_endpoint_t *mine, const colo_endpoint_t *to);
socklen_t colo_endpoint_address(const colo_endpoint_t *mine, const colo_endpoint_t *to, int i,
                                struct sockaddr_storage *address);
/* Listens where the higher ranks will call, and closes the other doors. */
colo_status_t colo_endpoint_listen(const colo_bootstrap_t *b, const colo_endpoint_t *endpoint,
                                   colo_doors_t *doors);
void colo_doors_close(colo_doors_t *doors);
/* No descriptor left? errno of the call that failed; names what to do about it. */
colo_status_t colo_endpoint_no_socket(const colo_bootstrap_t *b, int error);

#endif
