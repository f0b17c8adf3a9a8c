/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm-nccl.c - communicators between GPUs: how they are made, fail and end.
 *
 * Everything that is not data goes over a host communicator of the same ranks, which each comm
 * owns: the unique id, agreement at create, who failed. So a rank that is missing at create is
 * found before anybody enters NCCL, where it could not be.
 *
 * NCCL may wait without limit in three places: making a communicator, its first operations, ending
 * it. All three run in a helper thread that this thread waits for up to the deadline; a helper that
 * does not come back keeps what it works on, and the comm is dead. (NCCL's non-blocking mode would
 * start a thread for every operation instead.)
 *
 * A guard thread for each family looks every 20 ms whether a comm has failed here, at a peer or in
 * NCCL, and aborts its link then, so that streams do not wait for ever. NCCL wants no other thread
 * inside it meanwhile: operations hold the link's lock.
 *
 * Left to others: operations (comm-nccl-ops.c), finding NCCL (nccl-lib.c), arguments (comm-ops.c).
 */
#include "comm/comm-nccl.h"

#include "core/backend.h"
#include "core/hash.h"
#include "core/try.h"

#include <colobridge/version.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const double ABORT_SECONDS = 10; /* for NCCL to give up a communicator */
enum { GUARD_MS = 20, ROUND_WORDS = 3 };

colo_status_t colo_nccl_error(const colo_nccl_lib_t *lib, const char *what, ncclResult_t r)
{
    const char *more = lib->last_error ? lib->last_error(NULL) : "";
    return colo_fail(COLO_ERR_NCCL, "%s: NCCL says: %s%s%.600s", what,
                     lib->error_string ? lib->error_string(r) : "an error",
                     more && more[0] ? "; " : "", more ? more : "");
}

colo_status_t colo_cuda_error(const char *what, cudaError_t e)
{
    (void)cudaGetLastError(); /* or the next launch reports it again */
    return colo_fail(COLO_ERR_CUDA, "%s: CUDA says: %s", what, cudaGetErrorString(e));
}

/* ---- helper threads with a deadline ---- */

struct job {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool finished, left;
    void (*fn)(void *arg);
    void *arg;
};

static void job_free(struct job *j)
{
    pthread_cond_destroy(&j->changed);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

static void *job_main(void *p)
{
    struct job *j = p;
    j->fn(j->arg);
    pthread_mutex_lock(&j->lock);
    j->finished = true;
    bool left = j->left;
    pthread_cond_signal(&j->changed);
    pthread_mutex_unlock(&j->lock);
    if (left)
        job_free(j); /* @arg stays: nobody knows any more who uses what is in it */
    return NULL;
}

static void cond_init(pthread_cond_t *c)
{
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(c, &a);
    pthread_condattr_destroy(&a);
}

static struct timespec in_seconds(double seconds)
{
    double at = colo_now() + seconds;
    return (struct timespec){.tv_sec = (time_t)at,
                             .tv_nsec = (long)((at - (double)(time_t)at) * 1e9)};
}

/* True when @fn came back in time; else @arg belongs to the thread for good. */
static bool run_for(double seconds, void (*fn)(void *arg), void *arg)
{
    struct job *j = calloc(1, sizeof *j);
    pthread_t thread;
    if (!j)
        return false;
    j->fn = fn;
    j->arg = arg;
    pthread_mutex_init(&j->lock, NULL);
    cond_init(&j->changed);
    if (pthread_create(&thread, NULL, job_main, j) != 0) {
        job_free(j);
        return false;
    }
    pthread_detach(thread);
    struct timespec until = in_seconds(seconds);
    pthread_mutex_lock(&j->lock);
    while (!j->finished && pthread_cond_timedwait(&j->changed, &j->lock, &until) != ETIMEDOUT)
        ;
    bool finished = j->finished;
    j->left = !finished;
    pthread_mutex_unlock(&j->lock);
    if (finished) {
        job_free(j);
    }
    return finished;
}

/* ---- failure ---- */

static colo_status_t control_state(const struct colo_nctx *x, char *sentence, size_t cap)
{
    return x->control ? x->control->ops->state(x->control, sentence, cap) : COLO_OK;
}

colo_status_t colo_nccl_state(const colo_comm_t *c, char *sentence, size_t cap)
{
    const struct colo_nctx *x = c->impl;
    colo_status_t st = colo_fate_tell(&x->fate, x->rank, sentence, cap);
    return st != COLO_OK ? st : control_state(x, sentence, cap);
}

void colo_nccl_fail(colo_comm_t *c, colo_status_t status, const char *sentence)
{
    struct colo_nctx *x = c->impl;
    char kept[900];
    if (control_state(x, kept, sizeof kept) == COLO_OK)
        x->control->ops->fail(x->control, status, sentence);
    colo_fate_seal(&x->fate, status, -1, -1, sentence);
    pthread_cond_signal(&x->family->wake);
}

struct tear {
    const colo_nccl_lib_t *lib;
    int32_t device;
    ncclComm_t nccl;
};

static void tear_main(void *p)
{
    struct tear *t = p;
    cudaSetDevice(t->device);
    (void)t->lib->abort(t->nccl);
}

/* Ends what is enqueued on a link. Once; never a borrowed one. */
static void tear(struct colo_nfamily *f, struct colo_link *l)
{
    int32_t ok = COLO_LINK_OK;
    if (!l->nccl || l->borrowed ||
        !atomic_compare_exchange_strong(&l->phase, &ok, COLO_LINK_ENDING))
        return;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 2;
    bool held = pthread_mutex_timedlock(&l->busy, &until) == 0; /* a stuck call: abort frees it */
    struct tear *t = malloc(sizeof *t);
    if (t) {
        *t = (struct tear){f->lib, f->device, l->nccl};
        if (run_for(ABORT_SECONDS, tear_main, t))
            free(t);
    }
    atomic_store(&l->phase, COLO_LINK_GONE);
    if (held)
        pthread_mutex_unlock(&l->busy);
}

/* Does NCCL itself report an error on this link? */
static bool look_at_link(struct colo_nfamily *f, struct colo_nctx *x)
{
    struct colo_link *l = x->link;
    ncclResult_t r = ncclSuccess;
    if (!l->nccl || pthread_mutex_trylock(&l->busy) != 0)
        return false;
    if (atomic_load(&l->phase) == COLO_LINK_OK && f->lib->async_error(l->nccl, &r) != ncclSuccess)
        r = ncclSuccess;
    pthread_mutex_unlock(&l->busy);
    if (r == ncclSuccess || r == ncclInProgress)
        return false;
    char sentence[600];
    const char *more = f->lib->last_error(NULL);
    snprintf(sentence, sizeof sentence, "NCCL reports on the link of %d ranks: %s; %.400s",
             (int)l->n, f->lib->error_string(r), more ? more : "");
    if (x->control)
        x->control->ops->fail(x->control, COLO_ERR_NCCL, sentence);
    colo_fate_seal(&x->fate, COLO_ERR_NCCL, -1, -1, sentence);
    return true;
}

static struct colo_link *find_doomed(struct colo_nfamily *f)
{
    char sentence[900];
    for (struct colo_nctx *x = f->ctx; x; x = x->next) {
        bool dead = colo_fate_sealed(&x->fate) ||
                    control_state(x, sentence, sizeof sentence) != COLO_OK || look_at_link(f, x);
        if (dead && x->link->nccl && !x->link->borrowed &&
            atomic_load(&x->link->phase) == COLO_LINK_OK)
            return x->link;
    }
    return NULL;
}

static void *guard_main(void *p)
{
    struct colo_nfamily *f = p;
    pthread_mutex_lock(&f->lock);
    while (!f->stop) {
        struct colo_link *l = find_doomed(f);
        if (l) {
            pthread_mutex_unlock(&f->lock);
            tear(f, l); /* links live as long as the family */
            pthread_mutex_lock(&f->lock);
            continue;
        }
        struct timespec until = in_seconds(GUARD_MS * 1e-3);
        pthread_cond_timedwait(&f->wake, &f->lock, &until);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* ---- families ---- */

static void close_main(void *p)
{
    struct colo_nfamily *f = p;
    cudaSetDevice(f->device);
    cudaDeviceSynchronize();
    for (struct colo_link *l = f->link, *next; l; l = next) {
        next = l->next;
        if (l->nccl && !l->borrowed && atomic_load(&l->phase) == COLO_LINK_OK)
            (void)f->lib->destroy(l->nccl);
        pthread_mutex_destroy(&l->busy);
        free(l->world);
        free(l);
    }
    for (int32_t i = 0; i < f->nold; i++)
        cudaFree(f->old[i]);
    cudaFree(f->stage);
    cudaFree(f->word);
    if (f->done)
        cudaEventDestroy(f->done);
    (void)cudaGetLastError();
    free(f->from);
    free(f->to);
    pthread_cond_destroy(&f->wake);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

/* Nobody uses it any more. What does not end by the deadline is left alone. */
static void family_destroy(struct colo_nfamily *f, bool guarded)
{
    double seconds = (double)f->timeout_ms * 1e-3;
    if (guarded) {
        pthread_mutex_lock(&f->lock);
        f->stop = true;
        pthread_cond_signal(&f->wake);
        pthread_mutex_unlock(&f->lock);
        pthread_join(f->guard, NULL); /* bounded: tear() is */
    }
    (void)run_for(seconds, close_main, f);
}

static colo_status_t family_create(struct colo_nfamily **out, int32_t device)
{
    const colo_nccl_lib_t *lib = NULL;
    int now = 0, count = 0;
    COLO_TRY(colo_nccl_find(&lib));
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess)
        e = cudaGetDevice(&now);
    if (e != cudaSuccess)
        return colo_cuda_error("nccl create", e);
    device = device < 0 ? now : device;
    if (device >= count)
        return colo_fail(COLO_ERR_ARG, "nccl create: device %d, %d devices are visible",
                         (int)device, count);
    struct colo_nfamily *f = calloc(1, sizeof *f);
    if (!f)
        return colo_fail(COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *f);
    f->lib = lib;
    f->device = device;
    f->timeout_ms = 1000;
    pthread_mutex_init(&f->lock, NULL);
    cond_init(&f->wake);
    if (device != now)
        e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&f->word, sizeof *f->word);
    if (e == cudaSuccess)
        e = cudaMemset(f->word, 0, sizeof *f->word);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&f->done, cudaEventDisableTiming);
    if (device != now)
        cudaSetDevice(now);
    colo_status_t st = e == cudaSuccess ? COLO_OK : colo_cuda_error("nccl create", e);
    if (st == COLO_OK && pthread_create(&f->guard, NULL, guard_main, f) != 0)
        st = colo_fail(COLO_ERR_NOMEM, "nccl create: no thread to guard the links");
    if (st < 0) {
        close_main(f);
        return st;
    }
    *out = f;
    return COLO_OK;
}

/* ---- links ---- */

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
static colo_status_t link_connect(struct colo_nfamily *f, colo_comm_t *control,
                                  ncclComm_t borrowed, const ncclUniqueId *id,
                                  struct colo_link *l)
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
    if (!run_for((double)control->timeout_ms * 1e-3, connect_main, t))
        return colo_fail(COLO_ERR_TIMEOUT,
                         "nccl create: NCCL did not connect %d ranks within %lld ms (rank %d, "
                         "world rank %lld, device %d)",
                         (int)control->size, (long long)control->timeout_ms, (int)control->rank,
                         (long long)control->world_rank[control->rank], (int)f->device);
    colo_status_t st =
        t->why[0] ? colo_fail(COLO_ERR_NCCL, "nccl create on rank %d, device %d: %s",
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
static colo_status_t link_get(struct colo_nfamily *f, colo_comm_t *control, ncclComm_t borrowed,
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
    COLO_TRY_GOTO(st,
                  colo_comm_i_all_gather(control, COLO_OWNER_CHECK, words, all, ROUND_WORDS,
                                         COLO_I64, NULL),
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
        tear(f, fresh);
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

/* ---- comms ---- */

/* Takes @control when it succeeds. */
static colo_status_t attach(colo_comm_t *c, struct colo_nfamily *f, struct colo_link *l,
                            colo_comm_t *control)
{
    struct colo_nctx *x = calloc(1, sizeof *x);
    if (!x)
        return colo_fail(COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *x);
    colo_fate_init(&x->fate);
    x->family = f;
    x->link = l;
    x->rank = c->rank;
    x->control = control;
    c->impl = x;
    c->control = control;
    pthread_mutex_lock(&f->lock);
    f->timeout_ms = c->timeout_ms > f->timeout_ms ? c->timeout_ms : f->timeout_ms;
    x->next = f->ctx;
    f->ctx = x;
    f->live++;
    pthread_mutex_unlock(&f->lock);
    return COLO_OK;
}

colo_status_t colo_nccl_subset(colo_comm_t *parent, const int32_t *members, int32_t n, uint64_t tag,
                               colo_comm_t *child)
{
    struct colo_nfamily *f = ((struct colo_nctx *)parent->impl)->family;
    colo_comm_t *control = NULL;
    struct colo_link *l = NULL;
    parent->control->timeout_ms = parent->timeout_ms;
    COLO_TRY(colo_comm_i_child(parent->control, members, n, tag, "control", &control));
    colo_status_t st = link_get(f, control, NULL, &l);
    if (st == COLO_OK)
        st = attach(child, f, l, control);
    if (st < 0)
        colo_comm_destroy(&control);
    return st;
}

void colo_nccl_destroy(colo_comm_t *c)
{
    struct colo_nctx *x = c->impl;
    struct colo_nfamily *f = x->family;
    char sentence[900];
    bool dead = colo_nccl_state(c, sentence, sizeof sentence) != COLO_OK;
    pthread_mutex_lock(&f->lock);
    struct colo_nctx **at = &f->ctx;
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    bool last = --f->live == 0;
    f->timeout_ms = c->timeout_ms > f->timeout_ms ? c->timeout_ms : f->timeout_ms;
    pthread_mutex_unlock(&f->lock);
    if (dead)
        tear(f, x->link);
    if (last)
        family_destroy(f, true);
    colo_comm_destroy(&x->control);
    colo_fate_fini(&x->fate);
    free(x);
    c->impl = NULL;
}

static colo_status_t check_borrowed(const struct colo_nfamily *f, ncclComm_t nccl,
                                    const colo_comm_t *control)
{
    int rank = -1, size = -1, device = -1;
    ncclResult_t r = f->lib->user_rank(nccl, &rank);
    if (r == ncclSuccess)
        r = f->lib->count(nccl, &size);
    if (r == ncclSuccess)
        r = f->lib->device(nccl, &device);
    if (r != ncclSuccess)
        return colo_nccl_error(f->lib, "from_nccl", r);
    if (rank != control->rank || size != control->size)
        return colo_fail(COLO_ERR_ARG,
                         "from_nccl: the ncclComm_t is rank %d of %d, the parent is rank %d of %d",
                         rank, size, (int)control->rank, (int)control->size);
    if (device != f->device)
        return colo_fail(COLO_ERR_ARG,
                         "from_nccl: the ncclComm_t is on device %d, the current device is %d",
                         device, (int)f->device);
    return COLO_OK;
}

static colo_status_t create(colo_comm_t *control, struct ncclComm *borrowed, int32_t device,
                            colo_comm_t **comm)
{
    struct colo_nfamily *f = NULL;
    struct colo_link *l = NULL;
    colo_comm_t *c = NULL;
    colo_status_t st = family_create(&f, device);
    if (st == COLO_OK && borrowed)
        st = check_borrowed(f, borrowed, control);
    if (st == COLO_OK)
        st = colo_comm_i_new(&c, &colo_comm_nccl_ops, control->rank, control->size,
                             control->world_rank);
    COLO_TRY_GOTO(st, colo_comm_i_agree(control, "nccl create", 1, st), fail);
    c->timeout_ms = control->timeout_ms;
    COLO_TRY_GOTO(st, link_get(f, control, borrowed, &l), fail);
    COLO_TRY_GOTO(st, attach(c, f, l, control), fail);
    *comm = c;
    return COLO_OK;
fail:
    if (f)
        family_destroy(f, true);
    colo_comm_destroy(&c);
    colo_comm_destroy(&control);
    return st;
}

/* ---- device memory ---- */

static colo_status_t gpu_alloc(size_t bytes, void **p)
{
    cudaError_t e = cudaMalloc(p, bytes);
    if (e == cudaSuccess)
        return COLO_OK;
    (void)cudaGetLastError();
    return colo_fail(COLO_ERR_NOMEM, "%zu bytes of device memory: %s", bytes,
                     cudaGetErrorString(e));
}

static void gpu_free(void *p)
{
    if (p && cudaFree(p) != cudaSuccess)
        (void)cudaGetLastError();
}

static colo_status_t gpu_zero(void *p, size_t bytes, colo_stream_t stream)
{
    cudaError_t e = bytes ? cudaMemsetAsync(p, 0, bytes, stream) : cudaSuccess;
    return e == cudaSuccess ? COLO_OK : colo_cuda_error("zeros", e);
}

static const colo_gpu_t gpu = {
    .abi = COLO_GPU_ABI,
    .bind = colo_nccl_bind,
    .comm_create = create,
    .alloc = gpu_alloc,
    .free = gpu_free,
    .zero = gpu_zero,
};

__attribute__((visibility("default"))) extern const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    .abi = COLO_BACKEND_ABI,
    .version = COLO_VERSION_MAJOR << 16 | COLO_VERSION_MINOR << 8 | COLO_VERSION_PATCH,
    .name = "nccl",
    .comm = &colo_comm_nccl_ops,
    .gpu = &gpu,
};
