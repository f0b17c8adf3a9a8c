/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl_stream.c - what operations of NCCL do when their stream runs them. See fake.h.
 *
 * As NCCL, they wait without limit for ranks that do not come to a collective or a message.
 * ncclCommAbort() ends what its own rank waits for. Collectives that differ wait, too, until they
 * are aborted.
 */
#include "nccl_world.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Until @cond, or until the rank is aborted or its device broken; under the world's lock. A device
 * that breaks wakes no one, so the wait looks at it from time to time. */
static bool must_stop(const struct ncclComm *c)
{
    return c->aborted || fake_is_broken(c->device);
}

static void wait_for_change(struct world *w)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 50000000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&w->changed, &w->lock, &t);
}

static struct data *data_new(const void *from, size_t bytes)
{
    struct data *d = malloc(sizeof *d + bytes);
    d->refs = 1;
    d->bytes = bytes;
    if (bytes)
        memcpy(d->content, from, bytes);
    return d;
}

void fake_data_put(struct data *d)
{
    if (d && --d->refs == 0)
        free(d);
}

/* @d: a reference, which the message has from now on. */
static void post(struct ncclComm *c, const struct call *k, int32_t to, struct data *d)
{
    struct world *w = c->world;
    struct message *m = calloc(1, sizeof *m), **link = &w->mailbox[c->rank * w->n + to];
    *m = (struct message){.call = *k, .data = d};
    while (*link)
        link = &(*link)->next;
    *link = m;
    c->sent[to]++;
}

/* What the call brings to others. */
static void bring(struct ncclComm *c, const struct call *k)
{
    const bool brings = k->kind != BROADCAST || k->peer == c->rank;
    struct data *d = data_new(k->send, brings ? k->bytes : 0);
    if (k->kind == SEND) {
        post(c, k, k->peer, d);
        return;
    }
    d->refs = c->world->n;
    for (int32_t to = 0; to < c->world->n; to++)
        post(c, k, to, d);
}

/* What leads to the oldest message that can be for @k, or to NULL. A rank in a collective and one
 * that sends to it never meet: both wait, as in NCCL. */
static struct message **find(const struct world *w, int32_t pair, const struct call *k)
{
    struct message **link = &w->mailbox[pair];
    while (*link && ((*link)->call.kind == SEND) != (k->kind == RECV))
        link = &(*link)->next;
    return link;
}

/* Is @sent what @k, of this rank, expects? */
static bool is_expected(const struct call *sent, const struct call *k)
{
    return sent->bytes == k->bytes &&
           (k->kind == RECV || (sent->kind == k->kind && sent->peer == k->peer));
}

/* A reference; NULL: this rank must stop. */
static struct data *receive(struct ncclComm *c, const struct call *k, int32_t from)
{
    struct world *w = c->world;
    const int32_t pair = from * w->n + c->rank;
    while (!*find(w, pair, k) && !must_stop(c))
        wait_for_change(w);
    struct message **link = find(w, pair, k), *m = *link;
    if (m && !must_stop(c) && !is_expected(&m->call, k)) {
        fake_misused("ranks differ in a collective, or in the bytes of a message");
        while (!must_stop(c))
            wait_for_change(w);
    }
    if (must_stop(c))
        return NULL;
    struct data *d = m->data;
    *link = m->next;
    w->taken[pair]++;
    free(m);
    pthread_cond_broadcast(&w->changed);
    return d;
}

static void add(int32_t *to, const int32_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (int32_t)((uint32_t)to[i] + (uint32_t)from[i]);
}

/* What the call takes from others, in the order of ranks. */
static void take(struct ncclComm *c, const struct call *k)
{
    const int32_t n = c->world->n;
    char *to = k->recv;
    for (int32_t i = 0; i < (k->kind == RECV ? 1 : n); i++) {
        struct data *d = receive(c, k, k->kind == RECV ? k->peer : i);
        if (!d)
            return;
        if (k->kind == ALL_REDUCE &&
            i > 0) /* sums of i32 alone: the library makes its own of others */
            add(k->recv, (const int32_t *)(void *)d->content, k->bytes / sizeof(int32_t));
        else if (k->kind == ALL_GATHER)
            memcpy(to + (size_t)i * k->bytes, d->content, k->bytes);
        else if (k->kind != BROADCAST || i == k->peer)
            memcpy(to, d->content, k->bytes);
        fake_data_put(d);
    }
}

void fake_group_run(void *arg)
{
    const struct group *g = arg;
    struct ncclComm *c = g->comm;
    struct world *w = c->world;
    if (c->gone && !c->aborted)
        fake_misused("an operation runs on a communicator that was destroyed");
    if (c->gone)
        return;
    c->running++;
    pthread_mutex_lock(&w->lock);
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind != RECV)
            bring(c, &g->call[i]);
    pthread_cond_broadcast(&w->changed);
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind != SEND)
            take(c, &g->call[i]);
    for (int32_t i = 0; i < w->n; i++)
        while (w->taken[c->rank * w->n + i] < c->sent[i] && !must_stop(c))
            wait_for_change(w);
    pthread_mutex_unlock(&w->lock);
    c->running--;
}
