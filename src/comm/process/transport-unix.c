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
 * Ranks without a socket are another transport's, which this one holds: UCX's, between hosts.
 */
#include "comm/process/transport-unix.h"

#include "core/error.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
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

struct transport {
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
    const colo_transport_ops_t *far; /* NULL: all ranks have a socket */
    void *far_transport;
    bool far_first, far_spoke; /* in recv(): whose turn it is, and which one has found something */
    char why[200];
};

static bool is_far(const struct transport *w, int32_t peer)
{
    return w->far && !w->sock[peer].in;
}

static size_t padded(size_t bytes)
{
    return 8 + (bytes + 7) / 8 * 8;
}

static void set_polled(struct transport *w, int32_t r, int fd, short events)
{
    struct pollfd *p = &w->fds[r];
    if (p->fd == fd && p->events == events)
        return;
    p->fd = fd;
    p->events = events;
    pthread_mutex_lock(&w->lock);
    w->seen[r] = *p;
    pthread_mutex_unlock(&w->lock);
}

/* Writes what the socket takes. Output that could not go is kept, because the peer waits for every
 * byte of a frame that began; it is dropped only when the stream is at its end. */
static void flush_out(struct transport *w, int32_t r)
{
    struct sock *s = &w->sock[r];
    s->starved = false;
    while (s->out_at < s->out_end) {
        ssize_t n = send(w->fds[r].fd, s->out + s->out_at, s->out_end - s->out_at,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            s->out_at += (size_t)n;
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            break;
        } else if (n < 0 && (errno == ENOBUFS || errno == ENOMEM)) {
            s->starved = true; /* not a matter of this socket: poll() would say that it is ready */
            break;
        } else { /* the stream is cut; what the peer said before is still to be read */
            s->error = errno;
            s->out_at = s->out_end;
            shutdown(w->fds[r].fd, SHUT_RDWR);
        }
    }
    if (s->out_at == s->out_end)
        s->out_at = s->out_end = 0;
    set_polled(w, r, w->fds[r].fd, (short)(POLLIN | (s->out_end && !s->starved ? POLLOUT : 0)));
}

static bool sockets_full(void *transport, int32_t peer)
{
    struct transport *w = transport;
    const struct sock *s = &w->sock[peer];
    if (is_far(w, peer))
        return w->far->full(w->far_transport, peer);
    return s->out_end - s->out_at > OUT_MAX;
}

static void *sockets_reserve(void *transport, int32_t peer, size_t bytes)
{
    struct transport *w = transport;
    struct sock *s = &w->sock[peer];
    const size_t need = padded(bytes);
    w->to = peer;
    w->to_bytes = bytes;
    if (is_far(w, peer))
        return w->far->reserve(w->far_transport, peer, bytes);
    if (s->out_at > 0 && s->out_end + need > s->out_capacity) {
        memmove(s->out, s->out + s->out_at, s->out_end - s->out_at);
        s->out_end -= s->out_at;
        s->out_at = 0;
    }
    if (s->out_end + need > s->out_capacity) {
        size_t capacity = 2 * (s->out_end + need);
        unsigned char *p = realloc(s->out, capacity);
        if (!p)
            return NULL;
        s->out = p;
        s->out_capacity = capacity;
    }
    return s->out + s->out_end + 8;
}

static void sockets_commit(void *transport)
{
    struct transport *w = transport;
    struct sock *s = &w->sock[w->to];
    uint64_t bytes = w->to_bytes;
    size_t whole = padded(w->to_bytes);
    if (is_far(w, w->to)) {
        w->far->commit(w->far_transport);
        return;
    }
    memcpy(s->out + s->out_end, &bytes, sizeof bytes);
    memset(s->out + s->out_end + 8 + bytes, 0, whole - 8 - bytes);
    s->out_end += whole;
    if (w->fds[w->to].fd < 0)
        s->out_at = s->out_end = 0;
    else
        flush_out(w, w->to);
}

/* True when a whole frame is in the buffer. */
static bool has_frame(struct sock *s, size_t *bytes)
{
    uint64_t n;
    if (s->in_end - s->in_at < 8)
        return false;
    memcpy(&n, s->in + s->in_at, sizeof n);
    if (n > COLO_FRAME_MAX) { /* not ours */
        s->ended = true;
        s->error = EPROTO;
        s->in_at = s->in_end;
        return false;
    }
    *bytes = (size_t)n;
    return s->in_end - s->in_at >= padded((size_t)n);
}

static void read_in(struct transport *w, int32_t r)
{
    struct sock *s = &w->sock[r];
    if (s->in_at > 0) {
        memmove(s->in, s->in + s->in_at, s->in_end - s->in_at);
        s->in_end -= s->in_at;
        s->in_at = 0;
    }
    ssize_t n = recv(w->fds[r].fd, s->in + s->in_end, IN_CAPACITY - s->in_end, MSG_DONTWAIT);
    if (n > 0) {
        s->in_end += (size_t)n;
    } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR &&
                          errno != ENOBUFS && errno != ENOMEM)) {
        s->ended = true;
        if (n < 0)
            s->error = errno;
    }
}

static int hand_out(struct transport *w, int32_t *peer, const void **frame, size_t *bytes)
{
    for (int32_t k = 0; k < w->size; k++) {
        int32_t r = (w->first + k) % w->size;
        struct sock *s = &w->sock[r];
        if (w->fds[r].fd < 0)
            continue;
        if (has_frame(s, bytes)) {
            *peer = r;
            *frame = s->in + s->in_at + 8;
            w->held = r;
            w->first = r;
            return 1;
        }
        if (!s->ended)
            continue;
        snprintf(w->why, sizeof w->why, "its connection ended%s%s", s->error ? ": " : "",
                 s->error ? strerror(s->error) : "");
        colo_socket_close(w->fds[r].fd);
        set_polled(w, r, -1, 0);
        s->out_at = s->out_end = 0;
        *peer = r;
        return -1;
    }
    return 0;
}

static int recv_near(struct transport *w, int32_t *peer, const void **frame, size_t *bytes)
{
    if (w->held >= 0) {
        struct sock *s = &w->sock[w->held];
        uint64_t n;
        memcpy(&n, s->in + s->in_at, sizeof n);
        s->in_at += padded((size_t)n);
        w->held = -1;
    }
    for (int32_t r = 0; r < w->size; r++)
        if (w->sock[r].starved && w->fds[r].fd >= 0)
            flush_out(w, r);
    int got = hand_out(w, peer, frame, bytes);
    if (got || poll(w->fds, (nfds_t)w->size, 0) <= 0)
        return got;
    for (int32_t r = 0; r < w->size; r++) {
        if (w->fds[r].fd < 0)
            continue;
        if (w->fds[r].revents & POLLOUT)
            flush_out(w, r);
        if (w->fds[r].revents & (POLLIN | POLLHUP | POLLERR))
            read_in(w, r);
    }
    w->first = (w->first + 1) % w->size;
    return hand_out(w, peer, frame, bytes);
}

static int sockets_recv(void *transport, int32_t *peer, const void **frame, size_t *bytes)
{
    struct transport *w = transport;
    int got = 0;
    w->far_first = w->far && !w->far_first;
    for (int i = 0; i < (w->far ? 2 : 1) && got == 0; i++) {
        w->far_spoke = w->far_first == (i == 0);
        got = w->far_spoke ? w->far->recv(w->far_transport, peer, frame, bytes)
                           : recv_near(w, peer, frame, bytes);
    }
    return got;
}

static const char *sockets_why(void *transport)
{
    struct transport *w = transport;
    return w->far_spoke ? w->far->why(w->far_transport) : w->why;
}

static bool sockets_flushed(void *transport, int32_t peer)
{
    struct transport *w = transport;
    return is_far(w, peer) ? w->far->flushed(w->far_transport, peer) : w->sock[peer].out_end == 0;
}

static void sockets_wait(void *transport, double seconds)
{
    struct transport *w = transport;
    struct timespec t = {.tv_sec = (time_t)seconds};
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    pthread_mutex_lock(&w->lock);
    memcpy(w->waiting, w->seen, (size_t)w->size * sizeof *w->seen);
    pthread_mutex_unlock(&w->lock);
    if (w->far) /* in the place of this rank's own */
        w->waiting[w->rank] = (struct pollfd){w->far->arm(w->far_transport), POLLIN, 0};
    if (!w->far || w->waiting[w->rank].fd >= 0)
        ppoll(w->waiting, (nfds_t)w->size, &t, NULL);
}

static void sockets_close(void *transport, bool clean)
{
    struct transport *w = transport;
    if (w->far)
        w->far->close(w->far_transport, clean);
    for (int32_t r = 0; r < w->size; r++) {
        if (w->fds)
            colo_socket_close(w->fds[r].fd);
        if (w->sock) {
            free(w->sock[r].out);
            free(w->sock[r].in);
        }
    }
    pthread_mutex_destroy(&w->lock);
    free(w->sock);
    free(w->fds);
    free(w->seen);
    free(w->waiting);
    free(w);
}

colo_status_t colo_transport_sockets_new(int32_t rank, int32_t size, const int *fd,
                                         const colo_transport_ops_t *far, void *far_transport,
                                         void **transport)
{
    struct transport *w = calloc(1, sizeof *w);
    bool enough = w && (w->sock = calloc((size_t)size, sizeof *w->sock)) &&
                  (w->fds = calloc((size_t)size, sizeof *w->fds)) &&
                  (w->seen = calloc((size_t)size, sizeof *w->seen)) &&
                  (w->waiting = calloc((size_t)size, sizeof *w->waiting));
    for (int32_t r = 0; r < size; r++) {
        if (!enough) {
            colo_socket_close(fd[r]);
            if (w && w->fds)
                w->fds[r].fd = -1;
            continue;
        }
        w->fds[r] = w->seen[r] = (struct pollfd){.fd = fd[r], .events = POLLIN};
        if (fd[r] < 0)
            continue;
        struct sock *s = &w->sock[r];
        s->in = malloc(IN_CAPACITY);
        s->out = malloc(OUT_CAPACITY);
        s->out_capacity = OUT_CAPACITY;
        enough = s->in && s->out;
    }
    if (w) {
        w->rank = rank;
        w->size = size;
        w->held = -1;
        w->far = far;
        w->far_transport = far_transport;
        pthread_mutex_init(&w->lock, NULL);
    }
    if (enough) {
        *transport = w;
        return COLO_OK;
    }
    if (w)
        sockets_close(w, false);
    else if (far)
        far->close(far_transport, false);
    return colo_fail(COLO_ERR_NOMEM, "create_bootstrap: no memory for %d connections", (int)size);
}

const colo_transport_ops_t colo_transport_sockets = {
    .abi = COLO_TRANSPORT_ABI,
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
