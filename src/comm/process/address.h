/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address.h (private) - what a rank tells the others before they connect: where it can be
 * reached, what proves that a caller belongs to them, or why it cannot take part.
 */
#ifndef COLO_COMM_PROCESS_ADDRESS_H
#define COLO_COMM_PROCESS_ADDRESS_H

#include <colobridge/bootstrap.h>

#include "comm/process/transport.h"

#include <sys/socket.h>
#include <sys/un.h>

enum { COLO_TOKEN = 16 };
#define COLO_ENDPOINT_MAGIC 0xC0105ACDu

/* What the first all-gather carries. It is the same in every version of the library, for ever:
 * ranks of two versions learn here that they are, before anything has another size. */
typedef struct colo_hello {
    uint32_t magic, version;
    int32_t rank, size;
    uint32_t bytes; /* of the endpoint, which the second all-gather carries */
    uint32_t unused[3];
} colo_hello_t;
_Static_assert(sizeof(colo_hello_t) == 32, "all versions of the library must agree");

typedef struct colo_endpoint {
    colo_hello_t hello;
    int32_t status;  /* < 0: the rank failed, and says why */
    int32_t insists; /* the row of connect.c that COLO_TRANSPORT names here; 0: none */
    uint64_t host;   /* of the machine and its network namespace; 0: unknown */
    uint64_t node;   /* that COLO_NODE names; 0: none */
    uint8_t token[COLO_TOKEN];
    char name[48]; /* abstract Unix name without the leading NUL; "": none */
    char why[400];
    colo_worker_t worker; /* of the third all-gather, if the sockets do not reach all */
} colo_endpoint_t;

colo_hello_t colo_endpoint_hello(const colo_bootstrap_t *boot);
/* @hello [size], @stride bytes apart: in the order of ranks, of one version and one build? */
colo_status_t colo_endpoint_check_hello(const colo_bootstrap_t *boot, const colo_hello_t *hello,
                                        size_t stride);

/* This rank's endpoint, and in @fd [b->size] a descriptor in the place of each connection. A rank
 * without descriptors, or without memory (@enough false, @fd NULL), thus fails before the others
 * wait for it, and the endpoint tells them. @door is bound and does not listen yet: nothing can
 * reach this rank before it waits for callers. @door, or -1, and @fd are to be closed in any case.
 */
void colo_endpoint_make(const colo_bootstrap_t *boot, bool enough, colo_endpoint_t *endpoint,
                        int *door, int *fd);
/* The calling thread's error as this rank's, for all. */
void colo_endpoint_set_error(colo_endpoint_t *endpoint, colo_status_t status);
/* Do Unix sockets connect these two ranks? @insists: a rank of the job insists on another
 * transport. */
bool colo_endpoint_near(const colo_endpoint_t *a, const colo_endpoint_t *b, bool insists);
/* Do all endpoints belong together, and did no rank fail? */
colo_status_t colo_endpoint_check_all(const colo_bootstrap_t *boot,
                                      const colo_endpoint_t *endpoint);
socklen_t colo_endpoint_address(const colo_endpoint_t *to, struct sockaddr_un *address);
/* Where rank @caller calls @to from: its name proves that it knows the token, which only ranks do.
 * @nonce: another one in each call, or a process that saw the name could take it before the next.
 */
socklen_t colo_endpoint_caller(const colo_endpoint_t *to, int32_t caller, uint64_t nonce,
                               struct sockaddr_un *address);
/* What rank @answerer answers @caller with: it knows the token of the caller. */
uint64_t colo_endpoint_answer(const colo_endpoint_t *caller, int32_t answerer);
/* The rank that @address says it is of, and its nonce; -1: none. */
int32_t colo_endpoint_rank(const struct sockaddr_un *address, socklen_t size, uint64_t *nonce);
/* No descriptor left? errno of the call that failed; names what to do about it. */
colo_status_t colo_endpoint_no_socket(const colo_bootstrap_t *boot, int error);

#endif
