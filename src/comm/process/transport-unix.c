/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport-unix.c - the transport over one Unix socket for each peer.
 *
 * A frame travels behind 8 bytes of its length and is padded to 8, so that frames stay aligned in
 * the buffers. Output is appended to a buffer for each peer and written when the socket takes it;
 * frames that must go always fit (the buffer grows), pieces of large messages wait when enough is
 * queued. Nothing blocks but wait(), which is poll().
 *
 * End of stream without a goodbye means that the process died.
 *
 * Ranks without a socket are another transport's, whose connections the sockets hold.
 */
#include "comm/process/transport-unix.h"

#include "core/error.h"
#include "core/lock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    OUT_MAX = 512 << 10,    /* queued, above which pieces of large messages wait */
    OUT_CAPACITY = 8 << 10, /* at first: an error can be told when there is no memory left */
};
#define IN_CAPACITY (COLO_FRAME_MAX + (64 << 10))

struct sock {
    unsigned char *out, *in;
    size_t out_at, out_end, out_capacity; /* [at, end) is to be written */
    size_t in_at, in_end;                 /* [at, end) has been read */
    bool starved;                         /* the system had no memory to send: try again */
    bool ended; /* end of stream or error: told when the buffer is empty */
    int error;
};

struct connections {
    int32_t rank, size;
    struct sock *sock;  /* [size] */
    struct pollfd *fds; /* [size]; fd -1: none */
    pthread_mutex_t lock;
    struct pollfd *seen; /* [size] under the lock: as fds, for wait(), which no other lock covers */
    struct pollfd *waiting; /* [size] of the thread in wait() */
    int32_t first;          /* the rank that is polled first */
    int32_t held;           /* the peer whose frame has been handed out, or -1 */
    int32_t to;             /* of the frame that is reserved */
    size_t to_bytes;
    const colo_process_transport_t *far; /* NULL: all ranks have a socket */
    void *far_connections;
    bool far_first, far_spoke; /* in recv(): whose turn it is, and which one has found something */
    char why[200];
};

static bool is_far(const struct connections *self, int32_t peer)
{
    return self->far && !self->sock[peer].in;
}

static size_t padded(size_t bytes)
{
    return 8 + (bytes + 7) / 8 * 8;
}

void colo_socket_fail(int fd, colo_status_t status, const char *error_message)
{
    struct {
        uint64_t bytes;
        colo_frame_t frame;
        char text[COLO_FAIL_TEXT];
    } said = {.frame = {.magic = COLO_FRAME_MAGIC,
                        .kind = COLO_FRAME_FAIL,
                        .desc = (uint64_t)(int64_t)status,
                        .count = UINT64_MAX, /* no culprit */
                        .bytes = strnlen(error_message, COLO_FAIL_TEXT)}};
    memcpy(said.text, error_message, said.frame.bytes);
    said.bytes = sizeof said.frame + said.frame.bytes;
    (void)!send(fd, &said, padded((size_t)said.bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* The frames of a rank that is through with connecting, and the one above, fit into this. */
colo_status_t colo_socket_failure(int fd)
{
    unsigned char in[16 << 10];
    const ssize_t n = recv(fd, in, sizeof in, MSG_PEEK | MSG_DONTWAIT);
    const size_t end = n > 0 ? (size_t)n : 0;
    uint64_t bytes;
    colo_frame_t frame;
    for (size_t offset = 0; offset + sizeof bytes + sizeof frame <= end;
         offset += padded((size_t)bytes)) {
        memcpy(&bytes, in + offset, sizeof bytes);
        memcpy(&frame, in + offset + sizeof bytes, sizeof frame);
        if (bytes > COLO_FRAME_MAX || frame.magic != COLO_FRAME_MAGIC)
            break;
        if (frame.kind == COLO_FRAME_FAIL)
            return (colo_status_t)(int64_t)frame.desc;
    }
    return COLO_OK;
}

static void set_polled(struct connections *self, int32_t r, int fd, short events)
{
    struct pollfd *polled = &self->fds[r];
    if (polled->fd == fd && polled->events == events)
        return;
    polled->fd = fd;
    polled->events = events;
    COLO_HOLD(&self->lock);
    self->seen[r] = *polled;
}

/* Writes what the socket takes. Output that could not go is kept, because the peer waits for every
 * byte of a frame that began; it is dropped only when the stream is at its end. */
static void flush_out(struct connections *self, int32_t r)
{
    struct sock *sock = &self->sock[r];
    sock->starved = false;
    while (sock->out_at < sock->out_end) {
        ssize_t n = send(self->fds[r].fd, sock->out + sock->out_at, sock->out_end - sock->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            sock->out_at += (size_t)n;
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            break;
        } else if (n < 0 && (errno == ENOBUFS || errno == ENOMEM)) {
            sock->starved =
                true; /* not a matter of this socket: poll() would say that it is ready */
            break;
        } else { /* the stream is cut; what the peer said before is still to be read */
            sock->error = errno;
            sock->out_at = sock->out_end;
            shutdown(self->fds[r].fd, SHUT_RDWR);
        }
    }
    if (sock->out_at == sock->out_end)
        sock->out_at = sock->out_end = 0;
    set_polled(self, r, self->fds[r].fd,
               (short)(POLLIN | (sock->out_end && !sock->starved ? POLLOUT : 0)));
}

static bool sockets_full(void *connections, int32_t peer)
{
    struct connections *self = connections;
    const struct sock *sock = &self->sock[peer];
    if (is_far(self, peer))
        return self->far->full(self->far_connections, peer);
    return sock->out_end - sock->out_at > OUT_MAX;
}

static void *sockets_reserve(void *connections, int32_t peer, size_t bytes)
{
    struct connections *self = connections;
    struct sock *sock = &self->sock[peer];
    const size_t need = padded(bytes);
    self->to = peer;
    self->to_bytes = bytes;
    if (is_far(self, peer))
        return self->far->reserve(self->far_connections, peer, bytes);
    if (sock->out_at > 0 && sock->out_end + need > sock->out_capacity) {
        memmove(sock->out, sock->out + sock->out_at, sock->out_end - sock->out_at);
        sock->out_end -= sock->out_at;
        sock->out_at = 0;
    }
    if (sock->out_end + need > sock->out_capacity) {
        size_t capacity = 2 * (sock->out_end + need);
        unsigned char *grown = realloc(sock->out, capacity);
        if (!grown)
            return NULL;
        sock->out = grown;
        sock->out_capacity = capacity;
    }
    return sock->out + sock->out_end + 8;
}

static void sockets_commit(void *connections)
{
    struct connections *self = connections;
    struct sock *sock = &self->sock[self->to];
    uint64_t bytes = self->to_bytes;
    size_t taken = padded(self->to_bytes);
    if (is_far(self, self->to)) {
        self->far->commit(self->far_connections);
        return;
    }
    memcpy(sock->out + sock->out_end, &bytes, sizeof bytes);
    memset(sock->out + sock->out_end + 8 + bytes, 0, taken - 8 - bytes);
    sock->out_end += taken;
    if (self->fds[self->to].fd < 0)
        sock->out_at = sock->out_end = 0;
    else
        flush_out(self, self->to);
}

/* True when a whole frame is in the buffer. */
static bool has_frame(struct sock *sock, size_t *bytes)
{
    uint64_t n;
    if (sock->in_end - sock->in_at < 8)
        return false;
    memcpy(&n, sock->in + sock->in_at, sizeof n);
    if (n > COLO_FRAME_MAX) { /* not ours */
        sock->ended = true;
        sock->error = EPROTO;
        sock->in_at = sock->in_end;
        return false;
    }
    *bytes = (size_t)n;
    return sock->in_end - sock->in_at >= padded((size_t)n);
}

static void read_in(struct connections *self, int32_t r)
{
    struct sock *sock = &self->sock[r];
    if (sock->in_at > 0) {
        memmove(sock->in, sock->in + sock->in_at, sock->in_end - sock->in_at);
        sock->in_end -= sock->in_at;
        sock->in_at = 0;
    }
    ssize_t n =
        recv(self->fds[r].fd, sock->in + sock->in_end, IN_CAPACITY - sock->in_end, MSG_DONTWAIT);
    if (n > 0) {
        sock->in_end += (size_t)n;
    } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR &&
                          errno != ENOBUFS && errno != ENOMEM)) {
        sock->ended = true;
        if (n < 0)
            sock->error = errno;
    }
}

static int hand_out(struct connections *self, int32_t *peer, const void **frame, size_t *bytes)
{
    for (int32_t k = 0; k < self->size; k++) {
        int32_t r = (self->first + k) % self->size;
        struct sock *sock = &self->sock[r];
        if (self->fds[r].fd < 0)
            continue;
        if (has_frame(sock, bytes)) {
            *peer = r;
            *frame = sock->in + sock->in_at + 8;
            self->held = r;
            self->first = r;
            return 1;
        }
        if (!sock->ended)
            continue;
        snprintf(self->why, sizeof self->why, "its connection ended%s%s", sock->error ? ": " : "",
                 sock->error ? strerror(sock->error) : "");
        colo_socket_close(self->fds[r].fd);
        set_polled(self, r, -1, 0);
        sock->out_at = sock->out_end = 0;
        *peer = r;
        return -1;
    }
    return 0;
}

static int recv_near(struct connections *self, int32_t *peer, const void **frame, size_t *bytes)
{
    if (self->held >= 0) {
        struct sock *sock = &self->sock[self->held];
        uint64_t n;
        memcpy(&n, sock->in + sock->in_at, sizeof n);
        sock->in_at += padded((size_t)n);
        self->held = -1;
    }
    for (int32_t r = 0; r < self->size; r++)
        if (self->sock[r].starved && self->fds[r].fd >= 0)
            flush_out(self, r);
    int got = hand_out(self, peer, frame, bytes);
    if (got || poll(self->fds, (nfds_t)self->size, 0) <= 0)
        return got;
    for (int32_t r = 0; r < self->size; r++) {
        if (self->fds[r].fd < 0)
            continue;
        if (self->fds[r].revents & POLLOUT)
            flush_out(self, r);
        if (self->fds[r].revents & (POLLIN | POLLHUP | POLLERR))
            read_in(self, r);
    }
    self->first = (self->first + 1) % self->size;
    return hand_out(self, peer, frame, bytes);
}

static int sockets_recv(void *connections, int32_t *peer, const void **frame, size_t *bytes)
{
    struct connections *self = connections;
    int got = 0;
    self->far_first = self->far && !self->far_first;
    for (int i = 0; i < (self->far ? 2 : 1) && got == 0; i++) {
        self->far_spoke = self->far_first == (i == 0);
        got = self->far_spoke ? self->far->recv(self->far_connections, peer, frame, bytes)
                              : recv_near(self, peer, frame, bytes);
    }
    return got;
}

static const char *sockets_why(void *connections)
{
    struct connections *self = connections;
    return self->far_spoke ? self->far->why(self->far_connections) : self->why;
}

static bool sockets_flushed(void *connections, int32_t peer)
{
    struct connections *self = connections;
    return is_far(self, peer) ? self->far->flushed(self->far_connections, peer)
                              : self->sock[peer].out_end == 0;
}

static void sockets_wait(void *connections, double seconds)
{
    struct connections *self = connections;
    struct timespec span = {.tv_sec = (time_t)seconds};
    span.tv_nsec = (long)((seconds - (double)span.tv_sec) * 1e9);
    pthread_mutex_lock(&self->lock);
    memcpy(self->waiting, self->seen, (size_t)self->size * sizeof *self->seen);
    pthread_mutex_unlock(&self->lock);
    if (self->far) /* in the place of this rank's own */
        self->waiting[self->rank] =
            (struct pollfd){self->far->arm(self->far_connections), POLLIN, 0};
    if (!self->far || self->waiting[self->rank].fd >= 0)
        ppoll(self->waiting, (nfds_t)self->size, &span, NULL);
}

static void sockets_close(void *connections, bool clean)
{
    struct connections *self = connections;
    if (self->far)
        self->far->close(self->far_connections, clean);
    for (int32_t r = 0; r < self->size; r++) {
        if (self->fds)
            colo_socket_close(self->fds[r].fd);
        if (self->sock) {
            free(self->sock[r].out);
            free(self->sock[r].in);
        }
    }
    pthread_mutex_destroy(&self->lock);
    free(self->sock);
    free(self->fds);
    free(self->seen);
    free(self->waiting);
    free(self);
}

colo_status_t colo_transport_sockets_new(int32_t rank, int32_t size, const int *fd,
                                         const colo_process_transport_t *far, void *far_connections,
                                         void **connections)
{
    struct connections *self = calloc(1, sizeof *self);
    bool enough = self && (self->sock = calloc((size_t)size, sizeof *self->sock)) &&
                  (self->fds = calloc((size_t)size, sizeof *self->fds)) &&
                  (self->seen = calloc((size_t)size, sizeof *self->seen)) &&
                  (self->waiting = calloc((size_t)size, sizeof *self->waiting));
    for (int32_t r = 0; r < size; r++) {
        if (!enough) {
            colo_socket_close(fd[r]);
            if (self && self->fds)
                self->fds[r].fd = -1;
            continue;
        }
        self->fds[r] = self->seen[r] = (struct pollfd){.fd = fd[r], .events = POLLIN};
        if (fd[r] < 0)
            continue;
        struct sock *sock = &self->sock[r];
        sock->in = malloc(IN_CAPACITY);
        sock->out = malloc(OUT_CAPACITY);
        sock->out_capacity = OUT_CAPACITY;
        enough = sock->in && sock->out;
    }
    if (self) {
        self->rank = rank;
        self->size = size;
        self->held = -1;
        self->far = far;
        self->far_connections = far_connections;
        pthread_mutex_init(&self->lock, NULL);
    }
    if (enough) {
        *connections = self;
        return COLO_OK;
    }
    if (self)
        sockets_close(self, false);
    else if (far)
        far->close(far_connections, false);
    return colo_fail(COLO_ERR_NOMEM, "create_bootstrap: no memory for %d connections", (int)size);
}

const colo_process_transport_t colo_transport_sockets = {
    .name = "sockets",
    .full = sockets_full,
    .reserve = sockets_reserve,
    .commit = sockets_commit,
    .recv = sockets_recv,
    .why = sockets_why,
    .flushed = sockets_flushed,
    .wait = sockets_wait,
    .close = sockets_close,
};
