/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport-mpi.c - libcolobridge-mpi.so: the transport over MPI. The only file that includes
 * mpi.h.
 *
 * Borrows a communicator and duplicates it once (MPI_Comm_idup, tested under the deadline), so that
 * no message here can meet one of the program. Frames are MPI_Isend on the duplicate with one tag;
 * which group and operation they belong to is in the frame, so tags and their upper bound play no
 * role. A ring of posted receives takes whatever comes; they are completed in the order they were
 * posted, which is the order of arrival for each sender. No call here waits inside MPI.
 *
 * Buffers given to MPI are this file's own and live until their request is complete: a call of the
 * library may time out and return while MPI is still at it.
 *
 * MPI is never initialised or finalised here. After MPI_Finalize the transport says that it is
 * unusable. The duplicate is freed when every peer has said goodbye; otherwise it stays: MPI would
 * reuse its number while frames of the old one are still on their way.
 */
#include <colobridge/mpi.h>

#include "core/backend.h"
#include "comm/process/transport.h"

#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TAG = 1, RING = 8, LARGE_MAX = 16, SMALL = COLO_FRAME_EAGER + 1024 };

struct out {
    struct out *next;
    MPI_Request request;
    int32_t peer;
    bool large;
    size_t bytes;
    _Alignas(64) unsigned char frame[];
};

struct in {
    MPI_Request request;
    unsigned char *frame; /* [COLO_FRAME_MAX] */
};

struct transport {
    MPI_Comm comm; /* the duplicate; owned */
    int32_t size;
    struct in in[RING];
    int oldest; /* the receive that was posted first */
    bool held; /* its frame has been handed out and not been posted again */
    struct out *in_flight, *small, *large; /* the last two: free ones */
    struct out *reserved;
    int nlarge;
    int32_t *pending; /* [size] sends under way */
    bool broken;      /* a frame was lost: what comes behind it would be taken for it */
    char why[400];
};

static bool usable(struct transport *w)
{
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized)
        snprintf(w->why, sizeof w->why,
                 "MPI has been finalized while communicators made from it are in use; destroy them "
                 "before MPI_Finalize()");
    return !finalized;
}

static void mpi_text(int error, char *text)
{
    int n = 0;
    text[0] = '\0';
    MPI_Error_string(error, text, &n);
}

/* ---- frames ---- */

static void lose(struct transport *w, const char *call, int error)
{
    char text[MPI_MAX_ERROR_STRING];
    mpi_text(error, text);
    snprintf(w->why, sizeof w->why, "%s: %.300s", call, text);
    w->broken = true;
}

static void complete_sends(struct transport *w)
{
    for (struct out **link = &w->in_flight, *o; (o = *link);) {
        int done = 0, e = MPI_Test(&o->request, &done, MPI_STATUS_IGNORE);
        if (e != MPI_SUCCESS)
            lose(w, "MPI_Test of a send", e);
        if (e != MPI_SUCCESS || done) {
            struct out **list = o->large ? &w->large : &w->small;
            *link = o->next;
            w->pending[o->peer]--;
            o->next = *list;
            *list = o;
        } else {
            link = &o->next;
        }
    }
}

static struct out *new_out(struct transport *w, bool large)
{
    const size_t enough = large ? COLO_FRAME_MAX : SMALL;
    struct out *o = aligned_alloc(64, (sizeof *o + enough + 63) / 64 * 64);
    if (o) {
        o->large = large;
        w->nlarge += large;
    }
    return o;
}

static bool mpi_full(void *transport, int32_t peer)
{
    const struct transport *w = transport;
    return !w->large && w->nlarge >= LARGE_MAX;
}

static void *mpi_reserve(void *transport, int32_t peer, size_t bytes)
{
    struct transport *w = transport;
    const bool large = bytes > SMALL;
    struct out **list = large ? &w->large : &w->small, *o = *list;
    if (!o) {
        o = new_out(w, large);
        if (!o)
            return NULL;
    } else {
        *list = o->next;
    }
    o->peer = peer;
    o->bytes = bytes;
    w->reserved = o;
    return o->frame;
}

static void mpi_commit(void *transport)
{
    struct transport *w = transport;
    struct out *o = w->reserved, **link = &w->in_flight;
    w->reserved = NULL;
    int e = MPI_SUCCESS;
    const bool can = usable(w) && !w->broken;
    if (can)
        e = MPI_Isend(o->frame, (int)o->bytes, MPI_BYTE, (int)o->peer, TAG, w->comm, &o->request);
    if (e != MPI_SUCCESS)
        lose(w, "MPI_Isend", e);
    if (!can || e != MPI_SUCCESS) {
        struct out **list = o->large ? &w->large : &w->small;
        o->next = *list;
        *list = o;
        return;
    }
    w->pending[o->peer]++;
    while (*link)
        link = &(*link)->next;
    o->next = NULL;
    *link = o;
}

static bool post(struct transport *w, struct in *in)
{
    int e = MPI_Irecv(in->frame, (int)COLO_FRAME_MAX, MPI_BYTE, MPI_ANY_SOURCE, TAG, w->comm,
                      &in->request);
    if (e == MPI_SUCCESS)
        return true;
    char text[MPI_MAX_ERROR_STRING];
    mpi_text(e, text);
    snprintf(w->why, sizeof w->why, "MPI_Irecv: %.300s", text);
    return false;
}

static int mpi_recv(void *transport, int32_t *peer, const void **frame, size_t *bytes)
{
    struct transport *w = transport;
    if (!usable(w) || w->broken)
        return -2;
    if (w->held) {
        w->held = false;
        if (!post(w, &w->in[w->oldest]))
            return -2;
        w->oldest = (w->oldest + 1) % RING;
    }
    complete_sends(w);
    struct in *in = &w->in[w->oldest];
    MPI_Status status;
    int done = 0, n = 0, e = MPI_Test(&in->request, &done, &status);
    if (e != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING];
        mpi_text(e, text);
        snprintf(w->why, sizeof w->why, "MPI_Test: %.300s", text);
        return -2;
    }
    if (!done)
        return 0;
    MPI_Get_count(&status, MPI_BYTE, &n);
    w->held = true;
    *peer = status.MPI_SOURCE;
    *frame = in->frame;
    *bytes = (size_t)n;
    return 1;
}

static const char *mpi_why(void *transport)
{
    return ((struct transport *)transport)->why;
}

static bool mpi_flushed(void *transport, int32_t peer)
{
    return ((struct transport *)transport)->pending[peer] == 0;
}

/* MPI cannot be waited for with a deadline; a short sleep lets others on this core run. */
static void mpi_wait(void *transport, double seconds)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)(seconds * 1e9)}, NULL);
}

/* ---- taking down ---- */

static void free_outs(struct out *o)
{
    for (struct out *next; o; o = next) {
        next = o->next;
        free(o);
    }
}

static void mpi_close(void *transport, bool clean)
{
    struct transport *w = transport;
    const bool alive = usable(w);
    if (alive)
        complete_sends(w);
    for (int i = 0; i < RING; i++) {
        struct in *in = &w->in[i];
        int done = !in->frame || in->request == MPI_REQUEST_NULL;
        if (!done && alive) {
            MPI_Cancel(&in->request);
            double begin = colo_now();
            while (!done && colo_now() - begin < 1.0)
                if (MPI_Test(&in->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
                    break;
        }
        if (done || !alive) /* else MPI may still write there: the memory is given up */
            free(in->frame);
    }
    if (alive && w->in_flight)
        clean = false; /* these buffers as well */
    else if (w->in_flight)
        free_outs(w->in_flight);
    free_outs(w->small);
    free_outs(w->large);
    if (alive && clean && w->comm != MPI_COMM_NULL)
        MPI_Comm_free(&w->comm);
    free(w->pending);
    free(w);
}

/* ---- setting up ---- */

#define REFUSE(out, status, ...)                             \
    do {                                                     \
        snprintf((out)->why, sizeof(out)->why, __VA_ARGS__); \
        return (status);                                     \
    } while (0)

static colo_status_t vet(const void *handle, size_t bytes, MPI_Comm *comm,
                         colo_transport_open_t *out)
{
    const colo_mpi_handle_t *h = handle;
    int initialized = 0, finalized = 0, inter = 0;
    /* no member has a default; a longer handle asks for something that is not known here */
    if (!h || bytes != sizeof *h || h->struct_size != sizeof *h)
        REFUSE(
            out, COLO_ERR_ARG,
            "create_mpi: the handle has %zu bytes, expected %zu; call colo_comm_create_mpi() of the "
            "<colobridge/mpi.h> that belongs to this libcolobridge-mpi.so",
            bytes, sizeof *h);
    if (!h->flavor || strcmp(h->flavor, COLO_MPI_FLAVOR) != 0 || h->comm_size != sizeof *comm)
        REFUSE(out, COLO_ERR_UNBUILT,
               "create_mpi: the program was compiled with %.40s (MPI_Comm of %zu bytes), "
               "libcolobridge-mpi.so with %s (%zu bytes); build both with the same MPI",
               h->flavor ? h->flavor : "an unknown MPI", h->comm_size, COLO_MPI_FLAVOR,
               sizeof *comm);
    MPI_Finalized(&finalized);
    if (finalized)
        REFUSE(out, COLO_ERR_STATE,
               "create_mpi: MPI has been finalized; make communicators between "
               "MPI_Init() and MPI_Finalize()");
    MPI_Initialized(&initialized);
    if (!initialized)
        REFUSE(out, COLO_ERR_STATE,
               "create_mpi: MPI is not initialised; call MPI_Init() or MPI_Init_thread() first");
    memcpy(comm, h->comm, sizeof *comm);
    if (*comm == MPI_COMM_NULL)
        REFUSE(out, COLO_ERR_ARG, "create_mpi: the communicator is MPI_COMM_NULL");
    MPI_Comm_test_inter(*comm, &inter);
    if (inter)
        REFUSE(out, COLO_ERR_ARG,
               "create_mpi: the communicator is an inter-communicator; merge it "
               "with MPI_Intercomm_merge() first");
    return COLO_OK;
}

/* Waits for @request of the MPI function @what, which returned @e. */
static colo_status_t complete(int e, const char *what, MPI_Request *request, double begin,
                              int64_t timeout_ms, colo_transport_open_t *out)
{
    char text[MPI_MAX_ERROR_STRING];
    for (int done = 0; e == MPI_SUCCESS && !done;) {
        for (int k = 0; k < 8 && e == MPI_SUCCESS && !done; k++) /* it takes many steps */
            e = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        double waited = colo_now() - begin;
        if (done || e != MPI_SUCCESS)
            break;
        if (waited * 1e3 > (double)timeout_ms)
            REFUSE(out, COLO_ERR_TIMEOUT,
                   "create_mpi: world rank %d of %d: not all ranks of the communicator made the same "
                   "call within %lld ms",
                   (int)out->rank, (int)out->size, (long long)timeout_ms);
        if (waited < 2e-3)
            sched_yield();
        else
            mpi_wait(NULL, waited < 0.1 ? 50e-6 : 1e-3);
    }
    if (e == MPI_SUCCESS)
        return COLO_OK;
    mpi_text(e, text);
    REFUSE(out, COLO_ERR_MPI, "create_mpi: %s: %.300s", what, text);
}

/* Collective: the communicator for the transport, if no rank lacks memory (@enough false). A rank
 * that does not come leaves the duplication pending, which MPI cannot undo. */
static colo_status_t duplicate(MPI_Comm comm, bool enough, MPI_Comm *dup, int64_t timeout_ms,
                               colo_transport_open_t *out)
{
    MPI_Request request;
    const double begin = colo_now();
    struct {
        MPI_Comm comm;
        int mine[2], least[2];        /* enough, rank */
    } *there = malloc(sizeof *there); /* MPI writes it whenever it completes */
    if (!there)
        REFUSE(out, COLO_ERR_NOMEM, "create_mpi: no memory");
    COLO_TRY(complete(MPI_Comm_idup(comm, &there->comm, &request), "MPI_Comm_idup", &request, begin,
                      timeout_ms, out));
    MPI_Comm_set_errhandler(there->comm, MPI_ERRORS_RETURN);
    there->mine[0] = enough;
    there->mine[1] = out->rank;
    COLO_TRY(complete(
        MPI_Iallreduce(there->mine, there->least, 1, MPI_2INT, MPI_MINLOC, there->comm, &request),
        "MPI_Iallreduce", &request, begin, timeout_ms, out));
    const int culprit = there->least[0] ? -1 : there->least[1];
    if (culprit < 0)
        *dup = there->comm;
    else
        MPI_Comm_free(&there->comm);
    free(there);
    if (culprit >= 0)
        REFUSE(out, enough ? COLO_ERR_PEER : COLO_ERR_NOMEM,
               "create_mpi: world rank %d has no memory for %d ranks",
               enough ? culprit : (int)out->rank, (int)out->size);
    return COLO_OK;
}

static colo_status_t mpi_open(const void *handle, size_t bytes, int64_t timeout_ms,
                              colo_transport_open_t *out)
{
    MPI_Comm comm = MPI_COMM_NULL, dup;
    int rank = 0, size = 0, level = MPI_THREAD_SINGLE;
    colo_status_t st = vet(handle, bytes, &comm, out);
    if (st != COLO_OK)
        return st;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    MPI_Query_thread(&level);
    out->rank = rank;
    out->size = size;
    out->any_thread = level == MPI_THREAD_MULTIPLE;

    struct transport *w = calloc(1, sizeof *w);
    bool enough = w != NULL;
    if (w) {
        w->comm = MPI_COMM_NULL;
        w->size = size;
        w->pending = calloc((size_t)size, sizeof *w->pending);
        enough = w->pending != NULL;
        for (int i = 0; i < RING; i++) {
            w->in[i].request = MPI_REQUEST_NULL;
            w->in[i].frame = aligned_alloc(64, (COLO_FRAME_MAX + 63) / 64 * 64);
            enough = enough && w->in[i].frame;
        }
        for (int r = 0; r < size && enough; r++) { /* an error can be told when no memory is left */
            struct out *o = new_out(w, false);
            enough = o != NULL;
            if (o) {
                o->next = w->small;
                w->small = o;
            }
        }
    }
    st = duplicate(comm, enough, &dup, timeout_ms, out);
    if (st == COLO_OK)
        w->comm = dup;
    for (int i = 0; i < RING && st == COLO_OK; i++)
        if (!post(w, &w->in[i])) {
            snprintf(out->why, sizeof out->why, "create_mpi: %s", w->why);
            st = COLO_ERR_MPI;
        }
    if (st < 0) {
        if (w)
            mpi_close(w, false);
        return st;
    }
    out->transport = w;
    return COLO_OK;
}

static const colo_transport_ops_t mpi_transport = {
    .abi = COLO_TRANSPORT_ABI,
    .name = "mpi",
    .open = mpi_open,
    .full = mpi_full,
    .reserve = mpi_reserve,
    .commit = mpi_commit,
    .recv = mpi_recv,
    .why = mpi_why,
    .flushed = mpi_flushed,
    .wait = mpi_wait,
    .close = mpi_close,
};

extern COLO_API const colo_backend_t colo_backend;
const colo_backend_t colo_backend = {
    COLO_BACKEND_INIT("mpi"),
    .transport = &mpi_transport,
};
