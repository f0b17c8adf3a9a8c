/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wgmma.cuh - Hopper's instructions for products: barriers in shared memory that count bytes, the
 * copy engine for tiles, which also fills the shared memory of all blocks of a cluster, and matrix
 * products of 128 threads. Only code for sm_90a may call them (HAS_WGMMA of arch.cuh).
 *
 * An operand's tile has rows of 128 bytes, 64 elements, in the engine's 128-byte swizzle: 16-byte
 * word w of row r is at w ^ (r % 8). It begins at a multiple of 1024 bytes. A row has elements along
 * the sum, or by_k the k-th elements of 64 lines; then boxes of 64 rows lie one behind the other.
 * Addresses are those of shared memory, 32 bits.
 */
#ifndef COLO_KERNELS_WGMMA_CUH
#define COLO_KERNELS_WGMMA_CUH

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace
{

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers ---- */

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/* What was initialised can be used by the copy engine and by other blocks. */
__device__ __forceinline__ void barriers_made()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Arrives, and has the phase wait for @bytes of copies, too. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/* Until the phase of this parity has ended; the one before a new barrier's first has. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
/* At block @rank of the cluster. Relaxed: what it follows are reads of matrix products, which their
 * wait has ended; a release of the cluster's scope would wait for all of the thread's writes. */
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* ---- clusters ---- */

__device__ __forceinline__ int rank_in_cluster()
{
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* Threads of a warp may come apart. */
__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

/* ---- the copy engine ---- */

/* The tile whose first element is row @y, column @x. What is outside the matrix becomes 0. */
__device__ __forceinline__ void tile_load(uint32_t to, const CUtensorMap *from, uint32_t barrier,
                                          int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(from), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}
/* The same place of all blocks in @blocks, a bit each; the bytes count at each one's barrier. */
__device__ __forceinline__ void tile_load_for(uint32_t to, const CUtensorMap *from, uint32_t barrier,
                                              int x, int y, int blocks)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(from), "r"(barrier), "r"(x), "r"(y), "h"((uint16_t)blocks)
                 : "memory");
}
/* What is outside the matrix is not written. */
__device__ __forceinline__ void tile_store(const CUtensorMap *to, uint32_t from, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(x), "r"(y)
                 : "memory");
}
/* Adds fp32 numbers to what is there, each once. */
__device__ __forceinline__ void tile_add(const CUtensorMap *to, uint32_t from, int x, int y)
{
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];\n"
                 "cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(x), "r"(y)
                 : "memory");
}
/* Until all but this thread's last N stores have read shared memory, or all have written. */
template <int N> __device__ __forceinline__ void stores_have_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void stores_have_written()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* What this thread wrote to shared memory is what a store that comes behind a barrier reads. */
__device__ __forceinline__ void shared_is_written()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- 128 threads ---- */

__device__ __forceinline__ void group_sync(int barrier)
{
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
template <int N> __device__ __forceinline__ void registers_down()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_up()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* The sum's elements from the first on; 16 further on: + OPERAND_STEP */
template <bool BY_K> __device__ __forceinline__ uint64_t operand(uint32_t tile)
{
    constexpr uint64_t EIGHT_ROWS = 1024 / 16, SWIZZLE_128 = 1, BOX = BY_K ? 64 * 128 / 16 : 1;
    return (tile & 0x3ffff) >> 4 | BOX << 16 | EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}
template <bool BY_K> constexpr uint64_t OPERAND_STEP = (BY_K ? 16 * 128 : 16 * 2) / 16;
__device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until all but the last N commits are done */
template <int N> __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define COLO_OPERANDS(i)                                                                     \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define COLO_PRODUCT(type, by_k)                                                               \
    asm volatile(                                                                              \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                      \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "               \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "     \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "     \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "     \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "     \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
        "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
        "%124, %125, %126, %127}, %128, %129, add, 1, 1, " by_k ";\n}"                         \
        : COLO_OPERANDS(0), COLO_OPERANDS(8), COLO_OPERANDS(16), COLO_OPERANDS(24),            \
          COLO_OPERANDS(32), COLO_OPERANDS(40), COLO_OPERANDS(48), COLO_OPERANDS(56),          \
          COLO_OPERANDS(64), COLO_OPERANDS(72), COLO_OPERANDS(80), COLO_OPERANDS(88),          \
          COLO_OPERANDS(96), COLO_OPERANDS(104), COLO_OPERANDS(112), COLO_OPERANDS(120)        \
        : "l"(a), "l"(b), "r"(add))

/* c [64, 256] (+)= a [64, 16] times b [256, 16] transposed, begun, in fp32; BY_K: both are. Thread t has rows
 * t / 32 * 16 + t % 32 / 4, and that + 8, and of each columns 8 j + t % 4 * 2, and that + 1:
 * c[4 j + 2 row + column]. */
template <bool BF16, bool BY_K>
__device__ __forceinline__ void product_begin(float (&c)[128], uint64_t a, uint64_t b, int add)
{
    if constexpr (BF16 && BY_K)
        COLO_PRODUCT("bf16", "1, 1");
    else if constexpr (BF16)
        COLO_PRODUCT("bf16", "0, 0");
    else if constexpr (BY_K)
        COLO_PRODUCT("f16", "1, 1");
    else
        COLO_PRODUCT("f16", "0, 0");
}

#undef COLO_PRODUCT
#undef COLO_OPERANDS

} // namespace

#endif
