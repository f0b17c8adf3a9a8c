/* SPDX-License-Identifier: Apache-2.0 */
/* state.c - devices, errors, and the faults that a test asks for. See fake.h. */
#include "fake.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct device {
    _Atomic int64_t calls, countdown;
    const char *_Atomic fail_name, *_Atomic delay_name;
    _Atomic double delay;
    _Atomic int broken, async_error;
} devices[FAKE_MOST];
static const char *_Atomic failed;
static _Atomic int64_t live[FAKE_KINDS], misuse;
static _Thread_local int current;
static _Thread_local cudaError_t last;

/* ---- what tests say and ask ---- */

int64_t fake_calls(int device)
{
    return devices[device].calls;
}

void fake_fail(int device, int64_t k)
{
    failed = NULL;
    devices[device].countdown = k;
}

void fake_fail_name(int device, const char *name)
{
    failed = NULL;
    devices[device].fail_name = name;
}

const char *fake_failed(void)
{
    return failed;
}

void fake_delay(int device, const char *name, double seconds)
{
    devices[device].delay = seconds;
    devices[device].delay_name = name;
}

void fake_break_device(int device, cudaError_t e)
{
    devices[device].broken = (int)e;
}

bool fake_is_broken(int device)
{
    return devices[device].broken != cudaSuccess;
}

void fake_async_error(int device, ncclResult_t e)
{
    devices[device].async_error = (int)e;
}

ncclResult_t fake_async_error_of(int device)
{
    return (ncclResult_t)devices[device].async_error;
}

int64_t fake_live(enum fake_kind kind)
{
    return live[kind];
}

void fake_count(enum fake_kind kind, int64_t by)
{
    live[kind] += by;
}

int64_t fake_misuse(void)
{
    return misuse;
}

void fake_misused(const char *how)
{
    fprintf(stderr, "fake: %s\n", how);
    misuse++;
}

/* ---- calls ---- */

static bool is_next(const char *_Atomic *name, const char *call)
{
    const char *wanted = *name;
    return wanted && strcmp(wanted, call) == 0 &&
           atomic_compare_exchange_strong(name, &wanted, NULL);
}

static bool must_fail(struct device *d, const char *name)
{
    int64_t left = d->countdown;
    while (left > 0 && !atomic_compare_exchange_weak(&d->countdown, &left, left - 1))
        ;
    return left == 1 || is_next(&d->fail_name, name);
}

cudaError_t fake_enter(int device, const char *name)
{
    struct device *d = &devices[device];
    d->calls++;
    if (is_next(&d->delay_name, name)) {
        const double s = d->delay;
        struct timespec t = {(time_t)s, (long)((s - (double)(time_t)s) * 1e9)};
        nanosleep(&t, NULL);
    }
    if (d->broken != cudaSuccess)
        return fake_error((cudaError_t)d->broken);
    if (!must_fail(d, name))
        return cudaSuccess;
    failed = name;
    return fake_error(strstr(name, "Alloc") || strstr(name, "Malloc") ? cudaErrorMemoryAllocation
                                                                      : cudaErrorUnknown);
}

cudaError_t fake_error(cudaError_t e)
{
    if (e != cudaSuccess)
        last = e;
    return e;
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t e = last;
    last = (cudaError_t)devices[current].broken;
    return e != cudaSuccess ? e : last;
}

const char *cudaGetErrorName(cudaError_t e)
{
    return e == cudaSuccess ? "cudaSuccess" : "cudaErrorOfTheFake";
}

const char *cudaGetErrorString(cudaError_t e)
{
    static const struct {
        cudaError_t e;
        const char *text;
    } texts[] = {
        {cudaSuccess, "no error"},
        {cudaErrorInvalidValue, "invalid argument"},
        {cudaErrorMemoryAllocation, "out of memory"},
        {cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"},
        {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
        {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
        {cudaErrorUnknown, "unknown error"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (texts[i].e == e)
            return texts[i].text;
    return "an error of the fake";
}

/* ---- devices ---- */

int fake_device(void)
{
    return current;
}

static int count(void)
{
    const char *text = getenv("FAKE_DEVICES");
    const int n = text ? atoi(text) : 8;
    return n < FAKE_MOST ? n : FAKE_MOST;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    FAKE_ENTER();
    *n = count();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    FAKE_ENTER();
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= count())
        return fake_error(cudaErrorInvalidDevice);
    FAKE_TRY(fake_enter(device, __func__));
    current = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    FAKE_ENTER();
    FAKE_TRY(fake_outside_captures());
    fake_wait_device(current);
    return fake_error((cudaError_t)devices[current].broken);
}

static _Atomic int lost = -1;
static _Atomic bool lost_silently;

void fake_lose_device(int device, bool silent)
{
    lost = device;
    lost_silently = silent;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    FAKE_ENTER();
    *can = lost_silently || (device != lost && peer != lost);
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    FAKE_ENTER();
    if (flags != 0 || peer == current)
        return fake_error(cudaErrorInvalidValue);
    if (peer == lost || current == lost)
        return fake_error(cudaErrorPeerAccessUnsupported);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int cap, int device)
{
    const char *shown = getenv("CUDA_VISIBLE_DEVICES");
    FAKE_ENTER();
    snprintf(id, (size_t)cap, "0000:%02x:00.0", device + 1 + (shown ? atoi(shown) : 0));
    return cudaSuccess;
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id)
{
    unsigned bus = 0;
    FAKE_ENTER();
    if (sscanf(id, "0000:%x:", &bus) != 1 || bus < 1 || (int)bus > count())
        return fake_error(cudaErrorInvalidValue);
    *device = (int)bus - 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    FAKE_ENTER();
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
