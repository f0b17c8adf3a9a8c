/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c - what a bridge's passes have a GPU do: lists of boxes on the device, one launch
 * for all tensors of a call.
 *
 * What a kernel needs and does not change from call to call is made here, at create and when a
 * bridge takes another shape: the partners, which boxes go where, cut into tiles. A call
 * adds pointers, strides and the registration of what peers reach, and costs one launch. It
 * follows the family's operation before it on the device (order.h).
 *
 * Lists are filled in pinned memory when a shape or the tables of a ragged batch are set, and sent
 * by the first call, on its stream. Blocks of memory serve one shape or batch after the other, once
 * the device is past the last call of the one before; those that a graph has are kept to the end.
 *
 * Left to others: the handshake itself (kernels/direct.cu), its mailboxes and what became of it
 * (channel.c), what is registered (registry.c).
 */
#include "comm/direct/registry.h"

#include "capture.h"
#include "core/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct colo_direct_list {          /* of a shape or a ragged batch */
    struct colo_direct_list *next; /* in launcher->lists */
    colo_k_direct_t k[2];          /* by pass, all but the call */
    char *host, *device;           /* of capacity bytes: segments and addends of both passes */
    size_t capacity, bytes;
    cudaEvent_t done; /* after the last call; recorded when it is dropped */
    bool used, sent;  /* by a call; to the device */
    bool taken;       /* by a shape or a batch */
    bool captured;    /* by a graph, which may be replayed at any time */
};

struct colo_direct_launcher {
    colo_direct_channel_t channel;        /* first */
    struct colo_direct_list *lists, *own; /* all; that of the shape */
};

/* Bytes. A call whose boxes fit takes a tile a block, others several, so that blocks end together.
 */
enum {
    TILE_MIN = COLO_K_THREADS * 16,
    TILE_OF_ONE = 16 * TILE_MIN,
    TILE_MAX = 32 * TILE_MIN,
    TILES_A_BLOCK = 8
};

/* Blocks that keep 95 % of a link's rate (bench/results/bridge.md): of a kernel that
 * writes into peers' memory; that reads there, which takes longer; sums take all that there are. */
enum { WRITE_BLOCKS = 24, READ_BLOCKS = 48 };

/* ---- lists ---- */

static int64_t elements(const colo_transfer_t *s)
{
    return s->extent[0] * s->extent[1] * s->extent[2];
}

/* Addends are of different ranks, usually, so other ranks have all but one of a box. */
static bool is_remote(const colo_transfers_t *w, int64_t i)
{
    return w->addends > 0 || w->transfer[i].peer >= 0;
}

/* Where each box goes in the list: behind its queue's and its partner's before it. Queue 0 first.
 * In it partners by rank XOR own rank: ranks that send to the same ones begin with different ones,
 * and where they come in powers of two, every round pairs all of them up. Boxes that add keep their
 * order. */
static int64_t *order_of(const struct colo_direct *p, const colo_transfers_t *w)
{
    int64_t partners = 1, *link = malloc(((size_t)w->ntransfers + 1) * sizeof *link);
    while (partners < p->size)
        partners *= 2;
    COLO_AUTOFREE int64_t *count = calloc(2 * (size_t)partners + 1, sizeof *count);
    for (int64_t i = 0; link && count && i < w->ntransfers; i++) {
        const int64_t peer = w->transfer[i].peer;
        link[i] = (is_remote(w, i) ? 0 : partners) + (peer < 0 ? 0 : peer ^ p->rank);
        count[link[i] + 1]++;
    }
    for (int64_t k = 0; link && count && k < 2 * partners; k++)
        count[k + 1] += count[k];
    for (int64_t i = 0; link && count && i < w->ntransfers; i++)
        link[i] = count[link[i]]++;
    if (!count) {
        free(link);
        link = NULL;
    }
    return link;
}

/* @peer of a box or an addend, as the kernel wants it. */
static bool be_partner(const struct colo_direct_launcher *d, int pass, colo_k_direct_t *k,
                       int64_t *peer)
{
    if (*peer < 0)
        return true;
    *peer = colo_direct_channel_partner(&d->channel, pass, k, (int32_t)*peer, 2);
    return *peer != COLO_DIRECT_CHANNEL_FULL;
}

/* Boxes, then addends, as the kernel wants them, in host memory. */
static colo_status_t lists_of(const struct colo_direct_launcher *d, int pass,
                              const colo_transfers_t *w, colo_k_direct_t *k,
                              colo_transfer_t *segment, colo_addend_t *addend)
{
    COLO_AUTOFREE int64_t *link = order_of(d->channel.direct, w);
    if (!link)
        return colo_fail(COLO_ERR_NOMEM, "%s: %lld boxes", w->name, (long long)w->ntransfers);
    for (int32_t i = 0; i < w->nexposed; i++)
        if (colo_direct_channel_partner(&d->channel, pass, k, w->exposed[i], 1) < 0)
            return colo_direct_channel_too_many(&d->channel, w->name);
    for (int64_t i = 0; i < w->ntransfers; i++) {
        colo_transfer_t *s = &segment[link[i]];
        *s = w->transfer[i];
        bool fits = true;
        if (i > 0 && s->peer == w->transfer[i - 1].peer) /* as it usually is */
            s->peer = segment[link[i - 1]].peer;
        else
            fits = be_partner(d, pass, k, &s->peer);
        for (int32_t l = 0; l < w->addends; l++) {
            colo_addend_t *a = &addend[i * w->addends + l];
            *a = w->addend[i * w->addends + l];
            fits = fits && be_partner(d, pass, k, &a->peer);
        }
        if (!fits)
            return colo_direct_channel_too_many(&d->channel, w->name);
        k->segments[is_remote(w, i) ? 0 : 1]++;
    }
    for (int q = 0, i = 0; q < 2; q++)
        for (int32_t n = 0; n < k->segments[q]; n++, i++) {
            const int64_t first = k->tiles[q];
            k->tiles[q] += (elements(&segment[i]) - 1) / k->tile + 1;
            segment[i].tile_end = k->tiles[q];
            if (segment[i].peer < 0)
                continue;
            colo_k_partner_t *p = &k->partner[segment[i].peer];
            p->first = p->count ? p->first : (int32_t)first;
            p->count += (int32_t)(k->tiles[q] - first);
        }
    return COLO_OK;
}

static int32_t blocks_of(const struct colo_direct *p, const colo_transfers_t *w)
{
    int32_t blocks = w->blocks;
    if (blocks == 0)
        blocks = w->addends ? p->blocks : w->pulls ? READ_BLOCKS : WRITE_BLOCKS;
    return blocks < p->blocks ? blocks : p->blocks;
}

static int64_t tiles_of(const colo_transfers_t *w, int64_t bytes)
{
    int64_t tiles = 0;
    for (int64_t i = 0; i < w->ntransfers; i++)
        tiles += (elements(&w->transfer[i]) * (int64_t)w->elem - 1) / bytes + 1;
    return tiles;
}

/* Elements of a tile. */
static int64_t tile_of(const colo_transfers_t *w, int64_t blocks)
{
    const int64_t elem = (int64_t)w->elem;
    int64_t bytes = TILE_MIN, total = 0;
    while (bytes <= TILE_OF_ONE && (w->ntransfers > blocks || tiles_of(w, bytes) > blocks))
        bytes += TILE_MIN;
    if (bytes > TILE_OF_ONE) {
        for (int64_t i = 0; i < w->ntransfers; i++)
            total += elements(&w->transfer[i]) * elem;
        for (bytes = TILE_MIN; bytes < TILE_MAX && bytes * blocks * TILES_A_BLOCK < total;)
            bytes *= 2;
    }
    return bytes > elem ? bytes / elem : 1; /* a feature of a ragged batch may be larger */
}

static size_t lists_bytes(const colo_transfers_t *w)
{
    const size_t n = (size_t)w->ntransfers, sums = n * (size_t)w->addends;
    return n * sizeof(colo_transfer_t) + sums * sizeof(colo_addend_t);
}

/* All of @k but the call, for lists that are made at @host and used at @device. */
static colo_status_t fill_lists(struct colo_direct_launcher *d, int pass, const colo_transfers_t *w,
                                char *host, char *device, colo_k_direct_t *k)
{
    struct colo_direct *p = d->channel.direct;
    const size_t n = (size_t)w->ntransfers;
    memset(k, 0, sizeof *k);
    if (w->ntransfers == 0 && w->nexposed == 0)
        return COLO_OK;
    k->pull = w->pulls;
    k->addends = w->addends;
    k->blocks = blocks_of(p, w);
    k->tile = tile_of(w, k->blocks);
    colo_direct_channel_fill(&d->channel, pass, k);
    colo_transfer_t *segment = (colo_transfer_t *)(void *)host;
    COLO_TRY(lists_of(d, pass, w, k, segment, (colo_addend_t *)(void *)(segment + n)));
    k->segment[0] = (const colo_transfer_t *)(const void *)device;
    k->segment[1] = k->segment[0] + k->segments[0];
    k->addend = (const colo_addend_t *)(const void *)(k->segment[0] + n);
    return COLO_OK;
}

/* ---- memory for lists ---- */

enum { LIST_BYTES = 64 << 10 }; /* bytes, at least */
/* Blocks that are there from create on: of so many shapes calls may be under way before another one
 * makes a block. */
enum { LISTS = 4 };

static void list_free(struct colo_direct_list *l)
{
    cudaFree(l->device);
    cudaFreeHost(l->host);
    if (l->done)
        cudaEventDestroy(l->done);
    free(l);
}

static colo_status_t list_new(struct colo_direct_launcher *d, size_t bytes,
                              struct colo_direct_list **out)
{
    struct colo_direct_list *l = calloc(1, sizeof *l);
    if (!l)
        return colo_fail(COLO_ERR_NOMEM, "bridge: %zu bytes", sizeof *l);
    for (l->capacity = LIST_BYTES; l->capacity < bytes;)
        l->capacity *= 2;
    cudaError_t e = cudaMalloc((void **)&l->device, l->capacity);
    COLO_THEN(e, cudaHostAlloc((void **)&l->host, l->capacity, cudaHostAllocPortable));
    COLO_THEN(e, cudaEventCreateWithFlags(&l->done, cudaEventDisableTiming));
    if (e != cudaSuccess) {
        list_free(l);
        (void)cudaGetLastError();
        return colo_cuda_error("bridge: lists of boxes", e);
    }
    l->next = d->lists;
    d->lists = l;
    *out = l;
    return COLO_OK;
}

/* Has the device used it for the last time? */
static bool list_idle(const struct colo_direct_list *l)
{
    if (l->taken || l->captured)
        return false;
    const cudaError_t e = l->used ? cudaEventQuery(l->done) : cudaSuccess;
    if (e != cudaSuccess)
        (void)cudaGetLastError();
    return e == cudaSuccess;
}

static colo_status_t launcher_list(colo_direct_launcher_t *d, const colo_transfers_t pass[2],
                                   colo_direct_list_t **list)
{
    COLO_CAPTURE_RELAXED;
    const size_t first = lists_bytes(&pass[0]), bytes = first + lists_bytes(&pass[1]);
    struct colo_direct_list *l = d->lists;
    while (l && (l->capacity < bytes || !list_idle(l)))
        l = l->next;
    if (!l)
        COLO_TRY(list_new(d, bytes, &l));
    l->bytes = bytes;
    l->used = l->sent = false;
    COLO_TRY(fill_lists(d, 0, &pass[0], l->host, l->device, &l->k[0]));
    COLO_TRY(fill_lists(d, 1, &pass[1], l->host + first, l->device + first, &l->k[1]));
    l->taken = true;
    *list = l;
    return COLO_OK;
}

/* All calls of the family follow each other, so its last one stands for the list's. A list of
 * which that is not known stays taken. */
static void launcher_drop(colo_direct_launcher_t *d, colo_direct_list_t **list)
{
    struct colo_direct *p = d->channel.direct;
    struct colo_direct_list *l = *list;
    cudaError_t e = cudaSuccess;
    *list = NULL;
    if (l->used)
        e = cudaStreamWaitEvent(p->stream, p->order->done, 0);
    if (e == cudaSuccess && l->used)
        e = cudaEventRecord(l->done, p->stream);
    l->taken = e != cudaSuccess;
}

static colo_status_t launcher_load(colo_direct_launcher_t *d, const colo_transfers_t pass[2])
{
    struct colo_direct_list *next = NULL;
    COLO_TRY(launcher_list(d, pass, &next));
    if (d->own)
        launcher_drop(d, &d->own);
    d->own = next;
    for (int i = 0; i < 2; i++)
        d->channel.pass[i].name = pass[i].name;
    return COLO_OK;
}

/* ---- create ---- */

/* Those of create are on the device already, so that its first call may be captured without. */
static colo_status_t lists_make(struct colo_direct_launcher *d, const colo_transfers_t pass[2])
{
    struct colo_direct_list *l;
    for (int i = 0; i < LISTS; i++)
        COLO_TRY(list_new(d, LIST_BYTES, &l));
    COLO_TRY(launcher_load(d, pass));
    l = d->own;
    cudaError_t e = cudaMemcpyAsync(l->device, l->host, l->bytes, cudaMemcpyHostToDevice,
                                    d->channel.direct->stream);
    COLO_THEN(e, cudaStreamSynchronize(d->channel.direct->stream));
    l->sent = e == cudaSuccess;
    return colo_cuda_error("bridge: lists of boxes", e);
}

/* Freeing waits for the device, with the replays that are on it. */
static void end_lists(colo_direct_channel_t *channel)
{
    for (struct colo_direct_list *l = ((struct colo_direct_launcher *)channel)->lists, *next; l;
         l = next) {
        next = l->next;
        list_free(l);
    }
}

static colo_status_t launcher_create(colo_comm_t *c, const colo_transfers_t pass[2],
                                     colo_direct_launcher_t **out)
{
    COLO_CAPTURE_RELAXED;
    struct colo_direct_launcher *d = calloc(1, sizeof *d);
    colo_status_t st = d ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "bridge: %zu bytes", sizeof *d);
    if (d)
        d->channel.end = end_lists;
    COLO_TRY(colo_direct_channel_open(c, d ? &d->channel : NULL, st));
    COLO_TRY(colo_direct_channel_enter(&d->channel, lists_make(d, pass)));
    *out = d;
    return COLO_OK;
}

static void launcher_destroy(colo_direct_launcher_t **launcher)
{
    if (!launcher || !*launcher)
        return;
    colo_direct_channel_destroy(&(*launcher)->channel);
    *launcher = NULL;
}

/* ---- a call ---- */

/* Puts the tensors of one launch into @k: as many of the next @n as it takes, sums of one dtype.
 * The same number on all ranks. */
static int32_t tensors_of(colo_k_direct_t *k, const colo_direct_tensor_t *next, int32_t n)
{
    k->dtype = next->dtype;
    for (k->tensors = 0; k->tensors < n && k->tensors < COLO_K_TENSORS; k->tensors++) {
        const colo_direct_tensor_t *from = &next[k->tensors];
        if (k->addends && from->dtype != k->dtype)
            break;
        colo_k_tensor_t *to = &k->tensor[k->tensors];
        *to = (colo_k_tensor_t){.in = from->in,
                                .out = from->out,
                                .memory = (uint32_t)from->id,
                                .elem = (int32_t)from->elem,
                                .offset = from->offset,
                                .per = from->per};
        memcpy(to->in_stride, from->in_stride, sizeof to->in_stride);
        memcpy(to->out_stride, from->out_stride, sizeof to->out_stride);
    }
    return k->tensors;
}

static colo_status_t launcher_run(colo_direct_launcher_t *d, int pass,
                                  const colo_direct_call_t *call, colo_stream_t stream)
{
    const char *name = d->channel.pass[pass].name;
    struct colo_direct *p = d->channel.direct;
    struct colo_direct_list *list = call->list ? call->list : d->own;
    colo_k_direct_t *k = &list->k[pass]; /* 4 KiB, which a launch copies */
    if (k->npartners == 0 && k->tiles[0] + k->tiles[1] == 0)
        return COLO_OK;
    if (call->device != p->device)
        return colo_fail(COLO_ERR_ARG,
                         "%s: the current device is %d, comm '%s' was made on device "
                         "%d",
                         name, (int)call->device, p->name, (int)p->device);
    colo_direct_channel_call(&d->channel, pass, k);
    cudaError_t e = colo_order_follow(p->order, call->capturing, stream);
    if (e == cudaSuccess && !list->sent && list->bytes > 0)
        e = cudaMemcpyAsync(list->device, list->host, list->bytes, cudaMemcpyHostToDevice, stream);
    for (int32_t i = 0; e == cudaSuccess && i < call->n;) {
        i += tensors_of(k, &call->tensor[i], call->n - i);
        e = colo_k_direct(k, stream);
    }
    COLO_THEN(e, colo_order_lead(p->order, call->capturing, stream));
    list->captured = list->captured || call->capturing;
    list->used = list->used || !call->capturing;
    if (!call->capturing) /* what a capture sends, its replays send */
        list->sent = e == cudaSuccess;
    return colo_cuda_error(name, e);
}

const colo_direct_memory_t colo_direct_table = {
    .open = colo_direct_open,
    .reaches = colo_direct_reaches,
    .why = colo_direct_why,
    .share = colo_direct_register,
    .unshare = colo_direct_unregister,
    .find = colo_direct_find_memory,
    .registrations = colo_direct_registrations,
    .create = launcher_create,
    .load = launcher_load,
    .run = launcher_run,
    .list = launcher_list,
    .drop = launcher_drop,
    .destroy = launcher_destroy,
};
