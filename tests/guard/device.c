/* SPDX-License-Identifier: Apache-2.0 */
/*
 * device.c - the host's table of a device, which records each call on boxes; and one of a "GPU",
 * which is the host with a second stream, so that what a GPU does while messages move is recorded,
 * too.
 *
 * The linker sends colo_device_for() here (--wrap).
 */
#include "record.h"

#include <string.h>

static colo_device_t host, recording, gpu;
static char second; /* the stream of the library's own */

/* Memory begins the same on each run: what reads it too early is seen. */
static colo_status_t alloc(size_t bytes, void **p)
{
    const colo_status_t st = host.alloc(bytes, p);
    if (st == COLO_OK) {
        memset(*p, 0xCD, bytes);
        memory_is(*p, bytes, "work", false);
    }
    return st;
}

static void release(void *p)
{
    memory_forget(p);
    host.free(p);
}

static int number(colo_stream_t stream)
{
    return stream != NULL;
}

static colo_status_t copy(const colo_box_t *dst, const colo_box_t *src, size_t elem,
                          colo_stream_t stream)
{
    say(BOXES, "copy %s = %s, %zu bytes, stream %d", box_name(dst).text, box_name(src).text, elem,
        number(stream));
    return host.box_copy(dst, src, elem, stream);
}

static void say_pairs(const char *name, const colo_box_t *dst, const colo_box_t *src, int64_t n,
                      int64_t what, colo_stream_t stream)
{
    say(BOXES, "%s of %ld, %ld, stream %d", name, n, what, number(stream));
    for (int64_t i = 0; i < n; i++)
        say(BOXES, "  %s = %s", box_name(&dst[i]).text, box_name(&src[i]).text);
}

static colo_status_t list(const colo_box_t *dst, const colo_box_t *src, int64_t n, size_t elem,
                          colo_stream_t stream)
{
    say_pairs("list", dst, src, n, (int64_t)elem, stream);
    return host.box_list(dst, src, n, elem, stream);
}

static colo_status_t narrow(const colo_box_t *dst, const colo_box_t *src, int64_t n, size_t elem,
                            colo_stream_t stream)
{
    say_pairs("narrow list", dst, src, n, (int64_t)elem, stream);
    return host.box_list_narrow(dst, src, n, elem, stream);
}

static colo_status_t shift(const colo_box_t *dst, const colo_box_t *src, int64_t n, int64_t last,
                           colo_stream_t stream)
{
    say_pairs("shift", dst, src, n, last, stream);
    return host.box_shift(dst, src, n, last, stream);
}

static colo_status_t sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                         colo_dtype_t dtype, colo_stream_t stream)
{
    say(BOXES, "sum %s, %d addends, %s, stream %d", box_name(dst).text, n, colo_dtype_name(dtype),
        number(stream));
    for (int32_t i = 0; i < n; i++)
        say(BOXES, "  + %s", box_name(&src[i]).text);
    return host.box_sum(dst, src, n, dtype, stream);
}

static colo_status_t sums(const colo_mixed_sum_t *s, int32_t n, colo_stream_t stream)
{
    say(BOXES, "%d sums, stream %d", n, number(stream));
    for (int32_t i = 0; i < n; i++) {
        say(BOXES, "  %s %s", box_name(&s[i].to).text, colo_dtype_name(s[i].dtype));
        for (int32_t k = 0; k < s[i].n; k++)
            say(BOXES, "    + %s %s", box_name(&s[i].from[k]).text,
                colo_dtype_name(s[i].from_dtype[k]));
    }
    return host.box_sums(s, n, stream);
}

static colo_status_t hash(const colo_box_t *box, size_t elem, uint64_t *h, colo_stream_t stream)
{
    say(BOXES, "hash %s, %zu bytes, stream %d", box_name(box).text, elem, number(stream));
    return host.box_hash(box, elem, h, stream);
}

static colo_status_t nonzero(const colo_box_t *box, colo_dtype_t dtype, int64_t *first,
                             colo_stream_t stream)
{
    say(BOXES, "nonzero %s, %s, stream %d", box_name(box).text, colo_dtype_name(dtype),
        number(stream));
    return host.box_nonzero(box, dtype, first, stream);
}

static colo_status_t zero(void *p, size_t bytes, colo_stream_t stream)
{
    say(BOXES, "zero %s, %zu bytes, stream %d", place_name(p).text, bytes, number(stream));
    return host.zero(p, bytes, stream);
}

static colo_status_t stream_create(int32_t events, void **s)
{
    *s = &second;
    return COLO_OK;
}

static colo_stream_t stream_of(void *s)
{
    return (colo_stream_t)s;
}

static colo_status_t stream_follow(void *s, int32_t event, colo_stream_t from, bool *follows)
{
    *follows = true;
    return COLO_OK;
}

__typeof__(colo_device_for) __real_colo_device_for, __wrap_colo_device_for;
colo_status_t __wrap_colo_device_for(colo_mem_t mem, const colo_device_t **device)
{
    *device = mem == COLO_MEM_HOST ? &recording : &gpu;
    return COLO_OK;
}

void device_init(void)
{
    const colo_device_t *table = NULL;
    (void)__real_colo_device_for(COLO_MEM_HOST, &table);
    host = recording = *table;
    recording.alloc = alloc;
    recording.free = release;
    recording.zero = zero;
    recording.box_copy = copy;
    recording.box_list = list;
    recording.box_list_narrow = narrow;
    recording.box_shift = shift;
    recording.box_sum = sum;
    recording.box_sums = sums;
    recording.box_hash = hash;
    recording.box_nonzero = nonzero;
    gpu = recording;
    gpu.stream_create = stream_create;
    gpu.stream_of = stream_of;
    gpu.stream_follow = stream_follow;
}
