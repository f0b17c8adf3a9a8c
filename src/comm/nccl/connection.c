/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connection.c - one ncclComm_t for each list of ranks: made once, found again.
 *
 * Comms and subconnections of a context share the connection of their ranks. The last to leave does
 * not end it: connecting costs a good part of a second, and bridges come and go. A few unused
 * connections are kept, the oldest beyond that ends in a thread of its own. Ranks need not agree on
 * what to keep: a connection is found again only when all of its ranks still have it.
 *
 * Everything that is not data goes over a host communicator of the same ranks: the unique id,
 * agreement, which rank failed. So a missing rank is found before any rank enters NCCL, where it
 * could not be found.
 */
#include "comm/nccl/comm.h"

#include "capture.h"
#include "comm/wait.h"
#include "core/hash.h"
#include "core/error.h"
#include "core/host.h"
#include "core/list.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IDLE_CONNECTIONS = 4 }; /* kept without a user */

/* ---- first operations ---- */

struct first_operation { /* of a helper thread: what may wait without limit */
    struct colo_abandon abandon;
    const colo_nccl_lib_t *lib;
    int32_t device, rank, n;
    ncclUniqueId id;
    bool borrowed;
    ncclComm_t nccl; /* out, unless it is borrowed or of one rank */
    void *memory;
    size_t memory_bytes;
    char why[400]; /* out: "", or an error message */
};

static void first_main(void *memory)
{
    struct first_operation *task = memory;
    (void)colo_capture_relax(); /* somebody may be capturing */
    cudaError_t device = cudaSetDevice(task->device);
    if (task->n > 1 && !task->borrowed) {
        ncclResult_t error = task->lib->init_rank(&task->nccl, task->n, task->id, task->rank);
        if (error != ncclSuccess) {
            const char *more = task->lib->last_error(NULL);
            snprintf(task->why, sizeof task->why, "%s; %.300s", task->lib->error_string(error),
                     more ? more : "");
            task->nccl = NULL;
            return;
        }
    }
    const char *why = device != cudaSuccess
                          ? cudaGetErrorString(device)
                          : colo_nccl_warm(task->lib, task->nccl, task->rank, task->n, task->memory,
                                           task->memory_bytes, &task->abandon);
    if (why)
        snprintf(task->why, sizeof task->why, "%s%.350s", task->nccl ? "first operations: " : "",
                 why);
}

/* Operations of other ranks' threads may have been enqueued that this rank will never come to:
 * until the abort, the device would be busy, and whatever waits for it would hang. */
static void first_abandoned(void *memory)
{
    struct first_operation *task = memory;
    if (task->nccl && !task->borrowed)
        (void)task->lib->abort(task->nccl);
    cudaFree(task->memory);
    free(task);
}

/* Is this rank to wait no longer for the others of @control? */
static bool ends_early(const void *of)
{
    colo_comm_t *control = (colo_comm_t *)of;
    char why[200];
    if (!colo_nccl_is_dead(control) && colo_interrupted(INFINITY)) {
        snprintf(why, sizeof why, "rank %d of '%s' was interrupted while NCCL connected",
                 (int)control->rank, control->name);
        control->backend->fail(control, COLO_ERR_ABORTED, why);
    }
    return colo_nccl_is_dead(control);
}

/* COLO_ERR_TIMEOUT: the memory is the helper's from now on. @control: NULL, or whose death ends the
 * wait. */
static colo_status_t run_first(struct first_operation *task,
                               const struct colo_nccl_context *context, const colo_comm_t *control,
                               int64_t timeout_ms)
{
    struct first_operation *copy = malloc(sizeof *copy);
    COLO_FAIL_IF(!copy, COLO_ERR_NOMEM, "nccl create: %zu bytes", sizeof *copy);
    task->abandon.end = first_abandoned;
    task->lib = context->lib;
    task->device = context->device;
    *copy = *task;
    colo_status_t st = colo_run_for((double)timeout_ms * 1e-3, control ? ends_early : NULL, control,
                                    first_main, &copy->abandon, copy);
    if (st == COLO_ERR_TIMEOUT)
        return st;
    *task = *copy;
    free(copy);
    return st;
}

colo_status_t colo_nccl_load(struct colo_nccl_context *context, int64_t timeout_ms)
{
    struct first_operation task = {
        .n = 1, .memory = context->counts, .memory_bytes = COLO_COUNTS * sizeof *context->counts};
    const colo_status_t st = run_first(&task, context, NULL, timeout_ms);
    if (st == COLO_ERR_TIMEOUT) {
        context->counts = NULL; /* the helper's */
        return colo_fail(st, "nccl create: device %d did not run a first kernel within %lld ms",
                         (int)context->device, (long long)timeout_ms);
    }
    COLO_FAIL_IF(task.why[0], COLO_ERR_CUDA, "nccl create: first kernels on device %d: %s",
                 (int)context->device, task.why);
    return st;
}

/* Connects the ranks of @control; all or none succeed. */
static colo_status_t link_connect(struct colo_nccl_context *context, colo_comm_t *control,
                                  ncclComm_t borrowed, const ncclUniqueId *id,
                                  struct colo_connection *connection)
{
    cudaError_t error = context->memory
                            ? cudaSuccess
                            : cudaMalloc((void **)&context->memory, context->memory_bytes);
    COLO_TRY(colo_cuda_error("nccl create", error));
    struct first_operation task = {.rank = control->rank,
                                   .n = control->size,
                                   .id = *id,
                                   .borrowed = borrowed != NULL,
                                   .nccl = borrowed,
                                   .memory = context->memory,
                                   .memory_bytes = context->memory_bytes};
    char why[900];
    const int64_t timeout_ms = colo_comm_timeout(control);
    const colo_status_t st = run_first(&task, context, control, timeout_ms);
    if (st == COLO_ERR_TIMEOUT) {
        context->memory = NULL; /* the helper's */
        colo_status_t dead = control->backend->state(control, why, sizeof why);
        COLO_FAIL_IF(dead < 0, dead, "nccl create: %s", why);
        return colo_fail(COLO_ERR_TIMEOUT,
                         "nccl create: NCCL did not connect %d ranks within %lld ms (rank %d, "
                         "world rank %lld, device %d)",
                         (int)control->size, (long long)timeout_ms, (int)control->rank,
                         (long long)control->world_rank[control->rank], (int)context->device);
    }
    connection->nccl = task.nccl;
    COLO_FAIL_IF(task.why[0], COLO_ERR_NCCL, "nccl create on rank %d, device %d: %s",
                 (int)control->rank, (int)context->device, task.why);
    return st;
}

/* ---- one rank per device ---- */

struct seat {
    uint64_t host, device, shares; /* shares: NCCL is told that ranks may sit on one device */
};
enum { SEAT_WORDS = sizeof(struct seat) / sizeof(uint64_t) };

/* NCCL's own variable; it reads it when it connects, as a number. */
static bool may_share(const struct colo_nccl_context *context)
{
    const char *text = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return text && strtol(text, NULL, 0) != 0 && context->lib->version >= NCCL_VERSION(2, 30, 0);
}

static colo_status_t same_device(const struct colo_nccl_context *context,
                                 const colo_comm_t *control, int32_t x, int32_t y)
{
    const int v = context->lib->version;
    return colo_fail(COLO_ERR_MISMATCH,
                     "nccl create: ranks %d and %d (world ranks %lld and %lld) are on the same "
                     "device; one rank per device is expected (NCCL 2.30 or later lets ranks share "
                     "one where NCCL_MULTI_RANK_GPU_ENABLE=1 is set for all of them; this is "
                     "%d.%d.%d)",
                     (int)x, (int)y, (long long)control->world_rank[x],
                     (long long)control->world_rank[y], v / 10000, v / 100 % 100, v % 100);
}

colo_status_t colo_nccl_apart(struct colo_nccl_context *context, colo_comm_t *control)
{
    char bus[32] = "";
    struct seat mine = {.host = colo_host_machine(), .shares = may_share(context)};
    COLO_AUTOFREE struct seat *all = calloc((size_t)control->size, sizeof mine);
    colo_status_t st =
        all ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "nccl create: %d ranks", (int)control->size);
    COLO_THEN(st, colo_cuda_error("nccl create",
                                  cudaDeviceGetPCIBusId(bus, sizeof bus, context->device)));
    mine.device = colo_hash_str(COLO_HASH_INIT, bus);
    st = colo_comm_agree(control, "nccl create", (uint64_t)context->lib->version, st);
    COLO_THEN(st, colo_comm_all_gather_for(control, COLO_CATEGORY_CHECK, &mine, all, SEAT_WORDS,
                                           COLO_I64, NULL));
    for (int32_t x = 0; st == COLO_OK && x < control->size; x++)
        for (int32_t y = x + 1; st == COLO_OK && y < control->size; y++)
            if (all[x].host == all[y].host && all[x].device == all[y].device) {
                context->shared = true;
                if (!(all[x].shares && all[y].shares))
                    st = same_device(context, control, x, y);
            }
    return st;
}

/* ---- connections that are there ---- */

void colo_nccl_connection_free(struct colo_connection *connection)
{
    pthread_mutex_destroy(&connection->busy);
    free(connection->world);
    free(connection);
}

struct leave {
    struct colo_nccl_context *f;
    struct colo_connection *l;
};

static void leave_main(void *memory)
{
    struct leave *task = memory;
    struct colo_nccl_context *context = task->f;
    (void)colo_capture_relax(); /* somebody may be capturing */
    cudaSetDevice(context->device);
    (void)context->lib->destroy(task->l->nccl);
    colo_nccl_connection_free(task->l);
    free(task);
    COLO_HOLD(&context->lock);
    context->leaving--;
    pthread_cond_broadcast(&context->wake);
}

/* The unused connection to end now, if there are too many of them; out of the list. */
static struct colo_connection *oldest_beyond(struct colo_nccl_context *context, int32_t most)
{
    struct colo_connection *oldest = NULL;
    int32_t idle = 0;
    for (struct colo_connection *connection = context->connection; connection;
         connection = connection->next)
        if (connection->users == 0) {
            idle++;
            oldest = !oldest || connection->idle_at < oldest->idle_at ? connection : oldest;
        }
    if (idle <= most)
        return NULL;
    COLO_UNLINK(context->connection, oldest);
    return oldest;
}

void colo_nccl_connection_put(struct colo_nccl_context *context, struct colo_connection *connection)
{
    struct colo_connection *end = NULL;
    if (!connection)
        return;
    pthread_mutex_lock(&context->lock);
    if (--connection->users == 0) {
        connection->idle_at = ++context->idle_count;
        if (!connection->nccl || connection->borrowed ||
            atomic_load(&connection->phase) != COLO_CONNECTION_OK) {
            COLO_UNLINK(context->connection, connection);
            colo_nccl_connection_free(connection);
        } else {
            /* ending one frees memory, which waits for a device that others may use meanwhile */
            end = oldest_beyond(context, context->shared ? INT32_MAX : IDLE_CONNECTIONS);
        }
    }
    context->leaving += end != NULL;
    pthread_mutex_unlock(&context->lock);
    if (!end)
        return;
    /* its ranks may end it at different times, and ncclCommDestroy() may wait for them */
    struct leave *task = malloc(sizeof *task);
    if (task)
        *task = (struct leave){context, end};
    if (!task || !colo_run_apart(leave_main, task)) {
        free(task); /* the ncclComm_t stays until the process ends */
        COLO_HOLD(&context->lock);
        context->leaving--;
    }
}

/* With a reference. */
static struct colo_connection *find_connection(struct colo_nccl_context *context,
                                               const colo_comm_t *control)
{
    COLO_HOLD(&context->lock);
    struct colo_connection *connection = context->connection;
    while (connection && (connection->n != control->size ||
                          atomic_load(&connection->phase) != COLO_CONNECTION_OK ||
                          memcmp(connection->world, control->world_rank,
                                 sizeof *connection->world * (size_t)connection->n) != 0))
        connection = connection->next;
    if (connection)
        connection->users++;
    return connection;
}

/* ---- making one ---- */

static colo_status_t link_new(const colo_comm_t *control, struct colo_connection **out)
{
    size_t n = (size_t)control->size;
    struct colo_connection *connection = calloc(1, sizeof *connection);
    int64_t *world = malloc(sizeof *world * n);
    if (!connection || !world) {
        free(connection);
        free(world);
        return colo_fail(COLO_ERR_NOMEM, "nccl create: connection of %zu ranks", n);
    }
    memcpy(world, control->world_rank, sizeof *world * n);
    connection->world = world;
    connection->n = control->size;
    connection->users = 1;
    pthread_mutex_init(&connection->busy, NULL);
    *out = connection;
    return COLO_OK;
}

/* The first rank makes an id, all get it. */
static colo_status_t share_id(struct colo_nccl_context *context, colo_comm_t *control,
                              ncclUniqueId *id)
{
    colo_status_t st = COLO_OK;
    memset(id, 0, sizeof *id);
    if (control->rank == 0) {
        ncclResult_t error = context->lib->get_unique_id(id);
        if (error != ncclSuccess)
            st = colo_nccl_error(context->lib, "nccl create: unique id", error);
    }
    COLO_TRY(colo_comm_agree(control, "nccl create (unique id)", 0, st));
    return colo_comm_broadcast(control, id, sizeof *id, COLO_U8, 0, NULL);
}

/* Does every rank of @control have @mine? */
static colo_status_t all_have(colo_comm_t *control, bool mine, bool *all_of_them)
{
    uint64_t word = mine;
    COLO_AUTOFREE uint64_t *all = calloc((size_t)control->size, sizeof *all);
    colo_status_t st =
        all ? COLO_OK : colo_fail(COLO_ERR_NOMEM, "nccl create: %d ranks", (int)control->size);
    if (st < 0) /* the others wait for this rank */
        control->backend->fail(control, st, colo_last_error());
    COLO_THEN(
        st, colo_comm_all_gather_for(control, COLO_CATEGORY_CHECK, &word, all, 1, COLO_I64, NULL));
    *all_of_them = true;
    for (int32_t r = 0; st == COLO_OK && r < control->size; r++)
        *all_of_them = *all_of_them && all[r];
    return st;
}

colo_status_t colo_nccl_connection_get(struct colo_nccl_context *context, colo_comm_t *control,
                                       ncclComm_t borrowed, struct colo_connection **out)
{
    COLO_CAPTURE_RELAXED;
    struct colo_connection *fresh = NULL;
    ncclUniqueId id;
    bool cached = false;
    struct colo_connection *connection = borrowed ? NULL : find_connection(context, control);
    colo_status_t st = link_new(control, &fresh);
    COLO_TRY_GOTO(st, colo_comm_agree(control, "nccl create", 0, st), fail);
    COLO_TRY_GOTO(st, all_have(control, connection != NULL, &cached), fail);
    if (cached) {
        colo_nccl_connection_free(fresh);
        *out = connection;
        return COLO_OK;
    }
    memset(&id, 0, sizeof id);
    if (control->size > 1 && !borrowed)
        COLO_TRY_GOTO(st, share_id(context, control, &id), fail);
    if (control->size > 1 || borrowed)
        st = link_connect(context, control, borrowed, &id, fresh);
    if (st < 0) /* the others wait in NCCL for this rank */
        control->backend->fail(control, st, colo_last_error());
    fresh->borrowed = borrowed != NULL;
    st = colo_comm_agree(control, "nccl create (connect)", 0, st);
    if (st < 0) {
        colo_nccl_abort_connection(context, fresh);
        goto fail;
    }
    colo_nccl_connection_put(context, connection);
    pthread_mutex_lock(&context->lock);
    fresh->next = context->connection;
    context->connection = fresh;
    pthread_mutex_unlock(&context->lock);
    *out = fresh;
    return COLO_OK;
fail:
    colo_nccl_connection_put(context, connection);
    if (fresh)
        colo_nccl_connection_free(fresh);
    return st;
}
