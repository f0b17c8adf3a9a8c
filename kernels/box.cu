/* SPDX-License-Identifier: Apache-2.0 */
/*
 * box.cu - strided boxes: lists of copies in one launch, and sums of up to 256 addends.
 *
 * The launcher does what costs nothing there: axes of extent 1 go, the others are ordered by the
 * destination's strides, axes that lie back to back on both sides coalesce into one. What remains
 * is rows of consecutive accesses; the widest of 16, 8, 4, 2, 1 bytes that divides every pointer,
 * stride and row is the access, so a bf16 box that starts at an odd element still moves by twos.
 * Where the innermost axis has gaps an access is one element, and where even elements are
 * misaligned it is bytes.
 *
 * The kernel cuts a box into tiles of TILE accesses, row after row. A tile's first row and column
 * cost two 64-bit divisions a thread; inside the tile a 32-bit division, or a comparison when a row
 * is longer than a tile, says which row an access is in. So nothing limits extents.
 *
 * Sums keep one accumulator per element and add the addends in the order given: the result is that
 * of the host loop bit for bit. __fadd_rn keeps the compiler from fusing anything. Sums of addends
 * that differ in dtype come in lists, as copies do: a launch takes as long as a small sum.
 */
#include "box.cuh"
#include "kernels.h"

#include <algorithm>
#include <climits>
#include <utility>

namespace
{

constexpr int THREADS = 256, UNROLL = 4, TILE = THREADS * UNROLL;

struct axis {
    int64_t extent, to, from;
};

/* ---- copies ---- */

struct copy_task {
    char *dst;
    const char *src;
    walk w;
    int64_t to[3], from[3];
    int64_t tile_end; /* tiles of this task and those before it */
    int32_t width;    /* bytes of an access; 0: elements of elem bytes, one byte after the other */
    int32_t elem;
};

template <int N> struct copy_list {
    int64_t tiles;
    int32_t n;
    copy_task task[N];
};

template <typename V> __device__ void copy_tile(const copy_task &t, int64_t base)
{
    const place first = first_of(t.w, base);
    V v[UNROLL];
    int64_t to[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int off = u * THREADS + (int)threadIdx.x;
        to[u] = -1;
        if (base + off < t.w.count) {
            place p = further<TILE>(t.w, first, off);
            to[u] = bytes_at(p, t.to);
            v[u] = *(const V *)(t.src + bytes_at(p, t.from));
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (to[u] >= 0)
            *(V *)(t.dst + to[u]) = v[u];
}

template <typename V> __device__ void zero_tile(const copy_task &t, int64_t base)
{
    const place first = first_of(t.w, base);
    for (int off = threadIdx.x; off < TILE && base + off < t.w.count; off += THREADS)
        *(V *)(t.dst + bytes_at(further<TILE>(t.w, first, off), t.to)) = V{};
}

template <typename V> __device__ void fill_tile(const copy_task &t, int64_t base)
{
    if (t.src)
        copy_tile<V>(t, base);
    else
        zero_tile<V>(t, base);
}

__device__ void copy_bytes(const copy_task &t, int64_t base)
{
    const place first = first_of(t.w, base);
    for (int off = threadIdx.x; off < TILE && base + off < t.w.count; off += THREADS) {
        place p = further<TILE>(t.w, first, off);
        for (int b = 0; b < t.elem; b++)
            t.dst[bytes_at(p, t.to) + b] = t.src ? t.src[bytes_at(p, t.from) + b] : 0;
    }
}

template <int N>
__global__ void __launch_bounds__(THREADS) copy_kernel(const __grid_constant__ copy_list<N> list)
{
    for (int64_t tile = blockIdx.x; tile < list.tiles; tile += gridDim.x) {
        const int i = task_of(list, tile);
        const copy_task &t = list.task[i];
        const int64_t base = (tile - (i ? list.task[i - 1].tile_end : 0)) * TILE;
        switch (t.width) {
        case 16:
            fill_tile<uint4>(t, base);
            break;
        case 8:
            fill_tile<uint2>(t, base);
            break;
        case 4:
            fill_tile<uint32_t>(t, base);
            break;
        case 2:
            fill_tile<uint16_t>(t, base);
            break;
        case 1:
            fill_tile<uint8_t>(t, base);
            break;
        default:
            copy_bytes(t, base);
        }
    }
}

/* Axes of more than one element, innermost first. Returns how many. */
int axes_of(const colo_box_t &dst, const colo_box_t &src, int64_t elem, axis *a)
{
    int n = 0;
    for (int i = 2; i >= 0; i--)
        if (dst.extent[i] != 1)
            a[n++] = {dst.extent[i], dst.stride[i] * elem, src.stride[i] * elem};
    for (int i = 1; i < n; i++)
        for (int k = i;
             k > 0 && (a[k].to != a[k - 1].to ? a[k].to < a[k - 1].to : a[k].from < a[k - 1].from);
             k--)
            std::swap(a[k], a[k - 1]);
    int m = 0;
    for (int i = 0; i < n; i++)
        if (m && a[i].to == a[m - 1].to * a[m - 1].extent &&
            a[i].from == a[m - 1].from * a[m - 1].extent)
            a[m - 1].extent *= a[i].extent;
        else
            a[m++] = a[i];
    return m;
}

bool empty(const colo_box_t &b)
{
    return b.extent[0] == 0 || b.extent[1] == 0 || b.extent[2] == 0;
}

/* Zeros: as if dst were copied onto itself, so that its own strides and alignment decide. */
copy_task plan_copy(const colo_box_t &dst, const colo_box_t &from, int64_t elem)
{
    const colo_box_t &src = from.data ? from : dst;
    axis a[3] = {{1, elem, elem}, {1, 0, 0}, {1, 0, 0}};
    const int n = axes_of(dst, src, elem, a);
    for (int i = n; i < 3; i++)
        a[i] = {1, i ? 0 : elem, i ? 0 : elem};
    const uint64_t ends = (uint64_t)(uintptr_t)dst.data | (uint64_t)(uintptr_t)src.data;
    int64_t width = elem;
    if (a[0].to == elem && a[0].from == elem) { /* runs: any width that divides everything */
        uint64_t all = ends | (uint64_t)(a[0].extent * elem);
        for (int i = 1; i < n; i++)
            all |= (uint64_t)a[i].to | (uint64_t)a[i].from;
        for (width = 16; all & (uint64_t)(width - 1);)
            width /= 2;
        a[0] = {a[0].extent * elem / width, width, width};
    } else if (ends & (uint64_t)(elem - 1)) {
        width = 0;
    }
    copy_task t = {};
    t.dst = (char *)dst.data;
    t.src = (const char *)from.data;
    t.w.count = 1;
    for (int i = 0; i < 3; i++) {
        t.w.extent[i] = a[i].extent;
        t.w.count *= a[i].extent;
        t.to[i] = a[i].to;
        t.from[i] = a[i].from;
    }
    t.width = (int32_t)width;
    t.elem = (int32_t)elem;
    return t;
}

unsigned blocks_for(int64_t tiles)
{
    return (unsigned)std::min<int64_t>(tiles, INT_MAX);
}

/* Enqueues the first pairs, as many as fit; @used tells how many that were. */
template <int N>
cudaError_t copy_some(const colo_box_t *dst, const colo_box_t *src, int64_t n, int64_t elem,
                      int32_t blocks, cudaStream_t stream, int64_t *used)
{
    static_assert(sizeof(copy_list<N>) <= 32764, "the limit of a kernel's parameters");
    copy_list<N> list;
    list.n = 0;
    list.tiles = 0;
    int64_t i = 0;
    for (; i < n && list.n < N; i++) {
        if (empty(dst[i]))
            continue;
        copy_task t = plan_copy(dst[i], src[i], elem);
        list.tiles += (t.w.count - 1) / TILE + 1;
        t.tile_end = list.tiles;
        list.task[list.n++] = t;
    }
    *used = i;
    if (list.n == 0)
        return cudaSuccess;
    const unsigned any = blocks_for(list.tiles), most = blocks > 0 ? (unsigned)blocks : any;
    copy_kernel<N><<<std::min(any, most), THREADS, 0, stream>>>(list);
    return cudaGetLastError();
}

/* ---- sums ---- */

template <int N> struct sum_args {
    char *dst;
    const char *src[N];
    walk w;
    int64_t to[3], from[N][3];
    int32_t n;
};

/* BYTES: @to is no multiple of the element size. */
template <typename P, bool BYTES> __device__ void put(char *to, const P &v)
{
    if constexpr (BYTES) {
        /* in 32-bit registers: from a 16-bit one ptxas 13.0 stores some other byte */
        uint32_t half[2] = {0, 0};
        memcpy(half, &v, sizeof v);
        asm volatile("" : "+r"(half[0]), "+r"(half[1]));
        for (size_t b = 0; b < sizeof v; b++)
            to[b] = (char)(half[b / 4] >> (8 * (b % 4)));
    } else {
        *(P *)to = v;
    }
}

template <typename D, int K, bool BYTES, int N>
__global__ void __launch_bounds__(THREADS) sum_kernel(const __grid_constant__ sum_args<N> a)
{
    using P = pack<typename D::elem, K>;
    for (int64_t base = (int64_t)blockIdx.x * TILE; base < a.w.count;
         base += (int64_t)gridDim.x * TILE) {
        const place first = first_of(a.w, base);
        for (int off = threadIdx.x; off < TILE && base + off < a.w.count; off += THREADS) {
            const place p = further<TILE>(a.w, first, off);
            P v = fetch<P, BYTES>(a.src[0] + bytes_at(p, a.from[0]));
            typename D::real sum[K];
#pragma unroll
            for (int k = 0; k < K; k++)
                sum[k] = D::load(v.e[k]);
#pragma unroll 4
            for (int i = 1; i < a.n; i++) {
                v = fetch<P, BYTES>(a.src[i] + bytes_at(p, a.from[i]));
#pragma unroll
                for (int k = 0; k < K; k++)
                    sum[k] = add(sum[k], D::load(v.e[k]));
            }
#pragma unroll
            for (int k = 0; k < K; k++)
                v.e[k] = D::store(sum[k]);
            put<P, BYTES>(a.dst + bytes_at(p, a.to), v);
        }
    }
}

/* Axes as for copies, coalesced where every addend agrees; those of extent 1 go. @from_elem(k):
 * bytes of an element of addend k. */
template <typename A, typename E>
void plan_sum(const colo_box_t &dst, const colo_box_t *src, int32_t n, int64_t elem, E from_elem,
              A &a)
{
    int order[3], axes = 0, m = 0;
    for (int i = 2; i >= 0; i--)
        if (dst.extent[i] != 1)
            order[axes++] = i;
    for (int i = 1; i < axes; i++)
        for (int k = i; k > 0 && dst.stride[order[k]] < dst.stride[order[k - 1]]; k--)
            std::swap(order[k], order[k - 1]);
    a.dst = (char *)dst.data;
    a.n = n;
    for (int32_t k = 0; k < n; k++)
        a.src[k] = (const char *)src[k].data;
    for (int i = 0; i < axes; i++) {
        const int x = order[i];
        bool coalesces = m > 0 && dst.stride[x] * elem == a.to[m - 1] * a.w.extent[m - 1];
        for (int32_t k = 0; coalesces && k < n; k++)
            coalesces = src[k].stride[x] * from_elem(k) == a.from[k][m - 1] * a.w.extent[m - 1];
        if (coalesces) {
            a.w.extent[m - 1] *= dst.extent[x];
            continue;
        }
        a.w.extent[m] = dst.extent[x];
        a.to[m] = dst.stride[x] * elem;
        for (int32_t k = 0; k < n; k++)
            a.from[k][m] = src[k].stride[x] * from_elem(k);
        m++;
    }
    for (; m < 3; m++) {
        a.w.extent[m] = 1;
        a.to[m] = m ? 0 : elem;
        for (int32_t k = 0; k < n; k++)
            a.from[k][m] = m ? 0 : from_elem(k);
    }
}

template <typename D, int N>
cudaError_t sum(const colo_box_t &dst, const colo_box_t *src, int32_t n, cudaStream_t stream)
{
    constexpr int64_t elem = sizeof(typename D::elem), K = 16 / elem;
    sum_args<N> a = {};
    plan_sum(
        dst, src, n, elem, [](int32_t) { return elem; }, a);
    uint64_t ends = (uint64_t)(uintptr_t)a.dst;
    uint64_t strides = (uint64_t)(a.w.extent[0] * elem) | (uint64_t)a.to[1] | (uint64_t)a.to[2];
    bool contiguous = a.to[0] == elem;
    for (int32_t k = 0; k < n; k++) {
        ends |= (uint64_t)(uintptr_t)a.src[k];
        strides |= (uint64_t)a.from[k][1] | (uint64_t)a.from[k][2];
        contiguous = contiguous && a.from[k][0] == elem;
    }
    const bool wide = contiguous && !((ends | strides) & 15);
    if (wide) {
        a.w.extent[0] /= K;
        a.to[0] = 16;
        for (int32_t k = 0; k < n; k++)
            a.from[k][0] = 16;
    }
    a.w.count = a.w.extent[0] * a.w.extent[1] * a.w.extent[2];
    const unsigned grid = blocks_for((a.w.count - 1) / TILE + 1);
    if (wide)
        sum_kernel<D, K, false, N><<<grid, THREADS, 0, stream>>>(a);
    else if (!(ends & (uint64_t)(elem - 1)))
        sum_kernel<D, 1, false, N><<<grid, THREADS, 0, stream>>>(a);
    else
        sum_kernel<D, 1, true, N><<<grid, THREADS, 0, stream>>>(a);
    return cudaGetLastError();
}

template <typename D>
cudaError_t sum_of(const colo_box_t &dst, const colo_box_t *src, int32_t n, cudaStream_t stream)
{
    return n <= 8 ? sum<D, 8>(dst, src, n, stream) : sum<D, COLO_K_ADDENDS>(dst, src, n, stream);
}

/* ---- sums of several dtypes ---- */

constexpr int WIDE = 4; /* elements of an access, if all addends allow it */

template <int N> struct mixed_task {
    char *dst;
    const char *src[N];
    walk w;
    int64_t to[3], from[N][3];
    int64_t tile_end; /* as of copies */
    int32_t n, width; /* width: elements of an access; 0: one, byte after byte */
    int8_t dtype, from_dtype[N];
};

template <int TASKS, int N> struct mixed_list {
    int64_t tiles;
    int32_t n;
    mixed_task<N> task[TASKS];
};

template <int K, bool BYTES> __device__ void load(float *v, const char *from, int8_t dtype)
{
    if (dtype == COLO_F32) {
        const auto p = fetch<pack<float, K>, BYTES>(from);
#pragma unroll
        for (int k = 0; k < K; k++)
            v[k] = p.e[k];
        return;
    }
    const auto p = fetch<pack<uint16_t, K>, BYTES>(from);
#pragma unroll
    for (int k = 0; k < K; k++)
        v[k] = dtype == COLO_BF16 ? bf16::load(p.e[k]) : f16::load(p.e[k]);
}

template <int K, bool BYTES> __device__ void store(char *to, const float *v, int8_t dtype)
{
    if (dtype == COLO_F32) {
        pack<float, K> p;
#pragma unroll
        for (int k = 0; k < K; k++)
            p.e[k] = v[k];
        put<pack<float, K>, BYTES>(to, p);
        return;
    }
    pack<uint16_t, K> p;
#pragma unroll
    for (int k = 0; k < K; k++)
        p.e[k] = dtype == COLO_BF16 ? bf16::store(v[k]) : f16::store(v[k]);
    put<pack<uint16_t, K>, BYTES>(to, p);
}

template <int K, bool BYTES, int N> __device__ void sum_tile(const mixed_task<N> &t, int64_t base)
{
    const place first = first_of(t.w, base);
    for (int off = threadIdx.x; off < TILE && base + off < t.w.count; off += THREADS) {
        const place p = further<TILE>(t.w, first, off);
        float sum[K], v[K];
        load<K, BYTES>(sum, t.src[0] + bytes_at(p, t.from[0]), t.from_dtype[0]);
        for (int i = 1; i < t.n; i++) {
            load<K, BYTES>(v, t.src[i] + bytes_at(p, t.from[i]), t.from_dtype[i]);
#pragma unroll
            for (int k = 0; k < K; k++)
                sum[k] = add(sum[k], v[k]);
        }
        store<K, BYTES>(t.dst + bytes_at(p, t.to), sum, t.dtype);
    }
}

template <int TASKS, int N>
__global__ void __launch_bounds__(THREADS)
    mixed_kernel(const __grid_constant__ mixed_list<TASKS, N> list)
{
    for (int64_t tile = blockIdx.x; tile < list.tiles; tile += gridDim.x) {
        const int i = task_of(list, tile);
        const mixed_task<N> &t = list.task[i];
        const int64_t base = (tile - (i ? list.task[i - 1].tile_end : 0)) * TILE;
        if (t.width == WIDE)
            sum_tile<WIDE, false>(t, base);
        else if (t.width == 1)
            sum_tile<1, false>(t, base);
        else
            sum_tile<1, true>(t, base);
    }
}

int64_t float_size(colo_dtype_t dtype)
{
    return dtype == COLO_F32 ? 4 : 2;
}

/* The widest access that @data, and rows of @stride bytes along each axis, allow. */
int32_t width_of(const void *data, const int64_t *stride, int64_t elem)
{
    const uint64_t start = (uint64_t)(uintptr_t)data,
                   strides = (uint64_t)stride[1] | (uint64_t)stride[2];
    if (start & (uint64_t)(elem - 1))
        return 0;
    return stride[0] == elem && !((start | strides) & (uint64_t)(WIDE * elem - 1)) ? WIDE : 1;
}

template <int N> void plan_mixed(const colo_mixed_sum_t &s, mixed_task<N> &t)
{
    const auto from_elem = [&](int32_t k) { return float_size(s.from_dtype[k]); };
    plan_sum(s.to, s.from, s.n, float_size(s.dtype), from_elem, t);
    t.dtype = (int8_t)s.dtype;
    t.width = t.w.extent[0] % WIDE ? std::min(1, width_of(t.dst, t.to, float_size(s.dtype)))
                                   : width_of(t.dst, t.to, float_size(s.dtype));
    for (int32_t k = 0; k < s.n; k++) {
        t.from_dtype[k] = (int8_t)s.from_dtype[k];
        t.width = std::min(t.width, width_of(t.src[k], t.from[k], from_elem(k)));
    }
    if (t.width == WIDE) {
        t.w.extent[0] /= WIDE;
        t.to[0] *= WIDE;
        for (int32_t k = 0; k < s.n; k++)
            t.from[k][0] *= WIDE;
    }
    t.w.count = t.w.extent[0] * t.w.extent[1] * t.w.extent[2];
}

/* Enqueues the first of @n sums, as many as fit; @used tells how many that were. */
template <int TASKS, int N>
cudaError_t sum_some(const colo_mixed_sum_t *sums, int32_t n, cudaStream_t stream, int32_t *used)
{
    static_assert(sizeof(mixed_list<TASKS, N>) <= 32764, "the limit of a kernel's parameters");
    mixed_list<TASKS, N> list;
    list.n = 0;
    list.tiles = 0;
    int32_t i = 0;
    for (; i < n && list.n < TASKS && sums[i].n <= N && sums[i].dtype != COLO_F64; i++) {
        if (empty(sums[i].to))
            continue;
        mixed_task<N> &t = list.task[list.n++];
        plan_mixed(sums[i], t);
        list.tiles += (t.w.count - 1) / TILE + 1;
        t.tile_end = list.tiles;
    }
    *used = i;
    if (list.n == 0)
        return cudaSuccess;
    mixed_kernel<TASKS, N><<<blocks_for(list.tiles), THREADS, 0, stream>>>(list);
    return cudaGetLastError();
}

} // namespace

extern "C" cudaError_t colo_k_boxes_copy(const colo_box_t *dst, const colo_box_t *src, int64_t n,
                                         size_t elem_size, int32_t blocks, cudaStream_t stream)
{
    const int64_t elem = (int64_t)elem_size;
    if (elem != 1 && elem != 2 && elem != 4 && elem != 8)
        return cudaErrorInvalidValue;
    for (int64_t used; n > 0; dst += used, src += used, n -= used) {
        cudaError_t e = n == 1    ? copy_some<1>(dst, src, n, elem, blocks, stream, &used)
                        : n <= 32 ? copy_some<32>(dst, src, n, elem, blocks, stream, &used)
                                  : copy_some<COLO_K_BOXES>(dst, src, n, elem, blocks, stream, &used);
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}

extern "C" cudaError_t colo_k_box_sum(const colo_box_t *dst, const colo_box_t *src, int32_t n,
                                      colo_dtype_t dtype, cudaStream_t stream)
{
    if (n < 1 || n > COLO_K_ADDENDS)
        return cudaErrorInvalidValue;
    if (empty(*dst))
        return cudaSuccess;
    return with_dtype(dtype, [&](auto d) { return sum_of<decltype(d)>(*dst, src, n, stream); });
}

extern "C" cudaError_t colo_k_box_sums(const colo_mixed_sum_t *sums, int32_t n, cudaStream_t stream)
{
    enum { FEW = 8, MANY = 64 };
    for (int32_t used; n > 0; sums += used, n -= used) {
        cudaError_t e;
        if (sums->dtype == COLO_F64) {
            used = 1;
            e = colo_k_box_sum(&sums->to, sums->from, sums->n, COLO_F64, stream);
        } else {
            e = sums->n > FEW ? sum_some<1, COLO_K_ADDENDS>(sums, n, stream, &used)
                : n <= FEW    ? sum_some<FEW, FEW>(sums, n, stream, &used)
                              : sum_some<MANY, FEW>(sums, n, stream, &used);
        }
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}
