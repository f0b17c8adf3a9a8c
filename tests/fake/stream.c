/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.c - streams and captures. See fake.h.
 *
 * A stream is a list of operations and a thread that runs one after the other. A capture is a list,
 * too: what is enqueued on its streams, in the order of the calls, and a launch runs the list on
 * one stream. The default stream does not wait for others.
 */
#include "fake.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HANG_SECONDS = 5 };

struct operation {
    struct operation *next;
    void (*fn)(void *arg);
    void (*end)(void *arg);
    max_align_t arg[];
};

struct CUgraph_st {          /* of a capture; then of a graph and the ones made ready from it */
    struct CUgraph_st *next; /* captures that are active */
    _Atomic int32_t refs;
    uint64_t id;
    bool broken;
    enum cudaStreamCaptureMode mode;
    struct operation *first, **last;
};

struct CUstream_st {
    struct CUstream_st *next; /* all streams */
    pthread_cond_t changed;
    int device;
    int32_t refs;
    bool closing;
    int64_t put, done;
    int64_t awaited; /* the least of done that a thread waits for; INT64_MAX: none does */
    struct operation *first, **last;
    struct CUgraph_st *capture;
    int64_t operations, followed; /* in it; of these, what other streams wait for */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all streams and captures */
static struct CUstream_st *all, *of_device[FAKE_MOST];
static struct CUgraph_st *captures;
static uint64_t capture_ids;
static _Atomic int32_t global_captures;
static _Atomic int64_t ended; /* operations of all streams */
static _Thread_local int32_t local_captures;
static _Thread_local enum cudaStreamCaptureMode mode; /* of the thread */

/* ---- streams ---- */

static void stream_put(struct CUstream_st *s)
{
    pthread_mutex_lock(&lock);
    const bool last = --s->refs == 0;
    if (last) {
        struct CUstream_st **link = &all;
        while (*link != s)
            link = &(*link)->next;
        *link = s->next;
    }
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    pthread_cond_destroy(&s->changed);
    free(s);
}

static void operation_free(struct operation *o)
{
    if (o->end)
        o->end(o->arg);
    free(o);
}

static void *stream_main(void *p)
{
    struct CUstream_st *s = p;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->first && !s->closing)
            pthread_cond_wait(&s->changed, &lock);
        struct operation *o = s->first;
        if (!o)
            break;
        s->first = o->next;
        if (!s->first)
            s->last = &s->first;
        pthread_mutex_unlock(&lock);
        if (!fake_is_broken(s->device))
            o->fn(o->arg);
        operation_free(o);
        pthread_mutex_lock(&lock);
        s->done++;
        ended++;
        if (s->done < s->awaited)
            continue;
        s->awaited = INT64_MAX; /* who waits for more says so again */
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&lock);
    stream_put(s);
    return NULL;
}

static cudaError_t stream_new(struct CUstream_st **out, int device)
{
    pthread_t thread;
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (!s)
        return cudaErrorMemoryAllocation;
    s->device = device;
    s->refs = 2;
    s->awaited = INT64_MAX;
    s->last = &s->first;
    pthread_cond_init(&s->changed, NULL);
    pthread_mutex_lock(&lock);
    s->next = all;
    all = s;
    pthread_mutex_unlock(&lock);
    if (pthread_create(&thread, NULL, stream_main, s) != 0) {
        stream_put(s);
        stream_put(s);
        return fake_error(cudaErrorMemoryAllocation);
    }
    pthread_detach(thread);
    *out = s;
    return cudaSuccess;
}

static void stream_close(struct CUstream_st *s)
{
    pthread_mutex_lock(&lock);
    s->closing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&lock);
    stream_put(s);
}

static pthread_key_t per_thread;
static pthread_once_t per_thread_once = PTHREAD_ONCE_INIT;

static void per_thread_close(void *p)
{
    struct CUstream_st **own = p;
    for (int i = 0; i < FAKE_MOST; i++)
        if (own[i])
            stream_close(own[i]);
    free(own);
}

static void per_thread_key(void)
{
    pthread_key_create(&per_thread, per_thread_close);
}

/* The stream that a handle means. */
static struct CUstream_st *stream_of(cudaStream_t handle)
{
    const int device = fake_device();
    struct CUstream_st **own = of_device;
    if (handle && handle != cudaStreamPerThread)
        return handle;
    if (handle) {
        pthread_once(&per_thread_once, per_thread_key);
        own = pthread_getspecific(per_thread);
        if (!own) {
            own = calloc(FAKE_MOST, sizeof(struct CUstream_st *));
            pthread_setspecific(per_thread, own);
        }
    }
    static pthread_mutex_t made = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&made);
    if (!own[device] && stream_new(&own[device], device) != cudaSuccess)
        abort();
    struct CUstream_st *s = own[device];
    pthread_mutex_unlock(&made);
    return s;
}

/* Under the lock. */
static void await_done(struct CUstream_st *s, int64_t done)
{
    s->awaited = done < s->awaited ? done : s->awaited;
}

/* A call of the library that would wait for ever is a verdict, not a hang: no operation ends. */
static void stream_wait(struct CUstream_st *s)
{
    struct timespec until;
    pthread_mutex_lock(&lock);
    bool hangs = false;
    for (const int64_t put = s->put; s->done < put && !hangs;) {
        const int64_t before = ended;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += HANG_SECONDS;
        await_done(s, put);
        hangs = pthread_cond_timedwait(&s->changed, &lock, &until) == ETIMEDOUT && ended == before;
    }
    pthread_mutex_unlock(&lock);
    if (hangs)
        fake_misused("a call waits for a stream that does not end");
}

void fake_wait_device(int device)
{
    struct CUstream_st *list[256];
    int n = 0;
    pthread_mutex_lock(&lock);
    for (struct CUstream_st *s = all; s && n < 256; s = s->next)
        if (s->device == device) {
            s->refs++;
            list[n++] = s;
        }
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < n; i++) {
        stream_wait(list[i]);
        stream_put(list[i]);
    }
}

cudaError_t fake_enqueue(cudaStream_t stream, void (*fn)(void *), void (*end)(void *),
                         const void *arg, size_t bytes)
{
    struct CUstream_st *s = stream_of(stream);
    struct operation *o = malloc(sizeof *o + bytes);
    if (!o)
        return fake_error(cudaErrorMemoryAllocation);
    *o = (struct operation){.fn = fn, .end = end};
    memcpy(o->arg, arg, bytes);
    pthread_mutex_lock(&lock);
    struct operation ***last = s->capture ? &s->capture->last : &s->last;
    const bool idle = !s->capture && !s->first;
    **last = o;
    *last = &o->next;
    ++*(s->capture ? &s->operations : &s->put);
    if (idle)
        pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t create(cudaStream_t *stream, const char *call)
{
    FAKE_TRY(fake_enter(fake_device(), call));
    FAKE_TRY(stream_new(stream, fake_device()));
    fake_count(FAKE_STREAM, 1);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    return create(stream, __func__);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return create(stream, __func__);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    fake_count(FAKE_STREAM, -1);
    stream_close(stream);
    return e;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    FAKE_ENTER();
    *device = stream_of(stream)->device;
    return cudaSuccess;
}

/* A stream that is capturing cannot be waited for; the attempt ends the capture. */
static cudaError_t not_capturing(struct CUstream_st *s)
{
    pthread_mutex_lock(&lock);
    const bool capturing = s->capture != NULL;
    if (capturing)
        s->capture->broken = true;
    pthread_mutex_unlock(&lock);
    return fake_error(capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    FAKE_ENTER();
    FAKE_TRY(not_capturing(s));
    stream_wait(s);
    return fake_error(fake_is_broken(s->device) ? cudaErrorIllegalAddress : cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    FAKE_ENTER();
    FAKE_TRY(not_capturing(stream_of(stream)));
    return fake_pending(stream) == 0 ? cudaSuccess : cudaErrorNotReady;
}

int64_t fake_pending(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&lock);
    const int64_t n = s->put - s->done;
    pthread_mutex_unlock(&lock);
    return n;
}

struct host_function {
    cudaHostFn_t fn;
    void *arg;
};

static void host_function(void *p)
{
    const struct host_function *h = p;
    h->fn(h->arg);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *arg)
{
    FAKE_ENTER();
    return fake_enqueue(stream, host_function, NULL, &(struct host_function){fn, arg},
                        sizeof(struct host_function));
}

/* ---- captures and graphs ---- */

struct fake_place fake_place_of(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&lock);
    const struct fake_place place = {s, s->capture ? s->capture->id : 0,
                                     s->capture ? s->operations : s->put};
    s->refs++;
    pthread_mutex_unlock(&lock);
    return place;
}

struct fake_place fake_place_again(const struct fake_place *place)
{
    pthread_mutex_lock(&lock);
    if (place->stream)
        place->stream->refs++;
    pthread_mutex_unlock(&lock);
    return *place;
}

void fake_place_end(struct fake_place *place)
{
    if (place->stream)
        stream_put(place->stream);
    *place = (struct fake_place){.stream = NULL};
}

/* Under the lock. */
static bool is_reached(const struct fake_place *place)
{
    return !place->stream || place->capture || place->stream->done >= place->operations;
}

bool fake_is_reached(const struct fake_place *place, bool waits)
{
    pthread_mutex_lock(&lock);
    while (waits && !is_reached(place)) {
        await_done(place->stream, place->operations);
        pthread_cond_wait(&place->stream->changed, &lock);
    }
    const bool reached = is_reached(place);
    pthread_mutex_unlock(&lock);
    return reached;
}

static void await_run(void *arg)
{
    (void)fake_is_reached(arg, true);
}

static void await_end(void *arg)
{
    fake_place_end(arg);
}

/* Under the lock: @s joins the capture that @place is in. */
static cudaError_t join_capture(struct CUstream_st *s, const struct fake_place *place)
{
    struct CUgraph_st *g = captures;
    while (g && g->id != place->capture)
        g = g->next;
    const bool other = s->capture && s->capture != g;
    if (other)
        s->capture->broken = true;
    else if (g)
        s->capture = g;
    if (g && place->stream != s && place->stream->followed < place->operations)
        place->stream->followed = place->operations;
    return !g || other ? cudaErrorStreamCaptureIsolation : cudaSuccess;
}

cudaError_t fake_follow(cudaStream_t stream, struct fake_place place)
{
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&lock);
    const bool captured = place.capture || s->capture;
    const cudaError_t e = captured ? join_capture(s, &place) : cudaSuccess;
    pthread_mutex_unlock(&lock);
    if (place.stream && !captured)
        return fake_enqueue(stream, await_run, await_end, &place, sizeof place);
    fake_place_end(&place);
    return fake_error(e);
}

cudaError_t fake_outside_captures(void)
{
    const bool inside =
        mode != cudaStreamCaptureModeRelaxed &&
        (local_captures > 0 || (mode == cudaStreamCaptureModeGlobal && global_captures > 0));
    if (!inside)
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    for (struct CUgraph_st *g = captures; g; g = g->next) /* as CUDA does, whose call fails, too */
        g->broken = g->broken || g->mode == cudaStreamCaptureModeGlobal;
    pthread_mutex_unlock(&lock);
    return fake_error(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *with)
{
    const enum cudaStreamCaptureMode old = mode;
    mode = *with;
    *with = old;
    return cudaSuccess;
}

static void graph_put(struct CUgraph_st *g)
{
    if (--g->refs > 0)
        return;
    for (struct operation *o = g->first, *next; o; o = next) {
        next = o->next;
        operation_free(o);
    }
    free(g);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode how)
{
    FAKE_ENTER();
    if (!stream)
        return fake_error(cudaErrorStreamCaptureUnsupported);
    struct CUstream_st *s = stream_of(stream);
    struct CUgraph_st *g = calloc(1, sizeof *g);
    g->refs = 1;
    g->mode = how;
    g->last = &g->first;
    pthread_mutex_lock(&lock);
    g->id = ++capture_ids;
    g->next = captures;
    captures = g;
    s->capture = g;
    pthread_mutex_unlock(&lock);
    local_captures += how != cudaStreamCaptureModeRelaxed;
    global_captures += how == cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    struct CUstream_st *s = stream_of(stream);
    FAKE_ENTER();
    pthread_mutex_lock(&lock);
    *status = !s->capture          ? cudaStreamCaptureStatusNone
              : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *n)
{
    FAKE_ENTER();
    struct fake_place place = fake_place_of(stream);
    *id = place.capture;
    fake_place_end(&place);
    *status = *id ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct CUstream_st *origin = stream_of(stream);
    const cudaError_t e = fake_enter(fake_device(), __func__);
    pthread_mutex_lock(&lock);
    struct CUgraph_st *g = origin->capture;
    bool joined = true;
    for (struct CUstream_st *s = all; g && s; s = s->next)
        if (s->capture == g) {
            joined = joined && (s == origin || s->followed == s->operations);
            s->capture = NULL;
            s->operations = s->followed = 0;
        }
    for (struct CUgraph_st **link = &captures; g && *link; link = &(*link)->next)
        if (*link == g) {
            *link = g->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    *graph = NULL;
    if (!g)
        return fake_error(cudaErrorInvalidValue);
    local_captures -= g->mode != cudaStreamCaptureModeRelaxed;
    global_captures -= g->mode == cudaStreamCaptureModeGlobal;
    if (e != cudaSuccess || g->broken || !joined) {
        graph_put(g);
        return fake_error(e != cudaSuccess ? e
                          : joined         ? cudaErrorStreamCaptureInvalidated
                                           : cudaErrorStreamCaptureUnjoined);
    }
    fake_count(FAKE_GRAPH, 1);
    *graph = g;
    return cudaSuccess;
}

/* A node is an operation. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    size_t i = 0;
    FAKE_ENTER();
    for (struct operation *o = graph->first; o; o = o->next, i++)
        if (nodes && i < *n)
            nodes[i] = (cudaGraphNode_t)(void *)o;
    *n = i;
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    const struct operation *o = (const void *)node;
    struct cudaMemcpy3DParms p;
    FAKE_ENTER();
    *type = fake_copy_of(o->fn, o->arg, &p) ? cudaGraphNodeTypeMemcpy : cudaGraphNodeTypeKernel;
    return cudaSuccess;
}

cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, struct cudaMemcpy3DParms *p)
{
    const struct operation *o = (const void *)node;
    FAKE_ENTER();
    return fake_error(fake_copy_of(o->fn, o->arg, p) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    fake_count(FAKE_GRAPH, -1);
    graph_put(graph);
    return e;
}

/* What is made ready from a graph is a reference to it. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    FAKE_ENTER();
    graph->refs++;
    fake_count(FAKE_GRAPH, 1);
    *exec = (cudaGraphExec_t)(void *)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    FAKE_ENTER();
    return cudaSuccess;
}

static void replay(void *arg)
{
    const struct CUgraph_st *g = *(struct CUgraph_st **)arg;
    for (struct operation *o = g->first; o; o = o->next)
        o->fn(o->arg);
}

static void replay_end(void *arg)
{
    graph_put(*(struct CUgraph_st **)arg);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    FAKE_ENTER();
    struct CUgraph_st *g = (void *)exec;
    g->refs++;
    return fake_enqueue(stream, replay, replay_end, &g, sizeof g);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    fake_count(FAKE_GRAPH, -1);
    graph_put((void *)exec);
    return e;
}
