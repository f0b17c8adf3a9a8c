/* SPDX-License-Identifier: Apache-2.0 */
/*
 * head-product.cu - the lm_head's product of 16-bit operands on Hopper, whose logits become
 * statistics where they are made, in registers, as fp32 or after they are rounded to a logits_dtype of
 * 16 bits. fp32 ones are written if something reads them later.
 *
 * A block makes tiles of 128 rows and 256 columns. One warp has the copy engine fill four stages of
 * shared memory, each 64 elements of the sum; two groups of 128 threads have 64 rows each and take
 * the stages at their own pace. The second begins a stage late, so that one group makes
 * statistics of a tile while the other one's products go on. A cluster of two blocks has the same
 * columns of neighbouring rows: each copies half of the weight's tile to both.
 *
 * Blocks stay for the whole product. Tiles are in groups of rows whose hidden states fit into the L2
 * cache several times; in a group the blocks go on from columns to columns, so all of them read the
 * same few rows of the weight.
 *
 * A row's sum over hidden and the order of its statistics depend on nothing but the row.
 */
#include "arch.cuh"
#include "logprob.cuh"
#include "wgmma.cuh"

#include <algorithm>
#include <cmath>

namespace
{

constexpr int ROWS = 64, BLOCK_ROWS = 2 * ROWS, COLUMNS = COLO_LOGPROB_TILE, DEPTH = 64, CLUSTER = 2;
constexpr int STAGES = 4, H_BYTES = BLOCK_ROWS * DEPTH * 2, W_BYTES = COLUMNS * DEPTH * 2,
              STAGE_BYTES = H_BYTES + W_BYTES;
constexpr int THREADS = 3 * 128, REGISTERS_COPYING = 40, REGISTERS = 232;
constexpr int OUT_BYTES = ROWS * 128, OUTS = 2; /* of logits on their way, for each group */
constexpr int SMALL_BYTES = 2048;               /* barriers, and a bias for each group */
constexpr int NEAR_BYTES = 16 << 20;            /* of hidden states of a group of tiles */
constexpr int LATE = 1, LATE_NS = 300;

/* What is kept of a tile's row */
enum keeps { MOST, EVERYTHING };

struct product_args {
    int64_t lo, rows, columns, true_columns, start;
    const int64_t *targets;
    int64_t target_stride;
    const void *bias;
    float factor, cap, by_cap;
    bool plain, entropy, narrow; /* narrow: logits are of D */
    float *tiles;
    int64_t tiles_stride;
    int32_t numbers, depths, row_tiles, column_tiles, group; /* row_tiles, group: of a cluster */
};

constexpr int bytes_of(bool writes)
{
    return 1024 + STAGES * STAGE_BYTES + SMALL_BYTES + (writes ? 2 * OUTS * OUT_BYTES : 0);
}

struct place {
    int row, column; /* of tiles; row: of a cluster's */
};

__device__ __forceinline__ place place_of(const product_args &p, int64_t tile)
{
    const int64_t each = (int64_t)p.group * p.column_tiles;
    const int group = (int)(tile / each), rest = (int)(tile - group * each),
              rows = min(p.group, p.row_tiles - group * p.group);
    return {group * p.group + rest % rows, rest / rows};
}

/* The threads of a row are four neighbours. */
__device__ __forceinline__ float row_max(float v)
{
    v = max_nan(v, __shfl_xor_sync(~0u, v, 1));
    return max_nan(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ __forceinline__ float row_sum(float v)
{
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ __forceinline__ int row_min(int v)
{
    v = min(v, __shfl_xor_sync(~0u, v, 1));
    return min(v, __shfl_xor_sync(~0u, v, 2));
}

/* Where things are in shared memory */
struct memory {
    uint32_t stages;
    __device__ uint32_t h(int stage) const
    {
        return stages + stage * STAGE_BYTES;
    }
    __device__ uint32_t w(int stage) const
    {
        return h(stage) + H_BYTES;
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

/* ---- copying ---- */

__device__ __forceinline__ void copy_all(const memory &m, const product_args &p,
                                         const CUtensorMap &h, const CUtensorMap &w, int rank)
{
    turn t = {0, 1};
    const int64_t tiles = (int64_t)p.row_tiles * p.column_tiles;
    for (int64_t i = blockIdx.x / CLUSTER; i < tiles; i += gridDim.x / CLUSTER) {
        const place at = place_of(p, i);
        for (int k = 0; k < p.depths; k++, t.next()) {
            barrier_wait(m.empty(t.stage), t.parity);
            barrier_expect(m.full(t.stage), STAGE_BYTES);
            tile_load(m.h(t.stage), &h, m.full(t.stage), k * DEPTH,
                      (at.row * CLUSTER + rank) * BLOCK_ROWS);
            tile_load_for(m.w(t.stage) + rank * (W_BYTES / CLUSTER), &w, m.full(t.stage), k * DEPTH,
                          at.column * COLUMNS + rank * (COLUMNS / CLUSTER), (1 << CLUSTER) - 1);
        }
    }
    for (int k = 0; k < STAGES; k++, t.next()) /* the other block still arrives here */
        barrier_wait(m.empty(t.stage), t.parity);
}

/* ---- a tile ---- */

/* One of the two groups of threads that multiply */
struct group {
    int number, warp, lane, outs;
};

template <typename D>
__device__ __forceinline__ void multiply(float (&z)[128], const memory &m, const group &g, turn &t,
                                         int depths)
{
    const auto release = [&](int stage) {
        if (g.lane < CLUSTER)
            barrier_arrive(m.empty(stage), g.lane);
    };
    for (int k = 0; k < depths; k++, t.next()) {
        barrier_wait(m.full(t.stage), t.parity);
        const uint64_t h = operand(m.h(t.stage) + g.number * (ROWS * DEPTH * 2)),
                       w = operand(m.w(t.stage));
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++)
            product_begin<std::is_same<D, bf16>::value>(z, h + 2 * i, w + 2 * i, k > 0 || i > 0);
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

/* Two columns of the tile's bias, a thread's; it waits for them after the products. */
template <typename D> __device__ __forceinline__ uint32_t load_bias(const product_args &p, int tile)
{
    const int64_t column = (int64_t)tile * COLUMNS + threadIdx.x % 128 * 2;
    const typename D::elem *bias = (const typename D::elem *)p.bias;
    const uint32_t first = column < p.columns ? bias[column] : 0,
                   second = column + 1 < p.columns ? bias[column + 1] : 0;
    return first | second << 16;
}

template <typename D>
__device__ __forceinline__ void add_bias(float (&z)[128], const memory &m, const group &g,
                                         uint32_t own)
{
    const uint32_t all = m.bias(g.number);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(all + threadIdx.x % 128 * 4), "r"(own) : "memory");
    group_sync(1 + g.number);
#pragma unroll
    for (int j = 0; j < 32; j++) {
        uint32_t two;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(two) : "r"(all + j * 16 + g.lane % 4 * 4));
        const float b[2] = {D::load((typename D::elem)(two & 0xffff)),
                            D::load((typename D::elem)(two >> 16))};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            z[4 * j + e] += b[e];
            z[4 * j + 2 + e] += b[e];
        }
    }
    group_sync(1 + g.number);
}

/* To D and back, where they are: see multiply(). */
template <typename D> __device__ __forceinline__ void round_all(float (&z)[128])
{
#pragma unroll
    for (int j = 0; j < 128; j++)
        if constexpr (std::is_same<D, bf16>::value)
            asm volatile("{\n"
                         ".reg .b16 low, high;\n"
                         "cvt.rn.bf16.f32 high, %0;\n"
                         "mov.b16 low, 0;\n"
                         "mov.b32 %0, {low, high};\n"
                         "}"
                         : "+f"(z[j]));
        else
            asm volatile("{\n"
                         ".reg .b16 half;\n"
                         "cvt.rn.f16.f32 half, %0;\n"
                         "cvt.f32.f16 %0, half;\n"
                         "}"
                         : "+f"(z[j]));
}

/* fp32 logits, 64 rows and 32 columns at a time, through shared memory, from where the engine takes
 * them. */
__device__ __forceinline__ void write(const float (&z)[128], const memory &m, group &g,
                                      const CUtensorMap &to, int column, int row)
{
    constexpr int EACH = 32;
    const bool leads = g.warp == 0 && g.lane == 0;
#pragma unroll
    for (int c = 0; c < COLUMNS / EACH; c++) {
        const uint32_t out = m.out(g.number * OUTS + g.outs % OUTS);
        if (leads)
            stores_have_read<OUTS - 1>();
        group_sync(1 + g.number);
#pragma unroll
        for (int i = 0; i < EACH / 8 * 2; i++) {
            const float *v = z + c * (EACH / 8 * 4) + 2 * i;
            const int r = g.warp * 16 + g.lane / 4 + i % 2 * 8, word = i / 2 * 2 + g.lane % 4 / 2;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                             out + r * 128 + (word ^ r % 8) * 16 + g.lane % 2 * 8),
                         "f"(v[0]), "f"(v[1])
                         : "memory");
        }
        shared_is_written();
        group_sync(1 + g.number);
        if (leads)
            tile_store(&to, out, column + c * EACH, row);
        g.outs++;
    }
}

/* Statistics of a row of the tile, as colo_logprob_tiles_stride() says. @target: in the tile, or -1 */
template <keeps KEEP>
__device__ __forceinline__ void keep_row(const float (&x)[128], const product_args &p, int r,
                                         float factor, int64_t row, int target, int tile, int lane)
{
    const int first = lane % 4 * 2, real = (int)min(p.true_columns - (int64_t)tile * COLUMNS,
                                                    (int64_t)COLUMNS);
    float top = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < 32; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            top = max_nan(top, x[4 * j + 2 * r + e]);
    top = row_max(top);
    const float m = factor * top, base = m == -CUDART_INF_F ? 0 : m;
    float s[4] = {0, 0, 0, 0}, u[4] = {0, 0, 0, 0}, sum = 0;
    int arg = COLUMNS;
    const auto take = [&](auto with_u) {
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float v = x[4 * j + 2 * r + e], d = fmaf(factor, v, -base),
                            exponential = exp_of(d);
                s[(2 * j + e) % 4] += exponential;
                if (decltype(with_u)::value) /* not 0 * -inf */
                    u[(2 * j + e) % 4] = fmaf(exponential, fmaxf(d, -1e4f), u[(2 * j + e) % 4]);
                if (KEEP == EVERYTHING && first + 8 * j + e < real) {
                    sum += d;
                    arg = arg == COLUMNS && v == top ? first + 8 * j + e : arg;
                }
            }
    };
    if (KEEP == EVERYTHING || p.entropy)
        take(std::true_type());
    else
        take(std::false_type());
    const float all = row_sum((s[0] + s[1]) + (s[2] + s[3])),
                all_u = row_sum((u[0] + u[1]) + (u[2] + u[3]));
    float *of = p.tiles + row * p.tiles_stride, *to = of + 1 + (int64_t)tile * p.numbers;
    if (KEEP == EVERYTHING) {
        sum = row_sum(sum);
        arg = row_min(arg);
    }
    if (row < p.rows) {
        if (lane % 4 == 0)
            to[0] = m;
        if (lane % 4 == 1)
            to[1] = all;
        if (lane % 4 == 2 && (KEEP == EVERYTHING || p.entropy))
            to[2] = all_u;
        if (KEEP == EVERYTHING && lane % 4 == 3) {
            to[3] = sum;
            to[4] = (float)arg;
        }
    }
    if (__any_sync(~0u, target >= 0)) /* seldom */
#pragma unroll
        for (int j = 0; j < 32; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (target == first + 8 * j + e)
                    of[0] = x[4 * j + 2 * r + e];
}

template <typename D, keeps KEEP, bool WRITES>
__device__ __forceinline__ void multiply_all(const memory &m, const product_args &p,
                                             const CUtensorMap &to, int rank)
{
    group g = {(int)threadIdx.x / 128 - 1, (int)threadIdx.x / 32 % 4, (int)threadIdx.x % 32, 0};
    g.number = __shfl_sync(~0u, g.number, 0);
    turn t = {0, 0};
    float z[128];
    const int64_t tiles = (int64_t)p.row_tiles * p.column_tiles;
    if (g.number == 1 && p.depths > LATE) {
        barrier_wait(m.full(LATE), 0);
        __nanosleep(LATE_NS);
    }
    for (int64_t i = blockIdx.x / CLUSTER; i < tiles; i += gridDim.x / CLUSTER) {
        const place at = place_of(p, i);
        const int first_row = (at.row * CLUSTER + rank) * BLOCK_ROWS + g.number * ROWS;
        const int64_t row = first_row + g.warp * 16 + g.lane / 4,
                      first = (int64_t)at.column * COLUMNS + g.lane % 4 * 2;
        int target[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t j = row + 8 * r < p.rows
                                  ? p.targets[(p.lo + row + 8 * r) * p.target_stride] - p.start -
                                        (int64_t)at.column * COLUMNS
                                  : -1;
            target[r] = j >= 0 && j < COLUMNS ? (int)j : -1;
        }
        const uint32_t bias = p.bias ? load_bias<D>(p, at.column) : 0;
        multiply<D>(z, m, g, t, p.depths);
        if (p.bias)
            add_bias<D>(z, m, g, bias);
        if constexpr (WRITES)
            write(z, m, g, to, at.column * COLUMNS, first_row);
        else if (p.narrow)
            round_all<D>(z);
        const bool plain = KEEP == MOST && p.plain;
        if (p.cap > 0)
#pragma unroll
            for (int j = 0; j < 128; j++)
                z[j] = product(p.cap, tanhf(product(p.by_cap, z[j])));
        else if (!plain)
#pragma unroll
            for (int j = 0; j < 128; j++)
                z[j] = product(p.factor, z[j]);
        if ((at.column + 1) * (int64_t)COLUMNS > p.true_columns)
#pragma unroll
            for (int j = 0; j < 32; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (first + 8 * j + e >= p.true_columns)
                        z[4 * j + e] = z[4 * j + 2 + e] = -CUDART_INF_F;
#pragma unroll
        for (int r = 0; r < 2; r++)
            keep_row<KEEP>(z, p, r, plain ? p.factor : 1, row + 8 * r, target[r], at.column, g.lane);
    }
    if (WRITES && g.warp == 0 && g.lane == 0)
        stores_have_written();
}

template <typename D, keeps KEEP, bool WRITES>
__global__ void __launch_bounds__(THREADS, 1)
    head_kernel(const __grid_constant__ CUtensorMap h, const __grid_constant__ CUtensorMap w,
                const __grid_constant__ CUtensorMap z, const __grid_constant__ product_args p)
{
    if constexpr (HAS_WGMMA) {
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
                copy_all(m, p, h, w, rank);
        } else {
            registers_up<REGISTERS>();
            multiply_all<D, KEEP, WRITES>(m, p, z, rank);
        }
        cluster_sync();
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

product_args args_of(const colo_linear_tiled &given)
{
    const colo_logprob_args &stats = *given.stats;
    product_args p = {};
    p.lo = stats.lo;
    p.rows = stats.hi - stats.lo;
    p.columns = stats.columns;
    p.true_columns = stats.true_columns;
    p.start = stats.config.logits.vocab_start;
    p.targets = stats.targets;
    p.target_stride = stats.target_stride;
    p.bias = given.bias;
    p.factor = (float)stats.factor;
    p.cap = (float)stats.cap;
    p.by_cap = (float)(stats.cap > 0 ? stats.factor / stats.cap : 0);
    p.plain = is_plain(stats);
    p.entropy = stats.block.u >= 0;
    p.narrow = stats.dtype != COLO_F32;
    p.tiles = stats.tiles;
    p.tiles_stride = colo_logprob_tiles_stride(&stats.block, stats.columns);
    p.numbers = colo_logprob_tile_numbers(&stats.block);
    p.depths = (int32_t)((given.hidden - 1) / DEPTH + 1);
    p.row_tiles = (int32_t)((p.rows - 1) / (BLOCK_ROWS * CLUSTER) + 1);
    p.column_tiles = (int32_t)((p.columns - 1) / COLUMNS + 1);
    p.group = (int32_t)std::max<int64_t>(
        NEAR_BYTES / (given.hidden * 2) / (BLOCK_ROWS * CLUSTER), 1);
    return p;
}

template <typename D, keeps KEEP, bool WRITES>
cudaError_t launch(const colo_linear_tiled &given, cudaStream_t stream)
{
    const product_args p = args_of(given);
    auto *kernel = head_kernel<D, KEEP, WRITES>;
    CUtensorMap h, w, z;
    cudaError_t e = map_of(given.h, p.rows, given.hidden, BLOCK_ROWS, &h);
    if (e == cudaSuccess)
        e = map_of(given.w, p.columns, given.hidden, COLUMNS / CLUSTER, &w);
    z = h;
    if (e == cudaSuccess && WRITES)
        e = map_of(given.z, p.rows, p.columns, ROWS, &z);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_of(WRITES));
    if (e != cudaSuccess)
        return e;
    cudaLaunchAttribute attribute = in_clusters();
    cudaLaunchConfig_t config = {};
    config.gridDim = CLUSTER * (unsigned)std::min<int64_t>((int64_t)p.row_tiles * p.column_tiles,
                                                           given.clusters);
    config.blockDim = THREADS;
    config.dynamicSmemBytes = bytes_of(WRITES);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    e = cudaLaunchKernelEx(&config, kernel, h, w, z, p);
    return e != cudaSuccess ? e : cudaGetLastError();
}

template <typename D, keeps KEEP>
cudaError_t launch_with(const colo_linear_tiled &given, cudaStream_t stream)
{
    return given.z.data ? launch<D, KEEP, true>(given, stream) : launch<D, KEEP, false>(given, stream);
}

template <typename D> cudaError_t launch_of(const colo_linear_tiled &given, cudaStream_t stream)
{
    return colo_logprob_tile_numbers(&given.stats->block) == COLO_LOGPROB_TILE_NUMBERS
               ? launch_with<D, EVERYTHING>(given, stream)
               : launch_with<D, MOST>(given, stream);
}

} // namespace

extern "C" cudaError_t colo_k_head_fit(int32_t *clusters)
{
    auto *kernel = head_kernel<bf16, MOST, true>;
    bool has = false;
    int n = 0;
    *clusters = 0;
    cudaError_t e = code_has_wgmma(kernel, &has);
    if (e != cudaSuccess || !has)
        return e;
    cudaLaunchAttribute attribute = in_clusters();
    cudaLaunchConfig_t config = {};
    config.gridDim = CLUSTER;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = bytes_of(true);
    config.attrs = &attribute;
    config.numAttrs = 1;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_of(true));
    if (e == cudaSuccess)
        e = cudaOccupancyMaxActiveClusters(&n, kernel, &config);
    *clusters = n;
    return e;
}

extern "C" cudaError_t colo_k_head_product(const colo_linear_tiled *p, cudaStream_t stream)
{
    if (p->stats->hi <= p->stats->lo || p->stats->columns <= 0)
        return cudaSuccess;
    return p->h.dtype == COLO_BF16 ? launch_of<bf16>(*p, stream) : launch_of<f16>(*p, stream);
}
