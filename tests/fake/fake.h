/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake.h - a stand-in for the CUDA runtime and NCCL on processors: what tests tell it and ask it.
 *
 * Device memory is host memory, a stream is a queue with a thread that runs it, a kernel is a C
 * function that such a thread calls (kernels.c, peer.c). An ncclComm_t joins ranks that are threads
 * of one process. There are 8 devices, FAKE_DEVICES overrides that, and all reach each other's
 * memory.
 *
 * A call counts for the device that is current in its thread, or for the device of its ncclComm_t.
 * cudaThreadExchangeStreamCaptureMode(), what names errors, and ncclCommGetAsyncError(), which a
 * watchdog polls, do not count.
 */
#ifndef TESTS_FAKE_FAKE_H
#define TESTS_FAKE_FAKE_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>
#include <nccl.h>

/* ---- faults ---- */

/* Counted calls of @device so far. */
int64_t fake_calls(int device);
/* The @k-th counted call of @device from now (from 1) fails once, 0: none. A call that frees or
 * ends something does so and returns the error; any other has done nothing. */
void fake_fail(int device, int64_t k);
/* The next call of the function @name on @device fails once. */
void fake_fail_name(int device, const char *name);
/* The call that failed since the last fake_fail(), NULL: none has. */
const char *fake_failed(void);
/* The next call of @name on @device takes @seconds longer. */
void fake_delay(int device, const char *name, double seconds);
/* @device has a sticky error, as after a kernel's fault: each of its calls returns it, nothing that
 * is enqueued runs. cudaSuccess: it has none any more. */
void fake_break_device(int device, cudaError_t e);
/* The @k-th count of @device's operations from now (from 1) is taken and not written before
 * fake_release_count(): that of another stream may overtake it. */
void fake_hold_count(int device, int k);
bool fake_holds_count(void);
void fake_release_count(void);
/* What ncclCommGetAsyncError() reports of @device's communicators. */
void fake_async_error(int device, ncclResult_t e);
/* No device reaches @device's memory, nor it theirs; -1: all do. @silent: it shows when access is
 * enabled, and not when it is asked for. */
void fake_lose_device(int device, bool silent);
/* Memory is made with the words @first, @first + 1 and so on in it, 0: with what means nothing. */
void fake_leave_words(uint64_t first);
/* The allocation @p is freed and made again at its address, of @bytes, no more than it had. */
void fake_remake(void *p, size_t bytes);
/* ncclCommInitRank() ends where it waits for ranks that do not come, as when their process ends. */
void fake_end_inits(void);

/* ---- what is there ---- */

enum fake_kind {
    FAKE_MEMORY,
    FAKE_PINNED,
    FAKE_OPENED, /* by other processes */
    FAKE_STREAM,
    FAKE_EVENT,
    FAKE_GRAPH,
    FAKE_COMM,
    FAKE_GROUP, /* that a thread has begun */
    FAKE_KINDS
};
int64_t fake_live(enum fake_kind kind);
/* What the stream has been given and has not done. */
int64_t fake_pending(cudaStream_t stream);
/* Collectives and messages that did not match, and memory that was copied beyond its end. */
int64_t fake_misuse(void);

/* ---- between the sources of the fake ---- */

/* Runs @fn on a copy of @bytes of @arg when the stream's turn comes; in a capture, in every replay.
 * @end, unless NULL: runs once when the copy is not needed any more. */
cudaError_t fake_enqueue(cudaStream_t stream, void (*fn)(void *arg), void (*end)(void *arg),
                         const void *arg, size_t bytes);
/* Is it an operation that copies? Then @p has its extent. */
bool fake_copy_of(void (*fn)(void *arg), const void *arg, struct cudaMemcpy3DParms *p);
/* Behind so many operations of a stream, or of what it has in a capture. */
struct fake_place {
    struct CUstream_st *stream; /* a reference; NULL: no place, and reached */
    uint64_t capture;           /* 0: in none */
    int64_t operations;
};
/* The place where the stream is, and another reference to a place. The caller ends each of them. */
struct fake_place fake_place_of(cudaStream_t stream);
struct fake_place fake_place_again(const struct fake_place *place);
void fake_place_end(struct fake_place *place);
bool fake_is_reached(const struct fake_place *place, bool waits);
/* @stream waits for the place, or joins its capture; takes it. */
cudaError_t fake_follow(cudaStream_t stream, struct fake_place place);
/* cudaSuccess, or what the call named @name has to return. */
cudaError_t fake_enter(int device, const char *name);
#define FAKE_ENTER() FAKE_TRY(fake_enter(fake_device(), __func__))
#define FAKE_TRY(expr)           \
    do {                         \
        cudaError_t e_ = (expr); \
        if (e_ != cudaSuccess)   \
            return e_;           \
    } while (0)
cudaError_t fake_error(cudaError_t e); /* returns it, and cudaGetLastError() returns it next */
/* May this thread do what a capture forbids, in its mode? */
cudaError_t fake_outside_captures(void);
bool fake_is_memory(const void *p);
bool fake_is_whole(const void *p, size_t bytes); /* else it counts as misuse */
void fake_wait_device(int device);               /* until its streams are empty */
enum { FAKE_MOST = 16 };                         /* devices */
int fake_device(void);
ncclResult_t fake_async_error_of(int device);
bool fake_is_broken(int device);
void fake_count(enum fake_kind kind, int64_t by);
void fake_misused(const char *how);

#endif
