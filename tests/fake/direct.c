/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.c - kernels that wait for peers (kernels/direct.cu, kernels/gather.cu) as C functions on
 * the fake's streams: the same mailboxes, records, calls, deadlines and reports. One thread does
 * what a grid does, a box at a time. See fake.h.
 */
#include "fake.h"

#include "direct.h"

#include "core/device.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- words that others see ---- */

static void put(uint64_t *p, uint64_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

static uint64_t get(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static bool is_dead(const colo_k_direct_t *d)
{
    return __atomic_load_n(&d->control->dead, __ATOMIC_ACQUIRE) != 0;
}

static uint32_t call_of(const colo_k_partner_t *p)
{
    return (uint32_t)p->mine[COLO_K_CALLS] + 1;
}

/* The first one to give up says why. Always false. */
static bool give_up(const colo_k_direct_t *d, uint64_t code, const colo_k_partner_t *p,
                    uint64_t memory)
{
    unsigned no = 0;
    if (!__atomic_compare_exchange_n(&d->control->dead, &no, 1u, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return false;
    put(&d->report->peer, (uint64_t)p->rank);
    put(&d->report->call, call_of(p));
    put(&d->report->memory, memory);
    put(&d->report->code, code);
    return false;
}

/* Until @n words of @p's mailbox from @first on are of @call; of COLO_K_DONE the whole word is. The
 * deadline began at @since, for all partners. */
static bool wait_for(const colo_k_direct_t *d, const colo_k_partner_t *p, int first, int n,
                     uint64_t since)
{
    const uint64_t call = call_of(p);
    for (;;) {
        int i = 0;
        while (i < n && (first == COLO_K_DONE ? get(p->mine + first + i)
                                              : get(p->mine + first + i) >> 32) == call)
            i++;
        if (i == n)
            return true;
        if (get(p->mine + COLO_K_POISON))
            return give_up(d, COLO_K_PEER_FAILED, p, 0);
        if (clock_ns() - since > d->deadline_ns)
            return give_up(d, COLO_K_TIMEOUT, p, 0);
        if (get(&d->report->stop))
            return give_up(d, COLO_K_STOPPED, p, 0);
        usleep(20);
    }
}

static void post(const colo_k_partner_t *p, int first, const uint32_t *words, int n)
{
    for (int i = 0; i < n; i++)
        put(p->remote + first + i, (uint64_t)call_of(p) << 32 | words[i]);
}

static uint32_t half_of(uint64_t v, int k)
{
    return (uint32_t)(v >> (32 * k));
}

/* ---- a bridge's way ---- */

struct record {
    char *base;
    int64_t stride[3]; /* bytes */
};

static void expose(const colo_k_direct_t *d)
{
    for (int i = 0; i < d->npartners; i++)
        for (int k = 0; k < d->tensors && d->partner[i].exposes & 1; k++) {
            const colo_k_tensor_t *t = &d->tensor[k];
            const int64_t *stride = d->addends || d->pull ? t->in_stride : t->out_stride;
            uint32_t word[COLO_K_RECORD] = {t->memory, half_of(t->offset, 0),
                                            half_of(t->offset, 1)};
            for (int n = 0; n < 6; n++)
                word[3 + n] = half_of((uint64_t)stride[n / 2], n % 2);
            post(&d->partner[i], k * COLO_K_RECORD, word, COLO_K_RECORD);
        }
}

/* Waits for a partner's record of tensor @k and translates it. */
static bool take(const colo_k_direct_t *d, int64_t partner, int k, uint64_t since, struct record *r)
{
    const colo_k_partner_t *p = &d->partner[partner];
    uint64_t word[COLO_K_RECORD], wide[4];
    if (!wait_for(d, p, k * COLO_K_RECORD, COLO_K_RECORD, since))
        return false;
    if (get(p->mine + COLO_K_POISON))
        return give_up(d, COLO_K_PEER_FAILED, p, 0);
    for (int i = 0; i < COLO_K_RECORD; i++)
        word[i] = (uint32_t)get(p->mine + k * COLO_K_RECORD + i);
    for (int i = 0; i < 4; i++)
        wide[i] = word[1 + 2 * i] | word[2 + 2 * i] << 32;
    const uint64_t base =
        word[0] < COLO_K_MEMORIES ? d->table[p->rank * COLO_K_MEMORIES + (int64_t)word[0]] : 0;
    if (!base)
        return give_up(d, COLO_K_UNKNOWN, p, word[0]);
    *r = (struct record){(char *)(uintptr_t)(base + wide[0]),
                         {(int64_t)wide[1], (int64_t)wide[2], (int64_t)wide[3]}};
    return true;
}

static colo_box_t box_of(const colo_k_tensor_t *t, const colo_transfer_t *s, const struct record *r,
                         const int64_t *pos)
{
    colo_box_t box = {.data = r->base + pos[0] * r->stride[0] + pos[1] * r->stride[1] +
                              pos[2] * t->per * r->stride[2]};
    for (int i = 0; i < 3; i++) {
        box.extent[i] = s->extent[i] * (i == 2 ? t->per : 1);
        box.stride[i] = r->stride[i] / t->elem;
    }
    return box;
}

/* Box @i of queue @q of tensor @k. */
static bool move(const colo_k_direct_t *d, int q, int i, int k, uint64_t since)
{
    const colo_transfer_t *s = &d->segment[q][i];
    const colo_k_tensor_t *t = &d->tensor[k];
    const struct record own_in = {(char *)(uintptr_t)t->in,
                                  {t->in_stride[0], t->in_stride[1], t->in_stride[2]}};
    struct record in = own_in,
                  out = {t->out, {t->out_stride[0], t->out_stride[1], t->out_stride[2]}};
    if (d->addends == 0) {
        if (s->peer >= 0 && !take(d, s->peer, k, since, d->pull ? &in : &out))
            return false;
        const colo_box_t to = box_of(t, s, &out, s->there), from = box_of(t, s, &in, s->here);
        (void)colo_device_host.box_list(&to, &from, 1, (size_t)t->elem, NULL);
        return true;
    }
    const colo_addend_t *a = d->addend + (int64_t)(i + (q ? d->segments[0] : 0)) * d->addends;
    colo_box_t from[COLO_MAX_ADDENDS];
    int n = 0;
    for (; n < d->addends && a[n].peer != COLO_NO_ADDEND; n++) {
        in = own_in;
        if (a[n].peer >= 0 && !take(d, a[n].peer, k, since, &in))
            return false;
        from[n] = box_of(t, s, &in, a[n].begin);
    }
    const colo_box_t to = box_of(t, s, &out, s->there);
    (void)colo_device_host.box_sum(&to, from, n, d->dtype, NULL);
    return true;
}

/* A grid takes tiles, not boxes: together they must be the boxes. */
static bool tiles_cover(const colo_k_direct_t *d, int q)
{
    int64_t end = 0;
    for (int i = 0; i < d->segments[q]; i++) {
        const colo_transfer_t *s = &d->segment[q][i];
        const int64_t n = s->extent[0] * s->extent[1] * s->extent[2];
        if (n > (s->tile_end - end) * d->tile || n <= (s->tile_end - end - 1) * d->tile)
            return false;
        end = s->tile_end;
    }
    return end == d->tiles[q];
}

static bool move_all(const colo_k_direct_t *d)
{
    const uint64_t since = clock_ns();
    for (int q = 0; q < 2; q++) {
        if (!tiles_cover(d, q)) {
            fake_misused("tiles are not the boxes");
            return false;
        }
        for (int n = 0; n < d->segments[q] * d->tensors; n++)
            if (!move(d, q, n % d->segments[q], n / d->segments[q], since))
                return false;
        for (int i = 0; q == 0 && i < d->npartners; i++)
            if (d->partner[i].exposes & 2)
                put(d->partner[i].remote + COLO_K_DONE, call_of(&d->partner[i]));
    }
    return true;
}

/* Peers hear of a call's end: it counts, or this way is dead. */
static void finish(const colo_k_direct_t *d, bool well)
{
    for (int i = 0; i < d->npartners; i++)
        if (well)
            d->partner[i].mine[COLO_K_CALLS] = call_of(&d->partner[i]);
        else
            put(d->partner[i].remote + COLO_K_POISON, 1);
}

static void direct_run(void *arg)
{
    const colo_k_direct_t *d = arg;
    bool well = !is_dead(d);
    if (well) {
        expose(d);
        well = move_all(d);
    }
    const uint64_t since = clock_ns();
    for (int i = 0; i < d->npartners && well; i++)
        if (d->partner[i].exposes & 1)
            well = wait_for(d, &d->partner[i], COLO_K_DONE, 1, since);
    finish(d, well);
}

cudaError_t colo_k_direct(colo_k_direct_t *d, cudaStream_t stream)
{
    if (d->npartners == 0 && d->tiles[0] + d->tiles[1] == 0)
        return cudaSuccess;
    FAKE_ENTER();
    return fake_enqueue(stream, direct_run, NULL, d, sizeof *d);
}

cudaError_t colo_k_direct_fit(int32_t *blocks, bool *early)
{
    FAKE_ENTER();
    *blocks = 8;
    *early = false;
    return cudaSuccess;
}

/* ---- what a rank reaches ---- */

struct trial {
    const uint64_t *page;
    uint64_t *back;
    int32_t ranks, me;
};

static void try_run(void *arg)
{
    const struct trial *t = arg;
    for (int32_t r = 0; r < t->ranks; r++) {
        uint64_t *pos = (uint64_t *)(uintptr_t)t->page[r];
        if (!pos)
            continue;
        if (!fake_is_memory(pos)) {
            fake_misused("a kernel writes into memory that is not there");
            continue;
        }
        put(pos + t->me, COLO_K_TRIAL + (uint64_t)t->me);
        t->back[r] = get(pos + t->me);
    }
}

cudaError_t colo_k_direct_try(const uint64_t *page, uint64_t *back, int32_t ranks, int32_t me,
                              cudaStream_t stream)
{
    const struct trial t = {page, back, ranks, me};
    FAKE_ENTER();
    return fake_enqueue(stream, try_run, NULL, &t, sizeof t);
}

/* ---- a gathered head ---- */

enum { WORDS = 3 }; /* of a record: memory, offset */

static void gather_begin_run(void *arg)
{
    const colo_k_direct_t *d = arg;
    const uint32_t mine[WORDS] = {d->tensor[0].memory, half_of(d->tensor[0].offset, 0),
                                  half_of(d->tensor[0].offset, 1)};
    const uint64_t since = clock_ns();
    if (is_dead(d))
        return;
    for (int i = 0; i < d->npartners; i++)
        post(&d->partner[i], 0, mine, WORDS);
    for (int i = 0; i < d->npartners; i++) {
        const colo_k_partner_t *p = &d->partner[i];
        const bool came =
            wait_for(d, p, 0, WORDS, since); /* a grid waits for the others meanwhile */
        for (int k = 0; came && k < WORDS; k++)
            if ((uint32_t)get(p->mine + k) != mine[k])
                (void)give_up(d, COLO_K_ELSEWHERE, p, (uint32_t)get(p->mine));
    }
}

static void gather_end_run(void *arg)
{
    const colo_k_direct_t *d = arg;
    const uint64_t since = clock_ns();
    bool well = !is_dead(d);
    for (int i = 0; i < d->npartners && well; i++)
        put(d->partner[i].remote + COLO_K_DONE, call_of(&d->partner[i]));
    for (int i = 0; i < d->npartners && well; i++)
        well = wait_for(d, &d->partner[i], COLO_K_DONE, 1, since);
    finish(d, well);
}

cudaError_t colo_k_gather_begin(const colo_k_direct_t *d, cudaStream_t stream)
{
    FAKE_ENTER();
    return fake_enqueue(stream, gather_begin_run, NULL, d, sizeof *d);
}

cudaError_t colo_k_gather_end(const colo_k_direct_t *d, cudaStream_t stream)
{
    FAKE_ENTER();
    return fake_enqueue(stream, gather_end_run, NULL, d, sizeof *d);
}
