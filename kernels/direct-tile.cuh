/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct-tile.cuh - one tile of a box on the direct path: moved, or added up.
 *
 * The axes are put in order, coalesced, and given the widest access on the device, by one thread
 * once a box: only there both sides' strides are known. Sums add one value of every addend in
 * order, as box.cu does: the host's bits.
 */
#ifndef COLO_KERNELS_DIRECT_TILE_CUH
#define COLO_KERNELS_DIRECT_TILE_CUH

#include "direct.h"

#include "box.cuh"

#include <climits>

namespace
{

/* Accesses of a thread in flight: along a line, so many that few blocks keep a link busy;
 * elsewhere, where each has a place of its own; of sums, at each of two addends. */
constexpr int THREADS = COLO_K_THREADS;
constexpr int MOVES = 8, SCATTERED_MOVES = 4, SUMS = 2, SUM_SPAN = THREADS * SUMS;
constexpr int ADDENDS = 256;

/* ---- boxes: the axes that are left, innermost first ---- */

struct axis {
    int64_t extent, to, from;
};

__device__ void order(axis &a, axis &b)
{
    if (b.to < a.to || (b.to == a.to && b.from < a.from)) {
        axis t = a;
        a = b;
        b = t;
    }
}

__device__ bool coalesces(const axis &a, const axis &b)
{
    return b.extent > 1 && b.to == a.to * a.extent && b.from == a.from * a.extent;
}

struct task { /* in shared memory */
    walk w;
    char *dst;
    const char *src;
    int64_t to[3], from[3];
    int32_t width;
};

/* As plan_copy() of box.cu, on the device: only here both sides' strides are known. */
__device__ void plan_move(task &t, const int64_t *extent, const int64_t *to, const int64_t *from,
                          int32_t elem)
{
    axis a[3];
#pragma unroll
    for (int i = 0; i < 3; i++) { /* axes of one element go last */
        const int x = 2 - i;
        a[i] = {extent[x], extent[x] > 1 ? to[x] : LLONG_MAX, extent[x] > 1 ? from[x] : LLONG_MAX};
    }
    order(a[0], a[1]);
    order(a[1], a[2]);
    order(a[0], a[1]);
    const axis unit = {1, 0, 0};
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (a[i].extent == 1)
            a[i] = unit;
    if (a[0].extent == 1)
        a[0].to = a[0].from = elem;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (coalesces(a[0], a[1])) {
            a[0].extent *= a[1].extent;
            a[1] = a[2];
            a[2] = unit;
        }
    if (coalesces(a[1], a[2])) {
        a[1].extent *= a[2].extent;
        a[2] = unit;
    }
    const uint64_t ends = (uint64_t)t.dst | (uint64_t)t.src;
    int32_t width = elem;
    if (a[0].to == elem && a[0].from == elem) {
        uint64_t every = ends | (uint64_t)(a[0].extent * elem) | (uint64_t)a[1].to |
                         (uint64_t)a[1].from | (uint64_t)a[2].to | (uint64_t)a[2].from;
        for (width = 16; every & (uint64_t)(width - 1);)
            width /= 2;
        a[0] = {a[0].extent * elem / width, width, width};
    } else if (ends & (uint64_t)(elem - 1)) {
        width = 0;
    }
    t.w.count = 1;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        t.w.extent[i] = a[i].extent;
        t.w.count *= a[i].extent;
        t.to[i] = a[i].to;
        t.from[i] = a[i].from;
    }
    t.width = width;
}

/* Are @n accesses from @first on in one line, and before @end? */
__device__ bool in_line(const walk &w, const place &first, int64_t base, int64_t end, int n)
{
    return base + n <= end && first.offset + n <= w.extent[0];
}

/* Both return how many accesses they made of those from @base on, all threads together. */
template <typename V> __device__ int move_span(const task &t, int64_t base, int64_t end)
{
    const place first = first_of(t.w, base);
    if (in_line(t.w, first, base, end, THREADS * MOVES)) {
        const char *src = t.src + bytes_at(first, t.from) + threadIdx.x * t.from[0];
        char *dst = t.dst + bytes_at(first, t.to) + threadIdx.x * t.to[0];
        V v[MOVES];
#pragma unroll
        for (int u = 0; u < MOVES; u++)
            v[u] = *(const V *)(src + u * (THREADS * t.from[0]));
#pragma unroll
        for (int u = 0; u < MOVES; u++)
            *(V *)(dst + u * (THREADS * t.to[0])) = v[u];
        return THREADS * MOVES;
    }
    V v[SCATTERED_MOVES];
    int64_t to[SCATTERED_MOVES];
#pragma unroll
    for (int u = 0; u < SCATTERED_MOVES; u++) {
        int off = u * THREADS + (int)threadIdx.x;
        to[u] = -1;
        if (base + off < end) {
            place p = further<THREADS * SCATTERED_MOVES>(t.w, first, off);
            to[u] = bytes_at(p, t.to);
            v[u] = *(const V *)(t.src + bytes_at(p, t.from));
        }
    }
#pragma unroll
    for (int u = 0; u < SCATTERED_MOVES; u++)
        if (to[u] >= 0)
            *(V *)(t.dst + to[u]) = v[u];
    return THREADS * SCATTERED_MOVES;
}

__device__ int move_bytes(const task &t, int64_t base, int64_t end, int elem)
{
    constexpr int SPAN = THREADS * SCATTERED_MOVES;
    const place first = first_of(t.w, base);
    for (int off = threadIdx.x; off < SPAN && base + off < end; off += THREADS) {
        place p = further<SPAN>(t.w, first, off);
        for (int b = 0; b < elem; b++)
            t.dst[bytes_at(p, t.to) + b] = t.src[bytes_at(p, t.from) + b];
    }
    return SPAN;
}

/* The first access of those that begin at element @offset or behind it: a tile of odd elements may
 * end inside one. */
__device__ int64_t access_at(int64_t offset, int64_t elem, int64_t width)
{
    return (offset * elem + width - 1) / width;
}

/* Elements [@offset, @offset + @tile) of the box, in the order of its axes. */
__device__ void move_tile(const task &t, int64_t offset, int64_t tile, int32_t elem)
{
    const int64_t width = t.width ? t.width : elem;
    int64_t base = access_at(offset, elem, width), end = access_at(offset + tile, elem, width);
    end = end < t.w.count ? end : t.w.count;
    while (base < end)
        switch (t.width) {
        case 16:
            base += move_span<uint4>(t, base, end);
            break;
        case 8:
            base += move_span<uint2>(t, base, end);
            break;
        case 4:
            base += move_span<uint32_t>(t, base, end);
            break;
        case 2:
            base += move_span<uint16_t>(t, base, end);
            break;
        case 1:
            base += move_span<uint8_t>(t, base, end);
            break;
        default:
            base += move_bytes(t, base, end, elem);
        }
}

/* ---- sums ---- */

struct sum_task { /* in shared memory */
    walk w;
    char *dst;
    int64_t to[3];
    int32_t width, addends;
    const char *src[ADDENDS];
    int64_t from[ADDENDS][3];
};

__device__ bool all_coalesce(const sum_task &t, int addends, const int64_t *extent, int a, int b)
{
    if (extent[b] == 1 || t.to[b] != t.to[a] * extent[a])
        return false;
    for (int k = 0; k < addends; k++)
        if (t.from[k][b] != t.from[k][a] * extent[a])
            return false;
    return true;
}

/* Takes t.to and t.from as samples, rows, features; leaves them innermost first. */
__device__ void plan_sum(sum_task &t, const int64_t *shape, int addends, int32_t elem)
{
    int64_t extent[3], to[3];
    int axis[3], n = 0;
    for (int x = 2; x >= 0; x--)
        if (shape[x] > 1)
            axis[n++] = x;
    for (int i = 1; i < n; i++)
        for (int k = i; k > 0 && t.to[axis[k]] < t.to[axis[k - 1]]; k--) {
            int x = axis[k];
            axis[k] = axis[k - 1];
            axis[k - 1] = x;
        }
    for (int i = 0; i < 3; i++) {
        extent[i] = i < n ? shape[axis[i]] : 1;
        to[i] = i < n ? t.to[axis[i]] : i ? 0 : elem;
    }
    for (int k = 0; k < addends; k++) {
        int64_t from[3];
        for (int i = 0; i < 3; i++)
            from[i] = i < n ? t.from[k][axis[i]] : i ? 0 : elem;
        for (int i = 0; i < 3; i++)
            t.from[k][i] = from[i];
    }
    for (int i = 0; i < 3; i++)
        t.to[i] = to[i];
    for (int i = 0; i + 1 < n;) {
        if (!all_coalesce(t, addends, extent, i, i + 1)) {
            i++;
            continue;
        }
        extent[i] *= extent[i + 1];
        for (int m = i + 1; m < 3; m++) {
            extent[m] = m < 2 ? extent[m + 1] : 1;
            t.to[m] = m < 2 ? t.to[m + 1] : 0;
            for (int k = 0; k < addends; k++)
                t.from[k][m] = m < 2 ? t.from[k][m + 1] : 0;
        }
        n--;
    }
    uint64_t ends = (uint64_t)t.dst;
    uint64_t strides = (uint64_t)(extent[0] * elem) | (uint64_t)t.to[1] | (uint64_t)t.to[2];
    bool contiguous = t.to[0] == elem;
    for (int k = 0; k < addends; k++) {
        ends |= (uint64_t)t.src[k];
        strides |= (uint64_t)t.from[k][1] | (uint64_t)t.from[k][2];
        contiguous = contiguous && t.from[k][0] == elem;
    }
    t.width = ends & (uint64_t)(elem - 1) ? 0 : elem;
    if (contiguous && !((ends | strides) & 15)) {
        t.width = 16;
        extent[0] = extent[0] * elem / 16;
        t.to[0] = 16;
        for (int k = 0; k < addends; k++)
            t.from[k][0] = 16;
    }
    t.w.count = 1;
    for (int i = 0; i < 3; i++) {
        t.w.extent[i] = extent[i];
        t.w.count *= extent[i];
    }
}

template <typename D, int K, bool BYTES>
__device__ void sum_span(const sum_task &t, int addends, int64_t base, int64_t end)
{
    using P = pack<typename D::elem, K>;
    const place first = first_of(t.w, base);
    place p[SUMS];
    P v[SUMS], next[SUMS];
    typename D::real sum[SUMS][K];
    bool on[SUMS];
#pragma unroll
    for (int u = 0; u < SUMS; u++) {
        int off = u * THREADS + (int)threadIdx.x;
        on[u] = base + off < end;
        if (on[u]) {
            p[u] = further<SUM_SPAN>(t.w, first, off);
            v[u] = fetch<P, BYTES>(t.src[0] + bytes_at(p[u], t.from[0]));
        }
    }
    for (int k = 0; k < addends; k++) {
        if (k + 1 < addends) /* on its way while this addend is added */
#pragma unroll
            for (int u = 0; u < SUMS; u++)
                if (on[u])
                    next[u] = fetch<P, BYTES>(t.src[k + 1] + bytes_at(p[u], t.from[k + 1]));
#pragma unroll
        for (int u = 0; u < SUMS; u++) {
#pragma unroll
            for (int i = 0; i < K; i++)
                sum[u][i] = k ? add(sum[u][i], D::load(v[u].e[i])) : D::load(v[u].e[i]);
            v[u] = next[u];
        }
    }
#pragma unroll
    for (int u = 0; u < SUMS; u++) {
        if (!on[u])
            continue;
#pragma unroll
        for (int i = 0; i < K; i++)
            v[u].e[i] = D::store(sum[u][i]);
        char *to = t.dst + bytes_at(p[u], t.to);
        if constexpr (BYTES) {
            uint32_t half[2] = {0, 0}; /* as in box.cu */
            memcpy(half, &v[u], sizeof v[u]);
            asm volatile("" : "+r"(half[0]), "+r"(half[1]));
            for (size_t b = 0; b < sizeof v[u]; b++)
                to[b] = (char)(half[b / 4] >> (8 * (b % 4)));
        } else {
            *(P *)to = v[u];
        }
    }
}

template <typename D>
__device__ void sum_tile(const sum_task &t, int addends, int64_t offset, int64_t tile)
{
    constexpr int ELEM = sizeof(typename D::elem);
    const int64_t width = t.width ? t.width : ELEM;
    int64_t base = access_at(offset, ELEM, width), end = access_at(offset + tile, ELEM, width);
    end = end < t.w.count ? end : t.w.count;
    for (; base < end; base += SUM_SPAN)
        if (t.width == 16)
            sum_span<D, 16 / ELEM, false>(t, addends, base, end);
        else if (t.width)
            sum_span<D, 1, false>(t, addends, base, end);
        else
            sum_span<D, 1, true>(t, addends, base, end);
}

} // namespace

#endif
