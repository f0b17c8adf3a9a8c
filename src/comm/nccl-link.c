/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl-link.c - one ncclComm_t for each list of ranks: made once, found again.
 *
 * Everything that is not data goes over a host communicator of the same ranks: the unique id,
 * agreement, who failed. So a rank that is missing is found before anybody enters NCCL, where it
 * could not be.
 */
#include "comm/comm-nccl.h"

#include "core/hash.h"
#include "core/try.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUND_WORDS = 3 };

struct connect {
    const colo_nccl_lib_t *lib;
    int32_t device, rank, n;
    ncclUniqueId id;
    bool borrowed;
    ncclComm_t nccl;
    char why[400];
};

static void connect_main(void *p)
{
    struct connect *t = p;
    cudaStream_t stream = NULL;
    char *room = NULL;
    const char *why = NULL;
    cudaSetDevice(t->device);
    if (t->n > 1 && !t->borrowed) {
        ncclResult_t r = t->lib->init_rank(&t->nccl, t->n, t->id, t->rank);
        if (r != ncclSuccess) {
            const char *more = t->lib->last_error(NULL);
            snprintf(t->why, sizeof t->why, "%s; %.300s", t->lib->error_string(r),
                     more ? more : "");
            t->nccl = NULL;
            return;
        }
    }
    size_t bytes = COLO_NCCL_WARM_BYTES(t->n);
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&room, bytes);
    if (e == cudaSuccess)
        why = colo_nccl_warm(t->lib, t->nccl, t->rank, t->n, stream, room, bytes);
    if (e == cudaSuccess && !why)
        e = cudaStreamSynchronize(stream);
    if (e != cudaSuccess)
        why = cudaGetErrorString(e);
    if (why)
        snprintf(t->why, sizeof t->why, "first operations: %.350s", why);
    cudaFree(room);
    if (stream)
        cudaStreamDestroy(stream);
}

/* Connects the ranks of @control; all or none succeed. */
static colo_status_t link_connect(struct colo_nfamily *f, colo_comm_t *control, ncclComm_t borrowed,
                                  const ncclUniqueId *id, struct colo_link *l)
{
    struct connect *t = calloc(1, sizeof *t);
    if (!t)
        return colo_fail(COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *t);
    *t = (struct connect){.lib = f->lib,
                          .device = f->device,
                          .rank = control->rank,
                          .n = control->size,
                          .id = *id,
                          .borrowed = borrowed != NULL,
                          .nccl = borrowed};
    if (!colo_nccl_run_for((double)control->timeout_ms * 1e-3, connect_main, t))
        return colo_fail(COLO_ERR_TIMEOUT,
                         "nccl create: NCCL did not connect %d ranks within %lld ms (rank %d, "
                         "world rank %lld, device %d)",
                         (int)control->size, (long long)control->timeout_ms, (int)control->rank,
                         (long long)control->world_rank[control->rank], (int)f->device);
    colo_status_t st = t->why[0] ? colo_fail(COLO_ERR_NCCL, "nccl create on rank %d, device %d: %s",
                                             (int)control->rank, (int)f->device, t->why)
                                 : COLO_OK;
    l->nccl = t->nccl;
    free(t);
    return st;
}

static uint64_t hash_text(const char *text)
{
    return colo_hash_bytes(COLO_HASH_INIT, text, strlen(text));
}

static uint64_t host_hash(void)
{
    char text[128] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r"); /* containers share names */
    if (file) {
        if (!fgets(text, sizeof text, file))
            text[0] = '\0';
        fclose(file);
    }
    if (!text[0])
        gethostname(text, sizeof text - 1);
    return hash_text(text);
}

/* Do two ranks sit on one device? Every rank sees the same words. */
static colo_status_t apart(const colo_comm_t *control, const uint64_t *all)
{
    for (int32_t a = 0; a < control->size; a++)
        for (int32_t b = a + 1; b < control->size; b++) {
            const uint64_t *p = all + ROUND_WORDS * a, *q = all + ROUND_WORDS * b;
            if (p[1] == q[1] && p[2] == q[2])
                return colo_fail(COLO_ERR_MISMATCH,
                                 "nccl create: ranks %d and %d (world ranks %lld and %lld) are on "
                                 "the same device; one rank a device is expected",
                                 (int)a, (int)b, (long long)control->world_rank[a],
                                 (long long)control->world_rank[b]);
        }
    return COLO_OK;
}

static struct colo_link *find_link(struct colo_nfamily *f, const colo_comm_t *control)
{
    struct colo_link *l = f->link;
    while (l && (l->n != control->size || atomic_load(&l->phase) != COLO_LINK_OK ||
                 memcmp(l->world, control->world_rank, sizeof *l->world * (size_t)l->n) != 0))
        l = l->next;
    return l;
}

static colo_status_t link_new(const colo_comm_t *control, struct colo_link **out)
{
    size_t n = (size_t)control->size;
    struct colo_link *l = calloc(1, sizeof *l);
    int64_t *world = malloc(sizeof *world * n);
    if (!l || !world) {
        free(l);
        free(world);
        return colo_fail(COLO_ERR_NOMEM, "nccl create: link of %zu ranks", n);
    }
    memcpy(world, control->world_rank, sizeof *world * n);
    l->world = world;
    l->n = control->size;
    pthread_mutex_init(&l->busy, NULL);
    *out = l;
    return COLO_OK;
}

/* The first rank makes an id, all get it. */
static colo_status_t share_id(struct colo_nfamily *f, colo_comm_t *control, ncclUniqueId *id)
{
    colo_status_t st = COLO_OK;
    memset(id, 0, sizeof *id);
    if (control->rank == 0) {
        ncclResult_t r = f->lib->get_unique_id(id);
        if (r != ncclSuccess)
            st = colo_nccl_error(f->lib, "nccl create: unique id", r);
    }
    COLO_TRY(colo_comm_i_agree(control, "nccl create (unique id)", 0, st));
    return colo_comm_broadcast(control, id, sizeof *id, COLO_U8, 0, NULL);
}

/* The link of @control's ranks: the one that is there, if all have it whole, or a new one. */
colo_status_t colo_nccl_link_get(struct colo_nfamily *f, colo_comm_t *control, ncclComm_t borrowed,
                                 struct colo_link **out)
{
    struct colo_link *fresh = NULL;
    uint64_t words[ROUND_WORDS] = {0};
    uint64_t *all = NULL;
    char bus[32] = "";
    ncclUniqueId id;
    pthread_mutex_lock(&f->lock);
    struct colo_link *l = borrowed ? NULL : find_link(f, control);
    pthread_mutex_unlock(&f->lock);
    colo_status_t st = link_new(control, &fresh);
    if (st == COLO_OK) {
        all = calloc((size_t)control->size, sizeof words);
        if (!all)
            st = colo_fail(COLO_ERR_NOMEM, "nccl create: %d ranks", (int)control->size);
    }
    cudaError_t e = cudaDeviceGetPCIBusId(bus, sizeof bus, f->device);
    if (st == COLO_OK && e != cudaSuccess)
        st = colo_cuda_error("nccl create", e);
    COLO_TRY_GOTO(st, colo_comm_i_agree(control, "nccl create", (uint64_t)f->lib->version, st),
                  fail);
    words[0] = l != NULL;
    words[1] = host_hash();
    words[2] = hash_text(bus);
    COLO_TRY_GOTO(
        st,
        colo_comm_i_all_gather(control, COLO_OWNER_CHECK, words, all, ROUND_WORDS, COLO_I64, NULL),
        fail);
    bool cached = true;
    for (int32_t r = 0; r < control->size; r++)
        cached = cached && all[ROUND_WORDS * r] == 1;
    if (cached) {
        free(all);
        free(fresh->world);
        pthread_mutex_destroy(&fresh->busy);
        free(fresh);
        *out = l;
        return COLO_OK;
    }
    COLO_TRY_GOTO(st, apart(control, all), fail);
    memset(&id, 0, sizeof id);
    if (control->size > 1 && !borrowed)
        COLO_TRY_GOTO(st, share_id(f, control, &id), fail);
    st = link_connect(f, control, borrowed, &id, fresh);
    fresh->borrowed = borrowed != NULL;
    st = colo_comm_i_agree(control, "nccl create (connect)", 0, st);
    if (st < 0) {
        colo_nccl_tear(f, fresh);
        goto fail;
    }
    free(all);
    pthread_mutex_lock(&f->lock);
    fresh->next = f->link;
    f->link = fresh;
    pthread_mutex_unlock(&f->lock);
    *out = fresh;
    return COLO_OK;
fail:
    free(all);
    if (fresh) {
        pthread_mutex_destroy(&fresh->busy);
        free(fresh->world);
        free(fresh);
    }
    return st;
}
