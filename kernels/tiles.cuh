/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tiles.cuh - products of 16-bit operands on Hopper, tile by tile: how a block copies and multiplies.
 * What becomes of a tile, the kernels say.
 *
 * A block makes tiles of 128 lines of A and 256 of B. One warp has the copy engine fill four stages of
 * shared memory, each 64 elements of the sum; two groups of 128 threads have 64 lines of A each and
 * take the stages at their own pace. The second begins a stage late, so that one group has a tile's
 * results while the other one's products go on. A cluster of two blocks has the same lines of B and
 * neighbouring ones of A: each copies half of B's tile to both. Blocks stay for the whole product.
 */
#ifndef COLO_KERNELS_TILES_CUH
#define COLO_KERNELS_TILES_CUH

#include "arch.cuh"
#include "logprob.cuh"
#include "wgmma.cuh"

#include <algorithm>

namespace
{

constexpr int ROWS = 64, BLOCK_ROWS = 2 * ROWS, COLUMNS = 256, DEPTH = 64, CLUSTER = 2;
constexpr int STAGES = 4, A_BYTES = BLOCK_ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2,
              STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int THREADS = 3 * 128, REGISTERS_COPYING = 40, REGISTERS = 232;
constexpr int OUT_BYTES = ROWS * 128, OUTS = 2; /* of results on their way, for each group */
constexpr int SMALL_BYTES = 2048;               /* barriers, and a bias for each group */
constexpr int LATE = 1, LATE_NS = 300;

/* What becomes of results, which are fp32 sums */
enum writes { NOTHING, WIDE, NARROW }; /* as they are; rounded to the operands' dtype */

constexpr int bytes_of(writes w)
{
    return 1024 + STAGES * STAGE_BYTES + SMALL_BYTES + (w != NOTHING ? 2 * OUTS * OUT_BYTES : 0);
}

/* Where things are in shared memory */
struct memory {
    uint32_t stages;
    __device__ uint32_t a(int stage) const
    {
        return stages + stage * STAGE_BYTES;
    }
    __device__ uint32_t b(int stage) const
    {
        return a(stage) + A_BYTES;
    }
    __device__ uint32_t full(int stage) const
    {
        return stages + STAGES * STAGE_BYTES + stage * 8;
    }
    __device__ uint32_t empty(int stage) const
    {
        return full(stage) + STAGES * 8;
    }
    __device__ uint32_t bias(int group) const
    {
        return full(0) + SMALL_BYTES / 2 + group * COLUMNS * 2;
    }
    __device__ uint32_t out(int i) const /* a multiple of 1024 */
    {
        return full(0) + SMALL_BYTES + i * OUT_BYTES;
    }
};

struct turn {
    int stage = 0, parity;
    __device__ void next()
    {
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        parity ^= stage == 0;
    }
    __device__ int before() const
    {
        return stage == 0 ? STAGES - 1 : stage - 1;
    }
};

/* This cluster's tiles of @tiles */
template <typename F> __device__ __forceinline__ void for_each_tile(int64_t tiles, F f)
{
    for (int64_t i = blockIdx.x / CLUSTER; i < tiles; i += gridDim.x / CLUSTER)
        f(i);
}

/* load(tile, k, stage, barrier) has the engine copy STAGE_BYTES of the sum's k-th DEPTH elements. */
template <typename F>
__device__ __forceinline__ void copy_tiles(const memory &m, int64_t tiles, int depths, F load)
{
    turn t = {0, 1};
    for_each_tile(tiles, [&](int64_t i) {
        for (int k = 0; k < depths; k++, t.next()) {
            barrier_wait(m.empty(t.stage), t.parity);
            barrier_expect(m.full(t.stage), STAGE_BYTES);
            load(i, k, t.stage, m.full(t.stage));
        }
    });
    for (int k = 0; k < STAGES; k++, t.next()) /* the other block still arrives here */
        barrier_wait(m.empty(t.stage), t.parity);
}

/* One of the two groups of threads that multiply; outs: results that it has sent off */
struct group {
    int number, warp, lane, outs;
};

template <typename D, bool BY_K>
__device__ __forceinline__ void multiply(float (&z)[128], const memory &m, const group &g, turn &t,
                                         int depths)
{
    const auto release = [&](int stage) {
        if (g.lane < CLUSTER)
            barrier_arrive(m.empty(stage), g.lane);
    };
    for (int k = 0; k < depths; k++, t.next()) {
        barrier_wait(m.full(t.stage), t.parity);
        const uint64_t a = operand<BY_K>(m.a(t.stage) + g.number * (ROWS * DEPTH * 2)),
                       b = operand<BY_K>(m.b(t.stage));
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++)
            product_begin<std::is_same<D, bf16>::value, BY_K>(
                z, a + i * OPERAND_STEP<BY_K>, b + i * OPERAND_STEP<BY_K>, k > 0 || i > 0);
        products_commit();
        products_wait<1>();
        if (k > 0)
            release(t.before());
    }
    products_wait<0>();
    release(t.before());
    /* What comes next takes z from here. Else the compiler may want it in other registers while
     * products are under way, has none left, and lets each product wait for the one before. */
#pragma unroll
    for (int j = 0; j < 128; j++)
        asm volatile("" : "+f"(z[j])::"memory");
}

/* The whole of a kernel: copy(memory, rank in the cluster) by one thread, multiply(memory, rank, group)
 * by two groups. */
template <typename COPY, typename MULTIPLY>
__device__ __forceinline__ void copy_and_multiply(int depths, COPY copy, MULTIPLY multiply)
{
    extern __shared__ unsigned char shared[];
    const memory m = {(shared_address(shared) + 1023) & ~1023u};
    const int rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(m.full(s), 1);
            barrier_init(m.empty(s), 2 * 4 * CLUSTER); /* each warp that multiplies */
        }
        barriers_made();
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_down<REGISTERS_COPYING>();
        if (threadIdx.x == 0)
            copy(m, rank);
    } else {
        registers_up<REGISTERS>();
        group g = {(int)threadIdx.x / 128 - 1, (int)threadIdx.x / 32 % 4, (int)threadIdx.x % 32, 0};
        g.number = __shfl_sync(~0u, g.number, 0);
        if (g.number == 1 && depths > LATE) {
            barrier_wait(m.full(LATE), 0);
            __nanosleep(LATE_NS);
        }
        multiply(m, rank, g);
        if (g.outs > 0 && g.warp == 0 && g.lane == 0)
            stores_have_written();
    }
    cluster_sync();
}

/* ---- results ---- */

/* To D, which is returned, and back, where they are: see multiply(). */
template <typename D> __device__ __forceinline__ uint32_t round_two(float &first, float &second)
{
    uint32_t two;
    if constexpr (std::is_same<D, bf16>::value)
        asm volatile("cvt.rn.bf16x2.f32 %2, %1, %0;\n"
                     "shl.b32 %0, %2, 16;\n"
                     "and.b32 %1, %2, 0xffff0000;"
                     : "+f"(first), "+f"(second), "=&r"(two));
    else
        asm volatile("{\n"
                     ".reg .b16 low, high;\n"
                     "cvt.rn.f16x2.f32 %2, %1, %0;\n"
                     "mov.b32 {low, high}, %2;\n"
                     "cvt.f32.f16 %0, low;\n"
                     "cvt.f32.f16 %1, high;\n"
                     "}"
                     : "+f"(first), "+f"(second), "=&r"(two));
    return two;
}

/* 64 rows of 128 bytes at a time, through shared memory, from where the engine takes them, or adds
 * them to what is there. NARROW: z is rounded to D. */
template <typename D, writes WRITES, bool ADDS = false>
__device__ __forceinline__ void write(float (&z)[128], const memory &m, group &g,
                                      const CUtensorMap &to, int column, int row)
{
    constexpr int EACH = WRITES == WIDE ? 32 : 64;
    const bool leads = g.warp == 0 && g.lane == 0;
#pragma unroll
    for (int c = 0; c < COLUMNS / EACH; c++) {
        const uint32_t out = m.out(g.number * OUTS + g.outs % OUTS);
        if (leads)
            stores_have_read<OUTS - 1>();
        group_sync(1 + g.number);
        if constexpr (WRITES == WIDE) {
#pragma unroll
            for (int i = 0; i < EACH / 8 * 2; i++) {
                const float *v = z + c * (EACH / 8 * 4) + 2 * i;
                const int r = g.warp * 16 + g.lane / 4 + i % 2 * 8, word = i / 2 * 2 + g.lane % 4 / 2;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                                 out + r * 128 + (word ^ r % 8) * 16 + g.lane % 2 * 8),
                             "f"(v[0]), "f"(v[1])
                             : "memory");
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH / 16; i++) { /* 16 columns: 8 x 8 of each row half, then of the next */
                float *v = z + c * (EACH / 8 * 4) + 8 * i;
                const int r = g.warp * 16 + g.lane % 16, word = 2 * i + g.lane / 16;
                const uint32_t a = round_two<D>(v[0], v[1]), b = round_two<D>(v[2], v[3]),
                               d = round_two<D>(v[4], v[5]), e = round_two<D>(v[6], v[7]);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                 out + r * 128 + (word ^ r % 8) * 16),
                             "r"(a), "r"(b), "r"(d), "r"(e)
                             : "memory");
            }
        }
        shared_is_written();
        group_sync(1 + g.number);
        if (leads && ADDS)
            tile_add(&to, out, column + c * EACH, row);
        else if (leads)
            tile_store(&to, out, column + c * EACH, row);
        g.outs++;
    }
}

/* ---- launching ---- */

using encode_t = decltype(&cuTensorMapEncodeTiled);

/* Not linked, for the driver's library need not be where this is loaded */
cudaError_t find_encode(encode_t *encode)
{
    static void *found;
    cudaError_t e = cudaSuccess;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSuccess;
    void *fn = found;
    if (!fn)
#if CUDART_VERSION >= 12050
        e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                             cudaEnableDefault, &result);
#else
        e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &result);
#endif
    if (e == cudaSuccess && (result != cudaDriverEntryPointSuccess || !fn))
        e = cudaErrorSymbolNotFound;
    if (e == cudaSuccess)
        found = fn;
    *encode = (encode_t)fn;
    return e;
}

CUtensorMapDataType type_of(colo_dtype_t dtype)
{
    return dtype == COLO_BF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
           : dtype == COLO_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

/* Tiles of @rows rows and 128 bytes of @x [@extent, @width] */
cudaError_t map_of(const colo_linear_matrix &x, int64_t extent, int64_t width, int rows,
                   CUtensorMap *map)
{
    encode_t encode;
    const cudaError_t e = find_encode(&encode);
    if (e != cudaSuccess)
        return e;
    const cuuint64_t elem = x.dtype == COLO_F32 ? 4 : 2,
                     size[2] = {(cuuint64_t)width, (cuuint64_t)extent},
                     stride[1] = {(cuuint64_t)x.stride * elem};
    const cuuint32_t box[2] = {(cuuint32_t)(128 / elem), (cuuint32_t)rows}, step[2] = {1, 1};
    return encode(map, type_of(x.dtype), 2, x.data, size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? cudaSuccess
               : cudaErrorInvalidValue;
}

cudaLaunchAttribute in_clusters()
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = CLUSTER;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    return attribute;
}

/* Of the whole product: no more clusters of blocks than the @fit that run at a time */
template <typename K, typename... ARGS>
cudaError_t launch_tiles(K *kernel, writes w, int64_t tiles, int32_t fit, cudaStream_t stream,
                         const ARGS &...args)
{
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_of(w));
    if (e != cudaSuccess)
        return e;
    cudaLaunchAttribute attribute = in_clusters();
    cudaLaunchConfig_t config = {};
    config.gridDim = CLUSTER * (unsigned)std::min<int64_t>(tiles, fit);
    config.blockDim = THREADS;
    config.dynamicSmemBytes = bytes_of(w);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    e = cudaLaunchKernelEx(&config, kernel, args...);
    return e != cudaSuccess ? e : cudaGetLastError();
}

} // namespace

#endif
