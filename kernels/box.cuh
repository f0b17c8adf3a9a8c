/* SPDX-License-Identifier: Apache-2.0 */
/*
 * box.cuh - what kernels that walk strided boxes share: whose tile it is, where an access is, and
 * how elements of a dtype are added up.
 */
#ifndef COLO_KERNELS_BOX_CUH
#define COLO_KERNELS_BOX_CUH

#include "dtype.cuh"

#include <cstdint>
#include <cstring>

namespace
{

/* Axis 0 is the row (accesses), 1 and 2 count rows; strides in bytes. */
struct walk {
    int64_t extent[3];
    int64_t count; /* of accesses, all axes */
};

/* The first task whose tile_end is past @tile. */
template <typename L> __device__ int task_of(const L &list, int64_t tile)
{
    int lo = 0, hi = list.n - 1;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (list.task[mid].tile_end > tile)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* ---- where the accesses of a tile are ---- */

struct place {
    int64_t offset, row, outer;
};

__device__ place first_of(const walk &w, int64_t base)
{
    if (w.count >> 32 == 0) { /* wide divisions take a good part of a small call */
        const uint32_t b = (uint32_t)base, row = b / (uint32_t)w.extent[0];
        const uint32_t outer = row / (uint32_t)w.extent[1];
        return {b - row * (uint32_t)w.extent[0], row - outer * (uint32_t)w.extent[1], outer};
    }
    int64_t rows = base / w.extent[0];
    return {base - rows * w.extent[0], rows % w.extent[1], rows / w.extent[1]};
}

/* The access @off further on, 0 <= off < TILE. */
template <int TILE> __device__ place further(const walk &w, place p, int off)
{
    p.offset += off;
    if (p.offset < w.extent[0])
        return p;
    if (w.extent[0] >= TILE) {
        p.offset -= w.extent[0];
        p.row++;
    } else {
        uint32_t q = (uint32_t)p.offset / (uint32_t)w.extent[0];
        p.offset -= (int64_t)q * w.extent[0];
        p.row += q;
    }
    if (p.row < w.extent[1])
        return p;
    if (w.extent[1] >= TILE) {
        p.row -= w.extent[1];
        p.outer++;
    } else {
        uint32_t q = (uint32_t)p.row / (uint32_t)w.extent[1];
        p.row -= (int64_t)q * w.extent[1];
        p.outer += q;
    }
    return p;
}

__device__ int64_t bytes_at(const place &p, const int64_t *stride)
{
    return p.offset * stride[0] + p.row * stride[1] + p.outer * stride[2];
}

/* ---- elements ---- */

template <typename R, int K> struct alignas(sizeof(R) * K) pack {
    R e[K];
};

/* BYTES: the pointers are not multiples of the element size. */
template <typename P, bool BYTES> __device__ P fetch(const char *from)
{
    if constexpr (BYTES) { /* one element */
        uint64_t bits = 0;
        for (size_t b = 0; b < sizeof(P); b++)
            bits |= (uint64_t)(uint8_t)from[b] << (8 * b);
        P p;
        memcpy(&p, &bits, sizeof p);
        return p;
    } else {
        return *(const P *)from;
    }
}

} // namespace

#endif
