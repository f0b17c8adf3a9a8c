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
    bool always; /* also on a broken device */
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

struct CUgraphExec_st {
    struct CUgraph_st *graph; /* a reference */
};

struct CUstream_st {
    struct CUstream_st *next; /* all streams */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int device;
    int32_t refs;      /* under all_lock */
    bool closing, own; /* own: the fake made it, and does not count it */
    int64_t put, done;
    struct operation *first, **last;
    struct CUgraph_st *capture;   /* under capture_lock, as what follows */
    int64_t operations, followed; /* in it; of these, what other streams wait for */
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER,
                       capture_lock = PTHREAD_MUTEX_INITIALIZER;
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
    pthread_mutex_lock(&all_lock);
    const bool last = --s->refs == 0;
    if (last) {
        struct CUstream_st **link = &all;
        while (*link != s)
            link = &(*link)->next;
        *link = s->next;
    }
    pthread_mutex_unlock(&all_lock);
    if (!last)
        return;
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
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
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->closing)
            pthread_cond_wait(&s->changed, &s->lock);
        struct operation *o = s->first;
        if (!o)
            break;
        s->first = o->next;
        if (!s->first)
            s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        if (o->always || !fake_is_broken(s->device))
            o->fn(o->arg);
        operation_free(o);
        pthread_mutex_lock(&s->lock);
        s->done++;
        ended++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    stream_put(s);
    return NULL;
}

static cudaError_t stream_new(struct CUstream_st **out, int device, bool own)
{
    pthread_t thread;
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (!s)
        return cudaErrorMemoryAllocation;
    s->device = device;
    s->own = own;
    s->refs = 2;
    s->last = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    pthread_mutex_lock(&all_lock);
    s->next = all;
    all = s;
    pthread_mutex_unlock(&all_lock);
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
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
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
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!own[device] && stream_new(&own[device], device, true) != cudaSuccess)
        abort();
    struct CUstream_st *s = own[device];
    pthread_mutex_unlock(&lock);
    return s;
}

/* A call of the library that would wait for ever is a verdict, not a hang: no operation ends. */
static void stream_wait(struct CUstream_st *s)
{
    struct timespec until;
    pthread_mutex_lock(&s->lock);
    bool hangs = false;
    for (const int64_t put = s->put; s->done < put && !hangs;) {
        const int64_t before = ended;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += HANG_SECONDS;
        hangs =
            pthread_cond_timedwait(&s->changed, &s->lock, &until) == ETIMEDOUT && ended == before;
    }
    pthread_mutex_unlock(&s->lock);
    if (hangs)
        fake_misused("a call waits for a stream that does not end");
}

void fake_wait_device(int device)
{
    struct CUstream_st *list[256];
    int n = 0;
    pthread_mutex_lock(&all_lock);
    for (struct CUstream_st *s = all; s && n < 256; s = s->next)
        if (s->device == device && s->refs > 0) {
            s->refs++;
            list[n++] = s;
        }
    pthread_mutex_unlock(&all_lock);
    for (int i = 0; i < n; i++) {
        stream_wait(list[i]);
        stream_put(list[i]);
    }
}

static cudaError_t enqueue(cudaStream_t stream, struct operation *o)
{
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&capture_lock);
    struct CUgraph_st *g = s->capture;
    if (g) {
        *g->last = o;
        g->last = &o->next;
        s->operations++;
    }
    pthread_mutex_unlock(&capture_lock);
    if (g)
        return cudaSuccess;
    pthread_mutex_lock(&s->lock);
    *s->last = o;
    s->last = &o->next;
    s->put++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return cudaSuccess;
}

cudaError_t fake_put(cudaStream_t stream, void (*fn)(void *), void (*end)(void *), const void *arg,
                     size_t bytes, bool always)
{
    struct operation *o = malloc(sizeof *o + bytes);
    if (!o)
        return fake_error(cudaErrorMemoryAllocation);
    *o = (struct operation){.fn = fn, .end = end, .always = always};
    memcpy(o->arg, arg, bytes);
    return enqueue(stream, o);
}

cudaError_t fake_enqueue(cudaStream_t stream, void (*fn)(void *), void (*end)(void *),
                         const void *arg, size_t bytes)
{
    return fake_put(stream, fn, end, arg, bytes, false);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    FAKE_ENTER();
    FAKE_TRY(stream_new(stream, fake_device(), false));
    fake_count(FAKE_STREAM, 1);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    FAKE_ENTER();
    FAKE_TRY(stream_new(stream, fake_device(), false));
    fake_count(FAKE_STREAM, 1);
    return cudaSuccess;
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
    pthread_mutex_lock(&capture_lock);
    const bool capturing = s->capture != NULL;
    if (capturing)
        s->capture->broken = true;
    pthread_mutex_unlock(&capture_lock);
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
    struct CUstream_st *s = stream_of(stream);
    FAKE_ENTER();
    FAKE_TRY(not_capturing(s));
    pthread_mutex_lock(&s->lock);
    const bool empty = s->done == s->put;
    pthread_mutex_unlock(&s->lock);
    return empty ? cudaSuccess : cudaErrorNotReady;
}

int64_t fake_pending(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&s->lock);
    const int64_t n = s->put - s->done;
    pthread_mutex_unlock(&s->lock);
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

struct fake_captured fake_capture_of(cudaStream_t stream)
{
    const struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&capture_lock);
    const struct fake_captured c = {s->capture ? s->capture->id : 0, s, s->operations};
    pthread_mutex_unlock(&capture_lock);
    return c;
}

cudaError_t fake_join_capture(cudaStream_t stream, const struct fake_captured *event)
{
    struct CUstream_st *s = stream_of(stream);
    pthread_mutex_lock(&all_lock);
    pthread_mutex_lock(&capture_lock);
    struct CUgraph_st *g = captures;
    while (g && g->id != event->id)
        g = g->next;
    const bool other = s->capture && s->capture != g;
    if (other)
        s->capture->broken = true;
    else if (g)
        s->capture = g;
    for (struct CUstream_st *from = all; g && from; from = from->next)
        if (from == event->stream && from != s && from->followed < event->operations)
            from->followed = event->operations;
    pthread_mutex_unlock(&capture_lock);
    pthread_mutex_unlock(&all_lock);
    return fake_error(!g || other ? cudaErrorStreamCaptureIsolation : cudaSuccess);
}

cudaError_t fake_outside_captures(void)
{
    const bool inside =
        mode != cudaStreamCaptureModeRelaxed &&
        (local_captures > 0 || (mode == cudaStreamCaptureModeGlobal && global_captures > 0));
    if (!inside)
        return cudaSuccess;
    pthread_mutex_lock(&capture_lock);
    for (struct CUgraph_st *g = captures; g; g = g->next) /* as CUDA does, whose call fails, too */
        g->broken = g->broken || g->mode == cudaStreamCaptureModeGlobal;
    pthread_mutex_unlock(&capture_lock);
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
    struct CUgraph_st *g = calloc(1, sizeof *g);
    g->refs = 1;
    g->mode = how;
    g->last = &g->first;
    pthread_mutex_lock(&capture_lock);
    g->id = ++capture_ids;
    g->next = captures;
    captures = g;
    stream_of(stream)->capture = g;
    pthread_mutex_unlock(&capture_lock);
    local_captures += how != cudaStreamCaptureModeRelaxed;
    global_captures += how == cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    struct CUstream_st *s = stream_of(stream);
    FAKE_ENTER();
    pthread_mutex_lock(&capture_lock);
    *status = !s->capture          ? cudaStreamCaptureStatusNone
              : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
    pthread_mutex_unlock(&capture_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *n)
{
    FAKE_ENTER();
    *id = fake_capture_of(stream).id;
    *status = *id ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    struct CUstream_st *origin = stream_of(stream);
    const cudaError_t e = fake_enter(fake_device(), __func__);
    pthread_mutex_lock(&all_lock);
    pthread_mutex_lock(&capture_lock);
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
    pthread_mutex_unlock(&capture_lock);
    pthread_mutex_unlock(&all_lock);
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

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    FAKE_ENTER();
    struct CUgraphExec_st *x = calloc(1, sizeof *x);
    x->graph = graph;
    graph->refs++;
    fake_count(FAKE_GRAPH, 1);
    *exec = x;
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
    exec->graph->refs++;
    return fake_enqueue(stream, replay, replay_end, &exec->graph, sizeof exec->graph);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    const cudaError_t e = fake_enter(fake_device(), __func__);
    fake_count(FAKE_GRAPH, -1);
    graph_put(exec->graph);
    free(exec);
    return e;
}
