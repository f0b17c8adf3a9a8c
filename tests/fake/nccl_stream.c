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

static bool all_posted(const struct world *w, int64_t number)
{
    for (int32_t i = 0; i < w->n; i++)
        if (w->seat[i].posted < number)
            return false;
    return true;
}

static bool all_finished(const struct world *w, int64_t number)
{
    for (int32_t i = 0; i < w->n; i++)
        if (w->seat[i].finished < number)
            return false;
    return true;
}

static bool all_alike(const struct world *w)
{
    const struct call *a = &w->seat[0].call;
    for (int32_t i = 1; i < w->n; i++) {
        const struct call *b = &w->seat[i].call;
        if (a->kind != b->kind || a->bytes != b->bytes || a->peer != b->peer)
            return false;
    }
    return true;
}

static void finish(const struct world *w, const struct call *k)
{
    char *to = k->recv;
    int32_t sum, v;
    switch (k->kind) {
    case ALL_GATHER:
        for (int32_t i = 0; i < w->n; i++)
            memcpy(to + (size_t)i * k->bytes, w->seat[i].data->content, k->bytes);
        break;
    case ALL_REDUCE: /* sums of i32 alone: the library makes its own of others */
        for (size_t pos = 0; pos < k->bytes; pos += sizeof sum) {
            sum = 0;
            for (int32_t i = 0; i < w->n; i++) {
                memcpy(&v, w->seat[i].data->content + pos, sizeof v);
                sum = (int32_t)((uint32_t)sum + (uint32_t)v);
            }
            memcpy(to + pos, &sum, sizeof sum);
        }
        break;
    case BROADCAST:
        memcpy(to, w->seat[k->peer].data->content, k->bytes);
        break;
    case SEND:
    case RECV:
        break;
    }
}

static void collective(struct ncclComm *c, const struct call *k)
{
    struct world *w = c->world;
    struct seat *me = &w->seat[c->rank];
    const bool brings = k->kind != BROADCAST || k->peer == c->rank;
    struct data *d = data_new(k->send, brings ? k->bytes : 0);
    pthread_mutex_lock(&w->lock);
    const int64_t number = ++c->collectives;
    fake_data_put(me->data);
    me->data = d;
    me->call = *k;
    me->posted = number;
    pthread_cond_broadcast(&w->changed);
    while (!all_posted(w, number) && !must_stop(c))
        wait_for_change(w);
    if (!must_stop(c) && !all_alike(w)) {
        fake_misused("ranks differ in a collective");
        while (!must_stop(c))
            wait_for_change(w);
    }
    if (!must_stop(c)) {
        finish(w, k);
        me->finished = number;
        pthread_cond_broadcast(&w->changed);
        while (!all_finished(w, number) && !must_stop(c))
            wait_for_change(w);
    }
    pthread_mutex_unlock(&w->lock);
}

static void post(struct ncclComm *c, const struct call *k)
{
    struct world *w = c->world;
    struct message *m = calloc(1, sizeof *m), **link = &w->mailbox[c->rank * w->n + k->peer];
    m->data = data_new(k->send, k->bytes);
    while (*link)
        link = &(*link)->next;
    *link = m;
    c->sent[k->peer]++;
}

static void receive(struct ncclComm *c, const struct call *k)
{
    struct world *w = c->world;
    const int32_t pair = k->peer * w->n + c->rank;
    while (!w->mailbox[pair] && !must_stop(c))
        wait_for_change(w);
    if (must_stop(c))
        return;
    struct message *m = w->mailbox[pair];
    if (m->data->bytes != k->bytes) {
        fake_misused("a message is not as long as what receives it");
        while (!must_stop(c))
            wait_for_change(w);
        return;
    }
    memcpy(k->recv, m->data->content, k->bytes);
    w->mailbox[pair] = m->next;
    w->taken[pair]++;
    fake_data_put(m->data);
    free(m);
    pthread_cond_broadcast(&w->changed);
}

static void messages(const struct group *g)
{
    struct ncclComm *c = g->comm;
    struct world *w = c->world;
    pthread_mutex_lock(&w->lock);
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind == SEND)
            post(c, &g->call[i]);
    pthread_cond_broadcast(&w->changed);
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind == RECV)
            receive(c, &g->call[i]);
    for (int32_t i = 0; i < w->n; i++)
        while (w->taken[c->rank * w->n + i] < c->sent[i] && !must_stop(c))
            wait_for_change(w);
    pthread_mutex_unlock(&w->lock);
}

void fake_group_run(void *arg)
{
    const struct group *g = arg;
    struct ncclComm *c = g->comm;
    if (c->gone && !c->aborted)
        fake_misused("an operation runs on a communicator that was destroyed");
    if (c->gone)
        return;
    c->running++;
    for (int32_t i = 0; i < g->n; i++)
        if (g->call[i].kind < SEND)
            collective(c, &g->call[i]);
    messages(g);
    c->running--;
}
